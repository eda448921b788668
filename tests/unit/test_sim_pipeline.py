"""The replay of a pipeline, against what can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.passes import (
    SCHEDULES,
    Await,
    Compression,
    Order,
    Post,
    RunPass,
    Walk,
    owners,
    plain_walk,
)
from towpath.core.strategy import TransferKind
from towpath.core.transport import Transport
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, StageOutput, UnitSpec
from towpath.pipeline.schedules import walks
from towpath.plan.hardware import CodecSpeed, Hardware, Link
from towpath.plan.replay import ComputeSeconds, Replay, ReplayedStep, SimulatedStage
from towpath.topology.cluster import Topology

UNITS = (UnitSpec("", (BucketSpec((10,)),), root=True), UnitSpec("a", (BucketSpec((100,)),)))
HIDDEN = 1000  # elements that a stage hands on
FAST = 1e15
FORWARD, BACKWARD = 1.0, 2.0


def hardware(ranks: int, cable: float = FAST, **more: Any) -> Hardware:
    link = Link(cable, 0.0)
    codecs = (("int8", CodecSpeed(FAST, FAST)),)
    return Hardware(Topology(ranks, 1), link, link, FAST, FAST, codecs=codecs, **more)


def replayed(
    walk: Walk,
    owners: Sequence[int],
    cluster: Hardware | None = None,
    compression: Compression | None = None,
    copies: int = 1,
    seconds: tuple[float, float] = (FORWARD, BACKWARD),
    shape: tuple[int, ...] = (HIDDEN,),
    parts: int = 1,
) -> ReplayedStep:
    """Each stage has one unit, and the ranks of a stage are neighbors. `parts` of them are tensor-parallel."""
    ranks = max(owners) + 1
    made = presets.strategy("ddp", Topology(1, copies))
    plans = [plan_unit(made, unit, Precision()) for unit in UNITS]
    forward, backward = (each / (len(owners) // ranks) for each in seconds)
    stages = [
        SimulatedStage(
            made,
            plans,
            ComputeSeconds((0.0, forward), (0.0, backward), 0.0, 0.0),
            tuple(range(copies * parts * rank, copies * parts * (rank + 1))),
            (StageOutput.on(parts, shape, "float32"),) if i < len(owners) - 1 else (),
            parts,
        )
        for i, rank in enumerate(owners)
    ]
    return Replay(stages, cluster or hardware(ranks), walk, compression).run()


def found(name: str, ranks: int, micro_batches: int) -> tuple[Order, Walk, list[int]]:
    order, walk = walks(name, ranks, micro_batches)
    return order, walk, [rank for _, rank in sorted(owners(order).items())]


def test_a_step_of_a_warm_up_is_replayed_with_the_messages_of_that_step() -> None:
    _, walk, owners = found("1F1B", 2, 4)
    given = Compression(activations=Transport(codec="int8", after=2))
    plain, encoded = (replayed(walk, owners, compression=c) for c in (Compression(), Compression(activations="int8")))
    assert encoded.combined().inter_bytes < plain.combined().inter_bytes
    assert [replayed(walk, owners, compression=given.at(step)).combined().inter_bytes for step in (1, 2)] == [
        plain.combined().inter_bytes,
        encoded.combined().inter_bytes,
    ]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("ranks, micro_batches", [(2, 2), (4, 4), (4, 8)])
def test_without_communication_a_step_is_its_passes_and_the_usual_bubble(
    schedule: str, ranks: int, micro_batches: int
) -> None:
    seen = replayed(plain_walk(schedule, ranks, micro_batches)[1], list(range(ranks)))
    assert seen.seconds == pytest.approx((micro_batches + ranks - 1) * (FORWARD + BACKWARD), rel=1e-6)
    assert all(t.computed == pytest.approx(micro_batches * (FORWARD + BACKWARD)) for t in seen.ranks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_computes_all_and_sends_every_message_once(name: str) -> None:
    order, walk, owners = found(name, 4, 8)
    for rank, operations in walk.items():
        assert [each.stage_pass for each in operations if isinstance(each, RunPass)] == list(order[rank])
    posted = [each for operations in walk.values() for each in operations if isinstance(each, Post)]
    awaited = [each for operations in walk.values() for each in operations if isinstance(each, Await)]
    ends = [(each.message, each.sends) for each in posted]
    assert len(set(ends)) == len(ends) and sorted(map(str, ends)) == sorted(str((a.message, a.sends)) for a in awaited)

    seen = replayed(walk, owners)
    assert all(t.computed == pytest.approx(8 * (FORWARD + BACKWARD)) for t in seen.ranks)
    assert seen.combined().inter_bytes == 4 * HIDDEN * len(ends) / 2


def test_a_message_takes_its_cable_and_is_waited_for() -> None:
    """Two stages, one micro-batch: forward, output, forward and backward, gradient, backward."""
    cable = 4 * HIDDEN / 0.5  # half a second each
    seen = replayed(plain_walk("GPipe", 2, 1)[1], [0, 1], hardware(2, cable))
    assert seen.seconds == pytest.approx(2 * (FORWARD + BACKWARD) + 2 * 0.5, rel=1e-6)
    assert seen.ranks[1].exposed[TransferKind.ACTIVATION] == pytest.approx(FORWARD + 0.5)
    assert seen.ranks[0].in_flight[TransferKind.ACTIVATION] == pytest.approx(0.5)
    assert seen.combined().inter_bytes == 2 * 4 * HIDDEN


def test_copies_of_a_stage_on_one_node_share_its_cable() -> None:
    link = Link(4 * HIDDEN / 0.5, 0.0)
    cluster = Hardware(Topology(2, 2), Link(FAST, 0.0), link, FAST, FAST)
    seen = replayed(plain_walk("GPipe", 2, 1)[1], [0, 1], cluster, copies=2)
    assert seen.seconds == pytest.approx(2 * (FORWARD + BACKWARD) + 4 * 0.5, rel=1e-6)


def test_ranks_of_one_host_share_its_cores() -> None:
    """Both stages compute at once only half as fast: but where one waits for the other, each has all of it."""
    seen = replayed(plain_walk("GPipe", 2, 4)[1], [0, 1], hardware(2, cores=1.0, ranks_sharing=2))
    assert seen.seconds == pytest.approx(2 * 4 * (FORWARD + BACKWARD), rel=1e-6)


def test_by_sockets_a_receiver_tells_that_it_is_ready_behind_what_it_sends() -> None:
    """Two stages that exchange an output and a gradient at once: with sockets one after the other."""
    walk = plain_walk("1F1B", 2, 4)[1]
    links, by_sockets = (hardware(2, 4 * HIDDEN / 0.5, cores=cores, ranks_sharing=2) for cores in (None, 100.0))
    took = [replayed(walk, [0, 1], cluster, seconds=(0.1, 0.1)).seconds for cluster in (links, by_sockets)]
    assert took[1] > took[0] + 0.5


def test_low_rank_messages_take_the_bytes_of_their_factors() -> None:
    seen = replayed(plain_walk("GPipe", 2, 1)[1], [0, 1], compression=Compression("low-rank:2"), shape=(10, 100))
    assert seen.combined().inter_bytes == 4 * 1000 + 4 * 2 * 110


def test_shares_are_sent_at_once_and_gathered_before_the_pass_that_needs_them() -> None:
    """An output and its gradient: a quarter of a second for two shares on one cable, and half of one to gather them."""
    share = 4 * HIDDEN / 2
    cluster = Hardware(Topology(2, 2), Link(share / 0.5, 0.0), Link(2 * share / 0.25, 0.0), FAST, FAST)
    seen = replayed(plain_walk("GPipe", 2, 1)[1], [0, 1], cluster, shape=(10, HIDDEN // 10), parts=2)
    assert seen.seconds == pytest.approx(2 * (FORWARD + BACKWARD) + 2 * (0.25 + 0.5), rel=1e-6)
    assert seen.ranks[1].exposed[TransferKind.ACTIVATION] == pytest.approx(FORWARD + 0.25 + 0.5)
    assert (seen.combined().inter_bytes, seen.combined().intra_bytes) == (4 * share, 4 * share)
