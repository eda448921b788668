"""Our routes against the flat one: ratios of the times of one collective, measured A B A B in one run.

    python benchmarks/collectives.py [CASE …] [--rounds 5] [-o benchmarks/results/collectives.json]

Every case raises a lab, binds all contestants on the same ranks, and lets them take turns; a round is one collective of
each, between barriers. Ratios are of the medians. Absolute seconds mean nothing on a shared machine.
Results go into the file case by case: those not run stay.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import towpath
from results_file import keep, selected
from towpath import lab
from towpath.collectives.coalesced import CoalescedAllGather
from towpath.collectives.collective import Binding, Members, Scratch
from towpath.collectives.select import bind
from towpath.spec import routes
from towpath.spec.routes import Group, Op

SMALL_KILOBYTES, SMALL = 256, 16
WIDE, TALL, SQUARE = towpath.Topology(2, 4), towpath.Topology(4, 2), towpath.Topology(2, 2)


@dataclass(frozen=True, slots=True)
class Case:
    """The contestants, and the ratios asked of some of them: (ours, theirs) → at most. `intra`: of the loopbacks.

    Routes run on regions of `kilobytes`. "4 parts": ho-ring or two-hop cutting slices into so many, however short.
    """

    name: str
    op: Op
    topology: towpath.Topology = WIDE
    inter: str | None = "100mbit"
    intra: str | None = None
    contestants: tuple[str, ...] = ("flat", "hierarchical", "ho-ring")
    asked: dict[tuple[str, str], float] = field(default_factory=dict)
    kilobytes: int = 64 << 10


FAST = {("hierarchical", "flat"): 0.66, ("ho-ring", "flat"): 0.60}
SHAPED = {("ho-ring", "flat"): 0.674, ("ho-ring", "hierarchical"): 0.90}
IN_PARTS = ("1 part", "2 parts", "4 parts")
COALESCED = {("coalesced", "one after another"): 0.40}
CASES = [
    Case("gather-2x4", Op.ALL_GATHER, asked=FAST),
    Case("reduce-2x4", Op.REDUCE_SCATTER, asked=FAST),
    Case("gather-2x4-shaped", Op.ALL_GATHER, intra="1600mbit", asked=SHAPED),
    Case("reduce-2x4-shaped", Op.REDUCE_SCATTER, intra="1600mbit", asked=SHAPED),
    Case("gather-4x2", Op.ALL_GATHER, TALL),
    Case("reduce-4x2", Op.REDUCE_SCATTER, TALL),
    Case("gather-4x2-shaped", Op.ALL_GATHER, TALL, intra="1600mbit"),
    Case("reduce-4x2-shaped", Op.REDUCE_SCATTER, TALL, intra="1600mbit"),
    *(
        Case(f"{name}-{size}k-in-parts", op, SQUARE, inter, contestants=IN_PARTS, kilobytes=size)
        for size, inter in ((256, None), (1 << 10, None), (1 << 12, "1gbit"), (1 << 14, "1gbit"))
        for name, op in (("gather", Op.ALL_GATHER), ("reduce", Op.REDUCE_SCATTER))
    ),
    Case("coalesced", Op.ALL_GATHER, inter=None, contestants=("coalesced", "one after another"), asked=COALESCED),
]


def members_of(rank: int, topology: towpath.Topology) -> Members:
    everyone = tuple(range(topology.world))
    assert dist.group.WORLD is not None
    nodes = tuple(map(topology.node_of, everyone))
    return Members(dist.group.WORLD, dist.group.WORLD, Group(everyone, everyone), rank, nodes)


def contestant(kind: str, case: Case, members: Members) -> Callable[[], None]:
    scratch = Scratch(torch.device("cpu"))
    if kind not in ("coalesced", "one after another"):
        route = kind
        if kind in IN_PARTS:
            route = "ho-ring" if case.op is Op.ALL_GATHER else "two-hop"
            routes.SMALLEST_PART_BYTES = case.kilobytes * 2**10 // case.topology.world // int(kind.split()[0])
        binding = Binding(case.op, route, case.kilobytes * 2**10 // 4, torch.float32, kind)
        collective, region = bind(binding, members, "gloo", scratch), torch.zeros(binding.elements)
        mine = binding.own_slice(region, members)
        return lambda: collective.run(region, mine)
    binding = Binding(case.op, "flat", SMALL_KILOBYTES * 2**10 // 4, torch.float32, kind)
    regions = [torch.zeros(binding.elements) for _ in range(SMALL)]
    shards = [binding.own_slice(region, members).clone() for region in regions]
    if kind == "coalesced":
        together = CoalescedAllGather([binding] * SMALL, members, "gloo", scratch)
        return lambda: together.run(regions, shards)
    single = bind(binding, members, "gloo", scratch)

    def one_after_another() -> None:
        for region, shard in zip(regions, shards, strict=True):
            single.run(region, shard)

    return one_after_another


def race(rank: int, world: int, case: Case, rounds: int) -> dict[str, list[float]]:
    """What every rank does: the seconds of each round, by contestant."""
    torch.set_num_threads(1)
    members = members_of(rank, case.topology)
    runners = {kind: contestant(kind, case, members) for kind in case.contestants}
    seconds: dict[str, list[float]] = {kind: [] for kind in runners}
    for turn in range(rounds + 1):
        for kind, collective in runners.items():
            dist.barrier()
            began = time.perf_counter()
            collective()
            dist.barrier()
            if turn > 0:  # one of each warms up
                seconds[kind].append(time.perf_counter() - began)
    return seconds


def run(case: Case, rounds: int) -> dict[str, Any]:
    with lab.Lab(case.topology, inter=case.inter, intra=case.intra) as cluster:
        seconds = cluster.call(race, case, rounds, timeout_seconds=1200)[0]
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    pairs = case.asked or {(kind, case.contestants[0]): None for kind in case.contestants[1:]}
    return {
        "case": asdict(case) | {"asked": [[*pair, most] for pair, most in case.asked.items()]},
        "ratios": [[*pair, round(medians[pair[0]] / medians[pair[1]], 4), most] for pair, most in pairs.items()],
        "median_seconds": {kind: round(value, 4) for kind, value in medians.items()},
        "seconds": {kind: [round(s, 4) for s in values] for kind, values in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"which of {', '.join(c.name for c in CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    for case in selected(CASES, options.cases):
        result = run(case, options.rounds if case.inter else 10 * options.rounds)
        print(f"{case.name}  {result['median_seconds']}")
        for ours, theirs, ratio, most in result["ratios"]:
            verdict = "" if most is None else f" (asked ≤ {most}: {'met' if ratio <= most else 'MISSED'})"
            print(f"  {ours} / {theirs}: {ratio:.3f}{verdict}", flush=True)
        if options.output:
            keep(options.output, result, [c.name for c in CASES])


if __name__ == "__main__":
    main()
