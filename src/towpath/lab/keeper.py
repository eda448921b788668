"""The process that holds a lab together: it makes the nodes, starts what runs on them, and takes all of it along.

    owner ── guard ── keeper, the first process of a pid namespace ──┬── a run (processes.py)
                                                                     └── server of ranks ── a call

The owner (pytest, the command, a benchmark) never changes namespaces itself: it starts a guard, which enters those of
the lab and forks the keeper. The keeper answers requests until the owner lets go of the socket or ends, by whatever
death. When the keeper ends, so does every process of the lab, and with the last of them namespaces, bridge and cables;
only then does the guard, which has a folder to remove. Were the guard killed, the keeper would die with it.
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

from towpath.errors import LabError, TowpathError
from towpath.lab import counters, shaping
from towpath.lab.messages import Answer, Count, End, Plug, Raise, Refusal, Request, Shape, Start, Warm
from towpath.lab.namespaces import Space, cover_file, fork_first_process, leave_the_host, new_node
from towpath.lab.processes import Runs, receive_descriptor


def main(control_descriptor: int) -> None:
    """The guard."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the owner's to handle
    signal.signal(signal.SIGTERM, _leave)
    control = Connection(control_descriptor)
    request = control.recv()
    assert isinstance(request, Raise), request
    try:
        owner = os.pidfd_open(request.owner)
        if os.getppid() != request.owner:
            return
        try:
            bridge = leave_the_host()
        except LabError as error:
            control.send(Refusal(str(error)))
            return
        keeper = fork_first_process(last=True)
        if keeper == 0:
            _keep(request, bridge, control, owner)
        control.close()
        os.waitpid(keeper, 0)
    finally:
        shutil.rmtree(request.folder, ignore_errors=True)


def _keep(request: Raise, bridge: Space, control: Connection, owner: int) -> None:
    """The keeper: never returns."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            keeper = Keeper(request, bridge)
        except Exception as error:
            control.send(_refusal(error))
            return
        control.send(None)
        _answer_all(control, owner, keeper.answer)
    finally:
        os._exit(0)


class Keeper:
    """A raised cluster."""

    def __init__(self, request: Raise, bridge: Space) -> None:
        hosts = Path(request.folder, "hosts")
        # Torch's store listens on IPv6 where it can, and so looks for names by the second form.
        names = [
            f"{form}{shaping.address(node)} node{node}" for form in ("", "::ffff:") for node in range(request.nodes)
        ]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        cover_file("/etc/hosts", hosts)
        self._bridge = bridge
        self._nodes = [new_node(f"node{node}", bridge) for node in range(request.nodes)]
        shaping.lay_cables(self._nodes, bridge, request.inter, request.intra)
        self._runs = Runs(self._nodes)

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
            case Shape():
                return shaping.shape_links(self._nodes, self._bridge, request.inter, request.intra)
            case Warm():
                return self._warm(request, receive_descriptor(control), control)
            case Raise():
                raise AssertionError("a keeper raises one cluster")

    def _warm(self, request: Warm, descriptor: int, control: Connection) -> None:
        if os.fork() == 0:
            status = 1
            try:
                control.close()
                _serve_ranks(request, self._nodes, Connection(descriptor))
                status = 0
            finally:
                os._exit(status)
        os.close(descriptor)


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
