"""A stage's backward pass in two halves: the gradients of its inputs, and later those of its weights.

PyTorch walks the graph (`torch.distributed.pipelining`); what comes of the weights is handed to the engines unit by
unit, as a whole backward pass would. That reads the weights where they lay in the forward pass: they must be whole all
the time, as where a strategy's parameters are not sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import (  # pyright: ignore[reportMissingTypeStubs]
    _get_grad_fn_or_grad_acc,  # pyright: ignore[reportPrivateUsage]
    stage_backward_input,
    stage_backward_weight,
)

from towpath.core.step_state import ForwardPass, in_backward_order
from towpath.engine.executor import Engine
from towpath.engine.parameters.bucket import Bucket
from towpath.engine.parameters.unit import Unit


@dataclass(frozen=True, slots=True)
class HeldBack:
    """What is left to do of a micro-batch: `passes` of each engine, and what PyTorch keeps of the graph, by groups of
    parameters."""

    passes: tuple[tuple[Engine, list[ForwardPass]], ...]
    groups: list[dict[str, Any]]


def can_be_halved(engines: Sequence[Engine]) -> bool:
    return all(bucket.always_whole for engine in engines for unit in engine.units for bucket in unit.buckets)


def input_gradients(
    engines: Sequence[Engine],
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None,
    inputs: Sequence[Any],
) -> tuple[tuple[torch.Tensor | None, ...], HeldBack]:
    """`gradients`: of the outputs; none: the only one is the loss."""
    with ExitStack() as stack:
        held_back = tuple((engine, stack.enter_context(engine.input_gradients_only())) for engine in engines)
        leaves = iter([leaf.view for engine in engines for leaf in _leaves(engine)])
        found, groups = stage_backward_input(list(outputs), _listed(gradients), list(inputs), leaves)
    return found, HeldBack(held_back, groups)


def weight_gradients(held_back: HeldBack) -> None:
    """The rest of it."""
    leaves = {_node(leaf): leaf for engine, _ in held_back.passes for leaf in _leaves(engine)}
    groups = _by_unit(held_back, leaves)

    def compute(unit: Unit) -> None:
        mine = groups.get(id(unit), [])
        found = [leaves[node] for group in mine for node in group["params"]]
        # A parameter that is used twice makes PyTorch walk what lies between, which other groups have walked or will.
        stage_backward_weight(iter([leaf.view for leaf in found]), mine, retain_graph=True)
        for leaf in found:
            gradient, leaf.view.grad = leaf.view.grad, None
            if gradient is not None:
                leaf.engine.gradient(leaf.unit, leaf.bucket, leaf.index, gradient)

    for engine, passes in held_back.passes:
        if passes:  # else it had no part in it
            engine.weight_gradients(passes, compute)


def _by_unit(held_back: HeldBack, leaves: dict[Any, _Leaf]) -> dict[int, list[dict[str, Any]]]:
    """Groups by their unit; those of several units by the one that is computed first."""
    order = [id(unit) for engine, _ in held_back.passes for unit in in_backward_order(engine.units)]
    found: dict[int, list[dict[str, Any]]] = {}
    for group in held_back.groups:
        first = min((id(leaves[node].unit) for node in group["params"]), key=order.index)
        found.setdefault(first, []).append(group)
    return found


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One whole parameter, as autograd knows it."""

    engine: Engine
    unit: Unit
    bucket: Bucket
    index: int
    view: nn.Parameter


def _leaves(engine: Engine) -> Iterator[_Leaf]:
    for unit in engine.units:
        for bucket in unit.trainable:
            for index, view in enumerate(bucket.views):
                if view.requires_grad:
                    yield _Leaf(engine, unit, bucket, index, view)


def _node(leaf: _Leaf) -> Any:
    return _get_grad_fn_or_grad_acc(leaf.view)


def _listed(gradients: Sequence[torch.Tensor] | None) -> list[torch.Tensor] | None:
    return None if gradients is None else list(gradients)
