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

from mprun.comparison.findings import Group
from mprun.config.registry import metric_called

EQUAL, FAILS, DIVERGES = "equal", "fails", "diverges"
# The paper's metrics, as tasks here declare them.
_METRICS = {"top-1 (%)": "top1", "mAP (%)": "map", "CER (%)": "cer"}


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
        """Return the difference to FP32 in points, as in `mprun compare`: positive is worse.

        It is empty without numbers, and where the extension with such a task is not there.
        """
        declared = metric_called(_METRICS.get(self.metric, ""))
        try:
            worse = float(self.fp32) - float(value)
        except ValueError:
            return ""
        if declared is None:
            return ""
        return f"{worse if declared.higher_is_better else -worse:+.2f} {declared.unit}"


class PaperArm(NamedTuple):
    """A technique that a row tests, beside FP32."""

    technique: str  # a short description
    overrides: tuple[str, ...]  # after those of the row
    outcome: str = ""  # EQUAL, FAILS or DIVERGES, that of the paper; empty: it has none
    value: str = ""  # the paper's value, as printed
    constructed: bool = False  # only the row's own small runs are made to show the outcome


class PaperFigure(NamedTuple):
    """A figure of the paper that the runs of a row redraw.

    draws is the curve ("training", "evaluation"), or the tensors of the histogram
    ("weight_gradients", "activation_gradients"); empty: sample grids.
    """

    key: str  # "fig3"
    shows: str  # the message of the paper's figure, in words
    draws: str = ""
    in_small: str = ""  # why ours, in small, shows something else

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
    differs: tuple[str, ...] = ()  # differences from the paper's training
    full: Full | None = None  # None: the data are not public
    why_not: str = ""  # why there are no runs
    tried: str = ""  # further attempts to see an outcome that differs or is undecided
    constructed: str = ""  # what was chosen so that the small runs show the paper's failure
    metric: str = ""  # a metric judged beside the one that decides, such as the paper's own
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

    def without_small(self) -> "PaperRow":
        """Return the row without what holds of its small runs alone."""
        figures = tuple(figure._replace(in_small="") for figure in self.figures)
        return self._replace(differs=(), tried="", constructed="", figures=figures)

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
_SQUARES = (
    "without masters Adam's second moment is in FP16, too, and 0 for gradients below 0.0055: their "
    "updates are the gradient over eps, which may be what makes naive FP16 fail"
)
_SMALL_ADAM = f"{_ADAM}, with an eps that FP16 holds and a second moment of ten updates"


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
_detector = partial(PaperRow, metric="map")
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


def _speech(language: str, fp32: str, mixed: str, data: str, **more: Any) -> PaperRow:
    result = Published(
        f"Deep Speech 2, {language}",
        "table 3",
        "CER (%)",
        fp32,
        mixed,
        data=data,
        scope=_SPEECH_SCOPE,
    )
    return PaperRow(f"speech_{language.lower()}", result, **more)


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
        "alexnet",
        "AlexNet",
        "56.77",
        "56.93",
        (f"{_EIGHTH} and hidden units, 64 px", _AVERAGED, _SQUARES),
    ),
    _classifier(
        "vgg",
        "VGG-D",
        "65.40",
        "65.43",
        (f"{_EIGHTH} and hidden units, 32 px", f"{_SMALL_ADAM}, no dropout"),
        "vgg16_imagenet",
        metric="top1",
        models=("vgg16",),
        tried="SGD at 0.0003, at which 87 % of the updates are lost: FP16 weights without masters "
        "ended 15 % above FP32 on one seed, the other one did not leave the first plateau",
    ),
    _classifier(
        "googlenet",
        "GoogLeNet",
        "68.33",
        "68.43",
        (
            "a quarter of the channels, 32 px: auxiliary heads see 2 x 2, enlarged to 4 x 4",
            f"{_SMALL_ADAM}, no dropout before the last layer",
        ),
        metric="top1",
    ),
    _classifier(
        "inception_v2",
        "Inception v2",
        "70.03",
        "70.02",
        (f"{_EIGHTH}, 32 px", f"{_ADAM}, weights averaged"),
        tried="rates of 0.0001 to 0.001 for 100 to 160 updates, of an eighth or half of the "
        "channels: 34 to 71 % of the updates are lost, but FP32 hardly leaves the start, and FP16 "
        "weights without masters ended within 1 % of FP32 or of masters (one seed each); 220 "
        "and 300 updates, and SGD at 0.05, after which runs of one seed differ by 2 to 4 points",
    ),
    _classifier(
        "inception_v3",
        "Inception v3",
        "73.85",
        "74.13",
        (
            f"{_EIGHTH}, 75 px in place of 299: the auxiliary head sees 3 x 3, enlarged to 5 x 5",
            _AVERAGED,
        ),
        tried="a rate of 0.0003 for 100 updates, at which 57 % of the updates are lost: FP32 "
        "hardly leaves the start; 150 updates with weights averaged, after which runs of one seed "
        "differ by up to 9 points",
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
        tried="Adam at a rate of 0.0001 with half of the channels, where 73 % of the updates are "
        "lost: after 100 updates FP16 weights without masters ended 3.7 % above FP32, 0.3 % below "
        "and 1.2 % above (three seeds), those with masters up to 2.7 % below; 250 updates at the "
        "row's own rate, after which runs of one seed differ by up to 2.8 points",
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
            _SMALL_ADAM,
        ),
        full=Full("faster_rcnn_voc", "VOCdevkit", missing=_VOC_WEIGHTS),
        tried="rates of 0.0002 and 0.00005, at which up to 52 % of the updates are lost: FP16 "
        "weights without masters ended 0.2 % above and 0.6 % below FP32 (one seed); SGD at 0.01, "
        "where 69 % are lost: FP32's seeds have a standard deviation of 14 %. 27 % of the "
        "activation gradients that are not zero lie below 2^-24, but 1.3 % of weight gradients: "
        "without a scale the loss changes by at most 2 %",
        models=("faster_rcnn",),
    ),
    _detector(
        "ssd",
        _SSD,
        ("experiment=paper_ssd",),
        (_unscaled(DIVERGES, "diverges"), _static(8, EQUAL, "77.1"), DYNAMIC, NAIVE),
        differs=(
            _CANVASES,
            "eight VGG convolutions of 8 to 32 channels in place of VGG-16 with weights",
            "a sigmoid for each class and a mean over all default boxes: with the official loss, "
            "over matched boxes and hard negatives, nothing underflows at this size",
            f"{_ADAM}, with an eps that FP16 holds",
            _SQUARES,
        ),
        full=Full("ssd300_voc", "VOCdevkit", missing=_VOC_WEIGHTS),
        constructed="a loss whose mean over all default boxes makes gradients underflow; with the "
        "official one nothing does at this size",
        tried="a scale of 256: 0.1 % above FP32 after 400 updates, the outcome of 8",
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
            _SQUARES,
        ),
        why_not="a control of the small network",
    ),
    _speech(
        "English",
        "2.20",
        "1.99",
        "6,000 h, tested on WSJ'92",
        overrides=("experiment=paper_speech",),
        arms=(_unscaled(EQUAL, "1.99"), NAIVE),
        differs=(*_STRIPS, "600 updates at a small rate, which end in the descent"),
        # 281,241 utterances in train-960.
        full=Full("deep_speech2_librispeech", "librispeech", 281_241),
        metric="cer",
        models=("deep_speech2",),
        tried="rates of 0.01 and 0.002, at which FP32 reaches 1.7 % and FP16 weights without "
        "masters do as well, although 60 % of the updates are lost at 0.002: those that are not "
        "lost teach enough. Momentum 0.99 and larger first weights, up to 0.5, at which 56 to 70 % "
        "are lost: 0.1 to 0.6 points of the error rate (one seed each)",
    ),
    _speech(
        "Mandarin",
        "15.82",
        "15.01",
        "2,600 h, internal",
        why_not=f"{_PRIVATE}; the same network and technique are shown by the row of English",
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
        constructed="a rate small enough that 69 % of the updates are lost",
        why_not=_PRIVATE,
        metric="cer",
        tried="for figure 2b, rates of 0.0002 to 0.002, momentum 0.99, larger first weights and "
        "batches of 64: 0.002 to 0.06 % of the weight gradients were not zero and below 2^-24",
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
                "In small they are not: gradients of 31,019 parameters would have to be about a "
                "thousand times smaller. Updates are lost by the paper's other reason: they are "
                "less than half an ulp of their weight.",
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
            "2 x 64 cells in place of 3 x 1024 and 5 x 1024; full softmax; a constant rate of 0.03",
            "nothing underflows: 0.006 % of the activation gradients are below 2^-24, so a loss "
            "scale has nothing to recover",
        ),
        full=Full("seq2seq_wmt15", "wmt15"),
        tried="the source's rate of 0.5 for 1,000 updates: every technique matched, FP16 weights "
        "without masters, too (+0.3 %)",
        metric="bleu",
        models=("seq2seq",),
        always=("Luong's attention without input feeding",),
        figures=(
            PaperFigure(
                "fig4",
                "Three FP32 runs are visibly apart. Mixed precision with a loss scale is among "
                "them; without one it is slightly worse.",
                "training",
                "In small a scale has nothing to recover: almost no gradient is below 2^-24.",
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
            _unscaled(DIVERGES, "diverges after 300K iterations")._replace(constructed=True),
            _static(128, EQUAL, "matches FP32"),
            NAIVE,
        ),
        differs=(
            "2 x 64 cells with projection 32 and 1,000 words of CPython's documentation in place "
            "of 2 x 8192 with 1024 and 793,000 of One Billion Word",
            "full softmax in FP16; the mean over 1,024 x 20 words makes gradients of words below "
            "a probability of 6e-4 zero",
            "Adagrad's accumulator starts at 1e-6, so that rare words move far in 28 updates: the "
            "loss rises after about 16 updates in place of 300,000, and stays finite",
        ),
        constructed="an accumulator from 1e-6 and a mean over 20,480 words, which make 28 updates "
        "show what took 300,000",
        tried="batches of 640 words and an accumulator from 1, where nothing differs (+0.002 %); "
        "2,560 words a batch and 4,000 in the vocabulary, +0.1 %; 10,240 and 2,000, +1 to +4 %; an "
        "accumulator from 1e-7 with a rate of 0.1, at which a scale of 128 differs, too (+2.6 %)",
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
        differs=(
            "digits at 32 px in place of faces at 128, a fraction of the channels",
            "judged by the sliced Wasserstein distance to held-out images, the paper's by eye",
            "Adam's eps is one that FP16 holds, its second moment that of ten updates, its rate "
            "five times as high; weights averaged",
        ),
        full=Full("dcgan_celeba_128", "celeba", published="100,000 iterations (the paper)"),
        tried="rates of 0.0002 (5 % of the updates are lost in place of 1.6), 0.0001 and 0.00005: "
        "neither FP32 nor FP16 weights leave the start, a distance of 0.5, in 200 to 400 updates, "
        "and both end alike (one seed)",
        models=("dcgan",),
        always=(
            "the paper's generator has 7 fractionally-strided convolutions, its discriminator 6 "
            "convolutions and 2 fully connected layers",
        ),
        seen=_by_eye,
        figures=(PaperFigure("fig6", "Samples of both precisions look alike."),),
    ),
)
