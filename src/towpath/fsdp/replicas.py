"""Sums of gradients over replicas: those of HSDP, and those of DDP.

HSDP reduces over the process group of a module's replicas. `ReplicaGroup` takes its place. DDP calls a communication
hook with each bucket, `sum_bucket`, which `towpath.wires` registers. Lightning registers it itself:

    DDPStrategy(ddp_comm_state=BucketSums(), ddp_comm_hook=sum_bucket)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from towpath.collectives.collective import Workspace
from towpath.core.strategy import TransferKind
from towpath.engine.transfer_queues import RankTransfer
from towpath.errors import ShardError
from towpath.fsdp.peers import Peers, Wishes, factor_of
from towpath.topology.cluster import Topology


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
class ReplicaGroup(dist.ProcessGroup):
    """The process group of a module's replicas, as FSDP2 uses it: to reduce gradients, and for nothing else."""

    def __init__(self, stock: dist.ProcessGroup, name: str, sums: ReplicaSums) -> None:
        super().__init__(stock.rank(), stock.size())  # pyright: ignore[reportCallIssue]
        self.stock, self._sums, self._unit = stock, sums, name

    # PyTorch looks up a group whose collective has failed. It would report that it does not know this one.

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.stock

    def __hash__(self) -> int:
        return hash(self.stock)

    def allreduce(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce a flat buffer in place, in the order of the current stream."""
        [buffer] = tensors
        transfer = self._sums.of(self._unit, buffer)
        work = partial(transfer.run, buffer, buffer)
        self._sums.peers.submit(TransferKind.GRAD_SYNC, [transfer], [work]).wait()
        factor = factor_of(opts.reduceOp, self.size())
        if factor != 1:
            buffer.mul_(factor)
        return _Done()


@final
class _Done(dist.Work):
    """A collective whose result may be used."""

    def wait(self, timeout: Any = None) -> bool:
        return True


@final
class BucketSums:
    """How the buckets of one DistributedDataParallel are averaged. It is the state of `sum_bucket`.

    Args:
        exact: Send gradients in fewer bytes over gloo, without losing a bit.
        gradients: The codec of gradients, such as 'int8'. It rounds. By default, none is used.
        topology: The number of nodes and of ranks per node. Detected by default.
        group: The process group of the model. By default, all ranks.
    """

    def __init__(
        self,
        exact: bool = True,
        gradients: str | None = None,
        topology: Topology | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.wishes: Wishes | None = Wishes(exact, gradients, None, topology)
        self._group = group
        self._sums: ReplicaSums | None = None

    def __reduce__(self) -> Any:
        raise no_copy()

    def connect(self, device: torch.device) -> Peers:
        """Connect all ranks of the group, which every rank must call."""
        group = self._group or dist.group.WORLD
        assert group is not None and self.wishes is not None
        peers = Peers.of(group, device, "ddp", self.wishes, ["DistributedDataParallel"])
        self._sums = ReplicaSums(peers)
        return peers

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over all ranks, while the backward pass goes on."""
        buffer: torch.Tensor = bucket.buffer()
        ended: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        if self.wishes is None:  # the wires were taken away, and DDP keeps its hook
            work = dist.all_reduce(buffer.div_(dist.get_world_size(self._group)), group=self._group, async_op=True)
            assert work is not None
            return work.get_future().then(_first)
        if self._sums is None:
            self.connect(buffer.device)
        sums = self._sums
        assert sums is not None
        transfer, ranks = sums.of(f"bucket {bucket.index()}", buffer), sums.peers.ranks

        def average(workspace: Workspace) -> None:
            try:
                transfer.run(buffer, buffer, workspace)
                buffer.div_(ranks)
            except Exception as error:
                # DDP waits for the future, and for nothing else.
                ended.set_exception(error)  # pyright: ignore[reportArgumentType]
                raise
            ended.set_result(buffer)

        sums.peers.submit(TransferKind.GRAD_SYNC, [transfer], [average])
        return ended


def no_copy() -> ShardError:
    """Return the error of a model that is copied or pickled with its connections to other ranks."""
    return ShardError(
        "a model with towpath.wires() was copied or pickled, and its connections to other ranks cannot be. Copy its "
        "module (`model.module` of a DistributedDataParallel), or save its state_dict()."
    )


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def sum_bucket(state, bucket):  # pyright: ignore
    """Average a bucket of DDP. A communication hook, whose state is a `BucketSums`."""
    return state.average(bucket)
