"""Outer steps: islands of nodes train on their own, and synchronize their weights only now and then.

Each island trains with the inner strategy, as if it were the whole job. Every `every` optimizer steps, the islands
average how far their weights have moved since the last time. An outer optimizer applies that mean to the *slow
weights*, and training goes on from there (DiLoCo, Streaming DiLoCo).

The model is exchanged in *fragments*, at different steps, so that no step has to send all of it. An exchange belongs to
the parameter sync that follows optimizer step t. Its result is applied at the parameter sync that follows step
t + delay: by count, and never by arrival. So the same run computes the same bits on links of any speed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from towpath.core.routes import Op
from towpath.core.transport import Transport
from towpath.errors import ConfigError
from towpath.topology.cluster import Topology, counted

# Bytes a second between nodes, from which on exchanges of GPUs are planned over NCCL. Its kernels are on the GPU for as
# long as an exchange takes. On slower links, these seconds cost more computation than copies to the host.
NCCL_RATE = 1.25e9
# Codecs with fewer bits need error feedback: what they round away would otherwise be lost for good.
_BITS_WITHOUT_FEEDBACK = 4


@dataclass(frozen=True, slots=True)
class Outer:
    """When and how the islands of a job synchronize. It is part of a strategy: `towpath.strategy(…, outer=Outer(…))`.

    Attributes:
        every: How many optimizer steps an island trains on its own between two exchanges of the same weights. Begin
            with 32. More steps send less, and islands drift further apart: above 64 was not measured. With fewer than
            32, take `lr=1, momentum=0`.
        fragments: The number of parts of the model that are exchanged at different steps. More fragments spread the
            bytes evenly over the steps.
        delay: The number of optimizer steps during which an exchange may be under way. With 0, training waits for it.
            Take as many steps as an exchange takes. It must be smaller than `every`.
        lr: The learning rate of the outer optimizer.
        momentum: The Nesterov momentum of the outer optimizer. 0 keeps none.
        blend: The share of an island's own weights that remains when a result is applied. With 0, the new slow weights
            replace them. With a delay, they would also replace what the island learned meanwhile: 0.5 keeps half.
        transport: The `Transport` of exchanges, such as `Transport("flat", "int4", feedback="all")`. By default, values
            are sent in float32.
        islands: The number of islands, each of equally many nodes. By default, each node is one. On a single node,
            training is then synchronous, with a warning. 1 steps the outer optimizer on one island (Lookahead).
        nodes_per_rack: The number of nodes in each rack of the job. `towpath.strategy` takes it from the topology.
        nccl: Whether GPUs exchange over NCCL. By default, exchanges are sent over gloo from host memory, so that they
            take no GPU's processors. Use NCCL where more than 10 Gbit/s connect two islands. `towpath plan` does so.
        meet: For islands that come and go, each with a launcher of its own: the addresses at which they find each
            other, as HOST:PORT, with commas between. The first island must be on one of the hosts. The job is then one
            island.
    """

    every: int
    fragments: int = 1
    delay: int = 0
    lr: float = 0.7
    momentum: float = 0.9
    blend: float = 0.0
    transport: Transport = Transport()
    islands: int | None = None
    nodes_per_rack: int | None = None
    nccl: bool = False
    meet: str = ""

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0), ("islands", 1)):
            value = getattr(self, name)
            if (type(value) is not int or value < least) and not (value is None and name == "islands"):
                raise ConfigError(f"Outer: {name} is a whole number of at least {least}; got {value!r}.")
        for name, low, high in (("lr", 0.0, math.inf), ("momentum", 0.0, 1.0), ("blend", 0.0, 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < high:
                bound = "a number of at least 0" if high == math.inf else "a number from 0 to less than 1"
                raise ConfigError(f"Outer: {name} is {bound}; got {value!r}.")
        if type(self.nccl) is not bool:
            raise ConfigError(f"Outer: nccl is True or False; got {self.nccl!r}.")
        self._check_meet()
        if self.delay >= self.every:
            raise ConfigError(
                f"Outer: delay={self.delay} with every={self.every}: the next exchange of the same weights would begin "
                f"before the result of this one is applied. Take a delay of at most {self.every - 1}."
            )
        if self.fragments > self.every:
            raise ConfigError(
                f"Outer: fragments={self.fragments} with every={self.every}: there are fewer steps than fragments. "
                f"Take at most {self.every} fragments."
            )
        self._check_transport()

    def _check_meet(self) -> None:
        addresses = self.meet.split(",") if isinstance(self.meet, str) and self.meet else []  # pyright: ignore
        found = [re.fullmatch(r"\s*[^\s,:]+:([1-9]\d{0,4})\s*", each) for each in addresses]
        if self.meet != "" and not (found and all(each and int(each[1]) < 1 << 16 for each in found)):
            raise ConfigError(f"Outer: meet is HOST:PORT,…, each HOST a name or an IPv4 address; got {self.meet!r}.")
        if self.meet and (self.nccl or (self.islands or 1) > 1):
            raise ConfigError(
                f"Outer: islands={self.islands}, nccl={self.nccl} with meet={self.meet!r}: each job is one island, "
                "and sends over gloo. Leave islands and nccl out."
            )

    def _check_transport(self) -> None:
        transport = self.transport
        if not isinstance(transport, Transport):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"Outer: transport is a Transport, such as Transport('flat', 'int4'); got {transport!r}.")
        if transport.low_rank is not None or transport.exact or transport.changes:
            raise ConfigError(
                f"Outer: transport={transport}: expected a codec of blocks or none, without exact=, after= and until=."
            )
        if transport.encoding is not None and transport.route == "flat":  # the only route between so few members
            transport = replace(transport, route="one-hop")
            object.__setattr__(self, "transport", transport)
        transport.check(Op.ALL_REDUCE, "Outer: transport")
        codec = transport.encoding
        if codec is not None and codec.stochastic:
            raise ConfigError(f"Outer: {codec} rounds at random, and a run could not resume bit for bit. Leave it out.")
        if codec is not None and codec.bits < _BITS_WITHOUT_FEEDBACK and transport.feedback != "all":
            raise ConfigError(
                f"Outer: {codec} has {codec.bits} bits, and what it rounds away would be lost. Pass feedback='all' to "
                f"the Transport, or take a codec of at least {_BITS_WITHOUT_FEEDBACK} bits."
            )

    def on(self, topology: Topology) -> tuple[Outer, Topology]:
        """Return these settings for a job on `topology`, with the number of islands, and the topology of one island.

        Raises:
            ConfigError: If islands would not consist of equally many whole nodes.
        """
        topology.check_equal("outer")
        islands = 1 if self.meet else topology.nodes if self.islands is None else self.islands
        if topology.nodes % islands:
            choices = ", ".join(str(n) for n in range(1, topology.nodes + 1) if topology.nodes % n == 0)
            raise ConfigError(
                f"Outer: {counted(islands, 'island')} on {counted(topology.nodes, 'node')}: an island is a "
                f"group of whole nodes, equally many in each. Take one of {choices} islands."
            )
        island = topology.of(range(topology.world // islands))
        return replace(self, islands=islands, nodes_per_rack=topology.nodes_per_rack), island

    def begun_at(self, step: int) -> tuple[int, ...]:
        """Return the fragments whose exchange belongs to the parameter sync after optimizer step `step`, from 1."""
        if step < 1:
            return ()
        # Fragments are spread evenly over a period.
        first = [(fragment + 1) * self.every // self.fragments for fragment in range(self.fragments)]
        return tuple(fragment for fragment, begins in enumerate(first) if (step - begins) % self.every == 0)

    def fragments_applied_after(self, step: int) -> tuple[int, ...]:
        """Return the fragments whose result is applied at the parameter sync after optimizer step `step`."""
        return self.begun_at(step - self.delay)

    def to_table(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as TOML can hold them, without the transport."""
        defaults = {each.name: each.default for each in fields(self)}
        found = {name: getattr(self, name) for name in defaults if name != "transport"}
        return {name: value for name, value in found.items() if name == "every" or value != defaults[name]}

    def __str__(self) -> str:
        parts = "" if self.fragments == 1 else f" in {self.fragments} fragments"
        delay = f", applied {counted(self.delay, 'step')} later" if self.delay else ""
        blend = f", blend {self.blend:g}" if self.blend else ""
        optimizer = f"lr {self.lr:g}, momentum {self.momentum:g}"
        meet = f", with the islands at {self.meet}" if self.meet else ""
        return f"every {counted(self.every, 'step')}{parts}{delay}{blend}, {optimizer} ({self.transport}){meet}"


def outer_transport(codec: str) -> Transport:
    """Return the transport of exchanges in a codec. Blocks keep what both halves of an exchange round away.

    Args:
        codec: A codec such as "int4". An empty text is float32.
    """
    if not codec or codec == "none":
        return Transport()
    transport = Transport("flat", codec)
    return transport if transport.low_rank is not None else replace(transport, feedback="all")
