"""`towpath train --ranks N`: the command starts the ranks of one machine itself, without torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from towpath.topology.groups import as_rank
from towpath.train.signals import LAUNCHER, exit_code

# The rank and the process by process id.
Running = dict[int, tuple[int, "subprocess.Popen[bytes]"]]

# Seconds for the ranks to end after SIGTERM, as torchrun gives them.
_GRACE_SECONDS = 30.0


def run_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Run `towpath ARGUMENTS` as each of `ranks` ranks until all have ended.

    If a rank fails, the others are ended. A signal to this process is passed on once to each of them.

    Returns:
        The exit code of the first rank that failed. If none did, 128 + N where signal N ended them, or 0.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
    running: Running = {}
    with _signals_passed_on(running) as passed_on:
        try:
            for rank in range(ranks):
                command = [sys.executable, "-m", "towpath", *arguments]
                environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **as_rank(rank, ranks, store.port)}
                environment[LAUNCHER] = str(os.getpid())
                # In its own process group. Otherwise Ctrl-C, or `timeout`, would reach it twice.
                process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
                running[process.pid] = rank, process
            return _wait_for_all(running, passed_on)
        finally:
            for _, process in running.values():
                process.kill()
                process.wait()


def _wait_for_all(running: Running, passed_on: Sequence[int]) -> int:
    failure = stopped = 0
    killer = threading.Timer(_GRACE_SECONDS, _send_signal, (running, signal.SIGKILL))
    try:
        while running:
            pid, status = os.wait()
            if pid not in running:
                continue
            rank, process = running.pop(pid)
            process.returncode = code = os.waitstatus_to_exitcode(status)
            if code and not (failure or stopped):
                killer.start()
            number = max(code - 128, -code)  # of the signal that ended it, if one did
            if number in passed_on:
                # The others stop too. A second signal would end them before they have saved.
                stopped = exit_code(number)
            elif code and not failure:
                failure = code
                if code < 0 and not passed_on:  # the rank could not print an error itself
                    name = signal.Signals(-code).name + (" (was memory short?)" if -code == signal.SIGKILL else "")
                    sys.stderr.write(f"towpath: rank {rank} was ended by {name}; the other ranks are ended too.\n")
                    sys.stderr.flush()
                _send_signal(running, signal.SIGTERM)
    finally:
        killer.cancel()
    return 1 if failure < 0 else failure or stopped


def _send_signal(running: Running, number: int) -> None:
    for pid in list(running):
        # Popen.send_signal would check whether the process has ended, and so take its status from os.wait.
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def _signals_passed_on(running: Running) -> Generator[Sequence[int]]:
    """Pass each signal on to the ranks, which end by themselves. Yield the list of signals so far."""
    passed_on: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        passed_on.append(number)
        _send_signal(running, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield passed_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
