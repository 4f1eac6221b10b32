"""Which operations ran in which dtype during one training step, and what its memory holds.

Did I get what I asked for? Counted is what was computed, casts included (`dispatch.Watch`).
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from operator import add
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from mprun.numerics.dispatch import UNWRITTEN, Watch, dtype_name, in_backward, name_of
from mprun.numerics.operation_summary import (
    PRODUCTS,
    RECURRENT,
    flops,
    is_causal,
    lines,
    recurrent_flops,
)
from mprun.numerics.state import named_modules
from mprun.precision import PrecisionPolicy, read_math_flags
from mprun.record.memory import SavedForBackward, memory_by_kind

# Allocations and views under another name.
_NOT_COUNTED = (UNWRITTEN - {"resize_"}) | {"_unsafe_view"}
_CASTS = {"_to_copy", "copy_", "copy"}
_FP32 = ("fp32", "tf32")
# Infinite without an overflow: at 0, or because it is told so.
_POLES = frozenset(
    """
    atanh div fill_ full_like log log10 log1p log2 logit masked_fill masked_fill_ reciprocal rsqrt
    where
    """.split()
)


class Row(NamedTuple):
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

    The step computes, bit for bit, what it would without; it takes about 10 microseconds of host
    time more for each operation, so only one step is watched.

    The dtype of a row is that of its floating-point operands: "fp16", "fp16+fp32" for both,
    "fp32->fp16" for a cast, "tf32" for an FP32 product under TF32 flags on a GPU, "emulated fp16"
    for what the CPU emulation computed in FP32 and rounded. The insides of a fused kernel are not
    seen. Views, allocations and operations without floating-point tensors are not counted.

    Args:
        task: has `arithmetic` and `learners`.
        policy: of the mode; its dtypes say what was asked for.
        overrides: module-name pattern -> dtype name, as in `precision.overrides`.
        step: its number, for the record.
    """

    def __init__(
        self, task: Any, policy: PrecisionPolicy, overrides: Mapping[str, str], step: int = 1
    ):
        self.task, self.policy, self.step = task, policy, step
        self.saved = SavedForBackward(task.learners.values())
        self.rows: dict[tuple[str, str, str], Row] = {}
        # Modules of FP32 products in the forward pass, by operation; those kept in FP32 left out.
        self.fp32_modules: dict[str, Counter[str]] = {}
        self._fp32_patterns = [p for p, dtype in overrides.items() if dtype == "fp32"]
        self._modules: list[tuple[str, str]] = []  # label, name
        # (operation and module, whether finite 16-bit operands gave an infinite result).
        self._infinite: list[tuple[str, Tensor]] = []
        self._lock = threading.Lock()
        self._after_backward = False
        self._recurrent_flops = 0
        self._emulations = task.arithmetic.emulations
        self._watch = Watch(task.arithmetic, self._see)
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for label, name, module in named_modules(self.task):
            self._hook(label, name, module)
            if getattr(module, "computes_in_fp32", False):  # in every mode, by its recipe
                self._fp32_patterns.append(name)
        self._before = [Counter(e.rerouted) for e in self._emulations]
        self.saved.__enter__()
        self._watch.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._watch.__exit__(*exception)
        self.saved.__exit__(*exception)
        for hook in self._hooks:
            hook.remove()
        self._add_unseen()
        self.flags = read_math_flags()

    def operations(self) -> dict:
        """For run.json: the step, the rows (largest products first) and what fell short."""
        order = ("forward", "backward", "update")
        found = sorted(
            self.rows.items(),
            key=lambda item: (order.index(item[0][0]), -item[1].flops, -item[1].elements, item[0]),
        )
        rows: list[dict[str, Any]] = []
        for (phase, name, dtype), row in found:
            rows.append({"phase": phase, "operation": name, "dtype": dtype} | row._asdict())
            if not row.flops:
                del rows[-1]["flops"]
        return {
            "step": self.step,
            "rows": rows,
            "not_in_16_bits": self.not_in_16_bits(),
            "overflowed": self.overflowed(),
        }

    def memory(self) -> dict[str, dict[str, int]]:
        """For run.json: kind -> dtype -> bytes, measured after the step (see record.memory)."""
        return memory_by_kind(self.task.learners.values()) | self.saved.by_kind()

    def record(self) -> dict:
        """What run.json keeps of it."""
        return {"operations": self.operations(), "memory_by_kind": self.memory()}

    def summary(self, device: str) -> str:
        """At most ten lines for the console."""
        text = lines(self.operations(), self.memory(), self.flags, self.policy.name, device)
        return "\n".join(text)

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
        wide = [key for key in self.rows if key[1] in PRODUCTS and key[2] in _FP32]
        if {phase for phase, _, _ in wide} == {"backward"}:
            found += sorted(f"{name} in the backward pass" for _, name, _ in wide)
        return found

    def overflowed(self) -> list[str]:
        """Forward operations whose 16-bit result is infinite though their operands are finite, e.g.
        "linalg_vector_norm in norm1". Nothing else tells of them where a division makes 0 of it.

        Reads values of the device.
        """
        flags = [flag for _, flag in self._infinite]
        found = torch.stack(flags).tolist() if flags else []
        names = [name for (name, _), bad in zip(self._infinite, found, strict=True) if bad]
        return list(dict.fromkeys(names))

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

    def _see(self, func: OpOverload, args: tuple, kwargs: dict[str, Any], inside: bool) -> Any:
        before = self._emulated() if inside else 0
        name = name_of(func)
        finite = self._finite(name, args, kwargs)
        result = func(*args, **kwargs)
        if func.is_view or name in _NOT_COUNTED:
            return result
        operands, results = _floats((args, kwargs)), _floats(result)
        if operands or results:
            emulated = inside and self._emulated() > before
            dtype = self._dtype(name, operands, results, emulated)
            # Operations on lists of tensors in place (the optimizer's) return nothing.
            changed = results or [t for t in tree_leaves(args[:1]) if isinstance(t, Tensor)]
            causal = is_causal(func, args, kwargs)
            work = flops(name, args, kwargs, result, causal=causal)
            row = Row(1, sum(t.numel() for t in changed), work)
            with self._lock:
                self._add(self._phase(), name, dtype, row)
                if finite is not None:
                    self._note_overflow(name, finite, results)
                if name == "_to_copy" and operands:
                    self._note_weight_copy(operands[0], results)
        return result

    def _phase(self) -> str:
        if in_backward():
            self._after_backward = True
            return "backward"
        return "update" if self._after_backward else "forward"

    def _emulated(self) -> int:
        return sum(e.rerouted.total() for e in self._emulations)

    def _dtype(
        self, name: str, operands: list[Tensor], results: list[Tensor], emulated: bool
    ) -> str:
        if name == "scaled_mm":  # its scales are FP32
            operands = operands[:2]
            emulated = not operands[0].is_cuda
        given, made = ([dtype_name(t.dtype) for t in tensors] for tensors in (operands, results))
        names = sorted(set(given or made))
        if emulated:
            return "emulated " + "+".join(name for name in names if name != "fp32")
        if name in _CASTS and given and made:
            return made[0] if given[-1] == made[0] else f"{given[-1]}->{made[0]}"
        if name in PRODUCTS and names == ["fp32"] and _in_tf32(name, operands[0].device):
            return "tf32"
        return "+".join(names)

    def _add(self, phase: str, name: str, dtype: str, row: Row) -> None:
        key = (phase, name, dtype)
        self.rows[key] = Row(*map(add, self.rows.get(key, Row()), row))
        if phase == "forward" and name in PRODUCTS and dtype in _FP32:
            inside = [own for _, own in self._modules]
            if not any(fnmatchcase(own, p) for own in inside for p in self._fp32_patterns):
                label = self._modules[-1][0] if self._modules else ""
                self.fp32_modules.setdefault(name, Counter())[label] += 1

    def _finite(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        """Whether all operands are finite, asked before the call may write to them; None: of no
        forward operation that can overflow."""
        if name in _POLES or self._phase() != "forward":
            return None
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves):
            return None  # it is told so
        operands = _floats(leaves)
        if not operands or any(t.layout is not torch.strided for t in operands):
            return None
        own = [t.isfinite().all() for t in operands if t.device == operands[0].device]
        return torch.stack(own).all()

    def _note_overflow(self, name: str, finite: Tensor, results: list[Tensor]) -> None:
        half = [t for t in results if t.dtype.itemsize == 2 and t.layout is torch.strided]
        if half and half[0].device == finite.device:
            infinite = torch.stack([t.isinf().any() for t in half]).any()
            label = self._modules[-1][0] if self._modules else ""
            where = label or "the step itself"
            self._infinite.append((f"{name} in {where}", infinite & finite))

    def _note_weight_copy(self, source: Tensor, results: list[Tensor]) -> None:
        if source.layout is not torch.strided:
            return
        if source.untyped_storage().data_ptr() in self.saved.excluded:
            for result in results:
                storage = result.untyped_storage()
                self.saved.weight_copies.add((storage.data_ptr(), storage.nbytes()))

    def _add_unseen(self) -> None:
        """What the emulation computes with all modes off (its LSTM), and FLOPs of fused layers."""
        for emulation, before in zip(self._emulations, self._before, strict=True):
            dtype = f"emulated {dtype_name(emulation.dtype)}"
            for (name, phase), count in (Counter(emulation.rerouted) - before).items():
                seen = self.rows.get((phase, name, dtype), Row()).calls
                if count > seen and name in RECURRENT:
                    self._add(phase, name, dtype, Row(calls=count - seen))
        for phase, factor in (("forward", 1), ("backward", 2)):
            fused = [key for key in self.rows if key[0] == phase and key[1] in RECURRENT]
            calls = sum(self.rows[key].calls for key in fused)
            for key in fused:
                row = self.rows[key]
                own = round(factor * self._recurrent_flops * (row.calls / calls))
                self.rows[key] = row._replace(flops=row.flops + own)


def _floats(tree: Any) -> list[Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _in_tf32(name: str, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    library = "cudnn.conv" if "conv" in name else "cuda.matmul"
    library = "cudnn.rnn" if name in RECURRENT else library
    return read_math_flags()[f"{library}.fp32_precision"] == "tf32"
