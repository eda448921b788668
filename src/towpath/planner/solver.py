"""Every placement, route, codec, micro-batch and choice of checkpointing that fits into memory, and the best of them.

Each candidate first gets a bound: no step of it can take less. Then the simulator replays them, those with the lowest
bounds first, until what is left cannot be better than what was found. So nothing better is missed than what another
choice of routes would bring: of these each kind of transfer takes the one that is quickest alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

from towpath.core.formats import Precision, item_bytes
from towpath.core.placement import Placement, legal_placements
from towpath.core.presets import name_of, strategy
from towpath.core.routes import ALL_TO_ALL, ROUTES, Op
from towpath.core.schedule import depends_on_memory, steady_tasks
from towpath.core.strategy import (
    AS_TRAINED,
    GRADIENTS,
    WEIGHTS,
    WITH_TRANSPORT,
    MoveShape,
    Strategy,
    TransferKind,
    move_shapes,
)
from towpath.core.transport import Transport
from towpath.core.unit_plan import UnitPlan, plan_unit
from towpath.core.units import BucketSpec, UnitSpec
from towpath.planner.cluster import Cluster
from towpath.planner.cost import computing, optimizer_seconds
from towpath.planner.memory import activation_bytes, engine_bytes, host_bytes
from towpath.planner.model import Model
from towpath.planner.request import Request
from towpath.sim.hardware import CABLE, INSIDE, PROCESSOR
from towpath.sim.loads import TransferShape, loads_of
from towpath.sim.replay import Replay, Seconds
from towpath.sim.timeline import Timeline
from towpath.topology.cluster import Extent, Topology

# A step of more micro-steps is replayed for so many of them: the others are like its last but one.
_REPLAYED = 3
# So many candidates are replayed at most, unless told otherwise.
MOST = 60
# So many get their bounds before progress is told again.
_BETWEEN_WORDS = 256


@dataclass(frozen=True, slots=True)
class Batching:
    """How a rank computes its share of a step: so many sequences at once, so many times."""

    micro_batch: int
    micro_steps: int
    checkpointing: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """`weights`, `gradients`: the codec of what crosses nodes, or 'none'."""

    placement: Placement
    weights: str
    gradients: str
    batching: Batching


@dataclass(frozen=True)
class Priced:
    """A strategy that was replayed."""

    strategy: Strategy
    batching: Batching
    seconds: float
    computing: float
    exposed: dict[TransferKind, float]  # what the computation waits for it
    in_flight: dict[TransferKind, float]
    memory: dict[str, int]
    inter_bytes: int
    intra_bytes: int
    host_memory: dict[str, int] = field(default_factory=dict[str, int], kw_only=True)
    host_copy_bytes: int = field(
        default=0, kw_only=True
    )  # of a step, between the device and the host, both ways together

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())

    def sequences(self, world: int) -> int:
        """Of a step, on so many ranks."""
        return self.batching.micro_batch * self.batching.micro_steps * world


@dataclass(frozen=True)
class Infeasible:
    """Nothing fits: what comes nearest, and by how much it misses."""

    nearest: Priced
    missing_bytes: int


@dataclass(frozen=True)
class Ranking:
    """`ranked`: the best first. How many candidates were `considered`, may be `fitting`, were `replayed`; `proven`:
    none that was not replayed can be among the best."""

    ranked: tuple[Priced, ...]
    considered: int
    fitting: int
    replayed: int
    proven: bool


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of one kind of transfer of one unit: seconds alone, and seconds of each resource."""

    alone: float
    busy: tuple[float, float, float]  # cable, inside, processor


_NOTHING = _Cost(0.0, (0.0, 0.0, 0.0))


class Solver:
    def __init__(self, model: Model, cluster: Cluster, request: Request) -> None:
        self.model, self.cluster, self.request = model, cluster, request
        self._hardware, self._topology = cluster.hardware, cluster.topology
        self._compute, self._reduce, self._summed = request.precision.dtypes(request.own)
        # Of each unit what trains: what is frozen may lie in the node, and adds to the bounds in any case.
        sizes = [(u.trainable if model.trainable else u.numel, u.spec.kept) for u in model.units]
        self._kinds: Counter[tuple[int, bool]] = Counter(size for size in sizes if size[0])
        self._costs: dict[object, _Cost] = {}
        # By micro-batch and checkpointing: what is computed, and what autograd keeps.
        self._seconds: dict[tuple[int, bool], Seconds] = {}
        self._kept: dict[tuple[int, bool], int] = {}

    # Candidates -----------------------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[Candidate]:
        weights, gradients = ("none", *self.request.weights), ("none", *self.request.gradients)
        checkpointing = (False, True) if self.request.checkpointing is None else (self.request.checkpointing,)
        shares = self.request.shares(self._topology.world)
        for placement in legal_placements(self._topology, copies=True):
            shapes = move_shapes(placement, self._topology)
            crosses = {kind: any(s.grid.nodes > 1 for s in found) for kind, found in shapes.items()}
            mine = weights if any(crosses[kind] for kind in WEIGHTS) else ("none",)
            theirs = gradients if any(crosses[kind] for kind in GRADIENTS) else ("none",)
            for w, g, (size, steps), again in product(mine, theirs, shares, checkpointing):
                yield Candidate(placement, w, g, Batching(size, steps, again))

    def strategy(self, candidate: Candidate) -> Strategy:
        transports: dict[str, Any] = {
            kind.value: self._transport(kind, candidate)
            for kind in WITH_TRANSPORT
            if move_shapes(candidate.placement, self._topology)[kind]
        }
        name = name_of(candidate.placement, self._topology)
        return Strategy(self._topology, candidate.placement, name, **transports, offload=self.request.offload)

    def _transport(self, kind: TransferKind, candidate: Candidate) -> Transport:
        """The route that takes the least time alone, for the largest unit."""
        numel = max(numel for numel, _ in self._kinds)
        shapes = move_shapes(candidate.placement, self._topology)[kind]
        transports = list(self._transports(kind, shapes, candidate))
        return min(transports, key=lambda transport: self._cost(kind, shapes, transport, numel).alone)

    def _transports(self, kind: TransferKind, shapes: Sequence[MoveShape], candidate: Candidate) -> Iterator[Transport]:
        crosses = any(s.grid.nodes > 1 for s in shapes)
        codec = candidate.weights if kind in WEIGHTS else candidate.gradients
        codec = codec if crosses else "none"
        reduces = any(s.op is not Op.ALL_GATHER for s in shapes)
        if codec != "none" and reduces:
            yield from (Transport(route, codec) for route in ALL_TO_ALL)
            return
        routes = ROUTES if any(not s.grid.plain for s in shapes) else ("flat",)
        yield from (Transport(route, codec) for route in routes)

    # Bounds ---------------------------------------------------------------------------------------------------------

    def bound(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds that a step takes at least: of the busiest of all that is shared, or of what cannot overlap.

        And those of all that is shared together: of two with the same bound, the one with less to do may be quicker.
        """
        micro_steps = candidate.batching.micro_steps
        busy, first, last = [0.0, 0.0, 0.0], 0.0, 0.0
        for (numel, root), count in self._kinds.items():
            for kind, every_micro_step in _submitted(root):
                cost = self._cheapest(kind, candidate, numel)
                times = count * (micro_steps if every_micro_step else 1)
                for resource, seconds in enumerate(cost.busy):
                    busy[resource] += times * seconds
                if root:  # before anything is computed, and after everything
                    first += cost.alone if kind is TransferKind.GATHER else 0.0
                    last += cost.alone if kind in GRADIENTS else 0.0
        on_host = self.request.offload == "optimizer"
        seconds = self._computing(candidate.batching, candidate.placement.optimizer.size, on_host)
        computed = micro_steps * seconds.micro_step + seconds.optimizer
        worked = micro_steps * seconds.share * seconds.micro_step + seconds.optimizer
        busy[2] += self._hardware.processor(worked) / self._hardware.capacities[PROCESSOR]
        return max(*busy, first + computed + last), sum(busy)

    def _computing(self, batching: Batching, ranks_of_optimizer: int, on_host: bool) -> Seconds:
        key = (batching.micro_batch, batching.checkpointing)
        if key not in self._seconds:
            tokens = batching.micro_batch * self.model.length
            dtype = self._compute
            self._seconds[key] = computing(self.model, self.cluster, dtype, tokens, batching.checkpointing)
        elements = self.model.trainable / ranks_of_optimizer
        parameters = self.model.trainable_parameters
        asked = self.request
        optimizer = optimizer_seconds(elements, parameters, asked.own, asked.optimizer, self._hardware, on_host)
        return replace(self._seconds[key], optimizer=optimizer)

    def _cheapest(self, kind: TransferKind, candidate: Candidate, numel: int) -> _Cost:
        codec = candidate.weights if kind in WEIGHTS else candidate.gradients
        shapes = move_shapes(candidate.placement, self._topology)[kind]
        if not shapes:
            return _NOTHING
        key = (kind, shapes, codec, numel, candidate.placement.backward_params is None)
        if key not in self._costs:
            costs = [
                self._cost(kind, shapes, transport, numel) for transport in self._transports(kind, shapes, candidate)
            ]
            least = [min(c.busy[i] for c in costs) for i in range(3)]
            self._costs[key] = _Cost(min(c.alone for c in costs), (least[0], least[1], least[2]))
        return self._costs[key]

    def _cost(self, kind: TransferKind, shapes: Sequence[MoveShape], transport: Transport, numel: int) -> _Cost:
        key = (kind, tuple(shapes), transport, numel)
        if key not in self._costs:
            dtype = self._reduce if kind in GRADIENTS else self._compute
            alone, busy = 0.0, [0.0, 0.0, 0.0]
            capacities = self._hardware.capacities
            for shape in shapes:
                for load in loads_of(TransferShape.of_move(shape, transport, numel, dtype), self._hardware):
                    taken = {name: need / capacities[name] for name, need in load.needs.items()}
                    alone += load.seconds + max(taken.values(), default=0.0)
                    for i, name in enumerate((CABLE, INSIDE, PROCESSOR)):
                        busy[i] += taken.get(name, 0.0)
            self._costs[key] = _Cost(alone, (busy[0], busy[1], busy[2]))
        return self._costs[key]

    # Memory ---------------------------------------------------------------------------------------------------------

    def least_memory(self, candidate: Candidate) -> int:
        """What a rank holds at least: without padding, wire buffers and gradient slots."""
        place, numel, trainable = candidate.placement, self.model.parameters, self.model.trainable
        compute, summed, own = map(item_bytes, (self._compute, self._summed, self.request.own))
        states = numel * compute / place.params.size + trainable * summed / place.grads.size
        has_param_sync = move_shapes(place, self._topology)[TransferKind.PARAM_SYNC]
        encoded = candidate.weights != "none" and any(shape.grid.nodes > 1 for shape in has_param_sync)
        master = self._compute != self.request.own or encoded
        kept = self.request.optimizer.states + (self._summed != self.request.own)
        if self.request.offload == "optimizer":
            states += (numel - trainable) * master * own / place.optimizer.size
        else:
            states += (numel * master + trainable * kept) * own / place.optimizer.size
        if place.backward_params is not None:
            states += numel * compute / place.backward_params.size
        return round(states) + self._activations(candidate.batching)

    def _activations(self, batching: Batching) -> int:
        key = (batching.micro_batch, batching.checkpointing)
        if key not in self._kept:
            tokens = batching.micro_batch * self.model.length
            self._kept[key] = activation_bytes(self.model, self.request.precision, tokens, batching.checkpointing)
        return self._kept[key]

    def memory(self, plans: Sequence[UnitPlan], batching: Batching) -> dict[str, int]:
        """What a rank holds, by part."""
        return engine_bytes(plans, self.request.optimizer) | {"activations": self._activations(batching)}

    def with_frozen_placed(self, strategy: Strategy, batching: Batching) -> Strategy:
        """Where it is left open: frozen parameters in each node if that fits, else as those that train."""
        if not depends_on_memory(strategy, [unit.spec for unit in self.model.units]):
            return strategy
        inside = replace(strategy, frozen=Extent(self._topology.ranks_per_node))
        fits = sum(self.memory(self.plans(inside), batching).values()) <= self.request.memory
        return inside if fits else replace(strategy, frozen=AS_TRAINED)

    # The search -----------------------------------------------------------------------------------------------------

    def solve(
        self, best: int = 10, most: int = MOST, say: Callable[[int, int], None] = lambda done, total: None
    ) -> Ranking | Infeasible:
        """The `best` candidates, of which `most` at most are replayed. `say` is told how much is done, of how much: the
        first half when all have their bounds, the rest with each that is replayed."""
        candidates = list(self.candidates())
        likely: list[Candidate] = []
        order: list[tuple[float, float, int, Candidate]] = []
        for number, candidate in enumerate(candidates):
            if number % _BETWEEN_WORDS == 0:
                say(number * most // len(candidates), 2 * most)
            if self.least_memory(candidate) <= self.request.memory:
                order.append((*self.bound(candidate), len(likely), candidate))
                likely.append(candidate)
        heapq.heapify(order)
        priced: list[Priced] = []
        fitting = len(likely)
        while order and not self._is_settled(order[0][0], priced, best):
            if len(priced) >= most:
                break
            *_, candidate = heapq.heappop(order)
            strategy = self.with_frozen_placed(self.strategy(candidate), candidate.batching)
            if sum(self.memory(self.plans(strategy), candidate.batching).values()) > self.request.memory:
                fitting -= 1
                continue
            priced.append(self.price(strategy, candidate.batching))
            say(most + len(priced), most + min(most, fitting))
        if not priced:
            return self._nearest(likely or candidates)
        proven = not order or self._is_settled(order[0][0], priced, best)
        ranked = sorted(priced, key=lambda p: (p.seconds, p.peak_bytes))
        return Ranking(tuple(ranked[:best]), len(candidates), fitting, len(priced), proven)

    @staticmethod
    def _is_settled(bound: float, priced: Sequence[Priced], best: int) -> bool:
        """Whether nothing with that bound, or a higher one, can be among the best."""
        return len(priced) >= best and bound >= heapq.nsmallest(best, (p.seconds for p in priced))[-1]

    def _nearest(self, candidates: Sequence[Candidate]) -> Infeasible:
        nearest = min(candidates, key=self.least_memory)
        found = self.price(self.strategy(nearest), nearest.batching)
        return Infeasible(found, found.peak_bytes - self.request.memory)

    def price(self, strategy: Strategy, batching: Batching) -> Priced:
        strategy = self.with_frozen_placed(strategy, batching)
        plans = self.plans(strategy)
        seconds = self._computing(batching, strategy.placement.optimizer.size, strategy.optimizer_on_host)
        timeline = self._replayed(strategy, plans, seconds, batching.micro_steps)
        return Priced(
            strategy,
            batching,
            timeline.seconds,
            batching.micro_steps * seconds.micro_step,
            timeline.exposed,
            timeline.in_flight,
            self.memory(plans, batching),
            timeline.inter_bytes,
            timeline.intra_bytes,
            host_memory=host_bytes(plans, self.request.optimizer),
            host_copy_bytes=sum(
                b.host_copy_bytes(kind) for plan in plans for b in plan.buckets for kind in WITH_TRANSPORT
            ),
        )

    def timeline(
        self, strategy: Strategy, batching: Batching, say: Callable[[int, int], None] = lambda done, total: None
    ) -> Timeline:
        """Every micro-step of it, for those who want to look: each unit by its own name. `say` is told how many are
        done."""
        strategy = self.with_frozen_placed(strategy, batching)
        plans = [plan_unit(strategy, unit.spec, self.request.precision) for unit in self.model.units]
        seconds = self._computing(batching, strategy.placement.optimizer.size, strategy.optimizer_on_host)
        return Replay(strategy, plans, self._hardware, seconds, batching.micro_steps, say=say).run()

    def _replayed(self, strategy: Strategy, plans: Sequence[UnitPlan], seconds: Seconds, micro_steps: int) -> Timeline:
        """A whole step; of many micro-steps, those in the middle are like one another."""

        def replay(count: int) -> Timeline:
            return Replay(strategy, plans, self._hardware, seconds, count).run()

        if micro_steps <= _REPLAYED:
            return replay(micro_steps)
        shorter, longer = replay(_REPLAYED - 1), replay(_REPLAYED)
        return longer.with_more(micro_steps - _REPLAYED, shorter)

    def plans(self, strategy: Strategy) -> list[UnitPlan]:
        """Of like units one is planned."""
        made: dict[tuple[object, bool], UnitPlan] = {}
        plans: list[UnitPlan] = []
        for unit in self.model.units:
            key = (unit.spec.buckets, unit.spec.kept)
            if key not in made:
                made[key] = plan_unit(strategy, unit.spec, self.request.precision)
            plans.append(made[key])
        return plans


@cache
def _submitted(root: bool) -> tuple[tuple[TransferKind, bool], ...]:
    """What the step machine submits for the root, or for another unit, if all of it has to travel: kinds, and whether
    in every micro-step or in one of them."""
    every_kind = strategy("paro-iig", Topology(2, 2))
    units = [UnitSpec(name, (BucketSpec((1,)),), kept=not name) for name in ("", "a", "b", "c")]
    plans = [plan_unit(every_kind, unit, Precision()) for unit in units]
    seen = {(task.kind, micro_step) for micro_step, task in steady_tasks(plans, 3) if task.unit == (0 if root else 2)}
    return tuple((kind, (kind, 1) in seen) for kind in WITH_TRANSPORT if any(k is kind for k, _ in seen))
