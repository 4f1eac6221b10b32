"""Planted causes of failure: does explain name them, does advise, and do their commands hold?

    python -m benchmarks.planted_causes FOLDER [--only NAME ...] [--jobs N] [--real] [--out PAGE]

A cell is a network of `causes.py`. First it must be real: FP32 learns in five seeds, and in all
five the mode diverges or ends above FP32's bound, its mean and the larger of 5 % and three standard
deviations. Then both verbs are asked as a user does, and the command that each prints is trained to
its end. It holds if that ends within the bound, with at most a quarter of its updates skipped. A
healthy network must end within the bound; each verb that still names something there has raised a
false alarm. A finished cell in FOLDER is not repeated. Commands run in forks of this process, so
their seconds are without the import of torch.
"""

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.planted_causes.causes import KINDS, STEPS, Network, networks
from mprun.cli import main as mprun
from mprun.extensions.diagnosis import advice, interventions  # noqa: F401 - before the forks
from mprun.record.console import markdown_table
from mprun.recording.environment import environment
from mprun.training import run  # noqa: F401

SEEDS, LEARNT = 5, 0.8
LONGEST_S = 400
Outcome = dict[str, Any]


def call(place: Path, *arguments: str) -> Outcome:
    """Run mprun in a fork; return exit code, output, and the seconds that it took."""
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        signal.alarm(LONGEST_S)
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(place / name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), stream)
        code = 1
        try:
            code = mprun([*arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    texts = [(place / name).read_text(encoding="utf-8") for name in ("out", "err")]
    code, seconds = os.waitstatus_to_exitcode(status), time.perf_counter() - start
    took = {"seconds": round(seconds, 2), "cpu": round(used.ru_utime + used.ru_stime, 2)}
    return {"code": code, "out": texts[0], "err": texts[1], **took}


def train(place: Path, overrides: list[str]) -> Outcome:
    """Train once; return how it ended."""
    directory = place / "run"
    shutil.rmtree(directory, ignore_errors=True)
    ended = call(place, *overrides, f"output_dir='{directory}'")
    if ended["code"] not in (0, 3):
        lines = (ended["err"].strip() or ended["out"]).splitlines()
        return {"status": "refused", "cause": (lines or [f"signal {ended['code']}"])[-1]}
    record = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    with (directory / "metrics.jsonl").open(encoding="utf-8") as file:
        first = float(json.loads(file.readline()).get("loss", "nan"))
    final = float(record["final"]["loss"]) if record.get("final") else math.nan
    found = {key: record.get(key) for key in ("status", "cause", "skipped", "last_step")}
    return found | {"loss": final, "first": first, "cpu": ended["cpu"]}


def within(outcome: Outcome, bound: float) -> bool:
    applied = (outcome.get("skipped") or 0) <= STEPS / 4
    return outcome["status"] == "done" and applied and outcome["loss"] <= bound


def verified(place: Path, own: list[str], mode: str) -> Outcome:
    """Return whether FP32 learns, its bound, and how the mode ends, over the seeds."""
    plain = [word for word in own if not re.match(r"precision\.|scaler", word)]
    fp32, in_mode = (
        [train(place, [*line, f"precision={name}", f"seed={seed}"]) for seed in range(SEEDS)]
        for name, line in (("fp32", plain), (mode, own))
    )
    losses = [one.get("loss", math.nan) for one in fp32]
    if not all(map(math.isfinite, losses)):  # FP32 was refused, or has no loss in the end
        return {"learns": False, "fails": False, "trains": False, "fp32": fp32, "mode": in_mode}
    mean = statistics.fmean(losses)
    bound = mean + max(0.05 * abs(mean), 3 * statistics.stdev(losses))
    learns = all(one["status"] == "done" for one in fp32)
    learns = learns and mean <= LEARNT * statistics.fmean(one["first"] for one in fp32)
    inside = [within(one, bound) for one in in_mode]
    ran = all(one["status"] in ("done", "diverged") for one in in_mode)
    found = {"learns": learns, "fails": ran and not any(inside), "trains": all(inside)}
    return found | {"fp32": fp32, "mode": in_mode, "bound": bound, "mean": mean}


def without(overrides: list[str], *keys: str) -> list[str]:
    return [word for word in overrides if word.partition("=")[0] not in keys]


def entries(content: Any) -> list[str]:
    """Return what a verb states, an entry of its JSON each, without commands and what it tried."""
    left = {"command", "overrides", "static", "dynamic", "unscaled", "tried", "run", "ramp"}
    left |= {"smallest_cure", "evidence", "patterns", "steps", "replay", "cause", "weights"}
    left |= {"in_words", "check", "mode", "largest_activation", "classification"}
    if not isinstance(content, dict):
        return [str(content)]
    found = []
    for key, value in content.items():
        if key == "casts":
            found += _of_casts(value)
        elif key == "master_weights":
            worst = [one["module"] for one in value["worst"].values() if one]
            found += [f"master weights: lost updates in {worst}"] if value["needed"] else []
        elif key == "loss_scaling":
            kinds = [f"{one['kind']} underflow, worst {one['worst']}" for one in value["kinds"]]
            found += [f"loss scale: {value['limited_by']} {kinds}"] if value["needed"] else []
        elif key not in left and value not in (None, [], {}, False):
            rows = value if isinstance(value, list) else [value]
            found += [f"{key}: {json.dumps(one)}" for one in rows]
    return found


def _of_casts(casts: Any) -> list[str]:
    if isinstance(casts, dict):
        return [f"casts suit not: {name}, taken" for name in casts.get("excluded") or []]
    lines = [line if isinstance(line, list) else [str(line)] for line in casts or []]
    return [f"casts: {' '.join(line)}" for line in lines if line != ["not measured"]]


def asked(place: Path, verb: str, own: list[str], seen: Outcome) -> Outcome:
    """Ask a verb; return what it states, its command, and how that ends."""
    if verb == "explain":
        trust = [word for word in own if word.partition("=")[0].endswith(".factory")]
        told = call(place, "explain", "--json", str(place / "failed"), *trust)
    else:
        shutil.rmtree(place / "advised", ignore_errors=True)
        told = call(place, "advise", "--json", *own, f"output_dir='{place / 'advised'}'")
    found = {key: told[key] for key in ("code", "seconds", "cpu")}
    try:
        content = json.loads(told["out"])
    except ValueError:
        line = next(iter(reversed(told["err"].strip().splitlines())), "")
        return found | {"said": [], "line": line.replace(f"{place}/", ""), "holds": False}
    casts = content.get("casts")
    command = content.get("command")
    if verb == "advise" and isinstance(casts, dict):
        command = casts.get("command") or command
    found |= {"said": entries(content), "cure": None, "holds": False}
    if command:
        given = without(shlex.split(command)[1:], "output_dir", "seed")
        found["cure"] = [word for word in given if word not in own]
        found["end"] = train(place, [*given, "seed=0"])
        found["holds"] = within(found["end"], seen["bound"])
    return found


def cell(job: tuple[Network, Path, bool]) -> None:
    """Do what a network's result lacks; save it after each part."""
    network, folder, real = job
    name, healthy, own = network.name, network.kind == "-", network.words
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{name}.json"
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}

    def save() -> None:
        kept.write_text(json.dumps(found, indent=1), encoding="utf-8")

    if found.get("network") != network._asdict():  # a changed line is done anew
        seen = verified(place, own, network.mode)
        is_real = seen["learns"] and seen["trains" if healthy else "fails"]
        found = {"network": network._asdict(), "real": is_real, "checked": seen}
        save()
    if found["real"] and not real:
        for verb in ("explain", "advise"):
            if verb in found:
                continue
            if verb == "explain" and not (place / "failed").is_dir():
                train(place, [*own, f"precision={network.mode}", "seed=0"])
                (place / "run").rename(place / "failed")
            line = [*own, f"precision={network.mode}"]
            answer = asked(place, verb, line, found["checked"])
            if not healthy:
                answer["named"] = network.named(answer["said"], verb == "explain")
            found[verb] = answer
            save()
    shutil.rmtree(place)
    said = [f"{v}: named {found[v].get('named')}, holds {found[v]['holds']}"
            for v in ("explain", "advise") if v in found]  # fmt: skip
    print(f"{name}: real {found['real']}", *said, flush=True)


def page(folder: Path) -> tuple[str, Outcome]:
    """Return the page on all results in a folder, and the results."""
    found = {
        name: json.loads(kept.read_text(encoding="utf-8"))
        for name in networks()
        if (kept := folder / f"{name}.json").is_file()
    }
    told = {n: one for n, one in found.items() if one["real"] and "advise" in one}
    causes = {n: one for n, one in told.items() if one["network"]["kind"] != "-"}
    healthy = {n: one for n, one in told.items() if n not in causes}
    table = [
        [
            name,
            one["network"]["mode"],
            one["network"]["kind"],
            _ended(one["checked"]),
            *_answer(one, "explain"),
        ]
        + _answer(one, "advise")
        for name, one in causes.items()
    ]
    alarms = [
        [name, one["network"]["mode"], *(_alarm(one[verb]) for verb in ("explain", "advise"))]
        for name, one in healthy.items()
    ]
    machine = environment(torch.device("cpu"))
    whole = {name.rpartition(".")[0] for name in causes}
    day = time.strftime("%Y-%m-%d")
    head = _HEAD.format(**machine, day=day, torch=machine["packages"]["torch"], causes=len(whole),
                        networks=len(causes), healthy=len(healthy))  # fmt: skip
    columns = [
        "cause",
        "mode",
        "kind",
        "in the mode",
        "explain",
        "its cure",
        "advise",
        "its change",
    ]
    parts = [head, markdown_table(["", "explain", "advise"], _sums(causes, healthy)), _EACH]
    parts += [markdown_table(columns, table), _HEALTHY]
    parts.append(markdown_table(["network", "mode", "explain", "advise"], alarms))
    return "\n\n".join(parts) + "\n", {"environment": machine, "cells": found}


def alarm(answer: Outcome) -> list[str]:
    """Return what a verb has against a network that trains."""
    signs = ("culprit", "keep_fp32", "casts", "operations", "far")
    said = (entry for entry in answer["said"] if not entry.startswith("casts: suit every layer"))
    return [entry for entry in said if entry.startswith(signs)]


def _alarm(answer: Outcome) -> str:
    return "; ".join(alarm(answer))[:120] or "none"


def _sums(causes: Outcome, healthy: Outcome) -> list[list[str]]:
    rows = []
    verbs = [[one[verb] for one in causes.values()] for verb in ("explain", "advise")]

    def row(title: str, *cells: str) -> None:
        rows.append([title, *cells])

    row("named right", *(f"{sum(a['named'] for a in own)} of {len(own)}" for own in verbs))
    commands = [[a for a in own if a.get("cure") is not None] for own in verbs]
    row("a command is printed", *(f"{len(own)} of {len(causes)}" for own in commands))
    row("it holds to the end", *(f"{sum(a['holds'] for a in own)} of {len(own)}"
                                 for own in commands))  # fmt: skip
    row("of these: FP32 as a whole", *(
        str(sum(a["holds"] and "precision=fp32" in a["cure"] for a in own)) for own in commands
    ))  # fmt: skip
    row("false alarms", *(f"{sum(bool(alarm(one[verb])) for one in healthy.values())} of "
                          f"{len(healthy)}" for verb in ("explain", "advise")))  # fmt: skip
    for unit in ("seconds", "cpu"):
        times = [sorted(a[unit] for a in own) for own in verbs]
        name = "seconds, median (most)" if unit == "seconds" else "CPU seconds, median (most)"
        row(name, *(f"{statistics.median(own):.2g} ({own[-1]:.2g})" for own in times))
    for kind in KINDS:
        own = [one for one in causes.values() if one["network"]["kind"] == kind]
        cells = [
            f"{sum(one[verb]['named'] for one in own)}, {sum(one[verb]['holds'] for one in own)}"
            f" of {len(own)}"
            for verb in ("explain", "advise")
        ]
        row(f"{kind}: named, holds", *cells)
    return rows


def _ended(checked: Outcome) -> str:
    ends = checked["mode"]
    broken = sum(one["status"] != "done" for one in ends)
    losses = [one["loss"] for one in ends if one["status"] == "done"]
    text = [f"{broken} diverge"] * bool(broken)
    text += [f"loss {statistics.fmean(losses):.3g}"] if losses else []
    return f"{', '.join(text)}; FP32 {checked['mean']:.3g}"


def _answer(one: Outcome, verb: str) -> list[str]:
    answer = one[verb]
    words = "named" if answer["named"] else "**not named**"
    if "line" in answer:
        return [f"{words}: exit code {answer['code']}", "-"]
    if answer["cure"] is None:
        return [words, "-"]
    return [words, f"`{' '.join(answer['cure'])}` {'holds' if answer['holds'] else '**fails**'}"]


_HEAD = """# Planted causes of failure: what explain and advise say of them, {day}, CPU

{cpu}, {cpu_count} cores, torch {torch}, Python {python}, commit {commit}; one seed of each verb and
command, five of what is real:

    python -m benchmarks.planted_causes FOLDER --out PAGE

{causes} causes in {networks} networks, of which FP32 learns each and the named mode fails in five
seeds of five, and {healthy} healthy networks; the list was written before the code that tries what
the verbs print. Seconds are beside other work on the machine, and without the import of torch."""
_EACH = """Named: the right module and operation with a word of the kind (`explain`), the right
module with a word of the kind (`advise`). A command holds if it ends within FP32's bound: its mean
of five seeds and the larger of 5 % and three standard deviations, at most a quarter of the updates
skipped. An exit code of 2 is a refusal."""
_HEALTHY = "Healthy networks, and what a verb has against them:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="only look which causes are real")
    parser.add_argument("--out", type=Path, help="write the page, and JSON beside it")
    given = parser.parse_args()
    folder = given.folder.resolve()
    chosen = [
        network
        for name, network in networks().items()
        if not given.only or name.startswith(tuple(given.only))
    ]
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    warm = networks()["healthy.perceptron_scaled"].words
    quiet = io.StringIO()
    with (
        contextlib.redirect_stdout(quiet),
        contextlib.redirect_stderr(quiet),
        tempfile.TemporaryDirectory() as first,
    ):
        mprun([*warm, "precision=amp", "train.steps=2", f"output_dir='{first}/run'"])
    jobs = [(network, folder, given.real) for network in chosen]
    with multiprocessing.get_context("fork").Pool(given.jobs, maxtasksperchild=1) as pool:
        pool.map(cell, jobs, chunksize=1)
    if given.out is not None:
        words_of, found = page(folder)
        given.out.with_suffix(".md").write_text(words_of, encoding="utf-8")
        content = json.dumps(found, indent=1)
        given.out.with_suffix(".json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
