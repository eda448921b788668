"""Whether the next rank's process is still there, for ranks whose devices do the waiting.

On a CPU a transfer fails as soon as a peer's connection closes. On a GPU the host has gone on, and the device waits for
as long as NCCL's watchdog lets it. So each rank holds a connection to the next one, over which nothing is ever sent:
the kernel closes it when that process ends, and its keepalive notices when that machine or the link to it is gone. A
rank that stands still looks at its own connection, and tells the others (`activity.py`).
"""

from __future__ import annotations

import contextlib
import socket
from typing import final

from towpath.logs import logger
from towpath.topology.groups import Groups, meeting_point

_LOG = logger("engine")

_PATIENCE_SECONDS = 5.0
# Keepalive: after how many seconds of silence the other side is asked, how often again, and how often in all.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


@final
class Neighbour:
    """The next rank of a process group; the first follows on the last. Every rank must make one."""

    def __init__(self, groups: Groups) -> None:
        self.rank = (groups.rank + 1) % groups.world
        self._connection: socket.socket | None = None
        self._from_previous: socket.socket | None = None  # held, so that the previous rank sees this process end
        with socket.create_server(("", 0), backlog=1) as listener:
            host, _, _ = meeting_point().rpartition(":")
            addresses = groups.gather_objects((_own_address(host), listener.getsockname()[1]))
            try:
                self._connection = _watched(socket.create_connection(addresses[self.rank], _PATIENCE_SECONDS))
            except OSError as error:
                _LOG.info("no connection to rank %d: nobody is told soon if its process ends (%s)", self.rank, error)
            have_connected = groups.gather_objects(self._connection is not None)
            if have_connected[groups.rank - 1]:
                self._from_previous, _ = listener.accept()

    @property
    def is_gone(self) -> bool:
        """Whether the connection was closed. Where there never was one, nobody knows."""
        if self._connection is None:
            return False
        try:
            return self._connection.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def _own_address(other: str) -> str:
    """The address by which this machine reaches `other`."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return probe.getsockname()[0]
    return socket.gethostname()


def _watched(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setblocking(False)
    return connection
