"""Construction of the engine for a model and a strategy.

`check_shardable` refuses models that cannot be sharded, before anything is changed.
`build` turns the parameters into ShardTensors, and makes everything that a training step needs.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import count

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from towpath.core.formats import Precision
from towpath.core.queues import LoggedCall
from towpath.core.shares import AUTO
from towpath.core.step_state import ParamVersion
from towpath.core.strategy import EXACT_KINDS, Strategy, TransferKind
from towpath.core.transport import SMALLEST_BYTES, LowRank
from towpath.core.unit_plan import plan_unit
from towpath.engine.agree.digest import CollectiveLog
from towpath.engine.aliases import check_memory, find_kept
from towpath.engine.comm import CommContext
from towpath.engine.executor import Engine
from towpath.engine.layout import UnitLayout, device_of, is_saved
from towpath.engine.optimizer_steps import watch_optimizers
from towpath.engine.parameters.bucket import Bucket
from towpath.engine.parameters.dtensors import TensorParallelMesh, mesh_of
from towpath.engine.parameters.initialise import (
    FromModel,
    FromValues,
    InitialValues,
    Values,
    add_reset_parameters,
    check_initialisers,
    materialise_buffers,
    move_all_but_parameters,
)
from towpath.engine.parameters.partial_sums import Replica
from towpath.engine.parameters.unit import Unit
from towpath.errors import ShardError
from towpath.logs import logger
from towpath.outer.exchanges import plan_outer
from towpath.outer.islands import IslandSync
from towpath.outer.sync import OuterSync
from towpath.topology.groups import Groups
from towpath.topology.together import together

_LOG = logger("engine")


def check_shardable(strategy: Strategy, layouts: list[UnitLayout], groups: Groups) -> None:
    """Raise ShardError if `strategy` cannot shard a model in place, before any parameter is changed."""
    places = [place for layout in layouts for place in layout.places]
    for place in places:
        over = place.parallel.ranks if place.parallel is not None else []
        both = sorted(set(over) & set(groups.members))
        if len(both) > 1:
            raise ShardError(
                f"{place.names[0]} is a DTensor over the ranks {over}, of which {both} are data-parallel too. Pass "
                "group=, the data-parallel process group, as mesh['dp'].get_group() gives it. A model that another "
                "library has sharded (FSDP) cannot be sharded again."
            )
    (model,) = layouts[0].modules
    _check_modules(model)
    check_memory(places)
    find_kept(model, places)
    for place in places:
        for module, _ in place.owners:
            if isinstance(module, nn.RNNBase):
                # The module would notice new weights by these references. `ModuleParameters.swap` sets its weights.
                module._flat_weight_refs = [None] * len(module._flat_weights_names)  # pyright: ignore
            for hook in module._forward_pre_hooks.values():  # pyright: ignore[reportPrivateUsage]
                # Every forward pass computes the weight anew.
                if isinstance(hook, WeightNorm):
                    setattr(module, hook.name, getattr(module, hook.name).detach())
        reason = _in_use(place.parameter)
        if reason is not None:
            raise ShardError(f"{place.names[0]} {reason}")
    codec = strategy.grad_sync.codec
    if isinstance(codec, LowRank):
        specs = [bucket.spec for layout in layouts for bucket in layout.buckets if bucket.spec.trainable]
        codec.check(strategy.name, (matrix for spec in specs for matrix in spec.matrices))


def _check_modules(model: nn.Module) -> None:
    """Raise ShardError for modules and buffers that would differ between the ranks."""
    # An embedding with `max_norm` writes to its weight in each forward, to different rows on each rank. Rank 0 cannot
    # broadcast sparse, quantized and expanded buffers.
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ShardError(
                f"{name!r} is an {type(module).__name__} with max_norm={module.max_norm}, which writes to its weight "
                "in each forward, to other rows on every rank. Leave it out; after optimizer.step(), on every rank: "
                "with towpath.full_parameters(model, [embedding]), torch.no_grad(): "
                "embedding.weight.copy_(torch.renorm(embedding.weight, 2, 0, max_norm))"
            )
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            what, remedy = f"has the layout {buffer.layout}", "to_dense()"
        elif buffer.is_quantized:
            what, remedy = f"is quantized, {buffer.dtype}", "dequantize()"
        elif any(size > 1 and not stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            what, remedy = "is expanded: several of its elements share one place in memory", "contiguous()"
        else:
            continue
        raise ShardError(f"buffer {name!r} {what}, and cannot be made equal on all ranks. Register {remedy} of it.")


def _in_use(parameter: nn.Parameter) -> str | None:
    if parameter.grad is not None:
        return "has a gradient already: call zero_grad() before shard()."
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return "has hooks, which would not see full gradients: register them after shard(), on the optimizer."
    if weakref.getweakrefs(parameter):
        return "is weakly referenced, and cannot be exchanged in place: drop what refers to it before shard()."
    if parameter._use_count() > 1:  # pyright: ignore[reportAttributeAccessIssue]
        return "is part of a live autograd graph: delete the loss and outputs of earlier forward passes before shard()."
    return None


def build(
    model: nn.Module,
    strategy: Strategy,
    precision: Precision,
    values: Values | None,
    layouts: list[UnitLayout],
    groups: Groups,
    job: Groups | None = None,
) -> Engine:
    """Turn the model's parameters into ShardTensors, and return the engine that trains it.

    Every rank must call it with the same arguments. It installs no hooks: `attach` does.

    `groups`: The data-parallel ranks of this rank's island. `job`: The data-parallel ranks of all islands. By default,
    there is one island.
    """
    job = job or groups
    # Ranks compare logs by this number, so it counts alike on all of them.
    number: int = next(groups.shared("models made", count))
    log = CollectiveLog(strategy, groups.rank, number, groups.shared("last models", dict), first=groups.first)
    comm = CommContext(groups, device_of(model.parameters(), groups), log, job, strategy.protect is not None)
    places = [place for layout in layouts for place in layout.places]
    mesh = mesh_of([place.parallel for place in places if place.parallel is not None])
    if mesh.groups and (
        strategy.frozen_codec != "none"
        or any(strategy.transport(kind).encoding for kind in TransferKind)
        or (strategy.outer is not None and strategy.outer.transport.codec != "none")
    ):
        raise ShardError(
            f"{strategy.name} has codecs, and the model is on a tensor-parallel mesh, whose replicas would be rounded "
            "otherwise on every rank, and drift apart. Take a strategy without codecs."
        )
    if mesh.groups and strategy.shares == AUTO:
        raise ShardError(
            "shares='auto': the model is on a tensor-parallel mesh, whose ranks must take the same rows. Each group of "
            "data-parallel ranks would measure rows of its own. Pass numbers, such as shares=(2, 1)."
        )
    if mesh.groups and strategy.optimizer_on_host:
        raise ShardError(
            'offload="optimizer": the model is on a tensor-parallel mesh, whose ranks could not combine what is in '
            "the host's memory. Leave out offload=, or the mesh."
        )
    plans = [plan_unit(strategy.at(0), layout.spec, precision, comm.form) for layout in layouts]
    outer = plan_outer(strategy, plans, comm.form)
    encoded = (t.coding for plan in plans for kind in EXACT_KINDS for t in plan.transfers(kind))
    is_exact = any(strategy.transport(kind).exact for kind in EXACT_KINDS)
    if is_exact and not any(encoded) and comm.job.rank == 0:
        _LOG.warning(
            "%s: exact=True encodes nothing. Over NCCL it encodes parameter syncs only, and everywhere only what "
            "crosses nodes in bfloat16, float16 or float32, in transfers of at least %d KiB. Leave it out.",
            strategy.name,
            SMALLEST_BYTES >> 10,
        )
    # Communicators serve all steps of the run, and so does what ranks compare of them.
    later = map(strategy.at, strategy.changes)
    others = [plan_unit(phase, layout.spec, precision, comm.form) for phase in later for layout in layouts]
    comm.share(strategy, [*plans, *others])
    is_real = not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    # Where rank 0 has all values, the models of the other ranks may be on the meta device, and need no values.
    are_real = job.all_gather_objects(is_real)
    root_is_real = are_real[0]
    starts = job.rank == 0 or not root_is_real
    if starts and not is_real:
        add_reset_parameters(model)
    if values is None:
        source = FromModel(groups, mesh, comm.device, job, starts or all(are_real))
    else:
        source = FromValues(values, comm.rank, comm.device)
    trainable, frozen = (_replica(strategy, trains, comm, mesh) for trains in (True, False))
    on_host, writes = _host_replica(strategy, groups, trainable), ParamVersion()
    # Before any ShardTensor exists, so that no optimizer steps one unseen.
    watch_optimizers()
    if root_is_real:
        materialise_buffers(model, comm.device, starts, source)
    else:
        # One rank's model may be on the meta device, and another's not.
        with together(job):
            if values is None:
                check_initialisers(model, places)
            materialise_buffers(model, comm.device, starts, source)
    if groups.chosen is not None:
        move_all_but_parameters(model, groups.chosen)
    units: list[Unit] = []
    for index, (layout, plan) in enumerate(zip(layouts, plans, strict=True)):
        version = ParamVersion(writes)
        buckets: list[Bucket] = []
        for bucket, planned in zip(layout.buckets, plan.buckets, strict=True):
            bucket.follow(planned.spec)
            replica = (on_host if planned.optimizer_on_host else trainable) if planned.spec.trainable else frozen
            # One bucket's values at a time: `source` reuses their memory for the next.
            buckets.append(Bucket(bucket, planned, source.flat(bucket, planned), comm, replica, mesh, version))
        units.append(Unit(index, layout, plan, buckets, version, comm))
    # Buffers follow the parameters, because a module may initialize both together.
    _fill_buffers(model, source, job)
    if values is not None:
        with together(job):
            if source.failure is not None:
                raise source.failure
    synced = None
    if outer is not None:
        synced = (IslandSync if outer.settings.meet else OuterSync)(outer, units, comm)
    return Engine(strategy, precision, units, comm, writes, synced)


def _fill_buffers(model: nn.Module, source: InitialValues, groups: Groups) -> None:
    """Copy the buffers of rank 0 to all ranks. They may be random, and are small enough for a broadcast."""
    for name, buffer in model.named_buffers():
        values = (source.buffer(name, buffer) if is_saved(model, name) else buffer).detach().contiguous()
        groups.broadcast(values)
        buffer.data.copy_(values)


def _replica(strategy: Strategy, trains: bool, comm: CommContext, mesh: TensorParallelMesh) -> Replica:
    """Return the ranks among which one copy of the user's ShardTensors is sharded."""
    groups, moves = comm.groups, strategy.of(trains).moves.assemble
    program = comm.program if groups.parent is not None else None
    # Calls are compared among the ranks that share the optimizer states. Frozen parameters may use other groups.
    call = LoggedCall.SHARED if strategy.of(trains).placement.optimizer == strategy.placement.optimizer else None
    if not moves:
        return Replica(None, (0,), groups.rank, mesh.groups, groups.parent, groups.first, program=program, call=call)
    group = moves[0].group_of(groups.rank)
    partition = tuple(g.ranks for g in moves[0].groups)
    made = comm.control(partition, strategy.topology)
    return Replica(made, group.slots, groups.rank, mesh.groups, groups.parent, groups.first, program=program, call=call)


def _host_replica(strategy: Strategy, groups: Groups, replica: Replica) -> Replica:
    """Return `replica`, with gloo groups that combine tensors in the host's memory if the optimizer works there."""
    if not strategy.optimizer_on_host or groups.parent is None:
        return replica
    moves = strategy.moves.assemble
    group = groups.of(tuple(g.ranks for g in moves[0].groups), "control", "gloo") if moves else None
    return replace(replica, group=group, everyone=groups.gloo_group())
