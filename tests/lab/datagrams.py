"""Two ranks exchange datagrams, and one prints a line of JSON about them. They load no torch, so they start at once.

python datagrams.py READY round-trips COUNT ENOUGH_SECONDS    until one takes no longer than ENOUGH_SECONDS
python datagrams.py READY lost COUNT                          the numbers of rank 0's datagrams that never came back
python datagrams.py READY rate RECEIVER BYTES_PER_SECOND      how fast RECEIVER's cable is, at most (test_delay.py)

READY is a named pipe.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from pathlib import Path

from lab import link_counters
from lab.links import address

PORT = 6000
RANK = int(os.environ["RANK"])
PEER = (address(1 - RANK), PORT)
IP_MTU = 14  # Python has no name for it
END = b"end"
# All of these are never lost.
MANY = 40
# Rates are measured over windows of this many bytes, after the token buckets are empty, until one is within 5 %.
FIRST_BYTES, WINDOW_BYTES = 250_000, 1_000_000
WINDOWS = 20


def round_trips(own: socket.socket, count: int, enough_seconds: float) -> list[float]:
    found: list[float] = []
    while len(found) < count and (not found or found[-1] > enough_seconds):
        began = time.monotonic()
        own.sendto(b"?", PEER)
        own.recv(9)
        found.append(time.monotonic() - began)
    return found


def lost(own: socket.socket, count: int) -> list[int]:
    """Send numbered datagrams, a few at a time, so that no buffer overflows. The others may still be on their way."""
    back: set[int] = set()
    for number in range(count + MANY):
        own.sendto(number.to_bytes(4, "big"), PEER)
        while max(back, default=-1) < number - MANY:
            back.add(int.from_bytes(own.recv(9), "big"))
    return sorted(set(range(count)) - back)


def measured(own: socket.socket, began: float, bytes_per_second: float) -> list[float]:
    """Return the last window's share of the rate, and that of all that was received since the beginning."""

    def wait_for(more_bytes: int) -> tuple[float, int]:
        target = link_counters().received_bytes + more_bytes
        while (now := link_counters().received_bytes) < target:
            time.sleep(0.001)
        return time.monotonic(), now

    started, first = wait_for(FIRST_BYTES)
    share = 0.0
    for _ in range(WINDOWS):
        ended, last = wait_for(WINDOW_BYTES)
        share = (last - first) / (ended - started) / bytes_per_second
        if abs(share - 1) <= 0.05:
            break
        started, first = ended, last
    received, bucket = link_counters().received_bytes, 64 << 10
    return [share, (received - bucket) / (time.monotonic() - began) / bytes_per_second]


def main() -> None:
    ready, kind, *numbers = sys.argv[1:]
    receiver = int(numbers[0]) if kind == "rate" else 1
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.bind((address(RANK), PORT))
    began = time.monotonic()
    # The receiver is bound before the other rank sends.
    with Path(ready).open("w" if receiver == RANK else "r"):
        pass
    answer: object = None
    if kind == "rate" and receiver == RANK:
        answer = measured(own, began, float(numbers[1]))
    elif kind == "rate":
        while not select.select([own], [], [], 0)[0]:
            own.sendto(bytes(1400), PEER)
    elif RANK == 0:
        answer = (
            round_trips(own, int(numbers[0]), float(numbers[1]))
            if kind == "round-trips"
            else lost(own, *map(int, numbers))
        )
    else:
        while (question := own.recv(9)) != END:
            own.sendto(question, PEER)
    if answer is not None:
        for _ in range(MANY):
            own.sendto(END, PEER)
        own.connect(PEER)  # it has an MTU only now, and would raise if the other has ended
        mtu = own.getsockopt(socket.IPPROTO_IP, IP_MTU)
        recovery = int(Path("/proc/sys/net/ipv4/tcp_recovery").read_text())
        print(json.dumps({"answer": answer, "mtu": mtu, "recovery": recovery}))


main()
