"""Loading: the newest checkpoint that is what was written, under whatever strategy and on however many ranks.

Rank 0 chooses and tells; what any rank finds wrong with the choice, every rank learns before the next one is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from towpath.checkpoint.control_group import ControlGroup
from towpath.checkpoint.dcp import calls as run
from towpath.checkpoint.dcp.storage import FolderReader
from towpath.checkpoint.disk import folders
from towpath.checkpoint.disk.checks import check_ranges
from towpath.checkpoint.disk.manifest import Manifest, read_manifest
from towpath.checkpoint.disk.safe_open import DamagedError
from towpath.checkpoint.memory.state import State
from towpath.errors import CheckpointError, TowpathError
from towpath.logs import logger

_LOG = logger("checkpoint")

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Loaded:
    """`notes`: which checkpoints were passed over and why, and what could not go on just as it was."""

    step: int
    path: Path
    notes: tuple[str, ...]


def load(where: str | Path, state: State) -> Loaded | None:
    """Fill `state` from a checkpoint, or from the newest in a folder of them; None if there is none in it.

    Every rank must call this, between two steps. One that is damaged is passed over for the one before; one of another
    model is refused. After an error the state is neither the old nor the new one.
    """
    state.settle()
    control = ControlGroup(state.groups, "checkpoint loading")
    found, problem = control.first(lambda: _attempted(lambda: _candidates(Path(where))))
    if found is None:
        raise CheckpointError(problem)
    single, candidates = found
    notes: list[str] = []
    for path in candidates:
        try:
            loaded = _load(path, state, control, named=single)
        except DamagedError as error:
            if single:
                raise CheckpointError(str(error)) from None
            notes.append(f"{path.name} was passed over: {error}")
            if control.rank == 0:
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


def _load(path: Path, state: State, control: ControlGroup, *, named: bool) -> Loaded:
    manifest, problem = control.first(lambda: _attempted(lambda: _opened(path, named)))
    if manifest is None:
        raise DamagedError(problem or "")
    _agreed(control, lambda: manifest.check_sizes(path))
    _agreed(control, lambda: state.check(manifest))
    restoring = _agreed(control, lambda: state.restoring(manifest))
    reader = FolderReader(path, manifest, state.nodes, control.group)
    try:
        run.load(restoring.targets, reader, control)
    except CheckpointError as error:
        raise DamagedError(str(error)) from None
    read = control.collect(reader.ranges)
    problem = control.first(lambda: check_ranges(path, manifest, read or []))
    if problem is not None:
        raise DamagedError(problem)
    _agreed(control, restoring.check)
    notes = _agreed(control, restoring.finish)
    return Loaded(manifest.step, path, tuple(notes))


def _opened(path: Path, named: bool) -> Manifest:
    if not named:
        folders.refuse_link(path)
    return read_manifest(path)


def _attempted(work: Callable[[], Found]) -> tuple[Found | None, str | None]:
    """For rank 0: the others wait for its answer, whatever it is."""
    try:
        return work(), None
    except CheckpointError as error:
        return None, str(error)


def _agreed(control: ControlGroup, work: Callable[[], Found]) -> Found:
    """`work()`, if it succeeded on every rank. An older checkpoint may do, if this one was only found damaged."""
    found: Found | None = None
    problem: Exception | None = None
    try:
        found = work()
    except Exception as error:
        problem = error
    damaged = isinstance(problem, DamagedError)
    said = control.all(None if problem is None else (damaged, run.described(problem)))
    if problem is not None and not isinstance(problem, TowpathError):
        raise problem
    problems = [(told[0], rank, told[1]) for rank, told in enumerate(said) if told is not None]
    if problems:
        damaged, rank, text = min(problems)  # what is no damage counts first
        raise (DamagedError if damaged else CheckpointError)(text if len(set(said)) == 1 else f"rank {rank}: {text}")
    return found  # pyright: ignore[reportReturnType]
