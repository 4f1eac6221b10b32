"""A precision mode and a loss scaler of one's own: a file each, and everything knows them."""

import itertools
import json
import re

import pytest
import torch

from mprun.assembly import build_loss_scale, policy_from
from mprun.cli import main
from mprun.comparison.findings import VERDICTS
from mprun.config.compose import compose_config
from mprun.config.option_files import modes, option_files
from mprun.config.rules import of_mode
from mprun.errors import BadInput
from mprun.precision import DynamicLossScale, get_policy

from ..helpers import TINY_GPT, TINY_LM, raises_line, record_of, rows_of, run

MODE = """\
# FP16 products, FP32 masters, and a softmax in FP16.
defaults:
  - override /scaler@_global_.scaler: myscaler
param_dtype: fp16
loss_dtype: fp16
"""
SCALER = """\
# Starts at 2^10 and grows soon.
kind: dynamic
init_scale: 1024
growth_factor: 2.0
backoff_factor: 0.5
growth_interval: 2
hysteresis: 1
min_scale: 1.0
max_scale: 65536
max_consecutive_skips: 50
"""
DTYPES = ("fp32", "fp16", "bf16")
TINY = [*TINY_LM, "train.steps=4", "train.log_every=1"]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    for group, name, text in (("precision", "mymode", MODE), ("scaler", "myscaler", SCALER)):
        (folder / group).mkdir()
        (folder / group / f"{name}.yaml").write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def swept(own, tmp_path_factory):
    """The root of a sweep of FP32 and the own mode over three seeds."""
    root = tmp_path_factory.mktemp("outputs")
    command = ["-m", *TINY, "precision=fp32,mymode", "seed=0,1,2", f"output_root={root}"]
    assert main([*command, "--config-dir", own, "-j", "2"]) == 0
    return next(path for path in root.iterdir() if path.is_dir())


@pytest.mark.slow
def test_a_sweep_trains_records_tables_and_judges_it(swept, tmp_path, capsys):
    (folder,) = swept.glob("mymode-*-s0")  # its name is in its path
    record = record_of(folder)
    assert record["status"] == "done"
    precision = record["precision"]
    assert (precision["mode"], precision["scaler"]) == ("mymode", "myscaler")
    assert precision["usual_scaler"] == "myscaler"
    assert precision["half_products"] == "emulated-fp16" and record["emulated"]
    assert record["config"]["precision"]["loss_dtype"] == "fp16"
    scales = [line["loss_scale"] for line in rows_of(folder, "train")]
    assert scales == [1024.0, 1024.0, 2048.0, 2048.0]  # grows after every second clean step
    (table,) = swept.glob("sweep-*.md")
    rows = [line for line in table.read_text().splitlines() if line.startswith("| mymode ")]
    assert len(rows) == 1 and "done" in rows[0]
    assert main(["compare", str(swept), "--out", str(tmp_path / "report")]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if " mymode  " in line)
    assert row.strip().startswith(VERDICTS), text
    assert "mymode (myscaler)" not in text  # the scaler that it comes with goes without saying
    from mprun.plots.panel import styles

    style = styles(["fp32", "mymode"])
    assert style["mymode"] != style["fp32"]


@pytest.mark.slow
def test_it_continues_without_its_file(own, tmp_path):
    """The record holds the values and the name: resuming reads no option file."""
    arguments = [*TINY, "precision=mymode", "train.checkpoint_every=2", "--config-dir", own]
    assert run(tmp_path / "run", *arguments) == 0
    assert main([f"resume={tmp_path / 'run'}", "train.steps=6"]) == 0
    record = record_of(tmp_path / "run")
    assert (record["last_step"], record["precision"]["mode"]) == (6, "mymode")


def test_a_value_that_differs_from_its_file_is_in_the_label(own):
    composed = compose_config(["precision=mymode", "precision.loss_dtype=fp32"], own)
    assert composed.mode == "mymode+loss_dtype=fp32"
    assert compose_config(["precision=mymode"], own).mode == "mymode"


@pytest.mark.slow
def test_help_doctor_and_configuration_list_it(own, capsys):
    assert main(["--help", "all", "--config-dir", own]) == 0
    text = capsys.readouterr().out
    for name, content in (("mymode", MODE), ("myscaler", SCALER)):
        what = re.escape(content.splitlines()[0].removeprefix("# "))
        assert re.search(rf"^    {name} +{what}$", text, re.M)
    assert main(["doctor", "--config-dir", own, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["modes"]
    assert list(found) == list(modes(own))
    assert found["mymode"]["verdict"] in ("emulated", "honoured")
    assert main(["--config-dir", own, "--cfg", "job", "-p", "precision", "precision=mymode"]) == 0
    assert "name: mymode" in capsys.readouterr().out


def test_without_the_folder_it_is_unknown():
    with pytest.raises(BadInput, match="precision=mymode: must be one of amp,"):
        compose_config(["precision=mymode"])


def test_it_stands_among_the_modes_that_do_more_in_fp16(own):
    names = list(modes(own))
    assert names[names.index("mymode") - 1] == "fp16_master_scaled"
    assert list(option_files("scaler", own)) == sorted([*option_files("scaler"), "myscaler"])


def test_a_mode_may_build_on_another(tmp_path):
    (tmp_path / "precision").mkdir()
    path = tmp_path / "precision" / "mine.yaml"
    path.write_text("defaults: [fp16_master_scaled]\nnorm_dtype: fp16\n")
    composed = compose_config(["precision=mine"], str(tmp_path))
    assert (composed.mode, composed.usual_scaler) == ("mine", "dynamic")
    policy = policy_from(composed.config.precision)
    assert (policy.name, policy.norm_dtype) == ("mine", torch.float16)
    assert policy.master_dtype == get_policy("fp16_master").master_dtype


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("param_dtype: fp8", "precision.param_dtype=fp8|fp32, fp16, bf16"),
        ("parm_dtype: fp16", "parm_dtype"),
        ("autocast_dtype: fp16\nparam_dtype: fp16", "param_dtype=fp16|under autocast"),
        ("master_dtype: null\nparam_dtype: fp16", "grad_dtype=fp32|without master weights"),
        ("norm_dtype: bf16\nparam_dtype: fp16", "norm_dtype=bf16|fp32, fp16"),
        ("overrides: {fc: fp64}", "overrides.fc=fp64|fp32, fp16, bf16"),
    ],
)
def test_what_no_mode_can_be_is_refused_by_key_and_value(line, words, tmp_path):
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "bad.yaml").write_text(line + "\n")
    with raises_line(BadInput, *words.split("|")):
        compose_config(["precision=bad"], str(tmp_path))


def test_a_name_in_the_file_is_that_of_the_file(tmp_path):
    """A mode that calls itself fp32 would be taken for the baseline."""
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "mine.yaml").write_text("name: fp32\nparam_dtype: fp16\n")
    composed = compose_config(["precision=mine"], str(tmp_path))
    assert composed.config.precision.name == composed.mode == "mine"


def test_the_scaler_is_what_its_file_says(own):
    config = compose_config(["precision=mymode"], own).config.scaler
    scale = build_loss_scale(config, torch.device("cpu"))
    assert isinstance(scale, DynamicLossScale)
    assert (config.name, scale.scale.item(), scale.rule.growth_interval) == ("myscaler", 1024.0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("param", DTYPES)
@pytest.mark.parametrize("autocast", [None, "fp16", "bf16"])
def test_whatever_the_rules_let_through_trains(param, autocast, build_run):
    """No other error waits behind the rules; whether numbers stay finite is a finding."""
    small = ["model=resnet50", "optim=sgd", "data=synthetic_images", "data.batch_size=2"]
    config, accepted = compose_config(small).config, 0
    names = ("param_dtype", "autocast_dtype", "norm_dtype", "master_dtype", "grad_dtype")
    for rest in itertools.product(DTYPES, ("fp32", None), DTYPES, DTYPES):
        values = dict(zip((*names, "loss_dtype"), (param, autocast, *rest), strict=True))
        for key, value in values.items():
            setattr(config.precision, key, value)
        if list(of_mode(config)):
            continue
        own = [f"precision.{key}={value or 'null'}" for key, value in values.items()]
        built = build_run(*small, *own)
        for step in range(2):
            assert built.task.train_step(step)["loss"].shape == (), own
        accepted += 1
    # Autocast has FP32 weights.
    assert (accepted > 0) == (autocast is None or param == "fp32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state_dtype", "beta", "warns"),
    [("bf16", 0.999, True), ("bf16", 0.99, False), ("fp8", 0.999, True), ("fp8", 0.95, False)],
)
def test_state_that_does_not_decay_is_told_before_step_1(
    tmp_path, capsys, state_dtype, beta, warns
):
    words = [*TINY_GPT, "precision=bf16_master", f"precision.update.state_dtype={state_dtype}"]
    assert run(tmp_path / "run", *words, f"optim.betas=[0.9,{beta}]", "train.steps=1") == 0
    shown = capsys.readouterr().err
    form = state_dtype.upper()
    assert (f" keeps optimizer state in {form}, where a number times {beta} " in shown) == warns
    assert not warns or shown.index(" keeps optimizer") < shown.index("step 1")
