"""Plant the defects of mutants.toml one by one and run the tests that should see each.

mutmut and cosmic-ray generate their defects by operators on the syntax tree. They accept no list of
defects that a person would make, and one of these is worth a thousand of `+` for `-`.

Exit codes: 0 all killed, 1 some survived or could not be judged, 2 bad input, 130 interrupted.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
# Ignored by git, some of it large.
LEFT_OUT = (".*", "outputs", "__pycache__", "_build")
LIMIT_S = 1200  # of one pytest: a defect may make it wait forever


class Bad(Exception):
    """An impossible request in the list or on the command line."""


class Running(NamedTuple):
    """A pytest in a copy. mutant: None for the tests without a defect."""

    mutant: dict | None
    copy: Path
    began: float
    process: subprocess.Popen
    output: Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of defects; none: all")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="so many at a time (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        mutants = chosen(arguments.names)
        if arguments.list:
            print(*(f"{one['name']}: {one['file']}" for one in mutants), sep="\n")
            return 0
        with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
            found = run(mutants, Path(folder), max(1, arguments.j))
    except Bad as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    counts = {word: sum(one["outcome"] == word for one in found) for word in ("killed", "survived")}
    print(f"{counts['killed']} of {len(found)} killed, {counts['survived']} survived")
    return 0 if counts["killed"] == len(found) else 1


def chosen(names: list[str]) -> list[dict]:
    """Return the defects of these names, or all; check that each fits the checkout."""
    known = {one["name"]: one for one in tomllib.loads(LIST.read_text())["mutant"]}
    for name in names:
        if name not in known:
            raise Bad(f"{name}: no such defect; --list names all")
    mutants = [known[name] for name in names] or list(known.values())
    for one in mutants:
        count = (ROOT / one["file"]).read_text().count(one["old"])
        if count != 1:
            raise Bad(f"{one['name']}: `old` is in {one['file']} {count} times, must be once")
        for test in one["tests"]:
            if not (ROOT / test).is_file():
                raise Bad(f"{one['name']}: {test}: no such file")
    return mutants


def run(mutants: list[dict], folder: Path, jobs: int) -> list[dict]:
    """Return the outcome of each; first the tests have to pass without any."""
    copies = [folder / str(number) for number in range(jobs)]
    for copy in copies:
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    tests = list(dict.fromkeys(test for one in mutants for test in one["tests"]))
    waiting = [(None, share) for n in range(jobs) if (share := tests[n::jobs])]
    waiting += [(one, one["tests"]) for one in mutants]
    running: list[Running] = []
    found = []
    try:
        while waiting or running:
            clean = waiting and waiting[0][0] is None
            if waiting and copies and (clean or all(one.mutant for one in running)):
                running.append(begin(*waiting.pop(0), copies.pop()))
                continue
            time.sleep(0.1)
            for one in [one for one in running if has_ended(one)]:
                running.remove(one)
                copies.append(one.copy)
                if (outcome := ended(one)) is not None:
                    found.append(outcome)
    finally:
        for one in running:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
    return found


def begin(mutant: dict | None, tests: list[str], copy: Path) -> Running:
    if mutant is not None:
        text = (copy / mutant["file"]).read_text()
        (copy / mutant["file"]).write_text(text.replace(mutant["old"], mutant["new"]))
    own = copy.with_suffix(".tmp")
    own.mkdir()
    # Imports and processes of tests use the copy; their files are in `own`.
    environment = os.environ | {"PYTHONPATH": str(copy), "TMPDIR": str(own)}
    # Bytecode knows a file by its second and size, and a defect can leave both as they were.
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-rf", "-p", "no:cacheprovider", *tests]
    with open(own / "output.txt", "wb") as file:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, process_group=0,
        )  # fmt: skip
    return Running(mutant, copy, time.monotonic(), process, own / "output.txt")


def has_ended(one: Running) -> bool:
    if time.monotonic() - one.began > LIMIT_S:
        os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
    return one.process.poll() is not None


def ended(one: Running) -> dict | None:
    """Print and return the outcome of a defect, restore its copy; None for tests without any."""
    code, output = one.process.returncode, one.output.read_text(errors="replace")
    lines = (line.removeprefix("FAILED ") for line in output.splitlines() if line[:7] == "FAILED ")
    failed = [line.partition(" - ")[0] for line in lines]
    shutil.rmtree(one.output.parent, ignore_errors=True)
    if one.mutant is None:
        if code != 0:
            print(output)
            raise Bad("the tests do not pass as they are")
        return None
    shutil.copy2(ROOT / one.mutant["file"], one.copy / one.mutant["file"])
    outcome = {0: "survived", 1: "killed"}.get(code, "error")
    if outcome == "error":
        print(output)
    seconds = round(time.monotonic() - one.began, 1)
    by = f" by {failed[0]}" if failed else f" (pytest ended with {code})" * (outcome == "error")
    print(f"{outcome:9} {one.mutant['name']}{by}, {seconds} s", flush=True)
    named = {key: one.mutant[key] for key in ("name", "file", "tests")}
    return named | {"outcome": outcome, "by": failed[:1], "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
