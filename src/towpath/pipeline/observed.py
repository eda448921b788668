"""The stats and the traces of a pipeline: the transfers of its stages, the messages between them, and waiting times.

A rank measures the transfers of its own stages. The number of messages, and the bytes of all stages, follow from the
number of steps and the job's schedule. The time that a message is in flight is not measured, and counts as zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from towpath.core.schedule import sum_by_kind
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.engine.executor import Engine
from towpath.observe.record import Trace
from towpath.observe.stats import Stats, stats_of
from towpath.observe.totals import Totals, TransferStats
from towpath.pipeline.schedules import JobSchedule
from towpath.topology.groups import Groups

_MESSAGES = (TransferKind.ACTIVATION, TransferKind.ACTIVATION_GRADIENT)


class StepCounter:
    """The number of steps of a pipeline so far, and the stats that follow from it.

    `engines` are those of this rank. `plan` returns the job's schedule of an optimizer step with a number of steps
    inside `no_sync`. `changes` has the steps from which on the schedule is different. All ranks with other modules meet
    through one of the `groups` after the other.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        plan: Callable[[int, int], JobSchedule],
        changes: Set[int],
        groups: Sequence[Groups],
    ) -> None:
        self._engines, self._plan, self._groups = engines, plan, groups
        self._changes = sorted({0, *changes})
        self.steps = 0  # how many optimizer steps were made
        # How many steps there were of each schedule: of the first step that has it, with no or one step inside no_sync.
        self._counts = Counter[tuple[int, int]]()
        self._planned: dict[tuple[int, int], list[TransferStats]] = {}
        # For neighbors: in the bubble, and for what links take. On a GPU, the host's seconds, which are not the GPU's.
        self.seconds_waited = 0.0

    def count_step(self, step: int, accumulated: int) -> None:
        """Count optimizer step number `step`, which began with `accumulated` steps inside `no_sync`.

        All steps inside `no_sync` send the same, so a step with several of them is not planned. It counts as several
        steps with one of them, less as many steps without.
        """
        first = max(first for first in self._changes if first <= step)
        self.steps += 1
        self._counts[first, 0] += 1 - accumulated
        self._counts[first, 1] += accumulated

    def _sent(self) -> list[TransferStats]:
        """Return the calls of all transfers of the job in the steps so far, by its schedules. Every rank must call it.

        The first message has the seconds in which this rank waited for any of them.
        """
        found: list[TransferStats] = []
        for key, count in self._counts.items():
            if count and key not in self._planned:
                calls = Counter(transfer.in_micro_step(0) for transfer in self._plan(*key).transfers)
                self._planned[key] = [TransferStats.of(transfer, calls=n) for transfer, n in calls.items()]
            found += [replace(each, calls=count * each.calls) for each in self._planned[key]] if count else []
        if first := next((each for each in found if each.transfer.kind in _MESSAGES), None):
            first.seconds_exposed = self.seconds_waited
        return found

    def stats(self) -> Stats:
        """Return the stats of this rank's stages, with the transfers of all ranks. Every rank must call it."""
        own = [stats_of(engine) for engine in self._engines]
        transfers = [transfer for one in own for transfer in one.transfers]
        for group in self._groups:
            gathered = group.gather_objects(transfers)
            del gathered[group.rank]
            transfers += [replace(t, seconds_in_flight=0.0, seconds_exposed=0.0) for rank in gathered for t in rank]
        messages = [each for each in self._sent() if each.transfer.kind in _MESSAGES]
        return Stats(
            transfers=_merged([*transfers, *messages]),
            seconds_host=sum(one.seconds_host for one in own),
            last_step=tuple(transfer for one in own for transfer in one.last_step),
            memory_bytes=sum_by_kind(one.memory_bytes for one in own),
            host_memory_bytes=sum_by_kind(one.host_memory_bytes for one in own),
            buffers_made=sum(one.buffers_made for one in own),
        )

    def totals(self) -> Totals:
        """Return the counts of all transfers. Every rank must call it.

        Exact transfers of other ranks' stages are scaled by what this rank has seen of its own.
        """
        each = [engine.comm.record.totals() for engine in self._engines]
        transfers = _merged(transfer for one in each for transfer in one.transfers)
        own = Totals(transfers=transfers, seconds_host=sum(one.seconds_host for one in each))
        seen, sent = own.coded_bytes, self._sent()
        for stats in sent:
            if (coding := stats.transfer.coding) is not None:
                stats.coded_values, stats.coded_messages = seen.get(coding, (0, 0))
        # The schedules have the calls of this rank's stages, too.
        waits = (replace(stats, calls=0) for stats in transfers)
        return replace(own, transfers=_merged([*sent, *waits]))


def _merged(transfers: Iterable[TransferStats]) -> tuple[TransferStats, ...]:
    """Return one entry for each transfer, as transfers of different stages may be equal. `since` finds them by it."""
    found: dict[Transfer, TransferStats] = {}
    for each in transfers:
        found[each.transfer] = found[each.transfer].plus(each) if each.transfer in found else each
    return tuple(found.values())


# A traced pipeline shows its passes and the messages between stages, next to what its engines show. A message begins
# when this rank posts it. A received message ends when it is needed, a sent one when the schedule waits for it. Outside
# its passes a rank waits for its neighbors. Backends that batch messages, such as NCCL, do not show them.


def trace_messages(operations: Iterable[dist.P2POp], trace: Trace, track: str, kind: str, micro_batch: int) -> None:
    """Change the operations of messages so that they add themselves to `trace`."""
    for each in operations:
        word = "sent" if each.op is dist.isend else "received"
        name = f"{kind}, micro-batch {micro_batch}, {word}"
        about: dict[str, str | int] = {"bytes": each.tensor.nbytes, "micro_step": micro_batch}
        each.op = _traced_post(each.op, trace, track, name, about)


def _traced_post(
    post: Callable[..., Any], trace: Trace, track: str, name: str, about: dict[str, str | int]
) -> Callable[..., Any]:
    """Return a function that posts a message like `post`, and adds it to a trace."""

    def traced_post(*args: Any, group_src: int | None = None, group_dst: int | None = None, **others: Any) -> Any:
        # PyTorch recognizes a send by its function, and so takes this one for a receive.
        peer = group_dst if group_dst is not None else group_src
        began = trace.mark()
        work = post(*args, **{"group_dst" if post is dist.isend else "group_src": peer}, **others)
        ended = lambda: trace.add(track, name, began, trace.mark(), about)  # noqa: E731
        return None if work is None else _TracedWork(work, ended)

    return traced_post


class _TracedWork:
    """The work of a posted message. `ended` is called once it was waited for."""

    def __init__(self, work: Any, ended: Callable[[], None]) -> None:
        self._work, self._ended = work, ended

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        found = self._work.wait(*args, **kwargs)
        self._ended()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
