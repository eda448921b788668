"""Ranks that decide together: what fails on one rank, or differs between ranks, raises on every rank.

A rank that raises alone leaves its peers waiting. So a call that can fail on one rank alone is made in `together`, or
by an `AllRanks`, and the ranks exchange their errors at its end. A rank that never comes there ends in the error of the
process group: at once if its connection has closed, and otherwise at the group's timeout.
"""

from __future__ import annotations

import difflib
import hashlib
import pickle
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final

from towpath.errors import MismatchError, TowpathError
from towpath.topology.groups import Groups, Ranks

Value = TypeVar("Value")
Combined = TypeVar("Combined")

_SAME_MODEL = "Build the same model and pass the same strategy on every rank."


@contextmanager
def together(
    ranks: Ranks, call: str = "shard()", advice: str = _SAME_MODEL, raises: type[TowpathError] = MismatchError
) -> Generator[list[str]]:
    """Raise on every rank if any rank raises inside the context, or if the ranks' lines differ.

    It yields an empty list. Every rank adds the lines that must be the same on all ranks. A rank that fails raises its
    own error.

    Args:
        ranks: The ranks that enter the context. Each of them must.
        call: The call that errors name.
        advice: The end of the error about lines that differ.
        raises: The error of ranks that have not failed.
    """
    lines: list[str] = []
    try:
        yield lines
    except Exception as error:  # of any kind, because the other ranks wait for an answer
        ranks.all_gather_objects(("", described(error)))
        raise
    # Lines are many, one for each parameter, and almost always the same.
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    answers: list[tuple[str, str]] = ranks.all_gather_objects((digest, ""))
    failed = {rank: text for rank, (_, text) in zip(ranks.members, answers, strict=True) if text}
    if failed:
        raise raises(_message(call, failed))
    if len({theirs for theirs, _ in answers}) > 1:
        check_same(dict(zip(ranks.members, ranks.all_gather_objects(lines), strict=True)), advice, raises)


@final
@dataclass(frozen=True, slots=True)
class AllRanks:
    """Calls that all ranks of `groups` make, in the same order. If one fails, every rank raises the same error.

    `call` names them in errors. The error is of the closest class that all errors have in common. It is a `raises` if
    they have none, or if Towpath did not raise them on purpose.
    """

    groups: Groups
    call: str
    raises: type[TowpathError]

    def combine(self, work: Callable[[], Value], then: Callable[[list[Value]], Combined]) -> Combined:
        """Call `work` on every rank, and `then` on rank 0 with all results. Return its result on every rank."""
        mine, error = self._attempt(work)
        answers = [
            self._unpacked(each) for each in self.groups.collect_objects(self._packed((mine, _kind_and_text(error))))
        ]
        outcome: Any = None
        if answers:
            failed = {rank: failure for rank, (_, failure) in enumerate(answers) if failure is not None}
            if failed:
                outcome = None, self._merged(failed)
            else:
                found, error = self._attempt(lambda: then([value for value, _ in answers]))
                outcome = found, _kind_and_text(error)
        try:
            found, failure = self._unpacked(self.groups.broadcast_object(self._packed(outcome)))
            if failure is not None:
                kind, text = failure
                raise kind(text) from error
            return found
        finally:
            del error  # its traceback refers to this frame, which would keep what the caller holds alive

    def each(self, work: Callable[[], Value]) -> Value:
        """Return the result of `work` on this rank."""
        found: list[Value] = []
        self.combine(lambda: found.append(work()), lambda _: None)
        return found[0]

    def gather(self, work: Callable[[], Value]) -> list[Value]:
        """Return on every rank what `work` returns on each, by rank."""
        return self.combine(work, lambda results: results)

    def on_rank_0(self, work: Callable[[], Value]) -> Value:
        """Return on every rank the result of `work` on rank 0."""
        return self.combine(lambda: None, lambda _: work())

    # Lists of tensors, as in a manifest, take a tenth of their bytes. Slow links carry them beside the training.

    def _packed(self, value: Any) -> Any:
        return value if self.groups.parent is None else zlib.compress(pickle.dumps(value), 1)

    def _unpacked(self, packed: Any) -> Any:
        return packed if self.groups.parent is None else pickle.loads(zlib.decompress(packed))

    def _attempt(self, work: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
        try:
            return work(), None
        except TowpathError as error:
            return None, error
        except Exception as error:  # of any kind, because the other ranks wait for an answer
            return None, self.raises(described(error)).with_traceback(error.__traceback__)

    def _merged(self, failed: Mapping[int, tuple[type[TowpathError], str]]) -> tuple[type[TowpathError], str]:
        kinds = {rank: kind for rank, (kind, _) in failed.items()}
        common = next(c for c in next(iter(kinds.values())).__mro__ if all(issubclass(k, c) for k in kinds.values()))
        common = self.raises if common is TowpathError else common
        # The first error that is of the common class comes first: others would be handled in another way.
        order = sorted(failed, key=lambda rank: (kinds[rank] is not common, rank))
        texts = {self.groups.members[rank]: failed[rank][1] for rank in order}
        is_everywhere = len(texts) == self.groups.world and len({*texts.values()}) == 1
        return common, next(iter(texts.values())) if is_everywhere else _message(self.call, texts)


def _kind_and_text(error: Exception | None) -> tuple[type[Exception], str] | None:
    return None if error is None else (type(error), str(error))


def _message(call: str, failed: Mapping[int, str]) -> str:
    """Return the text of the first error, after the ranks that have failed."""
    first, *others = failed
    more = f" ({len(others)} more ranks failed)" if others else ""
    return f"{call} failed on rank {first}: {failed[first]}{more}"


def described(error: BaseException) -> str:
    """Return the message of an error, with its type unless Towpath raised it on purpose."""
    return str(error) if isinstance(error, TowpathError) else f"{type(error).__name__}: {error}"


def check_same(lines: Mapping[int, Sequence[str]], advice: str, raises: type[TowpathError] = MismatchError) -> None:
    """Raise an error that names the first difference if the lines of some ranks, by rank, are not the same."""
    first, *others = lines
    for rank in others:
        if lines[rank] != lines[first]:
            here, there = _first_difference(lines[first], lines[rank])
            raise raises(
                f"the ranks were given different things: rank {first} has {here}, rank {rank} has {there}. {advice}"
            )


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """Return the first line that two ranks do not share, and what the other rank has in its place, for a message."""
    # One rank may have a line that the other lacks, and all lines behind it would be compared with the wrong ones.
    matcher = difflib.SequenceMatcher(None, mine, theirs, autojunk=False)
    _, i, end_i, j, end_j = next(block for block in matcher.get_opcodes() if block[0] != "equal")
    here, there = ([f"'{line}'" for line in lines] for lines in (mine[i:end_i], theirs[j:end_j]))
    for line in here:
        setting = line.partition(" = ")[0] + " = "
        if alike := [each for each in there if each.startswith(setting)]:
            return line, alike[0]
    if here and there and " = " not in here[0] + there[0]:
        return here[0], there[0]

    def nothing(lines: Sequence[str], end: int) -> str:
        return "'nothing more'" if end == len(lines) else "no such line"

    return (here[0], nothing(theirs, end_j)) if here else (nothing(mine, end_i), there[0])
