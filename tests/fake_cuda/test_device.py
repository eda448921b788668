"""The fake device is one as far as PyTorch can tell: it computes, refuses tensors of the host, and notices waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.fake_cuda.runtime import DEVICE, HostWaitError, fake_cuda
from tests.fake_cuda.world import fake_gpus
from tests.ranks.server import on_ranks


@on_ranks(1)
def test_tensors_are_ordinary_ones_with_values() -> None:
    with fake_cuda():
        x = torch.arange(6.0, device="cuda")
        y = (x.view(2, 3) + 1).t()
        assert type(y) is torch.Tensor and y.is_cuda and y.device == DEVICE
        x[1:3] = 9  # through a view
        assert x.tolist() == [0, 9, 9, 3, 4, 5] and y.tolist() == [[1, 4], [2, 5], [3, 6]]
        assert torch.arange(3, device=DEVICE).cpu().tolist() == [0, 1, 2]
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            x.numpy()
        assert torch.empty(4, pin_memory=True)[1:].is_pinned() and not torch.empty(4).is_pinned()


@on_ranks(1)
def test_training_is_that_of_the_cpu_and_runs_on_a_thread_of_autograd() -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)).double().to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        next(model.parameters()).register_hook(note_thread)
        for _ in range(2):
            model(torch.ones(3, 6, dtype=torch.float64, device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    threads: list[threading.Thread] = []

    def note_thread(_: torch.Tensor) -> None:
        threads.append(threading.current_thread())

    with fake_cuda():
        assert all(map(torch.allclose, train("cpu"), train("cuda")))
        here, there = threads[:2], threads[2:]
        assert set(here) == {threading.main_thread()} and threading.main_thread() not in there


@on_ranks(1)
def test_a_backward_pass_runs_on_the_stream_of_its_forward() -> None:
    streams: list[torch.cuda.Stream] = []

    def note_stream(_: torch.Tensor) -> None:
        streams.append(torch.cuda.current_stream())

    with fake_cuda():
        side, x = torch.cuda.Stream(), torch.ones(2, device="cuda", requires_grad=True)
        with torch.cuda.stream(side):
            y = x.exp()
            y.register_hook(note_stream)
            z = y.sum()
        z.backward()
        assert streams == [side] and torch.cuda.current_stream() != side


@on_ranks(1)
def test_tensors_of_the_host_do_not_mix_with_those_of_the_device() -> None:
    with fake_cuda():
        x, host = torch.ones(3, device="cuda"), torch.ones(3)
        assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]  # a number, which any kernel takes
        mixed: list[Callable[[], object]] = [
            lambda: x + host,
            lambda: x.add_(host),
            lambda: torch.cat([x, host]),
            lambda: x.view(3, 1) @ host.view(1, 3),
            lambda: torch._foreach_add_([x], [host]),  # pyright: ignore
            lambda: x.index_select(0, torch.zeros(1, dtype=torch.long)),
        ]
        for operation in mixed:
            with pytest.raises(RuntimeError, match="device"):
                operation()


@on_ranks(1)
def test_what_waits_for_the_device_is_counted_and_nothing_else() -> None:
    with fake_cuda() as cuda:
        x, pinned = torch.ones(3, device="cuda"), torch.empty(3, pin_memory=True)
        stream = torch.cuda.Stream()

        def await_event() -> None:
            event = torch.cuda.Event()
            x.mul_(1)
            event.record()
            event.synchronize()

        waits: list[Callable[[], object]] = [
            lambda: bool(x[0].item()),
            x.tolist,
            x.nonzero,
            x.cpu,
            lambda: bool(x.sum() > 0),
            lambda: x[x > 0],
            lambda: torch.equal(x, x),
            lambda: pinned.copy_(x),  # page-locked, but the host was not told that it need not wait
            lambda: torch.empty(3).copy_(x, non_blocking=True),
            lambda: torch.tensor([1.0], device="cuda"),
            await_event,
            stream.synchronize,
            torch.cuda.synchronize,
        ]
        free: list[Callable[[], object]] = [
            lambda: pinned.copy_(x, non_blocking=True),
            lambda: x.copy_(pinned, non_blocking=True),
            lambda: x.to(torch.bfloat16),
            lambda: torch.full((3,), 2.0, device="cuda"),
            lambda: x.record_stream(stream),
            lambda: stream.wait_stream(torch.cuda.current_stream()),
            lambda: torch.linalg.qr(torch.eye(3, device="cuda"))[0],  # pyright: ignore
        ]
        for call in waits:
            with cuda.counted() as counted:
                call()
            assert len(counted) >= 1
            with pytest.raises(HostWaitError, match="not here"), cuda.no_waits("not here"):
                call()
        with cuda.no_waits("not here"):
            for call in free:
                call()


@on_ranks(1)
def test_an_event_is_reached_once_the_host_has_waited_for_it() -> None:
    with fake_cuda() as cuda:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        x = torch.ones(3, device="cuda")
        first.record()
        x.add_(1).mul_(2)
        last.record()
        assert not last.query()
        with cuda.counted() as waits:
            first.synchronize()
        assert first.query() and not last.query() and waits[0].left == 2
        torch.cuda.synchronize()
        assert last.query() and first.elapsed_time(last) > 0


@on_ranks(1)
def test_kernels_of_triton_are_recorded_and_take_no_tensor_of_the_host() -> None:
    from towpath.codecs.kernels import kernels_for, plain
    from towpath.core.formats import Codec

    with fake_gpus(1, 1) as gpus:
        codec, x = Codec.parse("int8"), torch.linspace(-1, 1, 300)
        message = torch.empty(codec.encoded_bytes(300), dtype=torch.uint8)
        plain.encode(codec, x, message)
        there = torch.empty_like(message, device="cuda")
        kernels_for(DEVICE).encode(codec, x.to("cuda"), there)
        assert torch.equal(there.cpu(), message) and gpus.launches == ["_encode_kernel"]
        with pytest.raises(ValueError, match="cpu tensor"):
            kernels_for(DEVICE).encode(codec, x, there)
