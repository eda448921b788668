"""Finds what a GPU could do in another order than a CPU did: an engine's own run, by the rules of CUDA's streams.

The engine runs on real gloo ranks, on one thread. Only its streams are others (`LogicalStream`): a job runs when it is
submitted, and all it reads and writes is noted as of a logical stream. Nothing orders two streams but

    submit     the stream waits for what the submitting one has computed so far, and for the handles in `after`
    a wait     the stream that waits comes after the job
    the host   what is enqueued after the host has read a value comes after that value
    a message  comes after what was computed before it was posted; what waits for it comes after it
               so does a collective that the caller does not wait for at once: NCCL runs it on a stream of its own

What lies in the host's memory (`host_memory`) the host itself works on, at once and in its own order: it comes after
nothing that a stream does, unless the host has waited for it. A copy between that and the device is the stream's.
Exchanges of islands run on a thread of the host. It works there in an order of its own: after what the host had done,
and the handles in `after`.

Two accesses to the same bytes, one of them a write, which no chain of these orders, are a race: on a GPU either could
come first. So is memory that is dropped while a stream may still use it which is neither the one that made it, since
the allocator gives it away there, nor was told of (`Stream.uses`, which is `Tensor.record_stream`).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from operator import mul
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import towpath.codecs.packing
import towpath.collectives.backend
from towpath.codecs.kernels import Kernels
from towpath.collectives import point_to_point as messages
from towpath.core.queues import HOST_EXCHANGES
from towpath.engine import comm
from towpath.engine.agree import boundary
from towpath.engine.agree.watchdog import Watchdog
from towpath.engine.comm import Streams
from towpath.engine.parameters import bucket as parameter_memory
from towpath.engine.parameters import gradients as optimizer_memory
from towpath.engine.parameters import shard_spec as encoded_shard
from towpath.engine.parameters.partial_sums import Partial
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.engine.transfer_queues import Handle, Stream, StreamJob
from towpath.observe.record import TransferWait
from towpath.outer import sync

COMPUTATION, HOST = "computation", "the host"

Clock = dict[str, int]  # by stream: up to which of its accesses


class RaceError(AssertionError):
    """Two accesses in no order."""


@dataclass(frozen=True, slots=True)
class Access:
    stream: str
    time: int
    start: int
    end: int
    writes: bool
    task: str

    def __str__(self) -> str:
        return f"{self.task} {'writes' if self.writes else 'reads'} bytes {self.start} to {self.end} on {self.stream!r}"


@dataclass(slots=True)
class Memory:
    """Of one storage, as long as it lives. `made_on`: the stream that the allocator keeps it for. `on_host`: it is the
    host's, whose allocator notices by itself which streams copy from it."""

    reference: StorageWeakRef
    made_on: str
    accesses: list[Access] = field(default_factory=list)
    told_of: set[str] = field(default_factory=set)
    on_host: bool = False


# What of the arguments the backends' operations write and read, by position.
_COMMUNICATION: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "send": ((), (0,)),
    "recv_": ((0,), ()),
    "broadcast_": ((0,), (0,)),
    "allreduce_": ((0,), (0,)),
    "allgather_": ((0,), (1,)),
    "_allgather_base_": ((0,), (1,)),
    "reduce_scatter_": ((0,), (1,)),
    "_reduce_scatter_base_": ((0,), (1,)),
    "gather_": ((0,), (1,)),
    "scatter_": ((0,), (1,)),
    "alltoall_base_": ((0,), (1,)),
    "barrier": ((), ()),
}
_HOST_READS = re.compile(r"aten\.(_local_scalar_dense|is_nonzero|equal|item)\b")
_COPIES = re.compile(r"aten\.(copy_|_to_copy)\b")
_NO_DATA = re.compile(r"aten\.(empty|new_empty|empty_like|empty_strided|new_empty_strided|set_|resize_)\b")


@dataclass(frozen=True, slots=True)
class _Operation:
    """What an operation's schema says. `arguments`: their names, and which are written. `has_data`: it reads or writes
    what lies in memory."""

    name: str
    arguments: tuple[tuple[str, bool], ...]
    has_data: bool


@cache
def _operation(func: Any) -> _Operation:
    written = ((a.name, a.alias_info is not None and a.alias_info.is_write) for a in func._schema.arguments)
    return _Operation(str(func), tuple(written), not _NO_DATA.match(str(func)))


class Checker(TorchDispatchMode):
    """Inside `with checker:`, every operation on this thread is noted; at the first race it raises."""

    def __init__(self) -> None:
        super().__init__()
        self._clocks: dict[str, Clock] = {COMPUTATION: {}}
        self._host: Clock = {}
        self._current, self._task, self._is_thread = COMPUTATION, "", False
        self._memory: dict[int, Memory] = {}
        self._shared: dict[int, Memory] = {}  # used by streams that did not make them
        self.communications: list[str] = []  # the process groups that sent, in the order of the host
        self.operations = 0

    # Streams --------------------------------------------------------------------------------------------------------

    @contextmanager
    def on(self, stream: str, task: str, after: Sequence[Clock] = ()) -> Generator[None]:
        """What runs inside runs on that stream, after what this one has done so far."""
        clock = self._clocks.setdefault(stream, {})
        for known in (self._clocks[self._current], *after):
            _join(clock, known)
        before = self._current, self._task
        self._current, self._task = stream, task
        try:
            yield
        finally:
            self._current, self._task = before

    @contextmanager
    def on_thread(self, thread: str, task: str, after: Sequence[Clock] = ()) -> Generator[None]:
        """What runs inside runs on that thread of the host."""
        clock = self._clocks.setdefault(thread, {})
        for known in (self._host, *after):
            _join(clock, known)
        before = self._current, self._task
        self._current, self._task, self._is_thread = thread, task, True
        try:
            yield
        finally:
            (self._current, self._task), self._is_thread = before, False

    def done(self, stream: str) -> Clock:
        """What has been done on a stream so far."""
        return dict(self._clocks[stream])

    def wait(self, clock: Clock, on_host: bool = False) -> None:
        """The current stream goes on only after that, and the host."""
        _join(self._clocks[self._current], clock)
        if on_host:
            _join(self._host, clock)

    def found_ended(self, clock: Clock) -> None:
        """The host goes on after that. The current stream does not wait."""
        _join(self._host, clock)

    def lies_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = self._memory_of(tensor)
        memory.on_host, memory.made_on = True, HOST
        return tensor

    def _works_on_host(self, tensors: Sequence[torch.Tensor], name: str) -> bool:
        """Whether the host does it, and no stream."""
        found = [self._memory_of(tensor).on_host for tensor in tensors]
        return all(found) and bool(found) if _COPIES.match(name) else any(found)

    def tell(self, stream: str, tensor: torch.Tensor) -> None:
        self._memory_of(tensor).told_of.add(stream)

    # What is read and written ---------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, (ShardTensor, Partial)) for t in types):
            return NotImplemented  # what they do with what they hold comes here in turn
        self._look_for_dropped()
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        operation = _operation(func)
        name = operation.name
        if name.startswith("c10d."):
            self._communicated(name.split(".")[1], args)
        elif operation.has_data:
            self._computed(operation, args, kwargs or {}, out)
        elif isinstance(out, torch.Tensor):
            self._memory_of(out)
            if self._works_on_host([t for t in _tensors(args) if t is not out], name):
                self.lies_on_host(out)
        return out

    def _computed(self, operation: _Operation, args: Any, kwargs: Any, out: Any) -> None:
        name = operation.name
        read, written = list[torch.Tensor](), list[torch.Tensor]()
        for (_, writes), value in zip(operation.arguments, args, strict=False):
            (written if writes else read).extend(_tensors(value))
        for argument, writes in operation.arguments if kwargs else ():
            (written if writes else read).extend(_tensors(kwargs.get(argument)))
        given = {t.untyped_storage()._cdata for t in (*read, *written)}
        made = [t for t in _tensors(out) if t.untyped_storage()._cdata not in given]
        on_host = self._works_on_host([*read, *written], name)
        if not written and not made:
            if _HOST_READS.match(name):
                self.access(read, [], name, on_host)
                _join(self._host, {} if on_host else self._clocks[self._current])
            return  # a view
        for tensor in made if on_host else ():
            self.lies_on_host(tensor)
        self.access(read, [*written, *made], name, on_host)
        if name.startswith("aten.copy_.") and self._host_waits_for_copy(args, kwargs):
            _join(self._host, self._clocks[self._current])

    def _host_waits_for_copy(self, args: Any, kwargs: Any) -> bool:
        """Whether a copy from the device to the host returns only when it has ended."""
        is_asynchronous = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        target, source = (self._memory_of(tensor).on_host for tensor in args[:2])
        return target and not source and not is_asynchronous and self._current == COMPUTATION

    def _communicated(self, name: str, args: Any) -> None:
        written, read = _COMMUNICATION[name]
        tensors = [t for i in (*written, *read) for t in _tensors(args[i])]
        on_host = self._works_on_host(tensors, name)  # over gloo, as what ranks agree on
        if (
            not on_host
            and not self._is_thread
            and self._current != COMPUTATION
            and not self._current.startswith("control")
        ):  # ranks agree over gloo, on the host
            self.communications.append(_group_of(args))
        self.access(
            [t for i in read for t in _tensors(args[i])], [t for i in written for t in _tensors(args[i])], name, on_host
        )

    def access(
        self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], what: str, on_host: bool = False
    ) -> None:
        stream = HOST if on_host and not self._is_thread else self._current
        clock = self._host if stream == HOST else self._clocks[stream]
        if not self._is_thread:
            _join(clock, self._host)
        clock[stream] = time = clock.get(stream, 0) + 1
        task = f"{self._task} ({what})" if self._task else what
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                for start, end in _bytes(tensor):
                    self._note(self._memory_of(tensor), Access(stream, time, start, end, writes, task), clock)

    def _note(self, memory: Memory, access: Access, clock: Clock) -> None:
        kept: list[Access] = []
        for other in memory.accesses:
            if other.end <= access.start or access.end <= other.start:
                kept.append(other)
                continue
            known = other.time <= clock.get(other.stream, 0)
            if not known and (other.writes or access.writes) and other.time != access.time:
                raise RaceError(f"in no order:\n  {other}\n  {access}")
            within = access.start <= other.start and other.end <= access.end
            # What comes after this access comes after those before it, too.
            if not (known and within and (access.writes or (not other.writes and other.stream == access.stream))):
                kept.append(other)
        memory.accesses = [*kept, access]
        if access.stream != memory.made_on and not memory.on_host:
            self._shared[memory.reference.cdata] = memory

    def _memory_of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            # While the reference is held, no other storage gets its number.
            memory = self._memory[storage._cdata] = Memory(StorageWeakRef(storage), self._current)
        return memory

    def _look_for_dropped(self) -> None:
        """Memory that is dropped is given to what its stream does next."""
        for number in [number for number in self._shared if torch.UntypedStorage._expired(number)]:
            memory = self._shared.pop(number)
            clock = self._clocks.get(memory.made_on, {})
            for access in memory.accesses:
                over = access.time <= max(clock.get(access.stream, 0), self._host.get(access.stream, 0))
                if not over and access.stream not in (*memory.told_of, memory.made_on):
                    raise RaceError(f"dropped, and free for {memory.made_on!r}, before it was waited for:\n  {access}")

    def native(self, kernels: Kernels) -> Kernels:
        """Kernels that get addresses: what they read and write is declared here."""

        def encode(codec: Any, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
            kernels.encode(codec, x, out, seed)
            self.access([x], [out], "encode")

        def decode(codec: Any, message: torch.Tensor, out: torch.Tensor) -> None:
            kernels.decode(codec, message, out)
            self.access([message], [out], "decode")

        def encode_pieces(pieces: Any, values: torch.Tensor | None, wire: torch.Tensor, *args: Any) -> None:
            kernels.encode_pieces(pieces, values, wire, *args)
            read = _sources(pieces, wire) if values is None else [values]
            self.access(read, _targets(pieces, wire), "decode+sum+encode" if values is None else "encode")

        def decode_pieces(pieces: Any, wire: torch.Tensor, out: torch.Tensor) -> None:
            kernels.decode_pieces(pieces, wire, out)
            self.access(_sources(pieces, wire), [out], "decode+sum")

        functions = (encode, decode, encode_pieces, decode_pieces)
        return Kernels(cast(Any, SimpleNamespace(__name__=kernels.name, **{f.__name__: f for f in functions})))


def _targets(pieces: Any, wire: torch.Tensor) -> list[torch.Tensor]:
    return [wire[piece.target :][:size] for piece, size in zip(pieces.pieces, pieces.sizes, strict=True)]


def _sources(pieces: Any, wire: torch.Tensor) -> list[torch.Tensor]:
    starts = [row * pieces.stride for row in range(pieces.rows)]
    each = list(zip(pieces.pieces, pieces.sizes, strict=True))
    return [wire[start + piece.source :][:size] for start in starts for piece, size in each]


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if time > clock.get(stream, 0):
            clock[stream] = time


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Of an operation's argument or result: a tensor, or tensors in lists, and nothing deeper than these."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _bytes(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """From the first to the last in its storage. Slices of which each has a part in it are apart."""
    size, shape, strides = tensor.element_size(), tensor.shape, tensor.stride()
    if not tensor.numel():
        return
    apart = len(shape) > 1 and strides[-1] == 1 and not tensor.is_contiguous()
    outer = len(shape) - 1 if apart else 0
    last = sum((n - 1) * stride for n, stride in zip(shape[outer:], strides[outer:], strict=True))
    for index in product(*map(range, shape[:outer])):
        start = tensor.storage_offset() + sum(map(mul, index, strides))
        yield start * size, (start + last + 1) * size


def _group_of(args: Any) -> str:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                group: dist.ProcessGroup = dist.ProcessGroup.unbox(value)
            except RuntimeError:
                continue  # a reduction's operation
            return f"{group.group_name} {dist.get_process_group_ranks(group)}"
    return "a process group"


# --- streams of the engine -------------------------------------------------------------------------------------------


class LogicalStream(Stream):
    def __init__(self, name: str, depth: int, checker: Checker) -> None:
        super().__init__(depth)
        self._name, self._checker = name, checker

    def _stream(self, buffer_index: int) -> str:
        return f"{self._name} {buffer_index}"

    def submit(self, job: StreamJob, after: Sequence[Handle] = (), waiting: TransferWait | None = None) -> Handle:
        stream = self._stream(job.workspace.buffer_index)
        transfers = getattr(waiting, "_transfers", ())
        handles = [handle for handle in after if isinstance(handle, LogicalHandle)]
        assert len(handles) == len(after)
        on = self._checker.on_thread if self._name == HOST_EXCHANGES else self._checker.on
        with (
            torch.no_grad(),
            on(stream, str(transfers[0]) if transfers else self._name, [handle.clock for handle in handles]),
        ):
            for work in job.works:
                work(job.workspace)
        return LogicalHandle(self._checker, self._checker.done(stream))

    def finish(self) -> None:
        for buffer_index in range(self.depth):
            with self._checker.on(self._stream(buffer_index), ""):
                pass
            self._checker.wait(self._checker.done(self._stream(buffer_index)))

    def uses(self, buffer_index: int, buffer: torch.Tensor) -> None:
        self._checker.tell(self._stream(buffer_index), buffer)

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True, slots=True)
class LogicalHandle(Handle):
    checker: Checker
    clock: Clock

    def wait(self, on_host: bool = False) -> None:
        self.checker.wait(self.clock, on_host)

    def has_ended(self) -> bool:
        self.checker.found_ended(self.clock)
        return True


@dataclass(frozen=True, slots=True)
class Message:
    """Under way until it is waited for."""

    work: dist.Work
    checker: Checker
    clock: Clock

    def wait(self) -> None:
        # A reduce-scatter of gloo copies its result here. The checker has noted that the collective writes it.
        with _disable_current_modes():
            self.work.wait()
        self.checker.wait(self.clock)


@contextmanager
def checking() -> Generator[Checker]:
    """Models that are sharded inside run on logical streams, and are checked. Every rank must do so alike."""
    checker = Checker()
    made = Streams(torch.device("cpu"))
    launched, host_memory, taken_of = messages._launched, optimizer_memory.host_memory, boundary.checksum_of
    taken_of_slow = sync.checksum

    def launch(posted: Any, group: dist.ProcessGroup, tag: int) -> Any:
        stream = f"messages of {group.group_name}"
        with checker.on(stream, checker._task):
            works = launched(posted, group, tag)
        return [Message(work, checker, checker.done(stream)) for work in works]

    def called(call: Any, *of: Any, group: dist.ProcessGroup, async_op: bool = False, **named: Any) -> Any:
        if not async_op:
            return call(*of, group=group, **named)
        stream = f"collectives of {group.group_name}"
        with checker.on(stream, checker._task):
            work = call(*of, group=group, async_op=True, **named)
        return Message(work, checker, checker.done(stream))

    def native(module: Any) -> None:
        original = module.kernels_for
        patch.setattr(module, "kernels_for", lambda device: checker.native(original(device)))

    def checksum(bucket: Any) -> torch.Tensor:
        # The host computes it of its own memory, with temporary tensors that this checker takes for the device's.
        return torch.zeros((), dtype=torch.int64) if bucket.plan.optimizer_on_host else taken_of(bucket)

    def slow_checksum(slow: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=torch.int64) if checker._memory_of(slow).on_host else taken_of_slow(slow)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync, "checksum", slow_checksum)
        patch.setattr(boundary, "checksum_of", checksum)
        patch.setattr(comm, "make_stream", lambda name, device, depth: LogicalStream(name, depth, checker))
        patch.setattr(Streams, "of", staticmethod(lambda groups, device: made))
        patch.setattr(messages, "_launched", launch)
        for name in ("all_to_all_single", "all_gather_single", "reduce_scatter_single"):
            patch.setattr(dist, name, partial(called, getattr(dist, name)))
        for module in (optimizer_memory, sync):
            patch.setattr(module, "host_memory", lambda *of: checker.lies_on_host(host_memory(*of)))
        patch.setattr(parameter_memory, "has_own_memory", lambda device: True)
        # Where a rank finds a race, a slow one would learn that its peer has failed, before it finds the same race.
        patch.setattr(Watchdog, "look_for_divergence", lambda watchdog: None)
        for module in (towpath.codecs.packing, towpath.collectives.backend, encoded_shard):
            native(module)
        with checker:
            yield checker


def check_communications(mine: Sequence[str]) -> None:
    """Two ranks use the process groups that both are in in one order: those of NCCL would else wait for each other."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, list(mine))
    rank = dist.get_rank()
    for other, theirs in enumerate(everyones):
        shared = [[c for c in each if {rank, other} <= _ranks(c)] for each in (mine, theirs)]
        if shared[0] != shared[1]:
            number = next((i for i, (a, b) in enumerate(zip(*shared, strict=False)) if a != b), min(map(len, shared)))
            a, b = (each[number] if number < len(each) else "nothing more" for each in shared)
            raise RaceError(f"rank {rank} sends by {a} where rank {other} sends by {b}: NCCL could wait for ever")


def _ranks(communication: str) -> set[int]:
    return set(map(int, re.findall(r"\d+", communication.partition("[")[2])))
