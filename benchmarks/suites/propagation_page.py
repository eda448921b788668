"""The tables of the suite `propagation`: gradients of frozen weights, errors and activations, and training."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from benchmarks.suites.frozen_pipeline import BIASES, LAST_BIAS, WEIGHTS
from benchmarks.suites.pipeline import OPTIMUS, STAGES
from benchmarks.suites.propagation import (
    BASELINE,
    BASELINE_STEPS,
    CASES,
    COUNTED,
    DROPS,
    EARLY,
    LATE,
    LAYOUTS,
    LOSES,
    MIDDLE,
    NEXT,
    PROPAGATES,
    RESCALED,
    SAMPLES,
    TOKENS,
    TRAININGS,
    VARIANTS,
    Training,
    measured_runs,
)
from benchmarks.suites.quality import judged
from benchmarks.suites.quality_pipeline import steps_to

SUMMARISED = (PROPAGATES, LOSES, DROPS)  # the gradients that the guide shows
TIMES = ("time to the loss", "time to its last loss")

Run = Mapping[str, Any]
Row = Sequence[str]

# Training is judged by the steps to the uncompressed run's loss at this share of its steps. Later its learning rate is
# so small that hardly any run with another loss would reach it.
TARGET = 2 / 3


def sections() -> Iterator[str]:
    """Yield the parts of the page."""
    runs = measured_runs()
    layouts = ", ".join(f"{m} × {batch} × {copies}" for m, (batch, copies) in LAYOUTS.items())
    yield _filled(
        f"{STAGES} stages, {OPTIMUS.blocks} blocks of width {OPTIMUS.width}, messages of rank {OPTIMUS.rank}. A step "
        f"has {TOKENS:,} tokens, or a multiple of it. Micro-batches × sequences of {OPTIMUS.length} tokens × copies "
        f"are {layouts}. More tokens come from more copies, so messages keep their size. Sending stage s of P encodes "
        "its last P − s micro-batches. All means are over three seeds, or over those that have run. Only the first "
        f"seed has gradients at the steps {EARLY} and {LATE}."
    )
    yield _filled(
        f"`{PROPAGATES}` adds what a message loses to the next encoded one. `{LOSES}` forgets it. `{NEXT}` adds it to "
        f"the next micro-batch, encoded or not, as in the text of the paper. `{DROPS}` replaces exposed gradients by "
        f"zeros and rescales nothing. `{RESCALED}` scales each stage's sum to all micro-batches. `{SAMPLES}` is what "
        "the exact gradients of two batches differ by, over √2."
    )
    left = len(CASES) - len(runs)
    if left:
        yield f"{left} of {len(CASES)} cases have no result yet and are left out."
    yield from _gradient_sections(runs)
    yield from _training_sections(runs)


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _table(head: Row, rows: Sequence[Row]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


# The recorded figures of errors and activations, and the headings of their columns.
PAIRED = {
    "error": "error / gradient of messages",
    "error without propagation": "without propagation",
    "lost": "Σ ε ⊗ Y / G",
    "left": "Σ ε ⊗ ΔY / G",
    "lost without propagation": "Σ ε ⊗ Y / G without propagation",
}

# Gradients ------------------------------------------------------------------------------------------------------------

# By step, multiple of the tokens, micro-batches, variant, group, figure and stage, the values of all seeds.
Key = tuple[int, int, int, str, str, str, int]


def gradient_figures(runs: Sequence[Run]) -> dict[Key, list[float]]:
    """Return the figures of frozen weights."""
    found: defaultdict[Key, list[float]] = defaultdict(list)
    for run in runs:
        case = run["case"]
        for row in run.get("rows", ()):
            place = (case["step"], case["times"], row["micro_batches"], row["variant"], row["group"])
            for figure in ("noise", "bias", "bias of halves"):
                if figure in row:
                    found[*place, figure, row["stage"]].append(row[figure])
        for row in run.get("pairings", ()):
            for figure in PAIRED:
                key = (case["step"], case["times"], row["micro_batches"], PROPAGATES, "", figure, row["stage"])
                found[key].append(row[figure])
    return dict(found)


def _gradient_sections(runs: Sequence[Run]) -> Iterator[str]:
    figures = gradient_figures(runs)
    if not figures:
        return
    yield "## Gradients of frozen weights\n\n" + _filled(
        f"The weights are those of an uncompressed run of {BASELINE_STEPS} steps with 6 micro-batches, at one of its "
        "steps. Noise is the norm of G* − G in a step over that of G. Bias is the norm of the mean of G* − G over that "
        f"of the mean of G, over {', '.join(f'{n} steps (× {times})' for times, n in COUNTED.items())}. It still has "
        "what chance leaves in a mean. The bias without chance is the root of the product of the means of both halves. "
        "Cells have the first, second and third stage. The last one has exact gradients."
    )
    columns = (
        ("noise", WEIGHTS, "noise"),
        ("bias", WEIGHTS, "bias"),
        ("bias without chance", WEIGHTS, "bias of halves"),
    )
    yield "### Weights\n\n" + _gradient_table(figures, columns)
    columns = (
        ("noise", BIASES, "noise"),
        ("bias without chance", BIASES, "bias of halves"),
        ("before the cut: noise", LAST_BIAS, "noise"),
        ("bias", LAST_BIAS, "bias"),
        ("bias without chance", LAST_BIAS, "bias of halves"),
    )
    yield (
        "### Biases\n\n"
        + _filled(
            "The gradient of the last bias before a cut is the sum of the message over its tokens, whatever the "
            "activations are. The other columns are of the other biases of a stage."
        )
        + "\n\n"
        + _gradient_table(figures, columns)
    )
    yield (
        "### Errors and activations\n\n"
        + _filled(
            "The paper assumes that errors ε and differences of activations ΔY are independent (eq. 14), so that "
            "Σ ε ⊗ ΔY vanishes. Here Y are the inputs of the last matrix before a cut, and the sum is over all "
            f"messages of `{PROPAGATES}`. Its norm is relative to that of this matrix's gradient over the same steps. "
            "Next to it is what the same errors would cost if they were never sent, Σ ε ⊗ Y. Without propagation, "
            "errors are smaller: the last column has what they cost."
        )
        + "\n\n"
        + _pairing_table(figures)
    )


def _places(figures: Mapping[Key, Any]) -> list[tuple[int, int, int]]:
    """Return the measured steps, multiples and layouts."""
    return sorted({key[:3] for key in figures if key[2]})


def _cell(figures: Mapping[Key, Sequence[float]], *place: Any) -> str:
    """Return a figure of the stages that have it, in the mean over the seeds."""
    each = [figures.get((*place, stage), ()) for stage in range(STAGES - 1)]  # type: ignore[arg-type]
    return " / ".join(f"{statistics.mean(values):.2g}" for values in each if values)


def _gradient_table(figures: Mapping[Key, Sequence[float]], columns: Sequence[tuple[str, str, str]]) -> str:
    rows: list[Row] = []
    shown: set[tuple[int, int]] = set()
    for step, times, layout in _places(figures):
        if (step, times) not in shown:
            shown.add((step, times))
            cells = [_cell(figures, step, times, 0, SAMPLES, group, figure) for _, group, figure in columns]
            rows.append((str(step), f"× {times}", "any", SAMPLES, *cells))
        for variant in (*VARIANTS, RESCALED):
            cells = [_cell(figures, step, times, layout, variant, group, figure) for _, group, figure in columns]
            rows.append((str(step), f"× {times}", str(layout), variant, *cells))
    return _table(("step", "tokens", "micro-batches", "variant", *(name for name, _, _ in columns)), rows)


def gradient_summary() -> str:
    """Return noise and bias of the first stage's weights with each of `SUMMARISED`, a row per tokens and layout."""
    figures = gradient_figures(measured_runs())
    rows: list[Row] = []
    for step, times, layout in _places(figures):
        if step == MIDDLE:
            means = (
                statistics.mean(figures[step, times, layout, variant, WEIGHTS, figure, 0])
                for figure in ("noise", "bias of halves")
                for variant in SUMMARISED
            )
            rows.append((f"× {times}", str(layout), *(f"{each:.2g}" for each in means)))
    heads = (f"{kind}{variant}" for kind in ("noise: ", "bias: ") for variant in SUMMARISED)
    return _table(("tokens", "micro-batches", *heads), rows)


def _pairing_table(figures: Mapping[Key, Sequence[float]]) -> str:
    rows = [
        (
            str(step),
            f"× {times}",
            str(layout),
            *(_cell(figures, step, times, layout, PROPAGATES, "", n) for n in PAIRED),
        )
        for step, times, layout in _places(figures)
    ]
    return _table(("step", "tokens", "micro-batches", *PAIRED.values()), rows)


# Training -------------------------------------------------------------------------------------------------------------


def loss_at(curve: Sequence[tuple[int, float]], step: float) -> float:
    """Return the loss of a curve at a step, between two validations in proportion."""
    for (a, first), (b, second) in pairwise(curve):
        if a <= step <= b:
            return first + (second - first) * (step - a) / (b - a)
    return curve[-1][1]


def _training_sections(runs: Sequence[Run]) -> Iterator[str]:
    each = [(training, rows) for training in TRAININGS if (rows := training_rows(runs, training))]
    if not each:
        return
    yield "## Training\n\n" + _filled(
        "Perplexity is that of the end, over the uncompressed run of the same seed. The loss to reach is that of the "
        "uncompressed run at two thirds of its steps. Steps and time until a run has it are over those of the "
        "uncompressed run. The time of a step is simulated, with links of 50 mbit/s and blocks that wait "
        "as in `python -m benchmarks pipeline optimus-50mbit`. Encoding takes no time there, and a dropped message is "
        "counted as one of rank 1, so the variants are rather slower than shown. The last column has the time that a "
        "variant takes to its own last loss, over that of the uncompressed run to this loss. The learning rate then is "
        "near 0, and small differences of the loss are many steps."
    )
    head = (*("variant", "perplexity", "by seed", "steps to the loss", "times as fast a step"), *TIMES)
    for training, rows in each:
        yield f"### {training}\n\n" + _table(head, rows)


def training_summary() -> str:
    """Return what each variant costs in perplexity and in time, a row per training and variant."""
    runs = measured_runs()
    rows: list[Row] = []
    for training in TRAININGS:
        for variant, perplexity, _, _, _, *times in training_rows(runs, training):
            rows.append((str(training), variant, perplexity, *times))
    return _table(("training", "variant", "perplexity", *TIMES), rows)


def training_rows(runs: Sequence[Run], training: Training) -> list[Row]:
    """Return a row for each variant that has run with this training."""
    chosen = [run for run in runs if run["case"].get("training") == asdict(training)]
    baselines = {run["case"]["seed"]: run for run in chosen if run["case"]["variant"] == BASELINE}
    found: list[Row] = []
    for row in judged([dict(run) for run in chosen], list(VARIANTS), BASELINE, math.exp):
        steps: list[float | None] = []
        same: list[float] = []  # the share of its steps after which the uncompressed run has the variant's last loss
        times = 1.0
        for run in chosen:
            base = baselines.get(run["case"]["seed"])
            if run["case"]["variant"] == row.variant and base is not None:
                target = loss_at(base["curve"], TARGET * training.steps)
                needed = steps_to(run["curve"], target)
                steps.append(None if needed is None else needed / (TARGET * training.steps))
                same.append((steps_to(base["curve"], run["curve"][-1][1]) or training.steps) / training.steps)
                times = base["step_seconds"] / run["step_seconds"]
        reached = [each for each in steps if each is not None]
        mean = statistics.mean(reached) if len(reached) == len(steps) else None
        taken = ("not reached", "not reached") if mean is None else (f"{mean:.3f}", f"{mean / times:.3f}")
        to_last = f"{1 / statistics.mean(same) / times:.3f}"
        found.append((row.variant, f"{row.mean:+.2%}", row.by_seed, taken[0], f"{times:.3f}", taken[1], to_last))
    return found
