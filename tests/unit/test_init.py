"""`towpath.init()`: the device and the process group of a rank, from the environment that a launcher has set."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Generator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import towpath
from lab.runs import direct
from towpath.errors import ConfigError
from towpath.topology import groups
from towpath.topology import init as module

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")
LAUNCHED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def without_a_group(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A node that shows two GPUs, and what was called on it. The other ranks have said already which GPU they have."""
    calls: dict[str, Any] = {"device": 0}
    store = dist.HashStore()
    for rank in range(3):
        fact = [f"GPU of rank {rank}", ["ab"[rank % 2], True]]
        store.set(f"towpath/gathered/GPUs and racks/{rank}", json.dumps(fact))
    monkeypatch.setenv("TOWPATH_RACK", "a")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.update(device=index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: calls["device"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device.index))
    monkeypatch.setattr(module, "join_store", lambda timeout: (store, 3, 4))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: calls.update(backend=backend, **options))
    return calls


def test_one_process_is_a_group_of_one_rank_on_the_cpu() -> None:
    assert towpath.init() == torch.device("cpu")
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    group = dist.group.WORLD
    assert towpath.init() == torch.device("cpu"), "a second call is no error"
    assert dist.group.WORLD is group


def test_a_rank_takes_its_gpu_and_both_backends(monkeypatch: pytest.MonkeyPatch, gpus: dict[str, Any]) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **LAUNCHED, "TOWPATH_RACK": "b"})
    device = towpath.init(timeout=timedelta(minutes=1))
    assert device == torch.device("cuda", 1) == gpus["device_id"]
    assert gpus["device"] == 1
    assert gpus["backend"] == "cpu:gloo,cuda:nccl"
    assert (gpus["rank"], gpus["world_size"]) == (3, 4)
    assert gpus["timeout"] == timedelta(minutes=1)


@pytest.mark.parametrize(("before", "is_late", "after"), [(None, False, "32"), ("1", False, "1"), (None, True, None)])
def test_streams_get_hardware_queues_before_the_first_call_of_cuda(
    monkeypatch: pytest.MonkeyPatch, gpus: dict[str, Any], before: str | None, is_late: bool, after: str | None
) -> None:
    name, at_first_call = "CUDA_DEVICE_MAX_CONNECTIONS", list[str | None]()
    monkeypatch.setenv(name, before or "")  # so that it is restored
    if before is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_late)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: at_first_call.append(os.environ.get(name)) or True)
    for variable, value in (LAUNCHED | {"TOWPATH_RACK": "b"}).items():
        monkeypatch.setenv(variable, value)
    towpath.init()
    assert at_first_call and set(at_first_call) == {after}


def test_a_rank_gets_a_number_beside_the_others_of_its_rack(
    monkeypatch: pytest.MonkeyPatch, gpus: dict[str, Any]
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **LAUNCHED, "RANK": "1"})
    store = module.join_store(None)[0]
    store.set("towpath/gathered/GPUs and racks/3", json.dumps(["GPU of rank 3", ["b", True]]))
    monkeypatch.setattr(module, "join_store", lambda timeout: (store, 2, 4))
    towpath.init()  # racks by rank: a, b, a, b
    assert gpus["rank"] == 1 and os.environ["RANK"] == "1"


@pytest.mark.usefixtures("gpus")
def test_more_ranks_than_gpus_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **LAUNCHED, "LOCAL_RANK": "2"})
    with pytest.raises(ConfigError, match=r"local rank 2 has no GPU: PyTorch sees 2.*CUDA_VISIBLE_DEVICES"):
        towpath.init()


def test_ranks_that_were_given_one_gpu_are_refused_before_nccl_connects(
    monkeypatch: pytest.MonkeyPatch, gpus: dict[str, Any]
) -> None:
    """As two nodes that are one machine: each has a local rank 0."""
    monkeypatch.setattr(os, "environ", {**os.environ, **LAUNCHED})
    monkeypatch.setattr(module, "gpu_of", lambda device: "GPU of rank 1")
    with pytest.raises(ConfigError, match=r"ranks 1 and 3 share a GPU \(GPU of rank 1\)"):
        towpath.init()
    assert "backend" not in gpus


@pytest.mark.usefixtures("gpus")
def test_ranks_that_would_all_take_the_first_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {k: v for k, v in (os.environ | LAUNCHED).items() if k != "LOCAL_RANK"})
    with pytest.raises(ConfigError, match=r"rank 3: .*LOCAL_RANK is not"):
        towpath.init()


@pytest.mark.parametrize("left_out", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_half_set_environment_is_refused(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    monkeypatch.setattr(os, "environ", {k: v for k, v in (os.environ | LAUNCHED).items() if k != left_out})
    with pytest.raises(ConfigError, match=rf"the environment has .*, but not {left_out}\."):
        towpath.init()


def test_processes_of_a_launcher_that_sets_no_ranks_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ConfigError, match=r"2 processes were started.*torchrun"):
        towpath.init()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert towpath.init() == torch.device("cpu")


def test_a_group_that_exists_is_kept_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert towpath.init() == torch.device("cpu")
    assert dist.group.WORLD is group
    monkeypatch.setattr(os, "environ", {**os.environ, **LAUNCHED})
    with pytest.raises(ConfigError, match=r"rank 3: the launcher started 4 ranks, but the process group .* has 1"):
        towpath.init()


@pytest.mark.parametrize("chosen", [0, 1])
def test_a_group_on_gpus_that_binds_no_device_leaves_the_current_one_or_takes_the_ranks(
    monkeypatch: pytest.MonkeyPatch, gpus: dict[str, Any], chosen: int
) -> None:
    monkeypatch.undo()
    towpath.init()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: gpus.update(device=index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus["device"])
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setenv("LOCAL_RANK", "2")
    gpus["device"] = chosen
    assert towpath.init() == torch.device("cuda", chosen or 2)
    assert gpus["device"] == (chosen or 2), "the caller's choice stays, and nobody is left on GPU 0 by mistake"
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = torch.device("cuda", 1)
    assert towpath.init() == torch.device("cuda", 1)


def test_ranks_of_the_lab_train_on_the_cpu_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share one machine, and there would be more of them than GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [
        rank.env["CUDA_VISIBLE_DEVICES"] for rank in direct(["train.py"], towpath.Topology(2, 1), (0, 0), None)
    ] == ["", ""]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert direct(["train.py"], towpath.Topology(1, 1), (0,), None)[0].env["CUDA_VISIBLE_DEVICES"] == "0"


def test_what_ranks_compare_gives_up_before_nccl_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    towpath.init()
    options, given, world = SimpleNamespace(config=SimpleNamespace()), dict[str | None, timedelta](), dist.group.WORLD

    def new_group(ranks: list[int], *, backend: str | None, timeout: timedelta, **_: Any) -> Any:
        given[backend] = timeout
        return world

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda **_: options), raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    for backend in ("nccl", "gloo"):
        groups.new_group([0], "gather", backend, timedelta(minutes=1))
    assert given == {"nccl": timedelta(minutes=2), "gloo": timedelta(minutes=1)}
    assert options._timeout == given["nccl"], "PyTorch warns if both differ"


def test_a_port_in_use_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        monkeypatch.setattr(os, "environ", {**os.environ, **LAUNCHED, **address, "RANK": "0"})
        with pytest.raises(ConfigError, match=rf"port in use.*127.0.0.1:{address['MASTER_PORT']}.*--master-port"):
            towpath.init()
