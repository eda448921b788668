"""Plans outer steps: which strategy islands train with, and how often they must synchronize.

Outer steps change the algorithm, so they are planned only where the user allows them. The longer a period is, the
further islands drift apart. So of all periods that hide their exchanges, the shortest is proposed.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from towpath.core.formats import Codec
from towpath.outer.settings import NCCL_RATE, Outer, outer_transport
from towpath.plan.request import Prediction, Ranking
from towpath.plan.solver import Solver

# The periods that are tried, in optimizer steps.
PERIODS = (32, 64, 128, 256, 512)
# Exchanges count as hidden if they make the mean step at most this much longer.
HIDDEN = 1.05
# An exchange may be under way for at most this share of a period, and then islands keep half of what they have learned.
_LONGEST_DELAY, _BLEND = 0.25, 0.5
# How often an island's strategy is planned, each time with the memory that is left beside what outer steps need.
_TRIED = 3
# How many candidates are replayed at most for an island.
_REPLAYED = 16
# Outer steps are proposed in place of a synchronous strategy if they take at most this share of its time.
WORTH_IT = 0.8


class OuterPlanner:
    """Plans the outer steps of a model on a cluster."""

    def __init__(self, solver: Solver) -> None:
        self._solver = solver
        # Exchanges are sent in the codec of gradients with the fewest bits that is allowed, or in float32.
        codecs = [Codec.parse(name) for name in solver.request.gradients if name != "none"]
        smallest = min((c for c in codecs if not c.stochastic), key=lambda codec: codec.bits, default=None)
        hardware = solver.cluster.hardware
        nccl = hardware.cores is None and hardware.inter.rate > NCCL_RATE
        self._outer = Outer(1, transport=outer_transport("" if smallest is None else str(smallest)), nccl=nccl)

    def solve(self) -> Prediction | None:
        """Return the shortest period that hides its exchanges, or the longest. None if no island can hold the model."""
        if (found := self._of_islands()) is None:
            return None
        islands, inner = found
        first = self._predicted(replace(self._outer, every=PERIODS[0]), islands, inner)
        # What an exchange takes longer than a step does not depend on the period.
        exchange = PERIODS[0] * max(0.0, first.seconds - inner.seconds)
        settings = [self._settings(every, exchange, inner.seconds) for every in PERIODS]
        outer, _ = next((each for each in settings if each[1]), settings[-1])
        return self._predicted(outer, islands, inner)

    def _of_islands(self) -> tuple[int, Prediction] | None:
        """Return how many islands can hold the model with its slow weights, and the best step of one of them."""
        topology, request = self._solver.cluster.topology, self._solver.request
        for islands in (n for n in range(topology.nodes, 1, -1) if topology.nodes % n == 0):
            if request.batch % islands:
                continue
            _, island = Outer(1, islands=islands).on(topology)
            cluster = self._solver.cluster.on(island.nodes, island.ranks_per_node)
            reserved = 0
            for _ in range(_TRIED):
                mine = replace(request, batch=request.batch // islands, memory=request.memory - reserved)
                ranked = Solver(self._solver.model, cluster, mine).solve(best=1, most=_REPLAYED)
                if not isinstance(ranked, Ranking):
                    break
                step = ranked.ranked[0]
                needed = self._predicted(self._outer, islands, step).peak_bytes
                if needed <= request.memory:
                    return islands, step
                reserved = max(reserved + 1, needed - step.peak_bytes)  # the slow weights, feedback and messages
        return None

    def _settings(self, every: int, exchange: float, step: float) -> tuple[Outer, bool]:
        """Return the settings for a period, and whether they hide an exchange of so many seconds behind its steps."""
        outer = replace(self._outer, every=every)
        if exchange <= (HIDDEN - 1) * every * step:
            return outer, True
        delay = ceil(exchange / step)
        if delay > _LONGEST_DELAY * every:
            return outer, False
        return replace(outer, delay=delay, blend=_BLEND), True

    def _predicted(self, outer: Outer, islands: int, inner: Prediction) -> Prediction:
        settled, _ = replace(outer, islands=islands).on(self._solver.cluster.topology)
        return self._solver.predict(replace(inner.strategy, outer=settled), inner.batching)


def saves_enough(outer: Prediction, synchronous: Prediction) -> bool:
    """Return whether outer steps save enough time to change the algorithm for them."""
    return outer.seconds <= WORTH_IT * synchronous.seconds
