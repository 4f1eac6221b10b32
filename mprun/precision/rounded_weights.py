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

Masters in 16 bits are stored likewise, in FP32 tensors, which is what a model shows between calls:
they have the numbers of 16 bits and save no memory. So is state in few bits (`packed_states`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.packed_states import SCALE, STATE_FORMATS, Packing, StateFormats, unsigned_in
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
    own: Tensor  # to be written: BF16, or FP32 of a master
    wide: Tensor  # FP32, to be rounded; stochastic rounding writes to it
    kept: Tensor | None = None  # BF16, gets the rounding error
    salt: int = 0  # names the state of the weight that it is, stored stochastically


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
        states: formats in which state of `inner` with the shape of its weight is kept between
            updates; None: FP32.
        masters: the 16-bit dtype of each of `weights` that is in FP32 as a master, by its id.
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
        states: StateFormats | None = None,
        seed: int = 0,
        masters: Mapping[int, torch.dtype] | None = None,
    ):
        self.inner, self.weights, self.rounding = inner, list(weights), rounding
        for name, weight in zip(names, self.weights, strict=True):
            if not is_dense(weight):
                raise ValueError(
                    f"{name}: its values must be contiguous in memory; call .contiguous()"
                )
        device = self.weights[0].device
        states = self.states = states or StateFormats()
        self.masters = masters or {}
        forms = {None, states.state_dtype, states.square_dtype}
        self._packings = {form: STATE_FORMATS[form](device) for form in forms}
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

    @property
    def draws(self) -> bool:
        """Return whether weights or state are stored stochastically."""
        return self.rounding == "stochastic" or self.states.state_rounding == "stochastic"

    def packing(self, name: str) -> Packing:
        """Return how state `name` is kept."""
        return self._packings[self.states.of(name)]

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
            pieces: list[Piece] = []
            for group, params in zip(inner.param_groups, groups, strict=True):
                group["params"] = params
            for weight, state in zip(chosen, states, strict=True):
                found = inner.state.pop(own := wide[id(weight)], {})
                if own.grad is not None or not state:  # else its state stays as it was
                    state = self._kept_state(weight, state, found, found_inf, pieces)
                inner.state[weight] = state
            self._store_all(chosen, wide, found_inf, pieces)

    def _kept_state(
        self,
        weight: Tensor,
        before: dict,
        found: dict,
        found_inf: Tensor | None = None,
        pieces: list[Piece] | None = None,
    ) -> dict[Any, Any]:
        """Return `found` as it is kept, in the tensors of `before`, which a captured graph knows.

        They keep their values if `found_inf` is not 0.

        pieces: gets what is to be stored stochastically; None: all is stored to nearest.
        """
        kept = {COMPENSATION: before[COMPENSATION]} if COMPENSATION in before else {}
        for name, value in found.items():
            if not _is_like(value, weight, name):
                kept[name] = value
                continue
            if pieces is not None and self.states.is_random(name):
                own = before.get(name)
                if own is None:  # of an optimizer that creates it in its first step
                    own = torch.zeros_like(value, dtype=torch.bfloat16)
                kept[name] = own
                if value.stride() != own.stride():
                    value = torch.empty_like(own, dtype=torch.float32).copy_(value)
                pieces += self._pieces(weight, [own, value], salt=stream_of(name))
                continue
            for key, new in self.packing(name).encode(name, value).items():
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
                value = self.packing(key).decode(key, state)
                if value.stride() != weight.stride():
                    value = torch.empty_like(weight, dtype=value.dtype).copy_(value)
            found[key] = value
        return found

    def _pieces(self, weight: Tensor, tensors: Sequence[Tensor], salt: int = 0) -> list[Piece]:
        """Return what is to be written and what is stored in it, for a weight or a state of it."""
        most, number = min(CHUNK, STORED), self._number[id(weight)]
        flat = [tensor.as_strided((tensor.numel(),), (1,)).split(most) for tensor in tensors]
        parts = enumerate(zip(*flat, strict=True))
        return [Piece(number, n * most, *split)._replace(salt=salt) for n, split in parts]

    def _store_all(
        self,
        chosen: Sequence[Tensor],
        wide: Mapping[int, Tensor],
        found_inf: Tensor | None,
        pieces: list[Piece],
    ) -> None:
        """Store weights, and the pieces of their state."""
        for weight in chosen:
            if weight.dtype is torch.float32 and id(weight) not in self.masters:
                continue  # only its state is narrow
            kept = self.inner.state[weight].get(COMPENSATION)
            tensors = [weight.detach(), wide[id(weight)], *([] if kept is None else [kept])]
            pieces += self._pieces(weight, tensors)
        # Rounding needs a multiple of the memory that it rounds.
        for places in packed([piece.own.numel() for piece in pieces], min(CHUNK, STORED)):
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
        all_random = self.rounding == "stochastic"
        random = [piece for piece in pieces if all_random or piece.salt]
        for piece, bits in zip(random, self.random_bits(random), strict=True):
            narrow = piece.own
            if narrow.dtype is torch.float32:
                narrow = torch.empty_like(narrow, dtype=torch.bfloat16)
            round_stochastically(narrow, piece.wide, bits)
            if narrow is not piece.own:
                piece.own.copy_(narrow)
        for piece in pieces if not all_random else ():
            if piece.salt:
                continue
            master_dtype = self.masters.get(id(self.weights[piece.number]))
            piece.own.copy_(piece.wide if master_dtype is None else piece.wide.to(master_dtype))
            if piece.kept is not None:
                piece.kept.copy_(piece.wide - piece.own)

    def random_bits(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Return this update's random bits of each piece: int32 [numel], 0 to 65535.

        All pieces at once: the hundred operations then cost their time, not their calls.
        """
        places, names = [], []
        if not pieces:
            return []
        for piece in pieces:
            start = piece.start // IN_BLOCK
            count = -(-piece.own.numel() // IN_BLOCK)
            places.append(torch.arange(start, start + count, device=self.streams.device))
            stream = self.streams[1 + piece.number]
            names.append((stream ^ piece.salt if piece.salt else stream).expand(count))
        name = torch.cat(names)
        bits = bits_of([torch.cat(places), self.updates, name, name >> 32], self._seed)
        parts = bits.split([len(own) * IN_BLOCK for own in places])
        return [part[: piece.own.numel()] for part, piece in zip(parts, pieces, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"updates": self.updates, **self.states._asdict()}
        kept = {key for weight in self.weights for key in self.inner.state.get(weight, {})}
        state |= {"unsigned": found} if (found := unsigned_in(kept)) else {}
        return state | {"seed": self._seed} if self.draws else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates.copy_(state["updates"])
        self._set_seed(state.get("seed", self._seed))


def choose_narrow(
    inner: Optimizer,
    named: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    seed: int = 0,
    inside: Mapping[int, torch.dtype] | None = None,
) -> RoundedWeights | None:
    """Choose those of `named` that are BF16 but updated in FP32, masters in 16 bits, or have a
    narrow state.

    inside: the dtype in which a call computes with a parameter, by its id.
    """
    states, master_dtype = policy.states, policy.rounded_masters
    is_narrow = policy.masters == "transient" or master_dtype is not None
    rounding = policy.rounding if is_narrow else "nearest"
    real = {name: own for name, own in named.items() if not own.is_complex()}
    masters = {}
    if master_dtype is not None:
        masters = {i: master_dtype for i, own in (inside or {}).items() if own.itemsize == 2}
    chosen = {
        name: own
        for name, own in real.items()
        if states.are_narrow
        or id(own) in masters
        or (rounding != "nearest" and own.dtype is torch.bfloat16)
    }
    if not chosen:
        return None
    of_weights = [*chosen], [*chosen.values()]
    return RoundedWeights(inner, *of_weights, rounding, states, seed, masters)


def translated(
    saved: Mapping[str, Any], of: StateFormats, to: StateFormats, weight: Tensor
) -> Mapping[str, Any]:
    """Return state of a weight as other formats keep it; of the same, unchanged."""
    if of == to:
        return saved
    found: dict[str, Any] = {}
    for key, value in saved.items():
        if key + SCALE in saved or _is_like(value, weight, key):
            kept = {k: saved[k].to(weight.device) for k in (key, key + SCALE) if k in saved}
            before, after = (STATE_FORMATS[one.of(key)](weight.device) for one in (of, to))
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
