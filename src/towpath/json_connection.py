"""Connections over which messages go: JSON objects, one a line. Each wait has a limit."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from typing import Any, Self

Message = dict[str, Any]

# Lines are sent in pieces so short that a segment with one passes every path, also one that loses long packets.
SHORT_BYTES = 500

_LINE_BYTES = 1 << 22  # at most, since another program may have connected


class JsonConnection:
    """One end of a connection. Whatever goes wrong with it, or is no message, raises an OSError.

    Args:
        connection: The connected socket. A `with` statement closes it.
        seconds: The limit of each wait that names none.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.socket, self.seconds = connection, seconds
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends = connection.getsockname(), connection.getpeername()
        # The host of this end, as the other one reaches it, and the host at the other end.
        self.here, self.there = (str(end[0]).removeprefix("::ffff:") for end in ends)
        self._messages: list[Message] = []
        self._rest = b""
        self._sending = threading.Lock()

    def send(self, message: Message, seconds: float | None = None) -> None:
        """Send a message. Several threads may."""
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            self.socket.settimeout(self.seconds if seconds is None else seconds)
            for at in range(0, len(data), SHORT_BYTES):
                self.socket.sendall(data[at : at + SHORT_BYTES])

    def read(self, seconds: float | None = None) -> list[Message]:
        """Return the messages that one read brings."""
        self.socket.settimeout(self.seconds if seconds is None else max(0.001, seconds))
        found = self.socket.recv(1 << 16)
        if not found:
            raise ConnectionError("its connection has ended")
        *lines, self._rest = (self._rest + found).split(b"\n")
        try:
            messages: list[Any] = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            messages = [None]
        if len(self._rest) > _LINE_BYTES or not all(isinstance(each, dict) for each in messages):
            raise ConnectionError("it is another program")
        return messages

    def receive(self, seconds: float | None = None) -> Message:
        """Wait for the next message, and return it."""
        until = time.monotonic() + (self.seconds if seconds is None else seconds)
        while not self._messages:
            self._messages = self.read(until - time.monotonic())
        return self._messages.pop(0)

    def ask(self, message: Message) -> Message:
        """Send a message, and return the answer, which comes at once."""
        self.send(message)
        return self.receive()

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
