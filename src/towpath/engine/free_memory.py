"""How much memory this rank may still take: of its GPU, or its share of what its host has left."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from towpath.engine.layout import UnitLayout, device_of
from towpath.engine.parallel import local_part
from towpath.topology.groups import Groups

_MEMINFO, _BOOT = Path("/proc/meminfo"), Path("/proc/sys/kernel/random/boot_id")


def least_free_bytes(layouts: list[UnitLayout], groups: Groups) -> int | None:
    """On the rank that has least, with what the model's own parameters there will give back. Every rank must ask.

    None where no rank can tell, as on a host that is no Linux.
    """
    device = device_of(layouts, groups)
    places = [place for unit in layouts for bucket in unit.buckets for place in bucket.places]
    own = [local_part(p.parameter) for p in places if p.parameter.device.type != "meta"]
    returned = sum(values.numel() * values.element_size() for values in own)
    told: list[tuple[str, int | None, int]] = groups.gather_objects((_host(), _free(device), returned))
    hosts = [host for host, _, _ in told]
    found: list[int] = []
    for host, free, theirs in told:
        if free is not None:
            found.append((free if device.type == "cuda" else free // hosts.count(host)) + theirs)
    return min(found, default=None)


def _free(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes() if device.type == "cpu" else None


def available_bytes() -> int | None:
    """What processes on this host can still take; None where it does not tell, as one that is no Linux."""
    if not _MEMINFO.exists():
        return None
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), None)


def _host() -> str:
    """The machine, whatever names its containers have."""
    return _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
