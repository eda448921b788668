"""The models that parity is judged on: small, seeded, and smooth.

Smooth, because a ReLU that flips on a rounding error moves a gradient by its whole size; small, because eight ranks
share two cores. Batches are made anew for every rank, micro-step and step, alike in every process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Where the ranks train. `make gpu` runs tests of tests/ranks on a GPU that all ranks share (tests/ranks/server.py).
DEVICE = torch.device(os.environ.get("TOWPATH_TEST_DEVICE", "cpu"))

VOCABULARY = 37
SEQUENCE = 6
# The loss of step s is multiplied by LOUDNESS[s], so that some steps are clipped and others are not.
LOUDNESS = (1.0, 0.25, 2.0, 0.5, 3.0)


@dataclass(frozen=True)
class Entry:
    """How to build a model, what to feed it, and its loss (a mean over the batch)."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]

    def make(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(20260)
        return self.build().to(DEVICE, dtype).train()

    def micro_batch(self, rank: int, micro_step: int, step: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1 + rank + 100 * micro_step + 10_000 * step)
        inputs = self.batch(generator)
        return tuple(x.to(DEVICE, dtype) if x.is_floating_point() else x.to(DEVICE) for x in inputs)


def noise(rank: int, micro: int, step: int, *shape: int) -> Tensor:
    """For the small models of single tests: three rows of six."""
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro + 100 * step)
    return torch.randn(*(shape or (3, 6)), generator=generator, dtype=torch.float64).to(DEVICE)


# --- an MLP of odd sizes ---------------------------------------------------------------------------------------------


class OddBlock(nn.Module):
    """Every parameter has an odd number of elements, one of them a single one without a dimension."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.narrow(torch.tanh(self.widen(x)))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(*(OddBlock(7, 11) for _ in range(3))), nn.Linear(7, 3))


def _mlp_batch(generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def _mlp_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


# --- a GPT with tied embeddings --------------------------------------------------------------------------------------


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (h.view(b, t, self.heads, -1).transpose(1, 2) for h in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class TiedGPT(nn.Module):
    """The output layer is the token embedding: one parameter in two modules, used first and last."""

    def __init__(self, layers: int = 2, width: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _text(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=generator),)


def _next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _gpt_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return _next_token(model(ids), ids)


# --- a small WideResNet ----------------------------------------------------------------------------------------------


class WideBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(out)
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        same = channels == out and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


def _wide_resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1, bias=False),
        nn.Sequential(WideBlock(5, 8, 1), WideBlock(8, 8, 1)),
        nn.Sequential(WideBlock(8, 12, 2), WideBlock(12, 12, 1)),
        nn.BatchNorm2d(12),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 7),
    )


def _images(generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(4, 3, 6, 6, generator=generator), torch.randint(0, 7, (4,), generator=generator)


def _image_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def llama_config(length: int = SEQUENCE, **more: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        initializer_range=0.2,
        **more,
    )


def _llama() -> nn.Module:
    """Llama, without the fp32 in its midst: its own RMSNorm and eager softmax round to fp32 whatever the dtype is."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    config = llama_config(attention_dropout=0.0, use_cache=False, attn_implementation="sdpa")
    model = LlamaForCausalLM(config)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, LlamaRMSNorm):
                setattr(module, name, nn.RMSNorm(config.hidden_size, config.rms_norm_eps))
    return model


def gpt2_config(length: int = SEQUENCE, **more: Any) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=length,
        n_embd=12,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        **more,
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(gpt2_config(use_cache=False, attn_implementation="eager"))


def _causal_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return _next_token(model(input_ids=ids).logits, ids)


MODELS = {
    entry.name: entry
    for entry in (
        Entry("mlp", _mlp, _mlp_batch, _mlp_loss),
        Entry("gpt", TiedGPT, _text, _gpt_loss),
        Entry("wideresnet", _wide_resnet, _images, _image_loss),
        Entry("llama", _llama, _text, _causal_loss),
        Entry("gpt2", _gpt2, _text, _causal_loss),
    )
}
