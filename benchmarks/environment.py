"""The environment of a comparison: a workload, links between the nodes of a lab, and candidates on them.

The *comm ratio* is the time that FSDP2's communication takes alone, over the time that the bare module computes. A link
rate by itself says little: on a machine with faster cores, it makes another comparison. So a case names a comm ratio,
and the link rate that gives it is searched for before each comparison.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

import lab
from benchmarks.harness.candidates import CaseError, LabPlace, Launch, preloaded
from benchmarks.harness.comparison import Pool, Say, reason_of
from benchmarks.peers import AUTO, CandidateSpec, TrainStep
from benchmarks.workload import HEADS, LEARNING_RATE, Workload
from lab import Rate
from lab.errors import LabError
from towpath.topology.cluster import Topology

# The two parts of a comm ratio: FSDP2 with nothing computed, and the forward and backward pass of the bare module.
COMMUNICATION, COMPUTE = "fsdp2 silent", "compute"
UNSHAPED = "unshaped"
WARM_UP = 2
_TRIAL_SAMPLES = 3
_SCREENING_SECONDS = 900.0
# Sequences are short, and blocks wait about as long as they would compute on a device of their own. The wait grows with
# the number of ranks, because twice as many ranks need twice the time to send and receive on the same cores.
_WAITING_LENGTH, _WAITING_BATCH, _WAIT_SECONDS_PER_RANK = 16, 1, 0.0046
_WAITING = Workload(length=_WAITING_LENGTH, batch=_WAITING_BATCH, wait_seconds=0.0)
_SIZES = ("width", "depth", "batch", "length")

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class NodeLink:
    """The links between nodes: of a rate, or of the rate that gives a comm ratio, or as fast as the machine allows."""

    comm_ratio: float | None = None
    inter: str | None = None

    def __str__(self) -> str:
        return f"ratio{self.comm_ratio:g}" if self.comm_ratio is not None else self.inter or UNSHAPED


@dataclass(frozen=True, slots=True)
class Environment:
    """A workload and the links between its nodes."""

    workload: Workload
    link: NodeLink

    @property
    def name(self) -> str:
        """The name of a case, such as `2x2-ratio4-micro1`, with every size that differs from the default."""
        w = self.workload
        usual = _WAITING if w.wait_seconds is not None else Workload()
        sizes = [f"-{n}{getattr(w, n)}" for n in _SIZES if getattr(w, n) != getattr(usual, n)]
        dtype = {"bfloat16": "", "float32": "-fp32"}.get(w.dtype, f"-{w.dtype}")
        usually = w.wait_seconds in (None, _wait_seconds(w.topology))
        waits = "" if w.wait_seconds is None else "-waiting" if usually else f"-waiting{w.wait_seconds:g}"
        shape = f"{w.topology.nodes}x{w.topology.ranks_per_node}"
        in_step = "-in-step" if w.in_step else ""
        rate = "" if w.learning_rate == LEARNING_RATE else f"-lr{w.learning_rate:g}"
        return "".join([f"{shape}-{self.link}-micro{w.micro_steps}", dtype, waits, in_step, *sizes, rate])


def waiting(workload: Workload) -> Workload:
    """Return a workload whose blocks wait instead of computing."""
    seconds = _wait_seconds(workload.topology)
    return replace(workload, batch=_WAITING_BATCH, length=_WAITING_LENGTH, wait_seconds=seconds)


def _wait_seconds(topology: Topology) -> float:
    return round(_WAIT_SECONDS_PER_RANK * topology.world, 6)


# Candidates in a lab --------------------------------------------------------------------------------------------------


def launch_of(name: str, workload: Workload, inter: Rate | None) -> Launch:
    """Return how to start a candidate on links of a rate. It stays for comparisons on other links, except `auto`.

    `auto` has chosen its strategy for the links that it measured.
    """
    stays = CandidateSpec.parse(name).name != AUTO
    place = LabPlace(workload.topology, inter)
    return Launch(place, TrainStep, (name, of_one_micro_step(name, workload)), WARM_UP, stays)


def of_one_micro_step(name: str, workload: Workload) -> Workload:
    """Return the workload of a candidate: the two parts of a comm ratio have one micro-step."""
    return replace(workload, micro_steps=1) if name in (COMMUNICATION, COMPUTE) else workload


@dataclass(frozen=True, slots=True)
class Screened:
    """A candidate in the screening: seconds of its fastest sample after the first, and its memory."""

    seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Screening:
    """The candidates that ran in a screening, and why the others did not."""

    tried: dict[str, Screened]
    skipped: dict[str, str]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step by candidate."""
        return {name: each.seconds for name, each in self.tried.items()}


def screen(names: Sequence[str], workload: Workload, inter: Rate | None, samples: int, say: Say) -> Screening:
    """Run candidates one after the other, each in new processes of the same lab."""
    found = Screening({}, {})
    began = time.monotonic()
    with lab.Lab(workload.topology, inter=inter, preload=preloaded(TrainStep)) as cluster:
        for number, name in enumerate(names, start=1):
            progress = f"screening {number} of {len(names)}: {name}"
            try:
                ranks = cluster.call(_screened, name, workload, samples, timeout_seconds=_SCREENING_SECONDS)
            except LabError as error:
                found.skipped[name] = reason_of(error)
                say(f"{progress}: left out ({found.skipped[name]})")
                continue
            found.tried[name] = Screened(ranks[0].seconds, max(rank.memory_bytes for rank in ranks))
            left = (time.monotonic() - began) / number * (len(names) - number)
            say(f"{progress}: {ranks[0].seconds:.3f} s a step; {left:.0f} s to go")
    return found


def _screened(rank: int, world: int, name: str, workload: Workload, samples: int) -> Screened:
    step = TrainStep(rank, world, name, workload)
    step.sample()
    seconds = min(step.sample() for _ in range(samples))
    return Screened(seconds, step.facts()["memory_bytes"])


# The link rate of a comm ratio ----------------------------------------------------------------------------------------

FIRST = Rate.parse("200mbit")
TOLERANCE = 0.1
MOST_TRIALS = 6
_SLOWEST, _FASTEST = 10**6, 40 * 10**9


class CommRatioError(CaseError):
    """No link rate gives the requested comm ratio on this machine."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Seconds of communication alone and of computation alone, on links of the rate `inter`."""

    inter: str
    communication_seconds: float
    compute_seconds: float

    @property
    def comm_ratio(self) -> float:
        """Communication over computation."""
        return self.communication_seconds / self.compute_seconds


@dataclass(frozen=True, slots=True)
class DerivedRate:
    """The link rate of a comm ratio, with every trial of the search. The last trial has this rate."""

    requested: float
    rate: Rate
    trials: tuple[Trial, ...]

    @property
    def found(self) -> float:
        """The comm ratio of the last trial."""
        return self.trials[-1].comm_ratio

    @property
    def reached(self) -> bool:
        """Whether the last trial is within the tolerance."""
        return near(self.found, self.requested)

    def recorded(self) -> dict[str, Any]:
        """Return what a result line keeps."""
        trials = [asdict(trial) | {"comm_ratio": round(trial.comm_ratio, 3)} for trial in self.trials]
        return {
            "requested": self.requested,
            "found before": round(self.found, 3),
            "inter": str(self.rate),
            "trials": trials,
        }


def near(found: float, requested: float) -> bool:
    """Return whether a comm ratio is within the tolerance."""
    return abs(found / requested - 1) <= TOLERANCE


def derive_rate(
    requested: float,
    measure: Callable[[Rate], Trial],
    say: Say,
    first: Rate = FIRST,
    known: Sequence[tuple[Rate, Trial]] = (),
) -> DerivedRate:
    """Try link rates until one gives a comm ratio. After the last trial, take the nearest rate and try it once more.

    Args:
        requested: The comm ratio.
        measure: Returns the trial of a rate.
        say: Receives a line of progress after each trial.
        first: The first rate, if no trial is known.
        known: Trials of other comm ratios of the same workload, which give a better first rate.
    """
    tried: list[tuple[Rate, Trial]] = []
    rate = first
    if known:
        with suppress(CommRatioError):  # far from their rates, known trials may mislead
            rate = next_rate(requested, list(known))
    for _ in range(MOST_TRIALS):
        trial = measure(rate)
        tried.append((rate, trial))
        say(f"at {rate} the communication-to-computation ratio is {trial.comm_ratio:.2f} (requested {requested:g})")
        if near(trial.comm_ratio, requested):
            break
        rate = next_rate(requested, tried)
    else:
        rate = min(tried, key=lambda each: abs(each[1].comm_ratio / requested - 1))[0]
        tried.append((rate, measure(rate)))
    return DerivedRate(requested, rate, tuple(trial for _, trial in tried))


def next_rate(requested: float, tried: list[tuple[Rate, Trial]]) -> Rate:
    """Return the next rate to try.

    Communication has a part that no link changes, and one in inverse proportion to the rate. So the rate is on a line
    through the two trials that are nearest to the requested ratio, or through one trial and zero.
    """
    points = sorted(tried, key=lambda each: abs(each[1].comm_ratio / requested - 1))
    (nearest, trial) = points[0]
    slope, constant = trial.communication_seconds * nearest.bits_per_second, 0.0
    other = next((point for point in points[1:] if point[0] != nearest), None)
    if other is not None:
        inverse = 1 / nearest.bits_per_second
        run = 1 / other[0].bits_per_second - inverse
        through_both = (other[1].communication_seconds - trial.communication_seconds) / run
        if through_both > 0:  # otherwise noise was larger than the difference between the rates
            slope, constant = through_both, trial.communication_seconds - through_both * inverse
    left = requested * trial.compute_seconds - constant
    bits_per_second = slope / left if left > 0 else float("inf")
    if not _SLOWEST <= bits_per_second <= _FASTEST:
        rates = ", ".join(f"{t.comm_ratio:.2f} at {rate}" for rate, t in tried)
        end = "faster than any link here" if bits_per_second > _FASTEST else f"slower than {Rate(_SLOWEST)}"
        raise CommRatioError(
            f"a comm ratio of {requested:g} needs links {end}: it was {rates}. Request a "
            f"{'larger' if bits_per_second > _FASTEST else 'smaller'} comm ratio, or change what the case computes."
        )
    return Rate(int(float(f"{bits_per_second:.3g}")))


@dataclass(slots=True)
class Rates:
    """The link rates of comm ratios. The trials of one ratio tell the search of the next where to start."""

    tried: dict[Workload, list[tuple[Rate, Trial]]] = field(default_factory=dict)

    def of(self, comm_ratio: float, workload: Workload, say: Say, pool: Pool) -> DerivedRate:
        """Search for the link rate of a comm ratio."""
        known = self.tried.setdefault(replace(workload, micro_steps=1), [])

        def measure(rate: Rate) -> Trial:
            trial = trial_of(rate, workload, say, pool)
            known.append((rate, trial))
            return trial

        return derive_rate(comm_ratio, measure, say, FIRST, list(known))


def trial_of(inter: Rate, workload: Workload, say: Say, pool: Pool) -> Trial:
    """Measure the two parts of a comm ratio on links of a rate."""
    launches = {name: launch_of(name, workload, inter) for name in (COMMUNICATION, COMPUTE)}
    with pool.started(launches, say) as made:
        seconds = {name: min(one.ask("sample")[0] for _ in range(_TRIAL_SAMPLES)) for name, one in made.items()}
    return Trial(str(inter), seconds[COMMUNICATION], seconds[COMPUTE])


def recorded_ratio(derived: DerivedRate | None, found: float) -> tuple[dict[str, Any], list[str]]:
    """Return what a result line keeps of the comm ratio that was found in a comparison, and warnings."""
    seen = {"found": round(found, 3)}
    if derived is None:
        return seen, []
    warning = f"the communication-to-computation ratio was {found:.2f}; requested {derived.requested:g}"
    return derived.recorded() | seen, [] if near(found, derived.requested) else [warning]


# The command line -----------------------------------------------------------------------------------------------------

OTHER_CASES = "The options of an environment, such as --waiting or --nodes, make other cases."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of environments. With several values, the environments are all combinations."""
    parser.add_argument("--nodes", type=several(positive(int)), metavar="N,…", help="nodes of the cluster")
    parser.add_argument("--ranks", type=several(positive(int)), metavar="R,…", help="ranks per node")
    parser.add_argument("--inter", type=several(str), metavar="RATE,…", help="rates of the links: 200mbit, unshaped")
    parser.add_argument(
        "--comm-ratio",
        type=several(positive(float)),
        metavar="X,…",
        help="links on which FSDP2's communication takes X times the computation",
    )
    parser.add_argument("--micro-steps", type=several(positive(int)), metavar="M,…", help="micro-steps per step")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--width", type=heads_wide, help=f"of the model: a multiple of {HEADS}")
    parser.add_argument("--depth", type=positive(int), help="of the model, in blocks")
    parser.add_argument("--batch", type=positive(int), help="sequences per rank and micro-step")
    parser.add_argument("--length", type=positive(int), help="tokens per sequence")
    parser.add_argument("--waiting", action="store_true", help="blocks wait instead of using the cores that all share")
    parser.add_argument(
        "--wait",
        type=positive(float),
        metavar="SECONDS",
        help=f"wait of each forward pass of a block; --waiting alone: {_WAIT_SECONDS_PER_RANK:g} for each rank",
    )
    parser.add_argument(
        "--learning-rate",
        type=positive(float),
        default=LEARNING_RATE,
        help=f"of AdamW, which decides what exact parameter syncs send; default: {LEARNING_RATE:g}",
    )
    parser.add_argument(
        "--in-step",
        action="store_true",
        help="all ranks start each micro-step together, so that ranks that share cores do not drift apart",
    )


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """Return an argparse type for a number above 0."""

    def value(text: str) -> Number:
        try:
            found = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not 0 < found < math.inf:
            raise argparse.ArgumentTypeError(f"expected a number above 0; got {text}")
        return found

    return value


def heads_wide(text: str) -> int:
    """Parse a width of the model, for argparse."""
    width = positive(int)(text)
    if width % HEADS:
        raise argparse.ArgumentTypeError(f"expected a multiple of {HEADS}, the heads of the model; got {text}")
    return width


def several(kind: Callable[[str], Value]) -> Callable[[str], tuple[Value, ...]]:
    """Return an argparse type that reads '1,4' as (1, 4)."""

    def values(text: str) -> tuple[Value, ...]:
        if not all(part.strip() for part in text.split(",")):
            raise argparse.ArgumentTypeError(f"a value is missing between the commas of {text!r}")
        return tuple(kind(part) for part in text.split(","))

    return values


def environments_of(
    options: argparse.Namespace, shapes: Iterable[Topology], links: Iterable[NodeLink], micro_steps: Iterable[int]
) -> list[Environment]:
    """Return all combinations of the values in `options`, with the defaults given here for options without a value."""
    if options.nodes or options.ranks:
        shapes = [Topology(n, r) for n, r in product(options.nodes or (2,), options.ranks or (2,))]
    if options.comm_ratio or options.inter:
        # Slow links come before fast ones, so that candidates can stay (`comparison.Pool`).
        ratios = [NodeLink(comm_ratio=ratio) for ratio in sorted(options.comm_ratio or (), reverse=True)]
        rates = [None if text == UNSHAPED else str(Rate.parse(text)) for text in options.inter or ()]
        links = [*ratios, *(NodeLink(inter=rate) for rate in rates)]
    counts = options.micro_steps or micro_steps
    return [
        Environment(_workload(shape, count, options), link) for shape, count, link in product(shapes, counts, links)
    ]


def _workload(topology: Topology, micro_steps: int, options: argparse.Namespace) -> Workload:
    given = {name: getattr(options, name) for name in _SIZES}
    if options.waiting or options.wait is not None:
        given |= {"batch": given["batch"] or _WAITING_BATCH, "length": given["length"] or _WAITING_LENGTH}
        given["wait_seconds"] = _wait_seconds(topology) if options.wait is None else options.wait
    given |= {"in_step": options.in_step, "learning_rate": options.learning_rate}
    chosen = {name: value for name, value in given.items() if value is not None}
    return Workload(topology, micro_steps, options.dtype, **chosen)
