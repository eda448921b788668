"""The network interfaces of this machine, and those that gloo and NCCL choose among them.

The kernel answers through a socket, for the network of this process, so `ip` need not be installed. Only the speed of
a cable is read in /sys: that shows the network in which it was mounted, which may have other interfaces.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Interface = dict[str, Any]

_GET_ADDRESSES, _GET_FLAGS, _GET_MTU = 0x8912, 0x8913, 0x8921
_UP = 0x1
_REQUEST_BYTES, _MOST_ADDRESSES = 40, 512
# Adapters of virtual machines: their speed is a constant, and says nothing of a cable. Bridges and tunnels have none.
_VIRTUAL = ("virtio_net", "vmxnet3", "hv_netvsc", "ena", "gve")
_RESOLVE_SECONDS = 4.0


def interfaces() -> list[Interface]:
    """Return the interfaces that are up and have addresses, in the order of the kernel."""
    found: list[Interface] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        addresses = _addresses(control)
        for _, name in socket.if_nameindex():
            flags = struct.unpack_from("H", _asked(control, _GET_FLAGS, name), 16)[0]
            mtu = struct.unpack_from("i", _asked(control, _GET_MTU, name), 16)[0]
            if flags & _UP and name in addresses:
                known = {"name": name, "addresses": addresses[name], "mtu": mtu}
                found.append(known | _cable(Path("/sys/class/net", name)))
    return found


def _cable(folder: Path) -> Interface:
    """Return what an adapter says of its cable: its speed, its duplex, and whether it is Wi-Fi instead."""
    megabits, duplex = 0, None
    with suppress(OSError):  # as long as nothing is plugged in
        if (folder / "device/driver").exists() and (folder / "device/driver").resolve().name not in _VIRTUAL:
            megabits, duplex = int((folder / "speed").read_text()), (folder / "duplex").read_text().strip()
    return {"megabits": max(0, megabits) or None, "duplex": duplex, "wireless": (folder / "phy80211").exists()}


def _asked(control: socket.socket, what: int, name: str) -> bytes:
    try:
        return fcntl.ioctl(control, what, name.encode().ljust(_REQUEST_BYTES, b"\0"))
    except OSError:  # it has gone since
        return bytes(_REQUEST_BYTES)


def _addresses(control: socket.socket) -> dict[str, list[str]]:
    """Return the addresses of each interface, those of IPv4 first."""
    found: dict[str, list[str]] = {}
    buffer = array("B", bytes(_REQUEST_BYTES * _MOST_ADDRESSES))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    used = struct.unpack("iP", fcntl.ioctl(control, _GET_ADDRESSES, request))[0]
    for label, address in struct.iter_unpack("16s4x4s16x", buffer.tobytes()[:used]):
        name = label.split(b"\0")[0].decode().partition(":")[0]
        found.setdefault(name, []).append(socket.inet_ntoa(address))
    with suppress(OSError):
        for line in Path("/proc/self/net/if_inet6").read_text().splitlines():
            text, *_, name = line.split()
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(text, 16))))
    return found


# What is asked about them ---------------------------------------------------------------------------------------------


def is_usable(address: str) -> bool:
    """Return whether another machine could use this address: it is neither a loopback nor only of one link."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def is_loopback(address: str | None) -> bool:
    """Return whether it is an address at which only its own machine is reached."""
    return address is not None and ipaddress.ip_address(address).is_loopback


def interface_of(address: str, found: Sequence[Interface]) -> Interface | None:
    """Return the interface that has this address."""
    return next((each for each in found if address in each["addresses"]), None)


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of sockets for an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def source_towards(address: str) -> str | None:
    """Return this machine's address on its route to another one. None: there is no route."""
    with suppress(OSError), socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return probe.getsockname()[0]
    return None


def resolved(name: str) -> list[str]:
    """Return the addresses that a name stands for here, in order, or none. A server of names that is silent is left."""
    found: list[str] = []

    def look() -> None:
        with suppress(OSError, UnicodeError):  # no name at all
            for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
                found.append(str(entry[4][0]))

    looking = threading.Thread(target=look, name="towpath-doctor-names", daemon=True)
    looking.start()
    looking.join(_RESOLVE_SECONDS)
    return list(dict.fromkeys(found))


def gloo_choice(found: Sequence[Interface]) -> dict[str, Any]:
    """Return the address at which PyTorch's gloo listens, its interface, and why: by a variable, or by the host name.

    Without GLOO_SOCKET_IFNAME, it is the first address of the host name that belongs to this machine, or the loopback.
    """
    variable, name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0], socket.gethostname()
    if len(variable) > 1:  # as PyTorch reads it
        return _choice(variable, found, f"GLOO_SOCKET_IFNAME={variable}")
    addresses = resolved(name)
    own = (each for each in addresses if is_loopback(each) or interface_of(each, found))
    address, why = (
        next(own, "127.0.0.1"),
        f"the host name {name}, which stands for {', '.join(addresses) or 'no address'}",
    )
    return {"interface": (interface_of(address, found) or {"name": "lo"})["name"], "address": address, "why": why}


def nccl_choice(found: Sequence[Interface]) -> dict[str, Any]:
    """Return the first interface that NCCL's sockets use, its address, and why: by a variable, or by NCCL's own rules.

    Those are: names that begin with ib, then all but docker and lo, then docker.
    """
    variable = os.environ.get("NCCL_SOCKET_IFNAME", "")
    # The kernel lists addresses of IPv4 before those of IPv6.
    names = [each["name"] for each in sorted(found, key=lambda each: ":" in each["addresses"][0])]
    rules = [variable] if variable else ["ib", "^docker,lo", "docker", "lo"]
    chosen = next((name for rule in rules for name in names if _matches(name, rule)), variable)
    return _choice(chosen, found, f"NCCL_SOCKET_IFNAME={variable}" if variable else "NCCL's order of names")


def _choice(name: str, found: Sequence[Interface], why: str) -> dict[str, Any]:
    address = next((each["addresses"][0] for each in found if each["name"] == name), None)
    return {"interface": name, "address": address, "why": why}


def _matches(name: str, rule: str) -> bool:
    exact, excluded = rule.lstrip("^").startswith("="), rule.startswith("^")
    words = rule.lstrip("^").lstrip("=").split(",")
    return any(name == word if exact else name.startswith(word) for word in words) != excluded
