"""Damaged checkpoints are noticed and the one before is used; a full disk ends in one line."""

import functools
import itertools
import json
import math
import os
import resource
import shutil
import zipfile

import pytest
import torch
import yaml

from mprun.cli import main
from mprun.errors import Damaged
from mprun.record import checkpoint
from mprun.training.continuation import continued

from ..helpers import TINY_LM, assert_same_bits, record_of, refused, seal_again
from ..tables import with_extensions

RUN = [*TINY_LM, "precision=amp", "train.steps=6", "train.log_every=1"]
RUN += ["train.checkpoint_every=2", "train.keep_checkpoints=3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage") / "run"
    assert main([*RUN, f"output_dir='{folder}'"]) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def files_of(folder) -> dict:
    return {p: p.read_bytes() for p in [folder, *folder.rglob("*")] if p.is_file()}


def loaded(run) -> checkpoint.Checkpoint:
    return checkpoint.load_newest(run / "checkpoints", torch.device("cpu"))


def flip_a_bit(path, position=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    path.write_bytes(content)


def newest(run):
    return checkpoint.all_in(run / "checkpoints")[-1][1]


def test_a_flipped_bit_anywhere_in_the_state_is_noticed(run):
    state = newest(run) / "state.pt"
    whole = state.read_bytes()
    for position in range(0, len(whole), max(1, len(whole) // 20)):
        flip_a_bit(state, position)
        step, _, _, warnings = loaded(run)
        assert step == 4 and len(warnings) == 1 and "step-00000006" in warnings[0]
        state.write_bytes(whole)
    assert loaded(run).step == 6


MANIFESTS = ["", "[]", "null", "{}", '{"step": 6}', "{" * 5000, "\x00"]
MANIFESTS += ['{"step": 4, "sha256": "", "bytes": 1}']


def test_a_cut_file_or_a_foreign_manifest_is_noticed(run):
    state, manifest = newest(run) / "state.pt", newest(run) / "manifest.json"
    contents = [(manifest, text.encode()) for text in MANIFESTS]
    for path in (state, manifest):
        whole = path.read_bytes()
        contents += [(path, whole[: int(len(whole) * part)]) for part in (0, 0.01, 0.5, 0.99)]
    for path, content in contents:
        whole = path.read_bytes()
        path.write_bytes(content)
        step, _, _, warnings = loaded(run)
        assert step == 4 and len(warnings) == 1, content
        path.write_bytes(whole)


def test_a_missing_file_or_one_of_another_step_is_noticed(run):
    found = [path for _, path in checkpoint.all_in(run / "checkpoints")]
    (found[2] / "state.pt").unlink()
    shutil.copy(found[0] / "state.pt", found[1] / "state.pt")
    step, _, _, warnings = loaded(run)
    assert step == 2 and len(warnings) == 2


class Evil:
    def __reduce__(self):
        return (open, ("canary", "w"))


def test_a_checkpoint_names_no_code(run, tmp_path, monkeypatch):
    """Its manifest is right, so only the way of reading stands between the file and the canary."""
    monkeypatch.chdir(tmp_path)
    for _, path in checkpoint.all_in(run / "checkpoints"):
        step = int(path.name.removeprefix("step-"))
        checkpoint.save(run / "checkpoints", step, {"task": Evil()}, keep=9)
    with pytest.raises(Damaged):
        loaded(run)
    assert not (tmp_path / "canary").exists()


def test_resume_falls_back_says_so_and_ends_the_same(run, finished, capsys):
    flip_a_bit(newest(run) / "state.pt")
    capsys.readouterr()
    assert main([f"resume={run}"]) == 0
    [warning] = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert "step-00000006" in warning
    ours, theirs = loaded(run), loaded(finished)
    assert ours.step == theirs.step == 6 and ours.warnings == []
    assert_same_bits(ours.state["task"], theirs.state["task"])


def damage_state(run):
    for state in run.glob("checkpoints/*/state.pt"):
        flip_a_bit(state)


def compress(run):
    """30 MB of zeros take 30 kB; the manifest is right."""
    for folder in (run / "checkpoints").iterdir():
        path = folder / "state.pt"
        with zipfile.ZipFile(path) as old:
            members = {member.filename: old.read(member) for member in old.infolist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for name, content in members.items():
                new.writestr(name, bytes(30 * 10**6) if name.endswith("data/0") else content)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest |= {"bytes": path.stat().st_size, "sha256": checkpoint._sha256(path)}
        (folder / "manifest.json").write_text(json.dumps(manifest))


def holding(name, text):
    return lambda run: (run / name).write_text(text)


def without(name):
    return lambda run: (run / name).unlink()


def pipe(name):
    """Reading it would wait for ever."""

    def damage(run):
        (run / name).unlink()
        os.mkfifo(run / name)

    return damage


def edited(key, value):
    def damage(run):
        plain = yaml.safe_load((run / "config.yaml").read_text())
        *groups, name = key.split(".")
        functools.reduce(dict.__getitem__, groups, plain)[name] = value
        (run / "config.yaml").write_text(yaml.safe_dump(plain))
        seal_again(run)

    return damage, 4, f"config.yaml: {key} is {value!r}"


def aliases(run):
    """Nine lists of nine aliases each: 9^9 values for whoever walks through them."""
    pairs = itertools.pairwise("abcdefghi")
    lines = [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairs]
    (run / "config.yaml").write_text("".join(["a: &a [x]\n", *lines]))
    seal_again(run)


DAMAGES = [
    (damage_state, 4, "checkpoints"),
    (compress, 4, "compressed"),
    (holding("run.json", "{}"), 4, "run.json"),
    (holding("run.json", "{"), 4, "run.json"),
    (without("run.json"), 2, "run.json"),
    (holding("config.yaml", "a: ["), 4, "config.yaml"),
    (holding("config.yaml", "!!python/object/apply:os.system [id]"), 4, "config.yaml"),
    (holding("config.yaml", "model: {name: nope}"), 4, "config.yaml"),
    (aliases, 4, "config.yaml: is not valid YAML (an alias)"),
    (without("metrics.jsonl"), 4, "metrics.jsonl"),
    (lambda run: flip_a_bit(run / "metrics.jsonl", 0), 4, "metrics.jsonl"),
    (pipe("run.json"), 4, "run.json"),
    (pipe("metrics.jsonl"), 4, "metrics.jsonl"),
    (pipe(".lock"), 4, ".lock"),
    edited("optim.lr", 0.5),
    edited("seed", 1),
    edited("optim.bias_lr_factor", 1.2),
    edited("precision.name", "fp32"),
    edited("compare.margin", 0.5),
    edited("data.batch_size", 3),
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("damage", "code", "named"), DAMAGES)
def test_a_damaged_run_directory_is_named_and_left_as_it_is(run, damage, code, named, capsys):
    damage(run)
    before = files_of(run)
    refused(capsys, f"resume={run}", "train.steps=8", says=["mprun: ", named], code=code)
    assert files_of(run) == before


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ("optim.lr=3", "optim.lr"),
        ("seed=1", "seed=1: a resumed run keeps seed=0 (keys allowed: "),
        (
            "deterministic=0",
            "deterministic=0: a resumed run keeps deterministic=false (keys allowed: ",
        ),
        ("optim=adam", "optim=adam: a resumed run keeps optim="),
        ("train.steps=abc", "train.steps=abc: must be a whole number"),
        ("train.steps=[", "train.steps"),
        ("train.steps=6", "train.steps"),
        ("train.steps=0", "train."),
        ("train.epochs=1", "train.epochs"),
    ],
)
def test_what_a_resumed_run_does_not_take(finished, extra, named, capsys):
    before = files_of(finished)
    line = refused(capsys, f"resume={finished}", extra, says=named)
    assert files_of(finished) == before and line.count("(") == line.count(")")


def test_what_a_run_has_may_be_said_again(finished):
    own = record_of(finished)
    words = ["seed=0", "device=cpu", f"optim={own['choices']['optim']}", *RUN]
    assert continued((*words, "train.steps=8"), str(finished)).train.steps == 8


def test_a_name_like_a_number_and_an_entry_of_a_mapping_may_be_said_again(tmp_path, capsys):
    words = [*TINY_LM, "precision=amp", "name=7", "++train.steps=1"]
    given = [*words, "precision.overrides.lstm*=fp32"]
    assert main([*given, f"output_dir='{tmp_path / 'run'}'"]) == 0
    again = f"resume={tmp_path / 'run'}"
    assert continued((*given, again), str(tmp_path / "run")).name == "7"
    says = "keeps precision.overrides={'lstm*':fp32} (keys allowed: "
    refused(capsys, *words, "precision.overrides.lstm*=fp16", again, says=says)


def test_other_data_than_the_run_began_with_are_refused(run, capsys):
    seal_again(run, data=record_of(run)["data"] | {"sha256": 64 * "0"})
    before = files_of(run)
    says = "the data differ from the data at the start of the run"
    refused(capsys, f"resume={run}", "train.steps=7", says=says)
    assert files_of(run) == before


def test_a_checkpoint_appears_once_it_is_on_the_disk_and_then_its_name_is(tmp_path, monkeypatch):
    """What is not synchronised may be lost at a power failure, also the name of a whole file."""
    done, sync, rename = [], os.fsync, os.replace

    def synced(descriptor):
        done.append(os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2])
        sync(descriptor)

    def replaced(source, target):
        done.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    checkpoint.save(tmp_path / "checkpoints", 1, {"x": torch.ones(1)}, keep=1)
    assert done == ["state.pt", "manifest.json", "rename", "checkpoints"]


def test_rotation_keeps_the_newest(tmp_path):
    for step in (2, 9, 10, 11, 100):
        checkpoint.save(tmp_path, step, {"x": torch.ones(1)}, keep=2)
    assert [step for step, _ in checkpoint.all_in(tmp_path)] == [11, 100]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000011", "step-00000100"]


def test_what_is_damaged_or_not_finite_is_not_counted_as_kept(tmp_path):
    """Two damaged ones and keep=2 once deleted every whole one."""
    ones = {"task": torch.ones(1)}
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, step, ones, keep=9)
    for step in (3, 4):
        flip_a_bit(tmp_path / f"step-{step:08}" / "state.pt")
    checkpoint.save(tmp_path, 5, {"task": torch.tensor([1.0, math.nan])}, keep=9)
    checkpoint.save(tmp_path, 6, ones, keep=2)
    steps = [step for step, _ in checkpoint.all_in(tmp_path)]
    # Good: 6 and 2. Of the others the two newest stay, for whoever wants to know what happened.
    assert steps == [2, 4, 5, 6]
    for step in (7, 8):
        checkpoint.save(tmp_path, step, ones, keep=2)
    assert [step for step, _ in checkpoint.all_in(tmp_path)] == [7, 8]


def test_what_killed_processes_left_is_removed_and_nothing_else(run, finished):
    left = ["checkpoints/.step-00000004.123/state.pt", ".run.json.77"]
    left += ["numerics/.step-00000004.json.5", "checkpoints/.step-00000005.9/.step-00000005.9"]
    for name in left:
        (run / name).parent.mkdir(exist_ok=True, parents=True)
        (run / name).write_text("half")
    (run / ".notes.2024").write_text("of the user")
    assert main([f"resume={run}", "train.steps=7"]) == 0
    assert not any((run / name).exists() for name in left)
    assert len(list((run / "checkpoints").iterdir())) == 3
    assert (run / ".notes.2024").read_text() == "of the user"


@pytest.mark.parametrize(
    "name", ["checkpoints", "config.yaml", "run.json", "metrics.jsonl", ".lock"]
)
@pytest.mark.few(1)
def test_a_link_out_of_a_run_is_not_followed(run, tmp_path, name, capsys):
    """A stranger's run: what a continuation writes, truncates and deletes would be elsewhere."""
    outside = tmp_path / "outside"
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    before = files_of(outside)
    for verb in with_extensions("READERS", [["compare"]]):
        assert main([*verb, str(run)]) == 4
    assert main([f"resume={run}", "train.steps=7"]) == 4
    assert f"{name}: is a link that leads out of the run" in capsys.readouterr().err
    assert files_of(outside) == before


def test_a_full_disk_is_exit_5_and_leaves_the_checkpoint_before(run, capsys):
    """A limit on the size of files stands in for the disk: write() fails as on a full one."""
    before = files_of(run / "checkpoints")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    half = (newest(run) / "state.pt").stat().st_size // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, hard))
    try:
        code = main([f"resume={run}", "train.steps=8"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 5
    printed = capsys.readouterr()
    assert "could not be written" in printed.err.splitlines()[-1] and "Traceback" not in printed.err
    assert printed.out.splitlines()[-1] == f"run: {run}"
    assert files_of(run / "checkpoints") == before
    assert record_of(run)["status"] == "failed"
    # With room again the run goes on.
    assert main([f"resume={run}", "train.steps=8"]) == 0
