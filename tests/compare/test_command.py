"""`mprun compare` from the command line on run directories made by hand."""

import json
import subprocess
import sys

import pytest

from mprun.cli import main
from mprun.cli.compare import parse
from mprun.errors import BadInput

from .run_folders import write_run

# FP32 losses of five seeds and, 0.1 % above with a scatter of 0.05 %, those of a mode.
BASE = (2.00, 2.02, 1.99, 2.01, 1.98)
OFFSETS = (0.002, 0.001, 0.003, 0.002, 0.002)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """outputs/study: fp32, an amp that matches, a fp16_naive 5 % worse and one that diverged."""
    monkeypatch.chdir(tmp_path)
    study = tmp_path / "outputs" / "study"
    for seed, (loss, offset) in enumerate(zip(BASE, OFFSETS, strict=True)):
        write_run(study / f"fp32-s{seed}", "fp32", seed, final=loss)
        write_run(study / f"amp-s{seed}", "amp", seed, final=loss + offset)
        write_run(study / f"naive-s{seed}", "fp16_naive", seed, final=1.05 * loss + offset)
        bad = {"status": "diverged", "last_step": 12} if seed == 3 else {}
        write_run(study / f"bf16-s{seed}", "bf16_naive", seed, final=loss, **bad)
    return study


def compared(capsys, *words) -> dict:
    assert main(["compare", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_verdicts_of_a_study(runs, capsys):
    found = compared(capsys, "outputs")
    [group] = found["groups"]
    rows = {row["label"]: row for row in group["modes"]}
    verdicts = {label: row["verdict"]["name"] for label, row in rows.items()}
    assert verdicts == {"amp": "matches", "fp16_naive": "worse", "bf16_naive": "diverged"}
    # Mean of the offsets 0.002; s = sqrt(2e-6 / 4); t(0.95, 4) = 2.1318; h = t s / sqrt(5).
    amp = rows["amp"]["verdict"]
    half = 2.131847 * (2e-6 / 4) ** 0.5 / 5**0.5
    assert amp["difference"] == pytest.approx(0.002, rel=1e-9)
    assert (amp["low"], amp["high"]) == pytest.approx((0.002 - half, 0.002 + half), rel=1e-6)
    assert amp["margin"] == pytest.approx(0.01 * 2.00, rel=1e-12)


def test_a_table_and_a_report_are_left(runs, capsys):
    assert main(["compare", "outputs/study", "--tensorboard", "--paper"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "report: outputs/study/compare/report.html"
    assert "diverged in 1 of 5 runs (first at step 12" in printed
    folder = runs / "compare"
    assert {"report.html", "report.md", "results.json"} <= {p.name for p in folder.iterdir()}
    assert list(folder.glob("*.png")) and list((runs / "_summary").rglob("events.*"))
    # Again: what it wrote itself is replaced, and is no run.
    assert main(["compare", "outputs/study"]) == 0


def test_check_tells_whether_every_mode_matches(runs, capsys):
    assert main(["compare", "outputs", "--no-report", "--check"]) == 3
    for path in (*runs.glob("naive*"), *runs.glob("bf16*")):
        path.rename(runs.parent.parent / path.name)
    assert main(["compare", "outputs", "--no-report", "--check"]) == 0
    # A mode without a baseline has not matched.
    write_run(runs / "other", "amp", 7, overrides={"optim.lr": 0.3})
    assert main(["compare", "outputs", "--no-report", "--check"]) == 3
    assert not (runs / "compare").exists()


def test_another_learning_rate_is_refused_unless_told(runs, capsys):
    for seed in range(3):
        write_run(runs.parent / f"lr/fp32-{seed}", seed=seed, overrides={"optim.lr": 0.3})
        write_run(runs.parent / f"lr/x-{seed}", "amp", seed, overrides={"optim.lr": 0.2})
    only = [str(path) for path in (runs.parent / "lr").iterdir()]
    assert main(["compare", *only]) == 2
    error = capsys.readouterr().err
    assert "optim.lr" in error and "0.2" in error and "0.3" in error and "--allow" in error
    assert not (runs.parent / "compare").exists() and not (runs.parent / "lr/compare").exists()
    found = compared(capsys, *only, "--allow", "optim.lr")
    assert "optim.lr=0.2" in found["groups"][0]["modes"][0]["label"]
    assert any("optim.lr" in stamp for stamp in found["stamps"])


def test_a_margin_chosen_afterwards_is_stamped(runs, capsys):
    found = compared(capsys, "outputs", "--margin", "0.0005", "--no-report")
    names = {row["label"]: row["verdict"]["name"] for row in found["groups"][0]["modes"]}
    # amp lies 0.1 % above: outside a margin of 0.05 %.
    assert names["amp"] in ("worse", "likely worse")
    assert any("0.0005" in stamp and "0.01" in stamp for stamp in found["stamps"])


def test_fp32_against_fp32_with_other_seeds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for seed in range(10):
        folder = "first" if seed < 5 else "second"
        write_run(tmp_path / folder / f"s{seed}", seed=seed, final=BASE[seed % 5] + 1e-4 * seed)
    found = compared(capsys, "first", "second", "--baseline", "first")
    [row] = found["groups"][0]["modes"]
    assert row["verdict"]["method"] == "Welch"
    assert row["verdict"]["seeds"] == [5, 6, 7, 8, 9]
    assert row["verdict"]["name"] in ("matches", "inconclusive")


def test_foreign_csv_logs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for label, shift in (("base", 0.0), ("half", 0.001)):
        for seed in range(3):
            lines = [f"{step},{2 + 0.01 * seed + shift + 1 / step}" for step in range(1, 31)]
            text = "\n".join(["Step,Value", *lines])
            (tmp_path / f"{label}{seed}.csv").write_text(text + "\n")
    words = ["fp32=base0.csv,base1.csv,base2.csv", "amp=half0.csv,half1.csv,half2.csv"]
    found = compared(capsys, "--tag", "loss", *words, "--out", "report")
    [row] = found["groups"][0]["modes"]
    # A constant offset has no scatter: 0.001 in about 2.05, inside 1 %.
    assert row["verdict"]["name"] == "matches"
    assert row["verdict"]["difference"] == pytest.approx(0.001, abs=1e-12)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "PATH"),
        (["nowhere"], "nowhere"),
        (["outputs", "--looks", "5,3"], "--looks 5,3"),
        (["outputs", "--looks", "2,5"], "--looks 2,5"),
        (["outputs", "--looks", "a,b"], "--looks a,b"),
        (["outputs", "--margin", "-1"], "--margin -1"),
        (["outputs", "--margin", "nan"], "--margin nan"),
        (["outputs", "--metric", "top1"], "top1"),
        (["outputs", "--json", "--markdown"], "--json"),
        (["outputs", "--frobnicate"], "--frobnicate"),
        (["outputs", "--higher-is-better"], "--tag"),
        (["outputs", "--paired"], "--paired: only with --tag"),
        (["outputs", "--step", "epoch"], "--step: only with --tag"),
        (["outputs", "--absolute"], "--absolute: needs --margin"),
        (["outputs", "--tag", "loss"], "LABEL=PATH"),
        (["outputs", "--allow", "optim.rate"], "optim.rate"),
        (["outputs", "--baseline", "nowhere"], "nowhere"),
        (["outputs", "--out", "notes"], "notes"),
        (["outputs", "--out", "file.txt"], "file.txt"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(runs, capsys, words, named):
    root = runs.parent.parent
    (root / "notes").mkdir()
    (root / "notes/mine.txt").write_text("mine")
    (root / "file.txt").write_text("mine")
    before = sorted(root.rglob("*"))
    assert main(["compare", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert named in printed.err
    assert sorted(root.rglob("*")) == before


def test_a_damaged_record_is_told(runs, capsys):
    path = runs / "amp-s0" / "run.json"
    path.write_text(path.read_text()[:100])
    assert main(["compare", "outputs"]) == 4
    assert "amp-s0" in capsys.readouterr().err


def test_looks_are_parsed():
    assert parse(["x", "--looks", "3,5,10"]).looks == [3, 5, 10]
    with pytest.raises(BadInput):
        parse(["x", "--looks", "3"])


def test_torch_is_never_imported(runs):
    program = (
        "import sys; from mprun.cli import main; "
        "assert main(['compare', 'outputs', '--tensorboard', '--paper']) == 0; "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
