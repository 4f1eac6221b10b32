"""Every private name of torch that mprun uses, under a public name; no other module spells one.

A name is private if it, or a module above it, begins with an underscore. Names of registered
operators are not counted, as words of a table and below `torch.ops`: schemas and traces show them.

Torch has had each name since 2.11, the oldest version that mprun takes, or earlier; 2.15 has it
still. "If gone" says what can replace a name that a later torch drops. Functions are torch's own
objects and `attrgetter` is written in C: a step gains no Python call.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter, methodcaller
from sys import getrefcount
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.autograd import Variable
from torch.nn.modules import batchnorm, loss
from torch.utils import _python_dispatch, _pytree, checkpoint
from torch.utils.data._utils import worker

# Operators and modes. If gone: the page "Extending PyTorch" of torch's manual names the successor.

# Class of an operator with one signature, as a dispatch mode is given it.
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
# Schema of such an operator: name, arguments, returns, is_mutable.
schema_of: Callable[[OpOverload], torch.FunctionSchema] = attrgetter("_schema")
# Base class of modes that see every operator.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
# Active dispatch modes, outermost first.
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
# Context without dispatch modes.
disable_dispatch_modes = _python_dispatch._disable_current_modes
# Active function modes, outermost first.
function_modes = torch.overrides._get_current_function_mode_stack
_pop_function_mode = torch._C._pop_torch_function_stack
_push_function_mode = torch._C._push_on_torch_function_stack


@contextmanager
def no_function_modes() -> Iterator[None]:
    """Take all function modes off their stack, by which compiled code is told apart.

    If gone: `DisableTorchFunction`, and a graph for each stack.
    """
    taken = [_pop_function_mode() for _ in function_modes()]
    try:
        yield
    finally:
        for mode in reversed(taken):
            _push_function_mode(mode)


# Context without function modes.
DisableTorchFunction = torch._C.DisableTorchFunction
# The same for tensors' dispatch, subclasses' too. If gone: `disable_dispatch_modes`.
DisableTorchDispatch = torch._C._DisableTorchDispatch
# Dispatch mode whose tensors have no values.
FakeTensorMode = fake_tensor.FakeTensorMode
# Context below autocast on a CPU, for kernels of autocast.
below_cpu_autocast = partial(
    torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
)
# Names of all operators; whether (name, key) has a kernel. If gone: a list of names by hand.
operator_names = torch._C._dispatch_get_all_op_names
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
# torch.library.Library for the length of a block. If gone: a process for each library.
scoped_library = torch.library._scoped_library


@contextmanager
def replacing_kernels() -> Iterator[None]:
    """Let a library replace torch's own kernels inside the block, of which torch would warn: in
    one line, 2.11 in nine. If gone: nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*[Oo]verriding a previously registered")
        yield


# Functions over nested containers of tensors. If gone: the package optree.
tree_flatten_with_path = _pytree.tree_flatten_with_path
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map

# Number of the pass that runs in this thread, -1: none. If gone: a count around `run_engine`.
graph_task = torch._C._current_graph_task_id
# Graph node that runs in this thread. If gone: a hook on each node.
autograd_node = torch._C._current_autograd_node
# Calls a function at the end of the pass. If gone: torch.autograd.graph.queue_callback of 2.15.
queue_callback: Callable[[Callable[[], Any]], None] = Variable._execution_engine.queue_callback
# Runs a pass, every one. If gone: Tensor.backward, torch.autograd.backward and grad, each wrapped.
run_engine = torch.autograd._engine_run_backward


def replace_engine(run: Callable[..., Any]) -> Callable[[], None]:
    """Let every later backward pass of the process call `run` in place of `run_engine`.

    Returns a function that undoes it, unless somebody else has replaced it again.
    """
    name = "_engine_run_backward"
    setattr(torch.autograd, name, run)

    def undo() -> None:
        if getattr(torch.autograd, name) is run:
            setattr(torch.autograd, name, run_engine)

    return undo


def replace_recomputed(wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Let torch's checkpoints keep `wrap(function)` in place of `function` for a backward pass.

    Returns a function that undoes it. If gone: `torch.utils.checkpoint.checkpoint`, of which
    scripts have a copy by the time that a model is prepared.
    """
    reentrant: Any = checkpoint.CheckpointFunction
    name = "_checkpoint_without_reentrant_generator_impl"
    if not hasattr(checkpoint, name):  # before 2.15
        name = name.removesuffix("_impl")
    forward, generator = reentrant.forward, getattr(checkpoint, name)

    def wrapped_forward(ctx: Any, function: Any, *args: Any) -> Any:
        return forward(ctx, wrap(function), *args)

    def wrapped_generator(function: Any, *args: Any, **kwargs: Any) -> Any:
        return generator(wrap(function), *args, **kwargs)

    reentrant.forward = staticmethod(wrapped_forward)
    setattr(checkpoint, name, wrapped_generator)

    def undo() -> None:
        reentrant.forward = staticmethod(forward)
        setattr(checkpoint, name, generator)

    return undo


# Arithmetic on lists of tensors. If gone: a loop over the tensors, with the same bits.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm


def holders_of(tensor: Tensor) -> tuple[int, int, int]:
    """Return how many references Python and torch hold to a dense tensor, and tensors to its
    memory; callers compare. If gone: a copy of what somebody may hold."""
    memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return getrefcount(tensor), tensor._use_count(), memory


# Kernels of torch.amp.GradScaler. If gone: its source names their successors.
unscale_and_find_inf_ = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_ = torch._amp_update_scale_
# FP8 product. If gone: torch.nn.functional.scaled_mm, which costs a Python call.
scaled_mm = torch._scaled_mm
# What F.grouped_mm calls. If gone: torch.nn.functional.grouped_mm, if modes of functions see it.
grouped_mm = torch._grouped_mm
# cuDNN's recurrent layers, the one buffer of their weights, their dropout. If gone: torch.lstm,
# which packs the weights in each call.
cudnn_rnn = torch._cudnn_rnn
cudnn_rnn_flatten_weight = torch._cudnn_rnn_flatten_weight
cudnn_init_dropout_state = torch._cudnn_init_dropout_state

# Number of in-place changes; inference tensors have none. If gone: a comparison by value.
version_of: Callable[[Tensor], int] = attrgetter("_version")
# Parts of a sparse tensor, coalesced or not. If gone: `coalesce`, then `indices` and `values`.
sparse_indices = Tensor._indices
sparse_values = Tensor._values
# Attribute that makes a tensor a Parameter to isinstance. If gone: a subclass of nn.Parameter.
IS_PARAMETER = "_is_param"


def base_of_view(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which this one is a view; None: of none. If gone: None, and a compiled
    product takes no `weight.mT` for its weight."""
    return tensor._base


def storage_key(tensor: Tensor) -> int:
    """Return what two views of one memory share, also without values. If gone: `data_ptr`."""
    return tensor.untyped_storage()._cdata


def holds_codes(tensor: Tensor) -> bool:
    """Return whether a tensor is quantised: codes and their scales stand for its values.

    A DTensor is none, nor is what the compiler wraps. If gone: `hasattr(type(tensor),
    "__tensor_flatten__")`.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    is_wrapper = _python_dispatch.is_traceable_wrapper_subclass(tensor)
    return is_wrapper and not hasattr(type(tensor), "device_mesh")


# Dictionaries of a module by attribute. If gone: nn.Module.__getattr__ reads their successors.
PLACES = ("_parameters", "_buffers")
places_of: Callable[[nn.Module], tuple[dict[str, Any], ...]] = attrgetter(*PLACES)
parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
# Hooks of a leaf, on a gradient's way in and once it is added to `.grad`. Likewise.
hooks_of_leaf: Callable[[Tensor], tuple[Any, ...]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)
# A module's hooks, and its methods that call them and that copy it for nn.DataParallel. Likewise.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CALL_WITH_HOOKS, REPLICATE = "_call_impl", "_replicate_for_data_parallel"
# A recurrent layer's list of weights, and weak references to them. Likewise.
FLAT_WEIGHTS, FLAT_WEIGHT_REFS = "_flat_weights", "_flat_weight_refs"
flat_weights_of: Callable[[nn.RNNBase], list[Any]] = attrgetter(FLAT_WEIGHTS)
# Bases of batch norms, of batch and instance norms, of losses. If gone: the public classes.
BatchNorm, BatchOrInstanceNorm, Loss = batchnorm._BatchNorm, batchnorm._NormBase, loss._Loss
# DistributedDataParallel in its forward pass, None: none. If gone: a hook on its forward.
active_ddp_module = nn.parallel.DistributedDataParallel._get_active_ddp_module
# Number of collectives that this rank has begun in a process group. If gone: count them by hand.
exchanges_begun: Callable[[Any], int] = methodcaller("_get_sequence_number_for_group")


def default_store() -> torch.distributed.Store:
    """Return the store of the processes. If gone: a `TCPStore` at a port of its own."""
    return torch.distributed.distributed_c10d._get_default_store()


def apply_to_tensors(
    module: nn.Module, change: Callable[[Tensor], Tensor], **recurse: bool
) -> nn.Module:
    """Change each parameter and buffer in place, as `nn.Module.to` does. If gone: set `data`."""
    return module._apply(change, **recurse)


# What `Optimizer.__init__` gives every optimizer. If gone: `_optimizer_step_pre_hooks`.
OF_OPTIMIZERS = "_optimizer_state_dict_post_hooks"
# Tells GradScaler that an optimizer unscales by itself. If gone: GradScaler reads its successor.
SCALES_ITSELF = "_step_supports_amp_scaling"


def forget_worker_info() -> None:
    """Let `torch.utils.data.get_worker_info()` return None in this process. If gone: workers=0."""
    worker._worker_info = None


# Modules of torch.compile; the first optimizer imports the first. If gone: leave the name out.
DYNAMO = "torch._dynamo"
_COMPILERS = (DYNAMO, "torch._inductor", "torch._functorch", "torch.fx", "triton")
# Leaves a function uncompiled. If gone: torch.compiler.disable, which imports the compiler.
disable_dynamo = torch._disable_dynamo


@disable_dynamo
def is_functorch_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor is in a transform of torch.func. If gone: False; torch refuses."""
    found: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return found


# What takes the frames that are called from here, None: nobody; and sets it, returning what did
# before. If gone: `disable_dynamo` around each function that is called.
compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback
set_compiler = torch._C._dynamo.eval_frame.set_eval_frame


def uncompiled(function: Any) -> Any:
    """Let torch.compile pass over the frames of a function, not over those that it calls, at no
    cost. If gone: `disable_dynamo(recursive=False)`."""
    frames = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


@cache
def let_compilers_show(function: Callable[..., Any]) -> None:
    """Let torch.compile show a private function of torch to modes of functions, as eager code does.

    If gone: a compiled product by `grouped_mm` is not cast.
    """
    from torch._dynamo.variables import torch as variables

    variables.get_overridable_functions().add(function)


def count_as_compiled() -> None:
    """Let a call under `fullgraph=True` in which nothing is compiled be no error, which it is since
    torch 2.12. If gone: nothing."""
    set_count = getattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if set_count is not None and (found := set_count(-1)) >= 0:
        set_count(found + 1)


# Attribute of a compiled module: the module inside. If gone: its class names the successor.
UNCOMPILED = "_orig_mod"


def lacks_a_kernel(error: RuntimeError) -> bool:
    """Return whether an operation lacks a kernel for its dtype; 2.11's FFTs say so in words."""
    return isinstance(error, NotImplementedError) or "support tensors of type" in str(error)


def look_again(module: nn.Module) -> None:
    """Let a compiled module follow a new `forward` of the module inside. If gone: nothing."""
    if UNCOMPILED in children_of(module):
        methodcaller("_initialize")(module)


def said_by_a_compiler(error: BaseException) -> str | None:
    """Return name and first line of an error of torch.compile or Triton; None: it is another's.

    A line that announces what a backend raised is joined by the next one, which says it. An
    assertion is a compiler's where it fails, as of strides: in its modules or in code it wrote.
    """
    source = type(error).__module__
    if isinstance(error, AssertionError):
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        source = frames[-1].f_globals.get("__name__", source) if frames else source
    if not source.startswith(_COMPILERS):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    said = " ".join(lines[: 1 + lines[0].endswith(":")])
    return f"{type(error).__name__}: {said}"


def compile_options(mode: str) -> dict[str, Any]:
    """Return the options of a mode of torch.compile. If gone: a table by hand."""
    return torch._inductor.list_mode_options(mode)


def end_graph_pool(device: int, pool: tuple[int, int]) -> None:
    """End the allocation to the pool of a failed capture; only in a torch built for CUDA.

    If gone: a new process.
    """
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)
