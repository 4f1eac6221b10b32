"""The contest of the suite: mprun's modes and other tools on the suite's models and sizes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch

from benchmarks.suite import equality, targets
from benchmarks.suite.contenders import CONTENDERS, PEERS, available
from benchmarks.suite.models import MODES_WITH_PEERS, PLAIN_RATE, suite_of
from mprun.config.registry import task_of
from mprun.errors import BadInput
from mprun.extensions.bench.cases import (
    EAGER,
    OWN,
    REFERENCES,
    BenchGroup,
    BenchRow,
    Case,
    without_device,
)
from mprun.extensions.bench.contest import Contest
from mprun.extensions.bench.report import markdown, ratio_text
from mprun.extensions.bench.summary import summarise

# Keys that do not choose the training: the suite accepts them, too.
_OF_THE_SUITE = ("device", "threads", "seed", "deterministic", "cpu_half")


def is_suite(options: Namespace) -> bool:
    """Return whether nothing on the command line chooses a configuration."""
    return all(o.lstrip("+~").partition("=")[0] in _OF_THE_SUITE for o in options.overrides)


def named_peers(options: Namespace) -> list[str]:
    """Return the peers requested by name."""
    return [] if options.peers in (None, ["all"]) else options.peers


class Suite(Contest):
    """A `mprun.extensions.bench.contest.Contest` with the options of `benchmarks.suite.__main__`.

    These are peers (names, ["all"], or None: mprun alone) and only (starts of the suite's labels).
    """

    worker = "benchmarks.suite.child:SuiteWorker"

    def plan(self, options: Namespace, device: torch.device) -> tuple[list[BenchGroup], list[dict]]:
        """Plan like `Contest`.

        It also raises BadInput for a peer that is unknown, not installed, or useless in every
        requested mode.
        """
        _known_peers(named_peers(options))
        groups, left_out = super().plan(options, device)
        _no_peer_in_vain(named_peers(options), groups, left_out)
        return groups, left_out

    def groups(self, options: Namespace, device: torch.device) -> list[BenchGroup]:
        if is_suite(options):
            return [_of_suite(group, options) for group in _chosen(options, device.type)]
        for name in ("only", "ratios"):
            if getattr(options, name):
                raise BadInput(
                    f"--{name}: chooses models of the suite; leave out model=... and the like"
                )
        groups = super().groups(options, device)
        if options.peers is None:
            return groups
        return [replace(group, overrides=_with_plain_rate(group.overrides)) for group in groups]

    def others(
        self, group: BenchGroup, case: Case, options: Namespace, device: torch.device
    ) -> dict[str, str | None]:
        found = super().others(group, case, options, device)
        if options.ratios and case.config().train.compile != "off":
            found[EAGER] = None
        task, asked = task_of(case.config().model), named_peers(options)
        few = is_suite(options) and not asked and options.modes is None and case.mode in REFERENCES
        for peer in () if options.peers is None else asked or PEERS:
            reason = None if peer in OWN else available(peer, case.mode, task, device)
            if reason is None and few and peer != "loop":
                reason = f"in a suite the loop alone is the peer in {case.mode}"
            if reason is None or asked or CONTENDERS[peer].would_fit(task, case.mode):
                found[peer] = reason
        return found

    def turn(self, case: Case) -> int:
        """Return the sort key of a case.

        First comes mprun, in each mode with the amp recipe or the plain loop after it: whatever a
        budget or the memory cuts off, what is measured has its ratio, and the equality check a
        twin. Tuned contenders follow: they are the hardest to beat, but may compile for a minute.
        Then come the others in 16 bits, last those in FP32 and TF32, which take the most time.
        """
        if case.contender in ("mprun", EAGER, *equality.TWINS):
            return 0
        if case.mode in REFERENCES:
            return 3
        return 1 if case.contender.endswith("+") else 2

    def partner(self, case: Case) -> Case | None:
        """Return mprun's case in the mode of another tool's."""
        if case.real_data or case.contender in OWN:
            return None
        return replace(case, contender="mprun")

    def check(self, rows: Sequence[BenchRow]) -> dict[str, tuple[bool, str]]:
        return equality.check(rows)

    def summarise(self, bench: dict) -> None:
        """Summarise with ratios to peers and with targets, which are judged only on an H200."""
        summarise(bench["rows"])
        targets.against_peers(bench["rows"])
        judged = targets.judge(bench["rows"]) if "H200" in bench["device_name"] else None
        bench["targets"] = judged

    def report(self, bench: dict) -> str:
        beside = [("vs best peer", lambda row: ratio_text(row, "best_peer"))]
        more = {"Targets for one H200": targets.as_table(bench["targets"] or [])}
        return markdown(bench, beside, more)


def _of_suite(group: BenchGroup, options: Namespace) -> BenchGroup:
    modes = group.modes if options.modes is None else tuple(options.modes)
    if options.modes is None and options.peers is not None and not options.ratios:
        modes = tuple(mode for mode in modes if mode in MODES_WITH_PEERS) or modes
    overrides = (*group.overrides, *without_device(options.overrides))
    return replace(group, modes=modes, overrides=overrides)


def _with_plain_rate(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return overrides for a constant rate, the only one that peers know; a user's own win."""
    given = {one.lstrip("+~").partition("=")[0] for one in overrides}
    return (*overrides, *(one for one in PLAIN_RATE if one.partition("=")[0] not in given))


def _chosen(options: Namespace, device_type: str) -> list[BenchGroup]:
    """Return the suite, or its models whose labels begin as --only says."""
    native = "cpu_half=native" in options.overrides
    entries = suite_of(device_type, ratios=options.ratios, native=native)
    if options.only is None:
        return list(entries)
    found: list[BenchGroup] = []
    for start in options.only:
        named = [e for e in entries if e.label.lower().startswith(start.lower())]
        if not named:
            labels = ", ".join(entry.label for entry in entries)
            raise BadInput(f"--only {start}: no such model (allowed: {labels}, or how one begins)")
        found += [entry for entry in named if entry not in found]
    return found


def _known_peers(names: Sequence[str]) -> None:
    for name in names:
        if name not in CONTENDERS:
            allowed = f"allowed: all, {', '.join(PEERS)}"
            raise BadInput(f"--peers {name}: no such peer ({allowed})")
        package = CONTENDERS[name].package
        if package is not None and find_spec(package) is None:
            raise BadInput(f"--peers {name}: the package {package} is not installed")


def _no_peer_in_vain(asked: Sequence[str], groups: list[BenchGroup], left_out: list[dict]) -> None:
    """Raise BadInput, with a reason for each mode, for a named peer that fits nowhere."""
    used = {case.contender for group in groups for case in group.cases}
    for peer in asked:
        if peer in used:
            continue
        own = CONTENDERS[peer].modes
        modes: dict[str, dict] = {}  # reason -> its modes, in order
        for left in left_out:
            if left["contender"] == peer:
                lacks = own is not None and left["mode"] not in own
                reason = f"it has {', '.join(own)}" if lacks else left["reason"]
                modes.setdefault(reason, {})[left["mode"]] = None
        reasons = [f"{', '.join(of)}: {reason}" for reason, of in modes.items()]
        raise BadInput(f"--peers {peer}: in no mode asked for ({'; '.join(reasons)})")
