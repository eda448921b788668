"""The closed form of what each route sends is what its messages add up to, on every grid of up to 64 ranks."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest

from tests.unit.test_routes import group_of
from towpath.core.buffers import coalesced_bytes, wire_needs
from towpath.core.formats import Codec, item_bytes
from towpath.core.placement import GroupCollective
from towpath.core.routes import (
    COLLECTIVES,
    MOST_ROW_CALLS,
    ROUTES,
    Form,
    Op,
    Send,
    byte_grain,
    cell_elements,
    effective_route,
    encoded_slice,
    piece_bounds,
    sends,
)
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range
from towpath.topology.cluster import Topology

MOST = 64
SHAPES = [Topology(nodes, ranks) for nodes in range(1, MOST + 1) for ranks in range(1, MOST // nodes + 1)]
CODECS = ("none", "none", Codec.parse("int8:32"), Codec.parse("int4:whole"), Codec.parse("e4m3:64+hadamard"))


def drawn(route: str, shape: Topology, form: Form = Form.MESSAGES) -> Transfer:
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
        form=form,
    )


def one_by_one(t: Transfer) -> tuple[int, list[int]]:
    """Inside nodes, and out of each node."""
    group, inside, leaving = t.move.groups[0], 0, [0] * t.topology.nodes
    nodes = [t.topology.node_of(rank) for rank in group.ranks]
    for (source, target, send), count in Counter(
        (nodes[s.source], nodes[s.target], s[4:]) for s in messages_of(t)
    ).items():
        nbytes = count * bytes_of_message(t, *send)
        inside += nbytes if source == target else 0
        leaving[source] += nbytes if source != target else 0
    return inside, leaving


def messages_of(t: Transfer) -> list[Send]:
    group = t.move.groups[0]
    nodes = list(map(t.topology.node_of, group.ranks))
    if t.form is Form.MESSAGES or t.move.op is not Op.ALL_REDUCE:
        return list(sends(t.move.op, t.route, group, nodes, t.parts))
    gather = effective_route(t.route, t.grid, Op.ALL_GATHER, t.form)
    reduction = sends(Op.REDUCE_SCATTER, t.route, group, nodes, t.parts)
    return [*reduction, *sends(Op.ALL_GATHER, gather, group, nodes, 1)]


def bytes_of_message(t: Transfer, slot: int, part: int, parts: int, adds: bool) -> int:
    codec, members, piece = t.transport.encoding, t.move.members, Send(0, 0, 0, 0, slot, part, parts).piece
    if codec is None:
        start, end = piece_bounds(t.elements, members, piece)
        return (end - start) * item_bytes(t.dtype)
    if adds:
        return codec.cell_bytes(cell_elements(t.elements, members, parts, codec.grain))
    nbytes = encoded_slice(codec, t.elements, members) * members  # slices that were encoded before, like any bytes
    start, end = piece_bounds(nbytes, members, piece, byte_grain(nbytes, members))
    return end - start


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("route", ROUTES)
def test_the_closed_form_is_the_sum_of_the_messages(route: str, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    for smallest in ("SMALLEST_PART_BYTES", "SMALLEST_PART_BYTES_IN_CALLS"):
        monkeypatch.setattr(f"towpath.core.routes.{smallest}", 256)
    seen: Counter[tuple[object, ...]] = Counter()
    turn = list(ROUTES).index(route)
    # All messages of many ranks are very many: each of the larger grids is met by one route. Collectives differ from
    # messages in all-reduces only.
    few = MOST // 2 if form is Form.MESSAGES else MOST // 4
    for shape in (s for number, s in enumerate(SHAPES) if s.world <= few or number % len(ROUTES) == turn):
        transfer = drawn(route, shape, form)
        inside, leaving = one_by_one(transfer)
        assert (transfer.intra_bytes, [*map(transfer.cable_bytes, range(shape.nodes))]) == (inside, leaving), transfer
        assert transfer.inter_bytes == sum(leaving)
        seen[transfer.move.op, transfer.transport.encoding is not None, transfer.parts > 1] += 1
    assert len({op for op, *_ in seen}) == len(COLLECTIVES) and len({coded for _, coded, _ in seen}) == 2


SLICE = 48  # elements


def in_calls(op: Op, route: str, shape: Topology, order: str = "rank order", elements: int | None = None) -> Transfer:
    move = GroupCollective(op, 1, (group_of(shape, order),))
    payload = Range("", "", SLICE * shape.world if elements is None else elements, "float32")
    return Transfer(TransferKind.GRAD_SYNC, payload, move, Transport(route), shape, form=Form.COLLECTIVES)


def test_wire_buffers_hold_a_bundle_unless_columns_are_contiguous() -> None:
    shape = Topology(4, 8)
    region, bundle = SLICE * 32, SLICE * 4
    for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
        assert wire_needs(in_calls(op, "ho-ring", shape)) == {"float32": bundle}
        assert wire_needs(in_calls(op, "ho-ring", shape, "local-major")) == {"float32": 0}
        assert wire_needs(in_calls(op, "flat", shape)) == {"float32": 0}
        assert wire_needs(in_calls(op, "flat", shape, "local-major")) == {"float32": region}


def test_an_ho_ring_in_parts_holds_a_bundle_and_a_copy_of_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region has no such copy, whatever the order of its slices."""
    monkeypatch.setattr("towpath.core.routes.SMALLEST_PART_BYTES_IN_CALLS", 64)
    for shape, order in product((Topology(4, 8), Topology(64, 8)), ("rank order", "local-major")):
        for op, parts in ((Op.ALL_GATHER, 3), (Op.REDUCE_SCATTER, 3), (Op.ALL_REDUCE, 2)):
            transfer = in_calls(op, "ho-ring", shape, order)
            assert (transfer.route, transfer.parts) == ("ho-ring", parts)
            longest = 32 if parts == 2 else 16  # elements of a slice, at a multiple of 16
            assert wire_needs(transfer) == {"float32": SLICE * shape.nodes + longest * shape.world}


def test_parts_of_an_ho_ring_gather_at_least_4_mib_in_each_call() -> None:
    shape, mebibyte = Topology(2, 8), 1 << 20
    for op, most in ((Op.ALL_GATHER, 4), (Op.REDUCE_SCATTER, 4), (Op.ALL_REDUCE, 2)):
        found = {}
        for mebibytes in (1, 3, 4, 6, 8, 64):
            transfer = in_calls(op, "ho-ring", shape, elements=mebibytes * mebibyte // 4 * shape.world)
            assert (transfer.route == "ho-ring") == (transfer.parts > 1)
            assert transfer.parts == 1 or mebibytes / transfer.parts * shape.nodes >= 4
            found[mebibytes] = transfer.parts
        assert found == {1: 1, 3: 1, 4: 2, 6: min(3, most), 8: most, 64: most}


def test_many_nodes_take_a_copy_of_the_region_and_few_calls() -> None:
    shape = Topology(64, 8)
    for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
        assert wire_needs(in_calls(op, "ho-ring", shape)) == {"float32": SLICE * 512}
        assert wire_needs(in_calls(op, "ho-ring", shape, "local-major")) == {"float32": 0}
        assert wire_needs(in_calls(op, "ho-ring", Topology(MOST_ROW_CALLS, 8))) == {"float32": SLICE * MOST_ROW_CALLS}
    gather = in_calls(Op.ALL_GATHER, "ho-ring", shape)
    assert coalesced_bytes(gather) == 2 * gather.region_bytes  # packed, and in the order of columns


def test_what_cannot_be_cut_evenly_goes_as_a_flat_collective() -> None:
    transfer = in_calls(Op.ALL_REDUCE, "ho-ring", Topology(2, 4), elements=1001)
    assert transfer.route == "flat" and wire_needs(transfer) == {"float32": 0}
