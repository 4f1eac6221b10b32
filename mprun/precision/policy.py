"""Precision modes as values, and the switches of torch that would change their meaning.

A mode is one `PrecisionPolicy`, defined by one file of conf/precision; only `build_policy` and
`get_policy` ask which mode it is. Modes and their sources: Micikevicius et al., arXiv 1710.03740,
sections 3.1 to 3.3 (FP16 with master weights and loss scaling), torch.amp (autocast), the rest as
named.

Every switch with which torch lowers the precision of products is pinned and read back. Stock torch
leaves convolutions and RNNs in TF32 on Ampere and later, and lets half GEMMs reduce in half. So an
unpinned "FP32" baseline is not FP32 (torch documentation, CUDA semantics). Flags are process-wide:
one run, one process.
"""

import copy
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from mprun.precision.block_formats import ELEMENTS, SCALE_ROUNDINGS, SCALES, Element, block_of
from mprun.precision.packed_states import (
    DECAYS,
    IN_BLOCKS,
    SQUARES,
    STATE_FORMATS,
    StateFormats,
    least_decay,
)
from mprun.precision.scaled_attention import GRANULARITIES, ScaledAttention
from mprun.precision.scaled_products import ScaledProducts
from mprun.spelling import became

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DIVIDE = ("after", "before", "split")  # where a sum over ranks is divided
ORDERS = ("rank", "ring", "tree", "fp32")  # in which that sum is added
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
DTYPE_NAMES |= {ELEMENTS[name].dtype: name for name in ("e4m3", "e5m2", "int8")}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype ("fp16"), or torch's name if no mode has it."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """The dtype of each kind of tensor in a training run. The default values define FP32 training.

    param_dtype: weights, inputs and activations of the model, and their gradients.
    norm_dtype: parameters, statistics and arithmetic of norm layers.
    master_dtype: dtype of the master weights, which the optimizer updates; the model computes with
        copies of them. If master_dtype is None, the optimizer updates the parameters with which
        the model computes. If it is a 16-bit dtype, the master weights are FP32 tensors whose
        values are rounded to master_dtype. Only parameters with 16-bit copies are rounded so.
    grad_dtype: dtype in which gradients are divided by the loss scale. Without master weights,
        gradients are also accumulated and clipped in grad_dtype. With master weights, gradients are
        accumulated and clipped in FP32.
    loss_dtype: dtype of logits inside softmax and loss.
    autocast_dtype: dtype in which torch.autocast runs the operations of its lower-precision list,
        or None for no autocast.
    fp32_math: arithmetic of FP32 products on CUDA, "ieee" or "tf32".
    reduce_dtype: dtype in which gradients are summed over ranks before they are divided by the loss
        scale. If reduce_dtype is None, gradients are divided by the loss scale first, and then
        summed in the dtype of `.grad`. The micro-batches of an update are summed as if each came
        from its own rank.
    reduce_divide: when gradients are divided by the number of ranks: before or after the sum over
        ranks, or partly before it, see `mprun.distributed.reduction.factors`.
    reduce_order: order in which the gradients of the ranks are added, see
        `mprun.distributed.reduction.in_order`.
    rounding: how updated weights are rounded if master weights, or weights without a master copy,
        have 16 bits. "nearest": a weight without a master copy is updated in its own dtype. If
        state_dtype is set, such a weight is updated in FP32 and then rounded to nearest.
        "stochastic", "kahan": each weight is updated in FP32 and then rounded, see
        `mprun.precision.rounded_weights`.
    state_dtype, square_dtype, state_rounding: formats and rounding of the optimizer state, see
        `StateFormats`. If state_dtype is None, the state has the dtype of the update's arithmetic.
    matmul: products of linear layers in 8 bits or fewer. If matmul is None, linear layers compute
        like other layers.
    attention: attention in FP8. If attention is None, it computes like other operations.
    """

    name: str
    param_dtype: torch.dtype = torch.float32
    norm_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype | None = torch.float32
    grad_dtype: torch.dtype = torch.float32
    loss_dtype: torch.dtype = torch.float32
    autocast_dtype: torch.dtype | None = None
    fp32_math: str = "ieee"
    reduce_dtype: torch.dtype | None = None
    reduce_divide: str = "after"
    reduce_order: str = "rank"
    rounding: str = "nearest"
    state_dtype: str | None = None
    square_dtype: str | None = None
    state_rounding: str = "nearest"
    matmul: ScaledProducts | None = None
    attention: ScaledAttention | None = None

    def __post_init__(self) -> None:
        for field, allowed in _WORDS.items():
            value = getattr(self, field, None)
            if value is not None and value not in allowed:
                raise ValueError(f"{field}={value!r}: must be one of {', '.join(allowed)}")
        self._check()

    def _check(self) -> None:
        if self.state_rounding != "nearest" and "bf16" not in self.states:
            given = f"state_rounding={self.state_rounding}"
            raise ValueError(f"{given}: needs a state_dtype or square_dtype of bf16")
        if self.rounded_masters is not None and self.param_dtype.itemsize != 2:
            given = f"master_dtype={dtype_name(self.rounded_masters)}"
            raise ValueError(f"{given}: needs a param_dtype of 16 bits")
        if self.rounding != "nearest" and self.rounded_masters not in (None, torch.bfloat16):
            raise ValueError(
                f"rounding={self.rounding}: needs BF16 weights, or a master_dtype of bf16"
            )
        if self.attention is not None and self.half_dtype is None:
            given = f"attention.format={self.attention.format.name}"
            raise ValueError(f"{given}: needs a param_dtype or autocast_dtype of 16 bits")

    @property
    def masters(self) -> str:
        """Return the kind of master weights: "kept", "transient" or "none".

        "kept" master weights stay from step to step, and "transient" ones exist for one update.
        With "none" each weight is updated in its own dtype.
        """
        if self.master_dtype is not None:
            return "kept"
        return "none" if self.rounding == "nearest" else "transient"

    @property
    def states(self) -> StateFormats:
        """Return the formats of the optimizer state."""
        return StateFormats(self.state_dtype, self.square_dtype, self.state_rounding)

    @property
    def rounded_masters(self) -> torch.dtype | None:
        """Return the 16-bit dtype of the master weights, or None."""
        own = self.master_dtype
        return own if own is not None and own.itemsize == 2 else None

    def why_stuck(self, decay: float, state: str = "exp_avg_sq") -> str | None:
        """Return why an average in the optimizer state cannot decay by the factor `decay`, or None
        if it can.

        State that is rounded to nearest keeps its value if 1 - decay is below `least_decay`. With
        stochastic rounding, the expected value of the state decays by exactly `decay`. If all
        numbers of a block decay together, the scale of the block decays.
        """
        form = self.states.of(state)
        if not self.states.are_narrow and self.masters == "none":
            form = dtype_name(self.param_dtype)
        least = 0.0 if form is None else least_decay(form, state in SQUARES)
        if form is None or self.states.is_random(state) or not 0 < 1 - decay < least:
            return None
        while_ = " while the largest of its block stays" if form in IN_BLOCKS else ""
        what = "squares" if state in SQUARES else "gradients"
        return (
            f"{self.name} keeps optimizer state in {form.upper()}, where a number times {decay:g} "
            f"rounds back to itself{while_}: an average of {what} does not fall "
            f"(factors up to {1 - least:.4g} move it)"
        )

    def stuck(self, settings: Mapping[str, Any]) -> str | None:
        """Return the first optimizer setting with which an average in the state cannot decay, and
        the reason."""
        for state, (key, place) in DECAYS.items():
            decay = settings.get(key)
            if place is not None and isinstance(decay, (tuple, list)):
                decay = decay[place]
            if isinstance(decay, float) and (why := self.why_stuck(decay, state)):
                return f"{key}: {why}"
        return None

    @property
    def half_dtype(self) -> torch.dtype | None:
        """Return the 16-bit dtype in which the products of the mode run, or None."""
        dtype = self.autocast_dtype or self.param_dtype
        return dtype if dtype.itemsize == 2 else None

    @property
    def formats(self) -> tuple[torch.dtype, ...]:
        """Return the operand dtypes of products on a GPU, except FP32: first the 16-bit dtype, then
        narrower ones."""
        narrow = () if self.half_dtype is None else (self.half_dtype,)
        others = () if self.matmul is None else self.matmul.multiplied
        return tuple(dict.fromkeys((*narrow, *others)))

    @property
    def draws(self) -> bool:
        """Return whether operands of products are rounded at random, with new bits in each
        micro-batch."""
        return self.matmul is not None and self.matmul.grad_rounding != "nearest"


def why_no_switch(before: PrecisionPolicy, after: PrecisionPolicy) -> str | None:
    """Return why training cannot go on in another mode with the same weights and state, or None."""
    for one in (before, after):
        if one.masters != "kept":
            return f"{one.name} has no FP32 master weights, which a switch of modes goes on with"
    stored = ("master_dtype", "rounding", "state_dtype", "square_dtype", "state_rounding")
    for field in (*stored, "reduce_dtype", "reduce_divide", "reduce_order"):
        had, has = getattr(before, field), getattr(after, field)
        if had != has:
            now, then = (_word(own) or "null" for own in (has, had))
            return f"{field} is {now}, but a switch of modes keeps that of {before.name}, {then}"
    if before == after:
        return f"{before.name} is in force already"
    return None


# Fields that hold words, with the allowed ones; then fields with neither words nor dtypes.
_WORDS = {
    "fp32_math": ("ieee", "tf32"),
    "reduce_divide": DIVIDE,
    "reduce_order": ORDERS,
    "rounding": ("nearest", "stochastic", "kahan"),
    "scale": tuple(name for name in SCALES if name != "none"),
    "scale_rounding": SCALE_ROUNDINGS,
    "grad_rounding": ("nearest", "stochastic", "both"),
    "state_dtype": tuple(name for name in STATE_FORMATS if name),
    "square_dtype": tuple(name for name in STATE_FORMATS if name),
    "state_rounding": ("nearest", "stochastic"),
    "attention.granularity": GRANULARITIES,
}
_LISTS = ("hadamard", "high_precision", "dequantized", "modules")
_UPDATE = ("rounding", "state_dtype", "square_dtype", "state_rounding")
_MAY_BE_NULL = ("state_dtype", "square_dtype")
_COUNTS = {"history": 1, "margin": 0}  # with the smallest
_FP8 = {name: ELEMENTS[name] for name in ("e4m3", "e5m2")}


def build_policy(name: str, values: Mapping[str, Any]) -> PrecisionPolicy:
    """Build a policy from the values of a mode's file, which are dtype names (`fp32`, `bf16`), None
    or words such as `nearest`.

    Raises:
        ValueError: A value is not allowed for its key.
    """
    flat: dict[str, Any] = {}  # {"update": {"rounding": "kahan"}} as {"update.rounding": "kahan"}
    for key, value in values.items():
        is_group = isinstance(value, Mapping)
        flat |= {f"{key}.{k}": v for k, v in value.items()} if is_group else {key: value}
    found: dict[str, Any] = {}
    matmul: dict[str, Any] = {}
    attention: dict[str, Any] = {}
    for key, value in flat.items():
        if now := became(f"precision.{key}"):
            raise ValueError(f"precision.{key}: {now}")
        group, _, field = key.rpartition(".")
        if group not in ("matmul", "attention"):
            found[field] = _read(key, value, DTYPES)
        elif group == "matmul" and flat.get("matmul.input") is not None:
            matmul[field] = _read(key, value, ELEMENTS)
        elif group == "attention" and flat.get("attention.format") is not None:
            attention[field] = _read(key, value, _FP8)
    if matmul:
        found["matmul"] = ScaledProducts(**matmul)
    if attention:
        found["attention"] = ScaledAttention(**attention)
    return PrecisionPolicy(name, **found)


def _read(key: str, value: Any, formats: Mapping[str, Any]) -> Any:
    field = key.rpartition(".")[2]
    if field in _LISTS:
        return tuple(value)
    if field in _COUNTS:
        if type(value) is not int or value < _COUNTS[field]:
            raise ValueError(
                f"{key}={value!r}: must be a whole number of at least {_COUNTS[field]}"
            )
        return value
    words = _WORDS.get(key, _WORDS.get(field))
    if words is None and field in ("granularity", "weight_granularity"):
        try:
            if value is not None:
                block_of(value)
            return value
        except ValueError as error:
            raise ValueError(f"{key}={value!r}: {error}") from None
    if value is None and formats is DTYPES and (words is None or field in _MAY_BE_NULL):
        return None
    allowed = words or tuple(formats)
    if value not in allowed:
        raise ValueError(f"{key}={value!r}: must be one of {', '.join(allowed)}")
    return value if words else formats[value]


def policy_values(policy: PrecisionPolicy) -> dict[str, Any]:
    """Return the configuration values from which `build_policy` builds `policy`."""
    words, matmul = _words(policy), _words(policy.matmul or ScaledProducts())
    if policy.matmul is None:
        matmul |= dict.fromkeys(("input", "weight", "grad_output"))
    attention = _words(policy.attention or ScaledAttention())
    if policy.attention is None:
        attention["format"] = None
    update = {name: words.pop(name) for name in _UPDATE}
    del words["name"]
    return words | {"matmul": matmul, "attention": attention, "update": update}


def _words(of: PrecisionPolicy | ScaledProducts | ScaledAttention) -> dict[str, Any]:
    return {field.name: _word(getattr(of, field.name)) for field in fields(of)}


def _word(value: Any) -> Any:
    if isinstance(value, Element):
        return value.name
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES[value]
    return list(value) if isinstance(value, tuple) else value


def get_policy(name: str, folder: str | Path | None = None) -> PrecisionPolicy:
    """Return the policy of a mode, as the mode's file defines it.

    Args:
        name: name of the mode, such as "fp16_master".
        folder: folder with your own file `name`.yaml; None means mprun's own files. Keys that the
            file does not set have their FP32 values.

    Raises: ValueError: The file does not exist, or it defines no mode.
    """
    values = option("precision", name, None if folder is None else Path(folder))
    own = {key: value for key, value in values.items() if key not in ("defaults", "name")}
    return build_policy(name, own)


def usual_scaler(name: str) -> str:
    """Return the name of the loss scaler that belongs to a mode of mprun; "none" for another's."""
    try:
        defaults = option("precision", name).get("defaults", [])
    except ValueError:  # a policy of one's own brings none
        return "none"
    pairs = [pair for default in defaults for pair in default.items()]
    return next((scaler for key, scaler in pairs if "/scaler" in key), "none")


def option(group: str, name: str, folder: Path | None = None) -> dict[str, Any]:
    """Return the values of conf/GROUP/NAME.yaml, or of `name`.yaml in `folder`; ValueError if there
    is no such file."""
    if folder is None:
        inside = Path(__file__).resolve().parents[1] / "conf"  # of an installed package
        folder = (inside if inside.is_dir() else inside.parents[1] / "conf") / group
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        what = "precision mode" if group == "precision" else group
        raise ValueError(f"{what} {name!r}: must be one of {known}")
    return copy.deepcopy(_parsed(path.read_text(encoding="utf-8")))


@cache
def _parsed(text: str) -> dict[str, Any]:
    return yaml.safe_load(text)


# In torch.backends; the CPU's are "mkldnn".
_FP32_PRODUCTS = "cuda.matmul cudnn.conv cudnn.rnn mkldnn.matmul mkldnn.conv mkldnn.rnn".split()
_REDUCTIONS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def pin_math_flags(
    fp32_math: str, deterministic: bool = False, autotune: bool | None = None
) -> None:
    """Set torch's flags so that FP32 products compute in "ieee" or "tf32", and 16-bit products
    reduce in FP32.

    `deterministic=True` also selects deterministic kernels. It turns the autotuner of cuDNN off,
    because the autotuner may choose another kernel in another run. With `deterministic=False` the
    autotuner is on. The argument `autotune` sets the autotuner for any value of `deterministic`.
    """
    pin_products(fp32_math)
    torch.backends.cudnn.benchmark = not deterministic if autotune is None else autotune
    torch.backends.cudnn.deterministic = deterministic
    if deterministic != torch.are_deterministic_algorithms_enabled():
        # Skipped if nothing changes: its first call imports torch's compiler, which takes a second.
        torch.use_deterministic_algorithms(deterministic)
        # It would launch a kernel for every new tensor; nothing here reads unwritten memory.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010


def pin_products(fp32_math: str) -> None:
    """Set the flags of products alone: FP32 ones to "ieee" or "tf32", 16-bit sums to FP32."""
    _pin_fp32_products(fp32_math)
    for name in _REDUCTIONS:
        setattr(torch.backends.cuda.matmul, name, False)


@contextmanager
def ieee_fp32() -> Iterator[None]:
    """Compute FP32 products in full FP32 inside the block (used for evaluation)."""
    before = {name: _backend(name).fp32_precision for name in _FP32_PRODUCTS}
    older: tuple[str, bool] | None = None
    with suppress(RuntimeError):  # they contradict the flags already: nothing to return to
        older = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    _pin_fp32_products("ieee")
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            torch.backends.cudnn.allow_tf32 = older[1]
        for name, value in before.items():
            _backend(name).fp32_precision = value


def read_math_flags() -> dict[str, str | bool]:
    """Return the current values of the flags that `pin_math_flags` sets, as torch reports them."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        **{f"{name}.fp32_precision": _backend(name).fp32_precision for name in _FP32_PRODUCTS},
        **{f"cuda.matmul.{name}": bool(getattr(matmul, name)) for name in _REDUCTIONS},
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _pin_fp32_products(fp32_math: str) -> None:
    # The older switches first, which set some of the flags: their readers, torch.compile among
    # them, raise where they say something else than the flags (pytorch#166387).
    torch.backends.cuda.matmul.allow_tf32 = fp32_math == "tf32"
    torch.backends.cudnn.allow_tf32 = fp32_math == "tf32"
    for name in _FP32_PRODUCTS:
        # The CPU library's lower-precision FP32 kernels stay off in every mode.
        _backend(name).fp32_precision = fp32_math if name.startswith("cu") else "ieee"


def _backend(name: str) -> Any:
    return operator.attrgetter(name)(torch.backends)
