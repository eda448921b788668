"""One step of a pipeline, replayed: its ranks compute their stages' passes and send one another what comes of them.

All copies of a stage do the same, and so one rank stands for them. Each walks its operations (`core/pipeline.py`),
and its engines do in each pass what their step machines ask for.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from towpath.core.pipeline import Await, Compression, Message, Post, Run, StagePass, Walk
from towpath.core.schedule import Compute, Shape, message_transfers, settled_stage
from towpath.core.strategy import Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.unit_plan import UnitPlan
from towpath.sim.clock import Thread, run
from towpath.sim.engine import SimulatedEngine, started
from towpath.sim.fluid import BandwidthModel, Demand
from towpath.sim.hardware import Hardware
from towpath.sim.loads import PhaseCost, TransferShape, coding_seconds, loads_of, message_load
from towpath.sim.messages import InFlight, Links, called, kind_of
from towpath.sim.place import place_of
from towpath.sim.replay import Seconds
from towpath.sim.timeline import Timeline
from towpath.topology.cluster import Topology


@dataclass(frozen=True)
class SimulatedStage:
    """`ranks`: those that hold it, as the job counts them. `outputs`: what it hands on, tensor by tensor; of the last
    stage nothing. `parts`: tensor-parallel ranks, of which each has a data-parallel group of its own."""

    ranks: tuple[int, ...]
    strategy: Strategy
    plans: Sequence[UnitPlan]
    seconds: Seconds
    outputs: tuple[Shape, ...]
    parts: int = 1


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """`ranks`: of each rank of the pipeline what one of its copies did. Bytes: sent by all ranks together."""

    seconds: float
    ranks: tuple[Timeline, ...]
    inter_bytes: int
    intra_bytes: int

    def summed_up(self) -> Timeline:
        """What ranks compute on average, what the one waited for that waits longest, what was in flight on all."""
        longest = max(self.ranks, key=lambda rank: sum(rank.exposed.values()))
        in_flight: Counter[TransferKind] = Counter()
        for rank in self.ranks:
            in_flight.update(rank.in_flight)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return Timeline(
            self.seconds,
            fmean(rank.computed for rank in self.ranks),
            self.inter_bytes,
            self.intra_bytes,
            exposed=dict(longest.exposed),
            in_flight=dict(in_flight),
        )


class PipelineReplay:
    """`walk`: of each rank of the pipeline. `tied`: what the ranks of the first and the last stage sum together, after
    their own gradients, and how many groups do it alike."""

    def __init__(
        self,
        stages: Sequence[SimulatedStage],
        walk: Walk,
        hardware: Hardware,
        compression: Compression,
        tied: Sequence[tuple[Transfer, int]] = (),
    ) -> None:
        self._hardware, self._walk, self._compression, self._stages = hardware, walk, compression, stages
        owners = {each.stage_pass.stage: rank for rank, of in walk.items() for each in of if isinstance(each, Run)}
        self._places = [place_of(f"rank {rank}", stages[i].ranks, hardware) for i, rank in sorted(owners.items())]
        capacities: dict[str, float] = {}
        for place in self._places:
            capacities |= place.capacities(hardware)
        self._fluid = BandwidthModel(capacities)
        self._timelines = {rank: Timeline() for rank in walk}
        self._links = Links(self._fluid, by_sockets=hardware.cores is not None)
        self._loss = _Moment()
        self._passes: dict[int, list[StagePass]] = defaultdict(list)
        for of in walk.values():
            for each in of:
                if isinstance(each, Run):
                    self._passes[each.stage_pass.stage].append(each.stage_pass)
        self._engines = {i: self._engine(i, self._timelines[rank]) for i, rank in sorted(owners.items())}
        self._owners = owners
        self._tied = [self._sum(transfer, alike) for transfer, alike in tied]

    def _sum(self, transfer: Transfer, alike: int) -> _Sum:
        ends = {self._owners[end]: self._places[end] for end in (0, len(self._stages) - 1)}  # one rank may have both
        places = list(ends.values())
        ranks = sum(place.ranks_on_host for place in places if place.host == places[0].host)
        own = replace(self._hardware, topology=transfer.topology, ranks_sharing=ranks)
        loads = [
            replace(load, needs={name: need for place in places for name, need in place.named(load.needs).items()})
            for load in loads_of(TransferShape.of(transfer), own)
        ]
        for rank in ends:  # each has as many of the ranks
            self._timelines[rank].inter_bytes += alike * transfer.inter_bytes // len(ends)
            self._timelines[rank].intra_bytes += alike * transfer.intra_bytes // len(ends)
        return _Sum(self._fluid, deque(loads), len(ends))

    def _engine(self, index: int, timeline: Timeline) -> SimulatedEngine:
        stage, place = self._stages[index], self._places[index]
        # Of its own ranks: as many on each of its nodes, and on each host.
        topology = Topology(len(stage.ranks) // place.ranks_on_node, place.ranks_on_node)
        own = replace(self._hardware, topology=topology, ranks_sharing=place.ranks_on_host)
        name = f", stage {index}"
        return SimulatedEngine(stage.strategy, stage.plans, own, self._fluid, timeline, place, name, alike=stage.parts)

    def run(self) -> PipelineTimeline:
        """The step, its optimizer's part included."""
        threads = [self._thread(rank) for rank in self._walk]
        run(self._fluid, threads, [*self._engines.values(), self._links, *self._tied])
        timelines = tuple(self._timelines[rank] for rank in sorted(self._timelines))
        inter, intra = (sum(getattr(t, name) for t in timelines) for name in ("inter_bytes", "intra_bytes"))
        return PipelineTimeline(self._fluid.now, timelines, inter, intra)

    def _thread(self, rank: int) -> Thread:
        own = sorted(i for i, owner in self._owners.items() if owner == rank)
        stages = {i: settled_stage(self._engines[i].plans, self._passes[i]) for i in own}
        for i in own:
            for action in stages[i].machine.param_sync():
                yield from self._engines[i].execute(action, 0)
        for operation in self._walk[rank]:
            match operation:
                case Run(each):
                    stage, engine = stages[each.stage], self._engines[each.stage]
                    for action in stage.walk(each):
                        if isinstance(action, Compute):
                            yield from self._compute(each.stage, action)
                        else:
                            yield from engine.execute(action, stage.micro_step)
                case Post(message, sends):
                    if sends:
                        yield from self._code(message, encodes=True)
                    self._links.post(self._in_flight(message), sends)
                case Await(message, sends):
                    yield from self._await(rank, message)
                    if not sends:
                        yield from self._code(message, encodes=False)
        for i in own:
            for action in stages[i].end_boundary():
                yield from self._engines[i].execute(action, stages[i].micro_step)
        if {0, len(self._stages) - 1} & set(own):
            for each in self._tied:
                each.posted += 1
                yield each
        if len(self._stages) - 1 in own:
            self._loss.ended = True  # it tells the others
        yield self._loss
        for i in own:
            yield from self._engines[i].compute(self._stages[i].seconds.optimizer, "optimizer")

    def _compute(self, index: int, action: Compute) -> Iterator[Demand]:
        engine, seconds = self._engines[index], self._stages[index].seconds
        name = f"{action.part.value} of {engine.plans[action.unit].name or 'root'}"
        yield from engine.compute(seconds.of(action), name, seconds.share)

    # Messages --------------------------------------------------------------------------------------------------------

    def _in_flight(self, message: Message) -> InFlight:
        found = self._links.of(message)
        if found is None:
            ends = message.source, message.target
            between = self._owners[message.source], self._owners[message.target]
            timeline, transfers = self._timelines[between[0]], self._transfers(message)
            loads = deque(message_load(t, self._hardware, *(self._places[i] for i in ends)) for t in transfers)
            timeline.inter_bytes += sum(t.inter_bytes for t in transfers)
            timeline.intra_bytes += sum(t.intra_bytes for t in transfers)
            found = self._links.add(InFlight(message, between, transfers, loads, timeline))
        return found

    def _transfers(self, message: Message) -> list[Transfer]:
        source, target = self._stages[message.source], self._stages[message.target]
        outputs = self._stages[message.output_of].outputs
        pairs = list(zip(source.ranks, target.ranks, strict=True))
        return list(message_transfers(message, pairs, outputs, self._hardware.topology, self._compression))

    def _code(self, message: Message, *, encodes: bool) -> Iterator[Demand]:
        """On the thread that trains."""
        transfers = self._in_flight(message).transfers
        seconds = sum(coding_seconds(t, self._hardware, encodes=encodes) for t in transfers)
        stage = message.source if encodes else message.target
        yield from self._engines[stage].compute(seconds, "encode" if encodes else "decode")

    def _await(self, rank: int, message: Message) -> Iterator[InFlight]:
        found = self._in_flight(message)
        began = self._fluid.now
        yield found
        if self._fluid.now > began:
            self._timelines[rank].waited(kind_of(message), f"for {called(message)}", began, self._fluid.now)


@dataclass(slots=True, eq=False)
class _Moment:
    ended: bool = False


@dataclass(slots=True, eq=False)
class _Sum:
    """Over the ranks of both ends, once all of so many `parties` are there."""

    fluid: BandwidthModel
    loads: deque[PhaseCost]
    parties: int
    posted: int = 0
    ended: bool = False
    moving: Demand | None = None

    def start_what_may(self) -> None:
        if self.posted < self.parties or self.ended or self.moving is not None:
            return
        if self.loads:
            self.moving = started(self.fluid, self.loads.popleft())
        else:
            self.ended = True

    def ends(self, flow: Demand) -> bool:
        if flow is not self.moving:
            return False
        self.moving, self.ended = None, not self.loads
        return True
