"""Walks the plan of any route, step by step, over point-to-point messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import final

import torch

from towpath.collectives.collective import Binding, Collective, Members, Scratch
from towpath.collectives.messages import Message, Posted, post
from towpath.spec.routes import Op, Send, cell_elements, cells_of, piece_bounds, sends


@dataclass(frozen=True, slots=True)
class _Passage:
    """A message of the plan at one of its ends: where it lies in the region, and where it arrives if it is added."""

    leaves: bool
    peer: int
    start: int
    end: int
    cell: int | None


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is posted in the same step, due in the same step, and goes through the same process group."""

    step: int
    until: int
    crossing: bool
    passages: tuple[_Passage, ...]


@final
class Walk(Collective):
    """In each step: waits for what is due, adds what is to be added, and posts what the plan posts then."""

    def __init__(self, route: str, binding: Binding, members: Members, scratch: Scratch) -> None:
        self._route, self._binding, self._members, self._scratch = route, binding, members, scratch
        plan = [
            s
            for s in sends(binding.op, route, members.group, members.nodes)
            if members.position in (s.source, s.target)
        ]
        self._cell = cell_elements(binding.elements, len(members.group.ranks), plan[0].parts if plan else 1)
        self._batches = self._in_batches(plan)
        self._cells = 1 + max((p.cell for b in self._batches for p in b.passages if p.cell is not None), default=-1)

    def _in_batches(self, plan: list[Send]) -> list[_Batch]:
        members, position = self._members, self._members.position
        added = [s for s in plan if s.adds and s.target == position]
        cells = dict(zip(added, cells_of(added), strict=True))

        def passage(send: Send) -> _Passage:
            leaves = send.source == position
            start, end = piece_bounds(self._binding.elements, len(members.group.ranks), send.piece)
            return _Passage(leaves, send.target if leaves else send.source, start, end, cells.get(send))

        def batch_of(send: Send) -> tuple[int, int, bool]:
            return send.step, send.until, members.crosses(send.target if send.source == position else send.source)

        batches: list[_Batch] = []
        for (step, until, crossing), posted in groupby(sorted(plan, key=batch_of), key=batch_of):
            # A region of fewer elements than parts has empty ones: both ends leave them out.
            passages = tuple(p for p in map(passage, posted) if p.start < p.end)
            if passages:
                batches.append(_Batch(step, until, crossing, passages))
        return batches

    def run(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        op, mine = self._binding.op, self._binding.own_slice(region, self._members)
        in_place = op is Op.ALL_REDUCE or mine.data_ptr() == shard.data_ptr()
        if op is Op.ALL_GATHER and not in_place:
            mine.copy_(shard)
        wire = self._scratch.take(self._cells * self._cell, region.dtype) if self._cells else region
        under_way: list[tuple[_Batch, Posted]] = []
        for batch in self._batches:
            under_way = self._complete(region, wire, under_way, before=batch.step)
            under_way.append((batch, self._post(region, wire, batch)))
        self._complete(region, wire, under_way)
        if op is Op.REDUCE_SCATTER and not in_place:
            shard.copy_(mine)

    def _post(self, region: torch.Tensor, wire: torch.Tensor, batch: _Batch) -> Posted:
        messages = [Message(p.leaves, p.peer, self._content(region, wire, p)) for p in batch.passages]
        where = f"{self._binding.op.value} by {self._route}, step {batch.step}"
        return post(messages, self._members, where, batch.crossing)

    def _complete(
        self,
        region: torch.Tensor,
        wire: torch.Tensor,
        under_way: Iterable[tuple[_Batch, Posted]],
        before: int | None = None,
    ) -> list[tuple[_Batch, Posted]]:
        """Wait for what is due by step `before` (None: for all), and add what came; what remains under way."""
        remaining: list[tuple[_Batch, Posted]] = []
        for batch, posted in under_way:
            if before is not None and batch.until > before:
                remaining.append((batch, posted))
                continue
            posted.wait()
            for passage in batch.passages:
                if passage.cell is not None:
                    region[passage.start : passage.end].add_(self._content(region, wire, passage))
        return remaining

    def _content(self, region: torch.Tensor, wire: torch.Tensor, passage: _Passage) -> torch.Tensor:
        if passage.cell is None:
            return region[passage.start : passage.end]
        start = passage.cell * self._cell
        return wire[start : start + passage.end - passage.start]
