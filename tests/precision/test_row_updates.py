"""Updates of used rows are those of torch's dense optimizers, bit for bit; nothing else moves."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mprun.models.lstm import RowTable
from mprun.precision import DynamicLossScale, StaticLossScale, cast_model, get_policy
from mprun.precision.row_updates import RowUpdate

from ..helpers import assert_same_bits, making, mixed

# All of the table and the gathered rows are multiples of 32 numbers: torch's CPU kernel for
# p + alpha g rounds alpha g in the rest of a 16-bit tensor otherwise than in its vectors.
ROWS, WIDTH = 12, 8


class Lookup(nn.Module):
    """A table in front of a layer, or the same with a dense embedding."""

    def __init__(self, dense=False, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(ROWS, WIDTH)
        if dense:
            self.table = nn.Embedding(ROWS, WIDTH, _weight=weight)
        else:
            self.table = RowTable(ROWS, WIDTH, gradient_factor=factor)
            self.table.weight.data.copy_(weight)
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        return self.layer(self.table(ids))


def rule(kind, implementation, lr=0.3):
    foreach = implementation == "foreach"
    if kind == "sgd":
        return making(torch.optim.SGD, lr, foreach=foreach)
    start = {"initial_accumulator_value": 0.5, "eps": 1e-3}
    return making(torch.optim.Adagrad, lr, foreach=foreach, **start)


def built(mode, make, scale=None, dense=False, factor=1.0, **options):
    cast, optimizer = mixed(Lookup(dense, factor), mode, make, scale, **options)
    return cast.module, optimizer


def step(model, optimizer, index, spoil=1.0):
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(ROWS - 3, (4, 2), generator=generator)  # the last rows are never used
    optimizer.zero_grad()
    loss = model(ids).float().square().mean()
    optimizer.backward(loss * spoil)
    return optimizer.step(measure_norm=True)


def accumulator(optimizer):
    return optimizer.state_by_name()["table.weight"].get("sum")


# Adagrad in 16 bits with foreach alone: torch's loop multiplies by the rate after dividing.
RULES = [
    *((kind, "fp32", how) for kind in ("sgd", "adagrad") for how in ("foreach", "loop")),
    *(("sgd", mode, how) for mode in ("fp16_naive", "bf16_naive") for how in ("foreach", "loop")),
    *(("adagrad", mode, "foreach") for mode in ("fp16_naive", "bf16_naive")),
]


@pytest.mark.parametrize(("kind", "mode", "implementation"), RULES)
def test_bit_equal_to_the_dense_optimizer(kind, mode, implementation):
    rows, dense = (
        built(mode, rule(kind, implementation), dense=is_dense) for is_dense in (False, True)
    )
    start = rows[0].table.weight.clone()
    for index in range(6):
        ours, theirs = step(*rows, index), step(*dense, index)
        # The same squares, added up in FP32 in another order.
        torch.testing.assert_close(ours.grad_norm, theirs.grad_norm, rtol=2.0**-20, atol=0)
    assert rows[0].table.weight.dtype == dense[0].table.weight.dtype
    assert torch.equal(rows[0].table.weight, dense[0].table.weight)
    assert torch.equal(rows[0].layer.weight, dense[0].layer.weight)
    if kind == "adagrad":
        own = accumulator(rows[1])
        assert own.dtype == rows[0].table.weight.dtype
        assert torch.equal(own, accumulator(dense[1]))
        assert (own[-3:] == 0.5).all()
    assert torch.equal(rows[0].table.weight[-3:], start[-3:])
    assert not torch.equal(rows[0].table.weight[:-3], start[:-3])


@pytest.mark.parametrize("mode", ["fp32", "amp", "fp16_master_scaled"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_micro_batches_add_up_as_those_of_dense_tables(kind, mode):
    """Bit for bit: a row is in at most two of the four, and a sum of two has one order."""
    scale = None if mode == "fp32" else StaticLossScale(8.0)
    rows, dense = (
        built(mode, rule(kind, "foreach"), scale, dense=is_dense, parts=4)
        for is_dense in (False, True)
    )
    for model, optimizer in (rows, dense):
        for _ in range(3):
            optimizer.zero_grad()
            for ids in ([0, 1, 2, 2], [2, 3, 0, 4], [1, 5, 6, 3], [7, 7, 5, 4]):
                optimizer.backward(model(torch.tensor(ids)).float().square().mean())
            norm = optimizer.step(measure_norm=True).grad_norm
        assert norm > 0
    table = dense[1].masters.get("table.weight", dense[0].table.weight)
    assert torch.equal(rows[0].table.weight, table)
    assert torch.equal(rows[0].layer.weight, dense[0].layer.weight)
    if kind == "adagrad":
        assert torch.equal(accumulator(rows[1]), accumulator(dense[1]))


@pytest.mark.parametrize("mode", ["fp16_master", "bf16_master"])
def test_the_table_is_the_master(mode):
    """An update that 16 bits cannot hold is kept, and the rows that are read are rounded."""
    model, optimizer = built(mode, rule("sgd", "foreach", lr=2.0**-16), StaticLossScale(1.0))
    assert model.table.weight.dtype == torch.float32
    assert optimizer.masters.keys() == {"layer.weight", "layer.bias"}
    before = model.table.weight.clone()
    step(model, optimizer, 0)
    half = model.layer.weight.dtype
    moved = model.table.weight != before
    assert moved.any() and torch.equal(model.table.weight.to(half), before.to(half))
    assert optimizer.gradient_dtypes() == {str(half)[6:]: ROWS * WIDTH + 3 * WIDTH + 3}
    assert optimizer.update_dtypes() == {"float32": ROWS * WIDTH + 3 * WIDTH + 3}


@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "fp16_naive"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_a_skipped_step_moves_no_row(kind, mode):
    model, optimizer = built(mode, rule(kind, "foreach"), DynamicLossScale(256.0))
    assert step(model, optimizer, 0).found_inf == 0
    table = model.table.weight.clone()
    state = copy.deepcopy(optimizer.rows[0].state)
    assert step(model, optimizer, 1, spoil=float("inf")).found_inf == 1
    assert torch.equal(model.table.weight, table)
    assert_same_bits(optimizer.rows[0].state, state)
    optimizer.loss_scales[0].update()
    assert step(model, optimizer, 2).found_inf == 0
    assert not torch.equal(model.table.weight, table)


def test_an_overflow_in_the_rows_alone_is_seen():
    model, optimizer = built("fp16_master_scaled", rule("adagrad", "foreach"), StaticLossScale(1.0))
    model.table.register_gradient_hook(lambda gradient: gradient * float("inf"))
    before = model.layer.weight.clone()
    assert step(model, optimizer, 0).found_inf == 1
    assert torch.equal(model.layer.weight, before)


def test_an_unscaled_step_does_not_depend_on_the_scale():
    """Unscaling before Adagrad; f-lm starts the accumulator at the scale's square instead."""
    plain, scaled = (
        built("fp32", rule("adagrad", "foreach"), StaticLossScale(s)) for s in (1.0, 1024.0)
    )
    for index in range(3):
        step(*plain, index), step(*scaled, index)
    # Powers of two change no bit.
    assert torch.equal(plain[0].table.weight, scaled[0].table.weight)


@pytest.mark.parametrize("mode", ["fp32", "fp16_master", "fp16_naive"])
def test_the_gradient_factor(mode):
    """128 for the table alone: with SGD its rows move 128 times as far, the layer as before."""
    one, many = (built(mode, rule("sgd", "foreach", 2.0**-7), factor=f) for f in (1.0, 128.0))
    start = one[0].table.weight.detach().float().clone()
    step(*one, 0), step(*many, 0)
    first, second = (model.table.weight.float() - start for model in (one[0], many[0]))
    if mode == "fp16_naive":
        assert (second.abs() > 32 * first.abs()).any()  # differences of FP16 weights
    else:
        # Both are differences of weights below 4: each rounded by at most 2^-23.
        torch.testing.assert_close(second, 128 * first, rtol=0, atol=129 * 2.0**-23)
    assert second.any()
    assert torch.equal(one[0].layer.weight, many[0].layer.weight)


def test_a_factor_beyond_fp16_is_an_overflow():
    model, optimizer = built(
        "fp16_naive", rule("sgd", "foreach"), StaticLossScale(1.0), factor=2.0**15
    )
    before = model.table.weight.clone()
    assert step(model, optimizer, 0, spoil=100.0).found_inf == 1
    assert torch.equal(model.table.weight, before)


def test_the_rate_is_read_at_each_step_and_may_be_a_tensor():
    number, tensor = (
        built("fp32", rule("adagrad", "foreach", lr)) for lr in (0.25, torch.tensor(0.25))
    )
    for rate in (0.5, 0.125):
        number[1].set_lr(rate), tensor[1].set_lr(torch.tensor(rate))
        step(*number, 0), step(*tensor, 0)
        assert torch.equal(number[0].table.weight, tensor[0].table.weight)
    model, optimizer = built("fp32", rule("sgd", "foreach"))
    start = model.table.weight.clone()
    optimizer.set_lr(0.0)
    step(model, optimizer, 0)
    assert torch.equal(model.table.weight, start)


def test_a_rate_of_biases_is_not_that_of_rows():
    def make(named):
        groups = [
            {"params": [t], "lr": 5.0 if n.endswith("bias") else 0.3}
            | {"lr_factor": 10.0 if n.endswith("bias") else 1.0}
            for n, t in reversed(named)
        ]
        return torch.optim.SGD(groups, foreach=True)

    one, other = built("fp32", make), built("fp32", rule("sgd", "foreach"))
    step(*one, 0), step(*other, 0)
    assert torch.equal(one[0].table.weight, other[0].table.weight)
    assert not torch.equal(one[0].layer.bias, other[0].layer.bias)


def test_state_is_saved_and_restored_bit_for_bit():
    one = built("fp16_master_scaled", rule("adagrad", "foreach"), DynamicLossScale(256.0))
    for index in range(3):
        step(*one, index)
    saved = one[1].state_dict()
    assert saved["state"].keys() == {"layer.weight", "layer.bias", "table.weight"}
    other = built("fp16_master_scaled", rule("adagrad", "foreach"), DynamicLossScale(256.0))
    other[0].load_state_dict(one[0].state_dict())
    other[1].load_state_dict(saved)
    for index in range(3, 6):
        step(*one, index), step(*other, index)
    assert torch.equal(one[0].table.weight, other[0].table.weight)
    assert torch.equal(accumulator(one[1]), accumulator(other[1]))
    del saved["state"]["table.weight"]
    with pytest.raises(ValueError, match="another model"):
        other[1].load_state_dict(saved)


def test_a_step_without_a_lookup_moves_no_row():
    model, optimizer = built("fp32", rule("adagrad", "foreach"))
    before = model.table.weight.clone()
    optimizer.zero_grad()
    optimizer.backward(model.layer(torch.ones(2, WIDTH)).sum())
    assert optimizer.step().grad_norm is None
    assert torch.equal(model.table.weight, before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (making(torch.optim.Adam), "Adam: row tables need"),
        (making(torch.optim.SGD, 1, 0.9), "momentum=0.9"),
        (making(torch.optim.Adagrad, 1, weight_decay=0.1), "weight_decay=0.1"),
        (making(torch.optim.Adagrad, 1, lr_decay=0.1), "lr_decay"),
    ],
)
def test_rules_that_move_unused_rows_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        built("fp32", make)


def test_padded_places_write_what_the_first_row_writes():
    table = RowTable(4, 2)
    nn.init.zeros_(table.weight)
    update = RowUpdate("weight", table, "weight", torch.optim.SGD([torch.zeros(1)], 1.0))
    rows = table.gather(torch.tensor([3, 3, 3, 1]))
    F.embedding(rows.place, rows.leaves["weight"]).sum().backward()
    # Rubbish where nothing refers to must not reach the table.
    update.apply(update.take_gradient() + torch.where(rows.used, 0.0, 7.0)[:, None], None)
    assert table.weight.tolist() == [[0, 0], [-1, -1], [0, 0], [-3, -3]]
    assert update.take_gradient() is None


def test_overrides_decide_the_dtype_of_rows():
    model = Lookup()
    cast_model(model, get_policy("fp16_master"), {"table": torch.float32})
    assert model.table.row_dtype == torch.float32 and model.layer.weight.dtype == torch.float16
    assert model(torch.tensor([1])).dtype == torch.float16
    naive = cast_model(Lookup(), get_policy("fp16_naive"), {"table": torch.float32}).module
    assert naive.table.weight.dtype == torch.float32
    amp = cast_model(Lookup(), get_policy("amp")).module
    assert amp.table(torch.tensor([1])).dtype == torch.float32
