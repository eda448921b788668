"""One flat buffer of a unit on one rank, and the memory that its transfers read and write.

A bucket holds the parameters of one dtype, all trainable or all frozen. Its memory is 1-D and contiguous:

    full    numel          compute dtype   unsharded weights, in a slot shared by units; the shard itself if P is 1×1
    shard   numel / P      compute dtype   this rank's P shard of the weights; bytes where it is stored encoded;
                                           in host memory with `offload="params"`; the master itself if P and OS
                                           have the same extent, cast at each gather
    master  numel / OS     own dtype       the optimizer writes here: a view of shard, or a copy in mixed precision
    copy    numel / hpZ    compute dtype   the backward copy, if the strategy keeps one
    grads   numel / G      accumulate      the sum of gradients over the micro-steps so far (`gradients.py`)

All of it is on the device, but for a P shard in host memory and the master of an optimizer that works on the host
(`offload="optimizer"`). The OS slice is inside the G slice, and the G slice inside the P slice.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from towpath.collectives.collective import Collective, Workspace
from towpath.core.buffers import Needs, largest
from towpath.core.placement import Partition
from towpath.core.step_state import ParamVersion, Slot, Slots
from towpath.core.strategy import TransferKind
from towpath.core.unit_plan import BucketPlan
from towpath.engine.aliases import exchanged
from towpath.engine.comm import CommContext
from towpath.engine.layout import BucketLayout, ParameterPlace, torch_dtype
from towpath.engine.parameters.dtensors import TensorParallelMesh
from towpath.engine.parameters.gradients import (
    FlatGradients,
    UnsentGradients,
    copied_to_host,
    copy_to_device,
    has_own_memory,
    slice_of,
)
from towpath.engine.parameters.initialise import TakeSlice
from towpath.engine.parameters.low_rank_sync import LowRankSync
from towpath.engine.parameters.partial_sums import Replica
from towpath.engine.parameters.shard_spec import EncodedShard, EncodedSlice, ShardSpec
from towpath.engine.parameters.shard_tensor import CANNOT_BE_CAST, ShardTensor
from towpath.engine.transfer_queues import RankTransfer, Work
from towpath.errors import ShardError

# Autograd keeps views of the weights that a forward gathered. A unit's backward gather must therefore write to the
# same memory, so each unit keeps one slot.


Buffers = dict[str, torch.Tensor]  # by dtype


class SlotMemory:
    """The buffers of all slots of weights, or of all slots of gradients. `made` counts the allocated slots."""

    def __init__(self, slots: Slots, needs: Sequence[Needs], device: torch.device) -> None:
        self._slots, self._needs, self._device = slots, needs, device
        self._buffers: weakref.WeakKeyDictionary[Slot, Buffers] = weakref.WeakKeyDictionary()
        self.made = 0
        for slot in slots.all:
            self.of(slot)

    @torch.inference_mode(False)  # what is made in inference mode could never be trained with
    def of(self, slot: Slot) -> Buffers:
        """Return the buffers of `slot`, allocated at the first call. They are freed with the slot itself."""
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
        """The bytes of all slots, shared or reserved for one unit. The slot of a unit kept unsharded does not count."""
        return sum(buffer.nbytes for slot in self._slots.all for buffer in self.of(slot).values())


class UnshardedParameter(nn.Parameter):
    """An unsharded parameter, which modules see while their unit is unsharded. Its `.data` counts writes."""

    # The `.data` of a plain tensor has a version counter of its own, so the engine would not notice writes through it.

    @property
    def data(self) -> torch.Tensor:
        """An alias outside autograd with the same version counter."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Copy `value` to the parameter's memory. Shape, dtype and device cannot change: the engine owns the memory."""
        mine, theirs = (f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (self, value))
        if mine != theirs:
            raise ShardError(CANNOT_BE_CAST.format(theirs, mine))
        with torch.no_grad():
            self.copy_(value)


def assign_slot(view: nn.Parameter, memory: torch.Tensor) -> None:
    """Make `view` a view of `memory`. Its version is unchanged, because to autograd a gather is not a write."""
    torch.Tensor.data.__set__(view, memory)  # pyright: ignore


class Bucket:
    """The parameters of one unit with one dtype, all trainable or all frozen, with their memory and transfers.

    `Unit` holds the buckets and calls them from the threads or streams of its transfers. The module's docstring lists
    the memory. `views` are the unsharded parameters that modules compute with. `version` counts the writes to the
    parameters, and `synced_count` is the count at the last parameter sync. `resting` is the encoded P shard, if any.
    """

    def __init__(
        self,
        layout: BucketLayout,
        plan: BucketPlan,
        start: TakeSlice,
        comm: CommContext,
        replica: Replica,
        mesh: TensorParallelMesh,
        writes: ParamVersion,
    ) -> None:
        self.layout, self.rank, self.device = layout, comm.rank, comm.device
        self.trainable = plan.spec.trainable
        self.transfers: dict[TransferKind, list[RankTransfer]] = {}
        # Gradients that are never sent stay as autograd made them.
        if plan.gradients_stay:
            self.gradients = UnsentGradients(plan, layout.places)
        else:
            self.gradients = FlatGradients(plan, layout.places, self.rank, self.device)
        self.use_plan(plan, comm)
        self.version = ParamVersion(writes)
        self.synced_count = 0
        compute, own = torch_dtype(plan.compute_dtype), torch_dtype(plan.own_dtype)
        # The P shard and the master are each rounded once, from the user's values.
        self.resting = EncodedShard(plan.rests_in, start(plan.params, own)) if plan.rests_in else None
        if plan.casts_master:
            self.shard = start(plan.optimizer, own)
        else:
            self.shard = self.resting.message if self.resting else start(plan.params, compute)
        if plan.params_on_host:
            self.shard = copied_to_host(self.shard)
        self._is_copied = plan.params_on_host and has_own_memory(self.device)
        # Whether a gather first writes this rank's part of the weights to its place in `full`.
        self._fills_place = self._is_copied or plan.casts_master
        if plan.has_master and not plan.casts_master:
            self.master = start(plan.optimizer, own)
            if plan.optimizer_on_host:
                self.master = copied_to_host(self.master)
        else:
            self.master = self._own_slice(self.shard)
        self.copy = self._empty(plan.numel // plan.backward_copy.count, compute) if plan.backward_copy else None
        self._rounded: torch.Tensor | None = None
        self.always_whole = plan.always_whole
        # Weights that nothing shards need no slot. The modules compute with the P shard itself.
        self.full = self.shard if self.always_whole else self._empty(0, compute)
        self.views = [self._view(place, compute) for place in layout.places]
        for place in layout.places:
            self._replace_parameter(place, replica, mesh)
        if self.always_whole:
            self.assign_slot(self.shard)

    def use_plan(self, plan: BucketPlan, comm: CommContext) -> None:
        """Use the transfers of `plan` from now on. Unchanged transfers keep their collectives, and so their state."""
        self.plan = plan
        changed = [
            kind
            for kind, wanted in plan.transfers.items()
            if kind not in self.transfers or wanted != tuple(bound.transfer for bound in self.transfers[kind])
        ]
        for kind in changed:
            self.transfers[kind] = comm.bind(plan.transfers[kind])
        self.gradients.use_transfers(plan, self.transfers, new_grad_sync=TransferKind.GRAD_SYNC in changed)

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _slice(self, whole: torch.Tensor, cut: Partition) -> torch.Tensor:
        return slice_of(whole, cut, self.rank)

    def _own_slice(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the part of this rank's P shard that is its OS slice."""
        return slice_of(shard, self.plan.optimizer, self.rank, self.plan.params)

    def _view(self, place: ParameterPlace, dtype: torch.dtype) -> nn.Parameter:
        """Make the unsharded parameter that modules compute with: for a DTensor, with this rank's full local part."""
        trains = place.parameter.requires_grad
        if place.parallel is None:
            return UnshardedParameter(self._empty(0, dtype), trains)
        # A DTensor checks its local part against its own shape, so an empty one will not do.
        # Takes no memory, until `assign_slot` assigns some.
        nowhere = self._empty(1, dtype).expand(place.shape)
        return nn.Parameter(place.parallel.wrap(nowhere), trains)

    def _replace_parameter(self, place: ParameterPlace, replica: Replica, mesh: TensorParallelMesh) -> None:
        """Turn the user's parameter into a ShardTensor. It stays the same object, so optimizers keep working."""
        # A DTensor cannot be changed in place, because its class has slots. The modules then get another object, and
        # optimizers that have the DTensor are refused at their next step (`engine/optimizer_steps.py`).
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
        start, end = where.bounds_in_slice()
        # Libraries put attributes on parameters, and swapping the tensors exchanges these, too.
        attributes = dict(vars(parameter))
        held = EncodedSlice(self.resting, start, end) if self.resting else self.master[start:end]
        shard = nn.Parameter(ShardTensor(held, where, self.version), parameter.requires_grad)
        shard.version = self.version  # pyright: ignore[reportAttributeAccessIssue]
        if place.parallel is None:
            # The optimizer's parameter groups and the user's variables hold the object. It stays, and gets the class,
            # shape and memory of the ShardTensor.
            torch.utils.swap_tensors(parameter, shard)
        else:
            place.parameter = shard
            for module, attribute in place.owners:
                module._parameters[attribute] = shard  # pyright: ignore[reportPrivateUsage]
            for holder, key in place.kept:
                holder[key] = exchanged(holder[key], parameter, shard)
            parameter.towpath_replaced = place.names[0]  # pyright: ignore[reportAttributeAccessIssue]
        vars(place.parameter).update(attributes)

    # Weights ------------------------------------------------------------------------------------------------------

    def assign_slot(self, full: torch.Tensor) -> None:
        """Keep the unsharded weights in `full` from now on. The modules' views follow."""
        self.full = full
        for view, place in zip(self.views, self.layout.places, strict=True):
            # Through .data each view has a version counter of its own, which writes to `full` do not change. To
            # autograd, a gather is therefore not an in-place change.
            if place.parallel is None:
                assign_slot(view, place.of(full))
            else:
                view._local_tensor = place.of(full).data  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def dirty(self) -> bool:
        """True if the parameters were written to since the last parameter sync."""
        return self.synced_count != self.version.count

    def param_sync(self, workspace: Workspace) -> None:
        """Cast the master, if there is one, to this rank's part of the P shards, and send that part to other ranks."""
        region = self._sync_region(workspace)
        # Differences are to the old values, which are in host memory here.
        if self._is_copied and self.plan.syncs_differences:
            region.copy_(self.shard, non_blocking=True)
        new = self._own_slice(region) if self.plan.agrees_on_sizes else self._cast_master(region, workspace)
        for transfer in self.transfers[TransferKind.PARAM_SYNC]:
            transfer.run(region, new, workspace)
        if self._is_copied:
            self.shard.copy_(region, non_blocking=True)

    def encode_param_sync(self, workspace: Workspace) -> None:
        """Cast the master as `param_sync` does, and encode the result, before the ranks agree on its size."""
        region = self._sync_region(workspace)
        mine, stored = self._own_slice(region), self._own_slice(self.shard)
        if self._is_copied:
            mine.copy_(stored, non_blocking=True)
        new = self._cast_master(region, workspace)
        for transfer in self.transfers[TransferKind.PARAM_SYNC]:
            with transfer.explained():
                transfer.collective.encode(region, new)
        if self._is_copied:
            stored.copy_(mine, non_blocking=True)

    def _sync_region(self, workspace: Workspace) -> torch.Tensor:
        """Return the P shard, or memory for it on the device if it is stored in host memory."""
        # The parameter sync's stream writes to the host's copy, and the streams of gathers read it. The host itself
        # does neither. So the step machine's order suffices, as for a P shard on the device: a gather follows the
        # parameter sync of its unit (`Task.after`). The next parameter sync follows what the computation has waited
        # for, and so every earlier gather: those that nothing used are waited for at the end of a pass.
        if not self._is_copied:
            return self.shard
        start, end = self.plan.synced_in
        return workspace.take(end, self.shard.dtype)[start:]

    def _cast_master(self, region: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """Return this rank's part of the P shards in `region` as the optimizer left it."""
        if self.version.take_replaced():
            for bound in self.transfers[TransferKind.PARAM_SYNC]:
                # It cannot know what the others hold now.
                bound.collective.restart()
        new = self._own_slice(region)
        if self.plan.has_master:
            if self.plan.cast_apart:
                new = workspace.take(self.plan.cast_apart, new.dtype)
            copy_to_device(self.master, new, self.plan, workspace)
        return new

    def source(self, kind: TransferKind) -> torch.Tensor:
        """Return what this rank contributes to a gather: the backward copy for a backward gather, or the P shard."""
        # A P shard in host memory, or a master in another dtype, contributes from its place in `full`, to which
        # `before_gather` copies it.
        if kind is TransferKind.BACKWARD_GATHER and self.copy is not None:
            return self.copy
        return self._slice(self.full, self.plan.params) if self._fills_place else self.shard

    def before_gather(self, kind: TransferKind) -> Work | None:
        """Return what must be computed before the gathers, or instead of them if this rank holds all weights."""
        if self._fills_place and not (kind is TransferKind.BACKWARD_GATHER and self.copy is not None):
            return lambda _: self._slice(self.full, self.plan.params).copy_(self.shard, non_blocking=True)
        if self.transfers[kind]:
            return None
        if (resting := self.resting) is not None:
            return lambda _: resting.decode(self.full)
        # This rank has all of it, but the modules' views are in the slot.
        source = self.source(kind)
        return lambda _: self.full.copy_(source) if source.data_ptr() != self.full.data_ptr() else None

    def save_backward_copy(self, _: Workspace | None = None) -> None:
        """Save this rank's part of the unsharded weights for the backward gather, if the strategy has such a copy."""
        # In the gather's own job: later units may take the slot as soon as the forward has ended.
        if self.copy is not None and self.plan.backward_copy is not None:
            self.copy.copy_(self._slice(self.full, self.plan.backward_copy))

    def remember(self) -> None:
        """Save the unsharded weights' values before the user may change them, if a codec has rounded them."""
        # `write_back` compares with them.
        if self.resting is not None:
            # An encoded shard finds out itself which blocks have changed.
            return
        kinds = (TransferKind.GATHER, TransferKind.PARAM_SYNC)
        rounded = any(bound.transfer.transport.encoding for kind in kinds for bound in self.transfers[kind])
        self._rounded = self._slice(self.full, self.plan.params).clone() if rounded else None

    def write_back(self) -> None:
        """Take over this rank's slices of the unsharded weights, which the user may have changed."""
        # Values that the user did not change keep their full precision, as the master or the P shard has it.
        now = self._slice(self.full, self.plan.params)
        if self.resting is not None:
            self.resting.write(0, now)
            self.version.written()
            return
        shard = torch.empty_like(now).copy_(self.shard) if self._fills_place else self.shard
        before = shard if self._rounded is None else self._rounded
        self.version.replaced()
        if self.plan.has_master:
            mine, was = self._own_slice(now), self._own_slice(before)
            master = self.master.to(mine.device)
            # What the user did not change keeps the bits that its rounded copy has lost.
            left = mine == (master.to(mine.dtype) if self._rounded is None else was)
            self.master.copy_(torch.where(left, master, mine.to(master.dtype)))
        if not self.plan.casts_master:
            self.shard.copy_(torch.where(now == before, shard, now))
        self._rounded = None

    # State and memory ---------------------------------------------------------------------------------------------

    @property
    def stateful(self) -> dict[str, Collective | LowRankSync]:
        """The collectives and the low-rank sync, which may keep state between steps, by their names in checkpoints."""
        found: dict[str, Collective | LowRankSync] = {}
        for kind, transfers in self.transfers.items():
            for position, bound in enumerate(transfers):
                found[f"{kind.value}/{position}"] = bound.collective
        if self.gradients.low_rank is not None:
            found[f"{TransferKind.GRAD_SYNC.value}/low-rank"] = self.gradients.low_rank
        return found

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that this bucket takes on the device between steps, by kind."""
        on_host, casts = self.plan.optimizer_on_host, self.plan.casts_master
        has_master = self.plan.has_master and not on_host and (self.trainable or not casts)
        others = {} if self.trainable else {"frozen": self.shard.nbytes}
        if sent := sum(each.collective.kept_bytes for each in self.transfers[TransferKind.PARAM_SYNC]):
            others["sent"] = sent
        return others | {
            "params": self.shard.nbytes if self.trainable and not (self.plan.params_on_host or casts) else 0,
            "master": self.master.nbytes if has_master else 0,
            "backward_params": self.copy.nbytes if self.copy is not None else 0,
            "grads": self.gradients.nbytes,
            "grad": 0 if on_host else self.gradients.mean_nbytes,
            "feedback": sum(kept.nbytes for keeper in self.stateful.values() for kept in keeper.state),
        }

    def host_memory_bytes(self) -> dict[str, int]:
        held = {"params": self.shard.nbytes} if self.plan.params_on_host else {}
        if self.plan.optimizer_on_host:
            held |= {"master": self.master.nbytes, "grad": self.gradients.mean_nbytes}
        return held
