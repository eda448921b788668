"""This rank's boxes of a ShardTensor, in the words of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from towpath.engine.boxes import Box
from towpath.errors import ShardTensorError


def chunks_of(boxes: Sequence[Box]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes]


def write_items(fqn: str, local: torch.Tensor, shape: torch.Size, boxes: Sequence[Box]) -> list[WriteItem]:
    """`local`: this rank's elements of the tensor of `shape`."""
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, shape),
        )
        for chunk in chunks_of(boxes)
    ]


def box_at(index: MetadataIndex, local: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
    """Return the box that begins at the index's offsets: a view of `local`, which holds the elements of `boxes`."""
    box = next((b for b in boxes if b.offsets == tuple(index.offset or ())), None)
    if box is None:
        raise ShardTensorError(f"{index.fqn}: this rank has no box that begins at {index.offset}. Plan the load anew.")
    start = box.start - boxes[0].start
    return local[start : start + box.end - box.start].view(box.sizes)


class SentShard(torch.Tensor):
    """A ShardTensor in another process, which has none of its process groups: DCP can save it, and no more.

    `dcp.async_save` sends it there with `async_checkpointer_type=AsyncCheckpointerType.PROCESS`.
    """

    _local: torch.Tensor
    _boxes: Sequence[Box]

    @staticmethod
    def __new__(cls: type[SentShard], shape: torch.Size, local: torch.Tensor, boxes: Sequence[Box]) -> SentShard:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made._local, made._boxes = local, boxes
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is done in __new__."""

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return write_items(fqn, self._local, self.shape, self._boxes)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return box_at(index, self._local, self._boxes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ShardTensorError(
            f"{func}: a ShardTensor that was sent to another process can only be saved there. Send to_local(), or let "
            "every rank call full_tensor() and send that."
        )
