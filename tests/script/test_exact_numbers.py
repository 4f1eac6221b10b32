"""Numbers that a cast to 16 bits destroys are named; real numbers and masks are not."""

import warnings

import pytest
import torch
from torch import nn

import mprun
from mprun.prepared.exact_numbers import destroyed

FP16, BF16 = torch.float16, torch.bfloat16
RANDOM = torch.Generator().manual_seed(0)
CODES = torch.randint(0, 4000, (64, 1), generator=RANDOM).float()
REAL = torch.randn(64, 5, generator=RANDOM)


@pytest.mark.parametrize(
    ("values", "in_fp16", "in_bf16"),
    [
        (CODES, "whole", "whole"),
        (torch.cat([REAL, CODES], 1), "whole", "whole"),
        (CODES % 1000, None, "whole"),
        (torch.arange(257.0), None, None),  # 256 is the last that BF16 holds, with all below
        (torch.arange(260.0), None, "whole"),
        (torch.arange(2049.0), None, "whole"),
        (torch.arange(2053.0), "whole", "whole"),
        (1.7e9 + 4096 * torch.arange(9.0), "inf", "whole"),  # Unix seconds
        (REAL * 1e6, "inf", None),
        (REAL * 1e3, None, None),
        (torch.randint(0, 256, (2, 3, 8, 8), generator=RANDOM).float(), None, None),  # pixels
        (torch.tensor([0.0, -1e9, -1e9]), None, None),  # masks
        (torch.tensor([0.0, -torch.inf, torch.nan]), None, None),
        (torch.full((4, 1), 4001.0), None, None),
        (torch.zeros(0, 3), None, None),
        (CODES.half(), None, None),
        (CODES.long(), None, None),
    ],
)
def test_what_is_destroyed(values, in_fp16, in_bf16):
    """FP16 holds whole numbers up to 2,048, BF16 up to 256; FP16 ends at 65,504."""
    assert (destroyed(values, FP16), destroyed(values, BF16)) == (in_fp16, in_bf16)


def test_nothing_is_read_from_a_sparse_tensor_or_within_a_transform():
    codes, found = torch.arange(4001.0).reshape(-1, 1), []
    assert destroyed(codes, BF16) == "whole" and destroyed(codes.to_sparse(), BF16) is None
    torch.func.vmap(lambda one: found.append(destroyed(one, BF16)) or one)(codes)
    assert found == [None]


class Coded(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes, self.head = nn.Embedding(4000, 8), nn.Linear(13, 2)
        self.register_buffer("places", torch.arange(3000.0))

    def forward(self, features, times=None):
        found = self.codes(features[:, -1].long().clamp(0, 3999))
        return self.head(torch.cat([found, features[:, :-1]], 1)) + self.places[:2] * 0


@pytest.mark.parametrize(("mode", "says"), [("fp16_master", True), ("amp", False), ("fp32", False)])
def test_an_input_and_a_buffer_are_named_once_with_the_cure(mode, says):
    """In modes that cast at the border; autocast gets both as they are. A record has the places."""
    model = Coded()
    _, optimizer = mprun.prepare(model, torch.optim.SGD(model.parameters(), 0.1), mode)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.cat([REAL, CODES], 1), times=1.7e9 + 4096 * torch.arange(9.0))
    lines = [str(one.message) for one in said]
    assert lines == says * [
        f"input features: whole numbers change in fp16, up to {CODES.max():,.0f}; pass them as "
        "integers",
        "input times: values become infinite in fp16, up to 1.70003e+09; scale them before",
        "buffer places: whole numbers change in fp16, up to 2,999; keep them as integers, or in a "
        "module that computes in fp32 (overrides)",
    ], lines
    places = says * ["buffer places", "input features", "input times"]
    assert mprun.state_of(optimizer).models[0].audit.result()["destroyed_by_a_cast"] == places


def test_further_inputs_are_named_by_their_number():
    class Several(nn.Linear):
        def __init__(self):
            super().__init__(5, 2)
            self.places = nn.Parameter(torch.arange(5), requires_grad=False)  # integers stay so

        def forward(self, *inputs):
            return super().forward(inputs[0][:, self.places]) + 0 * inputs[1].sum()

    model = Several()
    mprun.prepare(model, torch.optim.SGD([model.weight, model.bias], 0.1), "bf16_master")
    with pytest.warns(UserWarning, match="^input 2: whole numbers change in bf16"):
        model(REAL, CODES)
    assert model.places.dtype is torch.int64


def test_a_transform_of_torch_func_over_weights_is_refused_with_the_cure():
    model = nn.Linear(4, 2)
    mprun.prepare(model, torch.optim.SGD(model.parameters(), 0.1), "bf16_master")

    def loss(weights):
        return torch.func.functional_call(model, weights, (REAL[:, :4],)).square().mean()

    with pytest.raises(RuntimeError, match=r"torch\.func .* use torch\.autograd\.grad"):
        torch.func.grad(loss)(dict(model.named_parameters()))
