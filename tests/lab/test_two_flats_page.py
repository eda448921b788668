"""docs/guides/clusters/two-flats.md: what it has the machines do is done in the lab, too, with the same arguments.

`make parity` runs the commands for the lab (tests/unit/test_commands.py).
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.documented import ROOT, all_fences, commands

PAGE = "docs/guides/clusters/two-flats.md"
OF_LAB = "-m lab run --nodes 2 --ranks 1 --inter flat "
# The lab has no VPN.
OF_VPN = ("wg-quick", "ufw")
FENCES = [fence for fence in all_fences() if fence.page == PAGE and fence.language == "bash"]
ON_MACHINES = [
    command
    for fence in FENCES
    for command in commands(fence)
    if fence.said == "cluster" and not any(tool in command for tool in OF_VPN)
]
IN_LAB = [command for fence in FENCES for command in commands(fence) if fence.said == "long" and OF_LAB in command]


def _arguments(command: str) -> set[str]:
    """What a command passes to towpath: options, files and settings, without variables before it."""
    return {word for word in shlex.split(command) if "." in word and not word.endswith(".sh") and word != "10.77.0.1"}


@pytest.mark.parametrize("command", ON_MACHINES)
def test_what_the_machines_run_is_run_in_the_lab(command: str) -> None:
    assert any(_arguments(command) <= _arguments(other) for other in IN_LAB), f"{command}: not in {IN_LAB}"


def test_the_page_has_commands_of_both_kinds() -> None:
    assert len(ON_MACHINES) == 3 and len(IN_LAB) == 4


def test_each_machine_is_an_island_with_a_launcher_and_a_folder_of_its_own(tmp_path: Path) -> None:
    stand_in = tmp_path / "torchrun"
    stand_in.write_text('#!/bin/bash\nprintf "%s\\n" "$GLOO_SOCKET_IFNAME" "$@"\n')
    stand_in.chmod(0o755)
    script = ROOT / "examples" / "clusters" / "two_flats.sh"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LINK": "wg0"}
    done = subprocess.run(
        ["bash", str(script), "10.77.0.1", "a.toml", "x.y=1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    interface, *arguments = done.stdout.splitlines()
    asked = get_args_parser().parse_args(arguments)
    assert interface == "wg0" and asked.standalone and asked.max_restarts == 100
    assert [asked.training_script, *asked.training_script_args] == [
        *("towpath", "train", "a.toml", "strategy.outer.meet=10.77.0.1:29600"),
        *(f"log.folder=runs/{os.uname().nodename}", "x.y=1"),
    ]


def test_without_the_interface_of_the_vpn_nothing_starts(tmp_path: Path) -> None:
    script = ROOT / "examples" / "clusters" / "two_flats.sh"
    done = subprocess.run(
        ["bash", str(script), "10.77.0.1", "a.toml"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and "LINK" in done.stderr
