"""Find what a 16-bit mode may lose in a run that ended worse than FP32, and what may help.

A few FP32 steps show which numbers FP16 cannot hold. What a sum loses beside a larger number has no
such sign: there each part of the network takes its turn in FP32.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mprun.assembly import Built
from mprun.config.schema import RunConfig
from mprun.extensions.diagnosis.advice import Advice, LossScaling, advise
from mprun.extensions.diagnosis.advised_regions import Layout, Row, layout, seen_in_16_bits
from mprun.extensions.diagnosis.first_nonfinite import Finding
from mprun.extensions.diagnosis.interventions import Build, Options, groups_of, proposed
from mprun.extensions.diagnosis.trials import FP32
from mprun.numerics.probe import chosen_modules
from mprun.numerics.probe_record import ProbeRecord
from mprun.numerics.probing import Watched
from mprun.numerics.replay import Steps
from mprun.precision.module_dtypes import own_forward

MEASURED = 4  # FP32 steps
PARTS = 8  # at most so many take their turn in FP32
SHARE = 0.001  # accepted underflow share of gradients
Change = dict[str, Any]


class ChangesOfMode:
    """The changes to try on a run, smallest first; FP32 steps are taken when they are asked for.

    config, checked: the run's configuration, as plain values and typed. reasons: sentences on what
    FP16 cannot hold, once they are known.
    """

    def __init__(self, build: Build, config: dict, checked: RunConfig, options: Options):
        self.build, self.config, self.checked, self.options = build, config, checked, options
        self.reasons: list[str] = []

    def __iter__(self) -> Iterator[Change]:
        precision = self.config["precision"]
        half = precision["autocast_dtype"] or precision["param_dtype"]
        if half == "fp32":  # of products in fewer bits alone
            return
        built = self.build(self.config | groups_of(*FP32))
        parts = layout(built.task)
        if half == "fp16":
            yield from self._of_range(self._measured(built, parts))
        of = Finding("not found", "ending", 1, False)
        whole: list[Change] = []
        for change in proposed(self.config, of, self.options):
            if "precision" in change:
                whole.append(change)
            elif "optim.lr" not in change:  # another rate is another recipe
                yield change
        yield from in_turn(parts)
        # Autocast leaves inputs, and what is no product, in FP32.
        yield {"precision": "amp" if half == "fp16" else "amp_bf16"}
        yield from whole

    def _measured(self, built: Built, parts: Layout) -> Advice:
        steps = Steps(built, 0, 0)

        def take() -> dict:
            steps.advance()
            return steps.metrics

        records = [measured(built.task, steps.step + 1, take) for _ in range(MEASURED)]
        rates = built.rate.rates

        def narrow(mode: tuple[str, ...]) -> Mapping[Row, bool]:
            return seen_in_16_bits(self.build(self.config))

        return advise(records, parts, self.checked, rates, share=SHARE, narrow=narrow)

    def _of_range(self, advice: Advice) -> Iterator[Change]:
        yield from self._of_scale(advice.loss_scaling)
        keep = advice.keep_fp32
        self.reasons += [f"{one.module}: {one.reason}" for one in keep]
        for one in keep:
            yield overrides(one.patterns)
        yield overrides(pattern for one in keep for pattern in one.patterns)
        for one in keep:
            yield from map(overrides, one.wider)

    def _of_scale(self, scaling: LossScaling) -> Iterator[Change]:
        if scaling.range is None:
            return
        scale = 2.0**scaling.range.recommended
        if self.config["scaler"]["kind"] == "dynamic":  # which may take long to find its level
            yield {"scaler.init_scale": scale}
        elif scaling.needed:
            most = max(one.lost for one in scaling.kinds if not math.isnan(one.lost))
            self.reasons.append(f"gradients: {100 * most:.3g} % underflow at scale 1")
            yield {"scaler": "static", "scaler.scale": scale}


def overrides(patterns: Iterable[str]) -> Change:
    """Return the change that computes these modules in FP32."""
    return {f"precision.overrides.{pattern}": "fp32" for pattern in patterns}


def in_turn(parts: Layout) -> Iterator[Change]:
    """Yield each part of a network in FP32: its outer modules, and what it computes beside them."""
    outer = list(dict.fromkeys(name for (_, name), around in parts.around.items() if not around))
    if len(outer) == 1:
        outer = [name for (_, name), around in parts.around.items() if around == outer[0]] or outer
    size = -(-len(outer) // PARTS) or 1
    for start in range(0, len(outer), size):
        yield overrides(outer[start : start + size])
    yield overrides([own_forward("")])


def measured(task: Any, step: int, take: Callable[[], dict]) -> ProbeRecord:
    """Take a step under a probe; take: returns its metrics."""
    with Watched(task, chosen_modules(task.learners, ())) as watched:
        watched.metrics = take()
    return watched.record(step)
