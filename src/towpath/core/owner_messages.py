"""What is sent between the ranks that hold pieces of matrices and the ranks that own these: message by message, and in
closed form how many bytes that is. `collectives/owners.py` executes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from towpath.core.formats import Codec
from towpath.core.payload import Matrix
from towpath.core.route_bytes import Sent
from towpath.core.routes import WITH_OWNERS, Group, Op


class OwnerMessage(NamedTuple):
    """Member `source` sends member `target` (positions in the group) the piece of a matrix that lies in `slot`."""

    source: int
    target: int
    matrix: int  # which of the matrices
    slot: int


def owner_messages(op: Op, matrices: Sequence[Matrix], group: Group) -> Iterator[OwnerMessage]:
    """Every message of one transfer of a group, matrix by matrix."""
    assert op in WITH_OWNERS
    member = {slot: position for position, slot in enumerate(group.slots)}
    for number, matrix in enumerate(matrices):
        for slot, elements in enumerate(matrix.pieces):
            if elements and slot != matrix.owner:
                holder, owner = member[slot], member[matrix.owner]
                source, target = (holder, owner) if op is Op.TO_OWNERS else (owner, holder)
                yield OwnerMessage(source, target, number, slot)


def piece_bytes(elements: int, item: int, codec: Codec | None) -> int:
    """As it travels: each piece is encoded by itself."""
    if not elements:
        return 0
    return codec.encoded_bytes(elements) if codec is not None else elements * item


def encoded_by_a_rank(matrices: Sequence[Matrix], codec: Codec | None) -> int:
    """Bytes of all encoded pieces that one rank sends and receives in one transfer, at most."""
    if codec is None:
        return 0
    through = [0] * max(len(matrix.pieces) for matrix in matrices)
    for matrix in matrices:
        sent = [piece_bytes(n, 0, codec) if slot != matrix.owner else 0 for slot, n in enumerate(matrix.pieces)]
        through = [a + b for a, b in zip(through, sent, strict=True)]
        through[matrix.owner] += sum(sent)
    return max(through)


def sent_with_owners(
    op: Op, matrices: Sequence[Matrix], node_of_slot: Sequence[int], nodes: int, item: int, codec: Codec | None
) -> Sent:
    """What one group sends: a node sends all it holds of a matrix out to the owner's node, or, if that is this one, all
    but what the owner holds inside. On the way back the owner's node sends what the others have sent it."""
    inside, leaving = 0, [0] * nodes
    for matrix in matrices:
        held = [0] * nodes
        for node, elements in zip(node_of_slot, matrix.pieces, strict=True):
            held[node] += piece_bytes(elements, item, codec)
        home = node_of_slot[matrix.owner]
        inside += held[home] - piece_bytes(matrix.pieces[matrix.owner], item, codec)
        held[home] = 0
        if op is Op.TO_OWNERS:
            leaving = [a + b for a, b in zip(leaving, held, strict=True)]
        else:
            leaving[home] += sum(held)
    return Sent(inside, tuple(leaving))
