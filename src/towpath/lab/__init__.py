"""The lab: a cluster of network namespaces with shaped cables on one Linux machine. The kernel counts its bytes.

    lab.py         Lab, for pytest, the command and the benchmarks    (in the owner's process)
    runs.py        scripts and calls on the nodes                     (in the owner's process)
    protocol.py    the requests between owner and keeper
    keeper.py      the process that holds the namespaces              (in the keeper's process)
    processes.py   the processes on the nodes
    links.py       cables, rates, byte counters    namespaces.py  system calls

May import: core, topology, errors. Only ranks import torch.
"""

from towpath.lab.lab import PRELOAD, Lab, available
from towpath.lab.links import LinkBytes, RackBytes, Rate, link_counters, window_bytes
from towpath.lab.runs import LabResult, LabRun

__all__ = [
    "PRELOAD",
    "Lab",
    "LabResult",
    "LabRun",
    "LinkBytes",
    "RackBytes",
    "Rate",
    "available",
    "link_counters",
    "window_bytes",
]


def __dir__() -> list[str]:
    return __all__
