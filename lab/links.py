"""The links of a lab: their rates, how they are shaped, and how many bytes they carried.

    node i   cable ──(tbf: what the node sends)──>   ┌────────┐
             cable <──(tbf: what it receives)── node i │ bridge │   in a network of its own
             lo    (tbf, if `intra` is given)         └────────┘

In a lab of several racks, the nodes of each rack have a bridge of their own. A cable joins each of these bridges to a
bridge in the middle, as uplinks join leaf switches to a spine switch.

A token bucket (tbf) holds each direction to its rate. Several senders to one node share the rate of its cable, as they
would behind a switch. These settings keep the rates and the byte counters truthful:

- Frames are jumbo frames, and at most two are handed down at a time. Headers of TCP/IP and Ethernet then add less than
  1 % to the payload.
- A bucket holds 64 KiB, or what the rate carries in a millisecond. A burst exceeds the rate by that much and no more,
  and a timer that fires late loses nothing.
- Queues are longer than what TCP keeps in flight. Nothing is dropped, so nothing is sent and counted twice. TCP takes
  only a long silence for a loss.
- The receive window is 512 KiB, or what the rate carries in 8 ms. That is more than a connection needs, but several
  senders to one node do not fill its queue with seconds of data.
- The congestion control is reno, which every kernel has and lets every user choose. Where nothing is dropped, it only
  has to open the window. (cubic took 0.2 s for that at 50 mbit with both directions busy.) So results do not depend on
  the host's setting.

If a cable has a latency or a loss, the lab is a part of the internet instead, and packets are dropped (delay.py):

- Packets have 1500 bytes. With larger ones, TCP would cope better with the same loss.
- Each queue has the length of a router's: what its link carries in 100 ms, or in the round trip if that is longer, and
  at least 16 packets. After a loss, TCP halves what it keeps in flight. A queue shorter than the round trip would run
  empty then, and the rate would not be reached. A much longer one would add seconds to the latency.
- Windows, and how TCP finds losses, are those of the kernel.
"""

from __future__ import annotations

import ipaddress
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lab.cables import Rate, Wiring
from lab.delay import open_tap, start_line
from lab.errors import LabError
from lab.namespaces import Namespaces, inside

# The interface that joins a node to the others. Each node has a network of its own, so all nodes use the same name.
CABLE = "cable"
_SUBNET = ipaddress.ip_network("10.77.0.0/16")
_SPINE = "spine"

_MTU_BYTES = 9000
_SEGMENT_BYTES = 18_000
_BUCKET_BYTES = 64 << 10
_BUCKET_SECONDS = 1e-3
# Packets on the loopback have up to 64 KiB, and packets that are larger than the bucket are dropped.
_LOOPBACK_BUCKET_BYTES = 128 << 10
_QUEUE_BYTES = 64 << 20
_QUEUE_FRAMES = 10_000
_ROUTER_SECONDS = 0.1
_ROUTER_FRAMES = 16
_WINDOW_BYTES = 512 << 10
_WINDOW_SECONDS = 8e-3
_FAREWELL_SECONDS = 2.0
# States of a connection in /proc/net/tcp whose end the peer has not acknowledged: FIN_WAIT1, LAST_ACK, CLOSING.
_ENDING = ("04", "09", "0B")

# IPv6 is off, because router solicitations would be counted with the payload.
_QUIET = {"net/ipv6/conf/all/disable_ipv6": "1", "net/ipv6/conf/default/disable_ipv6": "1"}
_TCP = {
    "net/ipv4/tcp_congestion_control": "reno",
    # Connections do not start with values learned by earlier ones, so that runs can be compared.
    "net/ipv4/tcp_no_metrics_save": "1",
}
_NOTHING_IS_LOST = {
    # A sender that moves to another core reorders its packets, and a receiver that waits for a core answers late. TCP
    # would take both for losses and resend up to a window. With these settings, only a long silence (a cut cable)
    # counts as a loss.
    "net/ipv4/tcp_max_reordering": "1000000",
    "net/ipv4/tcp_reordering": "1000000",
    "net/ipv4/tcp_recovery": "0",
    "net/ipv4/tcp_early_retrans": "0",
    "net/ipv4/tcp_rto_min_us": "2000000",
}


def address(node: int) -> str:
    """Return the IP address of a node's cable."""
    return str(_SUBNET[node + 1])


def raise_bridges(racks: Sequence[int]) -> None:
    """Create the bridges of these racks. The calling thread runs in the network of the bridges."""
    _set(_QUIET)
    kinds = sorted(set(racks))
    bridges = [*(f"rack{rack}" for rack in kinds), *([_SPINE] if len(kinds) > 1 else [])]
    settings = f"mtu {_MTU_BYTES} type bridge forward_delay 0 mcast_snooping 0"
    _batch("ip", [line for name in bridges for line in (f"link add {name} {settings}", f"link set {name} up")])
    for rack in kinds if len(kinds) > 1 else ():
        up, down = _uplink(rack)
        ends = f"{up} mtu {_MTU_BYTES} gso_max_size {_SEGMENT_BYTES} type veth peer name {down} mtu {_MTU_BYTES}"
        plugs = [f"link set {end} master {to} addrgenmode none up" for end, to in ((up, f"rack{rack}"), (down, _SPINE))]
        _batch("ip", [f"link add {ends}", *plugs])


def lay_cables(
    nodes: Mapping[int, Namespaces], bridge: Namespaces, racks: Sequence[int], wiring: Wiring
) -> dict[int, int]:
    """Connect nodes to the bridges, and return the process of each delayed cable, by node.

    The calling thread runs in the network of the bridges.

    Args:
        nodes: The nodes, by number.
        bridge: The network of the bridges.
        racks: The rack of each node.
        wiring: The properties of the links.
    """
    lines: dict[int, int] = {}
    for node, spaces in nodes.items():
        cable = wiring.cables[node]
        with inside(spaces, bridge):
            _set(_QUIET | _TCP | (_NOTHING_IS_LOST if wiring.loses_nothing else {}))
            peer = f"type veth peer name {_port(node)} netns /proc/self/fd/{bridge.network}"
            sizes = f"mtu {wiring.mtu_bytes(node)} gso_max_size {_SEGMENT_BYTES} txqueuelen {_QUEUE_FRAMES}"
            end = open_tap(CABLE) if cable.delayed else None
            _batch(
                "ip",
                [
                    "link set lo up",
                    *([f"link add {CABLE} {peer}"] if end is None else []),
                    f"link set {CABLE} {sizes} addrgenmode none",
                    # A rebuilt node has the hardware address of the old one, which the others remember.
                    f"link set {CABLE} address 02:77:00:00:{node >> 8:02x}:{node & 255:02x} up",
                    f"address add {address(node)}/{_SUBNET.prefixlen} dev {CABLE}",
                ],
                bridge.network,
            )
        if end is not None:
            port = open_tap(_port(node))
            lines[node] = start_line(end, port, cable.latency_seconds, cable.loss, cable.seed + node)
    port = f"mtu {_MTU_BYTES} txqueuelen {_QUEUE_FRAMES} addrgenmode none up"
    _batch("ip", [f"link set {_port(node)} master rack{racks[node]} {port}" for node in nodes])
    shape_links(nodes, bridge, racks, wiring)
    return lines


def remove_cable(node: int, line: int | None) -> None:
    """Remove a node's cable, or end the process that carries it. The calling thread runs in the bridges' network."""
    if line is None:
        _batch("ip", [f"link delete {_port(node)}"])
    else:
        os.kill(line, signal.SIGKILL)
        os.waitpid(line, 0)


def wait_for_farewells(spaces: Namespaces) -> None:
    """Wait until the peers have acknowledged the ends of the connections of processes that were killed on a node."""
    until = time.monotonic() + _FAREWELL_SECONDS
    while time.monotonic() < until:
        tables = "".join(_read_all(table) for table in (spaces.tcp, spaces.tcp6) if table >= 0)
        if not any(len(row := line.split()) > 3 and row[3] in _ENDING for line in tables.splitlines()):
            return
        time.sleep(0.005)


def shape_links(nodes: Mapping[int, Namespaces], bridge: Namespaces, racks: Sequence[int], wiring: Wiring) -> None:
    """Set the rates of existing links. The arguments are those of `lay_cables`.

    An open connection keeps a larger receive window.
    """
    # The bridge's network has the kernel's own window, which fits links without a rate and links with a latency.
    name = "net/ipv4/tcp_rmem"
    of_kernel = Path("/proc/sys", name).read_text()
    for node, spaces in nodes.items():
        cable = wiring.cables[node]
        own = wiring.loses_nothing and cable.down is not None
        with inside(spaces, bridge):
            _set({name: f"4096 131072 {round(window_bytes(cable.down))}" if own else of_kernel})
            loopback = _shaped("lo", wiring.intra, _LOOPBACK_BUCKET_BYTES)
            _batch("tc", [_shaped(CABLE, cable.up, queue_bytes=_queue_bytes(cable.up, wiring)), loopback])
    uplinks = [end for rack in sorted(set(racks)) for end in _uplink(rack)] if len(set(racks)) > 1 else []
    downs = [(_port(node), wiring.cables[node].down) for node in nodes]
    ends = [*downs, *((end, wiring.spine) for end in uplinks)]
    _batch("tc", [_shaped(end, rate, queue_bytes=_queue_bytes(rate, wiring)) for end, rate in ends])


def plug(node: int, connected: bool) -> None:
    """Disconnect a node's cable from the bridge, or connect it. The calling thread runs in the bridge's network."""
    _batch("ip", [f"link set {_port(node)} {'up' if connected else 'down'}"])


def _port(node: int) -> str:
    return f"node{node}"


def _uplink(rack: int) -> tuple[str, str]:
    """Return the two ends of a rack's cable: at the bridge of the rack, and at the spine."""
    return f"up{rack}", f"down{rack}"


def _queue_bytes(rate: Rate | None, wiring: Wiring) -> int:
    if rate is None or wiring.loses_nothing:
        return _QUEUE_BYTES
    longest_seconds = max(_ROUTER_SECONDS, *(cable.latency_seconds for cable in wiring.cables))
    largest_bytes = max(map(wiring.mtu_bytes, range(len(wiring.cables))))
    return max(_ROUTER_FRAMES * largest_bytes, round(longest_seconds * rate.bytes_per_second))


def _shaped(device: str, rate: Rate | None, bucket_bytes: int = _BUCKET_BYTES, queue_bytes: int = _QUEUE_BYTES) -> str:
    if rate is None:
        return f"qdisc replace dev {device} root noqueue"
    bucket_bytes = max(bucket_bytes, round(_BUCKET_SECONDS * rate.bytes_per_second))
    how = f"tbf rate {rate.bits_per_second}bit burst {bucket_bytes} limit {queue_bytes}"
    return f"qdisc replace dev {device} root {how}"


def window_bytes(rate: Rate | None) -> float:
    """Return the largest receive window of a connection. It is infinite on links without a rate.

    Args:
        rate: The rate of the link, or None.
    """
    return math.inf if rate is None else max(_WINDOW_BYTES, _WINDOW_SECONDS * rate.bytes_per_second)


def _set(settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        # Settings are read-only in some containers, and absent without IPv6. `addrgenmode none` keeps links quiet too.
        with suppress(OSError):
            Path("/proc/sys", name).write_text(value)


def _batch(tool: str, lines: Sequence[str], *descriptors: int) -> None:
    """Run the lines as one batch of `ip` or `tc`, which inherits the descriptors."""
    if not lines:
        return
    text = "\n".join(lines) + "\n"
    try:
        done = subprocess.run([tool, "-batch", "-"], input=text, capture_output=True, text=True, pass_fds=descriptors)
    except FileNotFoundError:
        raise LabError(f"the lab needs the command {tool!r}, which is not installed. Install iproute2.") from None
    if done.returncode != 0:
        raise LabError(f"{tool} failed on {lines}: {' '.join(done.stderr.split())}")


# --- counters ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """The bytes that one node's links carried, headers included. The kernel counts them.

    Attributes:
        sent_bytes: Bytes that the node sent over its cable.
        received_bytes: Bytes that it received over its cable.
        loopback_bytes: Bytes that its ranks sent each other over its loopback.
    """

    sent_bytes: int
    received_bytes: int
    loopback_bytes: int

    def __add__(self, more: LinkBytes) -> LinkBytes:
        return LinkBytes(
            self.sent_bytes + more.sent_bytes,
            self.received_bytes + more.received_bytes,
            self.loopback_bytes + more.loopback_bytes,
        )

    def __sub__(self, before: LinkBytes) -> LinkBytes:
        return LinkBytes(
            self.sent_bytes - before.sent_bytes,
            self.received_bytes - before.received_bytes,
            self.loopback_bytes - before.loopback_bytes,
        )


@dataclass(frozen=True, slots=True)
class RackBytes:
    """The bytes that one rack's cable to the other racks carried, headers included. The kernel counts them.

    Attributes:
        sent_bytes: Bytes that the nodes of the rack sent to other racks.
        received_bytes: Bytes that they received from other racks.
    """

    sent_bytes: int
    received_bytes: int

    def __sub__(self, before: RackBytes) -> RackBytes:
        return RackBytes(self.sent_bytes - before.sent_bytes, self.received_bytes - before.received_bytes)


def link_counters() -> LinkBytes:
    """Return the counters of the node that this rank runs on.

    To count a region, call it before and after, with a barrier around each call, and subtract.

    Raises:
        LabError: This process does not run on a node of a lab.
    """
    # /sys shows the network in which it was mounted. This file shows the calling thread's network.
    return _parse(Path("/proc/thread-self/net/dev").read_text())


def read_descriptor(descriptor: int) -> LinkBytes:
    """Return the counters of another node, from a descriptor of its /proc/net/dev."""
    return _parse(_read_all(descriptor))


def read_racks(descriptor: int, racks: Sequence[int]) -> tuple[RackBytes, ...]:
    """Return the counters of each rack, or nothing if there is one rack.

    Args:
        descriptor: A descriptor of the /proc/net/dev of the bridges' network.
        racks: The rack of each node.
    """
    kinds = sorted(set(racks))
    columns = _columns(_read_all(descriptor))
    ups = [columns[_uplink(rack)[0]] for rack in kinds] if len(kinds) > 1 else []
    return tuple(RackBytes(up[8], up[0]) for up in ups)


def _read_all(descriptor: int) -> str:
    chunks: list[bytes] = []
    offset = 0
    while chunk := os.pread(descriptor, 1 << 16, offset):
        chunks.append(chunk)
        offset += len(chunk)
    return b"".join(chunks).decode()


def _columns(table: str) -> dict[str, list[int]]:
    """Parse /proc/net/dev. The first column after the name counts received bytes, the ninth sent bytes."""
    rows = dict(line.split(":", 1) for line in table.splitlines() if ":" in line)
    return {name.strip(): [int(value) for value in row.split()] for name, row in rows.items()}


def _parse(table: str) -> LinkBytes:
    columns = _columns(table)
    if CABLE not in columns:
        raise LabError(
            f"this process is not on a node of a lab: it has no interface {CABLE!r}, only {', '.join(columns)}. "
            "Call link_counters() from a rank that a Lab started."
        )
    return LinkBytes(columns[CABLE][8], columns[CABLE][0], columns["lo"][8])
