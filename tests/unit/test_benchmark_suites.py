"""The suites: who is compared with whom, what is kept and shown, and that a failure names who failed."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import towpath
from benchmarks import __main__ as command
from benchmarks import deepspeed_peer, environment, report, selection
from benchmarks.environment import NodeLink, Rates, Screened, Screening, Trial, add_options, environments_of
from benchmarks.harness import results, suite
from benchmarks.harness.candidates import CaseError
from benchmarks.harness.comparison import Comparison, Pool, reason_of
from benchmarks.harness.suite import Settings
from benchmarks.peers import OPTIONS, CandidateSpec, TrainStep
from benchmarks.selection import LOW_RANK, POWERSGD, QUICK, Candidate, every_name, expanded, lossless
from benchmarks.suites import planner, quality_pipeline, strategies
from benchmarks.workload import Workload
from lab import Rate
from towpath.core.presets import parse_strategy
from towpath.errors import ConfigError
from towpath.topology.cluster import Topology

SQUARE = Topology(2, 2)
STRATEGIES = command.suite_of("strategies")


def candidates(micro_steps: int = 1) -> list[Candidate]:
    return [Candidate.of(name, SQUARE, "bfloat16") for name in every_name(micro_steps)]


class TestCandidates:
    @pytest.mark.parametrize("there", [True, False])
    def test_everybody_takes_part(self, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """DeepSpeed where it is installed."""
        monkeypatch.setattr(deepspeed_peer, "installed", lambda: there)
        names = every_name(4)
        assert len(set(names)) == len(names)
        assert {*towpath.strategies(), "auto", LOW_RANK, POWERSGD, *QUICK} <= set(names)
        peers = [CandidateSpec.parse(name) for name in names if CandidateSpec.parse(name).foreign]
        assert {kind.name for kind in peers} == {"fsdp2", "hsdp", "torch-ddp", *(["deepspeed"] if there else [])}
        for kind in peers:  # every plain peer also comes tuned, and the other way around
            tuned = {**kind.options, "tuned": ""}
            assert any(k.name == kind.name and k.options == tuned for k in peers), kind

    def test_one_micro_step_has_no_peer_that_accumulates(self) -> None:
        assert {name for name in every_name(4) if name not in every_name(1)} == {
            *("fsdp2 sync=last", "fsdp2 tuned sync=last", "fsdp2 tuned sync=last ring")
        }

    @pytest.mark.parametrize(
        ("name", "dtype", "is_lossless"),
        [
            ("zero3", "bfloat16", True),
            ("zero++", "bfloat16", False),
            ("qwz", "bfloat16", False),
            ("mics gradients=int8", "bfloat16", False),
            ("mics gradients=bf16", "bfloat16", True),
            ("mics exact=true", "float32", True),
            ("mics gradients=int4 exact=true", "float32", False),
            ("mics gradients=bf16", "float32", False),
            (LOW_RANK, "bfloat16", False),
            ("auto", "bfloat16", True),
            ("auto allow=int8", "bfloat16", False),
            ("torch-ddp tuned bf16", "bfloat16", True),
            ("torch-ddp tuned bf16", "float32", False),
            (POWERSGD, "bfloat16", False),
            ("fsdp2 tuned ring", "float32", True),
            ("deepspeed stage=3 hpz", "bfloat16", True),
            ("deepspeed stage=3 hpz quantized", "bfloat16", False),
        ],
    )
    def test_what_sends_fewer_bits_than_the_run_computes_in_is_lossy(
        self, name: str, dtype: str, is_lossless: bool
    ) -> None:
        assert lossless(name, SQUARE, dtype) is is_lossless

    def test_a_codec_that_nothing_travels_in_takes_nothing_away(self) -> None:
        """On one node no codec serves: it is for what crosses nodes."""
        assert lossless("zero++", Topology(1, 4), "bfloat16")

    def test_a_peer_with_our_ring_is_marked(self) -> None:
        assert {e.name for e in candidates(4) if e.helped} == {name for name in every_name(4) if name.endswith(" ring")}
        assert "ring" in OPTIONS["fsdp2"]


class TestSelection:
    @pytest.fixture(autouse=True)
    def without_deepspeed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deepspeed_peer, "installed", lambda: False)

    @pytest.fixture
    def seconds(self) -> dict[str, float]:
        """Each slower than the one before it, in the order of `every_name`, peers as a whole slower than ours."""
        return {name: 1.0 + number for number, name in enumerate(every_name(1))}

    def test_the_best_of_each_kind_race_and_five_of_ours(self, seconds: dict[str, float]) -> None:
        seconds |= {"mics": 0.1, "zero++": 0.2, "paro-iig": 0.3, "qgz": 0.4, "auto": 0.5}
        chosen = [e.name for e in selection.finalists(candidates(), seconds)]
        ours = [name for name in chosen if not CandidateSpec.parse(name).foreign]
        assert ours == ["mics", "zero++", "paro-iig", "qgz", "auto", LOW_RANK]
        peers = chosen[len(ours) :]
        assert peers == ["torch-ddp", f"torch-ddp powersgd={4}", POWERSGD, "fsdp2", "hsdp"]  # of each library the best

    def test_codecs_leave_room_for_the_lossless(self, seconds: dict[str, float]) -> None:
        lossy = [e.name for e in candidates() if e.ours and not e.lossless]
        seconds |= dict.fromkeys(lossy, 0.01)
        chosen = selection.finalists(candidates(), seconds)
        assert sum(e.ours and e.lossless for e in chosen) == 3

    def test_the_best_peer_without_our_ring_races_too(self, seconds: dict[str, float]) -> None:
        seconds |= {e.name: 0.01 for e in candidates() if e.helped}
        chosen = selection.finalists(candidates(), seconds)
        peers = [e.name for e in chosen if not e.ours and e.lossless]
        assert sorted(peers) == ["fsdp2", "fsdp2 tuned ring", "hsdp", "hsdp tuned ring", "torch-ddp"]

    def test_all_peers_have_a_name_together(self) -> None:
        found = expanded(["mics", "peers", "hsdp tuned"], 1)
        assert found[0] == "mics" and {"fsdp2 tuned", "hsdp tuned"} <= {*found} and "zero3" not in found
        assert len(found) == len({*found})

    def test_who_was_not_screened_is_not_raced(self, seconds: dict[str, float]) -> None:
        del seconds["auto"], seconds[POWERSGD]
        assert not {"auto", POWERSGD} & {e.name for e in selection.finalists(candidates(), seconds)}


def candidates_named(*names: str) -> list[Candidate]:
    return [Candidate.of(name, SQUARE, "bfloat16") for name in names]


class TestPairs:
    NAMES = ("mics", "zero++", LOW_RANK, "hsdp tuned", "hsdp tuned ring", POWERSGD)
    SECONDS = (2.0, 1.0, 1.5, 3.0, 2.5, 1.4)

    def pairs(self, comm_ratio: float | None) -> dict[str, selection.Pair]:
        return {
            pair.what: pair
            for pair in selection.pairs(
                candidates_named(*self.NAMES), dict(zip(self.NAMES, self.SECONDS, strict=True)), comm_ratio
            )
        }

    def test_lossless_meets_lossless_and_a_peer_that_we_help_counts(self) -> None:
        found = self.pairs(8.0)
        assert (found["lossless"].ours, found["lossless"].theirs) == ("mics", "hsdp tuned ring")
        unhelped = found["lossless, peers as they come"]
        assert (unhelped.ours, unhelped.theirs, unhelped.at_least) == ("mics", "hsdp tuned", 0.97)

    def test_lossy_meets_lossless_with_a_target_on_slow_links(self) -> None:
        assert self.pairs(4.0)["lossy against lossless"] == selection.Pair(
            "lossy against lossless", "zero++", "hsdp tuned ring", 2.2
        )
        assert self.pairs(2.0)["lossy against lossless"].at_least is None
        assert self.pairs(None)["lossy against lossless"].at_least is None

    def test_deepspeed_is_met_whoever_else_is_there(self) -> None:
        names, seconds = ("mics", "hsdp tuned", "deepspeed stage=2", "deepspeed stage=3"), (1.0, 2.0, 4.0, 3.0)
        found = selection.pairs(candidates_named(*names), dict(zip(names, seconds, strict=True)), 1.0)
        [pair] = [pair for pair in found if pair.what == selection.AGAINST_DEEPSPEED]
        assert (pair.ours, pair.theirs, pair.at_least) == ("mics", "deepspeed stage=3", 0.97)

    def test_low_rank_meets_powersgd_of_equal_rank(self) -> None:
        pair = self.pairs(None)["low rank"]
        assert (pair.ours, pair.theirs) == (LOW_RANK, POWERSGD)
        assert pair.ours.rpartition(":")[2] == pair.theirs.rpartition("=")[2]

    def test_a_ratio_says_how_many_times_as_fast_ours_is(self) -> None:
        seconds = {"mics": [1.0, 2.0], "hsdp": [2.0, 4.0]}
        check = selection.Pair("lossless", "mics", "hsdp", 0.97).check(seconds)
        assert check.found == 2.0 and check.met
        assert not selection.Pair("lossless", "hsdp", "mics", 0.97).check(seconds).met


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(arguments)
    options.quick, options.candidates = False, None
    return options


class TestEnvironments:
    def test_the_default_has_all_shapes_links_and_micro_steps(self) -> None:
        names = [case.name for case in strategies.chosen_strategies(STRATEGIES.cases, options_of())]
        assert names == [case.name for case in STRATEGIES.cases] and len(set(names)) == 36
        assert {"2x2-ratio8-micro1", "4x2-unshaped-micro4", "2x4-ratio0.5-micro1"} <= set(names)
        assert all(case.workload.dtype == "bfloat16" for case in STRATEGIES.cases)

    def test_options_with_several_values_are_combined(self) -> None:
        given = (
            "--nodes",
            "2,3",
            "--ranks",
            "1",
            "--inter",
            "1gbit,unshaped",
            "--comm-ratio",
            "3",
            "--micro-steps",
            "2",
        )
        names = [e.name for e in environments_of(options_of(*given), [SQUARE], [NodeLink()], (1,))]
        assert names == [
            f"{shape}-{link}-micro2" for shape in ("2x1", "3x1") for link in ("ratio3", "1gbit", "unshaped")
        ]

    def test_neighbours_differ_by_their_cables_the_slow_ones_first(self) -> None:
        """So that candidates stay."""
        found = environments_of(options_of("--comm-ratio", "1,8", "--micro-steps", "1,4"), [SQUARE], [NodeLink()], (1,))
        assert [(e.workload.micro_steps, e.link.comm_ratio) for e in found] == [(1, 8), (1, 1), (4, 8), (4, 1)]

    def test_what_is_not_as_usual_is_in_the_name(self) -> None:
        [one] = environments_of(options_of("--width", "192", "--dtype", "float32"), [SQUARE], [NodeLink()], (1,))
        assert one.name == "2x2-unshaped-micro1-fp32-width192" and one.workload.width == 192
        [waiting] = environments_of(options_of("--waiting"), [SQUARE], [NodeLink()], (1,))
        assert waiting.name == "2x2-unshaped-micro1-waiting" and waiting.workload.wait_seconds
        [waiting] = environments_of(options_of("--wait", "0.5"), [SQUARE], [NodeLink()], (1,))
        assert waiting.name == "2x2-unshaped-micro1-waiting0.5" and waiting.workload.wait_seconds == 0.5
        [in_step] = environments_of(options_of("--in-step"), [SQUARE], [NodeLink()], (4,))
        assert in_step.name == "2x2-unshaped-micro4-in-step" and in_step.workload.in_step

    def test_a_quick_run_has_two_environments_and_six_candidates(self) -> None:
        options = options_of()
        options.quick = True
        assert len(strategies.chosen_strategies((), options)) == 2 and len(QUICK) == 6

    def test_scaling_keeps_a_ranks_work_or_all_ranks_work(self) -> None:
        options = options_of()
        cases = strategies.chosen_scaling((), options)
        worlds = [case.workload.topology.world for case in cases if case.kind == "weak"]
        assert worlds == [2, 4, 8, 16]
        assert len({case.workload.batch for case in cases if case.kind == "weak"}) == 1
        assert {case.workload.batch * case.workload.topology.world for case in cases if case.kind == "strong"} == {32}

    def test_trials_of_one_ratio_help_the_next_search(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[Rate] = []

        def trial(inter: Rate, *_: Any) -> Trial:
            tried.append(inter)
            return Trial(str(inter), 0.1 + 1e9 / inter.bits_per_second, 1.0)

        monkeypatch.setattr(environment, "trial_of", trial)
        rates = Rates()
        rates.of(8.0, Workload(), str, Pool())
        before = len(tried)
        assert rates.of(2.0, Workload(micro_steps=4), str, Pool()).reached
        assert len(tried) == before + 1


class TestCase:
    """A case with made-up seconds: nothing is started."""

    _result = ""  # of the first run, which later tests start from

    @pytest.fixture
    def line(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
        def screen(names: Sequence[str], *_: Any) -> Screening:
            tried = {name: Screened(1.0 + number / 100, 10**6) for number, name in enumerate(names)}
            tried.pop("zero1")
            return Screening(tried, {"zero1": "OutOfMemoryError: too large"})

        def measured(
            compared: Sequence[Candidate], inter: Rate | None, workload: Workload, settings: Any
        ) -> tuple[dict[str, Any], dict[str, str]]:
            failed = {compared[-1].name: "ValueError: broke"}
            names = [*(each.name for each in compared[:-1]), "fsdp2 silent", "compute"]
            seconds = {name: [1.0 + n / 7, 1.1 + n / 7] for n, name in enumerate(names)}
            counted = {name: [123_456_789, 123_456_789] for name in names}
            run = Comparison([names, names[::-1]], seconds, counted, counted)
            facts = {name: [{"processor_seconds": 1.0, "memory_bytes": 10**8}] for name in names}
            return {"comparison": run, **run.recorded(), **strategies.figures_of(run, facts, workload)}, failed

        monkeypatch.setattr(results, "busy_processors", lambda: 0.0)
        monkeypatch.setattr(strategies, "screen", screen)
        monkeypatch.setattr(strategies, "measured", measured)
        monkeypatch.setattr(suite, "say", lambda text: None)
        monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
        monkeypatch.setattr(results, "code", lambda root: {"commit": "abc", "clean": True})
        self.file = tmp_path / "strategies.jsonl"
        if not TestCase._result:
            STRATEGIES.run(["2x2-unshaped-micro1", "--settle", "0", "-o", str(self.file)])
            TestCase._result = self.file.read_text()
        self.file.write_text(TestCase._result)
        [line] = results.read(self.file)
        return line

    def test_who_failed_is_named_with_the_reason(
        self, line: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert line["skipped"]["zero1"] == "OutOfMemoryError: too large"
        [name] = [name for name, why in line["skipped"].items() if why == "ValueError: broke"]
        assert name not in line["median_seconds"]
        shown = report.comparison_table(line)
        assert "not measured: zero1: OutOfMemoryError: too large" in shown
        assert f"not measured: {name}: ValueError: broke" in shown

    def test_the_table_fits_and_has_every_candidate(self, line: dict[str, Any]) -> None:
        line["case"]["name"] = "a name " * 30
        line["checks"][0]["what"] = "a long pair " * 20
        shown = report.comparison_table(line)
        assert max(map(len, shown.splitlines())) <= 100
        for name in line["communication_share"]:
            assert any(row.startswith(name[:29]) for row in shown.splitlines()), name

    def test_every_figure_has_every_candidate(self, line: dict[str, Any]) -> None:
        names = set(line["communication_share"])
        for what in ("intervals", "bytes_between_nodes", "processor_seconds", "memory_bytes"):
            assert set(line[what]) == names
        assert min(line["communication_share"].values()) >= 0
        assert {"fsdp2 silent", "compute"}.isdisjoint(names)
        # Everybody of the field is in the file, also who was screened only.
        assert set(line["candidates"]) == set(every_name(1))

    def test_resume_leaves_out_what_is_there(self, line: dict[str, Any]) -> None:
        STRATEGIES.run(["2x2-unshaped-micro1", "--resume", "--settle", "0", "-o", str(self.file)])
        assert len(results.read(self.file)) == 1
        STRATEGIES.run(["2x2-unshaped-micro4", "--resume", "--settle", "0", "-o", str(self.file)])
        assert [kept["case"]["name"] for kept in results.read(self.file)][1:] == ["2x2-unshaped-micro4"]

    @pytest.mark.parametrize("other", [["--rounds", "8"], ["--candidates", "mics,hsdp,fsdp2"]])
    def test_other_rounds_or_candidates_are_another_result(self, line: dict[str, Any], other: list[str]) -> None:
        STRATEGIES.run(["2x2-unshaped-micro1", *other, "--resume", "--settle", "0", "-o", str(self.file)])
        assert len(results.read(self.file)) == 2


def help_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


class TestCommand:
    @pytest.mark.parametrize("columns", [80, 100, 300])
    def test_every_suite_is_listed_and_has_help(
        self, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        command.main([])
        listed = capsys.readouterr().out
        assert max(map(len, listed.splitlines())) <= 100
        for name in command.SUITES:
            assert re.search(rf"^  {name} +\S", listed, re.MULTILINE)
            shown = help_of(name, capsys)
            assert f"benchmarks {name}" in shown and "--quick" in shown and "--json" in shown
            assert max(map(len, shown.splitlines())) <= min(columns, 100)

    @pytest.mark.parametrize("name", command.SUITES)
    def test_a_case_can_be_copied_from_the_help_into_a_shell(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        listed = help_of(name, capsys).partition("\ncases, as they are written in a shell:\n\n")[2]
        cases = command.suite_of(name).cases
        assert [shlex.split(row) for row in listed.splitlines() if row.startswith("  ")] == [[c.name] for c in cases]

    def test_names_of_cases_are_unique(self) -> None:
        for name in command.SUITES:
            names = [case.name for case in command.suite_of(name).cases]
            assert len(set(names)) == len(names), name

    def test_strategies_of_ablations_can_be_built(self) -> None:
        for case in command.suite_of("ablations").cases:
            for each in case.candidates:
                if not CandidateSpec.parse(each.strategy).foreign:
                    assert parse_strategy(each.strategy, case.workload.topology)

    def test_a_case_is_found_by_its_old_name(self) -> None:
        [case] = suite.selected(STRATEGIES.cases, ["2x2-regime8-micro1"])
        assert case.name == "2x2-ratio8-micro1"

    def test_an_unknown_name_with_spaces_is_in_quotes(self) -> None:
        with pytest.raises(ConfigError, match="no case 'state dcit'; there are loaded, drawn, 'state dict', limited"):
            command.main(["memory", "state dcit"])

    @pytest.mark.parametrize("name", ["strategies", "scaling", "kernels", "memory"])
    def test_an_unknown_case_names_options_that_make_others(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        usage, _, _ = help_of(name, capsys).partition("\n\n")
        with pytest.raises(ConfigError, match="no case nobody; there are ") as refused:
            command.main([name, "nobody"])
        named = set(re.findall(r"--[a-z-]+", str(refused.value)))
        assert named == {option for option in ("--waiting", "--nodes", "--device") if option in usage}

    def test_the_planner_suite_counts_its_strategies(self) -> None:
        count = len({*planner.LOSSLESS, *planner.LOSSY})
        assert f"steps of {count} strategies, and of the two that the planner" in command.suite_of("planner").doc

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (["speed"], "there is no suite 'speed', only strategies"),
            (["kernels", "--fast"], r"unrecognized arguments: --fast.*benchmarks kernels --help"),
            (["strategies", "9x9"], "no case 9x9"),
            (["report", "nowhere.jsonl"], "no results of 'nowhere.jsonl'"),
            (["report", "muon", "nowhere"], "no run of nowhere"),
            (["strategies", "--candidates", "torch-ddp nope"], "nope"),
            (["strategies", "--candidates", "deepspeed stage=4"], "deepspeed: stage=4; expected stage=1, 2 or 3"),
            (["strategies", "--comm-ratio", "0"], "--comm-ratio: expected a number above 0; got 0"),
            (["strategies", "--comm-ratio", "abc"], "--comm-ratio: 'abc' is no number"),
            (["strategies", "--wait", "nan"], "--wait: expected a number above 0; got nan"),
            (["strategies", "--width", "100"], "--width: expected a multiple of 6, the heads of the model; got 100"),
            (["strategies", "--candidates", "mics,,hsdp"], "a value is missing between the commas of 'mics,,hsdp'"),
            (["scaling", "--candidates", "foo"], "there is neither a peer nor a strategy 'foo'"),
            (["scaling", "--comm-ratio", "4"], "links keep their rate here"),
            (["scaling", "--ranks", "3"], "6 ranks, which cannot share 32 sequences evenly|3 ranks, which cannot"),
        ],
        ids=" ".join,
    )
    def test_a_mistake_is_one_error_before_anything_starts(self, given: list[str], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            command.main(given)

    def test_missing_deepspeed_says_how_to_install_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deepspeed_peer, "installed", lambda: False)
        with pytest.raises(ConfigError, match=r"benchmarks/deepspeed\.txt and set TOWPATH_DEEPSPEED=FOLDER"):
            command.main(["strategies", "--candidates", "deepspeed stage=3"])

    def test_a_suite_is_refused_under_a_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match="the suite memory starts ranks of its own"):
            command.main(["memory"])


def test_the_reason_is_the_last_line_that_a_rank_said() -> None:
    assert reason_of(CaseError("rank 1 failed:\nTraceback …\n  File x\nValueError: broke\n\n")) == "ValueError: broke"


def test_a_first_sample_does_not_change_the_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 10.0, 10.5, 11.0, 11.25])  # before and after each sample; the first imports
    monkeypatch.setattr("benchmarks.peers.timed", lambda work: 1.0)
    step = TrainStep(0, 1, "compute", Workload(Topology(1, 1)).quick())
    monkeypatch.setattr("benchmarks.peers.time", SimpleNamespace(process_time=lambda: next(clock)))
    for _ in range(3):
        step.sample()
    assert step.facts()["processor_seconds"] == 0.5


def test_a_result_has_all_of_a_candidate() -> None:
    assert asdict(Candidate.of("hsdp tuned ring", SQUARE, "bfloat16")) == {
        "name": "hsdp tuned ring",
        "ours": False,
        "lossless": True,
        "helped": True,
    }


# The lower bound of a step --------------------------------------------------------------------------------------------


def test_the_lower_bound_is_computation_or_communication() -> None:
    """On unshaped links it is the computation. Otherwise it is at least the time of the bytes, and less than both."""
    workload = Workload(Topology(2, 2), 2, "bfloat16").quick()
    strategy, rate = towpath.strategy("mics", workload.topology), Rate.parse("10mbit")
    assert strategies.lower_bound(strategy, workload, 0.3, None) == pytest.approx(0.6)
    sent = towpath.schedule(strategy, workload.model(), 2, towpath.Precision("bfloat16")).inter_bytes
    carried = sent / 2 / rate.bytes_per_second  # each of the two nodes has a cable
    computing = carried / 2
    assert carried < strategies.lower_bound(strategy, workload, computing, rate) < 2 * computing + carried


def test_steps_are_compared_to_the_bound_where_blocks_wait() -> None:
    seconds, bounds = {"mics": [2.3, 2.5, 2.4], "ddp": [9.0, 9.0, 9.0]}, {"mics": 2.0, "ddp": 1.0}
    waits, optimizer = Workload(wait_seconds=0.01), {"mics": 0.1, "ddp": 0.1}
    [check] = strategies.overlap_checks(seconds, optimizer, bounds, waits)
    assert check.found == pytest.approx(1.15)
    assert check.at_most == 1.15
    assert not strategies.overlap_checks(seconds, optimizer, bounds, Workload())


def test_the_optimizer_counts_from_last_begin_to_last_end() -> None:
    quick, late = [(0.0, 1.0), (10.0, 11.0), (20.0, 21.0)], [(0.5, 1.2), (10.5, 11.4), (20.5, 23.0)]
    assert strategies.optimizer_seconds([quick, late]) == pytest.approx(0.9)


def test_scaling_compares_sent_bytes_with_the_schedule() -> None:
    workload = Workload(Topology(2, 2), 1, "bfloat16").quick()
    compared = [Candidate.of(name, workload.topology, workload.dtype) for name in ("mics", "hsdp tuned", "auto")]
    sent = towpath.schedule("mics", workload.model(), precision=workload.precision, topology=Topology(2, 2)).inter_bytes
    [right] = strategies.bytes_checks({"mics": sent}, compared, workload)
    assert right.met and right.found == 1
    [twice] = strategies.bytes_checks({"mics": 2 * sent}, compared, workload)
    assert not twice.met


def test_scaling_has_exposed_seconds_and_their_bound() -> None:
    usual, optimizer, bounds = {"mics": 3.0, "compute": 1.0}, {"mics": 0.25}, {"mics": 2.5}
    waits = Workload(Topology(2, 2), 1, wait_seconds=0.01)
    [found, least] = strategies.exposed_checks(usual, optimizer, bounds, waits)
    assert (found.found, least.found) == (1.75, 1.5)
    assert not list(strategies.exposed_checks(usual, optimizer, bounds, Workload()))


class TestScreening:
    def test_one_screening_serves_all_link_rates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(strategies, "_SCREENINGS", {})
        screened: list[tuple[str, ...]] = []

        def screen(names: tuple[str, ...], *_: object) -> Screening:
            screened.append(names)
            return Screening({name: Screened(1.0, 1) for name in names}, {})

        monkeypatch.setattr(strategies, "screen", screen)
        options = argparse.Namespace(candidates=["mics", "hsdp"], screen=True)
        settings, square = Settings(6, False, str, options), Workload(SQUARE)
        cases = [
            strategies.StrategiesCase(f"at {rate}", square, NodeLink(inter=rate)) for rate in ("100mbit", "200mbit")
        ]
        found = [case.screened(candidates_named("mics", "hsdp"), None, settings) for case in cases]
        assert [where for where, _ in found] == ["at 100mbit", "at 100mbit"]
        assert screened == [("mics", "hsdp")]
        cases[0].screened(candidates_named("mics", "fsdp2"), None, settings)
        assert len(screened) == 2  # others take part

    def test_named_candidates_skip_the_screening(self) -> None:
        settings = Settings(6, False, str, argparse.Namespace(candidates=["mics"], screen=False))
        case = strategies.StrategiesCase("here", Workload(SQUARE), NodeLink())
        assert case.screened(candidates_named("mics"), None, settings) == (None, None)


# The quality of pipelines ---------------------------------------------------------------------------------------------


def test_every_variant_of_pipeline_quality_trains() -> None:
    runs = [run for run in quality_pipeline.RUNS if run.seed == 0 and run.name != "bytes"]
    found = {run.name: run.measure(Settings(1, True, lambda text: None)) for run in runs}
    final = {name: run["final"] for name, run in found.items()}
    assert all(math.isfinite(loss) for loss in final.values())
    assert final["control, seed 0"] == pytest.approx(final["baseline, seed 0"], rel=1e-6)
    assert final["cb, seed 0"] == pytest.approx(final["cb+fe, seed 0"], rel=1e-6)
    assert found["cb, seed 0"]["observed"] and not found["baseline, seed 0"]["observed"]


def test_parts_of_pipeline_quality_are_all_runs_once() -> None:
    given = {"seeds": 3, "quick": False}
    parts = [
        quality_pipeline._chosen(quality_pipeline.RUNS, argparse.Namespace(**given, part=f"{i}/2")) for i in (1, 2)
    ]
    assert sorted(run.name for part in parts for run in part) == sorted(run.name for run in quality_pipeline.RUNS)
    with pytest.raises(ConfigError, match="--part is a number and a count, such as 1/2; got '3/2'"):
        quality_pipeline._chosen(quality_pipeline.RUNS, argparse.Namespace(**given, part="3/2"))
