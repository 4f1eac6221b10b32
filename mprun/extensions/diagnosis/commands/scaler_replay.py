"""`mprun scaler-replay TRACE`: the result of every loss scaler on one overflow trace.

The loss scales are those of training, on the CPU. The trace of a recorded run comes from its
skipped updates, its scales and its probes, which show how far gradients were from overflow.
"""

import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mprun.cli.arguments import Arguments, names
from mprun.config.compose import compose_config, group_options, hydra_session
from mprun.config.fields import must_be, nearest
from mprun.config.registry import SCALERS
from mprun.config.schema import ScalerConfig
from mprun.errors import DONE, BadInput, Damaged
from mprun.extensions.diagnosis.commands import announce, page, record_of, unfinished
from mprun.extensions.diagnosis.overflow_trace import OverflowTrace, read_trace_file
from mprun.numerics.probe_record import GRADIENT_KINDS, ProbeRecord, read_probes, tensors_of
from mprun.record.console import markdown_table
from mprun.record.run_directory import replacing, write_json

if TYPE_CHECKING:
    from mprun.precision import LossScale

OWN = "this run's own"
MOST_CHANGES = 5000  # of one scaler in the JSON; logmax changes at every step
_WHAT = """\
What every loss scaler would have done on the overflows of one run. `mprun advise RUN` has it too;
here traces of other programs and scalers of your own can be had. Nothing is written without --out.

TRACE is a run directory, or a CSV or JSONL file with the columns

  step        ascending
  limit       largest loss scale that does not overflow at this step; or instead
  found_inf   0 or 1, with loss_scale: the scale it was seen at
  grad_max    largest unscaled gradient magnitude (optional; logmax needs it)

scaler.KEY=VALUE changes the scalers with this setting, as for a run.
"""
_MORE = """\
A run shows for each step whether it overflowed at the run's scale. For other scales the step's
neighbours decide: "assumed". If they decide nothing, the step counts as clean: "unknown". The
trace stays as it is: skipping other updates would have changed the training, which is not replayed.

Exit codes: 0 replayed, 2 bad input, 4 damaged record.
"""


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    given = _options(arguments)
    configs = _configs(given.scalers, given.settings, given.config_dir)
    announce(f"scaler-replay: {len(configs)} loss scalers on {given.trace}")
    found = replayed(given.trace, configs)
    page(found.as_dict(), found.as_text(), given.json)
    if given.out is not None and found.replays:
        given.out.mkdir(parents=True, exist_ok=True)
        figures = [given.out / "scaler-replay.png", given.out / "scaler-replay.svg"]
        draw_replays(found.replays, found.trace, figures)
        content = found.as_dict()
        write_json(given.out / "scaler-replay.json", content, indent=None, allow_nan=False)
        print(f"figure: {figures[0]}", file=sys.stderr)
    return DONE


def replayed(
    path: Path, configs: dict[str, ScalerConfig] | None = None, most: float = math.inf
) -> "Replayed":
    """Return what the loss scalers would have done on a run directory or a trace file.

    configs: by name; None: those of mprun. most: steps of the longest trace on which a scaler that
    takes each step singly is replayed, too.
    """
    trace, own = _of_run(path) if path.is_dir() else (read_trace_file(path), None)
    configs = _configs(None, [], None) if configs is None else configs

    import torch

    from mprun.build.precision import build_loss_scale

    replays, left_out = {}, {}
    for name, config in (({} if own is None else {OWN: own}) | configs).items():
        scale = build_loss_scale(config, torch.device("cpu"))
        if scale.needs_grad_max and trace.grad_max is None:
            left_out[name] = "needs the largest gradient of every step, which the trace lacks"
        elif scale.needs_grad_max and len(trace) > most:
            left_out[name] = f"would take long; mprun scaler-replay {path} --scalers {name} does it"
        else:
            replays[name] = replay(scale, trace)
    return Replayed(path, trace, replays, left_out)


def _options(arguments: list[str]) -> Namespace:
    """Parse the command line; its words become `trace` (a path) and `settings`."""
    parser = Arguments("scaler-replay", _WHAT, _MORE)
    add = parser.add_argument
    add("words", nargs="*", metavar="TRACE|scaler.KEY=VALUE", help="see above")
    every = f"options of the group scaler (all: {', '.join(scaler_names())}, and yours)"
    add("--scalers", type=names("--scalers"), metavar="NAME,NAME", help=every)
    add("--config-dir", metavar="DIR", help="your scalers, DIR/scaler/NAME.yaml")
    add("--json", action="store_true", help="print everything as JSON, no table")
    out = "write scaler-replay.png, .svg and .json into this folder, too"
    add("--out", type=Path, metavar="DIR", help=out)
    given = parser.parse(arguments)
    given.settings = [w for w in given.words if w.startswith("scaler.") and "=" in w]
    traces = [word for word in given.words if word not in given.settings]
    if len(traces) != 1:
        parser.error(f"needs one TRACE, got {' '.join(traces) or 'none'}")
    given.trace = Path(traces[0])
    if not given.trace.exists():
        raise BadInput(f"{given.trace}: no such file or directory")
    if given.out is not None and given.out.exists() and not given.out.is_dir():
        raise BadInput(f"--out {given.out}: must be a folder")
    return given


def _of_run(directory: Path) -> tuple[OverflowTrace, ScalerConfig | None]:
    """Return the trace of a run directory, and the run's scaler if that skips."""
    record = unfinished(record_of("scaler-replay", directory, "a run directory or a file"))

    import torch

    from mprun.build.precision import build_loss_scale

    try:
        config = ScalerConfig(**record["config"]["scaler"])
        own = build_loss_scale(config, torch.device("cpu"))
    except (KeyError, TypeError, ValueError):
        other = "recorded by another mprun (run.json: config.scaler)"
        raise BadInput(f"{directory}: {other}") from None
    return run_trace(directory, record, own), config if own.skips_nonfinite else None


def scaler_names(config_dir: str | None = None) -> list[str]:
    """List the options of the group scaler, without `none`."""
    with hydra_session(config_dir):
        return [name for name in group_options("scaler") if name != "none"]


def _configs(
    chosen: list[str] | None, settings: list[str], config_dir: str | None
) -> dict[str, ScalerConfig]:
    """Return the configuration of each scaler with its settings."""
    known = scaler_names(config_dir)
    chosen = known if chosen is None else chosen
    for name in chosen:
        if name not in known:
            raise BadInput(f"--scalers {name}: {must_be(name, known)}")
    if len(set(chosen)) < len(chosen):
        raise BadInput(f"--scalers {','.join(chosen)}: a name is there twice")
    configs: dict[str, ScalerConfig] = {}
    unused = list(settings)
    for name in chosen:
        config = compose_config([f"scaler={name}"], config_dir).config.scaler
        own = [text for text in settings if _key(text) in config.component.reads]
        if own:
            unused = [text for text in unused if text not in own]
            config = compose_config([f"scaler={name}", *own], config_dir).config.scaler
        if config.kind != "none":  # a user's option that skips nothing
            configs[name] = config
    for text in unused:
        keys = sorted({key for rule in SCALERS.values() for key in rule.reads})
        close = f"{nearest(_key(text), keys)} (allowed: {', '.join(keys)})"
        raise BadInput(f"{text}: no scaler here has such a setting{close}")
    return configs


def _key(text: str) -> str:
    return text.partition("=")[0].removeprefix("scaler.")


@dataclass(frozen=True, slots=True)
class Replayed:
    """The replay of one trace by each loss scaler; left_out: name -> why it is not there."""

    path: Path
    trace: OverflowTrace
    replays: "dict[str, Replay]"
    left_out: dict[str, str]

    def as_text(self) -> Iterator[str]:
        """Yield lines for the console."""
        trace, replays = self.trace, self.replays
        yield (
            f"What each loss scaler would have done in these {len(trace):,} steps. Where its scale "
            "is too large for a step's gradients they overflow, and the update is skipped."
        )
        header = ["scaler", "skipped", "first at", "last scale", "lowest", "highest", "end"]
        rows = [_row(name, found) for name, found in replays.items()]
        if not any(row[-1] for row in rows):
            header, *rows = (row[:-1] for row in (header, *rows))
        yield "\n" + markdown_table(header, rows)
        notes = ". ".join(note[:1].upper() + note[1:] for note in trace.notes)
        yield f"\n{notes or 'As the file says'}."
        unsure: dict[str, list[str]] = {}
        for name, found in replays.items():
            if found.known < found.steps:
                unsure.setdefault(_sureness(found), []).append(name)
        if unsure:
            yield "At another scale the steps around a step say whether it overflows, not surely:"
        yield from (f"  {', '.join(names)}: {how}" for how, names in unsure.items())
        yield "Other skipped updates would have changed the training after them; that is left out."
        for name, reason in self.left_out.items():
            yield f"Left out: {name} {reason}."

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        scalers = {
            name: {
                "skipped": len(found.skipped),
                "skipped_known": found.skipped_known,
                "skip_steps": found.skipped.tolist(),
                "scale_changes": found.changes[:MOST_CHANGES],
                "scale_changes_left_out": max(0, len(found.changes) - MOST_CHANGES),
                "final_scale": found.final,
                "min_scale": found.lowest,
                "max_scale": found.highest,
                "collapsed_at": found.collapsed_at,
                "steps": found.steps,
                "decided": {kind: getattr(found, kind) for kind in _SURE},
            }
            for name, found in self.replays.items()
        }
        trace = self.trace
        place = {"trace": str(self.path), "first_step": trace.first_step, "steps": len(trace)}
        return {**place, "notes": trace.notes, "scalers": scalers, "left_out": self.left_out}


# How a step is decided -> in words.
_SURE = {"known": "seen", "assumed": "assumed from other steps", "unknown": "taken as no overflow"}


def _sureness(found: "Replay") -> str:
    counts = {words: getattr(found, kind) for kind, words in _SURE.items()}
    shares = (f"{100 * n / found.steps:.3g} % {words}" for words, n in counts.items() if n)
    return ", ".join(shares)


def _row(name: str, found: "Replay") -> list[str]:
    count, at = len(found.skipped), found.collapsed_at
    assumed = count - found.skipped_known
    skipped = f"{count} ({assumed} assumed)" if assumed else f"{count}"
    first = str(found.skipped[0]) if count else ""
    scales = map(_power, (found.final, found.lowest, found.highest))
    return [name, skipped, first, *scales, "" if at is None else f"gives up at step {at}"]


def _power(value: float) -> str:
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Replay:
    """The course of one loss scale on a trace; steps are numbered as in the trace.

    changes: (step, scale): the scale from this step on, including the first step. skipped: int64,
    steps whose update it skipped. final: the scale after the last step. lowest, highest: of the
    scales in use. collapsed_at: the step at which its own rule for giving up became true, where a
    run and the replay end. steps: replayed ones. known, assumed, unknown: how many of them the
    trace decides by the step itself, by other steps, or not at all (taken as clean). skipped_known:
    skipped updates of the first kind.
    """

    changes: list[tuple[int, float]]
    skipped: np.ndarray
    final: float
    lowest: float
    highest: float
    collapsed_at: int | None
    steps: int
    known: int
    assumed: int
    unknown: int
    skipped_known: int


def replay(scale: "LossScale", trace: OverflowTrace, stop_at_collapse: bool = True) -> Replay:
    """Run a fresh CPU loss scale (not `none`) over the trace, to its end or its collapse.

    A stretch of clean steps in which only the counters change takes one update and one addition. So
    100,000 steps take a tenth of a second; logmax, which changes at every step and needs the trace
    to have `grad_max`, takes some 10 seconds.
    """
    import torch

    changes: list[tuple[int, float]] = []
    skips: list[int] = []
    first, index, collapsed_at, largest = trace.first_step, 0, None, None
    overflow, found_inf = trace.likely_overflow.tolist(), (torch.zeros(()), torch.ones(()))
    while index < len(trace) and not (stop_at_collapse and collapsed_at is not None):
        value = scale.scale.item()
        if not changes or changes[-1][1] != value:
            changes.append((first + index, value))
        if scale.needs_grad_max and trace.grad_max is not None:
            largest = torch.tensor(trace.grad_max[index], dtype=torch.float32)
        overflows = value >= overflow[index]
        scale.record(found_inf[overflows], largest)
        scale.update()
        index += 1
        if overflows:
            skips.append(index - 1)
            if collapsed_at is None and bool(scale.collapsed()):
                collapsed_at = first + index - 1
        elif scale.scale.item() == value:
            index += _count_clean_steps(scale, trace.next_overflow(value, index) - index)
    starts = np.array([step for step, _ in changes]) - first
    values, skipped = np.array([value for _, value in changes]), np.array(skips, np.int64)
    known, likely = trace.decided(np.repeat(values, np.diff(starts, append=index)))
    return Replay(
        changes,
        skipped + first,
        scale.scale.item(),
        float(values.min()),
        float(values.max()),
        collapsed_at,
        steps=index,
        known=int(known.sum()),
        assumed=int((likely & ~known).sum()),
        unknown=int((~likely).sum()),
        skipped_known=int(known[skipped].sum()),
    )


def _count_clean_steps(scale: "LossScale", most: int) -> int:
    """Pass at most `most` clean steps at which the rule only counts; return how many."""
    from mprun.precision import DynamicLossScale, LogMaxLossScale

    if isinstance(scale, LogMaxLossScale):
        return 0
    if isinstance(scale, DynamicLossScale):
        # All but the step at which the scale grows.
        most = min(most, scale.growth_interval - 1 - int(scale.growth_tracker))
        scale.growth_tracker.add_(most)
        if scale.tolerance > 0:
            scale.steps_since_rescale.add_(most)
    return most


def probed_bounds(
    directory: Path, steps: int, every_dtype: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """Return (clean, overflow, grad_max, probes) of the steps 1 to `steps` of a run directory.

    clean: float64 [steps], the largest scale (in powers of two from the run's own) at which no
    probed gradient overflows FP16; 0 without a probe. overflow: twice that, at which one does; inf
    without a probe. Only gradients in FP16 count; with `every_dtype` all count, as if they were
    FP16. grad_max: largest unscaled weight gradient of the nearest finite probe before the step
    (for the first ones, after it); None if no probe was finite.
    """
    clean, overflow = np.zeros(steps), np.full(steps, np.inf)
    largest, probes = np.full(steps, np.nan), 0
    for probe in read_probes(directory):
        shown, at = _shown_by(probe, every_dtype), probe.step - 1
        if 0 <= at < steps and shown is not None:
            probes += 1
            clean[at], largest[at] = shown
            overflow[at] = 2 * clean[at]
    known = np.flatnonzero(np.isfinite(largest))
    if not len(known):
        return clean, overflow, None, probes
    before = np.searchsorted(known, np.arange(steps), side="right") - 1
    return clean, overflow, largest[known[np.maximum(before, 0)]], probes


def _shown_by(probe: ProbeRecord, every_dtype: bool) -> tuple[float, float] | None:
    """Return (a clean scale whose double overflows, largest unscaled weight gradient) if known."""
    exponents, largest = [], []
    for kind in GRADIENT_KINDS:
        for _, stats, scales in tensors_of([probe], kind):
            scale, counts = scales[0], stats.counts
            if kind == "weight_gradients":
                largest.append(stats.amax / 2.0**scale)
            if not every_dtype and "fp16" not in stats.dtype.split("+"):
                continue
            if len(set(scales)) > 1 or counts.inf or counts.nan:
                return None
            if counts.headroom is not None:
                exponents.append(scale + counts.headroom)
    return (2.0 ** min(exponents), max(largest, default=math.nan)) if exponents else None


def run_trace(directory: Path, record: dict[str, Any], own: "LossScale") -> OverflowTrace:
    """Return the trace of a run directory; `record`: its run.json, `own`: its scaler, fresh.

    Every skipped update is recorded with its scale. Most clean steps are not recorded; running
    `own` over the skips gives their scale, which must agree with every recorded scale. Probes show
    how far the gradients were from overflow, for scales other than the run's own. Raises BadInput
    for a run that cannot show its overflows, Damaged for records that contradict each other.
    """
    from mprun.numerics.failure import recorded_rows

    per = record["config"]["scaler"].get("per", "shared")
    if per != "shared":
        raise BadInput(
            f"{directory}: scaler.per={per} records the overflows of several scales as one; "
            "use a run with scaler.per=shared"
        )
    rows = recorded_rows(directory)
    if not rows:
        raise BadInput(f"{directory}: no step recorded yet")
    last = rows[-1]["step"]
    skips = own.skips_nonfinite
    probably_clean, probed, grad_max, probes = probed_bounds(directory, last, not skips)
    if not skips and not probes:
        raise BadInput(
            f"{directory}: scaler=none skips nothing, so its overflows are not recorded; use a run "
            "with another scaler, or with numerics=on"
        )
    if skips:
        overflowed, skipped = np.zeros(last, bool), rows[-1]["skipped"]
        overflowed[[row["step"] - 1 for row in rows if row["found_inf"]]] = True
        if (found := int(overflowed.sum())) != skipped:  # every skip has its own record
            raise Damaged(f"{directory}: {skipped} skipped updates, {found} of them recorded")
        scales, notes = _scales(rows, overflowed, own)
        clean = np.where(overflowed | np.isnan(scales), 0.0, scales)
        overflow = np.where(overflowed, scales, np.inf)
        bad = [
            row["step"] - 1 for row in rows if row["found_inf"] and not math.isfinite(row["loss"])
        ]
        overflow[bad] = 0.0  # at any scale
        notes.insert(0, f"known: {last} steps, {skipped} skipped, each at the run's own scale")
        if bad:
            notes.append(f"{len(bad)} of them at any scale: the loss itself was not finite")
        overflow = np.where((probed > clean) & (probed < overflow), probed, overflow)
    else:
        clean, overflow = np.zeros(last), probed
        notes = [f"{last} steps without a scaler; what its gradients would do in FP16 is assumed"]
    if probes:
        notes.append(
            f"{probes} probes show the scale from which on a probed gradient overflows; gradients "
            "inside kernels may overflow below it"
        )
    if grad_max is not None:
        notes.append("largest gradient for logmax: of the nearest probe before each step")
    return OverflowTrace(1, clean, overflow, grad_max, notes, probably_clean)


def _scales(
    rows: list[dict[str, Any]], overflowed: np.ndarray, own: "LossScale"
) -> tuple[np.ndarray, list[str]]:
    """Return the scale of each step, float64 [n], NaN where unknown; and notes on it."""
    recorded = np.full(len(overflowed), np.nan)
    recorded[[row["step"] - 1 for row in rows]] = [row["loss_scale"] for row in rows]
    if own.needs_grad_max:
        return recorded, ["logmax moves at every step: known are the steps with a record alone"]
    # The scales of `own` if exactly these steps overflow.
    bound = np.where(overflowed, 0.0, np.inf)
    changes = replay(own, OverflowTrace(1, bound, bound), stop_at_collapse=False).changes
    starts, values = zip(*changes, strict=True)
    scales = np.repeat(values, np.diff(starts, append=len(bound) + 1))
    given = np.flatnonzero(~np.isnan(recorded))
    wrong = given[scales[given] != recorded[given]]
    if not len(wrong):
        return scales, []
    # The scale between two records with equal scales is theirs (a change back shows as a skip).
    for a, b in pairwise(given.tolist()):
        if recorded[a] == recorded[b]:
            recorded[a:b] = recorded[a]
    note = (
        f"the recorded scale of step {wrong[0] + 1} is not that of the run's own rule; between two "
        "records the scale is known where both have the same"
    )
    return recorded, [note]


_TICKS = 400  # most skipped updates drawn per scaler


def draw_replays(replays: dict[str, Replay], trace: OverflowTrace, paths: list[Path]) -> None:
    """Write one figure to every path, in the format of its ending (.png, .svg)."""
    from mprun.plots.panel import settings

    with settings():
        figure = _figure(replays, trace)
        for path in paths:
            with replacing(path, durable=False) as file:
                figure.savefig(file, dpi=160, format=path.suffix[1:])


def _figure(replays: dict[str, Replay], trace: OverflowTrace):
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from mprun.plots.panel import line_entry, mark_entry, panel, power_of_two, styles, thousands

    looks = styles(replays)
    entries = [*(line_entry(name, looks[name]) for name in replays), mark_entry("collapsed", "x")]
    height = 2.4 + 0.13 * len(replays)
    figure, axes = panel("Loss scale of each scaler on one trace", height, entries)
    for layer, (name, found) in enumerate(replays.items()):
        end = trace.first_step + found.steps
        steps = [step for step, _ in found.changes] + [end]
        power = np.log2([scale for _, scale in found.changes] + [found.changes[-1][1]])
        # The first line is the widest, so that equal scales stay visible below each other.
        wide = 1.2 + 2.4 * (1 - (layer + 1) / len(replays))
        axes.plot(steps, power, **looks[name].line, linewidth=wide, drawstyle="steps-post")
        if found.collapsed_at is not None:
            axes.plot(end, power[-1], "x", color=looks[name].colour, markersize=8, zorder=9)
    axes.margins(0.03, 0.08)
    low, high = axes.get_ylim()
    low = min(low, high - 2)
    ticks = MaxNLocator(nbins=6, integer=True).tick_values(low, high)
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    share = 0.13 * len(replays) / height  # part of the height for the rows of skipped updates
    axes.set_ylim(low - share / (1 - share) * (high - low), high)
    for number, (name, found) in enumerate(replays.items()):
        shown = found.skipped
        if len(shown) > _TICKS:
            shown = shown[np.linspace(0, len(shown) - 1, _TICKS).astype(int)]
        level = np.full(len(shown), share * (1 - (number + 0.5) / len(replays)))
        tick = {"color": looks[name].colour, "markersize": 6, "markeredgewidth": 1.2}
        axes.plot(shown, level, "|", **tick, transform=axes.get_xaxis_transform())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_two(round(value))))
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.set_xlabel("step (ticks below: skipped updates, a row for each scaler)")
    axes.set_ylabel("loss scale")
    axes.grid()
    return figure
