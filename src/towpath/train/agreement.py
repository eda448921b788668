"""Agreement of the ranks in each step: on the loss, the norm, and whether to save, to stop or to give up.

Without outer steps, one all-reduce brings all of it. With outer steps, the loss and the norm are those of an island,
which decides by itself whether to skip a step. What concerns all islands is sent on the host while the next step runs,
and counts at the end of that step, on every rank. So no step waits for the slow link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from towpath.topology.groups import Groups
from towpath.train.job import Job
from towpath.train.signals import SIGNALS


@dataclass(frozen=True, slots=True)
class Wishes:
    """The wishes of one rank, or the shares of ranks that have them.

    Attributes:
        save: Whether to save a checkpoint.
        signals: For each of `SIGNALS`, whether it was received.
        fail: Whether the run cannot go on.
    """

    save: float = 0.0
    signals: tuple[float, ...] = (0.0,) * len(SIGNALS)
    fail: float = 0.0

    @property
    def stopped_by(self) -> int:
        """The signal that counts, or 0."""
        return next((number for number, share in zip(SIGNALS, self.signals, strict=True) if share > 0), 0)

    def row(self) -> list[float]:
        """Return all as numbers, for an all-reduce."""
        return [float(self.save), *map(float, self.signals), float(self.fail)]

    @staticmethod
    def of(row: Sequence[float]) -> Wishes:
        """Return what `row` was made from."""
        return Wishes(row[0], tuple(row[1:-1]), row[-1])


class Agreement:
    """The agreement of all ranks, step by step. Every rank must make the same calls.

    Attributes:
        wishes: The shares of all ranks: of this step, or with islands of the step before.
        loss_of_islands: With islands, the mean loss of all of them in the step before.
    """

    def __init__(self, job: Job, island: Groups | None = None) -> None:
        """`island` has the groups of this rank's island, if the strategy has outer steps."""
        self._job, self._island = job, island
        self.wishes = Wishes()
        self.loss_of_islands: float | None = None
        self._own = Wishes()
        self._read: Callable[[], list[float]] = list
        self._under_way: tuple[dist.Work | None, Tensor] | None = None

    def begin(self, loss: Tensor, norm: Tensor, own: Wishes) -> Tensor:
        """Sum the loss, the norm, and what this rank wants, over the ranks. Do not wait for the device.

        Returns:
            The sums on the device.
        """
        self._own = own
        values = [loss.double(), norm.to(loss.device).double()]
        if self._island is None:
            # Numbers are filled in on the device, because a copy of them from pageable memory would wait for it.
            values += [torch.full_like(values[0], number) for number in own.row()]
        sums = torch.stack(values)
        self._read = self._job.begin_mean(sums, self._island)
        return sums

    def end(self) -> tuple[float, float]:
        """Return the mean loss and the mean norm. `wishes` are then the same on every rank."""
        loss, norm, *row = self._read()
        if self._island is None:
            self.wishes = Wishes.of(row)
        else:
            self._take()
            self._send([loss, *self._own.row()])
        return loss, norm

    def finish(self, own: Wishes) -> None:
        """Agree once more after the last step, with nothing left under way."""
        if self._island is not None:
            self._take()
            self._send([0.0, *own.row()])
            loss = self.loss_of_islands
            self._take()
            self.loss_of_islands = loss

    def _send(self, row: list[float]) -> None:
        """Begin to sum what concerns all islands."""
        sums = torch.tensor(row, dtype=torch.float64)
        work = dist.all_reduce(sums, group=self._job.groups.control_on_host(), async_op=True)
        self._under_way = work, sums

    def _take(self) -> None:
        """Wait for what was sent in the step before."""
        if self._under_way is not None:
            work, sums = self._under_way
            if work is not None:
                work.wait()
            self.loss_of_islands, *row = (sums / self._job.world).tolist()
            self.wishes = Wishes.of(row)
