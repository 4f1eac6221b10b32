"""Find what a 16-bit mode may lose in a run that ended worse than FP32, and what may help.

A few FP32 steps show which numbers FP16 cannot hold. What a sum loses beside a larger number has no
such sign: there each part of the network takes its turn in FP32.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from mprun.assembly import Built
from mprun.config.schema import RunConfig
from mprun.errors import MprunError
from mprun.extensions.diagnosis.advice import Advice, LossScaling, advise
from mprun.extensions.diagnosis.advised_regions import Layout, Row, layout, seen_in_16_bits
from mprun.extensions.diagnosis.far_results import Far, first_far, results
from mprun.extensions.diagnosis.first_nonfinite import Finding
from mprun.extensions.diagnosis.interventions import Build, Options, groups_of, proposed
from mprun.extensions.diagnosis.trials import FP32
from mprun.numerics.probe import chosen_modules
from mprun.numerics.probe_record import ProbeRecord
from mprun.numerics.probing import Watched
from mprun.numerics.replay import Steps
from mprun.numerics.trace import Phase
from mprun.precision.module_dtypes import own_forward

MEASURED = 4  # FP32 steps
PARTS = 8  # at most so many take their turn in FP32
SKIPS = 0.25  # of the updates; fewer are skipped while a loss scale finds its level
OFTEN = 8  # growths in a run, at least
SHARE = 0.001  # accepted underflow share of gradients
Change = dict[str, Any]


class ChangesOfMode:
    """The changes to try on a run, smallest first; FP32 steps are taken when they are asked for.

    config, checked: the run's configuration, as plain values and typed. ended, skipped: its steps,
    and those without an update. reasons: sentences on what FP16 cannot hold, once they are known.
    far: what is far from FP32's in its first step, likewise.
    """

    def __init__(
        self,
        build: Build,
        config: dict,
        checked: RunConfig,
        options: Options,
        ended: int = 0,
        skipped: int = 0,
    ):
        self.build, self.config, self.checked, self.options = build, config, checked, options
        self.reasons: list[str] = []
        self.far: Far | None = None
        self.ended, self.skips_many = ended, skipped > SKIPS * ended

    def __iter__(self) -> Iterator[Change]:
        precision = self.config["precision"]
        half = precision["autocast_dtype"] or precision["param_dtype"]
        if half == "fp32":  # of products in fewer bits alone
            return
        self.far = far_from_fp32(self.build, self.config)
        if self.far is not None and self.far.phase == Phase.FORWARD:
            yield overrides([self.far.module or own_forward("")])
        built = self.build(self.config | groups_of(*FP32))
        parts = layout(built.task)
        yield from self._of_growth(self.config["scaler"])
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

    def _of_growth(self, scaler: dict) -> Iterator[Change]:
        """Yield the usual growth of a loss scale that grew often, and skipped many updates."""
        is_dynamic, every = scaler["kind"] == "dynamic", scaler["growth_interval"]
        if is_dynamic and self.skips_many and OFTEN * every <= self.ended:
            after = f"after {every} step{'s' * (every > 1)} without a skip"
            grows = f"{scaler['growth_factor']:g}-fold {after}"
            self.reasons.append(f"loss scale: it grows {grows}, and each growth may skip updates")
            yield {"scaler": "dynamic"}

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


def far_from_fp32(build: Build, config: dict) -> Far | None:
    """Return the first results of a run's first step that are far from FP32's; None: none are."""
    with suppress(MprunError, RuntimeError, ValueError):  # FP32 may not fit
        return first_far(results(build(config)), results(build(config | groups_of(*FP32))))
    return None


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
