"""Norms and sums of ShardTensors, which ranks combine only when the value is needed.

Each rank first knows the part of its own slice (`Partial`). The delay saves all-reduces: PyTorch's `clip_grad_norm_`
takes the norm of each gradient, stacks the norms, and takes the norm of the stack. The norms stay partial through the
stack, and only the last one is combined, so the call costs one all-reduce.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from towpath.core.queues import LoggedCall
from towpath.errors import ShardError

if TYPE_CHECKING:
    from towpath.engine.agree.program import Program
    from towpath.engine.parameters.shard_spec import ShardSpec


aten = torch.ops.aten
Written = TypeVar("Written")

# The `order` of a Partial whose value is combined. A backward pass averages the gradient of this value.
WHOLE = "whole"

# The `order` of a Partial that an operation of the loss has written to. Only its earlier value gets a mean gradient.
_WRITTEN = "written"

# How norms of these orders are combined. Those of other orders are combined as sums of powers.
_REDUCE_OPS: dict[float | str, Any] = {
    math.inf: dist.ReduceOp.MAX,
    -math.inf: dist.ReduceOp.MIN,
    0: dist.ReduceOp.SUM,
}

# `ShardTensor` and `Partial` work below autograd, in __torch_dispatch__, and need no hook above it.
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl  # pyright: ignore[reportPrivateUsage]


@dataclass(slots=True, eq=False)
class Replica:
    """The ranks that together hold one full copy of the optimizer states. `ShardSpec` and `Partial` hold it.

    `group` is their process group, or None if the replica is one rank. `slots[i]` is the slice of its i-th rank.
    `rank` is this rank. `beyond` holds the groups of a tensor-parallel mesh, over which results are combined once more.
    `everyone` is the group of all ranks that share the model, each of which computes a loss of its own. `first` is the
    number of its first rank in the job. `is_a_stage` says that other ranks have other parameters of the model, as with
    a pipeline.
    """

    group: dist.ProcessGroup | None
    slots: tuple[int, ...]
    rank: int
    beyond: tuple[dist.ProcessGroup, ...] = ()
    everyone: dist.ProcessGroup | None = None
    first: int = 0
    is_a_stage: bool = False
    program: Program | None = None  # the model's program log, if several ranks share the model
    call: LoggedCall | None = LoggedCall.SHARED  # the kind of log entry under which ranks compare these collectives
    # The model's engine, by which parameters lead to it. It is weak, because optimizers may outlive the model.
    engine: Callable[[], object] | None = None

    @property
    def number(self) -> int:
        return self.first + self.rank

    def combine(self, tensor: torch.Tensor, names: Sequence[str] = (), op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce `tensor`, computed from the parameters `names`, over the replica in place, and return it."""
        if self.group is not None:
            self._all_reduce(tensor, op, self.group, _reduction_of(names), self.call)
        for group in self.beyond:
            dist.all_reduce(tensor, op, group=group)
        return tensor

    def _all_reduce(
        self, tensor: torch.Tensor, op: Any, group: dist.ProcessGroup, what: str, call: LoggedCall | None
    ) -> None:
        assert self.program is not None
        with self.program.shared(what, call):
            # On the host, the wait checks now and then whether its peers can still come.
            self.program.wait(dist.all_reduce(tensor, op, group=group, async_op=not tensor.is_cuda))

    def mean_of_everyone(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Average `tensor` over all ranks in place, and return it. `what` is the call, for error messages."""
        if self.everyone is not None:
            self._all_reduce(tensor, dist.ReduceOp.SUM, self.everyone, what, LoggedCall.PROGRAM)
            tensor.div_(dist.get_world_size(self.everyone))
        return tensor


class Partial(torch.Tensor):
    """A tensor of norms or sums of which this rank knows only its part. Operations on ShardTensors return it.

    `part` is this rank's part, and `names` are the parameters that it was computed from. `order` is the order of the
    norms, or "sum", or "whole" or "written" once the value is combined. Stacking and casting keep the values partial,
    and most other operations combine them over `replica`. `print()` and `repr()` show this rank's part and combine
    nothing, so that a debugger on one rank does not wait for other ranks.
    """

    part: torch.Tensor
    order: float | str
    replica: Replica
    names: tuple[str, ...]
    averaged: object  # the autograd node whose gradient is averaged over all ranks, if any

    @staticmethod
    def __new__(
        cls: type[Partial],
        values: torch.Tensor,
        order: float | str,
        replica: Replica,
        names: tuple[str, ...],
        dtype: torch.dtype,
    ) -> Partial:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)
        made.part, made.order, made.replica, made.names, made.averaged = values, order, replica, names, None
        return made

    @staticmethod
    def norms_of(
        locals_: Sequence[torch.Tensor], order: float, specs: Sequence[ShardSpec], dtype: torch.dtype | None = None
    ) -> list[Partial]:
        """Return the partial norm of each slice, in one call, because a call costs more than a small norm."""
        order = float(order)
        # Norms are kept in float64, so that combining their squares neither overflows nor rounds. PyTorch defines no
        # norm of order inf, or of an order below zero, for an empty slice. Such a slice gets the neutral element.
        neutral = math.inf if order < 0 else 0.0
        norms: list[torch.Tensor] = [torch.empty(0)] * len(locals_)
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, local in enumerate(locals_):
            if local.numel():
                alike.setdefault((local.device, local.dtype), []).append(index)
            else:
                norms[index] = local.new_full((), neutral, dtype=torch.float64)
        for (_, held), indices in alike.items():
            work = torch.promote_types(dtype or held, torch.float32)
            found = torch._foreach_norm([locals_[i] for i in indices], order, dtype=work)  # pyright: ignore
            for index, norm in zip(indices, torch.stack(found).double().unbind(), strict=True):
                norms[index] = norm
        return [
            Partial(norm, order, where.replica, (where.name,), dtype or local.dtype)
            for norm, where, local in zip(norms, specs, locals_, strict=True)
        ]

    @staticmethod
    def stacked(parts: Sequence[Partial], dim: int = 0) -> Partial:
        names = tuple(name for p in parts for name in p.names)
        return parts[0]._like(torch.stack([p.part for p in parts], dim), names)

    def resolve(self) -> torch.Tensor:
        """Return the value, combined over the replica, as a plain tensor. Every rank of the replica must call it."""
        self.average_gradient()
        order, values, names = self.order, self.part, self._names_in_order()
        if order in (WHOLE, _WRITTEN):
            combined = values
        elif isinstance(order, str) or order in _REDUCE_OPS:
            # A sum, or a norm that needs no powers: the largest, the smallest, or the number of elements other than 0.
            combined = self.replica.combine(values.clone(), names, _REDUCE_OPS.get(order, dist.ReduceOp.SUM))
        else:
            combined = self.replica.combine(values.abs().pow(order), names).pow(1.0 / order)
        return combined.to(self.dtype)

    def _names_in_order(self) -> Sequence[str]:
        """Return the names, sorted for a single number: there, ranks may take parameters in different orders."""
        return self.names if self.part.dim() else sorted(self.names)

    def average_gradient(self) -> None:
        """Let a backward pass through the value average its gradient over all ranks."""
        # What is computed with the value may differ between the ranks, such as a factor that depends on their batches.
        # Each rank has the gradient of its own loss, and continues with slices that no other rank may hold.
        # Only what leaves the Partials is averaged: a penalty over all parameters takes one all-reduce of one number.
        # A write to the value gives it a new node, whose gradient has to be averaged, too.
        node, replica = self.grad_fn or self.replica, self.replica
        if self.requires_grad and torch.is_grad_enabled() and self.averaged is not node and self.order != _WRITTEN:
            self.averaged = node
            what = f"the backward pass of {_reduction_of(self._names_in_order())}"

            def mean(gradient: torch.Tensor) -> torch.Tensor:
                # In float64, the mean is exact if all ranks have the same gradient.
                total = _resolved(gradient.detach()).to(torch.float64, copy=True)
                return replica.mean_of_everyone(total, what).to(gradient.dtype)

            self.register_hook(mean)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Partial({self.order}, this rank's part: {self.part})"

    # Conversions that PyTorch implements only for plain tensors.

    def __format__(self, format_spec: str) -> str:
        return format(self.resolve(), format_spec) if format_spec else str(self)

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.item(), ndigits)

    def tolist(self) -> Any:
        return self.resolve().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        # After .cpu(), the value may still be on the GPU.
        return self.resolve().numpy(force=True)

    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket

        def on_whole() -> Any:
            return func(*map(_resolved, args), **{k: _resolved(v) for k, v in kwargs.items()})

        sums = packet in (aten.add, aten.add_) and not kwargs and _same_kind_of_partial(args) and args[0].order == "sum"
        if sums and packet is aten.add_ and args[0].shape == args[1].shape:
            args[0].part, args[0].names = args[0].part + args[1].part, args[0].names + args[1].names
            return args[0]
        if written := written_by(func, args, kwargs, Partial):
            for each in written:
                each.become_whole()
            out = on_whole()
            return args[0] if written[0] is args[0] else out
        if any(isinstance(a, Partial) and a.order in (WHOLE, _WRITTEN) for a in args):
            return on_whole()
        if packet in (aten.detach, aten.alias, aten.clone, aten._to_copy):
            return args[0]._like(args[0].part, dtype=kwargs.get("dtype"))
        if packet is aten.stack and _same_kind_of_partial(args[0]):
            # Stages hold other parameters, and only the pipeline can combine norms over them.
            if args[0][0].replica.is_a_stage:
                raise ShardError(
                    "a norm over several parameters of a pipeline's stage leaves out those of the other stages: every "
                    "rank would clip by another one. Call pipeline.clip_grad_norm_(max_norm)."
                )
            return Partial.stacked(args[0], args[1] if len(args) > 1 else 0)
        if packet is aten.linalg_vector_norm and len(args) <= 2 and kwargs.get("dim") is None:
            order = float(args[1]) if len(args) > 1 else 2.0
            # The p-norm of all p-norms.
            if args[0].order == order:
                args[0].average_gradient()
                return args[0].of_all().resolve()
        if sums and packet is aten.add:
            dtype = torch.promote_types(args[0].dtype, args[1].dtype)
            return args[0]._like(args[0].part + args[1].part, args[0].names + args[1].names, dtype)
        # Python's sum() starts with 0.
        if packet is aten.add and type(args[1]) is int and args[1] == 0 and not kwargs:
            return args[0]._like(args[0].part)
        if packet is aten.sum and len(args) == 1 and args[0].order == "sum":
            return args[0]._like(args[0].part.sum())
        return on_whole()

    def become_whole(self) -> None:
        """Combine the value in place on all ranks of the replica, before an operation such as `clamp_` writes to it."""
        was_written = self.order == _WRITTEN or torch.is_grad_enabled()
        self.part, self.order = self.resolve(), _WRITTEN if was_written else WHOLE

    def of_all(self) -> Partial:
        """Return the partial norm of all elements, from the partial norms in this tensor."""
        assert isinstance(self.order, float)
        return self._like(torch.linalg.vector_norm(self.part, self.order))

    def _like(self, part: torch.Tensor, names: tuple[str, ...] = (), dtype: torch.dtype | None = None) -> Partial:
        return Partial(part, self.order, self.replica, names or self.names, dtype or self.dtype)


def total_norm(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    """Return the norm over all elements of ShardTensors, which may be of several models. Every rank must call it."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms: Any = torch._foreach_norm(tensors, order)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
    # Models may be sharded over other groups, and one all-reduce serves all parameters of a group.
    by_replica: dict[int, list[Partial]] = {}
    for norm in norms:
        by_replica.setdefault(id(norm.replica), []).append(norm)
    stacks = [Partial.stacked(each) for each in by_replica.values()]
    whole = [stack.of_all().resolve() for stack in stacks]
    # With offload, norms are on the host.
    return torch.linalg.vector_norm(torch.stack([each.to(whole[0].device) for each in whole]).double(), float(order))


def _reduction_of(names: Sequence[str]) -> str:
    """Return a description of a reduction. It differs between ranks that reduce different parameters."""
    which = "sharded tensors"
    if names:
        others = zlib.crc32("\n".join(names).encode())
        which = repr(names[0]) + (f" and {len(names) - 1} more (checksum {others:08x})" if len(names) > 1 else "")
    return f"a norm, a sum or an extreme of {which}"


def _same_kind_of_partial(parts: Sequence[Any]) -> bool:
    first = parts[0]
    return all(
        isinstance(p, Partial)
        and isinstance(first, Partial)
        and p.order == first.order != _WRITTEN
        and p.replica.group is first.replica.group
        and p.replica.beyond == first.replica.beyond
        for p in parts
    )


@lru_cache(maxsize=1024)
def _writes(func: Any) -> list[tuple[int, str]]:
    """Return the position and the name of each argument that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any], kind: type[Written]) -> list[Written]:
    """Return the values of class `kind` that an operation writes to, also those in lists."""
    values = (args[position] if position < len(args) else kwargs.get(name) for position, name in _writes(func))
    return [
        v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, kind)
    ]


def _resolved(value: Any) -> Any:
    if isinstance(value, Partial):
        return value.resolve()
    if isinstance(value, (list, tuple)):
        return [_resolved(v) for v in value]
    return value
