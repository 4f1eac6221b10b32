"""Networks of transformers with experts in 3-D parameters: Mixtral, Qwen3-MoE, GPT-OSS."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mprun
from mprun.precision import get_policy
from mprun.prepared import passes

DETERMINISTIC = ["fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "mxfp8", "nvfp4_plain"]


class Apart(nn.Module):
    """The experts of a network of transformers, each of two linear layers of the same memory."""

    def __init__(self, experts):
        super().__init__()
        self.gated = getattr(experts, "_apply_gate", None)
        for key in ("gate_up_proj", "down_proj"):
            biases = getattr(experts, f"{key}_bias", None)
            layers = nn.ModuleList()
            for number, own in enumerate(getattr(experts, key).detach().clone()):
                weight = own if biases is None else own.mT
                layers.append(nn.Linear(weight.size(1), weight.size(0), bias=biases is not None))
                layers[-1].weight = nn.Parameter(weight)
                if biases is not None:
                    layers[-1].bias.data.copy_(biases[number])
            setattr(self, key, layers)

    def forward(self, x, chosen, weights):
        found = torch.zeros_like(x)
        pairs = zip(self.gate_up_proj, self.down_proj, strict=True)
        for number, (first, second) in enumerate(pairs):
            place, token = torch.where(chosen.T == number)
            if len(token):
                inner = first(x[token])
                if self.gated is None:
                    gate, up = inner.chunk(2, -1)
                    inner = F.silu(gate) * up
                else:
                    inner = self.gated(inner)
                y = second(inner) * weights[token, place, None]
                found.index_add_(0, token, y.to(found.dtype))
        return found


TRANSFORMERS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32},
    "GptOss": {"num_local_experts": 4, "sliding_window": 16},
}


@pytest.fixture(scope="module")
def of_transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        transformers = pytest.importorskip("transformers", reason="needs the extra [transformers]")
    transformers.logging.set_verbosity_error()

    def trained(name, mode, how="eager", apart=False):
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"num_experts_per_tok": 2, "max_position_embeddings": 64, "use_cache": False}
        sizes |= TRANSFORMERS[name] | {"experts_implementation": how}
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}ForCausalLM")(config).float().train()
        for own in model.parameters():
            nn.init.normal_(own, std=0.1)
        for layer in model.model.layers if apart else ():
            layer.mlp.experts = Apart(layer.mlp.experts)
        optimizer, rerouted = torch.optim.SGD(model.parameters(), 0.1), {}
        if mode is not None:
            products = get_policy(mode).matmul
            policy = get_policy(mode)
            if products is not None:
                router = "!*.mlp.router.*" if name == "GptOss" else "!*.mlp.gate.*"
                products = dataclasses.replace(products, modules=("*", *([router] * apart)))
                policy = dataclasses.replace(policy, matmul=products)
            mprun.prepare(model, optimizer, precision=policy)
        random, losses = torch.Generator().manual_seed(1), []
        for _ in range(2):
            x = torch.randint(0, 64, (4, 16), generator=random)
            loss = model(input_ids=x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if mode is not None:
            (prepared,) = (one for one in passes.alive if one.model is model)
            rerouted = prepared.forward_context.rerouted()
        state = model.state_dict().items()
        if apart:
            state = [(k, v) for k, v in state if ".experts." not in k]
        return losses, dict(state), {k: n for k, n in rerouted.items() if " x " in k}

    return trained


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_experts_of_transformers_are_linear_layers(of_transformers, name):
    """Router, attention and embedding end with the same bits, which depend on every expert."""
    for mode in DETERMINISTIC:
        losses, state, calls = of_transformers(name, mode)
        expected, other, other_calls = of_transformers(name, mode, apart=True)
        assert losses == expected and calls == other_calls
        # In two steps, of two blocks each: four layers of attention, two of two to four experts.
        forward = sum(n for k, n in calls.items() if k.startswith("forward"))
        assert 2 * 2 * (4 + 2 * 2) <= forward <= 2 * 2 * (4 + 2 * 4)
        for key, own in other.items():
            assert torch.equal(own, state[key]), key


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_networks_of_transformers_train_in_each_mode(of_transformers, name, how):
    plain, state, _ = of_transformers(name, None, how)
    for mode in ("fp32", "amp_bf16", "bf16_master", *DETERMINISTIC, "nvfp4"):
        losses, found, calls = of_transformers(name, mode, how)
        if mode == "fp32":
            assert losses == plain and all(torch.equal(own, state[k]) for k, own in found.items())
        # A step of rate 0.1 and a format of four bits: far from what another network would say.
        assert all(abs(a - b) < 0.05 * b for a, b in zip(losses, plain, strict=True)), mode
        assert bool(calls) == (get_policy(mode).matmul is not None)
