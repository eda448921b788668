"""Processes that end together: what the keeper and the server of ranks fork when they are asked to `Start`.

    keeper or server ── first process of a pid namespace ──┬── member 0 (its own session, on its node)
                        (reaps, tells who ended, passes    ├── member 1
                        signals on)                        └── ...   and whatever they start

Killing the first process kills all of them, sessions and daemons too: the kernel does it, and no list can miss one.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait

from towpath.lab import ranks
from towpath.lab.messages import Call, Command, End, Member, Start
from towpath.lab.namespaces import Space, fork_first_process


def receive_descriptor(control: Connection) -> int:
    descriptor = reduction.recv_handle(control)
    os.set_inheritable(descriptor, False)
    return descriptor


class Runs:
    """The runs that one process started and has not ended."""

    def __init__(self, nodes: Sequence[Space]) -> None:
        self._nodes = nodes
        self._live: set[int] = set()

    def start(self, request: Start, control: Connection) -> int:
        calls = sum(isinstance(member, Call) for member in request.members)
        channel, stdout, stderr, *results = (receive_descriptor(control) for _ in range(3 + calls))
        # What is buffered would be written once by every child.
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
        self._live.add(pid)
        return pid

    def end(self, request: End) -> None:
        if request.identifier in self._live:
            self._live.discard(request.identifier)
            os.kill(request.identifier, signal.SIGKILL)
            os.waitpid(request.identifier, 0)


def _lead(
    members: Sequence[Member],
    nodes: Sequence[Space],
    channel: Connection,
    output: tuple[int, int],
    results: Sequence[int],
) -> None:
    """The first process of a run: never returns."""
    status = 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        pipes = iter(results)
        running: dict[int, int] = {}
        # Listening before any rank exists: one that found nobody would try again half a second later.
        store = ranks.listen(members, nodes)
        for index, member in enumerate(members):
            result = next(pipes) if isinstance(member, Call) else -1
            pid = os.fork()
            if pid == 0:
                channel.close()
                for other in set(results) - {result}:
                    os.close(other)  # or the owner would not see it end with its rank
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
                return  # the owner let go of this run
            for pid in running:
                with suppress(ProcessLookupError):
                    os.killpg(pid, number)
        for pid, status in _reap():
            if pid in running:
                os.close(exits.pop(pid))
                with suppress(OSError):
                    channel.send((running.pop(pid), status))


def _reap() -> list[tuple[int, int]]:
    """Everyone who ended, orphans of the members included: they became children of this first process."""
    ended: list[tuple[int, int]] = []
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(found)
    return ended


def _become(member: Member, node: Space, output: tuple[int, int], result: int, store: socket.socket | None) -> None:
    """In the forked child: move to the node and turn into the member. Never returns."""
    status = 127
    try:
        os.setsid()
        node.enter()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in zip((null, *output), (0, 1, 2), strict=True):
            os.dup2(source, target)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        if isinstance(member, Command):
            os.chdir(member.folder)
            os.execvpe(member.argv[0], member.argv, member.env)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert store is not None, "calls come with a store"
        ranks.serve(member, result, store)
        status = 0
    except BaseException as error:
        print(f"towpath lab: could not start {member}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)
