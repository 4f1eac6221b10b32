"""`mprun -m ... until=decided`: which runs a sweep makes, what it refuses, stops and launchers."""

import re
import signal

import pytest

from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.sweeps.plan import plan
from mprun.sweeps.status_page import StatusPage
from mprun.sweeps.until import SeedRounds

from ..compare.run_folders import change_record, compared, write_run
from ..helpers import LM, record_of, refused
from .test_launchers import each_launcher

MODES = "precision=fp32,fp16_naive,amp"
UNTIL, BASE = ["until=decided", "max_seeds=5"], "compare.baseline=amp_bf16"
# Three modes whose FP32 learns. At 0.03 % one of them is open after the first look.
REAL = [*LM, "train.steps=60", "optim.lr=1", "precision=fp32,bf16_naive,amp"]


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["until=decided"], "until=decided: only a sweep (-m) adds seeds"),
        (["max_seeds=5"], "max_seeds=5: only a sweep (-m) adds seeds"),
        (["-m", MODES, "max_seeds=5"], "max_seeds=5: is only allowed with until=decided"),
        (["-m", MODES, "until=tired"], "until=tired: must be the word decided"),
        (["-m", MODES, *UNTIL, "seed=0,1"], "seed: must be one value with until=decided"),
        (["-m", MODES, *UNTIL, "seed=range(3)"], "seed: must be one value with until=decided"),
        (["-m", MODES, "until=decided", "max_seeds=2"], "max_seeds=2: must be a whole number from"),
        (["-m", MODES, "until=decided", "max_seeds=51"], "from 3 to 50"),
        (["-m", MODES, "until=decided", "max_seeds=ten"], "max_seeds=ten: must be a whole number"),
        (["-m", MODES, "until=decided", "min_seeds=2"], "min_seeds=2: must be a whole number from"),
        (["-m", MODES, *UNTIL, "min_seeds=6"], "max_seeds=5: must be a whole number from 6 (min_s"),
        (["-m", "precision=fp32", *UNTIL], "needs a mode other than the baseline"),
        (
            ["-m", "precision=amp,bf16_naive", *UNTIL],
            "no run of the baseline; add fp32 to precision=",
        ),
        (["-m", MODES, BASE, *UNTIL], f"add amp_bf16 to precision= ({BASE})"),
        (["-m", MODES, *UNTIL, "seed=9223372036854775805"], "seed=9223372036854775808: must be"),
        (["compare.plan=[0,3,2]"], "compare.plan=[0, 3, 2]: must be [first seed, seeds of the fi"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, says, tmp_path, capsys):
    assert says in refused(capsys, *words)
    assert not list(tmp_path.iterdir())


def places(sweep) -> set:
    return {(cell.directory, cell.config_hash) for cell in sweep.cells}


@pytest.mark.slow
def test_the_plan_has_every_seed_and_stands_in_the_configuration():
    found = plan([*LM, MODES, *UNTIL, "seed=4"], None)
    assert [cell.seed for cell in found.cells] == [s for s in range(4, 9) for _ in range(3)]
    for cell in found.cells:
        config = compose_config(cell.overrides).config
        assert (config.seed, config.compare.plan) == (cell.seed, [4, 3, 5])
        assert cell.any_plan == (cell.mode == "fp32")  # a baseline's run may be an earlier one
    # The same directories and hashes as those of a sweep that names its seeds.
    plain = plan([*LM, MODES, "seed=4,5,6,7,8"], None)
    assert places(plain) == places(found)


DIFFERENCES = {"fp16_naive": (0.03, -0.03, 0.02, -0.02, 0.0), "amp": (0.001, -0.001, 0.0, 0.0, 0.0)}


def end(cell, status="done", **changes) -> None:
    """Write the record of a cell's run: FP32 ends near 2, the modes so far from it."""
    base = 2.0 + 0.1 * (cell.seed % 3)
    final = base + DIFFERENCES.get(cell.mode, [0.0] * 5)[cell.seed]
    config = compose_config(cell.overrides).as_dict()
    told = {"config": config, "config_hash": cell.config_hash}
    write_run(cell.directory, cell.mode, cell.seed, final=final, status=status, **told)
    change_record(cell.directory, **changes)


def rounds_of(found, page=None, **how) -> list[list[str]]:
    """Go through the rounds; how: "amp-s1" -> status of this run."""
    page, asked = page or StatusPage(found, "mprun -m ..."), []
    rounds = SeedRounds(found.cells, page)
    for cells in rounds:
        asked.append([f"{cell.mode}_s{cell.seed}" for cell in cells])
        for cell, name in zip(cells, asked[-1], strict=True):
            if not cell.directory.exists():
                end(cell, how.get(name, "done"))
                page.words[cell] = how.get(name, "done")
    rounds.say()
    return asked


@pytest.mark.slow
def test_the_rounds_of_a_sweep_and_the_same_again(capsys):
    found = plan([*LM, MODES, *UNTIL], None)
    first = rounds_of(found)
    assert [len(one) for one in first] == [9, 2, 2]
    assert first[1:] == [["fp32_s3", "fp16_naive_s3"], ["fp32_s4", "fp16_naive_s4"]]
    printed = capsys.readouterr()
    matches = "amp: matches after 3 of at most 5 seeds (planned looks, 5 % over all)"
    assert printed.out.splitlines() == ["fp16_naive: undecided after 5", matches]
    assert "fp16_naive: open, look at 3 of at most 5 seeds" in printed.err
    assert rounds_of(found) == first  # what has ended already is asked for again, and not run
    again = capsys.readouterr()
    assert again.out == printed.out and not again.err
    # A comparison of all runs of the folder says the same.
    [group] = compared(capsys, "outputs")["groups"]
    verdicts = {one["label"]: one["verdict"]["name"] for one in group["modes"]}
    assert verdicts == {"amp": "matches", "fp16_naive": "inconclusive"}


@pytest.mark.slow
def test_a_seed_that_looks_went_on_without_stays_missing(capsys):
    found = plan([*LM, MODES, *UNTIL], None)
    first = rounds_of(found, fp16_naive_s1="failed", fp32_s3="failed")
    assert first[-1] == ["fp32_s4", "fp16_naive_s4"]
    out = capsys.readouterr().out
    assert "fp16_naive: undecided after 3; no outcome of seed 1" in out  # pairs 0, 2 and 4
    again = rounds_of(found)
    left = [name for one in first for name in one if name not in sum(again, [])]
    assert left == ["fp16_naive_s1", "fp32_s3"]
    printed = capsys.readouterr()
    assert printed.out == out
    assert "fp16_naive: seed 1 stays missing, looks were taken without it" in printed.err
    # A mode that had no outcome at all is tried again: no look was taken.
    for cell in found.cells:
        if cell.mode == "fp16_naive" and cell.directory.exists():
            change_record(cell.directory, status="failed")
    assert "fp16_naive_s1" in rounds_of(found)[0]


@pytest.mark.slow
def test_a_run_that_is_stopped_alone_ends_the_rounds_until_it_goes_on(capsys):
    found = plan([*LM, MODES, *UNTIL], None)
    assert len(rounds_of(found, fp16_naive_s3="preempted")) == 2
    out = capsys.readouterr().out
    assert "fp16_naive: open, look at 3 of at most 5 seeds, which may not be enough\n" in out
    [cell] = [one for one in found.cells if (one.mode, one.seed) == ("fp16_naive", 3)]
    change_record(cell.directory, status="done")
    assert rounds_of(found)[-1] == ["fp32_s4", "fp16_naive_s4"]


@pytest.mark.slow
def test_values_that_were_seen_before_the_plan_are_not_judged_by_it(capsys):
    plain = plan([*LM, "precision=fp32,amp", "seed=0,1,2"], None)
    for cell in plain.cells:
        end(cell)
    line = refused(capsys, "-m", *LM, "precision=fp32,amp", *UNTIL)
    assert "recorded without a plan; until=decided needs seeds without earlier runs" in line
    # FP32's runs serve; a plan of another length does not.
    rounds_of(plan([*LM, "precision=fp32,fp16_naive", *UNTIL], None))
    assert "plan" in refused(capsys, "-m", *LM, "precision=fp32,fp16_naive", "until=decided")
    # A sweep that names its seeds takes the planned runs as they are.
    assert len(plan([*LM, "precision=fp32,fp16_naive", "seed=0,1,2"], None).cells) == 6


def outcomes(folder) -> dict[str, tuple]:
    return {
        path.parent.name: (record["status"], record["final"], record["config"]["compare"]["plan"])
        for path in sorted(folder.glob("outputs/*/*/run.json"))
        for record in [record_of(path.parent)]
        if ".attempt" not in path.parent.name
    }


@pytest.mark.slow
def test_a_sweep_that_is_stopped_and_continued_is_the_one_that_was_not(
    tmp_path, start_sweep, wait_for
):
    words = [*REAL, "compare.margin=0.0003", "until=decided", "max_seeds=6", "-j", "2"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    assert start_sweep(words, whole).wait() == 0
    found = outcomes(whole)
    assert all(plan == [0, 3, 6] for _, _, plan in found.values())
    sweep = start_sweep(words, stopped)
    wait_for(lambda: list(stopped.glob("outputs/*/*s3*/metrics.jsonl")))
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait() == 130
    assert start_sweep(words, stopped).wait() == 0
    assert outcomes(stopped) == found
    printed = ((whole / "out0").read_text(), (stopped / "out2").read_text())
    told = [re.findall(".* seeds .planned.*", text) for text in printed]
    assert told[0] == told[1] and told[0]
    # Once more: no run is made again.
    assert start_sweep(words, stopped).wait() == 0
    assert "starts" not in (stopped / "err3").read_text()


@pytest.mark.slow
def test_a_diverged_mode_gets_no_more_seeds(tmp_path, start_sweep):
    words = [*LM, "train.steps=60", "optim=adam", "optim.lr=0.01", "precision=fp32,fp16_naive"]
    words += [*UNTIL, "-j", "2"]
    assert start_sweep(words, tmp_path).wait() == 0
    runs = outcomes(tmp_path)
    assert len(runs) == 6 and [one[0] for one in runs.values()].count("diverged") == 3
    assert "fp16_naive: diverged in 3 of 3 runs" in (tmp_path / "out0").read_text()


@pytest.mark.slow
@each_launcher
def test_each_round_goes_through_the_launcher(launcher, tmp_path, capfd):
    words = [*REAL, "compare.margin=0.0003", "until=decided", "max_seeds=4"]
    assert main(["-m", *words, *launcher]) == 0
    printed = capfd.readouterr()
    assert "bf16_naive: undecided after 4" in printed.out
    assert len(list(tmp_path.glob("outputs/*/.launcher/*"))) == 2
    assert len(outcomes(tmp_path)) == 3 + 4 + 4


@pytest.mark.slow
def test_runs_of_two_ranks(tmp_path, start_sweep):
    words = [*REAL[:-1], "precision=fp32,amp", "devices=2", *UNTIL]
    assert start_sweep(words, tmp_path).wait() == 0
    assert "amp: matches after 3 of at most 5 seeds" in (tmp_path / "out0").read_text()
    assert len(outcomes(tmp_path)) == 6
