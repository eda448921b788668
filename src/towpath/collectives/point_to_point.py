"""Walks the plan of any route, step by step, over point-to-point messages.

A gather's first step waits for nobody: it is posted when the gather before it has posted the last of what crosses
between nodes, so that the links between nodes need not wait while nodes share out what came.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import final

import torch

from towpath.collectives.collective import Binding, Collective, Members
from towpath.collectives.messages import Message, Posted, post
from towpath.collectives.workspace import Workspace
from towpath.core.routes import Op, Send, cell_elements, cells_of, piece_bounds, sends


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
class PointToPoint(Collective):
    """In each step: waits for what is due, adds what is to be added, and posts what the plan posts then."""

    def __init__(self, route: str, binding: Binding, members: Members) -> None:
        self._route, self._binding, self._members = route, binding, members
        parts = binding.parts(members)
        plan = [
            s
            for s in sends(binding.op, route, members.group, members.nodes, parts)
            if members.position in (s.source, s.target)
        ]
        self._cell = cell_elements(binding.elements, len(members.group.ranks), parts)
        self._batches = self._in_batches(plan)
        self._first = [b for b in self._batches if b.step == self._batches[0].step]
        crossing = [i for i, b in enumerate(self._batches) if any(self._leaves_node(p) for p in b.passages)]
        self._last_crossing = crossing[-1] if crossing else len(self._batches) - 1
        self._begun: list[tuple[_Batch, Posted]] | None = None
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

    def _leaves_node(self, passage: _Passage) -> bool:
        return self._members.nodes[passage.peer] != self._members.nodes[self._members.position]

    def begin(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        if self._binding.op is Op.ALL_GATHER:
            mine = self._binding.own_slice(region, self._members)
            if mine.data_ptr() != shard.data_ptr():
                mine.copy_(shard)
            self._begun = [(batch, self._post(region, region, batch, workspace)) for batch in self._first]

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        if self._begun is None:
            self.begin(region, shard, workspace)
        under_way, self._begun = self._begun or [], None
        begun = len(under_way)
        wire = workspace.take(self._cells * self._cell, region.dtype) if self._cells else region
        for number, batch in enumerate(self._batches):
            if number >= begun:
                under_way = self._complete(region, wire, under_way, before=batch.step)
                under_way.append((batch, self._post(region, wire, batch, workspace)))
            if number == self._last_crossing:
                workspace.links_free()
        self._complete(region, wire, under_way)
        mine = self._binding.own_slice(region, self._members)
        if self._binding.op is Op.REDUCE_SCATTER and mine.data_ptr() != shard.data_ptr():
            shard.copy_(mine)

    def _post(self, region: torch.Tensor, wire: torch.Tensor, batch: _Batch, workspace: Workspace) -> Posted:
        messages = [Message(p.leaves, p.peer, self._content(region, wire, p)) for p in batch.passages]
        where = f"{self._binding.op.value} by {self._route}, step {batch.step}"
        return post(messages, self._members, where, batch.crossing, workspace.tag(self._binding.tag))

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
