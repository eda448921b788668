"""Tied embeddings: what the first and the last stage of a pipeline share is sharded by itself, and kept alike at both.

Fused, one engine spans the ranks of both ends: one sum brings the gradients together. Else each end has an engine over
its own data-parallel ranks, and what those have summed is summed once more between the two ends, as Megatron does.
Where a schedule puts both ends on one rank, their modules have one parameter and one engine, over the data-parallel
ranks: there is nothing to sum between the ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from towpath.api import shard
from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.pipeline import StagePass
from towpath.core.schedule import Stage
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.strategy import TransferKind
from towpath.engine.executor import engine_of
from towpath.engine.parameters.initialise import Values
from towpath.errors import ShardError
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups, align_group_counts, new_group


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the two ends are. `first`, `last`: the ranks of each, in the order of their data-parallel group, as the job
    counts them. `names`: of the module in each. `stages`: those that this rank has of the two, if any."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    names: tuple[str, str]
    stages: tuple[int, ...]

    @property
    def meet(self) -> bool:
        """Both ends are on the same ranks."""
        return self.first == self.last

    def modules_in(self, stages: Mapping[int, nn.Module]) -> list[nn.Module]:
        """Those of this rank."""
        return [stages[index].get_submodule(self.names[index > 0]) for index in self.stages]

    @property
    def both(self) -> tuple[int, ...]:
        return tuple(sorted({*self.first, *self.last}))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.first, self.last, strict=True))


def find_ends(
    tied: tuple[str, str], modules: Mapping[int, nn.Module], owners: Sequence[int], mesh: DeviceMesh
) -> Ends | None:
    """`tied`: names of the module in the first and in the last stage; else each stage's `tied` tells. The same on every
    rank, but for its own module; or on every rank an error."""
    last = len(owners) - 1
    names = {index: tied[index > 0] or getattr(modules[index], "tied", "") for index in {0, last} & set(modules)}
    everyones: list[Any] = [None] * mesh["pp"].size()
    found = {index: (name, _has_module(modules[index], name)) for index, name in names.items()}
    dist.all_gather_object(everyones, found, group=mesh["pp"].get_group())
    told = {index: name for each in everyones for index, (name, _) in each.items()}
    if not (told[0] or told[last]):
        return None
    if not (told[0] and told[last]):
        raise ShardError(
            f"Pipeline: tied embeddings need a module of the first and of the last stage; got {told[0]!r} and "
            f"{told[last]!r}. Name both in tied=, or untie them."
        )
    for index, (name, is_there) in sorted(item for each in everyones for item in each.items()):
        if not is_there:
            raise ShardError(
                f"Pipeline: tied embeddings: stage {index} has no module {name!r}. Name it as it is there."
            )
    ranks = _like_this_rank(mesh)
    mine = tuple(sorted(names))
    return Ends(tuple(ranks[owners[0]]), tuple(ranks[owners[last]]), (told[0], told[last]), mine)


def _has_module(stage: nn.Module, name: str) -> bool:
    return any(name == known for known, _ in stage.named_modules())


def _like_this_rank(mesh: DeviceMesh) -> list[list[int]]:
    """The job's ranks by stage rank and data-parallel rank, at this rank's place of the mesh's other dimensions."""
    names = list(mesh.mesh_dim_names or ())
    others = [name for name in names if name not in ("pp", "dp")]
    ranks = mesh.mesh.permute([names.index(name) for name in ("pp", "dp", *others)])
    for name in others:
        ranks = ranks[:, :, mesh.get_local_rank(name)]
    return ranks.tolist()


class TiedEmbeddings:
    """What the ends share. Every rank of the pipeline makes it; those between the ends have no part in it."""

    def __init__(
        self,
        ends: Ends,
        modules: Mapping[int, nn.Module],
        mesh: DeviceMesh,
        precision: Precision | None,
        fused: bool,
        values: Values | None = None,
    ) -> None:
        self.ends, self.fused, self._pipeline = ends, fused, mesh["pp"].get_group()
        self.module: nn.Module | None = None
        self._between: dist.ProcessGroup | None = None
        align_group_counts(*(mesh[name].get_group() for name in mesh.mesh_dim_names or ()))
        within = mesh["dp"].get_group()
        if not ends.meet:
            parts = [ends.both] if fused else ends.pairs
            # A rank between the ends makes a group, too, of itself: where PyTorch splits the communicator of all ranks
            # for each new group, a rank that makes none would keep the others waiting.
            mine = next((part for part in parts if dist.get_rank() in part), (dist.get_rank(),))
            timeout = timedelta(seconds=Groups(self._pipeline).timeout_seconds)
            joined = new_group(sorted(mine), "tied embeddings", timeout=timeout)
            if fused and ends.stages:
                within = joined
            elif ends.stages:
                self._between = joined
        if not ends.stages:
            return
        found = ends.modules_in(modules)
        module = _BothEnds(*found) if ends.meet else found[0]
        given = None if values is None else _inside(values, ends.names[0], module)
        self.module = shard(module, "zero1" if fused else "ddp", group=within, precision=precision, values=given)
        for each in found:  # it is sharded by itself, wherever it lies
            object.__setattr__(each, "towpath_engine", engine_of(self.module))
            object.__setattr__(each, "towpath_apart", True)
        if self._between is not None:
            with torch.no_grad():
                for parameter in self.parameters:
                    first: Any = parameter.clone()
                    dist.broadcast(first.to_local(), group=self._between, group_src=self._first_in_pair)
                    parameter.copy_(first)

    @property
    def _first_in_pair(self) -> int:
        """The place of the first stage's rank among the two."""
        pair = next(pair for pair in self.ends.pairs if dist.get_rank() in pair)
        return sorted(pair).index(pair[0])

    @property
    def parameters(self) -> Set[nn.Parameter]:
        """In the order of the module, which is the same at both ends."""
        return dict.fromkeys(self.module.parameters() if self.module is not None else ()).keys()

    @property
    def names(self) -> list[str]:
        """Of the parameters, in the module of either end."""
        end = self.module.first if isinstance(self.module, _BothEnds) else self.module
        return [name for name, _ in end.named_parameters()] if end is not None else []

    @property
    def counted_here(self) -> bool:
        """Of the two ends, in a sum over all stages."""
        return 0 in self.ends.stages

    def end_step(self) -> None:
        """After the engines have delivered what each end has summed."""
        if self._between is None:
            return
        for parameter in self.parameters:
            if parameter.grad is not None:
                gradient: Any = parameter.grad
                dist.all_reduce(gradient.to_local(), group=self._between)

    def schedules(self, micro_batches: int, passes: Sequence[StagePass]) -> list[Stage]:
        """What is summed at the ends, and between them. `passes`: of one stage. Every rank must call it."""
        units: list[Any] = [None] * dist.get_world_size(self._pipeline)
        mine = None
        if self.module is not None:
            engine = engine_of(self.module)
            mine = engine.strategy, tuple(unit.plan.spec for unit in engine.units), engine.precision
        dist.all_gather_object(units, mine, group=self._pipeline)
        strategy, specs, precision = next(each for each in units if each is not None)
        found = derive_schedule(strategy, specs, micro_batches, precision, passes)
        if self.fused or self.ends.meet:
            return [Stage(self.ends.both, found, ())]
        # Between the ends goes what the engines have delivered, in the parameters' own dtype.
        two = derive_schedule(presets.strategy("ddp", Topology(2, 1)), specs, micro_batches, Precision(), passes)
        between = replace(two, transfers=tuple(t for t in two.transfers if t.kind is TransferKind.GRAD_SYNC))
        ends = [Stage(ranks, found, ()) for ranks in (self.ends.first, self.ends.last)]
        return [*ends, *(Stage(pair, between, ()) for pair in self.ends.pairs)]


class _BothEnds(nn.Module):
    """The modules of both ends on one rank. The last one gets the parameters of the first."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        theirs = dict(last.named_parameters())
        for name, parameter in first.named_parameters():
            other = theirs.pop(name, None)
            if other is None or other.shape != parameter.shape:
                raise _unlike(name, parameter, other)
            path, _, attribute = name.rpartition(".")
            setattr(last.get_submodule(path), attribute, parameter)
        if theirs:
            raise _unlike(*next(iter(theirs.items())), None)
        self.first, self.last = first, last


def _unlike(name: str, one: nn.Parameter, other: nn.Parameter | None) -> ShardError:
    described = "none" if other is None else "×".join(map(str, other.shape))
    return ShardError(
        f"Pipeline: tied embeddings have the same parameters at both ends; {name!r} is "
        f"{'×'.join(map(str, one.shape))} at one and {described} at the other."
    )


def _inside(values: Values, name: str, module: nn.Module) -> Values:
    """For a module that is sharded by itself, those of its parameters in the model, by the first end's `name`."""
    ends = ("first.", "last.") if isinstance(module, _BothEnds) else ("",)

    def found(inner: str, start: int, end: int) -> torch.Tensor:
        of_module = next(inner.removeprefix(each) for each in ends if inner.startswith(each))
        return values(f"{name}.{of_module}", start, end)

    return found
