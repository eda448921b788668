"""Parameter syncs whose messages have sizes of their own: ranks agree on them, and raise if one cannot decode.

Collectives of the backend send as many bytes from every rank, and only the device knows how long its messages became.
So all units are encoded right after the optimizer's step. The host then waits once, for the sizes of all messages, and
the ranks agree on the largest of each over gloo. That wait is before the first forward pass, which needs the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import final

import torch

from towpath.collectives.collective import Workspace
from towpath.core.queues import LoggedCall
from towpath.core.schedule import message_sizes_transfers
from towpath.core.strategy import Strategy, TransferKind
from towpath.engine.comm import CommContext
from towpath.engine.parameters.unit import Unit
from towpath.errors import StepError


@final
class ParamSyncs:
    """The parameter syncs of all units of a model on one rank. The engine holds one."""

    def __init__(self, strategy: Strategy, units: Sequence[Unit], comm: CommContext) -> None:
        self._strategy, self._units, self._comm = strategy, units, comm
        self.bind()

    def bind(self) -> None:
        self._transfers = self._comm.bind(message_sizes_transfers(self._strategy, [u.plan for u in self._units]))
        buckets = [bucket for unit in self._units for bucket in unit.buckets]
        self._syncs = [each for bucket in buckets for each in bucket.transfers[TransferKind.PARAM_SYNC]]
        self._agreeing = [each.collective for each in self._syncs if each.collective.encoded_size is not None]
        self._may_fail = any(each.transfer.coding is not None for each in self._syncs)
        # The copy of the sizes to the host is asynchronous only if this memory is page-locked.
        pinned = self._comm.device.type == "cuda"
        self._sizes = torch.zeros(len(self._agreeing), dtype=torch.int64, pin_memory=pinned)

    def agree(self, units: Sequence[int]) -> None:
        """Encode the parameter syncs of these units, and set the sizes that all ranks agree on."""
        buckets = [bucket for index in units for bucket in self._units[index].buckets]
        # Encoded on the queue that sends later, so that nothing overwrites the message in between.
        works = [b.encode_param_sync for b in buckets if b.dirty and b.plan.agrees_on_sizes]
        queues = self._comm.queues
        # The only wait of the host in a step: collectives of the backend need the number of bytes as a Python integer.
        queues.submit(TransferKind.PARAM_SYNC, (), [*works, self._read_sizes]).wait(on_host=True)

        def combine(workspace: Workspace) -> None:
            for transfer in self._transfers:
                transfer.run(self._sizes, self._sizes, workspace)

        # The sizes are in the host's memory, so the wait also holds for the host, which reads them next.
        queues.submit(TransferKind.MESSAGE_SIZES, self._transfers, [combine]).wait()
        for collective, size in zip(self._agreeing, self._sizes.tolist(), strict=True):
            collective.agreed_size = size

    def _read_sizes(self, workspace: Workspace) -> None:
        """Copy the sizes of all messages to the host: of those that were not encoded now, from last time."""
        sizes = [size for each in self._agreeing if (size := each.encoded_size) is not None]
        self._sizes.copy_(torch.cat(sizes), non_blocking=True)

    def problems(self) -> list[tuple[str, str]]:
        """Return transfers whose last messages could not be decoded, each with the reason."""
        return [(str(bound.transfer), text) for bound in self._syncs for text in bound.collective.problems()]

    def note_problems(self) -> None:
        """Tell all ranks at the boundary what could not be decoded. They compare their logs there, and raise."""
        for transfer, text in self.problems():
            self._comm.log.note(LoggedCall.UNDECODED, transfer, ((("problem", text),),))

    def raise_problems(self, together: bool = False) -> None:
        """Raise `StepError` on this rank if it could not decode a message, where no boundary follows.

        With `together`, all ranks make this call, and raise for each other.
        """
        # Without a boundary no log is compared. Only ranks that make the call together may use a collective here.
        groups = self._comm.groups
        mine = [(groups.number, *problem) for problem in self.problems()]
        everyones = groups.gather_objects(mine) if together and self._may_fail else [mine]
        for rank, transfer, text in chain.from_iterable(everyones):
            raise StepError(f"rank {groups.number}: rank {rank} could not decode {transfer}: {text}")
