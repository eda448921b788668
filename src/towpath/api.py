"""The functions that users call: `shard`, `full_parameters`, `schedule`, and functions for sharded models.

`shard` prepares a model, and the hooks that it attaches do the rest during training. docs/reference/architecture.md
follows a call from here down to a collective.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Never, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from towpath.checkpoint.safe_files import Safetensors
from towpath.collectives.select import form_for
from towpath.core import presets
from towpath.core.formats import Dtype, Precision, registered_formats
from towpath.core.owner_stepped import OwnedParameter
from towpath.core.presets import NamedStrategy, StrategyLike
from towpath.core.queues import LoggedCall
from towpath.core.schedule import Schedule, decided, depends_on_memory
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.strategy import Strategy
from towpath.core.units import units_from_numels
from towpath.engine.agree.boundary import CHECK_EVERY
from towpath.engine.build import build, check_shardable
from towpath.engine.executor import engine_of
from towpath.engine.from_fsdp import check_arguments
from towpath.engine.hooks import attach
from towpath.engine.layout import (
    UnitChoice,
    UnitLayout,
    describe,
    device_of,
    is_saved,
    lay_out,
    least_free_bytes,
    trainable_places,
)
from towpath.engine.parameters import full_parameters as whole
from towpath.engine.parameters.initialise import Values
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import ConfigError, ShardError, StepError
from towpath.logs import logger
from towpath.outer.islands import Island, IslandSync
from towpath.plan.request import Workload
from towpath.sharded_module import ShardedModule, attach_api, check_class
from towpath.topology.cluster import Topology, counted
from towpath.topology.groups import Groups, check_process_group, detect_shape
from towpath.topology.init import check_devices
from towpath.topology.together import together
from towpath.version import __version__

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

Model = TypeVar("Model", bound=nn.Module)
Batch = TypeVar("Batch")

_LOG = logger("shard")


@contextmanager
def _lost_peers_named() -> Generator[None]:
    """Raise `ShardError` with advice if a collective of `shard()` fails, because a rank has died or is elsewhere."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):  # gloo raises RuntimeErrors
            raise
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise ShardError(
            f"rank {rank}: shard() failed: {error}\nIf this speaks of a connection or of time, another rank has died, "
            "has raised an error, or did not call shard(): see what the other ranks printed. If they wait, too, "
            "`towpath doctor` examines the network."
        ) from error


@_lost_peers_named()
def shard(
    model: Model,
    strategy: Literal["auto"] | StrategyLike,
    *,
    topology: Topology | None = None,
    units: UnitChoice | None = None,
    precision: Precision | Dtype | MixedPrecisionPolicy | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    values: Values | str | Path | None = None,
    workload: Workload | None = None,
    check_every: int = CHECK_EVERY,
    **theirs: Never,
) -> Model:
    """Shard `model` in place and return it. Every rank of the process group must call it with the same arguments.

    Afterwards the parameters are `ShardTensor`s. Make the optimizer from `model.parameters()`, and train as before.
    All ranks start with the parameters and buffers of rank 0 (unless `values` is given). Where every rank has the same
    values, as after one seed, parameters are compared and not sent. The models of the other ranks may be on the meta
    device.

    Args:
        model: The model, on the device that it trains on, or on the meta device to save memory. With `device`, it may
            be on any.
        strategy: A preset's name such as "zero3", what `towpath.strategy("zero3", exact=True)` returns, or "auto".
            "auto" takes the strategy that the planner ranks first for this cluster and for `workload`. It measures the
            cluster once.
        topology: The number of nodes and of ranks per node. Detected by default. Pass it to group ranks differently.
        units: Module classes or modules to gather separately. By default, these are the children of each ModuleList or
            Sequential whose children have one class. Lists among them are replaced by the modules in them that run. A
            large embedding or output layer outside of them is a unit, too. All other modules belong to the root. Pass
            it if the repeated blocks are not in such a list.
        precision: The dtype to compute in ("bf16", torch.bfloat16), a `Precision`, or FSDP2's MixedPrecisionPolicy.
            By default, each parameter computes in its own dtype. Use it for mixed precision.
        group: The data-parallel process group. By default, all ranks. Use it with other kinds of parallelism.
        mesh: The same as a DeviceMesh, instead of `group`. In a mesh of two dims (replicate, shard), each row is a node
            of the topology. "mics" then shards over the second dim, as FSDP2 does.
        device: The device to train on, where the model is moved unit by unit. By default, the model's. Use it for a
            model that fits in the host's memory, but not on one GPU.
        values: The initial values: a folder or file of safetensors with the model's names, such as Hugging Face's. Or a
            function: `values(name, start, end)` returns the elements [start, end) of the parameter `name` as a 1-D
            tensor, and raises KeyError for an unknown name. By default, rank 0's model has the values. Use it to load a
            large model, because each rank then reads only the elements that it holds. If it fails on one rank, all
            ranks raise, and the model must be built again.
        workload: What a step computes, and in how much memory. Required by "auto", and refused otherwise.
        check_every: The number of optimizer steps between two comparisons of parameters. Ranks with copies of the same
            parameters ("ddp", "mics") raise an error with the unit's name if they differ. 0 is never.
        **theirs: Not supported. An argument of FSDP or FSDP2 raises an error that names the counterpart.

    Returns:
        The same model, with the methods of `ShardedModule` added.

    Raises:
        ShardError: The model cannot be sharded, or an argument is invalid or one of FSDP's.
        MismatchError: The ranks passed different models or arguments.
        ConfigError: The strategy is unknown, or does not fit the model or the precision. Or the topology does not fit
            the process group, or the group cannot use the model's device. Or the files of `values` are of another
            model.
        PlanError: No strategy fits `workload` (with "auto").
        CheckpointError: The files of `values` are damaged.
        TypeError: An argument does not exist.
    """
    if theirs:
        check_arguments(theirs, inspect.signature(shard).parameters)
    _check_kinds(topology, group, mesh, check_every)
    check_process_group()
    if mesh is not None:
        group, topology = _of_mesh(mesh, group, topology)
    wanted = None if device is None else torch.device(device)
    if wanted == torch.device("cuda"):
        wanted = torch.device("cuda", torch.cuda.current_device())
    groups = Groups(group, chosen=wanted)
    home = device_of(model.parameters(), groups)
    check_devices(groups, home)
    groups.connect()
    detects = topology is None and not isinstance(strategy, Strategy)
    # Otherwise, the host names of ranks that detect the topology would meet what other ranks compare next.
    with together(groups) as lines:
        lines.append(f"the topology is {'to be detected' if detects else 'passed, or part of the strategy'}")
    if detects:
        topology = Topology(*detect_shape(groups))
    with together(groups) as lines:
        precision = Precision.of(precision)
        chosen = _resolve(strategy, topology, workload, groups.world)
        check_class(model, "auto" if chosen is None else chosen.name)
        layouts = lay_out(model, units, precision)
        if not any(layout.buckets for layout in layouts):
            raise ShardError("the model has no parameters; there is nothing to shard.")
        if chosen is not None:
            check_shardable(chosen, layouts, groups)
            lines += _settings(chosen)
        else:
            lines += ["strategy auto", f"{workload}", f"{topology}"]
        source = "the model has" if values is None else "values= gives"
        lines += [
            f"{precision}",
            f"values as {source} them, on {home.type}",
            # Another version may lay out other transfers. Ranks with other process groups would wait forever.
            f"towpath {__version__}, torch {torch.__version__}",
            f"values compared every {check_every} steps",
            f"codecs of your own, and the bits of their codes: {registered_formats() or 'none'}",
            f"process groups that were made so far: {groups.describe_made()}",
        ]
        if isinstance(values, (str, Path)):
            values = _values_in(values, model, layouts)
        # The parameters come last, because the error about a rank with fewer of them says that it has nothing more.
        lines += describe(model, layouts, home, moves=device is not None)
    if chosen is None:
        from towpath.plan.choice import choose_for  # imported here, because it also imports what traces a model

        assert workload is not None and topology is not None
        chosen = choose_for(model, layouts, workload, groups, topology, precision)
        # The planner runs the model without values. A recurrent module that `check_shardable` has prepared for the
        # engine would run with its own weights instead, so the check follows the plan.
        with together(groups):
            check_shardable(chosen, layouts, groups)
    specs = [unit.spec for unit in layouts]
    free = least_free_bytes(model, home, groups) if depends_on_memory(chosen, specs) else None
    chosen, why = decided(chosen, specs, precision, free, form_for(groups.backend(home)))
    if why and groups.rank == 0:
        _LOG.info(why)
    engine = build(model, chosen, precision, values, layouts, _island_of(groups, chosen), groups)
    engine.free_bytes = free
    engine.check_values_every(check_every)
    attach(model, engine)
    attach_api(model, engine)
    return model


def _values_in(path: str | Path, model: nn.Module, layouts: list[UnitLayout]) -> Values:
    """Return the values of the model in safetensors files, after checking names and shapes."""
    weights = Safetensors(path)
    places = [place for unit in layouts for bucket in unit.buckets for place in bucket.places]
    shapes = {tuple(place.names): tuple(place.parameter.shape) for place in places}
    held = weights.shapes  # may lack buffers, which then keep the model's values
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in held and is_saved(model, name)}
    shapes |= {(name,): tuple(buffer.shape) for name, buffer in buffers.items()}
    weights.check(shapes, ignored=re.compile(""))  # the files may hold more
    return weights.values


def _island_of(job: Groups, strategy: Strategy) -> Groups:
    """Return the groups of this rank's island, or `job` if there is only one. Every rank must call it."""
    if strategy.islands == 1:
        return job
    world = strategy.topology.world
    islands = tuple(tuple(range(first, first + world)) for first in range(0, job.world, world))
    island = Groups(job.of(islands, "island"), job.rank // world * world, job.chosen)
    island.connect()
    return island


def _check_kinds(topology: object, group: object, mesh: object, check_every: object) -> None:
    for name, given, kind in (("topology", topology, Topology), ("group", group, dist.ProcessGroup)):
        if given is not None and not isinstance(given, kind):
            raise ShardError(f"{name}: expected a {kind.__name__}, got {given!r}.")
    if mesh is not None and not hasattr(mesh, "get_group"):
        raise ShardError(f"mesh: expected a DeviceMesh, got {mesh!r}.")
    if type(check_every) is not int or check_every < 0:
        raise ShardError(f"check_every: expected a number of optimizer steps, or 0 for never; got {check_every!r}.")


def _of_mesh(
    mesh: DeviceMesh, group: dist.ProcessGroup | None, topology: Topology | None
) -> tuple[dist.ProcessGroup | None, Topology | None]:
    """Return the process group of a mesh, and the topology that its shape implies."""
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
        raise ConfigError(f"the mesh has {said} ranks (replicate × shard), but topology={topology} was passed.")
    ranks = mesh.mesh.flatten().tolist()
    whole = None if ranks == list(range(dist.get_world_size())) else mesh._flatten().get_group()  # pyright: ignore
    if whole is not None and dist.get_process_group_ranks(whole) != ranks:
        raise ShardError(f"mesh: its ranks must rise from row to row; got {mesh.mesh.tolist()}.")
    return whole, said


def _resolve(
    strategy: StrategyLike, topology: Topology | None, workload: Workload | None, world: int
) -> Strategy | None:
    """Return the strategy that the user named, or None for "auto"."""
    chosen: Strategy | None = None
    if strategy != "auto":
        if workload is not None:
            raise ShardError('workload= is for strategy="auto": leave it out, or let the planner choose.')
        chosen = _placed("shard", strategy, topology)
    elif workload is None:
        raise ShardError(
            'strategy="auto" has to know what a step computes: pass workload=towpath.Workload(tokens=…), the '
            "tokens of a rank's forward pass, with micro_steps=, optimizer= and memory= as they are. In a framework, "
            'pass it in strategy=towpath.integrations.Sharding("auto", workload=…).'
        )
    job = topology if chosen is None or topology is not None else chosen.job
    assert job is not None
    if job.world != world:
        raise ConfigError(
            f"{job.words}: expected {counted(job.world, 'rank')} in the process group, which has {world}. "
            f"Start {job.world}, or pass the topology that is running."
        )
    shares = None if chosen is None else chosen.shares
    if isinstance(shares, tuple) and len(shares) != world:
        raise ConfigError(f"shares={shares}: expected {counted(world, 'number')}, one for each data-parallel rank.")
    return chosen


def _placed(caller: str, strategy: object, topology: Topology | None) -> Strategy:
    """Return `strategy` on `topology`, which may be None only for a `Strategy`."""
    if isinstance(strategy, str):
        strategy = presets.strategy(strategy)
    if isinstance(strategy, NamedStrategy):
        assert topology is not None
        return strategy.on(topology)
    if not isinstance(strategy, Strategy):
        meant = f" Did you mean {presets.closest(strategy)!r}?" if isinstance(strategy, Enum) else ""
        raise ConfigError(
            f"{caller}: expected a preset's name, or a Strategy as towpath.strategy() makes it; got {strategy!r}."
            f"{meant}"
        )
    if topology is not None and topology != strategy.job:
        raise ConfigError(
            f"the strategy was made for {strategy.topology} (nodes × ranks), but topology={topology} was passed."
        )
    return strategy


def _settings(strategy: Strategy) -> Iterator[str]:
    """Yield each setting of a strategy with its section, so that an error can name the one that differs."""
    # First, because outer steps also change the strategy's topology.
    yield f"outer = {None if strategy.outer is None else 'towpath.Outer(…)'}"
    section = ""
    for line in strategy.to_toml().splitlines():
        section = line if line.startswith("[") else section
        if line and line != section:
            yield f"strategy {section} {line}" if section else f"strategy {line}"


@contextmanager
def full_parameters(
    model: nn.Module, modules: Iterable[nn.Module] | None = None, *, modifier_rank: int | None = None
) -> Generator[None]:
    """Unshard the parameters of a sharded model for the duration of a context, and keep the writes to them.

    Use it to read or initialize full parameters, as with FSDP's `summon_full_params`. Every rank must enter and leave
    it. By default all ranks must write the same values. In a nested context, units that were unsharded before stay so
    until the outer context ends.

    Args:
        model: A model that `shard` returned.
        modules: Modules of the model whose parameters are needed. Only the units that hold these are unsharded. By
            default, all are. Use it to save memory.
        modifier_rank: The rank whose writes all ranks take over. By default, ranks compare their values. Use it if only
            one rank has the new values.

    Raises:
        ShardError: The model is not sharded, or a module is not part of it.
        MismatchError: Ranks passed different modules.
        StepError: Ranks wrote different values. All ranks raise it, and it names the parameter.
    """
    engine = engine_of(model)
    made = whole.unshard(engine, None if modules is None else whole.units_of(engine, model, modules))
    try:
        yield
    finally:
        whole.reshard(engine, modifier_rank, made)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context for the micro-steps before the last one of an optimizer step.

    Inside, a backward pass adds to the gradients without sharing them with all ranks. The first backward pass outside
    sets `.grad` to the sum over the micro-steps, as a mean over the ranks. As in PyTorch, divide each loss by the
    number of micro-steps.

    Args:
        model: A model that `shard` returned.

    Raises:
        ShardError: The model is not sharded.
    """
    return engine_of(model).no_sync()


def weigh(model: nn.Module, loss: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a loss with the weight of its tokens: `towpath.weigh(model, loss, tokens).backward()`.

    It is for a strategy with `shares`, where each backward pass needs it. The gradient of a step then is that of the
    mean over the tokens of all ranks and micro-steps, as one process would compute it. So do not divide the loss by the
    number of micro-steps.

    Args:
        model: A model that `shard` returned.
        loss: The mean loss of this rank's micro-batch, in float32 or float64.
        tokens: What `loss` is the mean of: tokens without those that are ignored, or rows. All ranks must count the
            same thing. 0 is allowed, if the loss is finite. A tensor on a GPU would wait for the GPU.

    Raises:
        ShardError: The model is not sharded, or its strategy has no shares.
        StepError: The loss is in a dtype of 16 bits or has a weight, or `tokens` is negative or no whole number. In the
            backward pass: two losses were weighed for one backward pass.
    """
    shares = engine_of(model).shares
    if shares is None:
        raise ShardError(
            "weigh: the strategy has no shares, and gradients are the mean over the ranks. Pass towpath.strategy(name, "
            "shares=…): (1, 1) weighs the tokens of two equal ranks."
        )
    return shares.weigh(loss, tokens)


# What a rank has to train on, when the ranks compare it in `join`.
_NONE, _LAST_AGAIN, _ONE = 0, 1, 2


def join(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield as many batches on each rank as the rank with the most has: `for batch in towpath.join(model, loader)`.

    Use it for data that ends sooner on some ranks. A rank whose data has ended gets its last batch again, and takes
    part in the transfers of the others. Its gradients then count as zero, and the mean is still over all ranks. With a
    strategy's `shares`, the mean is over the tokens of the other ranks.

    Args:
        model: A model that `shard` returned.
        batches: This rank's batches, at least one.

    Raises:
        ShardError: The model is not sharded.
        StepError: A rank has no batch at all.
    """
    engine, source = engine_of(model), iter(batches)
    # Islands exchange weights by the number of steps, so that all of them must make equally many.
    groups, program = engine.comm.job, engine.comm.program
    last: list[Batch] = []
    while True:
        found = list(islice(source, 1))
        mine = _ONE if found else _LAST_AGAIN if last else _NONE
        last = found or last
        with program.shared("join()", LoggedCall.PROGRAM):
            everyones = groups.gather_rows(torch.tensor([mine]), program.wait).flatten().tolist()
        if _ONE not in everyones:
            return
        if _NONE in everyones:
            raise StepError(
                f"rank {groups.rank}: rank {everyones.index(_NONE)} has no batch at all, and cannot repeat its "
                "last one while the others train. Give every rank at least one batch."
            )
        engine.muted = mine == _LAST_AGAIN
        try:
            yield last[0]
        finally:
            engine.muted = False


def broadcast_buffers(model: nn.Module, rank: int = 0) -> None:
    """Overwrite every rank's buffers, such as a BatchNorm's running statistics, with those of one rank.

    After `shard` the engine leaves buffers alone, so those that depend on a rank's data differ between ranks. Call this
    before an evaluation or a checkpoint. Every rank must call it. With outer steps, each island keeps buffers of its
    own.

    Args:
        model: A model that `shard` returned.
        rank: The rank whose buffers all ranks get, counted inside the island with outer steps.

    Raises:
        ShardError: The model is not sharded.
    """
    groups = engine_of(model).comm.groups
    for buffer in model.buffers():
        groups.broadcast(buffer, rank)


def meet_islands(model: nn.Module) -> Island:
    """Join the islands that are there, or begin a run if there are none. Every rank must call it.

    It is for a strategy with `Outer(meet=…)`. Call it after `shard`, and after a checkpoint was loaded. An island that
    joins takes the slow weights of another one in place of its own, and begins at the step where the others are. If it
    is not called, the first forward pass with gradients does it.

    Args:
        model: A model that `shard` returned.

    Returns:
        The island's number, the optimizer steps that are done, and which part of the data it reads.

    Raises:
        ConfigError: The strategy has no islands that come and go, or the other islands have another model or other
            settings. Or no island was found, and this machine cannot begin a run.
    """
    engine = engine_of(model)
    if not isinstance(engine.outer, IslandSync):
        raise ConfigError(
            "meet_islands: the strategy has no islands that come and go. Pass outer=towpath.Outer(every=…, "
            "meet='HOST:PORT')."
        )
    engine.meet_islands()
    assert engine.outer.island is not None
    return engine.outer.island


def average_islands(model: nn.Module) -> None:
    """Let all islands hold the mean of their weights. Every rank must call it.

    Call it after the last step of a training with outer steps, and before the gradients of another one. It first
    completes the outer steps so far: it begins the exchange that belongs to the last optimizer step, and applies all
    exchanges under way. Then it averages the weights that islands hold. It sends all fragments once more, by the
    strategy's transport, since islands have trained on since their last exchange. The slow weights become the same
    mean. Without outer steps, it does nothing.

    If an exchange belongs to the last optimizer step, as after `every` steps, islands thus hold the result of the outer
    optimizer, not the mean of their weights before the call.

    Args:
        model: A model that `shard` returned.

    Raises:
        ShardError: The model is not sharded.
        StepError: The slow weights differ between islands, or these made different numbers of steps, or a rank
            accumulates gradients or has gradients that no optimizer has used.
    """
    engine = engine_of(model)
    if engine.outer is not None:
        engine.begin()
        engine.outer.begin()
        engine.outer.check_steps(engine.step, engine.awaits_step)
        engine.sync_islands(average=True)
        engine.outer.raise_problems()


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a sharded parameter, its `.grad`, or its optimizer state. Every rank must call it.

    The result may be used in a loss. Its backward pass then takes the mean over all ranks, so every rank must run that
    pass.

    Args:
        parameter: A `ShardTensor`, such as `model.head.weight` of a sharded model, or its `.grad`.

    Returns:
        A plain tensor of the full shape.

    Raises:
        ShardError: The tensor is not a `ShardTensor`. Inside `full_parameters` parameters are unsharded already.
    """
    if not isinstance(parameter, ShardTensor):
        raise ShardError(
            "full_tensor: expected a ShardTensor, such as a parameter of a model that towpath.shard() returned, or its "
            f".grad; got a plain {type(parameter).__name__}. Inside a forward and inside full_parameters() parameters "
            "are unsharded: use them as they are."
        )
    return parameter.full_tensor()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that `shard` makes units of by default, without the large leaves of the root."""
    return [module for unit in lay_out(model)[1:] if not unit.spec.leaf for module in unit.modules]


def schedule(
    strategy: StrategyLike,
    model_or_numels: nn.Module | Sequence[int] | Mapping[str, int],
    micro_steps: int = 1,
    precision: Precision | Dtype | MixedPrecisionPolicy | None = None,
    units: UnitChoice | None = None,
    *,
    topology: Topology | None = None,
    memory: int | None = None,
    owner_stepped: Iterable[str] = (),
) -> Schedule:
    """Return the transfers of one optimizer step, with the bytes per link class, without any communication.

    Use it to see what a strategy sends before a run, or to check a run against.

    Args:
        strategy: A preset's name, or what `strategy` returns.
        model_or_numels: A model, sharded or not, or the numbers of elements of the units, optionally by name.
        micro_steps: The number of forward and backward passes per optimizer step. Default: 1.
        precision: The dtypes, as for `shard`. By default, those of a sharded model, or each parameter's own dtype.
        units: The units of a model that is not sharded, as for `shard`.
        topology: The topology for a strategy without one. By default, that of a sharded model, or the detected one.
        memory: The bytes that a rank has. They decide where frozen parameters are stored if the strategy leaves that
            open. By default, the value that `shard` found for a sharded model, otherwise enough.
        owner_stepped: Names of the parameters that a `towpath.optim.owner_stepped` optimizer steps. The transfers of
            its step come first, before the following forward pass.

    Returns:
        The schedule of a steady step, which the engine follows.

    Raises:
        ConfigError: The strategy is unknown or invalid, or a name in `owner_stepped` is not a trainable parameter. Or
            `topology` differs from that of the strategy.
    """
    engine = model_or_numels.towpath_engine if isinstance(model_or_numels, ShardedModule) else None
    if topology is None and not isinstance(strategy, Strategy):
        topology = Topology.detect() if engine is None else engine.strategy.job
    placed = _placed("schedule", strategy, topology)
    precision = None if precision is None else Precision.of(precision)
    if engine is not None:
        layouts = [u.layout for u in engine.units]
        specs = tuple(u.plan.spec for u in engine.units)
        precision, form = precision or engine.precision, engine.comm.form
        memory = engine.free_bytes if memory is None else memory
    else:
        if isinstance(model_or_numels, nn.Module):
            layouts = lay_out(model_or_numels, units, precision)
            specs = tuple(u.spec for u in layouts)
        else:
            layouts, specs = [], units_from_numels(model_or_numels)
        groups = Groups()
        form = form_for(groups.backend(groups.device))
    placed, _ = decided(placed, specs, precision or Precision(), memory, form)
    stepped = tuple(_whole_parameters(layouts, owner_stepped))
    return derive_schedule(placed, specs, micro_steps, precision, whole=stepped, form=form)


def _whole_parameters(layouts: Sequence[UnitLayout], names: Iterable[str]) -> Iterator[OwnedParameter]:
    """Yield the unit, bucket and index of each named parameter."""
    wanted = set(names)
    for parameter, place in trainable_places(layouts):
        if not wanted.isdisjoint(place.names):
            wanted.difference_update(place.names)
            yield parameter
    if wanted:
        raise ConfigError(
            f"schedule: owner_stepped has {', '.join(sorted(wanted))}; expected names of the model's trainable "
            "parameters."
        )
