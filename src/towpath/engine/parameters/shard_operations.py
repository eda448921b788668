"""Implements PyTorch's operations on ShardTensors.

Elementwise operations and optimizers run on the slices. Norms and sums are combined over the ranks that share the
tensor (`partial_sums.py`). Any other operation raises `ShardTensorError`.

This file also counts writes. Each dispatched operation that writes to a parameter raises its `version`,
which the parameter shares with its aliases. PyTorch's `_version` would not do, because foreach, fused and `.data`
writes do not change it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types as known_to_optimizers  # pyright: ignore
from torch.utils._foreach_utils import _foreach_supported_types as known_to_clipping  # pyright: ignore

from towpath.engine.checks.optimizers import remedy_for
from towpath.engine.parameters.partial_sums import Partial
from towpath.engine.parameters.shard_tensor import EncodedSlice, Handler, ShardSpec, ShardTensor, in_backward
from towpath.errors import ShardTensorError

aten = torch.ops.aten

Arguments = Sequence[Any]

# Elementwise operations that PyTorch does not tag as pointwise.
_ELEMENTWISE = {
    aten.alias,
    aten.clone,
    aten._to_copy,
    aten.zeros_like,
    aten.ones_like,
    aten.empty_like,
    aten.full_like,
    aten.fill_,
    aten.masked_fill,
    aten.masked_fill_,
}


def operation(func: Any) -> Handler:
    """Return the handler that executes `func`, which has a ShardTensor among its arguments."""
    special = _SPECIAL.get(func.overloadpacket)
    if special is not None:
        return special
    if func.namespace == "aten":
        name = func._schema.name.removeprefix("aten::")
        random = torch.Tag.nondeterministic_seeded in func.tags  # with equal seeds all slices would get equal values
        if name.startswith(("_foreach_", "_fused_")) and name not in _FOREACH_REDUCTIONS:
            return _listwise
        if (torch.Tag.pointwise in func.tags or func.overloadpacket in _ELEMENTWISE) and not random:
            return _elementwise
    return _refuse


_FOREACH_REDUCTIONS = {"_foreach_max", "_foreach_powsum"}


@dataclass(frozen=True, slots=True)
class _Writes:
    """The arguments that an operation writes to, by position and by name."""

    positions: tuple[int, ...]
    names: tuple[str, ...]


@lru_cache(maxsize=1024)
def _writes(func: Any) -> _Writes:
    written = [
        (i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    return _Writes(tuple(i for i, _ in written), tuple(name for _, name in written))


def _mark_written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    writes = _writes(func)
    for position, name in zip(writes.positions, writes.names, strict=True):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, ShardTensor) and tensor.version is not None:
                tensor.version.written()


def _check_writable(target: Any) -> None:
    """Raise `ShardTensorError` if `target` is stored encoded, because such a parameter can only be written entirely."""
    if isinstance(target, ShardTensor) and type(target.held) is EncodedSlice:
        raise ShardTensorError(
            f"{target.span.name!r} rests in {target.rests_in}: it cannot be changed in place. Write all of it: "
            "p.copy_(whole tensor), load_state_dict(), or inside `with towpath.full_parameters(model):`."
        )


def _local_of(func: Any, value: Any, where: ShardSpec) -> Any:
    """Return the slice of `value` that matches `where`, or raise `ShardTensorError` with the reason if none does."""
    if isinstance(value, ShardTensor):
        if value.span is not where:
            raise ShardTensorError(
                f"{func}: two ShardTensors of different parameters, {tuple(value.shape)} and "
                f"{tuple(where.whole_shape)}, hold slices that do not match element by element. Use full_tensor() on "
                "both."
            )
        return value.local
    if isinstance(value, Partial):
        return value.resolve()
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        if value.shape == where.whole_shape and in_backward():
            return where.part_of(value)  # autograd expands the gradient of a sum or a mean, the same on all ranks
        optimizer = _calling_optimizer()
        made = "" if optimizer is None else f" If {type(optimizer).__name__} made it itself: {remedy_for(optimizer)}"
        raise ShardTensorError(
            f"{func}: a plain tensor of shape {tuple(value.shape)} met {where.describe()}, and is not sliced alike. "
            f"{_where_whole(where)} If the plain tensor is an optimizer's state, the optimizer stepped before shard(): "
            "make a new one; or its states were loaded whole: call towpath.checkpoint.set_optimizer_state_dict. To "
            f"write a whole tensor into a parameter use copy_(); to read one use full_tensor().{made}"
        )
    if isinstance(value, torch.Tensor) and value.dim():
        return value.reshape(())  # a 0-D tensor broadcasts over a 1-D slice too
    return value


def _matching(func: Any, value: Any, where: ShardSpec | None) -> Any:
    """Return the slice of `value` that matches `where`, as `_local_of` does, with a fast path for long lists."""
    if type(value) is ShardTensor and value.span is where and type(value.held) is torch.Tensor:
        return value.held
    return value if where is None else _local_of(func, value, where)


def _elementwise(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run an elementwise operation on the slices."""
    where = next(a.span for a in (*args, *kwargs.values()) if isinstance(a, ShardTensor))
    local_args = [_local_of(func, a, where) for a in args]
    local_kwargs = {k: _local_of(func, v, where) for k, v in kwargs.items() if k != "memory_format"}
    writes = _writes(func)
    if writes.positions:
        target = args[0] if writes.positions[0] == 0 else kwargs[writes.names[0]]
        if not isinstance(target, ShardTensor):
            _refuse(func, args, kwargs)  # a slice cannot be written into a plain tensor
        _check_writable(target)
        func(*local_args, **local_kwargs)
        _mark_written(func, args, kwargs)
        return target
    out = func(*local_args, **local_kwargs)
    if isinstance(out, torch.Tensor):
        return ShardTensor(out, where)
    return tuple(ShardTensor(o, where) for o in out)


def _detach(func: Any, args: Arguments, kwargs: dict[str, Any]) -> ShardTensor:
    """Return an alias with the same span and the same version, so that writes through it count."""
    tensor: ShardTensor = args[0]
    return ShardTensor(tensor.held, tensor.span, tensor.version)


def _new_empty(func: Any, args: Arguments, kwargs: dict[str, Any]) -> ShardTensor:
    """Run new_empty for the tensor's own shape only, as PyTorch's checkpoint stagers call it for the CPU."""
    tensor, size = args[0], args[1]
    if torch.Size(size) != tensor.shape:
        _refuse(func, args, kwargs)
    start, end = tensor.span.bounds()
    return ShardTensor(func(tensor.local, [end - start], **kwargs), tensor.span)


def _sent(tensor: ShardTensor) -> tuple[Any, ...]:
    """Return how multiprocessing sends a ShardTensor. `ShardTensor.__reduce_ex__` refuses pickle itself."""
    from towpath.engine.parameters.parallel import SentShard  # loads what only checkpoints need

    return SentShard, (tensor.shape, tensor.local.detach(), tensor.boxes())


def _listwise(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run a foreach or fused operation on the slices. Its lists of tensors are matched index by index."""
    values = (*args, *kwargs.values())
    lists = [a for a in values if isinstance(a, (list, tuple)) and any(isinstance(t, torch.Tensor) for t in a)]
    wheres: list[ShardSpec | None] = [None] * max(len(a) for a in lists)
    for tensors in lists:
        for i, tensor in enumerate(tensors):
            if wheres[i] is None and isinstance(tensor, ShardTensor):
                wheres[i] = tensor.span

    def unwrap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [_matching(func, t, where) for t, where in zip(value, wheres, strict=False)]
        return value.resolve() if isinstance(value, Partial) else value

    for position in _writes(func).positions:
        for tensor in args[position] if position < len(args) else ():
            _check_writable(tensor)
    out = func(*map(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()})
    _mark_written(func, args, kwargs)
    if out is None or not isinstance(out, (list, tuple)):
        return out
    return [o if where is None else ShardTensor(o, where) for o, where in zip(out, wheres, strict=True)]


def _zero(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run zero_ on one tensor or a list. It also counts the gradients, which ranks compare (`Program.zeroed`)."""
    several = isinstance(args[0], (list, tuple))
    for tensor in cast(Sequence[torch.Tensor], args[0] if several else args[:1]):
        if isinstance(tensor, ShardTensor) and tensor.version is None and tensor.span.replica.program is not None:
            tensor.span.replica.program.zeroed += 1
    return (_listwise if several else _elementwise)(func, args, kwargs)


def _copy(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run copy_ from a matching slice, or from a full tensor, from which it takes this rank's elements."""
    target, source = args[0], args[1]
    if not isinstance(target, ShardTensor):
        _refuse(func, args, kwargs)
    whole = isinstance(source, torch.Tensor) and not isinstance(source, (ShardTensor, Partial))
    if whole and source.shape == target.shape:
        source = target.span.part_of(source)
    else:
        source = _local_of(func, source, target.span)
    if not isinstance(source, torch.Tensor) or not source.dim():
        source = torch.empty_like(target.local).copy_(source)
    target.write(source)
    _mark_written(func, args, kwargs)
    return target


def _put(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run index_put_ with a mask of the same parameter, as in grad[mask] = 0."""
    target, indices = args[0], args[1]
    if not isinstance(target, ShardTensor) or len(indices) != 1 or not isinstance(indices[0], ShardTensor):
        _refuse(func, args, kwargs)
    _check_writable(target)
    mask, value = (_local_of(func, v, target.span) for v in (indices[0], args[2]))
    func(target.local, [mask], value, *args[3:])
    _mark_written(func, args, kwargs)
    return target


def _norm(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Return the partial norm over the full tensor, for linalg_vector_norm(x, ord=2, ...) and norm(x, p=2)."""
    tensor, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    if len(args) > 2 or kwargs.get("dim") is not None or kwargs.get("keepdim"):
        _refuse(func, args, kwargs)
    local = tensor.span.counted(tensor.local)
    [norm] = Partial.norms_of([local], 2 if order is None else order, [tensor.span.replica], kwargs.get("dtype"))
    return norm


def _foreach_norm(func: Any, args: Arguments, kwargs: dict[str, Any]) -> list[Any]:
    """Return the norm of each tensor in a list, partial for ShardTensors."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    tensors = cast(Sequence[torch.Tensor], args[0])
    ours = [t for t in tensors if isinstance(t, ShardTensor)]
    parts = Partial.norms_of([t.span.counted(t.local) for t in ours], order, [t.span.replica for t in ours], dtype)
    norms = iter(parts)
    return [
        next(norms) if isinstance(t, ShardTensor) else torch.linalg.vector_norm(t, order, dtype=dtype) for t in tensors
    ]


def _sum(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Return the partial sum or mean over the full tensor."""
    tensor = args[0]
    if len(args) > 1 or kwargs.get("dim") is not None:
        _refuse(func, args, kwargs)
    total = tensor.span.counted(tensor.local).sum(dtype=kwargs.get("dtype"))
    if func.overloadpacket is aten.mean:
        total = total / tensor.numel()
    return Partial(total, "sum", tensor.span.replica, total.dtype)


def _extreme(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run max, min, amax, amin, any, all or equal over the full tensor, and combine the result immediately."""
    tensor = args[0]
    if len(args) > 1 and func.overloadpacket is not aten.equal and args[1] not in ([], ()):
        _refuse(func, args, kwargs)
    replica = tensor.span.replica
    packet = func.overloadpacket
    if packet is aten.equal:
        same = torch.tensor(torch.equal(tensor.local, _local_of(func, args[1], tensor.span)), device=tensor.device)
        return bool(replica.combine(same.to(torch.uint8), dist.ReduceOp.MIN))
    if packet in (aten.any, aten.all):
        found = packet(tensor.local).to(torch.uint8)
        return replica.combine(found, dist.ReduceOp.MAX if packet is aten.any else dist.ReduceOp.MIN).to(torch.bool)
    largest = packet in (aten.max, aten.amax)
    info = torch.finfo(tensor.dtype) if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype)
    neutral = torch.full((), info.min if largest else info.max, dtype=tensor.dtype, device=tensor.device)
    value = cast(torch.Tensor, packet(tensor.local)) if tensor.local.numel() else neutral
    return replica.combine(value.clone(), dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)


def _unscale(func: Any, args: Arguments, kwargs: dict[str, Any]) -> None:
    """Unscale gradients for GradScaler. An overflow in one rank's slice counts on every rank that shares the tensor."""
    grads, found, scale = args
    replica = next(g.span.replica for g in grads if isinstance(g, ShardTensor))
    func([g.local if isinstance(g, ShardTensor) else g for g in grads], found, scale)
    replica.combine(found, dist.ReduceOp.MAX)


def _refuse(func: Any, args: Arguments, kwargs: dict[str, Any]) -> NoReturn:
    """Raise `ShardTensorError`: the operation needs the full tensor."""
    flat = [t for a in (*args, *kwargs.values()) for t in (a if isinstance(a, (list, tuple)) else (a,))]
    span = next(t.span for t in flat if isinstance(t, ShardTensor))
    optimizer = _calling_optimizer()
    if optimizer is not None:
        raise ShardTensorError(
            f"rank {span.replica.rank}: {type(optimizer).__name__} works on whole tensors ({func}), and each rank "
            f"holds slices of them. {remedy_for(optimizer)}"
        )
    raise ShardTensorError(
        f"{func} needs the whole tensor, and met {span.describe()}. {_where_whole(span)} "
        "Elsewhere call full_tensor() on it, on every rank, or work on the whole model inside "
        "`with towpath.full_parameters(model):`."
    )


def _where_whole(span: ShardSpec) -> str:
    if not span.unit:
        return (
            "It is whole inside model(...), and inside any method of the model that "
            "towpath.register_forward_method(model, name) has made an entry."
        )
    return (
        "It is whole inside the forward of that unit, and inside methods of the unit's module that "
        "towpath.register_forward_method(module, name) has made entries. Where the model computes with it outside, "
        "leave the unit to the root: pass the other units as units= to shard()."
    )


def _calling_optimizer() -> Optimizer | None:
    """Return the optimizer on the call stack, if the operation is part of an optimizer's step."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Optimizer):
            return caller
        frame = frame.f_back
    return None


_SPECIAL: dict[Any, Handler] = {
    aten.detach: _detach,
    aten.copy_: _copy,
    aten.zero_: _zero,
    aten._foreach_zero_: _zero,
    aten.new_empty: _new_empty,
    aten.index_put_: _put,
    aten.linalg_vector_norm: _norm,
    aten.norm: _norm,
    aten._foreach_norm: _foreach_norm,
    aten.sum: _sum,
    aten.mean: _sum,
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys((aten.max, aten.min, aten.amax, aten.amin, aten.any, aten.all, aten.equal), _extreme),
}


# PyTorch uses foreach operations (for norms, clipping, and on a GPU in each optimizer) only for tensor classes that it
# lists as supported. DTensor adds itself to these lists in the same way.
for _known in (known_to_clipping, known_to_optimizers):
    if ShardTensor not in _known:
        cast(list[type], _known).append(ShardTensor)
ForkingPickler.register(ShardTensor, _sent)
