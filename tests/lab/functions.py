"""What the tests call on ranks. No test module: a rank would import pytest with it."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab import LinkBytes, link_counters


def where(rank: int, world: int, *args: Any) -> tuple[Any, ...]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return (rank, world, [int(os.environ[name]) for name in names], os.uname().nodename, args)


def counted_send(rank: int, world: int, source: int, target: int, payload_bytes: int) -> LinkBytes:
    """What this node's links carried while `source` sent `target` a payload, and nothing else happened."""
    payload = torch.zeros(payload_bytes, dtype=torch.uint8)
    dist.barrier()  # connections are made now, and not counted
    _exchange(rank, source, target, payload[:1])
    dist.barrier()
    before = link_counters()
    dist.barrier()  # nobody begins before everybody has read
    _exchange(rank, source, target, payload)
    dist.barrier()
    return link_counters() - before


def receive_window(rank: int, world: int) -> str:
    return Path("/proc/sys/net/ipv4/tcp_rmem").read_text()


def timed_exchange(rank: int, world: int, payload_bytes: int) -> tuple[float, float]:
    """Ranks 0 and 1 send each other a payload at the same time: when this rank began, and when it had received all.

    In seconds of a clock that all processes of the machine share. Other ranks never begin, and have ended before.
    """
    ours = torch.zeros(payload_bytes, dtype=torch.uint8)
    theirs = torch.empty_like(ours)
    dist.barrier()
    began, ended = math.inf, -math.inf
    if rank in (0, 1):
        began = time.monotonic()
        sending = dist.isend(ours, 1 - rank)
        dist.recv(theirs, 1 - rank)
        ended = time.monotonic()
        assert sending is not None
        sending.wait()
    dist.barrier()
    return began, ended


def timed_convergence(rank: int, world: int, payload_bytes: int) -> tuple[float, float]:
    """Every other rank sends rank 0 a payload at the same time: when this rank began, and when its part was over."""
    payloads = [torch.zeros(payload_bytes, dtype=torch.uint8) for _ in range(world)]
    dist.barrier()
    began = time.monotonic()
    if rank == 0:
        works = [dist.irecv(payloads[source], source) for source in range(1, world)]
    else:
        works = [dist.isend(payloads[rank], 0)]
    for work in works:
        assert work is not None
        work.wait()
    ended = time.monotonic()
    dist.barrier()
    return began, ended


def _exchange(rank: int, source: int, target: int, payload: torch.Tensor) -> None:
    if rank == source:
        dist.send(payload, target)
    elif rank == target:
        dist.recv(payload, source)


def raise_on(rank: int, world: int, guilty: int) -> None:
    if rank == guilty:
        raise ValueError("a bad day")
    dist.barrier()


def die_on(rank: int, world: int, guilty: int) -> None:
    dist.barrier()
    if rank == guilty:
        os._exit(3)
    dist.barrier()


def hang_on(rank: int, world: int, guilty: int) -> None:
    if rank == guilty:
        threading.Event().wait()


def unpicklable(rank: int, world: int) -> Any:
    return threading.Lock()


def counted_by(rank: int, world: int, program: str) -> LinkBytes:
    """`carried`, as a program counts what its `step` sends: here a sum over all ranks."""
    step = {"dist": dist, "link_counters": link_counters, "step": lambda: dist.all_reduce(torch.zeros(100_000))}
    exec(program, around := dict[str, Any](step))
    return around["carried"]
