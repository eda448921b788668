"""Told to stop (SIGTERM, Ctrl-C): the ranks finish the step they are in, all the same one, and save.

Python's handlers run between two lines of Python, and a rank that waits for a dead or hung one may not come to the
next. So a thread reads the signals too, and answers where the main thread does not.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

# Where ranks got different ones, the first of these counts.
SIGNALS = (signal.SIGTERM, signal.SIGINT)

# torchrun gives its ranks 30 seconds, and then kills them without a word.
_WORRIED_SECONDS = 20.0
# For a process that is to end at once, to take down what it raised.
_GRACE_SECONDS = 3.0


def exit_code(number: int) -> int:
    """Return what a process ends with that signal `number` has ended, as a shell counts it."""
    return 128 + number


@dataclass(slots=True)
class Stop:
    """`wanted`: the signal that this rank got, or 0. The ranks tell each other with the loss of every step, and so stop
    after the same one.

    `begun`: steps are being taken. Before, there is nothing to save, and the first signal ends the process.
    """

    begun: bool = False
    wanted: int = 0
    over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def stopping() -> Generator[Stop]:
    """Inside, once steps have begun, the first signal asks for a stop; a second one ends this process at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # only it may handle signals
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.begun and not stop.wanted:
            stop.wanted = number
            return
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        elif handler is not signal.SIG_IGN:
            sys.exit(exit_code(number))

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    woken_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.signal(number, ask) for number in SIGNALS}
    threading.Thread(target=_listen, args=(reading, stop), name="towpath signals", daemon=True).start()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken_before)
        stop.over.set()
        os.close(writing)


def _listen(reading: int, stop: Stop) -> None:
    asked = False
    with os.fdopen(reading, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] not in SIGNALS:
                continue
            if asked or not stop.begun:
                if not stop.over.wait(_GRACE_SECONDS):
                    os._exit(exit_code(number[0]))
                return  # what the process does after the run is its own affair
            asked = True
            threading.Thread(target=_worry, args=(stop,), name="towpath signals", daemon=True).start()


def _worry(stop: Stop) -> None:
    if not stop.over.wait(_WORRIED_SECONDS):
        sys.stderr.write(
            f"towpath: process {os.getpid()} was told to stop {_WORRIED_SECONDS:g} s ago, and its step or its saving "
            "is not over: it is slow, or another rank is dead or hangs. A second signal ends it at once; what was "
            "published stays, and the same command goes on from there.\n"
        )
        sys.stderr.flush()
