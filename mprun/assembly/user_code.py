"""The user's own functions: found by name, called, and their networks tried before step 1.

The caller has made sure that the user supplied the name (mprun.config.trust). Any exception of
such a function becomes bad input that names it, in one line. Networks are tried on two samples:
shapes in FP32, then one pass in the mode.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from mprun.errors import BadInput, MprunError, raised
from mprun.precision import ForwardContext, NoLossScale, ieee_fp32
from mprun.precision.audit import Audit, Contradiction
from mprun.precision.module_dtypes import those_that_match
from mprun.precision.random_states import random_states, restore_random_states
from mprun.prepared.prepared_model import PreparedModel
from mprun.record.memory import ran_out
from mprun.spelling import nearest


class Factory:
    """The function named by `name`, package.module:function; BadInput if there is none.

    key: "data.factory" or "model.factory", for messages. The current folder is searched first.
    """

    def __init__(self, key: str, name: str):
        self.key, self.name = key, name
        self.function = _found(key, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function; raise BadInput if it does not take these arguments or raises."""
        bind = None
        with suppress(TypeError, ValueError):  # some compiled functions have no signature
            bind = inspect.signature(self.function).bind
        try:
            if bind is not None:
                bind(*arguments, **options)
        except TypeError as error:
            given = ", ".join([*("data" for _ in arguments), *options])
            raise BadInput(f"{self}: {error} (it is called with {given})") from None
        with blaming(str(self)):
            return self.function(*arguments, **options)

    def __str__(self) -> str:
        return f"{self.key}={self.name}"


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Raise BadInput that begins with `what` for errors inside that may be its fault."""
    try:
        yield
    except (MprunError, Contradiction):
        raise
    except (Exception, SystemExit) as error:
        if ran_out(error):
            raise
        raise BadInput(f"{what}: {raised(error)}") from error


def _found(key: str, name: str) -> Callable:
    module_name, _, function_name = name.partition(":")
    # `python -m mprun` has put it there, the installed command has not.
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        parents = {*accumulate(module_name.split("."), "{}.{}".format)}
        if isinstance(error, ModuleNotFoundError) and error.name in parents:
            where = f"(looked in {os.getcwd()} and where Python looks)"
            raise BadInput(f"{key}={name}: no module named '{error.name}' {where}") from None
        raise BadInput(f"{key}={name}: importing the module failed: {raised(error)}") from error
    if not hasattr(module, function_name):
        hint = nearest(function_name, [word for word in vars(module) if word[0] != "_"])
        raise BadInput(f"{key}={name}: {module_name} has no '{function_name}'{hint}")
    function = getattr(module, function_name)
    if not callable(function):
        raise BadInput(f"{key}={name}: is a {type(function).__name__}, must be a function")
    return function


_FEW = 2  # samples, and time steps


@dataclass(frozen=True, slots=True)
class Trial:
    """Throw-away networks of one task, and the data that they are tried on.

    name: what to blame, "model.factory=...". networks: one, or generator and discriminator.
    latent_size: length of a generator's codes. carries_state: a language model may have a state.
    """

    name: str
    task: str
    networks: Sequence[nn.Module]
    data: Any  # a Source, with the sizes that its task needs
    latent_size: int = 0
    carries_state: bool = True

    def run(self, forward_context: ForwardContext, overrides: Mapping) -> None:
        """Raise BadInput if the networks do not fit the data, or cannot compute in the mode.

        First they run in FP32 and eval mode, as in an evaluation; then forward and backward in the
        mode. forward_context: one that no run uses, because it counts. overrides: module-name
        pattern -> dtype. It takes one batch of the data and restores every random state.
        """
        device = forward_context.device
        before = random_states(device)
        try:
            batch = self.data.train_batch(0)
            first = batch[0][:_FEW].clone()
            # The arguments of a network beside its input.
            more = (batch[1][:_FEW, 0],) if self.task == "speech" else ()
            if self.task == "language_model":
                first = first[:, :_FEW]
            for network in self.networks:
                network.to(device).eval()
            with torch.no_grad(), ieee_fp32():
                self._forward(first, more, "in FP32")
            for network in self.networks:
                matching = {p: overrides[p] for p in those_that_match(network, overrides)}
                scale, key = NoLossScale(device), "precision.overrides"
                PreparedModel(
                    network.train(), forward_context, scale, matching, of_run=True, key=key
                )
            mode = f"in precision={forward_context.policy.name}"
            audit = Audit(forward_context)
            with audit.watching(step=True), forward_context:
                outputs = self._forward(first, more, mode)
                total = torch.stack([output.float().sum() for output in outputs]).sum()
                with blaming(f"{self.name}: backward {mode}"):
                    total.backward()
            audit.check_happened()
        except Contradiction as error:
            raise BadInput(f"{self.name} {error}") from error
        finally:
            restore_random_states(before, device)

    def _forward(self, first: Tensor, more: tuple[Tensor, ...], how: str) -> list[Tensor]:
        """Return the outputs from which a loss is computed."""

        def call(what: str, network: nn.Module, *inputs):
            with blaming(f"{self.name}: {what} of {shape_of(inputs[0])} {how}"):
                return network(*inputs)

        if self.task == "language_model":
            return self._language_model(first, call)
        if self.task == "gan":
            return self._gan(first, call)
        outputs = call("forward", self.networks[0], first, *more)
        if self.task == "speech":
            outputs = outputs[0]
        if self.task == "classification":
            # In training the outputs may include logits of auxiliary heads.
            several = isinstance(outputs, tuple) and self.networks[0].training
            for logits in outputs if several else (outputs,):
                self._expect("forward", logits, (len(first), self.data.num_classes))
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    def _language_model(self, tokens: Tensor, call) -> list[Tensor]:
        state, found = None, []
        for what in ("forward(tokens, None)", "forward(tokens, state)"):
            output = call(what, self.networks[0], tokens, state)
            if not isinstance(output, tuple | list) or len(output) != 2:
                raise BadInput(
                    f"{self.name}: {what} must return (logits, state), but returned "
                    f"{shape_of(output)}"
                )
            logits, new = output
            self._expect(what, logits, (*tokens.shape, self.data.vocab_size))
            if not isinstance(new, tuple | list) or not all(isinstance(s, Tensor) for s in new):
                raise BadInput(
                    f"{self.name}: {what} must return the state as a tuple of tensors (empty if no "
                    f"state is carried on), but returned {shape_of(new)} as state"
                )
            if new and not self.carries_state:
                raise BadInput(
                    f"{self.name}: {what} must return () as state with model.carries_state=false, "
                    f"but returned a state of {len(new)} tensors"
                )
            if state is not None and [s.shape for s in state] != [s.shape for s in new]:
                raise BadInput(f"{self.name}: the state must have the same shapes in every batch")
            state = tuple(part.detach() for part in new)
            found.append(logits)
        return found

    def _gan(self, real: Tensor, call) -> list[Tensor]:
        generator, discriminator = self.networks
        codes = torch.zeros(len(real), self.latent_size, device=real.device)
        images = call("generator", generator, codes)
        if not isinstance(images, Tensor) or images.shape != real.shape:
            returned = f"generator of {shape_of(codes)} returned {shape_of(images)}"
            raise BadInput(
                f"{self.name}: {returned}, but the images of the data are {[*real.shape]}"
            )
        logits = call("discriminator", discriminator, images)
        if not isinstance(logits, Tensor) or logits.shape != real.shape[:1]:
            raise BadInput(
                f"{self.name}: discriminator of {shape_of(images)} must return logits "
                f"[{len(real)}], but returned {shape_of(logits)}"
            )
        return [logits]

    def _expect(self, what: str, logits: object, least: tuple[int, ...]) -> None:
        """Check the shape `least`; its last dimension may be larger (padding)."""
        fits = (
            isinstance(logits, Tensor)
            and logits.is_floating_point()
            and logits.shape[:-1] == least[:-1]
            and logits.shape[-1] >= least[-1]
        )
        if not fits:
            raise BadInput(
                f"{self.name}: {what} must return floating-point logits {list(least)}, but "
                f"returned {shape_of(logits)}"
            )


def shape_of(value: object) -> str:
    """Return `float32 [2, 3]` for a tensor, the type of anything else."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"
