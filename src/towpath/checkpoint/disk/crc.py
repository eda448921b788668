"""CRC-32 of a whole from those of its parts: several ranks read one box, and none of them reads another's part twice.

    crc(a + b) = (crc(a) · x^(8·len(b)) mod p) xor crc(b)

as polynomials over two elements, p being CRC-32's own (bit-reversed here, as everywhere in zlib).
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000  # x^0


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two parts, one after the other, from theirs."""
    return _times(_shift(second_bytes), first) ^ second


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _shift(count_bytes: int) -> int:
    """x^(8·count) mod p."""
    result, square = _ONE, _times(_ONE >> 4, _ONE >> 4)  # x^8
    while count_bytes:
        if count_bytes & 1:
            result = _times(result, square)
        square = _times(square, square)
        count_bytes >>= 1
    return result
