"""Measure steps of ranks of unequal speed: with equal batches, with `shares=`, and with shares that are measured.

    shares [CASE …] [--rounds 6] [--quick] [--resume]

Four ranks on two nodes train about a million parameters. Blocks wait for each row instead of computing it, on the ranks
of the second node two or three times as long. The ideal step is as long as all rows take if every rank is always busy:
the rows over the sum of the speeds. A case takes about two minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

import towpath
from benchmarks.harness.candidates import LabPlace, Launch, timed
from benchmarks.harness.comparison import compare, started
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.workload import SQUARE, SilentBlock, SilentGPT, Wait, Workload
from towpath.core.shares import divided_rows
from towpath.engine.compute_clock import WARM_UP, WINDOW

EVEN, SHARES, AUTO = "even", "shares", "auto"
MOST_OVER_IDEAL = 1.08
MOST_OVER_BEST = 1.05  # of measured shares
# The steps after which measured shares have settled: two windows, and one for events that are read later.
SETTLED = 2 * (WARM_UP + WINDOW) + 1
ROW_SECONDS, QUICK_ROW_SECONDS = 0.008, 0.0005  # of a block, in the forward pass
_WORKLOAD = Workload(SQUARE, micro_steps=2, batch=6, length=16, width=96, depth=6)


@dataclass(frozen=True, slots=True)
class SharesCase:
    """Steps of a strategy on ranks of which two are `slow` times as slow as the others."""

    strategy: str
    slow: int
    least_gain: float  # over equal batches
    workload: Workload = _WORKLOAD

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"{self.strategy}-1to{self.slow}"

    @property
    def seconds(self) -> tuple[int, ...]:
        """The relative seconds of a row on each rank."""
        ranks = self.workload.topology.ranks_per_node
        return (1,) * ranks + (self.slow,) * ranks

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the three ways to divide a micro-batch."""
        workload, row = self.workload, ROW_SECONDS
        if settings.quick:
            workload, row = replace(workload.quick(), batch=workload.batch), QUICK_ROW_SECONDS
        shares = tuple(1 / each for each in self.seconds)
        place, launches = LabPlace(workload.topology), dict[str, Launch]()
        for name, given in ((EVEN, None), (SHARES, shares), (AUTO, "auto")):
            waits = tuple(row * each for each in self.seconds)
            made: Any = towpath.strategy(self.strategy, workload.topology, shares=given)  # pyright: ignore
            launches[name] = Launch(place, UnequalSteps, (made, workload, waits), SETTLED if name == AUTO else 2)
        with started(launches, settings.say) as running:
            found = compare(running, settings.rounds, settings.say)
            rows = {name: one.ask("rows")[0] for name, one in running.items()}
        settings.say(f"rows: {rows}")
        ideal = self.ideal_seconds(workload, row)
        return {
            "checks": list(self.checks(found.seconds, ideal, limited=not settings.quick)),
            "rows": rows,
            "ideal_seconds": ideal,
            **found.recorded(),
        }

    def ideal_seconds(self, workload: Workload, row: float) -> float:
        """Return the seconds of a step if every rank is always busy."""
        rows = workload.batch * workload.topology.world * workload.micro_steps
        return rows * 3 * workload.depth * row / sum(1 / each for each in self.seconds)

    def checks(self, seconds: Mapping[str, Sequence[float]], ideal: float, limited: bool) -> Iterator[Check]:
        """Yield the figures of a case."""
        even, shares, auto = (median(seconds[name]) for name in (EVEN, SHARES, AUTO))
        yield Check("step with shares / ideal", shares / ideal, MOST_OVER_IDEAL if limited else None)
        least = self.least_gain if limited else None
        yield Check("step of equal batches / step with shares", even / shares, None, least)
        yield Check("step with measured shares / with the best", auto / shares, MOST_OVER_BEST if limited else None)
        yield Check("step of equal batches / ideal", even / ideal)


class RowsGPT(SilentGPT):
    """A GPT that computes nothing, and takes time for each row."""

    row_seconds = 0.0
    waits: list[float]  # the seconds of a block in this pass, which all blocks share

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return a loss of zero."""
        self.waits[0] = self.row_seconds * len(ids)
        return super().forward(ids, targets)


class RowsBlock(SilentBlock):
    """A block that waits for the rows of its model."""

    waits: list[float]

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` after a while."""
        return Wait.apply(super().forward(x), self.waits[0])


class UnequalSteps:
    """A worker that takes steps with equal batches, or with those of the strategy's shares."""

    def __init__(
        self, rank: int, world: int, strategy: towpath.Strategy, workload: Workload, waits: Sequence[float]
    ) -> None:
        model = workload.model()
        model.__class__ = RowsGPT
        made: Any = model
        made.row_seconds, made.waits = waits[rank], [0.0]
        for block in made.blocks:
            block.__class__, block.waits = RowsBlock, made.waits
        self._model: Any = towpath.shard(made, strategy)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._workload, self._shares = workload, self._model.towpath_engine.shares
        if self._shares is not None:
            self._shares.divide(workload.batch)

    def sample(self) -> float:
        """Take a step and return its seconds."""
        return timed(self._step)

    def rows(self) -> tuple[int, ...]:
        """Return the rows of all ranks."""
        world = self._workload.topology.world
        return divided_rows((1,) * world, world * self._workload.batch) if self._shares is None else self._shares.rows

    def _step(self) -> None:
        count = self._workload.micro_steps
        for micro in range(count):
            rows = self._workload.batch if self._shares is None else self._shares.span()[1]
            ids = torch.zeros(rows, self._workload.length, dtype=torch.long)
            with nullcontext() if micro == count - 1 else self._model.no_sync():
                loss = self._model(ids, ids)
                loss = loss / count if self._shares is None else towpath.weigh(self._model, loss, ids.numel())
                loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


_CASES = tuple(
    SharesCase(strategy, slow, gain) for slow, gain in ((2, 1.35), (3, 1.7)) for strategy in ("zero3", "paro-iig")
)

SUITES = (Suite("shares", __doc__ or "", _CASES),)
