"""`towpath.wires`: FSDP2 keeps the model, the step and the checkpoints, and Towpath sends what crosses nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from towpath.core import presets
from towpath.core.formats import Codec, Precision
from towpath.core.transport import Transport
from towpath.core.strategy import Strategy
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, UnitSpec
from towpath.engine.agree.digest import CollectiveLog
from towpath.engine.comm import CommContext
from towpath.errors import ConfigError, ShardError
from towpath.fsdp.context import WiredGroup
from towpath.fsdp.unit import Peers, WiredUnit, parameters_of
from towpath.logs import logger
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups, detect_shape
from towpath.topology.together import together
from towpath.version import __version__

_LOG = logger("wires")


def wires(
    model: nn.Module,
    exact: bool = True,
    gradients: str | None = None,
    hold: Literal["device", "host"] | None = None,
    topology: Topology | None = None,
) -> None:
    """Let Towpath send what FSDP2 sends between nodes. Every rank must call it, after `fully_shard`.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        towpath.wires(model)

    Weights cross nodes once after each change, as exact differences. Gathers in between cross nothing: those of the
    backward pass, of further micro-steps, and of frozen weights. Gradients are summed inside each node first. Each rank
    holds the weights that its column sends, 2 bytes × parameters / ranks per node in bf16.

    `wires(model, False)` gives FSDP2's own transfers back.

    Args:
        model: A model with FSDP2 modules, each over one mesh.
        exact: Send weights and, over gloo, gradients in fewer bytes, with the same bits. False takes the wires away.
        gradients: The codec of gradients between nodes, such as 'int8' or 'int4:64'. It rounds, and keeps the rounding
            errors for the next step. By default, gradients are not rounded.
        hold: Where to hold the weights of the column: 'device' or 'host'. By default on the device if they fit.
        topology: The number of nodes and of ranks per node. Detected by default.

    Raises:
        ShardError: The model has no FSDP2 modules, or one over several meshes.
        ConfigError: The codec is unknown, or the topology does not fit.
        MismatchError: The ranks passed different models or arguments.
    """
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _restore(module)
    if exact is False and gradients is None:
        return
    by_group: dict[dist.ProcessGroup, list[tuple[str, Any]]] = {}
    for name, module in modules:
        if kept := parameters_of(module):
            by_group.setdefault(kept[0].mesh_info.shard_process_group, []).append((name, module))
    for group, members in by_group.items():
        _wire(group, members, exact, gradients, topology)


def _wire(
    group: dist.ProcessGroup, modules: Sequence[tuple[str, Any]], exact: bool, gradients: str | None,
    topology: Topology | None,
) -> None:
    groups = Groups(group)
    groups.connect()
    if topology is None:
        topology = Topology(*detect_shape(groups))
    elif topology.world != groups.world:
        topology = topology.of(groups.members)
    with together(groups, "wires()") as lines:
        strategy = _strategy(topology, exact, gradients)
        lines += [f"towpath {__version__}, torch {torch.__version__}", f"{topology}", strategy.to_toml()]
        for name, module in modules:
            sizes = [tuple(each.padded_sharded_param_size) for each in parameters_of(module)]
            lines.append(f"module {name or 'root'} with shards of {sizes}")
    if topology.nodes == 1:
        return
    device = parameters_of(modules[0][1])[0].device
    number: int = next(groups.shared("models made", count))
    log = CollectiveLog(strategy, groups.rank, number, groups.shared("last models", dict), first=groups.first)
    comm = CommContext(groups, device, log)
    peers = Peers(group, strategy, comm)
    units = [WiredUnit(name, module, peers) for name, module in modules]
    plans = [plan_unit(strategy, _spec(unit, topology.world), Precision(), comm.form) for unit in units]
    comm.share(strategy, plans)
    comm.queues.plan(plans)
    wired = WiredGroup(peers, units)
    for unit in units:
        stock = [each._all_gather_comm for each in _param_groups(unit.module)], [each._reduce_scatter_comm for each in _param_groups(unit.module)]
        unit.module.set_custom_all_gather(AllGather(unit, wired, stock[0][0]))
        unit.module.set_custom_reduce_scatter(ReduceScatter(unit, wired, stock[1][0]))


def _param_groups(module):
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [state._fsdp_param_group]


def _spec(unit: WiredUnit, ranks: int) -> UnitSpec:
    elements = sum(each.padded_sharded_param_size.numel() for each in parameters_of(unit.module))
    return UnitSpec(unit.name, (BucketSpec((elements * ranks,)),))


def _strategy(topology: Topology, exact: bool, gradients: str | None) -> Strategy:
    strategy = replace(presets.strategy("paro-iig", topology, exact=exact, route="flat"), name="wires")
    if gradients is not None:
        strategy = replace(strategy, grad_sync=Transport("one-hop", gradients, "first"))
    return strategy


def _restore(module: FSDPModule) -> None:
    for group in _param_groups(module):
        if group is None:
            continue
        for name, kind in (("_all_gather_comm", AllGather), ("_reduce_scatter_comm", ReduceScatter)):
            comm = getattr(group, name)
            if isinstance(comm, kind):
                comm.wired.leave()
                setattr(group, name, comm.stock)


class _Comm:
    """What FSDP2 calls in place of its own object, which is `stock`."""

    def __init__(self, unit: WiredUnit, wired: WiredGroup, stock: Any) -> None:
        self.unit, self.wired, self.stock = unit, wired, stock

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the memory of a flat buffer."""
        return self.stock.allocate(size, dtype=dtype, device=device)


@final
class AllGather(_Comm):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if group is not self.wired.peers.group:  # of the smaller mesh that `reshard_after_forward=4` makes
            return self.stock(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        return self.unit.gather(output_tensor, input_tensor)


@final
class ReduceScatter(_Comm):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.unit.reduce(output_tensor, input_tensor, op)
        return None
