"""`Lab`: a cluster on this machine, in the process that owns it."""

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
from pathlib import Path
from typing import Any

from lab.cables import Cables, Rate, Wiring, cables_of
from lab.elastic import ElasticRun
from lab.errors import LabError
from lab.folders import make_folder, note_guard, sweep_folders
from lab.links import LinkBytes, RackBytes
from lab.protocol import (
    DISK,
    Client,
    CreateNodes,
    DestroyNode,
    PlugCable,
    ReadCounters,
    ReadRackCounters,
    RebuildNode,
    ShapeLinks,
    StartServer,
    socket_pair,
)
from lab.runs import (
    LAUNCHERS,
    PORT,
    LabResult,
    LabRun,
    Launcher,
    ProcessSet,
    check_script,
    describe_exit,
    rank_calls,
)
from towpath.topology.cluster import Topology

# A rank ends itself after its timeout. The owner waits this much longer for ranks that cannot.
_GRACE_SECONDS = 10.0
_LATE_FAILURE_SECONDS = 2.0
_CLOSE_SECONDS = 10.0

# Modules that each rank would otherwise import itself. Optimizers import the last one in their first step.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo")


class Lab:
    """A cluster of network namespaces on this machine, joined by cables with a limited rate.

    A lab does one run or call at a time. Close it, or use it in a `with` statement. Each node has a network, memory
    (`/dev/shm`) and a disk of its own. Its disk is the folder `disk`, which has the same path on all nodes.

    Args:
        topology: The nodes and the ranks on each.
        inter: The cables of the nodes. A rate, such as '200mbit' or a `Rate`, limits each cable, each way. None does
            not limit them. A `Cable` also has a latency, a loss, or another rate up than down. A sequence has one
            `Cable` for each node, the head last.
        intra: The rate of each node's loopback. None does not limit it.
        spine: The rate of each rack's cable to the other racks. None does not limit it.
        racks: The rack of each node. By default, the racks of the topology. Another order is that of a scheduler which
            places the nodes of a job as it likes. Ranks find the name of their rack in `TOWPATH_RACK`.
        head: Whether there is one more node that has no ranks. Its host name is `head`, and its number is that after
            the last node. The store of a rendezvous can be there.
        preload: Modules that the rank server imports once, before the first `call()`. They must not use a GPU, because
            ranks are forked.

    Raises:
        LabError: The lab cannot be set up. The message names the setting or the tool that is missing.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        inter: Cables = None,
        intra: str | Rate | None = None,
        spine: str | Rate | None = None,
        racks: Sequence[int] | None = None,
        head: bool = False,
        preload: Sequence[str] = PRELOAD,
    ) -> None:
        self.topology = topology
        self.racks = tuple(map(topology.rack_of, range(topology.nodes)) if racks is None else racks)
        if len(self.racks) != topology.nodes:
            raise LabError(f"racks: expected the rack of each of {topology.nodes} nodes, got {list(self.racks)}.")
        names = [f"node{node}" for node in range(topology.nodes)]
        hosts = [*zip(names, self.racks, strict=True), *([("head", self.racks[0])] if head else [])]
        self.wiring = Wiring(cables_of(inter, len(hosts)), _rate(intra), _rate(spine))
        self._preload = tuple(preload)
        self._ports = itertools.count(PORT)
        self._run: LabRun | ElasticRun | None = None
        self._server: Client | None = None
        self._nodes = len(hosts)
        self._destroyed: set[int] = set()
        sweep_folders()
        self._folder = make_folder()
        self.disk = self._folder / DISK
        connection, descriptor = socket_pair()
        self._client = Client(connection)
        try:
            self._guard = _start_guard(descriptor, self._folder.name)
        except BaseException:
            connection.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(descriptor)
        try:
            note_guard(self._folder, self._guard.pid)
            everyone, racks_of_all = zip(*hosts, strict=True)
            self._client.ask(CreateNodes(os.getpid(), everyone, racks_of_all, self.wiring, str(self._folder)))
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
    ) -> LabResult:
        """Run a script on every rank, and wait until it has ended.

        Args:
            argv: The script and its arguments, or "-m" and a module.
            env: Environment variables for the ranks, in addition to this process's.
            timeout_seconds: How long the run may take. Default: without limit.
            capture: Whether to keep the output of all ranks. Default: they write to this process's stdout and stderr.
            launcher: "torchrun" starts one torchrun on each node. "direct" starts the ranks without it, faster.

        Returns:
            The return code, the output, the seconds, and the bytes on each node's links.

        Raises:
            LabError: There is no such script, the lab is busy or lost its processes, or the time is up.
        """
        with self.start(argv, env=env, capture=capture, launcher=launcher) as run:
            return run.wait(timeout_seconds)

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        capture: bool = False,
        launcher: Launcher = "torchrun",
    ) -> LabRun:
        """Start a script on every rank and return at once.

        Args:
            argv: The script and its arguments, or "-m" and a module.
            env: Environment variables for the ranks, in addition to this process's.
            capture: Whether to keep the output of all ranks.
            launcher: "torchrun" or "direct", as for `run`.

        Returns:
            The run, to wait for, to signal or to end.

        Raises:
            LabError: There is no such script, or the lab is busy.
        """
        check_script(argv)
        self._check_idle()
        self._check_whole()
        members = LAUNCHERS[launcher](argv, self.topology, self.racks, env)
        run = LabRun(self._client, members, lambda: (self.counters(), self.rack_counters()), capture)
        self._run = run
        return run

    def elastic(
        self,
        argv: Sequence[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        fewest: int | None = None,
        restarts: int = 100,
        options: Sequence[str] = (),
        apart: bool = False,
    ) -> ElasticRun:
        """Prepare a job that goes on when nodes are lost. Start each node's torchrun with the `start` of the result.

        The lab needs a head node, for the store in which the nodes meet, unless each node is a job of its own.

        Args:
            argv: The script and its arguments, or "-m" and a module.
            folder: A folder of the host for the output of each node, which is appended to a file.
            env: Environment variables, in addition to this process's.
            fewest: The number of nodes with which the job may go on. By default all of them.
            restarts: How often each torchrun starts its ranks again.
            options: More options of torchrun.
            apart: Whether each node is a job of its own, such as an island that comes and goes.

        Returns:
            The job. Its store runs, if it has one.

        Raises:
            LabError: There is no such script, no head node, or the lab is busy.
        """
        check_script(argv)
        self._check_idle()
        if self._nodes == self.topology.nodes and not apart:
            raise LabError("an elastic job needs a head node for its store. Create the lab with head=True.")
        job = ElasticRun(
            *(self._client, self.topology, self.racks, argv, folder),
            env=env,
            fewest=fewest,
            restarts=restarts,
            options=options,
            apart=apart,
        )
        self._run = job
        return job

    def call(self, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
        """Call `fn(rank, world, *args)` on every rank, in a gloo group.

        The ranks are new processes, forked from a process that has loaded torch. If one raises, dies or hangs, the
        others are killed.

        Args:
            fn: A function of a module. It cannot be a lambda or a function inside a function.
            *args: More arguments, which are pickled.
            timeout_seconds: How long the call may take.

        Returns:
            What each rank returned, by rank.

        Raises:
            LabError: A rank raised, died or hung. The message has its number and traceback.
        """
        self._check_idle()
        self._check_whole()
        members = rank_calls(fn, args, self.topology, self.racks, next(self._ports), timeout_seconds, self._folder)
        pipes = [os.pipe() for _ in members]
        readers = [Connection(reader, writable=False) for reader, _ in pipes]
        try:
            try:
                started = ProcessSet(self._rank_server(), members, (1, 2), [writer for _, writer in pipes])
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
        """Return what each node's links have carried since the lab was created. It also works during a run."""
        answer: Any = self._client.ask(ReadCounters())
        return answer[: self.topology.nodes]

    def rack_counters(self) -> tuple[RackBytes, ...]:
        """Return what each rack's cable has carried since the lab was created, or nothing if there is one rack."""
        answer: Any = self._client.ask(ReadRackCounters())
        return answer

    def cut(self, node: int) -> None:
        """Disconnect a node's cable. It also works during a run.

        Args:
            node: The number of the node.
        """
        self._plug(node, connected=False)

    def mend(self, node: int) -> None:
        """Connect a node's cable again.

        Args:
            node: The number of the node.
        """
        self._plug(node, connected=True)

    def destroy(self, node: int, *, silent: bool = False) -> None:
        """Destroy a node during a run: all of its processes, daemons too, its network, its memory and its disk.

        They are gone when this returns. The other nodes go on.

        Args:
            node: The number of the node.
            silent: Whether the cable is cut first, so that the peers see silence, as if the power had failed. By
                default the processes are killed first, and the kernel tells the peers that their connections end.
        """
        self._check_node(node)
        if self._server is not None:  # it holds the old nodes open; the next call starts another
            self._server.close()
            self._server = None
        if self._run is not None:
            self._run.lose(node)
        self._client.ask(DestroyNode(node, silent))
        self._destroyed.add(node)

    def rebuild(self, node: int) -> None:
        """Replace a destroyed node by a new one with its name, addresses and rates. Its memory and disk are empty.

        Args:
            node: The number of the node.
        """
        if node not in self._destroyed:
            raise LabError(f"node {node!r} was not destroyed. Call destroy({node!r}) first.")
        self._client.ask(RebuildNode(node))
        self._destroyed.discard(node)

    def shape(
        self,
        *,
        inter: Cables = None,
        intra: str | Rate | None = None,
        spine: str | Rate | None = None,
    ) -> None:
        """Change the rates of the links. It also works during a run. Cables keep their latency, loss and MTU.

        Args:
            inter: The rates of the cables, in the same forms as for a new lab. None does not limit them.
            intra: The rate of the loopbacks. None does not limit it.
            spine: The rate of each rack's cable to the other racks. None does not limit it.
        """
        cables = zip(self.wiring.cables, cables_of(inter, self._nodes), strict=True)
        wiring = Wiring(tuple(old.at_rates_of(new) for old, new in cables), _rate(intra), _rate(spine))
        self._client.ask(ShapeLinks(wiring))
        self.wiring = wiring

    def close(self) -> None:
        """Take the lab down. Its processes are gone when this returns."""
        if self._server is not None:
            self._server.close()
        self._client.close()
        try:
            self._guard.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._guard.kill()  # the keeper and the lab die with it
            self._guard.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plug(self, node: int, *, connected: bool) -> None:
        self._check_node(node)
        self._client.ask(PlugCable(node, connected))

    def _check_node(self, node: int) -> None:
        if node not in range(self._nodes):
            raise LabError(f"there is no node {node!r}: this lab has nodes 0 to {self._nodes - 1}.")
        if node in self._destroyed:
            raise LabError(f"node {node} is destroyed. Call rebuild({node}) first.")

    def _check_idle(self) -> None:
        if self._run is not None and self._run.running:
            raise LabError("this lab is busy with a run. Wait for it, end it, or create another lab.")

    def _check_whole(self) -> None:
        if self._destroyed:
            raise LabError(f"nodes {sorted(self._destroyed)} are destroyed. Call rebuild() for each first.")

    def _rank_server(self) -> Client:
        if self._server is None:
            connection, descriptor = socket_pair()
            server = Client(connection)
            try:
                self._client.ask(StartServer(self._preload), (descriptor,))
            finally:
                os.close(descriptor)
            try:
                server.receive()  # it answers when it has imported the modules
            except BaseException:
                server.close()
                raise
            self._server = server
        return self._server

    def _collect(self, processes: ProcessSet, readers: list[Connection], timeout_seconds: float) -> list[Any]:
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
                reason = self._why_silent(processes, rank, timeout_seconds) if value is None else value
                raise LabError(f"{self._names([rank])} of {self.topology.world} failed:\n{reason}")
            results |= {rank: value for rank, (_, value) in answers.items()}
        return [results[rank] for rank in range(self.topology.world)]

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {rank} (node {self.topology.node_of(rank)})" for rank in ranks)

    def _why_silent(self, processes: ProcessSet, rank: int, timeout_seconds: float) -> str:
        stack = (self._folder / f"stack{rank}").read_text()
        if stack:
            return f"it hung for {timeout_seconds:g} s:\n{stack}"
        deadline = time.monotonic() + _GRACE_SECONDS
        while (ended := processes.next_exit(deadline)) is not None:
            if ended[0] == rank:
                return f"it ended without an answer ({describe_exit(ended[1])})."
        return "it closed its answer and lives on."


def _take(ready: Iterable[object], waiting: dict[Connection, int]) -> dict[int, tuple[bool, Any]]:
    """Return the answers so far, by rank: (True, value), (False, traceback), or (False, None) if the rank died."""
    answers: dict[int, tuple[bool, Any]] = {}
    for reader in [reader for reader in waiting if reader in ready]:
        try:
            answer = pickle.loads(reader.recv_bytes())
        except EOFError:
            answer = (False, None)
        answers[waiting.pop(reader)] = answer
    return answers


def _guilty(answers: dict[int, tuple[bool, Any]], waiting: dict[Connection, int]) -> tuple[int, str | None]:
    """Return the failed rank to report. A rank that dies breaks its peers' connections, whose errors may come first."""
    failures = {rank: value for rank, (done, value) in answers.items() if not done}
    deadline = time.monotonic() + _LATE_FAILURE_SECONDS
    while waiting and all(value is not None and "onnection" in value for value in failures.values()):
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        failures |= {rank: value for rank, (done, value) in _take(ready, waiting).items() if not done}
    return min(failures.items(), key=lambda failure: failure[1] is not None and "onnection" in failure[1])


@functools.cache
def available() -> str | None:
    """Return None if a lab can be created here, or the reason why not. The first call tries it with a small lab."""
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
    # With -P and the owner's path, it finds the same modules as the owner, in whatever folder it starts.
    program = f"import sys; sys.path[:] = {sys.path!r}; from lab.keeper import main; main({descriptor})"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program, name],  # the name identifies it in a list of processes
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        start_new_session=True,  # only the owner receives the terminal's Ctrl-C
    )
