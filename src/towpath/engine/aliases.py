"""Other references that modules hold to their parameters, and other tensors on the memory of parameters.

A module may hold a parameter in a list, dict or attribute, or hold another tensor on the parameter's memory. Without
sharding such tensors follow the parameter. `shard()` gives parameters new memory, and lets modules compute with
unsharded views. So the engine swaps the parameter in these lists and dicts, too. It refuses other tensors on its
memory, because they would keep old values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from towpath.engine.layout import Holder, ParameterPlace
from towpath.engine.parameters.dtensors import local_part
from towpath.errors import ShardError

# The attributes that nn.Module itself keeps in a module's __dict__.
_OF_THE_CLASS = frozenset(vars(nn.Module()))
# The weight lists of a recurrent module, which `ModuleParameters.swap` sets anew.
_OF_RECURRENT = frozenset({"_flat_weights", "_flat_weight_refs"})


def check_memory(places: Sequence[ParameterPlace]) -> None:
    """Raise ShardError if two parameters overlap in memory. They may be neighbors in one storage."""
    for sharing in _by_storage(places).values():
        # In order of their addresses, each parameter is compared only with those that begin before its end.
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
    """Note in each place which lists, dicts and attributes of modules hold its parameter, too."""
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
    """Return `value` with `new` in place of `old`. `value` is `old` itself or a tuple that contains it."""
    if not isinstance(value, tuple):
        return new
    items: list[Any] = [new if item is old else item for item in cast(tuple[Any, ...], value)]
    kind: Any = type(cast(object, value))
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _attributes(module: nn.Module, path: str) -> Iterator[tuple[Holder, Any, str]]:
    """Yield the attributes and buffers of a module, except its parameters and submodules: holder, key and name."""
    hooks = module._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]
    # torch.nn.utils.spectral_norm and similar hooks compute the attribute of this name anew in every forward.
    computed = {name for hook in hooks if isinstance(name := getattr(hook, "name", None), str)}
    skipped = _OF_THE_CLASS | computed | (_OF_RECURRENT if isinstance(module, nn.RNNBase) else set())
    prefix = f"{path}." if path else ""
    for key in [key for key in vars(module) if key not in skipped]:
        yield vars(module), key, f"{prefix}{key}"
    for key in module._buffers:  # pyright: ignore[reportPrivateUsage]
        yield cast(Holder, module._buffers), key, f"{prefix}{key}"  # pyright: ignore[reportPrivateUsage]


def _items(holder: Holder, key: Any, value: Any, name: str, seen: set[int]) -> Iterator[tuple[Holder, Any, Any, str]]:
    """Yield the tensors and tuples in a value, which may be a nested list or dict: holder, key, item and name."""
    if isinstance(value, (list, dict)):
        if id(value) in seen:
            return
        # Lists may contain themselves.
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
    """Return whether `value` is a plain tensor with elements in memory. Subclasses may have no memory."""
    if type(value) not in (torch.Tensor, nn.Parameter):
        return False
    tensor = cast(torch.Tensor, value)
    return tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the tensor's first byte and of the byte after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have a byte in common."""
    (start, end), (begin, stop) = _bounds(one), _bounds(other)
    if start >= stop or begin >= end:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    # Strided tensors may interleave without sharing a byte, as columns of a matrix do. So each byte is checked.
    taken = torch.zeros(max(end, stop) - min(start, begin), dtype=torch.bool)

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        strides = [stride * tensor.itemsize for stride in tensor.stride()]
        return taken.as_strided((*tensor.shape, tensor.itemsize), (*strides, 1), tensor.data_ptr() - min(start, begin))

    bytes_of(one).fill_(True)
    return bool(bytes_of(other).any())
