"""Which transfers a rank has submitted since the last boundary, and how ranks find out that theirs differ.

Collectives match by their order alone: where one rank gathers an expert and another rank another one of the same size,
each computes with a mixture of both, and nothing fails. So at every boundary the ranks compare, within each group whose
members must submit the same transfers, a digest of what they have submitted. It travels with the usage of parameters,
which all ranks combine by maximum anyway: every group has a slot of its own, with the digest and its complement. Where
all members agree, each byte and its complement are 255 together; where two differ, they are more.

    gathers              compared within a replica of the parameters (replicas may run different units), trainable and
                         frozen ones together
    reductions           within a replica of the gradients
    syncs, publishes,    within a replica of the optimizer states
    and what an optimizer needs that steps whole matrices
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from towpath.core.strategy import Kind, Strategy
from towpath.core.transitions import replicas
from towpath.errors import StepError

_DIGEST_BYTES = 8
_SLOT_BYTES = 2 * _DIGEST_BYTES
_COMPLEMENT = bytes(255 - byte for byte in range(256))


@dataclass(frozen=True, slots=True)
class Scope:
    """Kinds of transfer that the ranks of one group submit alike. `group_of[rank]`: the group's number."""

    kinds: frozenset[Kind]
    group_of: tuple[int, ...]
    first_slot: int

    @property
    def groups(self) -> int:
        return max(self.group_of) + 1

    def members(self, group: int) -> list[int]:
        return [rank for rank, theirs in enumerate(self.group_of) if theirs == group]


@lru_cache(maxsize=256)
def scopes(strategy: Strategy) -> tuple[Scope, ...]:
    """What the ranks of `strategy` compare: nothing where a replica is one rank."""
    placement, found, slot = strategy.placement, list[Scope](), 0
    for extent, kinds in (
        (strategy.gathered_over, (Kind.GATHER, Kind.BACKWARD_GATHER)),
        (placement.grads, (Kind.REDUCE,)),
        (placement.optimizer, (Kind.SYNC, Kind.PUBLISH, Kind.MATRIX_GRADIENTS, Kind.MATRIX_UPDATES)),
    ):
        if extent.size > 1:
            found.append(Scope(frozenset(kinds), replicas(extent, strategy.topology), slot))
            slot += found[-1].groups
    return tuple(found)


def journal_bytes(strategy: Strategy) -> int:
    """What the comparison adds to the usage of parameters."""
    return _SLOT_BYTES * sum(scope.groups for scope in scopes(strategy))


@dataclass(frozen=True, slots=True)
class Entry:
    """A transfer that was submitted, of all buckets of a unit together."""

    kind: Kind
    unit: str

    def __str__(self) -> str:
        return f"{self.kind.value} of unit {self.unit or 'root'!r}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first entry in which two ranks differ; None for a rank that has no more of them."""

    number: int
    ranks: tuple[int, int]
    entries: tuple[Entry | None, Entry | None]

    def __str__(self) -> str:
        entries = (
            f"rank {rank}: {entry or 'nothing more'}" for rank, entry in zip(self.ranks, self.entries, strict=True)
        )
        return f"transfer {self.number + 1} of the step was, on {', on '.join(entries)}"


@dataclass(frozen=True, slots=True)
class Page:
    """What one rank has submitted in the running step of a model. `ended`: it has come to the boundary."""

    model: int
    step: int
    ended: bool
    entries: tuple[Entry, ...]

    def to_json(self) -> list[Any]:
        return [self.model, self.step, self.ended, [[e.kind.value, e.unit] for e in self.entries]]

    @staticmethod
    def from_json(fields: Sequence[Any]) -> Page:
        model, step, ended, entries = fields
        return Page(model, step, ended, tuple(Entry(Kind(kind), unit) for kind, unit in entries))


class Journal:
    """Of one model on one rank. `model`: its number, the same on all ranks."""

    def __init__(self, strategy: Strategy, rank: int, model: int = 0) -> None:
        self.rank, self.model = rank, model
        self.scopes = scopes(strategy)
        self._bytes = journal_bytes(strategy)
        self._step, self._ended = 0, False
        self._entries: list[Entry] = []  # since the last boundary

    def note(self, kind: Kind, unit: str) -> None:
        if kind is Kind.USAGE:
            self._ended = True
        else:
            self._entries.append(Entry(kind, unit))

    def turn(self) -> None:
        """To a new page."""
        self._step, self._ended, self._entries = self._step + 1, False, []

    def page(self) -> Page:
        """Also for another thread, at any time."""
        return Page(self.model, self._step, self._ended, tuple(self._entries))

    def encoded(self) -> bytes:
        """This rank's digests in the slots of its groups; zeros, which a maximum ignores, in those of others."""
        slots = bytearray(self._bytes)
        for scope in self.scopes:
            digest = self._digest(scope)
            start = _SLOT_BYTES * (scope.first_slot + scope.group_of[self.rank])
            slots[start : start + _SLOT_BYTES] = digest + digest.translate(_COMPLEMENT)
        return bytes(slots)

    def _digest(self, scope: Scope) -> bytes:
        text = "\n".join(f"{e.kind.value} {e.unit}" for e in self._entries if e.kind in scope.kinds)
        return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()

    def check(self, combined: bytes, of_all_ranks: Callable[[Page], list[Page]]) -> None:
        """Turn the page, or raise: on every rank, for `combined` is the same on all of them.

        `combined`: the maximum of what all ranks have encoded. `of_all_ranks`: of this rank's page, everyone's.
        """
        found = self._disagreeing(combined)
        page = self.page()
        self.turn()
        if found is not None:
            scope, group = found
            first, *others = scope.members(group)
            pages = of_all_ranks(page)
            differences = (difference(scope, (first, pages[first]), (rank, pages[rank]), ended=True) for rank in others)
            raise StepError(told_to(self.rank, next(d for d in differences if d is not None)))

    def _disagreeing(self, combined: bytes) -> tuple[Scope, int] | None:
        """The first group whose members differ."""
        for scope in self.scopes:
            for group in range(scope.groups):
                start = _SLOT_BYTES * (scope.first_slot + group)
                digest = combined[start : start + _DIGEST_BYTES]
                if digest.translate(_COMPLEMENT) != combined[start + _DIGEST_BYTES : start + _SLOT_BYTES]:
                    return scope, group
        return None


def difference(scope: Scope, one: tuple[int, Page], other: tuple[int, Page], ended: bool = False) -> Difference | None:
    """The first difference between two ranks' pages, if there is one already: pages may still be written.

    `ended`: these are not.
    """
    (rank, page), (peer, theirs) = one, other
    if (page.model, page.step) != (theirs.model, theirs.step):
        return None
    for number, pair in enumerate(_in_pairs(scope, page, theirs)):
        missing = [p for p, entry in zip((page, theirs), pair, strict=True) if entry is None]
        if pair[0] != pair[1] and (ended or all(p.ended for p in missing)):
            return Difference(number, (rank, peer), pair)
    return None


def _in_pairs(scope: Scope, page: Page, theirs: Page) -> Iterator[tuple[Entry | None, Entry | None]]:
    mine, others = ([e for e in p.entries if e.kind in scope.kinds] for p in (page, theirs))
    return zip_longest(mine, others)


def told_to(rank: int, found: Difference) -> str:
    return (
        f"rank {rank}: the ranks ran different units: {found}. Their gradients would be mixtures of both, and none is "
        "delivered. All ranks that share parameters must run the same units in the same order. Where they differ in "
        "what they use (experts, layers that are dropped at random), make one unit of the module around it: "
        "shard(…, units=[Experts, …])."
    )
