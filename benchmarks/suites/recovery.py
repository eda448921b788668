"""Measure the seconds from the loss of a node, or of its ranks, to the next step of the training.

    recovery [CASE …] [--losses 10] [--folder DIR] [--quick] [--resume]

Three nodes of two ranks run `towpath train` with `protect`, as a user starts it. At moments that seeded dice choose,
and once the nodes hold a new snapshot, they lose something, one loss after another in the same run:

    node     one node with its network, processes, memory and disk. It is rebuilt, empty, and its torchrun started, so
             torchrun and its ranks are fresh processes
    ranks    the ranks of one node. Memory and keepers stay, so all ranks fork from a warm process

The seconds after noticing, and their parts, are those that the training logs. A rank notices when its process ends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.candidates import CaseError
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.suites.healing import EVERY, PATIENCE_SECONDS, STRATEGIES, TOPOLOGY, data_options
from lab import ElasticRun, Lab
from lab.links import address

CABLE = "1gbit"
LOSSES = 10
MOST_SECONDS = {"node": 20.0, "ranks": 10.0}  # the median, after noticing
MOST_TO_NOTICE = 5.0  # seconds
_STEPS_BETWEEN = range(EVERY + 2, 2 * EVERY + 2)  # from a healing to the next loss: a snapshot is complete meanwhile
_HEALED = re.compile(r"healed: the next step came ([\d.]+) s after a loss was noticed \((.*)\)")


@dataclass(frozen=True, slots=True)
class RecoveryCase:
    """One run that loses something again and again."""

    strategy: str
    lost: str
    model: str = "17m"

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"{self.strategy} {self.lost}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train, lose, and read the seconds that the training logs."""
        model = "tiny" if settings.quick else self.model
        losses = 2 if settings.quick else settings.options.losses
        with (
            tempfile.TemporaryDirectory(prefix="towpath-recovery-", dir=settings.options.folder) as folder,
            Lab(TOPOLOGY, inter=CABLE, head=True) as lab,
        ):
            options = [*data_options(Path(folder), model), f"strategy.name={self.strategy}", "train.steps=1000000"]
            options += [f"log.folder={lab.disk / 'run'}", f"strategy.protect={EVERY}"]
            run = RecoveryRun(lab, lab.elastic(["-m", "towpath", "train", *options], Path(folder, "output")))
            with run.job:
                found = list(run.losses(self.lost, losses, random.Random(self.name), settings.say))
        after = [sum(each["parts"].values()) for each in found]
        checks = [
            Check("seconds from noticing to the next step, median", statistics.median(after), MOST_SECONDS[self.lost])
        ]
        checks += [Check("the longest", max(after))]
        checks += [Check("seconds to notice, the longest", max(each["noticing"] for each in found), MOST_TO_NOTICE)]
        parts = {part for each in found for part in each["parts"]}
        for part in sorted(parts, key=[*found[0]["parts"]].index):
            checks.append(Check(f"{part}, median", statistics.median(each["parts"].get(part, 0.0) for each in found)))
        return {"checks": checks, "losses": found}


class RecoveryRun:
    """A training in a lab, seen from the host."""

    def __init__(self, lab: Lab, job: ElasticRun) -> None:
        self.job = job
        self._lab = lab

    def losses(
        self, what: str, count: int, dice: random.Random, say: Callable[[str], None]
    ) -> Iterator[dict[str, Any]]:
        """Start the training, and yield what followed each loss."""
        for node in range(TOPOLOGY.nodes):
            self.job.start(node)
        self._wait("the first step", lambda: self._step() > 0)
        for number in range(count):
            first, node = self._step(), dice.randrange(TOPOLOGY.nodes)
            until = first + dice.choice(_STEPS_BETWEEN)
            self._wait(f"step {until}", lambda until=until: self._step() >= until)
            time.sleep(dice.random() * 2)  # anywhere in a step or two
            step, lost_at = self._step(), time.monotonic()
            if what == "node":
                self._lab.destroy(node)
                self._lab.rebuild(node)
                self.job.start(node)
            else:
                for pid in self._ranks(node):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self._wait("healing", lambda number=number: len(self._healed()) > number)
            total, (seconds, parts) = time.monotonic() - lost_at, self._healed()[-1]
            say(
                f"loss {number + 1} of {count}: {what} {node}, step {step}: {total:.1f} s, {seconds:.1f} after noticing"
            )
            yield {"node": node, "step": step, "noticing": round(max(0.0, total - seconds), 2), "parts": parts}

    def _healed(self) -> list[tuple[float, dict[str, float]]]:
        """Return what rank 0 logged, which is always on node 0."""
        found = _HEALED.findall(self.job.output(0))
        return [
            (float(total), {p.rpartition(" ")[0]: float(p.rpartition(" ")[2]) for p in parts.split(", ")})
            for total, parts in found
        ]

    def _step(self) -> int:
        """Return the newest step that rank 0 noted on its disk."""
        try:
            [launcher] = self._launchers(0)
            lines = Path(f"/proc/{launcher}/root{self._lab.disk}/run/metrics.jsonl").read_text().splitlines()
            return max((json.loads(line)["step"] for line in lines[-5:]), default=0)
        except (ValueError, OSError):  # there is no launcher or file yet, or a line is being written
            return 0

    def _launchers(self, node: int) -> list[int]:
        return [pid for pid, words in _commands() if "torch.distributed.run" in words and address(node) in words]

    def _ranks(self, node: int) -> list[int]:
        launchers = self._launchers(node)
        return [pid for pid, _ in _commands() if _parent(pid) in launchers]

    def _wait(self, what: str, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            ended = self.job.ended(0.05)
            if ended or time.monotonic() > until:
                tails = "\n".join(f"node {node}: …{self.job.output(node)[-1500:]}" for node in range(TOPOLOGY.nodes))
                raise CaseError(f"{tails}\nno {what}: the launchers ended with {ended}")


def _commands() -> Iterator[tuple[int, list[str]]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                yield int(folder.name), (folder / "cmdline").read_text(errors="replace").split("\0")


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--losses", type=int, default=LOSSES, help=f"in each run (default: {LOSSES})")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))


CASES: Sequence[RecoveryCase] = [RecoveryCase(strategy, lost) for lost in MOST_SECONDS for strategy in STRATEGIES]
SUITES = (Suite("recovery", __doc__ or "", CASES, options=_options),)
