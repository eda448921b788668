"""`towpath bench`: who is compared with whom, what is kept and shown, and that a failure names who failed."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import towpath
from towpath.bench import deepspeed_peer, drawing, page, selection, table
from towpath.bench.environment import Link, Rates, add_options, asked_for
from towpath.bench.field import LOW_RANK, POWERSGD, QUICK, Entrant, everyone, lossless, named
from towpath.bench.floor import floor_seconds
from towpath.bench.harness import results, stamp, suite
from towpath.bench.harness.failure import CaseError, reason
from towpath.bench.harness.job import node_counters
from towpath.bench.harness.pool import Pool
from towpath.bench.harness.race import Race
from towpath.bench.harness.regime import Trial
from towpath.bench.harness.suite import Settings
from towpath.bench.peers import OPTIONS, CandidateSpec
from towpath.bench.steps import Step
from towpath.bench.suites import planner, prediction, scaling, strategies
from towpath.bench.venue import Screening, Tried, Venue
from towpath.bench.workload import Workload
from towpath.cli import bench as command
from towpath.errors import ConfigError
from towpath.lab import LinkBytes, Rate
from towpath.topology.cluster import Topology

SQUARE = Topology(2, 2)


def entrants(micro_steps: int = 1) -> list[Entrant]:
    return [Entrant.of(name, SQUARE, "bfloat16") for name in everyone(micro_steps)]


class TestField:
    @pytest.mark.parametrize("there", [True, False])
    def test_everybody_takes_part(self, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """DeepSpeed where it is installed."""
        monkeypatch.setattr(deepspeed_peer, "installed", lambda: there)
        names = everyone(4)
        assert len(set(names)) == len(names)
        assert {*towpath.strategies(), "auto", LOW_RANK, POWERSGD, *QUICK} <= set(names)
        peers = [CandidateSpec.parse(name) for name in names if CandidateSpec.parse(name).foreign]
        assert {kind.name for kind in peers} == {"fsdp2", "hsdp", "torch-ddp", *(["deepspeed"] if there else [])}
        for kind in peers:  # each plain one is tuned, too, and what is tuned comes plain
            tuned = {**kind.options, "tuned": ""}
            assert any(k.name == kind.name and k.options == tuned for k in peers), kind

    def test_a_step_of_one_micro_step_has_no_peer_that_only_accumulates(self) -> None:
        assert {name for name in everyone(4) if name not in everyone(1)} == {
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
        assert {e.name for e in entrants(4) if e.helped} == {name for name in everyone(4) if name.endswith(" ring")}
        assert "ring" in OPTIONS["fsdp2"]


class TestSelection:
    @pytest.fixture(autouse=True)
    def without_deepspeed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deepspeed_peer, "installed", lambda: False)

    @pytest.fixture
    def seconds(self) -> dict[str, float]:
        """Each slower than the one before it, in the order of `everyone`, peers as a whole slower than ours."""
        return {name: 1.0 + number for number, name in enumerate(everyone(1))}

    def test_the_best_of_each_kind_race_and_five_of_ours(self, seconds: dict[str, float]) -> None:
        seconds |= {"mics": 0.1, "zero++": 0.2, "paro-iig": 0.3, "qgz": 0.4, "auto": 0.5}
        chosen = [e.name for e in selection.finalists(entrants(), seconds)]
        ours = [name for name in chosen if not CandidateSpec.parse(name).foreign]
        assert ours == ["mics", "zero++", "paro-iig", "qgz", "auto", LOW_RANK]
        peers = chosen[len(ours) :]
        assert peers == ["torch-ddp", f"torch-ddp powersgd={4}", POWERSGD, "fsdp2", "hsdp"]  # of each library the best

    def test_codecs_leave_room_for_the_lossless(self, seconds: dict[str, float]) -> None:
        lossy = [e.name for e in entrants() if e.ours and not e.lossless]
        seconds |= dict.fromkeys(lossy, 0.01)
        chosen = selection.finalists(entrants(), seconds)
        assert sum(e.ours and e.lossless for e in chosen) == 3

    def test_the_best_peer_without_our_ring_races_too(self, seconds: dict[str, float]) -> None:
        seconds |= {e.name: 0.01 for e in entrants() if e.helped}
        chosen = selection.finalists(entrants(), seconds)
        peers = [e.name for e in chosen if not e.ours and e.lossless]
        assert sorted(peers) == ["fsdp2", "fsdp2 tuned ring", "hsdp", "hsdp tuned ring", "torch-ddp"]

    def test_all_peers_have_a_name_together(self) -> None:
        found = named(["mics", "peers", "hsdp tuned"], 1)
        assert found[0] == "mics" and {"fsdp2 tuned", "hsdp tuned"} <= {*found} and "zero3" not in found
        assert len(found) == len({*found})

    def test_who_was_not_screened_is_not_raced(self, seconds: dict[str, float]) -> None:
        del seconds["auto"], seconds[POWERSGD]
        assert not {"auto", POWERSGD} & {e.name for e in selection.finalists(entrants(), seconds)}


def raced(*names: str) -> list[Entrant]:
    return [Entrant.of(name, SQUARE, "bfloat16") for name in names]


class TestPairs:
    NAMES = ("mics", "zero++", LOW_RANK, "hsdp tuned", "hsdp tuned ring", POWERSGD)
    SECONDS = (2.0, 1.0, 1.5, 3.0, 2.5, 1.4)

    def pairs(self, regime: float | None) -> dict[str, selection.Pair]:
        return {
            pair.what: pair
            for pair in selection.pairs(raced(*self.NAMES), dict(zip(self.NAMES, self.SECONDS, strict=True)), regime)
        }

    def test_lossless_meets_lossless_and_a_peer_that_we_help_counts(self) -> None:
        found = self.pairs(8.0)
        assert (found["lossless"].ours, found["lossless"].theirs) == ("mics", "hsdp tuned ring")
        unhelped = found["lossless, peers as they come"]
        assert (unhelped.ours, unhelped.theirs, unhelped.at_least) == ("mics", "hsdp tuned", 0.97)

    def test_lossy_meets_the_best_lossless_peer_and_is_asked_for_a_factor_where_links_are_narrow(self) -> None:
        assert self.pairs(4.0)["lossy against lossless"] == selection.Pair(
            "lossy against lossless", "zero++", "hsdp tuned ring", 2.2
        )
        assert self.pairs(2.0)["lossy against lossless"].at_least is None
        assert self.pairs(None)["lossy against lossless"].at_least is None

    def test_deepspeed_is_met_whoever_else_is_there(self) -> None:
        names, seconds = ("mics", "hsdp tuned", "deepspeed stage=2", "deepspeed stage=3"), (1.0, 2.0, 4.0, 3.0)
        found = selection.pairs(raced(*names), dict(zip(names, seconds, strict=True)), 1.0)
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


def options_of(*arguments: str, job: Any = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(arguments)
    options.job, options.quick, options.contestants = job, False, None
    return options


class TestEnvironments:
    def test_by_default_there_are_three_shapes_six_links_and_two_lengths_of_step(self) -> None:
        names = [case.name for case in strategies.chosen(strategies.SUITE.cases, options_of())]
        assert names == [case.name for case in strategies.SUITE.cases] and len(set(names)) == 36
        assert {"2x2-regime8-micro1", "4x2-unshaped-micro4", "2x4-regime0.5-micro1"} <= set(names)
        assert all(case.workload.dtype == "bfloat16" for case in strategies.SUITE.cases)

    def test_any_combination_can_be_asked_for(self) -> None:
        given = ("--nodes", "2,3", "--ranks", "1", "--inter", "1gbit,unshaped", "--regime", "3", "--micro-steps", "2")
        names = [e.name for e in asked_for(options_of(*given), [SQUARE], [Link()], (1,))]
        assert names == [
            f"{shape}-{link}-micro2" for shape in ("2x1", "3x1") for link in ("regime3", "1gbit", "unshaped")
        ]

    def test_neighbours_differ_by_their_cables_the_slow_ones_first(self) -> None:
        """So that contestants stay."""
        found = asked_for(options_of("--regime", "1,8", "--micro-steps", "1,4"), [SQUARE], [Link()], (1,))
        assert [(e.workload.micro_steps, e.link.regime) for e in found] == [(1, 8), (1, 1), (4, 8), (4, 1)]

    def test_what_is_not_as_usual_is_in_the_name(self) -> None:
        [one] = asked_for(options_of("--width", "192", "--dtype", "float32"), [SQUARE], [Link()], (1,))
        assert one.name == "2x2-unshaped-micro1-fp32-width192" and one.workload.width == 192
        [waiting] = asked_for(options_of("--waiting"), [SQUARE], [Link()], (1,))
        assert waiting.name == "2x2-unshaped-micro1-waiting" and waiting.workload.wait_seconds
        [waiting] = asked_for(options_of("--wait", "0.5"), [SQUARE], [Link()], (1,))
        assert waiting.name == "2x2-unshaped-micro1-waiting0.5" and waiting.workload.wait_seconds == 0.5
        [in_step] = asked_for(options_of("--in-step"), [SQUARE], [Link()], (4,))
        assert in_step.name == "2x2-unshaped-micro4-in-step" and in_step.workload.in_step

    def test_a_job_has_its_own_shape_and_links_and_none_can_be_asked_for(self) -> None:
        job = SimpleNamespace(topology=Topology(3, 8))
        [one] = asked_for(options_of(job=job), [SQUARE], [Link()], (1,))
        assert (one.name, one.workload.topology) == ("3x8-cluster-micro1", Topology(3, 8))
        with pytest.raises(ConfigError, match=r"--nodes, --inter: for the cluster of this machine"):
            asked_for(options_of("--nodes", "2", "--inter", "1gbit", job=job), [SQUARE], [Link()], (1,))

    def test_a_quick_run_has_two_environments_and_six_contestants(self) -> None:
        options = options_of()
        options.quick = True
        assert len(strategies.chosen((), options)) == 2 and len(QUICK) == 6

    def test_scaling_keeps_a_ranks_work_or_all_ranks_work(self) -> None:
        options = options_of()
        options.contestants = None
        cases = scaling.chosen((), options)
        worlds = [case.workload.topology.world for case in cases if case.kind == "weak"]
        assert worlds == [2, 4, 8, 16]
        assert len({case.workload.batch for case in cases if case.kind == "weak"}) == 1
        assert {case.workload.batch * case.workload.topology.world for case in cases if case.kind == "strong"} == {32}

    def test_the_trials_of_one_regime_tell_the_next_where_to_begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[Rate] = []

        def trial(venue: Venue, *_: Any) -> Trial:
            assert venue.inter is not None
            tried.append(venue.inter)
            return Trial(str(venue.inter), 0.1 + 1e9 / venue.inter.bits_per_second, 1.0)

        monkeypatch.setattr("towpath.bench.environment.trial_of", trial)
        rates = Rates()
        rates.of(8.0, Workload(), suite.silent, Pool())
        before = len(tried)
        assert rates.of(2.0, Workload(micro_steps=4), suite.silent, Pool()).reached
        assert len(tried) == before + 1


class TestCase:
    """A case with made-up seconds: nothing is started."""

    _result = ""  # of the first run, which later tests start from

    @pytest.fixture
    def line(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
        def screen(self: Venue, names: Sequence[str], workload: Workload, turns: int, say: Any) -> Screening:
            tried = {name: Tried(1.0 + number / 100, 10**6) for number, name in enumerate(names)}
            tried.pop("zero1")
            return Screening(tried, {"zero1": "OutOfMemoryError: too large"})

        def measured(
            raced: Sequence[Entrant], venue: Venue, workload: Workload, settings: Any
        ) -> tuple[dict[str, Any], dict[str, str]]:
            failed = {raced[-1].name: "ValueError: broke"}
            names = [*(each.name for each in raced[:-1]), "fsdp2 silent", "compute"]
            seconds = {name: [1.0 + n / 7, 1.1 + n / 7] for n, name in enumerate(names)}
            counted = {name: [123_456_789, 123_456_789] for name in names}
            run = Race([names, names[::-1]], seconds, counted, counted)
            told = {name: [{"processor_seconds": 1.0, "memory_bytes": 10**8}] for name in names}
            return {"run": run, **run.recorded(), **strategies.figures_of(run, told, workload)}, failed

        monkeypatch.setattr(stamp, "busy_processors", lambda: 0.0)
        monkeypatch.setattr(Venue, "screen", screen)
        monkeypatch.setattr(strategies, "measured", measured)
        monkeypatch.setattr(suite, "say", lambda text: None)
        monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
        monkeypatch.setattr(stamp, "code", lambda root: {"commit": "abc", "clean": True})
        self.file = tmp_path / "strategies.jsonl"
        if not TestCase._result:
            strategies.SUITE.run(["2x2-unshaped-micro1", "--settle", "0", "-o", str(self.file)])
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
        shown = table.strategies_table(line)
        assert "not measured: zero1: OutOfMemoryError: too large" in shown
        assert f"not measured: {name}: ValueError: broke" in shown

    def test_the_table_reads_at_a_hundred_columns_and_has_everyone_who_raced(self, line: dict[str, Any]) -> None:
        line["case"]["name"] = "a name " * 30
        line["checks"][0]["what"] = "a long pair " * 20
        shown = table.strategies_table(line)
        assert max(map(len, shown.splitlines())) <= 100
        for name in line["communication_share"]:
            assert any(row.startswith(name[:29]) for row in shown.splitlines()), name

    def test_of_each_contestant_all_is_told(self, line: dict[str, Any]) -> None:
        names = set(line["communication_share"])
        for what in ("intervals", "bytes_between_nodes", "processor_seconds", "memory_bytes"):
            assert set(line[what]) == names
        assert min(line["communication_share"].values()) >= 0
        assert {"fsdp2 silent", "compute"}.isdisjoint(names)
        # Everybody of the field is in the file, also who was screened only.
        assert set(line["contestants"]) == set(everyone(1))

    def test_resume_leaves_out_what_is_there(self, line: dict[str, Any]) -> None:
        strategies.SUITE.run(["2x2-unshaped-micro1", "--resume", "--settle", "0", "-o", str(self.file)])
        assert len(results.read(self.file)) == 1
        strategies.SUITE.run(["2x2-unshaped-micro4", "--resume", "--settle", "0", "-o", str(self.file)])
        assert [kept["case"]["name"] for kept in results.read(self.file)][1:] == ["2x2-unshaped-micro4"]

    @pytest.mark.parametrize("other", [["--rounds", "8"], ["--contestants", "mics,hsdp,fsdp2"]])
    def test_a_race_of_other_rounds_or_contestants_is_not_there_yet(
        self, line: dict[str, Any], other: list[str]
    ) -> None:
        strategies.SUITE.run(["2x2-unshaped-micro1", *other, "--resume", "--settle", "0", "-o", str(self.file)])
        assert len(results.read(self.file)) == 2

    def test_the_page_shows_all_results_and_needs_no_network(self, line: dict[str, Any], tmp_path: Path) -> None:
        line["checks"][0] |= {"met": False, "found": 0.5}
        line["inter"] = "200mbit"
        other = {**line, "inter": "400mbit", "case": {**line["case"], "name": "2x2-regime4-micro1"}}
        failed = {
            **line,
            "checks": [],
            "failed": "rank 3 <died>",
            "case": {**line["case"], "name": "2x2-regime8-micro1"},
        }
        failed.pop("communication_share")
        made = tmp_path / "bench.html"
        page.write(made, [line, other, failed])
        text = made.read_text(encoding="utf-8")
        parser = Seen()
        parser.feed(text)
        assert not parser.fetched
        assert "rank 3 &lt;died&gt;" in text
        for title in ("Time against link rate", "Bytes on the links", "Memory", "Time against memory"):
            assert f"<h2>{title}: " in text
        headings = re.findall(r"<h2>(.*?)</h2>", text)
        assert len(set(headings)) == len(headings)
        assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
        for name in line["communication_share"]:
            assert name in text

    def test_a_race_of_lossy_ones_and_of_a_strategy_that_is_no_more_has_its_page(
        self, line: dict[str, Any], tmp_path: Path
    ) -> None:
        text = json.dumps(line)
        for name in line["communication_share"]:
            text = text.replace(f'"{name}"', f'"was-{name}"')
        changed = json.loads(text)
        for about in changed["contestants"].values():
            about["lossless"] = False
        page.write(tmp_path / "bench.html", [changed])
        assert f"was-{next(iter(line['communication_share']))}" in (tmp_path / "bench.html").read_text(encoding="utf-8")

    def test_who_is_neither_quicker_nor_smaller_is_not_on_the_line(self) -> None:
        points = {"small": (1.0, 3.0), "quick": (3.0, 1.0), "beaten": (3.0, 2.0)}
        assert drawing.unbeaten(points) == ["quick", "small"]


class Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (name in ("src", "href", "xlink:href") and not (value or "").startswith("#")) or tag in (
                *("link", "script", "iframe"),
            ):
                self.fetched.append(f"{tag} {name}={value}")


class TestCommand:
    @pytest.mark.parametrize("columns", [80, 100, 300])
    def test_every_suite_is_there_and_tells_what_it_measures(
        self, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(results, "FOLDER", Path("bench-results"))  # a checkout's may be any length
        command.bench()
        listed = capsys.readouterr().out
        assert max(map(len, listed.splitlines())) <= min(columns, 100)
        for name in command.SUITES:
            assert re.search(rf"^  {name} +\S", listed, re.MULTILINE)
            shown = self.help_of(name, capsys)
            assert f"towpath bench {name}" in shown and "--quick" in shown and "--json" in shown
            assert max(map(len, shown.splitlines())) <= min(columns, 100)

    def help_of(self, suite: str, capsys: pytest.CaptureFixture[str]) -> str:
        with pytest.raises(SystemExit) as ended:
            command.bench(suite, ["--help"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    @pytest.mark.parametrize("suite", command.SUITES)
    def test_a_case_can_be_copied_from_the_help_into_a_shell(
        self, suite: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        listed = self.help_of(suite, capsys).partition("\ncases, as they are written in a shell:\n\n")[2]
        cases = import_module(f"towpath.bench.suites.{suite}").SUITE.cases
        assert [shlex.split(row) for row in listed.splitlines() if row.startswith("  ")] == [[c.name] for c in cases]

    def test_a_name_with_spaces_is_told_from_its_neighbours(self) -> None:
        with pytest.raises(ConfigError, match="no case 'state dcit'; there are loaded, drawn, 'state dict', limited"):
            command.bench("memory", ["state dcit"])

    @pytest.mark.parametrize("suite", command.SUITES)
    def test_an_unknown_case_hears_of_options_that_the_suite_has(
        self, suite: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        usage, _, _ = self.help_of(suite, capsys).partition("\n\n")
        with pytest.raises(ConfigError, match="no case nobody; there are ") as refused:
            command.bench(suite, ["nobody"])
        named = set(re.findall(r"--[a-z-]+", str(refused.value)))
        assert named == {option for option in ("--waiting", "--nodes", "--device") if option in usage}

    def test_the_planners_suite_says_how_many_strategies_it_runs(self) -> None:
        count = len({*prediction.LOSSLESS, *prediction.LOSSY})
        assert f"steps of {count} strategies, and of the two that the planner" in planner.SUITE.doc

    def test_a_users_mistake_is_one_error(self) -> None:
        with pytest.raises(ConfigError, match="there is no suite 'speed', only strategies"):
            command.bench("speed")
        with pytest.raises(ConfigError, match=r"unrecognized arguments: --fast.*towpath bench kernels --help"):
            command.bench("kernels", ["--fast"])
        with pytest.raises(ConfigError, match="no case 9x9"):
            command.bench("strategies", ["9x9"])
        with pytest.raises(ConfigError, match=r"there is no file nowhere\.jsonl"):
            command.bench("report", ["nowhere.jsonl"])
        with pytest.raises(ConfigError, match="nope"):
            command.bench("strategies", ["--contestants", "torch-ddp nope"])
        with pytest.raises(ConfigError, match=r"deepspeed: stage=4; expected stage=1, 2 or 3"):
            command.bench("strategies", ["--contestants", "deepspeed stage=4"])

    @pytest.mark.parametrize(
        ("suite", "given", "said"),
        [
            ("strategies", "--regime 0", "--regime: a number above 0 is needed; got 0"),
            ("strategies", "--regime abc", "--regime: 'abc' is no number"),
            ("strategies", "--wait nan", "--wait: a number above 0 is needed; got nan"),
            ("strategies", "--width 100", "--width: a multiple of 6, the model's heads, is needed; got 100"),
            ("strategies", "--contestants mics,,hsdp", "something is missing between the commas of 'mics,,hsdp'"),
            ("scaling", "--contestants foo", "there is neither a peer nor a strategy 'foo'"),
            ("scaling", "--regime 4", "cables keep their rate here"),
            ("scaling", "--ranks 3", "6 ranks, which cannot share 32 sequences evenly|3 ranks, which cannot"),
        ],
    )
    def test_a_bad_value_is_refused_before_anything_starts(self, suite: str, given: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            command.bench(suite, given.split())

    def test_deepspeed_asked_for_where_it_is_not_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deepspeed_peer, "installed", lambda: False)
        with pytest.raises(ConfigError, match=r"benchmarks/deepspeed\.txt and set TOWPATH_DEEPSPEED=FOLDER"):
            command.bench("strategies", ["--contestants", "deepspeed stage=3"])

    def test_a_suite_with_ranks_of_its_own_is_refused_under_a_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match="the suite memory starts ranks of its own"):
            command.bench("memory", [])


def test_the_reason_is_the_last_line_that_a_rank_said() -> None:
    assert reason(CaseError("rank 1 failed:\nTraceback …\n  File x\nValueError: broke\n\n")) == "ValueError: broke"


def test_what_the_first_turns_prepare_is_no_step_s_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 10.0, 10.5, 11.0, 11.25])  # before and after each turn; the first imports
    monkeypatch.setattr("towpath.bench.steps.timed", lambda work: 1.0)
    step = Step(0, 1, "compute", Workload(Topology(1, 1)).quick())
    monkeypatch.setattr("towpath.bench.steps.time", SimpleNamespace(process_time=lambda: next(clock)))
    for _ in range(3):
        step.turn()
    assert step.facts()["processor_seconds"] == 0.5


def test_interfaces_are_counted_but_for_the_loopback() -> None:
    columns = lambda received, sent: f"{received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0"  # noqa: E731
    shown = (
        f"Inter-| Receive\n face |bytes\n    lo: {columns(7, 7)}\n  eth0: {columns(10, 20)}\n  ib0: {columns(1, 2)}\n"
    )
    assert node_counters(shown) == LinkBytes(22, 11, 7)


def test_entrants_are_kept_as_they_are() -> None:
    assert asdict(Entrant.of("hsdp tuned ring", SQUARE, "bfloat16")) == {
        "name": "hsdp tuned ring",
        "ours": False,
        "lossless": True,
        "helped": True,
    }


# The floor of a step --------------------------------------------------------------------------------------------------


def test_the_floor_is_what_blocks_take_and_what_cables_carry_meanwhile() -> None:
    """Where nothing is shaped a step is its computation; else at least what its bytes take, and less than both."""
    workload = Workload(Topology(2, 2), 2, "bfloat16").quick()
    strategy, rate = towpath.strategy("mics", workload.topology), Rate.parse("10mbit")
    assert floor_seconds(strategy, workload, 0.3, None) == pytest.approx(0.6)
    sent = towpath.schedule(strategy, workload.model(), 2, towpath.Precision("bfloat16")).inter_bytes
    carried = sent / 2 / rate.bytes_per_second  # each of the two nodes has a cable
    computing = carried / 2
    assert carried < floor_seconds(strategy, workload, computing, rate) < 2 * computing + carried


def test_how_near_a_step_comes_to_its_floor_is_asked_where_blocks_wait() -> None:
    seconds, floors = {"mics": [2.3, 2.5, 2.4], "ddp": [9.0, 9.0, 9.0]}, {"mics": 2.0, "ddp": 1.0}
    waits, optimizer = Workload(wait_seconds=0.01), {"mics": 0.1, "ddp": 0.1}
    [check] = strategies.overlap_checks(seconds, optimizer, floors, waits)
    assert check.found == pytest.approx(1.15)
    assert check.at_most == 1.15
    assert not strategies.overlap_checks(seconds, optimizer, floors, Workload())


def test_the_optimizer_takes_from_the_last_begin_to_the_last_end() -> None:
    quick, late = [(0.0, 1.0), (10.0, 11.0), (20.0, 21.0)], [(0.5, 1.2), (10.5, 11.4), (20.5, 23.0)]
    assert strategies.optimizer_seconds([quick, late]) == pytest.approx(0.9)


def test_scaling_compares_what_left_the_nodes_with_the_schedule() -> None:
    workload = Workload(Topology(2, 2), 1, "bfloat16").quick()
    raced = [Entrant.of(name, workload.topology, workload.dtype) for name in ("mics", "hsdp tuned", "auto")]
    sent = towpath.schedule("mics", workload.model(), precision=workload.precision, topology=Topology(2, 2)).inter_bytes
    [right] = scaling.bytes_checks({"mics": sent}, raced, workload)
    assert right.met and right.found == 1
    [twice] = scaling.bytes_checks({"mics": 2 * sent}, raced, workload)
    assert not twice.met


def test_scaling_says_what_a_step_takes_besides_computing_and_what_the_schedule_leaves_of_it() -> None:
    usual, optimizer, floors = {"mics": 3.0, "compute": 1.0}, {"mics": 0.25}, {"mics": 2.5}
    waits = Workload(Topology(2, 2), 1, wait_seconds=0.01)
    [found, least] = scaling.exposed_checks(usual, optimizer, floors, waits)
    assert (found.found, least.found) == (1.75, 1.5)
    assert not list(scaling.exposed_checks(usual, optimizer, floors, Workload()))


class TestScreening:
    def test_who_is_screened_on_one_rate_is_known_on_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(strategies, "_SCREENINGS", {})
        screened: list[tuple[str, ...]] = []

        def screen(venue: Venue, names: tuple[str, ...], *_: object) -> Screening:
            screened.append(names)
            return Screening({name: Tried(1.0, 1) for name in names}, {})

        monkeypatch.setattr(Venue, "screen", screen)
        options = argparse.Namespace(contestants=["mics", "hsdp"], screen=True)
        settings, square = Settings(6, False, str, options), Workload(SQUARE)
        cases = [strategies.Case(f"at {rate}", square, Link(inter=rate)) for rate in ("100mbit", "200mbit")]
        found = [case._screened(raced("mics", "hsdp"), Venue(None), settings) for case in cases]
        assert [where for where, _ in found] == ["at 100mbit", "at 100mbit"]
        assert screened == [("mics", "hsdp")]
        cases[0]._screened(raced("mics", "fsdp2"), Venue(None), settings)
        assert len(screened) == 2  # others take part

    def test_who_is_named_races_without_it(self) -> None:
        settings = Settings(6, False, str, argparse.Namespace(contestants=["mics"], screen=False))
        case = strategies.Case("here", Workload(SQUARE), Link())
        assert case._screened(raced("mics"), Venue(None), settings) == (None, None)


class TestReport:
    @pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", "3", '{"case": {"name": "x"}}'])
    def test_a_line_that_is_no_result_is_one_error_that_names_it(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "mine.jsonl"
        file.write_text(f"{text}\n")
        with pytest.raises(ConfigError, match=r"mine.jsonl:1 is no result of `towpath bench`"):
            page.main([str(file), "-o", str(tmp_path / "bench.html")], "towpath bench report")

    def test_a_file_that_is_empty_or_not_text_is_one_error(self, tmp_path: Path) -> None:
        empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.jsonl"
        empty.write_text("")
        binary.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"there are no results in .*empty.jsonl"):
            page.read([empty])
        with pytest.raises(ConfigError, match=r"binary.jsonl is no file of results"):
            page.read([binary])
        with pytest.raises(ConfigError, match="there is no file"):
            page.read([tmp_path])
        with pytest.raises(ConfigError, match=r"that is a folder. Name a file in it"):
            page.main(["-o", str(tmp_path)], "towpath bench report")
        with pytest.raises(ConfigError, match=r"unrecognized arguments: --quick.*towpath bench report --help"):
            page.main(["--quick"], "towpath bench report")
