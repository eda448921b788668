"""Dynamic loss scaling: what keeps the gradients of fp16 within its range."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

Loss = TypeVar("Loss", float, Tensor)

_GROWS_AFTER = 2000  # steps without an overflow


class LossScale:
    """The loss is multiplied by `value` before the backward pass, and gradients are divided by it before they are used.

    It halves when a gradient has overflowed, and doubles after 2000 steps in which none has. A power of two at all
    times, so that it changes no digit of what neither overflows nor vanishes. Every rank must be told the same.
    `value` = 1 for good, if not `active`.
    """

    def __init__(self, first: float, active: bool) -> None:
        self.active = active
        self.value = first if active else 1.0
        self._without = 0  # steps since it last changed

    def scaled(self, loss: Loss) -> Loss:
        return loss * self.value if self.active else loss

    def unscaled(self, loss: Loss) -> Loss:
        return loss / self.value if self.active else loss

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Their gradients."""
        if self.active:
            gradients: Sequence[Tensor] = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / self.value)  # pyright: ignore

    def update(self, overflowed: bool) -> None:
        """After a step."""
        if not self.active:
            return
        self._without = 0 if overflowed else self._without + 1
        if overflowed:
            self.value /= 2
        elif self._without == _GROWS_AFTER:
            self.value, self._without = self.value * 2, 0

    def state(self) -> list[float]:
        return [self.value, float(self._without)]

    def restore(self, state: Sequence[float]) -> None:
        """Of a run that had another precision it is left as it is."""
        if self.active and state[0] != 1.0:
            self.value, self._without = float(state[0]), int(state[1])
