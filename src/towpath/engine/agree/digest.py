"""The log in which a rank notes what its peers must do identically, and the comparison at each boundary.

Collectives match by their order alone. If two ranks gather different experts of the same size, each computes with a
mixture of both, and nothing fails. A rank that steps its optimizer with another learning rate drifts away as silently.
At every boundary, the ranks of each group that must agree (`core/queues.py`) therefore compare one digest of all that
they noted. The digests are sent with the bits of unused parameters, which all ranks combine by maximum. Each group has
a slot there, with its digest and the complement of the digest. If all members agree, each byte and its complement add
up to 255. If two differ, some add up to more. Then all ranks gather the logs themselves, to name the difference.

A digest rolls: it is updated with each entry. A rank may run any number of forward passes between two boundaries, so
the log keeps only the last entries, each with the digest of all entries before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from towpath.core.queues import DIGEST_BYTES, SLOT_BYTES, LoggedCall, Scope, SharedLane, digest_bytes, scopes
from towpath.core.strategy import Strategy, TransferKind
from towpath.errors import StepError

_AFTER_MODEL = "after_a_transfer_of_model"  # the name of a detail
_COMPLEMENT = bytes(255 - byte for byte in range(256))

# A scope keeps at least so many of its last entries, and fewer than twice as many. No rank gets further ahead of its
# peers, because they take part in its transfers.
KEPT = 512

# Named values of a call that must be equal on all ranks, in groups such as an optimizer's parameter groups.
Details = tuple[tuple[tuple[str, Any], ...], ...]


class LogEntry(NamedTuple):
    """One entry of a log: a transfer of the unit `what` (all its buckets together), or the call `what`."""

    kind: TransferKind | LoggedCall
    what: str
    details: Details = ()

    def __str__(self) -> str:
        return self.what if isinstance(self.kind, LoggedCall) else f"{self.kind.value} of unit {self.what or 'root'!r}"

    def digest(self, before: bytes) -> bytes:
        """Return the digest of all entries up to this one, from the digest of those before it."""
        text = f"{self.kind.value} {self.what} {self.details or ''}"
        return hashlib.blake2b(before + text.encode(), digest_size=DIGEST_BYTES).digest()


class LogTail(NamedTuple):
    """The last entries of one scope. `first` is the number of those before them, which are not kept any more."""

    first: int
    entries: list[LogEntry]
    digests: list[bytes]  # of what is before each of `entries`, and then of all entries

    @property
    def total(self) -> int:
        return self.first + len(self.entries)


@dataclass(frozen=True, slots=True)
class StepLog:
    """The entries of one rank in the running step, so far. Ranks exchange them to name a difference."""

    model: int  # the number of the model, the same on all ranks
    step: int
    ended: bool  # the rank has reached the boundary
    tails: tuple[LogTail, ...]  # one for each scope
    inside: str = ""  # the shared call that the rank is in, if any: no entry follows until it returns

    def is_alone_in_call(self, other: StepLog, scope: Scope) -> bool:
        """Return whether this rank is in a shared call of the scope that the rank of `other` has not made yet."""
        here, there = self.tails[scope.number], other.tails[scope.number]
        return bool(self.inside and here.entries) and here.entries[-1].what == self.inside and there.total < here.total


@dataclass(frozen=True, slots=True)
class LogDifference:
    """The first entry in which two ranks differ. A rank that has no more entries has None there.

    If neither has an entry, the ranks differ among their first `number` entries, which are not kept any more. `lane` is
    that of the scope.
    """

    number: int  # the position of the entry in the step
    ranks: tuple[int, int]
    entries: tuple[LogEntry | None, LogEntry | None]
    lane: str

    @property
    def kinds(self) -> set[TransferKind | LoggedCall]:
        """The kinds of the entries that differ: one or two, since a rank may lack its entry."""
        return {entry.kind for entry in self.entries if entry is not None}

    def __str__(self) -> str:
        if not self.kinds:
            return f"rank {self.ranks[0]} and rank {self.ranks[1]} differ among the first {self.number} of the step"
        described = [str(entry or "nothing more") for entry in self.entries]
        detail = _first_detail(*self.entries)
        if detail is not None:
            described = [f"{what} with {said}" for what, said in zip(described, detail, strict=True)]
        where = (f"rank {rank}: {what}" for rank, what in zip(self.ranks, described, strict=True))
        subject = "call" if any(isinstance(kind, LoggedCall) for kind in self.kinds) else "transfer"
        return f"{subject} {self.number + 1} of the step was, on {', on '.join(where)}"


def _first_detail(one: LogEntry | None, other: LogEntry | None) -> tuple[str, str] | None:
    """Return the first detail in which two entries of the same call differ, as text for each of them."""
    if one is None or other is None or one.what != other.what:
        return None
    for number, (mine, theirs) in enumerate(zip_longest(one.details, other.details, fillvalue=())):
        here, there = dict(mine), dict(theirs)
        for name in here | there:
            if here.get(name, "unset") != there.get(name, "unset"):
                group = f" in group {number}" if len(one.details) > 1 or len(other.details) > 1 else ""
                return tuple(f"{name}={each.get(name, 'unset')}{group}" for each in (here, there))  # pyright: ignore
    return None


class CollectiveLog:
    """The log of one model on one rank. The engine notes transfers and calls, and compares step logs at boundaries.

    Args:
        model: The number of the model, the same on all ranks.
        last: For each group of ranks, the model whose collective came last there. All models of a process group share
            it, and their logs keep it up to date.
        first: The number of rank 0 in the job. Errors name ranks by their numbers in the job.
    """

    def __init__(
        self,
        strategy: Strategy,
        rank: int,
        model: int = 0,
        last: dict[Hashable, list[int]] | None = None,
        first: int = 0,
    ) -> None:
        self.first = first
        self.rank, self.model, self._strategy, self._shared = rank, model, strategy, {} if last is None else last
        self._step, self._ended = 0, False
        self.share(())

    def share(self, lanes: tuple[SharedLane, ...]) -> None:
        """Compare the order of transfers on these shared communicators, too. Call it before the first entry."""
        self.scopes = scopes(self._strategy, lanes)
        # By scope, a list of one item. Scopes without collectives have lists of their own, which never change.
        self._last = [
            self._shared.setdefault((each.kinds, each.group_of), [self.model])
            if each.kinds.isdisjoint({LoggedCall.STEP, LoggedCall.VALUES})
            else [self.model]
            for each in self.scopes
        ]
        self.bytes = digest_bytes(self._strategy, lanes)
        self._scopes_of: dict[TransferKind | LoggedCall, list[int]] = {}
        for scope in self.scopes:
            for kind in scope.kinds:
                self._scopes_of.setdefault(kind, []).append(scope.number)
        self._begin()

    @property
    def number(self) -> int:
        return self.first + self.rank

    def compares(self, kind: TransferKind | LoggedCall) -> bool:
        """Return whether entries of this kind are compared with those of any other rank."""
        return kind in self._scopes_of

    def _begin(self) -> None:
        # Ranks that run models in different orders compare logs that may be identical but for the model.
        self._tails = [LogTail(0, [], [self.model.to_bytes(DIGEST_BYTES, "little")]) for _ in self.scopes]

    def note(self, kind: TransferKind | LoggedCall, what: str, details: Details = ()) -> None:
        """Add an entry, if its kind is compared. `UNUSED_PARAMS` instead marks that this rank reached the boundary."""
        if kind is TransferKind.UNUSED_PARAMS:
            self._ended = True
            return
        for number in self._scopes_of.get(kind, ()):
            # Models over the same ranks share process groups, where collectives match by their order alone. So the
            # first collective after one of another model says so.
            last, noted = self._last[number], details
            if last[0] != self.model:
                noted = (*details, ((_AFTER_MODEL, last[0] + 1),))
                last[0] = self.model
            entry, (first, entries, digests) = LogEntry(kind, what, noted), self._tails[number]
            # The digest first: another thread that copies the entries, and then the digests, lacks none of these.
            digests.append(entry.digest(digests[-1]))
            entries.append(entry)
            if len(entries) == 2 * KEPT:
                self._tails[number] = LogTail(first + KEPT, entries[KEPT:], digests[KEPT:])

    def begin_step(self) -> None:
        self._step, self._ended = self._step + 1, False
        self._begin()

    def step_log(self, inside: str = "") -> StepLog:
        """Return the step log of the running step so far. Any thread may call this, at any time."""
        tails = tuple(LogTail(first, [*entries], [*digests]) for first, entries, digests in self._tails)
        return StepLog(self.model, self._step, self._ended, tails, inside)

    def encoded(self) -> bytes:
        """Return this rank's digests in the slots of its groups. Other slots are zeros, which the maximum ignores."""
        slots = bytearray(self.bytes)
        for scope, tail in zip(self.scopes, self._tails, strict=True):
            start, digest = SLOT_BYTES * (scope.first_slot + scope.group_of[self.rank]), tail.digests[-1]
            slots[start : start + SLOT_BYTES] = digest + digest.translate(_COMPLEMENT)
        return bytes(slots)

    def check(self, combined: bytes, of_all_ranks: Callable[[StepLog], list[StepLog]]) -> None:
        """Begin the log of the next step, and raise if ranks differ. `combined` is the maximum of all digests."""
        # `combined` is the same on all ranks, so that all of them gather the logs, and raise.
        slots = [combined[start : start + SLOT_BYTES] for start in range(0, self.bytes, SLOT_BYTES)]
        groups = ((scope, group) for scope in self.scopes for group in range(scope.groups))
        equal = (slot[:DIGEST_BYTES].translate(_COMPLEMENT) == slot[DIGEST_BYTES:] for slot in slots)
        found = [group for group, is_equal in zip(groups, equal, strict=True) if not is_equal]  # whose members differ
        step_log = self.step_log()
        self.begin_step()
        if not found:
            return
        for last in self._last:
            last[0] = -1  # on all ranks, so that those which catch the error agree again
        step_logs, texts = of_all_ranks(step_log), list[str]()
        if other := next((rank for rank, theirs in enumerate(step_logs) if theirs.model != step_logs[0].model), 0):
            raise StepError(
                f"rank {self.number}: the ranks ran different models: in the order of their shard() calls, rank "
                f"{self.first} ended a step of model {step_logs[0].model + 1}, rank {self.first + other} one of model "
                f"{step_logs[other].model + 1}. Their gradients would be mixtures of both, and none is delivered. Let "
                "every rank run the forward and backward passes of all models in the same order."
            )
        for scope, group in found[:2]:
            first, *others = scope.members(group)
            mine = self.first + first, step_logs[first]
            differences = (difference(scope, mine, (self.first + rank, step_logs[rank]), ended=True) for rank in others)
            texts.append(divergence_message(self.number, next(d for d in differences if d is not None)))
        # The first difference may cause a second one, which may show better where the ranks differ.
        raise StepError(" In addition, on ".join(texts))


def difference(
    scope: Scope, one: tuple[int, StepLog], other: tuple[int, StepLog], ended: bool = False
) -> LogDifference | None:
    """Return the first difference between the logs of two ranks, each with its number, or None if there is none yet.

    With `ended`, both logs are complete. Otherwise a missing entry is a difference only if its log has ended.
    """
    (rank, step_log), (peer, theirs) = one, other
    if (step_log.model, step_log.step) != (theirs.model, theirs.step):
        return None
    here, there = step_log.tails[scope.number], theirs.tails[scope.number]
    start = max(here.first, there.first)
    is_behind = min(here.total, there.total) < start  # by more entries than are kept
    if is_behind and not ended:
        return None
    if is_behind or (start and here.digests[start - here.first] != there.digests[start - there.first]):
        return LogDifference(start, (rank, peer), (None, None), scope.lane)
    ours, others = (each.entries[start - each.first :] for each in (here, there))
    for number, pair in enumerate(zip_longest(ours, others), start):
        missing = [p for p, entry in zip((step_log, theirs), pair, strict=True) if entry is None]
        if pair[0] != pair[1] and (ended or all(p.ended for p in missing)):
            return LogDifference(number, (rank, peer), pair, scope.lane)
    return None


def differing_islands(what: str) -> str:
    """Return the message for slow weights that are not equal on all islands."""
    return (
        f"{what} differ between islands. They began with different weights, or something wrote to them on one island "
        "alone. Let every island begin with the same values, or restart from a checkpoint."
    )


def divergence_message(rank: int, found: LogDifference) -> str:
    for who, entry in zip(found.ranks, found.entries, strict=True):
        if entry is not None and entry.kind is LoggedCall.UNDECODED:
            return f"rank {rank}: rank {who} could not decode {entry.what}: {dict(entry.details[0])['problem']}"
        if entry is not None and entry.kind is LoggedCall.SLOW_WEIGHTS:
            return f"rank {rank}: {differing_islands(entry.what)}"
    if found.kinds & {LoggedCall.STEP, LoggedCall.PROGRAM}:
        return (
            f"rank {rank}: the ranks ran different programs: {found}. Their parameters or optimizer states drift "
            "apart, so no gradient is delivered. Let every rank make the same micro-steps, step the same optimizers "
            "in the same order with the same hyperparameters, and zero their gradients at the same place."
        )
    if LoggedCall.VALUES in found.kinds:
        return (
            f"rank {rank}: ranks that hold copies of the same parameters hold different values: {found}. Something "
            "wrote to them on one rank alone, or this hardware computes the same step differently. Restart from a "
            "checkpoint that was saved before; check_every= of shard() says how often values are compared, and 0 "
            "turns the comparison off."
        )
    if LoggedCall.SHARED in found.kinds and not found.lane:
        return (
            f"rank {rank}: the ranks made different calls that need all of them: {found}. Norms, sums and "
            "full_tensor() of sharded tensors are collectives: let every rank make them, at the same place."
        )
    if any(name == _AFTER_MODEL for entry in found.entries if entry for group in entry.details for name, _ in group):
        return (
            f"rank {rank}: the ranks ran their models in different orders: {found} (models are counted in the order of "
            "their shard() calls). Their transfers may have met, and no gradient is delivered. Let every rank run the "
            "forward and backward passes of all models in the same order."
        )
    if found.lane:
        return (
            f"rank {rank}: the ranks submitted the transfers of a shared communicator in different orders: {found}. On "
            f"the communicator of the lane {found.lane!r}, they match by their order alone. They may have met, and no "
            "gradient is delivered. Let every rank make its calls at the same place. A unit's backward must end at the "
            "same place, too: let the same inputs and parameters of each unit get gradients on all ranks, or make one "
            "unit of the module around it."
        )
    advice = (
        "Where they differ in what they use (experts, layers that are dropped at random), make one unit of the module "
        "around it: shard(…, units=[Experts, …]), or fully_shard(experts)."
    )
    if TransferKind.PARAM_SYNC in found.kinds and (len(found.kinds) > 1 or None in found.entries):
        advice = (
            "Weights are sent after they have changed. If something wrote to weights, loaded a checkpoint or stepped "
            "an optimizer on some ranks alone, let every rank do so at the same place."
        )
    elif None in found.entries and found.kinds:
        advice = "Let every rank make as many forward and backward passes, in training and in evaluation."
    return (
        f"rank {rank}: the ranks ran different units: {found}. What they compute would be a mixture of both, and no "
        f"gradient is delivered. All ranks that share parameters must run the same units in the same order. {advice}"
    )
