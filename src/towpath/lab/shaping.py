"""The wires: a cable from every node to one bridge, each direction of it and the node's loopback at its own rate.

    node i   cable ──(tbf: what the node sends)──>   ┌────────┐
             cable <──(tbf: what it receives)── node i │ bridge │   in a network of its own
             lo    (tbf, if `intra` is given)         └────────┘

A token bucket (tbf) holds each direction to its rate, so several senders to one node share the rate of its cable, as
behind a switch. What keeps the rate and the counters truthful at once:

- jumbo frames, and segments of at most two frames handed down at a time: TCP/IP and Ethernet headers come to less than
  1 % of the payload;
- a bucket of 64 KiB, or of what the rate carries in a millisecond: a burst beats the rate by that much and no more, and
  a timer that fires late loses nothing;
- queues longer than what TCP keeps in flight: nothing is dropped, so nothing has to be sent and counted twice; and a
  TCP that takes only a long silence for a loss, so nothing is;
- a receive window of 512 KiB, or of what the rate carries in 8 ms: more than a connection needs, and little enough that
  several senders to one node do not fill its queue with seconds of data;
- the one congestion control that every kernel has and lets everybody use. Where nothing is dropped it only has to open
  the window (cubic took 0.2 s for that at 50 mbit with both directions busy), and results do not depend on the host's.
"""

from __future__ import annotations

import ipaddress
import math
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from towpath.errors import LabError
from towpath.lab.counters import CABLE
from towpath.lab.namespaces import Space, inside

_SUBNET = ipaddress.ip_network("10.77.0.0/16")
_BRIDGE = "bridge"

_MTU_BYTES = 9000
_SEGMENT_BYTES = 18_000
_BUCKET_BYTES = 64 << 10
_BUCKET_SECONDS = 1e-3
_LOOPBACK_BUCKET_BYTES = 128 << 10  # its packets are up to 64 KiB, and one larger than the bucket is dropped
_QUEUE_BYTES = 64 << 20
_WINDOW_BYTES = 512 << 10
_WINDOW_SECONDS = 8e-3

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_SLOWEST = 10**6

# Router solicitations and the like would be counted with the payload.
_QUIET = {"net/ipv6/conf/all/disable_ipv6": "1", "net/ipv6/conf/default/disable_ipv6": "1"}
_TCP = {
    "net/ipv4/tcp_congestion_control": "reno",
    # A connection starts alike whatever earlier ones met: runs can be compared.
    "net/ipv4/tcp_no_metrics_save": "1",
    # Nothing is dropped, but a sender that moves to another core overtakes itself, and a receiver without one answers
    # late. TCP takes both for losses and sends up to a window again. Here only a long silence (a cut cable) is one.
    "net/ipv4/tcp_max_reordering": "1000000",
    "net/ipv4/tcp_reordering": "1000000",
    "net/ipv4/tcp_recovery": "0",
    "net/ipv4/tcp_early_retrans": "0",
    "net/ipv4/tcp_rto_min_us": "2000000",
}


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """How fast a link is, in bits per second."""

    bits_per_second: int

    @staticmethod
    def parse(text: str) -> Rate:
        """'200mbit', '1.5gbit': a number and one of bit, kbit, mbit, gbit, tbit (powers of ten, as tc counts them)."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
        if match is None or match[2] not in _UNITS:
            raise LabError(f"not a rate: {text!r}. Write a number and a unit ({', '.join(_UNITS)}), such as 200mbit.")
        rate = Rate(round(float(match[1]) * _UNITS[match[2]]))
        if rate.bits_per_second < _SLOWEST:
            raise LabError(f"too slow to shape: {text!r}. The slowest rate is {Rate(_SLOWEST)}.")
        return rate

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second / 8

    def __str__(self) -> str:
        unit = max((u for u in _UNITS if self.bits_per_second >= _UNITS[u]), key=_UNITS.__getitem__, default="bit")
        return f"{self.bits_per_second / _UNITS[unit]:g}{unit}"


def address(node: int) -> str:
    return str(_SUBNET[node + 1])


def lay_cables(nodes: Sequence[Space], bridge: Space, inter: Rate | None, intra: Rate | None) -> None:
    """Join the nodes; this thread runs in the bridge's network."""
    _set(_QUIET)
    _ip([f"link add {_BRIDGE} mtu {_MTU_BYTES} type bridge forward_delay 0 mcast_snooping 0", f"link set {_BRIDGE} up"])
    for node, space in enumerate(nodes):
        with inside(space, bridge):
            _set(_QUIET | _TCP)
            _ip(
                [
                    "link set lo up",
                    f"link add {CABLE} mtu {_MTU_BYTES} gso_max_size {_SEGMENT_BYTES} "
                    f"type veth peer name {_port(node)} mtu {_MTU_BYTES} netns /proc/self/fd/{bridge.network}",
                    f"link set {CABLE} addrgenmode none up",
                    f"address add {address(node)}/{_SUBNET.prefixlen} dev {CABLE}",
                ],
                bridge.network,
            )
    _ip([f"link set {_port(node)} master {_BRIDGE} addrgenmode none up" for node in range(len(nodes))])
    shape_links(nodes, bridge, inter, intra)


def shape_links(nodes: Sequence[Space], bridge: Space, inter: Rate | None, intra: Rate | None) -> None:
    """Give links that are there these rates; this thread runs in the bridge's network. A connection that had a larger
    window keeps it."""
    window = _window(inter)
    for space in nodes:
        with inside(space, bridge):
            _set(window)
            _tc([_shaped(CABLE, inter, _BUCKET_BYTES), _shaped("lo", intra, _LOOPBACK_BUCKET_BYTES)])
    _tc([_shaped(_port(node), inter, _BUCKET_BYTES) for node in range(len(nodes))])


def plug(node: int, connected: bool) -> None:
    """Pull a node's cable out of the bridge, or put it back; this thread runs in the bridge's network."""
    _ip([f"link set {_port(node)} {'up' if connected else 'down'}"])


def _port(node: int) -> str:
    return f"node{node}"


def _shaped(device: str, rate: Rate | None, bucket_bytes: int) -> str:
    if rate is None:
        return f"qdisc replace dev {device} root noqueue"
    bucket_bytes = max(bucket_bytes, round(_BUCKET_SECONDS * rate.bytes_per_second))
    how = f"tbf rate {rate.bits_per_second}bit burst {bucket_bytes} limit {_QUEUE_BYTES}"
    return f"qdisc replace dev {device} root {how}"


def window_bytes(rate: Rate | None) -> float:
    """The most of a connection; infinite (the kernel's own) on links that are not shaped."""
    return math.inf if rate is None else max(_WINDOW_BYTES, _WINDOW_SECONDS * rate.bytes_per_second)


def _window(rate: Rate | None) -> dict[str, str]:
    name = "net/ipv4/tcp_rmem"
    if rate is None:
        return {name: Path("/proc/sys", name).read_text()}  # the bridge's network has the kernel's own
    return {name: f"4096 131072 {round(window_bytes(rate))}"}


def _set(settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        # Read-only in some containers, and absent without IPv6; the links are told to keep quiet besides.
        with suppress(OSError):
            Path("/proc/sys", name).write_text(value)


def _ip(lines: Sequence[str], *descriptors: int) -> None:
    _batch("ip", lines, descriptors)


def _tc(lines: Sequence[str]) -> None:
    _batch("tc", lines, ())


def _batch(tool: str, lines: Sequence[str], descriptors: Sequence[int]) -> None:
    if not lines:
        return
    text = "\n".join(lines) + "\n"
    try:
        done = subprocess.run([tool, "-batch", "-"], input=text, capture_output=True, text=True, pass_fds=descriptors)
    except FileNotFoundError:
        raise LabError(f"the lab needs the command {tool!r}: install iproute2.") from None
    if done.returncode != 0:
        raise LabError(f"{tool} failed on {lines}: {' '.join(done.stderr.split())}")
