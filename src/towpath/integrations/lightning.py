"""Lightning: the strategies "towpath", "towpath_mics", "towpath_paro-iig", … in its registry.

    import towpath.integrations.lightning                      # registers them
    trainer = lightning.Trainer(strategy="towpath")            # zero3
    trainer = lightning.Trainer(strategy=TowpathStrategy(Sharding("mics", units=[Block])))

The module is sharded before `configure_optimizers` is called. `ModelCheckpoint` saves folders, which load under any of
these strategies and on any number of ranks. `towpath export` makes safetensors of them. A run also resumes from a file
that another strategy of Lightning has saved.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from towpath.api import average_islands
from towpath.core import presets
from towpath.core.presets import StrategyLike
from towpath.errors import CheckpointError, ShardError
from towpath.integrations.sharding import (
    FOLDER,
    Pairs,
    Sharding,
    load_full_model,
    load_full_optimizer,
    load_pairs,
    not_installed,
    save_pairs,
)
from towpath.sharded_module import ShardedModule

try:
    import lightning.pytorch as pl
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise not_installed(error, "lightning") from None

_REST = "lightning.ckpt"


class TowpathStrategy(DDPStrategy):
    """A Lightning strategy that shards the module.

    Args:
        sharding: A preset's name, what `towpath.strategy()` returns, or a `Sharding`.
        **kwargs: Arguments of Lightning's DDPStrategy, except those for DDP itself.

    Raises:
        ShardError: An argument is for DDP.
    """

    strategy_name = "towpath"

    def __init__(self, sharding: StrategyLike | Sharding = "zero3", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self._ddp_kwargs or self._ddp_comm_hook is not None:
            raise ShardError(f"TowpathStrategy wraps nothing in DDP: leave out {[*self._ddp_kwargs, 'ddp_comm_hook']}.")
        self.sharding = Sharding.of(sharding)

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the module, and set up the optimizers."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        if not isinstance(self.model, ShardedModule):
            if fits and self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
            mixed = isinstance(self.precision_plugin, MixedPrecision)
            self.sharding.apply(self.model, self.precision_plugin.precision if mixed else "no", self.root_device)
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Skip the reduction of gradients, in micro-batches before the last."""
        with self._sharded.no_sync():
            yield

    def on_train_end(self) -> None:
        """Let all islands hold the mean of their weights, after the last step of a training with outer steps."""
        self._sharded.zero_grad()  # the last step may have been skipped by loss scaling, and left its gradients
        average_islands(self._sharded)
        super().on_train_end()

    @property
    def _sharded(self) -> Any:
        return self.model

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether Lightning loads checkpoints after `setup`. Always true."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores the optimizer itself. Always false: it is restored with the model."""
        return False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing: an optimizer's state is saved with the model."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, a folder to which each rank writes its part. Every rank must call it."""
        if storage_options is not None:
            raise CheckpointError("storage_options= is not supported: checkpoints are local folders. Leave it out.")
        path = Path(self.broadcast(str(filepath)))
        if self.is_global_zero and path.is_file():
            path.unlink()
        self.barrier()
        del checkpoint["state_dict"]
        save_pairs(path, self._pairs())
        if self.is_global_zero:
            torch.save(checkpoint, path / _REST)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, a folder or a file. Every rank must call it."""
        path = Path(self.broadcast(str(checkpoint_path)))
        if (path / FOLDER).is_dir():
            load_pairs(path, self._pairs())
            return {**super().load_checkpoint(path / _REST, weights_only), "state_dict": {}}
        checkpoint = super().load_checkpoint(path, weights_only)
        strict = self.lightning_module is None or self.lightning_module.strict_loading
        load_full_model(self._sharded, lambda: checkpoint["state_dict"], strict)
        for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", []), strict=False):
            load_full_optimizer(self._sharded, _plain(optimizer), lambda state=state: state)
        return checkpoint

    def _pairs(self) -> Pairs:
        return [(self._sharded, _plain(optimizer)) for optimizer in self.optimizers or [None]]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded the model."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register "towpath" and one name for each preset."""
        strategy_registry.register(cls.strategy_name, cls, description="Towpath, zero3")
        for name in presets.strategies():
            strategy_registry.register(
                f"{cls.strategy_name}_{name}", cls, description=f"Towpath, {name}", sharding=name
            )


def _plain(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


TowpathStrategy.register_strategies(StrategyRegistry)
