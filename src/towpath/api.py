"""What a user calls. From here to a collective: shard → engine.build → executor → unit → bucket → collective."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from towpath.core import presets
from towpath.core.precision import Precision
from towpath.core.schedule import Schedule
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.strategy import Strategy
from towpath.core.transfer import Transfer
from towpath.core.units import units_from_numels
from towpath.engine.build import Order, agree, build, check_exchangeable, check_values, optimizers_of
from towpath.engine.executor import Engine
from towpath.engine.initialise import Values
from towpath.engine.layout import UnitChoice, describe, lay_out
from towpath.engine.module_classes import become
from towpath.engine.record import Record, TransferStats
from towpath.engine.shard_tensor import ShardTensor
from towpath.engine.trace import Interval, Trace
from towpath.engine.uneven_data import Batch, joined
from towpath.engine.whole import reshard, unshard
from towpath.errors import ShardError, StepError, StrategyError, TopologyError, TowpathError
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups, check_process_group, detect_topology

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    strategy: str | Strategy,
    *,
    topology: Topology | None = None,
    units: UnitChoice | None = None,
    precision: Precision | None = None,
    group: dist.ProcessGroup | None = None,
    values: Values | None = None,
) -> Model:
    """Shard `model` in place by `strategy` (a preset's name or a Strategy) and return it.

    `topology`: nodes × ranks per node, detected unless given. `units`: module classes or modules that are gathered
    together; default: the children of every ModuleList or Sequential of like blocks, and the rest as the root.
    `group`: the data-parallel process group, the world unless given. Every rank of it must call this alike;
    the values of rank 0's parameters and buffers are everyone's afterwards.
    `values`: where the parameters' values come from instead. `values(name, start, end)` gives the elements [start, end)
    of the parameter `name` in row-major order, 1-D and of any floating dtype; for a name it does not know it raises
    KeyError. Each rank asks for what it holds and nothing else: none ever holds a whole unit. A tied parameter is asked
    for under its names, until one is known; persistent buffers that it knows come from it too. Where it fails on one
    rank, all ranks raise; the model, by then without values, must be built anew.
    """
    check_process_group()
    groups = Groups(group)
    precision = precision or Precision()
    lines: list[str] = []
    failure: TowpathError | None = None
    if topology is None and not isinstance(strategy, Strategy):
        topology = detect_topology(groups)
    try:
        resolved = _resolve(strategy, topology, groups.world)
        _check_class(model)
        layouts = lay_out(model, units, precision)
        check_exchangeable(layouts, groups)
        if values is not None:
            check_values(layouts)
        lines = [f"strategy {resolved.to_toml()}", f"{precision}", _told(values), *describe(layouts)]
        # Of another version a rank may lay out other transfers; of other groups it would meet nobody.
        lines += [f"towpath {version('towpath')}, torch {torch.__version__}"]
        lines += [f"process groups that were made so far: {groups.describe_made()}"]
        agree(groups, lines, None)
    except TowpathError as error:
        if lines:
            raise
        failure = error
        agree(groups, lines, failure)
        raise
    engine = build(model, Order(resolved, precision, values), layouts, groups)
    _become_sharded(model, engine)
    return model


def _told(values: Values | None) -> str:
    return "values as the model has them" if values is None else "values as values= gives them"


def _resolve(strategy: str | Strategy, topology: Topology | None, world: int) -> Strategy:
    if isinstance(strategy, str):
        assert topology is not None
        _check_world(topology, world)
        return presets.strategy(strategy, topology)
    if topology is not None and topology != strategy.topology:
        raise TopologyError(
            f"the strategy was made for {strategy.topology} (nodes × ranks), but topology={topology} was passed."
        )
    _check_world(strategy.topology, world)
    return strategy


def _check_world(topology: Topology, world: int) -> None:
    if topology.world != world:
        raise TopologyError(
            f"{topology.nodes} nodes of {topology.ranks_per_node} ranks are {topology.world} ranks, but the process "
            f"group has {world}. Start {topology.world} ranks, or pass the topology that is running."
        )


class ShardedModule(nn.Module):
    """What `shard` adds to a model."""

    towpath_engine: Engine

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As it was, of ShardTensors; inside `full_parameters` of whole tensors."""
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is not None and caller.f_code.co_name == "_get_model_state_dict":
            _refuse_full_state_dict(self.towpath_engine, caller.f_locals.get("info"))
        return super().state_dict(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """For the micro-steps before the boundary: gradients are reduced no further than to their G extent."""
        return self.towpath_engine.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also drops what the micro-steps since the last boundary have accumulated."""
        self.towpath_engine.discard()
        super().zero_grad(set_to_none)

    def unshard(self) -> None:
        """Make all parameters whole, on every rank, until `reshard()`."""
        unshard(self.towpath_engine)

    def reshard(self, *, modifier_rank: int | None = None) -> None:
        """Undo `unshard()`. What was written to the whole parameters, alike on every rank, is kept; or, if one is
        named, what `modifier_rank` has written. Every rank must call it."""
        reshard(self.towpath_engine, modifier_rank)

    def join(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """For data that ends sooner on some ranks: `for batch in model.join(loader)` goes on until the last is through.

        A rank that is through before gets its last batch again and again, and takes part in all that the others do; its
        gradients count as zero, while the mean is still taken over all ranks.
        """
        return joined(self.towpath_engine, batches)

    def broadcast_buffers(self, rank: int = 0) -> None:
        """Every rank's buffers (a BatchNorm's running statistics, say) become those of `rank`. Every rank must call it.

        The engine leaves buffers alone after `shard()`: where they depend on a rank's data, they differ.
        """
        for buffer in self.buffers():
            self.towpath_engine.wiring.groups.broadcast(buffer, rank)


def _refuse_full_state_dict(engine: Engine, options: Any) -> None:
    """PyTorch gathers DTensors only, without a word to others: it would hand out our slices as if they were whole."""
    if getattr(options, "full_state_dict", False) and not engine.is_unsharded:
        raise ShardError(
            "get_model_state_dict(full_state_dict=True) does not gather ShardTensors. Let every rank call it inside "
            "`with towpath.full_parameters(model):`; or save with towpath.checkpoint, and export with `towpath export`."
        )


def _check_class(model: nn.Module) -> None:
    if isinstance(model, ShardedModule):
        raise ShardError("the model is sharded already. Build it anew to shard it by another strategy.")
    taken = [n for n in ("no_sync", "unshard", "reshard", "join", "broadcast_buffers") if hasattr(model, n)]
    if taken:
        raise ShardError(
            f"{type(model).__name__} has {', '.join(taken)} of its own, which shard() would hide. Do not wrap the "
            "model (DistributedDataParallel, FSDP) before shard()."
        )


def _become_sharded(model: nn.Module, engine: Engine) -> None:
    become(model, ShardedModule)
    object.__setattr__(model, "towpath_engine", engine)


def _engine(model: nn.Module) -> Engine:
    if not isinstance(model, ShardedModule):
        raise ShardError(f"expected a model that towpath.shard() returned, got a plain {type(model).__name__}.")
    return model.towpath_engine


@contextmanager
def full_parameters(model: nn.Module, *, modifier_rank: int | None = None) -> Generator[None]:
    """Inside, all parameters of a sharded model are whole; what is written to them, alike on every rank, is kept.

    Ranks that wrote different values all raise an error that names the parameter. `modifier_rank`: the rank whose
    values all take over instead.
    """
    engine = _engine(model)
    if engine.is_unsharded:  # inside another such context, which ends it
        yield
        return
    unshard(engine)
    try:
        yield
    finally:
        reshard(engine, modifier_rank)


def schedule(
    strategy: Strategy,
    model_or_numels: nn.Module | Sequence[int] | Mapping[str, int],
    micro_steps: int = 1,
    precision: Precision | None = None,
    units: UnitChoice | None = None,
) -> Schedule:
    """The transfers of one optimizer step, with bytes sent per link class, computed without communication."""
    if not isinstance(strategy, Strategy):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StrategyError(f"schedule: expected a Strategy, as towpath.strategy() makes it; got {strategy!r}.")
    if isinstance(model_or_numels, ShardedModule):
        specs = tuple(u.plan.spec for u in model_or_numels.towpath_engine.units)
        precision = precision or model_or_numels.towpath_engine.precision
    elif isinstance(model_or_numels, nn.Module):
        specs = tuple(u.spec for u in lay_out(model_or_numels, units, precision))
    else:
        specs = units_from_numels(model_or_numels)
    return derive_schedule(strategy, specs, micro_steps, precision)


@dataclass(frozen=True, slots=True)
class Stats:
    """What a sharded model has done so far. Bytes: sent by all ranks together; seconds and memory: this rank's.

    `buffers_made`: how many buffers the engine has allocated; none after the second step of a training loop.
    `seconds_host`: what its bookkeeping took on the thread that trains, around every unit's forward and backward; the
    seconds that this thread waited for transfers are `seconds_exposed`.
    """

    transfers: tuple[TransferStats, ...]
    last_step: tuple[Transfer, ...]
    memory_bytes: dict[str, int]
    buffers_made: int
    seconds_host: float

    def since(self, earlier: Stats) -> Stats:
        """What was done after `earlier`, of the same model; memory and the last step as they are now."""
        before = {t.transfer: t for t in earlier.transfers}
        transfers = tuple(t.since(before[t.transfer]) if t.transfer in before else t for t in self.transfers)
        return replace(
            self,
            transfers=tuple(t for t in transfers if t.calls or t.seconds_exposed),
            buffers_made=self.buffers_made - earlier.buffers_made,
            seconds_host=self.seconds_host - earlier.seconds_host,
        )

    @property
    def inter_bytes(self) -> int:
        return sum(t.inter_bytes for t in self.transfers)

    @property
    def intra_bytes(self) -> int:
        return sum(t.intra_bytes for t in self.transfers)

    @property
    def seconds_exposed(self) -> float:
        return sum(t.seconds_exposed for t in self.transfers)

    def __str__(self) -> str:
        heads = f"{'inside nodes':>15} {'between nodes':>15} {'in flight':>10} {'exposed':>10}"
        lines = [f"{'kind':<16} {'calls':>6} {heads}"]
        for kind in dict.fromkeys(t.transfer.kind for t in self.transfers):
            mine = [t for t in self.transfers if t.transfer.kind is kind]
            lines.append(
                f"{kind.value:<16} {sum(t.calls for t in mine):>6} {sum(t.intra_bytes for t in mine):>15,} "
                f"{sum(t.inter_bytes for t in mine):>15,} {sum(t.seconds_in_flight for t in mine):>9.3f}s "
                f"{sum(t.seconds_exposed for t in mine):>9.3f}s"
            )
        memory = ", ".join(f"{k} {v:,}" for k, v in self.memory_bytes.items() if v)
        lines.append(f"memory: {memory} bytes, in {self.buffers_made} buffers")
        lines.append(f"the engine itself: {self.seconds_host:.3f}s on the thread that trains")
        return "\n".join(lines)


def stats(model: nn.Module) -> Stats:
    """Bytes, calls and seconds per transfer and link class, and memory by kind, of a sharded model."""
    engine = _engine(model)
    memory = engine.memory_bytes()
    memory["optimizer"] = _optimizer_bytes(engine)
    record = engine.wiring.record
    return Stats(tuple(record.totals()), record.last_step, memory, engine.buffers_made, record.host.seconds)


def record_of(model: nn.Module) -> Record:
    """What counts a sharded model's transfers: a look at its sums is quicker than `stats`."""
    return _engine(model).wiring.record


@contextmanager
def tracing(model: nn.Module) -> Generator[Trace]:
    """Inside, what a sharded model's steps do is recorded; afterwards the trace's `intervals` tell it.

    Every rank must trace the same steps: they begin together, which makes their clocks comparable.
    """
    wiring = _engine(model).wiring
    if wiring.record.trace is not None:
        raise StepError("tracing: this model is being traced already. Leave the first `with tracing(...)` before.")
    wiring.queues.finish()
    # Twice: whoever came early to the first is as late as all the others for the second.
    wiring.groups.barrier()
    wiring.groups.barrier()
    trace = wiring.record.trace = Trace(wiring.record.timer)
    try:
        yield trace
        wiring.queues.finish()
    finally:
        wiring.record.trace = None
    trace.end()


def intervals_of_ranks(model: nn.Module, trace: Trace) -> dict[int, tuple[Interval, ...]]:
    """On rank 0 what every rank traced, by rank; elsewhere nothing. Every rank must call this."""
    return dict(enumerate(_engine(model).wiring.groups.collect_objects(trace.intervals)))


def _optimizer_bytes(engine: Engine) -> int:
    parameters = [p for unit in engine.units for p in unit.parameters]
    mine = {id(p) for p in parameters}
    if not engine.optimizers:
        engine.optimizers.update(optimizers_of(parameters))
    states = [
        value
        for optimizer in engine.optimizers
        for parameter, state in optimizer.state.items()
        if id(parameter) in mine
        for value in state.values()
        if isinstance(value, ShardTensor)
    ]
    return sum(value.to_local().nbytes for value in states)
