"""run.json as data of a stranger: every field has its type, and every verb says so in one line."""

import json
import shutil

import pytest

from mprun.cli import main
from mprun.errors import Damaged
from mprun.record.run_record import RunRecord, read_record

from ..helpers import TINY_LM, seal_again
from ..tables import with_extensions

WRONG = [None, 5, -1, 1.5, True, "x", [], {}, [[]], {"a": {}}]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record") / "run"
    run = [*TINY_LM, "train.steps=2", "train.checkpoint_every=1", "precision=amp"]
    assert main([*run, f"output_dir='{folder}'"]) == 0
    return folder


def test_a_record_is_read_as_it_was_written(finished):
    record = read_record(finished)
    assert record == json.loads((finished / "run.json").read_text())
    assert record.keys() <= RunRecord.__annotations__.keys()


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("environment.threads", "many", "environment.threads: Expected `int`, got `str`"),
        ("precision.mode", None, "precision.mode: Expected `str`, got `null`"),
        ("status", "ended", "status: Invalid enum value 'ended'"),
        ("attempts", -1, "attempts: Expected `int` >= 0"),
        ("data", "x", "data: Expected `object`, got `str`"),
    ],
)
def test_file_and_key_are_named(finished, tmp_path, key, value, named):
    run = shutil.copytree(finished, tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    _set(record, key, value)
    seal_again(run, **record)
    with pytest.raises(Damaged) as error:
        read_record(run)
    assert str(error.value) == f"{run / 'run.json'}: {named}"


@pytest.mark.parametrize("text", ["", "[", "5", '"x"', "[" * 100_000, '{"status": NaN}', "\xff"])
def test_what_is_no_record(finished, tmp_path, text):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(Damaged, match="run.json"):
        read_record(run)


def _keys(record: dict) -> list[str]:
    """Each field, and those of its mappings."""
    groups = {key: value for key, value in record.items() if isinstance(value, dict)}
    return [*record, *(f"{key}.{name}" for key, value in groups.items() for name in value)]


def _set(record: dict, key: str, value: object) -> None:
    group, _, name = key.rpartition(".")
    (record[group] if group else record)[name] = value


@pytest.mark.parametrize("number", range(3))
@pytest.mark.slow
def test_no_field_of_any_type_ends_in_a_traceback(finished, tmp_path, monkeypatch, number, capsys):
    """A bug would be exit code 1. Each field in turn with a wrong value, the verbs in turn."""
    whole = json.loads((finished / "run.json").read_text())
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(finished, tmp_path / "run")
    readers = with_extensions("READERS", [["compare", "--out", "out"]])
    verbs = [[f"resume={run}"], *([*words, str(run)] for words in readers)]
    for position, key in enumerate(_keys(whole)):
        record = json.loads(json.dumps(whole))
        _set(record, key, WRONG[(number + position) % len(WRONG)])
        (run / "run.json").write_text(json.dumps(whole))
        seal_again(run, **record)
        verb = verbs[position % len(verbs)]
        code = main(verb)
        printed = capsys.readouterr()
        assert code != 1 and "Traceback" not in printed.err, (key, verb, printed.err)
