"""The names of a model's tensors in a checkpoint: those of the model as it was built, whatever has wrapped it since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from towpath.checkpoint.disk.manifest import Manifest
from towpath.errors import CheckpointError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and of activation checkpointing


@dataclass(frozen=True, slots=True)
class Named:
    """`aliases`: the other names of tied parameters, and the first name of each. Only persistent buffers."""

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]

    def of(self, parameter: torch.Tensor) -> str | None:
        return next((name for name, p in self.parameters.items() if p is parameter), None)


def named(model: nn.Module) -> Named:
    parameters, aliases = parameters_of(model)
    return Named(parameters, dict(_buffers(model)), aliases)


def parameters_of(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """By their first names; and the other names of tied ones."""
    first: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    aliases: dict[str, str] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        name = _as_built(raw)
        if id(parameter) in first:
            if first[id(parameter)] != name:
                aliases[name] = first[id(parameter)]
            continue
        first[id(parameter)] = name
        parameters[name] = parameter
    return parameters, aliases


def _buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"{path or 'the model'} ({type(module).__name__}) has get_extra_state(), which no checkpoint holds: "
                "pass what it keeps as an extra of the State."
            )
        transient = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        for name, buffer in module.named_buffers(recurse=False):
            if name not in transient:
                found.setdefault(id(buffer), (_as_built(f"{path}.{name}" if path else name), buffer))
    return list(found.values())


def _as_built(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def aliases_in(manifest: Manifest) -> dict[str, str]:
    return cast(dict[str, Any], manifest.values.get("model", {"aliases": {}}))["aliases"]


def name_in(name: str, held: Mapping[str, Any] | set[str], model: Named, aliases: Mapping[str, str]) -> str:
    """Under which name the checkpoint has the tensor that the model calls `name`."""
    if name in held:
        return name
    others = [alias for alias, first in model.aliases.items() if first == name]
    known = [aliases.get(n, n) for n in (name, *others)]
    return next((n for n in known if n in held), name)


def shape_text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
