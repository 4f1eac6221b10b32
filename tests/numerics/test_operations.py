"""The table of step 1 equals expectations written by hand from each mode's definition."""

import copy
import re
import weakref
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mprun.numerics.operations import FirstStep, _of_casts, in_short, lines, memory_line
from mprun.precision import DynamicLossScale, DynamicRule, get_policy, pin_math_flags
from mprun.precision.block_formats import ELEMENTS
from mprun.record.memory import ActivationMemory

from ..helpers import (
    TINY_GAN,
    TINY_GPT,
    TINY_LM,
    assert_same_bits,
    but,
    making,
    mixed,
    record_of,
    run,
)

BATCH, CHANNELS, SIZE, WIDTH, CLASSES = 4, 3, 8, 6, 10
CONVOLUTION_FLOPS = 2 * BATCH * WIDTH * SIZE * SIZE * CHANNELS * 9
LINEAR_FLOPS = 2 * BATCH * CLASSES * WIDTH


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.output = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.output(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class SmallTask:
    """The smallest task: one batch, cross-entropy in loss_dtype, a dynamic scale."""

    def __init__(self, mode, overrides=None, forced_fp32=False, native=False, network=ConvNet):
        torch.manual_seed(0)
        self.policy = get_policy(mode)
        kept = {"fp32": torch.float32, "fp16": torch.float16}
        dtypes = {name: kept[dtype] for name, dtype in (overrides or {}).items()}
        # As a run's: fused in FP32; a 16-bit update is made of operations.
        kind = {"fused": True} if self.policy.master_dtype else {"foreach": True}
        make = making(torch.optim.SGD, lr=0.1, momentum=0.9, **kind)
        scale = DynamicLossScale(DynamicRule(1024.0))
        learner = mixed(network(), self.policy, make, scale, overrides=dtypes, native=native)
        self.learners = {"model": learner}
        self.forward_context = learner.prepared.forward_context
        self.forced_fp32 = forced_fp32
        self.inputs = torch.randn(BATCH, CHANNELS, SIZE, SIZE)
        self.labels = torch.arange(BATCH)

    def train_step(self, step):
        learner = self.learners["model"]
        learner.zero_grad()
        with self.forward_context:
            logits = learner.network(self.inputs)
            if self.forced_fp32:
                logits = logits @ torch.eye(CLASSES)
            loss = F.cross_entropy(logits, self.labels)
            loss.backward()
        learner.end_part()
        learner.step()
        return loss.detach()


def first_step(task, policy, overrides=None):
    with FirstStep(task, policy, overrides or {}) as first:
        task.train_step(0)
    return first


def watched(mode, overrides=None, **arguments):
    task = SmallTask(mode, overrides, **arguments)
    return first_step(task, task.policy, overrides)


def rows_of(first):
    """(operation, phase) -> row of the table."""
    return {(row["operation"], row["phase"]): row for row in first.operations()["rows"]}


def test_a_step_that_raises_leaves_no_watcher_behind():
    task = SmallTask("fp16_master")
    with pytest.raises(RuntimeError), FirstStep(task, task.policy, {}) as first:
        task.learners["model"].model(torch.zeros(1))
    seen = dict(first.rows)
    task.train_step(0)
    assert task.forward_context.watchers == [] and first.rows == seen


def dtypes_of(first, *names):
    """(operation, phase) -> dtypes, of the operations named."""
    found = {}
    for row in first.operations()["rows"]:
        if row["operation"] in names:
            found.setdefault((row["operation"], row["phase"]), set()).add(row["dtype"])
    return found


PRODUCTS = ("convolution", "convolution_backward", "addmm", "mm")


def all_products(dtype):
    return {
        ("convolution", "forward"): {dtype},
        ("addmm", "forward"): {dtype},
        ("convolution_backward", "backward"): {dtype},
        ("mm", "backward"): {dtype},
    }


# mode: (products, batch norm, relu, log softmax, update)
EXPECTED = {
    "fp32": ("fp32", "fp32", "fp32", "fp32", "_fused_sgd_ fp32"),
    # Norm layers keep FP32 parameters and statistics, so their kernel reads FP16 and FP32.
    "fp16_master": ("emulated fp16", "fp16+fp32", "fp16", "fp32", "_fused_sgd_ fp32"),
    "fp16_master_scaled": ("emulated fp16", "fp16+fp32", "fp16", "fp32", "_fused_sgd_ fp32"),
    "fp16_naive": ("emulated fp16", "fp16", "fp16", "fp32", "_foreach_add_ fp16"),
    # torch.autocast: convolution and linear on its FP16 list, batch norm and relu unlisted.
    "amp": ("emulated fp16", "fp16+fp32", "fp16", "fp32", "_fused_sgd_ fp32"),
    "bf16_master": ("emulated bf16", "bf16+fp32", "bf16", "fp32", "_fused_sgd_ fp32"),
    "amp_bf16": ("emulated bf16", "bf16+fp32", "bf16", "fp32", "_fused_sgd_ fp32"),
    "bf16_naive": ("emulated bf16", "bf16", "bf16", "fp32", "_foreach_add_ bf16"),
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_every_mode_runs_what_its_definition_says(mode):
    first = watched(mode)
    product, norm, relu, softmax, update = EXPECTED[mode]
    assert dtypes_of(first, *PRODUCTS) == all_products(product)
    assert dtypes_of(first, "native_batch_norm") == {("native_batch_norm", "forward"): {norm}}
    assert dtypes_of(first, "relu") == {("relu", "forward"): {relu}}
    assert dtypes_of(first, "_log_softmax") == {("_log_softmax", "forward"): {softmax}}
    name, dtype = update.split()
    assert dtypes_of(first, name)[name, "update"] == {dtype}
    assert first.not_in_16_bits() == []


def test_calls_elements_and_flops_by_hand():
    first, phases = watched("fp16_master"), ("forward", "backward", "update")
    table = first.operations()["rows"]
    order = [(phases.index(row["phase"]), -row.get("flops", 0)) for row in table]
    assert order == sorted(order)
    rows = rows_of(first)
    convolution = rows["convolution", "forward"]
    assert convolution["calls"] == 1
    assert convolution["elements"] == BATCH * WIDTH * SIZE * SIZE
    assert convolution["flops"] == CONVOLUTION_FLOPS
    assert rows["addmm", "forward"]["flops"] == LINEAR_FLOPS
    # Of the convolution only the gradient of the weight: the images need none.
    assert rows["convolution_backward", "backward"]["flops"] == CONVOLUTION_FLOPS
    # Of the linear layer both.
    assert rows["mm", "backward"]["calls"] == 2
    assert not any(name.startswith(("empty", "new_empty", "view")) for name, _ in rows)
    # An update in place returns nothing: its elements are those of the weights.
    weights = sum(own.numel() for own in ConvNet().parameters())
    assert rows["_fused_sgd_", "update"]["elements"] == weights
    assert rows["mm", "backward"]["flops"] == 2 * LINEAR_FLOPS


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "dtype"), [("fp32", "fp32"), ("amp", "emulated fp16")])
@pytest.mark.parametrize("mode_of_attention", ["fused", "manual"])
def test_attention_is_counted_with_its_flops(build_run, mode, dtype, mode_of_attention):
    words = [*TINY_GPT, "model=gpt_llama", f"model.attention={mode_of_attention}"]
    built = build_run(*words, f"precision={mode}", "data.batch_size=3")
    first = first_step(built.task, built.policy)
    assert first.not_in_16_bits() == []
    rows, manual = rows_of(first), mode_of_attention == "manual"
    # Scores and what is attended to: 3 windows, 2 heads of 16 units, 16 x 16 pairs, of which the
    # fused kernel takes those that a causal mask leaves.
    pairs = 16 * 16 if manual else 16 * 17 // 2
    product = 2 * 3 * 2 * pairs * 16
    name = "bmm" if manual else "_scaled_dot_product_flash_attention_for_cpu"
    forward = rows[name, "forward"]
    backward = rows[name if manual else f"{name}_backward", "backward"]
    # The fused kernel makes scores again.
    assert (forward["flops"], backward["flops"]) == (2 * product, (4 if manual else 5) * product)
    assert manual or forward["calls"] == backward["calls"] == 1
    assert forward["dtype"] == backward["dtype"] == dtype


def test_native_kernels_are_not_called_emulated():
    assert dtypes_of(watched("bf16_master", native=True), *PRODUCTS) == all_products("bf16")


@pytest.mark.parametrize(
    ("mode", "module", "products"),
    [
        ("fp16_master", "output", [("addmm", "forward"), ("mm", "backward")]),
        ("amp", "conv", [("convolution", "forward"), ("convolution_backward", "backward")]),
    ],
)
def test_an_override_keeps_a_module_in_fp32_and_is_not_warned_of(mode, module, products):
    first = watched(mode, {module: "fp32"})
    expected = all_products("emulated fp16") | dict.fromkeys(products, {"fp32"})
    assert dtypes_of(first, *PRODUCTS) == expected
    assert first.not_in_16_bits() == []


def test_an_fp32_product_that_nobody_asked_for_is_named():
    first = watched("fp16_master", forced_fp32=True)
    assert first.not_in_16_bits() == ["mm in the step itself"]
    text = first.summary("cpu", whole=False, products={}).splitlines()
    assert len(text) == 2  # with the line that there is always
    assert text[-1].endswith(
        "FP32 products that fp16_master did not ask for: mm in the step itself"
    )


class Normalized(nn.Module):
    """A norm of channels of 3000: 9e6 is beyond FP16, and so is the norm of 516 of them, 68147."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(torch.zeros_like(x) + 3000)


def rms(x):
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)


def in_place(x):
    return x * torch.rsqrt(x.clone().pow_(2).mean(1, keepdim=True) + 1e-6)


def masked(x):
    some = (-x).masked_fill(torch.arange(SIZE) > 3, float("-inf")).mul(2)
    return x + some.add(float("-inf")).exp()


def by_a_float(x):
    return x / (x * 30.0)


def of_516(x):
    return F.normalize(x.repeat(1, 86, 1, 1))[:, :WIDTH]


@pytest.mark.parametrize(
    ("mode", "norm", "overflowed"),
    [
        ("fp16_naive", rms, ["pow in norm"]),
        ("fp16_naive", in_place, ["pow_ in norm"]),
        ("fp16_naive", masked, []),
        ("fp16_naive", by_a_float, ["mul in norm"]),
        ("fp16_naive", of_516, ["linalg_vector_norm in norm"]),
        ("bf16_naive", rms, []),
        ("amp", rms, []),  # CUDA's lists: pow and rsqrt in FP32
        ("amp", of_516, []),
    ],
)
def test_a_norm_that_overflowed_and_came_out_as_0_is_named(mode, norm, overflowed):
    task = SmallTask(mode)
    task.learners["model"].model.norm = Normalized(norm)
    with FirstStep(task, task.policy, {}) as first:
        assert task.train_step(0).isfinite()
    assert first.overflowed() == overflowed
    text = first.summary("cpu", whole=False, products={})
    assert ("overflowed to inf" in text) == bool(overflowed)
    assert all(name in text for name in overflowed)


def test_an_overflow_of_a_gradient_is_none_of_the_forward_pass():
    def grown(gradient):
        return (gradient.float() @ torch.eye(CLASSES) * 1e30).half()

    task = SmallTask("fp16_naive")
    task.learners["model"].model.output.register_forward_hook(
        lambda _, __, out: out.register_hook(grown) and None
    )
    first = first_step(task, task.policy)
    assert first.overflowed() == []
    assert first.not_in_16_bits() == ["mm in the backward pass"]


class ByItself(ConvNet):
    def forward(self, x):
        return super().forward(rms(torch.zeros_like(x) + 3000 + 0 * x.long()))


def test_what_the_network_itself_computes_is_in_the_step_itself():
    assert watched("fp16_naive", network=ByItself).overflowed() == ["pow in the step itself"]


def test_a_module_in_fp32_by_mistake_is_named():
    task = SmallTask("amp")
    output = task.learners["model"].model.output
    forward = output.forward

    def without_autocast(x):
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    output.forward = without_autocast
    assert first_step(task, task.policy).not_in_16_bits() == ["addmm in output"]


def test_what_a_step_kept_goes_with_it_if_no_backward_pass_comes():
    """The backward pass of exp needs its output: what is kept must not hold the graph itself."""
    layer = nn.Linear(2, 2)
    with ActivationMemory([]) as saved:
        output = layer(torch.ones(1, 2)).exp()
    assert saved.bytes >= output.nbytes
    kept = weakref.ref(layer.weight)
    del layer, output
    assert kept() is None


def test_memory_by_kind_by_hand():
    products = WIDTH * CHANNELS * 9 + CLASSES * WIDTH
    norm = 2 * WIDTH
    trained = products + CLASSES + norm
    memory = watched("fp16_master").memory()
    # Parameters are the master weights; their momentum is all the optimizer's state.
    for kind in ("parameters", "gradients", "optimizer_state"):
        assert memory[kind] == {"float32": 4 * trained}
    # Running mean and variance, and the counter of batches.
    assert memory["buffers"] == {"float32": 4 * 2 * WIDTH, "int64": 8}
    # Convolution and linear are cast, the batch norm is not; a bias is not needed for backward.
    assert memory["weight_copies"] == {"float16": 2 * products}
    # Saved: the images, the output of the convolution and of relu (batch norm's own output is not
    # needed), the mean over pixels: FP16. FP32: batch statistics, the log-softmax.
    maps = BATCH * WIDTH * SIZE * SIZE
    assert memory["activations"]["float16"] == 2 * (
        BATCH * CHANNELS * SIZE * SIZE + 2 * maps + BATCH * WIDTH
    )
    assert memory["activations"]["float32"] >= 4 * (norm + BATCH * CLASSES)


def test_autocast_copies_of_weights_are_told_from_activations():
    memory = watched("amp").memory()
    assert memory["weight_copies"] == watched("fp16_master").memory()["weight_copies"]
    fp32 = watched("fp32").memory()
    assert {dtype for sizes in fp32.values() for dtype in sizes} <= {"float32", "int64"}


def test_weights_that_one_launch_casts_are_copies_too():
    """As CUDA casts them."""
    task = SmallTask("fp16_master")
    own = [*task.learners["model"].model.parameters()]
    with FirstStep(task, task.policy, {}) as first, torch.no_grad():
        made = [torch.empty_like(one, dtype=torch.float16) for one in own]
        torch._foreach_copy_(made, own)
        torch._foreach_copy_([one.clone() for one in own], own)  # no casts
    assert first.saved.weight_copies == {(one.data_ptr(), one.nbytes) for one in made}


MODELS = {
    "resnet50": ["model=resnet50", "optim=sgd", "data.batch_size=4"],
    "lstm_lm": [*TINY_LM, "data.batch_size=4", "data.sequence_length=5"],
    "dcgan": TINY_GAN,
}
RECURRENT = {"fp32": "mkldnn_rnn_layer", "amp": "lstm", "fp16_master_scaled": "lstm"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", RECURRENT)
@pytest.mark.parametrize("model", MODELS)
def test_watching_changes_no_bit(build_run, model, mode):
    results = []
    # At the default scale of 2^16 the first updates would be skipped.
    scale = [] if mode == "fp32" else ["scaler.init_scale=16"]
    for watch in (False, True):
        built = build_run(*MODELS[model], f"precision={mode}", *scale)
        with FirstStep(built.task, built.policy, {}) if watch else nullcontext():
            losses = [built.task.train_step(0, measure=True)]
        losses += [built.task.train_step(step, measure=True) for step in (1, 2)]
        results.append((losses, copy.deepcopy(built.task.state_dict()), torch.get_rng_state()))
    assert not any(row["found_inf"] for row in results[0][0] if "found_inf" in row)
    assert_same_bits(*results)


@pytest.mark.parametrize("mode", RECURRENT)
def test_a_fused_recurrent_layer_is_counted_as_one_product(build_run, mode):
    built = build_run(*MODELS["lstm_lm"], f"precision={mode}")
    rows = rows_of(first_step(built.task, built.policy))
    name, lstm = RECURRENT[mode], built.task.learner.model.lstm
    positions = 4 * 5
    per_position = sum(w.numel() for w in lstm.parameters() if w.dim() == 2)
    forward = rows[name, "forward"]
    assert forward["calls"] == lstm.num_layers
    assert forward["flops"] == 2 * positions * per_position
    backward = rows[name + ("_backward" if mode == "fp32" else ""), "backward"]
    assert backward["flops"] == 2 * forward["flops"]
    assert forward["dtype"] == ("fp32" if mode == "fp32" else "emulated fp16")


@pytest.mark.parametrize("mode", ["fp32", "fp16_naive", "amp", "fp16_master_scaled"])
def test_the_console_gets_a_line_or_at_most_ten(mode):
    pin_math_flags("ieee")
    first = watched(mode)
    text = first.summary("cpu", whole=True, products={}).splitlines()
    assert len(text) <= 10
    product = EXPECTED[mode][0]
    (short,) = first.summary("cpu", whole=False, products={"fp16": 0.8, "fp32": 0.2}).splitlines()
    products = "products by calls: fp16 80 %, fp32 20 %"
    assert re.fullmatch(rf"step 1: [\d.]+ k?FLOP; {products} \(.*: -v, run.json\)", short)
    assert text[0] == f"step 1 of {mode} on cpu ran in:"
    update, dtype = EXPECTED[mode][-1].split()
    assert any(re.match(f"  update   {dtype} .*{update}", line) for line in text)
    assert any("casts    fp32->fp16 " in line for line in text) == (mode != "fp32")
    assert re.match(rf"  products {product} [\d.]+ k?FLOP: ", text[1])
    assert any("flags    FP32 products ieee" in line for line in text)


def test_one_line_without_products_or_integers_and_the_formats_of_casts_in_order():
    other = {"step": 3, "rows": [{"elements": 7}, {"elements": 8}]}
    assert in_short(other, {}) == "step 3: no products seen (whole table: -v, run.json)"
    memory = {"parameters": {"float32": 1536}, "buffers": {"int64": 8}}
    assert memory_line(memory) == "parameters fp32 1.5 KiB"
    for pair in product(ELEMENTS, repeat=2):
        named = "emulated " + "+".join(sorted({*pair}))
        assert _of_casts((torch.ones(1), " x ".join(pair), None)) == named


def test_the_flags_of_a_gpu_that_matter():
    flags = {
        "cuda.matmul.fp32_precision": "ieee",
        "cudnn.conv.fp32_precision": "tf32",
        "cudnn.rnn.fp32_precision": "ieee",
        "cuda.matmul.allow_fp16_reduced_precision_reduction": True,
        "cudnn.benchmark": True,
        "deterministic_algorithms": False,
    }
    operations = {"step": 1, "rows": [], "not_in_16_bits": [], "overflowed": []}
    text = "\n".join(lines(operations, {}, flags, "amp", "cuda"))
    assert "cuda.matmul ieee, cudnn.conv tf32, cudnn.rnn ieee" in text
    assert "16-bit products reduced in 16 bits" in text
    assert "cudnn.benchmark on, deterministic off" in text


@pytest.mark.slow
def test_v_prints_the_whole_table(tmp_path, capsys):
    assert run(tmp_path / "r", *MODELS["lstm_lm"], "precision=amp", "train.steps=1", "-v") == 0
    error = capsys.readouterr().err
    assert "\nstep 1 of amp on cpu ran in:\n  products " in error and "\n  memory   " in error
    assert record_of(tmp_path / "r")["config"]["verbose"] is True


def test_a_run_records_its_first_step_and_says_it_once(tmp_path, capsys):
    directory = tmp_path / "run"
    words = but(MODELS["lstm_lm"])
    assert run(directory, *words, "precision=fp16_master", "train.steps=3") == 0
    error = capsys.readouterr().err
    assert error.count("step 1: ") == 1 and "ran in" not in error
    record = record_of(directory)
    assert record["operations"]["step"] == 1
    # Every call that the emulation took over is in the table; the run took three steps.
    rows = [row for row in record["operations"]["rows"] if row["dtype"] == "emulated fp16"]
    emulated = {f"{row['phase']} {row['operation']}": 3 * row["calls"] for row in rows}
    assert emulated == record["emulated"]
    memory = record["memory_by_kind"]
    kept = sum(memory["activations"].values()) + sum(memory.get("weight_copies", {}).values())
    assert kept == record["memory"]["activation_bytes"]
    assert memory["weight_copies"].keys() == {"float16"}
    assert memory["parameters"].keys() == {"float32"}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp32", "tf32", "amp", "fp16_master_scaled"])
@pytest.mark.parametrize("model", MODELS)
def test_on_cuda_the_backward_threads_are_seen(build_run, model, mode):
    built = build_run(*MODELS[model], f"precision={mode}", device="cuda")
    first = first_step(built.task, built.policy)
    found = {(row["phase"], row["dtype"]) for row in first.operations()["rows"] if row.get("flops")}
    dtype = mode if mode in ("fp32", "tf32") else "fp16"
    assert found == {("forward", dtype), ("backward", dtype)}
    assert first.not_in_16_bits() == []
