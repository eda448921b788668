"""One rank of a large world, without the others: what it launches, counted.

The process group is PyTorch's fake one. It sends nothing, and a gather copies this rank's values to all places. The
engine takes it for NCCL, and jobs run on the thread that submits them, as on a GPU. For each job, `Launches` counts the
calls of the backend, the launches of codec kernels, and other operations on memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import towpath
from towpath import api
from towpath.codecs import packing
from towpath.codecs.kernels import Kernels
from towpath.collectives import backend
from towpath.core.transfer import Transfer
from towpath.engine import comm
from towpath.engine.agree.digest import CollectiveLog
from towpath.engine.transfer_queues import Handle, Stream, StreamJob
from towpath.fsdp import peers
from towpath.observe.record import TransferWait
from towpath.topology import groups

# In a job's counts: launches of collectives, calls that are launched together with others, messages between two ranks,
# kernels of codecs, other operations.
CALLS, TOGETHER, MESSAGES, CODECS, OTHERS = "calls", "together", "messages", "codecs", "others"
_MESSAGES = ("c10d.send", "c10d.recv_")


@dataclass
class Launches:
    """The launches of one rank: for each job its transfers and its counts, and the groups that were made."""

    jobs: list[tuple[tuple[Transfer, ...], Counter[str]]] = field(default_factory=list)
    groups: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    limits: list[tuple[tuple[int, ...], int | None]] = field(default_factory=list)  # of thread blocks, by group
    computation: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.counts = self.computation

    @contextmanager
    def of_job(self, transfers: Sequence[Transfer]) -> Generator[None]:
        before, self.counts = self.counts, Counter[str]()
        self.jobs.append((tuple(transfers), self.counts))
        try:
            yield
        finally:
            self.counts = before

    @property
    def communicators(self) -> list[tuple[int, ...]]:
        """The ranks of each communicator on the device that this rank is in, without the parent."""
        return [ranks for ranks, backend in self.groups if len(ranks) > 1 and backend != "gloo"]


class _Watch(TorchDispatchMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        counts = self._launches.counts
        if name.startswith("c10d."):
            counts[MESSAGES if name.startswith(_MESSAGES) else CALLS] += 1
            counts[TOGETHER] += len(args[0]) if "coalesced" in name else 0
        elif func._schema.is_mutable or not _is_view(func):
            counts[OTHERS] += 1
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    return any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)


class _InlineStream(Stream):
    """Runs a job when it is submitted, as a GPU's stream enqueues it."""

    def __init__(self, depth: int, launches: Launches) -> None:
        super().__init__(depth)
        self._launches = launches

    def submit(self, job: StreamJob, after: Sequence[Handle] = (), waiting: TransferWait | None = None) -> Handle:
        with torch.no_grad(), self._launches.of_job(getattr(waiting, "_transfers", ())):
            for work in job.works:
                work(job.workspace)
        return _Done()

    def finish(self) -> None:
        """Do nothing: nothing is left."""

    def uses(self, buffer_index: int, buffer: torch.Tensor) -> None:
        """Do nothing: jobs have ended."""

    def close(self) -> None:
        """Do nothing."""


class _Done(Handle):
    def wait(self, on_host: bool = False) -> None:
        """Return at once."""

    join = wait

    def has_ended(self) -> bool:
        return True


def _counted(kernels: Kernels, launches: Launches, work: bool) -> Kernels:
    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            launches.counts[CODECS] += 1
            if work:
                function(*args, **kwargs)

        return call

    names = ("encode", "decode", "encode_pieces", "decode_pieces")
    functions = {name: counted(getattr(kernels, name)) for name in names}
    return Kernels(cast(Any, SimpleNamespace(__name__=kernels.name, **functions)))


@contextmanager
def fake_world(
    nodes: int, ranks_per_node: int, device: str = "cpu", kernels: bool = True, watch: bool = True
) -> Generator[tuple[towpath.Topology, Launches]]:
    """Yield the topology, and what rank 0 launches inside. Without `kernels`, codecs do nothing but count.

    On "cuda" the streams are real ones, and launches are not counted by job.
    """
    topology, launches = towpath.Topology(nodes, ranks_per_node), Launches()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=topology.world)

    def make_group(ranks: list[int], purpose: str, backend: str | None = None, **options: Any) -> dist.ProcessGroup:
        launches.groups.append((tuple(ranks), backend or "nccl"))
        launches.limits.append((tuple(ranks), options.get("max_ctas")))
        made = dist.new_group(ranks, use_local_synchronization=True, group_desc=purpose, backend="fake")
        assert isinstance(made, dist.ProcessGroup)
        return made

    replaced = [
        (groups, "backends_of", lambda group: {device: "nccl"}),
        (groups, "new_group", make_group),
        (groups, "connect", lambda group: None),
        (api, "check_devices", lambda groups, device: None),  # all ranks are on one device
        # The other ranks' digests are missing in what the fake group combines.
        (CollectiveLog, "check", lambda self, combined, of_all_ranks: self.begin_step()),
    ]
    if device == "cpu":
        replaced.append((comm, "make_stream", lambda name, device, depth: _InlineStream(depth, launches)))
    for module in (packing, backend):
        made = module.kernels_for
        replaced.append(
            (module, "kernels_for", lambda device, made=made: _counted(made(device), launches, work=kernels))
        )
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        # Calls of `towpath.wires` meet through the store, to which the other ranks never come.
        stack.enter_context(mock.patch.object(peers, "_meet"))
        stack.enter_context(_Watch(launches) if watch else nullcontext())
        yield topology, launches
