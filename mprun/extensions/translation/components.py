"""Translation: sentence pairs, and the network that learns from them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from mprun.config.components.language import (
    VOCAB_LIMIT,
    by_tokenizer,
    cache,
    eval_split,
    tokenizer,
    vocab_multiple,
)
from mprun.config.fields import count, is_label, positive, ranged, setting, share
from mprun.config.registry import DataConfig, ModelConfig, network, source, task
from mprun.config.schema import RunConfig
from mprun.errors import shortened
from mprun.record.metric_facts import LOSS, PERPLEXITY, Metric

task(
    "translation",
    builder="mprun.extensions.translation.task:Translation",
    metrics=(LOSS, PERPLEXITY, Metric("bleu", higher_is_better=True, unit="points")),
    family="sentence_pairs",
    network_kind="translation model",
    sizes=("source_vocab_size", "target_vocab_size"),
)


@network(
    "seq2seq",
    task="translation",
    builder="mprun.extensions.translation.seq2seq:Seq2Seq",
    needs=("source_vocab_size", "target_vocab_size"),
    recurrent=True,
)
class Seq2SeqConfig(ModelConfig):
    """LSTM encoder, its first layer bidirectional, attention and LSTM decoder; sizes in units."""

    source_vocab_size: int | None = ranged(
        None, "Number of words in the source embedding; null: as many as the data has", at_least=4
    )
    target_vocab_size: int | None = ranged(
        None,
        "Number of words in the target embedding and softmax; null: as many as the data has",
        at_least=4,
    )
    embedding_size: int = count(1024, "Size of the embedding of a word")
    hidden_size: int = count(1024, "Number of units of each LSTM layer and direction")
    num_layers: int = ranged(
        3,
        "Number of layers in the encoder; the decoder has the same number",
        at_least=1,
        at_most=1000,
    )
    dropout: float = share(
        0.0, "Dropout probability after the embeddings, between LSTM layers and before the softmax"
    )
    init_range: float = positive(
        0.1, "Parameters are initialised uniformly between -init_range and init_range"
    )


@dataclass(slots=True)
class SentencePairsConfig(DataConfig):
    """The fields of every source of sentence pairs."""

    max_length: int = ranged(
        50,
        "Number of words per sentence after padding, including the end; longer pairs are left out",
        at_least=2,
        at_most=1000,
    )
    vocab_multiple: int = vocab_multiple(8)


@source(
    "unicode_names",
    builder="mprun.extensions.translation.sentence_pairs:UnicodeNames",
    family="sentence_pairs",
)
class UnicodeNamesConfig(SentencePairsConfig):
    """Names of Unicode's characters and of their components (`unicodedata`)."""


def _languages(data: "ParallelTextConfig", config: RunConfig) -> Iterator[str]:
    for key in ("source_language", "target_language"):
        if not is_label(language := getattr(data, key)):
            given = f"data.{key}={shortened(language, 70)!r}"
            yield f"{given}: must be 1 to 64 of letters, digits, . _ and -"
    if data.source_language == data.target_language:
        yield f"data.target_language={data.target_language}: must differ from data.source_language"


_vocab_limit = partial(ranged, None, at_least=5, at_most=1_000_000)
_LIMIT = f"{VOCAB_LIMIT[0].lower()}{VOCAB_LIMIT[1:]}"


@source(
    "parallel_text",
    builder="mprun.extensions.translation.sentence_pairs:ParallelText",
    rules=(_languages, by_tokenizer),
    family="sentence_pairs",
    on_disk=True,
)
class ParallelTextConfig(SentencePairsConfig):
    """Two aligned text files below `root` a split, or one with two columns; words or subwords."""

    source_language: str = setting(
        "en", "Ending of the names of files in the source language, such as en"
    )
    target_language: str = setting(
        "fr", "Ending of the names of files in the target language, such as de"
    )
    tokenizer: str | None = tokenizer()
    source_vocab_limit: int | None = _vocab_limit(doc=f"Source language: {_LIMIT}")
    target_vocab_limit: int | None = _vocab_limit(doc=f"Target language: {_LIMIT}")
    lower: bool = setting(False, "Lower-case all words")
    eval_split: str = eval_split()
    cache: str | None = cache()
