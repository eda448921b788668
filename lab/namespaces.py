"""Linux namespaces: a network, memory and disk of its own for each node, and sets of processes that end together.

Namespaces have no name on the host. A namespace lives as long as a process or an open descriptor holds it, so a lab is
gone when its keeper dies, in whatever way. This file makes the system calls that Python 3.11 does not wrap.
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

from lab.errors import LabError

_NEW_MOUNTS = 0x0002_0000
_NEW_HOSTNAME = 0x0400_0000
_NEW_USER = 0x1000_0000
_NEW_PIDS = 0x2000_0000
_NEW_NETWORK = 0x4000_0000

_MOUNT_BIND = 0x1000
_MOUNT_PRIVATE = 0x4_4000  # MS_PRIVATE | MS_REC
_DETACH = 2  # MNT_DETACH
_MEMORY = "/dev/shm"

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG

# Settings that can forbid namespaces to ordinary users, and the value with which they do.
_LOCKS = (
    ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0"),
    ("/proc/sys/user/max_user_namespaces", "0"),
)


@dataclass(frozen=True, slots=True)
class Namespaces:
    """A network, a host name and mounts, held open by descriptors.

    `counters`, `tcp` and `tcp6` are descriptors of the network's tables in /proc/net.
    """

    network: int
    hostname: int
    mounts: int
    counters: int
    tcp: int
    tcp6: int

    def enter(self) -> None:
        """Move the calling thread to this network and host name. Its children start there."""
        _setns(self.network, _NEW_NETWORK)
        _setns(self.hostname, _NEW_HOSTNAME)

    def mount(self) -> None:
        """Move this single-threaded process to a copy of these mounts, with the /proc of its pid namespace."""
        folder = Path.cwd()
        _setns(self.mounts, _NEW_MOUNTS)
        _unshare(_NEW_MOUNTS)
        _mount_proc()
        os.chdir(folder)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.network, self.hostname, self.mounts, self.counters, self.tcp, self.tcp6):
            if descriptor >= 0:
                os.close(descriptor)

    @staticmethod
    def current() -> Namespaces:
        """Return the namespaces of the calling thread."""
        names = ("ns/net", "ns/uts", "ns/mnt", "net/dev", "net/tcp", "net/tcp6")
        paths = [Path("/proc/thread-self", name) for name in names]
        # There is no table of IPv6 without IPv6.
        return Namespaces(*(os.open(path, os.O_RDONLY) if path.exists() else -1 for path in paths))


@contextmanager
def inside(spaces: Namespaces, home: Namespaces) -> Generator[None]:
    """Run the block in `spaces`, then return to `home`. Only the calling thread moves."""
    spaces.enter()
    try:
        yield
    finally:
        home.enter()


def leave_the_host() -> Namespaces:
    """Move this single-threaded process to a network and mounts of its own, as root or in a user namespace.

    Raises:
        LabError: The kernel refuses. The message names the setting that forbids it.
    """
    flags = _NEW_NETWORK | _NEW_MOUNTS | _NEW_HOSTNAME
    try:
        try:
            _unshare(flags)
        except PermissionError:
            _enter_user_namespace()
            _unshare(flags)
        _mount("none", "/", None, _MOUNT_PRIVATE)
    except OSError as error:
        raise LabError(_refusal(error)) from None
    return Namespaces.current()


def new_node(hostname: str, disk: Path, home: Namespaces) -> Namespaces:
    """Return a new network with a host name, and new mounts: empty memory in /dev/shm, and an empty disk.

    The network only has a loopback, which is down.

    Args:
        hostname: The host name.
        disk: The folder on which the disk is mounted. It has the same path on all nodes.
        home: The namespaces to which this single-threaded process returns.
    """
    folder, mounts = Path.cwd(), os.open("/proc/thread-self/ns/mnt", os.O_RDONLY)
    try:
        _unshare(_NEW_NETWORK | _NEW_HOSTNAME | _NEW_MOUNTS)
        socket.sethostname(hostname)
        for target in (str(disk), _MEMORY):
            if Path(target).exists():
                _mount("tmpfs", target, "tmpfs", 0)
        return Namespaces.current()
    finally:
        home.enter()
        _setns(mounts, _NEW_MOUNTS)
        os.close(mounts)
        os.chdir(folder)


def empty(node: Namespaces, disk: Path) -> None:
    """Give the memory and the disk of a node back to the machine. None of its processes may exist any more."""
    pid = os.fork()
    if pid == 0:
        try:
            _setns(node.mounts, _NEW_MOUNTS)
            for target in (str(disk), _MEMORY):
                _libc().umount2(target.encode(), _DETACH)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def cover_file(target: str, source: Path) -> None:
    """Mount `source` over `target`, for the processes of the lab."""
    if Path(target).exists():
        _mount(str(source), target, None, _MOUNT_BIND)


def fork_first_process(*, last: bool = False) -> int:
    """Fork a child that is the first process of new pid and mount namespaces. Return as `os.fork()` does.

    When the child ends, the kernel kills all its descendants. Waiting for it returns only after that. The child dies
    with its parent.

    Args:
        last: Whether the parent forks nothing afterwards.
    """
    home = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        _unshare(_NEW_PIDS)
        pid = os.fork()
        if pid == 0:
            _check(_libc().prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0), "prctl")
            _unshare(_NEW_MOUNTS)
            _mount_proc()
            return 0
        if not last:  # a process in a user namespace could not return to the host's pid namespace
            _setns(home, _NEW_PIDS)
        return pid
    finally:
        os.close(home)


def _mount_proc() -> None:
    # Containers mask /proc, and it cannot be mounted again. The outer one still has /proc/self.
    with suppress(OSError):
        _mount("proc", "/proc", "proc", 0)


def _enter_user_namespace() -> None:
    """Enter a new user namespace, as its root."""
    user, group = os.getuid(), os.getgid()
    _unshare(_NEW_USER)
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")  # the kernel refuses gid_map otherwise
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
