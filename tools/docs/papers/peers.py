"""The programs that the papers ran: in which order each of them communicates, as data, and where that is written.

The simulator takes the order of Towpath's engine and changes it as a program says (`Program.steps`). Files are those of
DeepSpeed 0.10.0 in `deepspeed/runtime/` and its `zero/`, unless another version is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from towpath.core.placement import everyone
from towpath.core.schedule import Compute, settled, steady_step
from towpath.core.step_state import Action, CheckRanks, Submit, Task, Wait
from towpath.core.strategy import GRADIENTS, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.unit_plan import UnitPlan

_GATHERS = frozenset({TransferKind.GATHER, TransferKind.BACKWARD_GATHER})
_REDUCTIONS = frozenset({TransferKind.REDUCE, TransferKind.GRAD_SYNC})
_SYNC = frozenset({TransferKind.PARAM_SYNC})
_BUCKET = 500_000_000  # the default of `reduce_bucket_size` and `allgather_bucket_size`

Steps = Iterator[tuple[int, Action | Compute]]


@dataclass(frozen=True)
class Program:
    """How a program orders the transfers of a step.

    Args:
        source: Where the rules are written.
        in_series: The kinds of transfers for which the computation waits as soon as they are submitted.
        one_communicator: Whether gathers and reductions use one communicator, so that they run one after the other.
        waits: Whether each micro-step waits for its reductions before the next one begins.
        after_backward: Whether gradients are sent only after the whole backward pass.
        bucket: How many elements are reduced, or sent to their ranks, at once. None sends those of each unit.
        all_reduces: Whether each micro-step all-reduces gradients over all ranks, and each rank drops the rest.
    """

    source: str
    in_series: frozenset[TransferKind] = frozenset()
    one_communicator: bool = False
    waits: bool = False
    after_backward: bool = False
    bucket: int | None = None
    all_reduces: bool = False

    def __str__(self) -> str:
        """The rules, in words."""
        names = {_GATHERS: "gathers", _REDUCTIONS: "reductions", _SYNC: "new parameters"}
        waited = [name for kinds, name in names.items() if kinds <= self.in_series]
        rules = {
            "gradients are sent after the backward pass": self.after_backward,
            "each micro-step all-reduces over all ranks": self.all_reduces,
            f"the computation waits at once for {', '.join(waited)}": bool(waited),
            "gathers and reductions share a communicator": self.one_communicator,
            "each micro-step waits for its reductions": self.waits,
            f"buckets of {(self.bucket or 0) // 10**6} million elements": self.bucket is not None,
        }
        return ", and ".join(rule for rule, holds in rules.items() if holds)

    def steps(self, plans: Sequence[UnitPlan], micro_steps: int) -> Steps:
        """Yield the computations and actions of a steady step in the order of this program."""
        machine, now, held, reductions = settled(plans), 0, list[Task](), list[Task]()
        before: Task | None = None

        def submitted(tasks: Sequence[Task]) -> Steps:
            nonlocal before
            for task in _merged(tasks, plans):
                if self.one_communicator and task.kind in _GATHERS | _REDUCTIONS:
                    task.after, before = (*task.after, before) if before is not None else task.after, task
                yield now, Submit(task)
                if task.kind in self.in_series:
                    yield now, Wait(task)
                if task.kind is TransferKind.REDUCE:
                    reductions.append(task)

        def collected(task: Task) -> Steps:
            numel = sum(_numel(plans[each.unit]) for each in (*held, task) if each.kind is task.kind)
            if self.bucket is not None and numel > self.bucket and not self.after_backward:
                yield from flushed()
            held.append(task)

        def flushed() -> Steps:
            for tasks in _in_buckets(held, plans, self.bucket):
                yield from submitted(tasks)
            held.clear()

        def ended() -> Steps:
            yield from flushed()
            for task in reductions if self.waits else ():
                yield now, Wait(task)
            reductions.clear()

        if self.in_series >= _SYNC:  # new parameters are sent before the first forward pass, and not during it
            for action in (*machine.optimizers_stepped(), *machine.param_sync()):
                yield from collected(action.task) if isinstance(action, Submit) else iter([(now, action)])
            yield from flushed()
        for micro_step, action in steady_step(machine, plans, micro_steps):
            if micro_step != now:
                yield from ended()
                now = micro_step
            if isinstance(action, CheckRanks):  # only Towpath compares ranks
                yield from ended()
            elif not isinstance(action, Submit):
                yield now, action
            else:
                task = action.task
                if task.kind is TransferKind.REDUCE and self.all_reduces:
                    task.transfers = tuple(_over_all_ranks(plans[task.unit]))
                collects = task.kind in GRADIENTS and (self.after_backward or self.bucket is not None)
                yield from collected(task) if collects else submitted([task])


def _numel(plan: UnitPlan) -> int:
    return sum(bucket.numel for bucket in plan.buckets)


def _in_buckets(tasks: Sequence[Task], plans: Sequence[UnitPlan], bucket: int | None) -> Iterator[list[Task]]:
    """Yield the tasks of each bucket. Tasks of different kinds, such as a reduction and its sync, fill it apart."""
    found: list[Task] = []
    for task in tasks:
        numel = sum(_numel(plans[each.unit]) for each in (*found, task) if each.kind is task.kind)
        if found and (bucket is None or numel > bucket):
            yield found
            found = []
        found.append(task)
    if found:
        yield found


def _merged(tasks: Sequence[Task], plans: Sequence[UnitPlan]) -> Iterator[Task]:
    """Yield one task for each kind, with the bytes of all. Waiting for one of the others takes no time."""
    for kind in dict.fromkeys(task.kind for task in tasks):
        alike = [task for task in tasks if task.kind is kind]
        last = alike[-1]
        if len(alike) > 1:
            share = sum(_numel(plans[task.unit]) for task in alike) / _numel(plans[last.unit])
            last.transfers = tuple(
                replace(each, payload=replace(each.payload, elements=round(each.elements * share)))
                for each in last.transfers or plans[last.unit].steady_transfers(kind)
            )
        yield last


def _over_all_ranks(plan: UnitPlan) -> Iterator[Transfer]:
    for each in plan.steady_transfers(TransferKind.REDUCE):
        payload = replace(each.payload, elements=_numel(plan))
        for move in everyone(each.topology):
            yield Transfer(each.kind, payload, move, Transport(), each.topology, form=each.form)
        return


STAGE1 = Program(
    "engine.py: `_configure_zero_optimizer` turns `overlap_comm` off for stage 1, and `allreduce_gradients` reduces "
    "after the backward pass; stage_1_and_2.py: `step` ends with `all_gather_dp_groups`",
    in_series=_REDUCTIONS | _SYNC,
    after_backward=True,
    bucket=_BUCKET,
)
STAGE2 = Program(
    "config.py: `overlap_comm_valid` is off for stage 2 by default, so that `average_tensor` of stage_1_and_2.py "
    "reduces on the computing stream, in each micro-step; `step` ends with `all_gather_dp_groups`",
    in_series=_REDUCTIONS | _SYNC,
    bucket=_BUCKET,
)
STAGE3 = Program(
    "stage3.py: `independent_gradient_partition_epilogue` waits for the stream of reductions after each backward pass",
    waits=True,
)
STAGE3_MEGATRON = Program(
    "the same, and Megatron-DeepSpeed passes `mpu.get_data_parallel_group()` to both `zero.Init` and `initialize`",
    one_communicator=True,
    waits=True,
)
STAGE3_EARLY = Program(
    "stage3.py of 0.5.6: `_synchronize_communication` waits for the whole device before modules whose parameters were "
    "gathered; partition_parameters.py: both use `ds_process_group`",
    in_series=_REDUCTIONS,
    one_communicator=True,
)
NO_TWO_HOPS = Program("MiCS, sections 3.4 and 5.2.3", waits=True, all_reduces=True)
LINS_PEERS = Program(
    "Lins prints 50 % of the peak for MiCS on eight GPUs (section III-C) and 63 % for ZeRO-1 (III-A), but says that "
    "all baselines overlap (VI-A)",
    in_series=_GATHERS | _REDUCTIONS | _SYNC,
)
LINS_ITSELF = Program("Lins, section VI-A: its broadcasts were not overlapped", in_series=_SYNC)

# Which programs ran what.
PROGRAMS = {
    "ZeRO-1 of DeepSpeed (Lins)": STAGE1,
    "ZeRO-3, ZeRO++ and MiCS of DeepSpeed (Lins)": LINS_PEERS,
    "Lins": LINS_ITSELF,
    "ZeRO-3 of DeepSpeed 0.5.6 (MiCS)": STAGE3_EARLY,
    "MiCS without two hops": NO_TWO_HOPS,
    "ZeRO++, hpZ, qgZ; ZeRO-3, PaRO-IGG and -IIG (PaRO)": STAGE3,
    "ZeRO-3 and qwZ (ZeRO++)": STAGE3_MEGATRON,
    "ZeRO-2 and PaRO-NIG (PaRO)": STAGE2,
}
