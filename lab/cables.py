"""The properties of a lab's links: rates, latency and loss. links.py and delay.py give the links these properties."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.errors import LabError

_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SHARES = {"%": 1e-2}
_SLOWEST = 10**6
# In a lab whose cables only have a rate, and in one that is a part of the internet (links.py).
_JUMBO_BYTES, _INTERNET_BYTES = 9000, 1500
# What IPv4 needs, and what a tap device takes.
_SHORTEST_BYTES, _LONGEST_BYTES = 576, 65521


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """The rate of a link.

    Attributes:
        bits_per_second: Bits per second, each way.
    """

    bits_per_second: int

    @staticmethod
    def parse(text: str) -> Rate:
        """Return the rate that `text` names, such as '200mbit' or '1.5gbit'.

        Args:
            text: A number and one of bit, kbit, mbit, gbit and tbit. These are powers of ten, as tc counts them.

        Raises:
            LabError: The text is no rate, or the rate is below 1 mbit.
        """
        rate = Rate(round(_quantity(text, "rate", _RATES, "200mbit")))
        if rate.bits_per_second < _SLOWEST:
            raise LabError(f"too slow to shape: {text!r}. The slowest rate is {Rate(_SLOWEST)}.")
        return rate

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second."""
        return self.bits_per_second / 8

    def __str__(self) -> str:
        unit = max((u for u in _RATES if self.bits_per_second >= _RATES[u]), key=_RATES.__getitem__, default="bit")
        return f"{self.bits_per_second / _RATES[unit]:g}{unit}"


# With packets of 1500 bytes, 42,000 a second. One core carries 70,000 in one direction (delay.py).
_FASTEST = Rate(500 * 10**6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """The cable that joins a node to the others.

    Latency and loss act on the packets that the node sends. Give both ends of a connection a cable with the latency of
    their round trip: each holds back its packets for half of it.

    Attributes:
        down: The rate at which the node receives. None does not limit it.
        up: The rate at which the node sends. None does not limit it.
        latency_seconds: The round trip between two nodes with such cables.
        loss: The share of the node's packets that are lost, from 0 to below 1.
        mtu_bytes: The largest packet that the node sends. By default 9000 bytes, or 1500 in a lab in which any cable
            has a latency or a loss.
        seed: The seed of the dice that choose the lost packets. The number of the node is added to it.
    """

    down: Rate | None = None
    up: Rate | None = None
    latency_seconds: float = 0.0
    loss: float = 0.0
    mtu_bytes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.latency_seconds < math.inf and 0 <= self.loss < 1):
            raise LabError(
                f"expected a latency of at least 0 s and a loss from 0 to below 1, got {self.latency_seconds} s and "
                f"{self.loss}."
            )
        if self.mtu_bytes is not None and not _SHORTEST_BYTES <= self.mtu_bytes <= _LONGEST_BYTES:
            raise LabError(
                f"mtu_bytes={self.mtu_bytes}: expected {_SHORTEST_BYTES} to {_LONGEST_BYTES}, or None for the default."
            )
        if self.delayed and not all(rate and rate <= _FASTEST for rate in (self.down, self.up)):
            raise LabError(
                f"a cable with latency or loss carries at most {_FASTEST} each way, because a process copies every "
                f"packet; got {self.down or 'no limit'} down and {self.up or 'no limit'} up. Choose slower rates."
            )

    @staticmethod
    def parse(down: str, up: str | None = None, latency: str | None = None, loss: str | None = None) -> Cable:
        """Return the cable that these texts describe.

        Args:
            down: The rate at which the node receives, such as '100mbit', or the name of a ready cable: 'flat'.
            up: The rate at which the node sends. By default the same.
            latency: The round trip between two nodes with such cables, such as '20ms'. By default none is added.
            loss: The share of the node's packets that are lost, such as '1%'.

        Raises:
            LabError: A text has another form, or the cable is too fast for a latency or a loss.
        """
        ready = READY.get(down)
        cable = ready or Cable(down=Rate.parse(down), up=Rate.parse(down))
        return replace(
            cable,
            up=cable.up if up is None else Rate.parse(up),
            latency_seconds=cable.latency_seconds if latency is None else _quantity(latency, "time", _SECONDS, "20ms"),
            loss=cable.loss if loss is None else _quantity(loss, "loss", _SHARES, "1%"),
        )

    def at_rates_of(self, other: Cable) -> Cable:
        """Return this cable with the rates of another.

        Raises:
            LabError: The other cable has a latency or a loss that this one has not.
        """
        if other.delayed and (other.latency_seconds, other.loss) != (self.latency_seconds, self.loss):
            raise LabError(f"a lab's latency and loss cannot change: from {self} to {other}. Create another lab.")
        return replace(self, down=other.down, up=other.up)

    @property
    def delayed(self) -> bool:
        """Whether a process carries the packets of this cable."""
        return self.latency_seconds > 0 or self.loss > 0

    def __str__(self) -> str:
        rates = (
            str(self.down or "unlimited")
            if self.down == self.up
            else f"{self.down or 'unlimited'} down, {self.up or 'unlimited'} up"
        )
        latency = f", {self.latency_seconds * 1e3:g} ms" if self.latency_seconds else ""
        return rates + latency + (f", {self.loss * 100:g}% lost" if self.loss else "")


# The cable of a flat: an ordinary internet access.
FLAT = Cable(down=Rate(100 * 10**6), up=Rate(40 * 10**6), latency_seconds=20e-3)
READY = {"flat": FLAT}

# How a lab's caller describes the cables of all nodes, or of each node.
Cables = str | Rate | Cable | Sequence[Cable] | None


@dataclass(frozen=True, slots=True)
class Wiring:
    """The links of a lab. A rate of None does not limit a link.

    Attributes:
        cables: The cable of each node.
        intra: The rate of each node's loopback, each way.
        spine: The rate of each rack's cable to the other racks, each way.
    """

    cables: tuple[Cable, ...]
    intra: Rate | None = None
    spine: Rate | None = None

    @property
    def loses_nothing(self) -> bool:
        """Whether every packet arrives, soon after it was sent."""
        return not any(cable.delayed for cable in self.cables)

    def mtu_bytes(self, node: int) -> int:
        """Return the largest packet that a node sends."""
        return self.cables[node].mtu_bytes or (_JUMBO_BYTES if self.loses_nothing else _INTERNET_BYTES)


def cables_of(given: Cables, nodes: int) -> tuple[Cable, ...]:
    """Return the cable of each node.

    Raises:
        LabError: The text is no rate, or there are not as many cables as nodes.
    """
    if isinstance(given, str):
        given = Cable.parse(given)
    if given is None or isinstance(given, Rate):
        given = Cable(down=given, up=given)
    cables = (given,) * nodes if isinstance(given, Cable) else tuple(given)
    listed: tuple[Any, ...] = cables
    others = [each for each in listed if not isinstance(each, Cable)]
    if len(cables) != nodes or others:
        told = f"{others[0]!r} among them" if others else len(cables)
        raise LabError(f"inter: expected the cable of each of {nodes} nodes, got {told}.")
    return cables


def _quantity(text: str, kind: str, units: Mapping[str, float], example: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z%]+)\s*", text.lower())
    if match is None or match[2] not in units:
        raise LabError(f"not a {kind}: {text!r}. Write a number and a unit ({', '.join(units)}), such as {example}.")
    return float(match[1]) * units[match[2]]
