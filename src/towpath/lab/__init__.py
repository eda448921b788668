"""The laboratory: a cluster of network namespaces with shaped cables on one Linux machine, and the kernel as its judge.

    lab.py          Lab: what pytest, the command and the benchmarks use       (the owner's process)
    launch.py       what is started on the nodes    run.py   until it has ended
    keeper.py       the process that holds the namespaces                      (the keeper's process)
    namespaces.py   from the kernel    shaping.py   the wires    processes.py   what runs    ranks.py   warm ranks
    counters.py     what the wires carried

May import: core, topology, errors; torch only inside a rank.
"""

from towpath.lab.counters import LinkBytes, link_counters
from towpath.lab.lab import PRELOAD, Lab, available
from towpath.lab.run import Result, Run
from towpath.lab.shaping import Rate, window_bytes

__all__ = ["PRELOAD", "Lab", "LinkBytes", "Rate", "Result", "Run", "available", "link_counters", "window_bytes"]
