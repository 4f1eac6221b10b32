"""Damaged files of a run: flipped, cut, edited, foreign, hostile.

Each case copies a run and damages the copy. `every_file` shows a sealed run to every verb that
reads one. The others resume a run without a seal to the end; `compare` and `explain` read the same
files.
"""

import copy
import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import traceback
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.faults.harness import Answer, Campaign, equal, kind_of, last_line, mprun, tree
from benchmarks.faults.subjects import END, STOP, Subject, baseline, diverged, subject
from mprun import load as mprun_load
from mprun.errors import MprunError

Damage = Callable[[Path], None]
RESUME = f"train.steps={END}"


def metrics_file(campaign: Campaign) -> None:
    """Try 64 damages of metrics.jsonl: flips, cuts, lines dropped, doubled, swapped, changed."""
    chance = random.Random(1)

    def lines(change: Callable[[list[bytes]], None]) -> Damage:
        def damage(run: Path) -> None:
            path = run / "metrics.jsonl"
            found = path.read_bytes().splitlines(keepends=True)
            change(found)
            path.write_bytes(b"".join(found))

        return damage

    def record(number: int, change: Callable[[dict], None]) -> Damage:
        def apply(found: list[bytes]) -> None:
            content = json.loads(found[number])
            change(content)
            found[number] = json.dumps(content).encode() + b"\n"

        return lines(apply)

    cases: list[tuple[str, Damage]] = []
    for number in range(24):
        cases.append((f"bit flip {number}", _flip("metrics.jsonl", chance.random(), number % 8)))
    for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9):
        cases.append((f"cut to {share:.0%}", _cut("metrics.jsonl", share)))
    for number in (0, 3, 9, 15, 21):
        cases.append((f"line {number} dropped", lines(lambda found, n=number: found.pop(n))))
        cases.append(
            (f"line {number} doubled", lines(lambda found, n=number: found.insert(n, found[n])))
        )
        cases.append(
            (
                f"line {number} swapped with the next",
                lines(lambda f, n=number: f.__setitem__(slice(n, n + 2), f[n : n + 2][::-1])),
            )
        )
    values: list[Any] = [None, "x", [], {}, -1, True, 1e400]
    for value in values:
        text = json.dumps(value)
        cases.append((f"step {text}", record(5, lambda content, v=value: content.update(step=v))))
        cases.append((f"loss {text}", record(6, lambda content, v=value: content.update(loss=v))))
    cases += [
        ("step missing", record(4, lambda content: content.pop("step"))),
        ("split missing", record(4, lambda content: content.pop("split"))),
        ("deep nesting", lines(lambda found: found.insert(2, b"[" * 100_000 + b"\n"))),
        ("not UTF-8", lines(lambda found: found.insert(2, b"\xff\xfe\n"))),
        ("a long line", lines(lambda found: found.insert(2, b"1" * 5_000_000 + b"\n"))),
    ]
    _resumed(campaign, "metrics.jsonl", cases[:64])


def configuration(campaign: Campaign) -> None:
    """Try 100 damages of config.yaml: 40 flips, 10 cuts, 40 edited values, 10 hostile ones."""
    chance = random.Random(2)
    cases = [(f"bit flip {n}", _flip("config.yaml", chance.random(), n % 8)) for n in range(40)]
    cases += [(f"cut to {n / 10:.0%}", _cut("config.yaml", n / 10)) for n in range(10)]

    def edit(key: str, value: Any) -> Damage:
        def damage(run: Path) -> None:
            content = yaml.safe_load((run / "config.yaml").read_text())
            _put(content, key, value)
            (run / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False))

        return damage

    edits: dict[str, list[Any]] = {
        "optim.lr": [0.5, "1", None, -1.0, [1], "nan"],
        "seed": [1, "0", None, 2**70],
        "data.batch_size": [4, 0, "2"],
        "data.vocab_size": [17],
        "optim.momentum": [0.9],
        "optim.bias_lr_factor": [1.2],
        "precision.name": ["fp32", "x\ny", 5],
        "precision.param_dtype": ["fp32", "fp8"],
        "scaler.init_scale": [1.0, "many"],
        "scaler.growth_interval": [5],
        "compare.margin": [0.5, -1],
        "compare.metric": ["perplexity"],
        "train.clip_norm": [None, 1.0],
        "model.hidden_size": [16, "8"],
        "model.name": ["resnet50", None],
        "data.name": ["custom", "docs"],
        "optim": [None, []],
        "train": [7],
        "threads": [2, 0],
    }
    cases += [(f"{key}={value!r}", edit(key, value)) for key in edits for value in edits[key]]
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    hostile = {
        "aliases nine deep": bomb,
        "aliases in the seed": bomb + "seed: *i\n",
        "an object": "model: !!python/object/apply:os.system ['touch canary']\n",
        "empty": "",
        "a list": "- 1\n",
        "deep nesting": "[" * 50_000,
        "a long value": "name: " + "x" * 5_000_000,
        "two documents": "a: 1\n---\nb: 2\n",
        "a key that is a list": "? [a, b]\n: c\n",
        "control characters": "name: \x00\x01\n",
    }
    for name, text in hostile.items():
        cases.append((name, _written("config.yaml", text)))
    _resumed(campaign, "config.yaml", cases)


# What is edited in a file: the first digit after these words, so that the file keeps its format.
EDITED = {
    "run.json": [b'"final"', b'"loss": '],
    "config.yaml": [b"optim:", b"lr: "],
    "metrics.jsonl": [b'"eval"', b'"loss": '],
    "numerics/step-00000020.json": [b'"tensors"', b'"amax":'],
    "numerics/step-00000001.json": [b'"tensors"', b'"amax":'],
    "numerics/post-mortem.json": [b'"rows"', b'"loss": '],
}
LOAD = ["mprun.load"]


def every_file(campaign: Campaign) -> None:
    """Damage each file of the record in 12 ways, and show the run to every verb that reads it."""
    made, base = subject(campaign), baseline(campaign)
    run, out = campaign.folder / "case" / "run", campaign.folder / "out"
    done = [
        ["compare", str(run), str(base), "--out", str(out)],
        ["compare", "--tensorboard", str(run), str(base), "--out", str(out)],
        ["paper", str(run), str(base), "--out", str(out)],
        ["advise", str(run)],
        ["logprobs", "amp", str(run), "--tokens", "24"],
        LOAD,
        [f"resume={run}", RESUME],
    ]
    _every_file(campaign, made.stopped, done, lambda: equal(run, made.reference, END))
    of_diverged = [["explain", str(run), "--no-cures"], LOAD, [f"resume={run}", "train.steps=8"]]
    _every_file(campaign, diverged(campaign), of_diverged, lambda: False)


def _every_file(
    campaign: Campaign, made: Path, verbs: list[list[str]], resumed: Callable[[], bool]
) -> None:
    """Show damaged copies of `made`. Harmless is a damage of which a verb's output knows nothing.

    resumed: whether the copy was resumed to the end that it should have.
    """

    def answer_of(verb: list[str], damage: Damage) -> Answer:
        run = shutil.copytree(made, campaign.scratch() / "run")
        damage(run)
        return _loaded(run) if verb is LOAD else mprun(verb, run.parent)

    wholes = [answer_of(verb, lambda run: None) for verb in verbs]
    for name in (name for name in EDITED if (made / name).exists()):
        chance = random.Random(name)
        cases: list[tuple[str, Damage]] = [("edited", _edited(name))]
        cases += [(f"bit flip {n}", _flip(name, chance.random(), n)) for n in (0, 1, 3, 5)]
        cases += [(f"cut to {share:.0%}", _cut(name, share)) for share in (0.0, 0.4, 0.99)]
        cases += [
            ("missing", lambda run, name=name: (run / name).unlink()),
            ("a folder", _as_folder(name)),
            ("a line doubled", _doubled(name)),
            ("another run's", lambda run, name=name: shutil.copy(made / "run.json", run / name)),
        ]
        if name == "run.json":  # by its own content there would be no damage
            cases.pop()
        for (case, damage), (verb, whole) in product(cases, zip(verbs, wholes, strict=True)):
            answer = answer_of(verb, damage)
            same = resumed if verb[0].startswith("resume") else partial(_same, answer, whole)
            words = " ".join(word.partition("=")[0] for word in verb[:2] if "/" not in word[:1])
            kind = kind_of(answer, same)
            campaign.note(
                f"every file, {made.name}", f"{name}: {case}: {words}", kind, last_line(answer)
            )


def _same(answer: Answer, whole: Answer) -> bool:
    return (answer.code, answer.output) == (whole.code, whole.output)


def _loaded(run: Path) -> Answer:
    """Return what a notebook sees of a run."""
    try:
        [one] = mprun_load(str(run))
        parts = [one.columns(part) for part in ("train", "evals", "probes")]
        seen = [one.config, one.metrics, *({k: list(v) for k, v in p.items()} for p in parts)]
        return Answer(0, repr(seen), 0.0)
    except MprunError as error:
        return Answer(error.exit_code, f"mprun: {error}", 0.0)
    except Exception:
        return Answer(1, traceback.format_exc(), 0.0)


def _edited(name: str) -> Damage:
    def damage(run: Path) -> None:
        content, place = (run / name).read_bytes(), 0
        for words in EDITED[name]:  # a run that diverged lacks some of them
            place = max(place, content.find(words, place) + len(words))
        found = re.compile(rb"\d").search(content, place)
        assert found is not None
        digit = str((int(found[0]) + 1) % 10).encode()
        (run / name).write_bytes(content[: found.start()] + digit + content[found.end() :])

    return damage


def _as_folder(name: str) -> Damage:
    def damage(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return damage


def _doubled(name: str) -> Damage:
    def damage(run: Path) -> None:
        lines = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).write_bytes(b"".join([*lines, lines[-1]]))

    return damage


def run_record(campaign: Campaign) -> None:
    """Try 38 wrong types and values in run.json with every verb that reads a run."""
    values: dict[str, list[Any]] = {
        "status": [None, 5, "ended", []],
        "choices": [None, [], "x", {"model": 5}],
        "overrides": [None, {}, [1, 2]],
        "config_hash": [None, 5, "0"],
        "precision": [None, "amp", {}, {"mode": []}],
        "precision.mode": [None, {}, "x\n" * 9],
        "config": [None, 7, []],
        "steps": [None, "40", -1, 1.5],
        "attempts": [None, "x"],
        "environment": [None, [], "cpu"],
        "environment.threads": ["many", -1],
        "environment.packages": [None, {"torch": 5}],
        "data": [None, "x"],
        "data.sha256": [5],
    }

    def change(key: str, value: Any) -> Damage:
        def damage(run: Path) -> None:
            content = json.loads((run / "run.json").read_text())
            _put(content, key, value)
            (run / "run.json").write_text(json.dumps(content))

        return damage

    cases = [(f"{key}={value!r}", change(key, value)) for key in values for value in values[key]]
    _resumed(campaign, "run.json", cases)
    _read(campaign, "run.json, read", cases)


def foreign_state(campaign: Campaign) -> None:
    """Try 34 states with wrong content and correct manifests."""
    made = subject(campaign)
    found = torch.load(_state(made.stopped), weights_only=True, map_location="cpu")
    replacements: list[Any] = [None, 5, "x", [], {}, torch.zeros(3)]
    cases: list[tuple[str, Damage]] = []
    for path in (["task"], ["random"], ["step"], ["skipped"]):
        for value in replacements:
            cases.append((f"{'.'.join(path)} is {_short(value)}", _state_with(found, path, value)))
    leaves = list(_leaves(found["task"], ["task"]))
    chance = random.Random(3)
    for path in chance.sample(leaves, min(10, len(leaves))):
        cases.append((f"{'.'.join(path)} is a string", _state_with(found, path, "x")))
    _resumed(campaign, "state.pt, wrong inside", cases[:34])


def flipped_state(campaign: Campaign) -> None:
    """Try 69 flips and cuts of the newest checkpoint's two files."""
    chance, cases = random.Random(4), []
    newest = f"checkpoints/step-{STOP:08}"
    for number in range(40):
        cases.append((f"state.pt: flip {number}", _flip(f"{newest}/state.pt", chance.random(), 3)))
    for number in range(19):
        share = chance.random()
        cases.append((f"manifest: flip {number}", _flip(f"{newest}/manifest.json", share, 1)))
    for share in (0.0, 0.2, 0.5, 0.8, 0.99):
        cases.append((f"state.pt: cut to {share:.0%}", _cut(f"{newest}/state.pt", share)))
        cases.append((f"manifest: cut to {share:.0%}", _cut(f"{newest}/manifest.json", share)))
    _resumed(campaign, "checkpoint, flips and cuts", cases)


class _Payload:
    """An object that calls `function(*arguments)` when an unsafe reader unpickles it."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def payloads(campaign: Campaign) -> None:
    """Try 52 pickles that would run code, as a state and inside one, in four kinds of archive."""
    made = subject(campaign)
    state = torch.load(_state(made.stopped), weights_only=True, map_location="cpu")
    canary = str(campaign.folder / "canary")
    calls = [
        (os.system, f"touch {canary}"),
        (open, canary, "w"),
        (eval, f"open({canary!r}, 'w')"),
        (exec, f"open({canary!r}, 'w')"),
        (os.mkdir, canary),
        (os.mknod, canary),
        (shutil.copy, __file__, canary),
        (print, "x" * 10),
        (getattr, list, "append"),
        (torch.load, canary),
        (pickle.loads, b"cos\nsystem\n."),
        (__import__, "antigravity"),
        (bytearray, 10**8),
    ]

    def save(make: Callable[[Path, Any], None], value: Any) -> Damage:
        def damage(run: Path) -> None:
            for checkpoint in sorted((run / "checkpoints").iterdir()):
                make(checkpoint / "state.pt", value)
                _seal(checkpoint)

        return damage

    def plain(path: Path, value: Any) -> None:
        path.write_bytes(pickle.dumps(value))

    def inside(path: Path, value: Any) -> None:
        torch.save({**state, "task": {"learner": value}}, path)

    def legacy(path: Path, value: Any) -> None:
        torch.save(value, path, _use_new_zipfile_serialization=False)

    cases = []
    for function, *arguments in calls:
        name = getattr(function, "__name__", str(function))
        for make in (plain, torch.save, inside, legacy):
            into = (lambda p, v: torch.save(v, p)) if make is torch.save else make
            payload = _Payload(function, *arguments)
            cases.append((f"{name}, {make.__name__}", save(into, payload)))
    _resumed(campaign, "payloads", cases)
    if os.path.lexists(canary):
        campaign.note("payloads", "canary", "outside", "code of a checkpoint ran")


def strangers(campaign: Campaign) -> None:
    """Try links out of a run directory, pipes and devices in place of files, oversized members."""
    outside = campaign.folder / "outside"

    def link(name: str, target: str) -> Damage:
        def damage(run: Path) -> None:
            path = run / name
            kept = outside / target
            if path.is_dir():
                shutil.copytree(path, kept, dirs_exist_ok=True)
                shutil.rmtree(path)
            elif path.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, kept)
                path.unlink()
            path.symlink_to(kept)

        return damage

    newest = f"checkpoints/step-{STOP:08}"
    names = ["checkpoints", "numerics", ".lock", "config.yaml", "run.json", "metrics.jsonl", newest]
    names += [f"{newest}/state.pt", f"{newest}/manifest.json", f"numerics/step-{STOP:08}.json"]
    names += ["samples"]
    cases = [(f"{name} is a link", link(name, f"kept/{name}")) for name in names]

    def fifo(name: str) -> Damage:
        def damage(run: Path) -> None:
            (run / name).unlink(missing_ok=True)
            os.mkfifo(run / name)

        return damage

    fifos = ["run.json", "config.yaml", "metrics.jsonl", ".lock", f"{newest}/state.pt"]
    cases += [(f"{name} is a pipe", fifo(name)) for name in fifos]
    cases += [
        ("300 MB compressed in state.pt", _oversized(newest)),
        ("metrics.jsonl of 200 MB in one line", _written("metrics.jsonl", "1" * 200_000_000)),
        ("run.json of 100 MB", _written("run.json", "[" * 100_000_000)),
    ]
    _resumed(campaign, "a stranger's run", cases, watched=outside)
    _read(campaign, "a stranger's run, read", cases, watched=outside)


def _resumed(
    campaign: Campaign,
    test: str,
    cases: list[tuple[str, Damage]],
    watched: Path | None = None,
) -> None:
    """Damage a copy, resume it, judge it: the same end, or one line and unchanged files."""
    made = subject(campaign)
    for name, damage in cases:
        run, before = _damaged(campaign, made, damage, watched)
        there = _kept(run)
        answer = mprun([f"resume={run}", RESUME], run.parent)
        kind = kind_of(answer, lambda run=run: equal(run, made.reference, END))
        if kind == "found" and there != _kept(run):
            kind = "refused, and changed"
        if watched is not None and before != tree(watched):
            kind = "outside"
        campaign.note(test, name, kind, last_line(answer))


def _read(
    campaign: Campaign, test: str, cases: list[tuple[str, Damage]], watched: Path | None = None
) -> None:
    """Damage a copy and show it to every verb that reads a run; none may end in a traceback."""
    made = subject(campaign)
    for name, damage in cases:
        run, before = _damaged(campaign, made, damage, watched)
        verbs = [["compare", str(run), str(made.reference), "--out", str(run.parent / "out")]]
        verbs += [["explain", str(run)]]
        for verb in verbs:
            answer = mprun(verb, run.parent)
            kind = kind_of(answer, lambda: True)
            if watched is not None and before != tree(watched):
                kind = "outside"
            campaign.note(test, f"{name}: {verb[0]}", kind, last_line(answer))


def _damaged(
    campaign: Campaign, made: Subject, damage: Damage, watched: Path | None
) -> tuple[Path, dict]:
    if watched is not None:
        shutil.rmtree(watched, ignore_errors=True)
        watched.mkdir()
    run = shutil.copytree(made.stopped, campaign.scratch() / "run")
    # As a kill leaves it: a seal would find every damage before the other checks do.
    record = json.loads((run / "run.json").read_text())
    del record["seal"]
    (run / "run.json").write_text(json.dumps(record | {"status": "running"}))
    damage(run)
    return run, tree(watched) if watched is not None else {}


def _put(content: dict, key: str, value: Any) -> None:
    """Set a dotted key."""
    *groups, name = key.split(".")
    for group in groups:
        content = content[group]
    content[name] = value


def _kept(run: Path) -> dict[str, str]:
    """Return the files that a refused resume must not change: everything that the user has."""
    return {name: text for name, text in tree(run).items() if name != ".lock"}


def _flip(name: str, share: float, bit: int) -> Damage:
    def damage(run: Path) -> None:
        content = bytearray((run / name).read_bytes())
        content[int(share * len(content))] ^= 1 << bit
        (run / name).write_bytes(content)

    return damage


def _cut(name: str, share: float) -> Damage:
    def damage(run: Path) -> None:
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: int(share * len(content))])

    return damage


def _written(name: str, text: str) -> Damage:
    return lambda run: (run / name).write_text(text) and None


def _state(run: Path) -> Path:
    return run / f"checkpoints/step-{STOP:08}/state.pt"


def _state_with(state: dict, path: list[str], value: Any) -> Damage:
    def damage(run: Path) -> None:
        content = copy.deepcopy(state)
        node: Any = content
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        for checkpoint in sorted((run / "checkpoints").iterdir()):
            torch.save(content, checkpoint / "state.pt")
            _seal(checkpoint)

    return damage


def _seal(checkpoint: Path) -> None:
    """Fix the manifest for the present state.pt; keep its other entries."""
    path, manifest = checkpoint / "state.pt", checkpoint / "manifest.json"
    said = json.loads(manifest.read_text())
    said |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
    manifest.write_text(json.dumps(said))


def _oversized(newest: str) -> Damage:
    """Return a damage: a member of 300 MB that takes 300 kB in the file."""

    def damage(run: Path) -> None:
        path = run / newest / "state.pt"
        buffer = io.BytesIO()
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(buffer, "w") as new:
            for member in old.infolist():
                content = old.read(member)
                if member.filename.endswith("/data/0"):
                    content = bytes(300_000_000)
                new.writestr(member.filename, content, zipfile.ZIP_DEFLATED)
        path.write_bytes(buffer.getvalue())
        _seal(path.parent)

    return damage


def _leaves(value: Any, path: list) -> Iterator[list]:
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], [*path, key])
    else:
        yield path


def _short(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)
