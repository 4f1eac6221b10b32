"""The results of Micikevicius et al. (Mixed Precision Training, arXiv 1710.03740 v3, ICLR 2018).

A row is one result, whole: the published numbers, the runs that stand for it, how they differ from
the paper's, what each technique has to come to, and its figures. To add one, append it to `ROWS`.

Table 1, its settings and figure 2a come from the paper's text; tables 2 and 3 and figures 3 to 6
from notes on version 3. Small runs use embedded data and networks reduced until a CPU trains them
in seconds: only their outcomes are compared, not their numbers. Full runs are the recipes of
conf/experiment on the paper's data, as far as those are public.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from mprun.compare.findings import Group

EQUAL, FAILS = "equal", "fails"


class Published(NamedTuple):
    """One row of a table, or the curves of a figure: one run a column, no interval."""

    network: str  # the paper's name
    place: str  # the table or figure
    metric: str  # that of the columns, with its unit; empty: the paper has no number
    fp32: str  # result of the FP32 run, as printed
    unscaled: str  # result of mixed precision without loss scaling, a number or words
    scaled: str = ""  # result with loss scaling
    scale: str = ""  # the loss scale; empty: none was needed
    data: str = "ILSVRC12"
    scope: str = ""  # size, schedule and how it was measured

    def difference(self, value: str) -> str:
        """Return the difference to FP32 in points, as in `mprun compare`: positive is worse."""
        try:
            worse = float(self.fp32) - float(value)
        except ValueError:
            return ""
        higher_is_worse = self.metric.startswith(("CER", "perplexity"))
        return f"{-worse if higher_is_worse else worse:+.2f} points"


class PaperArm(NamedTuple):
    """A technique that a row tests, beside FP32."""

    technique: str  # a short description
    overrides: tuple[str, ...]  # after those of the row
    outcome: str = ""  # EQUAL or FAILS, that of the paper; empty: it has none
    value: str = ""  # the paper's value, as printed


class PaperFigure(NamedTuple):
    """A figure of the paper that the runs of a row redraw.

    draws is the curve ("training", "evaluation"), or the tensors of the histogram
    ("weight_gradients", "activation_gradients"); empty: sample grids.
    """

    key: str  # "fig3"
    shows: str  # the message of the paper's figure, in words
    draws: str = ""

    @property
    def is_histogram(self) -> bool:
        """True if it counts the tensors of an FP32 run by exponent."""
        return self.draws.endswith("_gradients")


class Full(NamedTuple):
    """The result at the paper's scale."""

    experiment: str  # the recipe
    folder: str  # that of the data below --data-root
    samples: int = 0  # samples (words of text) per epoch if the recipe counts epochs; 0: steps
    published: str = ""  # how long others trained, with the source
    missing: str = ""  # what a user has to provide beside the data


def _nothing(group: Group) -> Iterator[str]:
    yield from ()


class PaperRow(NamedTuple):
    """One result of the paper and the runs that stand for it; differences are a phrase each."""

    key: str  # its name for `--only`
    result: Published
    overrides: tuple[str, ...] = ()  # of every run, the experiment first; empty: nothing to run
    arms: tuple[PaperArm, ...] = ()  # the techniques beside FP32
    seeds: int = 3  # number of seeds, from 0
    differs: tuple[str, ...] = ()  # differences from the paper's training
    full: Full | None = None  # None: the data are not public
    why_not: str = ""  # why there are no runs
    tried: str = ""  # further attempts to see an outcome that differs or is undecided
    metric: str = ""  # a metric shown beside the judged one
    models: tuple[str, ...] = ()  # `model.name` of runs, of any size, that are put beside it
    always: tuple[str, ...] = ()  # differences from the paper's training at any size
    seen: Callable[[Group], Iterator[str]] = _nothing  # differences of existing runs
    figures: tuple[PaperFigure, ...] = ()

    @property
    def place(self) -> str:
        """The table or figure as `--only` takes it, such as "table2"."""
        return self.result.place.replace(" ", "").replace("figure", "fig")

    @property
    def names(self) -> tuple[str, ...]:
        """What `--only` calls it by: its place, its figures and its key."""
        return (self.place, *(figure.key for figure in self.figures), self.key)

    def commands(self) -> dict[str, tuple[str, ...]]:
        """Return technique -> the overrides of its runs without the seed; FP32 first."""
        return {"FP32": (*self.overrides, "precision=fp32")} | {
            arm.technique: (*self.overrides, *arm.overrides) for arm in self.arms
        }


NAIVE = PaperArm("FP16 weights, no masters", ("precision=fp16_naive",))
_SCALED = ("precision=fp16_master_scaled",)
DYNAMIC = PaperArm("FP32 masters, dynamic scale", _SCALED)


def _unscaled(outcome: str = "", value: str = "") -> PaperArm:
    return PaperArm("FP32 masters, no scale", ("precision=fp16_master",), outcome, value)


def _static(scale: int, outcome: str = "", value: str = "") -> PaperArm:
    own = (*_SCALED, "scaler=static", f"scaler.scale={scale}")
    return PaperArm(f"FP32 masters, scale {scale}", own, outcome, value)


_COLUMN, _CURVE = "one run per column", "one run per curve"
_CROP = f"tested on a single crop, {_COLUMN}, no loss scaling"
_PUBLIC = "public schedule and batch size, not restated"
_CAFFE = f"{_CROP}; random crop from 256x256 and horizontal flip; {_PUBLIC}"
_TORCH = f"{_CROP}; augmentation of the PyTorch vision training script; {_PUBLIC}"
_IMAGENET = 1_281_167  # training images
_EIGHTH = "an eighth of the channels"
_ADAM = "Adam in place of SGD"
_AVERAGED = f"{_ADAM}, weights averaged, no dropout"
_EPS = "Adam's eps of 1e-8 is 0 in FP16: without masters its first update is not finite"


def _width(group: Group) -> Iterator[str]:
    if (width := group.keys.get("model.width", 1)) != 1:
        yield f"{width:g} of the channels"


def _resnet(group: Group) -> Iterator[str]:
    if group.keys.get("model.variant") != "preactivation":
        yield "v1.5 (stride 2 in the 3x3 convolution) in place of pre-activation blocks"
    yield from _width(group)


def _classifier(
    key: str,
    network: str,
    fp32: str,
    mixed: str,
    differs: tuple[str, ...],
    recipe: str = "",
    scope: str = _CAFFE,
    **more: Any,
) -> PaperRow:
    return PaperRow(
        key,
        Published(network, "table 1", "top-1 (%)", fp32, mixed, scope=scope),
        (f"experiment=paper_{key}",),
        (_unscaled(EQUAL, mixed), NAIVE),
        differs=("scikit-learn's digits in place of ILSVRC12", *differs),
        full=Full(recipe or f"{key}_imagenet", "imagenet", _IMAGENET),
        **dict[str, Any](models=(key,), seen=_width) | more,
    )


_VOC = ("Pascal VOC 2007", f"VGG-type backbone, {_COLUMN}")
_VOC_WEIGHTS = "model.weights=FILE, VGG-16 trained on ILSVRC12"
_detector = partial(PaperRow, seeds=5, metric="map")
_CANVASES = "scikit-learn's digits pasted on noise in place of photographs"
_SSD = Published("Multibox SSD", "table 2", "mAP (%)", "76.9", "diverges", "77.1", "8", *_VOC)


def _stand_in(group: Group) -> Iterator[str]:
    if group.keys.get("model.name") == "conv_autoencoder":
        yield "a stand-in for networks whose gradients underflow in FP16"


_PRIVATE = "private data, no public stand-in is the same"
_STRIPS = (
    "strips of digits in place of speech: 8 rows are the frequency bins, 48 columns the time",
    "one bidirectional GRU layer of 48 units in place of 115 or 215 million parameters",
)
_SPEECH_SCOPE = f"115 and 215 million parameters, 20 epochs of Nesterov SGD, {_COLUMN}"


def _speech(
    language: str, fp32: str, mixed: str, data: str, differs: tuple[str, ...], **more: Any
) -> PaperRow:
    result = Published(
        f"Deep Speech 2, {language}",
        "table 3",
        "CER (%)",
        fp32,
        mixed,
        data=data,
        scope=_SPEECH_SCOPE,
    )
    return PaperRow(
        f"speech_{language.lower()}",
        result,
        ("experiment=paper_speech",),
        (_unscaled(EQUAL, mixed), DYNAMIC, NAIVE),
        differs=differs,
        models=("deep_speech2",),
        **more,
    )


_LSTM_SIZES = ("model.num_layers", "model.hidden_size", "model.projection_size")
_DIVERGES_AFTER = 300_000  # iterations, figure 5


def lstm_text(keys: Mapping[str, Any]) -> str:
    """Describe the size of a language model from its configuration keys."""
    layers, hidden, projection = map(keys.get, _LSTM_SIZES)
    return f"{layers} x {hidden} cells" + (f" with projection {projection}" if projection else "")


def _smaller_lstm(group: Group) -> Iterator[str]:
    if [group.keys.get(key) for key in _LSTM_SIZES] != [2, 8192, 1024]:
        yield f"a smaller relative ({lstm_text(group.keys)})"
    if (steps := group.baseline.arm.runs[0].last_step) < _DIVERGES_AFTER:
        yield f"{steps:,} steps cannot show what fails after {_DIVERGES_AFTER:,} iterations"


def _by_eye(group: Group) -> Iterator[str]:
    if group.metric != "sliced_wasserstein":
        yield "losses of a GAN are no outcome: look at the sample grids"


ROWS = (
    _classifier(
        "alexnet", "AlexNet", "56.77", "56.93", (f"{_EIGHTH} and hidden units, 64 px", _AVERAGED)
    ),
    _classifier(
        "vgg",
        "VGG-D",
        "65.40",
        "65.43",
        (f"{_EIGHTH} and hidden units, 32 px", _AVERAGED),
        "vgg16_imagenet",
        models=("vgg16",),
    ),
    _classifier(
        "googlenet",
        "GoogLeNet",
        "68.33",
        "68.43",
        (
            "three sixteenths of the channels, 32 px: auxiliary heads see 2 x 2, enlarged to 4 x 4",
            f"{_AVERAGED} before the last layer",
        ),
        seeds=5,
    ),
    _classifier(
        "inception_v2", "Inception v2", "70.03", "70.02", (f"{_EIGHTH}, 32 px", _ADAM), seeds=5
    ),
    _classifier(
        "inception_v3",
        "Inception v3",
        "73.85",
        "74.13",
        (
            f"{_EIGHTH}, 75 px in place of 299: the auxiliary head sees 3 x 3, enlarged to 5 x 5",
            f"{_ADAM}, no dropout",
        ),
        seeds=5,
        tried="250 updates of 32 images in place of 100 of 64, after which FP32's seeds had a "
        "standard deviation of 3.2 points; it is still 1, which five seeds do not resolve",
    ),
    _classifier(
        "resnet50",
        "ResNet-50",
        "75.92",
        "76.04",
        (f"{_EIGHTH}, 32 px",),
        "resnet50_preact_imagenet",
        _TORCH,
        seen=_resnet,
    ),
    _detector(
        "faster_rcnn",
        Published("Faster R-CNN", "table 2", "mAP (%)", "69.1", "68.6", "69.7", "8", *_VOC),
        ("experiment=paper_faster_rcnn",),
        (_unscaled(EQUAL, "68.6"), _static(8, EQUAL, "69.7"), NAIVE),
        differs=(
            _CANVASES,
            "four VGG convolutions of 8 to 32 channels in place of VGG-16 with weights, a head of "
            "128 units on 4 x 4 positions in place of 4,096 on 7 x 7",
            _ADAM,
            _EPS,
        ),
        full=Full("faster_rcnn_voc", "VOCdevkit", missing=_VOC_WEIGHTS),
        models=("faster_rcnn",),
    ),
    _detector(
        "ssd",
        _SSD,
        ("experiment=paper_ssd",),
        (_unscaled(FAILS, "diverges"), _static(8, EQUAL, "77.1"), _static(256), DYNAMIC, NAIVE),
        differs=(
            _CANVASES,
            "eight VGG convolutions of 8 to 32 channels in place of VGG-16 with weights",
            "a sigmoid for each class and a mean over all default boxes: with the official loss, "
            "over matched boxes and hard negatives, nothing underflows at this size",
            _ADAM,
            _EPS,
        ),
        full=Full("ssd300_voc", "VOCdevkit", missing=_VOC_WEIGHTS),
        models=("ssd_mini", "ssd300", "conv_autoencoder"),
        seen=_stand_in,
        figures=(
            PaperFigure(
                "fig3",
                "67 % of the activation gradients of SSD are zero, about 2 % lie between 2^-34 and "
                "2^-32 and 2 % between 2^-24 and 2^-23; much of the upper part of FP16's range is "
                "not used.",
                "activation_gradients",
            ),
        ),
    ),
    _detector(
        "ssd_control",
        _SSD._replace(network="Multibox SSD, control"),
        ("experiment=paper_ssd", "model.freeze_backbone=true"),
        (_unscaled(), NAIVE),
        differs=(
            "a control: only the heads of the network above learn, so gradients that underflow on "
            "the way to the first layers are not needed",
        ),
        why_not="a control of the small network",
    ),
    _speech(
        "English",
        "2.20",
        "1.99",
        "6,000 h, tested on WSJ'92",
        _STRIPS,
        # 281,241 utterances in train-960.
        full=Full("deep_speech2_librispeech", "librispeech", 281_241),
        tried="smaller updates, with which FP16 weights without masters do fall behind: figure 2a",
    ),
    _speech(
        "Mandarin",
        "15.82",
        "15.01",
        "2,600 h, internal",
        ("the runs of the row above, for both languages",),
        why_not=_PRIVATE,
    ),
    PaperRow(
        "mandarin_weights",
        Published(
            "Mandarin speech model",
            "figure 2a",
            "",
            "converges",
            "the curve of FP32; FP16 weights updated directly: 80 % relative loss of accuracy",
            data="about 800 hours of Mandarin speech",
            scope=f"accuracy over 20 epochs, {_CURVE}",
        ),
        ("experiment=paper_speech_updates",),
        (
            _unscaled(EQUAL, "the curve of FP32"),
            NAIVE._replace(outcome=FAILS, value="80 % relative loss of accuracy"),
        ),
        differs=_STRIPS,
        why_not=_PRIVATE,
        always=("norm layers and optimizer state are in FP16 as well, not the weights alone",),
        figures=(
            PaperFigure(
                "fig2a",
                "FP16 weights that are updated directly end 80 % worse than FP32; with FP32 master "
                "weights the curve is FP32's.",
                "evaluation",
            ),
            PaperFigure(
                "fig2b",
                "About 5 % of the weight gradients are smaller than 2^-24: times a learning rate "
                "they are zero in FP16.",
                "weight_gradients",
            ),
        ),
    ),
    PaperRow(
        "translation",
        Published(
            "seq2seq translation, 3 x 1024 and 5 x 1024",
            "figure 4",
            "",
            "three runs, visibly apart",
            "slightly worse",
            "inside the spread of FP32",
            data="English to French",
            scope="LSTM encoder and decoder with attention, SGD; perplexity as curves, three of "
            "FP32, one run per other curve",
        ),
        ("experiment=paper_translation",),
        (
            _unscaled(FAILS, "slightly worse"),
            DYNAMIC._replace(outcome=EQUAL, value="inside the spread of FP32"),
            NAIVE,
        ),
        differs=(
            "names of Unicode's characters to those of what they are composed of, at most 11 "
            "words, in place of English to French",
            "2 x 64 cells in place of 3 x 1024 and 5 x 1024; full softmax, constant rate",
        ),
        full=Full("seq2seq_wmt15", "wmt15"),
        tried="eight FP32 seeds, whose losses have a standard deviation of 8 %: the curves cannot "
        "show anything slightly worse; optim.lr=0.03, where more updates are lost: FP16 weights "
        "without masters ended 8 % above FP32 (one seed)",
        metric="bleu",
        models=("seq2seq",),
        always=("Luong's attention without input feeding",),
        figures=(
            PaperFigure(
                "fig4",
                "Three FP32 runs are visibly apart. Mixed precision with a loss scale is among "
                "them; without one it is slightly worse.",
                "training",
            ),
        ),
    ),
    PaperRow(
        "biglstm",
        Published(
            "bigLSTM language model",
            "figure 5",
            "",
            "converges",
            "follows FP32, diverges after 300K iterations",
            "matches FP32",
            "128",
            data="One Billion Word",
            scope="vocabulary 793K, 2 layers of 8192 cells with projection 1024, sampled softmax "
            "(8K negatives), Adagrad, batch 1024 over 4 GPUs, 50 epochs; perplexity as curves, "
            f"{_CURVE}",
        ),
        ("experiment=paper_biglstm",),
        (
            _unscaled(value="diverges after 300K iterations"),
            _static(128, EQUAL, "matches FP32"),
            NAIVE,
        ),
        differs=(
            "2 x 64 cells with projection 32 on CPython's documentation in place of 2 x 8192 with "
            "1024 on One Billion Word",
            "250 iterations cannot show what fails after 300,000: there is no outcome to compare "
            "without a scale",
        ),
        # 800 million words, as the data's authors round them (Chelba et al., arXiv 1312.3005).
        full=Full("biglstm_lm1b", "lm1b", 800_000_000, "50 epochs on 4 GPUs (the paper)"),
        models=("lstm_lm",),
        seen=_smaller_lstm,
        figures=(
            PaperFigure(
                "fig5",
                "Without a loss scale training follows FP32 and diverges after 300,000 iterations; "
                "with a scale of 128 it is FP32's curve.",
                "training",
            ),
        ),
    ),
    PaperRow(
        "dcgan",
        Published(
            "DCGAN",
            "figure 6",
            "",
            "faces",
            "faces that look alike",
            data="CelebA at 128 px",
            scope="Adam, 100K iterations, no loss scaling; uncurated samples judged by eye, "
            f"{_COLUMN}",
        ),
        ("experiment=paper_dcgan",),
        (_unscaled(EQUAL, "looks alike"), NAIVE),
        seeds=5,
        differs=(
            "digits at 32 px in place of faces at 128, a fraction of the channels",
            "judged by the sliced Wasserstein distance to held-out images, the paper's by eye",
            _EPS,
        ),
        full=Full("dcgan_celeba_128", "celeba", published="100,000 iterations (the paper)"),
        models=("dcgan",),
        always=(
            "the paper's generator has 7 fractionally-strided convolutions, its discriminator 6 "
            "convolutions and 2 fully connected layers",
        ),
        seen=_by_eye,
        figures=(PaperFigure("fig6", "Samples of both precisions look alike."),),
    ),
)
