"""A tensor with the global shape whose storage is this rank's contiguous 1-D slice of it.

What operations make of it stands in `shard_operations.py`; `full_tensor()` gathers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from towpath.codecs.kernels.dispatch import kernels_for
from towpath.collectives.native import all_gather_single
from towpath.core.formats import SCALE_BYTES, Codec
from towpath.core.step_state import ParamVersion
from towpath.core.units import overlap
from towpath.engine.parameters.parallel import Box, Parallel, boxes_in_whole
from towpath.engine.parameters.partial_sums import NO_TORCH_FUNCTION, Replica
from towpath.errors import ShardTensorError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


# --- span -------------------------------------------------------------------------------------------------------------
#
# Which elements of a parameter a rank holds.


@dataclass(frozen=True, slots=True, eq=False)
class ShardSpec:
    """Which elements of a tensor each rank holds: the part of it that lies in the rank's cut of the flat buffer.

    Compared by identity: two ShardTensors match element by element only if they carry the same Span.
    """

    shape: torch.Size  # of what lies in the flat buffer: the tensor, or its part on a tensor-parallel mesh
    offset: int  # of the tensor in the flat buffer
    cut: int  # length of a slice of the flat buffer
    slot: int  # which slice of the flat buffer this rank holds
    replica: Replica
    parallel: Parallel | None = None
    counts: bool = True  # in norms and sums; of what is the same on a whole mesh, only one copy does
    holders: tuple[int, ...] = ()  # the ranks that hold the same slice, this one among them
    name: str = ""  # of the parameter
    unit: str = ""  # whose forward it is whole in; the root's has no name

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardSpec:
        """Return itself: a copy of the tensor holds the same elements, and a process group cannot be copied."""
        return self

    @property
    def whole_shape(self) -> torch.Size:
        return self.shape if self.parallel is None else self.parallel.shape

    def counted(self, local: torch.Tensor) -> torch.Tensor:
        return local if self.counts else local[:0]

    def bounds(self, slot: int | None = None) -> tuple[int, int]:
        """The elements [start, end) of the flattened tensor that the holder of `slot` has."""
        return overlap(self.offset, self.shape.numel(), self.cut, self.slot if slot is None else slot)

    def describe(self) -> str:
        start, end = self.bounds()
        return (
            f"parameter {self.name!r} of shape {tuple(self.whole_shape)} in unit {self.unit or 'root'!r}, of which "
            f"rank {self.replica.rank} holds the elements [{start}:{end}]"
        )

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor of the whole shape."""
        start, end = self.bounds()
        return (whole if self.parallel is None else self.parallel.part_of(whole)).reshape(-1)[start:end]

    def in_cut(self) -> tuple[int, int]:
        """The same elements, as positions in this rank's cut."""
        start, end = self.bounds()
        base = self.slot * self.cut - self.offset
        return (start - base, end - base) if end > start else (0, 0)


# --- encoded shard ----------------------------------------------------------------------------------------------------
#
# A shard of parameters that rests encoded: its scales, then its codes, as one message of the codec.
#
# Blocks span neither parameters nor shards (`BucketSpec.in_blocks`), so each parameter's part can be read and written
# by itself. What is written is compared first, block by block: one that decodes to what is written stays as it is,
# since encoding it again might round it once more.


class EncodedShard:
    """Of `elements` elements, whole blocks, which users see in `dtype`."""

    def __init__(self, codec: Codec, values: torch.Tensor) -> None:
        """`values`: rounded here, and never again unless they are written."""
        assert values.numel() % codec.block == 0
        self.codec, self.dtype, self.device = codec, values.dtype, values.device
        self.elements = values.numel()
        self._kernels = kernels_for(values.device)
        self.message = self._encoded(values)
        split = SCALE_BYTES * codec.scales(self.elements)
        self._scales = self.message[:split].view(-1, SCALE_BYTES)  # [blocks, bytes]
        self._codes = self.message[split:].view(len(self._scales), -1)  # [blocks, bytes]

    def part(self, start: int, end: int) -> EncodedSlice:
        return EncodedSlice(self, start, end)

    def decode(self, out: torch.Tensor) -> None:
        """All of it, in the dtype of `out`."""
        self._kernels.decode(self.codec, self.message, out)

    def read(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements [start, end), which begin with a block."""
        out = torch.empty(-(-(end - start) // self.codec.block) * self.codec.block, dtype=dtype, device=self.device)
        if end > start:
            blocks = self._blocks(start, end)
            message = torch.cat([self._scales[blocks].flatten(), self._codes[blocks].flatten()])
            self._kernels.decode(self.codec, message, out)
        return out[: end - start]

    def write(self, start: int, values: torch.Tensor) -> None:
        """The elements from `start` on, which begin with a block. Zeros follow up to the end of the last one."""
        end, size = start + values.numel(), self.codec.block
        if end == start:
            return
        padded = torch.nn.functional.pad(values.detach(), (0, -values.numel() % size))
        blocks = self._blocks(start, end)
        before = self.read(start, start + padded.numel(), values.dtype)
        changed = (padded != before).view(-1, size).any(1, keepdim=True)
        message = self._encoded(padded)
        split = SCALE_BYTES * self.codec.scales(padded.numel())
        for held, now in ((self._scales[blocks], message[:split]), (self._codes[blocks], message[split:])):
            held.copy_(torch.where(changed, now.view(held.shape), held))

    def _blocks(self, start: int, end: int) -> slice:
        assert start % self.codec.block == 0, (start, self.codec)
        return slice(start // self.codec.block, -(-end // self.codec.block))

    def _encoded(self, values: torch.Tensor) -> torch.Tensor:
        nbytes = self.codec.encoded_bytes(values.numel())
        message = torch.empty(nbytes, dtype=torch.uint8, device=values.device)
        self._kernels.encode(self.codec, values.contiguous(), message)
        return message


class EncodedSlice:
    """Of one parameter: what its ShardTensor holds in place of a tensor."""

    __slots__ = ("_end", "_shard", "_start")

    def __init__(self, shard: EncodedShard, start: int, end: int) -> None:
        self._shard, self._start, self._end = shard, start, end

    @property
    def codec(self) -> Codec:
        return self._shard.codec

    @property
    def dtype(self) -> torch.dtype:
        return self._shard.dtype

    @property
    def device(self) -> torch.device:
        return self._shard.device

    def read(self) -> torch.Tensor:
        """Decoded anew at each call: a copy, in which a write would be lost."""
        return self._shard.read(self._start, self._end, self.dtype)

    def write(self, values: torch.Tensor) -> None:
        self._shard.write(self._start, values.to(self.dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return the decoded elements on the host, which is what PyTorch's stagers of checkpoints ask for."""
        return self.read().cpu()


aten = torch.ops.aten


def in_backward() -> bool:
    """Whether autograd is running a backward pass."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


class ShardTensor(torch.Tensor):
    """See the module's docstring. Made by `towpath.shard`; `to_local()` reads this rank's slice."""

    held: torch.Tensor | EncodedSlice
    span: ShardSpec
    mark: ParamVersion | None

    @staticmethod
    def __new__(
        cls: type[ShardTensor],
        held: torch.Tensor | EncodedSlice,
        where: ShardSpec,
        mark: ParamVersion | None = None,
        requires_grad: bool = False,
    ) -> ShardTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, where.whole_shape, dtype=held.dtype, device=held.device, requires_grad=requires_grad
        )
        made.held, made.span, made.mark = held, where, mark
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is done in __new__."""

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements; of what rests encoded a decoded copy."""
        held = self.held
        return held if isinstance(held, torch.Tensor) else held.read()

    @property
    def rests_in(self) -> Codec | None:
        """The codec that a frozen parameter rests in, if in any (`frozen_codec=`)."""
        return None if isinstance(self.held, torch.Tensor) else self.held.codec

    def write(self, values: torch.Tensor) -> None:
        """This rank's elements, 1-D; encoded, if they rest so."""
        if isinstance(self.held, torch.Tensor):
            self.held.copy_(values)
        else:
            self.held.write(values)

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
        return next(whole_tensors([[self]]))[0]

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
            "to_local(). To save the model let every rank call towpath.checkpoint.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), and rank 0 save what it gets. Without "
            "gathering: towpath.checkpoint, then `towpath export`."
        )

    def storage(self) -> NoReturn:
        self.untyped_storage()

    def data_ptr(self) -> int:
        # PyTorch's stagers (dcp.async_save) take a 0 to mean that a tensor keeps its values in attributes, as a DTensor
        # does, and copy those. Anybody else would be misled by a 0: safetensors would write no bytes.
        caller = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
        if caller.startswith("torch.distributed."):
            return 0
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
            "a ShardTensor cannot be pickled: it is one rank's slice. For torch.save() let every rank call "
            "towpath.checkpoint.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True)), or get_optimizer_state_dict(model, optimizer, options=…), and rank 0 save what it "
            "gets. Without gathering: towpath.checkpoint.save."
        )

    # What torch.distributed.checkpoint asks of a tensor class: this rank's slice, as boxes of its shape ---------------

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from towpath.engine.parameters.parallel import write_items  # loads what only checkpoints need

        return write_items(fqn, self.local, self.shape, self.boxes())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Asked for before this tensor is loaded, on every rank: also on those that hold none of it."""
        if self.rests_in is not None:
            raise ShardTensorError(
                f"{self.span.name!r} rests in {self.rests_in}, where torch.distributed.checkpoint cannot write to it. "
                "Load with towpath.checkpoint.load, or towpath.checkpoint.set_model_state_dict."
            )
        if self.mark is not None:
            self.mark.written()
        from towpath.engine.parameters.parallel import chunks_of

        return chunks_of(self.boxes())

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The box that begins at the index's offsets: a view of this rank's slice."""
        from towpath.engine.parameters.parallel import box_at

        return box_at(index, self.local.detach(), self.boxes())

    def boxes(self, among: tuple[int, int] | None = None) -> list[Box]:
        """Where this rank's elements lie in the whole tensor; or those `among` [start, end), counted as `span` does."""
        span = self.span
        if not self.numel():
            return [Box((0,) * self.dim(), tuple(self.shape), 0, 0)]
        return boxes_in_whole(span.shape, span.parallel, *(among or span.bounds()))

    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _operation(func)(func, args, kwargs or {})


def whole_tensors(
    batches: Sequence[Sequence[ShardTensor]], device: torch.device | None = None, wanted: bool = True
) -> Iterator[list[torch.Tensor]]:
    """The whole of each tensor, batch by batch, in one all-gather a batch; nothing where it is not `wanted`.

    A batch is of one dtype and one replica, every rank of which must call this alike. The results are made on `device`
    (their own unless given); beside them it takes, for all batches, as much memory as the largest of them is whole.
    """
    # Of each batch: [member of the replica, tensor] -> elements [start, end)
    bounds = [[[part.span.bounds(slot) for part in batch] for slot in batch[0].span.replica.slots] for batch in batches]
    longest = [max(sum(end - start for start, end in each) for each in members) for members in bounds]
    shapes = [(len(members), length) for members, length in zip(bounds, longest, strict=True)]
    needed = [prod(shape) * batch[0].itemsize for shape, batch in zip(shapes, batches, strict=True)]
    memory = torch.empty(max(needed, default=0), dtype=torch.uint8, device=batches[0][0].device if batches else None)
    for batch, members, shape, nbytes in zip(batches, bounds, shapes, needed, strict=True):
        gathered = memory[:nbytes].view(batch[0].dtype).view(shape)
        yield _gathered(batch, members, gathered, device, wanted)


def _gathered(
    batch: Sequence[ShardTensor],
    members: Sequence[Sequence[tuple[int, int]]],
    gathered: torch.Tensor,
    device: torch.device | None,
    wanted: bool,
) -> list[torch.Tensor]:
    replica = batch[0].span.replica
    mine = replica.slots.index(batch[0].span.slot)
    for place, part in zip(_divided(gathered[mine], members[mine]), batch, strict=True):
        place.copy_(part.local.detach())
    if replica.group is not None:
        assert replica.program is not None
        names = ", ".join(repr(part.span.name) for part in batch[:3]) + (" …" if len(batch) > 3 else "")
        with replica.program.shared(f"full_tensor() of {names}", replica.call):
            on_host = not gathered.is_cuda
            replica.program.wait(all_gather_single(gathered.view(-1), gathered[mine], replica.group, async_op=on_host))
    parallel = any(part.span.parallel is not None for part in batch)
    if not (wanted or parallel):
        return []
    wholes = [torch.empty(part.span.shape, dtype=part.dtype, device=device or part.device) for part in batch]
    for row, each in zip(gathered, members, strict=True):
        for whole, (start, end), piece in zip(wholes, each, _divided(row, each), strict=True):
            whole.view(-1)[start:end].copy_(piece)
    return [_over_the_mesh(part, whole) for part, whole in zip(batch, wholes, strict=True)] if parallel else wholes


def _divided(row: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> Sequence[torch.Tensor]:
    lengths = [end - start for start, end in bounds]
    return row[: sum(lengths)].split(lengths)


def _over_the_mesh(part: ShardTensor, whole: torch.Tensor) -> torch.Tensor:
    """`whole` is all that the replica has of it; on a tensor-parallel mesh that may be a part again."""
    parallel = part.span.parallel
    return whole if parallel is None else parallel.wrap(whole.to(part.device)).full_tensor().to(whole.device)


class _FullTensor(torch.autograd.Function):
    """`full_tensor()` as a part of a graph."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor) -> torch.Tensor:
        ctx.span = tensor.span
        return next(whole_tensors([[tensor]]))[0]

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
