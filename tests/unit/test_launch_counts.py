"""How much each strategy launches on NCCL, on worlds of up to 64 ranks, counted on one rank without the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

import towpath
from benchmarks.harness.fake_world import CALLS, CODECS, MESSAGES, OTHERS, TOGETHER, Launches, fake_world
from tests.ranks.strategies import seldom
from towpath.core import routes
from towpath.core.costs import Launches as Counted
from towpath.core.costs import launches_of
from towpath.core.presets import parse_strategy
from towpath.core.routes import Op
from towpath.core.schedule import Compute, settled, steady_step
from towpath.core.step_state import Submit, Wait
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.units import Range
from towpath.engine.comm import ISLAND_CTAS, MAX_CTAS

SHAPES = ((2, 2), (2, 8), (8, 8))
CODED = ("int8", "int4", "int4:64+hadamard+stochastic", "e4m3", "e5m2", "bf16")
FEEDBACK = ("first", "both")

MOST_CALLS = 8
MOST_CODECS = {Op.ALL_GATHER: 3, Op.REDUCE_SCATTER: 12, Op.ALL_REDUCE: 15}
PARTS = 4
# On many nodes, where zero1 to zero3 are flat. On few nodes they use columns and rows.
MOST_COMMUNICATORS = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2}


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(96, 96), nn.Linear(96, 96))


class Net(nn.Module):
    """Two units, or more, and a root. No part of a slice is so short that it has no block of a codec."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(96, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _train(topology: towpath.Topology, name: str, steps: int = 2, **options: Any) -> None:
    model: Any = towpath.shard(Net(), towpath.strategy(name, topology, **options), topology=topology)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        with model.no_sync():
            model(torch.ones(2, 96)).sum().backward()
        model(torch.ones(2, 96)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _check(launches: Launches, feedback: bool) -> None:
    assert launches.jobs
    for transfers, counts in launches.jobs:
        sent = [t for t in transfers if isinstance(t.payload, Range) and t.payload.bucket]
        if not sent:
            continue
        assert counts[MESSAGES] == 0, (sent, counts)
        assert counts[CALLS] <= MOST_CALLS * len(sent), (sent, counts)
        # A row of few nodes makes a call for each of them, and an all-reduce uses its row twice.
        assert counts[TOGETHER] <= 2 * routes.MOST_ROW_CALLS * len(sent), (sent, counts)
        if all(t.transport.encoding is None for t in sent):
            assert counts[CODECS] == 0, (sent, counts)
        else:
            most = sum(MOST_CODECS[t.move.op] + (PARTS * feedback) for t in sent)
            assert counts[CODECS] <= most, (sent, counts)
        # The simulator counts the same. Gathers that are coalesced launch less.
        counted = sum(map(launches_of, sent), Counted())
        found = Counted(calls=counts[CALLS], together=counts[TOGETHER], codecs=counts[CODECS])
        assert found == replace(counted, operations=0), (sent, counts, counted)
        assert counts[OTHERS] >= counted.operations, (sent, counts, counted)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small models are cut into as many parts as large ones.
    for smallest in ("SMALLEST_PART_BYTES", "SMALLEST_PART_BYTES_IN_CALLS"):
        monkeypatch.setattr(routes, smallest, 32)


@pytest.mark.parametrize("shape", [seldom(SHAPES[0]), seldom(SHAPES[1]), SHAPES[2]], ids=str)
def test_presets_launch_few_collectives_and_kernels(shape: tuple[int, int]) -> None:
    for name in towpath.strategies():
        with fake_world(*shape) as (topology, launches):
            _train(topology, name)
        _check(launches, feedback=False)
        most = 3 if name != "ddp" and shape != (8, 8) else MOST_COMMUNICATORS.get(name, 3)
        assert len(launches.communicators) <= most, (name, launches.communicators)


@pytest.mark.parametrize("name, parts", [("zero3 route=ho-ring", {4}), ("paro-igg", {4}), ("ddp route=ho-ring", {2})])
def test_an_ho_ring_launches_two_calls_and_one_copy_for_each_part(name: str, parts: set[int]) -> None:
    with fake_world(2, 8) as (topology, launches):
        made = parse_strategy(name, topology)
        model: Any = towpath.shard(Net(), made, topology=topology)
        for _ in range(2):
            model(torch.ones(2, 96)).sum().backward()
    single = [(sent[0], counts) for sent, counts in launches.jobs if len(sent) == 1]
    sent = [(t, counts) for t, counts in single if t.route == "ho-ring"]
    assert {t.parts for t, _ in sent} == parts
    for t, counts in sent:
        halves = 2 if t.move.op is Op.ALL_REDUCE else 1
        assert counts[CALLS] == 2 * halves * t.parts and counts[TOGETHER] == 0
        assert launches_of(t) == Counted(calls=counts[CALLS], operations=halves * t.parts)


@pytest.mark.parametrize("name", ["paro-iig", seldom("zero1")])
def test_exact_syncs_launch_one_unit_before_the_first_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many units follow. All are encoded by one job, and each is gathered by as many calls as without."""
    monkeypatch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
    blocks, sync = 6, {TransferKind.PARAM_SYNC}
    plainly, exactly = (
        [
            [({t.kind for t in sent}, counts[CALLS]) for sent, counts in part]
            for part in _launched_by(name, blocks, each)
        ]
        for each in (False, True)
    )
    plain, exact = ([[n for kinds, n in part if kinds == sync] for part in parts] for parts in (plainly, exactly))
    # In the optimizer's step, where the host waits: the encoding, the agreement, the root, and the first unit.
    assert [kinds for kinds, _ in exactly[0]] == [set(), {TransferKind.MESSAGE_SIZES}, sync, sync]
    assert list(map(len, exact)) == [2, 1, blocks - 2] and list(map(len, plain)) == [0, blocks + 1, 0]
    assert sorted(chain(*exact)) == sorted(chain(*plain))


Jobs = list[tuple[tuple[Transfer, ...], Counter[str]]]


def _launched_by(name: str, blocks: int, encoded: bool) -> tuple[Jobs, Jobs, Jobs]:
    """The jobs of a steady step: of the optimizer's step, before the first computation of a block, and after it."""
    with fake_world(2, 8) as (topology, launches):
        net = Net(blocks)
        model: Any = towpath.shard(net, towpath.strategy(name, topology, exact=encoded), units=[Block])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        computed, begun, ended = list[int](), 0, 0
        net.blocks[0].get_submodule("0").register_forward_pre_hook(lambda *_: computed.append(len(launches.jobs)))
        for _ in range(3):
            model(torch.ones(2, 96)).sum().backward()
            begun = len(launches.jobs)
            optimizer.step()
            ended = len(launches.jobs)
        model(torch.ones(2, 96))
    return launches.jobs[begun:ended], launches.jobs[ended : computed[-1]], launches.jobs[computed[-1] :]


@pytest.mark.parametrize("name", ["ddp", "zero3", seldom("zero1"), seldom("paro-iig")])
def test_unequal_batches_launch_nothing_for_a_unit(name: str) -> None:
    """Only for the loss: the weights of gradients are in the division by the number of ranks."""
    more = [_operations(name, blocks, shares=(1, 2, 1, 2)) - _operations(name, blocks) for blocks in (1, 5)]
    assert more[0] == more[1] > 0


def _operations(name: str, blocks: int, **options: Any) -> int:
    """The operations on memory in the second step."""
    before = 0
    with fake_world(2, 2) as (topology, launches):
        model: Any = towpath.shard(Net(blocks), towpath.strategy(name, topology, **options), units=[Block])
        for _ in range(2):
            before = _counted_in(launches)
            loss = model(torch.ones(2, 96)).sum()
            (towpath.weigh(model, loss, 3) if options else loss).backward()
            model.zero_grad()
    return _counted_in(launches) - before


def _counted_in(launches: Launches) -> int:
    return sum(counts[OTHERS] for counts in (launches.computation, *(counts for _, counts in launches.jobs)))


class TwoDtypes(nn.Linear):
    """A unit of two buckets, which both train."""

    def __init__(self) -> None:
        super().__init__(96, 96)
        self.gain = nn.Parameter(torch.ones(96, dtype=torch.bfloat16))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.gain.float()


@pytest.mark.parametrize("name, most", [("zero3 route=flat", 2), ("mics", 2), ("zero3", 0)])
def test_small_buckets_of_a_unit_are_reduced_together(name: str, most: int) -> None:
    with fake_world(2, 8) as (topology, launches):
        made = parse_strategy(name, topology)
        model: Any = towpath.shard(nn.Sequential(*(TwoDtypes() for _ in range(3))), made, units=[TwoDtypes])
        for _ in range(2):
            model(torch.ones(2, 96)).sum().backward()
    reduced = [counts for sent, counts in launches.jobs if {t.kind for t in sent} == {TransferKind.REDUCE}]
    calls = {(counts[CALLS], counts[TOGETHER]) for counts in reduced}
    assert len(reduced) == 6 and (calls == {(1, 2)} if most else all(count > 1 for count, _ in calls)), calls


def test_gathers_of_two_units_are_submitted_together_only_where_a_pass_begins() -> None:
    """So coalescing across units would save one of 25 gathers, and no reduction."""
    strategy = towpath.strategy("mics", towpath.Topology(2, 4))
    plans = towpath.schedule(strategy, {"": 1 << 16, **{f"blocks.{i}": 1 << 16 for i in range(12)}}, 1).plans
    submitted, behind, after = Counter[TransferKind](), Counter[TransferKind](), Counter[TransferKind]()
    for _, action in steady_step(settled(plans), plans, 4):
        if isinstance(action, Submit):
            kind = action.task.kind
            submitted[kind] += 1
            behind[kind] += after[kind] > 0
            after[kind] += 1
        elif isinstance(action, (Wait, Compute)):
            after.clear()
    gathers = submitted[TransferKind.GATHER] + submitted[TransferKind.BACKWARD_GATHER]
    assert (gathers, submitted[TransferKind.REDUCE]) == (4 * 25, 4 * 13)
    assert +behind == {TransferKind.GATHER: 4}


def test_kernels_of_all_to_alls_inside_a_node_take_few_thread_blocks() -> None:
    for name, inside in (("zero++", {MAX_CTAS}), ("paro-ggg", {None})):
        with fake_world(2, 8) as (topology, launches):
            _train(topology, name, steps=1)
        rows = {limit for ranks, limit in launches.limits if ranks == tuple(range(8))}
        assert rows == inside, launches.limits
        assert {limit for ranks, limit in launches.limits if ranks == (0, 8)} == {MAX_CTAS}


@pytest.mark.parametrize("nccl", [False, True])
def test_exchanges_between_islands_take_two_thread_blocks_or_none(nccl: bool) -> None:
    """The collectives of an island's result stay inside a node."""
    with fake_world(2, 8) as (topology, launches):
        _train(topology, "paro-igg", steps=3, outer=towpath.Outer(every=1, nccl=nccl))
    between = [limit for ranks, limit in launches.limits if ranks == (0, 8)]
    assert between == [ISLAND_CTAS if nccl else None]
    assert ((0, 8), "nccl" if nccl else "gloo") in launches.groups
    made = [transfers for transfers, _ in launches.jobs if TransferKind.OUTER in {t.kind for t in transfers}]
    assert made and all(t.between_hosts is not nccl for transfers in made for t in transfers)


def test_hosts_of_many_nodes_make_no_more_calls() -> None:
    for name in ("zero++", "paro-ggg"):
        with fake_world(64, 8) as (topology, launches):
            _train(topology, name, steps=1)
        _check(launches, feedback=False)


@pytest.mark.parametrize("shape", [*map(seldom, SHAPES[:2]), SHAPES[2]], ids=str)
def test_every_codec_takes_few_kernels(shape: tuple[int, int]) -> None:
    with fake_world(*shape) as (topology, launches):
        for codec in CODED:
            _train(topology, "zero++", weights=codec.partition(":")[0], gradients=codec)
    _check(launches, feedback=False)


def test_error_feedback_takes_one_kernel_more_for_each_part() -> None:
    with fake_world(2, 8) as (topology, launches):
        for feedback in FEEDBACK:
            _train(topology, "zero++", gradients="int4", feedback=feedback)
    _check(launches, feedback=True)
