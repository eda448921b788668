"""The only maker of process groups, and the only reader of the launcher's environment."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import chain, count
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from towpath.errors import TopologyError
from towpath.topology.meeting import gather_through

Partition = tuple[tuple[int, ...], ...]
Shared = TypeVar("Shared")

# What all models over one process group share, by that group. A group has threads and connections of its own, and
# cannot be given back while others may use it: a model made anew takes those of the one before it.
_SHARED: WeakKeyDictionary[dist.ProcessGroup, dict[Any, Any]] = WeakKeyDictionary()
_SHARED_ALONE: dict[Any, Any] = {}


def _wait(work: Any) -> None:
    work.wait()


class Groups:
    """The process groups inside `parent` (default: the whole world), made on demand and shared by all its models.

    Ranks are counted inside the parent. Every rank must ask for the same groups in the same order. A new group needs no
    rank but its own, and its members connect to one another at once: see `new_group` and `connect`.
    """

    def __init__(self, parent: dist.ProcessGroup | None = None) -> None:
        self._alone = not (dist.is_available() and dist.is_initialized())
        self._parent = None if self._alone else (parent or dist.group.WORLD)
        self._shared = _SHARED_ALONE if self._parent is None else _SHARED.setdefault(self._parent, {})
        self._made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = self.shared("process groups", dict)

    def shared(self, what: str, make: Callable[[], Shared]) -> Shared:
        """What all models over this process group have in common; made by who asks for it first."""
        if what not in self._shared:
            self._shared[what] = make()
        return self._shared[what]

    def describe_made(self) -> str:
        """The groups so far, in words that are alike on every rank which made the same ones in the same order."""
        return ", ".join(f"{purpose} of {len(ranks)}" for ranks, purpose in self._made) or "none"

    @property
    def parent(self) -> dist.ProcessGroup | None:
        """Of all ranks; none in a world of one that was never initialised."""
        return self._parent

    @property
    def rank(self) -> int:
        return 0 if self._alone else dist.get_rank(self._parent)

    @property
    def world(self) -> int:
        return 1 if self._alone else dist.get_world_size(self._parent)

    @property
    def members(self) -> list[int]:
        """The ranks of this group, as the whole job counts them."""
        return [0] if self._alone else dist.get_process_group_ranks(self._parent)

    def backend(self, device: torch.device) -> str:
        """Return the backend that carries tensors on `device`: 'gloo', 'nccl', or 'none'."""
        return "none" if self._parent is None else backends_of(self._parent).get(device.type, "none")

    @property
    def device(self) -> torch.device:
        """The current GPU if this group carries tensors there (or a rank is alone, with a GPU); else the CPU."""
        gpu = torch.device("cuda")
        on_gpu = torch.cuda.is_available() if self._parent is None else self.backend(gpu) not in ("none", "gloo")
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def of(self, partition: Partition, purpose: str, backend: str | None = None) -> dist.ProcessGroup:
        """Return this rank's group of `partition`, which is made when it is first asked for.

        Every rank of the parent must call it, at the same point among its calls. Each purpose (a queue, say) has groups
        of its own, so that they overlap.

        Args:
            partition: Every rank of the parent once. A rank that communicates with no other stands alone.
            purpose: A name that tells groups of the same ranks apart.
            backend: A PyTorch backend, by default the parent's.
        """
        mine = next(ranks for ranks in partition if self.rank in ranks)
        key = (mine, purpose)
        if key not in self._made:
            assert self._parent is not None, "a world of one communicates nothing"
            assert sorted(chain(*partition)) == list(range(self.world)), f"not a partition of the ranks: {partition}"
            members = [dist.get_global_rank(self._parent, r) for r in mine]
            even_out(self._parent)
            self._made[key] = new_group(members, purpose, timeout=self._timeout(), backend=backend)
        return self._made[key]

    def control_on_host(self) -> dist.ProcessGroup:
        """Of all ranks, for what the host itself has to know: its tensors are on the CPU, and wait for no device."""
        return self.on_host((tuple(range(self.world)),))

    def on_host(self, partition: Partition) -> dist.ProcessGroup:
        """This rank's group of a partition, for what lies in the host's memory."""
        if self.backend(torch.device("cpu")) == "gloo":
            return self.of(partition, "control")
        return self.of(partition, "control on the host", backend="gloo")

    def leave(self, group: dist.ProcessGroup) -> None:
        """Close this rank's connections in it, so that whoever waits for this rank there learns that it is gone."""
        for key in [key for key, made in self._made.items() if made is group]:
            del self._made[key]
        dist.destroy_process_group(group)

    def abort(self) -> None:
        """End what is under way on the device, in all groups; none of them can be used afterwards."""
        backends: list[Any] = []
        for group in filter(None, [self._parent, *self._made.values()]):
            with suppress(RuntimeError):  # it has none
                backends.append(group._get_backend(torch.device("cuda")))
        # As one NCCL call: else the abort of one communicator may wait for a kernel of another one.
        if backends and hasattr(backends[0], "_group_start"):
            backends[0]._group_start()
        for backend in backends:
            backend.abort()
        if backends and hasattr(backends[0], "_group_end"):
            backends[0]._group_end()

    def describe_backends(self) -> str:
        """Return the devices that this group carries tensors of, and by what: 'cpu:gloo, cuda:nccl'."""
        named = {} if self._parent is None else backends_of(self._parent)
        return ", ".join(f"{device}:{backend}" for device, backend in named.items())

    def connect(self) -> None:
        """Connect the parent. Every rank must call it, before some of them send messages to one another."""
        if self._parent is not None:
            connect(self._parent)

    def gather_before_connecting(self, value: Any) -> list[Any]:
        """Return the JSON value of every rank, by rank, even if NCCL cannot connect the ranks.

        Where tensors on the host cannot travel, the values go through the store at which the ranks met.
        """
        if self._parent is None or self.backend(torch.device("cpu")) != "none":
            return self.gather_objects(value)
        number: int = next(self.shared("gathered through the store", count))
        store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        patience = timedelta(seconds=self.timeout_seconds)
        return gather_through(store, f"{self.name}/{number}", self.rank, self.world, value, patience)

    def gather_objects(self, value: Any) -> list[Any]:
        """The value of every rank, by rank."""
        if self._alone:
            return [value]
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value, group=self._parent)
        return out

    def collect_objects(self, value: Any) -> list[Any]:
        """On rank 0 the value of every rank, by rank; elsewhere nothing."""
        if self._alone:
            return [value]
        out: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, out, group=self._parent, group_dst=0)
        return out or []

    def gather_rows(self, row: torch.Tensor, wait: Callable[[Any], None] = _wait) -> torch.Tensor:
        """The row of every rank, on the host: [ranks, ...]. Every rank's has the same shape and dtype.

        `wait`: for the collective, as `Program.wait` does.
        """
        if self._alone:
            return row[None]
        rows = [torch.empty_like(row) for _ in range(self.world)]
        wait(dist.all_gather(rows, row, group=self.control_on_host(), async_op=True))
        return torch.stack(rows)

    def barrier(self) -> None:
        """Return when every rank is here."""
        if self.world > 1:
            dist.barrier(group=self._parent)

    def broadcast(self, tensor: torch.Tensor, rank: int = 0) -> None:
        """Overwrite every rank's `tensor` with that of `rank`. It may be on the host under NCCL, and of any dtype."""
        if self.world == 1:
            return
        carried = self.backend(tensor.device) != "none"
        values = tensor.detach().contiguous()
        # As bytes: NCCL has no type for some integers, and a broadcast computes nothing.
        octets = values.reshape(-1).view(torch.uint8)
        dist.broadcast(octets, group=self._parent if carried else self.control_on_host(), group_src=rank)
        if not tensor.is_contiguous():
            tensor.detach().copy_(values)

    @property
    def name(self) -> str:
        """The same on all its ranks, and no other group's."""
        return "alone" if self._parent is None else self._parent.group_name

    @property
    def timeout_seconds(self) -> float:
        """How long a transfer waits for a peer before it fails."""
        timeout = None if self._parent is None else self._timeout()
        return (timeout or timedelta(minutes=30)).total_seconds()

    def _timeout(self) -> timedelta | None:
        """New groups would take the default timeout, not the one the user gave theirs."""
        assert self._parent is not None
        for device in ("cpu", "cuda"):
            try:
                return self._parent._get_backend(torch.device(device)).options._timeout
            except (RuntimeError, AttributeError):
                continue
        return None


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of each type of device that `group` carries tensors of, such as {'cuda': 'nccl'}."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def new_group(ranks: list[int], purpose: str, backend: str | None = None, **options: Any) -> dist.ProcessGroup:
    """Return a new process group of these ranks of the job, connected. Each of them must call it, and no other rank.

    So a thousand ranks make one group each, not a thousand. PyTorch names a group by its ranks, and by how many groups
    a rank has had: that must be the same on all of them (`even_out`).
    """
    world = dist.group.WORLD
    assert world is not None
    # With a bound device, PyTorch splits the NCCL communicator of all ranks of the job for each new group. A split
    # waits for all of them, also for ranks that have no part in the group and never come here. Unbound, the members
    # connect among themselves.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        made = dist.new_group(
            ranks,
            use_local_synchronization=True,
            group_desc=purpose,
            backend=backend,
            device_id=bound if backend is None and len(ranks) > 1 else None,
            **options,
        )
    finally:
        world.bound_device_id = bound
    assert isinstance(made, dist.ProcessGroup), made
    if backend is None:
        connect(made)
    return made


def connect(group: dist.ProcessGroup) -> None:
    """Let all ranks of `group` make its first call on the GPU together. Every rank of it must call this.

    NCCL connects in the first call, and then waits for all ranks: messages between some of them would hang. A group
    with a bound device is connected already. One without a backend for GPUs, or with gloo for them, needs nothing.
    """
    backend = backends_of(group).get("cuda", "gloo")
    if backend != "gloo" and group.bound_device_id is None and group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group)


def even_out(*parents: dist.ProcessGroup) -> None:
    """Ranks of `parents`, if they have had fewer groups than others (a pipeline's stages differ), make groups of their
    own until they have had as many: else those that are to meet in the next one would look for it under other names,
    and wait for each other until their time is over. Every rank must call it."""
    here = most = len(dist.distributed_c10d._world.pg_names)  # pyright: ignore[reportPrivateUsage]
    for parent in parents:
        told: list[Any] = [None] * dist.get_world_size(parent)
        dist.all_gather_object(told, most, group=parent)
        most = max(told)
    for _ in range(most - here):
        new_group([dist.get_rank()], "as many as others have", backend="gloo")


def check_process_group() -> None:
    """Refuse to take one of several ranks for a world of its own: each would train alone, and none would notice."""
    started = int(os.environ.get("WORLD_SIZE", "1")) if launched() else 1
    if started > 1 and not (dist.is_available() and dist.is_initialized()):
        raise TopologyError(
            f"rank {os.environ['RANK']}: the launcher started {started} ranks, and this one has no process group: it "
            "would train alone. Call towpath.init(), or torch.distributed.init_process_group(), before towpath.shard()."
        )


def launched() -> bool:
    """Whether a launcher has placed this process as a rank among others."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """Which of its node's ranks this one is."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def meeting_point() -> str:
    """Where the launcher told the ranks to meet."""
    return f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '29500')}"


def launcher_run() -> str:
    """Return the name that the launcher gave this run, the same after each restart; empty if it gave none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if name == "none" else name


def as_rank(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables that make a process this rank of one node, whose ranks meet at a store that listens already."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def detect_shape(groups: Groups | None = None) -> tuple[int, int]:
    """Nodes, and ranks on each, as the launcher placed them (or by host name); or why they do not form a topology."""
    groups = groups or Groups()
    homes = groups.gather_objects(os.environ.get("GROUP_RANK") or socket.gethostname())
    sizes = Counter(homes)
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{home!r} has {n}" for home, n in sizes.items())
        raise TopologyError(
            f"uneven nodes: {told} ranks. Towpath needs as many ranks on each node: start equal numbers, or pass a "
            "topology of your own (any equal groups whose inner links are the faster ones)."
        )
    ranks = next(iter(sizes.values()))
    if any(homes[i] != homes[i // ranks * ranks] for i in range(len(homes))):
        raise TopologyError(
            f"the ranks of a node are not consecutive: rank by rank they run on {homes}. Start them node by node, "
            "as torchrun does, or pass a topology of your own."
        )
    return len(sizes), ranks
