"""Send what only one node holds to its buddy, as exact differences against the snapshot before.

A file of a snapshot is sent in chunks. A chunk is one exact message (`codecs/exact`) from the bytes of the last
snapshot to those of this one. Its checksum and the digest of the old bytes are checked before a byte of the copy
changes, so neither a damaged message nor a stale copy goes unnoticed.

Training goes first. A chunk is sent while no rank of the node has a transfer of the model between nodes under way. What
is left when training waits for the snapshot is sent then. The receiver confirms each chunk, so that no more than one is
in the buffers of the network when training sends again.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from towpath.checkpoint.safe_files import writing
from towpath.checkpoint.storage import Written
from towpath.codecs import exact
from towpath.core.formats import dtype_name
from towpath.daemons import start_daemon
from towpath.engine.layout import torch_dtype
from towpath.errors import CheckpointError
from towpath.topology.groups import Groups

# A chunk takes about this long on the link, without latency, and has a size between these. Training waits for one at
# most.
_CHUNK_SECONDS = 0.02
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 22
_PAUSE_SECONDS = 0.002
# Differences take several times as long to encode as values, and where a step changes most bits they are no shorter. So
# both are tried with every so many chunks of a file, and the others are encoded as the shorter one.
_TRIED_EVERY = 8
_CHUNK, _CONFIRMED = 1, 2  # tags
_NOTHING = torch.zeros(16, dtype=torch.uint8)  # no message: it would have no values


class _PartnerError(Exception):
    """The other rank has failed. Its own error is raised on all ranks, so this one has none to add."""


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file that a rank sends to its buddy. `difference`: both hold the one of the last snapshot."""

    name: str
    bytes: int
    dtype: str  # of most of its bytes, as which they are encoded
    difference: bool


def buddy_of(rank: int, nodes: Sequence[int]) -> int | None:
    """Return the rank that keeps copies for `rank`, or None on a single node. `nodes` has the node of each rank.

    It has the same place on the next node.
    """
    order = list(dict.fromkeys(nodes))
    if len(order) == 1:
        return None
    there = order[(order.index(nodes[rank]) + 1) % len(order)]
    place = [r for r in range(len(nodes)) if nodes[r] == nodes[rank]].index(rank)
    ranks = [r for r in range(len(nodes)) if nodes[r] == there]
    return ranks[place % len(ranks)]


@final
class NodeLinks:
    """Whether training uses the links of this node, which all its ranks share: a byte of each rank in a file."""

    def __init__(self, path: Path, place: int, ranks: int) -> None:
        self._place = place
        with path.open("a+b") as file:
            os.posix_fallocate(file.fileno(), 0, ranks)  # a write would end the process if memory were full
            # It is never unmapped, because the thread of a snapshot may outlive an error.
            self._used = mmap.mmap(file.fileno(), ranks)
        self.are_used(False)  # a rank that has died may have left another byte

    def are_used(self, by_me: bool) -> bool:
        """Tell the other ranks whether this one uses them, and return whether any does."""
        self._used[self._place] = by_me
        return any(self._used[:])


def plan_files(
    written: Sequence[Written], held: Sequence[Mapping[str, int]], nodes: Sequence[int]
) -> list[list[SentFile]]:
    """Return by rank which of its files it sends to its buddy: those that no other node has.

    `held`: By rank, the sizes of the files of the last snapshot on its node.
    """
    homes = Counter(name for files, _, _ in written for name in files)
    plan: list[list[SentFile]] = []
    for rank, (files, tensors, _) in enumerate(written):
        buddy, mine = buddy_of(rank, nodes), list[SentFile]()
        for name, file in files.items():
            if buddy is None or homes[name] > 1:
                continue
            sizes = Counter[str]()
            for tensor in tensors.values():
                sizes[dtype_name(tensor.dtype)] += sum(math.prod(box.sizes) for box in tensor.boxes if box.file == name)
            kinds = {dtype_name(dtype) for dtype in exact.DTYPES}
            dtype = next((each for each, _ in sizes.most_common() if each in kinds), "float32")
            known = all(held[each].get(name) == file.bytes for each in (rank, buddy))
            mine.append(SentFile(name, file.bytes, dtype, known))
        plan.append(mine)
    return plan


@final
class BuddyExchange:
    """The files that this rank sends to its buddy, and those of which it keeps copies.

    Args:
        groups: All ranks. No one else may use them meanwhile.
        folder: The snapshot that is being written on this node.
        base: The last snapshot on this node, or None.
        is_turn: Returns whether to send the next chunk now.
    """

    def __init__(self, groups: Groups, folder: Path, base: Path | None, is_turn: Callable[[], bool]) -> None:
        self._groups, self._folder, self._base, self._is_turn = groups, folder, base, is_turn
        self._chunk_bytes = _LEAST_BYTES
        self._fastest = math.inf  # the seconds of the fastest chunk, which are mostly latency on fast links
        self._message, self._is_unanswered = _message_memory(), False  # what arrived last

    def run(self, plan: Sequence[Sequence[SentFile]], nodes: Sequence[int]) -> int:
        """Send and receive what `plan` lists for each rank. Return the bytes that this rank sent.

        If it fails on any rank, its partners end, too. The group cannot be used for another exchange then.
        """
        here, failures = self._groups.rank, list[Exception]()
        to, sources = buddy_of(here, nodes), [r for r, files in enumerate(plan) if files and buddy_of(r, nodes) == here]

        def receive() -> None:
            for rank in sources:
                try:
                    for file in plan[rank]:
                        self._receive(file, rank)
                except _PartnerError:
                    pass
                except Exception as error:  # the caller raises it
                    failures.append(error)
                    with suppress(RuntimeError, _PartnerError):
                        if not self._is_unanswered:  # a sender waits until its message is taken
                            self._next_message(rank)
                        self._confirm(rank, is_right=False)

        receiving, sent = start_daemon("towpath buddy", receive), 0
        try:
            sent = self._send(plan[here], to)
        except _PartnerError:
            pass
        except Exception as error:
            failures.append(error)
            with suppress(RuntimeError):  # no message begins with these
                dist.send(_NOTHING, group=self._groups.parent, group_dst=to, tag=_CHUNK)
        receiving.join()
        if failures:
            raise failures[0]
        return sent

    def _send(self, files: Sequence[SentFile], to: int | None) -> int:
        sent = 0
        memory, confirmed = (_message_memory(), _message_memory()), torch.empty(1, dtype=torch.uint8)
        for file in files:
            new, tail = _words(self._folder / file.name, file)
            old = _words(cast(Path, self._base) / file.name, file)[0] if file.difference else None
            start, number, before = 0, 0, old
            while start < len(new):
                end = min(start + self._chunk_bytes // new.itemsize, len(new))
                if old is not None and number % _TRIED_EVERY == 0:
                    encoded = _shorter(old[start:end], new[start:end], *memory)
                    before = old if exact.is_difference(encoded) else None
                else:
                    encoded = _encoded(None if before is None else before[start:end], new[start:end], memory[0])
                while not self._is_turn():
                    time.sleep(_PAUSE_SECONDS)
                began = time.perf_counter()
                dist.send(encoded, group=self._groups.parent, group_dst=to, tag=_CHUNK)
                dist.recv(confirmed, group=self._groups.parent, group_src=to, tag=_CONFIRMED)
                if not confirmed.item():
                    raise _PartnerError
                self._adapt(time.perf_counter() - began)
                start, number, sent = end, number + 1, sent + len(encoded)
            if len(tail):
                dist.send(tail, group=self._groups.parent, group_dst=to, tag=_CHUNK)
        return sent

    def _adapt(self, seconds: float) -> None:
        """Let the next chunk take about as long as it should. `seconds`: from its sending to its confirmation."""
        self._fastest = min(self._fastest, seconds)
        factor = min(2.0, max(0.5, _CHUNK_SECONDS / max(seconds - self._fastest, 1e-6)))
        self._chunk_bytes = int(min(_MOST_BYTES, max(_LEAST_BYTES, self._chunk_bytes * factor))) // 8 * 8

    def _receive(self, file: SentFile, source: int) -> None:
        with writing(path := self._folder / file.name):
            with path.open("xb") as made:  # a write to a mapped file would end the process if memory were full
                os.posix_fallocate(made.fileno(), 0, file.bytes)
            new, tail = _words(path, file, shared=True)
            old = _words(cast(Path, self._base) / file.name, file)[0] if file.difference else None
            start = 0
            while start < len(new):
                message = self._next_message(source)
                end = start + int(message[8:16].view(torch.int64))  # how many values the message has
                if not start < end <= len(new):
                    raise CheckpointError(
                        f"rank {source} sent values {start} to {end} of {file.name}, which has {len(new)}. The network "
                        "or the memory of a node is faulty if this happens again."
                    )
                is_difference = old is not None and exact.is_difference(message)
                if old is not None and is_difference:
                    new[start:end] = old[start:end]
                try:
                    exact.decode(message, new[start:end], is_difference)
                except exact.MessageError as error:
                    what = "the last copy or the message was damaged. The next snapshot is sent whole."
                    raise CheckpointError(f"{file.name} of rank {source}: {what}") from error
                self._confirm(source, is_right=True)
                start = end
            if len(tail):
                dist.recv(tail, group=self._groups.parent, group_src=source, tag=_CHUNK)

    def _next_message(self, source: int) -> Tensor:
        dist.recv(self._message, group=self._groups.parent, group_src=source, tag=_CHUNK)
        if not self._message[: len(_NOTHING)].any():
            raise _PartnerError
        self._is_unanswered = True
        return self._message

    def _confirm(self, source: int, is_right: bool) -> None:
        self._is_unanswered = False
        answer = torch.tensor([is_right], dtype=torch.uint8)
        dist.send(answer, group=self._groups.parent, group_dst=source, tag=_CONFIRMED)


def _encoded(old: Tensor | None, new: Tensor, memory: Tensor) -> Tensor:
    """Return the message of a chunk: its differences, or without `old` its values."""
    nbytes = exact.encode(old, new, memory)
    assert nbytes is not None  # on the host
    return memory[:nbytes]


def _shorter(old: Tensor, new: Tensor, memory: Tensor, other: Tensor) -> Tensor:
    """Return the shorter message of a chunk."""
    return min(_encoded(old, new, memory), _encoded(None, new, other), key=len)


def _message_memory() -> Tensor:
    """Return memory for the longest message of a chunk. What arrives may be shorter."""
    return torch.empty(exact.message_bound(_MOST_BYTES // 2, torch.bfloat16), dtype=torch.uint8)


def _words(path: Path, file: SentFile, shared: bool = False) -> tuple[Tensor, Tensor]:
    """Return the mapped file as values of its dtype, and the bytes after the last whole one. Writes need `shared`."""
    octets = torch.from_file(str(path), shared=shared, size=file.bytes, dtype=torch.uint8)
    dtype = torch_dtype(file.dtype)
    whole = file.bytes // dtype.itemsize * dtype.itemsize
    return octets[:whole].view(dtype), octets[whole:]
