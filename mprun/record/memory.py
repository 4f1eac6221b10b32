"""How much memory a run takes: the peak, and what one step keeps for its backward pass."""

import resource
import sys
from collections import Counter

import torch
from torch import Tensor

OF_CUDA = ("peak_bytes", "reserved_bytes")  # what `peak` measures there


class SavedForBackward(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps between forward and backward, inside the block.

    Parameters and buffers are not counted, and each storage once: what remains are activations
    and, under autocast, the 16-bit copies of the weights, which it keeps as well. Where a step
    has several backward passes, memory that a later pass reuses counts once. The hooks hand every
    tensor through unchanged, so the step computes what it would anyway.

    weight_copies: (address, bytes) of storages that are casts of parameters. Whoever sees the casts
    happen adds them; what is saved there counts as a copy of a weight, not as an activation.
    """

    def __init__(self, learners):
        self.excluded = {
            tensor.untyped_storage().data_ptr()
            for learner in learners
            for tensor in (*learner.model.parameters(), *learner.model.buffers())
        }
        self.weight_copies: set[tuple[int, int]] = set()
        self.storages: dict[int, tuple[str, str, int]] = {}
        super().__init__(self._count, lambda tensor: tensor)

    def __enter__(self) -> "SavedForBackward":  # type: ignore[override]  # torch's gives None
        super().__enter__()
        return self

    def _count(self, tensor: Tensor) -> Tensor:
        for part in _parts(tensor):
            storage = part.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if address not in self.excluded:
                kind = "weight_copies" if (address, size) in self.weight_copies else "activations"
                self.storages[address] = (kind, _dtype_name(part), size)
        return tensor

    @property
    def bytes(self) -> int:
        """Bytes seen so far, of activations and copies of weights."""
        return sum(size for _, _, size in self.storages.values())

    def by_kind(self) -> dict[str, dict[str, int]]:
        """ "activations" and, if there were any, "weight_copies": dtype -> bytes."""
        kinds: dict[str, Counter[str]] = {"activations": Counter()}
        for kind, dtype, size in self.storages.values():
            kinds.setdefault(kind, Counter())[dtype] += size
        return {kind: dict(sizes) for kind, sizes in kinds.items()}


def memory_by_kind(learners) -> dict[str, dict[str, int]]:
    """Kind -> dtype -> bytes of what the learners hold after a step; each storage once.

    parameters, master_weights (where they are copies), gradients (as backward makes them),
    gradients_in_update (where they are cast to tensors of their own for the update),
    optimizer_state, weight_average and buffers (norm statistics). Kinds that a run does not have
    are left out. Of row tables, gradients are those of the rows that the step used.
    """
    kinds = (
        *("parameters", "master_weights", "gradients", "gradients_in_update"),
        *("optimizer_state", "weight_average", "buffers"),
    )
    found: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    for learner in learners:
        optimizer = learner.optimizer
        found["parameters"] += learner.model.parameters()
        found["master_weights"] += optimizer.masters.values()
        for own, updated in zip(optimizer.parameters, optimizer.updated, strict=True):
            # A single pass leaves gradients with the model's own parameters and makes no others.
            if own.grad is not None or updated.grad is not None:
                gradient = updated.grad if own.grad is None else own.grad
                # A dense one has shape and dtype of its tensor: torch allows no other.
                found["gradients"].append(gradient if gradient.is_sparse else own)
            if updated.grad is not None and updated.grad.dtype is not own.dtype:
                found["gradients_in_update"].append(updated.grad)
        for row in optimizer.rows:
            if row.table.gathered is not None:
                found["gradients"].append(row.table.gathered.leaves[row.key])
        for state in optimizer.state_by_name().values():
            found["optimizer_state"] += [v for v in state.values() if isinstance(v, Tensor)]
        found["weight_average"] += optimizer.averages.values()
        found["buffers"] += learner.model.buffers()
    by_dtype = {kind: _bytes_by_dtype(tensors) for kind, tensors in found.items()}
    return {kind: sizes for kind, sizes in by_dtype.items() if sizes}


def _bytes_by_dtype(tensors: list[Tensor]) -> dict[str, int]:
    storages: dict[int, tuple[str, int]] = {}
    for part in (part for tensor in tensors for part in _parts(tensor)):
        storage = part.untyped_storage()
        storages.setdefault(storage.data_ptr(), (_dtype_name(part), storage.nbytes()))
    sizes: Counter[str] = Counter()
    for dtype, size in storages.values():
        sizes[dtype] += size
    return dict(+sizes)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """What holds its memory: of a sparse tensor, indices and values; of other layouts nothing."""
    if tensor.is_sparse:
        return tensor._indices(), tensor._values()
    return (tensor,) if tensor.layout is torch.strided else ()


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
    now = peak(device)
    return now | {key: max(before[key], now[key]) for key in OF_CUDA}


def peak(device: torch.device) -> dict[str, int | str]:
    """Peak bytes and what they measure.

    CUDA: the allocator's maximum of what tensors held. A captured graph's own tensors count while
    it is captured and not in its replays, which allocate nothing; reserved_bytes, what the
    allocator took from the device, has them always. CPU: the resident set of the whole process,
    which includes Python and torch (some 300 to 500 MB) and the emulation's temporary FP32 copies.
    """
    if device.type == "cuda":
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
            "measure": "CUDA allocated",
        }
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_bytes": kib * unit, "measure": "process resident set"}
