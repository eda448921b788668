"""What the simulated cluster can do: links, memory, processors, kernels. All ranks are alike, and all nodes."""

from __future__ import annotations

from dataclasses import dataclass

from towpath.errors import StrategyError
from towpath.topology.cluster import Topology


@dataclass(frozen=True, slots=True)
class Link:
    """`rate`: bytes a second, each way: of a node's cable, or of what one rank sends inside its node.

    `latency`: seconds from the start of a message to its first byte, and `busy_latency` more of them while the
    processors that carry it compute: a thread that a message wakes waits there for its turn. `message`: seconds that
    each message keeps its sender busy, however short. `work`, `message_work`: seconds of a processor core that each
    byte, and each message, takes, at both ends together, where processors move them.
    """

    rate: float
    latency: float
    message: float = 0.0
    work: float = 0.0
    message_work: float = 0.0
    busy_latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Racks:
    """A third level of links: `nodes` nodes behind one that carries `rate` bytes a second, each way."""

    nodes: int
    rate: float


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Elements a second that one rank encodes, and decodes."""

    encode: float
    decode: float


@dataclass(frozen=True, slots=True)
class PassWork:
    """Seconds of the processor that the engine takes in a pass, for each unit and for each of its parameters."""

    unit: float = 0.0
    parameter: float = 0.0

    def of(self, parameters: int) -> float:
        return self.unit + self.parameter * parameters


@dataclass(frozen=True, slots=True)
class HostWork:
    """What takes the processor beside arithmetic and messages. `optimizer`: seconds for each parameter in its step,
    with the norm of the gradients; `transfer`: for each transfer, whatever it sends."""

    forward: PassWork = PassWork()
    backward: PassWork = PassWork()
    optimizer: float = 0.0
    transfer: float = 0.0


@dataclass(frozen=True, slots=True)
class HostMemory:
    """`copy_rate`: bytes a second that one rank copies between its device and the host, each way, while all do.
    `memory_rate`: bytes a second that its share of the host's processors copies."""

    copy_rate: float
    memory_rate: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """`memory_rate`: bytes a second that one rank copies. `sum_rate`: bytes a second that it adds to others.

    `cores`: processor cores that compute, move bytes and encode, for `ranks_sharing` ranks together; None: each rank
    has a device that computes, and what moves bytes takes nothing from it. `host_memory`: for what is offloaded.
    """

    topology: Topology
    intra: Link
    inter: Link
    memory_rate: float
    sum_rate: float
    codecs: tuple[tuple[str, CodecSpeed], ...] = ()
    racks: Racks | None = None
    cores: float | None = None
    ranks_sharing: int = 1
    host: HostWork = HostWork()
    host_memory: HostMemory | None = None

    @property
    def offloading(self) -> HostMemory:
        """Where processors compute, their memory is the host's."""
        if self.host_memory is not None:
            return self.host_memory
        if self.cores is None:
            raise StrategyError(
                "offload: the cluster's description says nothing of the host's memory. Describe it under [host] "
                "(docs/guides/describe-a-cluster.md), or plan without offload."
            )
        return HostMemory(self.memory_rate, self.memory_rate)

    @property
    def capacities(self) -> dict[str, float]:
        """Of what is shared. Seconds of computation are counted in ranks: each has one device or its share of cores."""
        found = {CABLE: self.inter.rate, INSIDE: self.intra.rate}
        if self.racks is not None:
            found[SPINE] = self.racks.rate
        found[PROCESSOR] = 1.0 if self.cores is None else self.cores
        return found

    def codec_speed(self, name: str) -> CodecSpeed | None:
        return dict(self.codecs).get(name)

    def processor(self, seconds: float) -> float:
        """What `seconds` of one rank's computing take of the processor, when all ranks that share it do the same."""
        return seconds * (1 if self.cores is None else self.ranks_sharing)


# What things that go on at the same time share, as far as one node, or one rank, is concerned.
CABLE, INSIDE, SPINE, PROCESSOR = "cable", "inside", "spine", "processor"
