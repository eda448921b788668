"""Model-FLOPs utilisation: the share of the ranks' arithmetic that goes into the model.

Counted is what the model needs, not what is done: what activation checkpointing recomputes counts once.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

# Dense matrix products of the tensor cores, FLOP/s, as their makers' data sheets state them; the first name that is
# a word of the device's counts. Half precision; TF32, where torch.backends.cuda.matmul lets float32 take it.
_GPUS: tuple[tuple[str, float, float], ...] = (
    ("H100 PCIe", 756e12, 378e12),
    ("H100 NVL", 835e12, 417e12),
    ("H100", 989e12, 494e12),
    ("H200", 989e12, 494e12),
    ("GH200", 989e12, 494e12),
    ("B200", 2250e12, 1125e12),
    ("A100", 312e12, 156e12),
    ("A40", 149.7e12, 74.8e12),
    ("A10G", 70e12, 35e12),
    ("A10", 125e12, 62.5e12),
    ("L40S", 362e12, 183e12),
    ("L4", 121e12, 60e12),
)

_MEASURED_SIDE = {"cpu": 768, "cuda": 8192}
_MEASURED_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Peak:
    """What one rank could compute at most. `source`: where the number is from."""

    flops_per_second: float
    source: str


def peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """Of this rank, as the data sheet has it; else as fast as a product of two matrices is here, with its threads."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        stated = stated_flops(name, dtype)
        if stated is not None:
            return Peak(stated, f"{name}, data sheet")
    return Peak(_measure(device, dtype), "measured")


def stated_flops(gpu: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU of this name, where it is known."""
    for name, half, tf32 in _GPUS:
        if re.search(rf"\b{name}\b", gpu):
            if dtype in (torch.bfloat16, torch.float16):
                return half
            if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
                return tf32
            return None
    return None


def _measure(device: torch.device, dtype: torch.dtype) -> float:
    """The best of what fits in a fraction of a second. Ranks that share cores measure at once, and get their share."""
    side = _MEASURED_SIDE.get(device.type, 768)
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    best, until = 0.0, time.perf_counter() + _MEASURED_SECONDS
    while best == 0.0 or time.perf_counter() < until:
        _settle(device)
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        _settle(device)
        best = max(best, 2 * side**3 / (time.perf_counter() - began))
    return best


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
