"""The One Billion Word benchmark (Chelba et al., arXiv 1312.3005), shard by shard."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Unpack

from mprun.data.cache import Cache
from mprun.data.source import DamagedData
from mprun.data.text import EncodedText
from mprun.data.token_streams import Sizes
from mprun.data.vocabulary import text_blocks, text_lines, word_blocks

TRAINING_SHARDS = 99
_CORPUS = "1-billion-word-language-modeling-benchmark-r13output"
_TRAINING = "training-monolingual.tokenized.shuffled"
_HELD_OUT = "heldout-monolingual.tokenized.shuffled"
_HELD_OUT_SHARD = {"valid": 1, "test": 0}
_VOCABULARIES = ("1b_word_vocab.txt", "vocab-2016-09-10.txt")


def find_shards(root: str | Path, eval_split: str) -> tuple[list[Path], Path]:
    """Find all training shards in the order of their numbers, and the held-out one.

    ``DamagedData`` names a folder or a shard that is missing.
    """
    folder = _corpus_folder(Path(root))
    # Shard 00000-of-00100 is the held-out text.
    numbers = range(1, TRAINING_SHARDS + 1)
    shards = [folder / _TRAINING / f"news.en-{number:05}-of-00100" for number in numbers]
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
    """Return the file ``named``, or one of a conventional name in ``root`` or the corpus' folder.

    It raises ``ValueError`` if ``named`` is no file, and ``DamagedData`` if none was found.
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
    """Read a vocabulary file in UTF-8: one word a line, alone or followed by its count.

    ``DamagedData`` names file and line if it cannot be read, its hash is not ``sha256`` (hex), a
    line has another form or repeats a word, or one of ``required`` is missing.
    """
    words: dict[str, None] = {}
    lines = chain.from_iterable(text_lines(path, text_blocks(path, sha256)))
    for number, text in enumerate(lines, 1):
        fields = text.split()
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


SENTENCE, UNKNOWN = "<S>", "<UNK>"


class Lm1b(EncodedText):
    """99 training shards and one held-out shard below ``root``, as streams of words.

    ``root`` is the unpacked folder 1-billion-word-language-modeling-benchmark-r13output or the one
    that holds it. The held-out shard is news.en.heldout-00000-of-00050 for ``eval_split`` "test",
    on which results are published, and 00001 for "valid". ``vocabulary`` is the file of words, one
    a line, with or without counts; None: 1b_word_vocab.txt or vocab-2016-09-10.txt in ``root`` or
    the folder. Ids are line numbers from 0; ``<UNK>`` stands for words that are not in the file.

    Sentences are ``<S> w1 ... wn``, one after the other, so that the next ``<S>`` ends a sentence.
    The code of Jozefowicz et al. (arXiv 1602.02410) does the same: each sentence has an ``<S>`` on
    both sides, and neighbours share theirs. ``</S>`` never occurs.

    Each epoch runs through all shards in an order drawn from (seed, epoch), each from its first to
    its last sentence, cut into ``batch_size`` streams of equal length. The makers of the corpus
    have shuffled its sentences. Neighbours do not belong together, so a state carried across them
    carries no context. The published code also reshuffles the sentences of a shard in each epoch
    and deals them out to the streams one by one. Evaluation runs in 16 streams over the first
    ``eval_tokens`` of the held-out shard, None for all.

    Each shard is encoded once, into the folder ``cache`` (`Cache`; 3.3 GB in all). An interrupted
    preparation continues where it stopped.

    Raises:
        ValueError: An argument is out of range.
        DataError: There is too little text, or the cache cannot be written.
        DamagedData: Files are missing or unusable.
        Resource: The disk is full.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        vocabulary: str | Path | None,
        vocab_multiple: int,
        eval_split: str,
        eval_tokens: int | None,
        cache: str | Path | None,
        **sizes: Unpack[Sizes],
    ) -> None:
        shards, held_out = find_shards(root, eval_split)
        source = find_vocabulary(root, vocabulary)
        kept = Cache(cache)
        hashes = {path: kept.content_sha256(path) for path in (source, *shards, held_out)}

        def blocks(path: Path) -> Iterator[list[str]]:
            texts = text_blocks(path, hashes[path])
            return chain([[SENTENCE]], word_blocks(texts, SENTENCE))

        def words() -> tuple[str, ...]:
            return read_vocabulary(source, hashes[source], (SENTENCE, UNKNOWN))

        super().__init__(
            "lm1b",
            f"{len(shards)} training shards, {held_out.name}, {source.name}",
            hashes,
            [*shards, held_out],
            blocks,
            words,
            UNKNOWN,
            {"vocabulary": hashes[source]},
            cache=kept,
            vocab_multiple=vocab_multiple,
            eval_split=eval_split,
            rotate=False,
            shuffle_files=True,
            overlap=1,
            eval_tokens=eval_tokens,
            **sizes,
        )
