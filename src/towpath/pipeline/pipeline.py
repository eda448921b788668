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

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count as count_up
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from towpath.api import shard
from towpath.checkpoint.memory.parts import Parts
from towpath.core import presets
from towpath.core.compression import Compression, encoded_gradients
from towpath.core.compression import compression as named
from towpath.core.job import JobSchedule, Stage, job_schedule
from towpath.core.pipeline import StagePass, as_computed
from towpath.core.precision import Dtype, MixedPrecisionPolicy, Precision
from towpath.core.schedule import Schedule
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.strategy import Kind, Strategy
from towpath.engine.agreement import agree
from towpath.engine.executor import engine_of
from towpath.engine.initialise import Values
from towpath.engine.layout import UnitChoice
from towpath.engine.partial_sums import total_norm
from towpath.errors import ShardError, StepError, TowpathError
from towpath.observing import Stats, Trace
from towpath.pipeline.embedding_sync import TiedEmbeddings, find_ends
from towpath.pipeline.observed import Observed
from towpath.pipeline.parts import parts_of, prefixes_of
from towpath.pipeline.schedules import order_of, owners_of, schedule_class, splits_backward
from towpath.pipeline.shapes import Tensors, check_batch, check_exchanged, handed_on
from towpath.pipeline.split_backward import can_be_halved
from towpath.pipeline.stage import BackwardPasses, Place, TowpathStage, engines_in
from towpath.pipeline.traced import TracedStages
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups, detect_shape
from towpath.topology.noticeboard import Noticeboard

Loss = Callable[[Any, Any], torch.Tensor]

# How long a rank whose step has failed waits for what the others say of theirs.
_LAST_WORDS_SECONDS = 2.0


class Pipeline:
    """`stages`: all of the model, in order, each a module or what makes one; a rank builds its own only. What a stage
    returns, a tensor or a tuple of them, is what the next one is called with.

    `mesh`: of dimensions 'pp' and 'dp': ranks that differ in 'dp' alone hold the same stages, sharded by `strategy`,
    one for all or one for each stage. A third, 'tp', may be there for stages that are tensor-parallel on it.
    `schedule`: one of `SCHEDULES`. `micro_batches`: into so many a batch is cut, along its first dimension.
    `loss(output, target)`: the mean over a micro-batch. `example`: what the first stage is called with for one
    micro-batch; only shapes and dtypes count.

    `compression`: what travels in fewer bytes, a `Compression` or a preset's name, such as 'optimus-cb+fe+sc'.

    `tied`: the module of the first stage, and of the last one, that share their parameter; `split` tells. It is sharded
    by itself over the ranks of both stages: one sum brings its gradients together, not two (fused embedding
    synchronisation).

    `values`: as of `towpath.shard`; names are those in the stage's module.

    Gradients are means over all micro-batches and data-parallel ranks.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | Callable[[], nn.Module]],
        strategy: str | Strategy | Sequence[str | Strategy],
        *,
        mesh: DeviceMesh,
        schedule: str = "1F1B",
        micro_batches: int,
        loss: Loss,
        example: torch.Tensor | Sequence[torch.Tensor],
        precision: Precision | Dtype | MixedPrecisionPolicy | None = None,
        units: UnitChoice | None = None,
        compression: str | Compression = "none",
        tied: tuple[str, str] = ("", ""),
        values: Values | None = None,
    ) -> None:
        _check_mesh(mesh)
        group: dist.ProcessGroup = mesh["pp"].get_group()
        self._mesh, self._group, self._micro_batches = mesh, group, micro_batches
        self._compression = compression if isinstance(compression, Compression) else named(compression)
        kind, ranks, count = schedule_class(schedule), mesh["pp"].size(), len(stages)
        self.owners = owners_of(kind, count, ranks, schedule)
        self.order = order_of(kind, count, ranks, micro_batches)
        strategies, precision = _strategies(strategy, count), Precision.of(precision)
        with _alike(Groups(group)):
            modules = {i: _module(stages[i]) for i, owner in enumerate(self.owners) if owner == dist.get_rank(group)}
        self._example: Tensors = (example,) if isinstance(example, torch.Tensor) else tuple(example)
        shapes = handed_on(modules, self.owners, self._example, precision, group)
        check_exchanged(shapes[1:-1], self._compression)
        self._prefixes = prefixes_of(modules, count, group)
        ends = find_ends(tied, modules, self.owners, mesh)
        self._tied: TiedEmbeddings | None = None
        self._stages: list[TowpathStage] = []
        self._traced, self._passes_back = TracedStages(), BackwardPasses()
        with _alike(Groups(group)):
            if ends is not None:
                fused = self._compression.fused_embeddings
                self._tied = TiedEmbeddings(ends, modules, mesh, precision, fused, values)
            for index, module in modules.items():
                of_stage = self._strategy_of(strategies[index], index)
                within = mesh["dp"].get_group()
                shard(module, of_stage, group=within, precision=precision, units=units, values=values)
                place = self._place(index, module, shapes[index], shapes[index + 1], splits_backward(kind))
                made = TowpathStage(module, place, self._compression, self._passes_back, self._traced)
                self._stages.append(made)
        self.order = as_computed(self.order, self._halved())
        run: Any = self._stages[0] if issubclass(kind, PipelineScheduleSingle) else self._stages
        self._schedule: Any = kind(run, micro_batches, loss_fn=loss)
        groups: list[dist.ProcessGroup] = [mesh[name].get_group() for name in mesh.mesh_dim_names or () if name != "dp"]
        self.observed = Observed(self._sharded_modules, self.schedule, groups)
        self._noticeboard = _noticeboard(Groups(group))
        self._walks = 0  # of the whole schedule, evaluations too

    def _place(self, index: int, module: nn.Module, inputs: Tensors, outputs: Tensors, splits: bool) -> Place:
        encoded = encoded_gradients(self.order, self._compression)
        count, copies = len(self.owners), self._mesh["dp"].size()
        halved = splits and can_be_halved(engines_in(module))
        device = torch.device(self._mesh.device_type)
        return Place(index, count, inputs, outputs, self._group, device, self._micro_batches, copies, encoded, halved)

    def _halved(self) -> set[int]:
        """Of all stages, those that compute the weights' gradients by themselves."""
        everyones: list[Any] = [None] * dist.get_world_size(self._group)
        mine = [stage.stage_index for stage in self._stages if stage.halved]
        dist.all_gather_object(everyones, mine, group=self._group)
        return {index for each in everyones for index in each}

    def _strategy_of(self, strategy: str | Strategy, stage: int) -> str | Strategy:
        """With the codec of the gradients of the first stages, if they have one."""
        if self._compression.gradients.codec == "none":
            return strategy
        if isinstance(strategy, str):
            strategy = presets.strategy(strategy, Topology(*detect_shape(Groups(self._mesh["dp"].get_group()))))
        return self._compression.strategy_of(strategy, stage, len(self.owners))

    @property
    def modules(self) -> dict[int, nn.Module]:
        """This rank's stages, by their number."""
        return {stage.stage_index: stage.submod for stage in self._stages}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of this rank's stages. Where two stages have a name in common, all begin with the number of their stage. What
        two of them share comes once, as of nn.Module."""
        seen = set[nn.Parameter]()
        for index, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield f"{self._prefixes[index]}{name}", parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def step(self, *args: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Forward and backward of a batch, of which the first stage reads `args`, and the last one `target`. The mean
        loss of this data-parallel rank's batch, on all ranks of its pipeline."""
        with self._failures_told():
            before, began = self._seconds_computed, time.perf_counter()
            losses = self._walk(self._schedule.step, args, target)
            self.observed.seconds_waited += time.perf_counter() - began - (self._seconds_computed - before)
            loss = self._mean_loss(losses)  # on its way while the gradients are
            for engine in self._passes_back.engines:
                engine.end_boundary()
            if self._tied is not None:
                self._tied.end_step()
            self.observed.steps += 1
            return loss()

    @torch.no_grad()
    def evaluate(self, *args: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """The loss that `step` would return, without gradients. Every rank must call it."""
        with self._failures_told():
            return self._mean_loss(self._walk(self._schedule.eval, args, target))()

    def train(self, mode: bool = True) -> None:
        """As nn.Module's, of this rank's stages."""
        for module in self.modules.values():
            module.train(mode)

    def _walk(
        self, walk: Callable[..., Any], args: tuple[torch.Tensor, ...], target: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """The losses of all micro-batches, on the rank of the last stage."""
        if args or 0 in self.modules:  # other stages do not read it, but are told of it as a rule: all refuse alike
            check_batch(args, self._example, self._micro_batches)
        self._walks += 1
        self._passes_back.begin_step()
        for engine in self._passes_back.engines:
            engine.publish()
        losses: list[torch.Tensor] = []
        own = [stage.stage_index for stage in self._stages]
        first, last = 0 in own, len(self.owners) - 1 in own
        with self._traced.walking():
            walk(*(args if first else ()), target=target if last else None, losses=losses, return_outputs=False)
        return losses

    @property
    def _seconds_computed(self) -> float:
        return sum(stage.seconds_computed for stage in self._stages)

    @contextmanager
    def _failures_told(self) -> Generator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise StepError(self._failure(error)) from error

    def _failure(self, error: RuntimeError) -> str:
        """With what the other stages say by now: a rank that is gone says nothing."""
        ranks, own, count = dist.get_process_group_ranks(self._group), sorted(self.modules), len(self.owners)
        said = self._noticeboard.meet(f"walk {self._walks}", _first_line(error), _LAST_WORDS_SECONDS)
        lines: list[str] = []
        for place, rank in enumerate(ranks):
            stages = ", ".join(str(index) for index, owner in enumerate(self.owners) if owner == place)
            if rank != dist.get_rank():
                word = said.get(place, "has said nothing: it waits or works, or it is gone")
                lines.append(f"\n  rank {rank}, stage {stages}: {word}")
        return (
            f"rank {dist.get_rank()}: step {self.observed.steps + 1} failed in stage {', '.join(map(str, own))} of "
            f"{count}: {error}\n"
            "If this speaks of a connection or of time, a rank of the pipeline has died, hangs or has lost its link. "
            f"The others:{''.join(lines)}"
        )

    def _mean_loss(self, losses: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Sent by the last stage to all others. To be called where it is wanted."""
        mean = torch.stack([loss.detach() for loss in losses]).mean().double() if losses else torch.zeros(()).double()
        mean = mean.to(self._stages[0].device)
        sent = dist.broadcast(mean, group=self._group, group_src=self.owners[-1], async_op=True)

        def arrived() -> torch.Tensor:
            if sent is not None:
                sent.wait()
            return mean

        return arrived

    def checkpoint_parts(self) -> Parts:
        """For `towpath.checkpoint.State(pipeline, optimizer)`."""
        how = f"{self._compression} {list(self.owners)}"
        return parts_of(self._mesh, self._stages, self._tied, self._prefixes, how)

    def schedule(self, topology: Topology | None = None) -> JobSchedule:
        """Every transfer of a step of the whole job, on `topology`, which is detected unless given; but for those of
        tensor-parallel layers, which are DTensor's. Every rank must call it: each knows its own stages only."""
        topology = topology or Topology.detect()
        members = tuple(dist.get_process_group_ranks(self._mesh["dp"].get_group()))
        mine = {s.stage_index: Stage(members, self.stage_schedule(s.stage_index), s.handed_on) for s in self._stages}
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, mine, group=self._group)
        stages: dict[int, Stage] = {index: stage for each in gathered for index, stage in each.items()}
        pipeline = [stages[index] for index in sorted(stages)]
        if self._tied is not None:
            pipeline += self._tied.schedules(self._micro_batches, self._passes(0))
        pipelines: list[Any] = [pipeline]
        if "tp" in (self._mesh.mesh_dim_names or ()):
            pipelines = [None] * self._mesh["tp"].size()
            dist.all_gather_object(pipelines, pipeline, group=self._mesh["tp"].get_group())
        return job_schedule(topology, pipelines, self.order, self._compression)

    def stage_schedule(self, index: int) -> Schedule:
        """What one of this rank's stages sends among its own ranks."""
        engine = next(stage.engine for stage in self._stages if stage.stage_index == index)
        units = tuple(unit.plan.spec for unit in engine.units)
        return derive_schedule(engine.strategy, units, self._micro_batches, engine.precision, self._passes(index))

    def _passes(self, stage: int) -> list[StagePass]:
        return [each for passes in self.order.values() for each in passes if each.stage == stage]

    def stats(self) -> Stats:
        """As `towpath.stats`, of all stages and what goes between them; messages between stages are exposed as long as
        this rank waited for any, and no seconds in flight are known of them. Every rank must call it."""
        return self.observed.summed_up(self.observed.stats_of_rank())

    def tracing(self) -> AbstractContextManager[Trace]:
        """As `towpath.tracing(model)`, of this rank's stages. Every rank must trace the same steps."""
        meshes = [Groups(self._mesh[name].get_group()) for name in self._mesh.mesh_dim_names or ()]
        job = self.observed.job
        crossing = {t.payload.unit: t.inter_bytes > 0 for t in job.transfers if t.kind is Kind.ACTIVATION}
        engines = [engine_of(module) for module in self._sharded_modules()]
        return self._traced.recording(engines, meshes, lambda stage: crossing.get(f"stage {stage}", True))

    @property
    def running_trace(self) -> Trace | None:
        return self._traced.trace

    def _sharded_modules(self) -> Iterator[nn.Module]:
        yield from self.modules.values()
        if self._tied is not None and self._tied.module is not None:
            yield self._tied.module

    def zero_grad(self, set_to_none: bool = True) -> None:
        for module in self._sharded_modules():
            module.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_, of the gradients of all stages. Every rank must call it."""
        if not norm_type > 0:
            raise ShardError(f"Pipeline.clip_grad_norm_: norm_type = {norm_type}: expected a number above 0, or inf.")
        own = [p for p in self.parameters() if p.grad is not None]
        tied = self._tied.parameters if self._tied is not None else set[nn.Parameter]()
        norm = total_norm([p.grad for p in own if p.grad is not None and p not in tied], norm_type)
        if tied:  # both ends have to ask, and one of them counts it
            shared = total_norm([p.grad for p in tied if p.grad is not None], norm_type)
            if self._tied is not None and self._tied.counted_here:
                norm = torch.linalg.vector_norm(torch.stack([norm, shared]), norm_type)
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
        else:
            norm = norm.pow(norm_type)
            dist.all_reduce(norm, group=self._group)
            norm = norm.pow(1 / norm_type)
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)
        return norm


@contextmanager
def _alike(groups: Groups) -> Generator[None]:
    """What one stage refuses, all ranks refuse: else they would wait for it."""
    failure: TowpathError | None = None
    cause: Exception | None = None
    try:
        yield
    except TowpathError as error:
        failure = error
    except Exception as error:  # whatever a user's module raises
        failure, cause = ShardError(f"a stage cannot be made: {type(error).__name__}: {error}"), error
    try:
        agree(groups, [], failure)
    except TowpathError as error:
        raise error from cause


def _noticeboard(groups: Groups) -> Noticeboard:
    number: int = next(groups.shared("pipelines made", count_up))
    return Noticeboard(f"{groups.name}/pipeline {number}", groups.rank, groups.world)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _module(stage: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    return stage if isinstance(stage, nn.Module) else stage()


def _strategies(given: str | Strategy | Sequence[str | Strategy], count: int) -> Sequence[str | Strategy]:
    found = [given] * count if isinstance(given, (str, Strategy)) else given
    if len(found) != count:
        raise ShardError(f"Pipeline: {len(found)} strategies for {count} stages: pass one for all, or one for each.")
    return found


def _check_mesh(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    if set(names) not in ({"pp", "dp"}, {"pp", "dp", "tp"}):
        raise ShardError(
            "Pipeline: a mesh of dimensions 'pp' and 'dp' is needed, of any sizes, and 'tp' for tensor-parallel "
            f"stages; got {', '.join(names) or 'no names'}. "
            'Make it by init_device_mesh(device, (stages, ranks), mesh_dim_names=("pp", "dp")).'
        )
    for name in names:
        # PyTorch sorts a group's ranks, and a stage's number is the rank's place among them.
        if bool((mesh.mesh.diff(dim=names.index(name)) < 0).any()):
            raise ShardError(
                f"Pipeline: along {name!r} the ranks of the mesh have to ascend, as those of init_device_mesh() do; "
                f"got {mesh.mesh.tolist()}."
            )
