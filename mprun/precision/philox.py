"""Random bits of a counter: the same on every device, for any split into parts."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_32_BITS = 0xFFFFFFFF
IN_BLOCK = 8  # numbers that one counter serves, with 16 bits each


def bits_of(counter: Sequence[Tensor], seed: int) -> Tensor:
    """Return 16 random bits for each of `IN_BLOCK` numbers of every counter: int32, 0 to 65535.

    counter: four tensors that broadcast, of which the lower 32 bits count. seed: 64 bits.
    """
    words = torch.stack(philox([own & _32_BITS for own in counter], seed), 1)
    # Of each word the lower half first: bytes of an int32 are in that order everywhere here.
    halves = words.to(torch.int32).view(torch.int16).flatten()
    return halves.to(torch.int32).bitwise_and_(0xFFFF)


def philox(counter: Sequence[Tensor], key: int) -> list[Tensor]:
    """Compute Philox4x32-10: four words of 32 random bits from four of a counter and 64 of a key.

    Words are int64. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, in the
    form of Random123, which is that of Triton's `tl.philox` too.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _32_BITS, key >> 32
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # of 64 bits, whose sign an int64 makes up
        c0 = ((p1 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(_32_BITS)
        c2 = ((p0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(_32_BITS)
        c1, c3 = p1, p0  # the lower halves
        k0, k1 = (k0 + 0x9E3779B9) & _32_BITS, (k1 + 0xBB67AE85) & _32_BITS
    return [c0, c1 & _32_BITS, c2, c3 & _32_BITS]


def stream_of(name: str) -> int:
    """Return 64 bits, as a signed number, that stand for a name in a counter."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class MicroBatches:
    """The number of the present micro-batch, for random bits of the casts in it.

    It lies on the device: a captured step, replayed, reads the number of its own. One run, one
    process.

    drawn: stream -> blocks of `IN_BLOCK` numbers that it has drawn in the present micro-batch.
    """

    def __init__(self) -> None:
        self.seed = 0
        self.drawn: dict[int, int] = {}
        self._numbers: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep numbers of its own for a block, whose tensors have no values."""
        kept = vars(self).copy()
        vars(self).update(vars(MicroBatches()))
        try:
            yield
        finally:
            vars(self).update(kept)

    def _of(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._numbers:
            first, present = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
            self._numbers[device] = first, present
        return self._numbers[device]

    def number(self, device: torch.device) -> Tensor:
        """Return the present number itself, int64, 0-dim."""
        return self._of(device)[1]

    def begin_step(self, device: torch.device, seed: int, first: int) -> None:
        """Begin a step of the run with `seed` whose micro-batches count from `first`; a replayed
        step begins so, too."""
        self.seed = seed % 2**64
        self.drawn.clear()
        for own in self._of(device):
            own.fill_(first)

    def begin(self, device: torch.device, place: int) -> None:
        """Begin the micro-batch at this place in the step; a captured step repeats it."""
        first, present = self._of(device)
        torch.add(first, place, out=present)
        self.drawn.clear()

    def draw(self, stream: int, blocks: int) -> int:
        """Draw from a stream; return its first block, which is after those of earlier casts."""
        first = self.drawn.get(stream, 0)
        self.drawn[stream] = first + blocks
        return first


micro_batches = MicroBatches()
