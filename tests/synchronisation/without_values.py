"""Tensors that say they are on a GPU and have no values: whoever reads one on the host is told so.

`without_values()` is a block in which everything made for `device="cuda"` is such a tensor. Python
code sees a CUDA device and takes its CUDA branches; shapes and dtypes are those of torch's meta
kernels. Inside `steps()` every operation is an error that would make the host wait for a GPU: a
value read on the host, a shape that depends on values, a copy between host and device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_any_only, tree_leaves, tree_map, tree_map_only

GPU, CPU, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
# Operations that have to know values: these are the ones that torch's CUDA kernels wait for.
READS = {
    "_local_scalar_dense",
    "is_nonzero",
    "item",
    "equal",
    "nonzero",
    "nonzero_numpy",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
    "histc",
    "repeat_interleave",
}
METHODS = {"cpu", "numpy", "tolist", "item", "__bool__", "__float__", "__int__", "__index__"}
# In place, and without a meta kernel.
UPDATES = {"_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_"}


class HostRead(AssertionError):
    """The host would have waited for the device."""


class OnGpu(Tensor):
    """A tensor without values that calls itself one of a GPU. `inner`: the same on meta."""

    @staticmethod
    def __new__(cls, inner: Tensor):
        wrapped = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CPU,  # what autograd and autocast see: without a driver they have no GPU
        )
        wrapped.inner = inner
        return wrapped

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise HostRead(f"{func} outside without_values()")

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self, **_):
        return f"OnGpu({list(self.shape)}, {self.dtype})"


def on_gpu(values: Tensor) -> OnGpu:
    """A tensor of the same form as `values`, without its values."""
    return OnGpu(torch.empty_like(values, device=META))


class _State:
    """in_step: reads are errors. device: what is made now is made for the GPU."""

    in_step = False
    device = False


class _Functions(TorchFunctionMode):
    """Sees calls before torch looks at their devices."""

    def __init__(self, state: _State):
        super().__init__()
        self.state = state

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.device, torch._C._nn._parse_to):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        wrapped = tree_any_only(OnGpu, lambda _: True, (args, kwargs))
        leaves = tree_leaves((args, kwargs))
        asked = [_device(leaf) for leaf in leaves if isinstance(leaf, (torch.device, str))]
        if wrapped and self.state.in_step and (name in METHODS or CPU in asked):
            raise HostRead(f"{name} on a tensor of the device")
        for_gpu = GPU in asked
        if for_gpu and not wrapped and args and isinstance(args[0], Tensor):
            if name in ("to", "cuda"):
                return self._moved(args[0], name, leaves)
        if for_gpu and name == "tensor" and self.state.in_step:
            raise HostRead("torch.tensor(..., device=cuda) copies from the host")
        args, kwargs = tree_map(_without_gpu, (args, kwargs))
        before, self.state.device = self.state.device, wrapped or for_gpu
        try:
            made = func(*args, **kwargs)
        finally:
            self.state.device = before
        return on_gpu(made) if for_gpu and type(made) is Tensor else made

    def _moved(self, source: Tensor, name: str, leaves: list) -> OnGpu:
        # The loop's pinned memory is left to the tests on a GPU: here a copy is a copy.
        if self.state.in_step:
            raise HostRead(f"{name}: a copy from the host")
        dtype = next((leaf for leaf in leaves if isinstance(leaf, torch.dtype)), source.dtype)
        return on_gpu(source.detach().to(dtype))


class _Operations(TorchDispatchMode):
    """Computes the forms of results, and sees what happens inside torch's own functions."""

    def __init__(self, state: _State):
        super().__init__()
        self.state = state

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wrapped = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
        name = func.overloadpacket.__name__
        if not wrapped and (tensors or not self.state.device):
            return func(*args, **kwargs)
        if self.state.in_step:
            _check(name, args, tensors)
        if name in UPDATES:
            return None
        known = {id(tensor.inner): tensor for tensor in wrapped}
        args, kwargs = tree_map_only(OnGpu, lambda t: t.inner, (args, kwargs))
        # A number of the host in a 0-dim tensor: CUDA kernels take it by value.
        args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        with _disable_current_modes():
            results = func(*args, **kwargs)
            return tree_map_only(Tensor, lambda t: _wrapped(t, known), results)


def _wrapped(inner: Tensor, known: dict[int, OnGpu]) -> OnGpu:
    return known[id(inner)] if id(inner) in known else OnGpu(inner)


def _check(name: str, args: tuple, tensors: list[Tensor]) -> None:
    if name in READS:
        raise HostRead(f"{name} reads a tensor of the device")
    host = [tensor for tensor in tensors if not isinstance(tensor, OnGpu)]
    if host and (name in ("copy_", "_foreach_copy_", "_to_copy") or any(t.dim() for t in host)):
        raise HostRead(f"{name} between host and device")
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                raise HostRead(f"{name} with a mask: its size depends on the values")


def _device(leaf) -> torch.device | None:
    try:
        device = torch.device(leaf)
    except (RuntimeError, TypeError):
        return None  # a string of another meaning
    return GPU if device.type == "cuda" else device


def _without_gpu(leaf):
    is_gpu = isinstance(leaf, (torch.device, str)) and _device(leaf) == GPU
    return CPU if is_gpu else leaf


_group = Optimizer._group_tensors_by_device_and_dtype


def _grouped(lists: list, with_indices: bool = False) -> dict:
    """As torch's own, which is written in C++ and takes their device for a CPU."""
    return {
        (GPU if isinstance(tensors[0][0], OnGpu) else device, dtype): (tensors, indices)
        for (device, dtype), (tensors, indices) in _group(lists, with_indices).items()
    }


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device=META)


@contextmanager
def _torch_set_up() -> Iterator[None]:
    """oneDNN's LSTM has no meta kernel; a tensor without values cannot become one that has some."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@contextmanager
def without_values() -> Iterator[_State]:
    """See the top of this file; yields what `steps` needs."""
    state = _State()
    own = torch.autocast

    def autocast(device_type, *args, **kwargs):
        return own("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    with (
        mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
        mock.patch("torch.cuda.get_device_name", lambda *_: "a GPU without values"),
        mock.patch("torch.autocast", autocast),
        mock.patch.object(Optimizer, "_group_tensors_by_device_and_dtype", _grouped),
        _torch_set_up(),
        _Operations(state),
        _Functions(state),
    ):
        yield state


@contextmanager
def steps(state: _State) -> Iterator[None]:
    """Inside, whatever would make the host wait raises HostRead."""
    state.in_step = True
    try:
        yield
    finally:
        state.in_step = False


@contextmanager
def on_the_host() -> Iterator[None]:
    """Inside, tensors are what they are everywhere else."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class WithoutValues:
    """A data source on the host whose training batches are forms on the GPU."""

    def __init__(self, source):
        self.source = source

    def __getattr__(self, name: str):
        return getattr(self.source, name)

    def train_batch(self, index: int) -> tuple[OnGpu, ...]:
        with on_the_host():
            batch = self.source.train_batch(index)
            forms = [torch.empty_like(part, device=META) for part in batch]
        return tuple(OnGpu(form) for form in forms)
