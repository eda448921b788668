"""Running candidates: each has ranks of its own, and the kernel stops them except while they are measured.

Each candidate has a lab of its own. So no other candidate sends over its links, and their counters say what it sent.
Its ranks stay for the whole comparison. Ranks that only wait would still use the cores, because gloo has a thread per
process group that wakes up a hundred times a second. So the driver stops them with SIGSTOP, and continues them with
SIGCONT when it asks for a sample.

    driver ── Unix socket ──> `serve` on every rank        a thread of the driver waits in Lab.call() for failures
"""

from __future__ import annotations

import ctypes
import faulthandler
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
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

import lab
from lab import LinkBytes, Rate
from towpath.topology.cluster import Topology

# The timeout of a lab's call is also that of its process group, and it runs on while the ranks are stopped.
_COMPARISON_SECONDS = 7 * 86_400.0
_START_SECONDS = 300.0
ANSWER_SECONDS = 900.0
_STACKS_SECONDS = 1.0
_PARK_SECONDS = 30.0
_LAST_WORDS_SECONDS = 10.0
_GONE = "ZX"  # a zombie, or no process


class CaseError(Exception):
    """A case has no figures. The text says why, and is kept with the results. The suite goes on."""


class CandidateError(CaseError):
    """A candidate failed or did not answer: its name, the rank, and the rank's own error."""


# Where ranks run ------------------------------------------------------------------------------------------------------


class Ranks(Protocol):
    """The ranks of one candidate, in a lab or on this machine."""

    world: int

    def call(self, fn: Callable[..., None], *args: Any) -> None:
        """Run `fn(rank, world, *args)` on every rank, and return or raise when all have ended."""
        ...

    def counters(self) -> tuple[LinkBytes, ...]:
        """Return what the links of each node have carried."""
        ...

    def shape(self, inter: str | Rate | None, intra: str | Rate | None) -> None:
        """Change the rates of the links."""
        ...

    def close(self) -> None:
        """End the ranks. When this returns, none of their processes exists."""
        ...


@dataclass(frozen=True, slots=True)
class LabPlace:
    """A lab with links of rate `inter` between nodes, and loopbacks of rate `intra`."""

    topology: Topology
    inter: str | Rate | None = None
    intra: str | Rate | None = None

    def start(self, name: str, launch: Launch) -> RunningCandidate:
        """Start a candidate and return it when it is ready, and stopped."""
        return RunningCandidate(name, launch, _LabRanks(self, preloaded(launch.make)))


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """One process on this machine, for work that sends nothing. It needs no network namespaces."""

    def start(self, name: str, launch: Launch) -> RunningCandidate:
        """Start a candidate and return it when it is ready, and stopped."""
        return RunningCandidate(name, launch, _LocalRank())


@dataclass(frozen=True, slots=True)
class Launch:
    """A way to start a candidate: every rank calls `make(rank, world, *arguments)`, a name of an importable module.

    Each sample is the result of the worker's `sample()`, in seconds. The first `warm_up` samples are discarded. With
    `stays`, a candidate may go on to the next comparison, on links of other rates (`comparison.Pool`).
    """

    place: LabPlace | LocalPlace
    make: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    warm_up: int = 0
    stays: bool = False


def preloaded(make: Callable[..., Any]) -> tuple[str, ...]:
    """Return the modules that a lab imports once for all its ranks: torch, and the module of the worker."""
    return (*lab.PRELOAD, *([make.__module__] if make.__module__.startswith("benchmarks.") else []))


class _LabRanks:
    def __init__(self, place: LabPlace, preload: Sequence[str]) -> None:
        self._lab = lab.Lab(place.topology, inter=place.inter, intra=place.intra, preload=preload)
        self.world = place.topology.world
        self.counters = self._lab.counters
        self.close = self._lab.close

    def shape(self, inter: str | Rate | None, intra: str | Rate | None) -> None:
        self._lab.shape(inter=inter, intra=intra)

    def call(self, fn: Callable[..., None], *args: Any) -> None:
        self._lab.call(fn, *args, timeout_seconds=_COMPARISON_SECONDS)


class _LocalRank:
    world = 1

    def __init__(self) -> None:
        self._process: Any = None

    def call(self, fn: Callable[..., None], *args: Any) -> None:
        # A GPU does not survive a fork, and neither do the threads of this process. So the process is spawned.
        self._process = multiprocessing.get_context("spawn").Process(target=fn, args=(0, 1, *args), daemon=True)
        self._process.start()
        self._process.join()
        if self._process.exitcode:
            raise CandidateError(f"it ended with {self._process.exitcode}; its own error is above.")

    def counters(self) -> tuple[LinkBytes, ...]:
        return ()

    def shape(self, inter: str | Rate | None, intra: str | Rate | None) -> None:
        raise AssertionError("a single process has no links")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()


# The driver's side ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rank:
    line: Connection
    pid: int  # in the pid namespace of the driver


class RunningCandidate:
    """A candidate whose ranks have started. They are stopped until `ask` continues them."""

    def __init__(self, name: str, launch: Launch, ranks: Ranks) -> None:
        self.name = name
        self._failure: BaseException | None = None
        self._ranks: list[_Rank] = []
        self._folder = Path(tempfile.mkdtemp(prefix="towpath-candidate-"))
        self._place = ranks
        self.counters, self.shape = ranks.counters, ranks.shape
        self._thread: threading.Thread | None = None
        try:
            self._start(launch)
            self._answers(_START_SECONDS)
            self._park()
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *arguments: Any, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """Continue the ranks, call a method of the worker on each, stop them, and return the results by rank."""
        self._signal(signal.SIGCONT)
        try:
            for rank in self._ranks:
                with suppress(BrokenPipeError):  # _answers says which rank ended, and why
                    rank.line.send((method, arguments))
            return self._answers(seconds)
        finally:
            self._park()

    @property
    def parked(self) -> bool:
        """Whether the kernel has stopped all ranks."""
        return self._all_are("T")

    @property
    def gone(self) -> bool:
        """Whether no rank is left."""
        return self._all_are(_GONE)

    def close(self) -> None:
        """End the ranks, and release their lab."""
        self._place.close()
        if self._thread is not None:
            self._thread.join(_LAST_WORDS_SECONDS)
        for rank in self._ranks:
            rank.line.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, launch: Launch) -> None:
        place, address = self._place, str(self._folder / "driver")

        def host() -> None:
            try:
                place.call(serve, launch.make, launch.arguments, address)
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
                    self._fail(f"{len(joined)} of {place.world} ranks started")
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
                self._signal(signal.SIGUSR1)  # the ranks write their stacks to stderr
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
            self._thread.join(_LAST_WORDS_SECONDS)  # a rank that raised has sent its traceback to this thread
        raise CandidateError(f"candidate {self.name!r}: {self._failure or what}") from self._failure

    def _park(self) -> None:
        """Stop the ranks, and return when the kernel has stopped them, which takes time where cores are busy."""
        self._signal(signal.SIGSTOP)
        until = time.monotonic() + _PARK_SECONDS
        while not self._all_are("T" + _GONE):
            if time.monotonic() > until:
                raise CandidateError(f"candidate {self.name!r}: its ranks got SIGSTOP, and still run.")
            time.sleep(0.0002)

    def _all_are(self, states: str) -> bool:
        return all(_state(rank.pid) in states for rank in self._ranks)

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)


def _state(pid: int) -> str:
    """Return the kernel's letter for the state of a process: T is stopped, X means that no such process exists."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _joined(connection: socket.socket) -> _Rank:
    """Return the rank behind a connection. It runs in a pid namespace, and only the kernel knows its pid out here."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return _Rank(Connection(connection.detach()), struct.unpack("3i", credentials)[0])


# A rank's side --------------------------------------------------------------------------------------------------------


def serve(rank: int, world: int, make: Callable[..., Any], arguments: tuple[Any, ...], driver: str) -> None:
    """Make the worker, then call the methods that the driver names and send back their results, until it closes."""
    torch.set_num_threads(1)
    keep_freed_memory()
    faulthandler.register(signal.SIGUSR1)  # the driver asks a rank that does not answer for its stack
    with Client(driver, "AF_UNIX") as line:
        line.send(rank)
        worker = make(rank, world, *arguments)
        line.send(None)
        while True:
            try:
                method, given = line.recv()
            except EOFError:
                return
            line.send(getattr(worker, method)(*given))


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds from when all ranks are ready until the last one has finished `work`."""
    _wait_for_all()
    began = time.perf_counter()
    work()
    _wait_for_all()
    return time.perf_counter() - began


def _wait_for_all() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


# After a backward pass, glibc may return the top of its heap to the system, depending on what is allocated above it.
# The next forward pass then takes a page fault for each page, which is not the doing of any candidate (LOG.md,
# "Overhead on one rank"). So ranks that are timed keep freed memory.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = 2**31 - 1
_LARGEST = 1 << 25  # the most that glibc accepts; larger tensors have mappings of their own


def keep_freed_memory() -> None:
    """Keep freed memory in this process from now on, if the C library is glibc."""
    if library := _glibc():
        library.mallopt(_TRIM_THRESHOLD, _NEVER)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST)


def give_freed_memory_back() -> None:
    """Return freed memory to the system once, so that the system counts only what is in use."""
    if library := _glibc():
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
