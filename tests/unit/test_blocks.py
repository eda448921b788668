"""Blocks of a codec and parameters: which share a scale, and what it costs that no two parameters do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import towpath
from towpath.core import routes
from towpath.core.formats import Codec
from towpath.core.routes import Op, SlicePart, piece_bounds
from towpath.core.schedule import Schedule
from towpath.core.schedule import schedule as schedule_of
from towpath.core.transfer import Transfer
from towpath.core.unit_plan import BucketPlan
from towpath.core.units import BucketSpec, UnitSpec
from towpath.topology.cluster import Extent, Topology

SHAPES = [Topology(2, 2), Topology(2, 3), Topology(4, 2), Topology(3, 1)]
ODD = (7, 1, 4096, 300, 1, 12, 5000, 33)  # scalars, vectors and matrices, hardly one of them a whole number of blocks


def _strategies(shape: Topology) -> Iterator[towpath.Strategy]:
    """Every kind of transfer, reductions and all-reduces among them, in large and in small blocks."""
    for name in ("zero++", "qwz", "qgz"):
        yield towpath.strategy(name, shape)
    both = {"weights": "int8:1024+hadamard", "gradients": "int4:64"}
    for name in ("zero++", "mics", "ddp", "zero1", "paro-iig", "paro-nig"):
        yield towpath.strategy(name, shape, **both)
    yield towpath.strategy("mics", shape, gradients="e4m3")
    if shape.world % 4 == 0:
        yield towpath.strategy("mics", shape, group=Extent(2, 2), **both)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_block_of_any_message_spans_two_parameters(shape: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SMALLEST_PART_BYTES", 32)  # slices of such small models are cut into parts too
    checked = 0
    for strategy in _strategies(shape):
        for numels in (ODD, (1,) * 40, (1 << 15,)):
            unit = UnitSpec("block", (BucketSpec(numels),))
            for transfer, bucket in _encoded(schedule_of(strategy, (unit,), 1)):
                codec = transfer.transport.encoding
                assert codec is not None
                for start, end in _messages(transfer):
                    for first in range(start, end, codec.block):
                        last = min(first + codec.block, end) - 1
                        assert _owner(bucket, first) == _owner(bucket, last), (str(strategy), numels, str(transfer))
                        checked += 1
    assert checked > 1000


def _encoded(made: Schedule) -> Iterator[tuple[Transfer, BucketPlan]]:
    for plan in made.plans:
        for bucket in plan.buckets:
            yield from ((t, bucket) for ts in bucket.transfers.values() for t in ts if t.transport.encoding)


def _messages(transfer: Transfer) -> Iterator[tuple[int, int]]:
    """What is encoded at once: where it begins and ends in the flat buffer."""
    codec, members = transfer.transport.encoding, transfer.move.members
    assert codec is not None
    for region in range(transfer.move.regions):
        for slot in range(members):
            # A gather encodes slices whole, a reduction part by part; an all-reduce does the one and then the other.
            for parts in {1, transfer.parts} if transfer.move.op is not Op.ALL_GATHER else {1}:
                for part in range(parts):
                    piece = SlicePart(slot, part, parts)
                    start, end = piece_bounds(transfer.elements, members, piece, codec.grain)
                    yield region * transfer.elements + start, region * transfer.elements + end


def _owner(bucket: BucketPlan, element: int) -> int:
    """The parameter that lies there; padding is of the one before it."""
    starts = bucket.spec.offsets[:-1]
    return max(index for index, start in enumerate(starts) if start <= element)


@pytest.mark.parametrize("name", ["zero3", "hpz", "mics", "paro-iig"])
def test_what_no_codec_touches_lies_and_weighs_as_ever(name: str) -> None:
    """On 16 elements, and slices on 32."""
    plan = schedule_of(towpath.strategy(name, Topology(2, 2)), (UnitSpec("block", (BucketSpec(ODD),)),), 1).plans[0]
    offsets = [0]
    for numel in ODD:
        offsets.append(offsets[-1] + -(-numel // 16) * 16)
    assert plan.buckets[0].spec.offsets == tuple(offsets)
    slices = plan.buckets[0].optimizer.count * 32
    assert plan.buckets[0].numel == -(-offsets[-1] // slices) * slices


def test_one_block_for_a_whole_message_spans_what_it_spans() -> None:
    """The baseline of the papers."""
    whole = towpath.strategy("zero++", Topology(2, 2), weights="int8:whole", gradients="int4:whole")
    (plan,) = schedule_of(whole, (UnitSpec("block", (BucketSpec(ODD),)),), 1).plans
    assert plan.buckets[0].spec == BucketSpec(ODD)


def test_blocks_are_shorter_where_parameters_are() -> None:
    def block(text: str, numels: tuple[int, ...], slices: int = 4) -> int:
        codec = Codec.parse(text)
        return codec.within(BucketSpec(numels).in_blocks([codec], slices).alignment).block

    assert block("int8", (4096, 1 << 20)) == 256
    assert block("int8:4096", (4096, 1 << 24)) == 4096
    assert block("int8", (12,) * 50) == block("int8:4096", (1,) * 1000) == 32
    assert block("int8:64", (1 << 20,)) == 64  # never longer than was asked for
    # A thousand scalars on 1024 ranks: slices of 32 elements, as without a codec, and not of 4096.
    assert BucketSpec((1,) * 1000).in_blocks([Codec.parse("int8:4096")], 1024).padded(1024) == 32 * 1024


# --- what it costs ---------------------------------------------------------------------------------------------------
