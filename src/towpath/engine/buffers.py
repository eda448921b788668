"""The memory behind the step machine's slots. Sized once; every buffer that is made is counted.

Autograd keeps views of the weights a forward gathered, so a unit's backward gather must land in the very same memory:
each unit keeps one slot.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from towpath.core.actions import Slot
from towpath.core.formats import item_bytes
from towpath.core.step_state import Slots
from towpath.core.transfer import Needs
from towpath.core.unit_plan import largest

Buffers = dict[str, torch.Tensor]  # by dtype


class SlotMemory:
    """Of the slots of weights, or of gradients. `needs`: of each unit."""

    def __init__(self, slots: Slots, needs: Sequence[Needs], device: torch.device) -> None:
        self._slots, self._needs, self._device = slots, needs, device
        self._buffers: weakref.WeakKeyDictionary[Slot, Buffers] = weakref.WeakKeyDictionary()
        self.made = 0
        for slot in slots.all:
            self.of(slot)

    @torch.inference_mode(False)  # what is made in inference mode could never be trained with
    def of(self, slot: Slot) -> Buffers:
        """Made when first asked for; free again when the machine has let the slot go."""
        if slot not in self._buffers:
            needs = largest(self._needs[unit] for unit in slot.fits)
            self._buffers[slot] = {
                dtype: torch.empty(numel, dtype=getattr(torch, dtype), device=self._device)
                for dtype, numel in needs.items()
            }
            self.made += 1
        return self._buffers[slot]

    @property
    def nbytes(self) -> int:
        """Of those that units take in turns, or that are one unit's for good."""
        return sum(b.numel() * item_bytes(dtype) for slot in self._slots.all for dtype, b in self.of(slot).items())
