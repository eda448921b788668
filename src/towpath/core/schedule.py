"""One optimizer step as a list of transfers: what moves, when, over which ranks, how, and how many bytes.

The step machine (`step.py`) says when they go; a schedule is the machine run over one steady step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from towpath.core.formats import ENCODED, item_bytes, wide
from towpath.core.journal import journal_bytes
from towpath.core.low_rank import Factored
from towpath.core.payload import Range
from towpath.core.pipeline import StagePass
from towpath.core.precision import Precision
from towpath.core.queues import QUEUES, WAYS
from towpath.core.steady_step import staged_tasks, steady_tasks
from towpath.core.step import UNITS_IN_FLIGHT
from towpath.core.step_state import UnitFacts
from towpath.core.strategy import WIRED, Kind, Strategy
from towpath.core.transfer import Needs, SentBytes, Transfer
from towpath.core.transitions import Cut, Move, everyone
from towpath.core.units import BucketSpec, UnitSpec
from towpath.core.whole_matrices import MatrixPlan, WholeParameter, plan_matrices
from towpath.core.wire import Wire
from towpath.errors import StrategyError

# So small a gather takes longer to begin than to travel: those of one unit travel as one message (MiCS, section 4).
SMALL_GATHER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One flat buffer: its length, its cuts, its dtypes, and the transfers of each kind it takes part in.

    `factored`: how its gradients are synchronised in low rank, if they are.
    """

    spec: BucketSpec
    numel: int
    own_dtype: str
    compute_dtype: str
    reduce_dtype: str
    accumulate_dtype: str
    params: Cut
    grads: Cut
    optimizer: Cut
    backward_copy: Cut | None
    transfers: dict[Kind, tuple[Transfer, ...]]
    factored: Factored | None = None

    @property
    def has_master(self) -> bool:
        """Whether the optimizer works on a copy of its own; else on a slice of the P shard itself."""
        encoded = any(t.wire.encoding for t in self.transfers[Kind.PUBLISH])
        return encoded or self.compute_dtype != self.own_dtype

    @property
    def grad_is_view(self) -> bool:
        """Whether `.grad` can be a view of the G shard."""
        return self.accumulate_dtype == self.own_dtype

    def divisors(self, kind: Kind, world: int) -> tuple[int, float]:
        """By what a sum is divided before and after `kind` (reduce, and then sync), so that it ends as the mean.

        Once, at the end; but a sum in float16 by about the root of its terms each time, so that it neither overflows
        on its way nor loses what is small before.
        """
        terms = self.grads.count if kind is Kind.REDUCE else world // self.grads.count
        if self.reduce_dtype == "float16":
            before = 1 << terms.bit_length() // 2
            return before, terms / before
        return 1, 1.0 if kind is Kind.REDUCE else float(world)

    def memory_bytes(self) -> dict[str, int]:
        """What one rank keeps between steps for this bucket, by kind (the optimizer's own states are its affair)."""
        compute, summed, own = (item_bytes(d) for d in (self.compute_dtype, self.accumulate_dtype, self.own_dtype))
        master = self.numel // self.optimizer.count * own
        return {
            "params": self.numel // self.params.count * compute,
            "master": master if self.has_master else 0,
            "backward_params": self.numel // self.backward_copy.count * compute if self.backward_copy else 0,
            "grads": self.numel // self.grads.count * summed if self.spec.trainable else 0,
            "grad": master if self.spec.trainable and not self.grad_is_view else 0,
            "feedback": self._feedback_bytes(),
        }

    def _feedback_bytes(self) -> int:
        """What codecs keep from one step to the next."""
        found = sum(4 * n for ts in self.transfers.values() for t in ts for n in t.kept_elements)
        if self.factored is not None:
            feedback = self.transfers[Kind.SYNC][0].wire.feedback != "none"
            found += self.factored.kept_elements(feedback) * item_bytes(wide(self.accumulate_dtype))
        return found


@dataclass(frozen=True, slots=True)
class UnitPlan:
    spec: UnitSpec
    buckets: tuple[BucketPlan, ...]

    def transfers(self, kind: Kind) -> Iterator[Transfer]:
        for bucket in self.buckets:
            yield from bucket.transfers[kind]

    def together(self, kind: Kind) -> tuple[int, ...]:
        """The buckets whose gathers travel as one message: none, or at least two."""
        if kind not in (Kind.GATHER, Kind.BACKWARD_GATHER):
            return ()
        small = [
            index
            for index, bucket in enumerate(self.buckets)
            for t in bucket.transfers[kind]
            if t.wire.encoding is None and t.region_bytes <= SMALL_GATHER_BYTES
        ]
        return tuple(small) if len(small) > 1 else ()

    def wire_needs(self, kind: Kind) -> Needs:
        """What one rank needs to send and receive in, beside the regions."""
        packed = sum(t.region_bytes for i in self.together(kind) for t in self.buckets[i].transfers[kind])
        factors = [
            sum(t.region_bytes for t in b.transfers[kind]) for b in self.buckets if b.factored and kind is Kind.SYNC
        ]
        return largest([{"uint8": max([packed, *factors])}, *(t.wire_needs for t in self.transfers(kind))])

    def facts(self, modules: int = 1) -> UnitFacts:
        """What the step machine has to know; `modules`: how many have their forwards in this unit."""
        trainable = [b for b in self.buckets if b.spec.trainable]
        return UnitFacts(
            self.spec.name,
            root=self.spec.kept,
            gathers=bool(self.weight_needs),
            copies=any(b.backward_copy for b in self.buckets),
            trains=bool(trainable),
            reduces=bool(self.gradient_needs),
            publishes=any(b.has_master or b.transfers[Kind.PUBLISH] for b in self.buckets),
            modules=modules,
        )

    @property
    def weight_needs(self) -> Needs:
        """What the unit's whole weights take up while they are gathered; nothing where they are always whole."""
        return _sum_by_dtype((b.compute_dtype, b.numel) for b in self.buckets if b.transfers[Kind.GATHER])

    @property
    def gradient_needs(self) -> Needs:
        """What a micro-step's gradients take up until they are reduced; nothing where they are summed in place."""
        return _sum_by_dtype((b.reduce_dtype, b.numel) for b in self.buckets if b.transfers[Kind.REDUCE])


def _sum_by_dtype(sizes: Iterable[tuple[str, int]]) -> Needs:
    needs: Needs = {}
    for dtype, numel in sizes:
        needs[dtype] = needs.get(dtype, 0) + numel
    return needs


def largest(needs: Iterable[Needs]) -> Needs:
    """What is enough for each of them, one at a time."""
    enough: Needs = {}
    for need in needs:
        for dtype, numel in need.items():
            enough[dtype] = max(numel, enough.get(dtype, 0))
    return enough


def plan_unit(strategy: Strategy, unit: UnitSpec, precision: Precision) -> UnitPlan:
    return UnitPlan(unit, tuple(_plan_bucket(strategy, unit, bucket, precision) for bucket in unit.buckets))


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One whose transfers are made: `spec` is laid out for the codecs of `strategy`."""

    strategy: Strategy
    unit: UnitSpec
    spec: BucketSpec
    numel: int

    def transfers(self, kind: Kind, moves: tuple[Move, ...], dtype: str, wire: Wire) -> tuple[Transfer, ...]:
        codec = wire.encoding
        if codec is not None and moves and dtype not in ENCODED:
            raise StrategyError(
                f"{self.strategy.name}: {kind.value} in {codec} of {self.unit.name or 'root'} [{self.spec.name}]: its "
                f"elements are {dtype}, and codecs take {', '.join(ENCODED)}. Pass precision=, or a strategy without "
                "codecs."
            )
        wire = wire.within(self.spec.alignment)
        return tuple(self._transfer(kind, m, self.numel // m.regions, dtype, wire) for m in moves)

    def factors(self, factored: Factored, dtype: str, wire: Wire) -> tuple[Transfer, ...]:
        """The two sums over all ranks that bring the mean of gradients in low rank."""
        return tuple(
            self._transfer(Kind.SYNC, move, elements, dtype, wire, factored.elements)
            for elements in factored.messages
            for move in everyone(self.strategy.topology)
        )

    def _transfer(self, kind: Kind, move: Move, elements: int, dtype: str, wire: Wire, factored: int = 0) -> Transfer:
        payload = Range(self.unit.name, self.spec.name, elements, dtype, factored)
        return Transfer(kind, payload, move, wire, self.strategy.topology)


def _plan_bucket(strategy: Strategy, unit: UnitSpec, spec: BucketSpec, precision: Precision) -> BucketPlan:
    moves, own = strategy.moves, spec.dtype
    precision = Precision() if spec.exact else precision
    compute, reduce, summed = precision.dtypes(own)
    spec = spec.in_blocks(strategy.codecs(spec.trainable), moves.optimizer.count)
    bucket = _Bucket(strategy, unit, spec, spec.padded(moves.optimizer.count))
    # A kept unit is never gathered for its backward pass: it needs no copy to gather from.
    copies = moves.backward_params.count < moves.params.count
    worth = copies and not unit.kept
    # Without a copy it is the forward pass's gather again, and must bring the same weights.
    backward_moves = moves.backward_gather if worth else moves.gather
    backward_wire = strategy.backward_gather if worth or not copies else strategy.gather
    low_rank = strategy.sync.low_rank
    factored = Factored.of(low_rank, spec) if low_rank and moves.sync and spec.trainable else None
    # A codec takes the sum as it is; else it is rounded to what travels, once.
    synced = summed if strategy.sync.encoding is not None and summed in ENCODED else reduce
    transfers = {
        Kind.GATHER: bucket.transfers(Kind.GATHER, moves.gather, compute, strategy.gather),
        Kind.BACKWARD_GATHER: bucket.transfers(Kind.BACKWARD_GATHER, backward_moves, compute, backward_wire),
        Kind.REDUCE: bucket.transfers(Kind.REDUCE, moves.reduce if spec.trainable else (), reduce, strategy.reduce),
        Kind.SYNC: bucket.transfers(Kind.SYNC, moves.sync if spec.trainable else (), synced, strategy.sync),
        Kind.PUBLISH: bucket.transfers(Kind.PUBLISH, moves.publish, compute, strategy.publish),
    }
    if factored is not None:
        transfers[Kind.SYNC] = bucket.factors(factored, reduce, strategy.sync)
    return BucketPlan(
        spec,
        bucket.numel,
        own,
        compute,
        reduce,
        summed,
        moves.params,
        moves.grads,
        moves.optimizer,
        moves.backward_params if worth else None,
        transfers,
        factored,
    )


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
        """What one rank keeps between steps, by kind, before the optimizer's own states."""
        return memory_bytes(self.plans)

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


def buffer_bytes(plans: Sequence[UnitPlan], kinds: Collection[Kind] = WIRED) -> dict[str, int]:
    root = [p for p in plans if p.spec.kept]
    others = [p for p in plans if not p.spec.kept]
    ways = min(UNITS_IN_FLIGHT, len(others))
    weights = ways * _bytes(largest(p.weight_needs for p in others)) + sum(_bytes(p.weight_needs) for p in root)
    # Each queue has room for what the largest of its transfers needs.
    wires: dict[tuple[str, str], int] = {}
    for kind in kinds:
        for dtype, numel in largest(plan.wire_needs(kind) for plan in plans).items():
            queue = (QUEUES[kind], dtype)
            wires[queue] = max(wires.get(queue, 0), numel)
    return {
        "weight slots": weights,
        "gradient slots": ways * _bytes(largest(p.gradient_needs for p in others))
        + sum(_bytes(p.gradient_needs) for p in root),
        "wire": sum(WAYS[queue] * numel * item_bytes(dtype) for (queue, dtype), numel in wires.items()),
    }


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
        for bucket in plans[task.unit].buckets:
            if task.kind is not Kind.PUBLISH or bucket.spec.trainable:  # what nobody writes is never published again
                for transfer in bucket.transfers[task.kind]:
                    yield transfer.in_micro_step(micro_step)
    parameters = sum(len(b.spec.numels) for p in plans for b in p.buckets if b.spec.trainable)
    for transfer in usage_transfers(strategy, parameters):
        yield transfer.in_micro_step(micro_steps - 1)
