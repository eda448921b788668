"""Process groups between jobs. Each job has process groups of its own, which these do not touch."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]


def open_store() -> tuple[Store, int]:
    """Return a store that ranks of other jobs can reach, and its port."""
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    return store, store.port


def group_between_jobs(
    host: str, port: int, name: str, rank: int, size: int, timeout: timedelta, patience: timedelta | None = None
) -> Any:
    """Return a gloo group of ranks that reach the same store, for tensors in host memory.

    All of them must call it. It ends when the last reference to it does. Peers that wait for this rank there then fail.

    Args:
        host: The host of the store. Gloo listens at the address by which this machine reaches it, because a machine's
            own name may stand for an address that nobody else reaches. `GLOO_SOCKET_IFNAME` comes first.
        name: A name that no other group has.
        timeout: How long the store, and a message, are awaited.
        patience: How long a message is awaited, if that is longer.
    """
    store = TCPStore(host, port, is_master=False, timeout=timeout)
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    make = dist.ProcessGroupGloo.create_device
    options._devices = [make(interface=interface) if interface else make(hostname=_address_towards(host))]
    options._timeout = patience or timeout
    return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, options)


def _address_towards(host: str) -> str:
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]
