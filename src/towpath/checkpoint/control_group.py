"""How the ranks agree about checkpoints: over a group of its own, on the CPU, beside whatever the training sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from towpath.topology.groups import Groups

Value = TypeVar("Value")


class ControlGroup:
    """Every rank must call alike. Without other ranks it is one of one."""

    def __init__(self, groups: Groups, name: str) -> None:
        self.rank, self.world = groups.rank, groups.world
        everyone = (tuple(range(self.world)),)
        self.group = groups.of(everyone, name, backend="gloo") if self.world > 1 else None
        self.lost = False
        self._groups = groups

    def leave(self) -> None:
        """After a failure that the others may not have met: they would wait for this rank until their time is over."""
        group, self.group, self.lost = self.group, None, True
        if group is not None:
            self._groups.leave(group)

    def all(self, mine: Value) -> list[Value]:
        """What every rank says, by rank."""
        if self.group is None:
            return [mine]
        said: list[Any] = [None] * self.world
        dist.all_gather_object(said, mine, group=self.group)
        return said

    def first(self, mine: Callable[[], Value]) -> Value:
        """What rank 0 finds; the others do not look."""
        found: list[Any] = [mine() if self.rank == 0 else None]
        if self.group is not None:
            dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]

    def collect(self, mine: Value) -> list[Value] | None:
        """What every rank says, told to rank 0 alone."""
        if self.group is None:
            return [mine]
        said: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(mine, said, group=self.group, group_dst=0)
        return said
