"""What a pipeline has done: the transfers of its stages, the messages between them, and how long each rank waited.

A rank counts the transfers of its own stages; messages, and the bytes of all stages together, follow from the number of
steps that were made and the job's schedule. How long a message is in flight nobody measures: it counts as nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from towpath.core.schedule import JobSchedule
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.observing import Stats, Sums, TransferStats, stats, sums

_MESSAGES = (TransferKind.ACTIVATION, TransferKind.ACTIVATION_GRADIENT)


class Observed:
    """`modules`: those of this rank that have an engine. `plan`: makes the job's schedule of an optimizer step, which
    all ranks must ask for at the same time. `changes`: the steps from which on it is another. `groups`: through which
    all ranks that have other modules meet, one after the other. `seconds_waited`: for neighbours, in the bubble as for
    what links take."""

    def __init__(
        self,
        modules: Callable[[], Iterable[nn.Module]],
        plan: Callable[[int, int], JobSchedule],
        changes: Set[int],
        groups: Sequence[dist.ProcessGroup],
    ) -> None:
        self._modules, self._plan, self._groups = modules, plan, groups
        self._changes = sorted({0, *changes})
        # How many optimizer steps were made, by the first step of their schedule and their steps inside no_sync.
        self._steps = Counter[tuple[int, int]]()
        self._jobs: dict[tuple[int, int], tuple[JobSchedule, Sums]] = {}
        self.seconds_waited = 0.0

    @property
    def steps(self) -> int:
        return self._steps.total()

    def count_step(self, step: int, accumulated: int) -> None:
        """Count an optimizer step that is through; `step`: how many there were before it, other runs' among them."""
        self._steps[max(first for first in self._changes if first <= step), accumulated] += 1

    def job(self, first: int = 0, accumulated: int = 0) -> tuple[JobSchedule, Sums]:
        """Return the job's schedule of a step, with its messages and the bytes of all stages. Every rank must call
        it."""
        if (first, accumulated) not in self._jobs:
            job = self._plan(first, accumulated)
            messages = sum(t.kind in _MESSAGES for t in job.transfers)
            sums = Sums(calls=messages, intra_bytes=job.intra_bytes, inter_bytes=job.inter_bytes)
            self._jobs[first, accumulated] = job, sums
        return self._jobs[first, accumulated]

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
            told: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, transfers, group=group)
            del told[dist.get_rank(group)]
            transfers += [replace(t, seconds_in_flight=0.0, seconds_exposed=0.0) for each in told for t in each]
        # Transfers of different stages may be equal. Differences between two stats find them by their transfer.
        total: dict[Transfer, TransferStats] = {}
        for one in (*transfers, *self._messages()):
            total[one.transfer] = one.plus(total[one.transfer]) if one.transfer in total else one
        return Stats(
            tuple(total.values()),
            tuple(transfer for one in each for transfer in one.last_step),
            dict(memory),
            sum(one.buffers_made for one in each),
            sum(one.seconds_host for one in each),
            dict(host_memory),
        )

    def _messages(self) -> list[TransferStats]:
        """By kind and wire; the seconds are those of waiting for any of them."""
        found: dict[Transfer, TransferStats] = {}
        for (first, accumulated), steps in self._steps.items():
            for transfer in self.job(first, accumulated)[0].transfers:
                if transfer.kind in _MESSAGES:
                    alike = replace(transfer, micro_step=0)
                    before = found.get(alike, TransferStats(alike, 0, 0, 0, 0.0, 0.0))
                    found[alike] = replace(
                        before,
                        calls=before.calls + steps,
                        intra_bytes=before.intra_bytes + steps * transfer.intra_bytes,
                        inter_bytes=before.inter_bytes + steps * transfer.inter_bytes,
                    )
        if found:
            first = next(iter(found))
            found[first] = replace(found[first], seconds_exposed=self.seconds_waited)
        return list(found.values())

    def sums(self) -> Sums:
        """Quick: for a look after every step. Every rank must call it."""
        own = Sums()
        for module in self._modules():
            own = own.plus(sums(module))
        steps = [(count, self.job(*key)[1]) for key, count in self._steps.items()]
        return replace(
            own,
            calls=own.calls + sum(count * each.calls for count, each in steps),
            intra_bytes=sum(count * each.intra_bytes for count, each in steps),
            inter_bytes=sum(count * each.inter_bytes for count, each in steps),
            exposed_seconds={**own.exposed_seconds, TransferKind.ACTIVATION: self.seconds_waited},
        )
