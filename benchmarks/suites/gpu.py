"""Measure what one GPU can show of Towpath on NCCL.

    gpu [CASE …] [--quick]

- calls: Microseconds of the host for each NCCL call and kernel launch, and the memory of a communicator.
- host: Milliseconds of the host per unit and micro-step, of one rank on a fake world of 64.
- step: A step of one rank next to the bare module and FSDP2, and its peak of memory.
- network: Bytes of a step on the loopback, by the kernel's counter, next to the schedule.

In "calls" and "network", several ranks share the GPU. NCCL takes them for hosts of their own, which talk over the
loopback. Their computation takes turns, so these cases say nothing about overlap.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import towpath
from benchmarks import gpt
from benchmarks.harness.candidates import CaseError
from benchmarks.harness.figures import Check
from benchmarks.harness.shared_gpu import share_gpu
from benchmarks.harness.suite import Settings, Suite
from benchmarks.suites import host

MIB = 2**20


def _spawned(work: Callable[..., Any], world: int, *arguments: Any) -> Any:
    """Return what rank 0 of `world` ranks finds that share the GPU."""
    if not torch.cuda.is_available():
        raise CaseError("torch sees no CUDA device here")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (world, folder, work, arguments), nprocs=world)  # pyright: ignore
        return json.loads(Path(folder, "found").read_text())


def _rank(rank: int, world: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    share_gpu(rank)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    found = work(*arguments)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _all_are_here() -> None:
    _synchronize()
    dist.all_reduce(torch.zeros(1))  # over gloo


def microseconds(work: Callable[[], Any], times: int) -> float:
    """Return the median microseconds for which the host is busy with a call. The device is idle at first."""
    for _ in range(10):
        work()
    found: list[float] = []
    for _ in range(5):
        _all_are_here()
        began = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - began) / times * 1e6)
    return statistics.median(found)


# Calls ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallsCase:
    """The host's time for each kind of call."""

    name: str = "calls"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Measure on two ranks."""
        found = _spawned(measure_calls, 2, 10 if settings.quick else 50)
        return {"checks": [Check(name, value) for name, value in found.items()], "found": found}


def measure_calls(times: int) -> dict[str, float]:
    """Return the figures by name."""
    from towpath.collectives.backend import all_gather_single, reduce_scatter_single

    world, found = dist.get_world_size(), dict[str, float]()
    shard, region, other = (torch.zeros(n, device="cuda") for n in (1024, 1024 * world, 1024 * world))
    dist.all_reduce(shard)  # connects the parent
    groups: list[Any] = []
    for purpose in ("a communicator", "another one"):
        _all_are_here()
        before = torch.cuda.mem_get_info()[0]
        groups.append(dist.new_group(list(range(world)), backend="nccl"))
        dist.all_reduce(shard, group=groups[-1])
        _all_are_here()
        found[f"MiB of one rank: {purpose}"] = (before - torch.cuda.mem_get_info()[0]) / MIB / world
        _all_are_here()
    group = groups[0]

    def coalesced(count: int, call: Callable[..., Any], *tensors: torch.Tensor) -> Callable[[], None]:
        def work() -> None:
            with dist.distributed_c10d._coalescing_manager(group):  # pyright: ignore[reportPrivateUsage]
                for _ in range(count):
                    call(*tensors, group)

        return work

    def messages(count: int) -> Callable[[], None]:
        peer = 1 - dist.get_rank()
        tensors = [torch.zeros(1024, device="cuda") for _ in range(count)]

        def work() -> None:
            kinds = (dist.irecv, dist.isend)
            ops = [dist.P2POp(kind, t, group=group, group_peer=peer) for kind in kinds for t in tensors]
            for each in dist.batch_isend_irecv(ops):
                each.wait()

        return work

    calls: dict[str, Callable[[], Any]] = {
        "all-gather": lambda: all_gather_single(region, shard, group),
        "reduce-scatter": lambda: reduce_scatter_single(shard, region, group),
        "all-reduce": lambda: dist.all_reduce(shard, group=group),
        "all-to-all": lambda: dist.all_to_all_single(other, region, group=group),
        "8 all-gathers as one": coalesced(8, all_gather_single, region, shard),
        "8 reduce-scatters as one": coalesced(8, reduce_scatter_single, shard, region),
        "2 messages": messages(1),
        "32 messages": messages(16),
    }
    with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        for name, call in calls.items():
            found[f"microseconds: {name}"] = microseconds(call, times)
    small, event = torch.zeros(1024, device="cuda"), torch.cuda.Event()
    many = [torch.zeros(1024, device="cuda") for _ in range(12)]
    launches: dict[str, Callable[[], Any]] = {
        "add_": lambda: small.add_(1),
        "_foreach_copy_ of 12": lambda: torch._foreach_copy_(many, many[::-1]),
        "event.record": lambda: event.record(),
    }
    for name, call in launches.items():
        found[f"microseconds: {name}"] = microseconds(call, 10 * times)
    return found


# Host -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuHostCase:
    """The host's time of one rank among 64, with the launches of a real GPU."""

    name: str = "host"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Measure each strategy in a process of its own."""
        names = ("zero3", "zero++") if settings.quick else (*host.FLAT, "zero++")
        found = {name: host.in_process(name, device="cuda") for name in names}
        return {"checks": [Check(f"host milliseconds: {name}", value) for name, value in found.items()], "found": found}


# Step -----------------------------------------------------------------------------------------------------------------

CANDIDATES = ("bare", "fsdp2", "zero3")
MODEL = {"width": 2048, "depth": 24, "heads": 16, "context": 2048, "vocabulary": 32000}
SMALL = {"width": 256, "depth": 3, "heads": 4, "context": 128, "vocabulary": 256}
STEPS = 10


@dataclass(frozen=True, slots=True)
class StepCase:
    """A step of a GPT of 1.3 billion parameters on one rank, in bf16."""

    name: str = "step"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Measure each candidate in a process of its own, twice."""
        size, batch = (SMALL, 2) if settings.quick else (MODEL, 4)
        found = {name: [_spawned(measure_step, 1, name, size, batch) for _ in range(2)] for name in CANDIDATES}
        seconds = {name: min(run["seconds"] for run in runs) for name, runs in found.items()}
        ours = found["zero3"][0]
        return {
            "checks": [
                Check("zero3 / bare", seconds["zero3"] / seconds["bare"], at_most=1.03),
                Check("zero3 / fsdp2", seconds["zero3"] / seconds["fsdp2"], at_most=1.05),
                Check("peak of memory, GiB: zero3", ours["peak"] / 2**30),
                Check("peak of memory, GiB: fsdp2", found["fsdp2"][0]["peak"] / 2**30),
            ],
            "found": found,
        }


def measure_step(
    name: str, size: dict[str, int], batch: int, device: str = "cuda", offload: str | None = None
) -> dict[str, Any]:
    """Return the median seconds of a step, the peak of memory, and what stats() says of it."""
    on_gpu = device == "cuda"
    torch.manual_seed(0)
    with torch.device(device):  # one thread of a CPU would take ten seconds
        model: Any = gpt.GPT(**size).to(torch.bfloat16)
    if name == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device, (1,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif name != "bare":
        model = towpath.shard(
            model,
            towpath.strategy(name, towpath.Topology(1, 1), offload=offload),  # pyright: ignore
            units=[gpt.Block],
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(size["vocabulary"], (2, batch, size["context"]), device=device)
    if on_gpu:
        torch.cuda.empty_cache()  # of the weights in fp32
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    for _ in range(3 + STEPS):
        _synchronize()
        began = time.perf_counter()
        model(*tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        _synchronize()
        seconds.append(time.perf_counter() - began)
    found: dict[str, Any] = {"seconds": statistics.median(seconds[3:])}
    if on_gpu:
        found |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    if name not in ("bare", "fsdp2"):
        found["memory_bytes"] = dict(towpath.stats(model).memory_bytes)
    return found


# Network --------------------------------------------------------------------------------------------------------------

STRATEGIES = ("zero3", "mics", "paro-iig", "zero3@hierarchical", "zero3@two-hop", "zero++")
LOOPBACK = Path("/proc/net/dev")  # of this process's own network namespace


@dataclass(frozen=True, slots=True)
class NetworkCase:
    """The bytes that NCCL sends in a step, by the kernel's counter of the loopback."""

    name: str = "network"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Measure on four ranks."""
        found = _spawned(measure_bytes, 4, STRATEGIES[:2] if settings.quick else STRATEGIES)
        return {"checks": [Check(f"bytes sent / scheduled: {n}", value) for n, value in found.items()], "found": found}


def loopback_bytes() -> int:
    """Return the bytes that the loopback has sent."""
    line = next(line for line in LOOPBACK.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def measure_bytes(
    labels: tuple[str, ...], device: str = "cuda", size: dict[str, int] | None = None
) -> dict[str, float]:
    """Return what a step sends, as a share of what the schedule says, by strategy.

    Args:
        labels: Names of strategies, as in "zero3", "zero3@ring", or "paro-iig exact". Exact messages are compared with
            the values that they encode.
        device: "cuda" or "cpu".
        size: The GPT. By default, one of 50 million parameters.
    """
    topology, found = towpath.Topology(2, 2), dict[str, float]()
    for label in labels:
        name, _, route = label.removesuffix(" exact").partition("@")
        plain = towpath.strategy(name, topology, **({"route": route} if route else {}))  # pyright: ignore
        strategy = plain.with_exact_transports() if label.endswith(" exact") else plain
        torch.manual_seed(0)
        made = gpt.GPT(**(size or {"width": 1024, "depth": 4, "heads": 8}))
        model: Any = made.to(device, torch.bfloat16)
        model = towpath.shard(model, strategy, topology=topology)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.randint(gpt.VOCABULARY, (2, 2, 128), device=device)
        sent: list[int] = []
        for _ in range(4):
            _all_are_here()
            before = loopback_bytes()
            _all_are_here()
            model(*tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            _all_are_here()
            sent.append(loopback_bytes() - before)
            _all_are_here()
        planned = towpath.schedule(plain, model, 1)
        found[label] = statistics.median(sent[1:]) / (planned.inter_bytes + planned.intra_bytes)
    return found


SUITES = (Suite("gpu", __doc__ or "", [CallsCase(), GpuHostCase(), StepCase(), NetworkCase()]),)
