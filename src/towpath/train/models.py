"""The model that a configuration names, built on the meta device, with what the trainer must know of it.

It is our own GPT, or a model of `transformers`, built from a config.json without any download. `shard()` gives the
model its values. They come from safetensors files where the configuration names weights, and otherwise from each
module's `reset_parameters()`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from towpath.api import Values, blocks_of
from towpath.checkpoint.safe_files import Safetensors
from towpath.core.units import round_up
from towpath.engine.parameters.initialise import add_reset_parameters
from towpath.errors import ConfigError
from towpath.train.config import ModelConfig
from towpath.train.tensor_parallel import COLUMNS, ROWS, WHOLE_OUTPUT, WORDS, TensorPlan

# Logits of which the loss is computed at once. For more, it is computed in pieces, and again in the backward pass.
_LOGITS_AT_ONCE = 1 << 24


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
    hidden: int
    tied: bool

    @property
    def residual_spread(self) -> float:
        """The standard deviation of new weights whose products are added to the residual stream.

        Each block adds twice. The variance of the sum must not grow with the depth.
        """
        return SPREAD / (2 * self.depth) ** 0.5


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
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.q_proj, self.k_proj, self.v_proj = (Matrix(shape.width, shape.width) for _ in range(3))
        self.o_proj = Matrix(shape.width, shape.width, shape.residual_spread)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [batch, heads, length, head width]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A SwiGLU feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (Matrix(shape.width, shape.hidden) for _ in range(2))
        self.down_proj = Matrix(shape.hidden, shape.width, shape.residual_spread)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A transformer block with normalization before each half."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, NORM_EPS)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, NORM_EPS)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    """A compact GPT in the style of Llama: RMSNorm, rotary positions, SwiGLU.

    It computes what `LlamaForCausalLM` of transformers computes, under the same names. So its weights can be used
    there, with `llama_config` as config.json.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model: Any = nn.ModuleDict()
        self.model["embed_tokens"] = TokenEmbedding(shape.vocabulary, shape.width)
        self.model["layers"] = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.model["norm"] = nn.RMSNorm(shape.width, NORM_EPS)
        self.lm_head = Matrix(shape.width, shape.vocabulary)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits, [batch, length, vocabulary], of token ids, [batch, length]."""
        x = self.model.embed_tokens(ids)
        width = self.shape.width // self.shape.heads
        cos, sin = (table.to(x.dtype) for table in rotary_tables(ids.shape[1], width, ids.device))
        for block in self.model.layers:
            x = block(x, cos, sin)
        return self.lm_head(self.model.norm(x))


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


def llama_config(shape: Shape) -> dict[str, Any]:
    """Return the contents of config.json for LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.width // shape.heads,
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


def _gpt_plan(shape: Shape) -> TensorPlan:
    first = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    styles = dict.fromkeys(first, COLUMNS) | dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), ROWS)
    ends = {"model.embed_tokens": WORDS, "lm_head": WHOLE_OUTPUT}
    return TensorPlan({f"model.layers.*.{name}": style for name, style in styles.items()}, ends, (shape.heads,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBundle:
    """A model on the meta device, and what the trainer must know of it."""

    model: nn.Module  # the model in fp32, whatever dtype its files have: its parameters become the masters
    blocks: list[nn.Module]  # the repeated ones
    values: Values | None  # the `values` argument of `shard()`, or None for new weights
    config_json: dict[str, Any]  # the configuration of the Hugging Face model that it can be exported as
    parameters: int
    multiplied: int  # the number of parameters that each token is multiplied with
    attention_width: int  # the width of all attention heads, summed over the layers
    tensor_plan: TensorPlan  # how tensor-parallel ranks share its layers, without styles if the model does not say it

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of forward and backward as model-FLOPs utilization counts them (PaLM, appendix B).

        These are six for each parameter of a matrix, with all experts of a mixture, and attention over the whole
        length, though half of it is masked.
        """
        return 6.0 * self.multiplied + 12.0 * self.attention_width * length


def build_model(config: ModelConfig, vocabulary: int) -> ModelBundle:
    """Build the model for a tokenizer of `vocabulary` tokens."""
    if config.hf:
        model, config_json = _hugging_face_model(config.hf, vocabulary)
        attention_width, ignored = _attention_width(model), _ignored_names(model)
        plan = _hugging_face_plan(model)
    else:
        shape = Shape(
            vocabulary=vocabulary,
            width=config.width,
            depth=config.depth,
            heads=config.heads,
            hidden=round_up(-(-8 * config.width // 3), 32),
            tied=True,
        )
        with torch.device("meta"):
            model = GPT(shape)
        config_json, plan = llama_config(shape), _gpt_plan(shape)
        attention_width, ignored = shape.depth * shape.width, None
    values: Values | None = None
    if config.weights:
        weights = Safetensors(config.weights)
        # A tied tensor has several names in the model, and at least one of them in the files.
        tied: dict[int, tuple[list[str], tuple[int, ...]]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            tied.setdefault(id(tensor), ([], tuple(tensor.shape)))[0].append(name)
        weights.check({tuple(names): shape for names, shape in tied.values()}, ignored)
        values = weights.values
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
        parameters=sum(p.numel() for p in model.parameters()),
        multiplied=sum(multiplied.values()),
        attention_width=attention_width,
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


def _attention_width(model: Any) -> int:
    """Return the width of all attention heads, summed over the layers."""
    config = model.config.get_text_config()
    head_width = getattr(config, "head_dim", None)
    width = config.num_attention_heads * head_width if head_width else config.hidden_size
    return config.num_hidden_layers * width


def _hugging_face_plan(model: Any) -> TensorPlan:
    """Return the tensor-parallel plan of the model's configuration."""
    config, base = model.config.get_text_config(), model.base_model_prefix
    plan: dict[str, str] = config.base_model_tp_plan or {}
    styles = {f"{base}.{name}": style for name, style in plan.items() if "*" in name}
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
