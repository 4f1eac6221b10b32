"""Entry points: names by which installed packages, and mprun's own extensions, add to the core.

Groups: `mprun.components` registers networks, data and tasks (mprun.config.registry); `mprun.verbs`
names commands (mprun.cli.dispatch); `mprun.runner` has what the runner tells of recorded keys
(mprun.record.keys), `mprun.tokenizers` `subwords` (mprun.data.vocabulary), `mprun.readers`
`scalar`, which reads other tools' logs (mprun.compare), in the formats of `mprun.log_formats` too
(mprun.extensions.logs). The command `mprun` itself is in `console_scripts`, where the processes of
a sweep find it (mprun.sweeps.child).
A checkout's own are read from its pyproject.toml, so that none needs to be installed. Only text is
read: `importlib.metadata` takes 35 ms.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_HEADERS = {"console_scripts": ("[project.scripts]",)}  # pyproject.toml has a table of its own


@cache
def announced(group: str) -> dict[str, str]:
    """Return name -> `module` or `module:attribute` of each entry point of a group, sorted.

    Extensions whose folder was deleted are left out. Names of mprun's own win.
    """
    found: dict[str, str] = {}
    for text in _texts():
        for header in (*_HEADERS.get(group, ()), f'[project.entry-points."{group}"]', f"[{group}]"):
            _, _, rest = text.partition(f"{header}\n")
            for line in rest.partition("\n[")[0].splitlines():
                name, _, value = (part.strip('" ') for part in line.partition("="))
                if value and _is_there(value):
                    found.setdefault(name, value)
    return dict(sorted(found.items()))


def loaded(name: str) -> Any:
    """Import what is named as `module:attribute`, or as `module`."""
    module, _, attribute = name.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def hint_of(verb: str, text: str) -> str:
    """Return `text`, which names a verb of an extension, or nothing where that is not there."""
    return text if verb in announced("mprun.verbs") else ""


def required(what: str, module: str) -> None:
    """Raise ModuleNotFoundError, in one line, where the module that `what` needs is not there."""
    if not _is_there(module):
        raise ModuleNotFoundError(f"{what}: needs {module}, which is not installed", name=module)


def source_of(name: str) -> Path | None:
    """Return the file of a module, importing only packages above it; None if it has none."""
    from importlib.util import find_spec

    with suppress(Exception):
        if (spec := find_spec(name.partition(":")[0])) is not None and spec.origin:
            return Path(spec.origin)
    return None


def _is_there(name: str) -> bool:
    module = name.partition(":")[0]
    path = _ROOT.joinpath(*module.split("."))
    own = module.startswith("mprun.")
    return not own or path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _texts() -> Iterator[str]:
    checkout = _ROOT / "pyproject.toml"
    if checkout.is_file():
        yield checkout.read_text(encoding="utf-8")
    for folder in sys.path:
        with suppress(OSError):
            for name in os.listdir(folder or "."):
                # What an earlier installation of this checkout announced may be gone.
                stale = name.startswith("mprun-") and checkout.is_file()
                if name.endswith((".dist-info", ".egg-info")) and not stale:
                    with suppress(OSError, UnicodeDecodeError):
                        yield Path(folder, name, "entry_points.txt").read_text(encoding="utf-8")
