"""A compact GPT in the style of Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

It computes what `LlamaForCausalLM` of transformers computes, so its weights can be used there. `exported_names` gives
the Hugging Face name of each parameter, and `exported_config` the contents of config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from towpath.train.tensor_parallel import COLUMNS, ROWS, WHOLE_OUTPUT, WORDS, TensorPlan

ROTARY_BASE = 10_000.0
NORM_EPS = 1e-5
SPREAD = 0.02  # standard deviation of new weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions of a GPT."""

    vocabulary: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads


class Matrix(nn.Linear):
    """A linear layer without a bias, whose weights are drawn from a normal distribution."""

    def __init__(self, inputs: int, outputs: int, spread: float = SPREAD) -> None:
        self.spread = spread  # before the constructor, which draws the weights
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.spread)


class TokenEmbedding(nn.Embedding):
    """An embedding whose weights are drawn from a normal distribution."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=SPREAD)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        shared = shape.kv_heads * shape.head_width
        self.query = Matrix(shape.width, shape.width)
        self.key = Matrix(shape.width, shared)
        self.value = Matrix(shape.width, shared)
        self.out = Matrix(shape.width, shape.width, _spread_of_residual(shape))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [batch, heads, length, head width]
            for project in (self.query, self.key, self.value)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A SwiGLU feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Matrix(shape.width, shape.hidden)
        self.up = Matrix(shape.width, shape.hidden)
        self.down = Matrix(shape.hidden, shape.width, _spread_of_residual(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A transformer block with normalization before each half."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, NORM_EPS)
        self.attention = Attention(shape)
        self.feed_norm = nn.RMSNorm(shape.width, NORM_EPS)
        self.feed = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed(self.feed_norm(x))


class GPT(nn.Module):
    """The language model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = TokenEmbedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.width, NORM_EPS)
        self.head = Matrix(shape.width, shape.vocabulary)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits, [batch, length, vocabulary], of token ids, [batch, length]."""
        x = self.tokens(ids)
        cos, sin = (table.to(x.dtype) for table in rotary_tables(ids.shape[1], self.shape.head_width, ids.device))
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def rotary_tables(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [length, head_width]. Each pass computes them, so there is no buffer to initialize."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device=device) / head_width
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = positions[:, None] * (1.0 / ROTARY_BASE**exponents)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate element i of each head with element i + half of the head."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _spread_of_residual(shape: Shape) -> float:
    # Each block adds to the residual stream twice. The variance of the sum must not grow with the depth.
    return SPREAD / (2 * shape.depth) ** 0.5


_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feed_norm": "post_attention_layernorm",
    "feed.gate": "mlp.gate_proj",
    "feed.up": "mlp.up_proj",
    "feed.down": "mlp.down_proj",
}


def tensor_plan(shape: Shape) -> TensorPlan:
    """Return how tensor-parallel ranks share the layers."""
    first = ("attention.query", "attention.key", "attention.value", "feed.gate", "feed.up")
    styles = dict.fromkeys(first, COLUMNS) | dict.fromkeys(("attention.out", "feed.down"), ROWS)
    return TensorPlan(
        {f"blocks.*.{name}": style for name, style in styles.items()},
        {"tokens": WORDS, "head": WHOLE_OUTPUT},
        (shape.heads, shape.kv_heads),
    )


def exported_names(shape: Shape) -> dict[str, str]:
    """Return the name in LlamaForCausalLM of each parameter."""
    names = {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    for i in range(shape.depth):
        names |= {f"blocks.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in _IN_BLOCK.items()}
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()}


def exported_config(shape: Shape) -> dict[str, Any]:
    """Return the contents of config.json for LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROTARY_BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
        "initializer_range": SPREAD,
        "bos_token_id": None,
        "eos_token_id": None,
    }
