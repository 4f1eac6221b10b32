"""The seal: what a run left is what every verb reads, or it ends with exit code 4 and one line."""

import hashlib
import json
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest

from mprun.cli import main
from mprun.errors import DAMAGED, DONE
from mprun.record import seal
from mprun.record.run_record import Record, read_record
from mprun.record.seal import BrokenSeal, check_seal, content_of, files_of, seal_of

from ..helpers import TINY_GAN, TINY_LM, but, record_of, refused
from ..tables import with_extensions

RUN = [*TINY_LM, "precision=amp", "train.steps=6", "train.log_every=1"]
RUN += ["train.checkpoint_every=2", "numerics=probes", "numerics.every=3"]
READERS = with_extensions("READERS", [["compare"]])
NUMERICS = ["numerics/step-00000003.json", "numerics/step-00000006.json"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seal") / "run"
    assert main([*RUN, f"output_dir='{folder}'"]) == DONE
    return folder


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seal") / "baseline"
    assert main(but(RUN, "precision=fp32", f"output_dir='{folder}'")) == DONE
    return folder


@pytest.fixture
def own(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Verbs write their pages into the working directory."""
    monkeypatch.chdir(tmp_path)


def refused_to_go_on(run, capsys, says) -> str:
    return refused(capsys, f"resume={run}", "train.steps=8", says=says, code=DAMAGED)


def test_the_seal_has_every_file_of_the_record(finished):
    files = record_of(finished)["seal"]["files"]
    assert sorted(files) == ["config.yaml", "metrics.jsonl", *NUMERICS]
    for name, said in files.items():
        content = (finished / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        assert said == {"bytes": len(content), "sha256": digest}


def test_the_layout_of_run_json_is_free(own):
    (own / "run.json").write_text(json.dumps(dict(sorted(record_of(own).items())), indent=4))
    assert read_record(own)["status"] == "done"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("verb", [*READERS, ["resume"]], ids=lambda verb: verb[0])
def test_an_edited_result_is_found_by_every_verb(own, verb, capsys):
    """The digits of a loss, which no check of types sees."""
    record = record_of(own)
    record["final"]["loss"] -= 1
    (own / "run.json").write_text(json.dumps(record))
    words = [*verb, own] if verb != ["resume"] else [f"resume={own}", "train.steps=8"]
    says = f"{own / 'run.json'}: was changed since the run ended: has |..., not fields of SHA-256 "
    refused(capsys, *words, says=says.split("|"), code=DAMAGED)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", *NUMERICS])
@pytest.mark.parametrize("damage", ["edited", "missing", "cut"])
def test_file_wanted_and_found_are_named(own, name, damage, capsys):
    content = (own / name).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    wanted = f"not {len(content)} bytes of SHA-256 {sha256[:12]}..."
    (own / name).unlink()
    found = "is missing"
    if damage != "missing":
        content = content[:-9] if damage == "cut" else content.replace(b"1", b"2", 1)
        (own / name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        found = f"is {len(content)} bytes of SHA-256 {sha256[:12]}..."
    line = f"{own / name}: was changed since the run ended: {found}, {wanted}"
    assert refused_to_go_on(own, capsys, line) == f"mprun: {line}\n"
    with pytest.raises(BrokenSeal) as caught:
        check_seal(own)
    assert str(caught.value) == line


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("pattern", seal.SEALED)
def test_every_kind_of_file_is_sealed_to_its_last_bit(tmp_path, pattern):
    """A bit, a length, a file more or less is found, in made files."""
    names = [kind.replace("*", "00000003") for kind in seal.SEALED]
    name, content = pattern.replace("*", "00000003"), b"\x00abc"

    def written():
        for other in names:
            (tmp_path / other).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / other).write_bytes(content)
        fields = {"status": "done", "number": 1}
        sealed = fields | {"seal": seal_of(tmp_path, fields)}
        (tmp_path / "run.json").write_text(json.dumps(sealed))
        check_seal(tmp_path)
        return tmp_path / name

    path = written()
    sealed = json.loads((tmp_path / "run.json").read_text())["seal"]["files"]
    digest = hashlib.sha256(content).hexdigest()
    assert sealed == {other: {"bytes": 4, "sha256": digest} for other in names}
    flipped = [bytes(b ^ (1 << bit if at == i else 0) for i, b in enumerate(content))
               for at in range(4) for bit in (0, 7)]  # fmt: skip
    for changed in (*flipped, b"", content[:-1], content + b"\x00"):
        path.write_bytes(changed)
        with pytest.raises(BrokenSeal, match="changed since the run ended: is"):
            check_seal(tmp_path)
    written().unlink()
    for read in (check_seal, lambda folder: content_of(folder, name)):
        with pytest.raises(BrokenSeal, match="is missing"):
            read(tmp_path)
    if "*" in pattern:  # a file of which a record may have any number
        written()
        more = tmp_path / pattern.replace("*", "00000004")
        more.write_bytes(content)
        says = "must not exist, because the run ended without this file"
        with pytest.raises(BrokenSeal, match=says):
            check_seal(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl", NUMERICS[0]])
def test_compare_reads_what_the_run_wrote(own, baseline, name, capsys):
    path = own / name
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    says = f"{path}: was changed since the run ended"
    refused(capsys, "compare", own, baseline, says=says, code=DAMAGED)
    for damage in (path.unlink, path.mkdir):
        damage()
        refused(capsys, "compare", own, baseline, says=str(path), code=DAMAGED)


def test_a_file_that_the_run_did_not_write_is_none_of_its_record(own, capsys):
    shutil.copy(own / NUMERICS[0], own / "numerics" / "step-00000004.json")
    says = "step-00000004.json: must not exist, because the run"
    refused_to_go_on(own, capsys, says)
    with pytest.raises(BrokenSeal, match=says):
        content_of(own, "numerics/step-00000004.json")


def test_a_resumed_run_is_sealed_at_its_new_end_and_tells_what_changes(own, capsys):
    assert main([f"resume={own}", "train.steps=8", "train.log_every=2"]) == DONE
    said = [line for line in capsys.readouterr().err.splitlines() if "from here on" in line]
    changes = ("train.steps: 6, from here on 8", "train.log_every: 1, from here on 2")
    assert said == [f"mprun: {one}" for one in changes]
    check_seal(own)
    record = record_of(own)
    assert record["last_step"] == 8
    assert sorted(record["seal"]["files"]) == ["config.yaml", "metrics.jsonl", *NUMERICS]


@pytest.mark.usefixtures("here")
def test_verbs_that_read_a_run_leave_its_seal(own):
    for verb in with_extensions("READERS", [["compare"], ["compare", "--tensorboard"]]):
        main([*verb, str(own)])
        check_seal(own)


def test_grids_of_generated_images_are_sealed(tmp_path):
    folder = tmp_path / "run"
    assert main([*TINY_GAN, "train.steps=2", f"output_dir='{folder}'"]) == DONE
    assert files_of(folder, "samples/step-*.png") == [folder / "samples" / "step-00000002.png"]
    (folder / "samples" / "step-00000002.png").unlink()
    with pytest.raises(BrokenSeal, match="step-00000002.png"):
        check_seal(folder)


SIGNALLED = """
import os
from mprun.cli import main
from mprun.training.loop import Loop

advance = Loop.advance

def signalled(self, index):
    advance(self, index)
    if index + 1 == {step}:
        os.kill(os.getpid(), {number})

Loop.advance = signalled
raise SystemExit(main({words}))
"""


def code_when_signalled(**those) -> int:
    """The exit code of a process that gets a signal after `step`; -N: signal N ended it."""
    return subprocess.run([sys.executable, "-c", SIGNALLED.format(**those)]).returncode


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(9, "running"), (15, "preempted")])
def test_who_was_killed_left_no_seal_and_who_was_stopped_did(
    baseline, tmp_path, number, status, capsys
):
    folder = tmp_path / "run"
    code = code_when_signalled(number=number, step=5, words=[*RUN, f"output_dir='{folder}'"])
    record = record_of(folder)
    assert (record["status"], "seal" in record) == (status, status == "preempted")
    assert code == (75 if status == "preempted" else -9)
    capsys.readouterr()
    assert main(["compare", str(folder), str(baseline), "--out", str(tmp_path / "out")]) == DONE
    assert f"seed 0: {status}" in capsys.readouterr().out  # read as far as it goes, and said
    assert main([f"resume={folder}"]) == DONE
    check_seal(folder)


@pytest.mark.slow
def test_a_resumed_run_that_is_killed_has_no_seal_of_before(own):
    code = code_when_signalled(number=9, step=7, words=[f"resume={own}", "train.steps=9"])
    record = record_of(own)
    assert (code, record["status"], "seal" in record) == (-9, "running", False)
    assert record["cause"] is None and "last_step" not in record
    assert main([f"resume={own}"]) == DONE
    check_seal(own)


def test_a_failed_run_is_sealed_and_tells_its_last_step(tmp_path, monkeypatch):
    fails = Mock(side_effect=RuntimeError("made to fail"))
    monkeypatch.setattr("mprun.training.loop.Loop.save", fails)
    folder = tmp_path / "run"
    assert main(but(RUN, "train.checkpoint_every=4", f"output_dir='{folder}'")) == 1
    record = record_of(folder)
    assert (record["status"], record["last_step"]) == ("failed", 4)
    check_seal(folder)


def test_an_end_that_another_process_writes_knows_the_last_recorded_step(own):
    """As after SIGKILL: a launcher or a sweep says how the run ended."""
    record = Record(own, record_of(own))
    record.reopen()
    assert "seal" not in record_of(own) and record_of(own)["status"] == "running"
    with open(own / "metrics.jsonl", "a") as file:
        file.write('{"split": "train", "step": 7, "lo')  # torn
    record.end("failed", "rank 0 was killed (SIGKILL)")
    assert record_of(own)["last_step"] == 6
    check_seal(own)


@pytest.mark.slow
def test_runs_without_a_seal_are_read_with_one_note(own, baseline, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(seal, "_noted", False)
    other = shutil.copytree(baseline, tmp_path / "other")
    for folder in (own, other):
        record = record_of(folder)
        del record["seal"]
        (folder / "run.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert main(["compare", str(own), str(other), "--out", str(tmp_path / "out")]) == DONE
    [line] = [line for line in capsys.readouterr().err.splitlines() if "seal" in line]
    assert line.startswith(f"mprun: {own}: ended without a seal")


@pytest.mark.parametrize("name", ["run.json", ".lock", "metrics.jsonl", "config.yaml", NUMERICS[0]])
def test_a_folder_in_place_of_a_file_is_one_line(own, name, capsys):
    (own / name).unlink()
    (own / name).mkdir()
    refused_to_go_on(own, capsys, f"{own / name}: ")


@pytest.mark.parametrize("name", ["checkpoints", "numerics"])
def test_a_file_in_place_of_a_folder_is_one_line(own, name, capsys):
    shutil.rmtree(own / name)
    (own / name).write_text("")
    refused_to_go_on(own, capsys, f"{own / name}: must be a folder")


@pytest.mark.parametrize("status", ["done", "running"])
def test_lost_checkpoints_are_no_reason_to_begin_again(own, status, capsys):
    """It once emptied metrics.jsonl and began at step 1, with exit code 0."""
    if status == "running":  # killed
        Record(own, record_of(own)).reopen()
    shutil.rmtree(own / "checkpoints")
    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    says = "checkpoints: contains no checkpoint, but the run wrote its first one at step 2"
    refused_to_go_on(own, capsys, says)
    assert {path: path.read_bytes() for path in own.rglob("*") if path.is_file()} == before


def test_a_finished_run_without_checkpoints_is_not_begun_again(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main([*TINY_LM, "train.steps=2", f"output_dir='{folder}'"]) == DONE
    before = (folder / "metrics.jsonl").read_bytes()
    refused(capsys, f"resume={folder}", "train.steps=3", says="has no checkpoint")
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_stranger_named_like_a_checkpoint_is_found_before_training(own, kind, capsys):
    """It once trained first, and ended with exit code 5 at the next save."""
    path = own / "checkpoints" / "step-00000001"
    if kind == "file":
        path.write_text("")
    else:
        path.symlink_to("step-00000006")
    metrics = (own / "metrics.jsonl").read_bytes()
    refused_to_go_on(own, capsys, f"{path}: has the name of a checkpoint, but is not a folder")
    assert (own / "metrics.jsonl").read_bytes() == metrics


def test_a_folder_in_which_a_run_never_began_is_used_again(tmp_path, capsys):
    """Killed before run.json: a lock and perhaps config.yaml."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".lock", "config.yaml", ".run.json.123"):
        (folder / name).write_text("")
    (folder / "mine.txt").write_text("")
    refused(capsys, *RUN, f"output_dir='{folder}'", says="output_dir=")
    (folder / "mine.txt").unlink()
    assert main([*RUN, f"output_dir='{folder}'"]) == DONE
    assert not (folder / ".run.json.123").exists()
    refused(capsys, *RUN, f"output_dir='{folder}'", says="output_dir=")
