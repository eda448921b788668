"""What `benchmarks/published.toml` must be: complete, consistent with itself, and in halves that nobody chooses."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import published
from benchmarks.published import Model, PublishedError

RUNS = published.load().runs

# The smallest file: one run on one node, and one across nodes.
SMALL = """
[[source]]
id = "page"
url = "https://example.org"
version = "1"
software = "torch"
counts = "steps"

[[cluster]]
id = "rack"
gpu = "A100"
gpu_memory_gb = 40
bf16_flops = 312e12
gpus_per_node = 4
network = "TCP"
node_gbits = 50
network_source = "page"
inside = "NVLink"
inside_source = "page"

[[model]]
id = "small"
family = "gpt"
layers = 2
width = 64
heads = 4
kv_heads = 4
ffn = 256
gated = false
vocabulary = 100
tied = true
shape_source = "page"

[[table]]
rows = [
    { id = "rack-small-4gpu-fsdp-seq32-b2x1-ac-none-bf16-eager", nodes = 1, printed = 8, calibrates = true },
    { id = "rack-small-8gpu-fsdp-seq32-b2x1-ac-none-bf16-eager", nodes = 2, printed = 12 },
]

[table.shared]
source = "page"
where = "table 1"
cluster = "rack"
model = "small"
parallelism = "full shard"
micro_batch = 2
sequence = 32
precision = "bf16"
reduce = "fp32"
checkpointing = "none"
compile = false
unit = "samples/s"
"""


def test_a_small_file_is_read_and_its_figures_are_converted() -> None:
    one, two = published.load(SMALL).runs
    assert (one.half, one.gpus, two.gpus) == (None, 4, 8)
    assert (one.tokens_per_second_per_gpu, two.tokens_per_second_per_gpu) == (64, 48)
    assert two.tokens_per_step == 8 * 2 * 32
    assert two.seconds == pytest.approx(16 / 12)
    assert published.load(SMALL).calibrating(two) == one


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('where = "table 1"', 'where = "table 1"\nwhat = 1', "unknown keys"),
        ('where = "table 1"', "", "lacks"),
        ('network = "TCP"', "", "lacks"),
        ("[[source]]", "[other]\n[[source]]", "unknown entries"),
        ("nodes = 2,", "nodes = 3,", "not what the rule makes"),
        ("8gpu-fsdp-seq32", "8gpu-fsdp-seq64", "not what the rule makes"),
        ("nodes = 2, printed", "nodes = 2, sequence = 32, printed", "repeats"),
        ("printed = 12", "printed = 0", "printed 0"),
        ("printed = 12", "printed = 12, calibrates = true", "calibrates on 2 nodes"),
        (", calibrates = true", "", "has no rate"),
        ('reduce = "fp32"', 'reduce = "tf32"', "use one of"),
        ('cluster = "rack"', 'cluster = "rock"', "use one of"),
        ('unit = "samples/s"', 'unit = "MFU"', "mfu_flops_per_token"),
    ],
)
def test_an_entry_that_is_wrong_is_an_error(old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(PublishedError, match=message):
        published.load(SMALL.replace(old, new))


def test_two_runs_of_one_id_are_an_error() -> None:
    row = next(line for line in SMALL.splitlines() if "8gpu" in line)
    with pytest.raises(PublishedError, match="is there twice"):
        published.load(SMALL.replace(row, f"{row}\n{row}"))


def test_both_halves_are_large_enough() -> None:
    halves = Counter(run.half for run in RUNS if run.nodes > 1)
    assert halves.keys() == {"development", "hold-out"}
    assert min(halves.values()) >= 40
    assert halves.total() >= 80


def test_the_halves_stay_as_they_are() -> None:
    # Forecasts of the hold-out half are committed before anybody looks at their errors: no run may change its half.
    assert published.half("a") == "hold-out"
    assert published.half("c") == "development"


def test_models_have_the_printed_number_of_parameters() -> None:
    checked = {run.model.id: run.model for run in RUNS if run.model.printed_parameters}.values()
    assert len(checked) >= 12
    for model in checked:
        assert model.parameters == pytest.approx(model.printed_parameters, rel=0.002), model.id


def test_batches_and_steps_agree_where_a_source_prints_both() -> None:
    checked = [run for run in RUNS if run.printed_seconds]
    assert len(checked) >= 25
    for run in checked:
        assert run.seconds == pytest.approx(run.printed_seconds, rel=0.01), run.id


def test_shapes_and_rates_agree_with_the_printed_mfu() -> None:
    # fms-fsdp's MFU of models with grouped queries is 6 % below the formula that it names.
    checked = [run for run in RUNS if run.printed_mfu and not run.source.id.startswith("fms-fsdp")]
    assert len(checked) >= 110
    for run in checked:
        embedded = run.source.id not in ("aws-torchtitan-2025-03", "nebius-poc")  # their N has no embedding
        mfu = run.tokens_per_second_per_gpu * _flops(run.model, run.sequence, embedded) / run.cluster.bf16_flops
        assert mfu == pytest.approx(run.printed_mfu, rel=0.01), run.id


def test_what_no_source_prints_is_named() -> None:
    clusters = {run.cluster.id: run.cluster for run in RUNS}.values()
    unprinted = [c for c in clusters if "not printed" in c.network_source + c.inside_source]
    assert unprinted
    assert all(cluster.assumed for cluster in unprinted)
    assert all(run.assumed for run in RUNS if run.checkpointing == "selective")


def test_no_run_is_faster_than_its_gpu() -> None:
    for run in (run for run in RUNS if run.trains == "all"):
        peak = run.cluster.bf16_flops * (2 if run.precision == "fp8" else 1)
        assert run.tokens_per_second_per_gpu * 6 * run.model.matrices < 0.75 * peak, run.id


def _flops(model: Model, sequence: int, embedded: bool) -> float:
    parameters = model.parameters - (0 if embedded else model.vocabulary * model.width)
    return 6 * parameters + 12 * model.layers * model.width * sequence
