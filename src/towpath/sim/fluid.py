"""A fluid model: things that go on at the same time, each as fast as what it shares with the others lets it.

Nobody waits in a line: whatever needs a resource gets an even share of it, and what one cannot use the others get.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_TINY = 1e-12  # of a flow: what rounding leaves of one that is over
_ROUNDS = 4  # fifty change no rate by a thousandth (tests/unit/test_sim.py)


@dataclass(slots=True, eq=False)
class Demand:
    """`seconds`: what it takes alone, at least; `needs`: how much of each resource it uses up meanwhile.

    `keeps_busy`: how much of the processors that carry messages it has, from 0 to 1; `busy_seconds`: how much longer it
    takes itself beside one that has all of them.
    """

    seconds: float
    needs: Mapping[str, float]
    busy_seconds: float = 0.0
    keeps_busy: float = 0.0
    left: float = 1.0  # of it
    rate: float = 0.0  # of it, a second
    signature: tuple[object, ...] = field(init=False)  # flows that have it in common get the same rate

    def __post_init__(self) -> None:
        self.signature = (self.seconds, self.busy_seconds, self.keeps_busy, *self.needs.items())


class BandwidthModel:
    """`capacities`: by resource, how much of it there is a second."""

    def __init__(self, capacities: Mapping[str, float]) -> None:
        self._capacities = dict(capacities)
        self.flows: list[Demand] = []
        self.now = 0.0
        self._shared = True  # every flow has its rate
        self._rates: dict[tuple[object, ...], list[float]] = {}  # of flows that were under way together before

    def alone(self, needs: Mapping[str, float]) -> float:
        """Seconds that so much takes if nothing else goes on."""
        return max((amount / self._capacities[name] for name, amount in needs.items() if amount), default=0.0)

    def start(self, flow: Demand) -> None:
        self.flows.append(flow)
        self._shared = False

    def advance(self) -> list[Demand]:
        """To the next moment at which something ends: what does."""
        if not self._shared:
            self.share_out()
        seconds = min(f.left / f.rate for f in self.flows)
        self.now += seconds
        ended: list[Demand] = []
        for flow in self.flows:
            flow.left -= seconds * flow.rate
            if flow.left <= _TINY:
                ended.append(flow)
        self.flows = [flow for flow in self.flows if flow not in ended]
        self._shared = False
        return ended

    def share_out(self) -> None:
        """Every flow gets its rate."""
        together = tuple(flow.signature for flow in self.flows)
        if together not in self._rates:
            self._rates[together] = self._settled()
        for flow, rate in zip(self.flows, self._rates[together], strict=True):
            flow.rate = rate
        self._shared = True

    def _settled(self) -> list[float]:
        """What a flow wants of a resource is what the others let it use: settled by going round them a few times."""
        busy = max((flow.keeps_busy for flow in self.flows), default=0.0)
        limits = {flow: {"": 1 / (flow.seconds + busy * flow.busy_seconds)} for flow in self.flows}
        users = {name: [f for f in self.flows if f.needs.get(name)] for name in self._capacities}
        shared = {name: found for name, found in users.items() if found}
        for number in range(_ROUNDS):
            for name, found in shared.items():
                wants = {flow: flow.needs[name] * _limit(limits[flow], but=name) for flow in found}
                for flow, share in _shares(self._capacities[name], wants).items():
                    # Until the last round a flow may come to want more than it does.
                    given = share if number < _ROUNDS - 1 else min(share, wants[flow])
                    limits[flow][name] = given / flow.needs[name]
        return [_limit(limits[flow]) for flow in self.flows]


def _limit(limits: Mapping[str, float], but: str | None = None) -> float:
    return min(limit for name, limit in limits.items() if name != but)


def _shares(capacity: float, wants: Mapping[Demand, float]) -> dict[Demand, float]:
    """As much as each may have: an even share, and an even share of what others do not want of theirs."""
    shares: dict[Demand, float] = {}
    left, count = capacity, len(wants)
    for flow, want in sorted(wants.items(), key=lambda item: item[1]):
        shares[flow] = left / count
        left, count = left - min(want, shares[flow]), count - 1
    return shares
