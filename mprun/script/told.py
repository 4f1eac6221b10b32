"""A run of several processes: the first records it and tells the others how it goes on.

All of them make the `Run` and call it alike. What is told goes through the store of
torch.distributed, beside the process groups: the first never waits, also if it alone has a `Run`.
The others wait where they would have written. A process that is alone tells itself.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed import HashStore, PrefixStore, get_rank, get_world_size

from mprun.prepared.shards import are_several
from mprun.torch_private import default_store

_LONGEST = timedelta(minutes=30)  # that the first takes for what it does alone, as torch has it
_LAST = timedelta(minutes=1)  # that the others come to the end later
_KEPT = 100  # messages that a process may be behind
_FAILED = "failed"


class Told:
    """What the processes of one run tell each other; name: of the run, the same in all of them."""

    _made: ClassVar[dict[str, int]] = {}  # number of runs of a name

    def __init__(self, name: str):
        number = self._made[name] = self._made.get(name, 0) + 1
        self.rank, self.world = (get_rank(), get_world_size()) if are_several() else (0, 1)
        store = default_store() if self.world > 1 else HashStore()
        self._store = PrefixStore(f"mprun/run/{name}/{number}", store)
        self.is_first = self.rank == 0
        self._keys: list[str] = []
        self._store.set(f"made by {self.rank}", "")

    # By the first process

    def tell(self, key: str, *values: Any) -> None:
        """Tell the others; only the newest messages are kept."""
        self._store.set(key, json.dumps(values))
        self._keys.append(key)
        if len(self._keys) > _KEPT:
            self._store.delete_key(self._keys.pop(0))

    def wait_for_others(self) -> None:
        """Let those that made the run end it too, for a while."""
        others = [r for r in range(1, self.world) if self._store.check([f"made by {r}"])]
        with suppress(RuntimeError):
            self._store.wait([f"left by {rank}" for rank in others], _LAST)

    def failure(self) -> str | None:
        """Return why another process has failed; None: none has."""
        return self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else None

    # By the others

    def hear(self, key: str) -> list[Any]:
        """Wait for what the first tells; raise RuntimeError if it has told nothing."""
        try:
            self._store.wait([key], _LONGEST)
            values: list[Any] = json.loads(self._store.get(key))
        except RuntimeError as error:
            raise RuntimeError(
                f"mprun.Run: process 0 has sent no {key}; create the Run in every process and "
                "make the same calls there (only process 0 writes files)"
            ) from error
        return values

    def leave(self) -> None:
        """Tell the first that this process has ended the run."""
        self._store.set(f"left by {self.rank}", "")

    def fail(self, text: str) -> None:
        """Tell the first why this process fails, unless one has before."""
        self._store.compare_set(_FAILED, "", text)
