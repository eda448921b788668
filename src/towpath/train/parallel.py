"""How the ranks share the model: sharding, tensor-parallel layers, pipeline stages, and the planner's choice of these.

Neighboring ranks share the layers of a stage. The next ranks hold the copies of that stage, and then comes the next
stage. The module does not import `torch.distributed.pipelining` unless a run has stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from towpath.api import Values, shard
from towpath.core import presets
from towpath.core.pipeline import compression
from towpath.core.strategy import Strategy
from towpath.engine.layout import lay_out
from towpath.errors import ConfigError, ShardError
from towpath.planner.cluster import GIB, Cluster
from towpath.planner.model import Model, StagedModel
from towpath.planner.pipelines import Layout, PipelinePrediction, Pipelines
from towpath.planner.request import OUTER, Request, codecs_for_both
from towpath.topology.cluster import Topology
from towpath.train.config import Config, ParallelConfig
from towpath.train.job import Job
from towpath.train.models.bundle import ModelBundle, loss_of_logits, next_token_loss
from towpath.train.models.tensor_parallel import share_layers
from towpath.train.optimizers import LossScale

if TYPE_CHECKING:
    from towpath.auto.choice import Pipelined
    from towpath.pipeline import Pipeline

# The numbers of sequences with which the planner measures the passes of a model.
_MEASURED_SEQUENCES = (1, 4)


def copies_of_model(parallel: ParallelConfig, world: int) -> int:
    """Return the data-parallel degree: the number of copies of the model, which share the samples of a step.

    Raises:
        ConfigError: The ranks cannot be divided into copies.
    """
    ranks = parallel.pipeline * parallel.tensor
    if world % ranks == 0:
        return world // ranks
    prefix = f"parallel.pipeline = {parallel.pipeline}"
    if parallel.tensor == 1:
        raise ConfigError(f"{prefix}: expected a divisor of the job's {world} ranks, which have as many stages each.")
    raise ConfigError(
        f"{prefix} × parallel.tensor = {parallel.tensor}: expected a divisor of the job's {world} ranks, got {ranks}."
    )


def topology_of_copies(parallel: ParallelConfig, launched: Topology) -> Topology:
    """Return the topology of the ranks that hold the same part of the model, which a strategy applies to.

    Raises:
        ConfigError: The ranks that share a layer would be on several nodes, or the ranks of a stage do not fill nodes.
    """
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


def shard_model(config: Config, job: Job, bundle: ModelBundle, strategy: Strategy, values: Values | None) -> Any:
    """Return the model of a run without stages, sharded. Every rank must call it."""
    tensor, group = config.parallel.tensor, None
    if tensor > 1:
        assert bundle.tensor_plan is not None  # plan_for has found one
        mesh = _device_mesh(config.parallel, job)
        group = mesh["dp"].get_group()
        share_layers(bundle.model, bundle.tensor_plan, mesh["tp"])
        job.print_once(f"each layer of a block is shared by {tensor} ranks")
    return shard(bundle.model, strategy, group=group, precision=config.train.dtypes, values=values)


def build_pipeline(
    config: Config, job: Job, bundle: ModelBundle, strategy: Strategy, values: Values | None, loss_scale: LossScale
) -> Pipeline:
    """Return the model of a run with stages, as a pipeline. Its loss is scaled. Every rank must call it."""
    from towpath.pipeline import Pipeline, split

    parallel, train = config.parallel, config.train
    copies = copies_of_model(parallel, job.world)
    hf_config: Any = getattr(bundle.model, "config", None)
    if hasattr(hf_config, "use_cache"):
        hf_config.use_cache = False  # stages would fill a cache that nothing reads
    example = torch.zeros(train.micro_batch, train.length, dtype=torch.int64)
    with job.fail_together():
        try:
            modules: Sequence[nn.Module] = split(bundle.model, parallel.stages, example)
        except ShardError as error:
            raise ConfigError(f"parallel.pipeline = {parallel.pipeline}: {error}") from None
    mesh = _device_mesh(parallel, job)
    torch.manual_seed(train.seed + mesh.get_local_rank("pp"))  # every stage draws other weights
    stages: Any = modules
    if parallel.tensor > 1:  # the pipeline builds only the stages of this rank
        assert bundle.tensor_plan is not None  # plan_for has found one
        stages = [partial(share_layers, module, bundle.tensor_plan, mesh["tp"]) for module in modules]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_scale.scaled(loss_of_logits(logits, targets))

    pipeline = Pipeline(
        stages,
        strategy,
        mesh=mesh,
        schedule=parallel.schedule,
        micro_batches=train.micro_steps(copies),
        loss=loss,
        example=example,
        precision=train.dtypes,
        compression=parallel.build_compression(),
        values=values,
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


def choose_strategy(config: Config, job: Job, bundle: ModelBundle) -> tuple[Config, Strategy]:
    """Return the strategy that the planner ranks first for the model and the cluster. Every rank must call it.

    Returns:
        The configuration with the micro-batch, activation checkpointing and layout that the planner chose, and the
        strategy.
    """
    train, options = config.train, config.strategy
    topology = options.topology(job.topology)
    if topology.world == 1:
        job.print_once(
            "auto: one rank has nothing to share; train.micro_batch and train.checkpointing are as configured"
        )
        return config, presets.strategy("ddp", topology, offload=options.offload_option)
    # Imported only here, because they import what traces a model.
    from towpath.auto.choice import choose
    from towpath.auto.measure import describe_measured

    weights, gradients = codecs_for_both(options.allow)
    share = max(1, train.batch // topology.world)
    model, precision = _WithLoss(bundle.model), train.dtypes
    layouts = lay_out(model, None, precision)

    def request(memory: int) -> Request:
        return Request(
            train.batch,
            int(options.memory * GIB) or memory,
            precision,
            weights=weights,
            gradients=gradients,
            offload=options.offload_option,
            interleaved=train.steps if options.interleaved else 0,
            exact=options.exact,
            outer=OUTER in options.allow,
        )

    def inputs(sequences: int) -> list[Tensor]:
        return [torch.zeros(sequences, train.length, dtype=torch.long, device="meta") for _ in range(2)]

    def describe(device: torch.device) -> Model:
        sizes = sorted({min(size, share) for size in _MEASURED_SEQUENCES})
        return describe_measured(model, layouts, inputs, sizes, train.length, device, precision)

    def staged(whole: Model, count: int) -> StagedModel:
        from towpath.pipeline.splitting import DescribedStages

        example = torch.zeros(1, train.length, dtype=torch.int64)
        return DescribedStages(whole, bundle.model, layouts, example, precision)(count)

    choice = choose(job.groups, topology, describe, request, options.profile, _layouts_to_price(config, staged))
    job.print_once(choice.why)
    batching = choice.batching
    return (
        replace(
            config,
            train=replace(train, micro_batch=batching.micro_batch, checkpointing=batching.checkpointing),
            strategy=replace(options, pipelines=(), tensors=(), schedules=(), compressions=()),  # these are chosen now
            parallel=_chosen_parallel(config, choice.layout),
        ),
        choice.strategy,
    )


def _layouts_to_price(config: Config, staged: Callable[[Model, int], StagedModel]) -> Pipelined | None:
    """Return how the planner prices the layouts that the configuration allows, or None if it allows no other."""
    from towpath.auto.choice import Pipelined

    parallel, options = config.parallel, config.strategy
    fixed = parallel.pipeline * parallel.tensor > 1
    if not (fixed or options.chooses_layout):
        return None
    # A compression that its name describes completely is passed by its name.
    built = parallel.build_compression()
    own = parallel.compression if built == compression(parallel.compression) else built

    def best(model: Model, cluster: Cluster, request: Request) -> PipelinePrediction | None:
        from towpath.pipeline.schedules import walks

        layouts = [
            Layout(ranks, schedule, compression=packed, tensor=tensor)
            for ranks in options.pipelines or (parallel.pipeline,)
            for tensor in options.tensors or (parallel.tensor,)
            for schedule in options.schedules or (parallel.schedule,)
            for packed in options.compressions or (own,)
        ]
        found = Pipelines(lambda count: staged(model, count), cluster, request, walks).solve(layouts, best=1)
        return found[0] if found else None

    return Pipelined(best, fixed)


def _chosen_parallel(config: Config, layout: Layout | None) -> ParallelConfig:
    if layout is None or not config.strategy.chooses_layout:
        return config.parallel
    if layout.pipeline == 1:
        return ParallelConfig(tensor=layout.tensor)
    return ParallelConfig(
        pipeline=layout.pipeline,
        tensor=layout.tensor,
        schedule=layout.schedule,
        compression=str(layout.compression),
    )
