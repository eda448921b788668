"""Values for a model that was built on the meta device: one bucket at a time, so that no rank ever holds it whole."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from towpath.engine.layout import ParameterPlace
from towpath.engine.parallel import local_part, parallel_of
from towpath.errors import ShardError


@contextmanager
def materialised(places: Iterable[ParameterPlace], device: torch.device) -> Generator[None]:
    """Inside, the parameters of `places` that have no values yet have those that their modules give them."""
    absent = [p for p in places if p.parameter.device.type == "meta"]
    owners = {id(p.owners[0][0]): p.owners[0][0] for p in absent}
    # A module initialises all its parameters at once: those that are another bucket's go to memory that is dropped.
    before = [(module, dict(_parameters(module))) for p in absent for module, _ in p.owners]
    for module in owners.values():
        for attribute, parameter in _parameters(module).items():
            if parameter is not None:
                _parameters(module)[attribute] = _empty(parameter, device)
    for place in absent:
        values = _empty(place.parameter, device)
        for module, attribute in place.owners:
            _parameters(module)[attribute] = values
    try:
        for place in absent:
            module, attribute = place.owners[0]
            if owners.pop(id(module), None) is not None:
                _initialiser(module, f"parameter {attribute!r}", place.names[0])()
        yield
    finally:
        for module, parameters in before:
            _parameters(module).update(parameters)


def _empty(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    values = torch.empty(local_part(parameter).shape, dtype=parameter.dtype, device=device)
    parallel = parallel_of(parameter)
    return nn.Parameter(values if parallel is None else parallel.wrap(values), parameter.requires_grad)


def _parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return module._parameters  # pyright: ignore[reportPrivateUsage]


def materialise_buffers(model: nn.Module, device: torch.device) -> None:
    """Give values to the buffers that have none, as their modules' initialisation does."""
    for path, module in model.named_modules():
        absent = [name for name, b in module.named_buffers(recurse=False) if b.device.type == "meta"]
        for name in absent:
            setattr(module, name, torch.empty_like(module.get_buffer(name), device=device))
        if absent:
            _initialiser(module, f"buffer {absent[0]!r}", f"{path}.{absent[0]}")()


def _initialiser(module: nn.Module, what: str, name: str) -> Callable[[], Any]:
    for method in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, method):
            return getattr(module, method)
    raise ShardError(
        f"{name} is on the meta device, and {type(module).__name__} has no reset_parameters() that would give its "
        f"{what} values. Add the method, or build the model on a real device."
    )
