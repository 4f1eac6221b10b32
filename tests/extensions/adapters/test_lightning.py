"""Lightning's Trainer in a precision mode computes what a loop written by hand does."""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import mprun
from mprun.prepared import state_of

from ...helpers import assert_same_bits
from ...script.networks import sgd
from .trainer_ranks import QUIET
from .trainers import MODES, THREE, assert_same_end, run_page

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports
    L = pytest.importorskip("lightning", reason="needs the extra [lightning]")
    from mprun.extensions.adapters.lightning import MprunPrecision, MprunRun

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


F32 = torch.float32


def batches(count=6, size=8):
    torch.manual_seed(1)
    inputs = torch.randn(count * size, 12)
    return inputs, inputs[:, :5].argmax(dim=1)


def loader(count=6, size=8):
    return DataLoader(TensorDataset(*batches(count, size)), batch_size=size)


def network():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16)
    return nn.Sequential(nn.Linear(12, 16), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 5))


def scheduled(parameters):
    """An optimizer, and a scheduler of its steps."""
    optimizer = sgd(parameters)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


class Module(L.LightningModule):
    """A module as a user has it."""

    def __init__(self, whole=True):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.whole, self.losses = network(), whole, []

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, index):
        logits = self(batch[0]) if self.whole else self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        assert loss.dtype is logits.dtype is torch.float32
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer, scheduler = scheduled(self.parameters())
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trainer(mode=None, **settings):
    plugins = [] if mode is None else [MprunPrecision(mode)]
    return L.Trainer(plugins=plugins, **QUIET | settings)


def fitted(mode, module=None, **settings):
    module = module or Module()
    torch.manual_seed(2)  # dropout
    trainer(mode, **settings).fit(module, loader())
    return module


def by_hand(mode, clip=None, accumulate=1, average=None):
    """average: makes an `AveragedModel` of the network, which is then what is returned."""
    model, losses = network(), []
    average = average and average(model)
    optimizer, scheduler = scheduled(model.parameters())
    if mode is not None:
        model, optimizer = mprun.prepare(model, optimizer, mode)
    torch.manual_seed(2)  # dropout
    for index, (inputs, labels) in enumerate(loader()):
        loss = F.cross_entropy(model(inputs), labels)
        losses.append(loss.detach())
        if index % accumulate == 0:
            optimizer.zero_grad()
        part = loss / accumulate
        part.backward()
        if (index + 1) % accumulate == 0:
            if clip is not None:
                clip(model.parameters())
            optimizer.step()
            scheduler.step()
            if average is not None:
                average.update_parameters(model)
    return model if average is None else average.module, losses


def assert_same(module, model, losses):
    assert_same_end(module.losses, module.net, model, losses)


def assert_same_weights(one, other):
    assert_same_bits({**one.state_dict()}, {**other.state_dict()})


def test_fp32_is_lightnings_own_training():
    plain, own = fitted(None), fitted("fp32")
    assert_same(own, plain.net, plain.losses)


@pytest.mark.parametrize("whole", [True, False], ids=["self(x)", "self.net(x)"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_the_loop_written_by_hand(mode, whole):
    module = fitted(mode, Module(whole))
    assert_same(module, *by_hand(mode))
    assert not torch.equal(torch.stack(module.losses), torch.stack(by_hand(None)[1]))


@pytest.mark.parametrize("mode", THREE)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_clips(mode, algorithm):
    ways = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}
    settings = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    module = fitted(mode, **settings)
    assert_same(module, *by_hand(mode, lambda parameters: ways[algorithm](parameters, 0.01)))
    assert not torch.equal(module.losses[-1], fitted(mode).losses[-1])


@pytest.mark.parametrize("mode", THREE)
def test_micro_batches_add_up(mode):
    # The scheduler is made to step with updates.
    module = fitted(mode, accumulate_grad_batches=2)
    assert_same(module, *by_hand(mode, accumulate=2))


def loss_of(pair, inputs, labels):
    return F.cross_entropy(pair.b(pair.a(inputs) @ torch.ones(5, 12)), labels)


class Pair(L.LightningModule):
    """Two optimizers, by hand."""

    def __init__(self, together, toggle=False):
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = network(), network()
        self.together, self.toggle = together, toggle

    def training_step(self, batch, index):
        first, second = self.optimizers()
        if self.together:
            loss = loss_of(self, *batch)
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(loss)
            first.step()
            second.step()
            return loss
        for optimizer in (first, second):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            loss = loss_of(self, *batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)
        return loss

    def configure_optimizers(self):
        return sgd(self.a.parameters()), sgd(self.b.parameters())


def fitted_pair(mode, **how):
    pair, own = Pair(**how), trainer(mode)
    torch.manual_seed(2)
    own.fit(pair, loader())
    return pair, own


def pair_by_hand(mode, optimizers_of):
    """A step of each optimizer in turn; of a pair without Lightning."""
    model = nn.Module()
    model.a, model.b = network(), network()
    model, optimizers = mprun.prepare(model, optimizers_of(model), mode)
    torch.manual_seed(2)
    for batch in loader():
        for optimizer in optimizers:
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
    return model, optimizers


@pytest.mark.parametrize("mode", THREE)
def test_one_loss_for_two_optimizers(mode):
    """As one optimizer over both, updated after one backward pass."""
    pair, _ = fitted_pair(mode, together=True)
    model, _ = pair_by_hand(mode, lambda model: [sgd(model.parameters())])
    assert_same_weights(pair, model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("toggle", [False, True])
def test_optimizers_in_turn_are_the_loop_written_by_hand(mode, toggle):
    """Also when the loss scale, which they share, moves."""
    pair, own = fitted_pair(mode, together=False, toggle=toggle)
    model, optimizers = pair_by_hand(
        mode, lambda own: [sgd(m.parameters()) for m in own.children()]
    )
    assert_same_weights(pair, model)
    scales = [state_of(one).scale.state_dict() for one in (own.optimizers[1], optimizers[1])]
    assert str(scales[0]) == str(scales[1])


def test_optimizers_in_turn_in_fp32_are_lightnings_own():
    plain, own = (fitted_pair(mode, together=False)[0] for mode in (None, "fp32"))
    assert_same_weights(own, plain)


@pytest.mark.parametrize("mode", ["fp16_naive", "fp16_master_scaled", "amp", "bf16_master"])
def test_a_resumed_fit_goes_on_as_if_never_stopped(mode, tmp_path):
    def fit(epochs, **how):
        own, module = trainer(mode, max_epochs=epochs), Module()
        module.net[3] = nn.Identity()  # no dropout
        own.fit(module, loader(), **how)
        return own, module

    _, whole = fit(2)
    half, first = fit(1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, again = fit(2, ckpt_path=tmp_path / "half.ckpt")
    assert_same(again, whole.net, whole.losses[6:])
    scale = state_of(resumed.optimizers[0]).scale.state_dict()
    saved = torch.load(tmp_path / "half.ckpt", weights_only=False)["optimizer_states"][0]
    assert saved["loss_scale"]["kind"] == scale["kind"]
    plain = Module.load_from_checkpoint(tmp_path / "half.ckpt", strict=False, weights_only=False)
    assert torch.equal(plain.net[0].weight, first.net[0].weight.float())


class Watching(Module):
    """Validation sees the master weights in FP32."""

    def validation_step(self, batch, index):
        logits = self(batch[0])
        reference = network()
        reference.load_state_dict(self.net.state_dict())
        assert torch.equal(logits, reference.eval()(batch[0]))
        self.log("val_loss", F.cross_entropy(logits, batch[1]))


@pytest.mark.parametrize("mode", ["fp16_naive", "fp16_master_scaled", "amp"])
def test_validation_is_of_the_master_weights_in_fp32(mode):
    own, module = trainer(mode, max_epochs=2), Watching()
    own.fit(module, loader(), loader(2))
    assert torch.isfinite(own.callback_metrics["val_loss"])
    # By the same trainer, and by another without mprun.
    for again in (own, trainer()):
        again.validate(module, loader(2), verbose=False)


class Regression(L.LightningModule):
    """A loss that is a child of the module, with targets beyond FP16's precision."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.loss, self.seen = nn.Linear(12, 1), nn.MSELoss(), []

    def training_step(self, batch, index):
        outputs = self.net(batch[0])
        loss = self.loss(outputs, batch[1])
        assert torch.equal(loss, F.mse_loss(outputs, batch[1]))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    @staticmethod
    def loader():
        targets = 1 + torch.rand(16, 1) * 1e-4
        return DataLoader(TensorDataset(torch.randn(16, 12), targets), batch_size=8)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_is_a_child_computes_in_fp32(mode):
    trainer(mode).fit(module := Regression(), Regression.loader())
    assert isinstance(module.loss, nn.MSELoss)
    assert [*dict(module.named_children())] == ["net", "loss"]


def test_what_cannot_be_is_refused():
    module = fitted("amp")
    with pytest.raises(ValueError, match="is already prepared"):
        trainer("fp32").fit(module, loader())
    with pytest.raises(ValueError, match="fp17"):
        trainer("fp17").fit(Module(), loader())
    with pytest.raises(ValueError, match="needs MprunPrecision"):
        trainer(callbacks=[MprunRun("unused", seed=0)]).fit(Module(), loader())


@pytest.mark.parametrize("mode", THREE)
def test_a_backward_pass_of_ones_own_is_as_good(mode):
    class Own(Module):
        def backward(self, loss):
            (loss / 2).backward(retain_graph=True)
            (loss / 2).backward()

    class OwnPair(Pair):
        def manual_backward(self, loss):
            loss.backward()

    assert_same(fitted(mode, Own()), *by_hand(mode, accumulate=1))
    own, pair = OwnPair(together=True), fitted_pair(mode, together=True)[0]
    torch.manual_seed(2)
    trainer(mode).fit(own, loader())
    assert_same_weights(own, pair)


def test_what_the_module_is_given_as_its_optimizer_is_known():
    class Own(Module):
        def on_train_batch_end(self, outputs, batch, index):
            assert state_of(self.optimizers()).steps == index + 1

    assert len(fitted("amp", Own()).losses) == 6


def test_other_strategies_than_ddp_are_refused():
    state, strategy = SimpleNamespace(fn="fit"), nn.Module()
    module = SimpleNamespace(trainer=SimpleNamespace(state=state, strategy=strategy))
    with pytest.raises(ValueError, match="strategy: is a Module; must be for one device, or DDP"):
        MprunPrecision("amp").convert_module(module)


def test_what_is_only_evaluated_stays_as_it_is():
    module = Module()
    trainer("fp16_naive").validate(module, loader(2), verbose=False)
    assert {own.dtype for own in module.parameters()} == {torch.float32}
    assert "forward" not in vars(module.net)


def test_a_second_fit_of_the_same_trainer_goes_on():
    """With new optimizers and the loss scale as it is."""

    def twice(mode):
        module, own = Module(), trainer(mode)
        torch.manual_seed(2)
        own.fit(module, loader())
        own.fit_loop.max_epochs = 2
        own.fit(module, loader())
        return torch.stack(module.losses)

    plain = twice(None)
    assert len(plain) == 12
    assert_same_bits(twice("fp32"), plain)
    assert torch.allclose(twice("amp"), plain, rtol=12 * 2.0**-11)  # a rounding for each step


@pytest.mark.parametrize("mode", THREE)
def test_closures_of_lbfgs_are_the_loop_written_by_hand(mode):
    class Own(Module):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    module, model = fitted(mode, Own()), network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    mprun.prepare(model, optimizer, mode)
    torch.manual_seed(2)
    for inputs, labels in loader():

        def closure(inputs=inputs, labels=labels):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same_weights(module.net, model)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
@pytest.mark.parametrize("mode", [*THREE, "bf16_stochastic"])
def test_a_step_without_a_loss_is_none(mode):
    class Own(Module):
        def training_step(self, batch, index):
            return None if index == 2 else super().training_step(batch, index)

    module = fitted(mode, Own())
    assert len(module.losses) == 5 and all(map(torch.isfinite, module.losses))


@pytest.mark.parametrize("mode", THREE)
def test_moving_averages_are_of_the_master_weights(mode):
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    module = fitted(mode, callbacks=[averaging.EMAWeightAveraging(decay=0.5)])
    average = partial(AveragedModel, avg_fn=get_ema_avg_fn(0.5), use_buffers=True)
    assert_same(module, *by_hand(mode, average=average))


@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_stochastic_weight_averaging_averages():
    def averaged(mode):
        swa = L.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)
        return fitted(mode, max_epochs=4, callbacks=[swa]).net.state_dict()

    plain = averaged(None)
    assert_same_bits({**averaged("fp32")}, {**plain})
    for name, value in averaged("amp").items():  # 24 steps whose losses are near 1
        assert torch.allclose(value, plain[name], rtol=24 * 2.0**-11, atol=24 * 2.0**-11), name


@pytest.mark.parametrize("mode", MODES)
def test_metrics_that_are_children_count_in_fp32(mode):
    metrics = pytest.importorskip("torchmetrics")

    class Own(Regression):
        def __init__(self):
            super().__init__()
            self.error = metrics.MeanSquaredError()
            self.errors = metrics.MetricCollection([metrics.MeanAbsoluteError()])

        def training_step(self, batch, index):
            outputs = self.net(batch[0])
            error, errors = self.error(outputs, batch[1]), self.errors(outputs, batch[1])
            assert torch.equal(error, F.mse_loss(outputs, batch[1]))
            assert torch.equal(errors["MeanAbsoluteError"], F.l1_loss(outputs, batch[1]))
            self.log("error", self.error, on_epoch=True)
            return super().training_step(batch, index)

    own, module = trainer(mode, max_epochs=2), Own()
    own.fit(module, Own.loader())
    assert own.callback_metrics["error"].dtype is module.error.sum_squared_error.dtype is F32


def test_the_library_by_its_other_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl = pytest.importorskip("pytorch_lightning", reason="needs [pytorch-lightning]")
        from mprun.extensions.adapters import pytorch_lightning as adapter

    class Own(pl.LightningModule):
        forward = Module.forward
        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

    module = Own.__new__(Own)
    pl.LightningModule.__init__(module)
    module.net, module.whole, module.losses = network(), True, []
    torch.manual_seed(2)
    pl.Trainer(plugins=[adapter.MprunPrecision("amp")], **QUIET).fit(module, loader())
    assert_same(module, *by_hand("amp"))


def test_torch_autocast_beside_it_is_refused():
    class Own(Module):
        def training_step(self, batch, index):
            with torch.autocast("cpu", torch.bfloat16):
                return super().training_step(batch, index)

    with pytest.raises(RuntimeError, match="torch.autocast is active"):
        trainer("fp32").fit(Own(), loader())


class Learner(Module):
    def configure_optimizers(self):
        return sgd(self.parameters())


def recorded(folder, mode, seed, **settings):
    module, batches = Learner(), (loader(), loader(2))
    L.seed_everything(seed, verbose=False)  # after them: both seed their own numbers
    run = MprunRun(folder, log_every=2, **settings)
    trainer(mode, max_epochs=5, callbacks=[run]).fit(module, *batches)
    return run.run


class Gan(L.LightningModule):
    """Two optimizers and schedulers by hand, as Lightning's page on manual optimization has them.

    An update adds up two micro-batches.
    """

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(4, 12), nn.Linear(12, 1)
        self.losses, self.rates = [], []

    def turn(self, optimizer, loss, ends):
        self.manual_backward(loss / 2)
        if ends:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def training_step(self, batch, index):
        of_generator, of_critic = self.optimizers()
        torch.manual_seed(100 * self.current_epoch + index)
        fake, ends = self.generator(torch.randn(8, 4)), index % 2 == 1
        with self.toggled_optimizer(of_critic):
            of_real = F.softplus(-self.critic(batch[0])).mean()
            of_fake = F.softplus(self.critic(fake.detach())).mean()
            self.turn(of_critic, of_real + of_fake, ends)
        with self.toggled_optimizer(of_generator):
            fake = self.generator(torch.randn(8, 4))
            loss = F.softplus(-self.critic(fake)).mean()
            self.turn(of_generator, loss, ends)
        if ends:
            for scheduler in self.lr_schedulers():
                scheduler.step()
        self.rates.append([one.get_last_lr() for one in self.lr_schedulers()])
        total = (of_real + of_fake + loss).detach()
        self.log("total", total)
        self.losses.append(total)

    def validation_step(self, batch, index):
        self.log("val_loss", F.softplus(-self.critic(batch[0])).mean())

    def configure_optimizers(self):
        parts = (self.generator, self.critic)
        made = [torch.optim.Adam(part.parameters(), lr=1e-3, eps=1e-6) for part in parts]
        return made, [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in made]


def fitted_gan(mode, epochs=2, callbacks=(), **how):
    own, module = trainer(mode, max_epochs=epochs, callbacks=[*callbacks]), Gan()
    own.fit(module, loader(), loader(2), **how)
    return own, module


def test_two_optimizers_and_schedulers_by_hand_in_fp32_are_lightnings_own():
    (_, plain), (_, own) = fitted_gan(None), fitted_gan("fp32")
    assert_same_end(own.losses, own, plain, plain.losses)
    assert own.rates == plain.rates


@pytest.mark.parametrize("mode", ["fp32", "amp", "fp16_master_scaled", "bf16_stochastic"])
def test_a_resumed_fit_of_two_optimizers_goes_on_as_if_never_stopped(mode, tmp_path):
    whole, module = fitted_gan(mode)
    half, _ = fitted_gan(mode, epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, again = fitted_gan(mode, ckpt_path=tmp_path / "half.ckpt")
    assert_same_end(again.losses, again, module, module.losses[6:])
    assert again.rates == module.rates[6:]
    states = [[one.state_dict() for one in fit.optimizers] for fit in (resumed, whole)]
    assert str(states[0]) == str(states[1])


def test_a_recorded_step_has_the_mean_of_micro_batches_added_up_by_hand(tmp_path):
    run = MprunRun(tmp_path, loss="total", seed=0, log_every=1)
    _, module = fitted_gan("amp", epochs=1, callbacks=[run])
    rows = mprun.load(run.run.directory).one.train["loss"]
    losses = torch.stack(module.losses).view(-1, 2).mean(1)
    assert [*rows] == pytest.approx(losses.tolist())
    assert (run.run.status, run.run.steps, run.evaluated) == ("done", 3, 3)


def test_two_fits_are_compared(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    for mode in ("fp32", "amp"):
        for seed in (0, 1, 2):
            run = recorded(tmp_path, mode, seed)
            assert (run.status, run.steps) == ("done", 30)
    found = mprun.compare(tmp_path).columns()
    assert [*found["mode"]] == ["fp32", "amp"] and [*found["runs"]] == [3, 3]
    assert found["verdict"][0] == "baseline" and "invalid" not in found["verdict"][1]
    assert found["metric"][1] == "val_loss"
    assert found["mean"][1] == pytest.approx(found["mean"][0], rel=0.05)


def test_a_divergence_ends_the_fit_and_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")

    class Broken(Module):
        def training_step(self, batch, index):
            return super().training_step(batch, index) * float("nan")

    run = MprunRun(tmp_path, log_every=1)
    own = trainer("fp32", max_epochs=5, callbacks=[run])
    own.fit(Broken(), loader(), loader(2))
    assert run.run.status == "diverged"
    assert own.global_step < 6


def test_a_failed_fit_is_recorded_as_failed(tmp_path):
    class Failing(Module):
        def training_step(self, batch, index):
            raise OSError("disk")

    run = MprunRun(tmp_path, seed=0)
    with pytest.raises(OSError, match="disk"):
        trainer("amp", callbacks=[run]).fit(Failing(), loader())
    assert (run.run.status, run.run.cause) == ("failed", "OSError: disk")


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(tmp_path, monkeypatch):
    run_page("lightning.md", tmp_path, monkeypatch)
