"""What a pipeline costs: its stages placed on a cluster's ranks, each sharded among its copies, and replayed.

Ranks are numbered as `init_device_mesh(device, (pipeline, copies, tensor))` does: those of a stage are neighbours, and
in them those that share a layer. What a tensor-parallel layer sends is counted as PyTorch does it, two sums over
activations in each pass of a block; it stays inside the node, or the layout is refused.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from towpath.core import presets
from towpath.core.formats import Precision, item_bytes
from towpath.core.pipeline import (
    SCHEDULES,
    Compression,
    Order,
    Walk,
    asked_of_micro_batches,
    most_in_flight,
    owners,
    plain_walk,
)
from towpath.core.pipeline import compression as named
from towpath.core.placement import Placement
from towpath.core.routes import Grid, Op
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.strategy import MoveShape, Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.unit_plan import UnitPlan, plan_unit
from towpath.core.units import BucketSpec, UnitSpec
from towpath.errors import PlanError
from towpath.planner.cluster import Cluster
from towpath.planner.cost import computing, optimizer_seconds
from towpath.planner.memory import activation_bytes, engine_bytes, kept_bytes
from towpath.planner.model import Model, StagedModel, Unit
from towpath.planner.request import Request
from towpath.planner.solver import Batching, Priced
from towpath.sim.loads import TransferShape, loads_of, seconds_alone
from towpath.sim.pipeline import PipelineReplay, PipelineTimeline, SimulatedStage
from towpath.sim.replay import Seconds
from towpath.topology.cluster import Topology

# The order and the walk of a schedule, by its name, for so many ranks and micro-batches; `halved`: whether stages can
# compute the weights' gradients by themselves.
Walks = Callable[[str, int, int, bool], tuple[Order, Walk]]

# Of a stage among its copies. What is sharded further is gathered for every micro-batch.
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "mics")
# A step of more micro-batches is replayed for so many times its ranks, and for a little more.
_REPLAYED = 2, 3


@dataclass(frozen=True, slots=True)
class Layout:
    """`pipeline` ranks that a micro-batch passes through, `tensor` ranks that share each layer; the rest are copies, of
    which each stage is sharded by `strategy`. `compression`: a preset's name, or what it stands for."""

    pipeline: int
    schedule: str = "1F1B"
    strategy: str = "ddp"
    compression: str | Compression = "none"
    tensor: int = 1

    @property
    def stages(self) -> int:
        return self.pipeline * SCHEDULES[self.schedule]

    def __str__(self) -> str:
        parts = f" × {self.tensor} tensor-parallel" if self.tensor > 1 else ""
        packed = f", {self.compression}" if self.compression != "none" else ""
        return f"{self.stages} stages on {self.pipeline}{parts}, {self.schedule}, {self.strategy}{packed}"


@dataclass(frozen=True)
class PricedPipeline(Priced):
    """`computing` is what ranks do on average, and `idle` the share of the step that is left; `exposed` is of the rank
    that waits longest, `memory` of the one that needs most."""

    layout: Layout
    copies: int
    idle: float

    def sequences(self, world: int) -> int:
        return self.batching.micro_batch * self.batching.micro_steps * self.copies


class Pipelines:
    """Of one model, by how many stages it is cut into."""

    def __init__(
        self,
        staged: Callable[[int], StagedModel],
        cluster: Cluster,
        request: Request,
        walks: Walks = plain_walk,
    ) -> None:
        self._staged, self.cluster, self.request, self._walks = cache(staged), cluster, request, walks
        self._topology = cluster.hardware.topology
        self._plans: dict[object, UnitPlan] = {}

    def solve(
        self,
        pipelines: Sequence[int],
        schedules: Sequence[str] = ("1F1B",),
        compressions: Sequence[str | Compression] = ("none",),
        tensors: Sequence[int] = (1,),
        best: int = 10,
        say: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[PricedPipeline]:
        """The `best` of those that fit, the quickest first. What computing alone would make slower than these is not
        replayed."""
        order = [
            (self._bound(layout, batching), number, layout, batching)
            for number, (layout, batching) in enumerate(self._candidates(pipelines, schedules, compressions, tensors))
        ]
        heapq.heapify(order)
        found: list[PricedPipeline] = []
        total = len(order)
        while order and (len(found) < best or order[0][0] < sorted(p.seconds for p in found)[best - 1]):
            _, _, layout, batching = heapq.heappop(order)
            if sum(self._memory(layout, batching).values()) <= self.request.memory:
                found.append(self.price(layout, batching))
            say(total - len(order), total)
        return sorted(found, key=lambda p: (p.seconds, p.peak_bytes))[:best]

    def _candidates(
        self,
        pipelines: Sequence[int],
        schedules: Sequence[str],
        compressions: Sequence[str | Compression],
        tensors: Sequence[int],
    ) -> Iterator[tuple[Layout, Batching]]:
        again = (False, True) if self.request.checkpointing is None else (self.request.checkpointing,)
        for pipeline, tensor, schedule, compression in product(pipelines, tensors, schedules, compressions):
            seen: set[Placement] = set()
            for strategy in STRATEGIES:
                layout = Layout(pipeline, schedule, strategy, compression, tensor)
                placement = self._plain_strategy(layout).placement
                if placement in seen:  # on one node, or of one copy, it is what another name stands for
                    continue
                seen.add(placement)
                for (size, count), checkpointing in product(self.request.shares(self.copies(layout)), again):
                    if not asked_of_micro_batches(schedule, pipeline, count):
                        yield layout, Batching(size, count, checkpointing)

    def _bound(self, layout: Layout, batching: Batching) -> float:
        """Seconds that a step computes at least, while nothing else goes on: of a rank all micro-batches, and where it
        has one stage, before them or after them what the other stages compute of one."""
        staged = self._staged(layout.stages)
        tokens, again = batching.micro_batch * staged.whole.length, batching.checkpointing
        each = [
            computing(_share_of(model, layout.tensor), self.cluster, self._compute, tokens, again).micro_step
            for model in staged.stages
        ]
        if layout.stages == layout.pipeline:
            return sum(each) + (batching.micro_steps - 1) * max(each)
        return batching.micro_steps * sum(each) / layout.pipeline

    def check(self, layout: Layout, batching: Batching) -> None:
        """Refuse what no pipeline can run."""
        self.copies(layout)
        if layout.strategy not in STRATEGIES:
            raise PlanError(f"strategy {layout.strategy!r}: stages are planned with {', '.join(STRATEGIES)}.")
        if asked := asked_of_micro_batches(layout.schedule, layout.pipeline, batching.micro_steps):
            raise PlanError(
                f"{layout.schedule} of {layout.pipeline} ranks asks for {asked}; got {batching.micro_steps}."
            )

    def copies(self, layout: Layout) -> int:
        """How often the job has each stage; or why it has none."""
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

    # One of them ----------------------------------------------------------------------------------------------------

    def price(self, layout: Layout, batching: Batching) -> PricedPipeline:
        """Of many micro-batches some are replayed: each further one adds as much."""
        few, many = (times * layout.pipeline for times in _REPLAYED)
        found = self.replay(layout, replace(batching, micro_steps=min(batching.micro_steps, many))).summed_up()
        if batching.micro_steps > many:
            shorter = self.replay(layout, replace(batching, micro_steps=few)).summed_up()
            found = found.with_more((batching.micro_steps - many) / (many - few), shorter)
        return PricedPipeline(
            self._plain_strategy(layout),
            batching,
            found.seconds,
            found.computed,
            found.exposed,
            found.in_flight,
            self._memory(layout, batching),
            found.inter_bytes,
            found.intra_bytes,
            layout,
            self.copies(layout),
            max(0.0, 1 - found.computed / found.seconds),
        )

    def replay(self, layout: Layout, batching: Batching) -> PipelineTimeline:
        staged, compression = self._staged(layout.stages), _compression(layout)
        order, walk = self._walk(layout, batching)
        homes, stages = owners(order), self._stages(layout, batching, order)
        tied = list(self._tied(layout, staged, len({homes[0], homes[layout.stages - 1]})))
        return PipelineReplay(stages, walk, self.cluster.hardware, compression, tied).run()

    def _stages(self, layout: Layout, batching: Batching, order: Order) -> list[SimulatedStage]:
        staged, homes = self._staged(layout.stages), owners(order)
        return [self._stage(layout, staged, index, homes[index], batching) for index in range(layout.stages)]

    def _walk(self, layout: Layout, batching: Batching) -> tuple[Order, Walk]:
        whole = self._plain_strategy(layout).placement.params.size == 1
        return self._walks(layout.schedule, layout.pipeline, batching.micro_steps, whole)

    def _plain_strategy(self, layout: Layout) -> Strategy:
        """Of all stages, before some of them get a codec."""
        return presets.strategy(layout.strategy, self._within(layout))

    def _ranks(self, layout: Layout, place: int) -> tuple[int, ...]:
        each = self.copies(layout) * layout.tensor
        return tuple(range(place * each, (place + 1) * each))

    def _within(self, layout: Layout) -> Topology:
        """The copies of a stage, of one of its tensor-parallel parts."""
        nodes = [self._topology.node_of(rank) for rank in self._ranks(layout, 0)[:: layout.tensor]]
        return Topology(len(set(nodes)), len(nodes) // len(set(nodes)))

    def _stage(self, layout: Layout, staged: StagedModel, index: int, home: int, batching: Batching) -> SimulatedStage:
        strategy = _compression(layout).strategy_of(self._plain_strategy(layout), index, layout.stages)
        model = _share_of(staged.stages[index], layout.tensor)
        plans = [self._plan(strategy, unit.spec) for unit in model.units]
        compute, tokens = self._compute, batching.micro_batch * model.length
        shape = ((batching.micro_batch, model.length, staged.width), compute)
        return SimulatedStage(
            self._ranks(layout, home),
            strategy,
            plans,
            self._seconds(layout, model, staged.width, strategy, batching, tokens),
            (shape,) if index < layout.stages - 1 else (),
            layout.tensor,
        )

    def _plan(self, strategy: Strategy, spec: UnitSpec) -> UnitPlan:
        """Of like units one is planned."""
        key = (strategy, spec.buckets, spec.kept)
        if key not in self._plans:
            self._plans[key] = plan_unit(strategy, spec, self.request.precision)
        return self._plans[key]

    @property
    def _compute(self) -> str:
        return self.request.precision.compute_dtype(self.request.own)

    def _seconds(
        self, layout: Layout, model: Model, width: int, strategy: Strategy, batching: Batching, tokens: int
    ) -> Seconds:
        request, hardware = self.request, self.cluster.hardware
        seconds = computing(model, self.cluster, self._compute, tokens, batching.checkpointing)
        elements = model.trainable / strategy.placement.optimizer.size
        optimizer = optimizer_seconds(elements, model.trainable_parameters, request.own, request.optimizer, hardware)
        seconds = replace(seconds, optimizer=optimizer)
        if layout.tensor == 1:
            return seconds
        # By a ring, while nothing else uses the links inside the node.
        shape = MoveShape(Op.ALL_REDUCE, 1, Grid(1, layout.tensor), 1)
        moved = TransferShape.of_move(shape, Transport(), tokens * width, self._compute)
        summed = seconds_alone(loads_of(moved, hardware), hardware)
        sums = [2 * summed * unit.modules * (not unit.spec.kept) for unit in model.units]
        return replace(
            seconds,
            forward=[a + b for a, b in zip(seconds.forward, sums, strict=True)],
            backward=[a + b for a, b in zip(seconds.backward, sums, strict=True)],
        )

    def _tied(self, layout: Layout, staged: StagedModel, homes: int) -> Iterator[tuple[Transfer, int]]:
        """What brings the gradients of tied embeddings together, and how many groups do it alike: fused, one sum over
        the ranks of both ends; else one at each end, and then between every two copies. `homes`: ranks of the pipeline
        that have an end; if one has both, its copies have nothing more to sum."""
        if not staged.tied:
            return
        strategy, spec = self._tied_unit(layout, staged, homes)
        fused = _compression(layout).fused_embeddings
        yield from (
            (transfer, layout.tensor * (1 if fused else homes))
            for transfer in derive_schedule(strategy, (spec,), 1, self.request.precision).transfers
        )
        if not fused and homes == 2:
            # Of what was delivered, in its own dtype.
            between = derive_schedule(presets.strategy("ddp", Topology(2, 1)), (spec,), 1, Precision())
            copies = self.copies(layout) * layout.tensor
            yield from ((transfer, copies) for transfer in between.transfers if transfer.kind is TransferKind.GRAD_SYNC)

    def _tied_unit(self, layout: Layout, staged: StagedModel, homes: int) -> tuple[Strategy, UnitSpec]:
        """As `pipeline/embedding_sync.py` shards them: over both ends, or each end by itself."""
        within = self._within(layout)
        spec = UnitSpec("", (BucketSpec((staged.tied // layout.tensor,)),), kept=True)
        if _compression(layout).fused_embeddings:
            return presets.strategy("zero1", Topology(homes * within.nodes, within.ranks_per_node)), spec
        return presets.strategy("ddp", within), spec

    def _memory(self, layout: Layout, batching: Batching) -> dict[str, int]:
        """Of the rank that needs most."""
        few, many = (min(batching.micro_steps, times * layout.pipeline) for times in _REPLAYED)
        shorter, _ = self._walk(layout, replace(batching, micro_steps=few))
        order, _ = self._walk(layout, replace(batching, micro_steps=many))
        further = (batching.micro_steps - many) / max(1, many - few)
        staged, stages, homes = self._staged(layout.stages), self._stages(layout, batching, order), owners(order)
        by_rank: list[dict[str, int]] = []
        for rank, passes in order.items():
            own = [index for index, home in homes.items() if home == rank]
            most = most_in_flight(passes)
            in_flight = (most + further * (most - most_in_flight(shorter[rank]))) / len(own)
            parts = [self._memory_of(index, stages[index], layout, batching, in_flight) for index in own]
            if staged.tied and (ends := {0, layout.stages - 1} & set(own)):
                plans = [self._plan(*self._tied_unit(layout, staged, 2 // len(ends)))]
                parts.append({"tied embeddings": sum(engine_bytes(plans, self.request.optimizer).values())})
            by_rank.append({name: sum(part.get(name, 0) for part in parts) for part in parts for name in part})
        return max(by_rank, key=lambda memory: sum(memory.values()))

    def _memory_of(
        self, index: int, stage: SimulatedStage, layout: Layout, batching: Batching, in_flight: float
    ) -> dict[str, int]:
        """`in_flight`: micro-batches of which it keeps activations at once."""
        staged = self._staged(layout.stages)
        model, tokens = _share_of(staged.stages[index], layout.tensor), batching.micro_batch * staged.whole.length
        asked = model, self.request.precision, tokens, batching.checkpointing
        kept, most = kept_bytes(*asked), activation_bytes(*asked)
        activations = round(in_flight * kept) + most - kept  # one micro-batch at a time computes
        found = engine_bytes(stage.plans, self.request.optimizer) | {"activations": activations}
        transport = _compression(layout).activation_gradients
        if index and transport.low_rank is not None:
            shape = (batching.micro_batch, staged.whole.length, staged.width)
            kept_elements = transport.low_rank.kept_elements(shape, transport.feedback != "none")
            found["compression"] = kept_elements * item_bytes(self._compute)
        return found


def _compression(layout: Layout) -> Compression:
    return layout.compression if isinstance(layout.compression, Compression) else named(layout.compression)


def _share_of(model: Model, tensor: int) -> Model:
    """That of one of the ranks that share every layer. What they all have, such as norms, is counted as shared, too."""
    if tensor == 1:
        return model

    def part(bucket: BucketSpec) -> BucketSpec:
        """Matrices are cut along their columns, where these divide."""
        numels = tuple(-(-numel // tensor) for numel in bucket.numels)
        matrices = [
            (shape[0], shape[1] // tensor) if shape is not None and shape[1] % tensor == 0 else None
            for shape in bucket.matrices
        ]
        return replace(bucket, numels=numels, matrices=tuple(matrices))

    def share(unit: Unit) -> Unit:
        buckets = tuple(map(part, unit.spec.buckets))
        # What enters, which checkpointing keeps, is whole on each.
        return replace(unit.computing(1 / tensor), spec=replace(unit.spec, buckets=buckets), entering=unit.entering)

    return replace(model, units=tuple(map(share, model.units)))
