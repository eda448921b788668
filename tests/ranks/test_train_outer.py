"""`towpath train` with [strategy.outer]: islands that train apart, what they agree on, and how they stop and go on.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import towpath
from tests.ranks.server import Worlds
from tests.ranks.strategies import seldom
from tests.ranks.test_train import TINY, _failed, _steps, _weights, rows_of, tokens
from towpath.checkpoint import folders
from towpath.errors import ConfigError
from towpath.train import checkpoints
from towpath.train.config import Config
from towpath.train.job import SIGNALS, StopRequest, init_distributed
from towpath.train.trainer import TrainingRun

__all__ = ["tokens"]  # a fixture

STREAMING = {"every": 3, "fragments": 2, "delay": 1}


@pytest.fixture
def config(tokens: Path, tmp_path: Path) -> Callable[..., Config]:
    """`config({"every": 3}, train={"steps": 6})`: the tiny one of test_train.py, with these outer steps."""

    def of(outer: dict[str, Any], **sections: dict[str, Any]) -> Config:
        table = {"data": {"tokens": str(tokens)}, "log": {"folder": str(tmp_path / "run")}} | TINY
        table["checkpoint"] = {"resume": "off"}
        made = {name: table.get(name, {}) | sections.get(name, {}) for name in table.keys() | sections.keys()}
        return Config.from_dict(made | {"strategy": made["strategy"] | {"outer": outer}})

    return of


def test_one_island_whose_slow_weights_are_its_own_trains_as_without(
    world: Worlds, config: Callable[..., Config], tmp_path: Path
) -> None:
    """Said by a strategy's file, which has what [strategy.outer] has not."""
    file = tmp_path / "strategy.toml"
    outer = towpath.Outer(every=2, islands=1, lr=1.0, momentum=0.0)
    file.write_text(towpath.strategy("zero3", towpath.Topology(2, 2), outer=outer).to_toml())
    plain = world(4).run(_steps, config({}))
    for found, expected in zip(world(4).run(_steps, config({}, strategy={"name": str(file)})), plain, strict=True):
        assert found[0] == pytest.approx(expected[0], abs=2e-5)
        assert found[1] == pytest.approx(expected[1], abs=2e-5)


@pytest.mark.parametrize("codec", [seldom(""), "int4"])
def test_islands_train_apart_and_end_with_the_same_weights(
    world: Worlds, config: Callable[..., Config], codec: str
) -> None:
    mine = config(STREAMING | {"codec": codec}, train={"steps": 7, "evaluate_every": 3})
    first, *others = world(4).run(_train_to_the_end, mine)
    assert all(other[1] == first[1] for other in others)
    assert first[0][0] == others[0][0][0] != others[1][0][0] == others[2][0][0], "a step's loss is that of an island"
    assert "2 islands, synchronized every 3 steps in 2 fragments" in first[2]
    rows = rows_of(mine)
    assert [row["loss"] for row in rows] == first[0]
    # The loss of all islands is known one step later.
    means = [(a + b) / 2 for a, b in zip(first[0], others[-1][0], strict=True)]
    assert [row["loss_of_islands"] for row in rows[1:]] == pytest.approx(means[:-1])
    assert [row["step"] for row in rows_of(mine, "validation")] == [3, 6, 7]
    # Nothing but exchanges crosses: one begins after steps 1, 3, 4 and 6. It is counted in the next step, or in the one
    # after, which waits for it.
    sent = [row["inter_bytes"] for row in rows]
    planned = world(4).run(_planned, mine)[0]
    assert sent[0] == 0 < sum(sent[1:3]) < sum(sent[3:6]) == planned, (sent, planned)


def _planned(config: Config) -> int:
    """The bytes that all ranks together send between islands in a period."""
    with init_distributed() as job, contextlib.redirect_stderr(io.StringIO()):
        training = TrainingRun(config, job)
        outer = towpath.schedule(training.strategy, training.model).outer
        assert outer is not None
        return outer.inter_bytes


def _train_to_the_end(config: Config) -> tuple[list[float], dict[str, bytes], str]:
    """The losses of the steps on this rank, its weights after the last one, and what it said."""
    err, losses = io.StringIO(), list[float]()
    with init_distributed() as job, contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        training = TrainingRun(config, job)
        step = training.train_step

        def train_step() -> Any:
            found = step()
            losses.append(found.loss)
            return found

        training.train_step = train_step  # type: ignore[method-assign]
        assert training.train() == 0
        return losses, {name: each.numpy().tobytes() for name, each in _weights(training).items()}, err.getvalue()


def test_a_save_by_the_clock_is_made_once(world: Worlds, config: Callable[..., Config]) -> None:
    """Flags of islands arrive late, so one that was set before a save may arrive after it."""
    mine = config({"every": 3}, train={"steps": 8}, checkpoint={"every": 0, "keep": 0, "resume": "off"})
    assert world(4).run(_saved_by_the_clock, mine) == [[3, 6, 8]] * 4  # the last state is always saved


def _saved_by_the_clock(config: Config) -> list[int]:
    with mock.patch.object(checkpoints, "_SECONDS_BETWEEN", 0.0):
        _train_to_the_end(config)
    return sorted(folders.step_of(path) for path in folders.checkpoints(Path(config.log.folder, folders.IN_RUN)))


def test_one_rank_trains_with_outer_steps(world: Worlds, config: Callable[..., Config]) -> None:
    alone = {"nodes": "1x1"}
    mine = config(STREAMING | {"codec": "int4", "islands": 1}, train={"steps": 7}, strategy=alone)
    assert len(world(1).run(_train_to_the_end, mine)[0][0]) == 7


# --- stopping and going on --------------------------------------------------------------------------------------------


def test_a_signal_on_one_rank_stops_all_islands_after_the_same_step_and_the_run_goes_on(
    world: Worlds, config: Callable[..., Config], tmp_path: Path
) -> None:
    """The exchange that is under way at that step is part of the checkpoint."""
    steps = {"steps": 8}
    whole = config(STREAMING | {"codec": "int8"}, train=steps, log={"folder": str(tmp_path / "whole")})
    cut = config(STREAMING | {"codec": "int8"}, train=steps, checkpoint={"resume": "auto"})
    expected = world(4).run(_train_to_the_end, whole)
    codes = world(4).run(_stopped_during, cut, 3)
    assert codes == [(143, 4)] * 4, "a signal counts at the end of the step after"
    found = world(4).run(_train_to_the_end, cut)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[0] == theirs[0][4:]
        assert mine[1] == theirs[1]


def _stopped_during(config: Config, step: int) -> tuple[int, int]:
    """Let the last rank receive SIGTERM during a step. Return the exit code, and how many steps were done."""
    stop = StopRequest()
    with (
        init_distributed() as job,
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        training = TrainingRun(config, job, stop)
        one_step = training.train_step

        def train_step() -> Any:
            if training.state.step == step - 1 and job.rank == 3:
                stop.signal = SIGNALS[0]
            return one_step()

        training.train_step = train_step  # type: ignore[method-assign]
        return training.train(), training.state.step


# --- losses that are not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 6])
def test_a_loss_that_is_not_finite_on_one_island_ends_all(
    world: Worlds, config: Callable[..., Config], step: int
) -> None:
    """Also in the last step, after which there is no other."""
    mine = config(STREAMING, train={"steps": 7})
    first, second, third, fourth = world(4).run(_failed, mine, "_poisoned_train", {step})
    for kind, told in (third, fourth):
        assert kind == "StepError"
        assert told.startswith(f"step {step + 1}: the loss is nan")
    for kind, told in (first, second):
        assert kind == "StepError"
        assert "loss of another island was not finite" in told


# --- refused ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_an_island_is_refused_on_every_rank(world: Worlds, config: Callable[..., Config]) -> None:
    for kind, told in world(4).run(_failed, config({"every": 3, "islands": 4})):
        assert kind == "ConfigError"
        assert "an island is a group of whole nodes" in told
    with pytest.raises(ConfigError, match=r"\[strategy.outer\] needs a whole copy of the model in each island"):
        config({"every": 3}, parallel={"pipeline": 2})
