"""The comparison at each boundary: which parameters any rank has a gradient for, and whether all did the same.

One transfer combines the bits of unused parameters, and the digests of what each rank did (`digest.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch

from towpath.collectives.collective import Workspace
from towpath.core.queues import LoggedCall
from towpath.core.schedule import unused_params_transfers
from towpath.core.strategy import Strategy, TransferKind
from towpath.engine.comm import CommContext
from towpath.engine.parameters.bucket import Bucket
from towpath.engine.parameters.unit import Unit

# Default of `shard(check_every=)`: how many boundaries pass between two comparisons of parameter values.
CHECK_EVERY = 100

_COLUMNS = 1021
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@final
class UnusedParams:
    """The check at each boundary, over the units that train in the order in which gradients are reduced.

    `Engine` holds one. `check_every` is the number of boundaries between two comparisons of values, or 0 for never.
    """

    def __init__(self, strategy: Strategy, trained: Sequence[Unit], comm: CommContext) -> None:
        self._trained, self._comm = trained, comm
        self._places = [place for unit in trained for bucket in unit.trainable for place in bucket.layout.places]
        self._transfers = comm.bind(unused_params_transfers(strategy, len(self._places), comm.log.bytes))
        self._values = Values(trained, comm.device)
        self.check_every = CHECK_EVERY if comm.log.compares(LoggedCall.VALUES) else 0

    def compare(self, boundary: int) -> list[bool]:
        """Return for each parameter whether any rank has a gradient for it.

        Args:
            boundary: The number of this boundary. At each `check_every`-th boundary checksums of the parameters are
                taken, and the ranks compare them at the next boundary.
        """
        mine = [used for unit in self._trained for bucket in unit.trainable for used in bucket.gradients.used]
        if not self._transfers:
            return mine
        log = self._comm.log
        kept = sum(place.parameter.grad is not None for place in self._places)
        frozen = tuple(place.names[0] for place in self._places if not place.parameter.requires_grad)
        self._comm.program.ends_backward(self._comm.queues.micro_step + 1, kept, frozen)
        for unit, checksum in self._values.taken():
            log.note(LoggedCall.VALUES, f"parameters of unit {unit or 'root'!r}", ((("checksum", checksum),),))
        if self.check_every and boundary % self.check_every == 0:
            self._values.take()
        compared = torch.tensor([*mine, *log.encoded()], dtype=torch.uint8)

        def combine(workspace: Workspace) -> None:
            for transfer in self._transfers:
                transfer.run(compared, compared, workspace)

        self._comm.queues.submit(TransferKind.UNUSED_PARAMS, self._transfers, [combine]).wait()
        combined = compared.tolist()
        log.check(bytes(combined[len(mine) :]), self._comm.groups.gather_objects)
        return [bool(used) for used in combined[: len(mine)]]


@final
class Values:
    """Checksums of the memory that the optimizer writes to on this rank, one for each bucket.

    `UnusedParams` takes them at one boundary and reads them at the next. By then a GPU has computed them, so reading
    does not stall the host.
    """

    def __init__(self, trained: Sequence[Unit], device: torch.device) -> None:
        self._buckets = [(unit.name, bucket) for unit in trained for bucket in unit.trainable]
        self._on_host = torch.zeros(len(self._buckets), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._wait: Callable[[], None] | None = None  # until the checksums that were taken are on the host

    def take(self) -> None:
        """Start to compute the checksums, and to copy them to the host."""
        checksums = torch.stack([checksum_of(bucket) for _, bucket in self._buckets])
        self._on_host.copy_(checksums, non_blocking=True)
        self._wait = lambda: None
        if checksums.is_cuda:
            end = torch.cuda.Event()
            end.record()
            self._wait = end.synchronize

    def taken(self) -> Iterator[tuple[str, int]]:
        """Yield the unit and the checksum of each bucket, if `take` was called since the last time."""
        if self._wait is None:
            return
        self._wait()
        self._wait = None
        for (unit, _), value in zip(self._buckets, self._on_host.tolist(), strict=True):
            yield unit, value


def checksum_of(bucket: Bucket) -> torch.Tensor:
    return checksum(bucket.master.detach())


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on each bit of a flat tensor, and on the order of the bits.

    The tensor is read once, as a matrix whose columns are summed. Work on the sums takes negligible time. The number of
    columns is prime, so that a column does not match a dimension of a parameter. The number of rows is odd, so that
    equal changes in all rows do not cancel.
    """
    width = next(width for width in _INTEGERS if values.nbytes % width == 0 and width >= values.element_size())
    words = values.view(_INTEGERS[width])
    rows = words.numel() // _COLUMNS
    rows -= rows > 0 and rows % 2 == 0
    matrix, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    sums = torch.cat([matrix.sum(0, dtype=torch.int64), rest.long()])
    weights = torch.arange(1, 2 * sums.numel(), 2, device=sums.device)
    return ((sums ^ (sums >> 29)) * weights).sum()
