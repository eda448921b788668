"""Forecasts of published runs: what is recorded can be computed again."""

import json

import pytest

from benchmarks import forecasts, published

# Ten rows of several clusters, wrappers and batches. Few groups, because each is calibrated first.
ROWS = (
    "mosaicml-h100-mpt-70b-32gpu-fsdp-seq2048-b2x16-ac-full-bf16-eager",
    "mosaicml-h100-mpt-13b-64gpu-fsdp-seq2048-b2x1-ac-none-bf16-eager",
    "mosaicml-h100-mpt-3b-256gpu-zero2-seq2048-b8x1-ac-none-bf16-eager",
    "mosaicml-h100-mpt-1b-16gpu-fsdp-seq2048-b20x1-ac-none-bf16-eager",
    "grand-teton-h100-llama3-8b-128gpu-fsdp-seq8192-b2x1-ac-selective-bf16-eager",
    "nebius-h200-llama3-8b-16gpu-fsdp-seq4096-b1x1-ac-full-bf16-eager",
    "nebius-h200-llama3-8b-16gpu-zero2-seq4096-b1x1-ac-full-bf16-eager",
    "nebius-h200-llama3-70b-16gpu-fsdp-seq4096-b1x1-ac-full-bf16-eager",
    "oumi-gcp-fineweb-1.8b-16gpu-fsdp-seq2048-b16x16-ac-full-bf16-eager",
    "oumi-gcp-fineweb-1.8b-16gpu-hsdp4-seq2048-b16x16-ac-full-bf16-eager",
)


@pytest.mark.parametrize("name", ROWS)
def test_a_recorded_forecast_is_that_of_this_planner(name: str) -> None:
    found = published.load()
    run = next(each for each in found.runs if each.id == name)
    made = forecasts.forecast(found, run)
    assert made is not None
    recorded = json.loads(forecasts.FILE.read_text(encoding="utf-8"))[name]
    assert made.fixed_by.id == recorded["fixed by"]
    for what in ("tokens/s/GPU", "GiB", "exposed"):
        assert made.recorded()[what] == pytest.approx(recorded[what], rel=1e-3, abs=1e-3), what


def test_the_run_that_fixes_a_rate_is_predicted_as_printed() -> None:
    found = published.load()
    fixed = next(run for run in found.runs if run.calibrates and run.cluster.id == "grand-teton-h100")
    assert forecasts.predicted(fixed, forecasts.reached_by(fixed)).seconds == pytest.approx(fixed.seconds, rel=1e-3)


def test_runs_that_the_planner_does_not_know_have_no_forecast() -> None:
    found = published.load()
    split = [run for run in found.runs if run.tensor > 1]
    assert split
    assert not any(forecasts.forecast(found, run) for run in split)


def test_a_row_on_one_node_is_recomputed_and_an_unknown_one_refused(capsys: pytest.CaptureFixture[str]) -> None:
    row = "kempner-h200-kempner-7b-2gpu-fsdp-seq4096-b2x4-ac-full-bf16-compiled"
    forecasts.main([row])
    assert row in capsys.readouterr().out
    with pytest.raises(SystemExit):
        forecasts.main(["nope"])
    assert "no such row: nope" in capsys.readouterr().err
