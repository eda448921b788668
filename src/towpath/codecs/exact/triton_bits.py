"""Words of 64 bits in Triton: the bits of 64 elements as one word, and back.

`triton_kernels.py` uses them as the C++ code uses the instructions pext, pdep and popcnt.
"""

# Triton compiles these functions from their source, so Python types mean nothing to it.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

_FULL = tl.constexpr(0xFFFFFFFFFFFFFFFF)
_FIRSTS = tl.constexpr(0x0101010101010101)
_SEVENS = tl.constexpr(0x7F7F7F7F7F7F7F7F)


@triton.jit
def to_word(flags):
    """Return a word [blocks, groups] with the flags [blocks, groups, 64] as its bits."""
    lane = tl.arange(0, 64).to(tl.uint64)[None, None, :]
    return tl.sum(flags.to(tl.uint64) << lane, axis=2)


@triton.jit
def to_lanes(word):
    """Return the bits of a word as integers."""
    lane = tl.arange(0, 64).to(tl.uint64)[None, None, :]
    return ((word[:, :, None] >> lane) & 1).to(tl.int32)


@triton.jit
def count_ones(x):
    """Return the number of ones."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * _FIRSTS) >> 56).to(tl.int32)


@triton.jit
def occupied_bytes(x):
    """Return the lowest bit of each byte that is not zero."""
    return ((((x & _SEVENS) + _SEVENS) | x) >> 7) & _FIRSTS


@triton.jit
def _moved(mask, zeros, shift: tl.constexpr):
    """Return the bits of `mask` that move by `shift`, the mask after it, and the zeros that are left to pass.

    Hacker's Delight, 7-4: a bit passes as many zeros as are below it. Those are counted in `zeros`, bit by bit.
    """
    odd = zeros ^ (zeros << 1)
    odd ^= odd << 2
    odd ^= odd << 4
    odd ^= odd << 8
    odd ^= odd << 16
    odd ^= odd << 32
    moving = odd & mask
    return moving, (mask ^ moving) | (moving >> shift), zeros & (odd ^ _FULL)


@triton.jit
def extract(word, mask):
    """Return the bits of `mask` next to each other, as the instruction pext does."""
    word &= mask
    zeros = (mask ^ _FULL) << 1
    for stage in tl.static_range(6):
        moving, mask, zeros = _moved(mask, zeros, 1 << stage)
        moved = word & moving
        word = (word ^ moved) | (moved >> (1 << stage))
    return word


@triton.jit
def deposit(word, mask):
    """Return the lowest bits of `word` at the places of `mask`, as the instruction pdep does."""
    zeros = (mask ^ _FULL) << 1
    moving1, mask1, zeros = _moved(mask, zeros, 1)
    moving2, mask2, zeros = _moved(mask1, zeros, 2)
    moving4, mask4, zeros = _moved(mask2, zeros, 4)
    moving8, mask8, zeros = _moved(mask4, zeros, 8)
    moving16, mask16, zeros = _moved(mask8, zeros, 16)
    moving32, _, zeros = _moved(mask16, zeros, 32)
    word = _chosen_bits(word, word << 32, moving32)
    word = _chosen_bits(word, word << 16, moving16)
    word = _chosen_bits(word, word << 8, moving8)
    word = _chosen_bits(word, word << 4, moving4)
    word = _chosen_bits(word, word << 2, moving2)
    return _chosen_bits(word, word << 1, moving1) & mask


@triton.jit
def _chosen_bits(word, other, mask):
    return (word & (mask ^ _FULL)) | (other & mask)
