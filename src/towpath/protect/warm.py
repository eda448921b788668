"""A process with torch loaded, from which ranks of `python -m towpath train` fork where there is no GPU.

    keeper ── warm process ──┬── fork, the rank itself
                             └── …
    torchrun ── stub, which `python` started ──── socket, pipe

The keeper starts the warm process (`main`). A process that should become a rank first looks for a warm one that is
like itself (`run_warm`), before it loads torch. It sends its arguments, environment, folder and stdio, and a fork of
the warm process becomes the rank. The process itself stays as a stub. It passes signals on, and ends with the rank's
exit code or signal. If the stub ends first, in whatever way, the kernel kills the rank.

A digest in the name of the socket says what must be equal (`identity`). It has all that a fork inherits, and that torch
could read when it is loaded: the interpreter, the sources, the environment, and what the kernel keeps of a process.
If anything differs, or fails before the rank runs, `run_warm` returns, and the process goes on as if there were no
warm one. Two differences stay: `ps` shows the warm process's command line for the rank, and SIGSTOP reaches the stub
alone.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import re
import resource
import runpy
import select
import signal
import socket
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from towpath.errors import TowpathError
from towpath.protect.memory import base_folder

# All that a training loads up to its first steps and its first checkpoint. The optimizers import torch._dynamo.
PRELOAD = (
    *("towpath.cli.main", "towpath.train.trainer", "torch._dynamo"),
    *("towpath.checkpoint.loading", "towpath.checkpoint.saving", "towpath.checkpoint.exporting"),
)

_ANSWER_SECONDS = 5.0  # a fork takes milliseconds. A stub that waited in vain starts as usual
_MESSAGE_BYTES = 1 << 18  # more than the kernel lets a process send in one message
_FORWARDED = {
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGCONT),
}
# Variables of a launcher or of a terminal, which differ between starts and which nothing reads when it is loaded.
_OF_ONE_START = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|SLURM_\w+"
    r"|PWD|OLDPWD|SHLVL|_|SSH_\w+|TMUX\w*|WINDOWID|XDG_SESSION_ID|INVOCATION_ID|JOURNAL_STREAM"
)
_STATUS = re.compile(r"(Umask|Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp|Cpus_allowed|Mems_allowed):.*")

forks = False  # whether this rank's successors look for a warm process: those of `python -m towpath train`
_is_fork = False  # of a warm process, which must not look for one


def identity() -> str:
    """Return a digest of all that a rank must have in common with the process from which it forks."""
    interpreter = [sys.executable, sys.version, sys.flags, sys.warnoptions, getattr(sys, "_xoptions", {}), sys.path]
    spec = importlib.util.find_spec("torch")
    torch = Path(spec.origin or "").parent if spec is not None else Path()
    installed = [(path, path.stat().st_mtime_ns) for path in (torch / "version.py", torch.parent)]  # pip changes both
    files = [path for path in Path(__file__).parents[1].rglob("*.*") if path.parent.name != "__pycache__"]
    sources = sorted((str(path), (found := path.stat()).st_mtime_ns, found.st_size) for path in files)
    environment = sorted(item for item in os.environ.items() if not _OF_ONE_START.fullmatch(item[0]))
    kernel = [path.readlink() for path in sorted(Path("/proc/self/ns").iterdir())]
    texts = [Path("/proc/self", name).read_text() for name in ("cgroup", "limits", "oom_score_adj")]
    status = [line for line in Path("/proc/self/status").read_text().splitlines() if _STATUS.fullmatch(line)]
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    facts = [interpreter, installed, sources, environment, kernel, texts, status, priority]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


# --- the stub ---------------------------------------------------------------------------------------------------------


def run_warm() -> None:
    """Run this command in a fork of a warm process, and end as that does. Return if there is none in the same state."""
    global forks
    is_observed = sys.gettrace() or sys.getprofile()
    forks = sys.platform == "linux" and not is_observed and sys.argv[1:2] == ["train"]
    if not forks or _is_fork:
        return
    mask, lifeline = signal.pthread_sigmask(signal.SIG_BLOCK, ()), os.pipe()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        base = base_folder()
        if not any(base.glob("warm-*.sock")):
            raise FileNotFoundError
        # A signal that comes meanwhile is for the rank, or for this process if there will be none.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        connection.settimeout(_ANSWER_SECONDS)
        connection.connect(str(base / f"warm-{identity()}.sock"))
        rank = _ask(connection, lifeline[0], [int(number) for number in mask])
        connection.settimeout(None)
        connection.send(b"go")
    except (OSError, TowpathError, AttributeError):  # AttributeError: stdout is None
        connection.close()
        for descriptor in lifeline:  # this ends a fork that waits
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    _follow(connection, rank, mask)


def _ask(connection: socket.socket, lifeline: int, mask: list[int]) -> int:
    """Send this process's state. Return a pidfd of the fork, which waits to be told to go."""
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    request = {
        "argv": (sys.argv, sys.orig_argv),
        "environ": {name: value for name, value in os.environ.items() if _OF_ONE_START.fullmatch(name)},
        "folder": os.getcwd(),  # noqa: PTH109 (text)
        "mask": mask,
        "ignored": [int(n) for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN],
        "by_line": [stream.line_buffering or stream.write_through for stream in streams],
    }
    # A message that nobody reads would keep stdout open when this process has ended.
    if not connection.recv(1):
        raise ConnectionError("the warm process is ending")
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2, lifeline])
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise ConnectionError("the warm process could not fork")
    return descriptors[0]


def _follow(connection: socket.socket, rank: int, mask: Iterable[int]) -> NoReturn:
    """Pass signals on to the rank, and end as it ends."""

    def forward(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(rank, signal.SIGSTOP if number == signal.SIGTSTP else number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    # Python calls a handler between two of its instructions. A signal just before a system call would wait for the next
    # one, so it also writes to this pipe.
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    for number in _FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    while connection not in select.select([connection, woken], [], [])[0]:
        os.read(woken, 1)
    status = b""
    with suppress(OSError):
        status = connection.recv(_MESSAGE_BYTES)
    if not status:  # the rank ends with this process
        sys.exit("towpath: the process that waits for this rank was killed, so its exit code is unknown")
    code = os.waitstatus_to_exitcode(int(status))
    if code >= 0:
        sys.exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank may have written one
    with suppress(OSError):  # SIGKILL
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


# --- the warm process -------------------------------------------------------------------------------------------------


def main() -> None:
    """Run as the warm process until stdin ends. In a fork, run as the rank."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # of a whole terminal or machine: it ends when the keeper does
    path = base_folder() / f"warm-{identity()}.sock"
    importlib.import_module("numpy")
    threads = list(Path("/proc/self/task").iterdir())  # those of OpenBLAS end before a fork, and start again
    for module in PRELOAD:
        importlib.import_module(module)
    if list(Path("/proc/self/task").iterdir()) != threads:
        sys.exit(f"one of {', '.join(PRELOAD)} has started threads, which a fork would lack")
    sys.stdout.flush()
    gc.freeze()
    if serve(path):
        runpy.run_module("towpath", run_name="__main__", alter_sys=True)


def serve(path: Path) -> bool:
    """Fork a rank for each stub that asks at the socket `path`, until stdin ends.

    Return True in the fork of a rank, which has taken over the state of its stub, and False at the end.
    """
    for stale in path.parent.glob("warm-*"):  # of processes that were killed
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, suppress(OSError):
            if probe.connect_ex(str(stale)):
                stale.unlink()
    new = path.with_suffix(f".{os.getpid()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(new))
        listener.listen(128)
        mine = new.lstat()
        new.rename(path)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for ranks
        while 0 not in select.select([0, listener], [], [])[0]:
            connection = listener.accept()[0]
            if _fork() == 0:
                listener.close()
                _start_rank(connection)
                return True
            connection.close()
    with suppress(FileNotFoundError):
        if os.path.samestat(mine, path.lstat()):  # not of another keeper's warm process
            path.unlink()
    return False


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 counts the threads of OpenBLAS
        return os.fork()


def _start_rank(connection: socket.socket) -> None:
    """Fork the rank, and return there. This process waits for it, and tells the stub how it ended.

    Whatever fails before the stub says go ends the fork, and the stub starts as usual.
    """
    global _is_fork
    _is_fork = True
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.settimeout(_ANSWER_SECONDS)
        connection.send(b"?")
        text, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 4)
        request, (*stdio, lifeline) = json.loads(text), descriptors
        if rank := _fork():
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(str(os.waitpid(rank, 0)[1]).encode())
            os._exit(0)
        for number, descriptor in enumerate(stdio):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _take_over(request, lifeline)
        own = os.pidfd_open(os.getpid())
        socket.send_fds(connection, [b"!"], [own])
        os.close(own)
        connection.settimeout(None)
        if connection.recv(_MESSAGE_BYTES) != b"go":
            os._exit(1)
        connection.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    except BaseException:
        os._exit(1)


def _take_over(request: dict[str, Any], lifeline: int) -> None:
    """Make this fork what its stub would have become."""
    os.setsid()
    # The kernel sends SIGKILL when the other end is closed, which only the stub holds.
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    for name in filter(_OF_ONE_START.fullmatch, list(os.environ)):
        del os.environ[name]
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    sys.argv, sys.orig_argv = request["argv"]
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream, by_line in zip(streams, request["by_line"], strict=True):
        stream.reconfigure(line_buffering=by_line)
    sys.modules["numpy"].random.seed()  # `random` does so itself
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) == signal.SIG_IGN:  # by the warm process
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
