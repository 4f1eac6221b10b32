"""Speech: utterances with their texts, and the network that transcribes them."""

from collections.abc import Iterator

from mprun.config.components.images import prefetch
from mprun.config.fields import below_root, count, positive, ranged, setting
from mprun.config.registry import DataConfig, ModelConfig, network, source, task
from mprun.config.schema import RunConfig
from mprun.record.metric_facts import LOSS, Metric

task(
    "speech",
    builder="mprun.extensions.speech.task:Speech",
    metrics=(LOSS, Metric("cer", higher_is_better=False, unit="points")),
    family="utterances",
    network_kind="speech recogniser",
    sizes=("num_symbols",),
    overlaps=True,
)


def _looking_ahead(model: "DeepSpeech2Config", config: RunConfig) -> Iterator[str]:
    if model.bidirectional and model.row_convolution:
        yield (
            f"model.row_convolution={model.row_convolution}: looks ahead for layers that do not; "
            "must be 0 with model.bidirectional=true"
        )


@network(
    "deep_speech2",
    task="speech",
    builder="mprun.extensions.speech.deep_speech:DeepSpeech2",
    rules=(_looking_ahead,),
    needs=("frequencies", "num_symbols"),
    recurrent=True,
)
class DeepSpeech2Config(ModelConfig):
    """Convolutions, recurrent layers and CTC of Amodei et al., in one or both directions."""

    channels: int = count(32, "Number of channels of each convolution")
    frequency_kernels: list[int] = count(
        lambda: [41, 21], "Kernel height of each convolution, in frequency rows"
    )
    time_kernel: int = count(11, "Kernel width of each convolution, in frames")
    frequency_stride: int = count(2, "Stride of each convolution in frequency rows")
    time_stride: int = count(
        2, "Stride of the first convolution in frames; the others have stride 1"
    )
    hidden_size: int = count(2560, "Number of units of each recurrent layer in each direction")
    num_layers: int = ranged(3, "Number of GRU layers", at_least=1, at_most=1000)
    bidirectional: bool = setting(
        False, "Whether recurrent layers add the outputs of both directions"
    )
    row_convolution: int = ranged(
        20,
        "Number of frames that the row convolution reads, the current and later ones; 0: none",
        at_least=0,
    )
    fully_connected: int = ranged(
        2560, "Number of units of the layer before the last; 0: no such layer", at_least=0
    )
    init_range: float | None = positive(
        None,
        "Weights and biases start uniformly between -init_range and init_range; null: torch's "
        "default",
    )


@source(
    "digit_strips",
    builder="mprun.extensions.speech.digit_strips:DigitStrips",
    shapes="mprun.extensions.speech.digit_strips:shapes",
    family="utterances",
)
class DigitStripsConfig(DataConfig):
    """Strips of three to five handwritten digits, read column by column instead of audio."""


@source(
    "speech_manifest",
    builder="mprun.extensions.speech.speech_manifest:SpeechManifest",
    shapes="mprun.extensions.speech.speech_manifest:shapes",
    family="utterances",
    on_disk=True,
    decodes=True,
    several_shapes=True,
)
class SpeechManifestConfig(DataConfig):
    """Audio files and their texts, listed by a manifest for training and one for evaluation.

    A manifest is JSON lines, {"audio_filepath": ..., "text": ..., "duration": ...}, or CSV with
    such a header; names of files are relative to its folder. A folder of LibriSpeech, or a pattern
    of several, is as good as one. Features are the logarithm of a spectrogram, standardised over
    each utterance.
    """

    train_manifest: str | None = below_root(
        "Manifest or LibriSpeech folders for training; null: train.json, .jsonl, .csv or train-*"
    )
    eval_manifest: str | None = below_root(
        "Manifest or LibriSpeech folders for evaluation; null: dev, val, valid, or dev-*"
    )
    sample_rate: int = ranged(
        16000,
        "Number of samples per second that every audio file must have",
        at_least=1000,
        at_most=192_000,
    )
    window_ms: float = ranged(
        20.0, "Length of a frame of the spectrogram in milliseconds", above=0.0, at_most=1000.0
    )
    hop_ms: float = ranged(
        10.0, "Distance between the starts of two frames in milliseconds", above=0.0, at_most=1000.0
    )
    alphabet: str = setting(
        "'abcdefghijklmnopqrstuvwxyz ", "Characters that a text may contain, without CTC's blank"
    )
    alphabet_file: str | None = below_root(
        "File below root with one character per line, instead of alphabet; null: no file"
    )
    lower: bool = setting(True, "Lower-case all texts")
    max_seconds: float | None = positive(
        None, "Longest utterance used for training, in seconds; null: no limit"
    )
    prefetch: int = prefetch()
