"""Memory, launches, waits and graphs of a CUDA step in two checkouts, on the fake CUDA device.

    python -m benchmarks.fake_cuda_engines OTHER_CHECKOUT [--only DCGAN,gpt] [--out FOLDER]

Both checkouts run `python -m benchmarks.suite --host` on the same configurations, here also beside
the recipe of torch.amp. Reported are bytes at the peak of a step, and what a step launches, eager
and as a replay of its CUDA graph; then which aims are met. No kernel runs. `--out` writes the page
DATE-fake-cuda-one-engine.md and .json there. The exit code is 3 if an aim is missed.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.same_bits import ROOT, about, commit_of
from mprun.record.console import markdown_table

THREE = ("fp32", "amp", "fp16_master_scaled")
OF_MEMORY = ("fp32", "amp", "fp16_master", "bf16_master")
TOKENS = ["data=synthetic_tokens", "data.vocab_size=2000", "data.sequence_length=20"]
TOKENS += ["data.batch_size=16", "data.train_tokens=20000"]
IMAGES = ["data=synthetic_images", "data.image_size=224", "data.num_classes=1000"]
IMAGES += ["data.batch_size=64", "data.train_size=256", "data.eval_size=1"]
# Label -> words of a configuration, none for one of the suite; modes.
MODELS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "ResNet-50 b64": (["model=resnet50", "optim=sgd", *IMAGES], (*OF_MEMORY, THREE[-1])),
    "GPT-2 b12": ([], OF_MEMORY),
    "AlexNet b512": ([], THREE),
    "AlexNet b128": ([], THREE),
    "DCGAN b128": ([], THREE),
    "DCGAN b512": ([], THREE),
    "lstm_lm b16": (["model=lstm_lm", *TOKENS], THREE),
    "gpt b16": (["model=gpt", *TOKENS], THREE),
    "ssd_mini": (["model=ssd_mini"], THREE),
}
RECIPE = ("AlexNet", "DCGAN")  # these have torch.amp's recipe beside them
MOST = 1.01  # of the other checkout's peak
LAUNCHING = ("lstm_lm", "DCGAN", "gpt", "ResNet-50", "ssd_mini")
Key = tuple[str, str, str, str]  # model, mode, contender, execution
Found = dict[Key, dict[str, Any]]


def rows_of(checkout: Path, label: str, recipe: bool) -> Found:
    """Return the rows of a model in a checkout."""
    words, modes = MODELS[label]
    command = [sys.executable, "-m", "benchmarks.suite", "--host", "--json"]
    command += ["--modes", ",".join(modes), *(words or ["--only", label])]
    command += ["--peers", "amp"] if recipe else []
    own = {"PYTHONPATH": f"{checkout}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=checkout, env=os.environ | own, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{label} in {checkout}: {done.stderr.decode()[-2000:]}")
    rows = json.loads(done.stdout)["rows"]
    return {(label, row["mode"], row["contender"], row["execution"]): row for row in rows}


def launches(row: dict[str, Any]) -> float:
    """Return what an eager step launches: kernels, calls of cuDNN and cuBLAS, copies and fills."""
    return sum(row[name] for name in ("launches", "triton", "library", "copies"))


def aims(here: Found, there: Found) -> list[tuple[str, str, bool]]:
    """Return each aim: what it is, what was found, whether it is met."""
    eager = {key[:2]: row for key, row in here.items() if key[2:] == ("mprun", "eager")}
    found = []
    for (label, mode), row in eager.items():
        if label.startswith(("ResNet-50", "GPT-2")) and mode in OF_MEMORY:
            ratio = row["peak"] / there[label, mode, "mprun", "eager"]["peak"]
            said = f"peak of {label} in {mode}, at most {MOST} of there"
            found.append((said, f"{ratio:.4f}", ratio <= MOST))
        if label.startswith(RECIPE) and mode in THREE[1:]:
            ratio = row["peak"] / here[label, "amp", "amp", "eager"]["peak"]
            said = f"peak of {label} in {mode}, at most torch.amp's"
            found.append((said, f"{ratio:.4f}", ratio <= 1))
        if label.startswith(LAUNCHING) and mode == THREE[-1]:
            own, of_amp = launches(row), launches(eager[label, "amp"])
            said = f"launches of {label} in {mode}, at most amp's"
            found.append((said, f"{own:.1f} to {of_amp:.1f}", own <= of_amp))
    own = [row for key, row in here.items() if key[2] == "mprun"]
    waits = sum(row["waits"] or 0 for row in own)
    found.append(("waits, eager and replayed, none", f"{waits:g}", waits == 0))
    replays = [row for row in own if row["execution"] == "replayed"]
    captured = sum(bool(row["work"]) for row in replays)
    captured_all = captured == len(replays)
    said = "steps captured as one graph, all"
    return [*found, (said, f"{captured} of {len(replays)}", captured_all)]


def peaks(here: Found, there: Found) -> str:
    """Return the table of memory."""
    lines = []
    for key, row in here.items():
        label, mode, contender, execution = key
        if contender != "mprun":
            continue
        kind = "peak" if execution == "eager" else "reserved"
        recipe = here.get((label, "amp", "amp", "eager"))
        with_recipe = recipe and mode != "fp32" and execution == "eager"
        before = there[key]
        lines.append(
            [
                label,
                mode,
                "eager, peak" if execution == "eager" else "replayed, reserved",
                _mib(before[kind]),
                _mib(row[kind]),
                f"{row[kind] / before[kind]:.3f}",
                _mib(recipe["peak"]) if with_recipe else "",
                f"{row['peak'] / recipe['peak']:.3f}" if with_recipe else "",
            ]
        )
    header = ["model", "mode", "", "there MiB", "here MiB", "here / there", "torch.amp MiB"]
    return markdown_table([*header, "here / torch.amp"], lines)


def steps(here: Found, there: Found) -> str:
    """Return the table of launches."""
    lines = []
    for (label, mode, contender, execution), row in here.items():
        if contender != "mprun" or execution != "eager":
            continue
        replayed = label, mode, contender, "replayed"
        recipe = here.get((label, "amp", "amp", "eager"))
        before, own = there[replayed], here[replayed]
        lines.append(
            [
                label,
                mode,
                f"{launches(there[label, mode, contender, execution]):.0f}",
                f"{launches(row):.0f}",
                f"{launches(recipe):.0f}" if recipe and mode != "fp32" else "",
                f"{before['work']:.0f}" if before["work"] else before["why_not"],
                f"{own['work']:.0f}" if own["work"] else own["why_not"],
                f"{row['waits']:g}, {own['waits'] or 0:g}",
                "captured" if own["work"] else "not captured",
            ]
        )
    header = ["model", "mode", "eager, there", "here", "torch.amp", "of a replay, there", "here"]
    return markdown_table([*header, "waits, eager, replayed", "graph"], lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def page(made: dict[str, str], here: Found, there: Found) -> str:
    """Return the page of results."""
    judged = [[what, said, "met" if met else "missed"] for what, said, met in aims(here, there)]
    parts = [
        f"# One engine beside two on the fake CUDA device, {made['date']}",
        f"{made['machine']}, no GPU, torch {made['torch']}, Python {made['python']}. Commits\n"
        f"{made['other']} (there) and {made['this']} (here); n = 3 steps after 4. Command:",
        f"    {made['command']}",
        "No kernel ran, no value means anything (`tests/fake_cuda`). torch's own\n"
        "allocator counts the bytes. Launches: kernels of torch and Triton, calls of cuDNN and\n"
        "cuBLAS, copies and fills; of a replay, the pieces of its graph. torch.amp: its recipe of\n"
        "autocast and GradScaler (`benchmarks/suite/peers/amp.py`), with the same network,\n"
        "batches and optimizer.",
        "## Aims",
        markdown_table(["aim", "found", ""], judged),
        "## Memory",
        peaks(here, there),
        "## Launches, waits, graphs",
        steps(here, there),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--only", default="", help="models whose names begin so")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    other = options.other.resolve()
    here: Found = {}
    there: Found = {}
    for label in MODELS:
        if label.startswith(tuple(options.only.split(","))):
            print(label, file=sys.stderr, flush=True)
            here |= rows_of(ROOT, label, label.startswith(RECIPE))
            there |= rows_of(other, label, False)
    made = about("benchmarks.fake_cuda_engines", "OTHER_CHECKOUT", *sys.argv[2:])
    made |= {"torch": torch.__version__, "other": commit_of(other), "this": commit_of(ROOT)}
    text = page(made, here, there)
    print(text)
    if options.out is not None:
        path = options.out / f"{made['date']}-fake-cuda-one-engine.md"
        path.write_text(text, encoding="utf-8")
        sides = [{"checkout": "here", **row} for row in here.values()]
        sides += [{"checkout": "there", **row} for row in there.values()]
        lines = ",\n".join(map(json.dumps, sides))
        found = f'{{"about": {json.dumps(made)},\n"rows": [\n{lines}\n]}}\n'
        path.with_suffix(".json").write_text(found, encoding="utf-8")
    return 0 if all(met for *_, met in aims(here, there)) else 3


if __name__ == "__main__":
    raise SystemExit(main())
