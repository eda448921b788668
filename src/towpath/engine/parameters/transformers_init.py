"""Initial values of Transformers models on the meta device, module by module.

Each module gets a `reset_parameters()` that calls the model's `_init_weights` on it, and then on the modules around it:
GPT-2 scales a projection from the attention that holds it. Buffers that no file keeps, such as rotary frequencies, get
their values in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from towpath.errors import ConfigError

# A module and those around it, from the inside out, each with the `_init_weights` that applies to it.
Chain = tuple[tuple[nn.Module, Callable[[nn.Module], None]], ...]


def add_reset_parameters(model: nn.Module) -> None:
    """Give the modules of each Transformers model in `model`, or of `model` itself, a `reset_parameters()`."""
    # Importing Transformers takes seconds, and a model of it has imported it already.
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        _add(model, model, (), None)
    else:
        for child in model.children():
            add_reset_parameters(child)


def _add(model: nn.Module, module: nn.Module, around: Chain, initialize: Any) -> None:
    initialize = getattr(module, "_init_weights", initialize)
    chain: Chain = ((module, initialize), *around)
    if any(True for _ in _own_tensors(module)):
        module.reset_parameters = partial(_reset, model, chain)  # pyright: ignore[reportArgumentType]
    for child in module.children():
        _add(model, child, chain, initialize)


def _reset(model: nn.Module, chain: Chain) -> None:
    """Initialize the first module of `chain`: with its own `_init_weights`, then those of the modules around it."""
    # Its buffers are filled with NaN, or the least integer, before. So a buffer that gets no values is found.
    from transformers import initialization

    module = chain[0][0]
    buffers = {
        n: b for n, b in module.named_buffers(recurse=False) if b.device.type != "meta" and b.dtype != torch.bool
    }
    for buffer in buffers.values():
        buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min)
    # Transformers marks tensors that a file has given values, and its init functions leave these as they are.
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
