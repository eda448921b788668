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
from towpath.engine.saved_activations import DeviceCopies, _Window
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
    """Windows of two tensors, and slabs of four."""
    monkeypatch.setattr(saved_activations, "_WINDOW_BYTES", 2 * NBYTES)
    monkeypatch.setattr(saved_activations, "_FIRST_SLAB_BYTES", 4 * NBYTES)
    yield DeviceCopies(CPU, Late(), Late())


def saved(copies: DeviceCopies, values: Sequence[int]) -> list[Any]:
    """What a forward pass saves, in windows of two."""
    found: list[Any] = []
    window = _Window(None)
    for value in values:
        if window.nbytes == 2 * NBYTES:
            window = _Window(window)
        found.append(copies.offload(torch.full((NBYTES // 4,), float(value)), window))
    return found


def test_a_window_is_requested_while_the_one_after_it_is_used(copies: Any) -> None:
    tensors = saved(copies, range(6))
    assert len(copies.to_host.jobs) == 6 and copies.to_host.done == 4  # the last window need not have left
    back = copies.to_device.jobs
    requested: list[int] = []
    for number in reversed(range(6)):
        assert torch.equal(tensors[number].unpacked(), torch.full((NBYTES // 4,), float(number)))
        tensors[number] = None
        requested.append(len(back))
    # The last two are on the device still. The first of each window brings the whole window before it.
    assert requested == [2, 2, 4, 4, 4, 4]
    assert copies.to_device.done == 4


def test_each_tensor_waits_for_its_own_copy_only(copies: Any) -> None:
    tensors = saved(copies, range(6))
    tensors[5].unpacked()
    assert len(copies.to_device.jobs) == 2 and copies.to_device.done == 0
    assert tensors[3].unpacked()[0] == 3  # the first that was requested
    assert copies.to_device.done == 1


def test_tensors_leave_the_device_as_later_ones_are_saved(copies: Any) -> None:
    values, window = [torch.full((NBYTES // 4,), float(n)) for n in range(4)], _Window(None)
    memory = [weakref.ref(v.untyped_storage()) for v in values]
    kept: list[Any] = []
    while values:
        kept.append(copies.offload(values.pop(0), window))
    assert [reference() is not None for reference in memory] == [False, False, True, True]


def test_a_graph_is_kept_for_a_second_backward_pass(copies: Any) -> None:
    tensors = saved(copies, range(6))
    for _ in range(2):
        assert [int(t.unpacked()[0]) for t in reversed(tensors)] == [5, 4, 3, 2, 1, 0]


def test_memory_on_the_host_is_reused_once_graphs_are_dropped(copies: Any) -> None:
    for _ in range(3):
        tensors = saved(copies, range(6))
        for number in reversed(range(6)):
            assert tensors.pop().unpacked()[0] == number
        assert copies.host_bytes == 8 * NBYTES  # two slabs
    # Of other sizes and orders, too.
    tensors = [copies.offload(torch.ones(NBYTES // 8), _Window(None)) for _ in range(16)]
    assert copies.host_bytes == 8 * NBYTES
    del tensors[::2]
    tensors += [copies.offload(torch.ones(NBYTES // 8), _Window(None)) for _ in range(8)]
    assert copies.host_bytes == 8 * NBYTES


def test_a_graph_that_is_dropped_with_copies_under_way_gives_its_memory_back(copies: Any) -> None:
    tensors = saved(copies, range(6))
    tensors[5].unpacked()
    tensors.clear()
    assert copies.to_device.done == 0 and copies.to_host.done == 4
    again = saved(copies, range(10, 16))
    # The computation has waited for the copies: it may get the memory that they write to and read.
    assert all(job.done for job in (*copies.to_device.jobs[:2], *copies.to_host.jobs[:6]))
    assert [int(t.unpacked()[0]) for t in reversed(again)] == [15, 14, 13, 12, 11, 10]
    assert copies.host_bytes == 8 * NBYTES


def test_what_is_written_to_after_it_was_saved_is_refused(copies: Any) -> None:
    window, tensors, kept = _Window(None), [torch.zeros(NBYTES // 4) for _ in range(4)], list[Any]()
    for tensor in tensors:
        kept.append(copies.offload(tensor, window))
        if tensor is tensors[0]:
            tensor.add_(1)
    tensors[3].add_(1)
    for number in (3, 0):  # on the device still, and gone
        with pytest.raises(StepError, match="was modified since its forward pass"):
            kept[number].unpacked()
    assert not kept[1].unpacked().any()


def test_copies_keep_dtype_shape_and_strides(copies: Any) -> None:
    base = torch.arange(240.0).view(4, 6, 10)
    window = _Window(None)
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float64):
        whole = base.to(dtype)
        for tensor in (whole, whole.mT, whole[:, 1:5, ::3], whole[:1].expand(3, 6, 10), whole.unfold(2, 4, 2).mT):
            kept = copies.offload(tensor, window)
            copies._leave(0)
            found = kept.unpacked()
            assert torch.equal(found, tensor) and found.dtype == dtype and found.stride() == tensor.stride()


def test_host_and_device_exchange_dense_memory_only(copies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch copies anything else through pageable memory, and the host waits for that copy."""
    copied: list[tuple[bool, bool]] = []
    copy = torch.Tensor.copy_

    def on_host(tensor: torch.Tensor) -> bool:
        starts = [(slab.memory.data_ptr(), slab.memory.nbytes) for slab in copies._slabs]
        return any(start <= tensor.data_ptr() < start + nbytes for start, nbytes in starts)

    def checked(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if on_host(target) or on_host(source):
            assert non_blocking and target.stride() == source.stride(), (target.stride(), source.stride())
            assert target.transpose(1, 2).is_contiguous()
            copied.append((on_host(target), on_host(source)))
        return copy(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", checked)
    q, k, v = torch.randn(2, 8, 3, 4, 16).transpose(1, 3).unbind(2)
    window = _Window(None)
    kept = [copies.offload(each, window) for each in (q, k, v)]
    copies._leave(0)
    for saved_one, each in zip(kept, (q, k, v), strict=True):
        found = saved_one.unpacked()
        assert torch.equal(found, each) and found.stride() == each.stride()
    assert copied == [(True, False)] * 3 + [(False, True)] * 3


def test_gaps_of_tensors_count_as_memory_of_the_device(copies: Any) -> None:
    """They come back with the tensors. So fewer tensors are on the device at a time."""
    wide = torch.randn(NBYTES // 4, 2)
    window, kept = _Window(None), list[Any]()
    for _ in range(3):
        kept.append(copies.offload(wide[:, 0], window))
        assert copies._leaving_bytes <= 2 * NBYTES
    assert copies.to_host.done == 2 and copies.host_bytes == 4 * NBYTES


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
    tensors[0].unpacked()
    assert recorded == []
    monkeypatch.setattr(copies, "current_stream", lambda: "third")
    tensors[1].unpacked()
    assert recorded == ["third"]


def test_what_stays_on_the_device_keeps_no_graph_alive(copies: Any) -> None:
    """Also where a node saves its own output."""

    def pack(tensor: torch.Tensor) -> Any:
        return copies.offload(tensor, window)

    window = _Window(None)
    x = torch.zeros(NBYTES // 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.unpacked()):
        y = x.exp().exp()
    y.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.full_like(x, torch.e))
    node = weakref.ref(y)
    del y
    copies.to_host.finish()
    gc.collect()
    copies._give_back()
    assert node() is None and copies._slabs[0].free == [(0, 4 * NBYTES)]
