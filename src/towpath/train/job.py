"""The ranks of a training run: how one joins, what it computes on, and how all of them come to one answer."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from towpath.errors import ConfigError, StepError, TrainError
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups, detect_shape
from towpath.topology.init import alone, device_of_rank, init


@dataclass(frozen=True, slots=True)
class Job:
    """This rank among the others."""

    groups: Groups
    topology: Topology  # as the launcher placed the ranks
    device: torch.device

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def world(self) -> int:
        return self.groups.world

    @property
    def leads_node(self) -> bool:
        return self.rank % self.topology.ranks_per_node == 0

    @contextmanager
    def alike(self) -> Generator[None]:
        """What fails inside on one rank fails on all of them, in one line each, and nobody waits for nobody."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        told = self.groups.gather_objects(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, line in enumerate(told):
            if line is not None:
                raise ConfigError(f"rank {rank} cannot take part: {line}")

    @contextmanager
    def answering(self) -> Generator[None]:
        """What ends a run from outside, a lost rank or too little memory, is a TrainError: one line, no traceback."""
        try:
            yield
        except StepError as error:
            raise TrainError(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise TrainError(
                f"rank {self.rank}: {_first_line(error)} Lower train.micro_batch, set train.checkpointing = true, or "
                "choose a strategy that spreads more."
            ) from error
        except RuntimeError as error:
            # PyTorch's own collectives, of the loss and the norm: gloo raises nothing more special.
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise TrainError(
                f"rank {self.rank} lost the others: {_first_line(error)} One of them has died, hangs or has lost its "
                "link: see what it says."
            ) from error

    def say(self, text: str) -> None:
        """Once for all ranks, on stderr."""
        if self.rank == 0:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def mean(self, values: torch.Tensor) -> list[float]:
        """Of each element, over all ranks."""
        if self.world > 1:
            dist.all_reduce(values)
        return [value / self.world for value in values.tolist()]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") + "."


@contextmanager
def joined() -> Generator[Job]:
    """Join the process group of the launcher, or the one that exists already. Without a launcher, train alone."""
    made = not (dist.is_initialized() or alone())
    device = init() if made or dist.is_initialized() else device_of_rank()
    try:
        groups = Groups()
        yield Job(groups, Topology(*detect_shape(groups)), device)
    finally:
        if made:
            dist.destroy_process_group()
