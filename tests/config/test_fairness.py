"""Two runs that differ in one word differ in one thing: which file may speak of what."""

import pytest
import yaml

from mprun.config.compose import compose_config
from mprun.config.option_files import conf_dir

from ..shipped import MODES


def mentioned(path) -> set[str]:
    """The groups that a file sets or overrides outside its own."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = set()
    for entry in content.pop("defaults", []):
        for key in entry if isinstance(entry, dict) else [entry]:
            name = key.split()[-1].lstrip("/")
            if not name.startswith("schema/"):
                found.add(name.split("@")[0])
    if path.read_text(encoding="utf-8").startswith("# @package _global_"):
        found |= set(content)
    return found


def test_precision_and_scaler_files_speak_of_nothing_else():
    for path in (conf_dir() / "precision").glob("*.yaml"):
        assert mentioned(path) <= {"scaler"}, path
    for path in (conf_dir() / "scaler").glob("*.yaml"):
        assert mentioned(path) == set(), path


def test_recipes_do_not_speak_of_precision():
    for group in ("model", "data", "optim", "train", "experiment"):
        for path in (conf_dir() / group).glob("*.yaml"):
            assert not mentioned(path) & {"precision", "scaler"}, path


@pytest.mark.slow
def test_modes_differ_in_precision_and_scaler_only():
    """The rule by its effect: for each model the rest of the configuration is equal."""
    for model in ("dcgan",):
        rests = []
        for mode in MODES:
            plain = compose_config([f"model={model}", f"precision={mode}"]).as_dict()
            del plain["precision"], plain["scaler"]
            rests.append(plain)
        assert all(rest == rests[0] for rest in rests), model


def test_no_file_names_code():
    for path in conf_dir().rglob("*.yaml"):
        assert "_target_" not in path.read_text(encoding="utf-8"), path
