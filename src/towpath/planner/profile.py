"""What `towpath probe` has measured, as a file: raw points, and the cluster that they make.

    {"version": 1, "topology": {...}, "host": "...", "date": "...", "points": [...], ...}

A link is latency + bytes / rate; of its points the one that is farthest off from that is said with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from towpath.core.formats import FLOATING, codec_names
from towpath.core.routes import Op
from towpath.errors import ConfigError, PlanError
from towpath.planner.cluster import Cluster
from towpath.sim.hardware import CodecSpeed, Hardware, HostWork, Link, PassWork
from towpath.topology.cluster import Topology

VERSION = 2
SEVERAL = 9  # messages that are sent at once where more than one is
TOGETHER = "matmul float32, all"  # by all ranks at once, of the size of 'matmul float32'


# What the engine and the optimizer take of the processor is measured on models of so many units, of so many parameters.
@dataclass(frozen=True, slots=True)
class HostShape:
    units: int
    parameters: int  # of each unit


FEW, MANY_UNITS, MANY_PARAMETERS = HostShape(2, 4), HostShape(16, 4), HostShape(2, 32)
HOST_SHAPES = (FEW, MANY_UNITS, MANY_PARAMETERS)
HOST_PARTS = ("forward", "backward", "optimizer")


def host_name(kind: str, part: str, shape: HostShape) -> str:
    return f"{part} {kind}, {shape.parameters} parameters a unit"


# What a step does at the same time.
INTER, INTRA, PRODUCT, ENCODING, NOTHING = "inter, all", "intra, all", "matmul float32", "encode int8", "nothing"
PAIRS = ((PRODUCT, INTER), (PRODUCT, INTRA), (INTRA, INTER), (PRODUCT, ENCODING))


def beside_name(what: str, other: str) -> str:
    return f"{what} beside {other}"


MESHES = ("all ranks", "in nodes", "across nodes")


def route_name(op: Op, route: str, mesh: str) -> str:
    """What a measurement of a route's collective is called. `mesh`: all ranks, or those in nodes or across nodes."""
    assert mesh in MESHES, mesh
    return f"{op.value} by {route}, {mesh}"


def route_of(name: str) -> tuple[str, str, str]:
    """The operation, the route and the mesh that `route_name` was given."""
    op, _, rest = name.partition(" by ")
    route, _, mesh = rest.partition(", ")
    return op, route, mesh


@dataclass(frozen=True, slots=True)
class Point:
    """`what` was done with `size` (bytes, elements or a matrix's side), several times: its seconds, each time.

    `busy`: processor seconds of the whole host, each time, where the kernel tells them.
    """

    what: str
    size: int
    seconds: tuple[float, ...]
    busy: float = 0.0

    @property
    def usual(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class Fit:
    """`error`: of the point that is farthest off, as a share of what was measured."""

    latency: float
    rate: float
    error: float


@dataclass(frozen=True)
class Profile:
    """`budget_seconds`: how long its probe was to take."""

    topology: Topology
    device: str
    host: str
    date: str
    cores: int
    ranks_on_host: int
    memory: int
    points: tuple[Point, ...]
    budget_seconds: float = 60.0

    def of(self, what: str) -> list[Point]:
        found = [point for point in self.points if point.what == what]
        if not found:
            raise ConfigError(f"the profile has no measurement of {what!r}: probe anew.")
        return sorted(found, key=lambda point: point.size)

    def has(self, what: str) -> bool:
        return any(point.what == what for point in self.points)

    def fit(self, what: str) -> Fit:
        return fitted([(point.size, point.usual) for point in self.of(what)])

    def routes(self) -> list[Point]:
        """Of whole collectives; nothing is fitted to them."""
        return [point for point in self.points if point.what.endswith(tuple(f", {mesh}" for mesh in MESHES))]

    def host_points(self) -> list[Point]:
        """Of the engine's and the optimizer's own work."""
        return [point for point in self.points if point.what.endswith("parameters a unit")]

    def pairs(self) -> list[Point]:
        """Of things that were done at once."""
        return [point for point in self.points if " beside " in point.what]

    def singles(self) -> list[Point]:
        """Of messages, kernels and products, each by itself."""
        others = {point.what for point in (*self.routes(), *self.host_points(), *self.pairs())}
        return [point for point in self.points if point.what not in others]

    def cluster(self) -> Cluster:
        """As the planner takes it."""
        inter = self._link("inter") if self.has("inter, one") else self._link("intra")
        intra = self._link("intra") if self.has("intra, one") else inter
        measured = {d: _flops(self.of(f"matmul {d}")) for d in FLOATING if self.has(f"matmul {d}")}
        codecs = tuple(
            (codec, CodecSpeed(self.fit(f"encode {codec}").rate, self.fit(f"decode {codec}").rate))
            for codec in codec_names()
            if self.has(f"encode {codec}")
        )
        hardware = Hardware(
            self.topology,
            intra,
            inter,
            memory_rate=self.fit("copy").rate,
            sum_rate=self.fit("add").rate,
            codecs=codecs,
            cores=self._cores(),
            ranks_sharing=self.ranks_on_host,
            host=self._host_work(intra, inter),
        )
        peak, estimated = tuple(measured.items()), tuple(_estimated(measured).items())
        return Cluster(f"{self.host}, probed on {self.date}", hardware, self.memory, peak, 1.0, estimated)

    def _link(self, which: str) -> Link:
        """Its rate is that of all ranks at once. What a message costs is told by one rank alone: of many at once, those
        that wait for a processor would count for what they wait for."""
        one, everyone = self.fit(f"{which}, one"), self.fit(f"{which}, all")
        largest, several = self.of(f"{which}, all")[-1], self.of(f"{which}, several")[0]
        ranks = self.topology.ranks_per_node
        rate = everyone.rate * (ranks if which == "inter" else 1)
        message = max(several.usual - self.of(f"{which}, one")[0].usual, 0.0) / (SEVERAL - 1)
        if self.device != "cpu":
            return Link(rate, one.latency, message)
        work = largest.busy / (largest.size * self.ranks_on_host)
        # One rank of each node sends to another node, and those of the first node inside it.
        senders = max(1, self.ranks_on_host // ranks) if which == "inter" else ranks
        message_work = several.busy / (SEVERAL * senders)
        return Link(rate, one.latency, message, work, message_work, self._busy_latency(which))

    def _busy_latency(self, which: str) -> float:
        """What the smallest message takes longer while all ranks compute and send."""
        beside = self.of(beside_name(f"{which}, all", PRODUCT))[0].usual
        return max(0.0, beside - self.of(f"{which}, one")[0].usual)

    def _host_work(self, intra: Link, inter: Link) -> HostWork:
        """What is more of a sharded model than of a bare one, by unit and by parameter; of the optimizer all."""
        if self.device != "cpu":
            return HostWork()
        forward, backward = self._more("forward", "sharded"), self._more("backward", "sharded")
        optimizer = self._host_seconds("sharded", "optimizer", MANY_PARAMETERS)
        optimizer -= self._host_seconds("sharded", "optimizer", FEW)
        more = MANY_PARAMETERS.units * (MANY_PARAMETERS.parameters - FEW.parameters)
        # In a forward pass each unit is gathered, in a backward pass gathered and reduced, by a ring.
        everywhere = [self._more(part, "over all ranks").unit for part in ("forward", "backward")]
        messages = (self.topology.world - 1) * (inter if self.topology.nodes > 1 else intra).message_work
        transfer = (sum(everywhere) - forward.unit - backward.unit) / 3 - messages
        return HostWork(forward, backward, max(0.0, optimizer / more), max(0.0, transfer))

    def _host_seconds(self, kind: str, part: str, shape: HostShape) -> float:
        return next(p.usual for p in self.of(host_name(kind, part, shape)) if p.size == shape.units)

    def _more(self, part: str, kind: str) -> PassWork:
        def more(shape: HostShape) -> float:
            return self._host_seconds(kind, part, shape) - self._host_seconds("bare", part, shape)

        parameters = MANY_PARAMETERS.units * (MANY_PARAMETERS.parameters - FEW.parameters)
        parameter = max(0.0, (more(MANY_PARAMETERS) - more(FEW)) / parameters)
        unit = (more(MANY_UNITS) - more(FEW)) / (MANY_UNITS.units - FEW.units) - FEW.parameters * parameter
        return PassWork(max(0.0, unit), parameter)

    def _cores(self) -> float | None:
        """How many of them compute at once, as products of matrices tell: each rank alone, and all together."""
        if self.device != "cpu":
            return None
        alone, together = self.of("matmul float32")[0].usual, self.of(TOGETHER)[0].usual
        return min(self.cores, self.ranks_on_host * min(1.0, alone / together))

    def to_json(self) -> str:
        found = asdict(self)
        return json.dumps({"version": VERSION, **found}, indent=1) + "\n"

    @staticmethod
    def load(path: str | Path) -> Profile:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"profile {path}: cannot be read: {error}.") from None
        return Profile.from_json(text, f"profile {path}")

    @staticmethod
    def from_json(text: str, name: str = "profile") -> Profile:
        """`name`: what an error calls it."""
        try:
            found: dict[str, Any] = json.loads(text)
            version = found.pop("version")
            if version != VERSION:
                raise ConfigError(f"{name}: version {version}; this Towpath reads {VERSION}. Probe anew.")
            points = tuple(Point(p["what"], p["size"], tuple(p["seconds"]), p["busy"]) for p in found.pop("points"))
            return Profile(topology=Topology(**found.pop("topology")), points=points, **found)
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{name}: cannot be read: {error}. Expected what `towpath probe` writes.") from None

    def check(self, topology: Topology, host: str, device: str) -> None:
        """It must be of the cluster that runs."""
        mine = {"topology": f"{self.topology}", "host of rank 0": self.host, "device": self.device}
        here = {"topology": f"{topology}", "host of rank 0": host, "device": device}
        differing = [f"{what} {mine[what]}, here {here[what]}" for what in mine if mine[what] != here[what]]
        if differing:
            raise PlanError(f"the profile is of another cluster: {'; '.join(differing)}. Probe this one.")


def fitted(points: Sequence[tuple[int, float]]) -> Fit:
    """latency + size / rate. The rate is what the largest point takes more than the one before it, the latency what is
    left of the smallest: a line through all points would bend to those that a shaped link lets pass at once.
    """
    ordered = sorted(points)
    size, seconds = ordered[-1]
    rate = size / seconds
    if len(ordered) > 1:
        before, earlier = ordered[-2]
        if seconds > earlier:
            rate = (size - before) / (seconds - earlier)
    smallest, least = ordered[0]
    latency = max(least - smallest / rate, 0.0) if len(ordered) > 1 else 0.0
    error = max(abs(latency + size / rate - seconds) / seconds for size, seconds in ordered)
    return Fit(latency, rate, error)


def _estimated(measured: Mapping[str, float]) -> dict[str, float]:
    """Return FLOP/s of dtypes that a probe leaves out: float64 at half the rate of float32, float16 at bfloat16's."""
    single = measured["float32"]
    return {"float64": single / 2, "float16": measured.get("bfloat16", single)}


def _flops(points: Sequence[Point]) -> float:
    best = max(points, key=lambda point: point.size)
    return 2 * best.size**3 / best.usual
