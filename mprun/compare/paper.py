"""What Micikevicius et al. report (Mixed Precision Training, arXiv 1710.03740 v3, ICLR 2018).

Table 1, its settings and figure 2a were read in the paper's text; table 2 and figures 5 and 6 in
notes on version 3. A difference has the sign that `mprun compare` gives it: positive is worse.

Our result stands beside the paper's for the same model, with the scale of both. The paper's data
sets are not those of an embedded run, so a row shows whether the outcome is the same one, and says
where numbers cannot be compared.
"""

from dataclasses import dataclass
from typing import NamedTuple

from mprun.compare.findings import Comparison, Group, Row, RunData
from mprun.compare.text import difference_text, metric_name, seeds_text, value_text
from mprun.record.console import markdown_table


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


HEADER = ["who", "mode", "FP32", "this mode", "difference (+ is worse)", "outcome"]
_DATA = {
    "digits": "scikit-learn digits (1,437 training and 360 held-out images of 8x8, enlarged)",
    "docs_text": "text of CPython's documentation",
    "synthetic_images": "random images (nothing to learn)",
    "synthetic_tokens": "random tokens (nothing to learn)",
}
_FP16_MODES = ("fp16_naive", "fp16_master", "fp16_master_scaled", "amp")


class PaperLine(NamedTuple):
    """One line of a row's table: the paper's or ours, all as text, in the order of HEADER."""

    who: str
    mode: str
    baseline: str
    value: str
    difference: str
    outcome: str


@dataclass(frozen=True, slots=True)
class PaperRow:
    """One result of the paper beside one group of ours; `source` is empty where it has none."""

    group: str
    model: str
    source: str
    lines: tuple[PaperLine, ...]
    paper_scale: str
    our_scale: str
    reading: str

    @property
    def title(self) -> str:
        """ "ResNet-50, table 1 of the paper"."""
        return f"{self.model}, {self.source} of the paper" if self.source else self.model

    @property
    def remarks(self) -> list[str]:
        """The scale of both, and how to read them beside each other."""
        named = {"paper": self.paper_scale, "ours": self.our_scale, "reading": self.reading}
        return [f"{name}: {text}" for name, text in named.items() if text]


def paper_rows(comparison: Comparison) -> list[PaperRow]:
    """For each group the paper's result for its model, then for the technique that it tests.

    The four FP16 modes are shown; TF32 and BF16 came after the paper.
    """
    rows = []
    for group in comparison.groups:
        model = group.keys.get("model.name")
        if model in OF_MODEL:
            rows.append(_beside(group, OF_MODEL[model], _FP16_MODES))
        else:
            rows.append(_without(group, model))
        if model is None:
            continue
        if model == "conv_autoencoder":
            rows.append(_beside(group, LOSS_SCALING, _FP16_MODES[1:]))
        modes = {_mode(row) for row in group.rows}
        if "fp16_naive" in modes and modes & set(_FP16_MODES[1:3]):
            rows.append(_beside(group, MASTER_WEIGHTS, _FP16_MODES[:3]))
    return rows


def paper_markdown(rows: list[PaperRow]) -> str:
    """A section with a table for each row."""
    parts = []
    for row in rows:
        parts.append(f"### {row.group}: {row.title}")
        if row.lines:
            parts.append(markdown_table(HEADER, [list(line) for line in row.lines]))
        parts.append("\n".join(f"- {remark}" for remark in row.remarks))
    return "\n\n".join(parts)


def _beside(group: Group, claim: Claim, modes: tuple[str, ...]) -> PaperRow:
    paper = [
        PaperLine(f"paper: {claim.metric}", r.mode, r.baseline, r.value, r.difference, r.outcome)
        for r in claim.results
    ]
    ours = [_ours(group, row) for row in group.rows if _mode(row) in modes]
    return PaperRow(
        group.title,
        claim.model,
        claim.source,
        (*paper, *ours),
        claim.scale,
        _our_scale(group),
        _reading(group, claim, bool(ours)),
    )


def _without(group: Group, model: str | None) -> PaperRow:
    if model is None:
        name, reading = "unknown model", "These logs do not say which model they are of."
    else:
        name = model
        reading = f"The paper has no {model.replace('_', ' ')}: there is no row to compare with."
        if model == "conv_autoencoder":
            reading += " It stands in for the models whose gradients underflow in FP16 (below)."
    return PaperRow(group.title, name, "", (), "", _our_scale(group), reading)


def _ours(group: Group, row: Row) -> PaperLine:
    return PaperLine(
        f"ours: {metric_name(group)}",
        row.arm.label,
        value_text(group.baseline.mean),
        value_text(row.mean),
        difference_text(group, row.verdict),
        row.verdict.name,
    )


def _reading(group: Group, claim: Claim, any_ours: bool) -> str:
    """What the two results beside each other mean, and what they do not."""
    said = []
    if not any_ours:
        said.append("None of the FP16 modes that this result is about was run.")
    ours = group.keys.get("data.name")
    if ours in _DATA:
        said.append(
            f"Another data set ({ours} instead of {claim.data}): compare the outcomes, the numbers "
            "say nothing about each other."
        )
    else:
        said.append(f"Numbers compare only if the data are {claim.data}.")
    if claim.ours_differs:
        said.append(claim.ours_differs)
    if claim is BIGLSTM:
        said += _about_biglstm(group)
    if claim is DCGAN and group.metric != "sliced_wasserstein":
        said.append("Losses of a GAN are no outcome; look at the sample grids.")
    said.append("The paper has one run per result and no interval.")
    return " ".join(said)


def _about_biglstm(group: Group) -> list[str]:
    said = []
    size = tuple(
        group.keys.get(f"model.{name}") for name in ("num_layers", "hidden_size", "projection_size")
    )
    if size != (2, 8192, 1024):
        said.append(f"A smaller relative of bigLSTM ({_lstm(group)}).")
    if (steps := _steps(group)) is not None and steps < DIVERGES_AFTER:
        said.append(
            "The paper's run without loss scaling fails after "
            f"{DIVERGES_AFTER:,} iterations; {steps:,} steps cannot show that."
        )
    return said


def _our_scale(group: Group) -> str:
    keys = group.keys
    name = str(keys.get("data.name") or "unknown data")
    data = _DATA.get(name, name)
    if keys.get("data.image_size") is not None:
        data += f" at {keys['data.image_size']}x{keys['data.image_size']}"
    if keys.get("data.level") is not None:
        data += f" ({keys['data.level']} level)"
    parts = [data]
    if keys.get("model.name") == "lstm_lm":
        parts.append(_lstm(group))
    if (steps := _steps(group)) is not None:
        parts.append(f"{steps:,} steps{_batch(keys, group.baseline.arm.runs[0])}")
    seeds = sorted({run.seed for run in group.baseline.arm.runs})
    parts.append(f"{len(seeds)} FP32 seed{'s' * (len(seeds) != 1)} ({seeds_text(seeds)})")
    parts += _machine(group)
    return "; ".join(parts)


def _batch(keys: dict, run: RunData) -> str:
    """ " of 20 x 35 tokens", samples and positions of a step."""
    size = keys.get("data.batch_size")
    if size is None:
        return ""
    size *= keys.get("train.accumulate") or 1
    length = keys.get("data.sequence_length")
    return f" of {size}{f' x {length}' if length else ''} {run.sample}s"


def _machine(group: Group) -> list[str]:
    """The devices of the runs; "CPU, 16-bit products emulated" where that is so."""
    names: dict[str, None] = {}  # keeps the order
    for run in group.every_run:
        name = run.environment.get("gpu") or (run.environment.get("device") or "").upper()
        emulated = name == "CPU" and run.keys.get("cpu_half", "emulated") == "emulated"
        names["CPU, 16-bit products emulated" if emulated else name] = None
    return [name for name in names if name]


def _steps(group: Group) -> int | None:
    """The length of the longest FP32 run, as it was trained."""
    steps = [run.last_step for run in group.baseline.arm.runs]
    return max(steps) if steps else None


def _lstm(group: Group) -> str:
    layers, hidden, projection = (
        group.keys.get(f"model.{name}") for name in ("num_layers", "hidden_size", "projection_size")
    )
    return f"{layers} x {hidden} cells" + (f", projection {projection}" if projection else "")


def _mode(row: Row) -> str:
    """The named mode; one with changed fields is "fp16_master+norm_dtype=fp16" in the record."""
    return row.arm.mode.partition("+")[0]
