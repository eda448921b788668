"""The harness of the benchmarks is fair, and its files keep everything.

Nothing here is timed: clocks, candidates and hosts are made up. One test starts processes, to see them stopped.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import environment, peers, pricing, report
from benchmarks.harness import comparison, figures, results, suite
from benchmarks.harness.candidates import CandidateError, CaseError, LabPlace, Launch, LocalPlace
from benchmarks.harness.comparison import Pool
from benchmarks.suites import overlap, planner
from benchmarks.workload import Workload
from towpath.bench import CONFIDENCE, interleave, interval_of_median
from towpath.core.presets import strategy
from towpath.core.queues import QUEUES
from towpath.core.strategy import TransferKind
from towpath.engine.streams.trace import BETWEEN, INSIDE, Interval
from towpath.errors import ConfigError
from towpath.lab import LinkBytes, Rate
from towpath.sim.timeline import Event
from towpath.topology.cluster import Topology


class TestInterleave:
    def test_two_go_in_both_orders(self) -> None:
        assert [interleave("AB", turn) for turn in range(4)] == [["A", "B"], ["B", "A"], ["B", "A"], ["A", "B"]]

    @pytest.mark.parametrize("count", range(1, 6))
    def test_everyone_has_the_same_place_on_average(self, count: int) -> None:
        names = [f"candidate {i}" for i in range(count)]
        orders = [interleave(names, turn) for turn in range(2 * count)]
        assert all(sorted(order) == names for order in orders)
        for rounds in range(2, 2 * count + 1, 2):
            places = [sum(order.index(name) for order in orders[:rounds]) for name in names]
            assert len(set(places)) == 1
        # Over all of them everybody was first equally often, too.
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
        self.carried += 10 * len(self.log)
        return [next(self.seconds), 99.0]  # rank 0 waited for all

    def counters(self) -> tuple[LinkBytes, ...]:
        return (LinkBytes(self.carried, 5, 2 * self.carried), LinkBytes(7, 7, 7))


class TestComparison:
    def test_every_sample_has_its_own_seconds_and_bytes(self) -> None:
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

    def test_one_that_fails_is_left_out_and_named(self) -> None:
        class Broken(Runner):
            def ask(self, method: str, *arguments: Any) -> list[Any]:
                if len(self.log) > 2:
                    raise CaseError("rank 1 failed:\nRuntimeError: sizes differ")
                return super().ask(method)

        def runners() -> dict[str, Runner]:
            log: list[str] = []
            return {n: kind(log, n, itertools.count(1.0)) for n, kind in (("A", Runner), ("B", Broken), ("C", Runner))}

        said: list[str] = []
        failures: dict[str, str] = {}
        run = comparison.compare(runners(), 3, said.append, failures)
        assert failures == {"B": "RuntimeError: sizes differ"} and "B is left out: RuntimeError" in "".join(said)
        assert run.seconds == {"A": [1.0, 2.0, 3.0], "C": [1.0, 2.0, 3.0]} and "B" not in run.order[2]
        assert set(run.recorded()["interface_bytes"]) == {"A", "C"}
        with pytest.raises(CaseError, match="sizes differ"):
            comparison.compare(runners(), 3, said.append)

    def test_what_sends_nothing_has_no_bytes(self) -> None:
        silent = SimpleNamespace(ask=lambda method: [1.0], counters=tuple)
        assert "interface_bytes" not in comparison.compare({"A": silent}, 1, lambda text: None).recorded()


class TestFigures:
    @pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8, 10])
    def test_an_interval_covers_the_median_as_often_as_it_says(self, count: int) -> None:
        """Each value is above or below the true median (0) with equal probability: all the ways it can come."""
        found = [
            interval_of_median([sign * (1 + i) for i, sign in enumerate(signs)])
            for signs in itertools.product((-1, 1), repeat=count)
        ]
        covered = sum(interval.low <= 0 <= interval.high for interval in found)
        assert {interval.coverage for interval in found} == {covered / 2**count}

    def test_it_takes_six_rounds_to_be_sure_at_95_percent(self) -> None:
        assert interval_of_median([5, 1, 3, 2, 4]).coverage < CONFIDENCE
        assert interval_of_median([5, 1, 3, 2, 4, 6]) == figures.Interval(1, 6, 1 - 2 / 64)
        assert interval_of_median(range(10)) == figures.Interval(1, 8, 1 - 22 / 1024)

    def test_the_interval_of_a_ratio_is_within_rounds(self) -> None:
        """The host became slower from round to round: the ratio within a round did not change."""
        theirs = [1.0, 2.0, 3.0, 4.0, 5.0, 60.0]
        check = figures.ratio({"ours": [0.5 * s for s in theirs], "theirs": theirs}, "ours", "theirs", 0.4)
        assert check.interval == figures.Interval(0.5, 0.5, 1 - 2 / 64)
        assert (check.what, check.found, check.met) == ("ours / theirs", 0.5, False)
        assert figures.verdict(check.recorded()) == "ours / theirs: 0.5 [0.5, 0.5 at 97%] (limit ≤ 0.4: exceeded)"

    def test_a_limit_is_met_exceeded_or_missing(self) -> None:
        assert figures.Check("x", 1.0, at_most=1.0).met is True
        assert figures.Check("x", 1.1, at_most=1.0).met is False
        assert figures.Check("x", 0.9, at_least=1.0).met is False
        assert figures.Check("x", 1.0).recorded() == {"what": "x", "found": 1.0, "met": None}
        assert figures.verdict(figures.Check("x", 1.0).recorded()) == "x: 1"


class TestStamp:
    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        (tmp_path / "benchmarks" / "results").mkdir(parents=True)
        (tmp_path / "code.py").write_text("1")
        (tmp_path / "benchmarks" / "results" / "a.jsonl").write_text("")
        author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "first"]):
            subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
        return tmp_path

    def test_results_do_not_make_a_tree_unclean(self, checkout: Path) -> None:
        head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
        clean = {"commit": head.stdout.strip(), "clean": True}
        (checkout / "benchmarks" / "results" / "a.jsonl").write_text("a run")
        (checkout / "benchmarks" / "results" / "new.jsonl").write_text("a run")
        assert results.code(checkout) == clean
        (checkout / "new.py").write_text("2")  # it could be imported
        assert results.code(checkout) == clean | {"clean": False}

    def test_without_git_that_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        assert results.code(tmp_path) == {"commit": None, "clean": None}
        assert results.warnings(0.0, None) == []

    def test_another_checkout_gives_no_commit(self, checkout: Path) -> None:
        (checkout / "site-packages").mkdir()
        assert results.code(checkout / "site-packages") == {"commit": None, "clean": None}

    def test_without_git_the_version_identifies_the_code(self) -> None:
        without = {"commit": None, "clean": None}
        assert results.same_code({**without, "versions": {"towpath": "1"}}, without, "1")
        assert not results.same_code({**without, "versions": {"towpath": "1"}}, without, "2")
        here = {"commit": "a", "clean": True}
        assert results.same_code(here, here, "1") and not results.same_code({"commit": "b", "clean": True}, here, "1")
        assert not results.same_code({"commit": "a", "clean": False}, here, "1")

    def test_it_says_where_and_with_what(self) -> None:
        found = results.stamp()
        assert set(found) == {"date", "commit", "clean", "host", "versions"}
        assert set(found["host"]) == {"cpu", "capability", "cores", "kernel", "machine"}
        assert set(found["versions"]) == {"python", "torch", "towpath"}
        assert found["date"].endswith("Z") and len(found["date"]) == len("2026-01-01T00:00:00Z")
        assert results.processor("processor\t: 0\nmodel name\t: A: B 2\nmodel name\t: C\n") == "A: B 2"

    def test_the_kernel_tells_how_many_processors_are_busy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In hundredths of a second: user, nice, system, idle, waiting for a disk, and interrupts."""
        table = tmp_path / "stat"
        table.write_text("cpu  100 0 100 900 50 0 0 0 0 0\ncpu0 1 2 3\n")
        monkeypatch.setattr(results, "_PROCESSORS", table)
        monkeypatch.setattr(results.time, "monotonic", itertools.count(0, 2).__next__)
        later = "cpu  200 0 150 1000 90 25 25 0 0 0\n"
        monkeypatch.setattr(results.time, "sleep", lambda seconds: table.write_text(later))
        assert results.busy_processors() == 1.0

    def test_a_busy_machine_is_named(self) -> None:
        assert results.warnings(0.2, True) == []
        [busy] = results.warnings(0.21, True)
        assert "0.21" in busy
        assert results.warnings(0.0, False) == ["the tree was not as committed"]


def line(case: str, **more: Any) -> dict[str, Any]:
    return {"harness": 2, "date": "2026-01-01T00:00:00Z", "case": {"name": case}, "checks": [], **more}


class TestResults:
    def test_a_run_is_added_and_nothing_is_taken_away(self, tmp_path: Path) -> None:
        file = tmp_path / "made" / "a.jsonl"
        results.append(file, line("x", found=1))
        before = file.read_bytes()
        results.append(file, line("x", found=2, name="ü"))
        assert file.read_bytes().startswith(before)
        assert [run["found"] for run in results.read(file)] == [1, 2]

    def test_the_last_run_with_figures_counts(self) -> None:
        lines = [line("x", found=1), line("y", found=2), line("x", found=3), line("y", failed="it died")]
        assert {name: run.get("found") for name, run in results.last(lines).items()} == {"x": 3, "y": 2}
        assert results.last(lines, failed=True)["y"]["failed"] == "it died"

    def test_a_file_that_is_not_there_has_no_runs(self, tmp_path: Path) -> None:
        assert results.read(tmp_path / "none.jsonl") == []

    def test_an_unfinished_line_is_not_written_on(self, tmp_path: Path) -> None:
        file = tmp_path / "a.jsonl"
        file.write_text('{"case": ')
        with pytest.raises(ValueError, match="ends in the middle of a line"):
            results.append(file, line("x"))
        assert file.read_text() == '{"case": '
        with pytest.raises(ValueError, match=r"a\.jsonl:1 is not a line of JSON"):
            results.read(file)


class TestCommitted:
    @pytest.mark.parametrize("file", sorted(results.FOLDER.glob("*.jsonl")), ids=lambda file: file.stem)
    def test_old_runs_come_first_and_later_ones_are_stamped(self, file: Path) -> None:
        lines = results.read(file)
        old = [run for run in lines if run["harness"] == 1]
        assert lines[: len(old)] == old and all(run["note"] == "before the harness" for run in old)
        stamped = {"commit", "clean", "date", "host", "versions", "load", "warnings", "took_seconds"}
        for run in lines[len(old) :]:
            assert run["harness"] == results.HARNESS and stamped <= run.keys() and "quick" not in run
        for run in lines:
            assert run["suite"] == file.stem or file.stem.startswith(f"{run['suite']}-")
            assert {"found", "what", "met"} <= set().union({"found", "what", "met"}, *run["checks"])

    def test_recorded_words_are_read_as_those_of_today(self, tmp_path: Path) -> None:
        file = tmp_path / "a.jsonl"
        recorded = {
            "case": {"name": "2x2-regime4-micro1-waiting", "link": {"regime": 4.0}},
            "regime": {"found in the race": 3.9, "trials": [{"regime": 4.2}]},
            "contestants": {"whole_matrices": {}},
            "warnings": ["the regime was 2.30 in the race; asked 2"],
            "screened_in": "2x2-regime8-micro1-waiting",
            "checks": [{"what": "mics: step / floor of perfect overlap"}, {"what": "encode/oracle"}],
        }
        file.write_text(json.dumps(recorded) + "\n")
        assert results.read(file) == [
            {
                "case": {"name": "2x2-ratio4-micro1-waiting", "link": {"comm_ratio": 4.0}},
                "comm_ratio": {"found": 3.9, "trials": [{"comm_ratio": 4.2}]},
                "candidates": {"owner_stepped": {}},
                "warnings": ["the communication-to-computation ratio was 2.30; requested 2"],
                "screened_in": "2x2-ratio8-micro1-waiting",
                "checks": [{"what": "mics: step / lower bound with perfect overlap"}, {"what": "encode/reference"}],
            }
        ]
        assert json.loads(file.read_text()) == recorded


@dataclass(frozen=True)
class Case:
    name: str
    fails: bool = False

    def measure(self, settings: suite.Settings) -> dict[str, Any]:
        if self.fails:
            raise CaseError("rank 3 died")
        checks = [figures.Check("ours / theirs", 0.5, 0.4)]
        return {"checks": checks, "rounds": settings.rounds, "quick seen": settings.quick, "warnings": ["its own"]}


@dataclass
class Ran:
    suite: suite.Suite
    file: Path
    cases: list[Case] = field(default_factory=list)

    def __call__(self, *arguments: str) -> list[dict[str, Any]]:
        self.suite.run([*arguments, "--settle", "0", "-o", str(self.file)])
        return results.read(self.file)


class TestSuite:
    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
        monkeypatch.setattr(results, "load", lambda: 0.75)
        monkeypatch.setattr(results, "busy_processors", lambda: 0.25)
        monkeypatch.setattr(results, "code", lambda root: {"commit": "abc", "clean": True})
        monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
        cases = [Case("first"), Case("second"), Case("broken", fails=True)]
        return Ran(suite.Suite("things", "What it does.", cases), tmp_path / "things.jsonl")

    def test_a_run_is_stamped_and_a_missed_one_stays(self, run: Ran, capsys: pytest.CaptureFixture[str]) -> None:
        run("first", "--rounds", "3")
        [_, second] = run("first")
        assert {"suite": "things", "harness": results.HARNESS, "commit": "abc", "clean": True, "rounds": 6}.items() <= (
            second.items()
        )
        assert second["load"] == {"before": 0.75, "after": 0.75} and second["busy_processors"] == 0.25
        assert second["warnings"] == [*results.warnings(0.25, True), "its own"]
        assert second["checks"] == [{"what": "ours / theirs", "found": 0.5, "at_most": 0.4, "met": False}]
        assert "first\n  ours / theirs: 0.5 (limit ≤ 0.4: exceeded)\n  warning: 0.25 processors were busy before" in (
            capsys.readouterr().out
        )

    def test_what_failed_is_kept_and_the_rest_goes_on(self, run: Ran) -> None:
        with pytest.raises(SystemExit, match="not measured: broken"):
            run("broken", "second")
        lines = results.read(run.file)
        assert [(kept["case"]["name"], kept.get("failed")) for kept in lines] == [
            ("second", None),
            ("broken", "rank 3 died"),
        ]

    def test_resume_leaves_out_what_has_figures_at_this_commit(self, run: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
        run("first")
        with pytest.raises(SystemExit, match="broken"):
            run("broken")
        with pytest.raises(SystemExit, match="broken"):
            run("--resume")
        assert [kept["case"]["name"] for kept in results.read(run.file)] == ["first", "broken", "second", "broken"]
        monkeypatch.setattr(results, "code", lambda root: {"commit": "later", "clean": True})
        assert run("--resume", "first")[-1]["commit"] == "later"
        monkeypatch.setattr(results, "code", lambda root: {"commit": "later", "clean": False})
        with pytest.raises(ConfigError, match="a tree as committed"):
            run("--resume")

    def test_a_quick_run_keeps_nothing_unless_told_where(self, run: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(results, "append", lambda *_: pytest.fail("a smoke run is no result"))
        run.suite.run(["first", "--quick"])
        monkeypatch.undo()
        [kept] = run("first", "--quick")
        assert kept["quick"] and kept["quick seen"] and kept["rounds"] == suite.QUICK_ROUNDS

    def test_an_interrupt_ends_the_suite_and_keeps_what_was_measured(
        self, run: Ran, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(case: Case, settings: suite.Settings) -> dict[str, Any]:
            if case.name == "second":
                raise KeyboardInterrupt
            return {}

        monkeypatch.setattr(Case, "measure", interrupted)
        with pytest.raises(SystemExit) as ended:
            run()
        assert ended.value.code == 130
        assert [kept["case"]["name"] for kept in results.read(run.file)] == ["first"]

    def test_an_unknown_case_is_refused_before_anything_runs(self, run: Ran) -> None:
        with pytest.raises(ConfigError, match="no case frist, nobody; there are first, second, broken"):
            run("nobody", "first", "frist")
        assert not run.file.exists()

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("things.jsonl/x.jsonl", "--output .*x.jsonl: there is no folder .*things.jsonl. Make it first, or"),
            (
                "nowhere/x.jsonl",
                "--output .*x.jsonl: there is no folder .*nowhere. Make it first, or name another file",
            ),
            (".", "--output .*: that is a folder. Name a file in it"),
        ],
    )
    def test_where_no_results_can_be_written_nothing_is_measured(
        self, run: Ran, given: str, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Case, "measure", lambda *_: pytest.fail("it was measured"))
        run.file.write_text("")
        with pytest.raises(ConfigError, match=said):
            run.suite.run(["first", "--quick", "-o", str(run.file.parent / given)])


@dataclass
class Host:
    """FSDP2's communication: a part that no cable changes, and one in inverse proportion to its rate."""

    compute_seconds: float
    fixed_seconds: float
    bits: float
    tried: list[Rate] = field(default_factory=list)

    def measure(self, rate: Rate) -> environment.Trial:
        self.tried.append(rate)
        return environment.Trial(str(rate), self.fixed_seconds + self.bits / rate.bits_per_second, self.compute_seconds)


class TestCommRatio:
    @pytest.mark.parametrize("asked", [8.0, 1.0, 0.5])
    @pytest.mark.parametrize("bits", [1e8, 1e9, 1e10])
    def test_a_rate_is_found_on_fast_and_slow_hosts(self, bits: float, asked: float) -> None:
        host = Host(compute_seconds=1.0, fixed_seconds=0.2, bits=bits)
        derived = environment.derive_rate(asked, host.measure, lambda text: None)
        assert derived.reached and derived.rate == host.tried[-1] and len(host.tried) <= environment.MOST_TRIALS
        assert derived.found == derived.trials[-1].comm_ratio == pytest.approx(asked, rel=environment.TOLERANCE)
        recorded = derived.recorded()
        assert recorded["requested"] == asked and recorded["inter"] == recorded["trials"][-1]["inter"]

    def test_a_rate_that_gives_it_at_once_is_taken(self) -> None:
        host = Host(0.5, 0.0, bits=8 * 0.5 * environment.FIRST.bits_per_second)
        assert environment.derive_rate(8.0, host.measure, lambda text: None).rate == environment.FIRST
        assert len(host.tried) == 1

    def test_two_trials_tell_the_fixed_part_from_the_rest(self) -> None:
        host = Host(1.0, fixed_seconds=0.4, bits=1e9)
        tried = [(rate, host.measure(rate)) for rate in (Rate(10**8), Rate(10**9))]
        assert environment.next_rate(0.5, tried) == Rate(10**10)  # 0.4 and 0.1

    @pytest.mark.parametrize(
        ("asked", "host", "words"),
        [
            (0.3, Host(1.0, 0.4, 1e9), "faster than any link here.*Request a larger comm ratio"),
            (1e6, Host(1.0, 0.4, 1e9), "slower than 1mbit.*Request a smaller comm ratio"),
        ],
        ids=["too little", "too much"],
    )
    def test_what_no_cable_gives_is_refused_with_what_to_do(self, asked: float, host: Host, words: str) -> None:
        with pytest.raises(environment.CommRatioError, match=words):
            environment.derive_rate(asked, host.measure, lambda text: None)

    def test_with_noise_the_nearest_trial_is_taken(self) -> None:
        answers = iter([4.0, 5.0, 4.5, 5.5, 4.2, 6.5, 6.6])
        noisy = lambda rate: environment.Trial(str(rate), next(answers), 1.0)  # noqa: E731
        derived = environment.derive_rate(8.0, noisy, lambda text: None)
        assert not derived.reached and derived.found == 6.6 and len(derived.trials) == environment.MOST_TRIALS + 1
        assert derived.trials[-1].inter == derived.trials[-2].inter  # of six, the last was the nearest


class TestCandidates:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("fsdp3", "neither a peer nor a strategy 'fsdp3', only fsdp2"),
            ("torch-ddp reshard=no", "torch-ddp has no option reshard; there are tuned, bf16"),
            ("bare tuned", "bare has no option tuned; there are barrier"),
        ],
    )
    def test_an_unknown_candidate_is_refused(self, text: str, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            peers.CandidateSpec.parse(text)

    def test_silent_fsdp2_has_every_parameter_and_its_gradient(self) -> None:
        workload = Workload().quick()
        model, silent = workload.model(), workload.silent_model()
        silent(*next(workload.data(0))).backward()
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        assert {name: parameter.grad.shape for name, parameter in silent.named_parameters()} == shapes


class Worker:
    """Answers, or fails as it is told."""

    def __init__(self, rank: int, world: int, factor: int) -> None:
        self.factor = factor

    def sample(self) -> int:
        return self.factor

    def fail(self) -> None:
        raise RuntimeError("on purpose")


class Pretended:
    """A candidate that is asked nothing."""

    def __init__(self, place: PretendedPlace) -> None:
        self.links, self.closed, self.samples = [place.inter], False, 0

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        self.samples += 1
        return [0.1]

    def shape(self, inter: Any, intra: Any) -> None:
        self.links.append(inter)

    def close(self) -> None:
        self.closed = True


class PretendedPlace(LabPlace):
    def start(self, name: str, launch: Launch) -> Any:
        return Pretended(self)


class TestPool:
    def launch(self, inter: str | None, stays: bool = True, name: str = "one") -> Launch:
        return Launch(PretendedPlace(Topology(2, 2), inter), Worker, (name,), warm_up=2, stays=stays)

    def run_with(self, pool: Pool, *launches: Launch, failed: Sequence[str] = ()) -> list[Any]:
        failures: dict[str, str] = {}
        with pool.started({each.arguments[0]: each for each in launches}, lambda text: None, failures) as made:
            failures |= dict.fromkeys(failed, "broke later")
        return list(made.values())

    def test_a_candidate_stays_for_links_of_another_rate(self) -> None:
        with Pool() as pool:
            [first], [second] = self.run_with(pool, self.launch("10mbit")), self.run_with(pool, self.launch("20mbit"))
            assert second is first and not first.closed
            assert first.links == ["10mbit", "20mbit"] and first.samples == 4
        assert first.closed

    def test_on_links_that_ask_for_smaller_windows_it_starts_anew(self) -> None:
        with Pool() as pool:
            [first], [second] = self.run_with(pool, self.launch(None)), self.run_with(pool, self.launch("20mbit"))
            assert first.closed and not second.closed
            [third], [fourth] = self.run_with(pool, self.launch("10mbit")), self.run_with(pool, self.launch("8gbit"))
            assert second is third is fourth  # 512 KiB are the least

    def test_who_does_not_stay_or_broke_or_is_not_kept_is_gone(self) -> None:
        with Pool() as pool:
            passing, broken, other, staying = self.run_with(
                pool,
                self.launch("10mbit", False, "passing"),
                self.launch("10mbit", True, "broken"),
                self.launch("10mbit", True, "other"),
                self.launch("10mbit", True, "staying"),
                failed=["broken"],
            )
            assert passing.closed and broken.closed and not other.closed
            pool.keep([self.launch("50mbit", True, "staying")])
            assert other.closed and not staying.closed

    def test_a_candidate_does_not_start_if_memory_is_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Each takes 3 GiB, of 8.
        left = iter([8, 8, 5, 5, 5, 2, 2, 2])
        monkeypatch.setattr(comparison, "available_bytes", lambda: next(left) * 2**30)
        failures: dict[str, str] = {}
        entries = {name: self.launch("10mbit", name=name) for name in ("one", "two", "three")}
        with Pool() as pool, pool.started(entries, lambda text: None, failures) as made:
            assert list(made) == ["one", "two"]
        assert failures.keys() == {"three"}
        assert "3.0 GiB" in failures["three"] and "2.0 GiB" in failures["three"]

    def test_an_exception_leaves_nobody(self) -> None:
        with Pool() as pool:
            one: Any = None
            with pytest.raises(KeyboardInterrupt), pool.started({"one": self.launch(None)}, lambda text: None) as made:
                one = made["one"]
                raise KeyboardInterrupt
            assert one.closed


class TestProcesses:
    def test_a_candidate_runs_only_while_it_is_asked(self, capfd: pytest.CaptureFixture[str]) -> None:
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


class TestReport:
    def test_it_reads_at_a_hundred_columns(self, tmp_path: Path) -> None:
        file = tmp_path / "a.jsonl"
        check = figures.Check("a very long name of a candidate / and of another one", 0.123456, 0.1)
        wide = figures.Check("x", 123456.789, at_least=1000.5, interval=figures.Interval(0.123456, 1.23456, 0.96875))
        long = "a case whose name is much longer than its column"
        results.append(file, line(long, checks=[check.recorded(), wide.recorded()], warnings=["busy"], commit="a" * 40))
        results.append(file, line(long, checks=[], failed="it died"))
        for text in (report.last_runs(file), report.history_of(file, long)):
            assert all(len(row) <= report.WIDTH for row in text.splitlines()), text
            assert "FAILED" in text
        assert "≤ 0.1: exceeded" in report.history_of(file, long) and "aaaaaaa" in report.history_of(file, long)

    def test_a_damaged_file_is_one_error_that_names_the_line(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.jsonl"
        file.write_text('{"case": ')
        with pytest.raises(ValueError, match=r"mine\.jsonl:1"):
            report.last_runs(file)

    def test_an_unknown_case_is_refused_with_those_there_are(self, tmp_path: Path) -> None:
        results.append(tmp_path / "a.jsonl", line("there"))
        with pytest.raises(ConfigError, match=r"no run of nowhere in .*; there are there"):
            report.history_of(tmp_path / "a.jsonl", "nowhere")

    @pytest.mark.parametrize("file", sorted(results.FOLDER.glob("*.jsonl")), ids=lambda file: file.stem)
    def test_it_shows_what_is_committed(self, file: Path) -> None:
        shown = report.last_runs(file)
        assert all(len(row) <= report.WIDTH for row in shown.splitlines())
        assert results.read(file)[0]["case"]["name"][:20] in shown


class TestTimeline:
    def test_the_hidden_share_of_communication(self) -> None:
        def interval(track: str, start: float, end: float) -> Any:
            return SimpleNamespace(track=track, start_seconds=start, end_seconds=end)

        computed = [interval("compute", 0.0, 1.0), interval("compute", 1.0, 2.0), interval("compute", 4.0, 5.0)]
        sent = [interval("between nodes", 1.5, 3.0), interval("inside nodes", 2.5, 4.5)]  # 1.5 to 4.5 together
        assert overlap.share_hidden([*computed, *sent]) == pytest.approx((0.5 + 0.5) / 3.0)
        assert overlap.share_hidden(computed) == 0.0


class TestPrediction:
    def test_predictions_are_judged_by_medians(self) -> None:
        names = [*planner.LOSSLESS, *planner.LOSSY, "the plan's", "the plan's with codecs"]
        predicted = {name: float(number + 1) for number, name in enumerate(names)}
        measured = {name: [seconds, 9 * seconds, seconds / 2] for name, seconds in predicted.items()}
        measured[names[0]] = [2.0, 2.0, 2.0]  # predicted as 1

        found = planner.compared(predicted, measured)

        assert found["errors"][names[0]] == -0.5 and found["mean_error"] == pytest.approx(0.5 / len(names))
        assert found["regret"]["lossless"] == pytest.approx(predicted["the plan's"] / 2 - 1)
        assert found["regret"]["with codecs"] == pytest.approx(predicted["the plan's with codecs"] / 2 - 1)
        assert found["spread"][names[0]] == 0 and found["spread"][names[1]] == 8.5
        assert found["rank_correlation"] > 0.9

    def test_choices_without_exact_transports_are_judged_among_such(self) -> None:
        predicted = dict(zip(["ddp", "mics", "ddp exact=true", *planner.CHOSEN_EXACT], range(1, 6), strict=True))
        measured = dict(zip(predicted, ([4.0], [3.0], [1.0], [1.5], [6.0]), strict=True))
        found = planner.compared(predicted, measured, planner.CHOSEN_EXACT)
        assert found["regret"] == {"lossless": 0.5, "without exact": 1.0}

    def test_two_ways_of_pricing_are_judged_on_the_same_steps(self) -> None:
        line = {
            "case": {"name": "a case"},
            "commit": "0123456789ab",
            "measured_seconds": {"ddp": [2.0], "mics": [1.0], "zero++": [0.5], "the plan's with codecs": [0.4]},
            "predicted_seconds": {"ddp": 2.0, "mics": 1.0, "zero++": 0.5, "the plan's with codecs": 0.4},
            "by_messages": {
                "predicted_seconds": {"ddp": 1.0, "mics": 1.5, "zero++": 0.25, "the plan's with codecs": 0.4}
            },
        }
        found = pricing.compared(line)
        assert found["with measured collectives"] == dict.fromkeys(pricing.FIGURES, 0.0)
        expected = dict(zip(pricing.FIGURES, ((0.5 + 0.5 + 0.5) / 4, 1.0, 0.25), strict=True))
        assert found["by messages"] == pytest.approx(expected)

    def test_a_rank_correlation_depends_on_ranks_only(self) -> None:
        assert planner.rank_correlation([1, 2, 3], [1, 10, 1000]) == pytest.approx(1)
        assert planner.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)

    def test_traced_and_simulated_tasks_are_compared(self) -> None:
        def message(kind: str, start: float, track: str = BETWEEN, unit: str = "a") -> Interval:
            args: dict[str, str | int] = {"kind": kind, "unit": unit, "micro_step": 0}
            return Interval(track=track, name="", start_seconds=start, seconds=1.0, args=args)

        def event(kind: TransferKind, start: float) -> Event:
            return Event(QUEUES[kind], "", start, start + 1, kind, "a")

        zero3 = strategy("zero3", Topology(2, 1))
        trace = [
            message("gather", 1.0),
            message("gather", 1.5, INSIDE),
            message("reduce", 4.0),
            message("param_sync", 9.0),
        ]
        later = [message("gather", 2.0), message("reduce", 5.0)]
        engine = planner.usual([planner.of_trace(step) for step in (trace, later)])
        # zero3 syncs nothing: what the queue has to do there is no message.
        events = [
            event(TransferKind.GATHER, 1.0),
            event(TransferKind.REDUCE, 2.5),
            event(TransferKind.GRAD_SYNC, 3.0),
            Event("compute", "", 0, 9),
        ]
        found = planner.compared_tasks(engine, planner.of_replay(events, zero3), 10.0)

        assert engine[("gather", "a", 0)] == planner.TaskTimes(1.5, 2.75) and len(engine) == 2
        assert found["start_error"] == pytest.approx((0.5 + 2.0) / 2 / 10) and found["same_order"]
        assert not found["only_in_engine"] and not found["only_in_simulator"]
