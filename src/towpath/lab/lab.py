"""A cluster on this machine: raised, used and taken down by one object."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from towpath.errors import LabError
from towpath.lab import folders
from towpath.lab.counters import LinkBytes
from towpath.lab.launch import LAUNCHERS, PORT, Launcher, calls, check_script
from towpath.lab.line import Line, pair
from towpath.lab.messages import Count, Plug, Raise, Shape, Warm
from towpath.lab.run import Members, Result, Run, describe
from towpath.lab.shaping import Rate
from towpath.topology.cluster import Topology

# A rank ends itself when its time is up; only one that cannot makes the owner wait longer.
_GRACE_SECONDS = 10.0
_LAST_WORDS_SECONDS = 2.0
_CLOSE_SECONDS = 10.0

# What ranks that train would otherwise each import for themselves; optimizers import the last at their first step.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo")


class Lab:
    """`topology` as network namespaces, joined by cables of rate `inter`, with loopbacks of rate `intra`.

    A rate is text such as '200mbit', a `Rate`, or None for as fast as the machine goes. One run or call at a time.
    `preload` names what the server of ranks behind `call()` imports, once, before the first call.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        inter: str | Rate | None = None,
        intra: str | Rate | None = None,
        preload: Sequence[str] = PRELOAD,
    ) -> None:
        self.topology = topology
        self.inter = _rate(inter)
        self.intra = _rate(intra)
        self._preload = tuple(preload)
        self._ports = itertools.count(PORT)
        self._run: Run | None = None
        self._server: Line | None = None
        folders.sweep()
        self._folder = folders.make()
        connection, descriptor = pair()
        self._line = Line(connection)
        try:
            self._guard = _start_guard(descriptor, self._folder.name)
        except BaseException:
            connection.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(descriptor)
        try:
            folders.note_guard(self._folder, self._guard.pid)
            self._line.ask(Raise(os.getpid(), topology.nodes, self.inter, self.intra, str(self._folder)))
        except BaseException:
            self.close()
            raise

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
        capture: bool = False,
        launcher: Launcher = "torchrun",
    ) -> Result:
        """Run a script and its arguments on every rank, to its end. `capture` keeps the output of all of them."""
        with self.start(argv, env=env, capture=capture, launcher=launcher) as run:
            return run.wait(timeout_seconds)

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        capture: bool = False,
        launcher: Launcher = "torchrun",
    ) -> Run:
        """Start a script on every rank and return at once."""
        check_script(argv)
        self._check_idle()
        self._run = Run(self._line, LAUNCHERS[launcher](argv, self.topology, env), self.counters, capture)
        return self._run

    def call(self, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
        """`fn(rank, world, *args)` on every rank, in a gloo group: what each returned, by rank.

        The ranks are new processes, forked from one that has torch loaded. A rank that raises, dies or hangs ends the
        call: a LabError tells its rank and traceback, and the others are killed.
        """
        self._check_idle()
        members = calls(fn, args, self.topology, next(self._ports), timeout_seconds, self._folder)
        pipes = [os.pipe() for _ in members]
        readers = [Connection(reader, writable=False) for reader, _ in pipes]
        try:
            try:
                started = Members(self._warm(), members, (1, 2), [writer for _, writer in pipes])
            finally:
                for _, writer in pipes:
                    os.close(writer)
            try:
                return self._collect(started, readers, timeout_seconds)
            finally:
                started.close()
        finally:
            for reader in readers:
                reader.close()

    def counters(self) -> tuple[LinkBytes, ...]:
        """What each node's links have carried since the lab was raised; also while something runs."""
        answer = self._line.ask(Count())
        assert isinstance(answer, tuple), answer
        return answer

    def cut(self, node: int) -> None:
        """Pull the node's cable; also while something runs."""
        self._plug(node, connected=False)

    def mend(self, node: int) -> None:
        """Put the node's cable back."""
        self._plug(node, connected=True)

    def shape(self, *, inter: str | Rate | None = None, intra: str | Rate | None = None) -> None:
        """Give the cables and loopbacks other rates, as when the lab was raised; also while something runs."""
        rates = _rate(inter), _rate(intra)
        self._line.ask(Shape(*rates))
        self.inter, self.intra = rates

    def close(self) -> None:
        """Take the lab down: its processes are gone when this returns."""
        if self._server is not None:
            self._server.close()
        self._line.close()
        try:
            self._guard.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._guard.kill()  # the keeper dies with it, and with that the lab
            self._guard.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plug(self, node: int, *, connected: bool) -> None:
        if node not in range(self.topology.nodes):
            raise LabError(f"there is no node {node!r}: this lab has nodes 0 to {self.topology.nodes - 1}.")
        self._line.ask(Plug(node, connected))

    def _check_idle(self) -> None:
        if self._run is not None and self._run.running:
            raise LabError("this lab is busy with a run: wait() for it or kill() it first, or raise another lab.")

    def _warm(self) -> Line:
        if self._server is None:
            connection, descriptor = pair()
            server = Line(connection)
            try:
                self._line.ask(Warm(self._preload), (descriptor,))
            finally:
                os.close(descriptor)
            try:
                server.receive()  # it has imported what it should
            except BaseException:
                server.close()
                raise
            self._server = server
        return self._server

    def _collect(self, members: Members, readers: list[Connection], timeout_seconds: float) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = {reader: rank for rank, reader in enumerate(readers)}
        deadline = time.monotonic() + timeout_seconds + _GRACE_SECONDS
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise LabError(f"no answer in {timeout_seconds:g} s from {self._names(waiting.values())}.")
            answers = _take(ready, waiting)
            if not all(done for done, _ in answers.values()):
                rank, value = _guilty(answers, waiting)
                told = self._last_words(members, rank, timeout_seconds) if value is None else value
                raise LabError(f"{self._names([rank])} of {self.topology.world} failed:\n{told}")
            results |= {rank: value for rank, (_, value) in answers.items()}
        return [results[rank] for rank in range(self.topology.world)]

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {rank} (node {self.topology.node_of(rank)})" for rank in ranks)

    def _last_words(self, members: Members, rank: int, timeout_seconds: float) -> str:
        stack = (self._folder / f"stack{rank}").read_text()
        if stack:
            return f"it hung for {timeout_seconds:g} s:\n{stack}"
        deadline = time.monotonic() + _GRACE_SECONDS
        while (ended := members.next_exit(deadline)) is not None:
            if ended[0] == rank:
                return f"it ended without an answer ({describe(ended[1])})."
        return "it closed its answer and lives on."


def _take(ready: Iterable[object], waiting: dict[Connection, int]) -> dict[int, tuple[bool, Any]]:
    """By rank, the answers that have come: (returned, value), (raised, traceback) or (died, None)."""
    answers: dict[int, tuple[bool, Any]] = {}
    for reader in [reader for reader in waiting if reader in ready]:
        try:
            answer = pickle.loads(reader.recv_bytes())
        except EOFError:
            answer = (False, None)
        answers[waiting.pop(reader)] = answer
    return answers


def _guilty(answers: dict[int, tuple[bool, Any]], waiting: dict[Connection, int]) -> tuple[int, str | None]:
    """The rank to tell of. One that dies breaks its peers' connections, and their complaints may come first."""
    failures = {rank: value for rank, (done, value) in answers.items() if not done}
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    while waiting and all(value is not None and "onnection" in value for value in failures.values()):
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        failures |= {rank: value for rank, (done, value) in _take(ready, waiting).items() if not done}
    return min(failures.items(), key=lambda failure: failure[1] is not None and "onnection" in failure[1])


@functools.cache
def available() -> str | None:
    """None if a lab can be raised here, else the reason why not. Found out by raising the smallest one, once."""
    if not sys.platform.startswith("linux"):
        return f"the lab needs Linux's network namespaces; this is {sys.platform}."
    try:
        Lab(Topology(1, 1), inter="1gbit").close()
    except LabError as error:
        return str(error)
    return None


def _rate(given: str | Rate | None) -> Rate | None:
    return Rate.parse(given) if isinstance(given, str) else given


def _start_guard(descriptor: int, name: str) -> subprocess.Popen[bytes]:
    # -P and the owner's own path: it finds the same modules as the owner, wherever it was started.
    program = f"import sys; sys.path[:] = {sys.path!r}; from towpath.lab.keeper import main; main({descriptor})"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program, name],  # the name is for those who read a list of processes
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        start_new_session=True,  # a terminal's Ctrl-C goes to the owner alone
    )
