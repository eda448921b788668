"""SIGTERM and Ctrl-C: the ranks finish their current step, all the same one, and save.

Python runs signal handlers between two lines of Python. A rank that waits for a dead rank may never reach the next
line. So a thread reads the signals too, and acts where the main thread does not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

# If ranks receive different signals, the first of these counts.
SIGNALS = (signal.SIGTERM, signal.SIGINT)

# After a first signal: seconds until the thread warns. torchrun kills its ranks after 30 seconds, without a message.
_WARN_SECONDS = 20.0
# After a second signal: seconds for a process to clean up, before it is ended.
_GRACE_SECONDS = 3.0


# In the environment of ranks that `towpath train --ranks` started: the process id of that command.
LAUNCHER = "TOWPATH_LAUNCHER"
_SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of Linux


def end_with_launcher() -> None:
    """Let the kernel send SIGTERM to this rank if the command that started it is killed. Do nothing elsewhere."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(launcher):  # it was killed before
        os.kill(os.getpid(), signal.SIGTERM)


def exit_code(number: int) -> int:
    """Return the exit code of a process that signal `number` has ended, as shells count it."""
    return 128 + number


@dataclass(slots=True)
class StopRequest:
    """The request to stop that a signal makes."""

    # Whether steps have begun. Before that there is nothing to save, and the first signal ends the process.
    steps_began: bool = False
    # The signal that this rank has received, or 0. Ranks exchange it with the loss of every step, and so stop after the
    # same step.
    signal: int = 0
    over: threading.Event = field(default_factory=threading.Event)  # set at the end of the context


@contextmanager
def handle_signals() -> Generator[StopRequest]:
    """Let the first signal request a stop once steps have begun. A second signal ends the process at once."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # no other thread can handle signals
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.steps_began and not stop.signal:
            stop.signal = number
            return
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        elif handler is not signal.SIG_IGN:
            sys.exit(exit_code(number))

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    wakeup_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    threading.Thread(target=_watch, args=(reading, stop), name="towpath signals", daemon=True).start()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        stop.over.set()
        os.close(writing)


def _watch(reading: int, stop: StopRequest) -> None:
    """Read the signals on a thread of their own, which also runs while the main thread waits in C++."""

    def warn() -> None:
        if not stop.over.wait(_WARN_SECONDS):
            sys.stderr.write(
                f"towpath: process {os.getpid()} was told to stop {_WARN_SECONDS:g} s ago, and its step or its saving "
                "is not over: it is slow, or another rank is dead or hangs. A second signal ends it at once; what was "
                "published stays, and the same command goes on from there.\n"
            )
            sys.stderr.flush()

    requested = False
    with os.fdopen(reading, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] not in SIGNALS:
                continue
            if requested or not stop.steps_began:
                if not stop.over.wait(_GRACE_SECONDS):
                    os._exit(exit_code(number[0]))
                return  # after the run, the signals are no longer handled here
            requested = True
            threading.Thread(target=warn, name="towpath signals", daemon=True).start()
