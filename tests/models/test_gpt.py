"""The transformer against plain float64 equations, and what its parts promise."""

import math
import warnings

import pytest
import torch
from torch.nn import functional as F

from mprun.distributed.ranks import Ranks
from mprun.models.gpt import GPT, Parts, manual_attention

WORDS, LENGTH = 11, 9
LLAMA = {"norm": "rms", "positions": "rotary", "mlp": "swiglu"}
VARIANTS = {
    "gpt2": {},
    "biases": {"bias": True},
    "rms": {"norm": "rms"},
    "rotary": {"positions": "rotary"},
    "swiglu": {"mlp": "swiglu"},
    "qk_norm": {"qk_norm": True},
    "kv_heads": {"kv_heads": 1},
    "manual": {"attention": "manual"},
    "llama": LLAMA | {"qk_norm": True, "kv_heads": 2, "attention": "manual"},
}


def small(attention="fused", **parts):
    """Weights ten times as large as at the start, so that attention is not even."""
    model = GPT(WORDS, LENGTH, 16, 2, 4, Parts(**parts), attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
            else:
                parameter.mul_(10)
    return model


def tokens(length=LENGTH, batch=3):
    return torch.randint(WORDS, (length, batch), generator=torch.Generator().manual_seed(1))


def by_the_equations(model, ids, norm="layer", mlp="gelu", **_):
    """Logits in float64, one stream and one head at a time."""
    weights = {name: p.detach().double() for name, p in model.named_parameters()}

    def normed(name, x):
        if norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        scale = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x / scale * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0.0)

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def turned(x):
        # Pairs (i, i + d/2) as complex numbers.
        half = x.shape[-1] // 2
        rows = [[t * 10_000 ** (-i / half) for i in range(half)] for t in range(len(x))]
        angles = torch.tensor(rows, dtype=torch.float64)
        pairs = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angles)
        return torch.cat([pairs.real, pairs.imag], -1)

    def attention(name, x):
        size, found = 4, linear(f"{name}.inputs", x)
        kv = (found.shape[1] - 16) // 2
        queries, keys, values = (part.split(size, 1) for part in found.split([16, kv, kv], 1))
        heads = []
        for head, q in enumerate(queries):
            own = head * len(keys) // len(queries)
            k, v = keys[own], values[own]
            if f"{name}.query_norm.weight" in weights:
                q, k = normed(f"{name}.query_norm", q), normed(f"{name}.key_norm", k)
            if "positions.weight" not in weights:
                q, k = turned(q), turned(k)
            rows = []
            for t in range(len(q)):
                shares = torch.softmax(k[: t + 1] @ q[t] / math.sqrt(size), 0)
                rows.append(shares @ v[: t + 1])
            heads.append(torch.stack(rows))
        return linear(f"{name}.output", torch.cat(heads, 1))

    def hidden(name, x):
        found = linear(f"{name}.inputs", x)
        if mlp == "swiglu":
            gate, other = found.chunk(2, -1)
            return linear(f"{name}.output", gate * torch.sigmoid(gate) * other)
        return linear(f"{name}.output", found * (1 + torch.erf(found / math.sqrt(2))) / 2)

    streams = []
    for stream in ids.t():
        x = weights["embedding.weight"][stream]
        if "positions.weight" in weights:
            x = x + weights["positions.weight"][: len(stream)]
        for block in range(2):
            own = f"blocks.{block}"
            x = x + attention(f"{own}.attention", normed(f"{own}.attention_norm", x))
            x = x + hidden(f"{own}.mlp", normed(f"{own}.mlp_norm", x))
        streams.append(normed("norm", x) @ weights["embedding.weight"].T)
    return torch.stack(streams, 1)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.few(4)
def test_equals_the_equations(options):
    """In a whole window, in a shorter one, and without a trace of later tokens in FP32."""
    model, ids, changed = small(**options), tokens(), tokens()
    logits, state = model(ids)
    assert logits.shape == (LENGTH, 3, WORDS) and state == ()
    changed[5] = (changed[5] + 1) % WORDS
    other, _ = model(changed)
    assert torch.equal(logits[:5], other[:5]) and (logits[5:] != other[5:]).any(-1).all()
    model.double()
    # The manual form has its softmax in FP32 in every mode, and rotary tables are FP32.
    exact = model.blocks[0].attention.fused and model.positions is not None
    expected = by_the_equations(model, ids, **options)
    for length in (LENGTH, 4):
        found, _ = model(ids[:length])
        atol = 1e-12 if exact else 1e-5
        torch.testing.assert_close(found, expected[:length], rtol=0, atol=atol)


def test_the_empty_state_is_restored_on_several_ranks(build_run):
    built = build_run("model=gpt", "data.batch_size=2", "model.hidden_size=16")
    built.task.train_step(0)
    state = built.task.state_dict()
    assert state["hidden"] == ()
    built.task.hidden, built.task.ranks = None, Ranks()
    built.task.ranks.world = 2
    built.task.load_state_dict(state)
    assert built.task.hidden == ()


def test_manual_and_fused_agree_in_fp32_forward_and_backward():
    inputs = [torch.randn(2, 4, 33, 16, requires_grad=True) for _ in range(3)]
    manual = manual_attention(*inputs, inputs[0].shape[-1] ** -0.5)
    fused = F.scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(manual, fused, rtol=0, atol=2e-6)
    gradient = torch.randn_like(fused)
    both = (torch.autograd.grad(one, inputs, gradient) for one in (manual, fused))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_scores_of_the_manual_form_overflow_in_fp16_where_those_of_the_kernel_do_not():
    # q.k = 16 * 80^2 = 102,400, and a quarter of it is 25,600.
    query = torch.full((1, 1, 2, 16), 80.0, dtype=torch.float16)
    value = torch.ones_like(query)
    assert manual_attention(query, query, value, 1.0).isnan().any()
    fused = F.scaled_dot_product_attention(query, query, value, is_causal=True)
    assert torch.equal(fused, value)


def test_the_start_is_gpt_2_s():
    model = GPT(1000, 64, hidden_size=256, num_layers=8, num_heads=4, parts=Parts(bias=True))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert parameter.unique().tolist() == [0.0 if name.endswith("bias") else 1.0]
            continue
        # Deviation of the mean square of n numbers: sqrt(2 / n), at most 1.1 % here.
        expected = 0.02 / 4 if name.endswith("output.weight") else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.04), name


def hugging_face():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        return pytest.importorskip("transformers", reason="needs the extra [transformers]")


def take_over(pairs):
    """Fill each module from others side by side; `turned`: a Conv1D of Hugging Face."""
    for own, others, turned in pairs:
        for name, parameter in own.named_parameters():
            parts = [other.get_parameter(name) for other in others]
            whole = torch.cat([p.t() if turned and p.dim() > 1 else p for p in parts])
            assert parameter.shape == whole.shape
            parameter.copy_(whole)


def attention_pairs(own, other):
    """Modules of a block and those of a layer of transformers, but for what follows attention."""
    heads = other.self_attn
    return [
        (own.attention_norm, [other.input_layernorm]),
        (own.attention.inputs, [heads.q_proj, heads.k_proj, heads.v_proj]),
        (own.attention.output, [heads.o_proj]),
        (own.mlp_norm, [other.post_attention_layernorm]),
    ]


def gated_pairs(own, other):
    return [(own.inputs, [other.gate_proj, other.up_proj]), (own.output, [other.down_proj])]


def random_vectors(network):
    """Gains and biases other than ones and zeros."""
    for parameter in network.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) / 4)


@torch.no_grad()
def logits_of_both(ours, theirs, ids):
    found, expected = ours.eval()(ids.t())[0].transpose(0, 1), theirs.eval()(ids).logits
    # FP32 sums of hundreds of terms in another order, through every block.
    atol = 2.0**-15 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["fused", "manual"])
@torch.no_grad()
def test_gpt_2_computes_as_hugging_face_s(attention):
    """All of the 124 million parameters; nanoGPT's GELU is the exact one, OpenAI's a tanh."""
    transformers = hugging_face()
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(activation_function="gelu"))
    ours, whole = GPT(50_257, 1024, 768, 12, 12, Parts(bias=True), attention), theirs.transformer
    random_vectors(theirs)
    pairs = [(ours.embedding, whole.wte, False), (ours.positions, whole.wpe, False)]
    pairs.append((ours.norm, whole.ln_f, False))
    for own, other in zip(ours.blocks, whole.h, strict=True):
        pairs += [
            (own.attention_norm, other.ln_1, False),
            (own.attention.inputs, other.attn.c_attn, True),
            (own.attention.output, other.attn.c_proj, True),
            (own.mlp_norm, other.ln_2, False),
            (own.mlp.inputs, other.mlp.c_fc, True),
            (own.mlp.output, other.mlp.c_proj, True),
        ]
    take_over((own, [other], turned) for own, other, turned in pairs)
    logits_of_both(ours, theirs, torch.randint(50_257, (2, 128)))


@pytest.mark.slow
@torch.no_grad()
def test_llama_computes_as_hugging_face_s():
    transformers = hugging_face()
    sizes = {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    sizes["intermediate_size"] = 704  # 8/3 x 256, up to a multiple of 64
    config = transformers.LlamaConfig(**sizes, rms_norm_eps=1e-5, tie_word_embeddings=True)
    theirs = transformers.LlamaForCausalLM(config)
    ours, whole = GPT(1000, 256, 256, 3, 8, Parts(kv_heads=2, **LLAMA)), theirs.model
    random_vectors(theirs)
    pairs = [(ours.embedding, [whole.embed_tokens]), (ours.norm, [whole.norm])]
    for own, other in zip(ours.blocks, whole.layers, strict=True):
        pairs += [*attention_pairs(own, other), *gated_pairs(own.mlp, other.mlp)]
    take_over((own, others, False) for own, others in pairs)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    logits_of_both(ours, theirs, torch.randint(1000, (2, 200)))
