"""Signals that ask a sweep to stop: noted at once, obeyed by the loop that starts its runs."""

import signal

from mprun.errors import INTERRUPTED, PREEMPTED

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopRequest:
    """While active, the first of SIGINT, SIGTERM, SIGUSR1 and SIGHUP sets `reason`.

    A second SIGINT sets `insisted`. SIGHUP stays ignored where it was (nohup).
    """

    def __init__(self):
        self.reason: str | None = None
        self.insisted = False
        self._before: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """INTERRUPTED for Ctrl-C, PREEMPTED for any other signal."""
        return INTERRUPTED if self.reason == "SIGINT" else PREEMPTED

    def __enter__(self) -> "StopRequest":
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        if self.reason is None:
            self.reason = signal.Signals(number).name
        elif number == signal.SIGINT:
            self.insisted = True
