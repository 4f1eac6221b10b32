"""Every combination that cannot work is refused in one line that names key, value and reason."""

import pytest
import torch
from torch import nn

from mprun.assembly import build, policy_from
from mprun.assembly.precision import optimizer_maker
from mprun.assembly.task import uses_channels_last
from mprun.config.compose import compose_config
from mprun.config.execution_rules import why_not_measured
from mprun.errors import BadInput
from mprun.execution.cuda_graph import why_not_captured
from mprun.precision.torch_update import has_fused_kernel

from ..helpers import ONE_CORE, raises_line, record_of, refused, run
from ..tables import with_extensions
from .trained import SMALL

LSTM = ["model=lstm_lm", "data=synthetic_tokens"]
IMAGES = "model=conv_autoencoder"
GRAPH, COMPILE = "train.cuda_graph=on", "train.compile=default"
NHWC, AUTOTUNE = "train.channels_last=on", "train.autotune=on"
REFUSED = [
    ([GRAPH, "device=cpu"], "a CUDA graph needs device=cuda"),
    ([GRAPH, "device=cuda", "numerics=probes"], "numerics=probes watches tensors with hooks"),
    ([GRAPH, "device=cuda", *LSTM, "train.accumulate=2"], "train.accumulate=2 with a language"),
    ([COMPILE, *LSTM], "torch.compile passes over nn.LSTM"),
    ([COMPILE, IMAGES, "numerics=probes"], "numerics=probes watches tensors with hooks"),
    ([COMPILE, IMAGES, "device=cpu", "precision=amp"], "precision=amp is emulated on a CPU"),
    ([COMPILE, IMAGES, "device=cpu", "precision=fp16_master"], "precision=fp16_master is emulated"),
    ([NHWC, *LSTM], "lstm_lm has no images"),
    ([AUTOTUNE, "device=cpu"], "cuDNN needs device=cuda"),
    ([AUTOTUNE, "device=cuda", "deterministic=true"], "deterministic=true forbids that"),
]
REFUSED = with_extensions("REFUSED", REFUSED)


@pytest.mark.parametrize(("overrides", "reason"), REFUSED)
@pytest.mark.few(6)
def test_refused_before_anything_is_built(overrides, reason):
    with raises_line(BadInput, f"{overrides[0]}: ", reason, "(allowed: "):
        compose_config(overrides)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([GRAPH], "a CUDA graph needs device=cuda"),
        ([AUTOTUNE], "cuDNN needs device=cuda"),
        ([COMPILE, "precision=amp"], "precision=amp is emulated on a CPU"),
    ],
)
def test_refused_once_the_device_is_known(overrides, reason):
    config = compose_config([IMAGES, *overrides, "device=auto"]).config
    with raises_line(BadInput, f"{overrides[0]}: ", reason):
        build(config, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_auto_and_off_are_never_refused(mode):
    for overrides, _ in REFUSED:
        key, _, _ = overrides[0].partition("=")
        compose_config([f"{key}={mode}", *overrides[1:]])


@pytest.mark.parametrize(
    ("overrides", "on", "reason"),
    [
        ([IMAGES, "precision=amp"], True, ""),
        ([IMAGES, "precision=fp16_naive"], True, ""),
        ([IMAGES, "precision=tf32"], True, ""),
        ([IMAGES, "precision=fp32"], False, "FP32 products"),
        ([IMAGES, "precision=fp32", "train.channels_last=on"], True, ""),
        ([IMAGES, "precision=amp", "train.channels_last=off"], False, "train.channels_last=off"),
        ([*LSTM, "precision=amp"], False, "lstm_lm has no images"),
    ],
)
def test_channels_last_where_tensor_cores_multiply_images(overrides, on, reason):
    config = compose_config([*overrides, "device=cuda"]).config
    found, why = uses_channels_last(config, torch.device("cuda"))
    assert found is on and (found or why == reason)
    assert uses_channels_last(config, torch.device("cpu"))[0] is (NHWC in overrides)


def inner_for_cuda(*overrides):
    """The optimizer that a GPU would get, over weights that lie here."""
    config = compose_config([IMAGES, *overrides]).config
    network, policy = nn.Linear(3, 2), policy_from(config.precision)
    make = optimizer_maker(config.optim, policy, torch.device("cuda"), network)
    return make(list(network.named_parameters()))


FUSED_ADAGRAD = pytest.mark.skipif(
    not has_fused_kernel("adagrad", torch.device("cuda")), reason="this torch has no such kernel"
)


RMSPROP, LOOP = ("rmsprop", "rmsprop_tensorflow"), ("rmsprop", "loop")


@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
@pytest.mark.parametrize(
    "optim", ["sgd", "adam", "adamw", pytest.param("adagrad", marks=FUSED_ADAGRAD), *RMSPROP]
)
@pytest.mark.few(3)
def test_which_optimizers_a_graph_can_hold(optim, implementation):
    words = [f"optim={optim}", f"optim.implementation={implementation}"]
    forms = {"rmsprop": ("foreach", "loop"), "rmsprop_tensorflow": ("loop",)}
    if implementation not in forms.get(optim, [implementation]):
        with pytest.raises(BadInput, match=f"implementation={implementation}: .*{optim}"):
            inner_for_cuda(*words)
        return
    optimizer = inner_for_cuda(*words)
    assert why_not_captured([optimizer], constant_rate=True) is None
    # A rate that changes has to be a tensor, and be read on the device.
    assert why_not_captured([optimizer], constant_rate=False) is not None
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros(())
    varying = why_not_captured([optimizer], constant_rate=False)
    # All but the other forms of SGD and Adagrad, and the loop of RMSprop.
    on_device = optim in ("adam", "adamw", *RMSPROP) and (optim, implementation) != LOOP
    assert (varying is None) == (implementation == "fused" or on_device)


def test_a_run_records_how_its_steps_were_executed(tmp_path, capsys):
    directory = tmp_path / "run"
    assert run(directory, *SMALL["reconstruction"], *ONE_CORE, "train.steps=2") == 0
    assert record_of(directory)["execution"] == {
        "cuda_graph": "off: a CUDA graph needs device=cuda",
        "compile": "off: device=cpu",
        "channels_last": "off: device=cpu",
        "autotune": "off: device=cpu",
    }
    # Whether steps are replayed may change from one attempt to the next, how they round may not.
    refused(capsys, f"resume={directory}", "train.steps=3", "train.compile=default")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([IMAGES], None),
        (["model=gpt", "precision=fp8_tensorwise"], None),
        (["model=dcgan", "precision=amp"], None),
        ([IMAGES, "deterministic=true"], "deterministic=true, and a measured time would decide"),
        (LSTM, "torch.compile passes over nn.LSTM"),
        ([IMAGES, "numerics=probes"], "numerics=probes watches tensors with hooks"),
        (["model=gpt", "train.activation_checkpointing=true"], "sets random states between"),
        (["model=gpt", "devices=2", "train.accumulate=2"], "devices=2: ranks would measure"),
        (
            ["model=custom", "model.task=classification", "model.factory=a:b", "data=digits_32"],
            "a network or data of one's own",
        ),
        (
            [IMAGES, "data=custom", "data.factory=a:b", "data.image_size=32"],
            "a network or data of one's own",
        ),
    ],
)
@pytest.mark.few(4)
def test_where_measured_times_decide_on_a_compilation(overrides, reason):
    config = compose_config([*overrides, "device=cuda"]).config
    found = why_not_measured(config, "cuda")
    assert found is None if reason is None else reason in str(found)
    assert why_not_measured(config, "cpu") == "device=cpu"
