"""One training step, replayed: what the step machine asks for, carried out by a clock instead of an engine.

The thread that trains computes, submits and waits, as `core/steady_step.py` has it. A queue carries out its tasks one
after the other; a gather may begin to cross while the one before it is shared out in its node, as in the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from towpath.core.actions import Collect, Compare, Deliver, Keep, Submit, Task, Wait
from towpath.core.formats import item_bytes
from towpath.core.queues import QUEUES
from towpath.core.schedule import UnitPlan, usage_transfers
from towpath.core.steady_step import Compute, Part, settled, steady_step
from towpath.core.strategy import Kind, Strategy
from towpath.core.transfer import Transfer
from towpath.sim.fluid import Flow, Fluid
from towpath.sim.hardware import PROCESSOR, Hardware
from towpath.sim.lateness import Computed, Moment, Submitted, TimedTask, Waited
from towpath.sim.loads import Load, TransferShape, loads_of


@dataclass(frozen=True, slots=True)
class Seconds:
    """What one rank computes, if nothing else goes on: in each unit's passes (the root's come first), in the root's
    after those of all others, and in the optimizer's step. `share`: of the passes' seconds, those in which the
    processor works, and not something beside it that takes nothing from what moves and encodes bytes.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    forward_end: float
    backward_end: float
    optimizer: float = 0.0
    share: float = 1.0

    @property
    def micro_step(self) -> float:
        """All but the optimizer's."""
        return sum(self.forward) + sum(self.backward) + self.forward_end + self.backward_end

    def of(self, compute: Compute) -> float:
        match compute.part:
            case Part.FORWARD:
                return self.forward[compute.unit]
            case Part.BACKWARD:
                return self.backward[compute.unit]
            case Part.FORWARD_END:
                return self.forward_end
            case Part.BACKWARD_END:
                return self.backward_end


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took place. `track`: 'compute', 'waiting', or a queue's name."""

    track: str
    name: str
    start: float
    end: float
    kind: Kind | None = None
    unit: str = ""
    micro_step: int = 0
    crosses: bool = False


@dataclass(slots=True)
class Timeline:
    """A step that is over. `exposed`: by kind, what the computation waited for. Bytes: sent by all ranks together.

    `moments`: what the thread that trains did, in its order, for those who ask what uneven ranks cost.
    """

    seconds: float = 0.0
    computed: float = 0.0
    inter_bytes: int = 0
    intra_bytes: int = 0
    events: list[Event] = field(default_factory=list[Event])
    exposed: dict[Kind, float] = field(default_factory=dict[Kind, float])
    in_flight: dict[Kind, float] = field(default_factory=dict[Kind, float])
    moments: list[Moment] = field(default_factory=list[Moment])

    def with_more(self, times: int, shorter: Timeline) -> Timeline:
        """Of a step with so many more of what this one has more than `shorter`."""

        def more(mine: float, theirs: float) -> float:
            return mine + times * (mine - theirs)

        return Timeline(
            more(self.seconds, shorter.seconds),
            more(self.computed, shorter.computed),
            self.inter_bytes + times * (self.inter_bytes - shorter.inter_bytes),
            self.intra_bytes + times * (self.intra_bytes - shorter.intra_bytes),
            self.events,
            {kind: more(found, shorter.exposed.get(kind, 0.0)) for kind, found in self.exposed.items()},
            {kind: more(found, shorter.in_flight.get(kind, 0.0)) for kind, found in self.in_flight.items()},
        )


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of a transfer, worked out once."""

    loads: tuple[Load, ...]
    inter_bytes: int
    intra_bytes: int


@dataclass(slots=True, eq=False)
class _Running:
    """A task in its queue."""

    task: Task
    micro_step: int
    loads: deque[Load]
    before: _Running | None  # in the queue
    timed: TimedTask
    began: float | None = None
    ended: bool = False
    crosses: bool = False
    crosses_now: bool = False

    @property
    def links_are_free(self) -> bool:
        """Nothing of it crosses any more."""
        still = self.crosses_now or any(load.crosses for load in self.loads)
        return self.ended or (self.began is not None and not still)


class Replay:
    """`plans`: the root's first."""

    def __init__(
        self, strategy: Strategy, plans: Sequence[UnitPlan], hardware: Hardware, seconds: Seconds, micro_steps: int
    ) -> None:
        assert plans[0].spec.kept
        self._plans, self._hardware, self._seconds = plans, hardware, seconds
        self._facts = [plan.facts() for plan in plans]
        self._micro_steps = micro_steps
        self._fluid = Fluid(hardware.capacities)
        self._timeline = Timeline()
        self._last: dict[str, _Running] = {}  # by queue
        self._started: dict[Flow, _Running] = {}
        self._costs: dict[Transfer, _Cost] = {}
        parameters = sum(len(b.spec.numels) for p in plans for b in p.buckets if b.spec.trainable)
        self._usage = usage_transfers(strategy, parameters)

    def run(self) -> Timeline:
        """The step, its optimizer's part included."""
        thread = self._thread()
        flow, waits_for = self._next(thread)
        while flow is not None or waits_for is not None:
            self._start_what_may()
            if waits_for is not None and waits_for.ended:
                flow, waits_for = self._next(thread)
                continue
            assert self._fluid.flows, f"the replay stands still at {waits_for and waits_for.task}"
            for ended in self._fluid.advance():
                if ended is flow:
                    flow, waits_for = self._next(thread)
                else:
                    self._ends(self._started.pop(ended))
        self._timeline.seconds = self._fluid.now
        return self._timeline

    # The thread that trains ------------------------------------------------------------------------------------------

    def _next(self, thread: Iterator[Flow | _Running]) -> tuple[Flow | None, _Running | None]:
        """Until it computes, or waits for something that has not ended; (None, None): the step is over."""
        for what in thread:
            if isinstance(what, Flow):
                self._fluid.start(what)
                return what, None
            if not what.ended:
                return None, what
        return None, None

    def _thread(self) -> Iterator[Flow | _Running]:
        machine = settled(self._facts)
        for micro_step, action in steady_step(machine, self._facts, self._micro_steps):
            match action:
                case Compute():
                    name = f"{action.part.value} of {self._facts[action.unit].name or 'root'}"
                    yield from self._compute(self._seconds.of(action), name, self._seconds.share)
                case Submit(task):
                    self._submit(task, micro_step)
                case Wait(task):
                    yield from self._wait(task)
                case Compare():
                    task = Task(Kind.USAGE, 0)
                    self._submit(task, micro_step)
                    yield from self._wait(task)
                case Keep() | Collect() | Deliver():
                    yield from self._compute(self._copies(action), "copies")
                case _:
                    pass
        yield from self._compute(self._seconds.optimizer, "optimizer")

    def _compute(self, seconds: float, name: str, share: float = 1.0) -> Iterator[Flow]:
        if seconds <= 0:
            return
        needs = {PROCESSOR: self._hardware.processor(share * seconds)}
        began = self._fluid.now
        yield Flow(max(seconds, self._fluid.alone(needs)), needs, keeps_busy=share)
        self._timeline.computed += self._fluid.now - began
        self._timeline.moments.append(Computed(self._fluid.now - began))
        self._timeline.events.append(Event("compute", name, began, self._fluid.now))

    def _wait(self, task: Task) -> Iterator[_Running]:
        waited = task.handle
        if not isinstance(waited, _Running):  # of a step before
            return
        self._timeline.moments.append(Waited(waited.timed, self._fluid.now))
        if waited.ended:
            return
        for earlier in task.after:  # so that its seconds are told to those whose they are
            yield from self._wait(earlier)
        if waited.ended:
            return
        began = self._fluid.now
        yield waited
        self._timeline.events.append(Event("waiting", f"for {task}", began, self._fluid.now, task.kind))
        exposed = self._timeline.exposed
        exposed[task.kind] = exposed.get(task.kind, 0.0) + self._fluid.now - began

    def _copies(self, action: Keep | Collect | Deliver) -> float:
        """What the thread itself copies: gradients into their slot, a copy for the backward pass, the means."""
        moved = 0
        match action:
            case Keep(unit):
                moved = sum(
                    b.numel // b.backward_copy.count * item_bytes(b.compute_dtype)
                    for b in self._plans[unit].buckets
                    if b.backward_copy is not None
                )
            case Collect(unit):
                moved = sum(b.numel * item_bytes(b.reduce_dtype) for b in self._plans[unit].buckets if b.spec.trainable)
            case Deliver():
                pass  # views, or what the sync has copied already
        return moved / self._hardware.memory_rate

    # Queues ----------------------------------------------------------------------------------------------------------

    def _submit(self, task: Task, micro_step: int) -> None:
        queue = QUEUES[task.kind]
        transfers = list(self._transfers(task))
        costs = [self._cost_of(transfer) for transfer in transfers]
        loads = deque(load for cost in costs for load in cost.loads)
        self._timeline.inter_bytes += sum(cost.inter_bytes for cost in costs)
        self._timeline.intra_bytes += sum(cost.intra_bytes for cost in costs)
        if extra := self._own_work(task):
            loads.append(Load(0.0, {PROCESSOR: self._hardware.processor(extra)}))
        last = self._last.get(queue)
        before = [h for h in (last, *(t.handle for t in task.after)) if isinstance(h, _Running)]
        timed = TimedTask(transfers, self._fluid.now, after=tuple(running.timed for running in before))
        running = _Running(task, micro_step, loads, last, timed, crosses=any(x.crosses for x in loads))
        task.handle = self._last[queue] = running
        self._timeline.moments.append(Submitted(timed))

    def _transfers(self, task: Task) -> Iterator[Transfer]:
        if task.kind is Kind.USAGE:
            yield from self._usage
            return
        for bucket in self._plans[task.unit].buckets:
            if task.kind is not Kind.PUBLISH or bucket.spec.trainable:
                yield from bucket.transfers[task.kind]

    def _cost_of(self, transfer: Transfer) -> _Cost:
        found = self._costs.get(transfer)
        if found is None:
            loads = loads_of(TransferShape.of(transfer), self._hardware)
            if own := self._hardware.host.transfer:
                loads = (Load(0.0, {PROCESSOR: self._hardware.processor(own)}), *loads)
            found = self._costs[transfer] = _Cost(loads, transfer.inter_bytes, transfer.intra_bytes)
        return found

    def _own_work(self, task: Task) -> float:
        """Seconds that a queue copies memory beside its transfers: the master's cast, the sum over micro-steps."""
        moved = 0
        for bucket in self._plans[task.unit].buckets:
            if not bucket.spec.trainable:
                continue
            if task.kind is Kind.REDUCE:
                moved += bucket.numel // bucket.grads.count * item_bytes(bucket.accumulate_dtype)
            elif task.kind is Kind.SYNC or (task.kind is Kind.PUBLISH and bucket.has_master):
                moved += bucket.numel // bucket.optimizer.count * item_bytes(bucket.own_dtype)
        return moved / self._hardware.memory_rate

    def _start_what_may(self) -> None:
        """Of each queue the first that has not ended; and the one behind it, as far as it may begin."""
        busy = set(map(id, self._started.values()))
        again = True
        while again:
            again = False
            for running in list(self._waiting()):
                if id(running) in busy or not self._may_go_on(running):
                    continue
                if running.began is None:
                    running.began = self._fluid.now
                if not running.loads:
                    self._end(running)
                    again = True
                    continue
                load = running.loads.popleft()
                running.crosses_now = load.crosses
                alone = self._fluid.alone(load.needs)
                flow = Flow(load.seconds + alone, load.needs, load.busy_seconds)
                self._started[flow] = running
                busy.add(id(running))
                self._fluid.start(flow)

    def _waiting(self) -> Iterator[_Running]:
        for last in self._last.values():
            chain: list[_Running] = []
            at: _Running | None = last
            while at is not None and not at.ended:
                chain.append(at)
                at = at.before
            yield from chain[:-3:-1]  # the first, and the one behind it

    def _may_go_on(self, running: _Running) -> bool:
        if any(isinstance(t.handle, _Running) and not t.handle.ended for t in running.task.after):
            return False
        before = running.before
        if before is None or before.ended:
            return True
        # Not its turn: but its first phase may cross already, if it does nothing else.
        first = running.began is None and bool(running.loads) and running.loads[0].crosses
        return first and len(running.loads) > 1 and before.links_are_free

    def _ends(self, running: _Running) -> None:
        """A phase of it."""
        running.crosses_now = False
        if not running.loads and (running.before is None or running.before.ended):
            self._end(running)

    def _end(self, running: _Running) -> None:
        assert running.began is not None
        running.ended, running.before = True, None
        task, now = running.task, self._fluid.now
        running.timed.began, running.timed.ended = running.began, now
        in_flight = self._timeline.in_flight
        in_flight[task.kind] = in_flight.get(task.kind, 0.0) + now - running.began
        name = f"{task.kind.value} of {self._facts[task.unit].name or 'root'}"
        self._timeline.events.append(
            Event(
                QUEUES[task.kind],
                name,
                running.began,
                now,
                task.kind,
                self._facts[task.unit].name,
                running.micro_step,
                running.crosses,
            )
        )
