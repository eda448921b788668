"""A small GPT and a text that every machine has. train.py and pipeline.py use both."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The sources of Python's standard library, read as bytes.
FILES = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
VOCABULARY, LENGTH = 256, 128  # a token is a byte


class Bytes:
    """Windows of a text, each byte a token."""

    def __init__(self) -> None:
        text = b"\0".join(file.read_bytes() for file in FILES)
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def batch(self, number: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the inputs of batch `number` and, one byte later, its targets. They are the same on every rank."""
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(self.tokens) - LENGTH, (count, 1), generator=generator)
        windows = self.tokens[starts + torch.arange(LENGTH + 1)].long()
        return windows[:, :-1], windows[:, 1:]


class Block(nn.Module):
    """Causal attention and a feed-forward layer, with a norm before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, head width]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.feed_norm(x))


class Embedding(nn.Embedding):
    """An embedding with small weights, because the head shares them."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class GPT(nn.Module):
    """A language model whose output layer shares the weights of its embedding."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = Embedding(VOCABULARY, width), Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits, [batch, length, vocabulary], of token ids, [batch, length]."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
