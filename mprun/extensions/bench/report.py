"""bench.md and bench.png: tables and bars of a bench, from the plain content of bench.json."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mprun.extensions.bench.cases import OWN
from mprun.plots.panel import GREY, INK, settings, styles, thousands
from mprun.record.console import markdown_table

Cell = Callable[[dict], str]  # row -> text
Columns = Sequence[tuple[str, Cell]]  # header, cell
_KINDS = ("parameters", "master_weights", "gradients", "optimizer_state", "activations")
_PUBLISHED = (
    "Published for comparison: 1.3 to 6 times FP32 on V100 (Micikevicius et al., arXiv 1710.03740, "
    "section 5); ResNet-50 3.26 times FP32 on V100 and 2.63 times TF32 on A100 (NVIDIA "
    "DeepLearningExamples, PyTorch ResNet-50 v1.5)."
)
_RATES = (
    "samples/s: median [first quartile, third quartile], n windows. Ratios: median of paired "
    "windows with a bootstrap 95 % interval; ~ marks two that were not alive together (ratio of "
    "medians). Limit: the roofline of products and update under the ceilings below, with all else "
    "folded into them: a step stays below 100 %, unless a cache holds its tensors. First use: "
    "seconds of compilation, capture and autotuning; entries in this machine's compiler cache "
    "shorten it."
)
_MEMORY_NOTE = (
    "MiB. Process: as the driver counts it, on a CPU the resident set, Python and torch "
    "included. Activations: tensors that one step saves for its backward pass. All kinds: also "
    "casts of weights and gradients, averages and norm statistics. If steps are replayed from a "
    "graph, the peak allocated is that of the same step taken eagerly."
)
_TIME_NOTE = (
    "Host: median time to issue one step to an idle device without waiting for it; on a CPU "
    "that is the step. Shares of a step: eager steps of mprun alone, from events on the stream."
)
_ANSWERS = {True: "equal", False: "UNEQUAL", None: "not compared"}
_ENDINGS = {
    "complete": "",
    "running": " Still under way: results until then.",
    "deadline": " The budget ended the bench.",
    "interrupted": " Interrupted: results until then.",
}
_ROW, _FRAME = 0.2, 0.8  # inches: a bar; title and axis


def markdown(bench: dict, beside: Columns = (), more: Mapping[str, str] | None = None) -> str:
    """Return the whole report.

    Args:
        bench: content of bench.json with its summaries (`mprun.extensions.bench.summary`).
        beside: further columns of the table of speeds, after the ratios.
        more: further sections before the ceilings: title -> text.
    """
    rows = bench["rows"]
    timed = [row for row in rows if row["summary"] is not None]
    held = [row for row in timed if not row["case"]["real_data"]]
    real = [row for row in timed if row["case"]["real_data"]]
    own = [row for row in held if row["case"]["contender"] in OWN]
    nvml = "; ".join(sorted(set(bench["nvml"].values())))
    unreadable = f"Not readable: {nvml}." if held and nvml else ""
    with_host = [row for row in held if "host_s" in row["details"]]
    with_losses = [row for row in rows if "losses" in row["equality"]]
    sections = {
        "A. Speed, batches that lie on the device": _of_rows(
            [*_SPEED[:3], *beside, *_SPEED[3:]], held, _RATES
        ),
        "B. Speed of mprun's modes over FP32 and TF32": _of_rows(_OVER, own, _PUBLISHED),
        "C. Memory": _of_rows(_MEMORY, held, _MEMORY_NOTE),
        "D. Energy": _of_rows(_ENERGY, held) or unreadable,
        "E. Time of a step": _of_rows(_TIME, with_host, _TIME_NOTE),
        "End to end: mprun with the data source of the configuration": _of_rows(_REAL, real),
        "F. Correctness": _of_rows(_CORRECTNESS, with_losses),
        "Not measured": _missing(bench),
        **(more or {}),
        "Ceilings, measured in this run": _ceilings(bench["ceilings"]),
        "Where it ran": _environment(bench),
    }
    parts = [f"# mprun bench: {bench['device_name']}", _ending(bench)]
    parts += [f"## {title}\n\n{text}" for title, text in sections.items() if text]
    return "\n\n".join(parts) + "\n"


def number(value: float | None, form: str, times: float = 1, unit: str = "") -> str:
    """Return `times` the value in a format, or a dash if it was not measured."""
    return "-" if value is None else f"{times * value:{form}}{unit}"


def significant(value: float) -> str:
    """Return four digits with thousands separated: 12,340 or 0.1234."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def ratio_text(row: dict, name: str) -> str:
    found = row["summary"]["ratios"].get(name)
    if found is None:
        return "-"
    mark = "" if found["paired"] else "~"
    text = f"{mark}{found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
    return f"{text} {found['peer']}" if "peer" in found else text


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return the table without its empty columns; "" without lines."""
    if not lines:
        return ""
    kept = [i for i in range(len(header)) if any(line[i] not in ("", "-") for line in lines)]
    return markdown_table([header[i] for i in kept], [[line[i] for i in kept] for line in lines])


def _of_rows(columns: Columns, rows: Sequence[dict], note: str = "") -> str:
    """Return a table of the rows in which something was measured, and the note; "" without any."""
    found = [(_names(row), [cell(row) for _, cell in columns]) for row in rows]
    lines = [[*names, *cells] for names, cells in found if {*cells} - {"-"}]
    text = table(["model", "mode", "contender", *(header for header, _ in columns)], lines)
    return f"{text}\n\n{note}" if text and note else text


def _names(row: dict) -> list[str]:
    case = row["case"]
    where = " (end to end)" if case["real_data"] else ""
    return [case["label"], case["mode"], f"{case['contender']}{where}"]


def _ending(bench: dict) -> str:
    rows = bench["rows"]
    timed = sum(row["summary"] is not None for row in rows)
    text = f"{timed} of {len(rows)} cases measured in {bench['elapsed_s']:.0f} s"
    text += f" (budget {bench['options']['budget_s']:g} s), {bench['created']}."
    text += _ENDINGS[bench["ended"]]
    cohorts = {(r["case"]["label"], w["cohort"]) for r in rows for w in r["windows"]}
    counts = Counter(label for label, _ in cohorts)
    if apart := sorted(label for label, count in counts.items() if count > 1):
        text += (
            f" Memory did not hold all contenders at once: {', '.join(apart)} in several cohorts, "
            "one after the other."
        )
    return text


def _rate(row: dict) -> str:
    rate = row["summary"]["rate"]
    quartiles = f"[{significant(rate['q1'])}, {significant(rate['q3'])}]"
    unit = row["facts"]["build"]["sample"]
    return f"{significant(rate['median'])} {quartiles} {unit}s/s, n={rate['n']}"


def _notes(row: dict) -> str:
    notes = []
    if not row["warm_up"].get("steady", True):
        notes.append(f"not steady: last windows {100 * row['warm_up']['apart']:.1f} % apart")
    if not all(window["loss_is_finite"] for window in row["windows"]):
        notes.append("loss not finite")
    if row["reason"]:
        notes.append(row["reason"])
    if "no_ratio" in row["summary"]:
        notes.append(row["summary"]["no_ratio"])
    return "; ".join(notes)


def _peak(row: dict, *names: str) -> str:
    """Return the first of these peaks that was measured, in MiB."""
    found = row["details"].get("peak", {})
    return _mib(next((found[name] for name in names if name in found), None))


def _kind(name: str, row: dict) -> str:
    sizes = row["details"].get("memory_by_kind", {}).get(name)
    return _mib(sizes and sum(sizes.values()))


_share = partial(number, form=".0f", times=100, unit=" %")
_mib = partial(number, form=",.1f", times=2**-20)


def _sensors(row: dict) -> dict[str, str]:
    window = row["details"].get("energy_window") or row["windows"][-1]
    return {name: f"{b:.0f} to {a:.0f}" for name, (b, a) in window["sensors"].items()}


def _step_ms(row: dict) -> str:
    window = row["windows"][-1]
    return f"{1000 * window['seconds'] / window['steps']:.3g}"


def _waits(row: dict) -> str:
    found = row["details"].get("synchronisations")
    return f"{found:g}" if isinstance(found, int | float) else "-"


def _split(row: dict) -> str:
    """Return the phases of a step in percent, or why there are none."""
    found = row["details"].get("time_split")
    if not found or "why_not" in found:
        return found["why_not"] if found else "-"
    phases = ("data", "forward", "backward", "update")
    return " / ".join(f"{100 * found[phase] / found['step']:.0f}" for phase in phases)


def _last_loss(row: dict) -> str:
    loss = row["equality"]["losses"][-1]
    return f"{loss:.5f}" if isinstance(loss, float) else str(loss)


def _missing(bench: dict) -> str:
    rows = [row for row in bench["rows"] if not row["windows"]]
    lines = [[*_names(row), row["status"], row["reason"]] for row in rows]
    # One line for all modes that a contender omits for the same reason.
    groups: dict[tuple[str, str, str], list[str]] = {}
    for left in bench["left_out"]:
        place = left["label"], left["contender"], left["reason"]
        groups.setdefault(place, []).append(left["mode"])
    for (label, contender, reason), modes in groups.items():
        lines.append([label, ", ".join(modes), contender, "left out", reason])
    return table(["model", "mode", "contender", "status", "reason"], lines)


_SPEED: Columns = (
    ("samples/s", _rate),
    ("vs FP32", partial(ratio_text, name="fp32")),
    ("vs TF32", partial(ratio_text, name="tf32")),
    ("of limit", lambda row: _share(row["summary"]["limit_share"])),
    ("first use s", lambda row: number(row["facts"]["prepare"]["first_use_s"], ".1f")),
    ("notes", _notes),
)
_OVER: Columns = (
    ("over FP32", partial(ratio_text, name="fp32")),
    ("over TF32", partial(ratio_text, name="tf32")),
)
_MEMORY: Columns = (
    ("peak allocated", lambda row: _peak(row, "allocated")),
    ("of FP32", lambda row: number(row["summary"]["peak_ratio"], ".2f")),
    ("reserved", lambda row: _peak(row, "reserved")),
    ("process", lambda row: _peak(row, "process", "resident")),
    *((name.replace("_", " "), partial(_kind, name)) for name in _KINDS),
    ("all kinds", lambda row: _mib(row["summary"]["memory_bytes"])),
    ("of FP32", lambda row: number(row["summary"]["memory_ratio"], ".2f")),
)
_ENERGY: Columns = (
    ("J per sample", lambda row: number(row["summary"]["energy_j"], ".4g")),
    ("power W", lambda row: _sensors(row).get("power_w", "-")),
    ("SM clock MHz", lambda row: _sensors(row).get("sm_clock_mhz", "-")),
    ("degrees C", lambda row: _sensors(row).get("temperature_c", "-")),
)
_TIME: Columns = (
    ("step ms", _step_ms),
    ("host us", lambda row: number(row["summary"]["host_us"], ",.0f")),
    ("syncs", _waits),
    ("data / forward / backward / update, %", _split),
)
_REAL: Columns = (
    ("samples/s", _rate),
    ("waiting for data", lambda row: _share(row["summary"]["data_wait"])),
)
_CORRECTNESS: Columns = (
    ("loss at step 20", _last_loss),
    ("skipped by 20", lambda row: str(row["equality"]["skipped"])),
    ("skipped in all", lambda row: number(row["details"].get("skipped"), "d")),
    ("verdict", lambda row: _ANSWERS[row["equality"].get("ok")]),
    ("why", lambda row: row["equality"].get("reason") or ""),
)


def _ceilings(found: dict | None) -> str:
    if not found:
        return ""
    lines = [["copy, bytes read and written", f"{found['bandwidth'] / 1e9:,.1f} GB/s"]]
    for name, rate in found["flops"].items():
        text = f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"
        lines.append([f"{name} product, {found['matmul_size']} cubed", text])
    return table(["what", "rate"], lines)


def _environment(bench: dict) -> str:
    facts = bench["environment"]
    dirty = " (with local changes)" if facts["dirty"] else ""
    lines = [
        ["device", bench["device_name"]],
        ["driver", bench["driver"] or "-"],
        ["torch", facts["packages"]["torch"]],
        ["CUDA, cuDNN", f"{facts.get('cuda', '-')}, {facts.get('cudnn', '-')}"],
        ["mprun", f"{facts['mprun']}, commit {facts['commit'] or 'unknown'}{dirty}"],
        ["Python, system", f"{facts['python']}, {facts['platform']}"],
        ["CPU", f"{facts['cpu']}, {facts['cpu_count']} cores"],
        ["windows asked for", str(bench["options"]["windows"])],
    ]
    return "\n\n".join([table(["what", "value"], lines), *_flags(bench["rows"])])


def _flags(rows: list[dict]) -> list[str]:
    """Return the active flags: the common ones once, then those of single modes."""
    facts = [(row["case"]["mode"], row["facts"]) for row in rows]
    modes = {mode: own["prepare"]["flags"] for mode, own in facts if "prepare" in own}
    first: dict = next(iter(modes.values()), {})
    common = [p for p in first.items() if all(p in flags.items() for flags in modes.values())]
    groups = {"all modes": common}
    groups |= {m: [pair for pair in own.items() if pair not in common] for m, own in modes.items()}
    texts = {who: ", ".join(f"{key}={value}" for key, value in groups[who]) for who in groups}
    return [f"Flags of {who}: {text}" for who, text in texts.items() if text]


def write_figure(path: Path, bench: dict) -> None:
    """Draw samples per second on batches that lie on the device, a bar for each contender.

    Nothing is written if there are none.
    """
    groups: dict[str, list[dict]] = {}
    for row in bench["rows"]:
        if row["summary"] is not None and not row["case"]["real_data"]:
            groups.setdefault(row["case"]["label"], []).append(row)
    if not groups:
        return
    heights = [_ROW * len(rows) + _FRAME for rows in groups.values()]
    colours = styles([row["case"]["mode"] for rows in groups.values() for row in rows])
    note = "median of windows, whiskers: quartiles; x: ratio to FP32 of the same contender"
    with settings():
        figure = Figure(figsize=(6.4, sum(heights) + 0.5), layout="constrained")
        figure.suptitle(bench["device_name"], x=0.02, ha="left", fontsize=10, fontweight="bold")
        figure.supxlabel(note, x=0.02, ha="left", fontsize=8, color=GREY)
        panels = figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0]
        for axes, (label, rows) in zip(panels, groups.items(), strict=True):
            _bars(axes, label, rows, colours)
        figure.savefig(path, dpi=160)


def _bars(axes: Axes, label: str, rows: list[dict], colours: dict) -> None:
    unit = rows[0]["facts"]["build"]["sample"]
    axes.set_title(label, pad=5)
    axes.set_xlabel(f"{unit}s per second", labelpad=2)
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    for position, row in enumerate(rows):
        rate, mode = row["summary"]["rate"], row["case"]["mode"]
        median = rate["median"]
        whiskers = [[median - rate["q1"]], [rate["q3"] - median]]
        axes.barh(position, median, height=0.72, color=colours[mode].colour, alpha=0.85)
        axes.errorbar(median, position, xerr=whiskers, color=GREY, capsize=2.5, linewidth=1)
        versus = row["summary"]["ratios"].get("fp32")
        text = significant(median) + (f"  x{versus['median']:.2f}" if versus else "")
        axes.text(rate["q3"], position, f"  {text}", va="center", fontsize=8, color=INK)
    names = [f"{row['case']['mode']}  {row['case']['contender']}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.18 * max(row["summary"]["rate"]["q3"] for row in rows))
