"""Lightning: the strategies "towpath" and "towpath_mics", "towpath_paro-iig", … of its registry.

    import towpath.integrations.lightning                      # registers them
    trainer = lightning.Trainer(strategy="towpath")            # zero3
    trainer = lightning.Trainer(strategy=TowpathStrategy(Sharding("mics", units=[Block])))

The module is sharded before `configure_optimizers` is called. `ModelCheckpoint` saves folders that go on under any of
them and on any number of ranks; with `single_file=True`, files as Lightning itself writes them, which
`load_from_checkpoint` reads. A run resumes from either.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from towpath.checkpoint.state_dicts import get_model_state_dict, get_optimizer_state_dict
from towpath.core import presets
from towpath.core.strategy import Strategy
from towpath.errors import CheckpointError, ShardError
from towpath.integrations.saved_states import FOLDER, load_from, load_whole, numbered, save_into
from towpath.integrations.sharding import Sharding, is_sharded, not_installed

try:
    import lightning.pytorch as pl
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise not_installed(error, "lightning") from None

_REST = "lightning.ckpt"
_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
_MIXED = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


class TowpathStrategy(DDPStrategy):
    """`sharding`: a preset's name, a `towpath.Strategy`, or a `Sharding`. The rest is as in Lightning's DDPStrategy.

    `single_file`: checkpoints are files that Lightning's own strategies read, gathered on rank 0.
    """

    strategy_name = "towpath"

    def __init__(
        self, sharding: str | Strategy | Sharding = "zero3", *, single_file: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if self._ddp_kwargs or self._ddp_comm_hook is not None:
            raise ShardError(f"TowpathStrategy wraps nothing in DDP: leave out {[*self._ddp_kwargs, 'ddp_comm_hook']}.")
        self.sharding, self._single_file = Sharding.of(sharding), single_file

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        if not is_sharded(self.model):
            if fits and self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
            mixed = _MIXED.get(str(self.precision_plugin.precision), "no")
            if mixed == "no" and isinstance(self.precision_plugin, MixedPrecision):
                raise ShardError(f"precision={self.precision_plugin.precision!r} is not known to Towpath.")
            self.sharding.apply(self.model, mixed)
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """For the micro-steps before the last."""
        with self._sharded.no_sync():
            yield

    @property
    def _sharded(self) -> Any:
        return self.model

    # Checkpoints --------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """It is restored with the model."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors on rank 0, for a single file; else what this rank holds."""
        if self._single_file:
            return get_model_state_dict(self._sharded, options=_ON_RANK_0)
        return self._sharded.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = _plain(optimizer)
        if not self._single_file:
            return {}
        return numbered(self._sharded, plain, get_optimizer_state_dict(self._sharded, plain, options=_ON_RANK_0))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = Path(self.broadcast(str(filepath)))
        if self._single_file:
            if self.is_global_zero and path.is_dir():
                shutil.rmtree(path)
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise CheckpointError("storage_options= goes with single_file=True: else a checkpoint is a local folder.")
        if self.is_global_zero and path.is_file():
            path.unlink()
        self.barrier()
        del checkpoint["state_dict"]
        for number, optimizer in enumerate(self.optimizers or [None]):
            save_into(path / FOLDER / str(number), self._sharded, _plain(optimizer))
        if self.is_global_zero:
            torch.save({**checkpoint, "optimizer_states": []}, path / _REST)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        optimizers: list[Any] = [*map(_plain, self.optimizers)] if self.optimizers else [None]
        if (path / FOLDER).is_dir():
            for number, optimizer in enumerate(optimizers):
                load_from(path / FOLDER / str(number), self._sharded, optimizer)
            return {**super().load_checkpoint(path / _REST, weights_only), "state_dict": {}}
        checkpoint = super().load_checkpoint(path, weights_only)
        strict = self.lightning_module is None or self.lightning_module.strict_loading
        load_whole(self._sharded, lambda: checkpoint["state_dict"], None, None, strict=strict)
        for optimizer, state in zip(optimizers, checkpoint.get("optimizer_states", []), strict=False):
            if optimizer is not None:
                load_whole(self._sharded, None, optimizer, lambda state=state: state)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has filled the model."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing, as for the model."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="Towpath, zero3")
        for name in presets.strategies():
            strategy_registry.register(
                f"{cls.strategy_name}_{name}", cls, description=f"Towpath, {name}", sharding=name
            )


def _plain(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


TowpathStrategy.register_strategies(StrategyRegistry)
