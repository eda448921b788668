"""What the owner of a lab and its keeper say to each other, over one socket: a request, its descriptors, an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from towpath.lab.counters import LinkBytes
from towpath.lab.shaping import Rate


@dataclass(frozen=True, slots=True)
class Command:
    """A program on a node."""

    node: int
    argv: tuple[str, ...]
    env: dict[str, str]
    folder: str


@dataclass(frozen=True, slots=True)
class Call:
    """A pickled function and its arguments, on a rank forked from a server that has torch loaded."""

    node: int
    rank: int
    world: int
    env: dict[str, str]
    payload: bytes
    main: dict[str, Any]  # how to import the caller's __main__, if the function lives there
    timeout_seconds: float
    stack_file: str  # where a rank that hangs writes where it stands


Member = Command | Call


@dataclass(frozen=True, slots=True)
class Raise:
    """The first request: make the nodes and their cables. Answered with None."""

    owner: int
    nodes: int
    inter: Rate | None
    intra: Rate | None
    folder: str


@dataclass(frozen=True, slots=True)
class Warm:
    """Fork a server of ranks that has imported `preload`; one descriptor: its control socket. Answered with None."""

    preload: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Start processes that end together; descriptors: their channel, stdout, stderr, and a result pipe for each call.

    The channel tells (member, wait status) as each one ends, and takes signal numbers to pass on. Answered with an
    identifier.
    """

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Kill what is left of a `Start`. Answered, with None, when none of its processes exists any more."""

    identifier: int


@dataclass(frozen=True, slots=True)
class Count:
    """Answered with the counters of every node."""


@dataclass(frozen=True, slots=True)
class Plug:
    """Pull a node's cable, or put it back. Answered with None."""

    node: int
    connected: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """Give cables and loopbacks these rates. Answered with None."""

    inter: Rate | None
    intra: Rate | None


Request = Raise | Warm | Start | End | Count | Plug | Shape


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a request that failed: the text of a LabError, or the traceback of a bug."""

    text: str


Answer = tuple[LinkBytes, ...] | int | Refusal | None
