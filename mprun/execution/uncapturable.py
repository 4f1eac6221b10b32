"""Which optimizers a CUDA graph can hold; read from torch.optim of torch 2.11 to 2.15.

A replay repeats the kernels of one step with that step's host numbers. So every number that
changes from step to step has to be a tensor on the device.
"""

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Adam

from mprun.precision import MixedPrecisionOptimizer
from mprun.precision.inner_optimizer import is_fused


def why_not_captured(
    optimizers: Iterable[MixedPrecisionOptimizer], constant_rate: bool
) -> str | None:
    """The reason why the updates of `optimizers` cannot be replayed, or None.

    constant_rate: the learning rate never changes, so that its number may be part of the graph.

    SGD and Adagrad keep no number on the host that their formulas read (Adagrad counts its steps
    there, for lr_decay alone, which is 0 here; a replay does not count). Adam and AdamW count
    steps for their bias correction: on the device if fused or capturable. Fused kernels take a
    tensor as their rate; foreach and loop implementations ask the host for its value.
    """
    for optimizer in optimizers:
        inner = optimizer.inner
        name, groups = type(inner).__name__, inner.param_groups
        if isinstance(inner, Adam) and not all(group["capturable"] for group in groups):
            return (
                f"{name} without a fused kernel counts its steps on the host, "
                "where a replay does not count"
            )
        on_device = all(isinstance(group["lr"], Tensor) for group in groups)
        if not constant_rate and not (on_device and is_fused(inner)):
            return (
                f"optim.schedule: {name} without a fused kernel reads its rate on the host, "
                "and a replay would keep the first one"
            )
    return None
