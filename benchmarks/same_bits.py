"""Show that two checkouts of mprun train to the same bits on a CPU.

    python -m benchmarks.same_bits OTHER_CHECKOUT [--networks gpt dcgan] [--modes fp32 amp]
                                   [--out FOLDER]

Every cell, a network in a precision mode, trains in both checkouts with one thread: 20 steps, each
logged, then an evaluation. It then resumes from the checkpoint half way, as after a kill there,
which suits a schedule too. Compared are metrics.jsonl without times, exit codes, and every tensor
and value of the last checkpoint. Then, unless networks or modes were chosen, both checkouts run the
README's quickstart with one seed, and `mprun compare --json` on the same folders. A process trains
one network in all modes of a checkout, both checkouts at a time; networks in turn. `--out` writes
the page DATE-cpu-same-bits.md and .json there. The exit code is 3 if anything differs.

A difference has a commit: `git bisect run` with this tool and the one cell.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMES = {"seconds", "samples_per_s", "data_wait"}  # the fields of a row that a clock tells
STEPS = 20
# Tens of millions of parameters, whose checkpoint takes seconds: steps, not resumed.
LARGE = {"alexnet": 2, "resnet50": 10}
IMAGES = ["optim=sgd_plain", "optim.lr=1e-3", "data=synthetic_images", "data.train_size=32"]
EXTRA = {
    "alexnet": [
        *("model=alexnet", *IMAGES, "data.image_size=64", "data.batch_size=4", "data.eval_size=4")
    ],
    "alexnet_2012": [
        *("model=alexnet_2012", "model.width=0.0625", "optim=sgd_alexnet"),
        *("data=digits_64", "data.batch_size=2"),
    ],
    # Smaller batches overflow FP16 in the backward pass of BatchNorm over 1x1 maps.
    "resnet50": [
        *("model=resnet50", *IMAGES, "data.image_size=32", "data.batch_size=8", "data.eval_size=8")
    ],
}
# The scale overflows FP16 at first and grows again, before and behind the checkpoint.
SCALER = ["scaler=dynamic", "scaler.init_scale=16777216", "scaler.growth_interval=3"]
QUICKSTART = ["experiment=quickstart_lost_updates,quickstart_underflow", "seed=0"]
QUICKSTART += ["precision=fp32,fp16_naive,fp16_master,fp16_master_scaled,amp"]


def networks() -> dict[str, list[str]]:
    """Return the command line of each network: those of the fake device's tests, and variants."""
    from tests.fake_cuda.cells import MODELS
    from tests.helpers import TINY_AUTOENCODER, TINY_GPT, TINY_LM

    clipped = ["train.accumulate=2", "train.clip_norm=0.1", *SCALER]
    return {
        **MODELS,
        **EXTRA,
        "lstm_lm, scale overflows": [*TINY_LM, "model.dropout=0.3", "optim=sgd", *SCALER],
        "gpt, accumulate, clip": [*TINY_GPT, *clipped],
        "conv_autoencoder, digits": [*TINY_AUTOENCODER, "optim.eps=1e-3", *SCALER],
    }


def train_all(spec: dict[str, Any]) -> dict[str, Any]:
    """Train a network in all modes with the mprun of PYTHONPATH; return a record for each mode."""
    import mprun

    if not Path(mprun.__file__).is_relative_to(spec["checkout"]):
        raise SystemExit(f"{mprun.__file__} is not of {spec['checkout']}")
    return {mode: cell(spec, mode) for mode in spec["modes"]}


def trained(spec: dict[str, Any], checkout: Path, folder: Path) -> dict[str, Any]:
    """Train a network in all modes with the mprun of a checkout, in a process of its own."""
    result = folder / "result.json"
    of_side = {"checkout": str(checkout), "folder": f"{folder}/run", "result": str(result)}
    python_in(checkout, [__file__, "--train-all"], folder, json.dumps(spec | of_side))
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def cell(spec: dict[str, Any], mode: str) -> dict[str, Any]:
    """Train and resume one cell; return exit codes, rows and hashes."""
    steps, folder = spec["steps"], Path(spec["folder"]) / mode
    words = [*spec["words"], "device=cpu", "threads=1", f"precision={mode}"]
    every = steps // 2 if spec["resumes"] else steps
    words += [f"train.steps={steps}", f"train.checkpoint_every={every}", "train.log_every=1"]
    found = outcome([*words, f"output_dir='{folder}'"], folder)
    if found["code"] == 0 and spec["resumes"]:
        shutil.rmtree(folder / "checkpoints" / f"step-{steps:08}")
        found["resumed"] = outcome([f"resume={folder}"], folder)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def outcome(words: list[str], folder: Path) -> dict[str, Any]:
    """Call mprun; return its exit code, its refusal, the rows and the hashes of the checkpoint."""
    from mprun.cli import main

    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = main(words)
    said = errors.getvalue().strip() if code == 2 else ""
    return {"code": code, "said": said, "rows": rows_of(folder), "hashes": hashes_of(folder)}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without times."""
    path = folder / "metrics.jsonl"
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else [])
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def hashes_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the newest checkpoint's weights and of all else in it."""
    import torch
    from torch.utils._pytree import keystr, tree_flatten_with_path

    saved = sorted(folder.glob("checkpoints/step-*/state.pt"))
    if not saved:
        return {}
    hashes = {"weights": hashlib.sha256(), "other state": hashlib.sha256()}
    state = of_one_engine(torch.load(saved[-1], weights_only=True))
    for path, leaf in sorted(tree_flatten_with_path(state)[0], key=lambda leaf: keystr(leaf[0])):
        name = keystr(path)
        if name.startswith("['computed']"):  # facts of run.json
            continue
        found = hashes["weights" if "['model']" in name else "other state"]
        if isinstance(leaf, torch.Tensor):
            found.update(f"{name} {leaf.dtype} {[*leaf.shape]}".encode())
            found.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            found.update(f"{name} {leaf!r}".encode())
    return {name: found.hexdigest() for name, found in hashes.items()}


def of_one_engine(state: Any) -> Any:
    """Return the state of a checkpoint in the form of today, whose weights are the masters."""
    if not isinstance(state, dict):
        return state
    if {"model", "optimizer"} <= state.keys():
        model, optimizer = state["model"], state["optimizer"]
        rest = {k: v for k, v in optimizer.items() if k != "masters"}
        state = {"model": model | optimizer["masters"], **rest}
    return {key: of_one_engine(value) for key, value in state.items()}


def verdict(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return how two records of a cell differ, or how both ended alike."""
    difference = first_difference(one, other)
    if difference is None and "resumed" in one:
        difference = first_difference(one["resumed"], other["resumed"], "resumed, ")
        difference = difference or first_difference(one, one["resumed"], "resumed from straight, ")
    if difference is None and one["code"] == 0 and not (one["rows"] and one["hashes"]):
        difference = "nothing was compared"
    if difference is not None:
        return f"differs {difference}"
    return {0: "equal", 2: "refused alike", 3: "equal, diverged"}.get(
        one["code"], f"equal, exit code {one['code']}"
    )


def first_difference(one: dict[str, Any], other: dict[str, Any], told: str = "") -> str | None:
    """Return the first place at which two runs differ; None: there is none."""
    if one["code"] != other["code"]:
        return f"{told}in exit codes {one['code']}, {other['code']}"
    for left, right in zip(one["rows"], other["rows"], strict=False):
        if left != right:
            keys = sorted(key for key in left | right if left.get(key) != right.get(key))
            return f"{told}at step {left['step']} in {', '.join(keys)}"
    if len(one["rows"]) != len(other["rows"]):
        return f"{told}in the number of rows"
    names = one["hashes"].keys() | other["hashes"].keys()
    unequal = [n for n in sorted(names) if one["hashes"].get(n) != other["hashes"].get(n)]
    return f"{told}in {unequal[-1]}" if unequal else None


def python_in(checkout: Path, words: list[str], folder: Path, given: str = "") -> str:
    """Run Python with the mprun of a checkout in `folder`; return its output."""
    own = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-P", *words]
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | own, input=given, capture_output=True, text=True
    )
    if ended.returncode not in (0, 3):  # 3: a run diverged, as naive FP16 does
        raise SystemExit(f"{command}: exit code {ended.returncode}\n{ended.stderr[-3000:]}")
    return ended.stdout


def quickstart(checkout: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run the README's quickstart, then a small sweep; return the rows of each run."""
    from tests.helpers import TINY_LM

    small = [*TINY_LM, "precision=fp32,fp16_naive,amp", "seed=0,1,2", "train.steps=20"]
    for words in (["device=cpu", "threads=1", *QUICKSTART], small):
        python_in(checkout, ["-m", "mprun", "-m", *words], folder)
    found = sorted(folder.glob("outputs/*/*/metrics.jsonl"))
    return {"/".join(path.parts[-3:-1]): rows_of(path.parent) for path in found}


def comparison(checkout: Path, runs: Path) -> dict[str, Any]:
    """Return the values that `mprun compare --json` prints of the runs, by their path."""
    words = ["-m", "mprun", "compare", "--json", "--no-report", str(runs)]
    printed = leaves(json.loads(python_in(checkout, words, runs.parent)))
    return {path: value for path, value in printed.items() if path != "/created"}


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the values of nested lists and objects by their path."""
    if not isinstance(tree, dict | list):
        return {path: tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {k: v for key, part in pairs for k, v in leaves(part, f"{path}/{key}").items()}


def unequal(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return what two objects differ in: both values of each such key, null where it is absent."""
    keys = [*one, *(key for key in other if key not in one)]
    return {k: [one.get(k), other.get(k)] for k in keys if one.get(k) != other.get(k)}


def commit_of(checkout: Path) -> str:
    """Return the last commit of mprun/ and conf/ in a checkout, with + if files changed since."""
    parts = ["--", "mprun", "conf"]
    last, changed = (
        subprocess.run(
            ["git", *words, *parts], cwd=checkout, capture_output=True, text=True, check=True
        ).stdout
        for words in (["log", "-1", "--format=%h"], ["status", "--porcelain"])
    )
    return last.strip() + ("+" if changed else "")


def about(*command: str) -> dict[str, Any]:
    """Return what a result page names of its making; command: words behind `python -m`."""
    import torch

    from mprun.recording.environment import environment

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{environment(torch.device('cpu'))['cpu']}, {os.cpu_count()} cores",
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),
        "command": shlex.join(["python", "-m", *command]),
    }


def summary(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return what the page's JSON keeps of a cell."""
    last = one["rows"][-1] if one["rows"] else {}
    kept = {"verdict": verdict(one, other), "exit_code": one["code"], "said": one["said"]}
    kept |= {key: last.get(key) for key in ("step", "skipped", "loss")}
    return kept | {"rows": len(one["rows"]), "weights": one["hashes"].get("weights", "")[:16]}


def page(found: dict[str, Any]) -> str:
    """Format the result page."""
    from mprun.record.console import markdown_table

    about, cells = found["about"], found["cells"]
    modes = [*next(iter(cells.values()))]
    rows = [[name, *(cell["verdict"] for cell in row.values())] for name, row in cells.items()]
    skips = [
        f"{name} in {mode}"
        for name, row in cells.items()
        for mode, cell in row.items()
        if cell["verdict"] == "equal" and cell["skipped"] == cell["step"]
    ]
    counts = Counter(cell["verdict"] for row in cells.values() for cell in row.values())
    lines = [
        f"# The same bits in two checkouts, {about['date']}, CPU",
        f"{about['machine']}, torch {about['torch']}, Python {about['python']}, one thread. "
        f"Commits {about['other']} and {about['this']}; {about['seconds'] / 60:.0f} min:",
        f"    {about['command']}",
        "\n".join(_METHOD),
        ", ".join(f"{verdict}: {n}" for verdict, n in counts.most_common())
        + f" of {counts.total()} cells.",
        f"Without any update, all steps being skipped: {', '.join(skips) or 'none'}.",
        markdown_table(["network", *modes], rows),
    ]
    if found["runs"]:
        lines += [
            "## Quickstart and comparison",
            f"Of {len(found['runs'])} runs, 10 of them the quickstart's, the rows of "
            f"{len(found['runs_that_differ'])} differ. Of {found['compared']} values that "
            "`mprun compare --json` prints of one folder with the runs of the other checkout, "
            f"{len(found['comparison_differs'])} differ.",
        ]
    return "\n\n".join(lines) + "\n"


_METHOD = (
    f"A cell trains {STEPS} steps, each logged, and an evaluation, n = 1, seed 0, then resumes",
    f"from half way; {', '.join(f'{k} trains {v}' for k, v in LARGE.items())} without that.",
    "Equal: exit codes, all rows of metrics.jsonl without times, and every value of the last",
    "checkpoint (weights, masters, optimizer, loss scale, random states), in both checkouts and",
    "after the resume. Refused alike: exit code 2 in both. Networks are tiny; ssd300 and larger",
    "sizes are left out.",
)


def main() -> int:
    if sys.argv[1:] == ["--train-all"]:  # in the process of one checkout and one network
        spec = json.load(sys.stdin)
        Path(spec["result"]).write_text(json.dumps(train_all(spec)), encoding="utf-8")
        return 0
    from mprun.config.option_files import modes

    known = networks()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--networks", nargs="+", choices=[*known], default=[*known])
    parser.add_argument("--modes", nargs="+", choices=[*modes()], default=[*modes()])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checkouts, started = [options.other.resolve(), ROOT], time.monotonic()
    cells, commits = {}, [commit_of(each) for each in checkouts]
    with tempfile.TemporaryDirectory(prefix="same-bits-") as place:
        folders = [Path(place) / name for name in ("other", "this")]
        for folder in folders:
            folder.mkdir()
        for name in options.networks:
            spec = {"words": known[name], "modes": options.modes, "resumes": name not in LARGE}
            spec["steps"] = LARGE.get(name, STEPS)
            with ThreadPoolExecutor() as both:
                pair = [*both.map(partial(trained, spec), checkouts, folders)]
            cells[name] = {mode: summary(pair[0][mode], pair[1][mode]) for mode in options.modes}
            verdicts = Counter(each["verdict"] for each in cells[name].values())
            print(f"{name}: {dict(verdicts)}", flush=True)
        runs: list[dict[str, Any]] = [{}, {}]
        read: list[dict[str, Any]] = [{}, {}]
        if options.networks == [*known] and options.modes == [*modes()]:
            with ThreadPoolExecutor() as both:
                runs = [*both.map(quickstart, checkouts, folders)]
            read = [comparison(checkout, folders[0] / "outputs") for checkout in checkouts]
    found = {
        "about": {
            **about("benchmarks.same_bits", "OTHER_CHECKOUT", *sys.argv[2:]),
            "other": commits[0],
            "this": commits[1],
            "seconds": round(time.monotonic() - started),
        },
        "cells": cells,
        "runs": [*runs[0]],
        "runs_that_differ": [*unequal(*runs)],
        "compared": len(read[0]),
        "comparison_differs": unequal(*read),
    }
    if options.out is not None:
        path = options.out / f"{found['about']['date']}-cpu-same-bits"
        numbers = json.dumps(found, separators=(",", ":")) + "\n"
        path.with_suffix(".json").write_text(numbers, encoding="utf-8")
        path.with_suffix(".md").write_text(page(found), encoding="utf-8")
    print(page(found))
    differing = [c for row in cells.values() for c in row.values() if "differs" in c["verdict"]]
    return 3 if differing or found["runs_that_differ"] or found["comparison_differs"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
