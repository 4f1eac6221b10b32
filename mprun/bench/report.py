"""bench.md: the tables of a bench, from the plain content of bench.json."""

from mprun.bench.report_cells import (
    bytes_text,
    number,
    rate_text,
    ratio_text,
    share_text,
    split_text,
)
from mprun.record.console import markdown_table as _aligned

_PUBLISHED = (
    "Published for comparison: 1.3 to 6 times FP32 on V100 (Micikevicius et al., arXiv 1710.03740, "
    "section 5); ResNet-50 3.26 times FP32 on V100 and 2.63 times TF32 on A100 (NVIDIA "
    "DeepLearningExamples, PyTorch ResNet-50 v1.5)."
)
_RATES = (
    "samples/s: median [first quartile, third quartile], n windows. Ratios: median of paired "
    "windows with a bootstrap 95 % interval; ~ marks two that were not alive together (ratio of "
    "medians). "
)


def markdown(bench: dict) -> str:
    """The whole report; `bench` with its summaries (mprun.bench.summary)."""
    rows = bench["rows"]
    timed = [row for row in rows if row["summary"] is not None]
    synthetic = [row for row in timed if not row["case"]["real_data"]]
    parts = [f"# mprun bench: {bench['device_name']}", _ending(bench)]
    if synthetic:
        parts += ["## A. Speed, batches that lie on the device", _speed(synthetic), _rate_note()]
        parts += _section("B. Speed of mprun's modes over FP32 and TF32", _modes(synthetic))
        parts += _section("C. Memory", _memory(synthetic))
        parts += _section("D. Energy", _energy(synthetic, bench))
        parts += _section("E. Time of a step", _time(synthetic))
    real = [row for row in timed if row["case"]["real_data"]]
    if real:
        parts += _section(
            "End to end: mprun with the data source of the configuration", _real(real)
        )
    parts += _section("F. Correctness", _correctness(rows))
    parts += _section("Not measured", _missing(bench))
    if bench.get("targets"):
        parts += _section("Targets for one H200", _targets(bench["targets"]))
    parts += _section("Ceilings, measured in this run", _ceilings(bench))
    parts += _section("Where it ran", _environment(bench))
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(header: list[str], lines: list[list[str]]) -> str:
    """The table without the columns in which no row has anything."""
    kept = [i for i in range(len(header)) if any(line[i] not in ("", "-") for line in lines)]
    return _aligned([header[i] for i in kept], [[line[i] for i in kept] for line in lines])


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []


def _ending(bench: dict) -> str:
    rows = bench["rows"]
    timed = sum(row["summary"] is not None for row in rows)
    text = f"{timed} of {len(rows)} cases measured in {bench['elapsed_s']:.0f} s"
    text += f" (budget {bench['options']['budget_s']:g} s), {bench['created']}."
    endings = {
        "complete": "",
        "deadline": " The budget ended the bench.",
        "interrupted": " Interrupted: what was measured until then.",
    }
    cohorts = {(r["case"]["label"], w["cohort"]) for r in rows for w in r["windows"]}
    apart = sorted({label for label, _ in cohorts if sum(c[0] == label for c in cohorts) > 1})
    text += endings[bench["ended"]]
    if apart:
        text += (
            f" Memory did not hold all contenders at once: {', '.join(apart)} in several cohorts, "
            "one after the other."
        )
    return text


def _rate_note() -> str:
    return _RATES + (
        "Limit: the roofline of eager execution under the ceilings below; above 100 % means that "
        "operations were fused or stayed in a cache. First use: compilation, capture and "
        "autotuning, in seconds, with what the compiler's cache on this machine already held."
    )


def _speed(rows: list[dict]) -> str:
    header = ["model", "mode", "contender", "samples/s", "vs FP32", "vs TF32", "vs best peer"]
    header += ["of limit", "first use s", "notes"]
    return _table(
        header,
        [
            [
                *_names(row),
                rate_text(row),
                ratio_text(row, "fp32"),
                ratio_text(row, "tf32"),
                ratio_text(row, "best_peer"),
                share_text(row["summary"]["limit_share"]),
                number(row["facts"]["prepare"]["first_use_s"], ".1f"),
                _notes(row),
            ]
            for row in rows
        ],
    )


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


def _modes(rows: list[dict]) -> str:
    own = [row for row in rows if row["case"]["contender"] in ("mprun", "mprun+")]
    lines = [
        [*_names(row), ratio_text(row, "fp32"), ratio_text(row, "tf32")]
        for row in own
        if row["summary"]["ratios"].keys() & {"fp32", "tf32"}
    ]
    if not lines:
        return ""
    table = _table(["model", "mode", "contender", "over FP32", "over TF32"], lines)
    return f"{table}\n\n{_PUBLISHED}"


def _memory(rows: list[dict]) -> str:
    kinds = ("parameters", "master_weights", "gradients", "optimizer_state", "activations")
    header = ["model", "mode", "contender", "peak allocated", "of FP32", "reserved", "process"]
    header += [kind.replace("_", " ") for kind in kinds] + ["all kinds", "of FP32"]
    lines = []
    for row in rows:
        peak, found = row["details"].get("peak"), row["details"].get("memory_by_kind", {})
        if peak is None:
            continue
        process = peak.get("process", peak.get("resident"))
        by_kind = {} if "why_not" in found else found
        lines.append(
            [
                *_names(row),
                bytes_text(peak.get("allocated")),
                number(row["summary"]["peak_ratio"], ".2f"),
                bytes_text(peak.get("reserved")),
                bytes_text(process),
                *(bytes_text(sum(by_kind[k].values()) if k in by_kind else None) for k in kinds),
                bytes_text(row["summary"]["memory_bytes"]),
                number(row["summary"]["memory_ratio"], ".2f"),
            ]
        )
    if not lines:
        return ""
    note = (
        "MiB. Process: as the driver counts it, on a CPU the resident set, Python and torch "
        "included. Activations: what one step saves for its backward pass. All kinds: also casts "
        "of weights and gradients, averages and norm statistics. Where steps are replayed from a "
        "graph the peak allocated is that of the same step taken eagerly."
    )
    return f"{_table(header, lines)}\n\n{note}"


def _energy(rows: list[dict], bench: dict) -> str:
    lines = []
    for row in rows:
        window = row["details"].get("energy_window") or row["windows"][-1]
        sensors = {name: f"{b:.0f} to {a:.0f}" for name, (b, a) in window["sensors"].items()}
        if row["summary"]["energy_j"] is None and not sensors:
            continue
        names = ("power_w", "sm_clock_mhz", "temperature_c")
        energy = number(row["summary"]["energy_j"], ".4g")
        lines.append([*_names(row), energy, *(sensors.get(name, "-") for name in names)])
    if not lines:
        reasons = sorted(set(bench["nvml"].values()))
        return f"Not readable: {'; '.join(reasons)}." if reasons else ""
    header = ["model", "mode", "contender", "J per sample", "power W", "SM clock MHz", "degrees C"]
    return _table(header, lines)


def _time(rows: list[dict]) -> str:
    header = ["model", "mode", "contender", "step ms", "host us", "syncs", "data / forward / "]
    header[-1] += "backward / update, %"
    lines = []
    for row in rows:
        if "host_s" not in row["details"]:
            continue
        window = row["windows"][-1]
        found = row["details"].get("synchronisations")
        count = number(found, "g") if isinstance(found, int | float) else "-"
        step = number(1000 * window["seconds"] / window["steps"], ".3g")
        host = number(row["summary"]["host_us"], ",.0f")
        lines.append([*_names(row), step, host, count, split_text(row["details"])])
    if not lines:
        return ""
    note = (
        "Host: median time to issue one step to an idle device without waiting for it; on a CPU "
        "that is the step. Shares of a step: eager steps of mprun alone, from events on the stream."
    )
    return f"{_table(header, lines)}\n\n{note}"


def _real(rows: list[dict]) -> str:
    lines = [
        [*_names(row), rate_text(row), share_text(row["summary"]["data_wait"])] for row in rows
    ]
    return _table(["model", "mode", "contender", "samples/s", "waiting for data"], lines)


def _correctness(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        found = row["equality"]
        if "losses" not in found:
            continue
        verdict = {True: "equal", False: "UNEQUAL", None: "not compared"}[found.get("ok")]
        last = found["losses"][-1]
        last = f"{last:.5f}" if isinstance(last, float) else str(last)
        skipped = [str(found["skipped"]), number(row["details"].get("skipped"), "d")]
        lines.append([*_names(row), last, *skipped, verdict, found.get("reason") or ""])
    if not lines:
        return ""
    header = ["model", "mode", "contender", "loss at step 20", "skipped by 20", "skipped in all"]
    return _table([*header, "verdict", "why"], lines)


def _missing(bench: dict) -> str:
    rows = [row for row in bench["rows"] if not row["windows"]]
    lines = [[*_names(row), row["status"], row["reason"]] for row in rows]
    # One line for all modes of a tool that are left out for the same reason.
    groups: dict[tuple[str, str, str], list[str]] = {}
    for left in bench["left_out"]:
        place = left["label"], left["contender"], left["reason"]
        groups.setdefault(place, []).append(left["mode"])
    for (label, contender, reason), modes in groups.items():
        lines.append([label, ", ".join(modes), contender, "left out", reason])
    if not lines:
        return ""
    return _table(["model", "mode", "contender", "status", "reason"], lines)


def _targets(targets: list[dict]) -> str:
    lines = []
    for target in targets:
        sign = "at most" if target["at_most"] else "at least"
        value = number(target["value"], ",.4g")
        bound = f"{sign} {target['bound']:,g}"
        where = target["row"] or ""
        lines.append([target["label"], target["what"], bound, value, where, target["outcome"]])
    return _table(["model", "what", "target", "measured", "of", "outcome"], lines)


def _ceilings(bench: dict) -> str:
    found = bench["ceilings"]
    if not found:
        return ""
    lines = [["copy, bytes read and written", f"{found['bandwidth'] / 1e9:,.1f} GB/s"]]
    size = found["matmul_size"]
    for name, rate in found["flops"].items():
        text = f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"
        lines.append([f"{name} product, {size} cubed", text])
    return _table(["what", "rate"], lines)


def _environment(bench: dict) -> str:
    facts = bench["environment"]
    dirty = {True: " (with local changes)", False: "", None: ""}[facts["dirty"]]
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
    return "\n\n".join([_table(["what", "value"], lines), *_flags(bench["rows"])])


def _flags(rows: list[dict]) -> list[str]:
    """Flags in force: those of all modes once, then what single modes have of their own."""
    modes = {
        row["case"]["mode"]: row["facts"]["prepare"]["flags"]
        for row in rows
        if "prepare" in row["facts"]
    }
    if not modes:
        return []
    first = next(iter(modes.values()))
    common = {k for k, v in first.items() if all(f.get(k) == v for f in modes.values())}
    lines = ["Flags of all modes: " + ", ".join(f"{k}={first[k]}" for k in first if k in common)]
    for mode, values in modes.items():
        own = ", ".join(f"{k}={v}" for k, v in values.items() if k not in common)
        if own:
            lines.append(f"Flags of {mode}: {own}")
    return lines


def _names(row: dict) -> list[str]:
    case = row["case"]
    where = " (end to end)" if case["real_data"] else ""
    return [case["label"], case["mode"], f"{case['contender']}{where}"]
