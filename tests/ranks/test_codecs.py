"""Codecs on real ranks: the mean of the gradients, alike on every rank; what is rounded away, kept to the last bit.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import towpath
from tests.ranks.models import MODELS
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import seldom
from tests.workspace import workspace
from towpath.codecs.kernels import plain
from towpath.collectives.all_to_all import AllToAllReduceScatter
from towpath.collectives.collective import Collective, GroupRank
from towpath.collectives.select import select
from towpath.core.formats import Codec
from towpath.core.placement import GroupCollective
from towpath.core.routes import Group, Op, hops_of
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import FEEDBACK, Transport
from towpath.core.units import Range
from towpath.topology.cluster import Topology

SHAPES = [Topology(2, 2), Topology(2, 3), Topology(3, 1), Topology(4, 2)]
CODECS = ("int8:32", "int4:64+hadamard", "bf16", "e4m3")
shapes = pytest.mark.parametrize("shape", [SHAPES[0], *map(seldom, SHAPES[1:])], ids=map(str, SHAPES))


def _members(shape: Topology, local_major: bool = False) -> GroupRank:
    ranks, group = tuple(range(shape.world)), dist.group.WORLD
    assert group is not None
    slots = tuple(shape.local_of(r) * shape.nodes + shape.node_of(r) for r in ranks) if local_major else ranks
    return GroupRank(group, Group(ranks, slots), dist.get_rank(), tuple(map(shape.node_of, ranks)))


def _transfer(op: Op, transport: Transport, shape: Topology, elements: int, dtype: str, members: GroupRank) -> Transfer:
    move = GroupCollective(op, 1, (members.group,))
    return Transfer(TransferKind.GRAD_SYNC, Range("block", "float", elements, dtype), move, transport, shape)


def _select(transfer: Transfer, members: GroupRank) -> Collective:
    return select(transfer, members, torch.device("cpu"))


def _each(shape: Topology, elements: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """What every rank has, by rank; alike on all."""
    generator = torch.Generator().manual_seed(seed + elements)
    return torch.randn(shape.world, elements, generator=generator).to(getattr(torch, dtype))


@shapes
def test_a_gather_brings_every_rank_the_slices_as_they_were_encoded(world: Worlds, shape: Topology) -> None:
    world(shape.world).run(_gather, shape)


def _gather(shape: Topology) -> None:
    routes = ("flat", "ho-ring", "hierarchical", "ring", "two-hop")
    for codec, (number, elements) in product((*CODECS, "e5m2:whole"), enumerate((1, 7, 64, 1009, 5000))):
        members = _members(shape, local_major=number % 2 == 1)
        whole = _each(shape, elements, ("float32", "bfloat16", "float16")[number % 3])[0]
        dtype = str(whole.dtype).removeprefix("torch.")
        transfer = _transfer(Op.ALL_GATHER, Transport(routes[number], codec), shape, elements, dtype, members)
        region, cuts = torch.zeros_like(whole), [transfer.bounds(slot) for slot in range(shape.world)]
        start, end = cuts[members.slot]
        _select(transfer, members).run(region, whole[start:end], workspace())
        for first, last in cuts:
            expected = _through(Codec.parse(codec), whole[first:last].float()).to(whole.dtype)
            assert torch.equal(region[first:last], expected), (codec, elements, dtype)


# --- what is rounded away --------------------------------------------------------------------------------------------


class Oracle:
    """The reduction in plain torch, of every rank's values at once: no slices, no parts, no messages."""

    def __init__(self, transfer: Transfer, members: GroupRank, feedback: str) -> None:
        assert transfer.transport.encoding is not None
        self.codec, self.nodes = transfer.transport.encoding, members.nodes
        self.hops = len(hops_of(transfer.route, members.grid))
        fed = {"none": (), "first": (0,), "second": (self.hops - 1,), "both": (0, 1), "all": (0, 1)}[feedback]
        self.kept: dict[tuple[int, int], torch.Tensor] = {
            (hop, who): torch.zeros(transfer.elements) for hop in fed for who in range(len(members.nodes))
        }

    def sum(self, each: torch.Tensor) -> torch.Tensor:
        rows = [self._sent(0, rank, x.float()) for rank, x in enumerate(each)]
        if self.hops == 2:
            of_nodes = [
                [row for row, n in zip(rows, self.nodes, strict=True) if n == node] for node in _in_order(self.nodes)
            ]
            rows = [self._sent(1, node, _added(mine)) for node, mine in enumerate(of_nodes)]
        return _added(rows)

    def _sent(self, hop: int, who: int, values: torch.Tensor) -> torch.Tensor:
        kept = self.kept.get((hop, who))
        values = values if kept is None else values + kept
        found = _through(self.codec, values)
        if kept is not None:
            self.kept[hop, who] = values - found
        return found


def _through(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    message = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    plain.encode(codec, values, message)
    found = torch.empty_like(values)
    plain.decode(codec, message, found)
    return found


def _in_order(nodes: tuple[int, ...]) -> list[int]:
    return list(dict.fromkeys(nodes))


def _added(rows: list[torch.Tensor]) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


@pytest.mark.parametrize("shape", [SHAPES[0], *map(seldom, SHAPES[1:])], ids=map(str, SHAPES))
def test_a_reduction_is_its_oracle_to_the_bit_with_every_feedback(world: Worlds, shape: Topology) -> None:
    world(shape.world).run(_as_the_oracle, shape)


def _as_the_oracle(shape: Topology) -> None:
    """Element by element: what one hop keeps is neither lost nor added twice, and no rank's share is missing."""
    for number, (codec, feedback) in enumerate(product(CODECS, FEEDBACK)):
        elements, dtype = (1009, 5000)[number % 2], ("float32", "bfloat16")[number // 2 % 2]
        route = ("two-hop", "one-hop")[number % 3 == 2]
        # test_outer.py is about what an all-reduce also keeps of the sum that it gathers.
        op = Op.REDUCE_SCATTER if feedback == "all" else (Op.REDUCE_SCATTER, Op.ALL_REDUCE)[number % 2]
        members = _members(shape)
        transfer = _transfer(op, Transport(route, codec, feedback), shape, elements, dtype, members)
        collective, oracle = _select(transfer, members), Oracle(transfer, members, feedback)
        start, end = transfer.bounds(members.slot)
        for turn in range(3):
            each = _each(shape, elements, dtype, seed=turn)
            region = each[dist.get_rank()].clone()
            collective.run(region, region[start:end], workspace())
            expected = oracle.sum(each).to(region.dtype)
            if op is Op.ALL_REDUCE:
                expected, start, end = _through(oracle.codec, expected), 0, elements
            assert torch.equal(region[start:end], expected[start:end]), (codec, feedback, str(op), route, dtype, turn)


@pytest.mark.parametrize("shape", [Topology(2, 2), *map(seldom, (Topology(3, 1), Topology(2, 3)))], ids=str)
def test_all_to_alls_of_the_backend_equal_messages(world: Worlds, shape: Topology) -> None:
    world(shape.world).run(_backends_own, shape)


def _backends_own(shape: Topology) -> None:
    rows = [tuple(range(node * shape.ranks_per_node, (node + 1) * shape.ranks_per_node)) for node in range(shape.nodes)]
    row, column = (
        next(group for group, of in made if dist.get_rank() in of)
        for made in ([(dist.new_group(of), of) for of in each] for each in (rows, list(zip(*rows, strict=True))))
    )
    for number, codec in enumerate(["none", "int8:32", "int4:64+hadamard+stochastic", "e5m2:whole"]):
        routes = ("one-hop", "two-hop") if shape.ranks_per_node > 1 else ("one-hop",)  # two hops need two levels
        for route, parts in product(routes, (1, 3)):
            members = _members(shape, local_major=parts == 3)
            dtype = ("float32", "bfloat16")[number % 2]
            feedback = "none" if codec == "none" else "both"
            transport = Transport(route, codec, feedback)
            with pytest.MonkeyPatch.context() as patch:
                if parts > 1:
                    patch.setattr("towpath.core.routes.SMALLEST_PART_BYTES", 200)
                elements = 64 * shape.world * parts
                transfer = _transfer(Op.REDUCE_SCATTER, transport, shape, elements, dtype, members)
                in_groups = replace(members, row=row, column=column)
                both = [
                    AllToAllReduceScatter(transfer, members, torch.device("cpu")),
                    AllToAllReduceScatter(transfer, in_groups, torch.device("cpu"), collectives=True),
                ]
            start, end = transfer.bounds(members.slot)
            for turn in range(2):
                region, found = _each(shape, elements, dtype, seed=turn)[dist.get_rank()], []
                for collective in both:
                    found.append(torch.empty_like(region[start:end]))
                    collective.run(region.clone(), found[-1], workspace())
                assert torch.equal(*found), (codec, route, parts, turn)
            assert all(torch.equal(*kept) for kept in zip(both[0].state, both[1].state, strict=True))


def test_what_is_not_finite_is_seen_by_every_rank_and_poisons_no_feedback(world: Worlds) -> None:
    world(4).run(_overflow)


def _overflow() -> None:
    shape, elements = Topology(2, 2), 512
    members = _members(shape)
    transport = Transport("two-hop", "int4:64", "both")
    collective = _select(_transfer(Op.ALL_REDUCE, transport, shape, elements, "float32", members), members)
    for poison in (float("nan"), float("inf"), 0.0):
        region = torch.ones(elements)
        if dist.get_rank() == 3:
            region[100] += poison
        collective.run(region, region, workspace())
        assert bool(region.isfinite().all()) == (poison == 0.0)
        assert all(bool(k.isfinite().all()) for k in collective.state)
        assert bool(region[256:].isfinite().all()), "a block that overflowed spoils no other"
    assert torch.allclose(region, torch.full((elements,), 4.0), atol=1e-5)


@on_ranks(4)
def test_after_their_share_of_the_run_gradients_travel_as_they_are() -> None:
    """Two steps are encoded. After them, gradients are those of a strategy that encodes none."""
    shape, entry = Topology(2, 2), MODELS["gpt"]
    plain: Any = towpath.shard(entry.make(torch.float32), towpath.strategy("zero++", shape, gradients="none"))
    entry.loss(plain, *entry.micro_batch(dist.get_rank(), 0, 0, torch.float32)).backward()
    strategy = towpath.strategy("zero++", shape, gradients_until=2)
    model: Any = towpath.shard(entry.make(torch.float32), strategy)
    for step in range(4):
        entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, 0, torch.float32)).backward()
        executed = {(t.elements, t.transport) for t in towpath.stats(model).last_step if t.kind is TransferKind.REDUCE}
        planned = towpath.schedule(strategy.at(step), entry.make(torch.float32)).transfers
        assert executed == {(t.elements, t.transport) for t in planned if t.kind is TransferKind.REDUCE}
        encodes = step < 2
        routes = {(transport.encoding is not None, transport.route) for _, transport in executed}
        assert routes == {(encodes, "two-hop" if encodes else "ho-ring")}
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        same = [torch.equal(mine.grad.to_local(), theirs.grad.to_local()) for mine, theirs in pairs]
        assert all(same) != encodes
        model.zero_grad()


class _TwoDtypes(nn.Linear):
    """Its gathers travel as one message while they travel as they are."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.gain = nn.Parameter(torch.rand(8, dtype=torch.bfloat16))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.gain.float()


@on_ranks(4)
def test_weights_that_travel_in_bits_from_some_step_on_are_those_that_did_so_before() -> None:
    outputs: list[torch.Tensor] = []
    x = torch.ones(2, 8)
    for after in (0, 2):
        torch.manual_seed(0)
        codec = Transport(codec="int8", after=after)
        strategy = replace(towpath.strategy("zero3", Topology(2, 2)), gather=codec, backward_gather=codec)
        model: Any = towpath.shard(nn.Sequential(_TwoDtypes(), _TwoDtypes()), strategy, units=[_TwoDtypes])
        for step in range(4):
            out = model(x)
            out.sum().backward()
            executed = {
                t.transport.encoding is not None
                for t in towpath.stats(model).last_step
                if t.kind is TransferKind.GATHER
            }
            assert executed == {step >= after}
            model.zero_grad()
        outputs.append(out.detach())
    assert torch.equal(*outputs)


@pytest.mark.parametrize("served", [{"after": 1}, {"until": 2}, seldom({})])
@on_ranks(4)
def test_what_the_optimizer_works_on_is_never_rounded_by_what_it_publishes(served: dict[str, int]) -> None:
    shape, entry = Topology(2, 2), MODELS["gpt"]
    strategy = replace(towpath.strategy("zero1", shape), param_sync=Transport(codec="int8", **served))
    model: Any = towpath.shard(entry.make(torch.float32), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = [p.full_tensor().clone() for p in model.parameters()]
    for _ in range(4):
        entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, 0, torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(old, p.full_tensor()) for old, p in zip(before, model.parameters(), strict=True))
    held = towpath.stats(model).memory_bytes
    planned = towpath.schedule(strategy, entry.make(torch.float32)).memory_bytes()
    assert held["master"] == planned["master"] > 0


@on_ranks(4)
def test_looking_at_whole_weights_leaves_their_precision() -> None:
    """What gathers round, the optimizer's own weights are not; but what the user writes meanwhile counts."""
    shape, entry = Topology(2, 2), MODELS["gpt"]
    for name, options in (("qwz", {}), ("zero++", {}), ("paro-nig", {"weights": "int8"})):
        model: Any = towpath.shard(entry.make(torch.float32), towpath.strategy(name, shape, **options))
        for _ in range(2):
            entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, 0, torch.float32)).backward()
            torch.optim.SGD(model.parameters(), lr=0.01).step()
            model.zero_grad()
        before = [p.full_tensor().detach() for p in model.parameters()]
        with towpath.full_parameters(model):
            pass
        assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters(), strict=True)), name
        with towpath.full_parameters(model), torch.no_grad():
            next(model.parameters()).view(-1)[3] = 5.0
        after = next(model.parameters()).full_tensor()
        before[0].view(-1)[3] = 5.0
        assert torch.equal(after, before[0]), name
