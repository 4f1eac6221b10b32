"""A CUDA runtime without a device: the host side of CUDA code runs, and nothing is computed.

A library that is built here and preloaded (`build`, `environment`) lets the CUDA build of torch
believe in one GPU. Real are torch's allocator, streams, autograd and its device threads, autocast,
cuDNN's handling of RNN weights, `set_sync_debug_mode`, stream capture, CUDA graphs, and Triton
compiling for that device. So exceptions, warnings, host waits, captures, the path that was taken,
bytes of memory and numbers of launches mean something.

**No value means anything, and no time of the device.** Kernels do nothing: losses are what lay in
memory, a run may end as diverged, and whatever compares values has to be told what to find. Memory
is without the workspaces that cuDNN asks for. torch.compile and libraries that bring a CUDA runtime
of their own are not covered.
"""

from mprun.bench.fake_cuda.library import Counts, build, counts, environment, is_fake, why_not

__all__ = ["Counts", "build", "counts", "environment", "is_fake", "why_not"]
