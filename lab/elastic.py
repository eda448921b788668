"""Elastic jobs: one `torchrun --max-restarts` on each node, which meet in a store on the head node.

    head       the store of the rendezvous, a process of its own
    node i     torchrun, which starts its ranks again when one fails, or when a node comes or goes

A torchrun is started for one node at a time, again after the node was rebuilt. Its settings are those with which a job
goes on soonest after a node is lost. They are the ones that the guide recommends.

With `apart`, each node's torchrun is a job of its own, and there is no store.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from lab.errors import LabError
from lab.links import address
from lab.protocol import Client, Program
from lab.runs import ProcessSet, environment, rack_of
from towpath.topology.cluster import Topology

STORE_PORT = 29400
# A node without a heartbeat for 3 x 1 s is no member of the job any more. When enough nodes are there, torchrun waits
# 2 s for others. No torchrun serves the store itself.
RENDEZVOUS = {"keep_alive_interval": 1, "keep_alive_max_attempt": 3, "last_call_timeout": 2, "is_host": 0}
_ELASTIC = {
    # With a shared store, nodes keep the address of the first one for ever, also after it was lost (PyTorch 2.13).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # Otherwise torchruns exchange how many ranks each has, and end if a node is lost meanwhile.
    "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
}
_STORE = (
    "import signal; from torch.distributed import TCPStore; "
    f"store = TCPStore('head', {STORE_PORT}, is_master=True, wait_for_workers=False); "
    "print('listening', flush=True); signal.pause()"
)


class ElasticRun:
    """A job under torchrun on the nodes of a lab, from `Lab.elastic`. A `with` statement ends it with the block.

    Args:
        client: The connection to the lab's server.
        topology: The nodes and the ranks on each.
        racks: The rack of each node.
        argv: The script and its arguments, or "-m" and a module.
        folder: The output of each node is appended to a file in it, `node0.txt` and so on.
        env: Environment variables, in addition to this process's.
        fewest: The number of nodes with which the job may go on. Default: all of them.
        restarts: How often each torchrun starts its ranks again.
        options: More options of torchrun.
        apart: Whether each node is a job of its own.
    """

    def __init__(
        self,
        client: Client,
        topology: Topology,
        racks: Sequence[int],
        argv: Sequence[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        fewest: int | None = None,
        restarts: int = 100,
        options: Sequence[str] = (),
        apart: bool = False,
    ) -> None:
        self.folder = folder
        self._client, self._topology, self._racks, self._env = client, topology, racks, env
        nodes = topology.nodes if fewest is None else f"{fewest}:{topology.nodes}"
        settings = ",".join(f"{name}={value}" for name, value in RENDEZVOUS.items())
        meeting = ("--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"head:{STORE_PORT}")
        self._command = (
            *(sys.executable, "-m", "torch.distributed.run"),
            *(("--standalone",) if apart else (*meeting, "--rdzv-id", "lab", "--rdzv-conf", settings)),
            *("--max-restarts", str(restarts), "--monitor-interval", "0.1"),
            *options,
            *argv,
        )
        # By node: every set of processes that was started there. Daemons that a torchrun has left live in its set.
        self._sets: dict[int, list[ProcessSet]] = {}
        self._ends: dict[int, int] = {}  # by node: how its last torchrun ended
        folder.mkdir(parents=True, exist_ok=True)
        self._head = topology.nodes
        if not apart:
            self.start(self._head)

    def start(self, node: int) -> None:
        """Start the torchrun of a node, for the first time or again. On a rebuilt head node, start the store again.

        Args:
            node: The number of the node. The head has the number after the last node.
        """
        if self._is_alive(node):
            raise LabError(f"the torchrun of node {node} still runs. Wait for its end, or destroy the node.")
        if node == self._head:
            self._spawn(node, (sys.executable, "-c", _STORE), {})
            return
        # torchrun sorts the nodes by their addresses, so a rebuilt node has its old ranks.
        own = ("--local-addr", address(node), "--nproc-per-node", str(self._topology.sizes[node]))
        command = (*self._command[:3], *own, *self._command[3:])
        self._spawn(node, command, {**rack_of(self._racks, node), **_ELASTIC})

    def signal(self, node: int, number: int) -> None:
        """Send a signal to the torchrun of a node.

        Args:
            node: The number of the node.
            number: The signal.
        """
        self._sets[node][-1].signal(number)

    def lose(self, node: int) -> None:
        """Count the processes of a node as killed. The node is about to be destroyed."""
        for processes in self._sets.get(node, []):
            processes.is_lost = True

    def output(self, node: int) -> str:
        """Return what the processes of a node have printed so far.

        Args:
            node: The number of the node.
        """
        path = self._path(node)
        return path.read_text(errors="replace") if path.exists() else ""

    def ended(self, timeout_seconds: float | None = 0.0) -> dict[int, int]:
        """Return the exit code of each node whose torchrun has ended, once all have or the time is up.

        Args:
            timeout_seconds: How long to wait for the others. None waits without limit.
        """
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while running := [node for node in self._sets if node != self._head and self._is_alive(node)]:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not wait([self._sets[node][-1].channel for node in running], left):
                break
        return {node: code for node, code in self._ends.items() if node != self._head}

    def close(self) -> None:
        """Kill all processes of the job, the store too."""
        for processes in [each for sets in self._sets.values() for each in sets]:
            processes.close()
        self._sets.clear()

    @property
    def running(self) -> bool:
        """Whether the job has not been closed."""
        return bool(self._sets)

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(LabError):
            self.close()

    def _path(self, node: int) -> Path:
        return self.folder / ("head.txt" if node == self._head else f"node{node}.txt")

    def _spawn(self, node: int, command: Sequence[str], variables: Mapping[str, str]) -> None:
        output = os.open(self._path(node), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            program = Program(node, tuple(command), environment({**variables, **(self._env or {})}), str(Path.cwd()))
            self._sets.setdefault(node, []).append(ProcessSet(self._client, [program], (output, output), ()))
        finally:
            os.close(output)
        self._ends.pop(node, None)

    def _is_alive(self, node: int) -> bool:
        if node not in self._sets:
            return False
        newest = self._sets[node][-1]
        if newest.alive and (ended := newest.next_exit(time.monotonic())) is not None:
            self._ends[node] = ended[1]
        return newest.alive > 0
