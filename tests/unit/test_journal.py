"""What ranks compare at a boundary, without a rank: digests under a maximum, and pages that are still being written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import towpath
from towpath.core.journal import Journal, Page, difference, journal_bytes, scopes
from towpath.core.strategy import Kind
from towpath.errors import StepError

SHAPE = towpath.Topology(2, 2)
KINDS = [Kind.GATHER, Kind.BACKWARD_GATHER, Kind.REDUCE, Kind.SYNC, Kind.PUBLISH]
ENTRIES = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from("abc")), max_size=6)


def _journals(strategy: towpath.Strategy, by_rank: list[list[tuple[Kind, str]]]) -> list[Journal]:
    journals = [Journal(strategy, rank) for rank in range(len(by_rank))]
    for journal, entries in zip(journals, by_rank, strict=True):
        for kind, unit in entries:
            journal.note(kind, unit)
    return journals


def _combined(journals: list[Journal]) -> bytes:
    return bytes(map(max, zip(*(j.encoded() for j in journals), strict=True)))


def _must_agree(strategy: towpath.Strategy, by_rank: list[list[tuple[Kind, str]]]) -> bool:
    """Said plainly: within each replica, of each extent, the ranks' entries of its kinds are the same lists."""
    for scope in scopes(strategy):
        for group in range(scope.groups):
            lists = [[e for e in by_rank[rank] if e[0] in scope.kinds] for rank in scope.members(group)]
            if any(other != lists[0] for other in lists):
                return False
    return True


@settings(deadline=None)
@given(st.sampled_from(["zero3", "mics", "paro-iig", "paro-nig", "hpz", "zero1", "ddp"]), ENTRIES, st.data())
def test_a_boundary_passes_exactly_where_the_ranks_of_each_replica_agree(
    name: str, entries: list[tuple[Kind, str]], data: st.DataObject
) -> None:
    strategy = towpath.strategy(name, SHAPE)
    by_rank = [data.draw(st.one_of(st.just(entries), ENTRIES)) for _ in range(SHAPE.world)]
    journals = _journals(strategy, by_rank)
    combined, pages = _combined(journals), [j.page() for j in journals]
    for journal in journals:
        if _must_agree(strategy, by_rank):
            journal.check(combined, lambda _: pages)
            assert journal.page().entries == () and journal.page().step == 1
        else:
            with pytest.raises(StepError, match=rf"rank {journal.rank}: the ranks ran different units"):
                journal.check(combined, lambda _: pages)


def test_replicas_are_compared_apart() -> None:
    nodes = [[(Kind.GATHER, "a")], [(Kind.GATHER, "a")], [(Kind.GATHER, "b")], [(Kind.GATHER, "b")]]
    for name, agree in (("mics", True), ("paro-iig", True), ("zero3", False), ("hpz", False)):
        assert _must_agree(towpath.strategy(name, SHAPE), nodes) is agree
        journals = _journals(towpath.strategy(name, SHAPE), nodes)
        if agree:
            journals[0].check(_combined(journals), lambda _: [])


def test_what_the_comparison_costs_is_a_few_bytes_a_replica() -> None:
    assert journal_bytes(towpath.strategy("ddp", SHAPE)) == 0
    assert journal_bytes(towpath.strategy("zero3", SHAPE)) == 3 * 16  # P, G and OS: one replica each
    assert journal_bytes(towpath.strategy("mics", SHAPE)) == 3 * 2 * 16  # a replica a node
    usage = [t for t in towpath.schedule(towpath.strategy("mics", SHAPE), [100, 100]).transfers if t.kind is Kind.USAGE]
    assert [t.elements for t in usage] == [2 + 96]


def test_pages_that_are_still_written_differ_only_where_no_more_can_come() -> None:
    scope = scopes(towpath.strategy("zero3", SHAPE))[0]

    def page(units: str, ended: bool = False, step: int = 4) -> tuple[int, Page]:
        journal = Journal(towpath.strategy("zero3", SHAPE), 0)
        for _ in range(step):
            journal.turn()
        for unit in units:
            journal.note(Kind.GATHER, unit)
        if ended:
            journal.note(Kind.USAGE, "")
        assert Page.from_json(journal.page().to_json()) == journal.page()
        return 0, journal.page()

    assert difference(scope, page("ab"), page("ab")) is None
    assert difference(scope, page("ab"), page("abc")) is None  # the first may still gather c
    assert difference(scope, page("ab", step=3), page("ac")) is None  # of another step
    found = difference(scope, page("ab"), page("ac"))
    assert found is not None and found.number == 1
    ended = difference(scope, page("ab", ended=True), page("abc"))
    assert ended is not None and str(ended) == (
        "transfer 3 of the step was, on rank 0: nothing more, on rank 0: gather of unit 'c'"
    )
    assert difference(scope, page("abc"), page("ab", ended=True)) is not None
