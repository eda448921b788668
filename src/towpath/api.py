"""What a user calls. From here to a collective: hooks → executor → unit → queue → bucket → bound_transfer → flat, as
docs/architecture.md tells it."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal, Never, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from towpath.core import presets
from towpath.core.formats import Dtype, MixedPrecisionPolicy, Precision, registered_formats
from towpath.core.presets import Preset
from towpath.core.schedule import Schedule, decided, is_open
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.strategy import Offload, Strategy
from towpath.core.units import units_from_numels
from towpath.core.whole_matrices import WholeParameter
from towpath.engine.build import BuildOptions, agree, build, check_exchangeable, check_low_rank
from towpath.engine.executor import Batch, engine_of
from towpath.engine.hooks import attach, check_arguments
from towpath.engine.layout import UnitChoice, UnitLayout, describe, device_of_parameters, lay_out, least_free_bytes
from towpath.engine.parameters import full_parameters as whole
from towpath.engine.parameters.initialise import Values
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.engine.parameters.unit import CHECK_EVERY
from towpath.errors import ShardError, StrategyError, TopologyError, TowpathError
from towpath.logs import logger
from towpath.planner.workload import Workload
from towpath.sharded_module import ShardedModule, attach_api, check_class
from towpath.topology.cluster import Topology
from towpath.topology.devices import check_devices
from towpath.topology.groups import Groups, check_process_group, detect_shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=nn.Module)

_LOG = logger("shard")


def shard(
    model: Model,
    strategy: Preset | Literal["auto"] | str | Strategy,
    *,
    topology: Topology | None = None,
    units: UnitChoice | None = None,
    precision: Precision | Dtype | MixedPrecisionPolicy | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    values: Values | None = None,
    workload: Workload | None = None,
    offload: Offload | None = None,
    check_every: int = CHECK_EVERY,
    **theirs: Never,
) -> Model:
    """Shard `model` in place by `strategy` (a preset's name, a Strategy, or "auto") and return it.

    "auto" takes what the planner ranks first, for this cluster, which it measures once, and for `workload`: what a step
    computes, and in how much memory.

    `topology`: nodes × ranks per node, detected unless given. `units`: module classes or modules that are gathered
    together; default: the children of every ModuleList or Sequential of like blocks, and the rest as the root. Where
    the children are lists themselves, which never run, their modules that run.
    `precision`: the dtype to compute in ("bf16", torch.bfloat16), a Precision, or FSDP2's MixedPrecisionPolicy.
    `group`: the data-parallel process group, the world unless given. Every rank of it must call this alike;
    the values of rank 0's parameters and buffers are everyone's afterwards.
    `mesh`: the same as a DeviceMesh, in place of `group`. One of two dims, (replicate, shard), says the topology as
    well: a row is a node, so that "mics" shards over the second dim, as FSDP2 does.
    `values`: where the parameters' values come from instead. `values(name, start, end)` gives the elements [start, end)
    of the parameter `name` in row-major order, 1-D and of any floating dtype; for a name it does not know it raises
    KeyError. Each rank asks for what it holds and nothing else: none ever holds a whole unit. A tied parameter is asked
    for under its names, until one is known; persistent buffers that it knows come from it too. Where it fails on one
    rank, all ranks raise; the model, by then without values, must be built anew.
    `offload="optimizer"`: parameters, as the optimizer sees them, their `.grad` and the optimizer's states lie in the
    host's memory, and the optimizer steps there; what computes stays on the model's device.
    `check_every`: with every so many-th optimizer step, ranks that hold copies of the same parameters (`ddp`, `mics`)
    compare a checksum of them, and raise an error that names the unit where they differ. 0 turns this off.
    `theirs`: no argument. Those of FSDP and FSDP2 raise an error that names the counterpart.
    """
    if theirs:
        check_arguments(theirs, inspect.signature(shard).parameters)
    _check_kinds({"topology": (topology, Topology), "group": (group, dist.ProcessGroup)})
    if mesh is not None and not hasattr(mesh, "get_group"):
        raise ShardError(f"mesh: expected a DeviceMesh, got {mesh!r}.")
    if type(check_every) is not int or check_every < 0:
        raise ShardError(f"check_every: expected a number of optimizer steps, or 0 for never; got {check_every!r}.")
    check_process_group()
    if mesh is not None:
        group, topology = _of_mesh(mesh, group, topology)
    groups = Groups(group)
    check_devices(groups, device_of_parameters(model.parameters(), groups))
    groups.connect()
    if topology is None and not isinstance(strategy, Strategy):
        topology = Topology(*detect_shape(groups))
    try:
        precision = Precision.of(precision)
    except TowpathError as failure:
        agree(groups, [], failure)
        raise
    if strategy == "auto":
        assert topology is not None
        strategy = _planned(model, workload, topology, units, precision, groups, offload)
        workload = None
    asked = _Asked(strategy, topology, workload, units, precision, values, offload, check_every)
    resolved, layouts = _agreed(model, asked, groups)
    specs = [unit.spec for unit in layouts]
    free = least_free_bytes(layouts, groups) if is_open(resolved, specs) else None
    decision = decided(resolved, specs, precision, free)
    if decision.why and groups.rank == 0:
        _LOG.info(decision.why)
    engine = build(model, BuildOptions(decision.strategy, precision, values), layouts, groups)
    engine.free_bytes = free
    engine.check_values_every(check_every)
    attach(model, engine)
    attach_api(model, engine)
    return model


def _check_kinds(arguments: Mapping[str, tuple[object, type]]) -> None:
    for name, (given, kind) in arguments.items():
        if given is not None and not isinstance(given, kind):
            raise ShardError(f"{name}: expected a {kind.__name__}, got {given!r}.")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `shard` was asked for, "auto" resolved."""

    strategy: str | Strategy
    topology: Topology | None
    workload: Workload | None
    units: UnitChoice | None
    precision: Precision
    values: Values | None
    offload: Offload | None
    check_every: int


def _agreed(model: nn.Module, asked: _Asked, groups: Groups) -> tuple[Strategy, list[UnitLayout]]:
    """The strategy and the units, once every rank has found that it was asked for the same; else all ranks raise."""
    try:
        strategy, layouts = _checked(model, asked, groups)
        described = list(describe(model, layouts))
    except TowpathError as failure:
        agree(groups, [], failure)
        raise
    lines = [f"strategy {strategy.to_toml()}", f"{asked.precision}", _told(asked.values)]
    # Of another version a rank may lay out other transfers; of other groups it would meet nobody.
    lines += [f"towpath {version('towpath')}, torch {torch.__version__}"]
    lines += [f"values compared every {asked.check_every} steps"]
    lines += [f"codecs of your own, and the bits of their codes: {registered_formats() or 'none'}"]
    lines += [f"process groups that were made so far: {groups.describe_made()}"]
    # Last, so that a rank with fewer of them is said to have nothing more.
    agree(groups, lines + described, None)
    return strategy, layouts


def _checked(model: nn.Module, asked: _Asked, groups: Groups) -> tuple[Strategy, list[UnitLayout]]:
    """What this rank alone can find wrong."""
    if asked.workload is not None:
        raise ShardError('workload= is for strategy="auto": leave it out, or let the planner choose.')
    strategy = _resolve(asked.strategy, asked.topology, groups.world)
    strategy = strategy if asked.offload is None else replace(strategy, offload=asked.offload)
    check_class(model, strategy.name)
    layouts = lay_out(model, asked.units, asked.precision)
    check_exchangeable(layouts, groups)
    check_low_rank(strategy, layouts)
    return strategy, layouts


def _of_mesh(
    mesh: DeviceMesh, group: dist.ProcessGroup | None, topology: Topology | None
) -> tuple[dist.ProcessGroup | None, Topology | None]:
    """The process group of a mesh, and the topology that it says."""
    if group is not None:
        raise ShardError("shard() got mesh= and group=, which say the same: pass one of them.")
    if mesh.ndim == 1:
        return mesh.get_group(), topology
    if mesh.ndim != 2:
        raise ShardError(
            f"mesh: expected one dim, or two, (replicate, shard); got {mesh.ndim}. Pass the data-parallel ones, as "
            'mesh["replicate", "shard"].'
        )
    said = Topology(*mesh.shape)
    if topology is not None and topology != said:
        raise TopologyError(f"the mesh has {said} ranks (replicate × shard), but topology={topology} was passed.")
    ranks = mesh.mesh.flatten().tolist()
    whole = None if ranks == list(range(dist.get_world_size())) else mesh._flatten().get_group()  # pyright: ignore
    if whole is not None and dist.get_process_group_ranks(whole) != ranks:
        raise ShardError(f"mesh: its ranks must rise from row to row; got {mesh.mesh.tolist()}.")
    return whole, said


def _planned(
    model: nn.Module,
    workload: Workload | None,
    topology: Topology,
    units: UnitChoice | None,
    precision: Precision,
    groups: Groups,
    offload: Offload | None,
) -> Strategy:
    """What the planner ranks first. All ranks are asked alike, or all raise, before anything is measured."""
    from towpath.auto.choice import choose_for  # with what traces a model: nobody else needs it

    lines: list[str] = []
    failure: TowpathError | None = None
    try:
        if workload is None:
            raise ShardError(
                'strategy="auto" has to know what a step computes: pass workload=towpath.Workload(tokens=…), the '
                "tokens of a rank's forward pass, with micro_steps=, optimizer= and memory= as they are."
            )
        _check_world(topology, groups.world)
        check_class(model, "auto")
        layouts = lay_out(model, units, precision)
        lines = ["strategy auto", f"{workload}", f"{topology}", f"{precision}", f"{offload}"]
        lines += describe(model, layouts)
    except TowpathError as error:
        failure = error
    agree(groups, lines, failure)
    assert workload is not None
    return choose_for(model, workload, groups, topology, precision, units, offload)


def _told(values: Values | None) -> str:
    return "values as the model has them" if values is None else "values as values= gives them"


def _resolve(strategy: str | Strategy, topology: Topology | None, world: int) -> Strategy:
    if isinstance(strategy, str):
        assert topology is not None
        _check_world(topology, world)
        return presets.strategy(strategy, topology)
    _check_is_strategy("shard", strategy)
    _check_topology(strategy, topology)
    _check_world(strategy.topology, world)
    return strategy


def _check_is_strategy(caller: str, strategy: object) -> None:
    if not isinstance(strategy, Strategy):
        meant = f" Did you mean {presets.closest(strategy)!r}?" if isinstance(strategy, Enum) else ""
        raise StrategyError(
            f"{caller}: expected a preset's name, or a Strategy as towpath.strategy() makes it; got {strategy!r}."
            f"{meant}"
        )


def _check_topology(strategy: Strategy, topology: Topology | None) -> None:
    if topology is not None and topology != strategy.topology:
        raise TopologyError(
            f"the strategy was made for {strategy.topology} (nodes × ranks), but topology={topology} was passed."
        )


def _check_world(topology: Topology, world: int) -> None:
    if topology.world != world:
        raise TopologyError(
            f"{topology.nodes} nodes of {topology.ranks_per_node} ranks are {topology.world} ranks, but the process "
            f"group has {world}. Start {topology.world} ranks, or pass the topology that is running."
        )


@contextmanager
def full_parameters(
    model: nn.Module, modules: Iterable[nn.Module] | None = None, *, modifier_rank: int | None = None
) -> Generator[None]:
    """Inside, all parameters of a sharded model are whole; what is written to them, alike on every rank, is kept.

    `modules`: those of the model whose parameters are wanted; the units in which these lie become whole, and no others.
    Ranks that wrote different values all raise an error that names the parameter. `modifier_rank`: the rank whose
    values all take over instead. In a context inside another one, what was whole before stays so until that ends.
    """
    engine = engine_of(model)
    made = whole.unshard(engine, None if modules is None else whole.units_of(engine, model, modules))
    try:
        yield
    finally:
        whole.reshard(engine, modifier_rank, made)


# Functions, because a type checker sees the model's own class, which has none of the methods that `shard` adds.


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context for the micro-steps before the last one of an optimizer step.

    Inside, a backward pass adds to the gradients without sharing them with all ranks. The first backward pass outside
    delivers the mean of all micro-steps as `.grad`.

    Args:
        model: A model that `shard` returned.

    Raises:
        ShardError: The model is not sharded.
    """
    return _sharded(model).no_sync()


def join(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield as many batches on every rank as the rank with the most has. Use it where data ends sooner on some ranks.

    A rank whose data has ended gets its last batch again, and takes part in the transfers of the others. Its gradients
    then count as zero, while the mean is still taken over all ranks.

    Args:
        model: A model that `shard` returned.
        batches: This rank's batches, at least one.

    Raises:
        ShardError: The model is not sharded.
        StepError: A rank has no batch at all.
    """
    return _sharded(model).join(batches)


def unshard(model: nn.Module) -> None:
    """Gather all parameters, which stay whole until `reshard`. Every rank must call it.

    Prefer `full_parameters`, a context that also reshards after an exception.

    Args:
        model: A model that `shard` returned.

    Raises:
        ShardError: The model is not sharded.
    """
    _sharded(model).unshard()


def reshard(model: nn.Module, *, modifier_rank: int | None = None) -> None:
    """Keep of each whole parameter only this rank's slice, after `unshard`. Every rank must call it.

    Args:
        model: A model that `shard` returned.
        modifier_rank: The rank whose writes to the whole parameters are kept. By default every rank must have written
            the same values.

    Raises:
        ShardError: The model is not sharded, or ranks have written different values.
    """
    _sharded(model).reshard(modifier_rank=modifier_rank)


def broadcast_buffers(model: nn.Module, rank: int = 0) -> None:
    """Overwrite every rank's buffers, such as a BatchNorm's running statistics, with those of one rank.

    After `shard` the engine leaves buffers alone, so those that depend on a rank's data differ between ranks. Call this
    before an evaluation or a checkpoint. Every rank must call it.

    Args:
        model: A model that `shard` returned.
        rank: The rank whose buffers all ranks get.

    Raises:
        ShardError: The model is not sharded.
    """
    _sharded(model).broadcast_buffers(rank)


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of a sharded parameter, its `.grad`, or its optimizer state. Every rank must call it.

    What is computed with it may be part of a loss. Its backward pass then takes the mean over all ranks, so every rank
    must run that pass.

    Args:
        parameter: A `ShardTensor`, such as `model.head.weight` of a sharded model, or its `.grad`.

    Raises:
        ShardError: The tensor is no `ShardTensor`. Inside `full_parameters` a parameter is whole already.
    """
    if not isinstance(parameter, ShardTensor):
        raise ShardError(
            "full_tensor: expected a ShardTensor, such as a parameter of a model that towpath.shard() returned, or its "
            f".grad; got a plain {type(parameter).__name__}. Inside a forward and inside full_parameters() parameters "
            "are whole: use them as they are."
        )
    return parameter.full_tensor()


def _sharded(model: nn.Module) -> ShardedModule:
    engine_of(model)
    return cast(ShardedModule, model)  # or what torch.compile() made of one, which hands its methods on


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that `shard` gathers by themselves unless told otherwise; all else belongs to the root."""
    return [module for unit in lay_out(model)[1:] for module in unit.modules]


def schedule(
    strategy: Preset | str | Strategy,
    model_or_numels: nn.Module | Sequence[int] | Mapping[str, int],
    micro_steps: int = 1,
    precision: Precision | Dtype | MixedPrecisionPolicy | None = None,
    units: UnitChoice | None = None,
    *,
    topology: Topology | None = None,
    memory: int | None = None,
    whole_matrices: Iterable[str] = (),
) -> Schedule:
    """The transfers of one optimizer step, with bytes sent per link class, computed without communication.

    `memory`: bytes that a rank has, by which it is decided where frozen parameters lie if the strategy leaves it open;
    unless given it is enough, or, of a sharded model, what `shard()` has found.
    `whole_matrices`: the names of the parameters that a `towpath.optim.whole_matrices` optimizer steps; what its step
    sends comes first, before the forward pass that follows it.
    `topology`: of a preset that is given by its name; else that of a sharded model, or the one that is detected.
    """
    if isinstance(strategy, str):
        if topology is None and isinstance(model_or_numels, ShardedModule):
            topology = model_or_numels.towpath_engine.strategy.topology
        strategy = presets.strategy(strategy, topology)
    _check_is_strategy("schedule", strategy)
    precision = None if precision is None else Precision.of(precision)
    _check_topology(strategy, topology)
    if isinstance(model_or_numels, ShardedModule):
        layouts = [u.layout for u in model_or_numels.towpath_engine.units]
        specs = tuple(u.plan.spec for u in model_or_numels.towpath_engine.units)
        precision = precision or model_or_numels.towpath_engine.precision
        memory = model_or_numels.towpath_engine.free_bytes if memory is None else memory
    elif isinstance(model_or_numels, nn.Module):
        layouts = lay_out(model_or_numels, units, precision)
        specs = tuple(u.spec for u in layouts)
    else:
        layouts, specs = [], units_from_numels(model_or_numels)
    strategy = decided(strategy, specs, precision or Precision(), memory).strategy
    stepped = tuple(_whole_parameters(layouts, whole_matrices))
    return derive_schedule(strategy, specs, micro_steps, precision, whole=stepped)


def _whole_parameters(layouts: Sequence[UnitLayout], names: Iterable[str]) -> Iterator[WholeParameter]:
    """Where the parameters of these names lie."""
    wanted = set(names)
    for unit, layout in enumerate(layouts):
        for number, bucket in enumerate(layout.buckets):
            for index, place in enumerate(bucket.places):
                if bucket.spec.trainable and not wanted.isdisjoint(place.names):
                    wanted.difference_update(place.names)
                    yield WholeParameter(place.names[0], tuple(place.shape), unit, number, index)
    if wanted:
        raise StrategyError(
            f"schedule: whole_matrices has {', '.join(sorted(wanted))}; expected names of the model's trainable "
            "parameters."
        )
