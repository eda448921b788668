"""Every placement, route, codec, micro-batch and choice of checkpointing that fits into memory, and the best of them.

Each candidate first gets a bound: no step of it can take less. Then the simulator replays them, those with the lowest
bounds first, until what is left cannot be better than what was found. So nothing better is missed than what another
choice of routes would bring: of these each kind of transfer takes the one that is quickest alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from towpath.core.formats import item_bytes
from towpath.core.move_shapes import MoveShape, move_shapes
from towpath.core.placement import Placement, legal_placements
from towpath.core.presets import name_of
from towpath.core.routes import ALL_TO_ALL, ROUTES, Op
from towpath.core.schedule import UnitPlan, plan_unit
from towpath.core.strategy import GRADIENTS, WEIGHTS, WIRED, Kind, Strategy
from towpath.core.wire import Wire
from towpath.planner.cluster import Cluster
from towpath.planner.cost import computing
from towpath.planner.memory import activation_bytes, peak_bytes
from towpath.planner.model import Model
from towpath.planner.workload import Workload
from towpath.sim.hardware import CABLE, INSIDE, PROCESSOR
from towpath.sim.loads import Travel, loads_of
from towpath.sim.replay import Replay, Seconds, Timeline

# A step of more micro-steps is replayed for so many of them: the others are like its last but one.
_REPLAYED = 3
# So many candidates are replayed at most, unless told otherwise.
MOST = 60


@dataclass(frozen=True, slots=True)
class Candidate:
    placement: Placement
    weights: str
    gradients: str
    micro_batch: int
    micro_steps: int
    checkpointing: bool


@dataclass(frozen=True)
class Priced:
    """A candidate that was replayed."""

    strategy: Strategy
    candidate: Candidate
    seconds: float
    computing: float
    exposed: dict[Kind, float]  # what the computation waits for it
    in_flight: dict[Kind, float]
    memory: dict[str, int]
    inter_bytes: int
    intra_bytes: int

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Infeasible:
    """Nothing fits: what comes nearest, and by how much it misses."""

    nearest: Priced
    missing_bytes: int


@dataclass(frozen=True)
class Found:
    """`ranked`: the best first. `considered`, `fitting`, `replayed`: how many candidates. `proven`: none that was not
    replayed can be better than the first."""

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
    def __init__(self, model: Model, cluster: Cluster, workload: Workload) -> None:
        self.model, self.cluster, self.workload = model, cluster, workload
        self._hardware, self._topology = cluster.hardware, cluster.topology
        self._compute, self._reduce, self._summed = workload.precision.dtypes(workload.own)
        self._kinds: Counter[tuple[int, bool]] = Counter((u.numel, u.spec.kept) for u in model.units)
        self._costs: dict[object, _Cost] = {}
        self._kept: dict[tuple[int, bool], int] = {}  # activations, by micro-batch and checkpointing

    # Candidates -----------------------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[Candidate]:
        weights, gradients = ("none", *self.workload.weights), ("none", *self.workload.gradients)
        checkpointing = (False, True) if self.workload.checkpointing is None else (self.workload.checkpointing,)
        shares = self.workload.shares(self._topology.world)
        for placement in legal_placements(self._topology, copies=True):
            shapes = move_shapes(placement, self._topology)
            crosses = {kind: any(s.grid.nodes > 1 for s in found) for kind, found in shapes.items()}
            mine = weights if any(crosses[kind] for kind in WEIGHTS) else ("none",)
            theirs = gradients if any(crosses[kind] for kind in GRADIENTS) else ("none",)
            for w, g, (size, steps), again in product(mine, theirs, shares, checkpointing):
                yield Candidate(placement, w, g, size, steps, again)

    def strategy(self, candidate: Candidate) -> Strategy:
        wires = {
            kind.value: self._wire(kind, candidate)
            for kind in WIRED
            if move_shapes(candidate.placement, self._topology)[kind]
        }
        return Strategy(self._topology, candidate.placement, name_of(candidate.placement, self._topology), **wires)

    def _wire(self, kind: Kind, candidate: Candidate) -> Wire:
        """The route that takes the least time alone, for the largest unit."""
        numel = max(numel for numel, _ in self._kinds)
        shapes = move_shapes(candidate.placement, self._topology)[kind]
        wires = list(self._wires(kind, shapes, candidate))
        return min(wires, key=lambda wire: self._cost(kind, shapes, wire, numel).alone)

    def _wires(self, kind: Kind, shapes: Sequence[MoveShape], candidate: Candidate) -> Iterator[Wire]:
        crosses = any(s.grid.nodes > 1 for s in shapes)
        codec = candidate.weights if kind in WEIGHTS else candidate.gradients
        codec = codec if crosses else "none"
        reduces = any(s.op is not Op.ALL_GATHER for s in shapes)
        if codec != "none" and reduces:
            yield from (Wire(route, codec) for route in ALL_TO_ALL)
            return
        routes = ROUTES if any(not s.grid.plain for s in shapes) else ("flat",)
        yield from (Wire(route, codec) for route in routes)

    # Bounds ---------------------------------------------------------------------------------------------------------

    def bound(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds that a step takes at least: of the busiest of all that is shared, or of what cannot overlap.

        And those of all that is shared together: of two with the same bound, the one with less to do may be quicker.
        """
        per_step, per_micro_step = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        first = last = 0.0
        for (numel, kept), count in self._kinds.items():
            for kind in WIRED:
                if kept and kind is Kind.BACKWARD_GATHER:
                    continue
                cost = self._cheapest(kind, candidate, numel)
                into = per_micro_step if kind in _EVERY_MICRO_STEP else per_step
                for resource, busy in enumerate(cost.busy):
                    into[resource] += count * busy
                if kept:
                    first += cost.alone if kind is Kind.GATHER else 0.0
                    last += cost.alone if kind in GRADIENTS else 0.0
        compute, optimizer = self._computing(candidate)
        computed = candidate.micro_steps * compute + optimizer
        busy = [candidate.micro_steps * m + s for m, s in zip(per_micro_step, per_step, strict=True)]
        busy[2] += self._hardware.processor(computed) / self._hardware.capacities[PROCESSOR]
        return max(*busy, first + computed + last), sum(busy)

    def _computing(self, candidate: Candidate) -> tuple[float, float]:
        tokens = candidate.micro_batch * self.model.length
        seconds = computing(
            self.model,
            (),
            self.cluster,
            self.workload.precision,
            self.workload.optimizer,
            tokens,
            candidate.checkpointing,
        )
        elements = self.model.parameters / candidate.placement.optimizer.size
        moved = elements * self.workload.optimizer.moved_bytes(self.workload.own)
        compute = sum(seconds.forward) + sum(seconds.backward) + seconds.forward_end
        return compute, moved / (2 * self._hardware.memory_rate)

    def _cheapest(self, kind: Kind, candidate: Candidate, numel: int) -> _Cost:
        codec = candidate.weights if kind in WEIGHTS else candidate.gradients
        shapes = move_shapes(candidate.placement, self._topology)[kind]
        if not shapes:
            return _NOTHING
        key = (kind, shapes, codec, numel, candidate.placement.backward_params is None)
        if key not in self._costs:
            costs = [self._cost(kind, shapes, wire, numel) for wire in self._wires(kind, shapes, candidate)]
            least = [min(c.busy[i] for c in costs) for i in range(3)]
            self._costs[key] = _Cost(min(c.alone for c in costs), (least[0], least[1], least[2]))
        return self._costs[key]

    def _cost(self, kind: Kind, shapes: Sequence[MoveShape], wire: Wire, numel: int) -> _Cost:
        key = (kind, tuple(shapes), wire, numel)
        if key not in self._costs:
            dtype = self._reduce if kind in GRADIENTS else self._compute
            alone, busy = 0.0, [0.0, 0.0, 0.0]
            capacities = self._hardware.capacities
            for shape in shapes:
                for load in loads_of(Travel.along(shape, wire, numel, dtype), self._hardware):
                    taken = {name: need / capacities[name] for name, need in load.needs.items()}
                    alone += load.seconds + max(taken.values(), default=0.0)
                    for i, name in enumerate((CABLE, INSIDE, PROCESSOR)):
                        busy[i] += taken.get(name, 0.0)
            self._costs[key] = _Cost(alone, (busy[0], busy[1], busy[2]))
        return self._costs[key]

    # Memory ---------------------------------------------------------------------------------------------------------

    def least_memory(self, candidate: Candidate) -> int:
        """What a rank holds at least: without padding, wire buffers and gradient slots."""
        place, numel = candidate.placement, self.model.parameters
        compute, summed, own = map(item_bytes, (self._compute, self._summed, self.workload.own))
        states = numel * (compute / place.params.size + summed / place.grads.size)
        publishes = move_shapes(place, self._topology)[Kind.PUBLISH]
        encoded = candidate.weights != "none" and any(shape.grid.nodes > 1 for shape in publishes)
        master = self._compute != self.workload.own or encoded
        states += numel / place.optimizer.size * own * (self.workload.optimizer.states + master)
        states += numel / place.optimizer.size * own * (self._summed != self.workload.own)
        if place.backward_params is not None:
            states += numel * compute / place.backward_params.size
        return round(states) + self._activations(candidate)

    def _activations(self, candidate: Candidate) -> int:
        key = (candidate.micro_batch, candidate.checkpointing)
        if key not in self._kept:
            tokens = candidate.micro_batch * self.model.length
            self._kept[key] = activation_bytes(self.model, self.workload.precision, tokens, candidate.checkpointing)
        return self._kept[key]

    # The search -----------------------------------------------------------------------------------------------------

    def solve(
        self, best: int = 10, most: int = MOST, say: Callable[[int, int], None] = lambda done, total: None
    ) -> Found | Infeasible:
        """The `best` candidates, of which `most` at most are replayed. `say` is told how many were."""
        candidates = list(self.candidates())
        fitting = [c for c in candidates if self.least_memory(c) <= self.workload.memory]
        if not fitting:
            nearest = self.price(min(candidates, key=self.least_memory))
            return Infeasible(nearest, nearest.peak_bytes - self.workload.memory)
        order = [(*self.bound(c), i, c) for i, c in enumerate(fitting)]
        heapq.heapify(order)
        priced: list[Priced] = []
        replayed, proven = 0, False
        while order:
            bound, _, _, candidate = heapq.heappop(order)
            if len(priced) >= best and bound >= sorted(p.seconds for p in priced)[best - 1]:
                proven = True
                break
            if replayed >= most:
                break
            found = self.price(candidate)
            replayed += 1
            say(replayed, min(most, len(fitting)))
            if found.peak_bytes <= self.workload.memory:
                priced.append(found)
        else:
            proven = True
        priced.sort(key=lambda p: (p.seconds, p.peak_bytes))
        return Found(tuple(priced[:best]), len(candidates), len(fitting), replayed, proven)

    def price(self, candidate: Candidate) -> Priced:
        return self.price_strategy(self.strategy(candidate), candidate)

    def price_strategy(self, strategy: Strategy, candidate: Candidate) -> Priced:
        plans = self.plans(strategy)
        tokens = candidate.micro_batch * self.model.length
        precision, optimizer = self.workload.precision, self.workload.optimizer
        seconds = computing(self.model, plans, self.cluster, precision, optimizer, tokens, candidate.checkpointing)

        timeline = self._replayed(strategy, plans, seconds, candidate.micro_steps)
        inter_bytes = intra_bytes = 0
        counts = Counter(map(id, plans))  # of like units there is one plan
        for plan in {id(plan): plan for plan in plans}.values():
            count = counts[id(plan)]
            for kind, transfers in ((k, ts) for bucket in plan.buckets for k, ts in bucket.transfers.items()):
                times = 1 if kind in (Kind.SYNC, Kind.PUBLISH) else candidate.micro_steps
                if not (plan.spec.kept and kind is Kind.BACKWARD_GATHER):
                    inter_bytes += count * times * sum(t.inter_bytes for t in transfers)
                    intra_bytes += count * times * sum(t.intra_bytes for t in transfers)
        return Priced(
            strategy,
            candidate,
            timeline.seconds,
            candidate.micro_steps * (sum(seconds.forward) + sum(seconds.backward) + seconds.forward_end),
            timeline.exposed,
            timeline.in_flight,
            peak_bytes(self.model, plans, precision, optimizer, tokens, candidate.checkpointing),
            inter_bytes,
            intra_bytes,
        )

    def timeline(self, strategy: Strategy, candidate: Candidate) -> Timeline:
        """Every micro-step of it, for those who want to look."""
        plans = [plan_unit(strategy, unit.spec, self.workload.precision) for unit in self.model.units]
        tokens = candidate.micro_batch * self.model.length
        precision, optimizer = self.workload.precision, self.workload.optimizer
        seconds = computing(self.model, plans, self.cluster, precision, optimizer, tokens, candidate.checkpointing)
        return Replay(strategy, plans, self._hardware, seconds, candidate.micro_steps).run()

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
                made[key] = plan_unit(strategy, unit.spec, self.workload.precision)
            plans.append(made[key])
        return plans


_EVERY_MICRO_STEP = (Kind.GATHER, Kind.BACKWARD_GATHER, Kind.REDUCE)
