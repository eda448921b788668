"""A causal language model of `transformers`, built on the meta device from a config.json, without any download.

`shard()` draws new weights, and computes buffers that no file keeps, as `transformers` would.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from towpath.engine.parameters.initialise import add_reset_parameters
from towpath.errors import ConfigError
from towpath.train.models.tensor_parallel import WHOLE_OUTPUT, WORDS, TensorPlan


def build(path: str, vocabulary: int) -> tuple[nn.Module, dict[str, Any]]:
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


def attended(model: Any) -> int:
    """Return the width of all attention heads, summed over the layers."""
    config = model.config.get_text_config()
    head_width = getattr(config, "head_dim", None)
    width = config.num_attention_heads * head_width if head_width else config.hidden_size
    return config.num_hidden_layers * width


def tensor_plan(model: Any) -> TensorPlan | None:
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


def ignored_names(model: Any) -> re.Pattern[str]:
    """Return a pattern of names that old files may hold, though the model computes these tensors itself."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return re.compile("|".join(f"({pattern})" for pattern in patterns))
