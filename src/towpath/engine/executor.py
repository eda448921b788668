"""The engine of one sharded model on one rank: it executes what the step machine decides.

`hooks.py` reports events, such as the end of a unit's forward. The engine passes each to the step machine
(`core/step.py`), and executes the actions that it answers.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from towpath.core.formats import Precision
from towpath.core.queues import LoggedCall
from towpath.core.step import StepMachine
from towpath.core.step_state import (
    Action,
    AgreeOnSizes,
    ApplyOuter,
    AssignSlot,
    CheckRanks,
    ForwardPass,
    InvalidateViews,
    OpenGradients,
    ParamVersion,
    SaveBackwardCopy,
    SetGrads,
    Submit,
    SwapParameters,
    Task,
    Wait,
    in_backward_order,
)
from towpath.core.strategy import Strategy, TransferKind
from towpath.core.unit_plan import plan_unit
from towpath.engine import eager
from towpath.engine.agree.boundary import BoundaryCheck
from towpath.engine.agree.program import EndOfBackward
from towpath.engine.backward_inputs import expect_gradients
from towpath.engine.comm import CommContext
from towpath.engine.layout import own_parameters
from towpath.engine.parameters.bucket import Bucket, SlotMemory
from towpath.engine.parameters.gradients import check_gradient
from towpath.engine.parameters.shard_tensor import ShardTensor, in_backward
from towpath.engine.parameters.unit import ParamSyncs, Unit
from towpath.engine.transfer_queues import Handle, RankTransfer, Work
from towpath.engine.unequal_batches import Batches, UnequalBatches
from towpath.errors import ShardError, StepError
from towpath.outer.sync import OuterSync

if TYPE_CHECKING:
    from towpath.engine.parameters.matrix_steps import MatrixSteps


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_host(method: _Method) -> _Method:
    """Count the seconds of a method of `Engine`, which runs on the training thread, as the engine's own."""

    @wraps(method)
    def counted(self: Engine, *args: Any, **kwargs: Any) -> Any:
        with self.host:
            return method(self, *args, **kwargs)

    return cast(_Method, counted)


class Engine:
    """The training step of one sharded model on one rank: its units, their slots, and the step machine.

    `build` makes it. `hooks.py` calls it around each unit's forward and backward, other callers between passes.
    """

    def __init__(
        self,
        strategy: Strategy,
        precision: Precision,
        units: list[Unit],
        comm: CommContext,
        writes: ParamVersion,
        outer: OuterSync | None = None,
    ) -> None:
        self.strategy, self.precision, self.units, self.comm = strategy, precision, units, comm
        self.host, self.writes = comm.record.host, writes
        self.root, self.leaves = units[0], [u for u in units if u.plan.spec.leaf]
        self._terms = strategy.topology.world  # how many gradients each mean gradient averages
        self.machine = StepMachine([u.plan for u in units], [u.version for u in units], [len(u.modules) for u in units])
        self.weights = SlotMemory(self.machine.weight_slots, [u.plan.weight_needs for u in units], comm.device)
        self.gradients = SlotMemory(self.machine.gradient_slots, [u.plan.gradient_needs for u in units], comm.device)
        for unit in units:
            slot = self.machine.slot_of(unit.index)
            if slot is not None:
                unit.assign_slot(self.weights.of(slot))
        # Free bytes of the rank with the least memory. None unless they decide where frozen parameters are placed.
        self.free_bytes: int | None = None
        self.step = 0  # number of boundaries so far
        self.has_snapshots = False  # whether the training is protected as the strategy says
        self._unprotected = 0  # the number of boundaries without
        self._writes_before_step = -1  # their number at the last boundary
        self.outer = outer
        self._changes = strategy.changes
        self.muted = False  # whether this rank's gradients count as zero (see `ShardedModule.join`)
        # How many calls into units have not returned, and how many transfers the step had before the outermost one.
        self._calls = self._before_call = 0
        self._trained = [u for u in in_backward_order(units) if u.trainable]
        self._arriving: Unit | None = None  # the only unit whose gradients may be held, and not stored yet
        self._used: list[bool] = []  # for each parameter of `_trained`: whether any rank has a gradient
        self.batches = Batches() if strategy.shares is None else UnequalBatches(strategy.shares, comm)
        self._boundary_check = BoundaryCheck(strategy, self._trained, comm, self.batches)
        self.param_syncs = ParamSyncs(strategy, units, comm)
        self._stepped: set[int] = set()  # the ids of parameters that were stepped since the last boundary
        comm.queues.plan(u.plan for u in units)
        # Methods to call before the parameters are overwritten. A save that still reads them finishes its copy there.
        self.before_rewrite: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that step the parameters
        # Those of optimizers that need unsharded matrices.
        self.matrix_steps: weakref.WeakSet[MatrixSteps] = weakref.WeakSet()
        self._registrations = _registrations()
        self._searched_at = self._registrations[0]  # their number at the last search of the model
        for parameter in (p for unit in units for p in unit.parameters):
            assert isinstance(parameter, ShardTensor)
            parameter.shard_spec.replica.engine = weakref.ref(self)

    def check_values_every(self, boundaries: int) -> None:
        """Compare the parameters that several ranks hold once in so many boundaries; with 0 never."""
        self._boundary_check.check_every = boundaries if self.comm.log.compares(LoggedCall.VALUES) else 0

    @property
    def awaits_step(self) -> bool:
        """Whether parameters have gradients with which nothing has changed the parameters, as before `step()`."""
        if self.writes.count != self._writes_before_step or self.comm.program.zeroed:
            return False
        return any(p.grad is not None for unit in self._trained for p in unit.parameters)

    @property
    def kept_unsharded(self) -> list[Unit]:
        """Units that are kept unsharded until `allow_reshard`."""
        return [unit for unit in self.units if self.machine.is_kept_unsharded(unit.index)]

    # Actions of the step machine ------------------------------------------------------------------------------------

    def execute(self, actions: Iterable[Action]) -> None:
        """Execute actions in order. If one raises, still execute later ones that change only this rank's memory."""
        left = iter(actions)
        try:
            for action in left:
                match action:
                    case Submit(task):
                        match task.kind:
                            case TransferKind.PARAM_SYNC:
                                handle = self._param_sync(task)
                            case TransferKind.REDUCE:
                                handle = self._reduce(task)
                            case TransferKind.GRAD_SYNC:
                                handle = self._grad_sync(task)
                            case TransferKind.OUTER:
                                assert self.outer is not None
                                handle = self.outer.submit(task)
                            case _:
                                handle = self._gather(task)
                        # The tasks before it are dropped, because each would otherwise keep all earlier ones alive.
                        task.handle, task.after = handle, ()
                    case Wait(task, on_host):
                        # A task without a handle had nothing to send. On a GPU only the current stream waits, unless
                        # `on_host`.
                        if task.handle is not None:
                            cast(Handle, task.handle).wait(on_host)
                    case SwapParameters(index, whole):
                        self.units[index].shown.swap(whole)
                        # Modules of the root may read a leaf's parameter, as in F.linear(h, head.weight).
                        for leaf in self.leaves if index == self.root.index else ():
                            leaf.shown.show_leaf_parameters(whole)
                    case InvalidateViews(index, invalid):
                        self.units[index].shown.invalidate_views(invalid)
                    case AssignSlot(index, slot):
                        self.units[index].assign_slot(self.weights.of(slot))
                    case SaveBackwardCopy(index):
                        for bucket in self.units[index].gathered:
                            bucket.save_backward_copy()
                    case OpenGradients(index, slot):
                        self.units[index].open_gradients(None if slot is None else self.gradients.of(slot))
                    case AgreeOnSizes(units):
                        self.param_syncs.agree(units)
                    case ApplyOuter():
                        assert self.outer is not None
                        self.outer.apply(action)
                    case CheckRanks():
                        self.param_syncs.note_problems()
                        if self.outer is not None:
                            self.outer.note_problems()
                        self._used = self._boundary_check.compare(self.step)
                    case SetGrads():
                        self._set_grads()
        except BaseException:
            # The step machine has already counted them as done.
            local = (SwapParameters, InvalidateViews, AssignSlot, OpenGradients)
            self.execute([action for action in left if isinstance(action, local)])
            raise

    # Each of the next four submits a task to its queue: the transfers, with the memory that they read and write.

    def _gather(self, task: Task) -> Handle:
        """Submit the all-gathers of a unit's weights: each reads a shard, and writes the unsharded weights."""
        kind, unit = task.kind, self.units[task.unit]
        buckets = unit.gathered
        runs = _with_memory(unit, kind, [(b, b.full, b.source(kind)) for b in buckets])
        before = [_once(work) for b in buckets if (work := b.before_gather(kind)) is not None]
        copies = [b.save_backward_copy for b in buckets if b.copy is not None] if task.save_copy else []
        # The first messages of a gather wait for nobody, so they may leave while the gather before it still shares out
        # inside the nodes, after what must be computed first.
        begin = None
        if runs and kind not in unit.coalesced:
            transfer, region, shard = runs[0]
            begin = _one_by_one([*before, partial(transfer.begin, region, shard)])
        works = [*before, *_works(runs), *copies]
        return self.comm.queues.submit(kind, _transfers_of(buckets, kind), works, _handles(task.after), begin)

    def _reduce(self, task: Task) -> Handle:
        """Submit the reductions of this micro-step's gradients, whose results are added to the G shards."""
        kind, unit = task.kind, self.units[task.unit]
        self._store_gradients(unit)
        reduced = unit.reduced
        gradients = [each for _, each in reduced]
        # A parameter that this rank did not use adds zero to the sum. All ranks send the same bytes.
        # All copies and sums are enqueued before the reduction, which follows them on its own stream.
        for each in gradients:
            each.fill_missing()
        works: list[Work] = [
            *(each.divide for each in gradients if each.divides),
            *_works(_with_memory(unit, kind, [(bucket, each.region, each.shard) for bucket, each in reduced])),
            *(each.accumulate for each in gradients),
        ]
        return self.comm.queues.submit(kind, _transfers_of((bucket for bucket, _ in reduced), kind), works)

    def _param_sync(self, task: Task) -> Handle | None:
        """Submit the parameter sync of the buckets written since the last one. Return None if nothing is sent."""
        dirty = [b for b in self.units[task.unit].buckets if b.dirty]
        # Counted as sent before it is: a write from now on belongs to the next sync.
        for bucket in dirty:
            bucket.synced_count = bucket.version.count
        sending = [b for b in dirty if b.plan.has_param_sync]
        if not sending:
            return None
        handle = self.comm.queues.submit(task.kind, _transfers_of(sending, task.kind), [b.param_sync for b in sending])
        for bucket in sending:
            # The host must not write to the master while the device copies it.
            if bucket.plan.optimizer_on_host:
                bucket.version.read_until(partial(handle.wait, on_host=True))
        return handle

    def _grad_sync(self, task: Task) -> Handle | None:
        """Submit the sync that turns sums into means, in the last micro-step. Return None if there is nothing to do."""
        unit = self.units[task.unit]
        self._store_gradients(unit)
        # Gradients that are not reduced in each micro-step were added to the sums as they came. Those that did not come
        # on this rank add zero, because other ranks may have them.
        for bucket in unit.trainable:
            if not bucket.gradients.reduces:
                bucket.gradients.fill_missing()
        sums = [b for b in unit.trainable if b.gradients.needs_grad_sync(self._terms)]
        if not sums:
            return None
        works = [partial(b.gradients.grad_sync, self._terms, self.batches.weighs) for b in sums]
        return self.comm.queues.submit(task.kind, _transfers_of(sums, task.kind), works, _handles(task.after))

    def _store_gradients(self, unit: Unit) -> None:
        """Store held gradients of `unit`, which a reduction reads from the slot."""
        if unit is self._arriving:
            self._gradients_arrive_for(None)

    # Forward --------------------------------------------------------------------------------------------------------

    @eager
    @_on_host
    def before_forward(self, unit: Unit, comes_back: bool) -> ForwardPass | None:
        """Unshard `unit` for a call into it. Calls may be nested.

        `comes_back`: Whether a backward pass may follow. Returns the pass that the hooks of a graph will name.
        """
        if not self._calls:
            self._before_call = self.comm.record.so_far()
        self._calls += 1
        self.machine.entered(unit.index)
        # Activation checkpointing runs forwards inside a backward pass.
        recomputing = in_backward()
        unit.shown.check()
        self._check_registrations()
        if not recomputing:
            self.begin()
            # Evaluation must not decide when islands synchronize.
            if torch.is_grad_enabled():
                self.sync_islands()
                self.batches.forward_begins()
        self.execute(self.machine.forward_begins(unit.index, comes_back=comes_back, recomputing=recomputing))
        self.comm.record.begins("recompute" if recomputing else "forward", unit.name)
        # A recomputation inside the unit's own backward belongs to the forward pass that it repeats.
        makes_graph = torch.is_grad_enabled() and not self.machine.runs_backward(unit.index)
        return self.machine.graph_made(unit.index) if makes_graph else None

    def check_forward(self, unit: Unit, outputs: Iterable[torch.Tensor]) -> None:
        """Raise if the forward wrote to its parameters, returns their memory, or added parameters to the model."""
        if not self.machine.is_kept_unsharded(unit.index):
            for each in (unit, *(self.leaves if unit is self.root else ())):
                each.shown.check_unwritten()
            # The root stays unsharded until the end of the backward pass.
            if unit is not self.root:
                unit.check_outputs(outputs)
        self._check_registrations()

    def _check_registrations(self) -> None:
        """Raise if the model has a parameter that it did not have at `shard()`."""
        if self._searched_at == self._registrations[0]:
            return
        made = self._registrations[0]
        for unit in self.units:
            unit.shown.check()
        (model,) = self.root.modules
        known = {id(p) for unit in self.units for p in (*unit.parameters, *unit.views, *unit.shown.leaf_parameters)}
        for name, parameter in own_parameters(model):
            if id(parameter) not in known:
                raise StepError(
                    f"rank {self.comm.number}: parameter {name!r} was added after shard(): it is not sharded, and its "
                    "gradient would be this rank's own. Change the model first and shard it then. For new values use "
                    "load_state_dict(), or copy_() to each parameter."
                )
        self._searched_at = made

    @eager
    def after_forward(self, unit: Unit, graph_follows: bool) -> None:
        """Give the unit's modules their ShardTensors back. `graph_follows`: whether the outputs have a graph."""
        recomputing = in_backward()
        with self.host:
            self.comm.record.ends("recompute" if recomputing else "forward", unit.name)
            self.execute(self.machine.forward_ends(unit.index, graph_follows=graph_follows, recomputing=recomputing))
        # A call without a backward pass, as in inference, belongs to no step. There may be any number of them.
        self._calls -= 1
        if not (self._calls or graph_follows or recomputing):
            self.comm.record.forget_gathers(self._before_call)
            # Inference has no boundary at which all ranks would learn of the problem.
            self.param_syncs.raise_problems()

    def forward_failed(self, unit: Unit, error: BaseException) -> None:
        """Note that a forward raised `error`, if forwards involve other ranks, because they gather parameters.

        The failure of a recomputation is noted with its backward pass.
        """
        if self.strategy.gathered_over.size > 1 and not in_backward():
            what = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
            self.comm.program.pass_failed(f"its forward of unit {unit.name or 'root'!r} failed ({what})")

    # Backward -------------------------------------------------------------------------------------------------------

    @eager
    @_on_host
    def output_gradient_arrives(self, passed: ForwardPass, inputs: Sequence[Node], _: torch.Tensor) -> None:
        """Unshard the unit when the first gradient reaches one of its outputs. The gradients of others do nothing."""
        if passed.running:
            return
        passed.inputs_done = 0
        self._gradients_arrive_for(self.units[passed.unit])
        expect_gradients(self.units[passed.unit], passed, inputs)
        self._backward_event(partial(self.machine.backward_begins, passed, graph=torch.is_grad_enabled()))
        self.comm.record.begins("backward", self.units[passed.unit].name)

    @eager
    @_on_host
    def input_gradient_done(self, passed: ForwardPass, _: torch.Tensor) -> None:
        """Count the input gradients of a unit. After the last one, nothing is left to compute in its backward."""
        passed.inputs_done += 1
        if passed.inputs_done < passed.inputs_awaited:
            return
        self.comm.record.ends("backward", self.units[passed.unit].name)
        self.execute(self.machine.input_gradients_done(passed))
        self.execute(self.machine.weight_gradients_done(passed))

    def gradient(self, unit: Unit, bucket: Bucket, index: int, grad: torch.Tensor) -> None:
        """Accept the unsharded gradient that autograd has accumulated for parameter `index` of `bucket`."""
        # It runs often, and takes its own times. Sums and copies are the computation's work, not the engine's.
        machine, gradients = self.machine, bucket.gradients
        if unit is not self._arriving:
            self._gradients_arrive_for(unit)
        is_first = not machine.is_collecting(unit.index)
        if is_first:
            with self.host:
                self._backward_event(partial(machine.gradient_arrives, unit.index))
        began = perf_counter()
        is_whole = bucket.always_whole or machine.is_whole(unit.index)
        # Later gradients of a unit can only be wrong in these two ways. This saves a check of each.
        if is_first or grad.requires_grad or not is_whole:
            place, was_reduced = bucket.layout.places[index], machine.is_reduced(unit.index)
            check_gradient(place, grad, unit.name, is_whole or unit.plan.spec.leaf, was_reduced)
        arrives = perf_counter()
        # A muted rank counts arrivals, too: the transfers that follow must be the same on every rank.
        gradients.arrive(index, None if self.muted else grad)
        has_arrived = perf_counter()
        if gradients.arrived and all(b.gradients.arrived for b in unit.trainable):
            self.execute(machine.gradients_complete(unit.index))
        self.host.seconds += perf_counter() - began - (has_arrived - arrives)

    def _gradients_arrive_for(self, unit: Unit | None) -> None:
        """Store the gradients of the last unit that got any, unless it is `unit`. So only one unit's are ever held."""
        if self._arriving is not None and self._arriving is not unit:
            began = perf_counter()
            for bucket in self._arriving.trainable:
                bucket.gradients.store()
            self.host.subtract(perf_counter() - began)
        self._arriving = unit

    def _backward_event(self, event: Callable[[], list[Action]]) -> None:
        """Execute what the step machine answers to an event that may begin a backward pass."""
        before = self.machine.in_backward
        if not before:
            self.batches.check_weighed()
        try:
            actions = event()
        finally:
            if self.machine.in_backward and not before:
                # Autograd calls this at the end of the backward pass, before backward() returns.
                end = EndOfBackward(weakref.WeakMethod(self._end_backward), weakref.WeakMethod(self._backward_failed))
                torch.autograd.Variable._execution_engine.queue_callback(end)  # pyright: ignore[reportPrivateUsage]
        self.execute(actions)

    @eager
    @_on_host
    def _end_backward(self) -> None:
        self.batches.pass_ended(self.muted)
        self.comm.record.ends("backward", None)
        with torch.no_grad():
            try:
                self._gradients_arrive_for(None)
                self.execute(self.machine.backward_pass_ended())
            except BaseException:
                self._backward_failed()
                raise
            if not self.machine.boundary:
                self._micro_step_ended(self.comm.queues.micro_step + 1)
            elif not self.machine.staged:
                self._micro_step_ended(0)

    @property
    def shares(self) -> UnequalBatches | None:
        """The unequal batches, if the strategy has shares."""
        return self.batches if isinstance(self.batches, UnequalBatches) else None

    # Stages of a pipeline -------------------------------------------------------------------------------------------

    def be_a_stage(self, terms: int) -> None:
        """Make the model a pipeline stage: its passes interleave, and each mean gradient averages `terms` gradients."""
        if self.shares is not None:
            raise ShardError("a pipeline takes equal batches on all copies of a stage: leave shares= out.")
        self.machine.staged = True
        self._terms = terms
        for parameter in (p for unit in self.units for p in unit.parameters):
            assert isinstance(parameter, ShardTensor)
            parameter.shard_spec.replica.is_a_stage = True

    def meet_islands(self) -> None:
        """Join the other islands, if they have launchers of their own. Go on after the step at which they are."""
        if self.outer is not None and not self.outer.has_met:
            self.begin()
            self.tell_before_rewrite()
            step = self.outer.meet(self.step)
            if step != self.step:
                self.go_to(step)

    def sync_islands(self, *, average: bool = False) -> None:
        """Begin and apply the exchanges between islands that belong to the last optimizer step, if that is still to do.

        The first forward pass of the next step calls it, on every island, whether or not loss scaling skipped a step.
        `average`: Also average the weights of all islands.
        """
        self.meet_islands()
        if self.outer is not None and (average or self.outer.steps.done < self.step):
            actions = self.outer.steps.advance(self.step)
            actions += self.outer.steps.average() if average else []
            if actions:
                self.tell_before_rewrite()
            self.execute(actions)

    def param_sync(self) -> None:
        """Send what the optimizer wrote to the P shards of all ranks, before a forward pass needs it."""
        self.begin()
        self.execute(self.machine.param_sync())

    @_on_host
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Agree on the sizes of parameter syncs, if this step was the last one of the parameters with gradients."""
        # An exchange that is applied next writes the parameters again, so the forward pass agrees in its place.
        if not self.param_syncs.agrees or (self.outer is not None and self.outer.steps.applies_before(self.step)):
            return
        self._stepped.update(id(p) for group in optimizer.param_groups for p in group["params"])
        if all(p.grad is None or id(p) in self._stepped for unit in self._trained for p in unit.parameters):
            self.execute(self.machine.optimizers_stepped())
            self.param_syncs.check()

    @_on_host
    def end_boundary(self) -> None:
        """Wait for the gradient syncs and set every `.grad`, once a pipeline has sent what other stages wait for."""
        with torch.no_grad():
            try:
                self.execute(self.machine.end_boundary())
            except BaseException:
                self._backward_failed()
                raise
            self._micro_step_ended(0)

    def _backward_failed(self) -> None:
        """Note that a backward pass failed. Wait for its transfers later: this may run in a destructor."""
        self.comm.program.pass_failed("its backward pass failed")
        self.execute(self.machine.backward_pass_failed())

    def _micro_step_ended(self, number_of_the_next: int) -> None:
        self.machine.micro_step_ended()
        self.comm.queues.micro_step = number_of_the_next

    def _set_grads(self) -> None:
        used = self._used
        factor = self.batches.end_step()
        for unit in self._trained:
            for bucket in unit.trainable:
                count = len(bucket.gradients.used)
                bucket.gradients.set_grads(used[:count], factor)
                used = used[count:]
        self.comm.record.end_step()
        self._stepped.clear()
        self.step += 1
        self._writes_before_step = self.writes.count
        if self.outer is not None:
            self.outer.begin()
            self.outer.tokens = self.batches.tokens
        # Peers that wait for this rank quote the step that it has reached.
        self.comm.watchdog.status.step = self.step
        if self.step in self._changes:
            self._use_transports()
        if self.strategy.protect is not None and not self.has_snapshots:
            self._unprotected += 1
            if self._unprotected > self.strategy.protect.every:
                raise StepError(
                    f"rank {self.comm.number}: the strategy has {self.strategy.protect}, and none was taken in "
                    f"{self._unprotected} steps. Call saver.protect(step) of a towpath.checkpoint.Saver after each "
                    "step, or leave out protect."
                )

    # Routes and codecs that change with the step --------------------------------------------------------------------

    def go_to(self, step: int) -> None:
        """Continue as after `step` optimizer steps, for a checkpoint. Every rank must call it."""
        self.discard()
        self.step = step
        if self._changes:
            self._use_transports()

    def _use_transports(self) -> None:
        # A discarded prefetch may still use the transfers of before.
        self.comm.queues.finish()
        now = self.strategy.at(self.step)
        plans = [plan_unit(now, unit.plan.spec, self.precision, self.comm.form) for unit in self.units]
        for unit, plan in zip(self.units, plans, strict=True):
            unit.use_plan(plan, self.comm)
        self.machine.use_plans(plans)
        self.comm.queues.plan(plans)
        self.param_syncs.bind()

    # What the user calls --------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Run micro-steps that are not the last of their step: their gradients are summed, without a gradient sync."""
        before, self.machine.boundary = self.machine.boundary, False
        try:
            yield
        finally:
            self.machine.boundary = before

    def begin(self) -> None:
        """Prepare for a call that unshards units: agree with all ranks on failed passes, and drop their gradients."""
        self.comm.program.agree_on_failure()
        if self.machine.failed or self.machine.in_backward:
            self._abandon()

    def discard(self) -> None:
        """Drop the gradients of the micro-steps since the last boundary."""
        if self.machine.failed or self.comm.queues.micro_step:
            self._abandon()

    def _abandon(self) -> None:
        """Drop the gradients of all micro-steps since the last boundary, also of a backward pass that raised."""
        self.comm.record.ends("backward", None)
        self.batches.abandoned()
        self.execute(self.machine.abandoned())
        self._micro_step_ended(0)
        for unit in self.units:
            for bucket in unit.trainable:
                bucket.gradients.restart()

    def tell_before_rewrite(self) -> None:
        """Call every method in `before_rewrite`, before the caller overwrites the parameters."""
        for reference in self.before_rewrite:
            listener = reference()
            if listener is not None:
                listener()


def _transfers_of(buckets: Iterable[Bucket], kind: TransferKind) -> list[RankTransfer]:
    return [bound for bucket in buckets for bound in bucket.transfers[kind]]


def _handles(tasks: Iterable[Task]) -> list[Handle]:
    return [cast(Handle, task.handle) for task in tasks if task.handle is not None]


_Run = tuple[RankTransfer, Any, Any]  # a transfer with its region and its shard, or a coalesced one with lists of them


def _with_memory(
    unit: Unit, kind: TransferKind, memory: Sequence[tuple[Bucket, torch.Tensor, torch.Tensor]]
) -> list[_Run]:
    """Return the transfers of a unit with their memory: bucket, region and shard. Small ones come first, as one."""
    runs: list[_Run] = []
    together, transfer = unit.coalesced.get(kind, ((), None))
    if transfer is not None:
        small = [(region, shard) for bucket, region, shard in memory if bucket in together]
        runs.append((transfer, [region for region, _ in small], [shard for _, shard in small]))
    for bucket, region, shard in memory:
        if bucket not in together:
            runs += [(bound, region, shard) for bound in bucket.transfers[kind]]
    return runs


def _once(work: Work) -> Work:
    """Return work that does nothing the second time. A job that begins ahead of its turn has already done it then."""
    left = [work]
    return lambda workspace: left.pop()(workspace) if left else None


def _one_by_one(works: Sequence[Work]) -> Work:
    return lambda workspace: [work(workspace) for work in works]


def _works(runs: Iterable[_Run]) -> list[Work]:
    return [partial(transfer.run, region, shard) for transfer, region, shard in runs]


@cache
def _registrations() -> list[int]:
    """Return the number of parameters and submodules that modules have registered in this process, in a list of one."""
    # PyTorch's hooks are global, and each further one would count every registration again.
    made = [0]

    def count(*_: object) -> None:
        made[0] += 1

    register_module_module_registration_hook(count)
    register_module_parameter_registration_hook(count)
    return made


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a model that `shard()` returned; raise ShardError for any other model."""
    engine = getattr(model, "towpath_engine", None)
    if not isinstance(engine, Engine):
        raise ShardError(
            f"expected a model that towpath.shard() returned, got a plain {type(model).__name__}. Call towpath.shard() "
            "on the model first, and pass what it returns."
        )
    return engine
