"""The exact codecs in Triton, for GPUs. They equal `specification` to the bit, and the host waits for nothing.

A program is one warp, and works on one block. Each of its 32 lanes has 16 neighboring elements. The same bit of these
16 is a piece, and pieces [32] are handled as words are in C++. So sums over a block are sums within lanes and shuffles
between them. `extract` keeps the bits of the elements that send one. `_put` appends them to the block's payload with
atomic operations on words of 32 bits.

Encoding is a launch that chooses parameters and computes lengths, a prefix sum, and a launch that writes the payloads.
Then the sizes, the digest and the checksum are written into the header. Decoding verifies these first. A program of a
message that fails a check writes nothing. Loads of payloads stay in the message, whatever its table says.
"""

# Triton compiles these functions from their source, so Python types mean nothing to it. Triton is also not installed on
# every machine that checks the types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from towpath.codecs import exact
from towpath.codecs.exact import Problem, header_words, message_bound, specification
from towpath.codecs.exact.specification import table_bytes
from towpath.codecs.exact.triton_bits import (
    BITS,
    EACH,
    count_ones,
    deposit,
    extract,
    number,
    occupied_bytes,
    spread,
    to_flags,
    to_pieces,
)
from towpath.core.formats import BLOCK, HEADER_BYTES

_LAUNCH = {"num_warps": 1, "enable_fp_fusion": False}
_HEADERS = {"num_warps": 4, "enable_fp_fusion": False}  # of kernels for headers and digests

_BLOCK = tl.constexpr(BLOCK)
_LANES = tl.constexpr(BLOCK // BITS.value)
_HEADER = tl.constexpr(HEADER_BYTES)
_ESCAPE = tl.constexpr(specification.ESCAPE)
_QUIET = tl.constexpr(specification.QUIET)
_SYMBOLS = tl.constexpr(specification.SYMBOLS)
_LARGEST = tl.constexpr(specification.LARGEST_PARAMETER)
_OTHER, _SHORT, _DAMAGED = (tl.constexpr(int(p)) for p in (Problem.OTHER, Problem.SHORT, Problem.DAMAGED))
_STALE, _INVALID = tl.constexpr(int(Problem.STALE)), tl.constexpr(int(Problem.INVALID))
_KEY = tl.constexpr(0x9E3779B97F4A7C15)


def digest(values: torch.Tensor) -> torch.Tensor:
    """Return the digest as `specification.digest` computes it, as a tensor."""
    found = torch.zeros(1, dtype=torch.int64, device=values.device)
    _add_digest(values, found)
    return found[0]


def encode(old: torch.Tensor | None, values: torch.Tensor, out: torch.Tensor) -> None:
    """Write a message into `out`, as `exact.encode` does."""
    n = values.numel()
    if not n:
        exact.encode(old, values, out, specification)
        return
    words, table, grid, constants = _shape(values, out, old is not None)
    out[: message_bound(n, values.dtype)].zero_()  # payloads are written with an atomic or
    before, now = None if old is None else _integers(old), _integers(values)
    _plan_kernel[grid](before, now, table, n, **constants)
    ends = torch.cumsum(table & 0xFFFF, 0)
    _write_kernel[grid](before, now, table, ends, words, n, **constants)
    first, _ = header_words(n, values.dtype, old is not None)
    header = out[:HEADER_BYTES].view(torch.int64)
    _header_kernel[(1,)](header, ends, first, n, HEADER_BYTES + table.nbytes, len(ends), **_HEADERS)
    if old is not None:
        _add_digest(old, header[3:])
    _add_checksums(words, header[4:])


def decode(message: torch.Tensor, values: torch.Tensor, difference: bool) -> torch.Tensor:
    """Decode a message into `values`, as `exact.decode` does. Return the number of the problem, or 0."""
    if not values.numel():
        exact.decode(message, values, difference, specification)
        return torch.zeros((), dtype=torch.int32, device=values.device)
    whole = message[: len(message) // 8 * 8]
    return decode_slices(whole.view(1, -1), values.view(1, -1), -1, difference)[0]


def decode_slices(encoded: torch.Tensor, slices: torch.Tensor, own: int, difference: bool) -> torch.Tensor:
    """Decode each row of `encoded` into that row of `slices`, but for row `own`. Return the problem of each, or 0."""
    count, n = slices.shape
    stride = encoded.shape[1]
    outcomes = torch.zeros(count, dtype=torch.int32, device=slices.device)
    if stride < HEADER_BYTES + table_bytes(n):
        return outcomes.fill_(Problem.SHORT)
    words, table, grid, constants = _shape(slices[0], encoded.view(-1), difference)
    sums = torch.zeros(2, count, dtype=torch.int64, device=slices.device)
    if difference:
        _add_digest(slices, sums[0])
    _add_checksums(words, sums[1], count)
    header = encoded.view(-1).view(torch.int64)
    first, _ = header_words(n, slices.dtype, difference)
    start = HEADER_BYTES + table.nbytes
    _check_kernel[(count,)](header, sums, outcomes, first, n, start, stride, own, **_HEADERS)
    tables = words.view(count, -1)[:, HEADER_BYTES // 4 :][:, : len(table)]
    ends = torch.cumsum(tables & 0xFFFF, 1)
    _decode_kernel[(*grid, count)](words, table, ends, _integers(slices), outcomes, n, stride, own, **constants)
    return outcomes


def _shape(values: torch.Tensor, message: torch.Tensor, difference: bool) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return the message as words, its table, the grid, and compile-time constants."""
    if message.data_ptr() % 8:
        raise ValueError(f"exact messages start at a multiple of 8 bytes on a GPU; got {message.data_ptr()}.")
    form = specification.FORMATS[values.dtype]
    words = message[: len(message) // 8 * 8].view(torch.int32)
    table = words[HEADER_BYTES // 4 :][: table_bytes(values.numel()) // 4]
    return words, table, (len(table),), {"form": form, "difference": difference} | _LAUNCH


def _integers(values: torch.Tensor) -> torch.Tensor:
    return values.view(specification.FORMATS[values.dtype].integer)


def _add_digest(values: torch.Tensor, found: torch.Tensor) -> None:
    """Add the digest of `values`, or of each of their rows."""
    if values.numel():
        words = values.shape[-1] * values.itemsize % 8 == 0 and values.data_ptr() % 8 == 0
        _digest(values.view(torch.int64) if words else _integers(values), None, found)


def _add_checksums(words: torch.Tensor, found: torch.Tensor, count: int = 1) -> None:
    """Add the checksums of `count` messages of equal stride, of which `words` consists."""
    rows = words.view(torch.int64).view(count, -1)
    _digest(rows, rows, found)


def _digest(rows: torch.Tensor, header: torch.Tensor | None, found: torch.Tensor) -> None:
    n, words = rows.shape[-1], 128 * rows.itemsize  # of a program: eight items in each thread
    grid = triton.cdiv(n * rows.itemsize, 8 * words), rows.numel() // n
    _digest_kernel[grid](rows, header, found, n, n, rows.itemsize, words, **_HEADERS)


# ---- Headers ----


@triton.jit(do_not_specialize=["n", "stride"])
def _digest_kernel(data, header, found, n, stride, item: tl.constexpr, words: tl.constexpr):
    """Add the digest of n items, or the checksum of a message with its header. A row starts every `stride` items."""
    row = tl.program_id(1).to(tl.int64)
    data += row * stride
    found += row
    number = tl.program_id(0).to(tl.int64) * words + tl.arange(0, words)
    items: tl.constexpr = 8 // item
    lane = tl.arange(0, items)[None, :]
    index = number[:, None] * items + lane
    length = n.to(tl.int64)
    if header is not None:
        length = tl.minimum(tl.load(header + row * stride + 2) // item, length)
    loaded = tl.load(data + index, mask=index < length, other=0).to(tl.uint64)
    if item < 8:
        loaded &= (1 << (8 * item)) - 1
    word = tl.sum(loaded << (8 * item * lane).to(tl.uint64), axis=1)
    mixed = word + (number + 1).to(tl.uint64) * _KEY
    product = (mixed & 0xFFFFFFFF) * (mixed >> 32)
    counted = number * items < length
    if header is not None:
        counted = counted & (number != 4)  # where the checksum itself is
    tl.atomic_add(found, tl.sum(tl.where(counted, product, 0), axis=0).to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["first", "n", "start", "blocks"])
def _header_kernel(header, ends, first, n, start, blocks):
    """Store all of a header but the digest and the checksum."""
    tl.store(header, first.to(tl.int64))
    tl.store(header + 1, n.to(tl.int64))
    tl.store(header + 2, (tl.load(ends + blocks - 1) + start + 7) // 8 * 8)


@triton.jit(do_not_specialize=["first", "n", "start", "arrived", "own"])
def _check_kernel(header, sums, outcome, first, n, start, arrived, own):
    """Store the first problem of each row's header, or 0. Row `own` is not checked."""
    row = tl.program_id(0).to(tl.int64)
    header += row * (arrived // 8)
    sums += row
    nbytes = tl.load(header + 2)
    same = (tl.load(header) == first) & (tl.load(header + 1) == n)
    fits = (nbytes >= start) & (nbytes <= arrived) & (nbytes % 8 == 0)
    intact = tl.load(header + 4) == tl.load(sums + tl.num_programs(0))
    fresh = tl.load(header + 3) == tl.load(sums)
    problem = tl.where(intact, tl.where(fresh, 0, _STALE), _DAMAGED)
    problem = tl.where(same, tl.where(fits, problem, _SHORT), _OTHER)
    tl.store(outcome + row, tl.where(row == own, 0, problem))


# ---- Encoding ----


@triton.jit(do_not_specialize=["n"])
def _plan_kernel(old, values, table, n, form: tl.constexpr, difference: tl.constexpr):
    """Store the entry of each block in the table: the length of its payload, and its parameter."""
    block, first, valid, count = _place(n)
    code, exponent = _codes(old, values, first, valid, form, difference)
    parameter = _chosen(code, exponent, valid, count, difference)
    at = tl.sum(
        _encoded(None, tl.zeros([_LANES], tl.int32), valid, code, exponent, parameter, form, difference), axis=0
    )
    length, raw = (at + 7) // 8, count * (form.bits // 8)
    length = tl.where(_largest(code) > 0, tl.minimum(length, raw), 0)
    tl.store(table + block, length | (tl.where((length > 0) & (length < raw), parameter, 0) << 16))


@triton.jit(do_not_specialize=["n"])
def _write_kernel(old, values, table, ends, words, n, form: tl.constexpr, difference: tl.constexpr):
    """Write the payloads."""
    block, first, valid, count = _place(n)
    entry = tl.load(table + block)
    length, raw, parameter = entry & 0xFFFF, count * (form.bits // 8), (entry >> 16) & 255
    start = _HEADER + 4 * _blocks(n) + tl.load(ends + block) - length
    words, at = words + start // 4, (start % 4).to(tl.int32)
    if (length > 0) & (length < raw):
        code, exponent = _codes(old, values, first, valid, form, difference)
        _encoded(words, 8 * at, valid, code, exponent, parameter, form, difference)
    elif length == raw:
        new = _loaded(values, first, valid, form.bits)
        item: tl.constexpr = form.bits // 8
        for byte in tl.static_range(item):
            _store_byte(words, at + _inside() * item + byte, new >> (8 * byte), valid)


@triton.jit
def _store_byte(words, place, byte, valid):
    tl.store(words.to(tl.pointer_type(tl.uint8)) + place, (byte & 255).to(tl.uint8), mask=valid)


@triton.jit
def _blocks(n):
    return (n.to(tl.int64) + (_BLOCK - 1)) // _BLOCK


@triton.jit
def _place(n):
    """Return this program's block, its first element, which of its elements there are, and how many."""
    block = tl.program_id(0).to(tl.int64)
    first = block * _BLOCK
    count = tl.minimum(n - first, _BLOCK).to(tl.int32)
    return block, first, _inside() < count, count


@triton.jit
def _inside():
    """Return the place of each element in its block.

    With `+` in place of `|`, Triton would see which elements are neighbors. It would then give each lane elements of
    several pieces, and each lane would compute all of these pieces.
    """
    return number() | spread(tl.arange(0, _LANES) * BITS)


@triton.jit
def _ordered(x, bits: tl.constexpr):
    return tl.where(x >> (bits - 1) == 1, x ^ ((1 << (bits - 1)) - 1), x)


@triton.jit
def _loaded(values, first, valid, bits: tl.constexpr):
    """Return the bits of the elements as unsigned integers."""
    return _cut(tl.load(values + first + _inside(), mask=valid, other=0).to(tl.uint32), bits)


@triton.jit
def _cut(x, bits: tl.constexpr):
    if bits == 16:
        x = x & 0xFFFF
    return x


@triton.jit
def _codes(old, values, first, valid, form: tl.constexpr, difference: tl.constexpr):
    """Return the codes, and the exponents of the old values or of the values."""
    bits: tl.constexpr = form.bits
    new = _loaded(values, first, valid, bits)
    known = new
    if difference:
        known = _loaded(old, first, valid, bits)
        distance = _cut(_ordered(new, bits) - _ordered(known, bits), bits)
        code = _cut((distance << 1) ^ (0 - (distance >> (bits - 1))), bits)
    else:
        code = _cut((new << 1) | (new >> (bits - 1)), bits)
    return code, _exponent(known, form)


@triton.jit
def _exponent(x, form: tl.constexpr):
    return ((x >> form.mantissa) & ((1 << form.exponents) - 1)).to(tl.int32)


@triton.jit
def _largest(x):
    """Return the largest one of all, to end a loop early. Loops of constant length would be unrolled."""
    return tl.max(tl.max(x, axis=EACH), axis=0)


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, axis=EACH), axis=0)


@triton.jit
def _chosen(code, exponent, valid, count, difference: tl.constexpr):
    """Return the least parameter that is enough, by halving."""
    low, high = count * 0, count * 0 + _LARGEST
    for _ in range(8):
        each = (low + high) // 2
        if difference:
            width = tl.minimum(tl.maximum(each - exponent, 0), 31)
            needing = ((code >> width.to(tl.uint32)) != 0) & (each - exponent < 32)
            # Both counts are at most 512, so one sum has both.
            both = _total(((exponent <= each + 1).to(tl.int32) << 16 | needing.to(tl.int32)) * valid.to(tl.int32))
            enough = 2 * (both >> 16) >= 3 * (both & 0xFFFF)
        else:
            enough = 8 * _total((valid & (exponent > each)).to(tl.int32)) <= count
        high = tl.where(enough, each, high)
        low = tl.where(enough | (each == _LARGEST), low, each + 1)
    return low


@triton.jit
def _widths(exponent, step, bits: tl.constexpr):
    return tl.minimum(tl.maximum(step - exponent, 0), bits - 1)


@triton.jit
def _quiet(exponent, step, valid):
    return to_pieces(valid & (exponent >= step + _QUIET))


@triton.jit
def _encoded(words, at, valid, code, exponent, parameter, form: tl.constexpr, difference: tl.constexpr):
    """Write a payload from the bit `at` of `words` on, and return where it ends. Without `words`, only count.

    `at` is then the bits of each lane so far, which need no sum over lanes before the last.
    """
    there = to_pieces(valid)
    if difference:
        width = _widths(exponent, parameter, form.bits)
        head = tl.minimum(code >> width.to(tl.uint32), _ESCAPE).to(tl.int32)
        width = tl.where(head == _ESCAPE, 0, width)
        quiet = _quiet(exponent, parameter, valid)
        hit = occupied_bytes(to_pieces(head > 0) & quiet)
        at = _put(words, at, hit, occupied_bytes(quiet))
        mask = (there & (quiet ^ -1)) | (quiet & (hit * 255))
        at = _put_unary(words, at, head, mask, 0)
        at = _put_escaped(words, at, code, valid & (head == _ESCAPE), form.bits)
        low: tl.constexpr = 0
    else:
        low: tl.constexpr = (form.mantissa + 1) // 8 * 8
        width = exponent * 0 + (form.mantissa + 1)
        for byte in tl.static_range(low // 8):
            if words is not None:
                _store_byte(words, at // 8 + _inside(), code >> (8 * byte), valid)
            at = _ended(words, at, 8 * count_ones(there))
        below = parameter - exponent
        head = tl.minimum(tl.where(below > 4, below + 1, below), _ESCAPE)
        head = tl.where(below == -1, 5, tl.where(below < -1, _ESCAPE, head))
        rest = to_pieces(head >= _SYMBOLS)
        at = _put(words, at, to_pieces(head & 1) | rest, there)
        at = _put(words, at, to_pieces((head >> 1) & 1) | rest, there)
        at = _put_unary(words, at, head, rest & there, _SYMBOLS)
        at = _put_escaped(words, at, exponent.to(tl.uint32), valid & (head == _ESCAPE), form.exponents)
    for bit in range(low, _largest(width)):
        at = _put(words, at, to_pieces((code >> bit) & 1), to_pieces(width > bit) & there)
    return at


@triton.jit
def _ended(words, at, count):
    """Return where `count` more bits of each lane end."""
    return at + count if words is None else at + tl.sum(count, axis=0)


@triton.jit
def _put_unary(words, at, head, mask, start: tl.constexpr):
    for limit in range(start, tl.minimum(_largest(head) + 1, _ESCAPE)):
        larger = to_pieces(head > limit) & mask
        at = _put(words, at, larger, mask)
        mask = larger
    return at


@triton.jit
def _put(words, at, pieces, mask):
    """Append the bits of `mask`. Return where they end."""
    count = count_ones(mask)
    if words is not None:
        _or(words, at + tl.cumsum(count, axis=0) - count, extract(pieces, mask).to(tl.uint64), mask != 0)
    return _ended(words, at, count)


@triton.jit
def _or(words, start, bits, sent):
    """Set up to 32 `bits` at the bit `start` of `words`."""
    bits = bits << (start & 31).to(tl.uint64)
    for half in tl.static_range(2):
        part = ((bits >> (32 * half)) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        tl.atomic_or(words + (start >> 5) + half, part, mask=sent & (part != 0), sem="relaxed")


@triton.jit
def _put_escaped(words, at, quotient, escaped, bits: tl.constexpr):
    """Append whole quotients, which are rare."""
    count = tl.sum(escaped.to(tl.int32), axis=EACH)
    if words is not None:  # noqa: SIM102 (Triton decides the outer one when it compiles)
        if tl.sum(count, axis=0) > 0:
            _or(words, at + bits * _ranks(escaped), quotient.to(tl.uint64), escaped)
    return _ended(words, at, bits * count)


@triton.jit
def _ranks(escaped):
    """Return how many elements are escaped before each."""
    ones = escaped.to(tl.int32)
    count = tl.sum(ones, axis=EACH)
    return spread(tl.cumsum(count, axis=0) - count) + tl.cumsum(ones, axis=EACH) - ones


# ---- Decoding ----


@triton.jit(do_not_specialize=["n", "stride", "own"])
def _decode_kernel(
    words, table, ends, values, outcome, n, stride, own, form: tl.constexpr, difference: tl.constexpr
):  # fmt: skip
    """Decode the payloads of each row but `own`, if its message has no problem."""
    row = tl.program_id(1).to(tl.int64)
    outcome += row
    if (tl.load(outcome) != 0) | (row == own):
        return
    words += row * (stride // 4)
    table += row * (stride // 4)
    ends += row * _blocks(n)
    values += row * n
    block, first, valid, count = _place(n)
    entry = tl.load(table + block)
    length, raw, parameter = entry & 0xFFFF, count * (form.bits // 8), (entry >> 16) & 255
    nbytes = tl.load((words + 4).to(tl.pointer_type(tl.int64)))
    end = tl.load(ends + block) + _HEADER + 4 * _blocks(n)
    start = end - length
    # Nothing follows the last payload but what fills up a word.
    possible = (length <= raw) & (end <= nbytes) & ((block != _blocks(n) - 1) | (nbytes - end < 8))
    words, at = words + start // 4, (start % 4).to(tl.int32)
    # How many words follow: a payload has at most 512, and may start inside a word.
    limit = tl.minimum(nbytes // 4 - start // 4, _BLOCK + 1).to(tl.int32)
    new = _inside().to(tl.uint32) * 0
    if difference:
        new = _loaded(values, first, valid, form.bits)
    if possible & (length > 0) & (length < raw):
        new, bits = _decoded(words, 8 * at, valid, new, parameter, limit, form, difference)
        possible = (bits + 7) // 8 == at + length
    elif length == raw:
        new = new * 0
        item: tl.constexpr = form.bits // 8
        for byte in tl.static_range(item):
            new |= _byte_at(words, at + _inside() * item + byte, valid & possible) << (8 * byte)
    stored = new.to(tl.uint16).to(tl.int16, bitcast=True) if form.bits == 16 else new.to(tl.int32, bitcast=True)
    tl.store(values + first + _inside(), stored, mask=valid & possible)
    if not possible:
        tl.atomic_max(outcome, _INVALID)


@triton.jit
def _byte_at(words, place, valid):
    return tl.load(words.to(tl.pointer_type(tl.uint8)) + place, mask=valid, other=0).to(tl.uint32)


@triton.jit
def _decoded(words, at, valid, known, parameter, limit, form: tl.constexpr, difference: tl.constexpr):
    """Return the bits of the elements, and where the payload ends."""
    bits: tl.constexpr = form.bits
    there, code = to_pieces(valid), known * 0
    if difference:
        exponent = _exponent(known, form)
        width, quiet = _widths(exponent, parameter, bits), _quiet(exponent, parameter, valid)
        hit, at = _take(words, at, occupied_bytes(quiet), limit)
        mask = (there & (quiet ^ -1)) | (quiet & (hit * 255))
        head, at = _take_unary(words, at, exponent * 0, mask, 0, limit)
        quotient = head.to(tl.uint32)
        quotient, at = _take_escaped(words, at, quotient, valid & (head == _ESCAPE), bits, limit)
        width = tl.where(head == _ESCAPE, 0, width)
        low: tl.constexpr = 0
    else:
        low: tl.constexpr = (form.mantissa + 1) // 8 * 8
        width = (known * 0).to(tl.int32) + (form.mantissa + 1)
        for byte in tl.static_range(low // 8):
            place = at // 8 + _inside()
            code |= _byte_at(words, place, valid & (place < 4 * limit)) << (8 * byte)
            at += 8 * tl.sum(count_ones(there), axis=0)
        lower, at = _take(words, at, there, limit)
        upper, at = _take(words, at, there, limit)
        head = to_flags(lower) + 2 * to_flags(upper)
        head, at = _take_unary(words, at, head, lower & upper, _SYMBOLS, limit)
        below = tl.where(head == 5, -1, tl.where(head > 5, head - 1, head))
        quotient = ((parameter - below) & 255).to(tl.uint32)
        quotient, at = _take_escaped(words, at, quotient, valid & (head == _ESCAPE), form.exponents, limit)
    code |= quotient << width.to(tl.uint32)
    for bit in range(low, _largest(width)):
        pieces, at = _take(words, at, to_pieces(width > bit) & there, limit)
        code |= to_flags(pieces).to(tl.uint32) << bit
    code = _cut(code, bits)
    if difference:
        distance = (code >> 1) ^ (0 - (code & 1))
        found = _ordered(_cut(_ordered(known, bits) + distance, bits), bits)
    else:
        found = (code >> 1) | ((code & 1) << (bits - 1))
    return found, at


@triton.jit
def _take(words, at, mask, limit):
    """Return the next bits at the places of `mask`, and where they end."""
    count = count_ones(mask)
    found = _bits_at(words, at + tl.cumsum(count, axis=0) - count, limit)
    return deposit((found & 0xFFFF).to(tl.int32), mask), at + tl.sum(count, axis=0)


@triton.jit
def _bits_at(words, start, limit):
    """Return 32 bits or more from the bit `start` on. After `limit` words there are zeros."""
    found = tl.zeros(start.shape, tl.uint64)
    for half in tl.static_range(2):
        index = (start >> 5) + half
        word = tl.load(words + index, mask=index < limit, other=0).to(tl.uint32, bitcast=True)
        found |= word.to(tl.uint64) << (32 * half)
    return found >> (start & 31).to(tl.uint64)


@triton.jit
def _take_unary(words, at, head, mask, start: tl.constexpr, limit):
    reached = start
    while (reached < _ESCAPE) & (tl.max(mask, axis=0) > 0):
        mask, at = _take(words, at, mask, limit)
        head += to_flags(mask)
        reached += 1
    return head, at


@triton.jit
def _take_escaped(words, at, quotient, escaped, bits: tl.constexpr, limit):
    count = _total(escaped.to(tl.int32))
    if count > 0:
        number = _bits_at(words, at + bits * _ranks(escaped), limit) & ((1 << bits) - 1)
        quotient = tl.where(escaped, number.to(tl.uint32), quotient)
    return quotient, at + bits * count
