"""A cluster as `towpath probe` measured it: a file of raw points, and the description that follows from them.

    {"version": 2, "topology": {...}, "host": "...", "date": "...", "points": [...], ...}

A link is fitted as latency + bytes / rate. Collectives correct what
the simulator derives from single messages.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from towpath.core.formats import DIFFERENCES, FLOATING, VALUES, codec_names
from towpath.core.routes import Form, Grid, Op, Route
from towpath.core.transport import Transport
from towpath.errors import ConfigError, PlanError
from towpath.plan.hardware import Cluster, CodecSpeed, GroupMesh, Hardware, Launching, Link, MeasuredCollectives, Ratio
from towpath.plan.transfer_costs import MoveShape, TransferShape, phase_costs, seconds_alone
from towpath.topology.cluster import Topology

VERSION = 2
SEVERAL = 9  # the number of messages that are sent at once in "inter, several" and "intra, several"
# Processor seconds of the engine for a transfer, where processors move the bytes: the median of 33 probes, with which
# choices are better than with the measurement of each cluster itself.
_TRANSFER_WORK = 1e-3
TOGETHER = "matmul float32, all"  # all ranks at once, of the size of "matmul float32"
# What a thread launches on a device.
LAUNCHED_CALL, LAUNCHED_KERNEL = "launched all-gathers", "launched operation"

_COLLECTIVE = re.compile(r"(all-gather|reduce-scatter|all-reduce) by ([a-z-]+), (\d+) × (\d+)(?: every (\d+) nodes)?")


def collective_name(op: str, mesh: GroupMesh, route: str) -> str:
    """Return the name of a measurement of a collective by a route on a mesh."""
    return f"{op} by {route}, {mesh}"


def parse_collective_name(name: str) -> tuple[str, GroupMesh, str]:
    """Return the operation, the mesh and the route that `collective_name` received."""
    found = _COLLECTIVE.fullmatch(name)
    assert found is not None, name
    op, route, nodes, width, stride = found.groups()
    return op, GroupMesh(Grid(int(nodes), int(width)), int(stride or 1)), route


@dataclass(frozen=True, slots=True)
class Point:
    """Several repetitions of one measurement. `size` is in bytes or elements, or the side of a matrix.

    `busy` are processor seconds of the host per repetition, where the kernel reports them.
    """

    what: str
    size: int
    seconds: tuple[float, ...]
    busy: float = 0.0

    @property
    def usual(self) -> float:
        """The median of the seconds."""
        return median(self.seconds)


@dataclass(frozen=True)
class Profile:
    """The measurements of a cluster."""

    topology: Topology  # the nodes, and the ranks of each node
    device: str  # the type of the ranks' device
    host: str  # the name of rank 0's host
    date: str  # when it was measured
    cores: int  # processor cores of a host
    ranks_on_host: int  # ranks that share a host
    memory: int  # bytes of memory per rank
    points: tuple[Point, ...]  # the measurements
    budget_seconds: float = 60.0  # the time that the probe was given

    def of(self, what: str) -> list[Point]:
        """Return the points of a measurement, the smallest size first. Raise ConfigError if there are none."""
        found = [point for point in self.points if point.what == what]
        if not found:
            raise ConfigError(f"the profile has no measurement of {what!r}: probe anew.")
        return sorted(found, key=lambda point: point.size)

    def has(self, what: str) -> bool:
        """Return whether there are points of a measurement."""
        return any(point.what == what for point in self.points)

    def fit(self, what: str) -> Link:
        """Return the latency and rate that fit the points of a measurement."""
        return fitted([(point.size, point.usual) for point in self.of(what)])

    def collectives(self) -> list[Point]:
        """Return the points of collectives, with the bytes of one group's region."""
        return [point for point in self.points if _COLLECTIVE.fullmatch(point.what)]

    def singles(self) -> list[Point]:
        """Return the points of messages, kernels and matrix products that ran alone."""
        others = re.compile(r".* (by|beside) .*|launched .*|.* parameters a unit")
        return [point for point in self.points if not others.fullmatch(point.what)]

    def cluster(self, *, measured_collectives: bool | None = None) -> Cluster:
        """Return the description of the cluster, as the planner takes it.

        Args:
            measured_collectives: Whether measured collectives correct what the simulator derives from single messages.
                Without them, plans are priced by messages alone, as with the description of a cluster. By default they
                count where the backend's own collectives execute transfers, as with NCCL. Over gloo, messages predict
                steps a little better.
        """
        inter = self._link("inter") if self.has("inter, one") else self._link("intra")
        intra = self._link("intra") if self.has("intra, one") else inter
        products = {dtype: self.of(f"matmul {dtype}")[-1] for dtype in FLOATING if self.has(f"matmul {dtype}")}
        measured = {dtype: 2 * largest.size**3 / largest.usual for dtype, largest in products.items()}
        # A probe does not measure float64 and float16. They are estimates.
        single = measured["float32"]
        peak = {"float64": single / 2, "float16": measured.get("bfloat16", single)} | measured
        codecs = tuple(
            (codec, CodecSpeed(self.fit(f"encode {codec}").rate, self.fit(f"decode {codec}").rate))
            for codec in (*codec_names(), DIFFERENCES, VALUES)
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
            transfer_work=_TRANSFER_WORK if self.device == "cpu" else 0.0,
            launching=self._launching(),
        )
        if measured_collectives is None:
            measured_collectives = hardware.form is Form.COLLECTIVES
        if measured_collectives and (ratios := self._ratios(hardware)):
            hardware = replace(hardware, measured=MeasuredCollectives(self.topology, ratios))
        return Cluster(f"{self.host}, probed on {self.date}", hardware, self.memory, tuple(peak.items()), 1.0)

    def _link(self, which: str) -> Link:
        # The rate is that of all ranks sending at once. The cost of a message comes from one rank alone: with many
        # ranks, it would include the time that they wait for a processor.
        one, everyone = self.fit(f"{which}, one"), self.fit(f"{which}, all")
        largest, several = self.of(f"{which}, all")[-1], self.of(f"{which}, several")[0]
        shortest = self.of(f"{which}, one")[0].usual
        ranks = self.topology.ranks_per_node
        rate = everyone.rate * (ranks if which == "inter" else 1)
        message = max(several.usual - shortest, 0.0) / (SEVERAL - 1)
        if self.device != "cpu":
            return Link(rate, one.latency, message)
        work = largest.busy / (largest.size * self.ranks_on_host)
        # "several" ran between one rank of each node and another node, or between the ranks of the first node.
        senders = max(1, self.ranks_on_host // ranks) if which == "inter" else ranks
        message_work = several.busy / (SEVERAL * senders)
        return Link(rate, one.latency, message, work, message_work)

    def _ratios(self, hardware: Hardware) -> dict[tuple[Op, GroupMesh, str], list[Ratio]]:
        """Return the measured seconds of collectives over those that single messages predict, by size.

        The engine's own work for a transfer is in neither of them.
        """
        found: dict[tuple[Op, GroupMesh, str], list[Ratio]] = defaultdict(list)
        for point in sorted(self.collectives(), key=lambda point: point.size):
            op, mesh, route = parse_collective_name(point.what)
            ratio = point.usual / collective_seconds(point, hardware)
            found[Op(op), mesh, route].append((point.size, ratio))
        return dict(found)

    def _launching(self) -> Launching | None:
        """Return what launches cost. Where the profile has no measurement of one, it is the default."""
        if self.device == "cpu":
            return None
        names = {"call": LAUNCHED_CALL, "kernel": LAUNCHED_KERNEL}
        return replace(Launching(), **{name: self.of(what)[0].usual for name, what in names.items() if self.has(what)})

    def _cores(self) -> float | None:
        """Return how many cores compute at once. Products on one rank and on all ranks at once tell."""
        if self.device != "cpu":
            return None
        alone, together = self.of("matmul float32")[0].usual, self.of(TOGETHER)[0].usual
        return min(self.cores, self.ranks_on_host * min(1.0, alone / together))

    def to_json(self) -> str:
        """Return the profile as the text of a file."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read a profile from a file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"profile {path}: cannot be read: {error}.") from None
        return Profile.from_json(text, f"profile {path}")

    @staticmethod
    def from_json(text: str, name: str = "profile") -> Profile:
        """Read a profile from the text of a file. `name` is the name of the profile in errors."""
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
        """Raise PlanError unless the profile belongs to a cluster with this topology, host of rank 0 and device."""
        mine = {"topology": f"{self.topology}", "host of rank 0": self.host, "device": self.device}
        here = {"topology": f"{topology}", "host of rank 0": host, "device": device}
        differing = [f"{what} {mine[what]}, here {here[what]}" for what in mine if mine[what] != here[what]]
        if differing:
            raise PlanError(f"the profile is of another cluster: {'; '.join(differing)}. Probe this one.")


def fitted(points: Sequence[tuple[int, float]]) -> Link:
    """Fit latency + size / rate to pairs of size and seconds.

    The rate comes from the two largest points, and the latency from the smallest point. A regression through all
    points would follow the small messages, which a shaped link sends at once.
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
    return Link(rate, latency)


# What the simulator predicts for measured points --------------------------------------------------------------------


def collective_seconds(point: Point, hardware: Hardware) -> float:
    """Return the predicted seconds of a collective, one of `Profile.collectives`, alone."""
    op, mesh, route = parse_collective_name(point.what)
    move = MoveShape(Op(op), 1, mesh.grid, mesh.stride)
    shape = TransferShape.of_move(move, Transport(cast(Route, route)), point.size // 4, "float32", hardware.form)
    return seconds_alone(phase_costs(shape, hardware), hardware)
