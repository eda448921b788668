"""The codecs in plain torch, slow and readable. All other back ends equal this reference to the bit.

Codecs that a user registers have no other back end.

Everything is computed in float32, with IEEE division and without fused multiply-add. Rows are summed in their order.
A block that holds a NaN or an Inf has the scale NaN and codes of zero, so all of it decodes to NaN. Scales are at least
the smallest normal number. A denormal scale could flush to zero, and the codes would be infinite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from towpath.codecs.kernels import registered
from towpath.core.formats import ROTATED, SCALE_BYTES, Codec

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


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
        scales, codes = registered.encode_blocks(codec, blocks)
        out[:split].copy_(scales.view(torch.uint8))
        out[split:].copy_(registered.packed(codes.flatten()[:n], codec.bits))
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
    out.copy_(_decoded(codec, data, out.numel()))


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
        codes = _in_blocks(codec, registered.unpacked(data[split:], codec.bits, n))
        blocks = registered.decode_blocks(codec, scales, codes)
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
    low, high = torch.nn.functional.pad(codes & 15, (0, codes.numel() % 2)).view(-1, 2).unbind(1)
    return low | (high << 4)


def _values(codec: Codec, codes: torch.Tensor, n: int) -> torch.Tensor:
    if codec.name in _FLOAT8:
        return codes.view(_FLOAT8[codec.name]).float()
    if codec.name == "int8":
        return codes.view(torch.int8).float()
    nibbles = torch.stack([codes & 15, codes >> 4], 1).flatten()[:n]
    return ((nibbles ^ 8).to(torch.int16) - 8).float()
