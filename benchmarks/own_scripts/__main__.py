"""Four published scripts, unmodified but for a patch, in every mode that a CPU has.

    python -m benchmarks.own_scripts --examples DIR --nanogpt DIR --text FILE --out OUT

DIR are checkouts of pytorch/examples and karpathy/nanoGPT at the commits below; FILE is any text
(WikiText-2's validation split for the figures in docs/results). `NAME.engine.patch` puts a script
on `mprun.prepare`; `NAME.run.patch` adds `mprun.Run`.

The scripts' output and files show five facts. fp32 prints the numbers of the unmodified script and
saves its bits. Every mode runs to its end. `mprun compare` judges four modes on three seeds of two
scripts. The number of changed lines is counted. The host side of each mode runs on the fake CUDA
device (`mprun.bench.fake_cuda`).
"""

import argparse
import gzip
import json
import os
import pickle
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import mprun
from mprun.errors import DIVERGED
from mprun.extensions.bench import fake_cuda
from mprun.record.console import markdown_table
from mprun.training.environment import environment

HERE = Path(__file__).parent
COMMITS = {
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
}
MODES = (
    *("fp32", "fp16_naive", "fp16_master", "fp16_master_scaled", "amp"),
    *("bf16_naive", "bf16_master", "amp_bf16"),
)
NANOGPT_SEED = 1337
COMPARED = ("fp32", "fp16_naive", "fp16_master_scaled", "amp")


class Script(NamedTuple):
    """A script: file, call, arguments for mode and seed, saved files, words for a GPU."""

    file: str
    words: list[str]
    told: str
    seeded: str
    saves: str
    on_gpu: tuple[str, ...] = ()


SCRIPTS = {
    "word_language_model": Script(
        "main.py",
        "--data text --epochs 1 --emsize 64 --nhid 64 --bptt 20 --lr 0.003 --dropout 0.2 "
        "--use-optimizer --save saved.pt".split(),
        "--precision",
        "--seed",
        "saved.pt",
        ("--accel",),
    ),
    "dcgan": Script(
        "main.py",
        "--dataset fake --niter 1 --imageSize 64 --batchSize 64 --workers 0 --ngf 8 --ndf 8 "
        "--outf .".split(),
        "PRECISION",
        "--manualSeed",
        "netG_epoch_0.pth",
        ("--accel",),
    ),
    "mnist": Script(
        "main.py",
        "--epochs 1 --save-model".split(),
        "--precision",
        "--seed",
        "mnist_cnn.pt",
    ),
    "nanogpt": Script(
        "train.py",
        "config/train_shakespeare_char.py --device=cpu --compile=False --dtype=float32 "
        "--eval_iters=20 --eval_interval=50 --log_interval=10 --block_size=32 --batch_size=8 "
        "--n_layer=2 --n_head=2 --n_embd=32 --max_iters=300 --lr_decay_iters=300 --dropout=0.1 "
        "--gradient_accumulation_steps=2 --out_dir=out".split(),
        "PRECISION",
        "--seed=",
        "out/ckpt.pt",
        ("--device=cuda",),
    ),
}


def prepare_data(folder: Path, text: Path) -> None:
    """Write the scripts' data: words, characters, and digits in the form of MNIST."""
    lines = text.read_text(encoding="utf-8").splitlines()
    words = folder / "word_language_model" / "text"
    words.mkdir()
    for name, part in (
        ("train", lines[:900]),
        ("valid", lines[900:1100]),
        ("test", lines[1100:1200]),
    ):
        (words / f"{name}.txt").write_text("\n".join(part) + "\n", encoding="utf-8")
    characters = "\n".join(lines)[:400_000]
    known = {character: number for number, character in enumerate(sorted(set(characters)))}
    ids = np.array([known[character] for character in characters], np.uint16)
    place, cut = folder / "nanogpt" / "data" / "shakespeare_char", int(len(ids) * 0.9)
    place.mkdir(parents=True, exist_ok=True)
    ids[:cut].tofile(place / "train.bin")
    ids[cut:].tofile(place / "val.bin")
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(known)}))
    with np.load(Path(mprun.__file__).parent / "data" / "digits.npz") as found:
        images = np.pad(found["images"].repeat(3, 1).repeat(3, 2) * 15, ((0, 0), (2, 2), (2, 2)))
        labels = found["labels"]
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, part in (("train", slice(0, 1400)), ("t10k", slice(1400, None))):
        for kind, array in (("images-idx3", images[part]), ("labels-idx1", labels[part])):
            header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(
                f">{array.ndim}I", *array.shape
            )
            content = header + array.astype(np.uint8).tobytes()
            (raw / f"{name}-{kind}-ubyte").write_bytes(content)
            (raw / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))


def patched(folder: Path, name: str, kind: str) -> int:
    """Patch a script; return the number of changed lines."""
    patch = HERE / f"{name}.{kind}.patch"
    subprocess.run(["patch", "-p1", "-s", "-i", str(patch)], cwd=folder, check=True)
    lines = patch.read_text(encoding="utf-8").splitlines()[2:]
    return max(sum(line.startswith(sign) for line in lines) for sign in "+-")


def call(
    folder: Path,
    name: str,
    mode: str | None,
    seed: int,
    more: Iterable[str] = (),
    given: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[str]:
    """Call a script once, with additional words and variables."""
    file, words, told, seeded, *_ = SCRIPTS[name]
    words, variables = [*words, *more], dict(given) | {"OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = str(Path(mprun.__file__).parents[1])
    if mode is not None and told.isupper():
        variables[told] = mode
    elif mode is not None:
        words += [told, mode]
    if not (seeded.endswith("=") and seed == NANOGPT_SEED):  # fixed in the script itself
        words += [f"{seeded}{seed}"] if seeded.endswith("=") else [seeded, str(seed)]
    command = [sys.executable, file, *words]
    return subprocess.run(command, cwd=folder / name, env=variables, capture_output=True, text=True)


def run(folder: Path, name: str, mode: str | None, seed: int = 1) -> tuple[str, dict]:
    """Return (output without times, saved content) of one call of a script."""
    called, saves = call(folder, name, mode, seed), SCRIPTS[name].saves
    if called.returncode == DIVERGED:  # a valid result, recorded as such
        return called.stdout, {}
    if called.returncode:
        raise RuntimeError(f"{name} {mode}: {called.stderr[-2000:]}")
    if name == "word_language_model":  # it saves the whole model, by the name of its module
        sys.path.insert(0, str(folder / name))
    saved = torch.load(folder / name / saves, weights_only=False)
    timeless = re.sub(r"(time:?|ms/batch|mfu)\s*[-\d.]+\s*(s|ms|%)?", r"\1", called.stdout)
    told = re.compile(r"Namespace\(.*|.*seed = .*")  # the arguments of the call
    output = "\n".join(line for line in timeless.splitlines() if not told.match(line))
    return output, _tensors(saved)


def on_fake_cuda(folder: Path, name: str, device: Path) -> dict[str, str]:
    """Return mode -> how the script ended on the fake device; only its host side counts."""
    ended = {}
    for mode in MODES:
        variables = fake_cuda.environment(device)
        called = call(folder, name, mode, 1, SCRIPTS[name].on_gpu, variables)
        lines = [line for line in called.stderr.splitlines() if "Error" in line]
        # Values mean nothing there, not even a non-finite loss.
        ended[mode] = "ran" if called.returncode in (0, DIVERGED) else "; ".join(lines[-1:])
        print("fake CUDA:", name, mode, ended[mode], flush=True)
    return ended


def _tensors(saved) -> dict:
    if isinstance(saved, torch.nn.Module):
        return saved.state_dict()
    return saved.get("model", saved)


def page(found: dict) -> str:
    """Format the result as a page."""
    machine, scripts = found["environment"], found["scripts"]
    lines = [
        [
            name,
            str(row["lines_engine"]),
            str(row["lines_run"]),
            _yes(row["fp32_same_output"]),
            _yes(row["fp32_bit_equal"]),
            str(sum(end == "ran" for end in row["fake_cuda"].values())),
        ]
        for name, row in scripts.items()
    ]
    ends = [[mode, *(_ended(row["modes"][mode]) for row in scripts.values())] for mode in MODES]
    header = ["script", "lines, engine", "lines, Run", "fp32: same output", "fp32: same bits"]
    parts = [
        _HEAD.format(**machine, torch=machine["packages"]["torch"]),
        markdown_table([*header, f"modes on the fake CUDA device, of {len(MODES)}"], lines),
        _MODES,
        markdown_table(["mode", *scripts], ends),
        _COMPARED,
        *(
            f"{name}:\n\n"
            + "\n".join(f"- {mode}: {said}" for mode, said in by_mode.items() if said)
            for name, by_mode in found["compared"].items()
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"


def _ended(record: dict) -> str:
    skipped = f", {record['skipped']} skipped" if record["skipped"] else ""
    if record["status"] == "done":
        return f"{record['final']['loss']:.4g}{skipped}"
    return f"{record['status']} after step {record['last_step']}: {record['cause']}{skipped}"


_HEAD = """# Four published scripts in every mode

Scripts of pytorch/examples and nanoGPT, unmodified but for a patch that puts them on
`mprun.prepare`, or on `mprun.Run` as well; {cpu}, {cpu_count} cores, torch {torch}:

    python -m benchmarks.own_scripts --examples CLONE --nanogpt CLONE \\
        --text wiki.valid.tokens --out OUT

MNIST's images are the bundled digits in its file format, DCGAN's torchvision's FakeData, the text
WikiText-2's validation split; networks and lengths are small (`SCRIPTS` in the benchmark). A
changed line counts once."""
_MODES = """Loss of the last evaluation (dcgan: of the last step, both networks), seed 1, and steps
that were skipped:"""
_COMPARED = "`mprun compare` on the run directories of three seeds, at its margin of 1 %:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("--examples", "--nanogpt", "--text", "--out"):
        parser.add_argument(name, type=Path, required=True)
    given = parser.parse_args()
    found: dict = {"commits": COMMITS, "scripts": {}, "compared": {}}
    with tempfile.TemporaryDirectory() as temporary:
        original, folder = Path(temporary) / "original", Path(temporary) / "patched"
        for name in SCRIPTS:
            source = given.nanogpt if name == "nanogpt" else given.examples / name
            shutil.copytree(source, original / name, ignore=shutil.ignore_patterns(".git"))
        prepare_data(original, given.text)
        shutil.copytree(original, folder)
        with_run = Path(temporary) / "with_run"
        shutil.copytree(original, with_run)
        for name in SCRIPTS:
            lines = patched(folder, name, "engine"), patched(with_run, name, "run")
            seed = NANOGPT_SEED if name == "nanogpt" else 1
            output, saved = run(original, name, None, seed)
            own, bits = run(folder, name, "fp32", seed)
            equal = bits.keys() == saved.keys() and all(
                torch.equal(bits[key], saved[key]) for key in bits
            )
            row: dict = {"lines_engine": lines[0], "lines_run": lines[1]}
            row |= {"fp32_same_output": own == output, "fp32_bit_equal": equal, "modes": {}}
            for mode in MODES:
                call(with_run, name, mode, seed)
                (directory,) = (with_run / name / "runs").glob(f"{mode}-s*")
                record = mprun.load(directory).one.record
                kept = ("status", "cause", "last_step", "final", "skipped")
                row["modes"][mode] = {key: record[key] for key in kept}
                print(name, mode, row["modes"][mode], flush=True)
            found["scripts"][name] = row
        for name in ("word_language_model", "nanogpt"):
            shutil.rmtree(with_run / name / "runs")
            for mode in COMPARED:
                for seed in (1, 2, 3):
                    run(with_run, name, mode, seed)
            comparison = mprun.compare(with_run / name / "runs")
            print(comparison)
            (group,) = comparison.to_dict()["groups"]
            found["compared"][name] = {
                row["mode"]: row["verdict"]["sentence"] for row in group["modes"]
            }
        device = Path(temporary) / "device"
        device.mkdir()
        fake_cuda.build(device)
        for name, row in found["scripts"].items():
            row["fake_cuda"] = on_fake_cuda(with_run, name, device)
    found["environment"] = environment(torch.device("cpu")) | {"platform": platform.platform()}
    given.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
