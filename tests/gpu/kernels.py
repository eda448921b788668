"""Cases of the kernels of codecs: the oracle's bits, for every codec, dtype and length.

On a GPU these are Triton's kernels. On a CPU they are those in C++, so that the cases themselves have run before.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests import codec_cases
from tests.gpu.case import Case, SkipError
from tests.ranks.models import DEVICE
from towpath.codecs import exact
from towpath.codecs.kernels import kernels_for

ROOT = Path(__file__).parents[2]
FEATURE, EXACT = "codec kernels", "exact transport"


def _kernels() -> ModuleType:
    if DEVICE.type == "cuda":
        return importlib.import_module("towpath.codecs.kernels.triton_codecs")
    return _of_extension("towpath.codecs.kernels.cpp_codecs")


def _of_extension(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise SkipError("the C++ extension was not built") from None


def every_length(text: str, dtype: torch.dtype) -> None:
    lengths = (0, *codec_cases.LENGTHS, codec_cases.LONG) if DEVICE.type == "cuda" else codec_cases.LENGTHS[2::2]
    for n in lengths:
        codec_cases.check(_kernels(), text, dtype, n, DEVICE.type)


def many_pieces(text: str) -> None:
    _kernels()
    kernels = _kernels() if DEVICE.type == "cuda" else kernels_for(DEVICE)
    cases = (codec_cases.UNEVEN, False), (codec_cases.EVEN, True), (codec_cases.WIDE, True)
    for dtype, (lengths, feedback) in zip(codec_cases.DTYPES, cases, strict=True):
        codec_cases.check_pieces(kernels, text, dtype, lengths, feedback, DEVICE.type)


def messages_between_devices(text: str) -> None:
    codec_cases.check_message(_kernels(), text, torch.float32, codec_cases.LONG, DEVICE.type)


def every_rounding(text: str) -> None:
    codec_cases.check_8_bit_floats(_kernels(), text, DEVICE.type)


def exact_messages(dtype: torch.dtype, difference: bool) -> None:
    kernels = importlib.import_module("towpath.codecs.exact.triton_kernels")
    codec_cases.check_exact(kernels, dtype, difference, DEVICE.type)


def exact_messages_between_devices(dtype: torch.dtype) -> None:
    """Both devices write the same long message, which the other one decodes. The host waits once for all outcomes."""
    old = codec_cases.messy(codec_cases.LONG, dtype)
    new = (old.float() * 1.01).to(dtype)
    sent = torch.empty(exact.message_bound(len(new), dtype), dtype=torch.uint8)
    used, outcomes = exact.encode(old, new, sent), []
    made, values = torch.empty_like(sent, device=DEVICE), old.to(DEVICE, copy=True)
    exact.encode(old.to(DEVICE), new.to(DEVICE), made)
    assert exact.message_bytes([made]) == [used], (exact.message_bytes([made]), used)
    assert torch.equal(made.cpu()[:used], sent[:used])
    outcomes.append(exact.decode(sent.to(DEVICE), values, difference=True))
    assert codec_cases.same_bits(values.cpu(), new)
    exact.encode(None, new.to(DEVICE), made)
    outcomes.append(exact.decode(made, values.zero_(), difference=False))
    assert codec_cases.same_bits(values.cpu(), new)
    exact.decode(made.cpu(), back := torch.empty_like(new), difference=False)
    assert codec_cases.same_bits(back, new)
    exact.raise_failed(outcomes)
    try:
        exact.raise_failed([outcomes[0], exact.decode(sent.to(DEVICE), values, difference=True)])
    except exact.MessageError as error:
        assert "the exact difference is relative to other values" in str(error), error
    else:
        raise AssertionError("a difference to other values was decoded")


def sanitized(tool: str, what: str) -> dict[str, Any]:
    """One small launch of each kernel under NVIDIA's checker of memory accesses."""
    # The kernels come from the cache, where the launch below puts them. MPS and the checker do not go together.
    environment = {n: v for n, v in os.environ.items() if n != "CUDA_MPS_PIPE_DIRECTORY"}
    program = [sys.executable, "-c", f"from tests.gpu.kernels import {what}; {what}()"]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        raise SkipError("compute-sanitizer does not support this machine")
    assert done.returncode == 0, said[-3000:]
    return {"said": next((line for line in said.splitlines() if "SUMMARY" in line), "")}


def sanitized_exact() -> None:
    codec_cases.check_exact(
        importlib.import_module("towpath.codecs.exact.triton_kernels"), torch.bfloat16, True, "cuda"
    )


def sanitized_int4() -> None:
    kernels = importlib.import_module("towpath.codecs.kernels.triton_codecs")
    codec_cases.check_pieces(kernels, "int4", torch.bfloat16, codec_cases.UNEVEN, True, "cuda")


def _case(name: str, run: Any, *args: Any, **options: Any) -> Case:
    given: dict[str, Any] = {"feature": FEATURE, "ranks": None, "limit": 150.0} | options
    return Case(name=name, run=run, args=args, **given)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


COMMON = ("int8", "int4", "e4m3", "bf16")
_REST = [text for text in codec_cases.CODECS if text not in COMMON]

CASES = [
    *(
        _case(
            f"exact codec, {_name(dtype)}, {what}",
            exact_messages,
            dtype,
            what == "differences",
            feature=EXACT,
            needs=("cuda",),
        )
        for dtype in codec_cases.DTYPES
        for what in ("differences", "values")
    ),
    *(
        _case(f"exact messages between devices, {_name(dtype)}", exact_messages_between_devices, dtype, feature=EXACT)
        for dtype in codec_cases.DTYPES
    ),
    *(_case(f"{text}, {_name(dtype)}", every_length, text, dtype) for text in COMMON for dtype in codec_cases.DTYPES),
    *(_case(f"many pieces, {text}", many_pieces, text) for text in COMMON),
    *(_case(f"every rounding, {text}", every_rounding, text) for text in ("e4m3:whole", "e5m2:whole")),
    *(_case(f"messages between devices, {text}", messages_between_devices, text) for text in COMMON),
    *(_case(f"many pieces, {text}", many_pieces, text) for text in _REST),
    *(_case(f"{text}, {_name(dtype)}", every_length, text, dtype) for dtype in codec_cases.DTYPES for text in _REST),
    *(_case(f"messages between devices, {text}", messages_between_devices, text) for text in _REST),
]

# After all others: NVIDIA's checker takes the device for itself.
SANITIZED = [
    _case(
        f"{tool}, {what.removeprefix('sanitized_')}",
        sanitized,
        tool,
        what,
        feature=EXACT if "exact" in what else FEATURE,
        needs=("cuda", "program compute-sanitizer"),
        limit=120.0,
        ranks=1,
    )
    for what in ("sanitized_exact", "sanitized_int4")
    for tool in ("memcheck", "racecheck")
]
