"""The process that holds a lab together: it makes the nodes, starts what runs on them, and takes all of it along.

The owner (pytest, the command, a benchmark) never changes namespaces itself. It starts a keeper, which answers requests
until the owner lets go of the socket or ends, by whatever death; then the keeper kills every run and goes, and with it
the last hold on the namespaces, bridge and cables. Were the keeper itself killed, its children would die with it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from towpath.errors import TowpathError
from towpath.lab import counters, shaping
from towpath.lab.messages import Answer, Count, End, Plug, Raise, Refusal, Request, Start, Warm
from towpath.lab.namespaces import Space, adopt_orphans, cover_file, die_with_parent, leave_the_host, new_node
from towpath.lab.processes import Runs, receive_descriptor


def main(control_descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the owner's to handle
    signal.signal(signal.SIGTERM, _leave)
    control = Connection(control_descriptor)
    request = control.recv()
    assert isinstance(request, Raise), request
    try:
        owner = os.pidfd_open(request.owner)
        if os.getppid() == request.owner:
            _keep(request, control, owner)
    finally:
        shutil.rmtree(request.folder, ignore_errors=True)


def _keep(request: Raise, control: Connection, owner: int) -> None:
    try:
        keeper = Keeper(request)
    except Exception as error:
        control.send(_refusal(error))
        return
    try:
        control.send(None)
        _answer_all(control, owner, keeper.answer)
    finally:
        keeper.close()


class Keeper:
    """A raised cluster."""

    def __init__(self, request: Raise) -> None:
        adopt_orphans()
        bridge = leave_the_host()
        hosts = Path(request.folder, "hosts")
        names = [f"{shaping.address(node)} node{node}" for node in range(request.nodes)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        cover_file("/etc/hosts", hosts)
        self._nodes = [new_node(f"node{node}", bridge) for node in range(request.nodes)]
        shaping.lay_cables(self._nodes, bridge, request.inter, request.intra)
        self._runs = Runs(self._nodes)
        self._server = 0

    def answer(self, request: Request, control: Connection) -> Answer:
        match request:
            case Start():
                return self._runs.start(request, control)
            case End():
                return self._runs.end(request)
            case Count():
                return tuple(counters.read_descriptor(node.counters) for node in self._nodes)
            case Plug():
                return shaping.plug(request.node, request.connected)
            case Warm():
                return self._warm(request, receive_descriptor(control), control)
            case Raise():
                raise AssertionError("a keeper raises one cluster")

    def _warm(self, request: Warm, descriptor: int, control: Connection) -> None:
        self._server = os.fork()
        if self._server == 0:
            status = 1
            try:
                die_with_parent()
                control.close()
                _serve_ranks(request, self._nodes, Connection(descriptor))
                status = 0
            finally:
                os._exit(status)
        os.close(descriptor)

    def close(self) -> None:
        """Every process of the lab is gone when this returns; its networks go with the keeper."""
        self._runs.end_all()
        if self._server:
            os.kill(self._server, signal.SIGKILL)
        # What the server of ranks started loses its parent, dies of that, and becomes this process's to wait for.
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def _serve_ranks(request: Warm, nodes: Sequence[Space], control: Connection) -> None:
    """The server of ranks: a child of the keeper that imports torch once, for all the ranks it will fork."""
    runs = Runs(nodes)

    def answer(request: Request, control: Connection) -> Answer:
        match request:
            case Start():
                return runs.start(request, control)
            case End():
                return runs.end(request)
            case _:
                raise AssertionError(request)

    try:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, not later
        for module in request.preload:
            importlib.import_module(module)
    except BaseException as error:
        control.send(_refusal(error))
        return
    control.send(None)
    _answer_all(control, None, answer)


def _answer_all(control: Connection, owner: int | None, answer: Callable[[Request, Connection], Answer]) -> None:
    """Until the owner lets go, or ends: its other children may hold copies of the socket open."""
    while True:
        ready = wait([control] if owner is None else [control, owner])
        if owner in ready:
            return
        try:
            request = control.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            given = answer(request, control)
        except Exception as error:
            given = _refusal(error)
        with suppress(BrokenPipeError):
            control.send(given)


def _leave(*_: object) -> None:
    sys.exit(0)


def _refusal(error: BaseException) -> Refusal:
    if isinstance(error, TowpathError):
        return Refusal(str(error))
    return Refusal("".join(traceback.format_exception(error)))
