"""The rounds of a comparison, and candidates that stay from one comparison to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from benchmarks.harness.candidates import CaseError, LabPlace, Launch, RunningCandidate
from benchmarks.harness.figures import medians, spreads
from lab import LinkBytes, Rate, window_bytes
from towpath.comparison import interleave
from towpath.engine.layout import available_bytes

Say = Callable[[str], None]


class Measured(Protocol):
    """A candidate, or a part of one, that a comparison can measure."""

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the worker on every rank, and return the results by rank."""
        ...

    def counters(self) -> tuple[LinkBytes, ...]:
        """Return what the links of each node have carried."""
        ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """The samples of all rounds: seconds of rank 0, which waits for all ranks, and bytes by the kernel's counters."""

    order: list[list[str]]
    seconds: dict[str, list[float]]
    between_nodes: dict[str, list[int]] = field(default_factory=dict)
    inside_nodes: dict[str, list[int]] = field(default_factory=dict)

    def measure(self, name: str, candidate: Measured) -> None:
        """Take one sample of a candidate."""
        before = candidate.counters()
        self.seconds[name].append(candidate.ask("sample")[0])
        carried = [a - b for a, b in zip(candidate.counters(), before, strict=True)]
        self.between_nodes[name].append(sum(link.sent_bytes for link in carried))
        self.inside_nodes[name].append(sum(link.loopback_bytes for link in carried))

    def recorded(self, digits: int = 6) -> dict[str, Any]:
        """Return what a result line keeps of the comparison."""

        def rounded(values: Mapping[str, float], digits: int) -> dict[str, float]:
            return {name: round(value, digits) for name, value in values.items()}

        found: dict[str, Any] = {
            "rounds": len(self.order),
            "order": self.order,
            "median_seconds": rounded(medians(self.seconds), digits),
            "spread": rounded(spreads(self.seconds), 4),
            "seconds": {kind: [round(s, digits) for s in values] for kind, values in self.seconds.items()},
        }
        if any(map(any, (*self.between_nodes.values(), *self.inside_nodes.values()))):
            found["interface_bytes"] = {
                kind: {"between_nodes": self.between_nodes[kind], "inside_nodes": self.inside_nodes[kind]}
                for kind in self.seconds
            }
        return found


def compare(
    candidates: Mapping[str, Measured], rounds: int, say: Say, failures: dict[str, str] | None = None
) -> Comparison:
    """Measure every candidate once in each round, in the order of `towpath.comparison.interleave`.

    Args:
        candidates: The candidates by name.
        rounds: The number of samples of each candidate.
        say: Receives a line of progress after each round.
        failures: Receives the reason if a candidate fails, which is then left out with all its samples. Without it, a
            failure ends the comparison.
    """
    names = list(candidates)
    found = Comparison([], *({name: [] for name in names} for _ in range(3)))
    began = time.monotonic()
    for number in range(rounds):
        found.order.append(interleave(names, number))
        for name in found.order[-1]:
            try:
                found.measure(name, candidates[name])
            except CaseError as error:
                if failures is None:
                    raise
                failures[name] = reason_of(error)
                say(f"{name} is left out: {failures[name]}")
                names.remove(name)
                for kept in (found.seconds, found.between_nodes, found.inside_nodes):
                    del kept[name]
        taken = time.monotonic() - began
        left = taken / (number + 1) * (rounds - number - 1)
        say(f"round {number + 1} of {rounds}, {taken:.0f} s, {left:.0f} s to go")
    return found


def reason_of(error: Exception) -> str:
    """Return the last line of an error's text. In the traceback of a rank, that line is the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class Pool:
    """Candidates that stay for the next comparison, because starting them takes longer than measuring them."""

    def __init__(self) -> None:
        self._staying: dict[Launch, RunningCandidate] = {}
        self._largest_bytes = 0  # the most memory that a candidate took when it started

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(())

    @contextmanager
    def started(
        self, launches: Mapping[str, Launch], say: Say, failures: dict[str, str] | None = None
    ) -> Generator[dict[str, RunningCandidate]]:
        """Start all candidates, one after the other, and warm each one up while the others are stopped.

        At the end, candidates that do not stay or that failed are closed. After an exception, all of them are. With
        `failures`, a candidate that cannot start is left out and named there. Without it, the failure is raised.
        """
        made: dict[str, RunningCandidate] = {}
        try:
            for number, (name, launch) in enumerate(launches.items(), start=1):
                try:
                    before = available_bytes() or 0
                    made[name] = self._reshaped(launch) or self._new(name, launch, f"{number} of {len(launches)}", say)
                    for _ in range(launch.warm_up):
                        made[name].ask("sample")
                    self._largest_bytes = max(self._largest_bytes, before - (available_bytes() or 0))
                except CaseError as error:
                    if failures is None:
                        raise
                    failures[name] = reason_of(error)
                    say(f"{name} is left out: {failures[name]}")
            yield {name: one for name, one in made.items() if name not in (failures or {})}
            for name, one in made.items():
                if launches[name].stays and name not in (failures or {}):
                    self._staying[launches[name]] = one
        finally:
            for one in made.values():
                if one not in self._staying.values():
                    one.close()

    def keep(self, launches: Collection[Launch]) -> None:
        """Close all candidates but these, whatever the rates of their links."""
        kept = {_without_rates(launch) for launch in launches}
        for launch in [launch for launch in self._staying if _without_rates(launch) not in kept]:
            self._staying.pop(launch).close()

    def _new(self, name: str, launch: Launch, which: str, say: Say) -> RunningCandidate:
        # Out of memory, the kernel would kill any candidate that runs. So a new one fails before it starts.
        left = available_bytes()
        if left is not None and left < self._largest_bytes:
            raise CaseError(
                f"memory is short: one candidate took {self._largest_bytes / 2**30:.1f} GiB, and {left / 2**30:.1f} "
                "GiB are left. Compare fewer candidates at once."
            )
        say(f"starting {name} ({which})")
        return launch.place.start(name, launch)

    def _reshaped(self, launch: Launch) -> RunningCandidate | None:
        """Return the candidate that stayed, with the link rates of `launch`, or None if there is none.

        A TCP connection keeps the largest window that it had. So for links with smaller windows, it starts anew.
        """
        before = next((each for each in self._staying if _without_rates(each) == _without_rates(launch)), None)
        if before is None:
            return None
        assert isinstance(before.place, LabPlace) and isinstance(launch.place, LabPlace)
        one = self._staying[before]
        if _window_bytes(before.place) > _window_bytes(launch.place):
            self._staying.pop(before).close()
            return None
        one.shape(launch.place.inter, launch.place.intra)
        return self._staying.pop(before)


def _window_bytes(place: LabPlace) -> float:
    return window_bytes(Rate.parse(place.inter) if isinstance(place.inter, str) else place.inter)


def _without_rates(launch: Launch) -> Launch:
    """Return the launch of the same candidate, on links of any rate."""
    return replace(launch, place=replace(launch.place, inter=None, intra=None)) if launch.stays else launch


@contextmanager
def started(
    launches: Mapping[str, Launch], say: Say, failures: dict[str, str] | None = None
) -> Generator[dict[str, RunningCandidate]]:
    """Start candidates as `Pool.started` does, for a single comparison."""
    with Pool() as pool, pool.started(launches, say, failures) as made:
        yield made
