"""What Micikevicius et al. report (Mixed Precision Training, arXiv 1710.03740 v3, ICLR 2018).

Table 1, its settings and figure 2a were read in the paper's text; table 2 and figures 5 and 6 in
notes on version 3. A difference has the sign that `mprun compare` gives it: positive is worse.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reported:
    """One line of a table or one curve of a figure; numbers as text, empty where none is given."""

    mode: str
    outcome: str
    baseline: str = ""
    value: str = ""
    difference: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A result of the paper and the scale at which it was obtained."""

    model: str
    source: str  # the table or figure
    metric: str
    data: str
    scale: str
    results: tuple[Reported, ...]
    ours_differs: str = ""  # in what our model of that name is another one


_TABLE_1 = "ILSVRC12, test on a single crop; one run per column; {}; no loss scaling"
ALEXNET = Claim(
    "AlexNet",
    "table 1",
    "top-1 (%)",
    "ILSVRC12",
    _TABLE_1.format(
        "random crop from 256x256 and horizontal flip; public schedule and batch size, not restated"
    ),
    (Reported("FP16, FP32 master weights", "no accuracy lost", "56.77", "56.93", "-0.16 points"),),
)
RESNET50 = Claim(
    "ResNet-50",
    "table 1",
    "top-1 (%)",
    "ILSVRC12",
    _TABLE_1.format(
        "augmentation of the PyTorch vision training script; public schedule and batch size, "
        "not restated"
    ),
    (Reported("FP16, FP32 master weights", "no accuracy lost", "75.92", "76.04", "-0.12 points"),),
    "The paper's network has pre-activation blocks; ours is v1.5 (stride 2 in the 3x3 "
    "convolution).",
)
BIGLSTM = Claim(
    "bigLSTM language model",
    "figure 5",
    "perplexity (a figure, no number)",
    "One Billion Word",
    "One Billion Word, vocabulary 793K, 2 layers of 8192 cells with projection 1024, sampled "
    "softmax (8K negatives), Adagrad, batch 1024 over 4 GPUs, 50 epochs; one run per curve",
    (
        Reported("FP16, loss scale 1", "follows FP32, diverges after 300K iterations"),
        Reported("FP16, loss scale 128", "matches FP32"),
    ),
)
DIVERGES_AFTER = 300_000  # iterations, figure 5
DCGAN = Claim(
    "DCGAN",
    "figure 6",
    "samples, judged by eye",
    "CelebA",
    "CelebA faces of 128x128, Adam, 100K iterations, no loss scaling; one run per column",
    (Reported("mixed precision", "uncurated samples side by side; no metric"),),
    "The paper's generator has 7 fractionally-strided convolutions, its discriminator 6 "
    "convolutions and 2 fully connected layers.",
)
MASTER_WEIGHTS = Claim(
    "Mandarin speech model",
    "figure 2a",
    "accuracy (a figure)",
    "about 800 hours of Mandarin speech",
    "a subset of about 800 hours, 20 epochs; one run per curve",
    (
        Reported("FP16, FP16 weights updated directly", "80 % relative loss of accuracy"),
        Reported("FP16, FP32 master weights", "the curve of FP32"),
    ),
    "fp16_naive keeps norm layers and optimizer state in FP16 as well, not the weights alone.",
)
LOSS_SCALING = Claim(
    "Multibox SSD",
    "table 2",
    "mAP (%)",
    "Pascal VOC 2007",
    "Pascal VOC 2007 test, VGG-type backbone; one run per column",
    (
        Reported("mixed, no loss scaling", "diverges", "76.9"),
        Reported("mixed, loss scale 8", "matches FP32", "76.9", "77.1", "-0.2 points"),
    ),
)
OF_MODEL = {"alexnet": ALEXNET, "resnet50": RESNET50, "lstm_lm": BIGLSTM, "dcgan": DCGAN}
