"""Destroy a node of three in the middle of a training, and check that it goes on as if nothing had happened.

    healing [CASE …] [--only mics] [--kills 20] [--shared] [--folder DIR] [--quick] [--resume]

Three nodes of two ranks run `towpath train` under `torchrun --max-restarts`, in a lab whose nodes have memory and a
disk of their own. Every run loses one node: its network, its processes, its memory and its disk. The number of the run
decides where in a step: forward, backward, optimizer, snapshot, exchange between buddies, its publishing, or while the
ranks start again or load after a first loss. Seeded dice choose the rank and the step. In every second round of
phases, the cable is cut first, so that the others see silence. Then the node is rebuilt, empty, and its torchrun
started. At the end:

    every rank had the losses and the norms of an undisturbed run in each step,
    to the bit, also in steps that were taken twice
    every file of a checkpoint of the last state (weights, optimizer, random
    numbers, position, codecs) equals that of the undisturbed run, to the byte
    at most as many steps were taken twice as lie between snapshots, for each
    loss

With --shared, the nodes keep no snapshots, and the run resumes from checkpoints in a folder that all nodes see. It
shows what healing is compared with. After a failure, the folder of the run stays.
"""

from __future__ import annotations

import argparse
import atexit
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.candidates import CaseError
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from lab import ElasticRun, Lab
from towpath.topology.cluster import Topology

TOPOLOGY = Topology(nodes=3, ranks_per_node=2)
CABLE = "200mbit"
EVERY = 10  # steps between snapshots
STEPS = 40
STEPS_BEFORE = range(EVERY + 1, STEPS - 4)
PHASES = ("forward", "backward", "optimizer", "snapshot", "exchange", "publishing", "starting", "healing")
STRATEGIES = ("mics", "paro-iig")
MODELS = {
    "tiny": ("model.width=64", "model.depth=2", "model.heads=4", "train.length=32"),
    "17m": ("model.width=448", "model.depth=7", "model.heads=8", "train.length=32"),  # 17 million parameters
}
KILLS = 20
PICTURE_STEPS = 60
PATIENCE_SECONDS = 600.0
AWAY_SECONDS = 60.0  # at most
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one node, when `rank` comes to `phase` in a step from `step` on. `silent`: the cable is cut first."""

    rank: int
    phase: str
    step: int
    silent: bool


# One run for a picture in the docs. Each loss is of another node.
PICTURE_LOSSES = (
    Loss(rank=4, phase="backward", step=17, silent=False),
    Loss(rank=3, phase="forward", step=34, silent=False),
    Loss(rank=0, phase="optimizer", step=48, silent=False),
)


@dataclass(frozen=True, slots=True)
class HealingCase:
    """One run of a strategy that loses a node. `keeps`: where its states are, in "memory" or a shared "folder"."""

    strategy: str
    model: str
    number: int
    keeps: str = "memory"

    @property
    def name(self) -> str:
        """The name on the command line."""
        what = str(self.number) if self.number < KILLS else "picture"
        return " ".join([self.strategy, self.model, what, *(["folder"] if self.keeps == "folder" else [])])

    @property
    def steps(self) -> int:
        """The steps of the run."""
        return STEPS if self.number < KILLS else PICTURE_STEPS

    @property
    def losses(self) -> list[Loss]:
        """The nodes that this run loses, one after another."""
        if self.number >= KILLS:
            return list(PICTURE_LOSSES)
        dice = random.Random(self.name)
        phase, silent = PHASES[self.number % len(PHASES)], self.number // len(PHASES) % 2 == 1
        if self.keeps == "folder" and phase in PHASES[3:6]:
            phase = "optimizer"
        rank, step = dice.randrange(TOPOLOGY.world), dice.choice(STEPS_BEFORE)
        if phase not in PHASES[6:]:
            return [Loss(rank, phase, step, silent)]
        # The copies of what a node alone held are now on its buddy alone. So the second loss is that of the new node.
        again = TOPOLOGY.node_of(rank) * TOPOLOGY.ranks_per_node + dice.randrange(TOPOLOGY.ranks_per_node)
        return [Loss(rank, dice.choice(PHASES[:3]), step, silent), Loss(again, phase, 0, silent)]

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train undisturbed, unless an earlier case has done that, and with losses, and compare."""
        folder = Path(tempfile.mkdtemp(prefix="towpath-healing-", dir=settings.options.folder))
        key = self.strategy, self.model, self.steps
        reference = _references.get(key)
        try:
            if reference is None:
                settings.say("first the undisturbed run")
                kept = Path(tempfile.mkdtemp(prefix="towpath-healing-undisturbed-", dir=settings.options.folder))
                atexit.register(shutil.rmtree, kept, ignore_errors=True)
                reference = HealingRun(replace(self, keeps="folder"), kept / "undisturbed")
                reference.carry_out([], settings.say)
                _references[key] = reference
            run = HealingRun(self, folder / "disturbed")
            run.carry_out(self.losses, settings.say)
            found = compare(run, reference)
        except CaseError as error:
            # Results are committed, and other machines have other folders.
            text = str(error).replace(str(folder), "FOLDER").replace(str(ROOT), "ROOT").replace(sys.prefix, "PYTHON")
            settings.say(f"the folder stays: {folder}")
            raise CaseError(re.sub(r"/[\w.+-]+(/[\w.+-]+)+", lambda path: Path(path[0]).name, text)) from None
        shutil.rmtree(folder)
        limits = [Check("steps taken twice", found["steps_twice"], at_most=EVERY * len(self.losses))]
        return {"checks": [*limits, *(Check(f"seconds: {name}", s) for name, s in found["seconds"].items())], **found}


# The undisturbed run of each strategy, model and number of steps. It serves all cases of a process.
_references: dict[tuple[str, str, int], HealingRun] = {}


class HealingRun:
    """A run of `towpath train` in a lab of its own. Its folder is on the host, and no loss touches it."""

    def __init__(self, case: HealingCase, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.lost: list[tuple[Loss, float]] = []  # and when, in seconds of the clock of the host
        self.rebuilt: list[float] = []  # when
        (folder / "events").mkdir(parents=True)

    def carry_out(self, losses: Sequence[Loss], say: Callable[[str], None]) -> None:
        """Train to the end, and lose nodes meanwhile."""
        with Lab(TOPOLOGY, inter=CABLE, head=True) as lab:
            command = ["-m", "benchmarks.suites.healing_rank", str(self.folder), "train", *self._options(lab)]
            path = {"PYTHONPATH": str(ROOT), "LOGLEVEL": "INFO", "TMPDIR": tempfile.gettempdir()}
            restarts = 2 * len(losses)
            with lab.elastic(command, self.folder / "output", env=path, restarts=restarts) as job:
                for node in range(TOPOLOGY.nodes):
                    job.start(node)
                for number, loss in enumerate(losses):
                    self._lose(lab, job, number, loss, say)
                ended = job.ended(PATIENCE_SECONDS)
                self.expect(ended == dict.fromkeys(range(TOPOLOGY.nodes), 0), f"the launchers ended with {ended}", job)

    def _options(self, lab: Lab) -> list[str]:
        options = [*data_options(self.folder, self.case.model), f"strategy.name={self.case.strategy}"]
        options += [f"train.steps={self.case.steps}"]
        if self.case.keeps == "folder":
            return [*options, f"log.folder={self.folder / 'run'}", f"checkpoint.every={EVERY}"]
        return [*options, f"log.folder={lab.disk / 'run'}", f"strategy.protect={EVERY}"]

    def _lose(self, lab: Lab, job: ElasticRun, number: int, loss: Loss, say: Callable[[str], None]) -> None:
        order = {"number": number, "rank": loss.rank, "phase": loss.phase, "step": loss.step}
        part = self.folder / "order.part"
        part.write_text(json.dumps(order))
        part.rename(self.folder / "order.json")
        hit, until = self.folder / f"hit-{number}", time.monotonic() + PATIENCE_SECONDS
        while not hit.exists():
            ended = job.ended(0.05)
            self.expect(not ended, f"no rank came to {loss}: the launchers ended with {ended}", job)
            self.expect(time.monotonic() < until, f"no rank came to {loss} in {PATIENCE_SECONDS:.0f} s", job)
        node = TOPOLOGY.node_of(loss.rank)
        say(f"node {node} is lost: rank {loss.rank} in {loss.phase}, step {loss.step}{', silent' * loss.silent}")
        self.lost.append((loss, time.time()))
        lab.destroy(node, silent=loss.silent)
        # A new node at the old address would reject old connections at once. A machine without power answers nothing
        # for a while, so it stays away until the others have noticed.
        until = time.monotonic() + (AWAY_SECONDS if loss.silent else 0.0)
        survivors = TOPOLOGY.world - TOPOLOGY.ranks_per_node
        while time.monotonic() < until and len(first_events(self, number, "error")) < survivors:
            time.sleep(0.05)
        lab.rebuild(node)
        self.rebuilt.append(time.time())
        job.start(node)

    def expect(self, held: bool, what: str, job: ElasticRun | None = None) -> None:
        """Raise `CaseError` with the end of each node's output if a condition does not hold."""
        if not held:
            nodes = range(TOPOLOGY.nodes) if job else ()
            tails = [f"node {node}: …{job.output(node)[-1500:]}" for node in nodes if job]
            raise CaseError("\n".join([*tails, f"{self.folder.name}: {what}"]))

    def events(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank noted, in all its lives."""
        path = self.folder / "events" / f"rank-{rank}.jsonl"
        events: list[dict[str, Any]] = []
        for line in path.read_text().splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # the rank was killed in the middle of a line
        return events

    def printed(self) -> list[str]:
        """Return the lines of the product's table of seconds."""
        texts = [path.read_text(errors="replace") for path in sorted((self.folder / "output").glob("node*.txt"))]
        return [line.strip() for text in texts for line in text.splitlines() if "healed: " in line]


def data_options(folder: Path, model: str) -> list[str]:
    """Prepare a text in `folder`. Return the arguments of `towpath train` for a model that learns it."""
    from towpath.train.data import prepare

    tokens, file, corpus = folder / "tokens", folder / "drill.toml", folder / "corpus"
    words = random.Random(0).choices(("lock", "barge", "weir", "horse", "towpath", "canal"), k=20_000)
    corpus.write_text(" ".join(words))
    prepare([str(corpus)], tokens)
    file.write_text("")
    batches = ("train.batch=12", "train.micro_batch=1", "train.threads=1")
    return [str(file), *MODELS[model], f"data.tokens={tokens}", *batches]


def compare(run: HealingRun, reference: HealingRun) -> dict[str, Any]:
    """Compare a run with the undisturbed one. Raise `CaseError` with what differs."""
    twice = 0
    for rank in range(TOPOLOGY.world):
        kinds = ("step", "evaluated")
        mine, theirs = ([each for each in one.events(rank) if each["what"] in kinds] for one in (run, reference))
        rows, expected = ([{k: v for k, v in each.items() if k != "time"} for each in one] for one in (mine, theirs))
        differing = [row for row in rows if row not in expected]
        run.expect(not differing, f"rank {rank} differs from the undisturbed run: {differing[:3]}")
        missing = [row for row in expected if row not in rows]
        run.expect(not missing, f"rank {rank} never had {missing[:3]}")
        twice = max(twice, len([row for row in rows if row["what"] == "step"]) - run.case.steps)
    [last] = (run.folder / "final").glob("step-*")
    [wanted] = (reference.folder / "final").glob("step-*")
    files = sorted(path.name for path in wanted.glob("*.safetensors"))
    run.expect(last.name == wanted.name and bool(files), f"it ended with {last.name}, expected {wanted.name}")
    for name in files:
        equal = (last / name).read_bytes() == (wanted / name).read_bytes()
        run.expect(equal, f"{last.name}/{name} differs from the undisturbed run's")
    return {
        "steps_twice": twice,
        "files_alike": len(files),
        "losses": [seconds_of(run, number) for number in range(len(run.lost))],
        "seconds": seconds_of(run, len(run.lost) - 1)["seconds"],
        "printed": run.printed(),
        **({"curve": curve(run), "undisturbed": curve(reference)} if run.case.number >= KILLS else {}),
    }


def curve(run: HealingRun) -> dict[str, Any]:
    """Return the seconds, step and loss of each step of rank 0, and the seconds of the losses of nodes."""
    steps = [event for event in run.events(0) if event["what"] == "step"]
    began: float = steps[0]["time"]
    points = [(round(e["time"] - began, 2), e["step"], round(float.fromhex(e["loss"]), 4)) for e in steps]
    return {"points": points, "lost": [round(at - began, 2) for _, at in run.lost]}


def seconds_of(run: HealingRun, number: int) -> dict[str, Any]:
    """Return where the seconds went after a loss. Each part ends when the last rank has come there.

    A rank notices when its training thread raises, and ends when its process does, or when torchrun ends it. A node
    that is lost in silence stays away for a time that is not counted.
    """
    loss, lost_at = run.lost[number]
    raised, ended = first_events(run, number, "raised"), first_events(run, number, "error")
    seconds = {"noticing": max(raised.values(), default=0.0)}
    seconds["end of all"] = max(0.0, max(ended.values(), default=0.0) - seconds["noticing"])
    before = max(lost_at + sum(seconds.values()), run.rebuilt[number])
    lives = [_last_life(run, number, rank) for rank in _RANKS]
    for what, part in _PARTS.items():
        times = [next((event["time"] for event in life if event["what"] == what), None) for life in lives]
        if None not in times:
            end = max(t for t in times if t is not None)
            seconds[part], before = end - before, end
    seconds["noticing to next step"] = sum(seconds.values()) - seconds["noticing"]
    rounded = {part: round(value, 2) for part, value in seconds.items()}
    return {**asdict(loss), "raised": raised, "ended": ended, "seconds": rounded}


def first_events(run: HealingRun, number: int, what: str) -> dict[int, float]:
    """Return by surviving rank the seconds from a loss to its first event of a kind."""
    loss, lost_at = run.lost[number]
    survivors = [rank for rank in _RANKS if TOPOLOGY.node_of(rank) != TOPOLOGY.node_of(loss.rank)]
    found = {rank: [e["time"] for e in _after(run, number, rank) if e["what"] == what] for rank in survivors}
    return {rank: round(times[0] - lost_at, 2) for rank, times in found.items() if times}


def _after(run: HealingRun, number: int, rank: int) -> list[dict[str, Any]]:
    """Return what a rank noted after a loss and before the next one."""
    until = run.lost[number + 1][1] if number + 1 < len(run.lost) else float("inf")
    return [event for event in run.events(rank) if run.lost[number][1] < event["time"] < until]


def _last_life(run: HealingRun, number: int, rank: int) -> list[dict[str, Any]]:
    """Return what a rank noted since its last start. Before that, it may have gone on for steps after the loss."""
    events = _after(run, number, rank)
    starts = [place for place, event in enumerate(events) if event["what"] == "started"]
    return events[starts[-1] :] if starts else []


_RANKS = range(TOPOLOGY.world)
# By event, the part of the seconds that ends with it.
_PARTS = {
    "started": "rendezvous",
    "imported": "import",
    "joined": "groups",
    "built": "model",
    "loaded": "state",
    "step": "first step",
}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=KILLS, help=f"runs of each strategy and model (default: {KILLS})")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases whose name begins so")
    parser.add_argument("--shared", action="store_true", help="resume from checkpoints in a shared folder instead")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))


def _chosen(cases: Sequence[HealingCase], options: argparse.Namespace) -> list[HealingCase]:
    most = 1 if options.quick else options.kills
    kept = [case for case in cases if case.number < most or (case.number >= KILLS and not options.quick)]
    kept = [case for case in kept if case.name.startswith(options.only)]
    return [replace(case, keeps="folder") for case in kept] if options.shared else kept


CASES = (
    *(HealingCase(strategy, model, number) for model in MODELS for strategy in STRATEGIES for number in range(KILLS)),
    HealingCase("paro-iig", "17m", KILLS),
)
SUITES = (Suite("healing", __doc__ or "", CASES, options=_options, chosen=_chosen),)
