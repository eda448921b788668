"""A causal language model of `transformers`, built on the meta device from a config.json, without any download.

New weights are drawn as `transformers` would draw them, but module by module. Each module gets a `reset_parameters()`
that calls the model's `_init_weights` on it, and then on the modules around it: GPT-2 scales a projection from the
attention that holds it. Buffers that no file keeps, such as rotary frequencies, get their values in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from towpath.errors import ConfigError
from towpath.train.models.tensor_parallel import WHOLE_OUTPUT, WORDS, TensorPlan


def build(path: str, vocabulary: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model and its configuration as JSON.

    Args:
        path: A config.json, or a folder with one.
        vocabulary: The tokens of the tokenizer, which the model must know.

    Raises:
        ConfigError: There is no such file, or it is not the configuration of a causal language model.
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
    _add_reset_parameters(model, model, (), None)
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


# A module and those around it, from the inside out, each with the `_init_weights` that applies to it.
Chain = tuple[tuple[nn.Module, Callable[[nn.Module], None]], ...]


def _add_reset_parameters(model: nn.Module, module: nn.Module, around: Chain, initialize: Any) -> None:
    initialize = getattr(module, "_init_weights", initialize)
    chain: Chain = ((module, initialize), *around)
    if any(True for _ in _own_tensors(module)):
        module.reset_parameters = partial(_reset, model, chain)  # pyright: ignore[reportArgumentType]
    for child in module.children():
        _add_reset_parameters(model, child, chain, initialize)


def _reset(model: nn.Module, chain: Chain) -> None:
    """Initialize the first module of `chain`: with its own `_init_weights`, then with those of the modules around it.

    Its buffers are filled with NaN, or the least integer, before. So a buffer that gets no values is found.
    """
    from transformers import initialization

    module = chain[0][0]
    buffers = {
        n: b for n, b in module.named_buffers(recurse=False) if b.device.type != "meta" and b.dtype != torch.bool
    }
    for buffer in buffers.values():
        buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min)
    with torch.no_grad(), initialization.guard_torch_init_functions(), _others_marked_initialized(model, module):
        for part, initialize in chain:
            initialize(part)
    for name, buffer in buffers.items():
        if (buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min).any():
            raise ConfigError(f"{type(module).__name__} gives its buffer {name!r} no values when it is built on meta.")


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


@contextmanager
def _others_marked_initialized(model: nn.Module, module: nn.Module) -> Generator[None]:
    """Mark all tensors except those of `module`, so that transformers draws no values for them."""
    own = {id(t) for t in _own_tensors(module)}
    others: list[Any] = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in own]
    for tensor in others:
        tensor._is_hf_initialized = True
    try:
        yield
    finally:
        for tensor in others:
            del tensor._is_hf_initialized
