"""What moves of one unit: of each bucket the transfers of every kind, and what a rank keeps and needs for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from towpath.core.formats import ENCODED, Codec, Precision, item_bytes, wide
from towpath.core.placement import GroupCollective, Partition, everyone
from towpath.core.step_state import UnitFacts
from towpath.core.strategy import Kind, Strategy
from towpath.core.transfer import Needs, Range, Transfer
from towpath.core.units import BucketSpec, UnitSpec
from towpath.core.wire import Factored, Wire
from towpath.errors import StrategyError

# So small a gather takes longer to begin than to travel: those of one unit travel as one message (MiCS, section 4).
SMALL_GATHER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One flat buffer: its length, its cuts, its dtypes, and the transfers of each kind it takes part in.

    `factored`: how its gradients are synchronised in low rank, if they are. `rests_in`: the codec that its P shard
    rests in, if in any: whole weights are then decoded before each use, also where nothing has to be gathered.
    `optimizer_on_host`: the optimizer's slice and `.grad` lie in the host's memory: mean gradients are copied there,
    and what was written is copied back.
    """

    spec: BucketSpec
    numel: int
    own_dtype: str
    compute_dtype: str
    reduce_dtype: str
    accumulate_dtype: str
    params: Partition
    grads: Partition
    optimizer: Partition
    backward_copy: Partition | None
    transfers: dict[Kind, tuple[Transfer, ...]]
    factored: Factored | None = None
    rests_in: Codec | None = None
    optimizer_on_host: bool = False

    @property
    def always_whole(self) -> bool:
        """Whether every rank's shard is all of the weights, ready to compute with."""
        return self.params.count == 1 and self.rests_in is None

    @property
    def has_master(self) -> bool:
        """Whether the optimizer works on a copy of its own; else on a slice of the P shard itself. The copy stays for
        the whole run, also while a codec of what is published does not serve yet, or any more."""
        if self.rests_in is not None:
            return False
        encoded = any(isinstance(t.wire.codec, Codec) for t in self.transfers[Kind.PUBLISH])
        return encoded or self.optimizer_on_host or self.compute_dtype != self.own_dtype

    @property
    def publishes(self) -> bool:
        """Whether a write to the parameters has to travel, or to be cast, before the weights are whole again."""
        return self.has_master or bool(self.transfers[Kind.PUBLISH])

    @property
    def grad_is_view(self) -> bool:
        """Whether `.grad` can be a view of the G shard."""
        return self.accumulate_dtype == self.own_dtype and not self.optimizer_on_host

    @property
    def gradients_stay(self) -> bool:
        """Whether `.grad` can be what autograd makes: nothing of it travels, or is rounded or cut on the way."""
        travel = self.transfers[Kind.REDUCE] or self.transfers[Kind.SYNC]
        return not travel and self.optimizer.count == 1 and self.grad_is_view

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

    @property
    def shard_bytes(self) -> int:
        """Of one rank's P shard, as it rests."""
        elements = self.numel // self.params.count
        return self.rests_in.encoded_bytes(elements) if self.rests_in else elements * item_bytes(self.compute_dtype)

    def memory_bytes(self) -> dict[str, int]:
        """What one rank keeps between steps for this bucket on the device, by kind (the optimizer's own states are its
        affair)."""
        compute, summed, own = (item_bytes(d) for d in (self.compute_dtype, self.accumulate_dtype, self.own_dtype))
        master = 0 if self.optimizer_on_host else self.numel // self.optimizer.count * own
        frozen = {} if self.spec.trainable else {"frozen": self.shard_bytes}
        return frozen | {
            "params": self.shard_bytes if self.spec.trainable else 0,
            "master": master if self.has_master else 0,
            "backward_params": self.numel // self.backward_copy.count * compute if self.backward_copy else 0,
            "grads": self.numel // self.grads.count * summed if self.spec.trainable else 0,
            "grad": master if self.spec.trainable and not self.grad_is_view else 0,
            "feedback": self._feedback_bytes(),
        }

    def host_memory_bytes(self) -> dict[str, int]:
        """And in the host's memory. `outgoing`: what was written, in the dtype that computes, on its way back."""
        if not self.optimizer_on_host:
            return {}
        elements, own = self.numel // self.optimizer.count, item_bytes(self.own_dtype)
        outgoing = elements * item_bytes(self.compute_dtype)
        return {"master": elements * own, "grad": elements * own, "outgoing": outgoing}

    def host_copy_bytes(self, kind: Kind) -> int:
        """What a transfer of this kind copies between the device and the host: a sync to it, a publish from it."""
        held = self.host_memory_bytes()
        return held.get({Kind.SYNC: "grad", Kind.PUBLISH: "outgoing"}.get(kind, ""), 0)

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

    def steady_transfers(self, kind: Kind) -> Iterator[Transfer]:
        """Of a step like every other: what nobody writes is not published again."""
        for bucket in self.buckets:
            if kind is not Kind.PUBLISH or bucket.spec.trainable:
                yield from bucket.transfers[kind]

    def together(self, kind: Kind) -> tuple[int, ...]:
        """The buckets whose gathers travel as one message: none, or at least two. Of those that have the same members
        and route; frozen ones may have others than those that train."""
        if kind not in (Kind.GATHER, Kind.BACKWARD_GATHER):
            return ()
        alike: dict[tuple[GroupCollective, str], list[int]] = {}
        for index, bucket in enumerate(self.buckets):
            for t in bucket.transfers[kind]:
                if t.wire.encoding is None and t.region_bytes <= SMALL_GATHER_BYTES:
                    alike.setdefault((t.move, t.wire.route), []).append(index)
        most = max(alike.values(), key=len, default=[])
        return tuple(most) if len(most) > 1 else ()

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
            publishes=any(b.publishes for b in self.buckets),
            steps_on_host=any(b.optimizer_on_host for b in self.buckets),
            modules=modules,
        )

    @property
    def weight_needs(self) -> Needs:
        """What the unit's whole weights take up while they are gathered; nothing where they are always whole."""
        return _sum_by_dtype((b.compute_dtype, b.numel) for b in self.buckets if b.transfers[Kind.GATHER] or b.rests_in)

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
    """One whose transfers are made: `spec` is laid out for the codecs of `strategy`. `encoded`: it rests so."""

    strategy: Strategy
    unit: UnitSpec
    spec: BucketSpec
    numel: int
    encoded: bool = False

    def transfers(self, kind: Kind, moves: tuple[GroupCollective, ...], dtype: str, wire: Wire) -> tuple[Transfer, ...]:
        if not moves:  # a frozen bucket is not laid out for the codecs of gradients
            return ()
        codec = wire.encoding
        if codec is not None and dtype not in ENCODED:
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

    def _transfer(
        self, kind: Kind, move: GroupCollective, elements: int, dtype: str, wire: Wire, factored: int = 0
    ) -> Transfer:
        payload = Range(self.unit.name, self.spec.name, elements, dtype, factored, self.encoded)
        return Transfer(kind, payload, move, wire, self.strategy.topology)


def _plan_bucket(strategy: Strategy, unit: UnitSpec, spec: BucketSpec, precision: Precision) -> BucketPlan:
    rests_in = None if spec.trainable or strategy.frozen_codec == "none" else strategy.frozen_codec
    strategy = strategy.of(spec.trainable)
    moves, own = strategy.moves, spec.dtype
    precision = Precision() if spec.exact else precision
    compute, reduce, summed = precision.dtypes(own)
    if rests_in is not None:
        _check_resting(rests_in, unit, spec, compute)
    codecs = strategy.codecs(spec.trainable) if rests_in is None else [rests_in]
    spec = spec.in_blocks(codecs, moves.optimizer.count)
    bucket = _Bucket(strategy, unit, spec, spec.padded(moves.optimizer.count), rests_in is not None)
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
        None if rests_in is None else rests_in.within(spec.alignment),
        optimizer_on_host=strategy.optimizer_on_host and spec.trainable,
    )


def _check_resting(codec: Codec, unit: UnitSpec, spec: BucketSpec, compute: str) -> None:
    for dtype in (spec.dtype, compute):
        if dtype not in ENCODED:
            raise StrategyError(
                f"frozen_codec={codec}: the parameters of {unit.name or 'root'} [{spec.name}] are {dtype}, and codecs "
                f"take {', '.join(ENCODED)}. Load the model in one of these, or leave frozen_codec out."
            )
