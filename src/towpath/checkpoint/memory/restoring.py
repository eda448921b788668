"""A checkpoint on its way into what a State holds: tensors by their names, whatever layout wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from towpath.checkpoint.disk.files import TORCH_DTYPES, empty
from towpath.checkpoint.disk.manifest import Manifest
from towpath.checkpoint.disk.plain import from_json, tensors_in
from towpath.checkpoint.disk.safe_open import DamagedError
from towpath.checkpoint.memory import optimizer as optimizers
from towpath.checkpoint.memory.names import Named, aliases_in, name_in, shape_text
from towpath.checkpoint.memory.rng import check_rng_shapes, seed_anew, set_rng_state
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import CheckpointError, TowpathError

if TYPE_CHECKING:
    from towpath.checkpoint.memory.state import HasState, State


class Restoring:
    """One checkpoint on its way into a state: `targets` are to be filled first, then `finish()`."""

    def __init__(self, state: State, manifest: Manifest, model: Named) -> None:
        self._state, self._manifest, self._model = state, manifest, model
        self._carries = False
        self.targets: dict[str, torch.Tensor] = {}
        self.notes: list[str] = []
        self._twins: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._resting: list[tuple[torch.Tensor, torch.Tensor]] = []  # what rests encoded, and what is read in its place
        self._same_world = manifest.world == state.world
        self._loading = (
            optimizers.Loading(state.optimizer, model, manifest)
            if state.optimizer is not None and "optimizer" in manifest.values
            else None
        )
        self._take_model()
        self._take_engine()
        if self._loading is not None:
            self.targets.update(self._loading.targets)
        if self._same_world:
            self._take_rng(f"rank.{state.rank}.rng.")
        for name in state.extras:
            for path in tensors_in(manifest.values.get(name)):
                self._take_fresh(path)
        self._check_targets()

    def _take_model(self) -> None:
        aliases = aliases_in(self._manifest)
        held = {n.removeprefix("model.") for n in self._manifest.tensors if n.startswith("model.")}
        rounded: set[str] = set()
        for name, tensor in (*self._model.parameters.items(), *self._model.buffers.items()):
            key = f"model.{name_in(name, held, self._model, aliases)}"
            if key in self.targets:  # tied in the checkpoint, and not in this model
                self._twins.append((name, tensor, self.targets[key]))
                continue
            self.targets[key] = tensor.detach()
            if isinstance(tensor, ShardTensor) and tensor.rests_in is not None:
                self.targets[key] = torch.empty_like(tensor.detach())
                self._resting.append((tensor, self.targets[key]))
            here, there = str(tensor.dtype).removeprefix("torch."), self._manifest.tensors[key].dtype
            if TORCH_DTYPES[there] != tensor.dtype:
                rounded.add(f"saved as {there}, loaded as {here}")
        for alias, first in self._model.aliases.items():
            both = alias in held and first in held  # tied in this model, and not in the checkpoint
            if both and first in self._model.parameters:
                twin = torch.empty_like(self._model.parameters[first].detach())
                self.targets[f"model.{alias}"] = twin
        self.notes += [f"parameters were {what}" for what in sorted(rounded)]

    def _take_engine(self) -> None:
        parts, saved = self._state.parts, self._manifest.values.get("engine")
        for engine in parts.engines:
            engine.go_to(saved["step"] if saved is not None else self._manifest.step)
        prefix = f"rank.{self._state.rank}.codec."
        kept = {n.removeprefix(prefix) for n in self._manifest.tensors if n.startswith(prefix)}
        same = saved is not None and self._same_world and saved["fingerprint"] == parts.fingerprint
        if same and kept == set(parts.state()):
            self._carries = True
            self.targets.update({f"{prefix}{name}": tensor for name, tensor in parts.state().items()})
            return
        parts.restart()
        carried = any(".codec." in name and name.startswith("rank.") for name in self._manifest.tensors)
        if parts.engines and carried:
            self.notes.append("codec feedback starts at zero: what was carried belongs to another strategy or cluster")

    def _take_rng(self, prefix: str) -> None:
        found = {n.removeprefix(prefix): t for n, t in self._manifest.tensors.items() if n.startswith(prefix)}
        if found:
            check_rng_shapes({name: (stored.dtype, stored.shape) for name, stored in found.items()})
        for name in found:
            self._take_fresh(f"{prefix}{name}")

    def _take_fresh(self, path: str) -> None:
        stored = self._manifest.tensors[path]
        self.targets[path] = empty(stored.shape, TORCH_DTYPES[stored.dtype], path)

    def _check_targets(self) -> None:
        """Each tensor is there, of its target's shape, and its dtype can be cast without losing what it is."""
        for name, target in self.targets.items():
            stored = self._manifest.tensors.get(name)
            if stored is None:
                raise DamagedError(f"{name} is missing, which other parts of the checkpoint name.")
            if stored.shape != tuple(target.shape):
                raise DamagedError(
                    f"{name} is {shape_text(stored.shape)} in it; expected {shape_text(tuple(target.shape))}."
                )
            if not torch.can_cast(TORCH_DTYPES[stored.dtype], target.dtype):
                here = str(target.dtype).removeprefix("torch.")
                raise CheckpointError(f"{name} is {stored.dtype} in the checkpoint, which cannot be cast to {here}.")

    def check(self) -> None:
        """After the targets were filled: refuse what is two things in the checkpoint and one in the model."""
        with torch.no_grad():
            for tensor, values in self._resting:
                tensor.copy_(values)
        for alias, first in self._model.aliases.items():
            twin = self.targets.get(f"model.{alias}")
            if twin is None:
                continue
            here, there = (
                t.to_local() if isinstance(t, ShardTensor) else t for t in (self._model.parameters[first], twin)
            )
            if not torch.equal(here, there):
                raise CheckpointError(
                    f"{alias} and {first} are one parameter in the model, and differ in the checkpoint. Build the "
                    "model that was saved, with the two untied."
                )

    def finish(self) -> list[str]:
        """Let everything that is no tensor follow; what there is to say about it."""
        state, values = self._state, self._manifest.values
        with torch.no_grad():
            for _, tensor, source in self._twins:
                _copy(tensor, source)
        if self._carries:
            prefix = f"rank.{state.rank}.codec."
            state.parts.load({n.removeprefix(prefix): t for n, t in self.targets.items() if n.startswith(prefix)})
        if self._loading is not None:
            self.notes += self._loading.finish(self.targets)
        elif state.optimizer is not None:
            self.notes.append("the checkpoint has no optimizer: its states start afresh")
        for name, extra in state.extras.items():
            if name in values:
                _give(name, extra, from_json(values[name], self.targets.__getitem__))
            else:
                self.notes.append(f"the checkpoint has no {name!r}: it starts afresh")
        self._random_numbers()
        return self.notes

    def _random_numbers(self) -> None:
        prefix = f"rank.{self._state.rank}.rng."
        saved = {n.removeprefix(prefix): t for n, t in self.targets.items() if n.startswith(prefix)}
        if saved:
            set_rng_state(saved)
        elif "rng" in self._manifest.values:
            seed_anew(self._manifest.values["rng"]["seed"], self._manifest.step, self._state.rank)
            self.notes.append(
                f"random numbers begin anew, from the saved seed: {self._manifest.world} ranks wrote the checkpoint, "
                f"and now there are {self._state.world}"
            )


def _give(name: str, extra: HasState, state: Any) -> None:
    try:
        extra.load_state_dict(state)
    except TowpathError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise DamagedError(f"{name!r} ({type(extra).__name__}) does not take its state ({problem}).") from error


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Two parameters of one shape, whose slices need not match element by element."""
    if isinstance(source, ShardTensor):
        target.copy_(source.full_tensor())
    else:
        target.copy_(source)
