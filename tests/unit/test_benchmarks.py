"""What the results of benchmarks depend on: order, intervals, links, candidates and files.

Nothing here is timed: clocks, candidates and hosts are made up.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import towpath
from benchmarks import deepspeed_peer, environment, islands, recording, report, selection
from benchmarks.harness import comparison, figures, results, suite
from benchmarks.harness.candidates import CandidateError, CaseError, Launch, LocalPlace
from benchmarks.selection import LOW_RANK, POWERSGD, Candidate, lossless
from benchmarks.suites import outer, outer_time, planner, strategies
from benchmarks.workload import Workload
from lab import LinkBytes, Rate
from towpath.bench import CONFIDENCE, interleave, interval_of_median
from towpath.errors import ConfigError
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
    assert check.interval == figures.Interval(0.5, 0.5, 1 - 2 / 64)
    assert (check.what, check.found, check.met) == ("ours / theirs", 0.5, False)
    assert figures.Check("x", 1.0, at_most=1.0).met and not figures.Check("x", 0.9, at_least=1.0).met
    assert figures.Check("x", 1.0).met is None


# --- files of results ------------------------------------------------------------------------------------------------


def test_results_do_not_make_a_tree_unclean(tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "code.py").write_text("1")
    author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    head = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True)
    clean = {"commit": head.stdout.strip(), "clean": True}
    (tmp_path / "benchmarks" / "results" / "new.jsonl").write_text("a run")
    assert results.code(tmp_path) == clean
    (tmp_path / "new.py").write_text("2")  # it could be imported
    assert results.code(tmp_path) == clean | {"clean": False}
    (tmp_path / "site-packages").mkdir()
    assert results.code(tmp_path / "site-packages") == {"commit": None, "clean": None}


def test_the_kernel_tells_how_many_processors_are_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In hundredths of a second: user, nice, system, idle, waiting for a disk, and interrupts."""
    table = tmp_path / "stat"
    table.write_text("cpu  100 0 100 900 50 0 0 0 0 0\ncpu0 1 2 3\n")
    monkeypatch.setattr(results, "_PROCESSORS", table)
    monkeypatch.setattr(results.time, "monotonic", itertools.count(0, 2).__next__)
    later = "cpu  200 0 150 1000 90 25 25 0 0 0\n"
    monkeypatch.setattr(results.time, "sleep", lambda seconds: table.write_text(later))
    assert results.busy_processors() == 1.0
    assert results.warnings(0.2, True) == [] and len(results.warnings(0.21, False)) == 2


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


def test_recorded_words_are_read_as_those_of_today(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    recorded = {"case": {"name": "2x2-regime4-micro1", "link": {"regime": 4.0}}, "contestants": {"whole_matrices": {}}}
    file.write_text(json.dumps(recorded) + "\n")
    assert results.read(file) == [
        {"case": {"name": "2x2-ratio4-micro1", "link": {"comm_ratio": 4.0}}, "candidates": {"owner_stepped": {}}}
    ]


@dataclass(frozen=True)
class Case:
    name: str

    def measure(self, settings: suite.Settings) -> dict[str, Any]:
        if self.name == "broken":
            raise CaseError("rank 3 died")
        return {"checks": [figures.Check("ours / theirs", 0.5, 0.4)], "rounds": settings.rounds, "warnings": ["own"]}


@pytest.fixture
def things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a suite of made-up cases, and return its lines."""
    monkeypatch.setattr(results, "load", lambda: 0.75)
    monkeypatch.setattr(results, "busy_processors", lambda: 0.25)
    monkeypatch.setattr(results, "code", lambda root: {"commit": "abc", "clean": True})
    monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
    made = suite.Suite("things", "What it does.", [Case("first"), Case("second"), Case("broken")])

    def run(*arguments: str) -> list[dict[str, Any]]:
        try:
            made.run([*arguments, "--settle", "0", "-o", str(tmp_path / "things.jsonl")])
        except SystemExit as ended:
            assert "not measured: broken" in str(ended)
        return results.read(tmp_path / "things.jsonl")

    return run


def test_a_run_is_stamped_and_a_failed_case_is_recorded(things: Any) -> None:
    second, broken = things("broken", "second")
    expected = {"suite": "things", "harness": results.HARNESS, "commit": "abc", "clean": True, "busy_processors": 0.25}
    assert expected.items() <= second.items() and second["load"] == {"before": 0.75, "after": 0.75}
    assert second["warnings"] == [*results.warnings(0.25, True), "own"]
    assert second["checks"] == [{"what": "ours / theirs", "found": 0.5, "at_most": 0.4, "met": False}]
    assert (broken["case"]["name"], broken["failed"]) == ("broken", "rank 3 died")


def test_resume_leaves_out_what_has_figures_at_this_commit(things: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    things("first"), things("broken")
    assert [kept["case"]["name"] for kept in things("--resume")] == ["first", "broken", "second", "broken"]
    monkeypatch.setattr(results, "code", lambda root: {"commit": "later", "clean": True})
    assert things("--resume", "first")[-1]["commit"] == "later"
    monkeypatch.setattr(results, "code", lambda root: {"commit": "later", "clean": False})
    with pytest.raises(ConfigError, match="a tree as committed"):
        things("--resume")


# --- links and processes ---------------------------------------------------------------------------------------------


@dataclass
class Host:
    """FSDP2's communication: a part that no cable changes, and one in inverse proportion to its rate."""

    fixed_seconds: float
    bits: float
    tried: list[Rate] = field(default_factory=list)

    def measure(self, rate: Rate) -> environment.Trial:
        self.tried.append(rate)
        return environment.Trial(str(rate), self.fixed_seconds + self.bits / rate.bits_per_second, 1.0)


@pytest.mark.parametrize("asked", [8.0, 0.5])
@pytest.mark.parametrize("bits", [1e8, 1e10])
def test_a_rate_is_found_on_fast_and_slow_hosts(bits: float, asked: float) -> None:
    host = Host(fixed_seconds=0.2, bits=bits)
    derived = environment.derive_rate(asked, host.measure, lambda text: None)
    assert derived.reached and derived.rate == host.tried[-1] and len(host.tried) <= environment.MOST_TRIALS
    assert derived.found == derived.trials[-1].comm_ratio == pytest.approx(asked, rel=environment.TOLERANCE)


class Worker:
    """Answers, or fails as it is told."""

    def __init__(self, rank: int, world: int, factor: int) -> None:
        self.factor = factor

    def sample(self) -> int:
        return self.factor

    def fail(self) -> None:
        raise RuntimeError("on purpose")


def test_a_candidate_runs_only_while_it_is_asked(capfd: pytest.CaptureFixture[str]) -> None:
    candidate = LocalPlace().start("nine", Launch(LocalPlace(), Worker, (9,)))
    try:
        assert candidate.parked
        assert candidate.ask("sample") == [9]
        assert candidate.parked
        with pytest.raises(CandidateError, match=r"candidate 'nine': it ended with 1"):
            candidate.ask("fail")
        assert "on purpose" in capfd.readouterr().err
    finally:
        candidate.close()
    assert candidate.gone


# --- who is compared with whom ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "is_lossless"),
    [
        ("zero3", "bfloat16", True),
        ("zero++", "bfloat16", False),
        ("mics gradients=bf16", "bfloat16", True),
        ("mics gradients=bf16", "float32", False),
        ("mics exact=true", "float32", True),
        ("mics gradients=int4 exact=true", "float32", False),
        (LOW_RANK, "bfloat16", False),
        ("auto", "bfloat16", True),
        ("auto allow=int8", "bfloat16", False),
        ("torch-ddp tuned bf16", "float32", False),
        (POWERSGD, "bfloat16", False),
        ("fsdp2 tuned ring", "float32", True),
        ("deepspeed stage=3 hpz", "bfloat16", True),
        ("deepspeed stage=3 hpz quantized", "bfloat16", False),
    ],
)
def test_what_sends_fewer_bits_than_the_run_computes_in_is_lossy(name: str, dtype: str, is_lossless: bool) -> None:
    assert lossless(name, SQUARE, dtype) is is_lossless


def candidates(*names: str) -> list[Candidate]:
    return [Candidate.of(name, SQUARE, "bfloat16") for name in names]


def test_the_best_of_each_library_and_of_ours_reach_the_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_peer, "installed", lambda: False)
    names = selection.every_name(1)
    seconds = {name: 1.0 + number for number, name in enumerate(names)}
    seconds |= {"mics": 0.1, "zero++": 0.2, "paro-iig": 0.3, "qgz": 0.4, "auto": 0.5}
    seconds |= {e.name: 0.01 for e in candidates(*names) if e.helped}
    chosen = selection.finalists(candidates(*names), seconds)
    assert [e.name for e in chosen if e.ours] == ["mics", "zero++", "paro-iig", "qgz", "auto", LOW_RANK]
    # A peer that uses our ring does not replace the best one without it.
    peers = {e.name for e in chosen if not e.ours and e.lossless}
    assert peers == {"fsdp2", "fsdp2 tuned ring", "hsdp", "hsdp tuned ring", "torch-ddp"}
    del seconds["auto"]
    assert "auto" not in {e.name for e in selection.finalists(candidates(*names), seconds)}


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


# --- figures of suites -----------------------------------------------------------------------------------------------


def test_the_lower_bound_is_computation_or_communication() -> None:
    """On unshaped links it is the computation. Otherwise it is at least the time of the bytes, and less than both."""
    workload = Workload(SQUARE, 2, "bfloat16").quick()
    mics, rate = towpath.strategy("mics", workload.topology), Rate.parse("10mbit")
    assert strategies.lower_bound(mics, workload, 0.3, None) == pytest.approx(0.6)
    sent = towpath.schedule(mics, workload.model(), 2, towpath.Precision("bfloat16")).inter_bytes
    carried = sent / 2 / rate.bytes_per_second  # each of the two nodes has a cable
    assert carried < strategies.lower_bound(mics, workload, carried / 2, rate) < 2 * carried


def test_scaling_compares_sent_bytes_with_the_schedule() -> None:
    workload = Workload(SQUARE, 1, "bfloat16").quick()
    sent = towpath.schedule("mics", workload.model(), precision=workload.precision, topology=SQUARE).inter_bytes
    for factor in (1, 2):
        [check] = strategies.bytes_checks({"mics": factor * sent}, candidates("mics", "hsdp tuned", "auto"), workload)
        assert check.found == factor and check.met == (factor == 1)


def test_predictions_are_judged_by_medians() -> None:
    names = [*planner.LOSSLESS, *planner.LOSSY, "the plan's", "the plan's with codecs"]
    predicted = {name: float(number + 1) for number, name in enumerate(names)}
    measured = {name: [seconds, 9 * seconds, seconds / 2] for name, seconds in predicted.items()}
    measured[names[0]] = [2.0, 2.0, 2.0]  # predicted as 1
    found = planner.compared(predicted, measured)
    assert found["errors"][names[0]] == -0.5 and found["mean_error"] == pytest.approx(0.5 / len(names))
    assert found["regret"]["lossless"] == pytest.approx(predicted["the plan's"] / 2 - 1)
    assert found["regret"]["with codecs"] == pytest.approx(predicted["the plan's with codecs"] / 2 - 1)
    assert planner.rank_correlation([1, 2, 3], [1, 10, 1000]) == pytest.approx(1)
    assert planner.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)


# --- outer steps and recorded gradients ------------------------------------------------------------------------------


def test_outer_suites_know_which_steps_have_an_exchange() -> None:
    fragments = towpath.Outer(8, fragments=2, delay=1)
    assert [step for step in range(1, 21) if islands.under_way_in(fragments, step)] == [5, 6, 9, 10, 13, 14, 17, 18]
    assert [step for step in range(1, 20) if islands.begun_in(towpath.Outer(8, delay=3), step)] == [9, 17]
    assert outer.stretches(towpath.Outer(8), 9, 16) == [(True, 1), (False, 7), (True, 1), (False, 7)]
    assert islands.by_step([[1.0, 1.0], [1.0, 2.0]]) == [1.0, 1.5]  # the last rank decides


def test_bytes_of_exchanges_are_compared_with_the_schedule() -> None:
    settings = islands.outer_of(islands.OuterSpec().strategy(SQUARE))
    between, scheduled, average = outer.bytes_checks(settings, [(True, 1, 1010), (False, 31, 31)] * 2, 1000, 5000)
    assert between.found == 1 / 5000 and between.met and scheduled.found == 1.01 and scheduled.met
    assert average.found == pytest.approx(1041 / 32 / 5000) and average.at_most == 0.01
    _, missing, _ = outer.bytes_checks(settings, [(True, 1, 900), (False, 31, 0)], 1000, 5000)
    assert not missing.met


@pytest.mark.parametrize(("loss", "steps"), [(3.0, 32.0), (3.5, 16.0), (2.5, 80.0), (4.5, 0.0), (1.0, math.inf)])
def test_the_steps_until_a_loss_are_between_two_validations(loss: float, steps: float) -> None:
    assert outer_time.steps_until([(0, 4.0), (32, 3.0), (64, 3.1), (96, 1.9)], loss) == pytest.approx(steps, abs=0.1)


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
