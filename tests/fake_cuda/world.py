"""One rank of a job on GPUs, without GPUs and without the other ranks: `fake_world` on the device of `runtime.py`.

The engine takes its branches for CUDA and NCCL. Collectives combine nothing: PyTorch's fake process group copies this
rank's values to all places.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

import towpath
from benchmarks.harness.fake_world import fake_world
from tests.fake_cuda.kernels import recorded_launches
from tests.fake_cuda.runtime import Runtime, fake_cuda


@dataclass
class World:
    """What a test sees of the rank."""

    topology: towpath.Topology
    cuda: Runtime
    launches: list[str]  # the kernels of Triton, by name


@contextmanager
def fake_gpus(nodes: int, ranks_per_node: int) -> Generator[World]:
    """Be rank 0 of so many ranks, each of which has a GPU. Models are to be moved to "cuda".

    Use it in a process that ends with the test. A process group that there is is left first.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    with (
        fake_cuda() as cuda,
        fake_world(nodes, ranks_per_node, device="cuda", watch=False) as (topology, _),
        recorded_launches(cuda.device) as launches,
    ):
        yield World(topology, cuda, launches)
