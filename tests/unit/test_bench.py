"""`towpath bench`: interleaved rounds, candidates and their kinds, the table, and errors before anything starts."""

from __future__ import annotations

import pytest

from towpath import comparison
from towpath.cli.main import app
from towpath.comparison import Comparison, Sample
from towpath.errors import ConfigError
from towpath.topology.cluster import Topology

SQUARE = Topology(2, 2)
KINDS = {"mics": "ours", "zero++": "ours, lossy", "fsdp2": "peer", "hsdp": "peer"}
SECONDS = {"mics": 1.0, "zero++": 0.5, "fsdp2": 4.0, "hsdp": 2.0}


class TestComparison:
    def test_a_candidate_that_fails_is_left_out_with_the_reason(self) -> None:
        said: list[str] = []
        found = Comparison(KINDS)
        found.run(2, lambda number, name: "too large" if name == "fsdp2" else Sample(SECONDS[name]), said.append)
        assert found.failures == {"fsdp2": "too large"} and "fsdp2" not in found.samples
        assert found.fastest("peer") == "hsdp"
        assert len(said) == 6 and all("to go" in text for text in said)

    def test_a_speed_up_is_a_ratio_of_medians_with_its_interval(self) -> None:
        seconds = iter([1.9, 2.1] * 3)
        found = Comparison({"mics": "ours", "hsdp": "peer"})
        found.run(6, lambda number, name: Sample(2.0 if name != "mics" else next(seconds)), lambda text: None)
        ratio, interval = found.speedup("mics", "hsdp")
        assert ratio == pytest.approx(1.0) and interval.low < 1 < interval.high and interval.coverage > 0.95


class TestCandidates:
    def test_candidates_have_their_kind(self) -> None:
        strategies = ("zero3", "mics gradients=int4:64", "ddp frozen=1x1")
        kinds = comparison.check_candidates(strategies, ("fsdp2",), SQUARE, "bfloat16")
        assert list(kinds.values()) == ["ours", "ours, lossy", "ours", "peer"]

    def test_bf16_messages_are_lossless_in_a_bf16_run_only(self) -> None:
        text = "mics gradients=bf16"
        for dtype, kind in (("bfloat16", "ours"), ("float32", "ours, lossy")):
            assert comparison.check_candidates([text], (), SQUARE, dtype) == {text: kind}

    def test_an_unknown_peer_is_one_error(self) -> None:
        with pytest.raises(ConfigError, match="no peer 'fsdp3', only fsdp2, fsdp2 reshard=no, hsdp"):
            comparison.check_candidates([], ["fsdp3"], SQUARE, "float32")


class TestCommand:
    def test_without_a_launcher_it_says_how_to_start_it(self) -> None:
        with pytest.raises(ConfigError, match=r"no launcher started this process.*torchrun … -m towpath bench"):
            app(["bench"], standalone_mode=False)

    def test_an_unknown_model_is_one_error_before_anything_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match="--model 2b: expected tiny, 125m"):
            app(["bench", "--model", "2b"], standalone_mode=False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected a preset's name"),
        ("auto", "expected a preset's name"),
        ("nope", "strategy 'nope': "),
        ("mics nope=1", "strategy 'mics nope=1': "),
        ("mics group=[1,1]", r"got 'group=\[1,1\]', expected group=RANKSxNODES, such as 4x1"),
        ("mics gradients", "got 'gradients', expected OPTION=VALUE"),
    ],
)
def test_a_candidate_that_cannot_be_read_says_how_to_write_it(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        comparison.check_candidates([text], [], Topology(2, 2), "float32")
