"""The Trainer of transformers in a precision mode computes what a loop written by hand does."""

import warnings

import pytest
import torch
from torch import nn

import mprun
from mprun.precision import DynamicLossScale, DynamicRule
from mprun.prepared import state_of

from ...helpers import assert_same_bits
from .trainers import MODES, THREE, Seen, assert_same_end, run_page

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports
    transformers = pytest.importorskip("transformers", reason="needs the extra [transformers]")
    pytest.importorskip("accelerate", reason="needs the extra [transformers]")
    from mprun.extensions.adapters.transformers import MprunRun, MprunTrainer


def data(count=24):
    torch.manual_seed(1)
    ids = torch.randint(32, (count, 1)) + torch.arange(9)
    return [{"input_ids": row[:8] % 32, "labels": row[:8] % 32} for row in ids]


def gpt2(dropout=0.1):
    torch.manual_seed(0)
    own = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    own |= {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**own, use_cache=False))


def arguments(folder, **settings):
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # the default is 0 in FP16, and fp16_naive NaN
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
    } | settings
    return transformers.TrainingArguments(output_dir=str(folder), **settings)


class Seeding(transformers.TrainerCallback):
    """Dropout is the same in every loop."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step)


class Plain(Seen, transformers.Trainer):
    pass


class Own(Seen, MprunTrainer):
    pass


def trained(folder, mode, *, model=None, callbacks=(), resume=None, **settings):
    model = model or gpt2()
    given = {"model": model, "args": arguments(folder, **settings), "train_dataset": data()}
    given |= {"callbacks": [Seeding(), *callbacks], "eval_dataset": data(8)}
    own = Plain(**given) if mode is None else Own(**given, precision=mode)
    own.train(resume_from_checkpoint=resume)
    assert {loss.dtype for loss in own.losses} == {torch.float32}
    return own


def by_hand(mode, clip=1.0, accumulate=1, steps=6):
    """AdamW, the linear schedule and clipping, as the Trainer's defaults are."""
    model, losses = gpt2(), []
    decayed = transformers.Trainer.get_decay_parameter_names(None, model)
    named = [*model.named_parameters()]
    groups = [
        {"params": [p for n, p in named if (n in decayed) is first], "weight_decay": 0.0}
        for first in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, fused=True)
    model, optimizer = mprun.prepare(model, optimizer, mode)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, steps)
    rows = data()
    batches = [*torch.utils.data.DataLoader(rows, batch_size=4)]
    model.train()
    for index in range(steps * accumulate):
        if index % accumulate == 0:
            torch.manual_seed(index // accumulate)
        # The number of labels of a step divides its losses.
        batch = batches[index % len(batches)]
        count = torch.tensor(accumulate * batch["labels"].numel())
        loss = model(**batch, num_items_in_batch=count).loss
        losses.append(loss.detach())
        loss.backward()
        if (index + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            last = state_of(optimizer).last
            if not (last.found_inf is not None and last.found_inf):
                schedule.step()
            optimizer.zero_grad()
    return model, losses


def assert_same(own, model, losses):
    assert_same_end(own.losses, own.model, model, losses)


def test_fp32_is_the_trainers_own_training(tmp_path):
    plain, own = trained(tmp_path, None), trained(tmp_path, "fp32")
    assert_same(own, plain.model, plain.losses)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_the_loop_written_by_hand(mode, tmp_path):
    own = trained(tmp_path, mode)
    assert_same(own, *by_hand(mode))
    assert not torch.equal(torch.stack(own.losses), torch.stack(by_hand("fp32")[1]))


@pytest.mark.parametrize("mode", THREE)
def test_micro_batches_add_up(mode, tmp_path):
    own = trained(tmp_path, mode, gradient_accumulation_steps=2, max_steps=3)
    assert_same(own, *by_hand(mode, accumulate=2, steps=3))


@pytest.mark.parametrize("mode", THREE)
def test_clipping_clips(mode, tmp_path):
    own = trained(tmp_path, mode, max_grad_norm=1e-3)
    assert_same(own, *by_hand(mode, clip=1e-3))
    assert not torch.equal(own.losses[-1], trained(tmp_path, mode).losses[-1])


def test_after_a_skipped_update_no_schedule_advances(tmp_path):
    """As the Trainer does itself in its own FP16."""
    rule = DynamicRule(init_scale=2.0**40, max_scale=2.0**50)
    high = DynamicLossScale(rule, device=torch.device("cpu"))
    settings = {"eval_dataset": data(8), "train_dataset": data(), "precision": "amp"}
    own = Own(gpt2(), arguments(tmp_path), scaler=high, **settings)
    own.train()
    rows = [row for row in own.state.log_history if "loss_scale" in row]
    assert [row["loss_scale"] for row in rows] == [2.0 ** (39 - step) for step in range(6)]
    assert {row["learning_rate"] for row in rows} == {1e-2}
    assert_same_bits([*own.model.parameters()], [*gpt2().parameters()])


@pytest.mark.parametrize("mode", ["fp16_naive", "fp16_master_scaled", "amp", "bf16_master"])
def test_a_resumed_training_goes_on_as_if_never_stopped(mode, tmp_path):
    whole = trained(tmp_path, mode, save_strategy="steps", save_steps=3)
    again = trained(tmp_path, mode, resume=str(tmp_path / "checkpoint-3"))
    assert_same(again, whole.model, whole.losses[3:])
    scales = [state_of(one.optimizer).scale for one in (again, whole)]
    assert scales[0].state_dict().keys() == scales[1].state_dict().keys()
    saved = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt", weights_only=False)
    assert saved["loss_scale"]["kind"] == scales[1].kind
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-6")
    assert plain.config.architectures == ["GPT2LMHeadModel"]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(plain.state_dict()[name].to(value.dtype), value), name


@pytest.mark.parametrize("mode", ["fp16_naive", "fp16_master_scaled", "amp"])
def test_evaluation_is_of_the_master_weights_in_fp32(mode, tmp_path):
    own = trained(tmp_path, mode)
    reference = gpt2()
    reference.load_state_dict(own.model.state_dict())
    settings = {"args": arguments(tmp_path), "eval_dataset": data(8)}
    expected = transformers.Trainer(reference, **settings).evaluate()["eval_loss"]
    assert own.evaluate()["eval_loss"] == expected


def test_a_second_training_goes_on(tmp_path):
    own, plain = trained(tmp_path, "fp32"), trained(tmp_path, None)
    own.train(), plain.train()
    assert_same(own, plain.model, plain.losses)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("mode", THREE)
def test_checkpointed_activations_are_computed_in_the_mode_again(mode, tmp_path):
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(trained(tmp_path, mode, model=model), *by_hand(mode))


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp16_full_eval", "bf16_full_eval"])
def test_another_precision_beside_it_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=rf"TrainingArguments\({name}=True\): must be unset"):
        Own(gpt2(), arguments(tmp_path, **{name: True}), precision="amp")


class Preferring:
    """A loss of the ratio to a reference, as that of trl's DPOTrainer; labels are not asked."""

    def __init__(self, *args, reference, **kwargs):
        super().__init__(*args, **kwargs)
        self.ref_model, self.ratios = reference, []

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(input_ids=inputs["input_ids"])
        with torch.no_grad():
            reference = self.ref_model(input_ids=inputs["input_ids"])
        scores = [one.logits.log_softmax(-1)[..., 0].sum(1) for one in (outputs, reference)]
        self.ratios.append(float((scores[0] - scores[1]).abs().max().detach()))
        loss = -nn.functional.logsigmoid(scores[0] - scores[1]).mean()
        return (loss, outputs) if return_outputs else loss


def preferred(folder, mode):
    given = {"args": arguments(folder, max_steps=5), "train_dataset": data()}
    given |= {"eval_dataset": data(8), "reference": gpt2(dropout=0.0)}
    given |= {} if mode is None else {"precision": mode}
    own = type("Own", (Preferring, Plain if mode is None else Own), {})
    trainer = own(gpt2(dropout=0.0), **given)
    trainer.train()
    assert {loss.dtype for loss in trainer.losses} == {torch.float32}
    return trainer


@pytest.mark.parametrize("mode", ["fp16_master_scaled", "amp", "bf16_master"])
def test_a_reference_computes_as_the_model_beside_it(mode, tmp_path):
    """Equal weights have equal outputs in a step; an evaluation is of both in FP32."""
    own = preferred(tmp_path, mode)
    assert own.ratios[0] == 0
    assert any(own.ratios)  # as soon as an update is not skipped
    assert_same_bits([*own.ref_model.parameters()], [*gpt2().parameters()])
    own.model.load_state_dict(own.ref_model.state_dict())
    plain = gpt2(dropout=0.0).eval()
    own.evaluate()
    assert own.ratios[-1] == 0
    ids = torch.stack([row["input_ids"] for row in data(8)])
    with torch.no_grad():
        assert torch.equal(own.ref_model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_a_training_with_a_reference_in_fp32_is_the_trainers_own(tmp_path):
    plain, own = preferred(tmp_path, None), preferred(tmp_path, "fp32")
    assert_same(own, plain.model, plain.losses)


def test_what_cannot_be_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="build the model in float32"):
        trained(tmp_path, "amp", model=gpt2().bfloat16())
    model = trained(tmp_path, "amp").model
    with pytest.raises(ValueError, match="is already prepared"):
        trained(tmp_path, "fp32", model=model)
    with pytest.raises(ValueError, match="needs an MprunTrainer"):
        trained(tmp_path, None, callbacks=[MprunRun(tmp_path / "runs")])
    with pytest.raises(RuntimeError, match="torch.autocast is active"):
        with torch.autocast("cpu", torch.bfloat16):
            trained(tmp_path, "fp32")


def test_trainings_are_compared(tmp_path):
    for mode in ("fp32", "fp16_master_scaled"):
        for seed in (0, 1, 2):
            run, model = MprunRun(tmp_path / "runs", log_every=2, config={"layers": 2}), gpt2()
            with torch.no_grad():
                for own in model.parameters():
                    own.mul_(1 + seed / 64)  # runs that begin alike count once
            trained(tmp_path, mode, model=model, callbacks=[run], seed=seed, max_steps=12)
            assert (run.run.status, run.run.steps) == ("done", 12)
            assert run.evaluated == 12
    found = mprun.compare(tmp_path / "runs").columns()
    assert [*found["mode"]] == ["fp32", "fp16_master_scaled"] and [*found["runs"]] == [3, 3]
    assert found["verdict"][0] == "baseline" and "invalid" not in found["verdict"][1]
    assert found["metric"][1] == "eval_loss"


def test_a_divergence_ends_the_training_and_is_recorded(tmp_path):
    class Broken(Own):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * float("nan")

    run = MprunRun(tmp_path / "runs", log_every=1)
    given = {"train_dataset": data(), "eval_dataset": data(8), "callbacks": [run]}
    own = Broken(gpt2(), arguments(tmp_path), precision="fp32", **given)
    own.train()
    assert run.run.status == "diverged"
    assert own.state.global_step < 6


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (OSError("disk"), ("failed", "OSError: disk")),
        (SystemExit(1), ("failed", "SystemExit: 1")),
        (SystemExit(0), ("preempted", "SystemExit: 0")),
        (KeyboardInterrupt(), ("preempted", "KeyboardInterrupt")),
    ],
    ids=repr,
)
def test_a_training_that_is_broken_off_is_recorded_as_such(error, ends, tmp_path):
    """As the `with` block of an `mprun.Run`."""

    class Failing(Own):
        def compute_loss(self, *args, **kwargs):
            raise error

    run = MprunRun(tmp_path / "runs")
    given = {"train_dataset": data(), "callbacks": [run]}
    with pytest.raises(type(error)):
        Failing(gpt2(), arguments(tmp_path), precision="amp", **given).train()
    assert (run.run.status, run.run.cause) == ends


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(tmp_path, monkeypatch):
    run_page("huggingface.md", tmp_path, monkeypatch)


@pytest.fixture
def accelerated():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # What one of them is told, all others of the process are.
    AcceleratorState._reset_state(reset_partial_state=True)
    yield lambda mixed_precision: Accelerator(mixed_precision=mixed_precision, cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)


def accelerated_step(accelerator, model, optimizer, batch, schedule=None):
    """The loss of a micro-batch: its own accumulation, backward pass and clipping."""
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
    return loss


def of_accelerate(accelerated, mode, late):
    """late: the optimizer is made after the model is prepared."""
    # The seed of random bits is the last one before an optimizer is known: that of the model.
    accelerator, rows, model = accelerated("no"), data(), gpt2(dropout=0.0)
    accelerator.gradient_accumulation_steps = 2
    optimizer = None if late else adamw(model)
    if mode is not None:
        mprun.prepare(model, optimizer, mode)
    optimizer = optimizer or adamw(model)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(rows, batch_size=4)
    )
    if mode is not None:
        assert state_of(optimizer) is state_of(optimizer.optimizer)
    for batch in loader:
        accelerated_step(accelerator, model, optimizer, batch)
    return model.state_dict()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", ["fp32", *MODES, "bf16_stochastic"])
def test_the_loop_of_accelerate_is_the_loop_written_by_hand(mode, late, accelerated):
    found = of_accelerate(accelerated, mode, late)
    if mode == "fp32":
        assert_same_bits({**found}, {**of_accelerate(accelerated, None, late)})
    model = gpt2(dropout=0.0)
    optimizer = adamw(model)
    mprun.prepare(model, optimizer, mode)
    rows = [*torch.utils.data.DataLoader(data(), batch_size=4)]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        (model(**first).loss / 2).backward()
        (model(**second).loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_bits({**found}, {**model.state_dict()})


def saved_by_accelerate(accelerated, mode, folder, resumed):
    """Half of 12 micro-batches, then `save_state`; or `load_state`, then the other half.

    Returns the losses, the weights and the state of the optimizer after all of it.
    """
    accelerator, rows, model = accelerated("no"), data(48), gpt2()
    accelerator.gradient_accumulation_steps = 2
    optimizer = adamw(model)
    if mode is not None:
        mprun.prepare(model, optimizer, mode)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    order = torch.Generator().manual_seed(5)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, generator=order)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    if resumed:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, 6)
    losses = []
    for batch in loader:
        if len(losses) == 6 and not resumed:
            accelerator.save_state(folder)
        losses.append(accelerated_step(accelerator, model, optimizer, batch, schedule))
    return losses[-6:], {**model.state_dict()}, optimizer.state_dict()


@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "amp", "bf16_stochastic"])
def test_what_accelerate_saves_goes_on_as_if_never_stopped(mode, accelerated, tmp_path):
    """Also dropout: it saves the place among random numbers."""
    whole = saved_by_accelerate(accelerated, mode, tmp_path, resumed=False)
    again = saved_by_accelerate(accelerated, mode, tmp_path, resumed=True)
    assert_same_bits(torch.stack(again[0]), torch.stack(whole[0]))
    assert_same_bits(again[1], whole[1])
    assert str(again[2]) == str(whole[2])
    if mode == "fp32":
        plain = saved_by_accelerate(accelerated, None, tmp_path / "plain", resumed=False)
        assert_same_bits(whole[1], plain[1])


def test_the_autocast_of_accelerate_is_refused(accelerated):
    accelerator, model = accelerated("bf16"), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = mprun.prepare(model, optimizer, "fp32")
    with pytest.raises(RuntimeError, match="torch.autocast is active"), accelerator.autocast():
        model(torch.randn(8, 4))
    model = accelerator.prepare(model)
    with pytest.raises(RuntimeError, match="torch.autocast is active"):
        model(torch.randn(8, 4))
