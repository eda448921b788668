"""Hugging Face Transformers: a `Trainer` that shards its model; and the same for Trainers of others.

    trainer = Trainer(model, args, strategy="mics", train_dataset=…)      # else as transformers.Trainer

    class ShardedSFTTrainer(ShardedTrainer, SFTTrainer): ...              # TRL's, or one of your own

Its checkpoints hold what `from_pretrained` loads, and beside that, in `towpath`, what goes on under any strategy and on
any number of ranks. What a Trainer without us has saved, it resumes as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from towpath.core.strategy import Strategy
from towpath.errors import ShardError
from towpath.integrations.accelerate import Accelerator
from towpath.integrations.saved_states import FOLDER, load_from, load_whole, on_cpu, save_into
from towpath.integrations.sharding import Sharding, needs_owner_stepped, not_installed
from towpath.optim import owner_stepped

try:
    import transformers
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
    from transformers.training_args import OptimizerNames
except ModuleNotFoundError as error:
    raise not_installed(error, "accelerate") from None

# Parts of names that TrainingArguments(optim=…) takes: the optimizers of bitsandbytes, torchao, galore_torch,
# apollo_torch and lomo_optim. They quantize, project or step parameters in kernels or hooks of their own, which know
# nothing of slices.
_REFUSED = ("4bit", "8bit", "bnb", "paged", "lion", "ademamix", "galore", "apollo", "lomo")

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class ShardedTrainer(_Base):
    """To be inherited before a Trainer. `strategy`: a preset's name, a `towpath.Strategy`, or a `Sharding`."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any

    def __init__(self, *args: Any, strategy: str | Strategy | Sharding, **kwargs: Any) -> None:
        self._sharding = Sharding.of(strategy)
        super().__init__(*args, **kwargs)
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            _check_named(OptimizerNames(self.args.optim).value)

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.fsdp or self.args.deepspeed:
            raise ShardError("TrainingArguments(fsdp=…, deepspeed=…) shard the model themselves: leave them out.")
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator.adopt(self.accelerator, self._sharding)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Make the optimizer that the arguments name, from the sharded parameters. Adafactor steps whole matrices."""
        if self.optimizer is None:
            self.accelerator.shard_model(self.model)  # first, since Adagrad makes its states at once
            made = super().create_optimizer(*args, **kwargs)
            self.optimizer = owner_stepped(made) if needs_owner_stepped(made) else made
        return self.optimizer

    # Saving -------------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None:  # every rank gathers; one writes
            state_dict = self.accelerator.get_state_dict(self.model)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_into(Path(output_dir, FOLDER), self._sharded_model(), _bare(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    # Resuming -----------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """It comes before the model is sharded: the values in a checkpoint of ours are loaded with the optimizer's."""
        if not Path(resume_from_checkpoint, FOLDER).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / FOLDER).is_dir():
            load_from(folder / FOLDER, self._sharded_model(), _bare(self.optimizer))
        elif (folder / OPTIMIZER_NAME).is_file():
            model, optimizer = self._sharded_model(), _bare(self.optimizer)
            load_whole(model, None, optimizer, lambda: on_cpu(folder / OPTIMIZER_NAME))
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

    # Evaluating ---------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.shard_model(self.model)  # evaluated whole, it could not be trained afterwards
        return super().evaluate(*args, **self._generating(kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.shard_model(self.model)
        return super().predict(*args, **self._generating(kwargs))

    def _generating(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Ranks whose texts end sooner go on until the last is through, for all of them gather."""
        if isinstance(self, transformers.Seq2SeqTrainer):
            kwargs.setdefault("synced_gpus", True)
        return kwargs


class Trainer(ShardedTrainer, transformers.Trainer):
    """`transformers.Trainer`, with `strategy=`."""


class Seq2SeqTrainer(ShardedTrainer, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer`, with `strategy=`."""


def _check_named(optim: str) -> None:
    if any(part in optim for part in _REFUSED):
        raise ShardError(
            f'TrainingArguments(optim="{optim}") makes an optimizer that cannot step the slices of a sharded model. '
            "Pass Trainer(optimizers=(towpath.optim.owner_stepped(optimizer), None)), with an optimizer that handles "
            "each parameter by itself. Or take an elementwise one: optim= takes adamw_torch, adamw_torch_fused, sgd, "
            "adagrad, rmsprop, schedule_free_… and adafactor. To keep the optimizer's states off the device, pass "
            'strategy=Sharding(…, offload="optimizer").'
        )


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)
