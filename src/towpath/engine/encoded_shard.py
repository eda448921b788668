"""A shard of parameters that rests encoded: its scales, then its codes, as one message of the codec.

Blocks span neither parameters nor shards (`BucketSpec.in_blocks`), so each parameter's part can be read and written by
itself. What is written is compared first, block by block: one that decodes to what is written stays as it is, since
encoding it again might round it once more.
"""

from __future__ import annotations

from typing import Any

import torch

from towpath.codecs.kernels.dispatch import kernels_for
from towpath.core.formats import SCALE_BYTES, Codec


class EncodedShard:
    """Of `elements` elements, whole blocks, which users see in `dtype`."""

    def __init__(self, codec: Codec, values: torch.Tensor) -> None:
        """`values`: rounded here, and never again unless they are written."""
        assert values.numel() % codec.block == 0
        self.codec, self.dtype, self.device = codec, values.dtype, values.device
        self.elements = values.numel()
        self._kernels = kernels_for(values.device)
        self.message = self._encoded(values)
        split = SCALE_BYTES * codec.scales(self.elements)
        self._scales = self.message[:split].view(-1, SCALE_BYTES)  # [blocks, bytes]
        self._codes = self.message[split:].view(len(self._scales), -1)  # [blocks, bytes]

    def part(self, start: int, end: int) -> EncodedSlice:
        return EncodedSlice(self, start, end)

    def decode(self, out: torch.Tensor) -> None:
        """All of it, in the dtype of `out`."""
        self._kernels.decode(self.codec, self.message, out)

    def read(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements [start, end), which begin with a block."""
        out = torch.empty(-(-(end - start) // self.codec.block) * self.codec.block, dtype=dtype, device=self.device)
        if end > start:
            blocks = self._blocks(start, end)
            message = torch.cat([self._scales[blocks].flatten(), self._codes[blocks].flatten()])
            self._kernels.decode(self.codec, message, out)
        return out[: end - start]

    def write(self, start: int, values: torch.Tensor) -> None:
        """The elements from `start` on, which begin with a block. Zeros follow up to the end of the last one."""
        end, size = start + values.numel(), self.codec.block
        if end == start:
            return
        padded = torch.nn.functional.pad(values.detach(), (0, -values.numel() % size))
        blocks = self._blocks(start, end)
        before = self.read(start, start + padded.numel(), values.dtype)
        changed = (padded != before).view(-1, size).any(1, keepdim=True)
        message = self._encoded(padded)
        split = SCALE_BYTES * self.codec.scales(padded.numel())
        for held, now in ((self._scales[blocks], message[:split]), (self._codes[blocks], message[split:])):
            held.copy_(torch.where(changed, now.view(held.shape), held))

    def _blocks(self, start: int, end: int) -> slice:
        assert start % self.codec.block == 0, (start, self.codec)
        return slice(start // self.codec.block, -(-end // self.codec.block))

    def _encoded(self, values: torch.Tensor) -> torch.Tensor:
        nbytes = self.codec.encoded_bytes(values.numel())
        message = torch.empty(nbytes, dtype=torch.uint8, device=values.device)
        self._kernels.encode(self.codec, values.contiguous(), message)
        return message


class EncodedSlice:
    """Of one parameter: what its ShardTensor holds in place of a tensor."""

    __slots__ = ("_end", "_shard", "_start")

    def __init__(self, shard: EncodedShard, start: int, end: int) -> None:
        self._shard, self._start, self._end = shard, start, end

    @property
    def codec(self) -> Codec:
        return self._shard.codec

    @property
    def dtype(self) -> torch.dtype:
        return self._shard.dtype

    @property
    def device(self) -> torch.device:
        return self._shard.device

    def read(self) -> torch.Tensor:
        """Decoded anew at each call: a copy, in which a write would be lost."""
        return self._shard.read(self._start, self._end, self.dtype)

    def write(self, values: torch.Tensor) -> None:
        self._shard.write(self._start, values.to(self.dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return the decoded elements on the host, which is what PyTorch's stagers of checkpoints ask for."""
        return self.read().cpu()
