"""How truthful the lab is: rate, bursts and headers of one TCP stream, round trips, and how long starting takes.

    python -m tools.docs.measure_lab -o docs/lab-measured.json       (prints the tables of docs/guides/lab.md)

On a machine that does other work too, put `chrt -f 50` before it (as root), or it measures the competition for cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lab import FLAT, Cable, Lab, LinkBytes, Rate, link_counters
from lab.links import address
from towpath.topology.cluster import Topology

RATES = ("50mbit", "200mbit", "1000mbit")
DELAYED = {
    "flat": FLAT,
    "500mbit, 20 ms": Cable.parse("500mbit", latency="20ms"),
    "500mbit, 20 ms, packets of 9000 bytes": replace(Cable.parse("500mbit", latency="20ms"), mtu_bytes=9000),
}
PINGS = 100
SECONDS = 2.0
BURST_BYTES = 1_000_000
PORT = 6000

Stream = tuple[float, float, LinkBytes]  # began, received all, what the node's links carried


def stream(rank: int, world: int, payload_bytes: int, both: bool) -> Stream:
    """Rank 0 streams to rank 1 over one connection, and rank 1 to rank 0 at the same time if `both`."""
    import torch.distributed as dist

    if rank == 0:
        with socket.create_server((address(0), PORT)) as server:
            dist.barrier()
            connection, _ = server.accept()
    else:
        dist.barrier()
        connection = socket.create_connection((address(0), PORT))
    dist.barrier()
    before = link_counters()
    dist.barrier()
    began = ended = time.monotonic()
    sender = threading.Thread(target=_send, args=(connection, payload_bytes))
    if rank == 0 or both:
        sender.start()
    if rank == 1 or both:
        _receive(connection, payload_bytes)
        ended = time.monotonic()
    if sender.ident is not None:
        sender.join()
    dist.barrier()
    return began, ended, link_counters() - before


def _send(connection: socket.socket, payload_bytes: int) -> None:
    chunk = memoryview(bytes(1 << 20))
    while payload_bytes:
        payload_bytes -= connection.send(chunk[:payload_bytes])


def _receive(connection: socket.socket, payload_bytes: int) -> None:
    chunk = memoryview(bytearray(1 << 20))
    while payload_bytes:
        payload_bytes -= connection.recv_into(chunk, min(payload_bytes, len(chunk)))


def nothing(rank: int, world: int) -> None:
    pass


def ping(rank: int, world: int) -> list[float]:
    """The seconds of each of rank 0's round trips, one after the other."""
    import torch.distributed as dist

    found: list[float] = []
    with socket.socket(type=socket.SOCK_DGRAM) as own:
        own.bind((address(rank), PORT))
        dist.barrier()
        for _ in range(PINGS):
            began = time.monotonic()
            if rank == 0:
                own.sendto(b"?", (address(1), PORT))
                own.recv(1)
            else:
                own.sendto(*own.recvfrom(1))
            found.append(time.monotonic() - began)
    return found


def measure_delay(name: str, cable: Cable) -> dict[str, Any]:
    assert cable.up is not None
    payload_bytes = round(cable.up.bytes_per_second * SECONDS)
    goodput: list[float] = []
    with Lab(Topology(2, 1), inter=cable) as lab:
        idle, _ = lab.call(ping)
        for both in (False, True):
            first, second = lab.call(stream, payload_bytes, both)
            seconds = max(first[1], second[1]) - min(first[0], second[0])
            goodput.append(payload_bytes / seconds / cable.up.bytes_per_second)
    return {
        "cable": name,
        "date": time.strftime("%Y-%m-%d"),
        "latency_seconds": cable.latency_seconds,
        "round_trip_seconds": {"least": min(idle), "median": statistics.median(idle), "most": max(idle)},
        "payload_bytes": payload_bytes,
        "goodput_of_rate": {"one": goodput[0], "both": goodput[1]},
    }


def measure_stream(rate: str, payload_bytes: int, both: bool) -> dict[str, Any]:
    with Lab(Topology(2, 1), inter=rate) as lab:
        first, second = lab.call(stream, payload_bytes, both)
    seconds = max(first[1], second[1]) - min(first[0], second[0])
    return {
        "rate": rate,
        "both_directions": both,
        "payload_bytes": payload_bytes,
        "seconds": seconds,
        "goodput_of_rate": payload_bytes / seconds / Rate.parse(rate).bytes_per_second,
        "counted_of_payload": first[2].sent_bytes / payload_bytes,
        "links": [asdict(first[2]), asdict(second[2])],
    }


def measure_starts() -> dict[str, float]:
    """Seconds from asking for four ranks on two nodes until a gloo group of theirs has ended."""
    starts: dict[str, float] = {}

    def timed(name: str, action: Any) -> None:
        began = time.monotonic()
        action()
        starts[name] = time.monotonic() - began

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(
            "import torch.distributed as dist\n"
            "dist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"
        )
        began = time.monotonic()
        with Lab(Topology(2, 2), inter="200mbit") as lab:
            starts["raise"] = time.monotonic() - began
            timed("torchrun", lambda: lab.run([str(script)]))
            timed("direct", lambda: lab.run([str(script)], launcher="direct"))
            timed("first call", lambda: lab.call(nothing))
            timed("call", lambda: lab.call(nothing))
            began = time.monotonic()
        starts["close"] = time.monotonic() - began
    return starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="write the results here")
    arguments = parser.parse_args()
    streams: list[dict[str, Any]] = []
    print("| rate | directions | payload | goodput / rate | counted / payload |\n|---|---|---|---|---|")
    for rate in RATES:
        bulk = round(Rate.parse(rate).bytes_per_second * SECONDS)
        for payload_bytes, both in ((bulk, False), (bulk, True), (BURST_BYTES, False)):
            one = measure_stream(rate, payload_bytes, both)
            streams.append(one)
            print(
                f"| {rate} | {'both at once' if both else 'one'} | {payload_bytes / 1e6:g} MB | "
                f"{one['goodput_of_rate']:.3f} | {one['counted_of_payload']:.4f} |",
                flush=True,
            )
    delays = [measure_delay(name, cable) for name, cable in DELAYED.items()]
    print("\n| cable | least round trip | median | goodput / rate, one way | both at once |\n|---|---|---|---|---|")
    for one in delays:
        least, median = (f"{one['round_trip_seconds'][kind] * 1e3:.2f} ms" for kind in ("least", "median"))
        alone, both = one["goodput_of_rate"].values()
        print(f"| {one['cable']} | {least} | {median} | {alone:.3f} | {both:.3f} |", flush=True)
    starts = measure_starts()
    print("\n| start | seconds |\n|---|---|")
    for name, seconds in starts.items():
        print(f"| {name} | {seconds:.2f} |")
    if arguments.output:
        machine = {"kernel": platform.release(), "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
        record = {"machine": machine, "streams": streams, "delays": delays, "starts_seconds": starts}
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
