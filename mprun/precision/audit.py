"""The record of what an arm computed: watched in its first steps, then in one of a thousand.

A mode says in which dtype products run. Code inside a model can silently change that
(`torch.autocast` in its `forward`, TF32 switched on later), and then a comparison compares
something else. So every arm is watched, FP32 too. A contradiction ends the arm with one line; the
counts become part of the record.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from mprun.precision.emulated_operations import PRODUCTS
from mprun.precision.flops import flops
from mprun.precision.forward_context import ForwardContext
from mprun.precision.policy import dtype_name, read_math_flags
from mprun.precision.recurrent import LAYERS
from mprun.precision.uncast import percent
from mprun.torch_private import OpOverload, TorchDispatchMode, graph_task, schema_of, version_of

FIRST = 3  # steps watched one after the other
RARELY = 1000  # afterwards one step in this many
_MANY = 0.1  # of a model's parameters; fewer may be tables that are added
_NEARLY_ALL = 0.9  # of the multiply-adds; then nothing is said
_NAMED = 3  # kinds of products in other dtypes
_KINDS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_ATTENTION = [f"_scaled_dot_product_{kind}{end}" for kind in _KINDS for end in ("", "_backward")]
_RECURRENT = [
    *("mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_cudnn_rnn", "_cudnn_rnn_backward"),
    *(layer.__name__ for layer in LAYERS),
]
_LAYERS = "recurrent layers"  # whose multiply-adds are not known
_SCALED = ("scaled_mm", "scaled_attention", "scaled_attention_backward")
_WATCHED = frozenset([*PRODUCTS, *_SCALED, "mkldnn_linear", *_ATTENTION, *_RECURRENT])


def _kind_of(name: str) -> str:
    """Return the kind of a product by the name of its operation, for a person."""
    if name in _RECURRENT:
        return _LAYERS
    if "conv" in name:
        return "convolutions"
    return "attention" if "attention" in name else "matrix products"


class Contradiction(RuntimeError):
    """The computation contradicts the mode; the message is one line."""


def is_due(number: int) -> bool:
    """Return whether the call, pass or step after `number` others is watched."""
    return number < FIRST or number % RARELY == 0


def next_due(number: int) -> int:
    """Return the next number after `number` that is due."""
    number += 1
    return number if number < FIRST else number + -number % RARELY


class Audit(TorchDispatchMode):
    """A mode that counts the products inside it by phase and dtype.

    Enter it after the emulation, which computes 16-bit requests of the model in FP32: the audit
    counts the requests. A recurrent layer that the emulation computes whole counts as one product
    each way. It costs some microseconds an operation, and waits for nothing.

    Args:
        forward_context: that of the arm.
        parameters: name -> parameter, checked for writes around each entry; none for a model that
            checks this itself. A write through `.data` is not seen.
    """

    def __init__(
        self, forward_context: ForwardContext, parameters: Mapping[str, Tensor] | None = None
    ):
        super().__init__()
        self.forward_context, self.parameters = forward_context, parameters or {}
        # By (phase, dtype or name of a format).
        self.products: Counter[tuple[str, torch.dtype | str]] = Counter()
        # Floating-point operations in modes that cast products, by dtype or format, and kind.
        self.work: Counter[tuple[torch.dtype | str, str]] = Counter()
        # Places where tensors left the model beside its outputs, "module.attribute".
        self.left: set[str] = set()
        self.written: set[str] = set()  # names of parameters that a call of the model wrote to
        # "module: operation" of operations in forward that met FP32 beside 16 bits, and rounded it.
        self.rounded: set[str] = set()
        self.destroyed: set[str] = set()  # inputs and buffers with numbers that a cast destroys
        self.optimizers: set[str] = set()  # classes of those that updated its parameters
        self.watched = 0  # calls and passes, or steps
        self.saw_empty = False  # a product of nothing, which does not count
        self.earlier: Mapping[str, Any] = {}  # the result of earlier attempts of the same run
        self.before: Mapping[str, Any] = {}  # that of the modes before a switch to this one
        policy = forward_context.policy
        held = () if policy.matmul is None else (own.dtype for own in policy.matmul.formats)
        self._wanted = dict.fromkeys((*forward_context.half_dtypes, *held))
        wide = (torch.float32, torch.float64, torch.complex64, torch.complex128)
        self._allowed = {*wide, *self._wanted}
        if torch.float16 in self._wanted:
            self._allowed.add(torch.complex32)
        self._versions: list[int] = []
        self._has_told = False

    def __enter__(self) -> Self:
        self._versions = [version_of(own) for own in self.parameters.values()]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        pairs = zip(self.parameters.items(), self._versions, strict=True)
        self.written |= {name for (name, own), before in pairs if version_of(own) != before}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = schema_of(func).name.rpartition("::")[2]
        if name.removesuffix("_") in _WATCHED:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            if name in PRODUCTS and not all(own.numel() for own in tensors[:3]):
                self.saw_empty = True
                return func(*args, **kwargs)
            dtypes = [own.dtype for own in tensors]
            dtype = next((d for d in dtypes if d.is_floating_point or d.is_complex), None)
            if dtype is not None:
                backward = graph_task() != -1
                # A product of casts says their formats, "e2m1 x e4m3"; attention "e4m3-attention".
                formats = next((a for a in args if name in _SCALED and isinstance(a, str)), None)
                kind = formats.partition(" ")[0] if formats else dtype
                self.products["backward" if backward else "forward", kind] += 1
                # In a script's backward pass it may be the script's product, after the model.
                is_own = not backward or self in self.forward_context.watchers
                # Of casts a GPU may multiply decoded numbers, in a dtype of their own.
                if dtype not in self._allowed and is_own and formats is None:
                    self._refuse(name, dtype)
                if self.forward_context.policy.matmul is not None:
                    found = func(*args, **kwargs)
                    self.work[kind, _kind_of(name)] += flops(name, func, args, kwargs, found)
                    return found
        return func(*args, **kwargs)

    @contextmanager
    def watching(self, *, step: bool = False) -> Iterator[None]:
        """Count the products of a block that ends without error, and check torch's switches.

        step: count where the context is entered, in forward and backward passes.
        """
        self._check_flags()
        before = self.forward_context.recurrent_layers()
        with ExitStack() as stack:
            if step:
                self.forward_context.watchers.append(self)
                stack.callback(self.forward_context.watchers.remove, self)
            else:
                stack.enter_context(self)
            yield
        recurrent = self.forward_context.recurrent_layers() - before
        self.products.update(recurrent)
        self.work.update({(dtype, _LAYERS): 0 for _, dtype in recurrent})
        self.watched += 1

    def check_happened(self) -> str | None:
        """Return a note if overrides leave no product in the mode: such an arm is a control; or if
        no product has met parameters that the mode would have cast.

        Only blocks watched to their end count; without one the question stays open.

        Raises:
            Contradiction: No product ran in the mode, and there are no overrides.
        """
        missing, forward_context = self._of_mode().get("unused"), self.forward_context
        mode = forward_context.policy.name
        if missing is None:
            unmet = forward_context.unmet
            if not self.watched or sum(unmet.values()) < _MANY:
                return None
            largest = max(unmet, key=lambda name: unmet[name])
            return (
                f"precision={mode}: no product with {largest} was cast ({100 * unmet[largest]:.0f} "
                "% of the parameters): the forward of its module does not multiply by it"
            )
        what = f"precision={mode}: no operation of the network ran in {missing}"
        if not forward_context.overridden:
            raise Contradiction(f"{what}; there is nothing to compare")
        return f"{what}, because of overrides; this arm is a control"

    def what_stays(self) -> str | None:
        """Return a line, once, if operands of less than nine tenths of the multiply-adds were cast.

        It counts those of the blocks watched so far, in both passes.
        """
        products, total = self.forward_context.policy.matmul, self.work.total()
        if products is None or not total or self._has_told:
            return None
        self._has_told = True
        formats = {own.name for own in products.formats}
        stay = Counter({key: n for key, n in self.work.items() if n and key[0] not in formats})
        cast = total - stay.total()
        if cast >= _NEARLY_ALL * total:
            return None
        others = ", ".join(
            f"{kind} in {self._name(dtype)} {percent(n, total)}"
            for (dtype, kind), n in stay.most_common(_NAMED)
        )
        beside = " outside of recurrent layers" if any(k == _LAYERS for _, k in self.work) else ""
        return (
            f"{self.forward_context.policy.name} casts {percent(cast, total)} of the multiply-adds"
            f"{beside}; others: {others}"
        )

    def _unused(self, found: Mapping[str, Any]) -> str | None:
        """Return the part of the mode that no product of `found` ran in, or None."""
        forward_context = self.forward_context
        seen = {name.partition(" ")[2] for name in found["products"]}
        if not seen and self.saw_empty:
            return None
        missing = forward_context.missing()
        policy = forward_context.policy
        parts = [] if policy.matmul is None else [{own.name for own in policy.matmul.formats}]
        parts += [] if policy.attention is None else [{*policy.attention.names}]
        if all(seen & part for part in parts or [{*map(self._name, self._wanted)}]):
            missing = None
        elif seen and self._wanted and missing is None:
            missing = forward_context.kind()
        return missing

    def counts(self) -> dict[str, int]:
        """Return the products of this attempt as run.json has them: {"forward fp16": 3}."""
        return {f"{phase} {self._name(dtype)}": n for (phase, dtype), n in self.products.items()}

    def result(self) -> dict[str, Any]:
        """Return the counts in the form of run.json, with those of earlier attempts and modes."""
        return combined([self.before, self._of_mode()]) if self.before else self._of_mode()

    def _of_mode(self) -> dict[str, Any]:
        """Return the counts of this mode, those of earlier attempts added."""
        own = {
            "watched": self.watched,
            "products": self.counts(),
            "left_the_model": self.left,
            "written_in_a_call": self.written,
            "rounded_in_a_call": self.rounded,
            "destroyed_by_a_cast": self.destroyed,
            "optimizers": self.optimizers,
        }
        found = combined([self.earlier, own])
        found.pop("unused", None)
        missing = self._unused(found) if found["watched"] else None
        return found if missing is None else found | {"unused": missing}

    def _name(self, dtype: torch.dtype | str) -> str:
        """Return the name of a product's dtype; FP32 products may be TF32."""
        if isinstance(dtype, str):
            return dtype
        is_tf32 = dtype is torch.float32 and self.forward_context.policy.fp32_math == "tf32"
        return "tf32" if is_tf32 else dtype_name(dtype)

    def _check_flags(self) -> None:
        """Raise Contradiction if FP32 products on a GPU contradict the mode; a CPU does not read
        these switches."""
        if self.forward_context.device.type != "cuda":
            return
        wanted = self.forward_context.policy.fp32_math
        for name, value in read_math_flags().items():
            if name.startswith("cu") and name.endswith("fp32_precision") and value != wanted:
                raise Contradiction(
                    f"precision={self.forward_context.policy.name}: torch.backends.{name} was "
                    f"changed to {value!r} during the run; must stay {wanted!r}"
                )

    def _refuse(self, operation: str, dtype: torch.dtype) -> None:
        found, *others = map(dtype_name, (dtype, *self._wanted, torch.float32))
        allowed = ", ".join(others)
        raise Contradiction(
            f"precision={self.forward_context.policy.name}: {operation} inside the model computes "
            f"in {found}, must compute in {allowed}; remove torch.autocast and casts from forward"
        )


# Names of places in a model, see docs/modes.md.
LISTS = ("left_the_model", "written_in_a_call", "rounded_in_a_call", "destroyed_by_a_cast")


def combined(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several results of `Audit.result`: add up the counts, list each name once.

    `not_watched` comes from the newest result that has it, `unused` is there if all have it.
    """
    products: Counter[str] = Counter()
    names = (*LISTS, "optimizers")
    found: dict[str, Any] = {"watched": 0, "products": {}} | dict.fromkeys(names, [])
    every = [result for result in results if result.get("watched")]
    if every and all("unused" in result for result in every):
        found["unused"] = every[-1]["unused"]
    for result in results:
        found["watched"] += result.get("watched", 0)
        products.update(result.get("products", {}))
        found |= {name: sorted({*found[name], *result.get(name, ())}) for name in names}
        if "not_watched" in result:
            found["not_watched"] = result["not_watched"]
    return found | {"products": dict(sorted(products.items()))}
