"""Save checkpoints, in the background while the training continues, or at once.

In the background, a thread copies what this rank writes into memory of its own (`staging.py`), and writes the copy
during the next steps. The ranks agree over a process group that nothing else uses. Several savers write one after
another.

A failure to write does not end the training. Every rank gets the same outcome, rank 0 logs it, and earlier checkpoints
stay as they are.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from towpath.checkpoint import folders, storage
from towpath.checkpoint.folders import RefusedError, lock_of, release
from towpath.checkpoint.safe_files import shown
from towpath.checkpoint.staging import Snapshot, StagingMemory
from towpath.checkpoint.state import State
from towpath.checkpoint.storage import WriteItems
from towpath.daemons import start_daemon
from towpath.errors import CheckpointError, TowpathError
from towpath.logs import logger
from towpath.protect.memory import memory_of
from towpath.protect.snapshots import Snapshots
from towpath.topology.groups import Groups
from towpath.topology.together import AllRanks, described, together

_LOG = logger("checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the saving of one step ended. It is the same on every rank, except for `seconds`.

    Attributes:
        step: The step that was saved.
        path: The folder of the checkpoint.
        failure: Why there is no checkpoint, or None if it was saved.
        seconds: How long saving took.
    """

    step: int
    path: Path
    failure: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the checkpoint was saved."""
        return self.failure is None


class Saving:
    """A checkpoint that is being saved, as `Saver.save` returns it."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.snapshot: Snapshot | None = None
        self.ended: Outcome | None = None

    @property
    def done(self) -> bool:
        """Whether saving has ended."""
        return self.ended is not None

    def wait(self, seconds: float | None = None) -> None:
        """Wait until saving has ended, for at most so many seconds. The default is no limit."""
        if self.thread is not None:
            self.thread.join(seconds)

    def outcome(self) -> Outcome:
        """Wait until saving has ended, and return its outcome."""
        self.wait()
        assert self.ended is not None
        return self.ended


@dataclass(slots=True)
class _SaveChannel:
    """The process group on which all savers of a job save, one after another."""

    everyone: Groups
    apart: Groups
    thread: threading.Thread | None = None  # the last one that uses the group
    lost: bool = False

    @property
    def control(self) -> AllRanks:
        if self.lost:
            raise CheckpointError("the ranks have lost each other while they saved; start them anew.")
        return AllRanks(self.apart, "saving a checkpoint", CheckpointError)

    def leave(self) -> None:
        """Close the group after a failure of this rank, so that other ranks do not wait for it until a timeout."""
        if not self.lost and self.apart is not self.everyone and self.apart.parent is not None:
            group, self.apart.parent = self.apart.parent, None  # what still refers to it would keep it connected
            self.everyone.leave(group)
        self.lost = True


class Saver:
    """Saves a state into a folder, one checkpoint per step.

    Every rank creates the saver and makes the same calls. Until `close`, the folder belongs to this job. A saver
    removes what dead runs left unfinished in it.

    Example:
        saver = Saver("runs/a", State(model, optimizer), keep_last=3)
        saver.save(step)        # between two steps
        saver.close()           # at the end

    Args:
        root: The folder for the checkpoints. Ranks of nodes that do not see it send their files to rank 0.
        state: What to save.
        keep_last: How many of the newest checkpoints to keep. By default all are kept.
        keep_every: Keep also the checkpoints whose step is a multiple of this. It requires `keep_last`.
        background: Write while the training continues. Set it to False if `save` should return when it has finished.
        exclusive: Refuse a folder that another Saver of this job has open.

    Raises:
        CheckpointError: Another job or Saver uses the folder, or the arguments are invalid or differ between ranks.
    """

    def __init__(
        self,
        root: str | Path,
        state: State,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        background: bool = True,
        exclusive: bool = True,
    ) -> None:
        _check_state(state)
        if keep_last is not None and not _is_count(keep_last, 1):
            raise CheckpointError(f"keep_last is at least 1, or None to keep all; got {keep_last!r}.")
        if keep_every is not None and (not _is_count(keep_every, 1) or keep_last is None):
            raise CheckpointError(
                f"keep_every is at least 1, and goes with keep_last; got {keep_every!r}, {keep_last}."
            )
        self.root, self.state = Path(root), state
        self._keep = keep_last, keep_every
        self._background, self._exclusive = background, exclusive
        self._memory = StagingMemory()
        self._under_way: Saving | None = None
        self._refused: RefusedError | None = None  # by the last save, for the next one to raise
        self._has_failed = False  # the last save
        self._snapshots: Snapshots | None = None
        self._open()
        if background:  # others have saved before anything can change
            state.add_saver(self)

    def _open(self) -> None:
        """Lock the folder, or raise on every rank if another job or Saver has it or if the arguments differ."""
        everyone, (keep_last, keep_every) = self.state.local.everyone, self._keep
        with together(everyone, "Saver()", storage.SAME, RefusedError) as lines:
            lines += [f"root = {self.root}", f"keep_last = {keep_last}", f"keep_every = {keep_every}"]
            lines.append(f"background = {self._background}")
        self._channel = everyone.shared("checkpoints", lambda: _SaveChannel(everyone, everyone.apart("checkpoints")))
        self._lock = lock_of(self.root)
        self._release = weakref.finalize(self, release, self._lock)

        def lock() -> None:
            with suppress(OSError):  # a folder that cannot be written to: each save tries again, and reports it
                self._lock.hold(alone=self._exclusive)
                folders.sweep(self.root)

        try:
            if self._channel.thread is not None:
                self._channel.thread.join()
            self._channel.control.on_rank_0(lock)
        except Exception:
            self._release()
            raise

    def save(self, step: int) -> Saving:
        """Save the state after `step`. If the previous checkpoint is still being written, wait for it first.

        Every rank must call it, between two steps of the optimizer.

        Args:
            step: The number of steps done, which names the checkpoint.

        Returns:
            The checkpoint that is being saved. Ignore it, or call its `outcome` to wait.

        Raises:
            CheckpointError: The step is not a count, or another job has taken the folder over, or the step or the
                extras differ between ranks: of this save, or of the previous one in the background. A failure to write
                is in the outcome instead.
        """
        if not _is_count(step, 0):
            raise CheckpointError(f"step: expected the number of steps done, an integer from 0 on; got {shown(step)}.")
        began = time.perf_counter()
        self.wait()
        self._raise_refusal()
        if not self._release.alive:  # it was closed
            self._open()
        saving = self._under_way = Saving()
        items: WriteItems | str
        try:
            items = self.state.collect()
            if self._background:
                pieces, saving.snapshot = self._memory.snapshot(items.pieces, [*self.state.local.engines.values()])
                items = replace(items, pieces=pieces)
        except Exception as error:  # all ranks get it, which would otherwise wait for this one
            items = described(error)

        before = self._channel.thread

        def work() -> None:
            nonlocal items
            try:
                if saving.snapshot is not None:
                    saving.snapshot.take()
            except Exception as error:
                items = described(error)
            if before is not None:
                before.join()
            saving.ended = self._write(step, items, began)

        if self._background:
            self._channel.thread = saving.thread = start_daemon(f"towpath checkpoint {step}", work)
        else:
            work()
            self._raise_refusal()
        return saving

    def _raise_refusal(self) -> None:
        refused, self._refused = self._refused, None
        if refused is not None:  # on every rank
            raise refused

    def protect(self, step: int) -> None:
        """Take a snapshot in the memory of all nodes after `step`, if the strategy's `protect` says that one is due.

        Call it after each step, on every rank. `load` then finds the newest snapshot, too. Without `protect` in the
        strategy, it does nothing.

        Args:
            step: The number of steps done.

        Raises:
            CheckpointError: The extras or the step differ between ranks, replicas have diverged, or a node's memory has
                no room for a first snapshot. All ranks raise it.
        """
        if self._snapshots is None and (protect := self.state.protect) is not None:
            self._snapshots = Snapshots(self.root, self.state, protect)
        if self._snapshots is not None:
            self._snapshots.after_step(step)

    def settle(self) -> None:
        """Return when everything that is being saved has been copied.

        Call it before you write to parameters or optimizer states other than by the optimizer's step.
        """
        if self._under_way is not None and self._under_way.snapshot is not None:
            self._under_way.snapshot.before_step()
        if self._snapshots is not None:
            self._snapshots.settle()

    def wait(self) -> Outcome | None:
        """Wait for the checkpoint that is being saved, and return its outcome. Return None if there is none."""
        saving, self._under_way = self._under_way, None
        return saving.outcome() if saving is not None else None

    def close(self) -> Outcome | None:
        """Wait for the checkpoint that is being saved, and give memory and folder back. Every rank must call it.

        Returns:
            The outcome of the last checkpoint, or None if it was waited for already.
        """
        outcome = self.wait()
        if self._snapshots is not None:
            self._snapshots.close(keep=self._has_failed)
            self._snapshots = None
        elif self._exclusive and not self._has_failed and self.state.snapshot and sys.exc_info()[0] is None:
            # It went on from a snapshot, and took none: one node is left, or no step was.
            self._channel.control.each(lambda: None)  # no node removes what another one needs
            memory_of(self.root).close()
        self._release()
        self._memory = StagingMemory()
        return outcome

    def _write(self, step: int, items: WriteItems | str, began: float) -> Outcome:
        failure, is_first = None, self.state.local.everyone.rank == 0
        try:
            storage.write(self.root, step, items, self._lock, self._channel.control)
        except TowpathError as error:  # the same on every rank
            failure = str(error)
            self._refused = RefusedError(failure) if isinstance(error, RefusedError) else None
        except Exception as error:
            failure = described(error)
            self._channel.leave()
        path, self._has_failed = folders.checkpoint_of(self.root, step), failure is not None
        if is_first and failure is not None:
            after = " The training goes on." if self._background else ""
            _LOG.error("CHECKPOINT OF STEP %d NOT SAVED: %s%s", step, failure, after)
        elif is_first:
            try:
                folders.remove_old(self.root, step, *self._keep)
            except (OSError, CheckpointError) as error:  # what was saved is saved
                _LOG.warning("old checkpoints in %s cannot be taken away: %s", self.root, error)
        seconds = time.perf_counter() - began
        return Outcome(step=step, path=path, failure=failure, seconds=seconds)


def _check_state(state: object) -> None:
    if not isinstance(state, State):
        raise CheckpointError(
            f"state: expected a checkpoint.State; got {shown(state)}. The arguments are save(root, step, state) and "
            "Saver(root, state)."
        )


def _is_count(value: object, low: int) -> bool:
    return type(value) is int and value >= low


def save(root: str | Path, step: int, state: State) -> Outcome:
    """Save one checkpoint, and return when it has been written. Every rank must call it, between two steps.

    Use a `Saver` to save while the training continues.

    Args:
        root: The folder for the checkpoint. Ranks of nodes that do not see it send their files to rank 0.
        step: The number of steps done, which names the checkpoint.
        state: What to save.

    Returns:
        The outcome, with the reason if nothing was saved.

    Raises:
        CheckpointError: Another job uses the folder, or the arguments are invalid or differ between ranks.
    """
    saver = Saver(root, state, background=False, exclusive=False)
    try:
        return saver.save(step).outcome()
    finally:
        saver.close()
