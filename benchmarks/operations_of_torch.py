"""All of torch's operations in 16 bits here: docs/reference/operations.md, and its proof.

torch has a database of its operations with inputs for each (`torch.testing`, needs the package
expecttest). Each operation with a 16-bit kernel on CUDA runs on up to eight of its inputs, forward
and backward, as in a network on a CPU. Every single call to torch's library is compared with the
same call in float64. Its result must be the float64 one rounded once, within four times the error
of the same call in float32.

    python benchmarks/operations_of_torch.py [--write]

prints what is wrong (exit code 1 then); --write makes docs/reference/operations.md.
"""

import argparse
import logging
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mprun.precision.autocast import cuda_lists
from mprun.precision.emulated_operations import PRODUCTS
from mprun.precision.emulation import HalfEmulation, route_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "operations.md"
SAMPLES = 8
F32, F64 = torch.float32, torch.float64
WIDE = {F32: torch.complex64, F64: torch.complex128}
# Not wrong, with the reason.
EXCEPTIONS = {
    "aten.div.Tensor_mode": "a step function: FP32 and float64 may stand on two sides of a step",
    "aten.floor_divide.default": "as div.Tensor_mode",
    "aten.nextafter.default": "the neighbour in 16 bits has none in float64",
    "torch_nn._linear_cross_entropy_batch_chunked.default": "torch's own fused loss, run as it is",
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default": "as the one above",
}
# Samples that a CPU cannot run, with the reason.
NOT_HERE = {
    "fft.": "CUDA has FP16 for lengths that are powers of two; refused on a CPU",
    "jiterator": "exists on CUDA alone",
    "torch.ops.aten._flash_attention_forward": "exists on CUDA alone",
    "torch.ops.aten._efficient_attention_forward": "exists on CUDA alone",
    "to_sparse": "its samples compare sparse tensors, which torch's CPU build cannot",
    "sparse.sampled_addmm": "no CPU kernel in any dtype but float32 and float64",
    "sparse.mm.reduce": "its samples mix layouts that the check cannot widen",
}
# CUDA sums these with atomic operations in the dtype of the gradient, in no fixed order: FP32 sums
# are close to its results (torch.use_deterministic_algorithms lists them).
ATOMIC = (
    *("index_add", "index_reduce", "scatter_add", "scatter_reduce", "put", "grid_sample"),
    *("interpolate", "pad.reflect", "pad.replicate", "adaptive_avg_pool", "adaptive_max_pool"),
    *("fractional_max_pool", "max_unpool", "max_pool3d", "avg_pool3d", "upsample_"),
)


@dataclass(slots=True)
class Calls:
    """The calls of one library operation: how often compared, and the errors in ulps."""

    count: int = 0
    wrong: dict[str, float] = field(default_factory=dict)


class Compared(TorchDispatchMode):
    """A mode that compares each call with 16-bit operands to float32 and float64."""

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.half, self.within = half, ""
        self.calls: dict[str, Calls] = defaultdict(Calls)
        self.ways: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.done: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        has_half = any(dtype is self.half for dtype in _dtypes((args, kwargs)))
        plain = func.is_view or torch.Tag.nondeterministic_seeded in func.tags
        if not has_half or plain or "empty" in str(func):
            return func(*args, **kwargs)
        before = [_widened((args, kwargs), self.half, dtype) for dtype in (F64, F32)]
        result = func(*args, **kwargs)
        phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        self.ways[self.within, phase].add(way(func))
        try:
            exact, single = (func(*args, **kwargs) for args, kwargs in before)
        except (RuntimeError, ValueError):
            return result  # nothing to compare with
        self.done[self.within, phase] += 1
        calls = self.calls[str(func)]
        calls.count += 1
        triples = zip(tree_leaves(result), tree_leaves(exact), tree_leaves(single), strict=True)
        for own, reference, float32 in triples:
            if isinstance(own, Tensor) and own.dtype is self.half and own.numel():
                off = excess(
                    *(t.to_dense() if t.is_sparse else t for t in (own, reference, float32))
                )
                if off > 0 and str(func) not in EXCEPTIONS:
                    calls.wrong[self.within] = max(off, calls.wrong.get(self.within, 0))
        return result


def excess(own: Tensor, exact: Tensor, single: Tensor) -> float:
    """Return the most ulps by which `own` is further from `exact` than allowed; 0 if none."""
    info = torch.finfo(own.dtype)
    exact, wide, single = exact.double(), own.double(), single.double()
    exponent = exact.abs().clamp_min(info.smallest_normal).log2().floor()
    ulp = info.eps * 2.0**exponent
    slack = 4 * (single - exact).abs().nan_to_num(0) + exact.abs() * 2.0**-21
    off = (wide - exact).abs() - 0.5 * ulp - slack
    # Allowed are the rounded value itself, overflow, and values that float32 turns into nan.
    fine = (wide == exact.to(own.dtype).double()) | (single.abs() >= info.max)
    fine |= wide.isnan() & single.isnan()
    return float((off / ulp).nan_to_num(float("inf")).masked_fill(fine, 0).clamp_min(0).max())


def way(func) -> str:
    """Return how a library operation with 16-bit operands runs on a CPU."""
    route = route_of(func)
    if route is None:
        return "native" if torch.Tag.pointwise in func.tags else "moves"
    if route[1] is HalfEmulation._refuse:
        return "refused"
    return "product" if route[0].removesuffix("_") in PRODUCTS else "FP32"


def _dtypes(tree) -> Iterator[torch.dtype]:
    return (leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _widened(tree, half: torch.dtype, dtype: torch.dtype):
    def one(leaf):
        if isinstance(leaf, torch.dtype):
            return dtype if leaf in (half, F32) else leaf
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_complex():
            return leaf.to(WIDE[dtype])
        return leaf.to(dtype) if leaf.dtype in (half, F32) else leaf.clone()

    return tree_map(one, tree)


def database() -> list:
    """Return the operations of torch's database, in alphabetical order."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    thaw()
    return sorted(op_db, key=name_of)


def thaw() -> None:
    """Allow setting flags (of cuDNN, say) again, which importing torch's tests forbids."""
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True


def name_of(op) -> str:
    """Return an operation's public name, followed by the variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def samples(op, dtype: torch.dtype) -> list:
    """Return up to `SAMPLES` of its inputs on a CPU, through float32 if its generator needs it."""
    grad = op.supports_autograd and dtype in op.backward_dtypesIfCUDA
    torch.manual_seed(0)
    try:
        found = list(op.sample_inputs("cpu", dtype, requires_grad=grad))
    except (RuntimeError, NotImplementedError, TypeError):
        found = [s.transform(lambda v: _as(v, dtype, grad)) for s in op.sample_inputs("cpu", F32)]
    return found[:SAMPLES]


def _as(value, dtype: torch.dtype, grad: bool):
    fits = isinstance(value, Tensor) and value.dtype is F32
    return value.detach().to(dtype).requires_grad_(grad) if fits else value


def run(op, sample) -> list[torch.dtype]:
    """Run one forward and backward pass; return the dtypes of the results."""
    results = [r for r in tree_leaves(op(sample.input, *sample.args, **sample.kwargs))]
    tensors = [r for r in results if isinstance(r, Tensor)]
    ends = [t for t in tensors if t.requires_grad and t.is_floating_point()]
    if ends:
        weights = [torch.linspace(0.5, 1.5, t.numel()).to(t.dtype).view(t.shape) for t in ends]
        torch.autograd.backward(ends, weights)
    return [t.dtype for t in tensors]


def compare(dtype: torch.dtype) -> tuple[Compared, dict[str, str]]:
    """Compare all operations with a kernel of that dtype on CUDA; also return those that raised."""
    torch.set_num_threads(1)
    compared, raised = Compared(dtype), {}
    for op in database():
        if dtype not in op.dtypesIfCUDA or F32 not in op.dtypesIfCUDA:
            continue
        compared.within = name_of(op)
        for sample in samples(op, dtype):
            try:
                with HalfEmulation(dtype), compared, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    run(op, sample)
            except Exception as error:
                raised.setdefault(name_of(op), f"{type(error).__name__}: {error}".split("\n")[0])
    return compared, {n: why for n, why in raised.items() if not n.startswith(tuple(NOT_HERE))}


def under_autocast(op) -> str:
    """Return the dtype that amp computes in, for float32 and for float16 inputs."""
    lists, found = cuda_lists(), []
    for dtype in (F32, torch.float16):
        try:
            several = [s for s in samples(op, dtype)[:2]]
            with HalfEmulation(), torch.autocast("cpu", torch.float16), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kinds = {d for s in several for d in run(op, s) if d.is_floating_point}
        except Exception:
            kinds = set()
        found.append(kinds)
    del lists
    names = {F32: "FP32", torch.float16: "FP16"}
    single, half = (next(iter(kinds)) if len(kinds) == 1 else None for kinds in found)
    if single is half:
        return names.get(single, "")
    return "as its inputs" if (single, half) == (F32, torch.float16) else ""


WAYS = ("product", "FP32", "native", "moves", "refused")


def row(op, compared: Compared) -> list[str]:
    """Return an operation's line in the table."""
    name = name_of(op)
    checked = "/".join(str(compared.done[name, phase]) for phase in ("forward", "backward"))
    if torch.float16 not in op.dtypesIfCUDA:
        return [f"`{name}`", "refused", "", "no kernel", under_autocast(op), checked]
    why = next((NOT_HERE[n] for n in NOT_HERE if name.startswith(n)), None)
    ways = [
        ", ".join(w for w in WAYS if w in compared.ways[name, phase])
        for phase in ("forward", "backward")
    ]
    there = "atomic sums" if any(a in name for a in ATOMIC) else "FP32, rounded"
    if set(filter(None, ways)) <= {"moves"}:
        there = "moves"
    here = ["see above", ""] if why else [ways[0] or "moves", ways[1]]
    return [f"`{name}`", *here, there, under_autocast(op), checked]


HEAD = """\
# Every operation, in 16 bits

Made by `benchmarks/operations_of_torch.py --write` with torch {torch}; a slow test repeats it. The
rows are the operations of torch's own database (`torch.testing`) that CUDA has in FP32.

- **CPU**, forward and for the gradients: how a 16-bit mode (`fp16_*`, `bf16_*`) computes it here.
  *product*, *FP32*: operands widened to FP32, one rounding on store; *native*: torch's own 16-bit
  kernel, which computes in FP32 inside; *moves*: moves or selects numbers; *refused*: an error,
  because CUDA has no 16-bit kernel of it. Several: made of several calls, each of which rounds.
- **CUDA**: *FP32, rounded* is what the CPU is held to. *atomic sums*: gradients, or sums over an
  index, are added up in the 16-bit format in no fixed order (`torch.use_deterministic_algorithms`
  lists them), so that CUDA may lose what FP32 sums keep here.
- **amp**: the dtype of the result under FP16 autocast, on a CPU, where it follows CUDA's lists, and
  on CUDA alike; nothing: several, or no floating-point number.
- **checked**: calls to the library, forward/backward, whose 16-bit result was compared with
  float64. Each is the float64 result rounded once, give or take four times the error of the same
  call in FP32.

{rows} operations; {forward:,} calls compared in FP16 forward and {backward:,} backward. BF16 is
compared by the same test. Operators of other libraries run as they are, except torchvision's, which
are widened as torch's. Exceptions:

{exceptions}

| operation | CPU | gradients | CUDA | amp | checked |
|---|---|---|---|---|---|
"""


def page(compared: Compared) -> str:
    """Return docs/reference/operations.md."""
    rows = [row(op, compared) for op in database() if F32 in op.dtypesIfCUDA]
    counts = {
        phase: sum(n for (_, each), n in compared.done.items() if each == phase)
        for phase in ("forward", "backward")
    }
    head = HEAD.format(
        torch=torch.__version__.partition("+")[0],
        rows=len(rows),
        exceptions="\n".join(f"- `{n}`: {why}" for n, why in (EXCEPTIONS | NOT_HERE).items()),
        **counts,
    )
    return head + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def main() -> int:
    """Compare both formats; with --write write the page of FP16."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="make docs/reference/operations.md")
    options = parser.parse_args()
    wrong = False
    for dtype in (torch.float16, torch.bfloat16):
        compared, raised = compare(dtype)
        for name, calls in sorted(compared.calls.items()):
            if calls.wrong:
                wrong = True
                print(f"{dtype} {name}: {calls.wrong}")
        for name, why in raised.items():
            wrong = True
            print(f"{dtype} {name}: {why}")
        print(f"{dtype}: {sum(c.count for c in compared.calls.values())} calls compared")
        if options.write and dtype is torch.float16:
            PAGE.write_text(page(compared), encoding="utf-8")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
