"""The plan of one unit: for each of its buckets, the transfers of every kind and the memory that a rank needs.

`plan_unit` derives it from the strategy, the unit's description and the precision. The engine, the schedule, the
simulator and the planner all use the same plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

from towpath.core.buffers import Needs, coalesced_bytes, feedback_bytes, largest, wire_needs
from towpath.core.formats import ENCODED, Codec, Precision, item_bytes, message_cell, wide
from towpath.core.placement import GroupCollective, Partition, everyone
from towpath.core.routes import Form, Op
from towpath.core.strategy import Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Factored, Transport
from towpath.core.units import BucketSpec, Range, UnitSpec, round_up
from towpath.errors import ConfigError

# A transfer up to this size takes longer to start than to run. Those of one unit are sent as one (MiCS, section 4).
SMALL_BYTES = 1 << 20

# Elements. NCCL copies memory at multiples of 16 bytes fastest, and that of 128 bytes fills a line of the cache.
_WIRE_ALIGNMENT = 64

# Elements. Longer copies from the host are cut in pieces of this size: a link needs no larger ones to be fast.
STAGED_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The plan of one bucket: the length, slices and dtypes of its flat buffer, and its transfers of each kind.

    If `rests_in` is a codec, the P shard is stored encoded in it. The weights are then decoded before each use, even if
    nothing has to be gathered. With `optimizer_on_host`, the optimizer's slice and `.grad` are in host memory. Mean
    gradients are copied there, and what the optimizer wrote is copied back. With `params_on_host`, the P shard is in
    host memory. Each gather copies it to the device, and the parameter sync copies new values back.
    """

    spec: BucketSpec
    numel: int  # of the flat buffer, with padding
    own_dtype: str  # of the user's parameters and `.grad`
    compute_dtype: str  # of the unsharded weights
    reduce_dtype: str  # of the gradients that are reduced
    accumulate_dtype: str  # of the sum over micro-steps
    params: Partition  # the P shards
    grads: Partition  # the G shards
    optimizer: Partition  # the OS slices
    backward_copy: Partition | None  # the shards of the copy that backward gathers from, if any
    transfers: dict[TransferKind, tuple[Transfer, ...]]
    factored: Factored | None = None  # how the gradient sync compresses gradients to low rank, if it does
    rests_in: Codec | None = None
    optimizer_on_host: bool = False
    params_on_host: bool = False

    @property
    def always_whole(self) -> bool:
        """True if every rank's P shard has all weights, ready for compute."""
        return self.params.count == 1 and self.rests_in is None and not self.params_on_host

    @property
    def has_master(self) -> bool:
        """True if the optimizer works on a copy of its own. Otherwise it works on a slice of the P shard itself."""
        # The copy stays for the whole run, even in steps in which the codec of the parameter sync is not used.
        if self.rests_in is not None:
            return False
        encoded = any(isinstance(t.transport.codec, Codec) for t in self.transfers[TransferKind.PARAM_SYNC])
        return encoded or self.optimizer_on_host or self.params_on_host or self.compute_dtype != self.own_dtype

    @property
    def casts_master(self) -> bool:
        """True if each gather casts the master to this rank's place in the slot, so that no P shard is kept."""
        # The master is then all that this rank contributes. Weights that are always whole are the P shard itself.
        on_host = self.optimizer_on_host or self.params_on_host
        return self.has_master and not on_host and self.params.count == self.optimizer.count > 1

    def casts_for(self, kind: TransferKind) -> bool:
        """Return whether a gather of this kind casts the master. The backward copy is in the compute dtype."""
        return self.casts_master and (
            kind is TransferKind.GATHER or (kind is TransferKind.BACKWARD_GATHER and self.backward_copy is None)
        )

    @property
    def has_param_sync(self) -> bool:
        """True if written parameters must be sent to other ranks, or cast, before the weights are unsharded again."""
        return bool(self.transfers[TransferKind.PARAM_SYNC]) or (self.has_master and not self.casts_master)

    @property
    def grad_is_view(self) -> bool:
        """True if `.grad` can be a view of the G shard."""
        return self.accumulate_dtype == self.own_dtype and not self.optimizer_on_host

    @property
    def gradients_stay(self) -> bool:
        """True if `.grad` can be the tensor that autograd makes, because it is neither sent, rounded nor sharded."""
        travel = self.transfers[TransferKind.REDUCE] or self.transfers[TransferKind.GRAD_SYNC]
        return not travel and self.optimizer.count == 1 and self.grad_is_view

    @property
    def narrowed_in(self) -> tuple[int, int] | None:
        """Start and end of the sums in the wire buffer of their dtype, if a gradient sync sends them in a narrower one.

        The transfers themselves use the buffer up to the start.
        """
        transfers = self.transfers[TransferKind.GRAD_SYNC]
        if not transfers or self.factored or transfers[0].dtype == self.accumulate_dtype:
            return None
        used = max(wire_needs(t).get(t.dtype, 0) for t in transfers)
        start = round_up(used, _WIRE_ALIGNMENT)
        return start, start + transfers[0].elements

    def divisors(self, kind: TransferKind, world: int) -> tuple[int, float]:
        """Return what a gradient is divided by before and after a transfer, so that the last one leaves the mean."""
        # The sum is divided once, at the end. In float16 it is divided by about the square root of its terms before and
        # after each transfer, so that it neither overflows nor loses small values.
        # `kind`: `TransferKind.REDUCE`, or `TransferKind.GRAD_SYNC`, which follows it.
        # `world`: The number of terms of the mean, usually that of all ranks.
        if self.reduce_dtype == "float16":
            reduced = prod(transfer.move.members for transfer in self.transfers[TransferKind.REDUCE])
            terms = reduced if kind is TransferKind.REDUCE else world // reduced
            before = 1 << terms.bit_length() // 2
            return before, terms / before
        return 1, 1.0 if kind is TransferKind.REDUCE else float(world)

    @property
    def shard_bytes(self) -> int:
        """The bytes of one rank's P shard as it is stored, encoded if it has a codec. 0 if none is kept."""
        elements = 0 if self.casts_master else self.numel // self.params.count
        return self.rests_in.encoded_bytes(elements) if self.rests_in else elements * item_bytes(self.compute_dtype)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that one rank keeps between steps on its device for this bucket, by kind."""
        # The states of the optimizer are not included.
        compute, summed, own = map(item_bytes, (self.compute_dtype, self.accumulate_dtype, self.own_dtype))
        master = 0 if self.optimizer_on_host else self.numel // self.optimizer.count * own
        # A master that is cast at each gather is all that is kept of frozen weights.
        only_master = self.casts_master and not self.spec.trainable
        frozen = {} if self.spec.trainable else {"frozen": master if only_master else self.shard_bytes}
        sent = {"sent": self.kept_bytes} if self.kept_bytes else {}
        return (
            frozen
            | sent
            | {
                "params": self.shard_bytes if self.spec.trainable and not self.params_on_host else 0,
                "master": master if self.has_master and not only_master else 0,
                "backward_params": self.numel // self.backward_copy.count * compute if self.backward_copy else 0,
                "grads": self.numel // self.grads.count * summed if self.spec.trainable else 0,
                "grad": master if self.spec.trainable and not self.grad_is_view else 0,
                "feedback": self._feedback_bytes(),
            }
        )

    def host_memory_bytes(self) -> dict[str, int]:
        """Return the bytes that one rank keeps between steps in host memory for this bucket, by kind."""
        held = {"params": self.shard_bytes} if self.params_on_host else {}
        if self.optimizer_on_host:
            held |= dict.fromkeys(("master", "grad"), self.numel // self.optimizer.count * item_bytes(self.own_dtype))
        return held

    def host_copy_bytes(self, kind: TransferKind, is_apart: bool = True) -> int:
        """Return the bytes that one transfer of this kind copies between host and device, both directions together."""
        # A parameter sync of differences first copies old values to the device: those of this rank's slice to encode
        # it, if ranks then agree on sizes, and all to decode the slices of others. Without `is_apart`, the device works
        # on host memory itself, and P shards are not copied.
        held = self.host_memory_bytes()
        params = held.get("params", 0) if is_apart else 0
        own = params // (self.optimizer.count // self.params.count)
        old = 2 * own * self.agrees_on_sizes + params * self.syncs_differences
        copied = {
            TransferKind.GATHER: params,
            TransferKind.BACKWARD_GATHER: 0 if self.backward_copy else params,
            TransferKind.GRAD_SYNC: held.get("grad", 0),
            TransferKind.PARAM_SYNC: held.get("master", 0) + old + params,
        }
        return copied.get(kind, 0)

    @property
    def staged(self) -> int:
        """The elements in `own_dtype` that the device gets from the host at a time, to cast them. 0 without a cast."""
        if not self.optimizer_on_host or self.own_dtype == self.compute_dtype:
            return 0
        return min(self.numel // self.optimizer.count, STAGED_ELEMENTS)

    @property
    def cast_apart(self) -> int:
        """The elements of the wire buffer to which a parameter sync of differences casts the master."""
        # The P shard keeps the old values, which the differences are relative to. Otherwise the master is cast to the P
        # shard itself, and this is 0.
        return self.numel // self.optimizer.count if self.syncs_differences and self.has_master else 0

    @property
    def synced_in(self) -> tuple[int, int]:
        """Start and end of the P shard in the wire buffer of a parameter sync, if it is stored in host memory."""
        # The transfers, and the cast of the master, use the buffer up to the start. Without a copy, both are 0.
        if not self.params_on_host:
            return 0, 0
        used = (wire_needs(t).get(self.compute_dtype, 0) for t in self.transfers[TransferKind.PARAM_SYNC])
        start = round_up(max(self.cast_apart, *used, 0), _WIRE_ALIGNMENT)
        return start, start + self.numel // self.params.count

    @property
    def kept_bytes(self) -> int:
        """The bytes that parameter syncs keep of what they sent last, to send differences to it."""
        # It is a copy of the values if the optimizer overwrites them in the P shard. With agreed sizes, it is also the
        # encoded message, from its encoding until all ranks know its size.
        coded = [t for t in self.transfers[TransferKind.PARAM_SYNC] if t.coding is not None]
        own = self.numel // self.optimizer.count
        copy = own * item_bytes(self.own_dtype) if coded and not self.has_master else 0
        return copy + sum(message_cell(own, t.dtype) for t in coded if t.agrees_on_sizes)

    @property
    def syncs_differences(self) -> bool:
        """True if the parameter sync sends differences to the old values in the P shard."""
        return any(t.coding is not None for t in self.transfers[TransferKind.PARAM_SYNC])

    @property
    def agrees_on_sizes(self) -> bool:
        """True if ranks agree on the sizes of encoded messages before the parameter sync."""
        return any(t.agrees_on_sizes for t in self.transfers[TransferKind.PARAM_SYNC])

    def _feedback_bytes(self) -> int:
        """Return the bytes that codecs keep from one step to the next."""
        transfers = [t for ts in self.transfers.values() for t in ts]
        found = sum(map(feedback_bytes, transfers))
        if self.factored is not None:
            feedback = self.transfers[TransferKind.GRAD_SYNC][0].transport.feedback != "none"
            found += self.factored.kept_elements(feedback) * item_bytes(wide(self.accumulate_dtype))
        return found


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The plans of all buckets of one unit, and what follows from them for the unit.

    The step machine reads the other fields in every micro-step, so they are computed once.
    """

    spec: UnitSpec
    buckets: tuple[BucketPlan, ...]
    gathers: bool = field(init=False, compare=False)
    copies: bool = field(init=False, compare=False)
    trains: bool = field(init=False, compare=False)
    reduces: bool = field(init=False, compare=False)
    has_param_sync: bool = field(init=False, compare=False)
    steps_on_host: bool = field(init=False, compare=False)
    agrees_on_sizes: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (
            ("gathers", bool(self.weight_needs)),
            ("copies", any(b.backward_copy for b in self.buckets)),
            ("trains", any(b.spec.trainable for b in self.buckets)),
            ("reduces", bool(self.gradient_needs)),
            ("has_param_sync", any(b.has_param_sync for b in self.buckets)),
            ("steps_on_host", any(b.optimizer_on_host for b in self.buckets)),
            ("agrees_on_sizes", any(b.agrees_on_sizes for b in self.buckets)),
        ):
            object.__setattr__(self, name, value)

    def transfers(self, kind: TransferKind) -> Iterator[Transfer]:
        for bucket in self.buckets:
            yield from bucket.transfers[kind]

    def steady_transfers(self, kind: TransferKind) -> Iterator[Transfer]:
        """Yield the transfers of this kind in a steady step. Frozen buckets are not sent again."""
        for bucket in self.buckets:
            if kind is not TransferKind.PARAM_SYNC or bucket.spec.trainable:
                yield from bucket.transfers[kind]

    def together(self, kind: TransferKind) -> tuple[int, ...]:
        """Return the indices of the buckets whose gathers, or reductions, are sent as one: none, or at least two."""
        # They are small, and have the same ranks and route. Frozen buckets may have others than trainable ones.
        # Reductions are launched together where that needs no copy: collectives of the backend on the region itself.
        if kind not in (TransferKind.GATHER, TransferKind.BACKWARD_GATHER, TransferKind.REDUCE):
            return ()
        alike: dict[tuple[GroupCollective, str], list[int]] = {}
        for index, bucket in enumerate(self.buckets):
            for t in bucket.transfers[kind]:
                possible = kind is not TransferKind.REDUCE or _launches_with_others(t)
                if possible and t.transport.encoding is None and t.region_bytes <= SMALL_BYTES:
                    alike.setdefault((t.move, t.transport.route), []).append(index)
        most = max(alike.values(), key=len, default=[])
        return tuple(most) if len(most) > 1 else ()

    def wire_needs(self, kind: TransferKind) -> Needs:
        """Return the elements by dtype of the wire buffers that one rank needs for transfers of this kind."""
        packed = sum(coalesced_bytes(t) for i in self.together(kind) for t in self.buckets[i].transfers[kind])
        factors = [
            sum(t.region_bytes for t in b.transfers[kind])
            for b in self.buckets
            if b.factored and kind is TransferKind.GRAD_SYNC
        ]
        narrowed: list[Needs] = []
        for bucket in self.buckets if kind is TransferKind.GRAD_SYNC else ():
            if (span := bucket.narrowed_in) is not None:
                narrowed.append({bucket.transfers[kind][0].dtype: span[1]})
        for bucket in self.buckets if kind is TransferKind.PARAM_SYNC else ():
            end = max(bucket.cast_apart, bucket.synced_in[1])
            narrowed += [{bucket.own_dtype: bucket.staged}, {bucket.compute_dtype: end}]
        return largest([{"uint8": max([packed, *factors])}, *narrowed, *map(wire_needs, self.transfers(kind))])

    @property
    def arriving_bytes(self) -> int:
        """The bytes of the unit's gradients as autograd makes them. They are held until all of them are stored."""
        return sum(b.numel * item_bytes(b.compute_dtype) for b in self.buckets if b.spec.trainable)

    @property
    def weight_needs(self) -> Needs:
        """The elements by dtype of the unit's unsharded weights. Empty if every rank always holds all of them."""
        return _sum_by_dtype(
            (b.compute_dtype, b.numel)
            for b in self.buckets
            if b.transfers[TransferKind.GATHER] or b.rests_in or b.params_on_host
        )

    @property
    def gradient_needs(self) -> Needs:
        """The elements by dtype of a micro-step's gradients until the reduction. Empty if they are summed in place."""
        return _sum_by_dtype((b.reduce_dtype, b.numel) for b in self.buckets if b.transfers[TransferKind.REDUCE])


def _launches_with_others(transfer: Transfer) -> bool:
    """Return whether it is a reduce-scatter of the backend on the region itself. Several need no copy to run as one."""
    group = transfer.move.groups[0]
    direct = transfer.route == "flat" and group.in_order and transfer.elements % transfer.move.members == 0
    return direct and transfer.form is Form.COLLECTIVES and transfer.move.op is Op.REDUCE_SCATTER


def _sum_by_dtype(sizes: Iterable[tuple[str, int]]) -> Needs:
    needs: Needs = {}
    for dtype, numel in sizes:
        needs[dtype] = needs.get(dtype, 0) + numel
    return needs


def plan_unit(strategy: Strategy, unit: UnitSpec, precision: Precision, form: Form = Form.MESSAGES) -> UnitPlan:
    return UnitPlan(unit, tuple(_plan_bucket(strategy, unit, bucket, precision, form) for bucket in unit.buckets))


def _plan_bucket(strategy: Strategy, unit: UnitSpec, spec: BucketSpec, precision: Precision, form: Form) -> BucketPlan:
    rests_in = None if spec.trainable or strategy.frozen_codec == "none" else strategy.frozen_codec
    strategy = strategy.of(spec.trainable)
    moves, own = strategy.moves, spec.dtype
    precision = Precision() if spec.keeps_dtype else precision
    compute, reduce, summed = precision.dtypes(own)
    if rests_in is not None:
        _check_resting(rests_in, unit, spec, compute)
    codecs = strategy.codecs(spec.trainable) if rests_in is None else [rests_in]
    slices = strategy.finest if spec.trainable else moves.optimizer.count
    spec = spec.in_blocks(codecs, slices)
    numel = spec.padded(slices)
    # The root and its leaves stay unsharded from forward to backward, or need no weights there: a copy would go unused.
    copies = moves.backward_params.count < moves.params.count
    worth = copies and not unit.root and not unit.leaf
    # Without a copy, the backward gather repeats the gather of the forward pass, and must bring the same weights.
    backward_moves = moves.backward_gather if worth else moves.gather
    backward_transport = strategy.backward_gather if worth or not copies else strategy.gather
    low_rank = strategy.grad_sync.low_rank
    factored = Factored.of(low_rank, spec) if low_rank and moves.grad_sync and spec.trainable else None
    # A codec encodes the accumulated sum as it is. Without one, the sum is rounded once, to the reduce dtype.
    synced = summed if strategy.grad_sync.encoding is not None and summed in ENCODED else reduce
    # Frozen parameters are only sent after a write. Syncs of differences would keep memory for them all the time.
    param_sync = strategy.param_sync if spec.trainable else replace(strategy.param_sync, exact=False)
    wanted: dict[TransferKind, tuple[tuple[GroupCollective, ...], str, Transport]] = {
        TransferKind.GATHER: (moves.gather, compute, strategy.gather),
        TransferKind.BACKWARD_GATHER: (backward_moves, compute, backward_transport),
        TransferKind.REDUCE: (moves.reduce if spec.trainable else (), reduce, strategy.reduce),
        TransferKind.GRAD_SYNC: (moves.grad_sync if spec.trainable else (), synced, strategy.grad_sync),
        TransferKind.PARAM_SYNC: (moves.param_sync, compute, param_sync),
    }

    def transfer(
        kind: TransferKind, move: GroupCollective, elements: int, dtype: str, transport: Transport
    ) -> Transfer:
        replaced = factored.elements if factored is not None and kind is TransferKind.GRAD_SYNC else 0
        payload = Range(unit.name, spec.name, elements, dtype, replaced, rests_in is not None)
        return Transfer(kind, payload, move, transport, strategy.topology, form=form)

    transfers: dict[TransferKind, tuple[Transfer, ...]] = {}
    for kind, (of_kind, dtype, transport) in wanted.items():
        if of_kind and transport.encoding is not None and dtype not in ENCODED:
            raise ConfigError(
                f"{strategy.name}: {kind.value} in {transport.encoding} of {unit.name or 'root'} [{spec.name}]: its "
                f"elements are {dtype}, and codecs take {', '.join(ENCODED)}. Pass precision=, or a strategy without "
                "codecs."
            )
        # A frozen bucket is not laid out for the codecs of gradients.
        transport = transport.in_form(form).within(spec.alignment) if of_kind else transport
        transfers[kind] = tuple(transfer(kind, m, numel // m.regions, dtype, transport) for m in of_kind)
    if factored is not None:  # two all-reduces over all ranks compute the mean gradient in low rank
        transfers[TransferKind.GRAD_SYNC] = tuple(
            transfer(TransferKind.GRAD_SYNC, move, elements, reduce, strategy.grad_sync.in_form(form))
            for elements in factored.messages
            for move in everyone(strategy.topology)
        )
    return BucketPlan(
        spec,
        numel,
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
        params_on_host=strategy.params_on_host and spec.trainable,
    )


def _check_resting(codec: Codec, unit: UnitSpec, spec: BucketSpec, compute: str) -> None:
    for dtype in (spec.dtype, compute):
        if dtype not in ENCODED:
            raise ConfigError(
                f"frozen_codec={codec}: the parameters of {unit.name or 'root'} [{spec.name}] are {dtype}, and codecs "
                f"take {', '.join(ENCODED)}. Load the model in one of these, or leave frozen_codec out."
            )
