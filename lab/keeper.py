"""The process that holds a lab together. It creates the nodes, starts processes on them, and takes them with it.

    owner ── guard ── keeper, the first process of a pid namespace ──┬── a run (processes.py)
                                                                     ├── rank server ── a call
                                                                     └── a delayed cable (delay.py)

The owner (pytest, the command, a benchmark) never changes namespaces itself. It starts a guard, which enters those of
the lab and forks the keeper. The keeper answers requests until the owner closes the socket or ends, in whatever way.
When the keeper ends, the kernel ends all processes of the lab, and with the last of them namespaces, bridge and cables.
The guard waits for this and then removes the lab's folder. If the guard is killed, the keeper dies with it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from lab import links
from lab.errors import LabError
from lab.links import LinkBytes
from lab.namespaces import Namespaces, cover_file, empty, fork_first_process, leave_the_host, new_node
from lab.processes import ProcessTable, receive_descriptor
from lab.protocol import (
    DISK,
    Answer,
    CreateNodes,
    DestroyNode,
    EndProcesses,
    PlugCable,
    ReadCounters,
    ReadRackCounters,
    RebuildNode,
    Refusal,
    Request,
    ShapeLinks,
    StartProcesses,
    StartServer,
)
from towpath.errors import TowpathError


def main(control_descriptor: int) -> None:
    """Run as the guard."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    signal.signal(signal.SIGTERM, _exit)
    control = Connection(control_descriptor)
    request = control.recv()
    assert isinstance(request, CreateNodes), request
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


def _keep(request: CreateNodes, bridge: Namespaces, control: Connection, owner: int) -> None:
    """Run as the keeper. It never returns."""
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
    """The nodes of a lab and their links. It answers the owner's requests."""

    def __init__(self, request: CreateNodes, bridge: Namespaces) -> None:
        hosts, self._disk = Path(request.folder, "hosts"), Path(request.folder, DISK)
        # Torch's store listens on IPv6 where it can, and then looks up names in the second form.
        forms = [(form, *named) for form in ("", "::ffff:") for named in enumerate(request.names)]
        names = [f"{form}{links.address(node)} {name}" for form, node, name in forms]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        cover_file("/etc/hosts", hosts)
        self._disk.mkdir()
        self._bridge, self._names, self._racks, self._wiring = bridge, request.names, request.racks, request.wiring
        self._nodes: dict[int, Namespaces] = {}
        self._lines: dict[int, int] = {}  # by node: the process of its cable, if it is delayed
        self._carried = [LinkBytes(0, 0, 0) for _ in request.names]  # by the nodes that were destroyed
        self._processes = ProcessTable(self._nodes)
        links.raise_bridges(request.racks)
        self._raise_nodes(range(len(request.names)))

    def answer(self, request: Request, control: Connection) -> Answer:
        """Carry out a request. Its descriptors follow on `control`."""
        match request:
            case StartProcesses():
                return self._processes.start(request, control)
            case EndProcesses():
                return self._processes.end(request)
            case ReadCounters():
                return tuple(map(self._count, range(len(self._names))))
            case ReadRackCounters():
                return links.read_racks(self._bridge.counters, self._racks)
            case PlugCable():
                return links.plug(request.node, request.connected)
            case DestroyNode():
                return self._destroy(request)
            case RebuildNode():
                return self._raise_nodes([request.node])
            case ShapeLinks():
                self._wiring = request.wiring
                return links.shape_links(self._nodes, self._bridge, self._racks, request.wiring)
            case StartServer():
                return self._start_server(request, receive_descriptor(control), control)
            case CreateNodes():
                raise AssertionError("a keeper creates its nodes once")

    def _raise_nodes(self, nodes: Iterable[int]) -> None:
        new = {node: new_node(self._names[node], self._disk, self._bridge) for node in nodes}
        self._nodes |= new
        self._lines |= links.lay_cables(new, self._bridge, self._racks, self._wiring)

    def _destroy(self, request: DestroyNode) -> None:
        node, spaces = request.node, self._nodes[request.node]
        if request.silent:
            links.plug(node, connected=False)
        self._processes.end_node(node)
        if not request.silent:
            links.wait_for_farewells(spaces)
        self._carried[node] = self._count(node)
        links.remove_cable(node, self._lines.pop(node, None))
        empty(spaces, self._disk)
        del self._nodes[node]
        spaces.close()

    def _count(self, node: int) -> LinkBytes:
        spaces = self._nodes.get(node)
        now = LinkBytes(0, 0, 0) if spaces is None else links.read_descriptor(spaces.counters)
        return self._carried[node] + now

    def _start_server(self, request: StartServer, descriptor: int, control: Connection) -> None:
        if os.fork() == 0:
            status = 1
            try:
                control.close()
                _serve_ranks(request, self._nodes, Connection(descriptor))
                status = 0
            finally:
                os._exit(status)
        os.close(descriptor)


def _serve_ranks(request: StartServer, nodes: Mapping[int, Namespaces], control: Connection) -> None:
    """Run as the rank server, a child of the keeper. It imports torch once for all ranks that it forks."""
    processes = ProcessTable(nodes)

    def answer(request: Request, control: Connection) -> Answer:
        match request:
            case StartProcesses():
                return processes.start(request, control)
            case EndProcesses():
                return processes.end(request)
            case _:
                raise AssertionError(request)

    try:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it only when it is loaded
        for module in request.preload:
            importlib.import_module(module)
    except BaseException as error:
        control.send(_refusal(error))
        return
    control.send(None)
    _answer_all(control, None, answer)


def _answer_all(control: Connection, owner: int | None, answer: Callable[[Request, Connection], Answer]) -> None:
    """Answer requests until the owner closes the socket or ends.

    Waiting for the end of the socket is not enough, because other children of the owner may hold copies of it.
    """
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


def _exit(*_: object) -> None:
    sys.exit(0)


def _refusal(error: BaseException) -> Refusal:
    if isinstance(error, TowpathError):
        return Refusal(str(error))
    return Refusal("".join(traceback.format_exception(error)))
