"""Files of a checkpoint between ranks: from nodes that have them to nodes whose ranks read or publish them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from towpath.checkpoint.manifest import Manifest, StoredFile
from towpath.checkpoint.safe_files import DamagedError, writing
from towpath.errors import CheckpointError
from towpath.logs import logger
from towpath.topology.groups import Groups
from towpath.topology.together import AllRanks

_LOG = logger("checkpoint")
_PIECE_BYTES = 16 << 20
_NAMED_FILES = 3


@dataclass(frozen=True, slots=True)
class Move:
    """A file that one rank sends to another, whose node lacks it."""

    name: str
    sender: int
    receiver: int


def plan_moves(
    homes: Mapping[str, Set[int]],
    manifest: Manifest,
    folder: Path,
    reads: Set[str],
    nodes: Sequence[int],
    control: AllRanks,
) -> list[Move]:
    """Return which files are sent to nodes whose ranks read them. Every copy that is used was read and is whole.

    Every rank must call it.

    Args:
        homes: By file, the nodes that have it.
        manifest: The checkpoint.
        folder: Its folder on this node.
        reads: The files that this rank reads.
        nodes: The node of each rank, as a number.
        control: All ranks.

    Raises:
        DamagedError: No node has a whole copy of a file. All ranks raise it.
    """
    homes = {name: set(have) for name, have in homes.items()}
    on_node = {node: [r for r, each in enumerate(nodes) if each == node] for node in set(nodes)}
    needed = sorted({(nodes[rank], name) for rank, names in enumerate(control.gather(lambda: reads)) for name in names})

    def rank_of(node: int, number: int) -> int:
        """Return the rank of a node that does the work with this number. Its ranks take turns."""
        return on_node[node][number % len(on_node[node])]

    whole: set[tuple[int, str]] = set()
    while True:
        load, chosen = Counter[int](), dict[tuple[int, str], int]()
        if lost := sorted({name for _, name in needed if not homes[name]}):
            raise DamagedError(
                f"no node has a whole copy of {', '.join(lost[:_NAMED_FILES])}{'…' if len(lost) > _NAMED_FILES else ''}"
                ": the nodes that held it are lost, or what they hold is damaged."
            )
        for node, name in needed:
            home = node if node in homes[name] else min(homes[name], key=lambda each: (load[each], each))
            load[home] += manifest.files[name].bytes if home != node else 0
            chosen[node, name] = home
        unchecked = sorted({(home, name) for (_, name), home in chosen.items()} - whole)
        if not unchecked:
            break
        mine = [each for i, each in enumerate(unchecked) if rank_of(each[0], i) == control.groups.rank]
        for damaged in control.gather(partial(_damaged, mine, folder, manifest)):
            for home, name in damaged:
                homes[name].discard(home)
                if control.groups.rank == 0:
                    _LOG.error("%s OF NODE %d IS DAMAGED. Trying another copy.", name, home)
        whole |= {(home, name) for home, name in unchecked if home in homes[name]}
    return [
        Move(name, rank_of(home, i), rank_of(node, i))
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


def move(moves: Sequence[Move], folder: Path, files: Mapping[str, StoredFile], groups: Groups) -> None:
    """Send files from `folder`, and receive into it. Every rank must call it with the same moves.

    All go through them in one order, so no two ranks wait for each other. If one fails, it raises at the end, because
    others wait until it has sent and received the rest.
    """
    me, group, errors = groups.rank, groups.parent, list[Exception]()
    for each in moves:
        stored, path = files[each.name], folder / each.name
        sizes = [min(_PIECE_BYTES, stored.bytes - at) for at in range(0, stored.bytes, _PIECE_BYTES)]
        if each.sender == me:
            try:
                octets = torch.from_file(str(path), shared=False, size=stored.bytes, dtype=torch.uint8)
                pieces = iter(octets.split(_PIECE_BYTES))
            except RuntimeError as error:
                errors.append(error)
                pieces = (torch.zeros(size, dtype=torch.uint8) for size in sizes)
            for piece in pieces:
                dist.send(piece, group=group, group_dst=each.receiver)
        elif each.receiver == me:
            pieces = _received(each, sizes, group)
            try:
                _write(path, pieces, stored, each.sender)
            except CheckpointError as error:
                errors.append(error)
                for _ in pieces:
                    pass
    if errors:
        raise errors[0]


def _received(move: Move, sizes: Sequence[int], group: dist.ProcessGroup | None) -> Iterator[Tensor]:
    for size in sizes:
        piece = torch.empty(size, dtype=torch.uint8)
        dist.recv(piece, group=group, group_src=move.sender)
        yield piece


def _write(path: Path, pieces: Iterator[Tensor], stored: StoredFile, sender: int) -> None:
    """Write the file that is `stored`, and give it its name if it is whole."""
    crc, arriving = 0, path.with_name(f"{path.name}.arriving")
    with writing(path):
        try:
            with arriving.open("wb") as file:
                for piece in pieces:
                    arrived: Any = piece.numpy()
                    crc = zlib.crc32(arrived, crc)
                    file.write(arrived)
            if crc != stored.crc32:
                raise DamagedError(f"{path}, which rank {sender} has sent, did not arrive as it was sent.")
            arriving.replace(path)
        finally:
            arriving.unlink(missing_ok=True)  # of a failure: it would fill the memory of the node
