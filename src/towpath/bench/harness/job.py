"""A suite as the ranks of one job, on a cluster of the user's own: contestants take turns inside the same processes.

Nothing is shaped there, and nobody is stopped: between its turns a contestant only holds its memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from towpath.bench.harness.failure import CaseError
from towpath.errors import ConfigError
from towpath.lab import LinkBytes
from towpath.topology.groups import launched
from towpath.train.job import Job, init_distributed

__all__ = ["InJob", "Job", "agreed", "decided", "node_counters", "running_job"]

Value = TypeVar("Value")

_DEVICES = Path("/proc/net/dev")


@contextmanager
def running_job(suite: str, possible: bool) -> Generator[Job | None]:
    """The job that a launcher has started this process for; None where there is no launcher."""
    if not launched():
        yield None
        return
    if not possible:
        raise ConfigError(
            f"the suite {suite} starts ranks of its own, and a launcher has placed this process as one already. Start "
            "it without torchrun."
        )
    with init_distributed() as job:
        yield job


def decided(job: Job | None, value: Value) -> Value:
    """Rank 0's."""
    return value if job is None else job.groups.gather_objects(value)[0]


def agreed(job: Job, name: str, work: Callable[[], Value]) -> list[Value]:
    """What `work` returns on each rank; where it fails on one, a CaseError on all of them that names it."""
    value, failure = None, None
    try:
        value = work()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    told = job.groups.gather_objects((value, failure))
    for rank, (_, wrong) in enumerate(told):
        if wrong is not None:
            raise CaseError(f"contestant {name!r}: rank {rank}: {wrong}")
    return [each for each, _ in told]


class InJob:
    """A contestant whose ranks are those of the job."""

    def __init__(self, name: str, make: Callable[..., Any], arguments: tuple[Any, ...], job: Job) -> None:
        self.name, self._job = name, job
        self._worker: Any = None
        agreed(job, name, lambda: setattr(self, "_worker", make(job.rank, job.world, *arguments)))

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        return agreed(self._job, self.name, lambda: getattr(self._worker, method)(*arguments))

    def counters(self) -> tuple[LinkBytes, ...]:
        """Of each node, in order."""
        per_node = self._job.topology.ranks_per_node
        return tuple(self._job.groups.gather_objects(node_counters())[::per_node])

    def close(self) -> None:
        self._worker = None
        gc.collect()


def node_counters(table: str | None = None) -> LinkBytes:
    """What this node's network interfaces have carried, whoever sent it; but not what bypasses the kernel (RDMA)."""
    if table is None:
        table = _DEVICES.read_text() if _DEVICES.exists() else ""
    sent = received = loopback = 0
    for row in table.splitlines():
        name, colon, columns = row.partition(":")
        if not colon:
            continue
        counts = [int(count) for count in columns.split()]
        if name.strip() == "lo":
            loopback += counts[8]
        else:
            sent, received = sent + counts[8], received + counts[0]
    return LinkBytes(sent, received, loopback)
