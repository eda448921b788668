"""Lightning's own Trainer on real ranks, with `strategy="towpath"`: trained, saved, cut off, resumed, tested.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import towpath
from tests.ranks.launched import assert_alike, launched
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn
from towpath import checkpoint
from towpath.errors import ShardError
from towpath.integrations import Sharding

WIDTH, STEPS = 6, 10


def _module(optimizer_of: Callable[[Any], torch.optim.Optimizer] | None = None) -> Any:
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        """Reads a parameter of its own outside `forward`, as users' training steps do."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.gain = nn.Parameter(torch.tensor(0.5))
            self.losses: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss = (self(batch[0]) * self.gain - 1).square().mean()
            self.losses.append(float(loss))
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            self.log("val", (self(batch[0]) * self.gain).square().mean(), sync_dist=True)

        def predict_step(self, batch: list[Tensor], _: int) -> Tensor:
            return self(batch[0]) * self.gain

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self) if optimizer_of else torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    torch.manual_seed(0)
    return Net().double()


def _rows() -> DataLoader[Any]:
    rows = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(rows), batch_size=2, shuffle=False)


def _trainer(strategy: Any, folder: Path, steps: int = STEPS, **options: Any) -> Any:
    import lightning.pytorch as pl

    import towpath.integrations.lightning  # noqa: F401  (registers the strategies)

    return pl.Trainer(
        **{
            "strategy": strategy,
            "accelerator": "cpu",
            "devices": 2,
            "max_steps": steps,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.1,
            "default_root_dir": str(folder),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


def _values(module: Any) -> dict[str, Tensor]:
    """On every rank."""
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in module.named_parameters()}
    return {name: value.detach().clone() for name, value in whole.items()}


@in_turn(["towpath", "towpath_paro-nig"], 1, "strategy")
@on_ranks(2)
def test_ten_steps_are_those_of_ddp(tmp_path: Path, strategy: str) -> None:
    with launched():
        plain, ours = _module(), _module()
        trainers = [_trainer("ddp", tmp_path), _trainer(strategy, tmp_path)]
        both = [*zip(trainers, (plain, ours), strict=True)]
        for trainer, module in both:
            trainer.fit(module, _rows())
        assert ours.losses == pytest.approx(plain.losses, rel=1e-9)
        losses = [trainer.validate(module, _rows(), verbose=False)[0]["val"] for trainer, module in both]
        assert losses[1] == pytest.approx(losses[0], rel=1e-9)
        predicted = [torch.cat(t.predict(m, _rows())) for t, m in both]
        assert (predicted[0] - predicted[1]).abs().max() <= 1e-9
        assert_alike(_values(ours), _values(plain))


@on_ranks(2)
def test_islands_that_synchronize_in_every_step_are_ddp(tmp_path: Path) -> None:
    """With plain SGD outside and inside. The last exchange is that of `on_train_end`."""
    from towpath.integrations.lightning import TowpathStrategy

    def sgd(module: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=1e-2)

    outer = towpath.Outer(every=1, lr=1.0, momentum=0.0)
    sharding = Sharding(towpath.strategy("zero3", outer=outer), topology=towpath.Topology(2, 1))
    with launched():
        plain, ours = _module(sgd), _module(sgd)
        for strategy, module in (("ddp", plain), (TowpathStrategy(sharding), ours)):
            _trainer(strategy, tmp_path, gradient_clip_val=None).fit(module, _rows())
        assert_alike(_values(ours), _values(plain))


def test_a_run_that_failed_goes_on_under_another_strategy(world: Worlds, tmp_path: Path) -> None:
    """As a run under DDP does: Lightning begins its epoch anew."""
    world(2).run(_cut_off, tmp_path)
    assert (tmp_path / "towpath" / "step=6.ckpt").is_dir()
    assert not (tmp_path / "towpath" / "step=3.ckpt").exists()  # save_top_k takes it away
    world(2).run(_resumed, tmp_path)


def _cut_off(folder: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Stop(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                raise RuntimeError("cut off")

    with launched():
        for name, strategy in (("ddp", "ddp"), ("towpath", "towpath_mics")):
            keep = ModelCheckpoint(dirpath=folder / name, filename="{step}", every_n_train_steps=3)
            trainer = _trainer(strategy, folder, enable_checkpointing=True, callbacks=[keep, Stop()])
            with pytest.raises(RuntimeError, match="cut off"):
                trainer.fit(_module(), _rows())


def _resumed(folder: Path) -> None:
    with launched():
        plain, ours = _module(), _module()
        _trainer("ddp", folder).fit(plain, _rows(), ckpt_path=str(folder / "ddp" / "step=6.ckpt"))
        trainer, saved = _trainer("towpath_zero2", folder), str(folder / "towpath" / "step=6.ckpt")
        trainer.fit(ours, _rows(), ckpt_path=saved)
        assert len(ours.losses) == 2 * (STEPS - 6)
        assert ours.losses == pytest.approx(plain.losses, rel=1e-9)
        # Testing begins from a checkpoint without any optimizer.
        other = _module()
        _trainer("towpath", folder).validate(other, _rows(), ckpt_path=saved, verbose=False)
        assert other.towpath_engine.strategy.name == "zero3"
        assert_alike(_values(ours), _values(plain))


@on_ranks(2)
def test_what_lightning_has_saved_itself_is_resumed_and_what_we_save_is_exported(tmp_path: Path) -> None:
    """Steps 0 to 4, 4 to 7 and 7 to 10: under DDP, and under DDP, then twice with ours."""
    with launched() as rank:
        ends = []
        for name, strategies in (("plain", ["ddp"] * 3), ("mixed", ["ddp", "towpath_hpz", "towpath"])):
            path = None
            for strategy, steps in zip(strategies, (4, 7, STEPS), strict=True):
                trainer, module = _trainer(strategy, tmp_path, steps=steps), _module()
                trainer.fit(module, _rows(), ckpt_path=path)
                path = str(tmp_path / f"{name}-{steps}.ckpt")
                trainer.save_checkpoint(path)
            ends.append(_values(module))
        assert_alike(*ends)
        if rank == 0:
            saved = checkpoint.latest(tmp_path / f"mixed-{STEPS}.ckpt" / "towpath" / "0")
            assert saved is not None
            (file,) = checkpoint.export(saved, tmp_path / "exported")
            assert_alike(load_file(file), ends[0])


@on_ranks(2)
def test_bf16_mixed_sends_and_computes_in_bf16(tmp_path: Path) -> None:
    with launched():
        module = _module().float()
        rows = DataLoader(TensorDataset(torch.randn(32, WIDTH)), batch_size=2)
        _trainer("towpath", tmp_path, steps=2, precision="bf16-mixed").fit(module, rows)
        assert str(module.towpath_engine.precision.params) == "bfloat16"
        assert {p.dtype for p in module.parameters()} == {torch.float32}


@on_ranks(2)
def test_what_is_meant_for_ddp_is_refused() -> None:
    from towpath.integrations.lightning import TowpathStrategy

    with launched(), pytest.raises(ShardError, match="find_unused_parameters"):
        TowpathStrategy("mics", find_unused_parameters=True)


@on_ranks(2)
def test_a_strategy_of_lightning_refuses_a_sharded_module_and_names_the_integration(tmp_path: Path) -> None:
    with launched():
        module = towpath.shard(_module(), "zero3")
        for work in ("fit", "validate"):
            with pytest.raises(ShardError, match=r"towpath\.integrations\.lightning"):
                getattr(_trainer("ddp", tmp_path), work)(module, _rows())


@on_ranks(2)
def test_a_module_may_have_its_values_on_rank_0_only(tmp_path: Path) -> None:
    """Configured inside the Trainer, as users do where the model is large."""
    with launched() as rank:

        class Late(type(_module())):  # type: ignore[misc]
            def configure_model(self) -> None:
                torch.manual_seed(0)
                with torch.device("meta" if rank else "cpu"):
                    self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).double()

        plain, ours = _module(), Late().double()
        for strategy, module in (("ddp", plain), ("towpath", ours)):
            _trainer(strategy, tmp_path, steps=2).fit(module, _rows())
        assert_alike(_values(ours), _values(plain))
