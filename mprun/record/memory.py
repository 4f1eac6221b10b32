"""How much memory a run takes: the peak, and what one step keeps for its backward pass."""

import resource
import sys

import torch
from torch import Tensor


class SavedForBackward(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps between forward and backward, inside the block.

    Parameters and buffers are not counted, and each storage once: what remains are activations
    and, under autocast, the 16-bit copies of the weights, which it keeps as well. Where a step
    has several backward passes, memory that a later pass reuses counts once. The hooks hand every
    tensor through unchanged, so the step computes what it would anyway.
    """

    def __init__(self, learners):
        self.excluded = {
            tensor.untyped_storage().data_ptr()
            for learner in learners
            for tensor in (*learner.model.parameters(), *learner.model.buffers())
        }
        self.storages: dict[int, int] = {}
        super().__init__(self._count, lambda tensor: tensor)

    def __enter__(self) -> "SavedForBackward":
        super().__enter__()
        return self

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.excluded:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        """Bytes seen so far."""
        return sum(self.storages.values())


def reset_peak(device: torch.device) -> None:
    """Start the peak anew (CUDA; a process's resident peak cannot be reset)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def higher(before: dict, device: torch.device) -> dict:
    """The peak so far: on CUDA the larger of `before` and now, else the first one taken."""
    if not before:
        return peak(device)
    if device.type != "cuda":
        return before
    return max(before, peak(device), key=lambda value: value["peak_bytes"])


def peak(device: torch.device) -> dict[str, int | str]:
    """Peak bytes and what they measure.

    CUDA: the allocator's maximum. CPU: the resident set of the whole process, which includes
    Python and torch (some 300 to 500 MB) and the emulation's temporary FP32 copies.
    """
    if device.type == "cuda":
        return {"peak_bytes": torch.cuda.max_memory_allocated(device), "measure": "CUDA allocated"}
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_bytes": kib * unit, "measure": "process resident set"}
