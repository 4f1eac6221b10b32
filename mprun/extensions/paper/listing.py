"""List the rows: their runs, those that are finished, the time of the rest; nothing is composed.

A run counts as finished by the overrides in its record. To run it, a sweep looks closer.
"""

import math
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from mprun.config.overrides import without
from mprun.errors import Damaged
from mprun.extensions.paper.rows import ROWS, PaperRow, held_out, settings
from mprun.record.console import markdown_table
from mprun.record.layout import aligned, hanging
from mprun.record.run_record import OUTCOMES, read_record
from mprun.sweeps.gpus import available_cores

PROBES = ("precision=fp32", "numerics=probes", "numerics.every=20")


class Command(NamedTuple):
    """A technique's runs, or the probes, of one row."""

    folder: str  # below --out
    overrides: tuple[str, ...]  # without the seed
    seeds: tuple[int, ...]


def commands_of(row: PaperRow, options: Namespace) -> dict[str, Command]:
    """Return technique -> its runs as the options ask for them; "probes": the run that counts."""
    own, more, seeds = row, ["threads=1"], options.seeds or held_out()
    if options.scale == "full":
        if row.full is None:
            return {}
        place = options.data_root and options.data_root / row.full.folder
        recipe = (f"experiment={row.full.experiment}", f"data.root={place}")
        own, more, seeds = replace(row, overrides=recipe), [], options.seeds or (0,)
    if not own.overrides:
        return {}
    found = {name: Command("runs", given, seeds) for name, given in own.commands().items()}
    if options.scale == "small":
        found["probes"] = Command("probes", (*row.overrides, *PROBES), seeds[:1])

    def whole(one: Command) -> Command:
        root = f"output_root={options.out / one.folder}"
        return one._replace(overrides=(*one.overrides, *options.overrides, *more, root))

    return {name: whole(one) for name, one in found.items()}


@dataclass
class Listing:
    """The runs of some rows, each once though two rows share it, and those that have an outcome.

    reasons: key of a row -> why it cannot run here.
    """

    rows: Sequence[PaperRow]
    reasons: Mapping[str, str]
    options: Namespace
    runs: dict[str, set[frozenset[str]]] = field(default_factory=dict)  # key of a row -> overrides

    def __post_init__(self) -> None:
        ended = self._ended()
        self.seconds: dict[frozenset[str], float] = {}  # overrides -> expected seconds
        for row in self.rows:
            commands = [] if row.key in self.reasons else commands_of(row, self.options).values()
            own = {frozenset((*c.overrides, f"seed={s}")) for c in commands for s in c.seeds}
            self.runs[row.key] = own
            self.seconds |= dict.fromkeys(
                own, settings()[row.key].seconds if row.key in settings() else 0.0
            )
        self.finished = self.seconds.keys() & ended.keys()
        expected = sum(self.seconds[run] for run in self.finished)
        measured = sum(ended[run] for run in self.finished)
        # How much longer a run takes here than where the rows were timed.
        self.slower = measured / expected if measured and expected else 1.0
        self.jobs: int = self.options.jobs or available_cores()

    def _ended(self) -> dict[frozenset[str], float]:
        """Return overrides -> seconds of the runs that have an outcome."""
        found = {}
        for path in self.options.out.glob("*/*/*/run.json"):
            try:
                record = read_record(path.parent, "status", "overrides")
            except (Damaged, OSError):
                continue
            if record["status"] in OUTCOMES:
                given = frozenset(without(record["overrides"], "output_dir", "basis"))
                found[given] = float(record.get("seconds") or 0)
        return found

    def left(self, runs: set[frozenset[str]]) -> str:
        """Return how long those of the runs take that are not finished, in words."""
        rest = [self.seconds[run] for run in runs - self.finished]
        if not rest:
            return "-"
        # No row ends before its longest run does.
        seconds = max(max(rest), sum(rest) / min(self.jobs, len(rest))) * self.slower
        return f"{seconds:.0f} s" if seconds < 90 else f"{math.ceil(seconds / 60)} min"

    def time_of(self, row: PaperRow) -> str:
        """Return how long a row takes; at the paper's scale the least hours on one H200."""
        if self.options.scale == "small":
            return self.left(self.runs[row.key]) if self.runs[row.key] else "-"
        known = row.full.hours if row.full else {}
        if not {"fp32", "amp"} <= known.keys():
            return "-"
        seeds = len(self.options.seeds or (0,))
        return f"{seeds * (known['fp32'] + len(row.arms) * known['amp']):.3g} h"

    def estimate(self) -> str:
        """Return in a sentence what a start would take."""
        count, every = len(self.seconds) - len(self.finished), set(self.seconds)
        if self.options.scale == "full":
            times = [self.time_of(row) for row in self.rows if self.runs[row.key]]
            return f"{count} runs, one H200 at its limit: {' + '.join(times) or 'nothing'}"
        how = f"{self.jobs} at a time" if self.jobs > 1 else "one at a time"
        basis = f"by the {len(self.finished)} finished here"
        basis = basis if self.finished else "as fast as on a 2-core AMD EPYC"
        return f"{count} runs left: about {self.left(every)}, {how}, {basis}" if count else "done"

    def lines(self, width: int | None) -> Iterator[str]:
        """Yield a line for each row, and why it has no runs; width: of a terminal."""
        header = ["key", "place", "runs", "time", "network", "recipe, or why not"]
        table = [header]
        for row in self.rows:
            own, result = self.runs[row.key], row.result
            state = f"{len(own & self.finished)} of {len(own)}" if own else "not run"
            told = self.reasons.get(row.key, "") or (row.full.experiment if row.full else "")
            table.append([row.key, result.place, state, self.time_of(row), result.network, told])
        if width is None:
            yield markdown_table(header, table[1:])
        else:
            yield from aligned([row[:-1] for row in table], set(header), width)
            for key in (row.key for row in self.rows if row.key in self.reasons):
                yield hanging(self.reasons[key], width, 4, f"{key}: ")
        yield f"\n{self.estimate()}"
        if len(self.finished) < len(self.seconds):
            first = next(row.key for row in self.rows if self.runs[row.key])
            all_rows = "all" if len(self.rows) == len(ROWS) else ",".join(self.options.only)
            yield f"nothing was started; start them: {self._start(all_rows)}"
            if len(self.rows) > 1:
                yield f"one row:                         {self._start(first)}"

    def _start(self, names: str) -> str:
        """Return the command that runs these rows with what else was asked for."""
        given, rest = [*self.options.arguments], []
        while given:
            word = given.pop(0)
            if word == "--only":
                given = given[1:]
            elif word != "--list" and not word.startswith("--only="):
                rest.append(word)
        return shlex.join(["mprun", "paper", "--only", names, *rest])
