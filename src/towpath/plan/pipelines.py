"""The planner for pipelines: it places stages on a cluster's ranks, shards each among its copies, and simulates them.

Ranks are numbered as `init_device_mesh(device, (pipeline, copies, tensor))` numbers them. The ranks of a stage are
neighbors, and so are the ranks that share a layer. A tensor-parallel layer costs what it does in PyTorch: two sums over
activations in each pass of a block. These sums stay inside a node, or the layout is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

from towpath.core import presets
from towpath.core.formats import Precision, item_bytes, wide
from towpath.core.passes import (
    SCHEDULES,
    Compression,
    Order,
    Walk,
    asked_of_micro_batches,
    most_in_flight,
    owners,
    plain_walk,
)
from towpath.core.passes import compression as named_compression
from towpath.core.queues import pipeline_communicator_bytes
from towpath.core.routes import Grid, Op
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.strategy import Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.unit_plan import UnitPlan, plan_unit
from towpath.core.units import BucketSpec, StageOutput, UnitSpec
from towpath.errors import PlanError
from towpath.plan.hardware import Cluster
from towpath.plan.model import (
    Model,
    ModelUnit,
    StagedModel,
    activation_bytes,
    compute_seconds,
    engine_bytes,
    kept_bytes,
    optimizer_seconds,
)
from towpath.plan.replay import ComputeSeconds, Replay, ReplayedStep, SimulatedStage
from towpath.plan.request import Batching, Prediction, Request
from towpath.plan.solver import Candidate, Solver, plans_of
from towpath.plan.transfer_costs import MoveShape, TransferShape, phase_costs, seconds_alone
from towpath.topology.cluster import Topology

# For each batching, so many strategies of the copies of a stage are simulated: those of the least bounds that fit.
MOST_STRATEGIES = 8
# If a step has many micro-batches, these multiples of the pipeline's ranks are replayed. The rest is extrapolated.
_REPLAYED = 2, 3


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is distributed over a pipeline. All ranks that are left hold copies.

    Args:
        pipeline: Number of ranks that a micro-batch passes through.
        schedule: The name of the schedule.
        strategy: The strategy that shards each stage among its copies: a preset with its options, or a `Strategy` for
            the topology of the copies.
        compression: The compression of messages between stages, or the name of a preset.
        tensor: Number of ranks that share each layer.
    """

    pipeline: int
    schedule: str = "1F1B"
    strategy: str | Strategy = "ddp"
    compression: str | Compression = "none"
    tensor: int = 1

    @property
    def stages(self) -> int:
        """Number of stages. Some schedules have several stages on each rank."""
        return self.pipeline * SCHEDULES[self.schedule]

    @property
    def plain_compression(self) -> Compression:
        """The compression that `compression` is, or stands for."""
        named = self.compression
        return named if isinstance(named, Compression) else named_compression(named)

    def __str__(self) -> str:
        parts = f" × {self.tensor} tensor-parallel" if self.tensor > 1 else ""
        packed = f", {self.compression}" if self.compression != "none" else ""
        name = self.strategy
        if isinstance(name, Strategy):
            name = f"{name.name} exact" if name.is_exact else name.name
        return f"{self.stages} stages on {self.pipeline}{parts}, {self.schedule}, {name}{packed}"


@dataclass(kw_only=True)
class PipelinePrediction(Prediction):
    """The predicted optimizer step of a pipeline.

    `computing` is the mean over ranks. `exposed` is that of the rank that waits longest, and `memory` that of the rank
    that needs most.
    """

    layout: Layout  # how the model is distributed
    copies: int  # number of copies of each stage
    idle: float  # the share of the step in which a rank does not compute, on average

    def sequences(self, world: int) -> int:
        """Return the sequences of a step. All copies together compute them, whatever `world` is."""
        return self.batching.micro_batch * self.batching.micro_steps * self.copies


class Pipelines:
    """Predicts and ranks pipelines for a model on a cluster.

    `staged` returns the model in some number of stages, such as `Transformer.staged`. `walks` returns the order and
    the walk of a schedule, given its name and the numbers of ranks and micro-batches. The default needs no torch.
    """

    def __init__(
        self,
        staged: Callable[[int], StagedModel],
        cluster: Cluster,
        request: Request,
        walks: Callable[[str, int, int], tuple[Order, Walk]] = plain_walk,
    ) -> None:
        self._staged, self.request, self._walks = cache(staged), request, walks
        self.cluster = cluster
        self._topology = cluster.hardware.topology
        self._plans = cache(self._plans_of)
        self._solver_of_stage = cache(self._solver_of_largest_stage)

    def solve(self, layouts: Sequence[Layout], best: int = 10) -> list[PipelinePrediction]:
        """Return the best strategies for the copies of stages that fit into memory, the fastest first.

        `layouts` says how the model may be distributed. Their strategies do not count.
        """
        found: list[PipelinePrediction] = []
        for layout, batching in sorted(self._candidates(layouts), key=lambda each: self._bound(*each)):
            ordinary = sorted(p.seconds for p in found if not p.is_launch_bound)
            # A layout whose computation alone takes longer than the best steps is not simulated.
            if len(ordinary) >= best and self._bound(layout, batching) >= ordinary[best - 1]:
                break
            found.append(self.predict(layout, batching))
        return sorted(found, key=lambda p: p.order)[:best]

    def _candidates(self, layouts: Sequence[Layout]) -> Iterator[tuple[Layout, Batching]]:
        """Yield the most promising strategies for the copies of each layout's stages that fit into memory.

        They are ranked as without a pipeline: by the bound of the largest stage, if it was all there is.
        """
        for layout in layouts:
            by_batching: defaultdict[Batching, list[Candidate]] = defaultdict(list)
            solver = self._solver_of_stage(layout.stages, layout.pipeline, layout.tensor)
            for candidate in solver.candidates:
                if not asked_of_micro_batches(layout.schedule, layout.pipeline, candidate.batching.micro_steps):
                    by_batching[candidate.batching].append(candidate)
            for batching, candidates in by_batching.items():
                ordered = sorted(candidates, key=solver.bound)
                made = (replace(layout, strategy=solver.candidates.strategy(each)) for each in ordered)
                found = list(islice((each for each in made if self._fits(each, batching)), MOST_STRATEGIES))
                # The fastest routes need more memory. The plain ones of zero3 may fit where nothing else does.
                plain = replace(layout, strategy="zero3 route=flat")
                if not found and not self.request.exact and self._fits(plain, batching):
                    found = [plain]
                yield from ((each, batching) for each in found)

    def _fits(self, layout: Layout, batching: Batching) -> bool:
        return sum(self._memory(layout, batching).values()) <= self.request.memory

    def _solver_of_largest_stage(self, stages: int, pipeline: int, tensor: int) -> Solver:
        """Return the solver for the largest stage among its copies."""
        largest = max(self._staged(stages).stages, key=lambda model: model.parameters)
        hardware = replace(self.cluster.hardware, topology=self._stage_topology(Layout(pipeline, tensor=tensor)))
        request = replace(self.request, weights=(), gradients=())
        return Solver(_tensor_share(largest, tensor), replace(self.cluster, hardware=hardware), request)

    def _bound(self, layout: Layout, batching: Batching) -> float:
        """Return a lower bound on the step time, from computation alone.

        A rank computes all micro-batches. If it has one stage, it also waits while the other stages compute one
        micro-batch, before its own work or after it.
        """
        staged = self._staged(layout.stages)
        tokens, again = batching.micro_batch * staged.model.length, batching.checkpointing
        dtype = self.request.compute_dtype
        each = [
            compute_seconds(_tensor_share(model, layout.tensor), self.cluster, dtype, tokens, again).micro_step
            for model in staged.stages
        ]
        if layout.stages == layout.pipeline:
            return sum(each) + (batching.micro_steps - 1) * max(each)
        return batching.micro_steps * sum(each) / layout.pipeline

    def check(self, layout: Layout, batching: Batching) -> None:
        """Check that a pipeline can run this layout with these micro-batches."""
        self.strategy(layout)
        if needed := asked_of_micro_batches(layout.schedule, layout.pipeline, batching.micro_steps):
            raise PlanError(
                f"{layout.schedule} of {layout.pipeline} ranks asks for {needed}; got {batching.micro_steps}."
            )

    def copies(self, layout: Layout) -> int:
        """Return how many copies of each stage the job has. Raise PlanError if the ranks cannot be divided so."""
        topology, together = self._topology, layout.pipeline * layout.tensor
        if topology.world % together:
            raise PlanError(
                f"{layout.pipeline} ranks of a pipeline × {layout.tensor} tensor-parallel ones: expected a divisor of "
                f"the cluster's {topology.world} ranks."
            )
        if topology.ranks_per_node % layout.tensor:
            raise PlanError(
                f"{layout.tensor} tensor-parallel ranks do not divide a node's {topology.ranks_per_node}: their sums "
                "would leave the node."
            )
        of_a_stage = topology.world // layout.pipeline
        if of_a_stage % topology.ranks_per_node and topology.ranks_per_node % of_a_stage:
            raise PlanError(
                f"{layout.pipeline} ranks of a pipeline: the {of_a_stage} ranks of a stage would lie unevenly on nodes "
                f"of {topology.ranks_per_node}."
            )
        return topology.world // together

    def strategy(self, layout: Layout) -> Strategy:
        """Return the strategy of all stages, before the compression adds codecs to some of them."""
        topology = self._stage_topology(layout)
        if isinstance(layout.strategy, Strategy):
            if layout.strategy.topology != topology:
                raise PlanError(
                    f"strategy {layout.strategy.name} is for {layout.strategy.topology} ranks. The copies of a stage "
                    f"are on {topology}."
                )
            return layout.strategy
        return presets.parse_strategy(layout.strategy, topology)

    # One layout -----------------------------------------------------------------------------------------------------

    def predict(self, layout: Layout, batching: Batching) -> PipelinePrediction:
        """Simulate one optimizer step of a pipeline.

        Of many micro-batches, only the first few are simulated. The step may need more memory than there is.
        """
        few, many = (times * layout.pipeline for times in _REPLAYED)
        found = self.replay(layout, replace(batching, micro_steps=min(batching.micro_steps, many))).combined()
        if batching.micro_steps > many:  # each further micro-batch adds as much
            shorter = self.replay(layout, replace(batching, micro_steps=few)).combined()
            found = found.with_more((batching.micro_steps - many) / (many - few), shorter)
        return PipelinePrediction(
            **found.figures(),
            strategy=self.strategy(layout),
            batching=batching,
            computing=found.computed,
            memory=self._memory(layout, batching),
            layout=layout,
            copies=self.copies(layout),
            idle=max(0.0, 1 - found.computed / found.seconds),
        )

    def replay(self, layout: Layout, batching: Batching) -> ReplayedStep:
        """Simulate every micro-batch of a step. Use it for traces."""
        staged = self._staged(layout.stages)
        order, walk = self._walks(layout.schedule, layout.pipeline, batching.micro_steps)
        stages, tied = self._stages(layout, batching, order), list(self._tied(layout, staged))
        return Replay(stages, self.cluster.hardware, walk, layout.plain_compression, tied).run()

    def _ranks(self, layout: Layout, home: int) -> tuple[int, ...]:
        each = self.copies(layout) * layout.tensor
        return tuple(range(home * each, (home + 1) * each))

    def _stage_topology(self, layout: Layout) -> Topology:
        """Return the topology of the copies of one tensor-parallel part of a stage."""
        return self._topology.of(self._ranks(layout, 0)[:: layout.tensor])

    def _stages(self, layout: Layout, batching: Batching, order: Order) -> list[SimulatedStage]:
        staged, homes = self._staged(layout.stages), owners(order)
        stages: list[SimulatedStage] = []
        for index in range(layout.stages):
            strategy = layout.plain_compression.strategy_of(self.strategy(layout), index, layout.stages)
            model = _tensor_share(staged.stages[index], layout.tensor)
            stages.append(
                SimulatedStage(
                    strategy,
                    self._plans(model, strategy),
                    self._seconds(layout, model, staged.width, strategy, batching),
                    self._ranks(layout, homes[index]),
                    (self._output(layout, staged, batching),) if index < layout.stages - 1 else (),
                    layout.tensor,
                )
            )
        return stages

    def _output(self, layout: Layout, staged: StagedModel, batching: Batching) -> StageOutput:
        """Return the tensor that stages send. All tensor-parallel ranks have it, as Megatron splits layers."""
        shape = batching.micro_batch, staged.model.length, staged.width
        return StageOutput.on(layout.tensor, shape, self.request.compute_dtype)

    def _plans_of(self, model: Model, strategy: Strategy) -> list[UnitPlan]:
        return plans_of(model, strategy, self.request.precision, self.cluster.hardware.form)

    def _seconds(
        self, layout: Layout, model: Model, width: int, strategy: Strategy, batching: Batching
    ) -> ComputeSeconds:
        request, hardware, tokens = self.request, self.cluster.hardware, batching.micro_batch * model.length
        seconds = compute_seconds(model, self.cluster, request.compute_dtype, tokens, batching.checkpointing)
        elements = model.trainable / strategy.placement.optimizer.size
        optimizer = optimizer_seconds(elements, request.own, request.optimizer, hardware)
        seconds = replace(seconds, optimizer=optimizer)
        if layout.tensor == 1:
            return seconds
        # The sums of tensor-parallel layers use a ring, while nothing else uses the links inside the node.
        shape = MoveShape(Op.ALL_REDUCE, 1, Grid(1, layout.tensor), 1)
        moved = TransferShape.of_move(shape, Transport(), tokens * width, request.compute_dtype, hardware.form)
        summed = seconds_alone(phase_costs(moved, hardware), hardware)
        sums = [2 * summed * unit.modules * (not unit.spec.root and not unit.spec.leaf) for unit in model.units]
        return replace(
            seconds,
            forward=[a + b for a, b in zip(seconds.forward, sums, strict=True)],
            backward=[a + b for a, b in zip(seconds.backward, sums, strict=True)],
        )

    def _tied(self, layout: Layout, staged: StagedModel) -> Iterator[tuple[Transfer, int]]:
        """Yield the sums of the gradients of tied embeddings, and how many groups do each of them.

        Fused, it is one sum over the ranks of both ends. Otherwise each end has its own sum, and another one follows
        between each two copies.
        """
        if not staged.tied:
            return
        strategy, spec = self._tied_unit(layout, staged)
        fused = layout.plain_compression.fused_embeddings
        yield from (
            (transfer, layout.tensor * (1 if fused else 2))
            for transfer in derive_schedule(strategy, (spec,), 1, self.request.precision).transfers
        )
        if not fused:
            # The delivered gradients are summed in their own dtype.
            between = derive_schedule(presets.strategy("ddp", Topology(2, 1)), (spec,), 1, Precision())
            copies = self.copies(layout) * layout.tensor
            yield from ((transfer, copies) for transfer in between.transfers if transfer.kind is TransferKind.GRAD_SYNC)

    def _tied_unit(self, layout: Layout, staged: StagedModel) -> tuple[Strategy, UnitSpec]:
        """Return how `pipeline/embedding_sync.py` shards tied embeddings: over both ends, or over each end."""
        stage = self._stage_topology(layout)
        spec = UnitSpec("", (BucketSpec((staged.tied // layout.tensor,)),), root=True)
        if layout.plain_compression.fused_embeddings:
            return presets.strategy("zero1", Topology(2 * stage.nodes, stage.ranks_per_node)), spec
        return presets.strategy("ddp", stage), spec

    def _memory(self, layout: Layout, batching: Batching) -> dict[str, int]:
        """Return the memory of the rank that needs most."""
        few, many = (min(batching.micro_steps, times * layout.pipeline) for times in _REPLAYED)
        shorter, order = (self._walks(layout.schedule, layout.pipeline, count)[0] for count in (few, many))
        further = (batching.micro_steps - many) / max(1, many - few)
        staged, stages, homes = self._staged(layout.stages), self._stages(layout, batching, order), owners(order)
        by_rank: list[dict[str, int]] = []
        for rank, passes in order.items():
            own = [index for index, home in homes.items() if home == rank]
            most = most_in_flight(passes)
            in_flight = (most + further * (most - most_in_flight(shorter[rank]))) / len(own)
            parts = [self._stage_memory(index, stages[index], layout, batching, in_flight) for index in own]
            if staged.tied and {0, layout.stages - 1} & set(own):
                strategy, spec = self._tied_unit(layout, staged)
                plans = [plan_unit(strategy, spec, self.request.precision, self.cluster.hardware.form)]
                parts.append({"tied embeddings": sum(engine_bytes(plans, self.request.optimizer).values())})
            messages = pipeline_communicator_bytes(layout.pipeline, self.cluster.hardware.form)
            parts.append({"communicators": messages} if messages else {})
            by_rank.append({name: sum(part.get(name, 0) for part in parts) for part in parts for name in part})
        return max(by_rank, key=lambda memory: sum(memory.values()))

    def _stage_memory(
        self, index: int, stage: SimulatedStage, layout: Layout, batching: Batching, in_flight: float
    ) -> dict[str, int]:
        """Return the memory of a stage that keeps activations of `in_flight` micro-batches at once."""
        staged, precision = self._staged(layout.stages), self.request.precision
        model, tokens = _tensor_share(staged.stages[index], layout.tensor), batching.micro_batch * staged.model.length
        kept = kept_bytes(model, precision, tokens, batching.checkpointing)
        most = activation_bytes(model, precision, tokens, batching.checkpointing)
        activations = round(in_flight * kept) + most - kept  # only one micro-batch computes at a time
        found = engine_bytes(stage.plans, self.request.optimizer) | {"activations": activations}
        compression, shape = layout.plain_compression, self._output(layout, staged, batching).sent_shape
        sent = [compression.activation_gradients] * (index > 0)
        sent += [compression.activations] * (index < layout.stages - 1)
        if kept_elements := sum(sum(transport.kept_for_message(shape)) for transport in sent):
            found["compression"] = kept_elements * item_bytes(wide(self.request.compute_dtype))
        return found


def _tensor_share(model: Model, tensor: int) -> Model:
    """Return the share of one tensor-parallel rank. Norms count as shared, although all ranks have them."""
    if tensor == 1:
        return model
    units: list[ModelUnit] = []
    for unit in model.units:
        buckets: list[BucketSpec] = []
        for bucket in unit.spec.buckets:
            numels = tuple(-(-numel // tensor) for numel in bucket.numels)
            matrices = [  # split along their columns, if their number can be divided
                (shape[0], shape[1] // tensor) if shape is not None and shape[1] % tensor == 0 else None
                for shape in bucket.matrices
            ]
            buckets.append(replace(bucket, numels=numels, matrices=tuple(matrices)))
        # Every rank has the full input of a unit. Checkpointing keeps it.
        spec = replace(unit.spec, buckets=tuple(buckets))
        units.append(replace(unit.computing(1 / tensor), spec=spec, entering=unit.entering))
    return replace(model, units=tuple(units))
