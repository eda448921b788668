"""What the kernel lends the lab: a network of its own for every node, and sets of processes that end together.

Nothing here has a name on the host: a namespace lives as long as a process or an open descriptor holds it, so a lab
whose keeper dies, however it dies, is gone. Only Linux is asked, by the system calls that Python 3.11 does not wrap.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from towpath.errors import LabError

_NEW_MOUNTS = 0x0002_0000
_NEW_HOSTNAME = 0x0400_0000
_NEW_USER = 0x1000_0000
_NEW_PIDS = 0x2000_0000
_NEW_NETWORK = 0x4000_0000

_MOUNT_BIND = 0x1000
_MOUNT_PRIVATE = 0x4_4000  # MS_PRIVATE | MS_REC

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG

# What forbids namespaces to ordinary users, and the value with which it does.
_LOCKS = (
    ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0"),
    ("/proc/sys/user/max_user_namespaces", "0"),
)


@dataclass(frozen=True, slots=True)
class Space:
    """A network and a host name, held open by descriptors; `counters` is its own /proc/net/dev."""

    network: int
    hostname: int
    counters: int

    def enter(self) -> None:
        """Move the calling thread here; what it forks starts here."""
        _setns(self.network, _NEW_NETWORK)
        _setns(self.hostname, _NEW_HOSTNAME)

    @staticmethod
    def current() -> Space:
        own = Path("/proc/thread-self")
        return Space(*(os.open(own / name, os.O_RDONLY) for name in ("ns/net", "ns/uts", "net/dev")))


@contextmanager
def inside(space: Space, home: Space) -> Generator[None]:
    """The calling thread in `space` for a while, then back in `home`."""
    space.enter()
    try:
        yield
    finally:
        home.enter()


def leave_the_host() -> Space:
    """Move this (single-threaded) process to a network and mounts of its own, as root or in a user namespace."""
    flags = _NEW_NETWORK | _NEW_MOUNTS | _NEW_HOSTNAME
    try:
        try:
            _unshare(flags)
        except PermissionError:
            _become_root_of_a_user_namespace()
            _unshare(flags)
        _mount("none", "/", None, _MOUNT_PRIVATE)
    except OSError as error:
        raise LabError(_refusal(error)) from None
    return Space.current()


def new_node(hostname: str, home: Space) -> Space:
    """A network with nothing in it but a loopback that is down."""
    _unshare(_NEW_NETWORK | _NEW_HOSTNAME)
    try:
        socket.sethostname(hostname)
        return Space.current()
    finally:
        home.enter()


def cover_file(target: str, source: Path) -> None:
    """Processes of the lab read `source` where they open `target`."""
    if Path(target).exists():
        _mount(str(source), target, None, _MOUNT_BIND)


def fork_first_process(*, last: bool = False) -> int:
    """`os.fork()`, but the child is the first process of new process and mount namespaces.

    When it ends, the kernel kills every process it leaves behind, and only then does waiting for it return; when its
    parent ends, it ends. `last`: the parent forks nothing any more.
    """
    home = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        _unshare(_NEW_PIDS)
        pid = os.fork()
        if pid == 0:
            _check(_libc().prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0), "prctl")
            _unshare(_NEW_MOUNTS)
            # A masked /proc (containers) cannot be mounted anew; the outer one still answers for /proc/self.
            with suppress(OSError):
                _mount("proc", "/proc", "proc", 0)
            return 0
        if not last:  # a user namespace could not even go back to the host's
            _setns(home, _NEW_PIDS)
        return pid
    finally:
        os.close(home)


def _become_root_of_a_user_namespace() -> None:
    user, group = os.getuid(), os.getgid()
    _unshare(_NEW_USER)
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")  # without it gid_map is refused
    (own / "uid_map").write_text(f"0 {user} 1")
    (own / "gid_map").write_text(f"0 {group} 1")


def _refusal(error: OSError) -> str:
    found: list[str] = []
    for path, locked in _LOCKS:
        with suppress(OSError):
            if Path(path).read_text().strip() == locked:
                found.append(f"{path} is {locked}")
    because = f" ({'; '.join(found)})" if found else ""
    return (
        f"the lab needs network namespaces, and the kernel refuses them to user {os.getuid()}: "
        f"{error.strerror or error}{because}. Run as root, allow unprivileged user namespaces, or start the "
        "container with --privileged."
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _unshare(flags: int) -> None:
    _check(_libc().unshare(flags), "unshare")


def _setns(descriptor: int, kind: int) -> None:
    _check(_libc().setns(descriptor, kind), "setns")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = None if kind is None else kind.encode()
    flags_argument = ctypes.c_ulong(flags)
    _check(_libc().mount(source.encode(), target.encode(), encoded, flags_argument, None), f"mount on {target}")
