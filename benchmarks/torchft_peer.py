"""DiLoCo of torchft as a candidate: DDP inside each island, and its exchange of all weights every so many steps.

torchft can be installed into a folder of its own, which `TOWPATH_TORCHFT` names:

    pip install --target ~/torchft --no-deps -r benchmarks/torchft.txt
    TOWPATH_TORCHFT=~/torchft python -m benchmarks outer_time

An island is a replica group with a manager on its first rank. Rank 0 of the job also runs the lighthouse, which knows
all groups. torchft averages in fp32, and every rank of an island exchanges the whole model with its peers in the
others.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workload import Workload
from lab.links import address
from towpath.errors import ConfigError

FOLDER = "TOWPATH_TORCHFT"
NAME = "torchft"
# Ranks of the benchmarks are stopped while others are measured. No heartbeat may be missed meanwhile.
_PATIENCE = timedelta(hours=12)
# As the other candidates of `outer_time`: islands average their weights.
_OUTER_RATE, _OUTER_MOMENTUM = 1.0, 0.0


def reason_missing() -> str | None:
    """Return why torchft cannot take part, or None if it can."""
    folder = os.environ.get(FOLDER)
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)  # at the end, so that Towpath's packages come first
    if find_spec(NAME) is None:
        return (
            f"torchft is not installed: pip install --target FOLDER --no-deps -r benchmarks/torchft.txt, and {FOLDER}"
        )
    return None


class DiLoCo:
    """The model of one rank in its island, and what keeps the islands together."""

    def __init__(self, workload: Workload) -> None:
        if (reason := reason_missing()) is not None:
            raise ConfigError(reason)
        os.environ.setdefault("RUST_LOG", "error")
        logging.getLogger(NAME).setLevel(logging.ERROR)
        self._torchft: Any = importlib.import_module(NAME)
        topology = workload.topology
        self.rank, self._islands = dist.get_rank(), topology.nodes
        self._island, self._width = topology.node_of(self.rank), topology.ranks_per_node
        ranks = [list(range(i * self._width, (i + 1) * self._width)) for i in range(self._islands)]
        groups = [dist.new_group(each) for each in ranks]
        self.model = DistributedDataParallel(
            workload.model(), process_group=groups[self._island], gradient_as_bucket_view=True
        )

    def begin(self, optimizer: torch.optim.Optimizer, every: int) -> None:
        """Exchange the weights after every so many steps of an optimizer, from now on."""
        local_sgd: Any = importlib.import_module(f"{NAME}.local_sgd")
        outer = torch.optim.SGD(self.model.parameters(), lr=_OUTER_RATE, momentum=_OUTER_MOMENTUM)
        module: nn.Module = self.model.module
        self._manager = self._managed()
        self._exchanges = local_sgd.DiLoCo(
            self._manager, [module], optimizer, outer, sync_every=every, pin_memory=False, use_bucketization=True
        )
        self._exchanges.__enter__()

    def _managed(self) -> Any:
        """Start the lighthouse, a store for each island, and the manager of this rank."""
        coordination: Any = importlib.import_module(f"{NAME}.coordination")
        mine = address(self._island)
        found: dict[str, int] = {}
        if self.rank == 0:
            self._lighthouse = coordination.LighthouseServer(
                bind="[::]:0", min_replicas=self._islands, heartbeat_timeout_ms=_milliseconds(_PATIENCE)
            )
            found["lighthouse"] = int(self._lighthouse.address().rpartition(":")[2])
        if self.rank % self._width == 0:
            self._store = dist.TCPStore(mine, 0, is_master=True, wait_for_workers=False)
            found["store"] = self._store.port
        ports: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ports, found)
        return self._torchft.Manager(
            pg=self._torchft.ProcessGroupGloo(timeout=_PATIENCE),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self._islands,
            use_async_quorum=False,
            timeout=_PATIENCE,
            quorum_timeout=_PATIENCE,
            rank=self.rank % self._width,
            world_size=self._width,
            store_addr=mine,
            store_port=ports[self._island * self._width]["store"],
            lighthouse_addr=f"http://{address(0)}:{ports[0]['lighthouse']}",
            replica_id=f"island_{self._island}",
            hostname=mine,
            init_sync=False,
        )


def _milliseconds(time: timedelta) -> int:
    return round(time.total_seconds() * 1000)
