"""Activations that are copied beside the computation: in which order, by which waits, and into which memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from towpath.collectives.collective import WireBuffers, Workspace
from towpath.engine import saved_activations
from towpath.engine.saved_activations import DeviceCopies, _Pass
from towpath.engine.transfer_queues import Handle, Stream, StreamJob
from towpath.errors import StepError
from towpath.observe.record import TransferWait

CPU = torch.device("cpu")
NBYTES = 1024  # of each tensor


class Late(Stream):
    """Does nothing before somebody waits for it. What follows from a missing wait is then a wrong number."""

    def __init__(self) -> None:
        super().__init__(1)
        self.jobs: list[LateHandle] = []
        self.told_of: list[int] = []

    def submit(self, job: StreamJob, after: Sequence[Handle] = (), waiting: TransferWait | None = None) -> Handle:
        self.jobs.append(LateHandle(self, job, after, len(self.jobs)))
        return self.jobs[-1]

    @property
    def done(self) -> int:
        return sum(job.done for job in self.jobs)

    def finish(self) -> None:
        for job in self.jobs:
            job.wait()

    def uses(self, buffer_index: int, buffer: torch.Tensor) -> None:
        self.told_of.append(buffer.data_ptr())

    def close(self) -> None:
        """Nothing to close."""


@dataclass(eq=False)
class LateHandle(Handle):
    stream: Late
    job: StreamJob | None
    after: Sequence[Handle]
    number: int

    @property
    def done(self) -> bool:
        return self.job is None

    def has_ended(self) -> bool:
        return self.done

    def wait(self, on_host: bool = False) -> None:
        for job in self.stream.jobs[: self.number + 1]:
            if job.job is not None:
                works, job.job = job.job.works, None  # it holds its tensors no longer
                for handle in job.after:
                    handle.wait()
                with torch.no_grad():
                    for work in works:
                        work(Workspace(WireBuffers(CPU)))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Generator[Any]:
    """Two tensors are on the device ahead of their use, and four in a block of the host's memory."""
    monkeypatch.setattr(saved_activations, "_AHEAD_BYTES", 2 * NBYTES)
    monkeypatch.setattr(saved_activations, "_BLOCK_BYTES", 4 * NBYTES)
    yield DeviceCopies(CPU, Late(), Late())


def saved(copies: DeviceCopies, values: Sequence[int]) -> list[Any]:
    """What a forward pass saves."""
    passed = _Pass()
    return [copies.offload(torch.full((NBYTES // 4,), float(value)), passed) for value in values]


def test_tensors_are_requested_ahead_of_their_use(copies: Any) -> None:
    tensors = saved(copies, range(6))
    assert len(copies.to_host.jobs) == 6 and copies.to_host.done == 4  # the last two need not have left
    back = copies.to_device.jobs
    requested: list[int] = []
    for number in reversed(range(6)):
        assert torch.equal(tensors[number].unpacked(), torch.full((NBYTES // 4,), float(number)))
        tensors[number] = None
        requested.append(len(back))
    # The last two are on the device still. Each brings the tensor that will be the second after it.
    assert requested == [1, 2, 3, 4, 4, 4]
    assert copies.to_device.done == 4


def test_each_tensor_waits_for_its_own_copy_only(copies: Any) -> None:
    tensors = saved(copies, range(6))
    tensors[5].unpacked()
    tensors[4].unpacked()
    assert len(copies.to_device.jobs) == 2 and copies.to_device.done == 0
    assert tensors[3].unpacked()[0] == 3  # the first that was requested
    assert copies.to_device.done == 1


def test_tensors_leave_the_device_as_later_ones_are_saved(copies: Any) -> None:
    values, passed = [torch.full((NBYTES // 4,), float(n)) for n in range(4)], _Pass()
    memory = [weakref.ref(v.untyped_storage()) for v in values]
    kept: list[Any] = []
    while values:
        kept.append(copies.offload(values.pop(0), passed))
    assert [reference() is not None for reference in memory] == [False, False, True, True]


def test_a_graph_is_kept_for_a_second_backward_pass(copies: Any) -> None:
    tensors = saved(copies, range(6))
    for _ in range(2):
        assert [int(t.unpacked()[0]) for t in reversed(tensors)] == [5, 4, 3, 2, 1, 0]


def test_large_tensors_are_requested_ahead_too(copies: Any) -> None:
    passed = _Pass()
    tensors = [copies.offload(torch.full((NBYTES,), float(number)), passed) for number in range(4)]
    copies._leave(0)
    assert tensors[3].unpacked()[0] == 3 and len(copies.to_device.jobs) == 2


def test_a_backward_pass_through_early_tensors_brings_none_of_the_later_ones(copies: Any) -> None:
    tensors = saved(copies, range(6))
    assert [int(tensors[number].unpacked()[0]) for number in (1, 0)] == [1, 0]
    assert len(copies.to_device.jobs) == 2


def test_memory_on_the_host_is_dropped_with_the_graphs(copies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps page-locked memory for later blocks, and waits for the copies to it and from it."""
    made: list[weakref.ref[Any]] = []
    allocate = saved_activations.gradients.host_memory

    def host_memory(*args: Any) -> torch.Tensor:
        memory = allocate(*args)
        made.append(weakref.ref(memory.untyped_storage()))
        return memory

    monkeypatch.setattr(saved_activations.gradients, "host_memory", host_memory)
    for _ in range(3):
        tensors = saved(copies, range(8))
        kept = [tensor.kept.data_ptr() for tensor in tensors]
        assert len(set(kept)) == 8 and kept[1] - kept[0] == NBYTES
        for number in reversed(range(8)):
            assert tensors.pop().unpacked()[0] == number
        for stream in (copies.to_host, copies.to_device):
            stream.finish()
        gc.collect()
    assert len(made) == 6 and sum(reference() is not None for reference in made) == 1  # the block in use


def test_a_graph_that_is_dropped_with_copies_under_way_keeps_their_memory(copies: Any) -> None:
    tensors = saved(copies, range(6))
    tensors[5].unpacked()
    arriving, leaving = tensors[3].arriving[0].data_ptr(), [t.leaving.data_ptr() for t in tensors[4:]]
    tensors.clear()
    assert copies.to_device.done == 0 and copies.to_device.told_of == [arriving]
    assert copies.to_host.done == 4 and sorted(copies.to_host.told_of) == sorted(leaving)
    again = saved(copies, range(10, 16))
    assert [int(t.unpacked()[0]) for t in reversed(again)] == [15, 14, 13, 12, 11, 10]


def test_what_is_written_to_after_it_was_saved_is_refused(copies: Any) -> None:
    passed, tensors, kept = _Pass(), [torch.zeros(NBYTES // 4) for _ in range(4)], list[Any]()
    for tensor in tensors:
        kept.append(copies.offload(tensor, passed))
        if tensor is tensors[0]:
            tensor.add_(1)
    tensors[3].add_(1)
    for number in (3, 0):  # on the device still, and gone
        with pytest.raises(StepError, match="was modified since its forward pass"):
            kept[number].unpacked()
    assert not kept[1].unpacked().any()


def test_copies_keep_dtype_shape_and_strides(copies: Any) -> None:
    base = torch.arange(240.0).view(4, 6, 10)
    passed = _Pass()
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float64):
        whole = base.to(dtype)
        for tensor in (whole, whole.mT, whole[:, 1:5, ::3], whole[:1].expand(3, 6, 10), whole.unfold(2, 4, 2).mT):
            kept = copies.offload(tensor, passed)
            copies._leave(0)
            found = kept.unpacked()
            assert torch.equal(found, tensor) and found.dtype == dtype and found.stride() == tensor.stride()


def test_host_and_device_exchange_dense_memory_only(copies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch copies anything else through pageable memory, and the host waits for that copy."""
    copied: list[tuple[bool, bool]] = []
    copy = torch.Tensor.copy_
    blocks: set[tuple[int, int]] = set()

    def on_host(tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < start + nbytes for start, nbytes in blocks)

    def checked(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if on_host(target) or on_host(source):
            assert non_blocking and target.stride() == source.stride(), (target.stride(), source.stride())
            assert target.transpose(1, 2).is_contiguous()
            copied.append((on_host(target), on_host(source)))
        return copy(target, source, non_blocking)

    def host_memory(nbytes: int) -> torch.Tensor:
        memory = allocate(nbytes)
        blocks.add((memory.data_ptr(), nbytes))
        return memory

    allocate = copies.host_memory
    monkeypatch.setattr(copies, "host_memory", host_memory)
    monkeypatch.setattr(torch.Tensor, "copy_", checked)
    q, k, v = torch.randn(2, 8, 3, 4, 16).transpose(1, 3).unbind(2)
    passed = _Pass()
    kept = [copies.offload(each, passed) for each in (q, k, v)]
    copies._leave(0)
    for saved_one, each in zip(kept, (q, k, v), strict=True):
        found = saved_one.unpacked()
        assert torch.equal(found, each) and found.stride() == each.stride()
    assert copied == [(True, False)] * 3 + [(False, True)] * 3


def test_gaps_of_tensors_count_as_memory_of_the_device(copies: Any) -> None:
    """They come back with the tensors. So fewer tensors are on the device at a time."""
    wide = torch.randn(NBYTES // 4, 2)
    passed, kept = _Pass(), list[Any]()
    for _ in range(3):
        kept.append(copies.offload(wide[:, 0], passed))
        assert copies._leaving_bytes <= 2 * NBYTES
    assert copies.to_host.done == 2 and copies._block.numel() == 4 * NBYTES


def test_memory_of_other_streams_is_kept_from_them(copies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user computes on streams of their own, a wait of one stream is none of the others."""
    recorded: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(stream))
    streams = iter(["mine"] * 4 + ["other"] * 99)
    monkeypatch.setattr(copies, "current_stream", lambda: next(streams))
    tensors = saved(copies, range(3))  # the first leaves
    assert copies.to_host.told_of == []
    tensors += saved(copies, range(3, 5))
    assert len(copies.to_host.told_of) == 2  # those that were saved on the first stream
    tensors[1].unpacked()  # requests the one before
    assert recorded == []
    monkeypatch.setattr(copies, "current_stream", lambda: "third")
    tensors[0].unpacked()
    assert recorded == ["third"]


def test_what_stays_on_the_device_keeps_no_graph_alive(copies: Any) -> None:
    """Also where a node saves its own output."""

    def pack(tensor: torch.Tensor) -> Any:
        return copies.offload(tensor, passed)

    passed = _Pass()
    x = torch.zeros(NBYTES // 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.unpacked()):
        y = x.exp().exp()
    y.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.full_like(x, torch.e))
    node = weakref.ref(y)
    del y
    copies.to_host.finish()
    gc.collect()
    assert node() is None
