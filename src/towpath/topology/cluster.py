"""The shape of a cluster, and the ranks over which one copy is sharded. This file does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from towpath.errors import ConfigError


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
        ranks_per_node: The number of ranks on each node.
        nodes_per_rack: The number of nodes in each rack. None means that all nodes are in one rack.
    """

    nodes: int
    ranks_per_node: int
    nodes_per_rack: int | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "nodes_per_rack"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (value is None and name == "nodes_per_rack"):
                raise ConfigError(f"Topology: {name} must be a whole number of at least 1, got {value!r}.")
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
        return self.nodes * self.ranks_per_node

    @property
    def whole(self) -> Extent:
        """The extent that spans every rank."""
        return Extent(self.ranks_per_node, self.nodes)

    @property
    def racks(self) -> int:
        """The number of racks."""
        return self.nodes // (self.nodes_per_rack or self.nodes)

    def node_of(self, rank: int) -> int:
        """Return the node of a global rank."""
        return rank // self.ranks_per_node

    def rack_of(self, node: int) -> int:
        """Return the rack of a node."""
        return node // (self.nodes_per_rack or self.nodes)

    def local_of(self, rank: int) -> int:
        """Return the local rank of a global rank."""
        return rank % self.ranks_per_node

    def of(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of some of the ranks, equally many on each of their nodes.

        If they are not equally many in each rack, racks become smaller until they are.
        """
        nodes = [node for node, _ in groupby(map(self.node_of, ranks))]
        runs = [len(list(run)) for _, run in groupby(map(self.rack_of, nodes))]
        return Topology(len(nodes), len(ranks) // len(nodes), math.gcd(*runs))

    @staticmethod
    def detect() -> Topology:
        """Return the topology of the running job, as the launcher placed its ranks on nodes.

        Racks are those that `TOWPATH_RACK` names. Without a process group, it is a world of one. With one, every rank
        must call it, as it is a collective.

        Raises:
            ConfigError: The nodes have different numbers of ranks, or the ranks of a node are not consecutive.
        """
        from towpath.topology.groups import detect_shape  # imports torch, which planning does not need

        return Topology(*detect_shape())

    @property
    def words(self) -> str:
        """The nodes and ranks in words, such as "2 nodes of 4 ranks"."""
        return f"{counted(self.nodes, 'node')} of {counted(self.ranks_per_node, 'rank')}"

    def __str__(self) -> str:
        racks = f" in racks of {self.nodes_per_rack}" if self.nodes_per_rack else ""
        return f"{self.nodes} × {self.ranks_per_node}{racks}"
