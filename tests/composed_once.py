"""Hydra composes each choice of shipped options once in a process of the tests.

A composition takes a fifth of a second, and a thousand tests need one. Half of that goes into
schemas and files, which are read once here, and into options of Hydra itself, which nothing reads:
they are left out. Folders of a test's own change.
"""

import pickle
from pathlib import Path

import pytest
from hydra._internal.config_repository import ConfigRepository
from omegaconf import OmegaConf

from mprun.config import compose as composing

ROOT = Path(__file__).resolve().parents[1]
OF_HYDRA = ("launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging", "env")
LEFT_OUT = [f"~hydra/{group}" for group in OF_HYDRA]


def keeping(patch: pytest.MonkeyPatch) -> None:
    """Let this process keep what it composes, and what it composes that of."""
    kept = _once(composing.compose, lambda name, overrides, **_: (name, *overrides))

    def compose(name, overrides, return_hydra_config):
        of_hydra = [] if any("hydra" in one for one in overrides) else LEFT_OUT
        return kept(
            name, overrides=[*overrides, *of_hydra], return_hydra_config=return_hydra_config
        )

    class Structured(OmegaConf):
        structured = staticmethod(_once(OmegaConf.structured, lambda schema: (schema,)))

    read = _once(ConfigRepository.load_config, lambda self, config_path: (config_path,))
    patch.setattr(composing, "compose", compose)
    patch.setattr(composing, "OmegaConf", Structured)
    patch.setattr(ConfigRepository, "load_config", read)


def _once(function, key_of):
    """`function`, which is called once for each key and choice of shipped folders."""
    kept = {}

    def from_kept(*given, **named):
        folders = tuple(composing._Folders.folders)
        key = (*folders, *key_of(*given, **named))
        if key in kept:
            return pickle.loads(kept[key])
        made = function(*given, **named)
        if all(folder.is_relative_to(ROOT) for folder in folders):
            kept[key] = pickle.dumps(made)
        return made

    return from_kept
