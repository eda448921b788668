"""Measure what `towpath.wires` saves under FSDP2, HSDP and DDP.

    wires [CASE …] [--steps 40] [--quick] [--resume]

In the cases `bytes-…`, four ranks of two nodes train a GPT of three million parameters on text, with stock FSDP2 and
with wires, step by step. Bytes between nodes are those of the kernel's counters. The first two steps do not count,
because weights cross as values once. With LoRA, the adapters of a GPT of six million parameters train alone.

In the cases `ratio4-…`, links are so slow that the communication of stock FSDP2 takes four times the computation. Each
candidate has processes of its own, and their steps interleave. The peers are those that were the fastest in the suite
`strategies`, tuned. FSDP2 overlaps nothing on CPUs, which favors those who send fewer bytes. `towpath plan` predicts
the steps on GPUs, where it overlaps.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import towpath
from benchmarks.environment import Environment, NodeLink, waiting
from benchmarks.harness import figures
from benchmarks.harness.candidates import LabPlace, Launch, timed
from benchmarks.harness.comparison import compare, started
from benchmarks.harness.figures import Check, medians
from benchmarks.harness.suite import Settings, Suite, show
from benchmarks.report import comparison_table
from benchmarks.suites.strategies import QUICK_DEPTH, QUICK_WIDTH, StrategiesCase
from benchmarks.workload import SQUARE, Workload

FSDP2, WIRES = "fsdp2", "fsdp2 wires"
STEPS, QUICK_STEPS, WARM_UP = 40, 4, 2

# Bytes ----------------------------------------------------------------------------------------------------------------

TEXT = Workload(SQUARE, dtype="bfloat16", width=192, depth=6)
ADAPTERS = 8  # the rank of LoRA
# The most bytes between nodes with wires, over those of stock FSDP2.
MOST_BYTES = {"bfloat16": 0.20, "float32": 0.25}
MOST_BYTES_OF_LORA = 0.02
# By how much the mean losses of the last steps may differ. Sums over four ranks differ by their order.
LAST, MOST_APART = 10, 0.02


@dataclass(frozen=True, slots=True)
class BytesCase:
    """Training on text under stock FSDP2 and with wires. Gradients are reduced in the dtype `reduce`."""

    name: str
    workload: Workload
    reduce: str = "bfloat16"

    @property
    def most(self) -> float:
        """The limit of the bytes with wires over those without."""
        return MOST_BYTES_OF_LORA if self.workload.adapters else MOST_BYTES[self.reduce]

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Take each step under both, one after the other."""
        steps = QUICK_STEPS if settings.quick else settings.options.steps
        case = replace(self, workload=self.workload.quick()) if settings.quick else self
        launches = {name: Launch(LabPlace(SQUARE), Training, (name, case), WARM_UP) for name in (FSDP2, WIRES)}
        with started(launches, settings.say) as made:
            found = compare(made, steps, lambda text: None)
            facts = {name: one.ask("facts") for name, one in made.items()}
        losses = {name: [mean(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
                  for name, ranks in facts.items()}  # fmt: skip
        return {
            "checks": list(
                bytes_checks(found.between_nodes, facts[WIRES][0], losses, None if settings.quick else self.most)
            ),
            "steps": steps,
            "bytes_between_nodes": found.between_nodes,
            "losses": losses,
            "parameters": facts[WIRES][0]["parameters"],
            "memory_bytes": facts[WIRES][0]["memory_bytes"],
        }


def bytes_checks(
    sent: Mapping[str, Sequence[int]],
    facts: Mapping[str, Any],
    losses: Mapping[str, Sequence[float]],
    most: float | None,
) -> Iterator[Check]:
    """Yield the bytes with wires over those without, those of a parameter and node, memory, and the losses."""
    yield Check(f"bytes between nodes, {WIRES} / {FSDP2}", sum(sent[WIRES]) / sum(sent[FSDP2]), at_most=most)
    for name in (FSDP2, WIRES):
        yield Check(f"bytes a parameter and node, {name}", mean(sent[name]) / facts["parameters"] / SQUARE.nodes)
    yield Check("bytes a parameter that a rank holds for its column", facts["held_bytes"] / facts["parameters"])
    last = {name: mean(values[-LAST:]) for name, values in losses.items()}
    apart = MOST_APART if most is not None else None
    yield Check(f"|loss, {WIRES} / {FSDP2} − 1|", abs(last[WIRES] / last[FSDP2] - 1), at_most=apart)


class Training:
    """A worker whose sample is a step of training on text."""

    def __init__(self, rank: int, world: int, candidate: str, case: BytesCase) -> None:
        workload = case.workload
        self._model: Any = workload.model()
        self._parameters = sum(p.numel() for p in self._model.parameters())
        policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, case.reduce))
        mesh = init_device_mesh("cpu", (world,))
        for module in (*self._model.blocks, self._model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        if candidate == WIRES:
            towpath.wires(self._model, topology=SQUARE)
        self._losses: list[float] = []
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=workload.learning_rate, betas=(0.9, 0.95), fused=True)
        self._data = workload.data(rank)

    def sample(self) -> float:
        """Take a step and return its seconds."""
        return timed(self._step)

    def _step(self) -> None:
        loss = self._model(*next(self._data))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._optimizer.param_groups[0]["params"], 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(loss.item())

    def facts(self) -> dict[str, Any]:
        """Return the losses of this rank's batches, and the memory that the wires hold."""
        wired = hasattr(self._model, "towpath_wires")
        memory = towpath.stats(self._model).memory_bytes if wired else {}
        held = memory.get("weights of the column", 0)
        return {
            "losses": self._losses,
            "parameters": self._parameters,
            "memory_bytes": dict(memory),
            "held_bytes": held,
        }


# Time -----------------------------------------------------------------------------------------------------------------

RATIO = 4.0
# The same program with one line more, and wires under peers as their experts tune them.
WIRED = (WIRES, "fsdp2 tuned wires", "hsdp tuned reshard=no wires", "torch-ddp tuned wires")
TUNED = ("hsdp tuned reshard=no ring", "fsdp2 tuned reshard=no ring", "torch-ddp tuned bf16")
OVER_STOCK, OVER_TUNED = 2.5, 1.25


@dataclass(frozen=True, slots=True)
class TimeCase:
    """Steps with wires against stock FSDP2, and against tuned peers, on links of one rate."""

    name: str
    workload: Workload
    link: NodeLink = field(default_factory=lambda: NodeLink(RATIO))

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the candidates."""
        workload = self.workload
        if settings.quick:
            workload = replace(workload, width=QUICK_WIDTH, depth=QUICK_DEPTH)
        options = Namespace(candidates=(*WIRED, FSDP2, *TUNED), screen=False, quick=settings.quick)
        case = StrategiesCase(self.name, workload, NodeLink(inter="100mbit") if settings.quick else self.link)
        found = case.measure(replace(settings, options=options))
        return {**found, "checks": list(time_checks(found["seconds"], not settings.quick))}


def time_checks(seconds: Mapping[str, Sequence[float]], has_limits: bool = True) -> Iterator[Check]:
    """Yield how many times as fast steps with wires are as those of stock FSDP2, and of the fastest tuned peer."""
    usual = medians(seconds)
    over_stock, over_tuned = (OVER_STOCK, OVER_TUNED) if has_limits else (None, None)
    fastest = min((name for name in WIRED if name in usual), key=usual.__getitem__, default=None)
    peer = min((name for name in (FSDP2, *TUNED) if name in usual), key=usual.__getitem__, default=None)
    for ours, theirs, least in ((WIRES, FSDP2, over_stock), (fastest, peer, over_tuned)):
        if ours in usual and theirs in usual:
            yield figures.speedup(seconds, f"{ours} against {theirs}, times as fast", ours, theirs, least)


# Suite ----------------------------------------------------------------------------------------------------------------

_USUAL = Workload(SQUARE, dtype="bfloat16")
_SHORT = replace(_USUAL, width=240, depth=6)


def _time(workload: Workload) -> TimeCase:
    return TimeCase(Environment(workload, NodeLink(RATIO)).name.removeprefix("2x2-"), workload)


# The shortest come first, so that there is a table after ten minutes.
CASES = (
    *(
        BytesCase(
            f"bytes-lr{rate:g}{'-fp32-reduce' * (reduce == 'float32')}", replace(TEXT, learning_rate=rate), reduce
        )
        for reduce in MOST_BYTES
        for rate in (1e-3, 1e-4)
    ),
    BytesCase("bytes-lora", replace(TEXT, width=384, depth=3, learning_rate=1e-4, adapters=ADAPTERS)),
    _time(waiting(_USUAL)),
    _time(_SHORT),
    _time(_USUAL),
)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training on text; default: {STEPS}")


def shown(line: dict[str, Any]) -> str:
    """Return a result as text."""
    return comparison_table(line) if "median_seconds" in line else show(line)


SUITES = (Suite("wires", __doc__ or "", CASES, options=_options, shown=shown),)
