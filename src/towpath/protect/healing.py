"""Go on from a snapshot in the memory of the nodes that are left.

    found_in_memory     the snapshots that nodes hold, newest first
    restore             check files, bring them to the nodes whose ranks read them, and load them like a checkpoint

A file is read or sent only if its checksum is that in the manifest, and what arrives is checked again. In place of a
damaged file, the copy of another node is used.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from towpath.checkpoint import storage
from towpath.checkpoint.manifest import NAME, Manifest, read_manifest, write_manifest
from towpath.checkpoint.restoring import Restore
from towpath.checkpoint.safe_files import DamagedError, writing
from towpath.checkpoint.state import State
from towpath.errors import CheckpointError
from towpath.logs import logger
from towpath.protect.memory import NodeMemory
from towpath.protect.snapshots import NodeRanks, run_of
from towpath.topology.together import AllRanks

_LOG = logger("protect")
_PIECE_BYTES = 16 << 20
_NAMED_FILES = 3

Value = TypeVar("Value")

# A snapshot on a node: its run, its step, the digest of its manifest, the names of its files, and those that are here.
Listed = tuple[str, int, str, list[str], list[str]]


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot in the memory of some nodes. `digest` is that of its manifest, which is the same on all of them."""

    step: int
    digest: str
    source: int  # a rank whose node has the manifest
    homes: dict[str, set[int]] = field(repr=False)  # by file, the nodes that have it


@dataclass(frozen=True, slots=True)
class Move:
    """A file that one rank sends to another, whose node lacks it."""

    name: str
    sender: int
    receiver: int


def found_in_memory(ranks: NodeRanks, control: AllRanks) -> list[Found]:
    """Return the snapshots in the memory of all nodes, newest first. Every rank must call it.

    Raises:
        CheckpointError: Nodes have snapshots of different runs, and it is not clear which one this is.
    """
    listed = _gathered(control, lambda: _listed(ranks.memory) if ranks.leads else [])
    nodes_of_run = Counter(run for of_rank in listed for run in {run for run, *_ in of_rank})
    runs = [run for run, nodes in nodes_of_run.items() if nodes == max(nodes_of_run.values())]
    if len(runs) > 1:
        here, there = (next(r for r, each in enumerate(listed) if run in {e[0] for e in each}) for run in runs[:2])
        raise CheckpointError(
            f"the nodes of rank {here} and rank {there} hold snapshots of different runs. Remove {ranks.memory.path} "
            "on the node whose run this is not."
        )
    found: dict[tuple[int, str], Found] = {}
    for rank, of_rank in enumerate(listed):
        for run, step, digest, names, present in of_rank:
            if run != runs[0]:
                _LOG.error("THE NODE OF RANK %d HAS A SNAPSHOT OF ANOTHER RUN, of step %d. It is not used.", rank, step)
                continue
            each = found.setdefault((step, digest), Found(step, digest, rank, {name: set() for name in names}))
            for name in present:
                each.homes[name].add(ranks.numbers[rank])
    return sorted(found.values(), key=lambda f: (f.step, all(f.homes.values()), f.digest), reverse=True)


def _listed(memory: NodeMemory) -> list[Listed]:
    found: list[Listed] = []
    for folder in memory.snapshots():
        try:
            manifest = read_manifest(folder)
            run, digest = run_of(manifest), hashlib.sha256((folder / NAME).read_bytes()).hexdigest()
        except (DamagedError, OSError) as error:
            _LOG.error("SNAPSHOT %s CANNOT BE USED: %s", folder.name, error)
            continue
        sizes = {path.name: path.lstat().st_size for path in folder.iterdir()}
        present = [name for name, file in manifest.files.items() if sizes.get(name) == file.bytes]
        found.append((run, manifest.step, digest, [*manifest.files], present))
    return found


def restore(found: Found, state: State, ranks: NodeRanks, control: AllRanks) -> tuple[Path, int, list[str]]:
    """Load a snapshot. Every rank must call it.

    Return its folder on this node, the bytes that were sent to nodes without its files, and notes.

    Raises:
        DamagedError: Files of it are on no node, or only damaged.
        CheckpointError: It is of another model.
    """
    me, memory = control.groups.rank, ranks.memory
    folder = memory.folder_of(found.step)
    manifest = _gathered(control, lambda: read_manifest(folder) if me == found.source else None)[found.source]
    assert manifest is not None
    restoring = control.each(lambda: Restore(state, manifest))
    reading = control.each(lambda: storage.Reading(restoring.targets, restoring.manifest, me == 0))
    needs = _gathered(control, lambda: reading.files)
    moves = _planned(found, manifest, needs, ranks, control)

    # A node that has no part of the snapshot gets it under another name first, so that it is whole when it has its own.
    is_new = _gathered(control, lambda: ranks.leads and not _holds(folder, found.digest))
    lacking = {ranks.numbers[rank] for rank, new in enumerate(is_new) if new}
    here = memory.folder_of(found.step, ".partial") if ranks.numbers[me] in lacking else folder
    control.each(lambda: here.mkdir(mode=0o700, exist_ok=True))
    control.each(lambda: _move(moves, here, manifest, control))
    control.each(lambda: _complete(found.step, here, folder, manifest, memory) if ranks.leads else None)
    control.each(lambda: reading.fill(folder))
    control.each(restoring.check)
    sent = sum(manifest.files[move.name].bytes for move in moves)
    return folder, sent, control.each(restoring.finish)


def _holds(folder: Path, digest: str) -> bool:
    try:
        return hashlib.sha256((folder / NAME).read_bytes()).hexdigest() == digest
    except OSError:
        return False


def _complete(step: int, here: Path, folder: Path, manifest: Manifest, memory: NodeMemory) -> None:
    if here != folder:
        write_manifest(here, manifest)
        memory.publish(step)


def _planned(
    found: Found, manifest: Manifest, needs: Sequence[set[str]], ranks: NodeRanks, control: AllRanks
) -> list[Move]:
    """Return which files are sent to nodes whose ranks read them. Every copy that is used was read and is whole."""
    numbers, homes = ranks.numbers, {name: set(nodes) for name, nodes in found.homes.items()}
    on_node = {node: [r for r, each in enumerate(numbers) if each == node] for node in set(numbers)}
    needed = sorted({(numbers[rank], name) for rank, names in enumerate(needs) for name in names})
    whole: set[tuple[int, str]] = set()
    while True:
        load, chosen = Counter[int](), dict[tuple[int, str], int]()
        if lost := sorted({name for _, name in needed if not homes[name]}):
            raise DamagedError(
                f"no node has a whole copy of {', '.join(lost[:_NAMED_FILES])}{'…' if len(lost) > _NAMED_FILES else ''}"
                ": the nodes that held them and their buddies are lost, or their memory is damaged."
            )
        for node, name in needed:
            home = node if node in homes[name] else min(homes[name], key=lambda each: (load[each], each))
            load[home] += manifest.files[name].bytes if home != node else 0
            chosen[node, name] = home
        unchecked = sorted({(home, name) for (_, name), home in chosen.items()} - whole)
        if not unchecked:
            break
        mine = [
            (home, name)
            for i, (home, name) in enumerate(unchecked)
            if on_node[home][i % len(on_node[home])] == control.groups.rank
        ]
        for damaged in _gathered(control, partial(_damaged, mine, ranks.memory.folder_of(found.step), manifest)):
            for home, name in damaged:
                homes[name].discard(home)
                _LOG.error("%s IN THE MEMORY OF NODE %d IS DAMAGED. Trying another copy.", name, home)
        whole |= {(home, name) for home, name in unchecked if home in homes[name]}
    return [
        Move(name, on_node[home][i % len(on_node[home])], on_node[node][i % len(on_node[node])])
        for i, ((node, name), home) in enumerate(chosen.items())
        if home != node
    ]


def _damaged(files: Sequence[tuple[int, str]], folder: Path, manifest: Manifest) -> list[tuple[int, str]]:
    """Return those of this node's `files` that are not as they were written."""
    found: list[tuple[int, str]] = []
    for node, name in files:
        try:
            manifest.check_file(folder, name)
        except DamagedError:
            found.append((node, name))
    return found


def _move(moves: Sequence[Move], here: Path, manifest: Manifest, control: AllRanks) -> None:
    """Send and receive files. All ranks go through the moves in one order, so no two ranks wait for each other."""
    me, group = control.groups.rank, control.groups.parent
    for move in moves:
        size, path = manifest.files[move.name].bytes, here / move.name
        if move.sender == me:
            octets = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
            for piece in octets.split(_PIECE_BYTES):
                dist.send(piece, group=group, group_dst=move.receiver)
        elif move.receiver == me:
            crc, arriving = 0, path.with_name(f"{move.name}.arriving")
            with writing(path), arriving.open("wb") as file:
                for start in range(0, size, _PIECE_BYTES):
                    piece = torch.empty(min(_PIECE_BYTES, size - start), dtype=torch.uint8)
                    dist.recv(piece, group=group, group_src=move.sender)
                    arrived: Any = piece.numpy()
                    crc = zlib.crc32(arrived, crc)
                    file.write(arrived)
            if crc != manifest.files[move.name].crc32:
                raise DamagedError(f"{path}, which rank {move.sender} has sent, did not arrive as it was sent.")
            arriving.replace(path)


def _gathered(control: AllRanks, work: Callable[[], Value]) -> list[Value]:
    """Return what `work` returns on every rank, by rank. If it fails on one, all raise its error."""
    return control.groups.all_gather_objects(control.each(work))
