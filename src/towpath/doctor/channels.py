"""How connections between machines begin: where this one listens, and how an attempt to connect ends."""

from __future__ import annotations

import contextlib
import errno
import socket

from towpath.doctor.interfaces import family_of
from towpath.json_connection import JsonConnection

_CONNECT_SECONDS = 2.5
# How an attempt to connect ends, by the error of the kernel. Everything else is "silent".
_STATES = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "something else answers",
    errno.ECONNABORTED: "lost midway",
    errno.EHOSTUNREACH: "no answer from the host",
    **dict.fromkeys((errno.ENETUNREACH, errno.EADDRNOTAVAIL), "no route"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EINVAL), "forbidden here"),
}


def accepted(connection: socket.socket) -> JsonConnection:
    """Return a connection that another process has made to this one."""
    return JsonConnection(connection, _CONNECT_SECONDS)


def connect(address: str, port: int, segment: int | None = None) -> JsonConnection:
    """Connect to an address, with segments of at most so many bytes in both directions."""
    connection = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        connection.settimeout(_CONNECT_SECONDS)
        if segment is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        connection.connect((address, port))
        return accepted(connection)
    except BaseException:
        connection.close()
        raise


def listen(port: int = 0) -> socket.socket:
    """Return a socket that takes connections over IPv4, and over IPv6 where there is one."""
    with contextlib.suppress(OSError, ValueError):
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=64)


def state_of(error: OSError) -> str:
    """Return in a few words how an attempt to connect has ended."""
    other = "something else answers" if isinstance(error, ConnectionError) else "silent"
    return _STATES.get(error.errno or 0, other)
