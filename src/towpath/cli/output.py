"""stdout and stderr that outlast those who read them: what is printed may be lost, what is computed is not.

When a pipe's reader has left (`towpath train … | head`), what would go to it goes nowhere from then on: a training
ends neither at a line of its progress nor at its summary. Where writing fails otherwise, on a full disk, the text is
lost and the next is tried again.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any, TextIO, final


@final
class _Lasting(io.FileIO):
    """A descriptor to which writing never fails. `lost`: the first error that was not a reader who has left."""

    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        """How much was taken; the buffer before it comes again with the rest."""
        try:
            written: int | None = super().write(data)
        except BrokenPipeError:
            _to_nowhere(self.fileno())  # the descriptor itself: libraries write to it too
        except OSError as error:
            self.lost = self.lost or error
        else:
            if written is None:  # full, and another program has made it non-blocking
                select.select([], [self], [])
            return written or 0
        return memoryview(data).nbytes


@final
class Output:
    """Of this process, for the rest of its life."""

    def __init__(self) -> None:
        # A closed one would be the next file that is opened: text, C++'s too, must not end in a checkpoint.
        for descriptor in (0, 1, 2):
            try:
                os.fstat(descriptor)
            except OSError:
                _to_nowhere(descriptor)
        self._stdout, stderr = _Lasting(1, "w", closefd=False), _Lasting(2, "w", closefd=False)
        sys.stdout = _text(self._stdout, sys.stdout)
        sys.stderr = _text(stderr, sys.stderr)

    def lost(self) -> OSError | None:
        """Why what was printed on stdout is not where it was to go; None also if its reader left."""
        sys.stdout.flush()
        return self._stdout.lost


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _text(raw: _Lasting, before: Any) -> TextIO:
    """As `before`, but a character that its encoding lacks is escaped, and no error."""
    if before is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    before.flush()
    errors = "backslashreplace" if before.errors == "strict" else before.errors
    at_once = before.line_buffering or before.write_through
    return io.TextIOWrapper(io.BufferedWriter(raw), before.encoding, errors, line_buffering=at_once)
