"""Checks that a process group can carry what lies on the devices of its ranks, before anything is sent."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch

from towpath.errors import TopologyError
from towpath.topology.groups import Groups

_REMEDY = "Start the script with device = towpath.init() in place of init_process_group(), and shard model.to(device)."


def check_devices(groups: Groups, device: torch.device) -> None:
    """Raise on every rank if `groups` cannot carry tensors on some rank's `device`, or if two ranks share a GPU.

    Every rank must call it. NCCL itself would fail with an error that does not name the cause, or hang.
    """
    if groups.world == 1:
        return
    gpu = gpu_of(device) if device.type == "cuda" else None
    told: list[tuple[str | None, str | None]] = groups.gather_before_connecting((_refusal(groups, device), gpu))
    refusals = [refusal for refusal, _ in told if refusal is not None]
    if refusals:
        raise TopologyError(refusals[0])
    check_shared([gpu for _, gpu in told])


def _refusal(groups: Groups, device: torch.device) -> str | None:
    """Return why this rank's tensors on `device` cannot travel, or None if they can."""
    backend = groups.backend(device)
    if backend == "none":
        return (
            f"rank {groups.rank}: the model is on {device}, but the process group carries no tensors there, only those "
            f"of {groups.describe_backends()}. {_REMEDY}"
        )
    if device.type != "cuda":
        return None
    if backend == "gloo":
        return (
            f"rank {groups.rank}: the model is on {device}, but the process group carries tensors on GPUs by gloo, "
            f"which cannot exchange them as sharding needs. {_REMEDY}"
        )
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        return (
            f"rank {groups.rank}: the model is on {device}, but the current device is cuda:{current}, where NCCL and "
            f"kernels would run. {_REMEDY}"
        )
    return None


def gpu_of(device: torch.device) -> str:
    """Return what NCCL takes for one GPU: the same for two ranks only if it would refuse them."""
    # With host IDs of their own, ranks count as ranks on other hosts, and may share a GPU. NCCL 2.30 has a switch, too.
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    rank = f" of process {os.getpid()}" if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else ""
    return f"GPU {torch.cuda.get_device_properties(device).uuid} on {host}{rank}"


def check_shared(gpus: Sequence[str | None]) -> None:
    """Raise if two ranks have the same GPU, as `gpu_of` names it."""
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu is not None and first.setdefault(gpu, rank) != rank:
            raise TopologyError(
                f"ranks {first[gpu]} and {rank} share a GPU ({gpu}), which NCCL refuses. Start as many ranks on a node "
                "as it has GPUs, and let device = towpath.init() choose each rank's, by LOCAL_RANK."
            )
