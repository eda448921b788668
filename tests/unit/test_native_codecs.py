"""The codecs in C++, at every level this processor runs, against the oracle in plain torch."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.codec_cases import (
    CODECS,
    DTYPES,
    EVEN,
    LONG,
    UNEVEN,
    WIDE,
    check,
    check_8_bit_floats,
    check_pieces,
    messages,
    same,
    same_message,
)
from towpath.codecs import kernels as module
from towpath.codecs.kernels import plain
from towpath.core.formats import Codec

cpp = pytest.importorskip(
    "towpath.codecs.kernels.cpp_codecs", reason="the C++ extension was not built", exc_type=ImportError
)

EDGES = [2.0**-149, 2.0**-126, 1e-38, 1e38, torch.finfo(torch.float32).max, -0.0, torch.nan, torch.inf, -torch.inf]


@pytest.fixture(params=cpp.LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels compiled for it serve, whatever the processor could do better."""
    monkeypatch.setattr(cpp, "_coder", partial(cpp._coder, level=request.param))
    return request.param


@pytest.mark.parametrize("text", CODECS)
def test_every_level_equals_the_oracle(level: str, text: str) -> None:
    """Each level takes each codec from another dtype; all of them from all, by chance, below."""
    dtype = DTYPES[(CODECS.index(text) + cpp.LEVELS.index(level)) % len(DTYPES)]
    for n in (0, 1, 33, 2049):
        check(cpp, text, dtype, n)


@pytest.mark.parametrize("text", ["int8", "int4:32+hadamard+stochastic", "e5m2:whole", "bf16"])
def test_many_pieces_equal_the_oracles(text: str) -> None:
    for dtype, lengths in zip(DTYPES, (UNEVEN, EVEN, WIDE), strict=True):
        for feedback in (False, True):
            check_pieces(module.kernels_for(torch.device("cpu")), text, dtype, lengths, feedback)


@pytest.mark.parametrize("text", ["e4m3:whole", "e5m2:whole"])
def test_all_8_bit_floats_equal_the_oracles(level: str, text: str) -> None:
    check_8_bit_floats(cpp, text)


@settings(max_examples=80, deadline=None)
@given(
    text=st.sampled_from(CODECS),
    dtype=st.sampled_from(DTYPES),
    n=st.integers(1, LONG) | st.integers(1, 600),
    seed=st.integers(0, 2**40),
    edges=st.lists(st.sampled_from(EDGES), max_size=4),
)
@example("int8:whole+stochastic", torch.float32, 100_003, 2**32 - 1, [])
@example("e5m2:32", torch.float32, 64, 0, EDGES)
def test_any_bits_equal_the_oracles(text: str, dtype: torch.dtype, n: int, seed: int, edges: list[float]) -> None:
    """Elements and messages of random bits: every exponent, every NaN, and codes that no encoder writes."""
    codec, generator = Codec.parse(text), torch.Generator().manual_seed(seed)
    # A narrow range of exponents round a random one, so that most blocks are finite.
    x = (
        torch.randn(n, generator=generator)
        * torch.exp2(torch.randint(-150, 128, (n // 512 + 1,), generator=generator))[torch.arange(n) // 512]
    )
    x = x.to(dtype)
    for i, edge in enumerate(edges):
        x[(seed + i * n // 4) % n] = edge

    expected, got = messages(codec, n, 2, 0, "cpu")
    plain.encode(codec, x, expected, seed)
    cpp.encode(codec, x, got, seed)
    assert same_message(codec, got, expected)

    noise = torch.randint(0, 256, expected.shape, generator=generator, dtype=torch.uint8)
    rows = [expected.clone(), noise, expected.clone()]
    sums, others = torch.empty(2, n, dtype=dtype)
    plain.decode_sum(codec, rows, sums)
    cpp.decode_sum(codec, rows, others)
    assert same(others, sums)
    plain.decode_sum_encode(codec, rows, n, expected, seed)
    cpp.decode_sum_encode(codec, rows, n, got, seed)
    assert same_message(codec, got, expected)


def test_nothing_beside_a_message_is_written() -> None:
    for text in CODECS:
        codec = Codec.parse(text)
        for n in (1, 33, 257, 1025):
            size = codec.encoded_bytes(n)
            buffer = torch.full((size + 128,), 77, dtype=torch.uint8)
            cpp.encode(codec, torch.ones(n), buffer[64 : 64 + size])
            values = torch.full((n + 64,), 77.0)
            cpp.decode(codec, buffer[64 : 64 + size], values[32 : 32 + n])
            assert (buffer[:64] == 77).all() and (buffer[-64:] == 77).all(), (text, n)
            assert (values[:32] == 77).all() and (values[-32:] == 77).all(), (text, n)


def test_the_cpu_is_served_by_the_extension_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    module._kernels.cache_clear()
    with caplog.at_level(logging.INFO, "towpath"):
        kernels = [module.kernels_for(torch.device("cpu")) for _ in range(2)]
    assert kernels[0] is kernels[1] and kernels[0].name == "cpp_codecs"
    assert [r.message for r in caplog.records] == [f"codecs on cpu: cpp_codecs, for {cpp.LEVELS[0]}"]


def test_without_the_extension_the_oracle_serves_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no {name}")

    module._kernels.cache_clear()
    monkeypatch.setattr(module, "import_module", missing)
    with caplog.at_level(logging.INFO, "towpath"):
        kernels = [module.kernels_for(torch.device("cpu")) for _ in range(2)]
    module._kernels.cache_clear()
    assert kernels[0].name == "plain"
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "plain torch" in caplog.text
