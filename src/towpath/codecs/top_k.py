"""The top-k codec in torch: one message, with its error feedback (`core/top_k.py` has the layout).

It runs on any device. An exchange between islands happens once in many steps, so the codec needs no kernels of its own.
"""

from __future__ import annotations

from typing import final

import torch

from towpath.core.top_k import CHUNK, TopK


@final
class TopKEncoder:
    """The encoder of one sender. `error` is what its messages have not sent so far."""

    def __init__(self, codec: TopK, elements: int, device: torch.device) -> None:
        self.codec = codec
        self._chunks = torch.zeros(-(-elements // CHUNK), CHUNK, device=device)  # with zeros at the end
        self.error = self._chunks.view(-1)[:elements]

    def encode(self, values: torch.Tensor, message: torch.Tensor) -> None:
        """Write the message of `values` and of the error so far. What it leaves out is the error from now on."""
        self.error.mul_(self.codec.decay).add_(values)
        chunks = self._chunks
        positions = chunks.abs().topk(self.codec.keep, dim=1, sorted=False).indices
        largest = chunks.gather(1, positions)
        size = largest.abs()
        # The two magnitudes are the means of what is above the middle, and of the rest.
        middle = (size.amin(1, keepdim=True) + size.amax(1, keepdim=True)) / 2
        is_large = size > middle
        magnitudes = torch.stack([_mean(size, ~is_large), _mean(size, is_large)], 1)
        codes = (largest < 0).to(torch.uint8) + 2 * is_large.to(torch.uint8)
        parts = (_packed_positions(positions), _packed_codes(codes), magnitudes.to(torch.float16).view(torch.uint8))
        torch.cat(parts, 1, out=message.view(len(chunks), -1))
        decode_add(self.codec, message, self.error, sign=-1)
        # A value that is not finite must not reach later messages. It arrives in this one as it can.
        extremes = torch.stack(torch.aminmax(values))  # NaN if one is NaN, and much faster than `isfinite` of all
        self.error.masked_fill_(~extremes.isfinite().all(), 0.0)


def decode_add(codec: TopK, message: torch.Tensor, out: torch.Tensor, sign: int = 1) -> None:
    """Add the elements of a message to `out`, or subtract them with `sign=-1`."""
    chunks = message.view(-1, codec.chunk_bytes)
    positions, codes, magnitudes = chunks.split([codec.position_bytes, codec.value_bytes, 4], 1)
    where = _unpacked_positions(positions)
    code = _unpacked_codes(codes)
    sizes = magnitudes.clone(memory_format=torch.contiguous_format).view(torch.float16).to(out.dtype)
    values = sizes.gather(1, (code >> 1).long()) * (1 - 2 * (code & 1).to(out.dtype))
    first = torch.arange(len(chunks), device=out.device)[:, None] * CHUNK
    where = (where + first).view(-1)
    # Positions in the padding of the last chunk have the value zero.
    inside = where < out.numel()
    out.index_add_(0, torch.where(inside, where, 0), torch.where(inside, values.view(-1), 0.0), alpha=sign)


def _mean(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the mean of the chosen values in each row, or 0 if there are none."""
    return torch.where(chosen, values, 0.0).sum(1) / chosen.sum(1).clamp(min=1)


def _packed_positions(positions: torch.Tensor) -> torch.Tensor:
    first, second = positions.to(torch.int32).view(len(positions), -1, 2).unbind(2)
    octets = torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], 2)
    return octets.to(torch.uint8).view(len(positions), -1)


def _unpacked_positions(octets: torch.Tensor) -> torch.Tensor:
    low, middle, high = octets.long().reshape(len(octets), -1, 3).unbind(2)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], 2).view(len(octets), -1)


def _packed_codes(codes: torch.Tensor) -> torch.Tensor:
    a, b, c, d = codes.view(len(codes), -1, 4).unbind(2)
    return a | b << 2 | c << 4 | d << 6


def _unpacked_codes(octets: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=octets.device)
    return (octets[:, :, None] >> shifts & 3).reshape(len(octets), -1)
