"""Our own ring over point-to-point messages; on gloo it sends half of what the backend's reduce-scatter does."""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist

from towpath.collectives.collective import Collective, Members, Scratch
from towpath.spec.routes import Group, Op, sends


@final
class Ring(Collective):
    """Walks the plan's messages step by step: sends one slice, receives another, adds it where the step reduces."""

    def __init__(self, op: Op, members: Members, scratch: Scratch) -> None:
        self._op = op
        self._members = members
        self._scratch = scratch
        self._steps = _steps(op, members.group, members.position)

    def run(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        slices = self._members.slices(region)
        mine = slices[self._members.slot]
        in_place = self._op is Op.ALL_REDUCE or mine.data_ptr() == shard.data_ptr()
        if self._op is Op.ALL_GATHER and not in_place:
            mine.copy_(shard)
        for adds, outgoing, incoming in self._steps:
            target = slices[incoming]
            if adds:
                partial = self._scratch.take(target.numel(), target.dtype)
                self._exchange(slices[outgoing], partial)
                target.add_(partial)
            else:
                self._exchange(slices[outgoing], target)
        if self._op is Op.REDUCE_SCATTER and not in_place:
            shard.copy_(mine)

    def _exchange(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        group, count = self._members.process_group, len(self._members.group.ranks)
        successor, predecessor = ((self._members.position + step) % count for step in (1, -1))
        messages = [
            dist.P2POp(dist.isend, outgoing, group=group, group_peer=successor),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=predecessor),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()


def _steps(op: Op, group: Group, position: int) -> list[tuple[bool, int, int]]:
    """For each step of the plan: whether what arrives is added, which slice goes out, which comes in."""
    outgoing = {s.step: s.slot for s in sends(op, "ring", group) if s.source == position}
    incoming = {s.step: s.slot for s in sends(op, "ring", group) if s.target == position}
    reducing = {Op.ALL_GATHER: 0, Op.REDUCE_SCATTER: len(outgoing), Op.ALL_REDUCE: len(outgoing) // 2}[op]
    return [(step < reducing, outgoing[step], incoming[step]) for step in sorted(outgoing)]
