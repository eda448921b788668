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
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, replace
from itertools import count as count_up
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from towpath.api import shard
from towpath.checkpoint.rank_contents import RankContents
from towpath.core import presets
from towpath.core.formats import Dtype, MixedPrecisionPolicy, Precision
from towpath.core.pipeline import Compression, StagePass, as_computed, encoded_gradients
from towpath.core.pipeline import compression as named
from towpath.core.schedule import JobSchedule, Schedule, Stage, job_schedule
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.strategy import Strategy, TransferKind
from towpath.engine.build import agreement
from towpath.engine.executor import engine_of
from towpath.engine.layout import UnitChoice
from towpath.engine.parameters.initialise import Values
from towpath.engine.parameters.partial_sums import total_norm
from towpath.errors import ShardError, StepError, TowpathError
from towpath.observing import Interval, Observable, Stats, Sums, Trace
from towpath.pipeline.calls import Calls, MeshRanks
from towpath.pipeline.embedding_sync import TiedEmbeddings, find_ends
from towpath.pipeline.observed import Observed
from towpath.pipeline.parts import parts_of, prefixes_of
from towpath.pipeline.schedules import order_of, owners_of, schedule_class, splits_backward
from towpath.pipeline.shapes import Tensors, check_batch, check_exchanged, check_target, described, handed_on
from towpath.pipeline.split import cut_of
from towpath.pipeline.split_backward import can_be_halved
from towpath.pipeline.stage import BackwardPasses, Place, TowpathStage, engines_in
from towpath.pipeline.traced import TracedStages
from towpath.sharded_module import ShardedModule
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups, detect_shape
from towpath.topology.store import StatusStore

Loss = Callable[[Any, Any], torch.Tensor]

# How long a rank whose step has failed waits for what the others say of theirs.
_LAST_WORDS_SECONDS = 2.0


class Pipeline(Observable):
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
        self._mesh, self._group, self.micro_batches = mesh, group, micro_batches
        Groups(group).connect()  # the first messages go between two stages only
        self._everyone = MeshRanks(mesh)
        ranks, count = mesh["pp"].size(), len(stages)
        self._example: Tensors = (example,) if isinstance(example, torch.Tensor) else tuple(example)
        with _alike(self._everyone) as given:
            precision = Precision.of(precision)
            self._compression = compression if isinstance(compression, Compression) else named(compression)
            kind = schedule_class(schedule)
            self.owners = owners_of(kind, count, ranks, schedule)
            self.order = order_of(kind, count, ranks, micro_batches)
            strategies = _strategies(strategy, count)
            given += [f"schedule={kind.__name__.removeprefix('Schedule')}", f"micro_batches={micro_batches}"]
            given += [f"stage {i}: {cut_of(stage) or 'given'}, {strategies[i]}" for i, stage in enumerate(stages)]
            given += [f"example={described(self._example)}", f"precision={precision}", f"tied={tied}"]
            given += [f"compression.{f.name}={getattr(self._compression, f.name)}" for f in fields(Compression)]
            given += [f"mesh={mesh.mesh.tolist()}"]
        with _alike(self._everyone):
            modules = {i: _module(stages[i]) for i, owner in enumerate(self.owners) if owner == dist.get_rank(group)}
        with _alike(self._everyone):
            shapes = handed_on(modules, self.owners, self._example, precision, group)
            check_exchanged(shapes[1:-1], self._compression)
            self._target_rows = {t.shape[0] for t in (*self._example, *shapes[-1]) if t.dim()}
            self._prefixes = prefixes_of(modules, count, group)
            ends = find_ends(tied, modules, self.owners, mesh)
        self._stages, self._traced, self._passes_back = list[TowpathStage](), TracedStages(), BackwardPasses()
        fused, copies = self._compression.fused_embeddings, mesh["dp"].get_group()
        with _alike(self._everyone):
            self._tied = None if ends is None else TiedEmbeddings(ends, modules, mesh, precision, fused, values)
            for index, module in modules.items():
                of_stage = self._strategy_of(strategies[index], index)
                shard(module, of_stage, group=copies, precision=precision, units=units, values=values)
                made = self._stage(index, module, shapes[index], shapes[index + 1], splits_backward(kind))
                self._stages.append(made)
        self.order = as_computed(self.order, self._halved())
        run: Any = self._stages[0] if issubclass(kind, PipelineScheduleSingle) else self._stages
        self._schedule: Any = kind(run, micro_batches, loss_fn=loss)
        groups: list[dist.ProcessGroup] = [mesh[name].get_group() for name in mesh.mesh_dim_names or () if name != "dp"]
        changes = self._compression.changes.union(*(_changes(each) for each in strategies))
        self._observed = Observed(
            self._sharded_modules, lambda step, accumulated: self.schedule(None, step, accumulated), changes, groups
        )
        self._accumulated = 0  # steps inside no_sync since the last boundary
        self._status_store = _status_store(Groups(group))
        self._calls, self._walks = Calls(self._everyone), 0  # walks of the whole schedule, evaluations too

    def _stage(self, index: int, module: nn.Module, inputs: Tensors, outputs: Tensors, splits: bool) -> TowpathStage:
        encoded = encoded_gradients(self.order, self._compression)
        count, copies = len(self.owners), self._mesh["dp"].size()
        halved = splits and can_be_halved(engines_in(module))
        device = torch.device(self._mesh.device_type)
        place = Place(index, count, inputs, outputs, self._group, device, self.micro_batches, copies, encoded, halved)
        return TowpathStage(module, place, self._compression, self._passes_back, self._traced)

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
        """Compute the gradients of a batch, and return the mean loss of this data-parallel rank's batch.

        Every rank must call it. If the batch of any rank is refused, all ranks raise, and nothing was computed or sent.

        Args:
            args: What the first stage is called with, for all micro-batches. Other ranks may leave it out.
            target: What the loss is called with beside the output, for all micro-batches. Only the last stage reads it.

        Raises:
            StepError: A batch or target does not have the rows of all micro-batches, or ranks are in different calls.
        """
        with self._failures_told():
            before, began = self._seconds_computed, time.perf_counter()
            accumulating = self._passes_back.accumulating
            call = "step() inside no_sync()" if accumulating else "step()"
            losses = self._walk(call, self._schedule.step, args, target)
            self._observed.seconds_waited += time.perf_counter() - began - (self._seconds_computed - before)
            loss = self._mean_loss(losses)  # on its way while the gradients are
            if accumulating:
                self._accumulated += 1
                return loss()
            for engine in self._passes_back.engines:
                engine.end_boundary()
            if self._tied is not None:
                self._tied.end_step()
            self._observed.count_step(self._stages[0].engine.step - 1, self._accumulated)
            self._accumulated = 0
            return loss()

    @torch.no_grad()
    def evaluate(self, *args: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """The loss that `step` would return, without gradients. Every rank must call it."""
        with self._failures_told(), ExitStack() as stack:
            for stage in self._stages:
                stack.enter_context(stage.keeping_senders())
            return self._mean_loss(self._walk("evaluate()", self._schedule.eval, args, target))()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Return a context for the steps before the last one of an optimizer step.

        Inside, `step` accumulates gradients without a gradient sync. The first `step` outside delivers the sum over all
        these steps as `.grad`. Divide the loss by their number to get the mean. Every rank must enter it.
        """
        before, self._passes_back.accumulating = self._passes_back.accumulating, True
        try:
            yield
        finally:
            self._passes_back.accumulating = before

    def train(self, mode: bool = True) -> Pipeline:
        """Set the training mode of this rank's stages, as `nn.Module.train` does, and return the pipeline.

        Args:
            mode: False for the evaluation mode. Default: True.
        """
        for module in self.modules.values():
            module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set the evaluation mode of this rank's stages, as `nn.Module.eval` does, and return the pipeline."""
        return self.train(False)

    def _walk(
        self, call: str, walk: Callable[..., Any], args: tuple[torch.Tensor, ...], target: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """The losses of all micro-batches, on the rank of the last stage."""
        refusal = self._refusal(args, target)
        self._walks += 1
        self._passes_back.begin_step()
        for stage in self._stages:
            stage.begin_walk()
        # Also where the batch is refused: the next step would publish the same, and no copy of a stage waits for it.
        for engine in self._passes_back.engines:
            engine.param_sync()
        self._calls.agree(call, self._stages[0].engine.step, refusal)
        losses: list[torch.Tensor] = []
        own = [stage.stage_index for stage in self._stages]
        first, last = 0 in own, len(self.owners) - 1 in own
        with self._traced.walking():
            walk(*(args if first else ()), target=target if last else None, losses=losses, return_outputs=False)
        return losses

    def _refusal(self, args: tuple[torch.Tensor, ...], target: torch.Tensor | None) -> StepError | None:
        """Why this rank cannot take the batch. A rank also checks what it does not read: most are given all of it."""
        try:
            if args or 0 in self.modules:
                check_batch(args, self._example, self.micro_batches)
            if target is not None or len(self.owners) - 1 in self.modules:
                check_target(target, self._target_rows, self.micro_batches)
        except StepError as error:
            return error
        return None

    @property
    def _seconds_computed(self) -> float:
        return sum(stage.seconds_computed for stage in self._stages)

    @contextmanager
    def _failures_told(self) -> Generator[None]:
        try:
            yield
        except (TowpathError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a stage or the loss raises: the others wait for this rank
            raise StepError(self._failure(error)) from error

    def _failure(self, error: Exception) -> str:
        """With what the other stages say by now: a rank that is gone says nothing."""
        ranks, own, count = dist.get_process_group_ranks(self._group), sorted(self.modules), len(self.owners)
        kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        said = self._status_store.exchange(f"walk {self._walks}", f"{kind}{_first_line(error)}", _LAST_WORDS_SECONDS)
        lines: list[str] = []
        for place, rank in enumerate(ranks):
            stages = ", ".join(str(index) for index, owner in enumerate(self.owners) if owner == place)
            if rank != dist.get_rank():
                word = said.get(place, "has said nothing: it waits or works, or it is gone")
                lines.append(f"\n  rank {rank}, stage {stages}: {word}")
        return (
            f"rank {dist.get_rank()}: step {self._observed.steps + 1} failed in stage {', '.join(map(str, own))} of "
            f"{count}: {kind}{error}\n"
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

    def checkpoint_contents(self) -> RankContents:
        """For `towpath.checkpoint.State(pipeline, optimizer)`."""
        how = f"{self._compression} {list(self.owners)}"
        return parts_of(self._mesh, self._stages, self._tied, self._prefixes, how)

    def schedule(self, topology: Topology | None = None, step: int | None = None, accumulated: int = 0) -> JobSchedule:
        """Return every transfer of one step of the whole job. Every rank must call it: each knows its own stages only.

        Transfers of tensor-parallel layers are DTensor's, and are left out.

        Args:
            topology: The nodes and their ranks; detected by default.
            step: The optimizer step, counted from 0, for wires with `after=` or `until=`. By default all codecs serve.
            accumulated: How many steps inside `no_sync` the optimizer step begins with. Default: 0.
        """
        topology = topology or Topology.detect()
        members = tuple(dist.get_process_group_ranks(self._mesh["dp"].get_group()))
        mine = {
            s.stage_index: Stage(members, self.stage_schedule(s.stage_index, step, accumulated), s.handed_on)
            for s in self._stages
        }
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, mine, group=self._group)
        stages: dict[int, Stage] = {index: stage for each in gathered for index, stage in each.items()}
        pipeline = [stages[index] for index in sorted(stages)]
        if self._tied is not None:
            pipeline += self._tied.schedules((accumulated + 1) * self.micro_batches, self._passes(0, accumulated))
        pipelines: list[Any] = [pipeline]
        if "tp" in (self._mesh.mesh_dim_names or ()):
            pipelines = [None] * self._mesh["tp"].size()
            dist.all_gather_object(pipelines, pipeline, group=self._mesh["tp"].get_group())
        compression = self._compression if step is None else self._compression.at(step)
        return job_schedule(topology, pipelines, self.order, compression, accumulated + 1)

    def stage_schedule(self, index: int, step: int | None = None, accumulated: int = 0) -> Schedule:
        """What one of this rank's stages sends among its own ranks; `step` and `accumulated` as of `schedule`."""
        engine = next(stage.engine for stage in self._stages if stage.stage_index == index)
        strategy = engine.strategy if step is None else engine.strategy.at(step)
        units = tuple(unit.plan.spec for unit in engine.units)
        passes, count = self._passes(index, accumulated), (accumulated + 1) * self.micro_batches
        return derive_schedule(strategy, units, count, engine.precision, passes)

    def _passes(self, stage: int, accumulated: int = 0) -> list[StagePass]:
        own = [each for passes in self.order.values() for each in passes if each.stage == stage]
        return [
            replace(each, micro_batch=each.micro_batch + walk * self.micro_batches)
            for walk in range(accumulated + 1)
            for each in own
        ]

    def stats(self) -> Stats:
        """As `towpath.stats`, of all stages and what goes between them; messages between stages are exposed as long as
        this rank waited for any, and no seconds in flight are known of them. Every rank must call it."""
        return self._observed.stats()

    def sums(self) -> Sums:
        """Return the totals over all transfers so far. Every rank must call it.

        Use it in each step, because it takes less time than `stats`. A step counts once its gradients are delivered.
        """
        return self._observed.sums()

    def tracing(self) -> AbstractContextManager[Trace]:
        """As `towpath.tracing(model)`, of this rank's stages. Every rank must trace the same steps."""
        meshes = [Groups(self._mesh[name].get_group()) for name in self._mesh.mesh_dim_names or ()]
        job, _ = self._observed.job()
        crossing = {t.payload.unit: t.inter_bytes > 0 for t in job.transfers if t.kind is TransferKind.ACTIVATION}
        engines = [engine_of(module) for module in self._sharded_modules()]
        return self._traced.recording(engines, meshes, lambda stage: crossing.get(f"stage {stage}", True))

    def intervals_of_ranks(self, trace: Trace) -> dict[int, tuple[Interval, ...]]:
        """Return the intervals of all ranks' traces by rank, on rank 0. Every rank must call it.

        Args:
            trace: This rank's trace, after its `tracing` context has ended.
        """
        found = dict(zip(self._everyone.members, self._everyone.gather_objects(trace.intervals), strict=True))
        return {} if dist.get_rank() else found

    @property
    def running_trace(self) -> Trace | None:
        return self._traced.trace

    def _sharded_modules(self) -> Iterator[nn.Module]:
        yield from self.modules.values()
        if self._tied is not None and self._tied.module is not None:
            yield self._tied.module

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and also drop those accumulated inside `no_sync` since the last boundary.

        Args:
            set_to_none: Whether `.grad` becomes None instead of zero. Default: True.
        """
        self._accumulated = 0
        for module in self._sharded_modules():
            module.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_, of the gradients of all stages. Every rank must call it."""
        if not norm_type > 0:
            raise ShardError(f"Pipeline.clip_grad_norm_: norm_type = {norm_type}: expected a number above 0, or inf.")
        own = [p for p in self.parameters() if p.grad is not None]
        tied: Set[nn.Parameter] = self._tied.parameters if self._tied is not None else set()
        # Without a gradient the norm is a zero on the host, and a gradient may lie there: NCCL sums on the device.
        device = self._stages[0].device
        norm = total_norm([p.grad for p in own if p.grad is not None and p not in tied], norm_type).to(device)
        if tied:  # both ends have to ask, and one of them counts it
            shared = total_norm([p.grad for p in tied if p.grad is not None], norm_type).to(device)
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
def _alike(everyone: MeshRanks) -> Generator[list[str]]:
    """Let every rank refuse what one of them refuses: else they would wait for it. Yields lines, to be filled with what
    has to be the same on all of them."""
    with agreement(everyone, "Pipeline()", "Pass the same arguments to Pipeline on every rank.") as given:
        try:
            yield given
        except TowpathError:
            raise
        except Exception as error:  # whatever a user's module raises
            raise ShardError(f"a stage cannot be made: {type(error).__name__}: {error}") from error


def _status_store(groups: Groups) -> StatusStore:
    number: int = next(groups.shared("pipelines made", count_up))
    return StatusStore(f"{groups.name}/pipeline {number}", groups.rank, groups.world)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _module(stage: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    module = stage if isinstance(stage, nn.Module) else stage()
    if isinstance(module, ShardedModule):
        raise ShardError(
            f"Pipeline: a stage, {type(module).__name__}, is sharded already. Build it anew: Pipeline shards it."
        )
    return module


def _strategies(given: str | Strategy | Sequence[str | Strategy], count: int) -> Sequence[str | Strategy]:
    found = [given] * count if isinstance(given, (str, Strategy)) else given
    if len(found) != count:
        raise ShardError(f"Pipeline: {len(found)} strategies for {count} stages: pass one for all, or one for each.")
    if "auto" in found:
        raise ShardError(
            'Pipeline does not take the strategy "auto": name one for all stages, or one for each. `towpath plan` with '
            '--pipeline ranks them, and `towpath train` takes name = "auto" with pipelines, too.'
        )
    return found


def _changes(strategy: str | Strategy) -> set[int]:
    """The steps at which a codec of it begins or ceases to serve; those of a preset always serve."""
    if isinstance(strategy, str):
        return set()
    return {step for kind in TransferKind for step in strategy.transport(kind).changes}


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
