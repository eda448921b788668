"""The replay of one training step: a clock executes what the step machine asks for, in place of an engine.

Without pipeline stages, one rank represents all. In a pipeline, one rank represents all copies of a stage. Each of
these ranks walks its operations (`core/passes.py`), and its engines execute what their step machines ask for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import fmean
from typing import Any

from towpath.core.costs import Launches, launches_of
from towpath.core.passes import Await, Compression, Message, Post, RunPass, StagePass, Walk, message_transfers
from towpath.core.routes import Op
from towpath.core.schedule import Compute, PassPart, settled, settled_stage, steady_step
from towpath.core.step_state import Action
from towpath.core.strategy import Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.unit_plan import UnitPlan
from towpath.core.units import StageOutput
from towpath.plan.bandwidth import BandwidthModel, Demand, Event, Thread, Timeline, run_threads
from towpath.plan.hardware import EVERYWHERE, Hardware, StageLocation
from towpath.plan.simulated_engine import LaunchingThread, QueuedTask, SimulatedEngine, phase_demand
from towpath.plan.transfer_costs import PhaseCost, TransferShape, coding_seconds, message_cost, phase_costs

# (plans of the units, micro-steps) -> the computations and actions of a step, each with the number of its micro-step
Steps = Callable[[Sequence[UnitPlan], int], Iterator[tuple[int, Action | Compute]]]


def in_our_order(plans: Sequence[UnitPlan], micro_steps: int) -> Iterator[tuple[int, Action | Compute]]:
    """Yield the computations and actions of a step in the order of Towpath's engine."""
    return steady_step(settled(plans), plans, micro_steps)


@dataclass(frozen=True, slots=True)
class ComputeSeconds:
    """The seconds that one rank computes if nothing else runs."""

    forward: Sequence[float]  # forward pass of each unit, the root's first
    backward: Sequence[float]  # backward pass of each unit, the root's first
    forward_end: float  # forward pass of the root after all other units
    backward_end: float  # backward pass of the root after all other units
    optimizer: float = 0.0  # the optimizer's step
    # The share of the passes' seconds in which the processor works. During the rest, a device computes, which does not
    # slow down messages and codecs.
    share: float = 1.0

    @property
    def micro_step(self) -> float:
        """The seconds of one micro-step, without the optimizer's step."""
        return sum(self.forward) + sum(self.backward) + self.forward_end + self.backward_end

    def of(self, compute: Compute) -> float:
        """Return the seconds of one computation of the schedule."""
        match compute.part:
            case PassPart.FORWARD:
                return self.forward[compute.unit]
            case PassPart.BACKWARD:
                return self.backward[compute.unit]
            case PassPart.FORWARD_END:
                return self.forward_end
            case PassPart.BACKWARD_END:
                return self.backward_end

    def kernels(self, compute: Compute) -> float:
        """Return how many times as many kernels a computation has as the forward pass of its unit.

        A backward pass has twice as many. If it recomputes the forward pass, it has three times as many.
        """
        if compute.part in (PassPart.FORWARD_END, PassPart.BACKWARD_END):
            return 0.0  # the root has few, and the other part of its pass counts them
        if compute.part is PassPart.FORWARD:
            return 1.0
        return 3.0 if sum(self.backward) > 2.5 * sum(self.forward) else 2.0


def computed(
    engine: SimulatedEngine, seconds: ComputeSeconds, action: Action | Compute, micro_step: int
) -> Iterator[Demand | QueuedTask]:
    """Compute or execute what a step consists of, and yield what the thread computes or waits for."""
    if not isinstance(action, Compute):
        yield from engine.execute(action, micro_step)
        return
    name = f"{action.part.value} of {engine.plans[action.unit].spec.name or 'root'}"
    yield from engine.compute(seconds.of(action), name, seconds.share)
    yield from engine.launch_kernels(action.unit, seconds.kernels(action))


@dataclass(frozen=True)
class SimulatedStage:
    """A stage of a simulated pipeline, or a whole model. The root's plan comes first.

    `ranks` are numbered as in the job, and `outputs` are the tensors that a stage sends on. Each of its `parts`
    tensor-parallel ranks has its own data-parallel group.
    """

    strategy: Strategy
    plans: Sequence[UnitPlan]
    seconds: ComputeSeconds
    ranks: tuple[int, ...] = ()
    outputs: tuple[StageOutput, ...] = ()
    parts: int = 1


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A simulated step. It has a timeline of one rank, or of one copy of each rank of a pipeline.

    The bytes of a timeline are those of all copies of its rank together.
    """

    seconds: float
    ranks: tuple[Timeline, ...]

    def combined(self) -> Timeline:
        """Return one timeline for all ranks.

        It has the ranks' mean computation, the waits of the rank that waits longest, and all transfers and bytes.
        """
        longest = max(self.ranks, key=lambda rank: sum(rank.exposed.values()))
        kinds = {kind for rank in self.ranks for kind in rank.in_flight}
        names = "inter_bytes", "intra_bytes", "saved_inter_bytes", "saved_intra_bytes"
        sent: dict[str, Any] = {name: sum(getattr(rank, name) for rank in self.ranks) for name in names}
        return Timeline(
            self.seconds,
            fmean(rank.computed for rank in self.ranks),
            **sent,
            exposed=dict(longest.exposed),
            in_flight={k: sum(rank.in_flight.get(k, 0.0) for rank in self.ranks) for k in TransferKind if k in kinds},
            launching=max(rank.launching for rank in self.ranks),
            unlaunched=max(rank.unlaunched for rank in self.ranks),
        )


class Replay:
    """The replay of a step: of a whole model, or with `walk`, the operations of each rank of a pipeline, of its stages.

    `tied` are the sums of tied gradients between the first and the last stage, and how many groups do each of them.
    `steps` orders the events of a whole model.
    """

    def __init__(
        self,
        stages: Sequence[SimulatedStage],
        hardware: Hardware,
        walk: Walk | None = None,
        compression: Compression | None = None,
        tied: Sequence[tuple[Transfer, int]] = (),
        micro_steps: int = 1,
        steps: Steps = in_our_order,
    ) -> None:
        self._hardware, self._walk, self._stages, self._micro_steps = hardware, walk or {}, stages, micro_steps
        self._steps = steps
        self._compression = compression or Compression()
        self._passes: dict[int, list[StagePass]] = defaultdict(list)
        self._owners = {} if walk else {0: 0}  # the rank of each stage
        for rank, operations in self._walk.items():
            for each in operations:
                if isinstance(each, RunPass):
                    self._passes[each.stage_pass.stage].append(each.stage_pass)
                    self._owners[each.stage_pass.stage] = rank
        self._locations, capacities = [EVERYWHERE], hardware.capacities
        if walk:
            homes = sorted(self._owners.items())
            self._locations = [StageLocation.of(f"rank {rank}", stages[i].ranks, hardware) for i, rank in homes]
            capacities = {what: rate for each in self._locations for what, rate in each.capacities(hardware).items()}
        self._bandwidth = BandwidthModel(capacities)
        self._timelines = {rank: Timeline() for rank in self._owners.values()}
        self._links = MessageLinks(self._bandwidth, by_sockets=hardware.cores is not None)  # gloo's
        self._loss = _Signal()
        self._launchers = {rank: LaunchingThread(hardware.launching) for rank in self._timelines}
        self._engines = {i: self._engine(i, rank) for i, rank in sorted(self._owners.items())}
        self._tied = [(_Signal(), self._tied_costs(transfer, groups)) for transfer, groups in tied]

    def _tied_costs(self, transfer: Transfer, groups: int) -> list[PhaseCost]:
        """Return the phases of a sum over the ranks of both ends of the pipeline."""
        ends = {self._owners[end]: self._locations[end] for end in (0, len(self._stages) - 1)}
        locations = list(ends.values())
        ranks = sum(location.ranks_on_host for location in locations if location.host == locations[0].host)
        # A probe measures no sum between two stages alone.
        own = replace(self._hardware, topology=transfer.topology, ranks_sharing=ranks, measured=None)
        costs = [
            replace(cost, needs={name: need for each in locations for name, need in each.named(cost.needs).items()})
            for cost in phase_costs(TransferShape.of(transfer), own)
        ]
        for rank in ends:  # both ends have equally many ranks
            self._timelines[rank].inter_bytes += groups * transfer.inter_bytes // len(ends)
            self._timelines[rank].intra_bytes += groups * transfer.intra_bytes // len(ends)
        return costs

    def _engine(self, index: int, rank: int) -> SimulatedEngine:
        stage, location, own = self._stages[index], self._locations[index], self._hardware
        if self._walk:  # the stage's ranks: equally many on each of its nodes, and on each host
            own = replace(own, topology=own.topology.of(stage.ranks), ranks_sharing=location.ranks_on_host)
        clock = self._bandwidth, self._timelines[rank], location, f", stage {index}" if self._walk else ""
        thread = self._launchers[rank]
        return SimulatedEngine(stage.strategy, stage.plans, own, *clock, copies=stage.parts, thread=thread)

    def run(self) -> ReplayedStep:
        """Replay the step, with the optimizer's part."""
        threads = [self._thread(rank) for rank in self._walk] or [self._whole()]
        run_threads(self._bandwidth, threads, [*self._engines.values(), self._links])
        for timeline in self._timelines.values():
            timeline.seconds = self._bandwidth.now
        return ReplayedStep(self._bandwidth.now, tuple(self._timelines[rank] for rank in sorted(self._timelines)))

    def _whole(self) -> Thread:
        """Return the thread of a model without stages."""
        engine, seconds = self._engines[0], self._stages[0].seconds
        for micro_step, action in self._steps(engine.plans, self._micro_steps):
            yield from computed(engine, seconds, action, micro_step)
        yield from engine.compute(seconds.optimizer, "optimizer")

    def _thread(self, rank: int) -> Thread:
        own = sorted(i for i, owner in self._owners.items() if owner == rank)
        stages = {i: settled_stage(self._engines[i].plans, self._passes[i]) for i in own}
        for i in own:
            for action in stages[i].begin():
                yield from self._engines[i].execute(action, 0)
        for operation in self._walk[rank]:
            match operation:
                case RunPass(each):
                    stage, engine = stages[each.stage], self._engines[each.stage]
                    for action in stage.walk(each):
                        yield from computed(engine, self._stages[each.stage].seconds, action, stage.micro_step)
                case Post(message, sends):
                    transfers = self._rank_message(message).transfers
                    end = self._engines[message.source if sends else message.target]
                    yield from end.launch(sum(map(launches_of, transfers), Launches()))
                    if sends:
                        yield from self._code(message, encodes=True)
                    self._links.post(self._rank_message(message), sends)
                case Await(message, sends):
                    began, awaited = self._bandwidth.now, self._rank_message(message)
                    yield awaited
                    if self._bandwidth.now > began:
                        self._timelines[rank].waited(awaited.kind, f"for {awaited.title}", began, self._bandwidth.now)
                    if not sends:
                        yield from self._code(message, encodes=False)
                        for gather in awaited.gathers:
                            yield from self._engines[message.target].run(gather, f"for shares of {awaited.title}")
        for i in own:
            for action in stages[i].end_boundary():
                yield from self._engines[i].execute(action, stages[i].micro_step)
        ends = {0, len(self._stages) - 1}
        for summed, costs in self._tied if ends & set(own) else ():
            summed.posted += 1
            if summed.posted < len({self._owners[end] for end in ends}):
                yield summed
                continue
            for cost in costs:  # whoever comes last runs the sum of all
                yield phase_demand(self._bandwidth, cost)
            summed.ended = True
        if len(self._stages) - 1 in own:
            self._loss.ended = True  # the last stage sends the loss to all others
        yield self._loss
        for i in own:
            yield from self._engines[i].compute(self._stages[i].seconds.optimizer, "optimizer")

    def _rank_message(self, message: Message) -> RankMessage:
        """Return the message as it is on its way. Whichever end comes first makes it."""
        if message not in self._links.messages:
            between = self._owners[message.source], self._owners[message.target]
            source, target = self._stages[message.source], self._stages[message.target]
            pairs = list(zip(source.ranks, target.ranks, strict=True))
            outputs, topology = self._stages[message.output_of].outputs, self._hardware.topology
            # The tensor-parallel ranks of each copy are neighbors.
            gathering = [target.ranks[i : i + target.parts] for i in range(0, len(target.ranks), target.parts)]
            how = self._compression, gathering, self._hardware.form
            every = list(message_transfers(message, pairs, outputs, topology, *how))
            transfers, gathers = ([t for t in every if t.move.op is op] for op in (Op.SEND, Op.ALL_GATHER))
            ends = self._locations[message.source], self._locations[message.target]
            costs = deque(message_cost(transfer, self._hardware, *ends) for transfer in transfers)
            timeline = self._timelines[between[0]]
            timeline.inter_bytes += sum(t.inter_bytes for t in every)
            timeline.intra_bytes += sum(t.intra_bytes for t in every)
            self._links.messages[message] = RankMessage(message, between, transfers, gathers, costs, timeline)
        return self._links.messages[message]

    def _code(self, message: Message, *, encodes: bool) -> Iterator[Demand]:
        """Encode or decode a message on the training thread."""
        transfers = self._rank_message(message).transfers
        seconds = sum(coding_seconds(t, self._hardware, encodes=encodes) for t in transfers)
        stage = message.source if encodes else message.target
        yield from self._engines[stage].compute(seconds, "encode" if encodes else "decode")


# Messages between ranks of a pipeline --------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class RankMessage:
    """A message from one rank of the pipeline to another. It moves once both ends have posted it.

    Then the receiving ranks run the `gathers` of its shares. `costs` are the phases that have not begun, and `behind`
    is a message that must end first.
    """

    message: Message
    between: tuple[int, int]
    transfers: Sequence[Transfer]
    gathers: Sequence[Transfer]
    costs: deque[PhaseCost]
    timeline: Timeline
    posted: int = 0
    behind: RankMessage | None = None
    began: float | None = None
    ended: bool = False

    @property
    def may_move(self) -> bool:
        """Whether no other message must end first."""
        return self.behind is None or self.behind.ended

    @property
    def kind(self) -> TransferKind:
        """The kind of transfer."""
        return TransferKind.ACTIVATION_GRADIENT if self.message.backward else TransferKind.ACTIVATION

    @property
    def title(self) -> str:
        """The name of the message in a trace."""
        what = "gradient" if self.message.backward else "output"
        return f"{what} of stage {self.message.source}, micro-batch {self.message.micro_batch}"


class MessageLinks:
    """Moves messages. Those between the same two ranks move one after the other, in the order of sending.

    With `by_sockets`, as with gloo, the receiver uses the same connection to say that it is ready. A message then waits
    for those that move the other way at that time.
    """

    def __init__(self, bandwidth: BandwidthModel, by_sockets: bool) -> None:
        self._bandwidth, self._by_sockets = bandwidth, by_sockets
        self.messages: dict[Message, RankMessage] = {}
        self._queues: dict[tuple[int, int], deque[RankMessage]] = defaultdict(deque)
        self._moving: dict[Demand, RankMessage] = {}

    def post(self, message: RankMessage, sends: bool) -> None:
        """Post one end of a message."""
        message.posted += 1
        if sends:
            self._queues[message.between].append(message)
        elif self._by_sockets:
            source, target = message.between
            back = self._queues[target, source]
            moving = list(takewhile(lambda other: other.posted == 2 and other.may_move, back))
            message.behind = moving[-1] if moving else None

    def start_ready(self) -> None:
        """Start the first message of each queue if both ends have posted it."""
        moving = set(map(id, self._moving.values()))
        for queue in self._queues.values():
            while queue and queue[0].posted == 2 and queue[0].may_move and id(queue[0]) not in moving:
                message = queue[0]
                if message.began is None:
                    message.began = self._bandwidth.now
                if not message.costs:
                    self._end(queue.popleft())
                    continue
                demand = phase_demand(self._bandwidth, message.costs.popleft())
                self._bandwidth.start(demand)
                self._moving[demand] = message
                break

    def on_end(self, demand: Demand) -> bool:
        """Handle the end of a phase, and return whether it belonged to a message."""
        message = self._moving.pop(demand, None)
        if message is None:
            return False
        if not message.costs:
            self._end(self._queues[message.between].popleft())
        return True

    def _end(self, queued: RankMessage) -> None:
        assert queued.began is not None
        queued.ended = True
        crosses = any(transfer.inter_bytes for transfer in queued.transfers)
        what = queued.kind, f"stage {queued.message.source}", queued.message.micro_batch, crosses
        queued.timeline.sent(Event("messages", queued.title, queued.began, self._bandwidth.now, *what))


@dataclass(slots=True, eq=False)
class _Signal:
    """Something that threads wait for, and how many of them have come."""

    posted: int = 0
    ended: bool = False
