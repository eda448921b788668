"""A strategy: a topology, a placement on it, and a transport for each kind of transfer.

A strategy is immutable data. The unit plan, the step machine and the schedule are derived from it. This file also
writes and reads strategies as TOML.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal, get_args

from towpath.core.formats import Codec
from towpath.core.placement import LABELS, Placement, PlacementCollectives, check_extent, transitions
from towpath.core.routes import WITH_COLUMNS
from towpath.core.shares import AUTO, Shares, shares_of
from towpath.core.transport import Transport
from towpath.errors import ConfigError
from towpath.outer.settings import Outer
from towpath.topology.cluster import Extent, Topology, counted


def written(value: str | bool | int | float | Sequence[Any]) -> str:
    """Return a scalar, or an array of scalars, in TOML syntax. Raise ValueError for text that is not Unicode."""
    if isinstance(value, float):
        return repr(value)  # unlike JSON, TOML has `inf` and `nan`
    text = json.dumps(value, ensure_ascii=False)
    text.encode()
    return text.replace("\x7f", "\\u007f")  # JSON leaves DEL as it is


class TransferKind(StrEnum):
    """The purpose of a transfer. Strategies choose a transport for each of the first five kinds."""

    # All-gathers a unit's weights before its forward pass.
    GATHER = "gather"
    # All-gathers a unit's weights before its backward pass, from the P shards or from the backward copy.
    BACKWARD_GATHER = "backward_gather"
    # Reduce-scatters a unit's gradients into the G shards, in every micro-step.
    REDUCE = "reduce"
    # Turns the G shards into the mean over all ranks, in the last micro-step.
    GRAD_SYNC = "grad_sync"
    # Sends what the optimizer wrote to every P shard, before the next forward pass.
    PARAM_SYNC = "param_sync"
    # Compares at the boundary which parameters were used, and what each rank has submitted.
    UNUSED_PARAMS = "unused_params"
    # Agrees on the sizes of messages, where an exact parameter sync needs them before it sends.
    MESSAGE_SIZES = "message_sizes"
    # Sends gradients of matrices to the ranks that own the matrices.
    MATRIX_GRADIENTS = "matrix_gradients"
    # Sends weights of matrices to the ranks that own them.
    MATRIX_WEIGHTS = "matrix_weights"
    # Sends what the owners computed back to the ranks that hold the pieces.
    MATRIX_UPDATES = "matrix_updates"
    # Averages over all islands how far the weights of a fragment have moved since the last time.
    OUTER = "outer"
    # Compares the slow weights of a fragment over all islands.
    SLOW_WEIGHTS = "slow_weights"
    # Sends the result of an outer step to the ranks of an island that hold the same optimizer slice.
    OUTER_GATHER = "outer_gather"
    # Sends the output of a pipeline stage to the next stage.
    ACTIVATION = "activation"
    # Sends the gradient of that output back.
    ACTIVATION_GRADIENT = "activation_gradient"


# The kinds that a strategy chooses a transport for. Each is a field of `Strategy` and of `PlacementCollectives`.
WITH_TRANSPORT = (
    TransferKind.GATHER,
    TransferKind.BACKWARD_GATHER,
    TransferKind.REDUCE,
    TransferKind.GRAD_SYNC,
    TransferKind.PARAM_SYNC,
)
# The kinds that move values in the host's memory, over gloo on every backend. The host waits for them.
BETWEEN_HOSTS = (TransferKind.UNUSED_PARAMS, TransferKind.MESSAGE_SIZES)
# The kinds of outer steps.
OUTER_KINDS = (TransferKind.OUTER, TransferKind.SLOW_WEIGHTS, TransferKind.OUTER_GATHER)
# The kinds whose result is the maximum over all ranks.
BY_MAXIMUM = (*BETWEEN_HOSTS, TransferKind.SLOW_WEIGHTS)
WEIGHTS = (TransferKind.GATHER, TransferKind.BACKWARD_GATHER, TransferKind.PARAM_SYNC)
GRADIENTS = (TransferKind.REDUCE, TransferKind.GRAD_SYNC)
# The kinds that can be sent exactly. Receivers of a gather hold no earlier values.
EXACT_KINDS = (*GRADIENTS, TransferKind.PARAM_SYNC)

# This value of `Strategy.frozen` gives frozen parameters the placement and the transports of trainable ones.
AS_TRAINED = "as-trained"
# These values of `Strategy.offload` say what is kept in host memory instead of device memory.
Offload = Literal["optimizer", "params", "optimizer+params"]
OFFLOADS: tuple[Offload, ...] = get_args(Offload)


def offloads(offload: Offload | None, part: Literal["optimizer", "params"]) -> bool:
    """Return whether `offload` keeps a part in host memory: what the optimizer works on, or the P shards."""
    return offload is not None and part in offload.split("+")


@dataclass(frozen=True, slots=True)
class Protect:
    """How often nodes keep a snapshot of the training in memory.

    Training then survives a lost node, without a shared folder. It is part of a strategy:
    `towpath.strategy(…, protect=Protect(every=10))`. Each node also keeps a copy of what only its *buddy*, another
    node, holds. `towpath plan` shows the bytes, the memory and the seconds to heal.

    Attributes:
        every: After a loss, at most so many optimizer steps are computed again. More steps send fewer bytes. Snapshots
            are a little closer to each other, because each takes some steps to be sent.
    """

    every: int = 10

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ConfigError(f"Protect: every is a whole number of at least 1; got {self.every!r}.")

    def __str__(self) -> str:
        return f"a snapshot every {counted(self.interval, 'step')}"

    @property
    def delay(self) -> int:
        """The number of steps after which a snapshot must be complete. Training waits for it then."""
        # Links that are busy for 60 % of a step need three steps to send a snapshot (benchmarks/LOG.md).
        return min(self.every - 1, max(1, 3 * self.every // 10))

    @property
    def interval(self) -> int:
        """The number of steps from one snapshot to the next. A loss just before one is complete costs `every` steps."""
        return self.every - self.delay


@dataclass(frozen=True, slots=True)
class Strategy:
    """The full description of how a model is sharded and how its transfers are sent.

    `towpath.strategy(name, topology)` makes one from a preset. You can also construct one directly.

    Attributes:
        topology: The nodes and ranks of the job. With outer steps, those of one island.
        placement: The extents of parameters, gradients and optimizer states.
        name: The preset's name, or a name of your own.
        gather: The transport of all-gathers before forward passes.
        backward_gather: The transport of all-gathers before backward passes.
        reduce: The transport of the reduce-scatters of gradients.
        grad_sync: The transport that averages G shards over replicas in the last micro-step.
        param_sync: The transport that sends updated parameters to the P shards.
        frozen: The extent of frozen parameters: an `Extent`, or 'as-trained' for that of trainable ones. With None,
            `shard()` decides. If P spans nodes, it then keeps one copy in each node where the node's memory allows it.
        frozen_codec: A `Codec` or its text ('int8', 'int4:64') in which frozen parameters are stored and sent. 'none'
            keeps them unencoded.
        offload: 'optimizer' keeps the optimizer's slice of the parameters, `.grad` and the optimizer states in host
            memory. The optimizer then steps on the CPU. 'params' keeps the P shards of trainable parameters in host
            memory, and copies them to the device for each gather. 'optimizer+params' does both.
        outer: When and how islands synchronize. By default, the job is one island, and every step is synchronous.
        protect: How often nodes keep snapshots of the training in memory. By default, they keep none.
        shares: The relative speeds of the job's data-parallel ranks, such as (2, 2, 1, 1), or 'auto' to measure them.
            Each rank then takes rows in proportion, and `towpath.weigh` weighs its loss. By default, batches are equal.
    """

    topology: Topology
    placement: Placement
    name: str = "custom"
    gather: Transport = Transport()
    backward_gather: Transport = Transport()
    reduce: Transport = Transport()
    grad_sync: Transport = Transport()
    param_sync: Transport = Transport()
    frozen: Extent | str | None = None
    frozen_codec: Any = "none"
    offload: Offload | None = None
    outer: Outer | None = None
    protect: Protect | None = None
    shares: Shares | None = None

    def __post_init__(self) -> None:
        self.placement.check(self.topology)
        object.__setattr__(self, "shares", shares_of(self.shares))
        if self.outer is not None and self.outer.islands is None:
            raise ConfigError(
                f"{self.name}: outer.islands: expected the number of islands, as `topology` is that of one island. "
                "towpath.strategy(name, topology, outer=…) takes the topology of the job, and sets both."
            )
        self._check_frozen()
        if self.protect is not None:
            if not isinstance(self.protect, Protect):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"{self.name}: protect is a towpath.Protect, or None; got {self.protect!r}.")
            if self.job.nodes == 1:
                raise ConfigError(
                    f"{self.name}: protect on {self.job.words}: expected several nodes, as the copies of a lost node "
                    "are on another one. Start more nodes, or leave out protect."
                )
            self.job.check_equal(f"{self.name}: protect")
        if self.offload is not None and self.offload not in OFFLOADS:
            raise ConfigError(
                f"{self.name}: offload={self.offload!r}: expected {', '.join(map(repr, OFFLOADS))}, or None."
            )
        for kind in WITH_TRANSPORT:
            transport = self.transport(kind)
            if not isinstance(transport, Transport):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"{self.name}: {kind.value} is a Transport, such as Transport('two-hop', 'int8'); got "
                    f"{transport!r}."
                )
            if transport.exact and kind not in EXACT_KINDS:
                raise ConfigError(
                    f"{self.name}: {kind.value} cannot be exact: its receivers hold no earlier values to compare with. "
                    "Leave exact= out of it."
                )
            if (
                kind in (TransferKind.GATHER, TransferKind.BACKWARD_GATHER)
                and transport.encoding is not None
                and transport.encoding.stochastic
            ):
                raise ConfigError(
                    f"{self.name}: {kind.value} in {transport.codec} would round anew at each gather, and the "
                    "backward pass compute with other weights than the forward pass. Take a codec without +stochastic "
                    "for weights."
                )
            if transport.route in WITH_COLUMNS and getattr(self.moves, kind.value):
                self.topology.check_equal(f"{self.name}: {kind.value} by the route {transport.route!r}")
            if kind is TransferKind.GRAD_SYNC and transport.low_rank is not None and self.placement.grads.size == 1:
                continue  # gradients are unsharded here, as low rank requires
            for move in getattr(self.moves, kind.value):
                transport.check(move.op, f"{self.name}: {kind.value}")

    def _check_frozen(self) -> None:
        if self.frozen is not None and self.frozen != AS_TRAINED:
            if not isinstance(self.frozen, Extent):
                raise ConfigError(
                    f"{self.name}: frozen is an Extent, {AS_TRAINED!r}, or None for what memory allows; got "
                    f"{self.frozen!r}."
                )
            check_extent(self.frozen, self.topology, "frozen")
        if isinstance(self.frozen_codec, str) and self.frozen_codec != "none":
            object.__setattr__(self, "frozen_codec", Codec.parse(self.frozen_codec))
        if (codec := self.frozen_codec) == "none":
            return
        if not isinstance(codec, Codec) or codec.grain == 1 or codec.stochastic:
            raise ConfigError(
                f"{self.name}: frozen parameters are stored in a codec of blocks, rounded the same way on every rank "
                f"('int8', 'int4:64', 'e4m3'), or 'none'; got {codec!s}."
            )

    @property
    def islands(self) -> int:
        """The number of islands. Without outer steps, the job is one."""
        return 1 if self.outer is None or self.outer.islands is None else self.outer.islands

    @property
    def job(self) -> Topology:
        """The nodes and ranks of the whole job, over all islands."""
        if self.outer is None:
            return self.topology
        nodes = self.islands * self.topology.nodes
        return Topology(nodes, self.topology.ranks_per_node, self.outer.nodes_per_rack)

    @property
    def finest(self) -> int:
        """The number of slices of the finest partition of trainable parameters. Each slice has equally many elements.

        With outer steps, each rank of an island exchanges a slice of its own.
        """
        return self.placement.optimizer.size if self.outer is None else self.topology.world

    @property
    def moves(self) -> PlacementCollectives:
        """The collectives of the placement, for each kind of transfer."""
        return transitions(self.placement, self.topology)

    def of(self, trainable: bool) -> Strategy:
        """Return the strategy of trainable parameters, or of frozen ones if these differ.

        For frozen parameters, P, G and OS have the same extent, and there is no backward copy. Gradients and updates
        are never sent, so their transports are plain.
        """
        return self if trainable or self.frozen_extent is None else _of_frozen(self)

    @property
    def frozen_extent(self) -> Extent | None:
        """The extent of frozen parameters, or None if they follow the trainable ones."""
        if isinstance(self.frozen, Extent):
            return self.frozen
        # Encoded frozen parameters are cut for P only, and G and OS get the same cut.
        return None if self.frozen_codec == "none" else self.placement.params

    @property
    def gathered_over(self) -> Extent:
        """The smallest extent that contains all ranks that gather a unit's trainable and frozen weights together."""
        params, frozen = self.placement.params, self.frozen_extent or self.placement.params
        return Extent(math.lcm(params.local, frozen.local), math.lcm(params.nodes, frozen.nodes))

    def transport(self, kind: TransferKind) -> Transport:
        """Return the transport of transfers of `kind`. Kinds that have no choice get a plain transport."""
        return getattr(self, kind.value) if kind in WITH_TRANSPORT else Transport()

    def codecs(self, trainable: bool) -> list[Codec]:
        """Return the codecs whose blocks the parameters must be aligned to.

        These encode parameters and, if `trainable` is set, gradients. A codec that serves only some of the steps is
        always included, because the layout does not change between steps.
        """
        kinds = [kind for kind in WITH_TRANSPORT if getattr(self.moves, kind.value) and (trainable or kind in WEIGHTS)]
        transports = [self.transport(kind) for kind in kinds]
        if self.outer is not None and trainable:
            transports.append(self.outer.transport)
        return [transport.codec for transport in transports if isinstance(transport.codec, Codec)]

    @property
    def optimizer_on_host(self) -> bool:
        """True if the optimizer steps in host memory."""
        return offloads(self.offload, "optimizer")

    @property
    def params_on_host(self) -> bool:
        """True if the P shards of trainable parameters are in host memory."""
        return offloads(self.offload, "params")

    def with_exact_transports(self, exact: bool = True) -> Strategy:
        """Return the strategy with exact transports for gradients and the parameter sync, or without."""
        if not isinstance(exact, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"{self.name}: exact is True or False; got {exact!r}.")
        return replace(self, **{kind.value: replace(self.transport(kind), exact=exact) for kind in EXACT_KINDS})

    @property
    def is_exact(self) -> bool:
        """True if transports of transfers that the placement has are exact."""
        return any(self.transport(kind).exact for kind in EXACT_KINDS if getattr(self.moves, kind.value))

    @property
    def changes(self) -> list[int]:
        """The optimizer steps at which a transport changes, in ascending order."""
        return sorted({step for kind in WITH_TRANSPORT for step in self.transport(kind).changes})

    def at(self, step: int) -> Strategy:
        """Return the strategy of optimizer step `step`, counted from 0.

        It differs between steps if a codec serves only from or until some step.

        Args:
            step: The optimizer step, counted from 0.
        """
        transports = {kind.value: self.transport(kind).at(step) for kind in WITH_TRANSPORT}
        return replace(self, **transports)

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.topology.words}"]
        lines += [f"  {LABELS[name]:<16} {extent!s:>7}" for name, extent in self.placement.extents()]
        if self.frozen is not None or self.frozen_codec != "none" or self.placement.params.nodes > 1:
            resting = "" if self.frozen_codec == "none" else f", stored in {self.frozen_codec}"
            lines.append(f"  {'frozen':<16} {self._frozen_words()}{resting}")
        for kind in WITH_TRANSPORT:
            moves = getattr(self.moves, kind.value)
            what = ", then ".join(f"{m.op.value} over {m.members} ranks" for m in moves) or "nothing moves"
            route = f" ({self.transport(kind)})" if moves else ""
            lines.append(f"  {kind.value:<16} {what}{route}")
        if self.offload is not None:
            lines.append(f"  {'offload':<16} {self.offload}: in the host's memory")
        if self.outer is not None:
            lines.append(f"  {'outer':<16} {counted(self.islands, 'island')} of this size, {self.outer}")
        if self.protect is not None:
            lines.append(f"  {'protect':<16} {self.protect}, in the nodes' memory")
        if self.shares is not None:
            words = "measured" if self.shares == AUTO else ", ".join(f"{share:g}" for share in self.shares)
            lines.append(f"  {'shares':<16} {words}: rows of each rank, by its speed")
        return "\n".join(lines)

    def _frozen_words(self) -> str:
        if isinstance(self.frozen, Extent):
            return f"{self.frozen!s:>7}"
        if self.frozen is None and self.placement.params.nodes > 1:
            return "in each node, where memory allows: shard() decides"
        return "as what trains" if self.frozen_codec == "none" else f"{self.placement.params!s:>7}"

    def to_toml(self) -> str:
        """Return the strategy as TOML text, which `from_toml` reads. Raise ConfigError if the name is not Unicode."""
        frozen, codec = self.frozen, self.frozen_codec
        top = {
            "name": self.name,
            "frozen": [frozen.local, frozen.nodes] if isinstance(frozen, Extent) else frozen,
            "frozen_codec": None if codec == "none" else str(codec),
            "offload": self.offload,
            "shares": self.shares,
        }
        tables = {
            "topology": asdict(self.topology),
            "placement": {name: [extent.local, extent.nodes] for name, extent in self.placement.extents()},
            **{kind.value: _transport_table(self.transport(kind)) for kind in WITH_TRANSPORT},
        }
        if self.outer is not None:
            tables |= {"outer": self.outer.to_table(), "outer.transport": _transport_table(self.outer.transport)}
        if self.protect is not None:
            tables["protect"] = asdict(self.protect)
        try:
            lines = _toml_lines(top)
        except ValueError as error:
            raise ConfigError(f"the name {self.name!r} cannot be written: {error}. Expected Unicode text.") from None
        for name, table in tables.items():
            lines += [f"[{name}]", *_toml_lines(table)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_toml(text: str) -> Strategy:
        """Return the strategy that `to_toml` wrote.

        Args:
            text: TOML text.

        Raises:
            ConfigError: The text is not a strategy.
        """
        try:
            table = tomllib.loads(text)
            transports = {
                kind.value: Transport(**table.pop(kind.value)) for kind in WITH_TRANSPORT if kind.value in table
            }
            placement = Placement(**{k: Extent(*v) for k, v in table.pop("placement").items()})
            if (outer := table.pop("outer", None)) is not None:
                table["outer"] = Outer(**outer | {"transport": Transport(**outer.pop("transport", {}))})
            if (protect := table.pop("protect", None)) is not None:
                table["protect"] = Protect(**protect)
            topology = Topology(**table.pop("topology"))
            if unknown := set(table) - {"name", "frozen", "frozen_codec", "offload", "outer", "protect", "shares"}:
                raise ConfigError(f"not a strategy: unknown key {', '.join(sorted(unknown))}.")
            if isinstance(extent := table.get("frozen"), list):
                table["frozen"] = Extent(*extent)
            return Strategy(topology, placement, **transports, **table)
        except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"not a strategy: {error}. Expected what Strategy.to_toml() writes.") from error


def _transport_table(transport: Transport) -> dict[str, Any]:
    values = {each.name: getattr(transport, each.name) for each in fields(Transport)}
    told = {name: v if isinstance(v, (int, float)) else str(v) for name, v in values.items() if v is not None}
    if not transport.exact:  # the default
        del told["exact"]
    return told


def _toml_lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {written(value)}" for name, value in table.items() if value is not None]


@lru_cache(maxsize=256)
def _of_frozen(strategy: Strategy) -> Strategy:
    extent = strategy.frozen_extent
    assert extent is not None
    placement = Placement(extent, extent, extent)
    copies = strategy.placement.backward_params is not None
    gather, backward = strategy.gather, strategy.gather if copies else strategy.backward_gather
    if strategy.frozen_codec != "none":
        gather = backward = Transport(gather.route, strategy.frozen_codec)
    elif extent.nodes == 1 < strategy.placement.params.nodes:
        # A preset encodes only what crosses nodes, and these gathers stay inside a node.
        gather, backward = Transport(gather.route), Transport(backward.route)
    plain: dict[str, Any] = {kind.value: Transport() for kind in (*GRADIENTS, TransferKind.PARAM_SYNC)}
    plain |= {"gather": gather, "backward_gather": backward}
    return replace(strategy, placement=placement, **plain)
