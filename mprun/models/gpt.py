"""A decoder-only transformer: GPT-2 as in nanoGPT, and the parts that Llama replaced, as values.

karpathy/nanoGPT, model.py: norms before each block's two halves and after the last block, one table
for embedding and output, GELU by its error function.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = tuple[Tensor, ...]
ROTARY_BASE = 10_000.0  # Su et al., arXiv 2104.09864, section 3.2.2


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a block in which Llama differs from GPT-2, whose are the defaults.

    ``kv_heads`` are each read by as many query heads (Ainslie et al., arXiv 2305.13245), None: by
    one; ``norm`` "rms" is by Zhang and Sennrich (arXiv 1910.07467); ``positions`` "rotary" by Su et
    al.; ``mlp`` "swiglu" (Shazeer, arXiv 2002.05202) has about as many weights as "gelu";
    ``qk_norm`` is before rotation.
    """

    kv_heads: int | None = None
    norm: str = "layer"
    positions: str = "learned"
    mlp: str = "gelu"
    qk_norm: bool = False
    bias: bool = False


GPT2 = Parts()


class GPT(nn.Module):
    """``forward(tokens, state)``: ``tokens`` int64 ``[time, batch]``; the state is always ``()``.

    It returns logits ``[time, batch, vocab_size]`` and ``()``: each column is a separate window.
    Weights start normal with deviation 0.02, those that write into the residual stream with 0.02 /
    sqrt(2 * num_layers) (Radford et al., GPT-2, section 2.3), biases at zero.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        hidden_size: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        parts: Parts = GPT2,
        attention: str = "fused",
    ) -> None:
        super().__init__()
        self.context_length = context_length
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        learned, bias = parts.positions == "learned", parts.bias
        self.positions = nn.Embedding(context_length, hidden_size) if learned else None
        turned = 0 if learned else context_length
        self.blocks = nn.ModuleList(
            self.block(
                number,
                Attention(hidden_size, num_heads, parts, turned, attention == "fused"),
                [_norm(parts.norm, hidden_size, bias) for _ in range(2)],
                parts,
            )
            for number in range(num_layers)
        )
        self.norm = _norm(parts.norm, hidden_size, bias)
        self.output = TiedOutput()
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                writes = name.endswith(("output.weight", "experts.output"))
                nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5 if writes else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x), ()

    def block(
        self, number: int, attention: "Attention", norms: list[nn.Module], parts: Parts
    ) -> nn.Module:
        """Build block `number` (from 0)."""
        mlp = GELU if parts.mlp == "gelu" else SwiGLU
        return Block(attention, mlp(self.embedding.embedding_dim, parts.bias), norms)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return what the first block takes, ``[batch, time, width]``."""
        x = self.embedding(tokens.t())
        if self.positions is not None:
            x = x + self.positions(torch.arange(len(tokens), device=tokens.device))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of what the last block has made, ``[time, batch, vocab_size]``."""
        return self.output(self.norm(x).transpose(0, 1), self.embedding.weight)


class TiedOutput(nn.Module):
    """The output layer on the embedding's table, ``[vocab_size, width]``, in the format of ``x``.

    The table is no weight of this module: embedding and output can be overridden separately.
    """

    is_linear = True  # for products in 8 bits, where it is named

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return F.linear(x, table.to(x.dtype))


class Block(nn.Module):
    """A residual block on ``[batch, time, width]``: attention, then an MLP, each after a norm."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norms: list[nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal self-attention on ``[batch, time, width]``, without dropout.

    With dropout torch would not use its fused kernel on a CPU, but one that computes in FP32.

    `turned`: length of the rotary positions, 0 for none. `fused`: compute by
    F.scaled_dot_product_attention, otherwise part by part.
    """

    def __init__(self, width: int, heads: int, parts: Parts, turned: int, fused: bool) -> None:
        super().__init__()
        self.size, self.fused = width // heads, fused
        self.scale = self.size**-0.5  # of the scores
        self.heads = [heads, *2 * [parts.kv_heads or heads]]
        self.inputs = nn.Linear(width, sum(self.heads) * self.size, bias=parts.bias)
        self.output = nn.Linear(width, width, bias=parts.bias)
        self.query_norm = _norm(parts.norm, self.size, False) if parts.qk_norm else None
        self.key_norm = _norm(parts.norm, self.size, False) if parts.qk_norm else None
        self.rotary = Rotary(turned, self.size) if turned else None

    def forward(self, x: Tensor) -> Tensor:
        # [batch, heads, time, size] each
        query, key, value = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in self.inputs(x).split([n * self.size for n in self.heads], -1)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        if (times := self.heads[0] // self.heads[1]) > 1:
            # Not by enable_gqa, which not every fused kernel has.
            key, value = (part.repeat_interleave(times, 1) for part in (key, value))
        if self.fused:
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scale
            )
        else:
            attended = manual_attention(query, key, value, self.scale)
        return self.output(attended.transpose(1, 2).flatten(2))


def manual_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute the fused kernel's result, ``[batch, heads, time, size]``, in separate operations.

    In FP16 scores beyond 65,504 are infinite, before they are scaled. The fused kernel, in FP32
    inside, does not have this overflow.
    """
    scores = query @ key.transpose(-2, -1) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    # The least finite number, not an infinity that a search for overflows would find.
    scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, -1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


class Rotary(nn.Module):
    """Rotate pairs (i, i + size / 2) of the last dimension by position / base^(2 i / size).

    The scores of two tokens then depend on their distance alone. Pairs are taken from the two
    halves, as in GPT-NeoX and Hugging Face's Llama, not from neighbours; `size`, a head's, is even.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        places = torch.arange(length, dtype=torch.float64)
        exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles = places[:, None] * ROTARY_BASE**-exponents
        # float32 [length, size / 2], in the format of their module in a 16-bit mode
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate ``[..., time, size]``."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        one, other = x.chunk(2, -1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class GELU(nn.Module):
    """Two linear layers and the exact GELU between them."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 4 * width, bias=bias)
        self.output = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.gelu(self.inputs(x)))


class SwiGLU(nn.Module):
    """SiLU of one linear layer times another, and a third.

    `hidden`: units between them; None: 8 / 3 of `width`, up to a multiple of 64.
    """

    def __init__(self, width: int, bias: bool, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or -(-8 * width // (3 * 64)) * 64
        self.inputs = nn.Linear(width, 2 * hidden, bias=bias)
        self.output = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, linear = self.inputs(x).chunk(2, -1)
        return self.output(F.silu(gate) * linear)


def _norm(kind: str, width: int, bias: bool) -> nn.Module:
    # RMSNorm's own default is the smallest step of the format, which differs from mode to mode.
    if kind == "rms":
        return nn.RMSNorm(width, eps=1e-5)
    return nn.LayerNorm(width, eps=1e-5, bias=bias)
