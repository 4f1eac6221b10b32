"""Language models and their text: a batch is a piece of each of several streams of tokens."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from mprun.config.fields import count, from_zero, one_of, place, positive, ranged, setting, share
from mprun.config.registry import DataConfig, ModelConfig, network, source, task
from mprun.config.schema import RunConfig
from mprun.record.metric_facts import LOSS, PERPLEXITY

task(
    "language_model",
    builder="mprun.tasks.supervised:LanguageModel",
    metrics=(LOSS, PERPLEXITY),
    family="text",
    network_kind="language model",
    sizes=("vocab_size",),
    streams=True,
    overlaps=True,
    of_own_networks=True,
)

VOCAB_LIMIT = "Number of most frequent words to keep; null: all"
_EVAL_TOKENS = "Number of tokens of eval_split to evaluate, from its start; null: all"

# Fields that several classes share.
time_reduction = partial(
    one_of,
    "mean sum",
    "Reduction of the training loss: mean over tokens, or sum over time and mean over streams",
)
_vocab_size = partial(
    ranged,
    None,
    "Number of words in embedding and softmax; null: as many as in the data",
    at_least=2,
)
_sequence = partial(count, doc="Number of tokens that a step reads from each stream")
_vocab_limit = partial(ranged, None, VOCAB_LIMIT, at_least=3, at_most=1_000_000)
vocab_multiple = partial(count, doc="Pad the vocabulary to a multiple of this number")
eval_split = partial(one_of, "valid test", "Split to evaluate")
tokenizer = partial(
    place, "Subword file: tokenizer.json (tokenizers) or *.model (sentencepiece); null: words"
)
_CACHE = "mprun in the user's cache folder"
cache = partial(place, f"Cache folder for encoded text; null: {_CACHE}", unset=_CACHE)


def _sampling(model: "LSTMConfig", config: RunConfig) -> Iterator[str]:
    optim = config.optim
    if model.sampled_softmax is None:
        for key in ("embedding_gradient_factor", "output_gradient_factor"):
            if (factor := getattr(model, key)) != 1.0:
                yield f"model.{key}={factor:g}: only with model.sampled_softmax"
        return
    if optim.name not in ("sgd", "adagrad") or optim.momentum or optim.weight_decay:
        allowed = "adagrad or sgd without momentum, no weight decay"
        given = f"optim={optim.name} model.sampled_softmax={model.sampled_softmax}"
        yield f"{given}: gradients of its tables are sparse (allowed: {allowed})"
    if (dtype := config.precision.reduce_dtype) is not None:
        yield f"precision.reduce_dtype={dtype}: must be null with model.sampled_softmax"


@network(
    "lstm_lm",
    task="language_model",
    builder="mprun.models.lstm:lstm",
    rules=(_sampling,),
    needs=("vocab_size",),
    recurrent=True,
    zero_state=True,
)
class LSTMConfig(ModelConfig):
    """Word or character language model; sizes in units, `projection_size` 0 means none."""

    vocab_size: int | None = _vocab_size()
    embedding_size: int = count(200, "Size of the embedding of a word")
    hidden_size: int = count(200, "Number of units of each LSTM layer")
    num_layers: int = count(2, "Number of LSTM layers", at_most=1000)
    projection_size: int = from_zero(
        0, "Size to which the output of each LSTM layer is projected; 0: no projection"
    )
    dropout: float = share(
        0.0,
        "Dropout probability of embeddings, between layers and of outputs; not between time steps",
    )
    init_range: float = positive(
        0.1, "Parameters are initialised uniformly between -init_range and init_range"
    )
    forget_bias: float = ranged(0.0, "Number added to the initial input bias of forget gates")
    pad_to_multiple: int = count(
        1, "Round sizes up to a multiple of this number; Tensor Cores need 8"
    )
    time_reduction: str = time_reduction()
    sampled_softmax: int | None = count(
        None,
        "Number of words drawn per step for a sampled softmax, only in training; null: "
        "full softmax",
    )
    embedding_gradient_factor: float = positive(
        1.0, "With sampled_softmax: factor on the gradient of the embedding (bigLSTM)"
    )
    output_gradient_factor: float = positive(
        1.0, "With sampled_softmax: factor on the gradient of the softmax"
    )

    @property
    def sampled(self) -> bool:
        """True if gradients of its tables are sparse, and their rows updated only where used."""
        return self.sampled_softmax is not None


def _heads(model: "GPTConfig", config: RunConfig) -> Iterator[str]:
    heads, kv_heads = model.num_heads, model.kv_heads
    if model.hidden_size % heads:
        yield f"model.num_heads={heads}: must divide model.hidden_size ({model.hidden_size})"
    if kv_heads is not None and heads % kv_heads:
        yield f"model.kv_heads={kv_heads}: must divide model.num_heads ({heads})"
    if model.positions == "rotary" and model.hidden_size // heads % 2:
        odd = f"{model.hidden_size // heads} (model.hidden_size / model.num_heads)"
        yield f"model.positions=rotary: rotates pairs of a head's units, of {odd}; must be even"
    length = getattr(config.data, "sequence_length", None)
    context = model.context_length
    if length and context is not None and context < length:
        yield f"model.context_length={context}: must be >= data.sequence_length ({length})"


@network(
    "gpt",
    task="language_model",
    builder="mprun.models.gpt:GPT",
    rules=(_heads,),
    needs=("vocab_size", "context_length"),
    carries_state=False,
    zero_state=True,
    blocks="blocks",
)
class GPTConfig(ModelConfig):
    """Decoder-only transformer: GPT-2 as in nanoGPT, with parts of Llama; without dropout."""

    vocab_size: int | None = _vocab_size()
    context_length: int | None = count(
        None, "Largest number of tokens in a window; null: data.sequence_length"
    )
    hidden_size: int = ranged(128, "Number of units of the residual stream", at_least=2)
    num_layers: int = count(2, "Number of blocks", at_most=1000)
    num_heads: int = count(4, "Number of attention heads; each takes an equal share of hidden_size")
    kv_heads: int | None = count(
        None, "Number of heads of keys and values; null: as many as num_heads"
    )
    norm: str = one_of("layer rms", "Normalisation layer: LayerNorm, or RMSNorm as in Llama")
    positions: str = one_of(
        "learned rotary",
        "Position encoding: learned and added to embeddings, or rotary on queries and keys",
    )
    mlp: str = one_of(
        "gelu swiglu",
        "Type of MLP; gelu: 4 hidden units per input; swiglu: 8/3, rounded to a multiple of 64",
    )
    qk_norm: bool = setting(
        False, "Whether queries and keys of each head are normalised before their product"
    )
    attention: str = one_of(
        "fused manual",
        "fused: torch's kernel; manual: separate operations, where scores above 65,504 overflow "
        "FP16",
    )
    bias: bool = setting(
        False, "Whether linear layers and LayerNorm have biases, as in OpenAI's GPT-2"
    )
    time_reduction: str = time_reduction()


def _experts(model: "GPTMoEConfig", config: RunConfig) -> Iterator[str]:
    if model.top_k > model.num_experts:
        most = f"must be <= model.num_experts ({model.num_experts})"
        yield f"model.top_k={model.top_k}: {most}"
    if model.dense_layers >= model.num_layers:
        least = f"must be < model.num_layers ({model.num_layers})"
        yield f"model.dense_layers={model.dense_layers}: {least}"
    if model.shared_gate and not model.shared_size:
        yield "model.shared_gate=true: needs model.shared_size > 0"


@network(
    "gpt_moe",
    task="language_model",
    builder="mprun.models.gpt_moe:GPTMoE",
    rules=(_heads, _experts),
    needs=("vocab_size", "context_length"),
    carries_state=False,
    zero_state=True,
    blocks="blocks",
)
class GPTMoEConfig(GPTConfig):
    """The transformer of `gpt` with a mixture of experts in place of MLPs."""

    num_experts: int = ranged(8, "Number of experts in each layer", at_least=2)
    top_k: int = count(2, "Number of experts that each token uses")
    expert_size: int = count(192, "Number of hidden units of each expert, which is a gated MLP")
    dense_layers: int = from_zero(
        0, "How many of the first blocks have an MLP (see model.mlp) instead of experts"
    )
    capacity: float | None = positive(
        None,
        "Token limit per expert (1: equal share), the rest is dropped; null: no limit, host waits "
        "for GPU",
    )
    shared_size: int = from_zero(
        0, "Number of hidden units of an expert that every token uses; 0: no such expert"
    )
    shared_gate: bool = setting(
        False, "Whether the shared expert is multiplied by a gate for each token"
    )
    scoring: str = one_of(
        "softmax sigmoid", "Function that scores the experts; sigmoid: as in DeepSeek-V3"
    )
    renormalise: bool = setting(True, "Whether the weights of a token's experts add up to 1")
    balancing: str = one_of(
        "auxiliary bias none",
        "auxiliary: an additional loss; bias: a bias per expert, used only to choose "
        "experts, no gradient",
    )
    balance_factor: float = from_zero(
        0.01, "With balancing=auxiliary: factor on the additional loss"
    )
    bias_rate: float = from_zero(
        0.001, "With balancing=bias: amount by which each update changes a bias"
    )
    router: str = one_of(
        "fp32 mode", "Dtype of routers: FP32 in every mode, or the dtype of the mode"
    )

    @property
    def why_no_graph(self) -> str | None:
        reason = "model.capacity=null: only the device knows how many tokens each expert has"
        return reason if self.capacity is None else None


_text = partial(source, family="text")


@_text("docs_text", builder="mprun.data.text:DocsText")
class DocsTextConfig(DataConfig):
    """The text of CPython's documentation (`pydoc_data.topics`)."""

    level: str = one_of("word char", "Kind of token: a word or a character")
    sequence_length: int = _sequence(20)
    vocab_limit: int | None = _vocab_limit()
    vocab_multiple: int = vocab_multiple(8)


@_text("synthetic_tokens", builder="mprun.data.token_streams:SyntheticTokens")
class SyntheticTokensConfig(DataConfig):
    """Random tokens: plumbing and speed, nothing to learn."""

    vocab_size: int = ranged(1000, "Number of different tokens", at_least=2)
    sequence_length: int = _sequence(20)
    train_tokens: int = ranged(100_000, "Number of training tokens to generate", at_least=2)
    eval_tokens: int = ranged(10_000, "Number of held-out tokens to generate", at_least=2)


def by_tokenizer(data: Any, config: RunConfig) -> Iterator[str]:
    """Refuse what is read only with data.tokenizer, or only without it."""
    for key in ("end_token", "vocab_limit", "source_vocab_limit", "target_vocab_limit"):
        use = "with" if key == "end_token" else "without"
        if getattr(data, key, None) is not None and (use == "with") is (data.tokenizer is None):
            yield f"data.{key}={getattr(data, key)}: only {use} data.tokenizer"


@_text("text", builder="mprun.data.text:Text", on_disk=True, rules=(by_tokenizer,))
class TextConfig(DataConfig):
    """Text files below `root` (train, valid, test), words between blanks or subwords."""

    sequence_length: int = _sequence(35)
    tokenizer: str | None = tokenizer()
    end_token: str | None = setting(
        None, "With tokenizer: token added after every line; null: </s>, <|endoftext|> or similar"
    )
    vocab_limit: int | None = _vocab_limit()
    vocab_multiple: int = vocab_multiple(8)
    lower: bool = setting(False, "Lower-case all words")
    eval_split: str = eval_split()
    rotate: bool = setting(
        True, "Whether each epoch starts at a random place in the text; false: at its beginning"
    )
    eval_tokens: int | None = ranged(None, _EVAL_TOKENS, at_least=32)
    cache: str | None = cache()


@_text("lm1b", builder="mprun.data.text:Lm1b", on_disk=True)
class Lm1bConfig(DataConfig):
    """One Billion Word: shards of shuffled sentences and the conventional vocabulary file."""

    # Entries of that file (Jozefowicz et al., arXiv 1602.02410, section 4.1).
    vocab_limit = 793_470
    sequence_length: int = _sequence(20)
    vocabulary: str | None = place(
        "Vocabulary file, one word per line; null: the vocabulary file of the corpus in data.root"
    )
    vocab_multiple: int = vocab_multiple(8)
    eval_split: str = eval_split()
    eval_tokens: int | None = ranged(None, _EVAL_TOKENS, at_least=32)
    cache: str | None = cache()


@_text("token_files", builder="mprun.data.token_files:TokenFiles", on_disk=True)
class TokenFilesConfig(DataConfig):
    """Files of tokens below `root`, already encoded: nanoGPT's or llm.c's."""

    sequence_length: int = _sequence(1024)
    vocab_size: int = ranged(
        50_257, "Number of different tokens; larger tokens are refused", at_least=2, at_most=2**31
    )
    vocab_multiple: int = vocab_multiple(64)
    dtype: str = one_of(
        "auto uint16 uint32 int32",
        "Integer type of tokens; auto: as in the file's header, otherwise the narrowest that fits",
    )
    rotate: bool = setting(
        True, "Whether each epoch starts at a random place in the tokens; false: at their beginning"
    )
    eval_tokens: int | None = ranged(
        None, "Number of held-out tokens to evaluate, from their start; null: all", at_least=32
    )
    cache: str | None = place(
        f"Cache folder for hashes of token files; null: {_CACHE}", unset=_CACHE
    )
