"""Compile every Triton kernel without a GPU, and read what it takes from the binary: registers, spills, shared memory.

    python -m tools.kernels                     all launches, for sm_80, sm_90 and sm_100
    python -m tools.kernels --out FILE          also writes the table of this Triton into FILE (JSON)

The launches are Towpath's own: its functions run on tensors without memory, and Triton itself finds the types and the
divisibility of each argument. What it would compile is recorded in place of a launch. Long messages have sizes of 64
bits. The tool exits with 1 if a kernel does not compile, spills registers, or takes more of them than `BOUNDS` says.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from towpath.codecs.exact import message_bound
from towpath.codecs.kernels.pieces import PiecePlace, PieceTable
from towpath.core.formats import Codec, dtype_name

ARCHITECTURES = (80, 90, 100)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# The most registers that a thread of each kernel may take. A multiprocessor has 65,536 of them.
BOUNDS = {
    "codec encode": 112,
    "codec decode": 80,
    "codec largest": 96,
    "exact digest": 48,
    "exact header": 24,
    "exact check": 32,
    "exact plan": 112,
    "exact write": 144,
    "exact decode": 208,
}

# Every code, with every option and kind of block of a codec.
CODECS = (
    "int8", "int8:32+stochastic", "int8:2048", "int8:whole+hadamard+stochastic", "int4", "int4:whole",
    "int4:4096+hadamard+stochastic", "e4m3", "e4m3:4096+hadamard", "e5m2:32", "e5m2:whole+hadamard", "bf16",
)  # fmt: skip

META = torch.device("meta")
_SHORT, _LONG = 1_000_003, 2**31 + 5


@dataclass(frozen=True)
class Source:
    """One kernel as a launch compiles it."""

    label: str
    function: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: Any
    options: dict[str, Any]

    @property
    def kernel(self) -> str:
        """The kernel's name in the table: `exact decode`, or `codec encode`."""
        package = "exact" if ".exact." in self.function.__module__ else "codec"
        return f"{package} {self.function.__name__.removesuffix('_kernel').strip('_')}"

    def compiled(self, architecture: int) -> Any:
        triton, compiler = importlib.import_module("triton"), importlib.import_module("triton.compiler")
        target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", architecture, 32)
        source = compiler.ASTSource(self.function, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=target, options=self.options)


@dataclass(frozen=True)
class Usage:
    """The resources of a compiled kernel. `local` is memory for spilled registers, in bytes of each thread."""

    registers: int
    local: int
    shared: int
    warps: int
    seconds: float  # of a processor, to compile it


def usage_of(source: Source, architecture: int) -> Usage:
    before = _processor_seconds()
    made = source.compiled(architecture)
    seconds = _processor_seconds() - before
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([_cuobjdump(), "--dump-resource-usage", file.name], capture_output=True, check=True)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said.stdout.decode())}
    local = found["STACK"] + found["LOCAL"]
    return Usage(found["REG"], local, made.metadata.shared, made.metadata.num_warps, seconds)


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@cache
def _cuobjdump() -> str:
    return importlib.import_module("triton.knobs").nvidia.cuobjdump.path


# ---- Launches ----


def sources(wanted: Callable[[str], bool] = lambda label: True) -> list[Source]:
    """Return all kernels that launches compile, each once. `wanted` may choose among the labels of launches."""
    found: dict[Any, Source] = {}
    for label, launch in (*_codec_launches(), *_exact_launches()):
        if wanted(label):
            with _recorded(label) as made:
                launch()
            for each in made:
                identity = each.function.__name__, str((each.signature, each.constants, each.attributes))
                found.setdefault(identity, each)
    return list(found.values())


@contextmanager
def _recorded(label: str) -> Generator[list[Source]]:
    """Record what launches would compile, in place of compiling and launching it."""
    jit = importlib.import_module("triton.runtime.jit")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", ARCHITECTURES[0], 32)
    made: list[Source] = []

    def record(
        function: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, *_: Any
    ) -> None:
        chosen = {name: getattr(options, name) for name in ("num_warps", "maxnreg", "enable_fp_fusion")}
        made.append(Source(label, function, signature, constants, attributes, chosen))

    def zero(*_: int) -> int:
        return 0

    no_gpu = SimpleNamespace(get_current_device=zero, get_current_stream=zero, get_current_target=lambda: target)
    with (
        mock.patch.object(jit.JITFunction, "_do_compile", record),
        mock.patch.object(torch.Tensor, "data_ptr", _address),
        mock.patch.object(jit, "driver", SimpleNamespace(active=no_gpu)),
    ):
        yield made


def _address(tensor: torch.Tensor) -> int:
    """Return an address for a tensor without memory: its place in a buffer, which starts aligned on a GPU."""
    return int(tensor.storage_offset()) * tensor.itemsize


def _codec_launches() -> Iterator[tuple[str, Callable[[], Any]]]:
    kernels = importlib.import_module("towpath.codecs.kernels.triton_codecs")
    for number, text in enumerate(CODECS):
        codec, turn = Codec.parse(text), DTYPES[number % 3]
        cases = [(_SHORT, turn, 0), (_SHORT, turn, 1)]
        if text in ("int8", "int4", "e4m3", "bf16"):
            cases += [(_LONG, turn, 0), *((_SHORT, dtype, 0) for dtype in DTYPES if dtype != turn)]
        for n, dtype, start in cases:
            values, message = _empty(n, dtype), _empty(codec.encoded_bytes(n) + start, torch.uint8)[start:]
            where = f"codec {text}, one message of {n} {dtype_name(dtype)}{' at an odd address' * start}"
            yield f"{where}, encode", partial(kernels.encode, codec, values, message)
            yield f"{where}, decode", partial(kernels.decode, codec, message, values)
        yield from _piece_launches(kernels, text, turn)


def _piece_launches(kernels: Any, text: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield launches for pieces whose lengths allow wide words, and for others."""
    codec = Codec.parse(text)
    for lengths in ((8192, 16384), (257, 5000)):
        cell, size, wide = codec.cell_bytes(max(lengths)), sum(lengths), lengths[0] % 16 == 0
        row = len(lengths) * cell
        places = [PiecePlace(n, sum(lengths[:i]), i * cell, 3 * row, sum(lengths[:i])) for i, n in enumerate(lengths)]
        one, three = PieceTable(codec, places, META), PieceTable(codec, places, META, 3, row)
        values, wire, kept = _empty(size, dtype), _empty(5 * row, torch.uint8), _empty(size, torch.float32)
        where = f"codec {text}, pieces of {lengths}, {dtype_name(dtype)}"
        # Error feedback is compiled once with values, and once with sums.
        yield f"{where}, encode", partial(kernels.encode_pieces, one, values, wire, 0, kept if wide else None)
        yield f"{where}, sum and encode", partial(kernels.encode_pieces, three, None, wire, 0, None if wide else kept)
        yield f"{where}, decode", partial(kernels.decode_pieces, one, wire, values)
        yield f"{where}, sum", partial(kernels.decode_pieces, three, wire, values)


def _exact_launches() -> Iterator[tuple[str, Callable[[], Any]]]:
    kernels = importlib.import_module("towpath.codecs.exact.triton_kernels")
    # In between, messages have 2 GiB or more of fewer elements.
    for n in (_SHORT, 2**30 + 512, _LONG):
        for dtype in DTYPES:
            values, bound = _empty(n, dtype), message_bound(n, dtype)
            for old in (None, values):
                what = f"exact, {n} {dtype_name(dtype)}{', differences' * (old is not None)}"
                yield f"{what}, encode", partial(kernels.encode, old, values, _empty(bound, torch.uint8))
                received = _empty(4 * bound, torch.uint8).view(4, bound)
                slices = _empty(4 * n, dtype).view(4, n)
                yield f"{what}, decode", partial(kernels.decode_slices, received, slices, 1, old is not None)
            yield f"exact, digest of {n} {dtype_name(dtype)}", partial(kernels.digest, values)


def _empty(elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(elements, dtype=dtype, device=META)


# ---- The table ----


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file whose rows for this Triton are replaced")
    parser.add_argument("--only", default="", help="a part of the label of launches, such as 'exact' or 'codec int8'")
    parser.add_argument("--architectures", type=int, nargs="+", default=ARCHITECTURES)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder, "TRITON_INTERPRET": "0"}),
        ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as workers,
    ):
        count = len(_sources(options.only))
        tasks = [(options.only, i, a) for i in range(count) for a in options.architectures]
        found = list(workers.map(_compile, tasks, chunksize=8))
    version = importlib.import_module("triton").__version__
    rows, failures = _summarized(found)
    print(f"Triton {version}, {count} kernels, sm_{', sm_'.join(map(str, options.architectures))}")
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if options.out is not None:
        tables = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
        merged = {(row["kernel"], row["sm"]): row for row in [*tables.get(version, []), *rows]}
        tables[version] = [merged[key] for key in sorted(merged)]
        text = ",\n".join(
            f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in tables[name]) + "\n ]"
            for name in sorted(tables)
        )
        options.out.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    print("\n".join(failures) or "All compile, none spills, and none exceeds its bound.")
    return 1 if failures else 0


def _compile(task: tuple[str, int, int]) -> tuple[str, str, int, Usage | str]:
    only, index, architecture = task
    source = _sources(only)[index]
    try:
        outcome = usage_of(source, architecture)
    except Exception as error:
        outcome = f"does not compile: {type(error).__name__}: {error}"
    return source.kernel, source.label, architecture, outcome


@cache
def _sources(only: str) -> list[Source]:
    return sources(lambda label: only in label)


def problem_of(kernel: str, usage: Usage) -> str:
    """Return why the resources of a kernel are too many, or nothing."""
    if usage.local:
        return f"spills {usage.local} bytes of each thread. Work on fewer elements in a program, or on more warps."
    if usage.registers > BOUNDS[kernel]:
        return (
            f"takes {usage.registers} registers, and its bound is {BOUNDS[kernel]}. Hold fewer values at a time, or "
            "raise the bound in tools/kernels.py if the kernel is worth it."
        )
    return ""


def _summarized(found: Iterable[tuple[str, str, int, Usage | str]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each kernel and architecture with the most that a variant takes, and what is wrong."""
    groups: dict[tuple[str, int], list[Usage]] = {}
    failures: list[str] = []
    for kernel, label, architecture, outcome in found:
        if isinstance(outcome, Usage):
            groups.setdefault((kernel, architecture), []).append(outcome)
            outcome = problem_of(kernel, outcome)
        if outcome:
            failures.append(f"{kernel} ({label}), sm_{architecture}: {outcome}")
    rows = [
        {
            "kernel": kernel,
            "sm": architecture,
            "variants": len(each),
            "warps": max(usage.warps for usage in each),
            "registers": max(usage.registers for usage in each),
            "spilled": max(usage.local for usage in each),
            "shared": max(usage.shared for usage in each),
            "seconds": round(sum(usage.seconds for usage in each) / len(each), 2),
        }
        for (kernel, architecture), each in sorted(groups.items())
    ]
    return rows, failures


if __name__ == "__main__":
    sys.exit(main())
