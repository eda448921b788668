"""One flat buffer of a unit on one rank, and what the transfers read and write there.

A bucket holds the parameters of one dtype, all trainable or all frozen. Its memory is 1-D and contiguous:

    full    numel          compute dtype   whole weights, in a slot that units take turns in; = shard where P is 1×1
    shard   numel / P      compute dtype   this rank's slice of the weights; or bytes, where it rests encoded
    master  numel / OS     own dtype       what the optimizer writes: a view of shard, or a copy in mixed precision
    copy    numel / hpZ    compute dtype   what backward gathers from, where the strategy keeps one
    grads   numel / G      accumulate      the sum of the gradients of the micro-steps so far (`gradients.py`)

All of it is the device's, but for the master of a bucket whose optimizer works in the host's memory
(`optimizer_memory.py`).
The OS slice lies inside the G slice, and that inside the P slice.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from towpath.collectives.bound_transfer import CoalescedTransfers, RankTransfer
from towpath.collectives.collective import Collective, Workspace
from towpath.core.formats import item_bytes
from towpath.core.placement import Partition
from towpath.core.step_state import ParamVersion, Slot, Slots
from towpath.core.strategy import Kind
from towpath.core.transfer import Needs
from towpath.core.unit_plan import BucketPlan, largest
from towpath.engine.layout import BucketLayout, ParameterPlace, exchanged, torch_dtype
from towpath.engine.parameters.gradients import OptimizerMemory, gradients_of, slice_of, slice_within
from towpath.engine.parameters.initialise import Flat
from towpath.engine.parameters.low_rank_sync import LowRankSync
from towpath.engine.parameters.parallel import Mesh
from towpath.engine.parameters.partial_sums import Replica
from towpath.engine.parameters.shard_operations import operation
from towpath.engine.parameters.shard_tensor import EncodedShard, ShardSpec, ShardTensor, handlers_are_chosen_by
from towpath.engine.streams.queue import CommContext
from towpath.errors import ShardTensorError

# --- buffers ----------------------------------------------------------------------------------------------------------
#
# The memory behind the step machine's slots. Sized once; every buffer that is made is counted.
#
# Autograd keeps views of the weights a forward gathered, so a unit's backward gather must land in the very same
# memory: each unit keeps one slot.


Buffers = dict[str, torch.Tensor]  # by dtype


class SlotMemory:
    """Of the slots of weights, or of gradients. `needs`: of each unit."""

    def __init__(self, slots: Slots, needs: Sequence[Needs], device: torch.device) -> None:
        self._slots, self._needs, self._device = slots, needs, device
        self._buffers: weakref.WeakKeyDictionary[Slot, Buffers] = weakref.WeakKeyDictionary()
        self.made = 0
        for slot in slots.all:
            self.of(slot)

    @torch.inference_mode(False)  # what is made in inference mode could never be trained with
    def of(self, slot: Slot) -> Buffers:
        """Made when first asked for; free again when the machine has let the slot go."""
        if slot not in self._buffers:
            needs = largest(self._needs[unit] for unit in slot.fits)
            self._buffers[slot] = {
                dtype: torch.empty(numel, dtype=getattr(torch, dtype), device=self._device)
                for dtype, numel in needs.items()
            }
            self.made += 1
        return self._buffers[slot]

    @property
    def nbytes(self) -> int:
        """Of those that units take in turns, or that are one unit's for good."""
        return sum(b.numel() * item_bytes(dtype) for slot in self._slots.all for dtype, b in self.of(slot).items())


# --- whole parameter --------------------------------------------------------------------------------------------------
#
# A parameter as the modules compute with it: whole, in memory that the engine gives it and takes again.


class WholeParameter(nn.Parameter):
    """A parameter whose `.data` counts writes.

    A plain tensor's `.data` has a version of its own: what is written through it leaves no trace.
    """

    @property
    def data(self) -> torch.Tensor:
        """An alias outside autograd, with the same version."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Write the values into the memory that it has. Shape, dtype and device stay: the memory is the engine's."""
        mine, theirs = (f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (self, value))
        if mine != theirs:
            raise ShardTensorError(
                f"got {theirs} for a parameter of {mine}: a sharded model cannot be cast or moved. Do it before "
                "shard(); precision= sets what computes and travels."
            )
        with torch.no_grad():
            self.copy_(value)


def live_in(view: nn.Parameter, memory: torch.Tensor) -> None:
    """Let `view` be what lies in `memory`. Its version stays: to autograd, a gather is no write."""
    torch.Tensor.data.__set__(view, memory)  # pyright: ignore


handlers_are_chosen_by(operation)


class Bucket:
    def __init__(
        self,
        layout: BucketLayout,
        plan: BucketPlan,
        start: Flat,
        wiring: CommContext,
        replica: Replica,
        mesh: Mesh,
        writes: ParamVersion,
    ) -> None:
        self.layout, self.rank, self.device = layout, wiring.rank, wiring.device
        self.trainable = plan.spec.trainable
        self.transfers: dict[Kind, list[RankTransfer]] = {}
        self._optimizer = OptimizerMemory(plan, self.device)
        self.gradients = gradients_of(plan, layout.places, self._optimizer, self.rank, self.device)
        self.bind(plan, wiring)
        self.mark = ParamVersion(writes)
        self.published = 0
        compute, own = torch_dtype(plan.compute_dtype), torch_dtype(plan.own_dtype)
        # Rounded once, from what the user gave.
        self.resting = EncodedShard(plan.rests_in, start.part(plan.params, own)) if plan.rests_in else None
        self.shard = self.resting.message if self.resting else start.part(plan.params, compute)
        if plan.has_master:
            self.master = self._optimizer.holding(start.part(plan.optimizer, own))
        else:
            self.master = self._own_slice(self.shard)
        self.copy = self._empty(plan.numel // plan.backward_copy.count, compute) if plan.backward_copy else None
        self._rounded: torch.Tensor | None = None
        self.always_whole = plan.always_whole
        self.full = self.shard if self.always_whole else self._empty(0, compute)
        self.views = [self._view(place, compute) for place in layout.places]
        for place in layout.places:
            self._exchange(place, replica, mesh)
        if self.always_whole:
            self.live_in(self.shard)

    def bind(self, plan: BucketPlan, wiring: CommContext) -> None:
        """From now on it travels by the transfers of `plan`; those that stay keep their collectives."""
        self.plan = plan
        changed = [
            kind
            for kind, wanted in plan.transfers.items()
            if kind not in self.transfers or wanted != tuple(bound.transfer for bound in self.transfers[kind])
        ]
        for kind in changed:
            self.transfers[kind] = wiring.bind(plan.transfers[kind])
        self.gradients.travel_by(plan, self.transfers, new_sync=Kind.SYNC in changed)

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _slice(self, whole: torch.Tensor, cut: Partition) -> torch.Tensor:
        return slice_of(whole, cut, self.rank)

    def _own_slice(self, shard: torch.Tensor) -> torch.Tensor:
        """The part of this rank's P shard that is its OS slice."""
        return slice_within(shard, self.plan.params, self.plan.optimizer, self.rank)

    def _view(self, place: ParameterPlace, dtype: torch.dtype) -> nn.Parameter:
        """What the modules compute with: whole, as far as this rank's part of a DTensor is."""
        trains = place.parameter.requires_grad
        if place.parallel is None:
            return WholeParameter(self._empty(0, dtype), trains)
        nowhere = self._empty(1, dtype).expand(place.shape)  # takes no memory; `live_in` gives it some
        return nn.Parameter(place.parallel.wrap(nowhere), trains)

    def _exchange(self, place: ParameterPlace, replica: Replica, mesh: Mesh) -> None:
        """The user's parameter becomes a ShardTensor, and stays the same object: optimizers keep hold of it.

        But for a DTensor, whose class has slots: the modules get another object, and `build` tells the optimizers.
        """
        parameter, cut = place.parameter, self.plan.optimizer
        where = ShardSpec(
            place.shape,
            place.offset,
            self.plan.numel // cut.count,
            cut.slots[self.rank],
            replica,
            place.parallel,
            mesh.counts(place.parallel),
            tuple(rank for rank, slot in enumerate(cut.slots) if slot == cut.slots[self.rank]),
            place.names[0],
            self.layout.unit,
        )
        start, end = where.in_cut()
        attributes = dict(vars(parameter))
        held = self.resting.part(start, end) if self.resting else self.master[start:end]
        shard = nn.Parameter(ShardTensor(held, where, self.mark), parameter.requires_grad)
        shard.mark = self.mark  # pyright: ignore[reportAttributeAccessIssue]
        if place.parallel is None:
            torch.utils.swap_tensors(parameter, shard)
        else:
            place.parameter = shard
            for module, attribute in place.owners:
                module._parameters[attribute] = shard  # pyright: ignore[reportPrivateUsage]
            for holder, key in place.kept:
                holder[key] = exchanged(holder[key], parameter, shard)
        vars(place.parameter).update(attributes)

    # Weights ------------------------------------------------------------------------------------------------------

    def live_in(self, full: torch.Tensor) -> None:
        """Let the whole weights live in `full`; the modules' views follow."""
        self.full = full
        for view, place in zip(self.views, self.layout.places, strict=True):
            # Through .data the view has a version counter of its own: a gather is no in-place change to autograd.
            if place.parallel is None:
                live_in(view, place.of(full))
            else:
                view._local_tensor = place.of(full).data  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def dirty(self) -> bool:
        return self.published != self.mark.version

    def publish(self, workspace: Workspace) -> None:
        mine = self._own_slice(self.shard)
        if self.plan.has_master:
            self._optimizer.publish(self.master, mine)
        for transfer in self.transfers[Kind.PUBLISH]:
            transfer.run(self.shard, mine, workspace)

    def source(self, kind: Kind) -> torch.Tensor:
        """What this rank brings to a gather."""
        return self.copy if kind is Kind.BACKWARD_GATHER and self.copy is not None else self.shard

    def begin_gather(self, kind: Kind, workspace: Workspace) -> None:
        """The part of `gather` that waits for nobody."""
        for transfer in self.transfers[kind][:1]:
            transfer.begin(self.full, self.source(kind), workspace)

    def gather(self, kind: Kind, keep_copy: bool, workspace: Workspace) -> None:
        source = self.source(kind)
        if self.resting is not None and not self.transfers[kind]:
            self.resting.decode(self.full)
        elif not self.transfers[kind] and source is not self.full:
            self.full.copy_(source)  # a backward copy that is whole
        for transfer in self.transfers[kind]:
            transfer.run(self.full, source, workspace)
        self.keep(keep_copy)

    def keep(self, keep_copy: bool) -> None:
        """After a gather: the copy for the backward pass, if it is wanted."""
        if keep_copy and self.copy is not None and self.plan.backward_copy is not None:
            self.copy.copy_(self._slice(self.full, self.plan.backward_copy))

    def remember(self) -> None:
        """Before the user may change the whole weights: what they were, if a codec has rounded them."""
        if self.resting is not None:
            return  # it can tell itself
        kinds = (Kind.GATHER, Kind.PUBLISH)
        rounded = any(bound.transfer.wire.encoding for kind in kinds for bound in self.transfers[kind])
        self._rounded = self._slice(self.full, self.plan.params).clone() if rounded else None

    def write_back(self) -> None:
        """After the user may have changed the whole weights: take over this rank's slices.

        What the user left alone keeps the precision it has here: of the masters, and of what no codec has rounded.
        """
        now = self._slice(self.full, self.plan.params)
        if self.resting is not None:
            self.resting.write(0, now)
            self.mark.written()
            return
        before = self.shard if self._rounded is None else self._rounded
        if self.plan.has_master:
            mine, was = self._own_slice(now), self._own_slice(before)
            master = self.master.to(mine.device)
            left = mine == (master.to(mine.dtype) if self._rounded is None else was)
            self.master.copy_(torch.where(left, master, mine.to(master.dtype)))
        self.shard.copy_(torch.where(now == before, self.shard, now))
        self._rounded = None
        self.mark.written()

    # Gradients ----------------------------------------------------------------------------------------------------

    def reduced_in(self, memory: Buffers, start: int) -> torch.Tensor:
        """Where the gradients of this micro-step arrive: in `memory`, from `start` on."""
        return memory[self.plan.reduce_dtype][start : start + self.plan.numel]

    def reduce(self, memory: Buffers, start: int, workspace: Workspace) -> None:
        # The view is made here, by the queue's thread: what one allocates and another frees leaves holes in the heap.
        self.gradients.reduce(self.reduced_in(memory, start), workspace)

    # What is kept -------------------------------------------------------------------------------------------------

    @property
    def keepers(self) -> dict[str, Collective | LowRankSync]:
        """What keeps something from one step to the next, by name."""
        found: dict[str, Collective | LowRankSync] = {}
        for kind, transfers in self.transfers.items():
            for position, bound in enumerate(transfers):
                found[f"{kind.value}/{position}"] = bound.collective
        if self.gradients.low_rank is not None:
            found[f"{Kind.SYNC.value}/low-rank"] = self.gradients.low_rank
        return found

    def memory_bytes(self) -> dict[str, int]:
        """On the device."""
        on_host = self.plan.optimizer_on_host
        frozen = {} if self.trainable else {"frozen": self.shard.nbytes}
        return frozen | {
            "params": self.shard.nbytes if self.trainable else 0,
            "master": self.master.nbytes if self.plan.has_master and not on_host else 0,
            "backward_params": self.copy.nbytes if self.copy is not None else 0,
            "grads": self.gradients.nbytes,
            "grad": 0 if on_host else self.gradients.mean_nbytes,
            "feedback": sum(kept.nbytes for keeper in self.keepers.values() for kept in keeper.state),
        }

    def host_memory_bytes(self) -> dict[str, int]:
        """In the host's memory, for the optimizer."""
        outgoing = self._optimizer.outgoing
        if outgoing is None:
            return {}
        return {"master": self.master.nbytes, "grad": self.gradients.mean_nbytes, "outgoing": outgoing.nbytes}


def gather_together(
    buckets: Sequence[Bucket], transfers: CoalescedTransfers, kind: Kind, keep_copy: bool, workspace: Workspace
) -> None:
    """As one message."""
    transfers.run([b.full for b in buckets], [b.source(kind) for b in buckets], workspace)
    for bucket in buckets:
        bucket.keep(keep_copy)
