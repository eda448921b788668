"""Tied embeddings: a module that the first and the last stage of a pipeline share is sharded by itself.

Fused, one engine spans the ranks of both ends, and sums the gradients once. Otherwise each end has an engine over its
own data-parallel ranks, and their sums are summed once more between the ends, as Megatron does.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from towpath.api import shard
from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.passes import StagePass
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.strategy import TransferKind
from towpath.engine.executor import engine_of
from towpath.engine.parameters.initialise import Values
from towpath.errors import ShardError
from towpath.pipeline.schedules import StageSchedule
from towpath.pipeline.stage import schedule_of
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups, align_group_counts, new_group
from towpath.topology.together import AllRanks


@dataclass(frozen=True, slots=True)
class TiedEnds:
    """The ranks and the modules of the two ends.

    `first` and `last` are the ranks of each end in the job, in the order of their data-parallel group. `names` has the
    name of the shared module in each end. `stage` is the end that is a stage of this rank, or None.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    names: tuple[str, str]
    stage: int | None

    @property
    def both(self) -> tuple[int, ...]:
        return tuple(sorted({*self.first, *self.last}))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The two ranks that hold the same shard if the ends have an engine each."""
        return list(zip(self.first, self.last, strict=True))


def find_tied_ends(
    tied: tuple[str, str], modules: Mapping[int, nn.Module], owners: Sequence[int], mesh: DeviceMesh
) -> TiedEnds | None:
    """Return the ends of tied embeddings, or None. Every rank must call it, and gets the same ends or an error.

    `tied` has the names of the shared module in the first and the last stage. For "", the attribute `tied` of the stage
    counts, which `split` sets.
    """
    last = len(owners) - 1

    def of_this_rank() -> dict[int, str]:
        names = {index: tied[index > 0] or getattr(modules[index], "tied", "") for index in {0, last} & set(modules)}
        for index, name in names.items():
            if name not in dict(modules[index].named_modules()):  # "" names the stage itself
                raise ShardError(
                    f"Pipeline: tied embeddings: stage {index} has no module {name!r}. Name it as it is there."
                )
        return names

    everyones = AllRanks(Groups(mesh["pp"].get_group()), "Pipeline()", ShardError).combine(of_this_rank, list)
    name_in = {index: name for each in everyones for index, name in each.items()}
    if not (name_in[0] or name_in[last]):
        return None
    if not (name_in[0] and name_in[last]):
        raise ShardError(
            f"Pipeline: tied embeddings need a module of the first and of the last stage; got {name_in[0]!r} and "
            f"{name_in[last]!r}. Name both in tied=, or untie them."
        )
    # The job's ranks by 'pp' and 'dp', at this rank's place in 'tp'.
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    ranks = mesh[names].mesh if names[0] == "pp" else mesh[names].mesh.T
    ends = tuple(ranks[owners[0]].tolist()), tuple(ranks[owners[last]].tolist())
    return TiedEnds(*ends, (name_in[0], name_in[last]), next(iter({0, last} & set(modules)), None))


class TiedEmbeddings:
    """The module that both ends share, sharded by itself. Every rank of the pipeline must construct it.

    `module` is None on ranks that have neither end.
    """

    def __init__(
        self,
        ends: TiedEnds,
        modules: Mapping[int, nn.Module],
        mesh: DeviceMesh,
        precision: Precision | None,
        fused: bool,
        values: Values | None = None,
    ) -> None:
        self.ends, self.fused = ends, fused
        self.module: nn.Module | None = None
        self._between: dist.ProcessGroup | None = None
        align_group_counts(*(mesh[name].get_group() for name in mesh.mesh_dim_names or ()))
        within = mesh["dp"].get_group()
        parts = [ends.both] if fused else ends.pairs
        # A rank between the ends makes a group of itself. PyTorch may split the communicator of all ranks for each new
        # group, and then the others would wait for a rank that makes none.
        mine = next((part for part in parts if dist.get_rank() in part), (dist.get_rank(),))
        joined = new_group(sorted(mine), "tied embeddings", timeout=Groups(mesh["pp"].get_group()).timeout)
        if ends.stage is None:
            return
        if fused:
            within = joined
        else:
            self._between = joined
        module = modules[ends.stage].get_submodule(ends.names[ends.stage > 0])
        given: Values | None = None
        if values is not None:  # the model has them under the name of the first end
            given = lambda name, start, end: values(f"{ends.names[0]}.{name}", start, end)  # noqa: E731
        self.module = shard(module, "zero1" if fused else "ddp", group=within, precision=precision, values=given)
        object.__setattr__(self.module, "towpath_apart", True)
        if self._between is not None:
            with torch.no_grad():
                for parameter in self.parameters:
                    first: Any = parameter.clone()
                    dist.broadcast(first.to_local(), src=mine[0], group=self._between)
                    parameter.copy_(first)

    @property
    def parameters(self) -> Set[nn.Parameter]:
        """The shared parameters, in the order of the module. It is the same at both ends."""
        return dict.fromkeys(self.module.parameters() if self.module is not None else ()).keys()

    @property
    def names(self) -> list[str]:
        """The names of the shared parameters in the module of either end."""
        return [name for name, _ in self.module.named_parameters()] if self.module is not None else []

    @property
    def counted_here(self) -> bool:
        """Whether this rank's end counts in sums over all stages. One of the two does."""
        return self.ends.stage == 0

    @contextmanager
    def summing(self) -> Generator[None]:
        """Sum between the ends what the engines set as `.grad` inside.

        An engine adds to a `.grad` that is there. It was summed in an earlier step, and must not be summed again.
        """
        before: dict[nn.Parameter, Any] = {} if self._between is None else {p: p.grad for p in self.parameters}
        for parameter in before:
            parameter.grad = None
        try:
            yield
            for parameter in before:
                gradient: Any = parameter.grad
                if gradient is not None:
                    dist.all_reduce(gradient.to_local(), group=self._between)
        finally:
            with torch.no_grad():
                for parameter, earlier in before.items():
                    if earlier is not None:
                        parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def schedules(self, micro_batches: int, passes: Sequence[StagePass]) -> list[StageSchedule]:
        """Return the schedules of the sums at the ends and between them. A rank of an end calls it."""
        assert self.module is not None
        engine = engine_of(self.module)
        found = schedule_of(engine, micro_batches, passes)
        if self.fused:
            return [StageSchedule(self.ends.both, found, ())]
        # The ends exchange the gradients that the engines have delivered, in the parameters' own dtype.
        specs = tuple(unit.plan.spec for unit in engine.units)
        two = derive_schedule(presets.strategy("ddp", Topology(2, 1)), specs, micro_batches, Precision(), passes)
        between = replace(two, transfers=tuple(t for t in two.transfers if t.kind is TransferKind.GRAD_SYNC))
        ends = [StageSchedule(ranks, found, ()) for ranks in (self.ends.first, self.ends.last)]
        return [*ends, *(StageSchedule(pair, between, ()) for pair in self.ends.pairs)]
