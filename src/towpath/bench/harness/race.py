"""The rounds: each contestant takes one turn in each, in the order of turns.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from towpath.bench.harness import turns
from towpath.bench.harness.failure import CaseError, reason
from towpath.bench.harness.figures import medians, spreads
from towpath.lab import LinkBytes


class Racer(Protocol):
    def ask(self, method: str, *arguments: Any) -> list[Any]: ...

    def counters(self) -> tuple[LinkBytes, ...]: ...


@dataclass(frozen=True, slots=True)
class Race:
    """What came of the rounds. A turn's seconds are those of rank 0, which waits for all; bytes are the kernel's."""

    order: list[list[str]]
    seconds: dict[str, list[float]]
    between_nodes: dict[str, list[int]] = field(default_factory=dict)
    inside_nodes: dict[str, list[int]] = field(default_factory=dict)

    def turn(self, name: str, contestant: Racer) -> None:
        before = contestant.counters()
        self.seconds[name].append(contestant.ask("turn")[0])
        carried = [a - b for a, b in zip(contestant.counters(), before, strict=True)]
        self.between_nodes[name].append(sum(link.sent_bytes for link in carried))
        self.inside_nodes[name].append(sum(link.loopback_bytes for link in carried))

    def take_out(self, name: str) -> None:
        for kept in (self.seconds, self.between_nodes, self.inside_nodes):
            del kept[name]

    def recorded(self, digits: int = 6) -> dict[str, Any]:
        found: dict[str, Any] = {
            "rounds": len(self.order),
            "order": self.order,
            "median_seconds": _rounded(medians(self.seconds), digits),
            "spread": _rounded(spreads(self.seconds), 4),
            "seconds": {kind: [round(s, digits) for s in values] for kind, values in self.seconds.items()},
        }
        if any(map(any, (*self.between_nodes.values(), *self.inside_nodes.values()))):
            found["interface_bytes"] = {
                kind: {"between_nodes": self.between_nodes[kind], "inside_nodes": self.inside_nodes[kind]}
                for kind in self.seconds
            }
        return found


def run(
    contestants: Mapping[str, Racer],
    rounds: int,
    say: Callable[[str], None],
    failures: dict[str, str] | None = None,
) -> Race:
    """Each worker's `turn()` says how many seconds it took.

    One that fails ends the race, unless there are `failures`: then it is taken out, with all its turns, and named.
    """
    names = list(contestants)
    race = Race([], *({name: [] for name in names} for _ in range(3)))
    began = time.monotonic()
    for number in range(rounds):
        race.order.append(turns.order(names, number))
        for name in race.order[-1]:
            try:
                race.turn(name, contestants[name])
            except CaseError as error:
                if failures is None:
                    raise
                failures[name] = reason(error)
                say(f"{name} is taken out: {failures[name]}")
                names.remove(name)
                race.take_out(name)
        taken = time.monotonic() - began
        say(
            f"round {number + 1} of {rounds}, {taken:.0f} s, {taken / (number + 1) * (rounds - number - 1):.0f} s to go"
        )
    return race


def _rounded(values: Mapping[str, float], digits: int) -> dict[str, float]:
    return {name: round(value, digits) for name, value in values.items()}
