"""[strategy] name = "auto": what the planner ranks first for the model, the data and the cluster of a run."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from towpath.core import presets
from towpath.core.precision import Precision
from towpath.core.strategy import Strategy
from towpath.engine.layout import lay_out
from towpath.planner.cluster import GIB
from towpath.planner.model import Model
from towpath.planner.request import Request, codecs_for_both
from towpath.train.config import Config
from towpath.train.job import Job
from towpath.train.models.from_config import Built, next_token_loss

_SIZES = (1, 4)  # sequences at once, with which the passes are measured


class _WithLoss(nn.Module):
    """A model as the loop calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(self.model, inputs, targets)


def choose_strategy(config: Config, job: Job, built: Built, precision: Precision) -> tuple[Config, Strategy]:
    """And the configuration with the micro-batch and the checkpointing that go with it. Every rank must call it."""
    topology = config.strategy.topology(job.topology)
    if topology.world == 1:
        job.say("auto: one rank has nothing to share; train.micro_batch and train.checkpointing are as configured")
        return config, presets.strategy("ddp", topology, offload=config.strategy.offload or None)
    from towpath.auto.choice import choose  # with what traces a model: nobody else needs it
    from towpath.auto.measure import describe_measured

    train, asked = config.train, config.strategy
    weights, gradients = codecs_for_both(asked.allow)
    share = train.batch // topology.world

    def request(memory: int) -> Request:
        limit = int(asked.memory * GIB) or memory
        offload = asked.offload or None
        return Request(train.batch, limit, precision, weights=weights, gradients=gradients, offload=offload)

    def describe(device: torch.device) -> Model:
        sizes = sorted({min(size, share) for size in _SIZES})
        model = _WithLoss(built.model)
        return describe_measured(model, lay_out(model, None, precision), inputs, sizes, train.length, device, precision)

    def inputs(sequences: int) -> list[Tensor]:
        return [torch.zeros(sequences, train.length, dtype=torch.long, device="meta") for _ in range(2)]

    choice = choose(job.groups, topology, describe, request, asked.profile)
    job.say(choice.why)
    batching = choice.batching
    chosen = replace(train, micro_batch=batching.micro_batch, checkpointing=batching.checkpointing)
    return replace(config, train=chosen), choice.strategy
