"""`ShardTensor`, the class of a sharded model's parameters and gradients, and PyTorch's operations on it.

A ShardTensor has the shape of the full tensor, but stores only this rank's slice, contiguous and 1-D (`shard_spec.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import zip_longest
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.optim.optimizer import _foreach_supported_types as known_to_optimizers  # pyright: ignore
from torch.utils._foreach_utils import _foreach_supported_types as known_to_clipping  # pyright: ignore

from towpath.core.formats import Codec
from towpath.core.queues import LoggedCall
from towpath.core.step_state import ParamVersion
from towpath.engine.parameters.dtensors import Box, PickledShard, box_at, boxes_in_whole, chunks_of, write_items
from towpath.engine.parameters.partial_sums import NO_TORCH_FUNCTION, WHOLE, Partial, written_by
from towpath.engine.parameters.shard_spec import EncodedSlice, ShardSpec, whole_tensors
from towpath.errors import ShardError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from towpath.engine.executor import Engine

aten = torch.ops.aten


@dataclass(slots=True)
class RunningStep:
    """The optimizer whose step is running, and the remedy if it cannot step slices, for error messages."""

    # Hooks set both around each step (`engine/optimizer_steps.py`).

    optimizer: str = ""
    remedy: Callable[[], str] = str

    def take(self) -> tuple[str, Callable[[], str]]:
        """Return both fields for an error message, and clear them: no hook runs after a step that raised."""
        taken, self.optimizer, self.remedy = (self.optimizer, self.remedy), "", str
        return taken


running_step = RunningStep()

CANNOT_BE_CAST = (
    "got {} for a parameter of {}: a sharded model cannot be cast or moved. Do it before shard(); precision= sets the "
    "dtypes of compute and of transfers."
)
_TO_SAVE = (
    "For torch.save() let every rank call towpath.checkpoint.get_model_state_dict(model, options=StateDictOptions("
    "full_state_dict=True, cpu_offload=True)), or get_optimizer_state_dict(model, optimizer, options=…), and rank 0 "
    "save what it gets. Without gathering: towpath.checkpoint.save, then `towpath export`."
)

Arguments = Sequence[Any]
Handler = Callable[[Any, Arguments, dict[str, Any]], Any]


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


class ShardTensor(torch.Tensor):
    """A tensor with the shape of the full tensor that stores only this rank's slice of it.

    `towpath.shard` turns the model's parameters into ShardTensors. Optimizers step them, and their `.grad` is one too.
    `to_local()` returns this rank's elements as a plain 1-D tensor. `full_tensor()` all-gathers the full tensor.

    `held` is this rank's slice, `shard_spec` describes it, and `version` counts the writes to it. Gradients and other
    results of operations have no `version`.
    """

    held: torch.Tensor | EncodedSlice
    shard_spec: ShardSpec
    version: ParamVersion | None
    slices_gradient: object  # the autograd node whose gradient a hook slices, or True for a leaf

    @staticmethod
    def __new__(
        cls: type[ShardTensor],
        held: torch.Tensor | EncodedSlice,
        where: ShardSpec,
        version: ParamVersion | None = None,
        requires_grad: bool = False,
    ) -> ShardTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, where.whole_shape, dtype=held.dtype, device=held.device, requires_grad=requires_grad
        )
        made.held, made.shard_spec, made.version, made.slices_gradient = held, where, version, None
        return made

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements, 1-D. For an encoded parameter, a decoded copy of them."""
        held = self.held
        return held if isinstance(held, torch.Tensor) else held.read()

    @property
    def rests_in(self) -> Codec | None:
        """The codec in which a frozen parameter is stored (`frozen_codec=`), or None."""
        return None if isinstance(self.held, torch.Tensor) else self.held.codec

    def write(self, values: torch.Tensor) -> None:
        """Write `values`, 1-D, to this rank's elements. They are encoded if the parameter is stored encoded."""
        if self.version is not None:
            (self.version.wait_for_read if running_step.optimizer else self.version.replaced)()
        if isinstance(self.held, torch.Tensor):
            self.held.copy_(values)
        else:
            self.held.write(values)

    def to_local(self) -> torch.Tensor:
        """Return this rank's elements as a plain 1-D tensor, which may be empty.

        Use it for reading. To write, use operations on the ShardTensor itself, so that the engine notices the write.
        """
        return self.local

    def full_tensor(self) -> torch.Tensor:
        """Return the full tensor, all-gathered from the ranks that share it. Each of them must call this.

        The result may be used in a loss. Its backward pass takes the mean of the gradients over all ranks, so every
        rank must run that backward pass.

        Returns:
            A plain tensor of the full shape.

        Raises:
            StepError: A rank that shares the tensor did not make this call.
        """
        if self.requires_grad and torch.is_grad_enabled():
            return cast(torch.Tensor, _FullTensor.apply(self))
        return next(whole_tensors([[self]]))[0]

    @property
    def data(self) -> ShardTensor:
        """An alias outside autograd. The engine notices writes through it."""
        return self.detach()  # pyright: ignore[reportReturnType]

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Copy `value`, a full tensor or a matching slice. Dtype and device cannot change, as the engine owns both."""
        if value.dtype != self.dtype or value.device != self.device:
            mine, theirs = (f"{tensor.dtype} on {tensor.device}" for tensor in (self, value))
            raise ShardError(CANNOT_BE_CAST.format(theirs, mine))
        with torch.no_grad():
            self.copy_(value)

    def register_hook(self, hook: Any) -> NoReturn:
        """Raise `ShardError`: hooks would never run, because the gradient appears complete at the boundary."""
        raise ShardError(
            "hooks on a sharded parameter would never run: its gradient appears at the boundary, complete. Read or "
            "change .grad after backward() instead."
        )

    register_post_accumulate_grad_hook = register_hook

    def untyped_storage(self) -> NoReturn:
        """Raise `ShardError`: no storage has the shape of this tensor."""
        raise ShardError(
            f"{self.shard_spec.name!r} has no memory of its shape: rank {self.shard_spec.replica.number} holds a slice "
            f"of it, to_local(). {_TO_SAVE}"
        )

    storage = untyped_storage

    def data_ptr(self) -> int:
        """Return 0, as for any tensor that wraps others. For a parameter, raise `ShardError`."""
        # To PyTorch's checkpoint stagers (dcp.async_save), 0 means that a tensor keeps its values in attributes, as a
        # DTensor does, and they copy those. A state dict holds aliases of the parameters, and they get these. A kernel
        # that is given the parameter itself would read and write at address 0.
        if isinstance(self, torch.nn.Parameter):
            self.untyped_storage()
        return 0

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise `ShardError`: only the full tensor has a NumPy array."""
        raise ShardError(f"{self} has no NumPy array: call full_tensor().detach().numpy() on every rank.")

    def tolist(self) -> NoReturn:
        """Raise `ShardError`: only the full tensor can become a list."""
        raise ShardError(f"{self} is one rank's slice: call full_tensor().tolist() on every rank.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        start, end = self.shard_spec.bounds()
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"ShardTensor({tuple(self.shape)}, {self.dtype}, holds [{start}:{end}] of {self.numel()}{grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        copy = ShardTensor(self.local.detach().clone(), self.shard_spec, None, self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardError(f"a ShardTensor cannot be pickled: it is one rank's slice. {_TO_SAVE}")

    # The protocol of torch.distributed.checkpoint for tensor classes: this rank's slice, as boxes of the full shape ---

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return write_items(fqn, self.local, self.shape, self.boxes() if self.shard_spec.is_saved else [])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return this rank's boxes. DCP calls this before it loads the tensor, also on ranks that hold none of it."""
        if self.rests_in is not None:
            raise ShardError(
                f"{self.shard_spec.name!r} is stored in {self.rests_in}, where torch.distributed.checkpoint cannot "
                "write to it. Load with towpath.checkpoint.load, or towpath.checkpoint.set_model_state_dict."
            )
        if self.version is not None:
            # DCP writes to the box that it gets next, past every operation of this class.
            self.version.replaced()
        return chunks_of(self.boxes())

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the box that starts at the offsets of `index`, as a view of this rank's slice."""
        return box_at(index, self.local.detach(), self.boxes())

    def boxes(self, among: tuple[int, int] | None = None) -> list[Box]:
        """Return this rank's elements, or those `among` two bounds of them, as boxes of the full tensor."""
        shard_spec = self.shard_spec
        if not self.numel():
            return [Box((0,) * self.dim(), tuple(self.shape), 0, 0)]
        return boxes_in_whole(shard_spec.shape, shard_spec.parallel, *(among or shard_spec.bounds()))

    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = _operation(func)
        written = written_by(func, args, kwargs, ShardTensor)
        for tensor in written if operation not in (_copy, _draw) else ():  # those replace all elements
            _prepare_write(tensor)
        out = operation(func, args, kwargs)
        # Writes through any alias count. PyTorch's `_version` misses foreach, fused and `.data` writes.
        for tensor in written:
            if tensor.version is not None:
                tensor.version.written()
        return out


def engine_of_parameter(parameter: torch.Tensor) -> Engine | None:
    """Return the engine of the sharded model that `parameter` belongs to; None if there is none."""
    # Gradients and copies have none.
    if not isinstance(parameter, ShardTensor) or parameter.version is None:
        return None
    engine = parameter.shard_spec.replica.engine
    return cast("Engine | None", engine()) if engine is not None else None


class _FullTensor(torch.autograd.Function):
    """`full_tensor()` in an autograd graph."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor) -> torch.Tensor:
        ctx.shard_spec = tensor.shard_spec
        return next(whole_tensors([[tensor]]))[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> ShardTensor:
        (gradient,) = gradients
        # The all-reduce works in place, and autograd may give this gradient to others, too.
        own = gradient.detach().clone(memory_format=torch.contiguous_format)
        mean = ctx.shard_spec.replica.mean_of_everyone(own, "the backward pass of full_tensor()")
        return ShardTensor(ctx.shard_spec.part_of(mean).clone(), ctx.shard_spec)


# Elementwise operations and optimizers run on the slices. Norms and sums are combined over the ranks that share the
# tensor (`partial_sums.py`). Any other operation raises `ShardError`.

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


@lru_cache(maxsize=1024)
def _operation(func: Any) -> Handler:
    """Return the handler that executes `func`, which has a ShardTensor among its arguments."""
    special = _SPECIAL.get(func.overloadpacket)
    if special is not None:
        return special
    if func.namespace == "aten":
        name = func._schema.name.removeprefix("aten::")
        # With equal seeds all slices would get equal values.
        random = torch.Tag.nondeterministic_seeded in func.tags
        if name.startswith(("_foreach_", "_fused_")) and name not in _FOREACH_REDUCTIONS:
            return _listwise
        if (torch.Tag.pointwise in func.tags or func.overloadpacket in _ELEMENTWISE) and not random:
            return _elementwise
        if random and name.endswith("_"):
            return _draw
    return _refuse


_FOREACH_REDUCTIONS = {"_foreach_max", "_foreach_powsum"}


def _prepare_write(target: ShardTensor) -> None:
    """Wait for copies of `target`. Raise `ShardError` if it is stored encoded, and so only written entirely."""
    if target.version is not None:
        target.version.wait_for_read()
    if type(target.held) is EncodedSlice:
        raise ShardError(
            f"{target.shard_spec.name!r} is stored in {target.rests_in}: it cannot be changed in place. Write it: "
            "p.copy_(full_tensor), load_state_dict(), or inside `with towpath.full_parameters(model):`."
        )


def _local_of(func: Any, value: Any, where: ShardSpec) -> Any:
    """Return the slice of `value` that matches `where`, or raise `ShardError` with the reason if none does."""
    if isinstance(value, ShardTensor):
        if value.shard_spec is not where:
            raise ShardError(
                f"{func}: two ShardTensors of different parameters, {tuple(value.shape)} and "
                f"{tuple(where.whole_shape)}, hold slices that do not match. Use full_tensor() on both."
            )
        return value.local
    if isinstance(value, Partial):
        value = value.resolve()
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        if value.shape == where.whole_shape and in_backward():
            # Autograd expands the gradient of a sum or a mean, the same on all ranks.
            return where.part_of(value)
        name, remedy = running_step.take()
        made = f" If {name} made it itself: {remedy()}" if name else ""
        raise ShardError(
            f"{func}: a plain tensor of shape {tuple(value.shape)} met {where.describe()}, and is not sliced the same "
            f"way. {_where_whole(where)} To write a full tensor use copy_(); to read one use full_tensor(). An "
            "optimizer's state: make the optimizer after shard(); to load its states call "
            f"towpath.checkpoint.set_optimizer_state_dict.{made}"
        )
    if isinstance(value, torch.Tensor) and value.dim():
        # A 0-D tensor broadcasts over a 1-D slice too.
        return value.reshape(())
    return value


def _elementwise(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    where = next(a.shard_spec for a in (*args, *kwargs.values()) if isinstance(a, ShardTensor))
    local_args = [_local_of(func, a, where) for a in args]
    local_kwargs = {k: _local_of(func, v, where) for k, v in kwargs.items() if k != "memory_format"}
    if targets := written_by(func, args, kwargs, object):
        if not isinstance(targets[0], ShardTensor):
            # A slice cannot be written into a plain tensor.
            _refuse(func, args, kwargs)
        func(*local_args, **local_kwargs)
        return targets[0]
    out = func(*local_args, **local_kwargs)
    if isinstance(out, torch.Tensor):
        return ShardTensor(out, where)
    return tuple(ShardTensor(o, where) for o in out)


def _new_empty(func: Any, args: Arguments, kwargs: dict[str, Any]) -> ShardTensor:
    """Run new_empty for the tensor's own shape only, as PyTorch's checkpoint stagers call it for the CPU."""
    tensor, size = args[0], args[1]
    if torch.Size(size) != tensor.shape:
        _refuse(func, args, kwargs)
    return ShardTensor(func(tensor.local, [tensor.local.numel()], **kwargs), tensor.shard_spec)


def _for_other_process(tensor: ShardTensor) -> tuple[Any, ...]:
    """Return how multiprocessing sends a ShardTensor. `ShardTensor.__reduce_ex__` refuses pickle itself."""
    boxes = tensor.boxes() if tensor.shard_spec.is_saved else []
    return PickledShard, (tensor.shape, tensor.local.detach(), boxes)


def _listwise(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run a foreach or fused operation on the slices. Its lists of tensors are matched index by index."""
    values = (*args, *kwargs.values())
    lists = [a for a in values if isinstance(a, (list, tuple)) and any(isinstance(t, torch.Tensor) for t in a)]
    wheres = [next((t.shard_spec for t in at if isinstance(t, ShardTensor)), None) for at in zip_longest(*lists)]

    def unwrap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            # The first two cases are those of `_local_of`, too. They are here because the lists are long.
            return [
                t.held
                if type(t) is ShardTensor and t.shard_spec is where and type(t.held) is torch.Tensor
                else (t if where is None else _local_of(func, t, where))
                for t, where in zip(value, wheres, strict=False)
            ]
        return value.resolve() if isinstance(value, Partial) else value

    out = func(*map(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()})
    if out is None or not isinstance(out, (list, tuple)):
        return out
    return [o if where is None else ShardTensor(o, where) for o, where in zip(out, wheres, strict=True)]


def _zero(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run zero_ on one tensor or a list. It also counts the gradients, which ranks compare (`Program.zeroed`)."""
    several = isinstance(args[0], (list, tuple))
    for tensor in args[0] if several else args[:1]:
        if isinstance(tensor, ShardTensor) and tensor.version is None and (log := tensor.shard_spec.replica.program):
            log.zeroed += 1
    return (_listwise if several else _elementwise)(func, args, kwargs)


def _copy(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run copy_ from a matching slice, or from a full tensor, from which it takes this rank's elements."""
    target, source = args[0], args[1]
    if not isinstance(target, ShardTensor):
        _refuse(func, args, kwargs)
    whole = isinstance(source, torch.Tensor) and not isinstance(source, (ShardTensor, Partial))
    if whole and source.shape == target.shape:
        source = target.shard_spec.part_of(source)
    else:
        source = _local_of(func, source, target.shard_spec)
    if not isinstance(source, torch.Tensor) or not source.dim():
        source = torch.empty_like(target.local).copy_(source)
    target.write(source)
    return target


def _draw(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Fill a tensor with random numbers, as in torch.nn.init: every rank draws the full tensor, rank 0's counts."""
    # `trunc_normal_` draws into temporary tensors of a parameter's shape, too.
    target = args[0]
    where = target.shard_spec
    if where.parallel is not None or running_step.optimizer:
        _refuse(func, args, kwargs)
    whole = torch.empty(where.shape, dtype=target.dtype, device=target.device)
    func(whole, *args[1:], **kwargs)
    program = where.replica.program
    # Several ranks share the model.
    if program is not None:
        with program.shared(f"{func.overloadpacket.__name__}() of {where.name!r}", LoggedCall.PROGRAM):
            where.replica.engine().comm.job.broadcast(whole)
    target.write(where.part_of(whole))
    return target


def _put(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run index_put_ with a mask of the same parameter, as in grad[mask] = 0."""
    target, indices = args[0], args[1]
    if not isinstance(target, ShardTensor) or len(indices) != 1 or not isinstance(indices[0], ShardTensor):
        _refuse(func, args, kwargs)
    mask, value = (_local_of(func, v, target.shard_spec) for v in (indices[0], args[2]))
    func(target.local, [mask], value, *args[3:])
    return target


def _norm(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Return the partial norm over the full tensor, for linalg_vector_norm(x, ord=2, ...) and norm(x, p=2)."""
    tensor, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    if len(args) > 2 or kwargs.get("dim") is not None or kwargs.get("keepdim"):
        _refuse(func, args, kwargs)
    return _foreach_norm(func, ([tensor], 2 if order is None else order, kwargs.get("dtype")), {})[0]


def _foreach_norm(func: Any, args: Arguments, kwargs: dict[str, Any]) -> list[Any]:
    """Return the norm of each tensor in a list, partial for ShardTensors."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    ours = [t for t in args[0] if isinstance(t, ShardTensor)]
    parts = Partial.norms_of([t.shard_spec.counted(t.local) for t in ours], order, [t.shard_spec for t in ours], dtype)
    norms, plain = iter(parts), partial(torch.linalg.vector_norm, ord=order, dtype=dtype)
    return [next(norms) if isinstance(t, ShardTensor) else plain(t) for t in args[0]]


def _slice_gradient(tensor: ShardTensor) -> None:
    """Let a backward pass take this rank's slice of the gradient of a sum, which autograd expands to a plain tensor."""
    node, where = tensor.grad_fn or True, tensor.shard_spec
    if tensor.requires_grad and torch.is_grad_enabled() and tensor.slices_gradient is not node:
        tensor.slices_gradient = node

        def sliced(gradient: torch.Tensor) -> torch.Tensor:
            if isinstance(gradient, ShardTensor):
                return gradient
            return ShardTensor(where.part_of(gradient.detach()).clone(), where)

        # Past `ShardTensor.register_hook`, which refuses hooks of users.
        torch.Tensor.register_hook(tensor, sliced)


def _sum(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Return the partial sum or mean over the full tensor."""
    tensor = args[0]
    _slice_gradient(tensor)
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if dims and {d % tensor.dim() for d in dims} != set(range(tensor.dim())):
        _refuse(func, args, kwargs)
    total = tensor.shard_spec.counted(tensor.local).sum(dtype=kwargs.get("dtype"))
    if func.overloadpacket is aten.mean:
        total = total / tensor.numel()
    # The gradients of extremes keep the dimensions.
    if args[2] if len(args) > 2 else kwargs.get("keepdim"):
        total = total.reshape((1,) * tensor.dim())
    where = tensor.shard_spec
    return Partial(total, "sum", where.replica, (where.name,), total.dtype)


_MIN, _MAX = dist.ReduceOp.MIN, dist.ReduceOp.MAX
_EXTREMES = {
    **dict.fromkeys((aten.max, aten.amax, aten.any), _MAX),
    **dict.fromkeys((aten.min, aten.amin, aten.all), _MIN),
}


def _extreme(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run an operation of `_EXTREMES` over the full tensor, and combine the result immediately."""
    tensor, packet, op = args[0], func.overloadpacket, _EXTREMES[func.overloadpacket]
    if len(args) > 1 and args[1] not in ([], ()):
        _refuse(func, args, kwargs)
    where, replica = tensor.shard_spec, tensor.shard_spec.replica
    if packet in (aten.any, aten.all):
        return replica.combine(packet(tensor.local).to(torch.uint8), [where.name], op).to(torch.bool)
    info = torch.finfo(tensor.dtype) if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype)
    # A rank whose slice is empty takes part in the all-reduce with a value that never wins.
    neutral = torch.full((), info.min if op is _MAX else info.max, dtype=tensor.dtype, device=tensor.device)
    value = cast(torch.Tensor, packet(tensor.local)).clone() if tensor.local.numel() else neutral
    value = replica.combine(value, [where.name], op)
    # The backward pass of a Partial averages its gradient over all ranks.
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    return Partial(value, WHOLE, replica, (where.name,), value.dtype) if needs_gradient else value


def _equal(func: Any, args: Arguments, kwargs: dict[str, Any]) -> bool:
    tensor, where = args[0], args[0].shard_spec
    same = torch.tensor(torch.equal(tensor.local, _local_of(func, args[1], where)), device=tensor.device)
    return bool(where.replica.combine(same.to(torch.uint8), [where.name], _MIN))


def _unscale(func: Any, args: Arguments, kwargs: dict[str, Any]) -> None:
    """Unscale gradients for GradScaler. An overflow in one rank's slice counts on every rank that shares the tensor."""
    grads, found, scale = args
    replica = next(g.shard_spec.replica for g in grads if isinstance(g, ShardTensor))
    # With offload, the scaler copies its numbers to the host.
    if not found.is_cuda and torch.cuda.is_initialized():
        # The copy of the scale to the host is asynchronous, and the operation below reads it on the host.
        torch.cuda.current_stream().synchronize()
    func([g.local if isinstance(g, ShardTensor) else g for g in grads], found, scale)
    # All ranks skip the step together, because the slices of one parameter must not diverge.
    replica.combine(found, op=_MAX)


def _refuse(func: Any, args: Arguments, kwargs: dict[str, Any]) -> NoReturn:
    flat = [t for a in (*args, *kwargs.values()) for t in (a if isinstance(a, (list, tuple)) else (a,))]
    shard_spec = next(t.shard_spec for t in flat if isinstance(t, ShardTensor))
    name, remedy = running_step.take()
    if name:
        raise ShardError(
            f"rank {shard_spec.replica.number}: {name} works on full tensors ({func}), and each rank holds slices of "
            f"them. {remedy()}"
        )
    raise ShardError(
        f"{func} needs the full tensor, and got {shard_spec.describe()}. {_where_whole(shard_spec)} Elsewhere call "
        "full_tensor() on it, on every rank, or work inside `with towpath.full_parameters(model):`."
    )


def _where_whole(shard_spec: ShardSpec) -> str:
    if not shard_spec.unit:
        return (
            "It is unsharded inside model(...), and in methods that towpath.register_forward_method(model, name) names."
        )
    return (
        "It is unsharded inside the forward of that unit, and in methods that towpath.register_forward_method(module, "
        "name) names. To compute with it outside, leave the unit to the root: pass the other units as units=."
    )


_SPECIAL: dict[Any, Handler] = {
    # The alias has the same version, so that writes through it count.
    aten.detach: lambda _, args, __: ShardTensor(args[0].held, args[0].shard_spec, args[0].version),
    aten.copy_: _copy,
    **dict.fromkeys((aten.zero_, aten._foreach_zero_), _zero),
    aten.new_empty: _new_empty,
    aten.index_put_: _put,
    **dict.fromkeys((aten.linalg_vector_norm, aten.norm), _norm),
    aten._foreach_norm: _foreach_norm,
    aten.sum: _sum,
    aten.mean: _sum,
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys(_EXTREMES, _extreme),
    aten.equal: _equal,
}


# PyTorch uses foreach operations (for norms, clipping, and on a GPU in each optimizer) only for tensor classes that it
# lists as supported. DTensor adds itself to these lists in the same way.
for _known in (known_to_clipping, known_to_optimizers):
    if ShardTensor not in _known:
        cast(list[type], _known).append(ShardTensor)
ForkingPickler.register(ShardTensor, _for_other_process)
