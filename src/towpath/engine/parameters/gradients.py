"""The gradients of one bucket on one rank: from what autograd computes to the means in `.grad`.

Where they travel they are copied to flat memory first (`FlatGradients`). Where nothing of them does, as on one rank,
what autograd made is what the optimizer gets (`OwnGradients`): a copy of all gradients is some percent of a step.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch

from towpath.collectives.bound_transfer import RankTransfer
from towpath.collectives.collective import Workspace
from towpath.core.placement import Partition
from towpath.core.routes import Op
from towpath.core.strategy import Kind
from towpath.core.unit_plan import BucketPlan
from towpath.engine.layout import ParameterPlace, torch_dtype
from towpath.engine.parameters.low_rank_sync import LowRankSync
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import StepError

# --- in place ---------------------------------------------------------------------------------------------------------
#
# A tensor in a narrower dtype and back, in its own memory: a sum that travels needs no second buffer.
#
# Element i is read at its old place and written at its new one, nearer to the start or further from it. Taken in
# spans that double, no span is written over what has yet to be read, and a copy of any length is some thirty
# launches.


def narrowed(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of a contiguous 1-D tensor, rounded to `dtype`, where it begins. It holds nothing else afterwards."""
    if dtype == wide.dtype:
        return wide
    assert dtype.itemsize < wide.dtype.itemsize, (dtype, wide.dtype)
    narrow = wide.view(dtype)[: wide.numel()]
    for start, end in _spans(wide.numel()):
        narrow[start:end].copy_(_apart(wide, start, end))
    return narrow


def widen(narrow: torch.Tensor, wide: torch.Tensor) -> None:
    """Write the values of `narrow`, a slice of what `narrowed` gave, to `wide`, the same slice of what it was given."""
    if narrow.dtype != wide.dtype:
        for start, end in reversed(list(_spans(wide.numel()))):
            wide[start:end].copy_(_apart(narrow, start, end))


def _spans(elements: int) -> Iterator[tuple[int, int]]:
    """[0, 1), [1, 2), [2, 4), [4, 8) and so on."""
    start, end = 0, 1
    while start < elements:
        yield start, min(end, elements)
        start, end = end, 2 * end


def _apart(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """The first element alone is written where it is read."""
    return tensor[start:end].clone() if start == 0 else tensor[start:end]


# --- slices -----------------------------------------------------------------------------------------------------------
#
# What of flat memory is a rank's own.


def slice_of(whole: torch.Tensor, cut: Partition, rank: int) -> torch.Tensor:
    """This rank's slice of `cut`."""
    return whole.view(cut.count, -1)[cut.slots[rank]]


def slice_within(outer: torch.Tensor, cut: Partition, inner: Partition, rank: int) -> torch.Tensor:
    """The part of `outer`, this rank's slice of `cut`, that is its slice of `inner`, cut as fine or finer."""
    ratio = inner.count // cut.count
    return outer.view(ratio, -1)[inner.slots[rank] % ratio]


# --- optimizer memory -------------------------------------------------------------------------------------------------
#
# Where the optimizer works: in the model's own memory, or in the host's (`shard(…, offload="optimizer")`).
#
# In the host's memory lie this rank's slice of the parameters in their own dtype (the master), its `.grad`, and with
# them all that the user's optimizer keeps for each of them. Two copies connect it with the device, each on the stream
# of the transfer that it belongs to:
#
#     sync      mean gradients, as soon as they are there: under what is left of the backward pass
#     publish   what was written to the parameters, rounded to the dtype that computes, before it travels on
#
# On a GPU the host's memory is page-locked, so that a copy needs no processor; the host then has to wait for a copy
# before it reads, or writes to, what was copied: `Wait(…, on_host=True)` of the step machine. What is on its way to
# the device lies apart from the master, so that an optimizer may write to that at any time.


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of the host, to copy to `device` from, or from there."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")


@final
class OptimizerMemory:
    """Of one bucket whose optimizer works on a copy of its own (`BucketPlan.has_master`)."""

    def __init__(self, plan: BucketPlan, device: torch.device) -> None:
        self._device, self._on_host = device, plan.optimizer_on_host
        self._own = torch_dtype(plan.own_dtype)
        elements, compute = plan.numel // plan.optimizer.count, torch_dtype(plan.compute_dtype)
        self.outgoing = host_memory(elements, compute, device) if self._on_host else None

    def like(self, values: torch.Tensor) -> torch.Tensor:
        """For as many elements in the parameters' own dtype."""
        if self._on_host:
            return host_memory(values.numel(), self._own, self._device)
        return torch.empty_like(values, dtype=self._own)

    def holding(self, values: torch.Tensor) -> torch.Tensor:
        """These values, which the device has: itself, or a copy on the host."""
        return self.like(values).copy_(values) if self._on_host else values

    def publish(self, master: torch.Tensor, target: torch.Tensor) -> None:
        """Write what the optimizer wrote to `target`, on the device."""
        if self.outgoing is None:
            target.copy_(master)
        else:
            self.outgoing.copy_(master)
            target.copy_(self.outgoing, non_blocking=True)


Transfers = Mapping[Kind, Sequence[RankTransfer]]


class BucketGradients(ABC):
    """`used`: by parameter, whether this rank has had a gradient of it since the last boundary."""

    low_rank: LowRankSync | None = None

    def __init__(self, plan: BucketPlan, places: Sequence[ParameterPlace]) -> None:
        self.plan, self._places = plan, places
        self.used = [False] * len(places)
        self.expected = len(places)  # how many arrive in a micro-step, before the unit is through with its weights
        self._arrived: set[int] = set()  # since what they arrive in was last cleared
        self._arrived_now: set[int] = set()  # in this micro-step

    def travel_by(self, plan: BucketPlan, transfers: Transfers, new_sync: bool) -> None:
        """From now on. `new_sync`: by other transfers at a boundary than before."""
        self.plan = plan

    @property
    @abstractmethod
    def reduces(self) -> bool:
        """Whether they travel every micro-step; else they are summed where they lie."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """What is held of them on the device."""

    @property
    def mean_nbytes(self) -> int:
        """And of the means, where those have memory of their own, which is the optimizer's."""
        return 0

    @property
    def arrived(self) -> bool:
        """Whether all that are expected have, in this micro-step."""
        return len(self._arrived_now) >= self.expected

    @abstractmethod
    def begin(self, buffer: torch.Tensor | None) -> None:
        """A micro-step, whose gradients are reduced from `buffer`; without one they stay."""

    def arrive(self, index: int, gradient: torch.Tensor | None) -> None:
        """Take over the gradient of one parameter; None: it counts as zero."""
        if gradient is None:
            self._arrive_as_zero(index)
            return
        parallel = self._places[index].parallel
        if parallel is not None:
            gradient = parallel.part_of_gradient(gradient)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        self._add(index, gradient)
        self._arrived.add(index)
        self._arrived_now.add(index)
        self.used[index] = True

    @abstractmethod
    def _add(self, index: int, gradient: torch.Tensor) -> None: ...

    @abstractmethod
    def _arrive_as_zero(self, index: int) -> None: ...

    def fill_missing(self) -> None:
        """What got no gradient on this rank adds zero to the sum."""
        for index in range(len(self.used)):
            self._arrive_as_zero(index)

    @abstractmethod
    def reduce(self, buffer: torch.Tensor, workspace: Workspace) -> None:
        """Add the sums over the ranks of `buffer` to this rank's G shard."""

    def needs_sync(self, terms: int) -> bool:
        """Whether anything is left to be done from the sums to the means. `terms`: of how many the mean is."""
        return True

    @abstractmethod
    def sync(self, terms: int, workspace: Workspace) -> None:
        """From the sums of so many to the means over all ranks, in this rank's OS slice."""

    @abstractmethod
    def _means(self) -> Sequence[torch.Tensor | None]:
        """By parameter, as far as they lie in this rank's OS slice: 1-D."""

    def deliver(self, used: Sequence[bool]) -> None:
        """Add the means to `.grad` of every parameter that some rank used, and begin anew."""
        for place, mean, is_used in zip(self._places, self._means(), used, strict=True):
            parameter = place.parameter
            assert isinstance(parameter, ShardTensor)
            if not is_used:
                continue
            assert mean is not None
            if parameter.grad is None:
                parameter.grad = ShardTensor(mean, parameter.span)
                self._lend(mean)
            elif isinstance(parameter.grad, ShardTensor):
                parameter.grad.local.add_(mean)
            else:
                raise StepError(f"{place.names[0]}.grad was replaced by a plain tensor; set it to None, or zero it.")
        self.restart()

    @abstractmethod
    def _lend(self, mean: torch.Tensor) -> None:
        """It is `.grad` of a parameter from now on."""

    def restart(self) -> None:
        """Forget what was accumulated."""
        self._arrived.clear()
        self.used = [False] * len(self.used)


def check_gradient(place: ParameterPlace, grad: torch.Tensor, unit: str, is_whole: bool, is_reduced: bool) -> None:
    """Refuse one that autograd has accumulated at a moment, or in a way, that the sum over ranks does not allow."""
    name = place.names[0]
    if grad.requires_grad:
        raise StepError(
            f"{name}: its gradient has a graph, which a sum over ranks loses. "
            "Instead of backward(create_graph=True) take autograd.grad(loss, inputs, create_graph=True)."
        )
    if not is_whole:
        raise StepError(
            f"{name}: a gradient arrived while unit {unit!r} was not whole. "
            "Its forward returned tensors where Towpath cannot see them: return tensors, or tuples, lists, dicts "
            "or dataclasses of them."
        )
    if is_reduced:
        raise StepError(
            f"{name}: another gradient arrived after the reduction of unit "
            f"{unit!r} had begun. Use checkpoint(..., use_reentrant=False), which computes each once."
        )


def gradients_of(
    plan: BucketPlan, places: Sequence[ParameterPlace], optimizer: OptimizerMemory, rank: int, device: torch.device
) -> BucketGradients:
    return OwnGradients(plan, places) if plan.gradients_stay else FlatGradients(plan, places, optimizer, rank, device)


@final
class OwnGradients(BucketGradients):
    """Each as autograd made it, and as it is in `.grad` afterwards."""

    def __init__(self, plan: BucketPlan, places: Sequence[ParameterPlace]) -> None:
        super().__init__(plan, places)
        self._sums: list[torch.Tensor | None] = [None] * len(places)
        self._dtype = torch_dtype(plan.accumulate_dtype)

    @property
    def reduces(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        held = [place.parameter.grad for place in self._places]
        lent = sum(grad.local.nbytes for grad in held if isinstance(grad, ShardTensor))
        return lent + sum(each.nbytes for each in self._sums if each is not None)

    def begin(self, buffer: torch.Tensor | None) -> None:
        assert buffer is None
        self._arrived_now.clear()

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        before = self._sums[index]
        if before is None:
            own = gradient if _is_alone_in_its_memory(gradient) else gradient.clone()
            if own.dtype is not self._dtype:  # there are many gradients in a step, and each call takes its time
                own = own.to(self._dtype)
            self._sums[index] = own.reshape(-1)
        else:
            before.add_(gradient.reshape(-1))

    def _arrive_as_zero(self, index: int) -> None:
        self._arrived_now.add(index)

    def reduce(self, buffer: torch.Tensor, workspace: Workspace) -> None:
        raise AssertionError("nothing of these gradients travels")

    def needs_sync(self, terms: int) -> bool:
        return self.plan.divisors(Kind.SYNC, terms) != (1, 1.0)

    def sync(self, terms: int, workspace: Workspace) -> None:
        before, after = self.plan.divisors(Kind.SYNC, terms)
        for each in self._sums:
            if each is not None:
                each.div_(before).div_(after)

    def _means(self) -> Sequence[torch.Tensor | None]:
        return self._sums

    def _lend(self, mean: torch.Tensor) -> None:
        """The next micro-step's are other tensors."""

    def restart(self) -> None:
        super().restart()
        self._sums = [None] * len(self._sums)


def _is_alone_in_its_memory(gradient: torch.Tensor) -> bool:
    """Autograd gives both terms of a sum one gradient, or views of it: what is added to one, or scales it, would change
    the other."""
    storage = gradient.untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore
    return storage.nbytes() == gradient.nbytes and users <= 2  # the gradient, and `storage`


@final
class FlatGradients(BucketGradients):
    """`sums`: this rank's G shard, made with the first gradient."""

    def __init__(
        self,
        plan: BucketPlan,
        places: Sequence[ParameterPlace],
        optimizer: OptimizerMemory,
        rank: int,
        device: torch.device,
    ) -> None:
        super().__init__(plan, places)
        self._optimizer, self._rank, self._device = optimizer, rank, device
        self._transfers: Transfers = {}
        self.sums: torch.Tensor | None = None
        self._holds_sums = False
        self._mean: torch.Tensor | None = None
        self._arriving: list[torch.Tensor] = []
        self._lent: list[weakref.ref[torch.Tensor]] = []

    def travel_by(self, plan: BucketPlan, transfers: Transfers, new_sync: bool) -> None:
        self.plan, self._transfers = plan, transfers
        if new_sync:
            bound = transfers[Kind.SYNC]
            self.low_rank = LowRankSync(plan, plan.factored, bound, self._device) if plan.factored else None

    @property
    def reduces(self) -> bool:
        return bool(self._transfers[Kind.REDUCE])

    @property
    def nbytes(self) -> int:
        return 0 if self.sums is None else self.sums.nbytes

    @property
    def mean_nbytes(self) -> int:
        return 0 if self._mean is None else self._mean.nbytes

    def _reclaim(self) -> None:
        """Before the G shard is written anew: whoever still holds a view of it, lent as `.grad`, gets a copy."""
        for reference in self._lent:
            tensor = reference()
            if tensor is not None:
                tensor.data = tensor.clone()
        self._lent.clear()

    def _lend(self, mean: torch.Tensor) -> None:
        self._lent.append(weakref.ref(mean))

    def begin(self, buffer: torch.Tensor | None) -> None:
        if self.sums is None:
            elements, dtype = self.plan.numel // self.plan.grads.count, torch_dtype(self.plan.accumulate_dtype)
            # The padding between parameters is never written, and must not be noise.
            self.sums = torch.zeros(elements, dtype=dtype, device=self._device)
        self._reclaim()
        self._arrived_now.clear()
        if buffer is None:
            buffer = self.sums
        else:
            self._arrived.clear()
        if not self._arrived:
            self._clear_padding(buffer)
        if not self._arriving or self._arriving[0].data_ptr() != buffer.data_ptr():
            self._arriving = [place.of(buffer) for place in self._places]

    def _clear_padding(self, buffer: torch.Tensor) -> None:
        ends = [*(p.offset for p in self._places[1:]), self.plan.numel]
        for place, end in zip(self._places, ends, strict=True):
            start = place.offset + place.numel
            if start < end:
                buffer[start:end].zero_()

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        if index in self._arrived:
            self._arriving[index].add_(gradient)
        else:
            self._arriving[index].copy_(gradient)

    def _arrive_as_zero(self, index: int) -> None:
        self._arrived_now.add(index)
        if index not in self._arrived:
            self._arriving[index].zero_()
            self._arrived.add(index)

    def reduce(self, buffer: torch.Tensor, workspace: Workspace) -> None:
        assert self.sums is not None
        before, after = self.plan.divisors(Kind.REDUCE, self.plan.grads.count)
        if before != 1:
            buffer.div_(before)
        mine = slice_of(buffer, self.plan.grads, self._rank)
        for transfer in self._transfers[Kind.REDUCE]:
            transfer.run(buffer, mine, workspace)
        if self._holds_sums:
            self.sums.add_(mine, alpha=1 / after)
        else:
            self.sums.copy_(mine)
            if after != 1:
                self.sums.div_(after)
        self._holds_sums = True

    def sync(self, terms: int, workspace: Workspace) -> None:
        assert self.sums is not None
        before, after = self.plan.divisors(Kind.SYNC, terms)
        mine = self._own_slice(self.sums)
        if before != 1:
            self.sums.div_(before)
        if self.low_rank is not None:
            self.low_rank.run(self.sums, after, workspace)
        elif transfers := self._transfers[Kind.SYNC]:
            # What travels is narrower than the sum, and lives in the same memory meanwhile.
            travelling = narrowed(self.sums, torch_dtype(transfers[0].transfer.dtype))
            own = self._own_slice(travelling)
            for bound in transfers:
                bound.run(travelling if bound.transfer.move.op is Op.REDUCE_SCATTER else own, own, workspace)
            widen(own, mine)
        if after != 1 and self.low_rank is None:
            mine.div_(after)
        if not self.plan.grad_is_view:
            if self._mean is None:
                self._mean = self._optimizer.like(mine)
            self._mean.copy_(mine, non_blocking=True)

    def _own_slice(self, shard: torch.Tensor) -> torch.Tensor:
        return slice_within(shard, self.plan.grads, self.plan.optimizer, self._rank)

    def _means(self) -> Sequence[torch.Tensor]:
        assert self.sums is not None
        mean = self._mean if self._mean is not None else self._own_slice(self.sums)
        spans = [place.parameter.span for place in self._places if isinstance(place.parameter, ShardTensor)]
        return [mean[slice(*span.in_cut())] for span in spans]

    def restart(self) -> None:
        super().restart()
        self._holds_sums = False
