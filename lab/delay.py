"""The delay line: a process that holds each packet of a node for the latency of its cable, and loses some of them.

    node i   cable ──> held for half of the round trip, or lost ──> port of the bridge
                   <────────────────── at once ─────────────────

The kernel's own `netem` is missing in many kernels of virtual machines and containers. So the two ends of such a cable
are tap devices. This process reads a frame at one end and writes it to the other. The kernel shapes the rates before
the process sees a frame (links.py), so the process has no more to do than the rates allow.

It spends its time on system calls: a read and a write for each frame, and a select for up to 16. They take 10 µs for
1500 bytes, two thirds of it in the kernel. Frames are not merged (GSO is off), so a lost frame is one packet. When the
process ends, the kernel removes both devices.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import select
import struct
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

from lab.errors import LabError

_DEVICE = "/dev/net/tun"
_SET_INTERFACE = 0x4004_54CA  # TUNSETIFF
_TAP = 0x1002  # IFF_TAP | IFF_NO_PI
_FRAME_BYTES = 10_000
_IP = b"\x08\x00"
# The other direction waits no longer than this many frames take.
_FRAMES_AT_ONCE = 16


def open_tap(name: str) -> int:
    """Create a tap device in the network of the calling thread. It exists as long as the returned descriptor is open.

    Raises:
        LabError: This machine has no tap devices, or does not allow them.
    """
    try:
        descriptor = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TAP))
    except OSError as error:
        raise LabError(
            f"latency and loss need the device {_DEVICE}, and the kernel refuses it to user {os.getuid()}: "
            f"{error.strerror}. Run as root, load the module tun, or start the container with --device {_DEVICE}."
        ) from None
    return descriptor


def start_line(node: int, port: int, latency_seconds: float, loss: float, seed: int) -> int:
    """Start the process of a cable, and return its pid. It takes over the descriptors of the two devices.

    Args:
        node: The device of the node.
        port: The device of the bridge.
        latency_seconds: The round trip. The packets of the node are held for half of it.
        loss: The share of the node's packets that are lost.
        seed: The seed of the dice. With the same seed, the same packets are lost.
    """
    pid = os.fork()
    if pid == 0:
        try:
            # Small descriptors fit select(). The others would keep the networks of other nodes open.
            os.dup2(node, 0)
            os.dup2(port, 1)
            for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if descriptor > 2:
                    with suppress(OSError):  # of the list itself
                        os.close(descriptor)
            gc.disable()
            # On a busy machine, an ordinary process would wait for a core, and packets for the process.
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            _carry(0, 1, latency_seconds / 2, loss, random.Random(seed))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(node)
    os.close(port)
    return pid


def _carry(node: int, port: int, delay_seconds: float, loss: float, dice: random.Random) -> None:
    """Carry frames until the process is killed."""
    held: deque[tuple[float, bytes]] = deque()
    while True:
        wait_seconds = max(0.0, held[0][0] - monotonic()) if held else None
        ready, _, _ = select.select([node, port], [], [], wait_seconds)
        if node in ready:
            for frame in _frames(node):
                # ARP does not cross the internet, and a lost question is only repeated after a second.
                if frame[12:14] != _IP:
                    _write(port, frame)
                elif loss == 0 or dice.random() >= loss:
                    held.append((monotonic() + delay_seconds, frame))
        if port in ready:
            for frame in _frames(port):
                _write(node, frame)
        now = monotonic()
        while held and held[0][0] <= now:
            _write(port, held.popleft()[1])


def _frames(device: int) -> Iterator[bytes]:
    with suppress(BlockingIOError):
        for _ in range(_FRAMES_AT_ONCE):
            yield os.read(device, _FRAME_BYTES)


def _write(device: int, frame: bytes) -> None:
    try:
        os.write(device, frame)
    except OSError as error:
        if error.errno != errno.EIO:  # the cable is cut: the device is down
            raise
