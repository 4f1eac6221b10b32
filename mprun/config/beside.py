"""The options of what goes on beside the training: measurements, ranks that wait, other modes."""

from dataclasses import dataclass
from typing import Any

from mprun.config.fields import count, from_zero, one_of, positive, setting


@dataclass(slots=True)
class NumericsConfig:
    """Measurements during training; none of them changes a number of the run."""

    probes: bool = setting(
        False, "Whether to probe exponents, underflow and lost updates; numerics=probes sets it"
    )
    every: int = count(100, "Number of steps between two probed steps")
    modules: list[str] = setting(
        list, "Module-name patterns to probe; without any: all modules without submodules"
    )
    shadow_every: int = from_zero(
        0,
        "Interval, in steps, of steps that are repeated in FP32 from the same weights; 0: never",
    )
    keep_failure: bool = setting(
        True,
        "Whether the state before a failing step is saved, to replay the step and find the cause",
    )


@dataclass(slots=True)
class DistConfig:
    """Sums of gradients and waits among the ranks of a run on several devices."""

    engine: str = one_of(
        "auto ddp flat fsdp",
        "Sum gradients in backward (ddp) or after it (flat); fsdp: in shards; auto: ddp on a GPU",
    )
    order: str = one_of(
        "fast fixed", "Add micro-batches in their order (fixed), or in the fastest order"
    )
    bucket_mb: float = positive(
        25.0, "Size in MiB of the buckets of gradients that are summed together", at_most=4096.0
    )
    timeout_s: float = positive(
        100.0, "Number of seconds that a rank waits for the others", at_most=86_400.0
    )


@dataclass(slots=True)
class SwitchConfig:
    """A switch to another mode within a run; `mprun.config.switches` checks it.

    at: a share of the steps, above 0 and below 1, or the number of steps before it. to: a mode, or
    values of the mode before that change; resolved, all values of the mode.
    """

    at: Any
    to: Any
