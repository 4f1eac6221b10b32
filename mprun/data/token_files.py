"""Files of encoded uint16 tokens: nanoGPT's train.bin and val.bin, and llm.c's shards."""

import hashlib
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from mprun.data.cache import Cache
from mprun.data.source import DamagedData
from mprun.data.token_streams import StreamOptions, TokenFile, TokenStreams

_NAMES = {"train": ("train.bin", "*_train_*.bin"), "val": ("val.bin", "*_val_*.bin")}
# karpathy/llm.c, dev/data/data_common.py: 256 int32; the first are magic, version and number of
# tokens. Read as tokens, the magic number begins with 55,432, beyond GPT-2's vocabulary.
_HEADER_BYTES, _MAGIC, _VERSION = 1024, 20240520, 1


class TokenFiles(TokenStreams):
    """The tokens of ``train.bin`` and ``val.bin`` below ``root``, as nanoGPT prepares them.

    They hold little-endian uint16 and nothing else. llm.c's files work too: ``*_train_*.bin`` in
    the order of their names and ``*_val_*.bin``, with a header each. They are read in place, piece
    by piece. ``vocab_size`` is padded to ``vocab_multiple``. A token that is not below the unpadded
    size ends the run when it is read, so the padding ids never occur. ``sha256`` covers every file,
    in order.

    Raises:
        ValueError: An argument is out of range.
        DataError: There are too few tokens.
        DamagedData: Files are missing, cut short or hold other tokens.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        vocab_size: int,
        vocab_multiple: int,
        cache: str | Path | None,
        **options: Unpack[StreamOptions],
    ) -> None:
        train, held_out = (_found(Path(root), split) for split in _NAMES)
        opened = [Uint16File(path, vocab_size) for path in (*train, *held_out)]
        super().__init__(opened[: len(train)], opened[len(train) :], **options)
        hashes = "".join(map(Cache(cache).content_sha256, (*train, *held_out)))
        self.sha256 = hashlib.sha256(f"{len(train)} {hashes}".encode()).hexdigest()
        self.vocab_size = -(-vocab_size // vocab_multiple) * vocab_multiple
        self.description = {
            "name": "token_files",
            "files": ", ".join(files[0].name for files in (train, held_out)),
            **self.description,
            "vocab_entries": vocab_size,
            "vocab_size": self.vocab_size,
            "rotate": self._rotate,
        }


class Uint16File(TokenFile):
    """An open file of uint16 tokens below ``vocab_size``, with llm.c's header or without."""

    dtype = torch.uint16

    def __init__(self, path: Path, vocab_size: int) -> None:
        super().__init__(path)
        self.vocab_size = vocab_size
        header = np.zeros(3, "<i4")
        if self.bytes >= _HEADER_BYTES:
            self._read_bytes(header, 0)
        if header[0] == _MAGIC:
            self.start = _HEADER_BYTES
        rest = self.bytes - self.start
        if rest % 2:
            raise DamagedData(f"{path}: an odd number of bytes ({self.bytes}), tokens have two")
        self.tokens = rest // 2
        if self.start and (header[1] != _VERSION or header[2] != self.tokens):
            raise DamagedData(
                f"{path}: {self.tokens} tokens, its header (version {header[1]}) says {header[2]}"
            )
        if not self.tokens:
            raise DamagedData(f"{path}: no token")

    def read_into(self, row: np.ndarray, position: int) -> None:
        super().read_into(row, position)
        if len(row) and (most := row.max()) >= self.vocab_size:
            place = position + int(row.argmax())
            raise DamagedData(
                f"{self.path}: token {most} at place {place}, must be below "
                f"data.vocab_size={self.vocab_size}"
            )


def _found(root: Path, split: str) -> list[Path]:
    try:
        found = [sorted(root.glob(pattern)) for pattern in _NAMES[split]]
    except OSError as error:
        raise DamagedData(f"{root}: {error.strerror}") from error
    if len(kinds := [files for files in found if files]) == 1:
        return kinds[0]
    many = "both" if kinds else "neither"
    raise DamagedData(f"{root}: has {many} of {' and '.join(_NAMES[split])}, must have one")
