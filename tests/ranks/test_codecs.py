"""Codecs on real ranks: the mean of the gradients, alike on every rank; what is rounded away, kept to the last bit.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import towpath
from tests.ranks.models import MODELS
from tests.ranks.server import World
from tests.ranks.strategies import in_turn
from towpath.collectives.collective import Binding, Collective, Members, Scratch
from towpath.collectives.select import bind, select
from towpath.errors import MismatchError
from towpath.spec.routes import Group, Op, bounds
from towpath.spec.schedule import Transfer
from towpath.spec.strategy import Kind
from towpath.spec.transitions import Move
from towpath.spec.wire import Wire
from towpath.topology.cluster import Topology

Worlds = Callable[[int], World]

SHAPES = [Topology(2, 2), Topology(2, 3), Topology(3, 1), Topology(4, 2)]
CODECS = ["int8:32", "int4:64", "int4:256+hadamard+stochastic", "e4m3", "e5m2:whole", "bf16"]
# Largest distance of a decoded value from the value, as a share of its block's largest (with a rotation: of the length
# of the rotated block). Half a code of 127 or 7, a whole one where rounding is random; 3, 2 and 7 bits of mantissa.
STEP = {"int8": 0.5 / 127, "int4": 1 / 7, "e4m3": 2**-4, "e5m2": 2**-3, "bf16": 2**-8}
# Error over value, both as root mean squares, of normal values. The coarsest here (int4, random rounding, a block's
# largest of three deviations) makes 0.18 a rounding, and an all-reduce rounds three times; a wrong factor makes 0.5.
NOISE = 0.45
LENGTHS = [1, 7, 64, 1009, 5000]

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
codecs = in_turn(CODECS, 2, "codec")


def _members(shape: Topology, local_major: bool = False) -> Members:
    ranks, group = tuple(range(shape.world)), dist.group.WORLD
    assert group is not None
    slots = tuple(shape.local_of(r) * shape.nodes + shape.node_of(r) for r in ranks) if local_major else ranks
    return Members(group, group, Group(ranks, slots), dist.get_rank(), tuple(map(shape.node_of, ranks)))


def _collective(op: Op, wire: Wire, shape: Topology, elements: int, dtype: str, members: Members) -> Collective:
    transfer = Transfer(Kind.SYNC, "block", "float", Move(op, 1, (members.group,)), wire, elements, dtype, shape)
    return bind(Binding.of(transfer), members, "gloo", Scratch(torch.device("cpu")))


def _each(shape: Topology, elements: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """What every rank has, by rank; alike on all."""
    generator = torch.Generator().manual_seed(seed + elements)
    return torch.randn(shape.world, elements, generator=generator).to(getattr(torch, dtype))


def _most(codec: str, largest: float) -> float:
    """How far a decoded value may lie from the value, if no value is larger than `largest`."""
    spread = 32**0.5 if "hadamard" in codec else 1.0
    return STEP[codec.partition(":")[0].partition("+")[0]] * largest * spread * spread


@shapes
@codecs
def test_a_gather_brings_every_rank_the_same_values_near_the_true_ones(
    world: Worlds, shape: Topology, codec: str
) -> None:
    world(shape.world).run(_gather, shape, codec)


def _gather(shape: Topology, codec: str) -> None:
    for number, elements in enumerate(LENGTHS):
        dtype = ("float32", "bfloat16", "float16")[number % 3]
        route = ("flat", "ho-ring", "hierarchical", "ring", "two-hop")[number]
        members = _members(shape, local_major=number % 2 == 1)
        whole = _each(shape, elements, dtype)[0]
        start, end = bounds(elements, shape.world, members.slot)
        region = torch.zeros_like(whole)
        _collective(Op.ALL_GATHER, Wire(route, codec), shape, elements, dtype, members).run(region, whole[start:end])
        rounding = torch.finfo(whole.dtype).eps * whole.abs().max().item()
        most = _most(codec, whole.abs().max().item()) + rounding
        assert _distance(region, whole) <= most, (elements, dtype, _distance(region, whole), most)
        if elements > 1000:
            assert _share(region, whole) < NOISE
        assert _same_everywhere(region)


@shapes
@codecs
@pytest.mark.parametrize("op", [Op.REDUCE_SCATTER, Op.ALL_REDUCE])
def test_a_reduction_is_near_the_true_sum(world: Worlds, shape: Topology, codec: str, op: Op) -> None:
    world(shape.world).run(_reduce, shape, codec, op)


def _reduce(shape: Topology, codec: str, op: Op) -> None:
    rank = dist.get_rank()
    for number, elements in enumerate(LENGTHS):
        dtype, route = ("float32", "bfloat16", "float16")[number % 3], ("one-hop", "two-hop")[number % 2]
        members = _members(shape, local_major=op is Op.REDUCE_SCATTER and number % 2 == 1)
        each = _each(shape, elements, dtype)
        exact = each.double().sum(0)
        region = each[rank].clone()
        start, end = bounds(elements, shape.world, members.slot)
        _collective(op, Wire(route, codec), shape, elements, dtype, members).run(region, region[start:end])
        # Every rank's own values are rounded once; sums of a node, and of all for an all-reduce, once more each.
        largest = each.double().abs().sum(0).max().item()
        most = 3 * _most(codec, largest) + torch.finfo(region.dtype).eps * largest
        found, true = (region, exact) if op is Op.ALL_REDUCE else (region[start:end], exact[start:end])
        assert _distance(found, true) <= most, (elements, dtype, _distance(found, true), most)
        if elements > 1000:
            assert _share(found, true) < NOISE
        if op is Op.ALL_REDUCE:
            assert _same_everywhere(region)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def _share(found: torch.Tensor, true: torch.Tensor) -> float:
    return ((found.double() - true.double()).norm() / true.double().norm()).item()


def _same_everywhere(tensor: torch.Tensor) -> bool:
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor)
    return all(torch.equal(tensor, other) for other in everyones)


@pytest.mark.parametrize("feedback", ["first", "second", "both"])
@pytest.mark.parametrize("codec", ["int4:64", "int8:whole", "int4:256+hadamard+stochastic", "e5m2"])
@pytest.mark.parametrize("shape", [Topology(2, 2), Topology(3, 1), Topology(2, 3)], ids=str)
def test_with_feedback_nothing_is_lost_in_the_long_run(
    world: Worlds, shape: Topology, codec: str, feedback: str
) -> None:
    world(shape.world).run(_telescope, shape, codec, feedback)


def _telescope(shape: Topology, codec: str, feedback: str) -> None:
    """All that came out so far, and what every rank has kept, is all that went in: exactly, but for sums in float32.

    What a hop without feedback rounds away is lost: of two hops with one fed, only that this one keeps its share.
    """
    elements, turns = 1009, 6
    members = _members(shape)
    collective = _collective(Op.REDUCE_SCATTER, Wire("two-hop", codec, feedback), shape, elements, "float32", members)
    start, end = bounds(elements, shape.world, members.slot)
    came_out, went_in = torch.zeros(end - start), torch.zeros(elements, dtype=torch.float64)
    for turn in range(turns):
        each = _each(shape, elements, "float32", seed=turn)
        went_in += each.double().sum(0)
        region = each[dist.get_rank()].clone()
        collective.run(region, region[start:end])
        came_out += region[start:end]
    kept = torch.stack([k.double().sum() for k in collective.state] or [torch.zeros(())]).sum()
    total = came_out.double().sum() + kept
    dist.all_reduce(total)
    hops = 1 if Topology(3, 1) == shape else 2
    everywhere = feedback == "both" or hops == 1
    if everywhere:
        # 1009 elements of order 1, some ten additions each in float32.
        assert abs(total.item() - went_in.sum().item()) < 1009 * turns * shape.world * 2**-24 * 10
    assert len(collective.state) == (2 if hops == 2 and feedback == "both" else 1)


def test_what_is_not_finite_is_seen_by_every_rank_and_poisons_no_feedback(world: Worlds) -> None:
    world(4).run(_overflow)


def _overflow() -> None:
    shape, elements = Topology(2, 2), 512
    members = _members(shape)
    collective = _collective(Op.ALL_REDUCE, Wire("two-hop", "int4:64", "both"), shape, elements, "float32", members)
    for poison in (float("nan"), float("inf"), 0.0):
        region = torch.ones(elements)
        if dist.get_rank() == 3:
            region[100] += poison
        collective.run(region, region)
        assert bool(region.isfinite().all()) == (poison == 0.0)
        assert all(bool(k.isfinite().all()) for k in collective.state)
        assert bool(region[256:].isfinite().all()), "a block that overflowed spoils no other"
    assert torch.allclose(region, torch.full((elements,), 4.0), atol=1e-5)


TRAINED: dict[str, dict[str, Any]] = {
    "zero++": {"gradients": "int8:32", "weights": "int8:32"},
    "qwz": {"weights": "int8:32"},
    "qgz": {"gradients": "int8:32+hadamard", "feedback": "both"},
    "mics": {"gradients": "int8:32"},
    "paro-iig": {"gradients": "int8:32", "weights": "int8:32", "feedback": "first"},
    "paro-nig": {"gradients": "int8:32", "weights": "bf16"},
    "ddp": {"gradients": "int8:32+stochastic"},
}


@pytest.mark.parametrize("shape", [Topology(2, 2), Topology(3, 1)], ids=str)
def test_gradients_of_every_shape_are_the_true_mean(world: Worlds, shape: Topology) -> None:
    world(shape.world).run(_train, shape)


def _train(shape: Topology) -> None:
    """Biases, norms, matrices and the tied embedding; over micro-steps; compared with the same strategy uncoded."""
    for name, options in TRAINED.items():
        exact, coded = (_gradients(towpath.strategy(name, shape, **o)) for o in (_uncoded(name), options))
        for parameter, true in exact.items():
            found = coded[parameter]
            if true.norm() == 0 or parameter.endswith("key.bias"):  # zero but for rounding, and rounding differs
                continue
            scale = torch.dot(found.flatten(), true.flatten()) / torch.dot(true.flatten(), true.flatten())
            # A wrong factor would be a half, two, or the world; int8 moves the gradient's direction by some percent.
            assert 0.9 < scale.item() < 1.1, (name, parameter, scale.item())
            assert _same_everywhere(found), (name, parameter)


def _uncoded(name: str) -> dict[str, str]:
    return {"weights": "none", "gradients": "none"} if name in ("zero++", "qwz", "qgz") else {}


def _gradients(strategy: towpath.Strategy) -> dict[str, torch.Tensor]:
    entry = MODELS["gpt"]
    model: Any = towpath.shard(entry.make(torch.float32), strategy)
    for micro in range(2):
        with nullcontext() if micro == 1 else model.no_sync():
            (entry.loss(model, *entry.micro_batch(dist.get_rank(), micro, 0, torch.float32)) / 2).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def test_ranks_that_mean_different_codecs_are_told(world: Worlds) -> None:
    for message in world(2).run(_disagree):
        assert "as int8:256" in message and "as int4:256" in message


def _disagree() -> str:
    shape, codec = Topology(2, 1), ("int8", "int4")[dist.get_rank()]
    members, wire = _members(shape), Wire("two-hop", codec)
    transfer = Transfer(
        Kind.REDUCE, "block", "float", Move(Op.REDUCE_SCATTER, 1, (members.group,)), wire, 64, "float32", shape
    )
    collective = select(transfer, members, "gloo", Scratch(torch.device("cpu")))
    region = torch.ones(64)
    with pytest.raises(MismatchError) as caught:
        collective.run(region, region[32 * dist.get_rank() :][:32])
    return str(caught.value)


def test_after_their_share_of_the_run_gradients_travel_as_they_are(world: Worlds) -> None:
    world(4).run(_change)


def _change() -> None:
    """Two steps encoded, then two that are not: the same gradients as those of a strategy without codecs."""
    shape, entry = Topology(2, 2), MODELS["gpt"]
    strategy = towpath.strategy("qgz", shape, gradients_until=2)
    model: Any = towpath.shard(entry.make(torch.float32), strategy)
    for step in range(4):
        entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, 0, torch.float32)).backward()
        executed = {t.wire for t in towpath.stats(model).last_step if t.kind is Kind.REDUCE}
        assert executed == {strategy.at(step).reduce}
        if step < 3:
            model.zero_grad()
    plain: Any = towpath.shard(entry.make(torch.float32), towpath.strategy("zero3", shape, reduce=Wire("two-hop")))
    entry.loss(plain, *entry.micro_batch(dist.get_rank(), 0, 0, torch.float32)).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())


def test_looking_at_whole_weights_leaves_their_precision(world: Worlds) -> None:
    world(4).run(_look)


def _look() -> None:
    """What gathers round, the optimizer's own weights are not; but what the user writes meanwhile counts."""
    shape, entry = Topology(2, 2), MODELS["gpt"]
    for name, options in (("qwz", {}), ("zero++", {}), ("paro-nig", {"weights": "int8"})):
        model: Any = towpath.shard(entry.make(torch.float32), towpath.strategy(name, shape, **options))
        for _ in range(2):
            entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, 0, torch.float32)).backward()
            torch.optim.SGD(model.parameters(), lr=0.01).step()
            model.zero_grad()
        before = [p.full_tensor() for p in model.parameters()]
        with towpath.full_parameters(model):
            pass
        assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters(), strict=True)), name
        with towpath.full_parameters(model), torch.no_grad():
            next(model.parameters()).view(-1)[3] = 5.0
        after = next(model.parameters()).full_tensor()
        before[0].view(-1)[3] = 5.0
        assert torch.equal(after, before[0]), name
