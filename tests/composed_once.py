"""Hydra composes each choice of shipped options once in a process of the tests.

A composition takes a tenth of a second, and a thousand tests need one. The values of a line are set
on a copy of it, by the function that Hydra itself sets them with. Folders of a test's own change.
"""

import pickle
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl

from mprun.config import compose as composing
from mprun.config.option_files import conf_dir
from mprun.config.overrides import parse_overrides

ROOT = Path(__file__).resolve().parents[1]


def once(compose):
    """Hydra's `compose`, which keeps what it made of the options."""
    kept = {}

    def from_kept(name, overrides, return_hydra_config):
        folders = tuple(composing._Folders.folders)
        if not all(folder.is_relative_to(ROOT) for folder in folders):
            return compose(name, overrides=overrides, return_hydra_config=return_hydra_config)
        chosen, values = [], []
        for line in overrides:
            [override] = parse_overrides([line])
            of_group = (conf_dir() / override.key_or_group).is_dir()
            is_choice = of_group and not isinstance(override.value(), dict)
            (chosen if is_choice else values).append(override)
        lines = [override.input_line for override in chosen]
        key = (*folders, *lines, return_hydra_config)
        if key not in kept:
            made = compose(name, overrides=lines, return_hydra_config=return_hydra_config)
            kept[key] = pickle.dumps(made)
        config = pickle.loads(kept[key])
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        return config

    return from_kept
