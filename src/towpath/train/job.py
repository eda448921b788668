"""The ranks of a training run: how a rank joins them, what it computes on, and how all ranks fail together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from towpath.errors import ConfigError, StepError
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups, detect_shape
from towpath.topology.init import alone, device_of_rank, first_line, init


@dataclass(frozen=True, slots=True)
class Job:
    """This rank and the others. `topology`: the nodes and ranks, numbered as by `towpath.init()`."""

    groups: Groups
    topology: Topology
    device: torch.device

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.groups.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.groups.world

    @property
    def leads_node(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.rank % self.topology.ranks_per_node == 0

    @contextmanager
    def fail_together(self) -> Generator[None]:
        """Raise on every rank if any rank raises inside the context. Every rank must enter it.

        Raises:
            ConfigError: Another rank has raised. The text names the rank and its error.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        texts = self.groups.gather_objects(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise ConfigError(f"rank {rank} cannot take part: {text}")

    @contextmanager
    def as_train_errors(self) -> Generator[None]:
        """Turn errors that are not the program's, such as a lost rank or too little memory, into a `StepError`.

        The command prints it as one line, without a traceback.
        """
        try:
            yield
        except StepError as error:
            raise StepError(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise StepError(
                f"rank {self.rank}: {first_line(error)} Lower train.micro_batch, set train.checkpointing = true, or "
                "choose a strategy that spreads more."
            ) from error
        except RuntimeError as error:
            # PyTorch's own collectives of the loss and the norm. gloo raises nothing more specific.
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise StepError(
                f"rank {self.rank} lost the others: {first_line(error)} One of them has died, hangs or has lost its "
                "link: see what it says."
            ) from error

    def print_once(self, text: str) -> None:
        """Print a line on stderr, on rank 0 only."""
        if self.rank == 0:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def mean(self, values: torch.Tensor) -> list[float]:
        """Return the mean over all ranks of each element. Every rank must call it."""
        return self.begin_mean(values)()

    def begin_mean(self, values: torch.Tensor, groups: Groups | None = None) -> Callable[[], list[float]]:
        """Sum `values` over all ranks in place, and begin to copy them to the host. Every rank must call it.

        Args:
            values: This rank's values.
            groups: Those of fewer ranks, such as an island's.

        Returns:
            A function that returns the mean of each element. On a GPU it waits for the sum, and not for what was
            enqueued after it.
        """
        groups = groups or self.groups
        if groups.world > 1:
            dist.all_reduce(values, group=groups.parent)
        if values.device.type != "cuda":
            return lambda: [value / groups.world for value in values.tolist()]
        on_host = torch.empty_like(values, device="cpu", pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(values.device))

        def read() -> list[float]:
            copied.synchronize()
            return [value / groups.world for value in on_host.tolist()]

        return read


@contextmanager
def init_distributed() -> Generator[Job]:
    """Join the launcher's process group, or the one that exists already. Without a launcher, this rank trains alone."""
    creates_group = not (dist.is_initialized() or alone())
    device = init() if creates_group or dist.is_initialized() else device_of_rank()
    try:
        groups = Groups()
        yield Job(groups, Topology(*detect_shape(groups)), device)
    finally:
        if creates_group:
            dist.destroy_process_group()
