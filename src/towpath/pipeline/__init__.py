"""Pipelines of sharded stages, on torch.distributed.pipelining."""

from towpath.core.pipeline import COMPRESSIONS, SCHEDULES, Compression, compression
from towpath.pipeline.pipeline import Pipeline
from towpath.pipeline.split import split

__all__ = ["COMPRESSIONS", "SCHEDULES", "Compression", "Pipeline", "compression", "split"]
