"""Which optimizers a CUDA graph can hold; read from torch.optim of torch 2.11 to 2.15.

A replay repeats the kernels of one step with that step's host numbers. So every number that
changes from step to step has to be a tensor on the device.
"""

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Adam

from mprun.precision import MixedPrecisionOptimizer
from mprun.precision.torch_update import is_fused


def why_not_captured(
    optimizers: Iterable[MixedPrecisionOptimizer], constant_rate: bool
) -> str | None:
    """The reason why the updates of `optimizers` cannot be replayed, or None.

    constant_rate: the learning rate never changes, so that its number may be part of the graph.

    SGD and Adagrad keep no number on the host that their formulas read (Adagrad counts its steps
    there, for lr_decay alone, which is 0 here; a replay does not count). Adam and AdamW count
    steps for their bias correction: on the device if fused or capturable. Fused kernels and the
    single pass take a tensor as their rate; foreach and loop implementations ask the host for its
    value.
    """
    for optimizer in optimizers:
        inner = optimizer.inner
        single_pass = optimizer.update_path == "single_pass"
        name, groups = type(inner).__name__, inner.param_groups
        counts_on_host = not all(group.get("capturable") for group in groups)
        if isinstance(inner, Adam) and counts_on_host and not single_pass:
            return (
                f"{name} without a fused kernel counts its steps on the host, "
                "where a replay does not count"
            )
        on_device = all(isinstance(group["lr"], Tensor) for group in groups)
        reads_on_device = single_pass or is_fused(inner)
        if not constant_rate and not (on_device and reads_on_device):
            return (
                f"optim.schedule: {name} without a fused kernel reads its rate on the host, "
                "and a replay would keep the first one"
            )
    return None
