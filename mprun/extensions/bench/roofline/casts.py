"""Casts to 8 bits and fewer as CUDA writes them: one kernel each, in the layouts that are read.

On shapes a cast runs as a CPU's single operations, which a GPU never runs. So `CastCosts` takes the
place of the observer of casts, and derives each cast from what the step asks for:

    the largest magnitude   reads the matrix, where one scale serves the tensor and this step finds
                            it: no number can be cast before all are known
    the cast                reads the matrix, writes a factor for each scale, and the codes once in
                            each layout in which a product reads them, or else decoded numbers

A Tensor Core of Hopper reads codes along the sum alone: the left matrix by rows, the right one by
columns. So an operand of two products is often written twice.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from mprun.extensions.bench.roofline.operations import OperationCosts, Write, bytes_of
from mprun.precision.block_formats import SCALES
from mprun.precision.scaled_products import Cast
from mprun.torch_private import storage_key


class CastCosts:
    """Write the rows of a step's casts. silent: a context in which nothing else is counted."""

    def __init__(self, write: Write, silent: Callable[[], AbstractContextManager[None]]):
        self._write, self._silent = write, silent
        # By storage of the codes: they, for their ids last as long; the row; layouts written.
        self._codes: dict[int, tuple[Tensor, OperationCosts, set[bool]]] = {}

    def read(self, left: Tensor, right: Tensor) -> None:
        """Let the casts of a product's operands, codes, write the layouts that it reads."""
        for operand in (left, right.t()):
            known = self._codes.get(storage_key(operand))
            if known is not None:
                _, row, layouts = known
                by_rows = operand.is_contiguous()
                row.bytes += 0 if by_rows in layouts else bytes_of(operand)
                layouts.add(by_rows)

    def seen(self, matrix: Tensor, take: Callable[[], Cast]) -> Cast:
        """Write the rows of a cast, which `take` computes."""
        with self._silent():
            found = take()
        operand, scale = found.operand, SCALES[found.operand.scale]
        of_tensor = operand.block == (0, 0) and not scale.is_kept and operand.scale != "none"
        if of_tensor or scale.two_levels:
            self._write("amax", torch.float32, 0, bytes_of(matrix) + 4, 1, None)
        written = bytes_of(found.factor)
        if operand.decoded:
            written += found.values.numel() * operand.decoded_to.itemsize
        row = self._write("scaled cast", torch.float32, 0, bytes_of(matrix) + written, 1, None)
        for codes in () if operand.decoded else (found.values, found.turned):
            if codes is not None:  # CUDA itself writes a second layout into memory of its own
                self._codes[storage_key(codes)] = codes.detach(), row, set()
        return found
