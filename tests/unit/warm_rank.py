"""What test_warm.py lets a rank do in place of `towpath train`: `train ACT` is `act(ACT)`. A warm process imports this.

A process that starts as usual does not, so there each act is a file that `towpath train` does not find.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType

import numpy.random as np_random

from towpath.cli import main as command
from towpath.protect import warm


def act() -> None:
    match sys.argv[2]:
        case "state":
            _print_state()
        case "end":
            atexit.register(print, "at exit")
            print("out", end="")
            print("err", end="", file=sys.stderr)
            sys.exit(int(sys.argv[3]))
        case "raise":
            raise ValueError(sys.argv[3])
        case "die":
            if sys.argv[3] != str(int(signal.SIGKILL)):
                signal.signal(int(sys.argv[3]), signal.SIG_DFL)  # a shell's background jobs ignore SIGINT
            os.kill(os.getpid(), int(sys.argv[3]))
        case "wait":
            _wait()
        case "write":
            Path("written").touch()
        case other:
            raise AssertionError(other)


def _print_state() -> None:
    names = ("RANK", "MASTER_PORT", "SLURM_STEP", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS")
    state = {
        "random": [random.random(), np_random.rand()],
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "forks": warm.forks,
        "main": sys.modules["__main__"].__spec__.name,
        "folder": str(Path.cwd()),
        "environ": {name: os.environ.get(name) for name in names},
        "path": sys.path,
        "stdin": sys.stdin.read(),
        "by_line": [sys.stdout.line_buffering, sys.stderr.line_buffering],
        "own session": os.getsid(0) == os.getpid(),
        "ignored": [n for n in range(1, 32) if signal.getsignal(n) == signal.SIG_IGN],
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "descriptors": sorted(int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()),
    }
    print(json.dumps(state))


def _wait() -> None:
    """Wait for signals. Say which came, and end with its number where the third argument is `handle`."""

    def handle(number: int, _: FrameType | None) -> None:
        os.write(1, f"{signal.Signals(number).name}\n".encode())  # while it prints, it may not print
        sys.exit(number)

    if sys.argv[3] == "handle":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, handle)
    woken, wakes = os.pipe()  # a signal just before a system call would wait for the next one
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    print(os.getpid(), flush=True)
    while True:
        os.read(woken, 1)


command.main = act
