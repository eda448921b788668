"""The candidates of a search: all legal placements with codecs, exact transports and batchings, and their routes.

Exact transports are lossless, so each candidate that could use them has two forms, with them and without. A form has
exact transports for the kinds of transfers that are faster so, each for itself. Each kind of transfer uses the route
that is fastest while nothing else runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any

from towpath.core.placement import Placement, legal_placements
from towpath.core.presets import name_of
from towpath.core.routes import ALL_TO_ALL, ROUTES, Op, Route
from towpath.core.strategy import EXACT_KINDS, GRADIENTS, WEIGHTS, WITH_TRANSPORT, Strategy, TransferKind
from towpath.core.transport import Transport
from towpath.plan.cluster_file import Cluster
from towpath.plan.model import Model
from towpath.plan.prediction import Batching
from towpath.plan.request import Request
from towpath.plan.transfer_costs import MoveShape, TransferShape, move_shapes, phase_costs, seconds_alone

_ALONE = "alone"  # the key of a transfer's seconds while nothing else runs
_EVERY_MICRO_STEP = (TransferKind.GATHER, TransferKind.BACKWARD_GATHER, TransferKind.REDUCE)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A combination that the solver considers. `weights` and `gradients` are codecs between nodes, or "none".

    With `exact`, what no codec encodes is sent exactly where that is faster.
    """

    placement: Placement
    weights: str
    gradients: str
    batching: Batching
    exact: bool = False


class Candidates:
    """The candidates for a model on a cluster, their strategies, and what they send at least."""

    def __init__(self, model: Model, cluster: Cluster, request: Request) -> None:
        self._request, self._hardware, self._topology = request, cluster.hardware, cluster.topology
        self._compute, self._reduce, _ = request.precision.dtypes(request.own)
        # Units by size, and whether they are gathered once, for both passes. Only trainable parameters count, because
        # frozen ones may be sharded inside the node.
        self._units = Counter(
            (unit.trainable if model.trainable else unit.numel, unit.spec.root or unit.spec.leaf)
            for unit in model.units
        )
        self._largest = max(numel for numel, _ in self._units)
        self._costs: dict[object, Mapping[str, float]] = {}
        self._exact: dict[object, bool] = {}
        self._strategies: dict[Candidate, Strategy] = {}

    def __iter__(self) -> Iterator[Candidate]:
        """Yield all candidates, whether or not they fit into memory."""
        weights, gradients = ("none", *self._request.weights), ("none", *self._request.gradients)
        batchings = self._request.batchings(self._topology.world)
        for placement in legal_placements(self._topology, copies=True):
            shapes = move_shapes(placement, self._topology)
            crosses = {kind: any(s.grid.nodes > 1 for s in found) for kind, found in shapes.items()}
            mine = weights if any(crosses[kind] for kind in WEIGHTS) else ("none",)
            theirs = gradients if any(crosses[kind] for kind in GRADIENTS) else ("none",)
            exact = {kind for kind in EXACT_KINDS if self._is_exact(kind, shapes[kind])}
            for w, g, batching in product(mine, theirs, batchings):
                for form in self._forms(exact, w, g):
                    yield Candidate(placement, w, g, batching, form)

    def strategy(self, candidate: Candidate) -> Strategy:
        """Return the strategy of a candidate."""
        key = replace(candidate, batching=Batching(1, 1))
        if key not in self._strategies:
            transports: dict[str, Any] = {}
            for kind in WITH_TRANSPORT:
                if shapes := move_shapes(candidate.placement, self._topology)[kind]:
                    fastest = self._fastest(kind, shapes, candidate)
                    if fastest.changes:
                        plain = self._fastest(kind, shapes, replace(candidate, gradients="none"))
                        fastest = replace(fastest, plain_route=plain.route, exact=plain.exact)
                    transports[kind.value] = fastest
            name = name_of(candidate.placement, self._topology)
            made = Strategy(self._topology, candidate.placement, name, **transports, offload=self._request.offload)
            self._strategies[key] = made
        return self._strategies[key]

    def busy(self, candidate: Candidate) -> Counter[str]:
        """Return the seconds for which transfers of a step keep each resource busy at least: needs over rate."""
        busy: Counter[str] = Counter()
        for kind, shapes in move_shapes(candidate.placement, self._topology).items():
            if not shapes or kind not in WITH_TRANSPORT:
                continue
            times = candidate.batching.micro_steps if kind in _EVERY_MICRO_STEP else 1
            for (numel, gathered_once), count in self._units.items():
                if numel and not (gathered_once and kind is TransferKind.BACKWARD_GATHER):
                    for name, seconds in self._least(kind, shapes, candidate, numel).items():
                        busy[name] += times * count * seconds  # pyright: ignore[reportArgumentType]
        del busy[_ALONE]
        return busy

    def _least(
        self, kind: TransferKind, shapes: Sequence[MoveShape], candidate: Candidate, numel: int
    ) -> Mapping[str, float]:
        """Return the least that a transfer needs of each resource, over all transports."""
        codec = candidate.weights if kind in WEIGHTS else candidate.gradients
        key = (kind, shapes, codec, candidate.exact, numel)
        if key not in self._costs:
            transports = list(self._transports(kind, shapes, candidate))
            if self._request.interleaved and kind in GRADIENTS:  # the second half of the run is without codecs
                transports += self._transports(kind, shapes, replace(candidate, gradients="none"))
            costs = [self._cost(kind, shapes, transport, numel) for transport in transports]
            self._costs[key] = {name: min(cost[name] for cost in costs) for name in costs[0]}
        return self._costs[key]

    def _fastest(self, kind: TransferKind, shapes: Sequence[MoveShape], candidate: Candidate) -> Transport:
        """Return the transport that is fastest alone for the largest unit."""
        return min(
            self._transports(kind, shapes, candidate),
            key=lambda transport: self._cost(kind, shapes, transport, self._largest)[_ALONE],
        )

    def _transports(self, kind: TransferKind, shapes: Sequence[MoveShape], candidate: Candidate) -> Iterator[Transport]:
        crosses = any(s.grid.nodes > 1 for s in shapes)
        codec = candidate.weights if kind in WEIGHTS else candidate.gradients
        codec = codec if crosses else "none"
        reduces = any(s.op is not Op.ALL_GATHER for s in shapes)
        if codec != "none" and reduces:
            until = self._request.interleaved // 2
            yield from (Transport(route, codec, until=until) for route in ALL_TO_ALL)
            return
        exact = codec == "none" and candidate.exact and kind in EXACT_KINDS and self._is_exact(kind, shapes)
        yield from (Transport(route, codec, exact=exact) for route in _routes(shapes))

    def _forms(self, exact: Collection[TransferKind], weights: str, gradients: str) -> tuple[bool, ...]:
        """Return the forms of candidates with these codecs: without exact transports, with them, or both."""
        codecs = {kind: gradients if kind in GRADIENTS and not self._request.interleaved else "none" for kind in exact}
        codecs |= {kind: weights for kind in exact if kind in WEIGHTS}
        if self._request.exact is False or set(codecs.values()).isdisjoint({"none"}):
            return (False,)
        return (True,) if self._request.exact else (False, True)

    def _is_exact(self, kind: TransferKind, shapes: Sequence[MoveShape]) -> bool:
        """Return whether candidates with exact transports have one for this kind of transfer.

        It can encode the largest unit, and alone it is then faster, unless the request requires it.
        """
        key = kind, tuple(shapes)
        if key not in self._exact:
            plain, exact = ([Transport(route, exact=exact) for route in _routes(shapes)] for exact in (False, True))
            encodes = any(self._shape(kind, s, t, self._largest).coding for s in shapes for t in exact)
            before, after = (
                min(self._cost(kind, shapes, t, self._largest)[_ALONE] for t in ts) for ts in (plain, exact)
            )
            self._exact[key] = encodes and (self._request.exact is True or after < before)
        return self._exact[key]

    def _cost(
        self, kind: TransferKind, shapes: Sequence[MoveShape], transport: Transport, numel: int
    ) -> Mapping[str, float]:
        """Return the seconds of a transfer alone, and those that it keeps each resource busy."""
        key = (kind, tuple(shapes), transport, numel)
        if key not in self._costs:
            costs = [
                cost
                for shape in shapes
                for cost in phase_costs(self._shape(kind, shape, transport, numel), self._hardware)
            ]
            rates = self._hardware.capacities.items()
            busy = {name: sum(cost.needs.get(name, 0.0) for cost in costs) / rate for name, rate in rates}
            self._costs[key] = busy | {_ALONE: seconds_alone(costs, self._hardware)}
        return self._costs[key]

    def _shape(self, kind: TransferKind, move: MoveShape, transport: Transport, numel: int) -> TransferShape:
        dtype = self._reduce if kind in GRADIENTS else self._compute
        if transport.exact:  # the engine pads buckets, so that slices are equal, as collectives of messages need them
            numel = ceil(numel / self._topology.world) * self._topology.world
        return TransferShape.of_move(move, transport, numel, dtype, self._hardware.form)


def _routes(shapes: Sequence[MoveShape]) -> tuple[Route, ...]:
    return ROUTES if any(not s.grid.plain for s in shapes) else ("flat",)
