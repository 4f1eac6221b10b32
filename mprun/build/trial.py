"""Networks tried on two samples before step 1: shapes in FP32, then one pass in the mode."""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mprun.build.factories import is_out_of_memory
from mprun.data.source import Source
from mprun.errors import BadInput, MprunError, raised
from mprun.precision import Arithmetic, PrecisionPolicy, cast_model, ieee_fp32
from mprun.precision.module_patterns import those_that_match
from mprun.precision.random_states import random_states, restore_random_states

_FEW = 2  # samples, and time steps


@dataclass(frozen=True, slots=True)
class Trial:
    """Throw-away networks of one task, and what they are tried on.

    name: what to blame, "model.factory=...". networks: one, or generator and discriminator.
    latent_size: of a generator.
    """

    name: str
    task: str
    networks: Sequence[nn.Module]
    data: Source
    device: torch.device
    latent_size: int = 0

    def run(self, policy: PrecisionPolicy, arithmetic: Arithmetic, overrides: Mapping) -> None:
        """Raise BadInput if the networks do not fit the data, or cannot compute in the mode.

        First in FP32 and eval mode, as an evaluation does; then forward and backward in the mode.
        arithmetic: one that no run uses, because it counts. overrides: module-name pattern ->
        dtype. Takes one batch of the data; leaves every random state as it was.
        """
        with _random_states_kept(self.device):
            first = self.data.train_batch(0)[0][:_FEW].clone()
            if self.task == "language_model":
                first = first[:, :_FEW]
            for network in self.networks:
                network.to(self.device).eval()
            with torch.no_grad(), ieee_fp32():
                self._forward(first, None, "in FP32", nullcontext)
            for network in self.networks:
                matching = {p: overrides[p] for p in those_that_match(network, overrides)}
                cast_model(network.train(), policy, matching)
            mode = f"in precision={policy.name}"
            with arithmetic:
                outputs = self._forward(first, policy, mode, arithmetic.autocast)
                total = sum(output.float().sum() for output in outputs)
                self._run(f"backward {mode}", total.backward)
            if arithmetic.emulations and not arithmetic.rerouted():
                raise BadInput(
                    f"{self.name} precision={policy.name}: no operation of the network ran in "
                    f"{arithmetic.kind()}; there is nothing to compare"
                )

    def _forward(self, first: Tensor, policy, how: str, autocast) -> list[Tensor]:
        """The outputs that a loss is made of."""

        def cast(tensor: Tensor) -> Tensor:
            return tensor if policy is None else policy.cast_inputs(tensor)

        def call(what: str, network: nn.Module, *inputs):
            with autocast():
                return self._run(f"{what} of {_shape(inputs[0])} {how}", network, *inputs)

        if self.task == "language_model":
            return self._language_model(first, call)
        if self.task == "gan":
            return self._gan(cast(first), call, cast)
        outputs = call("forward", self.networks[0], cast(first))
        if self.task == "classification":
            self._expect("forward", outputs, (len(first), self.data.num_classes))
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    def _language_model(self, tokens: Tensor, call) -> list[Tensor]:
        state, found = None, []
        for what in ("forward(tokens, None)", "forward(tokens, state)"):
            output = call(what, self.networks[0], tokens, state)
            if not isinstance(output, tuple | list) or len(output) != 2:
                raise BadInput(
                    f"{self.name}: {what} returned {_shape(output)}, must be (logits, state)"
                )
            logits, new = output
            self._expect(what, logits, (*tokens.shape, self.data.vocab_size))
            if not isinstance(new, tuple | list) or not all(isinstance(s, Tensor) for s in new):
                raise BadInput(
                    f"{self.name}: {what} returned {_shape(new)} as state, must be a tuple of "
                    "tensors (empty where nothing is carried on)"
                )
            if state is not None and [s.shape for s in state] != [s.shape for s in new]:
                raise BadInput(f"{self.name}: the state changes its shapes from batch to batch")
            state = tuple(part.detach() for part in new)
            found.append(logits)
        return found

    def _gan(self, real: Tensor, call, cast) -> list[Tensor]:
        generator, discriminator = self.networks
        codes = cast(torch.zeros(len(real), self.latent_size, device=self.device))
        images = call("generator", generator, codes)
        if not isinstance(images, Tensor) or images.shape != real.shape:
            raise BadInput(
                f"{self.name}: generator of {_shape(codes)} returned {_shape(images)}, the images "
                f"of the data are {list(real.shape)}"
            )
        logits = call("discriminator", discriminator, images)
        if not isinstance(logits, Tensor) or logits.shape != real.shape[:1]:
            raise BadInput(
                f"{self.name}: discriminator of {_shape(images)} returned {_shape(logits)}, must "
                f"be logits [{len(real)}]"
            )
        return [logits]

    def _expect(self, what: str, logits: object, least: tuple[int, ...]) -> None:
        """The shape `least`, of whose last part there may be more (padding)."""
        fits = (
            isinstance(logits, Tensor)
            and logits.is_floating_point()
            and logits.shape[:-1] == least[:-1]
            and logits.shape[-1] >= least[-1]
        )
        if not fits:
            raise BadInput(
                f"{self.name}: {what} returned {_shape(logits)}, must be floating logits "
                f"{list(least)}"
            )

    def _run(self, what: str, function, *inputs):
        try:
            return function(*inputs)
        except MprunError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BadInput(f"{self.name}: {what}: {raised(error)}") from error


@contextmanager
def _random_states_kept(device: torch.device):
    before = random_states(device)
    try:
        yield
    finally:
        restore_random_states(before, device)


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"
