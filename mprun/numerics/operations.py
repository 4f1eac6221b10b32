"""Which operations ran in which dtype during one training step, as they reached the kernels.

Seen with a `TorchDispatchMode`, below autograd and autocast: what is counted is what was computed,
casts included. Autograd's own threads take the mode over from the thread that calls backward
(at::ThreadLocalState holds the stack of modes), so a backward pass on a GPU is seen as well.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.numerics.operation_summary import PRODUCTS, RECURRENT, flops, lines, recurrent_flops
from mprun.precision import DTYPE_NAMES, PrecisionPolicy, read_math_flags
from mprun.record.memory import SavedForBackward, memory_by_kind

# Allocations and views under another name.
_NOT_COUNTED = {
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
_CASTS = {"_to_copy", "copy_", "copy"}


@dataclass(slots=True)
class Row:
    """One operation in one dtype in one phase: calls, elements of the results, and FLOPs.

    flops: of a product, 2 for a multiplication and addition; else 0.
    """

    calls: int = 0
    elements: int = 0
    flops: int = 0


class FirstStep:
    """Counts operations by dtype and memory by kind of the one training step inside the block.

        with FirstStep(task, policy, overrides, step) as first:
            metrics = task.train_step(index)
        first.record()

    task: has `arithmetic` and `learners`; overrides: module-name pattern -> dtype name, as in
    `precision.overrides`. The step computes, bit for bit, what it would without; it takes about
    10 microseconds of host time more for each operation, so only one step is watched.

    The dtype of a row is that of its floating-point operands: "fp16", "fp16+fp32" for both,
    "fp32->fp16" for a cast, "tf32" for an FP32 product under TF32 flags on a GPU, "emulated fp16"
    for what the CPU emulation computed in FP32 and rounded. The insides of a fused kernel are not
    seen. Views, allocations and operations without floating-point tensors are not counted.
    """

    def __init__(
        self, task: Any, policy: PrecisionPolicy, overrides: Mapping[str, str], step: int = 1
    ):
        self.task, self.policy, self.step = task, policy, step
        self.learners = dict(task.learners)
        self.saved = SavedForBackward(self.learners.values())
        self.arithmetic = task.arithmetic
        self.rows: dict[tuple[str, str, str], Row] = {}
        # Modules of FP32 products in the forward pass, by operation; those kept in FP32 left out.
        self.fp32_modules: dict[str, Counter[str]] = {}
        self._fp32_patterns = [p for p, dtype in overrides.items() if dtype == "fp32"]
        self._modules: list[str] = []
        self._lock = threading.Lock()
        self._inside, self._after_backward = False, False
        self._recurrent_flops = 0
        self._outer, self._inner = _Watch(self, inner=False), _Watch(self, inner=True)
        self._hooks: list[Any] = []

    def __enter__(self) -> FirstStep:
        for learner_name, learner in self.learners.items():
            prefix = f"{learner_name}." if len(self.learners) > 1 else ""
            for name, module in learner.model.named_modules():
                self._hook(f"{prefix}{name}".rstrip("."), name, module)
                if getattr(module, "computes_in_fp32", False):  # in every mode, by its recipe
                    self._fp32_patterns.append(name)
        self._before = [Counter(e.rerouted) for e in self.arithmetic.emulations]
        self.task.arithmetic = _WatchedArithmetic(self.arithmetic, self)
        self.saved.__enter__()
        self._outer.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._outer.__exit__(*exception)
        self.saved.__exit__(*exception)
        self.task.arithmetic = self.arithmetic
        for hook in self._hooks:
            hook.remove()
        self._add_unseen()
        self.flags = read_math_flags()

    def operations(self) -> dict:
        """For run.json: the step, the rows (largest products first) and what fell short."""
        order = {"forward": 0, "backward": 1, "update": 2}
        rows = sorted(
            self.rows.items(),
            key=lambda item: (order[item[0][0]], -item[1].flops, -item[1].elements, item[0]),
        )
        return {
            "step": self.step,
            "rows": [
                {
                    "phase": phase,
                    "operation": name,
                    "dtype": dtype,
                    "calls": row.calls,
                    "elements": row.elements,
                    **({"flops": row.flops} if row.flops else {}),
                }
                for (phase, name, dtype), row in rows
            ],
            "not_in_16_bits": self.not_in_16_bits(),
        }

    def memory(self) -> dict[str, dict[str, int]]:
        """For run.json: kind -> dtype -> bytes, measured after the step (see record.memory)."""
        return memory_by_kind(self.learners.values()) | self.saved.by_kind()

    def record(self) -> dict:
        """What run.json keeps of it."""
        return {"operations": self.operations(), "memory_by_kind": self.memory()}

    def summary(self, device: str) -> str:
        """At most ten lines for the console."""
        return "\n".join(
            lines(self.operations(), self.memory(), self.flags, self.policy.name, device)
        )

    def not_in_16_bits(self) -> list[str]:
        """FP32 products that a 16-bit mode did not ask for, e.g. "addmm in output"; else empty.

        Products of modules that an override keeps in FP32 were asked for. Those of a backward pass
        cannot be told apart by module: they count only where no forward product was in FP32.
        """
        if self.policy.half_dtype is None:
            return []
        found = []
        for name, modules in sorted(self.fp32_modules.items()):
            where = [module or "the step itself" for module in sorted(modules)]
            more = f" and {len(where) - 3} more" if len(where) > 3 else ""
            found.append(f"{name} in {', '.join(where[:3])}{more}")
        forward = {
            phase
            for phase, name, dtype in self.rows
            if name in PRODUCTS and dtype in ("fp32", "tf32")
        }
        if forward == {"backward"}:
            found += sorted(
                f"{name} in the backward pass"
                for phase, name, dtype in self.rows
                if phase == "backward" and name in PRODUCTS and dtype in ("fp32", "tf32")
            )
        return found

    def _hook(self, label: str, name: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: tuple) -> None:
            self._after_backward = False
            self._modules.append((label, name))
            if isinstance(module, nn.RNNBase):
                self._recurrent_flops += recurrent_flops(module, args[0])

        def leave(*_: Any) -> None:
            self._modules.pop()

        self._hooks.append(module.register_forward_pre_hook(enter))
        self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def _phase(self) -> str:
        if torch._C._current_graph_task_id() != -1:
            self._after_backward = True
            return "backward"
        return "update" if self._after_backward else "forward"

    def _emulated(self) -> int:
        return sum(e.rerouted.total() for e in self.arithmetic.emulations)

    def _watch(
        self, func: OpOverload, args: tuple, kwargs: dict[str, Any], may_be_emulated: bool
    ) -> Any:
        before = self._emulated() if may_be_emulated else 0
        result = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in _NOT_COUNTED:
            return result
        operands = [t for t in _tensors((args, kwargs)) if t.is_floating_point()]
        results = [t for t in _tensors(result) if t.is_floating_point()]
        if not operands and not results:
            return result
        emulated = may_be_emulated and self._emulated() > before
        dtype = self._dtype(name, operands, results, emulated)
        # Operations on lists of tensors in place (the optimizer's) return nothing.
        elements = sum(t.numel() for t in results or _tensors(args[:1]))
        row = Row(1, elements, flops(name, args, kwargs, result))
        with self._lock:
            phase = self._phase()
            self._add(phase, name, dtype, row)
            if phase == "forward" and name in PRODUCTS and dtype in ("fp32", "tf32"):
                self._note_fp32(name)
            if name == "_to_copy" and operands:
                self._note_weight_copy(operands[0], results)
        return result

    def _dtype(
        self, name: str, operands: list[Tensor], results: list[Tensor], emulated: bool
    ) -> str:
        names = sorted({_name(t) for t in operands or results})
        if emulated:
            return "emulated " + "+".join(n for n in names if n != "fp32")
        if name in _CASTS and results and operands:
            source, target = operands[-1], results[0]
            if source.dtype is not target.dtype:
                return f"{_name(source)}->{_name(target)}"
            return _name(target)
        if name in PRODUCTS and names == ["fp32"] and _in_tf32(name, operands[0].device):
            return "tf32"
        return "+".join(names)

    def _add(self, phase: str, name: str, dtype: str, row: Row) -> None:
        total = self.rows.setdefault((phase, name, dtype), Row())
        total.calls += row.calls
        total.elements += row.elements
        total.flops += row.flops

    def _note_fp32(self, name: str) -> None:
        inside = [own for _, own in self._modules]
        if any(fnmatchcase(own, pattern) for own in inside for pattern in self._fp32_patterns):
            return
        label = self._modules[-1][0] if self._modules else ""
        self.fp32_modules.setdefault(name, Counter())[label] += 1

    def _note_weight_copy(self, source: Tensor, results: list[Tensor]) -> None:
        if source.untyped_storage().data_ptr() in self.saved.excluded:
            for result in results:
                storage = result.untyped_storage()
                self.saved.weight_copies.add((storage.data_ptr(), storage.nbytes()))

    def _add_unseen(self) -> None:
        """What the emulation computes with all modes off (its LSTM), and FLOPs of fused layers."""
        for emulation, before in zip(self.arithmetic.emulations, self._before, strict=True):
            dtype = f"emulated {DTYPE_NAMES[emulation.dtype]}"
            for (name, phase), count in (Counter(emulation.rerouted) - before).items():
                seen = self.rows.get((phase, name, dtype), Row()).calls
                if count > seen and name in RECURRENT:
                    self._add(phase, name, dtype, Row(calls=count - seen))
        for phase, factor in (("forward", 1), ("backward", 2)):
            fused = [k for k in self.rows if k[0] == phase and k[1] in RECURRENT]
            calls = sum(self.rows[key].calls for key in fused)
            for key in fused:
                share = self.rows[key].calls / calls
                self.rows[key].flops += round(factor * self._recurrent_flops * share)


class _Watch(TorchDispatchMode):
    """One of two places in the stack of modes: below the emulation (outer), or above it (inner)."""

    def __init__(self, first: FirstStep, inner: bool):
        super().__init__()
        self.first, self.inner = first, inner

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunction():
            if self.first._inside and not self.inner:
                return func(*args, **(kwargs or {}))
            return self.first._watch(func, args, kwargs or {}, may_be_emulated=self.inner)


class _WatchedArithmetic:
    """Stands in for a task's arithmetic during the step: its context, and the inner watch in it."""

    def __init__(self, arithmetic: Any, first: FirstStep):
        self._arithmetic, self._first = arithmetic, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arithmetic, name)

    def __enter__(self) -> _WatchedArithmetic:
        self._arithmetic.__enter__()
        self._first._inside = True
        self._first._inner.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._first._inner.__exit__(*exception)
        self._first._inside = False
        self._arithmetic.__exit__(*exception)


def _tensors(tree: Any) -> Iterable[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from _tensors(value)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))


def _name(tensor: Tensor) -> str:
    return DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def _in_tf32(name: str, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    library = "matmul"
    if name in RECURRENT:
        library = "rnn"
    elif "conv" in name:
        library = "conv"
    backend = torch.backends.cuda.matmul if library == "matmul" else None
    backend = backend or getattr(torch.backends.cudnn, library)
    return backend.fp32_precision == "tf32"
