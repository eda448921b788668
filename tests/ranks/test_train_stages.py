"""`towpath train` with [parallel]: the same training in stages, saved and gone on with anywhere.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.server import Worlds
from tests.ranks.strategies import in_turn
from tests.ranks.test_train import ROUNDED, _train, _with, config, rows_of, tokens
from towpath.errors import ConfigError
from towpath.train.config import Config

__all__ = ["config", "tokens"]  # fixtures

NO_NODES = {"nodes": ""}
CASES = [
    {"pipeline": 2},
    {"pipeline": 4, "schedule": "GPipe"},
    {"pipeline": 2, "schedule": "Interleaved1F1B"},
]


def _losses(config: Config) -> list[float]:
    return [row["loss"] for row in rows_of(config)]


@in_turn(CASES, 1, "stages")
def test_a_run_goes_on_in_stages_as_without(
    world: Worlds, config: Callable[..., Config], tmp_path: Path, stages: Any
) -> None:
    """And back again: one step without stages, two with, one without."""
    whole = config(model={"depth": 4}, train={"steps": 4})
    ranks = world(4)
    ranks.run(_train, whole)
    folder = tmp_path / "in stages"
    parts: list[Config] = []
    for steps, parallel in ((1, {}), (3, stages), (4, {})):
        log, strategy = {"folder": str(folder / str(steps))}, {"name": "zero1", **(NO_NODES if parallel else {})}
        saved = {"resume": parts[-1].log.folder if parts else "off"}
        part = _with(whole, parallel=parallel, log=log, checkpoint=saved, strategy=strategy)
        # Of the same schedule of the learning rate: told to stop by the number of steps that it makes.
        ranks.run(_some_steps, part, steps)
        parts.append(part)
    found = [loss for part in parts for loss in _losses(part)]
    assert found == pytest.approx(_losses(whole), abs=ROUNDED)
    held_out = [rows_of(c, "validation")[-1]["loss"] for c in (parts[-1], whole)]
    assert held_out[0] == pytest.approx(held_out[1], abs=ROUNDED)


def _some_steps(config: Config, until: int) -> None:
    """As `train` does, but for the end."""
    import contextlib
    import io

    from towpath.train.checkpoints import CheckpointManager
    from towpath.train.job import init_distributed
    from towpath.train.metrics import MetricsLogger
    from towpath.train.trainer import TrainingRun

    with (
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
        init_distributed() as job,
    ):
        trainer = TrainingRun(config, job)
        with CheckpointManager(trainer) as checkpoints, MetricsLogger(trainer) as metrics:
            while trainer.state.step < until:
                metrics.log_step(trainer.train_step())
                checkpoints.save_if_due()
            if until == config.train.steps:
                metrics.log_evaluation(*trainer.evaluate())


def test_what_a_run_in_stages_says_and_writes(world: Worlds, config: Callable[..., Config]) -> None:
    mine = config(
        model={"depth": 4, "width": 64},
        train={"steps": 4, "batch": 16, "micro_batch": 2, "length": 32, "evaluate_every": 2},
        parallel={"pipeline": 2, "compression": "optimus-cb+fe"},
        strategy={"name": "zero1", **NO_NODES},
    )
    (out, err), *others = world(4).run(_train, mine)
    assert others == [("", "")] * 3
    assert "2 stages, 1 on each rank, by 1F1B; 2 ranks hold each" in err
    assert "held-out loss" in err and "checkpoint: " in err
    for kind in ("grad_sync", "param_sync", "activation", "activation_gradient", "waiting for activation"):
        assert kind in out, kind
    rows = rows_of(mine)
    assert len(rows) == 4 and len({row["intra_bytes"] + row["inter_bytes"] for row in rows}) == 1
    assert rows[0]["intra_bytes"] + rows[0]["inter_bytes"] > 0
    assert all(0 <= row["exposed_seconds"] <= row["seconds"] for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


REFUSED = {
    "more stages than layers": ({"model": {"depth": 2}, "parallel": {"pipeline": 4}}, "4 stages of a model that has 2"),
    "ranks that do not divide": ({"parallel": {"pipeline": 3}}, "a divisor of the job's 4 ranks"),
    "a rank that pays nothing": (
        {"parallel": {"pipeline": 2, "compression": "optimus-cb"}},
        "between stages low-rank:16 sends no less",
    ),
    "a batch that does not divide": (
        {"parallel": {"pipeline": 2}, "train": {"batch": 7, "micro_batch": 1}},
        "cannot be shared out: 2 ranks",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_in_stages_is_told_on_every_rank(
    world: Worlds, config: Callable[..., Config], case: str
) -> None:
    sections, words = REFUSED[case]
    mine = config(**({"strategy": {"name": "ddp", **NO_NODES}} | sections))
    for told in world(4).run(_refused, mine):
        assert words in told


def _refused(config: Config) -> str:
    from towpath.errors import TowpathError

    with pytest.raises(TowpathError) as failure:
        _train(config)
    return str(failure.value)


def test_what_stages_do_not_have_is_refused_at_once(config: Callable[..., Config]) -> None:
    for sections, words in (
        ({"parallel": {"schedule": "GPipe"}}, "only with parallel.pipeline above 1"),
        ({"parallel": {"pipeline": 2, "schedule": "2F2B"}}, "parallel.schedule = '2F2B': expected one of 'GPipe'"),
        (
            {"parallel": {"pipeline": 2}, "train": {"compile": True}},
            "pipeline = 2: expected 1 with train.compile",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            config(**sections)
