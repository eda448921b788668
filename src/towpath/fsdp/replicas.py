"""Sums of gradients over replicas: those of HSDP, which keep a copy of each shard, and those of DDP.

HSDP reduces over the process group of its replicas. `ReplicaGroup` takes its place. DDP calls a hook with each bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from towpath.collectives.collective import Workspace
from towpath.core.strategy import TransferKind
from towpath.engine.transfer_queues import RankTransfer
from towpath.fsdp.context import WiredRanks
from towpath.fsdp.peers import Peers, Wishes, factor_of


@final
class ReplicaSums:
    """Sums of flat buffers over all ranks of a process group. All ranks sum the same buffers in one order."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._bound: dict[tuple[str, int, torch.dtype], RankTransfer] = {}

    def of(self, name: str, buffer: torch.Tensor) -> RankTransfer:
        """Return the transfer that replaces a buffer like `buffer` by its sum."""
        key = name, len(buffer), buffer.dtype
        if key not in self._bound:
            [self._bound[key]] = self.peers.bind(TransferKind.GRAD_SYNC, *key)
        return self._bound[key]


@final
class ReplicaGroup(dist.ProcessGroup):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The process group of a module's replicas, as FSDP2 uses it: to reduce gradients, and for nothing else."""

    def __init__(self, stock: dist.ProcessGroup, name: str, sums: ReplicaSums, wired: WiredRanks) -> None:
        super().__init__(stock.rank(), stock.size())
        self.stock, self.wired, self._sums, self._unit = stock, wired, sums, name

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduce a flat buffer in place, in the order of the current stream."""
        [buffer] = tensors
        transfer = self._sums.of(self._unit, buffer)
        work = partial(transfer.run, buffer, buffer)
        self._sums.peers.comm.queues.submit(TransferKind.GRAD_SYNC, [transfer], [work]).wait()
        factor = factor_of(opts.reduceOp, self.size())
        if factor != 1:
            buffer.mul_(factor)
        return _Done()


@final
class _Done(dist.Work):
    """A collective whose result may be used."""

    def wait(self, timeout: Any = None) -> bool:
        return True


Hook = Callable[[Any, dist.GradBucket], "torch.futures.Future[torch.Tensor]"]


def ddp_hook(wishes: Wishes) -> Hook:
    """Return a communication hook for DDP. Its state is DDP's process group, or None for all ranks."""
    sums: list[ReplicaSums] = []

    def towpath_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if not sums:
            group = state if isinstance(state, dist.ProcessGroup) else dist.group.WORLD
            assert group is not None
            sums.append(ReplicaSums(Peers.of(group, buffer.device, "ddp", wishes, ["DDP"])))
        peers = sums[0].peers
        if bucket.index() == 0:
            peers.comm.record.end_step()
        transfer = sums[0].of(f"bucket {bucket.index()}", buffer)
        ended: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )

        def average(workspace: Workspace) -> None:
            try:
                transfer.run(buffer, buffer, workspace)
                buffer.div_(peers.ranks)
            except Exception as error:
                ended.set_exception(error)  # DDP waits for the future, and for nothing else
                raise
            ended.set_result(buffer)

        peers.comm.queues.submit(TransferKind.GRAD_SYNC, [transfer], [average])
        return ended

    # DDP compares annotations with the classes themselves, and those of this file are text.
    towpath_hook.__annotations__ = {}
    return towpath_hook
