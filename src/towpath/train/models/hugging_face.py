"""A causal language model of `transformers`, from a config.json alone: no download, no remote code, on the meta device.

New weights are drawn as `transformers` would, but module by module: each module gets a `reset_parameters()` that calls
the model's `_init_weights` on it, and then on the modules around it (GPT-2 scales a projection from the attention that
holds it). Buffers that no file keeps, such as rotary frequencies, get their values in the same way.
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
    """The model, and its configuration as JSON has it."""
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
            # As masters, in fp32: the dtype in the file is what the weights were kept in.
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
    _let_modules_reset(model)
    return model, json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}


def attended(model: Any) -> int:
    """The width of all heads together, summed over the layers."""
    config = model.config.get_text_config()
    head_width = getattr(config, "head_dim", None)
    width = config.num_attention_heads * head_width if head_width else config.hidden_size
    return config.num_hidden_layers * width


def tensor_plan(model: Any) -> TensorPlan | None:
    """As the model's configuration tells it for the layers of its blocks."""
    config, base = model.config.get_text_config(), model.base_model_prefix
    told: dict[str, str] = config.base_model_tp_plan or {}
    styles = {f"{base}.{name}": style for name, style in told.items() if "*" in name}
    names = {module: name for name, module in model.named_modules()}
    ends = {model.get_input_embeddings(): WORDS, model.get_output_embeddings(): WHOLE_OUTPUT}
    heads = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    return (
        TensorPlan(
            styles,
            {names[module]: style for module, style in ends.items() if module in names},
            [count for count in heads if count],
        )
        if styles
        else None
    )


def ignored_names(model: Any) -> re.Pattern[str] | None:
    """What files of old may hold, and the model makes itself."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return re.compile("|".join(f"({pattern})" for pattern in patterns))


# A module and those around it, from the inside out, each with the `_init_weights` that is in charge of it.
Chain = tuple[tuple[nn.Module, Callable[[nn.Module], None]], ...]


def _let_modules_reset(model: nn.Module) -> None:
    def visit(module: nn.Module, around: Chain, initialise: Any) -> None:
        initialise = getattr(module, "_init_weights", initialise)
        chain: Chain = ((module, initialise), *around)
        if any(True for _ in _own(module)):
            module.reset_parameters = partial(_reset, model, chain)  # pyright: ignore[reportArgumentType]
        for child in module.children():
            visit(child, chain, initialise)

    visit(model, (), None)


def _reset(model: nn.Module, chain: Chain) -> None:
    """Give `chain`'s first module its values: what it is given by itself, then by each of the modules around it."""
    from transformers import initialization

    module = chain[0][0]
    buffers = {n: b for n, b in module.named_buffers(recurse=False) if b.device.type != "meta"}
    for buffer in buffers.values():
        _forget(buffer)
    with torch.no_grad(), initialization.guard_torch_init_functions(), _all_done_but(model, module):
        for part, initialise in chain:
            initialise(part)
    for name, buffer in buffers.items():
        if _forgotten(buffer):
            raise ConfigError(f"{type(module).__name__} gives its buffer {name!r} no values when it is built on meta.")


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


@contextmanager
def _all_done_but(model: nn.Module, module: nn.Module) -> Generator[None]:
    """transformers draws no values for what has this mark."""
    mine = {id(t) for t in _own(module)}
    others: list[Any] = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in mine]
    for tensor in others:
        tensor._is_hf_initialized = True
    try:
        yield
    finally:
        for tensor in others:
            del tensor._is_hf_initialized


def _forget(buffer: Tensor) -> None:
    if buffer.is_floating_point():
        buffer.fill_(torch.nan)
    elif buffer.dtype != torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).min)


def _forgotten(buffer: Tensor) -> bool:
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return buffer.dtype != torch.bool and bool((buffer == torch.iinfo(buffer.dtype).min).any())
