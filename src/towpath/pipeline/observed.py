"""The stats and the traces of a pipeline: the transfers of its stages, the messages between them, and waiting times.

A rank measures the transfers of its own stages. The number of messages, and the bytes of all stages, follow from the
number of steps and the job's schedule. The time that a message is in flight is not measured, and counts as zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from towpath.core.schedule import JobSchedule
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.observe.stats import Stats, Sums, Trace, TransferStats, stats, sums
from towpath.topology.groups import Groups

_MESSAGES = (TransferKind.ACTIVATION, TransferKind.ACTIVATION_GRADIENT)
# By coding: the upper bound of the bytes that are encoded between nodes, and inside nodes.
CodedBytes = dict[tuple[str, str], tuple[int, int]]


def _coded_bytes(job: JobSchedule) -> CodedBytes:
    found: CodedBytes = {}
    for transfer in job.transfers:
        if (key := transfer.coding) is not None:
            between, inside = found.get(key, (0, 0))
            inside += transfer.intra_bytes if transfer.encoded_inside else 0
            found[key] = between + transfer.inter_bytes, inside
    return found


class StepCounter:
    """The number of steps of a pipeline so far, and the stats that follow from it.

    `modules` returns the modules of this rank that have an engine. `plan` returns the job's schedule of an optimizer
    step with a number of steps inside `no_sync`. `changes` has the steps from which on the schedule is different. All
    ranks with other modules meet through one of the `groups` after the other.
    """

    def __init__(
        self,
        modules: Callable[[], Iterable[nn.Module]],
        plan: Callable[[int, int], JobSchedule],
        changes: Set[int],
        groups: Sequence[Groups],
    ) -> None:
        self._modules, self._plan, self._groups = modules, plan, groups
        self._changes = sorted({0, *changes})
        self.steps = 0  # how many optimizer steps were made
        # How many steps there were of each schedule: of the first step that has it, with no or one step inside no_sync.
        self._counts = Counter[tuple[int, int]]()
        self._planned: dict[tuple[int, int], tuple[Counter[Transfer], Sums, CodedBytes]] = {}
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

    def _counted(self) -> Iterator[tuple[int, Counter[Transfer], Sums, CodedBytes]]:
        """Yield how often each schedule was executed, its messages, its totals, and its coded transfers.

        Every rank must call it.
        """
        for key, count in self._counts.items():
            if count and key not in self._planned:
                job = self._plan(*key)
                sent = Counter(replace(t, micro_step=0) for t in job.transfers if t.kind in _MESSAGES)
                total = Sums(calls=sent.total(), intra_bytes=job.intra_bytes, inter_bytes=job.inter_bytes)
                self._planned[key] = sent, total, _coded_bytes(job)
            if count:
                yield count, *self._planned[key]

    def stats(self) -> Stats:
        """Return the stats of this rank's stages, with the transfers of all ranks. Every rank must call it."""
        each = [stats(module) for module in self._modules()]
        memory: Counter[str] = Counter()
        host_memory: Counter[str] = Counter()
        for one in each:
            memory.update(one.memory_bytes)
            host_memory.update(one.host_memory_bytes)
        transfers = [transfer for one in each for transfer in one.transfers]
        for group in self._groups:
            gathered = group.gather_objects(transfers)
            del gathered[group.rank]
            transfers += [replace(t, seconds_in_flight=0.0, seconds_exposed=0.0) for rank in gathered for t in rank]
        # Transfers of different stages may be equal. Differences between two stats find them by their transfer.
        total: dict[Transfer, TransferStats] = {}
        for one in (*transfers, *self._messages()):
            total[one.transfer] = total[one.transfer].plus(one) if one.transfer in total else one
        return Stats(
            tuple(total.values()),
            tuple(transfer for one in each for transfer in one.last_step),
            dict(memory),
            sum(one.buffers_made for one in each),
            sum(one.seconds_host for one in each),
            dict(host_memory),
        )

    def _messages(self) -> list[TransferStats]:
        """Return the messages by kind and transport. The first one has the seconds of waiting for any of them."""
        sent: Counter[Transfer] = Counter()
        for steps, messages, *_ in self._counted():
            for message, count in messages.items():
                sent[message] += steps * count
        waited = [self.seconds_waited, *[0.0] * len(sent)]
        return [
            TransferStats(each, n, n * each.intra_bytes, n * each.inter_bytes, 0.0, seconds)
            for (each, n), seconds in zip(sent.items(), waited, strict=False)
        ]

    def sums(self) -> Sums:
        """Return the totals over all transfers. Every rank must call it.

        Exact transfers of other ranks' stages are scaled by what this rank has seen of its own.
        """
        own = Sums()
        for module in self._modules():
            own = own.plus(sums(module))
        calls, intra, inter, shares = own.calls, 0.0, 0.0, own.encoded_shares
        for count, _, total, coded in self._counted():
            calls += count * total.calls
            intra, inter = intra + count * total.intra_bytes, inter + count * total.inter_bytes
            for key, (between, inside) in coded.items():  # without what was saved
                saved = count * (1.0 - shares.get(key, 1.0))
                intra, inter = intra - saved * inside, inter - saved * between
        exposed = {**own.exposed_seconds, TransferKind.ACTIVATION: self.seconds_waited}
        return replace(own, calls=calls, intra_bytes=round(intra), inter_bytes=round(inter), exposed_seconds=exposed)


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
