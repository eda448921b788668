"""Ranges for `torch.profiler`: what a trace calls the submitting of a transfer, the waiting for it, and itself.

    towpath submit gather blocks.3      on the training thread
    towpath wait gather blocks.3        there, wherever it takes up what a transfer has brought
    towpath gather blocks.3             on the thread, or the CUDA stream, that carries it out

While nobody profiles, they cost the look whether somebody does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

from towpath.core.transfer import Transfer

_NOTHING = nullcontext()


def profiled(what: str, transfers: Sequence[Transfer]) -> AbstractContextManager[object]:
    """A range around what follows, named for `what` and the first of `transfers`; none where there is none."""
    # The same on every thread: that of a stream has no profiler of its own, and appears in traces of all threads.
    if not transfers or not profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
        return _NOTHING
    others = f" and {len(transfers) - 1} more" if len(transfers) > 1 else ""
    return profiler.record_function(f"towpath {what}{transfers[0].kind} {transfers[0].unit}{others}")
