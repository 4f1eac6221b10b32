"""Answers to open questions about CUDA kernels, with figures and commands.

    python benchmarks/cuda_questions.py [--only NAME ...] [--json FILE] [--markdown FILE]

Each question is a function. They run one after another in one process. If one fails, it is reported
and the rest run in a fresh process, because a CUDA error spoils every later call in its process.
Without a GPU the questions that need one say so, and the others answer for this CPU.
"""

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from questions.accumulation import embedding_gradient, reduced_precision
from questions.answer import Answer
from questions.kernels import batch_norm_backend, first_convolution, host_time
from questions.low_bits import fp8_products, stochastic_rounding
from questions.lstm_graph import lstm_graph
from questions.machine import ceilings, energy_counter
from questions.skipped_updates import (
    batch_norm_after_skip,
    fused_sgd_half,
    grad_scaler_collapse,
    linear_cross_entropy,
)

from mprun.precision import pin_math_flags
from mprun.record.console import markdown_table

# The most urgent questions come first.
QUESTIONS: dict[str, Callable[[torch.device], Answer]] = {
    function.__name__: function
    for function in (
        embedding_gradient,
        grad_scaler_collapse,
        batch_norm_after_skip,
        fused_sgd_half,
        linear_cross_entropy,
        fp8_products,
        stochastic_rounding,
        lstm_graph,
        reduced_precision,
        energy_counter,
        host_time,
        batch_norm_backend,
        ceilings,
        first_convolution,
    )
}
NEED_CUDA = {
    "lstm_graph",
    "reduced_precision",
    "ceilings",
    "batch_norm_backend",
    "energy_counter",
    "first_convolution",
}
UNANSWERED = "needs a CUDA device"


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 1 if a question failed; a question without its GPU does not count as failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=tuple(QUESTIONS), action="append", metavar="NAME")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one question")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    has_cuda = torch.cuda.is_available() and options.device != "cpu"
    device = torch.device("cuda" if has_cuda else "cpu")
    names = options.only or list(QUESTIONS)
    if options.worker:
        try:
            return _work(names, device)
        except (KeyboardInterrupt, BrokenPipeError):
            return 130
    answers = []
    try:
        for record in _answers(names, device, options.limit):
            answers.append(record)
            print(_section(record), flush=True)
    except KeyboardInterrupt:  # a time limit from outside: keep the answers so far
        answered = {record["name"] for record in answers}
        for name in names:
            if name not in answered:
                text = "ended before it was answered"
                answers.append(_described({"name": name, "status": "failed", "text": text}))
    if options.markdown:
        options.markdown.write_text("\n".join(map(_section, answers)), encoding="utf-8")
    if options.json:
        found = {
            "device": torch.cuda.get_device_name() if has_cuda else "cpu",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if has_cuda else None,
            "answers": answers,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if any(record["status"] == "failed" for record in answers) else 0


def _work(names: list[str], device: torch.device) -> int:
    """Answer in this process, one JSON line each; end at the first failure."""
    for name in names:
        started = time.perf_counter()
        torch.manual_seed(0)
        pin_math_flags("ieee")
        try:
            record = {"status": "answered", **asdict(QUESTIONS[name](device))}
        except Exception as error:  # any failure is reported and ends the process
            told = str(error).strip().splitlines()
            why = f"{type(error).__name__}: {told[0] if told else ''}"
            record = {"status": "failed", "text": why}
        record |= {"name": name, "seconds": time.perf_counter() - started}
        print(json.dumps(record), flush=True)
        if record["status"] == "failed":
            return 1
    return 0


def _answers(names: list[str], device: torch.device, limit: float):
    """Yield one record for each name, in order, even if the answering process fails."""
    waiting = []
    for name in names:
        if device.type != "cuda" and name in NEED_CUDA:
            yield _described({"name": name, "status": "not answered", "text": UNANSWERED})
        else:
            waiting.append(name)
    while waiting:
        for record in _from_worker(list(waiting), device, limit):
            waiting.remove(record["name"])
            yield _described(record)


def _from_worker(names: list[str], device: torch.device, limit: float):
    """Yield the records of a process that answers `names`; the last one may be its failure."""
    command = [sys.executable, __file__, "--worker", "--device", device.type]
    command += [part for name in names for part in ("--only", name)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        for name in names:
            try:
                # The first answer also waits for torch and the device.
                line = lines.get(timeout=limit + (60 if name == names[0] else 0))
            except KeyboardInterrupt:
                process.kill()
                raise
            except queue.Empty:
                process.kill()
                yield {"name": name, "status": "failed", "text": f"no answer after {limit:.0f} s"}
                return
            if not line:
                code = process.wait()
                yield {"name": name, "status": "failed", "text": f"the process ended with {code}"}
                return
            record = json.loads(line)
            yield record
            if record["status"] == "failed":
                return


def _read(stream, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def _described(record: dict) -> dict:
    """Add to a record its question, and the command that repeats the answer."""
    name = record["name"]
    command = f"python benchmarks/cuda_questions.py --only {name}"
    return record | {"question": QUESTIONS[name].__doc__.splitlines()[0], "command": command}


def _section(record: dict) -> str:
    """Format one question as Markdown."""
    text = record["text"] if record["status"] == "answered" else f"{record['status']}: "
    if record["status"] != "answered":
        text += record["text"]
    seconds = f" ({record['seconds']:.1f} s)" if "seconds" in record else ""
    lines = [f"### {record['question']}", "", text, "", f"`{record['command']}`{seconds}", ""]
    if record.get("rows"):
        lines += [markdown_table(list(record["header"]), [list(r) for r in record["rows"]]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
