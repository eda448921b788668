"""Changing a module's class after it was made: mixins, and modules that compute in their own dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn


def add_mixin(module: nn.Module, role: type[Any]) -> None:
    """Add `role` to the module's class. The class keeps its name, because libraries look at it."""
    module.__class__ = _with_role(type(module), role)


@cache
def _with_role(cls: type[nn.Module], role: type[Any]) -> type[Any]:
    """Return the subclass of `role` and `cls`, which is made once."""
    # torch.compile makes a graph for each class, and gives up after eight. So all blocks of a model share one class.
    return type(cls.__name__, (role, cls), {"__module__": cls.__module__})


def keep_dtype(module: nn.Module) -> None:
    """Let a module compute in its own dtype. Inputs are cast to it, and outputs are cast back."""
    own = next((t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()), torch.float32)
    add_mixin(module, OwnDtypeModule)
    # Past nn.Module.__setattr__, which a user's class may override.
    object.__setattr__(module, "towpath_dtype", own)


class OwnDtypeModule(nn.Module):
    """A module that `Precision(keep=)` names. It computes in `towpath_dtype`."""

    towpath_dtype: torch.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        met: list[torch.dtype] = []  # of the inputs; the outputs get the first one

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            met.append(tensor.dtype)
            return tensor.to(self.towpath_dtype)

        args, kwargs = _of_floating(enter, args), _of_floating(enter, kwargs)
        output = super().__call__(*args, **kwargs)
        return _of_floating(lambda tensor: tensor.to(met[0]), output) if met else output


def _of_floating(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return `value`, which may be nested tuples, lists and dicts, with `change` applied to its floating tensors."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_of_floating(change, item) for item in value)
    if type(value) is dict:
        return {key: _of_floating(change, item) for key, item in value.items()}
    return value
