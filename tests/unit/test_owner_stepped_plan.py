"""Who owns which matrix, what its transfers send, and what happens in which order: as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

import towpath
from towpath.core.formats import Codec, Precision
from towpath.core.owner_stepped import (
    ROUNDS_IN_FLIGHT,
    Iterate,
    MatrixPlan,
    OwnedParameter,
    cost,
    plan_matrices,
    step_actions,
)
from towpath.core.placement import legal_placements
from towpath.core.step_state import Submit, Wait
from towpath.core.strategy import Strategy
from towpath.core.transport import Transport
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, Matrices, UnitSpec, owner_messages, piece_bytes

# As a GPT's: in each block four matrices and two vectors; the shapes are odd, so that slices cut across rows.
SHAPES = ((33, 7), (7,), (9, 11), (5, 40), (40,), (40, 5))
TOPOLOGIES = [towpath.Topology(nodes, ranks) for nodes in (1, 2, 3, 4) for ranks in (1, 2, 3, 4)]


def _plan(strategy: Strategy, blocks: int = 3, codec: str = "none", reverse: bool = False) -> MatrixPlan:
    numels = tuple(_numel(shape) for shape in SHAPES)
    units = [UnitSpec("", (BucketSpec((5,)),), root=True)]
    units += [UnitSpec(f"blocks.{i}", (BucketSpec(numels),)) for i in range(blocks)]
    plans = [plan_unit(strategy, unit, Precision()) for unit in units]
    chosen = [
        OwnedParameter(f"blocks.{unit - 1}.{index}", shape, unit, 0, index)
        for unit in range(1, blocks + 1)
        for index, shape in enumerate(SHAPES)
    ]
    return plan_matrices(strategy, plans, chosen[::-1] if reverse else chosen, Transport(codec=codec))


def _numel(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def _strategies(topology: towpath.Topology) -> Iterator[Strategy]:
    for placement in sorted(legal_placements(topology), key=str):
        yield Strategy(topology, placement)


@pytest.mark.parametrize("codec", ["none", "int8:64"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_bytes_in_closed_form_are_those_of_the_messages(topology: towpath.Topology, codec: str) -> None:
    for strategy in _strategies(topology):
        for transfer in _plan(strategy, codec=codec).transfers():
            assert isinstance(transfer.payload, Matrices)
            inside, leaving = 0, Counter[int]()
            for group in transfer.move.groups:
                for message in owner_messages(transfer.move.op, transfer.payload.matrices, group):
                    matrix = transfer.payload.matrices[message.matrix]
                    nbytes = piece_bytes(matrix.pieces[message.slot], 4, transfer.transport.encoding)
                    source, target = (topology.node_of(group.ranks[i]) for i in message[:2])
                    inside += nbytes * (source == target)
                    leaving[source] += nbytes * (source != target)
            assert transfer.intra_bytes == inside
            assert [transfer.cable_bytes(node) for node in range(topology.nodes)] == [
                leaving[node] for node in range(topology.nodes)
            ]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_matrix_has_one_owner_and_is_whole_there(topology: towpath.Topology) -> None:
    for strategy in _strategies(topology):
        plan = _plan(strategy)
        matrices = [matrix for each in plan.rounds for matrix in each.matrices]
        assert sorted(m.name for m in matrices) == sorted(
            f"blocks.{i}.{j}" for i in range(3) for j in range(len(SHAPES))
        )
        assert all(m.numel == _numel(m.shape) for m in matrices)
        assert plan == _plan(strategy, reverse=True), "the order in which an optimizer lists them does not matter"
        for each in plan.rounds:
            for slot in range(strategy.moves.optimizer.count):
                assert each.held(slot) <= plan.room[each.dtype] <= max(_numel(shape) for shape in SHAPES)


def test_the_work_is_shared_out_evenly() -> None:
    """Within what any assignment in descending order comes to: 4/3 of the best (Graham, 1969)."""
    plan = _plan(towpath.strategy("zero3", towpath.Topology(2, 4)), blocks=12)
    work: Counter[int] = Counter()
    for each in plan.rounds:
        for matrix in each.matrices:
            work[matrix.owner] += cost(matrix.shape)
    assert max(work.values()) <= 4 / 3 * max(sum(work.values()) / 8, max(map(cost, SHAPES)))


def test_what_one_rank_holds_alone_does_not_travel() -> None:
    topology = towpath.Topology(2, 2)
    assert not list(_plan(towpath.strategy("ddp", topology)).transfers())
    inside = _plan(towpath.strategy("mics", topology)).transfers()
    assert sum(t.inter_bytes for t in inside) == 0


def test_what_has_no_gradient_stays_out_and_all_else_as_it_is() -> None:
    plan = _plan(towpath.strategy("zero3", towpath.Topology(2, 2)))
    left_out = {"blocks.0.0", "blocks.2.5"}
    names = {m.name for each in plan.rounds for m in each.matrices} - left_out
    before = {m.name: m for each in plan.rounds for m in each.matrices}
    after = {m.name: m for each in plan.step(names) for m in each.matrices}
    assert after == {name: matrix for name, matrix in before.items() if name not in left_out}
    assert not plan.step(())


def test_a_round_travels_while_the_one_before_is_worked_on_and_never_into_its_memory() -> None:
    plan = _plan(towpath.strategy("zero3", towpath.Topology(2, 2)), blocks=8)
    rounds = plan.step()
    assert len(rounds) > 2 * ROUNDS_IN_FLIGHT
    submitted: list[tuple[str, int]] = []
    waited: set[tuple[str, int]] = set()
    for action in step_actions(plan, rounds):
        match action:
            case Submit(task):
                way_before = task.unit - ROUNDS_IN_FLIGHT
                after = [(t.kind.value, t.unit) for t in task.after]
                if task.kind == "matrix_gradients" and way_before >= 0:
                    assert after == [("matrix_updates", way_before)]
                    assert ("matrix_updates", way_before) in submitted
                submitted.append((task.kind.value, task.unit))
            case Wait(task):
                waited.add((task.kind.value, task.unit))
            case Iterate(number, _):
                assert ("matrix_gradients", number) in waited
                if number + 1 < len(rounds):
                    assert ("matrix_gradients", number + 1) in submitted
                    assert ("matrix_gradients", number + 1) not in waited
    assert waited == set(submitted)


def test_a_codec_is_one_of_blocks() -> None:
    strategy = towpath.strategy("zero3", towpath.Topology(2, 2))
    assert _plan(strategy, codec="int8:64").gradients.encoding == Codec.parse("int8:64")
    for codec in ("low-rank:4", "int8:64+stochastic"):
        with pytest.raises(towpath.TowpathError, match="codec of blocks"):
            _plan(strategy, codec=codec)
