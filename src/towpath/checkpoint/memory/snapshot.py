"""What a save in the background writes: the values of the moment in which it was asked for, while training goes on.

Parameters and optimizer states change in one place alone, the optimizer's step: they are copied while the next forward
and backward pass compute, and that step waits, if they are not through. Everything else is copied at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from towpath.checkpoint.dcp.planning import Pieces
from towpath.errors import CheckpointError

_ALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Copy:
    place: torch.Tensor
    source: torch.Tensor


class Pool:
    """Memory on the host that saves are copied to, the same one each time; pinned, where there is a device."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.made = 0

    def snapshot(self, found: Mapping[str, Any], version: Callable[[], int]) -> tuple[dict[str, Any], Snapshot]:
        """`found` in this memory, of which `take()` copies what need not be copied at once.

        `version`: rises whenever a parameter is written.
        """
        boxes = [box for pieces in found.values() if isinstance(pieces, Pieces) for box in pieces.boxes.values()]
        device = next((box.device for box in boxes if box.device.type == "cuda"), None)
        needed = sum(_aligned(box.nbytes) for box in boxes)
        if needed > self._memory.numel():
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=device is not None)
            self.made += 1
        at, out = 0, dict[str, Any]()
        late: list[_Copy] = []
        for name, pieces in found.items():
            if not isinstance(pieces, Pieces):
                out[name] = pieces
                continue
            places: dict[tuple[int, ...], torch.Tensor] = {}
            for offsets, box in pieces.boxes.items():
                places[offsets] = self._memory[at : at + box.nbytes].view(box.dtype).view(box.shape)
                at += _aligned(box.nbytes)
                if pieces.steady:
                    late.append(_Copy(places[offsets], box))
                else:
                    places[offsets].copy_(box, non_blocking=True)
            out[name] = Pieces(pieces.dtype, pieces.shape, places)
        return out, Snapshot(late, version, None if device is None else self._stream(device))

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class Snapshot:
    """Made and `before_step()` on the thread that trains; `take()` on another."""

    def __init__(self, late: list[_Copy], version: Callable[[], int], stream: torch.cuda.Stream | None) -> None:
        self._late, self._version, self._stream = late, version, stream
        self._began_at = version()
        self._taken = threading.Event()
        self._copied: torch.cuda.Event | None = None
        self._begun: torch.cuda.Event | None = None
        if stream is not None:
            self._begun, self._copied = torch.cuda.Event(), torch.cuda.Event()
            self._begun.record(torch.cuda.current_stream(stream.device))
        self.held_seconds = 0.0

    def take(self) -> None:
        try:
            if self._stream is None:
                self._copy()
            else:
                assert self._begun is not None and self._copied is not None
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(self._begun)
                    self._copy()
                    self._copied.record(self._stream)
            disturbed = self._version() != self._began_at  # read before the next step may write
        finally:
            self._late = []
            self._taken.set()
        if self._copied is not None:
            self._copied.synchronize()
        if disturbed:
            raise CheckpointError(
                "a parameter was written other than by the optimizer's step while it was copied. Call Saver.settle() "
                "before you write to parameters."
            )

    def _copy(self) -> None:
        for copy in self._late:
            copy.place.copy_(copy.source, non_blocking=True)

    def before_step(self) -> None:
        """What is about to be written must have been copied: on a device, its stream waits, not this thread."""
        if not self._taken.is_set():
            began = time.perf_counter()
            self._taken.wait()
            self.held_seconds += time.perf_counter() - began
        if self._copied is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)


def _aligned(count_bytes: int) -> int:
    return -(-count_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
