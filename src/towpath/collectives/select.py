"""Which class executes a transfer on a backend."""

from __future__ import annotations

from towpath.collectives.collective import Collective, Members, Scratch
from towpath.collectives.flat import FlatAllGather, FlatAllReduce, FlatMaximum, FlatReduceScatter
from towpath.collectives.ring import Ring
from towpath.spec.routes import Op
from towpath.spec.schedule import Transfer
from towpath.spec.strategy import Kind

_FLAT = {Op.ALL_GATHER: FlatAllGather, Op.REDUCE_SCATTER: FlatReduceScatter, Op.ALL_REDUCE: FlatAllReduce}


def select(transfer: Transfer, members: Members, backend: str, scratch: Scratch) -> Collective:
    if transfer.kind is Kind.USAGE:
        return FlatMaximum(members)
    op = transfer.move.op
    # gloo's own reduce-scatter is an all-reduce inside and sends twice the bytes; and its gather into slices that
    # do not lie in rank order goes through a whole copy of the region.
    better = op is Op.REDUCE_SCATTER or not members.group.in_order
    if transfer.wire.route == "ring" or (backend == "gloo" and better):
        return Ring(op, members, scratch)
    return _FLAT[op](members)
