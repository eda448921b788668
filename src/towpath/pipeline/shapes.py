"""What stages hand on: found out by running each without values, so that no step has to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from towpath.core.formats import Precision, dtype_name
from towpath.core.pipeline import Compression
from towpath.core.schedule import transport_for
from towpath.core.transport import matrix_of
from towpath.engine.layout import torch_dtype
from towpath.engine.parameters.parallel import local_part, parallel_of
from towpath.errors import ShardError, StepError

Tensors = tuple[torch.Tensor, ...]


def outputs_without_values(module: nn.Module, inputs: Sequence[torch.Tensor], precision: Precision) -> Tensors:
    """What `module` makes of `inputs`, on the meta device."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            dtype = tensor.dtype
            if not isinstance(tensor, nn.Parameter):
                return torch.empty(tensor.shape, dtype=dtype)
            if dtype.is_floating_point:
                dtype = torch_dtype(precision.compute_dtype(dtype_name(dtype)))
            made, parallel = torch.empty(local_part(tensor).shape, dtype=dtype), parallel_of(tensor)
            return made if parallel is None else parallel.wrap(made)

        state = {name: fake(t) for name, t in (*module.named_parameters(), *module.named_buffers())}
        found = functional_call(module, state, tuple(torch.empty(t.shape, dtype=t.dtype) for t in inputs))
    outputs = found if isinstance(found, (tuple, list)) else (found,)
    if not all(isinstance(t, torch.Tensor) for t in outputs):
        raise ShardError(
            f"a stage hands on {', '.join(type(t).__name__ for t in outputs)}: expected a tensor, or a tuple of them."
        )
    return tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in outputs)


def handed_on(
    modules: Mapping[int, nn.Module],
    owners: Sequence[int],
    example: Tensors,
    precision: Precision,
    group: dist.ProcessGroup,
) -> list[Tensors]:
    """What each stage is called with, and at last what comes out, with gradients: on every rank, or on every rank an
    error. `modules`: this rank's; `owners`: by stage, the rank of the group that has it."""
    found = [tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in example)]
    for index, owner in enumerate(owners):
        outputs, failure = _attempted(modules[index], found[-1], precision) if index in modules else ((), None)
        told: list[Any] = [([(tuple(t.shape), dtype_name(t.dtype)) for t in outputs], str(failure or ""))]
        dist.broadcast_object_list(told, group=group, group_src=owner)
        shapes, error = told[0]
        if error:
            raise ShardError(f"stage {index}, called with {described(found[-1])}: {error}") from failure
        found.append(tuple(torch.empty(shape, dtype=torch_dtype(dtype), device="meta") for shape, dtype in shapes))
    return [_with_gradients(tensors) for tensors in found]


def check_batch(batch: Sequence[torch.Tensor], example: Tensors, micro_batches: int) -> None:
    """Stages know beforehand what they hand on: every batch is cut into micro-batches of the example's shape."""
    expected = [(micro_batches * t.shape[0], *t.shape[1:]) if t.dim() else () for t in example]
    _check_tensors(batch, "a batch")
    got = [tuple(t.shape) for t in batch]
    for index, (tensor, like) in enumerate(zip(batch, example, strict=False)):
        if tensor.dtype != like.dtype and (tensor.dtype.is_floating_point or like.dtype.is_floating_point):
            raise StepError(
                f"a batch whose tensor {index} is {dtype_name(tensor.dtype)}: expected {dtype_name(like.dtype)}, as of "
                "the example."
            )
    if got != expected:
        raise StepError(
            f"a batch of {', '.join(map(_sizes, got)) or 'nothing'}: expected {', '.join(map(_sizes, expected))}, "
            f"which is {micro_batches} micro-batches of the example's shape. Shapes are the same in every step: pad "
            "what is shorter, or make another Pipeline."
        )


def check_target(target: torch.Tensor | None, rows: Set[int], micro_batches: int) -> None:
    """`rows`: of a micro-batch, in the example or in what the last stage returns."""
    expected = " or ".join(str(micro_batches * each) for each in sorted(rows))
    if target is None:
        raise StepError(f"no target: expected one of {expected} rows on the rank of the last stage. Pass target=.")
    _check_tensors([target], "a target")
    if not target.dim() or target.shape[0] not in {micro_batches * each for each in rows}:
        raise StepError(
            f"a target of {_sizes(target.shape) or 'no dimension'}: expected {expected} rows, for {micro_batches} "
            "micro-batches of the example's shape. Pass a target that is as long as the batch."
        )


def _check_tensors(given: Sequence[object], what: str) -> None:
    if other := next((type(each).__name__ for each in given if not isinstance(each, torch.Tensor)), ""):
        raise StepError(f"{what} with a {other}: expected tensors.")


def check_exchanged(between: Sequence[Tensors], compression: Compression) -> None:
    """Of what goes between any two stages: known to all ranks, so that all refuse alike."""
    exchanged = [tensor for tensors in between for tensor in tensors]
    for tensor in exchanged:
        for transport in (compression.activations, compression.activation_gradients):
            transport_for(dtype_name(tensor.dtype), transport)
    floating = [tuple(tensor.shape) for tensor in exchanged if tensor.dtype.is_floating_point]
    for transport in (compression.activations, compression.activation_gradients):
        if (
            floating
            and transport.low_rank is not None
            and not any(transport.low_rank.pays(shape) for shape in floating)
        ):
            rows, columns = matrix_of(max(floating, key=prod))
            raise ShardError(
                f"Pipeline: between stages {transport.low_rank} sends no less than the tensor itself, of {rows} × "
                f"{columns} "
                f"elements at most. Take a rank below "
                f"{rows * columns / (rows + columns) / transport.low_rank.rate:.0f}, or "
                "leave it out."
            )


def _sizes(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _attempted(module: nn.Module, inputs: Tensors, precision: Precision) -> tuple[Tensors, Exception | None]:
    try:
        return outputs_without_values(module, inputs, precision), None
    except Exception as error:  # whatever the user's module raises
        return (), error


def described(tensors: Tensors) -> str:
    return ", ".join(f"{'×'.join(map(str, t.shape))} {dtype_name(t.dtype)}" for t in tensors)


def _with_gradients(tensors: Tensors) -> Tensors:
    """As stages exchange them: what is of a floating dtype gets a gradient back."""
    return tuple(t.detach().requires_grad_(t.dtype.is_floating_point) for t in tensors)
