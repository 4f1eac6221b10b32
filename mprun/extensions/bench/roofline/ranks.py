"""The cost of several ranks on paper: a counted step and its sum of gradients over named links.

Each rank takes the counted step (weak scaling). This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mprun.cli.arguments import filled
from mprun.errors import BadInput
from mprun.extensions.bench.roofline import FORMATS
from mprun.extensions.bench.roofline.limits import three
from mprun.record.console import markdown_table
from mprun.spelling import nearest

if TYPE_CHECKING:
    from mprun.extensions.bench.roofline.count import Counted

MOST_RANKS = 65_536
# Bytes of a number on the wire. BF16 is as long as FP16.
WIRES = {"fp32": 4, "fp16": 2}
_LEAST, _MOST = 0.01, 10_000  # GB/s of a link without a name


@dataclass(frozen=True, slots=True)
class Link:
    """A connection of GPUs, with rates that programs reach, not those of the data sheet."""

    name: str
    source: str
    gpus: int  # number of GPUs in a node
    within: float  # bytes/s of each GPU in a ring inside its node ("bus bandwidth" of nccl-tests)
    between: float  # bytes/s of each GPU between nodes
    # Least seconds of a message between two nodes. Assumed; NCCL expects 8.5 us for a hop of its
    # trees (src/graph/tuning.cc, LL128).
    hop_s: float = 8e-6


LINKS = {
    link.name: link
    for link in (
        Link("nvlink", "8 H100 or H200 on NVSwitch, between 370 of a ring and 480 of NVLink SHARP "
             "(NVIDIA/nccl-tests#212); assumed: 0.9 of a 400 Gb/s NIC for each", 8, 400e9, 45e9),
        Link("nvlink3", "8 A100 on NVSwitch, NCCL's own limit (NVIDIA/nccl src/graph/tuning.cc); "
             "192 GB/s over eight 200 Gb/s NICs (NVIDIA/nccl#812)", 8, 235e9, 24e9),
        Link("100gbe", "assumed: 0.93 of 100 Gb/s, less headers of TCP; a hop 30 us",
             1, 11.6e9, 11.6e9, 30e-6),
        Link("25gbe", "assumed: 0.93 of 25 Gb/s, less headers of TCP; a hop 30 us",
             1, 2.9e9, 2.9e9, 30e-6),
    )
}  # fmt: skip


def link_of(name: str) -> Link:
    """Return the link with a name, in any case of letters, or with GB/s from every GPU to others.

    Raises:
        BadInput: an unknown name, a number out of range.
    """
    if name.lower() in LINKS:
        return LINKS[name.lower()]
    try:
        rate = float(name)
    except ValueError:
        rate = math.nan
    if _LEAST <= rate <= _MOST:
        return Link(f"{rate:g}", "given; assumed: a hop 8 us", 1, rate * 1e9, rate * 1e9)
    known = f"{', '.join(LINKS)}, or GB/s of a GPU from {_LEAST:g} to {_MOST:g}"
    raise BadInput(f"--link {name}: unknown{nearest(name.lower(), LINKS)} (allowed: {known})")


def nodes_of(ranks: int, link: Link) -> tuple[int, int]:
    """Return (nodes, GPUs of each); BadInput if the last node would not be full."""
    if ranks > link.gpus and ranks % link.gpus:
        raise BadInput(
            f"--ranks {ranks} --link {link.name}: a node with this link has {link.gpus} GPUs "
            f"(allowed: up to {link.gpus} ranks, or a multiple of {link.gpus})"
        )
    gpus = min(ranks, link.gpus)
    return ranks // gpus, gpus


def ring_s(size: float, ranks: int, rate: float) -> float:
    """Return the seconds in which a ring of `rate` bytes/s sums `size` bytes of each rank.

    2(W-1)/W of the bytes leave each rank: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69
    (2009). Latency comes on top.
    """
    return 2 * (ranks - 1) / ranks * size / rate


def transfer_s(size: float, ranks: int, link: Link) -> float:
    """Return the seconds on the wires: each GPU gets its node's sum of a part, nodes sum parts."""
    nodes, gpus = nodes_of(ranks, link)
    return ring_s(size, gpus, link.within) + ring_s(size / gpus, nodes, link.between)


def latency_s(ranks: int, link: Link) -> tuple[float, float]:
    """Return the least seconds of one sum between nodes: as a tree (up and down), as a ring."""
    nodes, _ = nodes_of(ranks, link)
    depth = (nodes - 1).bit_length()  # log2, rounded up
    return 2 * depth * link.hop_s, 2 * (nodes - 1) * link.hop_s


def exposed_s(summing: float, backward: float, buckets: int) -> float:
    """Return the seconds of `summing` that are left when the backward pass ends.

    Buckets become ready evenly, the last one when the pass ends. Sums slower than the pass wait
    only for the first one; faster ones end one bucket after the pass.
    """
    return max(summing / buckets, summing - backward * (buckets - 1) / buckets)


def on_ranks(
    steps: Sequence[Counted], limits: dict[str, Any], ranks: Sequence[int], link: Link
) -> dict[str, Any]:
    """Return "ranks" of --json from the `limits` of these steps, in seconds and bytes.

    step_s: the limit of one rank. backward_s: time of the last micro-batch, whose gradients
    complete the sums. wire: the wire of the configuration; there are rows for all `WIRES`.
    transfer_s and tree_s together are the time of the sums; ring_s is the latency of a ring instead
    of tree_s. flat: efficiency without overlap. samples_per_s: of all ranks.
    """
    modes: dict[str, Any] = {}
    for step in steps:
        found = limits["modes"][step.mode]
        backward = sum(k["seconds"] for k in found["kinds"] if k["phase"] == "backward")
        mode = modes[step.mode] = {
            "step_s": found["step_s"],
            "backward_s": backward / step.micro_batches,
            "wire": FORMATS[str(step.policy.reduce_dtype or "torch.float32")],
        }
        mode["rows"] = [_row(step, mode, count, wire, link) for count in ranks for wire in WIRES]
    first = steps[0]
    return {
        "what": "a cost model on paper, not measurements",
        "link": asdict(link),
        "gradients": first.dense,
        "bucket_bytes": first.bucket_bytes,
        "modes": modes,
    }


def _row(step: Counted, mode: dict[str, Any], ranks: int, wire: str, link: Link) -> dict[str, Any]:
    size = WIRES[wire] * step.dense
    # Buckets are cut as FP32 for any wire: a bucket is cast when it is sent.
    buckets = math.ceil(WIRES["fp32"] * step.dense / step.bucket_bytes)
    tree, ring = (buckets * one for one in latency_s(ranks, link))
    transfer, seconds = transfer_s(size, ranks, link), mode["step_s"]
    exposed = exposed_s(transfer + tree, mode["backward_s"], buckets)
    return {
        "ranks": ranks,
        "nodes": nodes_of(ranks, link)[0],
        "wire": wire,
        "bytes": size,
        "buckets": buckets,
        "transfer_s": transfer,
        "tree_s": tree,
        "ring_s": ring,
        "hidden_s": transfer + tree - exposed,
        "exposed_s": exposed,
        "efficiency": seconds / (seconds + exposed),
        "flat": seconds / (seconds + transfer + tree),
        "samples_per_s": ranks * step.samples / (seconds + exposed),
    }


def as_text(found: dict[str, Any]) -> str:
    """Format `limits` with `on_ranks` as "ranks", with notes of at most 80 columns."""
    scaling, unit = found["ranks"], found["sample"]
    link, modes, gpu = scaling["link"], scaling["modes"], found["ceilings"]["name"]
    title = (
        f"{found['label']}: {scaling['gradients'] / 1e6:,.2f} M gradients, "
        f"{found['samples_per_step']:,} {unit}s a rank, {gpu}, --link {link['name']}"
    )
    parts = [filled(title), "", _sums(next(iter(modes.values()))["rows"])]
    for mode, line in modes.items():
        head = (
            f"{mode}: step {three(line['step_s'] * 1e3)} ms, backward "
            f"{three(line['backward_s'] * 1e3)} ms, sums in {line['wire']}"
        )
        parts += ["", filled(head), _efficiency(line["rows"], unit)]
    return "\n".join([*parts, "", *map(filled, _notes(found)), *map(filled, found["refused"])])


def _sums(rows: list[dict[str, Any]]) -> str:
    header = ["ranks", "nodes", "wire", "MB", "buckets", "transfer ms", "tree ms", "ring ms"]
    cells = [
        [
            f"{row['ranks']:,}",
            f"{row['nodes']:,}",
            row["wire"],
            three(row["bytes"] / 1e6),
            f"{row['buckets']:,}",
            *(three(row[key] * 1e3) for key in ("transfer_s", "tree_s", "ring_s")),
        ]
        for row in rows
    ]
    return markdown_table(header, cells)


def _efficiency(rows: list[dict[str, Any]], unit: str) -> str:
    header = ["ranks", "wire", "hidden", "exposed ms", "efficiency", "flat", f"{unit}s/s"]
    cells = []
    for row in rows:
        summing = row["hidden_s"] + row["exposed_s"]
        cells.append([
            f"{row['ranks']:,}",
            row["wire"],
            f"{row['hidden_s'] / summing:.0%}" if summing else "-",
            three(row["exposed_s"] * 1e3),
            f"{row['efficiency']:.1%}",
            f"{row['flat']:.1%}",
            three(row["samples_per_s"]),
        ])  # fmt: skip
    return markdown_table(header, cells)


def _notes(found: dict[str, Any]) -> list[str]:
    scaling = found["ranks"]
    link, mib = scaling["link"], scaling["bucket_bytes"] / 2**20
    rates = f"{link['between'] / 1e9:g} GB/s of each GPU to the others"
    if link["gpus"] > 1:
        rates = (
            f"{link['within'] / 1e9:g} GB/s of each GPU within a node of {link['gpus']}, "
            f"{link['between'] / 1e9:g} GB/s between nodes"
        )
    notes = [
        "A model on paper, not measurements: the step is a limit from counts "
        f"({found['ceilings']['source']}), and a slower one hides more.",
        f"Link {link['name']}: {rates}. {link['source'][0].upper()}{link['source'][1:]}.",
        "transfer: 2(W-1)/W x S/B, within nodes and then each GPU's part between them, one after "
        "the other.",
        f"tree, ring: latency of 2 log2(nodes) or 2(nodes-1) hops of {link['hop_s'] * 1e6:g} us "
        f"for each bucket of {mib:g} MiB in FP32 (dist.bucket_mb); the tree's is counted, none "
        "within a node.",
        "hidden: part of transfer and tree under the last micro-batch's backward pass, in which "
        "buckets become ready evenly. flat: efficiency if sums begin after it (dist.engine=flat).",
        "efficiency: step / (step + exposed). Each rank takes the whole step (weak scaling). "
        "Copies into buckets, stragglers and the loading of data are left out.",
    ]
    if tables := found["parameters"] - scaling["gradients"]:
        refused = "are not summed; a run of several ranks refuses them."
        notes.append(f"{tables / 1e6:,.1f} M parameters with sparse gradients {refused}")
    return notes
