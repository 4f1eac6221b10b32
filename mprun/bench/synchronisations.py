"""How often a piece of work makes the host wait for the GPU."""

import warnings
from collections.abc import Callable

import torch

# What torch says each time (c10::cuda::warn_or_error_on_sync).
_MESSAGE = "called a synchronizing CUDA operation"


def count_synchronisations(
    work: Callable[[], object], device: torch.device | None = None
) -> int | None:
    """Call `work` and count the operations in it that made the host wait for a GPU.

    None, and `work` is not called, where there is no GPU or `device` is another one.

    By torch.cuda.set_sync_debug_mode("warn"), which sees copies to and from memory that is not
    page-locked, and reading of values (`.item()`, `if tensor`, sizes that depend on values). It
    does not see waiting that is asked for by name (`torch.cuda.synchronize`, `Event.synchronize`)
    nor waiting inside libraries. Whatever mode was set before is set again afterwards.
    """
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum(_MESSAGE in str(warning.message) for warning in seen)
