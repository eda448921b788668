"""Predicted steps of FSDP2, HSDP and DDP, as they are and with `towpath.wires`, to compare with Towpath's strategies.

Each is the replay of the strategy with the same transfers, in the order of events of FSDP2 (torch 2.13). It is an
approximation:

- Units and buffers are those of Towpath's plans. The copies with which FSDP2 and the wires pack flat buffers take no
  time.
- FSDP2 gathers one unit ahead, and reduces gradients in every micro-step. HSDP sums over nodes in the last micro-step
  (`set_requires_all_reduce`).
- On a GPU, the backward pass of a unit may overlap with the reduction of one other unit, which is the default of
  `set_reduce_scatter_max_input_buffers`. On CPUs, FSDP2 waits for each gather and each reduction at once.
- Reduce-scatters send the bytes of a ring. Those of gloo send up to twice as many.
- DDP computes in autocast, sends gradients in the reduction's dtype with a hook, and has `no_sync` around all
  micro-steps but the last. Its buckets are the gradients of one unit. Without a codec, the wires send fewer bytes of
  them over gloo only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from towpath.core import presets
from towpath.core.schedule import Compute, settled, steady_step
from towpath.core.step_state import Action, CheckRanks, Submit, Task, Wait
from towpath.core.strategy import GRADIENTS, Strategy, TransferKind
from towpath.core.unit_plan import UnitPlan
from towpath.plan.request import Batching, Prediction
from towpath.plan.solver import Solver
from towpath.topology.cluster import Topology

# What a reader of the predictions has to know.
NOTE = (
    "PyTorch's own are replayed in FSDP2's order of events, with Towpath's units and buffers. FSDP2 reduces in every "
    "micro-step. HSDP and DDP sum over nodes in the last one. Reduce-scatters are rings; gloo's send up to twice as "
    "much."
)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A way to train with PyTorch's own data parallelism, as data."""

    name: str
    preset: presets.Preset  # has the same transfers
    wired: bool = False
    sums_each: bool = False  # whether the gradients of every micro-step are summed over all ranks
    # The reduction whose flat gradients are kept until it has ended. None if it is only waited for before the step.
    kept: TransferKind | None = TransferKind.GRAD_SYNC
    holds_column: bool = False  # whether a rank keeps the weights of its column, in addition to its shards

    def strategy(self, topology: Topology) -> Strategy:
        """Return the strategy with the same transfers."""
        return presets.strategy(self.preset, topology, exact=self.wired, route="flat")

    def steps(
        self, plans: Sequence[UnitPlan], micro_steps: int, on_cpus: bool
    ) -> Iterator[tuple[int, Action | Compute]]:
        """Yield the computations and actions of a steady step in the order of this wrapper."""
        machine, each = settled(plans), [1] * micro_steps if self.sums_each else [micro_steps]
        reducing: Task | None = None
        # The wires send all units after the optimizer's step, and not when their gathers are due.
        for action in (*machine.optimizers_stepped(), *machine.param_sync()) if self.wired else ():
            yield 0, action
        for number, count in enumerate(each):
            for micro_step, action in steady_step(machine, plans, count):
                # Only the wires compare ranks, before the optimizer's step.
                if isinstance(action, CheckRanks) and not (self.wired and number + 1 == len(each)):
                    continue
                task = action.task if isinstance(action, Submit) and self.kept is not None else None
                if task is not None and task.kind in GRADIENTS and reducing is not None and reducing.unit != task.unit:
                    yield number + micro_step, Wait(reducing)
                    reducing = None
                yield number + micro_step, action
                if task is None or task.kind is TransferKind.PARAM_SYNC:
                    continue
                if on_cpus:
                    yield number + micro_step, Wait(task)
                elif task.kind is self.kept:
                    reducing = task

    def memory(self, solver: Solver, batching: Batching) -> dict[str, int]:
        """Return the bytes of a rank by part.

        The wires add the weights that a column holds.
        """
        found = solver.predict_memory(self.strategy(solver.cluster.topology), batching)
        if self.holds_column:
            own = {"weights of the column": found["params"]}
            own |= {part: found[part] for part in ("sent", "wire", "communicators") if part in found}
            return STOCK.memory(solver, batching) | own
        return found

    def predict(self, solver: Solver) -> Prediction:
        """Predict the step with the largest micro-batch that fits, with or without checkpointing, if that is faster."""
        world = solver.cluster.topology.world
        sizes = {each: self.memory(solver, each) for each in solver.request.batchings(world)}
        fitting = [each for each, parts in sizes.items() if sum(parts.values()) <= solver.request.memory]
        largest = {each.checkpointing: each for each in sorted(fitting, key=lambda each: each.micro_batch)}
        chosen = [*largest.values()] or [min(sizes, key=lambda each: sum(sizes[each].values()))]
        steps = partial(self.steps, on_cpus=solver.cluster.hardware.cores is not None)
        strategy = replace(self.strategy(solver.cluster.topology), name=self.name)
        found = [replace(solver.predict(strategy, each, steps), memory=sizes[each]) for each in chosen]
        return min(found, key=lambda step: step.order)


STOCK = Wrapper("FSDP2", "zero3", sums_each=True)
# FSDP2 keeps the flat gradients of one unit until their reduce-scatter has ended. HSDP's second sum has others.
WRAPPERS = (
    STOCK,
    Wrapper("FSDP2 with wires", "paro-iig", wired=True, sums_each=True, holds_column=True),
    Wrapper("HSDP", "mics", kept=TransferKind.REDUCE),
    Wrapper("DDP", "ddp", kept=None),
    Wrapper("DDP with wires", "ddp", wired=True, kept=None),
)


def predict_wrappers(solver: Solver) -> list[Prediction]:
    """Predict the step of each wrapper. On one node there are no wires, and with offload nothing is predicted."""
    if solver.request.offload is not None:
        return []
    crosses = solver.cluster.topology.nodes > 1
    return [each.predict(solver) for each in WRAPPERS if crosses or each.name in ("FSDP2", "DDP")]
