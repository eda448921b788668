"""Measure what protection from lost nodes costs while no node is lost: the time of steps, and the bytes of the buddies.

    protect [CASE …] [--rounds 25] [--quick] [--resume]

Each strategy trains 17 million parameters without and with `protect=10`, in processes of its own. Blocks wait, and
replay the gradients of training. Links are so slow that FSDP2's communication takes twice the computation. A sample is
a window of as many steps as lie between two snapshots. A pair is a window with protection and one without, in the same
round.

The bytes of a snapshot are those that windows with protection send between nodes more than windows without, by the
kernel's counters. For strategies whose nodes hold slices alone, they must be those of the schedule, times the share
that exact messages took. Others send next to nothing: what the ranks agree on.

After the comparison, one more snapshot is profiled: the seconds of each part of a snapshot, by the clock and of the
processor, and the bytes that ranks exchange to agree. A case takes about fifteen minutes. In the cases with a longer
wait, the cores are mostly idle, as those of a host whose GPUs compute.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import towpath
from benchmarks.environment import COMMUNICATION, COMPUTE, NodeLink, Rates, launch_of, recorded_ratio, waiting
from benchmarks.harness.candidates import LabPlace, Launch, timed
from benchmarks.harness.comparison import compare
from benchmarks.harness.figures import Check, medians
from benchmarks.harness.suite import Settings, Suite, show
from benchmarks.islands import Made
from benchmarks.peers import stepper
from benchmarks.workload import Workload
from lab import Rate
from towpath import checkpoint
from towpath.comparison import interval_of_median
from towpath.core.protection import Protection
from towpath.topology.cluster import Topology

EVERY, QUICK_EVERY = 10, 4
PAIRS, WARM_UP = 25, 2  # the first snapshot has no differences
RATIO = 2.0
MOST_SLOWER = 1.03
LEAST_BYTES, MOST_BYTES = 0.97, 1.03  # over those of the schedule, times the share of exact messages
MOST_WITHOUT_BUDDIES = 0.01  # of a node's state, in what nodes send that need no buddy
QUICK_LINK = "100mbit"
_RATES = Rates()


@dataclass(frozen=True, slots=True)
class ProtectCase:
    """Windows of steps with protection against windows without."""

    strategy: str
    workload: Workload
    link: NodeLink = field(default_factory=lambda: NodeLink(RATIO))

    @property
    def name(self) -> str:
        """The name on the command line."""
        shape, wait = self.workload.topology, self.workload.wait_seconds
        longer = f"-waiting{wait:g}" if wait == LONGER_WAIT else ""
        return f"{self.strategy}-{shape.nodes}x{shape.ranks_per_node}{longer}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Search for the link rate, compare, and profile one window."""
        workload, every, derived = self.workload, EVERY, None
        inter = Rate.parse(QUICK_LINK)
        if settings.quick:
            workload, every = workload.quick(), QUICK_EVERY
        elif self.link.comm_ratio is not None:
            derived = _RATES.of(self.link.comm_ratio, workload, settings.say, settings.pool)
            inter = derived.rate
        plain, protected, steps = self.strategy, f"{self.strategy} protect={every}", towpath.Protect(every).interval
        place = LabPlace(workload.topology, inter)
        with tempfile.TemporaryDirectory(prefix="towpath-protect-") as root:
            launches = {
                name: Launch(place, Windows, (name, workload, steps, root), WARM_UP) for name in (plain, protected)
            }
            launches |= {name: launch_of(name, workload, inter) for name in (COMMUNICATION, COMPUTE)}
            settings.pool.keep(launches.values())
            with settings.pool.started(launches, settings.say) as made:
                for name in (plain, protected):
                    made[name].ask("forget")
                found = compare(made, settings.rounds, settings.say)
                ranks = made[protected].ask("facts")
                profiles = made[protected].ask("profile")
        model, precision = workload.model(), workload.precision
        strategy = towpath.strategy(self.strategy, workload.topology, protect=towpath.Protect(every))
        scheduled = towpath.schedule(strategy, model, precision=precision).protection
        usual = medians(found.seconds)
        comm_ratio, warnings = recorded_ratio(derived, usual[COMMUNICATION] / usual[COMPUTE])
        seconds = {name: found.seconds[name] for name in (plain, protected)}
        more = sum(found.between_nodes[protected]) - sum(found.between_nodes[plain])
        sent = sum(rank["sent_bytes"] for rank in ranks) / settings.rounds
        planned = sum(profile["planned_bytes"] for profile in profiles)
        busy = median(found.between_nodes[plain]) / workload.topology.nodes / inter.bytes_per_second / usual[plain]
        profile = combined(profiles)
        return {
            "checks": [
                *time_checks(plain, protected, seconds, None if settings.quick else MOST_SLOWER),
                *bytes_checks(more / settings.rounds, sent, planned, scheduled, not settings.quick),
                Check("bytes of agreement, of a snapshot, between all ranks", profile["agreement_bytes"]),
                Check("share of the time that cables are busy, without protection", busy),
            ],
            "warnings": warnings,
            "inter": str(inter),
            "comm_ratio": comm_ratio,
            "profile": profile,
            **found.recorded(),
        }


def time_checks(
    plain: str, protected: str, seconds: Mapping[str, Sequence[float]], most: float | None
) -> Iterator[Check]:
    """Yield the median of the pairs."""
    pairs = [ours / theirs for ours, theirs in zip(seconds[protected], seconds[plain], strict=True)]
    yield Check(f"{protected} / {plain}, pairs of windows", median(pairs), most, interval=interval_of_median(pairs))


def bytes_checks(
    more: float, sent: float, planned: float, scheduled: Protection, has_limits: bool = True
) -> Iterator[Check]:
    """Yield the bytes of a snapshot over those of the schedule.

    Args:
        more: The bytes that a window with protection sent between nodes more than one without.
        sent: The bytes of exact messages of a snapshot.
        planned: The bytes of the files that these messages carried.
        scheduled: The protection as the schedule says.
        has_limits: Whether the figures have limits.
    """
    nodes = scheduled.job.nodes
    if not scheduled.buddy_bytes:
        most = MOST_WITHOUT_BUDDIES if has_limits else None
        yield Check(
            "bytes of a snapshot between nodes / the nodes' state", more / (nodes * scheduled.state_bytes), most
        )
        return
    least, most = (LEAST_BYTES, MOST_BYTES) if has_limits else (None, None)
    share = sent / planned
    what = "bytes of a snapshot between nodes / the schedule's, at the share of exact messages"
    yield Check(what, more / (nodes * scheduled.buddy_bytes * share), most, least)
    yield Check("share that exact messages take", share)
    yield Check("the same, as the schedule expects it", scheduled.expected_bytes / scheduled.buddy_bytes)


# Workers --------------------------------------------------------------------------------------------------------------


class Windows:
    """A worker whose sample is a window of steps. With protection, each window ends with the begin of a snapshot."""

    def __init__(self, rank: int, world: int, candidate: str, workload: Workload, steps: int, root: str) -> None:
        made = Made.of(candidate, workload)
        self._take = stepper(
            made.model, made.context, workload.data(rank), workload.micro_steps, optimizer=made.optimizer
        )
        self._saver = checkpoint.Saver(f"{root}/{candidate}", checkpoint.State(made.model, made.optimizer))
        self._engines: Any = [made.model.towpath_engine]
        self._step, self._interval, self._before = 0, steps, 0

    def sample(self) -> float:
        """Take a window of steps and return its seconds."""
        return timed(lambda: self._steps(self._interval))

    def forget(self) -> None:
        """Count bytes from now on."""
        self._before = self._sent_bytes

    def facts(self) -> dict[str, Any]:
        """Return the bytes that this rank sent to its buddy."""
        return {"sent_bytes": self._sent_bytes - self._before}

    def profile(self) -> dict[str, Any]:
        """Take two windows, and return the seconds and bytes of the snapshot between them, by part."""
        snapshots = self._saver._snapshots  # pyright: ignore[reportPrivateUsage]
        assert snapshots is not None
        snapshots.wait()

        def until_it_ends() -> None:
            self._steps(self._interval - 1)
            snapshots.wait()

        with Profile() as profile:
            self._steps(self._interval)
            seconds = timed(until_it_ends)
        self._steps(1)
        return {"window_seconds": seconds, **profile.found()}

    @property
    def _sent_bytes(self) -> int:
        snapshots = self._saver._snapshots  # pyright: ignore[reportPrivateUsage]
        return 0 if snapshots is None else snapshots.sent_bytes

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._take()
            self._step += 1
            self._saver.protect(self._step)


# The parts of a snapshot, by the function that does it. Indented parts are inside the one above.
_SNAPSHOTS, _BUDDIES = "towpath.protect.snapshots:Snapshots", "towpath.protect.buddies"
PARTS = {
    "training waits for the snapshot": f"{_SNAPSHOTS}.wait",
    "training begins a snapshot": f"{_SNAPSHOTS}._begin",
    "the optimizer waits for copies": "towpath.checkpoint.staging:Snapshot.before_step",
    "the thread of the snapshot": f"{_SNAPSHOTS}._take",
    "  copies": "towpath.checkpoint.staging:Snapshot.take",
    "  files": "towpath.checkpoint.storage:write_files",
    "    their checksums": "towpath.checkpoint.safe_files:checksum",
    "  exchange": f"{_BUDDIES}:BuddyExchange.run",
    "    encodes": f"{_BUDDIES}:_encoded",
    "    messages and confirmations": f"{_BUDDIES}:BuddyExchange._adapt",
    "    waits for links, and for its own copies": "",
    "  checksums of copies": f"{_SNAPSHOTS}._check_copies",
    "  publishing": f"{_SNAPSHOTS}._publish",
    "  removal of the snapshot before": "towpath.protect.memory:NodeMemory.remove",
    "  agreement, with waits for other ranks": "",
    "decodes, in the receiving thread": "towpath.codecs.exact:decode",
}
_AGREEMENT = "  agreement, with waits for other ranks"
_EXCHANGE, _ENCODES, _MESSAGES = "  exchange", "    encodes", "    messages and confirmations"
_WAITS = "    waits for links, and for its own copies"
_GROUPS = "towpath.topology.groups:Groups"


class Profile:
    """The seconds and bytes of the parts of a snapshot, while it is entered. It wraps functions of the product."""

    def __init__(self) -> None:
        self._seconds = {part: [0.0, 0.0] for part in PARTS}  # by the clock, and of the processor
        self._calls = dict.fromkeys(PARTS, 0)
        self._planned = self._agreement = self._looks = self._idle = 0
        self._lock, self._stack = threading.Lock(), ExitStack()

    def __enter__(self) -> Profile:
        for part, name in PARTS.items():
            if part == _MESSAGES:
                self._wrap(name, self._adapted)
            elif name:
                self._wrap(name, functools.partial(self._timed, part))
        self._wrap(f"{_BUDDIES}:BuddyExchange.run", self._exchanged)
        self._wrap(f"{_SNAPSHOTS}._is_turn", self._looked)
        for name in (f"{_GROUPS}.collect_objects", f"{_GROUPS}.broadcast_object"):
            self._wrap(name, self._agreed)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def found(self) -> dict[str, Any]:
        """Return what was found, with chunks and looks for an idle link."""
        waits = self._seconds[_EXCHANGE][0] - self._seconds[_ENCODES][0] - self._seconds[_MESSAGES][0]
        self._seconds[_WAITS] = [waits, 0.0]
        return {
            "seconds": self._seconds,
            "calls": self._calls,
            "planned_bytes": self._planned,
            "agreement_bytes": self._agreement,
            "looks": self._looks,
            "looks_at_turn": self._idle,
        }

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        module, _, path = name.partition(":")
        *owners, attribute = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        wrapped = getattr(owner, attribute)

        @functools.wraps(wrapped)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            return around(wrapped, *arguments, **options)

        setattr(owner, attribute, wrapper)
        self._stack.callback(setattr, owner, attribute, wrapped)

    def _add(self, part: str, seconds: float, processor: float) -> None:
        with self._lock:
            self._seconds[part][0] += seconds
            self._seconds[part][1] += processor
            self._calls[part] += 1

    def _timed(self, part: str, wrapped: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        began, processor = time.perf_counter(), time.thread_time()
        try:
            return wrapped(*arguments, **options)
        finally:
            self._add(part, time.perf_counter() - began, time.thread_time() - processor)

    def _adapted(self, wrapped: Callable[..., Any], exchange: Any, seconds: float) -> None:
        self._add(_MESSAGES, seconds, 0.0)
        wrapped(exchange, seconds)

    def _exchanged(self, wrapped: Callable[..., Any], exchange: Any, plan: Any, nodes: Any) -> Any:
        self._planned = sum(file.bytes for file in plan[exchange._groups.rank])
        return wrapped(exchange, plan, nodes)

    def _looked(self, wrapped: Callable[..., bool], *arguments: Any) -> bool:
        found = wrapped(*arguments)
        self._looks, self._idle = self._looks + 1, self._idle + found
        return found

    def _agreed(self, wrapped: Callable[..., Any], groups: Any, value: Any) -> Any:
        if not threading.current_thread().name.startswith("towpath snapshot"):
            return wrapped(groups, value)
        if wrapped.__name__ == "collect_objects" or groups.rank == 0:
            to = 1 if wrapped.__name__ == "collect_objects" else groups.world - 1
            self._agreement += to * len(pickle.dumps(value))
        return self._timed(_AGREEMENT, wrapped, groups, value)


def combined(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the profile of all ranks: the longest time of each part by the clock, and sums of everything else."""
    parts = {
        part: {
            "seconds": round(max(rank["seconds"][part][0] for rank in ranks), 4),
            "processor_seconds": round(sum(rank["seconds"][part][1] for rank in ranks), 4),
            "calls": sum(rank["calls"][part] for rank in ranks),
        }
        for part in PARTS
    }
    sums = {what: sum(rank[what] for rank in ranks) for what in ("agreement_bytes", "looks", "looks_at_turn")}
    return {"window_seconds": round(ranks[0]["window_seconds"], 4), "parts": parts, **sums}


# Suite ----------------------------------------------------------------------------------------------------------------


def shown(line: dict[str, Any]) -> str:
    """Return a result as text: its figures, and where the time of a snapshot goes."""
    profile = line.get("profile")
    if profile is None:
        return show(line)
    rows = [f"  a window of {profile['window_seconds']:.2f} s     longest rank   processor, all ranks    calls"]
    rows += [
        f"  {part:<40} {each['seconds']:>8.3f} s {each['processor_seconds']:>8.3f} s {each['calls']:>8}"
        for part, each in profile["parts"].items()
    ]
    rows.append(f"  {profile['looks_at_turn']} of {profile['looks']} looks found that a chunk may be sent")
    return "\n".join([show(line), *rows])


LONGER_WAIT = 0.08  # seconds of each block, so that cores which all ranks share are mostly idle
STRATEGIES = ("paro-iig", "mics", "zero3", "ddp")
SHAPES = (Topology(3, 2), Topology(2, 2))
CASES = (
    *(ProtectCase(name, waiting(Workload(shape, dtype="bfloat16"))) for shape in SHAPES for name in STRATEGIES),
    *(
        ProtectCase(name, replace(waiting(Workload(SHAPES[0], dtype="bfloat16")), wait_seconds=LONGER_WAIT))
        for name in STRATEGIES[:2]
    ),
)
SUITES = (Suite("protect", __doc__ or "", CASES, rounds=PAIRS, shown=shown),)
