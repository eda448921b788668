"""Cases that measure. Nothing runs next to them, and none of them judges what it finds."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.case import FIGURES, Case, SkipError
from tests.ranks.models import DEVICE

ON_GPU = DEVICE.type == "cuda"
TINY = {"width": 32, "depth": 2, "heads": 2, "context": 128, "vocabulary": 256}  # to see on a CPU that it runs


def _seconds(work: Callable[[], Any]) -> float:
    """The median seconds of a work."""
    if ON_GPU:
        from triton.testing import do_bench

        milliseconds: Any = do_bench(work, warmup=10, rep=60, return_mode="median")
        return milliseconds / 1e3
    found: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def kernels(codec: str) -> dict[str, Any]:
    """GB/s that 64 pieces of a region are read and written with, and the share of a copy."""
    from benchmarks.suites.kernels import KernelCase, works_of

    works, moved = works_of(KernelCase(codec, codec, "bfloat16", DEVICE.type), 128 if ON_GPU else 1)
    speeds = {name: moved[name] / _seconds(works[name]) / 1e9 for name in ("copy", "encode", "decode")}
    fused = _seconds(works["fused"])
    found = {f"{name} GB/s": speed for name, speed in speeds.items()}
    return found | {f"{name} / copy": speeds[name] / speeds["copy"] for name in ("encode", "decode")} | {"sum s": fused}


def exact_kernels(dtype: str) -> dict[str, Any]:
    """GB/s of values, encoded as differences of an optimizer's step, and decoded."""
    from benchmarks.suites.kernels import weights_or_gradients
    from towpath.codecs import exact

    elements = (64 if ON_GPU else 1) * 2**20
    made = weights_or_gradients(getattr(torch, dtype), 1e-4, elements)
    old, new = (x.to(DEVICE) for x in made if x is not None)
    there, back = (
        torch.empty(exact.message_bound(elements, new.dtype), dtype=torch.uint8, device=DEVICE) for _ in range(2)
    )
    exact.encode(old, new, there)
    exact.encode(new, old, back)
    [used] = exact.message_bytes([there])
    values, turns = old.clone(), [there, back]

    def decode() -> None:
        # In place, there and back again: each message is of the values that are there.
        exact.decode(turns[0], values, difference=True)
        turns.reverse()

    other = torch.empty_like(new)
    speeds = {
        "copy": 2 * new.nbytes / _seconds(lambda: other.copy_(new)) / 1e9,
        "encode": new.nbytes / _seconds(lambda: exact.encode(old, new, there)) / 1e9,
        "decode": new.nbytes / _seconds(decode) / 1e9,
    }
    return {f"{name} GB/s": value for name, value in speeds.items()} | {"bits per value": 8 * used / elements}


def host_milliseconds(strategy: str) -> dict[str, Any]:
    """Of one rank among 64, per unit and micro-step. The other ranks are not there."""
    from benchmarks.suites import host

    return {"ms": host.in_process(strategy, device=DEVICE.type)}


def step_alone(name: str, offload: str | None = None) -> dict[str, Any]:
    """A step of a GPT on one rank, where nothing is sent: what the engine itself costs."""
    from benchmarks.suites.gpu import MODEL, measure_step

    found = measure_step(name, MODEL if ON_GPU else TINY, 4 if ON_GPU else 2, DEVICE.type, offload)
    states = found.pop("memory_bytes", {})
    return found | ({"stats_bytes": sum(states.values())} if states else {})


def bytes_on_the_loopback(label: str) -> dict[str, Any]:
    """Of a step, by the kernel's counter, as a share of what the schedule says."""
    from benchmarks.suites.gpu import LOOPBACK, measure_bytes

    if not Path(LOOPBACK).exists():
        raise SkipError("the kernel counts no bytes of the loopback")
    size = None if ON_GPU else {"width": 256, "depth": 2, "heads": 4}
    share = measure_bytes((label,), DEVICE.type, size)[label]
    if not share:
        raise SkipError("the kernel's counter of the loopback does not move")
    return {"share": share}


def calls() -> dict[str, Any]:
    """Microseconds of the host for each NCCL call and kernel launch, and the memory of a communicator."""
    from benchmarks.suites.gpu import measure_calls

    return {name.removeprefix("microseconds: "): value for name, value in measure_calls(20).items()}


def product_beside_a_reduction(max_ctas: int) -> dict[str, Any]:
    """TFLOP/s of products on rank 0 while both ranks reduce 256 MB, by the thread blocks that NCCL may use."""
    from towpath.topology.groups import new_group

    for name in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"):  # which ranks that share a GPU have
        os.environ.pop(name, None)
    group = new_group([0, 1], "figures", backend="nccl", max_ctas=max_ctas)
    data = torch.ones(64 * 2**20, device="cuda")
    dist.all_reduce(data, group=group)
    rank, n, times = dist.get_rank(), 8192, 20
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    other = torch.cuda.Stream(priority=-1)

    def products() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            torch.mm(a, b)
        end.record()
        end.synchronize()
        return times * 2 * n**3 / begin.elapsed_time(end) / 1e9

    found: dict[str, Any] = {}
    if rank == 0:
        products()
        found["alone TFLOP/s"] = products()
    dist.barrier()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(other):
        begin.record()
        for _ in range(2):
            dist.all_reduce(data, group=group)
        end.record()
    if rank == 0:
        found["beside TFLOP/s"] = products()
    torch.cuda.synchronize()
    found["reduction GB/s"] = 2 * data.nbytes / begin.elapsed_time(end) / 1e6
    return found


def _case(name: str, feature: str, run: Any, *args: Any, **options: Any) -> Case:
    return Case(name=name, feature=feature, run=run, args=args, part=FIGURES, **options)


STRATEGIES, EXACT, COMPRESSED = "strategies and placements", "exact transport", "compressed training"

# The calls come first, as the memory of a communicator depends on what ran before. The largest models come last.
CASES = [
    _case("calls of the host", "routes", calls, ranks=2, needs=("cuda",)),
    *(
        _case(
            f"a product beside a reduction, {ctas} CTAs",
            "outer steps",
            product_beside_a_reduction,
            ctas,
            ranks=2,
            needs=("cuda",),
        )
        for ctas in (1, 2, 4, 16)
    ),
    *(
        _case(f"exact kernels, {dtype}", EXACT, exact_kernels, dtype, ranks=None, limit=120.0)
        for dtype in ("bfloat16", "float32")
    ),
    *(_case(f"kernels, {codec}", "codec kernels", kernels, codec, ranks=None) for codec in ("int8", "int4", "e4m3")),
    *(
        _case(f"host, {strategy}", STRATEGIES, host_milliseconds, strategy, ranks=None)
        for strategy in ("fsdp2", "zero3", "paro-iig", "mics", "zero++", "paro-ggg")
    ),
    *(
        _case(f"bytes, {label}", feature, bytes_on_the_loopback, label)
        for label, feature in (
            ("zero3", STRATEGIES),
            ("paro-ggg", STRATEGIES),
            ("paro-iig", STRATEGIES),
            ("paro-iig exact", EXACT),
            ("zero++", COMPRESSED),
        )
    ),
    *(
        _case(
            f"a step alone, {name}{f', offload={offload}' if offload else ''}",
            "offload of weights and optimizer" if offload else STRATEGIES,
            step_alone,
            name,
            offload,
            ranks=1,
        )
        for name, offload in (
            ("bare", None),
            ("fsdp2", None),
            ("zero3", None),
            ("zero3", "params"),
            ("zero3", "optimizer"),
        )
    ),
]
