"""Training on a GPU, without a GPU: no operation mixes devices, the host never waits, and all branches for GPUs run."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import towpath
from tests.fake_cuda import running
from tests.fake_cuda.branches import branches, listed
from tests.fake_cuda.ranks import gpu_ranks
from tests.fake_cuda.running import Net, batch, check_waits, loss_of, net, on_gpus, sharded
from tests.fake_cuda.runtime import fake_cuda
from tests.fake_cuda.world import World, fake_gpus
from tests.ranks.strategies import in_turn
from towpath import Outer, Precision, Topology, Transport, tracing
from towpath.codecs import exact
from towpath.errors import ConfigError, ShardError

UNITS = 4
in_parts = mock.patch("towpath.core.routes.SMALLEST_PART_BYTES_IN_CALLS", 32)
small = mock.patch("towpath.core.transport.SMALLEST_BYTES", 1)  # exact transports leave out small messages

ENCODED = {
    "mics": {"weights": "int8", "gradients": "int4:64", "feedback": "both"},
    "zero3": {"weights": "e4m3", "gradients": "bf16"},
    "ddp": {"gradients": "low-rank:4"},
    "paro-iig": {"weights": "int8", "gradients": "int8:whole"},
}


def steps(gpus: World, model: Any, most: int = 0, count: int = 4, in_passes: bool = False) -> None:
    """Train steps of two micro-steps. The host may wait `most` times in each, and in passes only if `in_passes`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        # In the second step ranks read the digests of the parameters that they began with: once in 100 steps.
        with gpus.cuda.no_waits("in a pass") if done > 2 and not in_passes else nullcontext():
            with model.no_sync():
                loss_of(model).backward()
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    check_waits(gpus.cuda, step, most, count)


@in_turn([*towpath.strategies()], 6, "name")
@on_gpus()
def test_no_preset_waits_in_a_step(name: str) -> None:
    with fake_gpus(2, 2) as gpus:
        steps(gpus, sharded(gpus.topology, name))


@on_gpus()
def test_no_route_and_no_codec_waits_in_a_step() -> None:
    for route in ("ring", "ho-ring", "two-hop", "one-hop", "hierarchical"):
        with fake_gpus(2, 2) as gpus, in_parts:
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
        steps(gpus, model, most=1)
        assert "_write_kernel" in gpus.launches


@on_gpus()
def test_exact_transports_wait_once_for_their_sizes() -> None:
    for precision in (Precision(), Precision(params=torch.bfloat16, reduce=torch.float32)):
        _exact(precision, "paro-iig")
    _exact(Precision(), "paro-igg", offload="params")


@on_gpus()
def test_no_exchange_between_islands_waits_in_a_step() -> None:
    for outer in (
        Outer(every=2),
        Outer(every=2, nccl=True),
        Outer(every=2, fragments=2, delay=1, blend=0.5),
        Outer(every=2, transport=Transport("flat", "int4:64", feedback="all")),
    ):
        with fake_gpus(2, 2) as gpus:
            steps(gpus, sharded(gpus.topology, "zero1", outer=outer), count=6)


@on_gpus()
def test_only_an_optimizer_on_the_host_waits() -> None:
    """Once for the gradients of each unit, at the end of the backward pass."""
    for name, offload, most in (
        ("paro-igg", "params", 0),
        ("zero3", "optimizer", UNITS),
        ("zero3", "optimizer+params", UNITS),
    ):
        with fake_gpus(2, 2) as gpus:
            steps(gpus, sharded(gpus.topology, name, offload=offload), most, in_passes=most > 0)


@on_gpus()
def test_offloaded_activations_are_copied_beside_the_computation() -> None:
    """Some of a pass stay on the device. A tensor with gaps is copied through the device's memory."""
    with fake_gpus(2, 2) as gpus, mock.patch("towpath.engine.saved_activations._AHEAD_BYTES", 1000):
        model = sharded(gpus.topology, "zero3")
        optimizer = torch.optim.AdamW(model.parameters())

        def forward(stream: Any, fails: bool = False) -> torch.Tensor:
            x = batch().requires_grad_()
            with towpath.offload_activations(model, smallest_bytes=1):
                with torch.cuda.stream(stream):
                    x = torch.cat([x[:, ::2].sin(), x[:, 1::2].exp().exp()], 1)
                if fails:
                    x.register_hook(_fail)
                return model(x).square().mean()

        def step(stream: Any) -> None:
            forward(stream).backward()
            optimizer.step()
            optimizer.zero_grad()

        check_waits(gpus.cuda, partial(step, gpus.cuda.default))
        check_waits(gpus.cuda, partial(step, torch.cuda.Stream()))
        # Graphs that are dropped with copies under way, before a backward pass or within one.
        forward(gpus.cuda.default)
        loss = forward(gpus.cuda.default, fails=True)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        # The thread of autograd drops its part first. Branches are only seen in this one.
        (2 * torch.ones((), device=loss.device, requires_grad=True)).backward()
        del loss
        gc.collect()


@on_gpus()
def test_gradients_from_another_stream_are_waited_for_by_the_device() -> None:
    with fake_gpus(2, 2) as gpus:
        model, other = sharded(gpus.topology, "zero3"), torch.cuda.Stream()

        def step() -> None:
            with torch.cuda.stream(other):
                loss = loss_of(model)
            loss.backward()

        check_waits(gpus.cuda, step)


def _fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError


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
def test_wires_under_fsdp2_wait_once_for_their_sizes() -> None:
    for wires in ({}, {"gradients": "int8"}, {"hold": "host"}):
        with fake_gpus(2, 2) as gpus:
            model = _wired(gpus, **wires)
            optimizer = torch.optim.AdamW(model.parameters())

            def step(model: Any = model, optimizer: Any = optimizer) -> None:
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()

            check_waits(gpus.cuda, step, most=1)


@on_gpus()
def test_saving_waits_on_a_thread_of_its_own(tmp_path: Path) -> None:
    from towpath.checkpoint import Saver, State, load, save

    with fake_gpus(1, 1) as gpus:
        model = sharded(gpus.topology, "zero3")
        optimizer = torch.optim.AdamW(model.parameters())
        state = State(model, optimizer)
        saver = Saver(tmp_path / "saver", state)
        steps(gpus, model, count=2)
        for step in range(2):
            with gpus.cuda.no_waits("while a checkpoint is saved"):
                saving = saver.save(step)
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()
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


@on_gpus(4)
def test_no_schedule_of_a_pipeline_waits_in_a_step() -> None:
    """Two ranks each send a share of a message, and gather it."""
    from towpath.pipeline import Compression, Pipeline

    with gpu_ranks() as cuda:
        mesh = init_device_mesh("cuda", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
        for schedule, count, codec in (("1F1B", 2, None), ("GPipe", 2, None), ("Interleaved1F1B", 4, "int8")):
            torch.manual_seed(0)  # both ranks begin with the same weights
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


@on_gpus()
def test_an_optimizer_on_the_host_takes_a_scaler() -> None:
    """The scale is copied to the host, where gradients are unscaled once it has arrived."""
    with fake_gpus(2, 2) as gpus:
        model = sharded(gpus.topology, "zero3", offload="optimizer")
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()


@on_gpus()
def test_transports_that_change_with_the_step_wait_for_nothing() -> None:
    with fake_gpus(2, 2) as gpus:
        steps(gpus, sharded(gpus.topology, "mics", gradients="int8", gradients_until=3), count=5)


@on_gpus()
def test_a_step_is_traced() -> None:
    with fake_gpus(2, 2) as gpus:
        model = sharded(gpus.topology, "zero3")
        steps(gpus, model, count=1)
        with tracing.trace(model) as trace:
            steps(gpus, model, count=1)
        assert trace.intervals


@on_gpus()
def test_exact_messages_are_decoded_one_by_one() -> None:
    with fake_gpus(1, 1):
        values = torch.linspace(-1, 1, 700, device="cuda")
        message = torch.zeros(exact.message_bound(700, torch.float32), dtype=torch.uint8, device="cuda")
        found = torch.zeros_like(values)
        exact.encode(None, values, message)
        exact.raise_failed([exact.decode(message, found, False)])
        assert torch.equal(found, values)


@on_gpus(2)
def test_buckets_of_ddp_are_summed_on_the_device() -> None:
    with gpu_ranks() as cuda:
        model = nn.parallel.DistributedDataParallel(net())
        towpath.wires(model, topology=Topology(2, 1), gradients="int8")
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        check_waits(cuda, step)


# --- around the training ----------------------------------------------------------------------------------------------


@on_gpus(2)
def test_a_model_on_the_host_moves_to_the_ranks_gpu() -> None:
    with gpu_ranks():
        model: Any = towpath.shard(Net(), "zero3", topology=Topology(2, 1), device="cuda")
        assert all(p.is_cuda for p in model.parameters())
        with pytest.raises(ShardError, match="cannot be moved"):
            model.to_empty(device="cpu")
        with (
            pytest.raises(ConfigError, match="the current device is cuda:1"),
            mock.patch("torch.cuda.current_device", lambda: 1),
        ):
            towpath.shard(net(), "zero3", topology=Topology(2, 1))
        with (
            pytest.raises(ConfigError, match="ranks 0 and 1 share a GPU"),
            mock.patch.dict(os.environ, NCCL_HOSTID="a"),
        ):
            towpath.shard(net(), "zero3", topology=Topology(2, 1))
        with (
            pytest.raises(ConfigError, match="gloo"),
            mock.patch.object(dist, "get_backend_config", new=mock.Mock(return_value="cpu:gloo,cuda:gloo")),
        ):
            towpath.shard(net(), "zero3", topology=Topology(2, 1))


@on_gpus()
def test_init_takes_the_gpu_of_the_local_rank() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    with fake_cuda(), mock.patch.object(dist, "init_process_group") as made:
        assert towpath.init() == torch.device("cuda", 0)
        assert made.call_args.kwargs["device_id"] == torch.device("cuda", 0)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with gpu_ranks():
        assert towpath.init() == torch.device("cuda", 0)
        with mock.patch("torch.cuda.current_device", lambda: 1):
            assert towpath.init() == torch.device("cuda", 1)


@on_gpus()
def test_towpath_train_runs_on_a_gpu(tmp_path: Path) -> None:
    from towpath.train.config import Config
    from towpath.train.data import prepare
    from towpath.train.trainer import run_training

    (tmp_path / "text.txt").write_text("".join(f"the {i}th line says {i * i % 97}\n" for i in range(400)))
    prepare([str(tmp_path / "text.txt")], tmp_path / "tokens")
    sections: dict[str, dict[str, Any]] = {
        "data": {"tokens": str(tmp_path / "tokens")},
        "model": {"width": 16, "depth": 2, "heads": 2},
        "train": {"steps": 3, "batch": 4, "micro_batch": 2, "length": 16},
        "strategy": {"name": "zero3"},
        "log": {"folder": str(tmp_path / "run")},
    }
    with gpu_ranks():
        assert run_training(Config.from_dict(sections)) == 0


@on_gpus(2)
def test_a_cluster_of_gpus_is_probed_and_planned_for(tmp_path: Path) -> None:
    from towpath.plan.cluster_probe import probe

    with gpu_ranks(), mock.patch.dict("towpath.plan.cluster_probe._SIDE", cuda=64):
        path, found = tmp_path / "profile.json", probe(Topology(2, 1), 0.1)
        if dist.get_rank() == 0:
            path.write_text(found.to_json())
        dist.barrier()
        workload = towpath.Workload(16, memory=4 << 30, profile=path, inputs=(batch(),))
        model: Any = towpath.shard(net(), "auto", topology=Topology(2, 1), workload=workload)
        loss_of(model).backward()


@on_gpus()
def test_candidates_of_a_benchmark_are_timed() -> None:
    from towpath.comparison import TrainingSetup, measure

    with gpu_ranks(), mock.patch.dict("towpath.comparison.MODELS", tiny=(64, 1, 64)):
        assert measure(0, "zero3", TrainingSetup("tiny", 8, 1, 1, torch.bfloat16), Topology(1, 1)).seconds > 0


@on_gpus()
def test_the_doctor_measures_each_device() -> None:
    from towpath.doctor.compute import compute

    small_ones = mock.patch.dict("towpath.doctor.compute._SIZES", cuda=(8, "bfloat16", 64))
    with gpu_ranks(), small_ones, mock.patch.object(torch.cuda, "get_device_name", return_value="a GPU"):
        for found in (compute(0.01, None), compute(0.01, 0)):
            assert found[0]["device"] == "cuda:0 a GPU" and found[0]["flops"] > 0


# Branches that no case here runs, and why. Each is the start of a line as `listed` writes it, without the line number.
NOT_RUN = {
    "cli/benchmark.py: torch.bfloat16": "the default of `towpath benchmark`, which starts ranks of its own",
    "comparison.py: torch.cuda.empty_cache()": "between two candidates, after `measure`",
    "integrations/accelerate.py: remedy": "the words of an error, for a job that Accelerate has not joined",
}


def test_every_branch_for_gpus_runs() -> None:
    if running.marked[__name__] != running.ended.get(__name__):
        pytest.skip("only some of the tests of this file have run, or one failed")
    missing = {f"{branch.file}: {branch.text}": branch for branch in branches() - running.ran}
    unknown = [branch for text, branch in missing.items() if not text.startswith(tuple(NOT_RUN))]
    assert not unknown, "no test here runs\n" + "\n".join(listed(unknown))
    assert len(missing) == len(NOT_RUN), missing
    assert len(NOT_RUN) <= 15 < len(running.ran)
