"""Two runs that differ in one word differ in one thing: which file may speak of what."""

import yaml

from mprun.config.compose import compose_config
from mprun.config.option_files import folders, option_files

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
    for group, others in (("precision", {"scaler"}), ("scaler", set())):
        for path in option_files(group).values():
            assert mentioned(path) <= others, path


def test_recipes_do_not_speak_of_precision():
    for group in ("model", "data", "optim", "train", "experiment"):
        for path in option_files(group).values():
            assert not mentioned(path) & {"precision", "scaler"}, path


def test_modes_differ_in_precision_and_scaler_only():
    """The rule by its effect: the rest of the configuration is equal."""
    rests = [compose_config(["model=dcgan", f"precision={mode}"]).as_dict() for mode in MODES]
    for rest in rests:
        del rest["precision"], rest["scaler"]
        assert rest == rests[0]


def test_no_file_names_code():
    for path in (path for folder in folders() for path in folder.rglob("*.yaml")):
        assert "_target_" not in path.read_text(encoding="utf-8"), path
