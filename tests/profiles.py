"""What `towpath probe` might have measured, made up."""

from __future__ import annotations

from towpath.core.routes import Grid, Op
from towpath.plan.hardware import GroupMesh
from towpath.plan.profile import (
    TOGETHER,
    Point,
    Profile,
    collective_name,
)
from towpath.topology.cluster import Topology


def line(latency: float, rate: float, *sizes: int) -> list[tuple[int, float]]:
    return [(size, latency + size / rate) for size in sizes]


def made_profile(host: str = "here", cable: float = 2e7) -> Profile:
    """Four ranks that share two cores of one host; `cable`: bytes a second of a node."""

    def points(what: str, latency: float, rate: float, busy: float = 0.0) -> list[Point]:
        return [Point(what, n, (s, s, 9 * s), busy * n) for n, s in line(latency, rate, 4096, 1 << 20)]

    links = [
        *points("inter, one", 1e-4, cable),
        *points("inter, all", 1e-4, cable / 2, busy=4e-9),
        Point("inter, several", 4096, (1e-4 + 4096 / cable + 8e-5,)),
        *points("intra, one", 5e-5, 1e9),
        *points("intra, all", 5e-5, 5e8, busy=2e-9),
        Point("intra, several", 4096, (5e-5 + 4096 / 1e9 + 4e-5,)),
    ]
    alone = [
        *points("copy", 0, 1e10),
        *points("add", 0, 8e9),
        Point("matmul float32", 100, (2e-5,)),
        Point(TOGETHER, 100, (4e-5,)),
        *points("encode int8", 0, 1e9),
        *points("decode int8", 0, 2e9),
    ]
    collectives = [
        Point(collective_name(op, GroupMesh(Grid(nodes, width)), route), 1 << 20, (seconds, seconds))
        for op, route, nodes, width, seconds in (
            (Op.ALL_GATHER.value, "ho-ring", 2, 2, (1 << 19) / cable),
            (Op.ALL_GATHER.value, "flat", 1, 2, (1 << 19) / 5e8),
            (Op.ALL_GATHER.value, "flat", 2, 1, (1 << 20) / cable),
        )
    ]
    points = (*links, *alone, *collectives)
    return Profile(Topology(2, 2), "cpu", host, "2026-01-01 00:00", 2, 4, 4 << 30, points)
