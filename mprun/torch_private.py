"""Every private name of torch that mprun uses, under a public one; no other module spells any.

Private is what has a leading underscore, or a module with one above it. Not counted are names of
registered operators, in tables and below `torch.ops`: torch keeps them, saved programs have them.

All are in torch 2.11, the oldest that mprun takes, and in 2.15; of what is younger or was replaced
its line tells. "Gone:" says what to do where a torch no longer has one. A function is torch's own
object, and `attrgetter` is C: nothing here adds a Python call to a step.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.autograd import Variable
from torch.nn.modules import batchnorm, loss
from torch.utils import _python_dispatch, _pytree

# Operators, and what sees each call of one. Gone: follow "Extending PyTorch" in torch's manual.

# An operator with one signature, as dispatch modes are given it.
OpOverload = torch._ops.OpOverload
# Its schema: name, arguments, returns, is_mutable.
schema_of: Callable[[OpOverload], torch.FunctionSchema] = attrgetter("_schema")
# The base of what sees every operator.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
# The dispatch modes that are active, outermost first.
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
# A context without dispatch modes.
disable_dispatch_modes = _python_dispatch._disable_current_modes
# The function modes that are active, outermost first.
function_modes = torch.overrides._get_current_function_mode_stack
# A context without function modes.
DisableTorchFunction = torch._C.DisableTorchFunction
# The dispatch mode whose tensors have no values.
FakeTensorMode = fake_tensor.FakeTensorMode
# A context below autocast on a CPU, for kernels of autocast.
below_cpu_autocast = partial(
    torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
)
# Names of all operators, and whether (name, key) has a kernel. Gone: lists of names by hand.
operator_names = torch._C._dispatch_get_all_op_names
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
# A torch.library.Library for the length of a block. Gone: one process for each.
scoped_library = torch.library._scoped_library

# Nested lists, tuples and dictionaries of tensors. Gone: torch.utils.pytree, or optree.
tree_flatten_with_path = _pytree.tree_flatten_with_path
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map

# Backward passes.

# Number of the pass that runs in this thread, -1: none. Gone: count in `replace_engine`.
graph_task = torch._C._current_graph_task_id
# The node of the graph that runs in this thread. Gone: hooks on all nodes.
autograd_node = torch._C._current_autograd_node
# Calls a function at the end of the pass. Gone: torch.autograd.graph.queue_callback (2.15).
queue_callback: Callable[[Callable[[], Any]], None] = Variable._execution_engine.queue_callback
# What every pass goes through. Gone: wrap Tensor.backward and torch.autograd's two functions.
run_engine = torch.autograd._engine_run_backward


def replace_engine(run: Callable[..., Any]) -> None:
    """Let every later backward pass of the process call `run` in place of `run_engine`."""
    setattr(torch.autograd, "_engine_run_backward", run)  # noqa: B010 - for mypy no attribute


# Arithmetic of lists of tensors. Gone: a loop, with the same bits.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
# What torch.amp.GradScaler calls. Gone: what it calls then.
unscale_and_find_inf_ = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_ = torch._amp_update_scale_
# What torch.optim calls with fused=True, by rule. Gone: what it calls then.
FUSED: dict[str | None, Callable[..., None]] = {
    "adagrad": torch._fused_adagrad_,
    "adam": torch._fused_adam_,
    "adamw": torch._fused_adamw_,
    "sgd": torch._fused_sgd_,
}
# The FP8 product. Gone: torch.nn.functional.scaled_mm, which costs a Python call.
scaled_mm = torch._scaled_mm
# cuDNN's recurrent layers, their weights' one buffer, their dropout. Gone: torch.lstm, with the
# weights packed anew in each call.
cudnn_rnn = torch._cudnn_rnn
cudnn_rnn_flatten_weight = torch._cudnn_rnn_flatten_weight
cudnn_init_dropout_state = torch._cudnn_init_dropout_state

# Tensors. Gone: nothing else tells; compare by value.

# Number of in-place changes; not of inference tensors.
version_of: Callable[[Tensor], int] = attrgetter("_version")
# Parts of a sparse tensor, coalesced or not. Gone: coalesce, then `indices` and `values`.
sparse_indices = Tensor._indices
sparse_values = Tensor._values
# Attribute that makes a tensor a Parameter to isinstance. Gone: a subclass of nn.Parameter.
IS_PARAMETER = "_is_param"


def storage_key(tensor: Tensor) -> int:
    """Return what two views of one memory have in common, values or none. Gone: the storage."""
    return tensor.untyped_storage()._cdata


# Modules: the attributes that hold what they are made of. Gone: what nn.Module.__getattr__ reads.
PLACES = ("_parameters", "_buffers")
places_of: Callable[[nn.Module], tuple[dict[str, Any], ...]] = attrgetter(*PLACES)
parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
# Those of hooks, and the methods that call these, or make a replica for nn.DataParallel.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CALL_WITH_HOOKS, REPLICATE = "_call_impl", "_replicate_for_data_parallel"
# Those of recurrent layers: the weights once more, weak references to them, and what sets both.
FLAT_WEIGHTS, FLAT_WEIGHT_REFS = "_flat_weights", "_flat_weight_refs"
flat_weights_of: Callable[[nn.RNNBase], list[Any]] = attrgetter(FLAT_WEIGHTS)
init_flat_weights = nn.RNNBase._init_flat_weights
# Bases of batch norms, of these and instance norms, of losses. Gone: the public classes, each.
BatchNorm, BatchOrInstanceNorm, Loss = batchnorm._BatchNorm, batchnorm._NormBase, loss._Loss
# The DistributedDataParallel whose forward pass runs, None: none. Gone: a hook on its forward.
active_ddp_module = nn.parallel.DistributedDataParallel._get_active_ddp_module


def apply_to_tensors(
    module: nn.Module, change: Callable[[Tensor], Tensor], **recurse: bool
) -> nn.Module:
    """Replace each parameter and buffer in place, as `nn.Module.to` does. Gone: set `data`."""
    return module._apply(change, **recurse)


# Attribute of an optimizer that unscales itself, for GradScaler. Gone: what GradScaler reads then.
SCALES_ITSELF = "_step_supports_amp_scaling"

# torch.compile.

# Its modules; a torch's optimizers import the first when one is made. Gone: leave it out.
DYNAMO = "torch._dynamo"
COMPILERS = (DYNAMO, "torch._inductor", "torch._functorch", "torch.fx", "triton")
# Leaves a function uncompiled. Gone: torch.compiler.disable, which takes a second to import.
disable_dynamo = torch._disable_dynamo
# Attribute of a compiled module: the module as it was. Gone: what torch.compile's source says.
UNCOMPILED = "_orig_mod"


def compile_options(mode: str) -> dict[str, Any]:
    """Return the options that a mode of torch.compile stands for. Gone: the mode itself."""
    return torch._inductor.list_mode_options(mode)


def end_graph_pool(device: int, pool: tuple[int, int]) -> None:
    """End what a failed capture left open: allocation to its pool. Gone: a new process.

    Only a torch built for CUDA has it.
    """
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)
