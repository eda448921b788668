"""Contestants that stay from one race to the next, on links of other rates: to start them takes longer than to race."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from towpath.bench.harness.contestants import Cluster, Contestant, Entry
from towpath.bench.harness.failure import CaseError, reason
from towpath.bench.harness.job import InJob
from towpath.engine.layout import available_bytes
from towpath.lab import Rate, window_bytes


class Pool:
    """Who was started and stays, by entry; in a `with`, at whose end nobody is left."""

    def __init__(self) -> None:
        self._staying: dict[Entry, Contestant | InJob] = {}
        self._largest_bytes = 0  # the most memory that a contestant took when it started

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(())

    @contextmanager
    def started(
        self, entries: Mapping[str, Entry], say: Callable[[str], None], failures: dict[str, str] | None = None
    ) -> Generator[dict[str, Contestant | InJob]]:
        """All of them, one after the other, each warmed up while the others are stopped. Whoever does not stay, or has
        failed, is gone at the end; so are all where this ends by an exception.

        One that cannot be started ends them all, unless there are `failures`: then it is left out, and named there.
        """
        made: dict[str, Contestant | InJob] = {}
        try:
            for number, (name, entry) in enumerate(entries.items(), start=1):
                try:
                    before = available_bytes() or 0
                    made[name] = self._reshaped(entry) or self._new(name, entry, f"{number} of {len(entries)}", say)
                    for _ in range(entry.warm_turns):
                        made[name].ask("turn")
                    self._largest_bytes = max(self._largest_bytes, before - (available_bytes() or 0))
                except CaseError as error:
                    if failures is None:
                        raise
                    failures[name] = reason(error)
                    say(f"{name} is left out: {failures[name]}")
            yield {name: one for name, one in made.items() if name not in (failures or {})}
            for name, one in made.items():
                if entries[name].stays and name not in (failures or {}):
                    self._staying[entries[name]] = one
        finally:
            for one in made.values():
                if one not in self._staying.values():
                    one.close()

    def keep(self, entries: Collection[Entry]) -> None:
        """Close whoever is none of these, whatever the rates of its links."""
        kept = {_without_rates(entry) for entry in entries}
        for entry in [entry for entry in self._staying if _without_rates(entry) not in kept]:
            self._staying.pop(entry).close()

    def _new(self, name: str, entry: Entry, which: str, say: Callable[[str], None]) -> Contestant | InJob:
        if isinstance(entry.place, Cluster):  # the ranks of a job might not find the same
            self._check_memory()
        say(f"starting {name} ({which})")
        return entry.place.start(name, entry)

    def _check_memory(self) -> None:
        """Fail before the start, with a reason: out of memory, the kernel would kill any one of those that run. Not on
        a host that does not tell what it has left."""
        left = available_bytes()
        if left is not None and left < self._largest_bytes:
            raise CaseError(
                f"memory is short: one contestant took {self._largest_bytes / 2**30:.1f} GiB, and {left / 2**30:.1f} "
                "GiB are left. Race fewer contestants at once."
            )

    def _reshaped(self, entry: Entry) -> Contestant | None:
        """The one that stays, its links given the rates of `entry`; None where there is none. A connection keeps the
        largest window it had: for links that ask for less, the contestant starts anew."""
        before = next((each for each in self._staying if _without_rates(each) == _without_rates(entry)), None)
        if before is None:
            return None
        one = self._staying[before]
        assert not isinstance(one, InJob) and isinstance(before.place, Cluster) and isinstance(entry.place, Cluster)
        if _window_bytes(before.place) > _window_bytes(entry.place):
            self._staying.pop(before).close()
            return None
        one.shape(entry.place.inter, entry.place.intra)
        del self._staying[before]
        return one


def _window_bytes(place: Cluster) -> float:
    return window_bytes(Rate.parse(place.inter) if isinstance(place.inter, str) else place.inter)


def _without_rates(entry: Entry) -> Entry:
    """The same contestant, whatever the rates of its links."""
    return replace(entry, place=replace(entry.place, inter=None, intra=None)) if entry.stays else entry


@contextmanager
def started(
    entries: Mapping[str, Entry], say: Callable[[str], None], failures: dict[str, str] | None = None
) -> Generator[dict[str, Contestant | InJob]]:
    """`Pool.started` for a single race."""
    with Pool() as pool, pool.started(entries, say, failures) as made:
        yield made
