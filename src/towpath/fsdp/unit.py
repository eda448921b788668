"""The transfers of one module that FSDP2 shards, on one rank.

FSDP2 calls a `WiredUnit` in place of its own all-gather and reduce-scatter. Ranks of equal place in their nodes are a
*column*, and the ranks of a node are a *row*. Only columns cross nodes:

    param_sync  over a column   brings what has changed of its slices to `held`, as differences to what all hold
    gather      over a row      shares out what the columns of a node hold
    reduce      over a row      sums gradients inside the node
    grad_sync   over a column   sums these sums, and leaves each rank its slice

These are the transfers of PaRO-IIG. FSDP2 orders its flat buffers rank by rank, and the transfers want the slices of a
column next to each other. With several ranks per node, each direction therefore has one strided copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist

from towpath.collectives.collective import Workspace
from towpath.core.strategy import TransferKind
from towpath.core.units import round_up
from towpath.engine.transfer_queues import Handle, RankTransfer, TransferRun
from towpath.fsdp.fields import has_own_cast, shards_of
from towpath.fsdp.peers import Peers, factor_of


@dataclass(slots=True)
class _Weights:
    """The weights of one unit that its column holds, and the transfers that keep them up to date."""

    peers: Peers
    held: torch.Tensor  # the slices of this column, one of each node
    sync: RankTransfer
    rows: list[RankTransfer]  # the gather over the row, unless this rank is alone on its node
    sent: Handle | None = None  # the end of the last parameter sync
    versions: tuple[int, ...] = ()  # the version counters of the shard that it sent

    @staticmethod
    def of(peers: Peers, unit: str, numel: int, dtype: torch.dtype) -> _Weights:
        """Make the memory for shards of `numel` elements."""
        whole = numel * peers.ranks
        [sync] = peers.bind(TransferKind.PARAM_SYNC, unit, whole, dtype)
        held = torch.empty(peers.nodes * numel, dtype=dtype, device=peers.comm.device)
        return _Weights(peers, held, sync, peers.bind(TransferKind.GATHER, unit, whole, dtype))

    @property
    def mine(self) -> torch.Tensor:
        """This rank's slice of what the column holds: the shard that was sent last."""
        return self.held.view(self.peers.nodes, -1)[self.peers.comm.rank // self.peers.width]

    def overwrite(self, shard: Sequence[torch.Tensor]) -> None:
        """Replace this rank's slice by `shard`, which may be in parts and in another dtype."""
        if self.sent is not None:
            self.sent.wait()  # it may still read the slice
        torch._foreach_copy_(list(self.mine.split([len(part) for part in shard])), list(shard))


@dataclass(slots=True)
class _Gradients:
    """The transfers of one unit's gradients in one dtype."""

    peers: Peers
    rows: list[RankTransfer]
    sync: RankTransfer
    numel: int  # of a rank's slice, in multiples of the codec's blocks

    @staticmethod
    def of(peers: Peers, unit: str, numel: int, dtype: torch.dtype) -> _Gradients:
        codec = peers.strategy.grad_sync.encoding
        padded = numel if codec is None else round_up(numel, codec.grain)
        rows = peers.bind(TransferKind.REDUCE, unit, numel * peers.ranks, dtype)
        [sync] = peers.bind(TransferKind.GRAD_SYNC, unit, padded * peers.ranks, dtype)
        return _Gradients(peers, rows, sync, padded)


@final
class WiredUnit:
    """The transfers of one module. Every rank must make the calls of all units in the same order.

    `module`: An `FSDPModule` with parameters of its own. `name`: Its name in the model, which errors use.
    """

    def __init__(self, name: str, module: Any, peers: Peers) -> None:
        self.name, self.module, self._peers = name, module, peers
        self._weights: _Weights | None = None
        self._gradients: dict[torch.dtype, _Gradients] = {}
        self._drifted: torch.Tensor | None = None  # on the device: whether the last gather found other values

    @property
    def held_bytes(self) -> int:
        """The bytes of the weights that this rank holds for its column."""
        return 0 if self._weights is None else self._weights.held.nbytes + self._weights.sync.collective.sent_bytes

    # Weights ---------------------------------------------------------------------------------------------------------

    def gather(self, output: torch.Tensor, mine: torch.Tensor) -> dist.Work:
        """Gather the weights of all ranks into `output`, of which `mine` is this rank's slice. Return its end."""
        weights = self._weights
        if weights is None or weights.mine.shape != mine.shape or weights.held.dtype != mine.dtype:
            weights = self._weights = _Weights.of(self._peers, self.name, len(mine), mine.dtype)
        # All ranks must decide alike, without a message. A program that writes to weights moves the version counters of
        # their shards on every rank. Only writes through `.data` do not.
        if weights.sent is None or weights.versions != self.versions() or self._differs(weights.mine, mine):
            weights.overwrite([mine])
            # No optimizer has stepped, so ranks have not agreed on sizes: they send values, in cells of one size.
            collective = weights.sync.collective
            if collective.encoded_size is not None:
                collective.restart()
                collective.encode(weights.held, weights.mine)
                collective.agreed_size = collective.largest_size
            self.send()
        return self._share(weights, output)

    def _differs(self, sent: torch.Tensor, mine: torch.Tensor) -> bool:
        """Return whether the shard has other values than those that were sent last."""
        if not mine.is_cuda:
            return not torch.equal(sent, mine)
        # A host that waited here for the device would slow down every gather. The outcome is read after the next step.
        if self._drifted is None:
            self._drifted = torch.zeros((), dtype=torch.bool, device=mine.device)
        torch.any(sent != mine, out=self._drifted)
        return False

    def take_shard(self) -> bool:
        """Copy the shard to what the column holds, as FSDP2 would cast it. Return False if the next gather has to."""
        weights = self._weights
        if weights is None or weights.held.dtype == torch.uint8 or has_own_cast(self.module):
            return False
        weights.overwrite(shards_of(self.module))
        return True

    def send(self) -> None:
        """Send what `take_shard` has copied to the column. Return before it has arrived."""
        weights = self._weights
        assert weights is not None
        weights.versions = self.versions()
        run = TransferRun(weights.sync, weights.held, weights.mine)
        weights.sent = self._peers.comm.queues.submit(TransferKind.PARAM_SYNC, [weights.sync], [run])

    def problems(self) -> list[tuple[str, str]]:
        """Return the parameter sync with each reason why it could not be decoded."""
        sync = None if self._weights is None else self._weights.sync
        return [] if sync is None else [(str(sync.transfer), problem) for problem in sync.collective.problems()]

    def _share(self, weights: _Weights, output: torch.Tensor) -> dist.Work:
        """Write the weights that the columns of this node hold to `output`."""
        nodes, width = self._peers.nodes, self._peers.width
        columns = torch.empty_like(output) if weights.rows else weights.held

        def order(_: Workspace) -> None:
            # From [place in the node, node] to [node, place in the node], the order of ranks.
            output.view(nodes, width, -1).copy_(columns.view(width, nodes, -1).transpose(0, 1))

        works = [*(TransferRun(each, columns, weights.held) for each in weights.rows), order]
        assert weights.sent is not None
        queues = self._peers.comm.queues
        return Arrival(queues.submit(TransferKind.GATHER, weights.rows, works, [weights.sent]))

    def versions(self) -> tuple[int, ...]:
        """Return the version counters of the shard, which in-place writes move."""
        return tuple(each._version for each in shards_of(self.module))

    # Gradients -------------------------------------------------------------------------------------------------------

    def reduce(self, output: torch.Tensor, whole: torch.Tensor, op: Any) -> None:
        """Reduce the gradients `whole` of all ranks, and write this rank's slice to `output`."""
        peers, dtype = self._peers, whole.dtype
        nodes, width, queues = peers.nodes, peers.width, peers.comm.queues
        gradients = self._gradients.get(dtype)
        if gradients is None:
            gradients = self._gradients[dtype] = _Gradients.of(peers, self.name, len(output), dtype)
        factor = factor_of(op, peers.ranks)
        summed = whole
        if gradients.rows:
            columns = torch.empty_like(whole)
            # From [node, place in the node] to [place in the node, node].
            columns.view(width, nodes, -1).copy_(whole.view(nodes, width, -1).transpose(0, 1))
            summed = columns.view(width, -1)[peers.comm.rank % width]
            runs = [TransferRun(each, columns, summed) for each in gradients.rows]
            queues.submit(TransferKind.REDUCE, gradients.rows, runs).wait()
        shard = output
        if gradients.numel != len(output):
            summed, unpadded = summed.new_zeros(nodes * gradients.numel), summed
            summed.view(nodes, -1)[:, : len(output)].copy_(unpadded.view(nodes, -1))
            shard = output.new_empty(gradients.numel)
        run = TransferRun(gradients.sync, summed, shard)
        queues.submit(TransferKind.GRAD_SYNC, [gradients.sync], [run]).wait()
        if shard is not output:
            output.copy_(shard[: len(output)])
        if factor != 1:
            output.mul_(factor)


@final
class Arrival(dist.Work):
    """The end of a gather, in the form that FSDP2 waits for."""

    def __init__(self, end: Handle) -> None:
        super().__init__()
        self._end = end

    def wait(self, timeout: Any = None) -> bool:
        self._end.wait()
        return True
