"""`--compile-ahead`: compile what a bench would measure, several contenders at once.

A bench prepares one contender after the other, so that nothing works beside it, and would wait for
each compiler in turn. Here each contender takes two steps in a process of its own; a bench after it
with the same TORCHINDUCTOR_CACHE_DIR finds the kernels there.
"""

import os
import sys
import tempfile
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.suite.contest import Suite
from mprun.config.compose import compose_config
from mprun.errors import DONE, RESOURCE
from mprun.extensions.bench.cases import Case
from mprun.extensions.bench.child import ChildFailed, ChildProcess, TimeUp
from mprun.training.run import resolve_device

AT_ONCE = 8  # their first steps have to fit into the device's memory together


def compile_ahead(options: Namespace, started: float) -> int:
    """Compile until the budget ends; print a line for each contender, return the exit code."""
    device = resolve_device(compose_config(options.overrides, options.config_dir).config.device)
    contest = Suite()
    groups, _ = contest.plan(options, device)
    cases = [case for group in groups for case in group.cases if _compiles(case)]
    deadline = started + options.budget_s

    def compiled(case: Case) -> bool:
        if time.monotonic() >= deadline:
            print(f"- {case.key}: {TimeUp.reason}", flush=True)
            return False
        with tempfile.TemporaryDirectory() as folder:
            child = ChildProcess(Path(folder) / "log.txt", contest.worker)
            try:
                took = child.ask(deadline, "compile_ahead", case=case, device=device.type)
            except (ChildFailed, TimeUp) as error:
                said = error.reason
                print(child.log.read_text(errors="replace")[-4000:], file=sys.stderr, flush=True)
            else:
                said = f"{took['seconds']:.1f} s"
            finally:
                child.end()
        print(f"- {case.key}: {said} (at {time.monotonic() - started:.0f} s)", flush=True)
        return said.endswith(" s")

    at_once = max(1, min(AT_ONCE, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(at_once) as pool:
        done = list(pool.map(compiled, cases))
    return DONE if any(done) or not cases else RESOURCE


def _compiles(case: Case) -> bool:
    """Return whether a contender's settings have torch.compile: those of a recurrent one do not."""
    return case.contender.endswith("+") and not case.config().model.component.recurrent
