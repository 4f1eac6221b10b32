"""The results of Micikevicius et al. (Mixed Precision Training, arXiv 1710.03740 v3, ICLR 2018).

Table 1, its settings and figure 2a come from the paper's text; tables 2 and 3 and figures 3 to 6
from notes on version 3. Each number is here once, for every page that shows it.
"""

from typing import NamedTuple


class Published(NamedTuple):
    """One row of a table, or the curves of a figure: one run a column, no interval.

    Attributes:
        network: the paper's name for the network.
        place: the table or figure.
        metric: metric of the columns, with its unit; empty: the paper has no number.
        fp32: result of the FP32 run, as printed.
        unscaled: result of mixed precision without loss scaling, a number or words.
        scaled: result of mixed precision with loss scaling.
        scale: the loss scale; empty: none was needed.
        data: the training data.
        scope: size, schedule and how it was measured.
    """

    network: str
    place: str
    metric: str
    fp32: str
    unscaled: str
    scaled: str = ""
    scale: str = ""
    data: str = "ILSVRC12"
    scope: str = ""

    @property
    def is_scored(self) -> bool:
        """True if a higher value is better."""
        return not self.metric.startswith(("CER", "perplexity"))

    def difference(self, value: str) -> str:
        """Return the difference to FP32 in points, as in `mprun compare`: positive is worse."""
        try:
            worse = float(self.fp32) - float(value)
        except ValueError:
            return ""
        return f"{worse if self.is_scored else -worse:+.2f} points"


_TOP1, _MAP, _CER = "top-1 (%)", "mAP (%)", "CER (%)"
_COLUMN, _CURVE = "one run per column", "one run per curve"
_CROP = f"tested on a single crop, {_COLUMN}, no loss scaling"
_PUBLIC = "public schedule and batch size, not restated"
_CAFFE = f"{_CROP}; random crop from 256x256 and horizontal flip; {_PUBLIC}"
_TORCH = f"{_CROP}; augmentation of the PyTorch vision training script; {_PUBLIC}"
_VOC = ("Pascal VOC 2007", f"VGG-type backbone, {_COLUMN}")
_SPEECH = f"115 and 215 million parameters, 20 epochs of Nesterov SGD, {_COLUMN}"


def _table_1(network: str, fp32: str, mixed: str, scope: str = _CAFFE) -> Published:
    return Published(network, "table 1", _TOP1, fp32, mixed, scope=scope)


PUBLISHED = {
    "alexnet": _table_1("AlexNet", "56.77", "56.93"),
    "vgg": _table_1("VGG-D", "65.40", "65.43"),
    "googlenet": _table_1("GoogLeNet", "68.33", "68.43"),
    "inception_v2": _table_1("Inception v2", "70.03", "70.02"),
    "inception_v3": _table_1("Inception v3", "73.85", "74.13"),
    "resnet50": _table_1("ResNet-50", "75.92", "76.04", _TORCH),
    "faster_rcnn": Published("Faster R-CNN", "table 2", _MAP, "69.1", "68.6", "69.7", "8", *_VOC),
    "ssd": Published("Multibox SSD", "table 2", _MAP, "76.9", "diverges", "77.1", "8", *_VOC),
    "speech_english": Published(
        "Deep Speech 2, English",
        "table 3",
        _CER,
        "2.20",
        "1.99",
        data="6,000 h, tested on WSJ'92",
        scope=_SPEECH,
    ),
    "speech_mandarin": Published(
        "Deep Speech 2, Mandarin",
        "table 3",
        _CER,
        "15.82",
        "15.01",
        data="2,600 h, internal",
        scope=_SPEECH,
    ),
    "mandarin_weights": Published(
        "Mandarin speech model",
        "figure 2a",
        "",
        "converges",
        "the curve of FP32; FP16 weights updated directly: 80 % relative loss of accuracy",
        data="about 800 hours of Mandarin speech",
        scope=f"accuracy over 20 epochs, {_CURVE}",
    ),
    "translation": Published(
        "seq2seq translation, 3 x 1024 and 5 x 1024",
        "figure 4",
        "",
        "three runs, visibly apart",
        "slightly worse",
        "inside the spread of FP32",
        data="English to French",
        scope="LSTM encoder and decoder with attention, SGD; perplexity as curves, three of FP32, "
        "one run per other curve",
    ),
    "biglstm": Published(
        "bigLSTM language model",
        "figure 5",
        "",
        "converges",
        "follows FP32, diverges after 300K iterations",
        "matches FP32",
        "128",
        data="One Billion Word",
        scope="vocabulary 793K, 2 layers of 8192 cells with projection 1024, sampled softmax (8K "
        f"negatives), Adagrad, batch 1024 over 4 GPUs, 50 epochs; perplexity as curves, {_CURVE}",
    ),
    "dcgan": Published(
        "DCGAN",
        "figure 6",
        "",
        "faces",
        "faces that look alike",
        data="CelebA at 128 px",
        scope=f"Adam, 100K iterations, no loss scaling; uncurated samples judged by eye, {_COLUMN}",
    ),
}
