"""Networks compiled by torch.compile for training steps."""

import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mprun.errors import BadInput
from mprun.tasks import Learner

_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "triton")


class Compilation:
    """Gives learners a compiled form of their model, which shares its tensors.

    Shapes are static: a batch of another size would be compiled once more.

    Args:
        mode: of torch.compile ("default", "max-autotune-no-cudagraphs").
        fullgraph: a part that cannot be compiled is an error instead of staying eager.

    Attributes:
        seconds: that the first compiled step took, None before.
    """

    def __init__(self, learners: Iterable[Learner], mode: str, *, fullgraph: bool):
        self.learners, self.mode, self.fullgraph = list(learners), mode, fullgraph
        self.seconds: float | None = None

    def first_step(self, step: Callable[[], Any]) -> Any:
        """Install the compiled networks and take the step that compiles them.

        Raises:
            BadInput: in one line, where the compiler fails (it needs a C++ compiler on a CPU,
                Triton on a GPU).
        """
        # Random numbers are those of the uncompiled network: the same dropout masks.
        options = torch._inductor.list_mode_options(self.mode) | {"fallback_random": True}
        for learner in self.learners:
            learner.network = torch.compile(
                learner.model, options=options, fullgraph=self.fullgraph, dynamic=False
            )
        started = time.perf_counter()
        try:
            with warnings.catch_warnings():
                # torch looks for the gradient of a discriminator's input, which has none.
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
                # FP32 products are what the configuration says.
                warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
                result = step()
        except Exception as error:
            if not _is_the_compilers(error):
                raise
            line = next((line for line in str(error).splitlines() if line.strip()), "")
            name = type(error).__name__
            raise BadInput(
                f"train.compile={self.mode}: {name}: {line.strip()[:200]} (allowed here: off)"
            ) from error
        self.seconds = time.perf_counter() - started
        return result


def _is_the_compilers(error: BaseException) -> bool:
    return type(error).__module__.startswith(_COMPILERS)
