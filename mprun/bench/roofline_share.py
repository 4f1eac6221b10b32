"""The limit of a step under measured ceilings, as plain values."""

from collections.abc import Sequence


def step_limit(overrides: Sequence[str], mode: str, ceilings: dict, name: str) -> dict:
    """Samples per second that no execution of this step can exceed; see `roofline.limits.Limit`.

    ceilings: of `mprun.bench.ceilings.measure_ceilings`. name: of the device. Raises BadInput for
    a step that cannot be counted. eager: every operation on its own; fused: ReLU and additions
    folded into BatchNorm, None where there is nothing to fold; flops, bytes: of the step.
    """
    from mprun.bench.roofline.ceilings import Ceilings
    from mprun.bench.roofline.count import count
    from mprun.bench.roofline.limits import limit

    counted = count([o for o in overrides if not o.startswith("device=")], mode)
    measured = Ceilings(
        name=name,
        source="measured in this bench",
        flops=ceilings["flops"],
        bandwidth=ceilings["bandwidth"],
        memory=0.0,
    )
    found = limit(counted, measured)
    return {
        "eager": found.eager,
        "fused": found.fused,
        "flop_only": found.flop_only,
        "memory_bound_share": found.memory_bound_share,
        "flops": counted.flops,
        "bytes": counted.bytes(),
        "launches": found.launches,
    }
