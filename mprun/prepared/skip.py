"""A step that moves nothing if gradients are not finite, whichever optimizer takes it.

The optimizer's own step runs in any case. It is prepared before, and that is undone after it:

    fused kernels       read found_inf, and skip by themselves
    the host decides    gradients are hidden: on a CPU, where reading the flag costs nothing, and
                        where a step could not be undone on the device
    all others          what they move is copied, and put back on the device; values of sparse
                        gradients are 0
"""

from __future__ import annotations

import inspect
import sys
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.torch_update import (
    held_by,
    host_decides,
    initialise_state,
    is_fused,
    moved_by,
    moves_used_rows_alone,
    put_back_where,
)
from mprun.prepared.shards import local_of
from mprun.torch_private import sparse_indices, sparse_values


class Skip:
    """Keep the coming step of an optimizer from moving anything, until it is undone."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._waits = False  # as it was said

    def undo(self) -> None:
        """Put gradients and groups back, and on the device what a skipped step has moved."""
        self._undo.close()

    def prepare(self, optimizer: Optimizer, found: Tensor) -> None:
        """Let the coming step of `optimizer` move nothing if `found`, float32, 0-dim, is not 0."""
        sparse = [own for own in held_by(optimizer) if own.grad is not None and own.grad.is_sparse]
        waits = found.device.type == "cpu" or (sparse and not moves_used_rows_alone(optimizer))
        if is_fused(optimizer):
            if len(optimizer.state) < len(held_by(optimizer)):
                initialise_state(optimizer)
            optimizer.found_inf = found  # type: ignore[attr-defined]  # its kernels skip
            self._undo.callback(optimizer.__dict__.pop, "found_inf", None)
        elif waits or host_decides(optimizer):
            # Before its first applied step state is still to appear.
            if not waits and not self._waits and any(optimizer.state.values()):
                self._waits = True
                _say_that_it_waits(optimizer)
            if found.item():
                self.hide_gradients(optimizer)
        else:
            for own in sparse:  # a copy of the table would be needed to undo the step
                self.hide_values(own, found)
            moved = [local_of(own) for own in moved_by(optimizer, without=sparse)]
            self._undo.enter_context(put_back_where(found, moved))

    def hide_values(self, own: Tensor, found: Tensor) -> None:
        """Let a sparse gradient be 0 for the coming step if `found` is not: its rows stay."""
        whole = own.grad
        assert whole is not None
        values = torch.where(found != 0, 0.0, sparse_values(whole))
        own.grad = torch.sparse_coo_tensor(
            sparse_indices(whole),
            values,
            whole.shape,
            is_coalesced=whole.is_coalesced(),
            check_invariants=False,  # which would wait
        )
        self._undo.callback(setattr, own, "grad", whole)

    def hide_gradients(self, optimizer: Optimizer) -> None:
        """Hide the gradients: torch's optimizers then change nothing, not even counters.

        Other optimizers count in their groups, which are put back.
        """
        hidden = [(own, own.grad) for own in held_by(optimizer)]
        groups = [(group, {**group}) for group in optimizer.param_groups]
        for own, _ in hidden:
            own.grad = None

        def show() -> None:
            for own, gradient in hidden:
                own.grad = gradient
            for group, before in groups:
                group.update(before)

        self._undo.callback(show)


def _say_that_it_waits(optimizer: Optimizer) -> None:
    accepts = inspect.signature(type(optimizer)).parameters
    remedies = [f"{name}=True" for name in ("fused", "capturable") if name in accepts]
    remedy = f"; with {' or '.join(remedies)} it does not" if remedies else ""
    print(
        f"mprun: {type(optimizer).__name__}: each step waits for the device, because only the host "
        f"can skip it{remedy}",
        file=sys.stderr,
    )
