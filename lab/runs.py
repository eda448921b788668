"""Runs of a script and calls on ranks, as the owner of a lab starts them and waits for them."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from lab.errors import LabError
from lab.links import CABLE, LinkBytes, RackBytes, address
from lab.protocol import Client, EndProcesses, Member, Program, RankCall, StartProcesses, socket_pair
from towpath.topology.cluster import Topology

Launcher = Literal["torchrun", "direct"]

# Any port is free, because each lab has networks of its own.
PORT = 29500
# When a process fails, the others have this long to end before they are killed.
_GRACE_SECONDS = 3.0
_TAIL_CHARACTERS = 2000
_RANK = Path(__file__).with_name("rank.py")

_DEFAULTS = {
    # A lab has more ranks than the machine has cores, so each rank has one thread.
    "OMP_NUM_THREADS": "1",
    # The ranks of a lab share this machine, but NCCL takes only one rank per GPU. So ranks train on the CPU by default.
    "CUDA_VISIBLE_DEVICES": "",
}
_NETWORK = {
    "GLOO_SOCKET_IFNAME": CABLE,
    "NCCL_SOCKET_IFNAME": CABLE,
    "NCCL_IB_DISABLE": "1",  # a fabric of the host would bypass the cable
}


# --- what is started --------------------------------------------------------------------------------------------------


def torchrun(
    argv: Sequence[str], topology: Topology, racks: Sequence[int], env: Mapping[str, str] | None
) -> list[Program]:
    """Return one torchrun per node, as on a real cluster."""
    nodes = ("--nnodes", str(topology.nodes))
    master = ("--master-addr", address(0), "--master-port", str(PORT))
    root = str(_RANK.parents[1])
    code = f"import sys; sys.path.insert(0, {root!r}); from lab.runs import torchrun_main; torchrun_main()"
    command = (sys.executable, "-c", code, *nodes)
    return [
        Program(
            node,
            (*command, "--nproc-per-node", str(ranks), "--node-rank", str(node), *master, str(_RANK), *argv),
            environment(env, rack_of(racks, node)),
            str(Path.cwd()),
        )
        for node, ranks in enumerate(topology.sizes)
    ]


def direct(
    argv: Sequence[str], topology: Topology, racks: Sequence[int], env: Mapping[str, str] | None
) -> list[Program]:
    """Return one process per rank. It starts sooner than torchrun, and reports each rank's own exit code."""
    return [
        Program(
            topology.node_of(rank),
            (sys.executable, str(_RANK), *argv),
            environment(env, _rank_variables(rank, topology, racks, PORT)),
            str(Path.cwd()),
        )
        for rank in range(topology.world)
    ]


LAUNCHERS: dict[
    Launcher, Callable[[Sequence[str], Topology, Sequence[int], Mapping[str, str] | None], list[Program]]
] = {
    "torchrun": torchrun,
    "direct": direct,
}


def rank_calls(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    topology: Topology,
    racks: Sequence[int],
    port: int,
    timeout_seconds: float,
    folder: Path,
) -> list[RankCall]:
    """Return the calls `fn(rank, world, *args)` of all ranks."""
    try:
        payload = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LabError(
            f"a rank cannot be sent {fn!r}: {error}. Pass a function of a module (no lambda, no function inside a "
            "function), and arguments that pickle."
        ) from None
    main: dict[str, Any] = {}
    if fn.__module__ == "__main__":
        main = spawn.get_preparation_data("rank")
        for private in ("authkey", "log_to_stderr", "start_method"):
            main.pop(private, None)
    return [
        RankCall(
            node=topology.node_of(rank),
            rank=rank,
            world=topology.world,
            env=environment(None, _rank_variables(rank, topology, racks, port)),
            payload=payload,
            main=main,
            timeout_seconds=timeout_seconds,
            stack_file=str(folder / f"stack{rank}"),
        )
        for rank in range(topology.world)
    ]


def check_script(argv: Sequence[str]) -> None:
    """Raise early for a script that torchrun would refuse late, once on each node."""
    if not argv:
        raise LabError("there is nothing to run: give a Python script, or -m and a module.")
    if argv[0] not in ("-c", "-m") and not Path(argv[0]).is_file():
        raise LabError(f"there is no script {argv[0]!r} in {Path.cwd()}. Check the path.")


def torchrun_main() -> None:
    """Run torchrun on a node, without torchrun's own report of failed ranks.

    A rank that fails has printed its error. Only ranks that a signal killed are reported here.
    """
    import logging

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode < 0:
            print(f"towpath: rank {rank}: {describe_exit(first.exitcode)}", file=sys.stderr)
        sys.exit(1)
    except SignalException:  # another node failed, and the lab ends this one
        sys.exit(1)


def environment(env: Mapping[str, str] | None, rank: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**_DEFAULTS, **os.environ, **_NETWORK, **(rank or {}), **(env or {})}


def rack_of(racks: Sequence[int], node: int) -> dict[str, str]:
    """Return the variable that names the rack of a node, if there are several racks."""
    return {"TOWPATH_RACK": f"rack{racks[node]}"} if len(set(racks)) > 1 else {}


def _rank_variables(rank: int, topology: Topology, racks: Sequence[int], port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, and its rack."""
    return rack_of(racks, topology.node_of(rank)) | {
        "RANK": str(rank),
        "WORLD_SIZE": str(topology.world),
        "LOCAL_RANK": str(topology.local_of(rank)),
        "LOCAL_WORLD_SIZE": str(topology.sizes[topology.node_of(rank)]),
        "GROUP_RANK": str(topology.node_of(rank)),
        "GROUP_WORLD_SIZE": str(topology.nodes),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(port),
    }


def as_rank(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank on one node. The ranks use a store that listens already."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


# --- what runs --------------------------------------------------------------------------------------------------------


class ProcessSet:
    """Processes that start together and end together, at the latest when the set is closed."""

    def __init__(
        self, client: Client, members: Sequence[Member], output: tuple[int, int], results: Sequence[int]
    ) -> None:
        self.channel, theirs = socket_pair()
        try:
            identifier = client.ask(StartProcesses(tuple(members)), (theirs, *output, *results))
        except BaseException:
            self.channel.close()
            raise
        finally:
            os.close(theirs)
        assert isinstance(identifier, int), identifier
        self._client = client
        self._identifier: int | None = identifier
        self._alive = len(members)
        self.is_lost = False  # whether its node was destroyed

    @property
    def alive(self) -> int:
        """The number of processes whose end `next_exit` has not returned."""
        return self._alive

    def signal(self, number: int) -> None:
        """Send a signal to each process and its process group."""
        with suppress(BrokenPipeError, OSError):
            self.channel.send(number)

    def next_exit(self, deadline: float | None) -> tuple[int, int] | None:
        """Return (member, return code) of the next process that ends, or None if none ends before the deadline.

        Those of a lost node count as killed. Their numbers as members are not known.
        """
        wait_seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self.channel.poll(wait_seconds):
            return None
        try:
            member, status = self.channel.recv()
            self._alive -= 1
        except (EOFError, ConnectionResetError):
            if self.is_lost:
                self._alive -= 1
                return -1, -signal.SIGKILL
            raise LabError(
                "the lab lost its processes: something killed them from outside. See the kernel's log for a lack of "
                "memory, and run again."
            ) from None
        return member, os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """Kill what is left. No process of the set exists when this returns."""
        identifier, self._identifier = self._identifier, None
        if identifier is not None:
            with suppress(LabError):  # without a keeper there are no processes
                self._client.ask(EndProcesses(identifier))
            self.channel.close()


def next_exit(sets: Sequence[ProcessSet], deadline: float | None) -> int | None:
    """Return the return code of the next process of any set that ends, or None if none ends before the deadline."""
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    ready = wait([processes.channel for processes in sets], left)
    ended = next((processes.next_exit(deadline) for processes in sets if processes.channel in ready), None)
    return None if ended is None else ended[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabResult:
    """The result of a run.

    Attributes:
        returncode: The first return code that was not zero, negative for a signal, or 0.
        output: What the processes printed, or None if it was not captured.
        seconds: How long the run took.
        links: What each node's links carried during the run, by node.
        racks: What each rack's cable to the other racks carried, by rack. It is empty if there is one rack.
    """

    returncode: int
    output: str | None
    seconds: float
    links: tuple[LinkBytes, ...]
    racks: tuple[RackBytes, ...]


class LabRun:
    """A running script on the nodes, from `Lab.start`. A `with` statement ends it at the end of the block.

    Args:
        client: The connection to the lab's server.
        members: The processes to start.
        count: Returns the bytes that the links of each node have carried, and those of each rack.
        capture: Whether to keep the output for the result.
    """

    def __init__(
        self,
        client: Client,
        members: Sequence[Member],
        count: Callable[[], tuple[tuple[LinkBytes, ...], tuple[RackBytes, ...]]],
        capture: bool,
    ) -> None:
        self._count = count
        self._before = count()
        self._began = time.monotonic()
        self._result: LabResult | None = None
        self._output = _Output() if capture else None
        descriptor = self._output.descriptor if self._output else None
        try:
            # The process's own 1 and 2 instead of sys.stdout, which a test runner may have replaced.
            output = (1, 2) if descriptor is None else (descriptor, descriptor)
            # The processes of each node are a set, because a node may be destroyed.
            self._sets: dict[int, ProcessSet] = {}
            for node in dict.fromkeys(member.node for member in members):
                on_node = [member for member in members if member.node == node]
                self._sets[node] = ProcessSet(client, on_node, output, ())
        except BaseException:
            for processes in self._sets.values():
                processes.close()
            raise
        finally:
            if self._output:
                self._output.read()

    @property
    def running(self) -> bool:
        """Whether the run has no result yet."""
        return self._result is None

    def signal(self, number: int) -> None:
        """Send a signal to each started process and its process group.

        Args:
            number: The signal. Under torchrun, each node's torchrun receives it.
        """
        for processes in self._sets.values():
            processes.signal(number)

    def lose(self, node: int) -> None:
        """Count the processes of a node as killed. The node is about to be destroyed."""
        if node in self._sets:
            self._sets[node].is_lost = True

    def wait(self, timeout_seconds: float | None = None) -> LabResult:
        """Wait until all processes have ended, and return the result. If one node fails, the others are ended.

        Args:
            timeout_seconds: How long to wait. Default: without limit. On a timeout, all processes are killed.

        Returns:
            The result of the run.

        Raises:
            LabError: The time was up, or the lab lost its processes.
        """
        if self._result is not None:
            return self._result
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            returncode = self._wait_for_all(deadline)
        except BaseException:
            self._abandon()
            raise
        if returncode is None:
            output = self.kill().output
            tail = f" Its last output:\n{output[-_TAIL_CHARACTERS:]}" if output else ""
            raise LabError(f"the run was ended: it took more than {timeout_seconds:g} s.{tail}")
        return self._finish(returncode)

    def kill(self) -> LabResult:
        """Kill all processes at once, and return the result."""
        return self._result or self._finish(-signal.SIGKILL)

    def __enter__(self) -> LabRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.kill()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Kill all processes, without an error that would hide the current one."""
        with suppress(LabError):
            self.kill()

    def _wait_for_all(self, deadline: float | None) -> int | None:
        """Return the first return code that is not zero, or 0. Return None if the time is up."""
        failure = 0
        while running := [processes for processes in self._sets.values() if processes.alive]:
            returncode = next_exit(running, deadline)
            if returncode is None:
                return failure or None
            if returncode != 0 and failure == 0:
                failure = returncode
                self.signal(signal.SIGTERM)
                deadline = time.monotonic() + _GRACE_SECONDS
        return failure

    def _finish(self, returncode: int) -> LabResult:
        for processes in self._sets.values():
            processes.close()
        links, racks = self._count()
        self._result = LabResult(
            returncode=returncode,
            output=self._output.text() if self._output else None,
            seconds=time.monotonic() - self._began,
            links=tuple(after - before for after, before in zip(links, self._before[0], strict=True)),
            racks=tuple(after - before for after, before in zip(racks, self._before[1], strict=True)),
        )
        return self._result


class _Output:
    """A pipe that a thread reads, so that processes never block on it."""

    def __init__(self) -> None:
        self._reader, self.descriptor = os.pipe()
        self._chunks: list[bytes] = []
        self._thread = threading.Thread(target=self._drain, daemon=True)

    def read(self) -> None:
        """Begin to read. The processes hold the other end now, so the text ends when the last of them ends."""
        os.close(self.descriptor)
        self._thread.start()

    def _drain(self) -> None:
        with open(self._reader, "rb", buffering=0) as pipe:  # noqa: PTH123 (a descriptor)
            while chunk := pipe.read(1 << 16):
                self._chunks.append(chunk)

    def text(self) -> str:
        self._thread.join()
        return b"".join(self._chunks).decode(errors="replace")


def describe_exit(returncode: int) -> str:
    """Describe how a process ended."""
    if returncode >= 0:
        return f"exit code {returncode}"
    hint = "; was memory short?" if returncode == -signal.SIGKILL else ""
    return f"killed by signal {-returncode} ({signal.strsignal(-returncode)}{hint})"
