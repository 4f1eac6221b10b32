"""Do the Triton kernels compute here what torch does? Asked once in a process, for each optimizer.

A compiler or a driver that is a little too old or too new must cost speed, not results.
"""

import functools

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from mprun.precision.torch_update import has_fused_kernel, initialise_state

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

    dtypes: of the gradients. Two steps with a loss scale and clipping, then some with a gradient
    that is not finite.
    """
    for name, make in _variants(rule).items():
        what = _difference_of(make, has_fused_kernel(rule, device), device, dtypes)
        if what is not None:
            return f"its Triton kernel for {name} differs from torch here in {what}"
    return None


def _variants(rule: str) -> dict:
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


def _difference_of(make, fused: bool, device: torch.device, chosen) -> str | None:
    from mprun.precision.single_pass_triton import KernelUpdate

    random = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=random).to(device) for n in _SIZES for _ in chosen]
    dtypes = list(chosen) * len(_SIZES)
    masters = [tensor.clone().requires_grad_() for tensor in start]
    expected = [tensor.clone().requires_grad_() for tensor in start]
    own = [
        master if dtype is torch.float32 else master.detach().to(dtype)
        for master, dtype in zip(masters, dtypes, strict=True)
    ]
    inner = make(masters, fused=True) if fused else make(masters, foreach=True)
    plain = make(expected, foreach=True)
    initialise_state(inner)
    initialise_state(plain)
    single = KernelUpdate(inner, own, masters, [True] * len(own))
    inverse, clip = (torch.full((), v, device=device) for v in (1 / _SCALE, _CLIP))

    for _ in range(2):
        gradients = [
            (torch.randn(tensor.shape, generator=random) * _SCALE).to(device, dtype)
            for tensor, dtype in zip(start, dtypes, strict=True)
        ]
        found_inf = torch.zeros((), device=device)
        checked = single.check(gradients, inverse, found_inf, norm=True, grad_max=True)
        single.update(gradients, inverse, clip, found_inf)
        unscaled = [gradient.float() * inverse for gradient in gradients]
        together = torch.cat(unscaled)
        for tensor, gradient in zip(expected, unscaled, strict=True):
            tensor.grad = gradient * clip
        plain.step()
        if found_inf != 0:
            return "the finite check"
        if not torch.allclose(checked.norms.norm(), together.double().norm().float(), rtol=1e-5):
            return "the gradient norm"
        if checked.grad_max != together.abs().max():
            return "the largest gradient"
    for what, ours, theirs in _pairs(masters, expected, inner, plain):
        if not torch.allclose(ours, theirs, rtol=_TOLERANCE, atol=8 * _TOLERANCE):
            return what
    for copy, master in zip(own, masters, strict=True):
        if not torch.equal(copy, master.to(copy.dtype)):
            return "the copy of the weights"
    return _moves_where_skipped(single, inner, own, masters, gradients, inverse)


def _moves_where_skipped(single, inner, own, masters, gradients, inverse) -> str | None:
    tensors = [*own, *masters]
    tensors += [v for state in inner.state.values() for v in state.values() if v.dim()]
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


def _pairs(
    masters: list[Tensor], expected: list[Tensor], inner: Optimizer, plain: Optimizer
) -> list[tuple[str, Tensor, Tensor]]:
    pairs = []
    for ours, theirs in zip(masters, expected, strict=True):
        pairs.append(("the weights", ours.detach(), theirs.detach()))
        mine, other = inner.state[ours], plain.state[theirs]
        pairs += [(key, mine[key].cpu(), other[key].cpu()) for key in mine if key != "step"]
    return pairs
