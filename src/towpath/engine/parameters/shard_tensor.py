"""`ShardTensor`, the class of a sharded model's parameters and gradients, and what describes and stores its slice.

A ShardTensor has the shape of the full tensor, but stores only this rank's slice, contiguous and 1-D.
`shard_operations.py` implements PyTorch's operations on it. `whole_tensors` all-gathers several of them at once.
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
# Describes which elements of a parameter a rank holds.


@dataclass(frozen=True, slots=True, eq=False)
class ShardSpec:
    """The elements of a tensor that each rank holds: those in the rank's slice of the bucket's flat buffer.

    Each ShardTensor has one, shared with its aliases, its gradient and its optimizer states. ShardSpecs are compared by
    identity. Two ShardTensors match element by element only if they have the same ShardSpec.
    """

    shape: torch.Size  # shape in the flat buffer: the full tensor's, or that of this rank's part of a DTensor
    offset: int  # where the tensor starts in the flat buffer
    cut: int  # length of a slice of the flat buffer
    slot: int  # number of the slice of the flat buffer that this rank holds
    replica: Replica
    parallel: Parallel | None = None
    counts: bool = True  # whether this copy counts in norms and sums; of copies on a tensor-parallel mesh, one does
    holders: tuple[int, ...] = ()  # the ranks that hold the same slice, including this one
    name: str = ""  # name of the parameter
    unit: str = ""  # name of the unit in whose forward the parameter is unsharded; empty for the root

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardSpec:
        """Return `self`: a copy of the tensor holds the same elements, and a process group cannot be copied."""
        return self

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of the full tensor, across a tensor-parallel mesh too."""
        return self.shape if self.parallel is None else self.parallel.shape

    def counted(self, local: torch.Tensor) -> torch.Tensor:
        """Return `local` if this rank's copy counts in norms and sums, otherwise no elements of it."""
        return local if self.counts else local[:0]

    def bounds(self, slot: int | None = None) -> tuple[int, int]:
        """Return the elements [start, end) of the flattened tensor in slice `slot`, by default this rank's slice."""
        return overlap(self.offset, self.shape.numel(), self.cut, self.slot if slot is None else slot)

    def describe(self) -> str:
        """Return a description of the parameter and its slice for error messages."""
        start, end = self.bounds()
        return (
            f"parameter {self.name!r} of shape {tuple(self.whole_shape)} in unit {self.unit or 'root'!r}, of which "
            f"rank {self.replica.rank} holds the elements [{start}:{end}]"
        )

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of `whole`, a tensor of the full shape."""
        start, end = self.bounds()
        return (whole if self.parallel is None else self.parallel.part_of(whole)).reshape(-1)[start:end]

    def in_cut(self) -> tuple[int, int]:
        """Return the same elements as positions [start, end) in this rank's slice of the flat buffer."""
        start, end = self.bounds()
        base = self.slot * self.cut - self.offset
        return (start - base, end - base) if end > start else (0, 0)


# --- encoded shard ----------------------------------------------------------------------------------------------------
#
# A shard of frozen parameters that is stored encoded (`frozen_codec=`).
#
# No block crosses the border of a parameter or a shard (`BucketSpec.in_blocks`), so each parameter's part can be read
# and written by itself. A write compares block by block first. A block that already decodes to the new values is
# left unchanged, because encoding it again might round it once more.


class EncodedShard:
    """One bucket's P shard, stored encoded: the scales, then the codes, as one message of the codec.

    `Bucket` holds it for frozen parameters. It has `elements` elements in full blocks, and users see them in `dtype`.
    """

    def __init__(self, codec: Codec, values: torch.Tensor) -> None:
        """Encode `values`. They are rounded here, and not again unless they are written to."""
        assert values.numel() % codec.block == 0
        self.codec, self.dtype, self.device = codec, values.dtype, values.device
        self.elements = values.numel()
        self._kernels = kernels_for(values.device)
        self.message = self._encoded(values)
        split = SCALE_BYTES * codec.scales(self.elements)
        self._scales = self.message[:split].view(-1, SCALE_BYTES)  # [blocks, bytes]
        self._codes = self.message[split:].view(len(self._scales), -1)  # [blocks, bytes]

    def part(self, start: int, end: int) -> EncodedSlice:
        """Return the elements [start, end) as an `EncodedSlice`, for the ShardTensor of one parameter."""
        return EncodedSlice(self, start, end)

    def decode(self, out: torch.Tensor) -> None:
        """Decode all elements into `out`, in its dtype."""
        self._kernels.decode(self.codec, self.message, out)

    def read(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements [start, end), decoded. `start` must be the start of a block."""
        out = torch.empty(-(-(end - start) // self.codec.block) * self.codec.block, dtype=dtype, device=self.device)
        if end > start:
            blocks = self._blocks(start, end)
            message = torch.cat([self._scales[blocks].flatten(), self._codes[blocks].flatten()])
            self._kernels.decode(self.codec, message, out)
        return out[: end - start]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Encode `values` into the elements from `start` on, which must be the start of a block.

        The rest of the last block becomes zero.
        """
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
    """The part of an `EncodedShard` for one parameter, which its ShardTensor holds in place of a tensor."""

    __slots__ = ("_end", "_shard", "_start")

    def __init__(self, shard: EncodedShard, start: int, end: int) -> None:
        self._shard, self._start, self._end = shard, start, end

    @property
    def codec(self) -> Codec:
        """The codec of the encoded elements."""
        return self._shard.codec

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the decoded elements."""
        return self._shard.dtype

    @property
    def device(self) -> torch.device:
        """The device that stores the encoded elements."""
        return self._shard.device

    def read(self) -> torch.Tensor:
        """Decode and return the elements. The result is a copy, so writes to it have no effect."""
        return self._shard.read(self._start, self._end, self.dtype)

    def write(self, values: torch.Tensor) -> None:
        """Encode `values` in place of the elements."""
        self._shard.write(self._start, values.to(self.dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return the decoded elements on the host, as PyTorch's checkpoint stagers expect."""
        return self.read().cpu()


aten = torch.ops.aten


def in_backward() -> bool:
    """Return whether autograd is running a backward pass."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


class ShardTensor(torch.Tensor):
    """A tensor with the shape of the full tensor that stores only this rank's slice of it.

    `towpath.shard` turns the model's parameters into ShardTensors. Optimizers step them, and their `.grad` is one too.
    `to_local()` returns this rank's elements as a plain 1-D tensor. `full_tensor()` all-gathers the full tensor.

    `held` is this rank's slice, `span` describes it, and `version` counts the writes to it. Gradients and other results
    of operations have no `version`.
    """

    held: torch.Tensor | EncodedSlice
    span: ShardSpec
    version: ParamVersion | None

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
        made.held, made.span, made.version = held, where, version
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
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
            raise ShardTensorError(
                f"got {value.dtype} on {value.device} for a parameter of {self.dtype} on {self.device}: a sharded "
                "model cannot be cast or moved. Do it before shard(); precision= sets what computes and travels."
            )
        with torch.no_grad():
            self.copy_(value)

    def register_hook(self, hook: Any) -> NoReturn:
        """Raise `ShardTensorError`: hooks would never run, because the gradient appears complete at the boundary."""
        raise ShardTensorError(
            "hooks on a sharded parameter would never run: its gradient appears at the boundary, complete. Read or "
            "change .grad after backward() instead."
        )

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        """Raise `ShardTensorError`, as `register_hook` does."""
        self.register_hook(hook)

    def untyped_storage(self) -> NoReturn:
        """Raise `ShardTensorError`: no storage has the shape of this tensor."""
        raise ShardTensorError(
            f"{self.span.name!r} has no memory of its shape: rank {self.span.replica.rank} holds a slice of it, "
            "to_local(). To save the model let every rank call towpath.checkpoint.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), and rank 0 save what it gets. Without "
            "gathering: towpath.checkpoint, then `towpath export`."
        )

    def storage(self) -> NoReturn:
        """Raise `ShardTensorError`, as `untyped_storage` does."""
        self.untyped_storage()

    def data_ptr(self) -> int:
        """Return 0 to PyTorch's checkpoint stagers, and raise `ShardTensorError` for other callers."""
        # To PyTorch's stagers (dcp.async_save), 0 means that a tensor keeps its values in attributes, as a DTensor
        # does, and they copy those. Other callers would be misled by a 0: safetensors would write no bytes.
        caller = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
        if caller.startswith("torch.distributed."):
            return 0
        self.untyped_storage()

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise `ShardTensorError`: only the full tensor has a NumPy array."""
        raise ShardTensorError(f"{self} has no NumPy array: call full_tensor().detach().numpy() on every rank.")

    def tolist(self) -> NoReturn:
        """Raise `ShardTensorError`: only the full tensor can become a list."""
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

    # The protocol of torch.distributed.checkpoint for tensor classes: this rank's slice, as boxes of the full shape ---

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from towpath.engine.parameters.parallel import write_items  # loads what only checkpoints need

        return write_items(fqn, self.local, self.shape, self.boxes())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return this rank's boxes. DCP calls this before it loads the tensor, also on ranks that hold none of it."""
        if self.rests_in is not None:
            raise ShardTensorError(
                f"{self.span.name!r} rests in {self.rests_in}, where torch.distributed.checkpoint cannot write to it. "
                "Load with towpath.checkpoint.load, or towpath.checkpoint.set_model_state_dict."
            )
        if self.version is not None:
            self.version.written()
        from towpath.engine.parameters.parallel import chunks_of

        return chunks_of(self.boxes())

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the box that starts at the offsets of `index`, as a view of this rank's slice."""
        from towpath.engine.parameters.parallel import box_at

        return box_at(index, self.local.detach(), self.boxes())

    def boxes(self, among: tuple[int, int] | None = None) -> list[Box]:
        """Return this rank's elements as boxes of the full tensor.

        `among` limits the result to the elements [start, end), in the numbering of `span.bounds()`.
        """
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
    """Yield the full tensors of each batch, with one all-gather per batch. All ranks must pass the same batches.

    Args:
        batches: ShardTensors, each batch of one dtype and one replica.
        device: Where the full tensors are made. By default, on the device of each ShardTensor. Use the CPU to save
            device memory.
        wanted: Whether this rank needs the results. If False, it takes part in the all-gather and yields empty lists.

    One buffer serves all batches. It takes about as much memory as the full tensors of the largest batch.
    """
    # The elements [start, end) of each tensor of each batch: batch → member of the replica → tensor.
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
    """Return the full tensor of `part`. `whole` is what the replica holds: on a tensor-parallel mesh, only a part."""
    parallel = part.span.parallel
    return whole if parallel is None else parallel.wrap(whole.to(part.device)).full_tensor().to(whole.device)


class _FullTensor(torch.autograd.Function):
    """`full_tensor()` in an autograd graph."""

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
    """Set the function that chooses the handler of an operation. Call this before the first ShardTensor is made.

    The handlers use `ShardTensor`, so this module cannot import theirs.
    """
    global _chooses
    _chooses = choose


@lru_cache(maxsize=1024)
def _operation(func: Any) -> Handler:
    assert _chooses is not None, "see handlers_are_chosen_by"
    return _chooses(func)
