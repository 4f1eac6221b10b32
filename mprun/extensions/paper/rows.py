"""The runs for each result of the paper, and how they differ from the paper's.

Small runs use embedded data and networks reduced until a CPU trains them in seconds. Only their
outcomes are compared, not their numbers. Full runs are the recipes of conf/experiment on the
paper's data, as far as those are public.
"""

from typing import NamedTuple

from mprun.extensions.paper.published import PUBLISHED, Published

EQUAL, FAILS = "equal", "fails"


class PaperArm(NamedTuple):
    """A technique that a row tests, beside FP32.

    Attributes:
        technique: a short description.
        overrides: the overrides of the technique, after those of the row.
        outcome: EQUAL or FAILS, the paper's outcome for this technique; empty: it has none.
        value: the paper's value, as printed.
    """

    technique: str
    overrides: tuple[str, ...]
    outcome: str = ""
    value: str = ""


class Full(NamedTuple):
    """The result at the paper's scale.

    Attributes:
        experiment: the recipe.
        folder: folder of the data below --data-root.
        samples: samples (words of text) per epoch if the recipe counts epochs; 0: it counts steps.
        published: how long others trained, with the source.
        missing: what a user has to provide beside the data.
    """

    experiment: str
    folder: str
    samples: int = 0
    published: str = ""
    missing: str = ""


class PaperRow(NamedTuple):
    """One result of the paper and the runs that stand for it.

    Attributes:
        key: name of the row for `--only`.
        result: the paper's result.
        overrides: overrides of every run, the experiment first. Empty: there is nothing to run.
        arms: the techniques beside FP32.
        seeds: number of seeds, from 0.
        differs: differences from the paper's training, a phrase each.
        full: None: the data are not public.
        why_not: why there are no runs.
        tried: if the outcome differs from the paper's or is undecided: further attempts to see it.
        metric: a metric shown beside the judged one; empty: none.
        is_probed: whether one more FP32 run counts its tensors by exponent, for a histogram.
        models: `model.name` of our networks whose runs, of any size, are put beside it.
        always: differences from the paper's training at any size, a phrase each.
    """

    key: str
    result: Published
    overrides: tuple[str, ...] = ()
    arms: tuple[PaperArm, ...] = ()
    seeds: int = 3
    differs: tuple[str, ...] = ()
    full: Full | None = None
    why_not: str = ""
    tried: str = ""
    metric: str = ""
    is_probed: bool = False
    models: tuple[str, ...] = ()
    always: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The table or figure as `--only` takes it, such as "table2"."""
        return self.result.place.replace(" ", "").replace("figure", "fig")

    def commands(self) -> dict[str, tuple[str, ...]]:
        """Return technique -> the overrides of its runs without the seed; FP32 first."""
        return {"FP32": (*self.overrides, "precision=fp32")} | {
            arm.technique: (*self.overrides, *arm.overrides) for arm in self.arms
        }


NAIVE = PaperArm("FP16 weights, no masters", ("precision=fp16_naive",))
_MASTER = ("precision=fp16_master",)
_SCALED = ("precision=fp16_master_scaled",)


def _unscaled(result: Published, outcome: str = EQUAL) -> PaperArm:
    return PaperArm("FP32 masters, no scale", _MASTER, outcome, result.unscaled)


def _static(scale: int, outcome: str = "", value: str = "") -> PaperArm:
    own = (*_SCALED, "scaler=static", f"scaler.scale={scale}")
    return PaperArm(f"FP32 masters, scale {scale}", own, outcome, value)


DYNAMIC = PaperArm("FP32 masters, dynamic scale", _SCALED)
_DIGITS = "scikit-learn's digits in place of ILSVRC12"
IMAGENET = 1_281_167  # training images
LIBRISPEECH = 281_241  # utterances of train-960
LM1B = 800_000_000  # words, as its authors round them (Chelba et al., arXiv 1312.3005)


def _classifier(
    key: str, differs: tuple[str, ...], full: Full, seeds: int = 3, tried: str = "", model: str = ""
) -> PaperRow:
    result = PUBLISHED[key]
    return PaperRow(
        key,
        result,
        (f"experiment=paper_{key}",),
        (_unscaled(result), NAIVE),
        seeds=seeds,
        differs=(_DIGITS, *differs),
        full=full,
        tried=tried,
        models=(model or key,),
    )


_EIGHTH = "an eighth of the channels"
_ADAM = "Adam in place of SGD"
_EPS = "Adam's eps of 1e-8 is 0 in FP16: without masters its first update is not finite"
_PRIVATE = "private data, no public stand-in is the same"
_VOC_WEIGHTS = "model.weights=FILE, VGG-16 trained on ILSVRC12"
_CANVASES = "scikit-learn's digits pasted on noise in place of photographs"
_SPEECH = (
    "strips of digits in place of speech: 8 rows are the frequency bins, 48 columns the time",
    "one bidirectional GRU layer of 48 units in place of 115 or 215 million parameters",
)
ROWS = (
    _classifier(
        "alexnet",
        (f"{_EIGHTH} and hidden units, 64 px", f"{_ADAM}, weights averaged, no dropout"),
        Full("alexnet_imagenet", "imagenet", IMAGENET),
    ),
    _classifier(
        "vgg",
        (f"{_EIGHTH} and hidden units, 32 px", f"{_ADAM}, weights averaged, no dropout"),
        Full("vgg16_imagenet", "imagenet", IMAGENET),
        model="vgg16",
    ),
    _classifier(
        "googlenet",
        (
            "three sixteenths of the channels, 32 px: auxiliary heads see 2 x 2, enlarged to 4 x 4",
            f"{_ADAM}, weights averaged, no dropout before the last layer",
        ),
        Full("googlenet_imagenet", "imagenet", IMAGENET),
        seeds=5,
    ),
    _classifier(
        "inception_v2",
        (f"{_EIGHTH}, 32 px", _ADAM),
        Full("inception_v2_imagenet", "imagenet", IMAGENET),
        seeds=5,
    ),
    _classifier(
        "inception_v3",
        (
            f"{_EIGHTH}, 75 px in place of 299: the auxiliary head sees 3 x 3, enlarged to 5 x 5",
            f"{_ADAM}, no dropout",
        ),
        Full("inception_v3_imagenet", "imagenet", IMAGENET),
        seeds=5,
        tried="250 updates of 32 images in place of 100 of 64, after which FP32's seeds had a "
        "standard deviation of 3.2 points; it is still 1, which five seeds do not resolve",
    ),
    _classifier(
        "resnet50",
        (f"{_EIGHTH}, 32 px",),
        Full("resnet50_preact_imagenet", "imagenet", IMAGENET),
    ),
    PaperRow(
        "faster_rcnn",
        PUBLISHED["faster_rcnn"],
        ("experiment=paper_faster_rcnn",),
        (
            _unscaled(PUBLISHED["faster_rcnn"]),
            _static(8, EQUAL, PUBLISHED["faster_rcnn"].scaled),
            NAIVE,
        ),
        seeds=5,
        differs=(
            _CANVASES,
            "four VGG convolutions of 8 to 32 channels in place of VGG-16 with weights, a head of "
            "128 units on 4 x 4 positions in place of 4,096 on 7 x 7",
            _ADAM,
            _EPS,
        ),
        full=Full("faster_rcnn_voc", "VOCdevkit", missing=_VOC_WEIGHTS),
        metric="map",
        models=("faster_rcnn",),
    ),
    PaperRow(
        "ssd",
        PUBLISHED["ssd"],
        ("experiment=paper_ssd",),
        (
            _unscaled(PUBLISHED["ssd"], FAILS),
            _static(8, EQUAL, PUBLISHED["ssd"].scaled),
            _static(256),
            DYNAMIC,
            NAIVE,
        ),
        seeds=5,
        differs=(
            _CANVASES,
            "eight VGG convolutions of 8 to 32 channels in place of VGG-16 with weights",
            "a sigmoid for each class and a mean over all default boxes: with the official loss, "
            "over matched boxes and hard negatives, nothing underflows at this size",
            _ADAM,
            _EPS,
        ),
        full=Full("ssd300_voc", "VOCdevkit", missing=_VOC_WEIGHTS),
        metric="map",
        is_probed=True,
        models=("ssd_mini", "ssd300", "conv_autoencoder"),
    ),
    PaperRow(
        "ssd_control",
        PUBLISHED["ssd"]._replace(network="Multibox SSD, control"),
        ("experiment=paper_ssd", "model.freeze_backbone=true"),
        (PaperArm("FP32 masters, no scale", _MASTER), NAIVE),
        seeds=5,
        differs=(
            "a control: only the heads of the network above learn, so gradients that underflow on "
            "the way to the first layers are not needed",
        ),
        why_not="a control of the small network",
        metric="map",
    ),
    PaperRow(
        "speech_english",
        PUBLISHED["speech_english"],
        ("experiment=paper_speech",),
        (_unscaled(PUBLISHED["speech_english"]), DYNAMIC, NAIVE),
        differs=_SPEECH,
        full=Full("deep_speech2_librispeech", "librispeech", LIBRISPEECH),
        tried="smaller updates, with which FP16 weights without masters do fall behind: figure 2a",
        models=("deep_speech2",),
    ),
    PaperRow(
        "speech_mandarin",
        PUBLISHED["speech_mandarin"],
        ("experiment=paper_speech",),
        (_unscaled(PUBLISHED["speech_mandarin"]), DYNAMIC, NAIVE),
        differs=("the runs of the row above, for both languages",),
        why_not=_PRIVATE,
        models=("deep_speech2",),
    ),
    PaperRow(
        "mandarin_weights",
        PUBLISHED["mandarin_weights"],
        ("experiment=paper_speech_updates",),
        (
            PaperArm(*_unscaled(PUBLISHED["mandarin_weights"])[:3], "the curve of FP32"),
            NAIVE._replace(outcome=FAILS, value="80 % relative loss of accuracy"),
        ),
        differs=_SPEECH,
        why_not=_PRIVATE,
        is_probed=True,
        always=("norm layers and optimizer state are in FP16 as well, not the weights alone",),
    ),
    PaperRow(
        "translation",
        PUBLISHED["translation"],
        ("experiment=paper_translation",),
        (
            PaperArm("FP32 masters, no scale", _MASTER, FAILS, "slightly worse"),
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
    ),
    PaperRow(
        "biglstm",
        PUBLISHED["biglstm"],
        ("experiment=paper_biglstm",),
        (
            PaperArm("FP32 masters, no scale", _MASTER, "", "diverges after 300K iterations"),
            _static(128, EQUAL, "matches FP32"),
            NAIVE,
        ),
        differs=(
            "2 x 64 cells with projection 32 on CPython's documentation in place of 2 x 8192 with "
            "1024 on One Billion Word",
            "250 iterations cannot show what fails after 300,000: there is no outcome to compare "
            "without a scale",
        ),
        full=Full("biglstm_lm1b", "lm1b", LM1B, published="50 epochs on 4 GPUs (the paper)"),
        models=("lstm_lm",),
    ),
    PaperRow(
        "dcgan",
        PUBLISHED["dcgan"],
        ("experiment=paper_dcgan",),
        (PaperArm("FP32 masters, no scale", _MASTER, EQUAL, "looks alike"), NAIVE),
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
    ),
)
