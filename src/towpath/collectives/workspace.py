"""What a transfer that runs has to itself: memory to send from and to receive in, and the tag of its messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch

from towpath.codecs.watched import Watch


@final
class WireBuffers:
    """One per dtype, as large as was ever needed. `own`: what a new one is passed to, if somebody has to know."""

    def __init__(self, device: torch.device, own: Callable[[torch.Tensor], None] | None = None) -> None:
        self._device, self._own = device, own
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self.made = 0

    @torch.inference_mode(False)  # what is made in inference mode could never be trained with
    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same memory at every call for a dtype."""
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[dtype] = torch.empty(numel, dtype=dtype, device=self._device)
            self.made += 1
            if self._own is not None:
                self._own(buffer)
        return buffer[:numel]

    def reserve(self, needs: Mapping[str, int]) -> None:
        """Make room for so many elements by dtype now, so that `take` finds it."""
        for dtype, numel in needs.items():
            if numel:
                self.take(numel, getattr(torch, dtype))

    def clear(self) -> None:
        self._buffers.clear()

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self._buffers.values())


@dataclass(slots=True)
class Workspace:
    """Of one transfer, from its submission to its end.

    Transfers of one queue that are under way together are on different *ways*: of wire buffers, and of tags.
    """

    buffers: WireBuffers
    way: int = 0
    ways: int = 1
    micro_step: int = 0
    watch: Watch | None = None  # told of the work of codecs
    # To be called when the transfer needs the links no more: the one behind it may then begin.
    links_free: Callable[[], None] = lambda: None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.buffers.take(numel, dtype)

    def tag(self, tag: int) -> int:
        """Of messages of this way."""
        return tag * self.ways + self.way
