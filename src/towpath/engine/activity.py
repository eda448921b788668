"""What a rank is doing, in words for its peers: written down for nobody, until the rank makes no progress any more.

A rank that stands still, waiting for a transfer or in the user's own code, posts on the noticeboard what it is doing. A
transfer that fails reads there what its peers were doing meanwhile; one that takes long is logged with it.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import final

from towpath.core.journal import Journal, Page, difference, told_to
from towpath.core.transfer import Transfer
from towpath.errors import StepError
from towpath.logs import logger
from towpath.topology.groups import Groups
from towpath.topology.noticeboard import Noticeboard

_LOG = logger("engine")

# How long a rank makes no progress before it says so to its peers, and before it logs what it waits for; or earlier
# where the process group's own patience is short.
_SILENT_SECONDS = 2.0
_WARN_SECONDS = 60.0

# With how many peers a rank compares itself, and how many it tells of.
_FEW = 16


@final
class Activity:
    """Of all models over one process group. `progress` rises with everything that begins or ends."""

    def __init__(self) -> None:
        self.progress = 0
        self.step = 0
        self._since = time.monotonic()  # of the last progress
        self._seen = 0
        self._computing = "outside the model"
        self._under_way: dict[int, str] = {}  # by thread: a queue runs one transfer after the other
        self._last = ""
        self._failure = ""
        self.meeting: tuple[int, str] | None = None  # a call that waits for every rank, and how many came before it
        self.meetings = 0  # so far, with that one

    def computes(self, work: str, unit: str | None) -> None:
        self.progress += 1
        self._computing = work if unit is None else f"{work} of unit {unit or 'root'!r}"

    def begins(self, transfers: Sequence[Transfer]) -> None:
        self.progress += 1
        self._under_way[threading.get_ident()] = _named(transfers)

    def ends(self) -> None:
        """The transfer that this thread has begun."""
        self.progress += 1
        self._last = self._under_way.pop(threading.get_ident(), self._last)

    def failed(self, what: str) -> None:
        """A forward or backward pass; '' once all ranks have agreed that it failed alike."""
        self.progress += 1
        self._failure = what

    def meets(self, what: str) -> None:
        self.progress += 1
        self.meeting = (self.meetings, what)
        self.meetings += 1

    def met(self) -> None:
        self.progress += 1
        self.meeting = None

    @property
    def waits(self) -> bool:
        """Whether a transfer is under way, or a call that every rank must make."""
        return bool(self._under_way) or self.meeting is not None

    def silent_seconds(self) -> float:
        """Since when nothing has begun or ended. To be asked now and then, by one thread."""
        now = time.monotonic()
        if self.progress != self._seen:
            self._seen, self._since = self.progress, now
        return now - self._since

    def describe(self) -> str:
        parts = [f"step {self.step}"]
        parts += [self._failure] if self._failure else [self._computing]
        under_way = sorted(self._under_way.copy().values())
        if self.meeting is not None:
            parts.append(f"waits for every rank to call {self.meeting[1]}")
        parts.append(f"waits for {', '.join(under_way)}" if under_way else "in no transfer")
        if self._last:
            parts.append(f"the last one that ended was {self._last}")
        return "; ".join(parts)


def _named(transfers: Sequence[Transfer]) -> str:
    first = transfers[0]
    return f"{first.kind.value} of unit {first.unit or 'root'!r}" if first.unit or first.bucket else first.kind.value


@final
class Peers:
    """What the ranks of one process group know of each other when they are stuck."""

    def __init__(self, groups: Groups) -> None:
        self.rank, self.world = groups.rank, groups.world
        self.activity = Activity()
        self.journal: Journal | None = None  # of the model that was last at work
        self.diverged = ""  # why the ranks will never come to an end, once that is known
        self.patience_seconds = groups.timeout_seconds
        # A launcher may keep its store over restarts: what ranks that are gone have left there is not for these.
        new_name: str = groups.gather_objects(uuid.uuid4().hex)[0]
        self.noticeboard = Noticeboard(f"{groups.name}/{new_name}", groups.rank, groups.world)
        if self.world > 1:
            reporter = threading.Thread(
                target=_report, args=(weakref.ref(self),), name="towpath-stall-reporter", daemon=True
            )
            reporter.start()

    @staticmethod
    def of(groups: Groups) -> Peers:
        return groups.shared("peers", lambda: Peers(groups))

    def describe(self, ranks: Sequence[int]) -> str:
        """What `ranks` have last said of themselves, a line each."""
        others = [rank for rank in ranks if rank != self.rank]
        lines = [
            f"\n  rank {rank}: {note.doing if note else 'has said nothing: it makes progress, or it is gone'}"
            for rank, note in self._read(others[:_FEW]).items()
        ]
        return "".join(lines) + ("\n  …" if len(others) > _FEW else "")

    def raise_if_diverged(self) -> None:
        if self.diverged:
            raise StepError(self.diverged)

    @property
    def pause_seconds(self) -> float:
        return min(_SILENT_SECONDS, self.patience_seconds / 4) / 2

    @property
    def warn_seconds(self) -> float:
        return min(_WARN_SECONDS, self.patience_seconds / 2)

    def post(self, silent: bool) -> None:
        """What this rank is doing, now that it makes no progress; an old note is taken back when it does."""
        journal = self.journal
        page = journal.page().to_json() if journal is not None else None
        note = [self.activity.describe(), page, self.activity.meeting]
        self.noticeboard.post(json.dumps(note) if silent else "")

    def come_together(self, call: str) -> None:
        """Return when every rank has made this call; raise where one does not, or waits for a transfer meanwhile."""
        if self.world == 1:
            return
        self.activity.meets(call)
        event, patience = f"call {self.activity.meetings}", self.patience_seconds
        try:
            came = self.noticeboard.meet(event, call, patience, self.raise_if_diverged)
        finally:
            self.activity.met()
        other = next((rank for rank, theirs in came.items() if theirs != call), None)
        if other is not None:
            raise StepError(
                f"rank {self.rank}: this rank called {call}, and rank {other} {came[other]} meanwhile. Let every "
                "rank make the same calls in the same order."
            )
        missing = [rank for rank in range(self.world) if rank not in came]
        if missing:
            raise StepError(
                f"rank {self.rank}: every rank must call {call}; rank {', '.join(map(str, missing))} did not in "
                f"{patience:.0f} s. What they last said of themselves:{self.describe(missing)}"
            )

    def look_for_divergence(self) -> None:
        """Whether peers that stand still, too, have submitted other transfers than this rank: nobody's will end."""
        journal = self.journal
        if journal is None:
            return
        mine, meeting = journal.page(), self.activity.meeting
        for scope in journal.scopes:
            members = scope.members(scope.group_of[self.rank])
            place = members.index(self.rank)
            for rank, note in self._read([*members[place + 1 :], *members[:place]][:_FEW]).items():
                if note is None or note.page is None:
                    continue
                # Who waits for every rank in a call submits nothing before all have come there.
                theirs = (
                    note.meeting if note.meeting is not None and note.meeting[0] >= self.activity.meetings else None
                )
                pages = [(self.rank, _ended(mine, meeting)), (rank, _ended(note.page, theirs))]
                first, second = sorted(pages, key=itemgetter(0))
                found = difference(scope, first, second)
                if found is not None and (journal.page(), self.activity.meeting) == (mine, meeting):
                    self.diverged = told_to(self.rank, found)
                    for who, other, call in ((self.rank, rank, meeting), (rank, self.rank, theirs)):
                        if call is not None:
                            self.diverged = (
                                f"rank {self.rank}: rank {who} is in {call[1]}, which every rank must call, while rank "
                                f"{other} waits for a transfer that rank {who} is to take part in: {found}. Call it on "
                                "every rank, at the same place."
                            )
                    return

    def _read(self, ranks: Sequence[int]) -> dict[int, _Note | None]:
        notes = self.noticeboard.read(ranks)
        return {rank: _Note.parsed(note) if note else None for rank, note in notes.items()}


@dataclass(frozen=True, slots=True)
class _Note:
    doing: str
    page: Page | None
    meeting: tuple[int, str] | None

    @staticmethod
    def parsed(text: str) -> _Note:
        doing, page, meeting = json.loads(text)
        return _Note(doing, None if page is None else Page.from_json(page), None if meeting is None else tuple(meeting))


def _ended(page: Page, meeting: tuple[int, str] | None) -> Page:
    return page if meeting is None else replace(page, ended=True)


def _report(reference: weakref.ref[Peers]) -> None:
    """Tell the others when this rank stands still, and find out whether it ever will go on."""
    posted = warned = -1  # at which progress
    peers = reference()
    while peers is not None:
        pause, activity = peers.pause_seconds, peers.activity
        silent, progress = activity.silent_seconds(), activity.progress
        if peers.diverged:
            pass  # what this rank has posted stays there: by it the others find out, too, however late they look
        elif silent >= 2 * pause:
            if posted != progress:
                peers.post(silent=True)
                posted = progress
            if activity.waits:
                peers.look_for_divergence()
        elif posted != -1:
            peers.post(silent=False)
            posted = -1
        if activity.waits and silent >= peers.warn_seconds and warned != progress:
            warned = progress
            _LOG.warning(
                "no progress for %.0f s: %s. This rank gives up after %.0f s. Other ranks:%s",
                *(silent, activity.describe(), peers.patience_seconds, peers.describe(range(peers.world))),
            )
        peers = None
        time.sleep(pause)
        peers = reference()
