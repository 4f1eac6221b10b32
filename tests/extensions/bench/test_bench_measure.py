"""Windows, warm-up and the time split, on contenders that can be reckoned by hand."""

import json
import threading
import time
from itertools import chain, repeat

import pytest
import torch

from mprun.config.compose import compose_config
from mprun.extensions.bench import measure, runner
from mprun.extensions.bench.cases import Case
from mprun.extensions.bench.measure import (
    Contender,
    count_synchronisations,
    first_steps,
    host_seconds,
    measure_ceilings,
    steps_for,
    time_split,
    warm_up,
    window,
)
from mprun.extensions.bench.runner import (
    RotatingSource,
    RunnerContender,
    best_settings,
    rotating_batches,
)
from mprun.extensions.bench.session import Log
from mprun.extensions.bench.worker import Worker
from mprun.precision import pin_math_flags, read_math_flags
from mprun.record.async_copy import PinnedRing
from mprun.record.energy import meter_of

from ...helpers import TINY_LM

CPU = torch.device("cpu")
TINY = tuple(override for override in TINY_LM if override != "device=cpu")


class Sleeper(Contender):
    """Steps of known length; the loss is the number of steps taken."""

    samples_per_step, sample = 7, "image"

    def __init__(self, *lengths: float):
        self.lengths, self.taken = lengths, 0

    def step(self) -> torch.Tensor:
        time.sleep(self.lengths[min(self.taken, len(self.lengths) - 1)])
        self.taken += 1
        return torch.tensor(float(self.taken))

    def skipped(self) -> int:
        return 2


def make(mode: str = "fp32", *more: str, contender: str = "mprun", **extra):
    case = Case("tiny", (*TINY, *more), mode, contender, **extra)
    return RunnerContender(case, CPU)


@pytest.fixture(autouse=True)
def flags_as_before():
    yield
    pin_math_flags("ieee")


def test_a_window_holds_its_steps_and_no_more():
    sleeper = Sleeper(0.01)
    found = window(sleeper, CPU, 5)
    assert sleeper.taken == 6  # one before the clock starts
    assert (found["steps"], found["samples"], found["energy_mj"]) == (5, 35, None)
    # sleep never takes less than it is told to.
    assert found["seconds"] == found["wall_s"] >= 0.05
    assert found["cpu_s"] < found["wall_s"]


def test_the_first_twenty_losses_are_kept():
    found = first_steps(Sleeper(0.0), CPU)
    assert found["losses"] == [float(step) for step in range(1, 21)]
    assert found["skipped"] == 2 and len(found["seconds"]) == 20


def test_a_loss_that_is_not_finite_can_be_written_as_json(tmp_path):
    broken = Sleeper(0.0)
    broken.step = lambda: torch.tensor(float("nan"))
    assert window(broken, CPU, 1)["loss_is_finite"] is False
    log = Log(tmp_path / "bench.jsonl", 1.0)
    log.write("ready", equality=first_steps(broken, CPU))
    log.file.close()
    (line,) = (tmp_path / "bench.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["equality"]["losses"] == ["nan"] * 20


@pytest.fixture
def windows_of(monkeypatch):
    """Let windows take step times as given, the last one for ever."""

    def set_times(*seconds: float):
        times = chain(seconds, repeat(seconds[-1]))
        window = lambda contender, device, steps: {"seconds": next(times) * steps}  # noqa: E731
        monkeypatch.setattr(measure, "window", window)

    return set_times


def test_warm_up_ends_when_three_windows_agree_within_two_percent(windows_of):
    """After the first step: 0.2, 0.1, 0.101, 0.102; the last three are 2 % apart."""
    windows_of(0.5, 0.2, 0.1, 0.101, 0.102)
    found = warm_up(None, CPU, 60.0, steps=4)
    assert found["steady"] and found["steps"] == 1 + 4 * 4
    assert found["step_s"] == 0.101 and found["apart"] == pytest.approx(0.02)


def test_warm_up_that_never_settles_says_so():
    found = warm_up(Sleeper(0.001, 0.03, 0.001, 0.03, 0.001, 0.03), CPU, 0.0, steps=1)
    assert not found["steady"] and found["steps_per_window"] == 1


def test_a_window_grows_when_steps_become_shorter(windows_of):
    """0.1 s at first, so 3 steps last 0.3 s; 0.01 s later, so it takes 30."""
    windows_of(0.1, 0.01)
    found = warm_up(None, CPU, 60.0)
    assert found["steps_per_window"] == 30 == steps_for(0.01)


def test_mprun_as_a_contender_takes_the_steps_of_a_run_on_rotating_batches(build_run):
    """Equal to the bit: the same objects do the same arithmetic."""
    own = make("fp16_master_scaled")
    built = build_run(*TINY, "precision=fp16_master_scaled")
    built.data = built.task.data = RotatingSource(built.data, rotating_batches(built.data))
    expected = [float(built.task.train_step(index)["loss"]) for index in range(6)]
    assert [float(own.step()) for _ in range(6)] == expected
    assert (own.samples_per_step, own.sample) == (8, "token")


@pytest.mark.slow
def test_batches_that_are_rotated_lie_as_the_network_wants_them():
    settings = ("model=resnet50", "data.batch_size=2", "train.channels_last=on")
    own = RunnerContender(Case("images", settings, "amp", "mprun"), CPU)
    held, _ = own.built.data.train_batch(0)
    (images, _), *_ = own.task.load(0)
    assert held.is_contiguous(memory_format=torch.channels_last)
    assert images.data_ptr() == held.data_ptr()


def test_batches_rotate_and_a_schedule_does_not_end_with_its_steps():
    own = make("fp32", "train.steps=2", "optim.schedule=linear")
    batches = [own.built.data.train_batch(index)[0] for index in range(5)]
    assert batches[0] is batches[4]
    assert not torch.equal(batches[0], batches[1])
    losses = {float(own.step()) for _ in range(5)}
    assert len(losses) == 5  # each step moves the weights


def test_skipped_updates_are_counted():
    """2^24 times the loss overflows at once: the scale falls by half until gradients fit."""
    own = make("fp16_master_scaled", "scaler.init_scale=16777216", "scaler.max_scale=16777216")
    scale = own.task.loss_scale
    for _ in range(8):
        own.step()
    assert own.skipped() > 0
    assert float(scale.scale) == 2.0**24 / 2 ** own.skipped()


@pytest.mark.parametrize(
    ("model", "compiles"), [("resnet50", True), ("gpt", True), ("lstm_lm", False), ("dcgan", True)]
)
def test_the_best_settings_compile_what_peers_compile(model, compiles):
    config = compose_config([f"model={model}", "device=cuda"]).config
    best = best_settings(config, "cuda", compiled=True)
    assert ("train.compile=default" in best) == compiles
    assert f"train.cuda_graph={'auto' if compiles else 'on'}" in best
    assert "train.compile=default" not in best_settings(config, "cuda", compiled=False)
    # On a CPU where nothing is emulated.
    for half, found in (("native", compiles), ("emulated", False)):
        config = compose_config([f"model={model}", "device=cpu", f"cpu_half={half}"]).config
        assert ("train.compile=default" in best_settings(config, "cpu", compiled=True)) == found


def test_best_settings_that_are_refused_are_left_out_with_the_reason(monkeypatch):
    best = ["train.cuda_graph=on", "optim.implementation=loop"]
    monkeypatch.setattr(runner, "best_settings", lambda *_: [*best])
    own = make("amp", contender="mprun+")
    assert own.settings()["optimizer"] == "loop"
    ((setting, reason),) = own.left_out.items()
    assert setting == best[0] and reason.startswith("train.cuda_graph=on: a CUDA graph needs")


def test_the_time_split_adds_up_and_leaves_the_objects_alone():
    own = make("amp")
    learner, backward = own.task.learner, torch.Tensor.backward
    ends = threading.Event()

    def beside():
        x = torch.ones(300, 300, requires_grad=True)
        while not ends.is_set():
            (x @ x @ x).sum().backward()

    other = threading.Thread(target=beside)
    other.start()
    try:
        found = time_split(own.step, own.built.data, [learner], CPU, steps=3)
    finally:
        ends.set()
        other.join()
    parts = sum(found[name] for name in ("data", "forward", "backward", "update"))
    assert parts == pytest.approx(found["step"])
    assert all(found[name] > 0 for name in ("forward", "backward", "update"))
    assert "step" not in vars(learner) and torch.Tensor.backward is backward
    assert "train_batch" not in vars(own.built.data)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "amp"])
def test_the_time_split_puts_a_slow_phase_where_it_is(mode):
    """A backward pass counts once, though it calls itself under an emulation's function mode."""
    own = make(mode)
    batches = own.built.data
    last = next(own.task.learner.model.parameters())
    last.register_post_accumulate_grad_hook(lambda _: time.sleep(0.1))

    class Slow:
        def train_batch(self, index):
            time.sleep(0.05)
            return batches.train_batch(index)

        def __getattr__(self, name):
            return getattr(batches, name)

    own.task.data = slow = Slow()
    found = time_split(own.step, slow, [own.task.learner], CPU, steps=2)
    assert found["data"] >= 0.05 and found["backward"] >= 0.1
    assert found["data"] + found["backward"] + found["update"] <= found["step"]


def test_a_cpu_waits_for_nobody_and_host_time_is_that_of_single_steps():
    assert 0.004 <= host_seconds(Sleeper(0.004), CPU, repeats=3) < 1
    worker = Worker()
    worker.build(Case("tiny", TINY, "fp32", "mprun"), "cpu")
    found = worker.details(step_s=0.001, seconds=0.1)
    assert found["synchronisations"] is None and found["time_split"]["step"] > 0


def test_a_look_inside_has_memory_by_kind():
    """fp16_master_scaled: 4 bytes a weight and its gradient; all of them have copies here."""
    own = make("fp16_master_scaled")
    own.step()
    found = own.look_inside(CPU)
    count = sum(p.numel() for p in own.task.learner.model.parameters())
    for kind in ("parameters", "gradients"):
        assert found["memory_by_kind"][kind] == {"float32": 4 * count}
    assert found["time_split"]["step"] > 0


def test_a_ceiling_keeps_no_result():
    """Kept products of FP8 would fill a card within a window."""

    class Result:
        alive = 0

        def __init__(self):
            type(self).alive += 1
            most.append(type(self).alive)

        def __del__(self):
            type(self).alive -= 1

    most: list[int] = []
    measure._median_s(Result, CPU, 0.01)
    assert len(most) > 10 and max(most) == 1


@pytest.mark.slow
def test_ceilings_are_those_of_the_product_and_the_copy():
    found = measure_ceilings(CPU, seconds=0.1, size=64)
    assert list(found["flops"]) == ["fp32", "fp16", "bf16"]
    assert found["matmul_size"] == 64 and found["copy_bytes"] == 2**28
    assert all(rate > 0 for rate in found["flops"].values()) and found["bandwidth"] > 0
    assert all(1 <= n <= 5 for n in found["windows"].values())


@pytest.mark.gpu
def test_on_cuda_the_device_and_the_host_agree_on_a_window():
    """A window is far longer than what the host adds: launch of the first step, two waits."""
    device = torch.device("cuda", torch.cuda.current_device())
    case = Case("tiny", (*TINY, "train.cuda_graph=off"), "amp", "mprun")
    own = RunnerContender(case, device)
    for _ in range(20):
        own.step()
    found = window(own, device, steps_for(warm_up(own, device, 5.0)["step_s"]), meter_of(device))
    assert found["loss_is_finite"]
    assert 0.9 < found["seconds"] / found["wall_s"] <= 1.01
    assert count_synchronisations(lambda: own.run(5), device) == 0
    assert own.look_inside(device)["time_split"]["step"] > 0


@pytest.mark.gpu
def test_on_cuda_ceilings_leave_tf32_off():
    device = torch.device("cuda")
    found = measure_ceilings(device, seconds=1.0, size=1024)
    assert found["flops"]["fp16"] > found["flops"]["fp32"]
    assert read_math_flags()["cuda.matmul.fp32_precision"] == "ieee"


def test_without_a_gpu_nothing_is_counted():
    called = []
    assert count_synchronisations(lambda: called.append(1), CPU) is None
    assert called == []


@pytest.mark.gpu
def test_synchronisations_are_counted():
    values = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    device = values.device
    assert count_synchronisations(lambda: values.add_(1), device) == 0
    assert count_synchronisations(lambda: (values.sum().item(), values.nonzero()), device) >= 2
    assert count_synchronisations(lambda: PinnedRing(device, 1).send(values), device) == 0
    assert torch.cuda.get_sync_debug_mode() == 0
