"""Signals that ask a run to stop: noted at once, obeyed at the next step boundary."""

import signal


class Interruption:
    """While active, SIGTERM, SIGUSR1 and SIGINT set `reason`; a second SIGINT stops at once."""

    def __init__(self):
        self.reason: str | None = None
        self._before: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def __enter__(self) -> "Interruption":
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        name = signal.Signals(number).name
        if self.reason == "SIGINT" and name == "SIGINT":
            raise KeyboardInterrupt
        self.reason = name
