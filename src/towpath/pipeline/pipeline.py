"""A model as stages on a mesh: each sharded over its data-parallel ranks, run by a schedule of PyTorch's.

mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
pipeline = Pipeline(stages, "zero1", mesh=mesh, schedule="1F1B", micro_batches=8, loss=cross_entropy, example=tokens)
optimizer = torch.optim.AdamW(pipeline.parameters())
for tokens, targets in batches:
    loss = pipeline.step(tokens, target=targets)
    pipeline.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()

Each stage has an engine of its own; what the first and the last one share (tied embeddings) has another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from towpath.api import shard
from towpath.core.formats import dtype_name
from towpath.core.job import JobSchedule, Stage, Wires, job_schedule, wire_for
from towpath.core.low_rank import NAME as LOW_RANK
from towpath.core.pipeline import messages
from towpath.core.precision import Precision
from towpath.core.routes import Op
from towpath.core.schedule import Schedule
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.strategy import Strategy
from towpath.core.wire import Wire
from towpath.engine.executor import engine_of
from towpath.engine.layout import UnitChoice
from towpath.errors import ShardError, StepError
from towpath.pipeline.schedules import order_of, owners_of, schedule_class, splits_backward
from towpath.pipeline.shapes import Tensors, handed_on, with_gradients
from towpath.pipeline.stage import Place, TowpathStage
from towpath.topology.cluster import Topology

Loss = Callable[[Any, Any], torch.Tensor]


class Pipeline:
    """`stages`: all of the model, in order, each a module or what makes one; a rank builds its own only. What a stage
    returns, a tensor or a tuple of them, is what the next one is called with.

    `mesh`: of dimensions 'pp' and 'dp': ranks that differ in 'dp' alone hold the same stages, sharded by `strategy`.
    `schedule`: one of `SCHEDULES`. `micro_batches`: into so many a batch is cut, along its first dimension.
    `loss(output, target)`: the mean over a micro-batch. `example`: what the first stage is called with for one
    micro-batch; only shapes and dtypes count.

    `activation_gradients`: how the gradients that stages send back travel, such as 'low-rank:16': those that are
    exposed (`core/pipeline.py`), or with `every_gradient` all of them. `activations`: the same of what stages hand on,
    such as 'int8'. Both as a codec's text, or a `Wire`; of low rank, what a message misses is added to the next one.

    `tied`: the module of the first stage, and of the last one, that share their parameter; `split` tells. It is sharded
    by itself over the ranks of both stages: one sum brings its gradients together, not two (fused embedding
    synchronisation).

    Gradients are means over all micro-batches and data-parallel ranks.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | Callable[[], nn.Module]],
        strategy: str | Strategy,
        *,
        mesh: DeviceMesh,
        schedule: str = "1F1B",
        micro_batches: int,
        loss: Loss,
        example: torch.Tensor | Sequence[torch.Tensor],
        precision: Precision | None = None,
        units: UnitChoice | None = None,
        activations: str | Wire = "none",
        activation_gradients: str | Wire = "none",
        every_gradient: bool = False,
        tied: tuple[str, str] = ("", ""),
    ) -> None:
        _check_mesh(mesh)
        group: dist.ProcessGroup = mesh["pp"].get_group()
        self._group, self._ranks = group, mesh["pp"].size()
        kind = schedule_class(schedule)
        owners = owners_of(kind, len(stages), self._ranks, schedule)
        mine = [index for index, owner in enumerate(owners) if owner == dist.get_rank(group)]
        modules = {index: _module(stages[index]) for index in mine}
        device = torch.device(mesh.device_type)
        self.order = order_of(kind, len(stages), self._ranks, micro_batches)
        self._wires = Wires(
            _wire(activations, "activations"), _wire(activation_gradients, "activation_gradients"), every_gradient
        )
        encoded = frozenset(
            (m.source, m.micro_batch) for m in messages(self.order) if m.backward and self._wires.encodes(m)
        )
        first: Tensors = (example,) if isinstance(example, torch.Tensor) else tuple(example)
        shapes = [with_gradients(t) for t in handed_on(modules, owners, first, precision or Precision(), group)]
        for tensor in (t for each in shapes[1:-1] for t in each):
            for wire in (self._wires.activations, self._wires.gradients):
                wire_for(dtype_name(tensor.dtype), wire)  # refuses, on all ranks alike
        self._tied, self._ends = self._shard_tied(tied, modules, owners, mesh, precision)
        self._stages: list[TowpathStage] = []
        for index, module in modules.items():
            module = shard(module, strategy, group=mesh["dp"].get_group(), precision=precision, units=units)
            place = Place(
                index, len(stages), shapes[index], shapes[index + 1], group, micro_batches, mesh["dp"].size(), encoded
            )
            self._stages.append(TowpathStage(module, place, device, self._wires, one_backward=splits_backward(kind)))
        run: Any = self._stages[0] if issubclass(kind, PipelineScheduleSingle) else self._stages
        self._schedule: Any = kind(run, micro_batches, loss_fn=loss)
        self._mesh, self.owners, self._micro_batches = mesh, owners, micro_batches

    def _shard_tied(
        self,
        tied: tuple[str, str],
        modules: dict[int, nn.Module],
        owners: Sequence[int],
        mesh: DeviceMesh,
        precision: Precision | None,
    ) -> tuple[nn.Module | None, tuple[int, ...]]:
        """On ranks of the first and the last stage, what they share; and those ranks, as the job counts them."""
        last = len(owners) - 1
        names = {index: tied[index > 0] or getattr(modules[index], "tied", "") for index in {0, last} & set(modules)}
        everyones: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyones, names, group=self._group)
        told = {index: name for each in everyones for index, name in each.items()}
        if not (told[0] or told[last]):
            return None, ()
        if not (told[0] and told[last]) or owners[0] == owners[last]:
            raise ShardError(
                f"Pipeline: tied embeddings need a module of the first and of the last stage, on different ranks; got "
                f"{told[0]!r} and {told[last]!r}, on ranks {owners[0]} and {owners[last]} of 'pp'. Take a schedule "
                "that begins and ends on different ranks, or untie them."
            )
        rows = mesh.mesh if mesh.mesh_dim_names == ("pp", "dp") else mesh.mesh.T
        ends = tuple(sorted(rows[[owners[0], owners[last]]].flatten().tolist()))
        if not names:
            return None, ends
        ((index, name),) = names.items()
        made = dist.new_group(list(ends), use_local_synchronization=True, group_desc="tied embeddings")
        assert isinstance(made, dist.ProcessGroup)
        return shard(modules[index].get_submodule(name), "zero1", group=made, precision=precision), ends

    @property
    def modules(self) -> dict[int, nn.Module]:
        """This rank's stages, by their number."""
        return {stage.stage_index: stage.submod for stage in self._stages}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of this rank's stages; a name begins with the number of its stage."""
        for index, module in self.modules.items():
            yield from ((f"{index}.{name}", parameter) for name, parameter in module.named_parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def step(self, *args: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Forward and backward of a batch, of which the first stage reads `args`, and the last one `target`. The mean
        loss of this data-parallel rank's batch, on all ranks of its pipeline."""
        for stage in self._stages:
            stage.begin_step()
        losses: list[torch.Tensor] = []
        own = [stage.stage_index for stage in self._stages]
        first, last = 0 in own, self._stages[-1].num_stages - 1 in own
        try:
            self._schedule.step(*(args if first else ()), target=target if last else None, losses=losses)
            for stage in self._stages:
                stage.end_step()
            return self._mean_loss(losses)
        except RuntimeError as error:
            raise StepError(self._failure(error)) from error

    def _failure(self, error: RuntimeError) -> str:
        ranks, own, count = dist.get_process_group_ranks(self._group), sorted(self.modules), len(self.owners)
        others = {other for index in own for other in (index - 1, index + 1) if 0 <= other < count} - set(own)
        told = "; ".join(f"stage {other}: rank {ranks[self.owners[other]]}" for other in sorted(others))
        return (
            f"rank {dist.get_rank()}: a step failed in stage {', '.join(map(str, own))} of {count}: {error}\nIf this "
            f"speaks of a connection or of time, a neighbour has died, hangs or has lost its link ({told})."
        )

    def _mean_loss(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        mean = torch.stack([loss.detach() for loss in losses]).mean().double() if losses else torch.zeros(()).double()
        mean = mean.to(self._stages[0].device)
        dist.broadcast(mean, group=self._group, group_src=self.owners[-1])
        return mean

    def schedule(self, topology: Topology | None = None) -> JobSchedule:
        """Every transfer of a step of the whole job, on `topology`, which is detected unless given. Every rank must
        call it: each knows its own stages only."""
        topology = topology or Topology.detect()
        members = tuple(dist.get_process_group_ranks(self._mesh["dp"].get_group()))
        mine = {s.stage_index: Stage(members, self.stage_schedule(s.stage_index), s.handed_on) for s in self._stages}
        gathered: list[Any] = [None] * self._ranks
        dist.all_gather_object(gathered, mine, group=self._group)
        stages: dict[int, Stage] = {index: stage for each in gathered for index, stage in each.items()}
        found = [stages[index] for index in sorted(stages)]
        if self._ends:
            found.append(Stage(self._ends, self._tied_schedule(), ()))
        return job_schedule(topology, found, self.order, self._wires)

    def _tied_schedule(self) -> Schedule:
        """Of what the first and the last stage share; on every rank, though only those have it."""
        passes = [each for passes in self.order.values() for each in passes if each.stage == 0]
        units: list[Any] = [None] * self._ranks
        mine = None
        if self._tied is not None:
            engine = engine_of(self._tied)
            mine = engine.strategy, tuple(unit.plan.spec for unit in engine.units), engine.precision
        dist.all_gather_object(units, mine, group=self._group)
        strategy, specs, precision = next(each for each in units if each is not None)
        return derive_schedule(strategy, specs, self._micro_batches, precision, passes)

    def stage_schedule(self, index: int) -> Schedule:
        """What one of this rank's stages sends among its own ranks."""
        engine = next(stage.engine for stage in self._stages if stage.stage_index == index)
        units = tuple(unit.plan.spec for unit in engine.units)
        passes = [each for passes in self.order.values() for each in passes if each.stage == index]
        return derive_schedule(engine.strategy, units, self._micro_batches, engine.precision, passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for module in (*self.modules.values(), *([] if self._tied is None else [self._tied])):
            module.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_, of the gradients of all stages. Every rank must call it."""
        own = [p for p in self.parameters() if p.grad is not None]
        tied = set(self._tied.parameters()) if self._tied is not None else set[nn.Parameter]()
        mine = [p.grad for p in own if p.grad is not None and p not in tied]
        norm = torch.nn.utils.get_total_norm(mine, norm_type).double()
        if tied:  # both ends have to ask, and one of them counts it
            shared = torch.nn.utils.get_total_norm([p.grad for p in tied if p.grad is not None], norm_type).double()
            if 0 in self.modules:
                norm = torch.linalg.vector_norm(torch.stack([norm, shared]), norm_type)
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
        else:
            norm = norm.pow(norm_type)
            dist.all_reduce(norm, group=self._group)
            norm = norm.pow(1 / norm_type)
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)
        return norm


def _module(stage: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    return stage if isinstance(stage, nn.Module) else stage()


def _check_mesh(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    if set(names) != {"pp", "dp"}:
        raise ShardError(
            "Pipeline: a mesh of dimensions 'pp' and 'dp' is needed, of any sizes; got "
            f"{', '.join(names) or 'no names'}. "
            'Make it by init_device_mesh(device, (stages, ranks), mesh_dim_names=("pp", "dp")).'
        )


def _wire(given: str | Wire, what: str) -> Wire:
    wire = given
    if isinstance(wire, str):
        wire = Wire(codec=wire, feedback="first" if wire.startswith(LOW_RANK) else "none")
    wire.check(Op.SEND, f"Pipeline: {what}")
    return wire
