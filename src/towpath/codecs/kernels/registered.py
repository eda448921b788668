"""Codecs that a user registers: two functions that turn blocks of values into codes, and back.

This file packs codes into bytes, and handles values that are not finite. `plain.py` does the rest. As with every
codec, a block that holds a NaN or an Inf decodes to NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from towpath.core.formats import Codec, add_format
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


def encode_blocks(codec: Codec, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale of each block, and the code of each element, by the registered function."""
    finite = blocks.isfinite().all(1)
    scales, codes = _functions[codec.name][0](blocks.where(finite[:, None], 0.0))
    _check(codec, "scales", scales, torch.float32, (len(blocks),))
    _check(codec, "codes", codes, torch.uint8, tuple(blocks.shape))
    return scales.where(finite, torch.nan).contiguous(), codes


def decode_blocks(codec: Codec, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks of codes, by the registered function."""
    blocks = _functions[codec.name][1](scales, codes)
    _check(codec, "values", blocks, torch.float32, tuple(codes.shape))
    return blocks.where(scales.isfinite()[:, None], torch.nan)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of `bits` bits into bytes. The first code of a byte is in its lowest bits."""
    each = 8 // bits
    groups = torch.nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
    joined = groups[:, 0].clone()
    for place in range(1, each):
        joined |= groups[:, place] << (place * bits)
    return joined


def unpacked(data: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """Return the `n` codes that `packed` has packed."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    return ((data[:, None] >> shifts) & ((1 << bits) - 1)).flatten()[:n]


def _check(codec: Codec, what: str, got: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if got.dtype != dtype or tuple(got.shape) != shape:
        raise ConfigError(
            f"codec {codec.name!r}: its functions gave {what} of {got.dtype} and shape {tuple(got.shape)}; expected "
            f"{dtype} and {shape}."
        )
