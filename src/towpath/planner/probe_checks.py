"""Collectives and things done at once, as a probe measured them, beside what the simulator makes of single messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from towpath.core.routes import Grid, Op, Route
from towpath.core.strategy import MoveShape
from towpath.core.transport import Transport
from towpath.planner.profile import INTER, INTRA, NOTHING, PAIRS, Point, Profile, beside_name, route_of
from towpath.sim.fluid import BandwidthModel, Demand
from towpath.sim.hardware import CABLE, INSIDE, PROCESSOR, Hardware
from towpath.sim.loads import TransferShape, loads_of, seconds_alone


def collective_seconds(profile: Profile, point: Point) -> float:
    """What one of `profile.routes()` should take, by the messages that were measured."""
    op, route, mesh = route_of(point.what)
    nodes, width = profile.topology.nodes, profile.topology.ranks_per_node
    grid = {"all ranks": Grid(nodes, width), "in nodes": Grid(1, width), "across nodes": Grid(nodes, 1)}[mesh]
    hardware = profile.cluster().hardware
    shape = TransferShape.of_move(
        MoveShape(Op(op), 1, grid, 1), Transport(cast(Route, route)), point.size // 4, "float32"
    )
    return seconds_alone(loads_of(shape, hardware), hardware)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long it takes beside something else: measured, and as the simulator shares things out."""

    what: str
    measured: float
    foretold: float


def slowdowns(profile: Profile) -> list[Slowdown]:
    """Of each of two things that were done at once."""
    hardware = profile.cluster().hardware
    found: list[Slowdown] = []
    for pair in PAIRS:
        if not profile.has(beside_name(*pair)):  # there is no such link
            continue
        for mine, other in (pair, pair[::-1]):
            alone, beside = (profile.of(beside_name(mine, o))[-1].usual for o in (NOTHING, other))
            foretold = _foretold(profile, hardware, mine, other)
            found.append(Slowdown(beside_name(mine, other), beside / alone, foretold))
    return found


def _foretold(profile: Profile, hardware: Hardware, mine: str, other: str) -> float:
    """Both go on for ever, each at the rate that is left to it."""
    fluid = BandwidthModel(hardware.capacities)
    flows = [_flow(profile, what, hardware, fluid) for what in (mine, other)]
    for flow in flows:
        fluid.start(flow)
    fluid.share_out()
    return 1 / (flows[0].seconds * flows[0].rate)


def _flow(profile: Profile, what: str, hardware: Hardware, fluid: BandwidthModel) -> Demand:
    point = profile.of(beside_name(what, NOTHING))[-1]
    if what not in (INTER, INTRA):
        # By itself, as one rank takes it: all of them at once is what the simulator is asked.
        alone = next(p for p in profile.of(what) if p.size == point.size).usual
        needs = {PROCESSOR: hardware.processor(alone)}
        return Demand(max(alone, fluid.alone(needs)), needs, keeps_busy=1.0)
    link = hardware.inter if what == INTER else hardware.intra
    work = hardware.ranks_sharing * (point.size * link.work + link.message_work)
    carried = {CABLE: point.size * profile.topology.ranks_per_node} if what == INTER else {INSIDE: float(point.size)}
    needs = carried | ({PROCESSOR: work} if work else {})
    return Demand(max(point.usual, fluid.alone(needs)), needs, busy_seconds=link.busy_latency)
