"""Codecs that a user registers: two functions that turn blocks of values into codes, and back.

This file pads the last block, rotates values, packs codes into bytes, and handles values that are not finite. As with
every codec, a block that holds a NaN or an Inf decodes to NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from towpath.codecs.kernels.reference import rotated
from towpath.core.formats import SCALE_BYTES, Codec, add_format
from towpath.errors import ConfigError

# Blocks [blocks, elements] in float32 → their scales [blocks], and a code for each element in uint8.
EncodeBlocks = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Scales [blocks] and codes [blocks, elements] → values [blocks, elements].
DecodeBlocks = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


_functions: dict[str, tuple[EncodeBlocks, DecodeBlocks]] = {}


def register(name: str, *, bits: int, encode: EncodeBlocks, decode: DecodeBlocks) -> None:
    """Register a codec, for use like "int8": `gradients="sign"` or `Transport("two-hop", "sign:64+hadamard")`.

    Register on every rank, before you make the strategy. The functions run on the device of the tensors that are sent.
    Registering a name again, with the same number of bits, replaces its functions.

    Args:
        name: The codec's name.
        bits: The number of bits of a code: 1, 2, 4 or 8.
        encode: A function that takes blocks of float32, [blocks, elements]. It returns a float32 scale for each block,
            [blocks], and a uint8 code below 2 to the power of `bits` for each element, [blocks, elements]. The last
            block of a message may be padded with zeros.
        decode: A function that takes the scales and the codes, and returns the values, [blocks, elements].

    Raises:
        ConfigError: The name or the number of bits is not allowed, or the name is registered with other bits.
    """
    add_format(name, bits)
    _functions[name] = encode, decode


def encode(codec: Codec, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
    """Encode as `reference.encode` does, with the registered function."""
    n = x.numel()
    values = rotated(x.float()) if codec.hadamard else x.float()
    size = codec.block or max(n, 1)
    blocks = torch.nn.functional.pad(values, (0, codec.scales(n) * size - n)).view(-1, size)
    finite = blocks.isfinite().all(1)
    scales, codes = _functions[codec.name][0](blocks.where(finite[:, None], 0.0))
    _check(codec, "scales", scales, torch.float32, (len(blocks),))
    _check(codec, "codes", codes, torch.uint8, tuple(blocks.shape))
    split = SCALE_BYTES * codec.scales(n)
    out[:split].copy_(scales.where(finite, torch.nan).contiguous().view(torch.uint8))
    out[split:].copy_(_packed(codes.flatten()[:n], codec.bits))


def decode(codec: Codec, data: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_decoded(codec, data, out.numel()))


def decode_sum(codec: Codec, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    out.copy_(_sum(codec, rows, out.numel()))


def decode_sum_encode(
    codec: Codec, rows: Sequence[torch.Tensor], elements: int, out: torch.Tensor, seed: int = 0
) -> None:
    encode(codec, _sum(codec, rows, elements), out, seed)


def _sum(codec: Codec, rows: Sequence[torch.Tensor], elements: int) -> torch.Tensor:
    total = _decoded(codec, rows[0], elements)
    for row in rows[1:]:
        total = total + _decoded(codec, row, elements)
    return total


def _decoded(codec: Codec, data: torch.Tensor, n: int) -> torch.Tensor:
    split = SCALE_BYTES * codec.scales(n)
    scales = data[:split].clone().view(torch.float32)  # copied, since views of other dtypes must be aligned
    size = codec.block or max(n, 1)
    shifts = torch.arange(0, 8, codec.bits, dtype=torch.uint8, device=data.device)
    unpacked = ((data[split:, None] >> shifts) & ((1 << codec.bits) - 1)).flatten()[:n]
    codes = torch.nn.functional.pad(unpacked, (0, codec.scales(n) * size - n))
    blocks = _functions[codec.name][1](scales, codes.view(-1, size))
    _check(codec, "values", blocks, torch.float32, (len(scales), size))
    values = blocks.where(scales.isfinite()[:, None], torch.nan).flatten()[:n]
    return rotated(values) if codec.hadamard else values


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of `bits` bits into bytes. The first code of a byte is in its lowest bits."""
    each = 8 // bits
    groups = torch.nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
    packed = groups[:, 0].clone()
    for place in range(1, each):
        packed |= groups[:, place] << (place * bits)
    return packed


def _check(codec: Codec, what: str, got: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if got.dtype != dtype or tuple(got.shape) != shape:
        raise ConfigError(
            f"codec {codec.name!r}: its functions gave {what} of {got.dtype} and shape {tuple(got.shape)}; expected "
            f"{dtype} and {shape}."
        )
