"""What ranks compare at a boundary: digests under a maximum, and step logs that are still being written."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import towpath
from towpath.core.queues import LoggedCall, Scope, digest_bytes, scopes
from towpath.core.strategy import TransferKind
from towpath.engine.agree.digest import KEPT, CollectiveLog, StepLog, difference
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


def _logs(strategy: towpath.Strategy, by_rank: list[list[tuple[TransferKind, str]]]) -> list[CollectiveLog]:
    logs = [CollectiveLog(strategy, rank) for rank in range(len(by_rank))]
    for log, entries in zip(logs, by_rank, strict=True):
        for kind, unit in entries:
            log.note(kind, unit)
    return logs


def _scope(kind: TransferKind | LoggedCall, strategy: str = "zero3") -> Scope:
    return next(scope for scope in scopes(towpath.strategy(strategy, SHAPE)) if kind in scope.kinds)


def _combined(logs: list[CollectiveLog]) -> bytes:
    return bytes(map(max, zip(*(j.encoded() for j in logs), strict=True)))


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
    logs = _logs(strategy, by_rank)
    combined, step_logs = _combined(logs), [j.step_log() for j in logs]
    for log in logs:
        if _must_agree(strategy, by_rank):
            log.check(combined, lambda _: step_logs)
            assert not any(kept for _, kept, _ in log.step_log().tails) and log.step_log().step == 1
        else:
            with pytest.raises(StepError, match=rf"rank {log.rank}: the ranks ran different units"):
                log.check(combined, lambda _: step_logs)


def test_what_the_comparison_costs_is_a_few_bytes_a_replica() -> None:
    assert digest_bytes(towpath.strategy("ddp", SHAPE)) == 2 * 16  # the program, and the values that all ranks hold
    assert digest_bytes(towpath.strategy("zero3", SHAPE)) == (1 + 3) * 16  # P, G and OS: one replica each
    assert digest_bytes(towpath.strategy("mics", SHAPE)) == (1 + 2 + 3 * 2) * 16  # two slices; a replica a node
    usage = [
        t
        for t in towpath.schedule(towpath.strategy("mics", SHAPE), [100, 100]).transfers
        if t.kind is TransferKind.UNUSED_PARAMS
    ]
    assert [t.elements for t in usage] == [2 + 9 * 16]


def test_pages_that_are_still_written_differ_only_where_no_more_can_come() -> None:
    scope = _scope(TransferKind.GATHER)

    def step_log(units: str, ended: bool = False, step: int = 4) -> tuple[int, StepLog]:
        log = CollectiveLog(towpath.strategy("zero3", SHAPE), 0)
        for _ in range(step):
            log.begin_step()
        for unit in units:
            log.note(TransferKind.GATHER, unit)
        if ended:
            log.note(TransferKind.UNUSED_PARAMS, "")
        return 0, log.step_log()

    assert difference(scope, step_log("ab"), step_log("ab")) is None
    assert difference(scope, step_log("ab"), step_log("abc")) is None  # the first may still gather c
    assert difference(scope, step_log("ab", step=3), step_log("ac")) is None  # of another step
    found = difference(scope, step_log("ab"), step_log("ac"))
    assert found is not None and found.number == 1
    ended = difference(scope, step_log("ab", ended=True), step_log("abc"))
    assert ended is not None and re.search("3 .*rank 0: nothing.*rank 0: gather of unit 'c'", str(ended))
    assert difference(scope, step_log("abc"), step_log("ab", ended=True)) is not None


@pytest.mark.parametrize("count", [KEPT, 2 * KEPT, 2 * KEPT + 1, 7 * KEPT + 3])
@pytest.mark.parametrize("changed", [0, KEPT - 1, KEPT, -1])
def test_a_difference_is_found_however_long_ago_it_was_made(count: int, changed: int) -> None:
    units = [str(number) for number in range(count)]
    others = list(units)
    others[changed % count if changed < count else 0] = "another"
    by_rank = [[(TransferKind.GATHER, unit) for unit in each] for each in (units, units, others, units)]
    logs = _logs(towpath.strategy("zero3", SHAPE), by_rank)
    combined, step_logs = _combined(logs), [log.step_log() for log in logs]
    assert all(len(kept) < 2 * KEPT for step_log in step_logs for _, kept, _ in step_log.tails)
    for log in logs:
        with pytest.raises(StepError, match=r"the ranks ran different units.*rank 2"):
            log.check(combined, lambda _: step_logs)


@pytest.mark.parametrize("lead", [1, KEPT - 1, KEPT])
def test_ranks_of_which_one_is_far_ahead_are_compared_as_far_as_both_have_come(lead: int) -> None:
    scope = _scope(TransferKind.GATHER)

    def step_log(units: range, first: str = "") -> StepLog:
        log = CollectiveLog(towpath.strategy("zero3", SHAPE), 0)
        for number in units:
            log.note(TransferKind.GATHER, first if first and not number else str(number))
        return log.step_log()

    behind, ahead = step_log(range(3 * KEPT)), step_log(range(3 * KEPT + lead))
    assert difference(scope, (0, behind), (1, ahead)) is None
    found = difference(scope, (0, behind), (1, step_log(range(3 * KEPT + lead), first="another")))
    assert found is not None and not found.kinds and found.number <= 3 * KEPT + lead


def test_the_message_says_which_hyperparameter_differs() -> None:
    logs = [CollectiveLog(towpath.strategy("ddp", SHAPE), rank) for rank in range(SHAPE.world)]
    for rank, log in enumerate(logs):
        details = ((("lr", 0.1), ("eps", 1e-8)), (("lr", 0.1 if rank != 3 else 0.2), ("eps", 1e-8)))
        log.note(LoggedCall.STEP, "AdamW.step()", details)
    combined, step_logs = _combined(logs), [log.step_log() for log in logs]
    for log in logs:
        with pytest.raises(
            StepError,
            match=rf"rank {log.rank}: .*rank 0: AdamW.*lr=0.1 in group 1.*rank 3: AdamW.*lr=0.2 in group 1",
        ):
            log.check(combined, lambda _: step_logs)


def test_a_rank_in_a_shared_call_waits_only_for_those_that_have_not_made_it() -> None:
    scope = _scope(LoggedCall.SHARED)

    def step_log(calls: str, inside: str = "") -> StepLog:
        log = CollectiveLog(towpath.strategy("zero3", SHAPE), 0)
        for call in calls:
            log.note(LoggedCall.SHARED, call)
        return log.step_log(inside)

    assert step_log("ab", "b").is_alone_in_call(step_log("a"), scope)
    assert not step_log("ab", "b").is_alone_in_call(step_log("ab", "b"), scope)
    assert not step_log("ab", "b").is_alone_in_call(step_log("abc"), scope)
    assert not step_log("ab").is_alone_in_call(step_log("a"), scope)  # it is through
