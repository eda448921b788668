"""Where ranks are that do not all do the same: what they share has a name for each node, rank and host.

Copies of a stage are alike, and so are the nodes that hold them: of each stage the first rank's stands for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from towpath.sim.hardware import CABLE, INSIDE, PROCESSOR, SPINE, Hardware


@dataclass(frozen=True, slots=True)
class Place:
    """Of the copies of a stage: the node and the host of the first, and how many of them are there. Without a name all
    ranks do the same, and what they share is called as it is."""

    name: str = ""
    node: int = 0
    host: int = 0
    ranks_on_node: int = 1
    ranks_on_host: int = 1

    def named(self, needs: Mapping[str, float]) -> Mapping[str, float]:
        """A collective leaves its node and enters it alike."""
        if not self.name:
            return needs
        names = {CABLE: (self.leaving, self.entering), PROCESSOR: (self.processor,), INSIDE: (self.inside,)}
        names[SPINE] = (self.spine,)
        return {name: amount for resource, amount in needs.items() for name in names[resource]}

    @property
    def leaving(self) -> str:
        return f"{CABLE} out of node {self.node}"

    @property
    def entering(self) -> str:
        return f"{CABLE} into node {self.node}"

    @property
    def processor(self) -> str:
        return f"{PROCESSOR} of host {self.host}"

    @property
    def spine(self) -> str:
        return f"{SPINE} of node {self.node}"

    @property
    def inside(self) -> str:
        return f"{INSIDE}, {self.name}"

    def capacities(self, hardware: Hardware) -> dict[str, float]:
        whole = hardware.capacities
        found = {self.leaving: whole[CABLE], self.entering: whole[CABLE]}
        found |= {self.inside: whole[INSIDE], self.processor: whole[PROCESSOR]}
        if SPINE in whole:
            found[self.spine] = whole[SPINE]
        return found


HERE = Place()


def place_of(name: str, ranks: Sequence[int], hardware: Hardware) -> Place:
    topology = hardware.topology
    node = topology.node_of(ranks[0])
    on_node = sum(topology.node_of(rank) == node for rank in ranks)
    if hardware.cores is None:  # each rank has a device of its own
        return Place(name, node, ranks[0], on_node, 1)
    host = ranks[0] // hardware.ranks_sharing
    return Place(name, node, host, on_node, sum(rank // hardware.ranks_sharing == host for rank in ranks))
