"""Sums of gradients over replicas: those of HSDP, and those of DDP.

HSDP reduces over the process group of a module's replicas. `ReplicaGroup` takes its place. DDP calls a communication
hook with each bucket, `sum_bucket`, which `towpath.wires` registers. Lightning registers it itself:

    DDPStrategy(ddp_comm_state=BucketSums(), ddp_comm_hook=sum_bucket)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from towpath.collectives.collective import Workspace
from towpath.core.formats import Precision, dtype_name
from towpath.core.strategy import TransferKind
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, UnitSpec
from towpath.engine.parameters.low_rank_sync import LowRankSync
from towpath.engine.transfer_queues import Handle, RankTransfer
from towpath.errors import ShardError
from towpath.fsdp.fields import trained_in
from towpath.fsdp.peers import Peers, Wishes, factor_of
from towpath.topology.cluster import Topology


@final
class ReplicaGroup(dist.ProcessGroup):
    """The process group of a module's replicas, as FSDP2 uses it: to reduce gradients, and for nothing else."""

    def __init__(self, stock: dist.ProcessGroup, name: str, owner: Any, peers: Peers) -> None:
        super().__init__(stock.rank(), stock.size())  # pyright: ignore[reportCallIssue]
        self.stock, self._unit, self._owner, self._peers = stock, name, owner, peers
        # By the dtype, the size and, with a codec, the parameters of a buffer.
        self._bound: dict[tuple[torch.dtype, int, tuple[int, ...] | None], RankTransfer] = {}

    # PyTorch looks up a group whose collective has failed. It would report that it does not know this one.

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.stock

    def __hash__(self) -> int:
        return hash(self.stock)

    def allreduce(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce a flat buffer in place, in the order of the current stream."""
        [buffer], peers = tensors, self._peers
        trained = trained_in(self._owner, len(buffer)) if peers.strategy.grad_sync.encoding else None
        key = buffer.dtype, len(buffer), trained
        if key not in self._bound:
            [self._bound[key]] = peers.bind(TransferKind.GRAD_SYNC, self._unit, len(buffer), buffer.dtype)
        transfer = self._bound[key]
        if trained is None and peers.strategy.grad_sync.encoding:
            transfer.collective.restart()  # what it has rounded away may belong to other parameters
        work = partial(transfer.run, buffer, buffer)
        peers.submit(TransferKind.GRAD_SYNC, [transfer], [work]).wait()
        factor = factor_of(opts.reduceOp, self.size())
        if factor != 1:
            buffer.mul_(factor)
        return _Done()


@final
class _Done(dist.Work):
    """A collective whose result may be used."""

    def wait(self, timeout: Any = None) -> bool:
        return True


def matrix_of(parameter: torch.Tensor) -> tuple[int, int] | None:
    """Return the rows and columns of a parameter whose gradient may be sent in low rank, else None."""
    # DDP keeps the strides of a parameter in its bucket. In memory, rows must come one after the other.
    if parameter.dim() < 2 or parameter.stride(0) * len(parameter) != parameter.numel():
        return None
    return parameter.shape[0], parameter.shape[1:].numel()


@final
class _BucketSum:
    """The transfers that average one bucket of DDP, and what a codec keeps of it for the next step."""

    def __init__(self, peers: Peers, bucket: Any) -> None:
        buffer, name = bucket.buffer(), f"bucket {bucket.index()}"
        parameters: list[torch.Tensor] = bucket.parameters()
        self.parameters = [*map(id, parameters)]
        self._ranks, self.transfers = peers.ranks, list[RankTransfer]()
        self._low_rank: LowRankSync | None = None
        if peers.strategy.grad_sync.low_rank is not None:
            sizes, matrices = zip(*((each.numel(), matrix_of(each)) for each in parameters), strict=True)
            assert sum(sizes) == len(buffer), "DDP pads its buckets"
            spec = BucketSpec(sizes, dtype_name(buffer.dtype), alignment=1, matrices=matrices)
            [plan] = plan_unit(peers.strategy, UnitSpec(name, (spec,)), Precision(), peers.comm.form).buckets
            if plan.factored is not None:
                self.transfers = peers.comm.bind(plan.transfers[TransferKind.GRAD_SYNC])
                self._low_rank = LowRankSync(plan, plan.factored, self.transfers, buffer.device)
                peers.keepers.add(self._low_rank)
        self.transfers = self.transfers or peers.bind(TransferKind.GRAD_SYNC, name, len(buffer), buffer.dtype)

    def average(self, buffer: torch.Tensor, workspace: Workspace) -> None:
        """Replace a bucket by its mean over all ranks."""
        if self._low_rank is not None:
            self._low_rank.run(buffer, self._ranks, workspace)
            return
        for transfer in self.transfers:
            transfer.run(buffer, buffer, workspace)
        buffer.div_(self._ranks)


@final
class BucketSums:
    """How the buckets of one DistributedDataParallel are averaged. It is the state of `sum_bucket`.

    Args:
        exact: Send gradients in fewer bytes over gloo, without losing a bit.
        gradients: The codec of gradients, such as 'int8' or 'low-rank:4'. It rounds. By default, none is used.
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
        self.wishes: Wishes | None = Wishes(exact, gradients, None, topology, takes_matrices=True)
        self._group = group
        self._peers: Peers | None = None
        self._sums: dict[int, _BucketSum] = {}
        self._under_way: list[Handle] = []  # of the running backward pass

    def __reduce__(self) -> Any:
        raise no_copy()

    def connect(self, device: torch.device) -> Peers:
        """Connect all ranks of the group, which every rank must call."""
        group = self._group or dist.group.WORLD
        assert group is not None and self.wishes is not None
        self._sums.clear()
        self._peers = Peers.of(group, device, "ddp", self.wishes, ["DistributedDataParallel"], {"": 1})
        return self._peers

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over all ranks, while the backward pass goes on."""
        buffer: torch.Tensor = bucket.buffer()
        # If the wires were taken away, DDP keeps its hook. Sparse gradients have a bucket of their own, of any length.
        if self.wishes is None or buffer.is_sparse:
            work = dist.all_reduce(buffer.div_(dist.get_world_size(self._group)), group=self._group, async_op=True)
            assert work is not None
            return work.get_future().then(_first)
        peers = self._peers or self.connect(buffer.device)
        # After its first step, DDP makes other buckets. What a codec has kept belongs to those of before.
        index, summed = bucket.index(), self._sums.get(bucket.index())
        if summed is None or summed.parameters != [*map(id, bucket.parameters())]:
            if index == 0:
                self._sums.clear()
            summed = self._sums[index] = _BucketSum(peers, bucket)
        ended: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )

        def average(workspace: Workspace) -> None:
            try:
                summed.average(buffer, workspace)
            finally:
                # DDP cannot read an error from a future. `_end` raises it.
                ended.set_result(buffer)

        self._under_way.append(peers.submit(TransferKind.GRAD_SYNC, summed.transfers, [average]))
        if current_pass() == -1:  # a rank without batches, in `with model.join()`
            self._end()
        elif bucket.is_last():
            # DDP waits for its buckets in a callback, too, which it queues after this one.
            queue_callback(self._end)
        return ended

    def _end(self) -> None:
        """Wait for all buckets of a backward pass. Raise the error of one that has failed."""
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            each.wait()


current_pass: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore[reportPrivateUsage]
queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback  # pyright: ignore


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
