"""Which rank has which tensors of a pipeline, by names that are unique over all stages; and who writes them to a
checkpoint."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from towpath.checkpoint.rank_contents import (
    EngineState,
    NamedTensors,
    RankContents,
    RankState,
    gather_or_raise,
    named_tensors,
)
from towpath.engine.codec_state import fingerprint
from towpath.engine.executor import engine_of
from towpath.errors import CheckpointError
from towpath.pipeline.embedding_sync import TiedEmbeddings
from towpath.pipeline.stage import TowpathStage
from towpath.topology.groups import Groups


def prefixes_of(modules: Mapping[int, nn.Module], stages: int, group: dist.ProcessGroup) -> list[str]:
    """By stage, what goes before the names of its parameters: nothing, unless two stages have a name in common; then
    the number of the stage, as in nn.Sequential. The same on every rank."""
    mine = [(index, name) for index, module in modules.items() for name, _ in module.named_parameters()]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    counts = Counter(name for each in gathered for _, name in each)
    unique = all(count == 1 for count in counts.values())
    return ["" if unique else f"{index}." for index in range(stages)]


@dataclass(frozen=True, slots=True)
class _Messages:
    """What senders of a stage carry from one message to the next."""

    stage: TowpathStage

    def state(self) -> dict[str, torch.Tensor]:
        found = self.stage.senders.items()
        return {f"{name}/{i}": kept for name, sender in found for i, kept in enumerate(sender.state)}

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """All of it is in use, and was filled where it lies."""

    def restart(self) -> None:
        for sender in self.stage.senders.values():
            sender.restart()


@dataclass(frozen=True, slots=True)
class _Told:
    """Of one rank: its stages' names; and what its engines carry."""

    names: Mapping[int, Sequence[str]]
    aliases: Mapping[str, str]
    fingerprints: Sequence[str]


def parts_of(
    mesh: DeviceMesh, stages: Sequence[TowpathStage], tied: TiedEmbeddings | None, prefixes: Sequence[str], how: str
) -> RankContents:
    """`how`: what else has to be the same for ranks to carry the same. Every rank must call it."""
    groups = Groups()
    if mesh.size() != groups.world:
        raise CheckpointError(
            f"the pipeline's mesh has {mesh.size()} ranks, and the job {groups.world}: a checkpoint is of a whole job."
        )

    twin = _twin(tied, prefixes)

    def found(stages: Sequence[TowpathStage] = stages) -> NamedTensors:
        return _joined([(prefixes[s.stage_index], named_tensors(s.submod)) for s in stages], twin)

    engines = [(f"stage {s.stage_index}/", s.engine) for s in stages]
    if tied is not None and tied.module is not None:
        engines.append(("tied/", engine_of(tied.module)))
    states: dict[str, RankState] = {prefix: EngineState(engine) for prefix, engine in engines}
    states |= {f"messages of stage {s.stage_index}/": _Messages(s) for s in stages}

    def mine() -> _Told:
        names = {s.stage_index: sorted(_names(found([s]))) for s in stages}
        return _Told(names, {**found().aliases, **twin}, [fingerprint(engine) for _, engine in engines])

    told: list[_Told] = gather_or_raise(groups, "the pipeline's stages", mine)
    aliases = {alias: first for each in told for alias, first in each.aliases.items()}
    lowest: dict[str, int] = {}
    for each in told:
        for stage, names in each.names.items():
            lowest |= {name: min(stage, lowest.get(name, stage)) for name in names}
    own = told[groups.rank].names
    # What two stages of this rank share is no copy.
    copied = {name for stage, names in own.items() for name in names if lowest[name] not in (stage, *own)}
    carried = "\n".join([how, *(line for each in told for line in each.fingerprints)])
    others = [name for name in mesh.mesh_dim_names or () if name != "pp"]
    return RankContents(
        groups=groups,
        named=lambda: replace(found(), aliases=aliases),
        nodes=list(range(groups.world)),
        writes_copies=not any(mesh.get_local_rank(name) for name in others),
        engines=tuple(engine for _, engine in engines),
        states=states,
        fingerprint=hashlib.sha256(carried.encode()).hexdigest(),
        held=frozenset(lowest),
        # Where one engine spans both ends, their ranks share out what they all hold.
        written_elsewhere=frozenset() if tied is not None and tied.fused else frozenset(copied),
        copied_elsewhere=frozenset(copied),
    )


def _twin(tied: TiedEmbeddings | None, prefixes: Sequence[str]) -> dict[str, str]:
    """Names of the last stage's that are the first one's too, and what they are called there."""
    if tied is None or tied.module is None:
        return {}
    first, last = tied.ends.names
    return {f"{prefixes[-1]}{last}.{name}": f"{prefixes[0]}{first}.{name}" for name in tied.names}


def _names(found: NamedTensors) -> set[str]:
    return {*found.parameters, *found.buffers}


def _joined(stages: Sequence[tuple[str, NamedTensors]], twin: Mapping[str, str]) -> NamedTensors:
    """Of stages with what precedes their names."""

    def called(name: str) -> str:
        return twin.get(name, name)

    return NamedTensors(
        {called(f"{prefix}{name}"): p for prefix, each in stages for name, p in each.parameters.items()},
        {f"{prefix}{name}": b for prefix, each in stages for name, b in each.buffers.items()},
        {f"{prefix}{alias}": called(f"{prefix}{f}") for prefix, each in stages for alias, f in each.aliases.items()},
    )
