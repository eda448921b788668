"""Kill islands that come and go, one after another, and check that the others lose nothing.

    islands [CASE …] [--kills 10] [--period 60] [--seed 0] [--folder DIR] [--quick] [--resume]

Each node of a lab is an island of one rank with a torchrun of its own. It runs `towpath train`, with int4 exchanges
over a cable of 10 Mbit/s. A step takes a tenth of a second at least, because all islands share the cores of this
machine. Once per period, one rank gets SIGKILL, and torchrun starts it again. Seeded dice choose which one, and when:
somewhere in the local steps of a period, or in an exchange. In the cases "2x1 …", the lost island is not started again.
At the end:

    every step of an island that was not lost is in the weight of exactly one
    result that was applied, and so is every step of a lost one up to its last
    result
    no samples were read twice, by any two islands, those that returned too
    the tokens in applied results are at least 0.95 of those that islands of an
    undisturbed run train in the seconds that these islands were alive
    all islands end with the same held-out loss, which is within 1 % of that of
    an undisturbed run of as many tokens

An island is alive from the moment when its process has built the model, loaded its checkpoint and could train, until it
is killed or ends. So the seconds in which it looks for the others and takes their weights count against it, and those
in which its process starts do not. A second figure counts all seconds of all machines. Both begin when all islands
take part in an exchange for the first time. After a failure, the folder of the run stays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.candidates import CaseError
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from lab import ElasticRun, Lab
from towpath.topology.cluster import Topology

CABLE = "10mbit"
EVERY = 32  # steps between exchanges
STEP_SECONDS = 0.1
BATCH, LENGTH = 8, 64
KILLS, PERIOD_SECONDS = 10, 60.0
QUICK_KILLS, QUICK_PERIOD_SECONDS = 1, 4.0
RETURN_SECONDS = 20.0  # after the last kill, at least
EXCHANGE_SECONDS = 0.3  # about
GOODPUT, LOSS = 0.95, 0.01
PATIENCE_SECONDS = 120.0
ROOT = Path(__file__).parents[2]
OPTIONS = (
    *("model.width=64", "model.depth=2", "model.heads=4", "strategy.name=zero1"),
    *(f"train.batch={BATCH}", f"train.micro_batch={BATCH}", f"train.length={LENGTH}", "train.threads=1"),
    *("strategy.outer.meet=node0:29600", f"strategy.outer.every={EVERY}", "strategy.outer.codec=int4"),
    *(f"checkpoint.every={4 * EVERY}", "checkpoint.keep=2"),
)


@dataclass(frozen=True, slots=True)
class IslandsCase:
    """Islands of one rank. `ends`: the one island that is lost for good, or None if those that are lost return."""

    islands: int
    ends: int | None = None

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"{self.islands}x1" + ("" if self.ends is None else f" {('first', 'second')[self.ends]} ends")

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train with losses, then undisturbed with as many tokens, and compare."""
        options = settings.options
        folder = Path(tempfile.mkdtemp(prefix="towpath-islands-", dir=options.folder))
        settings.say(f"{self.name}: {folder}")
        kills = 1 if self.ends is not None else QUICK_KILLS if settings.quick else options.kills
        period = QUICK_PERIOD_SECONDS if settings.quick else options.period
        run = IslandsRun(
            self, folder / "disturbed", steps_of((kills * period + max(period, RETURN_SECONDS)) / STEP_SECONDS)
        )
        run.carry_out(kills, period, random.Random(f"{self.name} {options.seed}"), settings.say)
        steps = sum(life.weight for life in run.lives()) / self.islands
        undisturbed = IslandsRun(self, folder / "undisturbed", steps_of(steps))
        undisturbed.carry_out(0, period, random.Random(0), settings.say)
        found = compare(run, undisturbed)
        shutil.rmtree(folder)
        # One island alone takes more steps for as many tokens, so its loss has no limit.
        limits = (LOSS, -LOSS) if self.ends is None and not settings.quick else (None, None)
        goodput = None if settings.quick else GOODPUT
        checks = [
            Check("local steps lost by islands that go on", found["steps_lost"], at_most=0),
            Check("samples read twice", found["samples_twice"], at_most=0),
            Check("goodput of the machines that are alive", found["goodput"], at_least=goodput),
            Check("goodput of all machines", found["goodput_of_all"]),
            Check("held-out loss / undisturbed, less 1", found["loss_ratio"] - 1, *limits),
        ]
        return {"checks": checks, "seed": options.seed, **found}


def steps_of(wanted: float) -> int:
    """Return a number of steps of whole periods, and two at least."""
    return max(2, round(wanted / EVERY)) * EVERY


@dataclass(slots=True)
class Life:
    """An island from its start to its end."""

    node: int
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def times(self, what: str) -> list[float]:
        """Return when something happened."""
        return [event["time"] for event in self.events if event["what"] == what]

    @property
    def was_killed(self) -> bool:
        """Whether this life ended by a signal."""
        return bool(self.times("killed"))

    @property
    def steps(self) -> list[int]:
        """The steps that it made."""
        return [event["step"] for event in self.events if event["what"] == "step"]

    def results(self, since: float = 0.0) -> list[dict[str, Any]]:
        """Return the exchanges of its own steps whose results it applied."""
        found = [event for event in self.events if event["what"] == "exchange" and not event["watches"]]
        # After the last result, islands average their weights, which are equal then.
        found = [event for event in found if event["counts"]]
        steps = [0, *(event["step"] for event in found)]
        own = [event for event, before in zip(found, steps, strict=False) if event["step"] > before]
        return [event for event in own if event["time"] > since]

    @property
    def weight(self) -> int:
        """The steps that are in results."""
        return sum(result["weight"] for result in self.results())

    def seconds_alive(self, since: float) -> float:
        """Return for how long it could train, from a moment on."""
        able, last = self.times("able"), [event["time"] for event in self.events if event["what"] != "able"]
        return max(0.0, max(last) - max(since, able[0])) if able else 0.0

    def steps_lost(self) -> int:
        """Return how many steps are in no result, or in two. After its last result, a lost island has lost its steps.

        A step that was made twice counts, too, and one that was left out.
        """
        steps, results = self.steps, self.results()
        wrong = sum(after != before + 1 for before, after in itertools.pairwise(steps))
        last = results[-1]["step"] if self.was_killed and results else steps[-1] if steps else 0
        made = 0 if self.was_killed and not results else len([step for step in steps if step <= last])
        return wrong + abs(made - self.weight)


class IslandsRun:
    """A run of islands in a lab of its own."""

    def __init__(self, case: IslandsCase, folder: Path, steps: int) -> None:
        self.case, self.folder, self.steps = case, folder, steps
        for name in ("events", "orders"):
            (folder / name).mkdir(parents=True)

    def carry_out(self, kills: int, period: float, dice: random.Random, say: Callable[[str], None]) -> None:
        """Train to the end, and kill islands meanwhile."""
        configuration = self.folder / "drill.toml"
        configuration.write_text("")
        command = ["-m", "benchmarks.suites.islands_rank", str(self.folder), str(STEP_SECONDS), "train"]
        command += [str(configuration), *OPTIONS, f"train.steps={self.steps}"]
        path = {"PYTHONPATH": str(ROOT), "TMPDIR": tempfile.gettempdir()}
        restarts = kills if self.case.ends is None else 0
        nodes = range(self.case.islands)
        with (
            Lab(Topology(self.case.islands, 1), inter=CABLE) as lab,
            lab.elastic(command, self.folder / "output", env=path, restarts=restarts, apart=True) as job,
        ):
            for node in nodes:
                job.start(node)
            self._await(job, "all islands trained", lambda: self.together() is not None)
            say(f"{self.folder.name}: {self.case.islands} islands train")
            for kill in range(1, kills + 1):
                self._kill(job, kill, period, dice, say)
            ended = job.ended(PATIENCE_SECONDS + 2 * self.steps * STEP_SECONDS)
            expected = {node: int(node == self.case.ends and kills > 0) for node in nodes}
            self.expect(ended == expected, f"the launchers ended with {ended}, expected {expected}", job)

    def _kill(
        self, job: ElasticRun, number: int, period: float, dice: random.Random, say: Callable[[str], None]
    ) -> None:
        """Kill an island, and wait until it trains again, unless it is lost for good."""
        phase = dice.choice(("step", "exchange"))
        seconds = dice.uniform(0.0, EVERY * STEP_SECONDS if phase == "step" else EXCHANGE_SECONDS)
        node = dice.randrange(self.case.islands) if self.case.ends is None else self.case.ends
        at = (self.together() or 0.0) + number * period
        self._await(job, "it was time for a kill", lambda: time.time() > at)
        part, before = self.folder / "orders" / "part", len(self.lives(node))
        done = max((life.steps[-1] for life in self.lives() if life.steps), default=0)
        if self.case.ends is None and (self.steps - done) * STEP_SECONDS < RETURN_SECONDS:
            say(f"kill {number:2}: left out, because node {node} could not return before the end")  # starts took long
            return
        part.write_text(json.dumps({"phase": phase, "seconds": seconds}))
        part.rename(self.folder / "orders" / f"node{node}.json")
        self._await(job, f"node {node} was killed", lambda: self.lives(node)[before - 1].was_killed)
        say(f"kill {number:2}: node {node}, {seconds:.2f} s in {phase}, step {self.lives(node)[before - 1].steps[-1]}")
        if self.case.ends is None:
            returned = f"node {node} trained again"
            self._await(job, returned, lambda: any(life.results() for life in self.lives(node)[before:]))

    def _await(self, job: ElasticRun, what: str, happened: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not happened():
            ended = {node: code for node, code in job.ended(0.1).items() if node != self.case.ends}
            self.expect(not ended, f"the launchers ended with {ended} before {what}", job)
            self.expect(time.monotonic() < until, f"it took more than {PATIENCE_SECONDS:.0f} s until {what}", job)

    def expect(self, held: bool, what: str, job: ElasticRun | None = None) -> None:
        """Raise `CaseError` with the end of each node's output if a condition does not hold."""
        if not held:
            nodes = range(self.case.islands) if job else ()
            tails = [f"node {node}: …{job.output(node)[-1500:]}" for node in nodes if job]
            raise CaseError("\n".join([*tails, f"{self.folder.name}: {what}"]))

    def lives(self, node: int | None = None) -> list[Life]:
        """Return the lives of an island, or of all."""
        if node is None:
            return [life for each in range(self.case.islands) for life in self.lives(each)]
        found: dict[int, Life] = {}
        path = self.folder / "events" / f"node{node}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue  # the rank was killed in the middle of a line, or is writing
            found.setdefault(event["life"], Life(node)).events.append(event)
        return list(found.values())

    def together(self) -> float | None:
        """Return when all islands took part in an exchange for the first time."""
        all_there = [e["time"] for life in self.lives() for e in life.results() if e["islands"] == self.case.islands]
        return min(all_there, default=None)

    def losses(self) -> set[float]:
        """Return the held-out losses with which the islands ended."""
        files = [self.folder / f"node{node}" / "metrics.jsonl" for node in range(self.case.islands)]
        rows = [json.loads(line) for path in files for line in path.read_text().splitlines() if line.startswith("{")]
        return {row["loss"] for row in rows if row["kind"] == "validation"}


def compare(run: IslandsRun, undisturbed: IslandsRun) -> dict[str, Any]:
    """Return the figures of a run next to those of an undisturbed one."""
    for each in (run, undisturbed):
        each.expect(len(each.losses()) == 1, f"the islands ended with other losses: {sorted(each.losses())}")
    # The steps of one undisturbed island in a second, with its exchanges.
    since = undisturbed.together()
    [*_, last] = undisturbed.lives(0)[-1].results()
    assert since is not None
    results = undisturbed.lives(0)[-1].results(since + EVERY * STEP_SECONDS / 2)  # the first one after all came
    rate = sum(result["weight"] for result in results) / (last["time"] - since)
    since, lives = run.together(), run.lives()
    assert since is not None
    counted = sum(result["weight"] for life in lives for result in life.results(since + EVERY * STEP_SECONDS / 2))
    positions = [event["position"] for life in lives for event in life.events if event["what"] == "step"]
    end = max(life.times("exchange")[-1] for life in lives if not life.was_killed)
    ((loss,), (expected,)) = run.losses(), undisturbed.losses()
    killed = [life for life in lives if life.was_killed]
    dropped = {e["step"] for life in lives for e in life.events if e["what"] == "exchange" and not e["counts"]}
    return {
        "kills": len(killed),
        "steps_lost": sum(life.steps_lost() for life in lives),
        "steps_of_killed_lost": sum(len(life.steps) for life in killed) - sum(life.weight for life in killed),
        "samples_twice": (len(positions) - len(set(positions))) * BATCH,
        "exchanges_dropped": len(dropped),
        "tokens": sum(life.weight for life in lives) * BATCH * LENGTH,
        "tokens_undisturbed": sum(life.weight for life in undisturbed.lives()) * BATCH * LENGTH,
        "tokens_per_second_of_island": rate * BATCH * LENGTH,
        "goodput": counted / (rate * sum(life.seconds_alive(since) for life in lives)),
        "goodput_of_all": counted / (rate * (end - since) * run.case.islands),
        "loss": loss,
        "loss_ratio": loss / expected,
        "seconds_to_return": _seconds_to_return(run),
    }


def _seconds_to_return(run: IslandsRun) -> list[dict[str, float]]:
    """Return for each island that returned how long that took, by part."""
    found: list[dict[str, float]] = []
    for node in range(run.case.islands):
        for before, life in itertools.pairwise(run.lives(node)):
            steps = [event for event in life.events if event["what"] == "step"]
            if steps and life.times("able"):
                marks = [before.times("killed")[0], life.times("able")[0], steps[0]["time"]]
                parts = [round(after - mark, 2) for mark, after in itertools.pairwise(marks)]
                found.append(dict(zip(("start", "join and first step"), parts, strict=True)))
    return found


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=KILLS, help=f"of islands that return (default: {KILLS})")
    parser.add_argument("--period", type=float, default=PERIOD_SECONDS, help="seconds from a kill to the next one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))


def _chosen(cases: Sequence[IslandsCase], options: argparse.Namespace) -> Sequence[IslandsCase]:
    return [case for case in cases if not options.quick or options.cases or case.ends is None]


CASES = (IslandsCase(4), IslandsCase(2, 0), IslandsCase(2, 1))
SUITES = (Suite("islands", __doc__ or "", CASES, options=_options, chosen=_chosen),)
