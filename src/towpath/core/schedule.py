"""One optimizer step as a list of transfers: what moves, when, over which ranks, how, and how many bytes.

The step machine (`step.py`) says when they go; a schedule is the machine run over one steady step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from towpath.core.formats import item_bytes
from towpath.core.journal import journal_bytes
from towpath.core.payload import Range
from towpath.core.pipeline import StagePass
from towpath.core.precision import Precision
from towpath.core.queues import QUEUES, WAYS
from towpath.core.steady_step import staged_tasks, steady_tasks
from towpath.core.step import UNITS_IN_FLIGHT
from towpath.core.strategy import WIRED, Kind, Strategy
from towpath.core.transfer import Needs, SentBytes, Transfer
from towpath.core.transitions import everyone
from towpath.core.unit_plan import UnitPlan, largest, plan_unit
from towpath.core.units import UnitSpec
from towpath.core.whole_matrices import MatrixPlan, WholeParameter, plan_matrices
from towpath.core.wire import Wire
from towpath.errors import StrategyError


def usage_transfers(strategy: Strategy, parameters: int) -> tuple[Transfer, ...]:
    """Combined at the boundary: one byte a parameter, whether any rank used it (an unused one keeps `.grad` None);
    and digests of what each rank has submitted (`core/journal.py`)."""
    moves = everyone(strategy.topology) if parameters else ()
    count = parameters + journal_bytes(strategy)
    payload = Range("", "", count, "uint8")
    return tuple(Transfer(Kind.USAGE, payload, m, Wire(), strategy.topology) for m in moves)


@dataclass(frozen=True, slots=True)
class Schedule(SentBytes):
    """Every transfer of one optimizer step, in the order in which the engine submits them."""

    strategy: Strategy
    micro_steps: int
    plans: tuple[UnitPlan, ...]
    transfers: tuple[Transfer, ...]
    matrices: MatrixPlan | None = None

    def memory_bytes(self) -> dict[str, int]:
        """What one rank keeps between steps on its device, by kind, before the optimizer's own states."""
        return memory_bytes(self.plans)

    def host_memory_bytes(self) -> dict[str, int]:
        """And in the host's memory: nothing unless the strategy offloads."""
        return host_memory_bytes(self.plans)

    def host_copy_bytes(self) -> dict[Kind, int]:
        """What one rank copies between its device and the host's memory in this step, by kind of transfer."""
        found = {kind: sum(b.host_copy_bytes(kind) for p in self.plans for b in p.buckets) for kind in WIRED}
        return {kind: copied for kind, copied in found.items() if copied}

    def buffer_bytes(self) -> dict[str, int]:
        """What one rank holds beside that: slots that whole weights and gradients pass through, and wire buffers."""
        kinds = {t.kind for t in self.transfers}.intersection(WIRED)
        owners = {"whole matrices": self.matrices.buffer_bytes} if self.matrices is not None else {}
        return buffer_bytes(self.plans, kinds) | owners

    def __str__(self) -> str:
        title = f"{self.strategy.name}, {self.micro_steps} micro-steps a step: bytes sent by all ranks together"
        return f"{title}\n{self.by_kind()}"


def memory_bytes(plans: Iterable[UnitPlan]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for plan in plans:
        for bucket in plan.buckets:
            total.update(bucket.memory_bytes())
    return dict(total)


def host_memory_bytes(plans: Iterable[UnitPlan]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for plan in plans:
        for bucket in plan.buckets:
            total.update(bucket.host_memory_bytes())
    return dict(total)


def buffer_bytes(plans: Sequence[UnitPlan], kinds: Collection[Kind] = WIRED) -> dict[str, int]:
    root = [p for p in plans if p.spec.kept]
    others = [p for p in plans if not p.spec.kept]
    ways = min(UNITS_IN_FLIGHT, len(others))
    weights = ways * _bytes(largest(p.weight_needs for p in _distinct(others))) + sum(
        _bytes(p.weight_needs) for p in root
    )
    # Each queue has room for what the largest of its transfers needs.
    wires: dict[tuple[str, str], int] = {}
    for kind in kinds:
        for dtype, numel in largest(plan.wire_needs(kind) for plan in _distinct(plans)).items():
            queue = (QUEUES[kind], dtype)
            wires[queue] = max(wires.get(queue, 0), numel)
    return {
        "weight slots": weights,
        "gradient slots": ways * _bytes(largest(p.gradient_needs for p in _distinct(others)))
        + sum(_bytes(p.gradient_needs) for p in root),
        "wire": sum(WAYS[queue] * numel * item_bytes(dtype) for (queue, dtype), numel in wires.items()),
    }


def _distinct(plans: Iterable[UnitPlan]) -> Iterable[UnitPlan]:
    """Each once: a planner has one object for all units that are alike."""
    return {id(plan): plan for plan in plans}.values()


def _bytes(needs: Needs) -> int:
    return sum(numel * item_bytes(dtype) for dtype, numel in needs.items())


def schedule(
    strategy: Strategy,
    units: tuple[UnitSpec, ...],
    micro_steps: int,
    precision: Precision | None = None,
    passes: Sequence[StagePass] = (),
    whole: Collection[WholeParameter] = (),
) -> Schedule:
    """The transfers of one optimizer step of `micro_steps` micro-steps, in steady state.

    `passes`: of a pipeline's stage, in their order. `whole`: the parameters that the optimizer steps whole.
    """
    if type(micro_steps) is not int or micro_steps < 1:
        raise StrategyError(f"schedule: micro_steps must be a whole number of at least 1, got {micro_steps!r}.")
    plans = tuple(plan_unit(strategy, unit, precision or Precision()) for unit in units)
    laid_out = tuple(_laid_out(strategy, plans, micro_steps, passes))
    if not whole:
        return Schedule(strategy, micro_steps, plans, laid_out)
    matrices = plan_matrices(strategy, plans, whole)
    # A step is counted from one delivery of gradients to the next: the optimizer's part comes first.
    return Schedule(strategy, micro_steps, plans, (*matrices.transfers(), *laid_out), matrices)


def _laid_out(
    strategy: Strategy, plans: tuple[UnitPlan, ...], micro_steps: int, passes: Sequence[StagePass]
) -> Iterator[Transfer]:
    """What the step machine submits, once it knows the order of the units."""
    root = [p for p in plans if p.spec.kept] or [UnitPlan(UnitSpec("", (), kept=True), ())]
    plans = (*root, *(p for p in plans if not p.spec.kept))
    facts = [plan.facts() for plan in plans]
    for micro_step, task in staged_tasks(facts, passes) if passes else steady_tasks(facts, micro_steps):
        for transfer in plans[task.unit].steady_transfers(task.kind):
            yield transfer.in_micro_step(micro_step)
    parameters = sum(len(b.spec.numels) for p in plans for b in p.buckets if b.spec.trainable)
    for transfer in usage_transfers(strategy, parameters):
        yield transfer.in_micro_step(micro_steps - 1)
