"""Daemon threads that end before the interpreter does.

A thread that is inside of C++ when the interpreter is finalized aborts the process (exit code 134), because it can
never get the interpreter lock again. Dropping the last reference to a collective of PyTorch is enough. So at exit these
threads are told to end, and awaited for a few seconds.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

_LIMIT_SECONDS = 4.0  # then a thread waits for a peer that is gone, and the process must end all the same
_STOPS: WeakKeyDictionary[threading.Thread, Callable[[], object]] = WeakKeyDictionary()


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
    until = time.monotonic() + _LIMIT_SECONDS
    while (alive := _alive()) and (left := until - time.monotonic()) > 0:  # each may have started another one
        alive[0].join(left)


def _alive() -> list[threading.Thread]:
    return [thread for ref in _STOPS.keyrefs() if (thread := ref()) is not None and thread.is_alive()]
