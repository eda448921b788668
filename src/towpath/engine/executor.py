"""The order of a training step on one rank. `hooks.py` says when; this says what then; `unit.py` does it.

    forward of a unit        publish what the optimizer wrote (all units, once) → gather → [compute] → release
    backward of a unit       gather from the backward copy → [compute] → release → reduce, at the boundary also sync
    end of a backward pass   reduce and sync what is left; at the boundary deliver the mean to every `.grad`

Reductions are launched in one order on all ranks, whatever order the gradients arrive in: collectives must match.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from towpath.engine.bucket import Bucket
from towpath.engine.buffers import SlotPool
from towpath.engine.passes import EndOfBackward, FailedPasses
from towpath.engine.record import on_host
from towpath.engine.shard_tensor import in_backward
from towpath.engine.span import WriteMark
from towpath.engine.streams import Handle
from towpath.engine.unit import Unit, Use
from towpath.engine.wiring import Wiring
from towpath.errors import StepError
from towpath.spec.precision import Precision
from towpath.spec.schedule import UNITS_IN_FLIGHT, backward_order, plan_unit, usage_transfers
from towpath.spec.strategy import Kind, Strategy


class Engine:
    def __init__(
        self, strategy: Strategy, precision: Precision, units: list[Unit], wiring: Wiring, writes: WriteMark
    ) -> None:
        self.strategy, self.precision, self.units, self.wiring = strategy, precision, units, wiring
        self.host = wiring.record.host
        self._writes, self._published = writes, writes.version
        self.root = units[0]
        self._world = strategy.topology.world
        self.step = 0  # boundaries so far
        self._changes = {strategy.wire(kind).until for kind in Kind}  # steps at which a codec has served
        self._boundary = True
        self._running_backward = False
        self.muted = False  # gradients of this rank count as zero
        self._failed = False  # the last backward pass, whose gradients are still to be dropped
        self._graphs = 0  # backward passes that may walk a graph of another: units then end with the whole pass
        # Which unit came after which, in the forward and in the backward pass: what to gather ahead.
        self._following: dict[Kind, dict[Unit, Unit]] = {Kind.GATHER: {}, Kind.BACKWARD_GATHER: {}}
        self._previous: Unit | None = None
        self._order = [u for u in backward_order(units, lambda u: u.kept) if u.trainable]
        self._next = 0  # in _order: the next unit to be reduced
        self._synced: list[Handle] = []
        parameters = sum(len(b.used) for u in units for b in u.trainable)
        self._usage = wiring.lines(usage_transfers(strategy, parameters))
        self._failures = FailedPasses(wiring.groups, wiring.record.peers, strategy, wiring.journal)
        self.weights, self.gradients = self._pools()
        # Who reads the parameters elsewhere, and is told before `reshard` writes to them.
        self.before_rewrite: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # as far as stats has looked for them

    def _pools(self) -> tuple[SlotPool, SlotPool]:
        """Neighbours in forward order live in different slots; the root, whole throughout, in one of its own.

        And its gradients arrive from the first to the last moment of a backward pass.
        """
        device = self.wiring.device
        others = self.units[1:]
        weights = SlotPool((u.plan.weight_needs for u in others), min(UNITS_IN_FLIGHT, len(others)), device)
        for i, unit in enumerate(others):
            if unit.plan.weight_needs:
                unit.live_in(weights.slots[i % UNITS_IN_FLIGHT])
        gradients = SlotPool((u.plan.gradient_needs for u in others), min(UNITS_IN_FLIGHT, len(others)), device)
        if self.root.plan.weight_needs:
            self.root.live_in(weights.reserve(self.root, self.root.plan.weight_needs))
        if self.root.plan.gradient_needs:
            gradients.reserve(self.root, self.root.plan.gradient_needs)
        return weights, gradients

    @property
    def writes(self) -> int:
        """To parameters, so far."""
        return self._writes.version

    # Forward --------------------------------------------------------------------------------------------------------

    @on_host
    def before_forward(self, unit: Unit, comes_back: bool) -> None:
        recomputing = in_backward()  # a checkpointed part
        unit.check_parameters()
        if not recomputing:
            self.begin()
            unit.forwards += comes_back
            if unit is self.root:
                self._begin_pass()
        self._gather(unit, Kind.BACKWARD_GATHER if recomputing else Kind.GATHER, comes_back and not recomputing)
        unit.show(whole=True)
        self.wiring.record.begins("recompute" if recomputing else "forward", unit.name)

    def _gather(self, unit: Unit, kind: Kind, keep_copy: bool = False) -> None:
        """Make the unit whole; meanwhile begin with the one that came next when this one last ran."""
        unit.gather(kind, self.weights, keep_copy)
        following = self._following[kind]
        if self._previous not in (None, unit):
            following[self._previous] = unit
        self._previous = unit
        if unit in following:
            following[unit].gather_ahead(kind, self.weights, keep_copy)
        unit.wait()

    @on_host
    def after_forward(self, unit: Unit, graph_follows: bool) -> None:
        self.wiring.record.ends("recompute" if in_backward() else "forward", unit.name)
        unit.show(whole=unit.pinned or unit.running or unit.inside > 0)
        # The root is needed again at once, when backward begins; a recomputed unit is in its backward pass already.
        if not in_backward() and not (unit.kept and graph_follows) and not unit.inside:
            unit.rest()
            last = unit not in self._following[Kind.GATHER] and unit.forwards % len(unit.modules) == 0
            if graph_follows and last:
                self._expect_backward()

    def _expect_backward(self) -> None:
        """The last unit is through: begin with the first that backward will need, while the root computes its end."""
        first = self._following[Kind.BACKWARD_GATHER].get(self.root)
        if first is not None:
            if first.idle:
                first.release()
            first.gather_ahead(Kind.BACKWARD_GATHER, self.weights, keep_copy=False)

    def forward_failed(self, unit: Unit, error: BaseException) -> None:
        """Inside a backward pass, which then fails as a whole, it is a recomputation."""
        if not in_backward():
            what = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
            self._failures.forward_failed(f"its forward of unit {unit.name or 'root'!r} failed ({what})")

    def _publish(self) -> None:
        if self._published != self._writes.version:
            self._published = self._writes.version
            for unit in self.units:
                unit.publish()

    # Backward -------------------------------------------------------------------------------------------------------

    @on_host
    def reached_output(self, use: Use, _: torch.Tensor) -> None:
        """A gradient reaches an output of the unit: before the first of them, its weights must be whole."""
        if use.running:
            return
        unit = use.unit
        if torch.is_grad_enabled():
            self._check_graph(unit)
        self._begin_backward()
        if use.version != unit.version:
            raise StepError(
                f"unit {unit.name or 'root'!r}: its parameters were written between this forward pass and its "
                "backward pass, whose gradients would be of other weights. Step the optimizer after backward()."
            )
        use.running, use.done, use.left = True, False, 0
        self._gather(unit, Kind.BACKWARD_GATHER)
        unit.show(whole=True)  # for what is recomputed inside the unit
        self.wiring.record.begins("backward", unit.name)

    def _check_graph(self, unit: Unit) -> None:
        """Under create_graph=True, what a backward pass computes with is read again when its graph is walked."""
        if unit.slot is not None and not unit.pinned:
            raise StepError(
                f"unit {unit.name or 'root'!r}: a graph made with create_graph=True reads the weights again after they "
                "are released. Run forward, autograd.grad(...) and backward() inside "
                "`with towpath.full_parameters(model):`."
            )
        self._graphs = 2  # this one and the next

    @on_host
    def left_for_input(self, use: Use, _: torch.Tensor) -> None:
        """The gradient of an input of the unit is there: with the last of them nothing is left to compute."""
        use.left += 1
        if use.left < use.inputs:
            return
        unit = use.unit
        use.running, use.done = False, True
        unit.backwards += 1
        self.wiring.record.ends("backward", unit.name)
        # Counted, so that it is decided alike on every rank: what a rank happens to keep alive must not matter.
        if unit.backwards >= unit.forwards and not self._graphs:
            self._finish(unit)
        elif not unit.running:
            unit.rest()

    @on_host
    def gradient(self, unit: Unit, bucket: Bucket, index: int, grad: torch.Tensor) -> None:
        """Autograd has accumulated the whole gradient of one parameter."""
        self._begin_backward()
        if grad.requires_grad:
            raise StepError(
                f"{bucket.layout.places[index].names[0]}: its gradient has a graph, which a sum over ranks loses. "
                "Instead of backward(create_graph=True) take autograd.grad(loss, inputs, create_graph=True)."
            )
        if unit.holds != unit.version and not bucket.whole:
            raise StepError(
                f"{bucket.layout.places[index].names[0]}: a gradient arrived while unit {unit.name!r} was not whole. "
                "Its forward returned tensors where Towpath cannot see them: return tensors, or tuples, lists, dicts "
                "or dataclasses of them."
            )
        if unit.launched:
            raise StepError(
                f"{bucket.layout.places[index].names[0]}: another gradient arrived after the reduction of unit "
                f"{unit.name!r} had begun. Use checkpoint(..., use_reentrant=False), which computes each once."
            )
        unit.begin_gradients(self.gradients)
        if not self.muted:
            self.host.leave_out(bucket.arrive, index, grad)

    def _begin_pass(self) -> None:
        """A forward or backward pass starts: what the one before used, or gathered in vain, is let go."""
        self._previous = None
        for unit in self.units:
            if unit.through or (unit.ahead and not self._running_backward):
                unit.release()

    def _begin_backward(self) -> None:
        if not self._running_backward:
            self._running_backward = True
            self._begin_pass()
            # Called when this backward pass is through, before backward() returns.
            end = EndOfBackward(weakref.WeakMethod(self._end_backward), weakref.WeakMethod(self._backward_failed))
            torch.autograd.Variable._execution_engine.queue_callback(end)  # pyright: ignore[reportPrivateUsage]

    def _finish(self, unit: Unit) -> None:
        unit.release()
        unit.finished = True
        while self._running_backward and self._next < len(self._order) and self._order[self._next].finished:
            self._launch(self._order[self._next])
            self._next += 1

    def _launch(self, unit: Unit) -> None:
        unit.begin_gradients(self.gradients)  # where no gradient came, zeros take part in the sum
        unit.launched = True
        reduced = unit.reduce()
        if self._boundary:
            synced = unit.sync(reduced, self._world)
            if synced is not None:
                self._synced.append(synced)

    @on_host
    def _end_backward(self) -> None:
        self.wiring.record.ends("backward", None)
        with torch.no_grad():
            try:
                for unit in self.units:
                    unit.end_uses()
                    unit.release()
                for unit in self._order:
                    self._finish(unit)
                if self._boundary:
                    self._deliver()
            except BaseException:
                self._backward_failed()
                raise
            self._rest()

    def _backward_failed(self) -> None:
        """Nothing of the pass is delivered. What is under way is waited for later: this may be no place for it."""
        self._failures.failed("its backward pass failed")
        self._failed = True
        for followed in self._following.values():
            followed.clear()  # ranks that ran different units would prefetch different ones
        for unit in self.units:
            unit.end_uses()
            unit.release()

    def _deliver(self) -> None:
        used = self._compare_with_others()
        for handle in self._synced:
            handle.wait()
        for unit in self._order:
            for bucket in unit.trainable:
                count = len(bucket.used)
                bucket.deliver(used[:count])
                used = used[count:]
        self.wiring.record.end_step()
        self.step += 1
        self.wiring.record.peers.activity.step = self.step
        self._change_wires()

    def _change_wires(self) -> None:
        """Where a codec serves for the first steps only, and they are over: other collectives, in the same groups."""
        if self.step in self._changes:
            self._take_wires()

    def go_to(self, step: int) -> None:
        """Go on as after `step` boundaries, over the wires that serve then. Every rank must do so, between steps."""
        self.discard()
        self.step = step
        if any(self._changes):
            self._take_wires()

    def _take_wires(self) -> None:
        self.wiring.finish()  # what was gathered ahead in vain may still travel over the wires of before
        now = self.strategy.at(self.step)
        for unit in self.units:
            plan = plan_unit(now, unit.plan.spec, self.precision)
            for bucket, planned in zip(unit.buckets, plan.buckets, strict=True):
                bucket.travel(planned.transfers, self.wiring)
        self.wiring.forget_scratch()

    def _compare_with_others(self) -> list[bool]:
        """Which parameters got a gradient on any rank; or an error, on every rank, if the ranks ran different units."""
        mine = [used for unit in self._order for bucket in unit.trainable for used in bucket.used]
        if not self._usage:
            return mine
        journal = self.wiring.journal
        told = torch.tensor([*mine, *journal.encoded()], dtype=torch.uint8)

        def job() -> None:
            for line in self._usage:
                line.run(told, told)

        self.wiring.submit(Kind.USAGE, self._usage, job).wait()
        combined = told.tolist()
        journal.check(bytes(combined[len(mine) :]), self.wiring.groups.gather_objects)
        return [bool(used) for used in combined[: len(mine)]]

    def _rest(self) -> None:
        """Between backward passes."""
        self._running_backward = self._failed = False
        self._graphs = max(self._graphs - 1, 0)
        self._next = 0
        self._synced = []
        self.wiring.micro_step = 0 if self._boundary else self.wiring.micro_step + 1
        for unit in self.units:
            unit.collecting = unit.finished = unit.launched = False
            unit.forwards = unit.backwards = 0

    def discard(self) -> None:
        """Drop the gradients of the micro-steps since the last boundary."""
        if self._failed or self.wiring.micro_step:
            self._abandon()

    def _abandon(self) -> None:
        """A backward pass ended in an exception: its gradients, and those of the micro-steps before it, are dropped."""
        self.wiring.record.ends("backward", None)
        for handle in (*self._synced, *(s.busy for s in self.gradients.all)):
            if handle is not None:
                handle.wait()
        self._rest()
        self.wiring.micro_step = 0
        for unit in self.units:
            unit.end_uses()
            unit.release()
            unit.gradients = None
            for bucket in unit.trainable:
                bucket.restart()
        for slot in self.gradients.all:
            slot.user = None

    # What the user calls --------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Generator[None]:
        before, self._boundary = self._boundary, False
        try:
            yield
        finally:
            self._boundary = before

    def begin(self) -> None:
        """Before what makes units whole: what failed before is agreed on, and what was written is published."""
        self._failures.agree()
        if self._failed or self._running_backward:
            self._abandon()
        self._publish()

    def tell_before_rewrite(self) -> None:
        for told in self.before_rewrite:
            tell = told()
            if tell is not None:
                tell()

    def memory_bytes(self) -> dict[str, int]:
        total = {"weight slots": self.weights.nbytes, "gradient slots": self.gradients.nbytes}
        total["wire"] = self.wiring.scratch_bytes
        for unit in self.units:
            for bucket in unit.buckets:
                for kind, nbytes in bucket.memory_bytes().items():
                    total[kind] = total.get(kind, 0) + nbytes
        return total

    @property
    def buffers_made(self) -> int:
        """How many buffers were allocated so far: slots, wire buffers, and what every bucket keeps."""
        kept = sum(nbytes > 0 for u in self.units for b in u.buckets for nbytes in b.memory_bytes().values())
        return self.weights.made + self.gradients.made + self.wiring.buffers_made + kept
