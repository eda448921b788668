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

from towpath.doctor.channels import connect, state_of
from towpath.doctor.interfaces import Interface, family_of, interface_of
from towpath.doctor.services import DATAGRAM, TICK_SECONDS, count, datagram_socket, give
from towpath.json_connection import JsonConnection

_ECHOES, _ECHO_SECONDS = 200, 0.3
_DATAGRAMS, _DATAGRAM_BYTES, _BURST = 2000, 200, 40
# How long answers are awaited: after a burst before the next one is sent, and after the last one.
_PAUSE_SECONDS, _SILENT_SECONDS = 0.03, 0.5
# Packets that pass where larger ones are lost: behind switches without jumbo frames, and in common kinds of tunnels.
_PACKETS = (8951, 1500, 1492, 1476, 1460, 1450, 1420, 1400, 1380, 1340, 1300, 1280, 576)
_TRY_SECONDS = 0.5
_TCP_BYTES = {socket.AF_INET: 40, socket.AF_INET6: 60}


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

    def ask(self, what: str, *, segment: int | None = None, **more: Any) -> JsonConnection:
        """Return a connection to one of its services."""
        link = connect(self.address, self.port, segment)
        try:
            link.ask({"token": self.token, "do": what, **more})
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


def measure(peer: Peer, seconds: float) -> list[dict[str, Any]]:
    """Measure latency, loss, the largest packet, and the rate of each direction alone and of both together.

    Args:
        peer: The other machine.
        seconds: How long each rate is measured.

    Returns:
        What was measured on the way out, and on the way back.
    """
    (latency, mtu), segment, header = _latency(peer), None, _TCP_BYTES[family_of(peer.address)]
    told: dict[str, dict[str, Any]] = dict(zip(("out", "back"), _losses(peer), strict=True))
    for way, found in told.items():
        found["alone"] = rates(peer, (way,), seconds)[way]
        found |= {"stalls": not found["alone"], "mtu": mtu, "packet": mtu, "latency": latency}
        if found["stalls"]:  # not even one large packet arrives; smaller ones show what the cable carries
            found["packet"] = _largest(peer, way, mtu, header)
            segment = min(segment or mtu, (found["packet"] or _PACKETS[-1]) - header)
            found["alone"] = rates(peer, (way,), seconds, segment)[way]
    for way, rate in rates(peer, tuple(told), seconds, segment).items():
        told[way]["together"] = rate
    return [*told.values()]


def _largest(peer: Peer, way: str, mtu: int, header: int) -> int | None:
    """Return the largest packet that passes of those that are tried, all at the same time. None: none of them does."""

    def passes(size: int) -> bool:
        return rates(peer, (way,), _TRY_SECONDS, size - header)[way] > 0

    sizes = [size for size in _PACKETS if size < mtu]
    with ThreadPoolExecutor(len(_PACKETS)) as pool:
        return max((size for size, does in zip(sizes, pool.map(passes, sizes), strict=True) if does), default=None)


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
        return median(taken), segment + _TCP_BYTES[link.socket.family] + 12 * stamped


def rates(peer: Peer, ways: Sequence[str], seconds: float, segment: int | None = None) -> dict[str, float]:
    """Return the bytes per second of each of these ways, "out" and "back", all of them at the same time."""
    works = {"out": _send, "back": _receive}
    with ThreadPoolExecutor(len(ways)) as pool:
        found = {way: pool.submit(works[way], peer, seconds, segment) for way in ways}
        return {way: each.result() for way, each in found.items()}


def _send(peer: Peer, seconds: float, segment: int | None) -> float:
    with contextlib.suppress(OSError), peer.ask("sink", segment=segment, seconds=seconds) as link:
        give(link.socket, seconds)
        return link.receive(seconds + 1)["rate"]
    return 0.0


def _receive(peer: Peer, seconds: float, segment: int | None) -> float:
    with contextlib.suppress(OSError), peer.ask("source", segment=segment, seconds=seconds + TICK_SECONDS) as link:
        return count(link.socket, seconds)
    return 0.0


def _losses(peer: Peer) -> list[dict[str, Any]]:
    """Return the share of small datagrams that is lost on the way out and back, each with how many were sent.

    Few are under way at a time, so no queue is full. A datagram counts as lost if it never comes. If none comes back,
    nothing is known.
    """
    test, arrived, answers = random.getrandbits(32), 0, set[int]()
    with datagram_socket(family_of(peer.address)) as sender:
        for sent in range(0, _DATAGRAMS, _BURST):
            with contextlib.suppress(OSError):  # silence
                for number in range(sent, sent + _BURST):
                    data = DATAGRAM.pack(peer.token.encode(), test, number, 0).ljust(_DATAGRAM_BYTES, b"\0")
                    sender.sendto(data, (peer.address, peer.port))
                sender.settimeout(_PAUSE_SECONDS if sent + _BURST < _DATAGRAMS else _SILENT_SECONDS)
                while len(answers) < sent + _BURST:
                    *_, number, seen = DATAGRAM.unpack_from(sender.recv(_DATAGRAM_BYTES))
                    answers.add(number)
                    arrived = max(arrived, seen)
    ways = ((_DATAGRAMS, arrived), (arrived, len(answers)))
    return [{"loss": 1 - came / of if answers else None, "datagrams": of} for of, came in ways]
