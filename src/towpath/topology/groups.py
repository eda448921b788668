"""Process groups. No other file creates them."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain, count, groupby
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from towpath.errors import ConfigError
from towpath.topology.cluster import RankSets
from towpath.topology.launcher import RackName, checked_racks, launched, node_name, rack_name
from towpath.topology.store import gather_through_store

Shared = TypeVar("Shared")

# What all models over one process group share, by that group. A group has threads and connections of its own, and
# cannot be destroyed while other models may use it. A new model reuses the groups of the model before it.
_SHARED: WeakKeyDictionary[dist.ProcessGroup, dict[Any, Any]] = WeakKeyDictionary()
_SHARED_ALONE: dict[Any, Any] = {}


class Groups:
    """The process groups inside `parent` (default: the whole world), created on demand and shared by all its models.

    Ranks are counted inside the parent. Every rank must ask for the same groups in the same order. Only the members of
    a new group take part in its creation, and they connect at once: see `new_group` and `connect`.

    Args:
        first: The number of the parent's first rank in the job, if the parent is an island of it. Errors name ranks by
            their numbers in the job.
        chosen: The device that the user chose for a model. None leaves it to the model.
    """

    def __init__(
        self, parent: dist.ProcessGroup | None = None, first: int = 0, chosen: torch.device | None = None
    ) -> None:
        self.first, self.chosen = first, chosen
        # The group of all ranks, or None in a world of one that was never initialized.
        is_initialized = dist.is_available() and dist.is_initialized()
        self.parent = (parent or dist.group.WORLD) if is_initialized else None
        self._shared = _SHARED_ALONE if self.parent is None else _SHARED.setdefault(self.parent, {})
        self._made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = self.shared("process groups", dict)

    def shared(self, what: str, make: Callable[[], Shared]) -> Shared:
        """Return what all models over this process group share as `what`. The first call makes it."""
        if what not in self._shared:
            self._shared[what] = make()
        return self._shared[what]

    def describe_made(self) -> str:
        """Describe the groups so far. The text is the same on all ranks that made the same groups in the same order."""
        return ", ".join(f"{purpose} of {len(ranks)}" for ranks, purpose in self._made) or "none"

    @property
    def rank(self) -> int:
        """This rank, as the parent counts."""
        return 0 if self.parent is None else dist.get_rank(self.parent)

    @property
    def number(self) -> int:
        """This rank, as the job counts."""
        return self.first + self.rank

    @property
    def world(self) -> int:
        """The number of ranks of the parent."""
        return 1 if self.parent is None else dist.get_world_size(self.parent)

    @property
    def members(self) -> list[int]:
        """The global ranks of the parent."""
        return [0] if self.parent is None else dist.get_process_group_ranks(self.parent)

    def backend(self, device: torch.device) -> str:
        """Return the backend that sends tensors on `device`: 'gloo', 'nccl', or 'none'."""
        return "none" if self.parent is None else backends_of(self.parent).get(device.type, "none")

    @property
    def device(self) -> torch.device:
        """The current GPU if the parent sends tensors there, or if this rank is alone with a GPU. Otherwise the CPU."""
        gpu = torch.device("cuda")
        on_gpu = torch.cuda.is_available() if self.parent is None else self.backend(gpu) not in ("none", "gloo")
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def of(
        self,
        partition: RankSets,
        purpose: str,
        backend: str | None = None,
        max_ctas: int | None = None,
        timeout: timedelta | None = None,
    ) -> dist.ProcessGroup:
        """Return this rank's group of `partition`. The first call creates it.

        Every rank of the parent must call it, in the same order among its calls. Each purpose (such as a queue or a
        lane) has groups of its own, so that transfers for different purposes overlap.

        Args:
            partition: Every rank of the parent once. A rank that communicates with no other stands alone.
            purpose: A name that tells groups of the same ranks apart.
            max_ctas: How many thread blocks a kernel of NCCL may use. By default, NCCL decides.
            timeout: How long a transfer waits for a peer before it fails. The default is that of the parent.
        """
        mine = next(ranks for ranks in partition if self.rank in ranks)
        key = (mine, purpose)
        if key not in self._made:
            assert self.parent is not None, "a world of one communicates nothing"
            assert sorted(chain(*partition)) == list(range(self.world)), f"not a partition of the ranks: {partition}"
            members = [dist.get_global_rank(self.parent, r) for r in mine]
            align_group_counts(self.parent)
            limit = {} if max_ctas is None else {"max_ctas": max_ctas}
            timeout = timeout or self.timeout
            self._made[key] = new_group(members, purpose, timeout=timeout, backend=backend, **limit)
        return self._made[key]

    def has(self, partition: RankSets, purpose: str) -> bool:
        """Return whether `of` has created this rank's group of `partition` for `purpose`."""
        return (next(ranks for ranks in partition if self.rank in ranks), purpose) in self._made

    def gloo_group(self) -> dist.ProcessGroup:
        """Return the group of all ranks for tensors in host memory, which do not wait for the device."""
        return self.of((tuple(range(self.world)),), "control", backend="gloo")

    def apart(self, purpose: str, timeout: timedelta | None = None) -> Groups:
        """Return the same ranks with a gloo group for `purpose`, which a thread may use while others send messages."""
        if self.world == 1:
            return self
        return Groups(self.of((tuple(range(self.world)),), purpose, "gloo", timeout=timeout), self.first)

    def leave(self, group: dist.ProcessGroup) -> None:
        """Close this rank's connections in `group`. Peers that wait for this rank there then fail."""
        for key in [key for key, made in self._made.items() if made is group]:
            del self._made[key]
        dist.destroy_process_group(group)

    def close(self, purpose: str) -> None:
        """Close all groups for `purpose`. Every rank must call it, when none of them runs a collective.

        PyTorch names a group after its ranks and the number of groups so far, and the members of a new group meet in
        the store under its name. A group of one therefore replaces each closed group: the number never goes back, and
        no later group meets under the name of a closed one.
        """
        closed = [made for (_, what), made in self._made.items() if what == purpose]
        for group in closed:
            self.leave(group)
        # Afterwards, because two groups of one that are made at the same number would have the same name.
        for _ in closed:
            new_group([dist.get_rank()], "in place of a closed group", backend="gloo")

    def abort(self, *others: Groups) -> None:
        """Abort the running transfers on the device, in all groups. No group can be used afterwards."""
        backends: list[Any] = []
        # The group of an island is among those that the job has made.
        made = [group for each in (self, *others) for group in (each.parent, *each._made.values())]
        for group in dict.fromkeys(filter(None, made)):
            with suppress(RuntimeError):  # it has no backend for GPUs
                backends.append(group._get_backend(torch.device("cuda")))
        # One NCCL call aborts all of them. In separate calls, an abort could wait for a kernel of another communicator.
        if backends and hasattr(backends[0], "_group_start"):
            backends[0]._group_start()
        for backend in backends:
            backend.abort()
        if backends and hasattr(backends[0], "_group_end"):
            backends[0]._group_end()

    def connect(self) -> None:
        """Connect the parent. Every rank must call it before any of them send messages to each other."""
        if self.parent is not None:
            connect(self.parent)

    def gather_before_connecting(self, value: Any) -> list[Any]:
        """Return the JSON value of every rank, by rank, even if NCCL cannot connect the ranks.

        Without a backend for tensors on the host, the values are sent through the store of the rendezvous.
        """
        if self.parent is None or self.backend(torch.device("cpu")) != "none":
            return self.all_gather_objects(value)
        number: int = next(self.shared("gathered through the store", count))
        store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        return gather_through_store(store, f"{self.name}/{number}", self.rank, self.world, value, self.timeout)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank."""
        if self.parent is None:
            return [value]
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value, group=self.parent)
        return out

    def collect_objects(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank, on rank 0. Return an empty list on other ranks."""
        if self.parent is None:
            return [value]
        out: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, out, group=self.parent, group_dst=0)
        return out or []

    def broadcast_object(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank."""
        if self.parent is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.parent, group_src=0)
        return values[0]

    def gather_rows(self, row: torch.Tensor, wait: Callable[[Any], None] = lambda work: work.wait()) -> torch.Tensor:
        """Return the row of every rank, stacked: [ranks, ...]. Rows are in host memory, of one shape and dtype.

        Args:
            wait: A function that waits for the collective, such as `Program.wait`.
        """
        if self.parent is None:
            return row[None]
        rows = [torch.empty_like(row) for _ in range(self.world)]
        wait(dist.all_gather(rows, row, group=self.gloo_group(), async_op=True))
        return torch.stack(rows)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.parent)

    def broadcast(self, tensor: torch.Tensor, rank: int = 0) -> None:
        """Overwrite every rank's `tensor` with that of `rank`. It may be on the host under NCCL, and have any dtype."""
        if self.world == 1:
            return
        carried = self.backend(tensor.device) != "none"
        values = tensor.detach().contiguous()
        # It is sent as bytes, because NCCL has no type for some integers.
        octets = values.reshape(-1).view(torch.uint8)
        dist.broadcast(octets, group=self.parent if carried else self.gloo_group(), group_src=rank)
        if not tensor.is_contiguous():
            tensor.detach().copy_(values)

    @property
    def name(self) -> str:
        """The parent's name. It is the same on all its ranks, and unique among groups."""
        return "alone" if self.parent is None else self.parent.group_name

    @property
    def timeout(self) -> timedelta:
        """How long a transfer waits for a peer before it fails: the timeout that the user gave the parent."""
        parent: Any = self.parent
        for device in ("cpu", "cuda"):
            with suppress(RuntimeError, AttributeError):  # it has no such backend, or there is no parent
                return parent._get_backend(torch.device(device)).options._timeout
        return timedelta(minutes=30)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of each type of device that `group` serves, such as {'cuda': 'nccl'}."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def new_group(
    ranks: list[int],
    purpose: str,
    backend: str | None = None,
    timeout: timedelta | None = None,
    max_ctas: int | None = None,
) -> dist.ProcessGroup:
    """Return a new, connected process group of these global ranks. Its members must call it, and no other rank.

    So each of a thousand ranks creates one group, instead of a thousand. PyTorch names a group after its ranks and the
    number of groups that a rank has had. That number must be the same on all members (`align_group_counts`).

    Args:
        backend: A PyTorch backend, by default the one of all ranks. A group of 'nccl' has no backend for the host.
    """
    options: dict[str, Any] = {}
    if backend == "nccl":
        # The processors of the device run transfers before the computation that waits behind them.
        made_for_nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        default = dist.distributed_c10d._get_default_timeout  # pyright: ignore[reportPrivateUsage]
        # At its timeout, NCCL's watchdog ends the process, and cannot say why. It counts from the enqueuing. What ranks
        # compare over gloo is submitted later. It must fail first, because its error names the cause.
        timeout = 2 * (timeout or default(dist.Backend(backend)))  # pyright: ignore[reportArgumentType]
        made_for_nccl._timeout = timeout
        if max_ctas is not None:
            made_for_nccl.config.max_ctas = max_ctas
        options["pg_options"] = made_for_nccl
    world = dist.group.WORLD
    assert world is not None
    # With a bound device, PyTorch splits the NCCL communicator of all ranks of the job for each new group. The split
    # waits for all of them, but ranks outside the group never call it. Without a bound device, only members connect.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        made = dist.new_group(
            ranks,
            use_local_synchronization=True,
            group_desc=purpose,
            backend=backend,
            timeout=timeout,
            device_id=bound if backend != "gloo" and len(ranks) > 1 else None,
            **options,
        )
    finally:
        world.bound_device_id = bound
    assert isinstance(made, dist.ProcessGroup), made
    connect(made)
    return made


def connect(group: dist.ProcessGroup) -> None:
    """Make the first call of `group` on the GPU, by all its ranks together. Every rank of it must call this.

    NCCL connects in the first call, and waits for all ranks there. Messages between some of the ranks would hang.
    Groups with a bound device are connected already, unless PyTorch wraps them to debug them. Groups on gloo, or
    without a backend for GPUs, need nothing.
    """
    backend = backends_of(group).get("cuda", "gloo")
    is_wrapped = dist.get_debug_level() == dist.DebugLevel.DETAIL  # pyright: ignore[reportPrivateImportUsage]
    connected = group.bound_device_id is not None and not is_wrapped
    if backend != "gloo" and not connected and group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group)


def align_group_counts(*parents: dist.ProcessGroup) -> None:
    """Create groups of one on ranks that have had fewer groups than others. Every rank of `parents` must call it.

    PyTorch names a group by how many groups a rank has had, and ranks of different pipeline stages have had different
    numbers. Members of the next group would look for it under different names, and wait until the timeout.
    """
    here = most = len(dist.distributed_c10d._world.pg_names)  # pyright: ignore[reportPrivateUsage]
    for parent in parents:
        counts: list[Any] = [None] * dist.get_world_size(parent)
        dist.all_gather_object(counts, most, group=parent)
        most = max(counts)
    for _ in range(most - here):
        new_group([dist.get_rank()], "as many as others have", backend="gloo")


def check_process_group() -> None:
    """Raise if a launcher started several ranks and there is no process group. Each rank would train alone."""
    started = int(os.environ.get("WORLD_SIZE", "1")) if launched() else 1
    if started > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"rank {os.environ['RANK']}: the launcher started {started} ranks, and this one has no process group: it "
            "would train alone. Call towpath.init(), or torch.distributed.init_process_group(), before towpath.shard()."
        )


class Ranks(Protocol):
    """Ranks that exchange objects: a process group (`Groups`), or the ranks of a mesh."""

    @property
    def members(self) -> list[int]: ...

    def all_gather_objects(self, value: Any) -> list[Any]: ...


def detect_shape(groups: Ranks | None = None) -> tuple[int, tuple[int, ...], int | None]:
    """Return the number of nodes, the ranks of each, and the nodes in each rack, which are the fields of `Topology`.

    `node_name` tells nodes apart, and `rack_name` racks.
    """
    groups = groups or Groups()
    told = groups.all_gather_objects((node_name(), rack_name()))
    homes: list[str] = [home for home, _ in told]
    sizes = Counter(homes)
    if len(list(groupby(homes))) > len(sizes):
        if len(set(told)) > len(sizes):  # init() has numbered them by their racks
            raise ConfigError(
                f"the ranks of a node are in different racks: {sorted({(home, rack) for home, (rack, _) in told})} are "
                "nodes and their racks. Set TOWPATH_RACK to one name on each node."
            )
        raise ConfigError(
            f"the ranks of a node are not consecutive: rank by rank they run on {homes}. Start them node by node, "
            "as torchrun does, or pass a topology of your own."
        )
    racks = [rack for _, rack in (told[homes.index(home)] for home in sizes)]
    return len(sizes), tuple(sizes.values()), _nodes_per_rack(racks, groups.members)


def _nodes_per_rack(racks: Sequence[RackName], members: Sequence[int]) -> int | None:
    """Return how many nodes each rack has, from the rack of each node. Return None if they have no common number."""
    whole = len(members) == 1 or len(members) == dist.get_world_size()
    names = checked_racks(racks) if whole else [name for name, _ in racks]
    sizes = Counter(names)
    nodes = len(names) // len(sizes)
    if len(set(sizes.values())) > 1:
        return None
    if any(names[i] != names[i // nodes * nodes] for i in range(len(names))):
        if dist.get_rank() == members[0]:
            warnings.warn(
                f"the nodes of a rack are not consecutive: node by node, the racks are {names}. Rings leave each rack "
                "more often than needed. Call towpath.init() in place of init_process_group(): it numbers the ranks "
                "rack by rack.",
                stacklevel=2,
            )
        return None
    return nodes
