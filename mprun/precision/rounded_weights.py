"""BF16 weights without a master copy, updated in FP32 and stored so that no update is lost.

An update below half a unit in the last place of its weight is lost when the result is rounded to
nearest (`bf16_naive`). Here each weight is widened to FP32 during its update. The update's state
and all its arithmetic are FP32, weight decay too: rounded separately it would be lost. There is one
rounding, at the store:

    stochastic  up or down, with the probability of the distance to the other neighbour: right on
                average (Gupta et al., arXiv 1502.02551; llm.c, torchao: bf16_stochastic_round)
    kahan       to nearest; a second BF16 number keeps the rounding error, and the next update
                begins with it (Zamirai et al., arXiv 2010.06192, section 4)

Bytes of a parameter with AdamW and its gradient, which adds up in FP32: 14 and 16; with master
weights 16 and the 16-bit copy of a call. Only one chunk of weights at a time is FP32.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.packed_states import SCALE, STATE_FORMATS
from mprun.precision.philox import IN_BLOCK, bits_of, stream_of
from mprun.precision.policy import PrecisionPolicy
from mprun.precision.torch_update import (
    held_by,
    initialise_state,
    put_back_where,
    rule_of,
    skipping,
)
from mprun.precision.update import packed

COMPENSATION = "compensation"  # in the state of a weight
# Numbers that are widened at a time: 32 MiB in FP32. A larger weight is one chunk.
CHUNK = 2**23
# Numbers that are rounded at a time: their random bits take about 16 bytes each to make.
STORED = 2**21


class Piece(NamedTuple):
    """Numbers of a weight that are stored together, all in the same order in memory."""

    number: int  # of the weight
    start: int  # place of the first of them in the memory of the weight, a multiple of 8
    own: Tensor  # BF16, to be written
    wide: Tensor  # FP32, to be rounded; stochastic rounding writes to it
    kept: Tensor | None = None  # BF16, gets the rounding error


class RoundedWeights:
    """The weights of one optimizer that live in BF16 alone.

    Random bits are Philox4x32-10 of a counter: its key is the seed, its counter the number of the
    update, a hash of 64 bits of the parameter's name, and the number's place in memory. So no two
    numbers share bits, in no two updates, parameters or seeds. The bits are the same on every
    device and for any split into blocks, and they leave other random draws alone. A skipped step
    does not count as an update.

    Args:
        inner: the optimizer that updates the weights, among others.
        names, weights: those weights of `inner`, in BF16, and their names.
        rounding: "stochastic" or "kahan"; "nearest" if only the state is narrow.
        state_dtype: format in which state of `inner` with the shape of its weight is kept between
            updates, one of `STATE_FORMATS`; None: FP32.
        seed: seed of the run and of this optimizer in it; its lowest 64 bits count.

    Attributes:
        updates: number of applied updates, int64, 0-dim.
        streams: int64 [1 + weights], the bits of the seed and of each name's hash.
    """

    def __init__(
        self,
        inner: Optimizer,
        names: Sequence[str],
        weights: Sequence[Tensor],
        rounding: str,
        state_dtype: str | None = None,
        seed: int = 0,
    ):
        self.inner, self.weights, self.rounding = inner, list(weights), rounding
        for name, weight in zip(names, self.weights, strict=True):
            if not is_dense(weight):
                raise ValueError(f"{name}: has gaps between its values; make it contiguous")
        device = self.weights[0].device
        self.state_dtype, self.packing = state_dtype, STATE_FORMATS[state_dtype](device)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        bits = [0, *map(stream_of, names)]
        self.streams = torch.tensor(bits, dtype=torch.int64, device=device)
        self._set_seed(seed)
        self._number = {id(weight): number for number, weight in enumerate(self.weights)}

    def initialise_state(self) -> None:
        """Create the state of `inner`, before its first step, and the compensation."""
        initialise_state(self.inner)
        for weight in self.weights:
            made = self.inner.state[weight]
            if any(key.endswith(SCALE) for key in made):  # in blocks, of which again others come
                continue
            before = {key: value for key, value in made.items() if key == COMPENSATION}
            if not before and self.rounding == "kahan" and weight.dtype is not torch.float32:
                before[COMPENSATION] = torch.zeros_like(weight)
            self.inner.state[weight] = self._kept_state(weight, before, self.widened(weight))

    def __contains__(self, weight: Tensor) -> bool:
        return id(weight) in self._number

    def _set_seed(self, seed: int) -> None:
        self._seed = seed % 2**64
        self.streams[0] = (self._seed ^ 2**63) - 2**63  # as a signed number

    def chunks(self, updated: Sequence[Tensor]) -> list[list[int]]:
        """Return places in `updated`, one list for each group that is updated together.

        Each of torch's rules updates each weight separately. Another optimizer may read several, so
        there all weights are one chunk.
        """
        if rule_of(self.inner) is None:
            return [list(range(len(updated)))]
        return packed((own.numel() if own in self else 0 for own in updated), CHUNK)

    @contextmanager
    def in_fp32(
        self, updated: Sequence[Tensor], found_inf: Tensor | None
    ) -> Iterator[list[Tensor]]:
        """Let `inner` hold these weights alone, and their state, in FP32 within it; then store them
        unless `found_inf` is not 0.

        Yields them, at 4 bytes a number meanwhile.
        """
        inner, held = self.inner, {id(tensor) for tensor in updated}
        chosen = [weight for weight in updated if weight in self]
        states = [inner.state.pop(weight, {}) for weight in chosen]
        wide: dict[int, Tensor] = {}
        for weight, state in zip(chosen, states, strict=True):
            own = weight.detach().float()
            if COMPENSATION in state:
                own.add_(state[COMPENSATION])
            wide[id(weight)] = own
            inner.state[own] = self._widened(state, weight)
        groups = [group["params"] for group in inner.param_groups]
        for group, params in zip(inner.param_groups, groups, strict=True):
            group["params"] = [wide.get(id(p), p) for p in params if id(p) in held]
        try:
            yield [wide.get(id(tensor), tensor) for tensor in updated]
        finally:
            for group, params in zip(inner.param_groups, groups, strict=True):
                group["params"] = params
            for weight, state in zip(chosen, states, strict=True):
                found = inner.state.pop(own := wide[id(weight)], {})
                if own.grad is not None or not state:  # else its state stays as it was
                    state = self._kept_state(weight, state, found, found_inf)
                inner.state[weight] = state
            self._store_all(chosen, wide, found_inf)

    def _kept_state(
        self, weight: Tensor, before: dict, found: dict, found_inf: Tensor | None = None
    ) -> dict[Any, Any]:
        """Return `found` as it is kept, in the tensors of `before`, which a captured graph knows.

        They keep their values if `found_inf` is not 0.
        """
        kept = {COMPENSATION: before[COMPENSATION]} if COMPENSATION in before else {}
        for name, value in found.items():
            if not _is_like(value, weight, name):
                kept[name] = value
                continue
            for key, new in self.packing.encode(name, value).items():
                own = kept[key] = before.get(key, new)
                if own is not new:
                    own.copy_(new if found_inf is None else torch.where(found_inf != 0, own, new))
        return kept

    def widened(self, weight: Tensor) -> dict[str, Any]:
        """Return the optimizer's state of a weight in FP32, without the entries that it does not
        have itself."""
        return self._widened(self.inner.state.get(weight, {}), weight)

    def _widened(self, state: Mapping[str, Any], weight: Tensor) -> dict[str, Any]:
        found = {}
        for key, value in state.items():
            if key == COMPENSATION or key.endswith(SCALE):
                continue  # torch initialises a state only if it is empty
            if key + SCALE in state or _is_like(value, weight, key):
                value = self.packing.decode(key, state)
                if value.stride() != weight.stride():
                    value = torch.empty_like(weight, dtype=value.dtype).copy_(value)
            found[key] = value
        return found

    def _store_all(
        self, chosen: Sequence[Tensor], wide: Mapping[int, Tensor], found_inf: Tensor | None
    ) -> None:
        pieces: list[Piece] = []
        most = min(CHUNK, STORED)
        for weight in chosen:
            if weight.dtype is torch.float32:  # only its state is narrow
                continue
            kept = self.inner.state[weight].get(COMPENSATION)
            tensors = [weight.detach(), wide[id(weight)], *([] if kept is None else [kept])]
            flat = [tensor.as_strided((tensor.numel(),), (1,)).split(most) for tensor in tensors]
            for part, split in enumerate(zip(*flat, strict=True)):
                pieces.append(Piece(self._number[id(weight)], part * most, *split))
        # Rounding needs a multiple of the memory that it rounds.
        for places in packed([piece.own.numel() for piece in pieces], most):
            group = [pieces[place] for place in places]
            written = [t for piece in group for t in (piece.own, piece.kept) if t is not None]
            with put_back_where(found_inf, written):
                self.store(group)

    @torch.no_grad()
    def step(self, found_inf: Tensor | None) -> None:
        """Let `inner` take a step by the gradients of its weights, unless `found_inf` is not 0."""
        everything = held_by(self.inner)
        gradients = [own.grad for own in everything]
        for places in self.chunks(everything):
            with self.in_fp32([everything[n] for n in places], found_inf) as wide:
                for place, own in zip(places, wide, strict=True):
                    if (gradient := gradients[place]) is not own.grad:
                        own.grad = None if gradient is None else gradient.to(own.dtype)
                with nullcontext() if found_inf is None else skipping(self.inner, found_inf):
                    self.inner.step()
        self.count(found_inf)

    def count(self, found_inf: Tensor | None = None) -> None:
        """Count an update, unless `found_inf` is not 0."""
        self.updates.add_(1 if found_inf is None else (found_inf == 0).long())

    def store(self, pieces: Sequence[Piece]) -> None:
        """Round `wide` into `own`, and the error into `kept` if there is one."""
        if self.rounding == "stochastic" and pieces:
            for piece, bits in zip(pieces, self.random_bits(pieces), strict=True):
                round_stochastically(piece.own, piece.wide, bits)
            return
        for _, _, own, wide, kept in pieces:
            own.copy_(wide)
            if kept is not None:
                kept.copy_(wide - own)

    def random_bits(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Return this update's random bits of each piece: int32 [numel], 0 to 65535.

        All pieces at once: the hundred operations then cost their time, not their calls.
        """
        places, names = [], []
        for piece in pieces:
            start = piece.start // IN_BLOCK
            count = -(-piece.own.numel() // IN_BLOCK)
            places.append(torch.arange(start, start + count, device=self.streams.device))
            names.append(self.streams[1 + piece.number].expand(count))
        name = torch.cat(names)
        bits = bits_of([torch.cat(places), self.updates, name, name >> 32], self._seed)
        parts = bits.split([len(own) * IN_BLOCK for own in places])
        return [part[: piece.own.numel()] for part, piece in zip(parts, pieces, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"updates": self.updates, "state_dtype": self.state_dtype}
        return state | {"seed": self._seed} if self.rounding == "stochastic" else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates.copy_(state["updates"])
        self._set_seed(state.get("seed", self._seed))


def choose_narrow(
    inner: Optimizer, named: Mapping[str, Tensor], policy: PrecisionPolicy, seed: int = 0
) -> RoundedWeights | None:
    """Choose those of `named` that are BF16 but updated in FP32, or have a narrow state."""
    rounding = policy.rounding if policy.masters == "transient" else "nearest"
    state_dtype = policy.state_dtype
    if rounding == "nearest" and state_dtype is None:
        return None
    real = {name: own for name, own in named.items() if not own.is_complex()}
    chosen = {n: own for n, own in real.items() if state_dtype or own.dtype is torch.bfloat16}
    if not chosen:
        return None
    return RoundedWeights(inner, [*chosen], [*chosen.values()], rounding, state_dtype, seed)


def translated(
    saved: Mapping[str, Any], of: str | None, to: str | None, weight: Tensor
) -> Mapping[str, Any]:
    """Return state of a weight as another of `STATE_FORMATS` keeps it; of the same, unchanged."""
    if of == to:
        return saved
    before, after = (STATE_FORMATS[name](weight.device) for name in (of, to))
    found: dict[str, Any] = {}
    for key, value in saved.items():
        if key + SCALE in saved or _is_like(value, weight, key):
            kept = {k: saved[k].to(weight.device) for k in (key, key + SCALE) if k in saved}
            found |= after.encode(key, before.decode(key, kept))
        elif not key.endswith(SCALE):
            found[key] = value
    return found


def _is_like(value: Any, weight: Tensor, key: str) -> bool:
    """Return whether it is state of the optimizer with one number for each of the weight."""
    is_own = isinstance(value, Tensor) and value.is_floating_point()
    is_own = is_own and key not in (COMPENSATION, "step")
    return is_own and value.shape == weight.shape


def round_stochastically(own: Tensor, wide: Tensor, bits: Tensor) -> None:
    """Round FP32 to BF16, up with the probability (wide - below) / (above - below).

    16 random bits are added below the kept ones, then the bits below are cut off. The share of
    the 65,536 equally likely sums that carry is the number's distance from the lower neighbour.
    Numbers that BF16 holds stay, so do infinity and NaN. `own` (BF16, dense) is written to; `wide`
    has its shape and order in memory. bits: int32 [numel], see `RoundedWeights.random_bits`.
    """
    numel = wide.numel()
    flat = wide.as_strided((numel,), (1,))
    # A NaN in which only the lowest bits are set would become a number.
    wide = flat.nan_to_num(nan=float("nan"), posinf=float("inf"), neginf=float("-inf"))
    sums = wide.view(torch.int32).add_(bits)
    # The upper half of each number; bytes of an int32 are in little-endian order everywhere here.
    own.as_strided((numel,), (1,)).view(torch.int16).copy_(sums.view(torch.int16)[1::2])


def is_dense(tensor: Tensor) -> bool:
    """Return whether the values fill their part of memory, in any order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
