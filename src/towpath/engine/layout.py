"""A model as units: which parameters are gathered together, and where each lies in its unit's flat buffers."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from towpath.core.formats import FLOATING, Precision, dtype_name
from towpath.core.units import BucketSpec, UnitSpec, together
from towpath.engine.parameters.parallel import Parallel, boxes_in_whole, local_part, parallel_of, ranges_of
from towpath.errors import ShardError
from towpath.topology.groups import Groups

# --- dtypes -----------------------------------------------------------------------------------------------------------
#
# PyTorch's dtypes by the names that strategies and plans have for them.


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


UnitChoice = Iterable[type[nn.Module] | nn.Module]

Holder = dict[Any, Any]  # or a list, by index


@dataclass(slots=True)
class ParameterPlace:
    """A parameter: its names (more than one when tied), the modules that own it, and where it lies."""

    names: list[str]
    owners: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    shape: torch.Size  # of this rank's part of it, which is all of it unless it is split over a tensor-parallel mesh
    parallel: Parallel | None
    exact: bool = False  # of a module that the precision keeps in its own dtype
    replicated: bool = False  # on a tensor-parallel mesh
    offset: int = 0  # as soon as the plan has laid out the bucket
    # Lists, dicts and attributes of modules that hold it besides, alone or in a tuple, and under which key.
    kept: list[tuple[Holder, Any]] = field(default_factory=list[tuple[Holder, Any]])

    @property
    def key(self) -> tuple[str, bool, bool]:
        """What the parameters of one bucket have in common."""
        return dtype_name(self.parameter.dtype), self.parameter.requires_grad, self.exact

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def matrix(self) -> tuple[int, int] | None:
        """Its rows and columns, if its gradient may travel in low rank. What a mesh replicates may not: each of its
        ranks would round for itself, and the copies drift apart."""
        if len(self.shape) < 2 or self.replicated:
            return None
        return self.shape[0], self.shape[1:].numel()

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The elements [start, end) of this rank's part, flattened, as ranges of the whole parameter's elements."""
        if self.parallel is None:
            yield start, end
            return
        for box in boxes_in_whole(self.shape, self.parallel, start, end):
            yield from ranges_of(box, self.parallel.shape)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Where this parameter lies in the whole flat buffer."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(slots=True)
class BucketLayout:
    unit: str
    spec: BucketSpec
    places: list[ParameterPlace]

    def follow(self, planned: BucketSpec) -> None:
        """Parameters lie where the plan has them: it knows in what blocks they are encoded."""
        for place, offset in zip(self.places, planned.offsets, strict=False):
            place.offset = offset


@dataclass(slots=True)
class UnitLayout:
    name: str
    modules: list[nn.Module]  # more than one where small neighbours travel together
    spec: UnitSpec
    buckets: list[BucketLayout]


def lay_out(model: nn.Module, units: UnitChoice | None = None, precision: Precision | None = None) -> list[UnitLayout]:
    """The root unit first, then the others in the order of registration."""
    inner = _together(_default_units(model)) if units is None else _alone(_chosen_units(model, units))
    chosen = {"": [model], **inner}
    places = _places(model)
    _mark_exact(places, kept_modules(model, precision or Precision()))
    on_a_mesh = any(place.parallel is not None for place in places)
    for place in places:
        place.replicated = on_a_mesh and (place.parallel is None or not place.parallel.is_split)
    homes = {id(module): name for name, modules in chosen.items() for module in modules}
    mine: dict[str, list[ParameterPlace]] = {name: [] for name in chosen}
    inside = _unit_of_modules(model, homes)
    for place in places:
        # A parameter that several units use belongs to the root, which is whole while any of them runs.
        owners = {inside[id(module)] for module, _ in place.owners}
        mine[owners.pop() if len(owners) == 1 else ""].append(place)
    return [_unit(name, modules, mine[name]) for name, modules in chosen.items() if mine[name] or name == ""]


def _unit(name: str, modules: list[nn.Module], places: list[ParameterPlace]) -> UnitLayout:
    """One bucket for each dtype and trainability, so that a LoRA run reduces only what trains."""
    buckets: list[BucketLayout] = []
    for key in dict.fromkeys(p.key for p in places):
        inside = [p for p in places if p.key == key]
        matrices = tuple(p.matrix for p in inside)
        spec = BucketSpec(tuple(p.numel for p in inside), *key, matrices=matrices)
        buckets.append(BucketLayout(name, spec, inside))
    return UnitLayout(name, modules, UnitSpec(name, tuple(b.spec for b in buckets), kept=name == ""), buckets)


def _default_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the children of every ModuleList or Sequential of like blocks. Nothing inside a unit is a unit again.

    A child that never runs, such as a ModuleList of its own, is no unit: those of its modules that run are.
    """
    found: dict[str, nn.Module] = {}
    taken: set[nn.Module] = set()  # one that several lists share is the first one's

    def visit(module: nn.Module, prefix: str) -> None:
        children = list(module.named_children())
        like = isinstance(module, (nn.ModuleList, nn.Sequential)) and len({type(c) for _, c in children}) == 1
        for name, child in children:
            path = f"{prefix}{name}"
            if like and _has_parameters(child):
                found.update((name, m) for name, m in _that_run(child, path) if m not in taken)
                taken.update(found.values())
            else:
                visit(child, f"{path}.")

    visit(model, "")
    return found


def _that_run(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield `module` if it has a forward, else the outermost modules inside it that have one, and have parameters."""
    if has_forward(module):
        yield path, module
        return
    for name, child in module.named_children():
        if _has_parameters(child):
            yield from _that_run(child, f"{path}.{name}")


def has_forward(module: nn.Module) -> bool:
    """Return whether `module` can be called. Lists and dicts of modules cannot."""
    return type(module).forward is not nn.Module.forward


def _alone(units: dict[str, nn.Module]) -> dict[str, list[nn.Module]]:
    return {name: [module] for name, module in units.items()}


def _together(units: dict[str, nn.Module]) -> dict[str, list[nn.Module]]:
    """Small neighbours in one container become one unit."""
    merged: dict[str, list[nn.Module]] = {}
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in units.items()}
    for _, names in groupby(units, lambda name: name.rpartition(".")[0]):
        names = list(names)
        for batch in together([sizes[name] for name in names]):
            first, last = names[batch[0]], names[batch[-1]]
            merged[first if first == last else f"{first}..{last}"] = [units[names[i]] for i in batch]
    return merged


def _chosen_units(model: nn.Module, units: UnitChoice) -> dict[str, nn.Module]:
    classes: list[type[nn.Module]] = []
    modules: list[nn.Module] = []
    for unit in units:
        if isinstance(unit, type) and issubclass(unit, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            classes.append(unit)
        elif isinstance(unit, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            modules.append(unit)
        else:
            raise ShardError(f"units: expected module classes or modules, got {unit!r}.")
    wanted = {id(m) for m in modules}
    found = {
        name: module
        for name, module in model.named_modules()
        if name and _has_parameters(module) and (isinstance(module, tuple(classes)) or id(module) in wanted)
    }
    missing = [c.__name__ for c in classes if not any(isinstance(m, c) for m in found.values())]
    missing += [type(m).__name__ for m in modules if all(m is not f for f in found.values())]
    if missing:
        raise ShardError(
            f"units: no submodule with parameters matches {', '.join(missing)}; "
            f"the model has {', '.join(sorted({type(m).__name__ for m in model.modules()}))}."
        )
    return found


def kept_modules(model: nn.Module, precision: Precision) -> list[nn.Module]:
    """The modules that `precision` keeps in their own dtype, with all that is inside them; the outermost of them."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if precision.keeps(name, type(module)) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    for wanted in precision.keep if precision.params or precision.reduce else ():
        if not any(replace(precision, keep=(wanted,)).keeps(n, type(m)) for n, m in model.named_modules()):
            raise ShardError(
                f"Precision(keep=): no module matches {wanted}; the model has "
                f"{', '.join(sorted({type(m).__name__ for m in model.modules()}))}."
            )
    return list(found.values())


def _mark_exact(places: list[ParameterPlace], kept: list[nn.Module]) -> None:
    inside = {id(m) for outermost in kept for m in outermost.modules()}
    for place in places:
        owners = {id(owner) in inside for owner, _ in place.owners}
        if len(owners) > 1:
            raise ShardError(
                f"Precision(keep=): {' and '.join(place.names)} are one parameter, and keep= names a module of one of "
                "them only. Name the modules of both, or of neither."
            )
        place.exact = owners == {True}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _unit_of_modules(model: nn.Module, homes: dict[int, str]) -> dict[int, str]:
    """The innermost unit around every module; the root for one that is reached from several units."""
    inside: dict[int, str] = {}

    def visit(module: nn.Module, unit: str) -> None:
        unit = homes.get(id(module), unit)
        if inside.get(id(module)) == unit:
            return
        inside[id(module)] = unit if id(module) not in inside else ""
        for child in module.children():
            visit(child, unit)

    visit(model, "")
    return inside


def _places(model: nn.Module) -> list[ParameterPlace]:
    found: dict[int, ParameterPlace] = {}
    # A part that is sharded by itself, as tied embeddings of a pipeline are, has an engine of its own.
    apart = tuple(f"{name}." for name, module in model.named_modules() if name and hasattr(module, "towpath_engine"))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(apart):
            continue
        path, _, attribute = name.rpartition(".")
        owner = (model.get_submodule(path), attribute)
        if id(parameter) not in found:
            parallel = _check_class(name, parameter)
            found[id(parameter)] = ParameterPlace([], [], parameter, local_part(parameter).shape, parallel)
        place = found[id(parameter)]
        place.names.append(name)
        if owner not in place.owners:
            place.owners.append(owner)
    places = list(found.values())
    _check(places)
    return places


def _check_class(name: str, parameter: nn.Parameter) -> Parallel | None:
    parallel = parallel_of(parameter)
    if type(parameter) is not nn.Parameter and parallel is None:
        raise ShardError(
            f"{name} is a {type(parameter).__name__}; shard() takes plain parameters, and DTensors on a "
            "tensor-parallel mesh. A lazy one needs a forward pass first; a model that is sharded already cannot be "
            "sharded again."
        )
    return parallel


def _check(places: list[ParameterPlace]) -> None:
    for place in places:
        parameter, name = place.parameter, place.names[0]
        if dtype_name(parameter.dtype) not in FLOATING:
            raise ShardError(f"{name} is {parameter.dtype}; parameters may be {', '.join(FLOATING)}.")
    _check_meshes(places)
    devices = sorted({str(p.parameter.device) for p in places} - {"meta"})
    if len(devices) > 1:
        raise ShardError(f"the model's parameters lie on {', '.join(devices)}; move them to one device before shard().")


def _check_meshes(places: list[ParameterPlace]) -> None:
    split = [p for p in places if p.parallel is not None]
    for place in split:
        first, mine = split[0].parallel, place.parallel
        assert first is not None and mine is not None
        if mine.mesh != first.mesh:
            raise ShardError(
                f"{place.names[0]} is a DTensor on {mine.mesh}, and {split[0].names[0]} on {first.mesh}: shard() takes "
                "one tensor-parallel mesh for the whole model."
            )
        if any(placement.is_partial() for placement in mine.placements):
            raise ShardError(f"{place.names[0]} is a partial sum, {mine.placements}: redistribute it before shard().")


def describe(model: nn.Module, layouts: list[UnitLayout]) -> Iterator[str]:
    """One line for every parameter and buffer, the same on every rank that was given the same model."""
    for unit in layouts:
        for bucket in unit.buckets:
            for place in bucket.places:
                shape = _shape(place.shape)
                shape += f" {place.parallel.describe()}" if place.parallel is not None else ""
                state = ("trains" if bucket.spec.trainable else "frozen") + (" exactly" if bucket.spec.exact else "")
                yield f"{place.names[0]}: {shape} {bucket.spec.dtype} {state}, in unit {unit.name or 'root'!r}"
    for name, buffer in model.named_buffers():
        # A buffer on the meta device is made where the parameters lie: one rank may have values, and others none.
        device = buffer.device if buffer.device.type != "meta" else device_of(layouts)
        path, _, attribute = name.rpartition(".")
        passing = attribute in model.get_submodule(path)._non_persistent_buffers_set  # pyright: ignore
        kept = "buffer that is not saved" if passing else "buffer"
        yield f"{name}: {_shape(buffer.shape)} {buffer.dtype} {kept} on {device.type}"


def _shape(shape: torch.Size) -> str:
    return "×".join(map(str, shape)) or "scalar"


def device_of(layouts: list[UnitLayout], groups: Groups | None = None) -> torch.device:
    """Return the device of the parameters. Those on the meta device go where the others are, or to the ranks' own."""
    parameters = [p.parameter for unit in layouts for bucket in unit.buckets for p in bucket.places]
    if not parameters:
        raise ShardError("the model has no parameters; there is nothing to shard.")
    return device_of_parameters(parameters, groups or Groups())


def device_of_parameters(parameters: Iterable[nn.Parameter], groups: Groups) -> torch.device:
    """Return the device on which `parameters` are, or are to be made if all of them are on the meta device."""
    return next((p.device for p in parameters if p.device.type != "meta"), groups.device)


# --- kept tensors -----------------------------------------------------------------------------------------------------
#
# What modules hold of their parameters beside registering them: found, or refused, before the model is sharded.
#
# In one process all tensors on a parameter's memory change with it, and a list may hold a parameter like any other
# object. `shard()` gives parameters other memory, and lets the modules compute with whole views. So a list or dict
# that holds a parameter is one more place in which the view is shown. Other tensors on its memory are refused.


# What nn.Module itself keeps in a module's __dict__.
_OF_THE_CLASS = frozenset(vars(nn.Module()))
# Lists of a recurrent module, which `Unit.show` renews.
_OF_RECURRENT = frozenset({"_flat_weights", "_flat_weight_refs"})


def check_memory(places: Sequence[ParameterPlace]) -> None:
    """Refuse parameters that lie in one another's memory. Neighbours in one memory are fine."""
    for sharing in _by_storage(places).values():
        sharing.sort(key=lambda pair: _bounds(pair[1])[0])
        for number, (place, values) in enumerate(sharing):
            for other, theirs in sharing[number + 1 :]:
                if _bounds(theirs)[0] >= _bounds(values)[1]:
                    break
                if _overlap(values, theirs):
                    raise ShardError(
                        f"{place.names[0]!r} and {other.names[0]!r} are two parameters on the same memory. After "
                        "shard() each would train a copy of its own. To tie them let both modules have one parameter, "
                        "as in b.weight = a.weight; else give the second memory of its own: nn.Parameter(t.clone())."
                    )


def find_kept(model: nn.Module, places: Sequence[ParameterPlace]) -> None:
    """Write down in each place which lists, dicts and attributes hold its parameter, too."""
    known = {id(place.parameter): place for place in places}
    memory = _by_storage(places)
    seen: set[int] = set()
    for path, module in model.named_modules():
        for holder, key, name in _attributes(module, path):
            for inside, at, item, where in _items(holder, key, holder[key], name, seen):
                for tensor in item if isinstance(item, tuple) else (item,):
                    place = known.get(id(tensor))
                    if place is not None:
                        place.kept.append((inside, at))
                    elif _has_memory(tensor):
                        _check_alias(tensor, where, memory)


def exchanged(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """What a holder holds in place of `value`, which is `old` or a tuple with it."""
    if not isinstance(value, tuple):
        return new
    items: list[Any] = [new if item is old else item for item in cast(tuple[Any, ...], value)]
    kind: Any = type(cast(object, value))
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _attributes(module: nn.Module, path: str) -> Iterator[tuple[Holder, Any, str]]:
    """Where a module holds something that it has not registered as a parameter or a module; and its name."""
    hooks = module._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]
    # torch.nn.utils.spectral_norm and its like keep under this name what they compute anew in every forward.
    computed = {name for hook in hooks if isinstance(name := getattr(hook, "name", None), str)}
    skipped = _OF_THE_CLASS | computed | (_OF_RECURRENT if isinstance(module, nn.RNNBase) else set())
    prefix = f"{path}." if path else ""
    for key in [key for key in vars(module) if key not in skipped]:
        yield vars(module), key, f"{prefix}{key}"
    for key in module._buffers:  # pyright: ignore[reportPrivateUsage]
        yield cast(Holder, module._buffers), key, f"{prefix}{key}"  # pyright: ignore[reportPrivateUsage]


def _items(holder: Holder, key: Any, value: Any, name: str, seen: set[int]) -> Iterator[tuple[Holder, Any, Any, str]]:
    """The tensors, and tuples with tensors, in a value that may be a list or dict of such."""
    if isinstance(value, (list, dict)):
        if id(value) in seen:
            return
        seen.add(id(value))
        inside = cast(Holder, value)
        pairs: Iterable[Any] = enumerate(cast(Any, value)) if isinstance(value, list) else cast(Any, value).items()
        for at, item in list(pairs):
            yield from _items(inside, at, item, f"{name}[{at!r}]", seen)
    elif isinstance(value, (torch.Tensor, tuple)):
        yield holder, key, value, name


def _check_alias(
    tensor: torch.Tensor, where: str, memory: dict[int, list[tuple[ParameterPlace, torch.Tensor]]]
) -> None:
    for place, values in memory.get(tensor.untyped_storage().data_ptr(), ()):
        if _overlap(values, tensor):
            raise ShardError(
                f"{where!r} is a tensor on the memory of the parameter {place.names[0]!r}, such as .data, detach() or "
                "a slice gives. After shard() it would keep the values of now. Keep the parameter itself, or take the "
                "slice inside the forward; if it is to stay as it is now, keep a clone()."
            )


def _by_storage(places: Sequence[ParameterPlace]) -> dict[int, list[tuple[ParameterPlace, torch.Tensor]]]:
    found: dict[int, list[tuple[ParameterPlace, torch.Tensor]]] = {}
    for place in places:
        values = local_part(place.parameter)
        if _has_memory(values):
            found.setdefault(values.untyped_storage().data_ptr(), []).append((place, values))
    return found


def _has_memory(value: object) -> bool:
    """Whether it is a plain tensor with elements. Subclasses may have none."""
    if type(value) not in (torch.Tensor, nn.Parameter):
        return False
    tensor = cast(torch.Tensor, value)
    return tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its memory begins and ends, in bytes."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common."""
    (start, end), (begin, stop) = _bounds(one), _bounds(other)
    if start >= stop or begin >= end:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    # Columns of one matrix, say, lie between one another: look at each byte.
    taken = torch.zeros(max(end, stop) - min(start, begin), dtype=torch.bool)

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        strides = [stride * tensor.itemsize for stride in tensor.stride()]
        return taken.as_strided((*tensor.shape, tensor.itemsize), (*strides, 1), tensor.data_ptr() - min(start, begin))

    bytes_of(one).fill_(True)
    return bool(bytes_of(other).any())


# --- free memory ------------------------------------------------------------------------------------------------------
#
# How much memory this rank may still take: of its GPU, or its share of what its host has left.


_MEMINFO, _BOOT = Path("/proc/meminfo"), Path("/proc/sys/kernel/random/boot_id")


def least_free_bytes(layouts: list[UnitLayout], groups: Groups) -> int | None:
    """On the rank that has least, with what the model's own parameters there will give back. Every rank must ask.

    None where no rank can tell, as on a host that is no Linux.
    """
    device = device_of(layouts, groups)
    places = [place for unit in layouts for bucket in unit.buckets for place in bucket.places]
    own = [local_part(p.parameter) for p in places if p.parameter.device.type != "meta"]
    returned = sum(values.numel() * values.element_size() for values in own)
    told: list[tuple[str, int | None, int]] = groups.gather_objects((_host(), _free(device), returned))
    hosts = [host for host, _, _ in told]
    found: list[int] = []
    for host, free, theirs in told:
        if free is not None:
            found.append((free if device.type == "cuda" else free // hosts.count(host)) + theirs)
    return min(found, default=None)


def _free(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes() if device.type == "cpu" else None


def available_bytes() -> int | None:
    """What processes on this host can still take; None where it does not tell, as one that is no Linux."""
    if not _MEMINFO.exists():
        return None
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), None)


def _host() -> str:
    """The machine, whatever names its containers have."""
    return _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
