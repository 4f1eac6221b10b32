"""The single pass on a CPU: torch's fused kernels, on blocks that fit into a cache.

A block of the gradients is cast into a buffer that stays in the cache, and unscaled there. torch's
fused kernel reads it, and the updated masters are copied to the model while the cache holds them.
So memory sees each gradient, master, state and copy once. Every number equals the plain way's, bit
for bit: the kernels are the same, and they work element by element.

16-bit parameters are never updated by a fused kernel: SGD's leaves them unchanged on a CPU
(pytorch#191763). Only their FP32 masters are.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mprun.precision.rounded_weights import Piece, packed, widen
from mprun.precision.update import (
    Checked,
    Gradients,
    Ready,
    SinglePass,
    Weight,
    by_dtype,
    in_memory_order,
    in_order_of,
)
from mprun.torch_private import (
    FUSED,
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    unscale_and_find_inf_,
)

# Elements; FP32, so 2 MB. Measured (benchmarks/update_speed.py --blocks): smaller blocks cost more
# in calls than they save in memory, blocks above 1 M no longer stay in a cache.
BLOCK = 512 * 1024
# Below this one call for all tensors is faster than one each.
_SMALL = 64 * 1024
_ALIGNMENT = 16  # elements: 64 bytes, one register of AVX-512


class _Block:
    """Pieces of weights that are updated together, in lists of the same order."""

    def __init__(
        self, pieces: list[Weight], buffer: Tensor | None = None, wide: Tensor | None = None
    ):
        self.pieces = pieces
        self.masters = [piece.master.detach() for piece in pieces]
        if wide is not None:
            pairs = zip(pieces, self.masters, self._places(wide), strict=True)
            self.masters = [own if piece.narrow is None else place for piece, own, place in pairs]
        of_pieces = zip(pieces, self.masters, strict=True)
        # Pieces that live in BF16, each with its place in `wide`, its master here.
        self.narrow = [(piece, place) for piece, place in of_pieces if piece.narrow is not None]
        self.states = [list(tensors) for tensors in zip(*(p.state for p in pieces), strict=True)]
        self.steps = [piece.step for piece in pieces if piece.step is not None]
        self.copies = [piece.own.detach() for piece in pieces if piece.has_copy]
        self.copied = [piece.master.detach() for piece in pieces if piece.has_copy]
        if buffer is not None:  # each piece's place in it, with the strides of its master
            self.buffers = self._places(buffer)

    def _places(self, buffer: Tensor) -> list[Tensor]:
        sizes = [_aligned(master.numel()) for master in self.masters]
        starts = accumulate(sizes, initial=0)
        return [
            buffer.as_strided(master.shape, master.stride(), start)
            for master, start in zip(self.masters, starts, strict=False)
        ]


@dataclass(slots=True)
class _Part:
    """The weights of one parameter group, split by clipped or not and FP32 gradients or not."""

    group: dict
    clipped: bool
    in_fp32: bool
    blocks: list[_Block]
    # All as one block without buffer, if gradients can be used unchanged and nothing is copied.
    whole: _Block | None
    steps: list[Tensor]


class BlockedUpdate(SinglePass):
    """The single pass on a CPU; it costs a buffer of `block` elements, and views of the pieces."""

    def __init__(self, *of_optimizer: Any, block: int = BLOCK):
        super().__init__(*of_optimizer)
        self.block, self._one = block, torch.ones(())
        self._key: tuple | None = None
        self._parts: list[_Part] = []

    @torch.no_grad()
    def read(self, ready: Ready, *, norm: bool, grad_max: bool) -> Checked:
        gradients, inverse, found_inf = ready[:3]
        present = [gradient for gradient in gradients if gradient is not None]
        largest, finite = None, True
        if grad_max:
            largest = _largest(present)
            finite = bool(torch.isfinite(largest))
            largest = largest if inverse is None else largest * inverse
        elif found_inf is not None:
            finite = self._all_finite(present)
        if found_inf is not None and not finite:
            found_inf.fill_(1.0)
        norms = _norms(self._clipped(gradients), inverse, finite) if norm else None
        return Checked(norms, largest)

    @torch.no_grad()
    def write(self, ready: Ready, clip: Tensor | None) -> None:
        gradients, inverse, found_inf = ready[:3]
        # On a CPU these reads wait for nothing.
        if found_inf is not None and bool(found_inf):
            return
        self._plan(gradients)
        unscale, factor = (1.0 if number is None else float(number) for number in (inverse, clip))
        narrow = self.narrow
        for part in self._parts:
            if part.steps:
                foreach_add_(part.steps, 1)
            settings, factors = self._settings(part.group, unscale)
            if part.clipped and factor != 1.0:
                factors.append(factor)
            direct = part.in_fp32 and not factors
            # Backwards: the cache still holds the tensors that the check read last.
            whole = [part.whole] if direct and part.whole is not None else None
            for block in whole or part.blocks[::-1]:
                for piece, wide in block.narrow:
                    widen(wide, piece.own, piece.kept)
                self._run(block, gradients, factors, settings, direct)
                if narrow is not None:
                    narrow.store([self._stored(piece, wide) for piece, wide in block.narrow])
        if narrow is not None:
            narrow.count()

    def _run(
        self,
        block: _Block,
        gradients: Gradients,
        factors: list[float],
        settings: dict,
        direct: bool,
    ) -> None:
        """Update one block. direct: FP32 gradients with nothing to multiply need no buffer."""
        pieces = [self._piece(gradients, piece.index, piece.part) for piece in block.pieces]
        if direct:
            pairs = zip(block.masters, pieces, strict=True)
            pieces = [in_order_of(master, piece) for master, piece in pairs]
        else:
            foreach_copy_(block.buffers, pieces)
            pieces = block.buffers
            for factor in factors:
                foreach_mul_(pieces, factor)
        match self.rule:
            case "sgd":
                others = block.states or [[]]
            case "adagrad":
                others = [*block.states, block.steps]
            case _:
                others = [*block.states, [], block.steps]  # no largest squares (amsgrad)
        FUSED[self.rule](block.masters, pieces, *others, **settings)
        if block.copies:
            foreach_copy_(block.copies, block.copied)

    def _piece(self, gradients: Gradients, index: int, part: int | None) -> Tensor:
        gradient = gradients[index]
        assert gradient is not None  # a plan only holds weights with gradients
        if part is None:
            return gradient
        flat = in_memory_order(in_order_of(self.updated[index], gradient))
        return flat[part * self.block : (part + 1) * self.block]

    def _stored(self, weight: Weight, wide: Tensor) -> Piece:
        assert weight.narrow is not None
        start = (weight.part or 0) * self.block
        return Piece(weight.narrow, start, weight.own, wide, weight.kept)

    def _settings(self, group: dict, unscale: float) -> tuple[dict[str, Any], list[float]]:
        """Return the arguments of the fused kernel, and the factors of the gradients before it.

        SGD can unscale by itself, for a power of two. The gradient's share in the momentum, or the
        rate, carries the factor, and the weight decay its reciprocal. Then every product is that of
        the unscaled gradient, with another exponent.
        """
        rate, decay = float(group["lr"]), group["weight_decay"]
        settings: dict[str, Any] = {"maximize": False, "grad_scale": None, "found_inf": None}
        factors = [] if unscale == 1.0 else [unscale]
        match self.rule:
            case "sgd":
                momentum, nesterov, dampening = group["momentum"], group["nesterov"], 0.0
                exact = math.frexp(unscale)[0] == 0.5 and 1.0 - (1.0 - unscale) == unscale
                if factors and exact and not nesterov:
                    factors, decay = [], decay / unscale
                    if momentum:
                        dampening = 1.0 - unscale
                    else:
                        rate *= unscale
                settings |= {"momentum": momentum, "nesterov": nesterov, "dampening": dampening}
                settings["is_first_step"] = False
            case "adagrad":
                settings |= {"eps": group["eps"], "lr_decay": 0.0}
            case _:
                beta1, beta2 = (float(beta) for beta in group["betas"])
                settings |= {"eps": group["eps"], "beta1": beta1, "beta2": beta2, "amsgrad": False}
        return settings | {"lr": rate, "weight_decay": decay}, factors

    def _all_finite(self, gradients: list[Tensor]) -> bool:
        """Check the gradients in one read; small ones, which a cache holds, are written as well."""
        found = torch.zeros(())
        for group in by_dtype(g for g in gradients if g.numel() < _SMALL):
            unscale_and_find_inf_(group, found, self._one)
        large = [gradient for gradient in gradients if gradient.numel() >= _SMALL]
        # A sum is not finite if a value is not. A sum may also overflow, so check it again.
        for group in by_dtype(large):
            sums = torch.isfinite(torch.stack([gradient.sum() for gradient in group])).tolist()
            for gradient, finite in zip(group, sums, strict=True):
                if not finite and not torch.isfinite(_largest([gradient])):
                    return False
        return not found

    def _plan(self, gradients: Gradients) -> None:
        """Build the blocks anew if gradients or the model's tensors differ from those before."""
        dtypes = [None if gradient is None else gradient.dtype for gradient in gradients]
        key = (dtypes, [parameter.data_ptr() for parameter in self.parameters])
        if key == self._key:
            return
        self._key = key
        kinds: dict[tuple[int, bool, bool], list[Weight]] = {}
        for weight in self.weights([dtype is not None for dtype in dtypes]):
            in_fp32 = dtypes[weight.index] is torch.float32
            kind = (weight.group, self.is_clipped[weight.index], in_fp32)
            kinds.setdefault(kind, []).append(weight)
        buffer = torch.empty(_aligned(self.block))
        wide = None if self.narrow is None else torch.empty_like(buffer)
        self._parts = [
            _Part(
                self.inner.param_groups[group],
                clipped,
                in_fp32,
                self._in_blocks(weights, buffer, wide),
                None if wide is not None or any(w.has_copy for w in weights) else _Block(weights),
                [weight.step for weight in weights if weight.step is not None],
            )
            for (group, clipped, in_fp32), weights in kinds.items()
        ]

    def _in_blocks(
        self, weights: list[Weight], buffer: Tensor, wide: Tensor | None
    ) -> list[_Block]:
        """Return blocks of the weights, in order: several small ones, or a piece of a large one."""
        pieces: list[Weight] = []
        for weight in weights:
            if weight.master.numel() <= self.block:
                pieces.append(weight)
                continue
            kept = [] if weight.kept is None else [weight.kept]
            tensors = (weight.own, weight.master, *kept, *weight.state)
            parts = [in_memory_order(tensor).split(self.block) for tensor in tensors]
            for part, (own, master, *state) in enumerate(zip(*parts, strict=True)):
                rest = None if weight.kept is None else state.pop(0)
                pieces.append(
                    replace(weight, own=own, master=master, state=state, kept=rest, part=part)
                )
        places = packed([_aligned(piece.master.numel()) for piece in pieces], self.block)
        return [_Block([pieces[n] for n in one], buffer, wide) for one in places]


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT


def _largest(gradients: list[Tensor]) -> Tensor:
    """Return the largest magnitude, float32, 0-dim; NaN if a value is NaN."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    ends = [end.float() for gradient in filled for end in torch.aminmax(gradient)]
    return torch.stack(ends).abs().max() if ends else torch.zeros(())


def _norms(gradients: list[Tensor], inverse: Tensor | None, finite: bool) -> Tensor:
    """Return the L2 norm of each unscaled gradient, float32 [n], as the plain way computes it."""
    if not gradients:
        return torch.zeros(0)
    factor = 1.0 if inverse is None else float(inverse)
    if math.frexp(factor)[0] == 0.5:
        # A power of two goes through squares, sums and roots without a rounding.
        norms = torch.stack(foreach_norm(gradients, 2, dtype=torch.float32)) * factor
        if not finite or bool(torch.isfinite(norms).all()):
            return norms
    return torch.stack([torch.linalg.vector_norm(g.float() * factor) for g in gradients])
