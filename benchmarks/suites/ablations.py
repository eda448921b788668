"""One part at a time: what each idea wins by itself, what an owner-stepped Muon wins, and what LoRA costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks import deepspeed_peer
from benchmarks.environment import COMMUNICATION, COMPUTE, Rates, recorded_ratio, waiting
from benchmarks.harness import figures
from benchmarks.harness.candidates import LabPlace, Launch, timed
from benchmarks.harness.comparison import compare, started
from benchmarks.harness.suite import Settings, Suite
from benchmarks.peers import DEEPSPEED, CandidateSpec, TrainStep, build
from benchmarks.selection import Candidate
from benchmarks.suites.strategies import measured
from benchmarks.workload import PLAIN, Workload
from towpath.core import routes, units
from towpath.optim import owner_stepped
from towpath.topology.cluster import Topology

WARM_UP = 2

# Ablations ------------------------------------------------------------------------------------------------------------

ABLATIONS = """Measure one part at a time, with everything else unchanged.

    ablations [CASE …] [--rounds 6] [--quick] [--resume]

Blocks wait instead of computing, so that the cores are left to messages and codecs. Figures are ratios of steps:

    kernels          zero++ with the codecs' kernels against codecs in plain
                     PyTorch
    parts …          zero++ of 64 million parameters: slices in parts, so that
                     the hop inside a node overlaps with the hop between nodes,
                     against whole slices and other sizes of parts
    spanning gather  MiCS with a partition group of two nodes: the hierarchical
                     route against the flat ring and the HO-Ring
    group sizes      MiCS with partition groups of two, four and eight ranks
    all-reduce       DDP's sums by the HO-Ring against the flat ring
    placements       PaRO's IGG and NIG against MiCS and ZeRO++
    implementation   zero3 against DeepSpeed's ZeRO-3 and FSDP2 (MiCS, figure
                     15); it needs DeepSpeed (benchmarks/README.md)
    small units      on 2×4 ranks: small blocks that share the transfers of one
                     unit against blocks that are units of their own
    two hops         four micro-steps: MiCS and PaRO's IIG and NIG against the
                     same with gradients all-reduced in every micro-step
"""

SQUARE, FOUR_NODES = Topology(2, 2), Topology(4, 2)
SMALL = waiting(Workload(SQUARE, dtype="bfloat16"))
EIGHT_RANKS = waiting(Workload(FOUR_NODES, dtype="bfloat16"))
# 64 million parameters in nine blocks, which wait longer in proportion to their size.
LARGE = replace(SMALL, width=768, wait_seconds=4 * (SMALL.wait_seconds or 0))
# Twenty-four blocks of 110,000 parameters each, which `shard` merges into three units.
MANY_SMALL = waiting(Workload(Topology(2, 4), dtype="bfloat16", width=96, depth=24))
MANY_SMALL = replace(MANY_SMALL, wait_seconds=(MANY_SMALL.wait_seconds or 0) / 8)
PLAIN_TORCH, SMALLEST_PART, APART = "in plain torch", "smallest part", "units apart"


@dataclass(frozen=True, slots=True)
class AblatedCandidate:
    """A strategy, and what is changed for it: PLAIN_TORCH, APART, SMALLEST_PART with KiB, or nothing."""

    strategy: str
    change: str = ""

    @property
    def name(self) -> str:
        """The name in results."""
        return f"{self.strategy}, {self.change}" if self.change else self.strategy


def part(kib: int) -> AblatedCandidate:
    """Return zero++ with a limit for the smallest part of a slice."""
    return AblatedCandidate("zero++", f"{SMALLEST_PART} {kib} KiB")


@dataclass(frozen=True, slots=True)
class Ablation:
    """The first candidate against the others, on links of the rates `inter` and `intra`."""

    name: str
    workload: Workload
    candidates: Sequence[AblatedCandidate]
    inter: str | None
    intra: str | None = None

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the candidates."""
        if any(CandidateSpec.parse(each.strategy).name == DEEPSPEED for each in self.candidates):
            if settings.quick and not deepspeed_peer.installed():
                return {"checks": [], "warnings": ["DeepSpeed is not installed: this case was not checked"]}
            deepspeed_peer.check_installed()
        workload = self.workload.quick() if settings.quick else self.workload
        place = LabPlace(workload.topology, self.inter, self.intra)
        launches = {
            each.name: Launch(place, AblatedStep, (each.strategy, each.change, workload), WARM_UP)
            for each in self.candidates
        }
        with started(launches, settings.say) as made:
            found = compare(made, settings.rounds, settings.say)
            facts = {name: one.ask("facts")[0] for name, one in made.items()}
        first, *others = found.seconds
        return {
            "checks": [figures.ratio(found.seconds, first, other) for other in others],
            "strategies": {name: each["strategy"] for name, each in facts.items() if "strategy" in each},
            "exposed_seconds": {name: f["exposed_seconds"] for name, f in facts.items() if "exposed_seconds" in f},
            **found.recorded(),
        }


class AblatedStep(TrainStep):
    """A worker with a changed engine."""

    def __init__(self, rank: int, world: int, strategy: str, change: str, workload: Workload) -> None:
        if change == PLAIN_TORCH:
            modules: dict[str, Any] = sys.modules
            modules["towpath.codecs.kernels.cpp_codecs"] = None  # as where nothing compiles the kernels
        elif change == APART:
            units.SMALL_UNIT = 0  # no neighbors are merged
        elif change:
            routes.SMALLEST_PART_BYTES = int(change.split()[-2]) << 10
        super().__init__(rank, world, strategy, workload)


def _named(*strategies: str) -> list[AblatedCandidate]:
    return [AblatedCandidate(strategy) for strategy in strategies]


_PARTS = [part(256), part(64), part(1024), part(1 << 20)]  # the last one: whole slices
_SPANNING = _named("mics group=2x2 route=hierarchical", "mics group=2x2 route=flat", "mics group=2x2 route=ho-ring")
_IMPLEMENTATIONS = _named("zero3", "deepspeed tuned stage=3", "deepspeed stage=3", "fsdp2 tuned")
_FOUR_STEPS = replace(SMALL, micro_steps=4)

_ABLATIONS = [
    Ablation("kernels", SMALL, [AblatedCandidate("zero++"), AblatedCandidate("zero++", PLAIN_TORCH)], "400mbit"),
    Ablation("parts, cables of 100mbit", LARGE, _PARTS, "100mbit"),
    Ablation("parts, cables of 1gbit", LARGE, _PARTS, "1gbit"),
    Ablation("parts, cables of 100mbit and 400mbit inside", LARGE, _PARTS, "100mbit", "400mbit"),
    Ablation("spanning gather", EIGHT_RANKS, _SPANNING, "200mbit"),
    Ablation("group sizes", EIGHT_RANKS, _named("mics", "mics group=2x2", "mics group=2x4"), "200mbit"),
    Ablation("all-reduce", SMALL, _named("ddp route=ho-ring", "ddp"), "400mbit"),
    Ablation("placements, one micro-step", SMALL, _named("paro-igg", "mics", "hpz", "zero++"), "400mbit"),
    Ablation("placements, four micro-steps", _FOUR_STEPS, _named("paro-nig", "mics", "hpz", "zero++"), "400mbit"),
    Ablation("implementation", SMALL, _IMPLEMENTATIONS, "400mbit"),
    Ablation("implementation, slow cables", SMALL, _IMPLEMENTATIONS, "100mbit"),
    *(
        Ablation(f"small units, {name}", MANY_SMALL, [AblatedCandidate(name), AblatedCandidate(name, APART)], "400mbit")
        for name in ("mics", "zero3")
    ),
]


# Muon -----------------------------------------------------------------------------------------------------------------

MUON = """Measure the step of an optimizer that needs full matrices: owners of matrices against every rank doing all.

    muon [CASE …] [--rounds 8] [--quick] [--resume]

Two nodes of two ranks use Muon for the matrices of the model's blocks. `owner_stepped` is ours, under zero3. `naive` is
what users of FSDP2 write: each rank gathers the gradient of each matrix (`grad.full_tensor()`), lets Muon step all of
them, and copies back its own slices. It keeps whole weights and momenta on every rank. So it needs more memory than
ours, and fewer bytes than a variant that gathers weights as well.

A sample is the optimizer's step alone. Gradients are computed once, before the first sample, and stay.
"""

MUON_LIMIT = 0.6  # of the seconds of `naive`
OWNERS, NAIVE = "owner_stepped", "naive"
MUON_MODELS = {OWNERS: "zero3", NAIVE: "fsdp2"}  # by candidate, the engine of its model
MUON_LEARNING_RATE = 0.02


@dataclass(frozen=True, slots=True)
class MuonCase:
    """Muon on links of the rate `inter`, or on unshaped ones."""

    name: str
    inter: str | None

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the two steps."""
        workload = PLAIN.quick() if settings.quick else PLAIN
        place = LabPlace(workload.topology, self.inter)
        launches = {kind: Launch(place, MuonStep, (kind, workload), WARM_UP) for kind in MUON_MODELS}
        with started(launches, settings.say) as made:
            found = compare(made, settings.rounds, settings.say)
            matrices = made[OWNERS].ask("matrices")[0]
        checks = [figures.ratio(found.seconds, OWNERS, NAIVE, MUON_LIMIT)]
        return {"checks": checks, "matrices": matrices, **found.recorded()}


class MuonStep:
    """A worker whose sample is one step of the optimizer."""

    def __init__(self, rank: int, world: int, kind: str, workload: Workload) -> None:
        model, _ = build(MUON_MODELS[kind], workload)
        model(*next(workload.data(rank))).backward()
        self._matrices = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
        if kind == OWNERS:
            muon = torch.optim.Muon(self._matrices, lr=MUON_LEARNING_RATE)
            self._step: Callable[[], Any] = owner_stepped(muon).step
        else:
            self._step = NaiveMuon(self._matrices).step

    def sample(self) -> float:
        """Take a step and return its seconds."""
        return timed(self._step)

    def matrices(self) -> int:
        """Return the number of matrices."""
        return len(self._matrices)


class NaiveMuon:
    """Muon for the matrices of an FSDP2 model, with all the work on every rank."""

    def __init__(self, sharded: list[nn.Parameter]) -> None:
        self._sharded = sharded
        self._wholes = [nn.Parameter(_gathered(p.detach()).clone()) for p in sharded]
        self._optimizer = torch.optim.Muon(self._wholes, lr=MUON_LEARNING_RATE)

    @torch.no_grad()
    def step(self) -> None:
        """Gather the gradients, step every matrix, and copy back this rank's slices."""
        for whole, p in zip(self._wholes, self._sharded, strict=True):
            whole.grad = _gathered(p.grad)
        self._optimizer.step()
        for whole, p in zip(self._wholes, self._sharded, strict=True):
            sharded: Any = p
            mesh, local = sharded.device_mesh, sharded.to_local()
            if local.numel():  # FSDP2 cuts matrices by rows, as torch.chunk does
                local.copy_(whole.chunk(mesh.size())[mesh.get_local_rank()])


def _gathered(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, DTensor), f"expected a DTensor of FSDP2, got {type(tensor).__name__}"
    return tensor.full_tensor()


# LoRA -----------------------------------------------------------------------------------------------------------------

LORA = """Measure what LoRA steps cost over slow links, where most of the model does not train.

    lora [CASE …] [--rounds 6] [--quick] [--resume]

Two nodes of two ranks train PEFT's adapters of a GPT. On these links, FSDP2's communication alone takes four times what
the module computes. FSDP2 has the same parameters frozen, and reduces no gradients of them. Ours keep frozen parameters
in the node (`zero3`, `mics`), there in int8, or with adapters that every rank holds (`ddp frozen=2x1`), or whole on
every rank (`frozen=1x1`), as DDP does. `bare` is the computation with clipping and AdamW. `bare barrier` also waits for
all ranks once a step, as every rank must that sums gradients.

In `lora` all ranks compute on the cores of this machine. In `lora-elsewhere` blocks wait instead. The suite needs
`pip install 'towpath[peft]'`.
"""

LORA_RANK = 8
LORA_RATIO = 4.0  # so that a step with all overlap there can be still takes three times the computation
LORA_LIMIT = 1.15
LORA_OURS = ("zero3", "mics", "mics frozen_codec=int8", "ddp frozen=2x1", "mics frozen=1x1", "ddp frozen=1x1")
LORA_PEERS = ("fsdp2", "fsdp2 tuned")
WHOLE = "torch-ddp tuned"
BARE, BARE_BARRIER = "bare", "bare barrier"
# A machine of 24 GiB has no room for all candidates where each computes a model of its own.
FEWER = ("mics", "ddp frozen=2x1", "mics frozen=1x1", "ddp frozen=1x1")
_RATES = Rates()


@dataclass(frozen=True, slots=True)
class LoraCase:
    """LoRA steps of our strategies, of FSDP2, and of `others`, over the computation alone."""

    name: str
    workload: Workload
    ours: tuple[str, ...] = LORA_OURS
    others: tuple[str, ...] = (BARE, BARE_BARRIER, WHOLE)

    @property
    def pairs(self) -> Iterator[tuple[str, str, float | None]]:
        """The ratios of the case, with limits for those of ours and of FSDP2."""
        yield from ((ours, COMPUTE, LORA_LIMIT) for ours in self.ours)
        yield from ((COMPUTE, peer, 1 / 3) for peer in LORA_PEERS)
        yield from ((other, COMPUTE, None) for other in self.others)
        yield from ((ours, BARE_BARRIER, None) for ours in self.ours)
        yield "ddp frozen=1x1", WHOLE, None

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Search for the link rate, and compare the candidates."""
        workload = self.workload.quick() if settings.quick else self.workload
        derived = _RATES.of(LORA_RATIO, workload, settings.say, settings.pool)
        names = (*self.ours, *LORA_PEERS, *self.others)
        candidates = [Candidate.of(name, workload.topology, workload.dtype) for name in names]
        found, failures = measured(candidates, derived.rate, workload, settings)
        seconds: dict[str, list[float]] = found.pop("comparison").seconds
        usual = figures.medians(seconds)
        comm_ratio, warnings = recorded_ratio(derived, usual[COMMUNICATION] / usual[COMPUTE])
        return {
            "checks": [
                figures.ratio(seconds, ours, theirs, most)
                for ours, theirs, most in self.pairs
                if not failures.keys() & {ours, theirs}
            ],
            "warnings": warnings,
            "comm_ratio": comm_ratio,
            "skipped": failures,
            **found,
        }


SUITES = (
    Suite("ablations", ABLATIONS, _ABLATIONS),
    Suite("muon", MUON, [MuonCase("200mbit", "200mbit"), MuonCase("unshaped", None)], rounds=8),
    Suite(
        "lora",
        LORA,
        [
            LoraCase("lora", Workload(adapters=LORA_RANK), FEWER, (BARE_BARRIER, WHOLE)),
            LoraCase("lora-elsewhere", replace(waiting(Workload()), dtype="float32", adapters=LORA_RANK)),
        ],
    ),
)
