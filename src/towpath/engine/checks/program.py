"""What a user's program does with one model that every rank must do identically, noted for the next boundary.

A rank that steps another optimizer, or the same one with another learning rate, drifts away from its peers, and nothing
fails. `checks/optimizers.py` notes every optimizer step in the model's journal, and the ranks compare their journals at
the boundary (`core/journal.py`). Norms and full tensors are noted too. They are collectives that the program starts: a
rank that starts one alone gets an error while it waits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final
from zlib import crc32

import torch.distributed as dist

from towpath.core.journal import Call, CollectiveLog
from towpath.engine.checks.activity import StallMonitor
from towpath.errors import StepError

# How often a rank that waits in a shared call looks whether it can still end.
_LOOK = timedelta(seconds=1)
_END_OF_BACKWARD = "the end of the backward pass"


@final
class Program:
    """Notes what the program does with one model on one rank. `zeroed`: gradients set to zero in place so far."""

    def __init__(self, journal: CollectiveLog, peers: StallMonitor) -> None:
        self._journal, self._peers = journal, peers
        self.zeroed = 0

    def stepped(self, optimizer: str, details: tuple[tuple[tuple[str, Any], ...], ...]) -> None:
        self._journal.note(Call.STEP, f"{optimizer}.step()", details)

    def ends_backward(self, micro_steps: int, kept: int, frozen: tuple[str, ...]) -> None:
        """Note the boundary itself.

        `kept`: how many parameters have a `.grad` that the new one will be added to. `frozen`: which of those that
        `shard()` found training do not require gradients now.
        """
        counted = (("micro_steps", micro_steps), ("gradients_kept", kept), ("gradients_zeroed", self.zeroed))
        counted += (("frozen", frozen),) if frozen else ()
        self._journal.note(Call.PROGRAM, _END_OF_BACKWARD, (counted,))
        self.zeroed = 0

    def ends_at(self, names: Sequence[str]) -> None:
        """A backward pass with `inputs=` gives gradients to these parameters alone."""
        said = (("parameters", len(names)), ("first", names[0]), ("checksum", crc32("\n".join(names).encode())))
        self._journal.note(Call.PROGRAM, "backward(inputs=…)", (said,))

    @contextmanager
    def shared(self, what: str, kind: Call | None) -> Generator[None]:
        """Around a collective that the program has started. `kind`: among which ranks it is compared; None: nowhere."""
        if kind is not None:
            self._journal.note(kind, what)
        self._peers.journal = self._journal
        try:
            with self._peers.activity.shared(what):
                yield
        except RuntimeError as error:
            raise StepError(
                f"rank {self._journal.rank}: {what} failed: {error}\nEvery rank that shares the parameters must make "
                f"this call, at the same place. {self._peers.describe_all()}"
            ) from error

    def wait(self, work: dist.Work | None) -> None:
        """Wait on the host for a collective; raise where the ranks have found out that it will never end.

        `work`: None for a collective on a GPU, which runs on the current stream and holds up no host.
        """
        while work is not None:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self._peers.raise_if_diverged()
