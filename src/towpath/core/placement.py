"""Over how many ranks one copy of the parameters, gradients and optimizer states is spread (Lins, section IV-B)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from towpath.errors import PlacementError
from towpath.topology.cluster import Extent, Topology

LABELS = {"params": "P", "grads": "G", "optimizer": "OS", "backward_params": "backward copy"}


@dataclass(frozen=True, slots=True)
class Placement:
    """The extents of parameters, gradients, optimizer states and, for hpZ, of the copy backward gathers from."""

    params: Extent
    grads: Extent
    optimizer: Extent
    backward_params: Extent | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Extent) and not (value is None and field.name == "backward_params"):
                raise PlacementError(f"Placement: {field.name} must be a towpath.Extent, got {value!r}.")
        for coarse, fine in (("params", "grads"), ("grads", "optimizer")):
            self._require_nesting(coarse, fine)
        if self.backward_params is not None:
            self._require_nesting("backward_params", "params")

    def _require_nesting(self, coarse: str, fine: str) -> None:
        a, b = getattr(self, coarse), getattr(self, fine)
        if not a.divides(b):
            raise PlacementError(
                f"{LABELS[coarse]} {a} does not divide {LABELS[fine]} {b}: each extent must divide the next in both "
                f"coordinates (backward copy | P | G | OS). The nearest legal placement is {self._nested()}."
            )

    def _nested(self) -> str:
        """The smallest widening of the later extents that makes each divide the next, in words."""
        chain = [e for e in (self.backward_params, self.params, self.grads, self.optimizer) if e is not None]
        for i in range(1, len(chain)):
            a, b = chain[i - 1], chain[i]
            chain[i] = Extent(math.lcm(a.local, b.local), math.lcm(a.nodes, b.nodes))
        words = f"P {chain[-3]}, G {chain[-2]}, OS {chain[-1]}"
        return words if self.backward_params is None else f"{words}, backward copy {chain[0]}"

    def check(self, topology: Topology) -> None:
        """Raise PlacementError, with the rule and the nearest legal placement, unless this one fits `topology`."""
        for name, extent in self.extents():
            rule = _broken_rule(extent, topology)
            if rule is not None:
                raise PlacementError(
                    f"{LABELS[name]} {extent} on {topology.nodes} nodes of {topology.ranks_per_node} ranks: {rule}. "
                    f"The nearest legal placement is {self._nearest(topology)}."
                )

    def extents(self) -> Iterator[tuple[str, Extent]]:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                yield field.name, value

    def _nearest(self, topology: Topology) -> Placement:
        legal = legal_extents(topology)

        def distance(candidate: Placement) -> float:
            theirs = dict(candidate.extents())
            return sum(abs(math.log(e.size / theirs[name].size)) for name, e in self.extents())

        copies = [None] if self.backward_params is None else legal
        chains = (
            Placement(p, g, o, b)
            for o in legal
            for g in legal
            if g.divides(o)
            for p in legal
            if p.divides(g)
            for b in copies
            if b is None or b.divides(p)
        )
        return min(chains, key=lambda c: (distance(c), str(c)))

    def __str__(self) -> str:
        words = f"P {self.params}, G {self.grads}, OS {self.optimizer}"
        return words if self.backward_params is None else f"{words}, backward copy {self.backward_params}"


def legal_extents(topology: Topology) -> list[Extent]:
    """Every extent that a placement on `topology` may use: Lins's pre-filters (equations 5 to 7)."""
    ranks, nodes = topology.ranks_per_node, topology.nodes
    local = [Extent(r) for r in range(1, ranks + 1) if ranks % r == 0]
    return local + [Extent(ranks, n) for n in range(2, nodes + 1) if nodes % n == 0]


def legal_placements(topology: Topology, *, copies: bool = False) -> list[Placement]:
    """Every placement: P divides G divides OS (Lins, section IV-B). `copies`: with each copy for the backward pass that
    lies in fewer ranks than P, too."""
    legal = legal_extents(topology)
    found: list[Placement] = []
    for o in legal:
        for g in legal:
            for p in legal if g.divides(o) else ():
                if not p.divides(g):
                    continue
                smaller = [b for b in legal if b.divides(p) and b != p] if copies else []
                found += [Placement(p, g, o, copy) for copy in (None, *smaller)]
    return found


def _broken_rule(extent: Extent, topology: Topology) -> str | None:
    if topology.ranks_per_node % extent.local:
        return f"its {extent.local} local ranks do not divide the node's {topology.ranks_per_node}"
    if topology.nodes % extent.nodes:
        return f"its {extent.nodes} nodes do not divide the cluster's {topology.nodes}"
    if extent.nodes > 1 and extent.local != topology.ranks_per_node:
        return "an extent spans nodes only when it fills the node (Lins, equation 7)"
    return None
