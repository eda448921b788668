"""The closed form of what each route sends is what its messages add up to, on every grid of up to 64 ranks."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

import towpath
from tests.unit.test_routes import group_of
from towpath.core.formats import Codec, item_bytes
from towpath.core.placement import GroupCollective
from towpath.core.routes import (
    COLLECTIVES,
    ROUTES,
    Op,
    Send,
    byte_grain,
    cell_elements,
    encoded_slice,
    piece_bounds,
    sends,
)
from towpath.core.schedule import schedule
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Range, Transfer
from towpath.core.transport import Transport
from towpath.core.units import BucketSpec, UnitSpec
from towpath.topology.cluster import Extent, Topology

MOST = 64
SHAPES = [Topology(nodes, ranks) for nodes in range(1, MOST + 1) for ranks in range(1, MOST // nodes + 1)]
CODECS = ("none", "none", Codec.parse("int8:32"), Codec.parse("int4:whole"), Codec.parse("e4m3:64+hadamard"))


def drawn(route: str, shape: Topology) -> Transfer:
    """An operation, order of slices, length, dtype and codec: drawn, but the same in every run."""
    draw = random.Random(f"{route} {shape}")
    op, codec = draw.choice(list(COLLECTIVES)), draw.choice(CODECS)
    if codec != "none" and op is not Op.ALL_GATHER:
        route = draw.choice(("one-hop", "two-hop"))  # a sum of encoded messages needs hops
    group = group_of(shape, draw.choice(("rank order", "local-major")))
    elements = draw.choice((0, 1, draw.randrange(50 * shape.world), draw.randrange(5000 * shape.world)))
    dtype = draw.choice(("float32", "bfloat16"))
    return Transfer(
        TransferKind.GRAD_SYNC,
        Range("", "", elements, dtype),
        GroupCollective(op, 1, (group,)),
        Transport(route, codec),
        shape,
    )


def one_by_one(t: Transfer) -> tuple[int, list[int]]:
    """Inside nodes, and out of each node."""
    group, inside, leaving = t.move.groups[0], 0, [0] * t.topology.nodes
    nodes = [t.topology.node_of(rank) for rank in group.ranks]
    for (source, target, send), count in Counter((nodes[s.source], nodes[s.target], s[4:]) for s in _plan(t)).items():
        nbytes = count * _message_bytes(t, *send)
        inside += nbytes if source == target else 0
        leaving[source] += nbytes if source != target else 0
    return inside, leaving


def _plan(t: Transfer) -> list[Send]:
    group = t.move.groups[0]
    return list(sends(t.move.op, t.route, group, list(map(t.topology.node_of, group.ranks)), t.parts))


def _message_bytes(t: Transfer, slot: int, part: int, parts: int, adds: bool) -> int:
    codec, members, piece = t.transport.encoding, t.move.members, Send(0, 0, 0, 0, slot, part, parts).piece
    if codec is None:
        start, end = piece_bounds(t.elements, members, piece)
        return (end - start) * item_bytes(t.dtype)
    if adds:
        return codec.cell_bytes(cell_elements(t.elements, members, parts, codec.grain))
    nbytes = encoded_slice(codec, t.elements, members) * members  # slices that were encoded before, like any bytes
    start, end = piece_bounds(nbytes, members, piece, byte_grain(nbytes, members))
    return end - start


@pytest.mark.parametrize("route", ROUTES)
def test_the_closed_form_is_the_sum_of_the_messages(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("towpath.core.routes.SMALLEST_PART_BYTES", 256)
    seen: Counter[tuple[object, ...]] = Counter()
    turn = list(ROUTES).index(route)
    # All messages of many ranks are very many: of the larger grids every route meets a third, and another one each.
    for shape in (s for number, s in enumerate(SHAPES) if s.world <= MOST // 2 or number % 3 == turn % 3):
        transfer = drawn(route, shape)
        inside, leaving = one_by_one(transfer)
        assert (transfer.intra_bytes, [*map(transfer.cable_bytes, range(shape.nodes))]) == (inside, leaving), transfer
        assert transfer.inter_bytes == sum(leaving)
        seen[transfer.move.op, transfer.transport.encoding is not None, transfer.parts > 1] += 1
    assert len({op for op, *_ in seen}) == len(COLLECTIVES) and len({coded for _, coded, _ in seen}) == 2


@pytest.mark.parametrize("strategy", ["zero3", "zero3 two-hop", "mics", "paro-iig", "zero++"])
def test_a_schedule_of_thousands_of_ranks_is_worked_out_in_a_moment(strategy: str) -> None:
    """It is asked for by a planner that compares thousands of them; message by message it took minutes."""
    topology, (name, _, route) = Topology(512, 8), strategy.partition(" ")
    options = ({"route": route} if route else {}) | ({"group": Extent(8, 2)} if name == "mics" else {})
    numels = (12288 * 12288 * 4, 12288 * 12288 * 8, 12288)
    units = [UnitSpec(f"blocks.{i}", (BucketSpec(numels),)) for i in range(96)]
    before = time.process_time()
    made = schedule(
        towpath.strategy(name, topology, **options), (UnitSpec("", (BucketSpec(numels[-1:]),), True), *units), 1
    )
    figures = (made.inter_bytes, made.intra_bytes, made.cable_bytes(511), *made.buffer_bytes().values())
    assert all(n >= 0 for n in figures) and made.inter_bytes > 0
    # A second is asked for; counted in the time of this process, and with room for machines of half the speed.
    assert time.process_time() - before < 2
