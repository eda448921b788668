"""`accelerate test` on the machines of a lab with a fault: whether it ends, and whether a user can tell what is wrong.

Each rank starts the command with a config file of its own. The file is what `accelerate config` writes for several
machines with CPUs. accelerate leaves the start of their ranks to MPI, and takes rank and world from the variables that
MPI sets. Here the lab sets such variables (RANK, WORLD_SIZE and so on), so MPI is not needed.

It is given what favors it. Its working folder is shared by all machines, because it tests a file there. A fault counts
as named if any complaint of any rank has a word for the cause, or the name or address of a machine of the fault.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness.candidates import CaseError
from benchmarks.network_faults import Fault, forget_interfaces, injected
from lab.links import address

LIMIT_SECONDS = 120.0
# The group of the lab's own call listens at the launcher's port.
_PORT = 29520
_COMPLAINT = re.compile(r"error|exception|fail|refus|timed ?out|timeout|unreachable|no route|closed by peer", re.I)
# These repeat the command that failed.
_REPEATED = ("CalledProcessError", "failed with returncode", "Running: ")
_MOST_LINES, _MOST_CHARACTERS = 8, 300
# By cause: words with which a user would know it.
_WORDS = {
    "interface": r"interface|ifname",
    "firewall": r"firewall|filtered|blocked|refused|no route",
    "mtu": r"mtu|fragment|packet size",
    "slow cable": r"slow|bandwidth|mbit|gbit",
    "asymmetric rate": r"slow|bandwidth|asymmetric|mbit|gbit",
    "half duplex": r"duplex",
    "slow pair": r"slow|bandwidth|mbit|gbit",
    "loss": r"packet loss|packets lost|retransmi",
    "slow rank": r"slow|straggl",
    "hosts entry": r"/etc/hosts|127\.0\.1\.1|resolv",
    "shared address": r"172\.17\.|docker|bridge",
    "version": r"version|mismatch",
}


def check_installed() -> str:
    """Return the version of accelerate. Raise `CaseError` if it is not installed."""
    if find_spec("accelerate") is None:
        raise CaseError("accelerate is not installed. Install it: pip install 'towpath[accelerate]'.")
    return version("accelerate")


@dataclass(frozen=True, slots=True)
class Ended:
    """How `accelerate test` ended on a rank, or None if it did not within the limit, and all that it printed."""

    status: int | None
    seconds: float
    output: str


def tested(rank: int, world: int, name: str | None, folder: str) -> Ended:
    """Run `accelerate test` on a rank while the lab has a fault, or none. `folder` is the same on all machines."""
    import torch.distributed as dist

    config, output = Path(folder, f"config{rank}.json"), Path(folder, f"output{rank}.txt")
    config.write_text(json.dumps(_config(world)))
    forget_interfaces()
    # accelerate looks for a command of its own.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "test", "--config_file", str(config)]
    dist.barrier()  # the connections of this group exist before a fault
    with injected(name), output.open("w") as file:
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = None  # the lab kills it when the call ends, with what it has started
        seconds = time.monotonic() - began
        dist.barrier()  # the fault stays as long as any rank is tested
    return Ended(status, round(seconds, 1), output.read_text(errors="replace"))


def _config(world: int) -> dict[str, Any]:
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU",
        "use_cpu": True,
        "mixed_precision": "no",
        "num_machines": int(os.environ["GROUP_WORLD_SIZE"]),
        "num_processes": world,
        "machine_rank": int(os.environ["GROUP_RANK"]),
        "main_process_ip": address(0),
        "main_process_port": _PORT,
        "same_network": True,
    }


def outcome(fault: Fault | None, ended: Sequence[Ended]) -> dict[str, Any]:
    """Return what a result line keeps of a test on all ranks, and whether its complaints name the fault."""
    complaints = [line for each in ended for line in _complaints(each.output)]
    text = "\n".join(complaints)
    return {
        "statuses": [each.status for each in ended],
        "seconds": max(each.seconds for each in ended),
        "last_lines": [_last_line(each.output) for each in ended],
        "complaints": [*dict.fromkeys(line[:_MOST_CHARACTERS] for line in complaints)][:_MOST_LINES],
        "names_cause": fault is not None and re.search(rf"(?<!\w)({_WORDS[fault.cause]})", text, re.I) is not None,
        "names_machine": fault is not None and any(re.search(_pattern(name), text) for name in fault.machines),
    }


def _lines(output: str) -> list[str]:
    """Return the lines without the marks that `accelerate test` puts before them."""
    return [text for line in output.splitlines() if (text := re.sub(r"^std(out|err):", "", line).strip())]


def _last_line(output: str) -> str:
    return next(iter(_lines(output)[::-1]), "")[:_MOST_CHARACTERS]


def _complaints(output: str) -> list[str]:
    return [line for line in _lines(output) if _COMPLAINT.search(line) and not any(map(line.__contains__, _REPEATED))]


def _pattern(machine: str) -> str:
    """Return a pattern of a machine's name and address."""
    of_cable = address(int(machine.removeprefix("node")))
    return rf"(?<![\w.])({machine}|{re.escape(of_cable)})(?!\d)"
