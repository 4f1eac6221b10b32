"""Six published scripts, unmodified but for a patch, in every mode that a CPU has.

    python -m benchmarks.own_scripts --examples DIR --nanogpt DIR --text FILE --out OUT

DIR are checkouts of pytorch/examples and karpathy/nanoGPT at the commits below; FILE is any text
(WikiText-2's validation split for the figures in docs/results). `NAME.prepare.patch` puts a script
on `mprun.prepare`, `NAME.run.patch` on `mprun.Run` as well.

What is shown, each from the scripts' own output and files: fp32 prints the numbers of the
unmodified script and saves its bits; every mode runs to its end, or is refused in a line;
`mprun compare` judges four modes on three seeds of two of them; how many lines changed; and that
the host side of each mode runs on the fake CUDA device (`tests/fake_cuda`).
"""

import argparse
import gzip
import json
import os
import pickle
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
from torchvision.datasets import FakeData

import mprun
from mprun.config.option_files import modes
from mprun.errors import DIVERGED
from mprun.precision import get_policy
from mprun.precision.forward_context import why_unsupported
from mprun.record.console import markdown_table
from mprun.recording.environment import environment
from tests.fake_cuda import runtime as fake_cuda

HERE = Path(__file__).parent
COMMITS = {
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
}
CPU = torch.device("cpu")
MODES = [mode for mode in modes() if why_unsupported(get_policy(mode), CPU) is None]
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
    "vae": Script(
        "main.py",
        "--epochs 3 --log-interval 5".split(),
        "--precision",
        "--seed",
        "results/reconstruction_3.png",
    ),
    "imagenet": Script(
        "main.py",
        "data --workers 0 --epochs 1 --batch-size 4 --lr 0.01 --print-freq 1".split(),
        "--precision",
        "--seed",
        "checkpoint.pth.tar",
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
    """Write what the scripts read: words, characters, images, and digits in MNIST's format."""
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
    for split, images in (("train", FakeData(24)), ("val", FakeData(8, random_offset=24))):
        for number, (image, _) in enumerate(images):
            place = folder / "imagenet" / "data" / split / str(number % 4)
            place.mkdir(parents=True, exist_ok=True)
            image.resize((64, 64)).save(place / f"{number}.png")
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
    """Patch a script; return how many of its lines changed."""
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
    """Call a script, with more words and other variables than usual."""
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
    """Call a script; return its output without times, and the tensors that it saved."""
    called, saves = call(folder, name, mode, seed), SCRIPTS[name].saves
    if ending(called)[0] == "diverged":  # a result, which is recorded
        return called.stdout, {}
    if called.returncode:
        raise RuntimeError(f"{name} {mode}: {called.stderr[-2000:]}")
    if name == "word_language_model":  # it saves the whole model, by the name of its module
        sys.path.insert(0, str(folder / name))
    timeless = re.sub(
        r"(time:?|Time|Data|ms/batch|mfu)\s*[-\d.]+\s*(s|ms|%|\([\s\d.]+\))?", r"\1", called.stdout
    )
    told = re.compile(r"Namespace\(.*|.*seed = .*")  # what it was called with
    output = "\n".join(line for line in timeless.splitlines() if not told.match(line))
    return output, _tensors(folder / name / saves)


def ending(called: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Return ("ran" or "diverged", ""), or "refused" (in one line of mprun's own) or "failed", and
    the error's line."""
    if called.returncode in (0, DIVERGED):
        return ("diverged" if called.returncode else "ran"), ""
    trace = called.stderr.rpartition("Traceback (most recent call last):\n")[2]
    lines = [line for line in trace.splitlines() if not line.startswith((" ", "run: "))]
    raised = Path(re.findall(r'  File "(.*)"', trace)[-1])
    refused = (
        Path(mprun.__file__).parent in raised.parents
        and len(lines) == 1
        and lines[0].startswith(("ValueError: ", "RuntimeError: "))
    )
    return ("refused" if refused else "failed"), lines[0]


def recorded(folder: Path, name: str, mode: str, seed: int) -> dict:
    """Call a script that has a `Run`; return how it ended, as its directory says if it has one."""
    called = call(folder, name, mode, seed)
    record: dict = {"skipped": 0}
    for directory in (folder / name / "runs").glob(f"{mode}-s*"):
        record = mprun.load(directory).one.record
    found = {key: record.get(key) for key in ("status", "cause", "last_step", "final", "skipped")}
    status, line = ending(called)
    return found | ({"status": status, "cause": line} if line else {})


def on_fake_cuda(folder: Path, name: str, device: Path) -> dict[str, str]:
    """Return mode -> how the script ended on the fake device; only that its host side runs counts,
    for values mean nothing there, nor does a loss that is not finite."""
    ended = {}
    for mode in MODES:
        variables = fake_cuda.environment(device)
        called = call(folder, name, mode, 1, SCRIPTS[name].on_gpu, variables)
        status, line = ending(called)
        ended[mode] = f"{status}: {line}" if line else "ran"
        print("fake CUDA:", name, mode, ended[mode], flush=True)
    return ended


def _tensors(path: Path) -> dict:
    if path.suffix == ".png":
        return {"bytes": torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)}
    saved = torch.load(path, weights_only=False)
    if isinstance(saved, torch.nn.Module):
        return saved.state_dict()
    return saved.get("state_dict", saved.get("model", saved))


def page(found: dict) -> str:
    """Format the result as a page."""
    machine, scripts = found["environment"], found["scripts"]
    lines = [
        [
            name,
            str(row["lines_prepare"]),
            str(row["lines_run"]),
            _yes(row["fp32_same_output"]),
            _yes(row["fp32_bit_equal"]),
            *(
                str(sum(end.startswith(kind) for end in row["fake_cuda"].values()))
                for kind in ("ran", "refused")
            ),
        ]
        for name, row in scripts.items()
    ]
    ends = [[mode, *(_ended(row["modes"][mode]) for row in scripts.values())] for mode in MODES]
    said: dict[tuple[str, str], list[str]] = {}
    for name, row in scripts.items():
        for mode, one in row["modes"].items():
            causes = {one["cause"] or "", row["fake_cuda"][mode].partition(": ")[2]}
            for cause in sorted(causes - {""}):
                said.setdefault((cause.replace(mode, "..."), name), []).append(mode)
    header = ["script", "lines, prepare", "lines, Run", "fp32: same output", "fp32: same bits"]
    parts = [
        _HEAD.format(**machine, torch=machine["packages"]["torch"]),
        markdown_table([*header, f"fake CUDA: ran, of {len(MODES)}", "refused"], lines),
        _MODES,
        markdown_table(["mode", *scripts], ends),
        _SAID,
        markdown_table(["line", "script", "modes"], [[*k, ", ".join(v)] for k, v in said.items()]),
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
    after = "" if record["last_step"] is None else f" after step {record['last_step']}"
    return f"{record['status']}{after}{skipped}"


_HEAD = """# Six published scripts in every mode

Scripts of pytorch/examples and nanoGPT, unmodified but for a patch that puts them on
`mprun.prepare`, or on `mprun.Run` as well; {cpu}, {cpu_count} cores, torch {torch}, Python
{python}, commit {commit}:

    python -m benchmarks.own_scripts --examples CLONE --nanogpt CLONE \\
        --text wiki.valid.tokens --out OUT

MNIST's images (mnist, vae) are the bundled digits in its file format, those of dcgan and imagenet
torchvision's FakeData, the text WikiText-2's validation split; networks and lengths are small
(`SCRIPTS` in the benchmark). imagenet trains ResNet-18 on crops of 224 x 224, 6 steps. A changed
line counts once. vae saves images, whose files are compared; the others save weights."""
_MODES = """Loss of the last evaluation (dcgan: of the last step, both networks), seed 1 (nanogpt:
1337), and steps that were skipped:"""
_SAID = """What was said in place of a result (DataParallel: on the fake device). The error of
fp16_naive in dcgan and vae is torch's, of a binary cross entropy of NaN: Adam's eps of 1e-8 is 0 in
FP16. With an eps of 1e-4 both run to their end."""
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
            lines = patched(folder, name, "prepare"), patched(with_run, name, "run")
            seed = NANOGPT_SEED if name == "nanogpt" else 1
            output, saved = run(original, name, None, seed)
            own, bits = run(folder, name, "fp32", seed)
            equal = bits.keys() == saved.keys() and all(
                torch.equal(bits[key], saved[key]) for key in bits
            )
            row: dict = {"lines_prepare": lines[0], "lines_run": lines[1]}
            row |= {"fp32_same_output": own == output, "fp32_bit_equal": equal, "modes": {}}
            for mode in MODES:
                row["modes"][mode] = recorded(with_run, name, mode, seed)
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
    found["environment"] = environment(CPU)
    given.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
