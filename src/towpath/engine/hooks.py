"""Where PyTorch calls the engine: around a unit's forward, and from autograd around its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, final

import torch
from torch import nn

from towpath.engine.bucket import Bucket
from towpath.engine.executor import Engine
from towpath.engine.unit import Unit, Use


def attach(engine: Engine, compute_dtype: torch.dtype | None) -> None:
    """Let `engine` run with the model. `compute_dtype`: what floating inputs of a unit are cast to."""
    for unit in engine.units:
        for module in unit.modules:
            become(module, UnitModule)
            object.__setattr__(module, "towpath_forward", _Forward(engine, unit, module, compute_dtype))
        for bucket in unit.trainable:
            for index, view in enumerate(bucket.views):
                view.register_post_accumulate_grad_hook(_arrival(engine, unit, bucket, index))


def become(module: nn.Module, role: type[Any]) -> None:
    """Add `role` to the module's class, which keeps its name: libraries look at it."""
    module.__class__ = _with_role(type(module), role)


@cache
def _with_role(cls: type[nn.Module], role: type[Any]) -> type[Any]:
    """One class for all blocks of a model: torch.compile makes a graph for each class, and gives up after eight."""
    return type(cls.__name__, (role, cls), {"__module__": cls.__module__})


class UnitModule(nn.Module):
    """What a unit's module becomes. Its call is wrapped from outside, not hooked: `module.compile()` traces hooks."""

    towpath_forward: _Forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.towpath_forward.run(super().__call__, args, kwargs)


@final
class _Forward:
    """Around the forward of one module of a unit."""

    def __init__(self, engine: Engine, unit: Unit, module: nn.Module, compute_dtype: torch.dtype | None) -> None:
        self._engine, self._unit, self._compute_dtype = engine, unit, compute_dtype
        self._module = weakref.ref(module)

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graph_follows = False
        try:
            self._engine.before_forward(self._unit, self._comes_back())
            # A recomputation of a use whose backward pass is under way is part of that use.
            use = Use(self._unit) if torch.is_grad_enabled() and not self._unit.running else None
            with self._engine.host:
                args, kwargs = self._enter(use, args, kwargs)
            output = call(*args, **kwargs)
            with self._engine.host:
                graph_follows = use is not None and self._leave(use, output)
            return output
        except BaseException as error:
            self._engine.forward_failed(self._unit, error)
            raise
        finally:  # the modules must get their ShardTensors back, also after an exception
            self._engine.after_forward(self._unit, graph_follows)

    def _comes_back(self) -> bool:
        """Whether a backward pass may follow. A reentrant checkpoint runs its forward without a graph, yet it does."""
        module = self._module()
        return torch.is_grad_enabled() or (module is not None and module.training)

    def _enter(self, use: Use | None, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs in the dtype that computes; and where a graph follows, watched for their gradients."""
        watched: list[torch.Tensor] = []
        inside: list[torch.Tensor] = []

        def enter(value: Any) -> Any:
            if type(value) is tuple:
                return tuple(enter(v) for v in value)
            if not isinstance(value, torch.Tensor):
                # Lists, dicts and the like are the caller's, and may be there to be changed: they stay as they are.
                inside.extend(t for t in _tensors(value) if t.requires_grad)
                return value
            tensor = value
            if self._compute_dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self._compute_dtype)
            if use is None or not tensor.requires_grad:
                return tensor
            # A view of its own, so that this unit is known to be done before the one that made the tensor begins.
            watched.append(tensor.view_as(tensor))
            return watched[-1]

        args, kwargs = enter(args), {name: enter(value) for name, value in kwargs.items()}
        if use is not None:
            use.entered = [id(t) for t in (*watched, *inside)]
            watched = watched or inside
            use.inputs = len(watched)
            for tensor in watched:
                tensor.register_hook(partial(self._engine.left_for_input, use))
        return args, kwargs

    def _leave(self, use: Use, output: Any) -> bool:
        """Watch the outputs for the first gradient that reaches them; whether one can."""
        outputs = [t for t in _tensors(output) if t.requires_grad and id(t) not in use.entered]
        use.entered.clear()
        # Tensor hooks of our own: those of register_multi_grad_hook keep a graph alive that is never walked.
        for tensor in outputs:
            tensor.register_hook(partial(self._engine.reached_output, use))
        if not outputs:
            self._unit.uses.discard(use)
        return bool(outputs)


def _arrival(engine: Engine, unit: Unit, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
    # Weakly: the collector does not see through the tensor that keeps this hook, and the model would live for ever.
    its_engine, its_unit, its_bucket = weakref.ref(engine), weakref.ref(unit), weakref.ref(bucket)

    def arrived(view: torch.Tensor) -> None:
        engine, unit, bucket = its_engine(), its_unit(), its_bucket()
        if engine is None or unit is None or bucket is None:
            return  # the model is gone, and only its graph was kept
        grad, view.grad = view.grad, None
        assert grad is not None
        with torch.no_grad():
            engine.gradient(unit, bucket, index, grad)

    return arrived


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts (also ModelOutputs) and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
