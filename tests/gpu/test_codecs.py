"""Triton's codecs on CUDA: the oracle's bits, for every codec, dtype and length. Skipped, and counted, without one."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from tests import codec_cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return importlib.import_module("towpath.codecs.kernels.triton_codecs")


@pytest.mark.parametrize("dtype", codec_cases.DTYPES, ids=str)
@pytest.mark.parametrize("text", codec_cases.CODECS)
def test_every_codec_and_dtype(kernels: ModuleType, text: str, dtype: torch.dtype) -> None:
    for n in (0, *codec_cases.LENGTHS, codec_cases.LONG):
        codec_cases.check(kernels, text, dtype, n, "cuda")


@pytest.mark.parametrize("text", codec_cases.CODECS)
def test_many_pieces_in_one_launch(kernels: ModuleType, text: str) -> None:
    cases = (codec_cases.UNEVEN, False), (codec_cases.EVEN, True), (codec_cases.WIDE, True)
    for dtype, (lengths, feedback) in zip(codec_cases.DTYPES, cases, strict=True):
        codec_cases.check_pieces(kernels, text, dtype, lengths, feedback, "cuda")


@pytest.mark.parametrize("text", codec_cases.CODECS)
def test_messages_travel_between_cpu_and_gpu(kernels: ModuleType, text: str) -> None:
    codec_cases.check_message(kernels, text, torch.float32, codec_cases.LONG, "cuda")


@pytest.mark.parametrize("text", ["e4m3:whole", "e5m2:whole"])
def test_every_rounding_of_8_bit_floats(kernels: ModuleType, text: str) -> None:
    codec_cases.check_8_bit_floats(kernels, text, "cuda")
