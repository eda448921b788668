"""A rank that dies or stops in an exchange between islands ends the others, and a full disk ends nothing.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import towpath
from tests.ranks.models import MODELS
from tests.ranks.server import World, Worlds
from tests.ranks.strategies import seldom, strategy_of
from tests.ranks.test_outer import STREAMING, adamw
from towpath import Outer, Topology, checkpoint
from towpath.engine.agree.watchdog import Watchdog
from towpath.errors import StepError
from towpath.outer.sync import FragmentExchange

SHAPE, STEPS = Topology(2, 2), 7
# How long a process group waits for a peer: more than a busy machine keeps a rank that lives.
PATIENCE_SECONDS = 5.0
# Nothing takes that long, on whatever machine: what does, hangs.
HANGS_SECONDS = 120.0


class _Run:
    """A run that begins with the newest checkpoint in its folder, and saves after two steps, in a delay."""

    def __init__(self, label: str, root: Path, outer: Outer = STREAMING) -> None:
        self.entry, self.root, self.losses = MODELS["gpt"], root, list[float]()
        self.model: Any = towpath.shard(self.entry.make(torch.float32), strategy_of(label, SHAPE, outer=outer))
        self.optimizer = adamw(self.model)
        self.state = checkpoint.State(self.model, self.optimizer)
        loaded = checkpoint.load(root, self.state)
        self.step = 0 if loaded is None else loaded.step

    def backward(self) -> float:
        """Compute the gradients of a step, and return its loss."""
        loss = self.entry.loss(self.model, *self.entry.micro_batch(dist.get_rank(), 0, self.step, torch.float32))
        loss.backward()
        return loss.item()

    def train(self, last: int) -> list[float]:
        """Train up to step `last`, and return the losses of all steps."""
        while self.step < last:
            self.losses.append(self.backward())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            if self.step == 2:
                assert checkpoint.save(self.root, 2, self.state).ok
        return self.losses


def _train(label: str, root: Path) -> list[float]:
    return _Run(label, root).train(STEPS)


def _end_with_an_error(label: str, root: Path, victims: tuple[int, ...], end: int) -> str:
    """Let the victims get a signal in the second exchange, after step 3. Return the error that this rank ends with."""
    if dist.get_rank() in victims:
        run, begun = FragmentExchange.run, list[None]()

        def ending(self: FragmentExchange, workspace: Any) -> None:
            begun.append(None)
            if len(begun) == 2:
                os.kill(os.getpid(), end)
                threading.Event().wait()  # the signal may reach this thread last
            run(self, workspace)

        FragmentExchange.run = ending  # pyright: ignore
    try:
        _train(label, root)
    except StepError as error:
        return str(error)
    raise AssertionError("nothing ended the run without the victims")


def _survivors(ranks: World, victims: tuple[int, ...], *args: Any) -> dict[int, str]:
    """Return the error of each rank that lives. Its process ends with it, as that of a program does."""
    waiting: dict[Any, int] = {}
    for rank, connection in enumerate(ranks._connections):
        connection.send((_end_with_an_error, args, HANGS_SECONDS))
        if rank not in victims:
            waiting[connection] = rank
    errors: dict[int, str] = {}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), HANGS_SECONDS)
        assert ready, f"rank {sorted(waiting.values())} hangs"
        for connection in ready:
            ok, text = connection.recv()  # pyright: ignore
            assert ok, text
            errors[waiting.pop(connection)] = text
            connection.close()  # pyright: ignore
    return errors


@pytest.mark.parametrize("label", ["zero3", seldom("ddp"), seldom("paro-iig")])
def test_a_rank_that_dies_in_an_exchange_ends_all_others(label: str, world: Worlds, tmp_path: Path) -> None:
    """Rank 1 is the one that exchanges with rank 3. A run from the last checkpoint then trains as if nothing was."""
    with World(4) as ranks:
        errors = _survivors(ranks, (3,), label, tmp_path, (3,), signal.SIGKILL)
    for rank, text in errors.items():
        assert text.startswith(f"rank {rank}: ") and "restart the job from the last checkpoint" in text
    assert "the exchange of fragment 1 between islands failed" in errors[1]
    assert "(rank 3)" in errors[1] and "(rank 3)" in errors[2]
    # It has lost rank 1 or rank 2, and learns why from the one, or finds its own exchange cut off by the other.
    assert "(rank 1)" in errors[0] or "(rank 2)" in errors[0]
    assert "between islands failed" in errors[0]
    _check_resumed(label, world, tmp_path)


@pytest.mark.parametrize("label", ["zero3", seldom("ddp"), seldom("paro-iig")])
def test_an_island_that_stops_ends_the_other_within_the_timeout(label: str, tmp_path: Path) -> None:
    with World(4, group_timeout=PATIENCE_SECONDS) as ranks:
        errors = _survivors(ranks, (2, 3), label, tmp_path, (2, 3), signal.SIGSTOP)
    for rank, text in errors.items():
        assert text.startswith(f"rank {rank}: ") and "restart the job from the last checkpoint" in text
        assert "the exchange of fragment 1 between islands failed" in text
    # One of the ranks may find that the other has given up first, and quotes it.
    assert any(f"(rank {rank + 2})" in text for rank, text in errors.items())


def _check_resumed(label: str, world: Worlds, root: Path) -> None:
    """The newest checkpoint is that of step 2."""
    resumed, undisturbed = (world(4).run(_train, label, folder) for folder in (root, root / "undisturbed"))
    for found, expected in zip(resumed, undisturbed, strict=True):
        assert len(expected) == STEPS and found == expected[2:]


# --- inside an island -------------------------------------------------------------------------------------------------


def test_errors_inside_an_island_name_ranks_of_the_job(world: Worlds, tmp_path: Path) -> None:
    texts = world(4).run(_step_otherwise, tmp_path)
    assert texts[:2] == ["", ""]
    for rank, text in enumerate(texts[2:], 2):
        assert text.startswith(f"rank {rank}: the ranks ran different programs")
        assert "on rank 2: " in text and "on rank 3: " in text


def _step_otherwise(root: Path) -> str:
    """Rank 3 takes another learning rate, which its island notices before islands exchange anything."""
    run = _Run("zero3", root, Outer(every=9))
    if dist.get_rank() == 3:
        run.optimizer.param_groups[0]["lr"] *= 2
    try:
        run.train(1)
        run.backward()
    except StepError as error:
        return str(error)
    return ""


def test_an_island_learns_of_a_process_that_ends_in_another_one(tmp_path: Path) -> None:
    """As on a GPU, where no connection of rank 0 shows it: rank 0 waits for rank 1, which is elsewhere."""
    with World(4) as ranks:
        for connection in ranks._connections:
            connection.send((_wait_elsewhere, (tmp_path,), HANGS_SECONDS))
        assert ranks._connections[0].poll(HANGS_SECONDS), "rank 0 hangs"
        ok, text = ranks._connections[0].recv()
    assert ok and text.startswith("rank 0: the process of rank 3 has ended"), text


def _wait_elsewhere(root: Path) -> str:
    run, rank, word = _Run("zero3", root, Outer(every=9)), dist.get_rank(), torch.zeros(1)
    Watchdog.of(run.model.towpath_engine.comm.job).watch_processes()
    run.train(1)
    if rank == 2:
        dist.send(word, 3)
    elif rank == 3:
        dist.recv(word, 2)  # so that nobody waits for its last messages
        os._exit(0)
    elif rank == 0:
        with pytest.raises(StepError) as caught:
            run.backward()
        return str(caught.value)
    threading.Event().wait()
    return ""
