"""Run directories made by hand: run.json and metrics.jsonl as mprun writes them."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mprun.cli import main
from mprun.record import seal
from mprun.record.keys import config_hash
from mprun.record.metrics import MetricsFile

seal._noted = True  # these runs have no seal; the note on the first would be in any test's output
CONFIG = {
    "model": {"name": "lstm_lm", "hidden_size": 64},
    "data": {"name": "docs_text", "batch_size": 20},
    "optim": {"name": "sgd", "lr": 0.1, "betas": None},
    "precision": {"name": "fp32", "autocast_dtype": None, "fp32_math": "ieee", "overrides": {}},
    "scaler": {"name": "none", "kind": "none", "scale": None, "init_scale": None},
    "train": {"steps": 40, "log_every": 10, "checkpoint_every": 0, "keep_checkpoints": 2},
    "compare": {"metric": "loss", "margin": 0.01, "window": 1},
    "seed": 0,
    "device": "auto",
    "cpu_half": "emulated",
    "name": None,
    "output_root": "outputs",
    "output_dir": None,
    "resume": None,
}
MODES = {"amp": {"autocast_dtype": "fp16"}, "amp_bf16": {"autocast_dtype": "bf16"}}
SCALERS = {
    "none": {"kind": "none"},
    "static": {"kind": "static", "scale": 128.0},
    "dynamic": {"kind": "dynamic", "init_scale": 65536.0},
}
ENVIRONMENT = {"mprun": "0.1.0", "commit": "a" * 40, "dirty": False}
ENVIRONMENT |= {"packages": {"torch": "2.15.0"}, "cpu": "EPYC", "device": "cpu"}
FLAGS = {"cuda.matmul.fp32_precision": "ieee", "cudnn.benchmark": True}


def write_run(
    directory: Path,
    mode: str = "fp32",
    seed: int = 0,
    *,
    scaler: str | None = None,
    overrides: dict | None = None,
    final: float = 1.0,
    status: str = "done",
    environment: dict | None = None,
    flags: dict | None = None,
    **record,
) -> Path:
    """Write one run; `overrides`: "optim.lr" -> value. `record`: other keys of run.json."""
    scaler = scaler or ("dynamic" if mode == "amp" else "none")
    config = copy.deepcopy(CONFIG)
    config["seed"] = seed
    config["precision"] |= {"name": mode, **MODES.get(mode, {})}
    config["scaler"] |= {"name": scaler, **SCALERS[scaler]}
    for key, value in (overrides or {}).items():
        *groups, last = key.split(".")
        place = config
        for group in groups:
            place = place[group]
        place[last] = value
    content = {
        "status": status,
        "choices": {"experiment": None, "model": "lstm_lm", "data": "docs_words"},
        "overrides": [],
        "config": config,
        "config_hash": config_hash(config),
        "created": "2026-11-20T10:00:00+00:00",
        "seed": seed,
        "sample": "token",
        "precision": {"mode": mode, "scaler": scaler, "flags": FLAGS | (flags or {})},
        "environment": ENVIRONMENT | (environment or {}),
    }
    if status in ("done", "diverged"):
        content |= {
            "cause": None if status == "done" else "non-finite loss",
            "last_step": 40,
            "skipped": 0,
            "throughput": {"samples_per_s": 1000.0 + seed},
            "memory": {"peak_bytes": 10, "measure": "process resident set"},
        }
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps(content | record))
    write_metrics(directory / "metrics.jsonl", final, seed)
    return directory


def write_metrics(path: Path, final: float, seed: int = 0, losses: Sequence[float] = ()) -> None:
    """Seeds differ in the last digits at least; else they would be one run.

    losses: those of the steps 1, 2, ..., instead of the usual ones.
    """
    usual = {step: final + 1 / step + 1e-9 * seed for step in (*range(1, 21), 30, 40)}
    path.unlink(missing_ok=True)
    file = MetricsFile(path)
    for step, loss in (dict(enumerate(losses, start=1)) or usual).items():
        head = {"step": step, "updates": step, "skipped": 0, "epoch": step / 40}
        file.write({"split": "train", **head, "loss": loss, "loss_scale": 1.0})
    file.write({"split": "eval", **head, "loss": final, "perplexity": 2.0, "seconds": 0.1})
    file.close()


def write_study(folder: Path, finals: Mapping[str, Sequence[float]], **more) -> Path:
    """A run of each mode and seed in <mode>-s<seed>; finals: mode -> what each seed ends with."""
    for mode, losses in finals.items():
        for seed, loss in enumerate(losses):
            write_run(folder / f"{mode}-s{seed}", mode, seed, final=loss, **more)
    return folder


def change_record(folder: Path, **changes) -> None:
    """Write other values into run.json; None: without this key."""
    record = json.loads((folder / "run.json").read_text()) | {"seal": None} | changes
    kept = {key: value for key, value in record.items() if value is not None}
    (folder / "run.json").write_text(json.dumps(kept))


def compared(capsys, *words, code: int = 0) -> dict:
    """Return the output of `mprun compare WORDS --json --no-report`, parsed."""
    assert main(["compare", *map(str, words), "--json", "--no-report"]) == code
    return json.loads(capsys.readouterr().out)
