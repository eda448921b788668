"""Real ranks on the fake device: what one sends on "NCCL" another receives, over gloo.

Collectives of tensors on the device are those of gloo on their memory. The engine is told that they are NCCL's, so it
takes NCCL's form of each transfer, and shares process groups as on GPUs. Each call ends before it returns. So ranks
that call in different orders hang where NCCL could, too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from tests.fake_cuda.device import on_host
from tests.fake_cuda.kernels import recorded_launches
from tests.fake_cuda.runtime import Runtime, fake_cuda
from towpath.topology import groups

# PyTorch's operators for collectives. Gloo has no coalesced ones.
_COLLECTIVES = (
    *("allreduce_", "broadcast_", "allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_"),
    *("alltoall_", "alltoall_base_", "send", "recv_", "reduce_", "gather_", "scatter_", "barrier"),
)


def _over_gloo(name: str) -> Any:
    op = getattr(torch.ops.c10d, name).default

    def call(*args: Any) -> Any:
        originals: dict[int, torch.Tensor] = {}

        def lent(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_cuda:
                return tensor
            alias = on_host(tensor)
            originals[id(alias)] = tensor
            held.append(alias)
            return alias

        held: list[torch.Tensor] = []
        out = op(*tree_map_only(torch.Tensor, lent, args))
        return tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), tensor), out)

    return call


@contextmanager
def gpu_ranks() -> Generator[Runtime]:
    """Let each rank of this gloo job have a GPU, and NCCL between them. Every rank must enter."""
    nccl, on_host = set[dist.ProcessGroup](), set[dist.ProcessGroup]()
    make_group, config_of = groups.new_group, dist.get_backend_config

    def new_group(ranks: list[int], purpose: str, backend: str | None = None, **options: Any) -> dist.ProcessGroup:
        options.pop("max_ctas", None)
        group = make_group(ranks, purpose, "gloo" if backend == "nccl" else backend, **options)
        if backend is not None:
            (nccl if backend == "nccl" else on_host).add(group)
        return group

    def backend_config(group: dist.ProcessGroup | None = None) -> str:
        if group in on_host:
            return config_of(group)
        return "cuda:nccl" if group in nccl else "cpu:gloo,cuda:nccl"

    library = torch.library.Library("c10d", "IMPL")
    with ExitStack() as stack:
        cuda = stack.enter_context(fake_cuda())
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns of kernels that replace others
            for name in _COLLECTIVES:
                library.impl(name, _over_gloo(name), "CUDA", allow_override=True)
        stack.callback(library._destroy)  # pyright: ignore[reportPrivateUsage]
        stack.enter_context(recorded_launches(cuda.device))
        stack.enter_context(mock.patch.object(groups, "new_group", new_group))
        stack.enter_context(mock.patch.object(dist, "get_backend_config", backend_config))
        # Each rank has a GPU of its own.
        stack.enter_context(mock.patch.dict(os.environ, NCCL_HOSTID=f"rank-{dist.get_rank()}"))
        yield cuda
