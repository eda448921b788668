"""The owner's end of the socket to a keeper, or to a server of ranks."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection

from towpath.errors import LabError
from towpath.lab.messages import Answer, Refusal, Request


def pair() -> tuple[Connection, int]:
    """Our end of a new socket, and the descriptor of theirs."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), theirs.detach()


class Line:
    """Asks one question at a time, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def ask(self, request: Request, descriptors: Sequence[int] = ()) -> Answer:
        """The answer to `request`; the other side gets copies of the descriptors."""
        with self._lock:
            if self._connection.closed:
                raise LabError("this lab is closed: make another.")
            try:
                self._connection.send(request)
                for descriptor in descriptors:
                    reduction.send_handle(self._connection, descriptor, os.getpid())
                return self.receive()
            except BaseException as error:
                if not isinstance(error, LabError):
                    self._connection.close()  # an answer may still be under way, and would be taken for the next one
                raise

    def receive(self) -> Answer:
        try:
            answer: Answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise LabError("the lab's keeper ended: its namespaces and processes are gone. Make another lab.") from None
        if isinstance(answer, Refusal):
            raise LabError(answer.text)
        return answer

    def close(self) -> None:
        with self._lock:
            self._connection.close()
