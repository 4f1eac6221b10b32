"""Where the files of the One Billion Word benchmark lie, and its vocabulary file."""

import hashlib
from pathlib import Path

from mprun.data.errors import DamagedData

TRAINING_SHARDS = 99
_CORPUS = "1-billion-word-language-modeling-benchmark-r13output"
_TRAINING = "training-monolingual.tokenized.shuffled"
_HELD_OUT = "heldout-monolingual.tokenized.shuffled"
_HELD_OUT_SHARD = {"valid": 1, "test": 0}
_VOCABULARIES = ("1b_word_vocab.txt", "vocab-2016-09-10.txt")


def find_shards(root: str | Path, eval_split: str) -> tuple[list[Path], Path]:
    """All training shards in the order of their numbers, and the held-out one.

    Shard 00000-of-00100 is no training shard: it is the held-out text.
    Raises ``DamagedData`` if a folder or one of the shards is missing.
    """
    folder = _corpus_folder(Path(root))
    shards = [
        folder / _TRAINING / f"news.en-{number:05}-of-00100"
        for number in range(1, TRAINING_SHARDS + 1)
    ]
    missing = [path for path in shards if not path.is_file()]
    if missing:
        raise DamagedData(
            f"{missing[0]}: no such file; {len(missing)} of {TRAINING_SHARDS} training shards "
            "are missing"
        )
    number = _HELD_OUT_SHARD[eval_split]
    held_out = folder / _HELD_OUT / f"news.en.heldout-{number:05}-of-00050"
    if not held_out.is_file():
        raise DamagedData(f"{held_out}: no such file, which is the {eval_split} split")
    return shards, held_out


def find_vocabulary(root: str | Path, named: str | Path | None) -> Path:
    """The file ``named``, or the one with a conventional name in ``root`` or the corpus' folder.

    Raises ``ValueError`` if ``named`` is no file, ``DamagedData`` if there is none to be found.
    """
    if named is not None:
        if not Path(named).is_file():
            raise ValueError(f"vocabulary={named} is not allowed: no such file")
        return Path(named)
    root = Path(root)
    for folder in (root, _corpus_folder(root)):
        for name in _VOCABULARIES:
            if (folder / name).is_file():
                return folder / name
    raise DamagedData(
        f"{root}: no vocabulary file {' or '.join(_VOCABULARIES)} (one word a line, with <S> and "
        "<UNK>): put it there, or name it in data.vocabulary"
    )


def read_vocabulary(path: Path, sha256: str, required: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a vocabulary file in UTF-8: one a line, each alone or followed by its count.

    Raises ``DamagedData``, naming file and line, for a file that cannot be read or has not the
    bytes of which ``sha256`` (hex) is the hash, for any other line, for a word that stands there
    twice, and where one of ``required`` is missing.
    """
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8").removeprefix("\ufeff").split("\n")
    except OSError as error:
        raise DamagedData(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DamagedData(f"{path}: not UTF-8 at byte {error.start}, line {line}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedData(f"{path}: changed while it was read")
    if not lines[-1]:
        lines.pop()
    words: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not 1 <= len(fields) <= 2 or not all(count.isdecimal() for count in fields[1:]):
            raise DamagedData(f"{path}: line {number} is not a word, or a word and its count")
        if fields[0] in words:
            raise DamagedData(f"{path}: line {number} repeats {fields[0][:50]!r}")
        words[fields[0]] = None
    missing = [word for word in required if word not in words]
    if missing:
        raise DamagedData(f"{path}: without {' and '.join(missing)}, which the text needs")
    return tuple(words)


def _corpus_folder(root: Path) -> Path:
    for folder in (root, root / _CORPUS):
        if (folder / _TRAINING).is_dir():
            return folder
    raise DamagedData(
        f"{root}: no folder {_TRAINING}, here or in {_CORPUS}: unpack the corpus there"
    )
