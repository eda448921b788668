"""What a checkpoint contains of a training run: model, optimizer, everything else with a state, and random numbers.

    model.NAME                parameters (the masters, in their own dtype) and persistent buffers
    optimizer.NAME.STATE      per parameter, by the parameter's name
    EXTRA.PATH                the tensors in the state of an extra
    rank.R.rng.…, rank.R.codec.…   what each rank has of its own

Values that are not tensors are in the manifest, under `model`, `optimizer`, the names of the extras, `engine`, `rng`,
`config` and, for adapters of PEFT, `peft`.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.hooks import RemovableHandle

from towpath.checkpoint import optimizer_state
from towpath.checkpoint.exporting import ADAPTERS, adapters_of
from towpath.checkpoint.manifest import Manifest, from_json, tensors_in, to_json
from towpath.checkpoint.rank_contents import (
    NamedTensors,
    RankContents,
    contents_of,
    rng_state,
    seed_anew,
    set_rng_state,
)
from towpath.checkpoint.safe_files import DamagedError
from towpath.checkpoint.storage import Contents, TensorChunks
from towpath.core.formats import shape_text
from towpath.engine.parameters.shard_spec import ShardSpec
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import CheckpointError, TowpathError
from towpath.outer.saved import VALUE, IslandContents, IslandRestore, islands_of, prefix_of, view_of
from towpath.topology.cluster import counted
from towpath.topology.together import described

_TAKEN = ("model", "optimizer", "rank", "engine", "rng", "island", "islands", "outer", ADAPTERS)
_SPLIT_ELEMENTS = 1 << 16  # a slice that several ranks hold is divided among them, unless it is smaller
_NAMED_DIFFERENCES = 4
_SHOWN = 200  # characters of an extra's state in an error


class HasContents(Protocol):
    """A model that knows which rank has which tensors of it: a pipeline."""

    def checkpoint_contents(self) -> RankContents:
        """Return what this rank has."""
        ...


class State:
    """Everything that a checkpoint contains: what to save, and where to load it.

    With several ranks, every rank must create the `State`. An unsharded model must be the same on all of them.

    Example:
        state = State(model, optimizer, schedule=scheduler, data=loader)

    Args:
        model: The model, sharded or not, or a pipeline of `towpath.pipeline`.
        optimizer: The model's optimizer, for a pipeline that of this rank. Without one, only the model is saved.
        config: The model's configuration, which an export writes as Hugging Face's config.json.
        names: Other names for tensors in an export, by their names in the model.
        **extras: Anything else with `state_dict()` and `load_state_dict()`. The states must be the same on every rank.
            Saving fails if they differ in anything but the values of tensors, of which rank 0's are saved.

    Raises:
        CheckpointError: An extra has a reserved name, or the model is only on a part of the job's ranks.
    """

    def __init__(
        self,
        model: nn.Module | HasContents,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
        **extras: Stateful,
    ) -> None:
        taken = [name for name in extras if name.partition(".")[0] in _TAKEN]
        if taken:
            raise CheckpointError(
                f"{taken[0]!r} is a name of Towpath's own in a checkpoint; call this state otherwise."
            )
        self.model, self.optimizer, self.extras = model, optimizer, extras
        self.config, self.names = config, dict(names or {})
        self._savers = weakref.WeakSet[Any]()  # those that save this state
        self.contents = contents_of(model)
        for engine in self.contents.engines:
            engine.before_rewrite.append(weakref.WeakMethod(self.settle))
        self.groups, self.island_rank = self.contents.groups, self.contents.groups.rank
        self._hook: RemovableHandle | None = None

    def add_saver(self, saver: Any) -> None:
        """Call `saver.settle` before anything that it saves is changed."""
        self._savers.add(saver)
        if self._hook is None and self.optimizer is not None:
            # The optimizer must not keep the state alive, nor its savers and their locks.
            self._hook = self.optimizer.register_step_pre_hook(partial(_settle, weakref.ref(self)))
            weakref.finalize(self, self._hook.remove)

    def settle(self) -> None:
        """Return when everything that is being saved has been copied, so that it may be changed."""
        for saver in list(self._savers):
            saver.settle()

    # --- saving

    def collect(self) -> Contents:
        """Return what this rank writes: pieces of the tensors in use, and on rank 0 values that are not tensors."""
        model, islands = self.named(), self.contents.islands
        if islands is not None:
            islands.outer.wait()  # an exchange under way changes what is kept of rounding errors
        copies = self.contents.writes_copies
        tensors = model.all()
        if islands is not None:  # the other tensors are equal on all islands, which share one copy
            tensors = islands.trained(tensors)
        found = dict(self._mine({f"model.{name}": tensor for name, tensor in tensors.items()}, copies))
        own = {f"rank.{self.island_rank}.rng.{name}": tensor for name, tensor in rng_state().items()}
        own |= {f"rank.{self.island_rank}.codec.{name}": tensor for name, tensor in self.contents.state().items()}
        found.update(self._mine(own, True))
        rng = {"seed": torch.initial_seed(), "peers": len(self.contents.peers)}
        values: dict[str, Any] = {"model": {"aliases": model.aliases}, "rng": rng}
        if self.contents.engines:
            values["engine"] = {"step": self.contents.engines[0].step, "fingerprint": self.contents.fingerprint}
        if self.optimizer is not None:
            tensors, owned, values["optimizer"] = optimizer_state.collect(self.optimizer, model)
            found.update(self._mine(tensors, copies, owned=owned))
        same: dict[str, str] = {}
        of_extras: dict[str, torch.Tensor] = {}
        for name, extra in self.extras.items():
            before = len(of_extras)
            values[name] = to_json(extra.state_dict(), name, of_extras)
            shapes = [f"{t.dtype} {shape_text(tuple(t.shape))}" for t in [*of_extras.values()][before:]]
            text = json.dumps([values[name], *shapes] if shapes else values[name], sort_keys=True)
            same[f"the state of {name!r}"] = (
                text if len(text) <= _SHOWN else f"a text of CRC-32 {crc32(text.encode()):x}"
            )
        found.update(self._mine(of_extras, self.island_rank == 0))
        if self.config is not None:
            try:  # as in a config.json, which has no tuples, and only strings as keys
                values["config"] = json.loads(json.dumps(self.config))
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"config: expected what JSON can hold, as to_dict() gives it ({error})."
                ) from error
        if self.names:
            values["names"] = self.names
        if self.island_rank == 0 and (adapters := adapters_of(self.model)):
            values[ADAPTERS] = adapters
        if self.island_rank > 0:  # other ranks may have the states of other parameters
            spread = self.optimizer is not None and optimizer_state.is_spread(self.optimizer)
            spread = spread or self.contents.held is not None
            values = {name: value for name, value in values.items() if name == "optimizer" and spread}
        if islands is not None:
            found = {f"{prefix_of(islands.island)}{name}": pieces for name, pieces in found.items()}
            found |= self._shared_by_islands(islands, model)
            values = islands.renamed(values, self.island_rank)
        engines = self.contents.engines
        return Contents(
            pieces=found,
            values=values,
            same=same,
            island=0 if islands is None else islands.island,
            strategy=engines[0].strategy.to_toml() if engines else None,
        )

    def _shared_by_islands(self, islands: IslandContents, model: NamedTensors) -> dict[str, TensorChunks]:
        """Return what island 0 writes for all islands."""
        if islands.island > 0:
            return {}
        trained = islands.trained(model.all())
        equal = {f"model.{name}": t for name, t in model.all().items() if name not in trained}
        found = dict(self._mine(equal, self.contents.writes_copies))
        return found | dict(self._mine(dict(islands.tensors(model.names)), False, steady=False))

    def named(self) -> NamedTensors:
        """Return this rank's tensors of the model, or raise CheckpointError if they are unsharded meanwhile."""
        if any(engine.kept_unsharded for engine in self.contents.engines):
            raise CheckpointError("inside towpath.full_parameters(): leave it before a checkpoint is saved or loaded.")
        return self.contents.named()

    def _mine(
        self,
        tensors: Mapping[str, torch.Tensor],
        copies: bool,
        steady: bool = True,
        owned: Mapping[str, ShardTensor] = MappingProxyType({}),
    ) -> Iterator[tuple[str, TensorChunks]]:
        """Yield what this rank writes of `tensors`. Ranks that hold the same slice of a ShardTensor divide it.

        Args:
            tensors: What this rank has, by name.
            copies: Whether this rank writes tensors that are not ShardTensors.
            steady: Whether ShardTensors stay as they are until the optimizer's step.
            owned: The parameters of full states. The owners in the other replicas have the same states.
        """
        for name, tensor in tensors.items():
            _check_storable(name, tensor)
            parameter, number = owned.get(name), crc32(name.encode())
            sharded = parameter if parameter is not None else tensor if isinstance(tensor, ShardTensor) else None
            if self._is_written_elsewhere(name, sharded is not None):
                continue
            if isinstance(tensor, ShardTensor):
                boxes = dict(_share(tensor, number))
            elif copies if parameter is None else _is_turn(parameter.shard_spec, number):
                boxes = {(0,) * tensor.dim(): tensor.detach()}
            else:
                continue
            if boxes:
                stays = steady and sharded is not None and self.optimizer is not None
                yield name, TensorChunks(tensor.dtype, tensor.shape, boxes, stays)

    def _is_written_elsewhere(self, name: str, sharded: bool) -> bool:
        names = self.contents.written_elsewhere if sharded else self.contents.copied_elsewhere
        return any(name == f"model.{n}" or name.startswith(f"optimizer.{n}.") for n in names)


def _settle(state: weakref.ref[State], *_: object) -> None:
    if (found := state()) is not None:
        found.settle()


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError for a tensor that a safetensors file cannot hold."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype is torch.complex128:
        kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout
        raise CheckpointError(
            f"{name} is a {_short(kind)} tensor, which a checkpoint cannot hold: expected a dense tensor. Save "
            "to_dense() of a sparse, dequantize() of a quantized, and torch.view_as_real() of a complex128 tensor."
        )


def _is_turn(shard_spec: ShardSpec, number: int) -> bool:
    """Return whether this rank writes what all holders of a slice have. `number` selects one of them."""
    return shard_spec.holders[number % len(shard_spec.holders)] == shard_spec.replica.rank


def _share(tensor: ShardTensor, number: int) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the boxes that this rank writes of a slice that it and other ranks hold. `number` selects one of them."""
    shard_spec, local = tensor.shard_spec, tensor.to_local().detach()
    if not shard_spec.counts:
        return  # another rank of the tensor-parallel mesh has the same slice, and writes it
    first, last = shard_spec.bounds()
    if tensor.numel() == 0:
        if shard_spec.replica.rank == 0:
            yield (0,) * tensor.dim(), local.view(tensor.shape)
        return
    if last - first >= _SPLIT_ELEMENTS:
        place, count = shard_spec.holders.index(shard_spec.replica.rank), len(shard_spec.holders)
        start, end = (first + (last - first) * i // count for i in (place, place + 1))
    else:
        start, end = (first, last) if _is_turn(shard_spec, number) else (first, first)
    for box in tensor.boxes((start, end)):
        yield box.offsets, local[box.start - first : box.end - first].view(box.sizes)


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
        islands, peers = state.contents.islands, len(state.contents.peers)
        # How many ranks an island has, how many islands there are, and how many ranks compute the same batch.
        self._ranks = state.groups.world, 1 if islands is None else islands.islands, peers
        same = islands is not None and islands_of(manifest) == islands.islands
        self.manifest = manifest = view_of(manifest, islands.island if islands is not None and same else None)
        self._saved_ranks = manifest.world, islands_of(manifest), manifest.values.get("rng", {}).get("peers", peers)
        self._state, self._model = state, state.named()
        self._restores_codecs = False
        self.targets: dict[str, torch.Tensor] = {}
        self.notes: list[str] = []
        # Tensors that are tied in the checkpoint, and not in this model, with the target of the first name.
        self._untied: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Parameters that are stored encoded, and the targets that are read in their place.
        self._encoded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._names = self._model.names_in(manifest, state.contents.held or self._model.all())
        self._check_model()
        stored = {id(parameter): self._names[name] for name, parameter in self._model.parameters.items()}
        self._optimizer = self._islands = None
        if state.optimizer is not None and "optimizer" in manifest.values:
            self._optimizer = optimizer_state.OptimizerRestore(state.optimizer, manifest, stored)
        if islands is not None:
            islands.outer.wait()  # it would overwrite what is loaded
        self._add_model()
        self._add_codecs()
        if islands is not None:
            self._islands = IslandRestore(islands, manifest, stored)
            self.targets.update(self._islands.targets)
        if self._optimizer is not None:
            self.targets.update(self._optimizer.targets)
        random = f"rank.{state.island_rank}.rng."
        new = [name for name in manifest.tensors if name.startswith(random) and self._ranks == self._saved_ranks]
        for extra in state.extras:
            new += tensors_in(manifest.values.get(extra))
        for name in new:
            self.targets[name] = manifest.tensor(name).empty()
        for name, target in self.targets.items():
            _check_target(manifest, name, target)

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
            key = f"model.{first}"
            if key in self.targets:
                self._untied.append((tensor, self.targets[key]))
                self.notes.append(f"{name} and {first} were one parameter in the checkpoint, and are two in this model")
                continue
            self.targets[key] = tensor.detach()
            if isinstance(tensor, ShardTensor) and tensor.rests_in is not None:
                self.targets[key] = torch.empty_like(tensor.detach())
                self._encoded.append((tensor, self.targets[key]))
            here, there = (_short(dtype) for dtype in (tensor.dtype, held[first].dtype))
            if there != here:
                rounded.add(f"saved as {there}, loaded as {here}")
        for alias, first in self._model.aliases.items():
            both = alias in held and first in held  # tied in this model, and not in the checkpoint
            if both and first in self._model.parameters:
                self.targets[f"model.{alias}"] = torch.empty_like(self._model.parameters[first].detach())
        self.notes += [f"parameters were {what}" for what in sorted(rounded)]

    def _add_codecs(self) -> None:
        contents, manifest, saved = self._state.contents, self.manifest, self.manifest.values.get("engine")
        contents.go_to(saved["step"] if saved is not None else manifest.step)
        prefix = f"rank.{self._state.island_rank}.codec."
        kept = {n.removeprefix(prefix) for n in manifest.tensors if n.startswith(prefix)}
        same = saved is not None and self._ranks == self._saved_ranks and saved["fingerprint"] == contents.fingerprint
        if same and kept == set(contents.state()):
            self._restores_codecs = True
            self.targets.update({f"{prefix}{name}": tensor for name, tensor in contents.state().items()})
            return
        contents.restart()
        carried = any(".codec." in name and name.startswith("rank.") for name in manifest.tensors)
        if contents.engines and carried:
            self.notes.append(
                "codec feedback starts at zero: the checkpoint's is of another strategy, of other units or of another "
                "number of nodes or ranks. To carry it over, resume with those of the checkpoint"
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
        state, values = self._state, self.manifest.values
        with torch.no_grad():
            for tensor, source in self._encoded:
                tensor.copy_(source)
            untied = self._untied + (self._optimizer.untied if self._optimizer is not None else [])
            for tensor, source in untied:  # their shards need not match element by element
                tensor.copy_(source.full_tensor() if isinstance(source, ShardTensor) else source)
        if self._restores_codecs:
            state.contents.load(self._filled(f"rank.{state.island_rank}.codec."))
        if self._islands is not None:
            self.notes += self._islands.finish()
        elif VALUE in values:
            self.notes.append(
                f"the checkpoint is of {islands_of(self.manifest)} islands: their slow weights were loaded, and the "
                "optimizer's states of island 0"
            )
        if self._optimizer is not None:
            self.notes += self._optimizer.finish(self.targets)
        elif state.optimizer is not None:
            self.notes.append("the checkpoint has no optimizer: the states of this one are as they were")
        elif "optimizer" in values:
            kind = values["optimizer"]["kind"]
            self.notes.append(f"the states of {kind} in the checkpoint were not loaded: this State has no optimizer")
        self._finish_extras()
        if saved := self._filled(f"rank.{state.island_rank}.rng."):
            set_rng_state(saved)
        elif "rng" in values:
            seed_anew(values["rng"]["seed"], self.manifest.step, state.contents.peers)
            self.notes.append(
                f"random numbers begin anew, from the saved seed: the checkpoint is of {_ranks(*self._saved_ranks)}, "
                f"and this job of {_ranks(*self._ranks)}"
            )
        return self.notes

    def _finish_extras(self) -> None:
        extras, values = self._state.extras, self.manifest.values
        known = {*extras, *_TAKEN, "config", "names", VALUE}
        self.notes += [
            f"{name!r} in the checkpoint was not loaded: this State has no such extra"
            for name in values
            if name not in known
        ]
        for name, extra in extras.items():
            if name not in values:
                self.notes.append(f"the checkpoint has no {name!r}: it starts afresh")
                continue
            try:
                extra.load_state_dict(from_json(values[name], self.targets.__getitem__))
            except TowpathError:
                raise
            except Exception as error:
                raise CheckpointError(
                    f"{name!r} ({type(extra).__name__}) does not take its state ({described(error)}). Make the object "
                    "that was saved, or load without it."
                ) from error

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
        here, there = _short(target.dtype), _short(stored.dtype)
        raise CheckpointError(f"{name} is {there} in the checkpoint, which cannot be cast to {here}.")


def _short(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")
