"""Activations in the host's memory from the forward pass until the backward pass wants them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from towpath.engine.executor import Engine, engine_of
from towpath.errors import StepError

# What is smaller is left where it is: to copy it would take longer than its memory is worth.
SMALLEST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _InPlace:
    """Left where it is. Hooks take autograd's place in seeing whether it was written to since: `version`."""

    tensor: torch.Tensor
    version: int

    def unpacked(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise StepError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the backward pass needs was modified since its "
                f"forward pass: it is at version {self.tensor._version}, expected {self.version}. Call backward() "
                "before the next forward pass of the unit, and change nothing in place that a graph still needs."
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class _OnHost:
    kept: torch.Tensor
    device: torch.device

    def unpacked(self) -> torch.Tensor:
        return self.kept.to(self.device, non_blocking=self.kept.is_pinned())


@contextmanager
def offload_activations(model: nn.Module, *, smallest_bytes: int = SMALLEST_BYTES) -> Generator[None]:
    """Around a forward pass of a sharded model: what autograd keeps of it for the backward pass lies in the host's
    memory (page-locked, where the model is on a GPU) until that wants it.

    Whole weights and the model's buffers stay where they are: they are no activations, and the engine relies on
    autograd to read the weights in their slots. So does what takes less than `smallest_bytes`. With activation
    checkpointing the inputs that it keeps are offloaded, and what is recomputed is not.
    """
    stays = _Staying(engine_of(model), model)

    def pack(tensor: torch.Tensor) -> _InPlace | _OnHost:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or tensor.nbytes < smallest_bytes or tensor in stays:
            return _InPlace(tensor, tensor._version)
        pinned = tensor.device.type == "cuda"
        # In dense memory of the same order: a view of a few elements of much memory does not bring the rest along.
        kept = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        kept.copy_(tensor, non_blocking=pinned)
        return _OnHost(kept, tensor.device)

    def unpack(packed: _InPlace | _OnHost) -> torch.Tensor:
        return packed.unpacked()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Staying:
    """The memory of whole weights, wherever they are now, and of buffers. `tensor in staying`: lies in it."""

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self._always = {_memory_of(buffer) for buffer in model.buffers()}
        self._made = -1
        self._weights: set[int] = set()

    def __contains__(self, tensor: Any) -> bool:
        if self._made != self._engine.weights.made:  # slots are made in the first steps, and for pinned units
            self._made = self._engine.weights.made
            self._weights = {_memory_of(b.full) for unit in self._engine.units for b in unit.buckets}
        return _memory_of(tensor) in self._weights or _memory_of(tensor) in self._always


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
