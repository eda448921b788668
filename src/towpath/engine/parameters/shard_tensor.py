"""`ShardTensor`, the class of a sharded model's parameters and gradients, and PyTorch's operations on it.

A ShardTensor has the shape of the full tensor, but stores only this rank's slice, contiguous and 1-D (`shard_spec.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.optim.optimizer import _foreach_supported_types as known_to_optimizers  # pyright: ignore
from torch.utils._foreach_utils import _foreach_supported_types as known_to_clipping  # pyright: ignore

from towpath.core.formats import Codec
from towpath.core.scopes import LoggedCall
from towpath.core.step_state import ParamVersion
from towpath.engine.parameters.dtensors import Box, boxes_in_whole
from towpath.engine.parameters.partial_sums import NO_TORCH_FUNCTION, Partial
from towpath.engine.parameters.shard_spec import EncodedSlice, ShardSpec, whole_tensors
from towpath.errors import ShardError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from towpath.engine.executor import Engine

aten = torch.ops.aten


@dataclass(slots=True)
class RunningStep:
    """The optimizer whose step is running, and the remedy if it cannot step slices, for error messages.

    Hooks set both around each step (`engine/optimizer_hooks.py`).
    """

    optimizer: str = ""
    remedy: Callable[[], str] = str

    def take(self) -> tuple[str, Callable[[], str]]:
        """Return both fields for an error message, and clear them: no hook runs after a step that raised."""
        taken, self.optimizer, self.remedy = (self.optimizer, self.remedy), "", str
        return taken


running_step = RunningStep()

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

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: `__new__` has set all attributes."""

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
            (self.version.before_write if running_step.optimizer else self.version.replaced)()
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
            raise ShardError(
                f"got {value.dtype} on {value.device} for a parameter of {self.dtype} on {self.device}: a sharded "
                "model cannot be cast or moved. Do it before shard(); precision= sets the dtypes of compute and of "
                "transfers."
            )
        with torch.no_grad():
            self.copy_(value)

    def register_hook(self, hook: Any) -> NoReturn:
        """Raise `ShardError`: hooks would never run, because the gradient appears complete at the boundary."""
        raise ShardError(
            "hooks on a sharded parameter would never run: its gradient appears at the boundary, complete. Read or "
            "change .grad after backward() instead."
        )

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        """Raise `ShardError`, as `register_hook` does."""
        self.register_hook(hook)

    def untyped_storage(self) -> NoReturn:
        """Raise `ShardError`: no storage has the shape of this tensor."""
        raise ShardError(
            f"{self.shard_spec.name!r} has no memory of its shape: rank {self.shard_spec.replica.number} holds a slice "
            "of it, to_local(). To save the model let every rank call towpath.checkpoint.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), and rank 0 save what it gets. Without "
            "gathering: towpath.checkpoint, then `towpath export`."
        )

    def storage(self) -> NoReturn:
        """Raise `ShardError`, as `untyped_storage` does."""
        self.untyped_storage()

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
        raise ShardError(
            "a ShardTensor cannot be pickled: it is one rank's slice. For torch.save() let every rank call "
            "towpath.checkpoint.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True)), or get_optimizer_state_dict(model, optimizer, options=…), and rank 0 save what it "
            "gets. Without gathering: towpath.checkpoint.save."
        )

    # The protocol of torch.distributed.checkpoint for tensor classes: this rank's slice, as boxes of the full shape ---

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from towpath.engine.parameters.dtensors import write_items  # loads what only checkpoints need

        return write_items(fqn, self.local, self.shape, self.boxes() if self.shard_spec.is_saved else [])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return this rank's boxes. DCP calls this before it loads the tensor, also on ranks that hold none of it."""
        if self.rests_in is not None:
            raise ShardError(
                f"{self.shard_spec.name!r} is stored in {self.rests_in}, where torch.distributed.checkpoint cannot "
                "write to it. Load with towpath.checkpoint.load, or towpath.checkpoint.set_model_state_dict."
            )
        if self.version is not None:
            self.version.replaced()
        from towpath.engine.parameters.dtensors import chunks_of

        return chunks_of(self.boxes())

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the box that starts at the offsets of `index`, as a view of this rank's slice."""
        from towpath.engine.parameters.dtensors import box_at

        return box_at(index, self.local.detach(), self.boxes())

    def boxes(self, among: tuple[int, int] | None = None) -> list[Box]:
        """Return this rank's elements as boxes of the full tensor.

        `among` limits the result to the elements [start, end), in the numbering of `shard_spec.bounds()`.
        """
        shard_spec = self.shard_spec
        if not self.numel():
            return [Box((0,) * self.dim(), tuple(self.shape), 0, 0)]
        return boxes_in_whole(shard_spec.shape, shard_spec.parallel, *(among or shard_spec.bounds()))

    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _operation(func)(func, args, kwargs or {})


def engine_with(parameter: torch.Tensor) -> Engine | None:
    """Return the engine of the sharded model that `parameter` belongs to; None if there is none."""
    if not isinstance(parameter, ShardTensor) or parameter.version is None:  # gradients and copies have none
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
        own = gradient.detach().clone(memory_format=torch.contiguous_format)
        mean = ctx.shard_spec.replica.mean_of_everyone(own, "the backward pass of full_tensor()")
        return ShardTensor(ctx.shard_spec.part_of(mean).clone(), ctx.shard_spec)


# Elementwise operations and optimizers run on the slices. Norms and sums are combined over the ranks that share the
# tensor (`partial_sums.py`). Any other operation raises `ShardError`.
#
# The handlers also count writes: an operation that writes to a parameter raises its `version`, which its aliases share.
# PyTorch's `_version` would not do, because foreach, fused and `.data` writes do not change it.

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
        random = torch.Tag.nondeterministic_seeded in func.tags  # with equal seeds all slices would get equal values
        if name.startswith(("_foreach_", "_fused_")) and name not in _FOREACH_REDUCTIONS:
            return _listwise
        if (torch.Tag.pointwise in func.tags or func.overloadpacket in _ELEMENTWISE) and not random:
            return _elementwise
        if random and name.endswith("_"):
            return _draw
    return _refuse


_FOREACH_REDUCTIONS = {"_foreach_max", "_foreach_powsum"}


@lru_cache(maxsize=1024)
def _writes(func: Any) -> list[tuple[int, str]]:
    """Return the position and the name of each argument that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _mark_written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for position, name in _writes(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, ShardTensor) and tensor.version is not None:
                tensor.version.written()


def _prepare_write(target: Any) -> None:
    """Wait for copies of `target`. Raise `ShardError` if it is stored encoded, and so only written entirely."""
    if isinstance(target, ShardTensor) and target.version is not None:
        target.version.before_write()
    if isinstance(target, ShardTensor) and type(target.held) is EncodedSlice:
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
                f"{tuple(where.whole_shape)}, hold slices that do not match element by element. Use full_tensor() on "
                "both."
            )
        return value.local
    if isinstance(value, Partial):
        value = value.resolve()
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        if value.shape == where.whole_shape and in_backward():
            return where.part_of(value)  # autograd expands the gradient of a sum or a mean, the same on all ranks
        name, remedy = running_step.take()
        made = f" If {name} made it itself: {remedy()}" if name else ""
        raise ShardError(
            f"{func}: a plain tensor of shape {tuple(value.shape)} met {where.describe()}, and is not sliced the same "
            f"way. {_where_whole(where)} If the plain tensor is an optimizer's state, the optimizer stepped before "
            "shard(): make a new one; or its states were loaded unsharded: call towpath.checkpoint."
            "set_optimizer_state_dict. To write a full tensor into a parameter use copy_(); to read one use "
            f"full_tensor().{made}"
        )
    if isinstance(value, torch.Tensor) and value.dim():
        return value.reshape(())  # a 0-D tensor broadcasts over a 1-D slice too
    return value


def _elementwise(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    where = next(a.shard_spec for a in (*args, *kwargs.values()) if isinstance(a, ShardTensor))
    local_args = [_local_of(func, a, where) for a in args]
    local_kwargs = {k: _local_of(func, v, where) for k, v in kwargs.items() if k != "memory_format"}
    if writes := _writes(func):
        position, name = writes[0]
        target = args[0] if position == 0 else kwargs[name]
        if not isinstance(target, ShardTensor):
            _refuse(func, args, kwargs)  # a slice cannot be written into a plain tensor
        _prepare_write(target)
        func(*local_args, **local_kwargs)
        _mark_written(func, args, kwargs)
        return target
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
    from towpath.engine.parameters.dtensors import SentShard  # loads what only checkpoints need

    boxes = tensor.boxes() if tensor.shard_spec.is_saved else []
    return SentShard, (tensor.shape, tensor.local.detach(), boxes)


def _listwise(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run a foreach or fused operation on the slices. Its lists of tensors are matched index by index."""
    values = (*args, *kwargs.values())
    lists = [a for a in values if isinstance(a, (list, tuple)) and any(isinstance(t, torch.Tensor) for t in a)]
    wheres: list[ShardSpec | None] = [None] * max(len(a) for a in lists)
    for tensors in lists:
        for i, tensor in enumerate(tensors):
            if wheres[i] is None and isinstance(tensor, ShardTensor):
                wheres[i] = tensor.shard_spec

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

    for position, _ in _writes(func):
        for tensor in args[position] if position < len(args) else ():
            _prepare_write(tensor)
    out = func(*map(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()})
    _mark_written(func, args, kwargs)
    if out is None or not isinstance(out, (list, tuple)):
        return out
    return [o if where is None else ShardTensor(o, where) for o, where in zip(out, wheres, strict=True)]


def _zero(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run zero_ on one tensor or a list. It also counts the gradients, which ranks compare (`Program.zeroed`)."""
    several = isinstance(args[0], (list, tuple))
    for tensor in cast(Sequence[torch.Tensor], args[0] if several else args[:1]):
        if isinstance(tensor, ShardTensor) and tensor.version is None and tensor.shard_spec.replica.program is not None:
            tensor.shard_spec.replica.program.zeroed += 1
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
    _mark_written(func, args, kwargs)
    return target


def _draw(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Fill a tensor with random numbers, as in torch.nn.init: every rank draws the full tensor, rank 0's counts.

    `trunc_normal_` draws into temporary tensors of a parameter's shape, too.
    """
    target = args[0]
    where = target.shard_spec
    if where.parallel is not None or running_step.optimizer:
        _refuse(func, args, kwargs)
    whole = torch.empty(where.shape, dtype=target.dtype, device=target.device)
    func(whole, *args[1:], **kwargs)
    program = where.replica.program
    if program is not None:  # several ranks share the model
        with program.shared(f"{func.overloadpacket.__name__}() of {where.name!r}", LoggedCall.PROGRAM):
            where.replica.engine().comm.job.broadcast(whole)
    target.write(where.part_of(whole))
    _mark_written(func, args, kwargs)
    return target


def _put(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run index_put_ with a mask of the same parameter, as in grad[mask] = 0."""
    target, indices = args[0], args[1]
    if not isinstance(target, ShardTensor) or len(indices) != 1 or not isinstance(indices[0], ShardTensor):
        _refuse(func, args, kwargs)
    _prepare_write(target)
    mask, value = (_local_of(func, v, target.shard_spec) for v in (indices[0], args[2]))
    func(target.local, [mask], value, *args[3:])
    _mark_written(func, args, kwargs)
    return target


def _norm(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Return the partial norm over the full tensor, for linalg_vector_norm(x, ord=2, ...) and norm(x, p=2)."""
    tensor, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    if len(args) > 2 or kwargs.get("dim") is not None or kwargs.get("keepdim"):
        _refuse(func, args, kwargs)
    local = tensor.shard_spec.counted(tensor.local)
    [norm] = Partial.norms_of([local], 2 if order is None else order, [tensor.shard_spec], kwargs.get("dtype"))
    return norm


def _foreach_norm(func: Any, args: Arguments, kwargs: dict[str, Any]) -> list[Any]:
    """Return the norm of each tensor in a list, partial for ShardTensors."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    tensors = cast(Sequence[torch.Tensor], args[0])
    ours = [t for t in tensors if isinstance(t, ShardTensor)]
    parts = Partial.norms_of([t.shard_spec.counted(t.local) for t in ours], order, [t.shard_spec for t in ours], dtype)
    norms = iter(parts)
    return [
        next(norms) if isinstance(t, ShardTensor) else torch.linalg.vector_norm(t, order, dtype=dtype) for t in tensors
    ]


def _slice_gradient(tensor: ShardTensor) -> None:
    """Let a backward pass take this rank's slice of the gradient of a sum, which autograd expands to a plain tensor."""
    node, where = tensor.grad_fn or True, tensor.shard_spec
    if tensor.requires_grad and torch.is_grad_enabled() and tensor.slices_gradient is not node:
        tensor.slices_gradient = node

        def sliced(gradient: torch.Tensor) -> torch.Tensor:
            if isinstance(gradient, ShardTensor):
                return gradient
            return ShardTensor(where.part_of(gradient.detach()).clone(), where)

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
    if args[2] if len(args) > 2 else kwargs.get("keepdim"):  # the gradients of extremes need it
        total = total.reshape((1,) * tensor.dim())
    where = tensor.shard_spec
    return Partial(total, "sum", where.replica, (where.name,), total.dtype)


def _extreme(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run max, min, amax, amin, any, all or equal over the full tensor, and combine the result immediately."""
    tensor = args[0]
    if len(args) > 1 and func.overloadpacket is not aten.equal and args[1] not in ([], ()):
        _refuse(func, args, kwargs)
    where, replica = tensor.shard_spec, tensor.shard_spec.replica
    packet = func.overloadpacket
    if packet is aten.equal:
        same = torch.tensor(torch.equal(tensor.local, _local_of(func, args[1], where)), device=tensor.device)
        return bool(replica.combine(same.to(torch.uint8), [where.name], dist.ReduceOp.MIN))
    if packet in (aten.any, aten.all):
        found = packet(tensor.local).to(torch.uint8)
        op = dist.ReduceOp.MAX if packet is aten.any else dist.ReduceOp.MIN
        return replica.combine(found, [where.name], op).to(torch.bool)
    largest = packet in (aten.max, aten.amax)
    info = torch.finfo(tensor.dtype) if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype)
    neutral = torch.full((), info.min if largest else info.max, dtype=tensor.dtype, device=tensor.device)
    value = cast(torch.Tensor, packet(tensor.local)) if tensor.local.numel() else neutral
    value = replica.combine(value.clone(), [where.name], dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)
    return Partial.of_whole(value, where) if tensor.requires_grad and torch.is_grad_enabled() else value


def _unscale(func: Any, args: Arguments, kwargs: dict[str, Any]) -> None:
    """Unscale gradients for GradScaler. An overflow in one rank's slice counts on every rank that shares the tensor."""
    grads, found, scale = args
    replica = next(g.shard_spec.replica for g in grads if isinstance(g, ShardTensor))
    if not found.is_cuda and torch.cuda.is_initialized():  # with offload, the scaler copies its numbers to the host
        torch.cuda.current_stream().synchronize()
    func([g.local if isinstance(g, ShardTensor) else g for g in grads], found, scale)
    replica.combine(found, op=dist.ReduceOp.MAX)


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
        "full_tensor() on it, on every rank, or work on the whole model inside `with towpath.full_parameters(model):`."
    )


def _where_whole(shard_spec: ShardSpec) -> str:
    if not shard_spec.unit:
        return (
            "It is unsharded inside model(...), and inside any method of the model that "
            "towpath.register_forward_method(model, name) has made an entry."
        )
    return (
        "It is unsharded inside the forward of that unit, and inside methods of the unit's module that "
        "towpath.register_forward_method(module, name) has made entries. Where the model computes with it outside, "
        "leave the unit to the root: pass the other units as units= to shard()."
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
    **dict.fromkeys((aten.max, aten.min, aten.amax, aten.amin, aten.any, aten.all, aten.equal), _extreme),
}


# PyTorch uses foreach operations (for norms, clipping, and on a GPU in each optimizer) only for tensor classes that it
# lists as supported. DTensor adds itself to these lists in the same way.
for _known in (known_to_clipping, known_to_optimizers):
    if ShardTensor not in _known:
        cast(list[type], _known).append(ShardTensor)
ForkingPickler.register(ShardTensor, _for_other_process)
