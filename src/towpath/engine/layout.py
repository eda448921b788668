"""The division of a model into units and buckets, before it is sharded.

`lay_out` decides which parameters are gathered together, and describes each of them. The end of the file measures the
free memory of the ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from towpath.core.formats import FLOATING, Precision, dtype_name, shape_text
from towpath.core.owner_stepped import OwnedParameter
from towpath.core.units import LARGE_LEAF, BucketSpec, UnitSpec, together
from towpath.engine.parameters.dtensors import MeshPlacements, boxes_in_whole, local_part, parallel_of, ranges_of
from towpath.errors import ShardError
from towpath.topology.groups import Groups


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


UnitChoice = Iterable[type[nn.Module] | nn.Module]

Holder = dict[Any, Any]  # or a list, by index


@dataclass(slots=True)
class ParameterPlace:
    """One parameter of the model, the modules that own it, and its position in its bucket.

    A tied parameter has several names and owners. `Unit` and `Bucket` use it to swap the parameter and to find its
    elements.
    """

    names: list[str]
    owners: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    shape: torch.Size  # the shape of this rank's part, which differs from the parameter's on a tensor-parallel mesh
    parallel: MeshPlacements | None
    keeps_dtype: bool = False  # whether the precision keeps its module in its own dtype
    replicated: bool = False  # whether the ranks of a tensor-parallel mesh hold copies of it
    offset: int = 0  # its first element in the flat buffer; set by `BucketLayout.follow`
    # The lists, dicts and module attributes that hold the parameter too, alone or in a tuple, each with its key.
    kept: list[tuple[Holder, Any]] = field(default_factory=list[tuple[Holder, Any]])

    @property
    def key(self) -> tuple[str, bool, bool]:
        """Properties that all parameters of one bucket share: dtype, trainability, and whether the dtype is kept."""
        return dtype_name(self.parameter.dtype), self.parameter.requires_grad, self.keeps_dtype

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def matrix(self) -> tuple[int, int] | None:
        """Rows and columns, if the gradient may be sent in low rank; else None."""
        # A parameter that a tensor-parallel mesh replicates has none. Each rank of the mesh would round its own copy,
        # and the copies would drift apart.
        if len(self.shape) < 2 or self.replicated:
            return None
        return self.shape[0], self.shape[1:].numel()

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the elements [start, end) of this rank's flattened part as ranges of the full parameter's elements."""
        if self.parallel is None:
            yield start, end
            return
        for box in boxes_in_whole(self.shape, self.parallel, start, end):
            yield from ranges_of(box, self.parallel.shape)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of this parameter in `flat`, the bucket's full flat buffer."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(slots=True)
class BucketLayout:
    """The parameters of one bucket, in the order of its flat buffer. `build` makes a `Bucket` of it."""

    unit: str
    spec: BucketSpec
    places: list[ParameterPlace]

    def follow(self, planned: BucketSpec) -> None:
        """Take the parameters' offsets from the plan, which aligns them to the blocks of its codecs."""
        for place, offset in zip(self.places, planned.offsets, strict=False):
            place.offset = offset


@dataclass(slots=True)
class UnitLayout:
    """The modules and buckets of one unit. `build` makes a `Unit` of it."""

    name: str
    modules: list[nn.Module]  # several where small neighbors were merged into one unit
    spec: UnitSpec
    buckets: list[BucketLayout]

    @property
    def places(self) -> Iterator[ParameterPlace]:
        return (place for bucket in self.buckets for place in bucket.places)


def lay_out(model: nn.Module, units: UnitChoice | None = None, precision: Precision | None = None) -> list[UnitLayout]:
    """Divide a model into units and buckets, without changing it.

    `units`: Module classes or modules that become units. By default, the blocks that `_default_units` finds, and the
    large leaves of the root that `_large_leaves` finds.

    Returns:
        The root unit, then the other units in the order of registration.
    """
    if units is None:
        chosen = {"": [model], **_merge_small_units(_default_units(model))}
    else:
        chosen = {"": [model], **{name: [module] for name, module in _chosen_units(model, units).items()}}
    places = _find_parameters(model)
    kept = {id(m) for outermost in kept_modules(model, precision or Precision()) for m in outermost.modules()}
    on_a_mesh = any(place.parallel is not None for place in places)
    for place in places:
        keeps = {id(owner) in kept for owner, _ in place.owners}
        # One memory cannot have two dtypes.
        if len(keeps) > 1:
            raise ShardError(
                f"Precision(keep=): {' and '.join(place.names)} are one parameter, and keep= names a module of one of "
                "them only. Name the modules of both, or of neither."
            )
        place.keeps_dtype = keeps == {True}
        place.replicated = on_a_mesh and (place.parallel is None or not place.parallel.is_split)
    # By identity: modules may define equality, and a module may appear under several names.
    homes = {id(module): name for name, modules in chosen.items() for module in modules}
    inside = _unit_of_modules(model, homes)
    leaves = _large_leaves(model, places, inside) if units is None else {}
    if leaves:
        inside |= {id(module): name for name, module in leaves.items()}
        order = {id(module): number for number, module in enumerate(model.modules())}
        chosen |= {name: [module] for name, module in leaves.items()}
        chosen = dict(sorted(chosen.items(), key=lambda item: order[id(item[1][0])]))
    mine: dict[str, list[ParameterPlace]] = {name: [] for name in chosen}
    for place in places:
        # A parameter that several units use belongs to the root, which is unsharded while any of them runs.
        owners = {inside[id(module)] for module, _ in place.owners}
        mine[owners.pop() if len(owners) == 1 else ""].append(place)
    return [
        _unit(name, modules, mine[name], name in leaves) for name, modules in chosen.items() if mine[name] or name == ""
    ]


def _unit(name: str, modules: list[nn.Module], places: list[ParameterPlace], leaf: bool) -> UnitLayout:
    """Return a unit with one bucket per dtype and trainability, so that a LoRA run reduces only what trains."""
    buckets: list[BucketLayout] = []
    for key in dict.fromkeys(p.key for p in places):
        inside = [p for p in places if p.key == key]
        matrices = tuple(p.matrix for p in inside)
        spec = BucketSpec(tuple(p.numel for p in inside), *key, matrices=matrices)
        buckets.append(BucketLayout(name, spec, inside))
    lookup = leaf and isinstance(modules[0], nn.Embedding)
    spec = UnitSpec(name, tuple(b.spec for b in buckets), name == "", leaf, lookup)
    return UnitLayout(name, modules, spec, buckets)


def _large_leaves(model: nn.Module, places: Sequence[ParameterPlace], inside: dict[int, str]) -> dict[str, nn.Module]:
    """Return the large embeddings of the root, and its last large linear layer if it is after all blocks, by name."""
    # Tied ones are left out. The forward of the others is PyTorch's own, without hooks that might read the weights. It
    # returns new memory, and reads the weights only for gradients of inputs. There is one linear layer at most: two in
    # one checkpoint would need the slot that leaves share at the same time.
    elements: dict[int, int] = {}
    for place in places:
        for module, _ in place.owners:
            elements[id(module)] = elements.get(id(module), 0) + place.numel
    shared = {id(module) for place in places if len(place.owners) > 1 for module, _ in place.owners}
    leaves: dict[str, nn.Module] = {}
    head: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())  # pyright: ignore
        if inside[id(module)]:
            # A block follows.
            head = {}
        elif (
            name
            and elements.get(id(module), 0) >= LARGE_LEAF
            and id(module) not in shared
            and "forward" not in vars(module)
            and next(module.children(), None) is None
            and {attribute for attribute, _ in module.named_parameters(recurse=False)} <= {"weight", "bias"}
            # The hooks of tensor-parallel layers convert inputs and outputs.
            and all(getattr(hook, "__module__", "").startswith("torch.distributed.tensor.") for hook in hooks)
        ):
            if type(module).forward is nn.Embedding.forward:
                leaves[name] = module
            elif type(module).forward is nn.Linear.forward and any(inside.values()):
                head = {name: module}
    return leaves | head


def _default_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the children of every list of modules whose children have one class. Units do not nest."""
    # A child without a forward, such as an inner ModuleList, is no unit. Its modules that have a forward are units.
    found: dict[str, nn.Module] = {}
    # A module that several lists share belongs to the first of them.
    taken: set[nn.Module] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        children = list(module.named_children())
        like = _is_list(module) and len({type(c) for _, c in children}) == 1
        for name, child in children:
            path = f"{prefix}{name}"
            if like and _has_parameters(child):
                found.update((name, m) for name, m in _modules_with_forward(child, path) if m not in taken)
                taken.update(found.values())
            else:
                visit(child, f"{path}.")

    visit(model, "")
    return found


def _is_list(module: nn.Module) -> bool:
    """Return whether the children of `module` are numbered. torchtitan numbers the keys of a ModuleDict."""
    return isinstance(module, (nn.ModuleList, nn.Sequential)) or (
        isinstance(module, nn.ModuleDict) and all(key.isdecimal() for key in module)
    )


def _modules_with_forward(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield `module` if it has a forward, else the outermost modules inside it that have one, and have parameters."""
    if has_forward(module):
        yield path, module
        return
    for name, child in module.named_children():
        if _has_parameters(child):
            yield from _modules_with_forward(child, f"{path}.{name}")


def has_forward(module: nn.Module) -> bool:
    """Return whether `module` can be called. Lists and dicts of modules cannot."""
    # torch.compile(module) returns a module whose forward is an attribute of the instance.
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _merge_small_units(units: dict[str, nn.Module]) -> dict[str, list[nn.Module]]:
    """Merge small neighbors in one container into one unit."""
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
    """Return the outermost modules that `precision` keeps in their own dtype, with everything inside them."""
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


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _unit_of_modules(model: nn.Module, homes: dict[int, str]) -> dict[int, str]:
    """Return the innermost unit around every module, and the root for a module that several units contain."""
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


def own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model by all of their names, without those of submodules that are sharded already."""
    # Such a submodule has its own engine. The tied embeddings of a pipeline are an example.
    apart = tuple(f"{name}." for name, module in model.named_modules() if name and hasattr(module, "towpath_engine"))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.startswith(apart):
            yield name, parameter


def _find_parameters(model: nn.Module) -> list[ParameterPlace]:
    found: dict[int, ParameterPlace] = {}
    for name, parameter in own_parameters(model):
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
    _check_parameters(places)
    return places


def _check_class(name: str, parameter: nn.Parameter) -> MeshPlacements | None:
    parallel = parallel_of(parameter)
    if type(parameter) is not nn.Parameter and parallel is None:
        raise ShardError(
            f"{name} is a {type(parameter).__name__}; shard() takes plain parameters, and DTensors on a "
            "tensor-parallel mesh. A lazy one needs a forward pass first; a model that is sharded already cannot be "
            "sharded again. For torchao's float8 training, set enable_fsdp_float8_all_gather=False."
        )
    return parallel


def _check_parameters(places: list[ParameterPlace]) -> None:
    for place in places:
        parameter, name = place.parameter, place.names[0]
        if dtype_name(parameter.dtype) not in FLOATING:
            raise ShardError(f"{name} is {parameter.dtype}; parameters may be {', '.join(FLOATING)}.")
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
    devices = sorted({str(p.parameter.device) for p in places} - {"meta"})
    if len(devices) > 1:
        raise ShardError(f"the model's parameters are on {', '.join(devices)}; move them to one device before shard().")


def trainable_places(layouts: Iterable[UnitLayout]) -> Iterator[tuple[OwnedParameter, ParameterPlace]]:
    """Yield the place of each trainable parameter, and its numbers in the model, in the order of the model."""
    for unit, layout in enumerate(layouts):
        for number, bucket in enumerate(layout.buckets):
            for index, place in enumerate(bucket.places if bucket.spec.trainable else ()):
                yield OwnedParameter(place.names[0], tuple(place.shape), unit, number, index), place


def describe(model: nn.Module, layouts: list[UnitLayout], home: torch.device, moves: bool) -> Iterator[str]:
    """Yield one line for every parameter and buffer. Ranks with the same model get the same lines.

    `home`: The device that the model trains on. `moves`: Whether buffers move there.
    """
    for unit in layouts:
        for place in unit.places:
            shape = shape_text(place.shape)
            shape += f" {place.parallel.describe()}" if place.parallel is not None else ""
            dtype, trains, keeps = place.key
            state = ("trains" if trains else "frozen") + " kept" * keeps
            yield f"{place.names[0]}: {shape} {dtype} {state}, in unit {unit.name or 'root'!r}"
    for name, buffer in model.named_buffers():
        # A meta buffer will be made on the parameters' device. So a rank with meta buffers matches one with real ones.
        device = home if buffer.device.type == "meta" or moves else buffer.device
        kept = "buffer" if is_saved(model, name) else "buffer that is not saved"
        yield f"{name}: {shape_text(buffer.shape)} {buffer.dtype} {kept} on {device.type}"


def is_saved(model: nn.Module, buffer: str) -> bool:
    """Return whether the buffer of this name is persistent."""
    path, _, attribute = buffer.rpartition(".")
    return attribute not in model.get_submodule(path)._non_persistent_buffers_set  # pyright: ignore


def device_of(parameters: Iterable[nn.Parameter], groups: Groups | None = None) -> torch.device:
    """Return the chosen device, or else that of `parameters`. If all are on the meta device, return this rank's."""
    groups = groups or Groups()
    return groups.chosen or next((p.device for p in parameters if p.device.type != "meta"), groups.device)


_MEMINFO, _BOOT = Path("/proc/meminfo"), Path("/proc/sys/kernel/random/boot_id")


def least_free_bytes(model: nn.Module, device: torch.device, groups: Groups) -> int | None:
    """Return the free bytes of the rank with the least memory. Every rank must call it.

    Returns:
        The bytes, or None if no rank knows them. Only CUDA devices and Linux hosts report free memory.
    """
    # The memory of the model's own parameters there counts as free, because sharding releases it.
    own = {id(p): local_part(p) for _, p in own_parameters(model) if p.device.type == device.type}
    returned = sum(values.nbytes for values in own.values())
    mine = available_bytes() if device.type == "cpu" else None
    if device.type == "cuda":
        mine = torch.cuda.mem_get_info(device)[0]
    # All containers of a machine share this identifier, and its memory. Host names may repeat.
    machine = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
    told: list[tuple[str, int | None, int]] = groups.all_gather_objects((machine, mine, returned))
    hosts = [host for host, _, _ in told]
    shared = {host: 1 if device.type == "cuda" else hosts.count(host) for host in hosts}
    return min((free // shared[host] + theirs for host, free, theirs in told if free is not None), default=None)


def available_bytes() -> int | None:
    """Return the memory in bytes that processes on this host can still take; None on hosts other than Linux."""
    if not _MEMINFO.exists():
        return None
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), None)
