"""Pipelines of sharded stages, on torch.distributed.pipelining."""

from towpath.pipeline.pipeline import SCHEDULES, Pipeline
from towpath.pipeline.split import split

__all__ = ["SCHEDULES", "Pipeline", "split"]
