"""The simulated cluster: its links, processors and kernels. All ranks are equal, and so are all nodes.

A probe measures each collective on each mesh alone, with several sizes (Lins, section IV-A). The simulator multiplies
the phases of a transfer by the interpolated ratio of measured to predicted seconds. So transfers that run at the same
time still share links.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

from towpath.core.costs import Launches
from towpath.core.formats import DIFFERENCES, VALUES
from towpath.core.routes import Form, Grid, Op
from towpath.errors import ConfigError
from towpath.topology.cluster import Topology

# The resources that concurrent activities share, from the view of one node or one rank.
CABLE, INSIDE, SPINE, PROCESSOR = "cable", "inside", "spine", "processor"

# Where the speed of a codec is not known, as of exact ones and on hosts of devices: a processor encodes or decodes
# an element in the time in which it copies so many bytes.
_BYTES_OF_AN_ELEMENT = 16


@dataclass(frozen=True, slots=True)
class Link:
    """A link between nodes (the cable of one node), or inside a node (what one rank sends there)."""

    rate: float  # bytes per second in each direction
    latency: float  # seconds from the start of a message to its first byte
    message: float = 0.0  # seconds for which each message keeps its sender busy, however short it is
    # Core seconds per byte, both ends together. Nonzero only where processors move the bytes.
    work: float = 0.0
    message_work: float = 0.0  # core seconds per message, both ends together


@dataclass(frozen=True, slots=True)
class Racks:
    """A third level of links: each rack of `nodes` nodes shares one of `rate` bytes per second in each direction."""

    # The nodes of a full rack. A job uses `Topology.nodes_per_rack` of them.
    nodes: int
    rate: float  # the bytes per second that leave a rack, and as many that enter it

    def topology(self, nodes: int, ranks_per_node: int) -> Topology:
        """Return the topology of a job on `nodes` nodes. Racks must divide them, unless one rack holds them all."""
        return Topology(nodes, ranks_per_node, self.nodes if nodes > self.nodes else None)


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """The elements per second that one rank encodes and decodes."""

    encode: float
    decode: float


@dataclass(frozen=True, slots=True)
class OffloadMemory:
    """The memory of the host, to which states can be offloaded."""

    copy_rate: float  # bytes per second between one rank's device and the host, in each direction, while all ranks copy
    memory_rate: float  # bytes per second that one rank's share of the host's processors copies


# Where a description says nothing of the host's memory: PCIe 3.0, and a core or two for each rank.
_USUAL_HOST = OffloadMemory(10e9, 5e9)


@dataclass(frozen=True, slots=True)
class Launching:
    """The seconds for which the thread that trains is busy with each launch, where a device computes.

    `call` and `kernel` were measured on an H200 with PyTorch 2.11 and NCCL 2.28.9. `unit` is an estimate.
    """

    call: float = 55e-6  # a call of a collective, or a batch of point-to-point messages
    kernel: float = 10e-6  # a kernel, a copy, an event, or one more call or message of those launched together
    unit: float = 200e-6  # the engine's own work in a unit's pass

    def of(self, launches: Launches) -> float:
        """Return the seconds that these launches take."""
        kernels = launches.together + launches.messages + launches.codecs + launches.operations
        return (launches.calls + launches.batches) * self.call + kernels * self.kernel


@dataclass(frozen=True, slots=True)
class GroupMesh:
    """The ranks of each group of a collective, while all groups run it at once."""

    grid: Grid  # the members of a group
    # The distance between the nodes of a group. It is 1 if the group has one node.
    stride: int = 1

    def __str__(self) -> str:
        every = f" every {self.stride} nodes" if self.stride > 1 else ""
        return f"{self.grid.nodes} × {self.grid.width}{every}"


# A number of bytes, and the measured seconds over those that single messages predict.
Ratio = tuple[float, float]


@dataclass(frozen=True, slots=True)
class MeasuredCollectives:
    """The measured ratios of collectives."""

    # The nodes and ranks on which they were measured. They hold for no other.
    topology: Topology
    # By operation, mesh and route: the ratio for each measured size of a group's region, in ascending order.
    ratios: Mapping[tuple[Op, GroupMesh, str], Sequence[Ratio]]

    def ratio(self, op: Op, mesh: GroupMesh, route: str, size: float) -> float:
        """Return the ratio for a region of `size` bytes, or 1 for a collective that was not measured."""
        found = self.ratios.get((op, mesh, route))
        return interpolated(found, size) if found else 1.0


def interpolated(ratios: Sequence[Ratio], size: float) -> float:
    """Return the ratio at `size`, linear in the logarithm of the size.

    Below the smallest measured size, it is the ratio there. Above the largest size, the message model prices each
    further byte. The difference in seconds then stays, and its share shrinks with the size.
    """
    index = bisect_left(ratios, size, key=lambda each: each[0])
    if index == 0:
        return ratios[0][1]
    before, first = ratios[index - 1]
    if index == len(ratios):
        return 1 + (first - 1) * before / size
    after, last = ratios[index]
    return first + (last - first) * log(size / before) / log(after / before)


@dataclass(frozen=True, slots=True)
class Hardware:
    """The speed of a cluster's links, processors and kernels."""

    topology: Topology  # the nodes, and the ranks of each node
    intra: Link  # the link inside a node
    inter: Link  # the link between nodes
    memory_rate: float  # bytes per second that one rank copies
    sum_rate: float  # bytes per second that one rank adds to others
    # The speed of each codec. Those of exact codecs may be left out.
    codecs: tuple[tuple[str, CodecSpeed], ...] = ()
    racks: Racks | None = None  # links that several nodes share, if there are any
    # Cores that compute, move bytes and encode for `ranks_sharing` ranks together. None means that each rank has a
    # device, which computes without slowing messages down.
    cores: float | None = None
    ranks_sharing: int = 1  # ranks that share the cores of one host
    transfer_work: float = 0.0  # processor seconds of the engine for each transfer, whatever its size
    host_memory: OffloadMemory | None = None  # the host's memory, for offloaded states
    # What launches cost the thread that trains. None means that they cost nothing, as where processors compute.
    launching: Launching | None = None
    # Collectives that were measured on this cluster. They correct the costs of the same collectives.
    measured: MeasuredCollectives | None = None

    def __post_init__(self) -> None:
        self.topology.check_equal("the planner")

    @property
    def form(self) -> Form:
        """The form of transfers: ranks with a device use NCCL, which takes collectives."""
        return Form.COLLECTIVES if self.cores is None else Form.MESSAGES

    @property
    def offloading(self) -> OffloadMemory:
        """The memory for offloaded states. Where the processors compute, it is the same memory."""
        if self.host_memory is not None:
            return self.host_memory
        if self.cores is None:
            raise ConfigError(
                "offload: the cluster's description says nothing of the host's memory. Describe it under [host] "
                "(docs/guides/describe-a-cluster.md), or plan without offload."
            )
        return OffloadMemory(self.memory_rate, self.memory_rate)

    @property
    def of_hosts(self) -> Hardware:
        """The same cluster for transfers from host memory, whose processors then sum and encode."""
        host = self.host_memory or _USUAL_HOST
        speed = CodecSpeed(*(host.memory_rate / _BYTES_OF_AN_ELEMENT,) * 2)
        return replace(
            self, sum_rate=host.memory_rate, codecs=tuple((name, speed) for name, _ in self.codecs), host_memory=host
        )

    @property
    def capacities(self) -> dict[str, float]:
        """The capacity of each shared resource per second. The processor counts in ranks' seconds, or in cores."""
        found = {CABLE: self.inter.rate, INSIDE: self.intra.rate}
        if self.racks is not None:
            found[SPINE] = self.racks.rate
        found[PROCESSOR] = 1.0 if self.cores is None else self.cores
        return found

    def codec_speed(self, codec: str) -> CodecSpeed:
        """Return the speed of a codec, or raise ConfigError if the cluster's description has none."""
        speed = dict(self.codecs).get(codec)
        if speed is None and codec in (DIFFERENCES, VALUES):
            return CodecSpeed(*(self.memory_rate / _BYTES_OF_AN_ELEMENT,) * 2)
        if speed is None:
            known = ", ".join(name for name, _ in self.codecs) or "none"
            raise ConfigError(
                f"the cluster's description has no speed of the codec {codec}; it has {known}. Probe the cluster "
                "with it, or describe it under [codecs]."
            )
        return speed

    def processor(self, seconds: float) -> float:
        """Return the processor need of `seconds` of work by one rank, if all ranks that share it do the same."""
        return seconds * (1 if self.cores is None else self.ranks_sharing)


@dataclass(frozen=True, slots=True)
class StageLocation:
    """The node and host of the first copy of a pipeline stage, and how many copies are there.

    All copies of a stage do the same, so the first one represents them. Resources get one name per node, rank and
    host. Without a `name` there are no stages: all ranks do the same, and resources keep their plain names.
    """

    name: str = ""
    node: int = 0
    host: int = 0
    ranks_on_node: int = 1
    ranks_on_host: int = 1
    rack: int = 0

    @staticmethod
    def of(name: str, ranks: Sequence[int], hardware: Hardware) -> StageLocation:
        """Return the location of a stage whose copies are on `ranks`."""
        topology = hardware.topology
        node = topology.node_of(ranks[0])
        rack = topology.rack_of(node)
        on_node = sum(topology.node_of(rank) == node for rank in ranks)
        if hardware.cores is None:  # each rank has its own device
            return StageLocation(name, node, ranks[0], on_node, 1, rack)
        host = ranks[0] // hardware.ranks_sharing
        on_host = sum(rank // hardware.ranks_sharing == host for rank in ranks)
        return StageLocation(name, node, host, on_node, on_host, rack)

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The name of each resource here. Cables and racks have two: one for each direction, out of it and into it."""
        return {
            CABLE: (f"{CABLE} out of node {self.node}", f"{CABLE} into node {self.node}"),
            INSIDE: (f"{INSIDE}, {self.name}",),
            PROCESSOR: (f"{PROCESSOR} of host {self.host}",),
            SPINE: (f"{SPINE} out of rack {self.rack}", f"{SPINE} into rack {self.rack}"),
        }

    def named(self, needs: Mapping[str, float]) -> Mapping[str, float]:
        """Return the needs of a collective under the names of this location. It uses both directions equally."""
        if not self.name:
            return needs
        names = self.names
        return {name: amount for resource, amount in needs.items() for name in names[resource]}

    def capacities(self, hardware: Hardware) -> dict[str, float]:
        """Return the capacity of each resource of this location."""
        every = hardware.capacities
        return {name: every[what] for what, names in self.names.items() if what in every for name in names}


EVERYWHERE = StageLocation()


GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster, described by numbers.

    Args:
        name: Its name.
        hardware: The speed of links, processors and kernels.
        memory: Bytes of memory per rank.
        peak: The described peak FLOP/s of a rank, by dtype.
        reached: The share of the peak that matrix products reach.
    """

    name: str
    hardware: Hardware
    memory: int
    peak: tuple[tuple[str, float], ...]
    reached: float

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
        peaks = dict(self.peak)
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
