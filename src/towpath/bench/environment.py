"""An environment of `strategies`, `scaling` and `overhead`: a workload, and the links between its ranks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

from towpath.bench.harness.job import Job
from towpath.bench.harness.pool import Pool
from towpath.bench.harness.regime import FIRST, Derived, Trial, derive, near
from towpath.bench.venue import Say, Venue
from towpath.bench.workload import HEADS, Workload
from towpath.errors import ConfigError
from towpath.lab import Rate
from towpath.topology.cluster import Topology

# A regime is of these two: FSDP2's communication alone, and what the bare module computes.
COMMUNICATION, COMPUTE = "fsdp2 silent", "compute"
UNSHAPED = "unshaped"
_TRIAL_TURNS = 3
# Short sequences, and blocks that wait about as long as they would compute on a device of their own: for each rank,
# since twice as many of them take as much time again to send and to receive on the same cores.
_WAITING_LENGTH, _WAITING_BATCH, _WAIT_SECONDS_OF_A_RANK = 16, 1, 0.0046

_WAITING = Workload(length=_WAITING_LENGTH, batch=_WAITING_BATCH, wait_seconds=0.0)
_SIZES = ("width", "depth", "batch", "length")

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Link:
    """Between the nodes: cables for which communication takes `regime` times as long as computation, or of a rate, or
    as fast as the machine goes; or, of a user's own cluster (`own`), what there is."""

    regime: float | None = None
    inter: str | None = None
    own: bool = False

    def __str__(self) -> str:
        if self.own:
            return "cluster"
        if self.regime is not None:
            return f"regime{self.regime:g}"
        return self.inter or UNSHAPED


@dataclass(frozen=True, slots=True)
class Environment:
    workload: Workload
    link: Link

    @property
    def name(self) -> str:
        """As it is given on the command line: 2x2-regime4-micro1. What is not as usual is named, too: -width192."""
        w = self.workload
        usual = _WAITING if w.wait_seconds is not None else Workload()
        sizes = [f"-{n}{getattr(w, n)}" for n in _SIZES if getattr(w, n) != getattr(usual, n)]
        dtype = {"bfloat16": "", "float32": "-fp32"}.get(w.dtype, f"-{w.dtype}")
        usually = w.wait_seconds in (None, _wait_seconds(w.topology))
        waits = "" if w.wait_seconds is None else "-waiting" if usually else f"-waiting{w.wait_seconds:g}"
        shape = f"{w.topology.nodes}x{w.topology.ranks_per_node}"
        in_step = "-in-step" if w.in_step else ""
        return "".join([f"{shape}-{self.link}-micro{w.micro_steps}", dtype, waits, in_step, *sizes])

    def quick(self) -> Environment:
        return replace(self, workload=self.workload.quick())


@dataclass(slots=True)
class Rates:
    """The rates that give the regimes asked for; what one regime's trials showed tells the next where to begin."""

    tried: dict[Workload, list[tuple[Rate, Trial]]] = field(default_factory=dict)

    def of(self, regime: float, workload: Workload, say: Say, pool: Pool) -> Derived:
        known = self.tried.setdefault(replace(workload, micro_steps=1), [])

        def measure(rate: Rate) -> Trial:
            trial = trial_of(Venue(None, rate), workload, say, pool)
            known.append((rate, trial))
            return trial

        return derive(regime, measure, say, FIRST, list(known))


def trial_of(venue: Venue, workload: Workload, say: Say, pool: Pool) -> Trial:
    entries = {name: venue.entry(name, alone(name, workload)) for name in (COMMUNICATION, COMPUTE)}
    with pool.started(entries, say) as made:
        seconds = {name: min(one.ask("turn")[0] for _ in range(_TRIAL_TURNS)) for name, one in made.items()}
    return Trial(str(venue.inter), seconds[COMMUNICATION], seconds[COMPUTE])


def alone(name: str, workload: Workload) -> Workload:
    """A regime is of one micro-step."""
    return replace(workload, micro_steps=1) if name in (COMMUNICATION, COMPUTE) else workload


def regime_recorded(derived: Derived | None, found: float) -> tuple[dict[str, Any], list[str]]:
    """The regime asked for, and the one of the race itself (`found`); with what a reader has to know."""
    seen = {"found in the race": round(found, 3)}
    if derived is None:
        return seen, []
    warnings = (
        [] if near(found, derived.asked) else [f"the regime was {found:.2f} in the race; asked {derived.asked:g}"]
    )
    return derived.recorded() | seen, warnings


# The command line -----------------------------------------------------------------------------------------------------


OTHER_CASES = "The options of an environment, such as --waiting or --nodes, make others."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Each takes one value or several, by commas: the environments are all their combinations."""
    parser.add_argument("--nodes", type=several(positive(int)), metavar="N,…", help="nodes of the cluster")
    parser.add_argument("--ranks", type=several(positive(int)), metavar="R,…", help="ranks of each node")
    parser.add_argument("--inter", type=several(str), metavar="RATE,…", help="rates of the cables: 200mbit, unshaped")
    parser.add_argument(
        "--regime",
        type=several(positive(float)),
        metavar="X,…",
        help="cables on which communication takes X times the computation",
    )
    parser.add_argument("--micro-steps", type=several(positive(int)), metavar="M,…", help="forward passes of a step")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--width", type=heads_wide, help=f"of the model: a multiple of {HEADS}")
    parser.add_argument("--depth", type=positive(int), help="of the model, in blocks")
    parser.add_argument("--batch", type=positive(int), help="sequences of a micro-step of a rank")
    parser.add_argument("--length", type=positive(int), help="tokens of a sequence")
    parser.add_argument(
        "--waiting", action="store_true", help="blocks wait instead of computing: nothing shares the cores"
    )
    parser.add_argument(
        "--wait",
        type=positive(float),
        metavar="SECONDS",
        help=f"so long in the forward pass of each; --waiting alone: {_WAIT_SECONDS_OF_A_RANK:g} for each rank",
    )
    parser.add_argument(
        "--in-step",
        action="store_true",
        help="all ranks begin each micro-step together: those that share cores else drift apart",
    )


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """For argparse: a number above 0."""

    def value(text: str) -> Number:
        try:
            found = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not 0 < found < math.inf:
            raise argparse.ArgumentTypeError(f"a number above 0 is needed; got {text}")
        return found

    return value


def heads_wide(text: str) -> int:
    width = positive(int)(text)
    if width % HEADS:
        raise argparse.ArgumentTypeError(f"a multiple of {HEADS}, the model's heads, is needed; got {text}")
    return width


def several(kind: Callable[[str], Value]) -> Callable[[str], tuple[Value, ...]]:
    """For argparse: '1,4' as (1, 4)."""

    def values(text: str) -> tuple[Value, ...]:
        if not all(part.strip() for part in text.split(",")):
            raise argparse.ArgumentTypeError(f"something is missing between the commas of {text!r}")
        return tuple(kind(part) for part in text.split(","))

    return values


def asked_for(
    options: argparse.Namespace, shapes: Iterable[Topology], links: Iterable[Link], micro_steps: Iterable[int]
) -> list[Environment]:
    """The combinations of what the options name, and of the defaults given here where they name nothing."""
    job: Job | None = options.job
    if job is not None:
        _refuse_shaping(options)
        shapes, links = [job.topology], [Link(own=True)]
    elif options.nodes or options.ranks:
        shapes = [Topology(n, r) for n, r in product(options.nodes or (2,), options.ranks or (2,))]
    if options.regime or options.inter:
        # From slow cables to fast ones: contestants stay (harness/pool.py).
        regimes = [Link(regime=regime) for regime in sorted(options.regime or (), reverse=True)]
        links = [*regimes, *(Link(inter=_rate(text)) for text in options.inter or ())]
    counts = options.micro_steps or micro_steps
    return [
        Environment(_workload(shape, count, options), link) for shape, count, link in product(shapes, counts, links)
    ]


def _refuse_shaping(options: argparse.Namespace) -> None:
    given = [f"--{name}" for name in ("nodes", "ranks", "inter", "regime") if getattr(options, name)]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: for the cluster of this machine; the ranks of a job are where the launcher placed "
            "them, on the links that there are. Leave it out."
        )


def _rate(text: str) -> str | None:
    return None if text == UNSHAPED else str(Rate.parse(text))


def waiting(workload: Workload) -> Workload:
    """With blocks that wait instead of computing."""
    seconds = _wait_seconds(workload.topology)
    return replace(workload, batch=_WAITING_BATCH, length=_WAITING_LENGTH, wait_seconds=seconds)


def _wait_seconds(topology: Topology) -> float:
    return round(_WAIT_SECONDS_OF_A_RANK * topology.world, 6)


def _workload(topology: Topology, micro_steps: int, options: argparse.Namespace) -> Workload:
    given = {name: getattr(options, name) for name in _SIZES}
    if options.waiting or options.wait is not None:
        given |= {"batch": given["batch"] or _WAITING_BATCH, "length": given["length"] or _WAITING_LENGTH}
        given["wait_seconds"] = _wait_seconds(topology) if options.wait is None else options.wait
    given["in_step"] = options.in_step
    chosen = {name: value for name, value in given.items() if value is not None}
    return Workload(topology, micro_steps, options.dtype, **chosen)
