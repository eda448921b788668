"""One clock for all that a step does: threads that compute and wait, and what carries their transfers meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from towpath.sim.fluid import BandwidthModel, Demand


class Awaited(Protocol):
    @property
    def ended(self) -> bool: ...


# Yields what it computes, and what it waits for.
Thread = Iterator[Demand | Awaited]


class Carrier(Protocol):
    """Carries out what threads have submitted, as flows."""

    def start_what_may(self) -> None: ...

    def ends(self, flow: Demand) -> bool:
        """Told of a flow that has ended; whether it was one of its own."""
        ...


def run(fluid: BandwidthModel, threads: Sequence[Thread], carriers: Sequence[Carrier]) -> None:
    """Until all threads are through. What is under way by then stays so."""
    at = [_next(fluid, thread) for thread in threads]
    while any(what is not None for what in at):
        for carrier in carriers:
            carrier.start_what_may()
        went_on = False
        for number, what in enumerate(at):
            if what is not None and not isinstance(what, Demand) and what.ended:
                at[number], went_on = _next(fluid, threads[number]), True
        if went_on:
            continue
        assert fluid.flows, f"the replay stands still: its threads wait for {[w for w in at if w is not None]}"
        for ended in fluid.advance():
            if not any(carrier.ends(ended) for carrier in carriers):
                number = at.index(ended)
                at[number] = _next(fluid, threads[number])


def _next(fluid: BandwidthModel, thread: Thread) -> Demand | Awaited | None:
    """What it computes, or waits for that has not ended; none: it is through."""
    for what in thread:
        if isinstance(what, Demand):
            fluid.start(what)
            return what
        if not what.ended:
            return what
    return None
