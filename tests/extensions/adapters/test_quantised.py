"""LoRA on quantised layers of torchao and bitsandbytes, in a precision mode.

Codes stay as they are, and adapters are trained as any weights. Layers with codes take no part in
products of FP8. Those whose weights cannot be in 16 bits compute in FP32.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mprun
from mprun.torch_private import holds_codes

from ...helpers import assert_same_bits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
INT4 = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32)}
OF_TORCHAO = {
    "int8": quantization.Int8WeightOnlyConfig(),
    "int4": quantization.IntxWeightOnlyConfig(**INT4),
    "float8": quantization.Float8WeightOnlyConfig(),
}
OF_BITSANDBYTES = {"8 bits": "Linear8bitLt", "nf4": "LinearNF4"}
# Distance of the gradients of one step from the plain ones: the rounding of a product's operands
# (unit roundoff), which eight layers of products and sums may add up.
MODES = {
    "amp": 8 * 2**-11,
    "fp16_master_scaled": 8 * 2**-11,
    "bf16_master": 8 * 2**-8,
    "bf16_naive": 8 * 2**-8,
    "fp8_tensorwise": 2**-2,  # E5M2 alone rounds by 2**-3
}


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False)
        self.a, self.b = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def network(kind):
    torch.manual_seed(0)
    model = nn.Sequential(Lora(), nn.GELU(), Lora(), nn.GELU(), nn.Linear(64, 8))
    if kind in OF_TORCHAO:
        quantization.quantize_(model, OF_TORCHAO[kind], lambda _, name: name.endswith("base"))
        return model
    layers = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").nn
    for part in (model[0], model[2]):
        how = {"has_fp16_weights": False} if kind == "8 bits" else {"compute_dtype": torch.float32}
        made = getattr(layers, OF_BITSANDBYTES[kind])(64, 64, bias=False, **how)
        made.load_state_dict(part.base.state_dict())
        part.base = made.to("cpu").requires_grad_(False)  # `to` quantises
    return model


def codes(model):
    found = {}
    for name in ("0.base", "2.base"):
        weight = model.get_submodule(name).weight
        assert holds_codes(weight)
        inside = [weight.detach()]
        if hasattr(weight, "__tensor_flatten__"):
            inside = [getattr(weight, key) for key in weight.__tensor_flatten__()[0]]
        found |= {f"{name}.{n}": own.clone() for n, own in enumerate(inside)}
    return found


def trained(kind, mode, steps):
    model = network(kind)
    own = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(own, lr=0.1)
    if mode is not None:
        mprun.prepare(model, optimizer, mode)
    before = codes(model)
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs.argmax(1) % 8).backward()
        optimizer.step()
    assert_same_bits(codes(model), before)
    return model, own


@pytest.mark.parametrize("kind", [*OF_TORCHAO, *OF_BITSANDBYTES])
def test_fp32_trains_adapters_as_without_it(kind):
    (_, plain), (_, own) = trained(kind, None, 4), trained(kind, "fp32", 4)
    assert_same_bits(own, plain)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*OF_TORCHAO, *OF_BITSANDBYTES])
@pytest.mark.few(3)
def test_a_mode_trains_adapters_beside_codes_that_stay(kind, mode):
    model, own = trained(kind, mode, 4)
    if mode != "bf16_naive":
        assert {value.dtype for value in own} == {torch.float32}
    gradients = [
        torch.cat([value.grad.float().flatten() for value in trained(kind, one, 1)[1]])
        for one in (mode, None)
    ]
    distance = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert 0 < distance < MODES[mode]
    with torch.no_grad():
        assert model.eval()(torch.randn(2, 64)).dtype is torch.float32
