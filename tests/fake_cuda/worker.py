"""A process on the fake CUDA device (`runtime.py`): takes requests, answers what happened.

Started with the fake runtime preloaded, it reads one JSON object a line, {"function": name of a
function below, ...its arguments}, and writes one: what the function returned, with the warnings and
the counts of the runtime meanwhile, or the error that it raised.

Values mean nothing here, so what a run reads back is replaced by zeros: no run diverges, no scale
collapses, and the kernels' self-test, which compares values, is told to have passed.
"""

import contextlib
import gc
import io
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import torch

from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.execution.step_runner import StepRunner
from mprun.extensions.detection import boxes
from mprun.numerics import probing
from mprun.precision.torch_update import take_for_granted
from mprun.prepared import exact_numbers
from mprun.record import checkpoint
from mprun.record.async_copy import Sent
from mprun.record.run_record import read_record
from mprun.tasks import GAN
from mprun.training.loop import MetricLogger
from mprun.training.run import start
from tests.fake_cuda import runtime as fake_cuda

CUDA = torch.device("cuda", 0)
# Steps that may wait: the first is watched operation by operation, and loads kernels.
WATCHED = 1


def run(folder: str, overrides: list[str], path: str | None = None) -> dict:
    """A run as `mprun` makes it, in which a wait between evaluations is an error.

    path: a folder with modules of the user's own.
    """
    if path is not None:
        sys.modules.pop("own_model", None)
        sys.path.insert(0, path)
    composed = compose_config([*overrides, "device=cuda", "threads=1", f"output_dir={folder}"])
    try:
        code = start(composed)
    finally:
        if path is not None:
            sys.path.remove(path)
    return {"code": code, "record": read_record(Path(folder))}


def command(arguments: list[str]) -> dict:
    """`mprun` with these arguments; its exit code."""
    return {"code": main(arguments)}


def script(path: str) -> dict:
    """The function `answer` of a Python file."""
    names: dict = {"__name__": "script"}
    exec(compile(Path(path).read_text(), path, "exec"), names)
    return names["answer"]() or {}


def torch_version() -> dict:
    return {"torch": [int(part) for part in torch.__version__.split(".")[:2]]}


FUNCTIONS = {"torch_version": torch_version, "run": run, "command": command, "script": script}


@contextlib.contextmanager
def watched():
    """Waiting for the device is an error in every step but the first, and between steps."""
    samples, destroyed = GAN.samples, exact_numbers.destroyed
    step, save, wait = StepRunner.step, checkpoint.save, torch.cuda.synchronize
    evaluate, read, record = MetricLogger.evaluate, Sent.read, probing.Watched.record

    def watched_step(self, index, measure=False):
        # A step that compiles may wait: the compiler tries its kernels.
        mode = "error" if self.taken >= WATCHED and not self.compiles_next else "default"
        torch.cuda.set_sync_debug_mode(mode)
        return step(self, index, measure)

    def free(function):
        def unwatched(*arguments, **named):
            torch.cuda.set_sync_debug_mode("default")
            return function(*arguments, **named)

        return unwatched

    def synchronize(*arguments):
        # Asked for in so many words, torch does not take it for a mistake.
        if torch.cuda.get_sync_debug_mode():
            raise RuntimeError("called a synchronizing CUDA operation: torch.cuda.synchronize")
        wait(*arguments)

    def finite(self, *arguments):
        return dict.fromkeys(free(evaluate)(self, *arguments), 0.0)

    with (
        mock.patch.object(StepRunner, "step", watched_step),
        mock.patch.object(checkpoint, "save", free(save)),
        # A probe is read where it is due; what it reads is no scale, and no count to be shown.
        mock.patch.object(probing, "show_probe", lambda writer, record: None),
        mock.patch.object(probing, "math", SimpleNamespace(log2=lambda value: 0.0)),
        mock.patch.object(probing.Watched, "record", numpy.errstate(all="ignore")(free(record))),
        mock.patch.object(torch.cuda, "synchronize", synchronize),
        # How many are left depends on values, and it waits for them.
        mock.patch.object(boxes, "nms", lambda boxes, scores, threshold: scores.argsort()),
        # It reads whether numbers of an input changed by a cast that nobody computed.
        mock.patch.object(exact_numbers, "destroyed", lambda *given: destroyed(*given) and None),
        mock.patch.object(GAN, "samples", lambda task: torch.zeros_like(samples(task).cpu())),
        mock.patch.object(MetricLogger, "evaluate", finite),
        mock.patch.object(Sent, "read", lambda sent: [0.0 for _ in read(sent)]),
    ):
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def answer(request: dict) -> dict:
    function = FUNCTIONS[request.pop("function")]
    printed, before = io.StringIO(), fake_cuda.counts()
    found: dict = {}
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(record=True) as caught,
        watched(),
    ):
        warnings.simplefilter("always")
        try:
            found |= function(**request)
        except BaseException as error:
            found |= {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    counted = fake_cuda.counts() - before
    found |= {"printed": printed.getvalue(), "counts": counted.as_dict()}
    found["warnings"] = [f"{w.message} ({Path(w.filename).name}:{w.lineno})" for w in caught]
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    gc.collect()
    gc.freeze()  # what is imported: looking through it costs a tenth of a second each time
    torch.cuda.empty_cache()
    return found


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints goes to the log
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype, once a process
        torch.cuda.set_sync_debug_mode("warn")
        torch.cuda.set_sync_debug_mode("default")
    take_for_granted()
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line)), default=str) + "\n")


if __name__ == "__main__":
    serve()
