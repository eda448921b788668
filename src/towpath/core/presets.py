"""The presets: strategies that have a name.

Each preset is a function from a topology and options to a placement. `strategy` adds transports to it.
"""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any, Literal, TypedDict, Unpack

from towpath.core.outer import Outer
from towpath.core.placement import GroupCollective, Placement
from towpath.core.routes import ALL_TO_ALL, Grid, Route
from towpath.core.strategy import GRADIENTS, WEIGHTS, WITH_TRANSPORT, Offload, Strategy, TransferKind
from towpath.core.transport import LOW_RANK, Feedback, Transport
from towpath.errors import ConfigError
from towpath.topology.cluster import Extent, Topology

# Editors complete these names. Arguments of type `Preset | str` also accept a name that is known only at run time.
Preset = Literal[
    "ddp",
    "hpz",
    "lins",
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

    weights: str
    gradients: str
    feedback: Feedback
    gradients_after: int
    gradients_until: int
    interleaved: int
    route: Route | None
    frozen: Extent | Literal["as-trained"] | None
    frozen_codec: str
    offload: Offload | None
    exact: bool
    outer: Outer | None
    gather: Transport
    backward_gather: Transport
    reduce: Transport
    grad_sync: Transport
    param_sync: Transport
    group: Extent | None
    params: Extent
    grads: Extent
    optimizer: Extent | None
    backward_params: Extent | None


NONE = Extent(1)

# No lossless route is faster where links inside a node are the faster ones (benchmarks/suites/collectives.py).
BEST_ROUTE: Route = "ho-ring"


def _mics(topology: Topology, *, group: Extent | None = None) -> Placement:
    """Shard everything in each partition group (default: the node), and replicate it across groups."""
    group = group or Extent(topology.ranks_per_node)
    return Placement(group, group, group)


def _hpz(topology: Topology, *, group: Extent | None = None) -> Placement:
    """Place like zero3, with a backward copy in each group (default: the node; ZeRO++, section 3.2)."""
    return Placement(topology.whole, topology.whole, topology.whole, group or Extent(topology.ranks_per_node))


def _lins(
    topology: Topology,
    *,
    params: Extent = NONE,
    grads: Extent = NONE,
    optimizer: Extent | None = None,
    backward_params: Extent | None = None,
) -> Placement:
    """Use the given extents. The default is the paper's for a 7B model: shard only optimizer states, in the node."""
    return Placement(params, grads, optimizer or Extent(topology.ranks_per_node), backward_params)


def _by_levels(code: str) -> Callable[[Topology], Placement]:
    """Return a placer by PaRO's code: P, G and OS are each not sharded (n), in the node (i) or global (g)."""

    def place(topology: Topology) -> Placement:
        extent = {"n": NONE, "i": Extent(topology.ranks_per_node), "g": topology.whole}
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
    "lins": _lins,
    **{f"paro-{p}{g}{o}": _by_levels(p + g + o) for p, g, o in combinations_with_replacement("nig", 3)},
}


_PLAIN = ("ddp", "zero1", "zero2", "zero3", "hpz", "qwz", "qgz")

# These are the codecs of ZeRO++: for weights (qwZ, section 3.1), and for gradients (qgZ, section 3.3).
_CODECS = {"qwz": ("int8", "none"), "qgz": ("none", "int4"), "zero++": ("int8", "int4")}
_CODEC_OPTIONS = ("weights", "gradients", "feedback", "gradients_after", "gradients_until", "interleaved")
# These options become fields of the Strategy unchanged.
_FROZEN_OPTIONS = ("frozen", "frozen_codec")


def strategies() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(sorted(_PLACERS))


def strategy(name: Preset | str, topology: Topology | None = None, **options: Unpack[Options]) -> Strategy:
    """Return the preset `name` on `topology`, with the given options.

    Codecs apply to transfers that cross nodes. A `Transport` for one kind of transfer overrides the other options.

    Args:
        name: A preset's name. `strategies()` lists them.
        topology: The nodes and ranks of the job. By default it is detected from the launcher.
        **options: Any of these:

            - `weights`: The codec of weights: 'int8', 'int4:64+hadamard', or 'none'. qwz and zero++ default to
              'int8'.
            - `gradients`: The codec of gradients. qgz and zero++ default to 'int4'. With ddp, zero1, paro-nng and
              paro-nni it may also be 'low-rank:4'.
            - `feedback`: The hops at which rounding errors of gradients are kept and added in the next step: 'first',
              'second', 'both' or 'none'. The default is 'first' with low rank, else 'none'.
            - `gradients_after`: The optimizer step, counted from 0, from which the codec of gradients is used.
            - `gradients_until`: The optimizer step until which the codec of gradients is used. 0 means permanently.
            - `interleaved`: The number of optimizer steps of the run, to use the codec of gradients only in the first
              half of it (ZeRO++, section 5.4).
            - `route`: The route of all transfers. Encoded gradients follow it only if it is an all-to-all route. By
              default ddp, zero1 to zero3 and hpz use 'flat'. The others use the best lossless route where a group
              spans nodes.
            - `frozen`: The Extent of frozen parameters, or 'as-trained'. By default each node has a copy where memory
              allows.
            - `frozen_codec`: The codec in which frozen parameters are stored and sent: 'int8', 'int4:64', or 'none'.
            - `offload`: 'optimizer' keeps what the optimizer works on in host memory, 'params' the P shards, and
              'optimizer+params' both. Use it to save device memory.
            - `exact`: True sends the parameter sync in fewer bytes, and over gloo gradients too, without losing a bit.
            - `outer`: An `Outer`, with which islands of nodes synchronize only now and then. Everything else is then
              that of one island. Use it on links below 1 Gbit/s. It changes the algorithm.
            - `group`: The partition group of mics, hpz and zero++, as an Extent. The default is the node.
            - `gather`, `backward_gather`, `reduce`, `grad_sync`, `param_sync`: The `Transport` of this kind.
            - `params`, `grads`, `optimizer`, `backward_params`: The extents of lins.

    Raises:
        ConfigError: If the name or an option is unknown, or options contradict each other. Or if an extent does not fit
            the topology.
    """
    if name not in _PLACERS:
        raise ConfigError(
            f"unknown strategy {name!r}; did you mean {closest(name)!r}? Known: {', '.join(strategies())}."
        )
    placer = _PLACERS[name]
    rest: dict[str, Any] = {**options}
    _check_known(name, placer, rest)
    transports = {kind.value: rest.pop(kind.value) for kind in WITH_TRANSPORT if kind.value in rest}
    route: Route | None = rest.pop("route", None)
    frozen = {option: rest.pop(option) for option in _FROZEN_OPTIONS if option in rest}
    offload: Offload | None = rest.pop("offload", None)
    exact: bool = rest.pop("exact", False)
    outer: Outer | None = rest.pop("outer", None)
    encoded = _encoded(name, route, rest)
    topology = topology or Topology.detect()
    if outer is not None and not isinstance(outer, Outer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"outer is a towpath.Outer, such as towpath.Outer(every=32); got {outer!r}.")
    if outer is not None and outer.islands is None and topology.nodes == 1:
        warnings.warn(
            f"outer= is left out: {topology.words} is one island, and has no other to synchronize with. Training is "
            "synchronous, as without outer=. Start more nodes, or pass Outer(islands=1) to step the outer optimizer "
            "all the same.",
            stacklevel=2,
        )
        outer = None
    if outer is not None:
        outer, topology = outer.on(topology)
    placement = placer(topology, **rest)
    made = Strategy(topology, placement, name, offload=offload, outer=outer)
    chosen = _default_transports(made) if route is None else {k.value: Transport(route) for k in WITH_TRANSPORT}
    for kind, transport in encoded.items():
        if _crosses(getattr(made.moves, kind.value), topology):
            taken = chosen.get(kind.value, Transport()).route
            chosen[kind.value] = _routed(kind, transport, taken, is_named=route is not None)
    made = replace(made, **(chosen | transports | frozen))
    return made if exact is False else made.with_exact_transports(exact)


_EXTENTS = frozenset({"frozen", "group", "params", "grads", "optimizer", "backward_params"})
_STEPS = frozenset({"gradients_after", "gradients_until", "interleaved"})


def parse_strategy(text: str, topology: Topology, offload: Offload | None = None) -> Strategy:
    """Return the strategy of a preset's name and its options, such as 'mics gradients=int4:64' or 'mics group=4x2'.

    Args:
        text: The name, and options as `strategy()` takes them. An extent is written as RANKSxNODES.
        topology: The nodes and ranks of the job.
        offload: The option `offload`, unless the text names it.

    Raises:
        ConfigError: If a word is no option with a value. Or if there is no such preset or option, or options contradict
            each other.
    """
    name, *words = text.split() or [""]
    if name in ("", "auto"):
        raise ConfigError('expected a preset\'s name. `towpath plan` and "auto" choose one by prediction.')
    options: dict[str, Any] = {} if offload is None else {"offload": offload}
    for word in words:
        option, _, value = word.partition("=")
        extent = re.fullmatch(r"(\d+)x(\d+)", value)
        if not value or (option in _EXTENTS and extent is None):
            expected = f"{option}=RANKSxNODES, such as 4x1" if option in _EXTENTS else "OPTION=VALUE"
            raise ConfigError(f"got {word!r}, expected {expected}.")
        options[option] = Extent(int(extent[1]), int(extent[2])) if option in _EXTENTS and extent else value
        if option in _STEPS and value.isdecimal():
            options[option] = int(value)
        if option == "exact" and value.lower() in ("true", "false"):
            options[option] = value.lower() == "true"
    return strategy(name, topology, **options)


def name_of(placement: Placement, topology: Topology) -> str:
    """Return the preset whose default placement on `topology` is `placement`, or 'lins' if there is none."""
    for name in ("ddp", "zero1", "zero2", "zero3", "mics", "hpz", *(n for n in strategies() if n.startswith("paro-"))):
        if _PLACERS[name](topology) == placement:
            return name
    return "lins"


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
    """Return the preset that `name` most likely stands for.

    It may be PyTorch's name for the same placement, or a misspelled preset.
    """
    text = str(getattr(name, "name", name)).strip().lower()  # a member of FSDP's ShardingStrategy has a `name`
    elsewhere = _ELSEWHERE.get(text.lstrip("_").replace("-", "_"))
    return elsewhere or difflib.get_close_matches(text, _PLACERS, n=1, cutoff=0.0)[0]


def _check_known(name: str, placer: Callable[..., Placement], options: dict[str, Any]) -> None:
    extents = [p for p, v in inspect.signature(placer).parameters.items() if v.kind is v.KEYWORD_ONLY]
    known = [
        *extents,
        *_CODEC_OPTIONS,
        "route",
        "offload",
        "exact",
        "outer",
        *_FROZEN_OPTIONS,
        *(kind.value for kind in WITH_TRANSPORT),
    ]
    if unknown := set(options) - set(known):
        raise ConfigError(f"strategy {name!r} has no option {', '.join(sorted(unknown))}; it takes {', '.join(known)}.")


def _encoded(name: str, route: Route | None, options: dict[str, Any]) -> dict[TransferKind, Transport]:
    """Return a transport for each kind that has a codec, and remove the codec options from `options`."""
    named = "gradients" in options
    weights, gradients = _CODECS.get(name, ("none", "none"))
    weights, gradients = options.pop("weights", weights), options.pop("gradients", gradients)
    low_rank = str(gradients).startswith(LOW_RANK)
    feedback = options.pop("feedback", "first" if low_rank else "none")
    steps = {"after": options.pop("gradients_after", 0), "until": options.pop("gradients_until", 0)}
    run = options.pop("interleaved", 0)
    if run:
        if type(run) is not int or run < 2:
            raise ConfigError(f"strategy {name!r}: interleaved is the run's number of steps, from 2; got {run!r}.")
        if steps["until"]:
            raise ConfigError(f"strategy {name!r}: interleaved= is gradients_until= {run // 2}; pass one of them.")
        steps["until"] = run // 2
    if gradients == "none" and (feedback != "none" or any(steps.values())):
        raise ConfigError(
            f"strategy {name!r}: feedback=, gradients_after=, gradients_until= and interleaved= need gradients= to "
            "name a codec."
        )
    transports: dict[TransferKind, Transport] = {}
    if weights != "none":
        transports |= dict.fromkeys(WEIGHTS, Transport("flat", weights))
    if gradients != "none":
        transports |= dict.fromkeys(
            GRADIENTS, Transport("flat" if low_rank else "two-hop", gradients, feedback, **steps)
        )
        if route is not None and named and not low_rank and route not in ALL_TO_ALL:
            raise ConfigError(
                f"strategy {name!r}: route={route!r} would round gradients in {gradients} at every member. "
                f"Take one of {', '.join(ALL_TO_ALL)}, or name the transports one by one (gather=, reduce=, …)."
            )
    return transports


def _routed(kind: TransferKind, transport: Transport, taken: Route, is_named: bool) -> Transport:
    """Return an encoded transport with its route, where one that is not encoded takes the route `taken`."""
    if kind in WEIGHTS or transport.low_rank is not None:
        return replace(transport, route=taken if is_named or taken != "flat" else BEST_ROUTE)
    encoded: Route = taken if taken in ALL_TO_ALL else "two-hop"
    return replace(transport, route=encoded, plain_route=taken if transport.changes and taken != encoded else None)


def _crosses(moves: tuple[GroupCollective, ...], topology: Topology) -> bool:
    return any(len(set(map(topology.node_of, g.ranks))) > 1 for move in moves for g in move.groups)


def _default_transports(made: Strategy) -> dict[str, Transport]:
    """Return transports with the best route for each kind with a group of several nodes and several members in each.

    The plain presets keep 'flat', as users know them. That includes hpz, which is measured against zero3.
    """
    if made.name in _PLAIN:
        return {}
    topology = made.topology

    def gains(moves: tuple[GroupCollective, ...]) -> bool:
        return any(not Grid.of([topology.node_of(r) for r in g.ranks]).plain for m in moves for g in m.groups)

    return {k.value: Transport(BEST_ROUTE) for k in WITH_TRANSPORT if gains(getattr(made.moves, k.value))}
