"""This rank's boxes of a ShardTensor, in the words of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from towpath.engine.boxes import Box


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
