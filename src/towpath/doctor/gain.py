"""The cost of a finding: the planner's step of a model on the cluster as it is, and as it could be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from towpath.core.formats import Precision
from towpath.doctor.findings import Finding, Severity
from towpath.plan.hardware import Cluster, Hardware, Link
from towpath.plan.model import Model
from towpath.plan.request import BF16, Request
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
    machines = [[device for rank in machine["ranks"] for device in rank["devices"]] for machine in facts["machines"]]
    every = sorted((device for devices in machines for device in devices), key=lambda device: device["flops"])
    bad = {pair for each in findings for pair in each.pairs if each.rate is not None}
    good = [way for way in facts["ways"] if not {(way["from"], way["to"]), (way["to"], way["from"])} & bad]
    rates = [way["together"] for way in good if way.get("together")]
    rates += [each.repaired for each in findings if each.repaired]
    if not (rates and all(machines)):
        return list(findings)
    healthy, usual = min(rates), every[len(every) // 2]
    latency = max((way["latency"] for way in facts["ways"] if "latency" in way), default=1e-4)
    topology = Topology(len(machines), min(map(len, machines)))
    precision = Precision() if usual["device"] == "cpu" else BF16
    request = Request(topology.world, _MEMORY_BYTES, precision, checkpointing=False, exact=False)

    @cache
    def step(rate: float, flops: float) -> float:
        """Return the seconds of the fastest lossless step."""
        link, copies = Link(rate, latency / 2), usual["copied"]
        hardware = Hardware(topology, _INSIDE, link, memory_rate=copies, sum_rate=copies)
        peaks = ("bfloat16", flops), ("float32", flops)
        found = Solver(model, Cluster("measured", hardware, _MEMORY_BYTES, peaks, 1.0), request).solve(1, _SIMULATED)
        return found.ranked[0].seconds  # pyright: ignore[reportAttributeAccessIssue]  (there is memory for everything)

    def with_seconds(each: Finding) -> Finding:
        rate, flops = min(healthy, healthy if each.rate is None else each.rate), each.flops or usual["flops"]
        now = None if each.severity is Severity.BLOCKS or not rate else step(rate, min(flops, usual["flops"]))
        return replace(each, seconds=(now, step(healthy, usual["flops"])))

    found = [each if each.severity is Severity.RISK else with_seconds(each) for each in findings]
    cost = {id(each): each.seconds[0] or float("inf") for each in found if each.seconds}
    return sorted(found, key=lambda each: (list(Severity).index(each.severity), -cost.get(id(each), 0.0)))
