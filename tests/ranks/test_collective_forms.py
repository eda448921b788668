"""Collectives of columns and rows, as NCCL gets them, forced on gloo: training, transfers, memory and calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import towpath
from tests.forms import in_form
from tests.ranks import reference, test_parity
from tests.ranks.models import MODELS
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn, strategy_of
from tests.ranks.test_parity import TOLERANCE, Case, Distance
from tests.ranks.test_schedule_is_executed import Mixed, _backend_calls, _train
from towpath.core import routes
from towpath.core.costs import phases
from towpath.core.routes import Form, Order, order_of
from towpath.core.strategy import TransferKind

SHAPE = towpath.Topology(2, 2)
LABELS = (
    *("paro-ggg", "paro-igg", "paro-ngg", "paro-nig", "paro-nng", "paro-nnn", "paro-iig", "hpz", "ddp", "zero1"),
    *(
        "zero3",
        "zero3@ring",
        "zero3@hierarchical",
        "zero3@ho-ring",
        "zero3@one-hop",
        "zero3@two-hop",
        "paro-igg@flat",
        "lins:1x1|2x1|2x2",
    ),
    *(
        "mics:2x2@ring",
        "mics:2x2@hierarchical",
        "mics:2x2@ho-ring",
        "mics:2x2@one-hop",
        "ddp@hierarchical",
        "ddp@two-hop",
    ),
)
# Slices are in an order that rows and columns cannot work on.
SCATTERED = ("lins:2x2|2x4|2x4", "lins:2x2|2x2|2x4", "lins:2x2|2x4|2x4@hierarchical")


@in_turn(LABELS, 2)
def test_training_in_collectives_ends_as_in_one_process(
    label: str, steps: int, world: Worlds, shared_folder: Path
) -> None:
    _check(Case(label, (2, 2), 3, "gpt", "float64"), steps, world, shared_folder)


@in_turn(SCATTERED, 1)
def test_training_with_scattered_slices_ends_as_in_one_process(
    label: str, steps: int, world: Worlds, shared_folder: Path
) -> None:
    _check(Case(label, (4, 2), 1, "gpt", "float64"), steps, world, shared_folder)


def _check(case: Case, steps: int, world: Worlds, folder: Path) -> None:
    ranks = world(case.topology.world)
    expected = reference.load_or_train(
        case.task(steps), folder, lambda task: ranks.run(test_parity._train_reference, task)[0]
    )
    for found in ranks.run(_train_in_collectives, case, steps, expected):
        limit = TOLERANCE[case.dtype]
        assert max(found.parameters.values()) <= limit and found.losses <= limit and found.norms <= limit


def _train_in_collectives(case: Case, steps: int, expected: Path) -> Distance:
    with in_form(Form.COLLECTIVES):
        return test_parity.train(case, steps, expected)


@in_turn(LABELS, 1)
def test_collectives_are_those_of_the_schedule(world: Worlds, label: str) -> None:
    world(4).run(_compare, label)


@pytest.mark.parametrize("label", ["zero3@hierarchical", "paro-ggg"])
@on_ranks(4)
def test_with_many_nodes_they_are_fewer(label: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "MOST_ROW_CALLS", 1)
        _compare(label)


def _compare(label: str) -> None:
    """The transfers, the calls that the backend gets, and the memory."""
    strategy = strategy_of(label, SHAPE)
    with in_form(Form.COLLECTIVES):
        model: Any = towpath.shard(MODELS["gpt"].make(torch.float32), strategy)
        for _ in range(2):
            _train(model, 2)
        with _backend_calls() as calls:
            _train(model, 2)
        expected = towpath.schedule(strategy, model, 2)
    found = towpath.stats(model).last_step
    assert {t.form for t in expected.transfers if t.kind is not TransferKind.UNUSED_PARAMS} == {Form.COLLECTIVES}
    for kind in TransferKind:
        assert [t for t in found if t.kind is kind] == [t for t in expected.transfers if t.kind is kind], kind
    if "hop" not in label or "ho-ring" in label:
        assert sum(calls.values()) == sum(_calls(transfer) for transfer in expected.transfers), calls
    memory = towpath.stats(model).memory_bytes
    assert {kind: memory[kind] for kind in expected.buffer_bytes()} == expected.buffer_bytes()


def _calls(transfer: Any) -> float:
    """gloo makes one call for each node where NCCL launches them together."""
    if transfer.form is Form.MESSAGES:
        return 1
    of_rows = transfer.by_rows_and_columns and order_of(transfer.move.groups[0].slots, transfer.grid) is Order.ROWS
    of_rows = of_rows and transfer.route != "ho-ring"  # its copies are in the order of columns
    found = phases(transfer.move.op, transfer.route, transfer.grid, transfer.parts, transfer.form)
    return sum(p.messages_out + (transfer.grid.nodes if of_rows else 1) * p.messages_inside for p in found)


@pytest.mark.parametrize("label", ["zero3@ho-ring", "paro-iig"])
@on_ranks(4)
def test_small_gathers_and_reductions_are_launched_together(label: str) -> None:
    strategy = replace(strategy_of(label, SHAPE), frozen="as-trained")
    torch.manual_seed(0)
    plain = Mixed()
    torch.manual_seed(0)
    with in_form(Form.COLLECTIVES):
        model: Any = towpath.shard(Mixed(), strategy)
        made = towpath.schedule(strategy, model, 1)
    x = torch.arange(8.0).view(1, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
        optimizer.step()
    plain(x).backward()
    with torch.no_grad():
        assert torch.allclose(model(x), plain(x))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is None or torch.allclose(mine.grad.full_tensor(), theirs.grad)
    together = [plan.together(TransferKind.REDUCE) for plan in made.plans]
    assert any(together) == (label == "paro-iig")
    assert towpath.stats(model).memory_bytes["wire"] == made.buffer_bytes()["wire"]
