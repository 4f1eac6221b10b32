"""Files of encoded tokens, as nanoGPT and llm.c prepare them."""

import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from mprun.data.cache import Cache
from mprun.data.source import DamagedData, DataError, Serving, reading
from mprun.data.token_streams import TokenFile, TokenStreams, Windows, padded

_NAMES = {"train": ("train.bin", "*_train_*.bin"), "val": ("val.bin", "*_val_*.bin")}
# karpathy/llm.c, dev/data/data_common.py: 256 int32; the first are magic, version and number of
# tokens. Read as tokens, the first magic begins with 55,432, beyond GPT-2's vocabulary.
_HEADER_BYTES = 1024
_VERSIONS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # of GPT-2's tokens, of Llama 3's
# Tokens are at most 2^31 - 1: torch knows int32 on every device.
_DTYPES = {"uint16": torch.uint16, "uint32": torch.int32, "int32": torch.int32}
_LOOKED_AT = 65_536  # words, to see whether their width is right
# How files begin that are often at hand under the name of a token file.
_OTHER_FILES = {
    b"\x93NUMPY": "a NumPy array (.npy)",
    b"PK\x03\x04": "a zip archive (.npz, torch.save)",
    b"\x1f\x8b\x08": "a gzip archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"\x89HDF": "an HDF5 file",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
}


class TokenFiles(TokenStreams):
    """The tokens of ``train.bin`` and ``val.bin`` below ``root``, as nanoGPT prepares them.

    They hold little-endian integers and nothing else. llm.c's files work too: ``*_train_*.bin`` in
    the order of their names and ``*_val_*.bin``, with a header each. They are read in place, piece
    by piece. ``vocab_size`` is padded to ``vocab_multiple``; a token that is not below the unpadded
    size raises ``DamagedData`` when it is read, as does a missing file at the start. ``sha256``
    covers every file, in order.

    dtype: "uint16", "uint32", "int32"; "auto": the header's, without one uint16 if it holds
        ``vocab_size``, else uint32. Files whose words have another width raise ``DataError``.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        vocab_size: int,
        vocab_multiple: int,
        dtype: str,
        cache: str | Path | None,
        windows: Windows,
        serving: Serving,
    ) -> None:
        train, held_out = (_found(Path(root), split) for split in _NAMES)
        paths = (*train, *held_out)
        opened: list[TokenFile] = [EncodedFile(path, vocab_size, dtype) for path in paths]
        if other := [own.path for own in opened if own.dtype is not opened[0].dtype]:
            raise DamagedData(
                f"{other[0]}: its tokens must have the same width as those of {train[0].name}"
            )
        super().__init__(opened[: len(train)], opened[len(train) :], windows, serving)
        hashes = "".join(map(Cache(cache).content_sha256, (*train, *held_out)))
        self.sha256 = hashlib.sha256(f"{len(train)} {hashes}".encode()).hexdigest()
        self.vocab_size = padded(vocab_size, vocab_multiple)
        self.description |= {
            "name": "token_files",
            "files": f"{train[0].name}, {held_out[0].name}",
            "vocab_entries": vocab_size,
            "vocab_size": self.vocab_size,
            "rotate": windows.rotate,
        }


class EncodedFile(TokenFile):
    """An open file of tokens below ``vocab_size``, with llm.c's header or without."""

    def __init__(self, path: Path, vocab_size: int, dtype: str) -> None:
        super().__init__(path)
        self.vocab_size = vocab_size
        version, promised, headed = self._header()
        if headed is not None:
            self.start = _HEADER_BYTES
            if dtype != "auto" and _DTYPES[dtype] is not _DTYPES[headed]:
                wrong = f"data.dtype={dtype}: its header (version {version}) is that of {headed}"
                raise DataError(f"{path}: {wrong} (allowed here: auto, {headed})")
        if dtype == "auto":
            dtype = headed or ("uint16" if vocab_size <= 2**16 else "uint32")
        self.dtype = _DTYPES[dtype]
        width, rest = self.dtype.itemsize, self.bytes - self.start
        if rest % width:
            what = "an odd number of bytes" if width == 2 else "no multiple of four bytes"
            raise DamagedData(
                f"{path}: {what} ({self.bytes}), must be a multiple of {width}, the "
                "number of bytes per token"
            )
        self.tokens = rest // width
        if headed and promised != self.tokens:
            raise DamagedData(
                f"{path}: {self.tokens} tokens, but its header (version {version}) says {promised}"
            )
        if not self.tokens:
            raise DamagedData(f"{path}: no token")
        self._check_width(dtype)

    def _header(self) -> tuple[int, int, str | None]:
        """Return version, number of tokens and dtype of llm.c's header; without one, no dtype.

        Raises DataError for a file of another kind, DamagedData for a header of another version.
        """
        head = np.zeros(min(self.bytes, 2 * _HEADER_BYTES), np.uint8)
        self._read_bytes(head, 0)
        content = head.tobytes()
        magic, version, promised = np.frombuffer(content[:12].ljust(12, b"\0"), "<i4").tolist()
        known, headed = _VERSIONS.get(magic, (None, None))
        if headed is not None:
            if version != known or self.bytes < _HEADER_BYTES:
                raise DamagedData(
                    f"{self.path}: a header with magic number {magic} must have {_HEADER_BYTES} "
                    f"bytes and version {known}, but the file has {self.bytes} bytes and version "
                    f"{version}"
                )
            return version, promised, headed
        what = next((what for begin, what in _OTHER_FILES.items() if content.startswith(begin)), "")
        if not what and len(content) > _HEADER_BYTES and not head[64:_HEADER_BYTES].any():
            if head.any():
                what = f"a file with a header of magic {magic}, which no file of tokens has here"
        if not what and len(content) > 64 and b"\0" not in content:
            with suppress(UnicodeDecodeError):
                content.rstrip(bytes(range(128, 256))).decode()
                what = "a text"
        if what:
            raise DataError(
                f"{self.path}: begins as {what}; must contain only integers, as numpy's "
                f"array.tofile writes them, with or without a header of llm.c"
            )
        return 0, 0, None

    def _check_width(self, dtype: str) -> None:
        """Raise DataError if the first words are halves of tokens, or pairs of them."""
        words = torch.empty(min(self.tokens, _LOOKED_AT), dtype=self.dtype).numpy()
        super().read_into(words, 0)
        why = None
        if self.dtype is torch.uint16 and len(words) >= 1024:
            low, high = words[::2], words[1::2]
            if high.max() == 0 < low.max() or (high.max() < 16 and np.median(low) >= 256):
                why = f"every second word is at most {high.max()}, as in 32-bit tokens", "uint32"
        elif self.dtype is torch.int32 and np.median(words) >= self.vocab_size:
            beyond = f"most words are {self.vocab_size} or more"
            why = f"{beyond}, as pairs of 16-bit tokens", "uint16"
        if why is not None:
            raise DataError(f"{self.path}: data.dtype={dtype}: {why[0]} (allowed here: {why[1]})")

    def read_into(self, row: np.ndarray, position: int) -> None:
        super().read_into(row, position)
        if not len(row):
            return
        most = row.argmax() if row.min() >= 0 else row.argmin()
        if not 0 <= row[most] < self.vocab_size:
            raise DamagedData(
                f"{self.path}: token {row[most]} at place {position + int(most)}, must be below "
                f"data.vocab_size={self.vocab_size}"
            )


def _found(root: Path, split: str) -> list[Path]:
    with reading(root):
        found = [sorted(root.glob(pattern)) for pattern in _NAMES[split]]
    if len(kinds := [files for files in found if files]) == 1:
        return kinds[0]
    names = " and ".join(_NAMES[split])
    if not kinds:
        raise DataError(f"data.root={root}: contains neither of {names}, must contain one")
    raise DamagedData(f"{root}: contains both of {names}, must contain one")
