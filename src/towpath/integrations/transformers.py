"""Hugging Face Transformers: a `Trainer` that shards its model, and a mixin for other Trainers.

    trainer = Trainer(model, args, strategy="mics", train_dataset=…)      # as transformers.Trainer

    class ShardedSFTTrainer(ShardedTrainer, SFTTrainer): ...              # TRL's, or one of your own

Its checkpoints hold what `from_pretrained` loads. Their folder `towpath` holds the state to resume from, under any
strategy and on any number of ranks. It also resumes from checkpoints that a plain Trainer saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from towpath.api import average_islands
from towpath.core.presets import StrategyLike
from towpath.errors import ShardError
from towpath.integrations.accelerate import Accelerator, unwrapped
from towpath.integrations.sharding import (
    FOLDER,
    Sharding,
    load_from,
    load_full_optimizer,
    needs_owner_stepped,
    not_installed,
    save_into,
)
from towpath.optim import owner_stepped

try:
    import transformers
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
    from transformers.training_args import OptimizerNames
except ModuleNotFoundError as error:
    raise not_installed(error, "accelerate") from None

# Parts of names that TrainingArguments(optim=…) takes, of the optimizers of bitsandbytes, torchao, galore_torch,
# apollo_torch and lomo_optim. These quantize, project or step parameters in their own kernels or hooks, which do not
# support slices.
_REFUSED = ("4bit", "8bit", "bnb", "paged", "lion", "ademamix", "galore", "apollo", "lomo")

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class ShardedTrainer(_Base):
    """A mixin that shards the model of a Trainer. Inherit from it before the Trainer.

    Args:
        *args: Arguments of the Trainer.
        strategy: A preset's name, what `towpath.strategy()` returns, or a `Sharding`.
        **kwargs: Arguments of the Trainer.

    Raises:
        ShardError: The arguments shard the model themselves, or name an optimizer that cannot step slices.
    """

    accelerator: Accelerator
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any

    def __init__(self, *args: Any, strategy: StrategyLike | Sharding, **kwargs: Any) -> None:
        self._sharding = Sharding.of(strategy)
        super().__init__(*args, **kwargs)
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            _check_named(OptimizerNames(self.args.optim).value)

    def create_accelerator_and_postprocess(self) -> None:
        """Create an Accelerator that shards. The Trainer calls this."""
        if self.args.fsdp or self.args.deepspeed:
            raise ShardError("TrainingArguments(fsdp=…, deepspeed=…) shard the model themselves: leave them out.")
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator.adopt(self.accelerator, self._sharding)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the Accelerator moves the model unit by unit, because it may not fit on the device."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the optimizer that the arguments name, for the sharded parameters; Adafactor is `owner_stepped`."""
        if self.optimizer is None:
            self.accelerator.shard_model(self.model)  # first, as Adagrad creates its states in the constructor
            made = super().create_optimizer(*args, **kwargs)
            self.optimizer = owner_stepped(made) if needs_owner_stepped(made) else made
        return self.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train. With outer steps, let all islands hold the mean of their weights after the last step."""
        output = super().train(*args, **kwargs)
        average_islands(self._sharded_model())
        return output

    # --- saving -------------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None:  # every rank gathers, and one writes
            state_dict = self.accelerator.get_state_dict(self.model)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_into(Path(output_dir, FOLDER), self._sharded_model(), unwrapped(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    # --- resuming -----------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Skip our own checkpoints. The model is not sharded yet, and they are loaded together with the optimizer."""
        if Path(resume_from_checkpoint, FOLDER).is_dir():
            return
        values = self._sharding.values
        if values is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif callable(values) or Path(values) != Path(resume_from_checkpoint):  # they would replace what is loaded here
            raise ShardError(
                f"{resume_from_checkpoint} is a checkpoint of a plain Trainer, and Sharding(values=) gives other "
                f"initial values. Pass values={resume_from_checkpoint!r} to resume from it."
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / FOLDER).is_dir():
            load_from(folder / FOLDER, self._sharded_model(), unwrapped(self.optimizer))
        elif (folder / OPTIMIZER_NAME).is_file():
            load_full_optimizer(
                self._sharded_model(),
                unwrapped(self.optimizer),
                lambda: torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True),
            )
        if (folder / SCHEDULER_NAME).is_file():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint, FOLDER)
        if best.is_dir():
            load_from(best, self._sharded_model(), None)
        else:
            super()._load_best_model()

    def _sharded_model(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    # --- evaluating ---------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Shard the model if it is not sharded yet, and evaluate it. Unsharded, it could not be trained afterwards."""
        self.accelerator.shard_model(self.model)
        return super().evaluate(*args, **self._generating(kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Shard the model if it is not sharded yet, and predict."""
        self.accelerator.shard_model(self.model)
        return super().predict(*args, **self._generating(kwargs))

    def _generating(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Let all ranks generate until the last one is done, because every rank takes part in gathers."""
        if isinstance(self, transformers.Seq2SeqTrainer):
            kwargs.setdefault("synced_gpus", True)
        return kwargs


class Trainer(ShardedTrainer, transformers.Trainer):
    """A `transformers.Trainer` that shards its model, with the argument `strategy`."""


class Seq2SeqTrainer(ShardedTrainer, transformers.Seq2SeqTrainer):
    """A `transformers.Seq2SeqTrainer` that shards its model, with the argument `strategy`."""


def _check_named(optim: str) -> None:
    if any(part in optim for part in _REFUSED):
        raise ShardError(
            f'TrainingArguments(optim="{optim}") makes an optimizer that cannot step the slices of a sharded model. '
            "Pass Trainer(optimizers=(towpath.optim.owner_stepped(optimizer), None)), with an optimizer that handles "
            "each parameter by itself. Or take an elementwise one: optim= takes adamw_torch, adamw_torch_fused, sgd, "
            "adagrad, rmsprop, schedule_free_… and adafactor. To keep the optimizer's states off the device, pass "
            'strategy=towpath.strategy(name, offload="optimizer").'
        )
