"""What the results of benchmarks depend on: order, intervals, links, candidates and files.

Nothing here is timed: clocks, candidates and hosts are made up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import towpath
from benchmarks import islands, recording, report, selection
from benchmarks.harness import comparison, figures, results
from benchmarks.harness.candidates import CaseError
from benchmarks.peers import CandidateSpec
from benchmarks.selection import LOW_RANK, POWERSGD, Candidate
from benchmarks.suites import outer, protect, strategies, wires
from benchmarks.workload import Workload
from lab import LinkBytes
from towpath.comparison import CONFIDENCE, interleave, interval_of_median
from towpath.topology.cluster import Topology

SQUARE = Topology(2, 2)


# --- samples and intervals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 6))
def test_every_candidate_has_the_same_place_on_average(count: int) -> None:
    names = [f"candidate {i}" for i in range(count)]
    orders = [interleave(names, turn) for turn in range(2 * count)]
    assert all(sorted(order) == names for order in orders)
    for rounds in range(2, 2 * count + 1, 2):
        places = [sum(order.index(name) for order in orders[:rounds]) for name in names]
        assert len(set(places)) == 1
    assert {sum(order[0] == name for order in orders) for name in names} == {2}


@dataclass
class Runner:
    """Takes as long as it is given, and sends more bytes with every sample."""

    log: list[str]
    name: str
    seconds: Iterator[float]
    carried: int = 1000

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        self.log.append(f"{self.name} {method}")
        if self.name == "broken" and len(self.log) > 2:
            raise CaseError("rank 1 failed:\nRuntimeError: sizes differ")
        self.carried += 10 * len(self.log)
        return [next(self.seconds), 99.0]  # rank 0 waited for all

    def counters(self) -> tuple[LinkBytes, ...]:
        return (LinkBytes(self.carried, 5, 2 * self.carried), LinkBytes(7, 7, 7))


def test_every_sample_has_its_own_seconds_and_bytes() -> None:
    log: list[str] = []
    runners = {"A": Runner(log, "A", iter([1.0, 2.0])), "B": Runner(log, "B", iter([3.0, 4.0]))}
    run = comparison.compare(runners, 2, lambda text: None)
    assert log == ["A sample", "B sample", "B sample", "A sample"]
    assert run.order == [["A", "B"], ["B", "A"]]
    assert run.seconds == {"A": [1.0, 2.0], "B": [3.0, 4.0]}
    assert run.between_nodes == {"A": [10, 40], "B": [20, 30]}
    assert run.inside_nodes == {"A": [20, 80], "B": [40, 60]}
    recorded = run.recorded()
    assert recorded["rounds"] == 2 and recorded["median_seconds"] == {"A": 1.5, "B": 3.5}
    assert recorded["spread"] == {"A": 0.6667, "B": 0.2857}  # largest less smallest, over the median


def test_a_candidate_that_fails_is_left_out_and_named() -> None:
    log: list[str] = []
    runners = {name: Runner(log, name, itertools.count(1.0)) for name in ("A", "broken", "C")}
    failures: dict[str, str] = {}
    run = comparison.compare(runners, 3, lambda text: None, failures)
    assert failures == {"broken": "RuntimeError: sizes differ"} and "broken" not in run.order[2]
    assert run.seconds == {"A": [1.0, 2.0, 3.0], "C": [1.0, 2.0, 3.0]}


@pytest.mark.parametrize("count", [1, 2, 5, 6, 10])
def test_an_interval_covers_the_median_as_often_as_it_says(count: int) -> None:
    """Each value is above or below the true median (0) with equal probability: all the ways it can come."""
    found = [
        interval_of_median([sign * (1 + i) for i, sign in enumerate(signs)])
        for signs in itertools.product((-1, 1), repeat=count)
    ]
    covered = sum(interval.low <= 0 <= interval.high for interval in found)
    assert {interval.coverage for interval in found} == {covered / 2**count}
    assert (found[0].coverage >= CONFIDENCE) == (count >= 6)


def test_the_interval_of_a_ratio_is_within_rounds() -> None:
    """The host became slower from round to round: the ratio within a round did not change."""
    theirs = [1.0, 2.0, 3.0, 4.0, 5.0, 60.0]
    check = figures.ratio({"ours": [0.5 * s for s in theirs], "theirs": theirs}, "ours", "theirs", 0.4)
    assert check.interval == figures.ConfidenceInterval(0.5, 0.5, 1 - 2 / 64)
    assert (check.what, check.found, check.met) == ("ours / theirs", 0.5, False)
    assert figures.Check("x", 1.0, at_most=1.0).met and not figures.Check("x", 0.9, at_least=1.0).met
    assert figures.Check("x", 1.0).met is None


# --- files of results ------------------------------------------------------------------------------------------------


def line(case: str, **more: Any) -> dict[str, Any]:
    return {"harness": 2, "date": "2026-01-01T00:00:00Z", "case": {"name": case}, "checks": [], **more}


def test_a_run_is_added_and_the_last_with_figures_counts(tmp_path: Path) -> None:
    file = tmp_path / "made" / "a.jsonl"
    for each in (line("x", found=1), line("y", found=2), line("x", found=3), line("y", failed="it died")):
        before = file.read_bytes() if file.exists() else b""
        results.append(file, each)
        assert file.read_bytes().startswith(before)
    lines = results.read(file)
    assert {name: run.get("found") for name, run in results.last(lines).items()} == {"x": 3, "y": 2}
    assert results.last(lines, failed=True)["y"]["failed"] == "it died"
    file.write_text('{"case": ')
    with pytest.raises(ValueError, match="ends in the middle of a line"):
        results.append(file, line("x"))
    with pytest.raises(ValueError, match=r"a\.jsonl:1 is not a line of JSON"):
        results.read(file)


@pytest.mark.parametrize("file", sorted(results.FOLDER.glob("*.jsonl")), ids=lambda file: file.stem)
def test_committed_runs_are_stamped_and_can_be_shown(file: Path) -> None:
    lines = results.read(file)
    old = [run for run in lines if run["harness"] == 1]
    assert lines[: len(old)] == old and all(run["note"] == "before the harness" for run in old)
    stamped = {"commit", "clean", "date", "host", "versions", "load", "warnings", "took_seconds"}
    for run in lines[len(old) :]:
        assert run["harness"] == results.HARNESS and stamped <= run.keys() and "quick" not in run
    for run in lines:
        assert run["suite"] == file.stem or file.stem.startswith(f"{run['suite']}-")
    shown = report.last_runs(file)
    assert lines[0]["case"]["name"][:20] in shown and all(len(row) <= report.WIDTH for row in shown.splitlines())


# --- who is compared with whom ---------------------------------------------------------------------------------------


def candidates(*names: str) -> list[Candidate]:
    return [Candidate.of(name, SQUARE, "bfloat16") for name in names]


def test_lossless_meets_lossless_and_deepspeed_is_met_anyway() -> None:
    seconds = {"mics": 2.0, "zero++": 1.0, LOW_RANK: 1.5, "hsdp tuned": 3.0, "hsdp tuned ring": 2.5, POWERSGD: 1.4}
    seconds["deepspeed stage=3"] = 9.0
    found = {pair.what: pair for pair in selection.pairs(candidates(*seconds), seconds, 4.0)}
    met = {what: (pair.ours, pair.theirs, pair.at_least) for what, pair in found.items()}
    assert met["lossless"][:2] == ("mics", "hsdp tuned ring")
    assert met["lossless, peers as they come"] == ("mics", "hsdp tuned", 0.97)
    assert met["lossy against lossless"] == ("zero++", "hsdp tuned ring", 2.2)
    assert met[selection.AGAINST_DEEPSPEED] == ("mics", "deepspeed stage=3", 0.97)
    assert met["low rank"][:2] == (LOW_RANK, POWERSGD)
    check = selection.Pair("lossless", "mics", "hsdp", 0.97).check({"mics": [1.0, 2.0], "hsdp": [2.0, 4.0]})
    assert check.found == 2.0 and check.met  # how many times as fast ours is


def test_wires_under_peers_are_ours_and_lossless_unless_they_encode() -> None:
    wired = candidates("fsdp2 wires", "hsdp tuned reshard=no wires", "torch-ddp tuned wires", "fsdp2 wires=int8")
    assert all(each.ours and not each.helped for each in wired)
    assert [each.lossless for each in wired] == [True, True, True, False]
    names = selection.every_name(1)
    assert {"fsdp2 wires", "hsdp wires", "torch-ddp tuned wires"} <= {*selection.expanded(["ours"], 1)} <= {*names}
    assert not any("wires" in name for name in selection.expanded(["peers"], 1))
    for name in ("fsdp2 wires ring", "torch-ddp wires bf16", "torch-ddp powersgd=4 wires"):
        with pytest.raises(ValueError, match="replaces the same transfers"):
            CandidateSpec.parse(name)
    # They have no strategy to replay, and so no lower bound.
    workload = Workload(SQUARE, 1, "bfloat16").quick()
    assert [*strategies.lower_bounds(candidates("fsdp2 wires", "mics"), workload, 1.0, None)] == ["mics"]
    assert [*strategies.bytes_checks({"fsdp2 wires": 1}, candidates("fsdp2 wires"), workload)] == []


# --- figures of suites -----------------------------------------------------------------------------------------------


def test_scaling_compares_sent_bytes_with_the_schedule() -> None:
    workload = Workload(SQUARE, 1, "bfloat16").quick()
    sent = towpath.schedule("mics", workload.model(), precision=workload.precision, topology=SQUARE).inter_bytes
    for factor in (1, 2):
        [check] = strategies.bytes_checks({"mics": factor * sent}, candidates("mics", "hsdp tuned", "auto"), workload)
        assert check.found == factor and check.met == (factor == 1)


def test_wires_are_compared_with_stock_fsdp2_and_with_the_fastest_tuned_peer() -> None:
    hsdp, fsdp2, ddp = wires.TUNED
    seconds = {"fsdp2 wires": [2.0], "fsdp2 tuned wires": [1.0], "fsdp2": [4.0], hsdp: [1.4], fsdp2: [3.0], ddp: [1.2]}
    stock, tuned = wires.time_checks(seconds)
    assert stock.found == 2.0 and not stock.met and tuned.found == pytest.approx(1.2) and not tuned.met
    assert ddp in tuned.what and "fsdp2 tuned wires" in tuned.what
    assert all(check.met for check in wires.time_checks(seconds | {"fsdp2": [5.0], ddp: [1.25]}))
    # A candidate that failed is left out.
    assert [*wires.time_checks({ddp: [1.0]})] == []

    facts = {"parameters": 100, "held_bytes": 150}
    losses = {"fsdp2": [9.0] + [2.0] * wires.LAST, "fsdp2 wires": [1.0] + [2.0] * wires.LAST}
    sent = {"fsdp2": [900, 1100], "fsdp2 wires": [190, 200]}
    share, stock, wired, held, apart = wires.bytes_checks(sent, facts, losses, 0.2)
    assert share.found == 0.195 and share.met and apart.found == 0 and apart.met
    assert (stock.found, wired.found, held.found) == (5.0, 0.975, 1.5)
    assert not next(wires.bytes_checks(sent | {"fsdp2 wires": [200, 250]}, facts, losses, 0.2)).met


# --- outer steps and recorded gradients ------------------------------------------------------------------------------


def test_bytes_of_exchanges_are_compared_with_the_schedule() -> None:
    settings = islands.outer_of(islands.OuterSpec().strategy(SQUARE))
    between, scheduled, average = outer.bytes_checks(settings, [(True, 1, 1010), (False, 31, 31)] * 2, 1000, 5000)
    assert between.found == 1 / 5000 and between.met and scheduled.found == 1.01 and scheduled.met
    assert average.found == pytest.approx(1041 / 32 / 5000) and average.at_most == 0.01
    _, missing, _ = outer.bytes_checks(settings, [(True, 1, 900), (False, 31, 0)], 1000, 5000)
    assert not missing.met


def test_bytes_of_snapshots_are_compared_with_the_schedule_at_the_share_of_exact_messages() -> None:
    protected = [
        towpath.schedule(towpath.strategy(name, SQUARE), Workload().quick().model()).protection
        for name in ("zero3", "mics")
    ]
    buddies, state = 2 * protected[0].buddy_bytes, 2 * protected[1].state_bytes
    checks = list(protect.bytes_checks(0.808 * buddies, 0.4 * buddies, 0.5 * buddies, protected[0]))
    assert [round(check.found, 3) for check in checks[:2]] == [1.01, 0.8] and checks[0].met
    assert not next(protect.bytes_checks(0.83 * buddies, 0.4 * buddies, 0.5 * buddies, protected[0])).met
    [check] = protect.bytes_checks(0.02 * state, 0, 0, protected[1])
    assert check.found == pytest.approx(0.02) and not check.met


def test_pairs_of_windows_are_compared() -> None:
    seconds = {"mics": [1.0, 2.0, 4.0], "mics protect=10": [1.02, 2.0, 4.4]}
    [check] = protect.time_checks("mics", "mics protect=10", seconds, 1.03)
    assert check.found == pytest.approx(1.02) and check.met


def test_blocks_that_wait_have_the_gradients_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Wide enough that matrices of blocks are recorded as factors.
    computes = Workload(micro_steps=2, width=96, depth=2, batch=1, length=4)
    waits = replace(computes, wait_seconds=0.0)
    kept = replace(recording.Recording.of(waits, waits.model()), steps=2, ranks=2)
    recording.record(kept, tmp_path / "gradients")
    rows = kept.mapped(tmp_path / "gradients")
    monkeypatch.setattr(recording, "gradients_of", lambda _: rows)
    batches, models = computes.data(0), (computes.model(), waits.model())
    for micro_step in range(4):
        batch = next(batches)
        for model in models:
            model.zero_grad()
            (model(*batch) / computes.micro_steps).backward()
        pairs = [(p.grad, q.grad) for p, q in zip(*(model.parameters() for model in models), strict=True)]
        # In the second step, recorded weights have changed, and those of the models here have not.
        assert micro_step > 1 or all(torch.equal(*pair) for pair in pairs)
        assert micro_step < 2 or not any(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(rows[0, 0, 0], rows[0, 0, 1])  # another rank
