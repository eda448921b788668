"""How much memory this rank uses."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def memory_bytes(device: torch.device) -> int:
    """On a GPU the most that PyTorch had allocated so far. On a CPU what is resident now and no file's, which only
    Linux tells; elsewhere the most that was resident, files too."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
