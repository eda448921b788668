"""Offload of activations to the host's memory, from the forward pass until the backward pass needs them.

On a GPU, two streams copy activations while the model computes:

    forward    pack     copies a saved tensor to the host; it stays on the device for `_AHEAD_BYTES` of later tensors
    backward   unpack   waits for the copy on the device; requests tensors that were saved up to `_AHEAD_BYTES` earlier

So up to two times `_AHEAD_BYTES` are on the device, in addition to what the computation uses. A tensor comes back with
the strides that it had, and its gaps count. On a CPU, copies are synchronous.
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

# Large enough that its copy lasts far longer than the launches, and small next to a GPU's memory.
_AHEAD_BYTES = 1 << 27

# Page-locked memory is allocated in blocks, because PyTorch would round each tensor up to a power of two.
_BLOCK_BYTES, _ALIGNED_BYTES = 1 << 29, 512


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate a tensor with the strides of `tensor`, as a compiled backward pass may require them."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of a tensor that has each element of an expanded dimension once."""
    shape = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.detach().as_strided(shape, tensor.stride())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a saved tensor of a model on a CPU."""
    kept = _like(tensor, tensor.device)
    _once(kept).copy_(_once(tensor))
    return kept


def _device_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last. Those of a tensor with gaps exceed its own."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _check_version(tensor: torch.Tensor, found: int, expected: int) -> None:
    # With saved-tensor hooks, autograd no longer checks whether a tensor was written to since.
    if found != expected:
        raise StepError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward pass needs was modified since its forward "
            f"pass: it is at version {found}, expected {expected}. Call backward() before the next forward pass of "
            "the unit, and change nothing in place that a graph still needs."
        )


@dataclass(frozen=True, slots=True)
class _LeftOnDevice:
    """A saved tensor that stays where it is."""

    tensor: torch.Tensor
    version: int

    def unpacked(self) -> torch.Tensor:
        _check_version(self.tensor, self.tensor._version, self.version)
        return self.tensor


@dataclass(slots=True)
class _Pass:
    """The tensors that one forward pass saved, in order. Nothing has requested the first `unrequested` of them."""

    # Weak, so that each tensor gives its memory back as soon as its part of the graph is dropped.
    tensors: list[weakref.ref[_Offloaded]] = field(default_factory=list["weakref.ref[_Offloaded]"])
    unrequested: int = 0
    nbytes: int = 0


@final
class _Offloaded:
    """A saved tensor on its way to the host, there (`kept`), or on its way back.

    `like` has the shape and strides of the tensor, and no memory. `start` and `end` are bytes of those its pass saved.
    """

    leaving: torch.Tensor | None = None  # the tensor, until the computation waits for the copy out of it
    arriving: tuple[torch.Tensor, Handle] | None = None

    def __init__(self, copies: DeviceCopies, tensor: torch.Tensor, passed: _Pass) -> None:
        self.copies, self.passed, self.index = copies, passed, len(passed.tensors)
        self.like, self.start = _like(tensor, torch.device("meta")), passed.nbytes
        self.end = self.start + _device_bytes(tensor)
        # The memory of a tensor belongs to the stream that was current when it was allocated.
        self.stream, self.version = copies.current_stream(), tensor._version
        # A dense copy with the same order of dimensions. A small view of a large tensor is copied alone.
        source = _once(tensor)
        memory = copies.host_memory(source.nbytes).view(tensor.dtype)
        self.kept = memory.as_strided(source.shape, torch.empty_like(source, device="meta").stride())
        self.left = copies.copy(copies.to_host, self.kept, source)
        # Detached, because a tensor that is its own node's output would else keep its graph alive.
        self.leaving = tensor.detach()

    def leave(self) -> None:
        """Drop the tensor on the device, once the computation has waited for the copy out of it."""
        if self.leaving is not None:
            # Its memory goes back to the computation's stream, which would else write to it during the copy. The copy
            # has long ended, unless the link is slower than the computation.
            self.left.wait()
            if self.copies.current_stream() != self.stream:  # the memory belongs to a stream that has not waited
                self.copies.to_host.uses(0, self.leaving)
            self.written, self.leaving = self.leaving._version, None

    def request(self) -> None:
        """Enqueue the copy to the device, unless the tensor is still there or the copy was enqueued before."""
        if self.leaving is None and self.arriving is None:
            tensor, self.stream = _like(self.like, self.copies.device), self.copies.current_stream()
            self.arriving = tensor, self.copies.copy(self.copies.to_device, _once(tensor), self.kept, [self.left])

    def unpacked(self) -> torch.Tensor:
        """Return the tensor on its device; raise StepError if it was modified since."""
        self.copies.request(self)
        # It is one of the last that were saved.
        if self.leaving is not None:
            return _LeftOnDevice(self.leaving, self.version).unpacked()
        _check_version(self.like, self.written, self.version)
        assert self.arriving is not None
        (tensor, arrived), self.arriving = self.arriving, None
        arrived.wait()
        current = self.copies.current_stream()
        if current is not None and current != self.stream:
            tensor.record_stream(current)
        return tensor

    def __del__(self) -> None:
        # A graph may be dropped with copies under way. The garbage collector may call this anywhere, so no stream waits
        # here: PyTorch keeps the memory on the device until the copies have ended, and page-locked memory always.
        if self.leaving is not None:
            self.copies.to_host.uses(0, self.leaving)
        if self.arriving is not None:
            self.copies.to_device.uses(0, self.arriving[0])


@final
class DeviceCopies:
    """Copies of saved tensors between a device and the host, and the host's memory for them."""

    def __init__(self, device: torch.device, to_host: Stream, to_device: Stream) -> None:
        self.device, self.to_host, self.to_device = device, to_host, to_device
        self._workspace = Workspace(WireBuffers(device))
        self._block, self._used = torch.empty(0, dtype=torch.uint8), 0
        # Tensors that are still on the device, oldest first, each with its bytes there.
        self._leaving: deque[tuple[weakref.ref[_Offloaded], int]] = deque()
        self._leaving_bytes = 0

    def offload(self, tensor: torch.Tensor, passed: _Pass) -> _Offloaded:
        """Begin to copy a tensor to the host. It is the next of `passed`."""
        made = _Offloaded(self, tensor, passed)
        self._leaving.append((weakref.ref(made), made.end - made.start))
        self._leaving_bytes += made.end - made.start
        passed.tensors.append(weakref.ref(made))
        passed.unrequested, passed.nbytes = len(passed.tensors), made.end
        self._leave(_AHEAD_BYTES)
        return made

    def _leave(self, most_bytes: int) -> None:
        """Let the oldest tensors leave the device, until it has at most so many bytes of them."""
        while self._leaving and self._leaving_bytes > most_bytes:
            reference, nbytes = self._leaving.popleft()
            self._leaving_bytes -= nbytes
            if (oldest := reference()) is not None:
                oldest.leave()

    def request(self, wanted: _Offloaded) -> None:
        """Enqueue copies to the device: of a tensor that is needed now, and of what is needed soon."""
        # The backward pass is through with the tensors that were last saved.
        if wanted.leaving is None:
            self._leave(0)
        wanted.request()
        # The backward pass needs the last saved tensor first. The copies wait for what the computation has enqueued so
        # far, because it may still use the memory that they write to. So they run beside what it enqueues from here on.
        passed = wanted.passed
        passed.unrequested = min(passed.unrequested, wanted.index)
        while passed.unrequested:
            before = passed.tensors[passed.unrequested - 1]()
            if before is not None:
                if before.end <= wanted.start - _AHEAD_BYTES:
                    return
                before.request()
            passed.unrequested -= 1

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return memory on the host: the next of a block, which PyTorch reuses once all tensors in it are dropped."""
        start = -(-self._used // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if start + nbytes > self._block.numel():
            size = max(_BLOCK_BYTES, 1 << (nbytes - 1).bit_length())
            self._block, start = gradients.host_memory(size, torch.uint8, self.device), 0
        self._used = start + nbytes
        return self._block[start : self._used]

    def current_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor, after: Sequence[Handle] = ()) -> Handle:
        """Enqueue a copy on a stream of copies. The host's tensor is dense."""

        def work(_: Workspace) -> None:
            if target.stride() == source.stride():
                target.copy_(source, non_blocking=True)
                return
            # The device's tensor has gaps. PyTorch would copy it through memory that is not page-locked, and wait. So
            # the device itself collects or spreads the elements. Their dense copy belongs to the stream of this job.
            dense = _like(target if stream is self.to_host else source, self.device)
            target.copy_(dense.copy_(source, non_blocking=True), non_blocking=True)

        return stream.submit(StreamJob(self._workspace, [work]), after)


@cache
def _copies_on(device: torch.device) -> DeviceCopies | None:
    """Return the copies of a device, which all models on it share. None on a CPU, where copies are synchronous."""
    # Two streams: with a pipeline, one micro-batch's forward runs between the backward passes of others.
    return DeviceCopies(device, CudaStream(device, 1), CudaStream(device, 1)) if device.type == "cuda" else None


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
    engine_memory, device_type, passed = _EngineMemory(engine, model), engine.comm.device.type, _Pass()

    def pack(tensor: torch.Tensor) -> _LeftOnDevice | _Offloaded:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == device_type
        if not plain or tensor.nbytes < max(smallest_bytes, 1) or tensor in engine_memory:
            return _LeftOnDevice(tensor, tensor._version)
        if (copies := _copies_on(tensor.device)) is not None:
            return copies.offload(tensor, passed)
        return _LeftOnDevice(kept := _copied(tensor), kept._version)

    with torch.autograd.graph.saved_tensors_hooks(pack, methodcaller("unpacked")):
        yield


class _EngineMemory:
    """The memory of unsharded weights and of buffers. `tensor in memory` tests whether a tensor is stored there."""

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine, self._made = engine, -1
        self._always = {_memory_of(buffer) for buffer in model.buffers()}
        self._weights: set[int] = set()

    def __contains__(self, tensor: Any) -> bool:
        # Slots are made in the first steps, and for units that are kept unsharded.
        if self._made != self._engine.weights.made:
            self._made = self._engine.weights.made
            self._weights = {_memory_of(b.full) for unit in self._engine.units for b in unit.buckets}
        return _memory_of(tensor) in self._weights or _memory_of(tensor) in self._always


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
