"""Values for a model that was built on the meta device: one bucket at a time, so that no rank ever holds it whole."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from towpath.engine.layout import ParameterPlace
from towpath.errors import ShardError


@contextmanager
def materialised(places: Iterable[ParameterPlace], device: torch.device) -> Generator[None]:
    """Inside, the parameters of `places` that have no values yet have those that their modules give them."""
    absent = [p for p in places if p.parameter.device.type == "meta"]
    for place in absent:
        values = nn.Parameter(torch.empty_like(place.parameter, device=device), place.parameter.requires_grad)
        _assign(place, values)
    for place in absent:
        for module, attribute in place.owners[:1]:
            _initialiser(module, f"parameter {attribute!r}", place.names[0])()
    try:
        yield
    finally:
        for place in absent:
            _assign(place, place.parameter)


def materialise_buffers(model: nn.Module, device: torch.device) -> None:
    """Give values to the buffers that have none, as their modules' initialisation does."""
    for path, module in model.named_modules():
        absent = [name for name, b in module.named_buffers(recurse=False) if b.device.type == "meta"]
        for name in absent:
            setattr(module, name, torch.empty_like(module.get_buffer(name), device=device))
        if absent:
            _initialiser(module, f"buffer {absent[0]!r}", f"{path}.{absent[0]}")()


def _assign(place: ParameterPlace, parameter: nn.Parameter) -> None:
    for module, attribute in place.owners:
        module._parameters[attribute] = parameter  # pyright: ignore[reportPrivateUsage]


def _initialiser(module: nn.Module, what: str, name: str) -> Callable[[], Any]:
    for method in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, method):
            return getattr(module, method)
    raise ShardError(
        f"{name} is on the meta device, and {type(module).__name__} has no reset_parameters() that would give its "
        f"{what} values. Add the method, or build the model on a real device."
    )
