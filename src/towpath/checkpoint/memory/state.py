"""What a checkpoint holds of a training run: model, optimizer, whatever else has a state, every rank's random numbers.

    model.NAME                parameters (the masters, in their own dtype) and persistent buffers
    optimizer.NAME.STATE      per parameter, by the parameter's name
    EXTRA.PATH                the tensors in the state of an extra
    rank.R.rng.…, rank.R.codec.…   what is each rank's own

What is no tensor stands in the manifest, under `model`, `optimizer`, the extras' names, `engine`, `rng`, `config` and,
of PEFT's adapters, `peft`.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import nn

from towpath.checkpoint.dcp.planning import Pieces
from towpath.checkpoint.disk.manifest import Manifest
from towpath.checkpoint.disk.plain import to_json
from towpath.checkpoint.memory import adapters
from towpath.checkpoint.memory import optimizer as optimizers
from towpath.checkpoint.memory.names import Named, aliases_in, name_in, shape_text
from towpath.checkpoint.memory.parts import Parts, parts_of, together
from towpath.checkpoint.memory.restoring import Restoring
from towpath.checkpoint.memory.rng import rng_state
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import CheckpointError

_TAKEN = ("model", "optimizer", "rank", "engine", "rng", adapters.VALUE)
_SPLIT_ELEMENTS = 1 << 16  # a slice that several ranks hold is divided among them, unless it is smaller
_NAMED_DIFFERENCES = 4


class HasState(Protocol):
    """torch.distributed.checkpoint's `Stateful`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class HasParts(Protocol):
    """What knows itself which rank has which tensors of it: a pipeline."""

    def checkpoint_parts(self) -> Parts: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class Saves(Protocol):
    def settle(self) -> None: ...


class State:
    """`State(model, optimizer, schedule=scheduler, data=loader)`: anything with state_dict() and load_state_dict().

    The extras' states must be alike on every rank (rank 0's are written). `config`: what a Hugging Face export writes
    as config.json; `names`: what it calls the tensors, where that differs from the model's own names.
    The model may be sharded or not; with several ranks, an unsharded one must be alike on all. Of a pipeline
    (`towpath.pipeline`) pass it and this rank's optimizer: every rank must make the State.
    """

    def __init__(
        self,
        model: nn.Module | HasParts,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
        **extras: HasState,
    ) -> None:
        taken = [name for name in extras if name in _TAKEN]
        if taken:
            raise CheckpointError(
                f"{taken[0]!r} is a name of Towpath's own in a checkpoint; call this state otherwise."
            )
        self.model, self.optimizer, self.extras = model, optimizer, extras
        self.config, self.names = config, dict(names or {})
        self.savers: weakref.WeakSet[Saves] = weakref.WeakSet()
        self.parts = parts_of(model)
        for engine in self.parts.engines:
            engine.before_rewrite.append(weakref.WeakMethod(self.settle))
        self.groups = self.parts.groups
        self.rank, self.world = self.groups.rank, self.groups.world

    @property
    def nodes(self) -> list[int]:
        """Which node each rank lives on."""
        return self.parts.nodes

    @property
    def strategy(self) -> str | None:
        return self.parts.strategy

    @property
    def writes(self) -> int:
        """Rises with every write to a sharded model's parameters."""
        return self.parts.writes

    def settle(self) -> None:
        """Whatever is being saved must have been copied: it is about to be written to."""
        for saver in list(self.savers):
            saver.settle()

    # Saving ---------------------------------------------------------------------------------------------------------

    def collect(self) -> dict[str, Any]:
        """What this rank writes: pieces of tensors, as they lie now, and on rank 0 all that is no tensor."""
        model = self._named()
        copies = self.parts.writes_copies
        found: dict[str, Any] = {}
        found.update(self._mine(self._model_tensors(model), copies))
        found.update(self._mine(self._rank_tensors(), True))
        values: dict[str, Any] = {"model": {"aliases": model.aliases}, "rng": {"seed": torch.initial_seed()}}
        if self.parts.engines:
            values["engine"] = {"step": self.parts.engines[0].step, "fingerprint": self.parts.fingerprint}
        if self.optimizer is not None:
            tensors, values["optimizer"] = self._optimizer_state(self.optimizer, model)
            whole = optimizers.whole_states(self.optimizer, model, tensors)
            rest = {name: tensor for name, tensor in tensors.items() if name not in whole}
            found.update(self._mine(rest, copies))
            found.update(self._whole(whole))
        for name, extra in self.extras.items():
            tensors = dict[str, torch.Tensor]()
            values[name] = to_json(extra.state_dict(), name, tensors.__setitem__)
            found.update(self._mine(tensors, self.rank == 0))
        if self.config is not None:
            values["config"] = _as_json(self.config)
        if self.names:
            values["names"] = self.names
        if self.rank == 0 and (described := adapters.adapters_of(self.model)):
            values[adapters.VALUE] = described
        return {**found, **values} if self.rank == 0 else found

    def _named(self) -> Named:
        if self.parts.is_unsharded:
            raise CheckpointError("inside towpath.full_parameters(): leave it before a checkpoint is saved or loaded.")
        return self.parts.named()

    def _model_tensors(self, model: Named) -> dict[str, torch.Tensor]:
        return {f"model.{name}": tensor for name, tensor in (*model.parameters.items(), *model.buffers.items())}

    def _rank_tensors(self) -> dict[str, torch.Tensor]:
        return {
            **{f"rank.{self.rank}.rng.{name}": tensor for name, tensor in rng_state().items()},
            **{f"rank.{self.rank}.codec.{name}": tensor for name, tensor in self.parts.state().items()},
        }

    def _optimizer_state(
        self, optimizer: torch.optim.Optimizer, model: Named
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's tensors, and what is none of all ranks."""
        if self.parts.held is None and not optimizers.is_spread(optimizer):
            return optimizers.collect(optimizer, model)
        tensors: dict[str, torch.Tensor] = {}

        def mine() -> dict[str, Any]:
            found, values = optimizers.collect(optimizer, model)
            tensors.update(found)
            return values

        return tensors, optimizers.merged(together(self.groups, "the optimizer's state", mine))

    def _mine(self, tensors: Mapping[str, torch.Tensor], copies: bool) -> Iterator[tuple[str, Pieces]]:
        """What several ranks hold of a ShardTensor they share out; `copies`: whether it writes what is no such one."""
        for name, tensor in tensors.items():
            if self._is_written_elsewhere(name, tensor):
                continue
            if isinstance(tensor, ShardTensor):
                boxes = dict(_share(tensor, crc32(name.encode())))
            elif copies:
                boxes = {(0,) * tensor.dim(): tensor.detach()}
            else:
                continue
            if boxes:
                steady = isinstance(tensor, ShardTensor) and self.optimizer is not None
                yield name, Pieces(tensor.dtype, tensor.shape, boxes, steady)

    def _whole(self, owned: Mapping[str, tuple[torch.Tensor, ShardTensor]]) -> Iterator[tuple[str, Pieces]]:
        """Of the states that this rank and its like in the other replicas have whole, those that it writes."""
        for name, (tensor, parameter) in owned.items():
            holders = parameter.shard_spec.holders
            writes = holders[crc32(name.encode()) % len(holders)] == parameter.shard_spec.replica.rank
            if writes and not self._is_written_elsewhere(name, parameter):
                yield name, Pieces(tensor.dtype, tensor.shape, {(0,) * tensor.dim(): tensor.detach()}, True)

    def _is_written_elsewhere(self, name: str, tensor: torch.Tensor) -> bool:
        parts = self.parts
        names = parts.written_elsewhere if isinstance(tensor, ShardTensor) else parts.copied_elsewhere
        return any(name == f"model.{n}" or name.startswith(f"optimizer.{n}.") for n in names)

    # Loading --------------------------------------------------------------------------------------------------------

    def check(self, manifest: Manifest) -> None:
        """Refuse a checkpoint of another model."""
        model, aliases = self._named(), aliases_in(manifest)
        wanted = {n: tuple(t.shape) for n, t in (*model.parameters.items(), *model.buffers.items())}
        held = {n.removeprefix("model."): t.shape for n, t in manifest.tensors.items() if n.startswith("model.")}
        everyones = self.parts.held if self.parts.held is not None else wanted
        known = {name_in(name, held, model, aliases) for name in everyones} | set(model.aliases)
        found: list[str] = []
        for name, shape in wanted.items():
            there = held.get(name_in(name, held, model, aliases))
            if there is None:
                found.append(f"{name} {shape_text(shape)} is not in it")
            elif there != shape:
                found.append(f"{name} is {shape_text(there)} in it and {shape_text(shape)} in the model")
        found += [
            f"it has {name} {shape_text(shape)}, the model has not" for name, shape in held.items() if name not in known
        ]
        if found:
            more = f"; and {len(found) - _NAMED_DIFFERENCES} more" if len(found) > _NAMED_DIFFERENCES else ""
            raise CheckpointError(
                f"the checkpoint is of another model: {'; '.join(found[:_NAMED_DIFFERENCES])}{more}. Build the model "
                "that was saved, or load another checkpoint."
            )

    def restoring(self, manifest: Manifest) -> Restoring:
        return Restoring(self, manifest, self._named())


def _share(tensor: ShardTensor, number: int) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """This rank's part of the slice that it and others hold, in boxes."""
    shard_spec, local = tensor.shard_spec, tensor.to_local().detach()
    if not shard_spec.counts:
        return  # another rank of the tensor-parallel mesh has the same, and writes it
    first, last = shard_spec.bounds()
    place, count = shard_spec.holders.index(shard_spec.replica.rank), len(shard_spec.holders)
    if tensor.numel() == 0:
        if shard_spec.replica.rank == 0:
            yield (0,) * tensor.dim(), local.view(tensor.shape)
        return
    if last - first >= _SPLIT_ELEMENTS:
        start, end = (first + (last - first) * i // count for i in (place, place + 1))
    else:
        start, end = (first, last) if number % count == place else (first, first)
    for box in tensor.boxes((start, end)):
        yield box.offsets, local[box.start - first : box.end - first].view(box.sizes)


def _as_json(config: Mapping[str, Any]) -> Any:
    """As its config.json would have it: JSON knows no tuples, and no keys but strings."""
    try:
        return json.loads(json.dumps(config))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config: expected what JSON can hold, as to_dict() gives it ({error}).") from error
