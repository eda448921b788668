"""Optimizer states by the names of their parameters, so that they fit an optimizer that lists these in another order.

    groups    per group: the names of its parameters, and its options (lr, betas, …)
    states    per parameter: the states of the same shape (exp_avg), and the others (step)

PyTorch's `get_optimizer_state_dict` steps an optimizer without states once, with lr = 0. Here nothing is stepped:
states are created from their shapes, on the parameters' shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from towpath.checkpoint.manifest import Manifest, from_json, tensors_in, to_json
from towpath.checkpoint.rank_contents import NamedTensors
from towpath.checkpoint.safe_files import DamagedError, shown
from towpath.engine.optimizer_hooks import adopt
from towpath.engine.parameters.matrix_steps import not_savable
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import CheckpointError
from towpath.optim import OwnerSteppedOptimizer, members_of, owner_stepped_members

_NUMBERS = ("step", "mu_product", "eta", "mu")  # one number, even if the parameter is one number too
_HOW = ("foreach", "fused", "capturable", "differentiable")  # how to step, which the new optimizer decides


def collect(
    optimizer: Optimizer, model: NamedTensors
) -> tuple[dict[str, torch.Tensor], dict[str, ShardTensor], dict[str, Any]]:
    """Return what this rank has of the optimizer's states.

    These are its tensors by name, the parameters of those that it has as the owner, and as JSON everything else.
    """
    adopt(optimizer)
    tensors: dict[str, torch.Tensor] = {}
    owned: dict[str, ShardTensor] = {}
    names = model.names
    groups: list[dict[str, Any]] = []
    states: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        options = {k: v for k, v in group.items() if k != "params"}
        mine = [name_of(names, p, number) for p in group["params"]]
        groups.append({"names": mine, "options": to_json(options, f"optimizer.(group {number})", tensors)})
        for name, parameter in zip(mine, group["params"], strict=True):
            if parameter not in optimizer.state:
                continue
            of_one: dict[str, torch.Tensor] = {}
            states[name] = _state(name, parameter, optimizer.state[parameter], of_one, owns(optimizer, parameter))
            tensors.update(of_one)
            if isinstance(parameter, ShardTensor) and owns(optimizer, parameter):
                owned.update(dict.fromkeys(of_one, parameter))
    return tensors, owned, {"kind": kind_of(optimizer), "groups": groups, "states": states}


def kind_of(optimizer: Optimizer) -> str:
    """Return the names of the classes that the states belong to."""
    kinds = (
        each.kind if isinstance(each, OwnerSteppedOptimizer) else type(each).__name__ for each in members_of(optimizer)
    )
    return " + ".join(kinds)


def owns(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether this rank, and no other of its replica, has the full states of the parameter."""
    return any(each.owns(parameter) for each in owner_stepped_members(optimizer))


def is_spread(optimizer: Optimizer) -> bool:
    """Return whether ranks have the states of different parameters."""
    return any(part.is_spread for each in owner_stepped_members(optimizer) for part in each.parts)


def merged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the values of ranks that have different parameters. Groups with the same options become one."""
    kinds = sorted({each["kind"] for each in found})
    if len(kinds) > 1:
        raise CheckpointError(f"ranks have optimizers of different kinds: {', '.join(kinds)}.")
    groups: list[dict[str, Any]] = []
    for group in (group for each in found for group in each["groups"]):
        same = next((g for g in groups if g["options"] == group["options"]), None)
        if same is None:
            groups.append({"names": list(group["names"]), "options": group["options"]})
        else:
            same["names"] += [name for name in group["names"] if name not in same["names"]]
    states = {name: state for each in found for name, state in each["states"].items()}
    return {"kind": kinds[0], "groups": groups, "states": states}


def name_of(names: dict[int, str], parameter: torch.Tensor, group: int) -> str:
    """Return the name of an optimizer's parameter, or raise CheckpointError if it is not the model's."""
    if id(parameter) not in names:
        raise CheckpointError(
            f"group {group} of the optimizer has one of shape {tuple(parameter.shape)} that is not the model's: "
            "pass the optimizer of this model."
        )
    return names[id(parameter)]


def _state(
    name: str, parameter: nn.Parameter, state: dict[str, Any], tensors: dict[str, torch.Tensor], full: bool
) -> dict[str, Any]:
    """Add the tensors of a parameter's states to `tensors`, and return the rest. `full`: this rank owns them."""
    for key, value in state.items():
        if full and is_traceable_wrapper_subclass(value):
            raise not_savable(f"{name}.{key}", type(value).__name__)
    like = [key for key, value in state.items() if is_like(key, value, parameter)]
    if isinstance(parameter, ShardTensor) and not full:  # a state of the parameter's shape is sharded like it
        like = [key for key in like if isinstance(state[key], ShardTensor)]
    tensors.update({f"optimizer.{name}.{key}": state[key] for key in like})
    rest = {key: value for key, value in state.items() if key not in like}
    return {"like": like, "rest": to_json(rest, f"optimizer.{name}", tensors)}


def is_like(key: str, value: Any, parameter: nn.Parameter) -> bool:
    """Return whether a state has one element for each element of the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key not in _NUMBERS


class OptimizerRestore:
    """The states of a checkpoint for an optimizer. Fill its `targets`, then the `untied` copies, then call `finish`.

    `names` are those of the parameters in the checkpoint, by identity.
    """

    def __init__(self, optimizer: Optimizer, manifest: Manifest, names: Mapping[int, str]) -> None:
        adopt(optimizer)
        self._optimizer, self._manifest, self._names = optimizer, manifest, names
        self._saved: dict[str, Any] = manifest.values["optimizer"]
        if self._saved["kind"] != kind_of(optimizer):
            raise CheckpointError(
                f"the checkpoint has the states of {self._saved['kind']}, and the optimizer is "
                f"{kind_of(optimizer)}. Make the optimizer that was saved (towpath train: train.optimizer), or load "
                "without one."
            )
        groups = (group for each in owner_stepped_members(optimizer) for group in each.param_groups)
        self._owner_stepped = {id(p) for group in groups for p in group["params"]}
        self.targets: dict[str, torch.Tensor] = {}
        # States of parameters that are tied in the checkpoint, and not in this model, with the targets to copy.
        self.untied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._like: dict[nn.Parameter, dict[str, torch.Tensor]] = defaultdict(dict)
        for group, parameter, saved in self._parameters():
            for key in saved["like"]:
                self._add_like(parameter, key)
            for path in tensors_in(saved["rest"]):
                on_device = group.get("fused") or group.get("capturable")
                self.targets[path] = manifest.tensor(path).empty(parameter.device if on_device else "cpu")
        for saved in self._saved["groups"]:
            for path in tensors_in(saved["options"]):
                self.targets[path] = manifest.tensor(path).empty()

    def _parameters(self) -> Iterator[tuple[dict[str, Any], nn.Parameter, dict[str, Any]]]:
        """Yield the parameters whose states this rank restores, with their group and what is saved of them."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                saved = self._saved["states"].get(self._names[id(parameter)])
                is_here = id(parameter) not in self._owner_stepped or owns(self._optimizer, parameter)
                if saved is not None and is_here:
                    yield group, parameter, saved

    def _add_like(self, parameter: nn.Parameter, key: str) -> None:
        path = f"optimizer.{self._names[id(parameter)]}.{key}"
        dtype = self._manifest.tensor(path).dtype
        state = self._optimizer.state[parameter].get(key) if parameter in self._optimizer.state else None
        if not isinstance(state, torch.Tensor) or state.dtype != dtype:
            if owns(self._optimizer, parameter):
                state = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
            else:
                state = torch.empty_like(parameter.detach(), dtype=dtype)
        self._like[parameter][key] = state
        if path in self.targets:
            self.untied.append((state, self.targets[path]))
        else:
            self.targets[path] = state

    def finish(self, targets: dict[str, torch.Tensor]) -> list[str]:
        """Give the optimizer its states and its groups their options. Return notes for the user."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._optimizer.state.pop(parameter, None)
        for _, parameter, saved in self._parameters():
            rest = from_json(saved["rest"], targets.__getitem__)
            self._optimizer.state[parameter] = {**rest, **self._like[parameter]}
        return [note for number in range(len(self._optimizer.param_groups)) for note in self._options(number, targets)]

    def _options(self, number: int, targets: dict[str, torch.Tensor]) -> Iterator[str]:
        """Set the options on which the saved groups of all parameters of a group agree. Yield notes on the others."""
        group = self._optimizer.param_groups[number]
        homes = {name: saved["options"] for saved in self._saved["groups"] for name in saved["names"]}
        sources = [homes[n] for n in (self._names[id(p)] for p in group["params"]) if n in homes]
        for key in dict.fromkeys(key for source in sources for key in source if key not in _HOW):
            if any(source.get(key) != sources[0].get(key) for source in sources):
                yield (
                    f"{key} of the optimizer's group {number} stays {group.get(key)}: its parameters were in groups "
                    "that differ in it"
                )
                continue
            value, here = from_json(sources[0][key], targets.__getitem__), group.get(key)
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if not _is_option_like(value, here):
                raise DamagedError(
                    f"{key} of the optimizer's group is {shown(value)} in the checkpoint, and {shown(here)} here."
                )
            if isinstance(here, torch.Tensor):
                here.copy_(torch.as_tensor(value))
            else:
                group[key] = value


def _is_option_like(value: Any, here: Any) -> bool:
    """Return whether `value` can replace the option `here`: a number replaces a number, and None fits anything."""
    if here is None or value is None:
        return True
    if isinstance(here, torch.Tensor):
        return _is_number(value) if here.numel() == 1 else isinstance(value, torch.Tensor) and value.shape == here.shape
    if isinstance(here, tuple):  # such as betas
        fits = isinstance(value, tuple) and len(value) == len(here)
        return fits and all(map(_is_option_like, value, here))
    return _is_number(value) if _is_number(here) else isinstance(value, type(here))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
