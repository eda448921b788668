"""Nodes of 1 and 3 ranks: strategies without columns train as one process, and the others are refused.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import towpath
from tests.forms import in_form
from tests.ranks.models import MODELS
from tests.ranks.reference import optimizer_for
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import seldom, strategy_of
from tests.ranks.test_checkpoint import _load_and_save, _train_and_save
from tests.ranks.test_never_silent import Net
from tests.ranks.test_pipeline import _pipeline
from tests.ranks.test_shares import TOLERANCE, _made, _step, check_gradients
from tests.ranks.test_train import _near, _steps, alone, config, tokens
from tests.ranks.twin import accumulating, by_queue, error_of
from towpath import Topology
from towpath.core.routes import Form
from towpath.errors import ConfigError
from towpath.topology.cluster import FLAT

__all__ = ["alone", "config", "tokens"]  # fixtures

SHAPE, WORLD = Topology(2, (1, 3)), 4
WORDS = "needs the same number of ranks on each node; got 1 rank on node 0 and 3 ranks on node 1. Start the same number"


CASES = [
    *(pytest.param(name, SHAPE, Form.MESSAGES, id=name) for name in (*FLAT, "zero3@ring", "zero2@one-hop")),
    pytest.param("zero2", SHAPE, Form.COLLECTIVES, id="zero2 in collectives"),
    *(seldom(name, SHAPE, Form.COLLECTIVES) for name in ("ddp", "zero1", "zero3")),
    *(seldom(name, Topology(3, (2, 1, 3)), Form.MESSAGES) for name in (*FLAT, "zero1@ring", "zero3@one-hop")),
]


@pytest.mark.parametrize(("label", "shape", "form"), CASES)
def test_gradients_and_norms_are_those_of_one_process(world: Worlds, label: str, shape: Topology, form: Form) -> None:
    world(shape.world).run(_train_beside_one_process, label, shape, form)


def _train_beside_one_process(label: str, shape: Topology, form: Form) -> None:
    entry, strategy = MODELS["gpt"], strategy_of(label, shape)
    plain, ranks = entry.make(torch.float64), shape.world
    with in_form(form):
        model: Any = towpath.shard(entry.make(torch.float64), strategy)
        scheduled = towpath.schedule(strategy, model, 2).transfers
    optimizers = [optimizer_for(each) for each in (model, plain)]
    for step in range(2):
        for micro in accumulating(model, 2):
            batches = [entry.micro_batch(rank, micro, step, torch.float64) for rank in range(ranks)]
            (entry.loss(model, *batches[dist.get_rank()]) / 2).backward()
            for batch in batches:
                (entry.loss(plain, *batch) / (2 * ranks)).backward()
        check_gradients(model, plain)
        norms = [float(torch.nn.utils.clip_grad_norm_(each.parameters(), 1e-2)) for each in (model, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=TOLERANCE)
        check_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert by_queue(towpath.stats(model).last_step) == by_queue(scheduled)


@pytest.mark.parametrize("preset", ["zero1", *map(seldom, ("ddp", "zero2", "zero3"))])
@on_ranks(WORLD)
def test_unequal_batches_on_unequal_nodes_train_as_one_process(preset: str) -> None:
    model, plain = _made(preset, SHAPE), MODELS["gpt"].make(torch.float64)
    found, expected = _step(model, plain, 0, 2)
    assert found == pytest.approx(expected, rel=TOLERANCE)
    check_gradients(model, plain)
    norms = [float(torch.nn.utils.clip_grad_norm_(each.parameters(), 1e-3)) for each in (model, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=TOLERANCE)


@pytest.mark.parametrize("preset", ["zero1", *map(seldom, ("ddp", "zero2", "zero3"))])
@on_ranks(WORLD)
def test_exact_transport_changes_no_bit(preset: str) -> None:
    found: list[list[torch.Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
        for exact in (False, True):
            model = _made(preset, SHAPE, dtype=torch.float32, exact=exact)
            optimizer, plain = optimizer_for(model), MODELS["gpt"].make(torch.float32)
            for step in range(2):
                _step(model, plain, step, 2)
                optimizer.step()
            found.append([p.grad.to_local() for p in model.parameters()])
            made = towpath.schedule(model.towpath_engine.strategy, model)
            assert any(transfer.coding for transfer in made.transfers) == exact
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


CODED = ["zero2@one-hop gradients=int8:32 weights=int8:32", seldom("zero3@flat weights=int8:32")]


@pytest.mark.parametrize("label", CODED)
@on_ranks(WORLD)
def test_codecs_on_routes_without_columns_are_near(label: str) -> None:
    dtype = torch.float32
    model, plain = _made(label, SHAPE, dtype=dtype), MODELS["gpt"].make(dtype)
    _step(model, plain, 0, 2)
    check_gradients(model, plain, 0.25)


# --- as the launcher has placed the ranks ----------------------------------------------------------------------------


@contextmanager
def _launched(topology: Topology = SHAPE) -> Generator[None]:
    os.environ["GROUP_RANK"] = str(topology.node_of(dist.get_rank()))
    try:
        yield
    finally:
        del os.environ["GROUP_RANK"]


@on_ranks(WORLD)
def test_unequal_nodes_are_detected_and_the_default_trains() -> None:
    with _launched():
        assert Topology.detect() == SHAPE
        model: Any = towpath.shard(Net(), "zero3")
    assert model.towpath_engine.strategy.topology == SHAPE
    with _launched(Topology(2, (3, 1))):
        assert Topology.detect() == Topology(2, (3, 1))
    with _launched(Topology(2, 2)):
        assert Topology.detect() == Topology(2, 2)


@on_ranks(WORLD)
def test_ranks_of_a_node_that_are_not_consecutive_are_still_refused() -> None:
    os.environ["GROUP_RANK"] = str(dist.get_rank() in (1, 2))
    assert "ranks of a node are not consecutive" in error_of(Topology.detect, ConfigError)
    del os.environ["GROUP_RANK"]


@on_ranks(WORLD)
def test_what_needs_columns_is_refused_on_every_rank() -> None:
    workload = towpath.Workload(tokens=8)
    ddp = torch.nn.parallel.DistributedDataParallel(Net())
    with _launched():
        for what, call in (
            ("strategy 'mics'", lambda: towpath.shard(Net(), "mics")),
            ("outer", lambda: towpath.shard(Net(), towpath.strategy("ddp", outer=towpath.Outer(every=2)))),
            ('strategy="auto"', lambda: towpath.shard(Net(), "auto", workload=workload)),
            ("probe", towpath.planning.probe),
            ("towpath.wires()", lambda: towpath.wires(ddp)),
            ("a pipeline", lambda: _pipeline(2, 2, "1F1B", "zero1", 4)),
        ):
            assert f"{what} {WORDS}" in error_of(call, ConfigError), what


# --- checkpoints, towpath train ---------------------------------------------------------------------------------------


def test_checkpoints_go_from_unequal_nodes_to_equal_ones_and_back(world: Worlds, tmp_path: Path) -> None:
    ranks = world(WORLD)
    expected = ranks.run(_train_and_save, tmp_path, "zero3", SHAPE)[0]
    chain = [("paro-iig", Topology(2, 2)), ("zero1", SHAPE)]
    for step, (label, shape) in enumerate(chain, 3):
        for wrong in ranks.run(_load_and_save, tmp_path, label, shape, step, expected):
            assert wrong == [], f"step {step}: {label} on {shape}"


@pytest.mark.parametrize("name", ["zero3", *map(seldom, ("ddp", "zero1", "zero2"))])
def test_towpath_train_on_unequal_nodes_trains_as_one_rank(world: Worlds, config: Any, alone: Any, name: str) -> None:
    for found in world(WORLD).run(_steps, config(strategy={"name": name, "nodes": "1+3"})):
        _near(found, alone)
