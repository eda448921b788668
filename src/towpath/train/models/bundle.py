"""The model that a configuration names, built on the meta device, with what the trainer must know of it.

`shard()` gives the model its values. They come from safetensors files where the configuration names weights, and
otherwise from each module's `reset_parameters()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from towpath.api import Values, blocks_of
from towpath.checkpoint.safe_files import Safetensors
from towpath.core.units import round_up
from towpath.train.config import ModelConfig
from towpath.train.models import hugging_face
from towpath.train.models.gpt import GPT, Shape, exported_config, exported_names, tensor_plan
from towpath.train.models.tensor_parallel import TensorPlan

# Logits of which the loss is computed at once. For more, it is computed in pieces, and again in the backward pass.
_LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBundle:
    """A model on the meta device, and what the trainer must know of it."""

    model: nn.Module  # the model in fp32, whatever dtype its files have: its parameters become the masters
    blocks: list[nn.Module]  # the repeated ones
    values: Values | None  # the `values` argument of `shard()`, or None for new weights
    config_json: dict[str, Any]  # the configuration of the Hugging Face model that it can be exported as
    names: Mapping[str, str]  # the Hugging Face name of each parameter and persistent buffer
    parameters: int
    matrices: int  # the number of parameters that each token is multiplied with
    attended: int  # the width of all attention heads, summed over the layers
    # How tensor-parallel ranks share its layers, or None if the model does not define it.
    tensor_plan: TensorPlan | None

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of forward and backward as model-FLOPs utilization counts them (PaLM, appendix B).

        These are six for each parameter of a matrix, with all experts of a mixture, and attention over the whole
        length, though half of it is masked.
        """
        return 6.0 * self.matrices + 12.0 * self.attended * length


def build_model(config: ModelConfig, vocabulary: int) -> ModelBundle:
    """Build the model for a tokenizer of `vocabulary` tokens."""
    if config.hf:
        model, config_json = hugging_face.build(config.hf, vocabulary)
        names = {name: name for name in model.state_dict(keep_vars=True)}
        attended, ignored = hugging_face.attended(model), hugging_face.ignored_names(model)
        plan = hugging_face.tensor_plan(model)
    else:
        shape = Shape(
            vocabulary=vocabulary,
            width=config.width,
            depth=config.depth,
            heads=config.heads,
            kv_heads=config.heads,
            hidden=round_up(-(-8 * config.width // 3), 32),
            tied=True,
        )
        with torch.device("meta"):
            model = GPT(shape)
        config_json, names = exported_config(shape), exported_names(shape)
        attended, ignored, plan = shape.depth * shape.width, None, tensor_plan(shape)
    values: Values | None = None
    if config.weights:
        weights = Safetensors(config.weights)
        # A tied tensor has several names in the model, and at least one of them in the files.
        tied: dict[int, tuple[list[str], tuple[int, ...]]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            tied.setdefault(id(tensor), ([], tuple(tensor.shape)))[0].append(names[name])
        weights.check({tuple(all_names): shape for all_names, shape in tied.values()}, ignored)
        values = lambda name, start, end: weights.values(names[name], start, end)  # noqa: E731
    # An embedding only looks its rows up, unless it is the output layer too.
    multiplied = {
        id(p): p.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for p in module.parameters(recurse=False)
        if p.dim() > 1
    }
    return ModelBundle(
        model=model,
        blocks=blocks_of(model),
        values=values,
        config_json=config_json,
        names=names,
        parameters=sum(p.numel() for p in model.parameters()),
        matrices=sum(multiplied.values()),
        attended=attended,
        tensor_plan=plan,
    )


def checkpoint_blocks(bundle: ModelBundle) -> None:
    """Enable activation checkpointing: each block keeps its input only, and computes the rest again in backward.

    Call it before `shard()`, as `compile_blocks`.
    """
    for block in bundle.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compile_blocks(bundle: ModelBundle, **options: Any) -> None:
    """Compile each block. `options` are those of `torch.compile`."""
    for block in bundle.blocks:
        block.forward = torch.compile(block.forward, **options)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits, [batch, length, vocabulary], of token ids, [batch, length], in the dtype of compute."""
    return model(ids) if isinstance(model, GPT) else model(input_ids=ids, use_cache=False).logits


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a model's predictions, at least in fp32. Both tensors are [batch, length]."""
    return loss_of_logits(logits_of(model, inputs), targets)


def loss_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits of shape [batch, length, vocabulary]."""
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if logits.numel() <= _LOGITS_AT_ONCE:
        return _summed_loss(logits, targets) / targets.numel()
    rows = max(_LOGITS_AT_ONCE // logits.shape[-1], 1)
    pieces = zip(logits.split(rows), targets.split(rows), strict=True)
    # The fp32 copies of a piece exist only while its loss, or its gradient, is computed.
    losses = [checkpoint(_summed_loss, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.stack(losses).sum() / targets.numel()


def _summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), targets, reduction="sum")
