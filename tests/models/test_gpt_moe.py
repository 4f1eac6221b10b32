"""The mixture of experts against equations in float64, and against transformers' networks."""

import math

import pytest
import torch
from torch import nn

from mprun.config.compose import compose_config
from mprun.errors import BadInput
from mprun.models.gpt import Parts
from mprun.models.gpt_moe import Choice, Experts, GPTMoE, Mixing, Mixture
from mprun.numerics.operations import FirstStep

from ..helpers import TINY_MOE, raises_line
from . import test_gpt as dense

WIDTH, ROWS = 16, 37
FORMS = {
    "mixtral": {},
    "one expert": {"top_k": 1},
    "not renormalised": {"renormalise": False},
    "sigmoid": {"scoring": "sigmoid", "balancing": "bias"},
    "shared": {"shared_size": 8},
    "gated": {"shared_size": 8, "shared_gate": True, "num_experts": 3, "top_k": 3},
    "places": {"capacity": 8.0},
}


def mixture(**options):
    """A mixture in float64 with weights of 1 / 4, so that experts differ."""
    found = Mixture(WIDTH, False, Mixing(expert_size=12, **options)).double()
    for own in found.parameters():
        nn.init.normal_(own, std=0.25)
    if found.router.choice.bias is not None:
        nn.init.normal_(found.router.choice.bias, std=0.1)
    return found


def by_the_equations(model, row):
    """The result for one row; and its scores, and the experts that it has chosen."""
    mixing, router, experts = model.router.choice.mixing, model.router, model.experts

    def gated(x, inputs, output):
        gate, up = (inputs @ x).chunk(2)
        return output @ (gate / (1 + (-gate).exp()) * up)

    logits = router.weight @ row
    scores = 1 / (1 + (-logits).exp())
    if mixing.scoring == "softmax":
        scores = logits.exp() / logits.exp().sum()
    bias = 0 if router.choice.bias is None else router.choice.bias
    ranked = sorted(range(len(scores)), key=lambda e: -(scores + bias)[e].item())
    chosen = ranked[: mixing.top_k]
    total = sum(scores[e] for e in chosen) if mixing.renormalise else 1
    outputs = {e: gated(row, experts.inputs[e], experts.output[e]) for e in chosen}
    found = sum(scores[e] / total * output for e, output in outputs.items())
    if model.shared is not None:
        shared = gated(row, model.shared.inputs.weight, model.shared.output.weight)
        if model.gate is not None:
            shared = shared / (1 + (-(model.gate.weight @ row)).exp())
        found = found + shared
    return found, scores, chosen


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_equals_the_equations(options):
    model, x = mixture(**options), torch.randn(1, ROWS, WIDTH, dtype=torch.float64)
    y, loss = model(x)
    rows = [by_the_equations(model, row) for row in x[0]]
    torch.testing.assert_close(y[0], torch.stack([one for one, _, _ in rows]), rtol=0, atol=1e-12)
    # arXiv 2401.06066, equations 12 to 14, without the factor.
    count, top_k = model.router.weight.shape[0], model.router.choice.mixing.top_k
    expected, loads = 0.0, []
    for expert in range(count):
        loads.append(sum(expert in chosen for _, _, chosen in rows))
        mean = sum((scores[expert] / scores.sum()).item() for _, scores, _ in rows) / ROWS
        expected += count / (top_k * ROWS) * loads[-1] * mean
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert model.router.choice.load.tolist() == loads


def test_both_forms_have_the_same_gradients():
    one, other = mixture(), mixture(capacity=8.0)
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    found = []
    for model in (one, other):
        y, loss = model(x)
        found.append(torch.autograd.grad(y.square().sum() + loss, [x, *model.parameters()]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_an_expert_drops_the_rows_beyond_its_capacity():
    """An expert takes 1.5 * 6 / 4, up to 3, of 6 rows that all choose it: the first ones."""
    experts = Experts(WIDTH, Mixing(num_experts=4, top_k=1, expert_size=12, capacity=1.5))
    for own in experts.parameters():
        nn.init.normal_(own)
    rows, chosen = torch.randn(6, WIDTH), torch.ones(6, 1, dtype=torch.int64)
    found = experts(rows, torch.ones(6, 1), chosen, torch.tensor([0, 6, 0, 0]))
    experts.capacity = None
    whole = experts(rows, torch.ones(6, 1), chosen, torch.tensor([0, 6, 0, 0]))
    torch.testing.assert_close(found[:3], whole[:3])
    assert found[3:].count_nonzero() == 0 and (whole != 0).any(1).all()


@pytest.mark.parametrize("capacity", [None, 8.0])
def test_an_idle_expert_has_gradients_of_zero(capacity):
    model = mixture(capacity=capacity)
    with torch.no_grad():
        model.router.weight[:2] = 1.0
        model.router.weight[2:] = 0.0
    y, _ = model(torch.rand(1, ROWS, WIDTH, dtype=torch.float64) + 1)
    y.sum().backward()
    assert model.router.choice.load.tolist() == [ROWS, ROWS, *6 * [0]]
    for own in model.experts.parameters():
        assert own.grad[:2].isfinite().all() and (own.grad[:2] != 0).any((1, 2)).all()
        assert own.grad[2:].count_nonzero() == 0 and own.grad[2:].isfinite().all()


def test_the_bias_follows_the_sign_of_the_error_and_chooses_alone():
    """Loads 4, 0, 2 of 3 experts: a mean of 2."""
    choice = Choice(Mixing(num_experts=3, top_k=1, balancing="bias", bias_rate=0.25))
    logits = torch.tensor([[2.0, 0, 0], [0.0, 0, 2]]).repeat_interleave(torch.tensor([4, 2]), 0)
    before = choice(logits)
    choice.end_update(None)
    assert choice.bias.tolist() == [-0.25, 0.25, 0.0]
    assert choice.load.count_nonzero() == choice.entropy.count_nonzero() == 0
    choice(logits)
    choice.end_update(torch.ones(()))
    assert choice.bias.tolist() == [-0.25, 0.25, 0.0] and choice.load.count_nonzero() == 0
    choice.eval()
    weights, *_ = choice(logits)
    choice.end_update(torch.zeros(()))  # nothing was counted
    assert choice.bias.tolist() == [-0.25, 0.25, 0.0]
    assert torch.equal(weights, before[0])  # of one expert, renormalised
    choice.bias[1] = 1.0
    assert choice(logits)[1].unique().tolist() == [1]


def test_figures_by_hand():
    model = GPTMoE(11, 9, 16, 3, 4, mixing=Mixing(num_experts=4, top_k=1, dense_layers=1))
    first, second = (own for own in model.modules() if isinstance(own, Choice))
    first(torch.zeros(1, 4))  # entropy log(4), the most
    first(torch.tensor([[0.0, 200, 0, 0]]))  # entropy 0
    second(torch.tensor([[0.0, 200, 0, 0]]))
    figures = model.end_update(None)
    # The second layer: one expert has all, four times an even load.
    assert figures["expert_load_max"] == 4 and figures["expert_load_min"] == 0
    assert figures["router_entropy"].item() == pytest.approx(0.25, rel=2**-20)


def test_the_start_and_the_dense_layers():
    model = GPTMoE(64, 9, 128, 3, 4, mixing=Mixing(dense_layers=1))
    kinds = [type(block.mlp).__name__ for block in model.blocks]
    assert kinds == ["GELU", "Mixture", "Mixture"]
    for name, own in model.named_parameters():
        if own.dim() > 1:
            writes = name.endswith(("output.weight", "experts.output"))
            expected = 0.02 / math.sqrt(6) if writes else 0.02
            assert own.std().item() == pytest.approx(expected, rel=0.1), name


@pytest.mark.slow
@pytest.mark.parametrize("capacity", ["null", "2.0"])
def test_products_of_the_chosen_experts_are_counted(build_run, capacity):
    """A token costs the products of two experts, of eight; a place costs them, taken or not."""
    built = build_run(*TINY_MOE, f"model.capacity={capacity}", "precision=fp8_rowwise")
    with FirstStep(built.task, built.policy, {}) as first:
        built.task.train_step(0)
    assert first.not_in_16_bits() == []
    rows = {(r["operation"], r["phase"], r["dtype"]): r for r in first.operations()["rows"]}
    tokens, width, size, heads = 4 * 16, 32, 32, 32 * (32 + 2 * 32)
    experts = 2 * tokens * 3 * width * size * (1 if capacity == "null" else 2)
    others = tokens * (heads + width * width)
    assert rows["scaled_mm", "forward", "emulated e4m3"]["flops"] == 2 * (experts + others)
    # Router and output layer stay: 8 experts, 64 words.
    assert rows["mm", "forward", "fp32"]["flops"] == 2 * tokens * 8 * width


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["model.top_k=9"], "model.top_k=9: must be <= model.num_experts (8)"),
        (["model.dense_layers=2"], "model.dense_layers=2: must be < model.num_layers (2)"),
        (["model.shared_gate=true"], "model.shared_gate=true: needs model.shared_size > 0"),
        (["device=cuda", "train.cuda_graph=on"], "model.capacity=null: only the device knows"),
    ],
)
def test_refusals(words, line):
    with raises_line(BadInput, line):
        compose_config(["model=gpt_moe", *words])


def put_over(ours, theirs):
    """Copy the weights of one of transformers' mixtures into ours."""
    pairs = [(ours.embedding, [theirs.model.embed_tokens]), (ours.norm, [theirs.model.norm])]
    for own, other in zip(ours.blocks, theirs.model.layers, strict=True):
        heads = other.self_attn
        pairs += dense.attention_pairs(own, other)
        if (norm := own.attention.query_norm) is not None:
            pairs += [(norm, [heads.q_norm]), (own.attention.key_norm, [heads.k_norm])]
        own.mlp.router.weight.copy_(other.mlp.gate.weight)
        own.mlp.experts.inputs.copy_(other.mlp.experts.gate_up_proj)
        own.mlp.experts.output.copy_(other.mlp.experts.down_proj)
        if own.mlp.shared is not None:
            pairs += dense.gated_pairs(own.mlp.shared, other.mlp.shared_expert)
            pairs.append((own.mlp.gate, [other.mlp.shared_expert_gate]))
    dense.take_over((own, others, False) for own, others in pairs)


SIZES = {
    **{"vocab_size": 500, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    # That of Mixtral is larger.
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
OWN = {"num_experts": 8, "moe_intermediate_size": 96, "num_experts_per_tok": 2}
MIXTRAL = {"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2}
OURS = {"num_experts": 8, "top_k": 2, "expert_size": 96}
NETWORKS = {
    "Mixtral": (MIXTRAL, {}, OURS),
    "Qwen3Moe": (OWN | {"head_dim": 32, "norm_topk_prob": True}, {"qk_norm": True}, OURS),
    "Qwen2Moe": (
        OWN | {"qkv_bias": False, "norm_topk_prob": False, "shared_expert_intermediate_size": 64},
        {},
        {"expert_size": 96, "renormalise": False, "shared_size": 64, "shared_gate": True},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 4.0])
@pytest.mark.parametrize("name", NETWORKS)
def test_computes_as_hugging_face_s(name, capacity):
    """Logits on copied weights, and with one layer the auxiliary loss and gradients."""
    transformers = dense.hugging_face()
    sizes, parts, mixing = NETWORKS[name]
    parts = Parts(kv_heads=2, norm="rms", positions="rotary", **parts)
    for layers in (2, 1):
        given = SIZES | sizes | {"num_hidden_layers": layers}
        config = getattr(transformers, f"{name}Config")(**given)
        theirs = getattr(transformers, f"{name}ForCausalLM")(config)
        ours = GPTMoE(500, 256, 128, layers, 4, parts, mixing=Mixing(capacity=capacity, **mixing))
        with torch.no_grad():
            dense.random_vectors(theirs)
            for layer in theirs.model.layers:  # of deviation 0.02: scores of experts are even
                nn.init.normal_(layer.mlp.gate.weight, std=0.2)
            put_over(ours, theirs)
        count = sum(p.numel() for p in theirs.parameters())
        assert sum(p.numel() for p in ours.parameters()) == count
        dense.logits_of_both(ours, theirs, torch.randint(500, (2, 120)))
    ids = torch.randint(500, (2, 120))
    found, expected = ours.train()(ids.t()), theirs.train()(ids, output_router_logits=True)
    # Theirs is as many times as large as a token has experts.
    assert found[2].item() == pytest.approx(0.01 * expected.aux_loss.item() / 2, rel=2**-18)
    found[0].transpose(0, 1).square().mean().backward()
    expected.logits.square().mean().backward()
    for own, other in (
        (ours.blocks[0].mlp.router.weight, theirs.model.layers[0].mlp.gate.weight),
        (ours.blocks[0].mlp.experts.inputs, theirs.model.layers[0].mlp.experts.gate_up_proj),
        (ours.embedding.weight, theirs.model.embed_tokens.weight),
    ):
        # FP32 sums of thousands of terms in another order.
        atol = 2.0**-14 * other.grad.abs().max().item()
        torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=atol)
