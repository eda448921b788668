"""Saving: at once, or behind the training's back.

In the background: a thread copies what this rank writes to memory of its own (`snapshot.py`), and writes it while the
next steps run. The ranks agree over a process group that nothing else uses.

A failure to write ends no training. Every rank gets the same outcome; rank 0 says it, and what was published before
stays as it is.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from towpath.checkpoint.control_group import ControlGroup
from towpath.checkpoint.dcp import calls as run
from towpath.checkpoint.dcp.planning import JsonSavePlanner
from towpath.checkpoint.dcp.storage import FolderWriter
from towpath.checkpoint.disk import claim, folders
from towpath.checkpoint.disk.claim import FolderInUseError, claim_of, release
from towpath.checkpoint.memory.snapshot import Pool, Snapshot
from towpath.checkpoint.memory.state import State
from towpath.errors import CheckpointError
from towpath.logs import logger

_LOG = logger("checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of saving one step, alike on every rank but for the seconds. `held_seconds`: how long the training waited."""

    step: int
    path: Path
    failure: str | None
    seconds: float
    held_seconds: float

    @property
    def ok(self) -> bool:
        return self.failure is None


class Saving:
    """A checkpoint under way."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self.snapshot: Snapshot | None = None
        self.held_seconds = 0.0

    @property
    def done(self) -> bool:
        return self._outcome is not None

    def end(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def follow(self, thread: threading.Thread) -> None:
        self._thread = thread

    def outcome(self) -> Outcome:
        """Waits for it."""
        if self._thread is not None:
            self._thread.join()
        assert self._outcome is not None
        later = self.snapshot.held_seconds if self.snapshot is not None else 0.0
        return replace(self._outcome, held_seconds=self.held_seconds + later)


class Saver:
    """Saves `state` into `root`, one folder a step.

        saver = Saver("runs/a", State(model, optimizer), keep_last=3)
        saver.save(step)        # every rank, between two steps
        saver.close()           # every rank, at the end

    `keep_last`: how many of the newest stay (all, unless given); `keep_every`: besides, those whose step it divides.
    `background=False`: `save` returns when it is done. `lane`: savers that work at the same time need one each. What
    dead runs left unfinished in `root` is taken away.

    Until `close()` the folder is this job's: another job that opens or writes it gets a CheckpointError on every rank.
    """

    def __init__(
        self,
        root: str | Path,
        state: State,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        background: bool = True,
        lane: str = "checkpoint",
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise CheckpointError(f"keep_last is at least 1, or None to keep all; got {keep_last}.")
        if keep_every is not None and (keep_every < 1 or keep_last is None):
            raise CheckpointError(f"keep_every is at least 1, and goes with keep_last; got {keep_every}, {keep_last}.")
        self.root, self.state = Path(root), state
        self._keep = keep_last, keep_every
        self._background = background
        self._control = ControlGroup(state.groups, lane)
        self._pool = Pool()
        self._under_way: Saving | None = None
        self._hook: RemovableHandle | None = None
        self._lost: FolderInUseError | None = None
        self._open()
        state.savers.add(self)

    def _open(self) -> None:
        """Claim the folder; on every rank FolderInUseError if another job has it."""
        self._claim = claim_of(self.root)
        self._release = weakref.finalize(self, release, self._claim)
        while (problem := self._control.first(self._claimed)) is None:
            pass
        if problem:
            self._release()
            raise FolderInUseError(problem)

    def _claimed(self) -> str | None:
        """Empty if it is this job's now, or else why it is not; None while that is not known."""
        try:
            if not self._claim.take():
                time.sleep(claim.PAUSE_SECONDS)
                return None
            folders.sweep(self.root)
        except FolderInUseError as error:
            return str(error)
        except OSError:  # a folder that cannot be written to: each save tries again, and says so
            return ""
        return ""

    def save(self, step: int) -> Saving:
        """Begin to save `step`; if the one before is still being written, first wait for it."""
        began = time.perf_counter()
        self.wait()
        if self._lost is not None:  # on every rank
            raise FolderInUseError(str(self._lost))
        if not self._release.alive:  # it was closed
            self._open()
        if self._background and self._hook is None and self.state.optimizer is not None:
            self._hook = self.state.optimizer.register_step_pre_hook(_settling(weakref.ref(self)))
        saving = self._under_way = Saving()
        problem: str | None = None
        found: dict[str, Any] = {}
        try:
            found = self.state.collect()
            if self._background:
                state = self.state
                found, saving.snapshot = self._pool.snapshot(found, lambda: state.writes)
        except Exception as error:  # told to all ranks by the planner, which would else wait for this one
            problem, found = run.described(error), {}

        def work() -> None:
            saving.end(self._write(step, found, problem or _taken(saving.snapshot), began))

        if self._background:
            thread = threading.Thread(target=work, name=f"towpath checkpoint {step}", daemon=True)
            saving.follow(thread)
            thread.start()
        else:
            work()
        saving.held_seconds = time.perf_counter() - began
        return saving

    def settle(self) -> None:
        """After this, all may be written to: what is being saved has been copied."""
        if self._under_way is not None and self._under_way.snapshot is not None:
            self._under_way.snapshot.before_step()

    def wait(self) -> Outcome | None:
        """For the checkpoint that is under way; its outcome."""
        saving, self._under_way = self._under_way, None
        return saving.outcome() if saving is not None else None

    def close(self) -> Outcome | None:
        """Wait, and give memory and folder back."""
        outcome = self.wait()
        self._release()
        self._pool = Pool()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        return outcome

    def _write(self, step: int, found: dict[str, Any], problem: str | None, began: float) -> Outcome:
        writer = FolderWriter(self.root, step, self._claim, self.state.strategy)
        failure: str | None = None
        try:
            if self._control.lost:
                raise CheckpointError("the ranks have lost each other while they saved; start them anew.")
            run.save(found, writer, JsonSavePlanner(problem), self._control)
        except CheckpointError as error:  # the same on every rank
            failure = str(error)
            self._lost = error if isinstance(error, FolderInUseError) else None
        except Exception as error:
            failure = run.described(error)
            self._control.leave()
        path = folders.checkpoint_of(self.root, step)
        if self._control.rank == 0:
            self._afterwards(step, writer, failure)
        seconds = time.perf_counter() - began
        return Outcome(step=step, path=path, failure=failure, seconds=seconds, held_seconds=0.0)

    def _afterwards(self, step: int, writer: FolderWriter, failure: str | None) -> None:
        if failure is not None:
            _LOG.error("CHECKPOINT OF STEP %d NOT SAVED: %s The training goes on.", step, failure)
            writer.clear()
            return
        try:
            folders.let_go(self.root, step, *self._keep)
        except OSError as error:
            _LOG.warning("old checkpoints in %s cannot be taken away: %s", self.root, error)


def _settling(saver: weakref.ref[Saver]) -> Callable[..., None]:
    """What an optimizer calls before its step. It does not keep the saver, and so the folder's claim, alive."""

    def before_step(*_: object) -> None:
        found = saver()
        if found is not None:
            found.settle()

    return before_step


def _taken(snapshot: Snapshot | None) -> str | None:
    try:
        if snapshot is not None:
            snapshot.take()
    except Exception as error:
        return run.described(error)
    return None


def save(root: str | Path, step: int, state: State) -> Outcome:
    """Save `state` once, and wait for it."""
    saver = Saver(root, state, background=False, lane="checkpoint at once")
    outcome = saver.save(step).outcome()
    saver.close()
    return outcome
