"""The transfers of one group of parameters that FSDP2 gathers together, on one rank.

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
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from towpath.collectives.collective import Workspace
from towpath.core.strategy import TransferKind
from towpath.core.units import round_up
from towpath.engine.transfer_queues import Handle, RankTransfer
from towpath.errors import StepError
from towpath.fsdp.fields import has_own_cast, shards_of, trained_in, versions_of
from towpath.fsdp.peers import Peers, factor_of


@dataclass(slots=True)
class _ColumnWeights:
    """The weights of one unit that its column holds, and the transfers that keep them up to date."""

    peers: Peers
    held: torch.Tensor  # the shards of this column, one of each node; in the host's memory if the user wants that
    sync: RankTransfer
    rows: list[RankTransfer]  # the gather over the row, unless this rank is alone on its node
    sent: Handle | None = None  # the end of the last parameter sync
    versions: tuple[int, ...] = ()  # the version counters of the shard that it sent

    @staticmethod
    def of(peers: Peers, unit: str, shard: torch.Tensor) -> _ColumnWeights:
        """Return weights that were not sent yet, with the memory for shards like `shard`."""
        whole = len(shard) * peers.ranks
        [sync] = peers.bind(TransferKind.PARAM_SYNC, unit, whole, shard.dtype)
        rows = peers.bind(TransferKind.GATHER, unit, whole, shard.dtype)
        on_host = peers.holds_on_host(peers.nodes * shard.nbytes)
        where: dict[str, Any] = {"device": "cpu", "pin_memory": shard.is_cuda} if on_host else {"device": shard.device}
        return _ColumnWeights(peers, torch.empty(peers.nodes * len(shard), dtype=shard.dtype, **where), sync, rows)

    def mine(self, region: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of what the column holds: the shard that was sent last."""
        return region.view(self.peers.nodes, -1)[self.peers.comm.rank // self.peers.width]

    def overwrite(self, shard: Sequence[torch.Tensor]) -> None:
        """Replace this rank's slice by `shard`, which may be in parts and in another dtype."""
        if self.sent is not None:
            self.sent.wait()  # it may still read the slice
        parts = list(self.mine(self.held).split([len(part) for part in shard]))
        torch._foreach_copy_(parts, list(shard), non_blocking=True)  # pyright: ignore

    def on_device(self) -> torch.Tensor:
        """Return what the column holds, in the device's memory."""
        # A copy belongs to the stream that makes it, and is used on no other one.
        device = self.peers.comm.device
        return self.held if self.held.device == device else self.held.to(device, non_blocking=True)

    def run(self, workspace: Workspace) -> None:
        """Send this rank's slice, and receive those of the others."""
        region = self.on_device()
        self.sync.run(region, self.mine(region), workspace)
        if region is not self.held:
            self.held.copy_(region, non_blocking=True)

    def encode(self, _: Workspace) -> None:
        """Encode this rank's slice, before the ranks agree on the size of messages."""
        region = self.on_device()
        self.sync.collective.encode(region, self.mine(region))


@dataclass(slots=True)
class _UnitGradients:
    """The transfers of one unit's gradients in one dtype."""

    rows: list[RankTransfer]
    sync: RankTransfer
    numel: int  # of a rank's slice, in multiples of the codec's blocks

    @staticmethod
    def of(peers: Peers, unit: str, shard: torch.Tensor) -> _UnitGradients:
        codec = peers.strategy.grad_sync.encoding
        padded = round_up(len(shard), 1 if codec is None else codec.grain)
        rows = peers.bind(TransferKind.REDUCE, unit, len(shard) * peers.ranks, shard.dtype)
        [sync] = peers.bind(TransferKind.GRAD_SYNC, unit, padded * peers.ranks, shard.dtype)
        return _UnitGradients(rows, sync, padded)


@final
class WiredUnit:
    """The transfers of one unit. Every rank must make the calls of all units in the same order.

    `owner`: A module that FSDP2 shards, or one of its groups of parameters. `name`: Its name in the model, for errors.
    """

    def __init__(self, name: str, owner: Any, peers: Peers) -> None:
        self.name, self.owner, self._peers = name, owner, peers
        self._weights: _ColumnWeights | None = None
        # By dtype and size of a rank's slice. Only parameters that have gradients are in it, such as those of the
        # branch that this forward pass took. A codec keeps rounding errors, so with one these parameters count, too.
        self._gradients: dict[tuple[torch.dtype, int, tuple[int, ...] | None], _UnitGradients] = {}
        # Whether the last gather found other values than those that were sent.
        self.drifted: torch.Tensor | None = None

    # Weights ---------------------------------------------------------------------------------------------------------

    def gather(self, output: torch.Tensor, mine: torch.Tensor) -> dist.Work:
        """Gather the weights of all ranks into `output`, of which `mine` is this rank's slice. Return its end."""
        weights = self._weights
        if weights is None or weights.held.dtype != mine.dtype or len(weights.held) != self._peers.nodes * len(mine):
            weights = self._weights = _ColumnWeights.of(self._peers, self.name, mine)
        # All ranks must decide alike, without a message. A program that writes to weights moves the version counters of
        # their shards on every rank. Only writes through `.data` do not.
        if weights.sent is None or weights.versions != self._versions():
            written = None if weights.sent is None else self.name
            weights.overwrite([mine])
            collective = weights.sync.collective
            if weights.sync.transfer.agrees_on_sizes:
                # No optimizer has stepped, so the ranks have not agreed on sizes. Each sends what values could need.
                collective.restart()
                self._peers.submit(TransferKind.PARAM_SYNC, (), [weights.encode])
                collective.agreed_size = collective.largest_size
            self.send()
            return Arrival(self._share(weights, output), written)
        self._note_drift(weights, mine)
        return Arrival(self._share(weights, output))

    def _note_drift(self, weights: _ColumnWeights, mine: torch.Tensor) -> None:
        """Note whether the shard has other values than those that were sent last."""
        # As bits: not-a-number differs from itself, and one rank alone may have it.
        sent, mine = (each.view(torch.uint8) for each in (weights.mine(weights.held), mine))
        # Ranks could not send new values here: values may change on some ranks only, and no rank knows of the others.
        # Nor may the host read the outcome here: on a GPU, each gather would wait. All ranks learn of it after a step.
        if self.drifted is None:
            self.drifted = torch.zeros((), dtype=torch.bool, device=mine.device)
        torch.any(sent.to(mine.device, non_blocking=True) != mine, out=self.drifted)

    def take_shard(self) -> bool:
        """Copy the shard to what the column holds, as FSDP2 would cast it. Return False if the next gather has to."""
        weights = self._weights
        if weights is None or weights.held.dtype == torch.uint8 or has_own_cast(self.owner):
            return False
        weights.overwrite(shards_of(self.owner))
        return True

    @property
    def encoding(self) -> _ColumnWeights | None:
        """The weights, if ranks must agree on the sizes of their messages."""
        weights = self._weights
        return weights if weights is not None and weights.sync.transfer.agrees_on_sizes else None

    def send(self) -> None:
        """Send the shard that was copied to what the column holds. Return before it has arrived."""
        weights = self._weights
        assert weights is not None
        weights.versions = self._versions()
        weights.sent = self._peers.submit(TransferKind.PARAM_SYNC, [weights.sync], [weights.run])

    def _share(self, weights: _ColumnWeights, output: torch.Tensor) -> Handle:
        """Write the weights that the columns of this node hold to `output`."""
        nodes, width = self._peers.nodes, self._peers.width
        bundles = torch.empty_like(output) if weights.rows else None

        def share(workspace: Workspace) -> None:
            columns = held = weights.on_device()
            for row in weights.rows:
                assert bundles is not None
                row.run(columns := bundles, held, workspace)
            # From [place in the node, node] to [node, place in the node], the order of ranks.
            output.view(nodes, width, -1).copy_(columns.view(width, nodes, -1).transpose(0, 1))

        assert weights.sent is not None
        return self._peers.submit(TransferKind.GATHER, weights.rows, [share], [weights.sent])

    def _versions(self) -> tuple[int, ...]:
        return tuple(versions_of(self.owner))

    @property
    def held_bytes(self) -> tuple[int, int]:
        """The bytes that are kept for the column, on the device and in the host's memory."""
        weights = self._weights
        if weights is None:
            return 0, 0
        held, sent = weights.held.nbytes, weights.sync.collective.kept_bytes
        return (sent, held) if weights.held.device != self._peers.comm.device else (held + sent, 0)

    def problems(self) -> list[tuple[str, str]]:
        """Return the parameter sync with each reason why it could not be decoded, as far as it is known by now."""
        if self._weights is None:
            return []
        sync = self._weights.sync
        return [(str(sync.transfer), problem) for problem in sync.collective.problems(wait=False)]

    # Gradients -------------------------------------------------------------------------------------------------------

    def reduce(self, output: torch.Tensor, whole: torch.Tensor, op: Any) -> None:
        """Reduce the gradients `whole` of all ranks, and write this rank's slice to `output`."""
        peers = self._peers
        nodes, width = peers.nodes, peers.width
        trained = trained_in(self.owner, len(output)) if peers.strategy.grad_sync.encoding else None
        form = whole.dtype, len(output), trained
        gradients = self._gradients.get(form)
        if gradients is None:
            gradients = self._gradients[form] = _UnitGradients.of(peers, self.name, output)
        if trained is None and peers.strategy.grad_sync.encoding:
            gradients.sync.collective.restart()  # what it has rounded away may belong to other parameters
        summed = whole
        if gradients.rows:
            columns = torch.empty_like(whole)
            # From [node, place in the node] to [place in the node, node].
            columns.view(width, nodes, -1).copy_(whole.view(nodes, width, -1).transpose(0, 1))
            summed = columns.view(width, -1)[peers.comm.rank % width]
            works = [partial(row.run, columns, summed) for row in gradients.rows]
            peers.submit(TransferKind.REDUCE, gradients.rows, works).wait()
        shard = output
        if gradients.numel != len(output):  # no block of the codec spans two slices
            unpadded, summed = summed, summed.new_zeros(nodes * gradients.numel)
            summed.view(nodes, -1)[:, : len(output)].copy_(unpadded.view(nodes, -1))
            shard = output.new_empty(gradients.numel)
        work = partial(gradients.sync.run, summed, shard)
        peers.submit(TransferKind.GRAD_SYNC, [gradients.sync], [work]).wait()
        if shard is not output:
            output.copy_(shard[: len(output)])
        factor = factor_of(op, peers.ranks)
        if factor != 1:
            output.mul_(factor)


@final
class Arrival(dist.Work):
    """The end of a gather, in the form that FSDP2 waits for.

    `written`: The name of the unit, if this rank sent its weights again because they have changed since the last step.
    """

    def __init__(self, end: Handle, written: str | None = None) -> None:
        super().__init__()
        self._end, self._written = end, written

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the gather, on a GPU in the order of the current stream."""
        try:
            self._end.wait()
        except StepError as error:
            if self._written is None:
                raise
            raise StepError(
                f"{error}\nThis rank sent the weights of {self._written or 'root'} because they changed outside of an "
                "optimizer step. Its peers send theirs only if they have changed, too: let every rank write to its "
                "weights, and load checkpoints, at the same place."
            ) from error
        return True
