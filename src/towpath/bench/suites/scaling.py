"""Steps on 1, 2, 4 and 8 nodes: weak scaling, where each rank computes the same, and strong scaling, where all do.

    towpath bench scaling [CASE …] [--ranks 2] [--inter 200mbit]
                          [--contestants mics,paro-iig] [--rounds 6] [--quick]

What is measured are seconds of a step, bytes that leave the nodes, exposed seconds, and the processors' seconds of all
ranks: on a machine with fewer cores than ranks, wall time is of the cores, and these tell what is not. `accounted` is
the processors' seconds of a step over its wall time and the cores; near 1 a step takes what the cores need. Of ours,
bytes are to be within 3 % of the schedule's. Where blocks wait (--wait 0.1: a rank's blocks as long on every number of
nodes), what a step takes besides its computation and the optimizer stands beside what the schedule leaves exposed: the
simulator's, for perfect overlap. Then strong scaling is waiting in proportion to a rank's share, too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import towpath
from towpath.bench import table
from towpath.bench.environment import COMPUTE, OTHER_CASES, Environment, Link, add_options, asked_for, several
from towpath.bench.field import Entrant
from towpath.bench.harness.figures import Check, medians
from towpath.bench.harness.suite import Settings, Suite
from towpath.bench.peers import AUTO, CandidateSpec
from towpath.bench.suites.strategies import check_contestants, floors_of, measured
from towpath.bench.venue import Venue
from towpath.bench.workload import Workload
from towpath.errors import ConfigError
from towpath.lab import Rate
from towpath.topology.cluster import Topology

NODES = (1, 2, 4, 8)
RANKS_PER_NODE = 2
LINK = Link(inter="200mbit")
CONTESTANTS = ("mics", "paro-iig", "zero3", "hsdp tuned ring", "fsdp2 tuned ring")
# Sequences of all ranks together, where the work is the same for all: two for each of eight nodes' ranks.
STRONG_BATCH = 32
LEAST_BYTES, MOST_BYTES = 0.97, 1.03
WIDTH, DEPTH = 192, 6
WAIT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    kind: str  # weak or strong
    workload: Workload
    link: Link
    contestants: Sequence[str] = CONTESTANTS

    def measure(self, settings: Settings) -> dict[str, Any]:
        workload = self.workload.quick() if settings.quick else self.workload
        inter = Rate.parse(self.link.inter) if self.link.inter is not None else None
        entrants = [Entrant.of(name, workload.topology, workload.dtype) for name in self.contestants]
        found, failures = measured(entrants, Venue(settings.job, inter), workload, settings)
        usual = medians(found.pop("run").seconds)
        raced = [each for each in entrants if each.name not in failures]
        cores = len(os.sched_getaffinity(0))
        floors = floors_of(raced, workload, usual[COMPUTE], inter) if settings.job is None else {}
        accounted = {each.name: found["processor_seconds"][each.name] / usual[each.name] / cores for each in raced}
        return {
            "checks": [
                *(Check(f"{name}: seconds of a step", usual[name]) for name in accounted),
                *(Check(f"{name}: accounted", value) for name, value in accounted.items()),
                *bytes_checks(found["bytes_between_nodes"], raced, workload),
                *exposed_checks(usual, found["optimizer_seconds"], floors, workload),
            ],
            "floor_seconds": floors,
            "kind": self.kind,
            "inter": None if inter is None else str(inter),
            "contestants": {e.name: {"ours": e.ours, "lossless": e.lossless, "helped": e.helped} for e in raced},
            "skipped": failures,
            **found,
        }


def bytes_checks(sent: Mapping[str, int], raced: Sequence[Entrant], workload: Workload) -> Iterator[Check]:
    """Of ours, where anything leaves a node: what the kernel's counters say of the interfaces, over the schedule's."""
    for each in raced if workload.topology.nodes > 1 else ():
        kind = CandidateSpec.parse(each.name)
        if each.ours and kind.name != AUTO:
            strategy = kind.strategy(workload.topology)
            schedule = towpath.schedule(strategy, workload.model(), workload.micro_steps, workload.precision)
            ratio = sent[each.name] / schedule.inter_bytes
            yield Check(f"{each.name}: bytes / the schedule's", ratio, at_most=MOST_BYTES, at_least=LEAST_BYTES)


def exposed_checks(
    usual: Mapping[str, float], optimizer: Mapping[str, float], floors: Mapping[str, float], workload: Workload
) -> Iterator[Check]:
    """Where blocks wait: what shares the cores with nothing, and so can be held against the simulator's floor."""
    computing = workload.micro_steps * usual[COMPUTE]
    for name, floor in floors.items() if workload.wait_seconds is not None else ():
        yield Check(f"{name}: exposed seconds", usual[name] - optimizer[name] - computing)
        yield Check(f"{name}: exposed seconds, the schedule's", floor - computing)


def cases_of(environments: Sequence[Environment], contestants: Sequence[str] = CONTESTANTS) -> list[Case]:
    """Each environment twice: with its own batch, and with its share of a batch of all."""
    found: list[Case] = []
    for each in environments:
        workload = each.workload
        share = max(1, STRONG_BATCH // workload.topology.world)
        found.append(Case(f"weak-{each.name}", "weak", workload, each.link, contestants))
        wait = None if workload.wait_seconds is None else workload.wait_seconds * share / workload.batch
        strong = replace(workload, batch=share, wait_seconds=wait)
        found.append(Case(f"strong-{each.name}", "strong", strong, each.link, contestants))
    return found


def chosen(cases: Sequence[Any], options: argparse.Namespace) -> list[Case]:
    if options.regime:
        raise ConfigError("--regime: cables keep their rate here, whatever the number of nodes; give --inter RATE.")
    options.width, options.depth = options.width or WIDTH, options.depth or DEPTH
    ranks = options.ranks or (RANKS_PER_NODE,)
    nodes = NODES[:2] if options.quick else NODES
    if options.waiting and options.wait is None:
        options.wait = WAIT_SECONDS  # of a rank on every number of nodes
    environments = asked_for(options, [Topology(n, r) for r in ranks for n in nodes], [LINK], (1,))
    cases = cases_of(environments, options.contestants or CONTESTANTS)
    for case in cases:
        check_contestants(case.contestants, case.workload)
        if options.job is None and case.kind == "strong" and STRONG_BATCH % case.workload.topology.world:
            raise ConfigError(
                f"{case.workload.topology} has {case.workload.topology.world} ranks, which cannot share "
                f"{STRONG_BATCH} sequences evenly: give --nodes and --ranks whose product divides {STRONG_BATCH}."
            )
    return cases


def scaling_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    usual = ",".join(CONTESTANTS)
    parser.add_argument("--contestants", type=several(str), metavar="NAME,…", help=f"default: {usual}")


def _all_cases() -> list[Case]:
    workloads = [Workload(Topology(n, RANKS_PER_NODE), 1, "bfloat16", width=WIDTH, depth=DEPTH) for n in NODES]
    return cases_of([Environment(workload, LINK) for workload in workloads])


SUITE = Suite(
    "scaling",
    __doc__ or "",
    _all_cases(),
    options=scaling_options,
    chosen=chosen,
    other_cases=OTHER_CASES,
    shown=table.strategies_table,
    in_job=True,
)
