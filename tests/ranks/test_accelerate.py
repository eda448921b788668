"""Accelerate's own package on real ranks: what its users do with DistributedDataParallel they do with a strategy.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import towpath
from tests.ranks.launched import assert_alike, forget, launched
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn
from towpath.errors import CheckpointError, ConfigError, MismatchError, ShardError

STEPS, ACCUMULATED, WIDTH = 10, 2, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def _accelerator(strategy: Any, **options: Any) -> Any:
    from towpath.integrations.accelerate import Accelerator

    return Accelerator(strategy=strategy, **options)


class Run:
    """A script as Accelerate's users write it. Under no strategy it is wrapped in DistributedDataParallel."""

    def __init__(self, strategy: str | None, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        import accelerate

        options = {"cpu": True, "gradient_accumulation_steps": ACCUMULATED, **options}
        self.accelerator: Any
        if strategy is None:
            self.accelerator = accelerate.Accelerator(**options)
        else:
            self.accelerator = _accelerator(strategy, **options)
        torch.manual_seed(0)
        model = Net().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))
        rows = torch.randn(160, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
        loader = DataLoader(TensorDataset(rows), batch_size=2, shuffle=True)
        prepared = self.accelerator.prepare(loader, optimizer, model, scheduler)  # in an order that nobody promised
        self.loader, self.optimizer, self.model, self.scheduler = prepared
        self.norms: list[float] = []

    def train(self, first: int, last: int) -> None:
        """Steps [first, last) of one epoch."""
        begun = self.accelerator.skip_first_batches(self.loader, first * ACCUMULATED)
        for number, (x,) in enumerate(begun, start=first * ACCUMULATED):
            if number == last * ACCUMULATED:
                return
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(x).float().square().mean())
                if self.accelerator.sync_gradients:
                    self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def values(self) -> dict[str, Tensor]:
        """On rank 0."""
        return {k.removeprefix("module."): v for k, v in self.accelerator.get_state_dict(self.model).items()}


def _check(ours: Run, plain: Run) -> None:
    found, expected = ours.values(), plain.values()
    if dist.get_rank() == 0:
        assert_alike(found, expected)


# --- training ---------------------------------------------------------------------------------------------------------


@in_turn(["zero3", "paro-nig"], 1, "strategy")
@on_ranks(2)
def test_ten_steps_are_those_of_ddp(strategy: str) -> None:
    """With an optimizer and a schedule made before `prepare`, accumulation and clipping."""
    with launched():
        plain, ours = Run(None), Run(strategy)
        for run in (plain, ours):
            torch.manual_seed(7)
            run.train(0, STEPS)
        assert len(ours.norms) == STEPS
        assert ours.norms == pytest.approx(plain.norms, rel=1e-9)
        _check(ours, plain)


@on_ranks(2)
def test_mixed_precision_sends_and_computes_in_bf16_and_steps_fp32_masters() -> None:
    with launched():
        run = Run("zero3", torch.float32, mixed_precision="bf16")
        computed: list[torch.dtype] = []
        run.model.blocks[0].register_forward_hook(lambda m, _, out: computed.append(m.weight.dtype))
        run.train(0, 2)
        assert set(computed) == {torch.bfloat16}
        assert {p.dtype for p in run.model.parameters()} == {torch.float32}
        assert run.model.towpath_engine.precision == towpath.Precision(params="bfloat16", reduce="float32")


@on_ranks(2)
def test_a_model_may_be_sharded_before_or_prepared_before_its_optimizer_and_a_teacher_stays_whole() -> None:
    with launched():
        accelerator = _accelerator("zero3", cpu=True)
        teacher = accelerator.prepare_model(Net(), evaluation_mode=True)
        assert type(teacher) is Net
        with pytest.raises(ShardError, match="prepared for evaluation"):
            accelerator.prepare(teacher)
        sharded = towpath.shard(Net(), "zero3")
        assert all(accelerator.prepare(sharded) is sharded for _ in range(2))
        model: Any = Net()
        made = torch.optim.SGD(model.parameters(), lr=1.0)
        prepared = accelerator.prepare(model)
        assert prepared is model
        optimizer = accelerator.prepare(made)
        before = model.head.weight.full_tensor()
        accelerator.backward(model(torch.ones(2, WIDTH)).sum())
        optimizer.step()
        assert not torch.equal(before, model.head.weight.full_tensor())


# --- saving and resuming ----------------------------------------------------------------------------------------------


def test_it_goes_on_under_another_strategy_and_on_other_ranks(world: Worlds, tmp_path: Path) -> None:
    """Three runs: whole; cut off after four steps; resumed. Rows come in the order that the saved sampler had."""
    world(2).run(_saved, tmp_path)
    world(2).run(_resumed, tmp_path)
    assert (tmp_path / "state" / "towpath" / "0").is_dir()
    assert not (tmp_path / "state" / "model.safetensors").exists()  # nothing of it is written twice
    world(4).run(_loaded, tmp_path)


def _saved(folder: Path) -> None:
    with launched() as rank:
        run = Run("zero3")
        torch.manual_seed(7)
        run.train(0, 4)
        hooked: list[int] = []
        run.accelerator.register_save_state_pre_hook(lambda models, weights, _: hooked.append(len(weights)))
        run.accelerator.save_state(str(folder / "state"))
        assert hooked == [1]
        run.accelerator.save_model(run.model, str(folder / "model"))
        if rank == 0:
            torch.save(run.values(), folder / "at four.pt")
        else:
            assert run.values() == {}


def _resumed(folder: Path) -> None:
    with launched():
        plain = Run(None)
        torch.manual_seed(7)
        plain.train(0, 7)
        run = Run("paro-iig")
        run.accelerator.load_state(str(folder / "state"))
        run.accelerator.save_state(str(folder / "state"))  # over the one before
        run = Run("zero2")
        run.accelerator.load_state(str(folder / "state"))
        torch.manual_seed(7)
        run.train(4, 7)
        assert run.scheduler.get_last_lr() == plain.scheduler.get_last_lr()
        assert run.norms == pytest.approx(plain.norms[4:], rel=1e-9)
        _check(run, plain)


def _loaded(folder: Path) -> None:
    from safetensors.torch import load_file

    with launched() as rank:
        run = Run("mics")
        run.accelerator.load_state(str(folder / "state"))
        found = run.values()
        if rank == 0:
            expected = torch.load(folder / "at four.pt")
            assert_alike(found, expected, 0.0)
            assert_alike(load_file(folder / "model" / "model.safetensors"), expected, 0.0)


@on_ranks(2)
def test_each_of_several_models_is_saved_with_its_optimizer(tmp_path: Path) -> None:
    with launched():
        accelerator = _accelerator("zero3", cpu=True)
        models: list[Any] = [Net(), Net()]
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in models]
        *_, first, second = accelerator.prepare(*models, *reversed(optimizers))
        for model, optimizer in zip(models, (second, first), strict=True):
            accelerator.backward(model(torch.ones(2, WIDTH)).sum())
            optimizer.step()
            optimizer.zero_grad()
        saved = [m.head.weight.full_tensor().clone() for m in models]
        accelerator.save_state(str(tmp_path))
        for model in models:
            with towpath.full_parameters(model), torch.no_grad():
                model.head.weight.zero_()
        accelerator.load_state(str(tmp_path))
        for model, value in zip(models, saved, strict=True):
            assert torch.equal(model.head.weight.full_tensor(), value)
        accelerator.prepare(torch.optim.SGD(models[0].parameters(), lr=0.1))
        with pytest.raises(CheckpointError, match="several optimizers"):
            accelerator.save_state(str(tmp_path))


# --- what cannot be ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_it_cannot_do_it_says_before_anything_is_trained() -> None:
    import accelerate

    from towpath.integrations.accelerate import Accelerator

    with launched():
        stock = accelerate.Accelerator(cpu=True)
        stock.state.distributed_type = accelerate.DistributedType.FSDP
        with pytest.raises(ShardError, match="FSDP, which shards the model itself"):
            Accelerator.adopt(stock, "zero3")
    with launched():
        accelerator = _accelerator("no such", cpu=True)
        with pytest.raises(ConfigError, match="no such"):
            accelerator.prepare(Net())
    with launched():
        accelerator = _accelerator("zero3", cpu=True)
        model: Any = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ShardError, match="AdamW has already stepped"):
            accelerator.prepare(model, optimizer)
        model = Net()
        with pytest.raises(ShardError, match=r"Pass towpath.optim.owner_stepped\(Adafactor\(…\)\) instead"):
            accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
        with pytest.raises(ShardError, match=r"towpath.join\(model, loader\)"):
            accelerator.join_uneven_inputs([model], even_batches=False)
    with launched(), pytest.raises(ShardError, match=r'Sharding\("auto", workload='):
        _accelerator("auto", cpu=True).prepare(Net())
    dist.barrier()


# --- the world as Accelerate counts it --------------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_that_accelerate_counts_as_one_process_each_are_refused() -> None:
    """As under torchrun, without a GPU and without cpu=True: every rank would train on the same batches."""
    with launched(ACCELERATE_USE_CPU="false"), pytest.raises(ConfigError, match=r"1 process.*2 ranks.*cpu=True"):
        _accelerator("mics")


@on_ranks(2)
def test_a_process_group_made_after_the_accelerator_is_compared_when_a_model_is_prepared() -> None:
    with launched(ACCELERATE_USE_CPU="false"):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
        with mock.patch.object(dist, "is_initialized", lambda: False):
            accelerator = _accelerator("mics")
        with pytest.raises(ConfigError, match=r"1 process.*2 ranks"):
            accelerator.prepare(Net())


@on_ranks(2)
def test_where_accelerate_miscounts_one_rank_all_ranks_raise() -> None:
    with launched() as rank:
        accelerator = _accelerator("mics")
        accelerator.state.process_index = 0
        expected = MismatchError if rank == 0 else ConfigError
        with pytest.raises(expected, match=r"number 0, but it is rank 1 of 2 ranks"):
            accelerator.prepare(Net())


_CONFIGURATION = """\
compute_environment: LOCAL_MACHINE
num_machines: 1
num_processes: 2
machine_rank: 0
use_cpu: true
mixed_precision: 'no'
debug: false
"""
_MULTI_CPU = "distributed_type: MULTI_CPU\n" + _CONFIGURATION
_FSDP = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: NO_WRAP}\n" + _CONFIGURATION


def _started_by_accelerate(configuration: str, folder: Path) -> dict[str, str]:
    """The environment that `accelerate launch` starts a script in, or starts torchrun in."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    (folder / "config.yaml").write_text(configuration)
    command = ["--config_file", str(folder / "config.yaml"), "--main_process_port", "1", "script.py"]
    found: list[dict[str, str]] = []

    def started(*_: Any, env: dict[str, str] | None = None) -> mock.Mock:
        found.append({**(os.environ if env is None else env)})
        return mock.Mock(returncode=0)

    with (
        mock.patch.object(subprocess, "Popen", started),
        mock.patch.object(torch.distributed.run, "run", started),
        mock.patch("accelerate.utils.launch.is_port_in_use", lambda _: False),
    ):
        launch_command(launch_command_parser().parse_args(command))
    (environment,) = found
    return environment


def test_the_one_process_that_accelerate_starts_for_several_on_cpus_is_refused(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, _started_by_accelerate(_MULTI_CPU, tmp_path), clear=True):
        forget()
        with pytest.raises(ConfigError, match=r"one process.*torchrun --nproc-per-node.*cpu=True"):
            _accelerator("mics")


def test_a_configuration_of_fsdp_on_cpus_is_refused(world: Worlds, tmp_path: Path) -> None:
    added = _started_by_accelerate(_FSDP, tmp_path).items() - os.environ.items()
    world(2).run(_fsdp_configured, {name: value for name, value in added if name.startswith(("ACCELERATE_", "FSDP_"))})


def _fsdp_configured(environment: dict[str, str]) -> None:
    for options in ({}, {"cpu": True}):
        with launched(**environment), pytest.raises(ShardError, match=r"FSDP, which shards.*torchrun.*cpu=True"):
            _accelerator("mics", **options)


# --- Accelerate without us --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_accelerate_itself_refuses_a_sharded_model_and_names_the_integration() -> None:
    import accelerate

    for cpu in ("true", "false"):
        with launched(ACCELERATE_USE_CPU=cpu):
            accelerator = accelerate.Accelerator()
            model = towpath.shard(Net(), "zero3")
            optimizer = torch.optim.AdamW(model.parameters())
            with pytest.raises(ShardError, match=r"towpath\.integrations\.accelerate\.Accelerator\(strategy="):
                accelerator.prepare(model, optimizer)
            with pytest.raises(ShardError, match=r"towpath\.integrations"):
                accelerator.prepare_model(model, evaluation_mode=True)


@on_ranks(2)
def test_distributed_data_parallel_refuses_a_sharded_model() -> None:
    model = towpath.shard(Net(), "zero3")
    with pytest.raises(ShardError, match=r"Leave out DistributedDataParallel.*towpath\.integrations"):
        nn.parallel.DistributedDataParallel(model)
