"""Runs beside what Micikevicius et al. report for the same network.

A difference has the sign that `mprun compare` gives it: positive is worse. Our
result stands beside the paper's for the same model, with the scale of both. The paper's data sets
are not those of an embedded run, so a row shows whether the outcome is the same one, and says where
numbers cannot be compared.
"""

from dataclasses import dataclass
from typing import NamedTuple

from mprun.compare.findings import Comparison, Group, Row, RunData
from mprun.compare.published import PUBLISHED
from mprun.compare.text import difference_text, metric_name, seeds_text, value_text
from mprun.record.console import markdown_table


class PaperLine(NamedTuple):
    """One line of a row's table: the paper's or ours, all as text, in the order of HEADER."""

    who: str
    mode: str
    baseline: str = ""
    value: str = ""
    difference: str = ""
    outcome: str = ""


HEADER = ["who", "mode", "FP32", "this mode", "difference (+ is worse)", "outcome"]


class Claim(NamedTuple):
    """A result of the paper and the scale at which it was obtained."""

    model: str
    source: str  # the table or figure
    results: tuple[PaperLine, ...]  # of a table, or the curves of a figure
    data: str
    scale: str
    ours_differs: str = ""  # in what our model of that name is another one


def _lines(metric: str, *results: tuple[str, ...]) -> tuple[PaperLine, ...]:
    """results: mode, outcome, then FP32, mode and difference as text where they are given."""
    every = ((*result, "", "", "")[:5] for result in results)
    return tuple(
        PaperLine(f"paper: {metric}", mode, base, value, difference, outcome)
        for mode, outcome, base, value, difference in every
    )


_MASTERS = ("FP16, FP32 master weights", "no accuracy lost")
_TABLE_1 = "ILSVRC12, test on a single crop; one run per column; {}; no loss scaling"
_PUBLIC = "public schedule and batch size, not restated"
_CAFFE = f"random crop from 256x256 and horizontal flip; {_PUBLIC}"
_TORCH = f"augmentation of the PyTorch vision training script; {_PUBLIC}"


def _table_1(key: str, augmentation: str = _CAFFE, differs: str = "") -> Claim:
    row = PUBLISHED[key]
    told = (row.fp32, row.unscaled, row.difference(row.unscaled))
    lines = _lines(row.metric, (*_MASTERS, *told))
    return Claim(row.network, row.place, lines, row.data, _TABLE_1.format(augmentation), differs)


def _table_2(key: str, outcome: str) -> Claim:
    """outcome: without a loss scale."""
    row = PUBLISHED[key]
    lines = []
    for mode, told, value in (
        ("mixed, no loss scaling", outcome, row.unscaled),
        (f"mixed, loss scale {row.scale}", "matches FP32", row.scaled),
    ):
        difference = row.difference(value)
        lines.append((mode, told, row.fp32, *((value, difference) if difference else ())))
    scale = f"{row.data} test, VGG-type backbone; one run per column"
    return Claim(row.network, row.place, _lines(row.metric, *lines), row.data, scale)


def _table_3() -> Claim:
    rows = [PUBLISHED["speech_english"], PUBLISHED["speech_mandarin"]]
    lines = [
        (f"{_MASTERS[0]}, {row.network.rpartition(' ')[2]}", "5 to 10 % better", row.fp32,
         row.unscaled, row.difference(row.unscaled))
        for row in rows
    ]  # fmt: skip
    data = "; ".join(row.data for row in rows)
    scale = f"{data}; 115 and 215 million parameters, 20 epochs of Nesterov SGD; one run per column"
    return Claim("Deep Speech 2", "table 3", _lines(rows[0].metric, *lines), data, scale)


BIGLSTM = Claim(
    PUBLISHED["biglstm"].network,
    PUBLISHED["biglstm"].place,
    _lines(
        "perplexity (a figure, no number)",
        ("FP16, loss scale 1", PUBLISHED["biglstm"].unscaled),
        (f"FP16, loss scale {PUBLISHED['biglstm'].scale}", PUBLISHED["biglstm"].scaled),
    ),
    PUBLISHED["biglstm"].data,
    "One Billion Word, vocabulary 793K, 2 layers of 8192 cells with projection 1024, sampled "
    "softmax (8K negatives), Adagrad, batch 1024 over 4 GPUs, 50 epochs; one run per curve",
)
DIVERGES_AFTER = 300_000  # iterations, figure 5
DCGAN = Claim(
    "DCGAN",
    "figure 6",
    _lines(
        "samples, judged by eye",
        ("mixed precision", "uncurated samples side by side; no metric"),
    ),
    "CelebA",
    "CelebA faces of 128x128, Adam, 100K iterations, no loss scaling; one run per column",
    "The paper's generator has 7 fractionally-strided convolutions, its discriminator 6 "
    "convolutions and 2 fully connected layers.",
)
TRANSLATION = Claim(
    PUBLISHED["translation"].network,
    PUBLISHED["translation"].place,
    _lines(
        "perplexity (a figure, no number)",
        ("mixed, no loss scaling", PUBLISHED["translation"].unscaled),
        ("mixed, loss scaling", PUBLISHED["translation"].scaled),
    ),
    PUBLISHED["translation"].data,
    "English to French, LSTM encoder and decoder with attention, SGD; three FP32 runs, visibly "
    "apart, one run per other curve",
    "Attention is Luong's, without input feeding.",
)
MASTER_WEIGHTS = Claim(
    PUBLISHED["mandarin_weights"].network,
    PUBLISHED["mandarin_weights"].place,
    _lines(
        "accuracy (a figure)",
        ("FP16, FP16 weights updated directly", "80 % relative loss of accuracy"),
        ("FP16, FP32 master weights", "the curve of FP32"),
    ),
    PUBLISHED["mandarin_weights"].data,
    "a subset of about 800 hours, 20 epochs; one run per curve",
    "fp16_naive keeps norm layers and optimizer state in FP16 as well, not the weights alone.",
)
LOSS_SCALING = _table_2("ssd", "diverges")
OF_MODEL = {
    "alexnet": _table_1("alexnet"),
    "vgg16": _table_1("vgg"),
    "googlenet": _table_1("googlenet"),
    "inception_v2": _table_1("inception_v2"),
    "inception_v3": _table_1("inception_v3"),
    "resnet50": _table_1(
        "resnet50",
        _TORCH,
        "The paper's network has pre-activation blocks; ours is v1.5 (stride 2 in the 3x3 "
        "convolution).",
    ),
    "faster_rcnn": _table_2("faster_rcnn", "matches FP32"),
    "ssd_mini": LOSS_SCALING,
    "ssd300": LOSS_SCALING,
    "deep_speech2": _table_3(),
    "lstm_lm": BIGLSTM,
    "seq2seq": TRANSLATION,
    "dcgan": DCGAN,
}
_DATA = {
    "digits": "scikit-learn digits (1,437 training and 360 held-out images of 8x8, enlarged)",
    "digit_strips": "strips of 3 to 5 scikit-learn digits, read by columns in place of audio",
    "docs_text": "text of CPython's documentation",
    "unicode_names": "names of Unicode's characters",
    "synthetic_images": "random images (nothing to learn)",
    "synthetic_tokens": "random tokens (nothing to learn)",
}
_FP16_MODES = ("fp16_naive", "fp16_master", "fp16_master_scaled", "amp")
_LSTM_SIZES = ("model.num_layers", "model.hidden_size", "model.projection_size")


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
    ours = [
        PaperLine(
            f"ours: {metric_name(group)}",
            row.arm.label,
            value_text(group.baseline.mean),
            value_text(row.mean),
            difference_text(group, row.verdict),
            row.verdict.name,
        )
        for row in group.rows
        if _mode(row) in modes
    ]
    reading, lines = _reading(group, claim, bool(ours)), (*claim.results, *ours)
    told = (lines, claim.scale, _our_scale(group), reading)
    return PaperRow(group.title, claim.model, claim.source, *told)


def _without(group: Group, model: str | None) -> PaperRow:
    reading = "These logs do not say which model they are of."
    if model is not None:
        reading = f"The paper has no {model.replace('_', ' ')}: there is no row to compare with."
    if model == "conv_autoencoder":
        reading += " It stands in for the models whose gradients underflow in FP16 (below)."
    return PaperRow(group.title, model or "unknown model", "", (), "", _our_scale(group), reading)


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
    if claim.ours_differs and group.keys.get("model.variant") != "preactivation":
        said.append(claim.ours_differs)
    if (width := group.keys.get("model.width", 1)) != 1 and claim.source == "table 1":
        said.append(f"Ours has {width:g} of the channels.")
    if claim is BIGLSTM:
        said += _about_biglstm(group)
    if claim is DCGAN and group.metric != "sliced_wasserstein":
        said.append("Losses of a GAN are no outcome; look at the sample grids.")
    said.append("The paper has one run per result and no interval.")
    return " ".join(said)


def _about_biglstm(group: Group) -> list[str]:
    said = []
    if [group.keys.get(key) for key in _LSTM_SIZES] != [2, 8192, 1024]:
        said.append(f"A smaller relative of bigLSTM ({_lstm(group)}).")
    if (steps := _steps(group)) is not None and steps < DIVERGES_AFTER:
        said.append(
            "The paper's run without loss scaling fails after "
            f"{DIVERGES_AFTER:,} iterations; {steps:,} steps cannot show that."
        )
    return said


def _our_scale(group: Group) -> str:
    keys, runs = group.keys, group.baseline.arm.runs
    name = str(keys.get("data.name") or "unknown data")
    data = _DATA.get(name, name)
    if (size := keys.get("data.image_size")) is not None:
        data += f" at {size}x{size}"
    if (level := keys.get("data.level")) is not None:
        data += f" ({level} level)"
    parts = [data]
    if keys.get("model.name") == "lstm_lm":
        parts.append(_lstm(group))
    if (steps := _steps(group)) is not None:
        parts.append(f"{steps:,} steps{_batch(keys, runs[0])}")
    seeds = sorted({run.seed for run in runs})
    parts.append(f"{len(seeds)} FP32 seed{'s' * (len(seeds) != 1)} ({seeds_text(seeds)})")
    return "; ".join(parts + _machine(group))


def _batch(keys: dict, run: RunData) -> str:
    """ " of 20 x 35 tokens", samples and positions of a step."""
    size = keys.get("data.batch_size")
    if size is None:
        return ""
    size *= keys.get("train.accumulate") or 1
    length = keys.get("data.sequence_length") or keys.get("data.max_length")
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
    return max((run.last_step for run in group.baseline.arm.runs), default=None)


def _lstm(group: Group) -> str:
    layers, hidden, projection = map(group.keys.get, _LSTM_SIZES)
    return f"{layers} x {hidden} cells" + (f", projection {projection}" if projection else "")


def _mode(row: Row) -> str:
    """The named mode; one with changed fields is "fp16_master+norm_dtype=fp16" in the record."""
    return row.arm.mode.partition("+")[0]
