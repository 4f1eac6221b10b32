"""A script of `mprun.prepare` and `mprun.Run` on the fake device: every mode, no step waits."""

import pytest

from .cells import MODES

SCRIPT = """
import tempfile
import torch
from torch import nn
from torch.nn import functional as F
import mprun

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 16, 2, dropout=0.1)
        self.norm, self.hidden, self.output = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 50)
    def forward(self, tokens):
        return self.output(self.hidden(self.norm(self.lstm(self.embedding(tokens))[0])))

def answer():
    model = Words().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    model, optimizer = mprun.prepare(model, optimizer, {mode!r})
    average = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run = mprun.Run({folder!r}, optimizer, config={{}}, seed=0, log_every=2)
    tokens = torch.randint(50, (8, 4), device="cuda")
    try:
        for step in range(6):
            torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
            optimizer.zero_grad()
            for _ in range(2):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / 2
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.step()
            run.step(loss, share=0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    model.eval()
    with torch.no_grad():
        assert model(tokens).dtype is torch.float32
    run.evaluate(loss=0.0)
    run.close()
    kinds = {{str(parameter.dtype) for parameter in model.parameters()}}
    return {{"steps": run.steps, "dtypes": sorted(kinds), "calls": mprun.state_of(optimizer).steps}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_script_in_every_mode(script, mode, tmp_path):
    found = script(SCRIPT.format(mode=mode, folder=str(tmp_path / "runs")))
    assert (found["steps"], found["calls"]) == (6, 6)
    kinds = {
        "fp16_naive": ["torch.float16"],
        "bf16_naive": ["torch.bfloat16"],
        "bf16_stochastic": ["torch.bfloat16", "torch.float32"],  # norms
        "bf16_kahan": ["torch.bfloat16", "torch.float32"],
    }
    assert found["dtypes"] == kinds.get(mode, ["torch.float32"])
    # torch's default AdamW in bf16_naive is warned of.
    assert [w for w in found["warnings"] if "prototype" not in w and "AdamW betas" not in w] == []


SEVERAL = """
import torch, mprun
from torch import nn
from torch.utils.checkpoint import checkpoint

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.gain = nn.Linear(16, 16), nn.Parameter(torch.ones(16))
    def forward(self, x):
        return checkpoint(lambda x: self.layer(x) * self.gain, x, use_reentrant=True)

def answer():
    models = [Scaled().cuda() for _ in range(3)]
    head = nn.Linear(16, 16).cuda()
    held = [own for module in (*models, head) for own in module.parameters()]
    optimizer = torch.optim.AdamW(held, 1e-3, fused=True)
    mprun.prepare(models, [optimizer], {mode!r})
    x = torch.ones(8, 16, device="cuda", requires_grad=True)
    try:
        for step in range(8):  # the first three calls of each are watched
            torch.cuda.set_sync_debug_mode("error" if step >= 6 else "default")
            optimizer.zero_grad()
            loss = head(models[1 + step % 2](models[0](x))).square().mean()  # one is left out
            loss.backward()
            nn.utils.clip_grad_norm_(held, 1.0)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {{"steps": mprun.state_of(optimizer).steps}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["amp", "fp16_master_scaled", "bf16_master"])
def test_models_that_losses_leave_out_and_checkpoints_wait_for_nothing(script, mode):
    assert script(SEVERAL.format(mode=mode))["steps"] == 8


WAITS = """
import contextlib, io, torch, mprun
from mprun.precision.torch_update import initialise_state

def answer():
    said = {{}}
    for name, make in {{
        "plain": lambda own: torch.optim.AdamW(own),
        "fused": lambda own: torch.optim.AdamW(own, fused=True),
        "capturable": lambda own: torch.optim.AdamW(own, capturable=True),
        "momentum": lambda own: torch.optim.SGD(own, 0.1, momentum=0.9),
    }}.items():
        model = torch.nn.Linear(8, 8).cuda()
        model, optimizer = mprun.prepare(model, make(model.parameters()), {mode!r})
        initialise_state(optimizer)  # here any step may be skipped, and a first one has none
        with contextlib.redirect_stderr(io.StringIO()) as stream:
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(2, 8, device="cuda")).sum().backward()
                optimizer.step()
        said[name] = stream.getvalue()
    return said
"""


@pytest.mark.parametrize("mode", ["amp", "fp16_master_scaled", "fp32"])
def test_an_optimizer_that_waits_says_so_once(script, mode):
    found = script(WAITS.format(mode=mode))
    line = (
        "mprun: AdamW: each step waits for the device, because only the host can skip it; with "
        "fused=True or capturable=True it does not\n"
    )
    said = {name: found[name] for name in ("plain", "fused", "capturable", "momentum")}
    assert said == dict.fromkeys(said, "") | ({"plain": line} if mode != "fp32" else {})


RECURRENT = """
import torch, mprun

class Layer(torch.nn.LSTM):
    def forward(self, inputs):
        self.seen = pieces(self)
        return super().forward(inputs)[0]

def pieces(layer):
    return sorted({{own.untyped_storage().data_ptr() for own in layer._flat_weights}})

def answer():
    layer = Layer(16, 16, 2).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), 1e-3, fused=True)
    mprun.prepare(layer, optimizer, {mode!r})
    own = pieces(layer)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.zeros(3, 2, 16, device="cuda")).float().sum().backward()
        optimizer.step()
    return {{"pieces": len(layer.seen), "is_own": layer.seen == own}}
"""


@pytest.mark.parametrize(
    ("mode", "is_own"), [("amp", True), ("fp16_naive", True), ("fp16_master_scaled", False)]
)
def test_weights_of_an_lstm_are_copied_together_only_if_apart(script, mode, is_own):
    """cuDNN wants them in one piece, as they are outside; casts are apart."""
    found = script(RECURRENT.format(mode=mode))
    assert (found["pieces"], found["is_own"]) == (1, is_own)
    assert [w for w in found["warnings"] if "contiguous" in w] == []


EXPERTS = """
import mprun
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32, 32) / 6)

    def forward(self, x):
        return torch.bmm(x.expand(4, -1, -1), self.weight).mean(0)


model = nn.Sequential(nn.Linear(16, 32), Experts(), nn.Linear(32, 16)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
model, optimizer = mprun.prepare(model, optimizer, {mode!r})
for _ in range(3):
    model(torch.randn(16, 16, device="cuda")).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
return {{"steps": mprun.state_of(optimizer).steps}}
"""


@pytest.mark.parametrize(
    "mode",
    [
        *("nvfp4_4over6", "mxfp4_hadamard", "fp8_deepseek", "fp8_delayed_megatron"),
        *("int8_rowwise", "qat_int8", "qat_nvfp4", "fp8_rowwise"),
    ],
)
@pytest.mark.few(1)
def test_experts_in_todays_recipes(script, mode):
    """Their casts and products run on a device, for layers and for 3-D weights."""
    assert script(EXPERTS.format(mode=mode))["steps"] == 3


ATTENTION = """
import torch, mprun
from torch import nn
from torch.nn import functional as F

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(16, 48)
    def forward(self, x):
        parts = (p.unflatten(-1, (2, 8)).transpose(1, 2) for p in self.inputs(x).chunk(3, -1))
        return F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)

def answer():
    model = nn.Sequential(Attention(), nn.Linear(16, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    model, optimizer = mprun.prepare(model, optimizer, {mode!r})
    for step in range(6):
        torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
        optimizer.zero_grad()
        model(torch.zeros(4, 6, 16, device="cuda")).square().mean().backward()
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    context = mprun.state_of(optimizer).forward_context
    return {{"calls": context.rerouted(), "kind": context.kind()}}
"""


def test_attention_in_fp8_is_emulated_and_never_waits(script):
    """The name says that it is an emulation, on a GPU too."""
    found = script(ATTENTION.format(mode="fp8_attention"))
    assert found["calls"] == {"forward e4m3-attention": 6, "backward e5m2-attention": 6}
    assert found["kind"] == "native-bf16 emulated-e4m3-attention emulated-e5m2-attention"
