"""strategy="auto": all ranks get what the planner ranks first, or all the same error.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import towpath
from tests.profiles import made_profile
from tests.ranks.models import TiedGPT
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn, seldom
from towpath.core.routes import Form
from towpath.engine.executor import engine_of
from towpath.engine.layout import lay_out
from towpath.errors import ConfigError, MismatchError, PlanError, ShardError, TowpathError
from towpath.plan import choice as auto
from towpath.plan.cluster_probe import planned_collectives
from towpath.plan.live import describe_by_parameters
from towpath.plan.model import Transformer
from towpath.plan.pipelines import Layout, Pipelines
from towpath.plan.profile import Profile, parse_collective_name
from towpath.plan.request import Optimizer, Request
from towpath.plan.solver import Ranking, Solver
from towpath.topology.groups import Groups
from towpath.train.config import Config
from towpath.train.data import prepare
from towpath.train.job import init_distributed
from towpath.train.trainer import TrainingRun

SHAPE = towpath.Topology(2, 2)
TOKENS = 64


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(made_profile(os.uname().nodename).to_json())
    return path


def _sharded(workload: towpath.Workload | None, dtype: torch.dtype = torch.float32) -> Any:
    """The strategy that it got, what it said, and whether it trains; or the error."""
    model, out = TiedGPT(layers=3).to(dtype), io.StringIO()
    try:
        with contextlib.redirect_stderr(out):
            model = towpath.shard(model, "auto", topology=SHAPE, workload=workload)
    except TowpathError as error:
        return error
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    return engine_of(model).strategy, out.getvalue(), all(p.grad is not None for p in model.parameters())


def test_all_ranks_get_what_the_planner_ranks_first(world: Worlds, profile: Path) -> None:
    options = {"offload": "optimizer", "exact": True}
    workload = towpath.Workload(TOKENS, micro_steps=3, optimizer="sgd", memory=1 << 30, profile=profile, **options)

    answers = world(4).run(_sharded, workload)

    assert [answer[0] for answer in answers] == world(4).run(_ranked_first, options)
    assert all(trains for *_, trains in answers)
    assert answers[0][1].count("\n") == 1 and "zero3 would take" in answers[0][1]
    assert all(told == "" for _, told, _ in answers[1:])


def test_islands_are_chosen_where_they_are_allowed(world: Worlds, profile: Path) -> None:
    profile.write_text(made_profile(os.uname().nodename, cable=1e5).to_json())
    for allow in ((), ("outer",)):
        workload = towpath.Workload(TOKENS, memory=1 << 30, profile=profile, allow=allow)
        answers = world(4).run(_sharded, workload)
        assert all(answer[0] == answers[0][0] and answer[2] for answer in answers)
        assert answers[0][0].islands == (2 if allow else 1)
        assert ("which synchronizes in every step" in answers[0][1]) is bool(allow)


def _ranked_first(options: dict[str, Any]) -> towpath.Strategy:
    sgd = Optimizer.named("sgd")
    request = Request(12, 1 << 30, towpath.Precision(), optimizer=sgd, micro_batches=(1,), **options)
    model = TiedGPT(layers=3)
    described = describe_by_parameters(model, lay_out(model), TOKENS)
    expected = Solver(described, made_profile().cluster(), request).solve(best=1)
    assert isinstance(expected, Ranking)
    return expected.ranked[0].strategy


@pytest.mark.parametrize("dtype", [torch.float64, seldom(torch.float16)], ids=str)
def test_models_of_dtypes_that_no_probe_measures_are_planned(world: Worlds, profile: Path, dtype: torch.dtype) -> None:
    answers = world(4).run(_sharded, towpath.Workload(TOKENS, memory=1 << 30, profile=profile), dtype)
    assert all(answer[0] == answers[0][0] and answer[2] for answer in answers)


@pytest.mark.parametrize(
    "change, kind, words",
    [
        (None, ShardError, "pass workload=towpath.Workload"),
        ({"memory": 1000}, PlanError, "nothing fits into"),
        ({"profile": "nowhere.json"}, ConfigError, "nowhere.json: cannot be read"),
        ({"profile": "elsewhere"}, PlanError, "host of rank 0 elsewhere, here"),
    ],
    ids=["no workload", "no memory", "no profile", "another host's profile"],
)
def test_what_cannot_be_planned_is_the_same_error_on_every_rank(
    world: Worlds, profile: Path, change: dict[str, Any] | None, kind: type[Exception], words: str
) -> None:
    if change == {"profile": "elsewhere"}:
        profile.write_text(made_profile("elsewhere").to_json())
        change = {}
    workload = None if change is None else towpath.Workload(TOKENS, **({"profile": profile} | change))
    answers = world(4).run(_sharded, workload)
    assert all(type(answer) is kind and words in str(answer) for answer in answers)


@on_ranks(4)
def test_what_ranks_ask_for_has_to_be_the_same_and_to_go_with_a_strategy(profile: Path) -> None:
    told = _sharded(towpath.Workload(TOKENS + (dist.get_rank() == 2), profile=profile))
    assert type(told) is MismatchError and "tokens=65" in str(told)
    with pytest.raises(ShardError, match="leave it out"):
        towpath.shard(TiedGPT(), "zero3", topology=SHAPE, workload=towpath.Workload(TOKENS))


def test_where_planning_itself_fails_every_rank_is_told(world: Worlds, profile: Path) -> None:
    answers = world(4).run(_sharded_by_a_broken_planner, profile)
    words = "ValueError: a bug"
    assert all(type(answer) is PlanError and words in str(answer) for answer in answers)


def _sharded_by_a_broken_planner(profile: Path) -> Any:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("a bug")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Solver, "solve", broken)
        return _sharded(towpath.Workload(TOKENS, profile=profile))


def test_one_rank_has_nothing_to_share(world: Worlds) -> None:
    assert world(1).run(_named_alone) == ["ddp"]


def _named_alone() -> str:
    model: Any = towpath.shard(TiedGPT(), "auto", workload=towpath.Workload(TOKENS))
    return engine_of(model).strategy.name


# --- layouts ---------------------------------------------------------------------------------------------------------


# --- agreement -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault, words", [("grad", "has a gradient"), ("check_every", "every 7 steps")])
def test_one_rank_at_fault_is_told_on_all_and_changes_nothing(
    world: Worlds, profile: Path, fault: str, words: str
) -> None:
    answers = world(4).run(_sharded_with_a_fault_on_rank_2, fault, profile)
    assert all(words in told and not changed for told, changed in answers)


def _sharded_with_a_fault_on_rank_2(fault: str, profile: Path) -> tuple[str, bool]:
    """Return the error, and whether the model was changed."""
    model, at_fault = TiedGPT(layers=3), dist.get_rank() == 2
    before = dict(model.named_parameters())
    if fault == "grad" and at_fault:
        before["tokens.weight"].grad = torch.zeros_like(before["tokens.weight"])
    workload = towpath.Workload(TOKENS, memory=1 << 30, profile=profile)
    every = 7 if fault == "check_every" and at_fault else 5
    with pytest.raises(TowpathError) as caught, contextlib.redirect_stderr(io.StringIO()):
        towpath.shard(model, "auto", topology=SHAPE, workload=workload, check_every=every)
    after = dict(model.named_parameters())
    kept = type(model) is TiedGPT and all(after[name] is before[name] for name in before)
    return str(caught.value), not kept or not all(type(p) is nn.Parameter for p in after.values())


# --- the profile that is kept ----------------------------------------------------------------------------------------


def test_a_cluster_is_measured_once_and_again_when_its_links_have_changed(world: Worlds, tmp_path: Path) -> None:
    """What is kept is used as long as a message takes what it says; a file that cannot be read is measured anew."""
    answers = world(4).run(_sharded_thrice, tmp_path)

    assert all(answer == answers[0] for answer in answers)
    assert answers[0] == ["probed", "kept", "probed", "probed"]


def _sharded_thrice(cache: Path) -> list[str]:
    seen: list[str] = []
    truth = made_profile(os.uname().nodename)

    def probe(topology: towpath.Topology, seconds: float, **others: object) -> Profile:
        seen.append("probed")
        return truth

    def holds(profile: Profile, groups: Any) -> bool:
        if same := profile == truth:
            seen.append("kept")
        return same

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(auto, "probe", probe)
        patch.setattr(auto, "still_holds", holds)
        for text in (None, None, made_profile(os.uname().nodename, cable=1e9).to_json(), "{"):
            if text is not None and dist.get_rank() == 0:
                next(cache.rglob("*.json")).write_text(text)
            answer = _sharded(towpath.Workload(TOKENS, memory=1 << 30))
            assert not isinstance(answer, Exception), answer
    return seen


def test_one_message_tells_whether_a_profile_still_holds(world: Worlds) -> None:
    """A loopback is not a cable that would carry four bytes in a month."""
    assert world(4).run(_still_holds) == [(True, False)] * 4


def _still_holds() -> tuple[bool, bool]:
    from towpath.plan import cluster_probe
    from towpath.topology.groups import Groups

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_probe, "_MOST_CHANGED", 1e6)  # two ranks on each core: anything may come in between
        found = made_profile(os.uname().nodename)
        slow = made_profile(os.uname().nodename, cable=1e-6)
        return cluster_probe.still_holds(found, Groups()), cluster_probe.still_holds(slow, Groups())


def test_a_probe_measures_all_collectives_over_every_mesh(world: Worlds) -> None:
    topology = towpath.Topology(2, 2)
    found = world(4).run(_measured_collectives, topology)
    planned = {(op.value, mesh, route) for op, mesh, route in planned_collectives(topology, Form.MESSAGES)}
    assert found == [found[0]] * 4
    assert {parse_collective_name(what) for what in found[0]} == planned


def _measured_collectives(topology: towpath.Topology) -> list[str]:
    from towpath.plan import cluster_probe
    from towpath.topology.groups import Groups

    groups = Groups()
    prober = cluster_probe._Prober(groups, topology, 0.0)
    prober._collectives(0.0)
    assert "probe" not in groups.describe_made()  # communicators hold memory
    return [point.what for point in prober._points]


# --- in a training ---------------------------------------------------------------------------------------------------


def _options(folder: Path, profile: Path, *more: str) -> tuple[str, ...]:
    text = folder / "corpus.txt"
    text.write_text("lock barge weir horse canal " * 400)
    tokens = folder / "tokens"
    prepare([str(text)], tokens)
    return (
        *("model.width=32", "model.depth=4", "model.heads=2", "train.batch=8", "train.micro_batch=1"),
        *("train.length=32", "train.steps=2", "train.threads=1", f"data.tokens={tokens}", "strategy.nodes=2x2"),
        *("strategy.name=auto", f"strategy.profile={profile}", f"log.folder={folder}"),
        *more,
    )


NARROW, WIDE = 2e5, 2e12
# Bytes a second of a node, what is asked for, and the pipeline and the tensor-parallel ranks that come out.
LAYOUTS = {
    "as laid out": (WIDE, ["parallel.pipeline=4", "model.width=64", "parallel.compression=optimus-cb+fe"], 4, 1),
    "as shared": (WIDE, ["parallel.tensor=2", "model.depth=2", "train.batch=4"], 1, 2),
}


@in_turn(list(LAYOUTS), 1, "case")
def test_a_training_is_laid_out_as_the_planner_ranks_first(
    world: Worlds, profile: Path, tmp_path: Path, case: str
) -> None:
    cable, asked, pipeline, tensor = LAYOUTS[case]
    profile.write_text(made_profile(os.uname().nodename, cable).to_json())
    (planned, said, *first), *others = world(4).run(_laid_out, _options(tmp_path, profile, *asked))
    assert all(found == first for _, _, *found in others)
    assert "auto: " in said and "a step as planned" in said
    parallel, topology, sent = first
    assert (parallel.pipeline, parallel.tensor) == (pipeline, tensor)
    assert topology.world == 4 // pipeline // tensor
    if pipeline > 1 and tensor == 1:
        assert sent == planned


def _laid_out(options: tuple[str, ...]) -> Any:
    """What was planned of the bytes of a step, on rank 0; the layout, the topology of a stage, and what is sent."""
    from towpath.plan.pipelines import Pipelines

    planned: list[Any] = []
    solve = Pipelines.solve

    def noted(*args: Any, **options: Any) -> Any:
        planned.extend(found := solve(*args, **options))
        return found

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(io.StringIO()) as said,
        init_distributed() as job,
    ):
        patch.setattr(Pipelines, "solve", noted)
        training = TrainingRun(Config.load(os.devnull, options), job)
        training.train_step()
        sent = None
        if training.pipelined:
            schedule = training.model.schedule(towpath.Topology(2, 2))
            sent = (schedule.inter_bytes, schedule.intra_bytes)
    bytes_planned = (planned[0].inter_bytes, planned[0].intra_bytes) if planned else None
    return bytes_planned, said.getvalue(), training.config.parallel, training.strategy.topology, sent


def test_configured_stages_are_planned_or_do_not_fit() -> None:
    shape, profile = Transformer(256, 64, 4, 4, 256), made_profile()
    request = Request(8, 1 << 30, towpath.Precision())
    pipelines = Pipelines(lambda count: shape.staged("gpt", TOKENS, count), profile.cluster(), request)

    def chosen(layouts: list[Layout]) -> auto.Choice:
        model = shape.model("gpt", TOKENS)
        best = next(iter(pipelines.solve(layouts, best=1)), None)
        return auto._planned(profile, "as made up", model, request, lambda *_: best)

    found = chosen([Layout(2)])
    assert found.strategy.topology.world == 2 and "the layout is as configured" in found.why
    with pytest.raises(TowpathError, match="no stages fit into"):
        chosen([])


@on_ranks(2)
def test_several_process_groups_of_a_purpose_are_closed() -> None:
    """A probe over NCCL measures several, one after the other."""
    groups = Groups()
    for partition in (((0, 1),), ((0,), (1,))):
        groups.of(partition, "several", "gloo")
    groups.close("several")
    assert not groups.has(((0, 1),), "several")
