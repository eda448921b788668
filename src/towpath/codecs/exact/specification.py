"""The exact codecs in plain torch, slow and readable. All other back ends equal it to the bit.

An element becomes a code, which is an integer, and a code has a quotient and `width` low bits:

    differences   the code is the distance from the old value to the new one, in representable numbers and as a zigzag
                  (0, -1, 1, -2, ... become 0, 1, 2, 3, ...). width = step - exponent(old), at least 0. An encoder
                  chooses a step per block, which is about the exponent of the largest change of most elements.
    values        the code is the exponent, then the mantissa, then the sign. The exponent is the quotient. A block's
                  parameter is an exponent that few elements exceed.

A quotient is sent as a head, a small number for each of the common quotients. `ESCAPE` stands for all others. A payload
has these parts, as bits from the lowest of each byte on. Each part has the bits of some elements, in their order:

    1. values: the whole bytes of the low bits, first the lowest byte of all elements, and so on
    2. differences: quiet elements are those with step <= exponent - QUIET, and few of them change. Eight neighbors
       with a quiet element among them have a bit: whether a quiet one changed.
       values: the head in two bits, at most 3. The lower bits of all elements come first.
    3. one more bit for each element whose head is larger, again and again, until nobody is left or ESCAPE is reached.
       It starts with a head of 0 for differences, without the quiet elements that step 2 covered, and of 3 for values.
    4. for ESCAPE the quotient, one element after another. Differences have a width of 0 then, so it is the code.
    5. the other low bits: bit 0 of all elements with a width above 0, bit 1 of those with a width above 1, and so on
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from towpath.core.formats import BLOCK, ENTRY_BYTES

ESCAPE = 10
QUIET = 2
SYMBOLS = 3
LARGEST_PARAMETER = 254

_KEY = 0x9E3779B97F4A7C15 - 2**64
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Format:
    """The bits of a dtype."""

    bits: int
    mantissa: int
    integer: torch.dtype

    @property
    def exponents(self) -> int:
        """The bits of an exponent."""
        return self.bits - 1 - self.mantissa

    def bits_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the bits of elements as integers from 0 on (int64)."""
        return x.view(self.integer).long() & self.all

    def exponent(self, bits: torch.Tensor) -> torch.Tensor:
        """Return exponents with their bias."""
        return (bits >> self.mantissa) & (2**self.exponents - 1)

    def ordered(self, bits: torch.Tensor) -> torch.Tensor:
        """Return integers that rise with the value, modulo 2**bits. It is its own inverse."""
        return torch.where(bits >> (self.bits - 1) == 1, bits ^ (self.all >> 1), bits)

    @property
    def all(self) -> int:
        """An integer of ones."""
        return 2**self.bits - 1


FORMATS = {
    torch.bfloat16: Format(16, 7, torch.int16),
    torch.float16: Format(16, 10, torch.int16),
    torch.float32: Format(32, 23, torch.int32),
}


def table_bytes(elements: int) -> int:
    return ENTRY_BYTES * -(-elements // BLOCK)


def digest(values: torch.Tensor, first: int) -> int:
    """Return the sum of the products of the halves of (word + number * KEY), over all words of 8 bytes."""
    data = values.flatten().view(torch.uint8)
    words = torch.nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64)
    mixed = words + torch.arange(first + 1, first + 1 + len(words), device=data.device) * _KEY
    return int(((mixed & _LOW) * (mixed >> 32 & _LOW)).sum()) % 2**64


def encode(old: torch.Tensor | None, values: torch.Tensor, out: torch.Tensor) -> int:
    """Write the table and the payloads into `out`. Return their bytes."""
    form, end = FORMATS[values.dtype], table_bytes(values.numel())
    for index, start in enumerate(range(0, values.numel(), BLOCK)):
        new = values.flatten()[start : start + BLOCK]
        bits = form.bits_of(new)
        before = None if old is None else form.bits_of(old.flatten()[start : start + BLOCK])
        if torch.equal(bits, torch.zeros_like(bits) if before is None else before):
            parameter, payload = 0, new[:0].view(torch.uint8)
        elif before is None:
            parameter, payload = _encode_values(form, bits)
        else:
            parameter, payload = _encode_difference(form, before, bits)
        if len(payload) >= new.nbytes:
            parameter, payload = 0, new.view(torch.uint8)
        entry = torch.tensor([len(payload) | parameter << 16], dtype=torch.int64)
        out[ENTRY_BYTES * index : ENTRY_BYTES * (index + 1)] = entry.view(torch.uint8)[:ENTRY_BYTES]
        out[end : end + len(payload)] = payload
        end += len(payload)
    return end


def decode(body: torch.Tensor, values: torch.Tensor, difference: bool) -> bool:
    """Decode the table and the payloads into `values`. Return whether the content is possible."""
    form, flat, end = FORMATS[values.dtype], values.view(-1), table_bytes(values.numel())
    if end > len(body):
        return False
    for start in range(0, values.numel(), BLOCK):
        block = flat[start : start + BLOCK]
        entry = start // BLOCK * ENTRY_BYTES
        low, high, parameter, _ = body[entry : entry + ENTRY_BYTES].tolist()
        length = low | high << 8
        if length > block.nbytes or end + length > len(body):
            return False
        payload = body[end : end + length]
        if length == block.nbytes:
            block.view(torch.uint8).copy_(payload)
        elif length:
            reader = _Reader(payload)
            work = _decode_difference if difference else _decode_values
            bits = work(form, reader, parameter, form.bits_of(block))
            if -(-reader.at // 8) != length:
                return False
            signed = torch.where(bits > form.all >> 1, bits - form.all - 1, bits).to(form.integer)
            block.copy_(signed.view(values.dtype))
        elif not difference:
            block.zero_()
        end += length
    return len(body) - end < 8


def _encode_difference(form: Format, before: torch.Tensor, bits: torch.Tensor) -> tuple[int, torch.Tensor]:
    distance = (form.ordered(bits) - form.ordered(before)) & form.all
    code = ((distance << 1) ^ -(distance >> (form.bits - 1))) & form.all
    exponent = form.exponent(before)
    # The least step at which a code has a quotient of 0; 0 if the element does not change. The exponent of a float is
    # the length of an integer in bits.
    need = torch.where(code > 0, exponent + torch.frexp(code.double()).exponent, 0).clamp_max(255)
    # A larger step costs a bit for each element with an exponent below it, or just above it, which is no longer quiet.
    # It saves about 3/2 bits for each element that needs more. Any choice decodes; this one is within 2 % of the best.
    longer, needing = _at_most(exponent)[1:], len(code) - _at_most(need)[:-1]
    step = _least(2 * longer >= 3 * needing)
    width = (step - exponent).clamp(0, form.bits - 1)
    quotient = code >> width
    head = quotient.clamp_max(ESCAPE)
    writer = _Writer()
    quiet = exponent >= step + QUIET
    hit = _of_eight(quiet & (head > 0))
    writer.put(hit[_of_eight(quiet)])
    _write_unary(writer, head, 0, ~quiet | _each(hit, len(code)))
    writer.put(_bits(code[head == ESCAPE], form.bits))
    _write_low(writer, code, width * (head < ESCAPE), 0)
    return step, writer.bytes()


def _decode_difference(form: Format, reader: _Reader, step: int, before: torch.Tensor) -> torch.Tensor:
    exponent = form.exponent(before)
    width = (step - exponent).clamp(0, form.bits - 1)
    quiet = exponent >= step + QUIET
    hit = reader.take(_of_eight(quiet))
    head = _read_unary(reader, torch.zeros_like(before), 0, ~quiet | _each(hit, len(before)))
    quotient, width = _read_escaped(reader, head, head, form.bits), width * (head < ESCAPE)
    code = (quotient << width | _read_low(reader, width, 0)) & form.all
    distance = (code >> 1) ^ -(code & 1)
    return form.ordered((form.ordered(before) + distance) & form.all)


def _encode_values(form: Format, bits: torch.Tensor) -> tuple[int, torch.Tensor]:
    code = (bits << 1 | bits >> (form.bits - 1)) & form.all
    exponent, width = form.exponent(bits), form.mantissa + 1
    top = _least(8 * (len(code) - _at_most(exponent)) <= len(code))
    # Heads from the top down: top, ..., top - 4, then top + 1, then top - 5 and so on. What is above is rare.
    below = top - exponent
    head = torch.where(below > 4, below + 1, below).clamp_max(ESCAPE)
    head = torch.where(below == -1, 5, torch.where(below < -1, ESCAPE, head))
    writer = _Writer()
    for byte in range(width // 8):
        writer.put(_bits(code >> (8 * byte) & 255, 8))
    symbol = head.clamp_max(SYMBOLS)
    writer.put(symbol & 1)
    writer.put(symbol >> 1)
    _write_unary(writer, head, SYMBOLS, symbol == SYMBOLS)
    writer.put(_bits(exponent[head == ESCAPE], form.exponents))
    _write_low(writer, code, torch.full_like(code, width), width // 8 * 8)
    return top, writer.bytes()


def _decode_values(form: Format, reader: _Reader, top: int, before: torch.Tensor) -> torch.Tensor:
    everyone, width = torch.ones_like(before, dtype=torch.bool), form.mantissa + 1
    code = torch.zeros_like(before)
    for byte in range(width // 8):
        code |= reader.numbers(len(code), 8) << (8 * byte)
    symbol = reader.take(everyone) + 2 * reader.take(everyone)
    head = _read_unary(reader, symbol, SYMBOLS, symbol == SYMBOLS)
    below = torch.where(head == 5, -1, torch.where(head > 5, head - 1, head))
    exponent = _read_escaped(reader, head, (top - below) & 255, form.exponents)
    code |= exponent << width | _read_low(reader, torch.full_like(code, width), width // 8 * 8)
    code &= form.all
    return code >> 1 | (code & 1) << (form.bits - 1)


def _write_unary(writer: _Writer, head: torch.Tensor, start: int, left: torch.Tensor) -> None:
    for limit in range(start, ESCAPE):
        larger = head > limit
        writer.put(larger[left])
        left = left & larger


def _read_unary(reader: _Reader, head: torch.Tensor, start: int, left: torch.Tensor) -> torch.Tensor:
    for _ in range(start, ESCAPE):
        left = reader.take(left) > 0
        head = head + left
    return head


def _read_escaped(reader: _Reader, head: torch.Tensor, quotient: torch.Tensor, bits: int) -> torch.Tensor:
    escaped = head == ESCAPE
    return quotient.masked_scatter(escaped, reader.numbers(int(escaped.sum()), bits))


def _write_low(writer: _Writer, code: torch.Tensor, width: torch.Tensor, start: int) -> None:
    for bit in range(start, int(width.max())):
        writer.put((code >> bit & 1)[width > bit])


def _read_low(reader: _Reader, width: torch.Tensor, start: int) -> torch.Tensor:
    code = torch.zeros_like(width)
    for bit in range(start, int(width.max())):
        code |= reader.take(width > bit) << bit
    return code


class _Writer:
    """Bits one after another."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def put(self, bits: torch.Tensor) -> None:
        self._parts.append(bits.flatten().to(torch.uint8))

    def bytes(self) -> torch.Tensor:
        bits = torch.cat(self._parts)
        eights = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
        return (eights << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


class _Reader:
    """Bits one after another, and zeros after the last one."""

    def __init__(self, payload: torch.Tensor) -> None:
        self._bits = _bits(payload.long(), 8).flatten()
        self.at = 0

    def take(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the next bits for the elements of `mask`, and 0 for the others."""
        return torch.zeros_like(mask, dtype=torch.int64).masked_scatter(mask, self._next(int(mask.sum())))

    def numbers(self, count: int, bits: int) -> torch.Tensor:
        """Return numbers of so many bits."""
        return (self._next(count * bits).view(count, bits) << torch.arange(bits, device=self._bits.device)).sum(1)

    def _next(self, count: int) -> torch.Tensor:
        found = self._bits[self.at : self.at + count]
        self.at += count
        return torch.nn.functional.pad(found, (0, count - len(found)))


def _bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the bits of each number, from the lowest on."""
    return numbers[:, None] >> torch.arange(bits, device=numbers.device) & 1


def _at_most(numbers: torch.Tensor) -> torch.Tensor:
    """Return how many of the numbers are at most 0, 1, ... and so on."""
    return torch.bincount(numbers, minlength=256).cumsum(0)


def _least(enough: torch.Tensor) -> int:
    """Return the first parameter that is enough, or the largest one."""
    found = enough[:LARGEST_PARAMETER].nonzero()
    return int(found[0]) if len(found) else LARGEST_PARAMETER


def _of_eight(flags: torch.Tensor) -> torch.Tensor:
    """Return for each eight neighbors whether one of them has the flag."""
    return torch.nn.functional.pad(flags, (0, -len(flags) % 8)).view(-1, 8).any(1)


def _each(of_eight: torch.Tensor, count: int) -> torch.Tensor:
    return of_eight.bool().repeat_interleave(8)[:count]
