"""What stands between a user and the first step on GPUs: the wrong device, and groups that never connect.

There is no GPU here. Ranks on gloo are told that their groups use NCCL, models on GPUs are fake tensors, and the calls
that would reach NCCL are recorded.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import towpath
from tests.ranks.server import on_ranks
from towpath.errors import ConfigError
from towpath.topology.groups import Groups
from towpath.topology.init import check_devices

BOTH, NCCL, GLOO = "cpu:gloo,cuda:nccl", "cuda:nccl", "cpu:gloo,cuda:gloo"
GPU = torch.device("cuda", 0)


@contextmanager
def _gpus(config: str, gpu: str = "0", current: int = 0) -> Generator[pytest.MonkeyPatch]:
    """Inside, the process groups are said to have the backends `config`, and this rank to see the GPU `gpu`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group=None: config)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: current)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpu))
        yield patch


def _model(device: str) -> nn.Module:
    model = nn.Module()
    with FakeTensorMode() if device != "cpu" else nullcontext():
        model.weight = nn.Parameter(torch.empty(2, 2, device=device))
    return model


# --- what shard() refuses ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_init_takes_the_group_that_is_there() -> None:
    group = dist.group.WORLD
    device = towpath.init()
    assert dist.group.WORLD is group
    assert device == torch.device("cpu")


@pytest.mark.parametrize(
    ("config", "devices", "current", "words"),
    [
        (NCCL, ["cpu", "cpu"], 0, "rank 0: the model is on cpu, but .* only those of cuda:nccl"),
        (NCCL, ["cuda:0", "cpu"], 0, "rank 1: the model is on cpu"),
        (GLOO, ["cuda:0", "cuda:0"], 0, "rank 0: the model is on cuda:0, but .* by gloo"),
        (BOTH, ["cpu", "xpu:0"], 0, "rank 1: the model is on xpu:0, but .* only those of cpu:gloo, cuda:nccl"),
        (BOTH, ["cuda:0", "cuda:0"], 1, "rank 0: the model is on cuda:0, but the current device is cuda:1"),
        (BOTH, ["cuda:0", "cuda:0"], 0, r"ranks 0 and 1 share a GPU \(GPU 0 on "),
        (NCCL, ["cuda:0", "cuda:0"], 0, r"ranks 0 and 1 share a GPU \(GPU 0 on "),
    ],
)
@on_ranks(2)
def test_a_device_that_cannot_work_is_refused_on_every_rank(
    config: str, devices: list[str], current: int, words: str
) -> None:
    with _gpus(config, current=current), pytest.raises(ConfigError, match=f"{words}.*towpath.init()"):
        towpath.shard(_model(devices[dist.get_rank()]), "zero3", topology=towpath.Topology(2, 1))


@pytest.mark.parametrize("config", [BOTH, NCCL])
@on_ranks(2)
def test_ranks_with_gpus_of_their_own_or_that_nccl_takes_for_hosts_are_not_refused(config: str) -> None:
    with _gpus(config, f"{dist.get_rank()}"):
        check_devices(Groups(), GPU)
    with _gpus(config) as patch:
        patch.setenv("NCCL_HOSTID", f"rank-{dist.get_rank()}")
        check_devices(Groups(), GPU)
    with _gpus(config) as patch:
        patch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        check_devices(Groups(), GPU)


@on_ranks(2)
def test_a_rank_that_does_not_come_is_named() -> None:
    if dist.get_rank() == 0:
        with _gpus(NCCL) as patch, pytest.raises(ConfigError, match=r"rank 0: ranks \[1\] .* did not come"):
            patch.setattr(Groups, "timeout", timedelta(seconds=0.05))
            check_devices(Groups(), GPU)
    dist.barrier()


@on_ranks(2)
def test_a_model_without_memory_is_made_where_its_group_carries_tensors() -> None:
    with _gpus(GLOO):
        with torch.device("meta"):
            model = nn.Linear(2, 2)
        sharded: Any = towpath.shard(model, "zero3", topology=towpath.Topology(2, 1))
    assert sharded.weight.to_local().device.type == "cpu"


# --- groups that connect ----------------------------------------------------------------------------------------------


@contextmanager
def _recorded(patch: pytest.MonkeyPatch) -> Generator[list[tuple[str, Any]]]:
    """What would call NCCL inside: splits of the world's communicator, all-reductions on the GPU and messages."""
    calls: list[tuple[str, Any]] = []
    new_group, zeros, all_reduce, exchange = dist.new_group, torch.zeros, dist.all_reduce, dist.batch_isend_irecv

    def made(ranks: list[int], **options: Any) -> Any:
        assert dist.group.WORLD is not None
        if dist.group.WORLD.bound_device_id is not None and options.get("backend") is None:
            calls.append(("split", ranks))
        return new_group(ranks, **options)

    def zeros_of(*shape: Any, device: Any = None, **options: Any) -> Any:
        return zeros(*shape, device="cpu" if torch.device(device or "cpu").type == "cuda" else device, **options)

    def reduced(tensor: Any, *args: Any, group: Any = None, **options: Any) -> Any:
        calls.append(("all-reduce", group))
        return all_reduce(tensor, *args, group=group, **options)

    def sent(operations: list[Any]) -> Any:
        calls.append(("messages", operations[0].group))
        return exchange(operations)

    patch.setattr(dist, "new_group", made)
    patch.setattr(torch, "zeros", zeros_of)
    patch.setattr(dist, "all_reduce", reduced)
    patch.setattr(dist, "batch_isend_irecv", sent)
    yield calls


@pytest.mark.parametrize("bound", [False, True])
@on_ranks(2)
def test_the_members_of_a_group_connect_when_it_is_made(bound: bool) -> None:
    """PyTorch connects those of a group with a bound device itself."""
    assert dist.group.WORLD is not None
    with _gpus(BOTH) as patch, _recorded(patch) as calls:
        dist.group.WORLD.bound_device_id = GPU if bound else None
        try:
            pair = Groups().of(((0, 1),), f"pair {bound}")
            Groups().of(((0,), (1,)), f"alone {bound}")
        finally:
            dist.group.WORLD.bound_device_id = None
        assert pair.bound_device_id == (GPU if bound else None)
    assert calls == ([] if bound else [("all-reduce", pair)])


@on_ranks(4)
def test_all_ranks_connect_before_some_of_them_are_probed() -> None:
    """Else the ranks that send wait for those that do not to connect, and those wait for the result."""
    from towpath.plan import cluster_probe

    with _gpus(BOTH) as patch, _recorded(patch) as calls:
        patch.setattr(cluster_probe, "device_of_job", lambda: torch.device("cpu"))
        patch.setattr(cluster_probe, "LARGEST", cluster_probe.SMALLEST)
        prober = cluster_probe._Prober(Groups(), towpath.Topology(2, 2), 0.0)
        prober._links("inter", 0.0)
    first = next(what for what, group in calls if group in (None, dist.group.WORLD))
    assert first == "all-reduce", calls[:3]


@on_ranks(2)
def test_shard_connects_its_group() -> None:
    with _gpus(BOTH) as patch, _recorded(patch) as calls:
        towpath.shard(nn.Linear(2, 2), "ddp", topology=towpath.Topology(2, 1))
    assert calls[0] == ("all-reduce", dist.group.WORLD)


# --- buffers ----------------------------------------------------------------------------------------------------------

BUFFERS = (torch.int16, torch.uint16, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64)


class Buffered(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        for i, dtype in enumerate(BUFFERS):
            values = torch.arange(6).add(seed).to(torch.float32 if dtype.itemsize == 1 else dtype).to(dtype)
            self.register_buffer(f"b{i}", values.view(2, 3).t())
        self.register_buffer("scalar", torch.tensor(seed, dtype=torch.int16))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("gaps", torch.full((4, 6), float(seed))[:, ::2], persistent=False)


@on_ranks(2)
def test_buffers_become_those_of_rank_0_and_stay_the_same_tensors() -> None:
    expected = dict(Buffered(0).named_buffers())
    model: Any = Buffered(dist.get_rank())
    before = dict(model.named_buffers())
    towpath.shard(model, "zero3", topology=towpath.Topology(2, 1))
    for name, buffer in model.named_buffers():
        assert torch.equal(_bytes(buffer), _bytes(expected[name])), name
        assert buffer is before[name] and buffer.stride() == expected[name].stride(), name
    assert [*model.state_dict()] == [*Buffered(0).state_dict()]
    other = dict(Buffered(1).named_buffers())
    if dist.get_rank() == 1:
        for name, buffer in model.named_buffers():
            buffer.copy_(other[name])
    towpath.broadcast_buffers(model, 1)
    for name, buffer in model.named_buffers():
        assert torch.equal(_bytes(buffer), _bytes(other[name])), name


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.contiguous().reshape(-1).view(torch.uint8)


@on_ranks(2)
def test_buffers_on_the_host_go_over_gloo_where_the_group_has_nccl_alone() -> None:
    buffer = torch.full((3,), float(dist.get_rank()))
    with _gpus(NCCL) as patch:
        groups = Groups()
        went: list[Any] = []
        broadcast = dist.broadcast

        def recorded(tensor: torch.Tensor, group: Any, **options: Any) -> Any:
            went.append(group)
            return broadcast(tensor, group=group, **options)

        patch.setattr(dist, "broadcast", recorded)
        groups.broadcast(buffer, 1)
        assert went == [groups.gloo_group()] and went[0] is not groups.parent
    assert buffer.tolist() == [1.0] * 3
