"""The exact codecs on CPUs: what is decoded are the bits that were encoded, and bad messages change nothing."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.codec_cases import same_bits as same
from towpath.codecs import exact
from towpath.codecs.exact import HEADER_BYTES, HostKernels, MessageError
from towpath.codecs.exact import specification as spec

native = pytest.importorskip(
    "towpath.codecs.kernels.cpp_codecs", reason="the C++ extension was not built", exc_type=ImportError
)
from towpath.core.formats import BLOCK  # noqa: E402

LEVELS: dict[str, HostKernels] = {level: native.ExactKernels(level) for level in native.LEVELS}
BEST: HostKernels = native.ExactKernels(native.LEVELS[0])
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = {dtype: form.integer for dtype, form in spec.FORMATS.items()}

both = pytest.mark.parametrize("difference", [True, False], ids=["difference", "values"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random_bits(n: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (n * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def trained(n: int, dtype: torch.dtype, rate: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights before and after a step of Adam."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(n, generator=generator) * 0.02
    return old.to(dtype), (old - rate * torch.randn(n, generator=generator)).to(dtype)


def encoded(kernels: HostKernels, old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """A message. What is behind its bound stays as it was."""
    bound = exact.message_bound(new.numel(), new.dtype)
    out = torch.full((bound + 16,), 77, dtype=torch.uint8)
    used = exact.encode(old, new, out, kernels)
    assert used <= bound and used % 8 == 0 and (out[bound:] == 77).all()
    assert exact.message_bytes([out[:bound]]) == [used]
    return out[:used]


def round_trip(kernels: HostKernels, old: torch.Tensor, new: torch.Tensor, difference: bool) -> torch.Tensor:
    """Encode and decode between guards. Return the message."""
    sent = encoded(kernels, old if difference else None, new)
    guarded = torch.cat([old[:1], old, old[:1]]) if len(old) else old
    values = guarded[1 : len(old) + 1]
    exact.decode(torch.cat([sent, sent]), values, difference, kernels)
    assert same(values, new)
    assert not len(old) or (same(guarded[:1], old[:1]) and same(guarded[-1:], old[:1]))
    return sent


def check(old: torch.Tensor, new: torch.Tensor, back_ends: Sequence[HostKernels] = (spec, *LEVELS.values())) -> None:
    """Round trips on all back ends, which write the same bytes."""
    for difference in (True, False):
        expected, *others = [round_trip(kernels, old, new, difference) for kernels in back_ends]
        assert all(torch.equal(other, expected) for other in others)


def before_a_guard(x: torch.Tensor) -> torch.Tensor:
    """A copy that ends where memory ends: reading or writing behind it is a fault."""
    pages = -(-x.nbytes // mmap.PAGESIZE)
    area = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    end = pages * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(whole.data_ptr() + end), mmap.PAGESIZE, 0) == 0
    return whole[end - x.nbytes : end].view(x.dtype).copy_(x)


@both
@each_dtype
def test_nothing_outside_is_read_or_written(dtype: torch.dtype, difference: bool) -> None:
    for n in (1, 3, 700, 2 * BLOCK):
        old, new = (before_a_guard(x) for x in trained(n, dtype, 1e-4))
        for kernels in LEVELS.values():
            out = before_a_guard(torch.empty(exact.message_bound(n, dtype), dtype=torch.uint8))
            used = exact.encode(old if difference else None, new, out, kernels)
            values = before_a_guard(old)
            exact.decode(before_a_guard(out[:used]), values, difference, kernels)
            assert same(values, new)


@each_dtype
def test_any_pair_of_exponents_and_edge_mantissas(dtype: torch.dtype) -> None:
    """Subnormals, -0, infinities and NaN payloads among them."""
    form = spec.FORMATS[dtype]
    mantissas = torch.tensor([0, (1 << form.mantissa) - 1, *([1, 512] if dtype == torch.float16 else [])])
    exponents = torch.arange(1 << form.exponents)
    signs = torch.tensor([0, 1 << (form.bits - 1)])
    bits = (signs[:, None, None] | exponents[:, None] << form.mantissa | mantissas).flatten()
    every = torch.where(bits > form.all >> 1, bits - form.all - 1, bits).to(form.integer).view(dtype)
    old, new = every.repeat_interleave(len(every)), every.repeat(len(every))
    # Most elements do not change, or all blocks would be sent as they are.
    filler = torch.full_like(old, torch.nan)
    old, new = (torch.stack([x, filler, filler], 1).flatten() for x in (old, new))
    check(old, new, list(LEVELS.values())[:2])
    shares = torch.arange(len(old)).view(-1, 3 * len(every))[:: len(every) // 8 + 1].flatten()
    check(old[shares], new[shares])


@each_dtype
def test_blocks_of_nans(dtype: torch.dtype) -> None:
    """No larger parameter fits them, and their payloads change in the last bit."""
    nans = torch.full((600,), torch.inf).to(dtype)
    bits = nans.view(INTEGERS[dtype])
    check((bits + 2).view(dtype), (bits + 3).view(dtype))


@pytest.mark.parity
@pytest.mark.parametrize("part", range(8))
def test_all_pairs_of_bfloat16(part: int) -> None:
    """All 2**32 of them, next to as many elements that do not change. No block is sent as it is."""
    bits = torch.arange(2**16).to(torch.int16)
    ordered = torch.where(bits < 0, bits ^ 0x7FFF, bits)
    filler = torch.full_like(bits, 0x7FFF)
    old = torch.stack([bits, filler], 1).flatten().view(torch.bfloat16)
    out, values = torch.empty(exact.message_bound(2**17, old.dtype), dtype=torch.uint8), torch.empty_like(old)
    table = out[HEADER_BYTES:].view(torch.int32)[: 2**17 // BLOCK]
    for distance in range(part - 2**15, 2**15, 8):
        moved = ordered + torch.tensor(distance, dtype=torch.int16)
        new = torch.stack([torch.where(moved < 0, moved ^ 0x7FFF, moved), filler], 1).flatten().view(torch.bfloat16)
        used = exact.encode(old, new, out, BEST)
        exact.decode(out[:used], values.copy_(old), True, BEST)
        assert same(values, new), distance
        assert ((table & 0xFFFF) < 2 * BLOCK).all(), distance


@each_dtype
def test_every_16_bits_and_their_order_as_values(dtype: torch.dtype) -> None:
    bits = torch.arange(2**16).to(torch.int16)
    for order in (bits, bits.view(256, 256).t().flatten()):
        x = order.view(dtype) if dtype.itemsize == 2 else order.int().mul(2**16 + 1).view(dtype)
        for kernels in LEVELS.values():
            round_trip(kernels, x, x, difference=False)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    n=st.integers(0, 1700) | st.integers(0, 70),
    seed=st.integers(0, 2**32),
    scale=st.floats(-45, 38),
    step=st.floats(-9, 2),
    kept=st.floats(0, 1),
    strange=st.sampled_from([0, 0.001, 0.03, 1]),
)
@example(dtype=torch.float32, n=50, seed=166, scale=-37.0, step=0.0, kept=0.0, strange=0.03)  # far above small ones
def test_blocks_of_any_kind(
    dtype: torch.dtype, n: int, seed: int, scale: float, step: float, kept: float, strange: float
) -> None:
    """Values of a scale that change by a share of it, of which some are kept, and some are any bits."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(n, generator=generator, dtype=torch.float64) * 10**scale
    new = old + torch.randn(n, generator=generator) * 10 ** (scale + step)
    new = torch.where(torch.rand(n, generator=generator) < kept, old, new)
    pair: list[torch.Tensor] = []
    for x in (old, new):
        any_bits = random_bits(n, dtype, generator)
        pair.append(torch.where(torch.rand(n, generator=generator) < strange, any_bits, x.to(dtype)))
    check(pair[0], pair[1])


@both
@each_dtype
def test_a_message_is_never_longer_than_its_bound(dtype: torch.dtype, difference: bool) -> None:
    """Blocks that do not shrink are sent as they are. What does not change takes no payload."""
    generator = torch.Generator().manual_seed(0)
    old, new = (random_bits(2 * BLOCK + 5, dtype, generator) for _ in range(2))
    unchanged = torch.arange(len(new)) % (2 * BLOCK) < BLOCK
    new[unchanged] = old[unchanged] if difference else 0
    for unsent in (unchanged[: 2 * BLOCK], unchanged):  # the last block is full, or not
        for kernels in (spec, *LEVELS.values()):
            sent = round_trip(kernels, old[: len(unsent)], new[: len(unsent)], difference)
            left = exact.message_bound(len(unsent), dtype) - int(unsent.sum()) * dtype.itemsize
            assert len(sent) == -(-left // 8) * 8


@pytest.mark.parametrize(
    ("rate", "bits"), [(1e-3, 6.7), (1e-4, 3.3), (1e-5, 1.3), (1e-6, 0.6), (0, 0.1)], ids=lambda value: str(value)
)
def test_differences_shrink_with_the_learning_rate(rate: float, bits: float) -> None:
    sent = encoded(BEST, *trained(2**16, torch.bfloat16, rate))
    assert 8 * len(sent) / 2**16 < bits


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 10.9), (torch.float16, 13.9), (torch.float32, 26.9)])
def test_values_of_one_scale_take_under_three_bits_for_their_exponents(dtype: torch.dtype, bits: float) -> None:
    sent = encoded(BEST, None, trained(2**16, dtype, 0)[0])
    assert 8 * len(sent) / 2**16 < bits


@both
def test_a_damaged_message_raises_and_changes_nothing(difference: bool) -> None:
    old, new = trained(1300, torch.bfloat16, 1e-4)
    sent = encoded(BEST, old if difference else None, new)
    generator = torch.Generator().manual_seed(0)
    places = [*range(HEADER_BYTES), *torch.randint(HEADER_BYTES, len(sent), (60,), generator=generator).tolist()]
    for place in places:
        damaged = sent.clone()
        damaged[place] ^= 1 << (place % 8)
        _raises(damaged, old, difference)
    for length in (0, 39, 40, 52, len(sent) - 8, len(sent) - 1):
        _raises(sent[:length], old, difference, "bytes")


def _raises(bad: torch.Tensor, old: torch.Tensor, difference: bool, match: str = ".") -> None:
    values = old.clone()
    with pytest.raises(MessageError, match=match):
        exact.decode(bad, values, difference)
    assert same(values, old)


def test_a_stale_receiver_raises_and_changes_nothing() -> None:
    old, new = trained(1300, torch.float32, 1e-4)
    sent = encoded(BEST, old, new)
    stale = old.clone()
    stale.view(torch.int32)[700] ^= 1
    _raises(sent, stale, True, "diverged.*Load a checkpoint on all ranks")
    exchanged = old.clone()
    exchanged[[3, 901]] = old[[901, 3]]
    _raises(sent, exchanged, True, "diverged")


def test_a_message_of_something_else_raises() -> None:
    old, new = trained(1300, torch.bfloat16, 1e-4)
    sent = encoded(BEST, old, new)
    _raises(sent, old[:-1], True, "1300 elements instead of differences of 1299 elements of bfloat16")
    _raises(sent, old, False, "instead of values")
    _raises(sent, old.to(torch.float16), True, "float16")


@both
@each_dtype
def test_forged_messages_do_no_harm(dtype: torch.dtype, difference: bool) -> None:
    """With any content behind a correct checksum, all back ends agree on whether it is possible, and on the values."""
    generator = torch.Generator().manual_seed(0)
    old, new = trained(1100, dtype, 1e-4)
    sent = encoded(BEST, old if difference else None, new)
    for turn in range(40):
        body = sent[HEADER_BYTES:].clone()
        table = body[:12].view(torch.int32)
        if turn % 4 == 0:  # other payloads
            body[12:] = random_bits(len(body) - 12, torch.uint8, generator)
        elif turn % 4 == 1:  # lengths that do not add up, or are longer than the block
            length = (0, 76 * dtype.itemsize, BLOCK * dtype.itemsize, 0xFFFF)[turn // 4 % 4]
            table[2 - turn % 3] = (int(table[2 - turn % 3]) & ~0xFFFF) | length
        elif turn % 4 == 2:  # other parameters, of which all are possible
            table[turn % 3] ^= 1 << (16 + turn % 8)
        else:  # a few bits, mostly
            for place in torch.randint(0, len(body), (3,), generator=generator).tolist():
                body[place] ^= 1 << (turn % 8)
        outcomes: list[tuple[bool, torch.Tensor]] = []
        for kernels in (BEST, *list(LEVELS.values())[1:], *([spec] if turn < 8 or turn % 4 == 1 else [])):
            values = before_a_guard(old)
            outcomes.append((kernels.decode(before_a_guard(body), values, difference), values))
        assert len({possible for possible, _ in outcomes}) == 1
        assert not outcomes[0][0] or all(same(found, outcomes[0][1]) for _, found in outcomes)
        header = struct.pack("<4Q", *struct.unpack("<4Q", bytes(sent[:32].tolist())))
        checksum = BEST.digest(sent[:32], 0) + BEST.digest(body, 5)
        forged = torch.tensor([*header, *struct.pack("<Q", checksum % 2**64), *body.tolist()], dtype=torch.uint8)
        if not outcomes[0][0]:
            with pytest.raises(MessageError, match="impossible content"):
                exact.decode(forged, old.clone(), difference, BEST)


@given(n=st.integers(0, 200), first=st.integers(0, 9), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_digests_depend_on_all_bits_and_their_order(n: int, first: int, seed: int) -> None:
    data = random_bits(n, torch.uint8, torch.Generator().manual_seed(seed))
    found = {kernels.digest(data, first) for kernels in (spec, *LEVELS.values())}
    assert len(found) == 1
    if n:
        others = [data.clone() for _ in range(n)]
        for place, other in enumerate(others):
            other[place] ^= 1 << (place % 8)
        others += [data.flip(0)] if not torch.equal(data, data.flip(0)) else []
        assert not found & {BEST.digest(other, first) for other in others}


def test_the_public_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode with one back end, decode with another. Outcomes of a CPU are None, since it raises at once."""
    old, new = trained(1000, torch.float16, 1e-4)
    out = torch.empty(exact.message_bound(1000, torch.float16), dtype=torch.uint8)
    used = exact.encode(old, new, out)
    values = old.clone()
    outcomes: list[Any] = [exact.decode(out, values, difference=True)]
    assert same(values, new) and exact.message_bytes([out, out]) == [used, used]
    monkeypatch.setattr(exact, "_host", lambda device_type: spec)
    exact.encode(None, new, out)
    monkeypatch.undo()
    outcomes.append(exact.decode(out, values.zero_(), difference=False))
    assert same(values, new) and outcomes == [None, None]
    exact.raise_failed(outcomes)
    exact.raise_failed([torch.tensor(0)])
    with pytest.raises(MessageError, match="message 1 of 2: the checksum"):
        exact.raise_failed([torch.tensor(0), torch.tensor(3)])
    assert exact.message_bytes([]) == []
