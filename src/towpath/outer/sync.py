"""Outer steps of a model on one rank: its part of the slow weights, and the exchanges between islands.

A rank keeps the slow weights and the momentum of its slice in every fragment, each as one flat buffer. So an exchange
is one collective, and applying its result takes few kernels:

    difference = slow weights - weights          before the exchange, which sums it over the islands
    mean       = difference / islands
    momentum   = factor · momentum + mean        (Nesterov)
    slow       = slow - lr · (mean + factor · momentum)
    weights    = (1 - blend) · slow + blend · weights

If islands take unequal batches, the mean is weighted by the tokens that each of them has trained on since the last
exchange.

The weights are those that the optimizer writes to. An ordinary parameter sync then sends them to the P shards of the
island.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast, final

import torch
from torch import Tensor

from towpath.collectives.collective import Workspace
from towpath.core.queues import HOST_EXCHANGES, LoggedCall
from towpath.core.step_state import ApplyOuter, Task
from towpath.core.strategy import OUTER_KINDS, TransferKind
from towpath.engine.agree.digest import differing_islands
from towpath.engine.comm import CommContext
from towpath.engine.layout import torch_dtype
from towpath.engine.parameters.checksum import checksum
from towpath.engine.parameters.gradients import host_memory, slice_of
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.engine.parameters.unit import Unit
from towpath.engine.transfer_queues import Handle, Work
from towpath.errors import StepError
from towpath.outer.exchanges import Fragment, FragmentPart, OuterPlan, OuterSteps, gathered_in
from towpath.outer.settings import Outer

# A parameter, and something of the same shape that this rank holds a part of.
Held = tuple[ShardTensor, ShardTensor]


class OuterSync:
    """The outer steps of a model on one rank. The engine holds one if its strategy has outer steps.

    `steps` decides which exchange begins and ends when. `plan` has the transfers.
    """

    def __init__(self, plan: OuterPlan, units: Sequence[Unit], comm: CommContext) -> None:
        self.plan, self._comm = plan, comm
        self.steps = OuterSteps(plan)
        comm.exchange_timeout = plan.timeout(comm.job.timeout)
        self._exchanges = [
            FragmentExchange(number, each, plan, units, comm) for number, each in enumerate(plan.fragments)
        ]
        self.has_met = not plan.settings.meet  # whether the islands know each other, as those of one job do
        self._has_begun = False  # whether the slow weights have values
        # The islands that train, and how many exchanges nobody applied. Both change only if islands come and go.
        self.present, self.dropped = plan.strategy.islands, 0
        # The tokens of this island with unequal batches, so far and up to the last exchange of each fragment.
        self.tokens, self._exchanged = 0, dict[int, int]()
        # Fragments that were applied, each with the end of its exchange, and the digest that is there then.
        self._unchecked: list[tuple[int, Handle, Tensor]] = []
        comm.queues.always = {kind: plan.wire_needs(kind) for kind in OUTER_KINDS}
        if plan.from_host:
            comm.queues.names[TransferKind.OUTER] = HOST_EXCHANGES

    def begin(self) -> None:
        """Take the weights of now as the slow weights, unless these have values. The momentum begins at zero."""
        if not self._has_begun:
            self._has_begun = True
            for part, _ in self.parts():
                part.begin()

    def submit(self, task: Task) -> Handle:
        """Compute the differences of a fragment, and submit their exchange."""
        # The training thread has waited for the exchange before, which used the same memory.
        exchange, fragment = self._exchanges[task.unit], task.unit
        # The mean of all islands' weights, which `average_islands` takes at any step, has equal weights.
        weighs = fragment in self.plan.settings.begun_at(self.steps.done)
        exchange.take_differences(max(1, self.tokens - self._exchanged.get(fragment, 0)) if weighs else 1)
        self._exchanged[fragment] = self.tokens
        # A copy of its own, because the host may read that of an earlier exchange later.
        exchange.told = host_memory(2, torch.int64, self._comm.device)
        after: list[Handle] = []
        if self.plan.from_host and not self.plan.strategy.optimizer_on_host:
            # A stream of the device copies, while the computation goes on. The thread of the exchange waits for it.
            after = [self._comm.queues.submit(TransferKind.OUTER_GATHER, (), [lambda _: exchange.copy_to_send()])]
        else:
            exchange.copy_to_send()
        return self._comm.queues.submit(TransferKind.OUTER, exchange.transfers, [self._work(task)], after)

    def _work(self, task: Task) -> Work:
        """Return what runs the exchange of a fragment."""
        return self._exchanges[task.unit].run

    def apply(self, action: ApplyOuter) -> None:
        """Apply the result of an exchange to the slow weights, and to all weights of this rank's optimizer slice.

        If the islands turn out to have different slow weights of this rank's part, a later boundary raises. The other
        ranks of the island wait for this one in the gather, so it takes part in it.
        """
        exchange = self._exchanges[action.fragment]
        # Without a handle, a checkpoint has brought the result. Its slow weights are those of all islands.
        if exchange.transfers and (ended := cast("Handle | None", action.exchange.handle)) is not None:
            self._unchecked.append((action.fragment, ended, exchange.told))
        settings = self.plan.settings
        if action.average:
            settings = replace(settings, lr=1.0, momentum=0.0, blend=0.0)  # the slow weights become the plain mean
        for part in exchange.parts:
            # Every rank of an island steps its own part only, so no two ranks can disagree about one element.
            part.step(settings, self.plan.strategy.islands)
        self._write(exchange)

    def _write(self, exchange: FragmentExchange) -> None:
        """Write the new values of a fragment to the weights of this rank's optimizer slices."""
        if not exchange.gathers:  # no other rank of the island has this optimizer slice
            for part in exchange.parts:
                part.write()
        else:
            gathers = [part.run_gather for part in exchange.parts]
            gathered = self._comm.queues.submit(TransferKind.OUTER_GATHER, exchange.gathers, gathers)
            gathered.wait(on_host=self.plan.strategy.optimizer_on_host)
        for part in exchange.parts:
            part.written()

    def meet(self, step: int) -> int:
        """Join the other islands after optimizer step `step`, and return the step at which they are."""
        return step

    def wait(self) -> None:
        """Wait for all exchanges under way. Their results are applied when it is their time."""
        for task, _ in self.steps.under_way.values():
            if task.handle is not None:
                cast(Handle, task.handle).wait(on_host=True)

    def note_problems(self) -> None:
        """Tell all ranks of the island at the boundary which slow weights differ, for which all of them raise."""
        for what in self._differing():
            if not self._comm.log.compares(LoggedCall.SLOW_WEIGHTS):
                raise StepError(f"rank {self._comm.number}: {differing_islands(what)}")
            self._comm.log.note(LoggedCall.SLOW_WEIGHTS, what, ((("rank", self._comm.job.rank),),))

    def _differing(self, wait: bool = False) -> list[str]:
        """Return what islands turned out to have different values of, as far as it is known, or after a `wait`."""
        unchecked, self._unchecked = self._unchecked, []
        found: list[str] = []
        for fragment, ended, told in unchecked:
            if wait:
                ended.wait(on_host=True)
            # A boundary reads what the device has found by then, because the host must not wait in a step.
            elif not ended.has_ended():
                self._unchecked.append((fragment, ended, told))
                continue
            digest, complement = told.tolist()
            if digest != ~complement:
                found.append(f"the slow weights of fragment {fragment}")
        return found

    def check_steps(self, step: int, awaits_step: bool) -> None:
        """Raise if islands have made different numbers of steps, or have begun another. Every rank must call it."""
        # `awaits_step`: this rank has gradients of the last step that no optimizer has used.
        advice = "Let every island make equally many steps, for example with towpath.join(model, batches)."
        try:
            found = self._comm.job.all_gather_objects((step, self._comm.queues.micro_step, awaits_step))
        except RuntimeError as error:
            raise StepError(
                f"rank {self._comm.number}: averaging the islands failed after step {step}: {error}\nAnother rank has "
                f"died, or is at another step. {advice}"
            ) from error
        for rank, (theirs, begun, awaits) in enumerate(found):
            if theirs != step:
                problem = f"after step {step} here, and after step {theirs} on rank {rank}. {advice}"
            elif begun:
                problem = f"while rank {rank} accumulates gradients. Call average_islands after optimizer.step()."
            elif awaits:
                problem = (
                    f"while rank {rank} has gradients that no optimizer has used. Call average_islands after "
                    "optimizer.step(). If loss scaling has skipped that step, call optimizer.zero_grad() first."
                )
            else:
                continue
            raise StepError(f"rank {self._comm.number}: islands are averaged {problem}")

    def raise_problems(self) -> None:
        """Raise on all ranks of all islands if a rank found slow weights that differ. Every rank must call it."""
        problems = self._differing(wait=True)
        for what in (what for found in self._comm.job.all_gather_objects(problems) for what in found):
            raise StepError(f"rank {self._comm.job.rank}: {differing_islands(what)}")

    def parts(self) -> Iterator[tuple[PartExchange, bool]]:
        """Yield each flat buffer of this rank, and whether its exchange is under way: its result is not applied yet."""
        for number, exchange in enumerate(self._exchanges):
            yield from ((part, number in self.steps.under_way) for part in exchange.parts)

    def feedback(self) -> dict[str, Tensor]:
        """Return the error feedback of this rank, by name. The tensors are those in use."""
        numbered = ((f"{n}.{k}", part) for n, each in enumerate(self._exchanges) for k, part in enumerate(each.parts))
        return {f"{name}.{i}": kept for name, part in numbered for i, kept in enumerate(part.feedback)}

    def resume(self, done: int, under_way: Mapping[int, int]) -> None:
        """Continue after optimizer step `done`, with these exchanges to apply, each with the step that it belongs to.

        The slow weights, the momentum and the sums of the differences must have been filled.
        """
        self.wait()
        self._has_begun, self._unchecked = True, []
        self.steps.resume(done, under_way)

    def begin_anew(self, step: int) -> None:
        """Let the slow weights begin as the weights after optimizer step `step`. The momentum stays."""
        self.resume(step, {})
        self._has_begun = False

    def restart(self) -> None:
        """Begin without momentum and error feedback."""
        for part, _ in self.parts():
            for each in part.feedback if part.momentum is None else (*part.feedback, part.momentum):
                each.zero_()


@final
class FragmentExchange:
    """The exchange of one fragment on this rank: its parts, and the transfers of all of them."""

    def __init__(
        self, number: int, fragment: Fragment, plan: OuterPlan, units: Sequence[Unit], comm: CommContext
    ) -> None:
        self._number, self._comm = number, comm
        self._check = comm.bind(fragment.check)
        self.parts = [PartExchange(part, plan, units, comm) for part in fragment.parts]
        self.transfers = [*self._check, *(bound for part in self.parts for bound in part.exchange)]
        self.gathers = [bound for part in self.parts for bound in part.gather]
        # The digest of the slow weights, and its complement. The maximum of both shows whether all islands have one.
        # With unequal batches, the tokens of each island follow.
        islands = 0 if plan.strategy.shares is None else plan.strategy.islands
        self._slot = comm.job.rank // comm.groups.world if islands > 1 else None  # this island's
        self.digest = _zeros(2 + islands, torch.int64, comm.device, plan.from_host)
        # Where it is computed.
        moves = plan.from_host and not plan.strategy.optimizer_on_host
        self._digest = _zeros(2 + islands, torch.int64, comm.device, on_host=False) if moves else self.digest
        self.told = self.digest  # its copy in host memory, which an exchange makes

    def take_differences(self, tokens: int = 1) -> None:
        """Compute how far the weights have moved from the slow weights, and the digest of these. Note the tokens."""
        for part in self.parts:
            part.take_difference()
        digest = sum((2 * i + 1) * checksum(part.slow) for i, part in enumerate(self.parts))
        if isinstance(digest, Tensor):
            self._digest[:2] = torch.stack([digest, ~digest])
        if self._slot is not None:
            self._digest[2:].zero_()[self._slot] = tokens

    def copy_to_send(self) -> None:
        """Copy the differences and the digest from where they were computed to where they are sent from."""
        for target, source in [(part.difference, part.values) for part in self.parts] + [(self.digest, self._digest)]:
            if target is not source:
                target.copy_(source, non_blocking=True)

    def run(self, workspace: Workspace) -> None:
        try:
            for bound in self._check:
                bound.run(self.digest, self.digest, workspace)
            self.told.copy_(self.digest[:2], non_blocking=True)
            if self._slot is not None:
                tokens = self.digest[2:].double()
                weight = tokens[self._slot] * len(tokens) / tokens.sum()  # 1 if all islands have equally many
                for part in self.parts:
                    part.difference.mul_(weight)
            for part in self.parts:
                for bound in part.exchange:  # sums the differences of all islands, in place
                    bound.run(part.difference, part.difference, workspace)
        except StepError as error:
            what = f"the exchange of fragment {self._number} between islands failed"
            # The other ranks of the island notice it only by their next transfer with this rank. They quote this.
            mine = self._comm.number
            others = ", ".join(str(number) for number in self._check[0].members.numbers if number != mine)
            self._comm.tell(f"{what}, which needs rank {others}")
            raise StepError(f"rank {mine}: {what}: {str(error).removeprefix(f'rank {mine}: ')}") from error


@final
class PartExchange:
    """One flat buffer of a fragment on this rank: slow weights, momentum, and differences.

    The slow weights and the momentum are stored where the optimizer works, which may be the host. The differences are
    where they are sent from, which may be the host, too.
    """

    def __init__(self, part: FragmentPart, plan: OuterPlan, units: Sequence[Unit], comm: CommContext) -> None:
        self._plan, self._rank = part, comm.rank
        self.exchange, self.gather = comm.bind(part.exchange), comm.bind(part.gather)
        self._buckets = [units[each.unit].buckets[each.bucket] for each in part.slices]
        on_host = plan.strategy.optimizer_on_host
        make = partial(_zeros, part.elements, torch_dtype(part.dtype), comm.device)
        self.slow = make(on_host)
        self.momentum = make(on_host) if plan.settings.momentum else None
        self.difference = make(plan.from_host)
        # Where new values are computed, next to the slow weights.
        self.values = self.difference if on_host == plan.from_host else make(on_host)
        # The host must have what it computes with. A device gets it in its order.
        self._copies_ahead = not on_host
        self._own = [
            slice_of(bucket.master.detach(), part.partition, comm.rank, bucket.plan.optimizer)
            for bucket in self._buckets
        ]
        self._sizes = [each.elements for each in part.slices]

    def begin(self) -> None:
        """Let the slow weights be the weights of now."""
        _copy_all(self._in(self.slow), self._own)

    def _in(self, flat: Tensor) -> Sequence[Tensor]:
        """Return the parts of a flat buffer, or of rows of them, that belong to the buckets."""
        return flat.split(self._sizes, -1)

    def held(self, flat: Tensor) -> Iterator[Held]:
        """Yield each parameter with this rank's elements of it in a flat buffer, as a ShardTensor."""
        for bucket, each in zip(self._buckets, self._plan.slices, strict=True):
            for place in bucket.layout.places:
                assert isinstance(place.parameter, ShardTensor)
                spec = place.parameter.shard_spec
                slot = self._plan.partition.slots[self._rank]
                where = replace(spec, cut=each.elements, slot=slot, holders=(spec.replica.rank,))
                start, end = where.bounds_in_slice()
                yield place.parameter, ShardTensor(flat[each.start + start : each.start + end], where)

    def settled(self, plan: OuterPlan, is_pending: bool) -> tuple[Tensor, Tensor | None]:
        """Return slow weights, in the dtype of the parameters, and momentum, with the pending result applied if any."""
        own, slow, momentum = torch_dtype(self._plan.own_dtype), self.slow, self.momentum
        if is_pending:
            slow, momentum = slow.clone(), None if momentum is None else momentum.clone()
            sums = torch.empty_like(slow).copy_(self.difference)
            step_slow_weights(slow, momentum, sums, plan.settings, plan.strategy.islands)
        return slow.to(own), momentum

    def take_difference(self) -> None:
        """Write the difference of the slow weights and the weights to `values`."""
        _copy_all(self._in(self.values), self._own)
        torch.sub(self.slow, self.values, out=self.values)

    @property
    def feedback(self) -> list[Tensor]:
        """Return what the codec of the exchange has rounded away on this rank."""
        return [kept for bound in self.exchange for kept in bound.collective.state]

    def wait_for_readers(self) -> None:
        """Return when the device has copied the weights, which `write` or `run_gather` will overwrite."""
        for bucket in self._buckets:
            bucket.version.wait_for_read()

    def step(self, settings: Outer, islands: int) -> None:
        """Apply the sum of all islands' differences to the slow weights. Write the new weights to `values`."""
        values = self.values
        self.wait_for_readers()
        if values is not self.difference:
            values.copy_(self.difference, non_blocking=self._copies_ahead)
        step_slow_weights(self.slow, self.momentum, values, settings, islands)
        if settings.blend:
            _copy_all(self._in(values), self._own)
            values.lerp_(self.slow, 1 - settings.blend)
        else:
            values.copy_(self.slow)

    def write(self) -> None:
        """Write the new weights to this rank's optimizer slices, if no other rank has the same ones."""
        _copy_all(self._own, self._in(self.values))

    def run_gather(self, workspace: Workspace) -> None:
        """Gather the new weights of all ranks with the same optimizer slices, and write them to these."""
        for bound in self.gather:
            start, end = gathered_in(bound.transfer)
            region = workspace.take(end, torch_dtype(bound.transfer.dtype))[start:]
            rows = region.view(len(bound.members.group.ranks), -1)
            rows[bound.members.slot].copy_(self.values)
            bound.run(rows.view(-1), rows[bound.members.slot], workspace)
            wholes = [bucket.master.detach().view(len(rows), -1) for bucket in self._buckets]
            _copy_all(wholes, self._in(rows))

    def written(self) -> None:
        for bucket in self._buckets:
            bucket.version.written()


def _zeros(numel: int, dtype: torch.dtype, device: torch.device, on_host: bool) -> Tensor:
    if on_host:
        return host_memory(numel, dtype, device).zero_()
    return torch.zeros(numel, dtype=dtype, device=device)


def step_slow_weights(slow: Tensor, momentum: Tensor | None, values: Tensor, settings: Outer, islands: int) -> None:
    """Step the outer optimizer. `values` are the sums of all islands' differences, and are overwritten."""
    values.div_(islands)
    if momentum is not None and settings.momentum:
        momentum.mul_(settings.momentum).add_(values)
        values.add_(momentum, alpha=settings.momentum)
    slow.add_(values, alpha=-settings.lr)


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, with as few kernels as possible."""
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
