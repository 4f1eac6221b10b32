"""What sums of many ranks in 16 bits lose, in each order of addition and with each division.

    python -m benchmarks.reduce_orders [--models 'model=lstm_lm' 'model=gpt'] [--json FILE]

A network is trained in FP32 for some updates. At its weights it then takes the FP32 gradients of
4,096 micro-batches, one of each rank. They are cast to what ranks exchange, divided and added as
`precision.reduce_dtype`, `reduce_divide` and `reduce_order` say. For the first 2, 4, ... 4,096 of
them it prints the relative L2 error of the mean against that of the FP32 gradients in float64, in
brackets the share of its non-zero elements that became 0. Sums are elementwise, so that a random
choice of elements stands for all of them.
"""

import argparse
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mprun.build import build
from mprun.config.compose import compose_config
from mprun.distributed.reduction import factors, in_order
from mprun.precision import DTYPES, pin_math_flags
from mprun.precision.policy import DIVIDE, ORDERS
from mprun.record.console import markdown_table
from mprun.recording.environment import environment

RANKS = [2**power for power in range(1, 13)]
WIRES = (("bf16", 1), ("fp16", 1), ("fp16", 1024))  # dtype, loss scale
# Small, and with small batches, so that 4,096 of them take a minute of a CPU.
MODELS = (
    "model=lstm_lm model.hidden_size=64 model.embedding_size=64 data.batch_size=4",
    "model=gpt model.num_layers=1 model.hidden_size=64 data=docs_chars data.batch_size=2",
    "model=conv_autoencoder model.width=8 data.image_size=32 data.batch_size=22",
)
LIMITS = (0.01, 0.1)  # errors of a gradient that are told with the first number of ranks


def gradients(words: list[str], updates: int, count: int, elements: int) -> tuple[Tensor, int]:
    """Return the gradients `[count, elements]` of so many micro-batches after so many updates, and
    the number of elements that they are chosen from."""
    config = compose_config([*words, "precision=fp32", "device=cpu", "threads=1"]).config
    pin_math_flags(config.precision.fp32_math)
    torch.manual_seed(config.seed)
    task = build(config, torch.device("cpu")).task
    for step in range(updates):
        task.train_step(step)
    parameters = list(task.learner.model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:elements]
    chosen = chosen.sort().values
    found = torch.empty(count, len(chosen))
    for rank in range(count):
        (batch,) = task.load(updates + rank)
        with task.forward_context:
            _, loss = task.loss(batch)
            made = torch.autograd.grad(loss, parameters)
        found[rank] = torch.cat([one.flatten() for one in made])[chosen]
    return found, total


def mean(sent: Tensor, scale: float, divide: str, order: str) -> Tensor:
    """Return the mean of `sent` [ranks, elements], which was scaled, as a sum in its dtype."""
    before, after = factors(len(sent), divide)
    return in_order(sent / before if before > 1 else sent, order).double() / (scale * after)


def errors(total: Tensor, exact: Tensor) -> tuple[float | None, float]:
    """Return the relative L2 error of `total`, None if it overflowed, and the share of its elements
    that became 0."""
    error = float((total - exact).norm() / exact.norm())
    lost = float(((total == 0) & (exact != 0)).sum() / (exact != 0).sum())
    return error if math.isfinite(error) else None, lost


def measured(terms: Tensor) -> list[dict[str, Any]]:
    """Return a row for each wire, division and order: its errors by number of ranks."""
    exact = {ranks: terms[:ranks].double().mean(0) for ranks in RANKS if ranks <= len(terms)}
    rows = []
    for dtype, scale in WIRES:
        sent = (terms * scale).to(DTYPES[dtype])
        for divide, order in product(DIVIDE, ORDERS):
            found = {
                ranks: errors(mean(sent[:ranks], scale, divide, order), own)
                for ranks, own in exact.items()
            }
            named = {"wire": dtype, "scale": scale, "divide": divide, "order": order}
            rows.append(named | {"errors": found})
    return rows


def first_beyond(row: dict[str, Any], limit: float) -> str:
    """Return the fewest ranks of which the error reaches `limit`, or the sum overflows."""
    found = row["errors"].items()
    return next((f"{n:,}" for n, (error, _) in found if error is None or error >= limit), "-")


def tables(rows: list[dict[str, Any]]) -> str:
    """Return Markdown: errors if divided before, then from how many ranks they reach the limits."""
    shown = [ranks for ranks in (2, 8, 32, 64, 512, 4096) if ranks in rows[0]["errors"]]
    lines: list[list[str]] = []
    limits: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        wire = f"{row['wire']} x {row['scale']:,}"
        own = limits.setdefault((wire, row["divide"]), [])
        own.append(" / ".join(first_beyond(row, limit) for limit in LIMITS))
        if row["divide"] == "before":
            found = [row["errors"][ranks] for ranks in shown]
            lines.append([wire, row["order"], *(cell(error, lost) for error, lost in found)])
    by_ranks = markdown_table(["wire x scale", "order", *(f"{n:,} ranks" for n in shown)], lines)
    of_limits = [[*key, *own] for key, own in limits.items()]
    return f"{by_ranks}\n\n{markdown_table(['wire x scale', 'divide', *ORDERS], of_limits)}"


def cell(error: float | None, lost: float) -> str:
    """Return an error, and the share of lost elements where it is not 0."""
    if error is None:
        return "overflow"
    return f"{error:.2%}" + (f" ({lost:.1%})" if lost >= 0.0005 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="OVERRIDES")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=RANKS[-1])
    parser.add_argument("--elements", type=int, default=2**15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for model in given.models:
        words = model.split()
        terms, total = gradients(words, given.updates, given.ranks, given.elements)
        rows = measured(terms)
        own = {"model": words, "updates": given.updates, "elements": terms.shape[1], "of": total}
        found.append(own | {"rows": rows})
        print(
            f"## {' '.join(words)}: {terms.shape[1]:,} of {total:,} elements\n\n{tables(rows)}\n",
            flush=True,
        )
    if given.json is not None:
        text = json.dumps(
            {"environment": environment(torch.device("cpu")), "gradients": found}, indent=1
        )
        given.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
