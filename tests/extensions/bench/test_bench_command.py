"""`mprun bench` from the command line: what it refuses, and real benches within their budget."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch

from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.config.option_files import conf_dir
from mprun.extensions.bench.cases import BenchRow, Case
from mprun.extensions.bench.command import exit_code, parse
from mprun.extensions.bench.contest import Contest

from ...helpers import TINY_LM as TINY
from ...helpers import refused

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--modes", "fp23"],
            "--modes fp23: unknown mode; did you mean 'fp32'? It must be one of fp32, ",
        ),
        (["--modes", "mine"], "--modes mine: unknown mode"),
        (["--modes", "tf32", "device=cpu"], "--modes tf32: a CPU has no TF32"),
        (["--modes="], "--modes : needs names, separated by commas"),
        (["--budget", "5"], "--budget 5: must be seconds from 20 to 86400"),
        (["--budget", "soon"], "--budget soon: must be seconds"),
        (["--windows", "0"], "--windows 0: must be a number from 1 to 1000"),
        (["--out"], "bench: --out: needs a value"),
        (["--host"], "bench --host: gone; a checkout has python -m benchmarks.suite --host"),
        (["--card=24"], "bench --card=24: gone; a checkout has python"),
        (["--fast"], "bench: --fast: unknown option"),
        (["outputs"], "bench: 'outputs': neither an option nor key=value"),
        (["precision=amp"], "precision=amp: a bench compares modes; give --modes amp"),
        (["scaler.scale=8"], "scaler.scale=8: "),
        (["model=resnet51"], "model=resnet51"),
        (["resume=outputs/x"], "resume=outputs/x: "),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(capsys, "bench", *arguments, says=f"mprun: {line}")
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_found_without_torch():
    program = (
        "import sys, mprun.cli; code = mprun.cli.main(['bench', '--modes', 'fp23']); "
        "assert code == 2 and 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_folder_that_holds_something_is_not_written_to(tmp_path, capsys):
    (tmp_path / "bench.json").touch()
    told = f"--out {tmp_path}: exists and is not empty"
    refused(capsys, "bench", *TINY, "--out", tmp_path, says=told)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_baselines_come_first_whatever_the_order_given():
    assert parse(["--modes", "amp,fp32,amp"]).modes == ["fp32", "amp"]


@pytest.mark.slow
def test_json_is_all_that_is_printed(tmp_path, capsys):
    words = [*TINY, "--modes=fp32", "--budget=120", "--json", f"--out={tmp_path / 'b'}"]
    assert main(["bench", *words]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == 1


@pytest.mark.slow
def test_what_is_planned(tmp_path):
    def planned(*words):
        ((group,), left_out) = Contest().plan(parse(words), CPU)
        assert left_out == []
        return group

    # Without a configuration it is the default one.
    group = planned("device=cpu")
    assert group.label.startswith(compose_config([]).config.model.name)
    assert [case.mode for case in group.cases] == ["fp32", "fp16_master_scaled", "amp"]
    keys = [case.key for case in planned(*TINY, "--modes", "fp32", "--end-to-end").cases]
    assert keys == ["lstm_lm b2 | fp32 | mprun", "lstm_lm b2 | fp32 | mprun | end to end"]
    # A mode of one's own is taken.
    (tmp_path / "precision").mkdir()
    shipped = (conf_dir() / "precision" / "amp.yaml").read_text()
    (tmp_path / "precision" / "mine.yaml").write_text(shipped)
    group = planned("--config-dir", str(tmp_path), "--modes", "mine,fp32", *TINY)
    assert [case.mode for case in group.cases] == ["fp32", "mine"]
    assert group.cases[1].config().precision.autocast_dtype == "fp16"


def made(mode, contender, losses, skipped=0):
    row = BenchRow(Case("tiny", tuple(TINY), mode, contender))
    row.equality = {"losses": losses, "skipped": skipped}
    return row


def test_modes_are_held_to_fp32_and_best_settings_to_the_defaults():
    nan = float("nan")
    rows = [
        made("fp32", "mprun", [2.0, 2.0]),
        made("fp32", "mprun+", [2.0, 2.0], skipped=1),
        made("amp", "mprun", [2.0, 2.002], skipped=1),
        made("amp", "mprun+", [2.0, nan], skipped=1),
        made("bf16_master", "mprun", [2.0, float("inf")]),
        made("fp16_naive", "mprun", [2.0, nan]),
    ]
    answers = Contest().check(rows)
    assert [answers[row.key][0] for row in rows] == [True, False, True, False, False, True]
    assert answers[rows[1].key][1] == "1 updates skipped, 0 by mprun in fp32"
    assert answers[rows[2].key][1] == "1 updates skipped, 0 by mprun in fp32"
    assert answers[rows[3].key][1] == "loss nan at step 2, 2.002 in mprun in amp"
    close = [made("fp32", "mprun", [2.0]), made("amp", "mprun", [2.002])]
    found = Contest().check(close)[close[1].key]
    assert found == (True, "loss 1.0e-03 apart from mprun in fp32 at step 1")


@pytest.mark.parametrize(
    ("ended", "rows", "code"),
    [
        ("interrupted", [("measured", None, 1)], 130),
        ("complete", [("measured", None, 1), ("failed", "memory", 0)], 0),
        ("complete", [("failed", "memory", 0), ("failed", "memory", 0)], 5),
        ("complete", [("failed", "memory", 0), ("failed", "error", 0)], 1),
        ("deadline", [("not measured", None, 0)], 5),
        ("complete", [("refused", "refused", 0)], 5),
    ],
)
def test_exit_codes(ended, rows, code):
    plain = [{"status": s, "kind": k, "windows": [{}] * windows} for s, k, windows in rows]
    assert exit_code({"ended": ended, "rows": plain}) == code


def bench(*arguments) -> subprocess.Popen:
    command, pipe = [sys.executable, "-m", "mprun", "bench", *arguments], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_a_bench_keeps_its_budget_and_leaves_its_files(tmp_path):
    folder, started = tmp_path / "bench", time.monotonic()
    process = bench(*TINY, "--modes", "fp32,amp", "--budget", "120", "--out", str(folder))
    out, error = process.communicate()
    assert time.monotonic() - started < 120 + 5  # starting and ending Python lie outside
    assert process.returncode == 0, error
    assert out.rstrip().endswith(f"bench: {folder}")
    found = json.loads((folder / "bench.json").read_text())
    assert [row["case"]["mode"] for row in found["rows"]] == ["fp32", "amp"]
    assert all(row["equality"].get("ok", True) for row in found["rows"])
    lines = [json.loads(line) for line in (folder / "bench.jsonl").read_text().splitlines()]
    windows = [line for line in lines if line["event"] == "window"]
    assert sum(len(row["windows"]) for row in found["rows"]) == len(windows)
    assert (folder / "bench.md").read_text() in out
    # Where no window was measured within the budget there is nothing to draw.
    assert not windows or (folder / "bench.png").stat().st_size > 10_000


@pytest.mark.slow
def test_ctrl_c_ends_the_children_and_keeps_what_is_there(tmp_path):
    folder = tmp_path / "bench"
    process = bench(*TINY, "--modes", "fp32", "--windows", "500", "--out", str(folder))
    while "tokens/s" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130, error
    found = json.loads((folder / "bench.json").read_text())
    assert found["ended"] == "interrupted" and found["rows"][0]["windows"]
