"""The codecs in Triton, for GPUs. They equal `reference` to the bit, and read and write memory once.

A program works on a tile of whole blocks, 2,048 elements in total. Only a codec with one scale per message needs a
separate pass, which finds the largest value. How the kernels keep the bits of the reference:

    division         `div_rn`: Triton's `/` of float32 is approximate on GPUs
    a * b + c        launched without fusion: a fused multiply-add rounds once where the reference rounds twice
    rounding         adds a number so large that the sum's last bit is a code's last bit, or works on a float's bits:
                     conversions differ between devices, sums do not
    denormals        no functions of libdevice, such as `tl.floor`, which flush denormals
    largest value    compares the bits of absolute values as integers: they order as the values do, then Inf, then NaN
    addresses        reads and writes scales and bfloat16 byte by byte, since a message may start at any byte

Messages and outputs must be contiguous and on the current device.
"""

# Triton compiles these functions from their source, so Python types mean nothing to it. Triton is also not installed on
# every machine that checks the types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from towpath.core.formats import SCALE_BYTES, Codec

_TILE = 2048
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}


def encode(codec: Codec, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
    """Encode as `reference.encode` does."""
    _encode(codec, (x.contiguous(), 0, 0), x.numel(), out, seed)


def decode(codec: Codec, data: torch.Tensor, out: torch.Tensor) -> None:
    """Decode as `reference.decode` does."""
    decode_sum(codec, [data], out)


def decode_sum(codec: Codec, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Decode and sum as `reference.decode_sum` does."""
    n = out.numel()
    if n:
        grid, sizes, constants = _shape(codec, n)
        _decode_kernel[grid](*_equally_spaced(rows), _contiguous(out), *sizes, **constants)


def decode_sum_encode(
    codec: Codec, rows: Sequence[torch.Tensor], elements: int, out: torch.Tensor, seed: int = 0
) -> None:
    """Decode, sum and encode as `reference.decode_sum_encode` does."""
    _encode(codec, _equally_spaced(rows), elements, out, seed)


# The input of a kernel: a tensor, the bytes from one row to the next, and the number of rows (0: not encoded).
Source = tuple[torch.Tensor, int, int]


def _encode(codec: Codec, source: Source, n: int, out: torch.Tensor, seed: int) -> None:
    if n == 0:
        return
    grid, sizes, constants = _shape(codec, n)
    constants["encoded"] = source[2] > 0
    largest = None
    if constants["whole"]:
        largest = torch.zeros(1, dtype=torch.int32, device=out.device)
        _largest_kernel[grid](*source, largest, *sizes, **constants)
    # The lower 32 bits as a signed number: Triton compiles a kernel for each integer type.
    signed_seed = (seed & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
    _encode_kernel[grid](
        *source,
        largest,
        _contiguous(out),
        *sizes,
        signed_seed,
        top=codec.largest or 0.0,
        stochastic=codec.stochastic,
        **constants,
    )


def _shape(codec: Codec, n: int) -> tuple[tuple[int], tuple[int, int, int], dict[str, Any]]:
    """Return the grid, the sizes (elements, bytes of scales, bytes of the message), and compile-time constants."""
    whole = codec.largest is not None and codec.block == 0
    tile = max(_TILE, codec.block)
    constants = {"codec": codec.name, "block": codec.block or tile, "whole": whole, "hadamard": codec.hadamard}
    sizes = (n, SCALE_BYTES * codec.scales(n), codec.encoded_bytes(n))
    return (-(-n // tile),), sizes, constants | {"tile": tile} | _LAUNCH


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        raise ValueError(f"codecs read and write contiguous tensors; got strides {x.stride()} of shape {x.shape}.")
    return x


def _equally_spaced(rows: Sequence[torch.Tensor]) -> Source:
    """Return the rows without a copy if they are equally spaced in one storage. Otherwise copy them."""
    starts = [_contiguous(row).data_ptr() for row in rows]
    step = starts[1] - starts[0] if len(rows) > 1 else 0
    together = len({row.untyped_storage().data_ptr() for row in rows}) == 1
    if together and all(b - a == step for a, b in pairwise(starts)):
        return rows[0], step, len(rows)
    copied = torch.stack(list(rows))
    return copied, copied.shape[1], len(rows)


@triton.jit(do_not_specialize=["rows"])
def _largest_kernel(
    source, stride, rows, largest, n, split, size,
    codec: tl.constexpr, block: tl.constexpr, whole: tl.constexpr, hadamard: tl.constexpr, tile: tl.constexpr,
    encoded: tl.constexpr,
):  # fmt: skip
    """Store the bits of the largest absolute value of a message that has one scale."""
    first = tl.program_id(0).to(tl.int64) * tile
    values = _values(source, stride, rows, first, n, split, size, codec, block, whole, hadamard, tile, encoded)
    if hadamard:
        values = _rotated(values, first + tl.arange(0, tile), n, tile)
    tl.atomic_max(largest, tl.max(_magnitude(values).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["rows", "seed"])
def _encode_kernel(
    source, stride, rows, largest, out, n, split, size, seed,
    codec: tl.constexpr, block: tl.constexpr, whole: tl.constexpr, hadamard: tl.constexpr, tile: tl.constexpr,
    encoded: tl.constexpr, top: tl.constexpr, stochastic: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * tile
    at = first + tl.arange(0, tile)
    values = _values(source, stride, rows, first, n, split, size, codec, block, whole, hadamard, tile, encoded)
    if hadamard:
        values = _rotated(values, at, n, tile)
    if codec == "bf16":
        _store_bytes(out, 2 * first, size, _bfloat16_code(values), 2, tile)
    else:
        _store_blocks(values, largest, out, first, n, split, size, seed, codec, block, whole, tile, top, stochastic)


@triton.jit(do_not_specialize=["rows"])
def _decode_kernel(
    source, stride, rows, out, n, split, size,
    codec: tl.constexpr, block: tl.constexpr, whole: tl.constexpr, hadamard: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * tile
    at = first + tl.arange(0, tile)
    values = _values(source, stride, rows, first, n, split, size, codec, block, whole, hadamard, tile, True)
    tl.store(out + at, _narrowed(values, out.dtype.element_ty), mask=at < n)


@triton.jit
def _values(
    source, stride, rows, first, n, split, size,
    codec: tl.constexpr, block: tl.constexpr, whole: tl.constexpr, hadamard: tl.constexpr, tile: tl.constexpr,
    encoded: tl.constexpr,
):  # fmt: skip
    """Return a tile of the numbers, or of the sum of the decoded rows."""
    at = first + tl.arange(0, tile)
    if encoded:
        total = tl.zeros([tile], tl.float32)
        message = source
        for row in range(rows):
            if codec == "bf16":
                values = (_load_bytes(message, 2 * first, size, 2, tile) << 16).to(tl.float32, bitcast=True)
            else:
                values = _decoded(message, first, n, split, size, codec, block, whole, tile)
            if hadamard:
                values = _rotated(values, at, n, tile)
            total = tl.where(row == 0, values, total + values)  # starting from 0 would turn -0 into 0
            message += stride
    else:
        total = _widened(tl.load(source + at, mask=at < n, other=0.0))
    return total


@triton.jit
def _store_blocks(
    values, largest, out, first, n, split, size, seed,
    codec: tl.constexpr, block: tl.constexpr, whole: tl.constexpr, tile: tl.constexpr,
    top: tl.constexpr, stochastic: tl.constexpr,
):  # fmt: skip
    """Store the scales and codes of a tile."""
    at = first + tl.arange(0, tile)
    blocks: tl.constexpr = tile // block
    in_blocks = tl.reshape(values, [blocks, block])
    if whole:
        top_bits = tl.load(largest + tl.arange(0, 1))
        first_scale = first * 0
        written = tl.where(first == 0, split, 0)  # one program writes it
    else:
        top_bits = tl.max(_magnitude(in_blocks).to(tl.int32), axis=1)
        first_scale = first // block
        written = split
    finite = top_bits < 0x7F800000
    scales = tl.div_rn(top_bits.to(tl.float32, bitcast=True), tl.full([blocks], top, tl.float32))
    scales = tl.where(finite, tl.maximum(scales, 1.1754943508222875e-38), 1.0)
    scale_bits = tl.where(finite, scales.to(tl.uint32, bitcast=True), 0x7FC00000)
    _store_bytes(out, _SCALE_BYTES * first_scale, written, scale_bits, _SCALE_BYTES, blocks)

    divisors = tl.broadcast_to(scales[:, None], [blocks, block])
    quotients = tl.div_rn(tl.where(finite[:, None], in_blocks, 0.0), divisors)
    quotients = tl.reshape(quotients, [tile])
    if codec == "e4m3":
        codes = _float8_code(quotients, 3, top)
    elif codec == "e5m2":
        codes = _float8_code(quotients, 2, top)
    else:
        if stochastic:
            quotients = _floor(quotients + _uniform(at, seed))
        codes = tl.minimum(tl.maximum(_rounded(quotients).to(tl.int32), -int(top)), int(top))
    if codec == "int4":
        low, high = tl.split(tl.reshape(codes & 15, [tile // 2, 2]))
        place = split + first // 2 + tl.arange(0, tile // 2)
        tl.store(out + place, (low | (high << 4)).to(tl.uint8), mask=place < size)
    else:
        tl.store(out + split + at, (codes & 255).to(tl.uint8), mask=at < n)


@triton.jit
def _decoded(
    message, first, n, split, size,
    codec: tl.constexpr, block: tl.constexpr, whole: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = tile // block
    first_scale = first * 0 if whole else first // block
    scales = _load_bytes(message, _SCALE_BYTES * first_scale, split, _SCALE_BYTES, blocks).to(tl.float32, bitcast=True)
    at = first + tl.arange(0, tile)
    if codec == "int4":
        place = split + first // 2 + tl.arange(0, tile // 2)
        pairs = tl.load(message + place, mask=place < size, other=0).to(tl.int32)
        nibbles = tl.reshape(tl.join(pairs & 15, pairs >> 4), [tile])
        codes = ((nibbles ^ 8) - 8).to(tl.float32)
    else:
        loaded = tl.load(message + split + at, mask=at < n, other=0)
        if codec == "int8":
            codes = loaded.to(tl.int8, bitcast=True).to(tl.float32)
        elif codec == "e4m3":
            codes = _float8_value(loaded.to(tl.uint32), 3)
        else:
            codes = _float8_value(loaded.to(tl.uint32), 2)
    return tl.reshape(tl.reshape(codes, [blocks, block]) * scales[:, None], [tile])


@triton.jit
def _rotated(x, at, n, tile: tl.constexpr):
    """Rotate with the reference's butterfly: the same sums in the same order."""
    turned = x
    for stage in tl.static_range(5):
        pairs = tl.reshape(turned, [tile // (2 << stage), 2, 1 << stage])
        first, second = tl.split(tl.permute(pairs, [0, 2, 1]))
        turned = tl.reshape(tl.permute(tl.join(first + second, first - second), [0, 2, 1]), [tile])
    return tl.where(at < n // 32 * 32, turned * 0.17677669529663687, x)


@triton.jit
def _uniform(at, seed):
    """Return the reference's numbers in [0, 1)."""
    mixed = at.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32, bitcast=True)
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    return ((mixed ^ (mixed >> 16)) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _magnitude(x):
    """Return the bits of |x|."""
    return x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _rounded(x):
    """Round to the nearest integer, half to even. At 1.5 * 2**23, a float's last bit is worth 1."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _floor(x):
    """Round down. `tl.floor` would flush denormals, but the floor of a negative one is -1."""
    nearest = _rounded(x)
    return tl.where(nearest > x, nearest - 1.0, nearest)


@triton.jit
def _without_last(bits, dropped: tl.constexpr):
    """Drop the last bits, rounding to the nearest, half to even."""
    return (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped


@triton.jit
def _bfloat16_code(x):
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(_magnitude(x) > 0x7F800000, 0x7FC0, _without_last(bits, 16))


@triton.jit
def _widened(x):
    """Convert to float32. bfloat16 is converted by its bits, as Triton's interpreter mishandles denormals and ties."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def _narrowed(x, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        narrow = _bfloat16_code(x).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(dtype)
    return narrow


@triton.jit
def _float8_code(x, mantissa: tl.constexpr, top: tl.constexpr):
    """Return the code: a sign bit, 7 - mantissa bits of exponent, and the mantissa. Values are clamped to `top`."""
    bias: tl.constexpr = (1 << (6 - mantissa)) - 1
    small: tl.constexpr = 2.0 ** (1 - bias)  # codes below it are as far apart as the codes just above it
    sum_of_small: tl.constexpr = small * 2.0 ** (23 - mantissa)  # where a float's last bit is worth that distance
    positive = tl.minimum(tl.abs(x), top)
    above = _without_last(_magnitude(positive), 23 - mantissa) - ((127 - bias) << mantissa)
    below = _magnitude(positive + sum_of_small) - _magnitude(tl.full(x.shape, sum_of_small, tl.float32))
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 128
    return tl.where(positive < small, below, above) | sign


@triton.jit
def _float8_value(code, mantissa: tl.constexpr):
    bias: tl.constexpr = (1 << (6 - mantissa)) - 1
    small: tl.constexpr = 2.0 ** (1 - bias - mantissa)
    size = code & 127
    above = ((size + ((127 - bias) << mantissa)) << (23 - mantissa)).to(tl.float32, bitcast=True)
    below = size.to(tl.int32).to(tl.float32) * small
    value = tl.where(size < (1 << mantissa), below, above)
    # No encoder writes these codes. e4m3 has one NaN and no Inf. e5m2 follows IEEE.
    if mantissa == 3:
        value = tl.where(size == 127, float("nan"), value)
    else:
        value = tl.where(size == 124, float("inf"), tl.where(size > 124, float("nan"), value))
    sign = (code & 128) << 24  # set as a bit, because Triton's minus may turn -0 into 0 - 0
    return (value.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _store_bytes(out, start, end, words, width: tl.constexpr, count: tl.constexpr):
    """Store words of `width` bytes, lowest byte first, from byte `start`, but nothing from byte `end` on."""
    shifts = (8 * tl.arange(0, width)).to(tl.uint32)[None, :]
    written = tl.reshape(((words[:, None] >> shifts) & 255).to(tl.uint8), [count * width])
    place = start + tl.arange(0, count * width)
    tl.store(out + place, written, mask=place < end)


@triton.jit
def _load_bytes(data, start, end, width: tl.constexpr, count: tl.constexpr):
    """Load words of `width` bytes, lowest byte first, from byte `start`. Bytes from `end` on are 0."""
    shifts = (8 * tl.arange(0, width)).to(tl.uint32)[None, :]
    place = start + tl.arange(0, count * width)
    loaded = tl.load(data + place, mask=place < end, other=0).to(tl.uint32)
    return tl.sum(tl.reshape(loaded, [count, width]) << shifts, axis=1)
