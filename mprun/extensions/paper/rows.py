"""The results of Micikevicius et al. (Mixed Precision Training, arXiv 1710.03740 v3, ICLR 2018).

A row is one result, whole: the published numbers, the runs that stand for it, how they differ from
the paper's, what each technique has to come to, and its figures. The rows stand in rows.yaml, which
is checked against the types here; what a run is seen to differ in is a function by name.

A margin, a length or a rate that was chosen after a look at some seeds fits those seeds. So those
of the small rows are chosen on development seeds, written down in settings.yaml with date and
reason, before any run that is judged, and judged on others.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec
import yaml
from msgspec.structs import replace

from mprun.comparison.findings import Group
from mprun.comparison.wording import seeds_text
from mprun.config.registry import metric_called
from mprun.errors import BadInput

EQUAL, FAILS, DIVERGES = "equal", "fails", "diverges"
# The paper's metrics, as tasks here declare them.
_METRICS = {"top-1 (%)": "top1", "mAP (%)": "map", "CER (%)": "cer"}
_MOST = 10_000  # seeds of a span


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping of the file: fields of other names or types are refused."""


class Published(_Row, frozen=True, kw_only=True):
    """One row of a table, or the curves of a figure: one run a column, no interval."""

    network: str  # the paper's name
    place: str  # the table or figure
    metric: str = ""  # that of the columns, with its unit; empty: the paper has no number
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


class PaperArm(_Row, frozen=True):
    """A technique that a row tests, beside FP32."""

    technique: str  # a short description
    overrides: tuple[str, ...]  # after those of the row
    outcome: Literal["", "equal", "fails", "diverges"] = ""  # the paper's; empty: it has none
    value: str = ""  # the paper's value, as printed
    constructed: bool = False  # only the row's own small runs are made to show the outcome


class PaperFigure(_Row, frozen=True):
    """A figure of the paper that the runs of a row redraw.

    draws is the curve ("training", "evaluation"), or the tensors of the histogram
    ("weight_gradients", "activation_gradients"); empty: sample grids.
    """

    key: str  # "fig3"
    shows: str  # the message of the paper's figure, in words
    draws: Literal["", "training", "evaluation", "weight_gradients", "activation_gradients"] = ""
    in_small: str = ""  # why ours, in small, shows something else

    @property
    def is_histogram(self) -> bool:
        """True if it counts the tensors of an FP32 run by exponent."""
        return self.draws.endswith("_gradients")


class Full(_Row, frozen=True):
    """The result at the paper's scale."""

    experiment: str  # the recipe
    folder: str  # that of the data below --data-root
    samples: int = 0  # samples (words of text) per epoch if the recipe counts epochs; 0: steps
    published: str = ""  # how long others trained, with the source
    missing: str = ""  # what a user has to provide beside the data

    @property
    def hours(self) -> Mapping[str, float]:
        """Mode -> hours on one H200 at the limit that `mprun bench --roofline` counts."""
        return HOURS.get(self.experiment, {})


class PaperRow(_Row, frozen=True):
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
    # The function of `_SEEN` that tells how existing runs differ.
    seen: Literal["", "width", "resnet", "stand_in", "lstm", "gan"] = ""
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
        figures = tuple(replace(figure, in_small="") for figure in self.figures)
        return replace(self, differs=(), tried="", constructed="", figures=figures)

    def commands(self) -> dict[str, tuple[str, ...]]:
        """Return technique -> the overrides of its runs without the seed; FP32 first."""
        return {"FP32": (*self.overrides, "precision=fp32")} | {
            arm.technique: (*self.overrides, *arm.overrides) for arm in self.arms
        }

    def seen_in(self, group: Group) -> Iterator[str]:
        """Yield how existing runs differ from the paper's training."""
        if self.seen:
            yield from _SEEN[self.seen](group)


def _width(group: Group) -> Iterator[str]:
    if (width := group.keys.get("model.width", 1)) != 1:
        yield f"{width:g} of the channels"


def _resnet(group: Group) -> Iterator[str]:
    if group.keys.get("model.variant") != "preactivation":
        yield "v1.5 (stride 2 in the 3x3 convolution) in place of pre-activation blocks"
    yield from _width(group)


def _stand_in(group: Group) -> Iterator[str]:
    if group.keys.get("model.name") == "conv_autoencoder":
        yield "a stand-in for networks whose gradients underflow in FP16"


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


_SEEN: dict[str, Callable[[Group], Iterator[str]]] = {
    "width": _width,
    "resnet": _resnet,
    "stand_in": _stand_in,
    "lstm": _smaller_lstm,
    "gan": _by_eye,
}


class _File(_Row, frozen=True):
    techniques: dict[str, PaperArm]
    # What rows share, as anchors of YAML.
    phrases: list[str]
    published: list[dict[str, str]]
    images: int
    rows: tuple[PaperRow, ...]


def text_of(name: str) -> str:
    """Return the text of a file beside this one."""
    return files("mprun.extensions.paper").joinpath(name).read_text(encoding="utf-8")


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FILE = msgspec.convert(yaml.load(text_of("rows.yaml"), Loader=_LOADER), _File)
ROWS, TECHNIQUES = _FILE.rows, _FILE.techniques
NAIVE = TECHNIQUES["naive"]
HOURS = json.loads(text_of("full_scale.json"))["hours"]  # recipe -> `Full.hours`


class Settled(_Row, frozen=True):
    """The settings of one row."""

    chosen: str  # the date
    looked_at: str = msgspec.field(name="seeds")
    metric: str  # that is judged
    margin: float  # `compare.margin`
    steps: int  # `train.steps`
    lr: float  # `optim.lr`
    seconds: float  # of a run: one core of a 2-core AMD EPYC, two runs side by side
    why: Mapping[str, str]  # the reason of margin, steps and lr

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that were looked at."""
        return seeds_of(self.looked_at)

    def reasons(self, margin: str) -> str:
        """Return what was chosen and why; margin: as text, with its unit."""
        values = {"margin": margin, "steps": f"{self.steps}", "lr": f"{self.lr:g}"}
        told = "; ".join(f"{name} {value}: {self.why[name]}" for name, value in values.items())
        return f"chosen on {self.chosen} with seeds {seeds_text(self.seeds)}: {told}"


class _Settings(_Row, frozen=True):
    held_out: str
    rows: dict[str, Settled]


@cache
def _settings() -> _Settings:
    content = yaml.load(text_of("settings.yaml"), Loader=yaml.BaseLoader)  # dates stay text
    return msgspec.convert(content, _Settings, strict=False)


def settings() -> dict[str, Settled]:
    """Return key of a row -> its settings."""
    return _settings().rows


def held_out() -> tuple[int, ...]:
    """Return the seeds that rows are judged on unless others are asked for."""
    return seeds_of(_settings().held_out)


@cache
def digest() -> str:
    """Return the first digits of settings.yaml's SHA-256, which every run of a row records."""
    return hashlib.sha256(text_of("settings.yaml").encode()).hexdigest()[:16]


def seeds_of(text: str) -> tuple[int, ...]:
    """Return the seeds of "100-104,200", ascending; BadInput for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        ends = part.strip().split("-")
        if len(ends) > 2 or not all(end.isdecimal() for end in ends):
            raise BadInput(f"--seeds {text}: must be whole numbers and spans, such as 100-104,200")
        low, high = int(ends[0]), int(ends[-1])
        if not low <= high < low + _MOST:
            raise BadInput(
                f"--seeds {text}: {part.strip()} must ascend, with at most {_MOST:,} seeds"
            )
        found |= {*range(low, high + 1)}
    return tuple(sorted(found))


def told(keys: Collection[str], seeds: Collection[int]) -> str:
    """Say whether the settings of these rows were chosen on any of these seeds."""
    chosen = {seed for key in keys if key in settings() for seed in settings()[key].seeds}
    if met := chosen & {*seeds}:
        return (
            f"Seeds {seeds_text(met)} are among those that margins, lengths or rates were chosen "
            "on: these outcomes confirm nothing."
        )
    return (
        f"Seeds {seeds_text(seeds)}: no margin, length or rate was chosen on them, but on seeds "
        f"{seeds_text(chosen)} (mprun/extensions/paper/settings.yaml)."
    )
