"""Daemon threads that end before the interpreter does, and the threads of gloo, which it waits for.

A thread that asks for the interpreter lock inside of C++ while the interpreter is finalized aborts the process (exit
code 134). It is enough to drop the last reference to a collective or to a tensor. Gloo's own threads drop tensors after
each collective, when the caller may have gone on. So at exit our threads are told to end, gloo's get the lock until
they are idle, and both are awaited for a few seconds.

A program that ends in an error may have lost a rank, for which its threads would wait. Its peers learn of the error
when its connections close. So it waits shortly, and then ends at once.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary

_LIMIT_SECONDS = 4.0  # then a thread waits for a peer that is gone, and the process must end all the same
_LIMIT_AFTER_ERROR_SECONDS = 0.25
_ends_in_error = False
_PAUSE_SECONDS, _IDLE_LOOKS = 0.002, 3
_STOPS: WeakKeyDictionary[threading.Thread, Callable[[], object]] = WeakKeyDictionary()


def note_error() -> None:
    """Note that this program is about to end in an error, with exit code 1. Python itself notes uncaught exceptions."""
    global _ends_in_error
    _ends_in_error = True


def ends_in_error() -> bool:
    """Return at exit whether this program ends in an error."""
    return _ends_in_error or hasattr(sys, "last_value")


def start_daemon(name: str, work: Callable[[], object], stop: Callable[[], object] = lambda: None) -> threading.Thread:
    """Start a thread that calls `work`, and at exit calls `stop` to let it end. By default it ends by itself."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    _STOPS[thread] = stop
    thread.start()
    return thread


@atexit.register  # at import, so it runs after those that wait for transfers under way
def _end_daemons() -> None:
    for thread in _alive():
        _STOPS[thread]()
    in_error = ends_in_error()
    until = time.monotonic() + (_LIMIT_AFTER_ERROR_SECONDS if in_error else _LIMIT_SECONDS)
    while (alive := _alive()) and (left := until - time.monotonic()) > 0:  # each may have started another one
        alive[0].join(left)
    idle = 0
    while idle < _IDLE_LOOKS and time.monotonic() < until:
        time.sleep(_PAUSE_SECONDS)  # without the interpreter lock: whoever waits for it gets it
        idle = 0 if _gloo_is_busy() else idle + 1
    if in_error and alive:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _alive() -> list[threading.Thread]:
    return [thread for ref in _STOPS.keyrefs() if (thread := ref()) is not None and thread.is_alive()]


def _gloo_is_busy() -> bool:
    """Return whether a thread of gloo is running, or would be if it got a processor. Only Linux tells."""
    for status in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            _, name, state = re.split(r"[()] ?", status.read_text(), maxsplit=2)
            if name == "pt_gloo_runloop" and state[0] != "S":
                return True
    return False
