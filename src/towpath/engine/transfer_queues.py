"""The queues of one model's transfers: what a job is, how it runs on a GPU, and the queues that jobs are submitted to.

The executor submits a job as data: the transfers, and the memory that each of them reads and writes. A stream runs the
jobs of a queue in their order, concurrently with the computation. `CudaStream` does so on a GPU, and `ThreadStream`
(`threads.py`) on a CPU. For what runs, it makes no difference: `RankTransfer.run` records it, and explains its errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from towpath.codecs.exact import MessageError
from towpath.collectives.collective import Collective, GroupRank, WireBuffers, Workspace
from towpath.core.buffers import Needs, largest
from towpath.core.queues import HOST_QUEUES, QUEUES
from towpath.core.strategy import OUTER_KINDS, WITH_TRANSPORT, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.unit_plan import UnitPlan
from towpath.engine.agree.digest import CollectiveLog
from towpath.engine.agree.status import has_ended, is_capturing, relaxed
from towpath.errors import StepError
from towpath.observe.record import Record, TransferWait, profiled


@final
class RankTransfer:
    """A transfer with the collective that executes it on this rank. Several may run as one: these are coalesced.

    `transfers` are those of the schedule, and `transfer` is the first of them. `describe_ranks` says what some other
    ranks reported last.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        members: GroupRank,
        collective: Collective,
        record: Record,
        describe_ranks: Callable[[Sequence[int]], str],
    ) -> None:
        self.transfers, self.transfer = tuple(transfers), transfers[0]
        self.members, self.collective = members, collective
        self._record, self._describe_ranks = record, describe_ranks

    def run(self, region: Any, shard: Any, workspace: Workspace) -> None:
        """Execute the transfer in the order of the current stream. On a CPU, complete it before returning.

        Coalesced transfers take a list of regions and one of shards. `OwnersExchange` has its own memory.
        """
        with self._record.running(self.transfers, workspace), self.explained():
            self.collective.run(region, shard, workspace)

    def begin(self, region: Any, shard: Any, workspace: Workspace) -> None:
        """Start the non-blocking first phase, before this transfer's turn in the queue."""
        with self.explained():
            self.collective.begin(region, shard, workspace)

    @contextmanager
    def explained(self) -> Generator[None]:
        """Turn an error inside the block into a StepError that names the transfer and the possible causes."""
        try:
            yield
        except MessageError as error:
            raise StepError(f"rank {self.members.number}: {self.transfer} failed: {error}") from error
        except RuntimeError as error:
            members = self.members
            others = [r for r in members.group.ranks if r != members.rank]
            numbers = ", ".join(str(members.first + other) for other in others)
            if self.transfer.kind not in OUTER_KINDS:  # an island can go on without the others
                found, _, _ = str(error).partition(". This is")  # gloo's advice follows
                self._record.watchdog.status.broken = f"{self.transfer} failed: {found}."
            raise StepError(
                f"rank {members.number}: {self.transfer} failed: {error}\nIf this speaks of a connection or of time, "
                f"one of its peers (rank {numbers}) has died, hangs, is at another step, has had fewer batches or has "
                "lost its link. See what it printed, and restart the job from the last checkpoint. If it said nothing, "
                f"`towpath doctor` examines the network. {self._describe_ranks(others)}"
            ) from error


# What a job computes before, between and after its transfers: casts, copies, sums. It runs in the order of the queue.
Work = Callable[[Workspace], object]


@dataclass(frozen=True, slots=True)
class StreamJob:
    """The work that a stream does for one submission.

    `works` run one after the other. `begin`, if any, is the non-blocking first part of the first of them. It may run
    before the preceding job has ended. Jobs with the same `Workspace.buffer_index` never overlap.
    """

    workspace: Workspace
    works: Sequence[Work]
    begin: Work | None = None


class Handle(ABC):
    """The end of a job. `Stream.submit` returns it, and the engine waits on it before it uses the job's results."""

    @abstractmethod
    def wait(self, on_host: bool = False) -> None:
        """Return once the job's results may be used by what the caller computes next. Record the time of the wait.

        `on_host`: Whether the host waits, too. Otherwise only the current CUDA stream waits on a GPU.
        """

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether the job has ended, so that the host may read its results without a wait."""

    def block(self) -> None:
        """Return once the job has ended. Threads that run transfers call it. Their waits are not recorded."""
        self.wait(on_host=True)


class Stream(ABC):
    """A runner of jobs, which execute in order and concurrently with the computation.

    Up to `depth` jobs may be under way at a time. Each has its own buffer index, and so its own wire
    buffers and tags.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self._buffer_index = depth, 0

    def next_buffer_index(self) -> int:
        """Return the buffer index of the next job to be submitted. Every rank must submit the same jobs."""
        self._buffer_index = (self._buffer_index + 1) % self.depth
        return self._buffer_index

    @abstractmethod
    def submit(self, job: StreamJob, after: Sequence[Handle] = (), waiting: TransferWait | None = None) -> Handle:
        """Queue a job, which starts after earlier jobs with its buffer index, and after what was computed so far.

        `waiting`: The object to which waits for the job are reported.
        """

    @abstractmethod
    def finish(self) -> None:
        """Return once the results of all jobs may be used by what the caller does next."""

    @abstractmethod
    def uses(self, buffer_index: int, buffer: torch.Tensor) -> None:
        """Keep the memory of `buffer` for jobs with this index, even if the caller drops it before they end."""


@final
class CudaStream(Stream):
    """A stream on a GPU: one CUDA stream per buffer index.

    Jobs are enqueued at once, and events order them with the computation. Jobs with different indices overlap as far as
    their process groups allow. Only `after` orders them. The kernels of a stream with `priority` -1 start before
    kernels of the computation that wait for a multiprocessor.
    """

    def __init__(self, device: torch.device, depth: int, priority: int = 0) -> None:
        super().__init__(depth)
        self._streams = [torch.cuda.Stream(device, priority=priority) for _ in range(depth)]

    def submit(self, job: StreamJob, after: Sequence[Handle] = (), waiting: TransferWait | None = None) -> Handle:
        """Enqueue `job` on the CUDA stream of its buffer index."""
        # The new work follows everything that the computation has enqueued so far, and the results of `after`. The
        # host waits for neither. So a gather may not overwrite a slot that is still being read, and a reduction finds
        # the gradients complete. The event marks the end of the job, for the computation and for later jobs.
        stream = self._streams[job.workspace.buffer_index]
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream), torch.no_grad():
            for handle in after:
                assert isinstance(handle, _CudaHandle)
                handle.join()
            # PyTorch orders a collective with the current stream, whichever stream the backend itself uses.
            for work in job.works:
                work(job.workspace)
        # The event has no timing, which would cost the host some microseconds more.
        event = torch.cuda.Event()
        event.record(stream)
        if waiting is not None:
            waiting.enqueued(event)
        return _CudaHandle(event, stream.device, waiting)

    def finish(self) -> None:
        """Let the current stream wait for all jobs. The host does not wait."""
        for stream in self._streams:
            # Also the memory that the jobs have used may be reused afterwards.
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def uses(self, buffer_index: int, buffer: torch.Tensor) -> None:
        """Keep the caching allocator from reusing the memory of `buffer` before this stream has finished with it."""
        buffer.record_stream(self._streams[buffer_index])


@final
class _CudaHandle(Handle):
    """The handle of a job on a `CudaStream`: an event behind the job."""

    def __init__(self, event: torch.cuda.Event, device: torch.device, waiting: TransferWait | None) -> None:
        self._event, self._device, self._waiting = event, device, waiting

    def _wait(self, on_host: bool) -> None:
        self.join()
        if on_host:
            self._event.synchronize()

    def join(self) -> None:
        """Let the current stream wait. It is not recorded: on a stream of transfers, no computation waits."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def has_ended(self) -> bool:
        return has_ended(self._event)

    def block(self) -> None:
        with relaxed():
            self._event.synchronize()

    def wait(self, on_host: bool = False) -> None:
        """Let the current stream wait, and with `on_host` the host, too. Record the time."""
        # In the capture of a CUDA graph, events can be neither queried nor timed.
        if self._waiting is None or is_capturing():
            self._wait(on_host)
            return
        with self._waiting.profiled():
            # Once the job has ended, there is no wait to time.
            if not self._waiting.is_timed or has_ended(self._event):
                self._wait(on_host)
                return
            began = self._waiting.mark()
            self._wait(on_host)
            self._waiting.waited(began, self._waiting.mark())


class Queues:
    """The queues of transfers of one model on one rank. Every rank must submit the same transfers in the same order.

    It holds the wire buffers of each queue. The executor submits jobs here, and gets a handle to wait for each.
    """

    def __init__(self, streams: Mapping[str, Stream], device: torch.device, record: Record, log: CollectiveLog) -> None:
        self._streams, self._device, self._record, self._log = streams, device, record, log
        self.micro_step = 0
        self._buffers: dict[str, list[WireBuffers]] = {}  # by queue and buffer index
        self._sizes: dict[str, Needs] = {}  # the sizes of these buffers, by queue
        self._needs: dict[TransferKind, Needs] = {}  # sizes that the plans need, for kinds not submitted so far
        self.always: dict[TransferKind, Needs] = {}  # sizes for kinds that are in no plan of a unit
        self.names = dict(QUEUES)  # the queue of each kind
        self._made_before = 0  # the number of buffers made before, which were replaced since

    def plan(self, plans: Iterable[UnitPlan]) -> None:
        """Use the transfers of `plans` from now on, with wire buffers as large as the largest of them needs."""
        plans = tuple(plans)
        self._needs = {kind: largest(plan.wire_needs(kind) for plan in plans) for kind in WITH_TRANSPORT} | self.always
        # Read before the buffers are dropped, because it counts them, too.
        self._made_before = self.buffers_made
        self._buffers.clear()
        self._sizes.clear()

    def submit(
        self,
        kind: TransferKind,
        transfers: Sequence[RankTransfer],
        works: Sequence[Work],
        after: Sequence[Handle] = (),
        begin: Work | None = None,
    ) -> Handle:
        """Submit a job to the queue of `kind`. `transfers` are those that its works run, in their order.

        `begin`: The first part of the first transfer. It may run as soon as the job before has released the links.
        """
        record = self._record
        # A transfer that the peers will never join would hang.
        record.watchdog.raise_if_diverged()
        submitted = [transfer for bound in transfers for transfer in bound.transfers]
        record.submitted(submitted, self.micro_step)
        if submitted:
            # Ranks compare this log at the boundary: whatever order their hooks ran in, the transfers must be the same.
            self._log.note(kind, submitted[0].unit)
            record.watchdog.log = self._log
        stream = self._streams[self.names[kind]]
        # Jobs of a queue that may overlap get different buffers and tags. All ranks count alike.
        index = stream.next_buffer_index()
        watch = None if record.trace is None else record.trace.watch_codecs(self.micro_step)
        buffers = self._buffers_for(kind, stream)[index]
        job = StreamJob(Workspace(buffers, index, stream.depth, self.micro_step, watch), works, begin)
        with profiled("submit ", submitted):
            return stream.submit(job, after, TransferWait(record, submitted))

    def _buffers_for(self, kind: TransferKind, stream: Stream) -> list[WireBuffers]:
        """Return the wire buffers of the queue, by their index. Make larger ones first if `kind` needs them."""
        # The submitting thread makes the buffers. If a job allocated memory on its own CUDA stream, the allocator could
        # give it to another stream too early.
        #
        # Larger buffers replace the old ones. A transfer that has begun keeps the buffers that it began with.
        name = self.names[kind]
        size = largest([self._sizes.get(name, {}), self._needs.pop(kind, {})])
        if name not in self._buffers or size != self._sizes[name]:
            made = sum(b.made for b in self._buffers.get(name, ()))
            device = torch.device("cpu") if name in HOST_QUEUES else self._device
            self._buffers[name] = [
                WireBuffers(device, partial(stream.uses, buffer_index)) for buffer_index in range(stream.depth)
            ]
            self._sizes[name], self._made_before = size, self._made_before + made
            for buffers in self._buffers[name]:
                buffers.reserve(size)
        return self._buffers[name]

    def finish(self) -> None:
        """Return once the caller may use the results of all submitted jobs. Do not raise if one failed."""
        for stream in self._streams.values():
            stream.finish()

    @property
    def wire_buffer_bytes(self) -> int:
        """The bytes of all wire buffers on the device."""
        return sum(b.nbytes for name, each in self._buffers.items() if name not in HOST_QUEUES for b in each)

    @property
    def buffers_made(self) -> int:
        """Number of wire buffers made so far, including replaced ones."""
        return self._made_before + sum(b.made for each in self._buffers.values() for b in each)
