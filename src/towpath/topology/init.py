"""`towpath.init()`: the device of a rank and the process group of all ranks; and checks of devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from towpath.errors import ConfigError, StepError
from towpath.protect import timeline
from towpath.topology.groups import Groups
from towpath.topology.launcher import launched, local_rank, meeting_point, numbers_by_rack, rack_name
from towpath.topology.store import DEFAULT_TIMEOUT, gather_through_store, join_store

# A launcher sets all of these for every rank.
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_REMEDY = "Start the script with device = towpath.init() in place of init_process_group(), and shard model.to(device)."
# Launchers that set none of the above say here how many processes they started.
_OTHER_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def init(*, timeout: timedelta | None = None) -> torch.device:
    """Initialize this rank's device and the process group of all ranks, and return the device.

    Call it once at the start of a training script, before the model is moved to the device:

        device = towpath.init()
        model = towpath.shard(Model().to(device), "zero3")

    Under a launcher such as torchrun, the device is the GPU with the index `LOCAL_RANK`, which becomes PyTorch's
    current device. Where PyTorch sees no GPU, the device is the CPU. Set `CUDA_VISIBLE_DEVICES=` to train on the CPU of
    a machine with GPUs. The process group sends tensors on the CPU over gloo and tensors on GPUs over NCCL.

    If nodes are in racks that share fewer links, set `TOWPATH_RACK` on each node to the name of its rack. Under Slurm's
    plugin topology/tree, the leaf switch names it. `init` then numbers the ranks rack by rack, so that rings leave each
    rack once and small groups stay inside. It changes `RANK` in the environment of this process. Rank 0 remains rank 0.
    Unless `CUDA_DEVICE_MAX_CONNECTIONS` is set, or CUDA was used before, it becomes 32 there.

    Without a launcher, this process becomes a group of one rank. `init` only checks a process group that exists
    already, and returns its device. So it may be called more than once.

    Args:
        timeout: How long a collective waits for the other ranks. The default is PyTorch's for groups that
            use gloo, with or without NCCL: 30 minutes. Raise it if one rank does long work alone. It has no effect on a
            group that exists already.

    Returns:
        The device for this rank's model and batches.

    Raises:
        ConfigError: The launcher started more ranks on this node than it has GPUs, set only some of its environment
            variables, or the ranks did not find each other. Or the named racks do not have equally many ranks.
    """
    timeline.mark("called")
    # Transfers, the computation and NCCL have more streams than CUDA has hardware queues by default, which are 8. Two
    # streams of one queue can wait for each other. CUDA reads the variable in its first call.
    if torch.version.cuda is not None and not torch.cuda.is_initialized():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if dist.is_initialized():
        return _device_of_group()
    device = device_of_rank()
    on_gpu = device.type == "cuda"
    # Small agreements between ranks go over the CPU, so that they do not wait for the GPU.
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    where = ":".join(meeting_point())
    try:
        store, rank, world = (HashStore(), 0, 1) if alone() else join_store(timeout)
        facts = (gpu_of(device) if on_gpu else None, rack_name())
        found = gather_through_store(store, "GPUs and racks", rank, world, facts, timeout or DEFAULT_TIMEOUT)
        check_shared([gpu for gpu, _ in found])  # NCCL would fail with an error that does not name the cause
        rank = numbers_by_rack([rack for _, rack in found])[rank]
        if launched():
            os.environ["RANK"] = str(rank)  # libraries read it
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=device if on_gpu else None
        )
    except dist.DistError as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise ConfigError(
                f"port in use: the ranks are to meet at {where}, where another program listens. Give the launcher "
                "another port (torchrun --master-port)."
            ) from None
        raise ConfigError(
            f"the ranks could not meet at {where}: {first_line(error)} `towpath doctor --hosts A,B`, on each machine, "
            "finds out why."
        ) from None
    except RuntimeError as error:  # gloo raises nothing more specific when another rank has died
        if "gloo" not in str(error):
            raise
        raise StepError(
            f"the ranks could not meet at {where}: {first_line(error)} `towpath doctor` examines the network."
        ) from error
    timeline.mark("joined")
    return device


def device_of_rank() -> torch.device:
    """Return this rank's GPU, after making it PyTorch's current device, or the CPU where PyTorch sees no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, gpus = local_rank(), torch.cuda.device_count()
    if "LOCAL_RANK" not in os.environ and launched() and gpus > 1 and int(os.environ["WORLD_SIZE"]) > 1:
        raise ConfigError(
            f"rank {os.environ['RANK']}: RANK and WORLD_SIZE are set, but LOCAL_RANK is not, and this node has {gpus} "
            "GPUs: every rank would take the first. Set LOCAL_RANK to the rank's number on its node, or start the "
            "script with torchrun."
        )
    if index >= gpus:
        raise ConfigError(
            f"local rank {index} has no GPU: PyTorch sees {gpus} on this node. Start as many ranks as GPUs. If the "
            "launcher shows each rank a GPU of its own, set LOCAL_RANK=0. To train on the CPU, set "
            "CUDA_VISIBLE_DEVICES to nothing."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _device_of_group() -> torch.device:
    """Return the device of the existing process group. Raise if the launcher started another number of ranks."""
    world = dist.get_world_size()
    if launched() and int(os.environ["WORLD_SIZE"]) != world:
        raise ConfigError(
            f"rank {os.environ['RANK']}: the launcher started {os.environ['WORLD_SIZE']} ranks, but the process group "
            f"that exists already has {world}. Remove the earlier init_process_group(), or let it take its ranks from "
            "the launcher."
        )
    group = dist.group.WORLD
    assert group is not None
    if group.bound_device_id is not None:
        return group.bound_device_id
    if "nccl" not in str(dist.get_backend_config()):
        return torch.device("cpu")
    if torch.cuda.current_device() != 0:  # chosen by the caller
        return torch.device("cuda", torch.cuda.current_device())
    return device_of_rank()


def alone() -> bool:
    """Return whether no launcher started this process. Raise if one did that set only some of its variables."""
    missing = [name for name in _LAUNCHER if name not in os.environ]
    if not missing:
        return False
    if "RANK" in missing and os.environ.get("WORLD_SIZE", "1") == "1":
        other = next((name for name in _OTHER_LAUNCHERS if int(os.environ.get(name, "1")) > 1), None)
        if other is None or "WORLD_SIZE" in os.environ:
            return True
        raise ConfigError(
            f"{other} says that {os.environ[other]} processes were started, but RANK and WORLD_SIZE are not set: each "
            "would train alone. Start one torchrun on each node, which sets them. To train alone on purpose, set "
            "WORLD_SIZE=1."
        )
    there = [f"{name}={os.environ[name]}" for name in _LAUNCHER if name in os.environ]
    raise ConfigError(
        f"the environment has {', '.join(there)}, but not {', '.join(missing)}. A launcher sets all of them: start the "
        "script with torchrun, or set what is missing. To train in one process, set none of them."
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, with one period at its end."""
    return str(error).partition("\n")[0].rstrip(".") + "."


def check_devices(groups: Groups, device: torch.device) -> None:
    """Raise on every rank if `groups` cannot send tensors on some rank's `device`, or if two ranks share a GPU.

    Every rank must call it. NCCL itself would fail with an error that does not name the cause, or hang.
    """
    if groups.world == 1:
        return
    gpu = gpu_of(device) if device.type == "cuda" else None
    found: list[tuple[str | None, str | None]] = groups.gather_before_connecting((_problem(groups, device), gpu))
    problems = [problem for problem, _ in found if problem is not None]
    if problems:
        raise ConfigError(problems[0])
    check_shared([gpu for _, gpu in found])


def _problem(groups: Groups, device: torch.device) -> str | None:
    """Return why this rank's tensors on `device` cannot be sent, or None if they can."""
    backend, is_gpu = groups.backend(device), device.type == "cuda"
    if backend == "none":
        backends = dist.get_backend_config(groups.parent).replace(",", ", ")
        problem = f"the process group carries no tensors there, only those of {backends}"
    elif is_gpu and backend == "gloo":
        problem = "the process group carries tensors on GPUs by gloo, which cannot exchange them as sharding needs"
    elif is_gpu and device.index not in (None, current := torch.cuda.current_device()):
        problem = f"the current device is cuda:{current}, where NCCL and kernels would run"
    else:
        return None
    return f"rank {groups.rank}: the model is on {device}, but {problem}. {_REMEDY}"


def gpu_of(device: torch.device) -> str:
    """Return a name of the GPU. Two ranks have the same name only if NCCL would refuse them as sharing a GPU."""
    # NCCL takes ranks with different host IDs for ranks on different hosts, and lets them share a GPU. NCCL 2.30 also
    # has a switch for it.
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    rank = f" of process {os.getpid()}" if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else ""
    return f"GPU {torch.cuda.get_device_properties(device).uuid} on {host}{rank}"


def check_shared(gpus: Sequence[str | None]) -> None:
    """Raise if two ranks have the same GPU by `gpu_of`."""
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu is not None and first.setdefault(gpu, rank) != rank:
            raise ConfigError(
                f"ranks {first[gpu]} and {rank} share a GPU ({gpu}), which NCCL refuses. Start as many ranks on a node "
                "as it has GPUs, and let device = towpath.init() choose each rank's, by LOCAL_RANK."
            )
