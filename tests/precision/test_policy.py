"""The modes as values: what their files say, in the schema and in the engine."""

import dataclasses

import pytest
import torch

from mprun.assembly import policy_from
from mprun.config.compose import compose_config
from mprun.config.rules import updates_in_16_bits
from mprun.errors import BadInput
from mprun.precision import ForwardContext, build_policy, get_policy, why_unsupported
from mprun.precision.block_formats import ELEMENTS
from mprun.precision.policy import policy_values

from ..shipped import ALL_MODES

F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")
# param, norm, master, grad, loss, autocast, fp32_math: the table of the paper's section 3.
TABLE = {
    "fp32": (F32, F32, F32, F32, F32, None, "ieee"),
    "tf32": (F32, F32, F32, F32, F32, None, "tf32"),
    "fp16_naive": (F16, F16, None, F16, F32, None, "ieee"),
    "fp16_master": (F16, F32, F32, F32, F32, None, "ieee"),
    "fp16_master_scaled": (F16, F32, F32, F32, F32, None, "ieee"),
    "amp": (F32, F32, F32, F32, F32, F16, "ieee"),
    "bf16_naive": (B16, B16, None, B16, F32, None, "ieee"),
    "bf16_master": (B16, F32, F32, F32, F32, None, "ieee"),
    "amp_bf16": (F32, F32, F32, F32, F32, B16, "ieee"),
}
BF16 = (B16, F32, None, F32, F32, None, "ieee")
E4M3, E5M2, E2M1, INT8 = ELEMENTS.values()
# Beside these: rounding, and formats, granularities, scale of the products.
OTHERS = {f"bf16_{own}": (BF16, own, None) for own in ("kahan", "stochastic")}
OF_PRODUCTS = {
    "fp8_delayed": (E4M3, E4M3, E5M2, "tensor", None, "delayed", "rceil"),
    "fp8_rowwise": (E4M3, E4M3, E4M3, "row", None, "pow2", "rceil"),
    "fp8_tensorwise": (E4M3, E4M3, E5M2, "tensor", None, "fp32", "rceil"),
    "fp8_unscaled": (E4M3, E4M3, E5M2, "none", None, "fp32", "rceil"),
    "fp8_block": (E4M3, E4M3, E4M3, "1x128", "128x128", "pow2", "rceil"),
    "mxfp4": (E2M1, E2M1, E2M1, "1x32", None, "e8m0", "even"),
    "mxfp8": (E4M3, E4M3, E4M3, "1x32", None, "e8m0", "rceil"),
    "mxfp8_floor": (E4M3, E4M3, E4M3, "1x32", None, "e8m0", "floor"),
    "mxfp8_hybrid": (E4M3, E4M3, E5M2, "1x32", None, "e8m0", "rceil"),
    "nvfp4_plain": (E2M1, E2M1, E2M1, "1x16", None, "e4m3", "rceil"),
}
OTHERS |= {
    name: (TABLE["bf16_master"], "nearest", (*own, 1024, 0, "nearest", (), (), (), ("*",)))
    for name, own in OF_PRODUCTS.items()
}
RECIPE = (E2M1, E2M1, E2M1, "1x16", "16x16", "e4m3", "rceil")
RECIPE += (1024, 0, "stochastic", ("grad_weight",))  # history and margin, of no effect
OTHERS["nvfp4"] = (TABLE["bf16_master"], "nearest", (*RECIPE, (), (), ("*",)))
FOUR_OVER_SIX = ("four_over_six" if own == "e4m3" else own for own in RECIPE)
OTHERS["nvfp4_4over6"] = (TABLE["bf16_master"], "nearest", (*FOUR_OVER_SIX, (), (), ("*",)))
RECIPE = (E2M1, E2M1, E2M1, "1x32", None, "e8m0", "rceil", 1024, 0, "both")
RECIPE += (("grad_input", "grad_weight"), ("output",), (), ("*",))
OTHERS["mxfp4_hadamard"] = (TABLE["bf16_master"], "nearest", RECIPE)
RECIPE = (E4M3, E4M3, E4M3, "1x128", "128x128", "fp32", "rceil", 1024, 0, "nearest", (), ())
OTHERS["fp8_deepseek"] = (TABLE["bf16_master"], "nearest", (*RECIPE, ("grad_weight",), ("*",)))
RECIPE = (E4M3, E4M3, E5M2, "tensor", None, "delayed", "rceil", 1, 0, "nearest", (), (), ())
OTHERS["fp8_delayed_megatron"] = (TABLE["bf16_master"], "nearest", (*RECIPE, ("*",)))
RECIPE = (INT8, INT8, INT8, "row", None, "fp32", "rceil", 1024, 0, "nearest", ())
OTHERS["int8_rowwise"] = (TABLE["bf16_master"], "nearest", (*RECIPE, (), (), ("*",)))
BACKWARD = ("grad_input", "grad_weight")
OTHERS["qat_int8"] = (TABLE["bf16_master"], "nearest", (*RECIPE, BACKWARD, BACKWARD, ("*",)))
RECIPE = (E2M1, E2M1, E2M1, "1x16", None, "e4m3", "rceil", 1024, 0, "nearest", ())
OTHERS["qat_nvfp4"] = (TABLE["bf16_master"], "nearest", (*RECIPE, BACKWARD, BACKWARD, ("*",)))
OF_ATTENTION = {"fp8_attention": (E4M3, E5M2, "head")}
OTHERS |= {name: (TABLE["bf16_master"], "nearest", None) for name in OF_ATTENTION}
STATES = (None, None, "nearest")
REST = (None, "after", "rank", "nearest", *STATES, None, None)  # of reductions, update, products


@pytest.mark.parametrize("name", ALL_MODES)
def test_the_table(name):
    dtypes, rounding, products = OTHERS.get(name) or (TABLE[name], "nearest", None)
    last = *STATES, products, OF_ATTENTION.get(name)
    expected = (name, *dtypes, None, "after", "rank", rounding, *last)
    assert dataclasses.astuple(get_policy(name)) == expected


@pytest.mark.parametrize("name", ALL_MODES)
@pytest.mark.few(6)
def test_the_yaml_file_says_the_same(name):
    device = "cuda" if name == "tf32" else "cpu"
    config = compose_config([f"precision={name}", f"device={device}"]).config
    policy = policy_from(config.precision)
    assert policy == get_policy(name)
    # and back, as a script's run records it
    values = {"name": name, **policy_values(policy), "overrides": {}, "switch": []}
    assert values == dataclasses.asdict(config.precision)
    assert config.scaler.name == ("dynamic" if name in ("fp16_master_scaled", "amp") else "none")


PRODUCTS = [mode for mode in ALL_MODES if get_policy(mode).matmul]
CHANGES = ["scale=pow2", "grad_rounding=stochastic", "granularity=1x32"]
# A history of one update casts as one of 1,024.
CHANGED = [(mode, more) for mode in PRODUCTS if mode != "fp8_delayed_megatron" for more in CHANGES]
CHANGED.remove(("fp8_unscaled", "scale=pow2"))  # has no scales
for more in CHANGES[1:]:
    CHANGED.remove(("fp8_delayed", more))  # decodes nothing
    CHANGED.remove(("nvfp4_4over6", more))  # whose scale is of E2M1 alone


@pytest.mark.few(3)
@pytest.mark.parametrize(("mode", "more"), CHANGED)
def test_two_e5m2_operands_are_refused_where_codes_are_multiplied(mode, more):
    """Numbers that are decoded may be any: a GPU multiplies BF16."""
    formats = [f"precision.matmul.{name}=e5m2" for name in ("input", "weight", "grad_output")]
    given = [f"precision={mode}", *formats, f"precision.matmul.{more}"]
    if mode.startswith("mxfp") and more == "scale=pow2":
        given.append("precision.matmul.scale_rounding=rceil")
    formats = dict.fromkeys(("input", "weight", "grad_output"), E5M2)
    changed = formats | dict([more.split("=")])
    if dataclasses.replace(get_policy(mode).matmul, **changed).decoded:
        assert policy_from(compose_config(given).config.precision).matmul.decoded
    else:
        with pytest.raises(BadInput, match="multiplies two E5M2 operands"):
            compose_config(given)


def test_these_are_all_files_and_this_is_their_order():
    order = [*TABLE]
    order[6:6] = ["bf16_kahan"]
    order[8:8] = ["bf16_stochastic"]
    in_8_bits = {name for name, own in OTHERS.items() if own[2]} | OF_ATTENTION.keys()
    assert ALL_MODES == [*order, *sorted(in_8_bits)]


def test_a_folder_of_ones_own_says_what_a_mode_is(tmp_path):
    (tmp_path / "mine.yaml").write_text("# FP16 weights, nothing else.\nparam_dtype: fp16\n")
    policy = get_policy("mine", tmp_path)
    assert dataclasses.astuple(policy) == ("mine", F16, F32, F32, F32, F32, None, "ieee", *REST)
    assert get_policy("mine", str(tmp_path)) == policy
    with pytest.raises(ValueError, match="'fp32'.*one of mine"):
        get_policy("fp32", tmp_path)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'fp8'.*fp32, fp8_attention"):
        get_policy("fp8")
    for values, said in (
        ({"param_dtype": "fp64"}, "param_dtype='fp64'"),
        ({"fp32_math": "fast"}, "fp32_math='fast'"),
        ({"update": {"rounding": "up"}}, "update.rounding='up': must be one of nearest"),
        ({"matmul": {"input": "e4m3", "weight": "e3m4"}}, "weight='e3m4': must be one of e4m3"),
        ({"matmul": {"input": "e4m3", "granularity": "block"}}, "matmul.granularity='block'"),
        ({"matmul": {"input": "e4m3", "granularity": "0x32"}}, "granularity='0x32': must be one"),
        ({"matmul": {"input": "e4m3", "scale": "e5m2"}}, "scale='e5m2': must be one of fp32"),
        (
            {"matmul": {"input": "e4m3", "history": 0}},
            "history=0: must be a whole number of at least 1",
        ),
        ({"attention": {"format": "e2m1"}}, "attention.format='e2m1': must be one of e4m3, e5m2"),
        ({"attention": {"format": "e4m3", "granularity": "row"}}, "granularity='row': must be one"),
        ({"attention": {"format": "e4m3"}}, "attention.format=e4m3: needs a param_dtype or auto"),
        ({"products": {"input": "e4m3"}}, "precision.products.input: now precision.matmul.input"),
    ):
        with pytest.raises(ValueError, match=said):
            build_policy("x", values)


@pytest.mark.parametrize(
    ("name", "half", "kind"),
    [
        ("fp32", None, "none"),
        ("fp16_naive", F16, "emulated-fp16"),
        ("amp", F16, "emulated-fp16"),
        ("bf16_master", B16, "emulated-bf16"),
        ("amp_bf16", B16, "emulated-bf16"),
    ],
)
def test_what_runs_in_16_bits(name, half, kind):
    policy = get_policy(name)
    assert policy.half_dtype == half
    assert ForwardContext(policy, CPU).kind() == kind
    assert ForwardContext(policy, CPU, native=True).kind() == kind.replace("emulated", "native")


def test_a_cpu_can_honour_every_mode_but_tf32():
    reasons = {name: why_unsupported(get_policy(name), CPU) for name in TABLE}
    assert "TF32" in reasons.pop("tf32")
    assert set(reasons.values()) == {None}


def test_modes_of_stochastic_rounding_draw():
    found = {name for name in ALL_MODES if get_policy(name).draws}
    assert found == {"mxfp4_hadamard", "nvfp4", "nvfp4_4over6"}


def test_a_word_that_a_policy_does_not_know_is_refused_however_it_comes():
    says = "state_dtype='dynamic4': must be one of fp32, bf16, fp16, dyn"
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(get_policy("nvfp4"), state_dtype="dynamic4")


@pytest.mark.parametrize("decay", [0.9, 0.99, 0.995, 0.9975, 0.9985, 0.999, 0.9995, 0.9999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_that_does_not_decay_is_told(dtype, decay):
    """Every number of 2 decades rounds back to itself, or some move."""
    numbers = torch.logspace(-2, 0, 999, dtype=torch.float64).to(dtype)
    sticks = bool((numbers * decay == numbers).all())
    policies = [get_policy("bf16_naive" if dtype is torch.bfloat16 else "fp16_naive")]
    if dtype is torch.bfloat16:
        policies.append(dataclasses.replace(get_policy("fp32"), state_dtype="bf16"))
    for policy in policies:
        assert (policy.why_stuck(decay) is not None) == sticks


@pytest.mark.parametrize(
    "mode", ["fp32", "bf16_master", "amp_bf16", "bf16_stochastic", "bf16_kahan"]
)
def test_state_in_fp32_decays(mode):
    for state_dtype in (None, "fp32"):
        policy = dataclasses.replace(get_policy(mode), state_dtype=state_dtype)
        assert policy.why_stuck(0.999) is None and policy.why_stuck(1 - 2.0**-20) is None


@pytest.mark.parametrize("mode", ["bf16_naive", "fp16_naive"])
def test_an_update_with_a_state_format_is_in_fp32(mode):
    """Also without masters: nothing of it is rounded operation by operation."""
    words = ["model=gpt", f"precision={mode}", "precision.update.state_dtype=fp8"]
    assert not updates_in_16_bits(compose_config(words).config.precision)
    assert updates_in_16_bits(compose_config(words[:2]).config.precision)
