"""The fidelity of the CPU emulation: how often it is bit-equal to real 16-bit kernels.

    python benchmarks/half_fidelity.py --reference cuda [--json FILE] [--markdown FILE]

Every operation runs emulated on the CPU (mprun.precision.emulation) and by the reference, on the
same inputs. The reference is CUDA kernels with all reductions pinned to FP32
(mprun.precision.policy), the native kernels of this CPU, or float64. Both sides are also compared
with the float64 result rounded once, which shows the side with the error. It covers forward and
every gradient, FP16 and BF16, several sizes, normal values and values near underflow and overflow.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from fidelity.comparison import MAGNITUDES, Row, compare
from fidelity.operations import operations
from fidelity.ulp import Distance

from mprun.precision import pin_math_flags, read_math_flags
from mprun.record.console import markdown_table

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def main(arguments: list[str] | None = None) -> int:
    """Return 0, 1 if an operation failed on one side, or 2 if the reference is not available."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", choices=("cuda", "native", "float64"), default="cuda")
    parser.add_argument("--dtype", choices=tuple(DTYPES), action="append", help="default: both")
    parser.add_argument("--only", default="", help="operations with this in their name")
    parser.add_argument("--magnitude", choices=MAGNITUDES, action="append", help="default: all")
    parser.add_argument("--size", choices=("small", "full"), help="default: full on CUDA")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.reference == "cuda" and not torch.cuda.is_available():
        print("--reference cuda: needs a CUDA device; native or float64 run here", file=sys.stderr)
        return 2
    pin_math_flags("ieee")
    # The autotuner may choose another algorithm for every size; here one algorithm is tested.
    torch.backends.cudnn.benchmark = False
    started = time.perf_counter()
    full = options.size == "full" or (options.size is None and options.reference == "cuda")
    rows: list[Row] = []
    failures: list[str] = []
    for operation in operations(full):
        if options.only not in operation.name:
            continue
        for dtype in options.dtype or DTYPES:
            for magnitude in options.magnitude or MAGNITUDES:
                try:
                    rows += compare(operation, DTYPES[dtype], magnitude, options.reference)
                except RuntimeError as error:
                    where = f"{operation.name} {operation.size}, {dtype}, {magnitude}"
                    failures.append(f"{where}: {str(error).splitlines()[0]}")
                    if options.reference == "cuda":
                        torch.cuda.synchronize()  # a broken context would break every later row
        # After each operation, so that an early end keeps the results so far.
        _write(options, full, time.perf_counter() - started, rows, failures)
    print(as_markdown(rows, failures, options.reference))
    return 1 if failures or not rows else 0


def _write(options, full: bool, seconds: float, rows: list[Row], failures: list[str]) -> None:
    if options.markdown:
        text = as_markdown(rows, failures, options.reference)
        options.markdown.write_text(text + "\n", encoding="utf-8")
    if options.json:
        record = {
            "reference": options.reference,
            "device": torch.cuda.get_device_name() if options.reference == "cuda" else "cpu",
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "flags": read_math_flags(),
            "size": "full" if full else "small",
            "seconds": seconds,
            "failures": failures,
            "rows": [_finite(asdict(row)) for row in rows],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def as_markdown(rows: list[Row], failures: list[str], reference: str) -> str:
    """Format two tables per dtype: normal magnitude; bit-equal shares at every magnitude."""
    lines = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        own = [row for row in rows if row.dtype == dtype]
        lines += [f"### {dtype}: emulation on the CPU against {reference}", ""]
        usual = [row for row in own if row.magnitude == "normal"]
        if usual:
            lines += [_by_result(usual, reference), ""]
        lines += [_by_magnitude(own), ""]
    lines += [
        "Bit-equal: the same bits, two NaNs counted as the same. ulp: representable values from "
        "one to the other, large where values cancel to about 0. Error: relative L2 against "
        "float64; one rounding alone is about 2.1e-04 in float16, 1.7e-03 in bfloat16. "
        "Sizes pooled: shares over all elements, the largest ulp and error of any size."
    ]
    if failures:
        lines += ["", "Not compared:", *(f"- {failure}" for failure in failures)]
    return "\n".join(lines)


def _by_result(rows: list[Row], reference: str) -> str:
    header = ["operation", "result", "elements", "bit-equal", "<= 1 ulp", "max ulp"]
    header += ["emulation = float64", "error"]
    if reference != "float64":
        header += [f"{reference} = float64", "error"]
    table = []
    for (operation, result), group in _grouped(rows, "operation", "result"):
        between = [row.between for row in group]
        cells = [operation, result, str(sum(d.elements for d in between))]
        cells += [_share(between, "equal"), _share(between, "within_one"), _max_ulp(between)]
        cells += [
            _share([row.emulation for row in group], "equal"),
            _largest(row.emulation_error for row in group),
        ]
        if reference != "float64":
            cells += [
                _share([row.reference for row in group], "equal"),
                _largest(row.reference_error for row in group),
            ]
        table.append(cells)
    return markdown_table(header, table)


def _by_magnitude(rows: list[Row]) -> str:
    present = [name for name in MAGNITUDES if any(row.magnitude == name for row in rows)]
    table = []
    for (operation,), group in _grouped(rows, "operation"):
        cells = [operation]
        for magnitude in present:
            between = [row.between for row in group if row.magnitude == magnitude]
            nans = sum(d.one_sided_nan for d in between)
            note = f", {nans} NaN on one side" if nans else ""
            cells.append(f"{_share(between, 'equal')} / {_max_ulp(between)}{note}")
        table.append(cells)
    return markdown_table(["all results: bit-equal / max ulp", *present], table)


def _grouped(rows: list[Row], *fields: str) -> list[tuple[tuple[str, ...], list[Row]]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, field) for field in fields), []).append(row)
    return list(groups.items())


def _share(distances: list[Distance], field: str) -> str:
    elements = sum(d.elements for d in distances)
    if not elements:
        return "-"
    share = 100 * sum(getattr(d, field) for d in distances) / elements
    # Only all elements are 100 %: 99.999 is not.
    return "100 %" if share == 100 else f"{min(share, 99.99):.2f} %"


def _max_ulp(distances: list[Distance]) -> str:
    return str(max((d.max_ulp for d in distances), default=0))


def _largest(errors: Iterable[float | None]) -> str:
    known = [error for error in errors if error is not None and not math.isnan(error)]
    return f"{max(known):.1e}" if known else "-"


def _finite(value):
    """Replace NaN, which is not JSON."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
