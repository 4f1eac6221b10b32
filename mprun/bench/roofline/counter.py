"""A dispatch mode that writes a row for each kernel, and finds what BatchNorm can fold."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.bench.roofline.operations import bytes_of, costs, tensors_in
from mprun.bench.roofline.rows import FORMATS, Row

_RELU = {"relu", "leaky_relu"}
_RELU_BACKWARD = {"relu backward", "leaky_relu_backward"}


class Counter(TorchDispatchMode):
    """Within it every operation adds its rows to `rows`. The tensors are fake ones.

    fp32_math: "ieee" or "tf32", how FP32 products are computed. updating: set by the owner where
    the step is in its optimizer.

    Foldable into a BatchNorm kernel are a ReLU (or leaky ReLU) of a BatchNorm's output, its
    gradient, the addition of a residual to such an output, of which the residual is still read,
    and the addition of the two gradients that meet there, of which one is still read.
    """

    def __init__(self, fp32_math: str):
        super().__init__()
        self.fp32_math, self.updating = fp32_math, False
        self.rows: list[Row] = []
        # By id of the storage; holding the tensors keeps the ids theirs, and fake ones are small.
        self._normalised: dict[int, Tensor] = {}
        self._activated: dict[int, Tensor] = {}
        self._residual_shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and self.updating:
            return 1.0  # the step counter of an optimizer, which lies on the host
        # What returns nothing only changes values, of which there are none; some such operators
        # (fused optimizers) do not know tensors without values.
        results = func(*args, **kwargs) if func._schema.returns else None
        for kind, flops, size, launches in costs(func, args, kwargs, results):
            kind = self._kind(kind, args, results)
            folded = self._folded(kind, args, results)
            form = self._form(next(tensors_in(args), None)) if flops else ""
            self.rows.append(Row(kind, self.phase, form, flops, size, launches, folded))
        return results

    @property
    def phase(self) -> str:
        """Of what runs now: "forward", "backward" or "update"."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "update" if self.updating else "forward"

    def write(self, kind: str, dtype: torch.dtype, flops: int, size: int, launches: int) -> None:
        """A row of something that is no operator."""
        form = self._format(dtype) if flops else ""
        self.rows.append(Row(kind, self.phase, form, flops, size, launches))

    def _form(self, tensor: Tensor | None) -> str:
        return "fp32" if tensor is None else self._format(tensor.dtype)

    def _format(self, dtype: torch.dtype) -> str:
        form = FORMATS.get(dtype, "fp32")
        return "tf32" if form == "fp32" and self.fp32_math == "tf32" else form

    def _kind(self, kind: str, args, results) -> str:
        if kind != "add" or not isinstance(results, Tensor) or results.dim() < 4:
            return kind
        two = sum(t.shape == results.shape for t in tensors_in(args)) == 2
        if not two or self.phase == "update":
            return kind
        return "gradient add" if self.phase == "backward" else "residual add"

    def _folded(self, kind: str, args, results) -> int | None:
        """The bytes left where this kernel can be folded into a BatchNorm's, else None."""
        if kind == "batch norm":
            _keep(self._normalised, results[0])
        elif kind in _RELU and _has(self._normalised, args[0]):
            _keep(self._activated, args[0])
            _keep(self._activated, results)
            return 0
        elif kind == "residual add":
            sides = [t for t in tensors_in(args) if t.dim() >= 4]
            if any(_has(self._normalised, side) for side in sides):
                _keep(self._normalised, results)
                self._residual_shapes.add(results.shape)
                return bytes_of(results)
        elif kind in _RELU_BACKWARD and _has(self._activated, args[1]):
            return 0
        elif kind == "gradient add" and results.shape in self._residual_shapes:
            return bytes_of(results)
        return None


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _keep(known: dict[int, Tensor], tensor: Tensor) -> None:
    known[_key(tensor)] = tensor


def _has(known: dict[int, Tensor], tensor: Tensor) -> bool:
    return _key(tensor) in known
