"""The lab: a cluster of network namespaces with shaped cables on one Linux machine. The kernel counts its bytes.

    lab.py         Lab, for pytest, the command and the benchmarks    (in the owner's process)
    runs.py        scripts and calls on the nodes                     (in the owner's process)
    elastic.py     jobs that go on when nodes are lost                (in the owner's process)
    rank.py        a script as one rank                               (in the rank's process)
    protocol.py    the requests between owner and keeper
    keeper.py      the process that holds the namespaces              (in the keeper's process)
    processes.py   the processes on the nodes
    cables.py      the properties of links: rates, latency, loss
    links.py       how the kernel gets them, and its byte counters
    delay.py       a cable with latency or loss    (in a process of its own)
    namespaces.py  system calls    folders.py  the lab's folder on the host
    command.py     `python -m lab run`
    demo.py        `python -m lab demo`, and its report in report.py

It belongs to the repository, not to the package: `towpath` never imports it. Only ranks and the demo import torch.
"""

from lab.cables import FLAT, Cable, Rate
from lab.elastic import ElasticRun
from lab.errors import LabError
from lab.lab import PRELOAD, Lab, available
from lab.links import LinkBytes, RackBytes, link_counters, window_bytes
from lab.runs import LabResult, LabRun

__all__ = [
    "FLAT",
    "PRELOAD",
    "Cable",
    "ElasticRun",
    "Lab",
    "LabError",
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
