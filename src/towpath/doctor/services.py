"""Answers the others while they measure their paths to this machine: on one TCP port, and one UDP port."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from statistics import fmean, median

from towpath.doctor.channels import accepted, listen

CHUNK_BYTES = 1 << 20
# A datagram: the token, the test, its number, and how many of the test have arrived.
DATAGRAM = struct.Struct("!16sIII")
TICK_SECONDS = 0.1

_MOST_DATAGRAM_BYTES = 1 << 16
_BUFFER_BYTES = 4 << 20
_PIECES = 10  # of the time in which a rate is measured


class Services:
    """The services of this machine, from its creation to the end of the process."""

    def __init__(self) -> None:
        self.token, self._listener = secrets.token_hex(8), listen()
        self.port: int = self._listener.getsockname()[1]
        self._datagrams = datagram_socket(self._listener.family)
        self._datagrams.bind(("", self.port))
        for work in (self._accept, self._reflect):
            threading.Thread(target=work, name="towpath-doctor-serves", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, KeyError), accepted(connection) as link:
            asked = link.receive()
            if asked["token"] != self.token:  # another machine is meant, which has the same address
                return
            link.send({"yes": True})
            match asked["do"]:
                case "echo":
                    while data := connection.recv(64):
                        connection.sendall(data)
                case "sink":
                    link.send({"rate": count(connection, asked["seconds"])})
                    # To close with bytes unread would reset the connection, and the answer with it.
                    while connection.recv(CHUNK_BYTES):
                        pass
                case "source":
                    give(connection, asked["seconds"])
                case _:  # it was only to be reached
                    pass

    def _reflect(self) -> None:
        """Answer each datagram with how many of its test have arrived."""
        seen: dict[int, int] = {}
        while True:
            data, sender = self._datagrams.recvfrom(_MOST_DATAGRAM_BYTES)
            if len(data) >= DATAGRAM.size and data[:16] == self.token.encode():
                _, test, number, _ = DATAGRAM.unpack_from(data)
                seen[test] = seen.get(test, 0) + 1
                answer = DATAGRAM.pack(data[:16], test, number, seen[test]).ljust(len(data), b"\0")
                with contextlib.suppress(OSError):  # there is no route back
                    self._datagrams.sendto(answer, sender)


def datagram_socket(family: int) -> socket.socket:
    """Return a socket for datagrams, of IPv4 too if it is of IPv6."""
    made = socket.socket(family, socket.SOCK_DGRAM)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return made


def give(connection: socket.socket, seconds: float) -> None:
    """Send as much as the path takes for some seconds. What is still under way when it is closed is dropped."""
    block, until = memoryview(bytes(CHUNK_BYTES)), time.monotonic() + seconds
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.settimeout(TICK_SECONDS)
    with contextlib.suppress(ConnectionError):  # the other end has seen enough
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                connection.send(block)


def count(connection: socket.socket, seconds: float) -> float:
    """Receive for some seconds, and return the bytes per second that the path carries."""
    buffer, pieces, began = bytearray(CHUNK_BYTES), [0] * _PIECES, time.monotonic()
    connection.settimeout(TICK_SECONDS)
    with contextlib.suppress(ConnectionError):
        while (passed := (time.monotonic() - began) / seconds) < 1:
            with contextlib.suppress(TimeoutError):
                pieces[int(passed * _PIECES)] += connection.recv_into(buffer)
    return rate_of(pieces, seconds)


def rate_of(pieces: list[int], seconds: float) -> float:
    """Return the bytes per second that a path carries, from the bytes that arrived in equal pieces of some seconds.

    The first fifth, in which TCP opens its window, is left out. It is the median of the others, so neither a process
    that had to wait for a processor counts, nor what it then finds in the kernel's memory. It is the mean if that is
    more, as on a path that is silent now and then.
    """
    settled = pieces[len(pieces) // 5 :]
    return max(median(settled), fmean(settled)) * len(pieces) / seconds
