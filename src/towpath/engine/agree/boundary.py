"""The comparison at each boundary: which parameters any rank has a gradient for, and whether all did the same.

One transfer combines the bits of unused parameters and the digests of what each rank did (`digest.py`). Ranks with
unequal batches also tell their tokens there (`engine/unequal_batches.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from towpath.collectives.collective import Workspace
from towpath.core.queues import LoggedCall
from towpath.core.schedule import unused_params_transfers
from towpath.core.strategy import Strategy, TransferKind
from towpath.engine.comm import CommContext
from towpath.engine.parameters.bucket import Bucket
from towpath.engine.parameters.checksum import checksum
from towpath.engine.parameters.unit import Unit
from towpath.engine.unequal_batches import Batches

# Default of `shard(check_every=)`: how many boundaries pass between two comparisons of parameter values.
CHECK_EVERY = 100


@final
class BoundaryCheck:
    """The check at each boundary, over the units that train in the order in which gradients are reduced.

    `Engine` holds one. `check_every` is the number of boundaries between two comparisons of values, or 0 for never.
    """

    def __init__(self, strategy: Strategy, trained: Sequence[Unit], comm: CommContext, batches: Batches) -> None:
        self._batches = batches
        self._comm, self._buckets = comm, [(unit, bucket) for unit in trained for bucket in unit.trainable]
        self._places = [place for _, bucket in self._buckets for place in bucket.layout.places]
        self._transfers = comm.bind(unused_params_transfers(strategy, len(self._places), comm.log.bytes))
        self.check_every = CHECK_EVERY if comm.log.compares(LoggedCall.VALUES) else 0
        # The checksum of the memory that the optimizer writes to, for each bucket.
        self._checksums = torch.zeros(len(self._buckets), dtype=torch.int64, pin_memory=comm.device.type == "cuda")
        self._wait: Callable[[], None] | None = None  # until checksums that were taken are on the host

    def compare(self, boundary: int) -> list[bool]:
        """Return for each parameter whether any rank has a gradient for it, at the boundary of this number."""
        mine = [used for _, bucket in self._buckets for used in bucket.gradients.used]
        batches = self._batches.encoded()
        if not self._transfers:
            self._batches.decode(batches)
            return mine
        log = self._comm.log
        kept = sum(place.parameter.grad is not None for place in self._places)
        frozen = tuple(place.names[0] for place in self._places if not place.parameter.requires_grad)
        self._comm.program.ends_backward(self._comm.queues.micro_step + 1, kept, frozen)
        self._note_checksums()
        if self.check_every and boundary % self.check_every == 0:
            self._take_checksums()
        compared = torch.tensor([*mine, *log.encoded(), *batches], dtype=torch.uint8)

        def combine(workspace: Workspace) -> None:
            for transfer in self._transfers:
                transfer.run(compared, compared, workspace)

        self._comm.queues.submit(TransferKind.UNUSED_PARAMS, self._transfers, [combine]).wait()
        combined = compared.tolist()
        end = len(combined) - len(batches)
        log.check(bytes(combined[len(mine) : end]), self._comm.groups.all_gather_objects)
        self._batches.decode(bytes(combined[end:]))
        return [bool(used) for used in combined[: len(mine)]]

    def _take_checksums(self) -> None:
        """Start to compute the checksums, and to copy them to the host."""
        checksums = torch.stack([checksum_of(bucket) for _, bucket in self._buckets])
        self._checksums.copy_(checksums, non_blocking=True)
        self._wait = lambda: None
        if checksums.is_cuda:
            end = torch.cuda.Event()
            end.record()
            self._wait = end.synchronize

    def _note_checksums(self) -> None:
        """Note the checksums that were taken at the boundary before."""
        # A GPU has computed them by now, so that reading them does not stall the host.
        if self._wait is None:
            return
        self._wait()
        self._wait = None
        for (unit, _), value in zip(self._buckets, self._checksums.tolist(), strict=True):
            what = f"parameters of unit {unit.name or 'root'!r}"
            self._comm.log.note(LoggedCall.VALUES, what, ((("checksum", value),),))


def checksum_of(bucket: Bucket) -> torch.Tensor:
    return checksum(bucket.master.detach())
