"""Measure what lazy error propagation does to gradients and to training, compared with no propagation and with zeros.

    propagation [CASE …] [--part 1/2] [--missing] [--settle 0] [--quick]

The cases `gradients …` freeze the weights of an uncompressed run at one of its steps. Over many batches, they compare
the gradients that each variant of the messages gives with the exact ones: their noise in a step, and the bias of their
mean. All layouts of micro-batches have the same samples. The cases `training …` train with propagation, without it, and
with dropped messages as a control. They count the steps to a loss of the uncompressed run.

A run is one thread of one process. `--part 1/2` and `--part 2/2` may run at once, and share the cases by their costs.
`--missing` leaves out the cases that have a result in the suite's current setting, whatever commit it is from. Start
all parts of what is missing at the same time: each result changes what the parts share.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import results
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.suites import quality_pipeline
from benchmarks.suites.emulated_pipeline import DroppingLink, EmulatedPipeline, Link, NextMicroBatchLink
from benchmarks.suites.frozen_pipeline import WEIGHTS, FrozenPipeline, Moments, grouped, last_matrix
from benchmarks.suites.pipeline import OPTIMUS, STAGES, Sizes, compression_of
from benchmarks.suites.quality_pipeline import (
    SIZES,
    WARM_UP,
    WINDOWS,
    WINDOWS_AT_THE_END,
    batches,
    split_text,
    train_and_validate,
    training,
)
from towpath.core.formats import Precision
from towpath.errors import ConfigError
from towpath.plan.catalog import load_cluster
from towpath.plan.model import LinearSeconds, MeasuredPasses, ModelUnit, StagedModel, Transformer
from towpath.plan.pipelines import Layout, Pipelines
from towpath.plan.request import Request
from towpath.plan.solver import Batching

SEEDS = 3
BASELINE = "uncompressed"
PROPAGATES, LOSES, NEXT, DROPS = "cb", "cb, no propagation", "cb, into the next micro-batch", "dropped"
SAMPLES = "other samples"  # what the exact gradients of the steps differ by
RESCALED = "dropped, rescaled"  # only of gradients: those of a stage times M over the micro-batches that it gets
# The candidate of `pipeline` that each variant is, and the class of its links.
VARIANTS: dict[str, tuple[str, type[Link]]] = {
    PROPAGATES: ("cb", Link),
    LOSES: ("cb, no feedback", Link),
    NEXT: ("cb", NextMicroBatchLink),
    DROPS: ("cb", DroppingLink),
}
# By number of micro-batches, the sequences of each and the copies of the pipeline. All have 192 sequences of 64 tokens,
# and messages of nearly one size: 512, 384 and 384 tokens. More tokens come from more copies.
LAYOUTS = {6: (8, 4), 16: (6, 2), 32: (6, 1)}
TOKENS = 192 * OPTIMUS.length
# By multiple of the tokens, how many steps count. Before them come some that fill the errors.
COUNTED = {1: 48, 4: 24, 16: 12}
FILLING = 8
BASELINE_STEPS = quality_pipeline.STEPS
EARLY, MIDDLE, LATE = 78, 300, 600  # steps of the baseline
# Only results of one setting are compared. Keys are text, as in the results.
GRADIENT_SETTING = {
    "sizes": asdict(SIZES),
    "layouts": {str(m): list(layout) for m, layout in LAYOUTS.items()},
    "counted": {str(times): steps for times, steps in COUNTED.items()},
    "filling": FILLING,
}
LINK_RATE = 50e6  # bits per second, as in the case `optimus-50mbit` of `pipeline`


def sizes_of(micro_batches: int, times: int = 1) -> tuple[Sizes, int]:
    """Return the sizes and the copies of a layout with a multiple of the tokens."""
    batch, copies = LAYOUTS[micro_batches]
    return replace(SIZES, micro_batches=micro_batches, batch=batch), copies * times


# Gradients ------------------------------------------------------------------------------------------------------------


class Baseline:
    """An uncompressed run that goes on from step to step."""

    def __init__(self, seed: int) -> None:
        text, _ = split_text(SIZES.vocabulary)
        self.made = EmulatedPipeline(SIZES, compression_of(BASELINE, SIZES), seed)
        self._steps = training(self.made, batches(text, 1000 * seed, SIZES), BASELINE_STEPS)
        self.step = 0

    def go_to(self, step: int) -> None:
        """Train up to a step."""
        while self.step < step:
            self.step = next(self._steps)


@cache
def _baselines() -> dict[int, Baseline]:
    return {}


def baseline_at(seed: int, step: int) -> EmulatedPipeline:
    """Return the baseline at a step. It goes on from an earlier case of the same process, if it can."""
    kept = _baselines()
    if seed not in kept or kept[seed].step > step:
        kept.clear()
        kept[seed] = Baseline(seed)
    kept[seed].go_to(step)
    return kept[seed].made


@dataclass(frozen=True, slots=True)
class GradientCase:
    """The gradients at a step of the baseline, with some multiple of the tokens, in some layouts."""

    step: int
    times: int
    micro_batches: tuple[int, ...]
    seed: int

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"gradients at step {self.step}, tokens × {self.times}, seed {self.seed}"

    @property
    def setting(self) -> dict[str, Any]:
        """The settings that the result depends on, next to the case."""
        return GRADIENT_SETTING

    @property
    def minutes(self) -> float:
        """About how long the case takes on an idle core."""
        exact, changed = COUNTED[self.times], COUNTED[self.times] + FILLING
        return 2 + self.times * (exact + changed * sum(7 / m for m in self.micro_batches)) / 60

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the gradients of all variants with the exact ones, on the same samples in all layouts."""
        counted, filling = (2, 1) if settings.quick else (COUNTED[self.times], FILLING)
        with one_thread():
            settings.say(f"training to step {self.step}")
            stages = baseline_at(self.seed, 1 if settings.quick else self.step).stages
            made: dict[int, FrozenPipeline] = {}
            for each in self.micro_batches:
                sizes, copies = sizes_of(each, self.times)
                kinds = {name: (compression_of(text, sizes), kind) for name, (text, kind) in VARIANTS.items()}
                made[each] = FrozenPipeline(stages, sizes, copies, kinds, paired=(PROPAGATES, LOSES))
            found = Gradients(made)
            text, _ = split_text(SIZES.vocabulary)
            sizes, copies = sizes_of(next(iter(LAYOUTS)), self.times)
            data = batches(text, 1000 * self.seed + self.step, sizes, copies=copies)
            for number in range(filling + counted):
                if number == filling:
                    found.begin()
                found.add(*next(data), second=2 * (number - filling) >= counted)
                settings.say(f"step {number + 1} of {filling + counted}")
        rows = found.rows()
        shown = [row for row in rows if row["micro_batches"] and row["stage"] == 0 and row["group"] == WEIGHTS]
        checks = [
            Check(f"{row['variant']}, {row['micro_batches']} micro-batches: noise of the first stage", row["noise"])
            for row in shown
        ]
        return {"checks": checks, "setting": self.setting, "rows": rows, "pairings": found.pairings()}


class Gradients:
    """The gradients of the steps that count, in all layouts."""

    def __init__(self, made: Mapping[int, FrozenPipeline]) -> None:
        self._made, self._counts = made, False
        self._exact: defaultdict[tuple[int, str], Moments] = defaultdict(Moments)
        self._changed: defaultdict[tuple[int, str, int, str], Moments] = defaultdict(Moments)
        self._last: defaultdict[int, Any] = defaultdict(float)  # by stage, the gradients of its last matrix

    def begin(self) -> None:
        """Count the steps from now on."""
        self._counts = True
        for each in self._made.values():
            each.observe()

    def add(self, ids: Tensor, targets: Tensor, second: bool) -> None:
        """Compute a step, of the first or of the second half. Before `begin`, it only fills the errors."""
        changed = {each: made.differences(ids, targets) for each, made in self._made.items()}
        if not self._counts:
            return
        first = next(iter(self._made.values()))
        for index, gradients in enumerate(first.exact(ids, targets)):
            stage = first.stages[index]
            exact = dict(grouped(gradients, stage))
            names = [name for name, _ in stage.named_parameters()]
            self._last[index] = self._last[index] + gradients[names.index(last_matrix(stage))]
            for group, vector in exact.items():
                self._exact[index, group].add(vector, second)
            for each, made in self._made.items():
                got = each / (each - made.exposed(index))
                for variant, of_stages in changed[each].items():
                    for group, vector in grouped(of_stages[index], stage):
                        self._changed[each, variant, index, group].add(vector, second)
                        if variant == DROPS:
                            rescaled = got * (exact[group] + vector) - exact[group]
                            self._changed[each, RESCALED, index, group].add(rescaled, second)

    def rows(self) -> list[dict[str, Any]]:
        """Return the noise and the bias of each layout, variant, stage and group of parameters."""
        rows = [
            {"micro_batches": each, "variant": variant, "stage": stage, "group": group}
            | _rounded(moments.over(self._exact[stage, group]))
            for (each, variant, stage, group), moments in self._changed.items()
        ]
        steps = [
            {"micro_batches": 0, "variant": SAMPLES, "stage": stage, "group": group, "noise": round(moments.spread, 5)}
            for (stage, group), moments in self._exact.items()
        ]
        return rows + steps

    def pairings(self) -> list[dict[str, Any]]:
        """Return what the last matrix before each cut lacks, relative to its gradient, and the errors of messages."""
        found: list[dict[str, Any]] = []
        for each, made in self._made.items():
            losses = made.losses()
            for sender in range(1, STAGES):
                scale = each * made.copies * self._last[sender - 1].norm()
                sent, forgotten = (made.pairings[name, sender] for name in (PROPAGATES, LOSES))
                figures = {
                    "error": losses[PROPAGATES][sender],
                    "error without propagation": losses[LOSES][sender],
                    "lost": (sent.lost.norm() / scale).item(),
                    "left": ((sent.delivered - sent.lost).norm() / scale).item(),
                    "lost without propagation": (forgotten.lost.norm() / scale).item(),
                }
                found.append({"micro_batches": each, "stage": sender - 1} | _rounded(figures))
        return found


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


# Training -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Training:
    """How long a variant trains, with which layout and learning rate."""

    micro_batches: int
    times: int
    steps: int
    peak: float

    def __str__(self) -> str:
        return f"{self.micro_batches} micro-batches, tokens × {self.times}, {self.steps} steps"


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """A variant with a seed."""

    variant: str
    seed: int
    training: Training

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"training {self.variant}; {self.training}, seed {self.seed}"

    @property
    def setting(self) -> dict[str, Any]:
        """The settings that the result depends on, next to the case."""
        return TRAINING_SETTING

    @property
    def minutes(self) -> float:
        """About how long the case takes on an idle core."""
        return self.training.steps * self.training.times / 60

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train, validate, and simulate the time of a step."""
        steps = quality_pipeline.QUICK_STEPS if settings.quick else self.training.steps
        counts = (2, 2) if settings.quick else (WINDOWS, WINDOWS_AT_THE_END)
        sizes, copies = sizes_of(self.training.micro_batches, self.training.times)
        text, kind = VARIANTS.get(self.variant, (self.variant, Link))
        compression = compression_of(text, sizes)
        if self.variant != BASELINE:
            after = replace(compression.activation_gradients, after=int(WARM_UP * steps))
            compression = replace(compression, activation_gradients=after)
        with one_thread():
            made = EmulatedPipeline(sizes, compression, self.seed, copies=copies, link=kind)
            trained_on, held_out = split_text(sizes.vocabulary)
            data = batches(trained_on, 1000 * self.seed, sizes, copies=copies)
            found = train_and_validate(
                made, data, held_out, steps, counts, settings.say, self.training.peak, max(1, steps // 20)
            )
        return {
            "checks": [Check("final loss, nats a token", found.final)],
            "setting": self.setting,
            "steps": steps,
            "step_seconds": simulated_seconds(self.variant, sizes, copies),
            **asdict(found),
        }


def simulated_seconds(variant: str, sizes: Sizes, copies: int) -> float:
    """Return the simulated seconds of a step, with blocks that wait as in the case `optimus-50mbit` of `pipeline`.

    A dropped message is counted as one of rank 1. Encoding takes no time.
    """
    name = {BASELINE: "uncompressed", DROPS: "cb, message rank 1"}.get(variant, "cb")
    per_token = OPTIMUS.wait_seconds / (OPTIMUS.batch * OPTIMUS.length)
    nothing = LinearSeconds(0.0, 0.0)
    waits = MeasuredPasses(LinearSeconds(0.0, per_token), LinearSeconds(0.0, 2 * per_token))
    model = Transformer(
        sizes.vocabulary, sizes.width, sizes.blocks, sizes.heads, 4 * sizes.width, positions=sizes.length
    )

    def staged(count: int) -> StagedModel:
        found = model.staged("gpt", sizes.length, count)
        return replace(found, stages=tuple(replace(each, units=tuple(waiting(each.units))) for each in found.stages))

    def waiting(units: Sequence[ModelUnit]) -> Iterator[ModelUnit]:
        for number, unit in enumerate(units):
            yield replace(unit, measured=waits if number else MeasuredPasses(nothing, nothing))

    cluster = load_cluster("ethernet-1g", STAGES * copies, 1)
    cable = replace(cluster.hardware.inter, rate=LINK_RATE / 8)
    cluster = replace(cluster, hardware=replace(cluster.hardware, inter=cable))
    request = Request(
        sizes.batch * sizes.micro_batches * copies, cluster.memory, Precision(), micro_batches=(sizes.batch,)
    )
    layout = Layout(STAGES, compression=compression_of(name, sizes))
    return Pipelines(staged, cluster, request).predict(layout, Batching(sizes.batch, sizes.micro_batches)).seconds


@contextmanager
def one_thread() -> Generator[None]:
    """Compute in one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# Cases ----------------------------------------------------------------------------------------------------------------

# Each differs from the first in one thing: the share of encoded messages, the tokens of a step, or the length. The
# learning rate of the longest is lower, since the others have few steps to reach a loss.
TRAININGS = (
    Training(16, 1, 100, 2e-3),
    Training(6, 1, 100, 2e-3),
    Training(16, 4, 100, 2e-3),
    Training(16, 1, 400, 1e-3),
)
# Errors in the next micro-batch are no option of a pipeline. Their effect on gradients is measured, and not trained.
TRAINED = (BASELINE, PROPAGATES, LOSES, DROPS)
TRAINING_SETTING = {
    "sizes": asdict(SIZES),
    "layouts": {str(m): list(layout) for m, layout in LAYOUTS.items()},
    "warm_up": WARM_UP,
    "windows": WINDOWS_AT_THE_END,
}


def _cases(seed: int) -> Iterator[GradientCase | TrainingCase]:
    # One seed shows how the gradients change as the training goes on. All seeds have the table of tokens and layouts.
    for step in (MIDDLE,) if seed else (EARLY, MIDDLE, LATE):
        for times in COUNTED if step == MIDDLE else (1, 4):
            yield GradientCase(step, times, tuple(LAYOUTS) if step == MIDDLE else (16,), seed)
    for each in TRAININGS:
        for variant in TRAINED:
            yield TrainingCase(variant, seed, each)


CASES = [case for seed in range(SEEDS) for case in _cases(seed)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", default="1/1", metavar="I/N", help="a share of the cases, for N processes at once")
    parser.add_argument("--missing", action="store_true", help="leave out cases with a result in the current setting")


def _chosen(
    cases: Sequence[GradientCase | TrainingCase], options: argparse.Namespace
) -> Sequence[GradientCase | TrainingCase]:
    index, _, count = options.part.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ConfigError(f"--part is a number and a count, such as 1/2; got {options.part!r}.")
    done = {run["case"]["name"] for run in measured_runs()} if options.missing else set[str]()
    taken, homes, mine = [0.0] * int(count), dict[Any, int](), list[GradientCase | TrainingCase]()
    for case in (each for each in cases if each.name not in done):
        # The gradients of a seed share a baseline, and so a process.
        key = case.seed if isinstance(case, GradientCase) else case.name
        home = homes.setdefault(key, taken.index(min(taken)))
        taken[home] += case.minutes
        if home == int(index) - 1:
            mine.append(case)
    return mine


def measured_runs() -> list[dict[str, Any]]:
    """Return the last run of each case in the setting that the suite has now."""
    settings = {case.name: case.setting for case in CASES}
    read = results.read(results.file_of("propagation"))
    return of_one_text([r for r in read if r.get("setting") == settings.get(r["case"]["name"], {})])


def of_one_text(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last run of each case. Trainings that are compared have the Python version of the latest of them.

    They read the sources of Python's standard library, which differ between versions.
    """
    texts = {_compared(run): run["versions"]["python"] for run in runs if _compared(run)}
    last = results.last(run for run in runs if texts.get(_compared(run)) in (None, run["versions"]["python"]))
    return list(last.values())


def _compared(run: dict[str, Any]) -> str:
    """Return the trainings that a run is compared with, or nothing for gradients."""
    return run["case"]["name"].partition("; ")[2]


def _summary() -> str:
    """Return the tables of the page."""
    from benchmarks.suites import propagation_page

    return "\n\n".join(propagation_page.sections())


SUITES = (Suite("propagation", __doc__ or "", CASES, options=_options, chosen=_chosen, summary=_summary),)
