"""What is said about a run's data at its end: waiting for them, files that were replaced."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from mprun.record.console import DATA_BOUND

_NAMED, _TOLD = 20, 3  # files in run.json, files on the console
_LONG_ENOUGH_S = 20.0


@contextmanager
def closed_afterwards(source) -> Iterator[None]:
    """End what a data source has started, whatever happens."""
    try:
        yield
    finally:
        if hasattr(source, "close"):
            source.close()


def data_bound(source, share: float | None, seconds: float) -> str | None:
    """One line if the device waited for more than a tenth of the time; None otherwise.

    seconds: length of the run; of a few seconds too much is start-up to say anything.
    """
    if share is None or share <= DATA_BOUND or seconds < _LONG_ENOUGH_S:
        return None
    line = f"data-bound: the device waited {100 * share:.0f} % of the time for data"
    workers = getattr(source, "workers", None)
    if workers is None:
        return line
    cores = len(os.sched_getaffinity(0))
    if workers >= cores:
        return f"{line}; data.workers={workers} on {cores} cores: smaller files would help"
    return f"{line}; more data.workers (now {workers}, {cores} cores) or smaller files would help"


def replaced(source, earlier: dict) -> dict:
    """What run.json says of files that data.on_corrupt=skip replaced; {} for other sources.

    earlier: the same of the attempt that this one continues. A file that both met counts once, even
    if it has moved: `replaced_places` holds the place of each in its split, the names only of the
    first.
    """
    if not hasattr(source, "replaced_files"):
        return {}
    places = dict.fromkeys(earlier.get("replaced_places", []))
    new = {place: name for place, name in source.replaced_files().items() if place not in places}
    names = [*earlier.get("replaced_files", []), *new.values()]
    places = [*places, *new]
    return {
        "replaced": len(places),
        "replaced_files": names[:_NAMED],
        "replaced_places": places,
    }


def replaced_line(data: dict) -> str | None:
    """One line if files were replaced."""
    count = data.get("replaced")
    if not count:
        return None
    names = ", ".join(data["replaced_files"][:_TOLD])
    more = f" and {count - _TOLD} more (run.json)" if count > _TOLD else ""
    files = "file" if count == 1 else "files"
    return f"data.on_corrupt=skip: {count} {files} replaced by the next usable one: {names}{more}"
