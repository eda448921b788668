"""[strategy] name = "auto": what the planner ranks first for the model, the data and the cluster of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.pipeline import Compression, compression
from towpath.core.strategy import Strategy
from towpath.engine.layout import lay_out
from towpath.pipeline.described import DescribedStages
from towpath.pipeline.schedules import walks
from towpath.planner.cluster import GIB, Cluster
from towpath.planner.model import Model, StagedModel
from towpath.planner.pipelines import Layout, PipelinePrediction, Pipelines
from towpath.planner.request import Request, codecs_for_both
from towpath.train.config import Config
from towpath.train.config_strategy import ParallelConfig
from towpath.train.job import Job
from towpath.train.models.from_config import Built, next_token_loss

if TYPE_CHECKING:
    from towpath.auto.choice import Pipelined

_SIZES = (1, 4)  # sequences at once, with which the passes are measured


class _WithLoss(nn.Module):
    """A model as the loop calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(self.model, inputs, targets)


def choose_strategy(config: Config, job: Job, built: Built, precision: Precision) -> tuple[Config, Strategy]:
    """And the configuration with the micro-batch, the checkpointing and the layout that go with it. Every rank must
    call it."""
    topology = config.strategy.topology(job.topology)
    if topology.world == 1:
        job.say("auto: one rank has nothing to share; train.micro_batch and train.checkpointing are as configured")
        return config, presets.strategy("ddp", topology, offload=config.strategy.offloaded)
    from towpath.auto.choice import choose  # with what traces a model: nobody else needs it
    from towpath.auto.measure import describe_measured

    train, asked = config.train, config.strategy
    weights, gradients = codecs_for_both(asked.allow)
    share = max(1, train.batch // topology.world)
    model = _WithLoss(built.model)
    layouts = lay_out(model, None, precision)

    def request(memory: int) -> Request:
        limit = int(asked.memory * GIB) or memory
        offload = asked.offloaded
        return Request(train.batch, limit, precision, weights=weights, gradients=gradients, offload=offload)

    def describe(device: torch.device) -> Model:
        sizes = sorted({min(size, share) for size in _SIZES})
        return describe_measured(model, layouts, inputs, sizes, train.length, device, precision)

    def inputs(sequences: int) -> list[Tensor]:
        return [torch.zeros(sequences, train.length, dtype=torch.long, device="meta") for _ in range(2)]

    def staged(whole: Model, count: int) -> StagedModel:
        example = torch.zeros(1, train.length, dtype=torch.int64)
        return DescribedStages(whole, built.model, layouts, example, precision)(count)

    choice = choose(job.groups, topology, describe, request, asked.profile, _pipelined(config, staged))
    job.say(choice.why)
    batching = choice.batching
    chosen = replace(train, micro_batch=batching.micro_batch, checkpointing=batching.checkpointing)
    # What was left to choose is chosen.
    settled = replace(asked, pipelines=(), tensors=(), schedules=(), compressions=())
    parallel = _parallel(config, choice.layout)
    return replace(config, train=chosen, strategy=settled, parallel=parallel), choice.strategy


def _pipelined(config: Config, staged: Callable[[Model, int], StagedModel]) -> Pipelined | None:
    """What the configuration leaves to auto, or has laid out itself."""
    from towpath.auto.choice import Pipelined

    parallel, asked = config.parallel, config.strategy
    only = parallel.pipeline * parallel.tensor > 1
    if not (only or asked.layouts):
        return None

    def best(model: Model, cluster: Cluster, request: Request) -> PipelinePrediction | None:
        planned = Pipelines(lambda count: staged(model, count), cluster, request, walks)
        found = planned.solve(
            asked.pipelines or (parallel.pipeline,),
            asked.schedules or (parallel.schedule,),
            asked.compressions or (_compression(parallel),),
            asked.tensors or (parallel.tensor,),
            best=1,
        )
        return found[0] if found else None

    return Pipelined(best, only)


def _compression(parallel: ParallelConfig) -> str | Compression:
    """By its name, where that says all."""
    made = parallel.make()
    return parallel.compression if made == compression(parallel.compression) else made


def _parallel(config: Config, layout: Layout | None) -> ParallelConfig:
    """As the configuration has it, if that laid the model out itself; else what was chosen, if that is a layout."""
    if layout is None or not config.strategy.layouts:
        return config.parallel
    pipeline, tensor = layout.pipeline, layout.tensor
    if pipeline == 1:
        return ParallelConfig(tensor=tensor)
    packed = str(layout.compression)
    return ParallelConfig(pipeline=pipeline, tensor=tensor, schedule=layout.schedule, compression=packed)
