"""Which class executes a transfer on a backend."""

from __future__ import annotations

from dataclasses import replace

import torch

from towpath.collectives.all_to_all import AllToAllReduceScatter
from towpath.collectives.collective import Binding, Collective, Members
from towpath.collectives.encoded import EncodedAllGather, encoded_binding
from towpath.collectives.flat import FlatAllGather, FlatAllReduce, FlatMaximum, FlatReduceScatter
from towpath.collectives.point_to_point import PointToPoint
from towpath.collectives.reduce_then_gather import ReduceThenGather
from towpath.core.routes import Op, hops_of, travelled
from towpath.core.strategy import Kind
from towpath.core.transfer import Transfer

_FLAT = {Op.ALL_GATHER: FlatAllGather, Op.REDUCE_SCATTER: FlatReduceScatter, Op.ALL_REDUCE: FlatAllReduce}


def select(transfer: Transfer, members: Members, backend: str, device: torch.device) -> Collective:
    if transfer.kind is Kind.USAGE:
        return FlatMaximum(members)
    return bind(Binding.of(transfer), members, backend, device)


def bind(binding: Binding, members: Members, backend: str, device: torch.device) -> Collective:
    op, route = binding.op, travelled(binding.route, members.grid)
    if op is Op.ALL_GATHER and binding.codec is not None:
        inner = bind(encoded_binding(binding.codec, binding, members), members, backend, device)
        return EncodedAllGather(binding.codec, binding, members, inner, device)
    if route == "flat" and not _better_walked(binding, members, backend):
        return _FLAT[op](members)
    if not hops_of(route, members.grid) or op is Op.ALL_GATHER:
        return PointToPoint(route, binding, members)
    reduce = AllToAllReduceScatter(route, binding, members, device)
    if op is Op.REDUCE_SCATTER:
        return reduce
    return ReduceThenGather(
        binding, members, reduce, bind(replace(binding, op=Op.ALL_GATHER), members, backend, device)
    )


def has_group_between_nodes(route: str, backend: str) -> bool:
    """Whether what goes between nodes has a process group of its own, so that it overlaps what goes inside. NCCL runs a
    group's messages one after the other; gloo does not. Of routes of one kind of link there is nothing to overlap."""
    return backend == "nccl" and route not in ("flat", "ring")


def _better_walked(binding: Binding, members: Members, backend: str) -> bool:
    """The backends' own need equal slices. And gloo's reduce-scatter is an all-reduce inside and sends twice the bytes;
    its gather allocates a copy of the whole region each time, which leaves ever more holes in the heap."""
    if binding.op is Op.ALL_REDUCE:
        return False
    return backend == "gloo" or binding.elements % len(members.group.ranks) != 0
