"""The planner: models and clusters as numbers, and the best of all strategies."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.profiles import line, made_profile
from tests.ranks.strategies import seldom
from towpath.core.formats import Precision
from towpath.core.placement import legal_placements
from towpath.core.presets import strategy
from towpath.core.routes import Form
from towpath.core.schedule import schedule
from towpath.core.unit_plan import plan_unit
from towpath.errors import ConfigError
from towpath.plan.catalog import describe_model, from_table, load_cluster, named_models, shipped_clusters
from towpath.plan.hardware import Cluster
from towpath.plan.model import Transformer, activation_bytes, engine_bytes
from towpath.plan.profile import (
    SEVERAL,
    Point,
    Profile,
    collective_seconds,
    fitted,
    parse_collective_name,
)
from towpath.plan.request import BF16, Optimizer, Request
from towpath.plan.solver import Batching, Candidate, Infeasible, Prediction, Ranking, Solver
from towpath.topology.cluster import Topology

SMALL = Transformer(vocabulary=512, width=1024, depth=6, heads=8, hidden=4096)
ADAMW = Optimizer.named("adamw")


TABLE: dict[str, Any] = {
    "nodes": 2,
    "ranks_per_node": 2,
    "memory": 8,
    "compute": {"bfloat16": 50, "float32": 25, "reached": 0.5, "memory": 400},
    "intra": {"gigabytes": 20, "latency": 5, "message": 1},
    "inter": {"gigabits": 10, "latency": 30, "message": 2},
}


def small_cluster(nodes: int = 2, ranks: int = 2, inter: float = 10.0, memory: float = 8.0) -> Cluster:
    links = TABLE["inter"] | {"gigabits": inter}
    return from_table("small", TABLE | {"nodes": nodes, "ranks_per_node": ranks, "memory": memory, "inter": links})


def priced_of(found: Solver, candidate: Candidate) -> Prediction:
    return found.predict(found.candidates.strategy(candidate), candidate.batching)


def solver(cluster: Cluster, batch: int = 16, **options: Any) -> Solver:
    asked = Request(batch, cluster.memory, **options)
    return Solver(SMALL.model("small", 256), cluster, asked)


# --- models ----------------------------------------------------------------------------------------------------------


def test_every_name_gives_a_model_near_its_size() -> None:
    for name in named_models():
        size = float(re.findall(r"-([\d.]+)b", name)[0]) * 1e9
        assert describe_model(name).parameters == pytest.approx(size, rel=0.25), name


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("llama-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-405b", 405_853_388_800),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-32b", 32_762_123_264),
        ("mistral-7b-v0.3", 7_248_023_552),
    ],
)
def test_published_models_have_the_parameters_that_were_published(name: str, parameters: int) -> None:
    assert name in named_models()
    assert describe_model(name).parameters == parameters


@pytest.mark.parametrize(
    "spelling, name",
    [
        ("llama3-8b", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-3-70b"),
        ("llama_3.2_1b", "llama-3.2-1b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
    ],
)
def test_a_name_may_be_spelled_in_several_ways(spelling: str, name: str) -> None:
    assert describe_model(spelling).name == name


@pytest.mark.parametrize(
    "name, family",
    [
        ("mixtral-8x7b", "Mixtral"),
        ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("meta-llama/Llama-4-Scout-17B-16E", "Llama 4"),
    ],
)
def test_a_mixture_of_experts_is_refused_by_name(name: str, family: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(name)}.*{family} is a mixture of experts"):
        describe_model(name)


@pytest.mark.parametrize(
    "name, told",
    [
        ("llama-3.1-9b", "Did you mean 'llama-3.1-8b'"),
        ("./models/mine", "there is no such file or folder"),
        ("missing/config.json", "there is no file missing/config.json"),
        ("mine.toml", "there is no file mine.toml"),
    ],
)
def test_what_is_no_model_is_told_with_the_nearest_name_or_the_missing_file(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        describe_model(name)


def config(folder: Path, kind: str, **values: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": kind, **values}))
    return file


LLAMA = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
GPT2 = {"vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}


QWEN3 = LLAMA | {"head_dim": 32, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    "kind, values", [("llama", LLAMA), ("gpt2", GPT2), ("qwen3", QWEN3), ("mistral", LLAMA | {"head_dim": 16})]
)
def test_a_configuration_has_the_parameters_of_the_model_it_makes(
    kind: str, values: dict[str, object], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    file = config(tmp_path, kind, **values)
    with torch.device("meta"):
        live = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file))

    found = describe_model(file)

    assert found.parameters == sum(p.numel() for p in live.parameters())
    assert found.length == 128


def test_a_file_of_ones_own_may_say_what_the_model_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("length = 256\nvocabulary = 512\nwidth = 1024\ndepth = 6\nheads = 8\nhidden = 4096\n")

    assert describe_model(file) == SMALL.model("mine", 256)
    assert describe_model(file, length=512).length == 512


@pytest.mark.parametrize(
    "text, told",
    [
        ("width = 64", "vocabulary is missing"),
        ("vocabulary = 1\nwidth = 64\ndepth = 2\nheads = 3\nhidden = 1\nlength = 1", "a multiple of heads = 3"),
        ("vocabulary = 1\nwidth = 64\ndepth = 2\nheads = 2\nhidden = 1", "how long its sequences are"),
        ("wide = 64", "unknown key 'wide'"),
        ("width =", "cannot read"),
    ],
)
def test_what_is_wrong_with_a_model_file_is_said(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        describe_model(file)


# --- clusters --------------------------------------------------------------------------------------------------------


def test_every_shipped_cluster_loads() -> None:
    assert len(shipped_clusters()) >= 12
    for name in shipped_clusters():
        assert load_cluster(name).peak_of("bfloat16") > 1e13, name
    assert load_cluster("p4d", nodes=3).topology == Topology(3, 8)
    assert load_cluster("ethernet-10g", 2, ranks_per_node=8).topology == Topology(2, 8)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"nodes": 0}, "nodes: got 0; expected a whole number"),
        ({"memory": "80 GB"}, "memory: got '80 GB'; expected a number above 0"),
        ({"inter": {"gigabits": 10, "message": 2}}, r"inter\.latency: it is missing"),
        ({"inter": 10}, r"expected a section \[inter\]"),
        ({"compute": {"reached": 0.5, "memory": 1}}, "TFLOP/s of one dtype"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"codecs": {"int8": 5}}, r"codecs\.int8: got 5; expected \[encode, decode\]"),
        ({"racks": {"nodes": 2}}, r"racks\.gigabits"),
    ],
)
def test_what_is_wrong_with_a_cluster_is_said_with_key_value_and_form(change: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        from_table("mine", TABLE | change)


def test_of_steps_that_take_as_long_the_one_with_less_memory_comes_first() -> None:
    cluster = small_cluster()
    found = Solver(SMALL.model("small", 256), cluster, Request(8, cluster.memory)).predict(
        strategy("zero3", cluster.topology), Batching(1, 1)
    )
    held = {"all": found.peak_bytes - 1}
    assert replace(found, seconds=1.0001 * found.seconds, memory=held).order < found.order
    assert replace(found, seconds=1.02 * found.seconds, memory=held).order > found.order


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["ddp", "zero1", "zero3", "mics", "paro-iig", "hpz", "zero++"])
def test_states_and_buffers_are_the_schedules(label: str) -> None:
    cluster, model = small_cluster(), SMALL.model("small", 256)
    precision = Precision("bfloat16", "bfloat16")
    made = strategy(label, cluster.topology)
    plans = [plan_unit(made, unit.spec, precision) for unit in model.units]

    found = engine_bytes(plans, ADAMW)

    planned = schedule(made, tuple(u.spec for u in model.units), 1, precision)
    assert {k: found[k] for k in planned.memory_bytes()} == planned.memory_bytes()
    assert {k: found[k] for k in planned.buffer_bytes()} == planned.buffer_bytes()
    assert found["optimizer"] == 2 * found["master"]


def test_checkpointing_keeps_less_and_more_tokens_keep_more() -> None:
    model, precision = SMALL.model("small", 256), Precision("bfloat16", "bfloat16")

    def kept(tokens: int, checkpointing: bool) -> int:
        return activation_bytes(model, precision, tokens, checkpointing)

    root, block, *_ = model.units
    assert kept(256, True) < 0.5 * kept(256, False)
    assert kept(256, True) >= 256 * 2 * (root.kept + block.kept)  # the block that is recomputed is there whole
    assert kept(1024, False) == pytest.approx(4 * kept(256, False), rel=1e-6)


def test_a_recomputed_block_is_there_after_the_end_of_the_root_is_released() -> None:
    """The loss of many words and the block are never in memory together."""
    small, large = (Transformer(words, 64, 4, 4, 4096, gated=True).model("", 64) for words in (64, 640))
    found = [activation_bytes(model, Precision(), 64, True) for model in (small, large)]
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_configuration_of_experts_is_refused(kind: str, tmp_path: Path) -> None:
    key = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}[kind]
    with pytest.raises(ConfigError, match=f"{key} = 8: it is a mixture of experts"):
        describe_model(config(tmp_path, kind, **LLAMA, **{key: 8}))


# --- the search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inter, precision", [(1.0, BF16), seldom(100.0, BF16), seldom(1.0, Precision())], ids=str)
def test_no_candidate_takes_less_than_its_bound(inter: float, precision: Precision) -> None:
    codecs: dict[str, Any] = {"weights": ("int8",), "gradients": ("int4",)}
    found = solver(small_cluster(2, 4, inter), batch=32, precision=precision, **codecs)
    for candidate in list(found.candidates)[::13]:
        priced = priced_of(found, candidate)
        assert found.bound(candidate)[0] <= priced.seconds * (1 + 1e-9), candidate
        assert found.peak_bytes(candidate) == priced.peak_bytes, candidate


@pytest.mark.parametrize("inter", [1.0, *map(seldom, (25.0, 400.0))])
def test_the_first_is_the_best_of_all(inter: float) -> None:
    found = solver(small_cluster(inter=inter), batch=8)
    priced = [priced_of(found, candidate) for candidate in found.candidates]
    best = min(p.seconds for p in priced if p.peak_bytes <= found.request.memory)

    answer = found.solve(best=3, most=10_000)

    assert isinstance(answer, Ranking) and answer.proven
    assert answer.ranked[0].seconds == best
    assert [p.seconds for p in answer.ranked] == sorted(p.seconds for p in answer.ranked)


def test_a_limited_search_tries_every_kind_of_batching() -> None:
    """The lowest bounds are those of larger micro-batches without checkpointing, which cannot hide their transfers."""
    cluster = load_cluster("ethernet-10g", 2, ranks_per_node=8)
    solver = Solver(describe_model("gpt-2.5b", 1024), cluster, Request(128, cluster.memory, BF16))
    recomputed = solver.predict(strategy("mics", cluster.topology), Batching(8, 1, checkpointing=True))

    answer = solver.solve(best=1, most=30)

    assert isinstance(answer, Ranking) and answer.ranked[0].seconds <= recomputed.seconds
    assert answer.open_bound is not None and answer.open_bound < answer.ranked[0].seconds


def test_codecs_are_used_only_where_they_are_allowed() -> None:
    cluster = small_cluster(inter=0.5)
    answers = [
        solver(cluster).solve(best=1, most=60),
        solver(cluster, weights=("int8",), gradients=("int4",)).solve(best=1, most=60),
    ]
    lossless, lossy = (answer.ranked[0] for answer in answers if isinstance(answer, Ranking))

    assert not lossless.strategy.codecs(trainable=True)
    assert lossy.strategy.codecs(trainable=True)
    assert lossy.seconds < lossless.seconds


def test_an_interleaved_step_is_the_mean_of_both_halves() -> None:
    cluster = small_cluster(2, 4, 1.0)
    always = solver(cluster, weights=("int8",), gradients=("int4",))
    found = solver(cluster, weights=("int8",), gradients=("int4",), interleaved=10)
    for candidate in list(found.candidates)[::97]:
        strategy, batching = found.candidates.strategy(candidate), candidate.batching
        halves = [always.predict(strategy.at(step), batching) for step in (0, 9)]
        priced = found.predict(strategy, batching)
        assert (halves[0].strategy == halves[1].strategy) == (candidate.gradients == "none")
        assert priced.seconds == pytest.approx((halves[0].seconds + halves[1].seconds) / 2)
        assert priced.peak_bytes == max(half.peak_bytes for half in halves)
        plain = always.candidates.strategy(replace(candidate, gradients="none"))
        assert strategy.at(9).reduce.route == plain.reduce.route
        assert strategy.at(9).grad_sync.route == plain.grad_sync.route
        assert found.bound(candidate)[0] <= priced.seconds * (1 + 1e-9)


def test_where_nothing_fits_it_says_by_how_much() -> None:
    answer = solver(small_cluster(memory=0.05)).solve()

    assert isinstance(answer, Infeasible)
    assert answer.missing_bytes == answer.nearest.peak_bytes - int(0.05 * (1 << 30)) > 0


@pytest.mark.parametrize("label", ["zero3", "paro-iig", "mics", "zero++"])
@pytest.mark.parametrize("micro_steps", [1, 3, 7])
def test_bytes_are_the_schedules_of_many_micro_steps_too(label: str, micro_steps: int) -> None:
    found = solver(small_cluster())
    made = strategy(label, found.cluster.topology)

    priced = found.predict(made, Batching(1, micro_steps))

    units, precision = tuple(u.spec for u in found.model.units), found.request.precision
    expected = schedule(made, units, micro_steps, precision, form=Form.COLLECTIVES)  # its ranks have devices
    assert (priced.inter_bytes, priced.intra_bytes) == (expected.inter_bytes, expected.intra_bytes)


def test_a_batch_that_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch = 6 .* 4 ranks"):
        solver(small_cluster(), batch=6).solve()
    with pytest.raises(ConfigError, match="micro-batch 3"):
        solver(small_cluster(), batch=16, micro_batches=(3,)).solve()


def test_micro_batches_are_all_divisors_however_large_the_batch_is() -> None:
    found = Request(4 * 10**12, 1 << 30, checkpointing=False).batchings(4)
    assert [each.micro_batch * each.micro_steps for each in found] == [10**12] * 169  # 10^12 has 13 x 13 divisors
    found = Request(48, 1, checkpointing=False).batchings(4)
    assert [each.micro_batch for each in found] == [1, 2, 3, 4, 6, 12]


def test_legal_placements_are_those_that_pass_the_checks() -> None:
    cluster = small_cluster(4, 2)
    found = legal_placements(cluster.topology, copies=True)
    assert len(found) == len(set(found))
    for placement in found:
        placement.check(cluster.topology)


# --- profiles --------------------------------------------------------------------------------------------------------


def test_a_fit_finds_latency_and_rate() -> None:
    exact = fitted(line(2e-3, 1e6, 100, 10_000, 1_000_000))

    assert (exact.latency, exact.rate) == pytest.approx((2e-3, 1e6))


def test_dtypes_that_no_probe_measures_are_estimated_from_those_it_does() -> None:
    made = made_profile()
    half = Point("matmul bfloat16", 100, (1e-5,))
    cluster = replace(made, points=(*made.points, half)).cluster()
    assert cluster.flops_of("float64") == cluster.flops_of("float32") / 2
    assert cluster.flops_of("float16") == cluster.flops_of("bfloat16") == 2 * cluster.flops_of("float32")


def test_what_a_collective_takes_follows_from_the_messages() -> None:
    """Over two nodes of two the cables carry half of the region each way; in nodes nothing crosses."""
    cable = 2e7
    made = made_profile(cable=cable)
    hardware = made.cluster(measured_collectives=False).hardware
    foretold = {
        str(parse_collective_name(point.what)[1]): collective_seconds(point, hardware) for point in made.collectives()
    }

    # Latencies come on top: a tenth of a millisecond a message.
    assert foretold["2 × 2"] == pytest.approx((1 << 19) / cable, rel=0.1)
    assert foretold["2 × 1"] == pytest.approx((1 << 20) / cable, rel=0.1)
    assert foretold["1 × 2"] < 0.2 * foretold["2 × 2"]


def test_what_messages_take_of_the_processor_is_told_by_message() -> None:
    made = made_profile()
    several = next(p for p in made.points if p.what == "inter, several")
    points = [p for p in made.points if p is not several]
    points.append(replace(several, busy=SEVERAL * 2 * 3e-5))

    hardware = replace(made, points=tuple(points)).cluster().hardware

    assert hardware.inter.message_work == pytest.approx(3e-5)  # two ranks of the host sent nine each


def test_a_profile_is_a_cluster() -> None:
    """The cable's rate is that of all its ranks together; a slow repetition does not count."""
    found = made_profile().cluster()

    hardware = found.hardware
    assert found.name == "here, probed on 2026-01-01 00:00"  # every table says how old it is
    assert (hardware.inter.rate, hardware.inter.latency) == pytest.approx((2e7, 1e-4))
    assert (hardware.inter.message, hardware.inter.work) == pytest.approx((1e-5, 1e-9))
    assert (hardware.intra.rate, hardware.intra.work) == pytest.approx((5e8, 5e-10))
    assert hardware.cores == pytest.approx(2.0) and hardware.ranks_sharing == 4
    single = 2 * 100**3 / 2e-5
    assert dict(found.peak) == pytest.approx({"float64": single / 2, "float16": single, "float32": single})
    speed = hardware.codec_speed("int8")
    assert speed is not None and (speed.encode, speed.decode) == pytest.approx((1e9, 2e9))


def test_a_profile_is_read_as_it_was_written_and_planned_with(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(made_profile().to_json())

    assert Profile.load(file) == made_profile()
    asked = Request(8, 4 << 30, Precision())
    answer = Solver(SMALL.model("small", 64), load_cluster(file), asked).solve(best=1, most=50)
    assert isinstance(answer, Ranking)


@pytest.mark.parametrize(
    "change, told",
    [({"version": 7}, "version 7; this Towpath reads 2"), ({"points": 3}, "cannot be"), ({"more": 1}, "cannot be")],
)
def test_a_file_that_is_no_profile_is_refused(change: dict[str, object], told: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(json.loads(made_profile().to_json()) | change))
    with pytest.raises(ConfigError, match=told):
        Profile.load(file)


def test_a_profile_of_another_number_of_nodes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(made_profile().to_json())
    own = made_profile().topology
    with pytest.raises(ConfigError, match=f"expected its own nodes × ranks, {own}; got 4 × {own.ranks_per_node}"):
        load_cluster(file, nodes=4)
    with pytest.raises(ConfigError, match=f"got {own.nodes} × 7"):
        load_cluster(file, ranks_per_node=7)
