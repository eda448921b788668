"""Measure the time until training reaches a loss, with outer steps and without, on links of several rates.

    outer_time [CASE …] [--seeds 3] [--rounds 2] [--quick] [--resume]

Four ranks of two nodes train a GPT of ten million parameters in bf16 on text, at a constant learning rate after a
warm-up. The bits of a run do not depend on the links. So there are two kinds of cases. The first trains a candidate
with a seed, on links as fast as the machine allows. The second measures the mean step of a candidate on links of a
rate, or between two flats (100 Mbit/s down, 40 up, 20 ms): over two periods of 32 steps, or over 30 steps without
outer steps. The summary multiplies both.

The loss to reach is that of the lossless candidate after 400 steps, with the same seed. All losses are means over the
same held-out windows. Islands are validated at the end of each period, when they have just synchronized.

On two cores, training takes about ten minutes, and seven with the lossless candidate. A speed takes one to six minutes.
All cases take five hours.

torchft takes part if it is installed, in this environment or in a folder that TOWPATH_TORCHFT names.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import lab
import towpath
from benchmarks import torchft_peer
from benchmarks.harness import figures, results
from benchmarks.harness.candidates import LabPlace, Launch
from benchmarks.harness.comparison import started
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.islands import AVERAGED, EVERY, FreeSteps, Made, OuterSpec, mean_step
from benchmarks.selection import LOW_RANK, POWERSGD
from benchmarks.suites.outer import PERIODS, QUICK_EVERY
from benchmarks.suites.quality import Result, of_seeds, split_text, train_and_validate, training
from benchmarks.workload import SQUARE, Workload
from towpath.cli.plots import color, standalone_svg

WORKLOAD = Workload(SQUARE, 1, "bfloat16", width=384, depth=5)
LOSSLESS = "paro-igg exact=true"
# Islands average their weights. In so short a training with a constant rate, Nesterov momentum overshoots.
OUTER = {f"outer steps, {codec}": OuterSpec(codec, optimizer=AVERAGED) for codec in ("fp32", "int4")}
# The fastest lossless strategy on slow links where blocks compute (`exact`), the fastest two with codecs
# (`strategies`), outer steps, and the peers.
CANDIDATES = (LOSSLESS, LOW_RANK, "ddp gradients=int4:64", *OUTER, POWERSGD, torchft_peer.NAME)
RATES = ("10mbit", "50mbit", "200mbit")
# Two flats: 100 Mbit/s down, 40 up, and 20 ms.
LINKS = (*RATES, "flat")
SEEDS = 3
STEPS_TO_REACH = 400  # of the lossless candidate, whose loss is the one to reach
STEPS, QUICK_STEPS = 640, 2
SPEED_STEPS = 30  # of candidates without outer steps
WARM_UP_STEPS = 40  # of the learning rate
_LONGEST_SECONDS = 3 * 3600.0  # of training, or of all steps on a slow link
MOST_OF_LOSSLESS = 1 / 3  # of the time of the lossless candidate at the slowest rate

SETTING = {"width": WORKLOAD.width, "depth": WORKLOAD.depth, "batch": WORKLOAD.batch, "rate": WORKLOAD.learning_rate}


def launched(candidate: str) -> str | towpath.Strategy:
    """Return a candidate as its worker makes it."""
    return OUTER[candidate].strategy(SQUARE) if candidate in OUTER else candidate


def skipped(candidate: str) -> dict[str, Any] | None:
    """Return the result of a candidate that cannot take part here, or None if it can."""
    reason = torchft_peer.reason_missing() if candidate == torchft_peer.NAME else None
    return None if reason is None else {"skipped": reason}


# Training -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """A candidate trained with a seed."""

    candidate: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"{self.candidate}, seed {self.seed}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train in the lab."""
        if (reason := skipped(self.candidate)) is not None:
            return reason
        workload = replace(WORKLOAD.quick() if settings.quick else WORKLOAD, seed=self.seed)
        steps = QUICK_STEPS if settings.quick else STEPS_TO_REACH if self.candidate == LOSSLESS else STEPS
        with lab.Lab(SQUARE, inter=None) as cluster:
            arguments = self.candidate, workload, steps
            found: Result = cluster.call(train, *arguments, timeout_seconds=_LONGEST_SECONDS)[0]
        checks = [Check("final loss, nats a byte", found.final)]
        return {"checks": checks, "steps": steps, "setting": SETTING, **asdict(found)}


def train(rank: int, world: int, candidate: str, workload: Workload, steps: int) -> Result:
    """Train a candidate on one rank."""
    torch.set_num_threads(1)
    text, held_out = split_text()
    made = Made.of(launched(candidate), workload)

    def set_rate(step: int) -> None:
        for group in made.optimizer.param_groups:
            group["lr"] = workload.learning_rate * min((step + 1) / WARM_UP_STEPS, 1.0)

    return train_and_validate(
        made.model,
        made.optimizer,
        training(text, 1000 * workload.seed + rank, workload.batch),
        held_out,
        steps,
        set_rate,
        EVERY,
        lambda: made.context(made.model, True),
    )


# Speed ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeedCase:
    """The mean step of a candidate on links of a rate."""

    candidate: str
    inter: str

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"{self.candidate} at {self.inter}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Take the steps of some periods, after one that is not counted, or enough steps of other candidates."""
        if (reason := skipped(self.candidate)) is not None:
            return reason
        has_periods = self.candidate in OUTER or self.candidate == torchft_peer.NAME
        first, steps = (EVERY, settings.rounds * EVERY) if has_periods else (3, SPEED_STEPS)
        if settings.quick:
            first, steps = 1, QUICK_EVERY
        workload = WORKLOAD.quick() if settings.quick else WORKLOAD
        launch = Launch(LabPlace(SQUARE, self.inter), FreeSteps, (launched(self.candidate), workload))
        with started({self.candidate: launch}, settings.say) as made:
            [candidate] = made.values()
            candidate.ask("steps", first, seconds=_LONGEST_SECONDS)
            ranks = candidate.ask("steps", steps, seconds=_LONGEST_SECONDS)
        return {
            "checks": [Check("seconds of a mean step", mean_step(ranks))],
            "setting": SETTING,
            "steps": steps,
            "mean_seconds": mean_step(ranks),
            "step_seconds": [[round(s, 5) for s in each] for each in ranks],
        }


CASES: tuple[TrainingCase | SpeedCase, ...] = (
    *(TrainingCase(candidate, 0) for candidate in CANDIDATES),
    *(SpeedCase(candidate, inter) for inter in LINKS for candidate in CANDIDATES),
    *(TrainingCase(candidate, seed) for seed in range(1, SEEDS) for candidate in CANDIDATES),
)


# Judgment -------------------------------------------------------------------------------------------------------------

Line = Mapping[str, Any]


def steps_until(curve: Sequence[tuple[float, float]], loss: float) -> float:
    """Return the steps after which a curve first has a loss, linear between validations. It may be infinite."""
    (before, higher), *later = curve
    if higher <= loss:
        return before
    for after, lower in later:
        if lower <= loss:
            return before + (after - before) * (higher - loss) / (higher - lower)
        before, higher = after, lower
    return math.inf


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds until a candidate reaches the loss, by seed, at a rate. `step` are those of a mean step."""

    candidate: str
    inter: str
    step: float
    seconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.seconds)

    @property
    def by_seed(self) -> str:
        """The minutes of each seed."""
        return ", ".join(map(self.minutes, self.seconds))

    @staticmethod
    def minutes(seconds: float) -> str:
        """Return seconds in minutes, or a text if the loss was not reached."""
        return "not reached" if math.isinf(seconds) else f"{seconds / 60:.1f}"

    def __str__(self) -> str:
        found = f"minutes to the loss {self.minutes(self.mean)} (by seed {self.by_seed}), {self.step:.3g} s a step"
        return f"{self.inter}, {self.candidate}: {found}"


def times(lines: Iterable[Line]) -> list[Times]:
    """Return the times of all candidates that have both kinds of results, by rate, the fastest first."""
    lines = [line for line in lines if line.get("setting") == SETTING]
    curves = {(c["candidate"], c["seed"]): line["curve"] for line in lines if "seed" in (c := line["case"])}
    speeds = {(c["candidate"], c["inter"]): line["mean_seconds"] for line in lines if "inter" in (c := line["case"])}
    losses = {seed: curve[-1][1] for (candidate, seed), curve in curves.items() if candidate == LOSSLESS}
    steps = {
        candidate: [steps_until(curves[candidate, s], losses[s]) for s in sorted(losses) if (candidate, s) in curves]
        for candidate in CANDIDATES
    }
    found = [
        Times(candidate, inter, step, tuple(step * count for count in steps[candidate]))
        for (candidate, inter), step in speeds.items()
        if steps.get(candidate)
    ]
    return sorted(found, key=lambda each: (LINKS.index(each.inter), each.mean))


def verdicts(found: Sequence[Times]) -> list[Check]:
    """Return at each rate the time of the fastest outer steps over that of the lossless candidate."""
    checks: list[Check] = []
    for inter in LINKS:
        here = {each.candidate: each for each in found if each.inter == inter}
        ours = min((here[name] for name in OUTER if name in here), key=lambda each: each.mean, default=None)
        if ours is not None and LOSSLESS in here:
            what = f"{inter}: {ours.candidate} / {LOSSLESS}, time to the loss"
            most = MOST_OF_LOSSLESS if inter == RATES[0] else None
            checks.append(Check(what, ours.mean / here[LOSSLESS].mean, most))
    return checks


def runs_of() -> list[Line]:
    """Return the last run of each case in the setting that the suite has now."""
    read = results.read(results.file_of("outer_time"))
    return list(
        results.last(line for line in read if line.get("setting") == SETTING and not line.get("quick")).values()
    )


def summary() -> str:
    """Return the time of each candidate to the loss, and the ratios."""
    found = times(runs_of())
    lines = results.last(results.read(results.file_of("outer_time"))).items()
    notes = [f"{name} was skipped: {line['skipped']}" for name, line in lines if "skipped" in line]
    return "\n".join([*map(str, found), *(figures.verdict(check.recorded()) for check in verdicts(found)), *notes])


def picture() -> str:
    """Return the loss over the time of training, in the mean over the seeds: a panel for each rate."""
    return standalone_svg(draw, runs_of(), (11, 3.8))


def draw(figure: Any, lines: Sequence[Line]) -> None:
    """Draw the curve of each candidate at each rate."""
    panels = figure.subplots(1, len(RATES), sharey=True, squeeze=False)[0]
    for axes, inter in zip(panels, RATES, strict=True):
        for number, candidate in enumerate(CANDIDATES):
            mine = [line for line in lines if line["case"]["candidate"] == candidate]
            curves = [line["curve"] for line in mine if "seed" in line["case"]]
            step = next((line["mean_seconds"] for line in mine if line["case"].get("inter") == inter), None)
            if curves and step is not None:
                points = [
                    (p[0][0] * step / 60, statistics.fmean(loss for _, loss in p)) for p in zip(*curves, strict=True)
                ]
                axes.plot(*zip(*points[1:], strict=True), color=color(number), linewidth=1.4, label=candidate)
        axes.set_xscale("log")
        axes.set_xlabel("minutes of training")
        axes.set_title(f"links of {inter}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    panels[0].set_ylabel("validation loss (nats a byte)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=4, loc="outside lower center")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"at most {SEEDS}")


SUITES = (Suite("outer_time", __doc__ or "", CASES, PERIODS, options=_options, chosen=of_seeds, summary=summary),)
