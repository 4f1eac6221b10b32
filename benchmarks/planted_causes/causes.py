"""Read the list of planted causes, two networks each, and of healthy networks.

A line of `causes.txt` is a network: its host and the host's options (`networks.py`), then overrides
as typed after `mprun`. explain must name module and operation (patterns), advise the module, both
with a word of the kind.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

# What a statement must have of a kind; a swamped number has its operation in place of that.
KINDS = {
    "overflow": "overflow|infinit|beyond|65504|not fit|not finite|within",
    "zero": "zero|eps|round(s|ed)? to 0",
    "underflow": "underflow|zero|flush|subnormal|below",
    "swamped": "lost|lose|round|swamp|absorb|cancel|precision|error|differ",
    "lost update": "lost|lose|stand still|master",
    "state": "state|momentum|exp_avg|average|moment",
    "scale": "scale",
    "outlier": "outlier|zero in|become 0|flush|largest|clip|taken|error|suit",
}
STEPS = 100
HERE = "benchmarks.planted_causes.networks"


class Network(NamedTuple):
    """A line of the list; kind "-": healthy. where: phase of a step."""

    name: str
    kind: str
    mode: str
    where: str
    module: str
    operations: str
    data: str
    line: str

    @property
    def words(self) -> list[str]:
        """Return the configuration as typed after `mprun`, without its mode."""
        data, _, task = self.data.partition(", ")
        task = "language_model" if data == "text" else task
        host, *options = shlex.split(self.line)
        found = ["model=custom", f"model.factory={HERE}:network", f"model.options.host={host}"]
        found += [f"data.factory={HERE}:{data}", "threads=1", "device=cpu", "optim=adam"]
        found += ["optim.lr=0.003", f"train.steps={STEPS}", "train.eval_every=0"]
        found += ["data.batch_size=16"] + [f"model.task={task}"] * bool(task)
        for option in options:
            own = re.match(r"(\w+\.|optim=|scaler=)", option)
            found.append(option if own else f"model.options.{option}")
        return [*{word.partition("=")[0]: word for word in found}.values()]

    def named(self, said: list[str], operation: bool) -> bool:
        """Return whether a statement has the module, the operation, and a word of the kind."""
        wanted = [] if self.module == "-" else [rf"(?<![\w.])({self.module})(?!\.?\w)"]
        if operation := operation and self.operations != "-":
            wanted.append(rf"(?<![a-zA-Z])_?({self.operations})(_|\b)")
        if not (operation and self.kind == "swamped"):
            wanted.append(KINDS[self.kind])
        return any(all(re.search(one, entry, re.I) for one in wanted) for entry in said)


def networks() -> dict[str, Network]:
    _, *lines = (Path(__file__).parent / "causes.txt").read_text(encoding="utf-8").splitlines()
    found = (Network(*map(str.strip, line.split(" | ", 7))) for line in lines)
    return {one.name: one for one in found}
