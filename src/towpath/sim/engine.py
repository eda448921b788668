"""What an engine does of what its step machine asks for, by a clock: transfers in their queues, and waiting for them.

A queue carries out its tasks one after the other; a gather may begin to cross while the one before it is shared out in
its node, as in the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from towpath.core.formats import item_bytes
from towpath.core.schedule import QUEUES, unused_params_transfers
from towpath.core.step_state import Action, CheckRanks, OpenGradients, SaveBackwardCopy, SetGrads, Submit, Task, Wait
from towpath.core.strategy import Strategy, TransferKind
from towpath.core.transfer import Matrices, Transfer
from towpath.core.unit_plan import UnitPlan
from towpath.sim.fluid import BandwidthModel, Demand
from towpath.sim.hardware import PROCESSOR, Hardware
from towpath.sim.lateness import Computed, Submitted, TimedTask, Waited
from towpath.sim.loads import PhaseCost, TransferShape, decoding_seconds, loads_of, matrices_load
from towpath.sim.place import HERE, Place
from towpath.sim.timeline import Event, Timeline


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of a transfer, worked out once."""

    loads: tuple[PhaseCost, ...]
    inter_bytes: int
    intra_bytes: int


@dataclass(slots=True, eq=False)
class QueuedTask:
    """A task in its queue."""

    task: Task
    micro_step: int
    loads: deque[PhaseCost]
    before: QueuedTask | None  # in the queue
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


class SimulatedEngine:
    """`plans`: the root's first. `place`: where its ranks are, if others share the clock; `of`: what its tracks are
    called after, then. `alike`: how many groups of ranks do the same, each with its own bytes."""

    def __init__(
        self,
        strategy: Strategy,
        plans: Sequence[UnitPlan],
        hardware: Hardware,
        fluid: BandwidthModel,
        timeline: Timeline,
        place: Place = HERE,
        of: str = "",
        alike: int = 1,
    ) -> None:
        assert plans[0].spec.kept
        self.plans, self._hardware, self._fluid, self._timeline = plans, hardware, fluid, timeline
        self._place, self._of, self._alike = place, of, alike
        self._queues: dict[str, deque[QueuedTask]] = {}  # what has not ended, in order, and perhaps the last that has
        self._started: dict[Demand, QueuedTask] = {}
        self._costs: dict[Transfer, _Cost] = {}
        parameters = sum(len(b.spec.numels) for p in plans for b in p.buckets if b.spec.trainable)
        self._unused_params = unused_params_transfers(strategy, parameters)

    # What the thread that trains does --------------------------------------------------------------------------------

    def execute(self, action: Action, micro_step: int) -> Iterator[Demand | QueuedTask]:
        """What the thread then computes, or waits for."""
        match action:
            case Submit(task):
                self._submit(task, micro_step)
            case Wait(task):
                yield from self._wait(task)
            case CheckRanks():
                task = Task(TransferKind.UNUSED_PARAMS, 0)
                self._submit(task, micro_step)
                yield from self._wait(task)
            case SaveBackwardCopy() | OpenGradients() | SetGrads():
                yield from self.compute(self._copies(action), "copies")
            case _:
                pass

    def compute(self, seconds: float, name: str, share: float = 1.0) -> Iterator[Demand]:
        if seconds <= 0:
            return
        needs = self._place.named({PROCESSOR: self._hardware.processor(share * seconds)})
        began = self._fluid.now
        yield Demand(max(seconds, self._fluid.alone(needs)), needs, keeps_busy=share)
        self._timeline.computed += self._fluid.now - began
        self._timeline.moments.append(Computed(self._fluid.now - began))
        self._timeline.events.append(Event("compute", f"{name}{self._of}", began, self._fluid.now))

    def _wait(self, task: Task) -> Iterator[QueuedTask]:
        waited = task.handle
        if not isinstance(waited, QueuedTask):  # of a step before
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
        self._timeline.waited(task.kind, f"for {task}{self._of}", began, self._fluid.now)

    def _copies(self, action: SaveBackwardCopy | OpenGradients | SetGrads) -> float:
        """What the thread itself copies: gradients into their slot, a copy for the backward pass, the means."""
        moved = 0
        match action:
            case SaveBackwardCopy(unit):
                moved = sum(
                    b.numel // b.backward_copy.count * item_bytes(b.compute_dtype)
                    for b in self.plans[unit].buckets
                    if b.backward_copy is not None
                )
            case OpenGradients(unit):
                moved = sum(b.numel * item_bytes(b.reduce_dtype) for b in self.plans[unit].buckets if b.spec.trainable)
            case SetGrads():
                pass  # views, or what the sync has copied already
        return moved / self._hardware.memory_rate

    # Queues ----------------------------------------------------------------------------------------------------------

    def _submit(self, task: Task, micro_step: int) -> None:
        queue = QUEUES[task.kind]
        transfers = list(self._transfers(task))
        costs = [self._cost_of(transfer) for transfer in transfers]
        loads = deque(load for cost in costs for load in cost.loads)
        self._timeline.inter_bytes += self._alike * sum(cost.inter_bytes for cost in costs)
        self._timeline.intra_bytes += self._alike * sum(cost.intra_bytes for cost in costs)
        if extra := self._own_work(task):
            loads.append(PhaseCost(0.0, {PROCESSOR: self._hardware.processor(extra)}))
        loads.extend(self._host_copies(task))
        waiting = self._queues.setdefault(queue, deque())
        last = waiting[-1] if waiting else None
        before = [h for h in (last, *(t.handle for t in task.after)) if isinstance(h, QueuedTask)]
        timed = TimedTask(transfers, self._fluid.now, after=tuple(running.timed for running in before))
        running = QueuedTask(task, micro_step, loads, last, timed, crosses=any(x.crosses for x in loads))
        task.handle = running
        waiting.append(running)
        self._timeline.moments.append(Submitted(timed))

    def _transfers(self, task: Task) -> Iterator[Transfer]:
        if task.kind is TransferKind.UNUSED_PARAMS:
            yield from self._unused_params
            return
        if task.transfers:
            yield from task.transfers
            return
        yield from self.plans[task.unit].steady_transfers(task.kind)

    def _cost_of(self, transfer: Transfer) -> _Cost:
        found = self._costs.get(transfer)
        if found is None:
            if isinstance(transfer.payload, Matrices):
                loads = (matrices_load(transfer, self._hardware),)
            else:
                loads = loads_of(TransferShape.of(transfer), self._hardware)
            if own := self._hardware.host.transfer:
                loads = (PhaseCost(0.0, {PROCESSOR: self._hardware.processor(own)}), *loads)
            found = self._costs[transfer] = _Cost(loads, transfer.inter_bytes, transfer.intra_bytes)
        return found

    def _own_work(self, task: Task) -> float:
        """Seconds that a queue works beside its transfers: it copies memory for the master's cast and the sum over
        micro-steps, and decodes what rests encoded and whole."""
        moved, decoding = 0, 0.0
        for bucket in () if task.transfers else self.plans[task.unit].buckets:
            if not bucket.spec.trainable:
                gathers = task.kind in (TransferKind.GATHER, TransferKind.BACKWARD_GATHER)
                if gathers and bucket.rests_in is not None and not bucket.transfers[task.kind]:
                    decoding += decoding_seconds(bucket.rests_in, bucket.numel, self._hardware)
                continue
            if task.kind is TransferKind.REDUCE:
                moved += bucket.numel // bucket.grads.count * item_bytes(bucket.accumulate_dtype)
            elif bucket.optimizer_on_host:
                continue  # see _host_copies
            elif task.kind is TransferKind.GRAD_SYNC or (task.kind is TransferKind.PARAM_SYNC and bucket.has_master):
                moved += bucket.numel // bucket.optimizer.count * item_bytes(bucket.own_dtype)
        return moved / self._hardware.memory_rate + decoding

    def _host_copies(self, task: Task) -> Iterator[PhaseCost]:
        """Between the device and the host's memory; what goes to the device is first rounded by the host."""
        copied = [b for b in self.plans[task.unit].buckets if b.host_copy_bytes(task.kind)]
        if not copied:
            return
        host = self._hardware.offloading
        seconds = sum(b.host_copy_bytes(task.kind) for b in copied) / host.copy_rate
        if task.kind is TransferKind.PARAM_SYNC:
            own = sum(b.numel // b.optimizer.count * item_bytes(b.own_dtype) for b in copied)
            seconds += own / host.memory_rate
        # A device copies beside what it computes; processors do nothing else meanwhile.
        if self._hardware.cores is None:
            yield PhaseCost(seconds, {})
        else:
            yield PhaseCost(0.0, {PROCESSOR: self._hardware.processor(seconds)})

    def start_what_may(self) -> None:
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
                flow = started(self._fluid, replace(load, needs=self._place.named(load.needs)))
                self._started[flow] = running
                busy.add(id(running))

    def _waiting(self) -> Iterator[QueuedTask]:
        for queue in self._queues.values():
            while len(queue) > 1 and queue[0].ended:
                queue.popleft()
            yield from (running for running in islice(queue, 2) if not running.ended)

    def _may_go_on(self, running: QueuedTask) -> bool:
        if any(isinstance(t.handle, QueuedTask) and not t.handle.ended for t in running.task.after):
            return False
        before = running.before
        if before is None or before.ended:
            return True
        # Not its turn: but its first phase may cross already, if it does nothing else.
        first = running.began is None and bool(running.loads) and running.loads[0].crosses
        return first and len(running.loads) > 1 and before.links_are_free

    def ends(self, flow: Demand) -> bool:
        """A phase of a task has ended, if it is one of this engine's."""
        running = self._started.pop(flow, None)
        if running is None:
            return False
        running.crosses_now = False
        if not running.loads and (running.before is None or running.before.ended):
            self._end(running)
        return True

    def _end(self, running: QueuedTask) -> None:
        assert running.began is not None
        running.ended, running.before = True, None
        task, now = running.task, self._fluid.now
        running.timed.began, running.timed.ended = running.began, now
        unit = task.transfers[0].unit if task.transfers else self.plans[task.unit].name
        name = f"{task.kind.value} of {unit or 'root'}{self._of}"
        track = f"{QUEUES[task.kind]}{self._of}"
        self._timeline.sent(
            Event(track, name, running.began, now, task.kind, unit, running.micro_step, running.crosses)
        )


def started(fluid: BandwidthModel, load: PhaseCost) -> Demand:
    flow = Demand(load.seconds + fluid.alone(load.needs), load.needs, load.busy_seconds)
    fluid.start(flow)
    return flow
