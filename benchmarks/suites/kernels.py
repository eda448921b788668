"""Measure the codecs' kernels on one thread, against a copy of memory and against the reference implementation.

    kernels [CASE …] [--device cpu] [--rounds 10] [--quick] [--resume]

Each candidate has a process of its own and 16 MB of input, or 512 MB on a GPU. In a round it works once without a
measurement, because the caches have the data of another candidate, and then twice. Bandwidth counts the bytes that are
read and written. "Apart" is what the fused `decode_sum_encode` replaces: decode four messages, add them up, and encode
the sum, with the same kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.candidates import Launch, LocalPlace
from benchmarks.harness.comparison import compare, started
from benchmarks.harness.figures import Check, medians
from benchmarks.harness.suite import Settings, Suite
from towpath.codecs.kernels import Kernels, kernels_for, reference
from towpath.core.formats import Codec

MEGABYTES = {"cpu": 16, "cuda": 512}
QUICK_MEGABYTES = 1
ROWS = 4
TIMES = 2  # per sample
CANDIDATES = ("copy", "encode", "decode", "fused", "apart", "reference encodes", "reference decodes")

# Throughput over that of a copy, and speed-ups.
LIMITS = {"encode/copy": 0.5, "decode/copy": 0.5, "encode/reference": 5.0, "decode/reference": 5.0, "fused/apart": 2.0}


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A codec, a dtype and a device."""

    name: str
    codec: str
    dtype: str
    device: str

    @property
    def limits(self) -> dict[str, float]:
        """The least figures of the common codecs."""
        return LIMITS if self.codec in ("int8", "int4") and self.dtype in ("float32", "bfloat16") else {}

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the kernels with each other."""
        megabytes = QUICK_MEGABYTES if settings.quick else MEGABYTES[self.device]
        launches = {kind: Launch(LocalPlace(), KernelWorker, (self, kind, megabytes), warm_up=1) for kind in CANDIDATES}
        with started(launches, settings.say) as made:
            found = compare(made, settings.rounds, settings.say)
            [facts] = made["encode"].ask("facts")
        median, moved = medians(found.seconds), facts["moved"]
        bandwidth = {kind: bytes_moved / median[kind] for kind, bytes_moved in moved.items()}
        figures = {
            "encode/copy": bandwidth["encode"] / bandwidth["copy"],
            "decode/copy": bandwidth["decode"] / bandwidth["copy"],
            "encode/reference": median["reference encodes"] / median["encode"],
            "decode/reference": median["reference decodes"] / median["decode"],
            "fused/apart": median["apart"] / median["fused"],
        }
        return {
            "checks": [Check(name, figure, at_least=self.limits.get(name)) for name, figure in figures.items()],
            "kernels": facts["kernels"],
            "copy_bytes_per_second": round(bandwidth["copy"]),
            **found.recorded(),
        }


TEXTS = (
    *("int8", "int4", "e4m3", "e5m2", "bf16"),
    *("int8:32", "int4:32", "int8:whole", "int4:64+hadamard", "int8+stochastic"),
)
CASES = [
    KernelCase(f"{text}-{dtype}" + "-cuda" * (device == "cuda"), text, dtype, device)
    for device in MEGABYTES
    for text in TEXTS
    for dtype in ("float32", "bfloat16", "float16")
]


def copying(x: torch.Tensor) -> Callable[[], Any]:
    """Return a function that copies a tensor."""
    other = torch.zeros_like(x)
    if x.device.type == "cuda":
        return lambda: other.copy_(x)
    return lambda: ctypes.memmove(other.data_ptr(), x.data_ptr(), x.nbytes)


def apart(
    kernels: Kernels, codec: Codec, rows: list[torch.Tensor], elements: int, out: torch.Tensor
) -> Callable[[], None]:
    """Return a function that decodes, adds and encodes in separate steps."""
    total, other = torch.zeros(2, elements, device=out.device)

    def work() -> None:
        kernels.decode(codec, rows[0], total)
        for row in rows[1:]:
            kernels.decode(codec, row, other)
            total.add_(other)
        kernels.encode(codec, total, out)

    return work


def works_of(case: KernelCase, kernels: Kernels, megabytes: int) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """Return the work of each candidate, and the bytes that some read and write."""
    codec, dtype = Codec.parse(case.codec), getattr(torch, case.dtype)
    elements = megabytes * 2**20 // dtype.itemsize
    x = torch.randn(elements, device=case.device).to(dtype)
    rows = torch.zeros(ROWS, codec.encoded_bytes(elements), dtype=torch.uint8, device=case.device)
    for i, row in enumerate(rows):
        reference.encode(codec, x.roll(i), row)
    messages, message, decoded = list(rows), torch.zeros_like(rows[0]), torch.zeros_like(x)
    work = {
        "copy": copying(x),
        "encode": lambda: kernels.encode(codec, x, message),
        "decode": lambda: kernels.decode(codec, messages[0], decoded),
        "fused": lambda: kernels.decode_sum_encode(codec, messages, elements, message),
        "apart": apart(kernels, codec, messages, elements, message),
        "reference encodes": lambda: reference.encode(codec, x, message),
        "reference decodes": lambda: reference.decode(codec, messages[0], decoded),
    }
    moved = {"copy": 2 * x.nbytes, "encode": x.nbytes + message.nbytes, "decode": x.nbytes + message.nbytes}
    return work, moved


class KernelWorker:
    """The worker of one candidate."""

    def __init__(self, rank: int, world: int, case: KernelCase, kind: str, megabytes: int) -> None:
        self._device, kernels = case.device, kernels_for(torch.device(case.device))
        torch.manual_seed(0)
        work, self._moved = works_of(case, kernels, megabytes)
        self._work, self._kernels = work[kind], kernels.name

    def sample(self) -> float:
        """Return the mean seconds of the work."""
        timed(self._work, self._device)
        return sum(timed(self._work, self._device) for _ in range(TIMES)) / TIMES

    def facts(self) -> dict[str, Any]:
        """Return the bytes that are moved, and the name of the kernels."""
        return {"moved": self._moved, "kernels": self._kernels}


def timed(work: Callable[[], Any], device: str) -> float:
    """Return the seconds of the work. On a CPU, only time in which this thread had a core counts."""
    if device == "cpu":
        began = time.thread_time()
        work()
        return time.thread_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    parser.add_argument("--device", choices=MEGABYTES, default="cpu")


def of_device(cases: Sequence[Any], options: argparse.Namespace) -> Sequence[Any]:
    """Return the cases of a device."""
    return [case for case in cases if case.device == options.device]


SUITES = (
    Suite(
        "kernels",
        __doc__ or "",
        CASES,
        rounds=10,
        options=add_device,
        chosen=of_device,
        other_cases="Names that end in -cuda need --device cuda.",
    ),
)
