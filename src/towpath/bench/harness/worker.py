"""What a rank of a contestant does: make its worker, then what the driver says, until the driver says no more."""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import torch
import torch.distributed as dist

from towpath.bench.harness.allocator import keep_freed_memory


def serve(rank: int, world: int, make: Callable[..., Any], arguments: tuple[Any, ...], driver: str) -> None:
    """`make(rank, world, *arguments)` is the worker; then (method, arguments) come, and what each returns goes back."""
    torch.set_num_threads(1)
    keep_freed_memory()
    faulthandler.register(signal.SIGUSR1)  # the driver asks where a rank stands that does not answer
    with Client(driver, "AF_UNIX") as line:
        line.send(rank)
        worker = make(rank, world, *arguments)
        line.send(None)
        while True:
            try:
                method, given = line.recv()
            except EOFError:
                return
            line.send(getattr(worker, method)(*given))


def timed(work: Callable[[], Any]) -> float:
    """Seconds until the last rank is through, from when all are there."""
    _wait_for_all()
    began = time.perf_counter()
    work()
    _wait_for_all()
    return time.perf_counter() - began


def _wait_for_all() -> None:
    """For this rank's device, and then for the other ranks."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
