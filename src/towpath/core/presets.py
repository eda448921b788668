"""The presets: strategies that have a name, on any topology.

Each preset is a function from a topology to a placement. `NamedStrategy.on` adds transports and other options to it.
"""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any, Literal, TypedDict, Unpack, overload

from towpath.core.placement import Placement
from towpath.core.routes import ALL_TO_ALL, Grid, Route
from towpath.core.shares import Shares, shares_of
from towpath.core.strategy import GRADIENTS, WEIGHTS, WITH_TRANSPORT, Offload, Protect, Strategy, TransferKind
from towpath.core.transport import LOW_RANK, Feedback, Transport
from towpath.errors import ConfigError
from towpath.outer.settings import Outer
from towpath.topology.cluster import FLAT, Extent, Topology

# Editors complete these names. Arguments of type `Preset | str` also accept a name that is known only at run time.
Preset = Literal[
    "ddp",
    "hpz",
    "mics",
    "paro-ggg",
    "paro-igg",
    "paro-iig",
    "paro-iii",
    "paro-ngg",
    "paro-nig",
    "paro-nii",
    "paro-nng",
    "paro-nni",
    "paro-nnn",
    "qgz",
    "qwz",
    "zero++",
    "zero1",
    "zero2",
    "zero3",
]


class Options(TypedDict, total=False):
    """The options of `strategy()`, whose docstring explains them."""

    group: Extent | None
    weights: str
    gradients: str
    feedback: Feedback
    gradients_until: int
    route: Route | None
    frozen: Extent | Literal["as-trained"] | None
    frozen_codec: str
    offload: Offload | None
    exact: bool
    outer: Outer | None
    protect: Protect | None
    shares: Shares | None


NONE = Extent(1)

# Over NCCL, these presets take columns and rows in place of 'flat' where a node's link then carries less than this
# share of the bytes. On more nodes there is little to save, and one call starts sooner than two. An all-reduce of NCCL
# may already be a tree, so ddp stays flat.
FEW_NODES_SHARE = 0.85
_BY_COLUMNS_AND_ROWS = ("zero1", "zero2", "zero3", "hpz", "qwz", "qgz")

# No lossless route is faster where links inside a node are the faster ones (benchmarks/suites/collectives.py).
BEST_ROUTE: Route = "ho-ring"


def _mics(topology: Topology, *, group: Extent | None = None) -> Placement:
    """Shard everything in each partition group (default: the node), and replicate it across groups."""
    group = group or Extent(topology.ranks_per_node)
    return Placement(group, group, group)


def _hpz(topology: Topology, *, group: Extent | None = None) -> Placement:
    """Place like zero3, with a backward copy in each group (default: the node; ZeRO++, section 3.2)."""
    return Placement(topology.whole, topology.whole, topology.whole, group or Extent(topology.ranks_per_node))


def _by_levels(code: str) -> Callable[[Topology], Placement]:
    """Return a placer by PaRO's code: P, G and OS are each not sharded (n), in the node (i) or global (g)."""

    def place(topology: Topology) -> Placement:
        extent = {"n": NONE, "g": topology.whole}
        if "i" in code:
            extent["i"] = Extent(topology.ranks_per_node)
        return Placement(*(extent[letter] for letter in code))

    return place


_PLACERS: dict[str, Callable[..., Placement]] = {
    "ddp": _by_levels("nnn"),
    "zero1": _by_levels("nng"),
    "zero2": _by_levels("ngg"),
    "zero3": _by_levels("ggg"),
    "mics": _mics,
    "hpz": _hpz,
    "qwz": _by_levels("ggg"),
    "qgz": _by_levels("ggg"),
    "zero++": _hpz,
    **{f"paro-{p}{g}{o}": _by_levels(p + g + o) for p, g, o in combinations_with_replacement("nig", 3)},
}


_PLAIN = ("ddp", *_BY_COLUMNS_AND_ROWS)

# These are the codecs of ZeRO++: for weights (qwZ, section 3.1), and for gradients (qgZ, section 3.3).
_CODECS = {"qwz": ("int8", "none"), "qgz": ("none", "int4"), "zero++": ("int8", "int4")}


# The name of strategies whose placement is no preset's.
CUSTOM = "custom"


def strategies() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(sorted(_PLACERS))


@overload
def strategy(name: Preset | str | Placement, topology: Topology, **options: Unpack[Options]) -> Strategy: ...
@overload
def strategy(name: Preset | str | Placement, topology: None = None, **options: Unpack[Options]) -> NamedStrategy: ...
def strategy(
    name: Preset | str | Placement, topology: Topology | None = None, **options: Unpack[Options]
) -> Strategy | NamedStrategy:
    """Return a preset, or a placement of your own, with the given options.

        model = towpath.shard(model, towpath.strategy("zero3", exact=True))

    Codecs apply to transfers that cross nodes. `dataclasses.replace(strategy, reduce=towpath.Transport(…))` changes the
    transport of one kind of transfer alone.

    Args:
        name: A preset's name (`strategies()` lists them), or a `Placement`.
        topology: The nodes and ranks of the job. Leave it out to let `shard()` or `schedule()` take the topology that
            they detect or get. Pass it to look at a strategy, or to write it to a file, without a process group.
        **options: Any of these:

            - `group`: The partition group of mics, hpz and zero++, as an Extent. The default is the node.
            - `weights`: The codec of weights: 'int8', 'int4:64+hadamard', or 'none'. qwz and zero++ default to
              'int8'.
            - `gradients`: The codec of gradients. qgz and zero++ default to 'int4'. With ddp, zero1, paro-nng and
              paro-nni it may also be 'low-rank:4'.
            - `feedback`: The hops at which rounding errors of gradients are kept and added in the next step: 'first',
              'second', 'both' or 'none'. The default is 'first' with low rank, else 'none'.
            - `gradients_until`: The optimizer step, counted from 0, until which the codec of gradients is used. 0 means
              permanently. Half of the run's steps is the interleaved recipe of ZeRO++ (section 5.4).
            - `route`: The route of all transfers. Encoded gradients follow it only if it is an all-to-all route. By
              default ddp, zero1 to zero3 and hpz use 'flat', and all of them but ddp 'hierarchical' over NCCL on few
              nodes. The others use the best lossless route where a group spans nodes.
            - `frozen`: The Extent of frozen parameters, or 'as-trained'. By default each node has a copy where memory
              allows.
            - `frozen_codec`: The codec in which frozen parameters are stored and sent: 'int8', 'int4:64', or 'none'.
            - `offload`: 'optimizer' keeps the master parameters, their `.grad` and the optimizer's states in host
              memory, and steps on the CPU. Use it if the states do not fit on the GPU. 'params' keeps each rank's shard
              of the weights there, and copies it to the GPU for each gather. Use it if one copy of the weights in each
              node does not fit. 'optimizer+params' does both.
            - `exact`: True sends the parameter sync in fewer bytes, and over gloo gradients too, without losing a bit.
            - `outer`: An `Outer`, with which islands of nodes synchronize only now and then. Everything else is then
              that of one island. Use it on links below 1 Gbit/s. It changes the algorithm.
            - `protect`: A `Protect`, with which training survives a lost node without a shared folder. Nodes then keep
              snapshots in memory. Use it if machines may fail.
            - `shares`: The relative speeds of all data-parallel ranks, such as (2, 2, 1, 1), or 'auto' to measure them.
              Each rank then takes rows of a micro-batch in proportion. Use it if machines are not equally fast. Take
              batches from `towpath.ShareSampler`, and call `towpath.weigh(model, loss, tokens).backward()`.

    Returns:
        A `Strategy`, if `topology` is given. Otherwise the name with its options, which `shard()` and `schedule()` take
        instead of a strategy. Its method `on(topology)` returns the `Strategy`.

    Raises:
        ConfigError: If the name or an option is unknown, options contradict each other, or an extent does not fit the
            topology. Without `topology`, what depends on it is checked by `shard()`.
    """
    named = NamedStrategy(name, dict(options))
    return named if topology is None else named.on(topology)


@dataclass(frozen=True)
class NamedStrategy:
    """A preset or a placement with its options, for a topology that is not known yet. `strategy` returns it.

    Args:
        name: The preset's name, or the placement.
        options: Options of `strategy`.
    """

    name: str | Placement
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.name == "auto":
            raise ConfigError(
                'strategy() got "auto", which is no preset: pass it to shard() itself. Its options are those of '
                "towpath.Workload."
            )
        placer = None if isinstance(self.name, Placement) else _PLACERS.get(self.name)
        if placer is None and not isinstance(self.name, Placement):
            known = ", ".join(strategies())
            raise ConfigError(f"unknown strategy {self.name!r}; did you mean {closest(self.name)!r}? Known: {known}.")
        takes_group = placer is not None and "group" in inspect.signature(placer).parameters
        known = [option for option in Options.__annotations__ if option != "group" or takes_group]
        if unknown := set(self.options) - set(known):
            raise ConfigError(
                f"strategy {self.label!r} has no option {', '.join(sorted(unknown))}; it takes {', '.join(known)}."
            )

    @property
    def label(self) -> str:
        """The name of the `Strategy`: the preset's, or 'custom' for a placement."""
        return CUSTOM if isinstance(self.name, Placement) else self.name

    def on(self, topology: Topology) -> Strategy:
        options = self.options
        outer, topology = _islands(options.get("outer"), topology)
        placement = self.name
        if not isinstance(placement, Placement):
            if placement not in FLAT:
                topology.check_equal(f"strategy {placement!r}")
            placement = _PLACERS[placement](topology, **({"group": options["group"]} if "group" in options else {}))
        same = {each: options[each] for each in ("frozen", "frozen_codec", "offload", "shares") if each in options}
        made = Strategy(topology, placement, self.label, outer=outer, **same)
        made = replace(made, protect=protected(options.get("protect"), made.job))
        return replace(made, **self._transports(made)).with_exact_transports(options.get("exact", False))

    def _transports(self, made: Strategy) -> dict[str, Transport]:
        """Return the transport of each kind."""
        # By default, a kind with groups of several nodes and several members in each takes the best route. The plain
        # presets keep 'flat', as users know them. That includes hpz, which is measured against zero3.
        named, encoded = self.options.get("route"), self._encoded()
        chosen: dict[str, Transport] = {}
        for kind in WITH_TRANSPORT:
            groups = (group for move in getattr(made.moves, kind.value) for group in move.groups)
            grids = [Grid.of([made.topology.node_of(rank) for rank in group.ranks]) for group in groups]
            gains = made.name not in _PLAIN and not all(grid.plain for grid in grids)
            route: Route = named or (BEST_ROUTE if gains else "flat")
            saves = any(not grid.plain and grid.crossing_share < FEW_NODES_SHARE for grid in grids)
            by_columns = named is None and made.name in _BY_COLUMNS_AND_ROWS and saves
            transport = Transport(route, nccl_route="hierarchical" if by_columns else None)
            if kind in encoded and any(grid.nodes > 1 for grid in grids):
                transport = _routed(kind, encoded[kind], transport, is_named=named is not None)
            chosen[kind.value] = transport
        return chosen

    def _encoded(self) -> dict[TransferKind, Transport]:
        """Return a transport for each kind that has a codec."""
        options, route = self.options, self.options.get("route")
        weights, gradients = _CODECS.get(self.label, ("none", "none"))
        weights, gradients = options.get("weights", weights), options.get("gradients", gradients)
        low_rank = str(gradients).startswith(LOW_RANK)
        feedback = options.get("feedback", "first" if low_rank else "none")
        until = options.get("gradients_until", 0)
        if gradients == "none" and (feedback != "none" or until):
            raise ConfigError(
                f"strategy {self.label!r}: feedback= and gradients_until= need gradients= to name a codec."
            )
        transports: dict[TransferKind, Transport] = {}
        if weights != "none":
            transports |= dict.fromkeys(WEIGHTS, Transport("flat", weights))
        if gradients != "none":
            transports |= dict.fromkeys(
                GRADIENTS, Transport("flat" if low_rank else "two-hop", gradients, feedback, until)
            )
            if route is not None and "gradients" in options and not low_rank and route not in ALL_TO_ALL:
                raise ConfigError(
                    f"strategy {self.label!r}: route={route!r} would round gradients in {gradients} at every member. "
                    f"Take one of {', '.join(ALL_TO_ALL)}, or leave out route=."
                )
        return transports


# How users name a strategy.
StrategyLike = Preset | str | NamedStrategy | Strategy


def _islands(outer: Outer | None, topology: Topology) -> tuple[Outer | None, Topology]:
    """Return the outer steps with their number of islands, and the topology of one island."""
    if outer is None:
        return None, topology
    if not isinstance(outer, Outer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"outer is a towpath.Outer, such as towpath.Outer(every=32); got {outer!r}.")
    if outer.islands is None and topology.nodes == 1 and not outer.meet:
        warnings.warn(
            f"outer= is left out: {topology.words} is one island, and has no other to synchronize with. Training is "
            "synchronous, as without outer=. Start more nodes, or pass Outer(islands=1) to step the outer optimizer "
            "all the same.",
            stacklevel=2,
        )
        return None, topology
    return outer.on(topology)


def protected(protect: Protect | None, job: Topology) -> Protect | None:
    """Return `protect`, or None with a warning if the job has no other node that can hold copies."""
    if not isinstance(protect, Protect) or job.nodes > 1:  # `Strategy` refuses what is none
        return protect
    warnings.warn(
        f"protect= is left out: {job.words} has no other node that could hold copies. If the node is lost, training "
        "goes on from the newest checkpoint. Start more nodes to survive it.",
        stacklevel=2,
    )
    return None


_EXTENTS = frozenset({"frozen", "group"})


def parse_strategy(text: str, topology: Topology, **defaults: Unpack[Options]) -> Strategy:
    """Return the strategy of a preset's name and its options, such as 'mics gradients=int4:64' or 'mics group=4x2'.

    Args:
        text: The name, and options as `strategy()` takes them. An extent is written as RANKSxNODES, `protect` as the
            steps between snapshots, and `shares` as 2,2,1,1 or auto.
        topology: The nodes and ranks of the job.
        **defaults: Options as `strategy()` takes them, unless the text names them.
    """
    name, *words = text.split() or [""]
    if name in ("", "auto"):
        raise ConfigError('expected a preset\'s name. `towpath plan` and "auto" choose one by prediction.')
    options: dict[str, Any] = {**defaults}
    for word in words:
        option, _, value = word.partition("=")
        extent = re.fullmatch(r"(\d+)x(\d+)", value)
        if not value or (option in _EXTENTS and extent is None):
            expected = f"{option}=RANKSxNODES, such as 4x1" if option in _EXTENTS else "OPTION=VALUE"
            raise ConfigError(f"got {word!r}, expected {expected}.")
        options[option] = Extent(int(extent[1]), int(extent[2])) if option in _EXTENTS and extent else value
        if option == "gradients_until" and value.isdecimal():
            options[option] = int(value)
        if option == "exact" and value.lower() in ("true", "false"):
            options[option] = value.lower() == "true"
        if option == "protect":
            options[option] = Protect(int(value) if value.isdecimal() else value)  # pyright: ignore[reportArgumentType]
        if option == "shares":
            options[option] = shares_of(value)
    return strategy(name, topology, **options)


def name_of(placement: Placement, topology: Topology) -> str:
    """Return the preset whose default placement on `topology` is `placement`, or 'custom' if there is none."""
    for name in ("ddp", "zero1", "zero2", "zero3", "mics", "hpz", *(n for n in strategies() if n.startswith("paro-"))):
        if _PLACERS[name](topology) == placement:
            return name
    return CUSTOM


# PyTorch's names for the same placements, in lower case: FSDP's ShardingStrategy, FSDP2, HSDP and DDP.
_ELSEWHERE: dict[str, Preset] = {
    "distributeddataparallel": "ddp",
    "fsdp": "zero3",
    "fsdp2": "zero3",
    "full_shard": "zero3",
    "fully_shard": "zero3",
    "fullyshardeddataparallel": "zero3",
    "hsdp": "mics",
    "hybrid_shard": "mics",
    "hybrid_shard_zero2": "paro-nii",
    "no_shard": "ddp",
    "shard_grad_op": "zero2",
}


def closest(name: object) -> str:
    """Return the preset that `name` most likely stands for."""
    # It may be PyTorch's name for the same placement, or a misspelled preset.
    text = str(getattr(name, "name", name)).strip().lower()  # a member of FSDP's ShardingStrategy has a `name`
    elsewhere = _ELSEWHERE.get(text.lstrip("_").replace("-", "_"))
    return elsewhere or difflib.get_close_matches(text, _PLACERS, n=1, cutoff=0.0)[0]


def _routed(kind: TransferKind, transport: Transport, plain: Transport, is_named: bool) -> Transport:
    """Return an encoded transport with its routes, where one that is not encoded would be `plain`."""
    taken = plain.route
    if kind in WEIGHTS or transport.low_rank is not None:
        return replace(transport, route=taken if is_named or taken != "flat" else BEST_ROUTE)
    encoded: Route = taken if taken in ALL_TO_ALL else "two-hop"
    if not transport.changes:
        return replace(transport, route=encoded)
    otherwise = taken if taken != encoded else None
    return replace(transport, route=encoded, plain_route=otherwise, nccl_route=plain.nccl_route)
