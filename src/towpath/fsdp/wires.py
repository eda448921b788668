"""`towpath.wires`: FSDP2 and DDP keep the model, and Towpath sends what crosses nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from towpath.engine.comm import CommContext
from towpath.errors import ConfigError, ShardError
from towpath.fsdp.context import WiredRanks
from towpath.fsdp.fields import (
    comms_of,
    dtypes_of,
    groups_of,
    param_groups,
    parameters_of,
    set_comms,
    set_replicate_group,
)
from towpath.fsdp.peers import Peers, Wishes
from towpath.fsdp.replicas import BucketSums, ReplicaGroup, matrix_of, no_copy, sum_bucket
from towpath.fsdp.wired_unit import WiredUnit
from towpath.logs import logger
from towpath.observe.record import Trace
from towpath.observe.stats import Observable, Stats, merged
from towpath.observe.totals import Totals
from towpath.observe.trace import Interval
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups

_LOG = logger("wires")

Owners = Sequence[tuple[str, Any]]  # groups of parameters, each with a name


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
    rank holds the shards of its column, the ranks of equal place in their nodes, and a copy of its own shard. In bf16,
    these are 2 bytes × parameters × (1 / ranks per node + 1 / ranks).

    `wires(model, False)` gives FSDP2 its own transfers back.

    Args:
        model: A model after `fully_shard`, whose modules may be sharded over one mesh or several, or replicated, too
            (HSDP). Or a DistributedDataParallel.
        exact: Send weights and, over gloo, gradients in fewer bytes, without losing a bit. False takes the wires away.
        gradients: The codec of gradients between nodes, such as 'int8' or 'int4:64'. It rounds, and keeps what it has
            rounded away for the next step. DistributedDataParallel also takes 'low-rank:4'.
        hold: Where to hold the shards of the column: 'device' or 'host'. By default on the device if they fit.
        topology: The number of nodes and of ranks per node. Detected by default.

    Raises:
        ShardError: The model is not sharded by FSDP2.
        ConfigError: The codec is unknown, or the topology does not fit.
        MismatchError: The ranks passed different models or arguments.
    """
    if type(exact) is not bool or hold not in (None, "device", "host"):
        raise ConfigError(f"wires(): exact= is a bool and hold= is 'device', 'host' or None; got {exact!r}, {hold!r}.")
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"wires(): expected one model, an nn.Module; got {type(model)}. Call it for each model.")
    wishes = Wishes(exact, gradients, hold, topology)
    before = getattr(model, "towpath_wires", None)
    if isinstance(before, WiredModel):
        before.leave()
        del model.towpath_wires
    if isinstance(model, DistributedDataParallel):
        ranks = [_wire_ddp(model, wishes)]
    else:
        ranks = _wire_modules(model, wishes)
    ranks = [each for each in ranks if each is not None]
    if exact or gradients is not None:
        object.__setattr__(model, "towpath_wires", WiredModel(model, ranks))
    if exact and not ranks and dist.get_rank() == 0:
        _LOG.warning("wires() changes nothing: the ranks of each process group of the model are on one node.")


def _wire_ddp(model: DistributedDataParallel, wishes: Wishes) -> WiredRanks | None:
    hooks: list[tuple[Any, Any]] = model._comm_hooks  # pyright: ignore[reportPrivateUsage]
    states = [state for hook, state in hooks if hook is sum_bucket]
    if hooks and not states:
        raise ShardError("wires(): this DistributedDataParallel has a communication hook, and takes only one.")
    state = states[0] if states else BucketSums(group=model.process_group)
    state.wishes = replace(wishes, takes_matrices=True) if wishes.exact or wishes.gradients is not None else None
    if not states and state.wishes is not None:
        model.register_comm_hook(state, sum_bucket)
    if state.wishes is None:
        return None
    peers = state.connect(next(model.parameters()).device)
    if peers.nodes == 1:
        state.wishes = None
        return None
    if (codec := peers.strategy.grad_sync.low_rank) is not None:
        codec.check("wires()", (matrix_of(each) for each in model.parameters() if each.requires_grad))
    return WiredRanks(peers, partial(_compared, model))


def _compared(model: DistributedDataParallel) -> Iterator[torch.Tensor]:
    # In `with model.join()`, ranks that have run out of batches only reduce. They step no optimizer, so none compares.
    return iter(()) if model._join_config.enable else model.parameters()  # pyright: ignore[reportPrivateUsage]


def _wire_modules(model: nn.Module, wishes: Wishes) -> list[WiredRanks | None]:
    groups: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        for number, each in enumerate(param_groups(module) if isinstance(module, FSDPModule) else ()):
            # The modules of `fully_shard([norm, head])` share a group, which is gathered once.
            groups.setdefault(id(each), (f"{name} (mesh {number + 1})" if number else name, each))
    if not groups:
        raise ShardError(
            f"wires(): {type(model).__name__} has no module that FSDP2 has sharded, and is no DistributedDataParallel. "
            "Call fully_shard() first, or towpath.shard() instead of both."
        )
    owners = list(groups.values())
    for _, owner in owners:
        _restore(owner)
    if wishes.exact is False and wishes.gradients is None:
        return []
    by_group: dict[tuple[dist.ProcessGroup, bool], list[tuple[str, Any]]] = {}
    for name, owner in owners:
        shards, replicas = groups_of(owner)
        for group, is_replica in ((shards, False), (replicas, True)):
            if group is not None:
                by_group.setdefault((group, is_replica), []).append((name, owner))
    return [_wire(group, is_replica, members, wishes) for (group, is_replica), members in by_group.items()]


def _wire(group: dist.ProcessGroup, is_replica: bool, owners: Owners, wishes: Wishes) -> WiredRanks | None:
    """Take over the transfers of these parameters over one group, if they cross nodes."""
    device = torch.device(parameters_of(owners[0][1])[0].device)
    sizes = {name: [each.padded_sharded_param_size for each in parameters_of(owner)] for name, owner in owners}
    lines = [f"module {name or 'root'} with shards of {[tuple(size) for size in each]}" for name, each in sizes.items()]
    lines += [f"module {name or 'root'} in {dtypes_of(owner)}" for name, owner in owners]
    units = {name: sum(size.numel() for size in each) for name, each in sizes.items()}
    peers = Peers.of(group, device, "ddp" if is_replica else "paro-iig", wishes, lines, units)
    if peers.nodes == 1:
        return None
    if is_replica:
        for name, owner in owners:
            set_replicate_group(owner, ReplicaGroup(group, name, owner, peers))
        return WiredRanks(peers, partial(_parameters, owners))
    wired = WiredRanks(peers, partial(_parameters, owners), [WiredUnit(name, owner, peers) for name, owner in owners])
    for unit in wired.units:
        gather, reduce = comms_of(unit.owner)
        set_comms(unit.owner, AllGather(unit, wired, gather), ReduceScatter(unit, wired, reduce))
    return wired


def _parameters(owners: Owners) -> Iterator[torch.Tensor]:
    for _, owner in owners:
        for each in parameters_of(owner):
            yield each.sharded_param


def _restore(owner: Any) -> None:
    """Give FSDP2 its own transfers back."""
    set_comms(owner, *(each.stock if isinstance(each, _Comm) else each for each in comms_of(owner)))
    replicas = groups_of(owner)[1]
    if isinstance(replicas, ReplicaGroup):
        set_replicate_group(owner, replicas.stock)


class _Comm:
    """An object that FSDP2 calls in place of its own one, which is `stock`."""

    def __init__(self, unit: WiredUnit, wired: WiredRanks, stock: Any) -> None:
        self.unit, self.wired, self.stock = unit, wired, stock

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the memory of a flat buffer."""
        with torch.inference_mode(False):  # other threads write to it, which are not in inference mode
            return self.stock.allocate(size, dtype=dtype, device=device)


@final
class AllGather(_Comm):
    """The all-gather of one unit. FSDP2 calls it with keywords."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if group is not self.wired.peers.group:  # of the smaller mesh that `reshard_after_forward=4` makes
            return self.stock(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        with torch.inference_mode(False):  # what is made here is kept for training
            return self.unit.gather(output_tensor, input_tensor)


@final
class ReduceScatter(_Comm):
    """The reduce-scatter of one unit. FSDP2 calls it with keywords, and expects the result in stream order."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.unit.reduce(output_tensor, input_tensor, op)


@final
class WiredModel(Observable):
    """A model with wires, over one process group or several. `towpath.stats` and traces read it."""

    def __init__(self, model: nn.Module, ranks: Sequence[WiredRanks]) -> None:
        self._ranks = ranks
        after: Any = torch.compiler.disable(self._after_forward)  # pyright: ignore[reportUnknownMemberType]
        self._hooks = [each.register_forward_hook(after) for each in _outermost(model) if ranks]

    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        # A training pass is compared before its optimizer step.
        if module.training and torch.is_grad_enabled():
            return
        with torch.inference_mode(False):
            for each in self._ranks:
                each.after_evaluation()

    @property
    def comms(self) -> list[CommContext]:
        """The communication over each process group."""
        return [each.peers.comm for each in self._ranks]

    def stats(self) -> Stats:
        """Return what `towpath.stats` returns."""
        totals, comms = self.totals(), self.comms
        on_device, on_host = (
            sum(unit.held_bytes[where] for each in self._ranks for unit in each.units) for where in (0, 1)
        )
        return Stats(
            transfers=totals.transfers,
            seconds_host=totals.seconds_host,
            last_step=tuple(transfer for comm in comms for transfer in comm.record.last_step),
            memory_bytes={
                "weights of the column": on_device,
                "feedback": sum(each.peers.feedback_bytes for each in self._ranks),
                "wire": sum(c.queues.wire_buffer_bytes for c in comms),
            },
            host_memory_bytes={"weights of the column": on_host} if on_host else {},
            buffers_made=sum(comm.queues.buffers_made for comm in comms),
        )

    def totals(self) -> Totals:
        """Return the counts of all transfers so far."""
        each = [comm.record.totals() for comm in self.comms]
        transfers = merged(transfer for one in each for transfer in one.transfers)
        return Totals(transfers=transfers, seconds_host=sum(one.seconds_host for one in each))

    def trace_groups(self) -> list[Groups]:
        """Return the groups through which ranks meet."""
        return [comm.groups for comm in self.comms]

    def intervals_of_ranks(self, trace: Trace) -> dict[int, tuple[Interval, ...]]:
        """Return the intervals of all ranks' traces by rank, on rank 0."""
        return dict(enumerate(Groups().collect_objects(trace.intervals)))

    def __reduce__(self) -> Any:
        raise no_copy()

    def leave(self) -> None:
        """Wait for all transfers, and no longer watch optimizers and forward passes."""
        for hook in self._hooks:
            hook.remove()
        for each in self._ranks:
            each.leave()


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of FSDP2 that are inside no other one: its root, or all blocks if only these are sharded."""
    if isinstance(model, FSDPModule):
        yield model
    else:
        for child in model.children():
            yield from _outermost(child)
