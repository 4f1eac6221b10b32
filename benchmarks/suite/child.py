"""The worker of a bench child that knows the other tools."""

import time

import torch
import torch._inductor.config

from benchmarks.suite import equality
from benchmarks.suite.contenders import make
from mprun.extensions.bench.cases import Case
from mprun.extensions.bench.measure import Contender, synchronise
from mprun.extensions.bench.worker import Worker


class SuiteWorker(Worker):
    """The `Worker` of `mprun bench` for every contender, watched for `equality.check`."""

    def make(self, case: Case, device: torch.device) -> Contender:
        return make(case, device)

    def compile_ahead(self, case: Case, device: str) -> dict:
        """Take two steps; return their seconds. What they compile stays in the compiler's cache.

        Choices by time do not: other processes are at work.
        """
        torch._inductor.config.autotune_local_cache = False
        began = time.perf_counter()
        self.build(case, device)
        self.contender.run(2)
        synchronise(self.device)
        return {"seconds": time.perf_counter() - began}

    def watched_steps(self) -> dict:
        found = equality.watched_steps(self.contender, self.device)
        if self.case.contender in equality.TWINS and not self.case.real_data:
            twin = equality.twin_if_it_fits(self.case, self.device)
            found |= {} if twin is None else {"twin": twin}
        return found
