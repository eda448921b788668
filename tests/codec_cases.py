"""What every back end's codecs are tried on, and held against the oracle: to the bit, except for which NaN a NaN is."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from towpath.codecs.kernels import reference
from towpath.core.formats import Codec

INTEGERS = [
    name + block + option + stochastic
    for name in ("int8", "int4")
    for block in (":32", "", ":whole")
    for option in ("", "+hadamard")
    for stochastic in ("", "+stochastic")
]
FLOATS = ["bf16", "e4m3", "e5m2:32", "e4m3:whole", "e5m2+hadamard", "e4m3:4096+hadamard", "int4:4096", "int8:2048"]
CODECS = INTEGERS + FLOATS
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

LENGTHS = (1, 2, 31, 33, 257, 2049, 5000)
LONG = 100_003  # for what is cheap


def messy(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Blocks of every size from denormals to overflows, zeros of both signs, ties of rounding; no NaN and no Inf."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    x *= torch.logspace(-6, 4, n)[torch.randperm(n, generator=generator)]
    limits = torch.finfo(dtype)
    stretches = [limits.smallest_normal / 16, limits.tiny * 300, limits.max / 64, 0.0, -0.0, 1e-3]
    for i, factor in enumerate(stretches):
        begin = (i + 1) * n // 8
        x[begin : begin + n // 16] = torch.randn(n // 16, generator=generator).clamp(-8, 8) * factor
    ties = x[7 * n // 8 :]
    ties.copy_(torch.randint(-254, 255, ties.shape, generator=generator) / 2)
    ties[:1] = 127.0
    return x.to(dtype)


def overflown(n: int, dtype: torch.dtype) -> torch.Tensor:
    x = messy(n, dtype, seed=1)
    for at, value in ((n // 2, torch.nan), (n // 3, torch.inf), (n - 1, -torch.inf)):
        x[at] = value
    return x


def messages(codec: Codec, n: int, rows: int, apart: int, device: str) -> list[torch.Tensor]:
    """`rows` messages in one buffer, the first at an odd address, `apart` bytes between one and the next."""
    size = codec.encoded_bytes(n)
    buffer = torch.full((rows * (size + apart) + 1,), 77, dtype=torch.uint8, device=device)
    return [buffer[1 + row * (size + apart) :][:size] for row in range(rows)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit; which of the many NaN a NaN is, processors do not agree on."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = a.view(bits) == b.view(bits)
    return bool((equal | (a.isnan() & b.isnan())).all())


def inputs(dtype: torch.dtype, n: int) -> Iterator[tuple[torch.Tensor, int]]:
    yield messy(n, dtype), 0
    if n:
        strided = overflown(n, dtype).repeat_interleave(3)[::3]
        yield strided, 0xFFFFFFF7


def check(kernels: ModuleType, text: str, dtype: torch.dtype, n: int, device: str = "cpu") -> None:
    """All four functions, on messages that start at odd addresses."""
    codec = Codec.parse(text)
    for x, seed in inputs(dtype, n):
        x = x.to(device)
        expected, got = messages(codec, n, 2, 0, device)
        reference.encode(codec, x, expected, seed)
        kernels.encode(codec, x, got, seed)
        assert _same_message(codec, got, expected), f"encode: {text}, {dtype}, {n} elements"

        rows = messages(codec, n, 3, 5, device)
        for i, row in enumerate(rows):
            reference.encode(codec, x.roll(i * (n // 3)), row, seed + i)
        for spaced in (rows, rows[:1], [rows[2], rows[1].clone()]):
            expected, got = torch.empty(2, n, dtype=dtype, device=device)
            reference.decode_sum(codec, spaced, expected)
            kernels.decode_sum(codec, spaced, got)
            assert same(got, expected), f"decode_sum: {text}, {dtype}, {n} elements, {len(spaced)} rows"
        reference.decode(codec, rows[0], expected)
        kernels.decode(codec, rows[0], got)
        assert same(got, expected), f"decode: {text}, {dtype}, {n} elements"

        expected, got = messages(codec, n, 2, 3, device)
        reference.decode_sum_encode(codec, rows, n, expected, seed)
        kernels.decode_sum_encode(codec, rows, n, got, seed)
        assert _same_message(codec, got, expected), f"decode_sum_encode: {text}, {n} elements"


def _same_message(codec: Codec, a: torch.Tensor, b: torch.Tensor) -> bool:
    if codec.largest is None:
        return same(a.clone().view(torch.bfloat16), b.clone().view(torch.bfloat16))
    return torch.equal(a, b)


def check_message(kernels: ModuleType, text: str, dtype: torch.dtype, n: int, device: str = "cpu") -> None:
    """A message there and back; the oracle always works on the CPU, as messages travel between unlike devices."""
    codec, x = Codec.parse(text), messy(n, dtype)
    (expected,), (got,) = messages(codec, n, 1, 0, "cpu"), messages(codec, n, 1, 0, device)
    reference.encode(codec, x, expected, 7)
    kernels.encode(codec, x.to(device), got, 7)
    assert _same_message(codec, got.cpu(), expected)
    x_expected, x_got = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype, device=device)
    reference.decode(codec, expected, x_expected)
    kernels.decode(codec, got, x_got)
    assert same(x_got.cpu(), x_expected)


def check_8_bit_floats(kernels: ModuleType, text: str, device: str = "cpu") -> None:
    """All bfloat16 there are up to the largest code, and so all ties; all codes, even those that no encoder writes."""
    codec = Codec.parse(text)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[every.abs() <= codec.largest].to(device)
    expected, got = messages(codec, x.numel(), 2, 0, device)
    reference.encode(codec, x, expected)
    kernels.encode(codec, x, got)
    assert expected[:4].tolist() == [0, 0, 128, 63], "the scale is to be 1"
    assert torch.equal(got, expected)

    codes = torch.cat([expected[:4], torch.arange(256, device=device).to(torch.uint8)])
    expected, got = torch.empty(2, 256, device=device)
    reference.decode(codec, codes, expected)
    kernels.decode(codec, codes, got)
    assert same(got, expected)
