"""A case of benchmarks/pipeline_planner.py: what is predicted there, what is measured, and how they compare."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath
from pipelines import COPIES, STAGES, TOPOLOGY, Piped, Sizes, Stage, compression_of, loss_of, mesh_of_nodes
from towpath.auto.measure import describe_measured
from towpath.auto.probe import probe
from towpath.bench.harness import race
from towpath.bench.harness.contestants import Cluster, Entry
from towpath.bench.harness.figures import Check
from towpath.bench.harness.pool import started
from towpath.bench.harness.suite import Settings
from towpath.core.pipeline import SCHEDULES
from towpath.engine.layout import lay_out
from towpath.pipeline.schedules import owners_of, schedule_class, walks
from towpath.planner.model import Model, ModelUnit, StagedModel
from towpath.planner.pipelines import Layout, PipelinePrediction, Pipelines
from towpath.planner.profile import Profile
from towpath.planner.request import Optimizer, Request
from towpath.planner.solver import Batching

WARM_TURNS = 2
PROBE_SECONDS = 20.0
MOST_ERROR = 0.15
WAITING = Sizes(vocabulary=1024, batch=8, length=128, micro_batches=4, wait_seconds=0.02, computes=False, tied=False)
COMPUTING = Sizes(tied=False)


@dataclass(frozen=True, slots=True)
class Setting:
    """`at_once`: of a schedule that computes the weights' gradients later, all are computed with the inputs'."""

    schedule: str = "1F1B"
    strategy: str = "ddp"
    compression: str = "uncompressed"
    tied: bool = False
    at_once: bool = False

    def __str__(self) -> str:
        words = [self.schedule, self.strategy]
        words += [self.compression] if self.compression != "uncompressed" else []
        return ", ".join([*words, *["tied"] * self.tied, *["all at once"] * self.at_once])

    def of(self, sizes: Sizes) -> Sizes:
        return replace(sizes, schedule=self.schedule, strategy=self.strategy, tied=self.tied, at_once=self.at_once)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Settings on cables of one rate."""

    inter: str | None
    settings: tuple[Setting, ...]
    sizes: Sizes = WAITING
    called: str = ""

    @property
    def name(self) -> str:
        return self.called or f"{self.inter}, {'computing' if self.sizes.computes else 'waiting'}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        sizes = self.sizes.quick() if settings.quick else self.sizes
        cluster = Cluster(TOPOLOGY, self.inter)
        seconds = 2.0 if settings.quick else PROBE_SECONDS
        predicted: dict[str, PipelinePrediction] = {}
        profile: Profile | None = None
        with started({"probe": Entry(cluster, Planning, (seconds,))}, settings.say) as running:
            for setting in self.settings:
                profile, staged = running["probe"].ask("staged", setting.of(sizes))[0]
                predicted[str(setting)] = _priced(setting, sizes, profile, staged)
        entries = {
            str(setting): Entry(cluster, Piped, (setting.compression, setting.of(sizes)), WARM_TURNS)
            for setting in self.settings
        }
        with started(entries, settings.say) as running:
            measured = race.run(running, settings.rounds, settings.say)
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
    medians = {name: statistics.median(values) for name, values in measured.items()}
    errors = {name: predicted[name].seconds / medians[name] - 1 for name in predicted}
    return {
        "checks": [Check(f"|predicted / measured − 1|: {name}", abs(e), MOST_ERROR) for name, e in errors.items()]
        + [Check("bytes planned beside those scheduled", _bytes_off(predicted, sent), 0.0)],
        "errors": {name: round(error, 4) for name, error in errors.items()},
        "predicted_seconds": {name: round(p.seconds, 5) for name, p in predicted.items()},
        "predicted_bytes": {name: p.inter_bytes for name, p in predicted.items()},
        "scheduled_bytes": dict(sent),
        "spread": {n: round((max(v) - min(v)) / medians[n], 4) for n, v in measured.items()},
    }


def _bytes_off(predicted: Mapping[str, PipelinePrediction], sent: Mapping[str, int]) -> float:
    return max(abs(p.inter_bytes / sent[name] - 1) for name, p in predicted.items())


def _priced(setting: Setting, sizes: Sizes, profile: Profile, staged: StagedModel) -> PipelinePrediction:
    """A micro-batch is one 'sequence' of all its tokens."""
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

    def walked(schedule: str, ranks: int, micro_batches: int, halved: bool) -> Any:
        return walks(schedule, ranks, micro_batches, halved and not setting.at_once)

    planner = Pipelines(lambda _: staged, profile.cluster(), request, walked)
    return planner.predict(layout, Batching(1, sizes.micro_batches))


class Planning:
    """The worker: measures the cluster, and then the stages of a setting."""

    def __init__(self, rank: int, world: int, seconds: float) -> None:
        self._profile = probe(TOPOLOGY, seconds)
        self._mesh = mesh_of_nodes()

    def staged(self, sizes: Sizes) -> tuple[Profile, StagedModel]:
        count = STAGES * SCHEDULES[sizes.schedule]
        owners = owners_of(schedule_class(sizes.schedule), count, STAGES, sizes.schedule)
        mine = [index for index, owner in enumerate(owners) if owner == self._mesh["pp"].get_local_rank()]
        described: dict[int, Model] = {}
        for turn in range(SCHEDULES[sizes.schedule]):  # of each rank one at a time, all at once
            dist.barrier()
            described[mine[turn]] = _described(sizes, mine[turn], count)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, described)
        stages: dict[int, Model] = {index: model for each in everyones for index, model in each.items()}
        first = stages[0]
        tied = sizes.vocabulary * sizes.width if sizes.tied else 0
        models = tuple(_without(stages[i], tied if i in (0, count - 1) else 0) for i in range(count))
        return self._profile, StagedModel(first, models, sizes.width, tied)


class _Scored(nn.Module):
    """The last stage, with its loss."""

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
    return describe_measured(
        module, lay_out(module), lambda _: inputs, [1], tokens, torch.device("cpu"), towpath.Precision()
    )


def _without(model: Model, numel: int) -> Model:
    """The tied table, which neither stage has as its own."""
    root, *blocks = model.units
    return replace(model, units=(_root_without(root, numel), *blocks)) if numel else model


def _root_without(root: ModelUnit, numel: int) -> ModelUnit:
    (bucket,) = root.spec.buckets
    left = [i for i, each in enumerate(bucket.numels) if each != numel]
    assert len(left) == len(bucket.numels) - 1
    numels = tuple(bucket.numels[i] for i in left)
    matrices = tuple(bucket.matrices[i] for i in left) if bucket.matrices else ()
    buckets = (replace(bucket, numels=numels, matrices=matrices),) if numels else ()
    return replace(root, spec=replace(root.spec, buckets=buckets))
