"""The configuration files compose: every pair runs, values agree, order holds."""

import dataclasses

import pytest
import yaml

from mprun.assembly import build_loss_scale
from mprun.cli.help import GROUPS
from mprun.config import compose as composing
from mprun.config.components import NETWORKS
from mprun.config.compose import compose_config, config_from_record
from mprun.config.fields import ranged, violations
from mprun.config.keys import FIELDS
from mprun.config.option_files import mode_values, modes, option_files
from mprun.config.overrides import as_hydra_takes, line_of, parse_overrides
from mprun.config.schema import PrecisionConfig
from mprun.config.trust import vouched
from mprun.errors import BadInput
from mprun.precision import DynamicLossScale
from mprun.record.keys import flat
from mprun.spelling import _ELSEWHERE, meant, must_be

from ..shipped import ALL_MODES, OF_ATTENTION


def options(group: str) -> list[str]:
    return sorted(option_files(group))


def read(group: str, option: str) -> dict:
    return yaml.safe_load(option_files(group)[option].read_text(encoding="utf-8"))


def pair(model, mode):
    """The sizes of one model differ in numbers only: two modes of these in the default run."""
    quick = model in NETWORKS or mode in ("fp32", "amp")
    return pytest.param(model, mode, marks=() if quick else pytest.mark.slow)


# No other shipped network calls F.scaled_dot_product_attention; of one's own nothing is known.
WITH_ATTENTION = ("custom", "gpt", "gpt2", "gpt_llama", "gpt_moe")
PAIRS = [pair(model, mode) for model in options("model") for mode in ALL_MODES]


@pytest.mark.parametrize(("model", "precision"), PAIRS)
@pytest.mark.few(3)
def test_every_model_composes_in_every_mode_with_its_own_data(model, precision):
    own_code = ["model.factory=a:b", "data.factory=a:b"] if model == "custom" else []
    overrides = [f"model={model}", f"precision={precision}", *own_code]
    if precision in OF_ATTENTION and model not in WITH_ATTENTION:
        with pytest.raises(BadInput, match="does not call F.scaled_dot_product_attention"):
            compose_config(overrides)
        return
    composed = compose_config(overrides)
    assert composed.config.precision.name == precision
    assert composed.choices["model"] == model
    scaled = precision in ("fp16_master_scaled", "amp")
    assert composed.choices["scaler"] == composed.usual_scaler == ("dynamic" if scaled else "none")
    # What a run directory keeps is enough to rebuild the same configuration.
    record = yaml.safe_load(yaml.safe_dump(composed.as_dict()))
    assert config_from_record(record, vouched(own_code)) == composed.config


@pytest.mark.parametrize("precision", options("precision"))
def test_a_precision_file_is_the_mode_of_the_engine(precision):
    file = read("precision", precision)
    assert file["name"] == precision
    own = {key: value for key, value in file.items() if key not in ("defaults", "name")}
    values, defaults = modes()[precision].values, mode_values(PrecisionConfig())
    # It says every dtype; what only some modes have is left to a default.
    left = values.keys() - flat(own).keys()
    assert all(key.startswith(("matmul.", "attention.", "update.")) for key in left)
    assert values == flat(own) | {key: defaults[key] for key in left}


def test_the_files_are_the_one_list_of_modes():
    assert options("precision") == sorted(ALL_MODES)


@pytest.mark.few(3)
@pytest.mark.parametrize("scaler", options("scaler"))
def test_every_scaler_file_builds(scaler):
    config = compose_config(["precision=amp", f"scaler={scaler}"]).config
    scale = build_loss_scale(config.scaler, "cpu")
    assert scale.kind == config.scaler.kind and config.scaler.name == scaler
    start = config.scaler.init_scale or config.scaler.scale or 1.0
    assert scale.scale.item() == start  # every preset starts at a power of two: exact in FP32


def test_scaler_dynamic_is_the_default_of_the_engine():
    built = build_loss_scale(compose_config(["precision=amp"]).config.scaler, "cpu")
    default = DynamicLossScale()
    assert built.rule == default.rule
    assert built.scale.item() == default.scale.item() == 65536.0


def test_scaling_parameters_from_the_command_line():
    own = ["scaler.init_scale=1024", "scaler.growth_interval=7", "scaler.hysteresis=3"]
    scale = build_loss_scale(compose_config(["scaler=dynamic", *own]).config.scaler, "cpu")
    assert (scale.scale.item(), scale.rule.growth_interval, scale.rule.hysteresis) == (1024.0, 7, 3)


def test_the_command_line_wins_over_the_model_and_the_model_over_the_defaults():
    assert compose_config(["model=resnet50"]).choices["optim"] == "adam_cosine"
    assert compose_config(["model=alexnet"]).choices["data"] == "digits_64"
    # In either order: a choice on the command line is not undone by the model's own.
    for overrides in (["model=alexnet", "data=digits_224"], ["data=digits_224", "model=alexnet"]):
        composed = compose_config([*overrides, "train.steps=3", "optim.lr=0.5"])
        assert composed.choices["data"] == "digits_224"
        assert (composed.config.train.steps, composed.config.optim.lr) == (3, 0.5)
    assert compose_config(["precision=amp", "scaler=none"]).config.scaler.kind == "none"
    assert compose_config(["scaler=static", "precision=amp"]).config.scaler.kind == "static"


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "experiment=paper_vgg precision=amp optim=adam data.batch_size=2 optim.betas=[0.8,0.9]",
        "experiment=resnet50_imagenet data.root=images optim.lr=1e-2 name=7 ++seed=3",
        "model=gpt precision.overrides.layers.*=fp32 scaler=static scaler.scale=128 +seed=${seed}",
        "seed=${train.steps} precision.overrides={a:fp32,b:bf16} optim={lr:0.5,momentum:0.1}",
    ],
)
def test_values_are_set_on_options_as_hydra_sets_them(line, monkeypatch):
    def whole(overrides, kept=None):
        return composing._by_hydra([line_of(one) for one in as_hydra_takes(overrides)])

    def outcome():
        try:
            return compose_config(line.split(), files=False)
        except BadInput as error:  # +seed, which is there
            return str(error)

    ours = outcome()
    monkeypatch.setattr(composing, "_composed", whole)
    assert ours == outcome()


def test_the_last_of_two_overrides_wins():
    assert compose_config(["optim.lr=0.5", "optim.lr=0.1"]).config.optim.lr == 0.1


@pytest.mark.parametrize(
    ("bound", "inside", "outside"),
    [("above", 2, 1), ("at_least", 1, 0), ("below", 0, 1), ("at_most", 1, 2)],
)
def test_a_bound_of_1_is_inside_or_outside_as_it_says(bound, inside, outside):
    field = ranged(0, doc="Some number.", **{bound: 1})
    made = dataclasses.make_dataclass("Made", [("number", int, field)])
    assert list(violations(made(inside))) == []
    assert len(list(violations(made(outside)))) == 1


def test_an_experiment_wins_over_the_defaults_and_the_command_line_over_both(tmp_path):
    folder = tmp_path / "experiment"
    folder.mkdir()
    text = "# @package _global_\ndefaults: [override /model: resnet50, override /optim: adam]\n"
    (folder / "mine.yaml").write_text(f"{text}train: {{steps: 7}}\noptim: {{lr: 0.25}}\nseed: 5\n")
    composed = compose_config(["experiment=mine"], str(tmp_path))
    config = composed.config
    assert composed.choices["experiment"] == "mine"
    assert (config.model.name, config.optim.name) == ("resnet50", "adam")
    assert (config.train.steps, config.optim.lr, config.seed) == (7, 0.25, 5)
    assert config.data.name == "digits"  # the model of the experiment still picks its data
    config = compose_config(["experiment=mine", "train.steps=9", "optim=sgd"], str(tmp_path)).config
    assert (config.train.steps, config.optim.name) == (9, "sgd")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("KEY.lstm=fp32", {"lstm": "fp32"}),
        ("KEY={lstm:fp32}", {"lstm": "fp32"}),
        ("KEY.layer4.*=fp32", {"layer4.*": "fp32"}),
        ("KEY={layer4.*:fp32,fc:bf16}", {"layer4.*": "fp32", "fc": "bf16"}),
        ("KEY.*bn?=fp32 KEY.fc=fp16", {"*bn?": "fp32", "fc": "fp16"}),
        ("KEY.layer[34].0=fp32", {"layer[34].0": "fp32"}),
        ("++KEY.fc=fp32", {"fc": "fp32"}),
        ("", {}),
    ],
)
def test_patterns_of_module_overrides(overrides, expected):
    words = overrides.replace("KEY", "precision.overrides").split()
    assert compose_config(words).config.precision.overrides == expected


def test_a_record_of_a_run_names_no_code():
    plain = compose_config([]).as_dict()
    for change in ({"_target_": "os.system"}, {"extra": 1}, {"seed": "${oc.env:HOME}"}):
        with pytest.raises(BadInput):
            config_from_record(plain | change)
    plain["model"] = plain["model"] | {"_target_": "os.system"}
    with pytest.raises(BadInput):
        config_from_record(plain)


@pytest.mark.slow
def test_a_whole_number_may_be_written_with_an_exponent():
    config = compose_config(["train.steps=1e2", "optim.lr=1e-1", "data.vocab_limit=1.5E+3"]).config
    assert (config.train.steps, config.optim.lr, config.data.vocab_limit) == (100, 0.1, 1500)
    [steps] = parse_overrides(["train.steps=1e2,2e3"])
    assert list(steps.sweep_string_iterator()) == ["100", "2000"]
    for text in ("train.steps=1.5e0", "train.steps=1e30", "train.steps=1e-3"):
        with pytest.raises(BadInput, match="train.steps="):
            compose_config([text])


@pytest.mark.parametrize(
    ("key", "words", "wanted"),
    [
        ("precision", "16-mixed mixed_float16 O1 AMP", ["amp"]),
        ("precision", "bf16-mixed", ["amp_bf16"]),
        ("precision", "16 fp16 float16 FP16", ["amp", "fp16_master_scaled", "fp16_naive"]),
        ("precision", "bf16 bfloat16", ["amp_bf16", "bf16_master", "bf16_naive"]),
        ("precision", "O2", ["fp16_master_scaled"]),
        ("precision", "O3 half 16-true", ["fp16_naive"]),
        ("precision", "32 32-true float32 O0 no", ["fp32"]),
        ("precision", "int8", ["int8_rowwise"]),
        ("precision", "int4", []),
    ],
)
def test_the_words_of_others(key, words, wanted):
    known = list(option_files(key))
    assert [meant(word, known, key) for word in words.split()] == [wanted] * len(words.split())
    if wanted:
        line = must_be(words.split()[0], known, key)
        assert line.startswith("did you mean '") and line.endswith(must_be("?", known, key))


def test_what_others_mean_is_there():
    """No hint names a key, a mode or a device that does not exist."""
    known = {"": {*FIELDS, *GROUPS}, "device": {"auto", "cuda", "cpu"}}
    known["precision"] = set(option_files("precision"))
    for key, table in _ELSEWHERE.items():
        for found in table.values():
            assert {found} <= known[key] if isinstance(found, str) else set(found) <= known[key]
