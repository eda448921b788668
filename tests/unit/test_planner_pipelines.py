"""Pipelines as the planner prices them, without ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.ranks.strategies import seldom
from towpath.cli.main import app
from towpath.core.passes import Compression, gpipe, most_in_flight, one_forward_one_backward
from towpath.core.queues import COMMUNICATOR_BYTES
from towpath.core.strategy import Strategy
from towpath.core.transport import Transport
from towpath.errors import ConfigError, PlanError
from towpath.pipeline.schedules import walks
from towpath.plan.catalog import describe_model, load_cluster, named_models
from towpath.plan.hardware import GIB
from towpath.plan.model import Transformer
from towpath.plan.pipelines import Layout, Pipelines
from towpath.plan.request import Request
from towpath.plan.solver import Batching

SHAPE = Transformer(vocabulary=1000, width=64, depth=8, heads=4, hidden=256, tied=False)
CLUSTER = load_cluster("ethernet-10g", 4)  # of four ranks each
# The model is so small that a step would only launch.
CLUSTER = replace(CLUSTER, hardware=replace(CLUSTER.hardware, launching=None))


def planner(memory: float = 20.0, batch: int = 64, **change: object) -> Pipelines:
    shape = replace(SHAPE, **change)  # type: ignore[arg-type]
    request = Request(batch, int(memory * GIB), checkpointing=False)
    return Pipelines(lambda count: shape.staged("gpt", 128, count), CLUSTER, request, walks)


def test_communicators_of_both_directions_are_counted() -> None:
    """With that of all ranks. Where processors compute, messages are gloo's, and need none."""
    found = [planner().predict(Layout(stages), Batching(1, 8)).memory.get("communicators", 0) for stages in (1, 2, 4)]
    one, two, four = found
    assert two >= 3 * COMMUNICATOR_BYTES <= four and one < two
    processors = replace(CLUSTER, hardware=replace(CLUSTER.hardware, cores=8.0))
    made = Pipelines(lambda count: SHAPE.staged("gpt", 128, count), processors, Request(64, 20 * GIB), walks)
    assert "communicators" not in made.predict(Layout(2), Batching(1, 8)).memory


@pytest.mark.parametrize("name", ["llama-7b", "gpt-8.3b", "bert-10b"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_stages_have_together_what_the_model_has(name: str, count: int) -> None:
    shape, length = named_models()[name]
    staged, whole = shape.staged(name, length, count), describe_model(name)
    assert sum(model.parameters for model in staged.stages) + staged.tied == whole.parameters
    assert sum(model.flops for model in staged.stages) == pytest.approx(whole.flops)
    assert sum(unit.modules for model in staged.stages for unit in model.units[1:] if not unit.spec.leaf) == shape.depth


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(Exception, match="16 stages of a model that has 8 blocks"):
        planner().predict(Layout(16), Batching(1, 16))


@pytest.mark.parametrize(
    "layout, words", [(Layout(3), "divisor of the cluster's 16"), (Layout(2, tensor=8), "a node's 4")]
)
def test_layouts_that_do_not_divide_are_refused(layout: Layout, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        planner().copies(layout)


def test_stages_that_would_lie_unevenly_on_nodes_are_refused() -> None:
    three = load_cluster("ethernet-10g", 3)  # 12 ranks: stages of 6 on nodes of 4
    made = Pipelines(lambda count: SHAPE.staged("gpt", 128, count), three, Request(12, 20 * GIB))
    with pytest.raises(PlanError, match="6 ranks of a stage would lie unevenly on nodes of 4"):
        made.copies(Layout(2))


def test_gpipe_keeps_every_micro_batch_however_many_are_replayed() -> None:
    kept = [planner().predict(Layout(4, "GPipe"), Batching(1, count)).memory["activations"] for count in (8, 16, 64)]
    # Each further micro-batch keeps as much; what the backward pass has for a moment is there once.
    assert [more - kept[0] for more in kept[1:]] == [pytest.approx((kept[1] - kept[0]) * times) for times in (1, 7)]
    assert 0.8 * kept[0] < kept[1] - kept[0] <= kept[0]


def test_what_is_written_for_training_has_no_codec_of_some_stages_only() -> None:
    packed = Compression(gradients="low-rank:2")
    priced = planner().predict(Layout(2, compression=packed), Batching(1, 4))
    assert priced.strategy == planner().predict(Layout(2), Batching(1, 4)).strategy


def test_many_micro_batches_are_as_if_all_were_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    few = planner().predict(Layout(4), Batching(1, 64))
    monkeypatch.setattr("towpath.plan.pipelines._REPLAYED", (32, 64))
    all_of_them = planner().predict(Layout(4), Batching(1, 64))
    assert few.seconds == pytest.approx(all_of_them.seconds, rel=0.01)
    assert few.inter_bytes == all_of_them.inter_bytes
    assert sum(few.exposed.values()) == pytest.approx(sum(all_of_them.exposed.values()), rel=0.05)


def test_no_candidate_takes_less_than_its_bound() -> None:
    made = planner()
    # Each pair of values of stages, schedule and tensor-parallel ranks once.
    cases = ((2, "1F1B", 1), (2, "Interleaved1F1B", 2), (4, "1F1B", 2), (4, "Interleaved1F1B", 1))
    for layout, batching in made._candidates([Layout(n, schedule, tensor=t) for n, schedule, t in cases]):
        if batching.micro_batch == 4:
            assert made.predict(layout, batching).seconds >= 0.999 * made._bound(layout, batching)


def test_what_is_found_is_the_best_of_all() -> None:
    made = planner(batch=16)
    found = made.solve([Layout(2), Layout(4)], best=3)
    everything = [made.predict(*each) for each in made._candidates([Layout(2), Layout(4)])]
    assert [p.seconds for p in found] == sorted(p.seconds for p in everything)[:3]


def test_what_does_not_fit_is_left_out() -> None:
    made = planner(memory=0.02)
    assert all(p.peak_bytes <= 0.02 * GIB for p in made.solve([Layout(2)], best=100))
    assert not planner(memory=0.001).solve([Layout(2), Layout(4)])


@pytest.mark.parametrize("memory, faster", [seldom(26, 1.2), (14, 1.5), seldom(12, 3.0), seldom(10, 1.0)])
def test_free_extents_are_never_worse_than_the_named(memory: int, faster: float) -> None:
    """The less memory there is, the fewer of the named strategies fit that keep gathers inside nodes."""
    shape, _ = named_models()["gpt-2.5b"]
    request = Request(64, memory * GIB, checkpointing=True, micro_batches=(1,))
    made = Pipelines(lambda count: shape.staged("gpt", 512, count), CLUSTER, request)
    free = made.solve([Layout(2)], best=1)[0]
    names = ("ddp", "zero1", "zero2", "zero3", "zero3 route=flat", "mics")
    layouts = [Layout(2, strategy=name) for name in names]
    steps = [made.predict(layout, free.batching) for layout in layouts]
    named = min(step.seconds for step in steps if step.peak_bytes <= request.memory)
    assert named >= faster * free.seconds
    assert free.peak_bytes <= request.memory
    made.check(free.layout, free.batching)
    written = Strategy.from_toml(free.strategy.to_toml())
    assert made.predict(replace(free.layout, strategy=written), free.batching).seconds == free.seconds


def test_of_1f1b_a_rank_keeps_as_many_micro_batches_as_stages_follow() -> None:
    order = one_forward_one_backward(4, 16)
    assert [most_in_flight(order[rank]) for rank in range(4)] == [4, 3, 2, 1]
    assert [most_in_flight(passes) for passes in gpipe(4, 16).values()] == [16] * 4


def test_tensor_parallel_ranks_share_states_and_arithmetic_and_pay_for_their_sums() -> None:
    alone, shared = (planner().predict(Layout(2, tensor=n), Batching(4, 8)) for n in (1, 2))
    assert shared.memory["master"] == pytest.approx(alone.memory["master"] / 2, rel=0.05)
    assert alone.seconds / 2 < shared.seconds


def test_encoded_gradients_take_less_of_the_cable_where_it_is_narrow() -> None:
    slow = load_cluster("ethernet-1g", 4)
    request = Request(16, 20 * GIB, checkpointing=False)
    made = Pipelines(lambda count: SHAPE.staged("gpt", 128, count), slow, request)
    papers = Compression(Transport(codec="low-rank:16", feedback="first"))
    each = ("none", "optimus-cb", papers)
    plain, packed, propagated = (made.predict(Layout(4, compression=one), Batching(4, 4)) for one in each)
    assert packed.inter_bytes < plain.inter_bytes and packed.seconds < plain.seconds
    # Q of a message, in float32, and the error that is propagated.
    assert packed.memory["compression"] == 4 * 16 * 64
    assert propagated.memory["compression"] == 4 * (4 * 128 * 64 + 16 * 64)


# --- the command ------------------------------------------------------------------------------------------------------


def command(*options: str) -> Any:
    return CliRunner().invoke(app, ["plan", "gpt-2.5b", "--cluster", "ethernet-10g", *options])


def test_one_pipeline_is_simulated_and_traced_rank_by_rank(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    options = ("--batch", "32", "--micro-batch", "1", "--no-checkpointing")
    interleaved = (*options, "--pipeline", "4:Interleaved1F1B", "--strategy", "zero1")
    seen = command(*interleaved, "--allow", "optimus-cb", "--trace", str(trace))
    assert seen.exit_code == 0, seen.output
    *lines, _ = seen.output.splitlines()  # the last one names the file
    assert "idle ranks" in seen.output and "optimus-cb" in seen.output and all(len(line) <= 100 for line in lines)
    events = json.loads(trace.read_text())["traceEvents"]
    names = {each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert len(names) == 4 and all("8 stages on 4, Interleaved1F1B, zero1" in name for name in names)
    assert "from step 5" in command(*options, "--pipeline", "2", "--strategy", "qgz gradients_until=5").output


@pytest.mark.parametrize(
    "options, words",
    [
        (["--pipeline", "16", "--micro-batch", "8", "--strategy", "zero1"], "at least as many micro-batches as ranks"),
        (["--pipeline", "4", "--strategy", "mic"], "did you mean 'mics'"),
        (["--pipeline", "5"], "divisor of the cluster's 16"),
        (["--pipeline", "2", "--report", "page.html"], "leave out --pipeline, or --report"),
    ],
)
def test_what_cannot_be_is_said(options: list[str], words: str) -> None:
    seen = command("--batch", "64", *options)
    assert seen.exit_code != 0 and words in str(seen.exception or seen.output)


@pytest.mark.parametrize(("allowed", "told"), [("optimus-cb", "add --pipeline"), ("optimus-cd", "optimus-cc")])
def test_a_compression_that_is_not_used_or_unknown_is_refused(allowed: str, told: str) -> None:
    found = command("--batch", "32", "--allow", allowed)
    assert isinstance(found.exception, ConfigError) and told in str(found.exception)
