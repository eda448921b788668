"""What ranks compare at a boundary, without a rank: digests under a maximum, and pages that are still being written."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import towpath
from towpath.core.journal import (
    FOLD,
    Call,
    CollectiveLog,
    Scope,
    StepLog,
    difference,
    has_not_made,
    journal_bytes,
    scopes,
)
from towpath.core.strategy import TransferKind
from towpath.errors import StepError

SHAPE = towpath.Topology(2, 2)
KINDS = [
    TransferKind.GATHER,
    TransferKind.BACKWARD_GATHER,
    TransferKind.REDUCE,
    TransferKind.GRAD_SYNC,
    TransferKind.PARAM_SYNC,
]
ENTRIES = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from("abc")), max_size=6)


def _journals(strategy: towpath.Strategy, by_rank: list[list[tuple[TransferKind, str]]]) -> list[CollectiveLog]:
    journals = [CollectiveLog(strategy, rank) for rank in range(len(by_rank))]
    for journal, entries in zip(journals, by_rank, strict=True):
        for kind, unit in entries:
            journal.note(kind, unit)
    return journals


def _scope(kind: TransferKind | Call, strategy: str = "zero3") -> Scope:
    return next(scope for scope in scopes(towpath.strategy(strategy, SHAPE)) if kind in scope.kinds)


def _combined(journals: list[CollectiveLog]) -> bytes:
    return bytes(map(max, zip(*(j.encoded() for j in journals), strict=True)))


def _must_agree(strategy: towpath.Strategy, by_rank: list[list[tuple[TransferKind, str]]]) -> bool:
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
    name: str, entries: list[tuple[TransferKind, str]], data: st.DataObject
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
    nodes = [
        [(TransferKind.GATHER, "a")],
        [(TransferKind.GATHER, "a")],
        [(TransferKind.GATHER, "b")],
        [(TransferKind.GATHER, "b")],
    ]
    for name, agree in (("mics", True), ("paro-iig", True), ("zero3", False), ("hpz", False)):
        assert _must_agree(towpath.strategy(name, SHAPE), nodes) is agree
        journals = _journals(towpath.strategy(name, SHAPE), nodes)
        if agree:
            journals[0].check(_combined(journals), lambda _: [])


def test_what_the_comparison_costs_is_a_few_bytes_a_replica() -> None:
    assert journal_bytes(towpath.strategy("ddp", SHAPE)) == 2 * 16  # the program, and the values that all ranks hold
    assert journal_bytes(towpath.strategy("zero3", SHAPE)) == (1 + 3) * 16  # P, G and OS: one replica each
    assert journal_bytes(towpath.strategy("mics", SHAPE)) == (1 + 2 + 3 * 2) * 16  # two slices; a replica a node
    usage = [
        t
        for t in towpath.schedule(towpath.strategy("mics", SHAPE), [100, 100]).transfers
        if t.kind is TransferKind.UNUSED_PARAMS
    ]
    assert [t.elements for t in usage] == [2 + 9 * 16]


def test_pages_that_are_still_written_differ_only_where_no_more_can_come() -> None:
    scope = _scope(TransferKind.GATHER)

    def page(units: str, ended: bool = False, step: int = 4) -> tuple[int, StepLog]:
        journal = CollectiveLog(towpath.strategy("zero3", SHAPE), 0)
        for _ in range(step):
            journal.turn()
        for unit in units:
            journal.note(TransferKind.GATHER, unit)
        if ended:
            journal.note(TransferKind.UNUSED_PARAMS, "")
        assert StepLog.from_json(journal.page().to_json()) == journal.page()
        return 0, journal.page()

    assert difference(scope, page("ab"), page("ab")) is None
    assert difference(scope, page("ab"), page("abc")) is None  # the first may still gather c
    assert difference(scope, page("ab", step=3), page("ac")) is None  # of another step
    found = difference(scope, page("ab"), page("ac"))
    assert found is not None and found.number == 1
    ended = difference(scope, page("ab", ended=True), page("abc"))
    assert ended is not None and re.search("3 .*rank 0: nothing.*rank 0: gather of unit 'c'", str(ended))
    assert difference(scope, page("abc"), page("ab", ended=True)) is not None


@pytest.mark.parametrize("count", [FOLD, 2 * FOLD, 2 * FOLD + 1, 7 * FOLD + 3])
@pytest.mark.parametrize("changed", [0, FOLD - 1, FOLD, -1])
def test_a_difference_is_found_however_long_ago_it_was_made(count: int, changed: int) -> None:
    units = [str(number) for number in range(count)]
    others = list(units)
    others[changed % count if changed < count else 0] = "another"
    by_rank = [[(TransferKind.GATHER, unit) for unit in each] for each in (units, units, others, units)]
    journals = _journals(towpath.strategy("zero3", SHAPE), by_rank)
    combined, pages = _combined(journals), [journal.page() for journal in journals]
    assert all(len(page.entries) < 2 * FOLD for page in pages)
    for journal in journals:
        with pytest.raises(StepError, match=r"the ranks ran different units.*rank 2"):
            journal.check(combined, lambda _: pages)


@pytest.mark.parametrize("lead", [1, FOLD - 1, FOLD])
def test_ranks_of_which_one_is_far_ahead_are_compared_as_far_as_both_have_come(lead: int) -> None:
    scope = _scope(TransferKind.GATHER)

    def page(units: range, first: str = "") -> StepLog:
        journal = CollectiveLog(towpath.strategy("zero3", SHAPE), 0)
        for number in units:
            journal.note(TransferKind.GATHER, first if first and not number else str(number))
        return journal.page()

    behind, ahead = page(range(3 * FOLD)), page(range(3 * FOLD + lead))
    assert difference(scope, (0, behind), (1, ahead)) is None
    found = difference(scope, (0, behind), (1, page(range(3 * FOLD + lead), first="another")))
    assert found is not None and found.folded and found.number <= 3 * FOLD + lead


def test_the_message_says_which_hyperparameter_differs() -> None:
    journals = [CollectiveLog(towpath.strategy("ddp", SHAPE), rank) for rank in range(SHAPE.world)]
    for rank, journal in enumerate(journals):
        details = ((("lr", 0.1), ("eps", 1e-8)), (("lr", 0.1 if rank != 3 else 0.2), ("eps", 1e-8)))
        journal.note(Call.STEP, "AdamW.step()", details)
    combined, pages = _combined(journals), [journal.page() for journal in journals]
    for journal in journals:
        with pytest.raises(
            StepError,
            match=rf"rank {journal.rank}: .*rank 0: AdamW.*lr=0.1 in group 1.*rank 3: AdamW.*lr=0.2 in group 1",
        ):
            journal.check(combined, lambda _: pages)


def test_a_rank_in_a_shared_call_waits_only_for_those_that_have_not_made_it() -> None:
    scope = _scope(Call.SHARED)

    def page(calls: str, inside: str = "") -> StepLog:
        journal = CollectiveLog(towpath.strategy("zero3", SHAPE), 0)
        for call in calls:
            journal.note(Call.SHARED, call)
        return replace(journal.page(), inside=inside)

    assert has_not_made(page("ab", "b"), page("a"), scope)
    assert not has_not_made(page("ab", "b"), page("ab", "b"), scope)
    assert not has_not_made(page("ab", "b"), page("abc"), scope)
    assert not has_not_made(page("ab"), page("a"), scope)  # it is through
