"""A cluster as the planner knows it, and how a TOML file describes one.

    nodes = 16
    ranks_per_node = 8
    memory = 80                     # GiB per rank

    [compute]
    bfloat16 = 312                  # peak TFLOP/s, by dtype
    float32 = 19.5
    reached = 0.55                  # the share of the peak that matrix products reach
    memory = 1300                   # GB/s that a rank copies

    [intra]                         # inside a node
    gigabytes = 240                 # per second, for each rank and direction
    latency = 8                     # microseconds from the start of a message to its first byte
    message = 1                     # microseconds for which each message keeps its sender busy

    [inter]                         # between nodes
    gigabits = 400                  # per second, for each node and direction
    latency = 15
    message = 2

    [racks]                         # if nodes of different racks share fewer links
    nodes = 32                      # of each full rack; a larger number of nodes must be a multiple of it
    gigabits = 3200                 # per second, for each rack and direction

    [host]                          # the host's memory, for offloaded states
    copies = 20                     # GB/s between it and each rank's device, each direction, while all copy
    memory = 25                     # GB/s that a rank's share of the processors copies

    [launch]                        # microseconds of the thread that trains; default: as measured on an H200
    call = 55                       # for each call of a collective; also `kernel` and `unit`

    [codecs]                        # 10⁹ elements per second that a rank encodes and decodes; default: memory speed
    int8 = [250, 300]

`gigabits` and `gigabytes` are measured rates, not the nominal rates of the cables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from towpath.core.formats import FLOATING, Shares, codec_names
from towpath.errors import ConfigError
from towpath.plan.hardware import CodecSpeed, Hardware, Launching, Link, OffloadMemory, Racks
from towpath.topology.cluster import Topology

GIB = 1 << 30
# A codec reads an element and writes less, or the other way round. It is about as fast as a copy of the element.
_BYTES_OF_A_CODED_ELEMENT = 4.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster, described by numbers.

    Args:
        name: Its name.
        hardware: The speed of links, processors and kernels.
        memory: Bytes of memory per rank.
        peak: The described peak FLOP/s of a rank, by dtype.
        reached: The share of the peak that matrix products reach.
        estimated: Estimated FLOP/s of other dtypes.
    """

    name: str
    hardware: Hardware
    memory: int
    peak: tuple[tuple[str, float], ...]
    reached: float
    estimated: tuple[tuple[str, float], ...] = ()

    @property
    def topology(self) -> Topology:
        """The nodes, and the ranks of each node."""
        return self.hardware.topology

    def peak_of(self, dtype: str) -> float:
        """Return the peak FLOP/s of a rank.

        Args:
            dtype: The dtype of the computation, such as "bfloat16".

        Raises:
            ConfigError: If the description does not have this dtype.
        """
        peaks = dict(self.estimated) | dict(self.peak)
        if dtype not in peaks:
            raise ConfigError(
                f"cluster {self.name}: [compute] says nothing of {dtype}; it has {', '.join(peaks)}. Add a line "
                f"'{dtype} = …' (TFLOP/s), or plan with --precision."
            )
        return peaks[dtype]

    def flops_of(self, dtype: str) -> float:
        """Return the FLOP/s that matrix products of a dtype reach."""
        return self.peak_of(dtype) * self.reached

    def on(self, nodes: int, ranks_per_node: int | None = None) -> Cluster:
        """Return the same cluster with another number of nodes, and of ranks on each."""
        ranks, racks = ranks_per_node or self.topology.ranks_per_node, self.hardware.racks
        topology = Topology(nodes, ranks) if racks is None else racks.topology(nodes, ranks)
        return replace(self, hardware=replace(self.hardware, topology=topology))

    def at_rate(self, rate: float) -> Cluster:
        """Return the same cluster with links between nodes of another rate, in bytes a second."""
        return replace(self, hardware=replace(self.hardware, inter=replace(self.hardware.inter, rate=rate)))

    def with_encoded_shares(self, shares: Shares) -> Cluster:
        """Return the cluster with these measured shares of exact messages."""
        return replace(self, hardware=replace(self.hardware, encoded_shares=shares))


def from_table(name: str, table: Mapping[str, Any]) -> Cluster:
    """Return the cluster that a parsed TOML file describes. Raise ConfigError if the file is not valid."""
    root = _ClusterTable(f"cluster {name}", "", dict(table))
    topology = Topology(root.count("nodes"), root.count("ranks_per_node"))
    memory = int(root.number("memory") * GIB)
    compute, intra, inter = root.section("compute"), root.section("intra"), root.section("inter")
    peak = tuple((dtype, compute.number(dtype) * 1e12) for dtype in FLOATING if dtype in compute.table)
    if not peak:
        raise ConfigError(f"cluster {name}: [compute] needs TFLOP/s of one dtype at least: {', '.join(FLOATING)}.")
    copies = compute.number("memory") * 1e9
    reached = compute.number("reached")
    if reached > 1:
        compute.refuse("reached", "a share from 0 to 1")
    links = (
        Link(intra.number("gigabytes") * 1e9, intra.number("latency") / 1e6, intra.number("message") / 1e6),
        Link(inter.number("gigabits") * 1e9 / 8, inter.number("latency") / 1e6, inter.number("message") / 1e6),
    )
    racks = None
    if "racks" in root.table:
        section = root.section("racks")
        racks = Racks(section.count("nodes"), section.number("gigabits") * 1e9 / 8)
        section.end()
        topology = racks.topology(topology.nodes, topology.ranks_per_node)
    host_memory = None
    if "host" in root.table:
        section = root.section("host")
        host_memory = OffloadMemory(section.number("copies") * 1e9, section.number("memory") * 1e9)
        section.end()
    launching = Launching()
    if "launch" in root.table:
        section = root.section("launch")
        told = [each.name for each in fields(Launching) if each.name in section.table]
        launching = replace(launching, **{name: section.number(name) / 1e6 for name in told})
        section.end()
    codecs = _codecs(root, copies)
    for section in (compute, intra, inter, root):
        section.end()
    hardware = Hardware(
        topology,
        *links,
        memory_rate=copies,
        sum_rate=copies,
        codecs=codecs,
        racks=racks,
        host_memory=host_memory,
        launching=launching,
    )
    return Cluster(name, hardware, memory, peak, reached)


def _codecs(root: _ClusterTable, copies: float) -> tuple[tuple[str, CodecSpeed], ...]:
    usual = CodecSpeed(copies / _BYTES_OF_A_CODED_ELEMENT, copies / _BYTES_OF_A_CODED_ELEMENT)
    speeds = dict.fromkeys(codec_names(), usual)
    if "codecs" in root.table:
        section = root.section("codecs")
        for codec in [codec for codec in codec_names() if codec in section.table]:
            pair = section.take(codec)
            if not (isinstance(pair, list) and len(pair) == 2 and all(_is_positive(rate) for rate in pair)):
                section.refuse(codec, "[encode, decode], in 10⁹ elements a second", pair)
            speeds[codec] = CodecSpeed(pair[0] * 1e9, pair[1] * 1e9)
        section.end()
    return tuple(speeds.items())


class _ClusterTable:
    """A table of the file. Keys are taken out one by one, and the keys that are left at the end are unknown."""

    def __init__(self, file: str, name: str, table: dict[str, Any]) -> None:
        self._file, self._name, self.table = file, name, table

    def take(self, key: str) -> Any:
        return self.table.pop(key, None)

    def number(self, key: str) -> float:
        value = self.take(key)
        if not _is_positive(value):
            self.refuse(key, "a number above 0", value)
        return float(value)

    def count(self, key: str) -> int:
        value = self.take(key)
        if type(value) is not int or value < 1:
            self.refuse(key, "a whole number of at least 1", value)
        return value

    def section(self, key: str) -> _ClusterTable:
        value = self.take(key)
        if not isinstance(value, dict):
            raise ConfigError(f"{self._file}: expected a section [{key}]; got {value!r}.")
        return _ClusterTable(self._file, key, dict(value))

    def refuse(self, key: str, expected: str, value: Any = None) -> NoReturn:
        where = f"{self._name}.{key}" if self._name else key
        got = "it is missing" if value is None else f"got {value!r}"
        raise ConfigError(f"{self._file}: {where}: {got}; expected {expected}.")

    def end(self) -> None:
        if self.table:
            where = f"[{self._name}] " if self._name else ""
            raise ConfigError(f"{self._file}: {where}unknown key {next(iter(self.table))!r}.")


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")
