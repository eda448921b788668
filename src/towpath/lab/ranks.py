"""A function on every rank: what a rank forked from the warm server does with its `Call`."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from towpath.lab.messages import Call


def serve(call: Call, result: int) -> None:
    """Call the function in a gloo group, send what it returned or its traceback, and wait for the end of the run.

    The rank stays although it is done: were it to leave, its peers' connections would break in the middle of what they
    still do, and their errors would hide its own.
    """
    os.environ.clear()
    os.environ.update(call.env)
    with Path(call.stack_file).open("w") as stack, Connection(result, readable=False) as answers:
        faulthandler.dump_traceback_later(call.timeout_seconds, exit=True, file=stack)
        try:
            answer = pickle.dumps((True, _run(call)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
        answers.send_bytes(answer)
    while True:
        signal.pause()


def _run(call: Call) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if call.main:
        spawn.prepare(call.main)
    fn, args = pickle.loads(call.payload)
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=call.timeout_seconds))
    return fn(call.rank, call.world, *args)
