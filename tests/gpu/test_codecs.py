"""Triton's codecs on CUDA: the oracle's bits, for every codec, dtype and length. Skipped, and counted, without one."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from tests import codec_cases
from towpath.codecs import exact

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


@pytest.mark.parametrize("difference", [True, False])
@pytest.mark.parametrize("dtype", codec_cases.DTYPES, ids=str)
def test_exact_codecs(dtype: torch.dtype, difference: bool) -> None:
    kernels = importlib.import_module("towpath.codecs.exact.triton_kernels")
    codec_cases.check_exact(kernels, dtype, difference, "cuda")


@pytest.mark.parametrize("dtype", codec_cases.DTYPES, ids=str)
def test_exact_messages_travel_between_cpu_and_gpu(dtype: torch.dtype) -> None:
    """Both devices write the same long message, which the other one decodes. The host waits once for all outcomes."""
    old = codec_cases.messy(codec_cases.LONG, dtype)
    new = (old.float() * 1.01).to(dtype)
    sent = torch.empty(exact.message_bound(len(new), dtype), dtype=torch.uint8)
    used, outcomes = exact.encode_difference(old, new, sent), []
    made, values = torch.empty_like(sent, device="cuda"), old.cuda()
    exact.encode_difference(old.cuda(), new.cuda(), made)
    assert exact.message_bytes([made]) == [used] and torch.equal(made.cpu()[:used], sent[:used])
    outcomes.append(exact.decode_difference(sent.cuda(), values))
    assert codec_cases.same_bits(values.cpu(), new)
    exact.encode_values(new.cuda(), made)
    outcomes.append(exact.decode_values(made, values.zero_()))
    assert codec_cases.same_bits(values.cpu(), new)
    exact.decode_values(made.cpu(), back := torch.empty_like(new))
    assert codec_cases.same_bits(back, new)
    exact.raise_failed(outcomes)
    with pytest.raises(exact.MessageError, match="message 1 of 2: the exact difference is relative to other values"):
        exact.raise_failed([outcomes[0], exact.decode_difference(sent.cuda(), values)])
