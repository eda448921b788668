"""The lanes of one process group on this rank, shared by all models that are sharded over it.

A lane has threads, and the process groups of its transfers have connections: both stay as they are however many models
are made one after the other. That transfers of several models keep one order on all ranks follows from sharing, too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from typing import final

import torch

from towpath.collectives.collective import Turns
from towpath.engine.activity import Peers
from towpath.engine.streams import Job, Lane, make_lane
from towpath.spec.schedule import TURNS
from towpath.topology.groups import Groups


@final
class Lanes:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turns = {name: Turns(count) for name, count in TURNS.items()}
        self._lanes: dict[str, Lane] = {}

    @staticmethod
    def of(groups: Groups, device: torch.device) -> Lanes:
        def make() -> Lanes:
            lanes = Lanes(device)
            atexit.register(leave, weakref.ref(lanes), Peers.of(groups))
            return lanes

        return groups.shared(f"lanes on {device}", make)

    def turns(self, name: str) -> Turns:
        return self._turns[name]

    def lane(self, name: str) -> Lane:
        if name not in self._lanes:
            turns = self._turns[name]
            self._lanes[name] = lane = make_lane(name, self._device, turns.count)
            turns.begin_next = lane.begin_next
        return self._lanes[name]

    def settle(self) -> None:
        """Return once nothing is under way any more, however it ended."""
        with contextlib.suppress(Exception):
            self.finish()

    def finish(self) -> None:
        """Return once all that was submitted is done."""
        for lane in self._lanes.values():
            lane.submit(Job(lambda: None)).wait()


def leave(lanes: weakref.ref[Lanes], peers: Peers) -> None:
    """At the program's end: wait for what is under way, as its threads cannot be ended. But what waits for a peer that
    ran other units never ends, and would hold up the program for as long as the process group's patience lasts."""
    if peers.diverged:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    left = lanes()
    if left is not None:
        left.settle()
