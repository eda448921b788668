"""[parallel]: the configured model cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from towpath.api import Values
from towpath.core.formats import Precision
from towpath.core.strategy import Strategy
from towpath.errors import ConfigError, ShardError
from towpath.train.config import Config
from towpath.train.job import Job
from towpath.train.layout import copies_of, layout_mesh
from towpath.train.loss_scale import LossScale
from towpath.train.models.from_config import Built, loss_of_logits
from towpath.train.models.tensor_parallel import share_layers
from towpath.train.passes import Stages


def pipelined(
    config: Config,
    job: Job,
    built: Built,
    strategy: Strategy,
    precision: Precision,
    values: Values | None,
    scale: LossScale,
) -> Stages:
    """Stage s is on the ranks from s × copies × tensor on. Every rank must call it."""
    from towpath.pipeline import Pipeline, split  # with torch.distributed.pipelining, which only stages need

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
    mesh = layout_mesh(parallel, job)
    torch.manual_seed(train.seed + mesh.get_local_rank("pp"))  # new weights: other ones in every stage

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return scale.scaled(loss_of_logits(logits, targets))

    made = Pipeline(
        stages if parallel.tensor == 1 else _shared(stages, built, mesh["tp"]),
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
    held = f"{copies} ranks hold each" if parallel.tensor == 1 else f"{copies} × {parallel.tensor} ranks share each"
    job.say(f"{parallel.stages} stages, {per_rank} on each rank, by {parallel.schedule}; {held}")
    return Stages(made, job.groups, copies, mesh.get_local_rank("dp"), scale)


def _shared(stages: Sequence[nn.Module], built: Built, mesh: DeviceMesh) -> list[Callable[[], nn.Module]]:
    """Those that are a rank's own become tensor-parallel."""
    assert built.tensor_plan is not None  # as plan_for has found
    return [partial(share_layers, stage, built.tensor_plan, mesh) for stage in stages]
