"""A model in pipeline stages on a device mesh, each sharded over its data-parallel ranks.

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    pipeline = Pipeline(stages, "zero1", mesh=mesh, micro_batches=8, loss=cross_entropy, example=tokens)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    for tokens, targets in batches:
        loss = pipeline.step(tokens, target=targets)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

Each stage has an engine of its own. Tied embeddings, which the first and the last stage share, have another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import count as count_up
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from towpath.api import shard
from towpath.checkpoint.local_state import LocalState
from towpath.core import presets
from towpath.core.formats import Dtype, Precision
from towpath.core.passes import Compression, StagePass, encoded_gradients
from towpath.core.passes import compression as compression_preset
from towpath.core.presets import NamedStrategy, StrategyLike
from towpath.core.queues import pipeline_communicator_bytes
from towpath.core.schedule import Schedule, sum_by_kind
from towpath.core.strategy import Strategy, TransferKind
from towpath.engine.comm import CommContext
from towpath.engine.executor import Engine, engine_of
from towpath.engine.layout import UnitChoice
from towpath.engine.parameters.initialise import Values
from towpath.engine.parameters.partial_sums import total_norm
from towpath.errors import ConfigError, ShardError, StepError, TowpathError
from towpath.observe.record import Trace
from towpath.observe.stats import Observable, Stats, StepCounter
from towpath.observe.totals import Totals
from towpath.observe.trace import Interval
from towpath.pipeline.agreement import (
    ACCUMULATE,
    EVALUATE,
    STEP,
    CallCheck,
    MeshRanks,
    Tensors,
    check_batch,
    check_exchanged,
    check_target,
    exchanged_tensors,
    shapes_of,
)
from towpath.pipeline.embedding_sync import TiedEmbeddings, find_tied_ends
from towpath.pipeline.schedules import (
    JobSchedule,
    StageSchedule,
    batched_by_group,
    job_schedule,
    order_of,
    owners_of,
    schedule_class,
)
from towpath.pipeline.splitting import blocks_of_stage
from towpath.pipeline.stage import TowpathStage, local_state_of, name_prefixes, schedule_of
from towpath.sharded_module import ShardedModule
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups, detect_shape
from towpath.topology.store import StatusStore
from towpath.topology.together import together

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

Loss = Callable[[Any, Any], torch.Tensor]

_SAME = "Pass the same arguments to Pipeline on every rank."
# How long a rank whose step has failed waits for the other ranks' reports of theirs.
_REPORT_SECONDS = 2.0


class Pipeline(Observable):
    """A model in stages, sharded and trained by a schedule of `torch.distributed.pipelining`.

    Gradients are means over all micro-batches and data-parallel ranks. `towpath.stats`, `towpath.tracing.trace` and
    `towpath.checkpoint.State` take a pipeline in place of a model.

    Args:
        stages: All stages of the model in order, each a module or a function that returns one. A rank calls only the
            functions of its own stages. Each stage is called with what the previous one returns, a tensor or a tuple of
            tensors. `split` cuts a model into stages.
        strategy: The strategy of the stages, as for `towpath.shard`: one for all, or one for each.
        mesh: A mesh with the dimensions 'pp' and 'dp'. Ranks that differ only in 'dp' hold the same stages. A mesh with
            tensor-parallel stages also has 'tp'.
        schedule: One of `SCHEDULES`. Default: 1F1B.
        micro_batches: The number of micro-batches of a step. Each batch is split along its first dimension.
        loss: Called with the output of the last stage and the target of a micro-batch. It returns the mean loss.
        example: The input of the first stage for one micro-batch. Only shapes and dtypes matter.
        precision: The dtypes, as for `towpath.shard`.
        units: The units of each stage, as for `towpath.shard`.
        compression: A `Compression` or the name of a preset, such as 'optimus-cb+fe+sc'. Use it if links between stages
            are slow. Default: none.
        tied: The names of the modules of the first and the last stage that share their parameter. By default, what
            `split` has found. The shared module is sharded by itself over the ranks of both stages.
        values: The values of the parameters, as for `towpath.shard`. Names are those in the stage's module.

    Attributes:
        micro_batches: The number of micro-batches of a step.
        owners: The rank in 'pp' that has each stage.
        order: The passes of each rank in 'pp', in order.

    Raises:
        ShardError: The arguments do not fit together, or differ between ranks. All ranks raise it.
        ConfigError: The strategy or the compression is unknown or invalid. Or the strategy is for another number of
            ranks.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | Callable[[], nn.Module]],
        strategy: StrategyLike | Sequence[StrategyLike],
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
        self._everyone = MeshRanks(mesh)
        self._ranks = self._everyone.groups["pp"]
        self._ranks.connect()  # the first messages are between two stages only
        ranks, count = self._ranks.world, len(stages)
        self._example: Tensors = (example,) if isinstance(example, torch.Tensor) else tuple(example)
        self._topology = Topology(*detect_shape(self._everyone))
        self._topology.check_equal("a pipeline")
        with together(self._everyone, "Pipeline()", _SAME) as given:
            precision = Precision.of(precision)
            self._compression = compression if isinstance(compression, Compression) else compression_preset(compression)
            kind = schedule_class(schedule)
            self.owners = owners_of(kind, count, ranks, schedule)
            self.order = order_of(kind, count, ranks, micro_batches)
            strategies = _strategies(strategy, count)
            given += [f"schedule={kind.__name__.removeprefix('Schedule')}", f"micro_batches={micro_batches}"]
            given += [f"stage {i}: {blocks_of_stage(s) or 'given'}, {strategies[i]}" for i, s in enumerate(stages)]
            given += [f"example={shapes_of(self._example)}", f"precision={precision}", f"tied={tied}"]
            given += [f"compression.{f.name}={getattr(self._compression, f.name)}" for f in fields(Compression)]
            given += [f"mesh={mesh.mesh.tolist()}"]
        with together(self._everyone, "Pipeline()", _SAME):
            modules = {i: _module(stages[i]) for i, owner in enumerate(self.owners) if owner == dist.get_rank(group)}
        with together(self._everyone, "Pipeline()", _SAME) as given:
            exchanged, self._sent = exchanged_tensors(modules, count, self._example, precision, self._everyone)
            given += [f"shares between stages: {[t for t in each if t.shares > 1]}" for each in self._sent]
            check_exchanged(self._sent, self._compression)
            self._target_rows = {t.shape[0] for t in (*self._example, *exchanged[-1]) if t.dim()}
            self._prefixes = name_prefixes(modules, count, group)
            ends = find_tied_ends(tied, modules, self.owners, mesh)
        self._stages: list[TowpathStage] = []
        copies = mesh["dp"].get_group()
        gradients, backend = group, self._ranks.backend(torch.device(mesh.device_type))
        if ranks > 1:
            gradients = self._ranks.of((tuple(range(ranks)),), "gradients between stages", backend)
        with together(self._everyone, "Pipeline()", _SAME):
            fused = self._compression.fused_embeddings
            self._tied = None if ends is None else TiedEmbeddings(ends, modules, mesh, precision, fused, values)
            for index, module in modules.items():
                own = self._strategy_of(strategies[index], index)
                shard(module, own, group=copies, precision=precision, units=units, values=values)
                stage = TowpathStage(
                    module,
                    index,
                    count,
                    mesh,
                    inputs=exchanged[index],
                    outputs=exchanged[index + 1],
                    received=self._sent[index],
                    sent=self._sent[index + 1],
                    micro_batches=micro_batches,
                    compression=self._compression,
                    encoded=encoded_gradients(self.order, self._compression),
                    gradients=gradients,
                )
                self._stages.append(stage)
        run: Any = self._stages[0] if issubclass(kind, PipelineScheduleSingle) else self._stages
        # The engines divide the gradients.
        self._schedule: Any = kind(run, micro_batches, loss_fn=loss, scale_grads=False)
        groups = [groups for name, groups in self._everyone.groups.items() if name != "dp"]
        # The steps at which a codec begins or ends. All ranks plan the schedule after each of them.
        own_changes = set().union(*(engine.strategy.changes for engine in self.engines))
        changes = self._compression.changes.union(*self._ranks.all_gather_objects(own_changes))
        self._counter = StepCounter(self.engines, partial(self.schedule, None), changes, groups)
        self._accumulated = 0  # steps inside no_sync since the last boundary
        self._unfinished = ""  # the call that runs, or has failed while it ran
        number: int = next(self._ranks.shared("pipelines made", count_up))
        self._reports = StatusStore(f"{self._ranks.name}/pipeline {number}", self._ranks.rank, ranks)
        self._calls, self._walks = CallCheck(self._everyone), 0  # runs of the whole schedule, in evaluations too

    def _strategy_of(self, strategy: StrategyLike, stage: int) -> StrategyLike:
        """Return the strategy of a stage, with the codec of gradients if the compression has one for the stage."""
        named = presets.strategy(strategy) if isinstance(strategy, str) else strategy
        if isinstance(named, NamedStrategy):
            named = named.on(Topology(*detect_shape(self._everyone.groups["dp"])))
        return self._compression.strategy_of(named, stage, len(self.owners))

    # Modules and parameters -----------------------------------------------------------------------------------------

    @property
    def modules(self) -> dict[int, nn.Module]:
        """The stages of this rank, by their number."""
        return {stage.stage_index: stage.submod for stage in self._stages}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name and the parameter for each parameter of this rank's stages.

        If two stages have a name in common, all names begin with the number of their stage. A parameter that two stages
        share is yielded once.
        """
        seen = set[nn.Parameter]()
        for index, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield f"{self._prefixes[index]}{name}", parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

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

    # Steps ----------------------------------------------------------------------------------------------------------

    def step(self, *args: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the gradients of a batch, and return the mean loss of this data-parallel rank's batch.

        Every rank must call it. If one rank refuses its batch, all ranks raise, and nothing was computed or sent.

        Args:
            args: The inputs of the first stage, for all micro-batches. Other ranks may leave them out.
            target: The target of the loss, for all micro-batches. Only the rank of the last stage reads it.

        Raises:
            StepError: A batch or target does not have the rows of all micro-batches, ranks are in different calls, or
                an earlier call has failed on some rank after it began to compute.
        """
        with self._report_failures():
            before, began = self._seconds_computed, time.perf_counter()
            accumulating = self._stages[0].accumulating
            losses = self._walk(ACCUMULATE if accumulating else STEP, self._schedule.step, args, target)
            self._counter.seconds_waited += time.perf_counter() - began - (self._seconds_computed - before)
            loss = self._mean_loss(losses)  # sent while the gradients are
            if accumulating:
                self._accumulated += 1
                return loss()
            with self._tied.summing() if self._tied is not None else nullcontext():
                for engine in self.engines:
                    engine.end_boundary()
            self._counter.count_step(self._stages[0].engine.step - 1, self._accumulated)
            self._accumulated = 0
            return loss()

    @torch.no_grad()
    def evaluate(self, *args: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss that `step` would return, without gradients. Every rank must call it.

        Args:
            args: The inputs of the first stage, as for `step`.
            target: The target of the loss, as for `step`.

        Raises:
            StepError: As for `step`.
        """
        with self._report_failures(), ExitStack() as stack:
            for stage in self._stages:
                stack.enter_context(stage.keeping_senders())
            return self._mean_loss(self._walk(EVALUATE, self._schedule.eval, args, target))()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Return a context for the steps before the last one of an optimizer step.

        Inside, `step` accumulates gradients without a gradient sync. The first `step` outside delivers the sum over all
        these steps as `.grad`. Divide the loss by their number to get the mean. Every rank must enter it.
        """
        before = self._stages[0].accumulating
        for stage in self._stages:
            stage.accumulating = True
        try:
            yield
        finally:
            for stage in self._stages:
                stage.accumulating = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and also drop those accumulated inside `no_sync` since the last boundary.

        Args:
            set_to_none: Whether `.grad` becomes None instead of zero. Default: True.
        """
        self._forget_accumulated()
        for engine in self.engines:
            engine.discard()
        for stage in self._stages:
            nn.Module.zero_grad(stage.submod, set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all stages by their total norm, and return the norm. Every rank must call it.

        It replaces `torch.nn.utils.clip_grad_norm_`, which knows this rank's stages only.

        Args:
            max_norm: The largest norm. Use `inf` to compute the norm alone.
            norm_type: The order of the norm, above 0 or `inf`. Default: 2.

        Raises:
            ShardError: `norm_type` is not above 0.
        """
        if not norm_type > 0:
            raise ShardError(f"Pipeline.clip_grad_norm_: norm_type = {norm_type}: expected a number above 0, or inf.")
        own = [p for p in self.parameters() if p.grad is not None]
        tied: Set[nn.Parameter] = self._tied.parameters if self._tied is not None else set()
        # The norm of no gradients, or of gradients on the host, is on the host. NCCL needs it on the device.
        device = self._stages[0].device
        norm = total_norm([p.grad for p in own if p.grad is not None and p not in tied], norm_type).to(device)
        if self._tied is not None and tied:  # both ends compute it, and one of them counts it
            shared = total_norm([p.grad for p in tied if p.grad is not None], norm_type).to(device)
            if self._tied.counted_here:
                norm = torch.linalg.vector_norm(torch.stack([norm, shared]), norm_type)
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
        else:
            norm = norm.pow(norm_type)
            dist.all_reduce(norm, group=self._group)
            norm = norm.pow(1 / norm_type)
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)
        return norm

    def _walk(
        self, call: str, walk: Callable[..., Any], args: tuple[torch.Tensor, ...], target: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Run the whole schedule. Return the losses of all micro-batches, or [] on ranks without the last stage."""
        first, last = 0 in self.modules, len(self.owners) - 1 in self.modules
        refusal: StepError | None = None
        try:
            # A rank also checks what it does not read, because most ranks get the whole batch.
            if args or first:
                check_batch(args, self._example, self.micro_batches)
            if target is not None or last:
                check_target(target, self._target_rows, self.micro_batches)
        except StepError as error:
            refusal = error
        if self._unfinished:
            # PyTorch's schedule still has losses of the failed call, and the next messages would be taken for its own.
            refusal = StepError(
                f"rank {dist.get_rank()}: {self._unfinished} has failed, and messages of it may still arrive. A "
                "pipeline cannot go on after that: let the error end the program, or build the Pipeline again and load "
                "a checkpoint."
            )
            self._calls.check(call, self._stages[0].engine.step, refusal)
        self._walks += 1
        for stage in self._stages:
            stage.begin_walk()
        # Also for a refused batch: the next step would send the same, and no rank with the same stage waits for it.
        for engine in self.engines:
            engine.param_sync()
        self._calls.check(call, self._stages[0].engine.step, refusal)
        self._unfinished = f"Pipeline.{call} of step {self._stages[0].engine.step + 1}"
        losses: list[torch.Tensor] = []
        trace = self._stages[0].active_trace
        with batched_by_group(), nullcontext() if trace is None else trace.phase("for neighbors", waiting=True):
            walk(*(args if first else ()), target=target if last else None, losses=losses, return_outputs=False)
        return losses

    @property
    def _seconds_computed(self) -> float:
        return sum(stage.seconds_computed for stage in self._stages)

    def _mean_loss(self, losses: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Begin to send the mean loss from the last stage to all others. Return a function that waits for it."""
        device = self._stages[0].device
        mean = torch.zeros((), dtype=torch.float64, device=device)
        if losses:
            mean = torch.stack([loss.detach() for loss in losses]).mean().double().to(device)
        sent = dist.broadcast(mean, group=self._group, group_src=self.owners[-1], async_op=True)

        def arrived() -> torch.Tensor:
            if sent is not None:
                sent.wait()
            return mean

        return arrived

    @contextmanager
    def _report_failures(self) -> Generator[None]:
        """Raise errors that are not Towpath's as `StepError`, with the reports of the other ranks."""
        try:
            yield
            self._unfinished = ""
        except (TowpathError, torch.OutOfMemoryError) as error:
            if self._unfinished:  # the others may wait for messages of this rank, and then ask for its report
                self._reports.exchange(f"walk {self._walks}", str(error).partition("\n")[0], 0.0)
            raise
        except Exception as error:  # whatever a stage or the loss raises, because the others wait for this rank
            ranks, own, count = dist.get_process_group_ranks(self._group), sorted(self.modules), len(self.owners)
            kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
            first_line = str(error).partition("\n")[0]
            reports = self._reports.exchange(f"walk {self._walks}", f"{kind}{first_line}", _REPORT_SECONDS)
            lines: list[str] = []
            for place, rank in enumerate(ranks):
                stages = ", ".join(str(index) for index, owner in enumerate(self.owners) if owner == place)
                if rank != dist.get_rank():
                    word = reports.get(place, "has said nothing: it waits or works, or it is gone")
                    lines.append(f"\n  rank {rank}, stage {stages}: {word}")
            raise StepError(
                f"rank {dist.get_rank()}: step {self._counter.steps + 1} failed in stage {', '.join(map(str, own))} of "
                f"{count}: {kind}{error}\n"
                "If this speaks of a connection or of time, a rank of the pipeline has died, hangs or has lost its "
                f"link (`towpath doctor` examines the network). The others:{''.join(lines)}"
            ) from error

    # Schedules, stats, traces ---------------------------------------------------------------------------------------

    def schedule(self, topology: Topology | None = None, step: int | None = None, accumulated: int = 0) -> JobSchedule:
        """Return every transfer of one step of the whole job. Every rank must call it: each knows its own stages only.

        Transfers of tensor-parallel layers are DTensor's, and are left out. Gathers of the shares of messages are not.

        Args:
            topology: The nodes of the pipeline's ranks; detected by default. They are numbered from 0, also if the job
                has more.
            step: The optimizer step, counted from 0, for transports with `after=` or `until=`. By default, all codecs
                are used.
            accumulated: How many steps inside `no_sync` the optimizer step begins with. Default: 0.
        """
        members = tuple(self._everyone.groups["dp"].members)
        mine = {
            index: [StageSchedule(members, self.stage_schedule(index, step, accumulated), self._sent[index + 1])]
            for index in self.modules
        }
        if self._tied is not None and self._tied.counted_here:  # after the stages
            walks = accumulated + 1
            mine[len(self.owners)] = self._tied.schedules(walks * self.micro_batches, self._passes(0, accumulated))
        stages = {index: parts for each in self._ranks.all_gather_objects(mine) for index, parts in each.items()}
        numbers = {rank: number for number, rank in enumerate(self._everyone.members)}
        pipeline = [
            replace(part, ranks=tuple(numbers[rank] for rank in part.ranks))
            for index in sorted(stages)
            for part in stages[index]
        ]
        pipelines = [pipeline]
        if "tp" in self._everyone.groups:
            pipelines = self._everyone.groups["tp"].all_gather_objects(pipeline)
        compression = self._compression if step is None else self._compression.at(step)
        return job_schedule(topology or self._topology, pipelines, self.order, compression, accumulated + 1)

    def stage_schedule(self, index: int, step: int | None = None, accumulated: int = 0) -> Schedule:
        """Return the transfers of one of this rank's stages among its own ranks.

        Args:
            index: The number of the stage.
            step: The optimizer step, as for `schedule`.
            accumulated: How many steps inside `no_sync` the optimizer step begins with. Default: 0.
        """
        passes, count = self._passes(index, accumulated), (accumulated + 1) * self.micro_batches
        return schedule_of(engine_of(self.modules[index]), count, passes, step)

    def _passes(self, stage: int, accumulated: int = 0) -> list[StagePass]:
        own = [each for passes in self.order.values() for each in passes if each.stage == stage]
        return [
            replace(each, micro_batch=each.micro_batch + walk * self.micro_batches)
            for walk in range(accumulated + 1)
            for each in own
        ]

    def stats(self) -> Stats:
        """Return what `towpath.stats` returns for a model, of all stages and the messages between them.

        The seconds of messages are those in which this rank waited for any of them. The time that they are in flight is
        not measured. Steps count once their gradients are delivered. Every rank must call it.
        """
        found, form = self._counter.stats(), self._stages[0].engine.comm.form
        messages = {"communicators": pipeline_communicator_bytes(self._ranks.world, form)}
        return replace(found, memory_bytes=sum_by_kind([found.memory_bytes, messages]))

    def totals(self) -> Totals:
        """Return the counts of all transfers so far. Every rank must call it.

        Use it in each step, because it takes less time than `stats`.
        """
        return self._counter.totals()

    @property
    def engines(self) -> list[Engine]:
        """The engines of this rank's stages, and of tied embeddings that are sharded by themselves."""
        return [engine for stage in self._stages for engine in stage.engines]

    @property
    def comms(self) -> list[CommContext]:
        """The communication of the engines of this rank."""
        return [engine.comm for engine in self.engines]

    def trace_groups(self) -> list[Groups]:
        """Find out which messages leave a node. Return the groups through which all ranks meet."""
        transfers = self.schedule().transfers
        for stage in self._stages:
            stage.leave_node = {t.unit for t in transfers if t.kind is TransferKind.ACTIVATION and t.inter_bytes}
        return [*self._everyone.groups.values()]

    def intervals_of_ranks(self, trace: Trace) -> dict[int, tuple[Interval, ...]]:
        """Return the intervals of all ranks' traces by rank, on the mesh's first rank. Every rank must call it.

        Args:
            trace: This rank's trace, after its `trace` context has ended.
        """
        found = dict(zip(self._everyone.members, self._everyone.all_gather_objects(trace.intervals), strict=True))
        return found if dist.get_rank() == self._everyone.members[0] else {}

    def local_state(self) -> LocalState:
        """Return what this rank has of a checkpoint, for `towpath.checkpoint.State(pipeline, optimizer)`."""
        # Senders keep the same, whenever their codecs are in use, and whatever else the compression does.
        sent = self._compression.activation_gradients, self._compression.activations
        how = f"{[replace(each, until=0, after=0) for each in sent]} {list(self.owners)} {self._sent}"
        local = local_state_of(self._mesh, self._stages, self._tied, self._prefixes, how)
        return replace(local, dropped=self._forget_accumulated)

    def _forget_accumulated(self) -> None:
        self._accumulated = 0


def _module(stage: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    try:
        module = stage if isinstance(stage, nn.Module) else stage()
    except Exception as error:  # whatever a user's function raises
        raise ShardError(f"a stage cannot be made: {type(error).__name__}: {error}") from error
    if isinstance(module, ShardedModule):
        raise ShardError(
            f"Pipeline: a stage, {type(module).__name__}, is sharded already. Build it anew: Pipeline shards it."
        )
    return module


def _strategies(given: StrategyLike | Sequence[StrategyLike], count: int) -> Sequence[StrategyLike]:
    found = [given] * count if isinstance(given, (str, NamedStrategy, Strategy)) else given
    if len(found) != count:
        raise ShardError(f"Pipeline: {len(found)} strategies for {count} stages: pass one for all, or one for each.")
    if "auto" in found:
        raise ShardError(
            'Pipeline does not take the strategy "auto": name one for all stages, or one for each. `towpath plan` with '
            '--pipeline ranks them, and `towpath train` takes name = "auto" with pipelines, too.'
        )
    for each in found:
        outer = each.options.get("outer") if isinstance(each, NamedStrategy) else getattr(each, "outer", None)
        if outer is not None and not isinstance(each, str):
            raise ConfigError(
                f"{each.name} has outer steps, and pipelines cannot: a pipeline would have to end at the border of an "
                "island. Leave out outer=, or train without stages."
            )
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
        # PyTorch sorts the ranks of a group, and the number of a stage is the place of its rank in the group.
        if bool((mesh.mesh.diff(dim=names.index(name)) < 0).any()):
            raise ShardError(
                f"Pipeline: along {name!r} the ranks of the mesh have to ascend, as those of init_device_mesh() do; "
                f"got {mesh.mesh.tolist()}."
            )
