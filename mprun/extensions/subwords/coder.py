"""Subword tokens of lines of text, by a file of Hugging Face's tokenizers or of sentencepiece."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mprun.data.cache import Cache
from mprun.data.source import DataError
from mprun.data.vocabulary import Coder, TextFile

# The first of these that a tokenizer has follows every line, unless another one is named.
_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")
_Encode = Callable[[list[str]], list[list[int]]]


class _Library(NamedTuple):
    version: str
    vocabulary: tuple[str, ...]  # in the order of ids; those that no token has are empty
    encode: _Encode
    loses: Callable[[str], bool]  # whether a character gets no token, although it is no blank


class Subwords(Coder):
    """The tokenizer of a file, which its content tells: JSON is tokenizers', else sentencepiece's.

    Each line is encoded by itself as the library does it, without the tokens that a template would
    add, truncation, padding or dropout. Special tokens that stand in the text are recognised.
    ``symbols`` stand before the file's entries. Without them a token follows every line in
    `encoded`: ``end_token``, None for a usual one. ``lower`` is for the key alone. A tokenizer
    without an entry for unknown characters would drop them silently: ``DataError`` names the first.

    Raises:
        ValueError: There is no such file or token, neither library can read the file, or the one
            that can is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        cache: Cache,
        lower: bool,
        *,
        symbols: tuple[str, ...] = (),
        end_token: str | None = None,
    ) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"tokenizer={path} is not allowed: no such file")
        sha256 = cache.content_sha256(self.path)
        content = self.path.read_bytes()
        load = _of_tokenizers if content.lstrip()[:1] == b"{" else _of_sentencepiece
        name = load.__name__.removeprefix("_of_")
        try:
            self._library = load(content)
        except ImportError as error:
            lacks = f"is read by {name} (pip install 'mprun[subword]'): {error}"
            raise ValueError(f"tokenizer={path}: {lacks}") from error
        except Exception as error:  # the libraries raise Exception itself, or RuntimeError
            why = " ".join(str(error).split())
            raise ValueError(
                f"tokenizer={path}: must be a tokenizer.json or a model of sentencepiece ({name}: "
                f"{why})"
            ) from error
        self.vocabulary, self._shift = symbols + self._library.vocabulary, len(symbols)
        self.entries = len(self.vocabulary)
        self._seen: set[str] = set()
        version, ends = self._library.version, {}
        if not symbols:
            ends["end_token"] = self._end_token(end_token)
            self._end = [self.vocabulary.index(ends["end_token"])]
        self.key = {"tokenizer": sha256, "library": version, "lower": lower, **ends}
        self.about = {
            "tokenizer": f"{self.path.name}, {version}",
            "tokenizer_sha256": sha256,
            **ends,
        }

    def _end_token(self, named: str | None) -> str:
        ends = _ENDS if named is None else (named,)
        found = next((one for one in ends if one in self.vocabulary), None)
        if found is None:
            lacks = f"{self.path.name} has no {', '.join(ends)}; name the token that ends a line"
            raise ValueError(f"end_token={named}: {lacks}")
        return found

    def ids(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line."""
        lines = [line.removesuffix("\r") for line in lines]
        new = set[str]().union(*lines) - self._seen
        self._seen |= new
        try:
            if lost := sorted(filter(self._library.loses, new)):
                code = f"U+{ord(lost[0]):04X}"
                raise ValueError(f"the tokenizer would silently drop {lost[0]!r} ({code})")
            found = self._library.encode(lines)
        except Exception as error:
            why = " ".join(str(error).split())
            raise DataError(f"data.tokenizer={self.path}: cannot encode the text: {why}") from error
        if shift := self._shift:
            return [[place + shift for place in line] for line in found]
        return found

    def encoded(self, text: TextFile) -> Iterator[np.ndarray]:
        for lines in text.lines():
            found = (own + self._end for own in self.ids(lines))
            yield np.fromiter(chain.from_iterable(found), "<i4")


def _of_tokenizers(content: bytes) -> _Library:
    import tokenizers

    made = tokenizers.Tokenizer.from_str(content.decode())
    made.no_truncation()
    made.no_padding()
    if getattr(made.model, "dropout", None) is not None:
        made.model.dropout = None
    names = {place: name for name, place in made.get_vocab().items()}

    def encode(lines: list[str]) -> list[list[int]]:
        return [one.ids for one in made.encode_batch_fast(lines, add_special_tokens=False)]

    def loses(character: str) -> bool:
        text = made.normalizer.normalize_str(character) if made.normalizer else character
        kept = made.pre_tokenizer.pre_tokenize_str(text) if made.pre_tokenizer else text
        return bool(kept and text.strip()) and not encode([character])[0]

    vocabulary = tuple(names.get(place, "") for place in range(max(names, default=-1) + 1))
    return _Library(f"tokenizers {tokenizers.__version__}", vocabulary, encode, loses)


def _of_sentencepiece(content: bytes) -> _Library:
    import sentencepiece

    made = sentencepiece.SentencePieceProcessor()
    if not content:
        raise ValueError("0 bytes")
    made.LoadFromSerializedProto(content)
    vocabulary = tuple(map(made.id_to_piece, range(made.get_piece_size())))
    version = f"sentencepiece {sentencepiece.__version__}"
    return _Library(version, vocabulary, made.encode, lambda character: False)
