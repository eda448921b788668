"""The model that a configuration names: built on the meta device, with what the loop must know of it.

Its values come later, with `shard()`: from `built.values` where the configuration names weights, else unit by unit from
each module's `reset_parameters()`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from towpath.api import Values, blocks_of
from towpath.core.units import round_up
from towpath.errors import ConfigError
from towpath.train.config import ModelConfig
from towpath.train.models import hugging_face
from towpath.train.models.gpt import GPT, Shape, exported_config, exported_names, tensor_plan
from towpath.train.models.tensor_parallel import TensorPlan
from towpath.train.models.weights import Safetensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """`model`: on the meta device, in fp32, whatever dtype its weights are kept in: they are the masters.

    `values`: for `shard(values=…)`; None for new weights. `blocks`: the repeated ones. `config_json` and `names`: the
    Hugging Face model it can be written as, and what each parameter and persistent buffer is called there.
    """

    model: nn.Module
    blocks: list[nn.Module]
    values: Values | None
    config_json: dict[str, Any]
    names: Mapping[str, str]
    parameters: int
    matrices: int  # the parameters that each token is multiplied with
    attended: int  # width of what attention mixes, summed over the layers
    tensor_plan: TensorPlan | None  # how ranks share its layers, if the model tells

    def flops_per_token(self, length: int) -> float:
        """Of forward and backward, as model-FLOPs utilisation counts them (PaLM, appendix B).

        Six for each parameter of a matrix, all experts of a mixture among them, and attention over the whole length,
        though half of it is masked.
        """
        return 6.0 * self.matrices + 12.0 * self.attended * length


def check_weights(config: ModelConfig) -> None:
    """Refuse weights whose files are missing or damaged, before the data is read; `build` needs its vocabulary."""
    if config.weights:
        Safetensors(config.weights)


def build(config: ModelConfig, vocabulary: int) -> Built:
    """For a tokenizer of `vocabulary` tokens."""
    if config.hf:
        model, config_json = hugging_face.build(config.hf, vocabulary)
        names = {name: name for name in model.state_dict(keep_vars=True)}
        attended, ignored = hugging_face.attended(model), hugging_face.ignored_names(model)
        shared = hugging_face.tensor_plan(model)
    else:
        shape = _shape(config, vocabulary)
        with torch.device("meta"):
            model = GPT(shape)
        config_json, names = exported_config(shape), exported_names(shape)
        attended, ignored, shared = shape.depth * shape.width, None, tensor_plan(shape)
    return Built(
        model=model,
        blocks=blocks_of(model),
        values=_values(config.weights, model, names, ignored) if config.weights else None,
        config_json=config_json,
        names=names,
        parameters=sum(p.numel() for p in model.parameters()),
        matrices=_matrices(model),
        attended=attended,
        tensor_plan=shared,
    )


def _shape(config: ModelConfig, vocabulary: int) -> Shape:
    if config.vocabulary and config.vocabulary < vocabulary:
        raise ConfigError(
            f"model.vocabulary = {config.vocabulary}: the tokenizer has {vocabulary} tokens; expected as many or more."
        )
    return Shape(
        vocabulary=config.vocabulary or vocabulary,
        width=config.width,
        depth=config.depth,
        heads=config.heads,
        kv_heads=config.kv_heads or config.heads,
        hidden=config.hidden or round_up(-(-8 * config.width // 3), 32),
        tied=config.tied,
    )


def _values(path: str, model: nn.Module, names: Mapping[str, str], ignored: re.Pattern[str] | None) -> Values:
    """From files that call things as Hugging Face does."""
    weights = Safetensors(path)
    weights.check(_shapes_by_names(model, names.__getitem__), ignored)
    return lambda name, start, end: weights.values(names[name], start, end)


def _shapes_by_names(model: nn.Module, named: Callable[[str], str]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Of parameters and persistent buffers; those that are tied have several names."""
    found: dict[int, tuple[list[str], tuple[int, ...]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), ([], tuple(tensor.shape)))[0].append(named(name))
    return {tuple(names): shape for names, shape in found.values()}


def _matrices(model: nn.Module) -> int:
    """An embedding is looked up, unless it is the output layer too."""
    found: dict[int, int] = {}
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            found |= {id(p): p.numel() for p in module.parameters(recurse=False) if p.dim() > 1}
    return sum(found.values())


# Before shard() ---------------------------------------------------------------------------------------------------


def checkpoint_blocks(built: Built) -> None:
    """Activation checkpointing: each block keeps its input only, and computes the rest again in the backward pass."""
    for block in built.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compile_blocks(built: Built, **options: Any) -> None:
    """torch.compile for each block. `options`: torch.compile's."""
    for block in built.blocks:
        block.forward = torch.compile(block.forward, **options)


# What the loop computes -------------------------------------------------------------------------------------------


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """[batch, length] → [batch, length, vocabulary], in the dtype that computes."""
    return model(ids) if isinstance(model, GPT) else model(input_ids=ids, use_cache=False).logits


# Logits of which the loss is taken at once; of more, piece by piece, and again in the backward pass.
_LOGITS_AT_ONCE = 1 << 24


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, in fp32 at least. `inputs` and `targets`: [batch, length] each."""
    return loss_of_logits(logits_of(model, inputs), targets)


def loss_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """`logits`: [batch, length, vocabulary]."""
    logits, wanted = logits.flatten(0, 1), targets.flatten()
    if logits.numel() <= _LOGITS_AT_ONCE:
        return _summed_loss(logits, wanted) / wanted.numel()
    rows = max(_LOGITS_AT_ONCE // logits.shape[-1], 1)
    pieces = zip(logits.split(rows), wanted.split(rows), strict=True)
    # The fp32 copies of a piece live only while its loss, or its gradient, is computed.
    losses = [checkpoint(_summed_loss, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.stack(losses).sum() / wanted.numel()


def _summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), targets, reduction="sum")
