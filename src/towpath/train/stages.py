"""[parallel]: the configured model cut into the stages of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from towpath.api import Values
from towpath.core.precision import Precision
from towpath.core.strategy import Strategy
from towpath.errors import ConfigError, ShardError
from towpath.pipeline import Pipeline, split
from towpath.train.config import Config, ParallelConfig
from towpath.train.job import Job
from towpath.train.loss_scale import LossScale
from towpath.train.models.from_config import Built, loss_of_logits
from towpath.train.passes import Stages


def copies_of(parallel: ParallelConfig, world: int) -> int:
    """How often the job has each stage, and so among how many ranks a step's samples are shared out."""
    if world % parallel.pipeline:
        raise ConfigError(
            f"parallel.pipeline = {parallel.pipeline}: expected a divisor of the job's {world} ranks, which have as "
            "many stages each."
        )
    return world // parallel.pipeline


def pipelined(
    config: Config,
    job: Job,
    built: Built,
    strategy: Strategy,
    precision: Precision,
    values: Values | None,
    scale: LossScale,
) -> Stages:
    """Stage s is on the ranks from s × copies on. Every rank must call it."""
    parallel, train = config.parallel, config.train
    copies = copies_of(parallel, job.world)
    hf_config: Any = getattr(built.model, "config", None)
    if hasattr(hf_config, "use_cache"):
        hf_config.use_cache = False  # which stages would fill, and nobody read
    example = torch.zeros(train.micro_batch, train.length, dtype=torch.int64)
    with job.alike():
        try:
            stages = split(built.model, parallel.stages, example)
        except ShardError as error:
            raise ConfigError(f"parallel.pipeline = {parallel.pipeline}: {error}") from None
    mesh = init_device_mesh(job.device.type, (parallel.pipeline, copies), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(train.seed + mesh.get_local_rank("pp"))  # new weights: other ones in every stage

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return scale.scaled(loss_of_logits(logits, targets))

    made = Pipeline(
        stages,
        strategy,
        mesh=mesh,
        schedule=parallel.schedule,
        micro_batches=train.micro_steps(copies),
        loss=loss,
        example=example,
        precision=precision,
        compression=parallel.make(),
        values=values,
    )
    per_rank = parallel.stages // parallel.pipeline
    job.say(f"{parallel.stages} stages, {per_rank} on each rank, by {parallel.schedule}; {copies} ranks hold each")
    return Stages(made, job.groups, copies, mesh.get_local_rank("dp"), scale)
