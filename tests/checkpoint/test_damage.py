"""Damaged checkpoints are noticed and the one before is used; a full disk ends in one line."""

import json
import resource
import shutil

import pytest
import torch

from mprun.cli import main
from mprun.errors import Damaged
from mprun.record import checkpoint

from ..small import LM

RUN = [
    *LM,
    "precision=amp",
    "train.steps=6",
    "train.log_every=1",
    "train.checkpoint_every=2",
    "train.keep_checkpoints=3",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage") / "run"
    assert main([*RUN, f"output_dir='{folder}'"]) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def flip_a_bit(path, position=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    path.write_bytes(content)


def newest(run):
    return checkpoint._found(run / "checkpoints")[-1][1]


def test_a_flipped_bit_anywhere_in_the_state_is_noticed(run):
    state = newest(run) / "state.pt"
    whole = state.read_bytes()
    for position in range(0, len(whole), max(1, len(whole) // 60)):
        flip_a_bit(state, position)
        step, _, warnings = checkpoint.load_newest(run / "checkpoints", torch.device("cpu"))
        assert step == 4 and len(warnings) == 1 and "step-00000006" in warnings[0]
        state.write_bytes(whole)
    assert checkpoint.load_newest(run / "checkpoints", torch.device("cpu"))[0] == 6


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
def test_a_cut_file_is_noticed(run, name, share):
    path = newest(run) / name
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    step, _, warnings = checkpoint.load_newest(run / "checkpoints", torch.device("cpu"))
    assert step == 4 and len(warnings) == 1


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"step": 6}',
        "{" * 5000,
        "\x00",
        '{"step": 4, "sha256": "", "bytes": 1}',
    ],
)
def test_a_foreign_manifest_is_noticed(run, manifest):
    (newest(run) / "manifest.json").write_text(manifest)
    assert checkpoint.load_newest(run / "checkpoints", torch.device("cpu"))[0] == 4


def test_a_missing_file_or_one_of_another_step_is_noticed(run):
    found = [path for _, path in checkpoint._found(run / "checkpoints")]
    (found[2] / "state.pt").unlink()
    shutil.copy(found[0] / "state.pt", found[1] / "state.pt")
    step, _, warnings = checkpoint.load_newest(run / "checkpoints", torch.device("cpu"))
    assert step == 2 and len(warnings) == 2


class Evil:
    def __reduce__(self):
        return (open, ("canary", "w"))


def test_a_checkpoint_names_no_code(run, tmp_path, monkeypatch):
    """Its manifest is right, so only the way of reading stands between the file and the canary."""
    monkeypatch.chdir(tmp_path)
    for _, path in checkpoint._found(run / "checkpoints"):
        step = int(path.name.removeprefix("step-"))
        checkpoint.save(run / "checkpoints", step, {"task": Evil()}, keep=9)
    with pytest.raises(Damaged):
        checkpoint.load_newest(run / "checkpoints", torch.device("cpu"))
    assert not (tmp_path / "canary").exists()


def test_resume_falls_back_says_so_and_ends_the_same(run, finished, capsys):
    flip_a_bit(newest(run) / "state.pt")
    capsys.readouterr()
    assert main([f"resume={run}"]) == 0
    printed = capsys.readouterr()
    [warning] = [line for line in printed.err.splitlines() if "warning" in line]
    assert "step-00000006" in warning
    cpu = torch.device("cpu")
    states = [checkpoint.load_newest(r / "checkpoints", cpu) for r in (run, finished)]
    assert states[0][0] == states[1][0] == 6 and states[0][2] == []
    ours, theirs = (s[1]["task"]["learner"]["model"] for s in states)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_all_damaged_is_exit_4_and_nothing_is_deleted(run, capsys):
    for _, path in checkpoint._found(run / "checkpoints"):
        flip_a_bit(path / "state.pt")
    before = sorted(p.relative_to(run) for p in run.rglob("*"))
    metrics = (run / "metrics.jsonl").read_bytes()
    assert main([f"resume={run}"]) == 4
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err
    assert sorted(p.relative_to(run) for p in run.rglob("*")) == before
    assert (run / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    ("damage", "code", "named"),
    [
        (lambda run: (run / "run.json").write_text("{}"), 4, "run.json"),
        (lambda run: (run / "run.json").write_text("{"), 4, "run.json"),
        (lambda run: (run / "run.json").unlink(), 2, "run.json"),
        (lambda run: (run / "config.yaml").write_text("a: ["), 4, "config.yaml"),
        (
            lambda run: (run / "config.yaml").write_text("!!python/object/apply:os.system [id]"),
            4,
            "config.yaml",
        ),
        (lambda run: (run / "config.yaml").write_text("model: {name: nope}"), 2, "config.yaml"),
        (lambda run: (run / "metrics.jsonl").unlink(), 2, "metrics.jsonl"),
        (lambda run: flip_a_bit(run / "metrics.jsonl", 0), 4, "metrics.jsonl"),
        (lambda run: shutil.rmtree(run / "checkpoints"), 2, "checkpoint"),
    ],
)
def test_a_damaged_run_directory_is_named(run, damage, code, named, capsys):
    damage(run)
    if named != "metrics.jsonl" or code == 2:
        assert main([f"resume={run}"]) == code
    else:
        shutil.rmtree(newest(run))
        assert main([f"resume={run}"]) == code
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith("mprun: ") and named in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ("optim.lr=1", "optim.lr"),
        ("seed=1", "seed"),
        ("train.steps=abc", "train.steps"),
        ("train.steps=[", "train.steps"),
        ("train.steps=6", "train.steps"),
        ("train.steps=0", "train."),
        ("train.epochs=1", "train.epochs"),
    ],
)
def test_what_a_resumed_run_does_not_take(run, extra, named, capsys):
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert main([f"resume={run}", extra]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and named in printed.err
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_rotation_keeps_the_newest(tmp_path):
    for step in (2, 9, 10, 11, 100):
        checkpoint.save(tmp_path, step, {"x": torch.ones(1)}, keep=2)
    assert [step for step, _ in checkpoint._found(tmp_path)] == [11, 100]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000011", "step-00000100"]


def test_a_full_disk_is_exit_5_and_leaves_the_checkpoint_before(run, capsys):
    """A limit on the size of files stands in for the disk: write() fails as on a full one."""
    before = {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (newest(run).joinpath("state.pt").stat().st_size // 2, hard)
    )
    try:
        code = main([f"resume={run}", "train.steps=8"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 5
    printed = capsys.readouterr()
    assert "could not be written" in printed.err.splitlines()[-1] and "Traceback" not in printed.err
    assert printed.out.splitlines()[-1] == f"run: {run}"
    assert {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()} == before
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    # With room again the run goes on.
    assert main([f"resume={run}", "train.steps=8"]) == 0
