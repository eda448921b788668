"""Codecs that a user registers: two functions of their own between the blocks of a message and its bytes.

Padding the last block, rotation, packing codes into bytes, and values that are not finite are seen to here. As with
every codec, a block that holds a NaN or an Inf decodes to NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from towpath.codecs.kernels.reference import rotated
from towpath.core.formats import SCALE_BYTES, Codec, add_format
from towpath.errors import StrategyError

# Blocks [blocks, elements] in float32 → their scales [blocks], and a code for each element in uint8.
EncodeBlocks = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Scales [blocks] and codes [blocks, elements] → values [blocks, elements].
DecodeBlocks = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Functions:
    encode: EncodeBlocks
    decode: DecodeBlocks


_functions: dict[str, _Functions] = {}


def register(name: str, *, bits: int, encode: EncodeBlocks, decode: DecodeBlocks) -> None:
    """Make `name` a codec, as "int8" is one: `gradients="sign"`, `Transport("two-hop", "sign:64+hadamard")`.

    `encode` is given blocks of float32, [blocks, elements], and returns a float32 scale for each block, [blocks], and
    a uint8 code for each element, [blocks, elements], below 2 to the power of `bits` (1, 2, 4 or 8). `decode` makes
    values of both. They run on the device of what is sent. The last block of a message may be filled up with zeros.

    Register on every rank, before the strategy is made. Who registers a name again, with as many bits, replaces its
    functions.
    """
    add_format(name, bits)
    _functions[name] = _Functions(encode, decode)


def encode(codec: Codec, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
    """As `reference.encode`."""
    n = x.numel()
    values = rotated(x.float()) if codec.hadamard else x.float()
    size = codec.block or max(n, 1)
    blocks = torch.nn.functional.pad(values, (0, codec.scales(n) * size - n)).view(-1, size)
    finite = blocks.isfinite().all(1)
    scales, codes = _functions[codec.name].encode(blocks.where(finite[:, None], 0.0))
    _check(codec, "scales", scales, torch.float32, (len(blocks),))
    _check(codec, "codes", codes, torch.uint8, tuple(blocks.shape))
    split = SCALE_BYTES * codec.scales(n)
    out[:split].copy_(scales.where(finite, torch.nan).contiguous().view(torch.uint8))
    out[split:].copy_(_packed(codes.flatten()[:n], codec.bits))


def decode(codec: Codec, data: torch.Tensor, out: torch.Tensor) -> None:
    """As `reference.decode`."""
    out.copy_(_decoded(codec, data, out.numel()))


def decode_sum(codec: Codec, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """As `reference.decode_sum`."""
    out.copy_(_sum(codec, rows, out.numel()))


def decode_sum_encode(
    codec: Codec, rows: Sequence[torch.Tensor], elements: int, out: torch.Tensor, seed: int = 0
) -> None:
    """As `reference.decode_sum_encode`."""
    encode(codec, _sum(codec, rows, elements), out, seed)


def _sum(codec: Codec, rows: Sequence[torch.Tensor], elements: int) -> torch.Tensor:
    total = _decoded(codec, rows[0], elements)
    for row in rows[1:]:
        total = total + _decoded(codec, row, elements)
    return total


def _decoded(codec: Codec, data: torch.Tensor, n: int) -> torch.Tensor:
    split = SCALE_BYTES * codec.scales(n)
    scales = data[:split].clone().view(torch.float32)  # a copy: views of other dtypes must be aligned
    size = codec.block or max(n, 1)
    codes = torch.nn.functional.pad(_unpacked(data[split:], codec.bits, n), (0, codec.scales(n) * size - n))
    blocks = _functions[codec.name].decode(scales, codes.view(-1, size))
    _check(codec, "values", blocks, torch.float32, (len(scales), size))
    values = blocks.where(scales.isfinite()[:, None], torch.nan).flatten()[:n]
    return rotated(values) if codec.hadamard else values


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of `bits` bits, the first of a byte in its lowest ones."""
    each = 8 // bits
    groups = torch.nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
    packed = groups[:, 0].clone()
    for place in range(1, each):
        packed |= groups[:, place] << (place * bits)
    return packed


def _unpacked(packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & ((1 << bits) - 1)).flatten()[:n]


def _check(codec: Codec, what: str, got: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if got.dtype != dtype or tuple(got.shape) != shape:
        raise StrategyError(
            f"codec {codec.name!r}: its functions gave {what} of {got.dtype} and shape {tuple(got.shape)}; expected "
            f"{dtype} and {shape}."
        )
