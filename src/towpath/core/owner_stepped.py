"""The step of an optimizer that needs full matrices (Muon, Shampoo, Adafactor), as data.

Each rank holds a slice of the parameters, but such an optimizer computes with unsharded parameters. Each parameter
therefore has an *owner* among the ranks that hold one copy of the optimizer states. In every copy, the owner has the
same slot. The step is divided into *rounds*, each of which gives all owners about the same work:

    matrix_gradients   every rank's slices of the gradients  → their owners
    matrix_weights     every rank's slices of the parameters → their owners     (updates and decay read them)
    matrix_updates     the owners' updated parameters        → back into every rank's slices

While owners work on one round, the slices of the next are transferred. `step_actions` yields the actions in order. The
engine executes them, the simulator replays them, and the schedule lists their transfers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING

from towpath.core.formats import ENCODED, item_bytes
from towpath.core.placement import GroupCollective
from towpath.core.routes import Op
from towpath.core.step_state import Submit, Task, Wait
from towpath.core.strategy import Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Matrices, OwnedMatrix, overlap
from towpath.errors import ConfigError

if TYPE_CHECKING:
    from towpath.core.unit_plan import BucketPlan, UnitPlan

# How many rounds are in memory at a time: the one that owners work on, and the one that is transferred meanwhile.
ROUNDS_IN_FLIGHT = 2
# For each of these rounds, an owner holds the gradients and the weights.
_TENSORS = 2


@dataclass(frozen=True, slots=True)
class OwnedParameter:
    """A parameter that its optimizer steps unsharded, and its place: parameter `index` of a bucket of a unit."""

    name: str
    shape: tuple[int, ...]
    unit: int
    bucket: int
    index: int


@dataclass(frozen=True, slots=True)
class Round:
    """Matrices of one dtype that are transferred together. Each owner then steps its own."""

    dtype: str
    matrices: tuple[OwnedMatrix, ...]

    def owned(self, slot: int) -> tuple[OwnedMatrix, ...]:
        return tuple(matrix for matrix in self.matrices if matrix.owner == slot)

    def held(self, slot: int) -> int:
        """Return how many elements the owner at `slot` gathers. Matrices that it already holds do not count."""
        return sum(matrix.numel for matrix in self.owned(slot) if not matrix.stays)

    @property
    def flops(self) -> int:
        """The operations of the busiest owner, per matrix product in the iteration of an optimizer such as Muon."""
        by_owner: dict[int, int] = {}
        for matrix in self.matrices:
            by_owner[matrix.owner] = by_owner.get(matrix.owner, 0) + 2 * cost(matrix.shape)
        return max(by_owner.values(), default=0)

    def of(self, names: Collection[str]) -> Round:
        """Return the round with only these matrices, because the others have no gradient in this step."""
        return replace(self, matrices=tuple(m for m in self.matrices if m.name in names))


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """The rounds of one optimizer and their transfers, the same on all ranks.

    If one rank holds a full copy of the optimizer states, nothing is transferred. `gradients` is the transport of the
    gradients. Weights and updates use no codec.
    """

    strategy: Strategy
    rounds: tuple[Round, ...]
    gradients: Transport = Transport()
    _made: dict[Round, tuple[Transfer, ...]] = field(
        default_factory=dict[Round, tuple[Transfer, ...]], init=False, repr=False, compare=False
    )

    def step(self, names: Collection[str] | None = None) -> tuple[Round, ...]:
        """Return the rounds of one step. `names` are the parameters that have a gradient; by default, all have one."""
        rounds = self.rounds if names is None else [r.of(names) for r in self.rounds]
        return tuple(r for r in rounds if r.matrices)

    def transfers_of(self, each: Round) -> tuple[Transfer, ...]:
        """Return the transfers of a round: two before the owners' work, and one after it."""
        if not self.strategy.moves.assemble:
            return ()
        if each not in self._made:
            # Matrices whose owner already holds all of them are included. Ranks compare the transfers that they submit,
            # and so they also compare which matrices they step.
            payload, topology = Matrices(each.matrices, each.dtype), self.strategy.topology
            groups = self.strategy.moves.assemble[0].groups
            to_owners, from_owners = (GroupCollective(op, 1, groups) for op in (Op.TO_OWNERS, Op.FROM_OWNERS))
            self._made[each] = (
                Transfer(TransferKind.MATRIX_GRADIENTS, payload, to_owners, self.gradients, topology),
                Transfer(TransferKind.MATRIX_WEIGHTS, payload, to_owners, Transport(), topology),
                Transfer(TransferKind.MATRIX_UPDATES, payload, from_owners, Transport(), topology),
            )
        return self._made[each]

    def transfers(self, names: Collection[str] | None = None) -> Iterator[Transfer]:
        """Yield the transfers of one step, in the order in which the engine submits them."""
        for action in step_actions(self, self.step(names)):
            if isinstance(action, Submit):
                yield from action.task.transfers

    @property
    def room(self) -> dict[str, int]:
        """The most elements, by dtype, that one owner gathers in a round: so many of gradients, and of weights."""
        slots = range(self.strategy.moves.optimizer.count)
        room: dict[str, int] = {}
        for each in self.rounds:
            room[each.dtype] = max(room.get(each.dtype, 0), *(each.held(slot) for slot in slots))
        return room

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the memory in which every rank gathers matrices."""
        return sum(ROUNDS_IN_FLIGHT * _TENSORS * n * item_bytes(dtype) for dtype, n in self.room.items())


@dataclass(frozen=True, slots=True)
class Iterate:
    """The action in which owners step the matrices of a round, in the memory with the number `buffer_index`."""

    round: int
    buffer_index: int


def step_actions(
    plan: MatrixPlan, rounds: Sequence[Round], gradients: bool = True
) -> Iterator[Submit | Wait | Iterate]:
    """Yield the actions of one step of the optimizer, or of a call without gradients, such as its `eval()`."""
    # `rounds`: The rounds to execute, from `plan.step()`.
    travels = [plan.transfers_of(each) for each in rounds]
    first = 0 if gradients else 1  # the weights follow the gradients
    gathers = [_task(TransferKind.MATRIX_GRADIENTS, number, each[first:2]) for number, each in enumerate(travels)]
    scatters = [_task(TransferKind.MATRIX_UPDATES, number, each[2:]) for number, each in enumerate(travels)]
    for number in range(len(rounds)):
        for ahead in range(0 if number == 0 else number + 1, min(number + ROUNDS_IN_FLIGHT, len(rounds))):
            gather, before = gathers[ahead], scatters[ahead - ROUNDS_IN_FLIGHT] if ahead >= ROUNDS_IN_FLIGHT else None
            if gather is not None:
                gather.after = () if before is None else (before,)  # both use the same memory
                yield Submit(gather)
        arrived, leaving = gathers[number], scatters[number]
        if arrived is not None:
            yield Wait(arrived)
        yield Iterate(number, number % ROUNDS_IN_FLIGHT)
        if leaving is not None:
            yield Submit(leaving)
    for leaving in scatters:
        if leaving is not None:
            yield Wait(leaving)


def _task(kind: TransferKind, number: int, transfers: tuple[Transfer, ...]) -> Task | None:
    return Task(kind, number, transfers=transfers) if transfers else None


def cost(shape: Sequence[int]) -> int:
    """Return the cost of stepping a matrix: rows × columns × the smaller of the two."""
    # It is that of a product with the transpose, as in Newton-Schulz iterations. Further dimensions count as columns.
    rows, columns = (*shape, 1, 1)[:2] if len(shape) < 2 else (shape[0], prod(shape[1:]))
    return rows * columns * min(rows, columns)


def plan_matrices(
    strategy: Strategy,
    plans: Sequence[UnitPlan],
    chosen: Collection[OwnedParameter],
    gradients: Transport | None = None,
) -> MatrixPlan:
    """Assign an owner and a round to each parameter. The result is the same on all ranks."""
    # `chosen`: The parameters that the optimizer steps, in any order.
    gradients = gradients or Transport()
    order = sorted(chosen, key=lambda p: (p.unit, p.bucket, p.index))
    buckets = [plans[p.unit].buckets[p.bucket] for p in order]
    for parameter, bucket in zip(order, buckets, strict=True):
        _check_transport(strategy, gradients, parameter, bucket)
    matrices = _with_owners([_matrix(p, b) for p, b in zip(order, buckets, strict=True)])
    rounds: list[Round] = []
    for dtype in dict.fromkeys(b.own_dtype for b in buckets):
        mine = [m for m, b in zip(matrices, buckets, strict=True) if b.own_dtype == dtype]
        rounds += (Round(dtype, batch) for batch in _batches(mine))
    return MatrixPlan(strategy, tuple(rounds), gradients)


def _check_transport(strategy: Strategy, transport: Transport, parameter: OwnedParameter, bucket: BucketPlan) -> None:
    what = f"{strategy.name}: {TransferKind.MATRIX_GRADIENTS.value}"
    transport.check(Op.TO_OWNERS, what)
    if transport.encoding is not None and bucket.own_dtype not in ENCODED:
        raise ConfigError(
            f"{what} in {transport.codec}: {parameter.name} is {bucket.own_dtype}, and codecs take "
            f"{', '.join(ENCODED)}. Leave the codec out."
        )


def _matrix(parameter: OwnedParameter, bucket: BucketPlan) -> OwnedMatrix:
    numel, offset = bucket.spec.numels[parameter.index], bucket.spec.offsets[parameter.index]
    count = bucket.optimizer.count
    bounds = [overlap(offset, numel, bucket.numel // count, slot) for slot in range(count)]
    return OwnedMatrix(parameter.name, parameter.shape, tuple(end - start for start, end in bounds), owner=0)


def _with_owners(matrices: Sequence[OwnedMatrix]) -> list[OwnedMatrix]:
    """Assign each matrix, the costliest first, to the slot with the least work, or among equals the largest piece."""
    owners: dict[str, int] = {}
    work = [0] * (len(matrices[0].pieces) if matrices else 0)
    for matrix in sorted(matrices, key=lambda m: -cost(m.shape)):
        owner = min(range(len(work)), key=lambda slot: (work[slot], -matrix.pieces[slot], slot))
        owners[matrix.name] = owner
        work[owner] += cost(matrix.shape)
    return [replace(matrix, owner=owners[matrix.name]) for matrix in matrices]


def _batches(matrices: Sequence[OwnedMatrix]) -> Iterator[tuple[OwnedMatrix, ...]]:
    """Yield the matrices of each round. Owners take the costliest first, and several small ones in one round."""
    # The matrices of one owner in one round have no more elements than the largest matrix.
    room = max(matrix.numel for matrix in matrices)
    by_owner: dict[int, list[list[OwnedMatrix]]] = {}
    for matrix in sorted(matrices, key=lambda m: -cost(m.shape)):
        batches = by_owner.setdefault(matrix.owner, [])
        if not batches or sum(m.numel for m in batches[-1]) + matrix.numel > room:
            batches.append([])
        batches[-1].append(matrix)
    for together in zip_longest(*(by_owner[owner] for owner in sorted(by_owner)), fillvalue=()):
        yield tuple(matrix for batch in together for matrix in batch)
