"""How fast this rank multiplies matrices and copies memory. All ranks measure at the same time, as in training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# By type of device: the side of the matrices, their dtype, and the bytes of a copy.
_SIZES = {"cpu": (512, "float32", 1 << 24), "cuda": (8192, "bfloat16", 1 << 28)}
# Longer than the period in which a container is throttled.
_INTERVAL_SECONDS = 0.2
_SHARE_OF_COPIES = 0.3


def compute(seconds: float, local_rank: int | None) -> list[dict[str, Any]]:
    """Measure the device of this rank, or each device of this machine in turn if there is no launcher.

    Returns:
        For each device its name, FLOP/s and copied bytes per second.
    """
    import torch

    if not torch.cuda.is_available():
        return [_measured(torch.device("cpu"), seconds)]
    count = torch.cuda.device_count()
    devices = range(count) if local_rank is None else [local_rank % count]
    return [_measured(torch.device("cuda", index), seconds) for index in devices]


def _measured(device: Any, seconds: float) -> dict[str, Any]:
    import torch

    side, dtype, copy_bytes = _SIZES[device.type]
    a, b, out = (torch.ones(side, side, dtype=getattr(torch, dtype), device=device) for _ in range(3))
    x, y = (torch.ones(copy_bytes // 4, device=device) for _ in range(2))

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    products = _times_per_second(lambda: torch.mm(a, b, out=out), wait, seconds * (1 - _SHARE_OF_COPIES))
    copies = _times_per_second(lambda: x.copy_(y), wait, seconds * _SHARE_OF_COPIES)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name if device.index is None else f"{device} {name}",
        "flops": 2 * side**3 * products,
        "copied": copy_bytes * copies,
        "threads": torch.get_num_threads(),
    }


def _times_per_second(work: Callable[[], object], wait: Callable[[], None], seconds: float) -> float:
    """Return how often the work is done in a second, in the best of several intervals."""
    work()
    wait()
    best, until = 0.0, time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        count, taken = 0, 0.0
        while taken < _INTERVAL_SECONDS:
            work()
            wait()
            count, taken = count + 1, time.perf_counter() - began
        best = max(best, count / taken)
    return best
