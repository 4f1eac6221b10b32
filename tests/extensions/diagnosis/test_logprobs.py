"""`mprun logprobs`: log-probabilities of the same weights in several modes and batch shapes."""

import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mprun.cli import main
from mprun.extensions.diagnosis.log_probabilities import (
    by_position,
    difference,
    held_out_windows,
    log_probs,
)
from mprun.models.gpt import GPT
from mprun.precision import pin_math_flags

from ...helpers import TINY_GPT, TINY_LM, but, refused, seal_again
from ...numerics.small_runs import as_json

WORDS, LENGTH = 24, 12
GPT_LM = but(
    TINY_GPT,
    "model.num_layers=2",
    "model.num_heads=4",
    f"data.vocab_size={WORDS}",
    f"data.sequence_length={LENGTH}",
    "data.train_tokens=400",
    "data.eval_tokens=1500",
)


@pytest.fixture(autouse=True)
def flags():
    yield
    pin_math_flags("ieee")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A GPT after 12 steps in FP32, at a rate that moves its weights."""
    folder = tmp_path_factory.mktemp("runs") / "gpt"
    steps = ["train.steps=12", "train.checkpoint_every=12", "optim.lr=0.01"]
    assert main([*GPT_LM, *steps, f"output_dir={folder}"]) == 0
    return folder


def logits_of(*rows):
    """Logits with these probabilities, shifted as a network's are."""
    return torch.tensor(rows, dtype=torch.float64).log() + torch.tensor([[3.0], [-1.0]])


def test_numbers_by_hand():
    """The probabilities of two tokens are 1/2 and 1/4 in a, 2/5 and 1/4 in b."""
    targets = torch.tensor([[0], [2]])
    logits = (
        logits_of([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]),
        logits_of([0.4, 0.4, 0.2], [0.5, 0.25, 0.25]),
    )
    a, b = (torch.log_softmax(own, 1).gather(1, targets) for own in logits)
    found = difference(a, b, band=0.01)
    apart = math.log(0.5 / 0.4)
    assert (found.tokens, found.nonfinite, found.outside) == (2, 0, 0.5)
    assert found.rms == pytest.approx(apart / math.sqrt(2), rel=1e-12)
    assert found.mean == pytest.approx(apart / 2, rel=1e-12)
    assert found.largest == pytest.approx(apart, rel=1e-12)
    assert found.ratio_rms == pytest.approx(0.25 / math.sqrt(2), rel=1e-12)
    assert difference(a, b, band=0.2501).outside == 0
    # The other way round the ratio is 4/5, and all of a - b changes its sign.
    turned = difference(b, a, band=0.2001)
    assert (turned.rms, turned.largest, turned.mean) == (found.rms, found.largest, -found.mean)
    assert turned.outside == 0 and difference(b, a, band=0.1999).outside == 0.5


def test_what_is_equal_or_not_finite():
    values = torch.linspace(-9, -1, 12).view(3, 4)
    same = difference(values, values.clone(), 0.0)
    assert (same.differing, same.rms, same.mean, same.largest, same.outside) == (0, 0, 0, 0, 0)
    broken = values.clone()
    broken[0, :3] = torch.tensor([math.nan, -math.inf, math.inf])
    found = difference(broken, values, 0.01)
    assert (found.differing, found.nonfinite, found.outside, found.rms) == (3, 3, 0.25, 0)
    nothing = difference(broken[:1, :3], values[:1, :3], 0.01)
    assert nothing.outside == 1 and math.isnan(nothing.rms) and math.isnan(nothing.largest)


def test_parts_of_the_window():
    """10 positions in 4 parts: 3, 3, 2, 2; the last ones are off by 1/8."""
    a = torch.zeros(5, 10)
    b = a.clone()
    b[:, 8:] = 0.125
    parts = by_position(a, b, 0.01, bins=4)
    found = [(last, part.tokens, part.mean) for last, part in parts.items()]
    assert found == [(3, 15, 0), (6, 15, 0), (8, 10, 0), (10, 10, -0.125)]
    assert list(by_position(a[:, :3], b[:, :3], 0.01)) == [1, 2, 3]


def test_windows_are_the_first_of_the_held_out_data():
    """Batches [5, 2] and [3, 2]: a window of 2 fits twice into the first, once into the other."""
    columns = torch.arange(20).view(10, 2)
    batches = [(columns[:5], columns[:5] + 1), (columns[5:8], columns[5:8] + 1)]
    data = SimpleNamespace(eval_batches=lambda: iter(batches))
    whole = held_out_windows(data, 10**6)
    assert whole.tokens.tolist() == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert torch.equal(whole.targets, whole.tokens + 1)
    short = held_out_windows(data, 10**6, 2).tokens.tolist()
    assert short == [[0, 2], [1, 3], [4, 6], [5, 7], [10, 12], [11, 13]]
    assert held_out_windows(data, 7, 2).tokens.tolist() == short[:3]
    assert held_out_windows(data, 1, 2).tokens.tolist() == short[:1]
    with pytest.raises(ValueError, match="at most 5 tokens"):
        held_out_windows(data, 10, 6)


def weights_of(run):
    (file,) = run.glob("checkpoints/*/state.pt")
    return torch.load(file, weights_only=True)["task"]["learner"]["model"]


def in_float64(run, windows):
    """Log-probabilities by a GPT built by hand from the checkpoint, log-softmax by NumPy."""
    model = GPT(WORDS, LENGTH, hidden_size=32, num_layers=2, num_heads=4)
    model.load_state_dict(weights_of(run))
    with torch.no_grad():
        logits = model.double()(windows.tokens.t())[0].transpose(0, 1).numpy()
    values = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(values, windows.targets.numpy()[..., None], -1)[..., 0]


@pytest.mark.slow
def test_against_float64_and_a_forward_pass_of_ones_own(run, build_run, capsys):
    """FP32 is off by its sums (2^-24 each, some hundred of them); BF16's are from its own task."""
    built = build_run(*GPT_LM)
    windows = held_out_windows(built.data, 1200)
    assert windows.tokens.shape == (100, LENGTH)
    truth = in_float64(run, windows)
    report = as_json(capsys, "logprobs", "bf16_naive", run, "--tokens", 1200, "--batch", 100)
    assert (report["step"], report["windows"], report["window"]) == (12, 100, LENGTH)
    (pair,) = report["pairs"]

    built = build_run(*GPT_LM, "precision=bf16_naive")
    learner = built.task.learner
    learner.model.load_state_dict(weights_of(run))
    with learner.evaluating(in_mode=True, widens=False) as model:
        logits = model(windows.tokens.t().contiguous())[0]
    assert logits.dtype is torch.bfloat16
    own = torch.log_softmax(logits.double(), -1).transpose(0, 1)
    own = own.gather(-1, windows.targets[..., None])[..., 0].numpy()
    apart = own - truth
    assert pair["rms"] == pytest.approx(np.sqrt(np.square(apart).mean()), rel=1e-3)
    assert pair["mean"] == pytest.approx(apart.mean(), abs=1e-5)
    assert pair["largest"] == pytest.approx(np.abs(apart).max(), rel=1e-3)
    assert pair["ratio_rms"] == pytest.approx(np.sqrt(np.square(np.expm1(apart)).mean()), rel=1e-3)
    assert pair["outside"] == pytest.approx((abs(np.expm1(apart)) > 0.01).mean(), abs=2 / 1200)
    assert [part["up_to"] for part in pair["positions"]] == [2, 4, 6, 8, 9, 10, 11, 12]
    last = np.sqrt(np.square(apart[:, -1]).mean())
    assert pair["positions"][-1]["rms"] == pytest.approx(last, rel=1e-3)


def test_fp32_is_float64_but_for_its_sums_in_any_batch_shape(run, build_run):
    built = build_run(*GPT_LM)
    built.task.learner.model.load_state_dict(weights_of(run))
    short = held_out_windows(built.data, 300, 8)
    truth = torch.from_numpy(in_float64(run, short))
    shapes = {shape: log_probs(built.task, short, *shape) for shape in ((37, 0), (1, 0), (5, 4))}
    for shape, values in shapes.items():
        assert values.dtype is torch.float64 and values.shape == (37, 8)
        assert difference(values, truth, 0.01).largest < 1e-5, shape
    assert torch.equal(shapes[37, 0], log_probs(built.task, short, 37))
    assert built.task.learner.model.training  # as it was


@pytest.mark.slow
def test_fp16_is_off_less_than_bf16_by_its_three_bits(run, capsys):
    """A rounding is up to 2^-11 in FP16 and 2^-8 in BF16: 8 times, whatever they add up to."""
    report = as_json(capsys, "logprobs", "fp16_master", "bf16_master", "fp8_tensorwise", run)
    against = {(pair["mode"], pair["against"]["mode"]): pair["rms"] for pair in report["pairs"]}
    fp16, bf16 = against["fp16_master", "fp32"], against["bf16_master", "fp32"]
    assert 4 < bf16 / fp16 < 16
    # Independent errors add up as squares: BF16 against FP16 is almost BF16 against FP32.
    assert against["bf16_master", "fp16_master"] == pytest.approx(bf16, rel=0.3)
    assert against["fp8_tensorwise", "fp32"] > bf16
    assert report["products"]["fp32"] == "none"
    assert "e4m3" in report["products"]["fp8_tensorwise"]


@pytest.mark.slow
def test_a_mode_of_ones_own_keeps_modules_in_fp32(run, tmp_path, capsys):
    """One of two blocks is in FP32: independent errors of equal ones would leave 1 / sqrt(2)."""
    (tmp_path / "precision").mkdir()
    mode = 'defaults: [bf16_master]\nname: half\noverrides:\n  "blocks.0*": fp32\n'
    (tmp_path / "precision" / "half.yaml").write_text(mode)
    words = ["fp32", "bf16_master", "half", run, "--config-dir", tmp_path, "--tokens", 1200]
    whole, half = (pair["rms"] for pair in as_json(capsys, "logprobs", *words)["pairs"])
    assert 0.4 < half / whole < 0.98


@pytest.mark.slow
def test_the_mode_s_own_log_softmax_is_rounded(run, capsys):
    """Near -log(24) = -3.2 a step of BF16 is 2^-6: of an even error the RMS is 2^-6 / sqrt(12)."""
    wide, own = (
        as_json(capsys, "logprobs", "bf16_master", run, "--log-softmax", kind)["pairs"][0]["rms"]
        for kind in ("fp32", "mode")
    )
    assert math.sqrt(own**2 - wide**2) == pytest.approx(2**-6 / math.sqrt(12), rel=0.35)


@pytest.mark.slow
def test_the_text_fits_a_terminal_and_says_what_it_is_of(run, capsys):
    words = ["logprobs", "fp16_master_scaled", str(run), "--batch", "8,1", "--window", "8"]
    words += ["--tokens", "200"]
    assert main([*words, "--pad", "0,4"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= max(80, len(f"weights  {run}, step 12"))
    assert f"{run}, step 12" in text and "against fp16_master_scaled/8\n" in text
    assert "fp16_master_scaled/1+4: " in text and " tokens differ" in text
    assert "against fp32/8\n" in text


SAMPLED = [
    *TINY_LM,
    "model=biglstm",
    "model.embedding_size=8",
    "model.projection_size=4",
    "model.num_layers=1",
    "model.sampled_softmax=12",
    "optim=adagrad",
]


@pytest.mark.slow
@pytest.mark.parametrize("own", [TINY_LM, SAMPLED], ids=["lstm", "sampled"])
def test_fresh_weights_of_other_language_models(own, capsys):
    own = [*own, "--tokens", "100"]
    assert main(["logprobs", "bf16_master", *own]) == 0
    text = capsys.readouterr().out
    assert "weights  fresh, of seed 0: they say little about trained ones" in text
    one, *_ = as_json(capsys, "logprobs", "amp_bf16", *own)["pairs"]
    assert 0 < one["rms"] < 0.05 and one["nonfinite"] == 0


BAD = {
    "fp16_x": "neither a folder nor a mode; did you mean 'fp16_naive'?",
    "fp32": "needs two modes, or one beside FP32",
    "": "no mode: needs two modes",
    "amp amp RUN": "amp amp: a mode is there twice in one shape; use --batch 16,1",
    "amp RUN RUN": "a second run directory, only one is allowed",
    "amp RUN/checkpoints": "no run.json there",
    "amp RUN optim.lr=1": "optim.lr=1: a recorded run keeps its configuration",
    "amp precision=amp": "precision=amp: a mode is a single word",
    "amp resume=x": "resume=x: is not allowed with a run; pass the run directory alone",
    "amp model=resnet50": "model=resnet50: needs a language model",
    "amp fp32 --batch 3,4,5": "--batch 3,4,5: must have 1 value, or 2 values (one per mode)",
    "amp --batch 3,x": "--batch x: must be whole numbers, separated by commas, from 1",
    "amp --band 2": "--band 2: must be a number from 0 to 1",
    "amp RUN --window 13": "--window 13: the held-out data have windows of at most 12 tokens",
    "amp RUN --pad 1": "--window 12 --pad 1: the sum must be at most 12, the model's "
    "context, got 13",
    "amp RUN --batch 3 --tokens 24": "--batch 3: must be at most 2, the windows of --tokens 24",
    "amp --log-softmax bf16": "--log-softmax: invalid choice: 'bf16'",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line(words, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(run.rglob("*"))
    refused(capsys, "logprobs", *words.replace("RUN", str(run)).split(), says=BAD[words])
    assert sorted(run.rglob("*")) == before and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_does_not_belong_together_is_refused(run, tmp_path, capsys):
    other = shutil.copytree(run, tmp_path / "run")

    def command(old, new):
        text = (run / "config.yaml").read_text()
        (other / "config.yaml").write_text(text.replace(old, new))
        seal_again(other)
        return ["logprobs", "amp", str(other), "--tokens", "24"]

    assert main(command("", "")) == 0
    says = "checkpoints: is not the state of this run"
    refused(capsys, *command("num_layers: 2", "num_layers: 3"), says=says, code=4)
    says = "the data differ from the data at the start of the run"
    refused(capsys, *command("train_tokens: 400", "train_tokens: 399"), says=says)
    shutil.rmtree(other / "checkpoints")
    refused(capsys, *command("", ""), says="train it with train.checkpoint_every=N")
    (other / "checkpoints").symlink_to(run / "checkpoints")
    refused(capsys, *command("", ""), says="is a link that leads out of the run", code=4)
