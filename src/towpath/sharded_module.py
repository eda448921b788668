"""The methods that `shard` adds to a model's class, and the check that the model allows them.

The functions of the same names in `towpath` call these methods. Type checkers understand the functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Self, TypeVar

import torch
from torch import nn

from towpath.core.collective_log import Call
from towpath.engine.executor import Engine
from towpath.engine.hooks import HookedModule, add_mixin, register_known_methods
from towpath.engine.parameters.full_parameters import reshard, unshard
from towpath.errors import ShardError, StepError

Batch = TypeVar("Batch")

# What a rank has to train on, when the ranks compare it in `join`.
_NONE, _LAST_AGAIN, _ONE = 0, 1, 2


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
        """Return a context for the micro-steps before the last one of an optimizer step.

        Inside, gradients are added up in the G shards. The first backward pass outside sets `.grad` to the sum over the
        micro-steps, as a mean over the ranks. Divide each loss by the number of micro-steps, as in PyTorch.
        """
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
                "made on this rank's device. For shards in host memory pass offload= to shard()."
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

    def join(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield as many batches on each rank as the rank with the most has: `for batch in model.join(loader)`.

        Use it for data that ends sooner on some ranks. A rank whose data has ended gets its last batch again, and takes
        part in the transfers of the others. Its gradients then count as zero, and the mean is still over all ranks.

        Args:
            batches: This rank's batches, at least one.

        Raises:
            StepError: A rank has no batch at all.
        """
        engine, source = self.towpath_engine, iter(batches)
        # Islands exchange weights by the number of steps, so that all of them must make equally many.
        groups, program = engine.comm.job, engine.comm.program
        last: list[Batch] = []
        while True:
            found = list(islice(source, 1))
            mine = _ONE if found else _LAST_AGAIN if last else _NONE
            last = found or last
            with program.shared("join()", Call.PROGRAM):
                everyones = groups.gather_rows(torch.tensor([mine]), program.wait).flatten().tolist()
            if _ONE not in everyones:
                return
            if _NONE in everyones:
                raise StepError(
                    f"rank {groups.rank}: rank {everyones.index(_NONE)} has no batch at all, and cannot repeat its "
                    "last one while the others train. Give every rank at least one batch."
                )
            engine.muted = mine == _LAST_AGAIN
            try:
                yield last[0]
            finally:
                engine.muted = False

    def broadcast_buffers(self, rank: int = 0) -> None:
        """Overwrite each rank's buffers, such as a BatchNorm's running statistics, with those of one rank.

        After `shard` the engine does not change buffers. Those that depend on a rank's data differ between ranks. Call
        this before an evaluation or a checkpoint. Every rank must call it. With outer steps, each island keeps buffers
        of its own.

        Args:
            rank: The rank whose buffers all ranks get, counted inside the island with outer steps. Default: 0.
        """
        for buffer in self.buffers():
            self.towpath_engine.comm.groups.broadcast(buffer, rank)


class PretrainedModule(ShardedModule):
    """The methods of a sharded model that has `save_pretrained`, such as those of transformers and PEFT."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model with full tensors, by the model's own `save_pretrained`. Every rank must call it.

        Rank 0 writes. With `state_dict=`, the ranks whose dict is not empty call the model's own method unchanged.

        Raises:
            CheckpointError: Saving failed on this rank.
            MismatchError: Saving failed on another rank.
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
    taken = [n for n in ("no_sync", "unshard", "reshard", "join", "broadcast_buffers") if hasattr(model, n)]
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
