"""The metrics of the steps since the last record, kept on the device until they are read.

At the end of an interval of steps, one copy sends their numbers to the host. On CUDA they are read
at the end of the next interval, when they have long arrived. So no step waits for the device, and
the device always has an interval of work ahead.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mprun.numerics.post_mortem import StepRow
from mprun.precision import LossScale
from mprun.record.async_copy import Moment, PinnedRing, Sent

# Intervals that stay unread when the next one ends; a CPU's numbers already are on the host.
LATE = {"cuda": 1, "cpu": 0}

Waited = Callable[[], float]


@dataclass(frozen=True, slots=True)
class LogInterval:
    """Consecutive steps that the device has finished."""

    rows: list[StepRow]
    metrics: dict[str, float]  # of the newest step
    logged: bool  # whether to record the newest step
    seconds: float  # that the device took (on a CPU the host)
    waited: float | None  # seconds of it spent waiting for data; None: no reading ahead
    collapsed: tuple[str, int] | None  # a loss scale that has collapsed, and its skips in a row


class _Unread(NamedTuple):
    steps: list[int]
    names: list[str]
    logged: bool
    began: Moment
    sent: Sent
    waited: Waited | None


class MetricBuffer:
    """Collect the steps' metrics.

    loss_scales: by name, the loss scales to watch for a collapse. defer_wait: method of a source
    that reads ahead, see `mprun.data.source`. host_skipped: `skipped` as of the last interval read.

        buffer.add(step, metrics)                # each step
        buffer.close(logged=True)                # at the end of an interval
        for interval in buffer.read(): ...        # those that arrived; read(wait=True): all
    """

    def __init__(
        self,
        device: torch.device,
        skipped: int = 0,
        loss_scales: Mapping[str, LossScale] | None = None,
        defer_wait: Callable[[], Waited] | None = None,
    ):
        self.device = device
        self.host_skipped = skipped
        scales = (loss_scales or {}).items()
        self.scales = {name: scale for name, scale in scales if scale.skips_nonfinite}
        self.defer_wait = defer_wait
        self.late = LATE[device.type]
        self.ring = PinnedRing(device, self.late + 1)
        self.unread: deque[_Unread] = deque()
        self.steps: list[int] = []
        self.rows: list[Tensor] = []
        self.last: dict[str, Tensor] = {}
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin the open interval's time now; earlier waiting for data does not count."""
        if self.defer_wait is not None:
            self.defer_wait()
        self.began = Moment(self.device)

    def add(self, step: int, metrics: dict[str, Tensor]) -> None:
        """Keep copies of the metrics of `step` (from 1) on the device; no synchronisation.

        Those recorded for the newest step alone must not be overwritten before the next step.
        """
        numbers = [metrics["loss"]]
        if "found_inf" in metrics:
            numbers += metrics["loss_scale"], metrics["found_inf"]
        self.rows.append(torch.stack(numbers))
        self.steps.append(step)
        self.last = metrics

    @torch.no_grad()
    def close(self, logged: bool) -> None:
        """End the interval and send its numbers to the host; no synchronisation.

        On CUDA at most one other interval may be unread.
        """
        if not self.rows:
            return
        names = [name for name in self.last if name != "found_inf"]
        newest = [self.last[name] for name in names]
        flags = [(scale.collapsed(), scale.consecutive_skips) for scale in self.scales.values()]
        rows, scales = torch.stack(self.rows), [torch.stack(pair) for pair in flags]
        self._sound = rows, scales
        # n or n * 3 numbers, the newest metrics, and two for each loss scale; a CPU, which copies
        # nothing, keeps a script's FP64.
        values = torch.cat([rows.flatten(), torch.stack(newest), *scales])
        waited = None if self.defer_wait is None else self.defer_wait()
        sent = self.ring.send(values.float()) if self.late else Sent(values, Moment(self.device))
        self.unread.append(_Unread(self.steps, names, logged, self.began, sent, waited))
        self.began = sent.arrived
        self.steps, self.rows, self.last = [], [], {}

    def read(self, wait: bool = False) -> Iterator[LogInterval]:
        """Yield closed intervals, oldest first; without `wait` those that had time to arrive."""
        while len(self.unread) > (0 if wait else self.late):
            yield self._interval(self.unread.popleft())

    @torch.no_grad()
    def sound(self) -> Tensor:
        """Return whether the interval closed last is sound: bool, 0-dim, on the device.

        In a sound interval no step diverged, no loss scale collapsed, and the last step had its
        update.
        """
        rows, scales = self._sound
        if rows.shape[1] == 1:
            return torch.isfinite(rows).all()
        skipped = rows[:, 2] != 0
        good = (torch.isfinite(rows[:, 0]) | skipped).all() & ~skipped[-1]
        for scale in scales:
            good = good & (scale[0] == 0)
        return good

    def _interval(self, unread: _Unread) -> LogInterval:
        values = unread.sent.read()
        count, names = len(unread.steps), unread.names
        width = (len(values) - len(names) - 2 * len(self.scales)) // count
        rows = []
        for index, step in enumerate(unread.steps):
            row = values[index * width : (index + 1) * width]
            found_inf = width == 3 and row[2] != 0
            self.host_skipped += found_inf
            scale = row[1] if width == 3 else 1.0
            rows.append(StepRow(step, row[0], scale, found_inf, self.host_skipped))
        values = values[count * width :]
        flags = values[len(names) :]
        by_scale = zip(self.scales, flags[::2], flags[1::2], strict=True)
        collapsed = next(((name, int(skips)) for name, flag, skips in by_scale if flag), None)
        seconds = unread.sent.arrived.seconds_since(unread.began)
        waited = None if unread.waited is None else unread.waited()
        metrics = dict(zip(names, values, strict=False))
        return LogInterval(rows, metrics, unread.logged, seconds, waited, collapsed)
