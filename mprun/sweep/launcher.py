"""Hydra's launchers for the runs of a sweep: chosen, checked, instantiated.

Which runs there are, where they lie and what their outcome is stays ours: Hydra's own sweeper
would run everything again and would raise on the first run that failed.
Source: https://hydra.cc/docs/plugins/joblib_launcher/, .../submitit_launcher/.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

from hydra import compose
from hydra._internal.callbacks import Callbacks
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig

from mprun.config.compose import COMPOSITION_ERRORS, group_options, hydra_session, loader
from mprun.config.overrides import printable
from mprun.config.rules import nearest
from mprun.errors import BadInput

# launcher -> the extra of mprun's that installs it
LAUNCHERS = {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm"}
# What Hydra would print or write into the user's folders by itself.
_QUIET = ("hydra/job_logging=disabled", "hydra.output_subdir=null", "hydra.sweep.subdir=.")
# One process is one run, and its files go where the sweep looks for them.
_FIXED = ("_target_", "submitit_folder", "tasks_per_node", "nodes")


@dataclass(frozen=True, slots=True)
class ChosenLauncher:
    """One of LAUNCHERS with the overrides that choose and set it."""

    name: str
    overrides: tuple[str, ...]


def checked_launcher(overrides: list[str]) -> ChosenLauncher | None:
    """The launcher that `overrides` choose and set, installed here; None if there are none.

    Raises BadInput.
    """
    if not overrides:
        return None
    chosen = {}
    for text in overrides:
        key, value = _parsed(text)
        name = key.removeprefix("hydra.launcher.")
        if name in _FIXED:
            raise BadInput(f"{key}: mprun runs one process per run and places its files")
        chosen[key] = value
    launcher = chosen.get("hydra/launcher")
    if launcher is None:
        raise BadInput(f"{overrides[0]}: needs hydra/launcher={'|'.join(LAUNCHERS)}")
    if launcher not in LAUNCHERS:
        hint = nearest(str(launcher), LAUNCHERS)
        raise BadInput(
            f"hydra/launcher={printable(launcher)}: must be one of {', '.join(LAUNCHERS)}{hint}"
        )
    with hydra_session(None):
        if launcher not in group_options("hydra/launcher"):
            raise BadInput(
                f"hydra/launcher={launcher}: not installed; pip install "
                f"'mprun[{LAUNCHERS[launcher]}]'"
            )
        _check_values(overrides)
    if launcher == "submitit_slurm" and shutil.which("sbatch") is None:
        raise BadInput("hydra/launcher=submitit_slurm: no sbatch here; run it where SLURM is")
    return ChosenLauncher(launcher, tuple(overrides))


def launch(overrides: list[str], folder: str, runs: int, run: Callable[[DictConfig], None]) -> None:
    """Call `run` once for each of `runs` jobs, where and when the launcher wants; blocks.

    run: can be pickled; finds its number in `HydraConfig.get().job.num`. folder: absolute, for all
    files of the launcher's.
    """
    place = "'" + folder.replace("'", "\\'") + "'"
    with hydra_session(None):
        config = _composed([*overrides, *_QUIET, f"hydra.sweep.dir={place}"])
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
            reason = str(error.__cause__ or error).splitlines()
            raise BadInput(f"{printable(text)}: {reason[0] if reason else 'no value'}") from None


def _composed(overrides: list[str]) -> DictConfig:
    return compose("config", overrides=overrides, return_hydra_config=True)
