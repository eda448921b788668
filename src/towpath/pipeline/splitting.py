"""A model as stages: `split` cuts it between its blocks, and `DescribedStages` describes the stages to the planner.

`split` does not know what the model computes around its blocks. A stage runs the model's own forward. Stand-ins replace
the modules before the blocks in every stage but the first, and those after the blocks in every stage but the last. The
first block's input is the output of the previous stage. All else runs in every stage, such as making positions and
masks from the shape of the input. Parameters keep their names.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import nn

from towpath.core.formats import Precision
from towpath.core.passes import balanced
from towpath.core.units import BucketSpec, UnitSpec
from towpath.engine.layout import BucketLayout, UnitLayout, lay_out
from towpath.errors import ShardError
from towpath.pipeline.agreement import forward_without_values, meta_outputs
from towpath.plan.model import LinearSeconds, MeasuredPasses, Model, ModelUnit, StagedModel


def split(model: nn.Module, count: int, example: torch.Tensor) -> list[nn.Module]:
    """Split `model` into `count` stages with about the same number of parameters each.

    The stages share the memory of the model's parameters.

    Args:
        model: The model, with a row of blocks of one class in a ModuleList or Sequential.
        count: The number of stages, at most the number of blocks.
        example: An input of the model, such as tokens. Only its shape and dtype matter.

    Returns:
        The stages in order, for `Pipeline`.

    Raises:
        ShardError: The model has too few blocks, or they do not run one after the other.
    """
    return _split_at(model, _blocks_in(model, lay_out(model)), count, example)


def blocks_of_stage(stage: object) -> str:
    """Return the blocks that a stage has of the model that was split, as text. Other stages have ""."""
    return f"{stage.first_block} to {stage.last_block}" if isinstance(stage, _SplitStage) else ""


def _split_at(model: nn.Module, blocks: Sequence[str], count: int, example: torch.Tensor) -> list[nn.Module]:
    """Split `model` between its `blocks`, which are given by name."""
    if not 0 < count <= len(blocks):
        raise ShardError(f"split: {count} stages of a model that has {len(blocks)} blocks.")
    order = _call_order(model, blocks, example)

    def numel(*names: str) -> int:
        return sum(p.numel() for name in names for p in model.get_submodule(name).parameters())

    weights = [numel(name) for name in blocks]
    if len(weights) > 1:
        weights[0] += numel(*order.before)
        weights[-1] += numel(*order.after)
    return [_SplitStage(model, blocks[start:end], blocks, order) for start, end in balanced(weights, count)]


@dataclass(frozen=True, slots=True)
class _CallOrder:
    """The order in which a model calls its modules.

    `before` and `after` are the modules with parameters that run before the first block and after the last one.
    `outputs` has the output shape of each module in `before`. `wrapped` is set if blocks return a tuple.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    outputs: dict[str, torch.Size]
    wrapped: bool


def _call_order(model: nn.Module, blocks: Sequence[str], example: torch.Tensor) -> _CallOrder:
    """Return the order of a forward on tensors without values, or raise if it is no row of blocks."""
    calls: list[tuple[str, Any]] = []  # each module that was called, with its output

    def recording(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, output: calls.append((name, output))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            inside_a_block = any(name.startswith(f"{block}.") for block in blocks)
            has_parameters = next(module.parameters(recurse=False), None) is not None
            if name in blocks or (has_parameters and not inside_a_block):
                hooks.callback(module.register_forward_hook(recording(name)).remove)
        forward_without_values(model, [example], Precision())

    called = [name for name, _ in calls]
    seen = [name for name in called if name in blocks]
    if seen != list(blocks):
        raise ShardError(f"split: the blocks run in the order {', '.join(seen)}, not one after the other.")
    first, last = called.index(blocks[0]), called.index(blocks[-1])
    if between := [name for name in called[first:last] if name not in blocks]:
        raise ShardError(f"split: {between[0]} has parameters and runs between two blocks: give the stages yourself.")
    outputs = {name: output.shape for name, output in calls[:first]}
    return _CallOrder(tuple(outputs), tuple(called[last + 1 :]), outputs, isinstance(calls[first][1], tuple))


class _SplitStage(nn.Module):
    """Some blocks of a model that was split. Its modules have their names in the model."""

    def __init__(self, model: nn.Module, mine: Sequence[str], blocks: Sequence[str], order: _CallOrder) -> None:
        super().__init__()
        self.first_block, self.last_block = mine[0], mine[-1]
        self._first, self._last = mine[0] == blocks[0], mine[-1] == blocks[-1]
        # A copy of the modules around the same parameters and buffers. Replacing modules in it does not change `model`.
        copied = copy.deepcopy(model, memo={id(t): t for t in (*model.parameters(), *model.buffers())})
        for name in blocks:
            if name not in mine:
                copied.set_submodule(name, _SkippedBlock(order.wrapped))
        for name in () if self._first else order.before:
            copied.set_submodule(name, _EmptyOutput(order.outputs[name]))
        for name in () if self._last else order.after:
            copied.set_submodule(name, nn.Identity())
        for name, module in copied.named_children():
            self.add_module(name, module)
        for name, parameter in copied.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in copied.named_buffers(recurse=False):
            self.register_buffer(name, buffer, name not in copied._non_persistent_buffers_set)  # pyright: ignore
        self._model = [copied]  # in a list, because its modules are registered above
        # The name of the module that shares its parameter with the other end of the model, if any.
        self.tied = ""
        if self._first != self._last:
            ends = (order.before, order.after) if self._first else (order.after, order.before)
            self.tied = _tied_module(model, *ends)
        self._received: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        if not self._first:
            copied.get_submodule(mine[0]).register_forward_pre_hook(self._replace_input)
        if not self._last:
            copied.get_submodule(mine[-1]).register_forward_hook(self._keep_output)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the output of the stage's last block, or in the last stage that of the model."""
        if not self._first:
            self._received, x = x, torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
            for module in self._model[0].modules():
                if isinstance(module, _EmptyOutput):
                    module.dtype = self._received.dtype
        found = self._model[0](x)
        if self._last:
            return getattr(found, "logits", found)
        output, self._output, self._received = self._output, None, None
        return output

    def _replace_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._received, *args[1:])

    def _keep_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self._output = output[0] if isinstance(output, tuple) else output


class _SkippedBlock(nn.Module):
    """The stand-in for a block of another stage, which returns its input."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the input, in a tuple if blocks return one."""
        return (x,) if self.wrapped else x


class _EmptyOutput(nn.Module):
    """The stand-in for a module before the blocks. Its output has the same shape, in the dtype of the stage's input."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.dtype = shape, torch.float32

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return zeros in the memory of one element."""
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        return torch.zeros(1, dtype=self.dtype, device=device).expand(self.shape)


def _blocks_in(model: nn.Module, layouts: Sequence[UnitLayout]) -> list[str]:
    """Return the names of the longest row of blocks, among the modules of the units that are blocks."""
    homes = {id(module): name for name, module in model.named_modules()}
    # In lists inside lists, a cut would lose what the model computes between two modules, such as a residual.
    nested = {homes[id(inner)] for outer in model.modules() if isinstance(outer, nn.ModuleList) for inner in outer}
    rows: dict[str, list[str]] = {}
    for name in (homes[id(module)] for unit in layouts[1:] if not unit.spec.leaf for module in unit.modules):
        if (row := name.rpartition(".")[0]) not in nested:
            rows.setdefault(row, []).append(name)
    if not rows:
        raise ShardError("split: the model has no ModuleList or Sequential of like blocks to cut between.")
    return max(rows.values(), key=len)


def _tied_module(model: nn.Module, names: Sequence[str], others: Sequence[str]) -> str:
    """Return which module of `names` shares its parameter with one of `others`, such as tied embeddings, or ""."""
    elsewhere = {id(p) for name in others for p in model.get_submodule(name).parameters()}
    found = [name for name in names if any(id(p) in elsewhere for p in model.get_submodule(name).parameters())]
    if len(found) > 1:
        raise ShardError(f"split: {' and '.join(found)} share parameters with the model's other end: expected one.")
    return found[0] if found else ""


class DescribedStages:
    """The planner's descriptions of a model's stages, for any number of stages. Nothing is measured for them.

    Args:
        layouts: The layouts of the units of `whole`.
        example: An input of one micro-batch, of any size.
    """

    def __init__(
        self,
        whole: Model,
        model: nn.Module,
        layouts: Sequence[UnitLayout],
        example: torch.Tensor,
        precision: Precision,
    ) -> None:
        self._whole, self._model, self._example, self._precision = whole, model, example, precision
        self._blocks = _blocks_in(model, layouts)
        self._unit_of: dict[int, ModelUnit] = {}
        for unit, layout in zip(whole.units, layouts, strict=True):
            self._unit_of |= {id(place.parameter): unit for bucket in layout.buckets for place in bucket.places}

    def __call__(self, count: int) -> StagedModel:
        """Return the description of the model in `count` stages."""
        stages = _split_at(self._model, self._blocks, count, self._example)
        tied: dict[int, int] = {}  # elements of the parameters that the first and the last stage share
        if count > 1:
            last = {id(p) for p in stages[-1].parameters()}
            tied = {id(p): p.numel() for p in stages[0].parameters() if id(p) in last}
        models = [self._stage(number, stage, count, tied) for number, stage in enumerate(stages)]
        first = stages[0] if count > 1 else _split_at(self._model, self._blocks, 2, self._example)[0]
        (output,) = meta_outputs(first, [self._example], self._precision)
        width = output.numel() // self._example.numel()
        return StagedModel(self._whole, tuple(models), width, sum(tied.values()))

    def _stage(self, number: int, stage: nn.Module, count: int, tied: Mapping[int, int]) -> Model:
        root, *others = lay_out(stage, None, self._precision)
        own = [unit for unit in others if not any(id(p.parameter) in tied for b in unit.buckets for p in b.places)]
        units = [self._root_unit(root, number, count, tied), *map(self._unit, own)]
        return Model(f"{self._whole.name}, stage {number}", self._whole.length, tuple(units))

    def _root_unit(self, layout: UnitLayout, number: int, count: int, tied: Mapping[int, int]) -> ModelUnit:
        """Describe the root of a stage. The time of the model's root counts for the last stage alone."""
        own = [_without(bucket, tied) for bucket in layout.buckets]
        spec = UnitSpec("", tuple(bucket for bucket in own if bucket.numels), root=True)
        root = self._whole.units[0]
        if number == count - 1:
            return replace(root, spec=spec)
        no_time = MeasuredPasses(LinearSeconds(0.0, 0.0), LinearSeconds(0.0, 0.0))
        return ModelUnit(spec, 0.0, 0.0, 0.0, measured=None if root.measured is None else no_time)

    def _unit(self, layout: UnitLayout) -> ModelUnit:
        """Describe a unit of a stage by the units of the model that its parameters are in."""
        elements = Counter[ModelUnit]()
        for place in (place for bucket in layout.buckets for place in bucket.places):
            elements[self._unit_of[id(place.parameter)]] += place.numel
        # The memory that one block needs for a moment does not depend on the number of blocks.
        parts = [
            replace(unit.computing(numel / unit.numel), passing=unit.passing, passing_fp32=unit.passing_fp32)
            for unit, numel in elements.items()
        ]
        return replace(reduce(ModelUnit.combined_with, parts), spec=layout.spec, modules=len(layout.modules))


def _without(bucket: BucketLayout, tied: Mapping[int, int]) -> BucketSpec:
    places = [place for place in bucket.places if id(place.parameter) not in tied]
    numels, matrices = (place.numel for place in places), (place.matrix for place in places)
    return replace(bucket.spec, numels=tuple(numels), matrices=tuple(matrices))
