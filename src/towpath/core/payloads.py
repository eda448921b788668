"""What a transfer moves: a part of a bucket, the tensors between pipeline stages, or full matrices and their pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple

from towpath.core.formats import Codec
from towpath.core.routes import WITH_OWNERS, Group, Op


@dataclass(frozen=True, slots=True)
class Range:
    """The part of a bucket's parameters, or of their gradients, that one group shares."""

    unit: str  # the unit's name, empty for the root
    # The bucket's name. It is empty for a transfer that concerns all units, such as `unused_params`.
    bucket: str
    elements: int
    dtype: str  # the dtype in which the elements are sent
    # How many matrix elements are replaced by low-rank factors. 0 if there are none.
    factored: int = 0
    # True if each rank stores its part in the transport's codec. It is then sent in that form.
    encoded: bool = False

    def __str__(self) -> str:
        return f"{self.unit or 'root'} [{self.bucket}]" if self.bucket else "all units"


@dataclass(frozen=True, slots=True)
class Activation:
    """The output of a pipeline stage for one micro-batch, sent to the next stage; or its gradient, sent back."""

    bucket: ClassVar[str] = ""  # it belongs to no bucket
    stage: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def unit(self) -> str:
        """Name of the stage, used in place of a unit's name."""
        return f"stage {self.stage}"

    def __str__(self) -> str:
        return f"{self.unit} [{' × '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A parameter that one rank of each copy of the optimizer states, its owner, steps as a full matrix."""

    name: str
    shape: tuple[int, ...]  # its global shape
    pieces: tuple[int, ...]  # how many of its elements each slice holds, in the order of slices
    owner: int  # the slice whose holder steps the matrix

    @property
    def numel(self) -> int:
        return sum(self.pieces)

    @property
    def stays(self) -> bool:
        """True if the owner already holds all of the matrix, so that none of it is sent."""
        return self.pieces[self.owner] == self.numel

    def bounds(self, slot: int) -> tuple[int, int]:
        """Return the start and end of the elements that slice `slot` holds."""
        start = sum(self.pieces[:slot])
        return start, start + self.pieces[slot]


@dataclass(frozen=True, slots=True)
class Matrices:
    """The full parameters, gradients or updates that one transfer moves between holders of pieces and owners."""

    bucket: ClassVar[str] = ""  # they may come from several buckets
    matrices: tuple[OwnedMatrix, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Total number of elements, including matrices that are already on their owner."""
        return sum(matrix.numel for matrix in self.matrices)

    @property
    def unit(self) -> str:
        """Names of the matrices, used in place of a unit's name."""
        return ", ".join(matrix.name for matrix in self.matrices)

    def __str__(self) -> str:
        return self.unit


Payload = Range | Activation | Matrices


class OwnerMessage(NamedTuple):
    """A message that carries the piece of matrix number `matrix` in slice `slot`, to its owner or back.

    Member `source` sends it to member `target`. Both are positions in the group.
    """

    source: int
    target: int
    matrix: int  # index into the matrices of the transfer
    slot: int


def owner_messages(op: Op, matrices: Sequence[OwnedMatrix], group: Group) -> Iterator[OwnerMessage]:
    """Yield every message of one group's transfer, matrix by matrix.

    Args:
        matrices: The matrices, in the order that all ranks agree on.
    """
    assert op in WITH_OWNERS
    member = {slot: position for position, slot in enumerate(group.slots)}
    for number, matrix in enumerate(matrices):
        for slot, elements in enumerate(matrix.pieces):
            if elements and slot != matrix.owner:
                holder, owner = member[slot], member[matrix.owner]
                source, target = (holder, owner) if op is Op.TO_OWNERS else (owner, holder)
                yield OwnerMessage(source, target, number, slot)


def piece_bytes(elements: int, item: int, codec: Codec | None) -> int:
    """Return how many bytes a piece of a matrix takes when it is sent. Each piece is encoded separately."""
    if not elements:
        return 0
    return codec.encoded_bytes(elements) if codec is not None else elements * item
