"""Text as streams of words: folders, the One Billion Word benchmark, CPython's documentation."""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from mprun.data.cache import Key
from mprun.data.source import DamagedData, DataError, Description, Serving, reading
from mprun.data.token_streams import TokenStreams, Windows, padded
from mprun.data.vocabulary import (
    END_OF_LINE,
    UNKNOWN,
    Coder,
    Encoding,
    TextFile,
    WordIds,
    Words,
    build_vocabulary,
    subwords,
)
from mprun.errors import shortened

_PATTERNS = ("wiki.{}.tokens", "wiki.{}.raw", "ptb.{}.txt", "{}.txt", "{}.tokens")
_NAMES = {"train": ["train"], "valid": ["valid", "validation", "val", "dev"], "test": ["test"]}


def find_text_files(root: str | Path, splits: tuple[str, ...]) -> dict[str, Path]:
    """Find the one file of each of ``splits`` ("train", "valid", "test") in the folder ``root``.

    It raises ``DataError`` if a split has no file, and ``DamagedData`` if it has several, or if the
    names follow different patterns, which may be different texts.
    """
    root = Path(root)
    with reading(root):
        present = sorted(entry.name for entry in root.iterdir() if entry.is_file())
    found, patterns = {}, set()
    for split in splits:
        known = {pattern.format(name): pattern for pattern in _PATTERNS for name in _NAMES[split]}
        candidates = [name for name in present if name in known]
        if not candidates:
            raise DataError(f"data.root={root}: has no {split} split: {_wanted(split, present)}")
        if len(candidates) > 1:
            names = ", ".join(candidates)
            raise DamagedData(f"{root}: several files of the {split} split; keep only one: {names}")
        found[split] = root / candidates[0]
        patterns.add(known[candidates[0]])
    if len(patterns) > 1:
        names = " and ".join(path.name for path in found.values())
        raise DamagedData(
            f"{root}: {names} follow different name patterns, so they may be different texts; "
            "rename the files of one text alike, such as train.txt and valid.txt"
        )
    return found


def _wanted(split: str, present: list[str]) -> str:
    wanted = ", ".join(pattern.format(split) for pattern in _PATTERNS)
    others = ", ".join(_NAMES[split][1:])
    also = f" (or {others} for {split})" if others else ""
    listed = ", ".join(present[:5]) + (", ..." if len(present) > 5 else "")
    return f"its file must be one of {wanted}{also}; found {listed or 'no file'}"


class EncodedText(TokenStreams):
    """Streams of the words of text files, which are encoded once into a cache.

    ``vocab_size`` is the number of entries padded to ``vocab_multiple``. The files are read block
    by block, and afterwards only the cache. So memory grows with the different words of a text, not
    with its length.

    Args:
        about: Name and files of the source in the record.
        texts: Files to encode; the last one is the held-out split.
        coder: Has the entries, and makes ids of the texts.
        hashes: SHA-256 (hex) of the contents of all files, which ``sha256`` covers.
    """

    def __init__(
        self,
        about: Description,
        texts: Sequence[TextFile],
        coder: Coder,
        hashes: Iterable[str],
        encoding: Encoding,
        windows: Windows,
        serving: Serving,
    ) -> None:
        self._coder, tokens, cache = coder, [], encoding.kept
        for number, text in enumerate(texts, 1):
            own: Key = {**coder.key, "kind": "tokens", "source": text.sha256}
            entry = cache.find(own)
            if entry is None:
                if len(texts) > 2 and (sys.stderr.isatty() or number % 10 == 0):
                    print(f"mprun: encoding shard {number} of {len(texts)}", file=sys.stderr)
                entry = cache.store(own, coder.encoded(text))
            tokens.append(entry)
        super().__init__(tokens[:-1], tokens[-1], windows, serving)
        self.vocab_size = padded(coder.entries, encoding.vocab_multiple)
        self.sha256 = hashlib.sha256("".join(hashes).encode()).hexdigest()
        self.description |= {
            **about,
            "eval_split": encoding.eval_split,
            "vocab_entries": coder.entries,
            "vocab_size": self.vocab_size,
            "rotate": windows.rotate,
            **coder.about,
        }

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Return all entries, in the order of their ids."""
        return self._coder.vocabulary


class Text(EncodedText):
    """The training split and one held-out split of a text below ``root``, as streams of words.

    Recognised names: wiki.{train,valid,test}.tokens or .raw (WikiText), ptb.{train,valid,test}.txt
    (Penn Treebank), {train,valid,test}.txt or .tokens; validation, val and dev stand for valid.
    The text is UTF-8, with blanks between words. ``<eos>`` follows every line, empty lines
    included, as in the recipes of AWD-LSTM (Merity et al., arXiv 1708.02182) and of the Penn
    Treebank: WikiText-2 then has 2,088,628 training tokens and 33,278 entries. ``lower``
    lower-cases the words.

    The vocabulary comes from the training split: ``<unk>`` (0), ``<eos>`` (1), then words by
    falling count, equal counts in alphabetical order. ``<unk>`` in the text is that entry; it
    stands for all words outside the vocabulary. ``vocab_limit`` caps the number of entries, None
    for no cap. With a ``tokenizer`` the entries are those of its file (`subwords`), and
    ``end_token`` follows every line; None: its own one.

    Each epoch starts elsewhere (``rotate``) or at the first word.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        vocab_limit: int | None,
        end_token: str | None,
        encoding: Encoding,
        windows: Windows,
        serving: Serving,
    ) -> None:
        kept, lower, tokenizer = encoding.kept, encoding.lower, encoding.tokenizer
        found = find_text_files(root, ("train", encoding.eval_split)).values()
        texts = [encoding.text(path) for path in found]
        hashes = [text.sha256 for text in texts]

        def vocabulary() -> tuple[str, ...]:
            words = texts[0].words(END_OF_LINE)
            return build_vocabulary(words, (UNKNOWN, END_OF_LINE), vocab_limit)

        if tokenizer is None:
            # Words depend on the training split alone, so both held-out splits share them.
            key: Key = {"train": hashes[0], "lower": lower, "vocab_limit": vocab_limit}
            coder: Coder = Words(kept, key, vocabulary, UNKNOWN, END_OF_LINE)
        else:
            coder = subwords(tokenizer, kept, lower, end_token=end_token)
            hashes.append(coder.about["tokenizer_sha256"])
        about: Description = {"name": "text", "files": ", ".join(path.name for path in found)}
        super().__init__(about, texts, coder, hashes, encoding, windows, serving)
        if tokenizer is not None:  # with it a loss becomes bits per byte of the text
            share = texts[-1].path.stat().st_size / self._eval_ring.tokens
            self.description["eval_bytes_per_token"] = share


TRAINING_SHARDS = 99
_CORPUS = "1-billion-word-language-modeling-benchmark-r13output"
_TRAINING = "training-monolingual.tokenized.shuffled"
_HELD_OUT = "heldout-monolingual.tokenized.shuffled"
_HELD_OUT_SHARD = {"valid": 1, "test": 0}
_SENTENCE, _UNKNOWN = "<S>", "<UNK>"
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
        many = f"{len(missing)} of {TRAINING_SHARDS} training shards are missing"
        raise DamagedData(f"{missing[0]}: no such file; {many}")
    number = _HELD_OUT_SHARD[eval_split]
    held_out = folder / _HELD_OUT / f"news.en.heldout-{number:05}-of-00050"
    if not held_out.is_file():
        raise DamagedData(f"{held_out}: no such file; it must contain the {eval_split} split")
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
        f"<UNK>): copy it there, or name it in data.vocabulary"
    )


def read_vocabulary(file: TextFile, required: tuple[str, ...]) -> tuple[str, ...]:
    """Read a vocabulary file in UTF-8: one word a line, alone or followed by its count.

    ``DamagedData`` names file and line if it cannot be read, its hash is another, a line has
    another form or repeats a word, or one of ``required`` is missing.
    """
    words: dict[str, None] = {}
    path = file.path
    for number, line in enumerate(chain.from_iterable(file.lines()), 1):
        fields = line.split()
        if not 1 <= len(fields) <= 2 or not all(count.isdecimal() for count in fields[1:]):
            raise DamagedData(f"{path}: line {number} must be one word, alone or with its count")
        if fields[0] in words:
            raise DamagedData(f"{path}: line {number} repeats {shortened(fields[0], 50)!r}")
        words[fields[0]] = None
    missing = [word for word in required if word not in words]
    if missing:
        raise DamagedData(f"{path}: lacks {' and '.join(missing)}, which the text needs")
    return tuple(words)


def _corpus_folder(root: Path) -> Path:
    for folder in (root, root / _CORPUS):
        if (folder / _TRAINING).is_dir():
            return folder
    where = f"no folder {_TRAINING}, here or in {_CORPUS}"
    raise DataError(f"data.root={root}: {where}: unpack the corpus there")


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
    have shuffled its sentences, so a state carried across them carries no context. The published
    code also reshuffles the sentences of a shard in each epoch and deals them out to the streams
    one by one. The cache takes 3.3 GB. An interrupted preparation continues where it stopped.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        vocabulary: str | Path | None,
        encoding: Encoding,
        windows: Windows,
        serving: Serving,
    ) -> None:
        shards, held_out = find_shards(root, encoding.eval_split)
        source = find_vocabulary(root, vocabulary)
        listed, *texts = map(encoding.text, (source, *shards, held_out))
        words = partial(read_vocabulary, listed, (_SENTENCE, _UNKNOWN))
        key: Key = {"vocabulary": listed.sha256}
        files = f"{len(shards)} training shards, {held_out.name}, {source.name}"
        super().__init__(
            {"name": "lm1b", "files": files},
            texts,
            Words(encoding.kept, key, words, _UNKNOWN, _SENTENCE, leads=True),
            [file.sha256 for file in (listed, *texts)],
            encoding,
            replace(windows, rotate=False, shuffle_files=True, overlap=1),
            serving,
        )


_WORD = re.compile(r"\w+|[^\w\s]")


class DocsText(TokenStreams):
    """The topics of ``pydoc_data.topics``, sorted by name; about half a million characters.

    The last 10 % of the text, from the start of a line on, is held out; the vocabulary is made
    from the rest, as that of `Text`. ``level="word"``: each line is lower-cased and split into runs
    of letters, digits and underscores, and single other characters. Blanks are dropped, and each
    line that is not blank ends in ``<eos>``. ``level="char"``: every character is a token, case
    kept, and there is no ``<eos>``.

    The text differs between Python versions: compare only runs of equal ``sha256`` (of the whole
    text in UTF-8). A Python without ``pydoc_data`` raises ``DataError``.
    """

    def __init__(
        self,
        level: str,
        vocab_limit: int | None,
        vocab_multiple: int,
        windows: Windows,
        serving: Serving,
    ) -> None:
        text = load_text()
        split: Callable[[str], list[str]] = split_words if level == "word" else list
        special = (UNKNOWN, END_OF_LINE) if level == "word" else (UNKNOWN,)
        train, held_out = map(split, split_text(text))
        self.vocabulary = build_vocabulary([train], special, vocab_limit)
        self.vocab_size = padded(len(self.vocabulary), vocab_multiple)
        ids = WordIds(self.vocabulary, UNKNOWN)
        tokens = [torch.from_numpy(block) for block in ids.encoded([train, held_out])]
        super().__init__(tokens[:1], tokens[1], windows, serving)
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.description |= {
            "name": "docs_text",
            "origin": "pydoc_data.topics",
            "level": level,
            "vocab_entries": len(self.vocabulary),
            "vocab_size": self.vocab_size,
        }


def load_text() -> str:
    """Return all topics joined by newlines; DataError if this Python lacks ``pydoc_data``."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "the documentation text needs the module pydoc_data.topics, which this Python lacks: "
            "install the standard library in full, or choose other data"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))


def split_text(text: str) -> tuple[str, str]:
    """Split into training and held-out text: the last 10 %, from the next start of a line on."""
    position = int(len(text) * 0.9)
    cut = text.find("\n", position) + 1 or position
    return text[:cut], text[cut:]


def split_words(text: str) -> list[str]:
    """Return the words of `DocsText`."""
    tokens = []
    for line in text.lower().splitlines():
        words = _WORD.findall(line)
        if words:
            tokens += words
            tokens.append(END_OF_LINE)
    return tokens
