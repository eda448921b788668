"""What a transfer moves."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Range:
    """Of a bucket's parameters, or of their gradients: as much as one group shares.

    `factored`: the elements of the matrices of which it has factors, instead of what they are. `encoded`: each rank's
    part rests in the wire's codec, and is sent as it rests.
    """

    unit: str
    bucket: str
    elements: int
    dtype: str
    factored: int = 0
    encoded: bool = False

    def __str__(self) -> str:
        return f"{self.unit or 'root'} [{self.bucket}]" if self.bucket else "all units"


@dataclass(frozen=True, slots=True)
class Activation:
    """Of one micro-batch, what a pipeline stage hands to the next: an output; or, on its way back, its gradient."""

    stage: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def unit(self) -> str:
        return f"stage {self.stage}"

    @property
    def bucket(self) -> str:
        return ""

    def __str__(self) -> str:
        return f"{self.unit} [{' × '.join(map(str, self.shape))}]"


Payload = Range | Activation
