"""Measures the paths between this machine and another one, whose `Services` answer.

Both directions are measured from here, so it is enough if one of the two can connect. Nothing waits without a limit.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from towpath.doctor.channels import SHORT_BYTES, Channel, state_of
from towpath.doctor.interfaces import Interface, family_of, interface_of
from towpath.doctor.services import DATAGRAM, TICK_SECONDS, count, datagram_socket, give

_ECHOES, _ECHO_SECONDS = 200, 0.3
_DATAGRAMS, _DATAGRAM_BYTES, _BURST = 2000, 200, 40
# How long answers are awaited: after a burst before the next one is sent, and after the last one.
_PAUSE_SECONDS, _SILENT_SECONDS = 0.03, 0.5
_LEAST_PACKET_BYTES, _PACKET_STEP_BYTES, _TRIES = 576, 4, 3
_MOST_PACKET_BYTES = 1 << 14  # larger ones are only on loopbacks
_TCP_BYTES = {socket.AF_INET: 40, socket.AF_INET6: 60}
_HEADER_BYTES = {socket.AF_INET: 28, socket.AF_INET6: 48}


@dataclass(frozen=True, slots=True)
class Peer:
    """The services of another machine, at one of its addresses.

    Attributes:
        address: The address.
        port: The port of its services.
        token: What its services expect, since others may have the same address.
    """

    address: str
    port: int
    token: str

    def ask(self, what: str, *, segment: int | None = None, **more: Any) -> Channel:
        """Return a connection to one of its services."""
        link = Channel.to(self.address, self.port, segment)
        try:
            link.send({"token": self.token, "do": what, **more})
            link.receive()
            return link
        except BaseException:
            link.close()
            raise


def reach(peers: Sequence[Peer], own: Sequence[Interface]) -> list[dict[str, Any]]:
    """Try to connect to all of them at the same time. Return how each attempt ended, and over which interface."""

    def attempt(peer: Peer) -> dict[str, Any]:
        found: dict[str, Any] = {"address": peer.address, "interface": None, "state": "open"}
        if interface_of(peer.address, own) is not None:
            return found | {"state": "own"}  # it never leaves this machine
        try:
            with peer.ask("reach") as link:
                of = interface_of(link.here, own)
                return found | {"interface": of["name"] if of else None}
        except OSError as error:
            return found | {"state": state_of(error)}

    with ThreadPoolExecutor(max(1, len(peers))) as pool:
        return list(pool.map(attempt, peers))


def measure(peer: Peer, seconds: float) -> dict[str, Any]:
    """Measure one path: latency, loss, the largest packet, and the rate of each direction alone and of both together.

    Args:
        peer: The other machine.
        seconds: How long each rate is measured.
    """
    (latency, mtu), segment = _latency(peer), None
    told: dict[str, dict[str, Any]] = {"out": {"mtu": mtu}, "back": {"mtu": mtu}}
    with _Datagrams(peer, latency) as datagrams:
        losses = datagrams.losses()
        for backward, way in enumerate(told):
            packet = datagrams.largest_packet(mtu, bool(backward)) if losses else None
            told[way] |= {"packet": packet, **(losses[backward] if losses else {})}
    for way, found in told.items():
        found["alone"] = rates(peer, (way,), seconds)[way]
        found["stalls"] = not found["alone"]
        if found["stalls"]:  # not even one large segment arrives; short ones show what the cable carries
            segment = SHORT_BYTES
            found["alone"] = rates(peer, (way,), seconds, segment)[way]
    for way, rate in rates(peer, tuple(told), seconds, segment).items():
        told[way]["together"] = rate
    return {"latency": latency, **told}


def _latency(peer: Peer) -> tuple[float, int]:
    """Return the median seconds of a short message there and back, and the largest packet that both interfaces send."""
    taken: list[float] = []
    until = time.monotonic() + _ECHO_SECONDS
    with peer.ask("echo") as link:
        while len(taken) < _ECHOES and (time.monotonic() < until or not taken):
            began = time.perf_counter()
            link.socket.sendall(b"echo")
            link.socket.recv(64)
            taken.append(time.perf_counter() - began)
        segment = link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        stamped = link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[5] & 1
        mtu = segment + _TCP_BYTES[link.socket.family] + 12 * stamped
    return median(taken), min(mtu, _MOST_PACKET_BYTES)


def rates(peer: Peer, ways: Sequence[str], seconds: float, segment: int | None = None) -> dict[str, float]:
    """Return the bytes per second of each of these ways, "out" and "back", all of them at the same time."""
    works = {"out": _send, "back": _receive}
    with ThreadPoolExecutor(len(ways)) as pool:
        found = {way: pool.submit(works[way], peer, seconds, segment) for way in ways}
        return {way: each.result() for way, each in found.items()}


def _send(peer: Peer, seconds: float, segment: int | None) -> float:
    with contextlib.suppress(OSError), peer.ask("sink", segment=segment, seconds=seconds) as link:
        give(link, seconds)
        return link.receive(seconds + 1)
    return 0.0


def _receive(peer: Peer, seconds: float, segment: int | None) -> float:
    with contextlib.suppress(OSError), peer.ask("source", segment=segment, seconds=seconds + TICK_SECONDS) as link:
        rate = count(link.socket, seconds)
        link.reset()
        return rate
    return 0.0


# Datagrams ------------------------------------------------------------------------------------------------------------


class _Datagrams:
    """Datagrams to the services of a peer, which answers each of them."""

    def __init__(self, peer: Peer, latency: float) -> None:
        family = family_of(peer.address)
        self._peer, self._header_bytes = peer, _HEADER_BYTES[family]
        self._patience = min(1.0, max(0.1, 4 * latency))
        self._socket = datagram_socket(family)

    def __enter__(self) -> _Datagrams:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _send(self, test: int, numbers: range, size: int, wanted: int) -> None:
        """Send datagrams of so many bytes. One that is larger than the interface takes is not sent."""
        with contextlib.suppress(OSError):
            for number in numbers:
                data = DATAGRAM.pack(self._peer.token.encode(), test, number, 0, wanted).ljust(size, b"\0")
                self._socket.sendto(data, (self._peer.address, self._peer.port))

    def _answer(self, test: int, seconds: float) -> tuple[int, int] | None:
        """Return the number of the next answer of a test, and how many had arrived there; or None in time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            with contextlib.suppress(OSError):
                data = self._socket.recv(1 << 16)
                if len(data) >= DATAGRAM.size and data[:16] == self._peer.token.encode():
                    _, of, number, seen, _ = DATAGRAM.unpack_from(data)
                    if of == test:
                        return number, seen
        return None

    def losses(self) -> list[dict[str, float]] | None:
        """Return what is lost on the way out and back, each with how many were sent; or None if none came back.

        Few are under way at a time, so no queue is full. A datagram counts as lost if it never comes.
        """
        test, arrived, answers = random.getrandbits(32), 0, set[int]()
        for sent in range(0, _DATAGRAMS, _BURST):
            self._send(test, range(sent, sent + _BURST), _DATAGRAM_BYTES, _DATAGRAM_BYTES)
            patience = _PAUSE_SECONDS if sent + _BURST < _DATAGRAMS else max(_SILENT_SECONDS, self._patience)
            while found := self._answer(test, patience):
                answers.add(found[0])
                arrived = max(arrived, found[1])
                if len(answers) == sent + _BURST:
                    break
        ways = ((_DATAGRAMS, arrived), (arrived, len(answers)))
        return [{"loss": 1 - came / of, "datagrams": of} for of, came in ways] if answers else None

    def largest_packet(self, mtu: int, backward: bool) -> int:
        """Return the bytes of the largest packet, up to `mtu`, that comes through without being cut."""
        low, high = _LEAST_PACKET_BYTES, 2 * mtu - _LEAST_PACKET_BYTES  # so the first in the middle is the MTU
        while high - low > _PACKET_STEP_BYTES:
            middle, test = (low + high) // 2, random.getrandbits(32)
            sizes = middle - self._header_bytes, DATAGRAM.size
            self._send(test, range(_TRIES), *(sizes[::-1] if backward else sizes))
            if self._answer(test, self._patience) is None:
                high = middle
            else:
                low = middle
            if low == mtu:
                break
        return low
