"""The solver: it ranks all placements, routes, codecs, micro-batches and choices of checkpointing that fit into memory.

Exact transports are lossless, so each candidate that could use them has two forms, with them and without. A form has
exact transports for the kinds of transfers that are faster so, each for itself. Both forms are candidates, and the
simulation decides between them. So they share the limit of simulations, and plans take no longer than without.

The search is branch and bound. Each candidate has a lower bound on its step time. Candidates are simulated until no
other can be better than those found, or until a limit. The next one is that of the least expected time: its bound times
a ratio that similar candidates have shown. Routes are the exception: each kind of transfer uses the route that is
fastest alone.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import ceil, inf
from typing import Any

from towpath.core.formats import Precision, item_bytes
from towpath.core.placement import Placement, legal_placements
from towpath.core.presets import name_of, strategy
from towpath.core.routes import ALL_TO_ALL, ROUTES, Op, Route
from towpath.core.schedule import depends_on_memory
from towpath.core.steady_step import Compute, Part, steady_tasks
from towpath.core.strategy import (
    AS_TRAINED,
    EXACT_KINDS,
    GRADIENTS,
    WEIGHTS,
    WITH_TRANSPORT,
    MoveShape,
    Strategy,
    TransferKind,
    move_shapes,
    offloads,
)
from towpath.core.transport import Transport
from towpath.core.unit_plan import UnitPlan, plan_unit
from towpath.core.units import BucketSpec, UnitSpec
from towpath.plan.cluster_file import Cluster
from towpath.plan.hardware import CABLE, INSIDE, PROCESSOR, TransferShape, phase_costs
from towpath.plan.model import (
    Model,
    activation_bytes,
    compute_seconds,
    engine_bytes,
    host_bytes,
    optimizer_seconds,
)
from towpath.plan.outer import Period, PeriodReplay
from towpath.plan.prediction import Batching, Infeasible, Prediction, Ranking, figures_of
from towpath.plan.replay import ComputeSeconds, Replay
from towpath.plan.request import Request
from towpath.plan.simulated_engine import KERNELS_OF_A_PARAMETER
from towpath.plan.timeline import Timeline
from towpath.topology.cluster import Extent, Topology

# At most this many micro-steps are replayed. The others of a step are like the one before the last.
_REPLAYED = 3
# The default limit for the number of candidates that are replayed.
MOST = 60

# A strategy, and the plans of all units.
_Phase = tuple[Strategy, list[UnitPlan]]


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


def _kinds(candidate: Candidate) -> tuple[object, ...]:
    """Return the keys by which candidates are similar: the batching, the placement with codecs, and the other form."""
    placement, exact = candidate.placement, candidate.exact
    kind = placement.grads, placement.optimizer, candidate.weights, candidate.gradients, exact
    return candidate.batching, kind, replace(candidate, exact=False)


@dataclass(frozen=True, slots=True)
class _TransferSeconds:
    """The seconds of one kind of transfer of one unit: alone, and on the cable, the link inside and the processor."""

    alone: float
    busy: tuple[float, float, float]

    def mean(self, other: _TransferSeconds) -> _TransferSeconds:
        """Return the mean of both."""
        a, b, c = ((mine + theirs) / 2 for mine, theirs in zip(self.busy, other.busy, strict=True))
        return _TransferSeconds((self.alone + other.alone) / 2, (a, b, c))


class Solver:
    """Predicts and ranks strategies for a model on a cluster.

    Args:
        model: The model, from `describe_model` or `describe_module`.
        cluster: The cluster, from `load_cluster`.
        request: What one optimizer step must do, and the memory that a rank may use.
    """

    def __init__(self, model: Model, cluster: Cluster, request: Request) -> None:
        self.model, self.cluster, self.request = model, cluster, request
        self._hardware, self._topology = self.cluster.hardware, cluster.topology
        self._compute, self._reduce, self._summed = request.precision.dtypes(request.own)
        # Units by size. Only trainable parameters count, because frozen ones may be sharded inside the node. Whatever
        # they add, the bounds stay lower bounds.
        sizes = [
            (u.trainable if model.trainable else u.numel, u.spec.kept or u.spec.leaf, u.spec.kept or u.spec.lookup)
            for u in model.units[:2]
        ]
        sizes += [(u.trainable if model.trainable else u.numel, u.spec.leaf, False) for u in model.units[2:]]
        # With each size: whether the unit is gathered once, for both passes, and whether it is the first and last of a
        # step. Only the first embedding is.
        self._unit_sizes: Counter[tuple[int, bool, bool]] = Counter(size for size in sizes if size[0])
        self._costs: dict[object, _TransferSeconds] = {}
        self._exact: dict[object, bool] = {}  # by kind of transfer and its shapes: whether exact forms encode it
        # By micro-batch and checkpointing: the seconds of computation, and the bytes of activations.
        self._seconds: dict[tuple[int, bool], ComputeSeconds] = {}
        self._kept: dict[tuple[int, bool], int] = {}

    # Candidates -----------------------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[Candidate]:
        """Yield all candidates, whether or not they fit into memory."""
        weights, gradients = ("none", *self.request.weights), ("none", *self.request.gradients)
        batchings = self.request.batchings(self._topology.world)
        for placement in legal_placements(self._topology, copies=True):
            shapes = move_shapes(placement, self._topology)
            crosses = {kind: any(s.grid.nodes > 1 for s in found) for kind, found in shapes.items()}
            mine = weights if any(crosses[kind] for kind in WEIGHTS) else ("none",)
            theirs = gradients if any(crosses[kind] for kind in GRADIENTS) else ("none",)
            exact = {kind for kind in EXACT_KINDS if self._is_exact(kind, shapes[kind])}
            for w, g, batching in product(mine, theirs, batchings):
                for form in self._forms(exact, w, g):
                    yield Candidate(placement, w, g, batching, form)

    def exact_form(self, strategy: Strategy) -> Strategy:
        """Return a strategy with the exact transports that candidates of its placement can have.

        Args:
            strategy: The strategy without them.
        """
        shapes = move_shapes(strategy.placement, self._topology)
        kinds = [kind for kind in EXACT_KINDS if self._is_exact(kind, shapes[kind])]
        return replace(strategy, **{kind.value: replace(strategy.transport(kind), exact=True) for kind in kinds})

    def _forms(self, exact: Collection[TransferKind], weights: str, gradients: str) -> tuple[bool, ...]:
        """Return the forms of candidates with these codecs: without exact transports, with them, or both."""
        codecs = {kind: gradients if kind in GRADIENTS and not self.request.interleaved else "none" for kind in exact}
        codecs |= {kind: weights for kind in exact if kind in WEIGHTS}
        if self.request.exact is False or set(codecs.values()).isdisjoint({"none"}):
            return (False,)
        return (True,) if self.request.exact else (False, True)

    def _is_exact(self, kind: TransferKind, shapes: Sequence[MoveShape]) -> bool:
        """Return whether candidates with exact transports have one for this kind of transfer.

        It can encode the largest unit, and alone it is then faster, unless the request requires it.
        """
        key = kind, tuple(shapes)
        if key not in self._exact:
            numel = max(numel for numel, *_ in self._unit_sizes)
            plain, exact = (
                [Transport(route, exact=exact) for route in self._routes(shapes)] for exact in (False, True)
            )
            encodes = any(self._shape(kind, s, t, numel).exact for s in shapes for t in exact)
            seconds = [min(self._cost(kind, shapes, t, numel).alone for t in each) for each in (plain, exact)]
            self._exact[key] = encodes and (self.request.exact is True or seconds[1] < seconds[0])
        return self._exact[key]

    def strategy(self, candidate: Candidate) -> Strategy:
        """Return the strategy of a candidate. Each kind of transfer uses the route that is fastest alone."""
        numel = max(numel for numel, *_ in self._unit_sizes)  # routes are chosen for the largest unit
        transports: dict[str, Any] = {}
        for kind in WITH_TRANSPORT:
            if shapes := move_shapes(candidate.placement, self._topology)[kind]:
                fastest = self._fastest(kind, shapes, candidate, numel)
                if fastest.changes:
                    plain = self._fastest(kind, shapes, replace(candidate, gradients="none"), numel)
                    fastest = replace(fastest, plain_route=plain.route, exact=plain.exact)
                transports[kind.value] = fastest
        name = name_of(candidate.placement, self._topology)
        return Strategy(self._topology, candidate.placement, name, **transports, offload=self.request.offload)

    def _fastest(self, kind: TransferKind, shapes: Sequence[MoveShape], candidate: Candidate, numel: int) -> Transport:
        return min(
            self._transports(kind, shapes, candidate),
            key=lambda transport: self._cost(kind, shapes, transport, numel).alone,
        )

    def _transports(self, kind: TransferKind, shapes: Sequence[MoveShape], candidate: Candidate) -> Iterator[Transport]:
        crosses = any(s.grid.nodes > 1 for s in shapes)
        codec = candidate.weights if kind in WEIGHTS else candidate.gradients
        codec = codec if crosses else "none"
        reduces = any(s.op is not Op.ALL_GATHER for s in shapes)
        if codec != "none" and reduces:
            until = self.request.interleaved // 2
            yield from (Transport(route, codec, until=until) for route in ALL_TO_ALL)
            return
        exact = codec == "none" and candidate.exact and kind in EXACT_KINDS and self._is_exact(kind, shapes)
        yield from (Transport(route, codec, exact=exact) for route in self._routes(shapes))

    @staticmethod
    def _routes(shapes: Sequence[MoveShape]) -> tuple[Route, ...]:
        return ROUTES if any(not s.grid.plain for s in shapes) else ("flat",)

    # Bounds ---------------------------------------------------------------------------------------------------------

    def bound(self, candidate: Candidate) -> tuple[float, float]:
        """Return a lower bound on the step time of a candidate, and a number that breaks ties.

        The bound is the time of the busiest resource, or of all that cannot overlap. The tie-breaker is the time of all
        resources together.
        """
        micro_steps = candidate.batching.micro_steps
        busy, first, last = [0.0, 0.0, 0.0], 0.0, 0.0
        interleaved = self.request.interleaved and candidate.gradients != "none"
        for (numel, gathered_once, at_ends), count in self._unit_sizes.items():
            before = after = 0.0
            for kind, every_micro_step in _submitted_kinds(gathered_once):
                cost = self._cheapest(kind, candidate, numel)
                if interleaved and kind in GRADIENTS:
                    plain = self._cheapest(kind, replace(candidate, gradients="none"), numel)
                    cost = cost.mean(plain)
                times = count * (micro_steps if every_micro_step else 1)
                for resource, seconds in enumerate(cost.busy):
                    busy[resource] += times * seconds
                if at_ends:  # before the first computation, and after the last one
                    before += cost.alone if kind is TransferKind.GATHER else 0.0
                    after += cost.alone if kind in GRADIENTS else 0.0
            first, last = max(first, before), max(last, after)
        on_host = offloads(self.request.offload, "optimizer")
        seconds = self._computing(candidate.batching, candidate.placement.optimizer.size, on_host)
        computed = micro_steps * seconds.micro_step + seconds.optimizer
        worked = micro_steps * seconds.share * seconds.micro_step + seconds.optimizer
        busy[2] += self._hardware.processor(worked) / self._hardware.capacities[PROCESSOR]
        return max(*busy, first + computed + last), sum(busy)

    def _computing(self, batching: Batching, ranks_of_optimizer: int, on_host: bool) -> ComputeSeconds:
        key = (batching.micro_batch, batching.checkpointing)
        if key not in self._seconds:
            tokens = batching.micro_batch * self.model.length
            dtype = self._compute
            self._seconds[key] = compute_seconds(self.model, self.cluster, dtype, tokens, batching.checkpointing)
        elements = self.model.trainable / ranks_of_optimizer
        parameters = self.model.trainable_parameters
        own, used = self.request.own, self.request.optimizer
        optimizer = optimizer_seconds(elements, parameters, own, used, self._hardware, on_host)
        return replace(self._seconds[key], optimizer=optimizer)

    def _cheapest(self, kind: TransferKind, candidate: Candidate, numel: int) -> _TransferSeconds:
        """Return the least of each cost over all transports."""
        codec = candidate.weights if kind in WEIGHTS else candidate.gradients
        shapes = move_shapes(candidate.placement, self._topology)[kind]
        if not shapes:
            return _TransferSeconds(0.0, (0.0, 0.0, 0.0))
        key = (kind, shapes, codec, candidate.exact, numel, candidate.placement.backward_params is None)
        if key not in self._costs:
            costs = [
                self._cost(kind, shapes, transport, numel) for transport in self._transports(kind, shapes, candidate)
            ]
            least = [min(c.busy[i] for c in costs) for i in range(3)]
            self._costs[key] = _TransferSeconds(min(c.alone for c in costs), (least[0], least[1], least[2]))
        return self._costs[key]

    def _cost(
        self, kind: TransferKind, shapes: Sequence[MoveShape], transport: Transport, numel: int
    ) -> _TransferSeconds:
        key = (kind, tuple(shapes), transport, numel)
        if key not in self._costs:
            alone, busy = 0.0, [0.0, 0.0, 0.0]
            capacities = self._hardware.capacities
            for shape in shapes:
                for cost in phase_costs(self._shape(kind, shape, transport, numel), self._hardware):
                    taken = {name: need / capacities[name] for name, need in cost.needs.items()}
                    alone += cost.seconds + max(taken.values(), default=0.0)
                    for i, name in enumerate((CABLE, INSIDE, PROCESSOR)):
                        busy[i] += taken.get(name, 0.0)
            self._costs[key] = _TransferSeconds(alone, (busy[0], busy[1], busy[2]))
        return self._costs[key]

    def _shape(self, kind: TransferKind, move: MoveShape, transport: Transport, numel: int) -> TransferShape:
        dtype = self._reduce if kind in GRADIENTS else self._compute
        if transport.exact:  # the engine pads buckets, so that slices are equal, as collectives of messages need them
            numel = ceil(numel / self._topology.world) * self._topology.world
        return TransferShape.of_move(move, transport, numel, dtype, self._hardware.form)

    # Memory ---------------------------------------------------------------------------------------------------------

    def least_memory(self, candidate: Candidate) -> int:
        """Return a lower bound on the memory of a rank, without padding, wire buffers and gradient slots."""
        place, numel, trainable = candidate.placement, self.model.parameters, self.model.trainable
        compute, summed, own = map(item_bytes, (self._compute, self._summed, self.request.own))
        params_on_host = offloads(self.request.offload, "params")
        sharded = numel - trainable if params_on_host else numel
        states = sharded * compute / place.params.size + trainable * summed / place.grads.size
        has_param_sync = move_shapes(place, self._topology)[TransferKind.PARAM_SYNC]
        encoded = candidate.weights != "none" and any(shape.grid.nodes > 1 for shape in has_param_sync)
        master = self._compute != self.request.own or encoded
        held = (numel - trainable) * master
        if not offloads(self.request.offload, "optimizer"):
            kept = self.request.optimizer.states + (self._summed != self.request.own)
            held += trainable * (kept + (master or params_on_host))
        states += held * own / place.optimizer.size
        if place.backward_params is not None:
            states += numel * compute / place.backward_params.size
        return round(states) + self._activations(candidate.batching)

    def _activations(self, batching: Batching) -> int:
        key = (batching.micro_batch, batching.checkpointing)
        if key not in self._kept:
            tokens = batching.micro_batch * self.model.length
            self._kept[key] = activation_bytes(self.model, self.request.precision, tokens, batching.checkpointing)
        return self._kept[key]

    def predict_memory(self, strategy: Strategy, batching: Batching) -> dict[str, int]:
        """Predict the memory of a rank without simulating the step.

        Args:
            strategy: The strategy.
            batching: How each rank computes its share.

        Returns:
            The bytes that a rank holds at most, by part.
        """
        return self._memory(self._phases(self._with_frozen_placed(strategy, batching)), batching)

    def _memory(self, phases: Iterable[_Phase], batching: Batching) -> dict[str, int]:
        """Return what a rank holds at most, by part, in the phase that needs most."""
        held = (engine_bytes(plans, self.request.optimizer) for _, plans in phases)
        return max(held, key=lambda parts: sum(parts.values())) | {"activations": self._activations(batching)}

    def _with_frozen_placed(self, strategy: Strategy, batching: Batching) -> Strategy:
        """Place frozen parameters if the strategy does not: in each node if that fits, else like trainable ones."""
        if not depends_on_memory(strategy, [unit.spec for unit in self.model.units]):
            return strategy
        inside = replace(strategy, frozen=Extent(self._topology.ranks_per_node))
        fits = sum(self._memory(self._phases(inside), batching).values()) <= self.request.memory
        return inside if fits else replace(strategy, frozen=AS_TRAINED)

    # The search -----------------------------------------------------------------------------------------------------

    def solve(self, best: int = 10, most: int = MOST) -> Ranking | Infeasible:
        """Find the best strategies.

        Args:
            best: Number of strategies to return.
            most: Number of candidates to simulate at most. A higher limit can prove that no other candidate is faster.

        Returns:
            The ranking, or `Infeasible` if nothing fits into memory.

        Raises:
            ConfigError: If the batch cannot be divided among the ranks.
        """
        candidates = list(self.candidates())
        likely: list[Candidate] = []
        waiting: list[tuple[float, float, int, Candidate]] = []
        for candidate in candidates:
            if self.least_memory(candidate) <= self.request.memory:
                waiting.append((*self.bound(candidate), len(likely), candidate))
                likely.append(candidate)
        waiting.sort()
        found: list[Prediction] = []
        fitting = len(likely)
        in_time = {batching: self._may_launch_in_time(batching) for batching in {each.batching for each in likely}}
        # What a bound leaves out depends on the batching, and on what is sharded across nodes. So the least ratio of a
        # prediction to its bound is kept for both. A candidate of a new kind has the ratio 1, and is tried.
        ratios: dict[object, float] = {}

        def expected(number: int) -> tuple[bool, float]:
            bound, *_, candidate = waiting[number]
            ratio = max(ratios.get(key, 1.0) for key in _kinds(candidate))
            return not in_time[candidate.batching], bound * ratio

        while len(found) < most and (worth := self._worth(waiting, found, best, any(in_time.values()))):
            number = min(worth, key=expected)
            bound, *_, candidate = waiting.pop(number)
            strategy = self._with_frozen_placed(self.strategy(candidate), candidate.batching)
            if sum(self._memory(self._phases(strategy), candidate.batching).values()) > self.request.memory:
                fitting -= 1
                continue
            found.append(self.predict(strategy, candidate.batching))
            for key in _kinds(candidate):
                ratios[key] = min(ratios.get(key, inf), found[-1].seconds / bound)
        if not found:
            smallest = min(likely or candidates, key=self.least_memory)
            nearest = self.predict(self.strategy(smallest), smallest.batching)
            return Infeasible(nearest, nearest.peak_bytes - self.request.memory)
        ranked = sorted(found, key=lambda p: p.order)
        open_bound = waiting[0][0] if self._worth(waiting, found, best, any(in_time.values())) else None
        return Ranking(tuple(ranked[:best]), len(candidates), fitting, len(found), open_bound)

    def _may_launch_in_time(self, batching: Batching) -> bool:
        """Return whether launching the model's own kernels takes less time than computing."""
        if (costs := self._hardware.launching) is None:
            return True
        seconds = self._computing(batching, 1, False)
        passes = 1 + seconds.kernels(Compute(0, Part.BACKWARD))
        kernels = KERNELS_OF_A_PARAMETER * passes * sum(len(b.numels) for u in self.model.units for b in u.spec.buckets)
        return kernels * costs.operation < seconds.micro_step

    @staticmethod
    def _worth(waiting: Sequence[tuple[Any, ...]], found: Sequence[Prediction], best: int, in_time: bool) -> range:
        """Return the indices of those waiting, sorted by bound, that can still be among the best.

        If some may launch `in_time`, those that do not come after them.
        """
        ordinary = [p.seconds for p in found if not (in_time and p.launches_too_long)]
        if len(ordinary) < best:
            return range(len(waiting))
        limit = heapq.nsmallest(best, ordinary)[-1]
        return range(bisect_left(waiting, limit, key=lambda entry: entry[0]))

    def predict(self, strategy: Strategy, batching: Batching) -> Prediction:
        """Simulate one optimizer step of a strategy.

        Args:
            strategy: The strategy.
            batching: How each rank computes its share. Of many micro-steps, only the first few are simulated.

        Returns:
            The predicted step, with all codecs in use. For an interleaved request, it is the mean over the run. It may
            need more memory than there is.
        """
        if strategy.outer is not None:
            return self._predict_islands(strategy, batching)
        strategy = self._with_frozen_placed(strategy, batching)
        phases, micro_steps = self._phases(strategy), batching.micro_steps
        (_, plans), *second_half = phases
        seconds = self._computing(batching, strategy.placement.optimizer.size, strategy.optimizer_on_host)
        timeline = self._replayed(strategy, plans, seconds, micro_steps)
        for plain, plain_plans in second_half:
            other = self._replayed(plain, plain_plans, seconds, micro_steps)
            timeline = timeline.with_more(-0.5, other)  # the mean of both
        return Prediction(
            strategy,
            batching,
            computing=micro_steps * seconds.micro_step,
            memory=self._memory(phases, batching),
            host_memory=host_bytes(plans, self.request.optimizer),
            host_copy_bytes=timeline.host_bytes,
            **figures_of(timeline),
        )

    def _predict_islands(self, strategy: Strategy, batching: Batching) -> Prediction:
        """Predict the mean step of a period of outer steps. What the steps take longer counts as waiting for them."""
        island = self.of_island(strategy)
        alone = island.predict(replace(strategy, outer=None), batching)
        period = island.period(strategy, batching)
        exchanged = {TransferKind.OUTER: max(0.0, period.mean - alone.seconds)}
        islands, plan = strategy.islands, period.plan
        return replace(
            alone,
            strategy=strategy,
            seconds=period.mean,
            exposed=alone.exposed | exchanged,
            in_flight=alone.in_flight | period.in_flight,
            memory=plan.buffer_bytes(alone.memory) | plan.memory_bytes(),
            host_memory=alone.host_memory | plan.host_memory_bytes(),
            inter_bytes=islands * alone.inter_bytes + round(plan.mean_inter_bytes),
            intra_bytes=islands * alone.intra_bytes + round(plan.intra_bytes / plan.settings.every),
            saved_inter_bytes=islands * alone.saved_inter_bytes,
            saved_intra_bytes=islands * alone.saved_intra_bytes,
        )

    def of_island(self, strategy: Strategy) -> Solver:
        """Return a solver for one island of a strategy with outer steps."""
        topology = strategy.topology
        return Solver(self.model, self.cluster.on(topology.nodes, topology.ranks_per_node), self.request)

    def period(self, strategy: Strategy, batching: Batching) -> Period:
        """Simulate a period of outer steps. The solver must be for one island.

        Args:
            strategy: The strategy, with its outer steps.
            batching: How each rank computes its share.
        """
        strategy = self._with_frozen_placed(strategy, batching)
        seconds = self._computing(batching, strategy.placement.optimizer.size, strategy.optimizer_on_host)
        return PeriodReplay(strategy, self._plans(strategy), self._hardware, seconds, batching.micro_steps).run()

    def _replayed(
        self, strategy: Strategy, plans: Sequence[UnitPlan], seconds: ComputeSeconds, micro_steps: int
    ) -> Timeline:
        timeline = Replay(strategy, plans, self._hardware, seconds, min(micro_steps, _REPLAYED)).run()
        if micro_steps > _REPLAYED:  # the micro-steps in the middle are equal
            shorter = Replay(strategy, plans, self._hardware, seconds, _REPLAYED - 1).run()
            timeline = timeline.with_more(micro_steps - _REPLAYED, shorter)
        return timeline

    def timeline(self, strategy: Strategy, batching: Batching) -> Timeline:
        """Simulate every micro-step of a step, and name each unit. Use it for traces.

        Args:
            strategy: The strategy.
            batching: How each rank computes its share.

        Returns:
            All that a rank does in the step.
        """
        strategy = self._with_frozen_placed(strategy, batching)
        plans = [plan_unit(strategy, u.spec, self.request.precision, self._hardware.form) for u in self.model.units]
        seconds = self._computing(batching, strategy.placement.optimizer.size, strategy.optimizer_on_host)
        return Replay(strategy, plans, self._hardware, seconds, batching.micro_steps).run()

    def _phases(self, strategy: Strategy) -> list[_Phase]:
        """Return the phases of a run: one, or two halves that differ if the request is interleaved."""
        last = strategy.at(self.request.interleaved - 1) if self.request.interleaved else strategy
        return [(phase, self._plans(phase)) for phase in dict.fromkeys((strategy, last))]

    def _plans(self, strategy: Strategy) -> list[UnitPlan]:
        """Return the plan of each unit. Equal units share one plan."""
        made: dict[UnitSpec, UnitPlan] = {}
        plans: list[UnitPlan] = []
        for unit in self.model.units:
            key = replace(unit.spec, name="")
            if key not in made:
                made[key] = plan_unit(strategy, unit.spec, self.request.precision, self._hardware.form)
            plans.append(made[key])
        return plans


@cache
def _submitted_kinds(root: bool) -> tuple[tuple[TransferKind, bool], ...]:
    """Return the kinds of transfers that a step submits for the root or another unit, if all of its states are sharded.

    With each kind comes whether every micro-step submits it, or only one.
    """
    every_kind = strategy("paro-iig", Topology(2, 2))
    units = [UnitSpec(name, (BucketSpec((1,)),), kept=not name) for name in ("", "a", "b", "c")]
    plans = [plan_unit(every_kind, unit, Precision()) for unit in units]
    seen = {(task.kind, micro_step) for micro_step, task in steady_tasks(plans, 3) if task.unit == (0 if root else 2)}
    return tuple((kind, (kind, 1) in seen) for kind in WITH_TRANSPORT if any(k is kind for k, _ in seen))
