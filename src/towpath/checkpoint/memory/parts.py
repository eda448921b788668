"""What of a training each rank has, and who writes what of it: all of one model, or some stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from towpath.checkpoint.dcp.calls import described
from towpath.checkpoint.memory.names import Named, named
from towpath.engine.codec_state import codec_state, fingerprint, load_codec_state, reset_codec_state
from towpath.engine.executor import Engine
from towpath.errors import CheckpointError
from towpath.topology.groups import Groups


class KeepsState(Protocol):
    """What one rank carries from step to step: what codecs have rounded away, and the seeds they draw from."""

    def state(self) -> dict[str, torch.Tensor]:
        """By name. The tensors are those in use, but for seeds."""
        ...

    def load(self, values: Mapping[str, torch.Tensor]) -> None: ...

    def restart(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineState:
    engine: Engine

    def state(self) -> dict[str, torch.Tensor]:
        return codec_state(self.engine)

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        load_codec_state(self.engine, values)

    def restart(self) -> None:
        reset_codec_state(self.engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`named()`: this rank's tensors. `held`: the names that any rank has, or None where each has all of them.

    `writes_copies`: whether it writes what others have just so; `written_elsewhere`: what of its own another stage
    writes; `copied_elsewhere`: of what, if it is no ShardTensor. `keepers`: by what precedes their names.
    `fingerprint`: alike for two runs whose ranks carry the same. `nodes`: where each rank lives.
    """

    groups: Groups
    named: Callable[[], Named]
    nodes: list[int]
    writes_copies: bool
    engines: tuple[Engine, ...] = ()
    keepers: Mapping[str, KeepsState]
    fingerprint: str = ""
    held: frozenset[str] | None = None
    written_elsewhere: frozenset[str] = frozenset()
    copied_elsewhere: frozenset[str] = frozenset()

    @property
    def strategy(self) -> str | None:
        return self.engines[0].strategy.to_toml() if self.engines else None

    @property
    def writes(self) -> int:
        """Rises with every write to sharded parameters."""
        return sum(engine.writes for engine in self.engines)

    @property
    def is_unsharded(self) -> bool:
        """Any part of it."""
        return any(engine.kept_unsharded for engine in self.engines)

    def state(self) -> dict[str, torch.Tensor]:
        """Of all keepers."""
        return {f"{prefix}{name}": t for prefix, keeper in self.keepers.items() for name, t in keeper.state().items()}

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        for prefix, keeper in self.keepers.items():
            keeper.load({name: values[f"{prefix}{name}"] for name in keeper.state()})

    def restart(self) -> None:
        for keeper in self.keepers.values():
            keeper.restart()


def together(groups: Groups, what: str, mine: Callable[[], Any]) -> list[Any]:
    """What each rank finds; or on every rank an error."""
    found, problem = None, ""
    try:
        found = mine()
    except Exception as error:  # whatever it is: the others wait for an answer
        problem = described(error)
    told = groups.gather_objects((found, problem))
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]
    if failed:
        raise CheckpointError(f"{what}: {failed[0]}")
    return [value for value, _ in told]


def parts_of(model: Any) -> Parts:
    """Of a model, sharded or not, or of what knows its parts itself."""
    if not isinstance(model, nn.Module):
        return model.checkpoint_parts()
    engine: Engine | None = getattr(model, "towpath_engine", None)
    mesh_size = _mesh_size(engine)
    groups = engine.comm.groups if engine is not None and mesh_size == 1 else Groups()
    if engine is not None and engine.comm.groups.world * mesh_size != groups.world:
        raise CheckpointError(
            f"the model is on {engine.comm.groups.world} data-parallel × {mesh_size} tensor-parallel ranks, and the "
            f"job has {groups.world}: a checkpoint is of a whole job."
        )
    # Without a topology, as on a mesh, every rank reads for itself.
    nodes = list(range(groups.world))
    if engine is not None and mesh_size == 1:
        nodes = [engine.strategy.topology.node_of(rank) for rank in range(groups.world)]
    return Parts(
        groups=groups,
        named=lambda: named(model),
        nodes=nodes,
        writes_copies=groups.rank == 0,
        engines=() if engine is None else (engine,),
        keepers={} if engine is None else {"": EngineState(engine)},
        fingerprint="" if engine is None else fingerprint(engine),
    )


def _mesh_size(engine: Engine | None) -> int:
    """How many ranks the tensor-parallel mesh has whose DTensors were sharded; 1 without."""
    places = [] if engine is None else [p for u in engine.units for b in u.buckets for p in b.layout.places]
    return max((len(place.parallel.ranks) for place in places if place.parallel is not None), default=1)
