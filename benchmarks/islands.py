"""Strategies with outer steps, and a worker that takes steps without waiting for the ranks of other islands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

import towpath
from benchmarks import torchft_peer
from benchmarks.peers import Context, autocast_of, build, no_sync, stepper
from benchmarks.workload import Workload
from towpath import Outer, Topology, Transport

PRESET = "paro-iig"
EVERY = 32
# The learning rate and the momentum of the outer optimizer: those of the papers, and those that average all weights.
NESTEROV, AVERAGED = (0.7, 0.9), (1.0, 0.0)
TRANSPORTS = {
    "fp32": Transport(),
    "int4": Transport("flat", "int4", feedback="all"),
}


@dataclass(frozen=True, slots=True)
class OuterSpec:
    """The outer steps of a case. `codec` is a key of `TRANSPORTS`, and every node is an island."""

    codec: str = "int4"
    every: int = EVERY
    fragments: int = 1
    delay: int = 0
    blend: float = 0.0
    optimizer: tuple[float, float] = NESTEROV

    def strategy(self, topology: Topology) -> towpath.Strategy:
        """Return the strategy for a job on `topology`."""
        outer = Outer(
            self.every,
            self.fragments,
            self.delay,
            *self.optimizer,
            blend=self.blend,
            transport=TRANSPORTS[self.codec],
        )
        return towpath.strategy(PRESET, topology, outer=outer)

    def __str__(self) -> str:
        found = [self.codec, f"every {self.every}"]
        found += [f"{self.fragments} fragments"] if self.fragments > 1 else []
        found += [f"delay {self.delay}"] if self.delay else []
        found += [f"blend {self.blend:g}"] if self.blend else []
        found += ["averaged"] if self.optimizer == AVERAGED else []
        return ", ".join(found)


def outer_of(strategy: towpath.Strategy) -> Outer:
    """Return the outer steps of a strategy that has them."""
    assert strategy.outer is not None
    return strategy.outer


def begun_in(outer: Outer, step: int) -> bool:
    """Return whether an exchange begins in a step, counted from 1. It belongs to the step before."""
    return bool(outer.begun_at(step - 1))


def under_way_in(outer: Outer, step: int) -> bool:
    """Return whether an exchange begins, is under way or is applied in a step, counted from 1."""
    return any(outer.begun_at(before) for before in range(step - 1 - outer.delay, step))


# Validation -----------------------------------------------------------------------------------------------------------


def synchronize(model: Any) -> None:
    """Let the exchanges of the last step begin and end now, as the next step would. Other models stay as they are."""
    if (engine := getattr(model, "towpath_engine", None)) is not None:
        engine.sync_islands()


def conclude(model: Any) -> None:
    """Let all islands hold the mean of their weights, for the final loss. Other models stay as they are."""
    if hasattr(model, "towpath_engine"):
        towpath.average_islands(model)


# Steps ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Made:
    """A model under its candidate's engine, its optimizer, and the context of its micro-steps."""

    model: Any
    optimizer: torch.optim.Optimizer
    context: Context
    kept: object = None  # what has to live as long as the model

    @staticmethod
    def of(candidate: str | towpath.Strategy, workload: Workload) -> Made:
        """Make a candidate: a strategy, a name of `peers`, or torchft with the usual period."""
        diloco = torchft_peer.DiLoCo(workload) if candidate == torchft_peer.NAME else None
        context: Context = no_sync
        if diloco is not None:
            model, context = diloco.model, autocast_of(workload)
        elif isinstance(candidate, str):
            model, context = build(candidate, workload)
        else:
            model = towpath.shard(workload.model(), candidate, precision=workload.precision)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=workload.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        if diloco is not None:
            diloco.begin(optimizer, EVERY)
        return Made(model, optimizer, context, diloco)


class FreeSteps:
    """A worker that takes optimizer steps one after the other. Only the candidate itself makes ranks wait."""

    def __init__(self, rank: int, world: int, candidate: str | towpath.Strategy, workload: Workload) -> None:
        self._made = made = Made.of(candidate, workload)
        data = workload.data(rank)
        self._step = stepper(made.model, made.context, data, workload.micro_steps, optimizer=made.optimizer)

    def steps(self, count: int) -> list[float]:
        """Take steps, and return the seconds of each on this rank. All ranks begin the first one together."""
        dist.barrier()
        marks = [time.perf_counter()]
        for _ in range(count):
            self._step()
            marks.append(time.perf_counter())
        return [after - before for before, after in pairwise(marks)]


def mean_step(ranks: Sequence[Sequence[float]]) -> float:
    """Return the mean seconds of a step, until the last rank has finished all of them."""
    return max(map(sum, ranks)) / len(ranks[0])


def by_step(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of each step, as the mean over the ranks."""
    return [mean(step) for step in zip(*ranks, strict=True)]
