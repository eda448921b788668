"""The interface to torch.distributed.checkpoint (DCP), which plans who writes and who reads what.

DCP sees a checkpoint as a flat dict of tensors, pieces of tensors, and JSON values. `write` and `read` call DCP.
`FolderWriter` and `FolderReader` are its storage: a folder of safetensors files and a manifest.

Write: each rank writes its files into a partial folder. When all ranks have finished, rank 0 adds the manifest and
gives the folder its final name. After a failure nothing is published.

Read: each rank reads its slices of the files. Meanwhile the ranks together compute the checksum of each file that any
of them reads, once.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from towpath.checkpoint import folders
from towpath.checkpoint.folders import Lock, RefusedError
from towpath.checkpoint.manifest import Manifest, StoredBox, StoredFile, StoredTensor, box_in, write_manifest
from towpath.checkpoint.rank_contents import check_same, described
from towpath.checkpoint.safe_files import DamagedError, map_tensors, write_tensors, writing
from towpath.errors import CheckpointError
from towpath.version import __version__

_OF_OPTIMIZER = re.compile(r"(island\.\d+\.)?optimizer\.")
_MARGIN_BYTES = 1 << 20  # of free space, for the manifest, folders, and what the file system itself needs


# --- calls ------------------------------------------------------------------------------------------------------------


def write(
    found: dict[str, Any], writer: FolderWriter, planner: JsonSavePlanner, group: dist.ProcessGroup | None
) -> None:
    """Write what this rank has into a checkpoint. Every rank of `group` must call it.

    Args:
        found: Tensors, `Pieces` of tensors, and JSON values by name.
        writer: The checkpoint to write.
        planner: A new planner.
        group: The ranks that write, or None in a world of one.

    Raises:
        CheckpointError: A rank failed. All ranks raise the same error.
    """
    if group is not None:
        _explained(lambda: dcp_save(found, storage_writer=writer, planner=planner, process_group=group))
        return
    # `dcp.save` would warn that there are no other ranks. These are its steps.
    planner.set_up_planner(found, None, True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    [plan] = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def read(targets: dict[str, torch.Tensor], reader: FolderReader, group: dist.ProcessGroup | None) -> None:
    """Fill `targets` from a checkpoint. Every rank of `group` must call it.

    Raises:
        CheckpointError: A rank failed. All ranks raise the same error.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if group is not None:
        _explained(lambda: dcp_load(targets, storage_reader=reader, planner=planner, process_group=group))
        return
    metadata = reader.read_metadata()
    planner.set_up_planner(targets, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    [plan] = reader.prepare_global_plan(planner.create_global_plan([planner.create_local_plan()]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _explained(work: Callable[[], object]) -> None:
    """Call `work`, and turn DCP's exception into an error for the user.

    `CheckpointException` is not an `Exception`. It holds the failures of all ranks, and every rank gets the same.
    """
    try:
        work()
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        others = len(error.failures) - 1
        more = f" ({others} more ranks failed)" if others else ""
        # Frames of these errors hold the errors themselves. The cycle would keep the saver, its memory and its lock on
        # the folder alive until Python collects garbage.
        for each in (error, *(failed for failed, _ in error.failures.values())):
            current: BaseException | None = each
            while current is not None:
                traceback.clear_frames(current.__traceback__)
                current = current.__context__
        if isinstance(first, RefusedError):  # rank 0 has compared all ranks
            raise RefusedError(str(first)) from None
        is_damage = all(isinstance(failed, DamagedError) for failed, _ in error.failures.values())
        raise (DamagedError if is_damage else CheckpointError)(f"rank {rank}: {described(first)}{more}") from None


# --- planning ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pieces:
    """The part of a tensor that one rank writes: contiguous boxes, by their offsets in the tensor.

    `steady` says that only an optimizer's step writes to the boxes.
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
    """Plans the saving of a flat dict. It writes JSON where the default planner pickles.

    `problem` says why this rank has nothing to save. The planner raises it where all ranks receive the error.
    """

    def __init__(self, problem: str | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._problem = problem

    def create_local_plan(self) -> SavePlan:
        """Raise the problem of this rank, if any."""
        if self._problem is not None:
            raise CheckpointError(self._problem)
        return super().create_local_plan()

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Find a box of a `Pieces`."""
        found = self.state_dict[index.fqn]
        if isinstance(found, Pieces):
            assert index.offset is not None
            return found.boxes[tuple(index.offset)]
        return super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return tensors as they are, and the JSON of other values."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return object.detach()
        return io.BytesIO(json.dumps(object).encode())


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _WrittenBox:
    box: StoredBox
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: StoredFile


class FolderWriter(StorageWriter):
    """Writes the checkpoint of one step into `root`, of which rank 0 of this job holds the `lock`.

    `same` has the texts that must be the same on every rank of an island.
    """

    def __init__(
        self,
        root: Path,
        step: int,
        lock: Lock,
        strategy: str | None = None,
        same: Mapping[str, str] | None = None,
        island: int = 0,
    ) -> None:
        self._root, self._step, self._lock, self._strategy = root, step, lock, strategy
        self._same = island, dict(same or {})
        self._world = 1
        self._partial: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Lock the folder on rank 0, which also creates it."""
        if is_coordinator:
            with writing(self._root):
                self._lock.hold()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add the size of this rank's data to its plan, and what must be the same on every rank."""
        needed = sum(item.tensor_storage_size() or 0 for item in plan.items)
        return replace(plan, storage_data=(needed, self._step, self._same))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the partial folder on rank 0, if there is room, and give each rank its files in it."""
        check_same([{"step": plan.storage_data[1]} for plan in plans])
        islands: dict[int, dict[int, Mapping[str, str]]] = {}
        for rank, plan in enumerate(plans):
            island, same = plan.storage_data[2]
            islands.setdefault(island, {})[rank] = same
        for members in islands.values():
            check_same([*members.values()], [*members])
        needed = sum(plan.storage_data[0] for plan in plans) + _MARGIN_BYTES
        with writing(self._root):
            free = free_bytes(self._root)
            if needed > free:
                raise CheckpointError(
                    f"{self._root}: {free:,} bytes are free, and a checkpoint of step {self._step} takes {needed:,}. "
                    "Make room, or keep fewer."
                )
            self._partial = folders.new_partial(self._root, self._step)
        self._world = len(plans)
        return [replace(plan, storage_data=self._partial / f"rank-{rank:05d}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files: one for the states of the optimizer, and one for everything else."""
        path: Path = plan.storage_data
        if not path.parent.is_dir():
            raise CheckpointError(
                f"{path.parent}, made by rank 0, is not there. The folder of checkpoints must be one that all nodes "
                "share, and must not be removed meanwhile."
            )
        results: list[WriteResult] = []
        parts: dict[str, list[tuple[WriteItem, torch.Tensor]]] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                results.append(WriteResult(item.index, 0, data.getvalue().decode()))
            else:
                part = "-optimizer" if _OF_OPTIMIZER.match(item.index.fqn) else ""
                parts.setdefault(part, []).append((item, data.contiguous().cpu()))
        for part, items in parts.items():
            file = path.with_name(f"{path.name}{part}.safetensors")
            boxes = [StoredBox(tuple(i.index.offset or ()), tuple(data.shape), file.name) for i, data in items]
            named = {box.key(item.index.fqn): data for box, (item, data) in zip(boxes, items, strict=True)}
            with writing(file):
                facts = StoredFile(*write_tensors(file, named))
            for box, (item, data) in zip(boxes, items, strict=True):
                assert item.tensor_data is not None
                written = _WrittenBox(box, data.dtype, tuple(item.tensor_data.size), facts)
                results.append(WriteResult(item.index, data.nbytes, written))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest on rank 0 and publish the checkpoint."""
        assert self._partial is not None
        boxes: dict[str, list[_WrittenBox]] = {}
        values: dict[str, Any] = {}
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result.storage_data, _WrittenBox):
                boxes.setdefault(result.index.fqn, []).append(result.storage_data)
            else:
                values[result.index.fqn] = json.loads(result.storage_data)
        manifest = Manifest(
            step=self._step,
            written_by=f"towpath {__version__}, torch {torch.__version__}",
            seconds=time.time(),
            world=self._world,
            strategy=self._strategy,
            files={w.box.file: w.file for written in boxes.values() for w in written},
            tensors={
                name: StoredTensor(written[0].dtype, written[0].shape, tuple(w.box for w in written))
                for name, written in sorted(boxes.items())
            },
            values=values,
        )
        with writing(self._partial):
            write_manifest(self._partial, manifest)
            self._lock.hold()  # somebody may have removed it meanwhile
            folders.publish(self._partial, folders.checkpoint_of(self._root, self._step))
        self._partial = None

    def clear(self) -> None:
        """Remove what was not published."""
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept anything: the writer has its own folder."""
        return True


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that `folder` is on."""
    return shutil.disk_usage(folder).free


# --- reading ----------------------------------------------------------------------------------------------------------


class FolderReader(StorageReader):
    """Reads a checkpoint: the slices that this rank needs, and the checksums of some of the files."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest in DCP's terms."""
        found: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(t.dtype),
                torch.Size(t.shape),
                [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in t.boxes],
            )
            for name, t in self._manifest.tensors.items()
        }
        return Metadata(found)  # tensors only, so that DCP has nothing to unpickle

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the manifest has been read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Let one rank compute the checksum of each file that any rank reads: the rank with the least to do so far."""
        files = {file for plan in plans for item in plan.items for file in [self._box(item).file]}
        checked: list[list[str]] = [[] for _ in plans]
        load = [0] * len(plans)
        for file in sorted(files, key=lambda name: (-self._manifest.files[name].bytes, name)):
            rank = load.index(min(load))
            checked[rank].append(file)
            load[rank] += self._manifest.files[file].bytes
        return [replace(plan, storage_data=mine) for plan, mine in zip(plans, checked, strict=True)]

    def _box(self, item: Any) -> StoredBox:
        return self._manifest.tensors[item.storage_index.fqn].boxes[item.storage_index.index]

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's targets, and check its files at the same time."""

        def check() -> None:
            for file in plan.storage_data:
                self._manifest.check_file(self._folder, file)

        with ThreadPoolExecutor(1) as pool:
            checking = pool.submit(check)
            files = {name: map_tensors(self._folder / name) for name in {self._box(item).file for item in plan.items}}
            for item in plan.items:
                name, box = item.storage_index.fqn, self._box(item)
                stored = box_in(files[box.file], name, self._manifest.tensors[name], box)
                where = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                planner.resolve_tensor(item).detach().copy_(stored[where])
            checking.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept anything: the reader has its own folder."""
        return True
