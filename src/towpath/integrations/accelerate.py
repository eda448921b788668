"""Hugging Face Accelerate: an `Accelerator` whose `prepare` shards the model.

    accelerator = Accelerator(strategy="mics")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Start the script with `torchrun` or `accelerate launch`. `accumulate`, `clip_grad_norm_`, `save_state`, `load_state`,
`get_state_dict` and `save_model` work as with `accelerate.Accelerator`. A state can be loaded under another strategy
and on another number of ranks. Several models may be prepared, and each optimizer steps one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from towpath.checkpoint.state_dicts import get_model_state_dict
from towpath.core.presets import StrategyLike
from towpath.engine.trial_steps import parameters_of
from towpath.errors import CheckpointError, ConfigError, ShardError
from towpath.integrations.sharding import (
    Pairs,
    Sharding,
    load_pairs,
    not_installed,
    prepare_for_shards,
    save_pairs,
)
from towpath.sharded_module import ShardedModule, admit_accelerate
from towpath.topology.groups import Groups
from towpath.topology.together import together

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, parse_flag_from_env
    from accelerate.utils.environment import get_cpu_distributed_information
except ModuleNotFoundError as error:
    raise not_installed(error, "accelerate") from None

_KNOWN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
# The plugins with which Accelerate would shard the model itself. On CPU ranks it ignores these settings.
_PLUGINS = {
    "ACCELERATE_USE_FSDP": DistributedType.FSDP,
    "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED,
    "ACCELERATE_USE_MEGATRON_LM": DistributedType.MEGATRON_LM,
}
_CPU_RANKS = "start CPU ranks with torchrun --nproc-per-node, and pass cpu=True (TrainingArguments: use_cpu=True)"


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` whose `prepare` shards models.

    With `mixed_precision="bf16"` or "fp16", weights are gathered and used in that dtype, and gradients are reduced in
    float32, as under FSDP. Pass `Sharding(…, precision=…)` for other dtypes.

    Args:
        *args: Arguments of `accelerate.Accelerator`.
        strategy: A preset's name, what `towpath.strategy()` returns, or a `Sharding`.
        **kwargs: Arguments of `accelerate.Accelerator`.

    Raises:
        ShardError: Accelerate is configured to shard the model itself.
        ConfigError: Accelerate counts other ranks than the launcher started.
    """

    def __init__(self, *args: Any, strategy: StrategyLike | Sharding, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin(Sharding.of(strategy))

    @classmethod
    def adopt(cls, accelerator: accelerate.Accelerator, strategy: StrategyLike | Sharding) -> Accelerator:
        """Turn an Accelerator that a framework made into one that shards. It must not have prepared anything."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, Accelerator)
        accelerator._begin(Sharding.of(strategy))
        return accelerator

    def _begin(self, sharding: Sharding) -> None:
        self.sharding = sharding
        self._is_saving = False
        plugins = [kind for variable, kind in _PLUGINS.items() if parse_flag_from_env(variable)]
        if self.distributed_type not in _KNOWN or plugins:
            kind = plugins[0] if plugins else self.distributed_type
            raise ShardError(
                f"Accelerate is set up for {kind.value}, which shards the model itself. Take its plugin and its "
                f"{kind.value.lower()}_config out of the configuration, and launch as for DistributedDataParallel; "
                f"{_CPU_RANKS}."
            )
        self._check_world()
        if self.parallelism_config is not None and self.parallelism_config.total_size > 1:
            raise ShardError(
                "parallelism_config= is not supported: shard over the data-parallel ranks with "
                "Sharding(…, mesh=mesh[…]), or call towpath.shard() yourself."
            )

    def _check_world(self) -> None:
        """Raise if Accelerate does not count all ranks. It would give each of them all batches."""
        if dist.is_initialized():
            world, rank = dist.get_world_size(), dist.get_rank()
        else:
            launcher = get_cpu_distributed_information()
            world, rank = launcher.world_size, launcher.rank
        if (self.num_processes, self.process_index) != (world, rank):
            remedy = f"To train without a GPU, {_CPU_RANKS}."
            if self.device.type == "cuda":
                remedy = "Start one rank for each GPU with torchrun, and make the process group before the Accelerator."
            raise ConfigError(
                f"Accelerate counts {self.num_processes} process(es) and takes this one for number "
                f"{self.process_index}, but it is rank {rank} of {world} ranks. Ranks that Accelerate does not count "
                f"train on the same batches. {remedy}"
            )
        # `accelerate launch` sets MASTER_ADDR for several processes. Without a WORLD_SIZE it started only this one.
        by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ
        if world == 1 and by_accelerate and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
            raise ConfigError(
                "accelerate launch was configured for several processes, and started one process, which would train "
                "alone. Without GPUs it starts several by mpirun only. Instead "
                f"{_CPU_RANKS}. To train in one process, start the script with python."
            )

    # --- prepare ------------------------------------------------------------------------------------------------------

    def shard_model(self, model: nn.Module, device_placement: bool | None = None) -> None:
        """Shard `model` in place, and give its new parameters to the optimizers that were prepared before.

        `prepare` calls this. A model that is sharded already stays as it is. Every rank must call it. The model may be
        on any device, and on the meta device except on rank 0. It is moved to the Accelerator's device unit by unit.
        """
        if isinstance(model, ShardedModule):
            return
        if getattr(model, "_is_accelerate_prepared", False):
            raise ShardError(
                "the model was prepared for evaluation, and cannot be sharded. Build it again to train it."
            )
        if not dist.is_initialized():  # a script also runs without a launcher
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        with together(Groups(), "prepare()"):
            self._check_world()
        placed = self.device_placement if device_placement is None else device_placement
        self.sharding.apply(model, self.mixed_precision, self.device if placed else None)
        for optimizer in self._optimizers:
            prepare_for_shards(unwrapped(optimizer), model)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model, instead of wrapping it. `prepare` calls this. With `evaluation_mode`, it is not sharded."""
        if not evaluation_mode:
            self.shard_model(model, device_placement)
        if isinstance(model, ShardedModule):
            device_placement = False
            admit_accelerate(model)
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer for the sharded parameters that it has. `prepare` calls this."""
        prepare_for_shards(unwrapped(optimizer))
        return super().prepare_optimizer(optimizer, device_placement)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Check the arguments, and do nothing else: sharded models have `join` for uneven inputs."""
        if even_batches is False:
            raise ShardError(
                "join_uneven_inputs(even_batches=False) only works with DistributedDataParallel: write "
                "`for batch in towpath.join(model, loader)`, or leave even_batches as it is."
            )
        return super().join_uneven_inputs([], even_batches)

    # --- states -------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Gather the model's full tensors on the CPU of rank 0; others get {}. Every rank must call it."""
        plain = self._bare(model)
        if not isinstance(plain, ShardedModule):
            return super().get_state_dict(model, unwrap)
        if self._is_saving:  # `save_state` writes the tensors into our own checkpoint
            return {}
        return get_model_state_dict(plain, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save the state as Accelerate does, with sharded models and their optimizers in the folder `towpath`."""
        pairs = self._pairs()

        def save(models: list[Any], weights: list[Any], folder: str) -> None:
            plain = [not isinstance(self._bare(model), ShardedModule) for model in models]
            weights[:] = compress(weights, plain)
            save_pairs(folder, pairs)

        with self._apart(pairs, self.register_save_state_pre_hook, save):
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load what `save_state` saved, under any strategy and on any number of ranks."""
        pairs = self._pairs()

        def load(models: list[Any], folder: str) -> None:
            models[:] = [model for model in models if not isinstance(self._bare(model), ShardedModule)]
            load_pairs(folder, pairs)

        with self._apart(pairs, self.register_load_state_pre_hook, load):
            super().load_state(input_dir, load_kwargs, **kwargs)

    def _pairs(self) -> list[tuple[nn.Module, Optimizer | None]]:
        """Return the sharded models, each with its optimizer."""
        models = [model for each in self._models if isinstance(model := self._bare(each), ShardedModule)]
        owner = {id(p): number for number, model in enumerate(models) for p in model.parameters()}
        found: list[list[Optimizer]] = [[] for _ in models]
        for optimizer in map(unwrapped, self._optimizers):
            numbers = {owner[id(p)] for p in parameters_of(optimizer) if id(p) in owner}
            if len(numbers) > 1:
                raise CheckpointError(
                    "an optimizer steps parameters of several sharded models, which cannot be saved: make one for each."
                )
            for number in numbers:
                found[number].append(optimizer)
        for model, optimizers in zip(models, found, strict=True):
            if len(optimizers) > 1:
                name = type(model).__name__
                raise CheckpointError(f"{name} has several optimizers, which cannot be saved: give one its groups.")
        return [(model, next(iter(optimizers), None)) for model, optimizers in zip(models, found, strict=True)]

    def _bare(self, model: nn.Module) -> nn.Module:
        return self.unwrap_model(model, keep_torch_compile=False)

    @contextmanager
    def _apart(self, pairs: Pairs, register: Callable[[Any], Any], hook: Callable[..., None]) -> Generator[None]:
        """Let `hook` save or load the sharded models and their optimizers, and Accelerate all others."""
        everyone, ours = self._optimizers, {id(optimizer) for _, optimizer in pairs}
        self._optimizers = [optimizer for optimizer in everyone if id(unwrapped(optimizer)) not in ours]
        self._is_saving = True
        # Our hook runs last, so that the user's hooks find as many weights as models.
        handle = register(hook)
        try:
            yield
        finally:
            handle.remove()
            self._optimizers, self._is_saving = everyone, False


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate has wrapped, as often as it did."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
