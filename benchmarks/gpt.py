"""A small GPT, and data for it: the bytes of the sources of the Python standard library. It needs only torch."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes

# A processor without bf16 instructions multiplies matrices in bf16 many times slower than in fp32. There the model
# holds bf16 and multiplies in fp32, under every candidate.
WIDENED = not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def widened(x: Tensor) -> Tensor:
    """Return bf16 values in fp32 where the processor has no bf16 instructions."""
    return x.float() if WIDENED and x.dtype == torch.bfloat16 and x.device.type == "cpu" else x


class Linear(nn.Linear):
    """A linear layer that widens its inputs where that is faster."""

    def forward(self, input: Tensor) -> Tensor:
        own = cast("Tensor | None", self.bias)
        bias = None if own is None else widened(own)
        return F.linear(widened(input), widened(self.weight), bias).to(input.dtype)


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        self.mlp = nn.Sequential(Linear(width, 4 * width), nn.GELU(), Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = widened(heads.permute(2, 0, 3, 1, 4))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).to(x.dtype)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A GPT with tied embeddings, which computes its own loss."""

    def __init__(
        self, width: int = 192, depth: int = 6, heads: int = 6, context: int = 128, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = Linear(width, vocabulary, bias=False)
        self.apply(_initialise)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting `targets`, both [batch, length]."""
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and "bias" in dict(module.named_parameters(recurse=False)):
        nn.init.zeros_(module.bias)


@cache
def corpus() -> Tensor:
    """Return the concatenated sources of the standard library's top folder as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batches(rank: int, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets) without end: different ones on each rank, and the same ones in every run."""
    text, generator = corpus(), torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()
        yield rows[:, :-1], rows[:, 1:]
