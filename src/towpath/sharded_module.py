"""The methods that `shard` adds to a model's class, and the check that the model allows them.

They are methods because frameworks call them, or FSDP2 has them. All other calls are functions of `towpath`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import nn

from towpath.engine.executor import Engine
from towpath.engine.hooks import HookedModule, register_known_methods
from towpath.engine.module_class import add_mixin
from towpath.engine.parameters.full_parameters import reshard, unshard
from towpath.errors import ShardError


class ShardedModule(nn.Module):
    """The methods of a sharded model. `shard` makes the model's class a subclass of this and of its own class.

    `towpath_engine` runs the model's training steps.
    """

    towpath_engine: Engine
    # True for a part that is sharded by itself on purpose, as the tied embeddings of a pipeline are.
    towpath_apart = False

    @property
    def _is_accelerate_prepared(self) -> bool:
        """The mark that Accelerate reads before it wraps a model, and sets afterwards.

        Accelerate's own Accelerator, which transformers' Trainer uses, would wrap the model in DistributedDataParallel,
        which needs unsharded parameters. Towpath's Accelerator calls `admit_accelerate` first, and others get an error.
        """
        marked: bool | None = self.__dict__.get("_is_accelerate_prepared")
        if marked is None:
            raise ShardError(
                f"{_sharded(self)} was given to Accelerate's own Accelerator, or to transformers' own Trainer. Neither "
                "trains a sharded model. Give the model, before shard(), to "
                "towpath.integrations.accelerate.Accelerator(strategy=…) or to "
                "towpath.integrations.transformers.Trainer(…, strategy=…), which shard it."
            )
        return marked

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, marked: bool) -> None:
        self.__dict__["_is_accelerate_prepared"] = marked

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """The attribute that DistributedDataParallel reads first. It raises `ShardError`, as the model needs no DDP."""
        raise ShardError(
            f"{_sharded(self)} was given to DistributedDataParallel, which needs full parameters. Leave out "
            "DistributedDataParallel: the model reduces its gradients itself. In a framework, give the model, before "
            "shard(), to towpath.integrations.accelerate, towpath.integrations.transformers or "
            "towpath.integrations.lightning, with a strategy."
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context of `towpath.no_sync`. Frameworks call this method."""
        return self.towpath_engine.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and also drop those accumulated in micro-steps since the last boundary.

        Args:
            set_to_none: Whether `.grad` becomes None instead of zero. Default: True.
        """
        self.towpath_engine.discard()
        super().zero_grad(set_to_none)

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Return the model: `shard` has allocated the shards of a model that was built on the meta device.

        Args:
            device: The device of the model. A number is an index of CUDA devices.
            recurse: Has no effect.

        Raises:
            ShardError: The model is on another device.
        """
        own = self.towpath_engine.comm.device
        wanted = own if device is None else torch.device(device)
        if wanted.type != own.type or wanted.index not in (None, own.index):
            raise ShardError(
                f"to_empty(device={str(wanted)!r}): the sharded model is on {own}, and cannot be moved. Build it on "
                "the meta device, call torch.cuda.set_device() or towpath.init(), and then shard(): parameters are "
                "made on this rank's device. For shards in host memory take towpath.strategy(name, offload=…)."
            )
        return self

    def unshard(self) -> None:
        """Gather all parameters, which stay unsharded until `reshard`. Every rank must call it.

        Prefer `towpath.full_parameters`, a context that also reshards after an exception.
        """
        unshard(self.towpath_engine)

    def reshard(self, *, modifier_rank: int | None = None) -> None:
        """Undo `unshard`, and keep the writes to the unsharded parameters. Every rank must call it.

        Args:
            modifier_rank: The rank whose writes are kept. By default, all ranks must have written the same values.

        Raises:
            StepError: Ranks wrote different values.
        """
        reshard(self.towpath_engine, modifier_rank)


class PretrainedModule(ShardedModule):
    """The methods of a sharded model that has `save_pretrained`, such as those of transformers and PEFT."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model with full tensors, by the model's own `save_pretrained`. Every rank must call it.

        Rank 0 writes. With `state_dict=`, the ranks whose dict is not empty call the model's own method unchanged.

        Raises:
            CheckpointError: Saving failed on some rank.
        """
        from towpath.checkpoint.state_dicts import save_pretrained  # imported here, because checkpoints need much more

        whole: Any = super()
        return save_pretrained(self, whole.save_pretrained, *args, **kwargs)


def admit_accelerate(model: ShardedModule) -> None:
    """Allow Towpath's own Accelerator to prepare `model`."""
    model.__dict__.setdefault("_is_accelerate_prepared", False)


def _sharded(model: ShardedModule) -> str:
    return f"{type(model).__name__}, which towpath.shard() has sharded,"


def check_class(model: nn.Module, strategy: str) -> None:
    """Raise `ShardError` if `model` or a part of it is sharded already, or has methods with the same names.

    Args:
        model: The model to shard.
        strategy: The name of the strategy, for the advice in messages.
    """
    if isinstance(model, ShardedModule):
        raise ShardError("the model is sharded already. Build it anew to shard it by another strategy.")
    _check_parts(model, strategy)
    taken = [n for n in ("no_sync", "unshard", "reshard") if hasattr(model, n)]
    if taken:
        raise ShardError(
            f"{type(model).__name__} has {', '.join(taken)} of its own, which shard() would hide. Do not wrap the "
            "model (DistributedDataParallel, FSDP) before shard()."
        )


def _check_parts(model: nn.Module, strategy: str) -> None:
    kind = type(model).__name__.removeprefix("FSDP")
    if isinstance(model, HookedModule):
        raise ShardError(
            f"the {kind} is a part of a model that is sharded already. Call shard() once, on the whole model. "
            f"units=[{kind}] makes a unit of each {kind}."
        )
    # FSDPModule is recognized by its name, because most programs never import FSDP.
    theirs = [m for m in model.modules() if any(c.__name__ == "FSDPModule" for c in type(m).__mro__)]
    found = theirs or [m for m in model.modules() if isinstance(m, ShardedModule) and not m.towpath_apart]
    if not found:
        return
    called = "fully_shard()" if theirs else "shard()"
    classes = (
        ", ".join(sorted({type(module).__name__.removeprefix("FSDP") for module in found if module is not model}))
        or "Block"
    )
    raise ShardError(
        f"{called} was called before on parts of this {kind} ({classes}). Where FSDP2's fully_shard is called on each "
        "block and then on the root, shard() is called once, on the whole model. Build the model anew and call "
        f"towpath.shard(model, {strategy!r}, units=[{classes}])."
    )


def attach_api(model: nn.Module, engine: Engine) -> None:
    """Add the methods of `ShardedModule` to the class of `model`, and connect it with its engine."""
    add_mixin(model, PretrainedModule if hasattr(type(model), "save_pretrained") else ShardedModule)
    object.__setattr__(model, "towpath_engine", engine)
    register_known_methods(model)
