"""Planning outer steps: how often islands must synchronize, at which link rates it pays, and what users see of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest

import towpath
from tests.unit.test_plan_command import run
from tests.unit.test_planner import small_cluster
from towpath.core.strategy import Strategy, TransferKind
from towpath.errors import ConfigError
from towpath.outer import proposal
from towpath.outer.proposal import HIDDEN, OuterPlanner, saves_enough
from towpath.outer.settings import Outer, outer_transport
from towpath.plan import choice
from towpath.plan.catalog import load_cluster
from towpath.plan.hardware import OffloadMemory
from towpath.plan.model import Transformer
from towpath.plan.request import Batching, Prediction, Ranking, Request, Workload, codecs_for_both
from towpath.plan.solver import Solver
from towpath.topology.cluster import Topology
from towpath.train.config import Config

MODEL = Transformer(vocabulary=512, width=512, depth=4, heads=8, hidden=2048).model("small", 256)


def solver_at(gigabits: float, nodes: int = 2, memory: float = 8.0, allow: tuple[str, ...] = ()) -> Solver:
    weights, gradients = codecs_for_both(allow)
    cluster = small_cluster(nodes, 2, gigabits, memory)
    return Solver(MODEL, cluster, Request(32, cluster.memory, weights=weights, gradients=gradients))


def outer_step(solver: Solver) -> Prediction:
    step = OuterPlanner(solver).solve()
    assert step is not None
    return step


@cache
def step_at(gigabits: float) -> Prediction:
    return outer_step(solver_at(gigabits))


def exchanged(step: Prediction) -> float:
    return step.exposed[TransferKind.OUTER]


# --- how often --------------------------------------------------------------------------------------------------------


def test_the_shortest_period_that_hides_its_exchanges_is_planned() -> None:
    periods: list[int] = []
    for gigabits in (0.01, 0.3, 1.0, 3.0, 30.0):
        step = step_at(gigabits)
        assert step.strategy.outer is not None
        periods.append(step.strategy.outer.every)
        if step.strategy.outer.every < proposal.PERIODS[-1]:
            assert step.seconds <= HIDDEN * (step.seconds - exchanged(step))
    assert periods == sorted(periods, reverse=True)
    assert periods[0] == 512
    assert periods[-1] == 32


def test_a_delay_is_as_long_as_the_exchange_and_never_most_of_a_period() -> None:
    delays: list[int] = []
    for gigabits in (1.0, 3.0, 30.0):
        solver = solver_at(gigabits)
        step, planner = step_at(gigabits), OuterPlanner(solver)
        outer = step.strategy.outer
        assert outer is not None
        assert outer.delay <= outer.every / 4
        assert outer.blend == (0.5 if outer.delay else 0.0)
        delays.append(outer.delay)
        if outer.delay:
            alone = step.seconds - exchanged(step)
            assert step.seconds <= HIDDEN * alone, "the delay is long enough"
            shorter = planner._predicted(replace(outer, delay=0, blend=0.0), 2, step)  # pyright: ignore
            assert shorter.seconds > HIDDEN * alone, "and it is needed"
    assert any(delays)


def test_islands_are_as_small_as_the_memory_lets_them_be() -> None:
    """Also where a synchronous strategy still fits, islands may not: they keep a whole copy, and the slow weights."""
    model = Transformer(vocabulary=512, width=2048, depth=8, heads=8, hidden=8192).model("larger", 256)
    cluster = small_cluster(4, 2, 0.1)
    found: list[int] = []
    for memory in (24, 9, 8, 6):
        solver = Solver(model, cluster, Request(32, memory << 30))
        assert isinstance(solver.solve(best=1, most=4), Ranking)
        if (step := OuterPlanner(solver).solve()) is not None:
            assert step.peak_bytes <= memory << 30
            assert step.strategy.job == Topology(4, 2)
            found.append(step.strategy.islands)
    assert found == [4, 4, 2]


@pytest.mark.parametrize(("allow", "codec"), [((), "none"), (("int8",), "int8"), (("int8", "int4:64"), "int4:64")])
def test_exchanges_use_the_smallest_codec_that_is_allowed(allow: tuple[str, ...], codec: str) -> None:
    step = outer_step(solver_at(0.1, allow=allow))
    assert step.strategy.outer is not None
    transport = step.strategy.outer.transport
    assert str(transport.codec).startswith(codec)
    assert transport.feedback == ("none" if codec == "none" else "all")


def test_exchanges_leave_the_host_unless_the_link_is_fast() -> None:
    found = [step_at(gigabits) for gigabits in (1.0, 10.0, 11.0, 100.0)]
    assert [step.strategy.outer is not None and step.strategy.outer.nccl for step in found] == [
        False,
        False,
        True,
        True,
    ]
    slow, fast = found[0], found[-1]
    assert slow.host_memory["outer differences"] == fast.memory["outer differences"] == slow.memory["outer values"]
    assert fast.memory["communicators"] - slow.memory["communicators"] == 600_000_000  # NCCL's for exchanges
    assert "outer differences" not in slow.memory and "outer differences" not in fast.host_memory


@pytest.mark.parametrize("codec", ["none", "int4:64"])
def test_exchanges_from_the_host_are_priced_with_its_copies_and_its_codecs(codec: str) -> None:
    """So a slower host makes the mean step longer, and not one of NCCL."""
    cluster = small_cluster(2, 2, 100.0)
    hosts = [OffloadMemory(copies * 1e9, memory * 1e9) for copies, memory in ((20, 20), (1, 20), (20, 1))]
    for nccl in (False, True):
        seconds: list[float] = []
        for host in hosts:
            hardware = replace(cluster.hardware, host_memory=host)
            solver = Solver(MODEL, replace(cluster, hardware=hardware), Request(32, cluster.memory))
            outer = Outer(4, transport=outer_transport(codec), nccl=nccl)
            made = towpath.strategy("mics", cluster.topology, outer=outer)
            seconds.append(solver.predict(made, Batching(8, 1)).seconds)
        usual, slow_copies, slow_memory = seconds
        assert (slow_copies > 1.01 * usual and slow_memory > 1.01 * usual) is not nccl, seconds


def test_an_exchange_may_take_as_long_as_its_link_needs() -> None:
    def timeout(delay: int, codec: str = "none") -> float:
        made = towpath.strategy("mics", Topology(2, 2), outer=Outer(8, delay=delay, transport=outer_transport(codec)))
        plan = towpath.schedule(made, [1 << 30], 1).outer
        assert plan is not None
        return plan.timeout(timedelta(minutes=30)).total_seconds()

    # A node sends 4 GiB. At 10 Mbit/s, these are nearly an hour.
    sending = (4 << 30) / 1.25e6
    assert timeout(0) == pytest.approx(1800 + sending, abs=1)
    assert timeout(3) == pytest.approx(4 * 1800 + sending, abs=1)
    assert timeout(0, "int4:64") < 1800 + sending / 6


def test_the_slower_the_link_the_more_outer_steps_save() -> None:
    shares: list[float] = []
    for gigabits in (0.01, 1.0, 100.0):
        found, step = solver_at(gigabits).solve(best=1), step_at(gigabits)
        assert isinstance(found, Ranking)
        shares.append(found.ranked[0].seconds / step.seconds)
        assert saves_enough(step, found.ranked[0]) == (shares[-1] > 1.25)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 10 > 1.25 > shares[-1]


# --- commands, and "auto" ---------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    """`towpath plan` for a small model on two desktops."""
    (tmp_path / "small.toml").write_text("vocabulary = 512\nwidth = 1024\ndepth = 3\nheads = 8\nhidden = 4096\n")
    return ("plan", str(tmp_path / "small.toml"), "--cluster", "two-desktops", "--batch", "16", "--length", "256")


def test_the_command_ranks_outer_steps(command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    found = run(*command, "--allow", "outer", "-o", str(file))
    assert found.exit_code == 0, found.output
    assert all(len(line) <= 100 for line in found.stdout.splitlines() if "towpath train" not in line), found.stdout
    made = Strategy.from_toml(file.read_text())
    assert made.outer is not None
    assert Config.from_dict({"strategy": {"name": str(file)}}).strategy.build(Topology(2, 2)) == made


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--allow", "outer", "--pipeline", "2"), "--allow outer is planned without pipelines only"),
        (("--allow", "outer", "--memory", "2.8"), "no island of whole nodes can hold the model"),
        (("--allow", "outer", "--trace", "t.json"), "--trace shows one step, and outer steps are simulated over"),
    ],
)
def test_what_cannot_be_planned_says_why(command: tuple[str, ...], more: tuple[str, ...], message: str) -> None:
    assert message in str(run(*command, *more).exception)


@pytest.mark.parametrize("allowed", [False, True])
def test_auto_takes_outer_steps_only_where_they_are_allowed(allowed: bool) -> None:
    profile = type("Profile", (), {"cluster": lambda self: load_cluster("two-desktops")})()
    made = choice._planned(  # pyright: ignore
        profile, "as told", MODEL, Request(32, 0, outer=allowed), None
    )
    assert (made.strategy.outer is not None) is allowed
    assert ("which synchronizes in every step" in made.why) is allowed


def test_outer_is_no_codec() -> None:
    assert codecs_for_both(("outer", "int8")) == codecs_for_both(("int8",))
    Workload(64, allow=("outer",))
    auto = {"name": "auto", "allow": ["outer"]}
    assert Config.from_dict({"strategy": auto}).strategy.allow == ("outer",)
    with pytest.raises(ConfigError, match=r"0: auto chooses it, if strategy.allow has 'outer'"):
        Config.from_dict({"strategy": auto | {"outer": {"every": 32}}})
    with pytest.raises(ConfigError, match="needs a whole copy of the model in each island"):
        Config.from_dict({"strategy": auto, "parallel": {"pipeline": 2}})


def test_a_ranking_of_islands_needs_a_batch_that_they_share() -> None:
    solver = solver_at(1.0, nodes=3)
    assert isinstance(Solver(MODEL, solver.cluster, Request(30, solver.request.memory)).solve(best=1), Ranking)
    step = outer_step(Solver(MODEL, solver.cluster, Request(30, solver.request.memory)))
    assert step.strategy.islands == 3
    assert step.sequences(6) == 30
