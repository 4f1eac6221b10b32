"""The sampled model against the ordinary one, and what the rest of the house makes of it."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

from mprun.errors import BadInput
from mprun.models.lstm import LSTMLanguageModel
from mprun.numerics.operations import FirstStep
from mprun.precision import get_policy

from ..helpers import ONE_CORE, assert_same_bits, raises_line, run, without_waiting
from ..shipped import OF_ANY_NETWORK

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")

VOCABULARY = 60
MODEL = [
    *("model=biglstm", "model.embedding_size=16", "model.hidden_size=24"),
    *("model.projection_size=16", "model.dropout=0", "data=synthetic_tokens"),
    *(f"data.vocab_size={VOCABULARY}", "data.batch_size=4", "data.sequence_length=5"),
    *("data.train_tokens=400", "data.eval_tokens=200"),
]
SAMPLED = [*MODEL, "model.sampled_softmax=12"]
AVERAGED = ["optim.average_decay=0.9", "optim.average_modules=[lstm]"]
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def tables(task):
    model = task.learner.model
    return [model.embedding.weight, model.output.weight, model.output.bias]


def per_token(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


def dense(kind=torch.float32):
    """The ordinary model of the same sizes."""
    return LSTMLanguageModel(VOCABULARY, 16, 24, 2, 16, 0.0, 0.04, 1.0).to(kind)


def tokens_read(task, numbers):
    """Which rows of the embedding these batches read."""
    used = torch.zeros(VOCABULARY, dtype=torch.bool)
    for number in numbers:
        used[task.data.train_batch(number)[0].flatten()] = True
    return used


def sums(task):
    """Return Adagrad's sums for the tables."""
    state = task.learner.steps.state_by_name()
    return [state[name]["sum"] for name in ("embedding.weight", "output.weight", "output.bias")]


@pytest.mark.parametrize("factor", [1, 128])
@pytest.mark.parametrize("time_reduction", ["mean", "sum"])
def test_with_all_candidates_it_trains_as_a_plain_loop_does(build_run, time_reduction, factor):
    """Dense tables, full softmax, torch's Adagrad, clipping of the LSTM by hand."""
    more = [f"model.time_reduction={time_reduction}", f"model.embedding_gradient_factor={factor}"]
    more += ["train.clip_norm=0.02", "train.clip_modules=[lstm]"]
    task = build_run(*MODEL, "model.sampled_softmax=8192", *more).task
    model, hidden = dense(), None
    model.load_state_dict(task.learner.model.state_dict())
    optimizer = torch.optim.Adagrad(
        model.parameters(), 0.2, initial_accumulator_value=1.0, eps=1e-10, foreach=True
    )
    for step in range(4):
        metrics = task.train_step(step, measure=True)
        tokens, targets = task.data.train_batch(step)
        logits, hidden = model(tokens, hidden)
        hidden = tuple(part.detach() for part in hidden)
        loss = per_token(logits, targets).mean()
        optimizer.zero_grad()
        (loss * (5 if time_reduction == "sum" else 1)).backward()
        model.embedding.weight.grad *= factor
        norm = torch.nn.utils.clip_grad_norm_(model.lstm.parameters(), 0.02)
        optimizer.step()
        # FP32 sums of 60 terms in another order; four steps.
        torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=2.0**-18, atol=0)
        torch.testing.assert_close(metrics["grad_norm"], norm, rtol=2.0**-14, atol=0)
    assert norm > 0.02 or time_reduction == "mean"
    for (name, ours), theirs in zip(
        task.learner.model.named_parameters(), model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2.0**-18, msg=name)
    # Logits are compared by the evaluation, too.
    losses, hidden = [], None
    with torch.no_grad():
        for tokens, targets in task.data.eval_batches():
            logits, hidden = model(tokens, hidden)
            losses.append(per_token(logits, targets))
    expected = torch.cat(losses).double().mean().item()
    assert task.evaluate()["loss"] == pytest.approx(expected, rel=1e-5)


CLIP = 2.0**-8


@pytest.mark.parametrize("clipped", [True, False], ids=["lstm", "all"])
def test_micro_batches_are_one_large_batch(build_run, clipped):
    """Windows of the same streams, whose states go on: one batch of all of them, from these states.

    In float64, dense, all candidates: what differs is FP32's rounding, of four steps. The factors
    are bigLSTM's: the source adds up the tables' gradients over its GPUs.
    """
    parts, batch = 3, 4
    more = ["model.time_reduction=sum", "model.embedding_gradient_factor=12"]
    more += ["model.output_gradient_factor=3", f"train.accumulate={parts}"]
    more += ["optim.average_decay=0.5", "optim.average_modules=[lstm]", f"train.clip_norm={CLIP}"]
    more += ["train.clip_modules=[lstm]"] * clipped
    task = build_run(*MODEL, "model.sampled_softmax=8192", *more).task
    model = dense(torch.float64)
    model.load_state_dict(task.learner.model.state_dict())
    own = dict(model.named_parameters())
    average = {name: own[name].detach().clone() for name in task.learner.averages}
    optimizer = torch.optim.Adagrad(own.values(), 0.2, initial_accumulator_value=1.0, eps=1e-10)
    state = model.initial_state(batch)
    for step in range(4):
        metrics = task.train_step(step, measure=True)
        windows = [task.data.train_batch(parts * step + part) for part in range(parts)]
        states = [state]
        with torch.no_grad():
            for tokens, _ in windows:
                states.append(model(tokens, states[-1])[1])
        tokens, targets = (torch.cat([*both], 1) for both in zip(*windows, strict=True))
        carried = tuple(torch.cat([*both], 1) for both in zip(*states[:-1], strict=True))
        losses = per_token(model(tokens, carried)[0], targets)
        state = states[-1]
        optimizer.zero_grad()
        # The sum over time, the mean over the streams of the whole batch.
        losses.view(targets.shape).sum(0).mean().backward()
        model.embedding.weight.grad *= batch * parts
        for parameter in model.output.parameters():
            parameter.grad *= parts
        norm = torch.nn.utils.clip_grad_norm_((model.lstm if clipped else model).parameters(), CLIP)
        optimizer.step()
        for name, value in average.items():
            value.lerp_(own[name].detach(), 0.5)
        torch.testing.assert_close(metrics["loss"].double(), losses.mean(), rtol=2.0**-18, atol=0)
        torch.testing.assert_close(metrics["grad_norm"].double(), norm, rtol=2.0**-14, atol=0)
        assert norm > CLIP
    for name, ours in task.learner.model.named_parameters():
        torch.testing.assert_close(ours.double(), own[name], rtol=0, atol=2.0**-18, msg=name)
    for name, value in average.items():
        ours = task.learner.averages[name].double()
        torch.testing.assert_close(ours, value, rtol=0, atol=2.0**-18, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp16_master_scaled", "fp16_naive", "amp"])
def test_micro_batches_in_a_mode(build_run, mode):
    """Each draws its own candidates; a skipped step of several parts moves no row."""
    # 16-bit weights would lose updates without the factors.
    factors = ["model.time_reduction=sum", "model.embedding_gradient_factor=4096"]
    more = [f"precision={mode}", "train.accumulate=3", "optim.eps=1e-3"]
    more += ["scaler=dynamic", "scaler.init_scale=16"]
    task = build_run(*SAMPLED, *more, *factors).task
    start = task.learner.model.embedding.weight.clone()
    assert task.train_step(0)["found_inf"] == 0
    moved, used = (task.learner.model.embedding.weight != start).any(1), tokens_read(task, range(3))
    assert moved.any() and not (moved & ~used).any()
    assert torch.equal(moved, used) or mode == "fp16_naive"  # which loses updates
    before = [table.clone() for table in tables(task)]
    seen = []

    def spoil(gradient):
        seen.append(gradient._nnz())
        return gradient * (math.inf if len(seen) == 2 else 1)

    handle = task.learner.steps.watch_gradient(task.learner.model.output.weight, spoil)
    assert task.train_step(1)["found_inf"] == 1
    handle.remove()
    assert seen == [32] * 3  # 20 targets and 12 candidates
    assert_same_bits(tables(task), before)
    assert task.train_step(2)["found_inf"] == 0
    assert all(own.isfinite().all() for own in sums(task))


def test_time_reduction_of_the_ordinary_model(build_run):
    """The gradient is five times that of the mean, the loss that is reported is the same."""
    words = ["model=lstm_lm", *MODEL[5:], "train.clip_norm=null"]
    mean, total = (
        build_run(*words, f"model.time_reduction={own}").task.train_step(0, measure=True)
        for own in ("mean", "sum")
    )
    assert torch.equal(mean["loss"], total["loss"])
    torch.testing.assert_close(total["grad_norm"], 5 * mean["grad_norm"], rtol=2.0**-20, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in OF_ANY_NETWORK if mode != "tf32"])
def test_every_mode(build_run, mode):
    # Both factors, because 16-bit weights would lose all updates of the embedding without them.
    more = ["optim.eps=1e-3", "model.time_reduction=sum", "model.embedding_gradient_factor=128"]
    built = build_run(*SAMPLED, f"precision={mode}", *more)
    task, dtypes = built.task, set()

    def see(module, inputs, rows):
        dtypes.update(own.dtype for own in (rows if isinstance(rows, tuple) else (rows,)))

    see.sees_inside = True
    for table in (task.learner.model.embedding, task.learner.model.output):
        table.register_forward_hook(see)
    before = [table.clone() for table in tables(task)]
    losses = torch.stack([task.train_step(step)["loss"] for step in range(3)])
    assert losses.dtype == torch.float32 and losses.isfinite().all()
    half = HALF[mode.partition("_")[0]] if mode.partition("_")[0] in HALF else torch.float32
    kept = torch.float32 if get_policy(mode).master_dtype else half
    for table, old in zip(tables(task), before, strict=True):
        assert table.dtype == kept
        assert not torch.equal(table, old)
    expected = set() if mode == "fp32" else {"forward lstm", "backward lstm"}
    assert expected <= set(built.forward_context.rerouted())
    assert dtypes == {half}
    assert math.isfinite(task.evaluate()["loss"])


def test_unused_rows_stay(build_run):
    task = build_run(*SAMPLED).task
    before = task.learner.model.embedding.weight.clone()
    for step in range(2):
        task.train_step(step)
    moved, used = (task.learner.model.embedding.weight != before).any(1), tokens_read(task, (0, 1))
    assert torch.equal(moved, used) and not used.all()


@pytest.mark.parametrize("mode", ["fp16_master_scaled", "amp"])
def test_a_skipped_step_changes_nothing_but_the_random_state(build_run, mode):
    task = build_run(*SAMPLED, *AVERAGED, f"precision={mode}").task
    task.train_step(0)

    def kept():
        tensors = [*tables(task), *sums(task), *task.hidden]
        return [tensor.clone() for tensor in [*tensors, *task.learner.averages.values()]]

    before = kept()
    output = task.learner.model.output.weight
    handle = task.learner.steps.watch_gradient(output, lambda g: g * float("inf"))
    assert task.train_step(1)["found_inf"] == 1
    handle.remove()
    assert_same_bits(kept(), before)
    assert task.train_step(2)["found_inf"] == 0
    assert not torch.equal(tables(task)[0], before[0])


@pytest.mark.parametrize("mode", ["fp32", "fp16_master", "amp"])
def test_evaluation_reads_the_tables_where_they_are(build_run, mode):
    task = build_run(*SAMPLED, f"precision={mode}", "optim.eps=1e-3").task
    task.train_step(0)
    random = torch.get_rng_state()
    with task.learner.evaluating(False) as model:
        assert model.embedding.weight is task.learner.model.embedding.weight
        assert model.output.weight is task.learner.model.output.weight
        assert model.lstm.weight_hh_l0.dtype == torch.float32
        tokens, targets = next(iter(task.data.eval_batches()))
        losses, _ = model(tokens, targets)
        outputs, _ = model.lstm(F.embedding(tokens, model.embedding.weight.float()))
        logits = outputs.double() @ model.output.weight.double().t() + model.output.bias.double()
    expected = per_token(logits, targets)
    torch.testing.assert_close(losses.flatten().double(), expected, rtol=2.0**-18, atol=2.0**-18)
    assert torch.equal(torch.get_rng_state(), random)


def test_evaluation_in_the_mode_rounds_the_rows(build_run):
    own, exact = (
        build_run(*SAMPLED, "precision=bf16_master", f"train.eval_arithmetic={how}").task
        for how in ("mode", "fp32")
    )
    assert own.evaluate() != exact.evaluate()
    assert own.evaluate()["loss"] == pytest.approx(exact.evaluate()["loss"], rel=1e-2)
    assert own.learner.model.training


def test_memory_and_operations_of_the_first_step(build_run):
    built = build_run(*SAMPLED, *AVERAGED, "precision=fp16_master_scaled")
    with FirstStep(built.task, built.policy, {}) as first:
        built.task.train_step(0)
    memory = first.memory()
    table = VOCABULARY * (16 + 16 + 1)
    lstm = sum(p.numel() for p in built.task.learner.model.lstm.parameters())
    # 20 tokens of the embedding; 20 targets and 12 candidates of the softmax.
    rows = 20 * 16 + 32 * 17
    assert memory["parameters"] == {"float32": 4 * (table + lstm)}
    # Each row with its number; those of the bias are those of the weight.
    assert memory["gradients"] == {"float32": 4 * (lstm + rows), "int64": 8 * (20 + 2 * 32)}
    steps = 4 * len(list(built.task.learner.model.parameters()))  # torch's counters
    assert memory["optimizer_state"] == {"float32": 4 * (table + lstm) + steps}
    assert memory["weight_average"] == {"float32": 4 * lstm}
    assert first.not_in_16_bits() == []  # the softmax is in FP32 in every mode


def test_probes_count_the_gradients_of_rows(tmp_path):
    numerics = ["precision=fp16_master_scaled", "numerics=probes", "numerics.every=2"]
    assert run(tmp_path / "run", *SAMPLED, *ONE_CORE, *numerics, "train.steps=2") == 0
    (probe,) = (tmp_path / "run" / "numerics").glob("step-*.json")
    gradients = json.loads(probe.read_text())["learners"]["model"]["tensors"]["weight_gradients"]
    assert gradients.keys() == {"embedding", "lstm", "output"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["train.clip_modules=[lstn]"], "train.clip_modules: 'lstn' matches no module"),
        (["optim=adam"], "optim=adam"),
        (
            ["precision.reduce_dtype=fp16", "train.accumulate=2"],
            "precision.reduce_dtype=fp16: must",
        ),
    ],
)
def test_refusals(build_run, more, message):
    with raises_line(BadInput, message):
        build_run(*SAMPLED, *more)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", OF_ANY_NETWORK)
def test_on_a_gpu_no_step_waits(build_run, mode):
    more = ["model.embedding_gradient_factor=4", "train.clip_modules=[lstm]", "optim.eps=1e-3"]
    task = build_run(*SAMPLED, *AVERAGED, *more, f"precision={mode}", device="cuda").task
    losses = [task.train_step(0, measure=True)["loss"]]  # loads kernels
    with without_waiting():
        losses += [task.train_step(step, measure=True)["loss"] for step in (1, 2)]
    assert torch.stack(losses).isfinite().all()
    assert math.isfinite(task.evaluate()["loss"])
