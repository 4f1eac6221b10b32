"""CPython's own documentation text: a real language-model corpus without a download."""

import hashlib
import re
from collections.abc import Iterable, Iterator

import torch

from mprun.data.source import DataError
from mprun.data.token_streams import EVAL_STREAMS, TokenBatch, TokenStreams
from mprun.data.vocabulary import END_OF_LINE, UNKNOWN, build_vocabulary, joined_words

HELD_OUT_SHARE = 0.1
_WORD = re.compile(r"\w+|[^\w\s]")


class DocsText:
    """The topics of ``pydoc_data.topics``, sorted by name; about half a million characters.

    The last 10 % of the text, from the start of a line on, is held out; the vocabulary is made
    from the rest. ``level="word"``: each line is lower-cased and split into runs of letters,
    digits and underscores, and single other characters; blanks are dropped, each line that is not
    blank ends in ``<eos>``. ``level="char"``: every character is a token, case kept. Ids are in
    order of falling frequency after ``<unk>`` (0) and, for words, ``<eos>`` (1).

    ``vocab_limit`` caps the number of entries, these two included, None for no cap; tokens outside
    are ``<unk>``. ``vocab_size`` is the number of entries padded to ``vocab_multiple``; the padding
    ids never occur.

    Batches are ``(tokens, targets)``, int64 ``[time, batch]``, as ``TokenStreams`` describes;
    evaluation always runs 16 streams, whatever ``batch_size``. The text differs between Python
    versions: compare runs of equal ``sha256`` (of the whole text in UTF-8) only.

    Raises ``ValueError`` for an argument out of range, ``DataError`` where Python comes without
    ``pydoc_data``.
    """

    def __init__(
        self,
        level: str,
        batch_size: int,
        sequence_length: int,
        seed: int,
        device: torch.device | str,
        vocab_limit: int | None = None,
        vocab_multiple: int = 8,
    ) -> None:
        if level not in ("word", "char"):
            raise ValueError(f"level={level!r} is not allowed: 'word' or 'char'")
        if vocab_limit is not None and vocab_limit < 3:
            raise ValueError(f"vocab_limit={vocab_limit} is not allowed: 3 or more, or None")
        if vocab_multiple < 1:
            raise ValueError(f"vocab_multiple={vocab_multiple} is not allowed: 1 or more")
        text = load_text()
        split = _split_words if level == "word" else list
        special = (UNKNOWN, END_OF_LINE) if level == "word" else (UNKNOWN,)
        train_text, held_out_text = split_text(text)
        train, held_out = split(train_text), split(held_out_text)
        self.level = level
        self.vocabulary: tuple[str, ...] = build_vocabulary(train, special, vocab_limit)
        self.vocab_size = -(-len(self.vocabulary) // vocab_multiple) * vocab_multiple
        self._ids = {token: i for i, token in enumerate(self.vocabulary)}
        self._streams = TokenStreams(
            self._encode(train),
            self._encode(held_out),
            batch_size,
            sequence_length,
            seed,
            device,
        )
        self.batches_per_epoch = self._streams.batches_per_epoch
        self.samples_per_batch = batch_size * sequence_length
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.description: dict[str, str | int | float] = {
            "name": "docs_text",
            "origin": "pydoc_data.topics",
            "level": level,
            "train_samples": len(train),
            "eval_samples": len(held_out),
            "eval_streams": EVAL_STREAMS,
            "sequence_length": sequence_length,
            "vocab_entries": len(self.vocabulary),
            "vocab_size": self.vocab_size,
        }

    def train_batch(self, index: int) -> TokenBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        return self._streams.train_batch(index)

    def eval_batches(self) -> Iterator[TokenBatch]:
        """The held-out text in order; the last batch may be shorter in time."""
        return self._streams.eval_batches()

    def encode(self, text: str) -> torch.Tensor:
        """Token ids of ``text``, int64 ``[tokens]`` on the CPU."""
        return self._encode(_split_words(text) if self.level == "word" else text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``: exact for characters, words joined by blanks and ended by lines."""
        tokens = [self.vocabulary[i] for i in ids]
        if self.level == "char":
            return "".join(tokens)
        return joined_words(tokens, END_OF_LINE)

    def _encode(self, tokens: Iterable[str]) -> torch.Tensor:
        return torch.tensor([self._ids.get(token, 0) for token in tokens], dtype=torch.int64)


def load_text() -> str:
    """All topics joined by newlines, in the order of their names.

    Raises ``DataError`` where Python comes without ``pydoc_data``, as some distributions do.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "the documentation text needs the module pydoc_data.topics, which this Python lacks: "
            "install the standard library in full, or choose other data"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))


def split_text(text: str) -> tuple[str, str]:
    """``(training, held-out)``: the last 10 % by position, from the next start of a line on."""
    position = int(len(text) * (1 - HELD_OUT_SHARE))
    cut = text.find("\n", position) + 1 or position
    return text[:cut], text[cut:]


def _split_words(text: str) -> list[str]:
    tokens = []
    for line in text.lower().splitlines():
        words = _WORD.findall(line)
        if words:
            tokens += words
            tokens.append(END_OF_LINE)
    return tokens
