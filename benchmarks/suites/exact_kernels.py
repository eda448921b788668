"""Measure the exact codecs on one thread, against a copy of memory and against zstd.

    exact_kernels [CASE …] [--level x86_64_v3] [--quick] [--resume]

Each candidate has a process of its own and 16 MB of input: weights before and after a step of AdamW at a learning rate,
or gradients. Both are random numbers with the statistics of a GPT that was trained on text. Throughput counts the bytes
of the input. zstd takes part where the package zstandard is installed. It gets the codes, sorted by the place of their
bytes, and the time for that does not count.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.harness.candidates import Launch, LocalPlace
from benchmarks.harness.comparison import compare, started
from benchmarks.harness.figures import Check, medians
from benchmarks.harness.suite import Settings, Suite
from benchmarks.suites.kernels import QUICK_MEGABYTES, copying, timed, weights_or_gradients
from towpath.codecs import exact
from towpath.codecs.exact import specification
from towpath.codecs.kernels import _native
from towpath.codecs.kernels.cpp_codecs import ExactKernels

MEGABYTES = 16
CANDIDATES = ("copy", "encode", "decode")
ZSTD = ("zstd-1 encode", "zstd-1 decode", "zstd-3 encode", "zstd-3 decode")
GIGABYTES = {"x86_64_v4": 0.8, "x86_64_v3": 0.4}  # per second and core, encoding and decoding


@dataclass(frozen=True, slots=True)
class ExactCase:
    """A dtype, and weights at a learning rate or gradients (None), at a processor level."""

    name: str
    dtype: str
    rate: float | None
    level: str

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the codec with a copy and with zstd."""
        megabytes = QUICK_MEGABYTES if settings.quick else MEGABYTES
        kinds, skipped = (*CANDIDATES, *ZSTD), dict[str, str]()
        if importlib.util.find_spec("zstandard") is None:
            kinds, skipped = CANDIDATES, {"zstd": "the package zstandard is not installed"}
            settings.say(f"zstd is left out: {skipped['zstd']}")
        launches = {kind: Launch(LocalPlace(), ExactWorker, (self, kind, megabytes), warm_up=1) for kind in kinds}
        with started(launches, settings.say) as made:
            found = compare(made, settings.rounds, settings.say)
            bits = {kind: made[kind].ask("bits")[0] for kind in kinds if kind.endswith("encode")}
        median, checks = medians(found.seconds), list[Check]()
        for codec in ("", *sorted({kind.split()[0] + " " for kind in kinds if " " in kind})):
            seconds = [median[f"{codec}encode"], median[f"{codec}decode"]]
            least = GIGABYTES.get(self.level) if not codec else None
            for what, spent in (("encode", seconds[0]), ("decode", seconds[1]), ("both", sum(seconds))):
                limit = least if what == "both" else None
                checks.append(Check(f"{codec}{what}, GB/s", megabytes * 2**20 / spent / 1e9, at_least=limit))
            checks.append(Check(f"{codec}bits per element", bits[f"{codec}encode"]))
        checks.append(Check("copy, GB/s", megabytes * 2**20 / median["copy"] / 1e9))
        return {"checks": checks, "skipped": skipped, **found.recorded()}


CASES = [
    ExactCase(f"{dtype}-{'gradients' if rate is None else f'{rate:.0e}'}", dtype, rate, _native.levels()[0])
    for dtype in ("bfloat16", "float16", "float32")
    for rate in (1e-3, 1e-4, 1e-5, None)
]


def planes_of(old: torch.Tensor | None, new: torch.Tensor) -> bytes:
    """Return the bytes of the codes, the first bytes of all elements and so on."""
    form = specification.FORMATS[new.dtype]
    bits = form.bits_of(new)
    if old is None:
        code = bits << 1 | bits >> (form.bits - 1)
    else:
        distance = (form.ordered(bits) - form.ordered(form.bits_of(old))) & form.all
        code = distance << 1 ^ -(distance >> (form.bits - 1))
    shifts = range(0, form.bits, 8)
    return torch.stack([code >> shift & 255 for shift in shifts]).to(torch.uint8).numpy().tobytes()


class ExactWorker:
    """The worker of one candidate."""

    def __init__(self, rank: int, world: int, case: ExactCase, kind: str, megabytes: int) -> None:
        torch.set_num_threads(1)
        self._elements = megabytes * 2**20 // getattr(torch, case.dtype).itemsize
        old, new = weights_or_gradients(getattr(torch, case.dtype), case.rate, self._elements)
        make = zstd_work if kind.startswith("zstd") else native_work
        self._work, self._bytes = make(case, kind, old, new) if kind != "copy" else (copying(new), new.nbytes)

    def sample(self) -> float:
        """Return the seconds of the work."""
        self._work()
        return timed(self._work, "cpu")

    def bits(self) -> float:
        """Return the bits that an element takes."""
        return 8 * self._bytes / self._elements


def native_work(
    case: ExactCase, kind: str, old: torch.Tensor | None, new: torch.Tensor
) -> tuple[Callable[[], Any], int]:
    """Return the work of the exact codec, and the bytes of the message."""
    kernels, out = ExactKernels(case.level), torch.empty(exact.message_bound(new.numel(), new.dtype), dtype=torch.uint8)
    used = exact.encode(old, new, out, kernels)
    if kind == "encode":
        return lambda: exact.encode(old, new, out, kernels), used
    if old is None:
        values = torch.empty_like(new)
        return lambda: exact.decode(out, values, False, kernels), used
    # Decoding is in place. There and back again, so that each decoding is of the values that its message was made for.
    back = torch.empty_like(out)
    exact.encode(new, old, back, kernels)
    values, turns = old.clone(), [out, back]

    def decode() -> None:
        exact.decode(turns[0], values, True, kernels)
        turns.reverse()

    return decode, used


def zstd_work(case: ExactCase, kind: str, old: torch.Tensor | None, new: torch.Tensor) -> tuple[Callable[[], Any], int]:
    """Return the work of zstd, and the bytes that it makes of the input."""
    import zstandard  # pyright: ignore[reportMissingImports]

    planes, coder = planes_of(old, new), zstandard.ZstdCompressor(level=int(kind[5]))
    made, reader = coder.compress(planes), zstandard.ZstdDecompressor()
    if kind.endswith("encode"):
        return lambda: coder.compress(planes), len(made)
    return lambda: reader.decompress(made), len(made)


def add_level(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    levels = _native.levels()
    parser.add_argument("--level", choices=levels, default=levels[0], metavar="LEVEL", help=", ".join(levels))


def at_level(cases: Any, options: argparse.Namespace) -> Any:
    """Return the cases at a processor level."""
    return [replace(case, level=options.level) for case in cases]


SUITES = (Suite("exact_kernels", __doc__ or "", CASES, rounds=10, options=add_level, chosen=at_level),)
