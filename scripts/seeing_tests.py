"""Ask of each test function whether it sees a defect: which do not see one of N small changes?

The changes are those of `generated_mutants`, in lines that the function's tests execute; lines that
few other functions execute come first. Each is planted alone until a test of the function fails.

Exit codes: 0 each function sees one, 1 some see none, 2 bad input, 130 interrupted.
"""

import argparse
import ast
import hashlib
import inspect
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import mutations
import pytest
from generated_mutants import ROOT, Mutant, Session, say

MOST_TESTS = 6  # of a function, for each change


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants --tests")
    parser.add_argument("folders", nargs="+", help="of tests/, or files there")
    parser.add_argument("-n", type=int, default=12, help="so many changes (12)")
    parser.add_argument("--seconds", type=float, default=3600, help="ask none later (3600)")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "mutants")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    session = Tests(arguments)
    tests = [str(ROOT / "tests" / one) for one in arguments.folders]
    how = ["-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "--basetemp", str(session.own)]
    code = pytest.main([*how, *tests], plugins=[session])
    shutil.rmtree(session.own, ignore_errors=True)
    if session.counts is None:
        return 130 if code == pytest.ExitCode.INTERRUPTED else 2
    return 0 if session.counts.keys() <= {"sees"} else 1


class Tests(Session):
    """A plugin of pytest that judges the collected tests by mutants, in place of running them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.own = arguments.folder / f"tmp-{os.getpid()}"
        self.files: list[Path] = []
        self.counts = None
        self.failed = False
        self._changes: dict[str, dict[int, list[tuple[int, mutations.Change]]]] = {}

    def judge(self, items: dict[str, pytest.Item], covering: dict) -> None:
        """Ask each function that was not asked with this text; write down what it answered."""
        self.items = items
        executed: dict = defaultdict(lambda: defaultdict(dict))  # function -> (file, line) -> tests
        functions: dict = defaultdict(set)
        for file, lines in covering.items():
            for line, tests in lines.items():
                for test, seconds in tests.items():
                    function = test.partition("[")[0]
                    functions[file, line].add(function)
                    executed[function][file, line][test] = seconds
        results = self.arguments.folder / "tests.jsonl"
        lines = results.read_text().splitlines() if results.exists() else []
        known = {(one["function"], one["text"]): one for one in map(json.loads, lines)}
        began, counts = time.monotonic(), Counter[str]()
        first = {name.partition("[")[0]: item for name, item in items.items()}
        for function, item in first.items():
            text = inspect.getsource(item.function).encode()
            key = function, hashlib.sha256(text).hexdigest()[:16]
            found = known.get(key)
            if found is None and time.monotonic() - began > self.arguments.seconds:
                break
            if found is None:
                found = {"function": function, "text": key[1]}
                found |= self._asked(executed[function], functions)
                with results.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                if found["outcome"] != "sees":
                    say(f"{found['outcome']}: {function} [{found['tried']} changes]")
            counts[found["outcome"]] += 1
        self.counts = counts
        say(", ".join(f"{word}: {count}" for word, count in counts.items()))

    def _asked(self, lines: dict, functions: dict) -> dict:
        """Plant changes in the lines until a test fails."""
        if not lines:
            return {"outcome": "executes none here", "tried": 0}
        found = []
        for place, tests in lines.items():
            for number, change in self._in_line(*place):
                name = f"{place[0]}:{change.function}:{change.kind}:{change.old}:{change.new}"
                turn = len(functions[place]), random.Random(name).random()
                found.append((turn, Mutant(name, place[0], number, change), tests))
        found.sort(key=lambda one: one[0])
        tried = 0
        for _, mutant, tests in found:
            chosen = sorted(tests, key=tests.__getitem__)[:MOST_TESTS]
            self.expected = sum(tests[one] for one in chosen)
            outcome = self._judge(mutant, chosen)["outcome"]
            if outcome in ("killed", "timeout"):
                return {"outcome": "sees", "tried": tried + 1, "by": mutant.name}
            tried += outcome == "survived"
            if tried >= self.arguments.n:
                break
        return {"outcome": "sees none", "tried": tried}

    def _in_line(self, file: str, line: int) -> list[tuple[int, mutations.Change]]:
        if file not in self._changes:
            own: dict = defaultdict(list)
            tree = ast.parse((ROOT / file).read_text())
            for number, change in enumerate(mutations.changes(tree)):
                own[change.line].append((number, change._replace(apply=None)))
            self._changes[file] = own
        return self._changes[file].get(line, [])


if __name__ == "__main__":
    sys.exit(main())
