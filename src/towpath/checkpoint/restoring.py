"""Restore a state from the tensors and values of a checkpoint, under any strategy and on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from towpath.checkpoint.local_state import seed_anew, set_rng_state
from towpath.checkpoint.manifest import Manifest, decode_value, tensors_in
from towpath.checkpoint.safe_files import DamagedError, shown
from towpath.checkpoint.state import RESERVED, State, kind_of, owns
from towpath.core.formats import dtype_name, shape_text
from towpath.engine.optimizer_steps import adopt
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import CheckpointError, TowpathError
from towpath.optim import owner_stepped_members
from towpath.outer.saved import VALUE, island_manifest, islands_of, restore_islands
from towpath.topology.cluster import counted
from towpath.topology.together import described

_NAMED_DIFFERENCES = 4
_HOW = ("foreach", "fused", "capturable", "differentiable")  # how to step, which the new optimizer decides


class Restore:
    """A checkpoint that is loaded into a `State`, under any layout. Fill its `targets`, call `check`, then `finish`.

    Attributes:
        manifest: The checkpoint as this rank reads it. Under another number of islands, it is read as if it had none.
        targets: The tensors to fill, by their names in the manifest.
        notes: What was not loaded, and what could not be restored exactly.

    Raises:
        CheckpointError: The checkpoint is of another model.
    """

    def __init__(self, state: State, manifest: Manifest) -> None:
        islands, peers = state.local.islands, len(state.local.peers)
        # How many ranks an island has, how many islands there are, and how many ranks compute the same batch.
        self._ranks = state.local.groups.world, 1 if islands is None else islands.islands, peers
        same = islands is not None and islands_of(manifest) == islands.islands
        self.manifest = manifest = island_manifest(manifest, islands.island if islands is not None and same else None)
        self._saved_ranks = manifest.world, islands_of(manifest), manifest.values.get("rng", {}).get("peers", peers)
        self._state, self._model = state, state.named()
        self.targets: dict[str, torch.Tensor] = {}
        self.notes: list[str] = []
        # Tensors, each with the target that it is copied from: parameters that are stored encoded, and parameters and
        # states that are tied in the checkpoint, and not in this model.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # What is to be done once the targets are filled. Some return notes.
        self._finish: list[Callable[[], Iterable[str] | None]] = []
        self._names = self._model.names_in(manifest, state.local.held or self._model.all())
        self._check_model()
        stored = {id(parameter): self._names[name] for name, parameter in self._model.parameters.items()}
        self._add_optimizer(stored)  # first, because it may refuse: nothing has changed yet
        if islands is not None:
            islands.outer.wait()  # it would overwrite what is loaded
        self._add_model()
        self._add_codecs()
        if islands is not None:
            self._finish.append(restore_islands(islands, manifest, stored, self.targets))
        elif VALUE in manifest.values:
            self.notes.append(
                f"the checkpoint is of {islands_of(manifest)} islands: their slow weights were loaded, and the "
                "optimizer's states of island 0"
            )
        random = f"rank.{state.island_rank}.rng."
        new = [name for name in manifest.tensors if name.startswith(random) and self._ranks == self._saved_ranks]
        for extra in state.extras:
            new += tensors_in(manifest.values.get(extra))
        for name in new:
            self.targets[name] = manifest.tensor(name).empty()
        self._finish += [self._finish_extras, self._finish_random]
        for name, target in self.targets.items():
            _check_target(manifest, name, target)

    def _add_optimizer(self, stored: Mapping[int, str]) -> None:
        optimizer, saved = self._state.optimizer, self.manifest.values.get("optimizer")
        if optimizer is not None and saved is not None:
            self._finish.append(restore_optimizer(optimizer, self.manifest, stored, self.targets, self._copies))
        elif optimizer is not None:
            self.notes.append("the checkpoint has no optimizer: the states of this one are as they were")
        elif saved is not None:
            kind = saved["kind"]
            self.notes.append(f"the states of {kind} in the checkpoint were not loaded: this State has no optimizer")

    def _check_model(self) -> None:
        """Raise CheckpointError if the checkpoint is of another model."""
        held = {name: tensor.shape for name, tensor in self.manifest.model.items()}
        found: list[str] = []
        for name, tensor in self._model.all().items():
            here, there = tuple(tensor.shape), held.get(self._names[name])
            if there is None:
                found.append(f"{name} {shape_text(here)} is not in it")
            elif there != here:
                found.append(f"{name} is {shape_text(there)} in it and {shape_text(here)} in the model")
        known = {*self._names.values(), *self._model.aliases}
        found += [f"it has {name} {shape_text(held[name])}, the model has not" for name in held if name not in known]
        if found:
            more = f"; and {len(found) - _NAMED_DIFFERENCES} more" if len(found) > _NAMED_DIFFERENCES else ""
            advice = "Build the model that was saved, or load another checkpoint."
            if any(exported != name and exported in held for name, exported in self._state.names.items()):
                advice = (
                    "It has the names that an export gives to this model, as Hugging Face does. Start from the "
                    "safetensors themselves, without an import (towpath train: model.weights)."
                )
            raise CheckpointError(
                f"the checkpoint is of another model: {'; '.join(found[:_NAMED_DIFFERENCES])}{more}. {advice}"
            )

    def _add_model(self) -> None:
        held = self.manifest.model
        rounded: set[str] = set()
        for name, tensor in self._model.all().items():
            first = self._names[name]
            key, own = f"model.{first}", f"rank.{self._state.island_rank}.buffer.{first}"
            if own in self.manifest.tensors and self._ranks == self._saved_ranks:
                key = own
            if key in self.targets:
                self._copies.append((tensor, self.targets[key]))
                self.notes.append(f"{name} and {first} were one parameter in the checkpoint, and are two in this model")
                continue
            self.targets[key] = tensor.detach()
            if isinstance(tensor, ShardTensor) and tensor.rests_in is not None:
                self.targets[key] = torch.empty_like(tensor.detach())
                self._copies.append((tensor, self.targets[key]))
            here, there = (dtype_name(dtype) for dtype in (tensor.dtype, held[first].dtype))
            if there != here:
                rounded.add(f"saved as {there}, loaded as {here}")
        for alias, first in self._model.aliases.items():
            both = alias in held and first in held  # tied in this model, and not in the checkpoint
            if both and first in self._model.parameters:
                self.targets[f"model.{alias}"] = torch.empty_like(self._model.parameters[first].detach())
        self.notes += [f"parameters were {what}" for what in sorted(rounded)]

    def _add_codecs(self) -> None:
        local, manifest, saved = self._state.local, self.manifest, self.manifest.values.get("engine")
        local.go_to(saved["step"] if saved is not None else manifest.step)
        prefix = f"rank.{self._state.island_rank}.codec."
        kept = {n.removeprefix(prefix) for n in manifest.tensors if n.startswith(prefix)}
        same = saved is not None and self._ranks == self._saved_ranks and saved["fingerprint"] == local.fingerprint
        if same and kept == set(local.codec_states()):
            self.targets.update({f"{prefix}{name}": tensor for name, tensor in local.codec_states().items()})
            self._finish.append(lambda: local.load_codec_states(self._filled(prefix)))
            return
        local.reset_codec_states()
        carried = any(".codec." in name and name.startswith("rank.") for name in manifest.tensors)
        if local.engines and carried:
            self.notes.append(
                "codec feedback starts at zero: the checkpoint's is of another strategy or compression, of other units "
                "or of another number of nodes or ranks. To carry it over, resume with those of the checkpoint"
            )

    def check(self) -> None:
        """Raise CheckpointError if parameters that are tied in the model differ in the filled targets."""
        for alias, first in self._model.aliases.items():
            if (twin := self.targets.get(f"model.{alias}")) is None:
                continue
            here, there = (
                t.to_local() if isinstance(t, ShardTensor) else t for t in (self.targets[f"model.{first}"], twin)
            )
            if not torch.equal(here, there):
                raise CheckpointError(
                    f"{alias} and {first} are one parameter in the model, and differ in the checkpoint. Build the "
                    "model that was saved, with the two untied."
                )

    def finish(self) -> list[str]:
        """Restore everything that is not a tensor in use. Return notes for the user."""
        with torch.no_grad():
            for tensor, source in self._copies:
                if isinstance(source, ShardTensor) and not (
                    isinstance(tensor, ShardTensor) and tensor.shard_spec is source.shard_spec
                ):
                    source = source.full_tensor()  # the shards of two parameters need not match element by element
                tensor.copy_(source)
        for finish in self._finish:
            self.notes += finish() or ()
        return self.notes

    def _finish_extras(self) -> Iterator[str]:
        extras, values = self._state.extras, self.manifest.values
        known = {*extras, *RESERVED, "config", "names", VALUE}
        for name in (name for name in values if name not in known):
            yield f"{name!r} in the checkpoint was not loaded: this State has no such extra"
        for name, extra in extras.items():
            if name not in values:
                yield f"the checkpoint has no {name!r}: it starts afresh"
                continue
            try:
                extra.load_state_dict(decode_value(values[name], self.targets.__getitem__))
            except TowpathError:
                raise
            except Exception as error:
                raise CheckpointError(
                    f"{name!r} ({type(extra).__name__}) does not take its state ({described(error)}). Make the object "
                    "that was saved, or load without it."
                ) from error

    def _finish_random(self) -> Iterator[str]:
        rng = self.manifest.values.get("rng")
        if saved := self._filled(f"rank.{self._state.island_rank}.rng."):
            set_rng_state(saved)
        elif rng is not None:
            seed_anew(rng["seed"], self.manifest.step, self._state.local.peers)
            yield (
                f"random numbers begin anew, from the saved seed: the checkpoint is of {_ranks(*self._saved_ranks)}, "
                f"and this job of {_ranks(*self._ranks)}"
            )

    def _filled(self, prefix: str) -> dict[str, torch.Tensor]:
        return {n.removeprefix(prefix): t for n, t in self.targets.items() if n.startswith(prefix)}


def _ranks(of_an_island: int, islands: int, peers: int) -> str:
    layout = f" in {islands} islands" if islands > 1 else f" of which {peers} share each layer" if peers > 1 else ""
    return counted(of_an_island * islands, "rank") + layout


def _check_target(manifest: Manifest, name: str, target: torch.Tensor) -> None:
    """Raise CheckpointError unless the checkpoint has a tensor of the target's shape that its dtype can represent."""
    stored = manifest.tensor(name)
    if stored.shape != tuple(target.shape):
        raise DamagedError(f"{name} is {shape_text(stored.shape)} in it; expected {shape_text(tuple(target.shape))}.")
    if not torch.can_cast(stored.dtype, target.dtype):
        here, there = dtype_name(target.dtype), dtype_name(stored.dtype)
        raise CheckpointError(f"{name} is {there} in the checkpoint, which cannot be cast to {here}.")


def restore_optimizer(
    optimizer: Optimizer,
    manifest: Manifest,
    names: Mapping[int, str],
    targets: dict[str, torch.Tensor],
    copies: list[tuple[torch.Tensor, torch.Tensor]],
) -> Callable[[], Iterable[str]]:
    """Add the states of a checkpoint to `targets`. Return a function that gives them to the optimizer once filled.

    `names` are those of the parameters in the checkpoint, by identity. The states of parameters that are tied in it,
    and not in this model, are added to `copies`.
    """
    adopt(optimizer)
    saved: dict[str, Any] = manifest.values["optimizer"]
    if saved["kind"] != kind_of(optimizer):
        raise CheckpointError(
            f"the checkpoint has the states of {saved['kind']}, and the optimizer is {kind_of(optimizer)}. Make the "
            "optimizer that was saved (towpath train: train.optimizer), or load without one."
        )
    owner_stepped = {
        id(p) for each in owner_stepped_members(optimizer) for group in each.param_groups for p in group["params"]
    }
    like: dict[nn.Parameter, dict[str, torch.Tensor]] = {}  # by the parameters whose states this rank restores
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name not in saved["states"] or (id(parameter) in owner_stepped and not owns(optimizer, parameter)):
                continue
            like[parameter] = {}
            for key in saved["states"][name]["like"]:
                path = f"optimizer.{name}.{key}"
                state = like[parameter][key] = _state_like(optimizer, parameter, key, manifest.tensor(path).dtype)
                if path in targets:
                    copies.append((state, targets[path]))
                else:
                    targets[path] = state
            on_device = group.get("fused") or group.get("capturable")
            for path in tensors_in(saved["states"][name]["rest"]):
                targets[path] = manifest.tensor(path).empty(parameter.device if on_device else "cpu")
    for path in tensors_in([group["options"] for group in saved["groups"]]):
        targets[path] = manifest.tensor(path).empty()

    options: dict[str, dict[str, Any]] = {n: group["options"] for group in saved["groups"] for n in group["names"]}

    def finish() -> Iterator[str]:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
                if parameter in like:
                    rest = saved["states"][names[id(parameter)]]["rest"]
                    optimizer.state[parameter] = {**decode_value(rest, targets.__getitem__), **like[parameter]}
            mine = (names[id(parameter)] for parameter in group["params"])
            sources = [options[name] for name in mine if name in options]
            yield from _restore_options(number, group, sources, targets)

    return finish


def _state_like(optimizer: Optimizer, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the state of the parameter's shape to fill: the optimizer's own, or a new one.

    PyTorch's `get_optimizer_state_dict` would step an optimizer without states once, with lr = 0, to find them out.
    """
    state = optimizer.state[parameter].get(key) if parameter in optimizer.state else None
    if isinstance(state, torch.Tensor) and state.dtype == dtype:
        return state
    if owns(optimizer, parameter):
        return torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
    return torch.empty_like(parameter.detach(), dtype=dtype)


def _restore_options(
    number: int, group: dict[str, Any], sources: Sequence[dict[str, Any]], targets: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Set the options on which the saved groups of all parameters of a group agree. Yield notes on the others."""
    for key in dict.fromkeys(key for source in sources for key in source if key not in _HOW):
        if any(source.get(key) != sources[0].get(key) for source in sources):
            yield (
                f"{key} of the optimizer's group {number} stays {group.get(key)}: its parameters were in groups "
                "that differ in it"
            )
            continue
        value, here = decode_value(sources[0][key], targets.__getitem__), group.get(key)
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
