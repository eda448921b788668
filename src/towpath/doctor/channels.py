"""Connections between machines for values of JSON, one a line. Each wait has a limit.

Lines are sent in short pieces, and segments can be kept short in both directions, because a path may lose long ones.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
from typing import Any

from towpath.doctor.interfaces import family_of

SHORT_BYTES = 500  # of a segment that passes every path

_CONNECT_SECONDS = 2.5
# How an attempt to connect ends, by the error of the kernel. Everything else is "silent".
_STATES = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "something else answers",
    errno.EHOSTUNREACH: "no answer from the host",
    **dict.fromkeys((errno.ENETUNREACH, errno.EADDRNOTAVAIL), "no route"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EINVAL), "forbidden here"),
}


class Channel:
    """One end of a connection. A `with` statement closes it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends = connection.getsockname(), connection.getpeername()
        self.here, self.there = (str(end[0]).removeprefix("::ffff:") for end in ends)
        self._lines = connection.makefile("rb")

    @staticmethod
    def to(address: str, port: int, segment: int | None = None) -> Channel:
        """Connect to an address, with segments of at most so many bytes."""
        connection = socket.socket(family_of(address), socket.SOCK_STREAM)
        try:
            connection.settimeout(_CONNECT_SECONDS)
            if segment is not None:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
            connection.connect((address, port))
            return Channel(connection)
        except BaseException:
            connection.close()
            raise

    def send(self, value: Any, seconds: float = _CONNECT_SECONDS) -> None:
        self.socket.settimeout(seconds)
        data = json.dumps(value).encode() + b"\n"
        for at in range(0, len(data), SHORT_BYTES):
            self.socket.sendall(data[at : at + SHORT_BYTES])

    def receive(self, seconds: float = _CONNECT_SECONDS) -> Any:
        """Return the next value, or raise OSError if the other end is silent for so long."""
        self.socket.settimeout(max(0.001, seconds))
        line = self._lines.readline(1 << 26)
        try:
            return json.loads(line)
        except ValueError:
            raise ConnectionError("the connection has ended, or something else answers") from None

    def close(self) -> None:
        self._lines.close()
        self.socket.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen(port: int = 0) -> socket.socket:
    """Return a socket that takes connections over IPv4, and over IPv6 where there is one."""
    with contextlib.suppress(OSError, ValueError):
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=64)


def state_of(error: OSError) -> str:
    """Return in a few words how an attempt to connect has ended."""
    other = "something else answers" if isinstance(error, ConnectionError) else "silent"
    return _STATES.get(error.errno or 0, other)
