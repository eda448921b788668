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
from towpath.topology.groups import Groups, detect_shape, launched, local_rank, meeting_point
from towpath.topology.meeting import meet


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
    """In the process group that the launcher speaks of (or that there is already); alone, in none."""
    device = _device()
    made = launched() and not dist.is_initialized()
    if made:
        _initialise(device)
    try:
        groups = Groups()
        yield Job(groups, Topology(*detect_shape(groups)), device)
    finally:
        if made:
            dist.destroy_process_group()


def _device() -> torch.device:
    """This rank's GPU, where PyTorch sees any (CUDA_VISIBLE_DEVICES hides them), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = local_rank()
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {index} has no GPU: this node has {torch.cuda.device_count()}. Start as many ranks as GPUs."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _initialise(device: torch.device) -> None:
    # Small agreements between the ranks go over the CPU, also where tensors live on GPUs.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        store, rank, world = meet()
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, device_id=device_id)
    except dist.DistError as error:
        where = meeting_point()
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise ConfigError(
                f"port in use: the ranks are to meet at {where}, where another program listens. Give the launcher "
                "another port (torchrun --master-port)."
            ) from None
        raise ConfigError(f"the ranks could not meet at {where}: {str(error).splitlines()[0]}") from None
    except RuntimeError as error:  # gloo: another rank has died meanwhile
        if "gloo" not in str(error):
            raise
        raise TrainError(f"the ranks could not meet at {meeting_point()}: {_first_line(error)}") from error
