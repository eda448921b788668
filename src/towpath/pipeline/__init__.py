"""Pipelines of sharded stages, on torch.distributed.pipelining."""

from towpath.pipeline.pipeline import Pipeline
from towpath.pipeline.schedules import SCHEDULES
from towpath.pipeline.split import split

__all__ = ["SCHEDULES", "Pipeline", "split"]
