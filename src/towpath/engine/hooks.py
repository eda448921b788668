"""Where PyTorch calls the engine: module hooks around a unit's forward, autograd hooks around its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_map_only

from towpath.engine.executor import Engine
from towpath.engine.unit import Bucket, Unit, Use


def attach(engine: Engine, compute_dtype: torch.dtype | None) -> None:
    """Let `engine` run with the model. `compute_dtype`: what floating inputs of a unit are cast to."""
    for unit in engine.units:
        unit.module.register_forward_pre_hook(_before(engine, unit, compute_dtype), prepend=True, with_kwargs=True)
        # Also after an exception: the modules must get their ShardTensors back.
        unit.module.register_forward_hook(_after(engine, unit), with_kwargs=True, always_call=True)
        for bucket in unit.trainable:
            for index, view in enumerate(bucket.views):
                view.register_post_accumulate_grad_hook(_arrival(engine, unit, bucket, index))


def _before(engine: Engine, unit: Unit, compute_dtype: torch.dtype | None) -> Callable[..., Any]:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(compute_dtype) if tensor.is_floating_point() else tensor

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine.before_forward(unit)
        if compute_dtype is not None:
            return tree_map_only(torch.Tensor, cast, args), tree_map_only(torch.Tensor, cast, kwargs)
        return None

    return before


def _after(engine: Engine, unit: Unit) -> Callable[..., None]:
    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        outputs = [t for t in _tensors(output) if t.requires_grad] if torch.is_grad_enabled() else []
        # A recomputation of a use whose backward pass is under way is part of that use.
        if outputs and not any(u.running for u in unit.uses):
            _watch(engine, Use(unit), [t for t in _tensors((args, kwargs)) if t.requires_grad], outputs)
        engine.after_forward(unit, graph_follows=bool(outputs))

    return after


def _watch(engine: Engine, use: Use, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Be called when the first gradient reaches the outputs, and when the last has left for the inputs."""

    def begin(_: torch.Tensor) -> None:
        engine.before_backward(use)

    def end(_: Any) -> None:
        engine.after_backward(use)

    register_multi_grad_hook(outputs, begin, mode="any")
    if inputs:
        register_multi_grad_hook(inputs, end, mode="all")


def _arrival(engine: Engine, unit: Unit, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
    def arrived(view: torch.Tensor) -> None:
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
