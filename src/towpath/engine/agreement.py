"""Do all ranks hold the same? Else all of them raise, and say what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from towpath.errors import MismatchError, TowpathError


class Gathering(Protocol):
    """Ranks that tell one another, such as `Groups`."""

    @property
    def members(self) -> list[int]: ...

    def gather_objects(self, value: Any) -> list[Any]: ...


def agree(
    groups: Gathering,
    mine: Sequence[str],
    failure: TowpathError | None,
    call: str = "shard()",
    advice: str = "Build the same model and pass the same strategy on every rank.",
) -> None:
    """Go on only if every rank holds the same lines; else raise, on every rank, what differs or who failed."""
    mine_failed = str(failure) if failure is not None else None
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    answers = groups.gather_objects((digest, mine_failed))
    if failure is not None:
        raise failure
    for rank, (_, error) in enumerate(answers):
        if error is not None:
            raise MismatchError(f"{call} failed on rank {groups.members[rank]}: {error}")
    if len({d for d, _ in answers}) == 1:
        return
    lines: list[list[str]] = groups.gather_objects(list(mine))
    raise MismatchError(f"{_difference(lines, groups.members)} {advice}")


def _difference(lines: list[list[str]], ranks: list[int]) -> str:
    other = next(place for place, theirs in enumerate(lines) if theirs != lines[0])
    for i in range(max(len(lines[0]), len(lines[other]))):
        here, there = (theirs[i] if i < len(theirs) else "nothing more" for theirs in (lines[0], lines[other]))
        if here != there:
            return (
                f"the ranks were given different things: rank {ranks[0]} has {here!r}, rank {ranks[other]} has "
                f"{there!r}."
            )
    raise AssertionError("equal lists cannot differ")
