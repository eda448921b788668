"""The files of a checkpoint: what each rank writes, and what each rank reads.

Write: each rank writes its files into a partial folder. When all ranks have finished, rank 0 adds the manifest and
gives the folder its final name. After a failure nothing is published.

Read: the planner of torch.distributed.checkpoint (DCP) says which parts of which boxes a rank needs, and the rank reads
only these. Meanwhile the ranks together compute the checksum of each file that any of them reads, once.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from towpath.checkpoint import folders
from towpath.checkpoint.folders import Lock, RefusedError
from towpath.checkpoint.manifest import (
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    box_in,
    read_manifest,
    write_manifest,
)
from towpath.checkpoint.moving import Move, move
from towpath.checkpoint.safe_files import map_tensors, write_tensors, writing
from towpath.errors import CheckpointError
from towpath.topology.together import AllRanks, check_same
from towpath.version import __version__

_OPTIMIZER = re.compile(r"(island\.\d+\.)?optimizer(\.|$)")
SAME = "Pass the same on every rank."
MARGIN_BYTES = 1 << 20  # of free space, for the manifest, folders, and what the file system itself needs


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorChunks:
    """The part of a tensor that one rank writes: contiguous boxes, by their offsets in the tensor."""

    dtype: torch.dtype
    shape: torch.Size
    boxes: Mapping[tuple[int, ...], Tensor]
    steady: bool = False  # only an optimizer's step writes to the boxes
    shared_as: str | None = None  # names the file, if ranks of several nodes write the same one


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteItems:
    """The content that one rank writes into a checkpoint."""

    pieces: Mapping[str, TensorChunks]
    values: Mapping[str, Any]  # as JSON; most are only on rank 0
    same: Mapping[str, str]  # texts that must be the same on every rank of the island
    island: int = 0
    strategy: str | None = None  # in TOML


# What a rank tells before it writes: the step, the bytes of what only its node writes and of the rest, the lines that
# must be the same on all ranks of its island, and its island.
Announced = tuple[int, tuple[int, int], list[str], int]


class DivergedError(CheckpointError):
    """Ranks that hold the same slices hold other values."""


# What a rank has written: its files, its boxes of each tensor, and its values.
Written = tuple[dict[str, StoredFile], dict[str, StoredTensor], Mapping[str, Any]]


def announced(step: int, items: WriteItems | str) -> Announced:
    """Return what this rank tells before it writes, or raise why it has nothing to write."""
    if isinstance(items, str):
        raise CheckpointError(items)
    own = sum(box.nbytes for each in items.pieces.values() if each.shared_as is None for box in each.boxes.values())
    shared = sum(box.nbytes for each in items.pieces.values() for box in each.boxes.values()) - own
    return step, (own, shared), [f"{what} = {value}" for what, value in items.same.items()], items.island


def check_announced(ranks: Sequence[Announced], raises: type[CheckpointError]) -> list[tuple[int, int]]:
    """Return the sizes that ranks announced, or raise if the step or what must be the same differs."""
    check_same({rank: [f"step = {step}"] for rank, (step, *_) in enumerate(ranks)}, SAME, raises)
    for island in {island for *_, island in ranks}:
        members = {rank: same for rank, (_, _, same, theirs) in enumerate(ranks) if theirs == island}
        check_same(members, SAME, raises)
    return [sizes for _, sizes, _, _ in ranks]


def write(root: Path, step: int, items: WriteItems | str, lock: Lock, control: AllRanks) -> None:
    """Write a checkpoint into `root`. Every rank must call it, with what it writes or why it has nothing to write."""

    def prepare(ranks: list[Announced]) -> Path:
        sizes = check_announced(ranks, RefusedError)
        with writing(root):
            lock.hold()
            needed, free = sum(map(sum, sizes)) + MARGIN_BYTES, free_bytes(root)
            if needed > free:
                raise CheckpointError(
                    f"{root}: {free:,} bytes are free, and a checkpoint of step {step} takes {needed:,}. Make room, or "
                    "keep fewer."
                )
            return stack.enter_context(folders.new_partial(root, step))

    def write_mine() -> tuple[Written, bool]:
        if here != partial:
            for path in root.glob(f"*.partial-*_{me}"):  # of a run that died: only rank 0's node is swept
                shutil.rmtree(path, ignore_errors=True)
            here.mkdir(parents=True)
        return write_files(here / f"rank-{me:05d}", items), here == partial

    def publish() -> None:
        assert isinstance(items, WriteItems)
        with writing(partial):
            complete(partial, step, [each for each, _ in written], items.strategy)
            lock.hold()  # somebody may have removed it meanwhile
            folders.publish(partial, folders.checkpoint_of(root, step))

    me = control.groups.rank
    with ExitStack() as stack:
        partial = control.combine(lambda: announced(step, items), prepare)
        # A rank that does not see the folder writes on its own node, and sends its files to rank 0.
        here = partial if partial.is_dir() else partial.with_name(f"{partial.name}_{me}")
        if here != partial:
            stack.callback(shutil.rmtree, here, ignore_errors=True)
        written = control.gather(write_mine)
        moves = [
            Move(name, rank, 0)
            for rank, ((files, _, _), is_there) in enumerate(written)
            for name in (() if is_there else files)
        ]
        stored = {name: file for (files, _, _), _ in written for name, file in files.items()}
        control.each(lambda: move(moves, here, stored, control.groups))
        control.on_rank_0(publish)


def complete(partial: Path, step: int, ranks: Sequence[Written], strategy: str | None, source: str = "") -> None:
    """Add the manifest to the files that `ranks` have written, and check that it can be read.

    `source` names the files that were imported, or else the versions of the libraries that write.
    """
    write_manifest(partial, manifest_of(step, ranks, strategy, source))
    read_manifest(partial)  # it must be possible, and the boxes must be all of each tensor


def manifest_of(step: int, ranks: Sequence[Written], strategy: str | None, source: str = "") -> Manifest:
    """Return the manifest of what `ranks` have written. A file that several of them wrote counts once.

    Raises:
        CheckpointError: Such a file is not the same on all of them.
    """
    files, parts = dict[str, StoredFile](), list[tuple[str, StoredTensor]]()
    writers: dict[str, int] = {}
    for rank, (written, of_rank, _) in enumerate(ranks):
        for name in written.keys() & files.keys():
            if written[name] != files[name]:
                raise DivergedError(
                    f"rank {writers[name]} and rank {rank} hold copies of the same slices, which differ ({name}): "
                    "replicas have diverged. Load a checkpoint. If you write parameters by hand, write the same values "
                    "on all ranks."
                )
        new = written.keys() - files.keys()
        files |= {name: written[name] for name in written if name in new}
        writers |= dict.fromkeys(new, rank)
        for name, part in of_rank.items():
            if boxes := tuple(box for box in part.boxes if box.file in new):
                parts.append((name, replace(part, boxes=boxes)))
    tensors: dict[str, StoredTensor] = {}
    for name, part in sorted(parts, key=lambda item: item[0]):
        boxes = (*tensors[name].boxes, *part.boxes) if name in tensors else part.boxes
        tensors[name] = replace(part, boxes=boxes)
    values = {name: value for _, _, of_rank in ranks for name, value in of_rank.items()}
    for name in filter(_OPTIMIZER.fullmatch, values):
        values[name] = _merged([of_rank[name] for _, _, of_rank in ranks if name in of_rank])
    return Manifest(
        step=step,
        written_by=f"towpath {__version__}, {source or f'torch {torch.__version__}'}",
        seconds=time.time(),
        world=len(ranks),
        strategy=strategy,
        files=files,
        tensors=tensors,
        values=values,
    )


def _merged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the values of ranks that have different parameters. Groups with the same options become one."""
    kinds = sorted({each["kind"] for each in found})
    if len(kinds) > 1:
        raise CheckpointError(f"ranks have optimizers of different kinds: {', '.join(kinds)}.")
    groups: list[dict[str, Any]] = []
    for group in (group for each in found for group in each["groups"]):
        same = next((g for g in groups if g["options"] == group["options"]), None)
        if same is None:
            groups.append({"names": list(group["names"]), "options": group["options"]})
        else:
            same["names"] += [name for name in group["names"] if name not in same["names"]]
    states = {name: state for each in found for name, state in each["states"].items()}
    return {"kind": kinds[0], "groups": groups, "states": states}


def write_files(stem: Path, items: WriteItems | str) -> Written:
    """Write this rank's files: one for the states of the optimizer, and one for everything else."""
    assert isinstance(items, WriteItems)
    if not stem.parent.is_dir():
        raise CheckpointError(f"{stem.parent} is gone. Do not remove the folder of checkpoints meanwhile.")
    files: dict[str, dict[str, Tensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, pieces in items.pieces.items():
        kind = "-optimizer" if _OPTIMIZER.match(name) else ""
        file = f"{stem.name if pieces.shared_as is None else f'shared-{pieces.shared_as}'}{kind}.safetensors"
        boxes = {StoredBox(at, tuple(data.shape), file): data for at, data in pieces.boxes.items()}
        tensors[name] = StoredTensor(name, pieces.dtype, tuple(pieces.shape), tuple(boxes))
        files.setdefault(file, {}).update({box.key(name): data for box, data in boxes.items()})
    written: dict[str, StoredFile] = {}
    for file, held in files.items():
        with writing(stem.parent / file):
            written[file] = StoredFile(*write_tensors(stem.parent / file, held))
    return written, tensors, items.values


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that `folder` is on."""
    return shutil.disk_usage(folder).free


# --- reading ----------------------------------------------------------------------------------------------------------


class Reading:
    """The parts of a checkpoint's files that fill `targets` on this rank.

    Attributes:
        files: The names of the files that this rank reads.
    """

    def __init__(self, targets: Mapping[str, Tensor], manifest: Manifest, is_first: bool) -> None:
        self._manifest = manifest
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        metadata: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(tensor.dtype),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in tensor.boxes],
            )
            for name, tensor in manifest.tensors.items()
        }
        self._planner.set_up_planner(dict(targets), Metadata(metadata), is_first)
        self._items = list(self._planner.create_local_plan().items)
        self.files = {self._box_of(item).file for item in self._items}

    def _box_of(self, item: Any) -> StoredBox:
        return self._manifest.tensors[item.storage_index.fqn].boxes[item.storage_index.index]

    @torch.no_grad()
    def fill(self, folder: Path) -> None:
        """Read the files in `folder`, and fill the targets."""
        files = {name: map_tensors(folder / name) for name in self.files}
        for item in self._items:
            box = self._box_of(item)
            stored = box_in(files[box.file], self._manifest.tensors[item.storage_index.fqn], box)
            where = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
            self._planner.resolve_tensor(item).detach().copy_(stored[where])


def read(targets: Mapping[str, Tensor], folder: Path, manifest: Manifest, control: AllRanks) -> None:
    """Fill `targets` from a checkpoint. Every rank of `control` must call it. If one fails, all raise its error."""
    reading = control.each(lambda: Reading(targets, manifest, control.groups.rank == 0))

    def share(ranks: list[set[str]]) -> list[list[str]]:
        """Return the files whose checksum each rank computes. The next largest one goes to the rank with the least."""
        checked, load = [list[str]() for _ in ranks], [0] * len(ranks)
        for file in sorted(set[str]().union(*ranks), key=lambda name: (-manifest.files[name].bytes, name)):
            rank = load.index(min(load))
            checked[rank].append(file)
            load[rank] += manifest.files[file].bytes
        return checked

    def check(files: Iterable[str]) -> None:
        for file in files:
            manifest.check_file(folder, file)

    def fill() -> None:
        with ThreadPoolExecutor(1) as pool:
            checking = pool.submit(check, checked[control.groups.rank])
            reading.fill(folder)
            checking.result()

    checked = control.combine(lambda: reading.files, share)
    control.each(fill)
