"""Measure the codecs' kernels on one thread, against a copy of memory and against the reference implementation.

    kernels [CASE …] [--device cpu] [--rounds 10] [--quick] [--resume]

Each candidate has a process of its own and 16 MB of input, or 512 MB on a GPU. The input is 64 pieces. Their messages
are in the cells of a wire buffer, and the engine's packing encodes, decodes and sums them. Results of before 2026-11-28
are of one message. In a round a candidate works once without a measurement, because the caches have the data of another
candidate, and then twice. Bandwidth counts the bytes that are read and written. "Apart" is what the fused sum replaces:
decode four rows of messages, add them up, and encode the sum, with the same kernels.
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
from towpath.codecs.kernels import kernels_for, plain
from towpath.codecs.kernels import pieces as loops
from towpath.codecs.kernels.pieces import PiecePlace, PieceTable
from towpath.codecs.packing import EncodedPacking
from towpath.collectives.collective import WireBuffers, Workspace
from towpath.core.formats import Codec

MEGABYTES = {"cpu": 16, "cuda": 512}
QUICK_MEGABYTES = 1
PIECES = 64  # of a region of 64 members
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


class Buffers:
    """The buffers of one case, laid out as a collective lays them out: cells in a wire buffer, in equally spaced rows.

    The wire buffer has ROWS received rows, one of them in the place of this member, and then a row of sums. Each row
    has the cells of all pieces.
    """

    def __init__(self, codec: Codec, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.workspace = Workspace(WireBuffers(device))
        self.packing = EncodedPacking(codec, device, 0, [None, None], 0)
        length = elements // PIECES // codec.grain * codec.grain
        self.cell = codec.cell_bytes(length)
        self.stride = PIECES * self.cell
        self.starts = range(0, PIECES * length, length)
        self.x = torch.randn(PIECES * length, device=device).to(dtype)
        self.out, self.total, self.other = torch.zeros_like(self.x), *torch.zeros(2, len(self.x), device=device)
        self.wire = self.workspace.take((ROWS + 1) * self.stride, torch.uint8)
        self.length, self.message_bytes = length, PIECES * codec.encoded_bytes(length)
        for row in range(ROWS):
            self.packing.pack(self.table(0, row), self.x.roll(row), self.wire, self.workspace)

    def table(self, source: int, target: int, rows: int = 1) -> PieceTable:
        """Return the table of all pieces, whose messages are in row `source` and go to row `target`."""
        pieces = [
            PiecePlace(self.length, start, source * self.stride + i * self.cell, target * self.stride + i * self.cell)
            for i, start in enumerate(self.starts)
        ]
        return self.packing.table(pieces, rows, self.stride if rows > 1 else 0)

    def apart(self) -> Callable[[], None]:
        """Return a function that decodes, adds and encodes in separate steps."""
        rows, sums = [self.table(row, 0) for row in range(ROWS)], self.table(0, ROWS)

        def work() -> None:
            self.packing.unpack(rows[0], self.wire, self.total, self.workspace)
            for row in rows[1:]:
                self.packing.unpack(row, self.wire, self.other, self.workspace)
                self.total.add_(self.other)
            self.packing.pack(sums, self.total, self.wire, self.workspace)

        return work


def works_of(case: KernelCase, megabytes: int) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """Return the work of each candidate, and the bytes that some read and write."""
    codec, dtype, device = Codec.parse(case.codec), getattr(torch, case.dtype), torch.device(case.device)
    made = Buffers(codec, megabytes * 2**20 // dtype.itemsize, dtype, device)
    encodes, decodes, sums = made.table(0, ROWS), made.table(0, 0), made.table(0, ROWS, ROWS)
    work = {
        "copy": copying(made.x),
        "encode": lambda: made.packing.pack(encodes, made.x, made.wire, made.workspace),
        "decode": lambda: made.packing.unpack(decodes, made.wire, made.out, made.workspace),
        "fused": lambda: made.packing.sum(sums, 1, made.wire, made.workspace),
        "apart": made.apart(),
        "reference encodes": lambda: loops.encode_pieces(plain, encodes, made.x, made.wire, 0),
        "reference decodes": lambda: loops.decode_pieces(plain, decodes, made.wire, made.out),
    }
    moved = made.x.nbytes + made.message_bytes
    return work, {"copy": 2 * made.x.nbytes, "encode": moved, "decode": moved}


class KernelWorker:
    """The worker of one candidate."""

    def __init__(self, rank: int, world: int, case: KernelCase, kind: str, megabytes: int) -> None:
        self._device, self._kernels = case.device, kernels_for(torch.device(case.device)).name
        torch.manual_seed(0)
        work, self._moved = works_of(case, megabytes)
        self._work = work[kind]

    def sample(self) -> float:
        """Return the mean seconds of the work."""
        timed(self._work, self._device)
        return sum(timed(self._work, self._device) for _ in range(TIMES)) / TIMES

    def facts(self) -> dict[str, Any]:
        """Return the bytes that are moved, and the name of the kernels."""
        return {"moved": self._moved, "kernels": self._kernels}


def weights_or_gradients(
    dtype: torch.dtype, rate: float | None, elements: int
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return weights before and after a step of AdamW at a learning rate, or None and gradients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(elements // 256, 256, generator=generator)
    if rate is None:
        rows, columns = (torch.randn(size, generator=generator) for size in ((elements // 256, 1), (1, 256)))
        return None, (x * torch.exp(0.35 * (rows + columns)) * 1e-4).flatten().to(dtype)
    old = 0.02 * x.flatten()
    # AdamW's steps are shorter than the learning rate, as gradients change their signs.
    new = old - 0.15 * rate * torch.randn(elements, generator=generator)
    return old.to(dtype), new.to(dtype)


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
