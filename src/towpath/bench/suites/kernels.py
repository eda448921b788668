"""The codecs' kernels against a copy of memory, against the oracle, and fused against apart; on one thread.

    towpath bench kernels [CASE …] [--device cpu] [--rounds 10] [--quick]
                          [--resume]

In a round each contestant, in a process of its own, works once unmeasured (what ran before has the caches) and then
twice, on 16 MB of input (on a GPU 512 MB); figures are of the medians. Bandwidth counts the bytes read and the bytes
written, of the copy as of the kernels. "Apart" is what `decode_sum_encode` replaces: decode each of four messages, add
them up, encode the sum; every step by the same kernels, or by torch. Every run is added to
benchmarks/results/kernels.jsonl; `towpath bench report` shows them.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from towpath.bench.harness import race
from towpath.bench.harness.contestants import Entry, ThisHost
from towpath.bench.harness.figures import Check, medians
from towpath.bench.harness.pool import started
from towpath.bench.harness.suite import Settings, Suite
from towpath.codecs.kernels import Kernels, kernels_for, reference
from towpath.core.formats import Codec

MEGABYTES = {"cpu": 16, "cuda": 512}
QUICK_MEGABYTES = 1
ROWS = 4
TIMES = 2  # a turn
CONTESTANTS = ("copy", "encode", "decode", "fused", "apart", "oracle encodes", "oracle decodes")

# Of the bandwidth of a copy; times as fast as the oracle; times as fast as apart.
ASKED = {"encode/copy": 0.5, "decode/copy": 0.5, "encode/oracle": 5.0, "decode/oracle": 5.0, "fused/apart": 2.0}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    codec: str
    dtype: str
    device: str

    @property
    def asked(self) -> dict[str, float]:
        return ASKED if self.codec in ("int8", "int4") and self.dtype in ("float32", "bfloat16") else {}

    def measure(self, settings: Settings) -> dict[str, Any]:
        megabytes = QUICK_MEGABYTES if settings.quick else MEGABYTES[self.device]
        entries = {kind: Entry(ThisHost(), Turn, (self, kind, megabytes), warm_turns=1) for kind in CONTESTANTS}
        with started(entries, settings.say) as made:
            run = race.run(made, settings.rounds, settings.say)
            [told] = made["encode"].ask("facts")
        median, moved = medians(run.seconds), told["moved"]
        bandwidth = {kind: bytes_moved / median[kind] for kind, bytes_moved in moved.items()}
        figures = {
            "encode/copy": bandwidth["encode"] / bandwidth["copy"],
            "decode/copy": bandwidth["decode"] / bandwidth["copy"],
            "encode/oracle": median["oracle encodes"] / median["encode"],
            "decode/oracle": median["oracle decodes"] / median["decode"],
            "fused/apart": median["apart"] / median["fused"],
        }
        return {
            "checks": [Check(name, figure, at_least=self.asked.get(name)) for name, figure in figures.items()],
            "kernels": told["kernels"],
            "copy_bytes_per_second": round(bandwidth["copy"]),
            **run.recorded(),
        }


TEXTS = (
    *("int8", "int4", "e4m3", "e5m2", "bf16"),
    *("int8:32", "int4:32", "int8:whole", "int4:64+hadamard", "int8+stochastic"),
)
CASES = [
    Case(f"{text}-{dtype}" + "-cuda" * (device == "cuda"), text, dtype, device)
    for device in MEGABYTES
    for text in TEXTS
    for dtype in ("float32", "bfloat16", "float16")
]


def copying(x: torch.Tensor) -> Callable[[], Any]:
    other = torch.zeros_like(x)
    if x.device.type == "cuda":
        return lambda: other.copy_(x)
    return lambda: ctypes.memmove(other.data_ptr(), x.data_ptr(), x.nbytes)


def apart(
    kernels: Kernels, codec: Codec, rows: list[torch.Tensor], elements: int, out: torch.Tensor
) -> Callable[[], None]:
    total, other = torch.zeros(2, elements, device=out.device)

    def work() -> None:
        kernels.decode(codec, rows[0], total)
        for row in rows[1:]:
            kernels.decode(codec, row, other)
            total.add_(other)
        kernels.encode(codec, total, out)

    return work


def contestants(case: Case, kernels: Kernels, megabytes: int) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """What takes turns, and the bytes that each reads and writes."""
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
        "oracle encodes": lambda: reference.encode(codec, x, message),
        "oracle decodes": lambda: reference.decode(codec, messages[0], decoded),
    }
    moved = {"copy": 2 * x.nbytes, "encode": x.nbytes + message.nbytes, "decode": x.nbytes + message.nbytes}
    return work, moved


class Turn:
    """The worker of one contestant."""

    def __init__(self, rank: int, world: int, case: Case, kind: str, megabytes: int) -> None:
        self._device, kernels = case.device, kernels_for(torch.device(case.device))
        torch.manual_seed(0)
        work, self._moved = contestants(case, kernels, megabytes)
        self._work, self._kernels = work[kind], kernels.name

    def turn(self) -> float:
        timed(self._work, self._device)
        return sum(timed(self._work, self._device) for _ in range(TIMES)) / TIMES

    def facts(self) -> dict[str, Any]:
        return {"moved": self._moved, "kernels": self._kernels}


def timed(work: Callable[[], Any], device: str) -> float:
    """On a CPU, the seconds that this thread had a core: what others take of a shared machine is not the kernels'."""
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
    parser.add_argument("--device", choices=MEGABYTES, default="cpu")


def of_device(cases: Sequence[Any], options: argparse.Namespace) -> Sequence[Any]:
    return [case for case in cases if case.device == options.device]


SUITE = Suite(
    "kernels",
    __doc__ or "",
    CASES,
    rounds=10,
    options=add_device,
    chosen=of_device,
    other_cases="Those whose names end in -cuda are there with --device cuda.",
)
