"""One unit on one rank: its modules, the memory of its unsharded weights, and the transfers that it submits.

The step machine (`core/step.py`) decides when each method is called, and `engine/executor.py` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from towpath.collectives.rank_transfer import CoalescedTransfers, RankTransfer
from towpath.core.step_state import ParamVersion
from towpath.core.strategy import TransferKind
from towpath.core.unit_plan import UnitPlan
from towpath.engine.comm import CommContext
from towpath.engine.layout import Holder, UnitLayout, exchanged
from towpath.engine.parameters.bucket import Bucket, Buffers, gather_together, reduce_together
from towpath.engine.parameters.leaf_parameter import LeafParameter
from towpath.engine.parameters.shard_tensor import in_backward
from towpath.engine.streams.streams import Handle, Work
from towpath.errors import StepError


class Unit:
    """The modules and buckets that are unsharded, resharded and reduced together. The engine holds one for each unit.

    `index` is the unit's number in the model. `views` are the unsharded parameters, `trainable` the buckets that train.
    `owners` are the modules that hold the unit's parameters.
    """

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        plan: UnitPlan,
        buckets: list[Bucket],
        version: ParamVersion,
        comm: CommContext,
    ) -> None:
        self.index, self.name, self.modules, self.plan, self.layout = index, layout.name, layout.modules, plan, layout
        self.buckets, self.version = buckets, version
        self.trainable = [b for b in buckets if b.trainable]
        self.checksums = torch.zeros(0, dtype=torch.int64)  # checksums of the parameters at the time of unshard()
        self._queues = comm.queues
        self._together: dict[TransferKind, list[Bucket]] = {}
        self._coalesced: dict[TransferKind, CoalescedTransfers] = {}
        self._coalesce(comm)
        self._entries = [
            (module._parameters, attribute, view, place.parameter)  # pyright: ignore[reportPrivateUsage]
            for bucket in buckets
            for place, view in zip(bucket.layout.places, bucket.views, strict=True)
            for module, attribute in place.owners
        ]
        # Lists, dicts and attributes that hold parameters too, with what they hold while the parameters are unsharded,
        # and what they hold otherwise.
        self._kept = [
            (holder, key, exchanged(holder[key], place.parameter, view), holder[key])
            for bucket in buckets
            for place, view in zip(bucket.layout.places, bucket.views, strict=True)
            for holder, key in place.kept
        ]
        # What modules show of the parameters while these are sharded: the ShardTensors, or in a leaf LeafParameters.
        self._sharded: Sequence[nn.Parameter] = [parameter for *_, parameter in self._entries]
        self.leaf_parameters: list[LeafParameter] = []
        # By parameter and grad mode, its copy in this forward of the root, and the version of the copy.
        self._copies: dict[tuple[int, bool], tuple[torch.Tensor, int]] = {}
        self._number = comm.number
        self.views = tuple(view for bucket in buckets for view in bucket.views)
        self._whole = False  # the modules' parameters are the unsharded views
        self._versions: list[int] = []  # versions of the views, as the engine left them
        self.note_versions()
        # Addresses [start, end) of the memory of the unsharded weights, while the slot is this unit's.
        self._turns: list[tuple[int, int, Bucket]] = []
        owners = {id(m): m for bucket in buckets for place in bucket.layout.places for m, _ in place.owners}
        self.owners = list(owners.values())
        # Recurrent modules compute with a list of their weights, which has to change with the parameters.
        self._recurrent = [m for m in self.owners if isinstance(m, nn.RNNBase)]

    def take(self, plan: UnitPlan, comm: CommContext) -> None:
        self.plan = plan
        for bucket, planned in zip(self.buckets, plan.buckets, strict=True):
            bucket.bind(planned, comm)
        self._coalesce(comm)

    def _coalesce(self, comm: CommContext) -> None:
        """Prepare the gathers and reductions that the plan sends as one."""
        for kind in (TransferKind.GATHER, TransferKind.BACKWARD_GATHER, TransferKind.REDUCE):
            self._together[kind] = [self.buckets[i] for i in self.plan.together(kind)]
            if self._together[kind]:
                self._coalesced[kind] = comm.coalesce(_bound(self._together[kind], kind))

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The user's parameters, in the order of the flat buffers."""
        return (place.parameter for bucket in self.buckets for place in bucket.layout.places)

    # The modules ------------------------------------------------------------------------------------------------------

    def swap_parameters(self, whole: bool) -> None:
        """Give the modules the unsharded views as parameters if `whole`, otherwise the ShardTensors."""
        self._whole = whole
        for (parameters, attribute, view, _), sharded in zip(self._entries, self._sharded, strict=True):
            parameters[attribute] = view if whole else sharded
        for holder, key, shown, hidden in self._kept:
            found = _held(holder, key)
            if found is shown or found is hidden:  # otherwise the user has put something else there
                holder[key] = shown if whole else hidden
        for module in self._recurrent:
            names = module._flat_weights_names  # pyright: ignore[reportPrivateUsage]
            module._flat_weights = [module._parameters.get(n) for n in names]  # pyright: ignore

    # What a leaf shows outside of its own forward --------------------------------------------------------------------

    def be_a_leaf(self) -> None:
        places = [place for bucket in self.buckets for place in bucket.layout.places]
        for index, (place, view) in enumerate(zip(places, self.views, strict=True)):
            shape = place.shape if place.parallel is None else view.shape
            self.leaf_parameters.append(LeafParameter(shape, view, self.modules[0], index))

    def show_leaf_parameters(self, inside: bool) -> None:
        """Let modules show LeafParameters while the root is unsharded (`inside`), and otherwise ShardTensors."""
        parameters = [parameter for *_, parameter in self._entries]
        self._sharded = self.leaf_parameters if inside else parameters
        for made, parameter in zip(self.leaf_parameters, parameters, strict=True):
            made.requires_grad_(parameter.requires_grad)
        if not self._whole:
            self.swap_parameters(False)
        if not inside:
            self._copies.clear()

    def copy_of(self, index: int, unsharded: Callable[[Callable[[], torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        """Return a copy of an unsharded parameter. All reads in one forward of the root share it.

        A backward pass may recompute parts of a forward, each in a graph of its own. So each of these gets its own
        copy, as do reads after the forward. A read without gradients may be recomputed later. So each of these counts
        as a forward of its own.

        Args:
            unsharded: Calls a function as a forward of the unit.
        """
        view, key = self.views[index], (index, torch.is_grad_enabled())
        shared = self._sharded is self.leaf_parameters and not in_backward()
        if not shared or key not in self._copies:
            copy = unsharded(lambda: view.clone() if self._turns else view.view_as(view))
            if shared:
                self._copies[key] = copy, _version_of(copy)
            return copy
        copy, _ = self._copies[key]
        return copy if torch.is_grad_enabled() else unsharded(lambda: copy)

    def check_parameters(self) -> None:
        """Raise `StepError` if a module's parameter was replaced. Follow changes of `requires_grad`.

        The engine calls this before a forward, and whenever modules or parameters were registered.
        """
        for parameters, attribute, view, parameter in self._entries:
            found = parameters.get(attribute)
            if found is not parameter and found is not view and not isinstance(found, LeafParameter):
                raise StepError(self._replaced(self._name(view), found))
            if parameter.requires_grad != view.requires_grad:
                if not any(view is v for b in self.trainable for v in b.views):
                    raise StepError(
                        f"parameter {self._name(view)!r} of unit {self.name or 'root'!r} was frozen at shard() and has "
                        "no gradient buffers. Call requires_grad_() before shard(); what trains then may be frozen and "
                        "thawed later."
                    )
                view.requires_grad_(parameter.requires_grad)

    def _replaced(self, name: str, by: object) -> str:
        if is_transformed(by):
            return (
                f"rank {self._number}: torch.func put a tensor of its own in place of parameter {name!r} of unit "
                f"{self.name or 'root'!r}, as grad() of functional_call() does. A sharded model computes with its own "
                "parameters. Call loss.backward() for their gradients; for all else in torch.func take the same model "
                "without shard()."
            )
        return (
            f"rank {self._number}: parameter {name!r} of unit {self.name or 'root'!r} was replaced by another tensor "
            "after shard(). Write into it instead: p.copy_(full_tensor), or load_state_dict() without assign=True. "
            "torch.func.functional_call() replaces parameters, too: it takes a model without shard()."
        )

    @property
    def _names(self) -> list[str]:
        return [place.names[0] for bucket in self.buckets for place in bucket.layout.places]

    def _name(self, view: nn.Parameter) -> str:
        return next(name for name, other in zip(self._names, self.views, strict=True) if other is view)

    def note_versions(self) -> None:
        """Note the versions of the views, so that `check_unwritten` finds writes from now on."""
        self._versions = [view._version for view in self.views]

    def check_unwritten(self) -> None:
        """Raise `StepError` if the forward that just ended wrote to the unsharded parameters, or to copies of them."""
        before = self._versions
        self.note_versions()
        now = self._versions
        if now == before and all(_version_of(copy) == version for copy, version in self._copies.values()):
            return
        written = [repr(name) for name, was, is_ in zip(self._names, before, now, strict=True) if was != is_]
        written += [
            repr(self._names[index]) for (index, _), (copy, v) in self._copies.items() if _version_of(copy) != v
        ]
        raise StepError(
            f"rank {self._number}: {', '.join(written)} was written to inside the forward of unit "
            f"{self.name or 'root'!r}. There the parameters are a copy that lives while the unit runs: the write is "
            "lost with it, or differs between ranks. Write after optimizer.step() instead: to the parameter itself, as "
            "p.clamp_(-1, 1), or inside `with towpath.full_parameters(model):`. To compute with changed weights leave "
            "the parameter as it is: torch.nn.utils.parametrize does. The max_norm= of an embedding writes, too."
        )

    # The memory of the unsharded weights ----------------------------------------------------------------------------

    @torch.inference_mode(False)
    def assign_slot(self, memory: Buffers) -> None:
        """Keep the unsharded weights in `memory` from now on, which is that of the unit's slot."""
        buckets = [b for b in self.buckets if not b.always_whole]
        sizes = [(b.plan.compute_dtype, b.plan.numel) for b in buckets]
        for bucket, (dtype, numel), start in zip(buckets, sizes, _starts(sizes), strict=True):
            bucket.assign_slot(memory[dtype][start : start + numel])
        self._turns = [(b.full.data_ptr(), b.full.data_ptr() + b.full.nbytes, b) for b in buckets]
        # A graph that was kept (retain_graph) still reads the former memory. Raising the version by 2, which
        # `invalidate_views` never does, makes autograd refuse that graph permanently.
        self._raise_versions(2)

    def check_returned(self, outputs: Iterable[torch.Tensor]) -> None:
        """Raise `StepError` if a forward's output is in memory that will hold another unit's weights."""
        for output in outputs if self._turns else ():
            at = _address(output)
            for start, end, bucket in self._turns:
                if start <= at < end:
                    places = bucket.layout.places
                    index = max(i for i, p in enumerate(places) if p.of(bucket.full).data_ptr() <= at)
                    raise StepError(
                        f"rank {self._number}: unit {self.name!r} returns the memory of its own parameter "
                        f"{places[index].names[0]!r}, as a parameter is, or a slice or detach() of it. Outside the "
                        "unit's forward that memory holds other weights. Compute with it inside the forward, return "
                        "p.clone(), or leave this unit to the root: pass the other units as units= to shard()."
                    )

    def invalidate_views(self, invalid: bool) -> None:
        """Make autograd refuse the views while their memory may hold another unit's weights, or allow them again.

        Autograd compares the version of each tensor with the version that it saved. Invalid views have a raised
        version, which is restored when the weights are unsharded again. Only a tensor that left the unit unseen by
        Towpath, for example through an attribute, meets the raised version.
        """
        self._raise_versions(1 if invalid else -1)

    def _raise_versions(self, by: int) -> None:
        self._versions = [view._version + by for view in self.views]
        torch._C._autograd._unsafe_set_version_counter(self.views, tuple(self._versions))  # pyright: ignore

    # Transfers ------------------------------------------------------------------------------------------------------

    def param_sync(self) -> Handle | None:
        """Submit the parameter sync of the buckets written since the last one. Return None if nothing is sent."""
        dirty = [b for b in self.buckets if b.dirty]
        for bucket in dirty:
            bucket.synced_count = bucket.version.count
        sending = [b for b in dirty if b.plan.has_param_sync]
        if not sending:
            return None
        handle = self._queues.submit(
            TransferKind.PARAM_SYNC, _bound(sending, TransferKind.PARAM_SYNC), [b.param_sync for b in sending]
        )
        for bucket in sending:
            if bucket.plan.optimizer_on_host:
                bucket.version.read_until(partial(handle.wait, on_host=True))
        return handle

    def gather(self, kind: TransferKind, save_copy: bool, after: Sequence[Handle]) -> Handle:
        """Submit the all-gathers of the unit's weights, after the transfers in `after`.

        `kind` is GATHER or BACKWARD_GATHER. With `save_copy` the backward copy is saved from the result.
        """
        sharded, together = [b for b in self.buckets if not b.always_whole], self._together[kind]
        works: list[Work] = [partial(b.gather, kind, save_copy) for b in sharded if b not in together]
        begin: Work | None = partial(sharded[0].begin_gather, kind)
        if together:
            works.insert(0, partial(gather_together, together, self._coalesced[kind], kind, save_copy))
            begin = None
        return self._queues.submit(kind, _bound(sharded, kind), works, after, begin)

    def save_backward_copy(self) -> None:
        for bucket in self.buckets:
            if not bucket.always_whole:
                bucket.save_backward_copy(True)

    def open_gradients(self, memory: Buffers | None) -> None:
        """Let gradients arrive in `memory` from now on, or with None in the G shards themselves."""
        travelling = [b for b in self.trainable if b.gradients.reduces]
        for bucket, start in zip(travelling, _starts([_reduced(b) for b in travelling]), strict=True):
            bucket.gradients.begin(bucket.reduced_in(memory or {}, start))
        for bucket in self.trainable:
            if not bucket.gradients.reduces:
                bucket.gradients.begin(None)

    def reduce(self, memory: Buffers) -> Handle:
        """Submit the reduce-scatter of this micro-step's gradients in `memory` to the G shards."""
        travelling = [b for b in self.trainable if b.gradients.reduces]
        for bucket in travelling:
            bucket.gradients.fill_missing()
        starts = _starts([_reduced(b) for b in travelling])
        placed, together = list(zip(travelling, starts, strict=True)), self._together[TransferKind.REDUCE]
        works: list[Work] = [partial(b.reduce, memory, start) for b, start in placed if b not in together]
        if together:
            small = [(b, start) for b, start in placed if b in together]
            works.insert(0, partial(reduce_together, small, self._coalesced[TransferKind.REDUCE], memory))
        return self._queues.submit(TransferKind.REDUCE, _bound(travelling, TransferKind.REDUCE), works)

    def grad_sync(self, terms: int, after: Sequence[Handle]) -> Handle | None:
        """Submit the gradient sync, which turns G shards into means of `terms` gradients. Return None without one.

        The executor submits it in the last micro-step.
        """
        for bucket in self.trainable:
            if not bucket.gradients.reduces:
                bucket.gradients.fill_missing()
        sums = [b for b in self.trainable if b.gradients.needs_grad_sync(terms)]
        if not sums:
            return None
        works = [partial(b.gradients.grad_sync, terms) for b in sums]
        return self._queues.submit(TransferKind.GRAD_SYNC, _bound(sums, TransferKind.GRAD_SYNC), works, after)


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # nothing counts the writes in inference mode


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's first element, or 0 if it has no storage, as with some subclasses."""
    try:
        return torch.Tensor.data_ptr(tensor)  # the override of a subclass may raise
    except RuntimeError:
        return 0


def is_transformed(value: object) -> bool:
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)  # pyright: ignore


def _held(holder: Holder, key: Any) -> object:
    try:
        return holder[key]
    except LookupError:
        return None


def _bound(buckets: Sequence[Bucket], kind: TransferKind) -> list[RankTransfer]:
    return [bound for bucket in buckets for bound in bucket.transfers[kind]]


def _reduced(bucket: Bucket) -> tuple[str, int]:
    """Return dtype and number of elements of the gradients that a bucket reduces in each micro-step."""
    return bucket.plan.reduce_dtype, bucket.plan.numel


def _starts(sizes: Sequence[tuple[str, int]]) -> list[int]:
    """Return where each of the sizes starts in the memory of its dtype."""
    used: dict[str, int] = {}
    starts: list[int] = []
    for dtype, numel in sizes:
        starts.append(used.get(dtype, 0))
        used[dtype] = starts[-1] + numel
    return starts
