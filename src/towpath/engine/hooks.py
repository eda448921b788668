"""Where PyTorch calls the engine: module hooks around a unit's forward, autograd hooks around its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from towpath.engine.executor import Engine
from towpath.engine.unit import Bucket, Unit, Use


def attach(engine: Engine, compute_dtype: torch.dtype | None) -> None:
    """Let `engine` run with the model. `compute_dtype`: what floating inputs of a unit are cast to."""
    for unit in engine.units:
        forward = _Forward(engine, unit, compute_dtype)
        unit.module.register_forward_pre_hook(forward.before, prepend=True, with_kwargs=True)
        # Also after an exception: the modules must get their ShardTensors back.
        unit.module.register_forward_hook(forward.after, with_kwargs=True, always_call=True)
        for bucket in unit.trainable:
            for index, view in enumerate(bucket.views):
                view.register_post_accumulate_grad_hook(_arrival(engine, unit, bucket, index))


@final
class _Forward:
    """Around the forward of one unit."""

    def __init__(self, engine: Engine, unit: Unit, compute_dtype: torch.dtype | None) -> None:
        self._engine, self._unit, self._compute_dtype = engine, unit, compute_dtype
        self._open: list[Use | None] = []  # one for each forward under way: a unit may call itself

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self._engine.before_forward(self._unit)
        # A recomputation of a use whose backward pass is under way is part of that use.
        follows = torch.is_grad_enabled() and not any(u.running for u in self._unit.uses)
        use = Use(self._unit) if follows else None
        self._open.append(use)
        inputs: list[torch.Tensor] = []

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            if self._compute_dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self._compute_dtype)
            if use is None or not tensor.requires_grad:
                return tensor
            # A view of its own, so that this unit is known to be done before the one that made the tensor begins.
            inputs.append(tensor.view_as(tensor))
            return inputs[-1]

        args, kwargs = tree_map_only(torch.Tensor, enter, (args, kwargs))
        if use is not None:
            use.inputs = len(inputs)
            for tensor in inputs:
                tensor.register_hook(partial(self._engine.left_for_input, use))
        return args, kwargs

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        use = self._open.pop() if self._open else None
        outputs = [t for t in _tensors(output) if t.requires_grad]
        if use is not None and outputs:
            # Tensor hooks of our own: those of register_multi_grad_hook keep a graph alive that is never walked.
            for tensor in outputs:
                tensor.register_hook(partial(self._engine.reached_output, use))
        elif use is not None:
            self._unit.uses.discard(use)
        self._engine.after_forward(self._unit, graph_follows=use is not None and bool(outputs))


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
