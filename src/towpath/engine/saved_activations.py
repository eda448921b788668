"""Offload of activations to the host's memory, from the forward pass until the backward pass needs them.

On a GPU, two streams copy activations while the model computes:

    forward    pack     copies a saved tensor to the host; the tensor stays on the device for a window of later ones
    backward   unpack   waits for the copy on the device; the first of a window requests the window before it

A window is `_WINDOW_BYTES` of tensors that were saved one after the other. Up to two of them are on the device at a
time, in addition to what the computation uses. A tensor comes back with the strides that it had, and its gaps count. On
a CPU, copies are synchronous.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from operator import methodcaller
from typing import Any, final

import torch
from torch import nn

from towpath.collectives.collective import WireBuffers, Workspace
from towpath.engine.executor import Engine, engine_of
from towpath.engine.parameters import gradients
from towpath.engine.transfer_queues import CudaStream, Handle, Stream, StreamJob
from towpath.errors import StepError

# Smaller tensors stay on the device, because copying them costs more time than their memory is worth.
SMALLEST_BYTES = 1 << 16

# Large enough that a copy of one window lasts far longer than its launch, and small next to a GPU's memory.
_WINDOW_BYTES = 1 << 27

# Page-locked memory is allocated in slabs of these sizes and powers of two between them. PyTorch would round each
# tensor up to a power of two.
_FIRST_SLAB_BYTES, _LARGEST_SLAB_BYTES = 1 << 26, 1 << 30
_ALIGNED_BYTES = 512


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate a tensor with the strides of `tensor`, as a compiled backward pass may require them."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of a tensor that has each element of an expanded dimension once."""
    if 0 not in tensor.stride():
        return tensor.detach()
    shape = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.detach().as_strided(shape, tensor.stride())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a saved tensor of a model on a CPU."""
    kept = _like(tensor, tensor.device)
    _once(kept).copy_(_once(tensor))
    return kept


def _device_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last. Those of a tensor with gaps exceed its own."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _modified(tensor: torch.Tensor, version: int) -> StepError:
    return StepError(
        f"a tensor of shape {tuple(tensor.shape)} that the backward pass needs was modified since its "
        f"forward pass: it is at version {tensor._version}, expected {version}. Call backward() "
        "before the next forward pass of the unit, and change nothing in place that a graph still needs."
    )


@dataclass(frozen=True, slots=True)
class _LeftOnDevice:
    """A saved tensor that stays where it is.

    With saved-tensor hooks, autograd no longer checks whether a tensor was written to since. `version` replaces that
    check.
    """

    tensor: torch.Tensor
    version: int

    def unpacked(self) -> torch.Tensor:
        """Return the tensor; raise StepError if it was modified since."""
        if self.tensor._version != self.version:
            raise _modified(self.tensor, self.version)
        return self.tensor


@dataclass(slots=True, eq=False)
class _Slab:
    """Page-locked memory of several tensors. `free`: its unused ranges of bytes, in order.

    `last_read` is the last copy to the device out of this memory. Before a range is written again, the copy out of it
    must have ended. These copies run in order, so a wait for the last one will do.
    """

    memory: torch.Tensor
    free: list[tuple[int, int]]
    last_read: Handle | None = None

    def take(self, nbytes: int) -> int | None:
        """Return the start of a range of `nbytes`, or None if no free range is as large."""
        for number, (start, end) in enumerate(self.free):
            if end - start >= nbytes:
                self.free[number : number + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give_back(self, start: int, end: int) -> None:
        """Make a range free again, and join it with free neighbors."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted([*self.free, (start, end)]):
            if joined and joined[-1][1] == first:
                joined[-1] = joined[-1][0], last
            else:
                joined.append((first, last))
        self.free = joined


@dataclass(frozen=True, slots=True)
class _SlabRange:
    """The bytes of one tensor in a slab."""

    slab: _Slab
    start: int
    end: int


@dataclass(slots=True, eq=False)
class _Window:
    """Tensors that were saved one after the other. `before`: the window before it in the same forward pass.

    Graphs hold the tensors, so that each gives its memory back as soon as its part of the graph is dropped.
    """

    before: _Window | None
    nbytes: int = 0
    tensors: list[weakref.ref[_Offloaded]] = field(default_factory=list["weakref.ref[_Offloaded]"])
    requested: bool = False  # its copies to the device have been enqueued


@dataclass(frozen=True, slots=True)
class _Copied:
    """A tensor on the device that a copy reads or writes. `stream`: the CUDA stream that its memory belongs to."""

    tensor: torch.Tensor
    handle: Handle
    stream: torch.cuda.Stream | None


@final
class _Offloaded:
    """A saved tensor on its way to the host, there, or on its way back. `kept` is its memory on the host.

    `like` has the shape and the strides of the tensor, and no memory.
    """

    def __init__(self, copies: DeviceCopies, tensor: torch.Tensor, window: _Window, place: _SlabRange) -> None:
        self.copies, self.window, self.place, self.stream = copies, window, place, copies.current_stream()
        self.leaving: torch.Tensor | None = None
        self.arriving: _Copied | None = None
        self.modified: StepError | None = None
        self.like = _like(tensor, torch.device("meta"))
        # A dense copy with the same order of dimensions. A small view of a large tensor is copied alone.
        source = _once(tensor)
        strides = torch.empty_like(source, device="meta").stride()
        memory = place.slab.memory[place.start : place.start + source.nbytes].view(tensor.dtype)
        self.kept = memory.as_strided(source.shape, strides)
        after = [] if place.slab.last_read is None else [place.slab.last_read]
        self.left = copies.copy(copies.to_host, self.kept, source, after)
        self.version = tensor._version
        self.leaving = tensor.detach()  # a tensor that is its own node's output would else keep its graph alive

    def leave(self) -> None:
        """Drop the tensor on the device, once the computation has waited for the copy out of it."""
        if self.leaving is not None:
            self.copies.wait_for(_Copied(self.leaving, self.left, self.stream), self.copies.to_host)
            if self.leaving._version != self.version:
                self.modified = _modified(self.leaving, self.version)
            self.leaving = None

    def request(self) -> None:
        """Enqueue the copy to the device, unless the tensor is still there or the copy was enqueued before."""
        if self.leaving is not None or self.arriving is not None:
            return
        copies, kept = self.copies, self.kept
        tensor = _like(self.like, copies.device)
        arrived = copies.copy(copies.to_device, _once(tensor), kept, [self.left])
        self.arriving = _Copied(tensor, arrived, copies.current_stream())
        self.place.slab.last_read = arrived

    def unpacked(self) -> torch.Tensor:
        """Return the tensor on its device; raise StepError if it was modified since."""
        self.copies.request(self)
        if self.leaving is not None:  # one of the last that were saved
            return _LeftOnDevice(self.leaving, self.version).unpacked()
        if self.modified is not None:
            raise self.modified
        assert self.arriving is not None
        found, self.arriving = self.arriving, None
        found.handle.wait()
        current = self.copies.current_stream()
        if current is not None and current != found.stream:  # the memory belongs to the stream that requested it
            found.tensor.record_stream(current)
        return found.tensor

    def __del__(self) -> None:
        # The garbage collector may call it anywhere. So it only leaves a note for the next copy.
        leaving = None if self.leaving is None else _Copied(self.leaving, self.left, self.stream)
        self.copies.dropped.append((self.place, leaving, self.arriving))


@final
class DeviceCopies:
    """Copies of saved tensors between a device and the host, and the host's memory for them."""

    def __init__(self, device: torch.device, to_host: Stream, to_device: Stream) -> None:
        self.device, self.to_host, self.to_device = device, to_host, to_device
        self._workspace = Workspace(WireBuffers(device))
        self._slabs: list[_Slab] = []
        self._leaving: deque[weakref.ref[_Offloaded]] = deque()  # tensors that are still on the device, oldest first
        self._leaving_bytes = 0
        # What was dropped since the last copy: its memory on the host, and the copies to it and from it, if nobody has
        # waited for them.
        self.dropped: deque[tuple[_SlabRange, _Copied | None, _Copied | None]] = deque()

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked memory that were allocated. They stay allocated for later passes."""
        return sum(slab.memory.nbytes for slab in self._slabs)

    def offload(self, tensor: torch.Tensor, window: _Window) -> _Offloaded:
        """Begin to copy a tensor to the host. It is the next of `window`."""
        made = _Offloaded(self, tensor, window, self._take(_once(tensor).nbytes))
        window.tensors.append(weakref.ref(made))
        window.nbytes += _device_bytes(tensor)
        self._leaving.append(weakref.ref(made))
        self._leaving_bytes += _device_bytes(tensor)
        # The oldest tensors leave the device. Their memory goes back to the computation's stream, which therefore waits
        # for the copies out of it. These have long ended, unless the link is slower than the computation.
        self._leave(_WINDOW_BYTES)
        return made

    def _leave(self, most_bytes: int) -> None:
        """Let the oldest tensors leave the device, until it has at most so many bytes of them."""
        while self._leaving and self._leaving_bytes > most_bytes:
            oldest = self._leaving.popleft()()
            if oldest is not None:
                self._leaving_bytes -= _device_bytes(oldest.like)
                oldest.leave()

    def request(self, wanted: _Offloaded) -> None:
        """Enqueue copies to the device: of a tensor that is needed now, and of what is needed soon."""
        self._give_back()
        if wanted.leaving is None:  # the backward pass is through with the tensors that were last saved
            self._leave(0)
        wanted.request()
        # The backward pass needs the last saved tensor first. The copies wait for what the computation has enqueued so
        # far, because it may still use the memory that they write to. So they run beside what it enqueues from here on.
        window = wanted.window
        for each in (window, window.before):
            if each is not None and not each.requested:
                each.requested = True
                for reference in reversed(each.tensors):
                    tensor = reference()
                    if tensor is not None:
                        tensor.request()

    def _take(self, nbytes: int) -> _SlabRange:
        """Return free memory on the host."""
        self._give_back()
        nbytes = -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        for slab in self._slabs:
            start = slab.take(nbytes)
            if start is not None:
                return _SlabRange(slab, start, start + nbytes)
        least = max(nbytes, _FIRST_SLAB_BYTES, min(self.host_bytes, _LARGEST_SLAB_BYTES))
        size = 1 << (least - 1).bit_length()
        slab = _Slab(gradients.host_memory(size, torch.uint8, self.device), [(0, size)])
        self._slabs.append(slab)
        slab.take(nbytes)
        return _SlabRange(slab, 0, nbytes)

    def _give_back(self) -> None:
        """Reuse the memory of what was dropped."""
        while self.dropped:
            place, leaving, arriving = self.dropped.popleft()
            if leaving is not None:
                self._leaving_bytes -= _device_bytes(leaving.tensor)
                self.wait_for(leaving, self.to_host)
            if arriving is not None:
                self.wait_for(arriving, self.to_device)
            place.slab.give_back(place.start, place.end)
        while self._leaving and self._leaving[0]() is None:
            self._leaving.popleft()

    def wait_for(self, copied: _Copied, stream: Stream) -> None:
        """Let the computation wait for a copy on `stream`, before the tensor's memory may go to another tensor."""
        copied.handle.wait()
        if self.current_stream() != copied.stream:  # the memory belongs to a stream that has not waited
            stream.uses(0, copied.tensor)

    def current_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor, after: Sequence[Handle]) -> Handle:
        """Enqueue a copy on a stream of copies. The host's tensor is dense."""

        def work(_: Workspace) -> None:
            if target.stride() == source.stride():
                target.copy_(source, non_blocking=True)
                return
            # The device's tensor has gaps. PyTorch would copy it through memory that is not page-locked, and wait. So
            # the device itself collects or spreads the elements. Their dense copy belongs to the stream of this job.
            kept = target if stream is self.to_host else source
            dense = _like(kept, self.device)
            target.copy_(dense.copy_(source, non_blocking=True), non_blocking=True)

        return stream.submit(StreamJob(self._workspace, [work]), after)


@cache
def _copies_on(device: torch.device) -> DeviceCopies | None:
    """Return the copies of a device, which all models on it share. None on a CPU, where copies are synchronous."""
    if device.type != "cuda":
        return None
    return DeviceCopies(device, CudaStream(device, 1), CudaStream(device, 1))


@contextmanager
def offload_activations(model: nn.Module, *, smallest_bytes: int = SMALLEST_BYTES) -> Generator[None]:
    """Run a forward pass whose activations are kept in the host's memory until the backward pass needs them.

    On a GPU the memory is page-locked, and copies overlap with the computation. Unsharded weights and the model's
    buffers stay on the device. They are no activations, and the engine relies on autograd to read the weights in their
    slots. With activation checkpointing, the inputs that it keeps are offloaded, and recomputed activations are not.

    Args:
        model: A model that `shard()` returned.
        smallest_bytes: Tensors with fewer bytes stay on the device.
    """
    engine = engine_of(model)
    engine_memory, device_type = _EngineMemory(engine, model), engine.comm.device.type
    window = _Window(None)

    def pack(tensor: torch.Tensor) -> _LeftOnDevice | _Offloaded:
        nonlocal window
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == device_type
        if not plain or tensor.nbytes < smallest_bytes or tensor in engine_memory:
            return _LeftOnDevice(tensor, tensor._version)
        copies = _copies_on(tensor.device)
        if copies is None:
            return _LeftOnDevice(kept := _copied(tensor), kept._version)
        if window.nbytes and window.nbytes + _device_bytes(tensor) > _WINDOW_BYTES:
            window = _Window(window)
        return copies.offload(tensor, window)

    with torch.autograd.graph.saved_tensors_hooks(pack, methodcaller("unpacked")):
        yield


class _EngineMemory:
    """The memory of unsharded weights and of buffers. `tensor in memory` tests whether a tensor is stored there."""

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self._always = {_memory_of(buffer) for buffer in model.buffers()}
        self._made = -1
        self._weights: set[int] = set()

    def __contains__(self, tensor: Any) -> bool:
        # Slots are made in the first steps, and for units that are kept unsharded.
        if self._made != self._engine.weights.made:
            self._made = self._engine.weights.made
            self._weights = {_memory_of(b.full) for unit in self._engine.units for b in unit.buckets}
        return _memory_of(tensor) in self._weights or _memory_of(tensor) in self._always


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
