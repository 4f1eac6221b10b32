"""Hydra composes each choice of shipped options once in a process of the tests.

A composition takes a tenth of a second, and a thousand tests need one. Folders of a test's own
change.
"""

import pickle
from pathlib import Path

from mprun.config import compose as composing

ROOT = Path(__file__).resolve().parents[1]


def once(compose):
    """Hydra's `compose`, which keeps what it made."""
    kept = {}

    def from_kept(name, overrides, return_hydra_config):
        folders = tuple(composing._Folders.folders)
        key = (*folders, *overrides)
        if key in kept:
            return pickle.loads(kept[key])
        made = compose(name, overrides=overrides, return_hydra_config=return_hydra_config)
        if all(folder.is_relative_to(ROOT) for folder in folders):
            kept[key] = pickle.dumps(made)
        return made

    return from_kept
