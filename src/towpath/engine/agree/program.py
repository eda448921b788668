"""Notes of what a user's program does with one model, where every rank must do the same; and its failed passes.

A rank that steps another optimizer, or the same one with another learning rate, drifts away from its peers without any
error. `engine/optimizer_steps.py` notes every optimizer step in the model's log. The ranks compare their logs at the
boundary (`engine/agree/digest.py`). Norms and full tensors are noted, too. They are collectives that the program
starts, and a rank that starts one alone gets an error while it waits.

A program may catch the error of a forward or backward pass. Suppose that one rank does and goes on, and its peers do
not. The transfers of its next pass would meet those that the peers still wait for. So after a failed pass a rank first
waits until all others have failed, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, final
from zlib import crc32

import torch.distributed as dist

from towpath.core.queues import LoggedCall
from towpath.engine.agree.digest import CollectiveLog
from towpath.engine.agree.watchdog import Watchdog
from towpath.errors import StepError
from towpath.topology.groups import Groups

_END_OF_BACKWARD = "the end of the backward pass"


@final
class Program:
    """Notes in a model's `CollectiveLog` of what the user's program does with it on this rank."""

    # ShardTensors, optimizer hooks and the engine report to it. `zeroed` counts the gradients that were set to zero in
    # place since the last boundary.

    def __init__(self, log: CollectiveLog, groups: Groups) -> None:
        self._log, self._groups, self._watchdog = log, groups, Watchdog.of(groups)
        self.zeroed = 0
        self._failure, self._agreements = "", 0  # the failed pass, if not all ranks have learned of it

    def stepped(self, optimizer: str, details: tuple[tuple[tuple[str, Any], ...], ...]) -> None:
        """Note a step of an optimizer. `details`: the options of each of its groups."""
        self._log.note(LoggedCall.STEP, f"{optimizer}.step()", details)

    def ends_backward(self, micro_steps: int, kept: int, frozen: tuple[str, ...]) -> None:
        """Note the end of a step's last backward pass. `kept` parameters have a `.grad` already, to be added to."""
        # `frozen` are the parameters that required gradients at `shard()`, and do not now.
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
        """Run a collective that the program has started, and note it as a call of this kind. None is not compared."""
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
            event, omission = f"call {watchdog.meetings}", f"did not in {watchdog.patience_seconds:.0f} s."
            why = f"every rank must call {call}"
            words = watchdog.exchange(event, call, why, omission, watchdog.raise_if_diverged)
        for rank, other in enumerate(words):
            if other != call:
                raise StepError(
                    f"rank {watchdog.number}: this rank called {call}, and rank {watchdog.first + rank} {other} "
                    "meanwhile. Let every rank make the same calls in the same order."
                )

    def wait(self, work: dist.Work | None) -> None:
        """Wait on the host for a collective; raise StepError if the ranks have noticed that it can never end."""
        self._watchdog.wait(work)

    def pass_failed(self, what: str) -> None:
        """Note a failed forward or backward pass. Of several failures the first is kept."""
        if self._groups.world > 1:
            self._failure = self._failure or what
            self._watchdog.status.failed(f"{self._failure}, and was caught")

    def agree_on_failure(self) -> None:
        """Return once all ranks have failed like this one, if it has. The engine calls it before the next pass."""
        if not self._failure:
            return
        failure, self._failure = self._failure, ""
        event = f"failed pass {self._agreements} of model {self._log.model}"
        self._agreements += 1
        try:
            words = self._watchdog.exchange(
                event,
                self._log.encoded(),
                f"{failure}, which was caught here",
                "did not fail, and waits for the transfers of that pass. A pass that fails on some ranks cannot be "
                "left out: let the exception end the program, or see to it that it is raised on every rank.",
            )
        finally:
            self._watchdog.status.failed("")
        self._log.check(bytes(map(max, zip(*words, strict=True))), self._groups.all_gather_objects)


@final
class EndOfBackward:
    """A callback that autograd calls at the end of a backward pass."""

    # If the pass fails, autograd drops the callback without a call. Its destructor then reports the failure.

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
