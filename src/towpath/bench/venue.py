"""Where contestants run: the shaped cluster of this machine, or the job that this process is a rank of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from towpath import lab
from towpath.bench.harness.contestants import Cluster, Entry, ThisJob, preloaded
from towpath.bench.harness.failure import CaseError, reason
from towpath.bench.harness.job import Job, agreed
from towpath.bench.peers import AUTO, CandidateSpec
from towpath.bench.steps import Step
from towpath.bench.workload import Workload
from towpath.errors import LabError
from towpath.lab import Rate

WARM_TURNS = 2
_ONE_CONTESTANT_SECONDS = 900.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tried:
    """A contestant in the screening: the seconds of its quickest turn after the first, and what its ranks told."""

    seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Screening:
    """By contestant: what was found, or why there is nothing."""

    tried: dict[str, Tried]
    skipped: dict[str, str]

    @property
    def seconds(self) -> dict[str, float]:
        return {name: each.seconds for name, each in self.tried.items()}


@dataclass(frozen=True, slots=True)
class Venue:
    """`job`: the one that is running; None for a lab, whose cables have the rate `inter` (None: unshaped)."""

    job: Job | None
    inter: Rate | None = None

    def place(self, workload: Workload) -> Cluster | ThisJob:
        return Cluster(workload.topology, self.inter) if self.job is None else ThisJob(self.job)

    def entry(self, name: str, workload: Workload) -> Entry:
        """On this machine a contestant goes on to the next race on other cables; but `auto`, which has chosen for
        these."""
        stays = self.job is None and CandidateSpec.parse(name).name != AUTO
        return Entry(self.place(workload), Step, (name, workload), WARM_TURNS, stays)

    def screen(self, names: Sequence[str], workload: Workload, turns: int, say: Say) -> Screening:
        """One after the other, each in new processes of the same lab (in a job: after the one before it is gone)."""
        if self.job is not None:
            job = self.job
            return _screened(
                names, lambda name: agreed(job, name, lambda: tried(job.rank, job.world, name, workload, turns)), say
            )
        with lab.Lab(workload.topology, inter=self.inter, preload=preloaded(Step)) as cluster:

            def call(name: str) -> list[Tried]:
                return cluster.call(tried, name, workload, turns, timeout_seconds=_ONE_CONTESTANT_SECONDS)

            return _screened(names, call, say)


def _screened(names: Sequence[str], run: Callable[[str], list[Tried]], say: Say) -> Screening:
    found = Screening({}, {})
    began = time.monotonic()
    for number, name in enumerate(names, start=1):
        try:
            ranks = run(name)
        except (LabError, CaseError) as error:
            found.skipped[name] = reason(error)
            say(f"screening {number} of {len(names)}: {name}: left out ({found.skipped[name]})")
            continue
        found.tried[name] = Tried(ranks[0].seconds, max(rank.memory_bytes for rank in ranks))
        left = (time.monotonic() - began) / number * (len(names) - number)
        say(f"screening {number} of {len(names)}: {name}: {ranks[0].seconds:.3f} s a step; {left:.0f} s to go")
    return found


def tried(rank: int, world: int, name: str, workload: Workload, turns: int) -> Tried:
    """What every rank does: a turn that does not count, and then some that do."""
    step: Any = Step(rank, world, name, workload)
    step.turn()
    seconds = min(step.turn() for _ in range(turns))
    return Tried(seconds, step.facts()["memory_bytes"])


def told_by(contestants: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What the ranks of each say of their steps."""
    return {name: one.ask("facts") for name, one in contestants.items()}
