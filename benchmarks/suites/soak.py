"""Check that a run whose ranks are killed again and again ends like an undisturbed one, to the bit.

    soak [CASE …] [--kills 20] [--seed 0] [--folder DIR] [--quick] [--resume]

`torchrun --max-restarts` runs `towpath train` with four ranks. A random rank gets SIGKILL at a random moment: a few
steps and a part of one after a restart, or while the ranks still start. Every second step is saved. Every fsync takes a
tenth of a second longer, as on a slow disk, so that many kills happen during a save. At the end:

    every row of metrics has the loss of the undisturbed run, to the bit, also
    for steps that were taken twice
    every file of the last checkpoint (weights, optimizer, random numbers,
    codecs) equals that of the undisturbed run, to the byte
    every published checkpoint verifies, the newest one also after each kill,
    and no unfinished file is left

After a failure, the folder of the run stays.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.harness.suite import Settings, Suite

RANKS = 4
SAVED_EVERY = 2
STEPS_BETWEEN_KILLS = 6  # at most
SLOW_SECONDS = 0.1
QUICK_KILLS = 1
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class SoakCase:
    """A training with options of `towpath train` in addition to the common ones."""

    name: str
    train: tuple[str, ...]

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train undisturbed and with kills, and compare."""
        from benchmarks.harness.figures import Check

        options = settings.options
        kills = QUICK_KILLS if settings.quick else options.kills
        folder = Path(tempfile.mkdtemp(prefix="towpath-soak-", dir=options.folder))
        settings.say(f"{self.name}: {folder}")
        found = soak(self, folder, kills, options.seed, settings.say)
        shutil.rmtree(folder)
        return {"checks": [Check("rows lost", found["rows_lost"])], "seed": options.seed, **found}


CASES = (
    SoakCase("zero3", ("strategy.name=zero3",)),
    SoakCase("zero++ feedback", ("strategy.name=zero++ feedback=both",)),
    SoakCase("paro-iig", ("strategy.name=paro-iig",)),
    SoakCase("paro-iig protected", ("strategy.name=paro-iig", "strategy.protect=2")),
)


class TrainingRun:
    """A run of `towpath train` under torchrun, in a folder of its own."""

    def __init__(self, case: SoakCase, folder: Path, steps: int) -> None:
        self.folder, self.pids = folder, folder / "pids"
        self.checkpoints, self.metrics = folder / "checkpoints", folder / "metrics.jsonl"
        self.pids.mkdir(parents=True)
        from towpath.train.data import prepare

        corpus = folder.parent / "corpus.txt"
        words = random.Random(0).choices(("lock", "barge", "weir", "horse", "towpath", "canal"), k=20_000)
        tokens = folder.parent / "tokens"
        if not tokens.exists():  # the undisturbed run has the same
            corpus.write_text(" ".join(words))
            prepare([str(corpus)], tokens)
        self._configuration = folder / "soak.toml"
        self._configuration.write_text("")
        self._options = [
            *("model.width=64", "model.depth=2", "model.heads=4", f"data.tokens={tokens}"),
            *(f"train.steps={steps}", "train.batch=8", "train.micro_batch=2", "train.length=32", "train.threads=1"),
            *("strategy.nodes=2x2", f"log.folder={folder}"),
            *(f"checkpoint.every={SAVED_EVERY}", "checkpoint.keep=8", *case.train),
        ]

    @contextmanager
    def started(self, restarts: int) -> Generator[subprocess.Popen[bytes]]:
        """Start torchrun, and end it with the block."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
        command += ["-m", __name__, str(self.pids), "train", str(self._configuration), *self._options]
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with (self.folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.terminate()  # torchrun ends its ranks
                process.wait()

    def to_the_end(self) -> None:
        """Run without kills."""
        with self.started(0) as launcher:
            self.expect(launcher.wait() == 0, "failed")

    def expect(self, held: bool, what: str) -> None:
        """Raise `CaseError` with the end of the output if a condition does not hold."""
        from benchmarks.harness.candidates import CaseError

        if not held:
            tail = (self.folder / "output.txt").read_text(errors="replace")[-4000:]
            raise CaseError(f"{tail}\n{self.folder.name}: {what}")

    def ranks(self, before: set[int], launcher: subprocess.Popen[bytes]) -> dict[int, int]:
        """Return the process of each rank, once all are there that started after those of `before`."""
        while True:
            found = {rank: int((self.pids / str(rank)).read_text() or 0) for rank in range(RANKS) if self._said(rank)}
            if len(found) == RANKS and not before & {0, *found.values()}:
                return found
            self.expect(launcher.poll() is None, f"torchrun ended early, with {launcher.returncode}")
            time.sleep(0.005)

    def _said(self, rank: int) -> bool:
        return (self.pids / str(rank)).exists()

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics so far."""
        if not self.metrics.exists():
            return []
        rows: list[dict[str, Any]] = []
        for line in self.metrics.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # the rank that writes was killed in the middle of a row
        return [row for row in rows if row["kind"] in ("train", "validation")]

    def partial(self) -> list[str]:
        """Return the names of unfinished checkpoints."""
        return [p.name for p in self.checkpoints.glob("*") if "." in p.name]


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill of a rank."""

    rank: int
    steps: int  # after a restart
    step: int  # the last in the metrics of rank 0
    saving: bool  # a checkpoint was unfinished
    seconds_to_restart: float


def disturb(run: TrainingRun, kills: int, dice: random.Random, say: Callable[[str], None]) -> list[Kill]:
    """Run to the end, and kill a rank so many times."""
    from towpath import checkpoint

    done: list[Kill] = []
    seen: set[int] = set()
    starting_seconds = 5.0
    killed_at = time.perf_counter()
    with run.started(kills) as launcher:
        for _ in range(kills):
            ranks = run.ranks(seen, launcher)
            began = time.perf_counter()
            waited = began - killed_at
            rows, steps = len(run.rows()), dice.randrange(STEPS_BETWEEN_KILLS + 1)
            while steps and len(run.rows()) < rows + steps:
                run.expect(launcher.poll() is None, f"torchrun ended early, with {launcher.returncode}")
                time.sleep(0.005)
            if steps:
                starting_seconds = min(starting_seconds, time.perf_counter() - began)
            time.sleep(dice.uniform(0.0, 0.2 if steps else starting_seconds))
            doomed = dice.randrange(RANKS)
            saving = bool(run.partial())
            os.kill(ranks[doomed], signal.SIGKILL)
            killed_at = time.perf_counter()
            seen |= set(ranks.values())
            at = max((row["step"] for row in run.rows()), default=0)
            done.append(Kill(doomed, steps, at, saving, waited))
            newest = checkpoint.latest(run.checkpoints)
            if newest is not None:
                problem = checkpoint.verify(newest)
                run.expect(problem is None, f"after a kill: {problem}")
            say(f"kill {len(done):2}: rank {doomed} at step {at}{', while saving' if saving else ''}")
        run.expect(launcher.wait() == 0, f"torchrun ended with {launcher.returncode}")
    return done


def compare(disturbed: TrainingRun, undisturbed: TrainingRun) -> dict[str, Any]:
    """Compare the two runs. Raise `CaseError` with what differs."""
    from towpath import checkpoint

    expected = {(row["kind"], row["step"]): row["loss"] for row in undisturbed.rows()}
    rows = [((row["kind"], row["step"]), row["loss"]) for row in disturbed.rows()]
    differing = sorted({key for key, loss in rows if expected.get(key) != loss})
    disturbed.expect(not differing, f"losses differ: {differing[:5]}")
    missing = sorted(expected.keys() - {key for key, _ in rows})
    last, reference = (max(run.checkpoints.glob("step-??????")) for run in (disturbed, undisturbed))
    disturbed.expect(last.name == reference.name, f"ended with {last.name}, expected {reference.name}")
    files = sorted(path.name for path in reference.glob("*.safetensors"))
    for name in files:
        equal = (last / name).read_bytes() == (reference / name).read_bytes()
        disturbed.expect(equal, f"{last.name}/{name} differs from the undisturbed run's")
    published = sorted(disturbed.checkpoints.glob("step-??????"))
    for path in published:
        problem = checkpoint.verify(path)
        disturbed.expect(problem is None, f"{problem}")
    disturbed.expect(not disturbed.partial(), f"left behind: {disturbed.partial()}")
    return {
        "steps": len([key for key in expected if key[0] == "train"]),
        "steps_taken": len([key for key, _ in rows if key[0] == "train"]),
        "rows_lost": len(missing),
        "files_alike": len(files),
        "checkpoints_verified": len(published),
    }


def soak(case: SoakCase, folder: Path, kills: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run twice, once with kills, and compare."""
    steps = (STEPS_BETWEEN_KILLS + 2) * kills  # more than can be taken before the last kill
    undisturbed, disturbed = (
        TrainingRun(case, folder / "undisturbed", steps),
        TrainingRun(case, folder / "disturbed", steps),
    )
    undisturbed.to_the_end()
    done = disturb(disturbed, kills, random.Random(seed), say)
    found = compare(disturbed, undisturbed)
    return {"kills": len(done), "while_saving": sum(k.saving for k in done), **found, "each": [asdict(k) for k in done]}


def as_rank(pids: str, arguments: list[str]) -> None:
    """Run `towpath` with a slow disk, in a process that writes its pid to a file."""
    from towpath.topology.launcher import local_rank

    name = Path(pids, f".{local_rank()}")
    name.write_text(str(os.getpid()))
    name.rename(Path(pids, str(local_rank())))
    from towpath.cli.main import main

    faulthandler.register(signal.SIGUSR1)  # kill -USR1 prints its stacks
    quick = os.fsync

    def slow(handle: int) -> None:
        time.sleep(SLOW_SECONDS)
        quick(handle)

    os.fsync = slow
    sys.argv = ["towpath", *arguments]
    main()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))


def __getattr__(name: str) -> tuple[Suite, ...]:
    """Make the suite when it is needed. A rank that starts imports nothing that it does not use."""
    if name != "SUITES":
        raise AttributeError(name)
    from benchmarks.harness.suite import Suite

    return (Suite("soak", __doc__ or "", CASES, options=_options),)


if __name__ == "__main__":
    as_rank(sys.argv[1], sys.argv[2:])
