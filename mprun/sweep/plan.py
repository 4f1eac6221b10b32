"""Which runs a sweep consists of: composed, checked and named before anything is written."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from hydra.core.override_parser.types import Override

from mprun.config.compose import Composed, compose_config, group_options, hydra_session
from mprun.config.overrides import parse_overrides, split_launcher, sweep_values
from mprun.config.roles import config_hash, is_told
from mprun.config.user_code import as_overrides
from mprun.errors import BadInput
from mprun.record.run_directory import run_name
from mprun.sweep.jobs import Cell, data_places
from mprun.sweep.launcher import ChosenLauncher, checked_launcher


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep before it starts.

    root: the folder that holds all cells. swept: keys with several values. launcher: Hydra's, None
    if this process starts the runs itself.
    """

    cells: tuple[Cell, ...]
    root: Path
    swept: frozenset[str]
    config_dir: str | None
    launcher: ChosenLauncher | None


def plan(overrides: list[str], config_dir: str | None) -> Plan:
    """Every cell, composed and checked; writes nothing.

    A cell lies where a single run of the same configuration would, with the keys in its name that
    only a sweep puts there: a finished one counts. Raises BadInput if one of them cannot run.
    """
    of_launcher, overrides = split_launcher(overrides)
    launcher = checked_launcher(of_launcher)
    parsed = parse_overrides(overrides)
    swept = frozenset(o.key_or_group for o in parsed if o.is_sweep_override())
    if {"output_dir", "resume"} & {o.key_or_group for o in parsed}:
        raise BadInput("output_dir, resume: not with -m; each run of a sweep has its own directory")
    if "output_root" in swept:
        raise BadInput("output_root: one value; all runs of a sweep are in one folder")
    with hydra_session(config_dir):
        values = [_values(o, text) for o, text in zip(parsed, overrides, strict=True)]
    composed = [compose_config(combination, config_dir) for combination in product(*values)]
    output_root = Path(composed[0].config.output_root)
    cells = [_cell(one, output_root, swept) for one in composed]
    directories = {cell.directory for cell in cells}
    if len(directories) < len(cells):
        raise BadInput("-m: two runs of the sweep are the same; leave out the repeated value")
    root = _common_folder(directories) or output_root
    return Plan(tuple(cells), root, swept, config_dir, launcher)


def _common_folder(directories: set[Path]) -> Path | None:
    """The folder in which all lie, if there is one."""
    parents = {directory.parent for directory in directories}
    return parents.pop() if len(parents) == 1 else None


def _cell(composed: Composed, output_root: Path, swept: frozenset[str]) -> Cell:
    plain = composed.as_dict()
    folder, name = run_name(plain, composed.choices, composed.overrides, swept, told=is_told)
    return Cell(
        composed.overrides,
        output_root / folder / name,
        config_hash(plain),
        mode=str(composed.choices["precision"]),
        scaler=composed.config.scaler.name,
        seed=composed.config.seed,
        factories=as_overrides(plain),
        data_places=data_places(plain),
    )


def _values(override: Override, text: str) -> list[str]:
    swept = override.is_sweep_override()
    return sweep_values(override, group_options(override.key_or_group)) if swept else [text]
