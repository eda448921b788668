"""`towpath.wires`: FSDP2 and DDP keep the model, and Towpath sends what crosses nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from towpath.core.formats import Precision
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, UnitSpec
from towpath.errors import ShardError
from towpath.fsdp.context import WiredRanks
from towpath.fsdp.fields import comms_of, groups_of, parameters_of, set_replicate_group
from towpath.fsdp.peers import Peers, Wishes
from towpath.fsdp.replicas import ReplicaGroup, ReplicaSums, ddp_hook
from towpath.fsdp.unit import WiredUnit
from towpath.logs import logger
from towpath.topology.cluster import Topology

_LOG = logger("wires")

Modules = Sequence[tuple[str, FSDPModule]]


def wires(
    model: nn.Module,
    exact: bool = True,
    gradients: str | None = None,
    hold: Literal["device", "host"] | None = None,
    topology: Topology | None = None,
) -> None:
    """Let Towpath send what FSDP2 or DDP sends between nodes. Every rank must call it.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        towpath.wires(model)

    Weights cross nodes once after each change, as exact differences. Other gathers cross nothing: those of the backward
    pass, of further micro-steps, and of frozen weights. Gradients are summed inside each node first. For this, each
    rank holds the shards of its column: the ranks of equal place in their nodes. In bf16, these are 2 bytes ×
    parameters / ranks per node.

    `wires(model, False)` gives FSDP2 its own transfers back.

    Args:
        model: A model after `fully_shard`, whose modules may be sharded over one mesh or several, or replicated, too
            (HSDP). Or a DistributedDataParallel.
        exact: Send weights and, over gloo, gradients in fewer bytes, without losing a bit. False takes the wires away.
        gradients: The codec of gradients between nodes, such as 'int8' or 'int4:64'. It rounds, and keeps what it has
            rounded away for the next step.
        hold: Where to hold the shards of the column: 'device' or 'host'. By default on the device if they fit.
        topology: The number of nodes and of ranks per node. Detected by default.

    Raises:
        ShardError: The model is not sharded by FSDP2, or a module over several meshes.
        ConfigError: The codec is unknown, or the topology does not fit.
        MismatchError: The ranks passed different models or arguments.
    """
    wishes = Wishes(exact, gradients, hold, topology)
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(model.process_group, ddp_hook(wishes))
        return
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, FSDPModule) and parameters_of(m)]
    if not modules:
        raise ShardError(
            f"wires(): {type(model).__name__} has no module that FSDP2 has sharded. Call fully_shard() first, or "
            "towpath.shard() instead of both."
        )
    for _, module in modules:
        _restore(module)
    if exact is False and gradients is None:
        return
    by_group: dict[tuple[dist.ProcessGroup, bool], list[tuple[str, FSDPModule]]] = {}
    for name, module in modules:
        shards, replicas = groups_of(module)
        for group, is_replica in ((shards, False), (replicas, True)):
            if group is not None:
                by_group.setdefault((group, is_replica), []).append((name, module))
    for (group, is_replica), members in by_group.items():
        _wire(group, is_replica, members, wishes)


def _wire(group: dist.ProcessGroup, is_replica: bool, modules: Modules, wishes: Wishes) -> None:
    """Take over the transfers of `modules` over one group, if they cross nodes."""
    device = torch.device(parameters_of(modules[0][1])[0].device)
    sizes = {name: [each.padded_sharded_param_size for each in parameters_of(module)] for name, module in modules}
    lines = [f"module {name or 'root'} with shards of {[tuple(size) for size in each]}" for name, each in sizes.items()]
    peers = Peers.of(group, device, "ddp" if is_replica else "paro-iig", wishes, lines)
    if peers.nodes == 1:
        return
    if is_replica:
        wired, sums = WiredRanks(peers, partial(_parameters, modules)), ReplicaSums(peers)
        for name, module in modules:
            set_replicate_group(module, ReplicaGroup(group, name, sums, wired))
        return
    elements = {name: sum(size.numel() for size in each) * peers.ranks for name, each in sizes.items()}
    specs = [UnitSpec(name, (BucketSpec((numel,)),)) for name, numel in elements.items()]
    plans = [plan_unit(peers.strategy, spec, Precision(), peers.comm.form) for spec in specs]
    peers.comm.share(peers.strategy, plans)
    peers.comm.queues.plan(plans)
    units = [WiredUnit(name, module, peers) for name, module in modules]
    wired = WiredRanks(peers, partial(_parameters, modules), units)
    for unit in units:
        gather, reduce = comms_of(unit.module)
        unit.module.set_custom_all_gather(AllGather(unit, wired, gather))
        unit.module.set_custom_reduce_scatter(ReduceScatter(unit, wired, reduce))


def _parameters(modules: Modules) -> Iterator[torch.Tensor]:
    for _, module in modules:
        for each in parameters_of(module):
            yield each.sharded_param


def _restore(module: Any) -> None:
    """Give a module FSDP2's own transfers back."""
    for comm, put_back in zip(comms_of(module), (module.set_custom_all_gather, module.set_custom_reduce_scatter)):
        if isinstance(comm, _Comm):
            comm.wired.leave()
            put_back(comm.stock)
    replicas = groups_of(module)[1]
    if isinstance(replicas, ReplicaGroup):
        replicas.wired.leave()
        set_replicate_group(module, replicas.stock)


class _Comm:
    """What FSDP2 calls in place of its own object, which is `stock`."""

    def __init__(self, unit: WiredUnit, wired: WiredRanks, stock: Any) -> None:
        self.unit, self.wired, self.stock = unit, wired, stock

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the memory of a flat buffer."""
        return self.stock.allocate(size, dtype=dtype, device=device)


@final
class AllGather(_Comm):
    """The all-gather of one module. FSDP2 calls it with keywords."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if group is not self.wired.peers.group:  # of the smaller mesh that `reshard_after_forward=4` makes
            return self.stock(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        return self.unit.gather(output_tensor, input_tensor)


@final
class ReduceScatter(_Comm):
    """The reduce-scatter of one module. FSDP2 calls it with keywords, and expects the result in stream order."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.unit.reduce(output_tensor, input_tensor, op)
