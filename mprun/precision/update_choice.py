"""Which way updates go: may it be a single pass here, does it pay, do its kernels work?

A compiler or a driver that is a little too old or too new must cost speed, not results: the Triton
kernels are compared with torch's operations once in a process, for each optimizer.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.narrow_weights import COMPENSATION, NarrowWeights, is_dense
from mprun.precision.torch_update import (
    RULES,
    has_fused_kernel,
    initialise_state,
    is_fused,
    rule_of,
)
from mprun.precision.update import ByTorch, Ready, Scaled, SinglePass, same_order

# What no published recipe of the paper's models sets, and what the single pass has no formula for.
_UNKNOWN_SETTINGS = ("maximize", "differentiable", "amsgrad", "dampening", "lr_decay")


class UpdateChoice(NamedTuple):
    """Which way was chosen.

    Attributes:
        path: "single_pass", or which of torch's: "fused", "foreach", "loop", "default".
        reason: why.
    """

    single_pass: SinglePass | None
    path: str
    reason: str


def choose_update(
    asked: str, plain: ByTorch, dtypes: Sequence[torch.dtype], *, gains: bool
) -> UpdateChoice:
    """The way that `asked` names: "plain", "single_pass", or "auto" for the better one.

    Args:
        plain: what a single pass would replace.
        dtypes: in which gradients of parameters, then of rows, are unscaled.
        gains: whether there is a cast or a scale to save passes over.

    Raises:
        ValueError: a single pass is asked for and cannot be.
    """
    inner, updated = plain.inner, plain.updated
    path, device, rule = torch_path(inner), updated[0].device, rule_of(inner)
    if asked == "plain":
        return UpdateChoice(None, path, f"optim.implementation={path}")
    if asked not in ("auto", "single_pass"):
        raise ValueError(f"update={asked!r}: must be 'plain', 'auto' or 'single_pass'")
    why = _why_not(plain, dtypes)
    if why is None and asked == "auto":
        why = _why_slower(plain, gains)
    if why is None and rule is not None and device.type == "cuda":
        why = why_not_on(device, rule, getattr(plain.narrow, "rounding", None))
    if why is not None:
        if asked == "auto":
            return UpdateChoice(None, path, why)
        raise ValueError(
            f"optim.implementation=single_pass: {why} (allowed: auto, fused, foreach, loop)"
        )
    kind: type[SinglePass]
    if device.type == "cpu":
        from mprun.precision.single_pass_cpu import BlockedUpdate

        kind, reason = BlockedUpdate, "torch's fused kernel in blocks of the cache"
    else:
        from mprun.precision.single_pass_triton import KernelUpdate

        kind, reason = KernelUpdate, f"a Triton kernel for {rule}"
    single_pass = kind(inner, plain.parameters, updated, plain.is_clipped, plain.narrow)
    return UpdateChoice(single_pass, "single_pass", reason)


def torch_path(inner: Optimizer) -> str:
    """Which of torch's implementations `inner` runs; "default": torch chooses."""
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
        return None  # its kernel unscales for nothing
    return "on a CPU FP32 gradients are as fast unscaled in place"


def _why_not(plain: ByTorch, dtypes: Sequence[torch.dtype]) -> str | None:
    rule, device = rule_of(plain.inner), plain.updated[0].device.type
    if rule is None:
        return f"{type(plain.inner).__name__}: only SGD, Adam, AdamW and Adagrad have one"
    if device not in ("cpu", "cuda"):
        return f"there is none for {device}"
    return _why_not_of_weights(plain, dtypes) or _why_not_of_settings(plain.inner, rule, device)


def _why_not_of_weights(plain: ByTorch, dtypes: Sequence[torch.dtype]) -> str | None:
    updated, narrow = plain.updated, plain.narrow
    if any(tensor.is_complex() for tensor in updated):
        return "a weight is complex"
    if narrow is not None and narrow.state_dtype is not None:
        return "the state is kept in 16 bits, for which it has no kernel"
    if any(t.dtype is not torch.float32 and not (narrow and t in narrow) for t in updated):
        return "weights are updated in 16 bits, operation by operation"
    if set(dtypes[: len(updated)]) != {torch.float32}:
        return "gradients are unscaled in 16 bits (precision.grad_dtype)"
    if not all(is_dense(tensor) for tensor in updated):
        return "a parameter has gaps between its values"
    if not all(map(same_order, plain.parameters, updated)):
        return "a parameter lies in memory in another order than its master"
    return None


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


# Values of a tensor: one, a whole block, a part of one, two blocks of which the last has a number
# that is no multiple of 16. In each of the three gradient dtypes.
_SIZES = (1, 2048, 1040, 2083)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SCALE, _CLIP, _LR, _DECAY = 64.0, 0.625, 2.0**-4, 0.125
_MOMENTUM = 0.875
# Of a rule that has several formulas: the settings that choose each.
_FORMULAS: dict[str, dict[str, dict]] = {
    "sgd": {
        "sgd": {"weight_decay": _DECAY},
        "sgd with momentum": {"momentum": _MOMENTUM},
        "nesterov": {"momentum": _MOMENTUM, "weight_decay": _DECAY, "nesterov": True},
    }
}
# Of an FP32 result of at most eight operations, each rounded by at most 2^-24 of values below 8;
# torch's own kernels fuse some of them.
_TOLERANCE = 2.0**-20


_granted = False


def take_for_granted() -> None:
    """Let the kernels count as tested in this process: for a device without any value."""
    global _granted
    _granted = True


@functools.cache
def why_not_on(device: torch.device, rule: str, rounding: str | None = None) -> str | None:
    """Why the kernel of `rule` cannot be used on `device`, None: it can. Waits for the device.

    rounding: of BF16 weights without masters, see `NarrowWeights`; None: there are none.
    """
    if _granted:
        return None
    try:
        # Here: Triton is a part of torch for CUDA on Linux, and of no other.
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    try:
        return difference(device, rule) or (rounding and store_difference(device, rule, rounding))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or a driver may raise
        line = str(error).strip().partition("\n")[0]
        return f"its Triton kernel does not run here ({type(error).__name__}: {line})"


def difference(
    device: torch.device, rule: str, dtypes: tuple[torch.dtype, ...] = _DTYPES
) -> str | None:
    """In what the kernels of `rule` differ from torch's operations on made tensors; None: nothing.

    Two steps with a loss scale and clipping, then some with a gradient that is not finite.

    Args:
        dtypes: of the gradients.
    """
    for name, settings in _FORMULAS.get(rule, {rule: {"weight_decay": _DECAY}}).items():
        what = _difference_of(rule, settings, device, dtypes)
        if what is not None:
            return f"its Triton kernel for {name} differs from torch here in {what}"
    return None


def _difference_of(
    rule: str, settings: dict, device: torch.device, chosen: tuple[torch.dtype, ...]
) -> str | None:
    """The same for one formula, of weights that all have a copy, but those of FP32."""
    from mprun.precision.single_pass_triton import KernelUpdate

    random, dtypes = torch.Generator().manual_seed(0), list(chosen) * len(_SIZES)
    start = [torch.randn(n, generator=random).to(device) for n in _SIZES for _ in chosen]
    masters, expected = ([t.clone().requires_grad_() for t in start] for _ in range(2))
    own = [
        master if dtype is torch.float32 else master.detach().to(dtype)
        for master, dtype in zip(masters, dtypes, strict=True)
    ]
    way = "fused" if has_fused_kernel(rule, device) else "foreach"
    inner = RULES[rule](masters, _LR, **settings, **{way: True})
    plain = RULES[rule](expected, _LR, **settings, foreach=True)
    initialise_state(inner)
    initialise_state(plain)
    single = KernelUpdate(inner, own, masters, [True] * len(own))
    inverse, clip = (torch.full((), factor, device=device) for factor in (1 / _SCALE, _CLIP))

    gradients: list[Tensor] = []
    for _ in range(2):
        values = [torch.randn(tensor.shape, generator=random) * _SCALE for tensor in start]
        gradients = [g.to(device, dtype) for g, dtype in zip(values, dtypes, strict=True)]
        unscaled = [gradient.float() * inverse for gradient in gradients]
        scaled = Scaled([*gradients], inverse, torch.zeros_like(inverse))
        if what := _misread(single, scaled, torch.cat(unscaled)):
            return what
        single.write(scaled, clip)
        for tensor, gradient in zip(expected, unscaled, strict=True):
            tensor.grad = gradient * clip
        plain.step()
    for ours, theirs in zip(masters, expected, strict=True):
        mine, other = inner.state[ours], plain.state[theirs]
        pairs = {"the weights": (ours.detach(), theirs.detach())}
        pairs |= {key: (mine[key].cpu(), other[key].cpu()) for key in mine if key != "step"}
        for what, (left, right) in pairs.items():
            if not torch.allclose(left, right, rtol=_TOLERANCE, atol=8 * _TOLERANCE):
                return what
    for copy, master in zip(own, masters, strict=True):
        if not torch.equal(copy, master.to(copy.dtype)):
            return "the copy of the weights"
    return _moves_where_skipped(single, gradients, inverse)


def store_difference(device: torch.device, rule: str, rounding: str) -> str | None:
    """In what BF16 weights that the kernel stores differ from those of torch's operations.

    Random bits are the same, but where the numbers that are rounded differ in their last bits a few
    are rounded apart: less than one in 2^8, against one in two with other random bits.
    """
    from mprun.precision.single_pass_triton import KernelUpdate

    random = torch.Generator().manual_seed(1)
    start = [torch.randn(n, generator=random).bfloat16().to(device) for n in _SIZES]
    found: list[Tensor] = []
    gradients = [torch.randn(n, generator=random).to(device) for n in _SIZES]
    for kind in (KernelUpdate, ByTorch):
        weights = [tensor.clone().requires_grad_() for tensor in start]
        fused = kind is KernelUpdate and has_fused_kernel(rule, device)
        way = {"fused": True} if fused else {"foreach": True}
        inner = RULES[rule](weights, _LR, weight_decay=_DECAY, **way)
        narrow = NarrowWeights(inner, list("abcd"), weights, rounding)
        narrow.initialise_state()
        update = kind(inner, weights, weights, [True] * len(weights), narrow)
        for _ in range(2):
            update.apply(Ready(Scaled([*gradients], None, None), [], None), None)
        stored = torch.cat([weight.detach().float() for weight in weights])
        if rounding == "kahan":
            stored += torch.cat([inner.state[weight][COMPENSATION].float() for weight in weights])
        found.append(stored)
    apart = (found[0] - found[1]).abs() > 2.0**-14 * found[1].abs()  # BF16 twice: 16 bits
    if float(apart.float().mean()) < 2.0**-8 and torch.allclose(found[0], found[1], rtol=2.0**-7):
        return None
    return f"its Triton kernel for {rule} differs from torch here in the {rounding} store"


def _misread(single: SinglePass, scaled: Scaled, unscaled: Tensor) -> str | None:
    """In what the check of finite gradients is wrong."""
    checked = single.read(scaled, norm=True, grad_max=True)
    if scaled.found_inf != 0:
        return "the finite check"
    assert checked.norms is not None  # asked for
    if not torch.allclose(checked.norms.norm(), unscaled.double().norm().float(), rtol=1e-5):
        return "the gradient norm"
    return None if checked.grad_max == unscaled.abs().max() else "the largest gradient"


def _moves_where_skipped(
    single: SinglePass, gradients: list[Tensor], inverse: Tensor
) -> str | None:
    """What a step with a gradient that is not finite moves."""
    states = [v for state in single.inner.state.values() for v in state.values() if v.dim()]
    tensors = [*single.parameters, *single.updated, *states]
    before = [tensor.detach().clone() for tensor in tensors]
    values = (float("inf"), float("-inf"), float("nan"))
    for value, gradient in zip(values, gradients[-3:], strict=True):
        kept = gradient[-1].clone()
        gradient[-1] = value
        scaled = Scaled([*gradients], inverse, torch.zeros_like(inverse))
        single.read(scaled, norm=False, grad_max=False)
        single.write(scaled, None)
        gradient[-1] = kept
        if scaled.found_inf != 1:
            return "the finite check"
        if not all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)):
            return "what a skipped step leaves alone"
    return None
