"""Measure what Optimus-CC's compression costs in perplexity, in the setting in which `pipeline` measures its speed.

    quality_pipeline [RUN …] [--part 1/2] [--settle 0] [--quick] [--resume]

A run trains four stages with two copies each, and judges the final perplexity against the uncompressed pipeline with
the same seed. The control has the micro-batches of each batch in the reverse order: its difference is chance. Variants
with a seed of their own come first. Then come other ranks and shares of the stages, with one seed. The case `bytes`
counts the scheduled bytes of each part of a step. `python -m benchmarks report quality_pipeline` judges the runs.

A run is one thread of one process. It computes the optimizer steps of the eight ranks one after the other. Stages,
senders of messages and low-rank sums are those of a pipeline (tests/ranks/test_emulated_pipeline.py). So `--part 1/2`
and `--part 2/2` may run at once. The suite `propagation` has more on the messages between stages.
"""

from __future__ import annotations

import argparse
import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

import lab
from benchmarks import gpt
from benchmarks.harness import results
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.suites.emulated_pipeline import DroppingLink, EmulatedPipeline, Link
from benchmarks.suites.pipeline import (
    COPIES,
    EVERY_MESSAGE,
    NAIVE,
    OPTIMUS,
    RANKS,
    SHARES,
    STAGES,
    TOPOLOGY,
    Sizes,
    Stage,
    bytes_by_part,
    compression_of,
    loss_of,
    mesh_of_nodes,
)
from benchmarks.suites.quality import Judged, VariantRun, judged, set_learning_rate, spread_of, windows
from towpath.cli.plots import color, standalone_svg
from towpath.errors import ConfigError
from towpath.pipeline import Compression, Pipeline

STEPS = 600
QUICK_STEPS = 2
# A small learning rate that ends at 0, and many windows, as in `quality`: otherwise chance hides the differences.
PEAK = 1e-3
WARM_UP = 0.13  # of the steps send everything as it is, as in the paper
EVERY, WINDOWS, WINDOWS_AT_THE_END = 50, 64, 512  # steps between validations, their windows, those of the last one
SEEDS = 3
SIZES = replace(OPTIMUS, wait_seconds=0.0, computes=True)  # in `pipeline` its blocks wait instead
QUICK_SIZES = replace(SIZES.quick(), wait_seconds=0.0, batch=2)
SETTING = {"sizes": asdict(SIZES), "peak": PEAK, "warm_up": WARM_UP, "windows": WINDOWS_AT_THE_END}

BASELINE, CONTROL = "baseline", "control"
DROPPED = "cb, dropped"  # exposed gradients are zeros, and nothing is rescaled
# The candidates of `pipeline` that the variants are.
VARIANTS = {
    BASELINE: "uncompressed",
    CONTROL: "uncompressed",
    "cb": "cb",
    "cb, no error propagation": "cb, no feedback",
    DROPPED: DROPPED,
    EVERY_MESSAGE: EVERY_MESSAGE,
    "cb+fe": "cb+fe",
    "cb+fe+sc": "cb+fe+sc",
    "naive": NAIVE,
}
MESSAGE_RANKS = tuple(f"cb, message rank {rank}" for rank in (4, 8, 16, 64))
SWEEP = (*MESSAGE_RANKS, *SHARES, *RANKS)


def compression_in(variant: str, sizes: Sizes, steps: int) -> Compression:
    """Return the compression of a variant. It begins after a warm-up, as in the paper."""
    found = compression_of(VARIANTS.get(variant, variant), sizes)
    codecs = {"activation_gradients": found.activation_gradients, "gradients": found.gradients}
    after = int(WARM_UP * steps)
    return replace(found, **{n: replace(each, after=after) for n, each in codecs.items() if each.codec != "none"})


# Runs -----------------------------------------------------------------------------------------------------------------


@cache
def tokens(vocabulary: int) -> Tensor:
    """Return the sources of the standard library as bytes, and as pairs of bytes where these are common.

    The pairs have the numbers from 256 on. A run of common pairs that overlap is cut from its left end.
    """
    text = gpt.corpus().long()
    pairs = 256 * text[:-1] + text[1:]
    numbers = torch.full((256 * 256,), -1)
    numbers[torch.bincount(pairs, minlength=256 * 256).topk(vocabulary - 256).indices] = torch.arange(256, vocabulary)
    number, places = numbers[pairs], torch.arange(len(pairs))
    before = torch.where(number < 0, places, -1).cummax(0).values  # the last place without a common pair
    taken = (number >= 0) & ((places - before) % 2 == 1)
    found = text.clone()
    found[:-1][taken] = number[taken]
    kept = torch.ones(len(text), dtype=torch.bool)
    kept[1:] = ~taken
    return found[kept]


class PipelineQualityRun(VariantRun):
    """A variant with a seed, trained in an emulated pipeline."""

    __slots__ = ()

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train, and observe what messages lose in the steps that end with a validation."""
        sizes = QUICK_SIZES if settings.quick else SIZES
        steps = QUICK_STEPS if settings.quick else settings.options.steps
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            counts = (2, 2) if settings.quick else (WINDOWS, WINDOWS_AT_THE_END)
            found = train(self.variant, self.seed, steps, sizes, counts, settings.say)
        finally:
            torch.set_num_threads(threads)
        checks = [Check("final loss, nats a token", found.final)]
        return {"checks": checks, "steps": steps, "setting": SETTING, **asdict(found)}


@dataclass(frozen=True, slots=True)
class BytesCase:
    """The bytes of each part of a step, by variant."""

    name: str = "bytes"
    seed: int = field(default=0, repr=False)

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Make each pipeline on ranks of its own, and ask for its schedule."""
        sizes = QUICK_SIZES if settings.quick else SIZES
        found: dict[str, dict[str, int]] = {}
        with lab.Lab(TOPOLOGY, inter=None) as cluster:
            for name in ("uncompressed", *dict.fromkeys(list(VARIANTS.values())[2:])):
                if name == DROPPED:  # no pipeline does this
                    continue
                found[name] = cluster.call(_bytes_of, name, sizes, timeout_seconds=600)[-1]
                settings.say(f"{name}: {found[name]}")
        first, all_parts = found["uncompressed"], found["cb+fe+sc"]
        sent = ("activations", "gradients between stages", "gradients of stages", "tied embeddings")
        checks = [
            Check("cb: exposed gradients between stages, bytes", found["cb"]["exposed"] / first["exposed"] - 1),
            Check(
                "cb: all gradients between stages, bytes",
                found["cb"]["gradients between stages"] / first["gradients between stages"] - 1,
            ),
            Check("fe: tied embeddings, bytes", all_parts["tied embeddings"] / first["tied embeddings"] - 1),
            Check("cb+fe+sc: all bytes", sum(all_parts[p] for p in sent) / sum(first[p] for p in sent) - 1),
            Check("cb: memory of a stage's sender, in messages", found["cb"]["sender"] / (4 * prod(_message(sizes)))),
        ]
        return {"checks": checks, "setting": SETTING, "bytes": found}


def _bytes_of(rank: int, world: int, candidate: str, sizes: Sizes) -> dict[str, int]:
    """Return the bytes of each part of a step, and those that a stage keeps to encode its gradients."""
    mesh, compression = mesh_of_nodes(), compression_of(candidate, sizes)
    made = Pipeline(
        [partial(Stage, sizes, index) for index in range(STAGES)],
        "ddp",
        mesh=mesh,
        micro_batches=sizes.micro_batches,
        loss=loss_of,
        example=torch.zeros(sizes.batch, sizes.length, dtype=torch.int64),
        compression=compression,
        tied=("tokens", "head"),
    )
    kept = compression.activation_gradients.kept_for_message(_message(sizes))
    return bytes_by_part(made) | {"sender": 4 * sum(kept)}


def _message(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.batch, sizes.length, sizes.width


@dataclass(frozen=True, slots=True)
class Trained:
    """The validation loss by step, the final one on more windows, and by step what messages lost."""

    curve: list[tuple[int, float]]
    final: float
    observed: list[dict[str, float]]


def train(
    variant: str, seed: int, steps: int, sizes: Sizes, windows_of: tuple[int, int], say: Callable[[str], None]
) -> Trained:
    """Train a variant. `windows_of` has the windows of a validation, and those of the last one."""
    text, held_out = split_text(sizes.vocabulary)
    link = DroppingLink if variant == DROPPED else Link
    made = EmulatedPipeline(sizes, compression_in(variant, sizes, steps), seed, link=link)
    data = batches(text, 1000 * seed, sizes, reverse=variant == CONTROL)
    return train_and_validate(made, data, held_out, steps, windows_of, say)


def train_and_validate(
    made: EmulatedPipeline,
    data: Iterator[tuple[Tensor, Tensor]],
    held_out: Tensor,
    steps: int,
    windows_of: tuple[int, int],
    say: Callable[[str], None],
    peak: float = PEAK,
    every: int = EVERY,
) -> Trained:
    """Train a pipeline, and validate it every so many steps."""
    curve: list[tuple[int, float]] = []
    observed: list[dict[str, float]] = []
    made.observe()
    for step in training(made, data, steps, peak):
        if step % every == 0 or step == steps:
            curve.append((step, validation(made, held_out, windows_of[0])))
            observed += ({"step": step, "stage": stage, "lost": lost} for stage, lost in made.losses().items())
            say(f"step {step} of {steps}: validation loss {curve[-1][1]:.4f}")
        if (step + 1) % every == 0 or step + 1 == steps:
            made.observe()  # only in steps that a validation follows
    return Trained(curve, validation(made, held_out, windows_of[1]), observed)


def training(
    made: EmulatedPipeline, data: Iterator[tuple[Tensor, Tensor]], steps: int, peak: float = PEAK
) -> Iterator[int]:
    """Take the optimizer steps of a run, and yield after each one how many there were."""
    parameters = made.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=peak, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(steps):
        set_learning_rate(optimizer, peak, step, steps)
        made.step(*next(data))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield step + 1


def split_text(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the text to train on, and the held-out last tenth."""
    text = tokens(vocabulary) if vocabulary > 256 else gpt.corpus()
    split = len(text) // 10 * 9
    return text[:split], text[split:]


def batches(
    text: Tensor, seed: int, sizes: Sizes, *, reverse: bool = False, copies: int = COPIES
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same samples in one order of a copy's samples, or in the reverse order."""
    generator = torch.Generator().manual_seed(seed)
    each = sizes.batch * sizes.micro_batches
    while True:
        starts = torch.randint(len(text) - sizes.length - 1, (copies, each), generator=generator)
        yield windows(text, (starts.flip(1) if reverse else starts).flatten(), sizes.length)


def validation(made: EmulatedPipeline, text: Tensor, count: int) -> float:
    """Return the mean loss on `count` windows of the held-out text."""
    starts = torch.linspace(0, len(text) - made.sizes.length - 2, count).long()
    sums = [made.evaluate(*windows(text, part, made.sizes.length)) * len(part) for part in starts.split(64)]
    return sum(sums) / count


RUNS: list[PipelineQualityRun | BytesCase] = [
    BytesCase(),
    *(PipelineQualityRun(variant, seed) for seed in range(SEEDS) for variant in VARIANTS),
    *(PipelineQualityRun(variant, 0) for variant in SWEEP),
]


# Judgment -------------------------------------------------------------------------------------------------------------

# By which share of the baseline's perplexity each may be worse, in addition to the spread of the control.
MOST = {"cb": 0.005, "cb+fe": 0.005, "cb+fe+sc": 0.025}
MOST_SPREAD = 0.002
# Each left-out part, and the variant that has it: the first is expected to be worse by more than the spread.
HELPS = {"cb, no error propagation": "lazy error propagation", EVERY_MESSAGE: "epilogue-only"}


@cache
def runs_of() -> tuple[dict[str, Any], ...]:
    """Return the last run of each case in the setting that the suite has now."""
    here = [run for run in results.read(results.file_of("quality_pipeline")) if run.get("setting") == SETTING]
    return tuple(results.last(run for run in here if run.get("steps", STEPS) == STEPS).values())


def rows_of(runs: Iterable[Mapping[str, Any]]) -> list[Judged]:
    """Return the variants, judged by their perplexity."""
    trained = [dict(run) for run in runs if "variant" in run["case"]]
    return judged(trained, [*VARIANTS, *SWEEP], BASELINE, math.exp)


def steps_to(curve: Sequence[tuple[int, float]], loss: float) -> float | None:
    """Return after how many steps a curve first has a loss, between two validations in proportion."""
    before: tuple[int, float] | None = None
    for step, here in curve:
        if here <= loss:
            if before is None:
                return step
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - here)
        before = step, here
    return None


def steps_to_the_same(runs: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return by variant after how many steps an uncompressed run of the seed has the variant's last loss.

    It is a mean over the seeds. The loss is that of the curve, which has fewer windows than the final one.
    """
    curves = {(run["case"]["variant"], run["case"]["seed"]): run["curve"] for run in runs if "curve" in run}
    found: defaultdict[str, list[float]] = defaultdict(list)
    for (variant, seed), curve in curves.items():
        steps = steps_to(curves.get((BASELINE, seed), ()), curve[-1][1])
        if steps is not None:
            found[variant].append(steps)
    return {variant: statistics.mean(each) for variant, each in found.items()}


def verdicts(rows: Sequence[Judged]) -> dict[str, str]:
    """Return for each variant with a limit whether it keeps it."""
    spread, found = spread_of(list(rows)), {}
    means = {row.variant: row.mean for row in rows}
    for name, mean in means.items():
        if name == CONTROL and spread is not None:
            found[name] = f"spread ≤ {MOST_SPREAD:.1%}: {'met' if spread <= MOST_SPREAD else 'exceeded'}"
        elif name in MOST:
            found[name] = f"≤ {MOST[name]:.1%}: {'met' if mean <= MOST[name] else 'exceeded'}"
        elif name in HELPS and "cb" in means and spread is not None:
            helps = mean - means["cb"]
            found[name] = f"{HELPS[name]} helps by {helps:+.2%}: {'seen' if helps > spread else 'not seen'}"
    return found


def missing(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the cases that have no result in this setting."""
    there = {run["case"]["name"] for run in runs}
    return [run.name for run in RUNS if run.name not in there]


def summary() -> str:
    """Return each compression's perplexity over that of the baseline."""
    runs = runs_of()
    rows = rows_of(runs)
    found = verdicts(rows)
    shown = [f"{row} of the baseline's perplexity {found.get(row.variant, '')}".rstrip() for row in rows]
    return "\n".join([f"{len(runs)} of {len(RUNS)} runs of the current setting", *shown])


# The page and its picture ---------------------------------------------------------------------------------------------


def sections() -> Iterator[str]:
    """Yield the parts of the page: the setting, what is missing, tables and the picture."""
    runs, left = runs_of(), missing(runs_of())
    about = (
        f"Four stages of two ranks, {OPTIMUS.blocks} blocks of width {OPTIMUS.width}, a vocabulary of "
        f"{OPTIMUS.vocabulary:,}. A step has {OPTIMUS.micro_batches} micro-batches of {OPTIMUS.batch} sequences of "
        f"{OPTIMUS.length} tokens per copy. Messages have rank {OPTIMUS.rank}, gradients of stages rank "
        f"{OPTIMUS.gradient_rank}. A run has {STEPS} steps. `python -m benchmarks pipeline optimus-50mbit` measures "
        "the speed of the same setting."
    )
    yield textwrap.fill(about, 120, break_on_hyphens=False)
    if len(left) == len(RUNS):
        yield "No case has a result in this setting yet.\n"
    elif left:
        yield f"{len(left)} of {len(RUNS)} cases have no result yet and are left out."
    if rows := rows_of(runs):
        yield "## Perplexity relative to the uncompressed run of the same seed\n\n" + _quality_table(runs, rows)
    if counted := _bytes_table(runs):
        yield "## Bytes of a step\n\n" + counted
    if errors := _errors_table(runs):
        yield "## Errors of messages\n\n" + errors
    if rows:
        yield "![Perplexity, ranks and errors](../results/quality_pipeline.svg)\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def _quality_table(runs: Iterable[Mapping[str, Any]], rows: Sequence[Judged]) -> str:
    commits = {run["case"].get("variant"): results.measured_at(dict(run)) for run in runs}
    found = verdicts(rows)
    body = [
        (
            row.variant,
            f"{row.mean:+.2%}",
            row.by_seed,
            found.get(row.variant, ""),
            commits[row.variant],
        )
        for row in rows
    ]
    return _table(("variant", "mean", "by seed", "limit", "commit"), body)


_PARTS = ("activations", "gradients between stages", "exposed", "gradients of stages", "tied embeddings")


def _bytes_of_last(runs: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    return next((run["bytes"] for run in runs if "bytes" in run), {})


def _bytes_table(runs: Iterable[Mapping[str, Any]]) -> str:
    found = _bytes_of_last(runs)
    if not found:
        return ""
    base = found["uncompressed"]

    def cell(parts: Mapping[str, int], part: str) -> str:
        share = parts[part] / base[part] - 1
        return f"{parts[part] / 1e6:.2f} MB" + (f" ({share:+.1%})" if parts is not base else "")

    heads = ("candidate", *(f"of these, {part}" if part == "exposed" else part for part in _PARTS))
    return _table(heads, [(name, *(cell(parts, part) for part in _PARTS)) for name, parts in found.items()])


def _errors_table(runs: Iterable[Mapping[str, Any]]) -> str:
    """Return what messages lost, in the mean over the steps of all seeds."""
    lost: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for run in runs:
        for each in run.get("observed", ()):
            lost[run["case"]["variant"], int(each["stage"])].append(each["lost"])
    rows = [(variant, str(stage), f"{statistics.mean(each):.1%}") for (variant, stage), each in lost.items()]
    return _table(("variant", "sending stage", "error / gradient"), rows) if rows else ""


def picture() -> str:
    """Return the picture: perplexity by variant, over ranks and shares of stages, errors by step, and bytes."""
    runs = runs_of()
    return standalone_svg(_draw, list(runs), (11, 7.5))


def _draw(figure: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    axes = figure.subplots(2, 2)
    rows = rows_of(runs)
    _draw_variants(axes[0][0], [row for row in rows if row.variant in VARIANTS], spread_of(rows))
    _draw_ranks(axes[0][1], {row.variant: 100 * row.mean for row in rows})
    _draw_errors(axes[1][0], runs)
    _draw_bytes(axes[1][1], _bytes_of_last(runs))
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)


def _draw_variants(axes: Any, rows: Sequence[Judged], spread: float | None) -> None:
    for number, row in enumerate(rows):
        axes.scatter([100 * share for share in row.each], [number] * len(row.each), color=color(number), s=14)
        axes.plot([100 * row.mean] * 2, [number - 0.25, number + 0.25], color=color(number))
    if spread is not None:
        axes.axvspan(-100 * spread, 100 * spread, color="#868e96", alpha=0.2, linewidth=0, zorder=0)
    axes.set_yticks(range(len(rows)), [row.variant for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("percent over the baseline's perplexity; gray: by chance")


def _draw_ranks(axes: Any, means: Mapping[str, float]) -> None:
    """Draw the ranks of messages, those of gradients of all stages, and the shares of stages."""
    message = {int(name.rpartition(" ")[2]): name for name in MESSAGE_RANKS} | {OPTIMUS.rank: "cb"}
    gradient = {int(name.rpartition(" ")[2]): name for name in RANKS}
    lines = (("rank of messages (cb)", message), ("rank of gradients, all stages (cb+fe+sc-all)", gradient))
    for number, (label, found) in enumerate(lines):
        points = [(rank, means[name]) for rank, name in sorted(found.items()) if name in means]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color(number), label=label)
    shares = {name.split(", ")[-1]: means[name] for name in SHARES if name in means}
    if "cb+fe+sc" in means:
        shares["0.75 of stages"] = means["cb+fe+sc"]
    for number, (label, mean) in enumerate(shares.items()):
        axes.axhline(mean, color=color(2 + number), linewidth=1, linestyle="--", label=label)
    if axes.has_data():
        axes.set_xscale("log", base=2)
        axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("rank")
    axes.set_ylabel("percent over the baseline's perplexity")


def _draw_errors(axes: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    for number, variant in enumerate(("cb", "cb, no error propagation")):
        by_step: defaultdict[int, list[float]] = defaultdict(list)
        for run in runs:
            for each in run.get("observed", ()) if run["case"].get("variant") == variant else ():
                by_step[int(each["step"])].append(each["lost"])
        points = [(step, statistics.mean(values)) for step, values in by_step.items()]
        if points:
            axes.plot(*zip(*points, strict=True), color=color(number), label=variant)
    if axes.has_data():
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("error of messages / gradient")


def _draw_bytes(axes: Any, found: Mapping[str, Mapping[str, int]]) -> None:
    left = [0.0] * len(found)
    for number, part in enumerate(part for part in _PARTS if part != "exposed"):
        values = [parts[part] / 1e6 for parts in found.values()]
        axes.barh(range(len(found)), values, left=left, color=color(number), label=part, height=0.6)
        left = [a + b for a, b in zip(left, values, strict=True)]
    if found:
        axes.set_yticks(range(len(found)), [name.replace(NAIVE, "naive") for name in found])
        axes.invert_yaxis()
        axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("MB of a step between nodes")


# The suite ------------------------------------------------------------------------------------------------------------


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"at most {SEEDS}")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth run, for N processes at once")


def _chosen(runs: Sequence[Any], options: argparse.Namespace) -> Sequence[Any]:
    index, _, count = options.part.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ConfigError(f"--part is a number and a count, such as 1/2; got {options.part!r}.")
    seeds = 1 if options.quick else options.seeds
    return [run for run in runs if run.seed < seeds][int(index) - 1 :: int(count)]


SUITES = (Suite("quality_pipeline", __doc__ or "", RUNS, options=_options, chosen=_chosen, summary=summary),)
