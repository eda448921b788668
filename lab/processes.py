"""Processes that end together, as the keeper and the rank server fork them.

    keeper or server ── first process of a pid namespace ──┬── member 0 (its own session, on its node)
                        (reaps, reports who ended, passes  ├── member 1
                        signals on)                        └── ...   and their children

To kill all of them, it is enough to kill the first process. The kernel then kills the others, sessions and daemons too.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import reduction, spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lab.namespaces import Namespaces, fork_first_process
from lab.protocol import EndProcesses, Member, Program, RankCall, StartProcesses


def receive_descriptor(control: Connection) -> int:
    """Receive a file descriptor that children do not inherit."""
    descriptor = reduction.recv_handle(control)
    os.set_inheritable(descriptor, False)
    return descriptor


class ProcessTable:
    """The sets of processes that one process started and has not ended."""

    def __init__(self, nodes: Mapping[int, Namespaces]) -> None:
        self._nodes = nodes
        self._numbers = itertools.count()
        self._live: dict[int, tuple[int, set[int]]] = {}  # by number: the first process, and the nodes

    def start(self, request: StartProcesses, control: Connection) -> int:
        """Start the processes. Return a number that identifies the set."""
        calls = sum(isinstance(member, RankCall) for member in request.members)
        channel, stdout, stderr, *results = (receive_descriptor(control) for _ in range(3 + calls))
        # Each child would write what is still buffered.
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = fork_first_process()
            if pid == 0:
                control.close()
                _lead(request.members, self._nodes, Connection(channel), (stdout, stderr), results)
        finally:
            for descriptor in (channel, stdout, stderr, *results):
                os.close(descriptor)
        number = next(self._numbers)
        self._live[number] = pid, {member.node for member in request.members}
        return number

    def end(self, request: EndProcesses) -> None:
        """Kill the processes of a set, and wait until they are gone."""
        if request.identifier in self._live:
            pid, _ = self._live.pop(request.identifier)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def end_node(self, node: int) -> None:
        """Kill all processes of a node, and wait until they are gone. Programs of other nodes are in other sets."""
        for number in [number for number, (_, nodes) in self._live.items() if node in nodes]:
            self.end(EndProcesses(number))


def _lead(
    members: Sequence[Member],
    nodes: Mapping[int, Namespaces],
    channel: Connection,
    output: tuple[int, int],
    results: Sequence[int],
) -> None:
    """Run as the first process of a set. It never returns."""
    status = 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        pipes = iter(results)
        running: dict[int, int] = {}
        # The store listens before any rank exists. A rank that cannot connect would only retry half a second later.
        store = _listen(members, nodes)
        for index, member in enumerate(members):
            result = next(pipes) if isinstance(member, RankCall) else -1
            pid = os.fork()
            if pid == 0:
                channel.close()
                # The owner sees the end of a rank by the end of its pipe, so no other rank may hold it open.
                for other in set(results) - {result}:
                    os.close(other)
                _become(member, nodes[member.node], output, result, store)
            running[pid] = index
        for descriptor in (*output, *results):
            os.close(descriptor)
        if store is not None:
            store.close()
        _watch(running, channel)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _watch(running: dict[int, int], channel: Connection) -> None:
    exits = {pid: os.pidfd_open(pid) for pid in running}
    while running:
        ready = wait([channel, *exits.values()])
        if channel in ready:
            try:
                number: int = channel.recv()
            except (EOFError, OSError):
                return  # the owner closed the set
            for pid in running:
                with suppress(ProcessLookupError):
                    os.killpg(pid, number)
        for pid, status in _reap():
            if pid in running:
                os.close(exits.pop(pid))
                with suppress(OSError):
                    channel.send((running.pop(pid), status))


def _reap() -> list[tuple[int, int]]:
    """Reap all processes that ended. Orphans of the members became children of this first process."""
    ended: list[tuple[int, int]] = []
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(found)
    return ended


def _become(
    member: Member, node: Namespaces, output: tuple[int, int], result: int, store: socket.socket | None
) -> None:
    """Move the forked child to the node, and turn it into the member. It never returns."""
    status = 127
    try:
        os.setsid()
        node.enter()
        node.mount()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in zip((null, *output), (0, 1, 2), strict=True):
            os.dup2(source, target)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        if isinstance(member, Program):
            os.chdir(member.folder)
            os.execvpe(member.argv[0], member.argv, member.env)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert store is not None, "calls come with a store"
        _serve(member, result, store)
        status = 0
    except BaseException as error:
        print(f"lab: could not start {member}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


# --- calls on ranks ---------------------------------------------------------------------------------------------------


def _listen(members: Sequence[Member], nodes: Mapping[int, Namespaces]) -> socket.socket | None:
    """Move to the node of rank 0 and return the socket of the calls' store. Return None for programs."""
    first = members[0]
    if not isinstance(first, RankCall):
        return None
    nodes[first.node].enter()
    return socket.create_server((first.env["MASTER_ADDR"], int(first.env["MASTER_PORT"])), backlog=first.world)


def _serve(call: RankCall, result: int, store: socket.socket) -> None:
    """Call the function in a gloo group, send the value or the traceback, and wait for the end of the set.

    The rank stays when it is done. If it left, connections of peers that still communicate would break, and their
    errors would hide its own.
    """
    os.environ.clear()
    os.environ.update(call.env)
    with Path(call.stack_file).open("w") as stack, Connection(result, readable=False) as answers:
        faulthandler.dump_traceback_later(call.timeout_seconds, exit=True, file=stack)
        try:
            answer = pickle.dumps((True, _call(call, store)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
        answers.send_bytes(answer)
    while True:
        signal.pause()


def _call(call: RankCall, listener: socket.socket) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    torch.set_num_threads(1)
    if call.main:
        spawn.prepare(call.main)
    fn, args = pickle.loads(call.payload)
    timeout = timedelta(seconds=call.timeout_seconds)
    host, port = listener.getsockname()
    hosts_store = call.rank == 0
    # The store of rank 0 takes over the socket. The other ranks only have copies of it.
    accepting = listener.detach()
    if not hosts_store:
        os.close(accepting)
    store = TCPStore(host, port, call.world, hosts_store, timeout, master_listen_fd=accepting if hosts_store else None)
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world, timeout=timeout)
    return fn(call.rank, call.world, *args)
