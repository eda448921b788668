"""`towpath bench`: interleaved rounds, honest verdicts, errors before anything starts, and its page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from towpath import bench
from towpath.bench import COMPUTE, Sample, compare
from towpath.cli import bench as command
from towpath.cli.main import app
from towpath.errors import ConfigError, StepError
from towpath.topology.cluster import Topology

SQUARE = Topology(2, 2)
KINDS = {"mics": "ours", "zero++": "ours, lossy", "fsdp2": "peer", "hsdp": "peer"}
SECONDS = {"mics": 1.0, "zero++": 0.5, "fsdp2": 4.0, "hsdp": 2.0, COMPUTE: 0.4}


def measured(rounds: int, seconds: dict[str, float] = SECONDS) -> bench.Comparison:
    return compare(KINDS, rounds, lambda name: Sample(seconds[name], sent_bytes=2e6), lambda text: None)


class TestCompare:
    def test_every_round_has_every_candidate_in_its_order(self) -> None:
        asked: list[str] = []
        found = compare(KINDS, 4, lambda name: asked.append(name) or Sample(1.0), lambda text: None)
        assert asked == [name for names in found.order for name in names]
        assert all(sorted(names) == sorted([*KINDS, COMPUTE]) for names in found.order)
        assert found.order[1] == found.order[0][::-1] and found.order[2] != found.order[0]

    def test_a_candidate_that_fails_is_left_out_with_the_reason(self) -> None:
        def measure(name: str) -> Sample:
            if name == "fsdp2":
                raise StepError("rank 1: Traceback\n  File x\nOutOfMemoryError: too large")
            return Sample(SECONDS[name])

        found = compare(KINDS, 2, measure, lambda text: None)
        assert found.failures == {"fsdp2": "OutOfMemoryError: too large"} and "fsdp2" not in found.samples
        assert found.fastest("peer") == "hsdp" and "fsdp2" not in found.order[1]

    def test_progress_says_what_is_left(self) -> None:
        said: list[str] = []
        compare(KINDS, 1, lambda name: Sample(SECONDS[name]), said.append)
        assert len(said) == len(KINDS) + 1 and all("to go" in text for text in said)

    def test_a_verdict_is_against_the_fastest_peer(self) -> None:
        lossless, lossy = measured(6).verdicts()
        assert lossless == "mics is 2.00 times as fast as hsdp (97% interval 2.00 to 2.00)."
        assert lossy.startswith("zero++ is 4.00 times as fast as hsdp") and lossy.endswith("It rounds what it sends.")

    def test_too_few_rounds_are_not_conclusive(self) -> None:
        first, *_, last = measured(3).verdicts()
        assert first.startswith("mics was, in these rounds, 2.00 times as fast")
        assert "75% of cases only. Use --rounds 6 or more." in last
        assert len(measured(6).verdicts()) == 2

    def test_an_interval_around_one_is_no_difference(self) -> None:
        seconds = iter([1.9, 2.1] * 3)
        found = compare(
            {"mics": "ours", "hsdp": "peer"},
            6,
            lambda name: Sample(2.0 if name != "mics" else next(seconds)),
            lambda text: None,
        )
        assert found.verdicts()[0].startswith("No measurable difference: mics against hsdp, ratio 1.00")

    def test_without_a_peer_there_is_no_verdict(self) -> None:
        found = compare({"mics": "ours"}, 6, lambda name: Sample(1.0), lambda text: None)
        assert found.verdicts() == []


class TestCandidates:
    def test_candidates_have_their_kind(self) -> None:
        strategies = ("zero3", "mics gradients=int4:64", "ddp frozen=1x1")
        kinds = bench.check_candidates(strategies, ("fsdp2",), SQUARE, "bfloat16")
        assert list(kinds.values()) == ["ours", "ours, lossy", "ours", "peer"]

    def test_bf16_messages_are_lossless_in_a_bf16_run_only(self) -> None:
        for dtype, kind in (("bfloat16", "ours"), ("float32", "ours, lossy")):
            assert bench.check_candidates(["mics gradients=bf16"], (), SQUARE, dtype) == {"mics gradients=bf16": kind}

    @pytest.mark.parametrize("text", ["nope", "mics nope=1", "mics group=x"])
    def test_an_unknown_strategy_is_one_error(self, text: str) -> None:
        with pytest.raises(ConfigError, match=f"strategy '{text}': "):
            bench.check_candidates([text], (), SQUARE, "float32")

    def test_an_unknown_peer_is_one_error(self) -> None:
        with pytest.raises(ConfigError, match="no peer 'fsdp3', only fsdp2, hsdp"):
            bench.check_candidates([], ["fsdp3"], SQUARE, "float32")

    def test_models_have_about_the_size_of_their_name(self) -> None:
        for name, size in (("125m", 125e6), ("350m", 350e6), ("1b", 1e9), ("3b", 3e9), ("7b", 7e9)):
            setup = bench.TrainingSetup(*bench.parse_model(name), 8, 1, 1, "float32", 1)
            assert setup.parameters == pytest.approx(size, rel=0.1)
        assert bench.parse_model("128x3")[:2] == (128, 3)


class Fetched(HTMLParser):
    """Collects what a page would fetch from a network."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (name in ("src", "href", "xlink:href") and not (value or "").startswith("#")) or tag in (
                *("link", "script", "iframe"),
            ):
                self.found.append(f"{tag} {name}={value}")


class TestCommand:
    def test_help_has_an_example(self) -> None:
        shown = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "100"}).output
        assert "towpath bench --lab" in shown and "torchrun" in shown

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ([], "no launcher started this process.*add --lab"),
            (["--lab", "--model", "2b"], "--model 2b: expected tiny, 125m"),
            (["--lab", "--model", "100x2"], "--model 100x2: expected .* with a width that 64 divides"),
            (["--lab", "--dtype", "int8"], "--dtype int8: expected bfloat16 or float32"),
            (["--lab", "-o", "."], "that is a folder"),
        ],
        ids=" ".join,
    )
    def test_a_mistake_is_one_error_before_anything_starts(self, given: list[str], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            app(["bench", *given], standalone_mode=False)

    def test_the_lab_needs_namespaces_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lab.available", lambda: "the lab needs root.")
        with pytest.raises(ConfigError, match="--lab: this machine cannot emulate a cluster: the lab needs root"):
            app(["bench", "--lab"], standalone_mode=False)

    def test_a_job_has_its_own_ranks_and_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match="--nodes, --inter: only for --lab"):
            app(["bench", "--nodes", "2", "--inter", "1gbit"], standalone_mode=False)
        with pytest.raises(ConfigError, match="--lab starts its own ranks"):
            app(["bench", "--lab"], standalone_mode=False)

    def test_the_table_fits_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        command.show(measured(6))
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= 100
        rows = [line.split()[0] for line in shown.splitlines()[1:6]]
        assert rows == ["compute", "zero++", "mics", "hsdp", "fsdp2"]

    def test_the_page_has_every_measurement_and_fetches_nothing(self, tmp_path: Path) -> None:
        seconds = iter([1.125 + number / 1000 for number in range(30)])
        found = compare(KINDS, 6, lambda name: Sample(next(seconds)), lambda text: None)
        found.failures["torch-ddp"] = "too <large>"
        command.write_page(tmp_path / "bench.html", "Two nodes.", found)
        text = (tmp_path / "bench.html").read_text(encoding="utf-8")
        parser = Fetched()
        parser.feed(text)
        assert not parser.found and "too &lt;large&gt;" in text
        assert all(f"<td>{each:.4g}</td>" in text for name in KINDS for each in found.seconds(name))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected a preset's name"),
        ("auto", "expected a preset's name"),
        ("lins params=[1,1]", r"got 'params=\[1,1\]', expected params=RANKSxNODES, such as 4x1"),
        ("mics gradients", "got 'gradients', expected OPTION=VALUE"),
    ],
)
def test_a_candidate_that_cannot_be_read_says_how_to_write_it(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        bench.check_candidates([text], [], Topology(2, 2), "float32")
