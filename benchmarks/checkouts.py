"""What a change of the engine costs or saves: steps of another commit against those of this tree's, in turns.

    python benchmarks/checkouts.py --against COMMIT [CASE …] [--rounds 25]

Each side has ranks of its own on this machine's loopback, and its code from a checkout of its own; the other side is
HEAD, not what is not committed yet. The model is small, so that a step is mostly the engine's own time. A turn is some
steps; the ratio is old seconds / new seconds, above 1 where this commit is faster.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towpath.bench.harness import figures, stamp, turns
from towpath.bench.harness.failure import CaseError
from towpath.bench.harness.suite import Settings, Suite

RANK = Path(__file__).with_name("checkout_rank.py")
STEPS, WARM_UP = 8, 5
AT_LEAST = 0.98


class Side:
    """The ranks of one checkout."""

    def __init__(self, tree: Path, case: Case, stack: ExitStack) -> None:
        world = case.nodes * case.ranks
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="towpath-checkouts-")) + "/store"
        command = [sys.executable, str(RANK), str(tree), store]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._ranks = [
            subprocess.Popen(
                [*command, *map(str, (rank, world, case.nodes)), case.strategy],
                stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for rank in range(world)
        ]
        for process in self._ranks:
            stack.enter_context(process)
            stack.callback(process.kill)

    def steps(self, count: int) -> float:
        first = self._ranks[0]
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write(f"{count}\n")
        first.stdin.flush()
        answer = first.stdout.readline()
        if not answer:
            raise CaseError("a rank has ended; its error stands above")
        return float(answer)


# --- the race --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    strategy: str
    nodes: int = 2
    ranks: int = 2

    def measure(self, settings: Settings) -> dict[str, Any]:
        against: str = settings.options.against
        seconds: dict[str, list[float]] = {"old": [], "new": []}
        order: list[list[str]] = []
        with checkout(against) as old, checkout("HEAD") as new, ExitStack() as stack:
            sides = {"old": Side(old, self, stack), "new": Side(new, self, stack)}
            for side in sides.values():
                side.steps(WARM_UP)
            for turn in range(settings.rounds):
                order.append(turns.order(list(sides), turn))
                for name in order[-1]:
                    seconds[name].append(sides[name].steps(STEPS))
        found = figures.ratio(seconds, "old", "new")
        checks = [figures.Check(found.what, found.found, at_least=AT_LEAST, interval=found.interval)]
        measured = {"against": against, "rounds": settings.rounds, "order": order, "seconds": seconds}
        return {**measured, "medians": figures.medians(seconds), "checks": checks}


@contextmanager
def checkout(commit: str) -> Generator[Path]:
    """With the native extension that is installed here."""
    from towpath.codecs.kernels import _native

    with tempfile.TemporaryDirectory(prefix="towpath-checkout-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(stamp.ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--force", str(tree), commit], check=True, capture_output=True)
        try:
            extension = Path(str(_native.__file__))
            (tree / "src" / "towpath" / "codecs" / "kernels" / extension.name).write_bytes(extension.read_bytes())
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", required=True, metavar="COMMIT", help="the other side")


CASES = [
    *(Case(name, name) for name in ("zero3", "mics", "paro-iig", "zero++")),
    *(Case(f"{name}, two ranks", name, 2, 1) for name in ("zero3", "ddp")),
    Case("one rank", "zero3", 1, 1),
]
SUITE = Suite("checkouts", __doc__ or "", CASES, rounds=25, options=add_options)

if __name__ == "__main__":
    SUITE.main()
