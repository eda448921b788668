"""`stats`, `totals` and `trace`, which users read of a sharded model.

Use `stats` for bytes and seconds per transfer, and for memory. Use `trace` to see when each transfer runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from towpath.core.queues import communicator_bytes
from towpath.core.schedule import sum_by_kind
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.engine.comm import CommContext
from towpath.engine.executor import Engine, engine_of
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import ShardError, StepError
from towpath.observe.record import Trace
from towpath.observe.totals import SentBytes, Totals, TransferStats
from towpath.observe.trace import Interval, write_intervals
from towpath.topology.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(Totals):
    """The totals of a sharded model since `shard`. Bytes are those of all ranks, seconds and memory those of this rank.

    Attributes:
        transfers: Calls, bytes and seconds of each transfer.
        seconds_host: The time of the engine's bookkeeping on the training thread, around each unit's forward and
            backward. Waiting for transfers is not part of it: see `seconds_exposed`.
        last_step: The transfers of the last complete step, in order.
        memory_bytes: The bytes on the device, by kind. "arriving gradients" is an upper bound: the gradients of the
            largest unit, as autograd makes them. "communicators" is an estimate of what NCCL takes itself.
        host_memory_bytes: The bytes in the host's memory, by kind, if the strategy offloads.
        buffers_made: The buffers that the engine has allocated. It makes none after the second step of a training loop.
        islands: The islands that train, at the last exchange if they come and go.
        exchanges_dropped: Exchanges between islands that nobody applied, because one of these had ended.
    """

    last_step: tuple[Transfer, ...]
    memory_bytes: dict[str, int]
    host_memory_bytes: dict[str, int]
    buffers_made: int
    islands: int = 1
    exchanges_dropped: int = 0

    _COUNTS: ClassVar = ("seconds_host", "buffers_made", "exchanges_dropped")

    def __str__(self) -> str:
        heads = f"{'inside nodes':>15} {'between nodes':>15} {'in flight':>10} {'exposed':>10}"
        lines = [f"{'kind':<16} {'calls':>6} {heads}"]
        for kind in dict.fromkeys(t.transfer.kind for t in self.transfers):
            mine = [t for t in self.transfers if t.transfer.kind is kind]
            lines.append(
                f"{kind.value:<16} {sum(t.calls for t in mine):>6} {sum(t.intra_bytes for t in mine):>15,} "
                f"{sum(t.inter_bytes for t in mine):>15,} {sum(t.seconds_in_flight for t in mine):>9.3f}s "
                f"{sum(t.seconds_exposed for t in mine):>9.3f}s"
            )
        memory = ", ".join(f"{k} {v:,}" for k, v in self.memory_bytes.items() if v) or "0"
        lines.append(f"memory: {memory} bytes, in {self.buffers_made} buffers")
        if self.host_memory_bytes:
            held = ", ".join(f"{k} {v:,}" for k, v in self.host_memory_bytes.items() if v)
            lines.append(f"in the host's memory: {held} bytes")
        lines.append(f"the engine itself: {self.seconds_host:.3f}s on the thread that trains")
        return "\n".join(lines)


class Observable(ABC):
    """A model of several parts that communicate: the stages of a pipeline, or a model with wires."""

    @property
    @abstractmethod
    def comms(self) -> list[CommContext]:
        """The communication of the parts on this rank."""

    @abstractmethod
    def stats(self) -> Stats:
        """Return what `towpath.stats` returns, of all parts."""

    @abstractmethod
    def totals(self) -> Totals:
        """Return the counts of all transfers so far, of all parts."""

    @abstractmethod
    def trace_groups(self) -> list[Groups]:
        """Prepare a trace, and return groups through which all ranks meet."""

    @abstractmethod
    def intervals_of_ranks(self, trace: Trace) -> dict[int, tuple[Interval, ...]]:
        """Return the intervals of all ranks' traces by rank, on rank 0. Other ranks get an empty dict."""


def stats(model: nn.Module | Observable) -> Stats:
    """Return calls, bytes and seconds of each transfer so far, and the memory by kind. Printing it gives a table.

    Calls and bytes are always counted. On a GPU, timing costs two events for each transfer and each wait. So seconds
    are counted there from the first call of `stats` for this model, and during a `trace`.

    Args:
        model: A model that `shard` returned, one with `wires`, or a `Pipeline`. Every rank of a pipeline must call it.

    Raises:
        ShardError: The model is not sharded.
    """
    observed = _observed(model)
    return observed.stats() if isinstance(observed, Observable) else stats_of(observed)


def stats_of(engine: Engine) -> Stats:
    """Return the stats of one engine."""
    memory, host_memory = _memory_bytes(engine)
    buckets = [b for unit in engine.units for b in unit.buckets]
    held = (nbytes for b in buckets for each in (b.memory_bytes(), b.host_memory_bytes()) for nbytes in each.values())
    made = engine.weights.made + engine.gradients.made + engine.comm.queues.buffers_made + sum(n > 0 for n in held)
    record = engine.comm.record
    totals = record.totals()
    return Stats(
        transfers=totals.transfers,
        seconds_host=totals.seconds_host,
        last_step=record.last_step,
        memory_bytes=memory,
        host_memory_bytes=host_memory,
        buffers_made=made,
        islands=1 if engine.outer is None else engine.outer.present,
        exchanges_dropped=0 if engine.outer is None else engine.outer.dropped,
    )


def totals(model: nn.Module | Observable) -> Totals:
    """Return the counts of all transfers so far. This takes less time than `stats`, so use it in each step.

    Args:
        model: A model that `shard` returned, one with `wires`, or a `Pipeline`. Every rank of a pipeline must call it.

    Raises:
        ShardError: The model is not sharded.
    """
    observed = _observed(model)
    return observed.totals() if isinstance(observed, Observable) else observed.comm.record.totals()


def time_transfers(model: nn.Module | Observable, times: bool | None) -> None:
    """Count the seconds of transfers and waits on a GPU from now on, or not. None brings back the default.

    By default they are counted from the first call of `stats` or `totals` on.
    """
    for comm in _comms(model):
        comm.record.times = times


def _observed(model: nn.Module | Observable) -> Engine | Observable:
    """Return a model of several parts, or the engine of a model that `shard` returned."""
    if isinstance(model, Observable):
        return model
    wired = getattr(model, "towpath_wires", None)
    if isinstance(wired, Observable):
        return wired
    try:
        return engine_of(model)
    except ShardError as error:
        raise ShardError(f"{error} For a model of FSDP2 or DDP, call towpath.wires() first.") from None


def _comms(model: nn.Module | Observable) -> list[CommContext]:
    observed = _observed(model)
    return observed.comms if isinstance(observed, Observable) else [observed.comm]


def running_trace(model: nn.Module | Observable) -> Trace | None:
    """Return the trace of the `trace` context that is active for `model`, or None."""
    return next((comm.record.trace for comm in _comms(model)), None)


@contextmanager
def trace(model: nn.Module | Observable) -> Generator[Trace]:
    """Record the steps of a sharded model for the duration of a context. Yield the trace.

    After the context the trace's `intervals` hold the computation, the transfers and the codecs over time. Every rank
    must trace the same steps. Ranks start a trace together, which makes their times comparable.

    Args:
        model: A model that `shard` returned, one with `wires`, or a `Pipeline`.

    Raises:
        ShardError: The model is not sharded.
        StepError: A trace of the model is active already.
    """
    observed = _observed(model)
    meshes = observed.trace_groups() if isinstance(observed, Observable) else [observed.comm.job]
    with traced(_comms(model), meshes) as recorded:
        yield recorded


@contextmanager
def traced(comms: Sequence[CommContext], meshes: Sequence[Groups]) -> Generator[Trace]:
    """Record several parts of this rank in one trace. All ranks synchronize through the groups in `meshes` first."""
    records = [comm.record for comm in comms]
    if not records:
        raise StepError("trace: the wires of this model send nothing, because its ranks are on one node.")
    if any(record.trace is not None for record in records):
        raise StepError("trace: this model is being traced already. Leave the first `with tracing.trace(...)` before.")
    for comm in comms:
        comm.queues.finish()
    # The barriers run twice. Ranks may leave the first ones at different times, depending on when they arrived. All
    # arrive at the second ones at about the same time, and so leave them together.
    for groups in (*meshes, *meshes):
        groups.barrier()
    trace = Trace(records[0].timer)
    for record in records:
        record.trace = trace
    try:
        yield trace
        for comm in comms:
            comm.queues.finish()
    finally:
        for record in records:
            record.trace = None
    trace.end()


def intervals_of_ranks(model: nn.Module | Observable, trace: Trace) -> dict[int, tuple[Interval, ...]]:
    """Return the intervals of all ranks by rank on rank 0, and an empty dict on others. Every rank must call it."""
    observed = _observed(model)
    if isinstance(observed, Observable):
        return observed.intervals_of_ranks(trace)
    return dict(enumerate(observed.comm.job.collect_objects(trace.intervals)))


def write_trace(path: Path, model: nn.Module | Observable, trace: Trace) -> None:
    """Write the traces of all ranks in one file, on rank 0. Every rank must call it.

    Args:
        path: The file. Its folder is made if there is none.
        model: A model that `shard` returned, one with `wires`, or a `Pipeline`.
        trace: This rank's trace, after its `trace` context has ended.

    Raises:
        ShardError: The model is not sharded.
    """
    if ranks := intervals_of_ranks(model, trace):
        write_intervals(path, ranks)


def _memory_bytes(engine: Engine) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes by kind that this rank holds on its device, and in host memory."""
    memory = {"weight slots": engine.weights.nbytes, "gradient slots": engine.gradients.nbytes}
    memory["arriving gradients"] = max(unit.plan.arriving_bytes for unit in engine.units)
    memory["wire"] = engine.comm.queues.wire_buffer_bytes
    memory |= communicator_bytes([unit.plan for unit in engine.units])
    if engine.matrix_steps:
        memory["whole matrices"] = sum(steps.nbytes for steps in engine.matrix_steps)
    buckets = [b for unit in engine.units for b in unit.buckets]
    memory |= sum_by_kind(bucket.memory_bytes() for bucket in buckets)
    host_memory = sum_by_kind(bucket.host_memory_bytes() for bucket in buckets)
    if engine.outer is not None:
        if added := engine.outer.plan.communicator_bytes:
            memory["communicators"] = memory.get("communicators", 0) + added
        of_outer, of_outer_on_host = engine.outer.plan.memory_bytes()
        memory, host_memory = memory | of_outer, host_memory | of_outer_on_host
    memory["optimizer"], on_host = _optimizer_bytes(engine)
    if "master" in host_memory:
        host_memory["optimizer"] = on_host
    return memory, host_memory


def _optimizer_bytes(engine: Engine) -> tuple[int, int]:
    """Return the bytes of the optimizer's states on the device, and in the host's memory."""
    buckets = [b for unit in engine.units for b in unit.buckets]
    on_host = {id(p.parameter): b.plan.optimizer_on_host for b in buckets for p in b.layout.places}
    held = [0, 0]
    # By identity, because the members of `towpath.optim.chain` share their states with it.
    states = {
        id(state): (state, on_host[id(parameter)])
        for optimizer in engine.optimizers
        for parameter, state in optimizer.state.items()
        if id(parameter) in on_host
    }
    for state, where in states.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and (isinstance(value, ShardTensor) or value.dim()):
                held[where] += (value.to_local() if isinstance(value, ShardTensor) else value).nbytes
    return held[0], held[1]


# --- pipelines --------------------------------------------------------------------------------------------------------

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
        plan: Callable[[int, int], SentBytes],
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
            gathered = group.all_gather_objects(transfers)
            del gathered[group.rank]
            transfers += [replace(t, seconds_in_flight=0.0, seconds_exposed=0.0) for rank in gathered for t in rank]
        messages = [each for each in self._sent() if each.transfer.kind in _MESSAGES]
        return Stats(
            transfers=merged([*transfers, *messages]),
            seconds_host=sum(one.seconds_host for one in own),
            last_step=tuple(transfer for one in own for transfer in one.last_step),
            memory_bytes=sum_by_kind(one.memory_bytes for one in own),
            host_memory_bytes=sum_by_kind(one.host_memory_bytes for one in own),
            buffers_made=sum(one.buffers_made for one in own),
        )

    def totals(self) -> Totals:
        """Return the counts of all transfers. Every rank must call it.

        Transfers with a coding of other ranks' stages are scaled by what this rank has seen of its own.
        """
        each = [engine.comm.record.totals() for engine in self._engines]
        transfers = merged(transfer for one in each for transfer in one.transfers)
        own = Totals(transfers=transfers, seconds_host=sum(one.seconds_host for one in each))
        seen, sent = own.coded_bytes, self._sent()
        for stats in sent:
            if (coding := stats.transfer.coding) is not None:
                stats.coded_values, stats.coded_messages = seen.get(coding, (0, 0))
        # The schedules have the calls of this rank's stages, too.
        waits = (replace(stats, calls=0) for stats in transfers)
        return replace(own, transfers=merged([*sent, *waits]))


def merged(transfers: Iterable[TransferStats]) -> tuple[TransferStats, ...]:
    """Return one entry for each transfer, as transfers of different stages may be equal. `since` finds them by it."""
    found: dict[Transfer, TransferStats] = {}
    for each in transfers:
        found[each.transfer] = found[each.transfer].plus(each) if each.transfer in found else each
    return tuple(found.values())
