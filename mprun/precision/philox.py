"""Random bits of a counter: the same on every device, for any split into parts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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
