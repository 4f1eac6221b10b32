"""Counted operations: of a step on shapes alone, and those of a step that is made up."""

from mprun.extensions.bench.roofline.count import Counted, Counter
from mprun.extensions.bench.roofline.cuda_kernels import cuda_kernels
from mprun.extensions.bench.roofline.limits import Ceilings
from mprun.extensions.bench.roofline.shape_only import StepMemory, weightless
from mprun.precision import get_policy

TOY = Ceilings("toy", "made up", {"fp16": 100.0, "fp32": 10.0}, 50.0, 1e9, 0.5, 2.0)


def rows_of(step, fp32_math="ieee"):
    """The rows of `step()`, which makes its own tensors outside of the count."""
    counter = Counter(fp32_math)
    with cuda_kernels(counter.write), weightless():
        work = step()
        with counter:
            work()
    return counter.rows


def made_up(*rows, parameters=7, **more):
    memory, policy = StepMemory(1, 2, 3, 4, 5), get_policy("fp16_master")
    sizes = (8, "image", parameters, parameters)
    return Counted("toy", "toy", policy, (), rows, *sizes, "fused", memory, 0.0, **more)
