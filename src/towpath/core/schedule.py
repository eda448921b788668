"""The schedule of one optimizer step: every transfer with its ranks, route, codec and bytes, in order of submission.

A schedule is what the step machine (`core/step.py`) submits over one steady step. The engine runs the same machine, so
bytes, order and memory of the schedule match the real run. This file also holds the choice of a placement for frozen
parameters, and the schedule of a pipeline job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from towpath.core.buffers import Needs, largest
from towpath.core.formats import ENCODED, FLOATING, Precision, item_bytes
from towpath.core.owner_stepped import MatrixPlan, OwnedParameter, plan_matrices
from towpath.core.passes import Compression, Message, Order, StagePass, messages
from towpath.core.payloads import Activation, Range
from towpath.core.placement import everyone, send
from towpath.core.queues import MAX_IN_FLIGHT, QUEUES, communicator_bytes, log_bytes, shared_lanes
from towpath.core.routes import Form
from towpath.core.steady_step import steady_tasks
from towpath.core.step_state import Task, slot_groups
from towpath.core.strategy import AS_TRAINED, WITH_TRANSPORT, Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.unit_plan import UnitPlan, plan_unit
from towpath.core.units import UnitSpec
from towpath.errors import ConfigError
from towpath.observe.totals import SentBytes
from towpath.outer.exchanges import OuterPlan, plan_outer
from towpath.topology.cluster import Extent, Topology


def unused_params_transfers(strategy: Strategy, parameters: int, log: int) -> tuple[Transfer, ...]:
    """Return the all-reduce with which the ranks compare their step at the boundary.

    It has one byte for each parameter, which says whether any rank used it: an unused parameter keeps `.grad` None.
    Then follow digests of what each rank has submitted (`engine/agree/digest.py`).

    Args:
        parameters: The number of trainable parameters. Without any, nothing is compared.
        log: The bytes of the digests, as `log_bytes` returns them.
    """
    return _over_all_ranks(strategy, TransferKind.UNUSED_PARAMS, parameters and parameters + log, "uint8")


def message_sizes_transfers(strategy: Strategy, plans: Iterable[UnitPlan]) -> tuple[Transfer, ...]:
    """Return the all-reduce with which the ranks agree on sizes before parameter syncs, if any unit needs that.

    It has the size of one message for each transfer whose sizes the ranks agree on.
    """
    agreeing = sum(t.agrees_on_sizes for plan in plans for t in plan.transfers(TransferKind.PARAM_SYNC))
    return _over_all_ranks(strategy, TransferKind.MESSAGE_SIZES, agreeing, "int64")


def _over_all_ranks(strategy: Strategy, kind: TransferKind, elements: int, dtype: str) -> tuple[Transfer, ...]:
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
        return f"{title}\n{self.by_kind()}{outer}"


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
    root = [p for p in plans if p.spec.kept] or [UnitPlan(UnitSpec("", (), kept=True), ())]
    run = (*root, *(p for p in plans if not p.spec.kept))
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
    for transfer in unused_params_transfers(strategy, parameters, log_bytes(strategy, shared_lanes(strategy, plans))):
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
    """Decide the placement of frozen parameters. Ranks with equal arguments decide the same.

    Args:
        memory: The bytes that a rank has for the engine and everything else. None means enough.

    Returns:
        The strategy with `frozen` decided, and the reason in one line, empty if nothing had to be decided. `frozen`
        stays None if the model has no frozen parameters, or if every copy of the parameters is inside a node.
    """
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


Shape = tuple[tuple[int, ...], str]  # the shape and dtype of a tensor


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """One stage of a pipeline job, with its ranks, its own schedule and its outputs.

    `ranks` are numbered as in the job, in the order of the stage's data-parallel group. `outputs` has the shape and
    dtype of each tensor that the stage sends to the next one. The last stage has none.
    """

    ranks: tuple[int, ...]
    schedule: Schedule
    outputs: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class JobSchedule(SentBytes):
    """Every transfer of one optimizer step of a pipeline job.

    For each pipeline, the transfers of its stages come first, then the messages between them, rank by rank.
    """

    topology: Topology
    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return f"bytes sent by all ranks together\n{self.by_kind()}"


def job_schedule(
    topology: Topology,
    pipelines: Iterable[Sequence[StageSchedule]],
    order: Order,
    compression: Compression,
    walks: int = 1,
) -> JobSchedule:
    """Return the schedule of a job with pipeline stages.

    Args:
        pipelines: One entry for each tensor-parallel rank: the stages of its pipeline in order. Parts of the model that
            are sharded by themselves over the ranks of several stages, such as tied embeddings, follow the stages.
        walks: How many times a step runs the whole order, with gradient accumulation. Default: 1.
    """
    found: list[Transfer] = []
    for stages in pipelines:
        for stage in stages:
            found += [transfer.over(stage.ranks, topology) for transfer in stage.schedule.transfers]
        for message in list(messages(order)) * walks:
            pairs = list(zip(stages[message.source].ranks, stages[message.target].ranks, strict=True))
            outputs = stages[message.output_of].outputs
            found += message_transfers(message, pairs, outputs, topology, compression)
    return JobSchedule(topology, tuple(found))


def message_transfers(
    message: Message,
    pairs: Sequence[tuple[int, int]],
    outputs: Sequence[Shape],
    topology: Topology,
    compression: Compression,
) -> Iterator[Transfer]:
    """Yield the transfers of one message, one for each tensor.

    Args:
        pairs: The sending and the receiving rank of each copy of the pipeline. All of them send at once.
        outputs: The outputs of the stage `message.output_of`.
    """
    move = send(pairs)
    kind = TransferKind.ACTIVATION_GRADIENT if message.backward else TransferKind.ACTIVATION
    for shape, dtype in outputs:
        payload, transport = Activation(message.source, shape, dtype), transport_for(dtype, compression.of(message))
        yield Transfer(kind, payload, move, transport, topology, message.micro_batch)


def transport_for(dtype: str, transport: Transport) -> Transport:
    """Return the transport of a tensor that stages exchange. Tensors that are not floats use no codec."""
    if dtype not in FLOATING:
        return Transport()
    if transport.encoding is not None and dtype not in ENCODED:
        raise ConfigError(
            f"stages exchange {dtype}, and the codec {transport.encoding} takes {', '.join(ENCODED)}. Take a "
            "precision, or leave the codec out."
        )
    return transport
