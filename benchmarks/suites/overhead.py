"""Measure what the engine costs by itself: on one rank, in the step check, and in another commit."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import towpath
from benchmarks import gpt
from benchmarks.harness import figures, results
from benchmarks.harness.candidates import CaseError, LabPlace, Launch
from benchmarks.harness.comparison import compare, started
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.peers import TrainStep
from benchmarks.workload import Workload
from towpath.comparison import interleave
from towpath.core.strategy import TransferKind
from towpath.engine import optimizer_steps
from towpath.engine.agree.boundary import CHECK_EVERY, BoundaryCheck
from towpath.observe.stats import totals

# One rank -------------------------------------------------------------------------------------------------------------

BARE = "bare"
PEERS = ("fsdp2", "fsdp2 tuned", "torch-ddp")
AT_MOST = 1.03
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class OverheadCase:
    """One rank of a strategy and of peers, against the bare module."""

    name: str
    strategy: str
    workload: Workload

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the steps."""
        workload = self.workload.quick() if settings.quick else self.workload
        names = (self.strategy, BARE, *PEERS)
        place = LabPlace(workload.topology)
        launches = {name: Launch(place, TrainStep, (name, workload), WARM_UP) for name in names}
        with started(launches, settings.say) as made:
            for one in made.values():
                one.ask("forget")  # the warm-up, whose first step imports modules and makes buffers
            found = compare(made, settings.rounds, settings.say)
            [facts] = made[self.strategy].ask("facts")
        return {
            "checks": [
                figures.ratio(found.seconds, self.strategy, BARE, AT_MOST),
                *(figures.ratio(found.seconds, peer, BARE) for peer in PEERS),
                Check("the engine's own time on the host / step", facts["host_share"]),
            ],
            **found.recorded(),
            "stats": facts["stats"],
        }


# The step check -------------------------------------------------------------------------------------------------------

CHECK_WARM_UP, CHECK_STEPS = 5, 20
CHECK_LIMIT = 0.01


@dataclass(frozen=True, slots=True)
class StepCheckCase:
    """The step check of a strategy. Parameters are compared in every `check_every`-th step."""

    name: str
    strategy: str
    check_every: int

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train on two ranks of this machine."""
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_check_rank, (folder, self), nprocs=2)  # pyright: ignore
            found: dict[str, Any] = json.loads(Path(folder, "found").read_text())
        share = statistics.median(found["shares"])
        return {**found, "checks": [Check("time of the comparison / step", share, at_most=CHECK_LIMIT)]}


def _check_rank(rank: int, folder: str, case: StepCheckCase) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    spent = {"steps": 0.0, "boundary": 0.0}
    optimizer_steps._after_step = _timed(optimizer_steps._after_step, spent, "steps")
    BoundaryCheck.compare = _timed(BoundaryCheck.compare, spent, "boundary")
    found = measure_check(case, rank, spent)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure_check(case: StepCheckCase, rank: int, spent: dict[str, float]) -> dict[str, Any]:
    """Train, and return the share of each step that the comparison took."""
    torch.manual_seed(0)
    model: Any = gpt.GPT(width=512, depth=5, heads=8, context=128)
    parameters = sum(p.numel() for p in model.parameters())
    towpath.shard(model, case.strategy, topology=towpath.Topology(2, 1), check_every=case.check_every)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data, shares, steps = gpt.batches(rank, batch=4, length=128), list[float](), list[float]()
    for step in range(CHECK_WARM_UP + CHECK_STEPS):
        spent.update(dict.fromkeys(spent, 0.0))
        waited = _waited(model)
        began = time.perf_counter()
        model(*next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
        if step >= CHECK_WARM_UP:
            own = spent["steps"] + spent["boundary"] - (_waited(model) - waited)
            steps.append(seconds)
            shares.append(own / seconds)
    return {"parameters": parameters, "seconds": steps, "shares": shares}


def _waited(model: Any) -> float:
    return totals(model).exposed_by_kind.get(TransferKind.UNUSED_PARAMS, 0.0)


def _timed(function: Callable[..., Any], spent: dict[str, float], what: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[what] += time.perf_counter() - began

    return timed


# Another commit -------------------------------------------------------------------------------------------------------

RANK = Path(__file__).with_name("checkout_rank.py")
CHECKOUT_STEPS, CHECKOUT_WARM_UP = 8, 5
CHECKOUT_LIMIT = 0.98


class CheckoutRanks:
    """The ranks of one checkout."""

    def __init__(self, tree: Path, case: CheckoutCase, stack: ExitStack) -> None:
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
        """Take steps, and return the median of their seconds."""
        first = self._ranks[0]
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write(f"{count}\n")
        first.stdin.flush()
        answer = first.stdout.readline()
        if not answer:
            raise CaseError("a rank has ended; its error stands above")
        return float(answer)


@dataclass(frozen=True, slots=True)
class CheckoutCase:
    """A strategy on ranks of this machine."""

    name: str
    strategy: str
    nodes: int = 2
    ranks: int = 2

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare steps of the other commit with steps of HEAD."""
        against: str = settings.options.against
        seconds: dict[str, list[float]] = {"old": [], "new": []}
        order: list[list[str]] = []
        with checkout(against) as old, checkout("HEAD") as new, ExitStack() as stack:
            sides = {"old": CheckoutRanks(old, self, stack), "new": CheckoutRanks(new, self, stack)}
            for side in sides.values():
                side.steps(CHECKOUT_WARM_UP)
            for number in range(settings.rounds):
                order.append(interleave(list(sides), number))
                for name in order[-1]:
                    seconds[name].append(sides[name].steps(CHECKOUT_STEPS))
        checks = [figures.speedup(seconds, "old / new", "new", "old", CHECKOUT_LIMIT)]
        measured = {"against": against, "rounds": settings.rounds, "order": order, "seconds": seconds}
        return {**measured, "medians": figures.medians(seconds), "checks": checks}


@contextmanager
def checkout(commit: str) -> Generator[Path]:
    """Check a commit out into a temporary worktree, with the native extension that is installed here."""
    from towpath.codecs.kernels import _native

    with tempfile.TemporaryDirectory(prefix="towpath-checkout-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(results.ROOT), "worktree"]
        done = subprocess.run([*git, "add", "--detach", "--force", str(tree), commit], capture_output=True, text=True)
        if done.returncode:
            raise CaseError(f"git cannot check out {commit}: {' '.join(done.stderr.split())}")
        try:
            extension = Path(str(_native.__file__))
            (tree / "src" / "towpath" / "codecs" / "kernels" / extension.name).write_bytes(extension.read_bytes())
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


# Suites ---------------------------------------------------------------------------------------------------------------

_ONE_RANK = towpath.Topology(1, 1)

OVERHEAD = """Measure the engine where nothing is sent: one rank against the bare module, and its time on the host.

    overhead [CASE …] [--rounds 6] [--quick] [--resume]

A sample is one optimizer step. The limit of a strategy on one rank is 1.03 of the bare module's time.
"""

STEP_CHECK = """Measure the time that ranks need to compare what they did in a step, inside the process that trains.

    step_check [CASE …]

Two ranks of this machine train a GPT. The figure is all that a rank does for the comparison on the training thread: it
records each optimizer step, makes digests and checksums, packs and unpacks them. It does not wait for the other rank.
With "every step", parameters are compared in every step instead of every hundredth.
"""

CHECKOUTS = """Compare steps of another commit with steps of HEAD.

    checkouts --against COMMIT [CASE …] [--rounds 25]

Each side has ranks of its own on the loopback of this machine, and the code of a checkout. Changes that are not
committed do not count. The model is small, so that a step is mostly the engine's own time. A sample is a few steps. The
ratio is old seconds / new seconds, above 1 where HEAD is faster.
"""


def _against(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", required=True, metavar="COMMIT", help="the other side")


SUITES = (
    Suite(
        "overhead",
        OVERHEAD,
        [
            OverheadCase(f"{name}-micro{micro_steps}", name, Workload(_ONE_RANK, micro_steps))
            for name in ("zero3", "mics")
            for micro_steps in (1, 4)
        ],
    ),
    Suite(
        "step_check",
        STEP_CHECK,
        [
            StepCheckCase(f"{name}, every step" if every == 1 else name, name, every)
            for name in ("zero3", "ddp")
            for every in (CHECK_EVERY, 1)
        ],
    ),
    Suite(
        "checkouts",
        CHECKOUTS,
        [
            *(CheckoutCase(name, name) for name in ("zero3", "mics", "paro-iig", "zero++")),
            *(CheckoutCase(f"{name}, two ranks", name, 2, 1) for name in ("zero3", "ddp")),
            CheckoutCase("one rank", "zero3", 1, 1),
        ],
        rounds=25,
        options=_against,
    ),
)
