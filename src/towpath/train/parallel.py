"""How the ranks share the model: sharding, tensor-parallel layers, pipeline stages, and the planner's choice of these.

Neighboring ranks share the layers of a stage. The next ranks hold the copies of that stage, and then comes the next
stage. The module does not import `torch.distributed.pipelining` unless a run has stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from towpath.api import shard
from towpath.core import presets
from towpath.core.passes import compression
from towpath.core.strategy import Offload, Strategy
from towpath.engine.layout import lay_out
from towpath.errors import ConfigError, ShardError
from towpath.plan.hardware import GIB, Cluster
from towpath.plan.model import Model
from towpath.plan.pipelines import Layout, PipelinePrediction, Pipelines
from towpath.plan.request import OUTER, Request, codecs_for_both
from towpath.topology.cluster import Topology
from towpath.train.config import Config, ParallelConfig, TrainConfig
from towpath.train.job import Job
from towpath.train.models import ModelBundle, loss_of_logits, next_token_loss
from towpath.train.tensor_parallel import share_layers

if TYPE_CHECKING:
    from towpath.pipeline import Pipeline

# The numbers of sequences with which the planner measures the passes of a model.
_MEASURED_SEQUENCES = (1, 4)


def copies_of_model(parallel: ParallelConfig, world: int) -> int:
    """Return the data-parallel degree: the number of copies of the model, which share the samples of a step."""
    if world % parallel.ranks == 0:
        return world // parallel.ranks
    raise ConfigError(
        f"parallel.pipeline = {parallel.pipeline} × parallel.tensor = {parallel.tensor}: expected a divisor of the "
        f"job's {world} ranks."
    )


def topology_of_copies(parallel: ParallelConfig, launched: Topology) -> Topology:
    """Return the topology of the ranks that hold the same part of the model, which a strategy applies to."""
    if parallel.ranks == 1:
        return launched
    launched.check_equal("[parallel]")
    ranks = launched.ranks_per_node
    if ranks % parallel.tensor:
        raise ConfigError(
            f"parallel.tensor = {parallel.tensor}: expected a divisor of the {ranks} ranks of a node, which the sums "
            "of shared layers are not to leave."
        )
    ranks_of_stage = copies_of_model(parallel, launched.world) * parallel.tensor
    if ranks_of_stage % ranks and ranks % ranks_of_stage:
        raise ConfigError(
            f"parallel.pipeline leaves {ranks_of_stage} ranks for each stage, which do not fill nodes of {ranks}: "
            "expected a multiple or a divisor of that."
        )
    stage = launched.of(range(ranks_of_stage))
    return replace(stage, ranks_per_node=stage.ranks_per_node // parallel.tensor)


def _device_mesh(parallel: ParallelConfig, job: Job) -> DeviceMesh:
    """Return a mesh with the dimensions "pp" and "dp", and "tp" if ranks share layers."""
    sizes, names = (parallel.pipeline, copies_of_model(parallel, job.world), parallel.tensor), ("pp", "dp", "tp")
    used = 3 if parallel.tensor > 1 else 2
    return init_device_mesh(job.device.type, sizes[:used], mesh_dim_names=names[:used])


def shard_model(config: Config, job: Job, bundle: ModelBundle, strategy: Strategy) -> Any:
    """Return the model of a run without stages, sharded. Every rank must call it."""
    tensor, group = config.parallel.tensor, None
    if tensor > 1:
        mesh = _device_mesh(config.parallel, job)
        group = mesh["dp"].get_group()
        share_layers(bundle.model, bundle.tensor_plan, mesh["tp"])
        job.print_once(f"each layer of a block is shared by {tensor} ranks")
    return shard(bundle.model, strategy, group=group, precision=config.train.dtypes, values=bundle.values)


def build_pipeline(config: Config, job: Job, bundle: ModelBundle, strategy: Strategy) -> Pipeline:
    """Return the model of a run with stages, as a pipeline. Every rank must call it."""
    from towpath.pipeline import Pipeline, split

    parallel, train = config.parallel, config.train
    copies = copies_of_model(parallel, job.world)
    hf_config: Any = getattr(bundle.model, "config", None)
    if hasattr(hf_config, "use_cache"):
        hf_config.use_cache = False  # stages would fill a cache that nothing reads
    example = torch.zeros(train.micro_batch, train.length, dtype=torch.int64)
    with job.together():
        try:
            modules: Sequence[nn.Module] = split(bundle.model, parallel.stages, example)
        except ShardError as error:
            raise ConfigError(f"parallel.pipeline = {parallel.pipeline}: {error}") from None
    mesh = _device_mesh(parallel, job)
    torch.manual_seed(train.seed + mesh.get_local_rank("pp"))  # every stage draws other weights
    stages: Any = modules
    if parallel.tensor > 1:  # the pipeline builds only the stages of this rank
        stages = [partial(share_layers, module, bundle.tensor_plan, mesh["tp"]) for module in modules]

    pipeline = Pipeline(
        stages,
        strategy,
        mesh=mesh,
        schedule=parallel.schedule,
        micro_batches=train.micro_steps(copies),
        loss=loss_of_logits,
        example=example,
        precision=train.dtypes,
        compression=compression(parallel.compression),
        values=bundle.values,
    )
    per_rank = parallel.stages // parallel.pipeline
    held = f"{copies} ranks hold each" if parallel.tensor == 1 else f"{copies} × {parallel.tensor} ranks share each"
    job.print_once(f"{parallel.stages} stages, {per_rank} on each rank, by {parallel.schedule}; {held}")
    return pipeline


# strategy.name = "auto" -----------------------------------------------------------------------------------------------


class _WithLoss(nn.Module):
    """A model that returns its loss, as a step computes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(self.model, inputs, targets)


def choose_strategy(config: Config, job: Job, bundle: ModelBundle) -> tuple[TrainConfig, Strategy]:
    """Return the strategy that the planner ranks first for the model and the cluster. Every rank must call it.

    Also return the section [train] with the micro-batch and activation checkpointing that it chose.
    """
    train, options, parallel = config.train, config.strategy, config.parallel
    topology, offload = options.topology(job.topology), cast("Offload | None", options.offload or None)
    if topology.world == 1:
        job.print_once(
            "auto: one rank has nothing to share; train.micro_batch and train.checkpointing are as configured"
        )
        shares = options.divided
        return train, presets.strategy("ddp", topology, offload=offload, protect=options.protection, shares=shares)
    # Imported only here, because they import what traces a model.
    from towpath.plan.choice import choose, profile_model

    weights, gradients = codecs_for_both(options.allow)
    share = max(1, train.batch // topology.world)
    model, precision = _WithLoss(bundle.model), train.dtypes
    layouts = lay_out(model, None, precision)

    request = Request(
        train.batch,
        int(options.memory * GIB),
        precision,
        weights=weights,
        gradients=gradients,
        offload=offload,
        exact=options.exact,
        outer=OUTER in options.allow,
    )

    def inputs(sequences: int) -> list[Tensor]:
        return [torch.zeros(sequences, train.length, dtype=torch.long, device="meta") for _ in range(2)]

    def describe(device: torch.device) -> Model:
        sizes = sorted({min(size, share) for size in _MEASURED_SEQUENCES})
        return profile_model(model, layouts, inputs, sizes, train.length, device, precision)

    def staged(whole: Model, cluster: Cluster, request: Request) -> PipelinePrediction | None:
        from towpath.pipeline.schedules import walks
        from towpath.pipeline.splitting import DescribedStages

        example = torch.zeros(1, train.length, dtype=torch.int64)
        stages = DescribedStages(whole, bundle.model, layouts, example, precision)
        layout = Layout(parallel.pipeline, parallel.schedule, compression=parallel.compression, tensor=parallel.tensor)
        return next(iter(Pipelines(stages, cluster, request, walks).solve([layout], best=1)), None)

    choice = choose(job.groups, topology, describe, request, options.profile, staged if parallel.ranks > 1 else None)
    job.print_once(choice.why)
    batching = choice.batching
    chosen = replace(train, micro_batch=batching.micro_batch, checkpointing=batching.checkpointing)
    protect = presets.protected(options.protection, choice.strategy.job)
    return chosen, replace(choice.strategy, protect=protect, shares=options.divided)
