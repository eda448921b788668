"""Pieces of 16 bits in Triton: the bits of 16 neighboring elements as one integer, and back.

`triton_kernels.py` uses them as the C++ code uses the instructions pext, pdep and popcnt on words of 64 bits.
"""

# Triton compiles these functions from their source, so Python types mean nothing to it.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

BITS = tl.constexpr(16)
# The axis of the 16 elements of a lane. Triton gives the other axis to the lanes of a warp: the first one before 3.7,
# and the last one since. With the wrong one, kernels are right and slow, and `python -m tools.kernels` fails.
EACH = tl.constexpr(1 if triton.__version__ < "3.7" else 0)
_ALL = tl.constexpr(0xFFFF)


@triton.jit
def number():
    """Return the number of each of the 16 elements of a lane."""
    return tl.expand_dims(tl.arange(0, BITS), 1 - EACH)


@triton.jit
def spread(x):
    """Return what each lane has, for its 16 elements."""
    return tl.expand_dims(x, EACH)


@triton.jit
def to_pieces(flags):
    """Return pieces [lanes] with the flags of 16 elements as their bits."""
    return tl.sum(flags.to(tl.int32) << number(), axis=EACH)


@triton.jit
def to_flags(pieces):
    """Return the bits of pieces as integers."""
    return (spread(pieces) >> number()) & 1


@triton.jit
def count_ones(x):
    """Return the number of ones."""
    x = x - ((x >> 1) & 0x5555)
    x = (x & 0x3333) + ((x >> 2) & 0x3333)
    x = (x + (x >> 4)) & 0x0F0F
    return (x + (x >> 8)) & 31


@triton.jit
def occupied_bytes(x):
    """Return the lowest bit of each byte that is not zero."""
    return ((((x & 0x7F7F) + 0x7F7F) | x) >> 7) & 0x0101


@triton.jit
def _moved(mask, zeros, shift: tl.constexpr):
    """Return the bits of `mask` that move by `shift`, the mask after it, and the zeros that are left to pass.

    Hacker's Delight, 7-4: a bit passes as many zeros as are below it. Those are counted in `zeros`, bit by bit.
    """
    odd = zeros ^ (zeros << 1)
    odd ^= odd << 2
    odd ^= odd << 4
    odd ^= odd << 8
    moving = odd & mask
    return moving, (mask ^ moving) | (moving >> shift), zeros & (odd ^ -1)


@triton.jit
def extract(pieces, mask):
    """Return the bits of `mask` next to each other, as the instruction pext does."""
    pieces &= mask
    zeros = (mask ^ _ALL) << 1
    for stage in tl.static_range(4):
        moving, mask, zeros = _moved(mask, zeros, 1 << stage)
        moved = pieces & moving
        pieces = (pieces ^ moved) | (moved >> (1 << stage))
    return pieces


@triton.jit
def deposit(pieces, mask):
    """Return the lowest bits of `pieces` at the places of `mask`, as the instruction pdep does."""
    zeros = (mask ^ _ALL) << 1
    moving1, mask1, zeros = _moved(mask, zeros, 1)
    moving2, mask2, zeros = _moved(mask1, zeros, 2)
    moving4, mask4, zeros = _moved(mask2, zeros, 4)
    moving8, _, zeros = _moved(mask4, zeros, 8)
    pieces = _chosen_bits(pieces, pieces << 8, moving8)
    pieces = _chosen_bits(pieces, pieces << 4, moving4)
    pieces = _chosen_bits(pieces, pieces << 2, moving2)
    return _chosen_bits(pieces, pieces << 1, moving1) & mask


@triton.jit
def _chosen_bits(pieces, other, mask):
    return (pieces & (mask ^ -1)) | (other & mask)
