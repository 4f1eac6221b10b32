"""The transformer of gpt.py with a mixture of experts in place of each MLP.

Mixtral, Qwen3-MoE and DeepSeek are built so.

A router chooses `top_k` experts for each token. An expert is a gated MLP, and the weights of all of
one layer are two parameters [experts, out, in], as in transformers.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mprun.models.gpt import GPT, GPT2, Attention, Parts, State, SwiGLU


@dataclass(frozen=True, slots=True)
class Mixing:
    """The parts of a mixture of experts; the defaults are those of the configuration.

    scoring: "softmax" over all experts, or the "sigmoid" of each (DeepSeek-V3).
    renormalise: the weights of a token's experts add up to 1.
    balancing: "auxiliary", a loss times `balance_factor`; "bias", one an expert that is added where
        experts are chosen, moved by `bias_rate` an update; "none".
    capacity: rows that an expert takes at most, over an even load; None: all.
    shared_size: hidden units of an expert that every token has, 0: none; shared_gate: times a gate.
    dense_layers: first blocks with an MLP.
    router: "fp32" in every mode, or as the "mode" says.
    """

    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 192
    dense_layers: int = 0
    capacity: float | None = None
    shared_size: int = 0
    shared_gate: bool = False
    scoring: str = "softmax"
    renormalise: bool = True
    balancing: str = "auxiliary"
    balance_factor: float = 0.01
    bias_rate: float = 0.001
    router: str = "fp32"


MIXTRAL = Mixing()


class GPTMoE(GPT):
    """``forward(tokens, state)`` as of `GPT`; in training, with an auxiliary loss, that as a third
    result, 0-dim: the mean over layers of their `Choice`, times `balance_factor`."""

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        hidden_size: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        parts: Parts = GPT2,
        mixing: Mixing = MIXTRAL,
        attention: str = "fused",
    ) -> None:
        self._mixing = mixing
        sizes = vocab_size, context_length, hidden_size, num_layers, num_heads
        super().__init__(*sizes, parts, attention)

    def block(
        self, number: int, attention: Attention, norms: list[nn.Module], parts: Parts
    ) -> nn.Module:
        if number < self._mixing.dense_layers:
            return super().block(number, attention, norms, parts)
        width = self.embedding.embedding_dim
        return MixtureBlock(attention, Mixture(width, parts.bias, self._mixing), norms)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Any, ...]:
        x, losses = self.embedded(tokens), []
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                x, loss = x
                losses.append(loss)
        if not self.training or self._mixing.balancing != "auxiliary":
            return self.logits(x), ()
        return self.logits(x), (), self._mixing.balance_factor * torch.stack(losses).mean()

    @torch.no_grad()
    def end_update(self, skipped: Tensor | None) -> dict[str, Tensor]:
        """Move the biases of experts, and return figures of the tokens that routers have counted.

        `expert_load_max` and `expert_load_min`: of the experts of all layers, over an even load.
        `router_entropy`: of a token's scores over the most, a mean over tokens and layers.
        """
        choices = [own for own in self.modules() if isinstance(own, Choice)]
        loads = torch.stack([own.load for own in choices])
        tokens = loads.sum(1) / self._mixing.top_k
        entropies = torch.stack([own.entropy for own in choices]) / tokens
        relative = loads / loads.mean(1, keepdim=True)
        for own in choices:
            own.end_update(skipped)
        figures = {"expert_load_max": relative.max(), "expert_load_min": relative.min()}
        return figures | {"router_entropy": entropies.mean() / math.log(self._mixing.num_experts)}


class MixtureBlock(nn.Module):
    """A `Block` that also returns the auxiliary loss of its mixture, 0-dim."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norms: list[nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, loss = self.mlp(self.mlp_norm(x))
        return x + y, loss


class Mixture(nn.Module):
    """A router, its experts, and a shared expert, on ``[batch, time, width]``."""

    def __init__(self, width: int, bias: bool, mixing: Mixing) -> None:
        super().__init__()
        self.router = Router(width, mixing)
        self.experts = Experts(width, mixing)
        shared = mixing.shared_size
        self.shared = SwiGLU(width, bias, shared) if shared else None
        self.gate = nn.Linear(width, 1, bias=False) if shared and mixing.shared_gate else None
        if self.gate is not None:
            self.gate.is_router = True  # type: ignore[assignment]  # in the mode's dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.flatten(0, 1)
        weights, chosen, counts, loss = self.router(rows)
        y = self.experts(rows, weights, chosen, counts).view_as(x)
        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.gate is None else torch.sigmoid(self.gate(x)) * shared)
        return y, loss


class Router(nn.Module):
    """The logits of experts for each row, and the `Choice` by them."""

    is_router = True

    def __init__(self, width: int, mixing: Mixing) -> None:
        super().__init__()
        self.computes_in_fp32 = mixing.router == "fp32"
        self.weight = nn.Parameter(torch.empty(mixing.num_experts, width))
        self.choice = Choice(mixing)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        device = rows.device.type
        alone = torch.autocast(device, enabled=False) if self.computes_in_fp32 else nullcontext()
        with alone:
            logits = F.linear(rows.to(self.weight.dtype), self.weight)
        found: tuple[Tensor, Tensor, Tensor, Tensor] = self.choice(logits)
        return found


class Choice(nn.Module):
    """The experts of each row by its logits ``[n, experts]``, in FP32 in every mode.

    It returns the weights of a row's experts ``[n, top_k]``, their numbers, the rows of each expert
    ``[experts]``, and the auxiliary loss, 0-dim (Fedus et al., arXiv 2101.03961, equations 4 to 6;
    for several experts a row Dai et al., arXiv 2401.06066, equations 12 to 14): the sum over
    experts of the load over an even one times the mean share of the scores. It is 1 if all is even.

    `bias` is by Wang et al. (arXiv 2408.15664, algorithm 1): it chooses, and is no part of a
    weight. The rows of all micro-batches and ranks move it, once an update that is applied.
    """

    computes_in_fp32 = True
    moved_in_forward = ("load", "entropy")
    bias: Tensor | None
    load: Tensor
    entropy: Tensor

    def __init__(self, mixing: Mixing) -> None:
        super().__init__()
        self.mixing, count = mixing, mixing.num_experts
        self.register_buffer("bias", torch.zeros(count) if mixing.balancing == "bias" else None)
        # Since the last update: rows of each expert, and the sum of the entropies of scores.
        self.register_buffer("load", torch.zeros(count), persistent=False)
        self.register_buffer("entropy", torch.zeros(()), persistent=False)

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixing, count = self.mixing, self.mixing.num_experts
        logits = logits.to(self.load.dtype)
        if mixing.scoring == "softmax":
            scores = shares = torch.softmax(logits, -1)
        else:
            scores = torch.sigmoid(logits)
            shares = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        preferred = scores.detach() if self.bias is None else scores.detach() + self.bias
        chosen = preferred.topk(mixing.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        if mixing.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        experts = torch.arange(count, device=chosen.device)
        counts = (chosen[..., None] == experts).sum((0, 1))
        loss = count / chosen.numel() * (counts * shares.mean(0)).sum()
        if self.training and torch.is_grad_enabled():
            self.load += counts
            self.entropy += torch.special.entr(shares.detach()).sum()
        return weights, chosen, counts, loss

    def end_update(self, skipped: Tensor | None) -> None:
        """Move the bias unless the update is skipped, and begin to count anew."""
        if self.bias is not None:
            step = self.mixing.bias_rate * torch.sign(self.load.mean() - self.load)
            self.bias += step if skipped is None else torch.where(skipped != 0, 0.0, step)
        self.load.zero_()
        self.entropy.zero_()


class Experts(nn.Module):
    """Gated MLPs, each for the rows that have chosen it.

    `inputs`: [experts, 2 * size, width], first of the gate; `output`: [experts, width, size].
    Without a capacity no row is dropped, and the host waits for the device once a layer and pass,
    to learn how many rows each has. With one, each has so many places, and waits for nothing:
    products count places that are left empty, and rows beyond have no result of this expert
    (Lepikhin et al., arXiv 2006.16668, section 2.2; first come, first served).
    """

    def __init__(self, width: int, mixing: Mixing) -> None:
        super().__init__()
        count, size = mixing.num_experts, mixing.expert_size
        self.capacity = mixing.capacity
        self.inputs = nn.Parameter(torch.empty(count, 2 * size, width))
        self.output = nn.Parameter(torch.empty(count, width, size))

    def forward(self, rows: Tensor, weights: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        """Return the weighted sum of each row's experts, ``[n, width]``, added up in FP32."""
        order = chosen.flatten().argsort(stable=True)  # those of an expert, then of the next one
        if self.capacity is None:
            found = self._in_parts(rows[order // chosen.shape[-1]], counts)[order.argsort()]
        else:
            found = self._in_places(rows, chosen, counts, order)
        return (found.unflatten(0, chosen.shape) * weights[..., None]).sum(1).to(rows.dtype)

    def _in_parts(self, rows: Tensor, counts: Tensor) -> Tensor:
        found, parts = [], rows.tensor_split(counts.cumsum(0).tolist()[:-1])
        for part, inputs, output in zip(
            parts, self.inputs.unbind(0), self.output.unbind(0), strict=True
        ):
            gate, up = F.linear(part, inputs).chunk(2, -1)
            found.append(F.linear(F.silu(gate) * up, output))
        return torch.cat(found)

    def _in_places(self, rows: Tensor, chosen: Tensor, counts: Tensor, order: Tensor) -> Tensor:
        assert self.capacity is not None
        most = min(len(rows), math.ceil(self.capacity * len(order) / len(counts)))
        experts, total = chosen.flatten()[order], len(counts) * most
        later = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[experts]
        places = torch.where(later < most, experts * most + later, total)  # the last is no expert's
        taken = torch.full((total + 1,), len(rows), device=order.device)  # the last is no row
        taken = taken.scatter(0, places, order // chosen.shape[-1])[:total]
        given = F.pad(rows, (0, 0, 0, 1))[taken].unflatten(0, (-1, most))
        gate, up = torch.bmm(given, self.inputs.mT).chunk(2, -1)
        found = torch.bmm(F.silu(gate) * up, self.output.mT).flatten(0, 1)
        return F.pad(found, (0, 0, 0, 1))[places[order.argsort()]]
