"""What the ranks compare at every boundary: which parameters got a gradient, and that they did the same things."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch

from towpath.collectives.workspace import Workspace
from towpath.core.journal import Call
from towpath.core.schedule import usage_transfers
from towpath.core.strategy import Kind, Strategy
from towpath.engine.bucket import Bucket
from towpath.engine.unit import Unit
from towpath.engine.wiring import Wiring

# How many boundaries lie between two comparisons of values, unless `shard(check_every=)` says otherwise.
CHECK_EVERY = 100

_COLUMNS = 1021
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@final
class Usage:
    """Of the units that train, in the order in which their gradients are delivered."""

    def __init__(self, strategy: Strategy, trained: Sequence[Unit], wiring: Wiring) -> None:
        self._trained, self._wiring = trained, wiring
        self._places = [place for unit in trained for bucket in unit.trainable for place in bucket.layout.places]
        self._transfers = wiring.bind(usage_transfers(strategy, len(self._places)))
        self._values = Values(trained, wiring.device)
        self.check_every = CHECK_EVERY if wiring.journal.compares(Call.VALUES) else 0

    def compare(self, boundary: int) -> list[bool]:
        """Return, by parameter, whether any rank has a gradient of it; raise, on every rank, where ranks differ.

        `boundary`: its number. With every `check_every`-th, values are looked at, to be compared with the next one.
        """
        mine = [used for unit in self._trained for bucket in unit.trainable for used in bucket.gradients.used]
        if not self._transfers:
            return mine
        journal = self._wiring.journal
        kept = sum(place.parameter.grad is not None for place in self._places)
        frozen = tuple(place.names[0] for place in self._places if not place.parameter.requires_grad)
        self._wiring.program.ends_backward(self._wiring.queues.micro_step + 1, kept, frozen)
        for unit, checksum in self._values.taken():
            journal.note(Call.VALUES, f"parameters of unit {unit or 'root'!r}", ((("checksum", checksum),),))
        if self.check_every and boundary % self.check_every == 0:
            self._values.take()
        compared = torch.tensor([*mine, *journal.encoded()], dtype=torch.uint8)

        def combine(workspace: Workspace) -> None:
            for transfer in self._transfers:
                transfer.run(compared, compared, workspace)

        self._wiring.queues.submit(Kind.USAGE, self._transfers, [combine]).wait()
        combined = compared.tolist()
        journal.check(bytes(combined[len(mine) :]), self._wiring.groups.gather_objects)
        return [bool(used) for used in combined[: len(mine)]]


@final
class Values:
    """Checksums of what the optimizer writes to on this rank, bucket by bucket.

    They are taken at one boundary and read at the next: by then a GPU has long computed them, and nobody waits for it.
    """

    def __init__(self, trained: Sequence[Unit], device: torch.device) -> None:
        self._buckets = [(unit.name, bucket) for unit in trained for bucket in unit.trainable]
        self._on_host = torch.zeros(len(self._buckets), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._end: torch.cuda.Event | None = None
        self._is_taken = False

    def take(self) -> None:
        checksums = torch.stack([checksum(bucket) for _, bucket in self._buckets])
        self._on_host.copy_(checksums, non_blocking=True)
        if checksums.is_cuda:
            self._end = torch.cuda.Event()
            self._end.record()
        self._is_taken = True

    def taken(self) -> Iterator[tuple[str, int]]:
        """Yield what `take` has found since the last call, by unit."""
        if not self._is_taken:
            return
        if self._end is not None:
            self._end.synchronize()
        self._is_taken = False
        for (unit, _), value in zip(self._buckets, self._on_host.tolist(), strict=True):
            yield unit, value


def checksum(bucket: Bucket) -> torch.Tensor:
    """Return a number that depends on every bit of the slice that the optimizer writes to, and on their order.

    One pass over the memory adds up the columns of a matrix; what is done with the sums takes no time. The number of
    columns is prime, so that no dimension of a parameter fits it. That of rows is odd, so that equal changes in all
    rows do not cancel.
    """
    values = bucket.master.detach()
    width = next(width for width in _INTEGERS if values.nbytes % width == 0 and width >= values.element_size())
    words = values.view(_INTEGERS[width])
    rows = words.numel() // _COLUMNS
    rows -= rows > 0 and rows % 2 == 0
    matrix, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    sums = torch.cat([matrix.sum(0, dtype=torch.int64), rest.long()])
    weights = torch.arange(1, 2 * sums.numel(), 2, device=sums.device)
    return ((sums ^ (sums >> 29)) * weights).sum()
