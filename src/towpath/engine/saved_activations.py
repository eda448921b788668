"""Offload of activations to the host's memory, from the forward pass until the backward pass needs them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from towpath.engine.executor import Engine, engine_of
from towpath.errors import StepError

# Smaller tensors stay on the device, because copying them costs more time than their memory is worth.
SMALLEST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _LeftOnDevice:
    """A saved tensor that stays where it is.

    With saved-tensor hooks, autograd no longer checks whether a tensor was written to since. `version` replaces that
    check.
    """

    tensor: torch.Tensor
    version: int

    def unpacked(self) -> torch.Tensor:
        """Return the tensor; raise StepError if it was modified since."""
        if self.tensor._version != self.version:
            raise StepError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the backward pass needs was modified since its "
                f"forward pass: it is at version {self.tensor._version}, expected {self.version}. Call backward() "
                "before the next forward pass of the unit, and change nothing in place that a graph still needs."
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class _OnHost:
    """A copy of a saved tensor in the host's memory."""

    kept: torch.Tensor
    device: torch.device

    def unpacked(self) -> torch.Tensor:
        """Return a copy on the tensor's device."""
        return self.kept.to(self.device, non_blocking=self.kept.is_pinned())


@contextmanager
def offload_activations(model: nn.Module, *, smallest_bytes: int = SMALLEST_BYTES) -> Generator[None]:
    """Run a forward pass whose activations are kept in the host's memory until the backward pass needs them.

    The memory is page-locked if the model is on a GPU. Unsharded weights and the model's buffers stay on the device.
    They are no activations, and the engine relies on autograd to read the weights in their slots. With activation
    checkpointing, the inputs that it keeps are offloaded, and recomputed activations are not.

    Args:
        model: A model that `shard()` returned.
        smallest_bytes: Tensors with fewer bytes stay on the device.
    """
    on_device = _EngineMemory(engine_of(model), model)

    def pack(tensor: torch.Tensor) -> _LeftOnDevice | _OnHost:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or tensor.nbytes < smallest_bytes or tensor in on_device:
            return _LeftOnDevice(tensor, tensor._version)
        pinned = tensor.device.type == "cuda"
        # A dense copy with the same order of dimensions. A small view of a large tensor is copied alone.
        kept = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        kept.copy_(tensor, non_blocking=pinned)
        return _OnHost(kept, tensor.device)

    def unpack(packed: _LeftOnDevice | _OnHost) -> torch.Tensor:
        return packed.unpacked()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _EngineMemory:
    """The memory of unsharded weights and of buffers. `tensor in memory` tests whether a tensor is stored there."""

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self._always = {_memory_of(buffer) for buffer in model.buffers()}
        self._made = -1
        self._weights: set[int] = set()

    def __contains__(self, tensor: Any) -> bool:
        # Slots are made in the first steps, and for units that are kept unsharded.
        if self._made != self._engine.weights.made:
            self._made = self._engine.weights.made
            self._weights = {_memory_of(b.full) for unit in self._engine.units for b in unit.buckets}
        return _memory_of(tensor) in self._weights or _memory_of(tensor) in self._always


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
