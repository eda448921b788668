"""The initial values of a model's shards, one bucket at a time, so that no rank ever holds the unsharded model.

FromModel    the values of rank 0's model, or those that its modules initialize; rank 0 broadcasts each unsharded bucket
             that differs on another rank
FromValues   the user's `values(name, start, end)`; each rank calls it only for the elements that it holds

Transformers models get a `reset_parameters()` for each module, by which `FromModel` initializes them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from towpath.core.placement import Partition
from towpath.core.unit_plan import BucketPlan
from towpath.engine.layout import BucketLayout, ParameterPlace, is_saved, torch_dtype
from towpath.engine.parameters.checksum import checksum
from towpath.engine.parameters.dtensors import TensorParallelMesh, local_part
from towpath.errors import ConfigError, ShardError, TowpathError
from towpath.topology.groups import Groups

# `values(name, start, end)` returns the elements [start, end) of the parameter `name` in row-major order. They are 1-D
# and have any floating dtype. It raises KeyError for an unknown name. Each name of a tied parameter is tried until one
# is known. Persistent buffers with known names get their values from it too. If it fails on one rank, all ranks raise.
Values = Callable[[str, int, int], torch.Tensor]


# Returns this rank's slice of a bucket's initial values in a partition, in new memory. `Bucket` takes its slices before
# the next bucket is requested.
TakeSlice = Callable[[Partition, torch.dtype], torch.Tensor]


class InitialValues(ABC):
    """The source of a model's initial values. `build` uses one for all buckets and buffers.

    `failure` is the error of this rank, if any, once all values were requested. Other ranks do not know it yet.
    """

    failure: TowpathError | None = None

    @abstractmethod
    def flat(self, layout: BucketLayout, plan: BucketPlan) -> TakeSlice:
        """Return the initial values of one bucket."""

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Return the values of the persistent buffer `name`, or `buffer` itself if the model has the values."""
        return buffer


@final
class FromModel(InitialValues):
    """The values that rank 0's model has, or that rank 0's modules initialize if they are on the meta device."""

    def __init__(
        self, groups: Groups, mesh: TensorParallelMesh, device: torch.device, job: Groups, starts: bool
    ) -> None:
        """Prepare for the ranks in `groups`, which get the values of rank 0 of `job`.

        Ranks that do not start take no values from their own model, which may have none.
        """
        self._rank, self._job, self._mesh, self._device, self._starts = groups.rank, job, mesh, device, starts
        self._room = torch.empty(0, dtype=torch.uint8, device=device)

    def flat(self, layout: BucketLayout, plan: BucketPlan) -> TakeSlice:
        """Initialize one unsharded bucket on each rank that starts, and overwrite it with rank 0's values."""
        dtype = torch_dtype(plan.own_dtype)
        nbytes = plan.numel * dtype.itemsize
        if self._room.numel() < nbytes:
            # All buckets share one buffer, or the heap would get fragmented. It is freed before a larger one is made.
            self._room = self._room.new_empty(0)
            self._room = self._room.new_empty(nbytes)
        whole = self._room[:nbytes].view(dtype).zero_()
        if self._starts:
            with torch.no_grad(), _materialised(layout.places, whole):
                for place in layout.places:
                    module, attribute = place.owners[0]
                    values, target = local_part(module.get_parameter(attribute)), place.of(whole)
                    if values.data_ptr() != target.data_ptr():
                        target.copy_(values)
        # Ranks that have the same values, such as after the same seed, send no more than a checksum over slow links.
        mine = checksum(whole).item() if self._starts and self._job.world > 1 else None
        if len(set(self._job.all_gather_objects(mine))) > 1:
            self._job.broadcast(whole)
        for place in layout.places:
            # The ranks of a tensor-parallel mesh may have drawn other values for what they hold copies of.
            for group in self._mesh.copies(place.parallel):
                dist.broadcast(place.of(whole), group=group, group_src=0)
        return lambda cut, dtype: whole.view(cut.count, -1)[cut.slots[self._rank]].to(dtype, copy=True)


# The most elements in one call of `values`, which may have to hold in memory what it reads.
MOST_PER_CALL = 1 << 22


@final
class FromValues(InitialValues):
    """The values that the user's function returns (`shard(values=)`).

    After a failure the remaining parameters are zero, so that the ranks can finish their collectives. Then all raise.
    """

    def __init__(self, values: Values, rank: int, device: torch.device) -> None:
        self._values, self._rank, self._device = values, rank, device

    def flat(self, layout: BucketLayout, plan: BucketPlan) -> TakeSlice:
        """Return the values of one bucket. The user's function is called when slices are taken."""

        def part(cut: Partition, dtype: torch.dtype) -> torch.Tensor:
            length = plan.numel // cut.count
            begin = cut.slots[self._rank] * length
            part = torch.zeros(length, dtype=dtype, device=self._device)
            for place in layout.places:
                start, end = (min(max(at - place.offset, 0), place.numel) for at in (begin, begin + length))
                if start < end:
                    at = place.offset + start - begin
                    for first, last in place.ranges(start, end):
                        self.fill(part[at : at + last - first], place.names, first)
                        at += last - first
            return part

        return part

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Return the values of buffer `name`, or its current values if the user's function does not know the name."""
        found = torch.empty_like(buffer)
        return found if self.fill(found.view(-1), [name], 0, needed=False) else buffer

    def fill(self, target: torch.Tensor, names: Sequence[str], start: int, needed: bool = True) -> bool:
        """Fill `target` with the elements from `start` on, under the first known name. Return whether one was known."""
        # An error is kept for `failure`. That no name is known counts as an error only if `needed`.
        for name in names:
            try:
                for at in range(0, target.numel(), MOST_PER_CALL):
                    piece = target[at : at + MOST_PER_CALL]
                    if self.failure is None:
                        piece.copy_(self._call_values(name, start + at, start + at + piece.numel(), piece))
                return True
            except KeyError:
                continue
            except TowpathError as error:
                self.failure = error
            except Exception as error:
                self.failure = ShardError(f"values of {name} from {start} on: {type(error).__name__}: {error}")
                # The error is raised after collectives, so a plain `raise ... from` is not possible here.
                self.failure.__cause__ = error
        if needed and self.failure is None:
            self.failure = ShardError(
                f"values knows no parameter {' or '.join(map(repr, names))}: it raised KeyError. Pass values of this "
                "model, under the names that named_parameters() gives."
            )
        return False

    def _call_values(self, name: str, start: int, end: int, like: torch.Tensor) -> torch.Tensor:
        found = self._values(name, start, end)
        if found.shape != (end - start,) or found.is_floating_point() != like.is_floating_point():
            kind = "floating" if like.is_floating_point() else "whole"
            raise ShardError(
                f"values({name!r}, {start}, {end}) gave {found.dtype} of shape {tuple(found.shape)}; expected "
                f"{end - start} {kind} numbers in one dimension."
            )
        return found.detach()


@contextmanager
def _materialised(places: Iterable[ParameterPlace], flat: torch.Tensor) -> Generator[None]:
    """Initialize the parameters of `places` that are on the meta device in `flat`, for the duration of the context."""
    absent = [p for p in places if p.parameter.device.type == "meta"]
    owners = {id(p.owners[0][0]): p.owners[0][0] for p in absent}
    # A module initializes all its parameters at once. Those that belong to another bucket get temporary memory.
    before = [(module, dict(_parameters(module))) for p in absent for module, _ in p.owners]
    for module in owners.values():
        for attribute, parameter in _parameters(module).items():
            if parameter is not None:
                # Of the full shape for a DTensor, too. To initialize local parts would be wrong: with equal seeds all
                # parts would be equal, and with different seeds the replicated parts would differ.
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=flat.device)
                _parameters(module)[attribute] = nn.Parameter(values, parameter.requires_grad)
    for place in absent:
        if place.parallel is None:
            _set_parameter(place, nn.Parameter(place.of(flat), place.parameter.requires_grad))
    try:
        for place in absent:
            module, attribute = place.owners[0]
            if owners.pop(id(module), None) is not None:
                _initialiser(module, f"parameter {attribute!r}", place.names[0])()
        for place in absent:
            if place.parallel is not None:
                _take_local_part(place, flat)
        yield
    finally:
        for module, parameters in before:
            _parameters(module).update(parameters)


def _take_local_part(place: ParameterPlace, flat: torch.Tensor) -> None:
    """Copy this rank's part of a DTensor to `flat`, from the full tensor that the mesh's first rank initialized."""
    module, attribute = place.owners[0]
    whole, parallel = module.get_parameter(attribute), place.parallel
    assert parallel is not None
    # Every rank of the mesh has initialized the full tensor, with its own random numbers. The first rank's count.
    for group in parallel.mesh.get_all_groups():
        dist.broadcast(whole.detach(), group=group, group_src=0)
    part = tuple(slice(first, first + length) for first, length in zip(parallel.first(), place.shape, strict=True))
    place.of(flat).copy_(whole[part])
    _set_parameter(place, nn.Parameter(parallel.wrap(place.of(flat)), place.parameter.requires_grad))


def _set_parameter(place: ParameterPlace, values: nn.Parameter) -> None:
    for module, attribute in place.owners:
        _parameters(module)[attribute] = values


def _parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return module._parameters  # pyright: ignore[reportPrivateUsage]


def move_all_but_parameters(model: nn.Module, device: torch.device) -> None:
    """Move buffers to `device` as `model.to(device)` does, and what modules move besides, such as metrics."""
    hidden = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    for module, name, _ in hidden:
        _parameters(module)[name] = None
    try:
        # `.to()` would move all parameters at once, and unsharded they may not fit.
        model.to(device)
    finally:
        for module, name, parameter in hidden:
            # A recurrent module keeps a list of them, too.
            setattr(module, name, parameter)


def check_initialisers(model: nn.Module, places: Iterable[ParameterPlace]) -> None:
    """Raise ShardError if a parameter of `places` is on the meta device, and its module cannot initialize it."""
    for path, module in model.named_modules():
        # PEFT alone knows that some of its adapters begin at zero.
        adapters = getattr(module, "adapter_layer_names", ())  # the layers of PEFT have this
        for name, parameter in module.named_parameters() if adapters else ():
            if parameter.is_meta and name.partition(".")[0] in adapters:
                raise ShardError(
                    f"{path}.{name} is on the meta device, and only PEFT can initialize its adapters. Load the model "
                    "on a real device on rank 0, whose values all ranks take, or pass values=, which gives them."
                )
    for place in places:
        if place.parameter.is_meta:
            module, attribute = place.owners[0]
            _initialiser(module, f"parameter {attribute!r}", place.names[0])


def materialise_buffers(model: nn.Module, device: torch.device, starts: bool, source: InitialValues) -> None:
    """Make the buffers that are on the meta device."""
    # Ranks that start initialize them with `reset_parameters`. A module needs none if `source` gives all their values.
    for path, module in model.named_modules():
        absent = [name for name, b in module.named_buffers(recurse=False) if b.is_meta]
        for name in absent:
            setattr(module, name, torch.empty_like(module.get_buffer(name), device=device))
        for name in absent if starts else ():
            known = f"{path}.{name}" if path else name
            buffer, initializes = module.get_buffer(name), _initialiser_of(module) is not None
            # A failure of the user's function is raised after all values.
            given = not initializes and is_saved(model, known) and source.buffer(known, buffer) is not buffer
            if not (given or source.failure is not None) or initializes:
                _initialiser(module, f"buffer {name!r}", known)()
                break


def _initialiser_of(module: nn.Module) -> Callable[[], Any] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _initialiser(module: nn.Module, what: str, name: str) -> Callable[[], Any]:
    if (found := _initialiser_of(module)) is not None:
        return found
    raise ShardError(
        f"{name} is on the meta device, and {type(module).__name__} has no reset_parameters() that would give its "
        f"{what} values. Add the method, or build the model on a real device on rank 0, whose values all ranks take."
    )


# Each module of a Transformers model on the meta device gets a `reset_parameters()` that calls the model's
# `_init_weights` on it, and then on the modules around it: GPT-2 scales a projection from the attention that holds it.
# Buffers that no file keeps, such as rotary frequencies, get their values in the same way.

# A module and those around it, from the inside out, each with the `_init_weights` that applies to it.
Chain = tuple[tuple[nn.Module, Callable[[nn.Module], None]], ...]


def add_reset_parameters(model: nn.Module) -> None:
    """Give the modules of each Transformers model in `model`, or of `model` itself, a `reset_parameters()`."""
    # Importing Transformers takes seconds, and a model of it has imported it already.
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        _add(model, model, (), None)
    else:
        for child in model.children():
            add_reset_parameters(child)


def _add(model: nn.Module, module: nn.Module, around: Chain, initialize: Any) -> None:
    initialize = getattr(module, "_init_weights", initialize)
    chain: Chain = ((module, initialize), *around)
    if any(True for _ in _own_tensors(module)):
        module.reset_parameters = partial(_reset, model, chain)  # pyright: ignore[reportArgumentType]
    for child in module.children():
        _add(model, child, chain, initialize)


def _reset(model: nn.Module, chain: Chain) -> None:
    """Initialize the first module of `chain`: with its own `_init_weights`, then those of the modules around it."""
    # Its buffers are filled with NaN, or the least integer, before. So a buffer that gets no values is found.
    from transformers import initialization

    module = chain[0][0]
    buffers = {
        n: b for n, b in module.named_buffers(recurse=False) if b.device.type != "meta" and b.dtype != torch.bool
    }
    for buffer in buffers.values():
        buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min)
    # Transformers marks tensors that a file has given values, and its init functions leave these as they are.
    with torch.no_grad(), initialization.guard_torch_init_functions(), _others_marked_initialized(model, module):
        for part, initialize in chain:
            initialize(part)
    for name, buffer in buffers.items():
        if (buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min).any():
            raise ConfigError(f"{type(module).__name__} gives its buffer {name!r} no values when it is built on meta.")


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


@contextmanager
def _others_marked_initialized(model: nn.Module, module: nn.Module) -> Generator[None]:
    """Mark all tensors except those of `module`, so that transformers draws no values for them."""
    own = {id(t) for t in _own_tensors(module)}
    others: list[Any] = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in own]
    for tensor in others:
        tensor._is_hf_initialized = True
    try:
        yield
    finally:
        for tensor in others:
            del tensor._is_hf_initialized
