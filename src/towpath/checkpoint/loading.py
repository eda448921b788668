"""Load the newest usable checkpoint, under any strategy and on any number of ranks, and verify checkpoints.

Rank 0 chooses a checkpoint. If any rank finds it damaged, every rank learns that before the next one is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from towpath.checkpoint import folders, storage
from towpath.checkpoint.manifest import read_manifest
from towpath.checkpoint.restoring import Restore
from towpath.checkpoint.safe_files import DamagedError
from towpath.checkpoint.state import State
from towpath.errors import CheckpointError
from towpath.logs import logger
from towpath.topology.together import AllRanks, check_same

_LOG = logger("checkpoint")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint that `load` has loaded.

    Attributes:
        step: The step of the checkpoint.
        path: The folder of the checkpoint.
        notes: Which checkpoints were damaged and why, what was not loaded, and what could not be restored exactly.
    """

    step: int
    path: Path
    notes: tuple[str, ...]


def load(where: str | Path, state: State) -> Loaded | None:
    """Load a checkpoint into `state`. Every rank must call it, between two steps.

    In a folder of checkpoints, the newest one that is not damaged is loaded. After an error, the state is undefined: it
    may have values of both.

    Args:
        where: A checkpoint, a folder of checkpoints, or the folder of a `towpath train` run.
        state: Where to load it. Strategy and number of ranks may differ from those that saved it.

    Returns:
        What was loaded, or None if the folder is missing or has no checkpoint.

    Raises:
        CheckpointError: The checkpoint is of another model, or no checkpoint is usable, or `where` is a file or a
            checkpoint of torch.distributed.checkpoint. All ranks raise it.
    """
    state.settle()
    control = AllRanks(state.local.everyone.apart("checkpoint loading"), "loading a checkpoint", CheckpointError)

    def candidates() -> tuple[bool, list[Path]]:
        """Return the checkpoints to try, and whether the user named one."""
        path = Path(where)
        named = folders.is_checkpoint(path)
        if not named:
            folders.refuse_others(path)
        return named, [path] if named else folders.checkpoints(folders.search_folder(path))

    def choose(ranks: list[tuple[str, tuple[bool, list[Path]]]]) -> tuple[bool, list[Path]]:
        lines = {rank: [f"the folder to load = {theirs}"] for rank, (theirs, _) in enumerate(ranks)}
        check_same(lines, "Pass the same folder on every rank.", CheckpointError)
        mine = ranks[0][1]
        others = [rank for rank, (_, (_, paths)) in enumerate(ranks) if paths]
        if others and not mine[1]:
            raise CheckpointError(
                f"{where} has no checkpoint on rank 0, and has some on rank {others[0]}. Expected one folder that all "
                "nodes share: name such a folder, or copy the checkpoints into each node's."
            )
        return mine

    named, paths = control.combine(lambda: (str(where), candidates()), choose)
    notes: list[str] = []
    for path in paths:
        try:
            return _load(path, state, control, notes)
        except DamagedError as error:
            if named:
                raise CheckpointError(str(error)) from None
            notes.append(f"{path.name} was passed over: {error}")
            if control.groups.rank == 0:
                _LOG.error("CHECKPOINT %s CANNOT BE USED: %s Trying the one before.", path.name, error)
    if notes:
        raise CheckpointError(f"no checkpoint in {where} can be used: {' '.join(notes)}")
    return None


def _load(path: Path, state: State, control: AllRanks, notes: Sequence[str]) -> Loaded:
    manifest = control.on_rank_0(lambda: read_manifest(path))
    control.each(lambda: manifest.check_sizes(path))
    restore = control.each(lambda: Restore(state, manifest))
    storage.read(restore.targets, path, restore.manifest, control)
    control.each(restore.check)
    return Loaded(manifest.step, path, (*notes, *control.each(restore.finish)))


# --- without ranks ----------------------------------------------------------------------------------------------------


def latest(root: str | Path) -> Path | None:
    """Return the newest checkpoint in a folder whose manifest is valid and whose files are complete.

    It reads only manifests and sizes. Use `verify` to read the files.

    Args:
        root: The folder of checkpoints, or of a `towpath train` run.

    Returns:
        The folder of the checkpoint, or None if there is none.

    Raises:
        CheckpointError: The folder cannot be searched.
    """
    for path in folders.checkpoints(folders.search_folder(Path(root))):
        try:
            read_manifest(path).check_sizes(path)
        except DamagedError as error:
            _LOG.warning("%s was passed over: %s", path.name, error)
            continue
        return path
    return None


def verify(path: str | Path) -> str | None:
    """Read every byte of a checkpoint and compare each file with its checksum.

    Args:
        path: The folder of the checkpoint.

    Returns:
        What is damaged, or None if every byte is what was written.
    """
    folder = Path(path)
    try:
        manifest = read_manifest(folder)
        manifest.check_sizes(folder)
        for name in manifest.files:
            manifest.check_file(folder, name)
    except DamagedError as error:
        return str(error)
    return None
