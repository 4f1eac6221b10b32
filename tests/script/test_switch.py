"""A switch of modes goes on with the same weights, state and random bits, and refuses the rest."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mprun
from mprun.comparison.load import load_run
from mprun.precision.policy import build_policy, get_policy, policy_values, usual_scaler
from mprun.record.run_directory import read_config
from mprun.record.run_record import read_record

from ..distributed.of_a_rank import environment_of
from ..distributed.test_same_bits import each_rank
from ..helpers import assert_same_bits, raises_line
from .loops import classified
from .networks import batches, loss_of, net, prepared, take_step, train

BOTH_WAYS = [("nvfp4", "bf16_master"), ("nvfp4", "fp32"), ("fp8_delayed", "mxfp8")]
PAIRS = [*BOTH_WAYS, *((after, before) for before, after in BOTH_WAYS)]
PAIRS += [("fp32", "fp16_master"), ("amp", "fp16_master_scaled")]
PAIRS += [("fp16_master_scaled", "amp_bf16"), ("bf16_master", "amp_bf16")]


class Layers(nn.Module):
    """Linear layers that formats of 4 and 8 bits take, BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Flatten(), nn.Linear(25, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Linear(32, 32), nn.ReLU()),
        )
        self.head = nn.Linear(32, 4)

    def forward(self, images):
        return self.head(self.body(images))


def adam(parameters, lr=0.01):
    return torch.optim.Adam(parameters, lr)


def made(mode, state=None, optimizer_state=None, scaler=None):
    torch.manual_seed(3)  # `train` sets the same, and random bits are of the newest seed
    model = Layers()
    if state is not None:
        model.load_state_dict(state)
    model, optimizer = prepared(mode, model, make=adam, lr=0.01, scaler=scaler)
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    return model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_steps_after_a_switch_are_those_of_a_model_prepared_from_that_state(before, after):
    model, optimizer = made(before)
    train(model, optimizer, steps=3)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    mprun.switch(model, after)
    switched = train(model, optimizer, steps=4, seed=1)
    ends = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    scale = ends[1].get("loss_scale")
    del model, optimizer  # the random bits of the only model alive begin with the script's seed
    scaler = usual_scaler(before)  # which goes on
    other, own = made(after, *kept, scaler)
    assert train(other, own, steps=4, seed=1) == switched
    assert_same_bits(other.state_dict(), ends[0])
    assert_same_bits(own.state_dict()["state"], ends[1]["state"])
    assert own.state_dict().get("loss_scale") == scale
    # The control: one more step in the mode before has other bits.
    third, last = made(before, *kept)
    assert train(third, last, steps=4, seed=1) != switched


def test_random_bits_go_on_after_a_part_in_another_mode():
    """The numbers of calls count on: a second part in NVFP4 does not draw those of the first."""
    draws = []
    for middle in ("bf16_master", None):
        model, optimizer = made("nvfp4")
        train(model, optimizer, steps=2)
        first = optimizer.state_dict()["draws"]
        if middle is not None:
            mprun.switch(model, middle)
            mprun.switch(model, "nvfp4")
        train(model, optimizer, steps=2)
        draws.append((first, optimizer.state_dict()["draws"], model.state_dict()))
        del model, optimizer
    assert_same_bits(*draws)
    assert draws[0][0]["calls"] == 2 and draws[0][1]["calls"] == 4


def test_a_loss_scale_goes_on_and_a_skipped_step_undoes_statistics():
    model, optimizer = made("fp16_master_scaled")
    train(model, optimizer, steps=2)
    mprun.switch(model, "amp")
    before = copy.deepcopy(model.state_dict())
    scale = float(mprun.state_of(optimizer).scale.scale)
    take_step(optimizer, lambda: loss_of(model) * torch.inf)
    assert_same_bits(model.state_dict(), before)
    assert float(mprun.state_of(optimizer).scale.scale) == scale / 2


def test_state_in_eight_bits_goes_on():
    torch.manual_seed(0)
    narrow = {"update": {"rounding": "nearest", "state_dtype": "bf16"}}
    policies = [
        build_policy(mode, policy_values(get_policy(mode)) | narrow)
        for mode in ("mxfp8", "bf16_master")
    ]
    model, optimizer = prepared(policies[0], Layers(), make=adam, lr=0.01)
    train(model, optimizer, steps=2)
    states = optimizer.state_dict()
    mprun.switch(model, policies[1])
    assert_same_bits(optimizer.state_dict()["state"], states["state"])
    train(model, optimizer, steps=2)
    assert int(optimizer.state_dict()["narrow"]["updates"]) == 4


def test_the_new_mode_is_watched_like_the_first():
    model, optimizer = made("nvfp4")
    train(model, optimizer, steps=5)
    mprun.switch(model, "fp16_master")
    train(model, optimizer, steps=5)
    products = mprun.state_of(optimizer).models[0].audit.result()["products"]
    assert products["forward e2m1"] == 3 * 2  # of the first three calls: two of three layers
    assert products["forward fp16"] == 3 * 3
    assert mprun.state_of(optimizer).policy.name == "fp16_master"
    # A mode whose products never run is told, too.
    mprun.switch(model, "mxfp8")
    for layer in (model.body[1], model.body[5], model.head):
        layer.__dict__["forward"].plain = lambda x, own=layer: x @ own.weight.T
        layer.__dict__["forward"].inside = layer.__dict__["forward"].plain
    with pytest.raises(RuntimeError, match="no operation of the network ran in"):
        train(model, optimizer, steps=3)


def test_models_of_one_call_switch_together():
    torch.manual_seed(0)
    first, second = nn.Linear(16, 16), nn.Linear(16, 4)
    second.bias = nn.Parameter(first.bias[:4].detach().clone())
    shared = nn.Sequential(first, second), nn.Sequential(first, nn.ReLU())
    mprun.prepare([*shared], precision="bf16_master")
    with raises_line(ValueError, "model: was not passed to mprun.prepare", "together"):
        mprun.switch(shared[0], "fp32")
    assert shared[0](torch.ones(2, 16)).equal(shared[0](torch.ones(2, 16).bfloat16().float()))
    mprun.switch([*shared], "fp32")
    odd = torch.full((2, 16), 1 + 2.0**-12)  # which BF16 does not hold
    assert not shared[0](odd).equal(shared[0](odd.bfloat16().float()))


def test_a_compiled_model_follows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    compiled = torch.compile(model, backend="eager")
    mprun.prepare(compiled, precision="bf16_master", native=True)
    inputs = torch.randn(3, 8)
    outputs = [compiled(inputs) for _ in range(5)]
    mprun.switch(compiled, "fp32")
    wide = [compiled(inputs) for _ in range(5)]
    assert all(one.equal(model(inputs)) for one in wide) and not wide[-1].equal(outputs[-1])


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        ("bf16_stochastic", "fp32", ["bf16_stochastic has no FP32 master weights"]),
        ("fp32", "bf16_naive", ["precision='bf16_naive'", "has no FP32 master weights"]),
        ("fp32", "fp32", ["fp32 is in force already"]),
        ("bf16_master", "amp", ["precision='amp': needs a loss scale", "scaler='dynamic'"]),
        ("fp32", "fp12", ["precision mode 'fp12': must be one of"]),
        ("fp32", 3, ["precision=3: must be the name of a mode, or a policy"]),
        ("fp32", "tf32", ["precision='tf32'", "a CPU has no TF32"]),
    ],
)
def test_what_cannot_go_on_is_refused_and_changes_nothing(before, after, parts):
    model, optimizer = made(before)
    with raises_line(ValueError, *parts):
        mprun.switch(model, after)
    assert mprun.state_of(optimizer).policy.name == before
    train(model, optimizer, steps=1)


def test_a_model_that_is_not_prepared_and_one_in_its_call_are_refused():
    with raises_line(ValueError, "model: was not passed to mprun.prepare"):
        mprun.switch(nn.Linear(2, 2), "fp32")
    model, _ = prepared("bf16_master", net())
    model.body.register_forward_hook(lambda *given: mprun.switch(model, "fp32"))
    with raises_line(RuntimeError, "between two steps"):
        model(next(batches(1))[0])


@pytest.mark.slow
def test_a_run_records_the_switch(tmp_path):
    directories = []
    for at in (None, 3):
        model, optimizer = made("nvfp4")
        with mprun.Run(tmp_path, optimizer, config={}, seed=0, log_every=2) as run:
            for step, (images, labels) in enumerate(batches(6)):
                if step == at:
                    mprun.switch(model, "bf16_master")
                loss = take_step(optimizer, classified, model, images, labels)
                run.step(loss)
            run.evaluate(loss=loss)
            # The copy to go back to is one of the present mode.
            assert run.rewind() >= (at or 0)
        directories.append(run.directory)
    plain, switched = map(read_record, directories)
    assert "switched" not in plain and plain["precision"]["mode"] == "nvfp4"
    assert switched["switched"] == {"4": "bf16_master"}
    assert switched["precision"]["mode"] == "nvfp4, bf16_master after step 3"
    (entry,) = read_config(directories[1])["precision"]["switch"]
    assert entry["at"] == 3 and entry["to"]["name"] == "bf16_master"
    assert plain["config_hash"] != switched["config_hash"]
    assert {"forward e2m1", "forward bf16"} <= switched["audit"]["products"].keys()
    modes = [load_run(one, read_record(one)).mode for one in directories]
    assert modes == ["nvfp4", "nvfp4, bf16_master after step 3"]


def be_of_two(rank, world, port, _, folder):
    """Be a rank of a script that switches to a mode with random bits within DDP."""
    os.environ.update(environment_of(rank, world, port))
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = Layers()
    torch.manual_seed(rank)  # scripts seed each rank differently
    model, optimizer = prepared("bf16_master", model, make=adam, lr=0.01)
    called = DistributedDataParallel(model)
    found = []
    for step, (images, labels) in enumerate(batches(4, seed=rank)):
        if step == 2:
            mprun.switch(called, "nvfp4")
        take_step(optimizer, classified, called, images, labels)
        found.append([own.detach().clone() for own in model.parameters()])
    draws = optimizer.state_dict()["draws"]
    products = mprun.state_of(optimizer).models[0].audit.result()["products"]
    torch.save({"weights": found, "draws": draws, "products": products}, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_switch_together_and_draw_the_bits_of_one_seed(tmp_path):
    one, other = each_rank(be_of_two, 2, None, tmp_path)
    assert_same_bits(one["weights"], other["weights"])
    assert one["draws"] == other["draws"] == {"seed": 0, "calls": 4}
    assert one["products"]["forward e2m1"] == other["products"]["forward e2m1"] == 2 * 2
