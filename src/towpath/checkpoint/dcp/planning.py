"""How a checkpoint looks to torch.distributed.checkpoint: names with tensors, or pieces of them, and JSON besides."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from towpath.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Pieces:
    """What one rank writes of a tensor: contiguous boxes of it, by their offsets.

    `steady`: nothing writes to it but an optimizer's step.
    """

    dtype: torch.dtype
    shape: torch.Size
    boxes: Mapping[tuple[int, ...], torch.Tensor]
    steady: bool = False

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offsets), box.shape), TensorProperties(self.dtype), self.shape
                ),
            )
            for offsets, box in self.boxes.items()
        ]


class JsonSavePlanner(DefaultSavePlanner):
    """Of a flat dict. Tensors as they are; everything else as JSON, where the default planner pickles.

    `problem`: why this rank has nothing to save; raised where all ranks learn of it.
    """

    def __init__(self, problem: str | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._problem = problem

    def create_local_plan(self) -> SavePlan:
        if self._problem is not None:
            raise CheckpointError(self._problem)
        return super().create_local_plan()

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        if isinstance(found, Pieces):
            assert index.offset is not None
            return found.boxes[tuple(index.offset)]
        return super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type is not WriteItemType.BYTE_IO:
            return object.detach()
        return io.BytesIO(json.dumps(object).encode())


class JsonLoadPlanner(DefaultLoadPlanner):
    """Its mirror: no byte that is read is ever unpickled."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = json.loads(value.getvalue())
