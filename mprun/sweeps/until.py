"""`mprun -m ... until=decided max_seeds=10`: seeds are added until each mode is decided.

The cells of all seeds that may be needed are planned and checked before the first run, whose record
already has the plan. The rounds then ask for some of them.
"""

from collections.abc import Iterator, Sequence

from mprun.config.overrides import without
from mprun.record.run_record import OUTCOMES
from mprun.record.seed_plan import KEY, SeedPlan
from mprun.sweeps.jobs import Cell, State, record_of, state_of
from mprun.sweeps.status_page import StatusPage

# How the words begin of a cell that ended without an outcome, and not by a stop.
_WITHOUT = ("failed", "killed", "hung", "damaged", "missing")


class SeedRounds:
    """Iterate over the cells of each round; of those before, the outcomes on disk count."""

    def __init__(self, cells: Sequence[Cell], page: StatusPage):
        from mprun.comparison.rounds import Rounds, SweptArm  # here: loads numpy

        self.page = page
        self.cells: dict[tuple[int, int], Cell] = {}  # place of the arm, seed
        places: dict[tuple[str, ...], int] = {}
        arms: list[SweptArm] = []
        for cell in cells:
            own = tuple(without(cell.overrides, "seed", KEY))
            if own not in places:
                places[own] = len(arms)
                shown = [text for text in own if text.partition("=")[0] in page.shown]
                plan = SeedPlan.of(cell.plan)
                assert plan is not None
                arms.append(SweptArm(" ".join([cell.mode, *shown]), plan))
            self.cells[places[own], cell.seed] = cell
        self.rounds = Rounds(arms)
        self.begun: list[tuple[int, int]] = []
        # Of later rounds, too: what they cannot use is refused now.
        self.finished = [state_of(cell) for cell in cells].count(State.FINISHED)

    def __iter__(self) -> Iterator[list[Cell]]:
        ran = False
        while True:
            if self.begun and not self.judge():
                return  # a run was stopped, and goes on with the same command
            wanted = self.rounds.following()
            if not wanted:
                return
            for line in self.rounds.news if ran else ():
                self.page.tell(line)
            self.begun += wanted
            cells = [self.cells[one] for one in wanted if not self._left_missing(*one)]
            ran = not all(map(_has_outcome, cells))
            yield cells

    def judge(self) -> bool:
        """Judge the modes by the runs that ended so far; return whether all have that began."""
        words = {one: self.page.words.get(self.cells[one], "") for one in self.begun}
        damaged = {one for one, word in words.items() if word.startswith("damaged")}
        ended = [one for one in self.begun if _has_outcome(self.cells[one]) and one not in damaged]
        failed = {one for one, word in words.items() if word.startswith(_WITHOUT)} - set(ended)
        self.rounds.judge({one: self.cells[one].directory for one in ended}, failed)
        return failed.issuperset(set(self.begun) - set(ended))

    def say(self) -> None:
        """Print the word of each mode."""
        self.judge()
        for line in self.rounds.lines():
            print(line)

    def _left_missing(self, place: int, seed: int) -> bool:
        """Return whether a run has no outcome, but looks were taken that went on without it.

        Run now, it would come between the seeds of these looks, and could change their word.
        """
        cell, arm = self.cells[place, seed], self.rounds.arms[place]
        if _has_outcome(cell):
            return False
        round_ends = max(seed, arm.plan.seeds[arm.plan.first - 1])
        # Runs of a baseline may be older than the sweep: the modes tell what it has looked at.
        modes = {one for one in self.cells if cell.any_plan != (one[0] == place)}
        paired = {own for own, n in modes if n == seed and _has_outcome(self.cells[own, n])}
        later = (
            _has_outcome(self.cells[own, n])
            for own, n in modes
            if n > round_ends and (own in paired or own == place)
        )
        if not any(later):
            return False
        self.page.tell(f"{arm.name}: seed {seed} stays missing, looks were taken without it")
        self.page.words[cell] = "missing: looks were taken without it"
        return True


def _has_outcome(cell: Cell) -> bool:
    record = record_of(cell.directory)
    return record is not None and record["status"] in OUTCOMES
