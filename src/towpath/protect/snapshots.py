"""Snapshots of a training in the memory of its nodes, from which it goes on after a node is lost.

A snapshot is a checkpoint (`towpath.checkpoint`) whose files are in the memory of the nodes. Each node has those of its
ranks, copies of its buddy's, and the manifest of all. Slices that several nodes hold are in a file of the same name and
content on each of these nodes, and are not sent. The checksums in the manifest show whether they are equal.

    training thread    State.collect, copies of what may change at once
    thread             the other copies; files; agreement on the manifest; exchange with the buddies; publishing

All ranks agree before a snapshot is published, and again before the one before is removed. So at any moment every node
has a complete one.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import final

from towpath.checkpoint import storage
from towpath.checkpoint.manifest import Manifest, read_manifest, step_of, write_manifest
from towpath.checkpoint.staging import Snapshot, StagingMemory
from towpath.checkpoint.state import State
from towpath.checkpoint.storage import DivergedError, WriteItems, Written
from towpath.core.strategy import Protect
from towpath.daemons import start_daemon
from towpath.errors import CheckpointError, TowpathError
from towpath.logs import logger
from towpath.protect import timeline, warm
from towpath.protect.buddies import BuddyExchange, NodeLinks, SentFile, buddy_of, plan_files
from towpath.protect.keeper import start_keeper
from towpath.protect.memory import NodeMemory, memory_of
from towpath.topology.groups import Groups
from towpath.topology.together import AllRanks, described

_LOG = logger("protect")
NOTICED = "noticed"  # the note with the time of a loss
_LONG_WAIT_SECONDS = 1.0  # of training, for a snapshot: it is told then


class _LostError(CheckpointError):
    """This rank has lost others while a snapshot was taken. They cannot agree on anything any more."""


@final
class NodeRanks:
    """The ranks of a job on each node, and this node's memory. Every rank must create one at the same time.

    Attributes:
        memory: The memory of this node.
        nodes: The node of each rank, as a number.
        mine: The ranks of this node.
        leads: Whether this rank is the first one of its node.
    """

    def __init__(self, root: str | Path, groups: Groups) -> None:
        self.memory: NodeMemory = memory_of(root)
        names = AllRanks(groups, "looking into the memory of nodes", CheckpointError).gather(self._enter)
        order = list(dict.fromkeys(names))
        self.nodes = [order.index(name) for name in names]
        self.mine = [rank for rank, name in enumerate(names) if name == names[groups.rank]]
        self.leads = self.mine[0] == groups.rank

    def _enter(self) -> str:
        """Hold this node's memory, and return its name."""
        self.memory.hold()
        self.memory.note("node", uuid.uuid4().hex)
        return self.memory.noted("node")

    def noticed(self) -> float | None:
        """Return when this node noticed that another one is lost, or None, and forget it."""
        found = self.memory.noted(NOTICED)
        if self.leads:
            self.memory.forget(NOTICED)
        return found

    def remove_snapshots(self, but: Path | None = None) -> None:
        """Remove the snapshots on this node, all `but` one."""
        for path in self.memory.snapshots() if self.leads else ():
            if path != but:
                self.memory.remove(step_of(path))


def run_of(manifest: Manifest) -> str:
    """Return the name of the run that took a snapshot. Snapshots of two runs are never mixed."""
    return manifest.values.get("snapshot", {}).get("run", "")


@final
class Snapshots:
    """The snapshots of a job, on one rank. Every rank creates one and makes the same calls."""

    def __init__(self, root: str | Path, state: State, protect: Protect) -> None:
        self._state, self._protect = state, protect
        self._everyone = state.local.everyone
        self._engines = [*state.local.engines.values()]
        self._ranks = NodeRanks(root, self._everyone)
        self._memory = self._ranks.memory
        self._staging = StagingMemory()
        self._control = self._new_channel()
        # The step of the snapshot that all nodes hold.
        self._base = None if state.snapshot is None else step_of(state.snapshot)
        self._sends_all = False  # after a failure, because what a buddy holds may be damaged
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._failure: TowpathError | None = None  # of the last snapshot, the same on all ranks
        self._awaited = threading.Event()  # whether training waits for the snapshot
        self._told_waited = False
        self._began = 0
        self.sent_bytes = 0  # so far, to the buddy
        self._heals = self._lacks_copies = state.snapshot is not None  # a new node keeps no copies for its buddy yet
        state.add_saver(self)
        for engine in self._engines:
            engine.has_snapshots = True
        self._control.each(self._open)
        self._name = self._control.on_rank_0(self._run)

    def _open(self) -> None:
        """Remove the snapshots of another run. Only the one that was loaded is of this run."""
        mine = self._ranks.mine
        self._links = NodeLinks(self._memory.path / "links", mine.index(self._everyone.rank), len(mine))
        if self._ranks.leads:
            self._memory.sweep()
            self._ranks.remove_snapshots(but=self._state.snapshot)
            self._memory.forget(NOTICED)  # of a loss after which a checkpoint was loaded
            start_keeper(self._memory, warm=warm.forks and self._everyone.device.type == "cpu")
        atexit.register(self._note_end)

    def _note_end(self) -> None:
        """Note when this rank has ended in the middle of the training: it has noticed that another one is lost."""
        with suppress(OSError):
            self._memory.note(NOTICED, time.time())

    def _run(self) -> str:
        """Return the name of this run: that of the snapshot which was loaded, or a new one."""
        loaded = self._state.snapshot
        return uuid.uuid4().hex if loaded is None else run_of(read_manifest(loaded))

    def _new_channel(self) -> AllRanks:
        # Nothing else uses the group, and nothing uses it again after a failure.
        number: int = next(self._everyone.shared("snapshots", count))
        return AllRanks(self._everyone.apart(f"snapshots {number}"), "taking a snapshot", CheckpointError)

    # --- the training thread ------------------------------------------------------------------------------------------

    def after_step(self, step: int) -> None:
        """Note that so many steps are done, and begin a snapshot if one is due.

        Raises:
            CheckpointError: Replicas have diverged, or the first snapshot could not be taken. Every rank raises it.
        """
        if self._heals and step != self._base:
            self._heals = False
            timeline.mark("stepped")
            if self._everyone.rank == 0 and (parts := timeline.seconds()):
                text = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items())
                _LOG.warning(
                    "healed: the next step came %.1f s after a loss was noticed (%s)", sum(parts.values()), text
                )
        if step >= self._began + self._protect.delay:
            began = time.monotonic()
            self.wait()
            waited = time.monotonic() - began
            if waited > _LONG_WAIT_SECONDS and not self._told_waited and self._everyone.rank == 0:
                self._told_waited = True
                text = "training waited %.1f s for the snapshot of step %d. protect=%d takes and sends them less often."
                _LOG.warning(text, waited, self._began, 2 * self._protect.every)
        if step % self._protect.interval == 0 or self._lacks_copies:
            self._began, self._lacks_copies = step, False
            self._begin(step)
            if self._protect.delay == 0:
                self.wait()

    def wait(self) -> None:
        """Wait for the snapshot that is being taken. It raises as `after_step` does."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._awaited.set()
            thread.join()
        failure = self._failure
        self._failure = failure if isinstance(failure, _LostError) else None
        if failure is None:
            return
        if self._base is None or isinstance(failure, (DivergedError, _LostError)):
            raise failure
        if self._everyone.rank == 0:
            _LOG.error("NO SNAPSHOT WAS TAKEN: %s A lost node now costs the steps since step %d.", failure, self._base)
        self._control, self._sends_all = self._new_channel(), True

    def settle(self) -> None:
        """Return when everything has been copied, so that it may be changed."""
        if self._snapshot is not None:
            self._snapshot.before_step()

    def close(self, *, keep: bool) -> None:
        """End, and remove the snapshots unless they are to be kept. Every rank must call it.

        While an error is handled, it keeps them and waits for no other rank: this may be a `finally` of one rank alone.
        """
        if sys.exc_info()[0] is None:
            self.wait()
            atexit.unregister(self._note_end)
            self._control.each(lambda: None)  # no node removes what another one needs
            if self._ranks.leads and not keep:
                self._memory.close()
        self._memory.release()
        for engine in self._engines:
            engine.has_snapshots = False

    def _begin(self, step: int) -> None:
        items: WriteItems | str
        self._snapshot = None
        try:
            items = self._state.collect(self._ranks.nodes)
            pieces, self._snapshot = self._staging.snapshot(items.pieces, self._engines)
            items = replace(items, pieces=pieces)
        except Exception as error:  # all ranks get it, which would otherwise wait for this one
            items = described(error)
        self._awaited.clear()
        work = partial(self._take, step, items, self._snapshot)
        self._thread = start_daemon(f"towpath snapshot {step}", work, self._awaited.set)

    # --- the thread of a snapshot -------------------------------------------------------------------------------------

    def _take(self, step: int, items: WriteItems | str, snapshot: Snapshot | None) -> None:
        try:
            if snapshot is not None:
                snapshot.take()
        except Exception as error:
            items = described(error)
        try:
            self._write(step, items)
        except TowpathError as error:  # the same on every rank
            self._failure = error
        except Exception as error:  # a rank is lost, which training notices, too
            base = "no snapshot" if self._base is None else f"the snapshot of step {self._base}"
            lost = f"rank {self._everyone.rank} has lost a rank while the snapshot of step {step} was taken"
            self._failure = _LostError(f"{lost}: {described(error)} Start all ranks again. This node holds {base}.")
            # Others may wait for this rank. What still refers to the group would keep it connected.
            group, self._control.groups.parent = self._control.groups.parent, None
            if group is not None and group is not self._everyone.parent:
                self._everyone.leave(group)

    def _write(self, step: int, items: WriteItems | str) -> None:
        control, memory, base = self._control, self._memory, self._base
        announced = control.gather(lambda: storage.announced(step, items))
        sizes = storage.check_announced(announced, CheckpointError)  # the same on every rank
        folder = control.each(lambda: self._prepare(step, sizes))
        before = None if base is None or self._sends_all else memory.folder_of(base)
        if before is not None and not before.is_dir():  # a load since has forgotten it
            before = None

        def write() -> tuple[Written, dict[str, int]]:
            held = {} if before is None else {path.name: path.stat().st_size for path in before.iterdir()}
            return storage.write_files(folder / f"rank-{self._everyone.rank:05d}", items), held

        def plan(ranks: list[tuple[Written, dict[str, int]]]) -> tuple[Manifest, list[list[SentFile]]]:
            written = [each for each, _ in ranks]
            strategy = items.strategy if isinstance(items, WriteItems) else None
            manifest = storage.manifest_of(step, written, strategy)
            manifest = replace(manifest, values={**manifest.values, "snapshot": {"run": self._name}})
            return manifest, plan_files(written, [held for _, held in ranks], self._ranks.nodes)

        manifest, sent = control.combine(write, plan)
        exchange = BuddyExchange(control.groups, folder, before, self._is_turn)
        self.sent_bytes += control.each(lambda: exchange.run(sent, self._ranks.nodes))
        control.each(lambda: self._check_copies(folder, manifest, sent))
        control.each(lambda: self._publish(step, folder, manifest))
        self._base, self._sends_all = step, False
        try:
            self._ranks.remove_snapshots(but=memory.folder_of(step))  # also one that other nodes could not publish
        except OSError as error:  # the new one is complete
            _LOG.warning("rank %d: old snapshots stay until the next one is taken: %s", self._everyone.rank, error)

    def _prepare(self, step: int, sizes: Sequence[tuple[int, int]]) -> Path:
        """Return the folder for this node's files, or raise if its memory has no room for them."""
        copied = [own for rank, (own, _) in enumerate(sizes) if buddy_of(rank, self._ranks.nodes) in self._ranks.mine]
        if self._ranks.leads:  # no other rank, whose new folder this one might sweep away
            self._memory.sweep()
            self._memory.check_room(sum(sum(sizes[r]) for r in self._ranks.mine) + sum(copied) + storage.MARGIN_BYTES)
            self._memory.new_partial(step)
        return self._memory.folder_of(step, ".partial")

    def _is_turn(self) -> bool:
        """Return whether the buddy's next chunk is sent now."""
        mine = any(engine.comm.watchdog.status.uses_links for engine in self._engines)
        return not self._links.are_used(mine) or self._awaited.is_set()

    def _check_copies(self, folder: Path, manifest: Manifest, sent: Sequence[Sequence[SentFile]]) -> None:
        for rank, files in enumerate(sent):
            if buddy_of(rank, self._ranks.nodes) == self._everyone.rank:
                for file in files:
                    manifest.check_file(folder, file.name)

    def _publish(self, step: int, folder: Path, manifest: Manifest) -> None:
        if self._ranks.leads:
            write_manifest(folder, manifest, self._memory.check_room)
            read_manifest(folder)  # it must be possible, and the boxes must be all of each tensor
            self._memory.publish(step)
