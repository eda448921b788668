"""Notes of what a user's program does with one model, where every rank must do the same.

A rank that steps another optimizer, or the same one with another learning rate, drifts away from its peers without any
error. `engine/trial_steps.py` notes every optimizer step in the model's log, and the ranks compare their logs at the
boundary (`engine/agree/digest.py`). Norms and full tensors are noted, too. They are collectives that the program
starts, and a rank that starts one alone gets an error while it waits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final
from zlib import crc32

import torch.distributed as dist

from towpath.core.scopes import LoggedCall
from towpath.engine.agree.digest import CollectiveLog
from towpath.engine.agree.watchdog import Watchdog
from towpath.errors import StepError

# How often a rank that waits in a shared call checks whether the call can still end.
_LOOK = timedelta(seconds=1)
_END_OF_BACKWARD = "the end of the backward pass"


@final
class Program:
    """The notes of what the program does with one model on one rank.

    ShardTensors, optimizer hooks and the engine report to it, and it writes to the model's `CollectiveLog`. `zeroed`
    counts the gradients that were set to zero in place since the last boundary.
    """

    def __init__(self, log: CollectiveLog, watchdog: Watchdog) -> None:
        self._log, self._watchdog = log, watchdog
        self.zeroed = 0

    def stepped(self, optimizer: str, details: tuple[tuple[tuple[str, Any], ...], ...]) -> None:
        """Note a step of an optimizer. `details`: the options of each of its groups."""
        self._log.note(LoggedCall.STEP, f"{optimizer}.step()", details)

    def ends_backward(self, micro_steps: int, kept: int, frozen: tuple[str, ...]) -> None:
        """Note the end of the last backward pass of a step.

        Args:
            kept: How many parameters have a `.grad` already, to which the new one will be added.
            frozen: The names of parameters that required gradients at `shard()`, and do not now.
        """
        counted = (("micro_steps", micro_steps), ("gradients_kept", kept), ("gradients_zeroed", self.zeroed))
        counted += (("frozen", frozen),) if frozen else ()
        self._log.note(LoggedCall.PROGRAM, _END_OF_BACKWARD, (counted,))
        self.zeroed = 0

    def ends_at(self, names: Sequence[str]) -> None:
        """Note a backward pass with `inputs=`, in which only the parameters `names` get gradients."""
        said = (("parameters", len(names)), ("first", names[0]), ("checksum", crc32("\n".join(names).encode())))
        self._log.note(LoggedCall.PROGRAM, "backward(inputs=…)", (said,))

    @contextmanager
    def shared(self, what: str, kind: LoggedCall | None) -> Generator[None]:
        """Run a collective that the program has started, and note it.

        Args:
            kind: The kind of call, which decides the ranks that compare it. None for a call that is not compared.
        """
        if kind is not None:
            self._log.note(kind, what)
        self._watchdog.log = self._log
        try:
            with self._watchdog.status.shared(what):
                yield
        except RuntimeError as error:
            raise StepError(
                f"rank {self._log.number}: {what} failed: {error}\nEvery rank that shares the parameters must make "
                f"this call, at the same place. {self._watchdog.describe_ranks(range(self._watchdog.world))}"
            ) from error

    def meet(self, call: str) -> None:
        """Return once every rank has made this call. Raise StepError if one does not in time, or makes another one."""
        watchdog = self._watchdog
        if watchdog.world == 1:
            return
        watchdog.meetings += 1
        with self.shared(call, LoggedCall.PROGRAM):
            event, patience = f"call {watchdog.meetings}", watchdog.patience_seconds
            came = watchdog.store.exchange(event, call, patience, watchdog.raise_if_diverged)
        other = next((rank for rank, theirs in came.items() if theirs != call), None)
        if other is not None:
            raise StepError(
                f"rank {watchdog.number}: this rank called {call}, and rank {watchdog.first + other} {came[other]} "
                "meanwhile. Let every rank make the same calls in the same order."
            )
        watchdog.raise_if_missing(
            came, lambda missing: f"every rank must call {call}; rank {missing} did not in {patience:.0f} s."
        )

    def wait(self, work: dist.Work | None) -> None:
        """Wait on the host for a collective; raise StepError if the ranks have noticed that it can never end.

        Args:
            work: The collective. None on a GPU, where it runs on the current stream and does not block the host.
        """
        while work is not None:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self._watchdog.raise_if_diverged()
