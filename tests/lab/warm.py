"""Labs that start from the server of `tests/ranks/server.py`, which has loaded torch: each saves seconds of work.

The guard is a child of that server instead of a new interpreter. From there on all is as in other labs. How a guard is
started and dies with its owner, and what a rank server loads by itself, is for the tests of labs that are not warm.
"""

from __future__ import annotations

import os
import subprocess
from multiprocessing.connection import Connection
from typing import Any, cast
from unittest import mock

from lab import Lab
from lab.keeper import main
from tests.ranks.server import fork_from_server
from tests.session.collector import rarely_collect
from towpath.topology.cluster import Topology


def warm_lab(topology: Topology, **options: Any) -> Lab:
    """Return a new lab, as `Lab` does. Its ranks have what the server of ranks has loaded, and its own preload."""
    with mock.patch("lab.lab._start_guard", _start_guard):
        return Lab(topology, **options)


class _Guard:
    """A guard of the server, with what a lab uses of `subprocess.Popen`."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("guard", cast(float, timeout))

    def kill(self) -> None:
        self._process.kill()


def _start_guard(descriptor: int, _: str) -> _Guard:
    with Connection(os.dup(descriptor)) as control:
        return _Guard(fork_from_server(_run_guard, os.getpid(), control))


def _run_guard(owner: int, control: Connection) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    rarely_collect()
    descriptor = os.dup(control.fileno())
    control.close()
    # The guard asks whether its owner still lives. Its parent is the server.
    with mock.patch("os.getppid", return_value=owner):
        main(descriptor)
