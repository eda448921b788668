"""A connection to the next rank, which shows within seconds that its process has ended.

On a CPU a transfer fails as soon as a peer's connection closes. On a GPU the host has gone on, and the device waits
until NCCL's own watchdog stops it. So each rank holds a connection to the next one, over which only a token is sent.
The kernel closes it when that process ends, and its keepalive notices when that machine or the link to it fails. A rank
without progress checks its own connection, and posts what it finds.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from typing import final

from towpath.logs import logger
from towpath.topology.groups import Groups, rendezvous_address

_LOG = logger("engine")

_PATIENCE_SECONDS = 5.0
# Keepalive: seconds of silence before the first probe, seconds between probes, and the number of probes.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


@final
class Neighbor:
    """A connection to the next rank, which shows when its process ends. Every rank must make one.

    After the last rank comes the first. `Watchdog` uses it on GPUs.
    """

    def __init__(self, groups: Groups) -> None:
        self.rank = (groups.rank + 1) % groups.world
        self._connection: socket.socket | None = None
        self._from_previous: socket.socket | None = None  # kept open, so that it closes with this process
        with socket.create_server(("", 0)) as listener:
            host, _, _ = rendezvous_address().rpartition(":")
            # Something else may be listening at an address, or connect to it. The token shows who is meant.
            token = uuid.uuid4().bytes
            here = _own_address(host), listener.getsockname()[1]
            peers: list[tuple[tuple[str, int], bytes]] = groups.gather_objects((here, token))
            reason: object = "another process answered at its address"
            try:
                self._connection = _introduced(*peers[self.rank])
            except OSError as error:
                reason = error
            self._from_previous = _accepted(listener, token)
        have_accepted: list[bool] = groups.gather_objects(self._from_previous is not None)
        if self._connection is not None and have_accepted[self.rank]:
            return
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        _LOG.info("no connection to rank %d: this rank may notice late that its process ends (%s)", self.rank, reason)

    @property
    def is_gone(self) -> bool:
        """Whether the connection to the next rank was closed. False if there never was one."""
        if self._connection is None:
            return False
        try:
            return self._connection.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def _own_address(other: str) -> str:
    """Return the address of this machine on the route to `other`."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return probe.getsockname()[0]
    return socket.gethostname()


def _introduced(address: tuple[str, int], token: bytes) -> socket.socket:
    """Connect to `address`, and send `token`. The kernel watches the connection from then on."""
    connection = socket.create_connection(address, _PATIENCE_SECONDS)
    connection.sendall(token)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setblocking(False)
    return connection


def _accepted(listener: socket.socket, token: bytes) -> socket.socket | None:
    """Return the first connection that brings `token`, or None if none does in time. Close the others."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while (left := end - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, _ = listener.accept()
        except OSError:  # the time is over
            break
        with contextlib.suppress(OSError):
            # The peer sent its token long ago. A stranger that sends nothing must not use up the time.
            connection.settimeout(_PATIENCE_SECONDS / 10)
            if connection.recv(len(token), socket.MSG_WAITALL) == token:
                return connection
        connection.close()
    return None
