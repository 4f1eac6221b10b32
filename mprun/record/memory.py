"""A run's memory: the peak, what one step keeps for its backward pass, and what its end tells."""

import re
import resource
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from mprun.torch_private import disable_dispatch_modes, sparse_indices, sparse_values

OF_CUDA = ("peak_bytes", "reserved_bytes")  # the keys that `peak` measures on CUDA
SPARED = 2**30  # bytes of a card outside torch: context, workspaces of cuDNN and cuBLAS
# What torch says beside its own exception: of a CPU's memory and threads, and of CUDA, the driver,
# cuBLAS, cuDNN, cuSOLVER, cuFFT, cuRAND, Triton and NCCL.
_NO_MEMORY = re.compile(
    r"out of memory|ALLOC(ATION)?_FAILED|DefaultCPUAllocator|Storage size calculation overflowed|"
    r"can't start new thread|could not create a primitive$",
    re.IGNORECASE | re.MULTILINE,
)
# These have many causes; on a full card it is the want of a workspace.
_NO_WORKSPACE = re.compile(
    r"unable to find an engine|(CUDNN|CUBLAS)_STATUS_(INTERNAL_ERROR|NOT_INITIALIZED)"
)
_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (\w+)", re.IGNORECASE)


class ActivationMemory(torch.autograd.graph.saved_tensors_hooks):
    """Count the bytes that autograd keeps between forward and backward, inside the block.

    Each storage counts once, parameters and buffers not at all. That leaves activations and, under
    autocast, the 16-bit copies of the weights. If a step has several backward passes, memory that
    a later pass reuses counts once. The step computes the same numbers.

    weight_copies: (address, bytes) of storages that are casts of parameters, added by the code that
    watches the casts. Tensors saved there count as copies of weights, not as activations.
    """

    def __init__(self, learners):
        self.learners = list(learners)
        self.excluded = self._of_models()
        # Whole weights of shards are parameters for the length of a pass.
        self.gathers = any(
            hasattr(own, "to_local") for one in self.learners for own in one.model.parameters()
        )
        self.weight_copies: set[tuple[int, int]] = set()
        self.storages: dict[int, tuple[str, str, int]] = {}
        super().__init__(self._count, lambda tensor: tensor)

    def _of_models(self) -> set[int]:
        return {
            tensor.untyped_storage().data_ptr()
            for learner in self.learners
            for tensor in (*learner.model.parameters(), *learner.model.buffers())
            if not hasattr(tensor, "to_local")  # a DTensor has no memory of its own
        }

    def __enter__(self) -> "ActivationMemory":  # type: ignore[override]  # torch's gives None
        super().__enter__()
        return self

    def _count(self, tensor: Tensor) -> Tensor:
        excluded = self._of_models() if self.gathers else self.excluded
        for address, dtype, size in _storages([tensor]):
            if address not in excluded:
                kind = "weight_copies" if (address, size) in self.weight_copies else "activations"
                self.storages[address] = (kind, dtype, size)
        # The output of an operation that keeps it would hold itself, where no pass ever frees it.
        with disable_dispatch_modes():
            return tensor.detach()

    @property
    def bytes(self) -> int:
        """Return the bytes of activations and weight copies seen so far."""
        return sum(size for _, _, size in self.storages.values())

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Return dtype -> bytes of "activations" and, if there are any, of "weight_copies"."""
        kinds: dict[str, Counter[str]] = {"activations": Counter()}
        for kind, dtype, size in self.storages.values():
            kinds.setdefault(kind, Counter())[dtype] += size
        return {kind: dict(sizes) for kind, sizes in kinds.items()}


def memory_by_kind(learners) -> dict[str, dict[str, int]]:
    """Return kind -> dtype -> bytes that the learners hold after a step, each storage once.

    Kinds: parameters, gradients, optimizer_state, weight_average, buffers (norm statistics).
    Absent kinds are left out. Parameters are the master weights of a mode that has some; its 16-bit
    copies live for a step. If ranks hold shards, all are this rank's.
    """
    held: dict[str, list[Tensor]] = defaultdict(list)
    for learner in learners:
        held["parameters"] += learner.model.parameters()
        held["gradients"] += [p.grad for p in learner.model.parameters() if p.grad is not None]
        for state in learner.steps.state_by_name().values():
            held["optimizer_state"] += [v for v in state.values() if isinstance(v, Tensor)]
        held["weight_average"] += learner.averages.values()
        held["buffers"] += learner.model.buffers()
    by_dtype = {kind: _bytes_by_dtype(tensors) for kind, tensors in held.items()}
    return {kind: sizes for kind, sizes in by_dtype.items() if sizes}


def _bytes_by_dtype(tensors: list[Tensor]) -> dict[str, int]:
    seen: set[int] = set()
    sizes: Counter[str] = Counter()
    for address, dtype, size in _storages(tensors):
        sizes[dtype] += size * (address not in seen)
        seen.add(address)
    return dict(+sizes)


def _storages(tensors: Iterable[Tensor]) -> Iterator[tuple[int, str, int]]:
    """Yield (address, dtype, bytes) of the memory of strided and sparse COO tensors, and of this
    rank's shards of DTensors."""
    for given in tensors:
        tensor = given.to_local() if hasattr(given, "to_local") else given
        parts = (sparse_indices(tensor), sparse_values(tensor)) if tensor.is_sparse else (tensor,)
        for part in parts:
            if part.layout is torch.strided:
                storage = part.untyped_storage()
                yield storage.data_ptr(), str(part.dtype).removeprefix("torch."), storage.nbytes()


def reset_peak(device: torch.device) -> None:
    """Reset the peak on CUDA; the resident peak of a process cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def higher(before: dict, device: torch.device) -> dict:
    """Return the peak so far: on CUDA the larger of `before` and now, else the first reading."""
    if device.type != "cuda":
        return before or peak(device)
    now = peak(device)
    return now | {key: max(before.get(key, 0), now[key]) for key in OF_CUDA}


def peak(device: torch.device) -> dict[str, int | str]:
    """Return the peak bytes and the name of their measure.

    On CUDA, peak_bytes is the allocator's maximum over the tensors. It counts a captured graph's
    tensors during the capture, but not in replays, which allocate nothing; reserved_bytes, which
    the allocator took from the device, always does. On a CPU, peak_bytes is the resident set of the
    process, with Python and torch (300 to 500 MB) and the emulation's temporary FP32 copies.
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


def ran_out(error: BaseException) -> bool:
    """Return whether memory ran out: of the host, page-locked or not, or of a GPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    is_full = _NO_WORKSPACE.search(text) is not None and 0 <= card_memory()[0] < SPARED
    return is_full or _NO_MEMORY.search(text) is not None


def card_memory() -> tuple[int, int]:
    """Return the bytes of the GPU in use that are free, torch's cache included, and all; or -1."""
    with suppress(RuntimeError):  # of a context that is lost
        if torch.cuda.is_initialized():
            free, total = torch.cuda.mem_get_info()
            return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), total
    return -1, -1


def host_memory() -> int:
    """Return the bytes that the host can still give; -1 where the system does not tell."""
    with suppress(OSError, KeyError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0]) * 1024
    return -1


def shortage(error: BaseException) -> str:
    """Return in one line what was asked for and what was there; give back what the calls hold.

    A traceback keeps the local variables of the failed calls, tensors among them.
    """
    text, (free, total), host = str(error), card_memory(), host_memory()
    told = text.partition("\n")[0] or "of Python"
    if asked := _ASKED.search(text):
        size, unit = float(asked[1]), asked[2]
        told = "asked for " + (f"{size / 2**30:.2f} GiB" if unit == "bytes" else f"{size:g} {unit}")
    there = [f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB of the GPU"] if total > 0 else []
    there += [f"{host / 2**30:.2f} GiB of the host"] if host >= 0 else []
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    if total > 0:
        torch.cuda.empty_cache()
    return f"out of memory: {told}" + (f", with {' and '.join(there)} free" if there else "")
