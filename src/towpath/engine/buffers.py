"""Memory that units take turns in. Sized once; every slot that is made is counted.

Autograd keeps views of the weights a forward gathered, so a unit's backward gather must land in the very same
memory: each unit keeps one slot. Units that are whole at the same time must not share one, so neighbours do not;
a unit that finds its slot taken moves to one of its own (`Unit.take_slot`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from towpath.engine.streams import Handle
from towpath.spec.schedule import largest
from towpath.spec.transfer import Needs


class Slot:
    """One flat buffer per dtype, in use by one unit at a time."""

    @torch.inference_mode(False)  # what is made in inference mode could never be trained with
    def __init__(self, needs: Needs, device: torch.device) -> None:
        self.buffers = {d: torch.empty(n, dtype=getattr(torch, d), device=device) for d, n in needs.items()}
        self.user: object = None
        self.busy: Handle | None = None  # the last transfer that reads or fills it

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buffers.values())


class SlotPool:
    """`ways` slots, each large enough for the largest unit; more are made, and counted, when all are taken."""

    def __init__(self, needs: Iterable[Needs], ways: int, device: torch.device) -> None:
        self._device = device
        self._needs = largest(needs)
        self.slots = [Slot(self._needs, device) for _ in range(ways)] if self._needs else []
        self._reserved: dict[object, Slot] = {}
        self.made = len(self.slots)

    def take(self, user: object) -> Slot:
        """A slot nobody uses: an idle one, else one whose last transfer is waited for, else a new one."""
        slot = self._reserved.get(user) or self._next_in_turn()
        if slot.busy is not None:
            slot.busy.wait()
            slot.busy = None
        slot.user = user
        return slot

    def _next_in_turn(self) -> Slot:
        free = [s for s in self.slots if s.user is None]
        slot = next((s for s in free if s.busy is None), free[0] if free else self.add(self._needs))
        # Last in line: of several that are still being read, the next one waits for the oldest transfer.
        self.slots.remove(slot)
        self.slots.append(slot)
        return slot

    def add(self, needs: Needs) -> Slot:
        """A new slot, to be taken in turns from now on."""
        self.slots.append(self.apart(needs))
        return self.slots[-1]

    def reserve(self, user: object, needs: Needs) -> Slot:
        """A new slot for one user alone, who would hold one of the others for too long."""
        self._reserved[user] = slot = self.apart(needs)
        return slot

    def apart(self, needs: Needs) -> Slot:
        """A new slot that takes no part in the turns, and is the caller's to keep."""
        self.made += 1
        return Slot(needs, self._device)

    @property
    def all(self) -> list[Slot]:
        return [*self.slots, *self._reserved.values()]

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.all)
