"""A tensor with the global shape whose storage is this rank's contiguous 1-D slice of it.

What operations make of it stands in `shard_operations.py`; `full_tensor()` gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from towpath.collectives.flat import all_gather_single
from towpath.core.step_state import WriteMark
from towpath.engine.boxes import Box, boxes_of
from towpath.engine.partial_sums import NO_TORCH_FUNCTION
from towpath.engine.span import Span
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
        """The whole tensor, gathered from the ranks that share it. Every one of them must call this.

        What is computed with it may be part of a loss: its backward pass takes the mean over all ranks, as that of
        the forward does, and so every rank must walk it.
        """
        if self.requires_grad and torch.is_grad_enabled():
            return cast(torch.Tensor, _FullTensor.apply(self))
        return self._whole()

    def _whole(self) -> torch.Tensor:
        whole = self._assembled()
        parallel = self.span.parallel
        return whole if parallel is None else parallel.wrap(whole).full_tensor()

    def _assembled(self) -> torch.Tensor:
        """From the slices of the replica."""
        where = self.span
        local = self.local.detach()
        if where.replica.group is None:
            return local.clone().view(where.shape)
        bounds = [where.bounds(slot) for slot in where.replica.slots]
        longest = max(end - start for start, end in bounds)
        padded = local.new_zeros(longest)
        padded[: local.numel()].copy_(local)
        gathered = local.new_empty(len(bounds) * longest)
        all_gather_single(gathered, padded, where.replica.group)
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
            f"{self.span.name!r} has no memory of its shape: rank {self.span.replica.rank} holds a slice of it, "
            "to_local(). To save the model (save_pretrained, safetensors) let all ranks enter "
            "`with towpath.full_parameters(model):` and rank 0 save there. Without gathering: towpath.checkpoint, then "
            "`towpath export`."
        )

    def storage(self) -> NoReturn:
        self.untyped_storage()

    def data_ptr(self) -> NoReturn:
        self.untyped_storage()

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise ShardTensorError(f"{self} has no NumPy array: call full_tensor().detach().numpy() on every rank.")

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
        from towpath.engine.dcp_chunks import write_items  # loads what only checkpoints need

        return write_items(fqn, self.local, self.shape, self.boxes())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Asked for before this tensor is loaded, on every rank: also on those that hold none of it."""
        if self.mark is not None:
            self.mark.written()
        from towpath.engine.dcp_chunks import chunks_of

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
        return _operation(func)(func, args, kwargs or {})


class _FullTensor(torch.autograd.Function):
    """`full_tensor()` as a part of a graph."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor) -> torch.Tensor:
        ctx.span = tensor.span
        return tensor._whole()  # pyright: ignore[reportPrivateUsage]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> ShardTensor:
        (gradient,) = gradients
        mean = ctx.span.replica.mean_of_everyone(gradient.detach().clone(memory_format=torch.contiguous_format))
        return ShardTensor(ctx.span.part_of(mean).clone(), ctx.span)


Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]

_chooses: Callable[[Any], Handler] | None = None


def handlers_are_chosen_by(choose: Callable[[Any], Handler]) -> None:
    """Before the first ShardTensor is made. (Handlers are made of ShardTensors: this module cannot import them.)"""
    global _chooses
    _chooses = choose


@lru_cache(maxsize=1024)
def _operation(func: Any) -> Handler:
    assert _chooses is not None, "see handlers_are_chosen_by"
    return _chooses(func)
