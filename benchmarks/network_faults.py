"""Faults of networks and machines, for `towpath doctor` to find. Each is made on the nodes of a lab, and undone.

Packets are dropped by small programs for the kernel's classic packet filter, as `tc` takes them: no machine needs
iptables or nft for that. A rank calls `examined` with the name of a fault.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from lab.cables import Cable
from lab.links import CABLE, address
from towpath.topology.cluster import Topology

INTER = "200mbit"
_BUCKET = "burst 65536 limit 67108864"
_DROP, _PASS = "6 0 0 2", "6 0 0 0"
# Without a port of the launcher, a firewall that lets it through has no way to be seen by a user.
_LAUNCHER_PORT = 29500
_NEW_CONNECTIONS = [
    "40 0 0 12",  # of IPv4
    "21 0 8 2048",
    "48 0 0 23",  # of TCP
    "21 0 6 6",
    "48 0 0 47",  # that begin: SYN without ACK
    "84 0 0 18",
    "21 0 3 2",
    "40 0 0 36",  # to another port than the launcher's
    f"21 1 0 {_LAUNCHER_PORT}",
    _DROP,
    _PASS,
]
_HOLE_BYTES = 1400
_LARGE_PACKETS = ["128 0 0 0", f"37 0 1 {_HOLE_BYTES + 14}", _DROP, _PASS]
_ALL_PACKETS = "prio 1 u32 match u32 0 0"
_SLOW_PAIR = (1, 2)
_STOP_AND_GO = (
    "import os, select, signal, sys\n"
    "group = int(sys.argv[1])\n"
    "while True:\n"
    "    os.killpg(group, signal.SIGSTOP)\n"
    "    select.select([], [], [], 0.09)\n"
    "    os.killpg(group, signal.SIGCONT)\n"
    "    if select.select([sys.stdin], [], [], 0.01)[0]: break\n"
)


@dataclass(frozen=True)
class Fault:
    """A fault, and what a doctor must say of it.

    Attributes:
        topology: The nodes and ranks on which it is made.
        cause: The cause of the first finding.
        machines: The names of the machines that the finding must have.
        inject: Makes the fault on a node. It gets the number of the node and of the rank on it.
        cables: The cables of the lab.
    """

    topology: Topology
    cause: str
    machines: frozenset[str]
    inject: Callable[[int, int], AbstractContextManager[object]]
    cables: str | tuple[Cable, ...] = INTER


def _run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)


@contextmanager
def _filtered(program: list[str]) -> Generator[None]:
    """Let a program decide on each packet that arrives: 2 drops it."""
    _run(f"tc qdisc add dev {CABLE} clsact")
    try:
        _run(f"tc filter add dev {CABLE} ingress bpf da bytecode '{len(program)},{','.join(program)}'")
        yield
    finally:
        _run(f"tc qdisc del dev {CABLE} clsact")


@contextmanager
def _sends(rate: str) -> Generator[None]:
    _run(f"tc qdisc replace dev {CABLE} root tbf rate {rate} {_BUCKET}")
    try:
        yield
    finally:
        _run(f"tc qdisc replace dev {CABLE} root tbf rate {INTER} {_BUCKET}")


@contextmanager
def _redirected(device: str, rate: str, *filters: str) -> Generator[None]:
    """Let the packets that the filters select wait in the queue of another device, and then go on as before."""
    _run(f"ip link add name {device} type ifb")
    try:
        _run(f"ip link set {device} up")
        _run(f"tc qdisc add dev {device} root tbf rate {rate} {_BUCKET}")
        _run(f"tc qdisc add dev {CABLE} clsact")
        for each in filters:
            _run(f"tc filter add dev {CABLE} {each} action mirred egress redirect dev {device}")
        yield
    finally:
        _run(f"tc qdisc del dev {CABLE} clsact")
        _run(f"ip link del {device}")


def _receives(rate: str) -> AbstractContextManager[None]:
    return _redirected("inbound", rate, f"ingress {_ALL_PACKETS}")


def _takes_turns() -> AbstractContextManager[None]:
    """Let both directions share one rate, as on a cable that carries one of them at a time."""
    return _redirected("medium", INTER, f"ingress {_ALL_PACKETS}", f"egress {_ALL_PACKETS}")


def _sends_to(node: int, rate: str) -> AbstractContextManager[None]:
    """Limit what is sent to one other node, as a bad trunk between the switches of the two does."""
    return _redirected("detour", rate, f"egress protocol ip prio 1 u32 match ip dst {address(node)}/32")


@contextmanager
def _container_bridge() -> Generator[None]:
    """Add what Docker adds: a bridge with the address that it has on every machine, and the veth of a container."""
    with ExitStack() as stack:
        _run("ip link add name docker0 type bridge")
        stack.callback(_run, "ip link del docker0")
        _run("ip address add 172.17.0.1/16 brd 172.17.255.255 dev docker0")
        _run("ip link add name veth1a2b type veth peer name container")
        stack.callback(_run, "ip link del veth1a2b")
        _run("ip link set veth1a2b master docker0 up")
        _run("ip link set container up")
        _run("ip link set docker0 up")
        yield


@contextmanager
def _hosts(text: str) -> Generator[None]:
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file:
        file.write(text)
        file.flush()
        _run(f"mount --bind {file.name} /etc/hosts")
        try:
            yield
        finally:
            _run("umount /etc/hosts")


@contextmanager
def _second_interface(node: int, local: int) -> Generator[None]:
    """Give each node a slow interface too, for which its name stands."""
    with ExitStack() as stack:
        address = f"10.88.0.{node + 1}"
        if local == 0:
            _run(f"ip link add link {CABLE} name radio type macvlan mode bridge")
            stack.callback(_run, "ip link del radio")
            _run(f"ip address add {address}/24 dev radio")
            _run("ip link set radio up")
            _run(f"tc qdisc add dev radio root tbf rate 20mbit {_BUCKET}")
        stack.enter_context(_hosts(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"))
        yield


@contextmanager
def _no_offload() -> Generator[None]:
    """Let the kernel cut what is sent into packets before it reaches the cable, as an adapter does."""
    _run(f"ip link set {CABLE} gso_max_segs 1")
    try:
        yield
    finally:
        _run(f"ip link set {CABLE} gso_max_segs 65535")


@contextmanager
def _stopped_now_and_then() -> Generator[None]:
    """Let this process, and what it starts, run only a tenth of the time."""
    command = [sys.executable, "-S", "-c", _STOP_AND_GO, str(os.getpgrp())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as other:
        try:
            yield
        finally:
            assert other.stdin is not None
            other.stdin.close()
            other.wait()


@contextmanager
def _other_version() -> Generator[None]:
    from towpath.doctor import machine

    before = machine.__version__
    machine.__version__ = "0.1.9"  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    finally:
        machine.__version__ = before


def _on(node: int, *makers: Callable[[], AbstractContextManager[None]]) -> Callable[[int, int], Any]:
    """Return a function that makes a fault on the first rank of one node, or on all nodes if it is negative."""

    @contextmanager
    def inject(here: int, local: int) -> Generator[None]:
        with ExitStack() as stack:
            for maker in makers if local == 0 and node in (-1, here) else ():
                stack.enter_context(maker())
            yield

    return inject


@contextmanager
def _hole(node: int, local: int) -> Generator[None]:
    with ExitStack() as stack:
        if local == 0:
            stack.enter_context(_no_offload())
        if local == 0 and node == 1:
            stack.enter_context(_filtered(_LARGE_PACKETS))
        yield


@contextmanager
def _slow_rank(node: int, local: int) -> Generator[None]:
    with _stopped_now_and_then() if (node, local) == (1, 1) else nullcontext():
        yield


@contextmanager
def _slow_pair(node: int, local: int) -> Generator[None]:
    others = [other for other in _SLOW_PAIR if node in _SLOW_PAIR and other != node]
    with _sends_to(others[0], "50mbit") if others and local == 0 else nullcontext():
        yield


@contextmanager
def _bad_hosts(node: int, local: int) -> Generator[None]:
    name = socket.gethostname()
    with _hosts(f"127.0.0.1 localhost\n127.0.1.1 {name}\n") if node == 1 else nullcontext():
        yield


PAIR = frozenset({"node0", "node1"})
FAULTS = {
    "two interfaces": Fault(Topology(2, 1), "interface", PAIR, _second_interface),
    "firewall one way": Fault(
        Topology(2, 1), "firewall", frozenset({"node1"}), _on(1, lambda: _filtered(_NEW_CONNECTIONS))
    ),
    "MTU hole": Fault(Topology(3, 1), "mtu", frozenset({"node1"}), _hole),
    "halved cable": Fault(
        Topology(3, 1),
        "slow cable",
        frozenset({"node2"}),
        _on(2, lambda: _sends("100mbit"), lambda: _receives("100mbit")),
    ),
    "asymmetric rate": Fault(Topology(3, 1), "asymmetric rate", frozenset({"node1"}), _on(1, lambda: _sends("80mbit"))),
    "slow rank": Fault(Topology(2, 2), "slow rank", frozenset({"node1"}), _slow_rank),
    "bad hosts entry": Fault(Topology(2, 1), "hosts entry", frozenset({"node1"}), _bad_hosts),
    "other version": Fault(Topology(2, 1), "version", frozenset({"node1"}), _on(1, _other_version)),
    # Those below are by another author than the doctor, who had not read how it measures.
    "half duplex": Fault(Topology(3, 1), "half duplex", frozenset({"node1"}), _on(1, _takes_turns)),
    "one slow pair": Fault(Topology(4, 1), "slow pair", frozenset(f"node{node}" for node in _SLOW_PAIR), _slow_pair),
    "loss of 1 %": Fault(
        Topology(3, 1),
        "loss",
        frozenset({"node1"}),
        _on(-1),  # its cable has the fault
        (Cable.parse(INTER), Cable.parse(INTER, loss="1%"), Cable.parse(INTER)),
    ),
    "docker0 bridges": Fault(Topology(2, 1), "shared address", PAIR, _on(-1, _container_bridge)),
}
CLEAN_SHAPES = (Topology(2, 1), Topology(2, 2), Topology(3, 1), Topology(4, 1), Topology(3, 2))


def forget_interfaces() -> None:
    """Remove the variables that choose an interface. The lab has decided, and a user may not have."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(variable, None)


def injected(name: str | None) -> AbstractContextManager[object]:
    """Return the context in which a rank's node has a fault, or none."""
    node, local = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])
    return nullcontext() if name is None else FAULTS[name].inject(node, local)


def _as_on_idle_cores(seconds: float, local_rank: int | None) -> list[dict[str, Any]]:
    return [{"device": "cpu", "flops": 1e11, "copied": 5e9, "threads": 1}]


def examined(rank: int, world: int, name: str | None, quick: bool = False) -> dict[str, Any] | None:
    """Examine the nodes of a lab with a fault, or without any. Rank 0 returns facts and findings.

    Args:
        rank: The number of this rank.
        world: The number of all ranks.
        name: The fault, or None.
        quick: Whether to measure briefly, and to leave out how fast ranks compute: other tests run at the same time.
    """
    from towpath.doctor import examination, paths
    from towpath.doctor.examination import Examination, Examinee
    from towpath.doctor.gathering import PORT, Leader, Place, follow

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does; a lab's ranks begin with the kernel's default
    forget_interfaces()
    if quick:
        examination._RATE_SECONDS = 0.3  # pyright: ignore[reportPrivateUsage]
        examination.compute = _as_on_idle_cores  # pyright: ignore[reportPrivateImportUsage]
        paths._ECHO_SECONDS, paths._DATAGRAMS = 0.05, 800  # pyright: ignore[reportPrivateUsage]
    place = Place.of_launcher(PORT)
    member = Examinee(place)
    with injected(name):
        # A process meets the others when its own fault is there, so all of them are when the leader begins.
        if rank:
            follow(place, member.perform, member.hello, 30.0)
            return None
        leader = Leader(place, member.perform, member.hello)
        leader.gather(30.0, lambda text: None)
        facts, found = Examination(leader, lambda text: None).run()
        leader.dismiss("", 0)
        return {"facts": facts, "findings": [asdict(each) for each in found]}


def is_right(fault: Fault, findings: list[dict[str, Any]]) -> bool:
    """Return whether the first finding has the cause and the machines of the fault."""
    return bool(findings) and (findings[0]["cause"], set(findings[0]["machines"])) == (fault.cause, set(fault.machines))
