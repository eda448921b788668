"""The codecs in plain torch, slow and readable, and those that users register. Other back ends equal them to the bit.

Everything is computed in float32, with IEEE division and without fused multiply-add. Rows are summed in their order.
A block that holds a NaN or an Inf has the scale NaN and codes of zero, so all of it decodes to NaN. Scales are at least
the smallest normal number. A denormal scale could flush to zero, and the codes would be infinite.

Codecs that a user registers have no other back end. Their two functions turn blocks of values into codes, and back.
This file packs the codes into bytes, and handles values that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from towpath.core.formats import ROTATED, SCALE_BYTES, Codec, add_format
from towpath.errors import ConfigError

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

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
    """Encode `x` into the message `out`.

    Args:
        x: n elements of float32, bfloat16 or float16.
        out: `codec.encoded_bytes(n)` bytes (uint8).
        seed: The seed of stochastic rounding. The same seed gives the same bytes.
    """
    n, largest = x.numel(), codec.largest
    if codec.name == "bf16":
        out.copy_(torch.empty(n, dtype=torch.bfloat16, device=x.device).copy_(x).view(torch.uint8))
        return
    values = rotated(x.float()) if codec.hadamard else x.float()
    blocks, split = _in_blocks(codec, values), SCALE_BYTES * codec.scales(n)
    if largest is None:
        scales, codes = _encode_blocks(codec, blocks)
        out[:split].copy_(scales.view(torch.uint8))
        out[split:].copy_(_packed(codes.flatten()[:n], codec.bits))
        return
    # The divisor is a tensor. On a GPU, torch would multiply by the inverse of a Python number, which may change the
    # last bit.
    top = torch.full((), largest, device=x.device)
    scales = (blocks.abs().amax(1) / top).clamp_min(_SMALLEST_NORMAL)
    finite = scales.isfinite()
    scales = scales.where(finite, torch.nan)
    quotients = (blocks / scales[:, None]).where(finite[:, None], 0.0).flatten()[:n]
    out[:split].copy_(scales.view(torch.uint8))
    out[split:].copy_(_codes(codec, largest, quotients, seed))


def decode(codec: Codec, data: torch.Tensor, out: torch.Tensor) -> None:
    """Decode the message `data` into `out`, which has the number of elements and the dtype."""
    decode_sum(codec, (data,), out)


def decode_sum(codec: Codec, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Decode the messages `rows` and sum them into `out`, in float32 and in their order."""
    out.copy_(_sum(codec, rows, out.numel()))


def decode_sum_encode(
    codec: Codec, rows: Sequence[torch.Tensor], elements: int, out: torch.Tensor, seed: int = 0
) -> None:
    """Decode and sum the messages `rows`, and encode the sum into `out`."""
    encode(codec, _sum(codec, rows, elements), out, seed)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Multiply each 32 elements by the orthonormal Hadamard matrix, its own inverse. A shorter rest is unchanged."""
    whole = x.numel() // ROTATED * ROTATED
    turned = x[:whole].view(-1, ROTATED)
    half = 1
    while half < ROTATED:
        pairs = turned.view(-1, ROTATED // (2 * half), 2, half)
        turned = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half *= 2
    return torch.cat([turned.reshape(-1) * ROTATED**-0.5, x[whole:]])


def uniform(count: int, seed: int, device: torch.device | None = None) -> torch.Tensor:
    """Return numbers in [0, 1): the upper 24 bits of a 32-bit mix of each index and the seed."""
    mixed = torch.arange(count, dtype=torch.int64, device=device)
    mixed = (mixed * 0x9E3779B1 + seed) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 16)) >> 8).float() * 2.0**-24


def _sum(codec: Codec, rows: Sequence[torch.Tensor], elements: int) -> torch.Tensor:
    total = _decoded(codec, rows[0], elements)
    for row in rows[1:]:
        total = total + _decoded(codec, row, elements)
    return total


def _decoded(codec: Codec, data: torch.Tensor, n: int) -> torch.Tensor:
    if codec.name == "bf16":
        return data.clone().view(torch.bfloat16).float()  # a copy: views of other dtypes must be aligned
    split = SCALE_BYTES * codec.scales(n)
    scales = data[:split].clone().view(torch.float32)
    if codec.largest is None:
        codes = _in_blocks(codec, _unpacked(data[split:], codec.bits, n))
        blocks = _decode_blocks(codec, scales, codes)
    else:
        blocks = _in_blocks(codec, _values(codec, data[split:], n)) * scales[:, None]
    values = blocks.flatten()[:n]
    return rotated(values) if codec.hadamard else values


def _in_blocks(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """Return one block per row. The last one is padded with zeros."""
    n = x.numel()
    size = codec.block or max(n, 1)
    return torch.nn.functional.pad(x, (0, codec.scales(n) * size - n)).view(-1, size)


def _codes(codec: Codec, largest: float, quotients: torch.Tensor, seed: int) -> torch.Tensor:
    if codec.name in _FLOAT8:
        return quotients.clamp(-largest, largest).to(_FLOAT8[codec.name]).view(torch.uint8)
    if codec.stochastic:
        quotients = (quotients + uniform(quotients.numel(), seed, quotients.device)).floor()
    codes = quotients.round().clamp(-largest, largest).to(torch.int8).view(torch.uint8)
    if codec.name == "int8":
        return codes
    return _packed(codes & 15, 4)


def _values(codec: Codec, codes: torch.Tensor, n: int) -> torch.Tensor:
    if codec.name in _FLOAT8:
        return codes.view(_FLOAT8[codec.name]).float()
    if codec.name == "int8":
        return codes.view(torch.int8).float()
    return ((_unpacked(codes, 4, n) ^ 8).to(torch.int16) - 8).float()


def _encode_blocks(codec: Codec, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale of each block, and the code of each element, by the registered function."""
    finite = blocks.isfinite().all(1)
    scales, codes = _functions[codec.name][0](blocks.where(finite[:, None], 0.0))
    _check_result(codec, "scales", scales, torch.float32, (len(blocks),))
    _check_result(codec, "codes", codes, torch.uint8, tuple(blocks.shape))
    return scales.where(finite, torch.nan).contiguous(), codes


def _decode_blocks(codec: Codec, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks of codes, by the registered function."""
    blocks = _functions[codec.name][1](scales, codes)
    _check_result(codec, "values", blocks, torch.float32, tuple(codes.shape))
    return blocks.where(scales.isfinite()[:, None], torch.nan)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of `bits` bits into bytes. The first code of a byte is in its lowest bits."""
    each = 8 // bits
    groups = torch.nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
    joined = groups[:, 0].clone()
    for place in range(1, each):
        joined |= groups[:, place] << (place * bits)
    return joined


def _unpacked(data: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """Return the `n` codes that `_packed` has _packed."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    return ((data[:, None] >> shifts) & ((1 << bits) - 1)).flatten()[:n]


def _check_result(codec: Codec, what: str, got: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if got.dtype != dtype or tuple(got.shape) != shape:
        raise ConfigError(
            f"codec {codec.name!r}: its functions gave {what} of {got.dtype} and shape {tuple(got.shape)}; expected "
            f"{dtype} and {shape}."
        )
