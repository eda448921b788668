"""Measure what exact transport sends when a GPT trains on text, and whether blocks that wait send the same.

    exact_bytes [CASE …] [--steps 300] [--quick] [--resume]

In the cases `lr…` four ranks of two nodes train a GPT of 2.9 million parameters in bf16, on the sources of the Python
standard library, at a constant learning rate. `paro-iig` with `exact=True` takes each step next to `paro-iig` without.
The bytes between nodes are those of the kernel's counters. Losses and weights must be equal to the bit.

A bucket has parameters of several classes. So every few steps, each rank also encodes its own slices of the matrices,
of the norms and biases, and of the embeddings, each class as one message: the gradient after its reduction, and the
weights before and after the optimizer's step.

The cases `replay…` compare blocks that wait, and replay recorded gradients, with blocks that compute: the bits of an
element between nodes in the same model, step and learning rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import towpath
from benchmarks import gpt
from benchmarks.environment import waiting
from benchmarks.harness import results
from benchmarks.harness.candidates import LabPlace, Launch, timed
from benchmarks.harness.comparison import Comparison, started
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.peers import TrainStep, bits_between_nodes
from benchmarks.workload import SQUARE, Workload
from towpath.cli.plots import color, standalone_svg
from towpath.codecs.exact import encode, message_bound

STRATEGY = "paro-iig"
PLAIN, EXACT = STRATEGY, f"{STRATEGY} exact=true"
STEPS, QUICK_STEPS = 300, 4
EVERY = 5  # steps between two points of the picture
BATCH, LENGTH = 4, 128
MOST_BYTES = {1e-3: 0.54, 1e-4: 0.48, 1e-5: 0.44}  # with exact transport over without, by learning rate
CLASSES = ("matrices", "norms and biases", "embeddings")

# Training on text -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BytesCase:
    """Training in bf16 at a learning rate, with reductions in a dtype."""

    name: str
    learning_rate: float
    reduce: str = "bfloat16"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train with exact transport and without, step by step."""
        steps = QUICK_STEPS if settings.quick else settings.options.steps
        launches = {name: Launch(LabPlace(SQUARE), Training, (name, self)) for name in (PLAIN, EXACT)}
        with started(launches, settings.say) as made:
            names = list(made)
            found = Comparison([], *({name: [] for name in names} for _ in range(3)))
            for step in range(steps):
                for name in names if step % 2 else names[::-1]:
                    found.measure(name, made[name])
                if step % 50 == 49:
                    settings.say(f"step {step + 1} of {steps}")
            facts = {name: one.ask("facts") for name, one in made.items()}
        sent = {name: sum(found.between_nodes[name]) for name in names}
        differ = sum(a != b for mine, other in zip(*facts.values(), strict=True) for a, b in _losses(mine, other))
        weights = sum(mine["weights"] != other["weights"] for mine, other in zip(*facts.values(), strict=True))
        most = MOST_BYTES.get(self.learning_rate) if self.reduce == "bfloat16" and not settings.quick else None
        bits = facts[EXACT][0]["bits_between_nodes"]
        return {
            "checks": [
                Check(f"bytes between nodes, {EXACT} / {PLAIN}", sent[EXACT] / sent[PLAIN], at_most=most),
                *(Check(f"bits per element, {kind}", value) for kind, value in bits.items()),
                Check("losses that differ", differ, at_most=0),
                Check("ranks whose weights differ", weights, at_most=0),
            ],
            "steps": steps,
            "bytes_between_nodes": sent,
            "ratio_by_step": ratios(found.between_nodes[EXACT], found.between_nodes[PLAIN]),
            "final_loss": mean(rank["losses"][-1] for rank in facts[EXACT]),
            "bits_by_class": bits_by_class([rank["encoded"] for rank in facts[EXACT]]),
        }


def _losses(mine: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    return zip(mine["losses"], other["losses"], strict=True)


def ratios(exact: Sequence[int], plain: Sequence[int]) -> list[float]:
    """Return the bytes with exact transport over those without, of each `EVERY` steps."""
    starts = range(0, len(exact), EVERY)
    return [round(sum(exact[s : s + EVERY]) / sum(plain[s : s + EVERY]), 4) for s in starts]


Encoded = Mapping[str, Mapping[str, tuple[int, int]]]  # by what is encoded and class: the elements, and the bytes


def bits_by_class(ranks: Sequence[Sequence[Encoded]]) -> list[dict[str, dict[str, float]]]:
    """Return the bits of an element of all ranks together, by point of the picture, what is encoded, and class."""
    return [
        {
            what: {
                one: round(8 * sum(rank[what][one][1] for rank in point) / sum(rank[what][one][0] for rank in point), 3)
                for one in CLASSES
            }
            for what in point[0]
        }
        for point in zip(*ranks, strict=True)
    ]


class Training:
    """A worker whose sample is a step of training on text."""

    def __init__(self, rank: int, world: int, candidate: str, case: BytesCase) -> None:
        torch.manual_seed(0)
        self._reduce: torch.dtype = getattr(torch, case.reduce)
        strategy = towpath.strategy(STRATEGY, SQUARE, exact=candidate == EXACT)
        self._model: Any = towpath.shard(
            gpt.GPT(context=LENGTH), strategy, precision=towpath.Precision(torch.bfloat16, self._reduce)
        )
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=case.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._data = gpt.batches(rank, BATCH, LENGTH)
        self._encodes = candidate == EXACT
        self._losses: list[float] = []
        self._encoded: list[Encoded] = []

    def sample(self) -> float:
        """Take a step and return its seconds."""
        look = self._encodes and len(self._losses) % EVERY == 0
        return timed(self._observed_step if look else self._step)

    def facts(self) -> dict[str, Any]:
        """Return the losses of this rank's batches, a digest of its weights, and what was encoded."""
        held = sha256()
        for parameter in self._model.parameters():
            held.update(parameter.to_local().detach().contiguous().view(torch.uint8).numpy().tobytes())
        return {
            "losses": self._losses,
            "weights": held.hexdigest(),
            "encoded": self._encoded,
            "bits_between_nodes": bits_between_nodes(towpath.stats(self._model)),
        }

    def _step(self, reduced: Callable[[], None] = lambda: None) -> None:
        loss = self._model(*next(self._data))
        loss.backward()
        reduced()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(loss.item())

    def _observed_step(self) -> None:
        """Take a step, and encode what this rank holds of each class."""
        old = self._slices(torch.bfloat16, lambda parameter: parameter)
        gradients: dict[str, Tensor] = {}
        self._step(lambda: gradients.update(self._slices(self._reduce, lambda parameter: parameter.grad)))
        new = self._slices(torch.bfloat16, lambda parameter: parameter)
        self._encoded.append(
            {
                "gradients": {one: encoded(None, gradients[one]) for one in CLASSES},
                "weights": {one: encoded(old[one], new[one]) for one in CLASSES},
            }
        )

    def _slices(self, dtype: torch.dtype, of: Callable[[Any], Any]) -> dict[str, Tensor]:
        """Return this rank's elements of each class in a dtype, one after the other."""
        found: dict[str, list[Tensor]] = {one: [] for one in CLASSES}
        for name, parameter in self._model.named_parameters():
            found[class_of(name, parameter.ndim)].append(of(parameter).to_local().detach().to(dtype, copy=True))
        return {one: torch.cat(parts) for one, parts in found.items()}


def class_of(name: str, dimensions: int) -> str:
    """Return the class of a parameter of the GPT. Its head is the matrix of its embedding."""
    if name.startswith(("tokens", "positions")):
        return "embeddings"
    return "matrices" if dimensions > 1 else "norms and biases"


def encoded(old: Tensor | None, values: Tensor) -> tuple[int, int]:
    """Return the number of values, and the bytes of one message of them, relative to `old` if that is given."""
    if not len(values):
        return 0, 0
    out = torch.empty(message_bound(len(values), values.dtype), dtype=torch.uint8)
    size = encode(old, values, out)
    assert size is not None  # on a CPU
    return len(values), size


# Blocks that wait -----------------------------------------------------------------------------------------------------

MOST_APART = 0.03
REPLAY_STEPS = 32
WAIT_SECONDS = 0.001  # no longer than it takes to see that they wait


@dataclass(frozen=True, slots=True)
class ReplayCase:
    """The bits of an element between nodes, with blocks that wait against blocks that compute."""

    name: str
    workload: Workload

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train in both ways, and compare their bits step by step."""
        computing = self.workload.quick() if settings.quick else self.workload
        both = {"compute": computing, "wait": replace(computing, wait_seconds=WAIT_SECONDS)}
        place = LabPlace(computing.topology)
        launches = {how: Launch(place, TrainStep, (EXACT, workload)) for how, workload in both.items()}
        bits: dict[str, list[dict[str, float]]] = {how: [] for how in both}
        with started(launches, settings.say) as made:
            for step in range(QUICK_STEPS if settings.quick else REPLAY_STEPS):
                for how, one in made.items():
                    one.ask("forget")
                    one.ask("sample")
                    bits[how].append(one.ask("facts")[0]["bits_between_nodes"])
                settings.say(f"step {step + 1}: {bits['compute'][-1]} computing, {bits['wait'][-1]} waiting")
        return {"checks": list(replay_checks(bits)), "bits_between_nodes": bits}


def replay_checks(bits: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[Check]:
    """Yield for each kind the bits of both, and by how much those of blocks that wait differ, as a share.

    The first step has no parameter sync, and in the second it has values instead of differences.
    """
    settled = {how: steps[2:] for how, steps in bits.items()}
    for kind in settled["compute"][0]:
        means = {how: mean(step[kind] for step in steps) for how, steps in settled.items()}
        pairs = zip(settled["wait"], settled["compute"], strict=True)
        worst = max(abs(wait[kind] / compute[kind] - 1) for wait, compute in pairs)
        yield from (Check(f"{kind}: bits per element, blocks {how}", value) for how, value in means.items())
        yield Check(f"{kind}: |waiting / computing − 1|", abs(means["wait"] / means["compute"] - 1), MOST_APART)
        yield Check(f"{kind}: |waiting / computing − 1| of the worst step", worst)


# The picture ----------------------------------------------------------------------------------------------------------


def runs_of() -> list[dict[str, Any]]:
    """Return the last run of each case that trains on text with reductions in bf16, the largest rate first."""
    lines = results.last(results.read(results.file_of("exact_bytes"))).values()
    return [line for line in lines if line["case"].get("reduce") == "bfloat16" and not line.get("quick")]


def picture() -> str:
    """Return the encoded bytes over those of the values, by step, class and learning rate."""
    return standalone_svg(draw, runs_of(), (11, 3.8))


def draw(figure: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw a panel for each learning rate: gradients in broken lines, weights in full ones."""
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, run in zip(panels, runs, strict=True):
        steps = [EVERY * point for point in range(len(run["bits_by_class"]))]
        for number, one in enumerate(CLASSES):
            for what, style in (("gradients", "--"), ("weights", "-")):
                shares = [point[what][one] / 16 for point in run["bits_by_class"]]
                axes.plot(steps, shares, style, color=color(number), linewidth=1.2, label=f"{what}: {one}")
        together = [EVERY * (point + 0.5) for point in range(len(run["ratio_by_step"]))]
        axes.plot(together, run["ratio_by_step"], ":", color="#868e96", linewidth=1.6, label="bytes between nodes")
        axes.set_title(f"learning rate {run['case']['learning_rate']:g}", fontsize=9)
        axes.set_xlabel("optimizer steps")
        axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    panels[0].set_ylabel("bytes, exact / as they are")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=4, loc="outside lower center")


# Suite ----------------------------------------------------------------------------------------------------------------

# Of the size at which blocks that wait are measured.
REPLAYED = replace(waiting(Workload(SQUARE, dtype="bfloat16")), wait_seconds=None)
CASES = (
    *(BytesCase(f"lr{rate:g}", rate) for rate in MOST_BYTES),
    BytesCase("lr0.0001-fp32-reduce", 1e-4, "float32"),
    ReplayCase("replay-micro1", REPLAYED),
    ReplayCase("replay-micro4", replace(REPLAYED, micro_steps=4)),
    ReplayCase("replay-micro1-lr1e-05", replace(REPLAYED, learning_rate=1e-5)),
)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training on text; default: {STEPS}")


SUITES = (Suite("exact_bytes", __doc__ or "", CASES, options=_options),)
