"""What a finding costs a training: the planner's step of a model on the cluster as it is, and as it could be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from towpath.core.formats import Precision
from towpath.doctor.findings import Finding, Severity
from towpath.plan.hardware import Cluster, Hardware, Link
from towpath.plan.model import Model
from towpath.plan.request import BF16, Infeasible, Request
from towpath.plan.solver import Solver
from towpath.topology.cluster import Topology

# The strategy with the shortest step is wanted, whether or not the model fits, for one sequence of each rank.
_MEMORY_BYTES = 1 << 60
_SIMULATED = 6
_INSIDE = Link(10e9, 20e-6)  # of each rank inside a machine, which was not measured


def priced(facts: Mapping[str, Any], findings: Sequence[Finding], model: Model) -> list[Finding]:
    """Return the findings with the seconds of a step, those that cost most first.

    The first of the seconds is that of a cluster where nothing else is wrong.
    """
    devices = [[d for rank in machine["ranks"] for d in rank.get("devices", [])] for machine in facts["machines"]]
    bad = {pair for finding in findings for pair in finding.pairs}
    carried = [
        pair[way]["together"]
        for pair in facts["pairs"]
        for way in ("out", "back")
        if tuple(pair["machines"]) not in bad and pair[way].get("together")
    ]
    healthy = min([*carried, *(each.repaired for each in findings if each.repaired)], default=None)
    if healthy is None or not all(devices):
        return list(findings)
    every = sorted((device for each in devices for device in each), key=lambda device: device["flops"])
    usual = every[len(every) // 2]
    latency = max((pair["latency"] for pair in facts["pairs"] if pair.get("latency")), default=1e-4)
    topology = Topology(len(devices), min(map(len, devices)))

    @cache
    def step(rate: float, flops: float) -> float | None:
        return _step_seconds(model, topology, Link(rate, latency / 2), flops, usual)

    base = step(healthy, usual["flops"])
    if base is None:
        return list(findings)
    found: list[Finding] = []
    for each in findings:
        if each.severity is Severity.BLOCKS:
            each = replace(each, seconds=(None, base))
        elif each.rate is not None or each.flops is not None:
            rate = healthy if each.rate is None else min(healthy, each.rate)
            now = step(rate, min(usual["flops"], each.flops or usual["flops"])) if rate else None
            each = replace(each, seconds=(now, base))
        found.append(each)
    order = list(Severity)
    return sorted(found, key=lambda each: (order.index(each.severity), -_cost(each)))


def _cost(finding: Finding) -> float:
    if finding.seconds is None:
        return 0.0
    return float("inf") if finding.seconds[0] is None else finding.seconds[0] - finding.seconds[1]


def _step_seconds(
    model: Model, topology: Topology, link: Link, flops: float, device: Mapping[str, Any]
) -> float | None:
    """Return the seconds of the fastest lossless step of the model."""
    on_gpu = device["device"] != "cpu"
    hardware = Hardware(topology, _INSIDE, link, memory_rate=device["copied"], sum_rate=device["copied"])
    peaks = (("bfloat16", flops), ("float32", flops))
    request = Request(
        topology.world, _MEMORY_BYTES, BF16 if on_gpu else Precision(), checkpointing=False, exact=False
    )
    found = Solver(model, Cluster("as measured", hardware, _MEMORY_BYTES, peaks, 1.0), request).solve(1, _SIMULATED)
    return None if isinstance(found, Infeasible) else found.ranked[0].seconds
