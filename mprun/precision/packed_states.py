"""Optimizer state in fewer bits between updates: how a tensor of it is encoded and decoded.

    bf16      rounded to nearest, or stochastically (`rounded_weights`)
    fp16      rounded to nearest
    dynamic8  the nearest of 256 numbers, times the largest magnitude of a block (Dettmers et al.,
              arXiv 2110.02861); averages of squares have numbers without a sign
    fp8       E4M3, times that magnitude / 448

A block is 256 neighbours of the flattened tensor, whatever their order in memory. A tensor of fewer
than 4,096 numbers, or of no multiple of 256, stays in FP32. All of it has the bits of
torchao.optim. Codes (uint8) have name and shape of their tensor; the FP32 scales of its blocks,
0.016 bytes a number, are beside it as NAME.scale.

A block that is decoded and encoded again may change: where its largest magnitude is of a negative
number, dynamic8 has no -1. So what an update leaves alone is not encoded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK, SMALLEST = 256, 4096
SCALE = ".scale"  # ends the name of the scales of a state
_SMALLEST_AMAX = 1e-12
# Sums and averages of squares, by torch's names.
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
_ALSO_UNSIGNED = ("acc_delta", "exp_inf")  # of Adadelta and Adamax; once kept with a sign
_UNSIGNED = (*SQUARES, *_ALSO_UNSIGNED)
Numbers = npt.NDArray[np.float32]


class Rounded:
    """State that is kept in another floating-point dtype."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def encode(self, name: str, wide: Tensor) -> dict[str, Tensor]:
        """Return what is kept of FP32 state `name`, by its key; it may be `wide` itself."""
        return {name: wide.to(self.dtype)}

    def decode(self, name: str, kept: Mapping[str, Any]) -> Tensor:
        """Return state `name` in FP32; what is kept in FP32 is that tensor itself."""
        return kept[name].float()


class InBlocks(ABC):
    """State that is kept as a code for each number and a scale for each block."""

    top: float  # largest magnitude of a code's number

    def encode(self, name: str, wide: Tensor) -> dict[str, Tensor]:
        if not fits(wide.numel()):
            return {name: wide}
        blocks = wide.reshape(-1, BLOCK)
        scale = blocks.abs().amax(1).clamp_(min=_SMALLEST_AMAX)
        scale = scale / torch.full_like(scale, self.top)  # by a number CUDA multiplies
        codes = self._codes(blocks / scale[:, None], name not in _UNSIGNED)
        return {name: codes.view(wide.shape), name + SCALE: scale}

    def decode(self, name: str, kept: Mapping[str, Any]) -> Tensor:
        scale, codes = kept.get(name + SCALE), kept[name]
        if scale is None:
            return codes.float()
        numbers = self._numbers(codes.reshape(-1), name not in _UNSIGNED)
        return (numbers.view(-1, BLOCK) * scale[:, None]).view(codes.shape)

    @abstractmethod
    def _codes(self, scaled: Tensor, signed: bool) -> Tensor: ...

    @abstractmethod
    def _numbers(self, codes: Tensor, signed: bool) -> Tensor: ...


class Dynamic8(InBlocks):
    top = 1.0

    def __init__(self, device: torch.device):
        self._tables = {}  # in a captured graph nothing comes from the host
        for signed in (True, False):
            numbers = dynamic_numbers(signed)
            tables = (numbers, *_by_upper_half(bounds(numbers)))
            self._tables[signed] = [torch.tensor(own.tolist(), device=device) for own in tables]

    def _codes(self, scaled: Tensor, signed: bool) -> Tensor:
        # A quarter of the time of torch.bucketize.
        _, first, bound = self._tables[signed]
        upper = (scaled.flatten().view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        reached = scaled.flatten() >= bound.index_select(0, upper)
        return first.index_select(0, upper).add_(reached).byte()

    def _numbers(self, codes: Tensor, signed: bool) -> Tensor:
        return self._tables[signed][0].index_select(0, codes.int())


class Fp8(InBlocks):
    top = 448.0

    def _codes(self, scaled: Tensor, signed: bool) -> Tensor:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def _numbers(self, codes: Tensor, signed: bool) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float()


Packing = Rounded | InBlocks
IN_BLOCKS = ("dynamic8", "fp8")
STATE_FORMATS: dict[str | None, Callable[[torch.device], Packing]] = {
    None: lambda device: Rounded(torch.float32),
    "fp32": lambda device: Rounded(torch.float32),
    "bf16": lambda device: Rounded(torch.bfloat16),
    "fp16": lambda device: Rounded(torch.float16),
    "dynamic8": Dynamic8,
    "fp8": lambda device: Fp8(),
}


class StateFormats(NamedTuple):
    """The formats of an optimizer's state between updates, each one of `STATE_FORMATS`.

    square_dtype: of averages and sums of squares; None: as the others. state_rounding: how BF16
        state is stored, "nearest" or "stochastic".
    """

    state_dtype: str | None = None
    square_dtype: str | None = None
    state_rounding: str = "nearest"

    def of(self, name: str) -> str | None:
        """Return the format of state `name`."""
        return (self.square_dtype if name in SQUARES else None) or self.state_dtype

    def is_random(self, name: str) -> bool:
        return self.state_rounding == "stochastic" and self.of(name) == "bf16"

    @property
    def are_narrow(self) -> bool:
        """Return whether state has a format of its own, so that the update is in FP32."""
        return self.state_dtype is not None or self.square_dtype is not None

    @property
    def in_blocks(self) -> bool:
        return not {self.state_dtype, self.square_dtype}.isdisjoint(IN_BLOCKS)

    @property
    def in_words(self) -> str:
        """Return the formats for a person: "fp8", "bf16 (squares fp32)"."""
        squares = f" (squares {self.square_dtype})" if self.square_dtype else ""
        return f"{self.state_dtype or 'fp32'}{squares}"

    @classmethod
    def saved(cls, state: Mapping[str, Any]) -> Self:
        """Return those of a saved `RoundedWeights`."""
        return cls(**{name: state[name] for name in cls._fields if name in state})


def refuse_signed(saved: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise ValueError if codes have a sign that these states no longer have.

    saved: of `RoundedWeights`. keys: those of the saved state of a weight.
    """
    known, formats = {*keys}, StateFormats.saved(saved)
    for name in _ALSO_UNSIGNED:
        signed = name + SCALE in known and name not in saved.get("unsigned", ())
        if signed and formats.of(name) == "dynamic8":
            raise ValueError(
                f"optimizer state {name} in dynamic8 must be stored without a sign bit; an earlier "
                "version of mprun saved it with one; begin a new run"
            )


def unsigned_in(keys: Iterable[str]) -> list[str]:
    """Return the states whose codes were once kept with a sign, as `refuse_signed` reads it."""
    return [name for name in _ALSO_UNSIGNED if name + SCALE in {*keys}]


# Decay of a state, in an optimizer's settings: the key, and the place in a list.
DECAYS = {
    "exp_avg": ("betas", 0),
    "exp_avg_sq": ("betas", 1),
    "square_avg": ("alpha", None),
    "momentum_buffer": ("momentum", None),
}


@cache
def least_decay(form: str, is_square: bool) -> float:
    """Return the smallest part of a number whose loss is not rounded away, to nearest; 0: any is.

    It is half of the smallest relative distance to the number below. In floating point that is
    below a power of two. In blocks it is for numbers below the largest of theirs, while that stays.
    """
    if form == "dynamic8":
        known = dynamic_numbers(not is_square).astype(np.float64)
        known = known[(known > 0) & (known < 1)]
        return float(((known[1:] - known[:-1]) / known[1:]).min() / 2)
    mantissa = {"bf16": 7, "fp16": 10, "fp8": 3}.get(form)
    return 0.0 if mantissa is None else 2.0 ** -(mantissa + 2)


def fits(size: int) -> bool:
    """Return whether a tensor of so many numbers has blocks."""
    return size >= SMALLEST and size % BLOCK == 0


@cache
def dynamic_numbers(signed: bool) -> Numbers:
    """Return the 256 numbers of dynamic8, rising.

    They are 0, 1 and, of each decade i from 10^-6 to 1, the middles of 2^i equal parts of
    [0.1, 1] (with both signs) or of twice as many. Each step is rounded as torchao's are.
    """
    found = [0.0, 1.0]
    for i in range(7):
        parts = 2**i if signed else 2 ** (i + 1)
        # torch.linspace, which counts from the nearer end and rounds once.
        low, high = np.float32(0.1), np.float32(1)
        step, places = float((high - low) / np.float32(parts)), np.arange(parts + 1)
        from_low, from_high = float(low) + step * places, 1 - step * (parts - places)
        edges = np.where(places < (parts + 1) // 2, from_low, from_high).astype(np.float32)
        middles = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (i - 6))
        found += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(found, dtype=np.float32))


def bounds(numbers: Numbers) -> Numbers:
    """Return the smallest FP32 number nearer to each of `numbers` than to the one before it, or as
    near, by differences that are rounded to FP32 too: [len - 1]."""
    low, high = numbers[:-1], numbers[1:]
    half = (high - low) * np.float32(0.5)
    tried = low + half
    for _ in range(4):  # begin below all that may be it
        tried = np.nextafter(tried, np.float32(-np.inf))
    while (below := tried - low < half).any():
        tried = np.where(below, np.nextafter(tried, np.float32(np.inf)), tried)
    return tried


def _by_upper_half(bounds: Numbers) -> tuple[npt.NDArray[np.int32], Numbers]:
    """Return, for each upper half of an FP32 number's bits, how many `bounds` all such numbers have
    reached, and the one that some reach; there is one at most, or none: infinity."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    ends = np.stack([upper, upper | 0xFFFF]).view(np.float32)
    ends = np.where(np.isnan(ends), ends[0], ends)  # those after infinity
    reached = np.searchsorted(bounds, ends, side="right")
    first, last = reached.min(0), reached.max(0)
    assert (last - first).max() <= 1
    within = np.append(bounds, np.float32(np.inf))[first]
    return first.astype(np.int32), np.where(last > first, within, np.float32(np.inf))
