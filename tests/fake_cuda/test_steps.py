"""Training on a GPU, without a GPU: no operation mixes devices, the host never waits, and all branches for GPUs run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import towpath
from tests.fake_cuda import running
from tests.fake_cuda.branches import branches, listed
from tests.fake_cuda.ranks import gpu_ranks
from tests.fake_cuda.running import batch, check_waits, loss_of, net, on_gpus, sharded
from tests.fake_cuda.world import World, fake_gpus
from towpath import Outer, Precision, Topology, Transport

UNITS = 4
small = mock.patch("towpath.core.transport.SMALLEST_BYTES", 1)  # exact transports leave out small messages

# The host may wait so often in a step.
ENCODED = {
    "mics": dict(weights="int8", gradients="int4:64", feedback="both"),
    "zero3": dict(weights="e4m3", gradients="bf16"),
    "ddp": dict(gradients="low-rank:4"),
    "paro-iig": dict(weights="int8", gradients="int8:whole"),
}


def steps(gpus: World, model: Any, most: int = 0, count: int = 4) -> None:
    """Train steps of two micro-steps. The host waits in none of the passes, unless it may wait."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        with model.no_sync():
            loss_of(model).backward()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    check_waits(gpus.cuda, step, most, count)


@on_gpus()
def test_no_preset_waits_in_a_step() -> None:
    for name in towpath.strategies():
        with fake_gpus(2, 2) as gpus:
            steps(gpus, sharded(gpus.topology, name))


@on_gpus()
def test_no_route_and_no_codec_waits_in_a_step() -> None:
    for route in ("ring", "ho-ring", "two-hop", "one-hop", "hierarchical"):
        with fake_gpus(2, 2) as gpus:
            steps(gpus, sharded(gpus.topology, "zero3", route=route))
    for name, codecs in ENCODED.items():
        with fake_gpus(2, 2) as gpus:
            steps(gpus, sharded(gpus.topology, name, **codecs))
            assert gpus.launches or name == "ddp"


@small
def _exact(precision: Precision, name: str, **options: Any) -> None:
    with fake_gpus(2, 2) as gpus:
        strategy = towpath.strategy(name, gpus.topology, exact=True, **options)
        model: Any = towpath.shard(net(), strategy, topology=gpus.topology, precision=precision)
        steps(gpus, model, most=1 + UNITS)
        assert "_write_kernel" in gpus.launches


@on_gpus()
def test_exact_transports_wait_for_their_sizes() -> None:
    for precision in (Precision(), Precision(params=torch.bfloat16, reduce=torch.float32)):
        _exact(precision, "paro-iig")
    _exact(Precision(), "paro-igg", offload="params")


@on_gpus()
def test_an_exchange_between_islands_waits_when_it_is_applied() -> None:
    for outer in (
        Outer(every=2),
        Outer(every=2, fragments=2, delay=1, blend=0.5),
        Outer(every=2, transport=Transport("flat", "int4:64", feedback="all")),
    ):
        with fake_gpus(2, 2) as gpus:
            steps(gpus, sharded(gpus.topology, "zero1", outer=outer), most=2)


@on_gpus()
def test_only_an_optimizer_on_the_host_waits() -> None:
    for offload, most in (("params", 0), ("optimizer", 2 * UNITS), ("optimizer+params", 2 * UNITS)):
        with fake_gpus(2, 2) as gpus:
            steps(gpus, sharded(gpus.topology, "paro-igg" if offload == "params" else "zero3", offload=offload), most)


@on_gpus()
def test_offloaded_activations_are_copied_beside_the_computation() -> None:
    """Some of a pass stay on the device. A tensor with gaps is copied through the device's memory."""
    with fake_gpus(2, 2) as gpus, mock.patch("towpath.engine.saved_activations._AHEAD_BYTES", 1000):
        model = sharded(gpus.topology, "zero3")
        optimizer = torch.optim.AdamW(model.parameters())
        other = torch.cuda.Stream()

        def step(dropped: bool = False) -> None:
            with towpath.offload_activations(model, smallest_bytes=1):
                x = model.blocks[0](batch())
                loss = model(x + batch()[:, ::2].exp().repeat(1, 2)).square().mean()
            if not dropped:
                with torch.cuda.stream(other):
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        step()
        check_waits(gpus.cuda, step)
        step(dropped=True)


@on_gpus()
def test_what_surrounds_a_step_waits_as_little_as_in_pytorch() -> None:
    """Clipping waits for nothing, GradScaler for one number, and so on as without sharding."""
    with fake_gpus(2, 2) as gpus:
        model = sharded(gpus.topology, "zero3")
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")

        def step() -> None:
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(model)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        check_waits(gpus.cuda, step, most=1)

        def infer() -> None:
            with torch.no_grad():
                model(batch())

        check_waits(gpus.cuda, infer)
        with gpus.cuda.counted() as waits, towpath.full_parameters(model):
            pass
        assert len(waits) <= 2 * UNITS  # for the checksums of what is lent, before and after


@on_gpus()
def test_seconds_of_transfers_are_read_without_a_wait() -> None:
    with fake_gpus(2, 2) as gpus:
        model = sharded(gpus.topology, "zero3")
        towpath.stats(model)  # from now on transfers are timed
        steps(gpus, model)
        gpus.cuda.idle = True
        steps(gpus, model, count=1)
        assert sum(each.seconds_in_flight for each in towpath.stats(model).transfers) > 0
        steps(gpus, model, count=3)


@on_gpus()
def test_frozen_weights_rest_in_a_codec_on_the_device() -> None:
    with fake_gpus(2, 2) as gpus:
        model = net()
        for parameter in model.get_submodule("blocks").parameters():
            parameter.requires_grad_(False)
        strategy = towpath.strategy("zero3", gpus.topology, frozen_codec="int8")
        steps(gpus, towpath.shard(model, strategy, topology=gpus.topology))
        assert "_decode_kernel" in gpus.launches


@small
def _wired(gpus: World, **wires: Any) -> Any:
    model, mesh = net(), init_device_mesh("cuda", (gpus.topology.world,))
    for module in (*model.get_submodule("blocks").children(), model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    towpath.wires(model, topology=gpus.topology, **wires)
    return model


@on_gpus()
def test_wires_under_fsdp2_wait_for_their_sizes() -> None:
    for wires in ({}, {"gradients": "int8"}, {"hold": "host"}):
        with fake_gpus(2, 2) as gpus:
            model = _wired(gpus, **wires)
            optimizer = torch.optim.AdamW(model.parameters())

            def step(model: Any = model, optimizer: Any = optimizer) -> None:
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()

            check_waits(gpus.cuda, step, most=1 + UNITS)


@on_gpus()
def test_saving_waits_on_a_thread_of_its_own(tmp_path: Path) -> None:
    from towpath.checkpoint import Saver, State, load, save

    with fake_gpus(1, 1) as gpus:
        model = sharded(gpus.topology, "zero3")
        optimizer = torch.optim.AdamW(model.parameters())
        state = State(model, optimizer)
        saver = Saver(tmp_path / "saver", state)
        for step in range(3):
            with gpus.cuda.no_waits("while a checkpoint is saved"):
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step:
                    saving = saver.save(step)
            if step:
                assert saving.outcome().ok
        saver.close()
        assert any(wait.elsewhere for wait in gpus.cuda.waits)
        save(tmp_path / "once", 3, state)
        load(tmp_path / "once", state)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Stage(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.to("cuda")


def _square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@on_gpus(2)
def test_no_schedule_of_a_pipeline_waits_in_a_step() -> None:
    from towpath.pipeline import Compression, Pipeline

    with gpu_ranks() as cuda:
        mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("pp", "dp"))
        for schedule, count, codec in (("1F1B", 2, None), ("GPipe", 2, None), ("Interleaved1F1B", 4, "int8")):
            pipeline = Pipeline(
                [Stage] * count,
                "zero3",
                mesh=mesh,
                schedule=schedule,
                micro_batches=4,
                example=torch.empty(2, 8),
                units=[Block],
                loss=_square,
                compression=Compression() if codec is None else Compression(activations=codec),
            )
            optimizer = torch.optim.AdamW(list(pipeline.parameters()))

            def step(pipeline: Any = pipeline, optimizer: Any = optimizer) -> None:
                x = torch.ones(8, 8, device="cuda")
                pipeline.step(x, target=x + 1)
                pipeline.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()

            check_waits(cuda, step)


# Branches that no case runs, and why.
ELSEWHERE: dict[str, str] = {}


def test_every_branch_for_gpus_runs() -> None:
    if running.marked != running.ended:
        pytest.skip("only some of the tests of this file have run, or one failed")
    missing = branches() - running.ran
    print(*listed(missing), sep="\n")
    assert len(missing) < 120
