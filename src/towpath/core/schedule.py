"""One optimizer step as a list of transfers: what moves, when, over which ranks, how, and how many bytes.

The step machine (`step.py`) says when they go; a schedule is the machine run over one steady step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from towpath.core.formats import ENCODED, FLOATING, Precision, item_bytes
from towpath.core.journal import journal_bytes
from towpath.core.pipeline import Compression, Message, Order, PassKind, StagePass, messages
from towpath.core.placement import everyone, send
from towpath.core.step import UNITS_IN_FLIGHT, StepMachine
from towpath.core.step_state import Action, ForwardPass, Submit, Task, UnitFacts, in_backward_order
from towpath.core.strategy import AS_TRAINED, WIRED, Kind, Strategy
from towpath.core.transfer import Activation, Needs, Range, SentBytes, Transfer
from towpath.core.unit_plan import UnitPlan, largest, plan_unit
from towpath.core.units import UnitSpec
from towpath.core.whole_matrices import MatrixPlan, WholeParameter, plan_matrices
from towpath.core.wire import Wire
from towpath.errors import StrategyError
from towpath.topology.cluster import Extent, Topology

# --- queues -----------------------------------------------------------------------------------------------------------
#
# On which queue each kind of transfer goes.


# Kinds that share a queue run one after the other; different queues overlap, and have different wire buffers.
QUEUES = {
    Kind.GATHER: "gather",
    Kind.BACKWARD_GATHER: "gather",
    Kind.REDUCE: "reduce",
    Kind.SYNC: "sync",
    Kind.USAGE: "control",
    Kind.PUBLISH: "publish",
    Kind.MATRIX_GRADIENTS: "to owners",
    Kind.MATRIX_WEIGHTS: "to owners",
    Kind.MATRIX_UPDATES: "from owners",
    Kind.ACTIVATION: "activation",
    Kind.ACTIVATION_GRADIENT: "activation gradient",
}

# How many of a queue's transfers may be under way at a time, each in wire buffers of its own: a gather begins to travel
# while nodes still share out what the one before it brought.
WAYS = {queue: 2 if queue == "gather" else 1 for queue in QUEUES.values()}


# --- steady step ------------------------------------------------------------------------------------------------------
#
# The steady step: every unit runs once in each pass, in the order of the model, as it did the step before.


# In the first step the machine learns which unit follows which, in the forward and then in the backward pass.
STEPS_BEFORE = 2


class Part(StrEnum):
    """The root holds the model's first and last layers, around all other units; these have one part in each pass."""

    FORWARD = "forward"
    FORWARD_END = "forward end"
    BACKWARD = "backward"
    BACKWARD_END = "backward end"
    # The two halves of a backward pass, of any unit.
    INPUT_GRADIENTS = "input gradients"
    WEIGHT_GRADIENTS = "weight gradients"


@dataclass(frozen=True, slots=True)
class Compute:
    """What the thread that trains computes at this point."""

    unit: int
    part: Part


def steady_tasks(facts: Sequence[UnitFacts], micro_steps: int) -> Iterator[tuple[int, Task]]:
    """What a machine submits in one optimizer step after others like it, and in which micro-step."""
    machine = settled(facts)
    for micro_step, action in steady_step(machine, facts, micro_steps):
        if isinstance(action, Submit):
            yield micro_step, action.task


def settled(facts: Sequence[UnitFacts]) -> StepMachine:
    """A machine at the beginning of a step, after others like it."""
    machine = StepMachine(facts)
    for _ in range(STEPS_BEFORE):
        for _ in steady_step(machine, facts, 1):
            pass
        write_all(machine, facts)
    return machine


def write_all(machine: StepMachine, facts: Sequence[UnitFacts]) -> None:
    """The optimizer's step."""
    for index, unit in enumerate(facts):
        if unit.trains:
            machine.written(index)


def staged_tasks(facts: Sequence[UnitFacts], passes: Sequence[StagePass]) -> Iterator[tuple[int, Task]]:
    """The same of a pipeline's stage that computes these passes in each step. Micro-steps are counted as backward
    passes end."""
    stage = settled_stage(facts, passes)
    for each in passes:
        for action in stage.walk(each):
            if isinstance(action, Submit):
                yield stage.micro_step, action.task
    for action in stage.boundary_ends():
        if isinstance(action, Submit):
            yield stage.micro_step, action.task


def settled_stage(facts: Sequence[UnitFacts], passes: Sequence[StagePass]) -> SteadyStage:
    """At the beginning of a step, after others like it."""
    stage = SteadyStage(facts, passes)
    for _ in range(STEPS_BEFORE):
        for each in passes:
            for _ in stage.walk(each):
                pass
        for _ in stage.boundary_ends():
            pass
        write_all(stage.machine, facts)
    return stage


class SteadyStage:
    """A stage of a pipeline, whose passes interleave."""

    def __init__(self, facts: Sequence[UnitFacts], passes: Sequence[StagePass]) -> None:
        self.machine = StepMachine(facts)
        self.machine.staged = True
        self._facts = facts
        self._micro_batches = sum(each.kind is PassKind.FORWARD for each in passes)
        self._passes: dict[int, list[ForwardPass]] = {}  # by micro-batch, those whose gradients are still to come
        self.micro_step = 0  # backward passes that have ended

    def walk(self, each: StagePass) -> Iterator[Action | Compute]:
        """What is computed in one of its passes, and what the machine answers."""
        match each.kind:
            case PassKind.FORWARD:
                passes = self._passes[each.micro_batch] = []
                yield from _forward(self.machine, self._facts, passes)
                return
            case PassKind.INPUT_GRADIENTS:
                yield from _input_gradients(self.machine, self._passes[each.micro_batch])
                return
            case PassKind.BACKWARD:
                rest = _backward
            case PassKind.WEIGHT_GRADIENTS:
                rest = _weight_gradients
        last = self.micro_step == self._micro_batches - 1
        self.machine.boundary = last
        yield from rest(self.machine, self._facts, self._passes.pop(each.micro_batch))
        if not last:
            self.machine.micro_step_ended()
            self.micro_step += 1

    def boundary_ends(self) -> Iterator[Action]:
        yield from self.machine.boundary_ends()
        self.machine.micro_step_ended()
        self.micro_step = 0


def steady_step(
    machine: StepMachine, facts: Sequence[UnitFacts], micro_steps: int
) -> Iterator[tuple[int, Action | Compute]]:
    """What is computed in each of its micro-steps, and what the machine answers."""
    for micro_step in range(micro_steps):
        machine.boundary = micro_step == micro_steps - 1
        for action in _one_micro_step(machine, facts):
            yield micro_step, action


def _one_micro_step(machine: StepMachine, facts: Sequence[UnitFacts]) -> Iterator[Action | Compute]:
    passes: list[ForwardPass] = []
    yield from _forward(machine, facts, passes)
    yield from _backward(machine, facts, passes)
    machine.micro_step_ended()


def _forward(machine: StepMachine, facts: Sequence[UnitFacts], passes: list[ForwardPass]) -> Iterator[Action | Compute]:
    """`passes` gets those of all units, the root's first."""
    root, *others = range(len(facts))
    for index in (root, *others):
        machine.entered(index)
        yield from machine.forward_begins(index, comes_back=True)
        passes.append(machine.graph_made(index))
        yield Compute(index, Part.FORWARD)
        if index != root:
            yield from machine.forward_ends(index, graph_follows=True)
    yield Compute(root, Part.FORWARD_END)
    yield from machine.forward_ends(root, graph_follows=True)


def _backward(
    machine: StepMachine, facts: Sequence[UnitFacts], passes: Sequence[ForwardPass]
) -> Iterator[Action | Compute]:
    """The end of the root's pass is that of the whole backward pass."""
    first, *rest = passes
    yield from machine.backward_begins(first)
    yield Compute(first.unit, Part.BACKWARD)
    yield from _gradients(machine, facts, first.unit)
    for passed in reversed(rest):
        yield from machine.backward_begins(passed)
        yield Compute(passed.unit, Part.BACKWARD)
        yield from _gradients(machine, facts, passed.unit)
        yield from machine.input_gradients_done(passed)
        yield from machine.weight_gradients_done(passed)
    yield Compute(first.unit, Part.BACKWARD_END)
    yield from machine.backward_pass_ended()


def _input_gradients(machine: StepMachine, passes: Sequence[ForwardPass]) -> Iterator[Action | Compute]:
    first, *rest = passes
    machine.more_passes = True
    yield from machine.backward_begins(first)
    yield Compute(first.unit, Part.INPUT_GRADIENTS)
    for passed in reversed(rest):
        yield from machine.backward_begins(passed)
        yield Compute(passed.unit, Part.INPUT_GRADIENTS)
        yield from machine.input_gradients_done(passed)
    yield from machine.backward_pass_ended()
    machine.more_passes = False


def _weight_gradients(
    machine: StepMachine, facts: Sequence[UnitFacts], passes: Sequence[ForwardPass]
) -> Iterator[Action | Compute]:
    yield from machine.weight_gradients_begin(passes)
    for passed in in_backward_order(passes):
        yield Compute(passed.unit, Part.WEIGHT_GRADIENTS)
        yield from _gradients(machine, facts, passed.unit)
        yield from machine.weight_gradients_done(passed)
    yield from machine.weight_gradients_end(passes)
    yield from machine.backward_pass_ended()


def _gradients(machine: StepMachine, facts: Sequence[UnitFacts], index: int) -> Sequence[Action]:
    return machine.gradient_arrives(index) if facts[index].trains else ()


def usage_transfers(strategy: Strategy, parameters: int) -> tuple[Transfer, ...]:
    """Combined at the boundary: one byte a parameter, whether any rank used it (an unused one keeps `.grad` None);
    and digests of what each rank has submitted (`core/journal.py`)."""
    moves = everyone(strategy.topology) if parameters else ()
    count = parameters + journal_bytes(strategy)
    payload = Range("", "", count, "uint8")
    return tuple(Transfer(Kind.USAGE, payload, m, Wire(), strategy.topology) for m in moves)


@dataclass(frozen=True, slots=True)
class Schedule(SentBytes):
    """Every transfer of one optimizer step, in the order in which the engine submits them."""

    strategy: Strategy
    micro_steps: int
    plans: tuple[UnitPlan, ...]
    transfers: tuple[Transfer, ...]
    matrices: MatrixPlan | None = None

    def memory_bytes(self) -> dict[str, int]:
        """What one rank keeps between steps on its device, by kind, before the optimizer's own states."""
        return memory_bytes(self.plans)

    def host_memory_bytes(self) -> dict[str, int]:
        """And in the host's memory: nothing unless the strategy offloads."""
        return host_memory_bytes(self.plans)

    def host_copy_bytes(self) -> dict[Kind, int]:
        """What one rank copies between its device and the host's memory in this step, by kind of transfer."""
        found = {kind: sum(b.host_copy_bytes(kind) for p in self.plans for b in p.buckets) for kind in WIRED}
        return {kind: copied for kind, copied in found.items() if copied}

    def buffer_bytes(self) -> dict[str, int]:
        """What one rank holds beside that: slots that whole weights and gradients pass through, and wire buffers."""
        kinds = {t.kind for t in self.transfers}.intersection(WIRED)
        owners = {"whole matrices": self.matrices.buffer_bytes} if self.matrices is not None else {}
        return buffer_bytes(self.plans, kinds) | owners

    def __str__(self) -> str:
        title = f"{self.strategy.name}, {self.micro_steps} micro-steps a step: bytes sent by all ranks together"
        return f"{title}\n{self.by_kind()}"


def memory_bytes(plans: Iterable[UnitPlan]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for plan in plans:
        for bucket in plan.buckets:
            total.update(bucket.memory_bytes())
    return dict(total)


def host_memory_bytes(plans: Iterable[UnitPlan]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for plan in plans:
        for bucket in plan.buckets:
            total.update(bucket.host_memory_bytes())
    return dict(total)


def buffer_bytes(plans: Sequence[UnitPlan], kinds: Collection[Kind] = WIRED) -> dict[str, int]:
    root = [p for p in plans if p.spec.kept]
    others = [p for p in plans if not p.spec.kept]
    ways = min(UNITS_IN_FLIGHT, len(others))
    weights = ways * _bytes(largest(p.weight_needs for p in _distinct(others))) + sum(
        _bytes(p.weight_needs) for p in root
    )
    # Each queue has room for what the largest of its transfers needs.
    wires: dict[tuple[str, str], int] = {}
    for kind in kinds:
        for dtype, numel in largest(plan.wire_needs(kind) for plan in _distinct(plans)).items():
            queue = (QUEUES[kind], dtype)
            wires[queue] = max(wires.get(queue, 0), numel)
    return {
        "weight slots": weights,
        "gradient slots": ways * _bytes(largest(p.gradient_needs for p in _distinct(others)))
        + sum(_bytes(p.gradient_needs) for p in root),
        "wire": sum(WAYS[queue] * numel * item_bytes(dtype) for (queue, dtype), numel in wires.items()),
    }


def _distinct(plans: Iterable[UnitPlan]) -> Iterable[UnitPlan]:
    """Each once: a planner has one object for all units that are alike."""
    return {id(plan): plan for plan in plans}.values()


def _bytes(needs: Needs) -> int:
    return sum(numel * item_bytes(dtype) for dtype, numel in needs.items())


def schedule(
    strategy: Strategy,
    units: tuple[UnitSpec, ...],
    micro_steps: int,
    precision: Precision | None = None,
    passes: Sequence[StagePass] = (),
    whole: Collection[WholeParameter] = (),
) -> Schedule:
    """The transfers of one optimizer step of `micro_steps` micro-steps, in steady state.

    `passes`: of a pipeline's stage, in their order. `whole`: the parameters that the optimizer steps whole.
    """
    if type(micro_steps) is not int or micro_steps < 1:
        raise StrategyError(f"schedule: micro_steps must be a whole number of at least 1, got {micro_steps!r}.")
    plans = tuple(plan_unit(strategy, unit, precision or Precision()) for unit in units)
    laid_out = tuple(_laid_out(strategy, plans, micro_steps, passes))
    if not whole:
        return Schedule(strategy, micro_steps, plans, laid_out)
    matrices = plan_matrices(strategy, plans, whole)
    # A step is counted from one delivery of gradients to the next: the optimizer's part comes first.
    return Schedule(strategy, micro_steps, plans, (*matrices.transfers(), *laid_out), matrices)


def _laid_out(
    strategy: Strategy, plans: tuple[UnitPlan, ...], micro_steps: int, passes: Sequence[StagePass]
) -> Iterator[Transfer]:
    """What the step machine submits, once it knows the order of the units."""
    root = [p for p in plans if p.spec.kept] or [UnitPlan(UnitSpec("", (), kept=True), ())]
    plans = (*root, *(p for p in plans if not p.spec.kept))
    facts = [plan.facts() for plan in plans]
    for micro_step, task in staged_tasks(facts, passes) if passes else steady_tasks(facts, micro_steps):
        for transfer in plans[task.unit].steady_transfers(task.kind):
            yield transfer.in_micro_step(micro_step)
    parameters = sum(len(b.spec.numels) for p in plans for b in p.buckets if b.spec.trainable)
    for transfer in usage_transfers(strategy, parameters):
        yield transfer.in_micro_step(micro_steps - 1)


# --- frozen -----------------------------------------------------------------------------------------------------------
#
# Where one copy of the parameters that do not train lies, where the strategy leaves it open.
#
# What does not train never changes: with one copy in each node, it crosses between nodes once, at the start, and no
# more. That takes more memory than spreading one copy over all nodes. So it is done where P spans nodes and memory
# allows; a model of which nothing trains, as in inference, keeps the strategy's own placement.


# Of what is free on the rank that has least, what the engine keeps may take so much, with two optimizer states of what
# trains. The rest is left to activations, and to the libraries.
SHARE_OF_MEMORY = 0.5
_OPTIMIZER_STATES = 2


@dataclass(frozen=True, slots=True)
class Decision:
    """`strategy`: with nothing left open. `why`: one line for people; empty where nothing was to be decided."""

    strategy: Strategy
    why: str = ""


def is_open(strategy: Strategy, units: Sequence[UnitSpec]) -> bool:
    """Whether it depends on memory where frozen parameters lie."""
    frozen, trains = _kinds(units)
    return frozen and trains and strategy.frozen is None and strategy.placement.params.nodes > 1


def decided(strategy: Strategy, units: Sequence[UnitSpec], precision: Precision, memory: int | None) -> Decision:
    """`strategy` for a model of these units, where a rank has `memory` bytes for the engine and all else. None: enough.

    The same on all ranks that are given the same.
    """
    frozen, trains = _kinds(units)
    if not frozen:  # ranks that gather frozen parameters together would be compared, and there are none
        return Decision(replace(strategy, frozen=None, frozen_codec="none"))
    if not is_open(strategy, units):
        if strategy.frozen is None and strategy.placement.params.nodes > 1 and not trains:
            why = "nothing trains, so that frozen parameters lie as the strategy has it"
            return Decision(replace(strategy, frozen=AS_TRAINED), f"{strategy.name}: {why}.")
        return Decision(strategy)
    inside = replace(strategy, frozen=Extent(strategy.topology.ranks_per_node))
    needed = kept_bytes([plan_unit(inside.at(0), unit, precision) for unit in units])
    what = f"what the engine keeps then takes {needed:,} bytes of a rank"
    if memory is None:
        return Decision(inside, f"{strategy.name}: frozen parameters lie in each node ({inside.frozen}): {what}.")
    limit = int(SHARE_OF_MEMORY * memory)
    if needed <= limit:
        why = f"frozen parameters lie in each node ({inside.frozen}): {what}, and {limit:,} are allowed"
        return Decision(inside, f"{strategy.name}: {why}.")
    why = f"frozen parameters lie as those that train: in each node {what}, and {limit:,} are allowed"
    return Decision(replace(strategy, frozen=AS_TRAINED), f"{strategy.name}: {why}.")


def kept_bytes(plans: Sequence[UnitPlan]) -> int:
    """What one rank keeps: states, slots and wire buffers, and an optimizer's usual states of what trains."""
    states = sum(
        _OPTIMIZER_STATES * b.numel // b.optimizer.count * item_bytes(b.own_dtype)
        for plan in plans
        for b in plan.buckets
        if b.spec.trainable
    )
    return states + sum(memory_bytes(plans).values()) + sum(buffer_bytes(plans).values())


def _kinds(units: Sequence[UnitSpec]) -> tuple[bool, bool]:
    """Whether anything is frozen, and whether anything trains."""
    kinds = {bucket.trainable for unit in units for bucket in unit.buckets}
    return False in kinds, True in kinds


# --- job --------------------------------------------------------------------------------------------------------------
#
# A pipeline's step as transfers: those of every stage's schedule, and the messages between stages.


Shape = tuple[tuple[int, ...], str]  # and the dtype


@dataclass(frozen=True, slots=True)
class Stage:
    """`ranks`: those that hold it, as the job counts them, in the order of its data-parallel group. `outputs`: what it
    hands on, tensor by tensor; of the last stage nothing."""

    ranks: tuple[int, ...]
    schedule: Schedule
    outputs: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class JobSchedule(SentBytes):
    """Every transfer of one optimizer step, stage by stage, and then the messages between them, rank by rank."""

    topology: Topology
    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return f"bytes sent by all ranks together\n{self.by_kind()}"


def job_schedule(
    topology: Topology, pipelines: Iterable[Sequence[Stage]], order: Order, compression: Compression
) -> JobSchedule:
    """`pipelines`: of each its stages in order, and then what is sharded by itself over the ranks of several. There are
    as many of them as tensor-parallel ranks."""
    found: list[Transfer] = []
    for stages in pipelines:
        for stage in stages:
            found += [transfer.over(stage.ranks, topology) for transfer in stage.schedule.transfers]
        found += _sends(topology, stages, messages(order), compression)
    return JobSchedule(topology, tuple(found))


def _sends(
    topology: Topology, stages: Sequence[Stage], sent: Iterable[Message], compression: Compression
) -> Iterator[Transfer]:
    for message in sent:
        source, target = stages[message.source], stages[message.target]
        pairs = list(zip(source.ranks, target.ranks, strict=True))
        yield from message_transfers(message, pairs, stages[message.output_of].outputs, topology, compression)


def message_transfers(
    message: Message,
    pairs: Sequence[tuple[int, int]],
    outputs: Sequence[Shape],
    topology: Topology,
    compression: Compression,
) -> Iterator[Transfer]:
    """Of one message, tensor by tensor, between all `pairs` of copies. `outputs`: of the stage `message.output_of`."""
    move = send(pairs)
    kind = Kind.ACTIVATION_GRADIENT if message.backward else Kind.ACTIVATION
    for shape, dtype in outputs:
        payload, wire = Activation(message.source, shape, dtype), wire_for(dtype, compression.of(message))
        yield Transfer(kind, payload, move, wire, topology, message.micro_batch)


def wire_for(dtype: str, wire: Wire) -> Wire:
    """Of tensors that stages exchange: numbers that are no floats, such as tokens or masks, travel as they are."""
    if dtype not in FLOATING:
        return Wire()
    if wire.encoding is not None and dtype not in ENCODED:
        raise StrategyError(
            f"stages exchange {dtype}, and the codec {wire.encoding} takes {', '.join(ENCODED)}. Take a precision, or "
            "leave the codec out."
        )
    return wire
