"""`towpath train` goes on where it was: the losses to come are those of the run that nobody interrupted.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn

from tests.ranks.protected import enter
from tests.ranks.server import World, Worlds
from tests.ranks.strategies import seldom
from towpath import Topology, checkpoint
from towpath.checkpoint import storage
from towpath.errors import StepError, TowpathError
from towpath.train import checkpoints, trainer
from towpath.train.config import Config
from towpath.train.data import TokenWindows, prepare
from towpath.train.job import init_distributed
from towpath.train.trainer import StepResult, TrainingRun

Told = dict[int, tuple[int, signal.Signals]]

BATCH = 12  # which 1, 2, 3 and 4 ranks can share out
THIRD = 2
STEPS = 3 * THIRD
SQUARE = ("strategy.nodes=2x2",)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Of a run so small that its steps are the time of their messages."""
    corpus, tokens = (tmp_path_factory.mktemp("data") / name for name in ("corpus.txt", "tokens"))
    corpus.write_text(" ".join(random.Random(0).choices(("lock", "barge", "weir", "horse", "canal"), k=4000)))
    prepare([str(corpus)], tokens)
    model = ("model.width=16", "model.depth=1", "model.heads=2")
    train = (f"train.steps={STEPS}", "train.batch=4", "train.micro_batch=1", "train.length=8", "train.threads=1")
    return (*model, *train, f"data.tokens={tokens}")


@dataclass
class Seen:
    """What a rank has seen of a run."""

    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)  # that it computed, in the order of the data
    said: str = ""
    error: str = ""
    code: int | None = None  # that the command ends with


def _train(
    options: tuple[str, ...],
    told: Told | None = None,
    before: Callable[[int], object] | None = None,
    *,
    background: bool = True,
) -> Seen:
    """`told`: by rank, after which step it gets which signal. `before(step)` is called on every rank."""
    seen = Seen()
    own_step, own_batch = TrainingRun.train_step, TokenWindows.batch

    def step(training: TrainingRun) -> StepResult:
        if before is not None:
            before(training.state.step + 1)
        done = own_step(training)
        seen.losses.append(done.loss)
        after, number = (told or {}).get(training.job.rank, (0, signal.SIGTERM))
        if after == done.step:
            signal.raise_signal(number)
        return done

    def batch(windows: TokenWindows, first: int, count: int) -> Any:
        seen.samples += range(first, first + count)
        return own_batch(windows, first, count)

    said = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setattr(TrainingRun, "train_step", step)
        patch.setattr(TokenWindows, "batch", batch)
        patch.setattr(checkpoint, "Saver", partial(checkpoint.Saver, background=background))
        try:
            seen.code = trainer.run_training(Config.load(os.devnull, options))
        except TowpathError as error:
            seen.error = str(error)
    seen.said = said.getvalue()
    return seen


def _in(folder: Path, *more: str) -> tuple[str, ...]:
    return (f"log.folder={folder}", *more)


def _files(path: Path) -> dict[str, bytes]:
    """Weights, optimizer, random numbers, what codecs carry."""
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}


# --- across strategies and worlds ------------------------------------------------------------------------------------

# How far losses of about 3 may be apart after some steps in fp32: sums in another order differ by 1e-7, and AdamW with
# eps = 1e-5 raises that where gradients are small.
ROUNDING = 2e-5
# What int8 weights and int4 gradients make of them.
LOSSY = 0.02

OTHERS = {
    "paro-iig on 3×1": (3, ("strategy.name=paro-iig", "strategy.nodes=3x1"), ROUNDING),
    "ddp on one rank": (1, ("strategy.name=ddp",), ROUNDING),
    "zero++ on 2×2": (4, ("strategy.name=zero++", *SQUARE), LOSSY),
    "mics on 2×2": (
        4,
        ("strategy.name=mics", "strategy.nodes=2x2"),
        ROUNDING,
    ),
}


@pytest.fixture(scope="module")
def uninterrupted(
    world: Worlds, options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float]]:
    """zero3 on 2×2: its checkpoints after each third, and its losses."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    more = _in(folder, *SQUARE, f"train.batch={BATCH}", f"checkpoint.every={THIRD}", "checkpoint.keep=0")
    seen = world(4).run(_train, (*options, *more))
    assert not any(rank.error for rank in seen)
    return folder / "checkpoints", seen[0].losses


@pytest.mark.parametrize("other", [o if o.startswith("paro") else seldom(o) for o in OTHERS])
def test_another_strategy_on_another_world_goes_on_and_so_does_the_first_from_there(
    world: Worlds, options: tuple[str, ...], uninterrupted: tuple[Path, list[float]], tmp_path: Path, other: str
) -> None:
    saved, losses = uninterrupted
    ranks, strategy, tolerance = OTHERS[other]
    options = (*options, f"train.batch={BATCH}")

    there = _in(tmp_path / "there", *strategy, f"checkpoint.resume={saved / f'step-{THIRD:06}'}")
    seen = world(ranks).run(_train, (*options, *there), {0: (2 * THIRD - 1, signal.SIGTERM)})
    assert len(seen[0].losses) == THIRD
    assert seen[0].losses == pytest.approx(losses[THIRD : 2 * THIRD], rel=tolerance)
    assert sorted(s for rank in seen for s in rank.samples) == list(range(THIRD * BATCH, 2 * THIRD * BATCH))

    back = _in(tmp_path / "back", *SQUARE, f"checkpoint.resume={tmp_path / 'there' / 'checkpoints'}")
    seen = world(4).run(_train, (*options, *back))
    assert len(seen[0].losses) == THIRD and seen[0].losses == pytest.approx(losses[2 * THIRD :], rel=tolerance)
    assert sorted(s for rank in seen for s in rank.samples) == list(range(2 * THIRD * BATCH, STEPS * BATCH))

    if tolerance == LOSSY:  # what the codecs lost they lost before: from here on all is a matter of rounding
        alone = _in(tmp_path / "alone", "strategy.name=ddp", *back[-1:])
        assert world(1).run(_train, (*options, *alone))[0].losses == pytest.approx(seen[0].losses, rel=ROUNDING)


@pytest.mark.parametrize("strategy", ["zero++ feedback=both", seldom("zero3"), seldom("paro-iig")])
def test_the_same_strategy_and_world_go_on_bit_for_bit(
    world: Worlds, options: tuple[str, ...], tmp_path: Path, strategy: str
) -> None:
    """Losses, weights, optimizer states, random numbers and what codecs carry."""
    more = (f"strategy.name={strategy}", *SQUARE, "train.steps=6", "checkpoint.every=3")
    options = (*options, *more, "train.batch=8")  # two micro-steps
    whole, parts = _in(tmp_path / "whole"), _in(tmp_path / "parts")
    losses = world(4).run(_train, (*options, *whole))[0].losses
    before = world(4).run(_train, (*options, *parts), {2: (3, signal.SIGTERM)})
    after = world(4).run(_train, (*options, *parts))
    assert [before[0].losses, after[0].losses] == [losses[:4], losses[4:]]
    assert "stopped after step 4. The same command goes on from there." in before[0].said
    assert "4 steps are done, 2 to go" in after[0].said
    ends = [_files(tmp_path / part / "checkpoints" / "step-000006") for part in ("whole", "parts")]
    assert len(ends[0]) == 8 and ends[0] == ends[1]


# --- from where ------------------------------------------------------------------------------------------------------


def test_resume_is_off_auto_or_a_path(world: Worlds, options: tuple[str, ...], tmp_path: Path) -> None:
    options = (*options, *_in(tmp_path, "train.steps=4", "checkpoint.every=2"))
    first = world(2).run(_train, options)[0].losses
    folder = tmp_path / "checkpoints"
    again = world(2).run(_train, options)[0]
    assert again.losses == [] and "none is left of train.steps = 4" in again.said
    assert world(2).run(_train, (*options, f"checkpoint.resume={folder / 'step-000002'}"))[0].losses == first[2:]
    assert world(2).run(_train, (*options, "checkpoint.resume=off"))[0].losses == first
    for spelled in (tmp_path, tmp_path / "checkpoints" / ".." / "checkpoints"):  # this run's own, which nobody moves
        seen = world(2).run(_train, (*options, f"checkpoint.resume={spelled}", "train.steps=5"))[0]
        assert len(seen.losses) == 1 and "note: moved" not in seen.said
        shutil.rmtree(folder / "step-000005")
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "nowhere", tmp_path / "empty"):
        for seen in world(2).run(_train, (*options, f"checkpoint.resume={nothing}")):
            assert seen.losses == [] and "expected a checkpoint, or a folder of some" in seen.error
    # The step from the middle and "off" moved what was newer. The wrong paths moved nothing.
    assert sorted(path.name for path in tmp_path.glob("checkpoints*")) == [
        "checkpoints",
        "checkpoints.1",
        "checkpoints.2",
    ]


def test_what_the_configuration_says_now_counts(world: Worlds, options: tuple[str, ...], tmp_path: Path) -> None:
    first = (*options, *_in(tmp_path, "train.steps=2"))
    world(1).run(_train, first)
    assert world(1).run(_resumed_decay, (*first, "train.steps=4", "train.weight_decay=0.5")) == [[0.5, 0.0]]


def _resumed_decay(options: tuple[str, ...]) -> list[float]:
    with init_distributed() as job, contextlib.redirect_stderr(io.StringIO()):
        training = TrainingRun(Config.load(os.devnull, options), job)
        with checkpoints.CheckpointManager(training):
            assert training.state.step == 2
            return [group["weight_decay"] for group in training.optimizer.param_groups]


def test_another_order_of_the_data_is_said(world: Worlds, options: tuple[str, ...], tmp_path: Path) -> None:
    first = (*options, *_in(tmp_path, "train.steps=1"))
    world(1).run(_train, first)
    same = world(1).run(_train, (*first, "train.steps=2", "train.batch=6"))[0]
    assert len(same.losses) == 1 and "changed since" not in same.said
    other = world(1).run(_train, (*first, "train.steps=3", "train.seed=7", "train.length=7"))[0]
    assert len(other.losses) == 1
    assert "note: train.length and train.seed changed since the checkpoint was written" in other.said


def test_another_model_is_refused_in_one_line_on_every_rank(
    world: Worlds, options: tuple[str, ...], tmp_path: Path
) -> None:
    options = (*options, *_in(tmp_path, "train.steps=2"))
    world(2).run(_train, options)
    errors = {seen.error for seen in world(2).run(_train, (*options, "model.depth=2"))}
    assert len(errors) == 1
    [error] = errors
    assert "the checkpoint is of another model" in error and "\n" not in error


def test_without_a_number_of_steps_the_ranks_save_when_the_time_is_over(
    world: Worlds, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Rank 1's clock alone says so; both save after the step in which they tell each other."""
    options = (*options, "train.steps=10", "checkpoint.keep=0")
    # 201 seconds a step: more than ten minutes are over after step 3, and again three steps after step 4.
    expected = {"checkpoint.every=0": [4, 8, 10], "checkpoint.every=6": [6, 10]}
    for setting, steps in expected.items():
        folder = tmp_path / setting
        for seen in world(2).run(_train_by_the_clock, (*options, setting, *_in(folder))):
            assert len(seen.losses) == 10 and not seen.error
        assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [f"step-{n:06}" for n in steps]


def _train_by_the_clock(options: tuple[str, ...]) -> Seen:
    seconds = 0.0

    def before(step: int) -> None:
        nonlocal seconds
        seconds = 201.0 * step * dist.get_rank()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "monotonic", lambda: seconds)
        return _train(options, None, before)


# --- when a checkpoint cannot be written -----------------------------------------------------------------------------


def test_training_goes_on_when_a_checkpoint_cannot_be_written(
    world: Worlds, options: tuple[str, ...], tmp_path: Path
) -> None:
    options = (*options, *_in(tmp_path, "train.steps=8", "checkpoint.every=2", "checkpoint.keep=0"))
    folder = tmp_path / "checkpoints"
    seen = world(2).run(_fail, options, folder)
    assert len(seen[0].losses) == 8
    assert not any(rank.error for rank in seen)
    for step, why in ((4, "0 bytes are free"), (6, "No such file|is not there")):
        assert re.search(f"STEP {step} NOT SAVED: .*({why})", seen[0].said), seen[0].said
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000008"]
    assert all(checkpoint.verify(path) is None for path in folder.iterdir())


def test_what_is_being_written_when_the_run_fails_is_written_to_its_end(
    world: Worlds, options: tuple[str, ...], tmp_path: Path
) -> None:
    options = (*options, *_in(tmp_path, "checkpoint.every=3"))
    for seen, newest in world(2).run(_fail_while_it_saves, options):
        assert seen.error == "for the test"
        assert newest == tmp_path / "checkpoints" / "step-000003"


def _fail_while_it_saves(options: tuple[str, ...]) -> tuple[Seen, Path | None]:
    """And the newest checkpoint when the run is over."""
    real, failed = storage.write_tensors, threading.Event()

    def patient(*args: Any) -> Any:
        failed.wait()
        return real(*args)

    def before(step: int) -> None:
        if step == 4:
            failed.set()
            raise StepError("for the test")

    storage.write_tensors = patient
    try:
        seen = _train(options, None, before)
    finally:
        storage.write_tensors = real
    return seen, checkpoint.latest(Path(Config.load(os.devnull, options).log.folder, "checkpoints"))


def test_a_folder_that_cannot_be_read_does_not_hide_why_a_run_ended(options: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def before(step: int) -> None:
        if step == 4:
            folder.rename(tmp_path / "elsewhere")
            folder.symlink_to(folder)
            raise StepError("for the test")

    seen = _train((*options, *_in(tmp_path, "checkpoint.every=2")), None, before, background=False)
    assert seen.error == "for the test" and "step 3 was not saved; its checkpoints cannot be read" in seen.said


def _fail(options: tuple[str, ...], folder: Path) -> Seen:
    """The disk is full in step 4; what is half written vanishes in step 6."""
    real_write, real_free = storage.write_tensors, storage.free_bytes

    def vanishing(*args: Any) -> Any:
        for path in folder.glob("*.partial-*"):
            shutil.rmtree(path, ignore_errors=True)
        return real_write(*args)

    def before(step: int) -> None:
        storage.free_bytes = (lambda folder: 0) if step in (4, 5) else real_free
        storage.write_tensors = vanishing if step in (6, 7) else real_write

    return _train(options, None, before, background=False)


def test_where_the_last_state_cannot_be_saved_the_run_has_failed_and_says_what_is_left(
    world: Worlds, options: tuple[str, ...], tmp_path: Path
) -> None:
    options = (*options, *_in(tmp_path, "train.steps=8", "checkpoint.every=2"))
    for seen in world(2).run(_fail_last, options):
        assert "the state after step 5 was not saved" in seen.error and "step-000004" in seen.error
        assert "stopped after" not in seen.said
    assert [len(seen.losses) for seen in world(2).run(_train, options)] == [4, 4]


def _fail_last(options: tuple[str, ...]) -> Seen:
    real_free = storage.free_bytes

    def before(step: int) -> None:
        storage.free_bytes = (lambda folder: 0) if step == 5 else real_free

    seen = _train(options, {1: (4, signal.SIGTERM)}, before, background=False)
    storage.free_bytes = real_free
    return seen


def test_a_run_in_the_folder_of_a_run_that_lives_is_refused_and_moves_nothing(
    world: Worlds, options: tuple[str, ...], tmp_path: Path
) -> None:
    options = (*options, *_in(tmp_path, "train.steps=2"))
    assert not world(2).run(_train, options)[0].error
    first = checkpoint.Saver(tmp_path / "checkpoints", checkpoint.State(nn.Linear(2, 2)))
    for resume in ("auto", "off"):  # which would set its checkpoints aside
        for seen in world(2).run(_train, (*options, f"checkpoint.resume={resume}")):
            assert f"process {os.getpid()} on host" in seen.error and seen.losses == []
    assert [path.name for path in tmp_path.glob("checkpoints*")] == ["checkpoints"]
    first.close()
    assert not world(2).run(_train, (*options, "train.steps=3"))[0].error


# --- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "told, number",
    [
        ({3: (4, signal.SIGINT)}, signal.SIGINT),
        seldom(dict.fromkeys(range(4), (4, signal.SIGTERM)), signal.SIGTERM),
        ({0: (5, signal.SIGINT), 1: (4, signal.SIGTERM)}, signal.SIGTERM),
    ],
    ids=["one", "all", "two, at different times"],
)
def test_all_ranks_stop_after_the_same_step_save_and_end_with_the_code_of_a_signal(
    world: Worlds, options: tuple[str, ...], tmp_path: Path, told: Told, number: signal.Signals
) -> None:
    seen = world(4).run(_train, (*options, *_in(tmp_path)), told)
    assert [(len(rank.losses), rank.error, rank.code) for rank in seen] == [(5, "", 128 + number)] * 4
    assert "stopped after step 5. The same command goes on from there." in seen[0].said
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000005"]
    assert checkpoint.verify(tmp_path / "checkpoints" / "step-000005") is None


def test_the_last_step_is_saved_by_the_start_that_found_it_in_memory(
    world: Worlds, options: tuple[str, ...], tmp_path: Path
) -> None:
    more = ("strategy.name=paro-iig", "strategy.nodes=2x1", "strategy.protect=1")
    for seen in world(2).run(_end_in_error_and_again, (*options, *_in(tmp_path / "run", *more)), tmp_path / "nodes"):
        assert (seen.error, seen.losses) == ("", [])
    assert checkpoint.latest(tmp_path / "run" / "checkpoints") == tmp_path / f"run/checkpoints/step-{STEPS:06}"


def _end_in_error_and_again(options: tuple[str, ...], nodes: Path) -> Seen:
    """The first time, a node is lost after the last step."""
    enter(nodes, Topology(2, 1))
    with patch.object(TrainingRun, "evaluate", _raise_lost):  # a mock would keep the error, and with it the saver
        assert _train(options).error == "a rank was lost"
    gc.collect()
    return _train(options)


def _raise_lost(_: TrainingRun) -> None:
    raise StepError("a rank was lost")


def test_with_a_dead_peer_nothing_is_saved_and_that_is_said(options: tuple[str, ...], tmp_path: Path) -> None:
    options = (*options, *_in(tmp_path, "train.batch=3", "checkpoint.every=2"))
    with World(3) as ranks:
        for connection in ranks._connections:
            connection.send((_die, (options, 1, 4), 60.0))
        for rank in (0, 2):
            assert ranks._connections[rank].poll(60.0), "a survivor hangs"
            ok, seen = ranks._connections[rank].recv()
            assert ok, seen
            assert re.search(
                f"rank {rank}: step 3 was not saved; the same command goes on from .*step-000002", seen.said
            )
            assert "has died" in seen.error
    assert checkpoint.latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-000002"


def _die(options: tuple[str, ...], doomed: int, step: int) -> Seen:
    """Before the step, when the survivors have been told to stop. What was saved before is published."""

    def before(at: int) -> None:
        if at == step:
            dist.barrier()
            if dist.get_rank() == doomed:
                os.kill(os.getpid(), signal.SIGKILL)

    told = {rank: (step - 1, signal.SIGTERM) for rank in range(3) if rank != doomed}
    return _train(options, told, before, background=False)


def test_a_run_that_is_told_to_stop_in_its_last_step_is_through(
    world: Worlds, options: tuple[str, ...], tmp_path: Path
) -> None:
    seen = world(2).run(_train, (*options, *_in(tmp_path)), {1: (STEPS, signal.SIGINT)})
    assert [rank.code for rank in seen] == [0] * 2
