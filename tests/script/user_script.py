"""Every public call as a typed script of a user has it; see test_types."""

from collections.abc import Mapping
from pathlib import Path
from typing import assert_type

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer

import mprun
from mprun.comparison.findings import Group
from mprun.comparison.notebook import ComparedRuns, RecordedRun, RecordedRuns
from mprun.extensions.diagnosis.first_nonfinite import Finding
from mprun.extensions.diagnosis.observation import Event
from mprun.numerics.exponent_shares import Shares
from mprun.numerics.probe_record import LearnerProbe, ProbeRecord, TensorStats
from mprun.precision import (
    DynamicLossScale,
    LossScale,
    PrecisionPolicy,
    StaticLossScale,
    Update,
    get_policy,
)
from mprun.prepared import OptimizerSteps


class Net(nn.Module):
    """A model of one's own: what `prepare` gives back has its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.encoder(inputs).relu()
        return self.score(features)

    def score(self, features: Tensor) -> Tensor:
        found: Tensor = self.head(features)
        return found


def train(folder: Path, precision: str, seed: int) -> mprun.Run:
    """One model, one optimizer, recorded."""
    torch.manual_seed(seed)
    model = Net()
    model, optimizer = mprun.prepare(model, Adam(model.parameters()), precision=precision)
    assert_type(model, Net)
    assert_type(optimizer, Adam)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with mprun.Run(folder, optimizer, config={"lr": 1e-3}, seed=seed, data="random") as run:
        assert_type(run, mprun.Run)
        for _ in range(3):
            inputs = torch.randn(16, 8)
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
            optimizer.step()
            run.step(loss, error=loss.sqrt())
            scheduler.step()
        run.log(rate=scheduler.get_last_lr()[0])
        run.evaluate(loss=loss, error=0.5)
    assert_type(run.directory, Path)
    assert_type(run.status, str)
    assert_type(run.cause, str | None)
    assert_type(run.steps, int)
    assert_type(run.rewind(), int)
    return run


def prepare_in_every_form() -> None:
    """Return the results of `prepare`, each with the type of what was given."""
    teacher = mprun.prepare(Net(), precision="amp")
    assert_type(teacher, Net)
    assert_type(mprun.prepare([Net(), Net()], precision=get_policy("amp")), list[Net])
    several = [Net(), Net()]
    both = SGD([own for each in several for own in each.parameters()], lr=0.1)
    assert_type(mprun.prepare(several, both, "fp16_master"), tuple[list[Net], SGD])
    generator, critic = Net(), nn.Linear(8, 1)
    (generator, critic), optimizers = mprun.prepare(
        (generator, critic), [SGD(each.parameters(), lr=0.1) for each in (generator, critic)]
    )
    assert_type(generator, Net)
    assert_type(critic, nn.Linear)
    assert_type(optimizers, list[SGD])
    named: Mapping[str, Optimizer] = dict(zip("gc", optimizers, strict=True))
    run = mprun.Run("named", named, config={}, seed=0, modules=["head"], probe_every=0)
    run.close(status="preempted", cause="an example")
    model = Net()
    mprun.prepare(
        model,
        SGD(model.parameters(), lr=0.1),
        "amp",
        scaler=StaticLossScale(128.0) if model.training else "dynamic",
        overrides={"head": "fp32", "encoder": torch.float16},
        native=False,
    )


def look(precision: str) -> None:
    """Probe a step, ask what the optimizer did, explain a step that fails."""
    model = Net()
    plain, scale = SGD(model.parameters(), lr=0.1), DynamicLossScale()
    model, optimizer = mprun.prepare(model, plain, precision, scaler=scale)

    def step(factor: float = 1.0) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(4, 8) * factor).square().mean()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        return loss

    record = mprun.probe(step, optimizer, modules=["encoder", "head"])
    assert_type(record, ProbeRecord)
    assert_type(record.learners, dict[str, LearnerProbe])
    gradients = record.learners["model"].total("weight_gradients")
    assert_type(gradients, TensorStats | None)
    assert gradients is not None
    assert_type(gradients.counts.shares(), Shares)
    steps = mprun.state_of(optimizer)
    assert_type(steps, OptimizerSteps)
    assert_type(steps.steps, int)
    assert_type(steps.scale, LossScale)
    assert_type(steps.policy, PrecisionPolicy)
    assert_type(steps.scaler_name, str)
    assert_type(steps.optimizer, Optimizer)
    assert_type(steps.module, nn.Module)
    assert_type(steps.named(), dict[str, Tensor])
    assert_type(steps.last, Update | None)
    assert steps.last is not None
    assert_type(steps.last.found_inf, Tensor | None)
    assert_type(steps.last.loss_scale, Tensor)
    finding = mprun.explain(lambda: step(1e30), optimizer, steps=2)
    assert_type(finding, Finding)
    assert_type(finding.verdict, str)
    assert_type(finding.module, str | None)
    assert_type(finding.event, Event | None)
    assert finding.event is not None
    assert_type(finding.event.operation, str)


def read(folder: Path) -> None:
    """Read what was recorded."""
    runs = mprun.load(folder)
    assert_type(runs, RecordedRuns)
    assert_type(runs[0], RecordedRun)
    assert_type(runs[:2], RecordedRuns)
    assert_type([run.metrics["loss"] for run in runs], list[float])
    run = mprun.load(runs[0].path).one
    assert_type(run, RecordedRun)
    assert_type((run.path, run.mode, run.seed), tuple[Path, str | None, int | None])
    assert_type((run.status, run.last_step), tuple[str | None, int])
    assert_type(run.columns("train"), dict[str, np.ndarray])
    comparison = mprun.compare(folder, margin=0.02, baseline="fp32")
    assert_type(comparison, ComparedRuns)
    assert_type(comparison.groups, list[Group])
    assert_type(comparison.groups[0].rows[0].verdict.name, str)
    assert_type(comparison.columns(), dict[str, np.ndarray])
    assert_type(comparison.write(folder.with_name("report")), Path)


def misspelt() -> None:
    """mypy reports each; an unused "ignore" would be reported as well."""
    runs = mprun.load("mine")
    mprun.lode("mine")  # type: ignore[attr-defined]
    print(runs.metrics)  # type: ignore[attr-defined]
    mprun.prepare(Net(), precision=torch.float16)  # type: ignore[call-overload]
    mprun.prepare(Net(), precison="amp")  # type: ignore[call-overload]


if __name__ == "__main__":
    for seed in range(3):
        for mode in ("fp32", "amp"):
            train(Path("mine"), mode, seed)
    prepare_in_every_form()
    look("amp")
    read(Path("mine"))
