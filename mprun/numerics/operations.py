"""Record which operations ran in which dtype during one training step, and its memory."""

import math
import threading
from collections import Counter
from collections.abc import Mapping
from operator import add
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from mprun.numerics.state import named_learners, named_modules
from mprun.numerics.trace import (
    UNWRITTEN,
    Collector,
    Operation,
    Phase,
    Trace,
    storage_of,
    tensors_in,
)
from mprun.precision import PrecisionPolicy, read_math_flags
from mprun.precision.block_formats import ELEMENTS
from mprun.precision.flops import PRODUCTS, RECURRENT, recurrent_flops
from mprun.precision.module_dtypes import Choice, chosen_dtypes, those_that_match
from mprun.precision.policy import DTYPES, dtype_name
from mprun.record.memory import ActivationMemory, memory_by_kind
from mprun.record.run_record import shares_text
from mprun.torch_private import tree_leaves

# Allocations and views under another name.
_NOT_COUNTED = (UNWRITTEN - {"resize_"}) | {"_unsafe_view"}
_CASTS = {"_to_copy", "copy_", "copy"}
_FP32 = ("fp32", "tf32")
# Operations that are infinite without an overflow: at 0, or by their arguments.
_POLES = frozenset(
    "atanh div fill_ full_like log log10 log1p log2 logit masked_fill masked_fill_ reciprocal "
    "rsqrt where".split()
)


class OperationRow(NamedTuple):
    """One operation in one dtype in one phase; elements: of the results; flops: of products."""

    calls: int = 0
    elements: int = 0
    flops: int = 0


class FirstStep(Collector):
    """Count operations by dtype and memory by kind of one training step inside the block.

        with FirstStep(task, policy, overrides, step) as first:
            metrics = task.train_step(index)
        first.record()

    The step computes the same bits. Each operation takes about 10 microseconds more of host time.

    The dtype of a row is that of its floating-point operands: "fp16", "fp16+fp32" for both,
    "fp32->fp16" for a cast, "tf32" for an FP32 product under TF32 flags on a GPU, "emulated fp16"
    for a result that the CPU emulation computed in FP32 and rounded. The insides of a fused kernel
    are not seen. Views, allocations and operations without floating-point tensors are not counted.

    overrides: module-name pattern -> dtype name, as in `precision.overrides`. step: its number, for
    the record.
    """

    def __init__(
        self, task: Any, policy: PrecisionPolicy, overrides: Mapping[str, str], step: int = 1
    ):
        self.task, self.policy, self.step = task, policy, step
        self.saved = ActivationMemory(task.learners.values())
        self.rows: dict[tuple[str, str, str], OperationRow] = {}
        # Operation -> modules of FP32 products in the forward pass, without those kept in FP32.
        self.fp32_modules: dict[str, set[str]] = {}
        self.overrides = {pattern: DTYPES[dtype] for pattern, dtype in overrides.items()}
        # Paths of modules that are to compute in FP32, with those inside or on their own.
        self._kept: set[str] = set()
        self._kept_alone: set[str] = set()
        self._names: dict[str, str] = {}  # path of a module -> name inside its model
        # (operation and module, whether finite 16-bit operands gave an infinite result).
        self._infinite: list[tuple[str, Tensor]] = []
        self._lock = threading.Lock()
        self._recurrent_flops = 0
        self._emulations = task.forward_context.emulations
        self._trace = Trace(task, self)

    def __enter__(self) -> Self:
        chosen: dict[str, Choice] = {}
        for prefix, learner in named_learners(self.task):
            model = learner.model
            own = {p: self.overrides[p] for p in those_that_match(model, self.overrides)}
            of_model = chosen_dtypes(model, own, "precision.overrides")
            chosen |= {f"{prefix}{name}".rstrip("."): choice for name, choice in of_model.items()}
        for path, name, module in named_modules(self.task):
            self._names[path], choice = name, chosen.get(path)
            if getattr(module, "computes_in_fp32", False):  # in every mode, by its recipe
                self._kept.add(path)
            elif choice is not None and choice.dtype is torch.float32:
                (self._kept_alone if choice.is_own else self._kept).add(path)
        self._before = [Counter(e.rerouted) for e in self._emulations]
        self.saved.__enter__()
        self._trace.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._trace.__exit__(*exception)
        self.saved.__exit__(*exception)
        self._add_unseen()
        self.flags = read_math_flags()

    def operations(self) -> dict:
        """Return for run.json: step, rows (largest products first), FP32 products and overflows."""
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
        doubts = {"not_in_16_bits": self.not_in_16_bits(), "overflowed": self.overflowed()}
        return {"step": self.step, "rows": rows} | doubts

    def memory(self) -> dict[str, dict[str, int]]:
        """Return kind -> dtype -> bytes after the step, for run.json (see record.memory)."""
        return memory_by_kind(self.task.learners.values()) | self.saved.by_kind()

    def record(self) -> dict:
        return {"operations": self.operations(), "memory_by_kind": self.memory()}

    def summary(self, device: str, whole: bool, products: Mapping[str, float]) -> str:
        """Return what the console gets: a line and warnings, or the `whole` of at most ten.

        products: their shares by dtype, as the audit has them.
        """
        operations, mode = self.operations(), self.policy.name
        text = lines(operations, self.memory(), self.flags, mode, device) if whole else []
        return "\n".join(text or [in_short(operations, products), *warnings(operations, mode)])

    def not_in_16_bits(self) -> list[str]:
        """Return unrequested FP32 products of a 16-bit mode, e.g. "addmm in output"; else empty."""
        if self.policy.half_dtype is None:
            return []
        found = []
        for name, modules in sorted(self.fp32_modules.items()):
            where = [module or "the step itself" for module in sorted(modules)]
            more = f" and {len(where) - 3} more" if len(where) > 3 else ""
            found.append(f"{name} in {', '.join(where[:3])}{more}")
        # In a backward pass they have no module: they count only without one in the forward pass.
        wide = [key for key in self.rows if key[1] in PRODUCTS and key[2] in _FP32]
        if {phase for phase, _, _ in wide} == {"backward"}:
            found += sorted(f"{name} in the backward pass" for _, name, _ in wide)
        return found

    def overflowed(self) -> list[str]:
        """Return forward operations with finite operands but an infinite 16-bit result.

        Nothing else shows "linalg_vector_norm in norm1" if a division turns the result into 0.
        Reads values of the device.
        """
        flags = [flag for _, flag in self._infinite]
        found = torch.stack(flags).tolist() if flags else []
        names = [name for (name, _), bad in zip(self._infinite, found, strict=True) if bad]
        return list(dict.fromkeys(names))

    def enter(self, module: nn.Module, inputs: tuple) -> None:
        if isinstance(module, nn.RNNBase):
            self._recurrent_flops += recurrent_flops(module, inputs[0])

    def before(self, operation: Operation) -> tuple[int, Tensor | None]:
        return self._emulated(), self._finite(operation)

    def after(self, operation: Operation, kept: tuple[int, Tensor | None]) -> None:
        name, args = operation.name, operation.args
        if operation.func.is_view or name in _NOT_COUNTED:
            return
        operands, results = _floats((args, operation.kwargs)), _floats(operation.result)
        if operands or results:
            emulated, finite = kept
            if name == "scaled_mm":
                dtype = _of_casts(args)
            elif name.startswith("scaled_attention"):  # its formats, on every device
                dtype = "emulated " + "+".join(sorted({own for own in args if own in ELEMENTS}))
            else:
                dtype = self._dtype(name, operands, results, self._emulated() > emulated)
            # In-place operations on lists of tensors (the optimizer's) return nothing.
            changed = results or tensors_in(args[:1])
            row = OperationRow(1, sum(t.numel() for t in changed), operation.flops)
            with self._lock:
                self._add(self._phase(), name, dtype, row)
                if finite is not None:
                    self._note_overflow(name, finite, results)
                self._note_weight_copies(operation, results)

    def _note_weight_copies(self, operation: Operation, results: list[Tensor]) -> None:
        """Note the casts of weights, one of them or, on CUDA, many at once."""
        targets, sources = results, operation.args[:1] * len(results)
        if operation.name == "_foreach_copy_":
            targets, sources = operation.args[:2]
        elif operation.name != "_to_copy":
            return
        for made, own in zip(targets, sources, strict=True):
            if made.dtype is not own.dtype and self._is_weight(own):
                storage = made.untyped_storage()
                self.saved.weight_copies.add((storage.data_ptr(), storage.nbytes()))

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and storage_of(tensor) in self.saved.excluded

    def _emulated(self) -> int:
        return sum(e.rerouted.total() for e in self._emulations)

    def _phase(self) -> str:
        phase = self._trace.phase
        if phase is Phase.BACKWARD:
            return "backward"
        return "update" if phase in (Phase.UNSCALE, Phase.UPDATE) else "forward"

    def _modules(self) -> list[str]:
        """Return the paths of the networks' modules that run now, the outermost first."""
        return [path for path in self._trace.modules if path in self._names]

    def _dtype(
        self, name: str, operands: list[Tensor], results: list[Tensor], emulated: bool
    ) -> str:
        given, made = ([dtype_name(t.dtype) for t in tensors] for tensors in (operands, results))
        names = sorted(set(given or made))
        if emulated:
            return "emulated " + "+".join(name for name in names if name != "fp32")
        if name in _CASTS and given and made:
            return made[0] if given[-1] == made[0] else f"{given[-1]}->{made[0]}"
        if name in PRODUCTS and names == ["fp32"] and _in_tf32(name, operands[0].device):
            return "tf32"
        return "+".join(names)

    def _add(self, phase: str, name: str, dtype: str, row: OperationRow) -> None:
        key = (phase, name, dtype)
        self.rows[key] = OperationRow(*map(add, self.rows.get(key, OperationRow()), row))
        if phase == "forward" and name in PRODUCTS and dtype in _FP32:
            modules = self._modules()
            inside = (modules or [""])[-1]
            if self._kept.isdisjoint(modules) and inside not in self._kept_alone:
                self.fp32_modules.setdefault(name, set()).add(inside)

    def _finite(self, operation: Operation) -> Tensor | None:
        """Return whether all operands are finite; None: no forward operation that can overflow."""
        if operation.name in _POLES or self._phase() != "forward":
            return None
        leaves = tree_leaves((operation.args, operation.kwargs))
        if any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves):
            return None  # an argument is infinite
        operands = _floats(leaves)
        if not operands or any(t.layout is not torch.strided for t in operands):
            return None
        # torch 2.11 has no isfinite of FP8 on a CPU.
        wide = [t.float() if t.itemsize == 1 else t for t in operands]
        own = [t.isfinite().all() for t in wide if t.device == operands[0].device]
        return torch.stack(own).all()

    def _note_overflow(self, name: str, finite: Tensor, results: list[Tensor]) -> None:
        half = [t for t in results if t.dtype.itemsize == 2 and t.layout is torch.strided]
        if half and half[0].device == finite.device:
            infinite = torch.stack([t.isinf().any() for t in half]).any()
            where = (self._modules() or [""])[-1] or "the step itself"
            self._infinite.append((f"{name} in {where}", infinite & finite))

    def _add_unseen(self) -> None:
        """Add the emulation's work with all modes off (its LSTM), and the FLOPs of fused layers."""
        for emulation, before in zip(self._emulations, self._before, strict=True):
            dtype = f"emulated {dtype_name(emulation.dtype)}"
            for (name, phase), count in (Counter(emulation.rerouted) - before).items():
                seen = self.rows.get((phase, name, dtype), OperationRow()).calls
                if count > seen and name in RECURRENT:
                    self._add(phase, name, dtype, OperationRow(calls=count - seen))
        for phase, factor in (("forward", 1), ("backward", 2)):
            fused = [key for key in self.rows if key[0] == phase and key[1] in RECURRENT]
            calls = sum(self.rows[key].calls for key in fused)
            for key in fused:
                row = self.rows[key]
                own = round(factor * self._recurrent_flops * (row.calls / calls))
                self.rows[key] = row._replace(flops=row.flops + own)


def _floats(tree: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(tree) if tensor.is_floating_point()]


def _in_tf32(name: str, device: torch.device) -> bool:
    library = "cudnn.conv" if "conv" in name else "cuda.matmul"
    library = "cudnn.rnn" if name in RECURRENT else library
    flag = f"{library}.fp32_precision"
    return device.type == "cuda" and read_math_flags()[flag] == "tf32"


_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_KINDS = (
    "parameters gradients optimizer_state weight_average buffers activations weight_copies".split()
)


def _of_casts(args: tuple[Any, ...]) -> str:
    """Name a product of casts: "emulated e4m3+e5m2", on CUDA "e4m3" or "decoded e2m1"."""
    *_, names, decoded = args
    formats = "+".join(sorted(set(names.split(" x "))))
    how = "" if decoded is None else "decoded "
    return f"{how if args[0].is_cuda else 'emulated '}{formats}"


def lines(
    operations: Mapping, memory: Mapping, flags: Mapping, mode: str, device: str
) -> list[str]:
    """Return at most ten lines; operations, memory: as in run.json; flags: `read_math_flags`."""
    text = [f"step {operations['step']} of {mode} on {device} ran in:"]
    groups: dict[str, list[Mapping]] = {"products": [], "other": [], "update": [], "casts": []}
    for row in operations["rows"]:
        kind = "update" if row["phase"] == "update" else "other"
        kind = "casts" if "->" in row["dtype"] else kind
        groups["products" if row["operation"] in PRODUCTS else kind].append(row)
    text += _products(groups["products"])[:3]
    text += [
        f"  {kind:<9}{_by_dtype(groups[kind])}" for kind in ("other", "update") if groups[kind]
    ]
    if groups["casts"]:
        elements = _totals(groups["casts"], "dtype").items()
        parts = [f"{name} {_in_units(total, *_COUNTS).strip()}" for name, total in elements]
        text.append(f"  casts    {', '.join(parts)} elements")
    text.append(f"  flags    {flag_line(flags, device)}")
    text.append(f"  memory   {memory_line(memory)}")
    return text + warnings(operations, mode)


def in_short(operations: Mapping, products: Mapping[str, float]) -> str:
    """Return a step's work and the dtypes of its products in one line; products: shares."""
    total = sum(row.get("flops", 0) for row in operations["rows"])
    text = f"{_in_units(total, *_COUNTS)}FLOP" if total else "no products seen"
    text += f"; products by calls: {shares_text(products)}" if products else ""
    return f"step {operations['step']}: {text} (whole table: -v, run.json)"


def warnings(operations: Mapping, mode: str) -> list[str]:
    """Return a line for FP32 products that the mode did not ask for, and one for overflows."""
    text = []
    if operations["not_in_16_bits"]:
        found = "; ".join(operations["not_in_16_bits"][:4])
        text.append(f"  WARNING  FP32 products that {mode} did not ask for: {found}")
    if operations["overflowed"]:
        found = _some(operations["overflowed"], 3)
        text.append(f"  WARNING  overflowed to inf: {found}; divided by it, a number becomes 0")
    return text


def flag_line(flags: Mapping, device: str) -> str:
    library = "cuda.matmul cudnn.conv cudnn.rnn" if device == "cuda" else "mkldnn.matmul"
    fp32 = {name: flags.get(f"{name}.fp32_precision", "?") for name in library.split()}
    same, each = set(fp32.values()), ", ".join(f"{name} {how}" for name, how in fp32.items())
    text = f"FP32 products {same.pop() if len(same) == 1 else each}"
    if device == "cuda":
        reduced = any(on for name, on in flags.items() if name.startswith("cuda.matmul.allow"))
        text += f", 16-bit products reduced in {'16 bits' if reduced else 'FP32'}"
        text += f", cudnn.benchmark {'on' if flags.get('cudnn.benchmark') else 'off'}"
    return text + f", deterministic {'on' if flags.get('deterministic_algorithms') else 'off'}"


def memory_line(memory: Mapping) -> str:
    """Return every kind with its bytes by dtype, without integers."""
    parts = []
    for kind in _KINDS:
        floats = [one for one in memory.get(kind, {}).items() if "int" not in one[0]]
        if floats:
            each = (
                f"{_SHORT.get(dtype, dtype)} {_in_units(size, *_BYTES)}" for dtype, size in floats
            )
            parts.append(f"{kind.replace('_', ' ')} {' + '.join(each)}")
    return ", ".join(parts)


def _products(rows: list[Mapping]) -> list[str]:
    flops = _totals(rows, "dtype", "flops")
    text, label = [], "products"
    for dtype, own in flops.items():
        names = list(dict.fromkeys(row["operation"] for row in rows if row["dtype"] == dtype))
        text.append(f"  {label:<9}{dtype} {_in_units(own, *_COUNTS)}FLOP: {_some(names)}")
        label = ""
    return text or ["  products none seen"]


def _by_dtype(rows: list[Mapping]) -> str:
    """Return the dtypes with the most elements, each with its largest operations."""
    parts = []
    for dtype in [*_totals(rows, "dtype")][:4]:
        own = [row for row in rows if row["dtype"] == dtype]
        parts.append(f"{dtype} {_some(list(_totals(own, 'operation')), 3)}")
    return "; ".join(parts)


def _totals(rows: list[Mapping], key: str, what: str = "elements") -> dict[str, int]:
    """Return the sums by the value of a key, the largest first."""
    totals: Counter[str] = Counter()
    for row in rows:
        totals[row[key]] += row.get(what, 0)
    return dict(totals.most_common())


def _some(names: list[str], most: int = 5) -> str:
    more = len(names) - most
    return ", ".join(names[:most] + ([f"{more} more"] if more > 0 else []))


_COUNTS, _BYTES = (1000, ("", "k", "M", "G", "T")), (1024, ("B", "KiB", "MiB", "GiB"))


def _in_units(value: float, step: int, units: tuple[str, ...]) -> str:
    """Return "1.2 M"; a small count ends with a blank, for the unit that follows."""
    power = 0
    while value >= step - 0.5 and power < len(units) - 1:
        value, power = value / step, power + 1
    return f"{value:.3g} {units[power]}"
