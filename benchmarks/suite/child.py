"""The worker of a bench child that knows the other tools."""

import torch

from benchmarks.suite import equality
from benchmarks.suite.contenders import make
from mprun.extensions.bench.cases import Case
from mprun.extensions.bench.measure import Contender
from mprun.extensions.bench.worker import Worker


class SuiteWorker(Worker):
    """The `Worker` of `mprun bench` for every contender, watched for `equality.check`."""

    def make(self, case: Case, device: torch.device) -> Contender:
        return make(case, device)

    def watched_steps(self) -> dict:
        found = equality.watched_steps(self.contender, self.device)
        if self.case.contender in equality.TWINS and not self.case.real_data:
            twin = equality.twin_if_it_fits(self.case, self.device)
            found |= {} if twin is None else {"twin": twin}
        return found
