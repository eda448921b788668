"""The queues of one model: in which order transfers go, in which wire buffers, and under which tags. What runs them:
threads on a CPU (`thread_stream.py`), CUDA streams on a GPU (`cuda_stream.py`).

All models that are sharded over one process group share its streams, and with them the threads, and the connections of
the process groups: both stay as they are however many models are made one after the other. That the transfers of
several models keep one order on all ranks follows from sharing, too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import final

import torch

from towpath.collectives.bound_transfer import BoundMatrices, BoundTransfer
from towpath.collectives.workspace import WireBuffers, Workspace
from towpath.core.journal import Journal
from towpath.core.queues import QUEUES, WAYS
from towpath.core.strategy import WIRED, Kind
from towpath.core.transfer import Needs
from towpath.core.unit_plan import UnitPlan, largest
from towpath.engine.activity import Peers
from towpath.engine.cuda_stream import CudaStream
from towpath.engine.profiled import profiled
from towpath.engine.record import Record, Waits
from towpath.engine.streams import Handle, Job, Stream, Work
from towpath.engine.thread_stream import ThreadStream
from towpath.topology.groups import Groups


class Queues:
    """Every rank must submit the same transfers in the same order."""

    def __init__(self, streams: Streams, device: torch.device, record: Record, journal: Journal) -> None:
        self._streams, self._device, self._record, self._journal = streams, device, record, journal
        self.micro_step = 0
        self._buffers: dict[str, list[WireBuffers]] = {}  # by queue and way
        self._sizes: dict[str, Needs] = {}  # of these
        self._needs: dict[Kind, Needs] = {}  # of wire buffers, until there is room for them
        self._made_before = 0  # buffers that others have taken the place of

    def plan(self, plans: Iterable[UnitPlan]) -> None:
        """Transfers are those of `plans` from now on, and wire buffers as large as the largest of them needs."""
        plans = tuple(plans)
        self._needs = {kind: largest(plan.wire_needs(kind) for plan in plans) for kind in WIRED}
        self._made_before = self.buffers_made
        self._buffers.clear()
        self._sizes.clear()

    def submit(
        self,
        kind: Kind,
        transfers: Sequence[BoundTransfer] | Sequence[BoundMatrices],
        work: Work,
        after: Sequence[Handle] = (),
        begin: Work | None = None,
    ) -> Handle:
        """Do `work`, which executes `transfers`.

        `begin`: its first part, for when the transfer before needs the links no more.
        """
        submitted = [bound.transfer for bound in transfers]
        self._record.submitted(submitted, self.micro_step)
        if submitted:
            self._journal.note(kind, submitted[0].unit)
            self._record.peers.journal = self._journal
        stream = self._streams[QUEUES[kind]]
        job = Job(self._workspace(kind, stream), work, begin)
        with profiled("submit ", submitted):
            return stream.submit(job, after, Waits(self._record, submitted))

    def _workspace(self, kind: Kind, stream: Stream) -> Workspace:
        way, trace = stream.next_way(), self._record.trace
        return Workspace(
            self._buffers_for(kind, stream)[way],
            way,
            stream.ways,
            self.micro_step,
            None if trace is None else trace.watch_codecs(self.micro_step),
        )

    def _buffers_for(self, kind: Kind, stream: Stream) -> list[WireBuffers]:
        """Made by the thread that submits: what a job allocates, another stream could be given too early.

        Where a kind needs larger ones, others take their place: a transfer under way keeps those that it began in.
        """
        name = QUEUES[kind]
        size = largest([self._sizes.get(name, {}), self._needs.pop(kind, {})])
        if name not in self._buffers or size != self._sizes[name]:
            made = sum(b.made for b in self._buffers.get(name, ()))
            self._buffers[name] = [WireBuffers(self._device, partial(stream.uses, way)) for way in range(stream.ways)]
            self._sizes[name], self._made_before = size, self._made_before + made
            for buffers in self._buffers[name]:
                buffers.reserve(size)
        return self._buffers[name]

    def finish(self) -> None:
        """Return once the results of all that was submitted may be used."""
        self._streams.finish()

    @property
    def wire_bytes(self) -> int:
        return sum(b.nbytes for each in self._buffers.values() for b in each)

    @property
    def buffers_made(self) -> int:
        return self._made_before + sum(b.made for each in self._buffers.values() for b in each)


def make_stream(name: str, device: torch.device, ways: int) -> Stream:
    return CudaStream(device, ways) if device.type == "cuda" else ThreadStream(name, ways)


@final
class Streams:
    """Of one process group on this rank, by the names of queues."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, Stream] = {}

    @staticmethod
    def of(groups: Groups, device: torch.device) -> Streams:
        def make() -> Streams:
            streams = Streams(device)
            atexit.register(leave, weakref.ref(streams), Peers.of(groups))
            return streams

        return groups.shared(f"streams on {device}", make)

    def __getitem__(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = make_stream(name, self._device, WAYS[name])
        return self._streams[name]

    def finish(self) -> None:
        """Return once the results of all that was submitted may be used, however it ended."""
        for stream in self._streams.values():
            stream.finish()


def leave(streams: weakref.ref[Streams], peers: Peers) -> None:
    """At the program's end: wait for what is under way, as its threads cannot be ended. But what waits for a peer that
    ran other units never ends, and would hold up the program for as long as the process group's patience lasts."""
    if peers.diverged:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    left = streams()
    if left is not None:
        with contextlib.suppress(Exception):
            left.finish()
