"""docs/tutorial/why.md: its commands run as they stand there, and what it says of them holds."""

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ...helpers import rows_of
from ...pages import ROOT, blocks, replay

PAGE = (ROOT / "docs" / "tutorial" / "why.md").read_text(encoding="utf-8")
RUNS = "outputs/quickstart_underflow"
SCALED = "fp16_master_scaled-scaler=static-scaler.scale=65536"


def commands() -> list[str]:
    lines = [line for block in blocks(PAGE, "console") for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (script,) = blocks(PAGE, "python")
    (folder / "shadow.py").write_text(script)
    return folder, replay(commands(), folder)


def losses(folder: Path, mode: str) -> list[float]:
    """Loss of the final evaluation for seeds 0 to 2."""
    folders = (folder / RUNS / f"{mode}-s{seed}" for seed in range(3))
    return [rows_of(folder, "eval")[-1]["loss"] for folder in folders]


def ended(replayed, start: str) -> CompletedProcess:
    """The one command of the page that starts so."""
    (found,) = [result for command, result in replayed[1].items() if command.startswith(start)]
    return found


def test_the_figures_are_there_and_small():
    names = re.findall(r"\]\(\.\./(figures/[^)]+\.png)\)", PAGE)
    assert len(names) == 3
    for name in names:
        assert 0 < (ROOT / "docs" / name).stat().st_size < 80_000


@pytest.mark.slow
def test_every_command_ends_as_the_page_says(replayed):
    codes = {command: result.returncode for command, result in replayed[1].items()}
    assert len(codes) == 12
    diverged = "mprun experiment=quickstart_underflow threads=1 precision=fp16_naive"
    assert {command for command, code in codes.items() if code} == {diverged}
    assert codes[diverged] == 3


@pytest.mark.slow
def test_explain_names_eps_and_eps_alone_does_not_train(replayed):
    text = ended(replayed, "mprun explain").stdout
    assert re.search(r"^culprit +weight update, optimizer: _foreach_addcdiv_$", text, re.MULTILINE)
    assert "the optimizer's denominator and its eps round to 0" in text
    assert re.search(r"optim\.eps=0\.0001 +cures ", text)
    assert re.search(r"precision\.master_dtype=fp32 precision\.grad_dtype=fp32 +cures ", text)
    assert re.search(r"scaler=static scaler\.scale=1024 +does not cure ", text)
    assert re.search(r"backward +encoder\.layers\.conv3 +0 +fp16", text)
    folder = replayed[0] / RUNS / "fp16_naive-optim.eps=1e-06-s0"
    rows = rows_of(folder)
    assert {row["grad_norm"] for row in rows if row["split"] == "train" and row["step"] >= 4} == {0}
    assert rows[-1]["split"] == "eval" and rows[-1]["loss"] > 4 * rows[0]["loss"]


@pytest.mark.slow
def test_master_weights_alone_learn_less(replayed):
    folder = replayed[0]
    # At every seed by more than the margin of 1 %.
    pairs = zip(losses(folder, "fp16_master"), losses(folder, "fp32"), strict=True)
    assert all(own > 1.01 * fp32 for own, fp32 in pairs)
    verdict = ended(replayed, f"mprun compare {RUNS}").stdout
    assert re.search(r"^  worse +fp16_master ", verdict, re.MULTILINE)


@pytest.mark.slow
def test_the_shadow_step_shows_an_encoder_without_gradient(replayed):
    rows = {}
    for mode in ("fp16_master", SCALED):
        text = ended(replayed, f"python shadow.py {RUNS}/{mode}-s0").stdout
        lines = text.splitlines()
        rows[mode] = [[float(word) for word in re.findall(r"\d\.\d+", line)] for line in lines]
        assert len(rows[mode]) == 5
    for error, *norms in rows["fp16_master"][:3]:
        assert error < 0.05 and max(norms[:3]) < 0.001 and norms[-1] > 0.99
    for own, (error, *norms) in zip(rows["fp16_master"], rows[SCALED], strict=True):
        assert error < own[0] / 25
        assert all(abs(norm - 1) < 0.02 for norm in norms)


@pytest.mark.slow
def test_the_advised_scale_matches_without_a_skipped_update(replayed):
    folder, _ = replayed
    advice = ended(replayed, "mprun advise").stdout
    advised = "precision=fp16_master_scaled scaler=static scaler.scale=65536"
    assert "1 master weights: needed\n" in advice and "2 loss scaling: needed\n" in advice
    assert advised in advice.partition("use it in FP16\n")[2]
    (sweep,) = [one for one in commands() if one.startswith("mprun -m") and "static" in one]
    assert advised in sweep
    own, fp32 = sum(losses(folder, SCALED)), sum(losses(folder, "fp32"))
    assert abs(own / fp32 - 1) < 0.01
    text = replayed[1]["mprun compare outputs"].stdout
    # In 80 columns the mode takes two lines.
    assert re.search(r"^  matches +fp16_master_scaled .*\n +\(static\) ", text, re.MULTILINE)
    for seed in range(3):
        steps = rows_of(folder / RUNS / f"{SCALED}-s{seed}", "train")
        assert len(steps) == 25 and not any(row["skipped"] for row in steps)


@pytest.mark.slow
def test_each_rule_does_what_the_page_says(replayed):
    skipped, loss = {}, {}
    for name in ("torch", "fairseq", "megatron"):
        runs = [replayed[0] / RUNS / f"fp16_master_scaled-scaler={name}-s{n}" for n in range(3)]
        skipped[name] = [rows_of(run, "train")[-1]["skipped"] for run in runs]
        loss[name] = sum(rows_of(run, "eval")[-1]["loss"] for run in runs)
    assert skipped["torch"] == skipped["fairseq"] == [0, 0, 0]
    assert set(skipped["megatron"]) <= {15, 16}
    assert loss["torch"] < loss["fairseq"] < loss["megatron"] / 1.2
