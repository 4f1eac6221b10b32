"""Models of which each process holds a part of every weight: `fully_shard`.

Between two calls the parameters of such a model are shards (DTensors). A module of `fully_shard`
gathers its weights before its own call, and after it they are shards again; so each gets the nodes
of its weights in that call. Gradients arrive in FP32, added up, as shards too. The processes then
agree on what one of them alone cannot know: whether all gradients are finite, the largest one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn
from torch.distributed import (
    ReduceOp,
    all_reduce,
    get_rank,
    get_world_size,
    is_available,
    is_initialized,
)

from mprun.precision.policy import PrecisionPolicy, dtype_name

T = TypeVar("T")
FSDP1 = (
    "FullyShardedDataParallel has taken the model's parameters; use its successor, "
    "torch.distributed.fsdp.fully_shard"
)


def are_several() -> bool:
    """Return whether this process is one of several that train together."""
    return is_available() and is_initialized() and get_world_size() > 1


def say(line: str | None) -> None:
    """Print a line, if there is one, to stderr: the first process alone."""
    if line is not None and (not are_several() or get_rank() == 0):
        print(f"mprun: {line}", file=sys.stderr)


def is_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to a module."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_fsdp1(module: nn.Module) -> bool:
    """Return whether a module is the wrapper that `fully_shard` replaces."""
    return type(module).__name__ == "FullyShardedDataParallel"


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is spread over processes."""
    return hasattr(type(tensor), "device_mesh")  # of a DTensor, whose import takes half a second


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: of a plain one all."""
    own: Any = tensor
    return own.to_local() if is_shard(tensor) else own


def whole_of(tensor: Tensor) -> Tensor:
    """Return all of a tensor, on the host of the first process; elsewhere nothing of a shard.

    All processes call it together.
    """
    if not is_shard(tensor):
        return tensor
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return whole.cpu() if get_rank() == 0 else whole.new_empty(0)


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a tensor as it has one of `like`, of which it has all else."""
    if not is_shard(like) or whole.shape != like.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    spread: Any = like
    found: Tensor = distribute_tensor(
        whole.to(like.device), spread.device_mesh, spread.placements, src_data_rank=None
    )
    return found


def agree(largest: Tensor, spread: Iterable[Tensor]) -> None:
    """Let all processes that hold parts of the tensors `spread` have the largest value of any.

    Args:
        largest: changed in place.
        spread: in the same order in each process; of plain tensors nothing is agreed.
    """
    if not are_several():
        return
    meshes: dict[Any, None] = dict.fromkeys(own.device_mesh for own in spread if is_shard(own))  # type: ignore[attr-defined]
    for mesh in meshes:
        for dimension in range(mesh.ndim):
            all_reduce(largest, ReduceOp.MAX, group=mesh.get_group(dimension))


def gathered_together(model: nn.Module, parts: Mapping[nn.Module, T]) -> dict[nn.Module, list[T]]:
    """Return module -> the parts that are there in its call: up to the next sharded modules below.

    It is empty if no module is sharded.
    """
    if not any(map(is_sharded, model.modules())):
        return {}
    found: dict[nn.Module, list[T]] = {}
    todo: list[tuple[nn.Module, list[T]]] = [(model, [])]
    while todo:
        module, group = todo.pop()
        if module in found:
            continue
        group = found[module] = [] if is_sharded(module) else group
        if module in parts:
            group.append(parts[module])
        todo += [(child, group) for child in module.children()]
    return found


def parameters_between_calls(model: nn.Module) -> list[Tensor]:
    """Return the parameters that optimizers hold; a call before has left some gathered."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]
    return [*model.parameters()]


def is_of_shards(hook: Any) -> bool:
    """Return whether a hook is one of `fully_shard`."""
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp")


def refuse_spread(module: str, name: str, parameter: Tensor) -> None:
    """Raise RuntimeError if a parameter is not all there when its module computes."""
    if name.endswith("_flat_param"):
        raise RuntimeError(FSDP1)
    if is_shard(parameter):
        raise RuntimeError(
            f"{module}.{name} is divided over processes when it is used; mprun.prepare supports "
            "DistributedDataParallel and fully_shard, but not tensor parallelism"
        )


def refuse_cast(module: str, name: str, parameter: Tensor) -> NoReturn:
    """Raise RuntimeError: `fully_shard` has cast a parameter as it gathered it."""
    raise RuntimeError(
        f"fully_shard gathers {module}.{name} in {parameter.dtype}; leave param_dtype of its "
        f"MixedPrecisionPolicy unset, because the precision mode sets the dtype of each operation"
    )


def refuse_unshared(trained: Sequence[Tensor]) -> None:
    """Raise RuntimeError if some of these parameters of several processes are no shards: nothing
    adds up their gradients."""
    if not all(map(is_shard, trained)):
        what = "what fully_shard has left of " if any(map(is_shard, trained)) else ""
        raise RuntimeError(
            f"{get_world_size()} processes train {what}a prepared model, but their gradients are "
            "not added up. Put torch.nn.parallel.DistributedDataParallel around the model, or "
            "apply fully_shard to the model's layers and then to the model"
        )


def refuse_replica() -> None:
    """Raise RuntimeError: nn.DataParallel copies a prepared model."""
    raise RuntimeError(
        "nn.DataParallel copies a prepared model to several devices, which is impossible; use "
        "DistributedDataParallel around it"
    )


def keeps_half(policy: PrecisionPolicy) -> bool:
    """Return whether parameters are 16-bit between calls, too."""
    return policy.param_dtype.itemsize == 2 and policy.master_dtype is None


def why_not_sharded(policy: PrecisionPolicy) -> str | None:
    """Return why a model of this policy cannot be sharded; None: it can."""
    whole = "keeps state in blocks of whole tensors"
    given = {
        f"precision.update.state_dtype={policy.states.in_words} {whole}": policy.states.in_blocks
    }
    if policy.states.state_rounding != "nearest":
        given["precision.update.state_rounding=stochastic numbers bits in whole tensors"] = True
    if (masters := policy.rounded_masters) is not None:
        given[f"precision.master_dtype={dtype_name(masters)} rounds whole masters"] = True
    for why, is_so in given.items():
        if is_so:
            return f"{why}; use DistributedDataParallel around the prepared model"
    if not keeps_half(policy):
        return None
    return (
        f"precision={policy.name} keeps its weights in 16 bits, in which fully_shard would add up "
        "gradients and evaluate; use DistributedDataParallel around the prepared model"
    )
