"""Load the newest usable checkpoint, under any strategy and on any number of ranks, and verify checkpoints.

Rank 0 chooses a checkpoint. If any rank finds it damaged, every rank learns that before the next one is tried.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from towpath.checkpoint import folders, storage
from towpath.checkpoint.manifest import Manifest, digest_of, read_manifest, step_of
from towpath.checkpoint.moving import move, plan_moves
from towpath.checkpoint.restoring import Restore
from towpath.checkpoint.safe_files import DamagedError
from towpath.checkpoint.state import State
from towpath.errors import CheckpointError
from towpath.logs import logger
from towpath.progress import format_bytes
from towpath.protect import timeline
from towpath.protect.healing import Found, found_in_memory, restore
from towpath.protect.memory import holds_snapshots
from towpath.protect.snapshots import NodeRanks
from towpath.topology.cluster import counted
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
    timeline.mark("asked")
    state.settle()
    everyone = state.local.everyone
    control = AllRanks(everyone.apart("checkpoint loading"), "loading a checkpoint", CheckpointError)

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
        # A folder that is no shared one is on the node of rank 0, which another node was in a former start.
        named = any(named for _, (named, _) in ranks)
        found = {path for _, (is_named, paths) in ranks if is_named is named for path in paths}
        return named, sorted(found, key=step_of, reverse=True)

    named, paths = control.combine(lambda: (str(where), candidates()), choose)
    root = Path(where).parent if named else where
    # A job of one node is not protected, and goes on from what it holds of a job of several.
    held = control.combine(lambda: holds_snapshots(root) or (state.protect is not None and not named), any)
    ranks = NodeRanks(root, everyone) if held else None
    found = [] if ranks is None or named else found_in_memory(ranks, control)
    # The newest first. Of a checkpoint and a snapshot of the same step, the snapshot is nearer.
    tried = sorted([*((f.step, True, f) for f in found), *((step_of(p), False, p) for p in paths)], key=_age)
    notes: list[str] = []
    for step, _, each in tried:
        try:
            if isinstance(each, Path):
                loaded = _load(each, state, control, notes)
            else:
                assert ranks is not None
                loaded = _heal(each, state, ranks, control, notes)
        except DamagedError as error:
            if named:
                raise CheckpointError(str(error)) from None
            name = each.name if isinstance(each, Path) else f"the snapshot of step {step}"
            notes.append(f"{name} was passed over: {error}")
            if everyone.rank == 0:
                _LOG.error("%s CANNOT BE USED: %s Trying the one before.", name.upper(), error)
            continue
        if ranks is not None and state.snapshot is None:
            # A snapshot that is newer would be taken for one of the run that begins here.
            control.each(ranks.remove_snapshots)
            ranks.memory.release()  # nothing there is needed, and `Snapshots` holds it anew
        return loaded
    if notes:
        advice = f" To begin anew, remove {ranks.memory} on every node." if found and ranks is not None else ""
        raise CheckpointError(f"no checkpoint in {where} can be used: {' '.join(notes)}{advice}")
    if ranks is not None:
        ranks.memory.release()
    return None


def _age(candidate: tuple[int, bool, object]) -> tuple[int, bool]:
    step, is_near, _ = candidate
    return -step, not is_near


def _heal(found: Found, state: State, ranks: NodeRanks, control: AllRanks, notes: Sequence[str]) -> Loaded:
    state.snapshot, sent, more = restore(found, state, ranks, control)
    timeline.mark("restored")
    timeline.begin(min((each for each in control.gather(ranks.noticed) if each is not None), default=None))
    about = f"it was in the memory of {counted(len(set(ranks.nodes)), 'node')}"
    if sent:
        about += f", and {format_bytes(sent)} were sent to nodes without it"
    return Loaded(found.step, state.snapshot, (*notes, *more, about))


def _load(path: Path, state: State, control: AllRanks, notes: Sequence[str]) -> Loaded:
    me = control.groups.rank
    digests = control.gather(lambda: digest_of(path))
    source = next((rank for rank, digest in enumerate(digests) if digest is not None), 0)
    manifest = control.gather(lambda: read_manifest(path) if me == source else None)[source]
    assert manifest is not None
    seen = [digest == digests[source] for digest in digests]
    control.each(lambda: manifest.check_sizes(path) if seen[me] else None)
    restoring = control.each(lambda: Restore(state, manifest))
    if all(seen):
        storage.read(restoring.targets, path, restoring.manifest, control)
    else:
        _fetch(restoring, path, manifest, seen, control)
    control.each(restoring.check)
    state.snapshot = None
    return Loaded(manifest.step, path, (*notes, *control.each(restoring.finish)))


def _fetch(restoring: Restore, path: Path, manifest: Manifest, seen: Sequence[bool], control: AllRanks) -> None:
    """Load a checkpoint in a folder that only some ranks see. They send the others what these read."""
    me, numbers = control.groups.rank, [0 if sees else 1 + rank for rank, sees in enumerate(seen)]
    reading = control.each(lambda: storage.Reading(restoring.targets, restoring.manifest, me == 0))
    moves = plan_moves({name: {0} for name in manifest.files}, manifest, path, reading.files, numbers, control)
    with tempfile.TemporaryDirectory(prefix="towpath-") as own:
        folder = path if seen[me] else Path(own)
        control.each(lambda: move(moves, folder, manifest.files, control.groups))
        control.each(lambda: reading.fill(folder))


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
