"""One unit on one rank: whether its weights are whole, where they live meanwhile, and the transfers it submits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from towpath.engine.bucket import Bucket
from towpath.engine.buffers import Slot, SlotPool
from towpath.engine.layout import UnitLayout
from towpath.engine.record import Bundle
from towpath.engine.streams import Handle
from towpath.engine.wiring import Wiring
from towpath.errors import StepError
from towpath.spec.schedule import UnitPlan
from towpath.spec.strategy import Kind


class Unit:
    """The buckets of one unit, which are gathered, released and reduced together."""

    def __init__(self, layout: UnitLayout, plan: UnitPlan, buckets: list[Bucket], wiring: Wiring) -> None:
        self.name, self.modules, self.plan, self.buckets = layout.name, layout.modules, plan, buckets
        self.kept = plan.spec.kept
        self.trainable = [b for b in buckets if b.trainable]
        self.slot: Slot | None = None  # where the whole weights live, shared in turns; none where they are always whole
        self.home: Slot | None = None  # the slot to return to after unshard()
        self.pinned = False  # held whole by unshard()
        self.checksums = torch.zeros(0, dtype=torch.int64)  # of the parameters, when unshard() made them whole
        self.forwards = self.backwards = 0  # passes through it since the last whole backward pass
        self.holds = -1  # the version of the weights that are whole now, or are being gathered
        self.ahead = False  # gathered before anything needs it
        self.through = False  # whole for as long as nobody wants its slot: another of its modules may come
        self.inside = 0  # calls into it under way: of its modules, and of methods that are entries as well
        self.shown = False  # the modules' parameters are the whole views
        self._sealed = False
        self.uses: weakref.WeakSet[Use] = weakref.WeakSet()  # graphs that may come back for a backward pass
        self.published: Handle | None = None
        self.ready: Handle | None = None  # of the gather
        self.gradients: Slot | None = None
        self.collecting = self.finished = self.launched = False  # in this backward pass
        self._wiring = wiring
        self._together: dict[Kind, list[Bucket]] = {}
        self._bundles: dict[Kind, Bundle] = {}
        for kind in (Kind.GATHER, Kind.BACKWARD_GATHER):
            if together := [buckets[i] for i in plan.together(kind)]:
                self._together[kind] = together
                self._bundles[kind] = wiring.bundle(kind, [line for b in together for line in b.lines[kind]])
        self._entries = [
            (module._parameters, attribute, view, place.parameter)  # pyright: ignore[reportPrivateUsage]
            for bucket in buckets
            for place, view in zip(bucket.layout.places, bucket.views, strict=True)
            for module, attribute in place.owners
        ]
        owners = {id(m): m for bucket in buckets for place in bucket.layout.places for m, _ in place.owners}
        self.owners = list(owners.values())  # the modules whose parameters these are
        # These keep a list of their weights besides, and compute with that.
        self._recurrent = [m for m in self.owners if isinstance(m, nn.RNNBase)]

    @property
    def version(self) -> int:
        """Raised by every write to a parameter of this unit."""
        return sum(b.mark.version for b in self.buckets)

    def show(self, whole: bool) -> None:
        """Let the modules' parameters be the whole views, or the ShardTensors again."""
        self.shown = whole
        for parameters, attribute, view, parameter in self._entries:
            parameters[attribute] = view if whole else parameter
        for module in self._recurrent:
            names = module._flat_weights_names  # pyright: ignore[reportPrivateUsage]
            module._flat_weights = [module._parameters.get(n) for n in names]  # pyright: ignore

    def check_parameters(self) -> None:
        """Before a forward: refuse what was done to the modules' parameters behind the engine's back."""
        for parameters, attribute, view, parameter in self._entries:
            found = parameters.get(attribute)
            if found is not parameter and found is not view:
                raise StepError(
                    f"parameter {attribute!r} of unit {self.name or 'root'!r} was replaced by another tensor after "
                    "shard(). Write into it instead: p.copy_(whole tensor), or load_state_dict() without assign=True."
                )
            if parameter.requires_grad != view.requires_grad:
                self._follow(attribute, view, parameter)

    def _follow(self, attribute: str, view: nn.Parameter, parameter: nn.Parameter) -> None:
        if not any(view is v for b in self.trainable for v in b.views):
            raise StepError(
                f"parameter {attribute!r} of unit {self.name or 'root'!r} was frozen at shard() and has no gradient "
                "buffers. Call requires_grad_() before shard(); what trains then may be frozen and thawed later."
            )
        view.requires_grad_(parameter.requires_grad)

    # Where the whole weights live -----------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def live_in(self, slot: Slot) -> None:
        self.slot = slot
        buckets = [b for b in self.buckets if not b.whole]
        for bucket, buffer in zip(buckets, _divide(buckets, slot), strict=True):
            bucket.place(buffer)
        # A graph that was kept (retain_graph) still reads the memory before: let autograd refuse it, for good.
        self._raise_versions(2)

    def take_slot(self, pool: SlotPool) -> None:
        """Become the user of the slot; where another unit is whole in it, move to a new one of this unit's own."""
        if self.slot is None:
            return
        other = self.slot.user
        if isinstance(other, Unit) and (other.idle or other.complete):
            other.release()  # where it was gathered ahead, in vain: the order has changed
        elif other not in (None, self):
            if any(not use.done for use in self.uses):
                raise StepError(
                    f"unit {self.name!r} must be whole for its backward pass while {_name(other)}, whose "
                    "memory it shares, is still in use: the units ran in an order never seen before. "
                    "Pass units= to shard() so that units which run at the same time form one."
                )
            self.live_in(pool.add(self.plan.weight_needs))
        self.slot.user = self

    @property
    def running(self) -> bool:
        """Whether a backward pass through this unit is under way."""
        return any(use.running for use in self.uses)

    @property
    def idle(self) -> bool:
        """Whole, though nothing computes with it."""
        return self.ahead or self.through

    @property
    def complete(self) -> bool:
        """Whether this backward pass has brought every gradient it can bring.

        So ends a unit whose inputs want no gradient, as those beside frozen layers do: nothing else tells its end.
        """
        return self.running and self.collecting and all(b.arrived for b in self.trainable)

    @property
    def entered(self) -> bool:
        """Whether a call into it is under way, or its backward pass: what is called now finds it whole."""
        return (self.shown and not self.pinned) or self.inside > 0

    def end_uses(self) -> None:
        """Whatever was walked backward in this pass is done."""
        for use in self.uses:
            if use.running:
                use.running, use.done = False, True

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The user's."""
        return (place.parameter for bucket in self.buckets for place in bucket.layout.places)

    def rest(self) -> None:
        """Nothing computes with the weights now."""
        self.show(whole=self.pinned)
        self.through = not self.pinned

    def release(self) -> None:
        """Let another unit have the slot."""
        self.ahead = self.through = False
        held = self.pinned or self.inside > 0  # a backward pass may end inside a call, as in a training_step
        self.show(whole=held)
        if self.slot is not None and not held:
            self._seal(True)
            if self.slot.user is self:
                self.slot.user = None
            self.holds = -1

    def _seal(self, sealed: bool) -> None:
        """Let autograd refuse to compute with the views while their memory may hold another unit's weights.

        It compares the version of what it saved: raised here, and put back when the weights are whole again. Only a
        tensor that left the unit by a way Towpath cannot watch (an attribute, say) meets the raised one.
        """
        if sealed != self._sealed:
            self._sealed = sealed
            self._raise_versions(1 if sealed else -1)

    def _raise_versions(self, by: int) -> None:
        views = tuple(v for b in self.buckets for v in b.views)
        versions = tuple(v._version + by for v in views)
        torch._C._autograd._unsafe_set_version_counter(views, versions)  # pyright: ignore

    # Transfers ------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Send what was written to the parameters since, if it has to travel."""
        dirty = [b for b in self.buckets if b.dirty]
        for bucket in dirty:
            bucket.published = bucket.mark.version
        sending = [b for b in dirty if b.publishes]
        if sending:
            self.published = self._submit(Kind.PUBLISH, sending, lambda b: b.publish())

    def gather_ahead(self, kind: Kind, pool: SlotPool, keep_copy: bool) -> None:
        """Begin to make the weights whole, if there is room for them."""
        if self.slot is None or self.holds == self.version:
            return
        other = self.slot.user
        if isinstance(other, Unit) and other.through:
            other.release()
        if self.slot.user is None:
            self._gather(kind, pool, keep_copy)
            self.ahead = True

    def gather(self, kind: Kind, pool: SlotPool, keep_copy: bool) -> None:
        """Begin to make the weights whole, unless they are, for use at once; `wait()` before that."""
        self.ahead = self.through = False
        self._gather(kind, pool, keep_copy)

    def wait(self) -> None:
        if self.ready is not None:
            self.ready.wait()
        self._seal(False)

    def _gather(self, kind: Kind, pool: SlotPool, keep_copy: bool) -> None:
        if self.holds != self.version:
            self.take_slot(pool)
            self.holds = self.version
            absent = [b for b in self.buckets if not b.whole]
            if absent:
                if kind is Kind.BACKWARD_GATHER and any(b.copy is not None and b.copied != self.holds for b in absent):
                    kind = Kind.GATHER  # the copy is of older weights: this forward pass kept none
                if keep_copy:
                    for bucket in absent:
                        bucket.copied = self.holds
                # What was gathered in vain may still arrive: where this arrives, or in the copy that this one reads.
                arriving = None if self.slot is None else self.slot.busy
                after = [h for h in (self.published, self.ready, arriving) if h is not None]
                self.ready = self._wiring.submit(
                    kind,
                    [line for b in absent for line in b.lines[kind]],
                    lambda: self._fetch(kind, absent, keep_copy),
                    after,
                    begin=None if self._together.get(kind) else lambda: absent[0].begin_gather(kind),
                )
                if self.slot is not None:
                    self.slot.busy = self.ready
            else:
                self.ready = self.published

    def _fetch(self, kind: Kind, absent: Sequence[Bucket], keep_copy: bool) -> None:
        together = self._together.get(kind, [])
        if together:
            self._bundles[kind].run([b.full for b in together], [b.source(kind) for b in together])
        for bucket in absent:
            if bucket not in together:
                bucket.gather(kind)
            bucket.keep(keep_copy)

    def begin_gradients(self, pool: SlotPool) -> None:
        """Choose, once in a micro-step, where its gradients arrive."""
        if self.collecting:
            return
        self.collecting = True
        travelling = [b for b in self.trainable if b.reduces]
        if travelling:
            self.gradients = pool.take(self)
            for bucket, buffer in zip(travelling, _divide(travelling, self.gradients, of_gradients=True), strict=True):
                bucket.begin(buffer)
        for bucket in self.trainable:
            if not bucket.reduces:
                bucket.begin(None)

    def reduce(self) -> Handle | None:
        """Send this micro-step's gradients to the G shards."""
        travelling = [b for b in self.trainable if b.reduces]
        for bucket in travelling:
            bucket.fill_missing()
        if self.gradients is None:
            return None
        slot, self.gradients = self.gradients, None

        def send() -> None:
            # Divided here, on the lane: what one thread allocates and another frees leaves holes in the heap for good.
            for bucket, buffer in zip(travelling, _divide(travelling, slot, of_gradients=True), strict=True):
                bucket.reduce(buffer)

        slot.busy = self._wiring.submit(Kind.REDUCE, [line for b in travelling for line in b.lines[Kind.REDUCE]], send)
        slot.user = None
        return slot.busy

    def sync(self, after: Handle | None, world: int) -> Handle | None:
        """At the boundary: from the G shards to the mean over all ranks."""
        for bucket in self.trainable:
            if not bucket.reduces:
                bucket.fill_missing()
        if not self.trainable:
            return None
        return self._submit(Kind.SYNC, self.trainable, lambda b: b.sync(world), [] if after is None else [after])

    def _submit(
        self, kind: Kind, buckets: Sequence[Bucket], work: Callable[[Bucket], None], after: Sequence[Handle] = ()
    ) -> Handle:
        def job() -> None:
            for bucket in buckets:
                work(bucket)

        return self._wiring.submit(kind, [line for b in buckets for line in b.lines[kind]], job, after)


class Use:
    """One forward pass of a unit whose graph may be walked backward. Lives as long as that graph."""

    __slots__ = ("__weakref__", "done", "entered", "inputs", "left", "running", "unit", "version")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.version = unit.version
        self.running = self.done = False
        self.entered: list[int] = []  # ids of its inputs, while its forward runs
        self.inputs = self.left = 0  # how many inputs want gradients, and how many have got them in this pass
        unit.uses.add(self)


def _divide(buckets: Sequence[Bucket], slot: Slot, of_gradients: bool = False) -> list[torch.Tensor]:
    """The slot's buffers, dealt out to the buckets."""
    used: dict[str, int] = {}
    out: list[torch.Tensor] = []
    for bucket in buckets:
        dtype = bucket.plan.reduce_dtype if of_gradients else bucket.plan.compute_dtype
        start = used.get(dtype, 0)
        used[dtype] = start + bucket.plan.numel
        out.append(slot.buffers[dtype][start : used[dtype]])
    return out


def _name(user: object) -> str:
    return f"unit {user.name!r}" if isinstance(user, Unit) else "another unit"
