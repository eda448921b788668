"""Forward and backward passes that failed, and whose error the program caught.

Suppose that one rank catches the exception and goes on, and its peers do not. The transfers of its next pass would meet
those that the peers still wait for. So after a failed pass a rank first waits until all others have failed, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

from towpath.core.strategy import Strategy
from towpath.engine.agree.digest import CollectiveLog
from towpath.engine.agree.watchdog import Watchdog
from towpath.topology.groups import Groups


@final
class EndOfBackward:
    """A callback that autograd calls at the end of a backward pass.

    If the pass fails, autograd drops the callback without a call. Its destructor then reports the failure.
    """

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
    """The failed passes of one model on one rank. Every rank must make its models in the same order.

    The engine notes failures here, and calls `agree` before the next pass.
    """

    def __init__(self, groups: Groups, watchdog: Watchdog, strategy: Strategy, log: CollectiveLog) -> None:
        self._groups, self._watchdog, self._log = groups, watchdog, log
        self._forward_is_shared = strategy.gathered_over.size > 1
        self._agreements = 0
        self._failure = ""

    def forward_failed(self, what: str) -> None:
        """Note a failed forward, if forwards involve other ranks: they gather parameters."""
        if self._forward_is_shared:
            self.failed(what)

    def failed(self, what: str) -> None:
        """Note a failed pass. Of several failures the first is kept."""
        if self._groups.world > 1:
            self._failure = self._failure or what
            self._watchdog.status.failed(f"{self._failure}, and was caught")

    def agree(self) -> None:
        """Return once all ranks have failed like this one, if it has. The engine calls it before the next pass."""
        if not self._failure:
            return
        failure, self._failure = self._failure, ""
        event = f"failed pass {self._agreements} of model {self._log.model}"
        self._agreements += 1
        came = self._watchdog.store.exchange(event, self._log.encoded(), self._watchdog.patience_seconds)
        self._watchdog.status.failed("")
        self._watchdog.raise_if_missing(
            came,
            lambda missing: (
                f"{failure}, which was caught here; rank {missing} did not fail, and waits for the transfers of that "
                "pass. A pass that fails on some ranks cannot be left out: let the exception end the program, or see "
                "to it that it is raised on every rank."
            ),
        )
        combined = bytes(map(max, zip(*came.values(), strict=True)))
        self._log.check(combined, self._groups.gather_objects)
