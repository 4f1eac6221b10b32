"""What every loss scale has: scale, overflow flag and skip counters, as tensors on the device."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

# Between these bounds both the scale and its reciprocal are normal FP32 numbers, so neither can
# become 0 or inf, also where subnormals are flushed to zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def checked_scale(name: str, value: float, low: float, high: float) -> float:
    """`value` rounded to FP32. Raises ValueError unless it is a finite number in [low, high]."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: a finite number from {low:g} to {high:g} is allowed")
    return struct.unpack("f", struct.pack("f", value))[0]


def checked_fraction(name: str, value: float, low: float, high: float, *, ends: bool) -> float:
    """`value` as a float. Raises ValueError unless in [low, high] (`ends`) or in (low, high)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = number and (low <= value <= high if ends else low < value < high)
    if not inside:
        raise ValueError(
            f"{name}={value!r}: a number {'from' if ends else 'strictly between'} "
            f"{low:g} {'to' if ends else 'and'} {high:g} is allowed"
        )
    return float(value)


def checked_count(name: str, value: int, low: int) -> int:
    """`value` itself. Raises ValueError unless it is an integer in [low, 2**31 - 1]."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not low <= value < 2**31:
        raise ValueError(f"{name}={value!r}: an integer from {low} to {2**31 - 1} is allowed")
    return value


class LossScale:
    """State and bookkeeping shared by the kinds `none`, `static`, `dynamic` and `logmax`.

    All state is 0-dim tensors on one device (unless stated), changed in place only: a training step
    neither waits for the device nor moves them, so the calls can be captured in a CUDA graph.
    Each kind adds `update()`: apply the rule, count the skip if any, clear `found_inf`.
    One iteration is: `backward`, multiply gradients by `inverse()`, `record` (once per
    optimizer that shares the scale), apply or skip, `update` (once).

    Tensors: `scale` float32; `found_inf` float32, 0 or 1, cleared by `update`; `steps_skipped`
    int64, total; `consecutive_skips` int64, since the last clean step; `stuck` bool, whether the
    last update was an overflow with the scale already as low as its rule lets it go.
    """

    kind: ClassVar[str]
    skips_nonfinite: ClassVar[bool] = True
    needs_grad_max: ClassVar[bool] = False

    scale: Tensor
    found_inf: Tensor
    steps_skipped: Tensor
    consecutive_skips: Tensor
    stuck: Tensor

    def __init__(self, scale: float, max_consecutive_skips: int, device: torch.device | str):
        self.max_consecutive_skips = checked_count(
            "max_consecutive_skips", max_consecutive_skips, 1
        )
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self._fields: list[str] = []
        self._add("scale", torch.float32, scale, device)
        self._add("found_inf", torch.float32, 0.0, device)
        self._add("steps_skipped", torch.int64, 0, device)
        self._add("consecutive_skips", torch.int64, 0, device)
        self._add("stuck", torch.bool, False, device)

    def _add(
        self,
        name: str,
        dtype: torch.dtype,
        value: float,
        device: torch.device | str,
        shape: tuple[int, ...] = (),
    ) -> None:
        setattr(self, name, torch.full(shape, value, dtype=dtype, device=device))
        self._fields.append(name)

    def backward(self, loss: Tensor) -> None:
        """Propagate `loss` (0-dim, floating point) in float32, times the scale.

        Backward starts from the scale where it would start from 1: the same bits as a multiplied
        loss gives, for three operations on the device less.
        """
        loss.float().backward(self.scale)

    def inverse(self) -> Tensor:
        """1/scale, float32, 0-dim; computed in float64 and rounded once, as torch.amp does."""
        return torch.div(self._one, self.scale, out=torch.empty_like(self.scale))

    def record(self, found_inf: Tensor, grad_max: Tensor | None = None) -> None:
        """OR one optimizer's flag into `found_inf`.

        `found_inf`: one element, any dtype; non-zero or NaN means a gradient was not finite.
        `grad_max`: used by `logmax` only.
        """
        self.found_inf.logical_or_(found_inf.reshape(()))

    def collapsed(self) -> Tensor:
        """Bool, 0-dim: `max_consecutive_skips` skips in a row, and no room left to back off."""
        return self.stuck & (self.consecutive_skips >= self.max_consecutive_skips)

    def _count(self, overflow: Tensor) -> None:
        self.steps_skipped.add_(overflow)
        # (n + 1) times the flag, in one operation.
        torch.addcmul(overflow, self.consecutive_skips, overflow, out=self.consecutive_skips)
        self.found_inf.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Copies of every state tensor, on their device, and the `kind`."""
        return {"kind": self.kind} | {name: getattr(self, name).clone() for name in self._fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()` bit for bit, in place, from any device.

        Raises ValueError naming the key when a key is missing or unknown, when a tensor has
        another dtype or shape, or when the state is of another kind; nothing is changed then.
        """
        if "kind" not in state:
            raise ValueError("loss scale state: key 'kind' is missing")
        if state["kind"] != self.kind:
            raise ValueError(f"loss scale state: kind={state['kind']!r}, needed: {self.kind!r}")
        for name in self._fields:
            if name not in state:
                raise ValueError(f"loss scale state: key {name!r} is missing")
            own, saved = getattr(self, name), state[name]
            form = (own.dtype, own.shape)
            if not isinstance(saved, Tensor) or (saved.dtype, saved.shape) != form:
                raise ValueError(
                    f"loss scale state: {name!r} must be a {own.dtype} tensor of shape "
                    f"{tuple(own.shape)}"
                )
        if unknown := set(state) - {"kind", *self._fields}:
            raise ValueError(f"loss scale state: unknown key {min(unknown)!r}")
        for name in self._fields:
            getattr(self, name).copy_(state[name])

    def to(self, device: torch.device | str) -> Self:
        """Move all state to `device` (new tensors) and return self; not for use inside a step."""
        for name in (*self._fields, "_one"):
            setattr(self, name, getattr(self, name).to(device))
        return self
