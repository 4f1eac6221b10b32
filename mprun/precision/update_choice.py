"""Which way updates go: may it be a single pass here, does it pay, do its kernels work?

A compiler or a driver that is a little too old or too new must cost speed, not results: the Triton
kernels are compared with torch's operations once in a process, for each optimizer.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from mprun.precision.torch_update import has_fused_kernel, initialise_state, is_fused, rule_of
from mprun.precision.update import Gradients, SinglePass

# What no published recipe of the paper's models sets, and what the single pass has no formula for.
_UNKNOWN_SETTINGS = ("maximize", "differentiable", "amsgrad", "dampening", "lr_decay")


@dataclass(frozen=True, slots=True)
class UpdateChoice:
    """Which way was chosen.

    Attributes:
        path: "single_pass", or which of torch's: "fused", "foreach", "loop", "default".
        reason: why.
    """

    single_pass: SinglePass | None
    path: str
    reason: str


def choose_update(
    asked: str,
    inner: Optimizer,
    gradients: Gradients,
    updated: Sequence[Tensor],
    *,
    gains: bool,
) -> UpdateChoice:
    """The way that `asked` names: "plain", "single_pass", or "auto" for the better one.

    Args:
        updated: what `inner` updates for each parameter of `gradients`, its master or itself.
        gains: whether there is a cast or a scale to save passes over.

    Raises:
        ValueError: a single pass is asked for and cannot be.
    """
    path = torch_path(inner)
    if asked == "plain":
        return UpdateChoice(None, path, f"optim.implementation={path}")
    if asked not in ("auto", "single_pass"):
        raise ValueError(f"update={asked!r}: must be 'plain', 'auto' or 'single_pass'")
    device, rule = updated[0].device, rule_of(inner)
    parameters, is_clipped = gradients.parameters, gradients.is_clipped[: len(updated)]
    why = _why_not(inner, updated, set(gradients.dtypes[: len(updated)]))
    if why is None and asked == "auto":
        why = _why_slower(inner, parameters, updated, gains)
    if why is None and device.type == "cuda":
        why = why_not_on(device, rule)
    if why is not None:
        if asked == "auto":
            return UpdateChoice(None, path, why)
        raise ValueError(
            f"optim.implementation=single_pass: {why} (allowed: auto, fused, foreach, loop)"
        )
    if device.type == "cpu":
        from mprun.precision.single_pass_cpu import BlockedUpdate

        blocked = BlockedUpdate(inner, parameters, updated, is_clipped)
        return UpdateChoice(blocked, "single_pass", "torch's fused kernel in blocks of the cache")
    from mprun.precision.single_pass_triton import KernelUpdate

    kernels = KernelUpdate(inner, parameters, updated, is_clipped)
    return UpdateChoice(kernels, "single_pass", f"a Triton kernel for {rule}")


def torch_path(inner: Optimizer) -> str:
    """Which of torch's implementations `inner` runs; "default": torch chooses."""
    if is_fused(inner):
        return "fused"
    chosen = [group.get("foreach") for group in inner.param_groups]
    if all(chosen):
        return "foreach"
    return "default" if None in chosen else "loop"


def _why_slower(
    inner: Optimizer, parameters: Sequence[Tensor], updated: Sequence[Tensor], gains: bool
) -> str | None:
    if not gains:
        return "no cast and no loss scale: torch's own update is one pass over the weights"
    if updated[0].device.type != "cpu":
        return None
    # Measured (benchmarks/update_speed.py --mode amp): one core writes as fast as it reads.
    if any(own is not tensor for own, tensor in zip(parameters, updated, strict=True)):
        return None
    if rule_of(inner) == "sgd" and not any(group["nesterov"] for group in inner.param_groups):
        return None  # its kernel unscales for nothing
    return "on a CPU FP32 gradients are as fast unscaled in place"


def _why_not(
    inner: Optimizer, updated: Sequence[Tensor], grad_dtypes: set[torch.dtype]
) -> str | None:
    rule, device = rule_of(inner), updated[0].device
    if rule is None:
        return f"{type(inner).__name__}: only SGD, Adam, AdamW and Adagrad have one"
    if device.type not in ("cpu", "cuda"):
        return f"there is none for {device.type}"
    if any(tensor.dtype is not torch.float32 for tensor in updated):
        return "weights are updated in 16 bits, operation by operation"
    if grad_dtypes != {torch.float32}:
        return "gradients are unscaled in 16 bits (precision.grad_dtype)"
    if not all(_is_dense(tensor) for tensor in updated):
        return "a parameter has gaps between its values"
    why = _why_no_formula(inner, rule, device)
    if why is None and device.type == "cpu" and not is_fused(inner):
        why = f"torch's {rule} has no fused kernel in use here, which is what a CPU runs in blocks"
    return why


def _why_no_formula(inner: Optimizer, rule: str, device: torch.device) -> str | None:
    for group in inner.param_groups:
        for setting in _UNKNOWN_SETTINGS:
            if group.get(setting):
                return f"{setting}={group[setting]}: it has no formula for this setting"
        on_host = rule.startswith("adam") and not (group["fused"] or group["capturable"])
        if device.type == "cuda" and on_host:
            return f"{rule} keeps its step counter on the host unless fused or capturable"
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values fill their part of memory, in whatever order of dimensions."""
    expected = 1
    sizes = [(s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    for stride, size in sorted(sizes):
        if stride != expected:
            return False
        expected *= size
    return True


# Values of a tensor: one, a whole block, a part of one, two blocks of which the last has a number
# that is no multiple of 16. In each of the three gradient dtypes.
_SIZES = (1, 2048, 1040, 2083)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SCALE, _CLIP, _LR = 64.0, 0.625, 2.0**-4
# Of an FP32 result of at most eight operations, each rounded by at most 2^-24 of values below 8;
# torch's own kernels fuse some of them.
_TOLERANCE = 2.0**-20


_granted = False


def take_for_granted() -> None:
    """Let the kernels count as tested in this process: for a device without any value."""
    global _granted
    _granted = True


@functools.cache
def why_not_on(device: torch.device, rule: str) -> str | None:
    """Why the kernel of `rule` cannot be used on `device`, None: it can. Waits for the device."""
    if _granted:
        return None
    try:
        # Here: Triton is a part of torch for CUDA on Linux, and of no other.
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    try:
        return difference(device, rule)
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
    for name, make in _variants(rule).items():
        what = _difference_of(make, has_fused_kernel(rule, device), device, dtypes)
        if what is not None:
            return f"its Triton kernel for {name} differs from torch here in {what}"
    return None


def _variants(rule: str) -> dict[str, Callable[..., Optimizer]]:
    match rule:
        case "sgd":
            return {
                "sgd": lambda t, **kw: SGD(t, _LR, weight_decay=0.125, **kw),
                "sgd with momentum": lambda t, **kw: SGD(t, _LR, 0.875, **kw),
                "nesterov": lambda t, **kw: SGD(
                    t, _LR, 0.875, weight_decay=0.125, nesterov=True, **kw
                ),
            }
        case "adam":
            return {"adam": lambda t, **kw: Adam(t, _LR, weight_decay=0.125, **kw)}
        case "adamw":
            return {"adamw": lambda t, **kw: AdamW(t, _LR, weight_decay=0.125, **kw)}
        case _:
            return {"adagrad": lambda t, **kw: Adagrad(t, _LR, weight_decay=0.125, **kw)}


def _difference_of(
    make: Callable[..., Optimizer],
    fused: bool,
    device: torch.device,
    chosen: tuple[torch.dtype, ...],
) -> str | None:
    """The same for one optimizer of weights that all have a copy, but those of FP32."""
    from mprun.precision.single_pass_triton import KernelUpdate

    random, dtypes = torch.Generator().manual_seed(0), list(chosen) * len(_SIZES)
    start = [torch.randn(n, generator=random).to(device) for n in _SIZES for _ in chosen]
    masters, expected = ([t.clone().requires_grad_() for t in start] for _ in range(2))
    own = [_copy(master, dtype) for master, dtype in zip(masters, dtypes, strict=True)]
    inner = make(masters, fused=True) if fused else make(masters, foreach=True)
    plain = make(expected, foreach=True)
    initialise_state(inner)
    initialise_state(plain)
    single = KernelUpdate(inner, own, masters, [True] * len(own))
    inverse = torch.full((), 1 / _SCALE, device=device)
    clip = torch.full((), _CLIP, device=device)

    gradients: list[Tensor] = []
    for _ in range(2):
        gradients = _gradients(start, dtypes, random)
        unscaled = [gradient.float() * inverse for gradient in gradients]
        what = _misread(single, gradients, unscaled, inverse)
        if what is not None:
            return what
        single.update(gradients, inverse, clip, torch.zeros((), device=device))
        for tensor, gradient in zip(expected, unscaled, strict=True):
            tensor.grad = gradient * clip
        plain.step()
    what = _moved_otherwise(own, masters, expected, inner, plain)
    return what or _moves_where_skipped(single, [*own, *masters], inner, gradients, inverse)


def _gradients(
    weights: list[Tensor], dtypes: list[torch.dtype], random: torch.Generator
) -> list[Tensor]:
    """Scaled ones."""
    values = [torch.randn(w.shape, generator=random) * _SCALE for w in weights]
    return [g.to(w.device, d) for g, w, d in zip(values, weights, dtypes, strict=True)]


def _copy(master: Tensor, dtype: torch.dtype) -> Tensor:
    return master if dtype is torch.float32 else master.detach().to(dtype)


def _misread(
    single: SinglePass, gradients: list[Tensor], unscaled: list[Tensor], inverse: Tensor
) -> str | None:
    """In what the check of finite gradients is wrong."""
    found_inf, together = torch.zeros_like(inverse), torch.cat(unscaled)
    checked = single.check(gradients, inverse, found_inf, norm=True, grad_max=True)
    if found_inf != 0:
        return "the finite check"
    assert checked.norms is not None  # asked for
    if not torch.allclose(checked.norms.norm(), together.double().norm().float(), rtol=1e-5):
        return "the gradient norm"
    return None if checked.grad_max == together.abs().max() else "the largest gradient"


def _moves_where_skipped(
    single: SinglePass,
    weights: list[Tensor],
    inner: Optimizer,
    gradients: list[Tensor],
    inverse: Tensor,
) -> str | None:
    """What a step with a gradient that is not finite moves."""
    states = [v for state in inner.state.values() for v in state.values() if v.dim()]
    tensors = [*weights, *states]
    before = [tensor.detach().clone() for tensor in tensors]
    values = (float("inf"), float("-inf"), float("nan"))
    for value, gradient in zip(values, gradients[-3:], strict=True):
        kept = gradient[-1].clone()
        gradient[-1] = value
        found_inf = torch.zeros((), device=gradient.device)
        single.check(gradients, inverse, found_inf, norm=False, grad_max=False)
        single.update(gradients, inverse, None, found_inf)
        gradient[-1] = kept
        if found_inf != 1:
            return "the finite check"
        if not all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)):
            return "what a skipped step leaves alone"
    return None


def _moved_otherwise(
    own: list[Tensor],
    masters: list[Tensor],
    expected: list[Tensor],
    inner: Optimizer,
    plain: Optimizer,
) -> str | None:
    """What the update left other than torch's operations leave it."""
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
    return None
