"""Go on from a snapshot in the memory of the nodes that are left.

    found_in_memory     the snapshots that nodes hold, newest first
    restore             check files, bring them to the nodes whose ranks read them, and load them like a checkpoint

A file is read or sent only if its checksum is that in the manifest, and what arrives is checked again. In place of a
damaged file, the copy of another node is used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from towpath.checkpoint import storage
from towpath.checkpoint.manifest import digest_of, read_manifest, write_manifest
from towpath.checkpoint.moving import move, plan_moves
from towpath.checkpoint.restoring import Restore
from towpath.checkpoint.safe_files import DamagedError
from towpath.checkpoint.state import State
from towpath.errors import CheckpointError
from towpath.logs import logger
from towpath.protect.memory import NodeMemory
from towpath.protect.snapshots import NodeRanks, run_of
from towpath.topology.together import AllRanks

_LOG = logger("protect")

# A snapshot on a node: its run, its step, the digest of its manifest, the names of its files, and those that are here.
Listed = tuple[str, int, str, list[str], list[str]]


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot in the memory of some nodes. `digest` is that of its manifest, which is the same on all of them."""

    step: int
    digest: str
    source: int  # a rank whose node has the manifest
    homes: dict[str, set[int]] = field(repr=False)  # by file, the nodes that have it


def found_in_memory(ranks: NodeRanks, control: AllRanks) -> list[Found]:
    """Return the snapshots in the memory of all nodes, newest first. Every rank must call it.

    Raises:
        CheckpointError: Nodes have snapshots of different runs, and it is not clear which one this is.
    """
    listed = control.gather(lambda: _listed(ranks.memory) if ranks.leads else [])
    nodes_of_run = Counter(run for of_rank in listed for run in {run for run, *_ in of_rank})
    runs = [run for run, nodes in nodes_of_run.items() if nodes == max(nodes_of_run.values())]
    if len(runs) > 1:
        here, there = (next(r for r, each in enumerate(listed) if run in {e[0] for e in each}) for run in runs[:2])
        raise CheckpointError(
            f"the nodes of rank {here} and rank {there} hold snapshots of different runs. Remove {ranks.memory} "
            "on the node whose run this is not."
        )
    found: dict[tuple[int, str], Found] = {}
    for rank, of_rank in enumerate(listed):
        for run, step, digest, names, present in of_rank:
            if run != runs[0]:
                if control.groups.rank == 0:
                    _LOG.error("THE NODE OF RANK %d HAS A SNAPSHOT OF ANOTHER RUN, of step %d: not used.", rank, step)
                continue
            each = found.setdefault((step, digest), Found(step, digest, rank, {name: set() for name in names}))
            for name in present:
                each.homes[name].add(ranks.nodes[rank])
    return sorted(found.values(), key=lambda f: (f.step, all(f.homes.values()), f.digest), reverse=True)


def _listed(memory: NodeMemory) -> list[Listed]:
    memory.sweep()  # what dead ranks left unfinished must not be taken for files of a snapshot that is healed
    found: list[Listed] = []
    for folder in memory.snapshots():
        try:
            manifest, digest = read_manifest(folder), digest_of(folder)
            assert digest is not None
        except DamagedError as error:
            _LOG.error("SNAPSHOT %s CANNOT BE USED: %s", folder.name, error)
            continue
        sizes = {path.name: path.lstat().st_size for path in folder.iterdir()}
        present = [name for name, file in manifest.files.items() if sizes.get(name) == file.bytes]
        found.append((run_of(manifest), manifest.step, digest, [*manifest.files], present))
    return found


def restore(found: Found, state: State, ranks: NodeRanks, control: AllRanks) -> tuple[Path, int, list[str]]:
    """Load a snapshot. Every rank must call it.

    Return its folder on this node, the bytes that were sent to nodes without its files, and notes.

    Raises:
        DamagedError: Files of it are on no node, or only damaged.
        CheckpointError: It is of another model, or a node has no room for the files that it lacks.
    """
    me, memory = control.groups.rank, ranks.memory
    folder = memory.folder_of(found.step)
    manifest = control.gather(lambda: read_manifest(folder) if me == found.source else None)[found.source]
    assert manifest is not None
    try:
        restoring = control.each(lambda: Restore(state, manifest))
    except CheckpointError as error:  # of another model
        advice = f"To begin anew, remove {memory} on every node."
        raise type(error)(f"the snapshot of step {found.step} cannot be loaded: {error} {advice}") from error
    reading = control.each(lambda: storage.Reading(restoring.targets, restoring.manifest, me == 0))
    moves = plan_moves(found.homes, manifest, folder, reading.files, ranks.nodes, control)

    # A node that has no part of the snapshot gets it under another name first, so that it is whole when it has its own.
    is_new = control.each(lambda: digest_of(folder) != found.digest)

    def place() -> Path:
        memory.check_room(sum(manifest.files[each.name].bytes for each in moves if each.receiver in ranks.mine))
        return memory.new_partial(found.step) if is_new else folder

    def publish() -> None:
        if is_new and ranks.leads:
            write_manifest(here, manifest, memory.check_room)
            memory.publish(found.step)

    here = control.each(place)
    control.each(lambda: move(moves, here, manifest.files, control.groups))
    control.each(publish)
    control.each(lambda: reading.fill(folder))
    control.each(restoring.check)
    sent = sum(manifest.files[each.name].bytes for each in moves)
    return folder, sent, control.each(restoring.finish)
