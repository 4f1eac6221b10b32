"""What the steps since the last record did, kept on the device until it is asked for.

A training step leaves a few numbers on the device. Where an interval of steps ends they start for
the host in one copy, and on CUDA they are read where the next interval ends: by then they have
long arrived, so no step waits for the device, and the device always has an interval of work ahead.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mprun.numerics.post_mortem import StepRow
from mprun.precision import LossScale
from mprun.record.async_copy import Moment, PinnedRing, Sent

# Intervals that stay unread where the next one ends, by device: a CPU's numbers are on the host.
LATE = {"cuda": 1, "cpu": 0}

Waited = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Interval:
    """Consecutive steps that the device has finished.

    metrics: of the newest step. logged: whether that step is to be recorded. seconds: the time that
    the device took (on a CPU the host). waited: seconds of it that the device waited for data; None
    where the source does not read ahead. collapsed: name of the loss scale that has collapsed by
    the end of the interval and its skips in a row, or None.
    """

    rows: list[StepRow]
    metrics: dict[str, float]
    logged: bool
    seconds: float
    waited: float | None
    collapsed: tuple[str, int] | None


class _Unread(NamedTuple):
    steps: list[int]
    names: list[str]
    logged: bool
    began: Moment
    sent: Sent
    waited: Waited | None


class MetricBuffer:
    """Collects the steps' metrics.

    loss_scales: by name, those whose collapse is to be noticed. defer_wait: of a source that reads
    ahead, see `mprun.data.source`. host_skipped: `skipped` as of the last interval that was read.

        buffer.add(step, metrics)                # each step
        buffer.close(logged=True)                # where an interval ends
        for interval in buffer.read(): ...        # what has arrived; read(wait=True): everything
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
        self.rows: list[Any] = []  # tensors, on a CPU their values
        self.last: dict[str, Tensor] = {}
        self.restart_clock()

    def restart_clock(self) -> None:
        """Let the time of the open interval begin now; waiting for data before does not count."""
        if self.defer_wait is not None:
            self.defer_wait()
        self.began = Moment(self.device)

    def add(self, step: int, metrics: dict[str, Tensor]) -> None:
        """Keep copies of the metrics of `step` (from 1) on the device; no synchronisation.

        Those that only the newest step has in the record are read by `close`, so they may be
        overwritten by the next step and not before.
        """
        found_inf = metrics.get("found_inf")
        if not self.late:
            self._add_of_host(metrics, found_inf)
        elif found_inf is None:
            self.rows.append(metrics["loss"].clone())
        else:
            self.rows.append(torch.stack((metrics["loss"], metrics["loss_scale"], found_inf)))
        self.steps.append(step)
        self.last = metrics

    def _add_of_host(self, metrics: dict[str, Tensor], found_inf: Tensor | None) -> None:
        """On a CPU, where reading waits for nothing and costs less than a copy."""
        if found_inf is None:
            self.rows.append(metrics["loss"].item())
        else:
            self.rows += metrics["loss"].item(), metrics["loss_scale"].item(), found_inf.item()

    @torch.no_grad()
    def close(self, logged: bool) -> None:
        """End the interval and send its numbers to the host; no synchronisation.

        Nothing happens where no step was added. On CUDA at most one other interval may be unread.
        """
        if not self.rows:
            return
        names = [name for name in self.last if name != "found_inf"]
        # n or n * 3 numbers, the newest metrics, and two for each loss scale.
        newest = [self.last[name] for name in names]
        flags = [(scale.collapsed(), scale.consecutive_skips) for scale in self.scales.values()]
        if self.late:
            rows, scales = torch.stack(self.rows), [torch.stack(pair).float() for pair in flags]
            self._sound = rows, scales
            last = torch.stack([metric.float() for metric in newest])
            values = torch.cat([rows.flatten().float(), last, *scales])
        waited = None if self.defer_wait is None else self.defer_wait()
        sent = self.ring.send(values) if self.late else self._sent_of_host(newest, flags)
        self.unread.append(_Unread(self.steps, names, logged, self.began, sent, waited))
        self.began = sent.arrived
        self.steps, self.rows, self.last = [], [], {}

    def _sent_of_host(
        self, newest: Sequence[Tensor], flags: Sequence[tuple[Tensor, Tensor]]
    ) -> Sent:
        numbers = (*newest, *(number for pair in flags for number in pair))
        values = [*self.rows, *(float(number.item()) for number in numbers)]
        return Sent(values, Moment(self.device))

    def read(self, wait: bool = False) -> Iterator[Interval]:
        """Closed intervals, oldest first; without `wait` those that have had time to arrive."""
        while len(self.unread) > (0 if wait else self.late):
            yield self._interval(self.unread.popleft())

    @torch.no_grad()
    def sound(self) -> Tensor:
        """Whether the interval closed last shows nothing wrong: bool, 0-dim, on the device.

        Where intervals are read late; elsewhere the rows tell it. No step of it diverged, no loss
        scale collapsed, and its last step had its update.
        """
        rows, scales = self._sound
        if rows.dim() == 1:
            return torch.isfinite(rows).all()
        skipped = rows[:, 2] != 0
        good = (torch.isfinite(rows[:, 0]) | skipped).all() & ~skipped[-1]
        for scale in scales:
            good = good & (scale[0] == 0)
        return good

    def _interval(self, unread: _Unread) -> Interval:
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
        return Interval(rows, metrics, unread.logged, seconds, waited, collapsed)
