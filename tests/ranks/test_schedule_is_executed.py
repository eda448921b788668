"""The engine executes exactly the transfers of `towpath.schedule`, and keeps exactly the memory it states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import towpath
from tests.ranks.models import MODELS
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn, seldom, strategy_of
from tests.ranks.twin import accumulating, by_queue
from towpath.collectives import point_to_point as messages
from towpath.core.routes import ROUTES, Grid, Op, parts_of, sends
from towpath.core.strategy import TransferKind

SHAPES = [towpath.Topology(2, 2), towpath.Topology(2, 3), towpath.Topology(3, 1)]
LABELS = [name for name in towpath.strategies() if not name.startswith("paro-")]
LABELS += ["paro-igg", "paro-iig", "paro-nig", "paro-nii", "zero3@ring", "paro-iig@ring"]
LABELS += ["ddp gradients=low-rank:2", "zero1 gradients=low-rank:2"]
LABELS += [f"{name}@{route}" for name in ("zero3", "ddp") for route in ROUTES[2:]]
PARTS = 5  # of the labels: a test each

MIXED = towpath.Precision(params=torch.bfloat16, reduce=torch.float32)
NARROW = towpath.Precision(params=torch.bfloat16, reduce=torch.bfloat16)


def _every_label_on_one_shape() -> list[Any]:
    often = {(SHAPES[0], 3, 0), (SHAPES[2], 1, 2)}
    product = [(shape, micro, part) for shape in SHAPES for micro in (1, 3) for part in range(PARTS)]
    return [case if case in often else seldom(*case) for case in product]


@pytest.mark.parametrize("shape, micro_steps, part", _every_label_on_one_shape(), ids=str)
def test_every_transfer_of_the_schedule_and_no_other_is_executed(
    world: Worlds, shape: towpath.Topology, micro_steps: int, part: int
) -> None:
    world(shape.world).run(_compare_transfers, shape, micro_steps, part, timeout=300)


def _compare_transfers(topology: towpath.Topology, micro_steps: int, part: int) -> None:
    for label in LABELS[part::PARTS]:
        strategy = strategy_of(label, topology)
        model: Any = towpath.shard(MODELS["gpt"].make(torch.float32), strategy)
        for _ in range(2):  # what is published first in the second step compares itself with its peers then
            _train(model, micro_steps)
        with _backend_calls() as calls:
            _train(model, micro_steps)
        expected = towpath.schedule(strategy, model, micro_steps).transfers
        found = towpath.stats(model).last_step
        assert by_queue(found) == by_queue(expected), label
        # And, so as not to ask the engine about itself: what the backend was asked for.
        assert calls == _calls_of(expected), label


def _calls_of(transfers: tuple[Any, ...]) -> Counter[str]:
    calls: Counter[str] = Counter()
    for transfer in transfers:
        move, group, route = transfer.move, transfer.move.groups[0], transfer.route
        nodes = list(map(transfer.topology.node_of, group.ranks))
        # On gloo a flat gather or reduce-scatter is our ring.
        if route != "flat" or move.op is not Op.ALL_REDUCE:
            # A member posts at once all that it sends and receives in a step; an all-to-all, all of a part's hop.
            plan = sends(move.op, route, group, nodes, transfer.parts)
            calls["messages"] += len({s.step for s in plan if 0 in (s.source, s.target)})
            if route == "two-hop" and move.op is not Op.ALL_GATHER:
                calls["messages"] += transfer.parts - 1
        else:
            calls["all_reduce"] += 1
    return calls


@contextmanager
def _backend_calls() -> Iterator[Counter[str]]:
    names = {
        "all_gather_single": "all_gather",
        "all_gather": "all_gather",
        "all_reduce": "all_reduce",
        "reduce_scatter_single": "reduce_scatter",
        "reduce_scatter": "reduce_scatter",
        "broadcast": "broadcast",
    }
    calls: Counter[str] = Counter()

    def counting(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[kind] += 1
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, kind in names.items():
            patch.setattr(dist, name, counting(kind, getattr(dist, name)))
        patch.setattr(messages, "_launched", counting("messages", messages._launched))
        yield calls


def _train(model: Any, micro_steps: int) -> None:
    """One optimizer step, by an optimizer that needs nothing of the other ranks."""
    entry = MODELS["gpt"]
    for micro in accumulating(model, micro_steps):
        entry.loss(model, *entry.micro_batch(dist.get_rank(), micro, 0, torch.float32)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


@in_turn(range(PARTS), 1, "part")
@pytest.mark.parametrize(
    "precision",
    [towpath.Precision(), MIXED, seldom(NARROW)],
    ids=["fp32", "bf16 with fp32 masters", "bf16, summed in fp32"],
)
@on_ranks(4)
def test_memory_is_what_the_schedule_says(precision: towpath.Precision, part: int) -> None:
    topology = towpath.Topology(2, 2)
    for label in LABELS[part::PARTS]:
        strategy = strategy_of(label, topology)
        model: Any = towpath.shard(MODELS["gpt"].make(torch.float32), strategy, precision=precision)
        optimizer = torch.optim.AdamW(model.parameters())
        entry = MODELS["gpt"]
        entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, 0, torch.float32)).backward()
        optimizer.step()
        found = towpath.stats(model).memory_bytes
        for kind, expected in towpath.schedule(strategy, model, 1, precision).memory_bytes().items():
            assert found[kind] == expected, (label, kind)
        for kind, expected in towpath.schedule(strategy, model, 1, precision).buffer_bytes().items():
            assert found[kind] == expected, (label, kind)
        # Two fp32 states for each element that this rank's optimizer owns; the padding between has none.
        owned = sum(p.to_local().numel() for p in model.parameters())
        assert found["optimizer"] == 2 * 4 * owned, label
        ours = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        assert sum(g.nbytes for g in ours) == 4 * owned, label


class Mixed(torch.nn.Module):
    """Two dtypes, each partly frozen: four buckets in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, dtype=torch.float64)
        self.c, self.d = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, dtype=torch.float64)
        self.c.requires_grad_(False)
        self.d.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.c, self.d):
            x = layer(x.to(layer.weight.dtype))
        return x.square().mean()


@pytest.mark.parametrize("label", ["zero3", "hpz", "zero3@ho-ring"])
@on_ranks(4)
def test_the_small_gathers_of_a_unit_travel_as_one(label: str) -> None:
    topology = towpath.Topology(2, 2)
    torch.manual_seed(0)
    plain = Mixed()
    torch.manual_seed(0)
    strategy = replace(strategy_of(label, topology), frozen="as-trained")
    model: Any = towpath.shard(Mixed(), strategy)
    x = torch.arange(8.0).view(1, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model(x).backward()
        optimizer.step()
    with _backend_calls() as calls, torch.no_grad():
        assert torch.allclose(model(x), plain(x))
    gathers = [t for t in towpath.schedule(strategy, model, 1).transfers if t.kind is TransferKind.GATHER]
    move = gathers[0].move
    nodes = list(map(topology.node_of, move.groups[0].ranks))
    route, packed = gathers[0].route, sum(t.region_bytes for t in gathers)
    parts = parts_of(route, Grid.of(nodes), packed // move.members)
    each = len({s.step for s in sends(Op.ALL_GATHER, route, move.groups[0], nodes, parts)})
    assert len(gathers) == 4
    assert calls["messages"] == each, (dict(calls), each)
    schedule = towpath.schedule(strategy, model, 1)
    assert towpath.stats(model).memory_bytes["wire"] == schedule.buffer_bytes()["wire"]
