"""Compare predicted with measured steps of pipelines: twelve settings, by the planner and in the lab.

    pipeline_planner [CASE …] [--rounds 6] [--quick] [--resume]

Four stages of a GPT, or eight where a schedule has two on each rank, run on eight ranks, each of which is a node. On
ranks of their own, `towpath probe` measures the cluster, and then each rank measures the units of its stages. The
predictions use nothing else. Then every setting runs. The figures are the error of each predicted step, and whether the
planner counts as many bytes as the schedule of the job, which the kernel's counters confirm
(tests/lab/test_pipeline_bytes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath
from benchmarks.harness.candidates import LabPlace, Launch
from benchmarks.harness.comparison import compare, started
from benchmarks.harness.figures import Check, medians
from benchmarks.harness.suite import Settings, Suite
from benchmarks.suites.pipeline import (
    COPIES,
    STAGES,
    TOPOLOGY,
    Piped,
    Sizes,
    Stage,
    compression_of,
    loss_of,
    mesh_of_nodes,
)
from towpath.core.passes import SCHEDULES
from towpath.engine.layout import lay_out
from towpath.pipeline.schedules import owners_of, schedule_class, walks
from towpath.plan.choice import profile_model
from towpath.plan.cluster_probe import probe
from towpath.plan.model import Model, StagedModel
from towpath.plan.pipelines import Layout, PipelinePrediction, Pipelines
from towpath.plan.profile import Profile
from towpath.plan.request import Optimizer, Request
from towpath.plan.solver import Batching

WARM_UP = 2
PROBE_SECONDS = 20.0
MOST_ERROR = 0.15
WAITING = Sizes(vocabulary=1024, batch=8, length=128, micro_batches=4, wait_seconds=0.02, computes=False, tied=False)
COMPUTING = Sizes(tied=False)


@dataclass(frozen=True, slots=True)
class PipelineSetting:
    """A schedule, a strategy and a compression."""

    schedule: str = "1F1B"
    strategy: str = "ddp"
    compression: str = "uncompressed"
    tied: bool = False

    def __str__(self) -> str:
        words = [self.schedule, self.strategy]
        words += [self.compression] if self.compression != "uncompressed" else []
        return ", ".join([*words, *["tied"] * self.tied])

    def of(self, sizes: Sizes) -> Sizes:
        """Return sizes with this setting."""
        return replace(sizes, schedule=self.schedule, strategy=self.strategy, tied=self.tied)


@dataclass(frozen=True, slots=True)
class PipelinePlannerCase:
    """Settings on links of one rate."""

    inter: str
    settings: tuple[PipelineSetting, ...]
    sizes: Sizes = WAITING

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"{self.inter}, {'computing' if self.sizes.computes else 'waiting'}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Probe, predict, measure and compare."""
        sizes = self.sizes.quick() if settings.quick else self.sizes
        cluster = LabPlace(TOPOLOGY, self.inter)
        seconds = 2.0 if settings.quick else PROBE_SECONDS
        predicted: dict[str, PipelinePrediction] = {}
        profile: Profile | None = None
        with started({"probe": Launch(cluster, PipelineProbe, (seconds,))}, settings.say) as running:
            for setting in self.settings:
                profile, staged = running["probe"].ask("staged", setting.of(sizes))[0]
                predicted[str(setting)] = _predicted(setting, sizes, profile, staged)
        launches = {
            str(setting): Launch(cluster, Piped, (setting.compression, setting.of(sizes)), WARM_UP)
            for setting in self.settings
        }
        with started(launches, settings.say) as running:
            measured = compare(running, settings.rounds, settings.say)
            sent = {name: one.ask("inter_bytes")[0] for name, one in running.items()}
        return {
            **_compared(predicted, measured.seconds, sent),
            **measured.recorded(),
            "profile": profile.to_json() if profile is not None else "",
            "computing_seconds": {name: round(p.computing, 5) for name, p in predicted.items()},
        }


def _compared(
    predicted: Mapping[str, PipelinePrediction], measured: Mapping[str, list[float]], sent: Mapping[str, int]
) -> dict[str, Any]:
    steps = medians(measured)
    errors = {name: predicted[name].seconds / steps[name] - 1 for name in predicted}
    bytes_off = max(abs(p.inter_bytes / sent[name] - 1) for name, p in predicted.items())
    return {
        "checks": [Check(f"|predicted / measured − 1|: {name}", abs(e), MOST_ERROR) for name, e in errors.items()]
        + [Check("bytes planned beside those scheduled", bytes_off, 0.0)],
        "errors": {name: round(error, 4) for name, error in errors.items()},
        "predicted_seconds": {name: round(p.seconds, 5) for name, p in predicted.items()},
        "predicted_bytes": {name: p.inter_bytes for name, p in predicted.items()},
        "scheduled_bytes": dict(sent),
    }


def _predicted(setting: PipelineSetting, sizes: Sizes, profile: Profile, staged: StagedModel) -> PipelinePrediction:
    """Return the prediction of a setting. For the planner, a micro-batch is one sequence with all its tokens."""
    packed = compression_of(setting.compression, sizes)
    layout = Layout(STAGES, setting.schedule, setting.strategy, packed)
    request = Request(
        sizes.micro_batches * COPIES,
        profile.memory,
        towpath.Precision(),
        optimizer=Optimizer.named("adamw"),
        micro_batches=(1,),
        checkpointing=False,
    )
    planner = Pipelines(lambda _: staged, profile.cluster(), request, walks)
    return planner.predict(layout, Batching(1, sizes.micro_batches))


class PipelineProbe:
    """A worker that measures the cluster, and then the stages of settings."""

    def __init__(self, rank: int, world: int, seconds: float) -> None:
        self._profile = probe(TOPOLOGY, seconds)
        self._mesh = mesh_of_nodes()

    def staged(self, sizes: Sizes) -> tuple[Profile, StagedModel]:
        """Return the profile of the cluster and the measured stages."""
        count = STAGES * SCHEDULES[sizes.schedule]
        owners = owners_of(schedule_class(sizes.schedule), count, STAGES, sizes.schedule)
        mine = [index for index, owner in enumerate(owners) if owner == self._mesh["pp"].get_local_rank()]
        described: dict[int, Model] = {}
        for index in mine:  # one stage of every rank at the same time
            dist.barrier()
            described[index] = _described(sizes, index, count)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, described)
        stages: dict[int, Model] = {index: model for each in everyones for index, model in each.items()}
        first = stages[0]
        tied = sizes.vocabulary * sizes.width if sizes.tied else 0
        models = tuple(_without(stages[i], tied if i in (0, count - 1) else 0) for i in range(count))
        return self._profile, StagedModel(first, models, sizes.width, tied)


class _Scored(nn.Module):
    """The last stage with its loss."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.stage(x), targets)


def _described(sizes: Sizes, index: int, count: int) -> Model:
    module: nn.Module = Stage(sizes, index, count=count)
    ids = torch.zeros(sizes.batch, sizes.length, dtype=torch.int64)
    hidden = torch.zeros(sizes.batch, sizes.length, sizes.width, requires_grad=True)
    inputs: list[Tensor] = [hidden if index else ids]
    if index == count - 1:
        module, inputs = _Scored(module), [*inputs, ids]
    tokens = sizes.batch * sizes.length
    return profile_model(
        module, lay_out(module), lambda _: inputs, [1], tokens, torch.device("cpu"), towpath.Precision()
    )


def _without(model: Model, numel: int) -> Model:
    """Return a stage without its tied table of `numel` elements, which neither stage owns."""
    if not numel:
        return model
    root, *blocks = model.units
    (bucket,) = root.spec.buckets
    left = [i for i, each in enumerate(bucket.numels) if each != numel]
    assert len(left) == len(bucket.numels) - 1
    numels = tuple(bucket.numels[i] for i in left)
    matrices = tuple(bucket.matrices[i] for i in left) if bucket.matrices else ()
    buckets = (replace(bucket, numels=numels, matrices=matrices),) if numels else ()
    root = replace(root, spec=replace(root.spec, buckets=buckets))
    return replace(model, units=(root, *blocks))


CASES = [
    PipelinePlannerCase(
        "100mbit",
        (
            PipelineSetting(),
            PipelineSetting(compression="cb"),
            PipelineSetting("GPipe", "zero1"),
            PipelineSetting("Interleaved1F1B"),
        ),
    ),
    PipelinePlannerCase(
        "200mbit",
        (
            PipelineSetting(compression="cb+fe", tied=True),
            PipelineSetting(strategy="zero3"),
        ),
        COMPUTING,
    ),
    PipelinePlannerCase(
        "50mbit",
        (
            PipelineSetting(compression="cb+fe+sc", tied=True),
            PipelineSetting(strategy="zero2"),
            PipelineSetting("GPipe", "ddp", "cb"),
        ),
    ),
]

SUITES = (Suite("pipeline_planner", __doc__ or "", CASES),)
