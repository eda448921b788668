"""The codecs' kernels against a copy of memory, against the oracle, and fused against apart; on one thread.

    python benchmarks/kernels.py [CASE …] [--device cpu] [--rounds 9] [-o benchmarks/results/kernels.json]

In a round all contestants take one turn each, on 16 MB of input (on a GPU 512 MB); figures are of the medians.
Bandwidth counts the bytes read and the bytes written, of the copy as of the kernels. "Apart" is what
`decode_sum_encode` replaces: decode each of four messages, add them up, encode the sum; every step by the same kernels,
or by torch.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from results_file import keep, selected
from towpath.codecs.kernels import reference
from towpath.codecs.kernels.dispatch import Kernels, kernels_for
from towpath.spec.formats import Codec

MEGABYTES = {"cpu": 16, "cuda": 512}
ROWS = 4

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


def contestants(case: Case, kernels: Kernels) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """What takes turns, and the bytes that each reads and writes."""
    codec, dtype = Codec.parse(case.codec), getattr(torch, case.dtype)
    elements = MEGABYTES[case.device] * 2**20 // dtype.itemsize
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


def run(case: Case, rounds: int) -> dict[str, Any]:
    kernels = kernels_for(torch.device(case.device))
    work, moved = contestants(case, kernels)
    seconds: dict[str, list[float]] = {kind: [] for kind in work}
    for turn in range(rounds + 1):
        for kind, each in work.items():
            elapsed = timed(each, case.device)
            if turn > 0:  # one of each warms up
                seconds[kind].append(elapsed)
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    bandwidth = {kind: bytes_moved / median[kind] for kind, bytes_moved in moved.items()}
    figures = {
        "encode/copy": bandwidth["encode"] / bandwidth["copy"],
        "decode/copy": bandwidth["decode"] / bandwidth["copy"],
        "encode/oracle": median["oracle encodes"] / median["encode"],
        "decode/oracle": median["oracle decodes"] / median["decode"],
        "fused/apart": median["apart"] / median["fused"],
    }
    return {
        "case": asdict(case),
        "kernels": kernels.name,
        "figures": {name: round(figure, 3) for name, figure in figures.items()},
        "asked": case.asked,
        "copy_bytes_per_second": round(bandwidth["copy"]),
        "median_seconds": {kind: round(value, 6) for kind, value in median.items()},
        "seconds": {kind: [round(s, 6) for s in values] for kind, values in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="such as int4-bfloat16 (default: all of the device)")
    parser.add_argument("--device", choices=MEGABYTES, default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in selected([c for c in CASES if c.device == options.device], options.cases):
        result = run(case, options.rounds)
        print(f"{case.name} ({result['kernels']}), a copy: {result['copy_bytes_per_second'] / 1e9:.1f} GB/s")
        for name, figure in result["figures"].items():
            least = case.asked.get(name)
            verdict = "" if least is None else f" (asked ≥ {least}: {'met' if figure >= least else 'MISSED'})"
            print(f"  {name}: {figure:.2f}{verdict}", flush=True)
        if options.output:
            keep(options.output, result, [c.name for c in CASES])


if __name__ == "__main__":
    main()
