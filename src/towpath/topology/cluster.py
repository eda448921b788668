"""The shape of a cluster, and the ranks over which one copy is sharded. This file does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from towpath.errors import TopologyError


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
                raise TopologyError(f"Extent: {name} must be a whole number of at least 1, got {value!r}.")

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

    A node is any group of ranks whose links to each other are faster than their links to other groups.

    Attributes:
        nodes: The number of nodes.
        ranks_per_node: The number of ranks on each node.
    """

    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("ranks_per_node", self.ranks_per_node)):
            if type(value) is not int or value < 1:
                raise TopologyError(f"Topology: {name} must be a whole number of at least 1, got {value!r}.")

    @property
    def world(self) -> int:
        """The number of ranks of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def whole(self) -> Extent:
        """The extent that spans every rank."""
        return Extent(self.ranks_per_node, self.nodes)

    def node_of(self, rank: int) -> int:
        """Return the node of a global rank."""
        return rank // self.ranks_per_node

    def local_of(self, rank: int) -> int:
        """Return the local rank of a global rank."""
        return rank % self.ranks_per_node

    @staticmethod
    def detect() -> Topology:
        """Return the topology of the running job, as the launcher placed its ranks on nodes.

        Without a process group, it is a world of one. With one, every rank must call it, as it is a collective.

        Raises:
            TopologyError: The nodes have different numbers of ranks, or the ranks of a node are not consecutive.
        """
        from towpath.topology import groups  # imports torch, which planning does not need

        return Topology(*groups.detect_shape())

    def __str__(self) -> str:
        return f"{self.nodes} × {self.ranks_per_node}"
