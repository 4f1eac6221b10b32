"""The runs of a sweep, and Hydra's launcher for them: checked before anything is written.

mprun itself decides on the runs, their directories and their outcomes. Hydra's sweeper would run
everything again, and would raise on the first run that failed. Source:
https://hydra.cc/docs/plugins/joblib_launcher/, .../submitit_launcher/.
"""

import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from hydra import compose
from hydra._internal.callbacks import Callbacks
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from mprun.config.compose import (
    COMPOSITION_ERRORS,
    Composed,
    Kept,
    compose_config,
    group_options,
    hydra_session,
    loader,
)
from mprun.config.overrides import (
    MOST_RUNS,
    assignment,
    parse_overrides,
    printable,
    split_launcher,
    split_seed_words,
    sweep_values,
)
from mprun.config.trust import as_overrides
from mprun.errors import BadInput
from mprun.record.keys import config_hash
from mprun.spelling import must_be
from mprun.sweeps.jobs import Cell, data_places
from mprun.sweeps.seeds import UntilDecided, asked, refuse_lone_modes, refuse_swept_seed

# launcher -> the extra of mprun that installs it
LAUNCHERS = {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm"}
# Keeps Hydra from printing and from writing into the user's folders.
_QUIET = ("hydra/job_logging=disabled", "hydra.output_subdir=null", "hydra.sweep.subdir=.")
# One process is one run, and its files go where the sweep looks for them.
_FIXED = ("_target_", "submitit_folder", "tasks_per_node", "nodes")


def checked_launcher(overrides: list[str]) -> str | None:
    """Return which of LAUNCHERS the overrides choose and configure; None without overrides."""
    if not overrides:
        return None
    chosen = dict(map(_parsed, overrides))
    for key in chosen:
        if key.removeprefix("hydra.launcher.") in _FIXED:
            raise BadInput(
                f"{key}: mprun sets this key itself (one process per run, files in its folders)"
            )
    launcher = chosen.get("hydra/launcher")
    if launcher is None:
        raise BadInput(f"{overrides[0]}: needs hydra/launcher={'|'.join(LAUNCHERS)}")
    if launcher not in LAUNCHERS:
        raise BadInput(f"hydra/launcher={printable(launcher)}: {must_be(str(launcher), LAUNCHERS)}")
    with hydra_session(None):
        if launcher not in group_options("hydra/launcher"):
            raise BadInput(
                f"hydra/launcher={launcher}: is not installed; pip install "
                f"'mprun[{LAUNCHERS[launcher]}]'"
            )
        _check_values(overrides)
    if launcher == "submitit_slurm" and shutil.which("sbatch") is None:
        raise BadInput(
            "hydra/launcher=submitit_slurm: there is no sbatch here; start the sweep on a machine "
            "with SLURM"
        )
    return str(launcher)


def launch(overrides: list[str], folder: str, runs: int, run: Callable[[DictConfig], None]) -> None:
    """Call `run`, which can be pickled, for each of `runs` jobs, where the launcher decides.

    folder: absolute path for all of the launcher's files.
    """
    with hydra_session(None):
        config = _composed([*overrides, *_QUIET, assignment("hydra.sweep.dir", folder)])
        context = HydraContext(config_loader=loader(), callbacks=Callbacks())
        launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=run, config=config
        )
        launcher.launch([[] for _ in range(runs)], initial_job_idx=0)


def _parsed(text: str) -> tuple[str, object]:
    try:
        [override] = OverridesParser.create().parse_overrides([text])
        value = override.value()
    except Exception:  # not only Hydra's own: int() refuses 4,300 digits
        raise BadInput(f"'{printable(text)}': not of the form key=value") from None
    plain = text.startswith("hydra") and override.package is None and "${" not in text
    if not plain or override.is_sweep_override():
        raise BadInput(f"{printable(text)}: a launcher's key takes one plain value")
    return override.key_or_group, value


def _check_values(overrides: list[str]) -> None:
    chosen = [text for text in overrides if _parsed(text)[0] == "hydra/launcher"]
    for text in overrides:
        try:
            _composed([*chosen, text] if text not in chosen else chosen)
        except COMPOSITION_ERRORS as error:
            unknown = isinstance(error.__cause__ or error, ConfigAttributeError | ConfigKeyError)
            why = "the launcher has no such key" if unknown else "no value that the launcher takes"
            raise BadInput(f"{printable(text)}: {why}") from None


def _composed(overrides: list[str]) -> DictConfig:
    return compose("config", overrides=overrides, return_hydra_config=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep before it starts."""

    cells: tuple[Cell, ...]
    root: Path  # the folder that holds all cells
    swept: frozenset[str]  # keys with several values
    config_dir: str | None
    launcher: str | None  # one of LAUNCHERS; None: this process starts the runs itself
    launcher_overrides: tuple[str, ...] = ()  # that choose and configure it
    until: UntilDecided | None = None  # not all cells may be needed


def plan(overrides: list[str], config_dir: str | None) -> Plan:
    """Compose and check every cell; write nothing.

    A cell has the directory that a single run of the same configuration would have, plus the swept
    keys in its name. A finished run there counts as the cell's.
    """
    of_launcher, overrides = split_launcher(overrides)
    words, overrides = split_seed_words(overrides)
    until = asked(words)
    launcher = checked_launcher(of_launcher)
    parsed = parse_overrides(overrides, sweep=True)
    swept = frozenset(o.key_or_group for o in parsed if o.is_sweep_override())
    if {"output_dir", "resume"} & {o.key_or_group for o in parsed}:
        raise BadInput(
            "output_dir, resume: are not allowed with -m, because each run of a sweep has its own "
            "directory"
        )
    if "output_root" in swept:
        raise BadInput(
            "output_root: must be one value, because all runs of a sweep are in one folder"
        )
    if until is not None:
        refuse_swept_seed(swept)
        swept |= {"seed"}
    with hydra_session(config_dir):
        values = [
            sweep_values(o, group_options(o.key_or_group)) if o.is_sweep_override() else [text]
            for o, text in zip(parsed, overrides, strict=True)
        ]
    count = math.prod(map(len, values)) * (1 if until is None else until.most)
    if count > MOST_RUNS:
        raise BadInput(f"-m: {count:,} runs; must be at most {MOST_RUNS:,} in one sweep")
    if count > 200:  # a second or more
        print(f"mprun: checking the configurations of {count:,} runs", file=sys.stderr)
    kept: Kept = {}
    composed = [compose_config(one, config_dir, kept=kept) for one in product(*values)]
    if until is not None:
        refuse_lone_modes(composed)
        several = [until.overrides(one.overrides, one.config.seed) for one in composed]
        every = [one for same_seed in zip(*several, strict=True) for one in same_seed]
        composed = [compose_config(one, config_dir, kept=kept) for one in every]
    if (nodes := max(one.config.nodes for one in composed)) > 1:
        raise BadInput(
            f"nodes={nodes}: a run of a sweep uses one machine (allowed: 1); for several "
            "machines start it by srun or torchrun, without -m"
        )
    cells = [_cell(one, swept) for one in composed]
    directories = {cell.directory for cell in cells}
    if len(directories) < len(cells):
        raise BadInput("-m: two runs of the sweep are the same; remove the repeated value")
    parents = {directory.parent for directory in directories}
    root = parents.pop() if len(parents) == 1 else Path(composed[0].config.output_root)
    return Plan(tuple(cells), root, swept, config_dir, launcher, tuple(of_launcher), until)


def _cell(composed: Composed, swept: frozenset[str]) -> Cell:
    plain, config = composed.as_dict(), composed.config
    # The baseline's values tell nothing of a mode, so that any run of it serves.
    free = composed.choices["precision"] == config.compare.baseline or config.compare.plan is None
    return Cell(
        composed.overrides,
        composed.place(swept),
        config_hash(plain),
        mode=str(composed.choices["precision"]),
        scaler=config.scaler.name,
        seed=config.seed,
        device=config.device,
        devices=config.devices,
        outside=as_overrides(plain),
        data_places=data_places(plain),
        plan=None if config.compare.plan is None else tuple(config.compare.plan),
        any_plan=free,
    )
