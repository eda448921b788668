"""One flat buffer of a unit on one rank, and what the transfers read and write there.

A bucket holds the parameters of one dtype, all trainable or all frozen. Its memory is 1-D and contiguous:

    full    numel          compute dtype   whole weights, in a slot that units take turns in; = shard where P is 1×1
    shard   numel / P      compute dtype   this rank's slice of the weights; or bytes, where it rests encoded
    master  numel / OS     own dtype       what the optimizer writes: a view of shard, or a copy in mixed precision
    copy    numel / hpZ    compute dtype   what backward gathers from, where the strategy keeps one
    grads   numel / G      accumulate      the sum of the gradients of the micro-steps so far

All of it is the device's, but for the master of a bucket whose optimizer works in the host's memory
(`optimizer_memory.py`).
The OS slice lies inside the G slice, and that inside the P slice.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from towpath.collectives.bound_transfer import BoundTransfer
from towpath.collectives.collective import Collective
from towpath.collectives.workspace import Workspace
from towpath.core.routes import Op
from towpath.core.step_state import WriteMark
from towpath.core.strategy import Kind
from towpath.core.transitions import Cut
from towpath.core.unit_plan import BucketPlan
from towpath.engine.dtypes import torch_dtype
from towpath.engine.encoded_shard import EncodedShard
from towpath.engine.in_place import narrowed, widen
from towpath.engine.initialise import Flat
from towpath.engine.layout import BucketLayout, ParameterPlace
from towpath.engine.low_rank_sync import LowRankSync
from towpath.engine.optimizer_memory import OptimizerMemory
from towpath.engine.parallel import Mesh
from towpath.engine.partial_sums import Replica
from towpath.engine.shard_operations import operation
from towpath.engine.shard_tensor import ShardTensor, handlers_are_chosen_by
from towpath.engine.span import Span
from towpath.engine.wiring import Wiring
from towpath.errors import StepError

handlers_are_chosen_by(operation)


class Bucket:
    def __init__(
        self,
        layout: BucketLayout,
        plan: BucketPlan,
        start: Flat,
        wiring: Wiring,
        replica: Replica,
        mesh: Mesh,
        writes: WriteMark,
    ) -> None:
        self.layout, self.rank, self.device = layout, wiring.rank, wiring.device
        self.trainable = plan.spec.trainable
        self.transfers: dict[Kind, list[BoundTransfer]] = {}
        self.low_rank: LowRankSync | None = None
        self.bind(plan, wiring)
        self.mark = WriteMark(writes)
        self.published = 0
        compute, own = torch_dtype(plan.compute_dtype), torch_dtype(plan.own_dtype)
        # Rounded once, from what the user gave.
        self.resting = EncodedShard(plan.rests_in, start.part(plan.params, own)) if plan.rests_in else None
        self.shard = self.resting.message if self.resting else start.part(plan.params, compute)
        self._optimizer = OptimizerMemory(plan, self.device)
        if plan.has_master:
            self.master = self._optimizer.holding(start.part(plan.optimizer, own))
        else:
            self.master = self.own_slice(self.shard, plan.params)
        self.copy = self._empty(plan.numel // plan.backward_copy.count, compute) if plan.backward_copy else None
        self._rounded: torch.Tensor | None = None
        self.whole = plan.always_whole
        self.full = self.shard if self.whole else self._empty(0, compute)
        self.views = [self._view(place, compute) for place in layout.places]
        for place in layout.places:
            self._exchange(place, replica, mesh)
        self.grads: torch.Tensor | None = None  # made with the first gradient
        self.grads_filled = False
        self.used = [False] * len(layout.places)  # by this rank, since the last boundary
        self._mean: torch.Tensor | None = None
        self._arriving: list[torch.Tensor] = []
        self._arrived: set[int] = set()  # since the memory that gradients arrive in was last cleared
        self._arrived_now: set[int] = set()  # in this micro-step
        self._lent: list[weakref.ref[torch.Tensor]] = []
        if self.whole:
            self.place(self.shard)

    def bind(self, plan: BucketPlan, wiring: Wiring) -> None:
        """From now on it travels by the transfers of `plan`; those that stay keep their collectives."""
        self.plan = plan
        for kind, wanted in plan.transfers.items():
            if kind not in self.transfers or wanted != tuple(bound.transfer for bound in self.transfers[kind]):
                self.transfers[kind] = wiring.bind(wanted)
                if kind is Kind.SYNC:
                    bound = self.transfers[kind]
                    self.low_rank = LowRankSync(plan, plan.factored, bound, self.device) if plan.factored else None

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _slice(self, whole: torch.Tensor, cut: Cut) -> torch.Tensor:
        return whole.view(cut.count, -1)[cut.slots[self.rank]]

    def own_slice(self, outer: torch.Tensor, cut: Cut) -> torch.Tensor:
        """The part of `outer`, this rank's slice of `cut`, that is its OS slice."""
        inner = self.plan.optimizer
        ratio = inner.count // cut.count
        return outer.view(ratio, -1)[inner.slots[self.rank] % ratio]

    def _view(self, place: ParameterPlace, dtype: torch.dtype) -> nn.Parameter:
        """What the modules compute with: whole, as far as this rank's part of a DTensor is."""
        trains = place.parameter.requires_grad
        if place.parallel is None:
            return nn.Parameter(self._empty(0, dtype), trains)
        nowhere = self._empty(1, dtype).expand(place.shape)  # takes no memory; `place` gives it some
        return nn.Parameter(place.parallel.wrap(nowhere), trains)

    def _exchange(self, place: ParameterPlace, replica: Replica, mesh: Mesh) -> None:
        """The user's parameter becomes a ShardTensor, and stays the same object: optimizers keep hold of it.

        But for a DTensor, whose class has slots: the modules get another object, and `build` tells the optimizers.
        """
        parameter, cut = place.parameter, self.plan.optimizer
        where = Span(
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
        vars(place.parameter).update(attributes)

    # Weights ------------------------------------------------------------------------------------------------------

    def place(self, full: torch.Tensor) -> None:
        """Let the whole weights live in `full`; the modules' views follow."""
        self.full = full
        for view, place in zip(self.views, self.layout.places, strict=True):
            # Through .data the view has a version counter of its own: a gather is no in-place change to autograd.
            if place.parallel is None:
                view.data = place.of(full)
            else:
                view._local_tensor = place.of(full).data  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def dirty(self) -> bool:
        return self.published != self.mark.version

    def publish(self, workspace: Workspace) -> None:
        mine = self.own_slice(self.shard, self.plan.params)
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

    def gather(self, kind: Kind, workspace: Workspace) -> None:
        source = self.source(kind)
        if self.resting is not None and not self.transfers[kind]:
            self.resting.decode(self.full)
        elif not self.transfers[kind] and source is not self.full:
            self.full.copy_(source)  # a backward copy that is whole
        for transfer in self.transfers[kind]:
            transfer.run(self.full, source, workspace)

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
            mine, was = self.own_slice(now, self.plan.params), self.own_slice(before, self.plan.params)
            master = self.master.to(mine.device)
            left = mine == (master.to(mine.dtype) if self._rounded is None else was)
            self.master.copy_(torch.where(left, master, mine.to(master.dtype)))
        self.shard.copy_(torch.where(now == before, self.shard, now))
        self._rounded = None
        self.mark.written()

    # Gradients ----------------------------------------------------------------------------------------------------

    @property
    def reduces(self) -> bool:
        """Whether gradients travel every micro-step; else they are summed where they lie."""
        return bool(self.transfers[Kind.REDUCE])

    @property
    def arrived(self) -> bool:
        """Whether all its gradients have, in this micro-step."""
        return len(self._arrived_now) == len(self.used)

    def reclaim(self) -> None:
        """Before the G shard is written anew: whoever still holds a view of it, lent as `.grad`, gets a copy."""
        for reference in self._lent:
            tensor = reference()
            if tensor is not None:
                tensor.data = tensor.clone()
        self._lent.clear()

    def begin(self, buffer: torch.Tensor | None) -> None:
        """Gradients of this micro-step arrive in `buffer`; without one, in the G shard itself."""
        if self.grads is None:
            self.grads = self._empty(self.plan.numel // self.plan.grads.count, torch_dtype(self.plan.accumulate_dtype))
            self.grads.zero_()  # the padding between parameters is never written, and must not be noise
        self.reclaim()
        self._arrived_now.clear()
        if buffer is None:
            buffer = self.grads
        else:
            self._arrived.clear()
        if not self._arrived:
            self._clear_padding(buffer)
        if not self._arriving or self._arriving[0].data_ptr() != buffer.data_ptr():
            self._arriving = [place.of(buffer) for place in self.layout.places]

    def _clear_padding(self, buffer: torch.Tensor) -> None:
        ends = [*(p.offset for p in self.layout.places[1:]), self.plan.numel]
        for place, end in zip(self.layout.places, ends, strict=True):
            start = place.offset + place.numel
            if start < end:
                buffer[start:end].zero_()

    def arrive(self, index: int, grad: torch.Tensor | None) -> None:
        """Take over the gradient of one parameter; None: it counts as zero."""
        if grad is None:
            self._arrive_as_zero(index)
            return
        parallel = self.layout.places[index].parallel
        if parallel is not None:
            grad = parallel.part_of_gradient(grad)
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if index in self._arrived:
            self._arriving[index].add_(grad)
        else:
            self._arriving[index].copy_(grad)
        self._arrived.add(index)
        self._arrived_now.add(index)
        self.used[index] = True

    def fill_missing(self) -> None:
        """What got no gradient on this rank adds zero to the sum."""
        for index in range(len(self.used)):
            self._arrive_as_zero(index)

    def _arrive_as_zero(self, index: int) -> None:
        self._arrived_now.add(index)
        if index not in self._arrived:
            self._arriving[index].zero_()
            self._arrived.add(index)

    def reduce(self, buffer: torch.Tensor, workspace: Workspace) -> None:
        assert self.grads is not None
        before, after = self.plan.divisors(Kind.REDUCE, self.plan.grads.count)
        if before != 1:
            buffer.div_(before)
        mine = self._slice(buffer, self.plan.grads)
        for transfer in self.transfers[Kind.REDUCE]:
            transfer.run(buffer, mine, workspace)
        if self.grads_filled:
            self.grads.add_(mine, alpha=1 / after)
        else:
            self.grads.copy_(mine)
            if after != 1:
                self.grads.div_(after)
        self.grads_filled = True

    def sync(self, world: int, workspace: Workspace) -> None:
        """The mean over all ranks, in this rank's OS slice of the G shard."""
        assert self.grads is not None
        before, after = self.plan.divisors(Kind.SYNC, world)
        mine = self.own_slice(self.grads, self.plan.grads)
        if before != 1:
            self.grads.div_(before)
        if self.low_rank is not None:
            self.low_rank.run(self.grads, workspace)
        elif transfers := self.transfers[Kind.SYNC]:
            # What travels is narrower than the sum, and lives in the same memory meanwhile.
            travelling = narrowed(self.grads, torch_dtype(transfers[0].transfer.dtype))
            own = self.own_slice(travelling, self.plan.grads)
            for bound in transfers:
                bound.run(travelling if bound.transfer.move.op is Op.REDUCE_SCATTER else own, own, workspace)
            widen(own, mine)
        if after != 1:
            mine.div_(after)
        if not self.plan.grad_is_view:
            if self._mean is None:
                self._mean = self._optimizer.like(mine)
            self._mean.copy_(mine, non_blocking=True)

    def deliver(self, used: Sequence[bool]) -> None:
        """Add the mean gradients to `.grad` of every parameter that some rank used, and begin anew."""
        assert self.grads is not None
        mean = self._mean if self._mean is not None else self.own_slice(self.grads, self.plan.grads)
        for place, is_used in zip(self.layout.places, used, strict=True):
            parameter = place.parameter
            assert isinstance(parameter, ShardTensor)
            if not is_used:
                continue
            local = mean[slice(*parameter.span.in_cut())]
            if parameter.grad is None:
                parameter.grad = ShardTensor(local, parameter.span)
                self._lent.append(weakref.ref(local))
            elif isinstance(parameter.grad, ShardTensor):
                parameter.grad.local.add_(local)
            else:
                raise StepError(f"{place.names[0]}.grad was replaced by a plain tensor; set it to None, or zero it.")
        self.restart()

    def restart(self) -> None:
        """Forget what was accumulated."""
        self.grads_filled = False
        self._arrived.clear()
        self.used = [False] * len(self.used)

    @property
    def keepers(self) -> dict[str, Collective | LowRankSync]:
        """What keeps something from one step to the next, by name."""
        found: dict[str, Collective | LowRankSync] = {}
        for kind, transfers in self.transfers.items():
            for position, bound in enumerate(transfers):
                found[f"{kind.value}/{position}"] = bound.collective
        if self.low_rank is not None:
            found[f"{Kind.SYNC.value}/low-rank"] = self.low_rank
        return found

    def memory_bytes(self) -> dict[str, int]:
        """On the device."""
        on_host = self.plan.optimizer_on_host
        frozen = {} if self.trainable else {"frozen": self.shard.nbytes}
        return frozen | {
            "params": self.shard.nbytes if self.trainable else 0,
            "master": self.master.nbytes if self.plan.has_master and not on_host else 0,
            "backward_params": self.copy.nbytes if self.copy is not None else 0,
            "grads": self.grads.nbytes if self.grads is not None else 0,
            "grad": self._mean.nbytes if self._mean is not None and not on_host else 0,
            "feedback": sum(kept.nbytes for keeper in self.keepers.values() for kept in keeper.state),
        }

    def host_memory_bytes(self) -> dict[str, int]:
        """In the host's memory, for the optimizer."""
        outgoing = self._optimizer.outgoing
        if outgoing is None:
            return {}
        mean = self._mean.nbytes if self._mean is not None else 0
        return {"master": self.master.nbytes, "grad": mean, "outgoing": outgoing.nbytes}
