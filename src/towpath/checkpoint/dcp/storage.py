"""What torch.distributed.checkpoint writes to and reads from: a folder of safetensors files and a JSON manifest.

Write   every rank its file, into a folder that nobody takes for a checkpoint; when all have said that they are done,
        the coordinator adds the manifest and gives the folder its name. Whatever fails before, nothing was published.
Read    what several ranks of a node want is read by one of them, and handed to the others.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import time
import uuid
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from towpath.checkpoint.dcp.planning import JsonSavePlanner
from towpath.checkpoint.disk import files, folders
from towpath.checkpoint.disk.claim import Claim
from towpath.checkpoint.disk.manifest import Manifest, write_manifest
from towpath.checkpoint.disk.stored import File, Stored, StoredBox
from towpath.errors import CheckpointError

_SENDS_UNDER_WAY = 16
_MARGIN_BYTES = 1 << 20  # of free space: manifest, folders, and what the file system keeps for itself


@dataclass(frozen=True, slots=True)
class _Written:
    """A box, and the file it lies in."""

    box: StoredBox
    dtype: str
    shape: tuple[int, ...]
    file: File


@dataclass(frozen=True, slots=True)
class _Value:
    text: str


class FolderWriter(StorageWriter):
    """Of the checkpoint of one step in `root`, which is this job's by its `claim`."""

    def __init__(self, root: Path, step: int, claim: Claim, strategy: str | None = None) -> None:
        self._root, self._step, self._claim, self._strategy = root, step, claim, strategy
        self._world = 1
        self._partial: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer, one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            with files.writing(self._root):
                self._claim.hold()  # it makes the folder, where it is not there

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        needed = sum(item.tensor_storage_size() or 0 for item in plan.items)
        return replace(plan, storage_data=needed)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        needed = sum(plan.storage_data for plan in plans) + _MARGIN_BYTES
        with files.writing(self._root):
            free = free_bytes(self._root)
        if needed > free:
            raise CheckpointError(
                f"{self._root}: {free:,} bytes are free, and a checkpoint of step {self._step} takes {needed:,}. Make "
                "room, or keep fewer."
            )
        self._world = len(plans)
        self._partial = folders.partial_of(self._root, self._step, uuid.uuid4().hex[:8])
        folders.in_use(self._partial)
        with files.writing(self._partial):
            self._partial.mkdir()
        return [
            replace(plan, storage_data=self._partial / f"rank-{rank:05d}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not isinstance(planner, JsonSavePlanner):
            raise CheckpointError(f"{type(planner).__name__} would pickle what is no tensor: pass JsonSavePlanner().")
        path: Path = plan.storage_data
        if not path.parent.is_dir():
            raise CheckpointError(
                f"{path.parent}, made by rank 0, is not there. The folder of checkpoints must be one that all nodes "
                "share, and must not be removed meanwhile."
            )
        with files.writing(path):
            results = _write(path, plan, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._partial is not None
        given = [result for of_rank in results for result in of_rank]
        boxes: dict[str, list[_Written]] = {}
        for result in given:
            if isinstance(result.storage_data, _Written):
                boxes.setdefault(result.index.fqn, []).append(result.storage_data)
        manifest = Manifest(
            step=self._step,
            written_by=f"towpath {version('towpath')}, torch {torch.__version__}",
            seconds=time.time(),
            world=self._world,
            strategy=self._strategy,
            files={w.box.file: w.file for written in boxes.values() for w in written},
            tensors={
                name: Stored(written[0].dtype, written[0].shape, tuple(w.box for w in written))
                for name, written in sorted(boxes.items())
            },
            values={r.index.fqn: json.loads(r.storage_data.text) for r in given if isinstance(r.storage_data, _Value)},
        )
        with files.writing(self._partial):
            write_manifest(self._partial, manifest)
            self._claim.hold()  # still: it may have taken long
            folders.param_sync(self._partial, folders.checkpoint_of(self._root, self._step))
        self._partial = None

    def clear(self) -> None:
        """Take away what was not published."""
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _write(path: Path, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
    results: list[WriteResult] = []
    tensors: dict[str, tuple[Any, torch.Tensor]] = {}
    for item in plan.items:
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            results.append(WriteResult(item.index, 0, _Value(data.getvalue().decode())))
        else:
            name = f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
            tensors[name] = (item, data.contiguous().cpu())
    if not tensors:
        return results
    entries = files.in_order(
        files.Entry(name, files.dtype_name(data.dtype, item.index.fqn), tuple(data.shape))
        for name, (item, data) in tensors.items()
    )
    writer = files.FileWriter(path, entries, {})
    written: list[tuple[files.Entry, int, int]] = []
    try:
        for entry in entries:
            start = writer.at
            written.append((entry, start, writer.write(files.bytes_of(tensors[entry.name][1]))))
        file = writer.close()
    finally:
        writer.abandon()
    for entry, start, crc in written:
        item = tensors[entry.name][0]
        box = StoredBox(tuple(item.index.offset or ()), entry.sizes, path.name, start, crc)
        facts = _Written(box, entry.dtype, tuple(item.tensor_data.size), file)
        results.append(WriteResult(item.index, entry.bytes, facts))
    return results


@dataclass(frozen=True, slots=True)
class _Step:
    """One range of one file: which rank reads it, and which ranks get it from there. Every rank in the same order."""

    number: int
    item: int  # in this rank's own plan
    reader: int
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, end) of a box that a rank read, and their checksum."""

    name: str
    box: int
    start: int
    end: int
    crc32: int


class FolderReader(StorageReader):
    """`nodes`: which node each rank lives on; `group`: how ranks of a node hand each other what one of them read."""

    def __init__(
        self, folder: Path, manifest: Manifest, nodes: Sequence[int] = (0,), group: dist.ProcessGroup | None = None
    ) -> None:
        self._folder, self._manifest = folder, manifest
        self._nodes, self._group = nodes, group
        self._rank = 0
        self.ranges: list[Range] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.ranges = []

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(files.TORCH_DTYPES[t.dtype]),
                torch.Size(t.shape),
                [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in t.boxes],
            )
            for name, t in self._manifest.tensors.items()
        }
        return Metadata({**described, **{name: BytesStorageMetadata() for name in self._manifest.values}})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Give each range that ranks of a node want to the one of them that has the least to read so far."""
        wanted: dict[tuple[Any, ...], dict[int, int]] = {}  # by node and range: rank → its item
        for rank, plan in enumerate(plans):
            for number, item in enumerate(plan.items):
                if item.type is LoadItemType.TENSOR:
                    where = (item.storage_index.fqn, item.storage_index.index, *item.storage_offsets, *item.lengths)
                    wanted.setdefault((self._nodes[rank], *where), {})[rank] = number
        load = [0] * len(plans)
        steps: list[list[_Step]] = [[] for _ in plans]
        for number, ranks in enumerate(wanted.values()):
            reader = min(ranks, key=lambda rank: load[rank])
            load[reader] += prod(plans[reader].items[ranks[reader]].lengths)
            others = tuple(rank for rank in ranks if rank != reader)
            for rank, item in ranks.items():
                steps[rank].append(_Step(number, item, reader, others))
        return [replace(plan, storage_data=mine) for plan, mine in zip(plans, steps, strict=True)]

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(json.dumps(self._manifest.values[item.storage_index.fqn]).encode()))
        failure: CheckpointError | None = None
        sent: deque[tuple[Any, torch.Tensor]] = deque()
        for step in plan.storage_data:
            item = plan.items[step.item]
            target = planner.resolve_tensor(item).detach()
            buffer = self._buffer(item, target)
            if step.reader == self._rank:
                try:
                    self._read(item, buffer)
                except CheckpointError as error:
                    failure = failure or error  # the others wait for their bytes: they get some, and the error later
                for rank in step.others:
                    work = dist.isend(_flat(buffer), group=self._group, group_dst=rank, tag=step.number)
                    sent.append((work, buffer))
                # All ranks take the steps in one order: whoever is waited for has none before it to wait for.
                while len(sent) > _SENDS_UNDER_WAY:
                    sent.popleft()[0].wait()
            else:
                dist.recv(_flat(buffer), group=self._group, group_src=step.reader, tag=step.number)
            if buffer is not target:
                target.copy_(buffer)
        for work, _ in sent:
            work.wait()
        if failure is not None:
            raise failure
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _buffer(self, item: ReadItem, target: torch.Tensor) -> torch.Tensor:
        """Where the bytes go: the target itself, if it can take them."""
        dtype = files.TORCH_DTYPES[self._manifest.tensors[item.storage_index.fqn].dtype]
        if target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
            return target
        return torch.empty(tuple(item.lengths), dtype=dtype)

    def _read(self, item: ReadItem, buffer: torch.Tensor) -> None:
        name, number = item.storage_index.fqn, item.storage_index.index
        assert number is not None
        stored = self._manifest.tensors[name]
        box = stored.boxes[number]
        first = _position(item.storage_offsets, box.sizes)
        last = _position([o + n - 1 for o, n in zip(item.storage_offsets, item.lengths, strict=True)], box.sizes)
        in_one_piece = last - first + 1 == buffer.numel()
        # Where they lie apart, what lies between them is read, too.
        read = buffer if in_one_piece else files.empty((last - first + 1,), buffer.dtype, name)
        start, data = first * stored.itemsize, files.bytes_of(read)
        files.take(self._folder / box.file, box.start + start, data)
        self.ranges.append(Range(name, number, start, start + len(data), zlib.crc32(data)))
        if not in_one_piece:
            rows = [prod(box.sizes[dim + 1 :]) for dim in range(len(box.sizes))]
            buffer.copy_(read.as_strided(tuple(item.lengths), rows))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _flat(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.reshape(-1).view(torch.uint8)


def _position(index: Sequence[int], sizes: Sequence[int]) -> int:
    position = 0
    for i, size in zip(index, sizes, strict=True):
        position = position * size + i
    return position
