"""Serve code within a call that was written for FP32: it meets other dtypes, scaled gradients.

    h0 = torch.zeros(1, n, 16); y, _ = self.lstm(x, (h0, h0))    FP32, beside 16-bit weights
    x.register_hook(lambda gradient: gradient.clamp(-1, 1))      of gradients that are scaled inside

An operation that refuses its operands for their dtypes computes in the 16-bit one, as under
autocast, and a line names it once. (A default dtype of 16 bits, as trainers set it, would round
every constant of `forward` without a word: an epsilon of 1e-8 is 0 in FP16.) A hook is given
gradients in FP32 without the scale.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mprun.precision import DTYPE_NAMES
from mprun.prepared.nodes import Owner
from mprun.prepared.writes import tensors_in, written_by
from mprun.torch_private import tree_map

_WIDE = {torch.float32, torch.float64, torch.complex64, torch.complex128}
_WIDE |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


class MixedOperands(TorchFunctionMode):
    """A mode in which operations with operands of two dtypes, and hooks, are served.

    It costs some 2 microseconds for each call of a torch function, so it is entered where a call
    is audited, or was of use before.

    Attributes:
        places: "module: operation" of what was rounded.
        was_used: in this call or before.
    """

    def __init__(self, owner: Owner, model: nn.Module):
        super().__init__()
        self.owner, self.model = owner, model
        self.places: set[str] = set()
        self.was_used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.register_hook and self.owner.scale is not None:
            tensor, hook = args  # torch hands both on by place
            if not _is_own(hook):
                self.was_used = True
                return tensor.register_hook(self._unscaled(hook))
        try:
            return func(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            dtype = _wanted(func, args, kwargs)
            if dtype is None:
                if _is_for_16_bits(error, func, args, kwargs):
                    raise NotImplementedError(refused(self._place(func), error)) from error
                raise
            try:
                found = func(*_cast(args, dtype), **_cast(kwargs, dtype))
            except Exception:  # it was not for their dtypes
                raise error from None
        self.was_used = True
        if dtype.itemsize == 2:
            self._tell(func, DTYPE_NAMES[dtype])
        return found

    def _unscaled(self, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def call(gradient: Tensor) -> Any:
            scale = self.owner.scale
            if scale is None:
                return hook(gradient)
            changed = hook(gradient.float() * scale.inverse())
            return None if changed is None else (changed * scale.scale).to(gradient.dtype)

        return call

    def _place(self, func: Any) -> str:
        """Return "module: operation" of a call, for the module whose code calls it."""
        inside: nn.Module | None = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and inside is None:
            own = frame.f_locals.get("self")
            inside = own if isinstance(own, nn.Module) else None
            frame = frame.f_back
        names = (name for name, module in self.model.named_modules() if module is inside)
        return f"{next(names, '') or 'the model'}: {getattr(func, '__name__', func)}"

    def _tell(self, func: Any, dtype: str) -> None:
        """Name the operation and the module that calls it, once."""
        if (place := self._place(func)) not in self.places:
            self.places.add(place)
            warnings.warn(
                f"{place} meets fp32 beside {dtype} and computes in {dtype}; a tensor that forward "
                "makes is fp32: make it with x.new_zeros(...), keep it as a buffer, or let the "
                "module compute in fp32 (overrides)",
                stacklevel=3,
            )


def refused(place: str, error: Exception) -> str:
    """Return a line on an operation that torch lacks in 16 bits, such as an FFT, and the cure."""
    return (
        f"{place} is not implemented in 16 bits ({error}); give it x.float(), or let the module "
        "compute in fp32 (overrides)"
    )


def _is_for_16_bits(error: Exception, func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation has failed because its operands are in 16 bits: there is no
    kernel, or it computes in FP32."""
    dtypes = {one.dtype for one in tensors_in((args, kwargs))}
    if dtypes <= _WIDE or "override" in str(error):  # the emulation of a GPU says it itself
        return False
    if isinstance(error, NotImplementedError):
        return True
    if written_by(func, args, kwargs) is not None:
        return False
    try:
        with torch.no_grad():
            func(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))
    except Exception:  # whatever it says in FP32: 16 bits are not what it refuses
        return False
    return True


def _is_own(hook: Any) -> bool:
    """Return whether a hook is mprun's, or says that it measures what is inside."""
    defined = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    return defined.startswith("mprun.") or getattr(hook, "sees_inside", False)


def _wanted(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype in which an operation could compute: that of what it writes to, else the
    16-bit one of two; None if dtypes are not what it refuses."""
    dtypes = {one.dtype for one in tensors_in((args, kwargs)) if one.is_floating_point()}
    halves = dtypes & {torch.float16, torch.bfloat16}
    if len(halves) != 1 or dtypes != {torch.float32, *halves}:
        return None
    targets = written_by(func, args, kwargs)
    return targets[0].dtype if targets else halves.pop()


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    return tree_map(cast, tree)
