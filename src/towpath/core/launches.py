"""Counts of what a rank launches for a transfer on a device: calls, messages and kernels.

On a device, the thread that trains launches all work, one piece after the other. `tests/unit/test_launch_counts.py`
compares these counts with what the engine launches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from towpath.core.formats import NARROW
from towpath.core.payloads import Matrices, Range, owner_messages
from towpath.core.route_costs import phases
from towpath.core.routes import WITH_OWNERS, Form, Op, Order, hops_of, order_of
from towpath.core.strategy import BETWEEN_HOSTS
from towpath.core.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Launches:
    """Counts of what is launched."""

    # Launches of the backend's collectives. Several calls that are launched together count once.
    calls: int = 0
    together: int = 0  # calls that are launched together with others
    batches: int = 0  # batches of messages
    messages: int = 0  # messages in all batches, sent and received
    codecs: int = 0  # kernels of codecs
    operations: int = 0  # other kernels, such as copies and sums

    def __add__(self, other: Launches) -> Launches:
        return Launches(*(getattr(self, name) + getattr(other, name) for name in Launches.__slots__))

    def __rmul__(self, times: int) -> Launches:
        return Launches(*(times * getattr(self, name) for name in Launches.__slots__))


# What encodes the message of a parameter sync, before the ranks agree on sizes: three kernels and a prefix sum, the
# header, the digest and the checksum, and two copies. One slice has one message.
MESSAGE_ENCODING = Launches(codecs=5, operations=4)
# What decodes the messages of all other members together: digests, checksums, their comparison, a prefix sum and the
# decoding. The outcomes are copied to the host.
_MESSAGES_DECODING = Launches(codecs=4, operations=4)


@lru_cache(maxsize=4096)
def launches_of(transfer: Transfer) -> Launches:
    """Return what one rank launches to execute `transfer`, apart from what the engine does before and after it."""
    if transfer.kind in BETWEEN_HOSTS:
        return Launches()  # the hosts compare over gloo
    op, codec = transfer.move.op, transfer.transport.encoding
    if isinstance(transfer.payload, Matrices):
        return _of_owners(transfer, transfer.payload)
    if op is Op.SEND:
        coded = codec is not None or transfer.transport.low_rank is not None
        return Launches(batches=1, messages=1, codecs=int(coded))
    if op is Op.ALL_REDUCE and transfer.route != "flat":
        return _reduction(transfer) + _gather(transfer)
    return _gather(transfer) if op is Op.ALL_GATHER else _reduction(transfer)


def _gather(transfer: Transfer) -> Launches:
    codec, payload = transfer.transport.encoding, transfer.payload
    if transfer.agrees_on_sizes:
        return _MESSAGES_DECODING + _moved(transfer, Op.ALL_GATHER)
    if codec is None:
        return _moved(transfer, Op.ALL_GATHER)
    rests = isinstance(payload, Range) and payload.encoded and transfer.move.op is Op.ALL_GATHER
    coded = Launches(codecs=1, operations=1) if rests else Launches(codecs=2)
    return coded + _moved(transfer, Op.ALL_GATHER)


def _reduction(transfer: Transfer) -> Launches:
    hops = hops_of(transfer.route, transfer.grid)
    if not hops:
        return _moved(transfer, transfer.move.op)
    stages = transfer.parts
    if transfer.form is Form.COLLECTIVES:
        moved = Launches(calls=stages * len(hops))
    else:
        moved = Launches(batches=stages * len(hops), messages=2 * stages * sum(size - 1 for size in hops))
    if transfer.transport.encoding is not None:  # packed, summed after each hop
        return moved + Launches(codecs=stages * (1 + len(hops)))
    sums = 2 if transfer.dtype in NARROW else 1
    return moved + Launches(operations=stages * (1 + sums * len(hops)))


def _moved(transfer: Transfer, op: Op) -> Launches:
    """Return the launches of an all-gather, a reduce-scatter or a flat all-reduce, without codecs."""
    grid, route, slots = transfer.grid, transfer.route, transfer.move.groups[0].slots
    even = transfer.transport.encoding is not None or transfer.elements % transfer.move.members == 0
    if transfer.form is Form.MESSAGES or not (even or op is Op.ALL_REDUCE):
        found = phases(op, route, grid, transfer.parts)
        messages = 2 * sum(p.messages_out + p.messages_inside for p in found)
        return Launches(batches=sum(p.rounds for p in found), messages=round(messages))
    if route not in ("hierarchical", "two-hop"):
        ordered = op is Op.ALL_REDUCE or transfer.move.groups[0].in_order
        return Launches(calls=1, operations=int(not ordered))
    order = order_of(slots, grid)
    together = grid.nodes if order is Order.ROWS else 0
    return Launches(calls=2, together=together, operations=int(order is Order.OTHER))


def _of_owners(transfer: Transfer, payload: Matrices) -> Launches:
    """Return the launches of the rank that has most messages."""
    assert transfer.move.op in WITH_OWNERS
    ends: Counter[int] = Counter()
    for message in owner_messages(transfer.move.op, payload.matrices, transfer.move.groups[0]):
        ends.update((message.source, message.target))
    most = max(ends.values(), default=0)
    codecs = most if transfer.transport.encoding is not None else 0
    return Launches(batches=1 if most else 0, messages=most, codecs=codecs, operations=len(payload.matrices))
