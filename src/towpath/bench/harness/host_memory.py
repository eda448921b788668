"""How much memory this machine has left."""

from __future__ import annotations

import sys
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int:
    """What new processes can still take; `sys.maxsize` where that cannot be known, as on a host that is no Linux."""
    if not _MEMINFO.exists():
        return sys.maxsize
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), sys.maxsize)
