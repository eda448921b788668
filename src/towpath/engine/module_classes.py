"""What is added to a module's class."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn


def become(module: nn.Module, role: type[Any]) -> None:
    """Add `role` to the module's class, which keeps its name: libraries look at it."""
    module.__class__ = _with_role(type(module), role)


@cache
def _with_role(cls: type[nn.Module], role: type[Any]) -> type[Any]:
    """One class for all blocks of a model: torch.compile makes a graph for each class, and gives up after eight."""
    return type(cls.__name__, (role, cls), {"__module__": cls.__module__})


def keep_dtype(module: nn.Module) -> None:
    """Let a module compute in its own dtype, whatever the dtype of its inputs; its outputs are of theirs."""
    own = next((t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()), torch.float32)
    become(module, ExactModule)
    object.__setattr__(module, "towpath_dtype", own)


class ExactModule(nn.Module):
    """What a module becomes that Precision(keep=) names."""

    towpath_dtype: torch.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        met: list[torch.dtype] = []

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            met.append(tensor.dtype)
            return tensor.to(self.towpath_dtype)

        args, kwargs = _of_floating(enter, args), _of_floating(enter, kwargs)
        output = super().__call__(*args, **kwargs)
        return _of_floating(lambda tensor: tensor.to(met[0]), output) if met else output


def _of_floating(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value`, a tensor or tuples, lists and dicts of them, with its floating tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_of_floating(change, item) for item in value)
    if type(value) is dict:
        return {key: _of_floating(change, item) for key, item in value.items()}
    return value
