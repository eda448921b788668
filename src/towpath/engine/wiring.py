"""From the transfers of a plan to the collectives, process groups and lanes that execute them on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from towpath.collectives.coalesced import CoalescedAllGather
from towpath.collectives.collective import Binding, Members, Scratch
from towpath.collectives.select import select
from towpath.engine.activity import Peers
from towpath.engine.lanes import Lanes
from towpath.engine.record import Bundle, Line, Record, Waits
from towpath.engine.streams import Handle, Job, Work
from towpath.spec.journal import Journal
from towpath.spec.schedule import LANES, TURNS
from towpath.spec.strategy import Kind
from towpath.spec.transfer import Transfer
from towpath.topology.groups import Groups


class Wiring:
    """Makes lines and submits jobs. Every rank must ask for the same lines in the same order (they make groups)."""

    def __init__(self, groups: Groups, device: torch.device, journal: Journal) -> None:
        self.rank = groups.rank
        self.device = device
        self.groups = groups
        self.journal = journal
        self.record = Record(Peers.of(groups))
        self.micro_step = 0
        self._backend = groups.backend(device)
        self._lanes = Lanes.of(groups, device)
        self._scratch = {name: Scratch(device, self._lanes.turns(name)) for name in TURNS}

    def lines(self, transfers: Iterable[Transfer]) -> list[Line]:
        return [self._line(t) for t in transfers]

    def _line(self, transfer: Transfer) -> Line:
        lane = LANES[transfer.kind]
        group = transfer.move.group_of(self.rank)
        partition = tuple(g.ranks for g in transfer.move.groups)
        nodes = tuple(map(transfer.topology.node_of, group.ranks))
        if transfer.kind is Kind.USAGE:
            within = between = self.groups.control_on_host()
        else:
            within = between = self.groups.of(partition, lane)
        # NCCL runs a group's messages one after the other; gloo does not, and needs no second group to overlap them.
        if self._backend == "nccl" and transfer.route not in ("flat", "ring"):
            between = self.groups.of(partition, f"{lane} between nodes")
        members = Members(within, between, group, group.ranks.index(self.rank), nodes)
        collective = select(transfer, members, self._backend, self._scratch[lane])
        return Line(transfer, members, collective, self.record)

    def bundle(self, kind: Kind, lines: Sequence[Line]) -> Bundle:
        """The gathers of `lines`, which have the same members, in one message."""
        bindings, scratch = [Binding.of(line.transfer) for line in lines], self._scratch[LANES[kind]]
        return Bundle(lines, CoalescedAllGather(bindings, lines[0].members, self._backend, scratch))

    def submit(
        self, kind: Kind, lines: Sequence[Line], work: Work, after: Sequence[Handle] = (), begin: Work | None = None
    ) -> Handle:
        """Do `work`, which executes `lines`, on the lane of `kind`; `begin`, its first part, when the transfer before
        needs the links no more."""
        transfers = [line.transfer for line in lines]
        for transfer in transfers:
            self.record.submitted(transfer, self.micro_step)
        if transfers:
            self.journal.note(kind, transfers[0].unit)
            self.record.peers.journal = self.journal
        name = LANES[kind]
        turns = self._lanes.turns(name)
        turn = turns.next()

        def in_turn(part: Work) -> Work:
            traced = part if self.record.trace is None else self.record.trace.during(part, self.micro_step)

            def run() -> None:
                with turns.running(turn):
                    traced()

            return run

        job = Job(in_turn(work), None if begin is None else in_turn(begin), turn)
        return self._lanes.lane(name).submit(job, after, Waits(self.record, transfers))

    def finish(self) -> None:
        """Return once all that was submitted is done."""
        self._lanes.finish()

    def forget_scratch(self) -> None:
        """Wire buffers are made anew: what travels now is of other lengths and dtypes."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # once in a run: what is under way may still read them
        for scratch in self._scratch.values():
            scratch.clear()

    @property
    def scratch_bytes(self) -> int:
        return sum(s.nbytes for s in self._scratch.values())

    @property
    def buffers_made(self) -> int:
        return sum(s.made for s in self._scratch.values())
