"""The solver: it predicts the step of a strategy, and finds the best of all candidates that fit into memory.

Memory follows from the plans of a candidate's units, as in the engine. Each candidate that fits has a lower bound on
its step time. Candidates are replayed, those of the least bound first, until no other can be better than those found,
or until a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import ceil
from typing import Any

from towpath.core.formats import Precision
from towpath.core.placement import Placement, legal_placements
from towpath.core.presets import name_of
from towpath.core.protection import Protection, protection_of
from towpath.core.routes import ALL_TO_ALL, ROUTES, Form, Op, Route
from towpath.core.schedule import Compute, PassPart, depends_on_memory
from towpath.core.strategy import (
    AS_TRAINED,
    EXACT_KINDS,
    GRADIENTS,
    WEIGHTS,
    WITH_TRANSPORT,
    Strategy,
    TransferKind,
    offloads,
)
from towpath.core.transport import Transport
from towpath.core.unit_plan import UnitPlan, plan_unit
from towpath.core.units import UnitSpec
from towpath.outer.exchanges import plan_outer
from towpath.outer.period import Period, replay_period
from towpath.plan.bandwidth import Timeline
from towpath.plan.hardware import PROCESSOR, Cluster
from towpath.plan.model import (
    Model,
    ModelUnit,
    activation_bytes,
    compute_seconds,
    engine_bytes,
    host_bytes,
    optimizer_seconds,
)
from towpath.plan.replay import ComputeSeconds, Replay, SimulatedStage, Steps, in_our_order
from towpath.plan.request import Batching, Infeasible, Prediction, Ranking, Request
from towpath.plan.simulated_engine import KERNELS_OF_A_PARAMETER
from towpath.plan.transfer_costs import MoveShape, TransferShape, move_shapes, phase_costs, seconds_alone
from towpath.topology.cluster import Extent

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

    def codec(self, kind: TransferKind) -> str:
        """Return the codec between nodes of one kind of transfer."""
        return self.weights if kind in WEIGHTS else self.gradients


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
        # Thousands of candidates share few strategies and fewer transfers.
        self._made, self._least, self._cost = cache(self._strategy), cache(self._least_cost), cache(self._cost_of)
        self._is_exact = cache(self._encodes_faster)

    def __iter__(self) -> Iterator[Candidate]:
        """Yield all candidates, whether or not they fit into memory."""
        weights, gradients = ("none", *self._request.weights), ("none", *self._request.gradients)
        batchings = self._request.batchings(self._topology.world)
        for placement in legal_placements(self._topology, copies=True):
            shapes = move_shapes(placement, self._topology)
            mine = weights if any(_crosses(shapes[kind]) for kind in WEIGHTS) else ("none",)
            theirs = gradients if any(_crosses(shapes[kind]) for kind in GRADIENTS) else ("none",)
            exact = {kind for kind in EXACT_KINDS if self._is_exact(kind, shapes[kind])}
            for w, g, batching in product(mine, theirs, batchings):
                for form in self._forms(exact, w, g):
                    yield Candidate(placement, w, g, batching, form)

    def strategy(self, candidate: Candidate) -> Strategy:
        """Return the strategy of a candidate."""
        return self._made(replace(candidate, batching=Batching(1, 1)))

    def _strategy(self, candidate: Candidate) -> Strategy:
        transports: dict[str, Any] = {}
        for kind in WITH_TRANSPORT:
            if shapes := move_shapes(candidate.placement, self._topology)[kind]:
                fastest = self._fastest(kind, shapes, candidate.codec(kind), candidate.exact)
                if fastest.changes:
                    plain = self._fastest(kind, shapes, "none", candidate.exact)
                    fastest = replace(fastest, plain_route=plain.route, exact=plain.exact)
                transports[kind.value] = fastest
        name = name_of(candidate.placement, self._topology)
        return Strategy(self._topology, candidate.placement, name, **transports, offload=self._request.offload)

    def busy(self, candidate: Candidate) -> Counter[str]:
        """Return the seconds for which transfers of a step keep each resource busy at least: needs over rate."""
        busy: Counter[str] = Counter()
        for kind, shapes in move_shapes(candidate.placement, self._topology).items():
            if not shapes or kind not in WITH_TRANSPORT:
                continue
            times = candidate.batching.micro_steps if kind in _EVERY_MICRO_STEP else 1
            for (numel, gathered_once), count in self._units.items():
                if numel and not (gathered_once and kind is TransferKind.BACKWARD_GATHER):
                    for name, seconds in self._least(
                        kind, shapes, candidate.codec(kind), candidate.exact, numel
                    ).items():
                        busy[name] += times * count * seconds  # pyright: ignore[reportArgumentType]
        del busy[_ALONE]
        return busy

    def _least_cost(
        self, kind: TransferKind, shapes: Sequence[MoveShape], codec: str, exact: bool, numel: int
    ) -> Mapping[str, float]:
        """Return the least that a transfer needs of each resource, over all transports."""
        transports = self._transports(kind, shapes, codec, exact)
        if self._request.interleaved and kind in GRADIENTS:  # the second half of the run is without codecs
            transports += self._transports(kind, shapes, "none", exact)
        costs = [self._cost(kind, shapes, transport, numel) for transport in transports]
        return {name: min(cost[name] for cost in costs) for name in costs[0]}

    def _fastest(self, kind: TransferKind, shapes: Sequence[MoveShape], codec: str, exact: bool) -> Transport:
        """Return the transport that is fastest alone for the largest unit."""
        transports = self._transports(kind, shapes, codec, exact)
        return min(transports, key=lambda transport: self._cost(kind, shapes, transport, self._largest)[_ALONE])

    def _transports(self, kind: TransferKind, shapes: Sequence[MoveShape], codec: str, exact: bool) -> list[Transport]:
        codec = codec if _crosses(shapes) else "none"
        if codec != "none" and any(s.op is not Op.ALL_GATHER for s in shapes):
            return [Transport(route, codec, until=self._request.interleaved // 2) for route in ALL_TO_ALL]
        exact = exact and codec == "none" and kind in EXACT_KINDS and self._is_exact(kind, shapes)
        return [Transport(route, codec, exact=exact) for route in _routes(shapes)]

    def _forms(self, exact: Collection[TransferKind], weights: str, gradients: str) -> tuple[bool, ...]:
        """Return the forms of candidates with these codecs: without exact transports, with them, or both."""
        codecs = {weights if kind in WEIGHTS else "" if self._request.interleaved else gradients for kind in exact}
        if self._request.exact is False or codecs.isdisjoint({"none", ""}):
            return (False,)
        return (True,) if self._request.exact else (False, True)

    def _encodes_faster(self, kind: TransferKind, shapes: Sequence[MoveShape]) -> bool:
        """Return whether candidates with exact transports have one for this kind of transfer.

        It can encode the largest unit, and alone it is then faster, unless the request requires it.
        """
        plain, exact = ([Transport(route, exact=exact) for route in _routes(shapes)] for exact in (False, True))
        if not any(self._shape(kind, s, t, self._largest).coding for s in shapes for t in exact):
            return False
        before, after = (min(self._cost(kind, shapes, t, self._largest)[_ALONE] for t in ts) for ts in (plain, exact))
        return self._request.exact is True or after < before

    def _cost_of(
        self, kind: TransferKind, shapes: Sequence[MoveShape], transport: Transport, numel: int
    ) -> Mapping[str, float]:
        """Return the seconds of a transfer alone, and those that it keeps each resource busy."""
        each = (phase_costs(self._shape(kind, shape, transport, numel), self._hardware) for shape in shapes)
        costs = [cost for phases in each for cost in phases]
        rates = self._hardware.capacities.items()
        busy = {name: sum(cost.needs.get(name, 0.0) for cost in costs) / rate for name, rate in rates}
        return busy | {_ALONE: seconds_alone(costs, self._hardware)}

    def _shape(self, kind: TransferKind, move: MoveShape, transport: Transport, numel: int) -> TransferShape:
        dtype = self._reduce if kind in GRADIENTS else self._compute
        if transport.exact:  # the engine pads buckets, so that slices are equal, as collectives of messages need them
            numel = ceil(numel / self._topology.world) * self._topology.world
        return TransferShape.of_move(move, transport, numel, dtype, self._hardware.form)


def _crosses(shapes: Sequence[MoveShape]) -> bool:
    return any(shape.grid.nodes > 1 for shape in shapes)


def _routes(shapes: Sequence[MoveShape]) -> tuple[Route, ...]:
    return ROUTES if any(not s.grid.plain for s in shapes) else ("flat",)


# At most this many micro-steps are replayed. The others of a step are like the one before the last.
_REPLAYED = 3
# The default limit for the number of candidates that are replayed.
MOST = 60


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
        self.candidates = Candidates(model, cluster, request)
        # By micro-batch and checkpointing: the seconds of computation, and the bytes of activations.
        self._passes, self._activations = cache(self._seconds_of), cache(self._activation_bytes)
        self._engine_bytes = cache(self._most_engine_bytes)

    def _seconds_of(self, micro_batch: int, again: bool) -> ComputeSeconds:
        tokens = micro_batch * self.model.length
        return compute_seconds(self.model, self.cluster, self.request.compute_dtype, tokens, again)

    def _activation_bytes(self, micro_batch: int, again: bool) -> int:
        return activation_bytes(self.model, self.request.precision, micro_batch * self.model.length, again)

    def _computing(self, batching: Batching, ranks_of_optimizer: int, on_host: bool) -> ComputeSeconds:
        elements = self.model.trainable / ranks_of_optimizer
        optimizer = optimizer_seconds(elements, self.request.own, self.request.optimizer, self._hardware, on_host)
        return replace(self._passes(batching.micro_batch, batching.checkpointing), optimizer=optimizer)

    def bound(self, candidate: Candidate) -> tuple[float, float]:
        """Return a lower bound on the step time of a candidate, and a number that breaks ties.

        The bound is the time of the busiest resource: what transfers need over its rate, or the computation. The
        tie-breaker is the time of all resources together.
        """
        on_host, batching = offloads(self.request.offload, "optimizer"), candidate.batching
        seconds = self._computing(batching, candidate.placement.optimizer.size, on_host)
        computed = batching.micro_steps * seconds.micro_step + seconds.optimizer
        worked = batching.micro_steps * seconds.share * seconds.micro_step + seconds.optimizer
        busy = self.candidates.busy(candidate)
        busy[PROCESSOR] += self._hardware.processor(worked) / self._hardware.capacities[PROCESSOR]  # pyright: ignore[reportArgumentType]
        return max(computed, *busy.values()), sum(busy.values())

    def predict_memory(self, strategy: Strategy, batching: Batching) -> dict[str, int]:
        """Predict the memory of a rank without simulating the step.

        Args:
            strategy: The strategy.
            batching: How each rank computes its share.

        Returns:
            The bytes that a rank holds at most, by part.
        """
        return self._memory(self._with_frozen_placed(strategy, batching), batching)

    def _memory(self, strategy: Strategy, batching: Batching) -> dict[str, int]:
        activations = self._activations(batching.micro_batch, batching.checkpointing)
        return self._engine_bytes(strategy) | {"activations": activations}

    def _most_engine_bytes(self, strategy: Strategy) -> dict[str, int]:
        """Return the bytes of states and buffers by part, in the phase that needs most."""
        held = [engine_bytes(self._plans(phase), self.request.optimizer) for phase in self._phases(strategy)]
        return max(held, key=lambda parts: sum(parts.values()))

    def _with_frozen_placed(self, strategy: Strategy, batching: Batching) -> Strategy:
        """Place frozen parameters if the strategy does not: in each node if that fits, else like trainable ones."""
        if not depends_on_memory(strategy, [unit.spec for unit in self.model.units]):
            return strategy
        inside = replace(strategy, frozen=Extent(self._topology.ranks_per_node))
        fits = sum(self._memory(inside, batching).values()) <= self.request.memory
        return inside if fits else replace(strategy, frozen=AS_TRAINED)

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
        sizes = {candidate: self.peak_bytes(candidate) for candidate in self.candidates}
        fitting = [candidate for candidate, size in sizes.items() if size <= self.request.memory]
        if not fitting:
            smallest = min(sizes, key=lambda candidate: sizes[candidate])
            nearest = self.predict(self.candidates.strategy(smallest), smallest.batching)
            return Infeasible(nearest, nearest.peak_bytes - self.request.memory)
        late = {batching: not self._may_launch_in_time(batching) for batching in {each.batching for each in fitting}}
        # Candidates that launch for longer than they compute rank behind all others, so they are replayed last.
        waiting = sorted((late[each.batching], *self.bound(each), n) for n, each in enumerate(fitting))
        found: list[Prediction] = []
        open_bound = None
        for is_late, bound, _, number in waiting:
            ordinary = [p.seconds for p in found if all(late.values()) or not p.is_launch_bound]
            if len(ordinary) >= best and (is_late > all(late.values()) or bound >= sorted(ordinary)[best - 1]):
                break
            if len(found) == most:
                open_bound = bound
                break
            found.append(self.predict(self.candidates.strategy(fitting[number]), fitting[number].batching))
        ranked = sorted(found, key=lambda p: p.order)[:best]
        return Ranking(tuple(ranked), len(sizes), len(fitting), len(found), open_bound)

    def peak_bytes(self, candidate: Candidate) -> int:
        """Return the most bytes that a rank holds in a step of a candidate."""
        return sum(self.predict_memory(self.candidates.strategy(candidate), candidate.batching).values())

    def _may_launch_in_time(self, batching: Batching) -> bool:
        """Return whether launching the model's own kernels takes less time than computing."""
        if (costs := self._hardware.launching) is None:
            return True
        seconds = self._computing(batching, 1, False)
        passes = 1 + seconds.kernels(Compute(0, PassPart.BACKWARD))
        kernels = KERNELS_OF_A_PARAMETER * passes * sum(len(b.numels) for u in self.model.units for b in u.spec.buckets)
        return kernels * costs.kernel < seconds.micro_step

    def predict(self, strategy: Strategy, batching: Batching, steps: Steps = in_our_order) -> Prediction:
        """Simulate one optimizer step of a strategy.

        Args:
            strategy: The strategy.
            batching: How each rank computes its share. Of many micro-steps, only the first few are simulated.
            steps: The order of events. By default, that of Towpath's engine.

        Returns:
            The predicted step, with all codecs in use. For an interleaved request, it is the mean over the run. It may
            need more memory than there is.
        """
        if strategy.outer is not None:
            return self._with_snapshots(self._predict_islands(strategy, batching))
        stage, micro_steps = self._stage(strategy, batching), batching.micro_steps
        timeline = self._replayed(stage, micro_steps, steps)
        for plain in self._phases(stage.strategy)[1:]:
            other = self._replayed(replace(stage, strategy=plain, plans=self._plans(plain)), micro_steps, steps)
            timeline = timeline.with_more(-0.5, other)  # the mean of both
        made = Prediction(
            **timeline.figures(),
            strategy=stage.strategy,
            batching=batching,
            computing=micro_steps * stage.seconds.micro_step,
            memory=self._memory(stage.strategy, batching),
            host_memory=host_bytes(stage.plans, self.request.optimizer),
        )
        return self._with_snapshots(made)

    def protection(self, strategy: Strategy) -> Protection:
        """Return what it takes to survive a lost node with a strategy."""
        plans = self._plans(strategy)
        outer = plan_outer(strategy, plans, self._hardware.form)
        return protection_of(strategy, plans, outer, self.request.optimizer.states)

    def _with_snapshots(self, step: Prediction) -> Prediction:
        """Add what nodes send to their buddies in a step. It takes longer only if the link has too little idle time."""
        if step.strategy.protect is None:
            return step
        found, nodes, rate = self.protection(step.strategy), step.strategy.job.nodes, self._hardware.inter.rate
        sending = found.step_bytes / rate
        idle = max(0.0, step.seconds - step.expected_inter_bytes / nodes / rate)
        protect = found.protect
        late = max(0.0, sending - idle * protect.delay / protect.interval)
        most = round(nodes * found.buddy_bytes / protect.interval)
        return replace(
            step,
            seconds=step.seconds + late,
            buddy=(sending, late),
            inter_bytes=step.inter_bytes + most,
            saved_inter_bytes=step.saved_inter_bytes + most - round(nodes * found.step_bytes),
            host_memory=step.host_memory | {"snapshots": found.host_bytes // found.job.ranks_per_node},
        )

    def _predict_islands(self, strategy: Strategy, batching: Batching) -> Prediction:
        """Predict the mean step of a period of outer steps. What the steps take longer counts as waiting for them."""
        island = self.of_island(strategy)
        alone = island.predict(replace(strategy, outer=None, protect=None), batching)
        period = island.period(strategy, batching)
        exchanged = {TransferKind.OUTER: max(0.0, period.mean - alone.seconds)}
        islands, plan = strategy.islands, period.plan
        return replace(
            alone,
            strategy=strategy,
            seconds=period.mean,
            exposed=alone.exposed | exchanged,
            in_flight=alone.in_flight | period.in_flight,
            memory=plan.buffer_bytes(alone.memory) | plan.memory_bytes()[0],
            host_memory=alone.host_memory | plan.memory_bytes()[1],
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
        return replay_period(self._stage(strategy, batching), self._hardware, batching.micro_steps)

    def _stage(self, strategy: Strategy, batching: Batching) -> SimulatedStage:
        """Return the whole model as the replay takes it."""
        strategy = self._with_frozen_placed(strategy, batching)
        seconds = self._computing(batching, strategy.placement.optimizer.size, strategy.optimizer_on_host)
        return SimulatedStage(strategy, self._plans(strategy), seconds)

    def _replayed(self, stage: SimulatedStage, micro_steps: int, steps: Steps) -> Timeline:
        def replayed(count: int) -> Timeline:
            return Replay([stage], self._hardware, micro_steps=count, steps=steps).run().ranks[0]

        if micro_steps <= _REPLAYED:
            return replayed(micro_steps)
        # The micro-steps in the middle are equal.
        return replayed(_REPLAYED).with_more(micro_steps - _REPLAYED, replayed(_REPLAYED - 1))

    def timeline(self, strategy: Strategy, batching: Batching) -> Timeline:
        """Simulate every micro-step of a step, and name each unit. Use it for traces.

        Args:
            strategy: The strategy.
            batching: How each rank computes its share.

        Returns:
            All that a rank does in the step.
        """
        stage, form = self._stage(strategy, batching), self._hardware.form
        named = [plan_unit(stage.strategy, u.spec, self.request.precision, form) for u in self.model.units]
        return Replay([replace(stage, plans=named)], self._hardware, micro_steps=batching.micro_steps).run().ranks[0]

    def _phases(self, strategy: Strategy) -> list[Strategy]:
        """Return the strategies of a run: one, or those of two halves if the request is interleaved."""
        last = strategy.at(self.request.interleaved - 1) if self.request.interleaved else strategy
        return list(dict.fromkeys((strategy, last)))

    def _plans(self, strategy: Strategy) -> list[UnitPlan]:
        return plans_of(self.model, strategy, self.request.precision, self._hardware.form)


def plans_of(model: Model, strategy: Strategy, precision: Precision, form: Form) -> list[UnitPlan]:
    """Return the plan of each unit. Equal units share one plan."""
    made = {spec: plan_unit(strategy, spec, precision, form) for spec in dict.fromkeys(map(_nameless, model.units))}
    return [made[_nameless(unit)] for unit in model.units]


def _nameless(unit: ModelUnit) -> UnitSpec:
    return replace(unit.spec, name="")
