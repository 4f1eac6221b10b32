"""BF16 weights without a master copy, updated in FP32 and stored so that nothing is lost.

An update below half a unit in the last place of its weight is lost when the result is rounded to
nearest (`bf16_naive`). Here each weight is widened to FP32 for the length of its update, all
arithmetic of the update (weight decay too: rounded apart it would be lost) and its state are in
FP32, and there is one rounding, at the store:

    stochastic  up or down, with the probability of the distance to the other neighbour: right on
                average (Gupta et al., arXiv 1502.02551; llm.c, torchao: bf16_stochastic_round)
    kahan       to nearest, and what the rounding took away is kept in a second BF16 number that the
                next update begins with (Zamirai et al., arXiv 2010.06192, section 4)

Bytes of a parameter with AdamW and its gradient in BF16: 12 and 14; with master weights 16. Where
torch's operations update them and no single pass, gradients are collected in FP32 first, 4 more,
and the weights in FP32 are those of a chunk at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.policy import PrecisionPolicy
from mprun.precision.torch_update import initialise_state, put_back_where, rule_of

COMPENSATION = "compensation"  # in the state of a weight
# Numbers that are widened at a time, and rounded: 32 MiB in FP32. A weight beyond that is a chunk.
CHUNK = 2**23
_32_BITS = 0xFFFFFFFF


class NarrowWeights:
    """The weights of one optimizer that live in BF16 alone.

    Random bits are a hash of seed, number of the update, name of the parameter and place of the
    number in memory: the same on every device, in whatever blocks an update comes, and nothing else
    that draws random numbers notices. A step that is skipped is no update.

    Args:
        inner: updates the weights, among others.
        names, weights: BF16, of `inner`.
        rounding: "stochastic" or "kahan"; "nearest" where only the state is narrow.
        state_dtype: in which the state of `inner` is kept between updates, of the shape of its
            weight; None: FP32.
        seed: of the run.

    Attributes:
        updates: applied so far, int64, 0-dim.
    """

    def __init__(
        self,
        inner: Optimizer,
        names: Sequence[str],
        weights: Sequence[Tensor],
        rounding: str,
        state_dtype: torch.dtype | None = None,
        seed: int = 0,
    ):
        self.inner, self.weights, self.rounding = inner, list(weights), rounding
        self.state_dtype = state_dtype
        for name, weight in zip(names, self.weights, strict=True):
            if not is_dense(weight):
                raise ValueError(f"{name}: has gaps between its values; make it contiguous")
        device = self.weights[0].device
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        # Any numbers do that differ from name to name.
        of_names = [zlib.crc32(name.encode()) ^ (seed * 0x9E3779B1 & _32_BITS) for name in names]
        self._names = torch.tensor(of_names, dtype=torch.int64, device=device)
        self._number = {id(weight): number for number, weight in enumerate(self.weights)}

    def initialise_state(self) -> None:
        """Make the state of `inner`, before its first step, and the compensation."""
        initialise_state(self.inner)
        for weight in self.weights:
            made = self.inner.state[weight]
            before = {key: value for key, value in made.items() if key == COMPENSATION}
            if not before and self.rounding == "kahan" and weight.dtype is not torch.float32:
                before[COMPENSATION] = torch.zeros_like(weight)
            self.inner.state[weight] = self._kept_state(weight, before, _widened(made, weight))

    def __contains__(self, weight: Tensor) -> bool:
        return id(weight) in self._number

    def number(self, weight: Tensor) -> int | None:
        """Return that of a weight among these; None: it is none of them."""
        return self._number.get(id(weight))

    def keys(self) -> Tensor | None:
        """Of this update, one for each weight: int32 [weights]; None: nothing is random."""
        if self.rounding != "stochastic":
            return None
        mixed = self._names + self.updates * 0x85EBCA6B
        return _hashed((mixed & _32_BITS).to(torch.int32))

    def chunks(self, updated: Sequence[Tensor]) -> list[list[int]]:
        """Places in `updated` of what is updated together, one list after the other.

        Of torch's own rules, which update each weight by itself; another optimizer may look at
        several, and all are one chunk.
        """
        if rule_of(self.inner) is None:
            return [list(range(len(updated)))]
        return packed((own.numel() if own in self else 0 for own in updated), CHUNK)

    @contextmanager
    def in_fp32(
        self, updated: Sequence[Tensor], found_inf: Tensor | None
    ) -> Iterator[list[Tensor]]:
        """Within it `inner` holds weights, and their state, in FP32; afterwards they are stored.

        Costs 4 bytes for each of them meanwhile. An update is counted by `count`, after all of it.

        Args:
            updated: what `inner` updates meanwhile, alone (see `chunks`).
            found_inf: not 0: nothing is stored.

        Yields:
            `updated`, in FP32.
        """
        inner, held = self.inner, {id(tensor) for tensor in updated}
        chosen = [weight for weight in updated if weight in self]
        states = [inner.state.pop(weight, {}) for weight in chosen]
        wide: dict[int, Tensor] = {}
        with torch.no_grad():
            for weight, state in zip(chosen, states, strict=True):
                own = weight.detach().float()
                if COMPENSATION in state:
                    own.add_(state[COMPENSATION])
                wide[id(weight)] = own
                inner.state[own] = _widened(state, weight)
        groups = [group["params"] for group in inner.param_groups]
        for group, params in zip(inner.param_groups, groups, strict=True):
            group["params"] = [wide.get(id(p), p) for p in params if id(p) in held]
        try:
            yield [wide.get(id(tensor), tensor) for tensor in updated]
        finally:
            for group, params in zip(inner.param_groups, groups, strict=True):
                group["params"] = params
            with torch.no_grad():
                for weight, state in zip(chosen, states, strict=True):
                    found = inner.state.pop(wide[id(weight)], {})
                    inner.state[weight] = self._kept_state(weight, state, found)
                self._store_all(chosen, wide, found_inf)

    def _kept_state(self, weight: Tensor, before: dict, found: dict) -> dict[Any, Any]:
        """`found` in the dtypes in which it is kept; in the tensors of before, where a captured
        graph knows them."""
        kept = {COMPENSATION: before[COMPENSATION]} if COMPENSATION in before else {}
        for name, value in found.items():
            dtype = self.state_dtype if _is_like(value, weight, name) else None
            if dtype is not None and value.dtype is not dtype:
                own = before.get(name)
                value = value.to(dtype) if own is None else own.copy_(value)
            kept[name] = value
        return kept

    def _store_all(
        self, chosen: Sequence[Tensor], wide: Mapping[int, Tensor], found_inf: Tensor | None
    ) -> None:
        keys = self.keys()
        for weight in chosen:
            if weight.dtype is torch.float32:  # only its state is narrow
                continue
            key = None if keys is None else keys[self.number(weight)]
            kept = self.inner.state[weight].get(COMPENSATION)
            tensors = [weight.detach(), wide[id(weight)], *([] if kept is None else [kept])]
            # Rounding takes a multiple of what it rounds.
            flat = [tensor.as_strided((tensor.numel(),), (1,)).split(CHUNK) for tensor in tensors]
            for number, (own, new, *rest) in enumerate(zip(*flat, strict=True)):
                with put_back_where(found_inf, [own, *rest]):
                    self.store(own, new, key, rest[0] if rest else None, number * CHUNK)

    def count(self, found_inf: Tensor | None = None) -> None:
        """There was an update, unless `found_inf` is not 0."""
        self.updates.add_(1 if found_inf is None else (found_inf == 0).long())

    def store(
        self, own: Tensor, wide: Tensor, key: Tensor | None, kept: Tensor | None, start: int = 0
    ) -> None:
        """Round `wide` into `own`, in memory both in the same order.

        Args:
            key: one of `keys`, for stochastic rounding.
            kept: takes what the rounding took away.
            start: place of the first number in the memory of the whole weight, an even one.
        """
        if key is not None:
            round_stochastically(own, wide, key, start)
            return
        own.copy_(wide)
        if kept is not None:
            kept.copy_(wide - own)

    def state_dict(self) -> dict[str, Tensor]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.updates.copy_(state["updates"])


def choose_narrow(
    inner: Optimizer, named: Mapping[str, Tensor], policy: PrecisionPolicy, seed: int = 0
) -> NarrowWeights | None:
    """Return those of `named` that are BF16 but updated in FP32, or have a state in BF16."""
    rounding = policy.rounding if policy.masters == "transient" else "nearest"
    state_dtype = policy.state_dtype
    if rounding == "nearest" and state_dtype is None:
        return None
    real = {name: own for name, own in named.items() if not own.is_complex()}
    chosen = {n: own for n, own in real.items() if state_dtype or own.dtype is torch.bfloat16}
    if not chosen:
        return None
    return NarrowWeights(inner, [*chosen], [*chosen.values()], rounding, state_dtype, seed)


def packed(sizes: Iterable[int], most: int) -> list[list[int]]:
    """Return places in `sizes`, in order, together as long as they add up to `most` or less."""
    found: list[list[int]] = [[]]
    used = 0
    for place, size in enumerate(sizes):
        if found[-1] and used + size > most:
            found.append([])
            used = 0
        found[-1].append(place)
        used += size
    return found


def widen(wide: Tensor, own: Tensor, kept: Tensor | None) -> Tensor:
    """Fill an FP32 tensor with a BF16 weight, and with what its last rounding took away."""
    wide.copy_(own)
    return wide if kept is None else wide.add_(kept)


def _widened(state: Mapping[str, Any], weight: Tensor) -> dict[str, Any]:
    """State of the optimizer's own in FP32, without what torch would take for it."""
    return {
        key: value.float() if _is_like(value, weight, key) else value
        for key, value in state.items()
        if key != COMPENSATION  # torch takes an empty state for one to be made
    }


def _is_like(value: Any, weight: Tensor, key: str) -> bool:
    """Whether it is state of the optimizer's own, a number for each of the weight."""
    is_own = isinstance(value, Tensor) and value.is_floating_point() and key != COMPENSATION
    return is_own and value.shape == weight.shape


def round_stochastically(own: Tensor, wide: Tensor, key: Tensor, start: int = 0) -> None:
    """Round FP32 to BF16, up with the probability (wide - below) / (above - below).

    16 random bits are added below the ones that are kept, then those below are cut off: of the
    65,536 equally likely sums as many carry as the number is above the lower neighbour. What is in
    BF16 already stays, so do infinity and NaN.

    Args:
        own: BF16, written to; dense.
        wide: FP32, of the same shape and order in memory.
        key: int32, 0-dim.
        start: see `NarrowWeights.store`.
    """
    numel = wide.numel()
    flat = wide.as_strided((numel,), (1,))
    # A NaN whose lowest bits are set would become a number.
    bits = flat.nan_to_num(nan=float("nan"), posinf=float("inf"), neginf=float("-inf"))
    bits = bits.view(torch.int32)
    bits += random_bits(numel, key, start)
    # The upper half of each number; bytes of an int32 are in little-endian order everywhere here.
    own.as_strided((numel,), (1,)).view(torch.int16).copy_(bits.view(torch.int16)[1::2])


def random_bits(numel: int, key: Tensor, start: int = 0) -> Tensor:
    """int32 [numel], 0 to 65535: of the numbers `start` ... of the sequence of `key`.

    Two of them from each 32-bit hash of key and index ("lowbias32", Wellons, hash-prospector).
    """
    first, last = start // 2, start // 2 + (numel + 1) // 2
    pairs = torch.arange(first, last, dtype=torch.int32, device=key.device)
    pairs ^= key
    _hashed(pairs)
    return pairs.view(torch.int16)[:numel].to(torch.int32).bitwise_and_(0xFFFF)


def _hashed(x: Tensor) -> Tensor:
    """A permutation of 32 bits, in place: int32, of which torch shifts the sign in."""
    for shift, mask, factor in ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, 0x846CA68B - 2**32)):
        x ^= (x >> shift).bitwise_and_(mask)
        x *= factor
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def is_dense(tensor: Tensor) -> bool:
    """Return whether the values fill their part of memory, in whatever order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
