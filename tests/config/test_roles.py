"""A key has one role on its field for hash, resume, comparison, paths and tables."""

import copy
import dataclasses

import pytest

from mprun.config import schema
from mprun.config.components import NETWORKS, SOURCES
from mprun.config.compose import compose_config, config_from_record
from mprun.config.keys import FIELDS, current, role_of
from mprun.config.registry import ModelConfig, network
from mprun.entry_points import loaded
from mprun.errors import BadInput
from mprun.record.keys import (
    INTERVAL,
    JUDGED,
    LABEL,
    LENGTH,
    MACHINE,
    READING,
    RESULT,
    SEED,
    config_hash,
    flat,
)

from ..helpers import settings_of

# Between them they have every component with keys of its own that are not hashed.
CONFIGURATIONS = (
    "",
    "experiment=biglstm_lm1b data.root=/d data.cache=/c data.vocabulary=/v",
    "experiment=resnet50_imagenet data.root=/d data.workers=3 data.prefetch=4",
    "model=lstm_lm precision=fp16_master_scaled scaler=megatron precision.overrides.layer4.*=fp32",
    "data=custom data.factory=a:b data.options.root=1 "
    "model=custom model.factory=c:d model.task=gan model.options.cache=2",
)


@pytest.mark.parametrize("overrides", CONFIGURATIONS)
def test_the_hash_changes_with_each_key_that_can_change_a_number_and_with_no_other(overrides):
    plain = flat(compose_config(overrides.split(), files=False).as_dict())
    before = config_hash(plain)
    changed = {key for key in plain if config_hash(plain | {key: "another"}) != before}
    assert changed == {key for key in plain if role_of(key).hashed}
    kept = {"data.root", "data.workers", "train.log_every", "output_dir", "numerics.every"}
    assert not kept & changed and {"seed", "optim.lr", "precision.param_dtype"} <= changed


@pytest.mark.parametrize(
    ("role", "keys"),
    [
        (LABEL, "name output_root output_dir resume basis numerics numerics.probes numerics.every"),
        (READING, "train.log_every train.checkpoint_every train.keep_checkpoints"),
        (READING, "train.cuda_graph data.root data.workers data.prefetch data.cache"),
        (READING, "data.vocabulary data.tokenizer"),
        (LENGTH, "train.steps train.epochs"),
        (INTERVAL, "train.eval_every"),
        (MACHINE, "device threads"),
        (SEED, "seed"),
        (JUDGED, "compare.higher_is_better"),
        (RESULT, "optim.lr data.batch_size model.name data data.name cpu_half deterministic"),
        # Of no schema: the record of an earlier version, the user's own code, the data's content.
        (RESULT, "data.sha256 data.options.root model.options.name train.something"),
    ],
)
def test_what_a_key_means(role, keys):
    for key in keys.split():
        assert role_of(key) is role, key


def test_only_these_keys_have_another_role_than_that_of_a_result():
    told = {key for key in FIELDS if role_of(key) is not RESULT}
    groups = {key.partition(".")[0] for key in told}
    own = "name output_root output_dir resume basis numerics seed device threads"
    assert groups == {*f"{own} train data devices nodes restarts dist verbose compare".split()}
    assert len(told) == 41


def test_a_key_has_one_role_in_all_models_and_data_sources():
    for key, fields in FIELDS.items():
        assert len({field.metadata.get("role") for field in fields}) == 1, key


def test_every_field_says_what_it_is():
    """In one line that fits a column of a table."""
    for key, fields in FIELDS.items():
        for field in fields:
            doc = field.metadata.get("doc", "")
            assert doc and len(doc) <= 100 and doc == doc.strip(), key
            assert "\n" not in doc and not doc.endswith("."), key


def test_every_class_of_the_schema_is_below_its_root():
    """A field of a class that no key leads to would escape the test above."""
    found = [one for one in vars(schema).values() if dataclasses.is_dataclass(one)]
    classes = {one for one in found if one.__module__ == schema.__name__}
    reached = {schema.RunConfig}
    for inner in (schema.RunConfig, schema.PrecisionConfig):
        reached |= {field.default_factory for field in dataclasses.fields(inner)}
    assert classes <= reached


def test_no_class_of_the_schema_takes_an_unknown_key():
    """OmegaConf sets attributes, so that only a slotted class refuses `+group.unknown=1`."""
    found = [one for one in vars(schema).values() if isinstance(one, type)]
    classes = [one for one in found if dataclasses.is_dataclass(one)]
    classes += [one.config for one in (*NETWORKS.values(), *SOURCES.values())]
    assert [one.__name__ for one in classes if hasattr(object.__new__(one), "__dict__")] == []
    with pytest.raises(BadInput, match=r"data\.unknown: unknown key"):
        compose_config(["+data.unknown=1"])


def test_a_component_below_a_class_without_slots_is_refused():
    @dataclasses.dataclass
    class Open(ModelConfig):
        pass

    with pytest.raises(TypeError, match=r"open: all base classes of Below must be"):

        @network("open", task="classification")
        class Below(Open):
            pass

    with pytest.raises(ValueError, match="two components are called gpt"):

        @network("gpt", task="language_model")
        class Again(ModelConfig):
            pass


def test_the_keys_of_a_continuation():
    assert sorted(key for key in FIELDS if role_of(key).resumable) == sorted(
        """train.steps train.epochs train.log_every train.eval_every train.checkpoint_every
        train.keep_checkpoints train.cuda_graph train.activation_checkpointing data.root
        data.workers data.prefetch data.cache data.vocabulary data.tokenizer devices nodes
        restarts dist dist.engine dist.order dist.bucket_mb dist.timeout_s verbose
        compare.higher_is_better""".split()
    )


def test_what_is_not_hashed_is_not_compared_either():
    """Runs of one hash are one experiment, to which other seeds and intervals belong, too."""
    for key in FIELDS:
        role = role_of(key)
        assert role.hashed == role.compared or role in (SEED, INTERVAL), key


def test_no_setting_of_a_data_source_is_lost_on_the_way():
    """A field that is no argument of its source would be set without any effect."""
    for name, source in SOURCES.items():
        if source.own:
            continue
        make, config = loaded(source.builder), source.config()
        fields = {field.name for field in dataclasses.fields(config)}
        embedded = set() if source.on_disk else {"root"}
        loader = set() if source.decodes else {"workers"}
        left = fields - settings_of(make).keys() - embedded - loader - {"name"}
        assert left == set(), name


@pytest.mark.slow
@pytest.mark.parametrize(("before", "scale"), [(True, "pow2"), (False, "fp32")])
def test_a_record_of_an_earlier_mprun_says_its_scale_by_another_key(before, scale):
    config = compose_config(["model=gpt", "precision=fp8_rowwise"]).as_dict()
    expected = copy.deepcopy(config)
    expected["precision"]["matmul"]["scale"] = scale
    later = ("scale", "weight_granularity", "scale_rounding", "grad_rounding", "hadamard")
    for key in later:  # came with it
        del config["precision"]["matmul"][key]
    config["precision"]["matmul"]["power_of_two"] = before
    assert dataclasses.asdict(config_from_record(config)) == expected
    assert current(config) == expected
    earlier = copy.deepcopy(config)  # and its group by another name
    earlier["precision"]["products"] = earlier["precision"].pop("matmul")
    assert current(earlier) == expected
    # Without formats, as a cure that was printed then, the rest had no effect and is now refused.
    plain = dataclasses.asdict(schema.MatmulConfig()) | {"modules": ["blocks.*"]}
    formats = {"input": None, "weight": None, "grad_output": None}
    config["precision"]["matmul"] |= formats | {"modules": ["blocks.*"]}
    assert dataclasses.asdict(config_from_record(config))["precision"]["matmul"] == plain
