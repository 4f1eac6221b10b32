"""From a command line to the cases to measure, in the order in which they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from mprun.bench.contender import Case
from mprun.bench.options import REFERENCES, Options, asks_for_the_suite
from mprun.bench.registry import CONTENDERS, OWN, PEERS, available
from mprun.bench.suite import CPU_MODES, GPU_MODES, MODES_WITH_PEERS, Entry, suite_of
from mprun.config.compose import compose_config
from mprun.config.schema_models import task_of
from mprun.errors import BadInput
from mprun.precision import get_policy, why_unsupported


@dataclass(frozen=True, slots=True)
class Group:
    """All cases of one model, in the order of their turns. weight: share of the time budget."""

    label: str
    cases: tuple[Case, ...]
    weight: float


def case_key(case: Case) -> str:
    """What names a case in every file of a bench."""
    parts = [case.label, case.mode, case.contender, *(["end to end"] if case.real_data else [])]
    return " | ".join(parts)


def plan(options: Options, device) -> tuple[list[Group], list[dict]]:
    """(groups to measure, what is left out: label, mode, contender, reason).

    device: a torch device. Raises BadInput for what this device or configuration cannot run and for
    a peer that is unknown, not installed, or useless in every mode that was asked for.
    """
    suite = asks_for_the_suite(options.overrides)
    if suite:
        entries = [_of_suite(entry, options) for entry in _chosen(options.only, device.type)]
    elif options.only is not None:
        raise BadInput("--only: chooses models of the suite; leave out model=... and the like")
    else:
        entries = [_entry(options.overrides, options.modes, device)]
    asked = None if options.peers in (None, ["all"]) else options.peers
    _known_peers(asked or [])
    groups, left_out = [], []
    for entry in entries:
        task = task_of(compose_config(entry.overrides).config.model)
        cases = []
        for mode in entry.modes:
            reason = available("mprun", mode, task, device)
            if reason is not None and (options.modes is not None or not suite):
                raise BadInput(f"--modes {mode}: {reason}")
            if reason is not None:
                left_out.append(_left_out(entry, mode, "mprun", reason))
                continue
            compose_config([*entry.overrides, f"precision={mode}", f"device={device.type}"])
            best = device.type == "cuda" and not options.plain
            best = best and (not entry.best_modes or mode in entry.best_modes)
            names = ["mprun", *(["mprun+"] if best else [])]
            for peer in () if options.peers is None else asked or PEERS:
                reason = None if peer in OWN else available(peer, mode, task, device)
                few = suite and asked is None and options.modes is None and mode in REFERENCES
                if reason is None and few and peer != "loop":
                    reason = f"in a suite the loop alone is the peer in {mode}"
                if reason is None:
                    names.append(peer)
                elif asked or _would_fit(peer, mode, task):
                    left_out.append(_left_out(entry, mode, peer, reason))
            extra = {"compile": entry.compile}
            names = dict.fromkeys(names)
            cases += [Case(entry.label, entry.overrides, mode, n, extra=extra) for n in names]
        cases.sort(key=_turn)
        if options.end_to_end:
            modes = dict.fromkeys(case.mode for case in cases)
            cases += [Case(entry.label, entry.overrides, m, "mprun", True) for m in modes]
        groups.append(Group(entry.label, tuple(cases), entry.weight))
    _no_peer_in_vain(asked or [], groups, left_out)
    return groups, left_out


def _no_peer_in_vain(asked: Sequence[str], groups: list[Group], left_out: list[dict]) -> None:
    """BadInput for a peer named on the command line that fits nowhere: why, for each mode."""
    used = {case.contender for group in groups for case in group.cases}
    for peer in asked:
        if peer in used:
            continue
        own = CONTENDERS[peer].modes
        modes: dict[str, dict] = {}  # reason -> modes that it is the reason for, in order
        for left in left_out:
            if left["contender"] == peer:
                lacks = own is not None and left["mode"] not in own
                reason = f"it has {', '.join(own)}" if lacks else left["reason"]
                modes.setdefault(reason, {})[left["mode"]] = None
        reasons = [f"{', '.join(of)}: {reason}" for reason, of in modes.items()]
        raise BadInput(f"--peers {peer}: in no mode asked for ({'; '.join(reasons)})")


def _chosen(only: Sequence[str] | None, device_type: str) -> list[Entry]:
    """The suite, or of it the models whose labels begin with what --only says."""
    entries = suite_of(device_type)
    if only is None:
        return list(entries)
    found = []
    for start in only:
        named = [e for e in entries if e.label.lower().startswith(start.lower())]
        if not named:
            labels = ", ".join(entry.label for entry in entries)
            raise BadInput(f"--only {start}: no such model (allowed: {labels}, or how one begins)")
        found += [entry for entry in named if entry not in found]
    return found


def _turn(case: Case) -> int:
    """What is sorted by, so that a short budget leaves what says most.

    mprun in every mode first; then the amp recipe and the plain loop, without which the equality
    check has no twin; then what is tuned, the hardest to beat, though it may compile for a minute;
    then the others in 16 bits; last the others in FP32 and TF32, which take the most time.
    """
    if case.contender == "mprun":
        return 0
    reference = case.mode in REFERENCES
    if case.contender in ("loop", "amp"):
        return 2 if reference else 1
    if reference:
        return 5
    return 3 if case.contender.endswith("+") else 4


def _would_fit(peer: str, mode: str, task: str) -> bool:
    """Whether a tool that all were asked for is missed here: it has the mode and the task."""
    modes = CONTENDERS[peer].modes
    return task in CONTENDERS[peer].tasks and (modes is None or mode in modes)


def _known_peers(names: Sequence[str]) -> None:
    for name in names:
        if name not in CONTENDERS:
            allowed = f"allowed: all, {', '.join(PEERS)}"
            raise BadInput(f"--peers {name}: no such peer ({allowed})")
        package = CONTENDERS[name].package
        if package is not None and find_spec(package) is None:
            raise BadInput(f"--peers {name}: the package {package} is not installed")


def _left_out(entry: Entry, mode: str, contender: str, reason: str) -> dict:
    return {"label": entry.label, "mode": mode, "contender": contender, "reason": reason}


def _entry(overrides: Sequence[str], modes: Sequence[str] | None, device) -> Entry:
    """The configuration of the command line as the one entry of a suite."""
    config = compose_config(overrides).config
    kept = _without_device(overrides)
    if modes is None:
        default = GPU_MODES if device.type == "cuda" else CPU_MODES
        modes = [m for m in default if why_unsupported(get_policy(m), device) is None]
    size = getattr(config.data, "image_size", None)
    shape = f" {size} px" if size else ""
    label = f"{config.model.name}{shape} b{config.data.batch_size}"
    return Entry(label, kept, tuple(modes), 1.0, best_modes=None, compile=True)


def _of_suite(entry: Entry, options: Options) -> Entry:
    modes = entry.modes if options.modes is None else tuple(options.modes)
    if options.modes is None and options.peers is not None:
        modes = tuple(mode for mode in modes if mode in MODES_WITH_PEERS)
    overrides = (*entry.overrides, *_without_device(options.overrides))
    return replace(entry, modes=modes, overrides=overrides)


def _without_device(overrides: Sequence[str]) -> tuple[str, ...]:
    """A contender gets the device that was resolved."""
    return tuple(o for o in overrides if not o.lstrip("+").startswith("device="))
