"""Every route on real ranks: gathers to the bit, reductions to the rounding, and errors on every rank concerned.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.ranks.server import World, Worlds, on_ranks
from tests.ranks.strategies import seldom
from tests.workspace import workspace
from towpath.collectives import backend
from towpath.collectives.collective import Collective, GroupRank
from towpath.collectives.select import CoalescedAllGather, group_rank, select
from towpath.core import routes
from towpath.core.buffers import coalesced_bytes, wire_needs
from towpath.core.formats import item_bytes
from towpath.core.placement import GroupCollective
from towpath.core.routes import COLLECTIVES, ROUTES, Form, Group, Op
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range
from towpath.errors import StepError
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups

SHAPES = [Topology(2, 2), Topology(2, 3), Topology(3, 2), Topology(1, 4), Topology(4, 2)]
TRAVEL = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8")
ADD = ("float64", "float32", "bfloat16", "float16", "int64", "int32")

OFTEN = [seldom(shape) if shape.nodes > 2 else shape for shape in SHAPES]
shapes = pytest.mark.parametrize("shape", OFTEN, ids=str)
more_shapes = pytest.mark.parametrize(
    "shape", [*OFTEN, Topology(1, 1), *map(seldom, (Topology(2, 4), Topology(3, 3)))], ids=str
)


def _members(shape: Topology, local_major: bool = False, group: Any = None) -> GroupRank:
    ranks = tuple(range(shape.world))
    slots = tuple(shape.local_of(r) * shape.nodes + shape.node_of(r) for r in ranks) if local_major else ranks
    group = group or dist.group.WORLD
    return GroupRank(group, Group(ranks, slots), dist.get_rank(), tuple(map(shape.node_of, ranks)))


def _transfer(op: Op, route: str, shape: Topology, elements: int, dtype: str, members: GroupRank) -> Transfer:
    payload = Range("block", "float", elements, dtype)
    return Transfer(TransferKind.GRAD_SYNC, payload, GroupCollective(op, 1, (members.group,)), Transport(route), shape)


def _collective(op: Op, route: str, shape: Topology, elements: int, dtype: str, members: GroupRank) -> Collective:
    transfer = _transfer(op, route, shape, elements, dtype, members)
    return select(transfer, members, torch.device("cpu"))


def _draws(seed: int, dtypes: tuple[str, ...], whole_product: bool) -> Iterator[tuple[str, str, bool, bool, int, int]]:
    """For each route and dtype: a slot order, whether the shard lies elsewhere, a length, and a seed; alike on all. If
    not the whole product is asked for, each route has half the dtypes, and the other half where the seed is odd."""
    draw = random.Random(seed)
    for number, route in enumerate(ROUTES):
        for dtype in dtypes if whole_product else dtypes[(number + seed) % 2 :: 2]:
            elements = draw.choice([draw.randrange(0, 8), draw.randrange(8, 200), draw.randrange(200, 20_000)])
            yield route, dtype, draw.random() < 0.5, draw.random() < 0.5, elements, draw.randrange(2**30)


def _values(elements: int, dtype: str, seed: int) -> torch.Tensor:
    """Whole numbers, few enough that every sum over the ranks is exact in every dtype."""
    return torch.randint(0, 12, (elements,), generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def _own(region: torch.Tensor, members: GroupRank) -> torch.Tensor:
    return region.tensor_split(len(members.group.ranks))[members.slot]


@more_shapes
def test_gathers_bring_every_bit_whatever_the_route_length_dtype_and_order(
    world: Worlds, shape: Topology, whole_product: bool
) -> None:
    world(shape.world).run(_gather, shape, whole_product)


def _gather(shape: Topology, whole_product: bool) -> None:
    for route, dtype, local_major, apart, elements, values in _draws(shape.ranks_per_node, TRAVEL, whole_product):
        members = _members(shape, local_major)
        collective = _collective(Op.ALL_GATHER, route, shape, elements, dtype, members)
        for turn in range(2):
            expected = _values(elements, dtype, values + turn)
            region = torch.full_like(expected, 99)
            _own(region, members).copy_(_own(expected, members))
            shard = _own(region, members)
            if apart:
                shard = shard.clone()
                _own(region, members).zero_()
            collective.run(region, shard, workspace())
            assert torch.equal(region, expected), (route, dtype, local_major, apart, elements)


@more_shapes
@pytest.mark.parametrize("op", [Op.REDUCE_SCATTER, Op.ALL_REDUCE])
def test_reductions_count_everyone_once_whatever_the_route_length_dtype_and_order(
    world: Worlds, shape: Topology, op: Op, whole_product: bool
) -> None:
    world(shape.world).run(_reduce, shape, op, whole_product)


def _reduce(shape: Topology, op: Op, whole_product: bool) -> None:
    rank = dist.get_rank()
    for route, dtype, local_major, apart, elements, values in _draws(shape.ranks_per_node, ADD, whole_product):
        # What every group of the engine has: an all-reduce has no slices that anyone holds.
        members = _members(shape, local_major and op is Op.REDUCE_SCATTER)
        collective = _collective(op, route, shape, elements, dtype, members)
        for turn in range(2):
            each = [_values(elements, dtype, values + 100 * turn + r) for r in range(shape.world)]
            region, expected = each[rank].clone(), torch.stack(each).sum(0).to(each[0].dtype)
            mine = _own(region, members)
            shard = torch.zeros_like(mine) if apart else mine
            collective.run(region, shard, workspace())
            case = (route, dtype, local_major, apart, elements)
            if op is Op.ALL_REDUCE:
                assert torch.equal(region, expected), case
            else:
                assert torch.equal(shard, _own(expected, members)), case


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_ranks(8)
def test_sums_differ_from_the_exact_ones_by_rounding_alone(dtype: str) -> None:
    shape = Topology(4, 2)
    torch.manual_seed(0)
    each = torch.randn(shape.world, 3000).to(getattr(torch, dtype))
    exact, members = each.double().sum(0), _members(shape)
    for route in ROUTES:
        region = each[dist.get_rank()].clone()
        mine = _own(region, members)
        _collective(Op.REDUCE_SCATTER, route, shape, region.numel(), dtype, members).run(region, mine, workspace())
        # Each of the additions rounds a partial sum, which is at most the sum of the magnitudes.
        additions = 2 if route in ("one-hop", "two-hop") and dtype == "bfloat16" else shape.world - 1
        most = additions * torch.finfo(mine.dtype).eps / 2 * _own(each.double().abs().sum(0), members) * 1.01
        assert ((mine.double() - _own(exact, members)).abs() <= most).all(), route


@shapes
@pytest.mark.parametrize("local_major", [False, True], ids=["rank order", "local-major"])
def test_gathers_in_one_message_are_the_gathers_one_by_one(world: Worlds, shape: Topology, local_major: bool) -> None:
    world(shape.world).run(_coalesced, shape, local_major)


def _coalesced(shape: Topology, local_major: bool) -> None:
    members = _members(shape, local_major)
    for route in ROUTES:
        dtypes = ("float32", "bfloat16", "float32", "uint8", "float64")
        sizes = [shape.world * n for n in (5, 3, 0, 7, 100)]
        gathers = [_transfer(Op.ALL_GATHER, route, shape, n, d, members) for n, d in zip(sizes, dtypes, strict=True)]
        together = CoalescedAllGather(gathers, members, torch.device("cpu"))
        expected = [_values(n, d, i) for i, (n, d) in enumerate(zip(sizes, dtypes, strict=True))]
        regions = [torch.zeros_like(e) for e in expected]
        together.run(regions, [_own(e, members).clone() for e in expected], workspace())
        assert all(map(torch.equal, regions, expected)), route


# --- collectives of columns and rows ----------------------------------------------------------------------------------

few_or_many = pytest.mark.parametrize("most", [routes.MOST_ROW_CALLS, 1], ids=["few nodes", "many nodes"])


def _in_calls(op: Op, route: str, shape: Topology, slots: tuple[int, ...], elements: int, dtype: str) -> Transfer:
    move = GroupCollective(op, 1, (Group(tuple(range(shape.world)), slots),))
    payload = Range("block", "float", elements, dtype)
    return Transfer(TransferKind.GRAD_SYNC, payload, move, Transport(route), shape, form=Form.COLLECTIVES)


def _slots(shape: Topology) -> dict[str, tuple[int, ...]]:
    ranks = range(shape.world)
    local_major = tuple(shape.local_of(r) * shape.nodes + shape.node_of(r) for r in ranks)
    return {"rank order": tuple(ranks), "local-major": local_major, "other": tuple(reversed(ranks))}


@more_shapes
@few_or_many
def test_collectives_of_columns_and_rows_move_what_messages_do(world: Worlds, shape: Topology, most: int) -> None:
    """In every order of slices, and without more memory than the transfer says."""
    world(shape.world).run(_with_row_calls, most, _columns_and_rows, shape)


def _with_row_calls(most: int, function: Callable[[Topology], None], shape: Topology) -> None:
    """With at most so many calls of a row in one launch, as if there were many nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "MOST_ROW_CALLS", most)
        function(shape)


def _columns_and_rows(shape: Topology) -> None:
    rank, groups = dist.get_rank(), Groups()
    for number, (route, op, (order, slots)) in enumerate(product(ROUTES, COLLECTIVES, _slots(shape).items())):
        if op is Op.ALL_REDUCE and order != "rank order":
            continue  # no group of the engine has one
        elements, dtype, apart = 12 * shape.world, ("float64", "float32", "int64")[number % 3], bool(number % 2)
        transfer = _in_calls(op, route, shape, slots, elements, dtype)
        members = group_rank(transfer, rank, lambda ranks, purpose: groups.of(ranks, f"test{purpose}"))
        collective, used = select(transfer, members, torch.device("cpu")), workspace()
        each = [_values(elements, dtype, 100 * number + r) for r in range(shape.world)]
        expected = each[0] if op is Op.ALL_GATHER else torch.stack(each).sum(0)
        region = expected.clone() if op is Op.ALL_GATHER else each[rank].clone()
        shard = _own(region, members)
        if op is Op.ALL_GATHER:
            mine = shard.clone()
            region.fill_(99)
            shard.copy_(mine)
        if apart:
            shard = shard.clone()
        collective.run(region, shard, used)
        case = route, op, order, dtype, apart
        if op is Op.REDUCE_SCATTER:
            assert torch.equal(shard, _own(expected, members)), case
        else:
            assert torch.equal(region, expected), case
        allowed = sum(count * item_bytes(name) for name, count in wire_needs(transfer).items())
        assert used.buffers.nbytes <= allowed, case


@more_shapes
def test_an_ho_ring_of_collectives_is_hierarchical_to_the_bit(world: Worlds, shape: Topology) -> None:
    """It sums the same values in the same order: those of a node, and then the sums of nodes."""
    world(shape.world).run(_in_parts, shape)


def _in_parts(shape: Topology) -> None:
    rank, groups = dist.get_rank(), Groups()
    calls: list[tuple[int, torch.Tensor]] = []
    # The order of the backend's own sums depends on the length of a call.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "reduce_scatter_single", partial(_reduce_in_rank_order, calls))
        for op, (order, slots), length in product(COLLECTIVES, _slots(shape).items(), (0, 1, 7, 40, 131)):
            if op is Op.ALL_REDUCE and order != "rank order":
                continue  # no group of the engine has one
            torch.manual_seed(rank)
            values, ended = torch.randn(length * shape.world), dict[str, torch.Tensor]()
            for route in ("hierarchical", "ho-ring"):
                transfer = _in_calls(op, route, shape, slots, values.numel(), "float32")
                members = group_rank(transfer, rank, lambda ranks, purpose: groups.of(ranks, f"test{purpose}"))
                region, used = values.clone(), workspace()
                shard = _own(region, members)
                calls.clear()
                select(transfer, members, torch.device("cpu")).run(region, shard, used)
                ended[route] = shard.clone() if op is Op.REDUCE_SCATTER else region
                allowed = sum(count * item_bytes(name) for name, count in wire_needs(transfer).items())
                assert used.buffers.nbytes <= allowed, (route, op, order, length)
            several = shape.nodes > 1 and shape.ranks_per_node > 1 and length > 16
            assert (transfer.parts > 1) == several, (transfer, length)
            if op is not Op.ALL_GATHER and several:
                assert len(calls) == 2 * transfer.parts
            assert torch.equal(ended["hierarchical"], ended["ho-ring"]), (op, order, length)


def _reduce_in_rank_order(
    calls: list[tuple[int, torch.Tensor]],
    shard: torch.Tensor,
    region: torch.Tensor,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> dist.Work | None:
    """A reduce-scatter that adds in the order of ranks. It ends when the caller waits for it."""
    calls.append((dist.get_world_size(group), shard))
    each = [torch.empty_like(region) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(each, region.clone(), group=group, async_op=True)
    assert work is not None

    def end() -> None:
        work.wait()
        total = each[0].clone()
        for other in each[1:]:
            total += other
        shard.copy_(total.chunk(len(each))[dist.get_rank(group)])

    if async_op:
        return cast(dist.Work, SimpleNamespace(wait=end))
    end()
    return None


@shapes
@few_or_many
def test_collectives_gather_several_regions_in_place(world: Worlds, shape: Topology, most: int) -> None:
    world(shape.world).run(_with_row_calls, most, _coalesced_calls, shape)


def _coalesced_calls(shape: Topology) -> None:
    groups = Groups()
    sizes = [(5, "float32"), (3, "bfloat16"), (7, "uint8"), (100, "float64")]
    for route, (order, slots) in product(("flat", "two-hop"), _slots(shape).items()):
        gathers = [_in_calls(Op.ALL_GATHER, route, shape, slots, shape.world * n, dtype) for n, dtype in sizes]
        members = group_rank(gathers[0], dist.get_rank(), lambda ranks, purpose: groups.of(ranks, f"test{purpose}"))
        together, used = CoalescedAllGather(gathers, members, torch.device("cpu")), workspace()
        expected = [_values(shape.world * n, dtype, i) for i, (n, dtype) in enumerate(sizes)]
        regions = [torch.zeros_like(e) for e in expected]
        together.run(regions, [_own(e, members).clone() for e in expected], used)
        assert all(map(torch.equal, regions, expected)), (route, order)
        assert used.buffers.nbytes <= sum(coalesced_bytes(gather) for gather in gathers), (route, order)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [seldom("flat"), seldom("hierarchical"), seldom("ho-ring"), "two-hop"])
def test_members_that_mean_different_things_never_take_each_others_messages(route: str) -> None:
    """Gloo ends a process that is sent more than it expects. Here each waits for what nobody sends, and says so."""
    with World(4) as ranks:
        ends = ranks.run(_disagree, Topology(2, 2), route)
    for texts in ends:
        assert len(texts) == 4
        assert all("the message from rank " in text and " was lost: " in text for text in texts), texts


def _disagree(shape: Topology, route: str) -> list[str]:
    texts: list[str] = []
    for op, its_route, elements, dtype in (
        (Op.ALL_GATHER, route, 256, "float32"),
        (Op.ALL_GATHER, route, 240, "bfloat16"),
        (Op.REDUCE_SCATTER, route, 240, "float32"),
        (Op.ALL_GATHER, "hierarchical" if route != "hierarchical" else "ho-ring", 240, "float32"),
    ):
        group = dist.new_group(timeout=timedelta(seconds=1))
        members = _members(shape, group=group)
        odd = dist.get_rank() == 2
        mine = (op, its_route, elements, dtype) if odd else (Op.ALL_GATHER, route, 240, "float32")
        region = _values(mine[2], mine[3], 0)
        with pytest.raises(StepError) as caught:
            _collective(mine[0], mine[1], shape, *mine[2:], members).run(region, _own(region, members), workspace())
        texts.append(str(caught.value))
        dist.barrier()
    return texts


@pytest.mark.parametrize(
    ("op", "route"),
    [
        seldom(Op.ALL_GATHER, "ring"),
        seldom(Op.ALL_GATHER, "hierarchical"),
        seldom(Op.REDUCE_SCATTER, "ho-ring"),
        (Op.REDUCE_SCATTER, "two-hop"),
    ],
)
def test_a_message_that_never_comes_is_named_with_its_route_its_step_and_both_ranks(op: Op, route: str) -> None:
    with World(4) as ranks:
        ends = ranks.run(_stay_away, Topology(2, 2), route, op)
    told = [text for text in ends if text is not None]
    assert len(told) == 3
    for text in told:
        assert text.startswith(f"{op.value} by {route}, st"), text
        assert "the message from rank " in text and " was lost: " in text
    assert any("rank 3" in text for text in told)


def _stay_away(shape: Topology, route: str, op: Op) -> str | None:
    group = dist.new_group(timeout=timedelta(seconds=3))
    members = _members(shape, group=group)
    collective, region = _collective(op, route, shape, 240, "float32", members), torch.zeros(240)
    collective.run(region, _own(region, members), workspace())
    if dist.get_rank() == 3:
        return None
    with pytest.raises(StepError) as caught:
        collective.run(region, _own(region, members), workspace())
    return str(caught.value)
