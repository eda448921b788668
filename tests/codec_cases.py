"""What every back end's codecs are tried on, and held against the oracle: to the bit, except for which NaN a NaN is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from towpath.codecs import exact
from towpath.codecs.exact import specification as exact_reference
from towpath.codecs.kernels import pieces as loops
from towpath.codecs.kernels import plain
from towpath.codecs.kernels.pieces import PiecePlace, PieceTable
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
    """All functions for one message, on messages that start at odd addresses."""
    codec = Codec.parse(text)
    for x, seed in inputs(dtype, n):
        x = x.to(device)
        expected, got = messages(codec, n, 2, 0, device)
        plain.encode(codec, x, expected, seed)
        kernels.encode(codec, x, got, seed)
        assert same_message(codec, got, expected), f"encode: {text}, {dtype}, {n} elements"

        plain.decode(codec, expected, back := torch.empty(n, dtype=dtype, device=device))
        kernels.decode(codec, expected, found := torch.empty_like(back))
        assert same(found, back), f"decode: {text}, {dtype}, {n} elements"
        if not hasattr(kernels, "decode_sum"):
            continue  # it only sums many pieces at a time
        rows = messages(codec, n, 3, 5, device)
        for i, row in enumerate(rows):
            plain.encode(codec, x.roll(i * (n // 3)), row, seed + i)
        for spaced in (rows, rows[:1], [rows[2], rows[1].clone()]):
            expected, got = torch.empty(2, n, dtype=dtype, device=device)
            plain.decode_sum(codec, spaced, expected)
            kernels.decode_sum(codec, spaced, got)
            assert same(got, expected), f"decode_sum: {text}, {dtype}, {n} elements, {len(spaced)} rows"

        expected, got = messages(codec, n, 2, 3, device)
        plain.decode_sum_encode(codec, rows, n, expected, seed)
        kernels.decode_sum_encode(codec, rows, n, got, seed)
        assert same_message(codec, got, expected), f"decode_sum_encode: {text}, {n} elements"


# Lengths of pieces: any, and those that let kernels use wide words (with codes at multiples of 4, or of 16 bytes).
UNEVEN = (257, 0, 1, 2049, 31, 5000)
EVEN = (2048, 768, 0, 4352)
WIDE = (2048, 4096, 4096)


def check_pieces(
    kernels: Any, text: str, dtype: torch.dtype, lengths: Sequence[int], feedback: bool, device: str = "cpu"
) -> None:
    """Many pieces at a time, in launches that follow each other, against the oracle piece by piece.

    The wire buffer has a cell of each piece, then three rows of them, one in the place of this member, then the sums.
    """
    codec = Codec.parse(text)
    cell, longest, count, rows = codec.cell_bytes(max(lengths)), max(lengths), len(lengths), 3
    starts = [32 + index * (longest + 16) for index in range(count)]
    row, where = count * cell, torch.device(device)

    def table(source: int, target: int, rows: int = 1) -> PieceTable:
        each = [
            PiecePlace(length, starts[i], source * row + i * cell, target * row + i * cell, i * longest)
            for i, length in enumerate(lengths)
        ]
        return PieceTable(codec, each, where, rows, row if rows > 1 else 0)

    size = starts[-1] + longest
    wire = torch.arange((2 + rows) * row, device=device).to(torch.uint8)
    wires = [wire, wire.clone()]
    kept = [torch.randn(count, longest, device=device) * feedback]
    kept.append(kept[0].clone())
    scratch = torch.empty(2 * longest, device=device)
    outs = [torch.zeros(size, dtype=dtype, device=device) for _ in range(2)]
    gathered = table(1, 1 + rows, rows)
    for turn, pieces in enumerate(table(0, target) for target in (0, 2, 3, 1)):
        x = (overflown if turn == 1 else messy)(size, dtype).roll(turn).to(device)
        for run, w, k in zip(_runs(kernels), wires, kept, strict=True):
            run("encode_pieces", pieces, x, w, 7 + turn, k if feedback else None, scratch)
        assert same_message(codec, *wires), f"encode: {text}, {dtype}, {lengths}, turn {turn}"
        assert same(*kept), f"kept: {text}, {dtype}, {lengths}, turn {turn}"
    for run, w, k, out in zip(_runs(kernels), wires, kept, outs, strict=True):
        run("encode_pieces", gathered, None, w, 99, k if feedback else None, scratch)
        run("decode_pieces", gathered, w, out)
    assert same_message(codec, *wires), f"sum: {text}, {dtype}, {lengths}"
    assert same(*kept), f"kept: {text}, {dtype}, {lengths}"
    assert same(*outs), f"decode: {text}, {dtype}, {lengths}"
    for run, w, out in zip(_runs(kernels), wires, outs, strict=True):
        run("decode_pieces", table(0, 0), w, out)
    assert same(*outs), f"decode one row: {text}, {dtype}, {lengths}"


def _runs(kernels: Any) -> list[Callable[..., None]]:
    def expected(name: str, *args: Any) -> None:
        getattr(loops, name)(plain, *args)

    def got(name: str, *args: Any) -> None:
        getattr(kernels, name)(*args)

    return [expected, got]


def same_message(codec: Codec, a: torch.Tensor, b: torch.Tensor) -> bool:
    if codec.largest is None:
        return same(a.clone().view(torch.bfloat16), b.clone().view(torch.bfloat16))
    return torch.equal(a, b)


def check_message(kernels: ModuleType, text: str, dtype: torch.dtype, n: int, device: str = "cpu") -> None:
    """A message there and back; the oracle always works on the CPU, as messages travel between unlike devices."""
    codec, x = Codec.parse(text), messy(n, dtype)
    (expected,), (got,) = messages(codec, n, 1, 0, "cpu"), messages(codec, n, 1, 0, device)
    plain.encode(codec, x, expected, 7)
    kernels.encode(codec, x.to(device), got, 7)
    assert same_message(codec, got.cpu(), expected)
    x_expected, x_got = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype, device=device)
    plain.decode(codec, expected, x_expected)
    kernels.decode(codec, got, x_got)
    assert same(x_got.cpu(), x_expected)


def check_8_bit_floats(kernels: ModuleType, text: str, device: str = "cpu") -> None:
    """All bfloat16 there are up to the largest code, and so all ties; all codes, even those that no encoder writes."""
    codec = Codec.parse(text)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[every.abs() <= codec.largest].to(device)
    expected, got = messages(codec, x.numel(), 2, 0, device)
    plain.encode(codec, x, expected)
    kernels.encode(codec, x, got)
    assert expected[:4].tolist() == [0, 0, 128, 63], "the scale is to be 1"
    assert torch.equal(got, expected)

    codes = torch.cat([expected[:4], torch.arange(256, device=device).to(torch.uint8)])
    expected, got = torch.empty(2, 256, device=device)
    plain.decode(codec, codes, expected)
    kernels.decode(codec, codes, got)
    assert same(got, expected)


def check_exact(kernels: ModuleType, dtype: torch.dtype, difference: bool, device: str = "cpu") -> None:
    """Messages of the exact codecs: the oracle's bytes, what is decoded, and the outcomes of bad messages.

    Two blocks: one that shrinks, with any bits in it, and one that does not, and that is not full.
    """
    generator = torch.Generator().manual_seed(0)
    n = 700
    noise = [torch.randint(0, 256, (n * dtype.itemsize,), generator=generator).to(torch.uint8) for _ in range(2)]
    old = torch.randn(n, generator=generator) * 0.02
    new = old - 1e-4 * torch.randn(n, generator=generator)
    strange = torch.rand(n, generator=generator) < 0.03
    strange[512:] = True
    old, new = (torch.where(strange, bits.view(dtype), x.to(dtype)) for x, bits in zip((old, new), noise, strict=True))
    before = old if difference else None
    expected = torch.zeros(exact.message_bound(n, dtype), dtype=torch.uint8)
    used = exact.encode(before, new, expected, exact_reference)

    out = torch.full_like(expected, 77, device=device)
    kernels.encode(None if before is None else before.to(device), new.to(device), out)
    assert torch.equal(out[:used].cpu(), expected[:used])
    stale = old.clone()
    stale.view(torch.uint8)[300] ^= 1
    damaged, forged = out.clone(), out.clone()
    damaged[used - 9] ^= 4
    forged[exact.HEADER_BYTES] ^= 8
    forged[32:40] = 0
    body = [forged[:32].cpu(), forged[exact.HEADER_BYTES : used].cpu()]
    checksum = sum(exact_reference.digest(part, first) for part, first in zip(body, (0, 5), strict=True)) % 2**64
    forged[32:40] = torch.tensor(list(checksum.to_bytes(8, "little")), dtype=torch.uint8)
    for sent, held, problem in (
        (out[: used - 8], old, exact.Problem.SHORT),
        (out, old[1:], exact.Problem.OTHER),
    ):
        values = held.clone().to(device)
        assert int(kernels.decode(sent, values, difference)) == problem and same_bits(values.cpu(), held)
    rows = [
        (damaged, old, exact.Problem.DAMAGED),
        (out, old, 0),
        *([(out, stale, exact.Problem.STALE)] if difference else []),
        (forged, old, exact.Problem.INVALID),
        (damaged, new, 0),  # this member's own slice, which is not decoded
    ]
    sent, held = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]).to(device)
    before = held.cpu()
    outcomes = kernels.decode_slices(sent, held, len(rows) - 1, difference).tolist()
    assert outcomes == [row[2] for row in rows]
    for values, was, problem in zip(held.cpu(), before, outcomes[:-2], strict=False):
        assert same_bits(values, was if problem else new)
    assert same_bits(held[-1].cpu(), new)
    assert int(kernels.digest(old.to(device))) % 2**64 == exact_reference.digest(old, 0)


def check_exact_almost_raw(kernels: ModuleType, device: str = "cpu") -> None:
    """A payload one byte shorter than its values, which starts at each byte of a word."""
    generator = torch.Generator().manual_seed(0)

    def block(escaped: float) -> torch.Tensor:
        x, small, far = torch.rand(3, 512, generator=generator)
        exponents = torch.randint(3, 9, (512,), generator=generator)
        x = (1 + 0.9 * x) * torch.where(small < 0.8, 2.0**-exponents, 1.0)
        return x * torch.where(far < escaped, 2.0**-40, 1.0)

    def length(x: torch.Tensor) -> int:
        out = torch.zeros(exact.message_bound(512, x.dtype), dtype=torch.uint8)
        exact_reference.encode(None, x, out)
        return int(out[0]) | int(out[1]) << 8

    almost = next(x for x in iter(lambda: block(0.22), None) if length(x) == 2047)
    for remainder in range(4):
        first = next(x for x in iter(lambda: block(0.05), None) if length(x) % 4 == remainder)
        x = torch.cat([first, almost]).to(device)
        out = torch.zeros(exact.message_bound(len(x), x.dtype), dtype=torch.uint8, device=device)
        kernels.encode(None, x, out)
        found = torch.zeros_like(x)
        assert int(kernels.decode(out, found, False)) == 0 and same_bits(found.cpu(), x.cpu())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
