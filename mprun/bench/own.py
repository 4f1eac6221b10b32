"""mprun itself as a contender: the step that `mprun` runs, with its default and its best settings.

Nothing of a run's record is written, and there are no evaluations: what is timed is the step of
the loop with the learning rate set and skipped updates counted, as `mprun.training.loop` does it.
"""

import time

import torch

from mprun.bench.contender import Case, RotatingSource, in_channels_last, rotating_batches
from mprun.build import Built
from mprun.config.compose import compose_config
from mprun.config.schema import RunConfig
from mprun.errors import BadInput
from mprun.training.run import prepare

_CONVOLUTIONAL = ("alexnet", "resnet50", "dcgan", "conv_autoencoder")
_PREPARED_STEPS = 12  # a graph is captured after fewer


def best_settings(model: str, device_type: str, compiled: bool) -> list[str]:
    """Overrides of the variant "mprun+" for a model, before what cannot be combined is left out.

    compiled: with torch.compile, for networks and devices where it helps.
    """
    settings = ["optim.implementation=single_pass"]
    if model in _CONVOLUTIONAL:
        settings.append("train.channels_last=on")
    if device_type == "cuda":
        # torch.compile hands an nn.LSTM back to eager as a whole.
        compiled = compiled and model in _CONVOLUTIONAL
        # Beside compiled kernels a graph may gain nothing, and holds a second set of activations:
        # it is taken where the step's own times say that it pays.
        settings.append(f"train.cuda_graph={'auto' if compiled else 'on'}")
        if compiled:
            settings.append("train.compile=default")
    return settings


class Own:
    """A case as mprun runs it. See `mprun.bench.contender.Contender`.

    left_out: best settings that were refused -> the reason. built, config: what is run, for
    measurements that look inside.
    """

    def __init__(self, case: Case, device: torch.device, best: bool = False):
        plain = (*case.overrides, f"precision={case.mode}", f"device={device.type}")
        self.left_out: dict[str, str] = {}
        if best:
            model = compose_config(plain).config.model.name
            settings = best_settings(model, device.type, case.extra.get("compile", True))
            self.config, self.built = self._built_with(plain, settings)
        else:
            self.config, self.built = _build(plain)
        if not case.real_data:
            source, batches = self.built.data, rotating_batches(self.built.data)
            if self.built.task.channels_last:  # as the tuned peers hold theirs
                batches = [in_channels_last(batch) for batch in batches]
            self.built.data = RotatingSource(source, batches)
            self.built.task.data = self.built.data
        self.task = self.built.task
        self.samples_per_step, self.sample = self.task.samples_per_step, self.task.sample
        self.first_use_s: float | None = None
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._index = 0
        if hasattr(self.built.data, "defer_wait"):
            self.defer_wait = self.built.data.defer_wait

    @property
    def settings(self) -> dict:
        """What differs from the plainest step, as configured and as it turned out."""
        train = self.config.train
        chosen = {
            "cuda_graph": train.cuda_graph,
            "compile": train.compile,
            "channels_last": train.channels_last,
            "autotune": train.autotune,
            "optimizer": self.config.optim.implementation,
        }
        chosen |= self.built.stepper.description
        return chosen | ({"left_out": self.left_out} if self.left_out else {})

    @property
    def replays(self) -> bool:
        """Whether steps are now replayed from a CUDA graph."""
        return self.built.stepper.description.get("cuda_graph") == "on"

    def running(self):
        """A context for many steps: all their work on one stream, without a change per step."""
        return self.built.stepper.on_stream()

    def prepare(self) -> None:
        """Take the steps within which compilation, capture and autotuning happen."""
        before = time.perf_counter()
        for _ in range(_PREPARED_STEPS):
            self.step()
        if self.built.device.type == "cuda":
            torch.cuda.synchronize(self.built.device)
        self.first_use_s = time.perf_counter() - before

    def step(self) -> torch.Tensor:
        """One training step on the next batch."""
        return self._advance(self.built.stepper.step)

    def eager_step(self) -> torch.Tensor:
        """The same by the task alone, without graph: for measurements that look inside a step."""
        return self._advance(self.task.train_step)

    def skipped(self) -> int:
        """Updates skipped since the beginning; waits for the device."""
        return int(self._skipped)

    def weights(self) -> dict[str, torch.Tensor]:
        """What the optimizers update, by name: master weights where there are some."""
        found = {}
        for learner, own in self.task.learners.items():
            optimizer = own.optimizer
            updated = zip(optimizer.names, optimizer.updated, strict=True)
            found |= {f"{learner}.{name}": tensor.detach() for name, tensor in updated}
            found |= {f"{learner}.{row.name}": row.tensor.detach() for row in optimizer.rows}
        return found

    def _advance(self, take) -> torch.Tensor:
        index, rate = self._index, self.built.rate
        # A schedule ends with its run, a bench does not.
        rate.apply(min(index, self.built.steps - 1), self._skipped)
        metrics = take(index, measure=False)
        if "found_inf" in metrics:
            self._skipped.add_(metrics["found_inf"].to(torch.int64))
        self._index += 1
        return metrics["loss"]

    def _built_with(self, plain: tuple[str, ...], best: list[str]) -> tuple[RunConfig, Built]:
        """Built with as many of the best settings as go together; the others are noted."""
        while True:
            try:
                return _build((*plain, *best))
            except BadInput as error:
                key = str(error).partition("=")[0]
                refused = [setting for setting in best if setting.partition("=")[0] == key]
                if not refused:
                    raise
                self.left_out[refused[0]] = str(error)
                best = [setting for setting in best if setting not in refused]


def _build(overrides: tuple[str, ...]) -> tuple[RunConfig, Built]:
    config = compose_config(overrides).config
    device = torch.device("cpu" if config.device == "cpu" else "cuda")
    return config, prepare(config, device, config.threads)


def make_own(case: Case, device: torch.device, best: bool) -> Own:
    """mprun with its default or its best settings; BadInput for what cannot be built."""
    return Own(case, device, best)
