"""The gradients of one bucket on one rank, from autograd's result to the mean in `.grad`.

`FlatGradients` copies gradients to flat memory, from which they are reduced and synchronized. `UnsentGradients` serves
buckets without any gradient transfer, as on one rank. There the optimizer gets autograd's own tensors, because a copy
of all gradients would cost some percent of a step.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch

from towpath.collectives.collective import Workspace
from towpath.core.placement import Partition
from towpath.core.routes import Op
from towpath.core.strategy import TransferKind
from towpath.core.unit_plan import BucketPlan
from towpath.engine.layout import ParameterPlace, torch_dtype
from towpath.engine.parameters.low_rank_sync import LowRankSync
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.engine.transfer_queues import RankTransfer
from towpath.errors import StepError


def slice_of(memory: torch.Tensor, cut: Partition, rank: int, inside: Partition | None = None) -> torch.Tensor:
    """Return the slice of `memory` that is `rank`'s in the partition `cut`.

    `memory` is the entire flat buffer, or the rank's slice in the partition `inside`, which must not be finer.
    """
    # A finer partition splits each slice of the coarser one, and slots count along with it.
    count = cut.count // (inside.count if inside is not None else 1)
    return memory.view(count, -1)[cut.slots[rank] % count]


# With offload the host's memory holds the master, which is this rank's slice of the parameters in their own dtype.
# It also holds the `.grad` of that slice and the states of the user's optimizer. Two copies connect it with the
# device. Each runs on the stream of the transfer that it belongs to:
#
#     grad_sync    copies the mean gradients to the host, while the backward pass still runs
#     param_sync   copies the master to the device and casts it there, before the ranks exchange the parameters
#
# On a GPU the host's memory is page-locked, so that copies are asynchronous. The host must wait for a copy before
# it reads or writes the copied memory. For gradients, the step machine requires that by `Wait(…, on_host=True)`. For
# the master, every write calls `ParamVersion.wait_for_read`. By then a copy of the step before has long ended.


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory on the host for copies to and from `device`. It is page-locked where `device` is a GPU."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")


def has_own_memory(device: torch.device) -> bool:
    """Return whether `device` has memory of its own. Otherwise it works on host memory itself, without copies."""
    return device.type != "cpu"


def copied_to_host(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of `values` in host memory, for copies to and from their device."""
    return host_memory(values.numel(), values.dtype, values.device).copy_(values)


def copy_to_device(master: torch.Tensor, target: torch.Tensor, plan: BucketPlan, workspace: Workspace) -> None:
    """Copy a bucket's master to `target` on the device, and cast it there."""
    if not plan.staged:
        target.copy_(master, non_blocking=True)
        return
    # Copied as it is, because a cast on the host would hold up the thread that enqueues the computation.
    staged = workspace.take(plan.staged, master.dtype)
    for part, cast in zip(master.split(plan.staged), target.split(plan.staged), strict=True):
        cast.copy_(staged[: part.numel()].copy_(part, non_blocking=True))


Transfers = Mapping[TransferKind, Sequence[RankTransfer]]


class BucketGradients(ABC):
    """The gradients of one bucket during a step.

    The executor calls them in this order:

        begin → arrive, once for each parameter → store → fill_missing → divide → accumulate (each micro-step)
        grad_sync → set_grads (boundary)

    Gradients are held as autograd made them until `store`, which takes all of a unit's at once: on a GPU a launch takes
    longer than the copy of a small gradient.

    `used` says for each parameter whether this rank computed a gradient for it since the last boundary.
    `expected` is the number of gradients per micro-step before the unit no longer needs its weights.
    """

    low_rank: LowRankSync | None = None
    _left = 1.0  # what `grad_sync` has left to `set_grads` to divide by

    def __init__(self, plan: BucketPlan, places: Sequence[ParameterPlace]) -> None:
        self.plan, self._places = plan, places
        self.used = [False] * len(places)
        self.expected = len(places)
        self._arrived: set[int] = set()  # parameters whose memory holds a gradient: later ones are added to it
        self._arrived_now: set[int] = set()  # parameters whose gradient arrived in this micro-step
        self._held: dict[int, torch.Tensor | None] = {}  # gradients that `store` will take over; None for a zero
        self._streams: set[torch.cuda.Stream] = set()  # the streams that computed them
        # What the user may read as `.grad`, until they set it to None. It must not be overwritten.
        self._user_can_read: list[weakref.ref[torch.Tensor]] = []

    def use_transfers(self, plan: BucketPlan, transfers: Transfers, new_grad_sync: bool) -> None:
        """Use the transfers of `plan` from now on. `new_grad_sync`: the gradient sync has new transfers."""
        self.plan = plan

    @property
    @abstractmethod
    def reduces(self) -> bool:
        """True if gradients are reduced in every micro-step. Otherwise they are summed where they are stored."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes that the gradients take on the device."""

    @property
    def mean_nbytes(self) -> int:
        """The bytes of the mean gradients, if these have their own memory. It belongs to the optimizer."""
        return 0

    @property
    def arrived(self) -> bool:
        """True if all expected gradients have arrived in this micro-step."""
        return len(self._arrived_now) >= self.expected

    def begin(self, buffer: torch.Tensor | None) -> None:
        """Start a micro-step. Its gradients are reduced from `buffer`; with None they are summed in place."""
        self._arrived_now.clear()

    def arrive(self, index: int, gradient: torch.Tensor | None) -> None:
        """Hold the gradient of the parameter at `index` until `store`. None counts as a gradient of zero."""
        if gradient is None:
            self._arrive_as_zero(index)
            return
        # Autograd may leave the gradient of a DTensor as a partial sum. It is reduced over the mesh before the
        # replicas.
        parallel = self._places[index].parallel
        if parallel is not None:
            gradient = parallel.part_of(gradient)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        # With reentrant checkpoints a parameter gets several gradients in one micro-step.
        if index in self._held:
            self.store()
        self._held[index] = gradient
        # Nothing waits here: autograd's hook runs on the thread that enqueues the backward pass.
        if gradient.is_cuda:
            self._streams.add(torch.cuda.current_stream(gradient.device))
        self._arrived_now.add(index)
        self.used[index] = True

    def store(self) -> None:
        """Take over the gradients that have arrived: with one launch for all copies, and one for all sums."""
        if not self._held:
            return
        held, self._held = self._held, {}
        # The user may compute parts of a unit on streams of their own. Each gradient is complete on the stream that
        # was current when it arrived. Its memory belongs to a stream, too, and must not be reused before it was read.
        for stream in self._streams:
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)
                for gradient in held.values():
                    if gradient is not None:
                        gradient.record_stream(current)
        self._streams.clear()
        self._store(held)

    @abstractmethod
    def _store(self, held: Mapping[int, torch.Tensor | None]) -> None: ...

    def _arrive_as_zero(self, index: int) -> None:
        self._arrived_now.add(index)

    def fill_missing(self) -> None:
        """Store the gradients, and let each parameter without one on this rank add zero to the sum."""
        for index in range(len(self.used)):
            self._arrive_as_zero(index)
        self.store()

    def needs_grad_sync(self, terms: int) -> bool:
        """Return whether the sums still need work to become means over `terms` gradients."""
        return True

    @abstractmethod
    def grad_sync(self, terms: int, weighs: bool, workspace: Workspace) -> None:
        """Turn the sums into means over `terms` gradients, for the elements of this rank's OS slice.

        `weighs`: Whether `set_grads` gets a factor, and can divide in the same launch.
        """

    @abstractmethod
    def _means(self) -> Sequence[torch.Tensor | None]:
        """Return for each parameter the part of its mean gradient in this rank's OS slice, 1-D."""

    @abstractmethod
    def _multiply(self, factor: float) -> None:
        """Multiply the mean gradients in place."""

    def set_grads(self, used: Sequence[bool], factor: float = 1.0) -> None:
        """Add the mean gradient times `factor` to `.grad` of each parameter that any rank used. Start the next step."""
        if factor != self._left:
            self._multiply(factor / self._left)
        for place, mean, is_used in zip(self._places, self._means(), used, strict=True):
            parameter = place.parameter
            assert isinstance(parameter, ShardTensor)
            if not is_used:
                continue
            assert mean is not None
            if parameter.grad is None:
                parameter.grad = ShardTensor(mean, parameter.shard_spec)
                self._user_can_read.append(weakref.ref(mean))
            elif isinstance(parameter.grad, ShardTensor):
                parameter.grad.local.add_(mean)
            else:
                raise StepError(f"{place.names[0]}.grad was replaced by a plain tensor; set it to None, or zero it.")
        self.restart()

    def restart(self) -> None:
        self._arrived.clear()
        self._held.clear()
        self._streams.clear()
        self.used = [False] * len(self.used)


def check_gradient(place: ParameterPlace, grad: torch.Tensor, unit: str, is_whole: bool, is_reduced: bool) -> None:
    """Raise `StepError` if autograd accumulated a gradient at a time, or in a way, that the reduction cannot handle."""
    name = place.names[0]
    if grad.requires_grad:
        raise StepError(
            f"{name}: its gradient has a graph, which a sum over ranks loses. "
            "Instead of backward(create_graph=True) take autograd.grad(loss, inputs, create_graph=True)."
        )
    if not is_whole:
        raise StepError(
            f"{name}: a gradient arrived while unit {unit!r} was sharded. Its forward returned tensors where Towpath "
            "cannot see them: return tensors, or tuples, lists, dicts or dataclasses of them."
        )
    if is_reduced:
        raise StepError(
            f"{name}: another gradient arrived after the reduction of unit "
            f"{unit!r} had begun. Use checkpoint(..., use_reentrant=False), which computes each once."
        )


@final
class UnsentGradients(BucketGradients):
    """Gradients that stay as autograd made them: the same tensors become `.grad`, without any transfer."""

    def __init__(self, plan: BucketPlan, places: Sequence[ParameterPlace]) -> None:
        super().__init__(plan, places)
        self._sums: list[torch.Tensor | None] = [None] * len(places)
        self._dtype = torch_dtype(plan.accumulate_dtype)

    @property
    def reduces(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        """The bytes of the sums, and of those that are `.grad` of a parameter now."""
        held = [place.parameter.grad for place in self._places]
        lent = sum(grad.local.nbytes for grad in held if isinstance(grad, ShardTensor))
        return lent + sum(each.nbytes for each in self._sums if each is not None)

    def _store(self, held: Mapping[int, torch.Tensor | None]) -> None:
        wide: list[torch.Tensor] = []
        narrow: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for index, gradient in held.items():
            assert gradient is not None
            before = self._sums[index]
            if before is not None:
                sums.append(before)
                added.append(gradient.reshape(-1))
            # The sums have another dtype, so they cannot take over autograd's tensor.
            elif gradient.dtype is not self._dtype:
                own = torch.empty(gradient.numel(), dtype=self._dtype, device=gradient.device)
                self._sums[index] = own
                wide.append(own)
                narrow.append(gradient.reshape(-1))
            else:
                own = gradient if _shares_no_memory(gradient) else gradient.clone()
                self._sums[index] = own.reshape(-1)
        if wide:
            torch._foreach_copy_(wide, narrow)  # pyright: ignore
        if sums:
            torch._foreach_add_(sums, added)  # pyright: ignore

    def needs_grad_sync(self, terms: int) -> bool:
        return self.plan.divisors(TransferKind.GRAD_SYNC, terms) != (1, 1.0)

    def grad_sync(self, terms: int, weighs: bool, workspace: Workspace) -> None:
        before, after = self.plan.divisors(TransferKind.GRAD_SYNC, terms)
        sums = [each for each in self._sums if each is not None]
        for divisor in (before, after):
            if sums and divisor != 1:
                torch._foreach_div_(sums, divisor)  # pyright: ignore

    def _means(self) -> Sequence[torch.Tensor | None]:
        return self._sums

    def _multiply(self, factor: float) -> None:
        if sums := [each for each in self._sums if each is not None]:
            torch._foreach_mul_(sums, factor)  # pyright: ignore

    def restart(self) -> None:
        """Drop the sums. Those that are `.grad` of a parameter stay there."""
        super().restart()
        # Autograd makes new tensors in the next micro-step.
        self._user_can_read.clear()
        self._sums = [None] * len(self._sums)


def _shares_no_memory(gradient: torch.Tensor) -> bool:
    """Return whether no other tensor shares the memory of `gradient`."""
    # Autograd gives both operands of an addition the same gradient, or views of it. Scaling one in place, or adding to
    # it, would then change the other.
    storage = gradient.untyped_storage()
    # Private. Views that only autograd holds have no Python object, and this count includes them.
    users = torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore
    return storage.nbytes() == gradient.nbytes and users <= 2  # the gradient, and `storage`


@final
class FlatGradients(BucketGradients):
    """The gradients of a bucket in flat memory: `reduce` adds them to `sums`, and `grad_sync` makes means of the sums.

    `sums` is this rank's slice of the summed gradients (the G shard). It is allocated in the first micro-step.
    """

    def __init__(self, plan: BucketPlan, places: Sequence[ParameterPlace], rank: int, device: torch.device) -> None:
        super().__init__(plan, places)
        self._rank, self._device = rank, device
        self._transfers: Transfers = {}
        self.sums: torch.Tensor | None = None
        self._holds_sums = False
        self._mean: torch.Tensor | None = None
        # The memory of this micro-step's gradients, and this rank's slice of it. Their reduction reads one, and writes
        # the other. These views are kept: memory that one thread allocates and another one frees fragments the heap.
        self.region = self.shard = torch.empty(0, device=device)
        self._arriving: list[torch.Tensor] = []  # the memory of each parameter's gradient
        self._padding: list[torch.Tensor] = []  # the memory between them

    def use_transfers(self, plan: BucketPlan, transfers: Transfers, new_grad_sync: bool) -> None:
        """Use the transfers of `plan` from now on. A new gradient sync starts with fresh low-rank state."""
        self.plan, self._transfers = plan, transfers
        if new_grad_sync:
            bound = transfers[TransferKind.GRAD_SYNC]
            self.low_rank = LowRankSync(plan, plan.factored, bound, self._device) if plan.factored else None

    @property
    def reduces(self) -> bool:
        """True if the strategy reduces this bucket's gradients in every micro-step."""
        return bool(self._transfers[TransferKind.REDUCE])

    @property
    def nbytes(self) -> int:
        return 0 if self.sums is None else self.sums.nbytes

    @property
    def mean_nbytes(self) -> int:
        """The bytes of the mean gradients, if they are not a view of the G shard."""
        return 0 if self._mean is None else self._mean.nbytes

    def _reclaim(self) -> None:
        """Give each holder of a view into the G shard its own copy, before the G shard is overwritten."""
        # `set_grads` has lent such views as `.grad`.
        for reference in self._user_can_read:
            tensor = reference()
            if tensor is not None:
                # Through `.data`, so that the user's tensor stays the same object.
                tensor.data = tensor.clone()
        self._user_can_read.clear()

    def begin(self, buffer: torch.Tensor | None) -> None:
        """Start a micro-step. Gradients are copied to `buffer`, or with None added to the G shard itself."""
        if self.sums is None:
            elements, dtype = self.plan.numel // self.plan.grads.count, torch_dtype(self.plan.accumulate_dtype)
            # No gradient is ever written to the padding between parameters, so it has to be zero from the start.
            self.sums = torch.zeros(elements, dtype=dtype, device=self._device)
        self._reclaim()
        super().begin(buffer)
        if buffer is None:
            buffer = self.sums
        else:
            self._arrived.clear()
        # A unit keeps its slot, so that the views are made once and not in every micro-step.
        if not self._arriving or self._arriving[0].data_ptr() != buffer.data_ptr():
            self.region, self.shard = buffer, slice_of(buffer, self.plan.grads, self._rank)
            self._arriving = [place.of(buffer) for place in self._places]
            ends = [*(p.offset for p in self._places[1:]), self.plan.numel]
            spans = [(p.offset + p.numel, end) for p, end in zip(self._places, ends, strict=True)]
            self._padding = [buffer[start:end] for start, end in spans if start < end]
        # A slot held another unit's gradients before. What is between the parameters is reduced with them.
        if self._padding and not self._arrived:
            torch._foreach_zero_(self._padding)  # pyright: ignore

    def _store(self, held: Mapping[int, torch.Tensor | None]) -> None:
        zeros = [self._arriving[index] for index, gradient in held.items() if gradient is None]
        arrived = [(index, gradient) for index, gradient in held.items() if gradient is not None]
        fresh = [(index, gradient) for index, gradient in arrived if index not in self._arrived]
        added = [(index, gradient) for index, gradient in arrived if index in self._arrived]
        self._arrived.update(held)
        if zeros:
            torch._foreach_zero_(zeros)  # pyright: ignore
        if fresh:
            torch._foreach_copy_([self._arriving[index] for index, _ in fresh], [gradient for _, gradient in fresh])  # pyright: ignore
        # If the sums are wider than the gradients, PyTorch launches each addition alone. One launch would first have to
        # widen the gradients of the unit, into memory that no plan has.
        if added:
            torch._foreach_add_([self._arriving[index] for index, _ in added], [gradient for _, gradient in added])  # pyright: ignore

    def _arrive_as_zero(self, index: int) -> None:
        super()._arrive_as_zero(index)
        if index not in self._arrived:
            self._held.setdefault(index)

    @property
    def divides(self) -> bool:
        """True if gradients are divided before their reduction, because the sum would overflow."""
        return self.plan.divisors(TransferKind.REDUCE, self.plan.grads.count)[0] != 1

    def divide(self, _: Workspace) -> None:
        # float16 sums of many ranks would overflow if they were divided afterwards only.
        self.region.div_(self.plan.divisors(TransferKind.REDUCE, self.plan.grads.count)[0])

    def accumulate(self, _: Workspace) -> None:
        """Add this rank's slice of the reduced gradients to the G shard."""
        assert self.sums is not None
        after = self.plan.divisors(TransferKind.REDUCE, self.plan.grads.count)[1]
        # The first reduction of a step overwrites what the step before left, so nothing has to clear it.
        if self._holds_sums:
            self.sums.add_(self.shard, alpha=1 / after)
        else:
            self.sums.copy_(self.shard)
            if after != 1:
                self.sums.div_(after)
        self._holds_sums = True

    def grad_sync(self, terms: int, weighs: bool, workspace: Workspace) -> None:
        """Sum the G shard over its replicas, and divide. The mean is then in this rank's OS slice."""
        assert self.sums is not None
        before, after = self.plan.divisors(TransferKind.GRAD_SYNC, terms)
        mine = self._own_slice(self.sums)
        if before != 1:
            self.sums.div_(before)
        if self.low_rank is not None:
            self.low_rank.run(self.sums, after, workspace)
        elif transfers := self._transfers[TransferKind.GRAD_SYNC]:
            whole = self.sums if transfers[0].transfer.move.op is Op.REDUCE_SCATTER else mine
            sent = whole
            if (span := self.plan.narrowed_in) is not None:
                # The sum is sent in a narrower dtype. It is rounded into a wire buffer, behind what the transfers use.
                start, end = span
                sent = workspace.take(end, torch_dtype(transfers[0].transfer.dtype))[start:].copy_(whole)
            own = sent if whole is mine else self._own_slice(sent)
            for bound in transfers:
                bound.run(sent if bound.transfer.move.op is Op.REDUCE_SCATTER else own, own, workspace)
            if sent is not whole:
                mine.copy_(own)
        after = after if self.low_rank is None else 1.0
        # A `.grad` of its own may be too narrow for the sum.
        self._left = after if weighs and self.plan.grad_is_view else 1.0
        if after != self._left:
            mine.div_(after)
        if not self.plan.grad_is_view:
            # `.grad` has the parameters' dtype, or is in host memory. The copy to the host runs in the order of this
            # queue, and the boundary waits for it on the host.
            if self._mean is None:
                own = torch_dtype(self.plan.own_dtype)
                on_host = self.plan.optimizer_on_host
                self._mean = (
                    host_memory(mine.numel(), own, mine.device) if on_host else torch.empty_like(mine, dtype=own)
                )
            self._mean.copy_(mine, non_blocking=True)

    def _own_slice(self, shard: torch.Tensor) -> torch.Tensor:
        return slice_of(shard, self.plan.optimizer, self._rank, self.plan.grads)

    @property
    def _flat_mean(self) -> torch.Tensor:
        assert self.sums is not None
        return self._mean if self._mean is not None else self._own_slice(self.sums)

    def _multiply(self, factor: float) -> None:
        self._flat_mean.mul_(factor)

    def _means(self) -> Sequence[torch.Tensor]:
        mean = self._flat_mean
        spans = [place.parameter.shard_spec for place in self._places if isinstance(place.parameter, ShardTensor)]
        return [mean[slice(*shard_spec.bounds_in_slice())] for shard_spec in spans]

    def restart(self) -> None:
        """Drop the sums. The next reduction overwrites the G shard."""
        super().restart()
        self._holds_sums = False
