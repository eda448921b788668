"""The exact codecs in Triton, for GPUs. They equal `specification` to the bit, and the host waits for nothing.

A program works on a few blocks, as tensors [blocks, groups, 64]. The same bit of 64 elements becomes a word of 64 bits,
and these words [blocks, groups] are handled as in C++. `extract` keeps the bits of the elements that send one. `_put`
appends them to the block's payload with atomic operations on words of 32 bits.

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
from towpath.codecs.exact.triton_bits import count_ones, deposit, extract, occupied_bytes, to_lanes, to_word
from towpath.core.formats import BLOCK, HEADER_BYTES

_WORDS = 1024  # of a program that computes a digest
_LAUNCH = {"num_warps": 4}

_BLOCKS = tl.constexpr(1)  # of a program
_BLOCK = tl.constexpr(BLOCK)
_GROUPS = tl.constexpr(BLOCK // 64)
_HEADER = tl.constexpr(HEADER_BYTES)
_ESCAPE = tl.constexpr(specification.ESCAPE)
_QUIET = tl.constexpr(specification.QUIET)
_SYMBOLS = tl.constexpr(specification.SYMBOLS)
_LARGEST = tl.constexpr(specification.LARGEST_PARAMETER)
_OTHER, _SHORT, _DAMAGED = (tl.constexpr(int(p)) for p in (Problem.OTHER, Problem.SHORT, Problem.DAMAGED))
_STALE, _INVALID = tl.constexpr(int(Problem.STALE)), tl.constexpr(int(Problem.INVALID))
_KEY = tl.constexpr(0x9E3779B97F4A7C15)
_FULL = tl.constexpr(0xFFFFFFFFFFFFFFFF)


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
    _write_kernel[grid](before, now, table, ends, words, out, n, **constants)
    first, _ = header_words(n, values.dtype, old is not None)
    header = out[:HEADER_BYTES].view(torch.int64)
    _header_kernel[(1,)](header, ends, first, n, HEADER_BYTES + table.nbytes, len(ends))
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
    _check_kernel[(count,)](header, sums, outcomes, first, n, start, stride, own)
    tables = words.view(count, -1)[:, HEADER_BYTES // 4 :][:, : len(table)]
    ends = torch.cumsum(tables & 0xFFFF, 1)
    _decode_kernel[(*grid, count)](
        words, encoded, table, ends, _integers(slices), outcomes, n, stride, own, **constants
    )
    return outcomes


def _shape(values: torch.Tensor, message: torch.Tensor, difference: bool) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return the message as words, its table, the grid, and compile-time constants."""
    if message.data_ptr() % 8:
        raise ValueError(f"exact messages start at a multiple of 8 bytes on a GPU; got {message.data_ptr()}.")
    form = specification.FORMATS[values.dtype]
    words = message[: len(message) // 8 * 8].view(torch.int32)
    table = words[HEADER_BYTES // 4 :][: table_bytes(values.numel()) // 4]
    return words, table, (triton.cdiv(len(table), _BLOCKS.value),), {"form": form, "difference": difference} | _LAUNCH


def _integers(values: torch.Tensor) -> torch.Tensor:
    return values.view(specification.FORMATS[values.dtype].integer)


def _add_digest(values: torch.Tensor, found: torch.Tensor) -> None:
    """Add the digest of `values`, or of each of their rows."""
    if values.numel():
        n = values.shape[-1]
        grid = (triton.cdiv(n * values.itemsize, 8 * _WORDS), values.numel() // n)
        _digest_kernel[grid](_integers(values), None, found, n, n, values.itemsize, _WORDS)


def _add_checksums(words: torch.Tensor, found: torch.Tensor, count: int = 1) -> None:
    """Add the checksums of `count` messages of equal stride, of which `words` consists."""
    each = len(words) // count
    _digest_kernel[(triton.cdiv(each, 2 * _WORDS), count)](words, words, found, each, each, 4, _WORDS)


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
    length = n
    if header is not None:
        header += row * stride
        length = tl.minimum(tl.load((header + 4).to(tl.pointer_type(tl.int64))), 4 * n.to(tl.int64)) // 4
    loaded = tl.load(data + index, mask=index < length, other=0).to(tl.uint64) & ((1 << (8 * item)) - 1)
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
    """Store the entries of a table: the length and the parameter of each block."""
    block, valid, count = _place(n)
    code, exponent = _codes(old, values, block, valid, form, difference)
    parameter = _chosen(code, exponent, valid, count, difference)
    at = tl.zeros([_BLOCKS], tl.int64)
    at = _encoded(None, None, at, valid, count, code, exponent, parameter, count > 0, False, form, difference)
    length, raw = ((at + 7) // 8).to(tl.int32), count * (form.bits // 8)
    changed = tl.max(tl.max((code != 0).to(tl.int32), axis=2), axis=1) > 0
    length = tl.where(changed, tl.minimum(length, raw), 0)
    entry = length | (tl.where((length > 0) & (length < raw), parameter, 0) << 16)
    tl.store(table + block, entry, mask=count > 0)


@triton.jit(do_not_specialize=["n"])
def _write_kernel(old, values, table, ends, words, message, n, form: tl.constexpr, difference: tl.constexpr):
    """Write the payloads."""
    block, valid, count = _place(n)
    code, exponent = _codes(old, values, block, valid, form, difference)
    entry = tl.load(table + block, mask=count > 0, other=0)
    length, raw = entry & 0xFFFF, count * (form.bits // 8)
    start = _HEADER + 4 * ((n + _BLOCK - 1) // _BLOCK)
    start += tl.load(ends + block, mask=count > 0, other=0) - length
    at, parameter, coded = 8 * start, (entry >> 16) & 255, (length > 0) & (length < raw)
    _encoded(words, message, at, valid, count, code, exponent, parameter, coded, True, form, difference)
    new = tl.load(values + _index(block), mask=valid, other=0).to(tl.uint32)
    item: tl.constexpr = form.bits // 8
    for byte in tl.static_range(item):
        at = start[:, None, None] + _inside() * item + byte
        tl.store(message + at, ((new >> (8 * byte)) & 255).to(tl.uint8), mask=valid & (length == raw)[:, None, None])


@triton.jit
def _place(n):
    """Return the numbers of this program's blocks, their elements [blocks, groups, 64] as a mask, and as counts."""
    block = tl.program_id(0).to(tl.int64) * _BLOCKS + tl.arange(0, _BLOCKS)
    count = tl.minimum(tl.maximum(n - block * _BLOCK, 0), _BLOCK).to(tl.int32)
    return block, _inside() < count[:, None, None], count


@triton.jit
def _inside():
    """Return the place of each element in its block."""
    return tl.arange(0, _GROUPS)[None, :, None] * 64 + tl.arange(0, 64)[None, None, :]


@triton.jit
def _index(block):
    return block[:, None, None] * _BLOCK + _inside()


@triton.jit
def _ordered(x, bits: tl.constexpr):
    return tl.where(x >> (bits - 1) == 1, x ^ ((1 << (bits - 1)) - 1), x)


@triton.jit
def _loaded(values, block, valid, bits: tl.constexpr):
    """Return the bits of the elements as unsigned integers."""
    return _cut(tl.load(values + _index(block), mask=valid, other=0).to(tl.uint32), bits)


@triton.jit
def _cut(x, bits: tl.constexpr):
    if bits == 16:
        x = x & 0xFFFF
    return x


@triton.jit
def _codes(old, values, block, valid, form: tl.constexpr, difference: tl.constexpr):
    """Return the codes, and the exponents of the old values or of the values."""
    bits: tl.constexpr = form.bits
    new = _loaded(values, block, valid, bits)
    known = new
    if difference:
        known = _loaded(old, block, valid, bits)
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
    return tl.max(tl.reshape(x, [x.numel]), axis=0)


@triton.jit
def _total(flags):
    return tl.sum(tl.sum(flags.to(tl.int32), axis=2), axis=1)


@triton.jit
def _chosen(code, exponent, valid, count, difference: tl.constexpr):
    """Return the least parameter that is enough, by halving."""
    low, high = count * 0, count * 0 + _LARGEST
    for _ in range(8):
        middle = (low + high) // 2
        each = middle[:, None, None]
        if difference:
            width = tl.minimum(tl.maximum(each - exponent, 0), 31)
            needing = ((code >> width.to(tl.uint32)) != 0) & (each - exponent < 32)
            enough = 2 * _total(valid & (exponent <= each + 1)) >= 3 * _total(valid & needing)
        else:
            enough = 8 * _total(valid & (exponent > each)) <= count
        high = tl.where(enough, middle, high)
        low = tl.where(enough | (middle == _LARGEST), low, middle + 1)
    return low


@triton.jit
def _widths(exponent, step, bits: tl.constexpr):
    return tl.minimum(tl.maximum(step[:, None, None] - exponent, 0), bits - 1)


@triton.jit
def _quiet(exponent, step, valid):
    return to_word(valid & (exponent >= step[:, None, None] + _QUIET))


@triton.jit
def _encoded(
    words, message, at, valid, count, code, exponent, parameter, enabled,
    writing: tl.constexpr, form: tl.constexpr, difference: tl.constexpr,
):  # fmt: skip
    """Write the payloads from the bits `at` of the message on, or only count. Return where they end."""
    mantissa: tl.constexpr = form.mantissa
    valid_word = to_word(valid)
    if difference:
        width = _widths(exponent, parameter, form.bits)
        quotient = code >> width.to(tl.uint32)
        head = tl.minimum(quotient, _ESCAPE).to(tl.int32)
        width = tl.where(head == _ESCAPE, 0, width)
        quiet = _quiet(exponent, parameter, valid)
        there, hit = occupied_bytes(quiet), occupied_bytes(to_word(head > 0) & quiet)
        at = _put(words, at, hit, there, enabled, writing)
        mask = (valid_word & (quiet ^ _FULL)) | (quiet & (hit * 255))
        at = _put_unary(words, at, head, mask, 0, enabled, writing)
        at = _put_escaped(words, at, code, valid & (head == _ESCAPE), form.bits, enabled, writing)
        low: tl.constexpr = 0
    else:
        low: tl.constexpr = (mantissa + 1) // 8 * 8
        width = exponent * 0 + (mantissa + 1)
        for byte in tl.static_range(low // 8):
            if writing:
                place = (at // 8)[:, None, None] + _inside()
                stored = ((code >> (8 * byte)) & 255).to(tl.uint8)
                tl.store(message + place, stored, mask=valid & enabled[:, None, None])
            at += 8 * count
        below = parameter[:, None, None] - exponent
        head = tl.minimum(tl.where(below > 4, below + 1, below), _ESCAPE)
        head = tl.where(below == -1, 5, tl.where(below < -1, _ESCAPE, head))
        rest = to_word(head >= _SYMBOLS)
        at = _put(words, at, to_word((head & 1) == 1) | rest, valid_word, enabled, writing)
        at = _put(words, at, to_word((head & 2) == 2) | rest, valid_word, enabled, writing)
        at = _put_unary(words, at, head, rest & valid_word, _SYMBOLS, enabled, writing)
        escaped = valid & (head == _ESCAPE)
        at = _put_escaped(words, at, exponent.to(tl.uint32), escaped, form.exponents, enabled, writing)
    for bit in range(low, _largest(width)):
        mask = to_word(width > bit) & valid_word
        at = _put(words, at, to_word(((code >> bit) & 1) == 1), mask, enabled, writing)
    return at


@triton.jit
def _put_unary(words, at, head, mask, start: tl.constexpr, enabled, writing: tl.constexpr):
    for limit in range(start, tl.minimum(_largest(head) + 1, _ESCAPE)):
        larger = to_word(head > limit) & mask
        at = _put(words, at, larger, mask, enabled, writing)
        mask = larger
    return at


@triton.jit
def _put(words, at, word, mask, enabled, writing: tl.constexpr):
    """Append the bits of `mask`. Return where they end."""
    count = count_ones(mask)
    if writing:
        start = at[:, None] + tl.cumsum(count, axis=1) - count
        bits, shift = extract(word, mask), (start & 31).to(tl.uint64)
        _or(words, start // 32, bits << shift, enabled[:, None])
        _or(words, start // 32 + 1, (bits >> (32 - shift)), enabled[:, None])
        _or(words, start // 32 + 2, (bits >> (63 - shift)) >> 1, enabled[:, None])
    return at + tl.sum(count, axis=1)


@triton.jit
def _or(words, index, bits, enabled):
    lower = (bits & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + index, lower, mask=enabled & (lower != 0), sem="relaxed")


@triton.jit
def _put_escaped(words, at, quotient, escaped, bits: tl.constexpr, enabled, writing: tl.constexpr):
    """Append whole quotients."""
    start, end = _escaped_at(at, escaped, bits)
    if writing:
        number, sent = quotient.to(tl.uint64) << (start & 31).to(tl.uint64), escaped & enabled[:, None, None]
        _or(words, start // 32, number, sent)
        _or(words, start // 32 + 1, number >> 32, sent)
    return end


@triton.jit
def _escaped_at(at, escaped, bits: tl.constexpr):
    """Return where the quotient of each escaped element starts, and where they end."""
    word = to_word(escaped)
    count = count_ones(word)
    before = (tl.cumsum(count, axis=1) - count)[:, :, None]
    lane = tl.arange(0, 64).to(tl.uint64)[None, None, :]
    rank = before + count_ones(word[:, :, None] & (((lane * 0 + 1) << lane) - 1))
    return at[:, None, None] + rank * bits, at + tl.sum(count, axis=1) * bits


# ---- Decoding ----


@triton.jit(do_not_specialize=["n", "stride", "own"])
def _decode_kernel(
    words, message, table, ends, values, outcome, n, stride, own, form: tl.constexpr, difference: tl.constexpr
):  # fmt: skip
    """Decode the payloads of each row but `own`, if its message has no problem."""
    row = tl.program_id(1).to(tl.int64)
    outcome += row
    if (tl.load(outcome) != 0) | (row == own):
        return
    words += row * (stride // 4)
    message += row * stride
    table += row * (stride // 4)
    ends += row * ((n + _BLOCK - 1) // _BLOCK)
    values += row * n
    block, valid, count = _place(n)
    entry = tl.load(table + block, mask=count > 0, other=0)
    length, raw, parameter = entry & 0xFFFF, count * (form.bits // 8), (entry >> 16) & 255
    nbytes = tl.load((words + 4).to(tl.pointer_type(tl.int64)))
    last = (n + _BLOCK - 1) // _BLOCK - 1
    end = tl.load(ends + block, mask=count > 0, other=0) + _HEADER + 4 * (last + 1)
    start = end - length
    # Nothing follows the last payload but what fills up a word.
    possible = (length <= raw) & (end <= nbytes) & ((block != last) | (nbytes - end < 8))
    coded = possible & (length > 0) & (length < raw)
    known = _loaded(values, block, valid, form.bits)
    limit = tl.where(coded, nbytes // 4, 0)
    new, at = _decoded(words, message, 8 * start, valid, count, known, parameter, limit, form, difference)
    possible = possible & ((length == 0) | (length == raw) | ((at + 7) // 8 == end))
    valid = valid & possible[:, None, None]
    is_raw = (length == raw)[:, None, None]
    as_sent = known * 0
    item: tl.constexpr = form.bits // 8
    for byte in tl.static_range(item):
        place = start[:, None, None] + _inside() * item + byte
        as_sent |= tl.load(message + place, mask=valid & is_raw, other=0).to(tl.uint32) << (8 * byte)
    unsent = known if difference else as_sent
    new = tl.where(is_raw, as_sent, tl.where((length == 0)[:, None, None], unsent, new))
    stored = new.to(tl.uint16).to(tl.int16, bitcast=True) if form.bits == 16 else new.to(tl.int32, bitcast=True)
    tl.store(values + _index(block), stored, mask=valid)
    tl.atomic_max(outcome, (1 - tl.min(possible.to(tl.int32), axis=0)) * _INVALID)


@triton.jit
def _decoded(
    words, message, at, valid, count, known, parameter, limit, form: tl.constexpr, difference: tl.constexpr
):  # fmt: skip
    """Return the bits of the elements, and where the payloads end."""
    bits: tl.constexpr = form.bits
    mantissa: tl.constexpr = form.mantissa
    valid_word, code = to_word(valid), known * 0
    if difference:
        exponent = _exponent(known, form)
        width, quiet = _widths(exponent, parameter, bits), _quiet(exponent, parameter, valid)
        hit, at = _take(words, at, occupied_bytes(quiet), limit)
        mask = (valid_word & (quiet ^ _FULL)) | (quiet & (hit * 255))
        head, at = _take_unary(words, at, exponent * 0, mask, 0, limit)
        escaped = valid & (head == _ESCAPE)
        quotient, at = _take_escaped(words, at, head.to(tl.uint32), escaped, bits, limit)
        width = tl.where(head == _ESCAPE, 0, width)
        low: tl.constexpr = 0
    else:
        low: tl.constexpr = (mantissa + 1) // 8 * 8
        width = (known * 0).to(tl.int32) + (mantissa + 1)
        for byte in tl.static_range(low // 8):
            place = (at // 8)[:, None, None] + _inside()
            inside = valid & (place < 4 * limit[:, None, None])
            code |= tl.load(message + place, mask=inside, other=0).to(tl.uint32) << (8 * byte)
            at += 8 * count
        first, at = _take(words, at, valid_word, limit)
        second, at = _take(words, at, valid_word, limit)
        head, at = _take_unary(words, at, to_lanes(first) + 2 * to_lanes(second), first & second, _SYMBOLS, limit)
        below = tl.where(head == 5, -1, tl.where(head > 5, head - 1, head))
        exponent = ((parameter[:, None, None] - below) & 255).to(tl.uint32)
        escaped = valid & (head == _ESCAPE)
        quotient, at = _take_escaped(words, at, exponent, escaped, form.exponents, limit)
    for bit in range(low, _largest(width)):
        word, at = _take(words, at, to_word(width > bit) & valid_word, limit)
        code |= to_lanes(word).to(tl.uint32) << bit
    code = _cut(code | (quotient << width.to(tl.uint32)), bits)
    if difference:
        distance = (code >> 1) ^ (0 - (code & 1))
        found = _ordered(_cut(_ordered(known, bits) + distance, bits), bits)
    else:
        found = (code >> 1) | ((code & 1) << (bits - 1))
    return found, at


@triton.jit
def _take(words, at, mask, limit):
    """Return the next bits at the places of `mask`, and where they end. After `limit` words there are zeros."""
    count = count_ones(mask)
    start = at[:, None] + tl.cumsum(count, axis=1) - count
    index, shift = start // 32, (start & 31).to(tl.uint64)
    each = limit[:, None]
    found = _word_at(words, index, each) >> shift
    found |= _word_at(words, index + 1, each) << (32 - shift)
    found |= (_word_at(words, index + 2, each) << (63 - shift)) << 1
    return deposit(found, mask), at + tl.sum(count, axis=1)


@triton.jit
def _word_at(words, index, limit):
    found = tl.load(words + index, mask=(index >= 0) & (index < limit), other=0)
    return found.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _take_unary(words, at, head, mask, start: tl.constexpr, limit):
    reached = start
    while (reached < _ESCAPE) & (_largest(mask) > 0):
        mask, at = _take(words, at, mask, limit)
        head += to_lanes(mask)
        reached += 1
    return head, at


@triton.jit
def _take_escaped(words, at, quotient, escaped, bits: tl.constexpr, limit):
    start, end = _escaped_at(at, escaped, bits)
    index, each = start // 32, limit[:, None, None]
    number = _word_at(words, index, each) | (_word_at(words, index + 1, each) << 32)
    number = (number >> (start & 31).to(tl.uint64)) & ((1 << bits) - 1)
    return tl.where(escaped, number.to(tl.uint32), quotient), end
