"""The stats and the traces of a pipeline: the transfers of its stages, the messages between them, and waiting times.

A rank measures the transfers of its own stages. The number of messages, and the bytes of all stages, follow from the
number of steps and the job's schedule. The time that a message is in flight is not measured, and counts as zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from towpath.core.exact import exact_codec
from towpath.core.schedule import JobSchedule
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.engine.executor import Engine
from towpath.engine.streams.trace import BETWEEN, INSIDE
from towpath.observing import Stats, Sums, Trace, TransferStats, stats, sums, traced
from towpath.topology.groups import Groups

_MESSAGES = (TransferKind.ACTIVATION, TransferKind.ACTIVATION_GRADIENT)
# By exact codec and dtype: the upper bound of the bytes that are encoded between nodes, and inside nodes.
ExactBytes = dict[tuple[str, str], tuple[int, int]]


# --- stats ------------------------------------------------------------------------------------------------------------


def _exact_bytes(job: JobSchedule) -> ExactBytes:
    found: ExactBytes = {}
    for transfer in job.transfers:
        if transfer.exact:
            key = exact_codec(transfer.move.op), transfer.dtype
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
        # How many optimizer steps were made, and how many steps inside no_sync, by the first step of their schedule.
        self._steps, self._accumulated = Counter[int](), Counter[int]()
        self._planned: dict[tuple[int, int], tuple[Counter[Transfer], Sums, ExactBytes]] = {}
        # For neighbors: in the bubble, and for what links take. On a GPU, the host's seconds, which are not the GPU's.
        self.seconds_waited = 0.0

    @property
    def steps(self) -> int:
        """How many optimizer steps were made."""
        return self._steps.total()

    def count_step(self, step: int, accumulated: int) -> None:
        """Count optimizer step number `step`, which began with `accumulated` steps inside `no_sync`."""
        first = max(first for first in self._changes if first <= step)
        self._steps[first] += 1
        self._accumulated[first] += accumulated

    def planned(self, first: int = 0, accumulated: int = 0) -> tuple[Counter[Transfer], Sums, ExactBytes]:
        """Return how often a step sends each message, the totals of all its transfers, and the bytes of exact ones.

        Every rank must call it.
        """
        # The first call plans all changes of the schedule. Later calls without accumulation then need no other rank.
        keys = [(first, accumulated)]
        for key in keys if self._planned else [*((each, 0) for each in self._changes), *keys]:
            if key not in self._planned:
                job = self._plan(*key)
                sent = Counter(replace(t, micro_step=0) for t in job.transfers if t.kind in _MESSAGES)
                total = Sums(calls=sent.total(), intra_bytes=job.intra_bytes, inter_bytes=job.inter_bytes)
                self._planned[key] = sent, total, _exact_bytes(job)
        return self._planned[first, accumulated]

    def _all_planned(self) -> Iterator[tuple[int, Counter[Transfer], Sums, ExactBytes]]:
        """Yield how often each planned step was made, and what `planned` returns for it. Every rank must call it.

        All steps inside `no_sync` send the same, so a step with several of them is not planned. It counts as several
        steps with one of them, less as many steps without.
        """
        for first, steps in self._steps.items():
            accumulated = self._accumulated[first]
            yield steps - accumulated, *self.planned(first)
            if accumulated:
                yield accumulated, *self.planned(first, 1)

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
        for steps, messages, *_ in self._all_planned():
            for message, count in messages.items():
                sent[message] += steps * count
        return [
            TransferStats(
                each, n, n * each.intra_bytes, n * each.inter_bytes, 0.0, 0.0 if place else self.seconds_waited
            )
            for place, (each, n) in enumerate(sent.items())
        ]

    def sums(self) -> Sums:
        """Return the totals over all transfers. Every rank must call it.

        Exact transfers of other ranks' stages are scaled by what this rank has seen of its own.
        """
        own = Sums()
        for module in self._modules():
            own = own.plus(sums(module))
        planned, shares = list(self._all_planned()), own.exact_shares
        steps = [(count, total) for count, _, total, _ in planned]
        inter, intra = 0.0, 0.0  # what exact transfers have not sent
        for count, *_, exact in planned:
            for key, (between, inside) in exact.items():
                saved = count * (1.0 - shares.get(key, 1.0))
                inter, intra = inter + saved * between, intra + saved * inside
        return replace(
            own,
            calls=own.calls + sum(count * each.calls for count, each in steps),
            intra_bytes=sum(count * each.intra_bytes for count, each in steps) - round(intra),
            inter_bytes=sum(count * each.inter_bytes for count, each in steps) - round(inter),
            exposed_seconds={**own.exposed_seconds, TransferKind.ACTIVATION: self.seconds_waited},
        )


# --- traces -----------------------------------------------------------------------------------------------------------
#
# A traced pipeline shows its passes and the messages between stages, next to what its engines show. A message begins
# when this rank posts it. A received message ends when it is needed, a sent one when the schedule waits for it. Outside
# its passes a rank waits for its neighbors. Backends that batch messages, such as NCCL, do not show them.


class StageTrace:
    """The trace of one rank's stages, while there is one."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self._leaves_node: Callable[[int], bool] = lambda stage: True

    @contextmanager
    def recording(
        self, engines: Sequence[Engine], meshes: Sequence[Groups], leaves_node: Callable[[int], bool]
    ) -> Generator[Trace]:
        """Record a trace. `leaves_node` tells whether messages between a stage and the next one go to another node."""
        with traced(engines, meshes) as trace:
            self.trace, self._leaves_node = trace, leaves_node
            try:
                yield trace
            finally:
                self.trace = None

    def walking(self) -> AbstractContextManager[None]:
        """Return a context that runs the whole schedule, and counts as waiting outside of passes."""
        return nullcontext() if self.trace is None else self.trace.phase("for neighbors", waiting=True)

    def computing(self, work: str, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        """Return a context for one pass of a stage."""
        name = f"{work} of stage {stage}, micro-batch {micro_batch}"
        return nullcontext() if self.trace is None else self.trace.phase(name)

    def messages(self, operations: list[dist.P2POp], kind: str, stage: int, micro_batch: int) -> list[dist.P2POp]:
        """Return `operations`, changed so that the trace shows them. Their link is between `stage` and the next one."""
        if self.trace is not None:
            track = BETWEEN if self._leaves_node(stage) else INSIDE
            for each in operations:
                word = "sent" if each.op is dist.isend else "received"
                name = f"{kind}, micro-batch {micro_batch}, {word}"
                about: dict[str, str | int] = {"bytes": each.tensor.nbytes, "micro_step": micro_batch}
                each.op = _traced_post(each.op, self.trace, track, name, about)
        return operations


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
