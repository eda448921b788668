"""Requests of a lab's owner to the keeper and the rank server, and the client that sends them.

Each request is a message on a socket, followed by file descriptors. Each has one answer.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from lab.cables import Wiring
from lab.errors import LabError
from lab.links import LinkBytes, RackBytes


@dataclass(frozen=True, slots=True)
class Program:
    """A program on a node."""

    node: int
    argv: tuple[str, ...]
    env: dict[str, str]
    folder: str


@dataclass(frozen=True, slots=True)
class RankCall:
    """A function call on a rank that is forked from the rank server.

    Attributes:
        node: The node of the rank.
        rank: The rank.
        world: The number of ranks.
        env: The environment of the rank.
        payload: The pickled function and its arguments.
        main: How to import the caller's `__main__`, if the function is defined there.
        timeout_seconds: How long the call may take.
        stack_file: The file to which a rank writes its stack after the timeout.
    """

    node: int
    rank: int
    world: int
    env: dict[str, str]
    payload: bytes
    main: dict[str, Any]
    timeout_seconds: float
    stack_file: str


Member = Program | RankCall

# Where each node's disk is mounted, in the lab's folder.
DISK = "disk"


# --- requests, each with its answer -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateNodes:
    """The first request: create the nodes and their cables. The answer is None."""

    owner: int
    names: tuple[str, ...]  # of each node
    racks: tuple[int, ...]  # of each node
    wiring: Wiring
    folder: str


@dataclass(frozen=True, slots=True)
class StartServer:
    """Fork a rank server that imports `preload`. One descriptor: its control socket. The answer is None."""

    preload: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartProcesses:
    """Start processes that end together. Programs are all on one node. The answer is an identifier.

    Descriptors: a channel, stdout, stderr, and a result pipe for each `RankCall`. The channel reports (member, wait
    status) as each process ends, and takes signal numbers to pass on.
    """

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class EndProcesses:
    """Kill what is left of a `StartProcesses`. The answer is None, when none of its processes exists."""

    identifier: int


@dataclass(frozen=True, slots=True)
class ReadCounters:
    """Read the counters of all nodes. The answer is a tuple of `LinkBytes`."""


@dataclass(frozen=True, slots=True)
class ReadRackCounters:
    """Read the counters of all racks. The answer is a tuple of `RackBytes`, empty if there is one rack."""


@dataclass(frozen=True, slots=True)
class PlugCable:
    """Disconnect or connect a node's cable. The answer is None."""

    node: int
    connected: bool


@dataclass(frozen=True, slots=True)
class DestroyNode:
    """Kill the processes of a node, and remove its network, memory and disk. The answer is None, when they are gone.

    If it is `silent`, the cable is cut first, as in a power failure: no peer sees the end of a connection.
    """

    node: int
    silent: bool


@dataclass(frozen=True, slots=True)
class RebuildNode:
    """Create a destroyed node anew, with empty memory and disk. The answer is None."""

    node: int


@dataclass(frozen=True, slots=True)
class ShapeLinks:
    """Set the rates of all links. The answer is None."""

    wiring: Wiring


Request = (
    CreateNodes
    | StartServer
    | StartProcesses
    | EndProcesses
    | ReadCounters
    | ReadRackCounters
    | PlugCable
    | DestroyNode
    | RebuildNode
    | ShapeLinks
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a request that failed: the text of a LabError, or the traceback of a bug."""

    text: str


Answer = tuple[LinkBytes, ...] | tuple[RackBytes, ...] | int | Refusal | None


# --- the owner's side -------------------------------------------------------------------------------------------------


def socket_pair() -> tuple[Connection, int]:
    """Return our end of a new socket, and the descriptor of the other end."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), theirs.detach()


class Client:
    """Sends requests to a keeper or a rank server, one at a time, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def ask(self, request: Request, descriptors: Sequence[int] = ()) -> Answer:
        """Send `request`, and copies of the descriptors, and return the answer."""
        with self._lock:
            if self._connection.closed:
                raise LabError("this lab is closed: make another.")
            try:
                self._connection.send(request)
                for descriptor in descriptors:
                    reduction.send_handle(self._connection, descriptor, os.getpid())
                return self.receive()
            except BaseException as error:
                # The answer may still come, and would be taken for the answer to the next request.
                if not isinstance(error, LabError):
                    self._connection.close()
                raise

    def receive(self) -> Answer:
        """Return the next answer, or raise LabError if it is a refusal."""
        try:
            answer: Answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise LabError("the lab's keeper ended: its namespaces and processes are gone. Make another lab.") from None
        if isinstance(answer, Refusal):
            raise LabError(answer.text)
        return answer

    def close(self) -> None:
        """Close the connection. The other side ends with it."""
        with self._lock:
            self._connection.close()
