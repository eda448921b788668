"""The shape of a cluster, and the ranks over which one copy is sharded. This file does not import torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

from towpath.errors import ConfigError

# Sets of ranks in which every rank of a job is once.
RankSets = tuple[tuple[int, ...], ...]

# The presets for nodes of unequal size. All their groups span the job, or are one rank.
FLAT = ("ddp", "zero1", "zero2", "zero3")
_MOST_NAMED = 4  # nodes of one size, in an error


def counted(count: int, what: str) -> str:
    """Return a number of things, such as "1 node" or "4 ranks"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """The group of ranks that hold one full copy of something in shards.

    Attributes:
        local: The number of ranks on each node.
        nodes: The number of nodes.
    """

    local: int
    nodes: int = 1

    def __post_init__(self) -> None:
        for name, value in (("local", self.local), ("nodes", self.nodes)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"Extent: {name} must be a whole number of at least 1, got {value!r}.")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.local * self.nodes

    def divides(self, other: Extent) -> bool:
        """Return whether `other` consists of a whole number of groups of this extent, on nodes and in nodes."""
        return other.local % self.local == 0 and other.nodes % self.nodes == 0

    def __str__(self) -> str:
        return f"{self.local}×{self.nodes}"


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes of a job and the ranks on each. The global rank is node · ranks_per_node + local rank.

    A node is any group of ranks whose links to each other are faster than their links to other groups. A rack is a
    group of nodes that share fewer links to other racks, such as the nodes of one leaf switch below spine switches. The
    nodes of a rack have consecutive numbers, so that a ring over all nodes leaves each rack once.

    Attributes:
        nodes: The number of nodes.
        ranks_per_node: The number of ranks on each node. If nodes differ, a tuple with one number for each node, such
            as (1, 3). Only `ddp` and `zero1` to `zero3` train on such nodes.
        nodes_per_rack: The number of nodes in each rack. None means that all nodes are in one rack.
    """

    nodes: int
    ranks_per_node: int | Any  # typed so that code for equal nodes need not check; `check_equal` guards it
    nodes_per_rack: int | None = None

    def __post_init__(self) -> None:
        per_node = self.ranks_per_node
        sizes: tuple[Any, ...] = tuple(per_node) if isinstance(per_node, (tuple, list)) else (per_node,)
        each = (("ranks_per_node", size) for size in sizes)
        for name, value in (("nodes", self.nodes), *each, ("nodes_per_rack", self.nodes_per_rack)):
            if (type(value) is not int or value < 1) and not (value is None and name == "nodes_per_rack"):
                raise ConfigError(f"Topology: {name} must be a whole number of at least 1, got {value!r}.")
        if sizes != (per_node,):
            if len(sizes) != self.nodes:
                raise ConfigError(
                    f"Topology: ranks_per_node={per_node} has {counted(len(sizes), 'number')}: expected one for each "
                    f"of {counted(self.nodes, 'node')}."
                )
            object.__setattr__(self, "ranks_per_node", sizes[0] if len({*sizes}) == 1 else sizes)
        if self.nodes_per_rack is not None and self.nodes % self.nodes_per_rack:
            fewer = self.nodes // self.nodes_per_rack * self.nodes_per_rack
            choices = f"{fewer} or {fewer + self.nodes_per_rack}" if fewer else f"{self.nodes_per_rack}"
            raise ConfigError(
                f"Topology: racks of {self.nodes_per_rack} nodes do not divide {self.nodes} nodes. Use equally many "
                f"nodes of each rack, such as {choices} nodes."
            )
        if self.nodes_per_rack == self.nodes:  # equal topologies are equal objects
            object.__setattr__(self, "nodes_per_rack", None)

    @property
    def world(self) -> int:
        """The number of ranks of the job."""
        return self.nodes * self.ranks_per_node if self.is_equal else sum(self.sizes)

    @property
    def is_equal(self) -> bool:
        """True if all nodes have the same number of ranks."""
        return isinstance(self.ranks_per_node, int)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks on each node."""
        per_node: Any = self.ranks_per_node
        return (per_node,) * self.nodes if self.is_equal else per_node

    @property
    def rectangle(self) -> tuple[int, int]:
        """The nodes, and the ranks on each, that extents divide. Unequal nodes count as one, since no extent does."""
        return (self.nodes, self.ranks_per_node) if self.is_equal else (1, self.world)

    @property
    def whole(self) -> Extent:
        """The extent that spans every rank."""
        nodes, ranks = self.rectangle
        return Extent(ranks, nodes)

    @property
    def racks(self) -> int:
        """The number of racks."""
        return self.nodes // (self.nodes_per_rack or self.nodes)

    def node_of(self, rank: int) -> int:
        """Return the node of a global rank."""
        return rank // self.ranks_per_node if self.is_equal else bisect_right(_firsts(self.ranks_per_node), rank) - 1

    def rack_of(self, node: int) -> int:
        """Return the rack of a node."""
        return node // (self.nodes_per_rack or self.nodes)

    def local_of(self, rank: int) -> int:
        """Return the local rank of a global rank."""
        return rank % self.ranks_per_node if self.is_equal else rank - _firsts(self.ranks_per_node)[self.node_of(rank)]

    def of(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of some of the ranks.

        If they are not equally many in each rack, racks become smaller until they are.
        """
        sizes = {node: len(list(run)) for node, run in groupby(map(self.node_of, ranks))}
        runs = [len(list(run)) for _, run in groupby(map(self.rack_of, sizes))]
        return Topology(len(sizes), (*sizes.values(),), math.gcd(*runs))

    def check_equal(self, what: str) -> None:
        """Raise `ConfigError` if nodes have unequal numbers of ranks, and `what` needs equal ones."""
        if self.is_equal:
            return
        nodes: dict[int, list[int]] = {}
        for node, size in enumerate(self.sizes):
            nodes.setdefault(size, []).append(node)
        told = [f"{counted(size, 'rank')} on {_nodes_in_words(each)}" for size, each in nodes.items()]
        raise ConfigError(
            f"{what} needs the same number of ranks on each node; got {' and '.join(told)}. Start the same number on "
            f"each node. Unequal nodes take {', '.join(FLAT[:-1])} or {FLAT[-1]}, by the route 'flat', 'ring' or "
            "'one-hop', without outer, protect and pipelines."
        )

    @staticmethod
    def detect() -> Topology:
        """Return the topology of the running job, as the launcher placed its ranks on nodes.

        Racks are those that `TOWPATH_RACK` names. Without a process group, it is a world of one. With one, every rank
        must call it, as it is a collective.

        Raises:
            ConfigError: The ranks of a node are not consecutive.
        """
        from towpath.topology.groups import detect_shape  # imports torch, which planning does not need

        return Topology(*detect_shape())

    @staticmethod
    def parse(text: str) -> Topology:
        """Return the topology of a text: nodes and the ranks of each ("2x4"), or the ranks of every node ("1+3")."""
        nodes, _, ranks = text.partition("x")
        sizes = tuple(map(int, text.split("+"))) if "+" in text else ()
        return Topology(len(sizes), sizes) if sizes else Topology(int(nodes), int(ranks))

    @property
    def words(self) -> str:
        """The nodes and ranks in words, such as "2 nodes of 4 ranks"."""
        ranks = counted(self.ranks_per_node, "rank") if self.is_equal else f"{self.shape} ranks"
        return f"{counted(self.nodes, 'node')} of {ranks}"

    @property
    def shape(self) -> str:
        """The nodes × the ranks of each, such as "2 × 4". Of unequal nodes, the ranks of each, such as "1 + 3"."""
        return f"{self.nodes} × {self.ranks_per_node}" if self.is_equal else " + ".join(map(str, self.sizes))

    def __str__(self) -> str:
        return self.shape + (f" in racks of {self.nodes_per_rack}" if self.nodes_per_rack else "")


@lru_cache(maxsize=64)
def _firsts(sizes: tuple[int, ...]) -> list[int]:
    """Return the first rank of each node."""
    return list(accumulate(sizes[:-1], initial=0))


def _nodes_in_words(nodes: Sequence[int]) -> str:
    more = f" and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else ""
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes[:_MOST_NAMED]))}{more}"
