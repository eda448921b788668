"""A tensor with the global shape whose storage is this rank's contiguous 1-D slice of it.

Elementwise operations and optimizers run on the slices; norms and sums are combined over the ranks that share
the tensor (`partial.py`); `full_tensor()` gathers; anything else raises `ShardTensorError`.

Writes are noticed here: every dispatched operation that writes to a parameter raises the version of the mark
that it shares with its aliases (`_version` does not tell: foreach, fused and `.data` writes leave it as it was).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from towpath.collectives.flat import all_gather_single
from towpath.engine.boxes import Box, boxes_of
from towpath.engine.partial import NO_TORCH_FUNCTION, Partial
from towpath.engine.span import Span, WriteMark
from towpath.errors import ShardTensorError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

aten = torch.ops.aten


def in_backward() -> bool:
    """Whether autograd is running a backward pass."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


class ShardTensor(torch.Tensor):
    """See the module's docstring. Made by `towpath.shard`; `to_local()` reads this rank's slice."""

    local: torch.Tensor
    span: Span
    mark: WriteMark | None

    @staticmethod
    def __new__(
        cls: type[ShardTensor],
        local: torch.Tensor,
        where: Span,
        mark: WriteMark | None = None,
        requires_grad: bool = False,
    ) -> ShardTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, where.whole_shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        made.local, made.span, made.mark = local, where, mark
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is done in __new__."""

    def to_local(self) -> torch.Tensor:
        """This rank's elements, 1-D, perhaps none. To write, use operations on the ShardTensor itself."""
        return self.local

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, gathered from the ranks that share it. Every one of them must call this."""
        whole = self._assembled()
        parallel = self.span.parallel
        return whole if parallel is None else parallel.wrap(whole).full_tensor()

    def _assembled(self) -> torch.Tensor:
        """From the slices of the peers."""
        where = self.span
        local = self.local.detach()
        if where.peers.group is None:
            return local.clone().view(where.shape)
        bounds = [where.bounds(slot) for slot in where.peers.slots]
        longest = max(end - start for start, end in bounds)
        padded = local.new_zeros(longest)
        padded[: local.numel()].copy_(local)
        gathered = local.new_empty(len(bounds) * longest)
        all_gather_single(gathered, padded, where.peers.group)
        whole = local.new_empty(where.shape.numel())
        for (start, end), piece in zip(bounds, gathered.view(len(bounds), longest), strict=True):
            whole[start:end].copy_(piece[: end - start])
        return whole.view(where.shape)

    @property
    def data(self) -> ShardTensor:
        """An alias outside autograd; writes through it are noticed."""
        return self.detach()  # pyright: ignore[reportReturnType]

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values of `value`, whole or a matching slice. Dtype and device stay: they are the buffers'."""
        if value.dtype != self.dtype or value.device != self.device:
            raise ShardTensorError(
                f"got {value.dtype} on {value.device} for a parameter of {self.dtype} on {self.device}: a sharded "
                "model cannot be cast or moved. Do it before shard(); precision= sets what computes and travels."
            )
        with torch.no_grad():
            self.copy_(value)

    def register_hook(self, hook: Any) -> NoReturn:
        raise ShardTensorError(
            "hooks on a sharded parameter would never run: its gradient appears at the boundary, complete. Read or "
            "change .grad after backward() instead."
        )

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        self.register_hook(hook)

    def untyped_storage(self) -> NoReturn:
        raise ShardTensorError(
            f"{self.span.name!r} has no memory of its shape: rank {self.span.peers.rank} holds a slice of it, "
            "to_local(). To save the model (save_pretrained, safetensors) let all ranks enter "
            "`with towpath.full_parameters(model):` and rank 0 save there. Without gathering: towpath.checkpoint, then "
            "`towpath export`."
        )

    def storage(self) -> NoReturn:
        self.untyped_storage()

    def data_ptr(self) -> NoReturn:
        self.untyped_storage()

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise ShardTensorError(f"{self} has no NumPy array: call full_tensor().numpy() on every rank.")

    def tolist(self) -> NoReturn:
        raise ShardTensorError(f"{self} is one rank's slice: call full_tensor().tolist() on every rank.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        start, end = self.span.bounds()
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"ShardTensor({tuple(self.shape)}, {self.dtype}, holds [{start}:{end}] of {self.numel()}{grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        copy = ShardTensor(self.local.detach().clone(), self.span, None, self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardTensorError(
            "a ShardTensor cannot be pickled: it is one rank's slice. Save p.full_tensor(), or use "
            "torch.distributed.checkpoint, which saves every slice once."
        )

    # What torch.distributed.checkpoint asks of a tensor class: this rank's slice, as boxes of its shape ---------------

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from towpath.engine.chunks import write_items  # loads what only checkpoints need

        return write_items(fqn, self.local, self.shape, self.boxes())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Asked for before this tensor is loaded, on every rank: also on those that hold none of it."""
        if self.mark is not None:
            self.mark.written()
        from towpath.engine.chunks import chunks_of

        return chunks_of(self.boxes())

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The box that begins at the index's offsets: a view of this rank's slice."""
        start, _ = self.span.bounds()
        box = next((b for b in self.boxes() if b.offsets == tuple(index.offset or ())), None)
        if box is None:
            raise ShardTensorError(f"{index.fqn}: no box of {self} begins at {index.offset}. Plan the load anew.")
        return self.local.detach()[box.start - start : box.end - start].view(box.sizes)

    def boxes(self) -> list[Box]:
        if self.span.parallel is not None:
            raise ShardTensorError(
                f"{self} is split over a tensor-parallel mesh besides, which checkpoints do not know yet. Save "
                "full_tensor() of every parameter."
            )
        start, end = self.span.bounds()
        whole = Box((0,) * self.dim(), tuple(self.shape), 0, 0)
        return list(boxes_of(self.shape, start, end)) if self.numel() else [whole]

    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _handler(func)(func, args, kwargs or {})


Arguments = Sequence[Any]
Handler = Callable[[Any, Arguments, dict[str, Any]], Any]

# Elementwise in effect, though PyTorch does not tag them so.
_ELEMENTWISE = {
    aten.alias,
    aten.clone,
    aten._to_copy,
    aten.zeros_like,
    aten.ones_like,
    aten.empty_like,
    aten.full_like,
    aten.zero_,
    aten.fill_,
    aten.masked_fill,
    aten.masked_fill_,
}


@lru_cache(maxsize=1024)
def _handler(func: Any) -> Handler:
    special = _SPECIAL.get(func.overloadpacket)
    if special is not None:
        return special
    if func.namespace == "aten":
        name = func._schema.name.removeprefix("aten::")
        random = torch.Tag.nondeterministic_seeded in func.tags  # equal seeds would draw alike in every slice
        if name.startswith(("_foreach_", "_fused_")) and name not in _FOREACH_REDUCTIONS:
            return _listwise
        if (torch.Tag.pointwise in func.tags or func.overloadpacket in _ELEMENTWISE) and not random:
            return _elementwise
    return _refuse


_FOREACH_REDUCTIONS = {"_foreach_max", "_foreach_powsum"}


@dataclass(frozen=True, slots=True)
class _Writes:
    """Which arguments an operation writes to."""

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
            if isinstance(tensor, ShardTensor) and tensor.mark is not None:
                tensor.mark.written()


def _local_of(func: Any, value: Any, where: Span) -> Any:
    """The slice of `value` that matches `where`, or the reason why there is none."""
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
            return where.part_of(value)  # alike on all ranks: what autograd makes of a sum's or a mean's gradient
        raise ShardTensorError(
            f"{func}: a plain tensor of shape {tuple(value.shape)} met {where.describe()}, and is not sliced alike. "
            f"{_where_whole(where)} If the plain tensor is an optimizer's state, the optimizer stepped before shard(): "
            "make a new one. To write a whole tensor into a parameter use copy_(); to read one use full_tensor()."
        )
    if isinstance(value, torch.Tensor) and value.dim():
        return value.reshape(())  # it broadcasts over any shape, also over a 1-D slice
    return value


def _elementwise(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    where = next(a.span for a in (*args, *kwargs.values()) if isinstance(a, ShardTensor))
    local_args = [_local_of(func, a, where) for a in args]
    local_kwargs = {k: _local_of(func, v, where) for k, v in kwargs.items() if k != "memory_format"}
    writes = _writes(func)
    if writes.positions:
        target = args[0] if writes.positions[0] == 0 else kwargs[writes.names[0]]
        if not isinstance(target, ShardTensor):
            _refuse(func, args, kwargs)  # a slice cannot be written into a plain tensor
        func(*local_args, **local_kwargs)
        _mark_written(func, args, kwargs)
        return target
    out = func(*local_args, **local_kwargs)
    if isinstance(out, torch.Tensor):
        return ShardTensor(out, where)
    return tuple(ShardTensor(o, where) for o in out)


def _detach(func: Any, args: Arguments, kwargs: dict[str, Any]) -> ShardTensor:
    """An alias: the same span and the same mark, so that writes through it are noticed."""
    tensor: ShardTensor = args[0]
    return ShardTensor(tensor.local, tensor.span, tensor.mark)


def _listwise(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """foreach and fused operations: lists of tensors, matched index by index."""
    values = (*args, *kwargs.values())
    lists = [a for a in values if isinstance(a, (list, tuple)) and any(isinstance(t, torch.Tensor) for t in a)]
    wheres: list[Span | None] = []
    for i in range(max(len(a) for a in lists)):
        at_index = (a[i] for a in lists if i < len(a))
        wheres.append(next((t.span for t in at_index if isinstance(t, ShardTensor)), None))

    def unwrap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            pairs = zip(value, wheres, strict=False)
            return [t if where is None else _local_of(func, t, where) for t, where in pairs]
        return value.resolve() if isinstance(value, Partial) else value

    out = func(*map(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()})
    _mark_written(func, args, kwargs)
    if out is None or not isinstance(out, (list, tuple)):
        return out
    return [o if where is None else ShardTensor(o, where) for o, where in zip(out, wheres, strict=True)]


def _copy(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """copy_: from a matching slice, or from the whole tensor, of which this rank's elements are taken."""
    target, source = args[0], args[1]
    if not isinstance(target, ShardTensor):
        _refuse(func, args, kwargs)
    whole = isinstance(source, torch.Tensor) and not isinstance(source, (ShardTensor, Partial))
    if whole and source.shape == target.shape:
        source = target.span.part_of(source)
    else:
        source = _local_of(func, source, target.span)
    target.local.copy_(source)
    _mark_written(func, args, kwargs)
    return target


def _put(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """index_put_ by a mask of the same parameter, as in grad[mask] = 0."""
    target, indices = args[0], args[1]
    if not isinstance(target, ShardTensor) or len(indices) != 1 or not isinstance(indices[0], ShardTensor):
        _refuse(func, args, kwargs)
    mask, value = (_local_of(func, v, target.span) for v in (indices[0], args[2]))
    func(target.local, [mask], value, *args[3:])
    _mark_written(func, args, kwargs)
    return target


def _norm(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """linalg_vector_norm(x, ord=2, dim=None, ...) and norm(x, p=2), of the whole tensor."""
    tensor, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    if len(args) > 2 or kwargs.get("dim") is not None or kwargs.get("keepdim"):
        _refuse(func, args, kwargs)
    local = tensor.span.counted(tensor.local)
    return Partial.norm_of(local, 2 if order is None else order, tensor.span.peers, kwargs.get("dtype"))


def _foreach_norm(func: Any, args: Arguments, kwargs: dict[str, Any]) -> list[Any]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return [
        Partial.norm_of(t.span.counted(t.local), order, t.span.peers, dtype)
        if isinstance(t, ShardTensor)
        else torch.linalg.vector_norm(t, order, dtype=dtype)
        for t in args[0]
    ]


def _sum(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if len(args) > 1 or kwargs.get("dim") is not None:
        _refuse(func, args, kwargs)
    total = tensor.span.counted(tensor.local).sum(dtype=kwargs.get("dtype"))
    if func.overloadpacket is aten.mean:
        total = total / tensor.numel()
    return Partial(total, "sum", tensor.span.peers, total.dtype)


def _extreme(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """max, min, amax, amin, any, all, equal: of the whole tensor, combined at once."""
    tensor = args[0]
    if len(args) > 1 and func.overloadpacket is not aten.equal and args[1] not in ([], ()):
        _refuse(func, args, kwargs)
    peers = tensor.span.peers
    packet = func.overloadpacket
    if packet is aten.equal:
        same = torch.tensor(torch.equal(tensor.local, _local_of(func, args[1], tensor.span)), device=tensor.device)
        return bool(peers.combine(same.to(torch.uint8), dist.ReduceOp.MIN))
    if packet in (aten.any, aten.all):
        found = packet(tensor.local).to(torch.uint8)
        return peers.combine(found, dist.ReduceOp.MAX if packet is aten.any else dist.ReduceOp.MIN).to(torch.bool)
    largest = packet in (aten.max, aten.amax)
    info = torch.finfo(tensor.dtype) if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype)
    neutral = torch.full((), info.min if largest else info.max, dtype=tensor.dtype, device=tensor.device)
    value = cast(torch.Tensor, packet(tensor.local)) if tensor.local.numel() else neutral
    return peers.combine(value.clone(), dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)


def _unscale(func: Any, args: Arguments, kwargs: dict[str, Any]) -> None:
    """GradScaler: an overflow in one rank's slice is an overflow on every rank."""
    grads, found, scale = args
    peers = next(g.span.peers for g in grads if isinstance(g, ShardTensor))
    func([g.local if isinstance(g, ShardTensor) else g for g in grads], found, scale)
    peers.combine(found, dist.ReduceOp.MAX)


def _refuse(func: Any, args: Arguments, kwargs: dict[str, Any]) -> NoReturn:
    flat = [t for a in (*args, *kwargs.values()) for t in (a if isinstance(a, (list, tuple)) else (a,))]
    span = next(t.span for t in flat if isinstance(t, ShardTensor))
    optimizer = _calling_optimizer()
    if optimizer is not None:
        raise ShardTensorError(
            f"rank {span.peers.rank}: {optimizer} works on whole tensors ({func}), and each rank holds slices of them: "
            "take an elementwise optimizer (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, NAdam, RAdam)."
        )
    raise ShardTensorError(
        f"{func} needs the whole tensor, and met {span.describe()}. {_where_whole(span)} "
        "Elsewhere call full_tensor() on it, which gives no gradient, or work on the whole model inside "
        "`with towpath.full_parameters(model):`."
    )


def _where_whole(span: Span) -> str:
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


def _calling_optimizer() -> str | None:
    """The class of the optimizer whose step this is part of."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Optimizer):
            return type(caller).__name__
        frame = frame.f_back
    return None


_SPECIAL: dict[Any, Handler] = {
    aten.detach: _detach,
    aten.copy_: _copy,
    aten.index_put_: _put,
    aten.linalg_vector_norm: _norm,
    aten.norm: _norm,
    aten._foreach_norm: _foreach_norm,
    aten.sum: _sum,
    aten.mean: _sum,
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys((aten.max, aten.min, aten.amax, aten.amin, aten.any, aten.all, aten.equal), _extreme),
}
