"""The solver: it predicts the step of a strategy, and finds the best of all candidates that fit into memory.

Memory follows from the plans of a candidate's units, as in the engine. Each candidate that fits has a lower bound on
its step time. Candidates are replayed, those of the least bound first, until no other can be better than those found,
or until a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from towpath.core.schedule import Compute, PassPart, depends_on_memory
from towpath.core.strategy import (
    AS_TRAINED,
    Strategy,
    TransferKind,
    offloads,
)
from towpath.core.unit_plan import UnitPlan, plan_unit
from towpath.core.units import UnitSpec
from towpath.outer.period import Period, replay_period
from towpath.plan.candidates import Candidate, Candidates
from towpath.plan.cluster_file import Cluster
from towpath.plan.hardware import PROCESSOR
from towpath.plan.model import (
    Model,
    activation_bytes,
    compute_seconds,
    engine_bytes,
    host_bytes,
    optimizer_seconds,
)
from towpath.plan.prediction import Batching, Infeasible, Prediction, Ranking, Timeline
from towpath.plan.replay import ComputeSeconds, Replay, SimulatedStage
from towpath.plan.request import Request
from towpath.plan.simulated_engine import KERNELS_OF_A_PARAMETER
from towpath.topology.cluster import Extent

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
        self._engine_bytes: dict[Strategy, dict[str, int]] = {}
        # By micro-batch and checkpointing: the seconds of computation, and the bytes of activations.
        self._seconds: dict[tuple[int, bool], ComputeSeconds] = {}
        self._kept: dict[tuple[int, bool], int] = {}

    def _computing(self, batching: Batching, ranks_of_optimizer: int, on_host: bool) -> ComputeSeconds:
        key = (batching.micro_batch, batching.checkpointing)
        if key not in self._seconds:
            tokens = batching.micro_batch * self.model.length
            dtype = self.request.compute_dtype
            self._seconds[key] = compute_seconds(self.model, self.cluster, dtype, tokens, batching.checkpointing)
        elements = self.model.trainable / ranks_of_optimizer
        optimizer = optimizer_seconds(elements, self.request.own, self.request.optimizer, self._hardware, on_host)
        return replace(self._seconds[key], optimizer=optimizer)

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
        return self._memory(self._with_frozen_placed(strategy, batching), batching)

    def _memory(self, strategy: Strategy, batching: Batching) -> dict[str, int]:
        """Return what a rank holds at most, by part, in the phase that needs most."""
        if strategy not in self._engine_bytes:
            held = [engine_bytes(self._plans(phase), self.request.optimizer) for phase in self._phases(strategy)]
            self._engine_bytes[strategy] = max(held, key=lambda parts: sum(parts.values()))
        return self._engine_bytes[strategy] | {"activations": self._activations(batching)}

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
            ordinary = [p.seconds for p in found if all(late.values()) or not p.launches_too_long]
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
        plans, micro_steps = self._plans(strategy), batching.micro_steps
        seconds = self._computing(batching, strategy.placement.optimizer.size, strategy.optimizer_on_host)
        timeline = self._replayed(strategy, plans, seconds, micro_steps)
        for plain in self._phases(strategy)[1:]:
            other = self._replayed(plain, self._plans(plain), seconds, micro_steps)
            timeline = timeline.with_more(-0.5, other)  # the mean of both
        return Prediction(
            **timeline.figures(),
            strategy=strategy,
            batching=batching,
            computing=micro_steps * seconds.micro_step,
            memory=self._memory(strategy, batching),
            host_memory=host_bytes(plans, self.request.optimizer),
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
        strategy = self._with_frozen_placed(strategy, batching)
        seconds = self._computing(batching, strategy.placement.optimizer.size, strategy.optimizer_on_host)
        return replay_period(strategy, self._plans(strategy), self._hardware, seconds, batching.micro_steps)

    def _replayed(
        self, strategy: Strategy, plans: Sequence[UnitPlan], seconds: ComputeSeconds, micro_steps: int
    ) -> Timeline:
        stage = [SimulatedStage(strategy, plans, seconds)]
        timeline = Replay(stage, self._hardware, micro_steps=min(micro_steps, _REPLAYED)).run().ranks[0]
        if micro_steps > _REPLAYED:  # the micro-steps in the middle are equal
            shorter = Replay(stage, self._hardware, micro_steps=_REPLAYED - 1).run().ranks[0]
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
        stage = [SimulatedStage(strategy, plans, seconds)]
        return Replay(stage, self._hardware, micro_steps=batching.micro_steps).run().ranks[0]

    def _phases(self, strategy: Strategy) -> list[Strategy]:
        """Return the strategies of a run: one, or those of two halves if the request is interleaved."""
        last = strategy.at(self.request.interleaved - 1) if self.request.interleaved else strategy
        return list(dict.fromkeys((strategy, last)))

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
