"""The judge of every byte claim: the kernel's own counters of a node's interfaces."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from towpath.errors import LabError

# The interface that joins a node to the others; every node has a network of its own, so one name serves all.
CABLE = "cable"


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What one node's links carried, headers included: its cable, seen from the node, and its loopback."""

    sent_bytes: int
    received_bytes: int
    loopback_bytes: int

    def __sub__(self, before: LinkBytes) -> LinkBytes:
        return LinkBytes(
            self.sent_bytes - before.sent_bytes,
            self.received_bytes - before.received_bytes,
            self.loopback_bytes - before.loopback_bytes,
        )


def link_counters() -> LinkBytes:
    """The counters of the node this process runs on. Called on a rank; bracket a region with barriers and subtract."""
    # /sys shows the network of whoever mounted it; this file is the calling thread's own.
    return parse(Path("/proc/thread-self/net/dev").read_text())


def read_descriptor(descriptor: int) -> LinkBytes:
    """The counters of another node, by a descriptor of its /proc/net/dev."""
    chunks: list[bytes] = []
    offset = 0
    while chunk := os.pread(descriptor, 1 << 16, offset):
        chunks.append(chunk)
        offset += len(chunk)
    return parse(b"".join(chunks).decode())


def parse(table: str) -> LinkBytes:
    """The columns of /proc/net/dev that count bytes: the first after the name is received, the ninth is sent."""
    rows = dict(line.split(":", 1) for line in table.splitlines() if ":" in line)
    columns = {name.strip(): [int(value) for value in row.split()] for name, row in rows.items()}
    if CABLE not in columns:
        raise LabError(
            f"this process is not on a node of a lab: it has no interface {CABLE!r}, only {', '.join(columns)}. "
            "Call link_counters() from a rank that a Lab started."
        )
    return LinkBytes(columns[CABLE][8], columns[CABLE][0], columns["lo"][8])
