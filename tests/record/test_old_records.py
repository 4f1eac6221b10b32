"""Age is not damage: records that earlier commits wrote are read, shown and compared.

A run whose checkpoints have another form is not gone on with: one line names its version.

`old_records/` has a run of each form of the record, as `mprun` left it: four steps of a tiny
language model on synthetic tokens, with a checkpoint. 2026-11-24 (d5b5943) hashed nested keys and
knew no seal; 2026-11-26 (6c8f2b3) hashed flat keys; 2026-11-28 names its version and form.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from mprun import __version__
from mprun.cli import main
from mprun.comparison.grouping import group_runs
from mprun.comparison.load import load_runs
from mprun.config.compose import compose_config
from mprun.config.keys import current, is_as_hashed
from mprun.config.schema import RunConfig
from mprun.entry_points import announced
from mprun.record import checkpoint, seal
from mprun.record.keys import config_hash, flat, hash_fields
from mprun.record.run_directory import write_config, write_json
from mprun.record.run_record import FORM, read_record, written_by
from tests.helpers import TINY_LM, record_of, refused, run

OLD = Path(__file__).parent / "old_records"
RECORDS = sorted(path.name for path in OLD.iterdir())
FP32 = [name for name in RECORDS if name.endswith("-fp32")]
NEW_MODE = "2026-11-28-bf16_master"
CONFIG_WRITER = "mprun.record.run_record.write_config"


@pytest.fixture(params=RECORDS)
def old(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # short paths, so that no line is cut
    return shutil.copytree(OLD / request.param, Path("run"))


def test_a_record_begins_with_its_version_and_form(old):
    if "record_form" in record_of(old):
        assert list(record_of(old))[:2] == ["mprun", "record_form"]
    assert is_as_hashed(read_record(old))
    assert written_by(record_of(old)).startswith("mprun 0.1.0")


def test_each_key_of_today_is_known_of_an_old_run(old):
    own = flat(current(record_of(old)["config"]))
    today = compose_config(["model=lstm_lm", "data=synthetic_tokens"], files=False).as_dict()
    assert own.keys() == flat(today).keys()
    new_mode = flat(current(record_of(OLD / NEW_MODE)["config"]))
    differing = {key for key in own if own[key] != new_mode[key]}
    assert differing <= {"output_dir", "precision.name", "precision.param_dtype"}


def test_an_old_run_is_shown_and_listed(old, capsys):
    for verb in ("show", "ls"):
        assert main([verb, str(old)]) == 0
        assert "done" in capsys.readouterr().out


@pytest.mark.parametrize("name", FP32)
def test_old_fp32_runs_are_the_baseline_of_a_new_mode(name):
    runs, notes = load_runs([OLD / name, OLD / NEW_MODE])
    groups, lines = group_runs(runs)
    assert (notes, lines) == ([], [])
    [group] = groups
    assert group.baseline.mode == "fp32" and [arm.mode for arm in group.arms] == ["bf16_master"]
    assert set(group.arms[0].differs) == {"precision.name", "precision.param_dtype"}


def test_the_same_run_of_two_ages_counts_once():
    runs, notes = load_runs([OLD / name for name in FP32])
    assert runs[0].activation_bytes == 32980  # by the name that they have for it
    assert len(runs) == 1 and "same configuration, data and seed" in notes[0]


@pytest.mark.parametrize(
    "words", [["resume={}", "train.steps=6"], ["explain", "{}"], ["logprobs", "amp", "{}"]]
)
def test_a_run_with_an_older_form_of_checkpoint_is_refused_in_one_line(old, capsys, words):
    if "=" not in words[0] and words[0] not in announced("mprun.verbs"):
        pytest.skip("its extension is missing here")
    record = unsealed(old)
    if words[0] == "explain":  # which has nothing to say of one that did not fail
        write_json(old / "run.json", record | {"status": "diverged", "cause": "a loss"})
    words = [word.format(old) for word in words]
    line = refused(capsys, *words, says="cannot read the checkpoints of this")
    assert f"written by {written_by(record)}: go on with that version, or begin a new run" in line
    assert (old / "checkpoints").is_dir() and record_of(old)["attempts"] == 1


@pytest.fixture
def other(tmp_path, monkeypatch):
    """A run of this form of an earlier commit, which knew fewer keys, and two by other names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(seal, "_noted", True)  # said once in a process: in no test here
    assert run(Path("run"), *TINY_LM, "train.steps=4", "train.checkpoint_every=2") == 0
    record = record_of(Path("run"))
    config = record["config"]
    del config["train"]["autotune"], config["dist"]
    config["numerics"]["enabled"] = config["numerics"].pop("probes")
    config["precision"]["products"] = config["precision"].pop("matmul")
    rewrite(Path("run"), record | hash_fields(config))
    return Path("run")


def test_a_run_with_fewer_keys_is_resumed(other):
    assert main([f"resume={other}", "train.steps=6"]) == 0
    record = record_of(other)
    assert record["config"]["numerics"]["probes"] is False
    assert record["config"]["precision"]["matmul"]["input"] is None
    assert list(record)[:2] == ["mprun", "record_form"]
    assert (record["mprun"], record["record_form"]) == (__version__, FORM)
    assert record["config"] == current(record["config"]) and is_as_hashed(record)
    assert record["config_hash"] == config_hash(record["config"])


@pytest.mark.parametrize("after", ["mprun.training.run.attempt", CONFIG_WRITER])
@pytest.mark.few(1)
def test_a_resume_that_ends_before_its_record_is_whole_can_be_repeated(other, monkeypatch, after):
    """Two files tell the configuration, and a process may be killed between them."""

    def killed(*given):
        if after == CONFIG_WRITER:
            write_config(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(after, killed)
        main([f"resume={other}", "train.steps=6"])
    assert is_as_hashed(record_of(other))
    assert main([f"resume={other}", "train.steps=6"]) == 0


def unsealed(run, **changes):
    """Change the configuration in both files of a run that has no seal."""
    record = record_of(run)
    for key, value in changes.items():
        group, _, name = key.partition("__")
        record["config"][group][name] = value
    return rewrite(run, record)


def rewrite(run, record):
    """Write both files anew, without a seal."""
    record.pop("seal", None)
    write_json(run / "run.json", record)
    (run / "config.yaml").write_text(yaml.safe_dump(record["config"]))
    return record


@pytest.mark.parametrize(
    "change", [{"optim__lr": 0.5}, {"precision__fp32_math": "tf32"}, {"model__another": 1}]
)
def test_an_edited_configuration_is_damage_at_any_age(old, capsys, change):
    unsealed(old, **change)
    capsys.readouterr()
    assert main([f"resume={old}", "train.steps=6"]) == 4
    assert "run.json: config does not match config_hash" in capsys.readouterr().err


def test_a_record_without_the_keys_of_its_hash_is_still_checked(old, capsys):
    record = unsealed(old, optim__lr=0.5)
    for key in ("not_hashed", "record_form", "mprun"):
        record.pop(key, None)
    write_json(old / "run.json", record)
    assert not is_as_hashed(record)


def test_a_key_that_is_no_more_is_named_with_the_version_that_knew_it(other, capsys):
    record = unsealed(other, train__gone=3)
    write_json(other / "run.json", record | hash_fields(record["config"]))
    line = refused(capsys, f"resume={other}", "train.steps=6")
    assert "train.gone: this version of mprun has no such key; written by mprun 0.1.0" in line
    assert "go on with that version, or begin a new run" in line


def test_a_checkpoint_of_another_version_is_not_called_damaged(other, capsys):
    record, folder = unsealed(other), other / "checkpoints"
    record["environment"]["commit"] = "d5b59437fc20"
    write_json(other / "run.json", record)
    found = checkpoint.load_newest(folder, torch.device("cpu"))
    state = found.state | {"task": {"another": "layout"}}
    checkpoint.save(folder, 4, state, 2, metrics=found.manifest["metrics"])
    refused(capsys, f"resume={other}", "train.steps=6", says="mprun 0.1.0 (commit d5b59437fc20)")


def test_a_record_of_a_later_form_names_its_version(old, capsys):
    record = unsealed(old) | {"mprun": "9.1.0", "record_form": FORM + 1}
    write_json(old / "run.json", record)
    says = f", but mprun {__version__} reads formats up to {FORM}; use mprun 9.1.0"
    for verb in ("show", "compare"):
        capsys.readouterr()
        code, err = main([verb, str(old)]), capsys.readouterr().err
        assert says in err and "which wrote this run" in err and code == 2, (verb, err)
    assert main(["ls", str(old)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "unknown" in told and "damaged" not in told


def test_a_later_key_whose_default_does_not_restate_is_not_filled_in():
    config = json.loads((OLD / NEW_MODE / "run.json").read_text())["config"]
    del config["precision"]["param_dtype"], config["precision"]["fp32_math"], config["dist"]
    filled = current(config)
    assert "param_dtype" not in filled["precision"]
    assert filled["precision"]["fp32_math"] == "ieee" and filled["dist"]["engine"] == "auto"
    assert set(filled) == {field for field in RunConfig.__dataclass_fields__}


def test_a_script_run_gains_the_schema_s_keys_alone():
    config = {"script": {"file": "a.py"}, "precision": {"name": "amp"}, "optim": {}, "compare": {}}
    filled = current(config)
    assert set(filled) == set(config) and filled["optim"] == {}
    own = {"numerics": {"enabled": True}, "train": {"fused_norm": "off"}}
    assert current(config | own) == filled | own  # the script's own settings
    assert filled["precision"]["reduce_order"] == "rank" and filled["compare"]["window"] == 1
