"""The methods that `shard` adds to a model's class, and the check that the model allows them.

They are methods because frameworks call them, or FSDP2 has them. All other calls are functions of `towpath`.
"""

from __future__ import annotations

import difflib
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, update_wrapper
from typing import Any, Self, final

import torch
from torch import nn

from towpath.engine.executor import Engine
from towpath.engine.hooks import HookedModule, add_mixin
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


def register_forward_method(module: nn.Module, method: str) -> None:
    """Let `module.method(...)` compute with unsharded parameters, as `module(...)` does.

    Like a forward, the method gathers parameters, so every rank must call it identically. The parameters stay
    unsharded until it returns. Registering a method again has no effect.

    Args:
        module: A model that `shard()` returned, a module inside its root unit, or a unit's module.
        method: The name of the method.

    Raises:
        ShardError: `module` is none of these, or the method does not exist, or it is a generator or a coroutine.
    """
    kind = type(module).__name__
    if not isinstance(module, HookedModule):
        raise ShardError(
            f"register_forward_method: expected a model that towpath.shard() returned, a module of its root, or a "
            f"unit's module; got a {kind}, which is none of these. If it is inside a unit, register a method of that "
            "unit's module, or leave the unit to the root: pass the others as units= to shard()."
        )
    found = getattr(module, method, None)
    if not callable(found):
        known = [name for name in dir(type(module)) if callable(getattr(type(module), name, None))]
        close = difflib.get_close_matches(method, known, n=3, cutoff=0.5)
        meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ShardError(f"register_forward_method: {kind} has no method {method!r}.{meant}")
    if _is_generator_or_coroutine(found):
        raise ShardError(
            f"register_forward_method: {method!r} of {kind} is a generator or a coroutine, and goes on after its call "
            "has returned. Register what it calls, or use `with towpath.full_parameters(model):`."
        )
    if not isinstance(found, _ForwardMethod):
        object.__setattr__(module, method, _ForwardMethod(module, found))


# Methods that libraries call: Hugging Face, PEFT, Diffusers, sentence-transformers and Lightning.
KNOWN_METHODS = (
    "generate",
    "encode",
    "decode",
    "get_text_features",
    "get_image_features",
    "get_audio_features",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
)


def register_known_methods(model: nn.Module) -> None:
    """Register those of `KNOWN_METHODS` that the model has. Skip generators, and modules of such a name."""
    for method in KNOWN_METHODS:
        found = getattr(model, method, None)
        if inspect.ismethod(found) and not _is_generator_or_coroutine(found):
            register_forward_method(model, method)


def _is_generator_or_coroutine(method: Callable[..., Any]) -> bool:
    """Return whether `method` continues after its call has returned: it is a generator or a coroutine."""
    plain = inspect.unwrap(method)
    return inspect.isgeneratorfunction(plain) or inspect.iscoroutinefunction(plain)


@final
class _ForwardMethod:
    """A registered method of a module. Its call unshards the module's unit."""

    def __init__(self, module: nn.Module, found: Callable[..., Any]) -> None:
        # A weak reference: a module that referred to itself would keep its buffers until the garbage collector runs.
        self._module = weakref.ref(module)
        self._bound = getattr(found, "__self__", None) is module
        self._function: Callable[..., Any] = getattr(found, "__func__", found) if self._bound else found
        update_wrapper(self, found)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert isinstance(module, HookedModule)
        call = partial(self._function, module) if self._bound else self._function
        return module.towpath_forward.run_unless_inside(call, args, kwargs)
