"""The plan of outer steps: what islands exchange of a model, in which fragments, and the memory that it takes.

`outer/settings.py` has the settings, and says which exchange belongs to which step. The engine, the simulator and the
schedule read the same plan. `OuterSteps` is the part of the step machine that synchronizes islands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from towpath.core.buffers import Needs, feedback_bytes, largest, wire_needs
from towpath.core.formats import ENCODED, item_bytes, wide
from towpath.core.placement import GroupCollective, Partition, over_islands, subdivided
from towpath.core.queues import QUEUES, outer_communicator_bytes
from towpath.core.routes import Form, Op
from towpath.core.step_state import Action, ApplyOuter, Submit, Task, Wait
from towpath.core.strategy import OUTER_KINDS, Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.unit_plan import UnitPlan
from towpath.core.units import Range, round_up
from towpath.errors import ConfigError
from towpath.observe.totals import SentBytes
from towpath.outer.settings import Outer

# An exchange at this rate of the link between nodes is not taken for one that has stopped: bytes a second, 10 Mbit/s.
SLOWEST_RATE = 1.25e6
# Elements. The region of an all-gather starts in the wire buffer at a multiple of this.
_WIRE_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """A rank's part of one bucket in a fragment."""

    unit: int  # the index of the unit
    bucket: int  # the index of the bucket in its unit
    start: int  # the position of the part in the flat buffer of the fragment
    elements: int


@dataclass(frozen=True, slots=True)
class FragmentPart:
    """The buckets of a fragment that are exchanged as one flat buffer: those of one dtype and one size of blocks."""

    own_dtype: str
    dtype: str  # the dtype of the slow weights and of the exchange: `own_dtype`, in at least 32 bits
    slices: tuple[BucketSlice, ...]  # a rank's slices of the buckets
    # Finer than that of the optimizer states: each rank of an island has a slice of its own.
    partition: Partition
    exchange: tuple[Transfer, ...]  # the all-reduce over the islands
    # The all-gather of the result among the ranks of an island with the same optimizer slice, if there are several.
    # Each of them exchanges a part of the slice.
    gather: tuple[Transfer, ...]

    @property
    def elements(self) -> int:
        """The number of elements that one rank exchanges."""
        return sum(each.elements for each in self.slices)


@dataclass(frozen=True, slots=True)
class Fragment:
    """The units that islands exchange at the same step, as the parts that are sent."""

    units: tuple[int, ...]  # the indices of the units
    # The flat buffers. Most models have one.
    parts: tuple[FragmentPart, ...]
    check: tuple[Transfer, ...]  # the transfer in which islands compare their slow weights, before the exchange

    @property
    def rank_bytes(self) -> int:
        """The bytes that one rank exchanges, before encoding."""
        return sum(part.elements * item_bytes(part.dtype) for part in self.parts)

    @property
    def exchanges(self) -> tuple[Transfer, ...]:
        """The transfers between islands, in order."""
        return (*self.check, *(t for part in self.parts for t in part.exchange))

    @property
    def gathers(self) -> tuple[Transfer, ...]:
        """The transfers inside islands that follow."""
        return tuple(t for part in self.parts for t in part.gather)


@dataclass(frozen=True, slots=True)
class OuterPlan(SentBytes):
    """Everything that islands exchange in one period of `every` optimizer steps."""

    strategy: Strategy
    settings: Outer
    fragments: tuple[Fragment, ...]  # the fragments, in the order of their exchanges
    transfers: tuple[Transfer, ...]  # the transfers of one period
    from_host: bool  # whether GPUs copy what they exchange to the host, which sends it over gloo

    @property
    def mean_inter_bytes(self) -> float:
        """Bytes sent between nodes, summed over all ranks, as the mean of all steps of a period."""
        return self.inter_bytes / self.settings.every

    @property
    def peak_inter_bytes(self) -> int:
        """Bytes between nodes of the exchanges that begin in the same step, of the step that has most."""
        begun = (self.settings.begun_at(step) for step in range(1, self.settings.every + 1))
        return max(sum(t.inter_bytes for f in each for t in self.fragments[f].exchanges) for each in begun)

    def memory_bytes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes that one rank keeps for outer steps on its device, and in host memory."""
        slow = sum(fragment.rank_bytes for fragment in self.fragments)
        exchanges = [t for fragment in self.fragments for part in fragment.parts for t in part.exchange]
        kept = {"slow weights": slow, "outer momentum": slow if self.settings.momentum else 0}
        sent = {"outer differences": slow, "outer feedback": sum(map(feedback_bytes, exchanges))}
        works_on_host, from_host = self.strategy.optimizer_on_host, self.from_host
        # The slow weights are where the optimizer works. If what is sent is elsewhere, it works in another buffer.
        if works_on_host != from_host:
            kept["outer values"] = slow
        if from_host:
            sent["outer messages"] = _total_bytes(self._queue_needs(QUEUES[TransferKind.OUTER]))
        device, host = dict[str, int](), dict[str, int]()
        (host if works_on_host else device).update(kept)
        (host if from_host else device).update(sent)
        return device, host

    def buffer_bytes(self, inner: Mapping[str, int]) -> dict[str, int]:
        """Return the buffers of one rank together with those of the inner strategy, `inner`."""
        queues = {QUEUES[kind] for kind in OUTER_KINDS}
        if self.from_host:  # `memory_bytes` counts the others
            queues.remove(QUEUES[TransferKind.OUTER])
        wire = sum(_total_bytes(self._queue_needs(queue)) for queue in queues)
        added = {"wire": wire, "communicators": self.communicator_bytes}
        return dict(inner) | {part: inner.get(part, 0) + nbytes for part, nbytes in added.items() if nbytes}

    @property
    def communicator_bytes(self) -> int:
        """The bytes that NCCL takes on one rank's device for outer steps."""
        return outer_communicator_bytes(self.transfers, self.from_host)

    def timeout(self, of_step: timedelta) -> timedelta:
        """Return how long an exchange may take, if no transfer of a step takes longer than `of_step`.

        It may be under way for `delay` steps, while one island can be a step behind. The slowest links need longer.
        """
        sent_seconds = self.peak_inter_bytes / self.strategy.job.nodes / SLOWEST_RATE
        return (1 + self.settings.delay) * of_step + timedelta(seconds=math.ceil(sent_seconds))

    def _queue_needs(self, queue: str) -> Needs:
        return largest(self.wire_needs(kind) for kind in OUTER_KINDS if QUEUES[kind] == queue)

    def wire_needs(self, kind: TransferKind) -> Needs:
        """Return the elements by dtype of the wire buffers that one rank needs for transfers of this kind."""
        mine = [t for t in self.transfers if t.kind is kind]
        gathers = [{t.dtype: gathered_in(t)[1]} for t in mine if t.move.op is Op.ALL_GATHER]
        return largest([*gathers, *map(wire_needs, mine)])

    def __str__(self) -> str:
        every, mean = self.settings.every, f"{self.mean_inter_bytes:,.0f}"
        title = f"outer steps: bytes sent by all ranks together in {every} steps"
        said = f"  between nodes in a step: {mean} on average, {self.peak_inter_bytes:,} at most"
        return f"{title}\n{self.by_kind()}\n{said}"


def _total_bytes(needs: Needs) -> int:
    return sum(numel * item_bytes(dtype) for dtype, numel in needs.items())


def gathered_in(transfer: Transfer) -> tuple[int, int]:
    """Return start and end of an all-gather's region in the wire buffer, which the transfer uses up to the start."""
    start = round_up(wire_needs(transfer).get(transfer.dtype, 0), _WIRE_ALIGNMENT)
    return start, start + transfer.elements


def plan_outer(strategy: Strategy, plans: Sequence[UnitPlan], form: Form = Form.MESSAGES) -> OuterPlan | None:
    """Return what islands exchange of a model, or None if the strategy has no outer steps."""
    outer = strategy.outer
    if outer is None:
        return None
    from_host = form is Form.COLLECTIVES and (strategy.islands > 1 or bool(outer.meet)) and not outer.nccl
    between = Form.MESSAGES if from_host else form
    trained = [index for index, plan in enumerate(plans) if plan.trains]
    if outer.fragments > max(len(trained), 1):
        raise ConfigError(
            f"{strategy.name}: outer.fragments={outer.fragments}, and the model has {len(trained)} units that train. "
            f"Expected at most {max(len(trained), 1)}, as each fragment has at least one unit."
        )
    fragments = tuple(
        _fragment(strategy, outer, number, tuple(trained[number :: outer.fragments]), plans, (between, form))
        for number in range(outer.fragments)
    )
    transfers = tuple(t for each in fragments for t in (*each.exchanges, *each.gathers))
    return OuterPlan(strategy, outer, fragments, transfers, from_host)


def _fragment(
    strategy: Strategy,
    outer: Outer,
    number: int,
    units: tuple[int, ...],
    plans: Sequence[UnitPlan],
    forms: tuple[Form, Form],
) -> Fragment:
    """Return one fragment: its units' buckets, grouped by dtype and size of blocks.

    `forms`: The forms of transfers between islands, and of those inside.
    """
    name, between = f"fragment {number}", over_islands(strategy.topology, strategy.islands)
    partition, gathers = subdivided(strategy.placement, strategy.topology)
    inside = tuple(move.repeated(strategy.islands, strategy.topology.world) for move in gathers)

    def transfers(
        kind: TransferKind, payload: Range, moves: Sequence[GroupCollective], transport: Transport = Transport()
    ) -> tuple[Transfer, ...]:
        form = forms[kind is TransferKind.OUTER_GATHER]
        return tuple(Transfer(kind, payload, move, transport, strategy.job, form=form) for move in moves)

    grouped: dict[tuple[str, Transport], list[BucketSlice]] = {}
    for unit in units:
        for index, bucket in enumerate(plans[unit].buckets):
            if bucket.spec.trainable:
                key = bucket.own_dtype, outer.transport.within(bucket.spec.alignment)
                mine = grouped.setdefault(key, [])
                start = mine[-1].start + mine[-1].elements if mine else 0
                mine.append(BucketSlice(unit, index, start, bucket.numel // partition.count))
    parts: list[FragmentPart] = []
    for (own_dtype, transport), slices in grouped.items():
        dtype, elements = wide(own_dtype), sum(each.elements for each in slices)
        if transport.codec != "none" and dtype not in ENCODED:
            raise ConfigError(
                f"{strategy.name}: outer steps in {transport.codec}: the slow weights are {dtype}, and codecs take "
                f"{', '.join(ENCODED)}. Leave the codec out."
            )
        exchange = transfers(TransferKind.OUTER, Range(name, own_dtype, elements, dtype), between, transport)
        whole = Range(name, own_dtype, elements * math.prod(move.members for move in inside), own_dtype)
        gather = transfers(TransferKind.OUTER_GATHER, whole, inside)
        parts.append(FragmentPart(own_dtype, dtype, tuple(slices), partition, exchange, gather))
    # With unequal batches, each island also tells its tokens there.
    compared = 2 if strategy.shares is None else 2 + strategy.islands
    check = transfers(TransferKind.SLOW_WEIGHTS, Range(name, "digest", compared, "int64"), between)
    return Fragment(units, tuple(parts), check if parts else ())


class OuterSteps:
    """The outer steps of one model on one rank. The engine calls `advance` before the parameter sync of each step."""

    # Optimizer steps are counted by boundaries, so that a step that loss scaling skips counts on every island.

    def __init__(self, plan: OuterPlan) -> None:
        self._plan, self._outer = plan, plan.settings
        self.done = 0  # the last optimizer step whose exchanges were begun and applied
        # The exchange of each fragment that is not applied yet, and the optimizer step that it belongs to.
        self.under_way: dict[int, tuple[Task, int]] = {}

    def advance(self, step: int) -> list[Action]:
        """Return the actions of all optimizer steps that ended since the last call. `step` is the last one."""
        actions: list[Action] = []
        while self.done < step:
            self.done += 1
            actions += [self._begin(fragment) for fragment in self._outer.begun_at(self.done)]
            for fragment in self._outer.fragments_applied_after(self.done):
                actions += self._apply(fragment)
        return actions

    def applies_before(self, step: int) -> bool:
        """Return whether `advance(step)` applies an exchange."""
        return any(self._outer.fragments_applied_after(each) for each in range(self.done + 1, step + 1))

    def average(self) -> list[Action]:
        """Return the actions that apply the exchanges under way now, and then average the weights of all islands."""
        actions = [action for fragment in tuple(self.under_way) for action in self._apply(fragment)]
        fragments = range(len(self._plan.fragments))
        actions += [self._begin(fragment) for fragment in fragments]
        return actions + [action for fragment in fragments for action in self._apply(fragment, average=True)]

    def resume(self, done: int, under_way: Mapping[int, int]) -> None:
        """Continue after optimizer step `done`, with exchanges whose results are there but not applied yet.

        `under_way` has the step that each of them belongs to.
        """
        self.done = done
        self.under_way = {f: (Task(TransferKind.OUTER, f), begun) for f, begun in under_way.items()}

    def _begin(self, fragment: int) -> Action:
        task = Task(TransferKind.OUTER, fragment, transfers=self._plan.fragments[fragment].exchanges)
        self.under_way[fragment] = task, self.done
        return Submit(task)

    def _apply(self, fragment: int, *, average: bool = False) -> list[Action]:
        if fragment not in self.under_way:  # it was applied by `average`, or is from before a checkpoint
            return []
        exchange, _ = self.under_way.pop(fragment)
        gathers = self._plan.fragments[fragment].gathers
        gather = Task(TransferKind.OUTER_GATHER, fragment, transfers=gathers) if gathers else None
        # Where the optimizer works in host memory, the host applies the result.
        waits = Wait(exchange, on_host=self._plan.strategy.optimizer_on_host)
        return [waits, ApplyOuter(fragment, exchange, gather, average)]
