"""Composing without Hydra's own node: the same configuration, the same choices, in their order."""

import pytest

from mprun.config.compose import _composed_by_hydra, _finished, compose_config
from mprun.config.option_files import conf_dir, folders, option_files
from mprun.config.overrides import as_hydra_takes, parse_overrides
from mprun.config.selection import Unusual, select

from ..tables import with_extensions

FACTORIES = [f"{group}.factory=package.module:function" for group in ("model", "data")]
GROUPS = ("model", "data", "optim", "precision", "scaler", "train", "experiment", "numerics")
OPTIONS = [
    [f"{group}={option}", *(["data=custom", *FACTORIES] if option == "custom" else [])]
    for group in GROUPS
    for option in option_files(group)
    if (group, option) != ("data", "custom")  # as model=custom has it
]
LINES = [
    ["experiment=paper_vgg", "precision=amp", "optim=adam", "train.steps=5", "data.batch_size=2"],
    ["experiment=resnet50_imagenet", "data.root=images", "optim.lr=1e-2", "name=7"],
    ["model=gpt", "precision.overrides.layers.*=fp32", "scaler=static", "scaler.scale=128"],
]
LINES = with_extensions("LINES", LINES)


@pytest.mark.parametrize("overrides", OPTIONS + LINES, ids=" ".join)
@pytest.mark.few(8)
def test_it_is_what_hydra_composes(overrides):
    parsed = parse_overrides(overrides)
    quick = _finished(*select(as_hydra_takes(parsed), [str(folder) for folder in folders()]))
    config, choices = _composed_by_hydra(parsed, None, [str(folder) for folder in folders()])
    of_mprun = {group: option for group, option in choices.items() if not group.startswith("hydra")}
    assert quick[0] == config and list(quick[1].items()) == list(of_mprun.items())


def test_a_file_that_changed_is_read_again(tmp_path):
    (tmp_path / "train").mkdir()
    own = tmp_path / "train" / "own.yaml"
    for steps in (7, 123):
        own.write_text(f"steps: {steps}\n")
        assert compose_config(["train=own"], str(tmp_path)).config.train.steps == steps


@pytest.mark.parametrize(
    "text",
    [
        "defaults: [resnet50, /schema/model/resnet50@_here_]\nname: resnet50",
        "defaults: [resnet50_preact]\nvariant: {a: 1}",
    ],
)
def test_what_is_unusual_is_left_to_hydra(tmp_path, text):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.yaml").write_text(text)
    with pytest.raises(Unusual):
        select(parse_overrides(["model=own"]), [str(conf_dir()), str(tmp_path)])
