"""Under every uncompressed strategy, training executes its schedule and ends where one process ends.

A case is a strategy on a shape of cluster, a number of micro-steps, a model and a dtype. `make parity` runs the whole
product, five steps of each. `make test` runs three steps of a part of it. That part holds every preset but
`ALIKE` on nodes of two ranks, some presets on nodes of one rank, every route, and every shape. Every two other values
meet in a case.
"""

from __future__ import annotations

import zlib
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

import towpath
from tests.ranks import reference
from tests.ranks.models import DEVICE, LOUDNESS, MODELS
from tests.ranks.reference import Task
from tests.ranks.server import Worlds
from tests.ranks.strategies import ROUNDING, family, labels, seldom, strategy_of
from tests.ranks.twin import by_queue, distance
from towpath.core.routes import ROUTES

SHAPES = ((2, 2), (2, 3), (4, 2), (3, 1))  # nodes, ranks per node
MICRO_STEPS = (1, 3)
DTYPES = ("float64", "float32")
OPTIMIZERS = ("for-loop", "foreach", "fused")

# Presets of PaRO that are others of them at fewer or more levels: `make parity` has them.
ALIKE = ("paro-iii", "paro-ngg", "paro-nii", "paro-nng", "paro-nni", "paro-nnn")

# Sums are taken in another order than in one process, nothing else differs.
# float64: rounding is 1e-16; five AdamW steps with eps = 1e-5 raise it by some 1e5 at most.
# float32: in one process, float64 and float32 runs of these very models end up to 1.3e-6 apart (parameters of order 1).
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


@dataclass(frozen=True)
class Case:
    strategy: str
    shape: tuple[int, int]
    micro_steps: int
    model: str
    dtype: str

    @property
    def topology(self) -> towpath.Topology:
        return towpath.Topology(*self.shape)

    def task(self, steps: int) -> Task:
        return Task(self.model, self.topology.world, self.micro_steps, self.dtype, steps)

    @property
    def optimizer(self) -> str:
        """Each of the three ways that a torch optimizer runs, in turn."""
        return OPTIMIZERS[zlib.crc32(str(self).encode()) % len(OPTIMIZERS)]

    def __str__(self) -> str:
        nodes, ranks = self.shape
        return f"{self.strategy}-{nodes}x{ranks}-{self.micro_steps}micro-{self.model}-{self.dtype}"


# --- cases -----------------------------------------------------------------------------------------------------------


@cache
def whole_product() -> tuple[Case, ...]:
    return tuple(
        Case(label, shape, *rest)
        for shape in SHAPES
        for label in labels(towpath.Topology(*shape))
        for rest in product(MICRO_STEPS, MODELS, DTYPES)
    )


@cache
def every_pair() -> tuple[Case, ...]:
    """Always the case with the most new pairs; among equals on the fewest ranks, then of the values used least."""
    # Looked up once: the loop goes through all of them for each case that it chooses.
    product = [(case, pairs(case), case.topology.world) for case in whole_product()]
    wanted = {pair for _, held, _ in product for pair in held}
    used: Counter[Any] = Counter()
    chosen: set[Case] = set()

    while wanted:
        gains = [len(held & wanted) for _, held, _ in product]
        most = max(gains)
        best = [(case, ranks) for (case, _, ranks), gain in zip(product, gains, strict=True) if gain == most]
        case, _ = max(best, key=lambda each: (-each[1], -sum(used[value] for value in _values(each[0]))))
        chosen.add(case)
        wanted.difference_update(pairs(case))
        used.update(_values(case))
    return tuple(case for case in whole_product() if case in chosen)


def _values(case: Case) -> tuple[Any, ...]:
    return case.strategy, case.model, case.shape, case.micro_steps, case.dtype


@cache
def pairs(case: Case) -> frozenset[tuple[Any, ...]]:
    two_levels = case.topology.ranks_per_node > 1
    rest = {"levels": two_levels, "micro_steps": case.micro_steps, "model": case.model, "dtype": case.dtype}
    found: set[tuple[Any, ...]] = {("shape", case.shape), *combinations(rest.items(), 2)}
    name, _, route = case.strategy.partition("@")
    if route:  # its messages are test_routes.py's matter
        return frozenset(found | ({("route", route)} if two_levels else set()))
    if name in ALIKE:
        return frozenset(found)
    # On nodes of one rank, what a strategy does inside a node is nothing: some show that.
    if two_levels or name.partition(":")[0] in ("ddp", "zero3", "mics", "lins"):
        found.add((family(name, case.topology), two_levels))
    return frozenset(found)


# --- one case --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """How far a run ended from the reference: relative for losses and norms, absolute for parameters."""

    losses: float
    norms: float
    parameters: dict[str, float]


def train(case: Case, steps: int, expected_file: Path) -> Distance:
    """Runs on every rank."""
    import torch
    import torch.distributed as dist

    expected = reference.read(expected_file)
    entry, dtype, rank = MODELS[case.model], case.task(steps).torch_dtype, dist.get_rank()
    strategy = strategy_of(case.strategy, case.topology)
    model: Any = towpath.shard(entry.make(dtype), strategy, topology=case.topology)
    optimizer = reference.optimizer_for(model, case.optimizer)
    losses: list[float] = []
    norms: list[float] = []
    for step, loudness in enumerate(LOUDNESS[:steps]):
        mean_loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
        for micro_step in range(case.micro_steps):
            boundary = micro_step == case.micro_steps - 1
            with nullcontext() if boundary else model.no_sync():
                inputs = entry.micro_batch(rank, micro_step, step, dtype)
                loss = loudness / case.micro_steps * entry.loss(model, *inputs)
                loss.backward()
            mean_loss += loss.detach() / dist.get_world_size()
        dist.all_reduce(mean_loss)
        losses.append(mean_loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), expected.max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    scheduled = towpath.schedule(strategy, model, case.micro_steps).transfers
    assert by_queue(towpath.stats(model).last_step) == by_queue(scheduled)
    found = dict(model.named_parameters())
    assert found.keys() == expected.parameters.keys()
    return Distance(
        losses=_relative(losses, expected.losses),
        norms=_relative(norms, expected.norms),
        parameters={name: distance(found[name], p) for name, p in expected.parameters.items()},
    )


def _relative(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(found, expected, strict=True))


def check(case: Case, steps: int, world: Worlds, folder: Path) -> None:
    ranks = world(case.topology.world)
    expected = reference.load_or_train(case.task(steps), folder, lambda task: ranks.run(_train_reference, task)[0])
    for rank, found in enumerate(ranks.run(train, case, steps, expected)):
        limit = TOLERANCE[case.dtype]
        far = {name: value for name, value in found.parameters.items() if not value <= limit}
        assert not far, f"rank {rank}: {len(far)} of {len(found.parameters)} parameters are off: {far}"
        assert found.losses <= limit, f"rank {rank}: losses"
        assert found.norms <= limit, f"rank {rank}: norms"


def _train_reference(task: Task) -> reference.Result | None:
    """In one of the processes that are there, which hears nothing of the others."""
    import torch.distributed as dist

    return reference.train_in_one_process(task) if dist.get_rank() == 0 else None


# --- the tests -------------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Not where the module is imported, as every rank does: to choose takes seconds."""
    if "case" in metafunc.fixturenames:
        chosen = set(every_pair())
        everything = "not parity" not in metafunc.config.option.markexpr  # thousands, which collecting alone takes time
        cases = [case if case in chosen else seldom(case) for case in whole_product() if everything or case in chosen]
        metafunc.parametrize("case", cases, ids=str)


def test_training_ends_as_in_one_process(case: Case, steps: int, world: Worlds, shared_folder: Path) -> None:
    check(case, steps, world, shared_folder)


def test_the_chosen_cases_hold_every_pair_of_values_that_the_product_holds() -> None:
    held = {pair for case in every_pair() for pair in pairs(case)}

    assert held == {pair for case in whole_product() for pair in pairs(case)}
    parts = [case.strategy.split()[0].partition(":")[0].partition("@") for case in every_pair()]
    assert {name for name, _, _ in parts} >= set(towpath.strategies()) - {*ROUNDING, *ALIKE}
    assert {route for *_, route in parts} == {"", *ROUTES} - {"flat"}
