"""A simulated engine: it executes the actions of a step machine with a clock, in transfer queues.

A queue runs its tasks one after the other, as in the real engine. The messages of a gather between nodes may start
while the gather before it is still distributed inside the node. A communicator of NCCL runs its calls one after the
other, too, in the order in which the tasks of all queues that share it were submitted.

Where a device computes, the training thread only launches. It runs ahead of the device and never waits for it. What
the simulated thread computes, submits and waits for is then the device's order of work. Each of these follows its
launch, which follows all earlier ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from towpath.core.costs import MESSAGE_ENCODING, Launches, launches_of
from towpath.core.formats import item_bytes
from towpath.core.queues import QUEUES, Communicator, CommunicatorSharing, digest_bytes, shared_lanes
from towpath.core.schedule import message_sizes_transfers, unused_params_transfers
from towpath.core.step_state import (
    Action,
    AgreeOnSizes,
    ApplyOuter,
    CheckRanks,
    OpenGradients,
    SaveBackwardCopy,
    Submit,
    Task,
    Wait,
)
from towpath.core.strategy import OUTER_KINDS, Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.unit_plan import UnitPlan
from towpath.outer.exchanges import OuterPlan
from towpath.plan.bandwidth import BandwidthModel, Demand, Event, Timeline
from towpath.plan.hardware import EVERYWHERE, INSIDE, PROCESSOR, Hardware, Launching, StageLocation
from towpath.plan.transfer_costs import PhaseCost, TransferShape, encoding_seconds, phase_costs

# The bytes of a transfer, as fields of a timeline.
_BYTES = ("inter_bytes", "intra_bytes", "saved_inter_bytes", "saved_intra_bytes")


# Computing differences reads and writes memory about as long as this many copies. Applying a result takes this many.
_DIFFERENCE_COPIES, _APPLIED_COPIES = 3.0, 8.0
# What surrounds the transfers of one task takes about as long as three kernels: a switch of the stream, and events.
_TASK = Launches(operations=3)
# An estimate of how many kernels a forward pass launches for each parameter: products, norms, activations, casts.
KERNELS_OF_A_PARAMETER = 4


@dataclass(slots=True)
class LaunchingThread:
    """The thread of one rank that launches, where a device computes. `costs` is None where launches cost nothing.

    `until` is when it will have launched everything so far.
    """

    costs: Launching | None
    until: float = 0.0


@dataclass(slots=True, eq=False)
class QueuedTask:
    """A task in its queue. `before` is the task ahead of it, `costs` are the phases that have not begun."""

    task: Task
    micro_step: int
    costs: deque[PhaseCost]
    before: QueuedTask | None
    began: float | None = None
    ended: bool = False
    crosses: bool = False
    running: PhaseCost | None = None


class SimulatedEngine:
    """The engine of one rank that represents all ranks of the job, or of its stage. The root's plan comes first.

    A stage has a `location` and a `suffix` for the names of its tracks. `copies` is the number of groups of ranks that
    do the same, each with its own bytes. Engines of one rank share its launching `thread`. `outer` is the plan of outer
    steps, if there are any.
    """

    def __init__(
        self,
        strategy: Strategy,
        plans: Sequence[UnitPlan],
        hardware: Hardware,
        bandwidth: BandwidthModel,
        timeline: Timeline,
        location: StageLocation = EVERYWHERE,
        suffix: str = "",
        copies: int = 1,
        thread: LaunchingThread | None = None,
        outer: OuterPlan | None = None,
    ) -> None:
        assert plans[0].spec.root
        self._outer = outer
        self.plans, self._hardware, self._bandwidth, self._timeline = plans, hardware, bandwidth, timeline
        self._location, self._suffix, self._copies = location, suffix, copies
        # Tasks that have not ended, in order. The last task of a queue stays until another one follows.
        self._queues: dict[str, deque[QueuedTask]] = {}
        self._started: dict[Demand, QueuedTask] = {}
        # For each communicator, the tasks whose calls have not ended, once for each phase, in the order of submission.
        self._calls: defaultdict[Communicator, deque[QueuedTask]] = defaultdict(deque)
        self._costs: dict[Transfer, tuple[list[PhaseCost], tuple[int, ...]]] = {}
        self._lanes = CommunicatorSharing.of(plans)
        self._launcher = thread or LaunchingThread(hardware.launching)
        parameters = sum(len(b.spec.numels) for p in plans for b in p.buckets if b.spec.trainable)
        self._between_hosts = {
            TransferKind.UNUSED_PARAMS: unused_params_transfers(
                strategy, parameters, digest_bytes(strategy, shared_lanes(strategy, plans))
            ),
            TransferKind.MESSAGE_SIZES: message_sizes_transfers(strategy, plans),
        }

    # The training thread ---------------------------------------------------------------------------------------------

    def execute(self, action: Action, micro_step: int) -> Iterator[Demand | QueuedTask]:
        """Execute an action, and yield what the thread computes or waits for."""
        match action:
            case Submit(task):
                if task.kind is TransferKind.OUTER:
                    yield from self._compute_outer(task.unit, _DIFFERENCE_COPIES)
                yield from self.launch(self._launches_of(task) + _TASK)
                self._submit(task, micro_step)
            case ApplyOuter(fragment, _, gather):
                yield from self._compute_outer(fragment, _APPLIED_COPIES)
                yield from self.compute(self._exchange_copy(fragment), "copies")
                if gather is not None:
                    yield from self.execute(Submit(gather), micro_step)
                    yield from self._wait(gather)
            case Wait(task):
                yield from self._wait(task)
            case CheckRanks():
                task = Task(TransferKind.UNUSED_PARAMS, 0)
                self._submit(task, micro_step)
                yield from self._wait(task)
            case AgreeOnSizes(units, task):
                yield from self._agree_on_sizes(units, task, micro_step)
            case SaveBackwardCopy(unit):
                yield from self._copy(
                    b.numel // b.backward_copy.count * item_bytes(b.compute_dtype)
                    for b in self.plans[unit].buckets
                    if b.backward_copy is not None
                )
            case OpenGradients(unit):  # copied into their slot
                buckets = [b for b in self.plans[unit].buckets if b.spec.trainable]
                yield from self._copy(b.numel * item_bytes(b.reduce_dtype) for b in buckets)
            case _:  # the engine's own books
                pass

    def launch(self, launches: Launches, passes: int = 0) -> Iterator[Demand]:
        """Launch what follows, with so many passes of units. Wait while the device is ahead of the thread."""
        if (costs := self._launcher.costs) is None:
            return
        seconds = costs.of(launches) + passes * costs.unit
        self._launcher.until += seconds
        self._timeline.launching += seconds
        began = self._bandwidth.now
        if self._launcher.until > began:
            yield Demand(self._launcher.until - began, {})
            self._timeline.unlaunched += self._bandwidth.now - began
            self._timeline.events.append(Event("waiting", f"for launches{self._suffix}", began, self._bandwidth.now))

    def launch_kernels(self, unit: int, times: float) -> Iterator[Demand]:
        """Launch a part of a unit's pass, which has `times` as many kernels as its forward pass.

        It comes after the computation, which the device begins when the thread has launched the first kernel.
        """
        if times:
            parameters = sum(len(bucket.spec.numels) for bucket in self.plans[unit].buckets)
            yield from self.launch(Launches(operations=round(KERNELS_OF_A_PARAMETER * parameters * times)), passes=1)

    def compute(self, seconds: float, name: str, share: float = 1.0) -> Iterator[Demand]:
        """Compute for some seconds. The processor works during a `share` of them."""
        if seconds <= 0:
            return
        needs = self._location.named({PROCESSOR: self._hardware.processor(share * seconds)})
        began = self._bandwidth.now
        yield Demand(max(seconds, self._bandwidth.alone(needs)), needs)
        self._timeline.computed += self._bandwidth.now - began
        self._timeline.events.append(Event("compute", f"{name}{self._suffix}", began, self._bandwidth.now))

    def _copy(self, nbytes: Iterable[int]) -> Iterator[Demand]:
        yield from self.launch(Launches(operations=1))
        yield from self.compute(sum(nbytes) / self._hardware.memory_rate, "copies")

    def _wait(self, task: Task) -> Iterator[QueuedTask]:
        waited = task.handle
        if not isinstance(waited, QueuedTask) or waited.ended:  # another handle is of an earlier step
            return
        # The tasks before it come first, so that the time spent waiting counts for the kind that caused it.
        for earlier in task.after:
            yield from self._wait(earlier)
        began = self._bandwidth.now
        if not waited.ended:
            yield waited
            self._timeline.waited(task.kind, f"for {task}{self._suffix}", began, self._bandwidth.now)

    def _compute_outer(self, fragment: int, copies: float) -> Iterator[Demand]:
        """Compute before or after an exchange between islands, as long as `copies` copies of a rank's part of it."""
        assert self._outer is not None
        yield from self.launch(Launches(operations=round(copies)))
        rank_bytes = self._outer.fragments[fragment].rank_bytes
        yield from self.compute(copies * rank_bytes / self._hardware.memory_rate, "outer steps")

    def _exchange_copy(self, fragment: int) -> float:
        """Return the seconds of one copy of a rank's part of an exchange between its device and the host."""
        plan = self._outer
        if plan is None or not plan.from_host or plan.strategy.optimizer_on_host:
            return 0.0
        return plan.fragments[fragment].rank_bytes / self._hardware.of_hosts.offloading.copy_rate

    def _agree_on_sizes(self, units: Sequence[int], task: Task, micro_step: int) -> Iterator[Demand | QueuedTask]:
        """Encode parameter syncs, and wait on the host until all ranks know the sizes."""
        hardware = self._hardware
        transfers = [t for index in units for t in self.plans[index].steady_transfers(TransferKind.PARAM_SYNC)]
        agreeing = [t for t in transfers if t.agrees_on_sizes]
        yield from self.launch(len(agreeing) * MESSAGE_ENCODING + _TASK)
        yield from self.compute(sum(encoding_seconds(t, hardware) for t in agreeing), "encoding")
        self._submit(task, micro_step)
        yield from self._wait(task)
        self._launcher.until = max(self._launcher.until, self._bandwidth.now)  # the host could not run ahead

    def run(self, transfer: Transfer, name: str) -> Iterator[Demand]:
        """Run a transfer in the order of the computation, which waits for it."""
        yield from self.launch(launches_of(transfer))
        began = self._bandwidth.now
        for phase in phase_costs(TransferShape.of(transfer), self._hardware):
            yield phase_demand(self._bandwidth, replace(phase, needs=self._location.named(phase.needs)))
        self._timeline.waited(transfer.kind, name, began, self._bandwidth.now)

    # Queues ----------------------------------------------------------------------------------------------------------

    def _transfers_of(self, task: Task) -> list[Transfer]:
        if task.kind in self._between_hosts:
            return list(self._between_hosts[task.kind])
        return list(task.transfers or self.plans[task.unit].steady_transfers(task.kind))

    def _launches_of(self, task: Task) -> Launches:
        """Return what a task launches: its transfers, and what `_queue_seconds` and `_host_copies` time."""
        buckets = () if task.transfers else self.plans[task.unit].buckets
        # A reduction divides, and adds to the sum. Parameters are cast, or copied from the host or to it.
        each = {TransferKind.REDUCE: 2, TransferKind.GRAD_SYNC: 2, TransferKind.PARAM_SYNC: 1}.get(task.kind, 0)
        copies = sum(b.casts_for(task.kind) or (b.params_on_host and b.host_copy_bytes(task.kind) > 0) for b in buckets)
        own = Launches(operations=each * sum(bucket.spec.trainable for bucket in buckets) + copies)
        return sum(map(launches_of, self._transfers_of(task)), own)

    def _submit(self, task: Task, micro_step: int) -> None:
        transfers = self._transfers_of(task)
        found = [self._cost_of(transfer) for transfer in transfers]
        costs = deque(phase for phases, _ in found for phase in phases)
        copies = 1 if task.kind in OUTER_KINDS else self._copies  # those are transfers of all islands together
        for name, sent in zip(_BYTES, zip(*(sent for _, sent in found), strict=True), strict=False):
            setattr(self._timeline, name, getattr(self._timeline, name) + copies * sum(sent))
        if extra := self._queue_seconds(task):
            costs.append(self._working(extra))
        if task.kind is TransferKind.OUTER and (seconds := self._exchange_copy(task.unit)):
            costs.appendleft(PhaseCost(seconds, {}))
        if (copied := self._host_copies(task)) is not None:
            brings = task.kind in (TransferKind.GATHER, TransferKind.BACKWARD_GATHER)  # what they send
            costs.insert(0 if brings else len(costs), copied)
        waiting = self._queues.setdefault(QUEUES[task.kind], deque())
        last = waiting[-1] if waiting else None
        queued = QueuedTask(task, micro_step, costs, last, crosses=any(cost.crosses for cost in costs))
        for cost in costs:
            for communicator in cost.communicators:
                self._calls[communicator].append(queued)
        task.handle = queued
        waiting.append(queued)

    def _cost_of(self, transfer: Transfer) -> tuple[list[PhaseCost], tuple[int, ...]]:
        """Return the phases and bytes of a transfer. Computing them takes long, so each transfer does so once."""
        if transfer not in self._costs:
            hardware = self._hardware
            if transfer.kind in OUTER_KINDS:  # between islands. A probe has measured other groups.
                hardware = replace(hardware, topology=transfer.topology, measured=None)
            from_host = transfer.kind in OUTER_KINDS and transfer.between_hosts and hardware.cores is None
            phases = phase_costs(TransferShape.of(transfer), hardware.of_hosts if from_host else hardware)
            if from_host:
                phases = tuple(phase.beside_device for phase in phases)
            own = [self._working(work)] if (work := hardware.transfer_work) else []
            every = self._lanes.communicators(transfer)
            phases = [replace(phase, communicators=_called(transfer, every, phase)) for phase in (*own, *phases)]
            saved = 0.0 if transfer.coding is None else 1.0 - transfer.coding.share
            inter, intra = transfer.inter_bytes, transfer.intra_bytes
            inside = round(saved * intra) if transfer.encoded_inside else 0
            self._costs[transfer] = phases, (inter, intra, round(saved * inter), inside)
        return self._costs[transfer]

    def _queue_seconds(self, task: Task) -> float:
        """Return the seconds that a queue works in addition to its transfers.

        It copies memory for the cast of the master weights and for the sum over micro-steps. It also decodes unsharded
        parameters that are stored encoded.
        """
        moved, decoding = 0.0, 0.0
        for bucket in () if task.transfers else self.plans[task.unit].buckets:
            if bucket.casts_for(task.kind):
                moved += bucket.numel // bucket.optimizer.count * item_bytes(bucket.own_dtype)
            if not bucket.spec.trainable:
                gathers = task.kind in (TransferKind.GATHER, TransferKind.BACKWARD_GATHER)
                if gathers and bucket.rests_in is not None and not bucket.transfers[task.kind]:
                    decoding += bucket.numel / self._hardware.codec_speed(bucket.rests_in.name).decode
                continue
            if task.kind is TransferKind.REDUCE:
                moved += bucket.numel // bucket.grads.count * item_bytes(bucket.accumulate_dtype)
            elif bucket.optimizer_on_host and not (task.kind is TransferKind.PARAM_SYNC and bucket.staged):
                continue  # see _host_copies
            elif task.kind is TransferKind.GRAD_SYNC or (task.kind is TransferKind.PARAM_SYNC and bucket.has_master):
                moved += bucket.numel // bucket.optimizer.count * item_bytes(bucket.own_dtype)
        return moved / self._hardware.memory_rate + decoding

    def _host_copies(self, task: Task) -> PhaseCost | None:
        """Return the copies between device and host memory. The device casts what it gets."""
        # The unit of an optimizer's step is the number of its round. Its transfers copy nothing.
        buckets = () if task.transfers else self.plans[task.unit].buckets
        copied = sum(b.host_copy_bytes(task.kind, self._hardware.cores is None) for b in buckets)
        if not copied:
            return None
        self._timeline.host_copy_bytes += copied
        seconds = copied / self._hardware.offloading.copy_rate
        # A device copies while it computes. Processors can do nothing else meanwhile.
        return PhaseCost(seconds, {}) if self._hardware.cores is None else self._working(seconds)

    def _working(self, seconds: float) -> PhaseCost:
        return PhaseCost(0.0, {PROCESSOR: self._hardware.processor(seconds)})

    def start_ready(self) -> None:
        """Start the first task of each queue that has not ended, and the next one as far as it may begin."""
        busy = set(map(id, self._started.values()))
        again = True
        while again:
            again = False
            for queued in list(self._waiting()):
                if id(queued) in busy or not self._may_go_on(queued):
                    continue
                if queued.costs and any(self._calls[c][0] is not queued for c in queued.costs[0].communicators):
                    continue
                queued.began = self._bandwidth.now if queued.began is None else queued.began
                if not queued.costs:
                    self._end(queued)
                    again = True
                    continue
                cost = queued.running = queued.costs.popleft()
                demand = phase_demand(self._bandwidth, replace(cost, needs=self._location.named(cost.needs)))
                self._bandwidth.start(demand)
                self._started[demand] = queued
                busy.add(id(queued))

    def _waiting(self) -> Iterator[QueuedTask]:
        for queue in self._queues.values():
            while len(queue) > 1 and queue[0].ended:
                queue.popleft()
            yield from (queued for queued in islice(queue, 2) if not queued.ended)

    def _may_go_on(self, queued: QueuedTask) -> bool:
        if any(isinstance(t.handle, QueuedTask) and not t.handle.ended for t in queued.task.after):
            return False
        before = queued.before
        if before is None or before.ended:
            return True
        # It is not this task's turn yet. Its first phase may still cross nodes, if it does nothing else. The task
        # before it must have begun, and must not cross nodes from now on.
        still = [*before.costs, *([] if before.running is None else [before.running])]
        if before.began is None or any(cost.crosses for cost in still):
            return False
        return queued.began is None and len(queued.costs) > 1 and queued.costs[0].crosses

    def on_end(self, demand: Demand) -> bool:
        """Handle the end of a phase, and return whether it belonged to this engine."""
        queued = self._started.pop(demand, None)
        if queued is None:
            return False
        assert queued.running is not None
        for communicator in queued.running.communicators:
            self._calls[communicator].popleft()
        queued.running = None
        if not queued.costs and (queued.before is None or queued.before.ended):
            self._end(queued)
        return True

    def _end(self, queued: QueuedTask) -> None:
        assert queued.began is not None
        queued.ended, queued.before = True, None
        task, now = queued.task, self._bandwidth.now
        unit = task.transfers[0].unit if task.transfers else self.plans[task.unit].spec.name
        name = f"{task.kind.value} of {unit or 'root'}{self._suffix}"
        track = f"{QUEUES[task.kind]}{self._suffix}"
        self._timeline.sent(Event(track, name, queued.began, now, task.kind, unit, queued.micro_step, queued.crosses))


def _called(transfer: Transfer, communicators: tuple[Communicator, ...], phase: PhaseCost) -> tuple[Communicator, ...]:
    """Return the communicators whose calls make up a phase of `transfer`: none if it only encodes or decodes."""
    calls = [bool(phase.needs.get(INSIDE)), phase.crosses]  # of a row, and of a column
    if not transfer.by_rows_and_columns:
        calls = [any(calls)]
    return tuple(each for each, used in zip(communicators, calls, strict=False) if used)


def phase_demand(bandwidth: BandwidthModel, cost: PhaseCost) -> Demand:
    """Return a phase of a transfer as an activity."""
    return Demand(cost.seconds + bandwidth.alone(cost.needs), cost.needs)
