"""Change mprun's code in small ways, one at a time, and run the tests that execute the line.

One process collects the tests. Each mutant is a fork of it that swaps the code of the changed
function and runs its tests, cheapest first, until one fails: an import or a collection would cost
ten times as much. What tests execute which line is recorded once for each file of tests.

Exit codes: 0 no survivors, 1 some, 2 bad input, 130 interrupted.
"""

import argparse
import ast
import gc
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
import types
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import mutations
import planting
import pytest
from _pytest.config import create_terminal_writer

ROOT = Path(__file__).resolve().parent.parent
# The others of the comparison are words and pictures.
DECIDES = (
    "decision divergence equivalence findings foresight gap_growth grouping load looks one_pair "
    "planned rounds verdict"
)
# Each package and file that is changed, and the tests that are asked.
CHANGED = {
    "comparison": (
        [f"comparison/{name}.py" for name in DECIDES.split()], ["compare"],
    ),
    "precision": (["precision"], ["precision", "tasks"]),
    "prepared": (["prepared"], ["script", "precision", "tasks"]),
    "numerics": (["numerics"], ["numerics", "script", "compare"]),
    "losses": (
        ["tasks", "extensions/detection/task.py", "extensions/detection/boxes.py",
         "extensions/speech/ctc.py", "extensions/speech/task.py", "extensions/translation/task.py"],
        ["tasks", "precision", "models", "extensions/detection", "extensions/speech",
         "extensions/translation"],
    ),
    "samplers": (
        ["data/source.py", "data/dataset_source.py", "data/token_streams.py",
         "data/augmentation.py", "record/seed_plan.py", "distributed/ranks.py",
         "distributed/sharding.py"],
        ["data", "tasks", "distributed", "record", "extensions/translation"],
    ),
}  # fmt: skip
# All seconds are those of a processor: how busy the machine is changes no outcome.
MOST_TESTS, MOST_S = 25, 5.0  # of one mutant, in recorded seconds; of a survivor three times that
PATIENCE = 10, 20.0  # killed after so many times the recorded seconds and so many more
WAITED = 20  # killed after so many times that on a clock: it hangs


class Mutant(NamedTuple):
    """A change and where it stands. name: the same as long as its function is."""

    name: str
    file: str
    place: int  # in the file's list of changes
    change: mutations.Change

    def line(self) -> dict:
        change = self.change
        found = {"name": self.name, "file": self.file, "line": change.line}
        return found | change._asdict() | {"apply": None}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants --generated")
    parser.add_argument("group", choices=CHANGED, help="whose code is changed")
    parser.add_argument("-n", type=int, default=300, help="so many mutants (300)")
    parser.add_argument("--seconds", type=float, default=3600, help="start none later (3600)")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "mutants")
    parser.add_argument("--again", action="store_true", help="judge the survivors by more tests")
    parser.add_argument("--first", nargs="*", default=[], help="files of tests to ask first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each judged mutant")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    session = Session(arguments)
    tests = [str(ROOT / "tests" / one) for one in CHANGED[arguments.group][1]]
    how = ["-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "--basetemp", str(session.own)]
    code = pytest.main([*how, *tests], plugins=[session])
    shutil.rmtree(session.own, ignore_errors=True)
    if session.counts is None:
        return 130 if code == pytest.ExitCode.INTERRUPTED else 2
    return 1 if session.counts["survived"] else 0


def say(text: str) -> None:
    print(text, file=sys.__stderr__, flush=True)


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Session:
    """A plugin of pytest that judges mutants by the collected tests, in place of running them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.own = arguments.folder / f"tmp-{os.getpid()}"
        self.files = sorted(path for part in CHANGED[arguments.group][0] for path in _files(part))
        self.counts: dict[str, int] | None = None
        self.failed = False

    def pytest_configure(self, config: pytest.Config) -> None:
        """Let hypothesis stop at the first failure, and keep nothing of it."""
        import hypothesis  # rewritten by pytest, so not earlier

        self.config = config
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        own = hypothesis.settings(database=None, derandomize=True, deadline=None, phases=phases)
        hypothesis.settings.register_profile("mutants", own)
        hypothesis.settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Record what is not known yet, then judge."""
        for file in sorted((ROOT / "mprun").glob("*/*.py")):
            _import(file)
        for path in self.files:
            _import(path)
        gc.unfreeze()  # what is frozen is not listed
        self.loaded = planting.Loaded(ROOT)
        items = {item.nodeid: item for item in session.items}
        self.judge(items, self._recorded(items))
        return True

    def judge(self, items: dict[str, pytest.Item], covering: dict) -> None:
        """Judge the mutants that were not judged before."""
        mutants = sample(self.files, self.arguments.n, covering)
        results = self.arguments.folder / f"{self.arguments.group}.jsonl"
        lines = results.read_text().splitlines() if results.exists() else []
        known = {one["name"]: one for one in map(json.loads, lines)}
        began = time.monotonic()
        for number, mutant in enumerate(mutants):
            before = known.get(mutant.name)
            wanted = before is None
            if self.arguments.again:
                wanted = before is not None and before["outcome"] == "survived"
            if not wanted:
                continue
            if time.monotonic() - began > self.arguments.seconds:
                break
            tests = self._chosen(covering[mutant.file][mutant.change.line], mutant, items)
            found = mutant.line() | self._judge(mutant, tests)
            found |= {"first": before.get("first", "survived")} if before else {}
            known[mutant.name] = found
            with results.open("a") as file:
                file.write(json.dumps(found) + "\n")
            change = mutant.change
            if found["outcome"] not in ("killed", "timeout"):
                where = f"{mutant.file}:{change.line} {change.function}"
                what = f"{change.kind}: {change.old[:200]}  ->  {change.new[:200]}"
                say(f"{number} {found['outcome']} {where} {what} [{len(tests)} tests]")
        judged = [known[one.name] for one in mutants if one.name in known]
        if self.arguments.json:
            text = ",\n".join(json.dumps(one) for one in judged)
            self.arguments.json.write_text(f"[\n{text}\n]\n")
        outcomes = [one["outcome"] for one in judged]
        self.counts = {one: outcomes.count(one) for one in ("killed", "timeout", "survived")}
        say(f"{self.arguments.group}: {len(outcomes)} of {len(mutants)} judged, {self.counts}")

    # -- which tests execute a line

    def _recorded(self, items: dict[str, pytest.Item]) -> dict[str, dict[int, dict[str, float]]]:
        """Return {file: {line: {test: seconds}}}, recording the files of tests that are new."""
        folder = self.arguments.folder / "lines"
        folder.mkdir(exist_ok=True)
        by_file = defaultdict(list)
        for item in items.values():
            by_file[item.path].append(item)
        covering: dict = defaultdict(lambda: defaultdict(dict))
        self.extent: dict[str, int] = {}
        for path, own in by_file.items():
            kept = folder / (str(path.relative_to(ROOT)).replace("/", "+") + ".json")
            record = json.loads(kept.read_text()) if kept.exists() else None
            if record is None or record["tests"] != sha(path) or not _same(record["sources"]):
                record = self._record(path, own, kept)
            for test, (seconds, lines) in record["lines"].items():
                self.extent[test] = sum(map(len, lines.values()))
                for file, numbers in lines.items():
                    for number in numbers:
                        covering[file][number][test] = seconds
        return covering

    def _record(self, path: Path, items: list[pytest.Item], kept: Path) -> dict:
        """Run the items in a fork with a tracer, write down what passed, return it."""
        say(f"recording {path.relative_to(ROOT)}: {len(items)} tests")

        def trace() -> int:
            lines: dict = {}
            for place, item in enumerate(items):
                tracer, began, self.failed = Tracer(), time.process_time(), False
                sys.settrace(tracer.called)
                threading.settrace(tracer.called)
                _run(items, place)
                sys.settrace(None)
                threading.settrace(None)
                if not self.failed and tracer.lines:
                    found = defaultdict(list)
                    for file, number in sorted(tracer.lines):
                        found[file].append(number)
                    lines[item.nodeid] = [round(time.process_time() - began, 3), found]
            files = {file for _, found in lines.values() for file in found}
            sources = {file: sha(ROOT / file) for file in files}
            kept.write_text(json.dumps({"tests": sha(path), "sources": sources, "lines": lines}))
            return 0

        kept.unlink(missing_ok=True)
        self._fork(trace, 600.0)
        if not kept.exists():
            return {"lines": {}}
        return json.loads(kept.read_text())

    def _chosen(self, tests: dict[str, float], mutant: Mutant, items: dict) -> list[str]:
        """Return the tests that judge a mutant: one of each function first, of few lines first."""
        by_function: dict = defaultdict(list)
        for test, seconds in sorted(tests.items(), key=lambda one: one[1]):
            if test in items:
                function = test.partition("[")[0]
                later = not any(name in function for name in self.arguments.first)
                turn = len(by_function[function])
                by_function[function].append((later, turn, self.extent[test], seconds, test))
        chosen: list[str] = []
        seconds, most = 0.0, 3 if self.arguments.again else 1
        for later, *_, cost, test in sorted(itertools.chain(*by_function.values())):
            enough = len(chosen) >= most * MOST_TESTS or seconds + cost > most * MOST_S
            if not (chosen and later and enough):
                chosen.append(test)
                seconds += cost
        self.expected = seconds
        self.items = items
        return chosen

    # -- one mutant

    def _judge(self, mutant: Mutant, tests: list[str]) -> dict:
        reader, writer = os.pipe()

        def run() -> int:
            if not self.loaded.plant(mutant.file, mutant.place):
                return 3
            own = [self.items[test] for test in tests]
            for place in range(len(own)):
                self.failed = False
                _run(own, place)
                if self.failed:
                    os.write(writer, tests[place].encode())
                    return 1
            return 0

        began = time.monotonic()
        code = self._fork(run, PATIENCE[0] * self.expected + PATIENCE[1])
        os.close(writer)
        with open(reader) as file:
            by = file.read()
        words = {0: "survived", 3: "not planted", None: "timeout", -signal.SIGXCPU: "timeout"}
        seconds = round(time.monotonic() - began, 2)
        outcome = words.get(code, "killed")
        return {"outcome": outcome, "by": by, "tests": len(tests), "seconds": seconds}

    def _fork(self, run, limit: float) -> int | None:
        """Return what `run` returns in a fork of this process; None if it hangs, and SIGXCPU,
        negative, if it computes for more than `limit` seconds."""
        child = os.fork()
        if child == 0:
            code = 2
            try:
                os.setsid()
                resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), resource.RLIM_INFINITY))
                gc.freeze()
                reporter: Any = self.config.pluginmanager.get_plugin("terminalreporter")
                reporter._tw = create_terminal_writer(self.config, io.StringIO())
                code = run()
            finally:
                os._exit(code)
        ends = time.monotonic() + WAITED * limit
        try:
            while time.monotonic() < ends:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.005)
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # and whatever it has started
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
            for left in self.own.glob("*"):
                shutil.rmtree(left, ignore_errors=True)


class Tracer:
    """The lines of mprun that are executed in functions."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()

    def called(self, frame: types.FrameType, event: str, argument: object):
        file = planting.in_mprun(ROOT, frame.f_code.co_filename)
        if file is None or frame.f_code.co_name == "<module>":
            return None
        add = self.lines.add

        def line(frame: types.FrameType, event: str, argument: object):
            if event == "line":
                add((file, frame.f_lineno))
            return line

        return line


def _run(items: list[pytest.Item], place: int) -> None:
    item = items[place]
    after = items[place + 1] if place + 1 < len(items) else None
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)


def _same(sources: dict[str, str]) -> bool:
    return all((ROOT / one).exists() and sha(ROOT / one) == then for one, then in sources.items())


def _files(part: str) -> Iterator[Path]:
    path = ROOT / "mprun" / part
    yield from [path] if path.suffix else path.glob("*.py")


def _import(path: Path) -> None:
    name = planting.module_name(str(path.relative_to(ROOT)))
    try:
        importlib.import_module(name)
    except ImportError:  # of Triton, of Lightning: no test executes it
        say(f"not imported: {name}")


# -- which mutants


def sample(files: list[Path], count: int, covering: dict) -> list[Mutant]:
    """Return `count` of the mutants whose line a test executes, the same as long as code is."""
    found, uncovered = [], 0
    for path in files:
        file, seen = str(path.relative_to(ROOT)), Counter[str]()
        source = path.read_text()
        of_names = _lines_of_names(source)
        for place, change in enumerate(mutations.changes(ast.parse(source))):
            key = f"{file}:{change.function}:{change.kind}:{change.old}:{change.new}"
            seen[key] += 1
            name = f"{key}:{seen[key]}"
            if not change.function:  # where the name is used
                for line in of_names.get(change.line, ()):
                    for test, seconds in covering[file].get(line, {}).items():
                        covering[file][change.line][test] = seconds
            if covering[file].get(change.line):
                found.append(Mutant(name, file, place, change))
            else:
                uncovered += 1
    say(f"{len(found)} mutants on executed lines, {uncovered} on others")
    found.sort(key=lambda one: random.Random(one.name).random())
    return found[:count]


def _lines_of_names(source: str) -> dict[int, list[int]]:
    """Return for each line of a module's assignment the lines that use the assigned name."""
    tree, used = ast.parse(source), defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used[node.id].append(node.lineno)
    found = {}
    for one in tree.body:
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            for line in range(one.lineno, (one.end_lineno or one.lineno) + 1):
                found[line] = used[one.targets[0].id]
    return found


if __name__ == "__main__":
    sys.exit(main())
