"""The programs that the papers ran (tools/docs/papers/peers.py), and the reasons of rows that do not match."""

from __future__ import annotations

from itertools import pairwise

import pytest

import towpath
from tools.docs.papers.peers import NO_TWO_HOPS, PROGRAMS, STAGE1, STAGE2, STAGE3_EARLY, STAGE3_MEGATRON, Program
from tools.docs.papers.summary import Gain, reasons_of
from towpath.core.formats import Precision
from towpath.core.routes import Form, Op
from towpath.core.schedule import Compute
from towpath.core.step_state import Action, Submit, Task, Wait
from towpath.core.strategy import GRADIENTS, TransferKind
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, UnitSpec

UNITS = [UnitSpec("", (BucketSpec((8,)),), root=True), *(UnitSpec(str(i), (BucketSpec((64,)),)) for i in range(5))]
TOPOLOGY = towpath.Topology(2, 2)


def events(program: Program, preset: str, micro_steps: int = 2) -> tuple[list[Action | Compute], list[Task]]:
    """Return the actions and computations of a step, and its submitted tasks."""
    strategy = towpath.strategy(preset, TOPOLOGY)
    plans = [plan_unit(strategy, unit, Precision(), Form.COLLECTIVES) for unit in UNITS]
    found = [action for _, action in program.steps(plans, micro_steps)]
    return found, [each.task for each in found if isinstance(each, Submit)]


@pytest.mark.parametrize("program", dict.fromkeys(PROGRAMS.values()), ids=str)
@pytest.mark.parametrize("preset", ["zero1", "zero3", "paro-iig"])
def test_a_program_waits_at_once_for_what_is_in_series(program: Program, preset: str) -> None:
    found, tasks = events(program, preset)
    assert tasks and len(set(map(id, tasks))) == len(tasks)
    for action, following in pairwise(found):
        if isinstance(action, Submit) and action.task.kind in program.in_series:
            assert following == Wait(action.task)
    assert sum(isinstance(each, Compute) for each in found) == 2 * 2 * (len(UNITS) + 1)


@pytest.mark.parametrize(("program", "preset", "last"), [(STAGE1, "zero1", True), (STAGE2, "zero2", False)])
def test_gradients_follow_the_backward_pass_or_the_micro_step(program: Program, preset: str, last: bool) -> None:
    found, _ = events(program, preset)
    first = next(i for i, each in enumerate(found) if isinstance(each, Submit) and each.task.kind in GRADIENTS)
    assert last is not any(isinstance(each, Compute) for each in found[first:])


def test_a_bucket_sends_as_many_elements_as_its_units() -> None:
    tasks = [task for task in events(Program("", bucket=256), "zero2", 1)[1] if task.kind is TransferKind.REDUCE]
    sent = [sum(transfer.elements for transfer in task.transfers) for task in tasks]
    assert sent == [256, 256, 256]


def test_one_communicator_orders_gathers_and_reductions() -> None:
    for program in (STAGE3_EARLY, STAGE3_MEGATRON):
        tasks = events(program, "zero3")[1]
        assert all(before in task.after for before, task in pairwise(tasks))


def test_without_two_hops_each_micro_step_sums_over_all_ranks() -> None:
    for task in events(NO_TWO_HOPS, "mics")[1]:
        if task.kind is TransferKind.REDUCE:
            (transfer,) = task.transfers
            assert transfer.move.op is Op.ALL_REDUCE and transfer.move.members == TOPOLOGY.world


ROWS = [Gain("A, Fig. 1", "x / y", "1.50", "1.55 ✓", "1.10"), Gain("A, Fig. 2", "x / z", "2.00", "1.10", "2.00 ✓")]


def test_a_gain_that_does_not_match_as_it_ran_is_shown_with_its_reason() -> None:
    shown = reasons_of(ROWS, {"A, Fig. 2 | x / z": "rings were slower"}).splitlines()[2:]
    assert shown == ["| A, Fig. 2 | x / z | 2.00 | 1.10 | rings were slower |"]


@pytest.mark.parametrize("why", [{}, {"A, Fig. 1 | x / y": "…", "A, Fig. 2 | x / z": "…"}], ids=["none", "too many"])
def test_reasons_are_those_of_the_gains_that_do_not_match(why: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        reasons_of(ROWS, why)
