"""The codecs in Triton, for GPUs. They equal `plain` to the bit, and read and write memory once.

A program works on a tile of whole blocks of one piece, 2,048 elements in total. One launch handles all pieces: a
program finds its piece's place in `PieceTable.table`. Only codecs with one scale per message need a launch before that,
which finds the largest values. How the kernels keep the bits of the reference:

    division         `div_rn`: Triton's `/` of float32 is approximate on GPUs
    a * b + c        launched without fusion: a fused multiply-add rounds once where the reference rounds twice
    rounding         adds a number so large that the sum's last bit is a code's last bit, or works on a float's bits:
                     conversions differ between devices, sums do not
    denormals        no functions of libdevice, such as `tl.floor`, which flush denormals
    largest value    compares the bits of absolute values as integers: they order as the values do, then Inf, then NaN

Memory is read and written in words as wide as its alignment allows, which `PieceTable` knows. A single message may
start at any byte. If it does, its scales and bfloat16 codes are read and written byte by byte. Offsets are computed in
64 bits once for each program, and in 32 bits inside its tile.

Messages and outputs must be contiguous and on the current device.
"""

# Triton compiles these functions from their source, so Python types mean nothing to it. Triton is also not installed on
# every machine that checks the types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from towpath.codecs.kernels.pieces import PieceTable, units
from towpath.core.formats import CELL_ALIGNMENT, SCALE_BYTES, Codec

_TILE = 2048
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_CELL_ALIGNMENT = tl.constexpr(CELL_ALIGNMENT)
_COLUMNS = tl.constexpr(PieceTable.COLUMNS)


@dataclass(frozen=True, slots=True)
class _Variant:
    """The constants that a kernel is compiled with. By default, messages are aligned and no rows are summed."""

    codec: str
    mantissa: int  # the bits of a mantissa in a code, or 0 if codes are integers
    block: int
    whole: bool  # whether a message has one scale
    hadamard: bool
    stochastic: bool
    top: float  # the largest code
    tile: int  # the elements of a program
    unit: int  # what `units` returns
    code_unit: int
    many: bool = False  # whether rows are summed
    aligned: bool = True  # whether messages start at multiples of `CELL_ALIGNMENT`

    @staticmethod
    def of(codec: Codec, unit: int, code_unit: int, many: bool = False, aligned: bool = True) -> _Variant:
        tile, top = max(_TILE, codec.block), codec.largest or 0.0
        whole = codec.largest is not None and codec.block == 0
        mantissa = {"e4m3": 3, "e5m2": 2}.get(codec.name, 0)
        return _Variant(
            codec.name, mantissa, codec.block or tile, whole, codec.hadamard, codec.stochastic, top, tile,
            unit, code_unit, many, aligned,
        )  # fmt: skip

    @property
    def launch(self) -> dict[str, Any]:
        """Options of a launch. A thread has 8 elements: with more of them, registers are spilled.

        So they are where the assembler may choose fewer than 128 registers to run more threads at a time.
        """
        return {"num_warps": self.tile // 256, "maxnreg": 128, "enable_fp_fusion": False}

    def grid(self, longest: int, pieces: int = 1) -> tuple[int, int]:
        return -(-longest // self.tile), pieces


def encode(codec: Codec, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
    if n := x.numel():
        variant = _Variant.of(codec, *units(codec, [n], [n]), aligned=_is_aligned(out))
        largest = [torch.zeros(1, dtype=torch.int32, device=out.device), None] if variant.whole else None
        _encode(variant.grid(n), variant, (x.contiguous(), _contiguous(out), None, None, n), largest, seed)


def decode(codec: Codec, data: torch.Tensor, out: torch.Tensor) -> None:
    if n := out.numel():
        variant = _Variant.of(codec, *units(codec, [n], [n]), aligned=_is_aligned(data))
        _decode_kernel[variant.grid(n)](_contiguous(data), _contiguous(out), None, n, variant, **variant.launch)


def encode_pieces(
    pieces: PieceTable,
    values: torch.Tensor | None,
    wire: torch.Tensor,
    seed: int,
    kept: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> None:
    """Encode pieces of `values`, or for None the sums of the decoded rows, as `Kernels.encode_pieces` says."""
    grid, variant, largest = _launch(pieces)
    numbers = None if values is None else _contiguous(values)
    errors = None if kept is None else _contiguous(kept)
    _encode(grid, variant, (numbers, _checked(wire), errors, pieces.table, None), largest, seed)
    if largest is not None:
        largest.reverse()


def decode_pieces(pieces: PieceTable, wire: torch.Tensor, out: torch.Tensor) -> None:
    grid, variant, _ = _launch(pieces)
    _decode_kernel[grid](_checked(wire), _contiguous(out), pieces.table, None, variant, **variant.launch)


def _encode(
    grid: tuple[int, int],
    variant: _Variant,
    where: tuple[Any, ...],
    largest: list[torch.Tensor | None] | None,
    seed: int,
) -> None:
    if largest is not None:
        _largest_kernel[grid](*where, *largest, variant, **variant.launch)
    # The lower 32 bits as a signed number: Triton compiles a kernel for each integer type.
    signed_seed = (seed & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
    _encode_kernel[grid](*where, None if largest is None else largest[0], signed_seed, variant, **variant.launch)


def _launch(pieces: PieceTable) -> tuple[tuple[int, int], _Variant, list[torch.Tensor | None] | None]:
    """Return the grid and the variant for `pieces`, and the memory for the largest values.

    That memory is two buffers. The launch that fills one of them clears the other one for the next launch, because
    clearing would be a launch of its own.
    """
    found = pieces.launches.get(__name__)
    if found is None:
        count = len(pieces.pieces)
        variant = _Variant.of(pieces.codec, pieces.unit, pieces.code_unit, many=pieces.rows > 1)
        largest = torch.zeros(2, count, dtype=torch.int32, device=pieces.table.device)
        buffers: list[torch.Tensor | None] = [*largest]
        found = variant.grid(pieces.longest, count), variant, buffers if variant.whole else None
        pieces.launches[__name__] = found
    return found


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        raise ValueError(f"codecs read and write contiguous tensors; got strides {x.stride()} of shape {x.shape}.")
    return x


def _is_aligned(message: torch.Tensor) -> bool:
    return message.data_ptr() % CELL_ALIGNMENT == 0


def _checked(wire: torch.Tensor) -> torch.Tensor:
    if not _is_aligned(wire):
        raise ValueError(f"a wire buffer starts at a multiple of {CELL_ALIGNMENT} bytes; got {wire.data_ptr()}.")
    return _contiguous(wire)


@triton.jit(do_not_specialize=["n"])
def _largest_kernel(values, wire, kept, table, n, largest, cleared, variant: tl.constexpr):
    """Store the bits of the largest absolute value of each message that has one scale."""
    length, first, left = _place(table, n, variant)
    sums, _ = _summed(values, wire, kept, table, length, first, left, variant)
    if variant.hadamard:
        sums = _rotated(sums, left, variant.tile)
    piece = tl.program_id(1)
    tl.atomic_max(largest + piece, tl.max(_magnitude(sums).to(tl.int32), axis=0))
    if cleared is not None:
        tl.store(cleared + piece, 0, mask=first == 0)


@triton.jit(do_not_specialize=["n", "seed"])
def _encode_kernel(values, wire, kept, table, n, largest, seed, variant: tl.constexpr):
    """Encode numbers, or the sums of rows. With feedback, first add what was kept, and then keep what is lost."""
    length, first, left = _place(table, n, variant)
    sums, before = _summed(values, wire, kept, table, length, first, left, variant)
    message = wire
    each = seed.to(tl.uint32, bitcast=True)
    if table is not None:
        message += _field(table, 3, _CELL_ALIGNMENT)
        if variant.stochastic:
            each = each * _field(table, 5).to(tl.uint32) + _field(table, 6).to(tl.uint32)
    turned = _rotated(sums, left, variant.tile) if variant.hadamard else sums
    if variant.codec == "bf16":
        codes = _bfloat16_code(turned)
        _store_words(message + 2 * first, left, codes, 2, variant.tile, variant.aligned)
        decoded = (codes << 16).to(tl.float32, bitcast=True)
    else:
        decoded = _store_blocks(turned, largest, message, length, first, left, each, variant)
    if kept is not None:
        if variant.hadamard:
            decoded = _rotated(decoded, left, variant.tile)
        lost = sums - decoded
        # A block that overflowed has no useful rounding error, so the previous error is kept.
        lost = tl.where(_magnitude(lost) < 0x7F800000, lost, before)
        lanes = tl.arange(0, variant.tile)
        at = first + _field(table, 4, variant.unit)
        tl.store(kept + at + lanes, lost, mask=lanes < left)


@triton.jit(do_not_specialize=["n"])
def _decode_kernel(wire, out, table, n, variant: tl.constexpr):
    length, first, left = _place(table, n, variant)
    sums, _ = _summed(None, wire, None, table, length, first, left, variant)
    lanes = tl.arange(0, variant.tile)
    at = first
    if table is not None:
        at += _field(table, 1, variant.unit)
    tl.store(out + at + lanes, _narrowed(sums, out.dtype.element_ty), mask=lanes < left)


@triton.jit
def _field(table, column: tl.constexpr, unit: tl.constexpr = 1):
    """Return a number from this piece's line of the table. It is a multiple of `unit`."""
    return tl.multiple_of(tl.load(table + tl.program_id(1) * _COLUMNS + column), unit)


@triton.jit
def _place(table, n, variant: tl.constexpr):
    """Return the length of the piece, the first element of the tile, and how many the tile has.

    Without a table, `n` is the length.

    Triton before 3.7 cannot assign None to a variable, so no variable holds what may be missing.
    """
    first = tl.program_id(0).to(tl.int64) * variant.tile
    if table is not None:
        length = _field(table, 0)
    else:
        length = n.to(tl.int64)
    unit: tl.constexpr = variant.unit
    left = tl.minimum(tl.maximum(length - first, 0), variant.tile).to(tl.int32)
    return length, first, tl.multiple_of(left, unit)


@triton.jit
def _summed(values, wire, kept, table, length, first, left, variant: tl.constexpr):
    """Return a tile of the numbers, or of the sum of the decoded rows, with what was kept; and what was kept."""
    tile: tl.constexpr = variant.tile
    lanes = tl.arange(0, tile)
    if values is not None:
        at = first
        if table is not None:
            at += _field(table, 1, variant.unit)
        sums = _widened(tl.load(values + at + lanes, mask=lanes < left, other=0.0))
    else:
        message = wire
        if table is not None:
            message += _field(table, 2, _CELL_ALIGNMENT)
        if variant.many:
            sums = tl.zeros([tile], tl.float32)
            stride = _field(table, 8, _CELL_ALIGNMENT)
            for row in range(_field(table, 7).to(tl.int32)):
                decoded = _decoded(message + row * stride, length, first, left, variant)
                sums = tl.where(row == 0, decoded, sums + decoded)  # starting from 0 would turn -0 into 0
        else:
            sums = _decoded(message, length, first, left, variant)
    before = sums
    if kept is not None:
        at = first + _field(table, 4, variant.unit)
        before = tl.load(kept + at + lanes, mask=lanes < left, other=0.0)
        sums += before
    return sums, before


@triton.jit
def _codes_start(length, variant: tl.constexpr):
    """Return the byte of a message at which its codes start."""
    scales = 1 if variant.whole else (length + (variant.block - 1)) // variant.block
    code_unit: tl.constexpr = variant.code_unit
    return tl.multiple_of((length * 0 + scales) * _SCALE_BYTES, code_unit)


@triton.jit
def _store_blocks(values, largest, message, length, first, left, seed, variant: tl.constexpr):
    """Store the scales and codes of a tile. Return the values that they stand for."""
    tile: tl.constexpr = variant.tile
    block: tl.constexpr = variant.block
    blocks: tl.constexpr = tile // block
    in_blocks = tl.reshape(values, [blocks, block])
    if variant.whole:
        top_bits = tl.load(largest + tl.program_id(1) + tl.arange(0, 1))
        first_scale = first * 0
        written = tl.where(first == 0, 1, 0)  # one program writes it
    else:
        top_bits = tl.max(_magnitude(in_blocks).to(tl.int32), axis=1)
        first_scale = first // block
        written = (left + (block - 1)) // block
    finite = top_bits < 0x7F800000
    scales = tl.div_rn(top_bits.to(tl.float32, bitcast=True), tl.full([blocks], variant.top, tl.float32))
    scales = tl.where(finite, tl.maximum(scales, 1.1754943508222875e-38), 1.0)
    scale_bits = tl.where(finite, scales.to(tl.uint32, bitcast=True), 0x7FC00000)
    _store_words(message + _SCALE_BYTES * first_scale, written, scale_bits, _SCALE_BYTES, blocks, variant.aligned)

    divisors = tl.broadcast_to(scales[:, None], [blocks, block])
    quotients = tl.div_rn(tl.where(finite[:, None], in_blocks, 0.0), divisors)
    quotients = tl.reshape(quotients, [tile])
    if variant.mantissa:
        codes = _float8_code(quotients, variant.mantissa, variant.top)
        found = _float8_value(codes, variant.mantissa)
    else:
        if variant.stochastic:
            at = first.to(tl.uint32) + tl.arange(0, tile).to(tl.uint32)
            quotients = _floor(quotients + _uniform(at, seed))
        codes = tl.minimum(tl.maximum(_rounded(quotients).to(tl.int32), -int(variant.top)), int(variant.top))
        found = codes.to(tl.float32)
    message += _codes_start(length, variant)
    if variant.codec == "int4":
        low, high = tl.split(tl.reshape(codes & 15, [tile // 2, 2]))
        lanes = tl.arange(0, tile // 2)
        tl.store(message + first // 2 + lanes, (low | (high << 4)).to(tl.uint8), mask=lanes < _pairs(left, variant))
    else:
        lanes = tl.arange(0, tile)
        tl.store(message + first + lanes, (codes & 255).to(tl.uint8), mask=lanes < left)
    return _scaled(found, scale_bits, blocks, block)


@triton.jit
def _decoded(message, length, first, left, variant: tl.constexpr):
    """Return a tile of the values of a message."""
    tile: tl.constexpr = variant.tile
    if variant.codec == "bf16":
        values = (_load_words(message + 2 * first, left, 2, tile, variant.aligned) << 16).to(tl.float32, bitcast=True)
    else:
        block: tl.constexpr = variant.block
        blocks: tl.constexpr = tile // block
        if variant.whole:
            scales = _load_words(message, 1, _SCALE_BYTES, blocks, variant.aligned)
        else:
            at = message + _SCALE_BYTES * (first // block)
            count = (left + (block - 1)) // block
            scales = _load_words(at, count, _SCALE_BYTES, blocks, variant.aligned)
        codes = message + _codes_start(length, variant)
        if variant.codec == "int4":
            lanes = tl.arange(0, tile // 2)
            pairs = tl.load(codes + first // 2 + lanes, mask=lanes < _pairs(left, variant), other=0).to(tl.int32)
            nibbles = tl.reshape(tl.join(pairs & 15, pairs >> 4), [tile])
            found = ((nibbles ^ 8) - 8).to(tl.float32)
        else:
            lanes = tl.arange(0, tile)
            loaded = tl.load(codes + first + lanes, mask=lanes < left, other=0)
            if variant.mantissa:
                found = _float8_value(loaded.to(tl.uint32), variant.mantissa)
            else:
                found = loaded.to(tl.int8, bitcast=True).to(tl.float32)
        values = _scaled(found, scales, blocks, block)
    return _rotated(values, left, tile) if variant.hadamard else values


@triton.jit
def _scaled(codes, scale_bits, blocks: tl.constexpr, block: tl.constexpr):
    scales = scale_bits.to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.reshape(tl.reshape(codes, [blocks, block]) * scales[:, None], [blocks * block])


@triton.jit
def _pairs(left, variant: tl.constexpr):
    """Return the number of bytes that hold `left` codes of 4 bits."""
    unit: tl.constexpr = max(variant.unit // 2, 1)
    return tl.multiple_of((left + 1) // 2, unit)


@triton.jit
def _rotated(x, left, tile: tl.constexpr):
    """Rotate with the reference's butterfly: the same sums in the same order."""
    turned = x
    for stage in tl.static_range(5):
        pairs = tl.reshape(turned, [tile // (2 << stage), 2, 1 << stage])
        first, second = tl.split(tl.permute(pairs, [0, 2, 1]))
        turned = tl.reshape(tl.permute(tl.join(first + second, first - second), [0, 2, 1]), [tile])
    return tl.where(tl.arange(0, tile) < left // 32 * 32, turned * 0.17677669529663687, x)


@triton.jit
def _uniform(at, seed):
    """Return the reference's numbers in [0, 1)."""
    mixed = at * 0x9E3779B1 + seed
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
def _store_words(out, count, words, width: tl.constexpr, size: tl.constexpr, aligned: tl.constexpr):
    """Store the first `count` of the words, which have `width` bytes, lowest byte first."""
    if aligned:
        word: tl.constexpr = tl.uint16 if width == 2 else tl.uint32
        lanes = tl.arange(0, size)
        tl.store(out.to(tl.pointer_type(word)) + lanes, words.to(word), mask=lanes < count)
    else:
        shifts = (8 * tl.arange(0, width)).to(tl.uint32)[None, :]
        written = tl.reshape(((words[:, None] >> shifts) & 255).to(tl.uint8), [size * width])
        lanes = tl.arange(0, size * width)
        tl.store(out + lanes, written, mask=lanes < count * width)


@triton.jit
def _load_words(data, count, width: tl.constexpr, size: tl.constexpr, aligned: tl.constexpr):
    """Load `count` words of `width` bytes, lowest byte first, and zeros after them."""
    if aligned:
        word: tl.constexpr = tl.uint16 if width == 2 else tl.uint32
        lanes = tl.arange(0, size)
        words = tl.load(data.to(tl.pointer_type(word)) + lanes, mask=lanes < count, other=0).to(tl.uint32)
    else:
        shifts = (8 * tl.arange(0, width)).to(tl.uint32)[None, :]
        lanes = tl.arange(0, size * width)
        loaded = tl.load(data + lanes, mask=lanes < count * width, other=0).to(tl.uint32)
        words = tl.sum(tl.reshape(loaded, [size, width]) << shifts, axis=1)
    return words
