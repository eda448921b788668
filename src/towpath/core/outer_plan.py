"""The plan of outer steps: what islands exchange of a model, in which fragments, and the memory that it takes.

`core/outer.py` has the settings, and says which exchange belongs to which step. The engine, the simulator and the
schedule read the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from towpath.core.buffers import Needs, feedback_bytes, largest, wire_needs
from towpath.core.formats import ENCODED, item_bytes, wide
from towpath.core.outer import Outer
from towpath.core.payloads import Range
from towpath.core.placement import GroupCollective, Partition, over_islands, subdivided
from towpath.core.queues import QUEUES, outer_communicator_bytes
from towpath.core.routes import Form, Op
from towpath.core.sent_bytes import SentBytes
from towpath.core.strategy import OUTER_KINDS, Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.unit_plan import BucketPlan, UnitPlan
from towpath.core.units import round_up
from towpath.errors import ConfigError
from towpath.topology.cluster import Topology

# Elements. The region of an all-gather starts in the wire buffer at a multiple of this.
_WIRE_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Slice:
    """A rank's part of one bucket in a fragment."""

    unit: int  # the index of the unit
    bucket: int  # the index of the bucket in its unit
    start: int  # the position of the part in the flat buffer of the fragment
    elements: int
    optimizer: Partition  # the partition of the bucket's optimizer states
    outer: Partition  # the finer partition, in which each rank of an island has a slice of its own


@dataclass(frozen=True, slots=True)
class Part:
    """The buckets of a fragment that are exchanged as one flat buffer: those of one dtype and one size of blocks."""

    own_dtype: str
    dtype: str  # the dtype of the slow weights and of the exchange: `own_dtype`, in at least 32 bits
    slices: tuple[Slice, ...]  # a rank's slices of the buckets
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
    parts: tuple[Part, ...]
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
    fragments: tuple[Fragment, ...]  # the fragments, in the order of their exchanges
    transfers: tuple[Transfer, ...] = field(init=False)  # the transfers of one period

    def __post_init__(self) -> None:
        found = (t for each in self.fragments for t in (*each.exchanges, *each.gathers))
        object.__setattr__(self, "transfers", tuple(found))

    @property
    def settings(self) -> Outer:
        assert self.strategy.outer is not None
        return self.strategy.outer

    @property
    def mean_inter_bytes(self) -> float:
        """Bytes sent between nodes, summed over all ranks, as the mean of all steps of a period."""
        return self.inter_bytes / self.settings.every

    @property
    def peak_inter_bytes(self) -> int:
        """Bytes between nodes of the exchanges that begin in the same step, of the step that has most."""
        begun = (self.settings.begun_at(step) for step in range(1, self.settings.every + 1))
        return max(sum(t.inter_bytes for f in each for t in self.fragments[f].exchanges) for each in begun)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that one rank keeps for outer steps: slow weights, momentum, differences and feedback."""
        exchanges = [t for fragment in self.fragments for part in fragment.parts for t in part.exchange]
        feedback = sum(map(feedback_bytes, exchanges))
        found = {} if self.strategy.optimizer_on_host else self._slow_bytes()
        return found | {"outer differences": self._slow_bytes()["slow weights"], "outer feedback": feedback}

    def host_memory_bytes(self) -> dict[str, int]:
        """Return the bytes that one rank keeps in host memory, if the optimizer works there."""
        if not self.strategy.optimizer_on_host:
            return {}
        found = self._slow_bytes()
        return found | {"outer values": found["slow weights"]}

    def _slow_bytes(self) -> dict[str, int]:
        slow = sum(fragment.rank_bytes for fragment in self.fragments)
        return {"slow weights": slow, "outer momentum": slow if self.settings.momentum else 0}

    @property
    def wire_bytes(self) -> int:
        queues: dict[str, Needs] = {}
        for kind in OUTER_KINDS:
            queues[QUEUES[kind]] = largest([queues.get(QUEUES[kind], {}), self.wire_needs(kind)])
        return sum(numel * item_bytes(dtype) for needs in queues.values() for dtype, numel in needs.items())

    def buffer_bytes(self, inner: Mapping[str, int]) -> dict[str, int]:
        """Return the buffers of one rank together with those of the inner strategy, `inner`."""
        added = {"wire": self.wire_bytes, "communicators": outer_communicator_bytes(self.transfers)}
        return dict(inner) | {part: inner.get(part, 0) + nbytes for part, nbytes in added.items() if nbytes}

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


def gathered_in(transfer: Transfer) -> tuple[int, int]:
    """Return start and end of an all-gather's region in the wire buffer, which the transfer uses up to the start."""
    start = round_up(wire_needs(transfer).get(transfer.dtype, 0), _WIRE_ALIGNMENT)
    return start, start + transfer.elements


def plan_outer(strategy: Strategy, plans: Sequence[UnitPlan], form: Form = Form.MESSAGES) -> OuterPlan | None:
    """Return what islands exchange of a model, or None if the strategy has no outer steps."""
    outer = strategy.outer
    if outer is None:
        return None
    trained = [index for index, plan in enumerate(plans) if plan.trains]
    if outer.fragments > max(len(trained), 1):
        raise ConfigError(
            f"{strategy.name}: outer.fragments={outer.fragments}, and the model has {len(trained)} units that train. "
            f"Expected at most {max(len(trained), 1)}, as each fragment has at least one unit."
        )
    fragments = (
        _fragment(strategy, number, tuple(trained[number :: outer.fragments]), plans, form)
        for number in range(outer.fragments)
    )
    return OuterPlan(strategy, tuple(fragments))


def _fragment(
    strategy: Strategy, number: int, units: tuple[int, ...], plans: Sequence[UnitPlan], form: Form
) -> Fragment:
    """Return one fragment: its units' buckets, grouped by dtype and size of blocks."""
    assert strategy.outer is not None
    grouped: dict[tuple[str, Transport], list[tuple[int, int, BucketPlan]]] = {}
    for unit in units:
        for index, bucket in enumerate(plans[unit].buckets):
            if bucket.spec.trainable:
                transport = strategy.outer.transport.within(bucket.spec.alignment)
                grouped.setdefault((bucket.own_dtype, transport), []).append((unit, index, bucket))
    parts = tuple(_part(strategy, number, *key, buckets, form) for key, buckets in grouped.items())
    moves = over_islands(strategy.topology, strategy.islands)
    digest = Range(f"fragment {number}", "digest", 2, "int64")
    check = _transfers(TransferKind.SLOW_WEIGHTS, digest, moves, Transport(), strategy.job, form)
    return Fragment(units, parts, check if parts else ())


def _part(
    strategy: Strategy,
    number: int,
    own_dtype: str,
    transport: Transport,
    buckets: Sequence[tuple[int, int, BucketPlan]],
    form: Form,
) -> Part:
    assert strategy.outer is not None
    slices: list[Slice] = []
    outer, gathers, start = *subdivided(strategy.placement, strategy.topology), 0
    for unit, index, bucket in buckets:
        elements = bucket.numel // outer.count
        slices.append(Slice(unit, index, start, elements, bucket.optimizer, outer))
        start += elements
    dtype, name = wide(own_dtype), f"fragment {number}"
    if transport.codec != "none" and dtype not in ENCODED:
        raise ConfigError(
            f"{strategy.name}: outer steps in {transport.codec}: the slow weights are {dtype}, and codecs take "
            f"{', '.join(ENCODED)}. Leave the codec out."
        )
    moves, payload = over_islands(strategy.topology, strategy.islands), Range(name, own_dtype, start, dtype)
    exchange = _transfers(TransferKind.OUTER, payload, moves, transport, strategy.job, form)
    inside = tuple(move.repeated(strategy.islands, strategy.topology.world) for move in gathers)
    whole = Range(name, own_dtype, start * math.prod(move.members for move in inside), own_dtype)
    gather = _transfers(TransferKind.OUTER_GATHER, whole, inside, Transport(), strategy.job, form)
    return Part(own_dtype, dtype, tuple(slices), exchange, gather)


def _transfers(
    kind: TransferKind,
    payload: Range,
    moves: Sequence[GroupCollective],
    transport: Transport,
    topology: Topology,
    form: Form,
) -> tuple[Transfer, ...]:
    return tuple(Transfer(kind, payload, move, transport, topology, form=form) for move in moves)
