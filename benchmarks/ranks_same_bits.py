"""Show which runs on several ranks have the bits of one rank, and how far the others are from it.

    python -m benchmarks.ranks_same_bits [--tasks gpt gan] [--modes fp32 amp] [--worlds 2 3 4]
                                         [--engines fixed fast fsdp] [--out FOLDER]

Every cell, a task in a precision mode, trains alone in one process and then on each number of
ranks (gloo, one thread each) with each engine: some updates, whose state is digested after each,
and an evaluation. A row of an engine's table is a task, a column a mode; the cell has `=` if all
that was compared is equal bit for bit on each rank of each number, and else the largest relative L2
difference of the weights. `--out` writes the page DATE-cpu-ranks.md and .json there. The exit code
is 3 if a cell differs where the engine and the task promise the same bits.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from benchmarks.same_bits import about, commit_of
from mprun.assembly import build
from mprun.config.compose import compose_config
from mprun.config.execution_rules import why_not_on
from mprun.config.option_files import modes
from mprun.config.registry import shares_streams
from mprun.distributed.group import RankGroup
from mprun.distributed.rank_info import rank_info_from
from mprun.distributed.ranks import ALONE
from mprun.errors import BadInput
from mprun.precision import pin_math_flags
from mprun.record.console import markdown_table
from tests.distributed.of_a_rank import digest, environment_of
from tests.distributed.test_same_bits import TASKS, free_port

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
STEPS, STREAM_STEPS = 3, 20  # updates; of models whose streams are split
WORLDS = (2, 3, 4)
TEXT = "data=synthetic_tokens data.vocab_size=64 data.sequence_length=8 data.eval_tokens=400"
# Micro-batches, or streams, that 2, 3 and 4 ranks divide.
PARTS = "data.batch_size=2 train.accumulate=12"
STREAMS = "data.batch_size=12 train.accumulate=2"
OWN_TASK = "task of one's own"
NETWORKS = {
    "classification": f"{TASKS['classification']} {PARTS}",
    "reconstruction": f"{TASKS['reconstruction']} model.width=8 {PARTS}",
    "gan": f"{TASKS['gan']} {PARTS}",
    "translation": f"{TASKS['translation']} {PARTS}",
    "speech": f"model=deep_speech2 model.channels=2 model.hidden_size=8 {PARTS}",
    "detection": f"model=ssd_mini data.train_size=48 data.eval_size=4 {PARTS}",
    "own task": f"{TASKS[OWN_TASK]} {PARTS}",
    "gpt": f"model=gpt model.hidden_size=16 model.num_heads=2 {TEXT} {PARTS}",
    "gpt, clipped": f"model=gpt model.hidden_size=16 model.num_heads=2 train.clip_norm=0.5 "
    f"model.positions=rotary model.mlp=swiglu {TEXT} {PARTS}",
    "own language model, no state": "model=custom model.task=language_model optim=adam "
    f"model.factory=tests.distributed.of_a_rank:windows model.carries_state=false {TEXT} {PARTS}",
    "lstm_lm": f"model=lstm_lm model.embedding_size=16 model.hidden_size=16 {TEXT} {STREAMS}",
    "own GRU with linear layers": "model=custom model.task=language_model optim=adam "
    f"model.factory=benchmarks.ranks_same_bits:gru {TEXT} {STREAMS}",
}
SCALED = ("fp16_master_scaled", "amp")
OVERFLOW = ("classification", "gan", "speech", "own task")  # at the default scale, 65536
# Kernels that compute the last numbers of a shard like all others; also alone.
UNFUSED = "optim.implementation=foreach"
ENGINES = {
    "fixed": ["dist.engine=flat", "dist.order=fixed"],
    "fast": ["dist.engine=flat"],
    "ddp": ["dist.engine=ddp"],
    "ddp_fixed": ["dist.engine=ddp", "dist.order=fixed"],
    "fsdp": ["dist.engine=fsdp", "dist.order=fixed", UNFUSED],
    "fsdp_fast": ["dist.engine=fsdp", UNFUSED],
}
EXACT = ("fixed", "ddp_fixed", "fsdp")  # they promise the bits of one rank
# The modes in which the others are tried.
SOME = ["fp32", "fp16_master_scaled", "amp", "bf16_stochastic", "fp8_rowwise"]
WHY = {
    "fixed": "The gradients of each micro-batch are gathered, and added in their order.",
    "fast": "Each rank adds its micro-batches, then gloo adds the ranks, in the order of its ring: "
    "FP32 sums in another order.",
    "ddp": "DistributedDataParallel sums each bucket during backward, likewise in gloo's order.",
    "ddp_fixed": "The same, but the micro-batches of a bucket are gathered, and added in order.",
    "fsdp": "Weights and optimizer state on shards, in the same order; without fused kernels of "
    "the update, on one rank too.",
    "fsdp_fast": "The same, summed by gloo.",
}


class GRU(nn.Module):
    """Embedding, a GRU whose state is carried on, and two linear layers, the first in FP8 modes."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(words, 16), nn.GRU(16, 16)
        self.middle, self.output = nn.Linear(16, 32), nn.Linear(32, words)

    def forward(
        self, tokens: Tensor, state: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, last = self.gru(self.embedding(tokens), state[0] if state else None)
        return self.output(self.middle(x).tanh()), (last,)


def gru(data: Any) -> GRU:
    """`model.factory` of a language model whose streams are split, with FP8 products."""
    return GRU(data.vocab_size)


def words_of(task: str, mode: str) -> list[str]:
    """Return the command line of a cell without its engine."""
    own = [word for word in NETWORKS[task].split() if not word.startswith("dist.")]
    by_key = {word.partition("=")[0]: word for word in own}  # the last of several
    # Adam in FP16 divides by zero: NaN, of which nothing is to be seen.
    more = ["optim=sgd"] if mode == "fp16_naive" else []
    # Else most updates would be skipped.
    more += ["scaler.init_scale=64"] if mode in SCALED and task in OVERFLOW else []
    return [*by_key.values(), *more, f"precision={mode}", "device=cpu", "devices=1", "threads=1"]


def trained(words: list[str], ranks: Any) -> dict[str, Any]:
    """Train a cell on these ranks; return what is compared, or why it is refused."""
    try:
        config = compose_config(words).config
        if ranks.world > 1:
            for line in why_not_on(config, ranks.world):
                raise BadInput(line)
        pin_math_flags(config.precision.fp32_math)
        torch.manual_seed(config.seed)
        built = build(config, CPU, ranks)
    except BadInput as error:
        return {"refused": str(error)}
    task, compared = built.task, []
    streams = shares_streams(config.model)
    for step in range(STREAM_STEPS if streams else STEPS):
        metrics = built.stepper.step(step, measure=step == 1)
        compared.append({name: repr(float(value)) for name, value in metrics.items()})
        compared.append({"state": digest(task.state_dict())})
    compared.append({name: repr(value) for name, value in task.evaluate().items()})
    leaves, _ = tree_flatten_with_path(task.state_dict())
    weights = {keystr(path): leaf for path, leaf in leaves if "['model']" in keystr(path)}
    floating = [t.detach().double().flatten() for t in weights.values() if t.is_floating_point()]
    skipped = int(built.stepper.skipped)
    return {
        "compared": compared,
        "weights": torch.cat(floating),
        "streams": streams,
        "skipped": skipped,
    }


def be(rank: int, world: int, port: int, cells: dict[str, list[str]], folder: Path) -> None:
    """Be a rank, in a process of its own, which writes what it found to `folder`/RANK.pt."""
    os.environ.update(environment_of(rank, world, port))
    torch.set_num_threads(1)
    ranks = RankGroup(rank_info_from(), CPU, 600.0)
    torch.save(
        {name: trained(words, ranks) for name, words in cells.items()}, folder / f"{rank}.pt"
    )
    ranks.leave(0)


def on_ranks(world: int, cells: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return what each of `world` ranks found in every cell."""
    context, port = get_context("forkserver"), free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        given = (world, port, cells, Path(folder))
        processes = [context.Process(target=be, args=(rank, *given)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if codes := [process.exitcode for process in processes if process.exitcode]:
            raise SystemExit(f"ranks ended with exit codes {codes}")
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]


def verdict(
    alone: dict[str, Any], ranks: list[dict[str, Any]], shards: bool = False
) -> dict[str, Any]:
    """Return how a cell on several ranks differs from that on one.

    shards: the first rank alone puts the whole state together.
    """
    if "refused" in ranks[0] or "refused" in alone:
        return {"refused": ranks[0].get("refused") or alone["refused"]}
    if not shards and any(own["compared"] != ranks[0]["compared"] for own in ranks):
        return {"equal": False, "why": "the ranks differ from each other"}
    found = {"equal": ranks[0]["compared"] == alone["compared"], "skipped": ranks[0]["skipped"]}
    one, other = alone["weights"], ranks[0]["weights"]
    return found | {"relative": float((one - other).norm() / one.norm())}


def told(found: dict[int, dict[str, Any]]) -> str:
    """Return the text of a cell, of its verdicts by number of ranks."""
    differ = [one for one in found.values() if not one.get("equal", True)]
    if not differ:
        return "refused" if any("refused" in one for one in found.values()) else "="
    if why := [one["why"] for one in differ if "why" in one]:
        return why[0]
    largest = max(one["relative"] for one in differ)
    return f"{largest:.0e}" if largest else "weights ="


def page(found: dict[str, Any]) -> str:
    """Return the page of the results."""
    about, cells = found["about"], found["cells"]
    worlds = ", ".join(map(str, about["worlds"]))
    lines = [
        f"# Several ranks beside one, {about['date']}, CPU",
        f"{about['machine']}, torch {about['torch']}, Python {about['python']}, gloo, one thread a "
        f"rank. Commit {about['commit']}; {about['seconds'] // 60} min beside other work:",
        f"    {about['command']}",
        f"Each cell trains {STEPS} updates, those whose streams are split {STREAM_STEPS}, in one "
        f"process and then on {worlds} ranks; n = 1, seed 0, networks are tiny. `=`: the state "
        "after each update (weights, masters, optimizer, scale, statistics), the metrics and the "
        "evaluation are equal bit for bit, on every rank of every number. Otherwise the largest "
        "relative L2 difference of the model's weights; `weights =`: these are equal, but "
        "not masters or optimizer state. Refused: mode and network do not fit, or the "
        "engine does not take them; the .json has the lines, and each number of ranks. The scale "
        f"of {', '.join(OVERFLOW)} begins at 64 in {' and '.join(SCALED)}: at 65536 they would "
        "skip most updates.",
    ]
    for engine in about["engines"]:
        rows = []
        columns = columns_of(engine, about["modes"])
        for task in about["tasks"]:
            rows.append([task, *(told(cells[task][mode][engine]) for mode in columns)])
        table = markdown_table(["task", *columns], rows)
        lines += [f"## {engine}: `{' '.join(ENGINES[engine])}`", WHY[engine], table]
    lines += [
        "## Why some differ in a fixed order",
        "lstm_lm and the GRU carry a state, so that their streams are split. A product over fewer "
        "streams adds in another order; gradients of FP16 and BF16 weights are rounded before the "
        "sum, of some of the streams instead of all; and FP8's scale of a tensor is that of a "
        "rank's part of it.",
    ]
    return "\n\n".join(lines) + "\n"


def columns_of(engine: str, every: list[str]) -> list[str]:
    """Return the modes in which an engine is tried."""
    return [mode for mode in every if engine in EXACT or mode in SOME]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS])
    every = [mode for mode in modes() if mode != "tf32"]  # of a GPU
    parser.add_argument("--modes", nargs="+", choices=every, default=every)
    parser.add_argument("--worlds", nargs="+", type=int, choices=WORLDS, default=[*WORLDS])
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES], default=[*ENGINES])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    torch.set_num_threads(1)
    names = [(task, mode) for task in options.tasks for mode in options.modes]
    fused = {name: trained(words_of(*name), ALONE) for name in names}
    unfused: dict[tuple[str, str], dict[str, Any]] = {}
    if any(engine.startswith("fsdp") for engine in options.engines):
        unfused = {name: trained([*words_of(*name), UNFUSED], ALONE) for name in names}
    print(f"alone: {time.monotonic() - started:.0f} s", flush=True)
    cells: dict[str, Any] = {task: {mode: {} for mode in options.modes} for task in options.tasks}
    broken = []
    for engine in options.engines:
        modes_of_engine = columns_of(engine, options.modes)
        alone = unfused if UNFUSED in ENGINES[engine] else fused
        chosen = [name for name in names if name[1] in modes_of_engine]
        for task, mode in chosen:
            cells[task][mode][engine] = {}
        runs = [name for name in chosen if "refused" not in alone[name]]
        words = {" ".join(name): [*words_of(*name), *ENGINES[engine]] for name in runs}
        for world in options.worlds:
            ranks = on_ranks(world, words)
            for task, mode in chosen:
                own = [one.get(f"{task} {mode}", alone[task, mode]) for one in ranks]
                of_one = verdict(alone[task, mode], own, shards=engine.startswith("fsdp"))
                cells[task][mode][engine][world] = of_one
                promised = engine in EXACT and not alone[task, mode].get("streams")
                if promised and not of_one.get("equal", True):
                    broken.append(f"{task} {mode} {engine} on {world}")
            print(f"{engine} on {world}: {time.monotonic() - started:.0f} s", flush=True)
    found = {
        "about": {
            **about("benchmarks.ranks_same_bits", *sys.argv[1:]),
            "commit": commit_of(ROOT),
            "seconds": round(time.monotonic() - started),
            "steps": [STEPS, STREAM_STEPS],
            **{name: getattr(options, name) for name in ("tasks", "modes", "worlds", "engines")},
        },
        "cells": cells,
        "broken": broken,
    }
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{found['about']['date']}-cpu-ranks"
        path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(page(found), encoding="utf-8")
    print("\n".join(found["broken"]) or page(found))
    return 3 if found["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
