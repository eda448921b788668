"""What a machine does for the others while they measure their paths to it: on one TCP port, and one UDP port."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
import time
from typing import Any

from towpath.doctor.interfaces import family_of

CHUNK_BYTES = 1 << 20
# What a sink reports of its connection: the seconds of its clock, and the bytes that have arrived.
RECORD = struct.Struct("!dQ")
RECORD_SECONDS = 0.01
# A datagram: the token, the test, its number, how many of the test have arrived, and the bytes of the wanted answer.
DATAGRAM = struct.Struct("!16sIIIH")
YES = b"yes\n"

_PATIENCE_SECONDS = 6.0
_MOST_DATAGRAM_BYTES = 1 << 16
# By family: the level and the option with which datagrams are never cut into fragments, whatever MTU the kernel assumes.
_NEVER_CUT = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (socket.IPPROTO_IPV6, 23)}
_PROBE = 3
_BUFFER_BYTES = 4 << 20


class Services:
    """The services of this machine, from its creation to the end of the process.

    Args:
        address: Any address of the family in which the machines talk.
    """

    def __init__(self, address: str) -> None:
        self.token, family = secrets.token_hex(8), family_of(address)
        self._listener = socket.create_server(("", 0), family=family, backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._datagrams = datagram_socket(family)
        self._datagrams.bind(("", self.port))
        for work in (self._accept, self._reflect):
            threading.Thread(target=work, name="towpath-doctor-serves", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(_PATIENCE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request: dict[str, Any] = json.loads(read_line(connection))
            if request["token"] != self.token:  # another machine is meant, which has the same address
                return
            connection.sendall(YES)
            match request["do"]:
                case "echo":
                    while data := connection.recv(64):
                        connection.sendall(data)
                case "sink":
                    _take(connection)
                case "source":
                    _give(connection, request["bytes"])
                case _:
                    pass

    def _reflect(self) -> None:
        """Answer each datagram with one of the wanted size, and how many of its test have arrived."""
        seen: dict[int, int] = {}
        while True:
            data, sender = self._datagrams.recvfrom(_MOST_DATAGRAM_BYTES)
            if len(data) >= DATAGRAM.size and data[:16] == self.token.encode():
                _, test, number, _, wanted = DATAGRAM.unpack_from(data)
                seen[test] = seen.get(test, 0) + 1
                answer = DATAGRAM.pack(data[:16], test, number, seen[test], 0).ljust(wanted, b"\0")
                with contextlib.suppress(OSError):  # larger than the MTU of this machine
                    self._datagrams.sendto(answer, sender)


def _take(connection: socket.socket) -> None:
    """Read until the peer has no more. Report now and then what has arrived, and at the end."""
    buffer, total, due = bytearray(CHUNK_BYTES), 0, 0.0
    while count := connection.recv_into(buffer):
        total, now = total + count, time.monotonic()
        if now >= due:
            connection.sendall(RECORD.pack(now, total))
            due = now + RECORD_SECONDS
    connection.sendall(RECORD.pack(time.monotonic(), total))


def _give(connection: socket.socket, count: int) -> None:
    """Send so many bytes, or until the peer leaves. It closes the connection."""
    block = memoryview(bytes(CHUNK_BYTES))
    while count > 0:
        count -= connection.send(block[:count])
    connection.recv(1)


def datagram_socket(family: socket.AddressFamily) -> socket.socket:
    """Return a socket whose datagrams are never cut into fragments."""
    made = socket.socket(family, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError):
        made.setsockopt(*_NEVER_CUT[family], _PROBE)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return made


def read_line(connection: socket.socket) -> bytes:
    """Return the next line, without reading further. It is short."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 512:
        if not (byte := connection.recv(1)):
            break
        line += byte
    return line
