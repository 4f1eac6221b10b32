"""Verdicts on published results: `mprun compare --tag` on pairs of real logs.

    python benchmarks/published_logs.py [--mlperf CLONE] [--megatron CLONE] [--torchtitan CLONE]

CLONE is a git repository of mlcommons/logging, NVIDIA/Megatron-LM or pytorch/torchtitan, maybe
bare. The pairs are neighbouring batch sizes of each MLPerf reference (values in published,
ascending and descending order), neighbouring golden values of each Megatron test, and all pairs of
torchtitan's loss files. It prints the number of pairs for each verdict, refusals with reasons, and
the number of verdicts that changed with the order. Exit code 1 if one did, or if anything crashed.
"""

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path

from mprun.cli import main as mprun

ORDERS = (list, sorted, lambda values: sorted(values, reverse=True))


def files(clone: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of the newest commit's files whose path has the pattern."""
    for path in _git(clone, "ls-tree", "-r", "HEAD", "--name-only").splitlines():
        if re.search(pattern, path):
            yield path, _git(clone, "show", f"HEAD:{path}")


def _git(clone: Path, *words: str) -> str:
    command = ["git", "-C", str(clone), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def verdict(*words: str) -> tuple[str, dict]:
    """Return the verdict of `mprun compare`, with omissions, or the reason of a refusal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = mprun(["compare", "--no-report", "--json", "--check", *words])
        except Exception as error:
            return "CRASH", {"why": repr(error)}
    if code not in (0, 3):
        return f"refused ({code})", {"why": err.getvalue().strip()}
    found = json.loads(out.getvalue())["groups"][0]["modes"][0]["verdict"]
    said = found["name"]
    if (found.get("facts") or {}).get("identical"):
        said += ", identical at every step"
    return said + (", something left out" if found["left_out"] else ""), found


def mlperf(clone: Path, counts: Counter, refusals: Counter) -> int:
    """Return verdicts of neighbouring references, and how many changed with the runs' order."""
    changed = 0
    for _, text in files(clone, r"training_.*rcps_.*json"):
        records = [r for r in json.loads(text).values() if "Epochs to converge" in r]
        records.sort(key=lambda record: record["BS"])
        for pair in pairwise(records):
            said = []
            for order in ORDERS:
                arms = []
                for label, record in zip(("fp32", "mode"), pair, strict=True):
                    names = []
                    for i, value in enumerate(order(record["Epochs to converge"])):
                        names.append(f"{label}_{i}.csv")
                        Path(names[-1]).write_text(f"step,epochs\n1,{value}\n")
                    arms.append(f"{label}={','.join(names)}")
                options = ("--tag", "epochs", "--lower-is-better", "--margin", "0.05")
                said.append(_counted("MLPerf", counts, refusals, *options, *arms))
            changed += len({(name, round(v.get("low") or 0, 9)) for name, v in said}) > 1
    return changed


def megatron(clone: Path, counts: Counter, refusals: Counter) -> None:
    """Return verdicts of neighbouring golden values of each test."""
    of_test = defaultdict(list)
    for path, text in files(clone, r"golden_values.*\.json$"):
        of_test[str(Path(path).parent)].append(text)
    for texts in of_test.values():
        for base, mode in pairwise(texts):
            Path("fp32.json").write_text(base)
            Path("mode.json").write_text(mode)
            tags = re.findall(r'"([^"]*loss[^"]*)"', base) or ["lm loss"]
            arms = "fp32=fp32.json", "mode=mode.json"
            _counted("Megatron", counts, refusals, "--tag", tags[0], *arms)


def torchtitan(clone: Path, counts: Counter, refusals: Counter) -> None:
    """Return verdicts of all pairs of torchtitan's loss files."""
    for (_, base), (_, mode) in combinations(files(clone, "assets/losses"), 2):
        Path("fp32.txt").write_text(base)
        Path("mode.txt").write_text(mode)
        arms = "fp32=fp32.txt", "mode=mode.txt"
        _counted("torchtitan", counts, refusals, "--tag", "loss", *arms)


def _counted(whose: str, counts: Counter, refusals: Counter, *words: str) -> tuple[str, dict]:
    name, found = verdict(*words)
    counts[whose, name] += 1
    if "why" in found:
        refusals[whose, re.sub(r"[\d.]+", "#", found["why"])[:160]] += 1
    return name, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("mlperf", "megatron", "torchtitan"):
        parser.add_argument(f"--{name}", type=Path, metavar="CLONE")
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    refusals: Counter[tuple[str, str]] = Counter()
    changed = 0
    clones = {name: path.resolve() for name, path in vars(options).items() if path}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if "mlperf" in clones:
            changed = mlperf(clones["mlperf"], counts, refusals)
            print(f"MLPerf: {changed} verdicts changed with the order of the runs")
        for name, judge in (("megatron", megatron), ("torchtitan", torchtitan)):
            if name in clones:
                judge(clones[name], counts, refusals)
    for (whose, name), count in sorted(counts.items()):
        print(f"{whose}: {count} {name}")
    for (whose, why), count in refusals.most_common():
        print(f"{whose}: {count} {why}")
    return int(changed > 0 or any(name == "CRASH" for _, name in counts))


if __name__ == "__main__":
    sys.exit(main())
