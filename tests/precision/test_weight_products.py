"""Products with parameters inside forward: the bits of one linear layer for each expert."""

import dataclasses
import operator
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mprun
from mprun.precision import get_policy
from mprun.precision.scaled_linear import chosen_products, install
from mprun.precision.scaled_operators import Calls
from mprun.prepared import passes

EXPERTS, WIDTH, INNER = 4, 32, 24
MODES = ["fp8_tensorwise", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4_plain"]


class Experts(nn.Module):
    """Experts as transformers writes them, in each of its three forms."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.1)

    def forward(self, x, chosen):
        """Each row of x goes to the expert in `chosen`, which is sorted."""
        ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0)
        if self.how == "loop":
            found = []
            for expert in chosen.unique():  # a tensor, as in transformers
                gate, up = F.linear(x[chosen == expert], self.gate_up_proj[expert]).chunk(2, -1)
                found.append(F.linear(F.silu(gate) * up, self.down_proj[expert]))
            return torch.cat(found)
        if self.how == "grouped":
            offs = ends.to(torch.int32)
            turned = self.gate_up_proj.transpose(-2, -1), self.down_proj.transpose(-2, -1)
            gate, up = F.grouped_mm(x, turned[0], offs=offs).chunk(2, -1)
            return F.grouped_mm(F.silu(gate) * up, turned[1], offs=offs)
        picked = self.gate_up_proj[chosen], self.down_proj[chosen]
        gate, up = torch.bmm(picked[0], x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        return torch.bmm(picked[1], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)


class Separate(nn.Module):
    """The same experts, each of two linear layers."""

    def __init__(self, experts):
        super().__init__()
        for name in ("gate_up_proj", "down_proj"):
            layers = nn.ModuleList()
            for weight in getattr(experts, name):
                layers.append(nn.Linear(weight.size(1), weight.size(0), bias=False))
                layers[-1].weight.data.copy_(weight)
            setattr(self, name, layers)

    def forward(self, x, chosen):
        found = []
        for expert in range(EXPERTS):
            gate, up = self.gate_up_proj[expert](x[chosen == expert]).chunk(2, -1)
            found.append(self.down_proj[expert](F.silu(gate) * up))
        return torch.cat(found)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x):
        return F.linear(x, self.weight)


class Mixture(nn.Module):
    def __init__(self, how="loop"):
        super().__init__()
        self.gate, self.experts = Router(), Experts(how)

    def forward(self, x):
        best, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        return x + self.experts(x[order], chosen[order])[order.argsort()] * best.unsqueeze(-1)


class Network(nn.Module):
    def __init__(self, how="loop"):
        super().__init__()
        self.blocks = nn.ModuleList(Mixture(how) for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def passed(model, x, *more):
    """Return output and gradients, those of equal parameters of experts stacked."""
    x = x.clone().requires_grad_()
    found = model(x, *more)
    (found.float() * torch.linspace(-3, 2, found.numel()).view(found.shape).exp2()).sum().backward()
    return found, x.grad


def named(mode, *patterns):
    return dataclasses.replace(get_policy(mode).matmul, modules=patterns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", ["loop", "grouped", "picked"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few
def test_an_expert_is_a_linear_layer(mode, how, dtype):
    """Expert 2 has no row: its gradients are zeros, or none in a loop that leaves it out."""
    experts = Experts(how).to(dtype)
    expected = Separate(experts).to(dtype)
    install(experts, named(mode, "*"), {}, calls=(calls := Calls()))
    install(expected, named(mode, "*", "down_proj.3"), {})
    x, chosen = torch.randn(23, WIDTH, dtype=dtype), torch.tensor([0] * 9 + [1] * 13 + [3])
    x[0] *= 1000
    y, grad_x = passed(experts, x, chosen)
    other, other_grad = passed(expected, x, chosen)
    assert torch.equal(y, other) and torch.equal(grad_x, other_grad)
    for name in ("gate_up_proj", "down_proj"):
        layers, found = getattr(expected, name), getattr(experts, name).grad
        assert torch.equal(found, torch.stack([layer.weight.grad for layer in layers]))
        assert not found[2].any()
    # Three experts of two layers each; a product has one forward and two backward ones.
    assert sum(calls.values()) == 3 * 2 * 3


@pytest.mark.parametrize("how", ["loop", "grouped", "picked"])
def test_each_expert_has_a_history_of_scales(how):
    """Numbers grow past the scale from update to update; expert 2 has rows in the last alone."""
    experts = Experts(how)
    expected = Separate(experts)
    kept = install(experts, named("fp8_delayed", "*"), {})
    other = install(expected, named("fp8_delayed", "*", "down_proj.3"), {})
    assert list(kept.layers) == [*other.layers]
    for update in range(4):
        x = torch.randn(23, WIDTH) * 4.0**update
        chosen = torch.tensor([0] * 9 + [1] * 13 + [2 if update == 3 else 3])
        y, grad_x = passed(experts, x, chosen)
        same, same_grad = passed(expected, x, chosen)
        assert torch.equal(y, same) and torch.equal(grad_x, same_grad)
        kept.roll()
        other.roll()
        assert torch.equal(kept.present, other.present)
        with torch.no_grad():
            for name in ("gate_up_proj", "down_proj"):
                getattr(experts, name)[1].mul_(3)
                getattr(expected, name)[1].weight.mul_(3)
    assert len(kept.present[:, 0, 0].unique()) == 8


class Forms(nn.Module):
    def __init__(self, form, *shape):
        super().__init__()
        self.form, self.weight = form, nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return self.form(x, self.weight)


def heads(x, w):
    """A product of a copy whose experts lie beside each other: einsum copies each into a whole."""
    apart = w.transpose(0, 1).contiguous().transpose(0, 1).unflatten(1, (4, 6))
    return torch.einsum("etk,ebak->etba", x.expand(4, -1, -1), apart.transpose(1, 2))


def copied(copy):
    return lambda x, w: sum(F.linear(x, own) for own in copy(w))


@pytest.mark.parametrize(
    "form",
    [
        copied(lambda own: own.mT.contiguous().mT),
        copied(lambda own: own.transpose(0, 1).contiguous().transpose(0, 1)),
        copied(lambda own: own[:, 4:].contiguous()),
        copied(lambda own: own.flatten().unflatten(0, own.shape)),
        heads,
    ],
    ids=["turned", "apart", "a part", "flat", "einsum"],
)
def test_a_copied_expert_keeps_its_history(form):
    """Weights of expert 0 to 3 have the largest magnitudes 1, 2, 3, 4."""
    model = Forms(form, 4, 24, 32)
    with torch.no_grad():
        model.weight.copy_(torch.arange(1.0, 5).view(4, 1, 1).expand(4, 24, 32))
    kept = install(model, named("fp8_delayed", "weight"), {})
    model(torch.randn(5, 32))
    assert kept.present[:, 1, 1].tolist() == [1, 2, 3, 4]


# form, size of the weight, of the input -> the layer's input and weight, and its output's place.
MATRIX = {
    "F.linear": F.linear,
    "matmul": lambda x, w: torch.matmul(x, w.mT),
    "@ of a part": lambda x, w: x @ w[:, :].t(),
    "method": lambda x, w: x.matmul(w.T),
    "on the left": lambda x, w: (w @ x.mT).mT,
    "of a list": lambda x, w: torch.stack([row @ w.t() for row in x.unbind(0)]),
    "addmm": lambda x, w: torch.stack([torch.addmm(-torch.zeros(24), row, w.T) for row in x]),
    "einsum": lambda x, w: torch.einsum("...k,nk->...n", x, w),
    "einsum without result": lambda x, w: torch.einsum("abk,kn", x, w.T),
    "einsum of heads": lambda x, w: torch.einsum("btk,hnk->bthn", x, w.view(4, 6, 32)).flatten(2),
    "keyword": lambda x, w: F.linear(weight=w, input=x),
    "on the left of a vector": lambda x, w: torch.stack(
        [torch.stack([w @ vector for vector in row]) for row in x]
    ),
}


@pytest.mark.parametrize("form", MATRIX)
def test_forms_of_a_matrix(form):
    """By row, so that a row of the input has the same scale in any split of its rows."""
    model, x = Forms(MATRIX[form], 24, 32), torch.randn(2, 5, 32)
    layer = nn.Linear(32, 24, bias=False)
    layer.weight.data.copy_(model.weight)
    products = dataclasses.replace(named("fp8_rowwise", "*", "weight"), high_precision=())
    install(model, products, {}, calls=(calls := Calls()))
    install(expected := nn.Sequential(layer), named("fp8_rowwise", "0"), {})
    plain = MATRIX[form](x, layer.weight)
    y, other = model(x), expected(x)
    assert calls["forward e4m3 x e4m3"]
    assert torch.equal(y, other)
    assert not torch.equal(y, plain)


EACH, TURNED, ROWS = (4, 32, 24), (4, 24, 32), (4, 5, 32)
BATCHES = {
    "bmm": (lambda x, w: torch.bmm(x, w), EACH, ROWS),
    "baddbmm": (lambda x, w: torch.baddbmm(-torch.zeros(1), x, w), EACH, ROWS),
    "of all rows": (lambda x, w: x[0] @ w, EACH, (1, 5, 32)),
    "one input for all": (lambda x, w: torch.matmul(x, w), EACH, (1, 5, 32)),
    "turned": (lambda x, w: x @ w.mT, TURNED, ROWS),
    "on the left": (lambda x, w: (w @ x.mT).mT, TURNED, ROWS),
    "einsum": (lambda x, w: torch.einsum("enk,eko->eno", x, w), EACH, ROWS),
    "einsum of capacity": (
        lambda x, w: torch.einsum("genk,eko->egno", x[None], w)[:, 0],
        EACH,
        ROWS,
    ),
    "grouped without ends": (lambda x, w: F.grouped_mm(x, w), EACH, ROWS),
    "one by one": (lambda x, w: torch.stack([*map(operator.matmul, x, w)]), EACH, ROWS),
}


@pytest.mark.parametrize("form", BATCHES)
@pytest.mark.parametrize("mode", ["fp8_tensorwise", "mxfp8"])
@pytest.mark.few
def test_forms_of_experts(form, mode):
    take, size, given = BATCHES[form]
    model, x = Forms(take, *size), torch.randn(*given)
    with torch.no_grad():
        model.weight[1] *= 50  # a scale of all experts would differ
    install(model, named(mode, "weight"), {})
    y, grad_x = passed(model, x)
    weights = model.weight if size[1:] == (24, 32) else model.weight.mT
    layers = nn.ModuleList(nn.Linear(32, 24, bias=False) for _ in weights)
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data.copy_(weight)
    install(layers, named(mode, *"0123"), {})

    def each(x):
        rows = x if len(x) > 1 else [x[0]] * 4
        return torch.stack([layer(row) for layer, row in zip(layers, rows, strict=True)])

    other, other_grad = passed(each, x)
    assert torch.equal(y, other)
    torch.testing.assert_close(grad_x, other_grad, rtol=1e-5, atol=1e-5 * float(grad_x.abs().max()))
    found = model.weight.grad if size[1:] == (24, 32) else model.weight.grad.mT
    assert torch.equal(found, torch.stack([layer.weight.grad for layer in layers]))


def test_a_grouped_product_has_the_dtype_that_is_asked_for():
    model, x = Forms(lambda x, w: F.grouped_mm(x, w), 4, 32, 24), torch.randn(4, 5, 32)
    install(model, named("fp8_tensorwise", "weight"), {})
    wide = model(x)
    model.form = lambda x, w: F.grouped_mm(x, w, out_dtype=torch.bfloat16)
    narrow = model(x)
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(narrow, wide.bfloat16())


PLAIN = {
    "another dtype": lambda x, w: F.linear(x.float(), w.float()),
    "a row": lambda x, w: F.linear(x.bfloat16(), w[0]),
    "no weight": lambda x, w: torch.matmul(x, x.mT),
    "no weight in groups": lambda x, w: F.grouped_mm(
        x.bfloat16(), w.new_ones(2, 32, 16), offs=torch.tensor([3, 8], dtype=torch.int32)
    ),
    "two weights": lambda x, w: torch.matmul(w, w.mT),
    "einsum of one": lambda x, w: torch.einsum("ij->ji", w),
    "einsum of a list of one": lambda x, w: torch.einsum("ij->ji", [w]),
    "einsum of a number": lambda x, w: torch.einsum("->", w[0, 0]),
    "einsum with numbers of dimensions": lambda x, w: torch.einsum(w, [0, 1], [1, 0]),
}


@pytest.mark.parametrize("form", PLAIN)
def test_what_is_no_product_with_a_weight_in_its_dtype_is_torchs(form):
    model = Forms(PLAIN[form], 24, 32).bfloat16()
    install(model, named("fp8_rowwise", "weight"), {}, calls=(calls := Calls()))
    x = torch.randn(8, 32)
    assert torch.equal(model(x), PLAIN[form](x, model.weight))
    assert not calls


def chosen(model, *patterns, mode="fp8_rowwise", overrides=()):
    layers, weights = chosen_products(model, named(mode, *patterns), overrides)
    return [*layers, *weights]


def test_names_choose_experts_and_leave_routers():
    model = Network()
    experts = [f"blocks.{n}.experts.{k}" for n in (0, 1) for k in ("gate_up_proj", "down_proj")]
    assert chosen(model, "*") == experts
    assert chosen(model, "!last 50%") == experts[:2]
    assert chosen(model, "blocks.1") == experts[2:]
    assert chosen(model, "*", "!*.down_proj") == experts[::2]
    assert chosen(model, "*", "head") == ["head", *experts]
    assert chosen(model, "*", overrides=["blocks.0.experts"]) == experts[2:]
    routers = ["blocks.0.gate.weight", "blocks.1.gate.weight"]
    assert chosen(model, "*", "*.gate") == [*experts, *routers]
    assert chosen(model, "blocks.1.gate.weight") == routers[1:]
    with pytest.raises(ValueError, match="'experts.up' matches no"):
        chosen(model, "experts.up")


def test_a_linear_router_beside_experts_is_left_too():
    model = Network()
    model.blocks[0].gate = nn.Linear(WIDTH, EXPERTS)
    model.blocks[1].gate = nn.Linear(WIDTH, EXPERTS + 1)
    assert "blocks.0.gate" not in chosen(model, "*")
    assert "blocks.1.gate" in chosen(model, "*")
    model.blocks[1].gate.is_router = True
    assert "blocks.1.gate" not in chosen(model, "*")


def test_tables_and_layers_of_torch_are_no_weights_of_a_forward():
    model = Network()
    model.table = nn.Embedding(16, WIDTH)
    model.tied = model.table.weight
    model.position = nn.Parameter(torch.zeros(1, 9, WIDTH))
    model.mix, model.lstm = nn.Conv1d(4, 4, 3), nn.LSTM(8, 8)
    model.attention = nn.MultiheadAttention(16, 2)
    assert all(".experts." in name for name in chosen(model, "*", "!head"))


def trained(make, mode, size, rate=0.1, native=False, **form):
    """Losses and weights of five steps, and the counts of products; form: of torch.compile."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    mprun.prepare(model, optimizer, precision=mode, native=native)
    torch.manual_seed(1)
    called, found = torch.compile(model, **form) if form else model, []
    for _ in range(5):
        loss = called(torch.randn(size)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    (prepared,) = (one for one in passes.alive if one.model is model)
    return [*found, *model.state_dict().values()], prepared.forward_context.rerouted()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp8_rowwise", "nvfp4"])
def test_experts_are_trained_in_a_script(mode):
    """Every form ends with the same bits, but for random ones and the order of sums of rows."""
    found, calls = trained(Network, mode, (24, WIDTH))
    assert all(own.isfinite().all() for own in found)
    formats = "e2m1 x e2m1" if mode == "nvfp4" else "e4m3 x e4m3"
    assert calls[f"forward {formats}"] >= 5 * 2 * 2 * 2
    # The input of the model has no gradient, so its first products have one pass less.
    assert calls[f"backward {formats}"] > 1.7 * calls[f"forward {formats}"]
    if mode == "fp8_rowwise":
        grouped, _ = trained(lambda: Network("grouped"), mode, (24, WIDTH))
        assert all(map(torch.equal, found, grouped))


class Dense(nn.Module):
    """Every expert sees every row, so no size depends on a value."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, 24) * 0.2)
        self.down = nn.ParameterList([torch.randn(24, 16) * 0.2])

    def forward(self, x):
        y = F.linear(x, self.up[1]) + x @ self.up[2].mT
        y = y + torch.bmm(x.expand(3, -1, -1), self.up.mT)[0]
        return x + y @ self.down[0].T + sum(F.linear(x, own) for own in self.up) @ self.down[0].t()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["fp8_rowwise", "nvfp4"])
def test_a_model_is_one_graph(mode):
    from torch._dynamo.testing import CompileCounter  # the compiler

    def made():
        return nn.Sequential(Dense(), Dense(), nn.Linear(24, 8))

    graphs, how = CompileCounter(), {"rate": 1e-4, "native": True}
    form = {"backend": graphs, "fullgraph": True, "dynamic": False}
    found, compiled = (trained(made, mode, (10, 24), **how, **own)[0] for own in ({}, form))
    assert all(own.isfinite().all() for own in found)
    assert all(map(torch.equal, compiled, found))
    assert graphs.frame_count == 1


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 24, 16))
        self.ends = torch.tensor([2, 2, 9], dtype=torch.int32)

    def forward(self, x):
        return F.grouped_mm(x, self.experts.mT, offs=self.ends)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["fp8_rowwise", "fp8_delayed"])
def test_a_compiler_does_not_hide_grouped_products(mode):
    """torch.compile shows private functions to no mode of functions by itself."""

    def computed(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Grouped())
        mprun.prepare(model, precision=mode, native=True)
        called = torch.compile(model, backend="eager") if compiled else model
        found = [called(torch.randn(9, 16)) for _ in range(5)]
        torch.stack(found).sum().backward()
        (prepared,) = (one for one in passes.alive if one.model is model)
        if prepared.delayed is not None:
            found += [prepared.delayed.present.clone(), prepared.delayed.history.clone()]
        return [*found, *(own.grad for own in model.parameters())]

    assert all(map(torch.equal, computed(True), computed(False)))


class Elsewhere(nn.Module):
    """A module that multiplies by the parameter of another one, which has no call."""

    def __init__(self):
        super().__init__()
        self.first, self.held = nn.Linear(8, 8), Experts("loop")
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.first(x) @ self.held.down_proj[0, :8].mT.mT[:, :1] + self.zeros)

    zeros = torch.zeros(WIDTH)


def test_a_weight_that_no_product_meets_is_said():
    """Each expert counts as met with one of them."""
    for model, size, names in ((Elsewhere(), 8, ["held.gate_up_proj"]), (Network(), WIDTH, [])):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        mprun.prepare(model, optimizer, precision="fp8_rowwise")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model(torch.randn(6, size)).sum().backward()
            optimizer.step()
        said = [str(one.message) for one in told if "no product with" in str(one.message)]
        assert [line.split()[4] for line in said] == names
        # 4 * 48 * 32 of 6144 + 3072 + 72 + 33 parameters
        assert all("was cast (66 % of the parameters)" in line for line in said)


def test_what_stays_of_the_products_is_said_after_the_first_step(capsys):
    model = nn.Sequential(nn.Conv1d(8, 8, 1, bias=False), nn.Linear(8, 8), nn.Linear(8, 8))
    optimizers = [torch.optim.SGD(own.parameters(), 0.1) for own in model]
    mprun.prepare(model, optimizers, precision="fp8_rowwise")
    capsys.readouterr()
    for _ in range(2):
        model(torch.randn(2, 8, 8)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Three products each, but for the gradient of the input.
    says = "casts 38 % of the multiply-adds; others: matrix products in bf16 38 %, convolutions"
    assert capsys.readouterr().err == f"mprun: fp8_rowwise {says} in bf16 25 %\n"


def test_what_stays_is_said_once(capsys):
    def said(model, mode, **options):
        mprun.prepare(model, precision=mode, **options)
        return [line.removeprefix("mprun: ") for line in capsys.readouterr().err.splitlines()]

    def of(*layers):
        return nn.Sequential(*layers, nn.Linear(2, 2))

    assert said(of(nn.Linear(8, 99), nn.Conv2d(1, 1, 3)), "fp8_rowwise") == []
    assert said(of(nn.Linear(8, 80), nn.Conv2d(3, 30, 4)), "fp8_rowwise") == [
        # 640 of 640 + 1440 + 4
        "fp8_rowwise casts the products of 31 % of the weights; 1.weight (69 %) stays in bf16: "
        "Conv2d is no linear layer"
    ]
    assert said(of(nn.Linear(8, 80), nn.Conv2d(3, 30, 4)), "bf16_master") == []
    twice = of(nn.Linear(10, 10), nn.ModuleList(nn.Conv2d(1, 1, 10) for _ in range(2)))
    assert said(twice, "nvfp4") == [
        # 100 of 304
        "nvfp4 casts the products of 33 % of the weights; *.*.weight (66 %) stay in bf16: "
        "Conv2d is no linear layer"
    ]
    assert said(nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)), "fp8_rowwise") == [
        # 64 of 64 + 2 x 256
        "fp8_rowwise casts the products of 11 % of the weights; 1.weight_ih_l0 (44 %) stays in "
        "bf16: LSTM is no linear layer"
    ]
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 90))
    assert said(model, "fp8_tensorwise", overrides={"0": "bf16"}) == [
        "fp8_tensorwise casts the products of 0 % of the weights; 1.weight (90 %) stays in bf16: "
        "an output layer, which precision.matmul.modules has to name"
    ]
    assert said(Network(), "fp8_rowwise") == []
    (line,) = said(Network(), "fp8_rowwise", overrides={"*.experts": "fp32", "blocks.0": "bf16"})
    assert "experts.gate_up_proj" in line
    assert line.endswith("stay in fp32: an override")
