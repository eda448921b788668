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
from towpath.train.stopping import exit_code

# By process: the rank, and what it runs in.
Running = dict[int, tuple[int, "subprocess.Popen[bytes]"]]

# How long ranks have to end by themselves once they are told to: what torchrun gives them too.
_GRACE_SECONDS = 30.0


def run_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Run `towpath ARGUMENTS` as each of `ranks` ranks, to their end.

    Where one fails the others are ended. A signal to this process reaches each of them once; it then waits for what
    they do.

    Returns:
        The exit code of the first rank that failed. If none did, 128 + N where signal N ended them, or 0.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
    running: Running = {}
    with _passing_on(running) as told:
        try:
            for rank in range(ranks):
                command = [sys.executable, "-m", "towpath", *arguments]
                environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **as_rank(rank, ranks, store.port)}
                # A group of its own: Ctrl-C, or `timeout`, would else reach it twice, from there and from here.
                process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
                running[process.pid] = rank, process
            failure = _until_all_ended(running, told)
        finally:
            for _, process in running.values():
                process.kill()
                process.wait()
    return failure


def _until_all_ended(running: Running, told: Sequence[int]) -> int:
    failure = stopped = 0
    killer = threading.Timer(_GRACE_SECONDS, _signal, (running, signal.SIGKILL))
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
            if number in told:
                stopped = exit_code(number)  # the others stop, too: a second signal would end them before they are done
            elif code and not failure:
                failure = code
                if code < 0 and not told:  # it could say nothing itself
                    _say(f"rank {rank} was ended by {_named(-code)}; the other ranks are ended too.")
                _signal(running, signal.SIGTERM)
    finally:
        killer.cancel()
    return 1 if failure < 0 else failure or stopped


def _signal(running: Running, number: int) -> None:
    for pid in list(running):
        # Not Popen.send_signal, which looks whether it has ended, and so takes that from os.wait.
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _named(number: int) -> str:
    name = signal.Signals(number).name
    return f"{name} (was memory short?)" if number == signal.SIGKILL else name


def _say(text: str) -> None:
    sys.stderr.write(f"towpath: {text}\n")
    sys.stderr.flush()


@contextmanager
def _passing_on(running: Running) -> Generator[Sequence[int]]:
    """What comes to this process is handed on, and the ranks end as they see fit. Inside: the signals that came."""
    told: list[int] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        told.append(number)
        _signal(running, number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
