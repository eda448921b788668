"""The model that a configuration names, built on the meta device, with what the trainer must know of it.

`shard()` gives the model its values. They come from safetensors files where the configuration names weights, and
otherwise from each module's `reset_parameters()`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from towpath.api import Values, blocks_of
from towpath.checkpoint.weights import Safetensors
from towpath.core.units import round_up
from towpath.engine.parameters.transformers_init import add_reset_parameters
from towpath.errors import ConfigError
from towpath.train.config import ModelConfig
from towpath.train.gpt import GPT, Shape, exported_config, exported_names, tensor_plan
from towpath.train.tensor_parallel import WHOLE_OUTPUT, WORDS, TensorPlan

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
        model, config_json = _hugging_face_model(config.hf, vocabulary)
        names = {name: name for name in model.state_dict(keep_vars=True)}
        attended, ignored = _attended(model), _ignored_names(model)
        plan = _hugging_face_plan(model)
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


def _hugging_face_model(path: str, vocabulary: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model and its configuration as JSON.

    `path` is a config.json, or a folder with one. `vocabulary` is the number of tokens that the model must know.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError("model.hf needs transformers, which is not here: pip install 'towpath[hf]'.") from None
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    if not file.is_file():  # transformers would look for it on the network
        raise ConfigError(f"model.hf = {path!r}: expected a config.json, or a folder with one; {file} is not there.")
    try:
        config: Any = transformers.AutoConfig.from_pretrained(file, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            # In fp32, because the parameters become the masters. The dtype in the file is that of the saved weights.
            model: Any = transformers.AutoModelForCausalLM.from_config(
                config, trust_remote_code=False, dtype=torch.float32
            )
    except Exception as error:  # every model checks its configuration in its own way
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.hf: {file} makes no causal language model: {reason[:300]}") from None
    if getattr(model.config, "is_decoder", None) is False:
        raise ConfigError(f"model.hf: {file} is of an encoder ({type(model).__name__}); expected a causal model.")
    known = int(model.get_input_embeddings().weight.shape[0])
    if known < vocabulary:
        raise ConfigError(
            f"model.hf: {file} has vocab_size {known}; the tokenizer has {vocabulary} tokens; expected as many or more."
        )
    add_reset_parameters(model)  # here, because a stage of a pipeline is no model of transformers
    return model, json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}


def _attended(model: Any) -> int:
    """Return the width of all attention heads, summed over the layers."""
    config = model.config.get_text_config()
    head_width = getattr(config, "head_dim", None)
    width = config.num_attention_heads * head_width if head_width else config.hidden_size
    return config.num_hidden_layers * width


def _hugging_face_plan(model: Any) -> TensorPlan | None:
    """Return the tensor-parallel plan of the model's configuration, or None if it has none for blocks."""
    config, base = model.config.get_text_config(), model.base_model_prefix
    plan: dict[str, str] = config.base_model_tp_plan or {}
    styles = {f"{base}.{name}": style for name, style in plan.items() if "*" in name}
    if not styles:
        return None
    names = {module: name for name, module in model.named_modules()}
    ends = {model.get_input_embeddings(): WORDS, model.get_output_embeddings(): WHOLE_OUTPUT}
    heads = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    return TensorPlan(
        styles,
        {names[module]: style for module, style in ends.items() if module in names},
        [count for count in heads if count],
    )


def _ignored_names(model: Any) -> re.Pattern[str]:
    """Return a pattern of names that old files may hold, though the model computes these tensors itself."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return re.compile("|".join(f"({pattern})" for pattern in patterns))


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
