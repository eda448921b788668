"""Units and buckets of a model, and the payloads of transfers, as sizes and dtypes without tensors.

A unit is a set of parameters that are gathered and released together. It has one flat buffer, a bucket, for each dtype,
and separate ones for trainable and frozen parameters. The engine, the schedule and the planner all describe models so.
A payload is a part of a bucket, the tensors between pipeline stages, or full matrices and their pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import ClassVar, NamedTuple

from towpath.core.formats import FLOATING, SMALLEST_BLOCK, Codec
from towpath.core.routes import WITH_OWNERS, Group, Op
from towpath.errors import ConfigError

# Each parameter starts at a multiple of 16 elements (32 bytes or more), so that vector loads stay aligned in every
# dtype. If a codec encodes the parameters, each starts at a block of the codec.
PARAMETER_ALIGNMENT = 16
# Each slice of a bucket has a multiple of this many elements (64 bytes in bf16).
SLICE_ALIGNMENT = 32


# In elements. For smaller units, a message takes about as long to start as to send.
SMALL_UNIT = 1 << 20
# In elements. An embedding or an output layer of the root with at least this many is a unit of its own, a leaf.
LARGE_LEAF = 4 * SMALL_UNIT
# Small units are combined into at least this many, so that one can be gathered while another computes.
FEWEST_UNITS = 3


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def overlap(offset: int, numel: int, cut: int, slot: int) -> tuple[int, int]:
    """Return which elements [start, end) of a parameter are in one slice of its bucket."""
    # `offset`: The position of the parameter's first element in the bucket.
    # `cut`: The length of each slice.
    low = slot * cut - offset
    return min(max(low, 0), numel), min(max(low + cut, 0), numel)


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """The parameters of a unit that share one flat buffer: one dtype, all trainable or all frozen.

    With `keeps_dtype`, they are computed with and sent in their own dtype, whatever the precision. `matrices` has the
    rows and columns of each parameter whose gradient may be sent in low rank, and None for the others. It may be empty.
    """

    numels: tuple[int, ...]  # the elements of each parameter
    dtype: str = "float32"
    trainable: bool = True
    keeps_dtype: bool = False
    alignment: int = PARAMETER_ALIGNMENT
    matrices: tuple[tuple[int, int] | None, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in FLOATING:
            raise ConfigError(
                f"dtype {self.dtype!r} cannot be sent; parameters may be {', '.join(FLOATING)}. "
                "Keep tensors of other dtypes in buffers, or convert them before shard()."
            )
        assert len(self.matrices) in (0, len(self.numels))

    @property
    def name(self) -> str:
        """The dtype, with 'kept' and 'frozen' where these hold. It is unique in the unit."""
        return self.dtype + (" kept" if self.keeps_dtype else "") + ("" if self.trainable else " frozen")

    @property
    def offsets(self) -> tuple[int, ...]:
        """The position of each parameter in the flat buffer, and one more entry for the end of the last."""
        return (0, *accumulate(round_up(n, self.alignment) for n in self.numels))

    def padded(self, slices: int) -> int:
        """Return the length of the flat buffer, padded so that it can be divided into `slices` equal slices."""
        return round_up(max(self.offsets[-1], 1), slices * max(SLICE_ALIGNMENT, self.alignment))

    def in_blocks(self, codecs: Sequence[Codec], slices: int) -> BucketSpec:
        """Return the bucket with an alignment such that no block of `codecs` spans two parameters or two slices."""
        # If a block held a small and a large value of two parameters, the small one would be rounded to zero.
        # Parameters therefore start at a multiple of the block. For short parameters, padding to a large block costs
        # more bytes than the additional scales of smaller blocks. Of all powers of two up to the largest block, the
        # alignment is the one that sends the fewest bytes.
        # `slices`: How many slices the finest partition of the bucket has.
        largest = max((codec.grain for codec in codecs), default=1)
        if largest == 1:
            return self

        def travelling(spec: BucketSpec) -> int:
            return sum(codec.within(spec.alignment).encoded_bytes(spec.padded(slices)) for codec in codecs)

        halved = range(largest.bit_length() - 1, SMALLEST_BLOCK.bit_length() - 2, -1)
        return min((replace(self, alignment=1 << power) for power in halved), key=travelling)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """The buckets of one unit. The `root` stays unsharded from the forward to the end of backward.

    A `leaf` is one large layer of the root, an embedding or an output layer. A `lookup` is a leaf whose backward pass
    does not read the weights: an embedding.
    """

    name: str
    buckets: tuple[BucketSpec, ...]
    root: bool = False
    leaf: bool = False
    lookup: bool = False


def together(elements: Sequence[int]) -> list[list[int]]:
    """Combine neighboring small units, so that their messages are sent as one."""
    # A combined unit has at most `SMALL_UNIT` elements, and is no larger than the largest unit or a third of all
    # elements, whichever is more.
    # `elements`: The number of elements of each unit, in forward order.
    # Returned: The positions of the units in each combined unit.
    room = min(max(*elements, sum(elements) // FEWEST_UNITS, 0), SMALL_UNIT)
    batches: list[list[int]] = []
    filled = 0
    for i, count in enumerate(elements):
        if batches and filled + count <= room:
            batches[-1].append(i)
            filled += count
        else:
            batches.append([i])
            filled = count
    return batches


def units_from_numels(numels: Sequence[int] | Mapping[str, int], dtype: str = "float32") -> tuple[UnitSpec, ...]:
    """Return units with one bucket each, the root first."""
    # `numels`: The number of elements of each unit, in forward order. In a mapping, the name "" is the root.
    named = numels if isinstance(numels, Mapping) else {str(i): n for i, n in enumerate(numels)}
    units = [UnitSpec(name, (BucketSpec((n,), dtype),), root=name == "") for name, n in named.items()]
    return tuple(sorted(units, key=lambda u: not u.root))


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
class StageOutput:
    """A tensor that a pipeline stage sends to the next one. Its gradient is sent back in the same way.

    Tensor-parallel ranks that all have the tensor send one of its `shares` each, and gather the shares that they
    receive. A share has consecutive rows, which are tokens. So in low rank it has the columns of the whole tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    shares: int = 1

    @staticmethod
    def on(ranks: int, shape: Sequence[int], dtype: str) -> StageOutput:
        """Return a tensor that so many tensor-parallel ranks have. If its rows do not divide, each sends all of it."""
        return StageOutput(tuple(shape), dtype, 1 if prod(shape[:-1]) % ranks else ranks)

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape of what one rank sends."""
        return self.shape if self.shares == 1 else (prod(self.shape[:-1]) // self.shares, self.shape[-1])


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
    """Yield every message of one group's transfer, matrix by matrix."""
    # `matrices`: The matrices, in the order that all ranks agree on.
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
