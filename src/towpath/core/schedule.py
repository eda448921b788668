"""The schedule of one optimizer step: every transfer with its ranks, route, codec and bytes, in order of submission.

A schedule is what the step machine (`core/step.py`) submits over one steady step: every unit runs once in each pass, in
the order of the model, as in the step before. The engine runs the same machine, so bytes, order and memory of the
schedule match the real run. The simulator replays the computations and actions of the steady step. This file also holds
the choice of a placement for frozen parameters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain

from towpath.core.buffers import Needs, largest
from towpath.core.formats import Precision, item_bytes
from towpath.core.owner_stepped import MatrixPlan, OwnedParameter, plan_matrices
from towpath.core.passes import PassKind, StagePass
from towpath.core.placement import everyone
from towpath.core.protection import Protection, protection_of
from towpath.core.queues import MAX_IN_FLIGHT, QUEUES, communicator_bytes, digest_bytes, shared_lanes
from towpath.core.routes import Form
from towpath.core.shares import TOLD
from towpath.core.step import StepMachine
from towpath.core.step_state import Action, AgreeOnSizes, ForwardPass, Submit, Task, slot_groups
from towpath.core.strategy import AS_TRAINED, WITH_TRANSPORT, Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.unit_plan import UnitPlan, plan_unit
from towpath.core.units import Range, UnitSpec
from towpath.errors import ConfigError
from towpath.observe.totals import SentBytes
from towpath.outer.exchanges import OuterPlan, plan_outer
from towpath.topology.cluster import Extent


def unused_params_transfers(strategy: Strategy, parameters: int, log: int) -> tuple[Transfer, ...]:
    """Return the all-reduce with which the ranks compare their step at the boundary."""
    # It has one byte for each parameter, which says whether any rank used it: an unused parameter keeps `.grad` None.
    # Then follow digests of what each rank has submitted (`engine/agree/digest.py`), and with unequal batches what each
    # rank tells about its own (`engine/unequal_batches.py`).
    # `parameters`: The number of trainable parameters. Without any, nothing is compared.
    # `log`: The bytes of the digests, as `digest_bytes` returns them.
    shares = 0 if strategy.shares is None else strategy.topology.world * TOLD.size
    return over_all_ranks(strategy, TransferKind.UNUSED_PARAMS, parameters and parameters + log + shares, "uint8")


def message_sizes_transfers(strategy: Strategy, plans: Iterable[UnitPlan]) -> tuple[Transfer, ...]:
    """Return the all-reduce with which the ranks agree on sizes before parameter syncs, if any unit needs that."""
    # It has the size of one message for each transfer whose sizes the ranks agree on, and whether any rank could not
    # decode the messages before.
    agreeing = sum(t.agrees_on_sizes for plan in plans for t in plan.transfers(TransferKind.PARAM_SYNC))
    return over_all_ranks(strategy, TransferKind.MESSAGE_SIZES, agreeing and agreeing + 1, "int64")


def over_all_ranks(strategy: Strategy, kind: TransferKind, elements: int, dtype: str) -> tuple[Transfer, ...]:
    """Return an all-reduce for the whole model, or nothing if there are no elements or no other ranks."""
    topology, payload = strategy.topology, Range("", "", elements, dtype)
    return tuple(Transfer(kind, payload, m, Transport(), topology) for m in everyone(topology) if elements)


@dataclass(frozen=True, slots=True)
class Schedule(SentBytes):
    """Every transfer of one optimizer step, in the order in which the engine submits them.

    Attributes:
        strategy: The strategy of the model.
        micro_steps: The forward and backward passes of one optimizer step.
        plans: One plan for each unit: its buckets, and what happens to them.
        transfers: The transfers in order, those of all units.
        matrices: The plan of an optimizer that needs full matrices, if any.
        copied: The bytes that one rank copies between its device and host memory, by kind of transfer.
        outer: What islands exchange in one period, if the strategy has outer steps. `transfers` are those of a step in
            which no exchange begins, on all islands.
    """

    strategy: Strategy
    micro_steps: int
    plans: tuple[UnitPlan, ...]
    transfers: tuple[Transfer, ...]
    matrices: MatrixPlan | None = None
    copied: dict[TransferKind, int] = field(default_factory=dict[TransferKind, int])
    outer: OuterPlan | None = None

    @property
    def protection(self) -> Protection:
        """The bytes that nodes send and keep so that training survives a lost node, if the optimizer is AdamW.

        Without `protect`, it is what the default would take. `transfers` have none of it.
        """
        return protection_of(self.strategy, self.plans, self.outer)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that one rank keeps between steps on its device, by kind, without optimizer states."""
        return memory_bytes(self.plans) | (self.outer.memory_bytes()[0] if self.outer is not None else {})

    def host_memory_bytes(self) -> dict[str, int]:
        """Return the bytes that one rank keeps between steps in host memory: none unless the strategy offloads."""
        return host_memory_bytes(self.plans) | (self.outer.memory_bytes()[1] if self.outer is not None else {})

    def host_copy_bytes(self) -> dict[TransferKind, int]:
        """Return the bytes that one rank copies between its device and host memory, by kind of transfer."""
        return dict(self.copied)

    def buffer_bytes(self) -> dict[str, int]:
        """Return the bytes of one rank's temporary buffers: slots for unsharded weights and gradients, wire buffers.

        "arriving gradients" are those of one unit that the engine has not copied to a slot yet, or added to a sum.
        "communicators" is what NCCL takes itself.
        """
        kinds = {*(t.kind for t in self.transfers), *self.host_copy_bytes()}.intersection(WITH_TRANSPORT)
        owners = {"whole matrices": self.matrices.buffer_bytes} if self.matrices is not None else {}
        found = buffer_bytes(self.plans, kinds) | owners
        if self.outer is not None:
            found = self.outer.buffer_bytes(found)
        return found

    def __str__(self) -> str:
        title = f"{self.strategy.name}, {self.micro_steps} micro-steps a step: bytes sent by all ranks together"
        outer = "" if self.outer is None else f"\n{self.outer}"
        protected = "" if self.strategy.protect is None else f"\n{self.protection}"
        return f"{title}\n{self.by_kind()}{outer}{protected}"


def memory_bytes(plans: Iterable[UnitPlan]) -> dict[str, int]:
    """Return the bytes that one rank keeps between steps on its device, by kind, without optimizer states."""
    return sum_by_kind(bucket.memory_bytes() for plan in plans for bucket in plan.buckets)


def host_memory_bytes(plans: Iterable[UnitPlan]) -> dict[str, int]:
    return sum_by_kind(bucket.host_memory_bytes() for plan in plans for bucket in plan.buckets)


def sum_by_kind(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of bytes by kind."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def buffer_bytes(plans: Sequence[UnitPlan], kinds: Collection[TransferKind] = WITH_TRANSPORT) -> dict[str, int]:
    """Return the bytes of one rank's temporary buffers, with the wire buffers for transfers of these kinds."""
    weights = gradients = 0
    for group, count in slot_groups(plans):
        alike = list(_distinct(plans[i] for i in group))
        weights += count * _bytes(largest(p.weight_needs for p in alike))
        gradients += count * _bytes(largest(p.gradient_needs for p in alike))
    # The wire buffers of a queue are as large as its largest transfer needs.
    transports: dict[tuple[str, str], int] = {}
    for kind in kinds:
        for dtype, numel in largest(plan.wire_needs(kind) for plan in _distinct(plans)).items():
            queue = (QUEUES[kind], dtype)
            transports[queue] = max(transports.get(queue, 0), numel)
    return {
        "weight slots": weights,
        "gradient slots": gradients,
        "arriving gradients": max((p.arriving_bytes for p in _distinct(plans)), default=0),
        "wire": sum(MAX_IN_FLIGHT[queue] * numel * item_bytes(dtype) for (queue, dtype), numel in transports.items()),
    } | communicator_bytes(plans)


def _distinct(plans: Iterable[UnitPlan]) -> Iterable[UnitPlan]:
    """Return each plan object once: the planner shares one object among identical units."""
    return {id(plan): plan for plan in plans}.values()


def _bytes(needs: Needs) -> int:
    return sum(numel * item_bytes(dtype) for dtype, numel in needs.items())


def schedule(
    strategy: Strategy,
    units: tuple[UnitSpec, ...],
    micro_steps: int,
    precision: Precision | None = None,
    passes: Sequence[StagePass] = (),
    whole: Collection[OwnedParameter] = (),
    form: Form = Form.MESSAGES,
) -> Schedule:
    """Return the schedule of one optimizer step in steady state.

    Args:
        passes: For a pipeline stage, the passes that it computes, in order.
        whole: The parameters that the optimizer steps as full matrices.
    """
    if type(micro_steps) is not int or micro_steps < 1:
        raise ConfigError(f"schedule: micro_steps must be a whole number of at least 1, got {micro_steps!r}.")
    plans = tuple(plan_unit(strategy, unit, precision or Precision(), form) for unit in units)
    root = [p for p in plans if p.spec.root] or [UnitPlan(UnitSpec("", (), root=True), ())]
    run = (*root, *(p for p in plans if not p.spec.root))
    tasks = list(steady_tasks(run, micro_steps, passes))
    laid_out = tuple(_laid_out(strategy, run, micro_steps, tasks))
    copied: Counter[TransferKind] = Counter()
    for _, task in tasks:
        copied[task.kind] += sum(b.host_copy_bytes(task.kind) for b in run[task.unit].buckets)
    # A step runs from one delivery of gradients to the next, so the transfers of the optimizer come first.
    matrices = plan_matrices(strategy, plans, whole) if whole else None
    transfers = (*(matrices.transfers() if matrices else ()), *laid_out)
    if strategy.islands > 1:
        transfers = tuple(transfer.repeated(strategy.islands, strategy.job) for transfer in transfers)
    outer = plan_outer(strategy, run, form)
    return Schedule(strategy, micro_steps, plans, transfers, matrices, dict(+copied), outer)


def _laid_out(
    strategy: Strategy, plans: tuple[UnitPlan, ...], micro_steps: int, tasks: Iterable[tuple[int, Task]]
) -> Iterator[Transfer]:
    """Yield the transfers of the tasks that the step machine submits in a steady step."""
    sizes = message_sizes_transfers(strategy, plans)
    for micro_step, task in tasks:
        agrees = task.kind is TransferKind.MESSAGE_SIZES
        found = sizes if agrees else plans[task.unit].steady_transfers(task.kind)
        yield from (transfer.in_micro_step(micro_step) for transfer in found)
    parameters = sum(len(b.spec.numels) for p in plans for b in p.buckets if b.spec.trainable)
    for transfer in unused_params_transfers(
        strategy, parameters, digest_bytes(strategy, shared_lanes(strategy, plans))
    ):
        yield transfer.in_micro_step(micro_steps - 1)


# Frozen parameters never change. With one copy in each node they cross between nodes only once, at the start, but they
# take more memory than one copy over all nodes. That placement is chosen if P spans nodes and memory allows. A model
# without trainable parameters, as in inference, keeps the strategy's own placement.


# The share of free memory, on the rank that has least, that the engine may use. The two optimizer states of each
# trainable parameter count as well. The rest is left to activations and libraries.
SHARE_OF_MEMORY = 0.5
_OPTIMIZER_STATES = 2


def depends_on_memory(strategy: Strategy, units: Sequence[UnitSpec]) -> bool:
    """Return whether `strategy` leaves the placement of frozen parameters to the memory that ranks have."""
    frozen, trains = _kinds(units)
    return frozen and trains and strategy.frozen is None and strategy.placement.params.nodes > 1


def decided(
    strategy: Strategy,
    units: Sequence[UnitSpec],
    precision: Precision,
    memory: int | None,
    form: Form = Form.MESSAGES,
) -> tuple[Strategy, str]:
    """Decide the placement of frozen parameters. Ranks with equal arguments decide the same."""
    # `memory`: The bytes that a rank has for the engine and everything else. None means enough.
    # Returned: The strategy with `frozen` decided, and the reason in one line, empty if nothing had to be decided.
    # `frozen` stays None if the model has no frozen parameters, or if every copy of the parameters is inside a node.
    frozen, trains = _kinds(units)
    # The setting would widen the groups of ranks that compare their gathers. Without frozen parameters, it must not.
    if not frozen:
        return replace(strategy, frozen=None, frozen_codec="none"), ""
    if not depends_on_memory(strategy, units):
        if strategy.frozen is None and strategy.placement.params.nodes > 1 and not trains:
            why = "nothing trains, so that frozen parameters are stored as the strategy's placement says"
            return replace(strategy, frozen=AS_TRAINED), f"{strategy.name}: {why}."
        return strategy, ""
    inside = replace(strategy, frozen=Extent(strategy.topology.ranks_per_node))
    needed = kept_bytes([plan_unit(inside.at(0), unit, precision, form) for unit in units])
    what = f"what the engine keeps then takes {needed:,} bytes of a rank"
    if memory is None:
        return inside, f"{strategy.name}: frozen parameters are stored in each node ({inside.frozen}): {what}."
    limit = int(SHARE_OF_MEMORY * memory)
    if needed <= limit:
        why = f"frozen parameters are stored in each node ({inside.frozen}): {what}, and {limit:,} are allowed"
        return inside, f"{strategy.name}: {why}."
    why = f"frozen parameters are stored as those that train: in each node {what}, and {limit:,} are allowed"
    return replace(strategy, frozen=AS_TRAINED), f"{strategy.name}: {why}."


def kept_bytes(plans: Sequence[UnitPlan]) -> int:
    """Return the bytes that one rank keeps: its shards, slots, wire buffers, and two optimizer states."""
    states = sum(
        _OPTIMIZER_STATES * b.numel // b.optimizer.count * item_bytes(b.own_dtype)
        for plan in plans
        for b in plan.buckets
        if b.spec.trainable
    )
    return states + sum(memory_bytes(plans).values()) + sum(buffer_bytes(plans).values())


def _kinds(units: Sequence[UnitSpec]) -> tuple[bool, bool]:
    """Return whether any parameter is frozen, and whether any trains."""
    kinds = {bucket.trainable for unit in units for bucket in unit.buckets}
    return False in kinds, True in kinds


# How many steps the machine runs before a steady one. In the first, it learns in which order units run in each pass.
STEPS_BEFORE = 2


class PassPart(StrEnum):
    """The parts of a pass that a unit computes.

    Other units compute one part in each pass. The root holds the model's first and last layers, so its pass has a
    second part (`..._END`) after all other units.
    """

    FORWARD = "forward"
    FORWARD_END = "forward end"
    BACKWARD = "backward"
    BACKWARD_END = "backward end"


@dataclass(frozen=True, slots=True)
class Compute:
    """A computation of the training thread, placed among the actions of the step machine. The simulator times it."""

    unit: int
    part: PassPart


def steady_tasks(
    plans: Sequence[UnitPlan], micro_steps: int, passes: Sequence[StagePass] = ()
) -> Iterator[tuple[int, Task]]:
    """Yield the tasks that a machine submits in one steady optimizer step, each with the number of its micro-step."""
    # A pipeline stage computes `passes` in every step. The number of its micro-step rises when a backward pass ends.
    steps = settled_stage(plans, passes).step() if passes else steady_step(settled(plans), plans, micro_steps)
    for micro_step, action in steps:
        if isinstance(action, (Submit, AgreeOnSizes)):
            yield micro_step, action.task


def settled(plans: Sequence[UnitPlan]) -> StepMachine:
    """Return a machine at the beginning of a steady step: it has already run `STEPS_BEFORE` steps."""
    machine = StepMachine(plans)
    for _ in range(STEPS_BEFORE):
        deque(steady_step(machine, plans, 1), maxlen=0)
        write_all(machine, plans)
    return machine


def write_all(machine: StepMachine, plans: Sequence[UnitPlan]) -> None:
    """Report an optimizer step to the machine: it writes to every unit that trains."""
    for index, plan in enumerate(plans):
        if plan.trains:
            machine.written(index)


def settled_stage(plans: Sequence[UnitPlan], passes: Sequence[StagePass]) -> SteadyStage:
    """Return a stage at the beginning of a steady step: it has already run `STEPS_BEFORE` steps."""
    stage = SteadyStage(plans, passes)
    for _ in range(STEPS_BEFORE):
        deque(stage.step(), maxlen=0)
        write_all(stage.machine, plans)
    return stage


class SteadyStage:
    """The steady step of one pipeline stage, whose passes of different micro-batches interleave."""

    def __init__(self, plans: Sequence[UnitPlan], passes: Sequence[StagePass]) -> None:
        self.machine = StepMachine(plans)
        self.machine.staged = True
        self._plans, self._order = plans, passes
        self._micro_batches = sum(each.kind is PassKind.FORWARD for each in passes)
        self._passes: dict[int, list[ForwardPass]] = {}  # by micro-batch, the passes whose backward is still to come
        self.micro_step = 0  # how many backward passes of this step have ended

    def step(self) -> Iterator[tuple[int, Action | Compute]]:
        """Yield the computations and actions of one step, each with the number of its micro-step."""
        for action in self.begin():
            yield self.micro_step, action
        for each in self._order:
            for action in self.walk(each):
                yield self.micro_step, action
        for action in self.end_boundary():
            yield self.micro_step, action

    def begin(self) -> Iterator[Action]:
        """Yield the actions that follow the optimizer's step, and those before the first pass."""
        yield from self.machine.optimizers_stepped()
        yield from self.machine.param_sync()

    def walk(self, each: StagePass) -> Iterator[Action | Compute]:
        """Yield the computations of one pass of the stage, and the actions of the machine around them."""
        if each.kind is PassKind.FORWARD:
            passes = self._passes[each.micro_batch] = []
            yield from _forward(self.machine, self._plans, passes)
            return
        last = self.micro_step == self._micro_batches - 1
        self.machine.boundary = last
        yield from _backward(self.machine, self._plans, self._passes.pop(each.micro_batch))
        if not last:
            self.machine.micro_step_ended()
            self.micro_step += 1

    def end_boundary(self) -> Iterator[Action]:
        """Yield the actions that end the step, after the last pass."""
        yield from self.machine.end_boundary()
        self.machine.micro_step_ended()
        self.micro_step = 0


def steady_step(
    machine: StepMachine, plans: Sequence[UnitPlan], micro_steps: int
) -> Iterator[tuple[int, Action | Compute]]:
    """Yield the computations and actions of one optimizer step, each with the number of its micro-step."""
    for action in machine.optimizers_stepped():
        yield 0, action
    for micro_step in range(micro_steps):
        machine.boundary = micro_step == micro_steps - 1
        passes: list[ForwardPass] = []
        # The forward fills `passes` before the backward reads them, because `chain` runs one after the other.
        for action in chain(_forward(machine, plans, passes), _backward(machine, plans, passes)):
            yield micro_step, action
        machine.micro_step_ended()


def _forward(machine: StepMachine, plans: Sequence[UnitPlan], passes: list[ForwardPass]) -> Iterator[Action | Compute]:
    """Run the forward of all units, and append their forward passes to `passes`, the root's first."""
    root, *others = range(len(plans))
    for index in (root, *others):
        machine.entered(index)
        yield from machine.forward_begins(index, comes_back=True)
        passes.append(machine.graph_made(index))
        passes[-1].inputs = 0 if plans[index].spec.lookup else 1
        yield Compute(index, PassPart.FORWARD)
        if index != root:
            yield from machine.forward_ends(index, graph_follows=True)
    yield Compute(root, PassPart.FORWARD_END)
    yield from machine.forward_ends(root, graph_follows=True)


def _backward(
    machine: StepMachine, plans: Sequence[UnitPlan], passes: Sequence[ForwardPass]
) -> Iterator[Action | Compute]:
    """Run the backward of all units. It ends with the last part of the root."""
    first, *rest = passes
    yield from machine.backward_begins(first)
    yield Compute(first.unit, PassPart.BACKWARD)
    yield from _gradients(machine, plans, first.unit)
    for passed in reversed(rest):
        yield from machine.backward_begins(passed)
        yield Compute(passed.unit, PassPart.BACKWARD)
        yield from _gradients(machine, plans, passed.unit)
        yield from machine.input_gradients_done(passed)
        yield from machine.weight_gradients_done(passed)
    yield Compute(first.unit, PassPart.BACKWARD_END)
    yield from machine.backward_pass_ended()


def _gradients(machine: StepMachine, plans: Sequence[UnitPlan], index: int) -> Sequence[Action]:
    return machine.gradient_arrives(index) if plans[index].trains else ()
