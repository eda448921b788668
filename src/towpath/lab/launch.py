"""What is started on the nodes: a script under torchrun, a script rank by rank, or a function on warm ranks."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import Any, Literal

from towpath.errors import ERRORS, LabError
from towpath.lab.counters import CABLE
from towpath.lab.messages import Call, Command
from towpath.lab.shaping import address
from towpath.topology.cluster import Topology

Launcher = Literal["torchrun", "direct"]

# Any port will do: every lab has networks of its own.
PORT = 29500

_DEFAULTS = {
    # One thread a rank: a lab has more ranks than the machine has cores.
    "OMP_NUM_THREADS": "1",
    # The ranks of a lab share this machine, and NCCL takes one rank a GPU: they train on the CPU unless told otherwise.
    "CUDA_VISIBLE_DEVICES": "",
    ERRORS: "one line",
}
_NETWORK = {
    "GLOO_SOCKET_IFNAME": CABLE,
    "NCCL_SOCKET_IFNAME": CABLE,
    "NCCL_IB_DISABLE": "1",  # a fabric of the host would go round the cable
}


def torchrun(argv: Sequence[str], topology: Topology, env: Mapping[str, str] | None) -> list[Command]:
    """One torchrun for each node, as on a real cluster."""
    shape = ("--nnodes", str(topology.nodes), "--nproc-per-node", str(topology.ranks_per_node))
    master = ("--master-addr", address(0), "--master-port", str(PORT))
    return [
        Command(
            node,
            (sys.executable, "-m", "towpath.lab.torchrun", *shape, "--node-rank", str(node), *master, *argv),
            _environment(env),
            str(Path.cwd()),
        )
        for node in range(topology.nodes)
    ]


def direct(argv: Sequence[str], topology: Topology, env: Mapping[str, str] | None) -> list[Command]:
    """Every rank as a process of its own: starts sooner, and nothing stands between a rank and its exit code."""
    return [
        Command(
            topology.node_of(rank),
            (sys.executable, *argv),
            _environment(env, _place(rank, topology, PORT)),
            str(Path.cwd()),
        )
        for rank in range(topology.world)
    ]


LAUNCHERS: dict[Launcher, Callable[[Sequence[str], Topology, Mapping[str, str] | None], list[Command]]] = {
    "torchrun": torchrun,
    "direct": direct,
}


def calls(
    fn: Callable[..., Any], args: tuple[Any, ...], topology: Topology, port: int, timeout_seconds: float, folder: Path
) -> list[Call]:
    """`fn(rank, world, *args)` on every rank."""
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
        Call(
            node=topology.node_of(rank),
            rank=rank,
            world=topology.world,
            env=_environment(None, _place(rank, topology, port)),
            payload=payload,
            main=main,
            timeout_seconds=timeout_seconds,
            stack_file=str(folder / f"stack{rank}"),
        )
        for rank in range(topology.world)
    ]


def check_script(argv: Sequence[str]) -> None:
    """Refuse before anything starts what torchrun would refuse late, once for every node."""
    if not argv:
        raise LabError("there is nothing to run: give a Python script, or -m and a module.")
    if not argv[0].startswith("-") and not Path(argv[0]).is_file():
        raise LabError(f"there is no script {argv[0]!r} in {Path.cwd()}.")


def _environment(env: Mapping[str, str] | None, place: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**_DEFAULTS, **os.environ, **_NETWORK, **(place or {}), **(env or {})}


def _place(rank: int, topology: Topology, port: int) -> dict[str, str]:
    """The variables by which torchrun tells a rank where it is."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(topology.world),
        "LOCAL_RANK": str(topology.local_of(rank)),
        "LOCAL_WORLD_SIZE": str(topology.ranks_per_node),
        "GROUP_RANK": str(topology.node_of(rank)),
        "GROUP_WORLD_SIZE": str(topology.nodes),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(port),
    }
