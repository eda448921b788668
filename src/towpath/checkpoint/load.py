"""Loading: the newest checkpoint that is what was written, under whatever strategy and on however many ranks.

Rank 0 chooses and tells; what any rank finds wrong with the choice, every rank learns before the next one is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from towpath.checkpoint import folders, run
from towpath.checkpoint.checks import check_ranges
from towpath.checkpoint.council import Council
from towpath.checkpoint.manifest import Manifest, read_manifest
from towpath.checkpoint.state import State
from towpath.checkpoint.storage import FolderReader
from towpath.errors import CheckpointError, TowpathError

_LOG = logging.getLogger("towpath.checkpoint")

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Loaded:
    """`notes`: which checkpoints were passed over and why, and what could not go on just as it was."""

    step: int
    path: Path
    notes: tuple[str, ...]


class _DamagedError(CheckpointError):
    """Not what was written: the one before may do."""


def load(where: str | Path, state: State) -> Loaded | None:
    """Fill `state` from a checkpoint, or from the newest in a folder of them; None if there is none in it.

    Every rank must call this, between two steps. One that is damaged is passed over for the one before; one of another
    model is refused. After an error the state is neither the old nor the new one.
    """
    state.settle()
    council = Council(state.groups, "checkpoint loading")
    single, candidates = council.first(lambda: _candidates(Path(where)))
    notes: list[str] = []
    for path in candidates:
        try:
            loaded = _load(path, state, council)
        except _DamagedError as error:
            if single:
                raise CheckpointError(str(error)) from None
            notes.append(f"{path.name} was passed over: {error}")
            if council.rank == 0:
                _LOG.error("CHECKPOINT %s CANNOT BE USED: %s Trying the one before.", path.name, error)
            continue
        return Loaded(loaded.step, path, (*notes, *loaded.notes))
    if notes:
        raise CheckpointError(f"no checkpoint in {where} can be used: {' '.join(notes)}")
    return None


def _candidates(where: Path) -> tuple[bool, list[Path]]:
    """The checkpoint that was named, or those in the folder that was named."""
    if folders.is_checkpoint(where):
        return True, [where]
    return False, folders.checkpoints(folders.home(where))


def _load(path: Path, state: State, council: Council) -> Loaded:
    manifest, problem = council.first(lambda: _opened(path))
    if manifest is None:
        raise _DamagedError(problem)
    _agreed(council, lambda: manifest.check_sizes(path), _DamagedError)
    _agreed(council, lambda: state.check(manifest), CheckpointError)
    restoring = _agreed(council, lambda: state.restoring(manifest), CheckpointError)
    reader = FolderReader(path, manifest, state.nodes, council.group)
    try:
        run.load(restoring.targets, reader, council)
    except CheckpointError as error:
        raise _DamagedError(str(error)) from None
    read = council.collect(reader.ranges)
    problem = council.first(lambda: check_ranges(path, manifest, read or []))
    if problem is not None:
        raise _DamagedError(problem)
    _agreed(council, restoring.check, CheckpointError)
    notes = _agreed(council, restoring.finish, CheckpointError)
    return Loaded(manifest.step, path, tuple(notes))


def _opened(path: Path) -> tuple[Manifest | None, str | None]:
    try:
        return read_manifest(path), None
    except CheckpointError as error:
        return None, str(error)


def _agreed(council: Council, work: Callable[[], Found], kind: type[CheckpointError]) -> Found:
    """`work()`, if it succeeded on every rank."""
    found: Found | None = None
    problem: Exception | None = None
    try:
        found = work()
    except Exception as error:
        problem = error
    said = council.all(None if problem is None else run.described(problem))
    if problem is not None and not isinstance(problem, TowpathError):
        raise problem
    for rank, text in enumerate(said):
        if text is not None:
            raise kind(text if len(set(said)) == 1 else f"rank {rank}: {text}")
    return found  # pyright: ignore[reportReturnType]
