"""--help, --cfg, --info and --version: what they print, and that nothing is written."""

import pytest
import yaml

from mprun.cli.dispatch import VERBS, main
from mprun.config.compose import compose_config
from mprun.config.option_files import conf_dir

from ..shipped import MODES


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


def test_help_lists_verbs_groups_options_and_keys(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        assert f"mprun {verb}" in text
    for group in ("model", "data", "optim", "precision", "scaler", "train", "numerics"):
        own = text.partition(f"\n  {group}\n")[2]
        for option in (path.stem for path in (conf_dir() / group).glob("*.yaml")):
            assert f"    {option} " in own, (group, option)
    for key in ("optim.lr", "train.clip_norm", "scaler.growth_interval", "compare.margin"):
        assert key in text
    assert "schema" not in text


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=dcgan", "precision=amp"],
        ["optim.lr=0.5", "scaler=static", "precision=amp"],
        ["precision.overrides.lstm*=fp32"],
        ["model=conv_autoencoder", "data.image_size=32"],
    ],
)
def test_cfg_job_is_the_resolved_configuration(overrides, capsys):
    assert main(["--cfg", "job", *overrides]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == compose_config(overrides).as_dict()


def test_cfg_of_one_part(capsys):
    assert main(["--cfg", "job", "-p", "scaler", "precision=amp", "--resolve"]) == 0
    scaler = yaml.safe_load(capsys.readouterr().out)
    assert (scaler["kind"], scaler["growth_interval"]) == ("dynamic", 2000)


def test_cfg_knows_the_options_of_the_user(capsys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "train").mkdir()
    (folder / "train" / "mine.yaml").write_text("steps: 3\n")
    assert main(["--config-dir", str(folder), "--cfg", "job", "train=mine"]) == 0
    # The model's own choice of length (lm) gave way to the option on the command line.
    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 3


def test_info_defaults_names_the_files(capsys):
    assert main(["--info", "defaults", "model=dcgan"]) == 0
    text = capsys.readouterr().out
    assert "data/digits_gan" in text and "optim/adam_gan" in text


def test_version(capsys):
    from mprun import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mprun {__version__}\n"


def test_doctor_says_what_every_mode_is_here(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for mode in MODES:
        assert f"\n{mode} " in text
    assert "cuda.matmul.fp32_precision = ieee" in text
