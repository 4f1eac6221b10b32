"""What the program knows of itself, as Markdown: each function is a `<!-- generated: NAME -->`.

`modes` and `paper` make tables that stand in their pages as text, so that they are read without a
built site, too; tests/docs/test_tables.py compares them.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from mprun.cli.dispatch import _arguments, verbs
from mprun.cli.help import BY_OPTION, GROUPS
from mprun.config.keys import FIELDS, meanings, role_of
from mprun.config.option_files import named, option_files, values_in_files, what_it_is
from mprun.entry_points import loaded
from mprun.precision import PrecisionPolicy, get_policy
from mprun.precision.policy import dtype_name, usual_scaler
from mprun.precision.scaled_products import ScaledProducts
from mprun.record.keys import INTERVAL, JUDGED, LABEL, LENGTH, MACHINE, READING, RESULT, SEED

_ROLES = {RESULT: "result", LENGTH: "length", SEED: "seed"}
_ROLES |= {MACHINE: "machine", READING: "reading", LABEL: "label"}
_ROLES |= {INTERVAL: "interval", JUDGED: "judged"}


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [header, tuple("---" for _ in header), *rows]
    escaped = (tuple(cell.replace("|", "\\|") for cell in row) for row in cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def roles() -> str:
    """What the word in the column `role` says."""
    rows = [(word, f"{role}.") for role, word in _ROLES.items()]
    return _table(("role", "what another value means"), rows)


def keys() -> str:
    """A section for each group, a row for each key."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for key in FIELDS:
        group, _, name = key.rpartition(".")
        if key in (*GROUPS, "compare") or (group and name in BY_OPTION):
            continue
        for one in meanings(key):
            of = ", ".join(_code(variant) for variant in one.variants)
            doc = f"{one.doc}. Of {of}." if of else f"{one.doc}."
            allowed = one.kind + (f": {one.allowed}" if one.allowed else "")
            row = (_code(key), doc, f"{allowed}; {_code(one.default) or 'none'}")
            groups.setdefault(group, []).append((*row, _ROLES[role_of(key)]))
    header = ("key", "meaning", "type, allowed values; default", "role")
    return "\n\n".join(
        f"## {group or 'Of the whole run'}\n\n{_of_group(group)}{_table(header, rows)}"
        for group, rows in groups.items()
    )


def _of_group(group: str) -> str:
    return f"{FIELDS[group][0].metadata['doc']}.\n\n" if group else ""


def options() -> str:
    """The options of each group, as their files say what they are."""
    parts = []
    for group in GROUPS:
        rows = [(_code(name), what_it_is(path)) for name, path in option_files(group).items()]
        parts.append(f"### {group}=\n\n{_table(('option', 'what it is'), rows)}")
    return "\n\n".join(parts)


_FAMILIES = ("fp32", "tf32", "fp16", "amp", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4", "int8", "qat")
_SCALES = {
    "fp32": "",
    "delayed": ", from the last {1}",
    "pow2": ", a power of two",
    "e8m0": ", a power of two {0}",
    "e4m3": ", in E4M3, and one scale per tensor",
    "four_over_six": ", in E4M3, and one scale per tensor. A block's largest number becomes 6 or "
    "4, whichever has the smaller error",
}
_ROUNDED = {
    "rceil": "rounded up",
    "ceil": "rounded up",
    "floor": "rounded down",
    "even": "rounded down. It is computed from the block's largest number, which is first rounded "
    "to the format",
}
_PARTS = {"tensor": "per tensor", "row": "per row"}


def modes() -> str:
    """The precision modes, by the values in their files; docs/modes.md has this table."""
    files = option_files("precision")
    order = sorted(files, key=lambda name: (_FAMILIES.index(name.partition("_")[0]), name))
    header = ("mode", "parameters", "products", "master weights", "default scaler")
    header += ("source or equivalent",)
    return _table(header, [_mode(name, get_policy(name), files[name]) for name in order])


def _mode(name: str, policy: PrecisionPolicy, path: Path) -> tuple[str, ...]:
    held, norms, half = (
        dtype_name(own or torch.float32).upper()
        for own in (policy.param_dtype, policy.norm_dtype, policy.autocast_dtype)
    )
    of_norms = "" if held == "FP32" else f", norm layers {'too' if norms == held else norms}"
    if policy.matmul is not None:
        multiplied = f"linear layers: {_casts(policy.matmul)}"
    elif policy.autocast_dtype is not None:
        multiplied = f"`torch.autocast` {str(policy.autocast_dtype).removeprefix('torch.')} lists"
    elif held == "FP32":
        is_tf32 = policy.fp32_math == "tf32"
        multiplied = "TF32 in matmul, convolution, RNN" if is_tf32 else "FP32, TF32 off everywhere"
    else:
        multiplied = f"{held} in, FP32 sums, {held} out"
    if (own := policy.attention) is not None:
        formats = f"{own.format.name.upper()}, gradients {own.grad_format.name.upper()}"
        multiplied += f"; attention: {formats}; one scale per {own.granularity}"
    masters = {
        "kept": "parameters are FP32" if held == "FP32" else "FP32",
        "none": f"none; {held} optimizer state",
        "transient": "none: updated in FP32, rounded stochastically"
        if policy.rounding == "stochastic"
        else "none: the part that rounding removes is kept for the next update",
    }
    masters_of = "-" if (held, half) == ("FP32", "FP32") else masters[policy.masters]
    found = re.search(r"^# Elsewhere: (.*)\.$", path.read_text(encoding="utf-8"), re.MULTILINE)
    elsewhere = found[1] if found else ""
    return _code(name), held + of_norms, multiplied, masters_of, usual_scaler(name), elsewhere


def _casts(products: ScaledProducts) -> str:
    formats = products.input.name.upper()
    if products.grad_output is not products.input:
        formats += f", gradients {products.grad_output.name.upper()}"
    if products.granularity == "none":
        return f"{formats}; no scale"
    part = _PARTS.get(products.granularity, f"per {products.granularity}")
    if products.weight_granularity is not None:
        part += f" (weights: {products.weight_granularity})"
    updates = "update" if products.history == 1 else f"{products.history:,} updates"
    rounded = _ROUNDED[products.scale_rounding]
    scale = _SCALES[products.scale].format(rounded, updates)
    more = {
        "nearest": "",
        "stochastic": "; gradients rounded stochastically",
        "both": "; in the products for gradients, both operands are rounded stochastically",
    }[products.grad_rounding]
    if products.hadamard:
        more += ". Hadamard transform for " + _gradients(products.hadamard)
    if products.high_precision and products.high_precision == products.dequantized:
        more += ". Only the output's product is cast; the products for gradients use the numbers "
        more += "decoded from these casts"
        return f"{formats}; one scale {part}{scale}{more}"
    if products.high_precision:
        more += f"; the product for {_gradients(products.high_precision)} is not cast"
    if products.dequantized:
        more += (
            f"; for {_gradients(products.dequantized)}, the input's cast of the forward pass is "
        )
        more += "decoded and cast again"
    return f"{formats}; one scale {part}{scale}{more}"


def _gradients(products: Sequence[str]) -> str:
    names = {"output": "the output", "grad_input": "the input's gradient"}
    return " and ".join(names.get(own, "the weight's gradient") for own in products)


_PAPER = Path(__file__).resolve().parent / "results" / "2026-11-27-cpu-paper.json"


def paper() -> str:
    """Each technique beside the paper's outcome, by the last results; docs/paper.md has it."""
    header = ("network", "technique", "paper: FP32", "paper: with technique")
    header += ("here: difference to FP32", "verdict", "same outcome?")
    rows = []
    for row in json.loads(_PAPER.read_text(encoding="utf-8"))["rows"].values():
        named = (f"{row['network']}, {row['place']}", row["paper"]["fp32"])
        if row["not_run"]:
            rows.append((named[0], "not run", named[1], "", "", "", ""))
        for one in row["techniques"]:
            same = one["same_outcome"].replace("(no scale", "(unscaled FP16")
            own = (one["paper"], one["difference"], one["verdict"], same)
            rows.append((named[0], one["technique"], named[1], *own))
            named = ("", "")
    return _table(header, rows)


def scalers() -> str:
    """The loss scalers, by the constants in their files."""
    shown = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis")
    shown += ("min_scale", "max_scale")
    kinds = values_in_files("scaler", "kind")
    values = {field: values_in_files("scaler", field) for field in shown}
    rows = [
        (_code(name), kinds.get(name, name), *(_power(values[f].get(name)) for f in shown))
        for name in named("scaler")
    ]
    return _table(("scaler", "kind", *(_code(field) for field in shown)), rows)


def _power(value: str | float | None) -> str:
    """A power of two as such, where it is not a small number."""
    if value is None:
        return ""
    mantissa, exponent = math.frexp(float(value))
    if mantissa == 0.5 and not 0 <= exponent <= 4:
        return f"2^{exponent - 1}"
    return f"{float(value):g}"


def command_line() -> str:
    """The help page of mprun's options and of each verb, as a terminal of 80 columns has it."""
    os.environ["COLUMNS"] = "80"
    pages = {"": "Options\n" + _arguments().format_help().partition("options:\n")[2]}
    for verb, name in verbs().items():
        pages[verb] = _printed(partial(loaded(name), ["--help"]))
    bench = partial(loaded(verbs()["bench"]), ["--roofline", "--help"])
    pages["bench --roofline"] = _printed(bench)
    return "\n\n".join(
        f"## mprun {verb}".rstrip() + f"\n\n```text\n{page.strip()}\n```"
        for verb, page in pages.items()
    )


def _printed(call) -> str:
    from contextlib import redirect_stdout, suppress
    from io import StringIO

    page = StringIO()
    with redirect_stdout(page), suppress(SystemExit):
        call()
    return page.getvalue()
