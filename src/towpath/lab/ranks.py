"""A function on every rank: what a rank forked from the warm server does with its `Call`."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from towpath.lab.messages import Call, Member
from towpath.lab.namespaces import Space


def listen(members: Sequence[Member], nodes: Sequence[Space]) -> socket.socket | None:
    """For calls: the socket of their store, on rank 0's node, where this process stays."""
    first = members[0]
    if not isinstance(first, Call):
        return None
    nodes[first.node].enter()
    return socket.create_server((first.env["MASTER_ADDR"], int(first.env["MASTER_PORT"])), backlog=first.world)


def serve(call: Call, result: int, store: socket.socket) -> None:
    """Call the function in a gloo group, send what it returned or its traceback, and wait for the end of the run.

    The rank stays although it is done: were it to leave, its peers' connections would break in the middle of what they
    still do, and their errors would hide its own.
    """
    os.environ.clear()
    os.environ.update(call.env)
    with Path(call.stack_file).open("w") as stack, Connection(result, readable=False) as answers:
        faulthandler.dump_traceback_later(call.timeout_seconds, exit=True, file=stack)
        try:
            answer = pickle.dumps((True, _run(call, store)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
        answers.send_bytes(answer)
    while True:
        signal.pause()


def _run(call: Call, listener: socket.socket) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    torch.set_num_threads(1)
    if call.main:
        spawn.prepare(call.main)
    fn, args = pickle.loads(call.payload)
    timeout = timedelta(seconds=call.timeout_seconds)
    host, port = listener.getsockname()
    hosts_store = call.rank == 0
    # The store takes the socket over; in the other ranks it is only a copy.
    accepting = listener.detach()
    if not hosts_store:
        os.close(accepting)
    store = TCPStore(host, port, call.world, hosts_store, timeout, master_listen_fd=accepting if hosts_store else None)
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world, timeout=timeout)
    return fn(call.rank, call.world, *args)
