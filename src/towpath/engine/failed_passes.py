"""Forward and backward passes that end in an exception: noticed, and agreed on by all ranks before the next one.

A rank that catches the exception and goes on, while its peers do not, would send the transfers of its next pass into
those that they still wait for. So after a failed pass a rank first waits until all others have failed alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

from towpath.core.journal import Journal
from towpath.core.strategy import Strategy
from towpath.engine.activity import Peers
from towpath.errors import StepError
from towpath.topology.groups import Groups


@final
class EndOfBackward:
    """What autograd calls at the end of a backward pass. One that fails drops it without a call: that tells, too."""

    def __init__(self, through: weakref.WeakMethod[Callable[[], Any]], failed: weakref.WeakMethod[Callable[[], Any]]):
        self._through, self._failed = through, failed
        self._called = False

    def __call__(self) -> None:
        self._called = True
        through = self._through()
        if through is not None:
            through()

    def __del__(self) -> None:
        failed = self._failed()
        if not self._called and failed is not None:
            failed()


@final
class FailedPasses:
    """Of one model on one rank. Every rank must make its models in the same order."""

    def __init__(self, groups: Groups, peers: Peers, strategy: Strategy, journal: Journal) -> None:
        self._groups, self._peers, self._journal = groups, peers, journal
        self._forward_is_shared = strategy.gathered_over.size > 1
        self._agreements = 0
        self._failure = ""

    def forward_failed(self, what: str) -> None:
        if self._forward_is_shared:
            self.failed(what)

    def failed(self, what: str) -> None:
        if self._groups.world > 1:
            self._failure = self._failure or what
            self._peers.activity.failed(f"{self._failure}, and was caught")

    def agree(self) -> None:
        """Before the next pass: return once all ranks have failed alike, or raise what the others do instead."""
        if not self._failure:
            return
        failure, self._failure = self._failure, ""
        event = f"failed pass {self._agreements} of model {self._journal.model}"
        self._agreements += 1
        mine = self._journal.encoded().hex()
        came = self._peers.noticeboard.meet(event, mine, self._peers.patience_seconds)
        self._peers.activity.failed("")
        missing = [rank for rank in range(self._groups.world) if rank not in came]
        if missing:
            ranks = ", ".join(map(str, missing))
            raise StepError(
                f"rank {self._groups.rank}: {failure}, which was caught here; rank {ranks} did not fail, and waits for "
                "the transfers of that pass. A pass that fails on some ranks cannot be left out: let the exception end "
                "the program, or see to it that it is raised on every rank. What they last said of themselves:"
                f"{self._peers.describe(missing)}"
            )
        everyones = [bytes.fromhex(came[rank]) for rank in range(self._groups.world)]
        self._journal.check(bytes(map(max, zip(*everyones, strict=True))), self._groups.gather_objects)
