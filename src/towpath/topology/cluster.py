"""The shape of a cluster, and how far one copy of something is spread over it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from towpath.errors import TopologyError


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Over how many ranks one full copy is spread: `local` ranks of a node, on `nodes` nodes."""

    local: int
    nodes: int = 1

    def __post_init__(self) -> None:
        for name, value in (("local", self.local), ("nodes", self.nodes)):
            if type(value) is not int or value < 1:
                raise TopologyError(f"Extent: {name} must be a whole number of at least 1, got {value!r}.")

    @property
    def size(self) -> int:
        return self.local * self.nodes

    def divides(self, other: Extent) -> bool:
        return other.local % self.local == 0 and other.nodes % self.nodes == 0

    def __str__(self) -> str:
        return f"{self.local}×{self.nodes}"


@dataclass(frozen=True, slots=True)
class Topology:
    """`nodes` nodes of `ranks_per_node` ranks; global rank = node · ranks_per_node + local rank.

    A node is any group of ranks whose inner links are the faster ones.
    """

    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("ranks_per_node", self.ranks_per_node)):
            if type(value) is not int or value < 1:
                raise TopologyError(f"Topology: {name} must be a whole number of at least 1, got {value!r}.")

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def whole(self) -> Extent:
        """The extent that spans every rank."""
        return Extent(self.ranks_per_node, self.nodes)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_of(self, rank: int) -> int:
        return rank % self.ranks_per_node

    @staticmethod
    def detect() -> Topology:
        """The topology of the running job: its nodes as the launcher placed them, or a world of one.

        Needs every rank of the job, like any collective, once `init_process_group` was called.
        """
        from towpath.topology import groups  # torch stays out of planning

        return Topology(*groups.detect_shape())

    def __str__(self) -> str:
        return f"{self.nodes} × {self.ranks_per_node}"
