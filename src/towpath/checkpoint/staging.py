"""Copies of what is being saved, in memory of their own: a snapshot that a thread completes during the next step.

Parameters and optimizer states change only in the optimizer's step. So they are copied during the next forward and
backward pass, and the optimizer's step waits until the copy is complete. Everything else is copied at once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from towpath.checkpoint.storage import TensorChunks
from towpath.engine.executor import Engine
from towpath.errors import CheckpointError

_ALIGNED_BYTES = 64


class StagingMemory:
    """Memory on the host that saves are copied into, and that later saves reuse. It is pinned if there is a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None

    def snapshot(
        self, found: Mapping[str, TensorChunks], engines: Sequence[Engine]
    ) -> tuple[dict[str, TensorChunks], Snapshot]:
        """Return `found` in this memory, and the snapshot that copies what need not be copied at once."""
        boxes = [box for pieces in found.values() for box in pieces.boxes.values()]
        device = next((box.device for box in boxes if box.device.type == "cuda"), None)
        needed = sum(_aligned(box.nbytes) for box in boxes)
        if needed > self._memory.numel():
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=device is not None)
        at, out = 0, dict[str, TensorChunks]()
        late: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, pieces in found.items():
            copies: dict[tuple[int, ...], torch.Tensor] = {}
            for offsets, box in pieces.boxes.items():
                copies[offsets] = self._memory[at : at + box.nbytes].view(box.dtype).view(box.shape)
                at += _aligned(box.nbytes)
                if pieces.steady:
                    late.append((copies[offsets], box))
                else:
                    copies[offsets].copy_(box, non_blocking=True)
            out[name] = replace(pieces, boxes=copies)
        if device is not None and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return out, Snapshot(late, engines, self._stream)


def _aligned(count_bytes: int) -> int:
    return -(-count_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


class Snapshot:
    """A copy that is completed later.

    The training thread creates it and calls `before_step`. Another thread calls `take`.
    """

    def __init__(
        self,
        late: list[tuple[torch.Tensor, torch.Tensor]],
        engines: Sequence[Engine],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._late, self._engines, self._stream = late, engines, stream
        self._writes = self._count_writes()
        self._taken = threading.Event()
        self._copied: torch.cuda.Event | None = None
        if stream is not None:
            self._copied = torch.cuda.Event()
            stream.wait_stream(torch.cuda.current_stream(stream.device))  # which may still compute what is copied

    def take(self) -> None:
        """Copy the rest. Raise CheckpointError if a parameter was written meanwhile other than by the optimizer."""
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._copy()
            if self._copied is not None:
                self._copied.record(self._stream)
            disturbed = self._count_writes() != self._writes  # read before the next step may write
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

    def _count_writes(self) -> int:
        return sum(engine.writes.count for engine in self._engines)

    def _copy(self) -> None:
        for copy, source in self._late:
            copy.copy_(source, non_blocking=True)

    def before_step(self) -> None:
        """Wait for the copy. On a GPU the current stream waits, instead of this thread."""
        self._taken.wait()
        if self._copied is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)
