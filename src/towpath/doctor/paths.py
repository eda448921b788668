"""Measures the paths between this machine and another one, whose `Services` answer.

Both directions are measured from here, so it is enough if one of the two can connect. Nothing waits without a limit.
"""

from __future__ import annotations

import contextlib
import errno
import json
import random
import socket
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from towpath.doctor.interfaces import Interface, family_of, interface_of, is_near, plain
from towpath.doctor.services import CHUNK_BYTES, DATAGRAM, RECORD, RECORD_SECONDS, YES, datagram_socket, read_line

# (seconds of a clock, bytes that had arrived by then)
Records = list[tuple[float, int]]

_CONNECT_SECONDS = 2.5
_SHORT_BYTES = 536  # of a segment that passes every path
_WHOLE_BYTES, _WHOLE_SECONDS = 96 << 10, 4.0
_ECHOES, _ECHO_SECONDS = 200, 0.3
_DATAGRAMS, _DATAGRAM_BYTES, _DATAGRAM_SECONDS = 2000, 200, 1.5
_BURST, _MOST_UNDER_WAY, _SILENT_SECONDS = 40, 120, 0.5
_LEAST_PACKET_BYTES, _PACKET_STEP_BYTES, _TRIES = 576, 4, 3
_HEADER_BYTES = {socket.AF_INET: 28, socket.AF_INET6: 48}
_BINS, _TICK_SECONDS = 10, 0.1
_BIND_TO_DEVICE = 25  # SO_BINDTODEVICE
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what is under way when it is closed is dropped

# How an attempt to connect ends, by the error of the kernel. Everything else is "silent".
_STATES = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "something else answers",
    errno.EHOSTUNREACH: "no answer from the host",
    errno.ENETUNREACH: "no route",
    errno.EACCES: "forbidden here",
    errno.EPERM: "forbidden here",
    errno.EINVAL: "forbidden here",
    errno.EADDRNOTAVAIL: "no route",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """The services of another machine, at one of its addresses.

    Attributes:
        address: The address.
        port: The port of its services.
        token: What its services expect, since others may have the same address.
        interface: The interface over which packets leave this machine. By default, the kernel's route decides.
    """

    address: str
    port: int
    token: str
    interface: str | None = None

    def ask(self, what: str, *, segment: int | None = None, count: int = 0) -> socket.socket:
        """Return a connection to one of its services. `segment` limits the bytes of a segment, both ways."""
        connection = socket.socket(family_of(self.address), socket.SOCK_STREAM)
        try:
            connection.settimeout(_CONNECT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.interface is not None:
                connection.setsockopt(socket.SOL_SOCKET, _BIND_TO_DEVICE, self.interface.encode())
            if segment is not None:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
            connection.connect((self.address, self.port))
            connection.sendall(json.dumps({"token": self.token, "do": what, "bytes": count}).encode() + b"\n")
            if read_line(connection) != YES:
                raise ConnectionError("something else answers")
            return connection
        except BaseException:
            connection.close()
            raise


def state_of(error: OSError) -> str:
    """Return in a few words how an attempt to connect has ended."""
    if isinstance(error, ConnectionError) and error.errno is None:
        return "something else answers"
    return _STATES.get(error.errno or 0, "silent")


def reach(peers: Sequence[Peer], own: Sequence[Interface]) -> list[dict[str, Any]]:
    """Try to connect to all of them at the same time. Return how each attempt ended, and over which interface."""

    def attempt(peer: Peer) -> dict[str, Any]:
        found: dict[str, Any] = {"address": peer.address, "interface": peer.interface, "state": "open"}
        if interface_of(peer.address, own) is not None:
            return found | {"state": "own"}  # it never leaves this machine
        try:
            with peer.ask("reach") as connection:
                of = interface_of(plain(connection.getsockname()[0]), own)
                return found | {"interface": peer.interface or (of["name"] if of else None)}
        except OSError as error:
            return found | {"state": state_of(error)}

    with ThreadPoolExecutor(max(1, len(peers))) as pool:
        return list(pool.map(attempt, peers))


def other_ways(addresses: Sequence[str], own: Sequence[Interface], used: Sequence[str | None]) -> list[tuple[str, str]]:
    """Return interfaces of this machine, each with an address of the other machine in its network.

    Args:
        addresses: Those of the other machine.
        own: The interfaces of this machine.
        used: The interface and the address that are used already.
    """
    return [
        (each["name"], address)
        for each in own
        for address in addresses
        if is_near(address, each) and [each["name"], address] != list(used) and interface_of(address, own) is None
    ]


def measure(peer: Peer, mtu: int, seconds: float) -> dict[str, Any]:
    """Measure one path: latency, loss, the largest packet, and the rate of each direction alone and of both together.

    Args:
        peer: The other machine.
        mtu: The largest packet that the interfaces of both machines send.
        seconds: How long each rate is measured.
    """
    latency = _latency(peer)
    found: dict[str, Any] = {"latency": latency, "out": {}, "back": {}}
    with _Datagrams(peer, latency) as datagrams:
        losses = datagrams.losses()
        for way, backward in (("out", False), ("back", True)):
            stalls = not _passes_whole(peer, backward)
            packet = None if losses is None else datagrams.largest_packet(mtu, backward)
            found[way] = {"stalls": stalls, "packet": packet, "mtu": mtu, **(losses[backward] if losses else {})}
    # Where large packets are lost, short segments show what the cable carries.
    segment = _SHORT_BYTES if found["out"]["stalls"] or found["back"]["stalls"] else None
    for kind, ways in (("alone", ("out",)), ("alone", ("back",)), ("together", ("out", "back"))):
        for way, rate in rates(peer, ways, seconds, segment).items():
            found[way][kind] = rate
    return found


def _latency(peer: Peer) -> float:
    """Return the median seconds of a short message there and back."""
    taken: list[float] = []
    until = time.monotonic() + _ECHO_SECONDS
    with peer.ask("echo") as connection, contextlib.suppress(TimeoutError):
        while len(taken) < _ECHOES and (time.monotonic() < until or not taken):
            began = time.perf_counter()
            connection.sendall(b"echo")
            connection.recv(64)
            taken.append(time.perf_counter() - began)
    return median(taken or [_CONNECT_SECONDS])


def _passes_whole(peer: Peer, backward: bool) -> bool:
    """Return whether some full segments arrive. Packets that are too large for the path are lost again and again."""
    until = time.monotonic() + _WHOLE_SECONDS
    with contextlib.suppress(OSError), peer.ask("source" if backward else "sink", count=_WHOLE_BYTES) as connection:
        left, total = _WHOLE_BYTES, 0
        if not backward:
            connection.sendall(bytes(left))
            connection.shutdown(socket.SHUT_WR)
        while total < _WHOLE_BYTES and (rest := until - time.monotonic()) > 0:
            connection.settimeout(rest)
            data = connection.recv(left) if backward else connection.recv(RECORD.size, socket.MSG_WAITALL)
            if not data:
                break
            total = total + len(data) if backward else RECORD.unpack(data)[1]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        return total >= _WHOLE_BYTES
    return False


# Rates ----------------------------------------------------------------------------------------------------------------


def rates(peer: Peer, ways: Sequence[str], seconds: float, segment: int | None = None) -> dict[str, float]:
    """Return the bytes per second of each of these ways, "out" and "back", all of them at the same time."""
    works = {"out": _send, "back": _receive}
    with ThreadPoolExecutor(len(ways)) as pool:
        found = {way: pool.submit(works[way], peer, seconds, segment) for way in ways}
        return {way: rate_of(each.result(), seconds) for way, each in found.items()}


def _send(peer: Peer, seconds: float, segment: int | None) -> Records:
    """Send for some seconds. The peer reports what has arrived."""
    records: Records = []
    block = memoryview(bytes(CHUNK_BYTES))
    with contextlib.suppress(OSError), peer.ask("sink", segment=segment) as connection:
        connection.settimeout(_TICK_SECONDS)
        until = time.monotonic() + seconds
        reader = threading.Thread(target=_read_records, args=(connection, records, until + _TICK_SECONDS), daemon=True)
        reader.start()
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                connection.send(block)
        reader.join()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    return records


def _read_records(connection: socket.socket, records: Records, until: float) -> None:
    data = b""
    while time.monotonic() < until:
        with contextlib.suppress(TimeoutError):
            try:
                data += connection.recv(RECORD.size - len(data)) or b""
            except ConnectionError:
                return
        if len(data) == RECORD.size:
            records.append(RECORD.unpack(data))
            data = b""


def _receive(peer: Peer, seconds: float, segment: int | None) -> Records:
    """Receive for some seconds."""
    records: Records = []
    buffer, total = bytearray(CHUNK_BYTES), 0
    with contextlib.suppress(OSError), peer.ask("source", segment=segment, count=1 << 62) as connection:
        connection.settimeout(_TICK_SECONDS)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                total += connection.recv_into(buffer)
                if not records or time.monotonic() - records[-1][0] >= RECORD_SECONDS:
                    records.append((time.monotonic(), total))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    return records


def rate_of(records: Records, seconds: float) -> float:
    """Return the bytes per second that a path carries, from records of what had arrived.

    The first fifth, in which TCP opens its window, is left out. It is the median of short intervals, so neither a
    process that had to wait for a processor counts, nor what it then finds in the kernel's memory. It is the mean if
    that is more, as on a path that is silent now and then.
    """
    if len(records) < 2:
        return 0.0
    began = records[0][0] + seconds / 5
    step = (records[0][0] + seconds - began) / _BINS
    times = [when for when, _ in records]
    totals = [records[max(0, bisect_right(times, began + step * mark) - 1)][1] for mark in range(_BINS + 1)]
    pieces = [(after - before) / step for before, after in zip(totals, totals[1:], strict=False)]
    return max(median(pieces), fmean(pieces))


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

    def _send(self, test: int, number: int, size: int, wanted: int) -> bool:
        """Send a datagram of so many bytes. Return False if it is larger than the interface takes."""
        data = DATAGRAM.pack(self._peer.token.encode(), test, number, 0, wanted).ljust(size, b"\0")
        try:
            self._socket.sendto(data, (self._peer.address, self._peer.port))
        except OSError:
            return False
        return True

    def _answer(self, test: int, until: float) -> tuple[int, int] | None:
        """Return the number of the next answer of a test, and how many had arrived there; or None in time."""
        while (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                continue
            if len(data) >= DATAGRAM.size and data[:16] == self._peer.token.encode():
                _, of, number, seen, _ = DATAGRAM.unpack_from(data)
                if of == test:
                    return number, seen
        return None

    def losses(self) -> list[dict[str, float]] | None:
        """Return what is lost on the way out and back, each with how many were sent; or None if none came back.

        Few are under way at a time, so no queue is full. A datagram counts as lost if it never comes.
        """
        test, sent, arrived, answers = random.getrandbits(32), 0, 0, set[int]()
        until, given_up = time.monotonic() + _DATAGRAM_SECONDS, 0
        while True:
            more = sent < _DATAGRAMS and time.monotonic() < until and (bool(answers) or sent < 5 * _BURST)
            if more:
                for number in range(sent, sent + _BURST):
                    self._send(test, number, _DATAGRAM_BYTES, _DATAGRAM_BYTES)
                sent += _BURST
            # Most of them are answered before more are sent. After a silence, those on their way count as lost.
            most = _MOST_UNDER_WAY - _BURST if more else 0
            while sent - max(len(answers), given_up) > most:
                found = self._answer(test, time.monotonic() + max(_SILENT_SECONDS, self._patience))
                if found is None:
                    given_up = sent
                    break
                answers.add(found[0])
                arrived = max(arrived, found[1])
            if not more:
                break
        if not answers:
            return None
        ways = ((sent, arrived), (arrived, len(answers)))
        return [{"loss": 1 - came / of, "datagrams": of} for of, came in ways]

    def largest_packet(self, mtu: int, backward: bool) -> int:
        """Return the bytes of the largest packet, up to `mtu`, that comes through without being cut."""
        if self._passes(mtu, backward):
            return mtu
        low, high = _LEAST_PACKET_BYTES, mtu
        while high - low > _PACKET_STEP_BYTES:
            middle = (low + high) // 2
            low, high = (middle, high) if self._passes(middle, backward) else (low, middle)
        return low

    def _passes(self, packet_bytes: int, backward: bool) -> bool:
        test, size = random.getrandbits(32), packet_bytes - self._header_bytes
        sizes = (DATAGRAM.size, size) if backward else (size, DATAGRAM.size)
        if not all([self._send(test, number, *sizes) for number in range(_TRIES)]):
            return False
        return self._answer(test, time.monotonic() + self._patience) is not None
