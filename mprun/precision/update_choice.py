"""Choose the way of updates: is a single pass possible, is it faster, do its kernels work?

A compiler or a driver that is slightly too old or too new must cost speed, not results. So the
Triton kernels are compared with torch's operations once per process, for each optimizer.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision.casting import cast_model
from mprun.precision.loss_scale import LogMaxLossScale, StaticLossScale
from mprun.precision.policy import PrecisionPolicy
from mprun.precision.rounded_weights import COMPENSATION, is_dense
from mprun.precision.torch_update import (
    RULES,
    STATE,
    has_fused_kernel,
    is_fused,
    is_granted,
    rule_of,
)
from mprun.precision.update import ByTorch, SinglePass, same_order

Engine = Callable[..., Any]  # MixedPrecisionOptimizer, which imports this module
# Settings that no published recipe of the paper's models uses, and that a single pass ignores.
_UNKNOWN_SETTINGS = ("maximize", "differentiable", "amsgrad", "dampening", "lr_decay")


def choose_update(
    asked: str, plain: ByTorch, dtypes: Sequence[torch.dtype], engine: Engine, *, gains: bool
) -> tuple[SinglePass | None, str, str]:
    """Return the chosen single pass (None: torch's operations), the name of the way, and why.

    The name is "single_pass", or that of `torch_path`.

    Args:
        asked: "plain", "single_pass", or "auto" for the better one.
        plain: the update that a single pass would replace.
        dtypes: dtypes in which gradients of parameters, then of rows, are unscaled.
        gains: whether there is a cast or a scale whose passes it would save.

    Raises:
        ValueError: A single pass is asked for but impossible.
    """
    inner, updated = plain.inner, plain.updated
    path, device, rule = torch_path(inner), updated[0].device, rule_of(inner)
    if asked == "plain":
        return None, path, f"optim.implementation={path}"
    if asked not in ("auto", "single_pass"):
        raise ValueError(f"update={asked!r}: must be 'plain', 'auto' or 'single_pass'")
    why = _why_not(plain, dtypes)
    if why is None and asked == "auto":
        why = _why_slower(plain, gains)
    if why is None and rule is not None and device.type == "cuda":
        why = why_not_on(engine, device, rule, getattr(plain.narrow, "rounding", None))
    if why is not None:
        if asked == "auto":
            return None, path, why
        others = f"auto, {'fused, ' * (rule in STATE)}foreach, loop"
        raise ValueError(f"optim.implementation=single_pass: {why} (allowed: {others})")
    kind: type[SinglePass]
    if device.type == "cpu":
        from mprun.precision.single_pass_cpu import BlockedUpdate

        kind, reason = BlockedUpdate, "torch's fused kernel in blocks of the cache"
    else:
        from mprun.precision.single_pass_triton import KernelUpdate

        kind, reason = KernelUpdate, f"a Triton kernel for {rule}"
    tensors = (inner, plain.parameters, updated, plain.is_clipped)
    single_pass = kind(*tensors, plain.narrow, plain.norms)
    return single_pass, "single_pass", reason


def torch_path(inner: Optimizer) -> str:
    """Return which of torch's implementations `inner` runs; "default": torch chooses."""
    if is_fused(inner):
        return "fused"
    chosen = [group.get("foreach") for group in inner.param_groups]
    if all(chosen):
        return "foreach"
    return "default" if None in chosen else "loop"


def _why_slower(plain: ByTorch, gains: bool) -> str | None:
    if not gains:
        return "no cast and no loss scale: torch's own update is one pass over the weights"
    if plain.updated[0].device.type != "cpu" or plain.narrow is not None:
        return None
    # Measured (benchmarks/update_speed.py --mode amp): one core writes as fast as it reads.
    pairs = zip(plain.parameters, plain.updated, strict=True)
    if any(own is not tensor for own, tensor in pairs):
        return None
    inner = plain.inner
    if rule_of(inner) == "sgd" and not any(group["nesterov"] for group in inner.param_groups):
        return None  # its kernel unscales at no cost
    return "on a CPU FP32 gradients are as fast unscaled in place"


def _why_not(plain: ByTorch, dtypes: Sequence[torch.dtype]) -> str | None:
    updated, narrow = plain.updated, plain.narrow
    rule, device = rule_of(plain.inner), updated[0].device.type
    if rule is None or rule not in STATE:
        return f"{type(plain.inner).__name__}: only SGD, Adam, AdamW and Adagrad have one"
    if device not in ("cpu", "cuda"):
        return f"there is none for {device}"
    if any(tensor.is_complex() for tensor in updated):
        return "a weight is complex"
    if narrow is not None and narrow.state_dtype is not None:
        return f"the state is kept in {narrow.state_dtype}, for which it has no kernel"
    if narrow is not None and any(narrow.starts) and device == "cuda":
        return "a shard's random bits begin at a place that its kernel does not know"
    if any(t.dtype is not torch.float32 and not (narrow and t in narrow) for t in updated):
        return "weights are updated in 16 bits, operation by operation"
    if set(dtypes[: len(updated)]) != {torch.float32}:
        return "gradients are unscaled in 16 bits (precision.grad_dtype)"
    if not all(is_dense(tensor) for tensor in updated):
        return "a parameter has gaps between its values"
    if not all(map(same_order, plain.parameters, updated)):
        return "a parameter lies in memory in another order than its master"
    return _why_not_of_settings(plain.inner, rule, device)


def _why_not_of_settings(inner: Optimizer, rule: str, device: str) -> str | None:
    for group in inner.param_groups:
        for setting in _UNKNOWN_SETTINGS:
            if group.get(setting):
                return f"{setting}={group[setting]}: it has no formula for this setting"
        on_host = rule.startswith("adam") and not (group["fused"] or group["capturable"])
        if device == "cuda" and on_host:
            return f"{rule} keeps its step counter on the host unless fused or capturable"
    if device == "cpu" and not is_fused(inner):
        return f"torch's {rule} has no fused kernel in use here, which is what a CPU runs in blocks"
    return None


# Values of a tensor: one, a whole block, a part of one, and two blocks of which the last has a
# number that is no multiple of 16.
_SIZES = (1, 2048, 1040, 2083)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SCALE, _CLIP_NORM, _LR, _MOMENTUM = 64.0, 32.0, 2.0**-4, 0.875
_DECAY = {"weight_decay": 0.125}
# For a rule with several formulas: the settings that choose each.
_FORMULAS: dict[str, dict[str, dict]] = {
    "sgd": {
        "sgd": _DECAY,
        "sgd with momentum": {"momentum": _MOMENTUM},
        "nesterov": {"momentum": _MOMENTUM, "nesterov": True} | _DECAY,
    }
}
# For an FP32 result of at most eight operations, each rounded by at most 2^-24 for values below 8;
# torch's kernels fuse some of them.
_TOLERANCE = 2.0**-20


@functools.cache
def why_not_on(
    engine: Engine, device: torch.device, rule: str, rounding: str | None = None
) -> str | None:
    """Return why the kernel of `rule` cannot be used on `device`, or None. Waits for the device.

    rounding: rounding of BF16 weights without masters, see `RoundedWeights`; None: there are none.
    """
    if is_granted():
        return None
    try:
        # Imported here: only torch for CUDA on Linux includes Triton.
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    try:
        return difference(engine, device, rule) or (
            rounding and store_difference(engine, device, rule, rounding)
        )
    except Exception as error:  # a compiler or a driver may raise anything
        if "out of memory" in str(error):  # Triton's, too: says nothing about the kernel
            raise
        line = str(error).strip().partition("\n")[0]
        return f"its Triton kernel does not run here ({type(error).__name__}: {line})"


def difference(
    engine: Engine, device: torch.device, rule: str, dtypes: Sequence[torch.dtype] = _DTYPES
) -> str | None:
    """Return how the kernels of `rule` differ from torch's operations, or None if they do not.

    dtypes: those of the gradients, and of the copies of FP32 weights.
    """
    for name, settings in _FORMULAS.get(rule, {rule: _DECAY}).items():
        for policy in (PrecisionPolicy("", dtype) for dtype in dtypes):
            ours, theirs = (
                _outcome(engine, own, device, rule, settings, policy) for own in (True, False)
            )
            for (what, rtol), expected in theirs.items():
                if not torch.allclose(ours[what, rtol], expected, rtol=rtol, atol=8 * rtol):
                    return f"its Triton kernel for {name} differs from torch here in {what}"
    return None


def store_difference(engine: Engine, device: torch.device, rule: str, rounding: str) -> str | None:
    """Return how BF16 weights stored by the kernel differ from those of torch's operations.

    The random bits are the same. If the unrounded numbers differ in their last bits, a few round
    differently: fewer than one in 2^8, against one in two with other random bits.
    """
    policy = PrecisionPolicy("", torch.bfloat16, master_dtype=None, rounding=rounding)
    found = (_outcome(engine, own, device, rule, _DECAY, policy) for own in (True, False))
    ours, theirs = (one["the weights", _TOLERANCE] for one in found)
    apart = (ours - theirs).abs() > 2.0**-14 * theirs.abs()  # BF16 twice: 16 bits
    if float(apart.float().mean()) < 2.0**-8 and torch.allclose(ours, theirs, rtol=2.0**-7):
        return None
    return f"its Triton kernel for {rule} differs from torch here in the {rounding} store"


@torch.enable_grad()
def _outcome(
    engine: Engine,
    by_kernel: bool,
    device: torch.device,
    rule: str,
    settings: dict,
    policy: PrecisionPolicy,
) -> dict[tuple[str, float], Tensor]:
    """Return the results of the kernels, or of torch's operations, on generated tensors.

    Two steps use a loss scale and clipping, then three have a gradient that is not finite. The keys
    are a result's name and its tolerance.
    """
    random = torch.Generator().manual_seed(0)
    model = nn.ParameterList(torch.randn(n, generator=random) for n in _SIZES).to(device)
    scale, other = LogMaxLossScale(_SCALE, device=device), StaticLossScale(_SCALE, device=device)
    way = "fused" if by_kernel and has_fused_kernel(rule, device) else "foreach"
    made = engine(
        cast_model(model, policy),
        lambda named: RULES[rule]([own for _, own in named], _LR, **settings, **{way: True}),
        (scale, other),
    )
    own, weights = made.parameters, made.updated
    if by_kernel:
        from mprun.precision.single_pass_triton import KernelUpdate

        made.use(KernelUpdate(made.inner, own, weights, made.is_clipped, made.narrow))
    flags, norms, largests, left = (list[Tensor]() for _ in range(4))
    start = scale.state_dict()
    for special in (0.0, 0.0, math.inf, -math.inf, math.nan):
        made.zero_grad()
        scale.load_state_dict(start)
        values = [torch.randn(n, generator=random).to(device) for n in _SIZES]
        values[len(flags) % 3 - 3][-1] += special
        losses = [(weight * value).sum() for weight, value in zip(own, values, strict=True)]
        made.clip_norm = None if special else _CLIP_NORM
        made.backward(torch.stack(losses).sum(), int(special != 0))
        norm = made.step().grad_norm
        flags.append(made.found_inf.clone())
        if norm is not None:
            norms.append(norm)
            largests.append(scale.grad_max.clone())
        states = made.state_by_name().values()
        pairs = zip(weights, states, strict=True)
        wide = [weight.float() + state.get(COMPENSATION, 0.0) for weight, state in pairs]
        kept = [value for state in states for value in state.values() if value.dim()]
        left.append(torch.cat([*wide, *kept]).detach())
    copies = [copy - weight.to(copy) for copy, weight in zip(own, weights, strict=True)]
    return {
        ("the finite check", 0.0): torch.stack(flags),
        ("the gradient norm", 1e-5): torch.stack(norms),
        ("the largest gradient", 0.0): torch.stack(largests),
        ("what a skipped step leaves alone", 0.0): left[-1] - left[1],
        ("the weights", _TOLERANCE): left[-1][: sum(_SIZES)],
        ("the state", _TOLERANCE): left[-1],
        ("the copy of the weights", 0.0): torch.cat(copies).detach(),
    }
