"""A contestant: ranks of its own on a cluster of its own, stopped by the kernel except while it is asked something.

Each contestant has a Lab, hence networks and cables that no other one sends through, shaped like theirs: their counters
are what *it* sent. Its ranks stay for the whole race. Ranks that merely wait would not be idle: gloo has a thread for
each process group that wakes a hundred times a second. So they get SIGSTOP, and SIGCONT for their turn.

    driver ── Unix socket ──> every rank (worker.py)        a thread of the driver waits in Lab.call() for them to fail
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Protocol

from towpath import lab
from towpath.bench.harness.failure import CaseError
from towpath.bench.harness.job import InJob, Job
from towpath.bench.harness.worker import serve
from towpath.lab import LinkBytes, Rate
from towpath.topology.cluster import Topology

# The timeout of a lab's call is also that of its process group, and runs on while the ranks are stopped.
_WHOLE_RACE_SECONDS = 7 * 86_400.0
_START_SECONDS = 300.0
ANSWER_SECONDS = 900.0
_STACKS_SECONDS = 1.0
_PARK_SECONDS = 30.0
_LAST_WORDS_SECONDS = 10.0


_GONE = "ZX"  # a zombie, or no process


class ContestantError(CaseError):
    """A contestant failed or did not answer: which one, which rank, and what it said."""


class Place(Protocol):
    """Where the ranks of one contestant run."""

    world: int

    def call(self, fn: Callable[..., None], *args: Any) -> None:
        """`fn(rank, world, *args)` on every rank; returns, or raises, when they are through."""
        ...

    def counters(self) -> tuple[LinkBytes, ...]: ...

    def shape(self, inter: str | Rate | None, intra: str | Rate | None) -> None:
        """Its links have these rates from now on."""
        ...

    def close(self) -> None:
        """When this returns, no rank exists any more."""
        ...


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes joined by cables of rate `inter`, with loopbacks of rate `intra`."""

    topology: Topology
    inter: str | Rate | None = None
    intra: str | Rate | None = None

    def start(self, name: str, entry: Entry) -> Contestant:
        return Contestant(name, entry, _OnLab(self, preloaded(entry.make)))


@dataclass(frozen=True, slots=True)
class ThisHost:
    """One process beside this one: for what sends nothing, and for machines without network namespaces."""

    def start(self, name: str, entry: Entry) -> Contestant:
        return Contestant(name, entry, _OnHost())


@dataclass(frozen=True, slots=True)
class ThisJob:
    """The ranks of the job that this process is one of, on whatever links there are."""

    job: Job

    def start(self, name: str, entry: Entry) -> InJob:
        return InJob(name, entry.make, entry.arguments, self.job)


def preloaded(make: Callable[..., Any]) -> tuple[str, ...]:
    """What the server of a lab's ranks imports once, for all of them: torch, and ours that the worker is from."""
    return (*lab.PRELOAD, *([make.__module__] if make.__module__.startswith("towpath.") else []))


class _OnLab:
    def __init__(self, cluster: Cluster, preload: Sequence[str]) -> None:
        self._lab = lab.Lab(cluster.topology, inter=cluster.inter, intra=cluster.intra, preload=preload)
        self.world = cluster.topology.world
        self.counters = self._lab.counters
        self.close = self._lab.close

    def shape(self, inter: str | Rate | None, intra: str | Rate | None) -> None:
        self._lab.shape(inter=inter, intra=intra)

    def call(self, fn: Callable[..., None], *args: Any) -> None:
        self._lab.call(fn, *args, timeout_seconds=_WHOLE_RACE_SECONDS)


class _OnHost:
    world = 1

    def __init__(self) -> None:
        self._process: Any = None

    def call(self, fn: Callable[..., None], *args: Any) -> None:
        # spawn: a GPU does not survive a fork, and neither do the threads of this process.
        self._process = multiprocessing.get_context("spawn").Process(target=fn, args=(0, 1, *args), daemon=True)
        self._process.start()
        self._process.join()
        if self._process.exitcode:
            raise ContestantError(f"it ended with {self._process.exitcode}; its own words are above.")

    def counters(self) -> tuple[LinkBytes, ...]:
        return ()

    def shape(self, inter: str | Rate | None, intra: str | Rate | None) -> None:
        raise AssertionError("this host has no links")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()


@dataclass(frozen=True, slots=True)
class Entry:
    """How to start a contestant: `make(rank, world, *arguments)`, a function or class of a module, on every rank."""

    place: Cluster | ThisHost | ThisJob
    make: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    warm_turns: int = 0
    stays: bool = False  # after the race, for one on other links (pool.py)


@dataclass(frozen=True, slots=True)
class _Rank:
    line: Connection
    pid: int  # as this process sees it


class Contestant:
    """Started, and stopped until somebody asks."""

    def __init__(self, name: str, entry: Entry, place: Place) -> None:
        self.name = name
        self._failure: BaseException | None = None
        self._ranks: list[_Rank] = []
        self._folder = Path(tempfile.mkdtemp(prefix="towpath-race-"))
        self._place = place
        self.counters, self.shape = place.counters, place.shape
        self._thread: threading.Thread | None = None
        try:
            self._start(entry)
            self._answers(_START_SECONDS)
            self._park()
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *arguments: Any, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """What the worker's method returns, by rank. Only for this long does this contestant run."""
        self._signal(signal.SIGCONT)
        try:
            for rank in self._ranks:
                with suppress(BrokenPipeError):  # _answers says who ended, and why
                    rank.line.send((method, arguments))
            return self._answers(seconds)
        finally:
            self._park()

    @property
    def parked(self) -> bool:
        return self._all_are("T")

    @property
    def gone(self) -> bool:
        return self._all_are(_GONE)

    def close(self) -> None:
        self._place.close()
        if self._thread is not None:
            self._thread.join(_LAST_WORDS_SECONDS)
        for rank in self._ranks:
            rank.line.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, entry: Entry) -> None:
        place, address = self._place, str(self._folder / "driver")

        def host() -> None:
            try:
                place.call(serve, entry.make, entry.arguments, address)
            except BaseException as error:
                self._failure = error

        thread = self._thread = threading.Thread(target=host, daemon=True, name=f"ranks of {self.name}")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(place.world)
            listener.settimeout(0.2)
            thread.start()
            until = time.monotonic() + _START_SECONDS
            joined: dict[int, _Rank] = {}
            while len(joined) < place.world:
                if not thread.is_alive() or time.monotonic() > until:
                    self._fail(f"{len(joined)} of {place.world} ranks came")
                with suppress(TimeoutError):
                    rank = _joined(listener.accept()[0])
                    joined[rank.line.recv()] = rank
            self._ranks = [joined[number] for number in sorted(joined)]

    def _answers(self, seconds: float) -> list[Any]:
        until = time.monotonic() + seconds
        waiting = {rank.line: number for number, rank in enumerate(self._ranks)}
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                self._signal(signal.SIGUSR1)  # their stacks, on stderr
                time.sleep(_STACKS_SECONDS)
                self._fail(f"no answer in {seconds:g} s from ranks {sorted(waiting.values())}; their stacks are above")
            for line in [line for line in waiting if line in ready]:
                number = waiting.pop(line)
                try:
                    answers[number] = line.recv()
                except (EOFError, ConnectionResetError):
                    self._fail(f"rank {number} ended in the middle of its work")
        return [answers[number] for number in range(len(self._ranks))]

    def _fail(self, what: str) -> NoReturn:
        if self._thread is not None:
            self._thread.join(_LAST_WORDS_SECONDS)  # a rank that raised has told it why
        raise ContestantError(f"contestant {self.name!r}: {self._failure or what}") from self._failure

    def _park(self) -> None:
        """Stopped when this returns; the kernel may take its time where cores are busy."""
        self._signal(signal.SIGSTOP)
        until = time.monotonic() + _PARK_SECONDS
        while not self._all_are("T" + _GONE):
            if time.monotonic() > until:
                raise ContestantError(f"contestant {self.name!r}: its ranks were told to stop, and go on.")
            time.sleep(0.0002)

    def _all_are(self, states: str) -> bool:
        return all(_state(rank.pid) in states for rank in self._ranks)

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)


def _state(pid: int) -> str:
    """The kernel's letter: T is stopped; X, there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _joined(connection: socket.socket) -> _Rank:
    """A rank lives in a pid namespace of its lab: only the kernel knows its number out here."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return _Rank(Connection(connection.detach()), struct.unpack("3i", credentials)[0])
