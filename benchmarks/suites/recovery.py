"""Measure the seconds from the loss of a node, or of its ranks, to the next step of the training.

    recovery [CASE …] [--losses 10] [--folder DIR] [--quick] [--resume]

Three nodes of two ranks run `towpath train` with `protect`, as a user starts it. At moments that seeded dice choose,
and once the nodes hold a new snapshot, they lose something, one loss after another in the same run:

    node     one node with its network, processes, memory and disk. It is rebuilt, empty, and its torchrun started, so
             torchrun and its ranks are fresh processes
    ranks    the ranks of one node. Memory and keepers stay, so all ranks fork from a warm process
    fewer    one node as above, but the training goes on with two nodes, and the rebuilt one joins later

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
from typing import Any, TypeVar

from benchmarks.harness.candidates import CaseError
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.suites.healing import EVERY, PATIENCE_SECONDS, STRATEGIES, TOPOLOGY, data_options
from lab import ElasticRun, Lab
from lab.links import address

CABLE = "1gbit"
LOSSES = 10
MOST_SECONDS = {"node": 20.0, "ranks": 10.0, "fewer": None}  # the median, after noticing
MOST_TO_NOTICE = 5.0  # seconds
_STEPS_BETWEEN = range(EVERY + 2, 2 * EVERY + 2)  # from a healing to the next loss: a snapshot is complete meanwhile
T = TypeVar("T")
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
            fewest = TOPOLOGY.nodes - 1 if self.lost == "fewer" else None
            job = lab.elastic(["-m", "towpath", "train", *options], Path(folder, "output"), fewest=fewest)
            run = RecoveryRun(lab, job)
            with job:
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
        self._lab, self._known = lab, [0] * TOPOLOGY.nodes
        self._away: int | None = None  # a node whose torchrun is not started yet

    def losses(
        self, what: str, count: int, dice: random.Random, say: Callable[[str], None]
    ) -> Iterator[dict[str, Any]]:
        """Start the training, and yield what followed each loss."""
        for node in range(TOPOLOGY.nodes):
            self.job.start(node)
        self._wait("the first step", lambda: self._step() > 0)
        for number in range(count):
            self._wait("all nodes", lambda: all(map(self._ranks, range(TOPOLOGY.nodes))))
            first, node = self._step(), dice.randrange(TOPOLOGY.nodes)
            until = first + dice.choice(_STEPS_BETWEEN)
            self._wait(f"step {until}", lambda until=until: self._step() >= until)
            time.sleep(dice.random() * 2)  # anywhere in a step or two
            step, lost_at = self._step(), time.monotonic()
            if what != "ranks":
                self._away = node
                self._lab.destroy(node)
                self._lab.rebuild(node)
            if what == "node":
                self._come_back()
            if what == "ranks":
                for pid in self._ranks(node):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            seconds, parts = self._wait("healing", self._healing)
            total = time.monotonic() - lost_at
            say(
                f"loss {number + 1} of {count}: {what} {node}, step {step}: {total:.1f} s, {seconds:.1f} after noticing"
            )
            if what == "fewer":
                self._come_back()
            yield {"node": node, "step": step, "noticing": round(max(0.0, total - seconds), 2), "parts": parts}

    def _come_back(self) -> None:
        assert self._away is not None
        self.job.start(self._away)
        self._away = None

    def _healing(self) -> tuple[float, dict[str, float]] | None:
        """Return what rank 0 logged since the last call, on whichever node: the seconds to the next step, by part."""
        for node, known in enumerate(self._known):
            found = _HEALED.findall(self.job.output(node))
            if len(found) > known:
                self._known[node] = len(found)
                total, parts = found[-1]
                each = (part.rpartition(" ") for part in parts.split(", "))
                return float(total), {part: float(seconds) for part, _, seconds in each}
        return None

    def _step(self) -> int:
        """Return the newest step that rank 0 noted, on the disk of its node."""
        return max(map(self._step_on, range(TOPOLOGY.nodes)))

    def _step_on(self, node: int) -> int:
        try:
            [launcher] = self._launchers(node)
            lines = Path(f"/proc/{launcher}/root{self._lab.disk}/run/metrics.jsonl").read_text().splitlines()
            return max((json.loads(line)["step"] for line in lines[-5:]), default=0)
        except (ValueError, OSError):  # there is no launcher or file, or a line is being written
            return 0

    def _launchers(self, node: int) -> list[int]:
        return [pid for pid, words in _commands() if "torch.distributed.run" in words and address(node) in words]

    def _ranks(self, node: int) -> list[int]:
        launchers = self._launchers(node)
        return [pid for pid, _ in _commands() if _parent(pid) in launchers]

    def _wait(self, what: str, found: Callable[[], T | None]) -> T:
        """Return what `found` returns, once it is true."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not (value := found()):
            ended = {node: code for node, code in self.job.ended(0.05).items() if node != self._away}
            if ended or time.monotonic() > until:
                tails = "\n".join(f"node {node}: …{self.job.output(node)[-1500:]}" for node in range(TOPOLOGY.nodes))
                raise CaseError(f"{tails}\nno {what}: the launchers ended with {ended}")
        return value


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
