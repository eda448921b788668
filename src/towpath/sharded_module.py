"""What `shard` adds to a model's class."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from torch import nn

from towpath.engine.executor import Batch, Engine, joined
from towpath.engine.hooks import Entry, add_mixin, register_known_methods
from towpath.engine.parameters.full_parameters import reshard, unshard
from towpath.errors import ShardError


class ShardedModule(nn.Module):
    """What `shard` adds to a model."""

    towpath_engine: Engine
    # Whether it is a part that is sharded by itself on purpose, as the tied embeddings of a pipeline are.
    towpath_apart = False

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """As it was. PyTorch's functions for state dicts begin with it, and are refused where they cannot do it."""
        frame = inspect.currentframe()
        _refuse_state_dict(self.towpath_engine, frame.f_back if frame is not None else None)
        return super().named_children()

    @property
    def _is_accelerate_prepared(self) -> bool:
        """The mark that Accelerate looks for before it wraps a model, and sets afterwards.

        Accelerate's own Accelerator, which transformers' Trainer uses, would leave gradients of whole parameters to
        DistributedDataParallel. Ours calls `admit_accelerate` first.
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
        """What DistributedDataParallel asks of a module before it touches its parameters."""
        raise ShardError(
            f"{_sharded(self)} was given to DistributedDataParallel, which needs whole parameters. Leave out "
            "DistributedDataParallel: the model reduces its gradients itself. In a framework, give the model, before "
            "shard(), to towpath.integrations.accelerate, towpath.integrations.transformers or "
            "towpath.integrations.lightning, with a strategy."
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """For the micro-steps before the boundary: gradients are reduced no further than to their G extent."""
        return self.towpath_engine.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also drops what the micro-steps since the last boundary have accumulated."""
        self.towpath_engine.discard()
        super().zero_grad(set_to_none)

    def unshard(self) -> None:
        """Make all parameters whole, on every rank, until `reshard()`."""
        unshard(self.towpath_engine)

    def reshard(self, *, modifier_rank: int | None = None) -> None:
        """Undo `unshard()`. What was written to the whole parameters, alike on every rank, is kept; or, if one is
        named, what `modifier_rank` has written. Every rank must call it."""
        reshard(self.towpath_engine, modifier_rank)

    def join(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """For data that ends sooner on some ranks: `for batch in model.join(loader)` goes on until the last is through.

        A rank that is through before gets its last batch again and again, and takes part in all that the others do; its
        gradients count as zero, while the mean is still taken over all ranks.
        """
        return joined(self.towpath_engine, batches)

    def broadcast_buffers(self, rank: int = 0) -> None:
        """Every rank's buffers (a BatchNorm's running statistics, say) become those of `rank`. Every rank must call it.

        The engine leaves buffers alone after `shard()`: where they depend on a rank's data, they differ.
        """
        for buffer in self.buffers():
            self.towpath_engine.wiring.groups.broadcast(buffer, rank)


class PretrainedModule(ShardedModule):
    """What `shard` makes of a model that has `save_pretrained`."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As it was, with whole tensors: every rank must call it, and rank 0 writes. With `state_dict=`, as before."""
        from towpath.checkpoint.pretrained import save_pretrained  # with all that checkpoints need

        whole: Any = super()
        return save_pretrained(self, whole.save_pretrained, *args, **kwargs)


def admit_accelerate(model: ShardedModule) -> None:
    """Let an Accelerator prepare `model`: one that knows that it is sharded."""
    model.__dict__.setdefault("_is_accelerate_prepared", False)


def _sharded(model: ShardedModule) -> str:
    return f"{type(model).__name__}, which towpath.shard() has sharded,"


def _refuse_state_dict(engine: Engine, frame: FrameType | None) -> None:
    """PyTorch gathers DTensors only, without a word to others: it would hand out our slices as if they were whole.

    `frame`: the caller's. None of PyTorch's hooks is told of the options.
    """
    while frame is not None and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
        call = frame.f_back.f_code.co_name if frame.f_back is not None else ""
        if frame.f_code.co_name == "_verify_options" and getattr(
            frame.f_locals.get("options"), "full_state_dict", False
        ):
            # Whole tensors can be copied into slices, and inside `full_parameters` the parameters are whole.
            if call == "set_model_state_dict" or (call == "get_model_state_dict" and engine.pinned == engine.units):
                return
            raise ShardError(
                f"PyTorch's own {call}(full_state_dict=True) knows DTensors only. Call towpath.checkpoint.{call} "
                "instead, on every rank: it takes the same arguments."
            )
        frame = frame.f_back


def check_class(model: nn.Module, strategy: str) -> None:
    """Raise if `model`, or a part of it, is sharded already. `strategy`: the name of what it is to be sharded by."""
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
    if isinstance(model, Entry):
        raise ShardError(
            f"the {kind} is a part of a model that is sharded already. Call shard() once, on the whole model. "
            f"units=[{kind}] makes a unit of each {kind}."
        )
    # By name: most programs never import FSDP.
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
    add_mixin(model, PretrainedModule if hasattr(type(model), "save_pretrained") else ShardedModule)
    object.__setattr__(model, "towpath_engine", engine)
    register_known_methods(model)
