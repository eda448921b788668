"""The part of a checkpoint that each rank of a pipeline has. Names of tensors are unique over all stages."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from towpath.checkpoint.rank_contents import (
    NamedTensors,
    RankContents,
    RankState,
    engine_state,
    fingerprint,
    named_tensors,
)
from towpath.engine.executor import engine_of
from towpath.errors import CheckpointError
from towpath.pipeline.embedding_sync import TiedEmbeddings
from towpath.pipeline.stage import TowpathStage
from towpath.topology.groups import Groups
from towpath.topology.together import AllRanks


def prefixes_of(modules: Mapping[int, nn.Module], stages: int, group: dist.ProcessGroup) -> list[str]:
    """Return what precedes the names of each stage's parameters. Every rank must call it, and gets the same.

    It is "" if no two stages have a name in common, and otherwise the number of the stage, as in `nn.Sequential`.
    """
    mine = [(index, name) for index, module in modules.items() for name, _ in module.named_parameters()]
    gathered = Groups(group).gather_objects(mine)
    counts = Counter(name for each in gathered for _, name in each)
    unique = all(count == 1 for count in counts.values())
    return ["" if unique else f"{index}." for index in range(stages)]


def _sender_state(stage: TowpathStage) -> RankState:
    """Return the state that a stage's senders carry from one message to the next, by the name of the sender."""

    def state() -> dict[str, torch.Tensor]:
        found = stage.senders.items()
        return {f"{name}/{i}": kept for name, sender in found for i, kept in enumerate(sender.state)}

    def restart() -> None:
        for sender in stage.senders.values():
            sender.restart()

    return RankState(state, restart)


def _named_in(stages: Sequence[TowpathStage], prefixes: Sequence[str], twin: Mapping[str, str]) -> NamedTensors:
    """Return the tensors of stages by their names in the pipeline. Tied parameters have that of the first stage."""
    each = [(prefixes[s.stage_index], named_tensors(s.submod)) for s in stages]
    parameters = {f"{prefix}{name}": p for prefix, one in each for name, p in one.parameters.items()}
    buffers = {f"{prefix}{name}": b for prefix, one in each for name, b in one.buffers.items()}
    aliases = {f"{prefix}{alias}": f"{prefix}{name}" for prefix, one in each for alias, name in one.aliases.items()}
    return NamedTensors(
        {twin.get(name, name): p for name, p in parameters.items()},
        buffers,
        {alias: twin.get(name, name) for alias, name in aliases.items()},
    )


def contents_of(
    mesh: DeviceMesh, stages: Sequence[TowpathStage], tied: TiedEmbeddings | None, prefixes: Sequence[str], how: str
) -> RankContents:
    """Return what this rank has of a checkpoint. Every rank must call it.

    `how` is what must be equal for the states of codecs to fit, next to the strategies of the stages.
    """
    groups = Groups()
    if mesh.size() != groups.world:
        raise CheckpointError(
            f"the pipeline's mesh has {mesh.size()} ranks, and the job {groups.world}: a checkpoint is of a whole job."
        )

    engines = [(f"stage {s.stage_index}/", s.engine) for s in stages]
    twin: dict[str, str] = {}  # the names of tied parameters in the last stage, with their names in the first stage
    if tied is not None and tied.module is not None:
        engines.append(("tied/", engine_of(tied.module)))
        first, last = tied.ends.names
        twin = {f"{prefixes[-1]}{last}.{name}": f"{prefixes[0]}{first}.{name}" for name in tied.names}
    states: dict[str, RankState] = {prefix: engine_state(engine) for prefix, engine in engines}
    states |= {f"messages of stage {s.stage_index}/": _sender_state(s) for s in stages}

    def of_this_rank() -> tuple[dict[int, set[str]], dict[str, str], list[str]]:
        names = {s.stage_index: set(_named_in([s], prefixes, twin).all()) for s in stages}
        aliases = {**_named_in(stages, prefixes, twin).aliases, **twin}
        return names, aliases, [fingerprint(engine) for _, engine in engines]

    gathered = AllRanks(groups, "State()", CheckpointError).combine(of_this_rank, list)
    aliases = {alias: first for _, each, _ in gathered for alias, first in each.items()}
    of_stages = {stage: names for of_rank, _, _ in gathered for stage, names in of_rank.items()}
    # Of the stages that have a tensor, the first one writes it. One that two stages of a rank share is no copy.
    lowest = {name: stage for stage in sorted(of_stages, reverse=True) for name in of_stages[stage]}
    own = gathered[groups.rank][0]
    copied = frozenset(name for names in own.values() for name in names if lowest[name] not in own)
    codec_states = "\n".join([how, *(line for _, _, fingerprints in gathered for line in fingerprints)])
    others = [name for name in mesh.mesh_dim_names or () if name != "pp"]
    layers = "tp" in (mesh.mesh_dim_names or ())  # ranks share them
    return RankContents(
        groups=groups,
        everyone=groups,
        peers=Groups(mesh["tp"].get_group()).members if layers else (groups.rank,),
        named=lambda: replace(_named_in(stages, prefixes, twin), aliases=aliases),
        writes_copies=not any(mesh.get_local_rank(name) for name in others),
        engines=tuple(engine for _, engine in engines),
        states=states,
        fingerprint=hashlib.sha256(codec_states.encode()).hexdigest(),
        held=frozenset(lowest),
        # If one engine spans both ends, each of their ranks writes a share of the tied parameters.
        written_elsewhere=frozenset() if tied is not None and tied.fused else copied,
        copied_elsewhere=copied,
    )
