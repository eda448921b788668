"""Triton's codecs without a GPU: interpreted, they make the oracle's bits; compiled, they hold nothing inexact.

Whether kernels are interpreted is settled when they are imported: they are, in processes of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import codec_cases
from tests.ranks.server import server
from tests.ranks.strategies import seldom
from tools import kernels
from towpath.core.formats import Codec

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

KERNELS = "towpath.codecs.kernels.triton_codecs"
EXACT = "towpath.codecs.exact.triton_kernels"
LENGTHS = (1, 31, 257, 5000)  # each codec meets one of them and another codec the next: the interpreter is slow

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    # Triton itself must be imported there, so the process cannot fork from a server that has it.
    yield from _elsewhere({"TRITON_INTERPRET": "1"}, tmp_path_factory.mktemp("triton"), get_context("spawn"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield from _elsewhere({"TRITON_INTERPRET": "0"}, tmp_path_factory.mktemp("triton"), server())


def _elsewhere(environment: dict[str, str], cache: Path, context: BaseContext) -> Iterator[Run]:
    environment = {**environment, "TRITON_CACHE_DIR": str(cache)}
    with ProcessPoolExecutor(1, context, _prepare, (environment,)) as process:
        yield lambda work, *args: process.submit(work, *args).result()


def _prepare(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "i, text",
    [seldom(i, text) if i % 2 else (i, text) for i, text in enumerate(codec_cases.CODECS)],
    ids=codec_cases.CODECS,
)
def test_every_codec(interpreted: Run, i: int, text: str) -> None:
    dtype = codec_cases.DTYPES[i % len(codec_cases.DTYPES)]
    interpreted(_check, "check", text, dtype, LENGTHS[i % len(LENGTHS)])


@pytest.mark.parametrize(
    "text, dtype",
    [
        (text, dtype) if text == "int8" or (text, dtype) == ("e4m3", torch.float16) else seldom(text, dtype)
        for text in ("int8", "int4", "e4m3", "bf16")
        for dtype in codec_cases.DTYPES
    ],
    ids=str,
)
def test_every_dtype(interpreted: Run, text: str, dtype: torch.dtype) -> None:
    for n in (33, 2049):
        interpreted(_check, "check", text, dtype, n)


@pytest.mark.parametrize(
    "i, text",
    [(i, text) if text == "int4" else seldom(i, text) for i, text in enumerate(codec_cases.CODECS)],
    ids=codec_cases.CODECS,
)
def test_many_pieces_in_one_launch(interpreted: Run, i: int, text: str) -> None:
    dtype = codec_cases.DTYPES[i % len(codec_cases.DTYPES)]
    lengths = (codec_cases.UNEVEN, codec_cases.EVEN, codec_cases.WIDE)[i // 2 % 3]
    for feedback in (False, True):
        interpreted(_check, "check_pieces", text, dtype, lengths, feedback)


@pytest.mark.parametrize("text", ["int8:2048", seldom("bf16")])
def test_a_long_message(interpreted: Run, text: str) -> None:
    interpreted(_check, "check_message", text, torch.float32, codec_cases.LONG)


@pytest.mark.parametrize("text", ["e4m3:whole", "e5m2:whole"])
def test_every_rounding_of_8_bit_floats(interpreted: Run, text: str) -> None:
    interpreted(_check, "check_8_bit_floats", text)


def test_messages_without_elements(interpreted: Run) -> None:
    for text in codec_cases.CODECS:
        interpreted(_check, "check", text, torch.float32, 0)


@pytest.mark.parametrize(
    "dtype, difference",
    [
        (torch.bfloat16, True),
        *(seldom(*case) for case in ((torch.bfloat16, False), (torch.float16, True), (torch.float16, False))),
        (torch.float32, False),
        seldom(torch.float32, True),
    ],
    ids=str,
)
def test_exact_codecs(interpreted: Run, dtype: torch.dtype, difference: bool) -> None:
    interpreted(_check, "check_exact", dtype, difference)


@pytest.mark.parametrize("check", [seldom("check_exact_almost_raw")])
def test_exact_payloads_almost_as_long_as_their_values(interpreted: Run, check: str) -> None:
    interpreted(_check, check)


@pytest.mark.parametrize(
    "launches",
    [
        "exact, 1000003 bfloat16, differences",
        "codec int8, pieces of (257, 5000)",
        *map(seldom, ("exact", "codec int", "codec e", "codec bf16")),
    ],
)
def test_kernels_compile_for_a_gpu_within_their_bounds(compiled: Run, launches: str) -> None:
    """Every kernel that these launches need, for a Hopper GPU. `python -m tools.kernels` compiles all for three."""
    found = compiled(_problems, launches)
    assert found, "no launch has this label"
    assert not any(found.values()), found


def test_too_many_registers_and_spills_are_problems() -> None:
    limit = kernels.BOUNDS["exact plan"]
    usages = [kernels.Usage(*each, shared=0, warps=1, seconds=0) for each in ((limit, 0), (limit + 1, 0), (9, 8))]
    within, more, spilled = (kernels.problem_of("exact plan", usage) for usage in usages)
    assert not within and f"takes {limit + 1} registers" in more and "spills 8 bytes" in spilled


@pytest.mark.parametrize(
    "text", ["int8+stochastic", *map(seldom, ("int4:whole+hadamard+stochastic", "e4m3", "e5m2", "bf16"))]
)
def test_compiled_for_a_gpu_nothing_is_fused_approximate_or_flushed(compiled: Run, text: str) -> None:
    """The interpreter cannot show it: it has no such instructions. Memory is read and written in words of 4 bytes."""
    for assembly in compiled(_assembly, text):
        floats = set(re.findall(r"^\s*(?:@\S+ )?([a-z]+\.\S*f(?:32|16)\S*)", assembly, re.MULTILINE))
        assert floats or text == "bf16"
        assert not {i for i in floats if re.search(r"fma|mad|approx|full|ftz|rcp", i)}
        assert not {i for i in floats if re.match(r"(add|sub|mul|div)\.", i) and ".rn." not in i}
        assert not re.search(r"(ld|st)\.global\S*\.[bu](8|16)\b", assembly)


def _check(name: str, *case: Any) -> None:
    """A check of tests/codec_cases.py; Triton's modules are imported where the environment says how they run."""
    kernels = importlib.import_module(EXACT if name.startswith("check_exact") else KERNELS)
    getattr(codec_cases, name)(kernels, *case)


def _problems(launches: str) -> dict[str, str]:
    sources = kernels.sources(lambda label: label.startswith(launches))
    return {f"{s.kernel} ({s.label})": kernels.problem_of(s.kernel, kernels.usage_of(s, 90)) for s in sources}


def _assembly(text: str) -> list[str]:
    """Of the kernels that a codec runs: PTX for a Hopper GPU, which need not be there."""
    triton, kernels = importlib.import_module("triton"), importlib.import_module(KERNELS)
    compiler, backends = importlib.import_module("triton.compiler"), importlib.import_module("triton.backends.compiler")
    codec = Codec.parse(text)
    made_for = kernels._Variant.of(codec, 16, 4)

    def compiled(kernel: Any, variant: Any, pieces: bool = True, **pointers: str) -> str:
        names: list[str] = kernel.arg_names
        types = {"seed": "i32", "wire": "*u8", **({"table": "*i64"} if pieces else {"n": "i32"})} | pointers
        signature = {name: types.get(name, "constexpr") for name in names}
        values = {(i,): None for i, name in enumerate(names) if name not in types} | {(len(names) - 1,): variant}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "*" in types.get(name, "")}
        code = compiler.ASTSource(kernel, signature, values, aligned)
        return triton.compile(code, target=backends.GPUTarget("cuda", 90, 32), options=made_for.launch).asm["ptx"]

    made = [compiled(kernels._decode_kernel, replace(made_for, many=many), out="*fp16") for many in (False, True)]
    largest = {"largest": "*i32"} if made_for.whole else {}
    for source in ({"values": "*bf16"}, {}):
        variant = replace(made_for, many=not source)
        made.append(compiled(kernels._encode_kernel, variant, kept="*fp32", **source, **largest))
        if largest:
            made.append(compiled(kernels._largest_kernel, variant, cleared="*i32", **source, **largest))
    # A single message has no table. It may start at any byte, so it is read and written byte by byte.
    compiled(kernels._decode_kernel, made_for, pieces=False, out="*fp16")
    compiled(kernels._encode_kernel, made_for, pieces=False, values="*bf16", **largest)
    if largest:
        compiled(kernels._largest_kernel, made_for, pieces=False, values="*bf16", **largest)
    return made
